"""Passes over host programs.

Question: which ops and marks are inserted after lowering?
Imports: `hostir.ir` and what it may import.
Files, in reading order:

- `deallocation`: the list of passes; a Deallocate after each last use.
- `memory_hints`: buffers that peers map; kernels that read again what is still in the L2 cache.
"""
