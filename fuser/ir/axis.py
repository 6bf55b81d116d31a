"""Axis: the user's handle on one axis of one tensor.

It names (tensor, number) and reads the present state, so `a = tv.axis(0); a.parallelize(p)` is seen
by `a` afterwards. Exported as `fuser.IterDomain`, nvFuser's name for what `tv.axis` returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuser.arguments import checked
from fuser.errors import DefinitionError, user_code, user_line
from fuser.ir.domain import IterDomain
from fuser.ir.scalar import Scalar
from fuser.ir.types import IterType, ParallelType

if TYPE_CHECKING:
    from fuser.ir.tensor import TensorView


class Axis:
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

    @property
    def extent(self) -> Scalar:
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
        self.tensor.parallelize_axis(self, parallel_type)
        if parallel_type.is_device or parallel_type is ParallelType.stream:
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
