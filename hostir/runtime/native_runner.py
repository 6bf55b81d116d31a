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

# (address of the function, of its arguments, of the words, (parameter, slot), what a status means)
_Launch = tuple[int, tuple[int, ...], int, tuple[tuple[int, int], ...], Callable[[int], None]]


# Of what has another class, its methods may say anything.
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, bool, int, float))


# Of one plan in one arena; they differ in the signatures of inputs.
MAX_RUNNERS = 8


class Steady(Protocol):
    """A call of the runner: outputs, or None for a call that is not its own."""

    # Calls that were its own, and how many since the latest were not.
    runs: int
    declined: int
    # Whether it has let go of what it ran on: no call is its own any more.
    is_dropped: int

    def drop(self) -> None:
        """Lets go of memory and graphs."""
        ...

    def __call__(self, inputs: Any, /, *device_and_options: Any) -> list[torch.Tensor] | None: ...


@dataclass(frozen=True)
class Surroundings:
    """What must be as it was besides the inputs: the simulated rank, and that there are no options
    of the call."""

    context: ContextVar[Any]
    no_options: Sequence[str]


@dataclass(frozen=True, eq=False)
class _Description:
    """What the runner is made of, which lives as long; never a tensor of the caller."""

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
    # What carries out a run, whose buffers are made, without a graph that is known.
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
    """Returns why the runner cannot repeat a plan, however it is bound; "" where it can."""
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
    """Returns what repeats runs of a plan on inputs like these, which have run on this stream, or
    why there is none now."""
    if why := _why_not(plan):
        return why
    if not all(type(v) in _PLAIN for v in inputs):
        return "an input is of a class of its own"
    stream = plan.current_stream()
    arena = plan.arenas.take(stream, plan)
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
            # Those that were let go are not told apart: of the latest only few are in use.
            for old in bound.runners[: -MAX_RUNNERS + 1]:
                old.drop()
            bound.runners[:] = [*bound.runners[-MAX_RUNNERS + 1 :], found]
            return found
        except (RuntimeError, TypeError, ValueError) as error:
            return f"the runner does not take it: {error}"
    finally:
        plan.arenas.give(arena)


def _explain(
    bound: BoundPlan, arena: Arena, error: BaseException, closure: Closure | None
) -> NoReturn:
    """Raises an error of a run as the caller is to see it; what is in flight keeps the arena."""
    arena.abandon()
    bound.explain(error, closure)


def _others(
    plan: Plan,
    bound: BoundPlan,
    stream: int,
    explain: Callable[[BaseException, Closure | None], NoReturn],
) -> Callable[[Slots], None]:
    """Returns what carries out a run, whose buffers are made, where the runner finds no graph. Made
    anew, they would lie elsewhere, and no graph could be found for the next run either."""

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
    """Returns a launch by its addresses, any other step as it is."""
    kernel = bound.launches.get(closure)
    if kernel is None or kernel.read is not None or not kernel.call.raw:
        return closure
    function, *arguments = kernel.call.raw
    words = ctypes.addressof(kernel.call.words)
    return function, tuple(arguments), words, kernel.moving, kernel.fail
