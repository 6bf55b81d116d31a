"""Passes over the statements of a kernel.

Question: how is a lowered kernel made faster or correct?
Imports: `fuser.lower`, except its pipeline.
Files, in reading order:

- `synchronize`: barriers between writes and reads of shared memory.
- `hoist`, `unroll`: common subexpressions and loop invariants; unrolled loops.
- `load_order`: loads before their uses, direction of loops, repeated conversions where they are
  cheap.
- `vector_loads`: shifted rows read by aligned vector loads; rows whose length is no multiple of a
  vector.
- `batched_welford`: moments of several values at a time.
- `cpu_loops`: loops for a CPU: sums in blocks, vectors.
- `launch_grid`: horizontal fusion of several kernels into one launch; grids folded at the device's
  limits.
"""
