"""The command line `python -m hostir`: prints, checks, runs and explains host programs.

Question: which questions can be asked of a program's text?
Imports: every room of `hostir`.
Files, in reading order:

- `cli`: the commands; also compares two programs.
- `run_text`: runs a program's text on simulated or real ranks.
- `explain`: explains why a tensor is sharded, and which op made a communication necessary.
"""
