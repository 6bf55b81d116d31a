"""The inputs of a run as a flat list, and the device on which the program runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from fuser.support.arguments import Mismatch, list_items, python_number, show
from fuser.support.errors import InputError, counted, user_code

# Limits that no real structure of inputs reaches. A list may contain itself.
_DEEPEST = 64
_MOST_INPUTS = 1 << 20
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, bool, int, float, complex))


def flatten(
    inputs: Iterable[object],
    depth: int = 0,
    *,
    first: int = 0,
    declared: Sequence[Any] = (),
) -> list[torch.Tensor | bool | int | float]:
    """Returns the tensors and numbers among `inputs` as one flat list.

    Nested lists and tuples are replaced by their items. `depth` is the depth of nesting so far.
    Error messages number the inputs from `first` and name them after `declared`, the inputs of the
    definition.

    Raises:
        InputError: a value is neither a tensor nor a number.
    """
    if type(inputs) in (list, tuple):
        for value in inputs:
            if type(value) not in _PLAIN:
                break
        else:
            return [*inputs]  # pyright: ignore[reportReturnType]
    if isinstance(inputs, torch.Tensor):
        raise InputError(
            "inputs must be a list of tensors and numbers, got a tensor: pass [tensor]"
        )
    if not isinstance(inputs, list | tuple):
        try:
            inputs = list_items(inputs, "tensors and numbers", longest=_MOST_INPUTS)
        except Mismatch as error:
            raise InputError(
                f"inputs must be a list of tensors and numbers: {error.text}"
            ) from None
    if depth > _DEEPEST:
        raise InputError(f"the lists of inputs are nested more than {_DEEPEST} levels deep")
    flat: list[torch.Tensor | bool | int | float] = []
    for value in inputs:
        if isinstance(value, list | tuple):
            here = first + len(flat)
            flat.extend(flatten(value, depth + 1, first=here, declared=declared))  # pyright: ignore[reportUnknownArgumentType]
        elif isinstance(value, torch.Tensor | bool | int | float | complex):
            # Complex numbers are not part of the type (`fuser.ir.scalar.scalar_nodes.Number`).
            flat.append(value)  # pyright: ignore[reportArgumentType]
        else:
            flat.append(_number_input(value, first + len(flat), declared))
    return flat


def _number_input(value: object, position: int, declared: Sequence[Any]) -> bool | int | float:
    """Converts an input that is a number of any library to a Python number.

    `position` is the index of the input, and `declared` has the inputs of the definition, for
    messages.

    Raises:
        InputError: the value is not a number.
    """
    number = python_number(value)
    if number is None:
        hint = ": pass torch.from_numpy(it)" if type(value).__module__ == "numpy" else ""
        name = f", {declared[position]}" if position < len(declared) else ""
        raise InputError(
            f"input {position}{name}: an input must be a tensor or a number, got "
            f"{type(value).__name__}{hint}{_line(declared[position:])}"
        )
    return number  # pyright: ignore[reportReturnType]


def torch_device(device: object) -> torch.device:
    """Returns the torch device for an argument that torch accepts, or for the index of a CUDA
    device.

    For "cuda", returns the current CUDA device, with its index.

    Raises:
        InputError: torch does not know the device.
    """
    # Torch stores the index in 8 bits, and wraps larger ones silently.
    if isinstance(device, int) and (isinstance(device, bool) or not 0 <= device < 128):
        raise InputError(f"device={show(device)} is not the index of a CUDA device (0 to 127)")
    try:
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)  # pyright: ignore[reportArgumentType, reportCallIssue]
    except (RuntimeError, TypeError) as error:
        raise InputError(f"device={show(device)}: {error}") from None
    except Exception:  # the repr of any other object may raise anything
        raise InputError(
            f"device={show(device)} is not a device: pass a torch.device, its name such as "
            "'cuda:0', or the index of a GPU"
        ) from None
    if found.type == "cuda" and found.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return found


def check_count(
    given: int, declared: Sequence[Any], lines: Mapping[Any, str] = MappingProxyType({})
) -> None:
    """Checks that a call passes as many inputs as the definition declares.

    `given` is the number of inputs that the call passes. The error names the first missing input.
    `lines` has the user's lines of scalar inputs.

    Raises:
        InputError: the numbers differ.
    """
    expected = len(declared)
    if given < expected:
        raise InputError(
            "KernelArgumentHolder contains less argument than kernel's input. "
            f"Expected {expected}, got {given}: {declared[given]} is missing"
            f"{_line(declared[given:], lines)}"
        )
    if given > expected:
        labels = ", ".join(getattr(value, "label", str(value)) for value in declared)
        raise InputError(
            f"Expected {counted(expected, 'input')}, got {given}: the definition has "
            f"{labels or 'none'}"
        )


def _line(values: Sequence[Any], lines: Mapping[Any, str] = MappingProxyType({})) -> str:
    """Returns the end of an error message: the user's source line of the first of `values`, inputs
    of a definition, or "" without a line.

    `lines` has the lines of scalar inputs.
    """
    value: Any = next(iter(values), None)
    is_tensor = hasattr(value, "user_line")
    return user_code(value.user_line() if is_tensor else lines.get(value, ""))


def device_of(inputs: Iterable[object], device: int | str | torch.device | None) -> torch.device:
    """Returns the device on which a program runs for these inputs.

    If `device` is not None, this device is returned. Otherwise, returns the device of the first
    CUDA tensor. Without a CUDA tensor, returns the device of the first tensor, or the CPU.

    Raises:
        InputError: torch does not know the device.
    """
    if device is not None:
        return torch_device(device)
    devices = [v.device for v in inputs if isinstance(v, torch.Tensor)]
    return next(
        (d for d in devices if d.type == "cuda"), devices[0] if devices else torch.device("cpu")
    )
