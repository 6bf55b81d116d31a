"""Inputs of a program: kinds, dtypes, devices and layouts are checked, and symbols are bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fuser.ir.binding import Argument, Binder, Values, tensor_problem
from fuser.ir.dtypes import category, dtype_text, misfit, to_torch, torch_dtype_text
from fuser.ir.fusion import Fusion, Value
from fuser.ir.memory_layout import MemoryOrder, expanded_positions, memory_order
from fuser.ir.scalar.constructors import Const, Scalar, Symbol
from fuser.ir.tensor import TensorView
from fuser.support.arguments import show
from fuser.support.errors import InputError, user_code
from fuser.support.inputs import check_count
from hostir.ir.shard_layout import parts
from hostir.runtime.overlap import overlaps_itself

_ACCEPTS: dict[str, tuple[type, ...]] = {
    "bool": (bool, int),
    "int": (bool, int),
    "float": (bool, int, float),
    "complex": (bool, int, float, complex),
}


@dataclass(frozen=True)
class _TensorSpec:
    """What an input tensor must look like."""

    index: int
    tv: TensorView
    dtype: torch.dtype
    order: MemoryOrder
    # The axes along which it is one element.
    expanded: tuple[int, ...]
    # Whether memory has all axes in their own order.
    is_in_order: bool

    def refuses(self, text: str, *, head: str = "") -> InputError:
        """Return the error about what this input was expected to be."""
        line = user_code(self.tv.user_line())
        return InputError(f"{head}Expected input {self.index}, {self.tv}, {text}{line}")


def spec_of(index: int, tv: TensorView) -> _TensorSpec:
    """Return what input number `index` must look like."""
    order = memory_order(tv)
    expanded = expanded_positions(tv)
    is_in_order = not expanded and all(p == i for i, (p, _) in enumerate(order))
    return _TensorSpec(index, tv, to_torch(tv.dtype()), order, expanded, is_in_order)


class InputBinder:
    """Checks the inputs of one program and gives its symbols their values."""

    def __init__(self, values: Fusion) -> None:
        self._specs: list[_TensorSpec | Scalar] = [
            spec_of(i, v) if isinstance(v, TensorView) else v for i, v in enumerate(values.inputs)
        ]
        self._declared = values.inputs
        # Then every symbol stands for an extent.
        self.has_only_tensors = all(isinstance(v, TensorView) for v in values.inputs)
        self._updated = {a.into: a.out for a in values.aliases}
        self._binder = Binder(values, blocks=parts)

    def bind(self, inputs: Sequence[Argument], device: torch.device) -> Values:
        """Return the value of every symbol.

        Raises `InputError` naming the input (and the tensor that bound a symbol first), or
        `ShardingError` when an extent does not fit the mesh.
        """
        check_count(len(inputs), self._declared)
        for i, (spec, value) in enumerate(zip(self._specs, inputs, strict=True)):
            if isinstance(spec, _TensorSpec):
                check_tensor(spec, value, device)
            else:
                check_scalar(i, spec, value)
        values = self._binder.bind(inputs)
        for spec, value in zip(self._specs, inputs, strict=True):
            if isinstance(spec, _TensorSpec) and isinstance(value, torch.Tensor):
                _check_layout(spec, value)
                if spec.tv in self._updated and overlaps_itself(value):
                    raise spec.refuses(
                        f"into which {self._updated[spec.tv]} is written, to have a "
                        f"place for every element, but got shape {tuple(value.shape)} with strides "
                        f"{value.stride()}"
                    )
        return values

    def values(self, inputs: Sequence[Argument]) -> Values:
        """Return what `bind` does, for inputs that another binder of the definition has checked."""
        return self._binder.bind(inputs)


def check_tensor(spec: _TensorSpec, value: Argument, device: torch.device) -> None:
    """Raise `InputError` for what is no tensor of this rank and dtype on the device where the
    program runs, or on the host for a CPU scalar."""
    if not isinstance(value, torch.Tensor):
        raise spec.refuses(f"to be an at::Tensor but got scalar {show(value)}")
    problem = tensor_problem(value)
    if problem:
        raise spec.refuses(f"to be a plain tensor, but it is {problem}")
    tv = spec.tv
    if value.dim() != tv.ndim:
        raise spec.refuses(
            f"to be bound to a tensor of rank {tv.ndim}, but got a tensor of rank {value.dim()}"
        )
    if value.dtype != spec.dtype:
        raise spec.refuses(
            f"to be bound to a tensor of dtype {dtype_text(tv.dtype())}, but got a "
            f"tensor of dtype {torch_dtype_text(value.dtype)}"
        )
    wanted = torch.device("cpu") if tv.is_cpu_scalar else device
    if value.device != wanted:
        raise spec.refuses(
            f"to be bound to a tensor on device {wanted}, but got a tensor on device {value.device}"
        )


def _check_layout(spec: _TensorSpec, value: torch.Tensor) -> None:
    """Check every contiguity flag of the allocation domain against the strides."""
    if spec.is_in_order and value.is_contiguous():
        return
    if value.numel() == 0:
        return
    for position in spec.expanded:
        if value.size(position) > 1 and value.stride(position):
            raise spec.refuses(
                f"which is expanded, to have stride 0 at axis {position}, but got shape "
                f"{tuple(value.shape)} with strides {value.stride()}",
                head="Stride mismatch with contiguity info. ",
            )
    misplaced = misplaced_axis(spec.order, value)
    if misplaced is not None:
        position, expected = misplaced
        raise spec.refuses(
            f"to have stride {expected} at axis {position}, but got shape "
            f"{tuple(value.shape)} with strides {value.stride()}; declare the axis "
            "non-contiguous to pass such a tensor",
            head="Stride mismatch with contiguity info. ",
        )


def misplaced_axis(order: MemoryOrder, value: torch.Tensor) -> tuple[int, int] | None:
    """Returns the innermost axis that is declared contiguous and is not, and the stride that it
    would have; None where a tensor lies in memory as declared."""
    expected = 1
    for position, flag in reversed(order):
        size, stride = value.size(position), value.stride(position)
        if flag is None:
            continue
        if flag and size > 1 and stride != expected:
            return position, expected
        expected = size * (stride if size > 1 else expected)
    return None


def check_scalar(index: int, spec: Scalar, value: Argument) -> None:
    """Raise `InputError` for what is no number, or none of the dtype of this scalar input."""
    if isinstance(value, torch.Tensor):
        raise InputError(
            f"Expected input {index}, {spec}, to be a scalar but got "
            f"{torch_dtype_text(value.dtype)} tensor of rank {value.dim()}"
        )
    if not isinstance(value, _ACCEPTS[category(spec.dtype)]):  # pyright: ignore[reportUnnecessaryIsInstance]
        shown = f"({value.real:g},{value.imag:g})" if isinstance(value, complex) else value
        raise InputError(
            f"Input {index}, {spec}: Scalar value {shown} is not compatible with the expected data "
            f"type: {dtype_text(spec.dtype)}."
        )
    problem = misfit(value, spec.dtype)
    if problem:
        raise InputError(f"Expected input {index}, {spec}, to fit its dtype, but {problem}")


def is_computed(tv: TensorView) -> bool:
    """Whether a mesh or a formula decides some extent, rather than the inputs alone."""
    is_given = all(isinstance(x, Symbol | Const) for x in tv.shape())
    return not is_given or any(n > 1 for n in parts(tv))


def device_of(declared: Sequence[Value], inputs: Sequence[Argument]) -> torch.device:
    """Return the device of the first tensor (CPU scalars aside), else torch's default."""
    for value, given in zip(declared, inputs, strict=False):
        is_scalar = isinstance(value, TensorView) and value.is_cpu_scalar
        if isinstance(given, torch.Tensor) and not is_scalar:
            return given.device
    return torch.get_default_device()
