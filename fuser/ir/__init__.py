"""The fusion IR: a tensor program as a graph of ops on tensors, and the axes of these tensors.

Question: what does a fusion consist of?
Imports: `fuser.support`.
Files, in reading order:

- `types`, `dtypes`: parallel, memory and iteration types; the dtypes of tensors and scalars.
- `pointwise_table`: one row per elementwise op: names, dtype rule, torch function, CUDA text.
- `statement`: base classes of values and ops; whether a definition is open.
- `op`: the declaration of ops: fields, text template, equality.
- `fusion`: `TensorView` and `Fusion`: the tensors, the ops, inputs and outputs.
- `primitives`: the methods of tensors that rewrite the fusion: `cache_after`, `rfactor` and others.
- `fusion_guard`: the fusion that a `with FusionGuard` block builds.
- `naming`, `provenance`: names of tensors and axes for messages; the reasons of shardings.
- `axis_graph`: which axes of a fusion's tensors are the same axis.
- `memory_layout`: sizes, strides and contiguity of a tensor in memory.
- `binding`: computes the values of symbolic extents from the arguments of a call, and checks them.
- `shard_annotation`: `shard(tv, mesh, placements)`, `Shard` and `Replicate`.
- `canonical_form`: equality of fusions that differ only in the numbers of tensors and axes.
- `verify`: the rules that hold for every correct fusion.
"""

# Importing them registers the implementations of `canonical_key` and of `PRIMITIVES`.
from fuser.ir import canonical_form as canonical_form
from fuser.ir import primitives as primitives
