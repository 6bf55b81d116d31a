"""Axis: the user's handle on one axis of one tensor, and on the transforms between axes.

It names (tensor, number) and reads the present state, so `a = tv.axis(0); a.parallelize(p)` is seen
by `a` afterwards. Exported as `fuser.IterDomain`, nvFuser's name for what `tv.axis` returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuser.ir.domain import tensor_domain
from fuser.ir.domain.tensor_domain import IterDomain, transform_text
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.statement import Expr, Val, numbered
from fuser.ir.types import IterType, ParallelType
from fuser.support.arguments import checked
from fuser.support.errors import DefinitionError, user_code, user_line

if TYPE_CHECKING:
    from fuser.ir.tensor import TensorView


class Axis(Val):
    """Axis `number` of a tensor; made by `TensorView.axis` and the `get_*_domain` methods.

    Raises `DefinitionError` on use when scheduling has taken the axis out of the tensor.
    """

    __slots__ = ("number", "tensor")

    def __init__(self, tensor: TensorView, number: int) -> None:
        self.tensor = tensor
        self.number = number

    @property
    def state(self) -> IterDomain:
        """The present state of the axis."""
        found = self.tensor.domain.axes.get(self.number)
        if found is None:
            raise DefinitionError(f"axis {self.number} is no longer an axis of {self.tensor}")
        return found

    @property
    def kind(self) -> IterType:
        return self.state.kind

    def extent(self) -> Scalar:
        """Return the number of positions, as nvFuser spells it; 1 for a broadcast."""
        return self.state.extent

    @property
    def expanded(self) -> Scalar | None:
        return self.state.expanded

    @property
    def size(self) -> Scalar:
        """The apparent size: the expanded extent of an expanded broadcast, else the extent."""
        return self.state.size

    @property
    def ptype(self) -> ParallelType:
        return self.state.ptype

    @property
    def rfactor(self) -> bool:
        return self.state.rfactor

    @property
    def is_broadcast(self) -> bool:
        return self.state.is_broadcast

    @property
    def is_device(self) -> bool:
        return self.state.is_device

    @property
    def is_stream(self) -> bool:
        return self.state.is_stream

    def is_reduction(self) -> bool:
        return self.state.is_reduction()

    # ------------------------------------------------------------ nvFuser's `Val` queries
    def is_tensor(self) -> bool:
        return False

    def is_symbolic(self) -> bool:
        return True

    def definition(self) -> AxisTransform | None:
        """Return the transform that made the axis, None for one that none has made."""
        found = (t for t in self.tensor.domain.transforms if self.number in t.outputs)
        return next((axis_transform(self.tensor, t) for t in found), None)

    def uses(self) -> list[AxisTransform]:
        """Return the transforms that derive other axes from this one."""
        found = (t for t in self.tensor.domain.transforms if self.number in t.inputs)
        return [axis_transform(self.tensor, t) for t in found]

    @checked
    def parallelize(self, parallel_type: ParallelType) -> None:
        """Give the axis a parallel type (device and stream types fit any axis).

        Raises `DefinitionError` when unroll, vectorize or group meet a symbolic extent, and for the
        parts of a merged stream axis, which the compiler names.
        """
        if parallel_type.is_stream and parallel_type is not ParallelType.stream:
            raise DefinitionError(
                f"{parallel_type.name} of {self} of {self.tensor}: merge the axes, and put the "
                f"merged one on ParallelType.stream{user_code(user_line())}"
            )
        is_cut = parallel_type.is_device or parallel_type is ParallelType.stream
        if is_cut:
            self.tensor.fusion.require_open(f"parallelize of {self} of {self.tensor}")
        self.tensor.parallelize_axis(self, parallel_type)
        if is_cut:
            lines = self.tensor.cut_lines
            self.tensor.cut_lines = {**lines, parallel_type: user_line()}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Axis):
            return NotImplemented
        return self.tensor is other.tensor and self.number == other.number

    def __hash__(self) -> int:
        return hash((id(self.tensor), self.number))

    def __str__(self) -> str:
        return str(self.state)

    def __repr__(self) -> str:
        return f"<axis {self} of {self.tensor.label}>"


class AxisTransform(Expr):
    """What derives axes of a tensor from others; made by `Axis.definition` and `Axis.uses`."""

    __slots__ = ("_tensor", "_transform")

    def __init__(self, tensor: TensorView, transform: tensor_domain.Transform) -> None:
        self._tensor, self._transform = tensor, transform

    def input(self, index: int) -> Axis:
        """Return axis `index` of those that it reads; raises `NoOperandError`."""
        return Axis(self._tensor, numbered("input", self, self._transform.inputs, index))

    def output(self, index: int) -> Axis:
        """Return axis `index` of those that it makes; raises `NoOperandError`."""
        return Axis(self._tensor, numbered("output", self, self._transform.outputs, index))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AxisTransform):
            return NotImplemented
        return self._tensor is other._tensor and self._transform == other._transform

    def __hash__(self) -> int:
        return hash((id(self._tensor), self._transform))

    def __str__(self) -> str:
        return transform_text(self._transform, self._tensor.domain) + "\n"

    def __repr__(self) -> str:
        return f"<{str(self).strip()}>"


class Split(AxisTransform):
    """One axis becomes an outer and an inner one."""

    __slots__ = ()

    def outer(self) -> Axis:
        return self.output(0)

    def inner(self) -> Axis:
        return self.output(1)


class Merge(AxisTransform):
    """An outer and an inner axis become one."""

    __slots__ = ()

    def outer(self) -> Axis:
        return self.input(0)

    def inner(self) -> Axis:
        return self.input(1)


# Transforms without a row are of the common class.
_HANDLES: dict[type, type[AxisTransform]] = {
    tensor_domain.SplitTransform: Split,
    tensor_domain.MergeTransform: Merge,
}


def axis_transform(tensor: TensorView, transform: tensor_domain.Transform) -> AxisTransform:
    """Return the user's handle on a transform of a tensor's axes."""
    return _HANDLES.get(type(transform), AxisTransform)(tensor, transform)
