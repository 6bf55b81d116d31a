"""Redistribution: the cheapest sequence of communications that changes a tensor's placement.

The placement of a tensor says along which mesh dimensions its axes are divided. One communication
changes the division along one mesh dimension. DIDx(M) is an axis M that is divided over the devices
of mesh dimension DIDx:

    x [DIDx(M), N]  ->  [M, N]            gather: an allgather
    x [M, N]        ->  [DIDx(M), N]      slice: each device keeps its block, nothing is sent
    x [DIDx(M), N]  ->  [M, DIDx(N)]      move: an all-to-all

If each device has only a part of a sum, one communication adds the parts along one mesh dimension:

    x [M, N, parts DIDx]  ->  [M, N]           allreduce
    x [M, N, parts DIDx]  ->  [DIDx(M), N]     reduce-scatter

Only the innermost division of an axis can change, because the blocks inside it would be others.
`plan_steps` and `plan_sums` search all sequences of these steps; see `PlanCost` for what the
cheapest one is.

A tensor changes its mesh in one communication, too (`mesh_transfer`). `plan_arrival` returns the
placement in which it arrives: the last one, or one that divides the tensor over more devices, so
that less is sent between the meshes, and an allgather on the new mesh follows:

    x [DIDx(M), N] on {0 1}  ->  [DIDx(M), N] on {{2 3}{4 5}}  ->  [M, N] on {{2 3}{4 5}}
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import count, takewhile, zip_longest
from math import prod

from fuser.ir.domain.device_mesh import DeviceMesh
from fuser.ir.types import DEVICE_TYPES, ParallelType
from multidevice.sharding.mesh_transfer import transfer_between
from multidevice.sharding.placement import Cut, Cuts, Placement, without_streams


@dataclass(frozen=True, order=True)
class PlanCost:
    """The cost of a sequence of changes of placement; costs are compared field by field, in order.

    - `sent`: the elements that each device sends, as a fraction of the elements of the whole
      tensor.
    - `communications`: the number of communications.
    - `held`: the elements of all intermediate tensors on one device, as such a fraction.
    - `slices`: the number of local slices.

    The fractions do not depend on the extents of the tensor, so a plan is valid for all sizes, and
    all ranks find the same one.
    """

    sent: Fraction = Fraction(0)
    communications: int = 0
    held: Fraction = Fraction(0)
    slices: int = 0

    def __add__(self, other: PlanCost) -> PlanCost:
        return PlanCost(
            self.sent + other.sent,
            self.communications + other.communications,
            self.held + other.held,
            self.slices + other.slices,
        )


@dataclass(frozen=True)
class SumStage:
    """The state of a tensor between two communications.

    - `placement`: how devices divide its axes; axes of parts of a sum have no entry.
    - `parts`: one division for each mesh dimension along which devices have parts of a sum. Their
      parts are still to be added.
    """

    placement: Placement
    parts: Cuts = ()


def plan_steps(
    source: Placement, target: Placement, copied: Collection[int] = ()
) -> list[Placement]:
    """Returns the placements through which a copy passes from `source` to `target`, excluding both.

    A placement lists, for each axis, its divisions (cuts) over devices and the iterations of a
    stream loop, outermost first. From one placement to the next, the division along one mesh
    dimension is removed, added, or moved to another axis. The sequence is the cheapest one by
    `PlanCost`. If one of the placements has iterations of a stream loop, dimensions are only
    removed and added, because an all-to-all has no form for the steps of such a loop. `copied` has
    the positions of broadcast axes: each device stores their only element, so their division never
    costs a communication.
    """
    if any(not cut.ptype.is_device for cuts in (*source, *target) for cut in cuts):
        return _steps_of_streams(source, target)
    _, stages = _cheapest(SumStage(source), target, frozenset(copied))
    return [stage.placement for stage in stages]


def plan_sums(source: SumStage, target: Placement, copied: Collection[int] = ()) -> list[SumStage]:
    """Returns the stages through which a sum passes from the partial sums of `source` to the
    complete sum with the placement `target`, excluding both.

    From one stage to the next, the partial sums along one mesh dimension are added, or the
    placement changes as in `plan_steps`. The sequence is the cheapest one by `PlanCost`. `copied`
    has the positions of broadcast axes, whose only element every device stores. The caller ensures
    that no axis has iterations of a stream loop.
    """
    return list(_cheapest(source, target, frozenset(copied))[1])


def sum_cost(source: SumStage, target: Placement, copied: Collection[int] = ()) -> PlanCost:
    """Returns the cost of the sequence that `plan_sums` returns for the same arguments."""
    return _cheapest(source, target, frozenset(copied))[0]


def plan_arrival(
    source: tuple[DeviceMesh, Placement],
    target: tuple[DeviceMesh, Placement],
    copied: Collection[int] = (),
) -> Placement:
    """Returns the placement in which a tensor arrives on another mesh, on its way to `target`.

    `source` and `target` are pairs (mesh, placement). The result is the target's placement, or the
    same with more divisions, which allgathers on the target's mesh remove afterwards. The sequence
    is the cheapest one by `PlanCost`. Neither placement has iterations of a stream loop; `copied`
    is as for `plan_steps`.
    """
    broadcast = frozenset(copied)

    def cost(arrival: tuple[PlanCost, Placement]) -> PlanCost:
        transfer = transfer_between(source, (target[0], arrival[1]), broadcast)
        return arrival[0] + PlanCost(transfer.sent, communications=not transfer.is_local)

    return min(_arrivals(source[1], *target, broadcast), key=cost)[1]


def _arrivals(
    source: Placement, mesh: DeviceMesh, target: Placement, copied: frozenset[int]
) -> Iterator[tuple[PlanCost, Placement]]:
    """Yields `target`, and each placement on `mesh` from which allgathers lead to it, with their
    cost.

    An axis is divided only into b blocks such that b divides the number of its blocks in `source`.
    The extent of the axis is known to be a multiple of such a b, but of no other.
    """
    used = {c.ptype for cuts in target for c in cuts}
    found = [(PlanCost(), target)]
    for ptype in (p for p in DEVICE_TYPES[: mesh.ndim] if p not in used and mesh.size_of(p) > 1):
        for cost, at in tuple(found):
            for axis, cuts in enumerate(at):
                wider = (*cuts, Cut(ptype, mesh.size_of(ptype)))
                if axis in copied or _number(source[axis]) % _number(wider):
                    continue
                after = _put(at, axis, wider)
                share = _share(after, copied)
                gather = PlanCost(share * (mesh.size_of(ptype) - 1), communications=1, held=share)
                found.append((cost + gather, after))
    yield from found


def step_cost(source: SumStage, target: SumStage, copied: Collection[int] = ()) -> PlanCost | None:
    """Returns the cost of the one communication or local slice that makes `target` of `source`.

    Returns None if it takes several. `copied` is as in `plan_steps`.
    """
    for cost, after in _changes(source, source.placement, target.placement, frozenset(copied)):
        if _key(after) == _key(target):
            return cost
    return None


def cheapest_detour(
    source: SumStage, target: Placement, copied: Collection[int] = ()
) -> tuple[PlanCost, tuple[SumStage, ...]] | None:
    """Returns the cost and the stages of the cheapest sequence from `source` to `target` that has
    more than one step; the stages exclude both ends.

    Returns None if no sequence has several steps. `copied` is as in `plan_steps`.
    """
    direct = _key(source), _key(SumStage(target))
    return _search(source, target, frozenset(copied), barred=direct)


def moved_axes_of(source: Placement, target: Placement) -> tuple[int, int] | None:
    """Returns (axis before, axis after) if `target` is `source` with one division moved: an
    all-to-all.

    The innermost division of one axis is then the innermost one of another axis. Returns None if
    the placements differ in another way.
    """
    old, new = _blocks(source), _blocks(target)
    differing = [p for p, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    for before, after in (differing, differing[::-1]) if len(differing) == 2 else ():
        is_gone = old[before] and old[before][:-1] == new[before]
        is_new = new[after] and new[after][:-1] == old[after]
        if is_gone and is_new and old[before][-1] == new[after][-1]:
            return before, after
    return None


def _blocks(placement: Placement) -> tuple[tuple[tuple[ParallelType, object], ...], ...]:
    """Returns the parallel type and number of blocks of each cut: equal for equal blocks."""
    return tuple(tuple((c.ptype, c.count) for c in cuts) for cuts in placement)


# ------------------------------------------------------------------ the search
@lru_cache(maxsize=4096)
def _cheapest(
    source: SumStage, target: Placement, copied: frozenset[int]
) -> tuple[PlanCost, tuple[SumStage, ...]]:
    """Returns the cost and the intermediate stages of the cheapest sequence (Dijkstra's
    algorithm).
    """
    found = _search(source, target, copied)
    assert found is not None, (
        f"internal error: no sequence of communications leads from {source} to {target}. Please "
        "report this definition"
    )
    return found


def _search(
    source: SumStage,
    target: Placement,
    copied: frozenset[int],
    *,
    barred: tuple[object, object] | None = None,
) -> tuple[PlanCost, tuple[SumStage, ...]] | None:
    """Returns the cost and the intermediate stages of the cheapest sequence without the step
    `barred`, a pair of keys of stages. Returns None if there is no such sequence.
    """
    order, goal = count(), _key(SumStage(target))
    queue: list[tuple[PlanCost, int, SumStage, tuple[SumStage, ...]]] = [
        (PlanCost(), 0, source, ())
    ]
    done: set[object] = set()
    while queue:
        cost, _, at, passed = heapq.heappop(queue)
        key = _key(at)
        if key == goal:
            return cost, passed[1:]
        if key in done:
            continue
        done.add(key)
        for step, after in _changes(at, source.placement, target, copied):
            if (key, _key(after)) == barred:
                continue
            # The last tensor must exist in any case, so holding it costs nothing.
            is_last = _key(after) == goal
            held = PlanCost(held=Fraction(0) if is_last else _share(after.placement, copied))
            heapq.heappush(queue, (cost + step + held, next(order), after, (*passed, at)))
    return None


def _key(stage: SumStage) -> object:
    """Returns a value that is equal for stages in which all devices have equal data."""
    return _blocks(stage.placement), stage.parts


def _share(placement: Placement, copied: frozenset[int]) -> Fraction:
    """Returns the fraction of a tensor's elements that one device has."""
    return Fraction(1, prod(_number(c) for p, c in enumerate(placement) if p not in copied))


def _changes(
    at: SumStage, source: Placement, target: Placement, copied: frozenset[int]
) -> Iterator[tuple[PlanCost, SumStage]]:
    """Yields each stage that one communication or local slice makes of `at`, with its cost."""
    yield from _sums(at, source, target, copied)
    used = {c.ptype for c in at.parts}
    for cost, after in _moves(at.placement, used, source, target, copied):
        yield cost, SumStage(after, at.parts)


def _sums(
    at: SumStage, source: Placement, target: Placement, copied: frozenset[int]
) -> Iterator[tuple[PlanCost, SumStage]]:
    """Yields each stage that an allreduce or a reduce-scatter makes of `at`, with its cost."""
    share = _share(at.placement, copied)
    for cut in at.parts:
        rest = tuple(c for c in at.parts if c is not cut)
        scattered = share * Fraction(cut.devices - 1, cut.devices)
        yield PlanCost(2 * scattered, communications=1), SumStage(at.placement, rest)
        for axis, after in _divided_by(cut.ptype, at.placement, source, target):
            # Each device stores the only element of a broadcast axis, so this is an allreduce.
            sent = 2 * scattered if axis in copied else scattered
            yield PlanCost(sent, communications=1), SumStage(after, rest)


def _moves(
    at: Placement,
    summed: Collection[ParallelType],
    source: Placement,
    target: Placement,
    copied: frozenset[int],
) -> Iterator[tuple[PlanCost, Placement]]:
    """Yields each placement that one step can make of the placement `at`, with its cost.

    A step is a gather (a mesh dimension no longer divides an axis), a slice (it begins to divide
    an axis), or an all-to-all (it divides another axis than before). An axis is divided only as in
    `source` or `target`, the ends of the plan. `copied` has the positions of broadcast axes, which
    cost nothing. `summed` has the mesh dimensions along which devices still have parts of a sum;
    they cannot divide an axis until these parts are added.
    """
    share, used = _share(at, copied), {*summed, *(c.ptype for cuts in at for c in cuts)}
    for ptype in (p for p in DEVICE_TYPES if p not in used):
        for _, after in _divided_by(ptype, at, source, target):
            yield PlanCost(slices=1), after
    for axis, cuts in enumerate(at):
        if not cuts:
            continue
        last, without = cuts[-1], _put(at, axis, cuts[:-1])
        if axis in copied:
            yield PlanCost(slices=1), without
            continue
        yield PlanCost(share * (last.devices - 1), communications=1), without
        sent = share * Fraction(last.devices - 1, last.devices)
        for to, after in _divided_by(last.ptype, without, source, target):
            if to != axis and to not in copied:
                yield PlanCost(sent, communications=1), after


def _divided_by(
    ptype: ParallelType, at: Placement, source: Placement, target: Placement
) -> Iterator[tuple[int, Placement]]:
    """Yields (axis, placement) for each axis that the mesh dimension `ptype` may divide: `at` with
    `ptype` as the innermost division of this axis.

    An axis is divided only along mesh dimensions that divide it in `source` or in `target`. The
    number of its blocks must divide its number of blocks in one of these, because the extent may
    not be a multiple of any other number.
    """
    for axis, have in enumerate(at):
        for wanted in (target[axis], source[axis]):
            depth = next((k for k, c in enumerate(wanted) if c.ptype is ptype), None)
            if depth is None or _number(wanted) % (_number(have) * wanted[depth].devices):
                continue
            is_same = _blocks((wanted[:depth],)) == _blocks((have,))
            cut = replace(wanted[depth], whole=wanted[depth].whole and is_same)
            yield axis, _put(at, axis, (*have, cut))
            break


def _number(cuts: Cuts) -> int:
    """Returns the number of blocks into which the divisions `cuts` of an axis divide it."""
    return prod(cut.devices for cut in cuts)


def _put(placement: Placement, axis: int, cuts: Cuts) -> Placement:
    return (*placement[:axis], cuts, *placement[axis + 1 :])


# ------------------------------------------------------------------ with stream loops
def _steps_of_streams(source: Placement, target: Placement) -> list[Placement]:
    """Returns the placements through which a copy passes from `source` to `target`, excluding both.

    A placement lists, for each axis, its divisions (cuts) over devices and the iterations of a
    stream loop, outermost first. From one placement to the next, the division along one mesh
    dimension is removed or added:

    - First, dimensions are added to axes that need nothing removed, so that less data is gathered
      later.
    - Then dimensions are removed, inner cuts before outer cuts, mesh_x first.
    - Then the remaining dimensions are added, outer cuts first.

    If the removed division was inside a division by a stream loop, the loop's division is kept. All
    devices along the removed dimension then have the same blocks in the same iterations.
    """
    changing = _changing_types(source, target)
    now = [without_streams(cuts) for cuts in source]
    steps: list[Placement] = []

    def add(position: int, cuts: Cuts) -> None:
        now[:] = map(without_streams, now)
        now[position] = cuts
        steps.append(tuple(now))

    dropped = {c.ptype for cuts in source for c in cuts if c.ptype in changing}
    late: list[tuple[int, Cuts]] = []
    for position, depth in ((p, k) for p, cuts in enumerate(target) for k in range(len(cuts))):
        cuts = target[position][: depth + 1]
        if cuts[-1].ptype not in changing:
            continue
        others = {c.ptype for p, mine in enumerate(now) if p != position for c in mine}
        is_free = dropped.isdisjoint(c.ptype for c in (*now[position], cuts[-1]))
        is_one_loop = not any(p.is_stream for p in others.intersection(c.ptype for c in cuts))
        if is_free and is_one_loop and now[position] == without_streams(cuts[:-1]):
            add(position, cuts)
        else:
            late.append((position, cuts))
    for ptype in _drop_order(source, dropped):
        now[:] = (_without(ptype, cuts) for cuts in now)
        steps.append(tuple(now))
    for position, cuts in late:
        add(position, cuts)
    if steps and steps[-1] in (target, tuple(map(without_streams, target))):
        steps.pop()
    return steps


def _changing_types(source: Placement, target: Placement) -> set[ParallelType]:
    found: set[ParallelType] = set()
    for mine, wanted in zip(source, target, strict=True):
        sides = [
            [replace(c, whole=False, swizzle=None) for c in without_streams(cuts)]
            for cuts in (mine, wanted)
        ]
        depth = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip_longest(*sides)))
        found |= {c.ptype for side in sides for c in side[depth:] if c.ptype.is_device}
    return found


def _without(ptype: ParallelType, cuts: Cuts) -> Cuts:
    """Returns the divisions `cuts` of one axis without the division along the mesh dimension
    `ptype`.

    Divisions inside of the removed one are removed, too. If no division is along `ptype`, an
    innermost division into steps of a stream loop is removed instead. If a stream loop remains that
    begins with the device's own block along `ptype` (`Cut.swizzle`), it now begins with the same
    block on all devices.
    """
    depth = next((k for k, c in enumerate(cuts) if c.ptype is ptype), None)
    kept = without_streams(cuts) if depth is None else cuts[:depth]
    return tuple(replace(c, swizzle=None) if c.swizzle is ptype else c for c in kept)


def _drop_order(source: Placement, dropped: set[ParallelType]) -> list[ParallelType]:
    depth = {c.ptype: d for cuts in source for d, c in enumerate(cuts)}
    return sorted(dropped, key=lambda p: (-depth[p], DEVICE_TYPES.index(p)))
