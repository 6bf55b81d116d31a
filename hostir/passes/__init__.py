"""Compiler passes that change a host program after lowering has made the program.

Question: which ops are inserted after lowering?
Imports: `hostir.ir`, and the packages that it may import.
Files, in reading order:

- `deallocation`: the list of passes; a Deallocate after each last use.
"""
