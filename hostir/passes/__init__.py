"""Compiler passes that change a host program after lowering has made the program.

Question: how is a host program changed after lowering?
Imports: `hostir.ir`, and the packages that `hostir.ir` may import.
Files, in reading order:

- `deallocation`: the list of passes; a Deallocate after each last use.
"""
