"""Segmentation: divides a fusion into library ops, views, communications and generated kernels.

A tensor is *materialised* if memory must hold it:

- inputs and outputs of the fusion;
- operands and results of library ops and communications;
- tables of lookups;
- results of reductions. If further ops compute tensors of the same size from such results alone,
  the last of these tensors are stored instead.

A kernel computes one materialised tensor from others. Each kernel computes the pointwise ops
between them that it needs, even if another kernel computes them, too. This costs reads of inputs
that are mostly read anyway, and saves a write. Kernels that share work are then merged as long as a
scheduler accepts the result.

Source: Herrmann et al. 2017 divide a graph of ops into parts without cycles between them. Here, a
part is an op with all ops from which it is computed. As in nvFuser, cheap ops are computed again in
each kernel that needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from heapq import heappop, heappush
from typing import Literal, NoReturn

from fuser.ir import memory_layout
from fuser.ir.domain.axis_path import transforms_between
from fuser.ir.domain.tensor_domain import SplitTransform, TensorDomain
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.ops import nodes
from fuser.ir.ops.lookup import LookupOp
from fuser.ir.ops.nodes import ReductionOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.types import LoadStoreOpType, MemoryType, ParallelType
from fuser.passes.merge_groups import (
    REDUCTION_OPS,
    Merger,
    Pays,
    SegmentGroup,
    elements,
    worth_storing,
)
from fuser.passes.view_ops import (
    VIEW_OPS,
    Strides,
    is_copy,
    lies_as_declared,
    view_strides,
    views_of_inputs,
)
from fuser.support import progress
from fuser.support.errors import UnsupportedError
from fuser.support.record import record, replace

# If kernels of this many levels compute a tensor, it is decided early whether to store it.
MANY_LEVELS = 24

SegmentKind = Literal["kernel", "library", "alias", "communication"]


@record
class Segment:
    """A part of a program that runs as one unit, such as a kernel: its ops, and the tensors that
    are read and written.

    `kind` says what executes the ops: a generated kernel, a library call, a view without any work
    (alias) or a communication. For a kernel, `scheduler` is the name of the automatic schedule.
    """

    number: int
    kind: SegmentKind
    exprs: tuple[TensorOp, ...]
    inputs: tuple[TensorView | Scalar, ...]
    outputs: tuple[TensorView, ...]
    scheduler: str = ""
    # The kernel's own fusion (global form); None for other kinds.
    fusion: Fusion | None = field(default=None, hash=False)

    @property
    def line(self) -> str:
        """The line of the user's code that created the last op of this segment, as text; "" if no
        op has a line.
        """
        return next((op.where for op in reversed(self.exprs) if op.where), "")


@record
class SegmentedFusion:
    """A fusion, and the segments (kernels, library calls, ..) into which it is divided, in the
    order in which they run.
    """

    fusion: Fusion
    segments: tuple[Segment, ...]

    def describe(self) -> str:
        """Returns a text with one line per segment (kernel, library call, ..): number, kind, ops
        and results.
        """
        return "\n".join(
            f"{s.number}: {s.scheduler or s.kind} {{{', '.join(e.name for e in s.exprs)}}} -> "
            f"{', '.join(o.label for o in s.outputs)}"
            for s in self.segments
        )


def segment_fusion(
    fusion: Fusion,
    *,
    find_scheduler: Callable[[Fusion], str | None],
    local_shape: Callable[[TensorView], Sequence[Scalar]],
    pays: Pays = lambda parts, union: True,
    may_share_kernel: Callable[[TensorOp, TensorOp], bool] = lambda a, b: True,
    stands_alone: Callable[[TensorOp], bool] = lambda op: isinstance(op, nodes.LibraryOp),
    row_parts: int = 0,
    takes_both: Callable[[Fusion], str | None] | None = None,
) -> SegmentedFusion:
    """Divides `fusion` into segments (kernels, library calls, views and communications), and
    returns them in the order in which they run.

    - `find_scheduler` returns the name of a scheduler that accepts a kernel's fusion, or None.
    - `local_shape` returns the sizes that a tensor has in the memory of one device.
    - `pays(parts, union)` returns whether one kernel `union` is as fast as the kernels `parts`.
    - `may_share_kernel` is an equivalence relation of ops: the ops of one kernel must be executed
      equally often by the host program.
    - `stands_alone` returns whether an op is executed by a library call.
    - `row_parts`: if not 0, a sum over rows may be split into this many partial sums. The split
      changes `fusion` itself.
    - `takes_both` returns the scheduler of a kernel that runs two merged kernels side by side in
      one launch. None disables such kernels.

    Raises:
        UnsupportedError: no scheduler accepts some op, not even as the only op of a kernel. The
            message names the op.
    """
    segmenter = _Segmenter(
        fusion, find_scheduler, local_shape, pays, may_share_kernel, stands_alone, row_parts
    )
    return segmenter.run(takes_both)


class _Segmenter:
    """Divides one fusion into segments: kernels, library calls, views and communications.

    The attributes hold the decisions made so far. `kind` says for each op what executes it.
    """

    def __init__(
        self,
        fusion: Fusion,
        find_scheduler: Callable[[Fusion], str | None],
        local_shape: Callable[[TensorView], Sequence[Scalar]],
        pays: Pays,
        may_share_kernel: Callable[[TensorOp, TensorOp], bool],
        stands_alone: Callable[[TensorOp], bool],
        row_parts: int,
    ) -> None:
        self.fusion = fusion
        self.row_parts = row_parts
        self.exprs = fusion.used_exprs()
        self.find_scheduler = find_scheduler
        self.local_shape = local_shape
        self.pays, self.may_share_kernel = pays, may_share_kernel
        self.position = {e: i for i, e in enumerate(self.exprs)}
        self.kind: dict[TensorOp, SegmentKind] = {}
        for e in self.exprs:
            if isinstance(e, nodes.Reshard):
                self.kind[e] = "communication"
            elif _is_boundary(e):
                # An alias, because no kernel contains it; an output needs its own memory.
                self.kind[e] = "library" if e.out_tensor in fusion.outputs else "alias"
            else:
                self.kind[e] = "library" if stands_alone(e) else "kernel"
        self.scalars = [v for v in fusion.inputs if isinstance(v, Scalar)]
        self.strides: dict[TensorView, Strides] = {}
        # (ops, outputs, inputs, totals) of a candidate -> the accepted group, or None.
        self.answers: dict[object, SegmentGroup | None] = {}

    def run(self, takes_both: Callable[[Fusion], str | None] | None) -> SegmentedFusion:
        """Chooses the ops that become views and the tensors that are stored, merges kernels, and
        returns the segments.

        `takes_both` returns the scheduler of a kernel that runs two merged kernels side by side in
        one launch. None disables such kernels.
        """
        self._mark_aliases()
        stored = self._materialised()
        self._store_early(stored)
        groups = self._merge(self._accepted_cones(stored))
        while more := worth_storing(self.fusion, self.exprs, [g.ops for g in groups], stored):
            stored.update(dict.fromkeys(more))
            groups = self._merge(self._accepted_cones(stored))
        groups = self._split_rows(groups)
        if takes_both is not None:
            self.find_scheduler = takes_both
            self.answers.clear()
            groups = self._merger(groups).run(("horizontal",))
        return SegmentedFusion(self.fusion, tuple(self._order(groups)))

    # ------------------------------------------------------------ views
    def _mark_aliases(self) -> None:
        """Chooses the ops (reshapes, slices, ..) whose results are views of memory, which costs
        nothing. The others are computed by kernels.

        torch must be able to view the operand. A view pays if memory already holds the operand, or
        if a library op or communication needs the result. A chain of such ops between two ops of a
        kernel stays in the kernel.
        """
        needs_memory = self._views_wanted_in_memory()
        shown = views_of_inputs(self.fusion)
        for e in self.exprs:
            for out in e.outputs:
                self.strides[out] = self._dense(out)
            if self.kind[e] == "alias":
                strides = self._view_strides(e) or self.strides[e.out_tensor]
                if self._may_be_sent(e, strides):
                    self.strides[e.out_tensor] = strides
                else:
                    # The operand has the memory order of an input, so a copy of it is sent.
                    self.kind[e] = "library"
            if self.kind[e] != "kernel" or not isinstance(e, VIEW_OPS):
                continue
            if is_copy(e):
                continue
            is_output, is_shown = e.out in self.fusion.outputs, e.out in shown
            if is_output and not (is_shown and self._is_stored(e.inp)):
                continue
            if not (self._is_stored(e.inp) or e in needs_memory):
                continue
            only_shape_ops = isinstance(e, nodes.BroadcastOp | nodes.ExpandOp | nodes.SqueezeOp)
            if only_shape_ops and e not in needs_memory and not is_shown:
                continue  # kernels broadcast for free
            strides = self._view_strides(e)
            if strides is None or not self._may_be_sent(e, strides):
                continue
            if not is_output or lies_as_declared(e.out, strides, self.local_shape(e.out)):
                self.kind[e] = "alias"
                self.strides[e.out] = strides

    def _may_be_sent(self, e: TensorOp, strides: tuple[Scalar, ...]) -> bool:
        """Returns False if the result of `e` must not be a view with these strides, because a
        communication reads it.

        A communication sends memory, which must have no gaps and be in the declared order. If the
        view has other strides, a kernel copies the data into such memory instead.
        """
        sent = any(self.kind.get(u) == "communication" for u in self.fusion.uses(e.out_tensor))
        dense = zip(
            e.out_tensor.domain.no_reductions, strides, self._dense(e.out_tensor), strict=True
        )
        return not sent or all(a.is_broadcast or have == want for a, have, want in dense)

    def _views_wanted_in_memory(self) -> set[TensorOp]:
        """Returns the ops (reshapes, slices, ..) whose result must be in memory because of one of
        these readers:

        - a library op or a communication, directly or through other such ops;
        - a lookup that uses the result as its table;
        - an op that may not be in the same kernel (`may_share_kernel` returns False).
        """
        wanted: set[TensorOp] = set()
        for e in reversed(self.exprs):
            reads_memory = self.kind[e] in ("library", "communication") or e in wanted
            for v in e.inputs:
                d = self.fusion.definition(v) if isinstance(v, TensorView) else None
                if d is None or self.kind[d] != "kernel" or not isinstance(d, VIEW_OPS):
                    continue
                is_table = isinstance(e, LookupOp) and v is e.table
                if reads_memory or is_table or not self.may_share_kernel(d, e):
                    wanted.add(d)
        return wanted

    def _is_stored(self, tv: TensorView) -> bool:
        definition = self.fusion.definition(tv)
        return definition is None or self.kind[definition] != "kernel"

    def _dense(self, tv: TensorView) -> tuple[Scalar, ...]:
        """Returns the strides that `tv` has on one device when it is newly allocated, one per axis
        that the user sees.
        """
        return memory_layout.dense_strides(tv, self.local_shape(tv))

    def _view_strides(self, e: TensorOp) -> Strides | None:
        """Returns the strides of the result of `e` as a view of its operand, or None if torch would
        have to copy.
        """
        source: TensorView = e.inputs[0]
        known = self.strides.get(source)
        if known is None:
            known = memory_layout.known_strides(source, self.local_shape(source))
        return view_strides(e, known, self.local_shape)

    # ------------------------------------------------------------ what memory holds
    def _materialised(self) -> dict[TensorView, None]:
        """Returns the tensors that memory must hold, as the keys of a dictionary that serves as an
        ordered set.
        """
        stored: dict[TensorView, None] = {
            v: None for v in self.fusion.inputs if isinstance(v, TensorView)
        }
        stored.update(dict.fromkeys(self.fusion.outputs))
        for e in self.exprs:
            if self.kind[e] != "kernel":
                stored.update({v: None for v in e.inputs if isinstance(v, TensorView)})
                stored.update(dict.fromkeys(e.outputs))
                continue
            if isinstance(e, LookupOp):
                stored[e.table] = None
            for v in e.inputs:
                d = self.fusion.definition(v) if isinstance(v, TensorView) else None
                if isinstance(v, TensorView) and d is not None and not self.may_share_kernel(d, e):
                    stored[v] = None
        reduced = self._reduced_space()
        for tv in reduced:
            uses = [u for u in self.fusion.uses(tv) if u in self.position]
            # A reduction of a reduced tensor has a separate iteration space.
            if any(isinstance(u, REDUCTION_OPS) or u.out_tensor not in reduced for u in uses):
                stored[self._without_broadcasts(tv, reduced)] = None
        return stored

    def _without_broadcasts(self, tv: TensorView, reduced: dict[TensorView, None]) -> TensorView:
        """Returns the tensor from which `tv` is computed by broadcasts and squeezes alone, or `tv`
        itself.

        It suffices to store this tensor, because kernels repeat broadcasts and squeezes at no cost.
        `reduced` has the results of reductions and the equally small tensors computed from them.
        The search does not leave this set.
        """
        while isinstance(e := self.fusion.definition(tv), nodes.BroadcastOp | nodes.SqueezeOp):
            if e.inp not in reduced or self.kind[e] != "kernel":
                break
            tv = e.inp
        return tv

    def _reduced_space(self) -> dict[TensorView, None]:
        """Returns the results of reductions, and the tensors of the same number of elements that
        are computed only from such results.

        All of them are small, so that it is cheap to store them. The keys of the dictionary serve
        as an ordered set.
        """
        reduced: dict[TensorView, None] = {}
        for e in self.exprs:
            if self.kind[e] != "kernel":
                continue
            if isinstance(e, REDUCTION_OPS):
                reduced.update(dict.fromkeys(e.outputs))
                continue
            tensors = [v for v in e.inputs if isinstance(v, TensorView)]
            if not tensors or not all(t in reduced for t in tensors):
                continue
            # An expanded result is larger than its operand, so the readers expand it.
            if any(a.expanded is not None for o in e.outputs for a in o.domain.logical):
                continue
            biggest = {elements(t) for t in tensors}
            if all(elements(o) in biggest for o in e.outputs) and len(biggest) == 1:
                reduced.update(dict.fromkeys(e.outputs))
        return reduced

    # ------------------------------------------------------------ kernels
    def _cone(
        self, targets: Iterable[TensorView], stored: dict[TensorView, None]
    ) -> tuple[set[TensorOp], dict[TensorView, None]]:
        """Returns the ops of the kernel that computes `targets` from stored tensors, and the stored
        tensors that it reads.
        """
        ops: set[TensorOp] = set()
        inputs: dict[TensorView, None] = {}
        todo = [self.fusion.definition(t) for t in targets]
        while todo:
            op = todo.pop()
            if op is None or op in ops:
                continue
            ops.add(op)
            for v in op.inputs:
                if not isinstance(v, TensorView):
                    continue
                if v in stored:
                    inputs[v] = None
                else:
                    todo.append(self.fusion.definition(v))
        # A sibling of a computed result (the mean beside its variance) is not read from memory.
        return ops, {v: None for v in inputs if self.fusion.definition(v) not in ops}

    def _levels(self) -> dict[TensorOp, int]:
        """Returns the level of each op: how many library ops, views and communications come before
        it.

        If several paths lead from an input to the op, the path with the most of these ops
        determines the level.
        """
        levels: dict[TensorOp, int] = {}
        for e in self.exprs:
            found = [self.fusion.definition(v) for v in e.inputs if isinstance(v, TensorView)]
            before = (levels[d] + (self.kind[d] != "kernel") for d in found if d is not None)
            levels[e] = max(before, default=0)
        return levels

    def _store_early(self, stored: dict[TensorView, None]) -> None:
        """Chooses further tensors to store, and adds them to `stored`: those that kernels of many
        different levels would otherwise each compute again.

        The level of a kernel is the number of library ops, views and communications before it.
        Kernels of different levels cannot be merged, because each waits for results of the level
        before. In a deep program, each kernel would otherwise compute all earlier pointwise ops
        again. With residuals

            y1 = x + f(..), y2 = y1 + g(..), y3 = y2 + h(..), ..

        each kernel would add up all earlier terms. All kernels of one level are treated as one
        kernel, because they may be merged. Once `MANY_LEVELS` levels compute an op, `worth_storing`
        decides which tensors to store. The decision holds for the whole program: a tensor that pays
        for these kernels also pays for more kernels.
        """
        levels, many = self._levels(), MANY_LEVELS
        kernels: dict[int, set[TensorOp]] = {}
        computed: dict[TensorOp, set[int]] = {}
        for at, e in enumerate(self.exprs):
            targets = [o for o in e.outputs if o in stored]
            if self.kind[e] != "kernel" or not targets:
                continue
            ops, _ = self._cone(targets, stored)
            kernels.setdefault(levels[e], set()).update(ops)
            for op in ops:
                computed.setdefault(op, set()).add(levels[e])
            if max(len(computed[op]) for op in ops) < many:
                continue
            exprs = [op for op in self.exprs[: at + 1] if op in computed]
            more = worth_storing(self.fusion, exprs, map(frozenset, kernels.values()), stored)
            if more:
                stored.update(dict.fromkeys(more))
                kernels.clear()
                computed.clear()
            many = MANY_LEVELS if more else 2 * many

    def _cones(self, stored: dict[TensorView, None]) -> list[SegmentGroup]:
        """Returns one kernel (group of ops) for each op that computes a stored tensor: the op, and
        the ops that compute its operands from other stored tensors.
        """
        groups: list[SegmentGroup] = []
        seen: set[TensorView] = set()
        for e in self.exprs:
            if self.kind[e] != "kernel":
                continue
            targets = [o for o in e.outputs if o in stored and o not in seen]
            if not targets:
                continue
            seen.update(targets)
            ops, inputs = self._cone(targets, stored)
            at = [self.position[op] for op in ops]
            found = frozenset(ops), tuple(targets), tuple(inputs)
            groups.append(SegmentGroup(*found, min(at), max(at)))
        return groups

    def _accepted_cones(self, stored: dict[TensorView, None]) -> list[SegmentGroup]:
        """Returns one kernel (group of ops), accepted by a scheduler, for each op that computes a
        stored tensor.

        If no scheduler accepts a kernel, the results of its reductions are added to `stored`, so
        that kernels become smaller, and all kernels are chosen again.

        Raises:
            UnsupportedError: no scheduler accepts some kernel, and the results of its reductions
                are all stored already.
        """
        while True:
            made: list[SegmentGroup] = []
            refused: SegmentGroup | None = None
            cones = self._cones(stored)
            for number, group in enumerate(cones, 1):
                progress.stage("kernel to choose", number, len(cones))
                accepted = self._accepted(group)
                if accepted is None:
                    refused = group
                    break
                made.append(accepted)
            if refused is None:
                return made
            ends = [
                out
                for op in refused.ops
                if isinstance(op, REDUCTION_OPS)
                for out in op.outputs
                if out not in stored and self.fusion.uses(out)
            ]
            if not ends:
                self._refuse(refused)
            stored.update(dict.fromkeys(ends))

    def _merge(self, groups: list[SegmentGroup]) -> list[SegmentGroup]:
        return self._merger(groups).run()

    def _merger(self, groups: list[SegmentGroup]) -> Merger:
        return Merger(
            self.fusion,
            groups,
            [e for e in self.exprs if self.kind[e] != "kernel"],
            self.position,
            accept=self._accepted,
            pays=self.pays,
            may_share_kernel=self.may_share_kernel,
        )

    def _accepted(
        self, group: SegmentGroup, totals: tuple[TensorView, ...] = ()
    ) -> SegmentGroup | None:
        """Returns `group` with the fusion and the scheduler of its kernel, or None if no scheduler
        accepts it.

        With `totals`, the kernel computes only partial sums of these tensors. Results are cached.
        """
        key = group.ops, group.outputs, group.inputs, totals
        if key not in self.answers:
            self.answers[key] = self._ask(group, totals)
        return self.answers[key]

    def _ask(self, group: SegmentGroup, totals: tuple[TensorView, ...]) -> SegmentGroup | None:
        """Returns the kernel `group` with its fusion and scheduler, or None if no scheduler accepts
        it. `_accepted` caches the result.

        With `totals`, the kernel computes only partial sums of these tensors.
        """
        if totals and not (self.row_parts and all(map(may_come_in_parts, totals))):
            return None
        fusion = self._extract(group)
        if totals:
            numbers = {tv.number for tv in totals}
            twins = [tv for tv in fusion.tensors() if tv.number in numbers]
            below = _below(fusion.exprs, twins)
            parts = [split_rows(tv, self.row_parts) for tv in twins]
            fusion.outputs = [*(o for o in fusion.outputs if o not in below), *parts]
            fusion.exprs = fusion.used_exprs()
        scheduler = self.find_scheduler(fusion)
        if scheduler is None:
            return None
        return replace(group, scheduler=scheduler, fusion=fusion, totals=totals)

    def _split_rows(self, groups: list[SegmentGroup]) -> list[SegmentGroup]:
        """Returns `groups`, with two kernels in place of each kernel that computes only partial
        sums of some tensors (`totals`).

        The first of the two computes the partial sums, and the second adds them up.
        """
        made: list[SegmentGroup] = []
        for group in groups:
            if not group.totals:
                made.append(group)
                continue
            in_order = self._in_order(group)
            below = _below(in_order, group.totals)
            parts = [split_rows(tv, self.row_parts) for tv in group.totals]
            self._number_ops()
            # The original reductions no longer exist.
            ops = [op for op in in_order if op in self.position]
            rows = {op for op in ops if op.out_tensor not in below} | self._definitions(parts)
            sums = {op for op in ops if op.out_tensor in below} | self._definitions(group.totals)
            outputs = [[o for o in group.outputs if (o in below) == is_sum] for is_sum in (0, 1)]
            made += [
                self._completed(rows, [*outputs[0], *parts]),
                self._completed(sums, outputs[1]),
            ]
        return made

    def _definitions(self, tensors: Iterable[TensorView]) -> set[TensorOp]:
        found = map(self.fusion.definition, tensors)
        return {op for op in found if op is not None}

    def _number_ops(self) -> None:
        """Updates the order of the ops, and what executes each, after new ops were added to the
        fusion.
        """
        self.exprs = self.fusion.used_exprs()
        self.position = {e: i for i, e in enumerate(self.exprs)}
        for e in self.exprs:
            self.kind.setdefault(e, "kernel")

    def _completed(self, ops: set[TensorOp], outputs: Sequence[TensorView]) -> SegmentGroup:
        """Returns a kernel that computes `outputs` by the ops `ops`, with its fusion and scheduler.

        Raises:
            UnsupportedError: no scheduler accepts the kernel.
        """
        made = {out for op in ops for out in op.outputs}
        read = [v for op in ops for v in op.inputs if isinstance(v, TensorView) and v not in made]
        at = [self.position[op] for op in ops]
        inputs = sorted(dict.fromkeys(read), key=lambda tv: tv.number)
        group = SegmentGroup(frozenset(ops), tuple(outputs), tuple(inputs), min(at), max(at))
        accepted = self._accepted(group)
        if accepted is None:
            self._refuse(group)
        return accepted

    def _refuse(self, group: SegmentGroup) -> NoReturn:
        ops = self._in_order(group)
        outputs = ", ".join(map(str, group.outputs))
        raise UnsupportedError(
            f"no scheduler accepts the kernel that computes {outputs}: compute it outside of the "
            "definition, and pass it as an input (user code at "
            f"{ops[-1].where or 'unknown'}):\n"
            f"{self._extract(group).print_math()}"
        )

    def _extract(self, group: SegmentGroup) -> Fusion:
        operands = (*group.inputs, *self.scalars)
        return extract(self.fusion, self._in_order(group), operands, group.outputs)

    def _in_order(self, group: SegmentGroup) -> tuple[TensorOp, ...]:
        return tuple(sorted(group.ops, key=self.position.__getitem__))

    # ------------------------------------------------------------ order
    def _order(self, groups: list[SegmentGroup]) -> list[Segment]:
        """Returns the kernels `groups` and all other ops as segments, each after the segments whose
        results it reads.

        If several segments could run next, the first of them in program order is next.
        """
        steps: list[tuple[int, Segment]] = []
        for g in groups:
            ops = self._in_order(g)
            first_use = min(self.position[self.fusion.definition(o)] for o in g.outputs)  # pyright: ignore[reportArgumentType]
            assert g.fusion is not None
            scalars = tuple(v for v in g.fusion.inputs if isinstance(v, Scalar))
            steps.append(
                (
                    first_use,
                    Segment(
                        0, "kernel", ops, (*g.inputs, *scalars), g.outputs, g.scheduler, g.fusion
                    ),
                )
            )
        for e in self.exprs:
            if self.kind[e] != "kernel":
                steps.append(
                    (self.position[e], Segment(0, self.kind[e], (e,), e.inputs, e.outputs))
                )
        steps.sort(key=lambda s: s[0])
        return _sorted([s for _, s in steps])


def _sorted(segments: Sequence[Segment]) -> list[Segment]:
    """Returns segments, numbered, each after those whose results it reads.

    If several segments could run next, the first of them in `segments` is next.
    """
    producer = {out: k for k, s in enumerate(segments) for out in s.outputs}
    readers: dict[int, list[int]] = {k: [] for k in range(len(segments))}
    missing: list[int] = []
    for k, s in enumerate(segments):
        awaited = {producer[v] for v in s.inputs if isinstance(v, TensorView) and v in producer}
        missing.append(len(awaited))
        for source in awaited:
            readers[source].append(k)
    ready = [k for k, count in enumerate(missing) if not count]
    ordered: list[Segment] = []
    while ready:
        following = heappop(ready)
        ordered.append(replace(segments[following], number=len(ordered)))
        for k in readers[following]:
            missing[k] -= 1
            if not missing[k]:
                heappush(ready, k)
    assert len(ordered) == len(segments), "segments that depend on each other"
    return ordered


def _below(exprs: Iterable[TensorOp], tensors: Iterable[TensorView]) -> set[TensorView]:
    """Returns `tensors`, and all results of `exprs` that depend on one of them.

    `exprs` are in program order.
    """
    found = {*tensors}
    for op in exprs:
        if any(v in found for v in op.inputs):
            found.update(op.outputs)
    return found


def _is_boundary(op: TensorOp) -> bool:
    """Returns whether the op is a border between kernels that the user placed with
    `ops.segment_set`.
    """
    return isinstance(op, nodes.LoadStoreOp) and op.kind is LoadStoreOpType.segmenter_set


def extract(
    fusion: Fusion,
    ops: Sequence[TensorOp],
    inputs: Sequence[TensorView | Scalar],
    outputs: Sequence[TensorView],
) -> Fusion:
    """Returns a fusion of its own for the ops of one kernel. Tensors keep their numbers, sizes and
    placement on devices.

    `inputs` are the tensors that the kernel reads, then the scalar inputs of `fusion`, and
    `outputs` the tensors that it writes. The ops that compute an input tensor are unknown to the
    new fusion, so the tensor's reduction axes are dropped. The scalars that the ops use become
    inputs of the new fusion.
    """
    part, mapping = fusion.copy(ops)
    part.origins = ()
    used = {s for e in ops for v in e.inputs if isinstance(v, Scalar) for s in sc.symbols(v)}
    scalars = [v for v in inputs if isinstance(v, Scalar) and v in used]
    read = [t for t in inputs if isinstance(t, TensorView)]
    part.inputs = [*(mapping[t] for t in read), *scalars]
    part.outputs = [mapping[t] for t in dict.fromkeys(outputs)]
    for t in read:
        twin = mapping[t]
        twin.domain = as_input_domain(twin.domain)
        twin.memory = MemoryType.global_
    for t in part.outputs:
        t.memory = MemoryType.global_
    held = {*part.inputs, *part.outputs}
    for t in mapping.values():
        # Other tensors are not in memory, so their memory order is dropped; shardings are kept.
        order = t.domain.allocation_numbers
        if order and t not in held and {*order} <= {*t.domain.logical_numbers}:
            t.domain = _once(t.domain, TensorDomain.in_logical_order)
    return part


def as_input_domain(domain: TensorDomain) -> TensorDomain:
    """Returns the axes of a tensor as a kernel that reads it sees them: without reduction axes, and
    without the axes from which a reshape derived the visible ones.

    The axes are no longer marked as derived (`rf`), because the kernel does not derive the axes of
    its inputs.
    """
    return _once(domain, _read)


def _read(domain: TensorDomain) -> TensorDomain:
    made = domain.without_root()
    return made.with_axes(*(replace(a, rfactor=False) for a in made.axes.values() if a.rfactor))


def _once(domain: TensorDomain, change: Callable[[TensorDomain], TensorDomain]) -> TensorDomain:
    """Returns `change(domain)`, which is computed only once per domain.

    Later calls return the same object, so that comparisons of domains are fast.
    """
    if change not in domain.known:
        domain.known[change] = change(domain)
    return domain.known[change]


# ----------------------------------------------------------------------
# Sums over rows in two steps: partial sums of some rows each (*parts*), then their sum.
#
#     total [r rows, n]   ->   parts [r rows/264, i 264, n];  total [r 264, n] = sum(parts)
#
# A kernel that processes whole rows can compute the parts at the same time. The backward pass of a
# norm needs both: the gradient of its input, row by row, and that of its weights, over all rows.


@record
class RowParts:
    """A reduction that computes several partial sums, over some rows each.

    `count` is the number of partial sums. `part` is the number (id) of the axis over the partial
    sums, and `rest` is the number of the axis that is still reduced.
    """

    count: int
    part: int
    rest: int


def row_parts(op: TensorOp) -> RowParts | None:
    """Returns how `op` computes partial sums over rows: their number, and its axes. Returns None if
    `op` computes no partial sums.
    """
    if not isinstance(op, ReductionOp) or not op.out.domain.root:
        return None
    domain = op.out.domain
    reduced = [a.number for a in domain.logical if a.is_reduction()]
    *_, last = transforms_between(domain, domain.root, domain.logical) or [None]
    if not isinstance(last, SplitTransform) or not last.inner_split or [last.outer] != reduced:
        return None
    count = sc.int_value(last.factor)
    return None if count is None else RowParts(count, last.inner, last.outer)


def may_come_in_parts(total: TensorView) -> bool:
    """Returns whether the reduction that computes `total` can be split into partial sums.

    Returns False if the op has further results. Also returns False if `total` has a declared memory
    order, an axis that is split over devices, or loops that are scheduled already.
    """
    op, domain = total.definition(), total.domain
    is_plain = domain.loop_numbers == domain.logical_numbers and not domain.allocation
    is_serial = all(a.ptype is ParallelType.serial for a in domain.loop)
    return isinstance(op, ReductionOp) and is_plain and is_serial


def split_rows(total: TensorView, count: int) -> TensorView:
    """Replaces the reduction that computes `total` by two: the first computes `count` partial sums,
    and the second adds them up. Returns the partial sums.
    """
    axes = [k for k, a in enumerate(total.domain.loop) if a.is_reduction()]
    first = axes[0]
    total.reorder({at: first + k for k, at in enumerate(axes)})
    for _ in axes[1:]:
        total.merge(first)
    total.split(first, count)
    parts = total.rfactor([first])
    parts.memory = MemoryType.global_
    return parts
