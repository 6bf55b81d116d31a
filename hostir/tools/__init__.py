"""The command line: `python -m hostir`.

Question: which questions can be asked of a program's text?
Imports: every room of `hostir`.
Files, in reading order:

- `cli`: the commands, the difference of two programs among them.
- `run_text`: a program's text run on simulated or real ranks.
- `explain`: why a tensor is sharded and a communication is there.
"""
