"""Indices: from the loops of a stage to its logical axes, through ops to operands, to addresses.

Everything is pulled from the reader: a stage's loop symbols give its logical indices, an op's axis
map gives those of its operands, and so on up to a tensor with storage.
"""

from __future__ import annotations

from collections.abc import Mapping

from fuser.ir.domain.axis_path import indices_backward, indices_forward, transforms_between
from fuser.ir.domain.tensor_domain import IterDomain, Transform, numbers
from fuser.ir.fusion import Fusion, TensorOp
from fuser.ir.memory_layout import memory_strides
from fuser.ir.ops.resizing import PadOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.tensor import TensorView
from fuser.lower.kernel_ir import stride_symbol
from fuser.lower.loop_tree import Nesting, NoNestError, Stage
from fuser.support.errors import UnsupportedError

Index = tuple[Scalar, ...]


class Indexer:
    """Index queries on one nesting; caches what depends only on a tensor."""

    def __init__(self, nesting: Nesting) -> None:
        self.nesting = nesting
        self.fusion: Fusion = nesting.fusion
        self._stage_axes: dict[Stage, dict[int, Scalar]] = {}
        self._strides: dict[TensorView, tuple[tuple[IterDomain, Scalar], ...]] = {}
        self._root_transforms: dict[TensorView, tuple[Transform, ...]] = {}
        self._loop_transforms: dict[TensorView, tuple[Transform, ...]] = {}

    # ------------------------------------------------------------ stages
    def stage_axes(self, stage: Stage) -> Mapping[int, Scalar]:
        """Return the index of every axis of the stage's tensor (loop, logical, root)."""
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
        """Return the logical index (without reduction axes) that a stage writes."""
        known = self.stage_axes(stage)
        return tuple(known[a.number] for a in stage.tv.domain.no_reductions)

    def _promoted_axes(self, stage: Stage, reader: Stage) -> dict[int, Scalar]:
        """Index a broadcast through the reader whose loops it runs in."""
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
        """Return the index at which `op` reads `wanted`, directly or through inlined tensors."""
        for position, value in enumerate(op.inputs):
            if not isinstance(value, TensorView):
                continue
            index = self.operand_index(op, position, out, axes)
            if isinstance(op, PadOp) and position == 0 and self._reaches(value, wanted):
                # The reader's iterations go beyond this operand: its loops cannot be copied.
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
        """Whether `tv` is `wanted` or is computed from it without storage between them."""
        if tv is wanted:
            return True
        stage = self.nesting.stage_of.get(tv)
        op = self.fusion.definition(tv)
        if op is None or (stage is not None and stage.storage != "global"):
            return False
        return any(isinstance(v, TensorView) and self._reaches(v, wanted) for v in op.inputs)

    # ------------------------------------------------------------ tensors and ops
    def tensor_axes(self, tv: TensorView, index: Index) -> Mapping[int, Scalar]:
        """Return the index of logical and root axes, given the logical index."""
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
        """Return the logical index at which `op` reads its operand, given `out`'s root indices."""
        producer = op.inputs[position]
        sources = producer.domain.no_reductions
        index: list[Scalar] = [sc.ZERO] * len(sources)
        roots = out.domain.maybe_root
        for target, source in zip(roots, op.axis_map(position), strict=True):
            if source is not None and not sources[source].is_broadcast:
                index[source] = axes[target.number]
        return tuple(index)

    def loop_transforms(self, tv: TensorView) -> tuple[Transform, ...]:
        """Return the transforms from logical to loop."""
        found = self._loop_transforms.get(tv)
        if found is None:
            found = transforms_between(tv.domain, tv.domain.logical, tv.domain.loop)
            self._loop_transforms[tv] = found
        return found

    def forward(self, tv: TensorView, index: Index) -> Mapping[int, Scalar]:
        """Return the index of every axis derived from the logical ones."""
        known = {a.number: i for a, i in zip(tv.domain.no_reductions, index, strict=True)}
        return indices_forward(tv.domain, known)

    # ------------------------------------------------------------ addresses
    def strides(self, tv: TensorView) -> tuple[tuple[IterDomain, Scalar], ...]:
        """Return (allocation axis, stride in elements) of a global tensor; see `memory_strides`.
        The stride of an axis that is not contiguous is a parameter."""
        found = self._strides.get(tv)
        if found is None:
            found = self._strides[tv] = self._find_strides(tv)
        return found

    def _find_strides(self, tv: TensorView) -> tuple[tuple[IterDomain, Scalar], ...]:
        logical = numbers(tv.domain.no_reductions)

        def gap(axis: IterDomain) -> Scalar:
            if axis.number not in logical:
                raise UnsupportedError(f"{tv}: strided allocation axis {axis} is not logical")
            return stride_symbol(tv, logical.index(axis.number))

        return memory_strides(tv, lambda a: self.fusion.canonical(a.size), gap)

    def offset(self, tv: TensorView, index: Index) -> Scalar:
        """Return the element offset of a logical index in a global tensor."""
        known: Mapping[int, Scalar]
        if tv.domain.allocation:
            known = self.forward(tv, index)
        else:
            known = {a.number: i for a, i in zip(tv.domain.no_reductions, index, strict=True)}
        total: Scalar = sc.ZERO
        for axis, stride in self.strides(tv):
            if axis.number not in known:
                raise UnsupportedError(f"{tv}: allocation axis {axis} is not derived from logical")
            total = sc.add(total, sc.mul(known[axis.number], stride))
        return total
