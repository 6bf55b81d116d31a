"""The statement of each kind of op: which call of a definition makes it, of which arguments.

One row per node class; `python_text` spells them. A call that is written makes the same single node
again, because its operands are already what promotion, rank alignment and padding made of them.
"""

from __future__ import annotations

import cmath
from collections.abc import Callable, Mapping
from itertools import takewhile

from fuser.ir.dtypes import DataType
from fuser.ir.fusion import TensorOp
from fuser.ir.ops import lookup, nodes
from fuser.ir.ops.attention_ops import SdpaBwdOp, SdpaFwdOp
from fuser.ir.ops.block_scales import GroupedScalesOp
from fuser.ir.ops.matrix_products import GroupedMmaOp, ProductOp, ScaledMmaOp
from fuser.ir.ops.resizing import CatOp, PadOp, SliceOp
from fuser.ir.ops.scan_ops import ArgsortOp, ScanOp, TopKOp
from fuser.ir.scalar.constructors import Const, Scalar
from fuser.ir.tensor import TensorView
from fuser.ir.types import CacheOp, LoadStoreOpType
from fuser.ops.reduction_table import REDUCTIONS
from fuser.support.errors import UnsupportedError, user_code
from fuser.support.record import record, replace


@record
class PythonCall:
    """`fd.name(*args, **kwargs)`; arguments are tensors, scalars, dtypes, Python values, lists.

    `unused` results follow those of the op.
    """

    name: str
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    unused: int = 0


@record
class ScalarArgument:
    """A scalar as an argument for which no Python number is taken."""

    scalar: Scalar


Statement = Callable[..., PythonCall]
STATEMENTS: dict[type[TensorOp], Statement] = {}

# Nodes that only the compiler makes, in copies of what the user defined.
COMPILED = (nodes.Reshard,)


def _row(*kinds: type[TensorOp]) -> Callable[[Statement], Statement]:
    """Register the statement of node classes."""

    def register(statement: Statement) -> Statement:
        STATEMENTS.update(dict.fromkeys(kinds, statement))
        return statement

    return register


def _ops(name: str, *args: object, **kwargs: object) -> PythonCall:
    return PythonCall(f"ops.{name}", args, kwargs)


def _filled(value: Scalar | None) -> object:
    """Return a number that the op converts to its own dtype, any other scalar as it is."""
    if isinstance(value, Const) and cmath.isfinite(value.value):
        return value.value
    return value


def _given(**optional: tuple[object, object]) -> dict[str, object]:
    """Return the arguments (value, default) that are not their defaults."""
    return {name: value for name, (value, default) in optional.items() if value != default}


def stride_order_of(tv: TensorView) -> list[int] | None:
    """Return the rank by stride of each logical axis, where an order of their own is declared."""
    logical, order = tv.domain.logical_numbers, tv.domain.allocation_numbers
    if order == logical or sorted(order) != sorted(logical):
        return None
    return [len(order) - 1 - order.index(n) for n in logical]


def is_stride_order(op: nodes.LoadStoreOp) -> bool:
    """Whether a copy is one into a memory order of its own."""
    domain = op.out.domain
    is_whole = op.kind is LoadStoreOpType.set and not domain.root_numbers
    return is_whole and stride_order_of(op.out) is not None and False not in domain.contiguity


# ------------------------------------------------------------------ elementwise
@_row(nodes.UnaryOp)
def _unary(op: nodes.UnaryOp) -> PythonCall:
    return _ops(op.kind, op.inp)


@_row(nodes.CastOp)
def _cast(op: nodes.CastOp) -> PythonCall:
    return _ops("cast", op.inp, dtype=op.out.dtype())


@_row(nodes.BinaryOp)
def _binary(op: nodes.BinaryOp) -> PythonCall:
    return _ops(op.kind, op.lhs, op.rhs)


@_row(nodes.TernaryOp)
def _ternary(op: nodes.TernaryOp) -> PythonCall:
    return _ops(op.kind, op.a, op.b, op.c)


# ------------------------------------------------------------------ factories
@_row(nodes.FullOp)
def _full(op: nodes.FullOp) -> PythonCall:
    return _ops("full", shape=op.shape, fill_value=_filled(op.value), dtype=op.out.dtype())


@_row(nodes.IotaOp)
def _iota(op: nodes.IotaOp) -> PythonCall:
    ends = _given(start=(_filled(op.start), 0), step=(_filled(op.step), 1))
    return _ops("iota", op.length, **ends, dtype=op.out.dtype())


def _is_like(tv: TensorView, op: nodes.RandomOp) -> bool:
    return tv.dtype() is op.out.dtype() and tuple(tv.shape()) == op.shape


@_row(nodes.RandomOp)
def _random(op: nodes.RandomOp) -> PythonCall:
    dtype = op.out.dtype()
    if op.a is None:
        # Such an op takes the shape of a tensor that was there, and does not read it.
        before = takewhile(lambda t: t is not op.out, op.out.fusion.tensors())
        tv = next((t for t in before if _is_like(t, op)), None)
        if tv is None or op.seed is not None:
            raise UnsupportedError(f"no statement for {op.out}{user_code(op.where)}")
        return _ops({"uniform": "rand_like", "normal": "randn_like"}[op.kind], tv)
    key = {} if op.seed is None else {"rng_seed": op.seed, "rng_offset": op.offset}
    return _ops(op.kind, _filled(op.a), _filled(op.b), shape=op.shape, **key, dtype=dtype)


# ------------------------------------------------------------------ copies and views
@_row(nodes.LoadStoreOp)
def _copy(op: nodes.LoadStoreOp) -> PythonCall:
    domain = op.out.domain
    if op.kind is LoadStoreOpType.segmenter_set:
        return _ops("segment_set", op.inp)
    if op.kind is not LoadStoreOpType.set or op.cache_op is not CacheOp.unspecified:
        raise UnsupportedError(f"no statement for {op.name} of {op.inp}{user_code(op.where)}")
    if domain.root_numbers:
        places = [domain.root_numbers.index(n) for n in domain.logical_numbers]
        return _ops("permute", op.inp, dims=places)
    if is_stride_order(op):
        return _ops("stride_order", op.inp, stride_order=stride_order_of(op.out))
    return _ops("cast", op.inp, dtype=op.out.dtype())


@_row(nodes.BroadcastOp)
def _broadcast(op: nodes.BroadcastOp) -> PythonCall:
    return _ops("broadcast", op.inp, is_broadcast_dim=op.flags)


@_row(nodes.SqueezeOp)
def _squeeze(op: nodes.SqueezeOp) -> PythonCall:
    dims = [i for i, gone in enumerate(op.flags) if gone]
    axes = op.inp.domain.no_reductions
    is_expanded = any(axes[d].expanded is not None for d in dims)
    return _ops("squeeze", op.inp, dims=dims, **_given(squeeze_expanded=(is_expanded, False)))


@_row(nodes.ExpandOp)
def _expand(op: nodes.ExpandOp) -> PythonCall:
    return _ops("expand", op.inp, shape=op.shape)


@_row(nodes.ReshapeOp)
def _reshape(op: nodes.ReshapeOp) -> PythonCall:
    return _ops("reshape", op.inp, new_shape=op.out.shape())


@_row(SliceOp)
def _slice(op: SliceOp) -> PythonCall:
    return _ops(
        "slice",
        op.inp,
        start_indices=op.starts,
        end_indices=op.stops,
        strides=[1] * len(op.starts),
        manual_normalization=True,
    )


@_row(PadOp)
def _pad(op: PadOp) -> PythonCall:
    pairs = [*zip(op.left, op.right, strict=True)][::-1]
    widths = [w for pair in pairs for w in pair]
    return _ops("pad", op.inp, pad_widths=widths, value=_filled(op.value))


@_row(CatOp)
def _cat(op: CatOp) -> PythonCall:
    return _ops("cat", op.pieces, dim=op.dim, manual_padding=True)


# ------------------------------------------------------------------ lookups
@_row(lookup.SelectOp)
def _select(op: lookup.SelectOp) -> PythonCall:
    return _ops("select", op.table, index=ScalarArgument(op.index), dim=op.dim)


@_row(lookup.IndexSelectOp)
@_row(lookup.TakeAlongAxisOp)
@_row(lookup.GatherOp)
def _along(op: lookup.IndexSelectOp | lookup.TakeAlongAxisOp | lookup.GatherOp) -> PythonCall:
    return _ops(op.name, op.table, op.index, dim=op.dim)


@_row(lookup.EmbeddingFwdOp)
def _embedding(op: lookup.EmbeddingFwdOp) -> PythonCall:
    return _ops("embedding_fwd", op.index, op.table)


@_row(lookup.IndexPutAccumulateOp)
def _index_put(op: lookup.IndexPutAccumulateOp) -> PythonCall:
    return _ops("index_put_accumulate", op.acc, op.index, op.value)


@_row(lookup.ScatterOp)
def _scatter(op: lookup.ScatterOp) -> PythonCall:
    src = ScalarArgument(op.src) if isinstance(op.src, Scalar) else op.src
    return _ops("scatter", op.inp, op.index, src, dim=op.dim)


# ------------------------------------------------------------------ reductions
def _reduced(out: TensorView) -> list[int]:
    return [k for k, a in enumerate(out.domain.maybe_root) if a.is_reduction()]


@_row(nodes.ReductionOp)
def _reduction(op: nodes.ReductionOp) -> PythonCall:
    sums = {"dtype": op.out.dtype()} if op.kind in ("add", "mul") else {}
    return _ops(op.name, op.inp, dims=_reduced(op.out), **sums)


@_row(nodes.WelfordOp)
def _welford(op: nodes.WelfordOp) -> PythonCall:
    return _ops("welford", op.inp, dims=_reduced(op.avg))


# ------------------------------------------------------------------ library ops
@_row(nodes.MatmulOp)
def _matmul(op: nodes.MatmulOp) -> PythonCall:
    return _ops("matmul", op.a, op.b)


@_row(nodes.LinearOp)
def _linear(op: nodes.LinearOp) -> PythonCall:
    return _ops("linear", op.x, op.weight, **_given(bias=(op.bias, None)))


@_row(GroupedMmaOp, ScaledMmaOp)
def _product(op: ProductOp) -> PythonCall:
    given = [tv for field, tv in op.tensors() if field not in ("out", *op.OPTIONAL)]
    if not op.is_scaled:
        return _ops(op.name, *given)
    optional = {field: (getattr(op, field), None) for field in op.OPTIONAL}
    return replace(_ops(op.name, *given, **_given(**optional), dtype=op.out.dtype()), unused=2)


@_row(GroupedScalesOp)
def _grouped_scales(op: GroupedScalesOp) -> PythonCall:
    return _ops(op.name, op.inp, op.input_offsets, op.output_offsets)


@_row(SdpaFwdOp)
def _sdpa_fwd(op: SdpaFwdOp) -> PythonCall:
    options = _given(
        bias=(op.bias, None),
        mask=(op.mask, None),
        dropout_p=(op.dropout_p, Const(0.0, DataType.Double)),
        is_causal=(op.is_causal, Const(False, DataType.Bool)),
        scale=(op.scale, None),
        enable_gqa=(op.enable_gqa, False),
    )
    return _ops("sdpfa_fwd", op.query, op.key, op.value, **options)


@_row(SdpaBwdOp)
def _sdpa_bwd(op: SdpaBwdOp) -> PythonCall:
    read = op.grad_output, op.query, op.key, op.value, op.attended, op.log_sumexp
    return _ops(
        "sdpfa_bwd",
        *read,
        dropout_p=op.dropout_p,
        is_causal=op.is_causal,
        philox_seed=op.philox_seed,
        philox_offset=op.philox_offset,
        scale=op.scale,
        **_given(enable_gqa=(op.enable_gqa, False)),
    )


# ------------------------------------------------------------------ scans and sorts
@_row(ScanOp)
def _scan(op: ScanOp) -> PythonCall:
    usual = Const(REDUCTIONS[op.kind].identity(op.out.dtype()), op.out.dtype())
    init = {} if op.init == usual else {"init": ScalarArgument(op.init)}
    return _ops(op.name, op.inp, dim=op.dim, **init)


@_row(ArgsortOp)
def _argsort(op: ArgsortOp) -> PythonCall:
    flags = _given(descending=(op.descending, False), stable=(op.stable, False))
    return _ops("argsort", op.inp, dim=op.dim, **flags)


@_row(TopKOp)
def _topk(op: TopKOp) -> PythonCall:
    flags = _given(dim=(op.dim, -1), largest=(op.largest, True), sorted=(op.sorted, False))
    return _ops("topk", op.inp, ScalarArgument(op.k), **flags)
