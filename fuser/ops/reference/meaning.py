"""The meaning of each op as torch calls: the reference for tests, and the code of library ops (ops
that torch computes).

`evaluate_op` computes one op on tensors without reduction axes. An expanded axis of the fusion is
an expanded axis in torch, and a broadcast axis has size 1. View ops return torch views if torch can
make views.

- With a float `dtype`, every floating computation is carried out in this dtype. An explicit cast
  also rounds to the dtype of the cast.
- Without `dtype`, each op computes as a kernel does. Half, BFloat16 and Float8 operands are
  computed in float32, and the result is rounded to the dtype of the tensor in the fusion.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Literal

import torch

from fuser.ir.binding import bind_inputs
from fuser.ir.dtypes import FLOAT8, HALF_LIKE, DataType, is_complex, is_inexact, to_torch
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.ops import nodes
from fuser.ir.ops.attention_ops import SdpaBwdOp, SdpaFwdOp
from fuser.ir.ops.lookup import (
    EmbeddingFwdOp,
    GatherOp,
    IndexPutAccumulateOp,
    IndexSelectOp,
    LookupOp,
    ScatterOp,
    SelectOp,
    TakeAlongAxisOp,
)
from fuser.ir.ops.matrix_products import (
    GroupedMmaOp,
    GroupedScalesOp,
    ProductOp,
    ScaledMmaOp,
    padding,
)
from fuser.ir.ops.nodes import CatOp, PadOp, SliceOp
from fuser.ir.ops.scan_ops import ArgsortOp, ScanOp, TopKOp
from fuser.ir.pointwise_table import POINTWISE
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Number, Scalar, Symbol
from fuser.ir.types import IterType
from fuser.ops.factories import key_of
from fuser.ops.reduction_table import REDUCTIONS, compute_dtype, missing
from fuser.ops.reference.attention_kernels import (
    Attention,
    backward,
    forward,
    plain_backward,
    plain_forward,
    plain_kernel,
)
from fuser.ops.reference.library_calls import (
    CallOperands,
    LibraryCall,
    Returning,
    as_byte,
    as_bytes,
    bind_argsort,
    bind_grouped_scales,
    bind_index_put,
    bind_product,
    bind_scan,
    bind_scatter,
    bind_topk,
    rows_added,
    scattered,
)
from fuser.ops.reference.matmul_calls import (
    bind_contraction,
    grouped_product,
    grouped_scales,
    linear,
    met_operands,
    scaled_product,
)
from fuser.ops.reference.philox import random_numbers
from fuser.support.errors import InputError, UnsupportedError, counted
from fuser.support.record import record

Tensor = torch.Tensor
InputValue = Tensor | Number | None
Values = Mapping[Symbol, Number]


# Floats of one byte: torch can copy some of them and compute with none.
_FLOAT8, _HALF_LIKE = (frozenset(map(to_torch, dtypes)) for dtypes in (FLOAT8, HALF_LIKE))


class _Context:
    """The state of one evaluation of ops with torch.

    - `values`: the values of symbols.
    - `dtype`: the float dtype of all floating computations, for tests; None for the dtypes of the
      fusion.
    - `device`: the device on which ops without tensor operands create results.
    - `unread`: the results that no op and no output reads.
    """

    def __init__(
        self,
        values: Values,
        dtype: torch.dtype | None,
        device: torch.device,
        unread: Container[TensorView] = (),
    ) -> None:
        self.values = values
        self.dtype = dtype
        self.device = device
        self.unread = unread

    def int_of(self, x: Scalar) -> int:
        return int(sc.evaluate(x, self.values))

    def sizes(self, tv: TensorView) -> list[int]:
        return [self.int_of(a.size) for a in tv.domain.no_reductions]

    def torch_dtype(self, dtype: DataType) -> torch.dtype:
        if self.dtype is not None and is_inexact(dtype):
            return self.dtype.to_complex() if is_complex(dtype) else self.dtype
        return to_torch(dtype)

    def store(self, x: Tensor, tv: TensorView) -> Tensor:
        return x.to(self.torch_dtype(tv.dtype()))


Inputs = list[Any]
Rule = Callable[[Any, Inputs, _Context], list[Tensor]]


# ------------------------------------------------------------------ elementwise
def _pointwise(op: TensorOp, inputs: Inputs, cx: _Context) -> list[Tensor]:
    row = POINTWISE[op.name]
    dtype = cx.torch_dtype(compute_dtype(op))
    operands = [_as_tensor(x, dtype, cx) for x in inputs]
    if op.name == "where":
        operands[0] = _as_tensor(inputs[0], torch.bool, cx)
    return [cx.store(row.torch(*operands), op.out_tensor)]


def _as_tensor(x: Tensor | Number, dtype: torch.dtype, cx: _Context) -> Tensor:
    if isinstance(x, Tensor):
        return x.to(dtype)
    return torch.tensor(x, dtype=dtype, device=cx.device)


def _cast(op: nodes.CastOp, inputs: Inputs, cx: _Context) -> list[Tensor]:
    own = to_torch(op.out.dtype())
    x = inputs[0]
    if x.is_complex() and not own.is_complex and own is not torch.bool:
        x = torch.real(x)
    is_number = own.is_floating_point or own.is_complex
    if is_number or own is torch.bool or not x.dtype.is_floating_point:
        return [cx.store(x.to(own), op.out)]
    return [torch.trunc(x.float() if x.dtype in _FLOAT8 else x).to(own)]


# ------------------------------------------------------------------ views
def _load_store(op: nodes.LoadStoreOp, inputs: Inputs, cx: _Context) -> list[Tensor]:
    root = op.out.domain.root_numbers
    if not root:
        return [inputs[0]]
    return [inputs[0].permute([root.index(n) for n in op.out.domain.logical_numbers])]


def _broadcast(op: nodes.BroadcastOp, inputs: Inputs, cx: _Context) -> list[Tensor]:
    x = inputs[0]
    for position, is_new in enumerate(op.flags):
        if is_new:
            x = x.unsqueeze(position)
    return [x]


def _squeeze(op: nodes.SqueezeOp, inputs: Inputs, cx: _Context) -> list[Tensor]:
    x = inputs[0]
    for position in reversed(range(len(op.flags))):
        if op.flags[position]:
            # An expanded axis is dropped as well: all its elements are the same.
            x = x.select(position, 0)
    return [x]


def _expand(op: nodes.ExpandOp, inputs: Inputs, cx: _Context) -> list[Tensor]:
    return [inputs[0].expand(cx.sizes(op.out))]


def _reshape(op: nodes.ReshapeOp, inputs: Inputs, cx: _Context) -> list[Tensor]:
    return [inputs[0].reshape(cx.sizes(op.out))]


def _slice(op: SliceOp, inputs: Inputs, cx: _Context) -> list[Tensor]:
    pairs = zip(op.starts, op.stops, strict=True)
    return [inputs[0][tuple(slice(cx.int_of(a), cx.int_of(b)) for a, b in pairs)]]


def _pad(op: PadOp, inputs: Inputs, cx: _Context) -> list[Tensor]:
    widths = [cx.int_of(w) for pair in zip(op.left, op.right, strict=True) for w in pair]
    flat = [w for i in range(len(widths) - 2, -1, -2) for w in widths[i : i + 2]]
    x = inputs[0]
    # Like our pad, it raises if an axis is cropped below 0. F.pad accepts no complex value.
    value = as_byte(sc.evaluate(op.value, cx.values), x.dtype)
    return [torch.constant_pad_nd(as_bytes(x), flat, value).view(x.dtype)]


def _cat(op: CatOp, inputs: Inputs, cx: _Context) -> list[Tensor]:
    sizes = cx.sizes(op.out)
    parts: list[Tensor] = []
    start = 0
    for piece, end in zip(inputs[: len(op.pieces)], op.ends, strict=True):
        stop = cx.int_of(end)
        kept = piece.narrow(op.dim, start, stop - start)
        shape = [*sizes[: op.dim], stop - start, *sizes[op.dim + 1 :]]
        parts.append(kept.expand(shape))
        start = stop
    return [torch.cat(parts, op.dim)]


# ------------------------------------------------------------------ lookups
def _lookup(op: LookupOp, inputs: Inputs, cx: _Context) -> list[Tensor]:
    """Computes an op that reads elements of a table at indices.

    The result for an index out of range is NaN, or 0 in a dtype without NaN.
    """
    dtype = inputs[op.TABLE].dtype
    table, index = as_bytes(inputs[op.TABLE]), inputs[1 - op.TABLE].long()
    extent = table.shape[op.axis]
    outside = (index < 0) | (index >= extent)
    index = index.clamp(0, max(extent - 1, 0))
    shape = cx.sizes(op.out)
    found = table.new_empty(shape) if not extent else _FOUND[type(op)](op, table, index, cx)
    nothing = as_byte(missing(op.out.dtype()), dtype)
    if isinstance(op, IndexSelectOp | EmbeddingFwdOp):
        after = found.ndim - (op.axis if isinstance(op, IndexSelectOp) else 0) - index.ndim
        outside = outside[(..., *(None,) * after)]
    return [found.masked_fill(outside, nothing).view(dtype)]


def _along(op: TakeAlongAxisOp, table: Tensor, index: Tensor, cx: _Context) -> Tensor:
    sizes = cx.sizes(op.out)
    of_table = [*sizes[: op.dim], table.shape[op.dim], *sizes[op.dim + 1 :]]
    return table.expand(of_table).gather(op.dim, index.expand(sizes))


def _select(op: SelectOp, inputs: Inputs, cx: _Context) -> list[Tensor]:
    table, place = inputs[0], cx.int_of(op.index)
    extent = table.shape[op.dim]
    if -extent <= place < extent:
        return [table.select(op.dim, place)]
    return [table.new_full(cx.sizes(op.out), missing(op.out.dtype()))]


def _scatter(op: ScatterOp, inputs: Inputs, cx: _Context) -> list[Tensor]:
    dtype = inputs[0].dtype
    if isinstance(op.src, Scalar):
        src: Any = as_byte(sc.evaluate(op.src, cx.values), dtype)
    else:
        src = as_bytes(inputs[2])
    return [scattered(as_bytes(inputs[0]), op.dim, inputs[1].long(), src).view(dtype)]


def _index_put(op: IndexPutAccumulateOp, inputs: Inputs, cx: _Context) -> list[Tensor]:
    acc, index, value = inputs
    return [cx.store(rows_added(acc.to(_accumulate_dtype(op.out, cx)), index, value), op.out)]


_FOUND: dict[type[LookupOp], Callable[[Any, Tensor, Tensor, _Context], Tensor]] = {
    IndexSelectOp: lambda op, table, index, cx: table.index_select(op.dim, index),
    EmbeddingFwdOp: lambda op, table, index, cx: table[index],
    TakeAlongAxisOp: _along,
    GatherOp: lambda op, table, index, cx: table.gather(op.dim, index),
}


# ------------------------------------------------------------------ factories
def _full(op: nodes.FullOp, inputs: Inputs, cx: _Context) -> list[Tensor]:
    value = sc.evaluate(op.value, cx.values)
    dtype = cx.torch_dtype(op.out.dtype())
    held = torch.uint8 if dtype in _FLOAT8 else dtype
    made = torch.full(cx.sizes(op.out), as_byte(value, dtype), dtype=held, device=cx.device)
    return [made.view(dtype)]


def _iota(op: nodes.IotaOp, inputs: Inputs, cx: _Context) -> list[Tensor]:
    dtype = cx.torch_dtype(op.out.dtype())
    counts = torch.arange(cx.sizes(op.out)[0], device=cx.device)
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    start, step = (sc.evaluate(x, cx.values) for x in (op.start, op.step))
    return [(counts.to(wide) * step + start).to(dtype)]


def _random(op: nodes.RandomOp, inputs: Inputs, cx: _Context) -> list[Tensor]:
    seed, offset = key_of(op)
    index = torch.zeros((), dtype=torch.int64, device=cx.device)
    for k, (size, extent) in enumerate(zip(cx.sizes(op.out), op.shape, strict=True)):
        begin = cx.int_of(op.begin[k]) if op.begin else 0
        places = torch.arange(begin, begin + size, device=cx.device)
        index = (index * cx.int_of(extent)).unsqueeze(-1) + places
    ends = [0.0, 1.0]
    if op.a is not None and op.b is not None:
        ends = [sc.evaluate(x, cx.values) for x in (op.a, op.b)]
    numbers = random_numbers(
        op.kind,
        index,
        ends,
        seed=cx.int_of(seed),
        offset=cx.int_of(offset),
        dtype=to_torch(op.out.dtype()),
    )
    return [cx.store(numbers, op.out)]


# ------------------------------------------------------------------ reductions
def _reduced_positions(tv: TensorView) -> list[int]:
    return [i for i, a in enumerate(tv.domain.logical) if a.kind is IterType.reduction]


def _accumulate_dtype(tv: TensorView, cx: _Context) -> torch.dtype:
    """Returns the dtype in which elements of `tv` are summed, as in kernels.

    The dtype is float32 for Half, BFloat16 and Float8, else the dtype of `tv`.
    """
    dtype = cx.torch_dtype(tv.dtype())
    return torch.float32 if dtype in _HALF_LIKE else dtype


def _reduction(op: nodes.ReductionOp, inputs: Inputs, cx: _Context) -> list[Tensor]:
    x = inputs[0].to(_accumulate_dtype(op.out, cx))
    dims = _reduced_positions(op.out)
    init = sc.evaluate(op.init, cx.values)
    if any(x.shape[d] == 0 for d in dims):
        kept = [n for i, n in enumerate(x.shape) if i not in dims]
        return [cx.store(torch.full(kept, init, dtype=x.dtype, device=x.device), op.out)]
    result = REDUCTIONS[op.kind].torch(x, dims)
    if init != REDUCTIONS[op.kind].identity(op.out.dtype()):
        start = torch.full_like(result, init).unsqueeze(0)
        result = REDUCTIONS[op.kind].torch(torch.cat([start, result.unsqueeze(0)]), (0,))
    return [cx.store(result, op.out)]


def _reshard(op: nodes.Reshard, inputs: Inputs, cx: _Context) -> list[Tensor]:
    if op.reduction is None:
        return [cx.store(inputs[0], op.out)]
    x = inputs[0].to(_accumulate_dtype(op.out, cx))
    return [cx.store(REDUCTIONS[op.reduction].torch(x, _reduced_positions(op.out)), op.out)]


def _welford(op: nodes.WelfordOp, inputs: Inputs, cx: _Context) -> list[Tensor]:
    x = inputs[0].to(_accumulate_dtype(op.avg, cx))
    dims = _reduced_positions(op.avg)
    count = 1
    for d in dims:
        count *= x.shape[d]
    if count == 0:
        deviation = x.sum(dims)
        avg = torch.full_like(deviation, torch.nan)
    else:
        avg = x.mean(dims)
        apart = x - x.mean(dims, keepdim=True)
        # The mean is rounded, so the distances do not sum to 0: corrects the sum of squares.
        rest = apart.sum(dims)
        deviation = (apart.square().sum(dims) - rest * (rest / count)).clamp_min(0)
    n = torch.full_like(avg, count, dtype=torch.int64)
    return [cx.store(avg, op.avg), cx.store(deviation, op.var), n]


# ------------------------------------------------------------------ scans and sorts
_SCANS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "add": lambda x, dim: torch.cumsum(x, dim, dtype=x.dtype),
    "mul": lambda x, dim: torch.cumprod(x, dim, dtype=x.dtype),
    "max": lambda x, dim: torch.cummax(x, dim).values,
    "min": lambda x, dim: torch.cummin(x, dim).values,
}


def _scan(op: ScanOp, inputs: Inputs, cx: _Context) -> list[Tensor]:
    x = inputs[0].to(_accumulate_dtype(op.out, cx))
    init = sc.evaluate(op.init, cx.values)
    if init == REDUCTIONS[op.kind].identity(op.out.dtype()):
        return [cx.store(_SCANS[op.kind](x, op.dim), op.out)]
    # `init` becomes an additional first element. Its own result is dropped.
    wide = torch.complex128 if x.is_complex() else torch.float64
    wide = wide if x.is_complex() or x.is_floating_point() else torch.int64
    first = torch.tensor(init, dtype=wide, device=x.device).to(x.dtype)
    first = first.expand([n if k != op.dim else 1 for k, n in enumerate(x.shape)])
    found = _SCANS[op.kind](torch.cat([first, x], op.dim), op.dim)
    return [cx.store(found.narrow(op.dim, 1, x.shape[op.dim]), op.out)]


def _argsort(op: ArgsortOp, inputs: Inputs, cx: _Context) -> list[Tensor]:
    # Always stable, so that ranks with the same elements get the same indices.
    return [torch.argsort(inputs[0], dim=op.dim, descending=op.descending, stable=True)]


def _topk(op: TopKOp, inputs: Inputs, cx: _Context) -> list[Tensor]:
    k = cx.int_of(op.k)
    # Always sorted, because torch's order without it differs between devices and sizes.
    return list(torch.topk(inputs[0], k, op.dim, largest=op.largest, sorted=True))


# ------------------------------------------------------------------ contractions
def _matmul(op: nodes.MatmulOp, inputs: Inputs, cx: _Context) -> list[Tensor]:
    return [cx.store(torch.matmul(*met_operands(op, inputs)), op.out)]


def _linear(op: nodes.LinearOp, inputs: Inputs, cx: _Context) -> list[Tensor]:
    return [cx.store(linear(*met_operands(op, inputs)), op.out)]


def _product(op: ProductOp, inputs: Inputs, cx: _Context) -> list[Tensor]:
    given = dict(zip((f for f, _ in op.tensors() if f != "out"), inputs, strict=True))
    dtype, wide = cx.torch_dtype(op.out.dtype()), cx.dtype or torch.float32
    if isinstance(op, GroupedMmaOp):
        return [grouped_product(op, given, dtype, wide)]
    return [cx.store(scaled_product(given, dtype, wide), op.out)]


def _grouped_scales(op: GroupedScalesOp, inputs: Inputs, cx: _Context) -> list[Tensor]:
    x, starts, begins = inputs
    nothing = as_byte(padding(op.out.dtype()), x.dtype)
    return [grouped_scales(op, as_bytes(x), starts, begins, nothing).view(x.dtype)]


# ------------------------------------------------------------------ attention
def _attention(
    op: SdpaFwdOp | SdpaBwdOp, inputs: Inputs, cx: _Context
) -> tuple[Attention, dict[str, Tensor | None]]:
    """Returns the scalar arguments of an attention op, and the op's tensors by the name of the
    argument.
    """
    given = (f for f in op.fields_of("operand") if getattr(op, f) is not None)
    tensors = dict.fromkeys(op.AXES) | dict(zip(given, inputs, strict=True))
    return _call(op, cx), tensors


def _call(op: SdpaFwdOp | SdpaBwdOp, cx: _Context) -> Attention:
    """Returns the values of the scalar arguments of an attention op."""
    scale = None if op.scale is None else float(sc.evaluate(op.scale, cx.values))
    dropped, causal = (sc.evaluate(x, cx.values) for x in (op.dropout_p, op.is_causal))
    numbers = float(dropped), bool(causal), scale
    return Attention(op.name, *numbers, _heads_per_key(op, cx))


def _heads_per_key(op: SdpaFwdOp | SdpaBwdOp, cx: _Context) -> int | None:
    """Returns the number of query heads that read each key head.

    Returns None without `enable_gqa`, or if there is one key head.
    """
    if not op.enable_gqa:
        return None
    heads, groups = (
        cx.int_of(tv.domain.no_reductions[op.letters(field).index(letter)].size)
        for field, tv, letter in (("query", op.query, "h"), ("key", op.key, "g"))
    )
    if heads % groups if groups else heads:
        raise InputError(
            f"{op.name}: query has {counted(heads, 'head')}, which is not a multiple of the "
            f"{counted(groups, 'head')} of key"
        )
    if groups == 1:
        return None
    return heads // groups if groups else 1


def _sdpa(op: SdpaFwdOp, inputs: Inputs, cx: _Context) -> list[Tensor]:
    call, t = _attention(op, inputs, cx)
    read: Any = t["query"], t["key"], t["value"]
    reads = tuple(out not in cx.unread for out in op.outputs)
    found = forward(call, read, t["bias"], t["mask"], is_oracle=cx.dtype is not None, reads=reads)
    return [cx.store(x, tv) for x, tv in zip(found, op.outputs, strict=True)]


def _bind_sdpa(op: SdpaFwdOp, bound: CallOperands) -> Returning:
    cx = _context_of(bound)
    call, ins = _call(op, cx), bound.ins
    q, k, v, bias, mask = _places(op, ("query", "key", "value", "bias", "mask"))
    added, seen = (ins[i] if i >= 0 else None for i in (bias, mask))
    reads = tuple(bound.reads)
    operands = ins[q], ins[k], ins[v]
    plain = plain_forward(call, operands, added, seen, reads=reads)

    def one_call(given: Sequence[Tensor]) -> Sequence[Tensor]:
        assert plain is not None
        return plain(given[q], given[k], given[v], given[bias] if bias >= 0 else None)

    def general(given: Sequence[Tensor]) -> list[Tensor]:
        added, seen = (given[i] if i >= 0 else None for i in (bias, mask))
        found = forward(call, (given[q], given[k], given[v]), added, seen, reads=reads)
        return [cx.store(x, tv) for x, tv in zip(found, op.outputs, strict=True)]

    if plain is None:
        return Returning(general)
    direct = None if any(reads[1:]) else plain_kernel(call, operands, added, seen, reads=reads)
    return Returning(one_call, direct, (q, k, v, bias)[: 3 if bias < 0 else 4])


def _bind_sdpa_backward(op: SdpaBwdOp, bound: CallOperands) -> Returning:
    cx = _context_of(bound)
    call, ins = _call(op, cx), bound.ins
    fields = "grad_output", "query", "key", "value", "attended", "log_sumexp"
    places = _places(op, (*fields, "philox_seed", "philox_offset"))
    grad, q, k, v, out, sums, seed, offset = places

    def general(given: Sequence[Tensor]) -> list[Tensor]:
        results = given[out], given[sums], given[seed], given[offset]
        found = backward(call, given[grad], (given[q], given[k], given[v]), results)
        return [cx.store(x, tv) for x, tv in zip(found, op.outputs, strict=True)]

    is_deterministic = torch.are_deterministic_algorithms_enabled
    now, results = is_deterministic(), (ins[out], ins[sums], ins[seed], ins[offset])
    plain = plain_backward(call, ins[grad], (ins[q], ins[k], ins[v]), results)

    def one_call(given: Sequence[Tensor]) -> Sequence[Tensor]:
        if plain is None or is_deterministic() is not now:
            return general(given)
        return plain(given[grad], given[q], given[k], given[v], given[out], given[sums])

    return Returning(general if plain is None else one_call)


def _context_of(bound: CallOperands) -> _Context:
    return _Context(bound.values, None, bound.ins[0].device)


def _places(op: SdpaFwdOp | SdpaBwdOp, fields: Sequence[str]) -> list[int]:
    """Returns the position of each tensor with a name in `fields` among the tensor operands of an
    attention op.

    The position is -1 if the op does not have this operand.
    """
    operands = (f for f in op.fields_of("operand") if f in op.AXES)
    given = [f for f in operands if getattr(op, f) is not None]
    return [given.index(f) if f in given else -1 for f in fields]


def _sdpa_backward(op: SdpaBwdOp, inputs: Inputs, cx: _Context) -> list[Tensor]:
    call, t = _attention(op, inputs, cx)
    read: Any = t["query"], t["key"], t["value"]
    results: Any = t["attended"], t["log_sumexp"], t["philox_seed"], t["philox_offset"]
    grad: Any = t["grad_output"]
    found = backward(call, grad, read, results, is_oracle=cx.dtype is not None)
    return [cx.store(x, tv) for x, tv in zip(found, op.outputs, strict=True)]


# ------------------------------------------------------------------ the table of nodes
# How the results of an op are computed:
#   element        a kernel computes each from elements of its operands (`lower/values.py`)
#   index          a kernel reads its operand elsewhere
#   reduction      a kernel's loop accumulates them (`lower/reduce.py`)
#   library        torch, on whole tensors; an op of its own in the host program
#   communication  ranks exchange them
Computed = Literal["element", "index", "reduction", "library", "communication"]


Into = Callable[[Any, CallOperands], LibraryCall | Returning | None]


@record
class NodeRow:
    """The meaning of a class of ops in torch, and how the results of such ops are computed.

    - `meaning`: a function that computes an op with torch.
    - `computed`: what computes the results, such as a kernel or a torch call.
    - `into`: prepares a call of torch that writes the results of an op; None without such a call.
    - `may_return`: whether the call may instead return the results in new memory.

    The distribution over devices is described elsewhere, by methods of the op's class.
    """

    meaning: Rule
    computed: Computed
    # Binds a call that writes the results of a library op into tensors; None if the op has no such
    # call. `may_return`: the call may instead return the results in new memory.
    into: Into | None = None
    may_return: bool = False


NODES: dict[type[TensorOp], NodeRow] = {
    nodes.UnaryOp: NodeRow(_pointwise, "element"),
    nodes.BinaryOp: NodeRow(_pointwise, "element"),
    nodes.TernaryOp: NodeRow(_pointwise, "element"),
    nodes.CastOp: NodeRow(_cast, "element"),
    nodes.LoadStoreOp: NodeRow(_load_store, "index"),
    nodes.Reshard: NodeRow(_reshard, "communication"),
    nodes.BroadcastOp: NodeRow(_broadcast, "index"),
    nodes.SqueezeOp: NodeRow(_squeeze, "index"),
    nodes.ExpandOp: NodeRow(_expand, "index"),
    nodes.ReshapeOp: NodeRow(_reshape, "index"),
    SliceOp: NodeRow(_slice, "index"),
    PadOp: NodeRow(_pad, "element"),
    CatOp: NodeRow(_cat, "element"),
    **dict.fromkeys(_FOUND, NodeRow(_lookup, "element")),
    SelectOp: NodeRow(_select, "element"),
    ScatterOp: NodeRow(_scatter, "library", bind_scatter),
    IndexPutAccumulateOp: NodeRow(_index_put, "library", bind_index_put, may_return=True),
    ScanOp: NodeRow(_scan, "library", bind_scan),
    ArgsortOp: NodeRow(_argsort, "library", bind_argsort),
    TopKOp: NodeRow(_topk, "library", bind_topk),
    nodes.FullOp: NodeRow(_full, "element"),
    nodes.IotaOp: NodeRow(_iota, "element"),
    nodes.RandomOp: NodeRow(_random, "element"),
    nodes.ReductionOp: NodeRow(_reduction, "reduction"),
    nodes.WelfordOp: NodeRow(_welford, "reduction"),
    nodes.MatmulOp: NodeRow(_matmul, "library"),
    nodes.LinearOp: NodeRow(_linear, "library"),
    GroupedMmaOp: NodeRow(_product, "library", bind_product, may_return=True),
    ScaledMmaOp: NodeRow(_product, "library", bind_product),
    GroupedScalesOp: NodeRow(_grouped_scales, "library", bind_grouped_scales),
    SdpaFwdOp: NodeRow(_sdpa, "library", _bind_sdpa, may_return=True),
    SdpaBwdOp: NodeRow(_sdpa_backward, "library", _bind_sdpa_backward, may_return=True),
}


def nodes_computed(how: Computed) -> tuple[type[TensorOp], ...]:
    """Returns the classes of ops whose results are computed in the way `how`, such as "element" (by
    a kernel) or "library" (by torch).
    """
    return tuple(cls for cls, row in NODES.items() if row.computed == how)


REDUCING = nodes_computed("reduction")


# ------------------------------------------------------------------ entry points
def evaluate_op(
    op: TensorOp,
    inputs: Sequence[InputValue],
    values: Values,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    unread: Container[TensorView] = (),
) -> list[Tensor]:
    """Computes one op with torch, and returns one tensor per output.

    - `inputs` has a value for each of `op.inputs`: a tensor, or a number for a scalar operand. None
      for a scalar operand means that the number is computed from `values`.
    - `values` are the values of the symbols in extents and scalar operands.
    - `dtype`: the float dtype of all floating computations; None for the dtypes of the IR.
    - `device`: the device of the results of ops without tensor operands.
    - `unread`: outputs that are never read; such an output may have any size.

    Raises `UnsupportedError` for an op without a row in `NODES`.
    """
    row = NODES.get(type(op))
    if row is None:
        raise UnsupportedError(f"{op.name}: no torch function computes this op:\n{op}")
    resolved: Inputs = []
    for given, declared in zip(inputs, op.inputs, strict=True):
        if given is None and isinstance(declared, Scalar) and isinstance(op, _ELEMENTWISE):
            given = sc.evaluate(declared, values)
        resolved.append(given)
    found = next((x.device for x in resolved if isinstance(x, Tensor)), torch.device(device))
    return row.meaning(op, resolved, _Context(values, dtype, found, unread))


_ELEMENTWISE = (nodes.UnaryOp, nodes.BinaryOp, nodes.TernaryOp)


def bind_call(op: TensorOp, bound: CallOperands) -> LibraryCall | Returning | None:
    """Returns a torch call that computes `op` for the tensors in `bound`; None if there is no such
    call.

    The call writes the results into tensors, or returns the results (`Returning`). Plain matrix
    products are prepared by `bind_contraction` instead.
    """
    into = NODES[type(op)].into
    return None if into is None else into(op, bound)


def evaluate_into(op: nodes.Contraction, inputs: Sequence[Tensor], out: Tensor) -> None:
    """Computes a matmul or a linear into `out`, which has the shape and the dtype of the result."""
    bind_contraction(op, inputs, out)(inputs, out)


def evaluate_fusion(
    fusion: Fusion,
    inputs: Sequence[Tensor | Number],
    *,
    dtype: torch.dtype | None = None,
    values: Values | None = None,
    change: Callable[[TensorOp, list[Tensor | None], list[Tensor]], list[Tensor]] | None = None,
) -> list[Tensor]:
    """Computes all outputs of a fusion with torch, also those that only update an input, on whole
    tensors (not split over devices).

    - `dtype`: with `torch.float64`, floating inputs and results are float64, as tests need it.
    - `values`: the values of symbols; by default computed from the sizes of the inputs.
    - `change(op, operands, results)` may replace the results of an op.
    """
    bound = bind_inputs(fusion, inputs) if values is None else values
    known: dict[TensorView, Tensor] = {}
    for declared, given in zip(fusion.inputs, inputs, strict=True):
        if isinstance(declared, TensorView) and isinstance(given, Tensor):
            wide = dtype if given.is_floating_point() else dtype and dtype.to_complex()
            is_wide = given.is_floating_point() or given.is_complex()
            known[declared] = given.to(wide) if is_wide else given
    device = next((t.device for t in known.values()), torch.device("cpu"))
    for op in fusion.used_exprs():
        operands = [known[v] if isinstance(v, TensorView) else None for v in op.inputs]
        results = evaluate_op(op, operands, bound, dtype=dtype, device=device)
        if change is not None:
            results = change(op, operands, [*results])
        known.update(zip(op.outputs, results, strict=True))
    return [known[out] for out in fusion.outputs]
