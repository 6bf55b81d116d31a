"""Describes the recorded steps of a program to the compiled runner (`fuser/runtime/runner.c`), a C
function that repeats whole calls.

`steady` returns a runner that repeats a call that has just run, or the reason why no runner can.
The runner declines a call that differs, which Python then runs. The C code reads the attributes of
`_Description` and `Replayed` by name.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, NoReturn, Protocol

import torch
from torch.autograd import forward_ad

from fuser.runtime.captured_graphs import USERS
from fuser.support.device import VECTOR_BYTES
from fuser.support.torch_calls import capturing_on
from hostir.runtime.cuda_graphs import Replayed
from hostir.runtime.inputs import Argument
from hostir.runtime.plan import MAX_SPARE, Arena, BoundPlan, Plan
from hostir.runtime.steps import Closure, Slots

# (address of the function, of its arguments, of the words; pairs (parameter, slot); the function
# that raises the error of a status)
_Launch = tuple[int, tuple[int, ...], int, tuple[tuple[int, int], ...], Callable[[int], None]]


# The Python classes of inputs that the runner accepts. A subclass may override methods on which the
# runner relies.
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, bool, int, float))


# Runners of one plan in one arena, for different signatures of inputs.
MAX_RUNNERS = 8


class Steady(Protocol):
    """A compiled runner, which repeats a call of a program in C on other tensors.

    The tensors must have the same shapes and layouts. The C type `Steady` in
    `fuser/runtime/runner.c` implements this interface.
    """

    # The number of calls that the runner has run, and of calls declined since the last run.
    runs: int
    declined: int
    # Whether the runner has released its memory. Such a runner declines all calls.
    is_dropped: int

    def drop(self) -> None:
        """Frees the memory and the CUDA graphs of this runner, which declines all later calls."""
        ...

    def __call__(self, inputs: Any, /, *device_and_options: Any) -> list[torch.Tensor] | None:
        """Runs the program on `inputs`, and returns the outputs. `device_and_options` are the
        device and the options of the user's call.

        Returns None, without running, if the inputs, the device or the options differ from those of
        earlier calls.
        """
        ...


@dataclass(frozen=True)
class Surroundings:
    """The circumstances of a call that must be unchanged if the compiled runner (C code) is to
    repeat the call.

    `context` is the variable that says which simulated rank the present thread is. `no_options` is
    the value that the options of a call have if the user passes no options.
    """

    context: ContextVar[Any]
    no_options: Sequence[str]


@dataclass(frozen=True, eq=False)
class _Description:
    """The description of a program's recorded steps for the compiled runner, which is written in C.

    The C code reads the fields by name and keeps this object alive. No field may refer to a tensor
    of the caller, because the runner would then keep that tensor's memory.
    """

    # The alignment mask of a vector, the device (-1: the CPU), the stream, the most spare arenas.
    numbers: tuple[int, int, int, int]
    context: ContextVar[Any]
    simulated: object
    no_options: Sequence[str]
    levels: dict[str, Any]
    level: str
    current_device: Callable[[], int] | None
    capturing: Callable[[], bool] | None
    enter: Callable[[], None]
    explain: Callable[[BaseException, Closure], Any]
    # Runs the plan in Python if the runner finds no graph; the buffers are allocated already.
    others: Callable[[Slots], None]
    plan: Plan
    bound: BoundPlan
    arena: Arena
    spare: list[Arena]
    bound_here: dict[Plan, BoundPlan]
    rest: list[Any]
    makes: tuple[tuple[object, ...], ...]
    steps: tuple[Closure | _Launch, ...]
    outputs: tuple[int, ...]
    graph: Replayed | None


def _enter() -> None:
    if not USERS.here.is_known:
        USERS.enter()


def _why_not(plan: Plan) -> str:
    """Returns the reason why the compiled runner, a C function, can never repeat `plan`, the
    recorded steps of a program; "" if it can.
    """
    if plan.records:
        return "torch records gradients of its inputs"
    if plan.vote is not None:
        return "its ranks vote on each run"
    if any(made.empty is None for made in plan.made.values()):
        return "its outputs are in memory that peers map"
    return ""


def steady(
    runner: ModuleType, plan: Plan, inputs: Sequence[Argument], around: Surroundings
) -> Steady | str:
    """Returns a compiled runner, a C function that repeats runs of `plan` (the recorded steps of a
    program) on inputs like `inputs`.

    The plan must have run on these inputs, on the current stream. If the compiled runner cannot
    repeat the plan now, returns the reason as text. `runner` is the C extension module, and
    `around` the context that must not change between runs.
    """
    if why := _why_not(plan):
        return why
    if not all(type(v) in _PLAIN for v in inputs):
        return "an input has a class other than torch.Tensor, Parameter or a number"
    stream = plan.current_stream()
    arena = plan.arenas.take(stream, plan)
    try:
        bound = arena.bound.get(plan)
        if bound is None or arena.is_captured:
            return "the caller captures the run in a CUDA graph"
        graph = None
        if bound.replays is not None and not bound.replays.never:
            if plan.backends:
                return "its CUDA graphs contain communications"
            graph = bound.replays.replayed()
            if isinstance(graph, str):
                return graph
        if graph is None and plan.streams is not None:
            return "it switches between streams"
        is_cuda = plan.device.type == "cuda"
        if is_cuda and plan.current_device is None:
            return "its device has no number"
        asks = capturing_on(plan.device) if stream else None
        capturing = None if asks is None else partial(asks, stream)
        explain = partial(_explain, bound, arena)
        try:
            found = runner.Steady(
                _Description(
                    (VECTOR_BYTES - 1, plan.device.index if is_cuda else -1, stream, MAX_SPARE),
                    around.context,
                    around.context.get(),
                    around.no_options,
                    forward_ad.__dict__,
                    "_current_level",
                    plan.current_device,
                    capturing,
                    _enter,
                    explain,
                    _others(plan, bound, stream, explain),
                    plan,
                    bound,
                    arena,
                    plan.arenas.spare(stream),
                    arena.bound,
                    bound.rest,
                    tuple(
                        (slot, made.empty, made.block.shape, made.block.strides, made.block.dtype)
                        for slot, made in bound.made.items()
                    ),
                    () if graph is not None else tuple(_step(bound, c) for c in bound.closures),
                    plan.outputs,
                    graph,
                ),
                tuple(inputs),
            )
            # At most MAX_RUNNERS are kept; the oldest are dropped, whether in use or not.
            for old in bound.runners[: -MAX_RUNNERS + 1]:
                old.drop()
            bound.runners[:] = [*bound.runners[-MAX_RUNNERS + 1 :], found]
            return found
        except (RuntimeError, TypeError, ValueError) as error:
            return f"the runner does not support it: {error}"
    finally:
        plan.arenas.give(arena)


def _explain(
    bound: BoundPlan, arena: Arena, error: BaseException, closure: Closure | None
) -> NoReturn:
    """Raises `error`, which has occurred in a run, with the op of the failed step in the message.

    First drops all programs' prepared steps that use `arena`, the memory of intermediates, because
    running work may still write to it. `closure` is the function of the failed step.
    """
    arena.abandon()
    bound.explain(error, closure)


def _others(
    plan: Plan,
    bound: BoundPlan,
    stream: int,
    explain: Callable[[BaseException, Closure | None], NoReturn],
) -> Callable[[Slots], None]:
    """Returns a function with which the compiled runner (C code) lets Python carry out a run for
    which it has no CUDA graph. The function captures a graph if such runs are frequent. Otherwise
    it carries out the recorded steps one by one.

    It uses the buffers that the C code has already allocated. If Python allocated new buffers at
    other addresses, the next run would not find a graph, either. `explain` raises the error of a
    failed step.
    """

    def run(slots: Slots) -> None:
        entry = None if plan.streams is None else plan.streams.current()
        step = None
        try:
            if bound.replays is None or not bound.replays.run(slots, stream):
                for step in bound.closures:
                    step(slots)
        except BaseException as error:
            if plan.streams is not None:
                plan.streams.enter(entry)
            explain(error, step)

    return run


def _step(bound: BoundPlan, closure: Closure) -> Closure | _Launch:
    """Returns a description of the recorded step `closure` for the compiled runner, which is
    written in C.

    If the step only launches a kernel, this is the data with which the C code launches the kernel
    itself. Otherwise it is `closure`, a Python function that the C code calls.
    """
    kernel = bound.launches.get(closure)
    if kernel is None or kernel.read is not None or not kernel.call.raw:
        return closure
    function, *arguments = kernel.call.raw
    words = ctypes.addressof(kernel.call.words)
    return function, tuple(arguments), words, kernel.moving, kernel.fail
