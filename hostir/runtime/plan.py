"""The plan: the recorded steps of a program, which later runs repeat.

    Plan -- bind(buffer, arena) --> BoundPlan: functions with fixed addresses of intermediates

A step is a part of an op's work, such as a kernel launch. A plan serves inputs with equal shapes,
strides, dtypes and alignments. The second half of the file manages the memory of intermediates:
arenas (one buffer for all intermediates of the programs on a stream), and the pools of arenas that
programs share.
"""

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
    """An object that holds memory for a plan (the recorded steps of a program), and frees the
    memory when `drop` is called.

    The compiled runners, C functions that repeat whole runs, are such objects.
    """

    def drop(self) -> None:
        """Frees the memory and the CUDA graphs of this object, which is not used afterwards."""
        ...


@dataclass(frozen=True, eq=False)
class BoundPlan:
    """The recorded steps of a program as functions, ready to run on one stream and in one arena
    (the memory of intermediates), so that the addresses of intermediates are fixed.

    A bound plan serves one run at a time. A slot is a position in the list of a run's values.

    - `made`: by slot, the allocations of buffers that are still used after a run, such as outputs.
      Buffers that a step allocates are not included.
    - `closures`: the functions; `ops`: the op of each function.
    - `rest`: the initial values of the slots after the inputs. A slot in the arena has its tensor,
      and every other slot has None.
    - `kept`: objects that must live as long as the functions.
    """

    # By slot, the allocations of buffers that outlive a run, without those that steps allocate.
    made: Mapping[int, Allocation]
    closures: tuple[Closure, ...]
    rest: Slots
    # The op of each closure.
    ops: tuple[Op | None, ...]
    # The closures that only launch a kernel.
    launches: Mapping[Closure, BoundKernel]
    kept: list[object]
    # None if no CUDA graph can replay the plan, or if none would be faster.
    replays: Replays | None
    # The compiled runners of this plan, which use the same memory.
    runners: list[Dropped] = field(default_factory=list["Dropped"])

    def release(self) -> None:
        """Drops the compiled runners of this plan, C functions that repeat its runs. The runners
        use memory that now belongs to other plans.
        """
        for runner in self.runners:
            runner.drop()
        self.runners.clear()

    @cached_property
    def makes(self) -> tuple[Closure, ...]:
        """The functions that allocate a run's outputs, and other buffers that are still used after
        the run, in order. A run calls them before the recorded steps.
        """
        return tuple(made.run for made in self.made.values())

    def op(self, closure: Closure) -> Op | None:
        """Returns the op that the function `closure` carries out; None if there is no op.

        `closure` is the function of one of the recorded steps.
        """
        return self.ops[self.closures.index(closure)]

    def explain(self, error: BaseException, closure: Closure | None) -> NoReturn:
        """Raises `error`, which a run has raised, after adding the op that was running and the
        user's source line.

        `closure` is the function that carried out the op. None means that a CUDA graph was running,
        so the op is unknown and is not added.
        """
        explained = _explained(error, None if closure is None else self.op(closure))
        if explained is error:
            raise error
        raise explained from error


@dataclass(frozen=True, eq=False)
class Plan:
    """The recorded steps and buffers of a program, which later runs on inputs of equal shapes and
    layouts repeat. A step is a part of an op's work, such as a kernel launch.

    A slot is a position in the list of a run's values.

    - `inputs`: the number of inputs, which are in the first slots; `size`: the number of slots.
    - `outputs`: the slots of the outputs.
    - `made`: by slot, the allocations of buffers that are still used after a run. A run makes these
      allocations before the steps.
    - `by_steps`: some slots of `made`. In a run without a CUDA graph, a step stores a new tensor of
      torch there, so that no allocation is needed.
    - `blocks`: the buffers that are stored in an arena, the memory of intermediates, of `nbytes`
      bytes.
    - `records`: whether torch would record gradients, because a torch call may read an input that
      requires a gradient.
    """

    made: Mapping[int, Allocation]
    # Each step with its op; None for a step of no single op.
    steps: tuple[tuple[Step, Op | None], ...]
    inputs: int
    size: int
    outputs: tuple[int, ...]
    by_steps: frozenset[int]
    blocks: tuple[Block, ...]
    nbytes: int
    # Allocates memory for the blocks that peers can map; None if ordinary memory serves.
    symmetric: Callable[[int], torch.Tensor] | None
    device: torch.device
    records: bool
    # The streams, if the program switches between them; else None.
    streams: Streams | None
    arenas: Arenas
    # Functions that return the raw handle of the current stream, and the current CUDA device; None
    # if there is only one device.
    current_stream: Callable[[], int]
    current_device: Callable[[], int] | None
    # The backends that communicate; the vote of the ranks on each run (None: each rank decides
    # alone); and the reason why no CUDA graph can replay the steps, "" if one can.
    backends: tuple[Backend, ...]
    vote: Vote | None
    why_not: str
    program: HostIrContainer
    # Returns the plan of later runs, once the first run is done; None if it is this plan.
    after_first_run: Callable[[], Plan] | None = None

    def describe(self) -> list[str]:
        """Returns one line of text per recorded step, such as `LaunchKernel: Launch of 3`.

        A line has the name of the op, the kind of step and the number of tensors. The line of a
        step without an op has no op name.
        """
        return [str(step) if op is None else f"{op.name}: {step}" for step, op in self.steps]

    def memory(self, nbytes: int) -> torch.Tensor:
        """Allocates `nbytes` bytes for the intermediates of runs that repeat these recorded steps,
        on the current stream.

        The memory can be mapped by other ranks if some intermediate requires that. Raises torch's
        error if there is not enough memory.
        """
        if self.symmetric is not None:
            return self.symmetric(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def bind(self, buffer: torch.Tensor, arena: Arena) -> BoundPlan:
        """Turns each recorded step into a function with fixed memory addresses, and returns the
        functions.

        `buffer` is the memory of `arena`, in which the intermediates of a run are stored. The
        functions run on the stream of `arena`.
        """
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
        # A graph cannot be launched while the caller captures a graph.
        gains = not gains_nothing(len(closures), len(binding.launches))
        is_repeated = gains and not (self.why_not or arena.is_captured)
        replays = None
        if is_repeated:
            replays = Replays(self, memory, len(closures), stream=stream, graphs=arena.graphs)
        # A graph writes to fixed addresses. Outputs from steps would have the same memory in every
        # launch, and overwrite the results of earlier runs.
        left = frozenset[int]() if is_repeated else self.by_steps
        made = {slot: make for slot, make in self.made.items() if slot not in left}
        launches = binding.launches
        return BoundPlan(made, tuple(closures), rest, tuple(ops), launches, binding.kept, replays)

    def graphs(self) -> list[str]:
        """Returns one line of text per stream on which these recorded steps have run.

        The line describes the captured CUDA graphs, or says why there are none.
        """
        if self.why_not:
            return [f"not captured: {self.why_not}"]
        return [
            f"not captured: {gains_nothing(len(bound.closures), len(bound.launches))}"
            if bound.replays is None
            else bound.replays.describe()
            for bound in self.arenas.bound(self)
        ]

    def reserve(self) -> None:
        """Allocates the memory for the intermediates of a run, before the first run.

        A lack of memory is then found before anything runs: this method raises torch's error.
        """
        arena = self.arenas.take(self.current_stream(), self)
        try:
            if self not in arena.bound:
                arena.bind(self)
        finally:
            self.arenas.give(arena)

    def run(self, inputs: Sequence[Argument]) -> list[torch.Tensor]:
        """Repeats the recorded steps on these inputs, and returns the program's visible outputs.

        If there is a CUDA graph for these inputs, the graph is launched instead of the steps.
        Raises `ExecutionError` with the op and the user's line if torch fails in a step.
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
        # Nearly all programs have one output, and this is faster than the general list.
        return [slots[outputs[0]]] if len(outputs) == 1 else [slots[i] for i in outputs]


def _explained(error: BaseException, op: Op | None) -> BaseException:
    """Returns the error to raise after a run has failed with `error`.

    An error of torch is replaced by an error with the op and the user's line. `op` is the op that
    was running; None if the run failed outside of any op.
    """
    if isinstance(error, FuserError) or not isinstance(error, Exception):
        return error
    if op is not None:
        return op_failed(op, error)
    if isinstance(error, torch.OutOfMemoryError):
        return OutOfMemoryError(f"there is no memory for the buffers of a program's run: {error}")
    return error


# ----------------------------------------------------------------------
# The memory of replayed runs: one buffer (the arena) for the intermediates of all programs.
#
# - Only tensors that a program deallocates are stored in an arena. No caller ever holds one.
# - Each plan has fixed offsets. Two tensors share bytes if one is deallocated before the other
#   begins, in the order that the program's own waits define (`hostir.analysis.clocks`).
# - All runs that use one arena begin on the same stream, one after another, of whatever program.
#   Memory therefore grows with the largest program, not with the number of programs.
# - A plan is bound to an arena once. Its steps and CUDA graphs then contain the addresses of
#   intermediates. A larger plan needs a larger buffer, and all other plans are bound again.
# - If some tensor must be in memory that peers can map, the whole buffer is such memory.

# Offsets are multiples of this, so that every block is as well aligned as a new tensor.
ALIGNMENT_NBYTES = 256
_MIB = 1 << 20
# The most by which a buffer is larger than needed: torch's allocator rounds as much.
MAX_ROOM_NBYTES = 2 << 20
# Plans, of all programs, that stay bound to one arena.
MAX_BOUND = 1024
# Arenas of one stream that are kept for later runs: as many runs may be concurrent.
MAX_SPARE = 16
# A buffer is replaced by a smaller one only if it is larger than needed by at least this.
MIN_SHRINK_NBYTES = 64 << 20


def views_of(blocks: Sequence[Block], arena: torch.Tensor) -> dict[int, torch.Tensor]:
    """Returns the tensors of the buffers in one arena, the memory of intermediates, by slot.

    A slot is a position in the list of a run's values. `blocks` describes the buffers. `arena` is
    the memory, a uint8 tensor.
    """
    typed = {dtype: arena.view(dtype) for dtype in {b.dtype for b in blocks}}
    return {b.slot: b.view(typed[b.dtype]) for b in blocks}


def with_room(nbytes: int) -> int:
    """Returns how many bytes to allocate for the intermediates of a recorded program that needs
    `nbytes`.

    The result exceeds `nbytes` by at most a fourth, and by less than MAX_ROOM_NBYTES. Inputs that
    are somewhat larger can then use the same memory. With new memory, all recorded steps would have
    to be prepared again for other addresses.
    """
    step = min(1 << max(nbytes.bit_length() - 3, 0), MAX_ROOM_NBYTES)
    return -(-nbytes // step) * step


def first_fit(blocks: Sequence[tuple[Lifetime, int]]) -> tuple[list[int], int]:
    """Chooses the offset of each buffer in an arena, the memory of a run's intermediates, so that
    buffers that are not used at the same time can share bytes.

    `blocks` has (lifetime, bytes) of each buffer, in order of allocation. Each buffer gets the
    lowest range of bytes that is large enough and that earlier buffers no longer use. A buffer on
    another stream counts as used until the program's waits order its end before the new allocation.
    Returns (offsets, total bytes).
    """
    ends = [lifetime.end for lifetime, _ in blocks]
    # Lifetimes are compared lazily: of thousands of blocks, only those that compete for a gap.
    after = (_Over(lifetime.begin, ends) for lifetime, _ in blocks)
    return fit(after, [nbytes for _, nbytes in blocks])


class IsOver(Protocol):
    """An interface that says which earlier buffers are no longer used when one new buffer is
    allocated. The new buffer can then have their bytes.

    It is indexed by the number of an earlier buffer, in order of allocation. A list of bools has
    this interface, too.
    """

    def __getitem__(self, owner: int, /) -> bool:
        """Whether the buffer number `owner` is no longer used when the new buffer is allocated."""
        ...


@dataclass(frozen=True, slots=True)
class _Over:
    """Says which earlier buffers are no longer used when one new buffer is allocated.

    `begin` is the vector clock of the allocation: for each stream, how much of its work has
    certainly ended by then. `ends` has the end of each buffer's lifetime. Answers are computed only
    when they are needed, because few of thousands of buffers compete for the same bytes.
    """

    begin: Clock
    ends: Sequence[Moment]

    def __getitem__(self, owner: int, /) -> bool:
        stream, tick = self.ends[owner]
        return self.begin.get(stream, 0) >= tick


def successions(lifetimes: Sequence[Lifetime]) -> list[list[bool]]:
    """Returns a table that says, for each buffer, which earlier buffers are no longer used when it
    is allocated.

    `table[k][i]` is whether lifetime `i` has ended when lifetime `k` begins, for `i < k`.
    """
    ends = [lifetime.end for lifetime in lifetimes]
    return [
        [lifetime.begin.get(stream, 0) >= tick for stream, tick in ends[:k]]
        for k, lifetime in enumerate(lifetimes)
    ]


def fit(after: Iterable[IsOver], sizes: Sequence[int]) -> tuple[list[int], int]:
    """Chooses the offset of each buffer in an arena, the memory of a run's intermediates, as
    `first_fit` does.

    `sizes` are in bytes, in order of allocation. The `k`-th entry of `after` says which earlier
    buffers are no longer used when buffer `k` is allocated. Returns (offsets, total bytes).
    """
    offsets: list[int] = []
    # The latest block in each range of bytes: (begin, end, index of the block), without gaps. A
    # block that begins after the latest block has ended also begins after all earlier blocks.
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
        replaced = [(start, start + size, block)]
        if parts and parts[last][1] > start + size:
            replaced.append((start + size, *parts[last][1:]))
        parts[first : last + 1] = replaced
    return offsets, parts[-1][1] if parts else 0


class Arena:
    """The memory for the intermediates of programs that run on one stream of one device. All
    programs on the stream share it, because their runs follow one another.
    """

    def __init__(self, device: torch.device, stream: int, *, is_captured: bool = False) -> None:
        """Prepares an arena, which stores intermediates, for the stream with the raw handle
        `stream`. It allocates memory when it is first used.

        If `is_captured`, the arena is for one run only, which the caller captures in a CUDA graph.
        """
        self.stream, self.is_captured = stream, is_captured
        self._device = device
        self._buffer: torch.Tensor | None = None
        # Whether peers can map the buffer.
        self._is_mapped = False
        # The plans whose intermediates are stored in this buffer.
        self.bound: dict[Plan, BoundPlan] = {}
        self._graphs: GraphMaker | None = None

    def graphs(self) -> GraphMaker:
        """Returns the object that captures runs in this memory of intermediates as CUDA graphs.

        The object is made at the first call. Raises `KernelError` if the device cannot make graphs.
        """
        if self._graphs is None:
            self._graphs = MAKERS[self._device.type](self._device)
        return self._graphs

    @property
    def nbytes(self) -> int:
        """The size in bytes of this memory for intermediates; 0 before it is first used."""
        return 0 if self._buffer is None else self._buffer.numel()

    def bind(self, plan: Plan) -> BoundPlan:
        """Turns the recorded steps of `plan` into functions with fixed memory addresses in this
        arena, the memory of intermediates.

        If the plan needs more memory than the arena has, new memory is allocated. The old addresses
        are then invalid, so the functions of all other plans are dropped.
        """
        with lasting():
            is_mapped = plan.symmetric is not None
            has_room = self._buffer is not None and self.nbytes >= plan.nbytes
            if not has_room or (is_mapped and not self._is_mapped):
                # Views of the smaller buffer, and graphs with its address, would keep it alive.
                self.clear()
                self._buffer = plan.memory(with_room(plan.nbytes))
                self._is_mapped = is_mapped
            assert self._buffer is not None
            if len(self.bound) >= MAX_BOUND:
                self.release(next(iter(self.bound)))
            found = self.bound[plan] = plan.bind(self._buffer, self)
        return found

    def release(self, plan: Plan) -> None:
        """Drops the functions with addresses in this arena that were made from the recorded steps
        of `plan`, with their CUDA graphs.
        """
        if (bound := self.bound.pop(plan, None)) is not None:
            bound.release()

    def abandon(self) -> None:
        """Drops the functions of all plans (recorded steps) that use this memory, after an error.

        Work on the device may still be running, and may write to this memory, so no run may use it
        again.
        """
        for plan in list(self.bound):
            self.release(plan)

    def clear(self) -> None:
        """Frees the memory of this arena, and drops the functions of all plans (recorded steps)
        that use it.

        Call this method only while no run uses the arena.
        """
        self.abandon()
        self._buffer = None

    def is_too_large(self) -> bool:
        """Whether the arena's memory (for intermediates) is far larger than the programs that use
        it need, or no program uses it.
        """
        needed = with_room(max((plan.nbytes for plan in list(self.bound)), default=0))
        return not self.bound or self.nbytes - needed >= max(needed, MIN_SHRINK_NBYTES)


class Pool:
    """The arenas (memory of intermediates) of one device.

    A run takes an arena of its stream, and returns the arena when the run ends. A concurrent or
    nested run takes another arena. The number of arenas therefore depends on the concurrent runs,
    not on the number of programs. `spare` has the arenas that no run uses now, by raw stream
    handle.
    """

    def __init__(self) -> None:
        self.arenas: WeakSet[Arena] = WeakSet()
        self.spare: dict[int, list[Arena]] = {}

    def make(self, device: torch.device, stream: int) -> Arena:
        """Makes a new arena (memory of intermediates), which allocates memory when it is first
        used.

        When the run that uses the arena ends, the arena becomes available for other runs on
        `stream`, a raw handle.
        """
        self.spare.setdefault(stream, [])
        arena = Arena(device, stream)
        self.arenas.add(arena)
        return arena

    def exchange(self, arena: Arena, plan: Plan) -> Arena:
        """Exchanges `arena` for an unused arena of the same stream that already has functions for
        the recorded steps of `plan`. The functions need not be made again then.

        Returns `arena` itself if there is no such arena. An arena is memory for intermediates.
        """
        spare = self.spare[arena.stream]
        for other in list(spare):
            if plan in other.bound:
                with suppress(ValueError):  # another thread has taken it meanwhile
                    spare.remove(other)
                    spare.append(arena)
                    return other
        return arena

    def all_spare(self) -> list[Arena]:
        """Returns the arenas (memory of intermediates) of all streams that no run uses now."""
        return [arena for arenas in list(self.spare.values()) for arena in list(arenas)]

    def drop(self, arena: Arena) -> None:
        """Frees the memory of `arena`, a buffer for intermediates. Does nothing if a run uses the
        arena.
        """
        with suppress(ValueError):
            self.spare.get(arena.stream, []).remove(arena)
            arena.clear()

    def of(self, owner: object) -> list[Arena]:
        """Returns the arenas (memory of intermediates) that recorded programs of one evaluator use.

        `owner` is the object that identifies the evaluator (`Arenas.owner`).
        """
        return [a for a in list(self.arenas) if any(p.arenas.owner is owner for p in list(a.bound))]

    def leave(self, owner: object) -> None:
        """Drops the functions that an evaluator has left in this pool, after the evaluator was
        deleted.

        The functions were made from the recorded steps of the evaluator, and contain addresses in
        this pool. `owner` is the object that identifies the evaluator (`Arenas.owner`). Memory that
        no other program needs is freed, and so is memory that is now far too large.
        """
        for arena in self.of(owner):
            for plan in list(arena.bound):
                if plan.arenas.owner is owner:
                    arena.release(plan)
            if arena.is_too_large():
                self.drop(arena)

    @property
    def nbytes(self) -> int:
        """The size in bytes of all memory for intermediates in this pool, also of memory that a run
        uses now.
        """
        return sum(arena.nbytes for arena in list(self.arenas))


# The pools that all programs of a process share, by device. Each simulated rank has its own pools,
# because the ranks run concurrently, and a binding of one rank cannot be used by another rank.
_POOLS: dict[torch.device, Pool] = {}
_POOLS_OF_RANKS: WeakKeyDictionary[object, dict[torch.device, Pool]] = WeakKeyDictionary()


def shared_pools(rank: object | None) -> dict[torch.device, Pool]:
    """Returns the pools, one per device, in which programs share the memory of intermediates.

    All programs of a process share pools. With simulated ranks, the programs of each rank share
    pools, and `rank` identifies the rank.
    """
    return _POOLS if rank is None else _POOLS_OF_RANKS.setdefault(rank, {})


class Arenas:
    """The arenas (memory of intermediates) that the recorded programs of one evaluator use, on one
    device.

    The arenas are in a pool, which other evaluators may share. Two kinds of arenas are not returned
    to the pool after a run:

    - The arena of a failed run, because running work may still write to the arena.
    - The arena of a run that the caller captures in a CUDA graph. The buffer is in the graph's
      memory, and each launch of the graph writes to the buffer.
    """

    def __init__(
        self,
        device: torch.device,
        why_not: str = "",
        pools: dict[torch.device, Pool] | None = None,
    ) -> None:
        """Takes arenas (memory of intermediates) from the pool of `device` in `pools`, or from a
        new pool of this evaluator if `pools` is None.

        `why_not` is the reason why no CUDA graph may repeat the evaluator's runs; "" if graphs may.
        """
        self.device = device
        self.why_not = why_not
        self._is_capturing = capturing_on(device)
        self.pools = pools
        self.pool = Pool() if pools is None else pools.setdefault(device, Pool())
        self._spare = self.pool.spare
        # Identifies the plans of this evaluator among those in a shared pool.
        self.owner = object()

    def take(self, stream: int, plan: Plan | None = None) -> Arena:
        """Takes an arena (memory of intermediates) for a run that begins on `stream`, a raw handle.

        `give` returns the arena after the run. If `plan` is given, an arena that already has
        functions for its recorded steps is preferred. If no arena is unused, a new one is made.
        """
        if self._is_capturing is not None and self._is_capturing(stream):
            return Arena(self.device, stream, is_captured=True)
        try:
            arena = self._spare[stream].pop()  # atomic, so that threads need no lock
        except (KeyError, IndexError):
            return self.pool.make(self.device, stream)
        return arena if plan is None else self.exchange(arena, plan)

    def exchange(self, arena: Arena, plan: Plan) -> Arena:
        """Exchanges a run's `arena` (memory of intermediates) for an unused one that already has
        functions for the recorded steps of `plan`.

        Returns `arena` itself if there is no such arena.
        """
        if arena.is_captured or plan in arena.bound:
            return arena
        return self.pool.exchange(arena, plan)

    def give(self, arena: Arena) -> None:
        """Returns `arena` (memory of intermediates) to the pool after a run, so that later runs can
        take it. At most `MAX_SPARE` arenas per stream are kept.
        """
        if not arena.is_captured:
            spare = self._spare[arena.stream]
            if len(spare) < MAX_SPARE:
                spare.append(arena)

    def spare(self, stream: int) -> list[Arena]:
        """Returns the arenas (memory of intermediates) of `stream` that no run uses now. The method
        `take` takes the last one.
        """
        return self.pool.spare.setdefault(stream, [])

    def bound(self, plan: Plan) -> list[BoundPlan]:
        """Returns the functions that were made from the recorded steps of `plan`, as one object per
        arena (memory of intermediates) that no run uses now.
        """
        return [arena.bound[plan] for arena in self.pool.all_spare() if plan in arena.bound]

    def forget(self, plan: Plan) -> None:
        """Drops the functions that were made from the recorded steps of `plan`, in all arenas
        (memory of intermediates) that no run uses now.

        The caller expects that the plan will hardly run again.
        """
        for arena in self.pool.all_spare():
            arena.release(plan)

    def arenas(self) -> list[Arena]:
        """Returns the arenas (memory of intermediates) that recorded programs of this evaluator
        use.
        """
        return self.pool.of(self.owner)


@dataclass(frozen=True)
class Memory:
    """The memory that a definition keeps between its runs, in bytes.

    - `needed`: the intermediates of one run. If runs had inputs of several sizes, this is the
      largest number among them.
    - `shared`: the buffers that store intermediates and that other programs use, too. There is one
      buffer per stream and device, or several if runs on one stream are concurrent.
    - `own`: the buffers that only this definition uses, because other ranks map its memory.
    - `graphs`: memory kept for kernels in CUDA graphs that the caller captures.
    - `total`: all shared buffers of the process, or of the simulated rank.
    """

    needed: int = 0
    shared: int = 0
    own: int = 0
    graphs: int = 0
    total: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{name} {_bytes_text(value)}" for name, value in vars(self).items())


def _bytes_text(nbytes: int) -> str:
    """Returns a number of bytes as text: `12.5 MiB`, or `640 bytes` below one MiB."""
    return f"{nbytes / _MIB:.1f} MiB" if nbytes >= _MIB else f"{nbytes} bytes"


def memory_of(arenas: Iterable[Arenas], plans: Iterable[Plan]) -> Memory:
    """Returns how much memory some evaluators, which run one host program each, keep between runs.

    `arenas` has the memory of intermediates of each evaluator, one object per device. `plans` are
    the recorded steps of all evaluators.
    """
    kept = list(arenas)
    shared = {arena for each in kept if each.pools is not None for arena in each.arenas()}
    pools = {pool for each in kept for pool in (each.pools or {}).values()}
    return Memory(
        needed=max((plan.nbytes for plan in plans), default=0),
        shared=sum(arena.nbytes for arena in shared),
        own=sum(each.pool.nbytes for each in kept if each.pools is None),
        graphs=sum(map(graph_memory_nbytes, {each.device for each in kept})),
        total=sum(pool.nbytes for pool in pools),
    )
