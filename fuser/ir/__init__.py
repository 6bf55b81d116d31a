"""The fusion IR: a tensor program as a graph of ops over tensors with iteration domains.

Question: of what does a fusion consist?
Imports: `fuser.support`.
Files, in reading order:

- `types`, `dtypes`: parallel, memory and iteration types; the dtypes of tensors and scalars.
- `pointwise_table`: one row per elementwise op: text, dtype rule, torch, CUDA, domains.
- `statement`: base classes of values and ops; whether a definition is open.
- `op`: the declaration of ops: fields, text template, equality.
- `fusion`: `TensorView` and `Fusion`: the tensors, the ops, inputs and outputs.
- `primitives`: the methods of tensors that schedule and shard: split, merge, reorder, parallelize.
- `fusion_guard`: the fusion that a `with FusionGuard` block builds.
- `naming`, `provenance`: names of tensors and axes for messages; the user's line of each op.
- `axis_graph`: which axes of a fusion are mapped to one another.
- `memory_layout`: sizes, strides and contiguity of a tensor in memory.
- `binding`: computes the values of symbolic extents from the arguments of a call, and checks them.
- `shard_annotation`: `shard(tv, mesh, placements)`, `Shard` and `Replicate`.
- `canonical_form`: structural equality of fusions that differ in numbering alone.
- `verify`: the invariants of a fusion.
"""

# Importing them registers the implementations of `canonical_key` and of `PRIMITIVES`.
from fuser.ir import canonical_form as canonical_form
from fuser.ir import primitives as primitives
