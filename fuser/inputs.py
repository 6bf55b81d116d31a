"""What callers pass to a run: inputs as they come, and devices."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fuser.arguments import Mismatch, list_items, python_number, show
from fuser.errors import InputError, UnsupportedError

# More than any structure of inputs has; a list may hold itself.
_DEEPEST = 64
_MOST_INPUTS = 1 << 20
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, bool, int, float))


def flatten(inputs: Iterable[object], depth: int = 0) -> list[torch.Tensor | bool | int | float]:
    """Return tensors and numbers with nested lists and tuples flattened in place."""
    if type(inputs) in (list, tuple):
        for value in inputs:
            if type(value) not in _PLAIN:
                break
        else:
            return [*inputs]  # pyright: ignore[reportReturnType]
    if isinstance(inputs, torch.Tensor):
        raise InputError("inputs are a list of tensors and numbers, got a tensor: pass [tensor]")
    if not isinstance(inputs, list | tuple):
        try:
            inputs = list_items(inputs, "tensors and numbers", longest=_MOST_INPUTS)
        except Mismatch as error:
            raise InputError(f"inputs are a list of tensors and numbers: {error.text}") from None
    if depth > _DEEPEST:
        raise InputError(f"inputs are lists nested deeper than {_DEEPEST}")
    flat: list[torch.Tensor | bool | int | float] = []
    for value in inputs:
        if isinstance(value, list | tuple):
            flat.extend(flatten(value, depth + 1))  # pyright: ignore[reportUnknownArgumentType]
        elif isinstance(value, torch.Tensor | bool | int | float):
            flat.append(value)
        else:
            flat.append(_number_input(value, len(flat)))
    return flat


def _number_input(value: object, position: int) -> bool | int | float:
    """Return a number of any library as Python's; raises `InputError` for anything else."""
    number = python_number(value)
    if isinstance(number, complex):
        raise UnsupportedError(f"complex inputs are not supported yet: {value}")
    if number is None:
        hint = ": pass torch.from_numpy(it)" if type(value).__module__ == "numpy" else ""
        raise InputError(
            f"input {position}: an input is a tensor or a number, got {type(value).__name__}{hint}"
        )
    return number


def torch_device(device: object) -> torch.device:
    """Return a device that is given as torch takes it, or as the index of a CUDA device.

    Raises `InputError` for a device that torch does not know.
    """
    # Torch keeps the index in 8 bits, and wraps without a word.
    if isinstance(device, int) and (isinstance(device, bool) or not 0 <= device < 128):
        raise InputError(f"device={show(device)} is no index of a CUDA device")
    try:
        return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)  # pyright: ignore[reportArgumentType, reportCallIssue]
    except (RuntimeError, TypeError) as error:
        raise InputError(f"device={show(device)}: {error}") from None
    except Exception:  # what is no device may have a repr that raises
        raise InputError(f"device={show(device)} is no device") from None


def device_of(inputs: Iterable[object], device: int | str | torch.device | None) -> torch.device:
    """Return where the program runs: `device`, else that of the first tensor input (not a 0-dim CPU
    tensor among CUDA ones), else the CPU.

    Raises `InputError` for a device that torch does not know.
    """
    if device is not None:
        return torch_device(device)
    devices = [v.device for v in inputs if isinstance(v, torch.Tensor)]
    return next(
        (d for d in devices if d.type == "cuda"), devices[0] if devices else torch.device("cpu")
    )
