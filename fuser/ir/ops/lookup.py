"""Lookups, which read a table at the positions in an index tensor, and scatters, which write there.

The *looked-up axis* is the axis of the table along which the index selects positions. The values of
an index are known only inside kernels, and any element of a result may need any position of that
axis. Therefore these ops need the whole looked-up axis. Where devices split it, the sharding passes
replace the op: each device looks up in its shard of the table, and the results are added.

Indices in tensors begin at 0 and are never negative. In a kernel, an index outside of the axis
yields NaN, or 0 for a dtype without NaN. No memory is read in this case.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from fuser.ir.dtypes import DataType, dtype_text
from fuser.ir.fusion import AxisMap, TensorOp
from fuser.ir.op import attr, operand, result
from fuser.ir.ops.nodes import LibraryOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.support.errors import VerifyError, counted

if TYPE_CHECKING:
    from fuser.ir.fusion import TensorView

INDEX_DTYPES = (DataType.Int, DataType.Int32, DataType.Index)


def _dtype_of(value: TensorView | Scalar) -> DataType:
    return value.dtype if isinstance(value, Scalar) else value.dtype()


def _verify_index(name: str, index: TensorView | Scalar) -> None:
    dtype = _dtype_of(index)
    if dtype not in INDEX_DTYPES:
        raise VerifyError(
            f"{name}: the index must have the dtype Int or Int32, but {index} is "
            f"{dtype_text(dtype)}"
        )


def _axis_counts(tensors: Sequence[TensorView]) -> str:
    """Returns the number of axes of each tensor, for a message."""
    return ", ".join(f"{tv} has {counted(tv.ndim, 'axis')}" for tv in tensors)


class LookupOp(TensorOp):
    """Base class of the lookups, which read elements of `table` at the positions in `index`.

    `TABLE` is the position of the table among the operands, because some lookups have the index as
    first operand. The *looked-up axis* is the axis of the table along which `index` selects
    positions.
    """

    if TYPE_CHECKING:
        out: TensorView
        table: TensorView
        index: TensorView
        dim: int

    # The operand number of the table; the index is the other operand.
    TABLE: ClassVar[int] = 0

    @property
    def axis(self) -> int:
        """The looked-up axis: the axis of the table along which `index` selects positions."""
        return self.dim

    def table_map(self) -> AxisMap:
        """Returns, per axis of the table, the corresponding axis of the result, or None.

        The entry of the looked-up axis is None, because `index` selects the positions along it.
        """
        return tuple(None if k == self.axis else k for k in range(self.table.ndim))

    def index_map(self) -> AxisMap:
        """Returns, per axis of the index, the corresponding axis of the result."""
        return tuple(range(self.index.ndim))

    def narrowed(self) -> tuple[int, ...]:
        """Returns the axes along which the result may be shorter than the table.

        The looked-up axis, along which the index selects positions, is none of them. Along the
        returned axes, position k of the result reads position k of the table, as in `torch.gather`;
        the last positions of the table are not read. By default, there are no such axes.
        """
        return ()

    # ------------------------------------------------------------ axes
    def axis_map(self, operand_index: int) -> AxisMap:
        """Returns, per axis of the result, the corresponding operand axis, or None.

        The operand `inputs[operand_index]` is the table or the index. The entry for the table is
        None along the axes `narrowed`, because the result may be shorter there.
        """
        found: list[int | None] = [None] * len(self.out.domain.maybe_root)
        is_table = operand_index == self.TABLE
        for place, target in enumerate(self.table_map() if is_table else self.index_map()):
            if target is not None and not (is_table and target in self.narrowed()):
                found[target] = place
        return tuple(found)

    def cut_map(self, operand_index: int, out: TensorView) -> AxisMap:
        """Returns, per axis of `out`, the operand axis that devices may split together with it.

        The entry is None if there is no such axis, or if the result may be shorter than the table
        along it. Devices divide every tensor by its own size. If the result is shorter than the
        table, the block of the result on one device needs elements of the table on another device.
        """
        return _without(self.narrowed(), self.axis_map(operand_index))

    def whole_axes(self, out: TensorView) -> tuple[int, ...]:
        """Returns the axes of `out` that must not be split over devices.

        These are the axes along which the result may be shorter than the table. Devices divide
        every tensor by its own size, so the block of the result on one device would need elements
        of the table on another device.
        """
        return self.narrowed()

    def whole_operand_axes(self, operand_index: int) -> tuple[int, ...]:
        """Returns the axes of operand `operand_index` that must not be split over devices.

        For the table, the looked-up axis is included, because any position of it may be read. The
        other axes are those along which the result may be shorter than the table (`narrowed`).
        """
        narrowed = self.narrowed()
        if operand_index == self.TABLE:
            pairs = enumerate(self.table_map())
            return tuple(k for k, to in pairs if to is None or to in narrowed)
        return tuple(k for k, to in enumerate(self.index_map()) if to in narrowed)

    def verify(self) -> None:
        """Checks the dtype of the index, that the table has axis `dim`, and the numbers of axes.

        Raises:
            VerifyError: a check fails.
        """
        _verify_index(self.name, self.index)
        if self.out.dtype() is not self.table.dtype():
            raise VerifyError(
                f"{self.name}: the result {self.out} has the dtype "
                f"{dtype_text(self.out.dtype())}, expected {dtype_text(self.table.dtype())}, the "
                f"dtype of the table {self.table}"
            )
        rank = self.table.ndim
        if not 0 <= self.axis < rank:
            raise VerifyError(
                f"{self.name}: axis {self.axis} does not exist in {self.table}, which has "
                f"{counted(rank, 'axis')}"
            )
        if problem := self._wrong_operand():
            raise VerifyError(f"{self.name}: {problem}")
        targets = {t for t in (*self.table_map(), *self.index_map()) if t is not None}
        if targets != set(range(self.out.ndim)):
            index = f"the index {self.index} ({counted(len(self.index_map()), 'axis')})"
            raise VerifyError(
                f"{self.name}: the table {self.table} ({counted(rank, 'axis')}) and {index} need a "
                f"result with {counted(len(targets), 'axis')}, but {self.out} has "
                f"{counted(self.out.ndim, 'axis')}"
            )

    def _wrong_operand(self) -> str:
        """Returns the error text if table and index have wrong numbers of axes, else ""."""
        return ""


class SelectOp(LookupOp):
    """Selects one position of axis `dim` of a table: out[.., ..] = table[.., index, ..].

    The result lacks the axis `dim`. The index is a scalar. A negative index selects from the end of
    the axis.
    """

    out: TensorView = result()
    table: TensorView = operand()
    index: Scalar = operand()  # pyright: ignore[reportIncompatibleVariableOverride]
    dim: int = attr()
    TEXT = "{out}\n   = select( {table}, axis = {dim}, index = {index} )"

    @property
    def name(self) -> str:
        """The name of the op in messages and dumps: `select`."""
        return "select"

    def misfit(self, extent: int | None) -> str:
        """Returns an error message if the index is a constant outside of the axis, else "".

        `extent` is the number of elements along the axis, or None if it is unknown. An index that
        is an input of the fusion cannot be checked here.
        """
        place = sc.int_value(self.index)
        if extent is None or place is None or -extent <= place < extent:
            return ""
        return f"index {place} is outside of axis {self.dim} of {self.table}"

    def table_map(self) -> AxisMap:
        """Returns, per axis of the table, the corresponding axis of the result, or None.

        The entry of `dim` is None, because the result lacks this axis.
        """
        places = range(self.table.ndim)
        return tuple(None if k == self.dim else k - (k > self.dim) for k in places)

    def index_map(self) -> AxisMap:
        """Returns, per axis of the index, the axis of the result: () for a scalar index."""
        return ()


class IndexSelectOp(LookupOp):
    """Selects positions of axis `dim` of a table: out[.., i, ..] = table[.., index[i], ..].

    The index is a tensor of shape [n].
    """

    out: TensorView = result()
    table: TensorView = operand()
    index: TensorView = operand()
    dim: int = attr()
    TEXT = "{out}\n   = indexSelect( {table}, dim = {dim}, {index} )"

    @property
    def name(self) -> str:
        """The name of the op in messages and dumps: `index_select`."""
        return "index_select"

    def index_map(self) -> AxisMap:
        """Returns, per axis of the index, the corresponding axis of the result.

        The index has one axis, which becomes axis `dim` of the result.
        """
        return (self.dim,)

    def _wrong_operand(self) -> str:
        """Returns the error text if the index does not have exactly one axis, else ""."""
        if self.index.ndim == 1:
            return ""
        return (
            f"the index must have 1 axis, but {self.index} has {counted(self.index.ndim, 'axis')}"
        )


class EmbeddingFwdOp(LookupOp):
    """Reads rows of a table at the row numbers in `index`: out[*i, h] = table[index[*i], h].

    `*i` are all axes of the index, and h is the axis of the table's columns.
    """

    out: TensorView = result()
    index: TensorView = operand()
    table: TensorView = operand()
    TEXT = "{out}\n   = embedding_fwd( {index}, {table} )"
    TABLE: ClassVar[int] = 1
    dim: ClassVar[int] = 0  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def name(self) -> str:
        """The name of the op in messages and dumps: `embedding_fwd`."""
        return "embedding_fwd"

    def table_map(self) -> AxisMap:
        """Returns, per axis of the table, the corresponding axis of the result, or None.

        The table has rows and columns. The entry of the rows is None, because `index` selects them.
        The columns become the last axis of the result.
        """
        return (None, self.index.ndim)

    def _wrong_operand(self) -> str:
        """Returns the error text if the table does not have exactly two axes, else ""."""
        if self.table.ndim == 2:
            return ""
        return (
            f"the table must have 2 axes, but {self.table} has {counted(self.table.ndim, 'axis')}"
        )


class _AlongAxisOp(LookupOp):
    """Base class of lookups along axis `dim`: out[.., i, ..] = table[.., index[.., i, ..], ..].

    Table and index have the same number of axes.
    """

    def _wrong_operand(self) -> str:
        """Returns the error text if index and table have different numbers of axes, else ""."""
        if self.index.ndim == self.table.ndim:
            return ""
        return (
            f"the index must have as many axes as the table, but {self.index} has "
            f"{counted(self.index.ndim, 'axis')} and {self.table} has "
            f"{counted(self.table.ndim, 'axis')}"
        )


class TakeAlongAxisOp(_AlongAxisOp):
    """Reads a table along axis `dim`: out[.., i, ..] = table[.., index[.., i, ..], ..].

    The other axes of table and index have equal extents or are broadcast axes.
    """

    out: TensorView = result()
    table: TensorView = operand()
    index: TensorView = operand()
    dim: int = attr()
    TEXT = "{out}\n   = takeAlongAxis( {table}, {index}, dim = {dim} )"

    @property
    def name(self) -> str:
        """The name of the op in messages and dumps: `take_along_axis`."""
        return "take_along_axis"


class GatherOp(_AlongAxisOp):
    """Reads a table along axis `dim`, as torch.gather does.

    out[.., i, ..] = table[.., index[.., i, ..], ..]. Along the other axes, the index may be shorter
    than the table.
    """

    out: TensorView = result()
    table: TensorView = operand()
    index: TensorView = operand()
    dim: int = attr()
    TEXT = "{out}\n   = torchGather( {table}, dim = {dim}, {index} )"

    @property
    def name(self) -> str:
        """The name of the op in messages and dumps: `gather`."""
        return "gather"

    def narrowed(self) -> tuple[int, ...]:
        """Returns the axes, except `dim`, along which the index may be shorter than the table.

        The result has the size of the index, so it lacks the last positions of a longer table.
        """
        found = _differing(self.table, self.index)
        return tuple(k for k in found if k != self.dim)

    def limits(self) -> Iterator[tuple[int, TensorView]]:
        """Yields (axis, table) for each axis along which the table limits the length of the index.

        The index must not be longer than the table along these axes. It may be longer along `dim`,
        so this axis is omitted. Axes along which the sizes are certainly equal are also omitted.
        """
        return ((k, self.table) for k in self.narrowed())


def _differing(a: TensorView, b: TensorView) -> list[int]:
    """Returns the axes along which the sizes of `a` and `b` are not known to be equal.

    Both tensors have the same number of axes.
    """
    canonical = a.fusion.canonical
    pairs = enumerate(zip(a.domain.no_reductions, b.domain.no_reductions, strict=True))
    return [k for k, (x, y) in pairs if canonical(x.size) != canonical(y.size)]


def _without(positions: Collection[int], found: AxisMap) -> AxisMap:
    """Returns the axis map `found` with the entries at `positions` replaced by None.

    An axis map has, per axis of a result, the corresponding operand axis or None.
    """
    return tuple(None if k in positions else place for k, place in enumerate(found))


class ScatterOp(LibraryOp):
    """Writes into a copy of inp along axis `dim`: out[.., index[.., i, ..], ..] = src[.., i, ..].

    - src is a tensor or a number. The index may be shorter than a tensor src along all axes. The
      remaining elements of src are not read.
    - The index may be shorter than inp along the axes other than `dim`.
    - If several elements of the index have the same value, only one of the elements of src is
      written. It is undefined which of them.
    - Elements whose index is outside of the axis are ignored.
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
        """The name of the op in messages and dumps: `scatter`."""
        return "scatter"

    def limits(self) -> Iterator[tuple[int, TensorView]]:
        """Yields (axis, tensor) for each axis along which a tensor limits the length of the index.

        The tensor is inp or src: the index must not be longer. Along `dim`, the index may be longer
        than inp, so only src limits it. Axes along which the sizes are certainly equal are omitted.
        """
        yield from ((k, self.inp) for k in _differing(self.inp, self.index) if k != self.dim)
        if not isinstance(self.src, Scalar):
            yield from ((k, self.src) for k in _differing(self.src, self.index))

    def _whole(self) -> set[int]:
        """Returns the axes that must not be split over devices.

        These are `dim`, because any position of it may be written, and the axes along which the
        sizes of inp, index and src may differ. If two tensors of different sizes are split into
        equally many blocks, a device does not have the same positions of both.
        """
        return {self.dim, *(k for k, _ in self.limits())}

    def axis_map(self, operand_index: int) -> AxisMap:
        """Returns, per axis of the result, the corresponding operand axis, or None.

        All axes of inp correspond by position. The axes of index and src do so, except `dim` and
        the axes along which the sizes of inp, index and src may differ. Their entries are None.
        """
        places = tuple(range(self.out.ndim))
        return places if operand_index == 0 else _without(self._whole(), places)

    def cut_map(self, operand_index: int, out: TensorView) -> AxisMap:
        """Returns, per axis of `out`, the operand axis that devices may split together with it.

        Axes correspond by position. The entries of `dim` and of the axes along which the sizes of
        inp, index and src may differ are None.
        """
        return _without(self._whole(), tuple(range(self.out.ndim)))

    def whole_axes(self, out: TensorView) -> tuple[int, ...]:
        """Returns the axes of `out` that must not be split over devices.

        These are `dim`, because any position of it may be written, and the axes along which the
        sizes of inp, index and src may differ.
        """
        return tuple(sorted(self._whole()))

    def whole_operand_axes(self, operand_index: int) -> tuple[int, ...]:
        """Returns the axes of operand `operand_index` that must not be split over devices.

        These are `dim`, because any position of it may be written, and the axes along which the
        sizes of inp, index and src may differ.
        """
        return tuple(sorted(self._whole()))

    def verify(self) -> None:
        """Checks the dtype of the index, that axis `dim` exists, and the numbers of axes.

        Raises:
            VerifyError: a check fails.
        """
        tensors = [self.out, self.inp, self.index]
        tensors += [self.src] if not isinstance(self.src, Scalar) else []
        _verify_index(self.name, self.index)
        if not 0 <= self.dim < self.out.ndim:
            raise VerifyError(
                f"scatter: axis {self.dim} does not exist in the result {self.out}, which has "
                f"{counted(self.out.ndim, 'axis')}"
            )
        if len({tv.ndim for tv in tensors}) > 1:
            raise VerifyError(
                "scatter: all tensors must have the same number of axes, but "
                f"{_axis_counts(tensors)}"
            )


class IndexPutAccumulateOp(LibraryOp):
    """Adds rows to rows of a copy of acc: out[index[i], ..] += value[i, ..] for each i in order.

    `index` has one axis. An axis of value may have size 1 and is then broadcast. Rows of value
    whose index is outside of acc are ignored.
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
        """The name of the op in messages and dumps: `index_put_accumulate`."""
        return "index_put_accumulate"

    def axis_map(self, operand_index: int) -> AxisMap:
        """Returns, per axis of the result, the corresponding operand axis, or None.

        All axes of acc correspond by position. For other operands, the entry of axis 0 (the rows)
        is None, because `index` selects the rows. The entries of axes of size 1 are None, because
        they are broadcast.
        """
        if operand_index == 0:
            return tuple(range(self.out.ndim))
        return self.cut_map(operand_index, self.out)

    def cut_map(self, operand_index: int, out: TensorView) -> AxisMap:
        """Returns, per axis of `out`, the operand axis that devices may split together with it.

        Axes correspond by position. The entry of axis 0 (the rows) is None, because any row of
        value may be added to any row of the result. The entries of axes of size 1 are None, because
        each device needs the only element.
        """
        tv = (self.acc, self.index, self.value)[operand_index]
        axes = tv.domain.no_reductions if tv is not self.index else ()
        is_one = [a.is_broadcast and a.expanded is None for a in axes]
        found = [None if k == 0 or single else k for k, single in enumerate(is_one)]
        return (*found, *[None] * (self.out.ndim - len(found)))

    def whole_axes(self, out: TensorView) -> tuple[int, ...]:
        """Returns the axes of `out` that must not be split over devices.

        This is axis 0, because any row of value may be added to any row of the result.
        """
        return (0,)

    def whole_operand_axes(self, operand_index: int) -> tuple[int, ...]:
        """Returns the axes of operand `operand_index` that must not be split over devices.

        This is axis 0, because any row of value may be added to any row of the result.
        """
        return (0,)

    def verify(self) -> None:
        """Checks the number of axes and the dtype of all tensors.

        Raises:
            VerifyError: a check fails.
        """
        _verify_index(self.name, self.index)
        if self.index.ndim != 1:
            raise VerifyError(
                f"{self.name}: the index must have 1 axis, but {self.index} has "
                f"{counted(self.index.ndim, 'axis')}"
            )
        tensors = [self.acc, self.value, self.out]
        if len({tv.ndim for tv in tensors}) > 1 or not self.out.ndim:
            raise VerifyError(
                f"{self.name}: acc, value and result must have the same number of axes, at least "
                f"1, but {_axis_counts(tensors)}"
            )
        if len({tv.dtype() for tv in tensors}) > 1:
            found = ", ".join(f"{tv} is {dtype_text(tv.dtype())}" for tv in tensors)
            raise VerifyError(
                f"{self.name}: acc, value and result must have the same dtype, but {found}"
            )
