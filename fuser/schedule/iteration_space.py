"""The iteration space of a kernel: the memory layouts of its inputs and outputs.

Layouts are expressed in the axes of one tensor, the reference tensor, whose loops all other tensors
of the kernel copy. Schedulers ask three questions:

- Which loop order follows memory?
- Which runs of adjacent axes are contiguous in every tensor? Each run becomes one loop.
- Which tensors can be accessed in vectors?
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from math import gcd

from fuser.ir.axis_graph import AxisGraph
from fuser.ir.dtypes import nbytes_of
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.ops.lookup import LookupOp
from fuser.ir.ops.nodes import CatOp, PadOp, SliceOp
from fuser.ir.types import IterType
from fuser.schedule.input_facts import Facts
from fuser.schedule.loop_propagation import AxisMatcher
from fuser.support.device import LOADS_PER_VECTOR, VECTOR_BYTES
from fuser.support.record import record

RESIZING: tuple[type[TensorOp], ...] = (SliceOp, PadOp, CatOp)


@record
class Access:
    """The memory layout of one input or output, in logical axes of the reference tensor.

    The reference tensor is the one whose loops all other tensors of the kernel copy.

    - `order`: the positions of reference axes, outermost in memory first. The order is None for a
      tensor that is read through a resize, or that has other axes than the reference tensor.
    - `contiguous[k]`: whether axis `order[k]` is contiguous with the next axis in `order`. Its
      stride then equals the size times the stride of that axis. For the last axis: whether the
      stride is 1.
    - `table_order`: replaces `order` for the table of a lookup (gather), and leaves out the axis
      along which elements are looked up.
    """

    tv: TensorView
    is_output: bool
    order: tuple[int, ...] | None
    contiguous: tuple[bool, ...] = ()
    table_order: tuple[int, ...] | None = None

    @cached_property
    def nbytes(self) -> int:
        """The number of bytes of one element."""
        return nbytes_of(self.tv.dtype())

    @property
    def is_viewed(self) -> bool:
        """Whether the tensor is an input that is read through a view.

        The axes of such an input are not those of the reference tensor, whose loops all others
        copy.
        """
        return not self.is_output and self.order is None and self.table_order is None

    def joins(self, outer: int, inner: int) -> bool:
        """Returns whether one loop can iterate the adjacent axes `outer` and `inner` of this
        tensor.

        `outer` and `inner` are axis positions in the reference tensor, whose loops this tensor
        copies. Returns True in three cases:

        - The two axes are contiguous in memory.
        - The tensor has neither axis.
        - The tensor is read through a view: its index is then computed from all axes anyway.
        """
        order = self.order if self.table_order is None else self.table_order
        if order is None:
            return True  # a view computes its index from all axes anyway
        if outer not in order or inner not in order:
            return outer not in order and inner not in order
        at = order.index(outer)
        return at + 1 < len(order) and order[at + 1] == inner and self.contiguous[at]

    def is_vector_candidate(self, inner: int) -> bool:
        """Returns whether the elements along axis `inner` are neighbours in memory, as vectors
        need.

        `inner` is an axis position in the reference tensor, whose loops this tensor copies.
        """
        return bool(self.order) and self.order[-1] == inner and self.contiguous[-1]  # pyright: ignore[reportOptionalSubscript]


@record
class Space:
    """An iteration space: the layouts of a kernel's inputs and outputs relative to one tensor.

    - `reference`: this tensor, whose loops all other tensors of the kernel copy.
    - `concrete`: the positions of its logical axes that are no broadcasts.
    - `accesses`: the layouts, in the axes of `reference`.
    """

    reference: TensorView
    concrete: tuple[int, ...]
    accesses: tuple[Access, ...]

    def is_reduced(self, position: int) -> bool:
        """Returns whether the reference tensor, whose loops all others copy, reduces its axis at
        `position`.
        """
        return self.reference.domain.logical[position].is_reduction()

    def is_full(self, access: Access) -> bool:
        """Returns whether a tensor has all axes that the kernel iterates, in a known order.

        These are the axes of the reference tensor, except broadcasts.
        """
        return access.order is not None and len(access.order) == len(self.concrete)

    def memory_order(self) -> tuple[int, ...]:
        """Returns the memory order in which loops should be nested, because most tensors have this
        order.

        Each tensor with the largest number of axes has one vote, weighted by the bytes of an
        element. If two orders have equally many votes, that of an output wins, because uncoalesced
        stores cost more than uncoalesced loads. The result lists the positions of all axes that are
        no broadcasts, outermost first.
        """
        votes: dict[tuple[int, ...], tuple[int, int]] = {}
        size = max((len(a.order) for a in self.accesses if a.order is not None), default=0)
        for access in self.accesses:
            if access.order is None or len(access.order) != size:
                continue
            votes_for = votes.get(access.order, (0, 0))
            votes[access.order] = (
                votes_for[0] + access.nbytes,
                votes_for[1] + access.is_output,
            )
        best = max(votes, key=lambda o: votes[o]) if votes else ()
        if size < len(self.concrete) and any(a.is_viewed for a in self.accesses):
            return self.concrete  # full tensors are read through views, whose order is the logical
        # Axes that this order lacks become outermost. This happens if no tensor has all axes.
        return (*(p for p in self.concrete if p not in best), *best)

    def runs(self, order: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Splits an axis order into runs of adjacent axes, as long as possible, that one loop can
        iterate.

        The axes of a run are contiguous in every tensor. A run has only reduced axes, or only
        others. `order` lists axis positions, outermost first.
        """
        runs: list[list[int]] = []
        for position in order:
            last = runs[-1][-1] if runs else None
            if (
                last is not None
                and self.is_reduced(last) == self.is_reduced(position)
                and all(a.joins(last, position) for a in self.accesses)
            ):
                runs[-1].append(position)
            else:
                runs.append([position])
        return tuple(tuple(r) for r in runs)

    def are_dense(self, accesses: Iterable[Access]) -> bool:
        """Returns whether all tensors in `accesses` have all axes in the same order, without gaps
        in memory.
        """
        order = self.memory_order()
        return all(a.order == order and all(a.contiguous) for a in accesses)

    def vector_candidates(self, inner: int) -> tuple[Access, ...]:
        """Returns the inputs and outputs that could be accessed in vectors along the axis `inner`.

        Their elements along this axis are neighbours in memory. `inner` is an axis position in the
        reference tensor, whose loops all others copy.
        """
        return tuple(a for a in self.accesses if a.is_vector_candidate(inner))


def iteration_space(fusion: Fusion, reference: TensorView, graph: AxisGraph | None = None) -> Space:
    """Returns the layouts of a fusion's inputs and outputs in the logical axes of `reference`.

    `reference` is the tensor whose loops all others will copy. `graph` relates the axes of tensors;
    if it is None, it is computed.
    """
    graph = graph or AxisGraph(fusion)
    logical = reference.domain.logical
    matcher = AxisMatcher(graph, reference)
    # A reduction over a broadcast axis still iterates. Any other broadcast needs no loop.
    concrete = tuple(k for k, a in enumerate(logical) if a.kind is not IterType.broadcast)
    place = {logical[k].number: k for k in concrete}
    resized = tensors_above_resize(fusion)
    tables = {op.table: op for op in fusion.exprs if isinstance(op, LookupOp)}
    # A table that is also read at the reader's own index has the layout of that access.
    tables = {tv: op for tv, op in tables.items() if not direct_uses(tv)}
    outputs = dict.fromkeys(fusion.outputs)
    accesses: list[Access] = []
    read = (v for v in fusion.inputs if isinstance(v, TensorView) and fusion.uses(v))
    for tv in (*read, *outputs):
        if tv in tables:
            accesses.append(_table_access(tables[tv], matcher, place))
            continue
        order: list[int] = []
        flags: list[bool] = []
        known = tv not in resized or tv in outputs
        for axis, flag in zip(tv.domain.maybe_allocation, tv.domain.contiguity, strict=True):
            if flag is None:
                continue
            match = matcher.reference_of(axis)
            if match is None or match.number not in place:
                known = False
                break
            order.append(place[match.number])
            flags.append(flag)
        known = known and len(set(order)) == len(order)
        accesses.append(
            Access(
                tv, tv in outputs, tuple(order) if known else None, tuple(flags) if known else ()
            )
        )
    return Space(reference, concrete, tuple(accesses))


def _table_access(op: LookupOp, matcher: AxisMatcher, place: Mapping[int, int]) -> Access:
    """Returns the memory layout of a lookup's table, without the axis along which elements are
    looked up.

    That axis has no loop, because its index is data. `matcher` returns, for an axis of the lookup,
    the equal axis of the reference tensor, which is the tensor whose loops all others copy. `place`
    maps the number (id) of an axis of the reference tensor to its position.
    """
    domain, roots = op.table.domain, op.out.domain.maybe_root
    targets = dict(zip((a.number for a in domain.no_reductions), op.table_map(), strict=True))
    order: list[int] = []
    flags: list[bool] = []
    for axis, flag in zip(domain.maybe_allocation, domain.contiguity, strict=True):
        if flag is None:
            continue
        target = targets.get(axis.number)
        match = None if target is None else matcher.reference_of(roots[target])
        if match is not None and match.number in place:
            order.append(place[match.number])
            flags.append(flag and target not in op.narrowed())
        elif flags:
            flags[-1] = False  # the looked-up axis is inside the axis before
    return Access(op.table, False, None, tuple(flags), tuple(order))


def direct_uses(tv: TensorView) -> list[TensorOp]:
    """Returns the ops that read a tensor, except lookups that use the tensor as their table.

    The index at which such a lookup reads is itself loaded from memory, so the lookup cannot read a
    copy of the tensor in registers. All other ops read at an index that their own loops determine.
    """
    uses = tv.fusion.uses(tv)
    return [op for op in uses if not (isinstance(op, LookupOp) and op.table is tv)]


def tensors_above_resize(fusion: Fusion) -> frozenset[TensorView]:
    """Returns the tensors that a slice, pad or concatenation reads at a shifted index.

    Tensors from which such an operand is computed are included.
    """
    found: set[TensorView] = set()
    for op in reversed(fusion.exprs):
        if isinstance(op, RESIZING) or any(o in found for o in op.outputs):
            found.update(v for v in op.inputs if isinstance(v, TensorView))
    return frozenset(found)


def has_self_mapping(graph: AxisGraph, tensors: Iterable[TensorView]) -> TensorView | None:
    """Returns the first tensor with two axes that must be iterated by the same loop, or None.

    In `x + x.t()`, both axes of `x` are such axes. A scheduler rejects such a fusion unless it
    gives each op loops of its own.
    """
    for tv in tensors:
        classes = [graph.find(a) for a in tv.domain.logical if not a.is_broadcast]
        if len(set(classes)) < len(classes):
            return tv
    return None


# ----------------------------------------------------------------------
# Vector widths: the number of consecutive elements that one access may move.

# Rows of at least this many elements are shifted to aligned addresses if vectors do not divide
# them.
SHIFTED_COLUMNS = 64


def _none(access: Access) -> bool:
    return False


class VectorWidths:
    """Computes how many elements a vector load or store of a kernel can have.

    The object is created once for a fusion, and serves inputs of all sizes and alignments. The
    number is a power of two that is possible for every tensor in `candidates`. It has three limits:

    - at most 16 bytes of the largest element type;
    - a divisor of the extent of the contiguous innermost axes, so that a row ends with a whole
      vector;
    - every tensor's alignment in bytes.

    `shared` returns whether a tensor has the same values for every row, such as a weight. Such a
    tensor may have a larger element type than the rows. It is loaded by several accesses per
    vector, and does not make the rows' vectors narrower.
    """

    def __init__(
        self, candidates: Sequence[Access], *, shared: Callable[[Access], bool] = _none
    ) -> None:
        self._candidates = [(a, LOADS_PER_VECTOR if shared(a) else 1) for a in candidates]
        self._aligned = self._within(Facts({}))

    def of(self, facts: Facts, inner_extent: int) -> int:
        """Returns the number of elements of a vector, for inputs with these sizes and alignments.

        `inner_extent` is the number of elements along the contiguous innermost axes. The result is
        a divisor of this number, so that no vector crosses the end of a row.
        """
        return gcd(self.within(facts), inner_extent) if inner_extent else 1

    def wider(self, facts: Facts, columns: int, width: int) -> int:
        """Returns the number of elements of a vector if the read of each row begins at an aligned
        address, at or before the row's first element.

        Vectors need not divide such shifted rows (`ir.domain.Shift`), so vectors can be wider.
        Returns 0 if vectors would not be wider than `width`, or if a row has few elements
        (`columns`).
        """
        shifted = self.within(facts) if columns >= SHIFTED_COLUMNS else 0
        return shifted if shifted > width else 0

    def within(self, facts: Facts) -> int:
        """Returns the number of elements of a vector that element sizes and alignments allow.

        The extents of axes are ignored.
        """
        return self._within(facts) if facts.alignments else self._aligned

    def _within(self, facts: Facts) -> int:
        width = VECTOR_BYTES if self._candidates else 1
        for access, loads in self._candidates:
            aligned = facts.alignment(access.tv.number)
            most = VECTOR_BYTES * loads if aligned >= VECTOR_BYTES else aligned
            width = min(width, max(most // access.nbytes, 1))
        return width


def power_of_two_at_least(n: int) -> int:
    """Returns the smallest power of two that is at least `n`; for n < 1, returns 1."""
    return 1 << max(n - 1, 0).bit_length()


def power_of_two_at_most(n: int) -> int:
    """Returns the largest power of two that is at most `n`; for n < 1, returns 1."""
    return 1 << (max(n, 1).bit_length() - 1)
