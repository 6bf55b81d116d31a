"""A recorded program: steps over slots, which every run of a class of inputs repeats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import NoReturn, Protocol

import torch
from torch.autograd import profiler as torch_profiler

from fuser.ir.op import Op
from fuser.runtime.captured_graphs import USERS
from fuser.support.errors import FuserError
from hostir.ir.program import HostIrContainer
from hostir.runtime.arena import Arena, Arenas, views_of
from hostir.runtime.cuda_graphs import Replays, gains_nothing
from hostir.runtime.inputs import Argument
from hostir.runtime.memory import OutOfMemoryError, op_failed
from hostir.runtime.ranges import range_of
from hostir.runtime.steps import Allocation, Binding, Block, BoundKernel, Closure, Slots, Step
from hostir.runtime.streams import Streams, on_device
from multidevice.transports.base.captured import STEP_BY_STEP, Vote
from multidevice.transports.base.protocol import Backend


class Dropped(Protocol):
    """An object that releases its memory when it is asked."""

    def drop(self) -> None: ...


@dataclass(frozen=True, eq=False)
class BoundPlan:
    """A plan bound to an arena and a stream: its steps as closures, one run at a time.

    `rest` has the slots behind the inputs: the fixed ones filled, the others empty.
    """

    # What makes the buffers that outlive a run, but for those that steps make.
    made: Mapping[int, Allocation]
    closures: tuple[Closure, ...]
    rest: Slots
    # Which op each closure carries out.
    ops: tuple[Op | None, ...]
    # The closures that are launches and nothing else.
    launches: Mapping[Closure, BoundKernel]
    kept: list[object]
    # None where no graph can repeat the plan, or none would be faster.
    replays: Replays | None
    # What repeats runs in C: it knows the memory, too.
    runners: list[Dropped] = field(default_factory=list["Dropped"])

    def release(self) -> None:
        """Let runners go of the memory: it is not this plan's any more."""
        for runner in self.runners:
            runner.drop()
        self.runners.clear()

    @cached_property
    def makes(self) -> tuple[Closure, ...]:
        """The makers of the buffers, in order."""
        return tuple(made.run for made in self.made.values())

    def op(self, closure: Closure) -> Op | None:
        """Return which op a closure carries out."""
        return self.ops[self.closures.index(closure)]

    def explain(self, error: BaseException, closure: Closure | None) -> NoReturn:
        """Raise an error of a closure, or of a graph, as the caller of the run is to see it."""
        explained = _explained(error, None if closure is None else self.op(closure))
        if explained is error:
            raise error
        raise explained from error


@dataclass(frozen=True, eq=False)
class Plan:
    """What a class of inputs repeats: the steps, how many slots they need, where outputs lie.

    `made` makes the buffers that outlive a run, by slot: they come before the steps. Of these, each
    of `by_steps` may be left to a step, whose result then is the buffer. `blocks` are the buffers
    that live in an arena of `nbytes`.
    `records` tells whether torch would record gradients: inputs require some, and torch reads them.
    """

    made: Mapping[int, Allocation]
    # With the op that each carries out; None for what no single op does.
    steps: tuple[tuple[Step, Op | None], ...]
    inputs: int
    size: int
    outputs: tuple[int, ...]
    by_steps: frozenset[int]
    blocks: tuple[Block, ...]
    nbytes: int
    # What makes memory for them that peers can map; None where they may lie anywhere.
    symmetric: Callable[[int], torch.Tensor] | None
    device: torch.device
    records: bool
    # Those of the run, if the program switches between them.
    streams: Streams | None
    arenas: Arenas
    # The raw handle of the current stream, and the current CUDA device, where it may be another.
    current_stream: Callable[[], int]
    current_device: Callable[[], int] | None
    # Those that communicate, and how the ranks agree on each run (None: each may go its own way);
    # why no graph can repeat the steps, "" where one may.
    backends: tuple[Backend, ...]
    vote: Vote | None
    why_not: str
    program: HostIrContainer
    # What returns the plan of later runs, after the first one; None where it is this one.
    settled: Callable[[], Plan] | None = None

    def describe(self) -> list[str]:
        """Return a line for each step, in order: the op that it carries out, its kind and how many
        operands it has, as in `LaunchKernel: Launch of 3`. A step of no op has its kind alone."""
        return [str(step) if op is None else f"{op.name}: {step}" for step, op in self.steps]

    def memory(self, nbytes: int) -> torch.Tensor:
        """Return memory for intermediates, for the current stream. Raises torch's error where there
        is none."""
        if self.symmetric is not None:
            return self.symmetric(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def bind(self, buffer: torch.Tensor, arena: Arena) -> BoundPlan:
        """Return the plan for runs that begin on the stream of an arena, with this memory."""
        stream = arena.stream
        fixed = views_of(self.blocks, buffer)
        memory = dict(fixed)
        binding = Binding(self.device, stream, fixed)
        closures: list[Closure] = []
        ops: list[Op | None] = []
        for step, op in self.steps:
            closure = step.bind(binding)
            if closure is not None:
                closures.append(closure)
                ops.append(op)
        rest = [fixed.get(slot) for slot in range(self.inputs, self.size)]
        # A graph cannot be launched into one that the caller captures.
        gains = not gains_nothing(len(closures), len(binding.launches))
        is_repeated = gains and not (self.why_not or arena.is_captured)
        replays = None
        if is_repeated:
            replays = Replays(self, memory, len(closures), stream=stream, graphs=arena.graphs)
        # A graph writes where its outputs are: it would overwrite what an earlier run returned.
        left = frozenset[int]() if is_repeated else self.by_steps
        made = {slot: make for slot, make in self.made.items() if slot not in left}
        launches = binding.launches
        return BoundPlan(made, tuple(closures), rest, tuple(ops), launches, binding.kept, replays)

    def graphs(self) -> list[str]:
        """Return, for each stream on which it has run, what is captured, or why nothing is."""
        if self.why_not:
            return [f"not captured: {self.why_not}"]
        return [
            f"not captured: {gains_nothing(len(bound.closures), len(bound.launches))}"
            if bound.replays is None
            else bound.replays.describe()
            for bound in self.arenas.bound(self)
        ]

    def reserve(self) -> None:
        """Make sure of the memory of the intermediates before the first run.

        Raises torch's error where there is none.
        """
        arena = self.arenas.take(self.current_stream(), self)
        try:
            if self not in arena.bound:
                arena.bind(self)
        finally:
            self.arenas.give(arena)

    def run(self, inputs: Sequence[Argument]) -> list[torch.Tensor]:
        """Carry out the steps on these inputs and return the visible outputs.

        Raises `ExecutionError` naming op and user line where torch refuses one.
        """
        if self.current_device is not None and self.current_device() != self.device.index:
            with on_device(self.device):
                return self.run(inputs)
        entry = None if self.streams is None else self.streams.current()
        arena = bound = step = None
        try:
            stream = self.current_stream()
            if not USERS.here.is_known:
                USERS.enter()
            arena = self.arenas.take(stream)
            bound = arena.bound.get(self)
            if bound is None:
                arena = self.arenas.exchange(arena, self)
                bound = arena.bound.get(self) or arena.bind(self)
            slots: Slots = [*inputs, *bound.rest]
            for make in bound.makes:
                make(slots)
            replays = bound.replays
            if replays is None and self.vote is not None:
                self.vote.ask(STEP_BY_STEP)
            if replays is None or not replays.run(slots, stream):
                if torch_profiler._is_profiler_enabled:  # pyright: ignore[reportPrivateUsage]
                    for step, op in zip(bound.closures, bound.ops, strict=True):
                        with nullcontext() if op is None else range_of(op, self.program):
                            step(slots)
                else:
                    for step in bound.closures:
                        step(slots)
        except BaseException as error:
            if self.streams is not None:
                self.streams.enter(entry)
            op = None if bound is None or step is None else bound.op(step)
            if arena is not None:
                arena.abandon()
            explained = _explained(error, op)
            if explained is error:
                raise
            raise explained from error
        self.arenas.give(arena)
        outputs = self.outputs
        # Nearly all programs have one, which is had sooner than a list of all.
        return [slots[outputs[0]]] if len(outputs) == 1 else [slots[i] for i in outputs]


def _explained(error: BaseException, op: Op | None) -> BaseException:
    """Return an error of a run as the caller is to see it; `op` is the one that was carried out."""
    if isinstance(error, FuserError) or not isinstance(error, Exception):
        return error
    if op is not None:
        return op_failed(op, error)
    if isinstance(error, torch.OutOfMemoryError):
        return OutOfMemoryError(f"a later run of a program: {error}")
    return error
