"""Shorter ways into torch than its public ones, for what every call of a program does.

Each falls back on the public way where this torch lacks the other.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from operator import call
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

EmptyStrided = Callable[[Sequence[int], Sequence[int], "torch.dtype"], "torch.Tensor"]


@cache
def _private(path: str) -> Any:
    """Returns what torch keeps under this path of its C++ module; None where it does not."""
    import torch

    found: Any = torch._C
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def empty_on(device: torch.device) -> EmptyStrided:
    """Returns what makes an uninitialised tensor of (shape, strides, dtype) on a device.

    A CUDA device must be the current one when it is called.
    """
    import torch

    found = _private(f"_dynamo.guards._empty_strided_{device.type}")
    if found is not None and device.type in ("cpu", "cuda"):
        return found

    def make(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return make


@contextmanager
def lasting() -> Generator[None]:
    """A context for tensors that later calls write into: those that are made in inference mode
    cannot be written outside of it."""
    import torch

    with torch.inference_mode(False), torch.no_grad():
        yield


def class_check(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """Returns what tells whether its arguments are tensors like these, in order: of the same Python
    class, dtype, device, sizes, strides, laziness, and as much in need of a gradient.

    It may say no to some that are, and never yes to others; of what is no tensor it may raise
    anything. A nested tensor would end the process. None where torch cannot tell at once.
    """
    make = _private("_dynamo.guards.TensorGuards")
    if make is None or not tensors:
        return None

    def check_of(some: Sequence[torch.Tensor]) -> Callable[..., bool]:
        sizes, strides = [list(t.shape) for t in some], [list(t.stride()) for t in some]
        return make(*some, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check

    # Torch says no to a tensor that it is given twice: those that come again are asked about apart.
    turns: list[list[int]] = []
    for i, t in enumerate(tensors):
        turn = sum(t is other for other in tensors[:i])
        if turn == len(turns):
            turns.append([])
        turns[turn].append(i)
    try:
        checks = [check_of([tensors[i] for i in places]) for places in turns]
    except (TypeError, AttributeError):  # another torch's
        return None
    if len(checks) == 1:
        return checks[0]
    count, pairs = len(tensors), tuple(zip(checks, turns, strict=True))

    def check(*given: Any) -> bool:
        if len(given) != count:
            return False
        return all(alike(*[given[i] for i in places]) for alike, places in pairs)

    return check


def current_device_beside(device: torch.device) -> Callable[[], int] | None:
    """Returns what asks for the number of the current CUDA device, which may be another than this
    one; None where it cannot be."""
    import torch

    if device.type != "cuda" or device.index is None:
        return None
    return _private("_cuda_getDevice") or torch.cuda.current_device


def raw_stream_on(device: torch.device) -> Callable[[], int]:
    """Returns what asks for the driver's handle of torch's current stream on a device; 0 on the
    CPU. Without an index, a CUDA device is the current one of each call."""
    import torch

    if device.type != "cuda":
        return lambda: 0
    index: int | None = device.index
    raw, current_device = _private("_cuda_getCurrentRawStream"), torch.cuda.current_device
    if raw is None:
        return lambda: torch.cuda.current_stream(device).cuda_stream
    return (lambda: raw(current_device())) if index is None else partial(raw, index)


def range_named(name: str) -> AbstractContextManager[object]:
    """Returns a range of the host, in which torch.profiler sees what is launched.

    Torch's public one does not tell CUPTI what calls of the driver, rather than of torch, it holds.
    """
    import torch

    make = _private("_profiler._RecordFunctionFast")
    return torch.profiler.record_function(name) if make is None else make(name)


def arithmetic_choices() -> Callable[[], tuple[object, ...]]:
    """Returns what asks for the switches of torch that change what its library calls compute."""
    import torch

    is_cast, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    names = (
        "_get_cublas_allow_fp16_reduced_precision_reduction",
        "_get_cublas_allow_bf16_reduced_precision_reduction",
        "_get_cublas_allow_fp16_accumulation",
        "_get_deterministic_algorithms",
    )
    # Whether anything is cast comes first: only then it is asked what.
    asks: list[Callable[[], object]] = [_private("_is_any_autocast_enabled") or is_cast]
    asks += [ask for name in names if (ask := _private(name))]
    precision = _private("_get_fp32_precision_getter")
    asks.append(
        torch.get_float32_matmul_precision
        if precision is None
        else partial(precision, "cuda", "matmul")
    )
    library = _private("_get_blas_preferred_backend")

    def ask_all() -> tuple[object, ...]:
        # The library as a number: what torch calls it takes long to compare.
        found = (*map(call, asks), None if library is None else library().value)
        return (*found, is_cast("cuda") and dtype("cuda")) if found[0] else found

    return ask_all


def is_backward() -> bool:
    """Returns whether this thread computes gradients for another one, or for itself."""
    current = _private("_current_graph_task_id")
    return current is not None and current() != -1


def capturing_on(device: torch.device) -> Callable[[int], bool] | None:
    """Returns what tells whether torch's current stream, which has this raw handle, is being
    captured into a CUDA graph; None where that cannot be."""
    import torch

    if device.type != "cuda":
        return None
    ask = _private("_cuda_isCurrentStreamCapturing") or torch.cuda.is_current_stream_capturing
    # The stream without a handle cannot be captured, and asking takes a third of a microsecond.
    return lambda stream: stream != 0 and ask()


def generator_of(device: torch.device) -> torch.Generator:
    """Returns torch's own generator of a device."""
    import torch

    if device.type != "cuda":
        return torch.default_generator
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]
