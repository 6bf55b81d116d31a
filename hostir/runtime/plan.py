"""A recorded program: steps over slots, which every run of a class of inputs repeats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import NoReturn, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.autograd import profiler as torch_profiler

from fuser.ir.op import Op
from fuser.runtime.captured_graphs import MAKERS, USERS, GraphMaker
from fuser.runtime.graph_memory import graph_memory_nbytes
from fuser.support.errors import FuserError
from fuser.support.torch_calls import capturing_on, lasting
from hostir.analysis.clocks import Clock, Lifetime, Moment
from hostir.ir.program import HostIrContainer
from hostir.runtime.cuda_graphs import Replays, gains_nothing
from hostir.runtime.frame import OutOfMemoryError, op_failed
from hostir.runtime.inputs import Argument
from hostir.runtime.steps import (
    Allocation,
    Binding,
    Block,
    BoundKernel,
    Closure,
    Slots,
    Step,
    range_of,
)
from hostir.runtime.streams import Streams, on_device
from multidevice.transports.base.protocol import STEP_BY_STEP, Backend, Vote


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
        """Lets runners go of the memory: it is not this plan's any more."""
        for runner in self.runners:
            runner.drop()
        self.runners.clear()

    @cached_property
    def makes(self) -> tuple[Closure, ...]:
        """The makers of the buffers, in order."""
        return tuple(made.run for made in self.made.values())

    def op(self, closure: Closure) -> Op | None:
        """Returns which op a closure carries out."""
        return self.ops[self.closures.index(closure)]

    def explain(self, error: BaseException, closure: Closure | None) -> NoReturn:
        """Raises an error of a closure, or of a graph, as the caller of the run is to see it."""
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
    after_first_run: Callable[[], Plan] | None = None

    def describe(self) -> list[str]:
        """Returns a line for each step, in order: the op that it carries out, its kind and how many
        operands it has, as in `LaunchKernel: Launch of 3`. A step of no op has its kind alone."""
        return [str(step) if op is None else f"{op.name}: {step}" for step, op in self.steps]

    def memory(self, nbytes: int) -> torch.Tensor:
        """Returns memory for intermediates, for the current stream. Raises torch's error where
        there is none."""
        if self.symmetric is not None:
            return self.symmetric(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def bind(self, buffer: torch.Tensor, arena: Arena) -> BoundPlan:
        """Returns the plan for runs that begin on the stream of an arena, with this memory."""
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
        """Returns, for each stream on which it has run, what is captured, or why nothing is."""
        if self.why_not:
            return [f"not captured: {self.why_not}"]
        return [
            f"not captured: {gains_nothing(len(bound.closures), len(bound.launches))}"
            if bound.replays is None
            else bound.replays.describe()
            for bound in self.arenas.bound(self)
        ]

    def reserve(self) -> None:
        """Makes sure of the memory of the intermediates before the first run.

        Raises torch's error where there is none.
        """
        arena = self.arenas.take(self.current_stream(), self)
        try:
            if self not in arena.bound:
                arena.bind(self)
        finally:
            self.arenas.give(arena)

    def run(self, inputs: Sequence[Argument]) -> list[torch.Tensor]:
        """Carries out the steps on these inputs and returns the visible outputs.

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
    """Returns an error of a run as the caller is to see it; `op` is the one that was carried
    out."""
    if isinstance(error, FuserError) or not isinstance(error, Exception):
        return error
    if op is not None:
        return op_failed(op, error)
    if isinstance(error, torch.OutOfMemoryError):
        return OutOfMemoryError(f"a later run of a program: {error}")
    return error


# ----------------------------------------------------------------------
# The memory of replayed runs: one buffer, which the intermediates of all programs share.
#
# Only tensors that a program deallocates lie here, so nothing that a caller can hold is ever
# reused. Each plan has fixed offsets; two tensors share bytes when one is given up before the other
# begins, by the program's own waits (`hostir.analysis.clocks`). The runs that use one buffer begin
# on one stream, one after another, whichever program they are of: memory grows with the largest
# program, not with their number. A plan is bound to an arena once: its steps, and the CUDA graphs
# of them, then know where their intermediates lie. A larger plan moves the buffer, and all others
# are bound anew. Where some tensors must lie in memory that peers can map, the whole buffer does.

# Offsets are multiples of this, so that every block is as well aligned as a fresh tensor.
ALIGNMENT_NBYTES = 256
_MIB = 1 << 20
# By which a buffer is larger than what asked for it: torch's allocator rounds as much.
MAX_ROOM_NBYTES = 2 << 20
# Plans that stay bound to one arena, of all programs.
MAX_BOUND = 1024
# Arenas of one stream that are kept for the next runs: as many runs beside one another.
MAX_SPARE = 16
# What a buffer is to be larger than what is needed by before it is made anew.
MIN_SHRINK_NBYTES = 64 << 20


def views_of(blocks: Sequence[Block], arena: torch.Tensor) -> dict[int, torch.Tensor]:
    """Returns the tensors of blocks in a uint8 arena, by slot."""
    typed = {dtype: arena.view(dtype) for dtype in {b.dtype for b in blocks}}
    return {b.slot: b.view(typed[b.dtype]) for b in blocks}


def with_room(nbytes: int) -> int:
    """Returns how large a buffer is made for so many bytes: up to a fourth larger, and by less than
    MAX_ROOM_NBYTES, so that somewhat larger sizes of a program fit, too, and nothing is bound anew.
    """
    step = min(1 << max(nbytes.bit_length() - 3, 0), MAX_ROOM_NBYTES)
    return -(-nbytes // step) * step


def first_fit(blocks: Sequence[tuple[Lifetime, int]]) -> tuple[list[int], int]:
    """Returns (offsets, total bytes) of blocks (lifetime, bytes), in the order of their
    allocations.

    Each block takes the lowest gap of memory that nobody uses any more for all that its allocation
    knows of other streams.
    """
    ends = [lifetime.end for lifetime, _ in blocks]
    # Of thousands of blocks only those are compared that lie where another one might.
    after = (_Over(lifetime.begin, ends) for lifetime, _ in blocks)
    return fit(after, [nbytes for _, nbytes in blocks])


class IsOver(Protocol):
    """Which blocks are over, by their place in the order of their allocations."""

    def __getitem__(self, owner: int, /) -> bool: ...


@dataclass(frozen=True, slots=True)
class _Over:
    """Which are over when a block begins: found out when somebody asks."""

    begin: Clock
    ends: Sequence[Moment]

    def __getitem__(self, owner: int, /) -> bool:
        stream, tick = self.ends[owner]
        return self.begin.get(stream, 0) >= tick


def successions(lifetimes: Sequence[Lifetime]) -> list[list[bool]]:
    """Returns, for each lifetime, which of those before it are over when it begins."""
    ends = [lifetime.end for lifetime in lifetimes]
    return [
        [one.begin.get(stream, 0) >= tick for stream, tick in ends[:k]]
        for k, one in enumerate(lifetimes)
    ]


def fit(after: Iterable[IsOver], sizes: Sequence[int]) -> tuple[list[int], int]:
    """Returns `first_fit` of blocks of these sizes, of which each comes `after` earlier ones."""
    offsets: list[int] = []
    # Who had each part of memory last: beginning, end, and which block. Whoever comes after it
    # comes after all that had the part before. The parts follow one another.
    parts: list[tuple[int, int, int]] = []
    for block, (is_over, nbytes) in enumerate(zip(after, sizes, strict=True)):
        size = -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
        start, first, last = 0, 0, -1
        for last, (_, stop, owner) in enumerate(parts):
            if not is_over[owner]:
                start, first = stop, last + 1
            elif stop - start >= size:
                break
        offsets.append(start)
        if not size:
            continue
        mine = [(start, start + size, block)]
        if parts and parts[last][1] > start + size:
            mine.append((start + size, *parts[last][1:]))
        parts[first : last + 1] = mine
    return offsets, parts[-1][1] if parts else 0


class Arena:
    """A buffer for the runs on one stream of one device, one run at a time, of any program."""

    def __init__(self, device: torch.device, stream: int, *, is_captured: bool = False) -> None:
        """`is_captured`: for one run, which is a part of a graph that the caller makes."""
        self.stream, self.is_captured = stream, is_captured
        self._device = device
        self._buffer: torch.Tensor | None = None
        # Whether peers can map it.
        self._is_mapped = False
        # Plans whose intermediates lie here.
        self.bound: dict[Plan, BoundPlan] = {}
        self._graphs: GraphMaker | None = None

    def graphs(self) -> GraphMaker:
        """Returns what captures the runs of this arena. Raises `KernelError` where nothing can."""
        if self._graphs is None:
            self._graphs = MAKERS[self._device.type](self._device)
        return self._graphs

    @property
    def nbytes(self) -> int:
        """The bytes of the buffer."""
        return 0 if self._buffer is None else self._buffer.numel()

    def bind(self, plan: Plan) -> BoundPlan:
        """Lets the intermediates of a plan lie here."""
        with lasting():
            is_mapped = plan.symmetric is not None
            has_room = self._buffer is not None and self.nbytes >= plan.nbytes
            if not has_room or (is_mapped and not self._is_mapped):
                # Views of the smaller buffer, and graphs that know its address, would keep it.
                self.clear()
                self._buffer = plan.memory(with_room(plan.nbytes))
                self._is_mapped = is_mapped
            assert self._buffer is not None
            if len(self.bound) >= MAX_BOUND:
                self.release(next(iter(self.bound)))
            found = self.bound[plan] = plan.bind(self._buffer, self)
        return found

    def release(self, plan: Plan) -> None:
        """Drops what is bound of a plan, with its graphs."""
        if (bound := self.bound.pop(plan, None)) is not None:
            bound.release()

    def abandon(self) -> None:
        """Lets all programs go of a buffer of which nobody knows who still writes there."""
        for plan in list(self.bound):
            self.release(plan)

    def clear(self) -> None:
        """Gives the buffer back; no run uses it."""
        self.abandon()
        self._buffer = None

    def is_too_large(self) -> bool:
        """Whether the plans that are bound here need far less than there is."""
        needed = with_room(max((plan.nbytes for plan in list(self.bound)), default=0))
        return not self.bound or self.nbytes - needed >= max(needed, MIN_SHRINK_NBYTES)


class Pool:
    """The arenas of one device, by stream (a raw handle): those that no run uses now are spare.

    A run takes one and gives it back: one inside or beside another run finds another arena, and one
    on another stream never waits for this one. So there are as many as ever ran beside one another,
    each as large as the most that a run needed, however many programs there are.
    """

    def __init__(self) -> None:
        self.arenas: WeakSet[Arena] = WeakSet()
        self.spare: dict[int, list[Arena]] = {}

    def make(self, device: torch.device, stream: int) -> Arena:
        """Returns a new arena."""
        self.spare.setdefault(stream, [])
        arena = Arena(device, stream)
        self.arenas.add(arena)
        return arena

    def exchange(self, arena: Arena, plan: Plan) -> Arena:
        """Returns a spare arena of the same stream where the plan is bound, in place of the one
        that was taken; that one where there is none."""
        spare = self.spare[arena.stream]
        for other in list(spare):
            if plan in other.bound:
                with suppress(ValueError):  # another thread has taken it
                    spare.remove(other)
                    spare.append(arena)
                    return other
        return arena

    def all_spare(self) -> list[Arena]:
        """Returns the arenas that no run uses now."""
        return [arena for arenas in list(self.spare.values()) for arena in list(arenas)]

    def drop(self, arena: Arena) -> None:
        """Gives back the buffer of an arena, unless a run uses it."""
        with suppress(ValueError):
            self.spare.get(arena.stream, []).remove(arena)
            arena.clear()

    def of(self, owner: object) -> list[Arena]:
        """Returns the arenas in which plans of an owner are bound."""
        return [a for a in list(self.arenas) if any(p.arenas.owner is owner for p in list(a.bound))]

    def leave(self, owner: object) -> None:
        """Lets go of what is bound of an owner that is gone. Buffers that no other program needs,
        or not nearly as large, go back to torch's allocator."""
        for arena in self.of(owner):
            for plan in list(arena.bound):
                if plan.arenas.owner is owner:
                    arena.release(plan)
            if arena.is_too_large():
                self.drop(arena)

    @property
    def nbytes(self) -> int:
        """The bytes of all buffers."""
        return sum(arena.nbytes for arena in list(self.arenas))


# The pools that all programs of a process share, and those of each simulated rank: they run beside
# one another, and what one binds is of no use to another.
_POOLS: dict[torch.device, Pool] = {}
_POOLS_OF_RANKS: WeakKeyDictionary[object, dict[torch.device, Pool]] = WeakKeyDictionary()


def shared_pools(rank: object | None) -> dict[torch.device, Pool]:
    """Returns the pools of the programs of a simulated rank (None: of this process), by device."""
    return _POOLS if rank is None else _POOLS_OF_RANKS.setdefault(rank, {})


class Arenas:
    """The arenas of one evaluator and device: those of a pool.

    That of a run that failed is not given back: what is still in flight may write into it. Nor is
    that of a run which the caller captures: his graph will write there whenever it is launched. It
    lies in the memory of his graph.
    """

    def __init__(
        self,
        device: torch.device,
        why_not: str = "",
        pools: dict[torch.device, Pool] | None = None,
    ) -> None:
        """`why_not` says why no graph may repeat these runs; "" where one may. `pools` are those
        that other evaluators share, by device; None for one of its own."""
        self.device = device
        self.why_not = why_not
        self._is_capturing = capturing_on(device)
        self.pools = pools
        self.pool = Pool() if pools is None else pools.setdefault(device, Pool())
        self._spare = self.pool.spare
        # What tells the plans of this evaluator from others.
        self.owner = object()

    def take(self, stream: int, plan: Plan | None = None) -> Arena:
        """Returns an arena for a run that begins on this stream, the current one; where `plan` is
        bound, if there is one."""
        if self._is_capturing is not None and self._is_capturing(stream):
            return Arena(self.device, stream, is_captured=True)
        try:
            arena = self._spare[stream].pop()  # at once, whatever other threads do
        except (KeyError, IndexError):
            return self.pool.make(self.device, stream)
        return arena if plan is None else self.exchange(arena, plan)

    def exchange(self, arena: Arena, plan: Plan) -> Arena:
        """Returns one where the plan is bound in place of one that was taken, if there is one."""
        if arena.is_captured or plan in arena.bound:
            return arena
        return self.pool.exchange(arena, plan)

    def give(self, arena: Arena) -> None:
        """Takes back an arena after a run."""
        if not arena.is_captured:
            spare = self._spare[arena.stream]
            if len(spare) < MAX_SPARE:
                spare.append(arena)

    def spare(self, stream: int) -> list[Arena]:
        """Returns the arenas of a stream that no run uses now; `take` takes the last one."""
        return self.pool.spare.setdefault(stream, [])

    def bound(self, plan: Plan) -> list[BoundPlan]:
        """Returns how a plan is bound to those that no run uses now."""
        return [arena.bound[plan] for arena in self.pool.all_spare() if plan in arena.bound]

    def forget(self, plan: Plan) -> None:
        """Drops what is bound of a plan that will hardly run again."""
        for arena in self.pool.all_spare():
            arena.release(plan)

    def arenas(self) -> list[Arena]:
        """Returns those in which plans of this evaluator are bound."""
        return self.pool.of(self.owner)


@dataclass(frozen=True)
class Memory:
    """The memory that a definition keeps between its runs, in bytes.

    `needed` is what the intermediates of one run need at once, of the inputs so far that need most.
    They lie in buffers of `shared` bytes, one per stream and device, or one per run beside others:
    those of other programs lie there, too, in turns. Programs whose peers map memory have buffers
    of their `own`. `graphs` is kept for the kernels of CUDA graphs that callers make. What all
    programs of the process, or of the simulated rank, share are `total` bytes.
    """

    needed: int = 0
    shared: int = 0
    own: int = 0
    graphs: int = 0
    total: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{name} {_bytes_text(value)}" for name, value in vars(self).items())


def _bytes_text(nbytes: int) -> str:
    """Returns `12.5 MiB`; few bytes as they are."""
    return f"{nbytes / _MIB:.1f} MiB" if nbytes >= _MIB else f"{nbytes} bytes"


def memory_of(arenas: Iterable[Arenas], plans: Iterable[Plan]) -> Memory:
    """Returns what evaluators keep that have these arenas and plans."""
    given = list(arenas)
    shared = {arena for one in given if one.pools is not None for arena in one.arenas()}
    pools = {pool for one in given for pool in (one.pools or {}).values()}
    return Memory(
        needed=max((plan.nbytes for plan in plans), default=0),
        shared=sum(arena.nbytes for arena in shared),
        own=sum(one.pool.nbytes for one in given if one.pools is None),
        graphs=sum(map(graph_memory_nbytes, {one.device for one in given})),
        total=sum(pool.nbytes for pool in pools),
    )
