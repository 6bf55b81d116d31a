"""Merges kernels that share tensors, if a scheduler accepts the merged kernel.

The *steps* of a program are its kernels (a kernel is a group of ops), and all ops that no kernel
computes. Steps form a graph, in which merging two groups contracts an edge. A group is merged with
as many other groups as possible at once. If a scheduler refuses the merged group, half as many are
tried.

The steps are numbered so that each step has a larger number than the steps on which it depends. To
find out whether one step depends on another, only steps with numbers between the two are visited. A
contraction renumbers only these steps.

Source: Pearce, Kelly: A dynamic topological sort algorithm for directed acyclic graphs, 2006.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fuser.ir import memory_layout
from fuser.ir.dtypes import nbytes_of
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.ops import nodes
from fuser.ir.ops.lookup import LookupOp
from fuser.ir.ops.nodes import instructions
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.types import ParallelType
from fuser.support import progress
from fuser.support.record import record

REDUCTION_OPS = (nodes.ReductionOp, nodes.WelfordOp)
# The most inputs and outputs of a kernel. Launch arguments are limited (4 KB on older devices), and
# so is the nesting of C++ templates for values that are reduced together.
MAX_OPERANDS = 256
# The kinds of merges that `Merger.run` tries, in order.
KINDS = ("reduction", None, "tail", None, "pointwise", "rows", "whole")
# Horizontal fusion: the schedulers of kernels that may run side by side in one launch.
HORIZONTAL = ("pointwise", "horizontal")
# Kind of merge -> the only schedulers that may accept it.
SCHEDULERS: Mapping[str | None, tuple[str, ...]] = {
    None: ("inner_persistent", "cluster_persistent", "outer_persistent"),
    "tail": ("reduction",),
    "rows": ("inner_outer_persistent",),
    "whole": ("reduction",),
}


@record
class SegmentGroup:
    """The ops of one kernel.

    - `first` and `last` are the positions of the first and the last op in program order.
    - `scheduler` (the name of the automatic schedule) and `fusion` are set once a scheduler has
      accepted the group.
    - `totals` are sums over rows of which this kernel computes only partial sums; another kernel
      adds these up.
    """

    ops: frozenset[TensorOp]
    outputs: tuple[TensorView, ...]
    inputs: tuple[TensorView, ...]
    first: int
    last: int
    scheduler: str = ""
    fusion: Fusion | None = None
    totals: tuple[TensorView, ...] = ()


# Returns whether one kernel (the last argument) is as fast as several (the first argument).
Pays = Callable[[Sequence[Fusion], Fusion], bool]
# A group (by its key in `Merger._groups`), or an op that no kernel computes.
_Step = int | TensorOp


@record
class _Contraction:
    """The data to undo a merge of two kernels: both groups of ops, and the keys of both groups in
    `Merger._groups`.

    The merged group has the key `place` of the first group. `moved` has, for each group and op that
    was renumbered, the old number in execution order. `span` is the entry of the first group in
    `Merger._spans`.
    """

    place: int
    group: SegmentGroup
    other: int
    its_group: SegmentGroup
    moved: Mapping[_Step, int]
    span: tuple[int, int]


class Merger:
    """Merges kernels (groups of ops) that share inputs, or of which one reads outputs of the other.

    - `groups` are the kernels to begin with. `others` are the ops that no kernel computes.
    - `position` numbers all ops in program order.
    - `accept(group, totals)` returns the group with its scheduler, or None if no scheduler accepts
      the group. If `totals` is not (), the kernel computes only partial sums of these tensors.
    - `pays` returns whether one kernel is as fast as several.
    - `may_share_kernel` is an equivalence relation of ops: the ops of one kernel must be
      equivalent.
    """

    def __init__(
        self,
        fusion: Fusion,
        groups: Sequence[SegmentGroup],
        others: Sequence[TensorOp],
        position: Mapping[TensorOp, int],
        *,
        accept: Callable[[SegmentGroup, tuple[TensorView, ...]], SegmentGroup | None],
        pays: Pays,
        may_share_kernel: Callable[[TensorOp, TensorOp], bool],
    ) -> None:
        self._accept, self._pays, self._may_share_kernel = accept, pays, may_share_kernel
        self._groups = dict(enumerate(groups))
        # Tensors that memory must hold for any choice of kernels.
        self._kept = {*fusion.outputs, *(v for e in others for v in e.inputs)}
        self._producer: dict[TensorView, _Step] = {o: e for e in others for o in e.outputs}
        self._readers: dict[TensorView, set[int]] = {}
        self._reading: dict[TensorView, list[TensorOp]] = {}
        for e in others:
            for v in e.inputs:
                if isinstance(v, TensorView):
                    self._reading.setdefault(v, []).append(e)
        for place, group in self._groups.items():
            self._enter(place, group)
        # The number of each step, larger than those of all steps that it depends on.
        ends = {**{p: g.last for p, g in self._groups.items()}, **{e: position[e] for e in others}}
        self._number = self._numbered(sorted(ends, key=ends.__getitem__))
        self._spans = self._found_spans()
        # Pairs of groups of which one depends on the other through a third step. Merging other
        # groups never changes that.
        self._apart: set[tuple[frozenset[TensorOp], frozenset[TensorOp]]] = set()
        # Pairs of groups whose merge of a kind no scheduler accepts.
        self._refused: set[tuple[str | None, frozenset[TensorOp], frozenset[TensorOp]]] = set()
        self._spaces: dict[int, tuple[SegmentGroup, tuple[object, ...]]] = {}
        self._sizes: dict[TensorView, str] = {}

    def run(self, kinds: Sequence[str | None] = KINDS) -> list[SegmentGroup]:
        """Merges kernels (groups of ops) until nothing changes, and returns the remaining groups in
        program order.

        `kinds` are the kinds of merges to try, in this order; `_merge_all` describes each. The
        order has these reasons:

        - "reduction" is first: sums that can be in one kernel are merged before a group that reads
          their results is. Such a group mostly reads all of these results.
        - None and "tail" follow. These two kinds complete the kernels of reductions, so that groups
          that read the results can merge.
        - "rows" and "whole" are last: kernels along rows and kernels of sums are complete by then.
        - "horizontal" needs a call of its own after all other kinds, because its groups share only
          an input.
        """
        for kind in kinds:
            while self._merge_all(kind):
                pass
        return [self._groups[place] for place in sorted(self._groups)]

    def _merge_all(self, kind: str | None) -> bool:
        """Merges each kernel (group of ops) with later ones, and returns whether any were merged.

        `kind` says which groups are merged:

        - "reduction", "pointwise": both groups have this kind and the same size.
        - None: one group reads a result of a reduction group. Or it is pointwise, and a kernel
          along rows (one that keeps whole rows on the chip) reads all tensors that it reads.
        - "tail": one group reads only results of the other group's reductions.
        - "rows": one group sums over the rows along which the other group's kernel works.
        - "whole": one group writes tensors as large as the operand that the other group reduces.
        - "horizontal": both groups are pointwise, and neither reads results of the other.
        """
        before = len(self._groups)
        places = sorted(self._groups)
        for number, place in enumerate(places, 1):
            progress.stage("kernel to merge", number, len(places))
            while place in self._groups and self._extend(place, kind):
                pass
        return len(self._groups) < before

    def _extend(self, place: int, kind: str | None) -> bool:
        """Merges the kernel with key `place` with as many other kernels as a scheduler accepts in
        one merge, and returns whether any were merged.

        `kind` is the kind of merge, such as "reduction" or "pointwise" (`_merge_all` describes
        all). After a refusal, half as many kernels are tried.
        """
        most = len(self._groups) if kind in ("reduction", "pointwise") else 1
        while True:
            merged: list[_Contraction] = []
            while len(merged) < most and (other := self._partner(place, kind)) is not None:
                merged.append(self._contract(place, other))
            if not merged:
                return False
            union = self._accept(self._groups[place], _totals(merged) if kind == "rows" else ())
            parts = [merged[0].group, *(done.its_group for done in merged)]
            if union is not None and self._is_wanted(place, parts, union, kind):
                self._groups[place] = union
                return True
            for done in reversed(merged):
                self._undo(done)
            if len(merged) == 1:
                self._refused.add((kind, merged[0].group.ops, merged[0].its_group.ops))
            most = max(len(merged) // 2, 1)

    def _is_wanted(
        self, place: int, parts: Sequence[SegmentGroup], union: SegmentGroup, kind: str | None
    ) -> bool:
        if union.scheduler not in SCHEDULERS.get(kind, (union.scheduler,)):
            return False
        if union.scheduler == "cluster_persistent":
            return not any(self._joins_a_sum(place, part) for part in parts)
        fusions = [g.fusion for g in (*parts, union) if g.fusion is not None]
        return kind != "pointwise" or self._pays(fusions[:-1], fusions[-1])

    def _joins_a_sum(self, place: int, part: SegmentGroup) -> bool:
        """Returns whether the kernel `part` should not be merged into the kernel with key `place`:
        it is pointwise, and could be merged into the kernel of another sum, which is faster.

        An example is the gradient of a norm's input. The kernel that sums each row could compute
        it, or the kernel that computes the gradient of the weight. Measured on an H200, for a layer
        norm of 128 x 262144 in float32: 226 us if the first kernel computes it (a cluster of CUDA
        blocks per row), and 184 us if the second kernel does.
        """
        space, mine = self._space_of(part), self._space(place)
        return any(
            self._space(k) != mine
            and self._is_whole(part, self._groups[k], (space, self._space(k)))
            for t in part.inputs
            for k in self._readers.get(t, ())
        )

    # ------------------------------------------------------------ who may merge
    def _partner(self, place: int, kind: str | None) -> int | None:
        """Returns the key of the first later kernel that may be merged with the kernel `place`, or
        None.

        `kind` is the kind of merge, such as "reduction" or "pointwise" (`_merge_all` describes
        all). Only kernels that share a tensor with the kernel `place` are considered.
        """
        group = self._groups[place]
        if len(group.inputs) + len(group.outputs) >= MAX_OPERANDS:
            return None
        near: set[_Step] = set()
        for t in (*group.inputs, *group.outputs):
            near.update(self._readers.get(t, ()))
            near.add(self._producer.get(t, place))
        later = sorted(k for k in near if isinstance(k, int) and k > place)
        return next((k for k in later if self._may_merge(place, k, kind)), None)

    def _may_merge(self, i: int, j: int, kind: str | None) -> bool:
        a, b = self._groups[i], self._groups[j]
        if kind == "rows" and not _are_rows_and_sums(a, b):
            return False
        feeds = not {*a.outputs}.isdisjoint(b.inputs) or not {*b.outputs}.isdisjoint(a.inputs)
        if kind is None:
            shares = self._comes_along(i, j) or self._comes_along(j, i)
        else:
            shares = not {*a.inputs}.isdisjoint(b.inputs)
        if not feeds and not shares:
            return False
        if len({*a.inputs, *a.outputs, *b.inputs, *b.outputs}) > MAX_OPERANDS:
            return False
        spaces = self._space(i), self._space(j)
        if kind is None and not any(space[0] == "reduction" for space in spaces):
            return False
        if kind == "tail" and not (_is_tail(a, b, spaces) or _is_tail(b, a, spaces[::-1])):
            return False
        if kind == "whole" and not (
            self._is_whole(a, b, spaces) or self._is_whole(b, a, spaces[::-1])
        ):
            return False
        is_alike = spaces[0] == spaces[1] and spaces[0][0] == kind
        if kind in ("reduction", "pointwise") and not is_alike:
            return False
        if kind == "reduction" and feeds:
            return False  # such a kernel would read its rows several times
        if kind == "horizontal" and (feeds or not {a.scheduler, b.scheduler} <= {*HORIZONTAL}):
            return False
        if (kind, a.ops, b.ops) in self._refused or (a.ops, b.ops) in self._apart:
            return False
        if self._are_apart(i, j):
            self._apart.add((a.ops, b.ops))
            return False
        return self._may_share_kernel(next(iter(a.ops)), next(iter(b.ops)))

    def _is_whole(
        self, a: SegmentGroup, b: SegmentGroup, spaces: tuple[tuple[object, ...], ...]
    ) -> bool:
        """Returns whether kernel a is pointwise and kernel b reduces a tensor of the same size,
        which a reads or writes.

        The merged kernel does the work of b, and in addition only writes the outputs of a. A kernel
        that transposes a tensor is excluded, because it needs another schedule. `spaces` are kind
        and size of the loops of a and b.
        """
        if a.scheduler != "pointwise" or spaces[1][0] != "reduction":
            return False
        # The steps of a stream loop may compute blocks of one group's results only.
        axes = (axis for out in (*a.outputs, *b.outputs) for axis in out.domain.loop)
        if any(axis.ptype is ParallelType.stream for axis in axes):
            return False
        both = {*a.inputs, *a.outputs} & {*b.inputs}
        return any(("pointwise", self._size(t)) == spaces[0] for t in both)

    def _comes_along(self, rows: int, place: int) -> bool:
        """Returns whether a kernel along rows reads all tensors that a pointwise kernel reads. The
        pointwise kernel can then be merged into that kernel without any further loads.

        `rows` is the key of the kernel along rows, which keeps whole rows on the chip. `place` is
        the key of the pointwise kernel.
        """
        group, of_rows = self._groups[place], self._groups[rows]
        if of_rows.scheduler not in SCHEDULERS[None] or self._space(place)[0] != "pointwise":
            return False
        return bool(group.inputs) and {*group.inputs} <= {*of_rows.inputs}

    def _space(self, place: int) -> tuple[object, ...]:
        """Returns the kind of the loops of the kernel `place`, "pointwise" or "reduction", and
        their size.

        If two kernels have the same kind and size, they can share their loops.
        """
        group = self._groups[place]
        known = self._spaces.get(place)
        if known is None or known[0] is not group:
            known = self._spaces[place] = group, self._space_of(group)
        return known[1]

    def _space_of(self, group: SegmentGroup) -> tuple[object, ...]:
        reductions = [e for e in group.ops if isinstance(e, REDUCTION_OPS)]
        if reductions:
            shapes = {
                tuple((a.kind, str(a.extent)) for a in e.out_tensor.domain.logical)
                for e in reductions
            }
            return ("reduction", tuple(sorted(map(str, shapes))))
        return ("pointwise", max(map(self._size, group.outputs)))

    def _size(self, tv: TensorView) -> str:
        if tv not in self._sizes:
            self._sizes[tv] = str(elements(tv))
        return self._sizes[tv]

    def _are_apart(self, i: int, j: int) -> bool:
        """Returns whether one of two kernels depends on the other through a third kernel or op.

        If so, the kernels with keys `i` and `j` cannot be merged, because the third would depend on
        the merged kernel and the merged kernel on it.
        """
        start, goal = (i, j) if self._number[i] > self._number[j] else (j, i)
        last = self._number[goal]
        todo = [step for step in self._sources(start) if self._number[step] > last]
        # A search would pass all layers of a deep model between a layer and its gradient.
        within = self._spans[goal][0]
        if any(self._spans[step][1] & within for step in todo):
            return True
        seen: set[_Step] = set()
        while todo:
            step = todo.pop()
            if step in seen:
                continue
            seen.add(step)
            for source in self._sources(step):
                if source == goal:
                    return True
                if self._number[source] > last:
                    todo.append(source)
        return False

    def _sources(self, step: _Step) -> list[_Step]:
        """Returns the steps that compute the operands of `step`.

        A step is a kernel, given by its key, or a single op that no kernel computes.
        """
        read = self._groups[step].inputs if isinstance(step, int) else step.inputs
        return [self._producer[v] for v in read if v in self._producer]

    def _targets(self, step: _Step) -> list[_Step]:
        """Returns the steps that read the results of `step`.

        A step is a kernel, given by its key, or a single op that no kernel computes.
        """
        made = self._groups[step].outputs if isinstance(step, int) else step.outputs
        return [s for v in made for s in (*self._readers.get(v, ()), *self._reading.get(v, ()))]

    # ------------------------------------------------------------ order
    def _numbered(self, steps: Iterable[_Step]) -> dict[_Step, int]:
        """Numbers kernels and other ops in an order in which they can run: each has a larger number
        than those on which it depends.

        If neither of two depends on the other, they keep their order in `steps`.
        """
        number: dict[_Step, int] = {}
        for first in steps:
            todo = [first]
            while todo:
                missing = [s for s in self._sources(todo[-1]) if s not in number]
                if missing:
                    todo += missing
                else:
                    number.setdefault(todo.pop(), len(number))
        return number

    def _found_spans(self) -> dict[_Step, tuple[int, int]]:
        """Returns, for each kernel and other op (step), two sets of steps as they are before any
        merge: the step itself, and all on which it depends.

        A set of steps is an integer with one bit per step. A merged kernel has the union of the
        sets of its parts (`_contract`): if these sets say that a step depends on another one, it
        does.
        """
        spans: dict[_Step, tuple[int, int]] = {}
        for bit, step in enumerate(sorted(self._number, key=self._number.__getitem__)):
            above = 0
            for source in dict.fromkeys(self._sources(step)):
                above |= spans[source][0] | spans[source][1]
            spans[step] = 1 << bit, above
        return spans

    def _between(
        self, start: int, is_between: Callable[[int], bool], next_of: Callable[[_Step], list[_Step]]
    ) -> list[_Step]:
        """Returns the kernels and other ops (steps) that can be reached from `start`, sorted by
        number.

        `next_of` returns the neighbours of a step. Only steps for whose number `is_between` returns
        True are visited.
        """
        found: set[_Step] = set()
        todo: list[_Step] = [start]
        while todo:
            for step in next_of(todo.pop()):
                if step not in found and is_between(self._number[step]):
                    found.add(step)
                    todo.append(step)
        return sorted(found, key=self._number.__getitem__)

    def _move_together(self, place: int, other: int) -> dict[_Step, int]:
        """Renumbers kernels and other ops (steps) so that two kernels, which are to be merged, get
        adjacent numbers.

        The numbers are an order in which the steps can run. Steps on which one of the two kernels
        depends are placed before both, and steps that depend on them after both. Returns the old
        number of each renumbered step.
        """
        first, last = sorted((place, other), key=self._number.__getitem__)
        ends = self._number[first], self._number[last]

        def is_between(number: int) -> bool:
            return ends[0] < number < ends[1]

        before = self._between(last, is_between, self._sources)
        behind = self._between(first, is_between, self._targets)
        had = {step: self._number[step] for step in (*before, first, last, *behind)}
        numbers = sorted(had.values())
        self._number.update(zip(before, numbers, strict=False))
        self._number.update(zip(reversed(behind), reversed(numbers), strict=False))
        self._number[place] = numbers[len(before)]
        return had

    # ------------------------------------------------------------ the contracted graph
    def _enter(self, place: int, group: SegmentGroup) -> None:
        self._producer.update(dict.fromkeys(group.outputs, place))
        for t in group.inputs:
            self._readers.setdefault(t, set()).add(place)

    def _leave(self, place: int, group: SegmentGroup) -> None:
        for t in group.outputs:
            del self._producer[t]
        for t in group.inputs:
            self._readers[t].discard(place)

    def _contract(self, place: int, other: int) -> _Contraction:
        """Merges the kernels with keys `place` and `other`, and returns the data to undo the merge.

        Results that only the two kernels read are no outputs of the merged kernel, unless memory
        must hold them.
        """
        moved = self._move_together(place, other)
        a, b = self._groups[place], self._groups.pop(other)
        self._leave(place, a)
        self._leave(other, b)
        made = dict.fromkeys((*a.outputs, *b.outputs))
        outputs = tuple(o for o in made if o in self._kept or self._readers.get(o))
        inputs = tuple(t for t in dict.fromkeys((*a.inputs, *b.inputs)) if t not in made)
        first, last = min(a.first, b.first), max(a.last, b.last)
        union = self._groups[place] = SegmentGroup(a.ops | b.ops, outputs, inputs, first, last)
        self._enter(place, union)
        span, (its_steps, its_above) = self._spans[place], self._spans[other]
        self._spans[place] = span[0] | its_steps, span[1] | its_above
        return _Contraction(place, a, other, b, moved, span)

    def _undo(self, done: _Contraction) -> None:
        """Restores the two kernels that a merge replaced. `done` describes the merge."""
        self._leave(done.place, self._groups[done.place])
        for place, group in ((done.place, done.group), (done.other, done.its_group)):
            self._groups[place] = group
            self._enter(place, group)
        self._number.update(done.moved)
        self._spans[done.place] = done.span


def _is_tail(a: SegmentGroup, b: SegmentGroup, spaces: tuple[tuple[object, ...], ...]) -> bool:
    """Returns whether kernel a is pointwise and reads only results of reductions of kernel b.

    The merged kernel does the work of b, and in addition only writes the outputs of a. `spaces` are
    kind and size of the loops of a and b.
    """
    kinds = [space[0] for space in spaces]
    return kinds == ["pointwise", "reduction"] and {*a.inputs} <= {*b.outputs}


def _are_rows_and_sums(a: SegmentGroup, b: SegmentGroup) -> bool:
    """Returns whether one of the two kernels works along rows (keeps whole rows on the chip), and
    the other computes sums over all rows.

    Returns False if the kernel along rows reads these sums.
    """
    rows, sums = (a, b) if a.scheduler == "inner_persistent" else (b, a)
    are_both = (rows.scheduler, sums.scheduler) == ("inner_persistent", "reduction")
    return are_both and {*sums.outputs}.isdisjoint(rows.inputs)


def _totals(merged: Sequence[_Contraction]) -> tuple[TensorView, ...]:
    """Returns the sums over rows of a merged kernel, sorted by tensor number. The merged kernel
    computes only partial sums of them.

    `merged` has exactly one merge: of a kernel that works along rows and a kernel of sums.
    """
    (pair,) = merged
    a, b = pair.group, pair.its_group
    sums = b if a.scheduler == "inner_persistent" else a
    reductions = (op for op in sums.ops if isinstance(op, REDUCTION_OPS))
    return tuple(sorted((op.out_tensor for op in reductions), key=lambda tv: tv.number))


# ----------------------------------------------------------------------
# Store or recompute: finds intermediate results that should be stored, because several kernels
# compute them.
#
# By default, each kernel recomputes the pointwise ops between the tensors that memory holds. That
# costs arithmetic and reads of operands. Storing a result costs a write by one kernel, and a read
# by each of the others. Both costs are counted per element, in bytes:
#
#     recompute   per reader: instructions / 8 + bytes read, without what the reader needs anyway
#     store       once: the same + bytes written; per reader: bytes read

# An H200 executes 33e12 instructions and moves 4.2e12 bytes per second.
INSTRUCTIONS_PER_BYTE = 8
# Storing needs one launch more, so it must save this factor.
LEAST_GAIN = 1.1
# A larger number of ops is never recomputed. So many take as long as eight reads of 16 bytes.
MANY_OPS = 1024


def elements(tv: TensorView) -> Scalar:
    """Returns the number of elements of `tv` in memory; a broadcast axis has only one."""
    return tv.fusion.canonical(memory_layout.elements(tv))


def worth_storing(
    fusion: Fusion,
    exprs: Sequence[TensorOp],
    kernels: Iterable[frozenset[TensorOp]],
    stored: Iterable[TensorView],
) -> list[TensorView]:
    """Returns the intermediate tensors that should be stored in addition to `stored`, in program
    order. All others are computed again by each kernel that needs them.

    `exprs` are the ops in program order. `kernels` has, per kernel, the ops that the kernel
    computes from the tensors `stored`.
    """
    return _Decision(fusion, exprs, tuple(kernels), {*stored}).run()


@dataclass
class _Decision:
    """Decides, for a program that is divided into kernels, which intermediate results are stored in
    memory. All others are computed again by each kernel that needs them.

    - `exprs` are the ops in program order. `kernels` has the ops of each kernel.
    - `stored` are the tensors that memory holds. Chosen tensors are added.
    - `computed_in` has, for each op, the kernels that compute it, as a bit set. It is updated while
      results are chosen.
    """

    fusion: Fusion
    exprs: Sequence[TensorOp]
    kernels: tuple[frozenset[TensorOp], ...]
    stored: set[TensorView]
    position: dict[TensorOp, int] = field(default_factory=dict[TensorOp, int])
    # Op -> bit set of the kernels that compute it; the bits of new kernels follow the others.
    computed_in: dict[TensorOp, int] = field(default_factory=dict[TensorOp, int])

    def run(self) -> list[TensorView]:
        """Returns the intermediate tensors to store, in program order.

        A first loop goes from the last result to the first, and chooses tensors as if all earlier
        results were computed again. A second loop goes from the first chosen tensor to the last. It
        drops each tensor that is cheap to compute from the other stored tensors.
        """
        for bit, ops in enumerate(self.kernels):
            for op in ops:
                self.computed_in[op] = self.computed_in.get(op, 0) | 1 << bit
        self.position = {e: at for at, e in enumerate(self.exprs)}
        repeated = [e for e in self.exprs if self.computed_in.get(e, 0).bit_count() > 1]
        chosen: dict[TensorView, None] = {}
        for op in reversed(repeated):
            if self._spread(op) and self._pays(op):
                self.computed_in[op] = 1 << len(self.kernels) + len(chosen)
                chosen[op.out_tensor] = None
                self.stored.add(op.out_tensor)
        for op in repeated:
            if op.out_tensor in chosen and not self._pays(op):
                del chosen[op.out_tensor]
                self._compute_again(op)
        return [op.out_tensor for op in repeated if op.out_tensor in chosen]

    def _readers(self, op: TensorOp) -> int:
        """Returns the kernels that use the results of `op`, as a bit set (bit i is set for kernel
        i).
        """
        return self._users(op.outputs, {})

    def _spread(self, op: TensorOp) -> bool:
        """Records that `op` is computed by all kernels that use its result, and returns whether
        storing this result can pay.

        Storing can pay only for an op with one result that several kernels use. If each op that
        reads the result is itself computed by all these kernels, it is better to store a later
        result.
        """
        self.computed_in[op] = readers = self._readers(op)
        users = {self.computed_in.get(u, 0) for out in op.outputs for u in self.fusion.uses(out)}
        return readers.bit_count() > 1 and users != {readers} and len(op.outputs) == 1

    def _compute_again(self, op: TensorOp) -> None:
        """Drops the result of `op` from the stored tensors: all kernels that read the result
        compute it from other stored tensors.
        """
        self.stored.remove(op.out_tensor)
        ops, _ = self._cone(op)
        for step in sorted(ops, key=self.position.__getitem__, reverse=True):
            self.computed_in[step] = self._readers(step)

    def _pays(self, op: TensorOp) -> bool:
        """Returns whether storing the result of `op` costs less than computing it again in each
        kernel that reads it.
        """
        ops, inputs = self._cone(op)
        if len(ops) > MANY_OPS:
            return True
        size, readers = elements(op.out_tensor), self._readers(op)
        count = readers.bit_count()
        # Op of the cone -> the readers that need it for something else, too.
        others: dict[TensorOp, int] = {op: 0}
        for step in sorted(ops - {op}, key=self.position.__getitem__, reverse=True):
            others[step] = readers & self._users(step.outputs, others)
        arithmetic = sum(
            instructions(step) * (count - others[step].bit_count() - 1)
            for step in ops
            if elements(step.out_tensor) == size
        )
        spared = arithmetic / INSTRUCTIONS_PER_BYTE
        cost_of_storing = nbytes_of(op.out_tensor.dtype()) * (1 + count)
        # A lookup reads as many elements of its table as its result has.
        found = {e.out: e for e in ops if isinstance(e, LookupOp)}
        tables = {e.table for e in found.values()}
        read = {v: readers & self._users((v,), others) for v in inputs if v not in tables}
        read.update((out, others[e]) for out, e in found.items())
        for v, own_readers in read.items():
            if elements(v) == size:
                nbytes = nbytes_of(v.dtype())
                cost_of_storing += nbytes
                spared += nbytes * (count - own_readers.bit_count())
        return spared > LEAST_GAIN * cost_of_storing

    def _users(self, tensors: Iterable[TensorView], others: Mapping[TensorOp, int]) -> int:
        """Returns the kernels that compute an op which reads one of `tensors`, as a bit set (bit i
        is set for kernel i).

        `others` maps ops to bit sets of kernels, which are used in place of those in `computed_in`.
        """
        found = 0
        for tv in tensors:
            for use in self.fusion.uses(tv):
                found |= others.get(use, self.computed_in.get(use, 0))
        return found

    def _cone(self, op: TensorOp) -> tuple[set[TensorOp], dict[TensorView, None]]:
        """Returns the ops that compute the result of `op` from stored tensors, and these stored
        tensors.

        The search stops after more than `MANY_OPS` ops, because so many ops are never computed
        again.
        """
        ops, inputs, todo = set[TensorOp](), dict[TensorView, None](), [op]
        while todo and len(ops) <= MANY_OPS:
            step = todo.pop()
            if step in ops:
                continue
            ops.add(step)
            for v in step.inputs:
                if not isinstance(v, TensorView):
                    continue
                made_by = self.fusion.definition(v)
                if v in self.stored or made_by is None:
                    inputs[v] = None
                else:
                    todo.append(made_by)
        return ops, inputs
