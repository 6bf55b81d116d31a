"""What the compiled runner needs of a bound plan: `fuser/runtime/runner.c` reads it by these names.

`steady` makes what repeats calls like one that has just run, or says why it cannot. Whatever is not
like that call is then not the runner's, and goes the way that it went before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Protocol

import torch
from torch.autograd import forward_ad

from fuser.runtime.graphs import USERS
from fuser.schedule.vectorize import VECTOR_BYTES
from fuser.torch_calls import capturing_on
from hostir.arena import MAX_SPARE, Arena
from hostir.bind import Argument
from hostir.capture import Replayed
from hostir.plan import BoundPlan, Plan
from hostir.steps import Closure

# (address of the function, of its arguments, of the words, (parameter, slot), what a status means)
_Launch = tuple[int, tuple[int, ...], int, tuple[tuple[int, int], ...], Callable[[int], None]]


class Steady(Protocol):
    """A call of the runner: outputs, or None for a call that is not its own."""

    # Calls that were its own, and how many since the latest were not.
    runs: int
    declined: int

    def __call__(
        self, inputs: Any, device: Any, enable: Any, disable: Any, /
    ) -> list[torch.Tensor] | None: ...


@dataclass(frozen=True)
class Surroundings:
    """What must be as it was besides the inputs: the simulated rank, and that there are no options
    of the call."""

    context: ContextVar[Any]
    no_options: Sequence[str]


@dataclass(frozen=True, eq=False)
class _Description:
    """What the runner is made of; it lives as long."""

    inputs: tuple[Argument, ...]
    # Where in a vector of memory tensors begin, the device (-1: the CPU), the stream, spare arenas.
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
    """Return why the runner cannot repeat a plan, however it is bound; "" where it can."""
    if plan.records:
        return "torch records gradients of its inputs"
    if plan.vote is not None:
        return "its ranks vote on each run"
    if any(made.empty is None for made in plan.made.values()):
        return "its outputs lie in memory of peers"
    return ""


def steady(
    runner: ModuleType, plan: Plan, inputs: Sequence[Argument], around: Surroundings
) -> Steady | str:
    """Return what repeats runs of a plan on inputs like these, which have run on this stream, or
    why there is none now."""
    if why := _why_not(plan):
        return why
    stream = plan.current_stream()
    arena = plan.arenas.take(stream)
    try:
        bound = arena.bound.get(plan)
        if bound is None or arena.is_captured:
            return "a run of the caller's own graph"
        graph = None
        if bound.replays is not None and not bound.replays.never:
            if plan.backends:
                return "its graphs hold communications"
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
        try:
            return runner.Steady(
                _Description(
                    tuple(inputs),
                    (VECTOR_BYTES - 1, plan.device.index if is_cuda else -1, stream, MAX_SPARE),
                    around.context,
                    around.context.get(),
                    around.no_options,
                    forward_ad.__dict__,
                    "_current_level",
                    plan.current_device,
                    capturing,
                    _enter,
                    bound.explain,
                    plan,
                    bound,
                    arena,
                    plan.arenas.spare(stream),
                    arena.bound,
                    bound.rest,
                    tuple(
                        (slot, made.empty, made.block.shape, made.block.strides, made.block.dtype)
                        for slot, made in plan.made.items()
                    ),
                    () if graph is not None else tuple(_step(bound, c) for c in bound.closures),
                    plan.outputs,
                    graph,
                )
            )
        except (RuntimeError, TypeError, ValueError) as error:
            return f"the runner does not take it: {error}"
    finally:
        plan.arenas.give(arena)


def _step(bound: BoundPlan, closure: Closure) -> Closure | _Launch:
    """Return a launch by its addresses, any other step as it is."""
    kernel = bound.launches.get(closure)
    if kernel is None or kernel.read is not None or not kernel.call.raw:
        return closure
    function, *arguments = kernel.call.raw
    words = ctypes.addressof(kernel.call.words)
    return function, tuple(arguments), words, kernel.moving, kernel.fail
