"""What the lowering functions of one kernel share: nesting, indexer, and what is assumed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from fuser.ir.domain.axis_path import partial_splits, transforms_between
from fuser.ir.domain.tensor_domain import Shift, SplitTransform, Transform, shifts_of, splits_of
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar, Symbol
from fuser.ir.tensor import TensorView
from fuser.lower.index import Indexer
from fuser.lower.kernel_ir import DrawTicket, Workspace
from fuser.lower.loop_tree import Nesting, Stage


class NewAssumptionError(Exception):
    """Lowering learned something that earlier decisions lacked; the pipeline starts again."""


@dataclass
class Assumptions:
    """What a kernel assumes; grows monotonically between attempts.

    `divisible` sizes and strides are multiples of a number, which a guard checks at launch;
    `recomputed` tensors get no storage because a reader needs other elements than it would hold.
    """

    divisible: dict[Symbol, int] = field(default_factory=dict[Symbol, int])
    recomputed: dict[TensorView, None] = field(default_factory=dict[TensorView, None])

    def assume_divisible(self, symbol: Symbol, by: int) -> None:
        """Assume that a size or stride is a multiple of `by`; raises `NewAssumptionError`."""
        # A quotient stands for its size: i2_div4 being even means that i2 is a multiple of 8.
        for size, divisor in self.divisible.items():
            if quotient_symbol(size, divisor) == symbol:
                symbol, by = size, divisor * by
                break
        self.divisible[symbol] = math.lcm(self.divisible.get(symbol, 1), by)
        raise NewAssumptionError

    def recompute(self, tv: TensorView) -> None:
        """Take the storage of a local tensor away; raises `NewAssumptionError`."""
        self.recomputed[tv] = None
        raise NewAssumptionError

    def quotients(self) -> dict[Scalar, Scalar]:
        """Return the replacement of each divisible symbol: the divisor times a quotient symbol."""
        return {s: sc.mul(by, quotient_symbol(s, by)) for s, by in self.divisible.items()}

    def guards(self) -> list[Scalar]:
        return [sc.eq(sc.mod(s, by), 0) for s, by in self.divisible.items()]


def quotient_symbol(symbol: Symbol, by: int) -> Symbol:
    return sc.name_for(f"{symbol.name}_div{by}", sc.ceildiv(symbol, by))


@dataclass
class Context:
    """One attempt at lowering a kernel."""

    nesting: Nesting
    assumptions: Assumptions
    indexer: Indexer
    is_cpu: bool
    guards: dict[Scalar, None] = field(default_factory=dict[Scalar, None])
    alignments: dict[TensorView, int] = field(default_factory=dict[TensorView, int])
    workspaces: list[Workspace] = field(default_factory=list[Workspace])
    reduction_bytes: Scalar = sc.ZERO
    # What grid reductions over the same axes draw together, by these axes.
    tickets: dict[tuple[bool, bool, bool], DrawTicket] = field(
        default_factory=dict[tuple[bool, bool, bool], DrawTicket]
    )
    # The flag of each finished grid reduction; reductions combined together have one.
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
                self._require_whole_words(stage)

    def may_be_partial(self, stage: Stage) -> bool:
        """Whether some vectors of a stage are tested, and go element by element where not all of
        their elements exist: those at the ends of shifted rows, or of a tensor."""
        is_tested = self.nesting.fusion.has_tails or bool(self.shifts(stage.tv))
        return stage.vector is not None and is_tested

    def _require_whole_words(self, stage: Stage) -> None:
        """A vector never runs past the end: its split is divisible, or guarded to be; or it is
        tested."""
        if self.may_be_partial(stage):
            return
        innermost = stage.axes[-1].number
        for split in partial_splits(stage.tv.domain, self.indexer.loop_transforms(stage.tv)):
            if innermost in split.outputs:
                size = self.size(stage.tv, split.inp)
                self._whole.add((size, split.factor))
                self.guards[sc.eq(sc.mod(size, split.factor), 0)] = None

    def simplify(self, x: Scalar) -> Scalar:
        """Rewrite over the quotients of divisible sizes."""
        return sc.substitute(x, self._replacements) if self._replacements else x

    def size(self, tv: TensorView, number: int) -> Scalar:
        """Return the size of an axis of `tv`, over class representatives."""
        return self.nesting.fusion.canonical(tv.domain.axes[number].size)

    def shifts(self, tv: TensorView) -> list[Shift]:
        return shifts_of(self.indexer.loop_transforms(tv))

    def _is_whole(self, size: Scalar, factor: Scalar) -> bool:
        """Whether a size is known to be a multiple of a factor."""
        if (size, factor) in self._whole:
            return True
        by = self.assumptions.divisible.get(size) if isinstance(size, Symbol) else None
        parts = sc.int_value(factor)
        return by is not None and parts is not None and by % parts == 0

    def partial_splits(self, tv: TensorView, *, of_operand: bool = False) -> list[SplitTransform]:
        """Return the splits whose last part may be incomplete: of tv's own axes, or of those of the
        operand, which a reduction in parts has split before."""
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
    """Leave out the tests of split blocks whose elements are tested: x = block * factor + inner
    below the extent implies that the block is below the number of blocks. Of a shifted axis the
    elements are tested in any case."""
    implied = {t.out for t in shifts_of(transforms)}
    kept: list[SplitTransform] = []
    for t in splits_of(transforms).values():
        is_implied = t.inp in implied
        if t in tested and not is_implied:
            kept.append(t)
        if t.inner_split and (is_implied or t in tested):
            implied.add(t.outer)
    return kept
