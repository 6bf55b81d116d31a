"""Faster variants of torch functions that every call of a program needs.

These variants use functions of torch that are not public. If this version of torch lacks such a
function, the public one is used.
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
    """Returns the object at a dotted path in torch's C++ module, or None if there is no such
    object.
    """
    import torch

    found: Any = torch._C
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def empty_on(device: torch.device) -> EmptyStrided:
    """Returns a function that creates an uninitialised tensor on a device.

    The function takes (shape, strides, dtype). A CUDA device must be the current device when the
    function is called.
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
    """Returns a context for the creation of tensors that later calls write into.

    The context turns inference mode off. A tensor created in inference mode could not be written
    outside of inference mode.
    """
    import torch

    with torch.inference_mode(False), torch.no_grad():
        yield


def class_check(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """Returns a function that checks whether its arguments are tensors like `tensors`, in order.

    Tensors are alike if they have the same Python class, dtype, device, sizes, strides, laziness
    (of negation and conjugation) and need of a gradient. The function may return False for tensors
    that are alike, but never returns True for others. The caller ensures that all arguments are
    tensors, and none is a nested tensor: other objects may raise any error, and a nested tensor
    crashes the process inside of torch. Returns None if this version of torch has no such check.
    """
    make = _private("_dynamo.guards.TensorGuards")
    if make is None or not tensors:
        return None

    def check_of(some: Sequence[torch.Tensor]) -> Callable[..., bool]:
        sizes, strides = [list(t.shape) for t in some], [list(t.stride()) for t in some]
        return make(*some, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check

    # Torch's check rejects a tensor that is passed twice. Repetitions are checked separately.
    turns: list[list[int]] = []
    for i, t in enumerate(tensors):
        turn = sum(t is other for other in tensors[:i])
        if turn == len(turns):
            turns.append([])
        turns[turn].append(i)
    try:
        checks = [check_of([tensors[i] for i in places]) for places in turns]
    except (TypeError, AttributeError):  # another version of torch
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
    """Returns a function that returns the index of the current CUDA device.

    The caller compares this index with `device`. Returns None if `device` is not a CUDA device with
    an index.
    """
    import torch

    if device.type != "cuda" or device.index is None:
        return None
    return _private("_cuda_getDevice") or torch.cuda.current_device


def raw_stream_on(device: torch.device) -> Callable[[], int]:
    """Returns a function that returns the driver's handle of torch's current stream on a device.

    The handle is 0 on the CPU. For a CUDA device without an index, the function uses the device
    that is current when it is called.
    """
    import torch

    if device.type != "cuda":
        return lambda: 0
    index: int | None = device.index
    raw, current_device = _private("_cuda_getCurrentRawStream"), torch.cuda.current_device
    if raw is None:
        return lambda: torch.cuda.current_stream(device).cuda_stream
    return (lambda: raw(current_device())) if index is None else partial(raw, index)


def range_named(name: str) -> AbstractContextManager[object]:
    """Returns a context that torch.profiler shows as a named range on the host.

    CUPTI assigns the launches within the context to this range, which it cannot do for a range of
    `torch.profiler.record_function`.
    """
    import torch

    make = _private("_profiler._RecordFunctionFast")
    return torch.profiler.record_function(name) if make is None else make(name)


def arithmetic_choices() -> Callable[[], tuple[object, ...]]:
    """Returns a function that returns, as a tuple, the current settings of torch that affect
    results of library calls, such as autocast.

    A CUDA graph has captured library calls under certain settings, and may be repeated only while
    the tuple is the same.
    """
    import torch

    is_cast, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    names = (
        "_get_cublas_allow_fp16_reduced_precision_reduction",
        "_get_cublas_allow_bf16_reduced_precision_reduction",
        "_get_cublas_allow_fp16_accumulation",
        "_get_deterministic_algorithms",
    )
    # The first switch is whether autocast is on. Its dtype is read only then.
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
        # The library as a number, because torch's enum is slow to compare.
        found = (*map(call, asks), None if library is None else library().value)
        return (*found, is_cast("cuda") and dtype("cuda")) if found[0] else found

    return ask_all


def is_backward() -> bool:
    """Returns whether this thread is computing gradients in torch's backward pass."""
    current = _private("_current_graph_task_id")
    return current is not None and current() != -1


def capturing_on(device: torch.device) -> Callable[[int], bool] | None:
    """Returns a function that returns whether a CUDA graph is being captured on a stream.

    The function takes the driver's handle of the current stream. Returns None if the device has no
    CUDA graphs.
    """
    import torch

    if device.type != "cuda":
        return None
    ask = _private("_cuda_isCurrentStreamCapturing") or torch.cuda.is_current_stream_capturing
    # The default stream (handle 0) cannot be captured, and the query takes 0.3 microseconds.
    return lambda stream: stream != 0 and ask()


def generator_of(device: torch.device) -> torch.Generator:
    """Returns torch's default random generator of a device."""
    import torch

    if device.type != "cuda":
        return torch.default_generator
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]
