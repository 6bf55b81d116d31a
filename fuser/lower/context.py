"""The state that the lowering functions of one kernel share: loop nests, assumptions, tensor
indices and predicates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fuser.ir.domain.axis_path import (
    indices_backward,
    indices_forward,
    partial_splits,
    transforms_between,
)
from fuser.ir.domain.tensor_domain import (
    IterDomain,
    Shift,
    SplitTransform,
    Transform,
    numbers,
    shifts_of,
    splits_of,
)
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.memory_layout import memory_strides
from fuser.ir.ops.nodes import PadOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar, Symbol
from fuser.ir.types import BLOCK_TYPES, GRID_TYPES, ParallelType
from fuser.lower.kernel_ir import DrawTicket, Workspace, stride_symbol
from fuser.lower.loop_tree import COORDINATES, Loop, Nesting, NoNestError, Stage
from fuser.support.errors import UnsupportedError
from fuser.support.record import record


class NewAssumptionError(Exception):
    """Raised when lowering adds an assumption, such as "this size is a multiple of 4".

    Statements that lowering has already built do not use the new assumption. The caller therefore
    lowers the fusion again from the start, with the larger set of assumptions.
    """


@dataclass
class Assumptions:
    """The facts that lowering assumes about sizes and storage. Each attempt to lower a kernel may
    add some, and none is removed.

    - `divisible`: sizes and strides, each with a number that divides it. A guard checks this at
      launch.
    - `recomputed`: local tensors that are not stored. Each reader computes these tensors again,
      because it needs elements that its own thread would not store.
    """

    divisible: dict[Symbol, int] = field(default_factory=dict[Symbol, int])
    recomputed: dict[TensorView, None] = field(default_factory=dict[TensorView, None])

    def assume_divisible(self, symbol: Symbol, by: int) -> None:
        """Assumes that the size or stride `symbol` is a multiple of `by`.

        Raises:
            NewAssumptionError: always, so that lowering restarts.
        """
        # For a quotient symbol, extend its size's divisor: if i2_div4 is even, i2 is a multiple of
        # 8.
        for size, divisor in self.divisible.items():
            if quotient_symbol(size, divisor) == symbol:
                symbol, by = size, divisor * by
                break
        self.divisible[symbol] = math.lcm(self.divisible.get(symbol, 1), by)
        raise NewAssumptionError

    def recompute(self, tv: TensorView) -> None:
        """Assumes that `tv` is not stored, so that each op that reads `tv` computes it again.

        Raises:
            NewAssumptionError: always, so that lowering restarts.
        """
        self.recomputed[tv] = None
        raise NewAssumptionError

    def quotients(self) -> dict[Scalar, Scalar]:
        """Returns the substitutes for sizes that are assumed to be multiples of a number.

        For a size `i2` that is a multiple of 4, the substitute is `4 * i2_div4`, with a symbol for
        the quotient. Divisions of the size by 4 then simplify to the symbol.
        """
        return {s: sc.mul(by, quotient_symbol(s, by)) for s, by in self.divisible.items()}

    def guards(self) -> list[Scalar]:
        """Returns the conditions that a launch must satisfy: each size or stride in `divisible` is
        a multiple of the number that `divisible` has for it.
        """
        return [sc.eq(sc.mod(s, by), 0) for s, by in self.divisible.items()]


def quotient_symbol(symbol: Symbol, by: int) -> Symbol:
    """Returns the symbol that stands for the quotient `symbol / by`, such as `i2_div4`."""
    return sc.name_for(f"{symbol.name}_div{by}", sc.ceildiv(symbol, by))


@dataclass
class Context:
    """The state of one attempt to lower a kernel.

    - `guards`: conditions that must hold at a launch, in order of discovery.
    - `alignments`: for each tensor that is read or written by vectors, the number of bytes of which
      its address must be a multiple.
    - `reduction_bytes`: the bytes of shared memory that reductions over threads need.
    - `workspaces`: arrays in global memory in which CUDA blocks exchange partial results.
    """

    nesting: Nesting
    assumptions: Assumptions
    indexer: Indexer
    is_cpu: bool
    guards: dict[Scalar, None] = field(default_factory=dict[Scalar, None])
    alignments: dict[TensorView, int] = field(default_factory=dict[TensorView, int])
    workspaces: list[Workspace] = field(default_factory=list[Workspace])
    reduction_bytes: Scalar = sc.ZERO
    # The ticket that grid reductions over the same axes share, by the axes.
    tickets: dict[tuple[bool, bool, bool], DrawTicket] = field(
        default_factory=dict[tuple[bool, bool, bool], DrawTicket]
    )
    # The flag of each finished grid reduction. Reductions that are combined together share one.
    done_flags: dict[Stage, str] = field(default_factory=dict[Stage, str])
    _whole: set[tuple[Scalar, Scalar]] = field(default_factory=set[tuple[Scalar, Scalar]])
    _replacements: dict[Scalar, Scalar] = field(default_factory=dict[Scalar, Scalar])
    _partial: dict[tuple[TensorView, bool], list[SplitTransform]] = field(
        default_factory=dict[tuple[TensorView, bool], list[SplitTransform]]
    )

    def __post_init__(self) -> None:
        self._replacements = self.assumptions.quotients()
        for stage in self.nesting.stages:
            if stage.vector is not None:
                self._require_whole_vectors(stage)

    def may_be_partial(self, stage: Stage) -> bool:
        """Whether some vectors of a stage (op with a stored result) may cross the end of a row or
        of the tensor. A row has the elements along the vectorised axis, at fixed indices of all
        other axes.

        The kernel tests each vector of such a stage. If the vector crosses the end, those of its
        elements that are inside are processed one by one.
        """
        is_tested = self.nesting.fusion.has_tails or bool(self.shifts(stage.tv))
        return stage.vector is not None and is_tested

    def _require_whole_vectors(self, stage: Stage) -> None:
        """Adds guards (conditions on sizes that are checked before a launch): the size of the
        vectorised axis of a stage is a multiple of the vector's width. No vector then crosses the
        end of the axis.

        A stage is an op whose result is stored. No guard is added if the kernel itself tests the
        vectors of the stage (`may_be_partial`).
        """
        if self.may_be_partial(stage):
            return
        innermost = stage.axes[-1].number
        for split in partial_splits(stage.tv.domain, self.indexer.loop_transforms(stage.tv)):
            if innermost in split.outputs:
                size = self.size(stage.tv, split.inp)
                self._whole.add((size, split.factor))
                self.guards[sc.eq(sc.mod(size, split.factor), 0)] = None

    def simplify(self, x: Scalar) -> Scalar:
        """Returns `x` with each size that is assumed to be a multiple of a number replaced by this
        number times a symbol for the quotient.
        """
        return sc.substitute(x, self._replacements) if self._replacements else x

    def size(self, tv: TensorView, number: int) -> Scalar:
        """Returns the size of the axis of `tv` whose number (id) is `number`.

        If several size symbols are known to be equal, the result contains only one of them, so that
        equal sizes have equal expressions.
        """
        return self.nesting.fusion.canonical(tv.domain.axes[number].size)

    def shifts(self, tv: TensorView) -> list[Shift]:
        """Returns the shifts in the derivation of the loops of `tv` from the axes of `tv`. A
        derivation consists of splits, merges and shifts.

        A shift adds an offset to a loop's index, so that vectors begin at aligned addresses. The
        offset depends on the row, because a row of the tensor may begin at any address.
        """
        return shifts_of(self.indexer.loop_transforms(tv))

    def _is_whole(self, size: Scalar, factor: Scalar) -> bool:
        """Whether `size` is known to be a multiple of `factor`, so that a split of this size by
        `factor` has no incomplete part.

        It is known from a guard, which is a condition on sizes that each launch checks, or from an
        assumption of lowering (`Assumptions`).
        """
        if (size, factor) in self._whole:
            return True
        by = self.assumptions.divisible.get(size) if isinstance(size, Symbol) else None
        parts = sc.int_value(factor)
        return by is not None and parts is not None and by % parts == 0

    def partial_splits(self, tv: TensorView, *, of_operand: bool = False) -> list[SplitTransform]:
        """Returns the splits of axes of `tv` whose last part may be incomplete, because the factor
        may not divide the size of the axis. The kernel must test the index along each such axis.

        If `tv` is the result of a reduction, `of_operand` selects the splits of the axes that the
        reduction reads. These include the splits with which the schedule has divided one reduction
        into several (rfactor).
        """
        found = self._partial.get((tv, of_operand))
        if found is None:
            domain, transforms = tv.domain, self.indexer.loop_transforms(tv)
            if of_operand and domain.root:
                transforms = transforms_between(domain, domain.root, domain.loop)
            found = [
                s
                for s in partial_splits(domain, transforms)
                if not self._is_whole(self.size(tv, s.inp), s.factor)
            ]
            found = self._partial[tv, of_operand] = _without_implied(transforms, found)
        return found


def _without_implied(
    transforms: Sequence[Transform], tested: list[SplitTransform]
) -> list[SplitTransform]:
    """Returns the splits in `tested` that need a bounds check, because no other check implies it.
    `transforms` are all splits, merges and shifts of the tensor's axes.

    - A split writes an index x as block * factor + inner. The check that x is less than its extent
      implies that `block` is less than the number of blocks. A further split of `block` therefore
      needs no check.
    - A shift adds an offset to an index, so that vectors are aligned. The result is always tested,
      so a split of it needs no check either.
    """
    implied = {t.out for t in shifts_of(transforms)}
    kept: list[SplitTransform] = []
    for t in splits_of(transforms).values():
        is_implied = t.inp in implied
        if t in tested and not is_implied:
            kept.append(t)
        if t.inner_split and (is_implied or t in tested):
            implied.add(t.outer)
    return kept


# ----------------------------------------------------------------------
# Indices: from the loops of a stage to its logical axes, through ops to operands, to addresses.
#
# Indices are computed from the reader upwards. A stage's loop symbols determine its logical index.
# The axis map of its op determines the indices of its operands, and so on up to a tensor with
# storage.

Index = tuple[Scalar, ...]


class Indexer:
    """Computes, for the stages of one kernel, the index at which each tensor is read or written. A
    stage is an op whose result is stored.

    Results that depend on one tensor only are cached.
    """

    def __init__(self, nesting: Nesting) -> None:
        self.nesting = nesting
        self.fusion: Fusion = nesting.fusion
        self._stage_axes: dict[Stage, dict[int, Scalar]] = {}
        self._strides: dict[TensorView, tuple[tuple[IterDomain, Scalar], ...]] = {}
        self._root_transforms: dict[TensorView, tuple[Transform, ...]] = {}
        self._loop_transforms: dict[TensorView, tuple[Transform, ...]] = {}

    # ------------------------------------------------------------ stages
    def stage_axes(self, stage: Stage) -> Mapping[int, Scalar]:
        """Returns the index along every axis of the stage's tensor, as expressions of the loop
        indices. A stage is an op whose result is stored.

        The keys are axis numbers (ids), of the axes that the user sees and of all axes derived from
        them.
        """
        found = self._stage_axes.get(stage)
        if found is None:
            if stage.reference is not None:
                found = self._promoted_axes(stage, stage.reference)
            else:
                start: dict[int, Scalar] = {a.number: sc.ZERO for a in stage.axes}
                start.update({n: loop.symbol for n, loop in stage.axis_loops.items()})
                found = indices_backward(stage.tv.domain, start)
            self._stage_axes[stage] = found
        return found

    def stage_index(self, stage: Stage) -> Index:
        """Returns the index of the element that a stage writes in the current iteration: one entry
        per axis that the user sees, without reduction axes. A stage is an op whose result is
        stored.
        """
        known = self.stage_axes(stage)
        return tuple(known[a.number] for a in stage.tv.domain.no_reductions)

    def _promoted_axes(self, stage: Stage, reader: Stage) -> dict[int, Scalar]:
        """Returns the index along each axis of the broadcast tensor that `stage` computes in the
        loops of its reader.

        The axes of the tensor have size 1, but its loops have the extents of the reader's loops.
        The index along an axis therefore cannot be computed from the axis's own loop. It is the
        index at which `reader` reads the tensor, with the tensor's loops in place of those of
        `reader`.
        """
        renamed = {
            theirs.symbol: mine.symbol
            for theirs, mine in zip(reader.all_loops, stage.all_loops, strict=True)
        }
        axes = self.stage_axes(reader)
        index = self._find_operand(stage.tv, reader.op, reader.tv, axes)
        assert index is not None, f"{reader.tv} does not read {stage.tv}"
        return {
            a.number: sc.substitute(i, renamed)
            for a, i in zip(stage.tv.domain.no_reductions, index, strict=True)
        }

    def _find_operand(
        self, wanted: TensorView, op: TensorOp, out: TensorView, axes: Mapping[int, Scalar]
    ) -> Index | None:
        """Returns the index at which `op` reads the tensor `wanted`. Returns None if `op` does not
        read it.

        `op` may also read `wanted` through other tensors that are not stored. `axes` has the index
        along each axis of `out`, a result of `op`: the element that `op` computes.
        """
        for position, value in enumerate(op.inputs):
            if not isinstance(value, TensorView):
                continue
            index = self.operand_index(op, position, out, axes)
            if isinstance(op, PadOp) and position == 0 and self._reaches(value, wanted):
                # The reader iterates beyond this operand, so the operand cannot use its loops.
                raise NoNestError(wanted)
            if value is wanted:
                return index
            stage = self.nesting.stage_of.get(value)
            definition = self.fusion.definition(value)
            if definition is None or (stage is not None and stage.storage != "global"):
                continue
            found = self._find_operand(wanted, definition, value, self.tensor_axes(value, index))
            if found is not None:
                return found
        return None

    def _reaches(self, tv: TensorView, wanted: TensorView) -> bool:
        """Whether `tv` is `wanted`, or is computed from `wanted` through tensors that are not
        stored.
        """
        if tv is wanted:
            return True
        stage = self.nesting.stage_of.get(tv)
        op = self.fusion.definition(tv)
        if op is None or (stage is not None and stage.storage != "global"):
            return False
        return any(isinstance(v, TensorView) and self._reaches(v, wanted) for v in op.inputs)

    # ------------------------------------------------------------ tensors and ops
    def tensor_axes(self, tv: TensorView, index: Index) -> Mapping[int, Scalar]:
        """Returns the index along each axis of `tv` for one element, by axis number (id).

        `index` has one entry per axis that the user sees. The result also has the root axes, which
        are the axes before a reshape derived the visible ones.
        """
        domain = tv.domain
        known = {a.number: i for a, i in zip(domain.no_reductions, index, strict=True)}
        if not domain.root:
            return known
        transforms = self._root_transforms.get(tv)
        if transforms is None:
            transforms = transforms_between(domain, domain.root, domain.logical)
            self._root_transforms[tv] = transforms
        return indices_backward(domain, known, transforms)

    def operand_index(
        self, op: TensorOp, position: int, out: TensorView, axes: Mapping[int, Scalar]
    ) -> Index:
        """Returns the index at which `op` reads its operand number `position`.

        `out` is the result of `op`. `axes` has the element's index along the root axes of `out`,
        which are the axes that `op` itself computes, before a reshape derives others from them.
        """
        producer = op.inputs[position]
        sources = producer.domain.no_reductions
        index: list[Scalar] = [sc.ZERO] * len(sources)
        roots = out.domain.maybe_root
        for target, source in zip(roots, op.axis_map(position), strict=True):
            if source is not None and not sources[source].is_broadcast:
                index[source] = axes[target.number]
        return tuple(index)

    def loop_transforms(self, tv: TensorView) -> tuple[Transform, ...]:
        """Returns the splits, merges and shifts that derive the loops of `tv` from the axes that
        the user sees.
        """
        found = self._loop_transforms.get(tv)
        if found is None:
            found = transforms_between(tv.domain, tv.domain.logical, tv.domain.loop)
            self._loop_transforms[tv] = found
        return found

    def forward(self, tv: TensorView, index: Index) -> Mapping[int, Scalar]:
        """Returns the index of one element along the axes that the user sees, and along all axes
        derived from these by splits and merges.

        `index` is the element's index along the visible axes. The keys of the result are axis
        numbers (ids).
        """
        known = {a.number: i for a, i in zip(tv.domain.no_reductions, index, strict=True)}
        return indices_forward(tv.domain, known)

    # ------------------------------------------------------------ addresses
    def strides(self, tv: TensorView) -> tuple[tuple[IterDomain, Scalar], ...]:
        """Returns pairs (axis, stride in elements) for the axes in which a tensor in global memory
        is laid out.

        The stride of an axis that is not contiguous is a kernel parameter, because it is known only
        at launch.
        """
        found = self._strides.get(tv)
        if found is None:
            found = self._strides[tv] = self._find_strides(tv)
        return found

    def _find_strides(self, tv: TensorView) -> tuple[tuple[IterDomain, Scalar], ...]:
        logical = numbers(tv.domain.no_reductions)

        def gap(axis: IterDomain) -> Scalar:
            if axis.number not in logical:
                raise UnsupportedError(
                    f"{tv}: the allocation axis {axis} is neither contiguous nor a logical axis, "
                    "so its stride is unknown: declare the axis contiguous"
                )
            return stride_symbol(tv, logical.index(axis.number))

        return memory_strides(tv, lambda a: self.fusion.canonical(a.size), gap)

    def offset(self, tv: TensorView, index: Index) -> Scalar:
        """Returns the distance, in elements, from the first element of the tensor `tv` in global
        memory to the element at `index`.

        `index` has one entry per axis that the user sees.
        """
        known: Mapping[int, Scalar]
        if tv.domain.allocation:
            known = self.forward(tv, index)
        else:
            known = {a.number: i for a, i in zip(tv.domain.no_reductions, index, strict=True)}
        total: Scalar = sc.ZERO
        for axis, stride in self.strides(tv):
            if axis.number not in known:
                raise UnsupportedError(
                    f"{tv}: the allocation axis {axis} is not derived from the logical axes, so "
                    "its index cannot be computed: derive it by splits, merges and reorders"
                )
            total = sc.add(total, sc.mul(known[axis.number], stride))
        return total


# ----------------------------------------------------------------------
# Predicates: which iterations of a stage do work.
#
# A loop exceeds its axis only through a split that does not divide it. The index of the split axis
# is then compared with its extent. Merges need no test, so no predicate contains a division. Where
# a stage uses only some of the launch's threads or blocks, their coordinates are tested.

Lanes = Literal["all", "any", "each"]


@record
class Predicate:
    """The condition under which a statement runs.

    `cond` is a condition over indices. `flags` names C variables that must be true, too. Such a
    variable belongs to a reduction over CUDA blocks (a grid reduction), and is true in the block
    that has the result.
    """

    cond: Scalar
    flags: tuple[str, ...] = ()


def range_conditions(
    ctx: Context, stage: Stage, *, lanes: Lanes = "all", of_operand: bool = False
) -> list[Scalar]:
    """Returns the tests that keep the iterations of a stage inside the bounds of its tensor. A
    stage is an op whose result is stored.

    For a reduction, `of_operand` selects the bounds of the operand in place of those of the result.
    For a stage that processes vectors, `lanes` selects the elements that must be inside: all, at
    least one (any), or the current element (each).
    """
    begins: list[Scalar] = []
    if stage.reference is not None:
        renamed: dict[Scalar, Scalar] = {
            theirs.symbol: mine.symbol
            for theirs, mine in zip(stage.reference.all_loops, stage.all_loops, strict=True)
            if isinstance(theirs.symbol, Symbol)
        }
        conds = [sc.substitute(c, renamed) for c in range_conditions(ctx, stage.reference)]
    else:
        known = ctx.indexer.stage_axes(stage)
        conds = [
            sc.lt(
                ctx.simplify(known[split.inp]),
                ctx.simplify(ctx.size(stage.tv, split.inp)),
            )
            for split in ctx.partial_splits(stage.tv, of_operand=of_operand)
        ]
        for shift in ctx.shifts(stage.tv):
            index = ctx.simplify(known[shift.inp])
            begins.append(sc.le(0, index))
            conds.append(sc.lt(index, ctx.simplify(ctx.size(stage.tv, shift.inp))))
    if stage.vector is not None and lanes != "each":
        width = sc.int_value(stage.vector.extent)
        assert width is not None
        first: dict[Scalar, Scalar] = {stage.vector.symbol: sc.ZERO}
        last: dict[Scalar, Scalar] = {stage.vector.symbol: sc.const(width - 1)}
        # With lanes == "all", the first lane is tested against the begin and the last against the
        # end.
        begins = [sc.substitute(c, first) for c in begins] if lanes == "all" else []
        conds = [sc.substitute(c, last if lanes == "all" else first) for c in conds]
    return [*begins, *conds, *_partial_launch(ctx.nesting, stage.all_loops)]


def _partial_launch(nesting: Nesting, loops: list[Loop]) -> list[Scalar]:
    """Returns the tests that the current thread or CUDA block has work in each loop of `loops`.

    A launch may have more threads or blocks than a loop has iterations. The excess threads or
    blocks must do nothing in that loop.
    """
    conds: list[Scalar] = []
    for loop in loops:
        if loop.is_parallel and isinstance(loop.symbol, Symbol):
            conds.append(sc.lt(loop.symbol, loop.extent))
    return conds


def stage_predicate(ctx: Context, stage: Stage, *, lanes: Lanes = "all") -> Predicate:
    """Returns the condition under which the innermost statement of a stage runs.

    A stage is an op whose result is stored. For vectors, `lanes` selects the elements that must be
    inside the tensor: all, at least one (any), or the current element (each).
    """
    conds = range_conditions(ctx, stage, lanes=lanes, of_operand=stage.is_reduction)
    if stage.storage not in ("global", "shared"):
        return Predicate(sc.all_of(conds))
    return writer_predicate(ctx, stage, stage.all_loops, conds)


def writer_predicate(
    ctx: Context, stage: Stage, loops: list[Loop], conds: list[Scalar]
) -> Predicate:
    """Returns the predicate under which exactly one thread writes an element that several threads
    have computed. A stage is an op whose result is stored.

    - `loops`: the loops of the stage. If none of them is over a thread axis, such as x, all threads
      along x have the same element. Only thread 0 then writes. The same holds for axes of CUDA
      blocks.
    - `conds`: further conditions, which the result includes.

    After a reduction over CUDA blocks, only the block that has the result writes.
    """
    finished = _grid_reductions(ctx.nesting, stage)
    by_flag = {p for s in finished for p in grid_axes(s)}
    types = BLOCK_TYPES if stage.storage == "shared" else (*GRID_TYPES, *BLOCK_TYPES)
    used = {loop.ptype for loop in loops if isinstance(loop.symbol, Symbol)}
    extra: list[Scalar] = []
    for ptype in types:
        extent = ctx.nesting.extents.get(ptype, sc.ONE)
        if ptype in used or ptype in by_flag or sc.int_value(extent) == 1:
            continue
        extra.append(sc.eq(sc.index(COORDINATES[ptype], extent), 0))
    flags = tuple(dict.fromkeys(ctx.done_flags[s] for s in finished))
    if len(flags) > 1:
        names = " and ".join(str(s.tv) for s in finished)
        raise UnsupportedError(
            f"{stage.tv} needs the grid reductions {names}, but different CUDA blocks may complete "
            "these reductions, because their loops differ: schedule the reductions with equal loops"
        )
    return Predicate(sc.all_of([*conds, *extra]), flags)


def grid_axes(stage: Stage) -> tuple[ParallelType, ...]:
    """Returns the axes (as parallel types) along which a reduction combines CUDA blocks, if only
    one of these blocks receives the result.

    Returns an empty tuple for a cluster, because all blocks of a cluster receive the result.
    """
    if not stage.is_reduction or stage.tv.fusion.cluster > 1:
        return ()
    return tuple(
        loop.ptype
        for loop in stage.own_loops
        if loop.is_reduction and loop.ptype in GRID_TYPES and sc.int_value(loop.extent) != 1
    )


def _grid_reductions(nesting: Nesting, stage: Stage) -> list[Stage]:
    """Returns the reductions over CUDA blocks among `stage` and all stages on which `stage`
    depends. A stage is an op whose result is stored.
    """
    seen: dict[Stage, None] = {}

    def visit(s: Stage) -> None:
        if s in seen:
            return
        seen[s] = None
        for r in s.reads:
            visit(r)

    visit(stage)
    return [s for s in sorted(seen, key=lambda s: s.number) if grid_axes(s)]


def inside_pad(ctx: Context, op: PadOp, index: tuple[Scalar, ...]) -> Scalar:
    """Returns the condition that an element of a padded tensor comes from the pad's operand and is
    not padding.

    `index` is the element's index in the operand's coordinates: it is negative in the left padding.
    A pad with a negative width drops elements. Such a side needs no test, because every index is
    inside.
    """
    canonical, simplify = ctx.nesting.fusion.canonical, ctx.simplify
    conds: list[Scalar] = []
    sides = zip(op.inp.domain.no_reductions, index, op.left, op.right, strict=True)
    for axis, i, left, right in sides:
        i = simplify(i)
        if not _never_positive(left):
            conds.append(sc.le(0, i))
        if not _never_positive(right):
            conds.append(sc.lt(i, simplify(canonical(axis.size))))
    return sc.all_of(conds)


def _never_positive(x: Scalar) -> bool:
    value = sc.int_value(x)
    return value is not None and value <= 0
