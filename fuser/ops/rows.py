"""The public ops, one row each; `fuser.ops` and `docs/ops.md` are made from them.

An elementwise op of one node has its row in `fuser.ir.pointwise_table`, and is here as others see
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fuser.ir.fusion import TensorOp
from fuser.ir.ops.attention_ops import SdpaBwdOp, SdpaFwdOp
from fuser.ir.ops.block_scales import GroupedScalesOp
from fuser.ir.ops.lookup import (
    EmbeddingFwdOp,
    GatherOp,
    IndexPutAccumulateOp,
    IndexSelectOp,
    ScatterOp,
    SelectOp,
    TakeAlongAxisOp,
)
from fuser.ir.ops.matrix_products import GroupedMmaOp, ScaledMmaOp
from fuser.ir.ops.nodes import (
    BinaryOp,
    BroadcastOp,
    CastOp,
    ExpandOp,
    FullOp,
    IotaOp,
    LinearOp,
    LoadStoreOp,
    MatmulOp,
    RandomOp,
    ReductionOp,
    ReshapeOp,
    SqueezeOp,
    TernaryOp,
    UnaryOp,
    WelfordOp,
)
from fuser.ir.ops.resizing import CatOp, PadOp, SliceOp
from fuser.ir.ops.scan_ops import ArgsortOp, ScanOp, TopKOp
from fuser.ir.pointwise_table import POINTWISE, PUBLIC
from fuser.ops import (
    composites,
    elementwise,
    factories,
    indexing,
    random,
    reductions,
    resize,
    scans,
    views,
)
from fuser.ops.attention import sdpfa_bwd, sdpfa_fwd
from fuser.ops.contractions import linear, matmul
from fuser.ops.grouped import grouped_mm
from fuser.ops.quantize import (
    cutlass_nvfp4_grouped_mm,
    nv_block_quantize,
    nv_grouped_block_quantize,
    preprocess_grouped_matmul_input_sf,
)
from fuser.ops.reshaping import reshape
from fuser.ops.scaled import scaled_mm
from fuser.support.record import record


@record
class OpRow:
    """Facts about one public op.

    `nodes` are the classes of what it appends; casts and broadcasts of operands go without saying.
    `dtype` names a rule of `fuser.ops.dtype_rules`, `shape` says the shape of the result, `sample`
    names what may be drawn (`fuser.ops.samples`; "": what the elementwise row says). With scalars
    alone, an op that `takes_scalars` gives a scalar; the others refuse them.
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
_GIVEN = "The one that is given."
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
    """Return the row of an op that takes tensors and scalars alike."""
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
        views.broadcast,
        (BroadcastOp,),
        shape="An axis of size 1 is inserted for each True.",
    ),
    OpRow(
        "broadcast_in_dim",
        views.broadcast_in_dim,
        (BroadcastOp, ExpandOp, LoadStoreOp),
        shape=_GIVEN,
    ),
    OpRow(
        "expand",
        views.expand,
        (ExpandOp, LoadStoreOp),
        shape="The one that is given, -1 keeping an axis; more sizes than axes prepend axes.",
    ),
    OpRow(
        "permute",
        views.permute,
        (LoadStoreOp,),
        shape="Axis i is the operand's axis dims[i].",
        sample="rows",
    ),
    OpRow(
        "reshape",
        reshape,
        (ReshapeOp, BroadcastOp, SqueezeOp, ExpandOp, LoadStoreOp, FullOp),
        shape="The one that is given, with as many elements; one size may be -1.",
    ),
    OpRow(
        "squeeze",
        views.squeeze,
        (SqueezeOp, LoadStoreOp),
        shape="The operand's without the given axes, which have size 1.",
        sample="rows",
    ),
    OpRow("stride_order", views.stride_order, (LoadStoreOp,), shape=_SAME),
    OpRow("shape", views.shape, (), "index", "No tensor."),
    OpRow("size", views.size, (), "index", "No tensor.", "rows"),
    # Parts of tensors, and tensors of parts.
    OpRow(
        "cat",
        resize.cat,
        (CatOp, PadOp, LoadStoreOp, FullOp),
        "equal",
        "The operands' but for `dim`, where sizes add up.",
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
        shape="end - start elements of each axis, clamped to what there is.",
        sample="rows",
    ),
    OpRow("triu", factories.triu, (IotaOp, *_CHOICE), shape=_SAME, sample="matrices"),
    # Tensors from numbers.
    OpRow("full", factories.full, (FullOp,), "given", _GIVEN, "sizes"),
    OpRow("iota", factories.iota, (IotaOp,), "given", "One axis of `length`.", "sizes"),
    OpRow("normal", random.normal, (RandomOp,), "given", _GIVEN, "sizes"),
    OpRow("rand_like", random.rand_like, (RandomOp,), "keep_float", _SAME, "floats"),
    OpRow("randn_like", random.randn_like, (RandomOp,), "keep_float", _SAME, "floats"),
    OpRow("uniform", random.uniform, (RandomOp,), "given", _GIVEN, "sizes"),
    # Tensors read, and written, where an index says.
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
        "The operand's but for `dim`, which has the size of the index.",
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
        "Both operands' but for `dim`, where it is the index's.",
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
        "The operand's but for `dim`, which has `k` elements.",
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
    # Of torch.nn.functional, which expand into those above.
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
        "[C], [N, C] or [N, C, ..] -> that without C; no axes, where they are reduced.",
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
        "Those of query, key and value.",
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
        "That of the operand; [.., k] -> [.., k / 32], or its tiles.",
        "rows",
    ),
    OpRow(
        "nv_grouped_block_quantize",
        nv_grouped_block_quantize,
        (*_BLOCKS, GroupedScalesOp),
        "blocks",
        "That of the operand; the tiles of [m, k / 32].",
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

# By name; an op with arguments of its own stands in the place of the one that has none.
ROWS: dict[str, OpRow] = {row.name: row for row in _ROWS}
