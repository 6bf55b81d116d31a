"""The iteration space of a kernel: how its inputs and outputs lie in memory along the axes of one
reference tensor.

Schedulers ask it for a loop order that follows memory, for the runs of axes that are contiguous in
every tensor (each run becomes one loop), and for the tensors that can be accessed in vectors.
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
from fuser.support.device import LOADED_WORDS, VECTOR_BYTES
from fuser.support.record import record

RESIZING: tuple[type[TensorOp], ...] = (SliceOp, PadOp, CatOp)


@record
class Access:
    """How one input or output lies along the reference's logical axes.

    `order` holds positions of reference axes, outermost in memory first; `contiguous[k]` says that
    the stride of `order[k]` is the extent times the stride of `order[k + 1]` (last: 1). A tensor
    that is reached through a resize, or whose axes are not reference axes, has no order; of a
    table, read at looked-up places, `beside` says the same as `order` without the looked-up axis.
    """

    tv: TensorView
    is_output: bool
    order: tuple[int, ...] | None
    contiguous: tuple[bool, ...] = ()
    beside: tuple[int, ...] | None = None

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one element."""
        return nbytes_of(self.tv.dtype())

    @property
    def is_viewed(self) -> bool:
        """Whether an input is reached through a view: its axes are none of the reference's."""
        return not self.is_output and self.order is None and self.beside is None

    def joins(self, outer: int, inner: int) -> bool:
        """Whether the reference axes `outer`, `inner` are one run in this tensor's memory."""
        order = self.order if self.beside is None else self.beside
        if order is None:
            return True  # its index goes through a view in any case
        if outer not in order or inner not in order:
            return outer not in order and inner not in order
        at = order.index(outer)
        return at + 1 < len(order) and order[at + 1] == inner and self.contiguous[at]

    def is_vector_candidate(self, inner: int) -> bool:
        """Whether consecutive iterations of reference axis `inner` are consecutive in memory."""
        return bool(self.order) and self.order[-1] == inner and self.contiguous[-1]  # pyright: ignore[reportOptionalSubscript]


@record
class Space:
    """The reference tensor, its concrete axes as positions in its logical domain, the accesses."""

    reference: TensorView
    concrete: tuple[int, ...]
    accesses: tuple[Access, ...]

    def is_reduced(self, position: int) -> bool:
        return self.reference.domain.logical[position].is_reduction()

    def is_full(self, access: Access) -> bool:
        """Whether a tensor has all concrete axes, in a known order."""
        return access.order is not None and len(access.order) == len(self.concrete)

    def memory_order(self) -> tuple[int, ...]:
        """Returns the concrete axes in the memory order that most bytes of full tensors have.

        Outputs win ties: uncoalesced stores cost more than uncoalesced loads.
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
            return self.concrete  # nothing is known of what has all axes: a view follows memory
        # Axes that the winner lacks (a reference without any full tensor) go outside.
        return (*(p for p in self.concrete if p not in best), *best)

    def runs(self, order: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Splits an axis order into maximal runs that are contiguous in every tensor; a run never
        holds reduced and iterated axes."""
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
        """Whether tensors hold all axes, one element behind the other, in the same order."""
        order = self.memory_order()
        return all(a.order == order and all(a.contiguous) for a in accesses)

    def vector_candidates(self, inner: int) -> tuple[Access, ...]:
        return tuple(a for a in self.accesses if a.is_vector_candidate(inner))


def iteration_space(fusion: Fusion, reference: TensorView, graph: AxisGraph | None = None) -> Space:
    """Describes the inputs and outputs of a fusion along the logical axes of `reference`."""
    graph = graph or AxisGraph(fusion)
    logical = reference.domain.logical
    matcher = AxisMatcher(graph, reference)
    # A reduction over a broadcast axis still repeats; any other broadcast is no loop.
    concrete = tuple(k for k, a in enumerate(logical) if a.kind is not IterType.broadcast)
    place = {logical[k].number: k for k in concrete}
    resized = tensors_above_resize(fusion)
    tables = {op.table: op for op in fusion.exprs if isinstance(op, LookupOp)}
    # What is read at its own index, too, lies as that says.
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
    """Says how a table lies in memory beside its looked-up axis."""
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
            flags[-1] = False  # the looked-up axis lies inside of the one before
    return Access(op.table, False, None, tuple(flags), tuple(order))


def direct_uses(tv: TensorView) -> list[TensorOp]:
    """Returns the ops that read a tensor at no looked-up places."""
    uses = tv.fusion.uses(tv)
    return [op for op in uses if not (isinstance(op, LookupOp) and op.table is tv)]


def tensors_above_resize(fusion: Fusion) -> frozenset[TensorView]:
    """Returns the tensors that some consumer reads at a shifted index (slice, pad, cat)."""
    found: set[TensorView] = set()
    for op in reversed(fusion.exprs):
        if isinstance(op, RESIZING) or any(o in found for o in op.outputs):
            found.update(v for v in op.inputs if isinstance(v, TensorView))
    return frozenset(found)


def has_self_mapping(graph: AxisGraph, tensors: Iterable[TensorView]) -> TensorView | None:
    """Returns a tensor that has one axis twice (x + x.t()), None when there is none."""
    for tv in tensors:
        classes = [graph.find(a) for a in tv.domain.logical if not a.is_broadcast]
        if len(set(classes)) < len(classes):
            return tv
    return None


# ----------------------------------------------------------------------
# Vector widths: how many consecutive elements one access may move.

# Rows of that many elements are shifted to words of memory, where these do not divide them.
SHIFTED_COLUMNS = 64


def _none(access: Access) -> bool:
    return False


class VectorWidths:
    """The widest power of two that suits all candidates, for the facts of many input classes.

    At most 16 bytes of the largest element; a divisor of the extent of the contiguous inner run
    (the last vector of a row is then a whole one); within every tensor's alignment in bytes. A wide
    weight does not narrow accesses to rows: what is `shared` by them is loaded in several words.
    """

    def __init__(
        self, candidates: Sequence[Access], *, shared: Callable[[Access], bool] = _none
    ) -> None:
        self._candidates = [(a, LOADED_WORDS if shared(a) else 1) for a in candidates]
        self._aligned = self._within(Facts({}))

    def of(self, facts: Facts, inner_extent: int) -> int:
        """Returns the width where the inner run has this extent."""
        return gcd(self.within(facts), inner_extent) if inner_extent else 1

    def wider(self, facts: Facts, columns: int, width: int) -> int:
        """Returns the width for rows that are shifted to words of memory (`ir.domain.Shift`), where
        it is larger than `width`; else 0."""
        shifted = self.within(facts) if columns >= SHIFTED_COLUMNS else 0
        return shifted if shifted > width else 0

    def within(self, facts: Facts) -> int:
        """Returns the width where the inner run may have any extent."""
        return self._within(facts) if facts.alignments else self._aligned

    def _within(self, facts: Facts) -> int:
        width = VECTOR_BYTES if self._candidates else 1
        for access, words in self._candidates:
            aligned = facts.alignment(access.tv.number)
            most = VECTOR_BYTES * words if aligned >= VECTOR_BYTES else aligned
            width = min(width, max(most // access.nbytes, 1))
        return width


def power_of_two_at_least(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def power_of_two_at_most(n: int) -> int:
    return 1 << (max(n, 1).bit_length() - 1)
