"""The steps of a recorded program, as data; each is bound once to an arena and a stream.

    step -- bind(binding) --> closure, which takes the slots of a run

A step works on *slots*: the numbers of tensors and other values of one run. A slot is *fixed* if
all runs with one binding have the same tensor in it. Such tensors are buffers in the arena and
their views. A view of a fixed slot is made when the step is bound, so it takes no time in a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast
from weakref import WeakKeyDictionary

import torch

from fuser.ir.fusion import TensorView
from fuser.ir.op import Op, op_text
from fuser.ir.ops.nodes import BroadcastOp, CastOp
from fuser.ir.scalar.constructors import Number
from fuser.ir.types import MemoryType
from fuser.ops.reference.matmul_calls import Product, ViewOf
from fuser.support import dumps
from fuser.support.errors import KernelError, UnsupportedError, user_code
from fuser.support.torch_calls import EmptyStrided, empty_on, range_named
from hostir.analysis.clocks import Lifetime
from hostir.ir.ops import PEER_COPIES, LaunchKernel, StartsCommunication, SymmetricContiguousView
from hostir.ir.program import HostIrContainer
from hostir.ir.shard_layout import spanned
from hostir.runtime.frame import ExecutionContext, new_buffer, no_memory
from multidevice.coordination.bounded_wait import Team
from multidevice.transports.base.protocol import PeerMemory, Post, PostBatch

if TYPE_CHECKING:
    from fuser.kernels.executor import KernelLaunch
    from fuser.runtime.compiled_kernel import LaunchCall

Slots = list[Any]
Closure = Callable[[Slots], object]


class Block(NamedTuple):
    """A buffer of a plan: its slot, layout and dtype, and its offset in the arena in bytes."""

    slot: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes from the first to past the last element; 0 without elements."""
        return spanned(self.shape, self.strides) * self.dtype.itemsize

    def at(self, offset: int) -> Block:
        """Returns this buffer at an offset in bytes."""
        return Block(self.slot, self.shape, self.strides, self.dtype, offset)

    def view(self, arena: torch.Tensor) -> torch.Tensor:
        """Returns the tensor in `arena`, a tensor of this buffer's dtype over all of the arena."""
        return arena.as_strided(self.shape, self.strides, self.offset // self.dtype.itemsize)


@dataclass(frozen=True, eq=False)
class PlannedBuffer:
    """A buffer that a program allocates, with its lifetime.

    `lifetime` is None for a buffer that outlives the run, and for one that is never allocated.
    """

    tv: TensorView
    slot: int
    dtype: torch.dtype
    lies_in_order: bool
    lifetime: Lifetime | None
    # Whether the result that torch computes replaces the buffer, so that it is not allocated.
    is_never_made: bool = False


@dataclass(frozen=True)
class Binding:
    """The context in which steps are bound: the runs' stream and the tensors of fixed slots."""

    device: torch.device
    stream: int
    fixed: dict[int, torch.Tensor]
    # Objects that launches point to; they must live as long as the closures.
    kept: list[object] = field(default_factory=list[object])
    # The closures that only launch a kernel.
    launches: dict[Closure, BoundKernel] = field(default_factory=dict[Closure, Any])

    def raw(self, stream: int | None) -> int:
        """Returns a stream's raw handle; None stands for the stream on which runs begin."""
        return self.stream if stream is None else stream

    def view(self, source: int, out: int, view: Closure, nbytes: int) -> Closure:
        """Returns the closure of a view that begins `nbytes` after the start of slot `source`.

        A subclass may note the view: a CUDA graph computes its address without running it.
        """
        del source, out, nbytes
        return view

    def launch(self, kernel: BoundKernel) -> Closure:
        """Returns the closure of a launch, and notes that it only launches a kernel."""
        closure = kernel.closure()
        self.launches[closure] = kernel
        return closure

    def reader(self, slot: int) -> Callable[[Slots], torch.Tensor]:
        """Returns a function that reads the tensor of a slot."""
        if slot in self.fixed:
            tensor = self.fixed[slot]
            return lambda slots: tensor
        return lambda slots: slots[slot]

    def address(self, slot: int) -> Callable[[Slots], int]:
        """Returns a function that returns the address of a slot's tensor; 0 for slot -1."""
        if slot < 0 or slot in self.fixed:
            found = 0 if slot < 0 else self.fixed[slot].data_ptr()
            return lambda slots: found
        return lambda slots: slots[slot].data_ptr()


class BoundKernel(NamedTuple):
    """A launch with packed arguments; a run writes only the addresses of slots not fixed."""

    call: LaunchCall
    # (parameter, slot)
    moving: tuple[tuple[int, int], ...]
    # Reads the scalars of a run, if they may change; and the functions that write them, or values
    # computed from them, into the argument words.
    read: Callable[[Slots], Sequence[Number]] | None
    writers: Sequence[tuple[Callable[..., None], int, Callable[[Sequence[Number]], Number]]]
    stream: int
    fail: Callable[[int], None]

    def closure(self) -> Closure:
        """Returns the function that launches the kernel on the tensors of a run."""
        words, function, arguments = self.call.words, self.call.function, self.call.arguments
        moving, fail = self.moving, self.fail

        def run(slots: Slots) -> None:
            for param, slot in moving:
                words[param] = slots[slot].data_ptr()
            status = function(*arguments)
            if status:
                fail(status)

        if self.read is None:
            return run

        def run_with_numbers(slots: Slots) -> None:
            self.write_numbers(slots)
            run(slots)

        return run_with_numbers

    def numbers(self, slots: Slots) -> Sequence[Number] | None:
        """Returns the scalars of a run; None if the input class fixes them."""
        return None if self.read is None else self.read(slots)

    def write_numbers(self, slots: Slots) -> None:
        """Writes the scalars of a run, and values computed from them, into the argument words."""
        if self.read is not None:
            values, words = self.read(slots), self.call.words
            for write, offset, value_for in self.writers:
                write(words, offset, value_for(values))


class Step(Protocol):
    """One step of a plan; `str(step)` is its kind and its number of operands."""

    def bind(self, binding: Binding) -> Closure | None:
        """Returns the function that does the step in a run; None if a run has nothing to do."""
        ...


@dataclass(frozen=True, eq=False)
class Action:
    """A step that is a plain function of the slots, with no use for a binding.

    `operands` is the number of tensors that a function for several ops works on.
    """

    run: Closure
    operands: int | None = None

    def __str__(self) -> str:
        return "Action" if self.operands is None else f"Action of {self.operands}"

    def bind(self, binding: Binding) -> Closure:
        """Returns the function itself."""
        return self.run


class TwoPhaseStep:
    """Work whose first run differs from later runs.

    Examples are a communication, which its backend binds after the first start, and a kernel whose
    launch is looked up once. The first run calls `first`. Then `make_later` makes the step `later`,
    which all later runs use.
    """

    def __init__(
        self, first: Closure, later_step: Callable[[Slots], Step], text: str = "Started"
    ) -> None:
        """`later_step` returns the step of later runs; it is called with the slots on which `first`
        has run. `text` names the step in a plan's description."""
        self.first, self._later_step, self._text = first, later_step, text
        self.later: Step | None = None

    def __str__(self) -> str:
        return self._text

    def make_later(self, slots: Slots) -> Step:
        """Makes `later`, the step of later runs, and returns it."""
        self.later = self._later_step(slots)
        return self.later

    def bind(self, binding: Binding) -> Closure:
        """Returns a function that runs `first` and then makes the later step."""

        def run(slots: Slots) -> None:
            self.first(slots)
            self.make_later(slots)

        return run


class Allocation(NamedTuple):
    """The allocation of a buffer outside the arena: `run` stores it in its slot."""

    run: Closure
    block: Block
    # torch's function of shape, strides and dtype that allocates it; None for memory of peers.
    empty: EmptyStrided | None


def allocation(
    tv: TensorView,
    block: Block,
    machine: ExecutionContext,
    program: HostIrContainer,
    symmetric: Callable[[int], torch.Tensor] | None = None,
) -> Allocation:
    """Returns the allocation of a tensor's buffer outside the arena.

    `symmetric` allocates memory that peers can map, by default `machine.symmetric`. The allocation
    raises `OutOfMemoryError` if there is no memory.
    """
    device, i, make = machine.device, block.slot, empty_on(machine.device)
    shape, strides, dtype = block.shape, block.strides, block.dtype

    def allocate(slots: Slots) -> None:
        try:
            slots[i] = make(shape, strides, dtype)
        except RuntimeError as error:
            raise no_memory(program, tv, shape, device) from error

    def allocate_symmetric(slots: Slots) -> None:
        slots[i] = new_buffer(program, tv, shape, device, symmetric or machine.symmetric)

    if tv.memory is MemoryType.symmetric:
        return Allocation(allocate_symmetric, block, None)
    return Allocation(allocate, block, make)


@dataclass(frozen=True, eq=False)
class Make:
    """Allocates the buffer of a slot, unless it is stored in the arena."""

    slot: int
    make: Closure

    def __str__(self) -> str:
        return "Make"

    def bind(self, binding: Binding) -> Closure | None:
        """Returns the allocation; None if the buffer is stored in the arena."""
        return None if self.slot in binding.fixed else self.make


@dataclass(frozen=True, eq=False)
class Both:
    """Two steps of one op, run one after the other."""

    first: Step
    second: Step

    def __str__(self) -> str:
        return f"{self.first} + {self.second}"

    def bind(self, binding: Binding) -> Closure | None:
        """Returns a function that runs both steps; None if neither has anything to do."""
        first, second = self.first.bind(binding), self.second.bind(binding)
        if first is None or second is None:
            return first or second

        def both(slots: Slots) -> None:
            first(slots)
            second(slots)

        return both


@dataclass(frozen=True, eq=False)
class Release:
    """Drops the tensor of a slot; a tensor in the arena needs no release."""

    slot: int

    def __str__(self) -> str:
        return "Release"

    def bind(self, binding: Binding) -> Closure | None:
        """Returns the release; None if the tensor is stored in the arena."""
        i = self.slot
        if i in binding.fixed:
            return None

        def release(slots: Slots) -> None:
            slots[i] = None

        return release


class View(NamedTuple):
    """Names a part of the memory of another slot; `shift` is its start, in elements."""

    source: int
    out: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    shift: int
    itemsize: int

    def __str__(self) -> str:
        return "View"

    def of(self, source: torch.Tensor) -> torch.Tensor:
        """Returns the view of the tensor `source`."""
        x = source.detach() if source.requires_grad else source
        if self.shift:
            return x.as_strided(self.shape, self.strides, x.storage_offset() + self.shift)
        return x.as_strided(self.shape, self.strides)

    def bind(self, binding: Binding) -> Closure | None:
        """Returns the function that makes the view; None if the source is fixed: it is made now."""
        i, o, shape, strides, shift = self.source, self.out, self.shape, self.strides, self.shift

        def view(slots: Slots) -> None:
            slots[o] = without_gradient(slots[i]).as_strided(shape, strides)

        def shifted_view(slots: Slots) -> None:
            x = without_gradient(slots[i])
            slots[o] = x.as_strided(shape, strides, x.storage_offset() + shift)

        if i not in binding.fixed:
            made = shifted_view if shift else view
            return binding.view(i, o, made, shift * self.itemsize)
        binding.fixed[o] = self.of(binding.fixed[i])
        return None


def without_gradient(x: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that requires no gradient; results of a program never do."""
    return x.detach() if x.requires_grad else x


class Multiply(NamedTuple):
    """A matrix product that torch computes into a buffer."""

    product: Product
    ins: tuple[int, ...]
    out: int

    def __str__(self) -> str:
        return f"Multiply of {len(self.ins) + 1}"

    def run(self, slots: Slots) -> None:
        """Computes the product without a binding, on the tensors in these slots."""
        self.product([slots[i] for i in self.ins], slots[self.out])

    def bind(self, binding: Binding) -> Closure:
        """Returns torch's call, with views of fixed tensors made now."""
        function, product = self.product.function, self.product
        if all(i not in binding.fixed for i in (*self.ins, self.out)) and self._is_plain():
            return self._without_views()
        reads = [_viewed(binding, self.ins[i], view) for i, view in product.operands]
        write = _viewed(binding, self.out, product.result)
        if len(reads) == 2:
            left, right = reads
            return lambda slots: function(left(slots), right(slots), out=write(slots))
        return lambda slots: function(*[read(slots) for read in reads], out=write(slots))

    def _is_plain(self) -> bool:
        """Whether torch's call takes the operands and the result themselves, not views of them."""
        views = (*(view for _, view in self.product.operands), self.product.result)
        return all(view is None for view in views)

    def _without_views(self) -> Closure:
        function, out = self.product.function, self.out
        ins = [self.ins[i] for i, _ in self.product.operands]
        if len(ins) == 2:
            a, b = ins
            return lambda slots: function(slots[a], slots[b], out=slots[out])
        return lambda slots: function(*[slots[i] for i in ins], out=slots[out])


def _viewed(binding: Binding, slot: int, view: ViewOf | None) -> Callable[[Slots], torch.Tensor]:
    if view is None:
        return binding.reader(slot)
    if slot in binding.fixed:
        tensor = view(binding.fixed[slot])
        return lambda slots: tensor
    return lambda slots: view(slots[slot])


def collective_text(inp: int, out: int) -> str:
    """Returns the text of the step that starts a collective on the buffers of these slots."""
    return f"Collective of {(inp >= 0) + (out >= 0)}"


@dataclass(frozen=True, eq=False)
class CollectiveStep:
    """A collective that its backend has bound: a run only passes the addresses of its buffers.

    `inp` and `out` are slots, -1 for a buffer that this rank lacks. The shards have the layout that
    the program declares.
    """

    post: Post
    inp: int
    out: int
    work: int
    stream: int | None

    def __str__(self) -> str:
        return collective_text(self.inp, self.out)

    def bind(self, binding: Binding) -> Closure:
        """Returns the function that starts the collective on the addresses of a run."""
        post, work = self.post, self.work
        stream = binding.raw(self.stream)
        out, inp = binding.address(self.out), binding.address(self.inp)

        def start(slots: Slots) -> None:
            slots[work] = post(out(slots), inp(slots), stream)

        return start


@dataclass(frozen=True, eq=False)
class ExchangeStep:
    """A group of sends and receives, in this order, that their backend has bound."""

    post: PostBatch
    buffers: tuple[int, ...]
    work: int
    stream: int | None

    def __str__(self) -> str:
        return f"Exchange of {len(self.buffers)}"

    def bind(self, binding: Binding) -> Closure:
        """Returns the function that starts the transfers on the addresses of a run."""
        post, work = self.post, self.work
        stream = binding.raw(self.stream)
        addresses = [binding.address(slot) for slot in self.buffers]

        def start(slots: Slots) -> None:
            slots[work] = post([address(slots) for address in addresses], stream)

        return start


class LaunchStep(NamedTuple):
    """The launch of a kernel on the tensors of slots, in the order of the kernel's parameters.

    The input class of the plan fixes shapes, strides and alignments. Of the packed arguments, only
    the addresses of slots that are not fixed change between runs.

    - `numbers`: the scalar inputs; `read` returns those of a run if they may change, else None.
    - `stream`: the raw handle of a stream of the program; None for that on which runs begin.
    """

    kernel: KernelLaunch
    operands: tuple[int, ...]
    numbers: tuple[Number, ...]
    read: Callable[[Slots], Sequence[Number]] | None
    stream: int | None

    def __str__(self) -> str:
        return f"Launch of {len(self.operands)}"

    def bind(self, binding: Binding) -> Closure:
        """Packs the arguments of the launch and returns the function that launches."""
        kernel, launch = self.kernel.kernel, self.kernel.launch
        memories = launch.make_memories(binding.device)
        prepared, moving = launch.prepare(
            kernel, self.operands, binding.fixed, self.numbers, memories
        )
        stream = binding.raw(self.stream)
        call = prepared.bind(stream)
        binding.kept.append((prepared, call, memories))

        def fail(status: int) -> None:
            try:
                call.fail(status)
            except KernelError as error:
                raise self.kernel.explain(error) from None

        writers = () if self.read is None else launch.number_writers(kernel)
        return binding.launch(BoundKernel(call, moving, self.read, writers, stream, fail))


# ----------------------------------------------------------------------
# Ranges of torch.profiler: one for each op of a host program, with its name and the user's line.
#
# They are made only while a profiler runs; a flag in a module of torch says so. The compiled runner
# makes no ranges, so calls under a profiler take the Python path. A CUDA graph is one range.

_MAX_NAMES = 12
_TITLES: WeakKeyDictionary[HostIrContainer, dict[Op, str]] = WeakKeyDictionary()


def range_of(op: Op, program: HostIrContainer) -> AbstractContextManager[object]:
    """Returns the profiler range of an op, as a context in which the op runs."""
    titles = _TITLES.setdefault(program, {})
    found = titles.get(op)
    if found is None:
        found = titles[op] = title(op, program)
    return range_named(found)


def range_of_graph(ops: Sequence[Op | None]) -> AbstractContextManager[object]:
    """Returns the profiler range of the launch of a CUDA graph that carries out these ops."""
    lines = [op.where for op in ops if op is not None]
    return range_named(f"CUDA graph of {len(ops)} step{'s' * (len(ops) != 1)}{_at(lines)}")


def title(op: Op, program: HostIrContainer) -> str:
    """Returns the name of an op in a profile: `relu at model.py:12`.

    The name of a kernel lists the ops that it computes, and their lines.
    """
    if not isinstance(op, LaunchKernel):
        return f"{op.name}{_at([op.where])}"
    exprs = program.groups[op.group].fusion.exprs
    named = [e for e in exprs if not isinstance(e, BroadcastOp | CastOp)] or exprs
    names = list(dict.fromkeys(e.name for e in named))
    more = f" and {len(names) - _MAX_NAMES} more" * (len(names) > _MAX_NAMES)
    return f"kernel {', '.join(names[:_MAX_NAMES])}{more}{_at([e.where for e in named])}"


def _at(lines: Sequence[str]) -> str:
    """Returns ` at model.py:7, :8, other.py:3` for lines of users."""
    shown: list[str] = []
    last = ""
    for line in dict.fromkeys(filter(None, lines)):
        file, _, number = line.rpartition(":")
        shown.append(f":{number}" if file == last else line)
        last = file
    return f" at {', '.join(shown)}" if shown else ""


# ----------------------------------------------------------------------
# Views of the shards of several ranks, mapped one behind the other in virtual memory. All ranks of
# the team take part when such a view is made and when it ends.


def show_shards(
    op: SymmetricContiguousView,
    machine: ExecutionContext,
    shard: torch.Tensor,
    shape: Sequence[int],
) -> torch.Tensor:
    """Maps the shards of all ranks as one tensor; waits until all ranks of the team take part.

    Raises `UnsupportedError` or `CommunicationError` on all ranks, with op, tensor and user line,
    if the shards cannot be mapped like this.
    """
    peers, team, what = _where(op, machine)
    if not shard.is_contiguous():
        raise UnsupportedError(
            f"{what}: shards of shape {tuple(shard.shape)} with strides {shard.stride()} are not "
            "dense: allocate them row-major, in the order of their axes"
        )
    return peers.side_by_side(shard, team, what).view(shard.dtype).view(tuple(shape))


def meet_at(op: SymmetricContiguousView, machine: ExecutionContext) -> None:
    """Waits until all ranks of the team have reached the end of the view."""
    peers, team, what = _where(op, machine)
    peers.rendezvous(team, what)


def shows_shards(
    op: SymmetricContiguousView,
    machine: ExecutionContext,
    inp: int,
    out: int,
    shape: tuple[int, ...],
) -> Action:
    """Returns the step that maps the shards of all ranks; this rank's shard is in slot `inp`."""

    def show(slots: Slots) -> None:
        slots[out] = show_shards(op, machine, slots[inp], shape)

    return Action(show)


def meets_at(op: SymmetricContiguousView, machine: ExecutionContext) -> Action:
    """Returns the step that waits for all ranks at the end of a view."""
    return Action(lambda slots: meet_at(op, machine))


def _where(op: SymmetricContiguousView, machine: ExecutionContext) -> tuple[PeerMemory, Team, str]:
    assert op.team is not None, "a view of one rank's shards has no team"
    peers = cast("PeerMemory", machine.backend(PEER_COPIES))
    return peers, op.team.ranks(machine.rank), f"{op.name} of {op.inp.label}{user_code(op.where)}"


# ----------------------------------------------------------------------
# `FUSER_DUMP=communication`: a line for each communication when it is posted.

Find = Callable[[TensorView], torch.Tensor | None]


def announcer(op: Op, machine: ExecutionContext) -> Callable[[Find], None] | None:
    """Returns a function that dumps a line when `op` is posted; it takes a finder of shards.

    The line names the library if it differs from the one that the op names. Returns None if the op
    posts nothing or the user asked for no dump. A recorded program decides this when it is
    recorded.
    """
    if not (isinstance(op, StartsCommunication) and (op.inputs or op.outputs)):
        return None
    write = dumps.lines("communication", "this process", rank=machine.rank)
    if write is None:
        return None
    names = {"operand": "input_tensor", "result": "output_tensor"}
    fields = [(names[kind], n) for kind in names for n in op.fields_of(kind)]  # pyright: ignore[reportArgumentType]
    tensors = [(what, tv) for what, n in fields if isinstance(tv := getattr(op, n), TensorView)]

    def announce(find: Find) -> None:
        found = [(what, find(tv)) for what, tv in tensors]
        sizes = (f"{what} {'none' if t is None else list(t.shape)}" for what, t in found)
        write(f"Posting {op_text(op)}{_carrier(op, machine)} with {' and '.join(sizes)}")

    return announce


def _carrier(op: StartsCommunication, machine: ExecutionContext) -> str:
    named = getattr(op, "backend", PEER_COPIES)
    library = named if named == PEER_COPIES else machine.backend(named).name.upper()
    return f", carried out by {library}," if library != named else ""
