"""Calls of torch that write the results of library ops (ops that torch computes) into given
tensors.

A *call* is bound once for operands and results of one shape, dtype, layout and device: everything
that does not change between runs is done then. The results equal those of
`fuser.ops.reference.meaning` bit for bit. First and later runs of a program therefore have equal
results, also on different ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch

from fuser.ir.dtypes import FLOAT8, HALF_LIKE, to_torch
from fuser.ir.ops.lookup import IndexPutAccumulateOp, ScatterOp
from fuser.ir.ops.matrix_products import GroupedMmaOp, GroupedScalesOp, ProductOp, padding
from fuser.ir.ops.scan_ops import ArgsortOp, ScanOp, TopKOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Number, Scalar, Symbol
from fuser.ops.reduction_table import REDUCTIONS
from fuser.ops.reference.matmul_calls import (
    GroupKernels,
    bind_native,
    bind_scaled,
    grouped_into,
    grouped_scales_into,
    scaled_into,
)
from fuser.support.record import record
from fuser.support.torch_calls import empty_on

Tensor = torch.Tensor
LibraryCall = Callable[[Sequence[Tensor], Sequence[Tensor]], object]
"""Writes the results of operands into tensors of their shapes."""


class Returning(NamedTuple):
    """A call of torch that returns the results in new memory, for ops whose results torch cannot
    write into given tensors.

    - `make` takes a list of all operands, and returns the results.
    - `direct` does the same in less time. It takes only the operands at the positions `places`, as
      separate arguments. Repeated runs use `direct` if only the first result is read.
    """

    make: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    direct: Callable[..., Sequence[Tensor]] | None = None
    places: tuple[int, ...] = ()


class WritingOne(NamedTuple):
    """A call of a torch function that takes one operand and some numbers, and writes one of the
    op's results.

    `numbers` are passed after the operand. `out` is the position of this result among the op's
    results.
    """

    function: Callable[..., object]
    numbers: tuple[object, ...]
    out: int

    def __call__(self, ins: Sequence[Tensor], outs: Sequence[Tensor]) -> object:
        """Calls the function on the first operand, and writes into the tensor at position `out` of
        `outs`.
        """
        return self.function(ins[0], *self.numbers, out=outs[self.out])


# Floats of one byte: torch can copy some of them and compute with none.
_FLOAT8, _HALF_LIKE = (frozenset(map(to_torch, dtypes)) for dtypes in (FLOAT8, HALF_LIKE))


def as_bytes(x: Tensor) -> Tensor:
    """Returns a tensor of one-byte floats as a view of bytes, which torch can copy.

    Returns any other tensor unchanged.
    """
    return x.view(torch.uint8) if x.dtype in _FLOAT8 else x


def as_byte(value: Number, dtype: torch.dtype) -> Number:
    """Returns the byte of `value` as a number if `dtype` is a one-byte float, else `value`."""
    if dtype not in _FLOAT8:
        return value
    return torch.tensor(value, dtype=torch.float64).to(dtype).view(torch.uint8).item()


class Kernels(GroupKernels, Protocol):
    """Kernels of this project that compute on a device what torch would compute more slowly or not
    at all.
    """

    def scatter(self, out: Tensor, dim: int, index: Tensor, src: Tensor | int) -> None:
        """Writes `src` into `out`, at the positions `index` along axis `dim`.

        `src` may be one number for all positions. Positions out of range are ignored.
        """
        ...

    def takes_scatter(self, out: Tensor, dim: int, index: Tensor, src: Tensor | None) -> bool:
        """Returns whether `scatter` supports tensors like these. `src` is None if a number is
        written.
        """
        ...


@record
class CallOperands:
    """The tensors and values for which a call of torch is prepared. Every run has tensors of the
    same shapes, dtypes and strides.

    - `ins`, `outs`: the operands and the results.
    - `values`: the values of symbols.
    - `reads`: for each result, whether an op or an output reads the result.
    - `kernels`: kernels of this project that replace calls of torch; None for torch alone.
    """

    ins: Sequence[Tensor]
    outs: Sequence[Tensor]
    values: Mapping[Symbol, Number]
    reads: Sequence[bool]
    kernels: Kernels | None = None


# ------------------------------------------------------------------ scans
_SUMS = {"add": torch.cumsum, "mul": torch.cumprod}
_EXTREMES = {"max": torch.cummax, "min": torch.cummin}


def bind_scan(op: ScanOp, bound: CallOperands) -> LibraryCall | None:
    """Returns torch's call for a scan (such as `cumsum`) that begins with the neutral value, such
    as 0 for a sum.

    Returns None for a scan with any other `init`. `bound` has the tensors for which the call is
    prepared.
    """
    if sc.evaluate(op.init, bound.values) != REDUCTIONS[op.kind].identity(op.out.dtype()):
        return None
    dim = op.dim
    if op.kind in _EXTREMES:
        extremes, place = _EXTREMES[op.kind], _places(bound, torch.int64)
        return lambda ins, outs: extremes(ins[0], dim, out=(outs[0], place()))
    sums, dtype = _SUMS[op.kind], bound.ins[0].dtype
    if dtype in _HALF_LIKE:
        # Added up in float32. The copy rounds.
        return lambda ins, outs: outs[0].copy_(sums(ins[0], dim, dtype=torch.float32))
    return lambda ins, outs: sums(ins[0], dim, dtype=dtype, out=outs[0])


def _places(bound: CallOperands, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Returns a function that makes an empty tensor for a result of torch that is not read."""
    return partial(empty_on(bound.outs[0].device), (0,), (1,), dtype)


# ------------------------------------------------------------------ order
def bind_argsort(op: ArgsortOp, bound: CallOperands) -> LibraryCall:
    """Returns a call of torch's sort that writes only the indices. `bound` has the tensors for
    which it is prepared.
    """
    # Always stable, so that ranks with the same elements get the same indices.
    sort = partial(torch.sort, stable=True, dim=op.dim, descending=op.descending)
    place = _places(bound, bound.ins[0].dtype)
    return lambda ins, outs: sort(ins[0], out=(place(), outs[0]))


def bind_topk(op: TopKOp, bound: CallOperands) -> LibraryCall:
    """Returns torch's call for topk (the k largest elements and their indices). `bound` has the
    tensors for which it is prepared.

    For k = 1, the call is a reduction if torch has a reduction with the same result.
    """
    found, dim, largest = bound.outs[0], op.dim, op.largest
    k = found.shape[dim]
    # For the smallest element, topk treats NaN as the largest value. No reduction of torch does.
    if k == 1 and (largest or not found.dtype.is_floating_point) and bound.ins[0].shape[dim]:
        return _one_element(bound, dim, largest)

    def topk(ins: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        # Always sorted, because torch's order without it differs between devices and sizes.
        torch.topk(ins[0], k, dim, largest=largest, sorted=True, out=tuple(outs))

    return topk


def _one_element(bound: CallOperands, dim: int, largest: bool) -> LibraryCall:
    reads_value, reads_place = bound.reads
    value, place = (torch.amax, torch.argmax) if largest else (torch.amin, torch.argmin)
    both = torch.max if largest else torch.min
    if reads_value and reads_place:
        return lambda ins, outs: both(ins[0], dim, keepdim=True, out=tuple(outs))
    # The two numbers are `dim` and `keepdim`.
    return WritingOne(value, (dim, True), 0) if reads_value else WritingOne(place, (dim, True), 1)


# ------------------------------------------------------------------ products
def bind_product(op: ProductOp, bound: CallOperands) -> LibraryCall | Returning:
    """Returns torch's call for a scaled matrix product, or for grouped matrix products. `bound` has
    the tensors for which it is prepared.

    Grouped products use torch's own kernel for groups if that kernel supports the operands.
    """
    fields = [field for field, _ in op.tensors() if field != "out"]

    def scaled(ins: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        scaled_into(dict(zip(fields, ins, strict=True)), outs[0], torch.float32)

    def grouped(ins: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        given = dict(zip(fields, ins, strict=True))
        grouped_into(op, given, outs[0], torch.float32)  # pyright: ignore[reportArgumentType]

    samples = dict(zip(fields, bound.ins, strict=True))
    if not isinstance(op, GroupedMmaOp):
        at_once = bind_scaled(fields, bound.ins, bound.outs[0])
        if at_once is None:
            return scaled
        return at_once
    native = bind_native(op, samples, bound.kernels)
    if native is None:
        return grouped
    return Returning(lambda ins: [native(dict(zip(fields, ins, strict=True)))])


def bind_grouped_scales(op: GroupedScalesOp, bound: CallOperands) -> LibraryCall | None:
    """Returns a call that copies scales into tiles, as a grouped product requires. Returns None if
    the result is not contiguous.

    `bound` has the tensors for which the call is prepared.
    """
    out = bound.outs[0]
    if not out.is_contiguous():
        return None
    nothing = as_byte(padding(op.out.dtype()), out.dtype)

    def tiles(ins: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        x, starts, begins = ins
        grouped_scales_into(op, (as_bytes(x), starts, begins), as_bytes(outs[0]), nothing)

    return tiles


# ------------------------------------------------------------------ writes at indices
def is_inside(index: Tensor, extent: int) -> bool:
    """Returns whether all elements of `index` are in the range 0 to `extent` - 1.

    The host waits for the device, because it needs the elements.
    """
    return not index.numel() or (int(index.min()) >= 0 and int(index.max()) < extent)


def bind_scatter(op: ScatterOp, bound: CallOperands) -> LibraryCall | None:
    """Returns a call for a scatter, in which positions out of range are ignored. `bound` has the
    tensors for which it is prepared.

    - On a CPU, the host first looks for positions out of range.
    - On a GPU, a kernel of this project ignores such positions. Returns None if the kernel does not
      support the tensors.
    """
    dim, dtype = op.dim, bound.outs[0].dtype
    number = None
    if isinstance(op.src, Scalar):
        number = as_byte(sc.evaluate(op.src, bound.values), dtype)
    if bound.outs[0].device.type != "cpu":
        return _scatter_by_kernel(op, bound, number)

    def scatter(ins: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        x, out, index = as_bytes(ins[0]), as_bytes(outs[0]), ins[1].long()
        src = number if number is not None else as_bytes(ins[2])
        if is_inside(index, x.shape[dim]):
            torch.scatter(x, dim, index, src, out=out)  # pyright: ignore[reportCallIssue, reportArgumentType]
        else:
            out.copy_(scattered(x, dim, index, src))

    return scatter


def _scatter_by_kernel(
    op: ScatterOp, bound: CallOperands, number: Number | None
) -> LibraryCall | None:
    kernels, dim = bound.kernels, op.dim
    src = None if number is not None else bound.ins[2]
    if kernels is None or not kernels.takes_scatter(bound.outs[0], dim, bound.ins[1], src):
        return None
    word = None if number is None else _bits(number, bound.outs[0].dtype)

    def scatter(ins: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        outs[0].copy_(ins[0])
        kernels.scatter(outs[0], dim, ins[1], ins[2] if word is None else word)

    return scatter


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(number: Number, dtype: torch.dtype) -> int:
    """Returns, as a signed integer, the bits that represent `number` in `dtype`, because a kernel
    of this project writes numbers as bits.
    """
    one = torch.tensor(number, dtype=torch.uint8 if dtype in _FLOAT8 else dtype)
    return int(one.view(_INTEGERS[one.element_size()]))


def scattered(x: Tensor, dim: int, index: Tensor, src: Tensor | Number) -> Tensor:
    """Returns a copy of `x` with `src` written at the positions `index` along axis `dim`.

    Elements for positions out of range are written to one additional position after the copy, which
    is not a part of the result.
    """
    extent = x.shape[dim]
    out = x.new_empty([n + (k == dim) for k, n in enumerate(x.shape)])
    kept = out.narrow(dim, 0, extent)
    kept.copy_(x)
    index = torch.where((index < 0) | (index >= extent), extent, index)
    out.scatter_(dim, index, src)  # pyright: ignore[reportArgumentType, reportCallIssue]
    return kept


def bind_index_put(op: IndexPutAccumulateOp, bound: CallOperands) -> LibraryCall | Returning:
    """Returns a call that adds rows of `value` to rows of a matrix. `bound` has the tensors for
    which it is prepared.

    - On a CPU, the rows are added in the result itself if its dtype has enough digits. Otherwise
      the rows are added in float32.
    - On a GPU, the rows are added in new memory. The memory has one more row, to which rows for
      positions out of range are added.
    """
    dtype = bound.outs[0].dtype
    is_wide = dtype not in _HALF_LIKE

    def on_host(ins: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        acc, index, value = ins
        into = outs[0].copy_(acc) if is_wide else acc.to(torch.float32)
        value = value.to(into.dtype).expand(len(index), *acc.shape[1:])
        if not is_inside(index, len(acc)):
            kept = (index >= 0) & (index < len(acc))
            index, value = index[kept], value[kept]
        into.index_add_(0, index.long(), value)
        if not is_wide:
            outs[0].copy_(into)

    def on_device(ins: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        outs[0].copy_(rows_added(*ins))

    if bound.outs[0].device.type == "cpu":
        return on_host
    return Returning(lambda ins: [rows_added(*ins)]) if is_wide else on_device


def rows_added(acc: Tensor, index: Tensor, value: Tensor) -> Tensor:
    """Returns `acc` plus the rows `value`, added to the rows `index` one after the other.

    Half floats and Float8 are added in float32. Rows for positions out of range are added to one
    additional row after the copy of `acc`, which is not a part of the result.
    """
    dtype = torch.float32 if acc.dtype in _HALF_LIKE else acc.dtype
    extent = len(acc)
    out = acc.new_empty([extent + 1, *acc.shape[1:]], dtype=dtype)
    kept = out.narrow(0, 0, extent)
    kept.copy_(acc)
    # Row -1, counted from the end, is the additional row.
    index = index.clamp(-1, extent)
    value = value.to(dtype)
    # Of two functions of torch, the one that adds in order on this device.
    if out.is_cuda:
        # All positions are in range by now, so torch need not check them.
        put = torch._index_put_impl_  # pyright: ignore[reportPrivateImportUsage]
        put(out, (index.long(),), value, True, True)
    else:
        index = torch.where(index < 0, extent, index).long()
        out.index_add_(0, index, value.expand(len(index), *acc.shape[1:]))
    return kept
