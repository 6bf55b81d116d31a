"""The table of public ops, one row each: the source of `fuser.ops` and of its page of operations.

`scripts/document_ops.py` writes the page. The rows of elementwise ops that add one node are made
from `fuser.ir.pointwise_table`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fuser.ir.fusion import TensorOp
from fuser.ir.ops.attention_ops import SdpaBwdOp, SdpaFwdOp
from fuser.ir.ops.lookup import (
    EmbeddingFwdOp,
    GatherOp,
    IndexPutAccumulateOp,
    IndexSelectOp,
    ScatterOp,
    SelectOp,
    TakeAlongAxisOp,
)
from fuser.ir.ops.matrix_products import GroupedMmaOp, GroupedScalesOp, ScaledMmaOp
from fuser.ir.ops.nodes import (
    BinaryOp,
    BroadcastOp,
    CastOp,
    CatOp,
    ExpandOp,
    FullOp,
    IotaOp,
    LinearOp,
    LoadStoreOp,
    MatmulOp,
    PadOp,
    RandomOp,
    ReductionOp,
    ReshapeOp,
    SliceOp,
    SqueezeOp,
    TernaryOp,
    UnaryOp,
    WelfordOp,
)
from fuser.ir.ops.scan_ops import ArgsortOp, ScanOp, TopKOp
from fuser.ir.pointwise_table import POINTWISE, PUBLIC
from fuser.ops import (
    composites,
    elementwise,
    factories,
    indexing,
    reductions,
    reshaping,
    resize,
    scans,
)
from fuser.ops.attention import sdpfa_bwd, sdpfa_fwd
from fuser.ops.contractions import grouped_mm, linear, matmul, scaled_mm
from fuser.ops.quantize import (
    cutlass_nvfp4_grouped_mm,
    nv_block_quantize,
    nv_grouped_block_quantize,
    preprocess_grouped_matmul_input_sf,
)
from fuser.ops.reshaping import reshape
from fuser.support.record import record


@record
class OpRow:
    """Facts about one public op: one row of the table of ops.

    - `function`: the function that checks the arguments and adds the nodes.
    - `nodes`: the classes of the nodes that a call adds, without casts and broadcasts of operands.
    - `dtype`: the name of a rule in `fuser.ops.elementwise.DTYPE_RULES`.
    - `shape`: a sentence on the shape of the result.
    - `sample`: the kind of operands that tests draw (`tests.support.op_samples`). "" stands for the
      kind in the pointwise table.
    - `takes_scalars`: whether all operands may be scalars; the op then returns a scalar. Other ops
      raise an error for scalars only.
    - `is_implemented`: False for an op that only raises `UnsupportedError`.
    """

    name: str
    function: Callable[..., Any]
    nodes: tuple[type[TensorOp], ...] = ()
    dtype: str = "keep"
    shape: str = ""
    sample: str = "values"
    takes_scalars: bool = False
    is_implemented: bool = True


_BROADCAST = "The operands', aligned at the last axis."
_SAME = "That of the operand."
_REDUCED = "The operand's without the reduced axes; with `keepdim`, they have size 1."
_GIVEN = "`shape`."
_NODES: dict[int, type[TensorOp]] = {1: UnaryOp, 2: BinaryOp, 3: TernaryOp}


def _pointwise(name: str, kind: str, rule: str) -> OpRow:
    arity = POINTWISE[kind].arity
    shape = _SAME if arity == 1 else _BROADCAST
    function = elementwise.ELEMENTWISE[name]
    return OpRow(name, function, (_NODES[arity],), rule, shape, "", takes_scalars=True)


def _composite(
    name: str,
    function: Callable[..., Any],
    nodes: tuple[type[TensorOp], ...],
    dtype: str = "keep",
    shape: str = _SAME,
    sample: str = "values",
) -> OpRow:
    """Returns the row of the table for an op whose operands may all be scalars.

    The result is then a scalar. `nodes` has the classes of all nodes into which such an op may
    expand. The parameters are fields of `OpRow`.
    """
    return OpRow(name, function, nodes, dtype, shape, sample, takes_scalars=True)


def _scan(function: Callable[..., Any], sample: str) -> OpRow:
    nodes = ScanOp, LoadStoreOp, BinaryOp, CastOp
    return OpRow(function.__name__, function, nodes, "keep", _SAME, sample)


_CHOICE = (BinaryOp, TernaryOp)
_PARTS = (UnaryOp, BinaryOp)
_SUMS = (ReductionOp, SqueezeOp, LoadStoreOp, FullOp)
_ROWWISE = (*_SUMS, UnaryOp, *_CHOICE)
_BLOCKS = (ReshapeOp, ReductionOp, *_CHOICE, UnaryOp, LoadStoreOp, FullOp, SqueezeOp)

_ROWS = (
    *(_pointwise(name, kind, rule) for name, (kind, rule) in PUBLIC.items()),
    # Elementwise, of several nodes or with arguments of their own.
    _composite("addcmul", elementwise.addcmul, (BinaryOp,), "default", _BROADCAST, "any_numbers"),
    _composite("cast", elementwise.cast, (CastOp, LoadStoreOp), "given"),
    _composite("clamp", elementwise.clamp, (TernaryOp,), "limits", sample="numbers"),
    _composite(
        "complex", elementwise.complex_, (BinaryOp,), "parts", _BROADCAST, sample="wide_values"
    ),
    _composite("imag", elementwise.imag, (UnaryOp,), "complex", sample="complex_values"),
    _composite(
        "lerp", elementwise.lerp, (TernaryOp, BinaryOp), "default", _BROADCAST, "any_numbers"
    ),
    _composite(
        "logical_right_shift", elementwise.logical_right_shift, _CHOICE, "int", _BROADCAST, "shifts"
    ),
    _composite("real", elementwise.real, (UnaryOp, LoadStoreOp), "part"),
    _composite("set", elementwise.set_, (LoadStoreOp,)),
    _composite("sign", elementwise.sign, (*_CHOICE, LoadStoreOp), sample="real_values"),
    _composite("threshold", elementwise.threshold, (TernaryOp,), "fitting", sample="numbers"),
    OpRow("segment_set", elementwise.segment_set, (LoadStoreOp,), shape=_SAME),
    # Axes in another order, form or number.
    OpRow(
        "broadcast",
        reshaping.broadcast,
        (BroadcastOp,),
        shape="An axis of size 1 is inserted for each True.",
    ),
    OpRow(
        "broadcast_in_dim",
        reshaping.broadcast_in_dim,
        (BroadcastOp, ExpandOp, LoadStoreOp),
        shape=_GIVEN,
    ),
    OpRow(
        "expand",
        reshaping.expand,
        (ExpandOp, LoadStoreOp),
        shape="`shape`, in which -1 keeps the size of an axis; additional sizes add first axes.",
    ),
    OpRow(
        "permute",
        reshaping.permute,
        (LoadStoreOp,),
        shape="Axis i is the operand's axis dims[i].",
        sample="rows",
    ),
    OpRow(
        "reshape",
        reshape,
        (ReshapeOp, BroadcastOp, SqueezeOp, ExpandOp, LoadStoreOp, FullOp),
        shape="`new_shape`, with as many elements as the operand; one size may be -1.",
    ),
    OpRow(
        "squeeze",
        reshaping.squeeze,
        (SqueezeOp, LoadStoreOp),
        shape="The operand's without the axes `dims`, which have size 1.",
        sample="rows",
    ),
    OpRow("stride_order", reshaping.stride_order, (LoadStoreOp,), shape=_SAME),
    OpRow("shape", reshaping.shape, (), "index", "None: the result is no tensor."),
    OpRow("size", reshaping.size, (), "index", "None: the result is no tensor.", "rows"),
    # Parts of tensors, and tensors of parts.
    OpRow(
        "cat",
        resize.cat,
        (CatOp, PadOp, LoadStoreOp, FullOp),
        "equal",
        "The operands' shape; along `dim` the sum of their sizes.",
        "rows",
    ),
    OpRow(
        "pad",
        resize.pad,
        (PadOp, LoadStoreOp, FullOp),
        shape="Left and right widths are added to the last axes; negative ones crop.",
        sample="rows",
    ),
    OpRow(
        "slice",
        resize.slice,
        (SliceOp, LoadStoreOp, FullOp),
        shape="end - start elements of each axis; an end beyond the extent counts as the extent.",
        sample="rows",
    ),
    OpRow("triu", factories.triu, (IotaOp, *_CHOICE), shape=_SAME, sample="matrices"),
    # Tensors from numbers.
    OpRow("full", factories.full, (FullOp,), "given", _GIVEN, "sizes"),
    OpRow("iota", factories.iota, (IotaOp,), "given", "One axis of `length`.", "sizes"),
    OpRow("normal", factories.normal, (RandomOp,), "given", _GIVEN, "sizes"),
    OpRow("rand_like", factories.rand_like, (RandomOp,), "keep_float", _SAME, "floats"),
    OpRow("randn_like", factories.randn_like, (RandomOp,), "keep_float", _SAME, "floats"),
    OpRow("uniform", factories.uniform, (RandomOp,), "given", _GIVEN, "sizes"),
    # Lookups in a table, and writes at indexed positions.
    OpRow(
        "embedding_fwd",
        indexing.embedding_fwd,
        (EmbeddingFwdOp,),
        "indexed",
        "[*i], [v, h] -> [*i, h].",
        "matrices",
    ),
    OpRow("gather", indexing.gather, (GatherOp,), "indexed", "That of the index.", "rows"),
    OpRow(
        "index_select",
        indexing.index_select,
        (IndexSelectOp,),
        "indexed",
        "The operand's shape; along `dim` the size of the index.",
        "rows",
    ),
    OpRow(
        "index_put_accumulate",
        indexing.index_put_accumulate,
        (IndexPutAccumulateOp,),
        "indexed",
        _SAME,
        "any_number_rows",
    ),
    OpRow("scatter", indexing.scatter, (ScatterOp,), "indexed", _SAME, "rows"),
    OpRow(
        "select",
        indexing.select,
        (SelectOp,),
        "indexed",
        "The operand's without `dim`.",
        "rows",
    ),
    OpRow(
        "take_along_axis",
        indexing.take_along_axis,
        (TakeAlongAxisOp,),
        "indexed",
        "The common shape of both operands; along `dim` the size of the index.",
        "rows",
    ),
    # Scans, and elements in order.
    *(_scan(function, "number_rows") for function in (scans.cummax, scans.cummin)),
    *(_scan(function, "any_number_rows") for function in (scans.cumprod, scans.cumsum)),
    OpRow("argsort", scans.argsort, (ArgsortOp, FullOp), "places", _SAME, "real_rows"),
    OpRow(
        "topk",
        scans.topk,
        (TopKOp,),
        "found",
        "The operand's shape, with `k` elements along `dim`.",
        "number_rows",
    ),
    # Reductions.
    OpRow("max", reductions.max, (*_SUMS, *_CHOICE), "keep", _REDUCED, "real_rows"),
    OpRow("min", reductions.min, (*_SUMS, *_CHOICE), "keep", _REDUCED, "real_rows"),
    OpRow("prod", reductions.prod, (*_SUMS, BinaryOp), "sum", _REDUCED, "rows"),
    OpRow("sum", reductions.sum, (*_SUMS, BinaryOp), "sum", _REDUCED, "rows"),
    OpRow("var", reductions.var, (*_SUMS, *_PARTS), "variance", _REDUCED, "any_float_rows"),
    OpRow(
        "var_mean",
        reductions.var_mean,
        (WelfordOp, SqueezeOp, FullOp, UnaryOp, *_CHOICE),
        "wide",
        _REDUCED,
        "any_wide_rows",
    ),
    OpRow(
        "welford",
        reductions.welford,
        (WelfordOp, SqueezeOp, FullOp, *_CHOICE),
        "counts",
        "The operand's without the reduced axes, of all three results.",
        "float_rows",
    ),
    # Functions of torch.nn.functional, which expand into the ops above.
    *(
        OpRow(name, function, nodes, "keep_wide", shape, sample)
        for name, function, nodes, shape, sample in (
            ("softmax", composites.softmax, _ROWWISE, _SAME, "float_rows"),
            ("log_softmax", composites.log_softmax, _ROWWISE, _SAME, "float_rows"),
            ("gelu", composites.gelu, _PARTS, _SAME, "floats"),
            ("dropout", composites.dropout, (RandomOp, BinaryOp, LoadStoreOp), _SAME, "floats"),
            (
                "layer_norm",
                composites.layer_norm,
                (WelfordOp, SqueezeOp, FullOp, UnaryOp, *_CHOICE),
                _SAME,
                "float_rows",
            ),
            ("rms_norm", composites.rms_norm, _ROWWISE, _SAME, "float_rows"),
        )
    ),
    OpRow("mean", composites.mean, (*_SUMS, *_CHOICE), "mean", _REDUCED, "any_float_rows"),
    OpRow(
        "cross_entropy",
        composites.cross_entropy,
        (*_ROWWISE, IotaOp),
        "losses",
        "[C], [N, C] or [N, C, ..] -> the same without C; no axes unless `reduction` is none.",
        "float_rows",
    ),
    # Products and attention.
    OpRow(
        "grouped_mm",
        grouped_mm,
        (GroupedMmaOp,),
        "groups",
        "[m, k], [k, n] -> [g, m, n]; [g, m, k], [k, n] or [m, k], [g, k, n] -> [m, n].",
        "real_factors",
    ),
    OpRow(
        "linear",
        linear,
        (LinearOp, FullOp, BinaryOp),
        "equal",
        "[*i, K], [*w, N, K] -> [*w, *i, N].",
        "factors",
    ),
    OpRow("matmul", matmul, (MatmulOp, FullOp), "equal", "As `torch.matmul`.", "factors"),
    OpRow(
        "scaled_mm",
        scaled_mm,
        (ScaledMmaOp,),
        "scaled",
        "[m, k], [k, n] -> [m, n].",
        "factors",
    ),
    OpRow(
        "sdpfa_bwd",
        sdpfa_bwd,
        (SdpaBwdOp,),
        "attention",
        "The shapes of query, key and value.",
        "heads",
    ),
    OpRow(
        "sdpfa_fwd",
        sdpfa_fwd,
        (SdpaFwdOp,),
        "attention",
        "Query [.., L, E], key [.., S, E], value [.., S, Ev] -> [.., L, Ev], [.., L], [2], [].",
        "heads",
    ),
    OpRow(
        "nv_block_quantize",
        nv_block_quantize,
        (*_BLOCKS, PadOp),
        "blocks",
        "Values: the operand's shape. Scales: [.., k] -> [.., k / 32], or its tiles.",
        "rows",
    ),
    OpRow(
        "nv_grouped_block_quantize",
        nv_grouped_block_quantize,
        (*_BLOCKS, GroupedScalesOp),
        "blocks",
        "Values: the operand's shape. Scales: the tiles of [m, k / 32].",
        "matrices",
    ),
    OpRow(
        "preprocess_grouped_matmul_input_sf",
        preprocess_grouped_matmul_input_sf,
        (GroupedScalesOp,),
        "keep",
        "[m, k], [g], [g] -> [(m + 127 g) // 128 * 128, ceil(k / 4) * 4].",
        "matrices",
    ),
    OpRow("cutlass_nvfp4_grouped_mm", cutlass_nvfp4_grouped_mm, is_implemented=False),
)

# By name. A later row replaces an earlier one of the same name: an op with arguments of its own
# replaces the one that the pointwise table made.
ROWS: dict[str, OpRow] = {row.name: row for row in _ROWS}


# ----------------------------------------------------------------------
# torch's names for ops that `fd.ops` has under another name, or that take several ops.
#
# `fd.ops.NAME` raises an error with this hint, and `docs/reference/operations.md` lists it. The
# text after "write " is Python in the names of `fd.ops`; ", then " separates statements. A test
# runs it.

_CAST = "it is called cast, which takes the dtype"
_PERMUTE = "it is called permute, which takes all axes"
_ATTENTION = "it is called sdpfa_fwd, which takes [batch, heads, rows, k]"
# The exponent is at most 0, so that large x do not overflow.
_SOFTPLUS = "add(maximum(x, 0.0), log1p(exp(neg(abs(x)))))"
_SLICE = "write a slice for each part"
_BY_PARTS = "write broadcast, expand and reshape"
_BY_CUTS = "shard tensors with fuser.shard; the compiler inserts the communication"

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
    **dict.fromkeys(
        ("sdpa", "scaled_dot_product_attention", "scaled_dot_product_flash_attention"), _ATTENTION
    ),
    # ---- elementwise
    "square": "write mul(x, x)",
    "rsub": "write sub(y, x)",
    "floor_divide": "write x // y",
    "leaky_relu": "write where(gt(x, 0.0), x, mul(x, slope))",
    "elu": "write where(gt(x, 0.0), x, expm1(x))",
    "relu6": "write clamp(x, 0.0, 6.0)",
    "softplus": f"write {_SOFTPLUS}",
    "mish": f"write mul(x, tanh({_SOFTPLUS}))",
    "hardswish": "write mul(x, div(clamp(add(x, 3.0), 0.0, 6.0), 6.0))",
    "swiglu": "write mul(silu(gate), up)",
    "geglu": "write mul(gelu(gate), up)",
    "glu": "write mul(a, sigmoid(b)), where a and b are the halves of x",
    "masked_fill": "write where(mask, value, x)",
    # ---- along an axis
    "std": "write sqrt(var(x, [dim]))",
    "norm": "write sqrt(sum(mul(x, x), dim))",
    "any": "write gt(sum(mask, dim), 0)",
    "all": "write eq(sum(mask, dim), n)",
    "argmax": "use the indices that topk(x, 1, dim) returns",
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
    "stack": "give each tensor a new axis with broadcast, then concatenate them with cat",
    **dict.fromkeys(("split", "chunk", "narrow", "unbind"), _SLICE),
    **dict.fromkeys(("tile", "repeat"), _BY_PARTS),
    **dict.fromkeys(("all_reduce", "allreduce", "all_gather", "allgather"), _BY_CUTS),
    **dict.fromkeys(("reduce_scatter", "all_to_all"), _BY_CUTS),
    # ---- of nvFuser and its retired package
    "random_dist": "it is called uniform or normal",
    "scan": "it is called cumsum, cumprod, cummax or cummin",
    "type_as": "it is called cast, as in cast(x, y.dtype())",
    "sum_to_size": "write sum(x, dims, keepdim=True), with the axes of size 1",
    "tensor_sizes": "it is called shape, or size for one axis",
    "at": "write v[i]: a vector is a list of scalars",
    "null": "pass None for an operand that is absent",
    "print": "print(fd.fusion.print_math()) shows the ops, and an output shows values",
}
