"""The fusion IR: a program as a graph of tensors with iteration domains.

Question: of what consists a fusion?
Imports: `fuser.support`.
Files, in reading order:

- `types`, `dtypes`: parallel, memory and iteration types; the dtypes of tensors and scalars.
- `pointwise_table`: one row per elementwise op: text, dtype rule, torch, CUDA, domains.
- `statement`: what values and ops have in common; whether a definition is open.
- `op`: the declaration of ops: fields, text template, equality.
- `fusion`: `TensorView` and `Fusion`: the tensors, the ops, inputs and outputs.
- `primitives`: the methods of tensors that schedule and shard: split, merge, reorder, parallelize.
- `fusion_guard`: the fusion that a `with FusionGuard` block builds.
- `naming`, `provenance`: names of tensors and axes for messages; the user's line of each op.
- `axis_graph`: which axes of a fusion are mapped to one another.
- `memory_layout`: sizes, strides and contiguity of a tensor in memory.
- `binding`: symbols of extents get their values from arguments; two values for one are refused.
- `shard_annotation`: `shard(tv, mesh, placements)`, `Shard` and `Replicate`.
- `canonical_form`: one form for fusions that differ in numbering alone; structural equality.
- `verify`: the invariants of a fusion.
"""

# They register what fusions and tensors do through them (`canonical_key`, `PRIMITIVES`).
from fuser.ir import canonical_form as canonical_form
from fuser.ir import primitives as primitives
