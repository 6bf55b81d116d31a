"""Passes that rewrite the statements of a kernel.

Question: how are the statements of a kernel made correct, and then faster?
Imports: `fuser.lower`, except its pipeline.
Files, in reading order:

- `synchronize`: barriers between writes and reads of shared memory.
- `hoist`, `unroll`: common subexpressions and loop invariants; unrolled loops.
- `load_order`: prefetches of the next row, direction of loops, repeated conversions where they
  are cheap.
- `vector_loads`: aligned vector loads for rows that begin at any address; rows whose length is no
  multiple of a vector.
- `batched_welford`: mean and variance of several values at a time.
- `cpu_loops`: loops for a CPU: sums in blocks, vectors.
- `launch_grid`: horizontal fusion of several kernels into one launch; grids with more CUDA blocks
  than the device accepts.
"""
