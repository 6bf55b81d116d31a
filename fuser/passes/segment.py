"""Segmentation: cut a fusion into library ops, views, communications and generated kernels.

A tensor is *materialised* when memory must hold it: fusion inputs and outputs, operands and results
of library ops and communications, tables of lookups, and the last tensors of a reduction's own
iteration space. A kernel computes one materialised tensor from other materialised tensors; the
pointwise ops between are recomputed by every kernel that needs them, which costs reads of inputs
that are read anyway and saves a write. Kernels that share work are then merged while a scheduler
accepts the union.

Source: the acyclic-partition view of fusion (Herrmann et al. 2017) reduced to cones; nvFuser's
forwarding of cheap producer chains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
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

# Of what kernels of so many levels compute it is decided early whether to store it.
MANY_LEVELS = 24

SegmentKind = Literal["kernel", "library", "alias", "communication"]


@record
class Segment:
    """One step of the program: ops in order, and the tensors that cross its border."""

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
        """The user's line of what the segment computes."""
        return next((op.where for op in reversed(self.exprs) if op.where), "")


@record
class SegmentedFusion:
    """A fusion and its segments in run order."""

    fusion: Fusion
    segments: tuple[Segment, ...]

    def describe(self) -> str:
        """Returns one line per segment: number, kind, ops, results."""
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
    """Cuts `fusion` into segments in run order.

    `find_scheduler` names a scheduler that accepts a kernel's fusion, `pays` tells whether one
    pointwise kernel is as fast as those of its parts, `local_shape` gives the extents of what
    memory holds of a tensor, and `may_share_kernel` is an equivalence of ops: those of one kernel
    run equally often. `stands_alone` tells which ops the library carries out. Where `row_parts` is
    not 0, sums over rows may be split in that many parts, in `fusion` itself. `takes_both` names a
    scheduler of kernels beside one another (None: there is none). Raises
    `UnsupportedError` naming an op that no scheduler accepts even alone.
    """
    segmenter = _Segmenter(
        fusion, find_scheduler, local_shape, pays, may_share_kernel, stands_alone, row_parts
    )
    return segmenter.run(takes_both)


class _Segmenter:
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
                # An alias, as no kernel contains one; an output needs memory of its own.
                self.kind[e] = "library" if e.out_tensor in fusion.outputs else "alias"
            else:
                self.kind[e] = "library" if stands_alone(e) else "kernel"
        self.strides: dict[TensorView, Strides] = {}
        # What schedulers said of candidates: groups of these ops, outputs, inputs and totals.
        self.answers: dict[object, SegmentGroup | None] = {}

    def run(self, takes_both: Callable[[Fusion], str | None] | None) -> SegmentedFusion:
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
            groups = self._merger(groups).run(("beside",))
        return SegmentedFusion(self.fusion, tuple(self._order(groups)))

    # ------------------------------------------------------------ views
    def _mark_aliases(self) -> None:
        """Turns view ops into aliases where their input is stored anyway and torch can view it.

        A view is worth an alias when its input is held by memory already, or when a library op or
        communication needs its output; a chain of views between two kernel ops stays in the kernel.
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
                    # Its operand follows an input in memory: a copy of its own is sent.
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
        """Whether communications may read this view: they send memory, which must be dense and in
        the declared order. A kernel packs any other view."""
        sent = any(self.kind.get(u) == "communication" for u in self.fusion.uses(e.out_tensor))
        dense = zip(
            e.out_tensor.domain.no_reductions, strides, self._dense(e.out_tensor), strict=True
        )
        return not sent or all(a.is_broadcast or mine == want for a, mine, want in dense)

    def _views_wanted_in_memory(self) -> set[TensorOp]:
        """Returns the view ops from which only views lead to a library op or communication, to
        a lookup as its table, or to a kernel that they cannot be in."""
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
        """Returns the strides of a freshly allocated local tensor, per logical axis."""
        return memory_layout.dense_strides(tv, self.local_shape(tv))

    def _view_strides(self, e: TensorOp) -> Strides | None:
        """Returns the strides of a view op's output, None when torch would have to copy."""
        source: TensorView = e.inputs[0]
        known = self.strides.get(source)
        if known is None:
            known = memory_layout.known_strides(source, self.local_shape(source))
        return view_strides(e, known, self.local_shape)

    # ------------------------------------------------------------ what memory holds
    def _materialised(self) -> dict[TensorView, None]:
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
            # A reduction of a reduced tensor has an iteration space of its own.
            if any(isinstance(u, REDUCTION_OPS) or u.out_tensor not in reduced for u in uses):
                stored[self._without_broadcasts(tv, reduced)] = None
        return stored

    def _without_broadcasts(self, tv: TensorView, reduced: dict[TensorView, None]) -> TensorView:
        """Returns what a tensor has the elements of: the readers broadcast for free."""
        while isinstance(e := self.fusion.definition(tv), nodes.BroadcastOp | nodes.SqueezeOp):
            if e.inp not in reduced or self.kind[e] != "kernel":
                break
            tv = e.inp
        return tv

    def _reduced_space(self) -> dict[TensorView, None]:
        """Returns reduction results and what is computed from them alone, in their own space."""
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
            # An expanded result is larger than what it repeats: the readers expand it.
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
        """Returns the kernel ops that compute `targets` from stored tensors, and those tensors."""
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
        # The sibling of a result that is computed here (a mean beside its variance) is not read.
        return ops, {v: None for v in inputs if self.fusion.definition(v) not in ops}

    def _levels(self) -> dict[TensorOp, int]:
        """Returns how many ops that no kernel computes stand one behind the other before each
        op."""
        levels: dict[TensorOp, int] = {}
        for e in self.exprs:
            found = [self.fusion.definition(v) for v in e.inputs if isinstance(v, TensorView)]
            before = (levels[d] + (self.kind[d] != "kernel") for d in found if d is not None)
            levels[e] = max(before, default=0)
        return levels

    def _store_early(self, stored: dict[TensorView, None]) -> None:
        """Stores what kernels of very many levels would compute again, each for itself.

        These cannot be merged, as each waits for results of the one before. Without that the
        kernels of a deep program would grow with what stands before them: of residuals

            y1 = x + f(..), y2 = y1 + g(..), y3 = y2 + h(..), ..

        each would add up all before. Kernels of one level count as one, and decisions are those of
        `worth_storing`: what pays for so many kernels pays for more.
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
        """Returns the cones; what no scheduler accepts is cut where its reductions end."""
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
        """Returns the group with its fusion and scheduler, None when no scheduler accepts it; with
        `totals`, if it makes only parts of these."""
        key = group.ops, group.outputs, group.inputs, totals
        if key not in self.answers:
            self.answers[key] = self._ask(group, totals)
        return self.answers[key]

    def _ask(self, group: SegmentGroup, totals: tuple[TensorView, ...]) -> SegmentGroup | None:
        """Returns what `_accepted` does, of a candidate that comes for the first time."""
        if totals and not (self.row_parts and all(map(may_come_in_parts, totals))):
            return None
        fusion = extract(self.fusion, self._in_order(group), group.inputs, group.outputs)
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
        """Returns the groups, those of rows and sums as two: one makes parts, one adds them up."""
        made: list[SegmentGroup] = []
        for group in groups:
            if not group.totals:
                made.append(group)
                continue
            in_order = self._in_order(group)
            below = _below(in_order, group.totals)
            parts = [split_rows(tv, self.row_parts) for tv in group.totals]
            self._number_ops()
            # The reductions that are split are no longer there.
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
        """Notes the ops of the fusion, of which some are new."""
        self.exprs = self.fusion.used_exprs()
        self.position = {e: i for i, e in enumerate(self.exprs)}
        for e in self.exprs:
            self.kind.setdefault(e, "kernel")

    def _completed(self, ops: set[TensorOp], outputs: Sequence[TensorView]) -> SegmentGroup:
        """Returns the accepted group of some ops."""
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
            f"no scheduler accepts the kernel that computes {outputs} "
            f"(user code at {ops[-1].where or 'unknown'}):\n"
            f"{extract(self.fusion, ops, group.inputs, group.outputs).print_math()}"
        )

    def _in_order(self, group: SegmentGroup) -> tuple[TensorOp, ...]:
        return tuple(sorted(group.ops, key=self.position.__getitem__))

    # ------------------------------------------------------------ order
    def _order(self, groups: list[SegmentGroup]) -> list[Segment]:
        """Returns segments in run order: as early as their inputs allow, in program order."""
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
        ready: set[TensorView] = {v for v in self.fusion.inputs if isinstance(v, TensorView)}
        ordered: list[Segment] = []
        waiting = [s for _, s in steps]
        while waiting:
            nxt = next(
                s for s in waiting if all(v in ready for v in s.inputs if isinstance(v, TensorView))
            )
            waiting.remove(nxt)
            ready.update(nxt.outputs)
            ordered.append(replace(nxt, number=len(ordered)))
        return ordered


def _below(exprs: Iterable[TensorOp], tensors: Iterable[TensorView]) -> set[TensorView]:
    """Returns tensors, and what ops, in order, compute from them."""
    found = {*tensors}
    for op in exprs:
        if any(v in found for v in op.inputs):
            found.update(op.outputs)
    return found


def _is_boundary(op: TensorOp) -> bool:
    """Whether the user put a border between two kernels here (`ops.segment_set`)."""
    return isinstance(op, nodes.LoadStoreOp) and op.kind is LoadStoreOpType.segmenter_set


def extract(
    fusion: Fusion,
    ops: Sequence[TensorOp],
    inputs: Sequence[TensorView],
    outputs: Sequence[TensorView],
) -> Fusion:
    """Returns a fusion of its own for some ops; numbers, extents and sharding are kept.

    Inputs forget how they were made: their logical axes become the roots, reductions are dropped.
    Scalar inputs of the whole fusion that the ops use become inputs too.
    """
    part, mapping = fusion.copy(ops)
    part.origins = ()
    used = {s for e in ops for v in e.inputs if isinstance(v, Scalar) for s in sc.symbols(v)}
    scalars = [v for v in fusion.inputs if isinstance(v, Scalar) and v in used]
    part.inputs = [*(mapping[t] for t in inputs), *scalars]
    part.outputs = [mapping[t] for t in dict.fromkeys(outputs)]
    for t in inputs:
        twin = mapping[t]
        twin.domain = as_input_domain(twin.domain)
        twin.memory = MemoryType.global_
    for t in part.outputs:
        t.memory = MemoryType.global_
    held = {*part.inputs, *part.outputs}
    for t in mapping.values():
        # No memory holds the others, which have no order in it: devices' cuts aside.
        order = t.domain.allocation_numbers
        if order and t not in held and {*order} <= {*t.domain.logical_numbers}:
            t.domain = _once(t.domain, TensorDomain.in_logical_order)
    return part


def as_input_domain(domain: TensorDomain) -> TensorDomain:
    """Returns the domain of a tensor that a segment reads: no root, no reductions, no rf marks."""
    return _once(domain, _read)


def _read(domain: TensorDomain) -> TensorDomain:
    made = domain.without_root()
    return made.with_axes(*(replace(a, rfactor=False) for a in made.axes.values() if a.rfactor))


def _once(domain: TensorDomain, change: Callable[[TensorDomain], TensorDomain]) -> TensorDomain:
    """Returns a changed domain, the same object whenever it is asked for."""
    if change not in domain.known:
        domain.known[change] = change(domain)
    return domain.known[change]


# ----------------------------------------------------------------------
# Sums over rows in two steps: the sums of some rows each (*parts*), then the sum of the parts.
#
#     total [r rows, n]   ->   parts [r rows/264, i 264, n];  total [r 264, n] = sum(parts)
#
# A kernel that goes over whole rows can make parts on its way, which is what the backward of a norm
# needs: gradients of its input, row by row, and of its weights, over all rows.


@record
class RowParts:
    """A reduction that makes parts: how many, which of its axes counts them, and which is left to
    reduce."""

    count: int
    part: int
    rest: int


def row_parts(op: TensorOp) -> RowParts | None:
    """Returns how an op makes parts of sums over rows, None for any other op."""
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
    """Whether a reduction can be split: it has one result, whose order in memory is not declared,
    and whose axes no devices share."""
    op, domain = total.definition(), total.domain
    is_plain = domain.loop_numbers == domain.logical_numbers and not domain.allocation
    is_serial = all(a.ptype is ParallelType.serial for a in domain.loop)
    return isinstance(op, ReductionOp) and is_plain and is_serial


def split_rows(total: TensorView, count: int) -> TensorView:
    """Makes a reduction the sum of `count` parts, and returns these.

    The reduced axes count as one, in their order; part k has rows k, k + count, and so on.
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
