"""The command line `python -m hostir`: prints, checks, runs and explains host programs.

Question: what can a user do with a host program that is stored as text?
Imports: every package of `hostir`.
Files, in reading order:

- `cli`: the commands; also compares two programs.
- `run_text`: runs a program's text on simulated or real ranks.
- `alternatives`: the cheapest other communications that make the same change of placement.
- `explain`: explains why a tensor is sharded, and which op made a communication necessary.
"""
