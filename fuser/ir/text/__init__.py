"""The text of fusions: printing and parsing.

Question: how is a fusion written as text and read back?
Imports: `fuser.support` and the rest of `fuser.ir`.
Files, in reading order:

- `printer`: fusion to text.
- `parser`: text to fusion.
"""
