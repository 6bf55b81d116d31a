"""Names of torch's for what `fd.ops` has under another name, or is written with several ops.

`fd.ops.NAME` raises, and says this; `docs/ops.md` lists it. What stands behind "write" is Python,
statements joined by ", then ", in the names of `fd.ops`.
"""

from __future__ import annotations

from collections.abc import Mapping

from fuser.ir.pointwise_table import POINTWISE

_CAST = "it is called cast, which takes the dtype"
_PERMUTE = "it is called permute, which takes all axes"
_ATTENTION = "it is called sdpfa_fwd, which takes [batch, heads, rows, k]"
_SLICE = "write a slice for each part"
_PARTS = "write broadcast, expand and reshape"
_GIVEN = "communications follow from the meshes and cuts of tensors"

SPELLED: Mapping[str, str] = {
    **{other: f"it is called {row.name}" for row in POINTWISE.values() for other in row.near},
    # ---- other names
    "view": "it is called reshape",
    "flatten": "it is called reshape",
    "unsqueeze": "it is called broadcast, which takes a flag per axis of the result",
    **dict.fromkeys(("transpose", "swapaxes", "movedim", "t", "T"), _PERMUTE),
    **dict.fromkeys(("mm", "bmm", "dot", "mv"), "it is called matmul"),
    **dict.fromkeys(("to", "type", "astype", "float", "double", "half", "bfloat16"), _CAST),
    **dict.fromkeys(("concat", "concatenate"), "it is called cat"),
    **dict.fromkeys(("clone", "contiguous", "copy"), "it is called set, which copies"),
    "amax": "it is called max",
    "amin": "it is called min",
    "arange": "it is called iota, which takes the length",
    "embedding": "it is called embedding_fwd",
    **dict.fromkeys(("sdpa", "scaled_dot_product_attention"), _ATTENTION),
    # ---- elementwise
    "square": "write mul(x, x)",
    "rsub": "write sub(y, x)",
    "floor_divide": "write x // y",
    "leaky_relu": "write where(gt(x, 0.0), x, mul(x, slope))",
    "elu": "write where(gt(x, 0.0), x, expm1(x))",
    "masked_fill": "write where(mask, value, x)",
    # ---- along an axis
    "std": "write sqrt(var(x, [dim]))",
    "norm": "write sqrt(sum(mul(x, x), dim))",
    "any": "write gt(sum(mask, dim), 0)",
    "all": "write eq(sum(mask, dim), n)",
    "argmax": "take the places that topk gives",
    "logsumexp": "write m = max(x, dim, True), then add(max(x, dim), log(sum(exp(x - m), dim)))",
    "batch_norm": "write it with var_mean(x, [0, 2, 3], 0, True), sub, rsqrt and mul",
    "one_hot": "write eq(broadcast(ids, [False, True]), iota(n))",
    # ---- of shapes and products
    "addmm": "write add(matmul(a, b), x)",
    "outer": "write mul(broadcast(a, [False, True]), b)",
    "einsum": "write permute, broadcast, and matmul or mul and sum",
    "zeros": "write full(shape, 0.0, dtype)",
    "ones": "write full(shape, 1.0, dtype)",
    "full_like": "write full(x.shape(), value, x.dtype())",
    "zeros_like": "write full(x.shape(), 0.0, x.dtype())",
    "ones_like": "write full(x.shape(), 1.0, x.dtype())",
    "stack": "write a cat of what broadcast gives a new axis",
    **dict.fromkeys(("split", "chunk", "narrow", "unbind"), _SLICE),
    **dict.fromkeys(("tile", "repeat"), _PARTS),
    **dict.fromkeys(("all_reduce", "allreduce", "all_gather", "allgather"), _GIVEN),
    **dict.fromkeys(("reduce_scatter", "all_to_all"), _GIVEN),
}
