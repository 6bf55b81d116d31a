"""Lookups: ops that read a table where an index says; and scatter, which writes there.

The *looked-up axis* of the table is the one whose positions the index holds. Only kernels know the
values of an index, so that any part of a result may need any part of that axis: it is whole on
every device. Indices in tensors count from 0. In a kernel, an index below 0 or past the end reads
nothing: its value is NaN, 0 for a dtype without NaN.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, ClassVar

from fuser.ir.dtypes import DataType, dtype_text
from fuser.ir.fusion import AxisMap, TensorOp
from fuser.ir.op import attr, operand, result
from fuser.ir.ops.nodes import LibraryOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.support.errors import VerifyError

if TYPE_CHECKING:
    from fuser.ir.fusion import TensorView

INDEX_DTYPES = (DataType.Int, DataType.Int32, DataType.Index)


def _dtype_of(value: TensorView | Scalar) -> DataType:
    return value.dtype if isinstance(value, Scalar) else value.dtype()


class LookupOp(TensorOp):
    """Base: of the operands `table` and `index`, in either order."""

    if TYPE_CHECKING:
        out: TensorView
        table: TensorView
        index: TensorView
        dim: int

    # Which operand the table is; the index is the other one.
    TABLE: ClassVar[int] = 0

    @property
    def axis(self) -> int:
        """The looked-up axis of the table."""
        return self.dim

    def table_map(self) -> AxisMap:
        """Returns, per axis of the table, the axis of the result at whose index it is read; None
        for the looked-up one."""
        return tuple(None if k == self.axis else k for k in range(self.table.ndim))

    def index_map(self) -> AxisMap:
        """Returns the same per axis of the index."""
        return tuple(range(self.index.ndim))

    def narrowed(self) -> tuple[int, ...]:
        """Returns the axes of the result that may be shorter than those of the table: element for
        element the same, but not one axis."""
        return ()

    # ------------------------------------------------------------ axes
    def axis_map(self, operand_index: int) -> AxisMap:
        found: list[int | None] = [None] * len(self.out.domain.maybe_root)
        is_table = operand_index == self.TABLE
        for place, target in enumerate(self.table_map() if is_table else self.index_map()):
            if target is not None and not (is_table and target in self.narrowed()):
                found[target] = place
        return tuple(found)

    def cut_map(self, operand_index: int, out: TensorView) -> AxisMap:
        return _without(self.narrowed(), self.axis_map(operand_index))

    def whole_axes(self, out: TensorView) -> tuple[int, ...]:
        return self.narrowed()

    def whole_operand_axes(self, operand_index: int) -> tuple[int, ...]:
        narrowed = self.narrowed()
        if operand_index == self.TABLE:
            pairs = enumerate(self.table_map())
            return tuple(k for k, to in pairs if to is None or to in narrowed)
        return tuple(k for k, to in enumerate(self.index_map()) if to in narrowed)

    def verify(self) -> None:
        dtype = _dtype_of(self.index)
        if dtype not in INDEX_DTYPES:
            found = dtype_text(dtype)
            raise VerifyError(f"{self.name}: an index is Int or Int32, not {found}: {self.index}")
        if self.out.dtype() is not self.table.dtype():
            raise VerifyError(f"{self.name}: {self.out} is not of the dtype of {self.table}")
        rank = self.table.ndim
        if not 0 <= self.axis < rank:
            raise VerifyError(f"{self.name}: axis {self.axis} of {self.table} of rank {rank}")
        targets = {t for t in (*self.table_map(), *self.index_map()) if t is not None}
        if targets != set(range(self.out.ndim)) or not self._ranks_agree():
            raise VerifyError(f"{self.name}: {self.table} and {self.index} do not give {self.out}")

    def _ranks_agree(self) -> bool:
        return True


class SelectOp(LookupOp):
    """out[.., ..] = table[.., index, ..] along axis `dim`, which ends; index is a scalar, which
    counts from the end where it is negative."""

    out: TensorView = result()
    table: TensorView = operand()
    index: Scalar = operand()  # pyright: ignore[reportIncompatibleVariableOverride]
    dim: int = attr()
    TEXT = "{out}\n   = select( {table}, axis = {dim}, index = {index} )"

    @property
    def name(self) -> str:
        return "select"

    def misfit(self, extent: int | None) -> str:
        """Returns what is wrong with a constant index for an axis of this extent (None: not known),
        "" where nothing is, or an input has the index."""
        place = sc.int_value(self.index)
        if extent is None or place is None or -extent <= place < extent:
            return ""
        return f"index {place} is outside of axis {self.dim} of {self.table}"

    def table_map(self) -> AxisMap:
        places = range(self.table.ndim)
        return tuple(None if k == self.dim else k - (k > self.dim) for k in places)

    def index_map(self) -> AxisMap:
        return ()


class IndexSelectOp(LookupOp):
    """out[.., i, ..] = table[.., index[i], ..] along axis `dim`; index [n]."""

    out: TensorView = result()
    table: TensorView = operand()
    index: TensorView = operand()
    dim: int = attr()
    TEXT = "{out}\n   = indexSelect( {table}, dim = {dim}, {index} )"

    @property
    def name(self) -> str:
        return "index_select"

    def index_map(self) -> AxisMap:
        return (self.dim,)

    def _ranks_agree(self) -> bool:
        return self.index.ndim == 1


class EmbeddingFwdOp(LookupOp):
    """out[*i, h] = table[index[*i], h]; table [v, h]."""

    out: TensorView = result()
    index: TensorView = operand()
    table: TensorView = operand()
    TEXT = "{out}\n   = embedding_fwd( {index}, {table} )"
    TABLE: ClassVar[int] = 1
    dim: ClassVar[int] = 0  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def name(self) -> str:
        return "embedding_fwd"

    def table_map(self) -> AxisMap:
        return (None, self.index.ndim)

    def _ranks_agree(self) -> bool:
        return self.table.ndim == 2


class _AlongAxisOp(LookupOp):
    """Base: out[.., i, ..] = table[.., index[.., i, ..], ..] along axis `dim`; equal ranks."""

    def _ranks_agree(self) -> bool:
        return self.index.ndim == self.table.ndim


class TakeAlongAxisOp(_AlongAxisOp):
    """The other axes of table and index are of one extent, or broadcasts."""

    out: TensorView = result()
    table: TensorView = operand()
    index: TensorView = operand()
    dim: int = attr()
    TEXT = "{out}\n   = takeAlongAxis( {table}, {index}, dim = {dim} )"

    @property
    def name(self) -> str:
        return "take_along_axis"


class GatherOp(_AlongAxisOp):
    """The other axes of the index may be shorter than those of the table."""

    out: TensorView = result()
    table: TensorView = operand()
    index: TensorView = operand()
    dim: int = attr()
    TEXT = "{out}\n   = torchGather( {table}, dim = {dim}, {index} )"

    @property
    def name(self) -> str:
        return "gather"

    def narrowed(self) -> tuple[int, ...]:
        found = _differing(self.table, self.index)
        return tuple(k for k in found if k != self.dim)

    def limits(self) -> Iterator[tuple[int, TensorView]]:
        """Yields the axes along which the index may be no longer than a tensor."""
        return ((k, self.table) for k in self.narrowed())


def _differing(a: TensorView, b: TensorView) -> list[int]:
    """Returns the axes of two tensors of one rank that are not known to have one extent."""
    canonical = a.fusion.canonical
    pairs = enumerate(zip(a.domain.no_reductions, b.domain.no_reductions, strict=True))
    return [k for k, (x, y) in pairs if canonical(x.size) != canonical(y.size)]


def _without(positions: Collection[int], found: AxisMap) -> AxisMap:
    return tuple(None if k in positions else place for k, place in enumerate(found))


class ScatterOp(LibraryOp):
    """out is inp, and out[.., index[.., i, ..], ..] = src[.., i, ..] along axis `dim`.

    Index and a tensor src may be shorter than inp along the other axes, index shorter than src. Of
    several elements for one place any is taken; those for a place outside go nowhere.
    """

    out: TensorView = result()
    inp: TensorView = operand()
    index: TensorView = operand()
    src: TensorView | Scalar = operand()
    dim: int = attr()
    RUNS_IN_STEPS: ClassVar[bool] = False
    KEEPS_EXPANDED: ClassVar[bool] = False
    TEXT = "{out}\n   = scatter(in = {inp}, dim = {dim}, src = {src}, idx = {index} )"

    @property
    def name(self) -> str:
        return "scatter"

    def limits(self) -> Iterator[tuple[int, TensorView]]:
        """Yields the axes along which the index may be no longer than a tensor."""
        yield from ((k, self.inp) for k in _differing(self.inp, self.index) if k != self.dim)
        if not isinstance(self.src, Scalar):
            yield from ((k, self.src) for k in _differing(self.src, self.index))

    def _whole(self) -> set[int]:
        """The axes that are computed whole: blocks of which are not made from operands' blocks."""
        return {self.dim, *(k for k, _ in self.limits())}

    def axis_map(self, operand_index: int) -> AxisMap:
        places = tuple(range(self.out.ndim))
        return places if operand_index == 0 else _without(self._whole(), places)

    def cut_map(self, operand_index: int, out: TensorView) -> AxisMap:
        return _without(self._whole(), tuple(range(self.out.ndim)))

    def whole_axes(self, out: TensorView) -> tuple[int, ...]:
        return tuple(sorted(self._whole()))

    def whole_operand_axes(self, operand_index: int) -> tuple[int, ...]:
        return tuple(sorted(self._whole()))

    def verify(self) -> None:
        tensors = [self.out, self.inp, self.index]
        tensors += [self.src] if not isinstance(self.src, Scalar) else []
        if self.index.dtype() not in INDEX_DTYPES or not 0 <= self.dim < self.out.ndim:
            raise VerifyError(f"scatter: axis {self.dim} of {self.out} by {self.index}")
        if len({tv.ndim for tv in tensors}) > 1:
            raise VerifyError(f"scatter: {', '.join(map(str, tensors))} differ in rank")


class IndexPutAccumulateOp(LibraryOp):
    """out is acc, and out[index[i], ..] += value[i, ..] for each i in order; index [n].

    An axis of value may be a broadcast. What is meant for a row outside goes nowhere.
    """

    out: TensorView = result()
    acc: TensorView = operand()
    index: TensorView = operand()
    value: TensorView = operand()
    RUNS_IN_STEPS: ClassVar[bool] = False
    KEEPS_EXPANDED: ClassVar[bool] = False
    TAKES_EMPTY: ClassVar[bool] = True
    TEXT = "{out}\n   = indexPutAccumulate(acc = {acc}, idx = {index}, value = {value} )"

    @property
    def name(self) -> str:
        return "index_put_accumulate"

    def axis_map(self, operand_index: int) -> AxisMap:
        if operand_index == 0:
            return tuple(range(self.out.ndim))
        return self.cut_map(operand_index, self.out)

    def cut_map(self, operand_index: int, out: TensorView) -> AxisMap:
        tv = (self.acc, self.index, self.value)[operand_index]
        axes = tv.domain.no_reductions if tv is not self.index else ()
        is_one = [a.is_broadcast and a.expanded is None for a in axes]
        found = [None if k == 0 or one else k for k, one in enumerate(is_one)]
        return (*found, *[None] * (self.out.ndim - len(found)))

    def whole_axes(self, out: TensorView) -> tuple[int, ...]:
        return (0,)

    def whole_operand_axes(self, operand_index: int) -> tuple[int, ...]:
        return (0,)

    def verify(self) -> None:
        ranks = self.acc.ndim, self.value.ndim, self.out.ndim
        if self.index.dtype() not in INDEX_DTYPES or self.index.ndim != 1 or len(set(ranks)) > 1:
            raise VerifyError(
                f"{self.name}: {self.acc}, {self.index} and {self.value} do not give {self.out}"
            )
        if not self.acc.dtype() is self.value.dtype() is self.out.dtype() or not self.out.ndim:
            raise VerifyError(f"{self.name}: {self.acc}, {self.value} and {self.out} differ")
