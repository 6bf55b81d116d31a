"""Loop propagation: copies the loops and parallel types of one tensor, the reference, to others.

A loop transform is a split, merge or reordering of axes. An axis of the reference matches an axis
of a target in two cases:

- One loop can iterate both axes, because their indices are always equal.
- One axis is a broadcast that an op between the two tensors expands to the other.

The axis graph (`AxisGraph`) has these relations for any two tensors of a fusion, so no path of ops
between the two tensors is followed. A target without some axis of the reference skips the
transforms of this axis. A merge with a missing axis yields the other axis.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

from fuser.ir.axis_graph import AxisGraph
from fuser.ir.domain.axis_path import Rules, forward, replay, transforms_between
from fuser.ir.domain.tensor_domain import (
    DomainBuilder,
    IterDomain,
    MergeTransform,
    Shift,
    SplitTransform,
    Swizzle1D,
    TensorDomain,
    Transform,
    numbers,
    same_form,
)
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.ops.nodes import ReshapeOp
from fuser.ir.types import ParallelType
from fuser.support.errors import DefinitionError, counted
from fuser.support.record import replace

Matches = Mapping[int, IterDomain]
"""Number of a reference axis -> the axis of the target that stands for it."""


class AxisMatcher:
    """Finds the logical axes of other tensors that match the axes of one reference tensor.

    Two axes match if one loop can iterate both, because their indices are always equal.
    """

    def __init__(
        self, graph: AxisGraph, reference: TensorView, axes: Sequence[IterDomain] = ()
    ) -> None:
        """Prepares to match axes of other tensors with the logical axes of `reference`.

        Two axes match if one loop can iterate both. If `axes` is passed, other axes are matched
        with these instead, such as the axes of `reference` before a reshape.
        """
        self._graph = graph
        self._axes = axes or reference.domain.logical
        self._by_class = {graph.find(a): a for a in self._axes}
        self._via_broadcast: dict[int, int | None] = {}
        # The classes that a broadcast axis of the reference is expanded to downstream.
        self._downstream = {
            c: a for a in self._axes if a.is_broadcast for c in graph.concretized(a)
        }

    def matches(self, target: TensorDomain) -> dict[int, IterDomain]:
        """Returns which logical axis of `target` matches each axis of the reference tensor.

        The keys are the numbers (ids) of the reference tensor's axes. Axes without a match are left
        out.
        """
        found: dict[int, IterDomain] = {}
        for axis in target.logical:
            reference = self.reference_of(axis)
            if reference is None:
                continue
            # A broadcast may be concretized for one reader and not for another. The concrete axis
            # is preferred.
            other = found.get(reference.number)
            if other is None or (other.is_broadcast and not axis.is_broadcast):
                found[reference.number] = axis
        return found

    def reference_of(self, axis: IterDomain) -> IterDomain | None:
        """Returns the axis of the reference tensor that matches `axis`, or None if there is
        none.
        """
        klass = self._graph.find(axis)
        exact = self._by_class.get(klass) or self._downstream.get(klass)
        if exact is not None or not axis.is_broadcast:
            return exact
        if klass not in self._via_broadcast:
            concrete = self._graph.concretized(axis)
            self._via_broadcast[klass] = next(
                (c for c in sorted(concrete) if c in self._by_class), None
            )
        target = self._via_broadcast[klass]
        return None if target is None else self._by_class[target]


# ------------------------------------------------------------------ transforms
class _Repeat(Rules[IterDomain]):
    """Rules that repeat the splits and merges of one tensor on the axes of another tensor: one
    method for each kind of transform.

    Resizes are not repeated. If the other tensor lacks one of the two axes of a merge or shift, its
    other axis is left unchanged.
    """

    needs_all = False

    def __init__(self, fusion: Fusion) -> None:
        self.built = DomainBuilder(fusion)

    def split(self, t: SplitTransform, inp: IterDomain) -> tuple[IterDomain, IterDomain]:
        return self.built.split(inp, t.factor, inner_split=t.inner_split)

    def merge(
        self, t: MergeTransform, outer: IterDomain | None, inner: IterDomain | None
    ) -> IterDomain | None:
        if outer is None or inner is None:
            return outer or inner
        return self.built.merge(outer, inner)

    def swizzle(self, t: Swizzle1D, inp: IterDomain) -> IterDomain:
        return self.built.swizzle(inp, t.ptype)

    def shift(
        self, t: Shift, rows: IterDomain | None, inp: IterDomain | None
    ) -> tuple[IterDomain | None, IterDomain | None]:
        if rows is None or inp is None:
            return rows, inp
        return self.built.shift(rows, inp, t.width)


class LoopReplay:
    """Copies the loop order and the splits and merges of a reference tensor to other tensors.

    Axes of a target that match no axis of the reference tensor become innermost. `types` maps the
    number (id) of a loop axis of the reference tensor to its parallel type.
    """

    def __init__(
        self, reference: TensorDomain, types: Mapping[int, ParallelType] | None = None
    ) -> None:
        self._reference, self._types = reference, types or {}
        self._steps = forward(transforms_between(reference, reference.logical, reference.loop))
        # The results for domains, by a key that ignores axis numbers.
        self._known: dict[object, TensorDomain] = {}

    def apply(self, target: TensorView, matches: Matches) -> None:
        """Replaces the loop axes of `target` by the reference tensor's loops.

        `matches` maps the numbers (ids) of the reference tensor's logical axes to axes of the
        target.
        """
        domain = target.domain
        if domain.transforms:
            target.domain = self._replayed(target.fusion, domain, matches)
            return
        in_order = domain.states(sorted(domain.axes))
        places = {a.number: k for k, a in enumerate(in_order)}
        key = (
            tuple([(a.kind, a.extent, a.ptype, a.expanded, a.rfactor) for a in in_order]),
            tuple([places[n] for n in domain.logical_numbers]),
            tuple([places[n] for n in domain.root_numbers]),
            tuple([places[n] for n in domain.allocation_numbers]),
            domain.contiguity,
            tuple([(n, places[a.number]) for n, a in matches.items()]),
        )
        known = self._known.get(key)
        if known is None:
            made = self._replayed(target.fusion, domain, matches)
            # A result that dropped an axis cannot be renumbered for another domain.
            if made.axes.keys() >= domain.axes.keys():
                self._known[key] = made
        else:
            made = _renumbered(known, domain, target.fusion)
        target.domain = made

    def _replayed(self, fusion: Fusion, domain: TensorDomain, matches: Matches) -> TensorDomain:
        reference, rules = self._reference, _Repeat(fusion)
        serial = {n: _unparallelized(a) for n, a in matches.items()}
        found = replay(self._steps, serial, rules)
        made = rules.built.transforms
        loop: dict[int, IterDomain] = {}
        for axis in reference.loop:
            mine = found.get(axis.number)
            if mine is not None and mine.number not in loop:
                ptype = self._types.get(axis.number)
                loop[mine.number] = mine if ptype is None else replace(mine, ptype=ptype)
        used = {n for t in made for n in t.inputs} | set(loop)
        rest = [n for n in domain.logical_numbers if n not in used]
        kept = domain.transforms
        if kept:
            to_memory = transforms_between(domain, domain.logical, domain.allocation)
            kept = (*transforms_between(domain, domain.maybe_root, domain.logical), *to_memory)
        return domain.having(
            loop=(*loop, *rest),
            transforms=(*kept, *made),
            axes=(*serial.values(), *rules.built.axes.values(), *loop.values()),
        )


def _renumbered(made: TensorDomain, like: TensorDomain, fusion: Fusion) -> TensorDomain:
    """Returns a copy of `made`, the axes of a tensor after splits and merges, with the axis numbers
    (ids) of `like`.

    The caller has computed `made` for another tensor, whose axes equal those of `like` except for
    their numbers. Renumbering is faster than repeating the splits and merges for `like`. Axes that
    `like` does not have get new numbers.
    """
    names = dict(zip(made.axes, sorted(like.axes), strict=False))
    names.update({n: fusion.next_axis() for n in made.axes if n not in names})
    return made.map_axes(lambda a: a.numbered(names[a.number]))


def _unparallelized(axis: IterDomain) -> IterDomain:
    """Returns a copy of the axis that is serial, without the parallel type of an earlier schedule.

    An axis over devices, or over the steps of a loop on the host, is returned unchanged, because
    its parallel type is not part of one kernel's schedule.
    """
    if axis.ptype is ParallelType.serial or axis.is_device or axis.is_stream:
        return axis
    return replace(axis, ptype=ParallelType.serial)


def follow(
    transforms: Sequence[Transform], target: TensorDomain, matches: Matches
) -> dict[int, IterDomain]:
    """Returns a dict from axes of a reference tensor to the matching axes of `target`. It has the
    entries of `matches`, and entries for axes that splits and merges produce.

    `transforms` are the splits and merges of the reference tensor. The axes that a transform
    produces get entries if `target` has an equal split or merge of the matching axes. If the target
    lacks one of the two axes of a merge, the result of the merge matches the other axis. The keys
    of `matches` and of the result are the numbers (ids) of axes.
    """
    users = {n: t for t in target.transforms for n in t.inputs}
    found = dict(matches)
    for t in transforms:
        present = [found[n] for n in t.inputs if n in found]
        if 0 < len(present) < len(t.inputs):
            found[t.outputs[0]] = present[0]
            continue
        twin = users.get(present[0].number) if present else None
        if twin is None or twin.inputs != numbers(present) or not same_form(t, twin):
            continue
        found.update(zip(t.outputs, target.states(twin.outputs), strict=True))
    return found


# ------------------------------------------------------------------ the user's functions
def transform_like(reference_tv: TensorView, selected_tensors: Collection[TensorView] = ()) -> None:
    """Copies the splits, merges and order of the reference tensor's loops to the selected tensors.

    By default, all tensors are selected, except fusion inputs. Parallel types are not copied. Axes
    that the reference tensor does not have become innermost. Tensors upstream of a reshape get the
    transforms on the axes before the reshape.
    """
    fusion, chosen = reference_tv.fusion, _chosen(reference_tv, selected_tensors)
    matcher = AxisMatcher(AxisGraph(fusion), reference_tv)
    loops = LoopReplay(reference_tv.domain)
    for tv in chosen:
        loops.apply(tv, matcher.matches(tv.domain))
    for seen, above, targets in _above_reshapes(reference_tv, chosen):
        loops = LoopReplay(seen())
        for tv in targets:
            loops.apply(tv, above.matches(tv.domain))


def _above_reshapes(
    reference: TensorView, chosen: Sequence[TensorView]
) -> Iterator[tuple[Callable[[], TensorDomain], AxisMatcher, list[TensorView]]]:
    """Yields, for each reshape, three values for copying the reference tensor's loops to tensors
    before the reshape.

    Only reshapes whose result is the reference tensor or in `chosen` are considered, the last one
    first. Tensors before a reshape have other axes than the reference tensor. Loops are therefore
    copied by way of the axes that the reshape reads (its root axes). The values are:

    - a function that returns the domain of the reshape's result, with the root axes as logical
      axes;
    - a matcher, which finds axes of other tensors that match the root axes;
    - the tensors of `chosen` before the reshape that have axes which the reference tensor lacks.
    """
    fusion = reference.fusion
    graph, known = AxisGraph(fusion), {reference, *chosen}
    direct = AxisMatcher(graph, reference)

    def lacks(tv: TensorView) -> bool:
        concrete = [a for a in tv.domain.logical if not a.is_broadcast]
        return any(direct.reference_of(a) is None for a in concrete)

    for op in reversed(fusion.exprs):
        if isinstance(op, ReshapeOp) and op.out in known:
            above, root = _upstream(fusion, op.out), op.out.domain.root
            targets = [tv for tv in chosen if tv in above and lacks(tv)]
            yield partial(_from_root, op.out), AxisMatcher(graph, op.out, root), targets


def _from_root(tv: TensorView) -> TensorDomain:
    """Returns the axes (the domain) of a reshape's result `tv`, as if the reshape were part of its
    loops.

    The logical axes of the result are then the axes that the reshape reads, so that loops can be
    copied to tensors before it.
    """
    domain = tv.domain
    return domain.having(logical=domain.root_numbers, root=(), allocation=(), contiguity=())


def bounded_transform_backward(
    from_: TensorView,
    pos: int,
    to: Collection[TensorView],
    propagate_parallel_type: bool = False,
) -> None:
    """Copies the splits and merges of the loop axes [0, pos) of `from_` to the tensors `to`
    upstream.

    All tensors between `to` and `from_` get them, too. A position of -1 means all axes. With
    `propagate_parallel_type`, parallel types are copied as well.

    Raises:
        DefinitionError: a tensor of `to` is not upstream of `from_`, or pos is out of range.
    """
    fusion = from_.fusion
    position = _position(from_, pos)
    above = _upstream(fusion, from_)
    for tv in to:
        if tv not in above:
            raise DefinitionError(
                f"bounded_transform_backward: {tv} is not upstream of {from_}, because {from_} "
                f"does not depend on {tv}"
            )
    below: set[TensorView] = set(to)
    for op in fusion.exprs:
        if any(v in below for v in op.inputs):
            below.update(op.outputs)
    chosen = [tv for tv in fusion.tensors() if tv in above and tv in below]
    domain = from_.domain
    wanted = domain.loop[:position]
    bounded = domain.having(
        root=(), loop=numbers(wanted), transforms=transforms_between(domain, domain.logical, wanted)
    )
    matcher, loops = AxisMatcher(AxisGraph(fusion), from_), LoopReplay(bounded)
    for tv in chosen:
        loops.apply(tv, matcher.matches(tv.domain))
    if propagate_parallel_type:
        parallelize_like(from_, position, chosen)


def parallelize_like(
    reference_tv: TensorView,
    pos: int = -1,
    selected_tensors: Collection[TensorView] = (),
    selected_parallel_types: Collection[ParallelType] = (),
    propagate_padding: bool = True,
) -> None:
    """Copies the parallel types of the reference tensor's first `pos` loop axes to other tensors.

    A parallel type says which CUDA blocks, threads or loops execute an axis. It is copied to each
    axis of another tensor that matches the reference tensor's axis. By default, all tensors get all
    types. `selected_tensors` and `selected_parallel_types` restrict the tensors and the types.
    Vectorize is copied only to selected tensors, because it describes how one tensor is accessed.
    `propagate_padding` has no effect; it exists because nvFuser's function has it.
    """
    del propagate_padding  # accepted for nvFuser's signature; axes are never padded here
    fusion = reference_tv.fusion
    domain, chosen = reference_tv.domain, _chosen(reference_tv, selected_tensors)
    wanted = {
        a.number: a.ptype
        for a in domain.loop[: _position(reference_tv, pos)]
        if (not selected_parallel_types or a.ptype in selected_parallel_types)
        and (a.ptype is not ParallelType.vectorize or selected_tensors)
    }
    _parallelize(domain, AxisMatcher(AxisGraph(fusion), reference_tv), chosen, wanted)
    for seen, above, targets in _above_reshapes(reference_tv, chosen):
        # The reshape's result has received the reference's types already, in addition to its own.
        view = seen()
        types = {a.number: a.ptype for a in view.loop if a.ptype in wanted.values()}
        _parallelize(view, above, targets, types)


def _parallelize(
    domain: TensorDomain,
    matcher: AxisMatcher,
    targets: Sequence[TensorView],
    wanted: Mapping[int, ParallelType],
) -> None:
    """Sets the parallel types of the targets' loop axes that match loop axes of `domain`.

    `domain` has the axes of the tensor from which types are copied. `wanted` maps the number (id)
    of one of its loop axes to the parallel type.
    """
    history = transforms_between(domain, domain.logical, domain.loop)
    for tv in targets:
        found = follow(history, tv.domain, matcher.matches(tv.domain))
        loops = {a.number for a in tv.domain.loop}
        mine = {n: found[n].number for n in wanted if n in found}
        set_parallel_types(tv, {mine[n]: wanted[n] for n in mine if mine[n] in loops})


def set_parallel_types(tv: TensorView, types: Mapping[int, ParallelType]) -> None:
    """Sets the parallel types of several axes of one tensor at once.

    `types` maps the number (id) of an axis to its type.
    """
    if types:
        axes = tv.domain.axes
        tv.domain = tv.domain.with_axes(*(replace(axes[n], ptype=p) for n, p in types.items()))


# ------------------------------------------------------------------ helpers
def _chosen(reference: TensorView, selected: Collection[TensorView]) -> list[TensorView]:
    check_selected(reference.fusion, selected)
    inputs = set(reference.fusion.inputs)
    wanted = set(selected)
    return [
        tv
        for tv in reference.fusion.tensors()
        if tv is not reference and (tv in wanted if wanted else tv not in inputs)
    ]


def check_selected(fusion: Fusion, selected: Collection[TensorView]) -> None:
    """Checks that the tensors which a user selected belong to the fusion.

    Raises:
        DefinitionError: a tensor belongs to another definition.
    """
    for tv in selected:
        if tv.fusion is not fusion:
            raise DefinitionError(
                f"{tv} belongs to another definition than the reference tensor: select only "
                "tensors of one definition"
            )


def _position(tv: TensorView, pos: int) -> int:
    rank = len(tv.domain.loop)
    position = pos + rank + 1 if pos < 0 else pos
    if not 0 <= position <= rank:
        raise DefinitionError(
            f"{tv} has {counted(rank, 'loop axis')}, so the position must be from {-rank - 1} to "
            f"{rank}, but it is {pos}"
        )
    return position


def _upstream(fusion: Fusion, tv: TensorView) -> set[TensorView]:
    found = {tv}
    for op in reversed(fusion.exprs):
        if any(o in found for o in op.outputs):
            found.update(v for v in op.inputs if isinstance(v, TensorView))
    found.discard(tv)
    return found
