"""The steps that a recorded program repeats, as data: each is bound to an arena and a stream, once.

A step works on *slots*: numbers of tensors and other values of one run. A slot is *fixed* where
every run that is bound alike has the same tensor in it: a buffer in the arena, or a view of one.
What only names fixed tensors is done when the step is bound, and costs a run nothing.
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
    """A buffer of a plan: where it lies in the arena, and how it is seen as a tensor."""

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
        """Returns this buffer in another place."""
        return Block(self.slot, self.shape, self.strides, self.dtype, offset)

    def view(self, arena: torch.Tensor) -> torch.Tensor:
        """Returns the tensor in an arena, seen as elements of its dtype."""
        return arena.as_strided(self.shape, self.strides, self.offset // self.dtype.itemsize)


@dataclass(frozen=True, eq=False)
class PlannedBuffer:
    """A buffer that a program allocates, and where in it the buffer is used: None if it lasts, or
    is never made."""

    tv: TensorView
    slot: int
    dtype: torch.dtype
    lies_in_order: bool
    lifetime: Lifetime | None
    # Whether what torch computes takes its place.
    is_never_made: bool = False


@dataclass(frozen=True)
class Binding:
    """The stream on which runs of a plan begin, and the tensors of its fixed slots."""

    device: torch.device
    stream: int
    fixed: dict[int, torch.Tensor]
    # Memory of launches: what they point to must live as long as they do.
    kept: list[object] = field(default_factory=list[object])
    # The closures that are launches and nothing else.
    launches: dict[Closure, BoundKernel] = field(default_factory=dict[Closure, Any])

    def raw(self, stream: int | None) -> int:
        """Returns the handle of a stream of the program; None is the one on which runs begin."""
        return self.stream if stream is None else stream

    def view(self, source: int, out: int, view: Closure, nbytes: int) -> Closure:
        """Returns the closure of a view that begins so many bytes behind another slot's tensor."""
        del source, out, nbytes
        return view

    def launch(self, kernel: BoundKernel) -> Closure:
        """Returns the closure of a launch."""
        closure = kernel.closure()
        self.launches[closure] = kernel
        return closure

    def reader(self, slot: int) -> Callable[[Slots], torch.Tensor]:
        """Returns how to read a slot."""
        if slot in self.fixed:
            tensor = self.fixed[slot]
            return lambda slots: tensor
        return lambda slots: slots[slot]

    def address(self, slot: int) -> Callable[[Slots], int]:
        """Returns how to find the address of a slot's tensor; 0 without a slot."""
        if slot < 0 or slot in self.fixed:
            found = 0 if slot < 0 else self.fixed[slot].data_ptr()
            return lambda slots: found
        return lambda slots: slots[slot].data_ptr()


class BoundKernel(NamedTuple):
    """A launch whose arguments are packed, but for the addresses of slots that are not fixed."""

    call: LaunchCall
    # (parameter, slot)
    moving: tuple[tuple[int, int], ...]
    # What reads a run's scalars, where they change, and what writes them into the words.
    read: Callable[[Slots], Sequence[Number]] | None
    writers: Sequence[tuple[Callable[..., None], int, Callable[[Sequence[Number]], Number]]]
    stream: int
    fail: Callable[[int], None]

    def closure(self) -> Closure:
        """Returns what launches on the tensors of a run."""
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
        """Returns the scalars of a run; None where they are those of the class."""
        return None if self.read is None else self.read(slots)

    def write_numbers(self, slots: Slots) -> None:
        """Puts what follows from the scalars of a run into the words."""
        if self.read is not None:
            values, words = self.read(slots), self.call.words
            for write, offset, value_for in self.writers:
                write(words, offset, value_for(values))


class Step(Protocol):
    """One action of a plan. Its text is its kind and the number of its operands."""

    def bind(self, binding: Binding) -> Closure | None:
        """Returns what carries the step out; None where nothing is left to do in a run."""
        ...


@dataclass(frozen=True, eq=False)
class Action:
    """A step that is the same however it is bound. `operands` counts the tensors that a closure for
    several ops works on, which no op tells."""

    run: Closure
    operands: int | None = None

    def __str__(self) -> str:
        return "Action" if self.operands is None else f"Action of {self.operands}"

    def bind(self, binding: Binding) -> Closure:
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
        def run(slots: Slots) -> None:
            self.first(slots)
            self.make_later(slots)

        return run


class Allocation(NamedTuple):
    """The making of a buffer in memory of its own."""

    run: Closure
    block: Block
    # What makes it of shape, strides and dtype; None for memory of another kind.
    empty: EmptyStrided | None


def allocation(
    tv: TensorView,
    block: Block,
    machine: ExecutionContext,
    program: HostIrContainer,
    symmetric: Callable[[int], torch.Tensor] | None = None,
) -> Allocation:
    """Returns what makes a buffer of a tensor in memory of its own; `symmetric` makes what peers
    can map, where it is not the machine's usual.

    Raises `OutOfMemoryError` where there is none.
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
    """Makes the buffer of a slot, unless that lies in the arena."""

    slot: int
    make: Closure

    def __str__(self) -> str:
        return "Make"

    def bind(self, binding: Binding) -> Closure | None:
        return None if self.slot in binding.fixed else self.make


@dataclass(frozen=True, eq=False)
class Both:
    """Two steps, one after the other."""

    first: Step
    second: Step

    def __str__(self) -> str:
        return f"{self.first} + {self.second}"

    def bind(self, binding: Binding) -> Closure | None:
        first, second = self.first.bind(binding), self.second.bind(binding)
        if first is None or second is None:
            return first or second

        def both(slots: Slots) -> None:
            first(slots)
            second(slots)

        return both


@dataclass(frozen=True, eq=False)
class Release:
    """Lets go of the tensor of a slot."""

    slot: int

    def __str__(self) -> str:
        return "Release"

    def bind(self, binding: Binding) -> Closure | None:
        i = self.slot
        if i in binding.fixed:
            return None

        def release(slots: Slots) -> None:
            slots[i] = None

        return release


class View(NamedTuple):
    """Names a place in the memory of another slot; `shift` counts elements from its first one."""

    source: int
    out: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    shift: int
    itemsize: int

    def __str__(self) -> str:
        return "View"

    def of(self, source: torch.Tensor) -> torch.Tensor:
        """Returns the place in the memory of a tensor."""
        x = source.detach() if source.requires_grad else source
        if self.shift:
            return x.as_strided(self.shape, self.strides, x.storage_offset() + self.shift)
        return x.as_strided(self.shape, self.strides)

    def bind(self, binding: Binding) -> Closure | None:
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
    """Returns a tensor whose views ask for no gradient, as results do not."""
    return x.detach() if x.requires_grad else x


class Multiply(NamedTuple):
    """A matrix product into a buffer."""

    product: Product
    ins: tuple[int, ...]
    out: int

    def __str__(self) -> str:
        return f"Multiply of {len(self.ins) + 1}"

    def run(self, slots: Slots) -> None:
        """Computes the product once, of the tensors in these slots."""
        self.product([slots[i] for i in self.ins], slots[self.out])

    def bind(self, binding: Binding) -> Closure:
        function, product = self.product.function, self.product
        if all(i not in binding.fixed for i in (*self.ins, self.out)) and self._is_plain():
            return self._of_tensors_as_they_are()
        reads = [_viewed(binding, self.ins[i], view) for i, view in product.operands]
        write = _viewed(binding, self.out, product.result)
        if len(reads) == 2:
            left, right = reads
            return lambda slots: function(left(slots), right(slots), out=write(slots))
        return lambda slots: function(*[read(slots) for read in reads], out=write(slots))

    def _is_plain(self) -> bool:
        """Whether operands and result are read as they are."""
        views = (*(view for _, view in self.product.operands), self.product.result)
        return all(view is None for view in views)

    def _of_tensors_as_they_are(self) -> Closure:
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
    """A communication that its backend has bound; -1 stands for a buffer that this rank lacks.

    Of a shard that lies in memory as the program declares it, only the address is needed.
    """

    post: Post
    inp: int
    out: int
    work: int
    stream: int | None

    def __str__(self) -> str:
        return collective_text(self.inp, self.out)

    def bind(self, binding: Binding) -> Closure:
        post, work = self.post, self.work
        stream = binding.raw(self.stream)
        out, inp = binding.address(self.out), binding.address(self.inp)

        def start(slots: Slots) -> None:
            slots[work] = post(out(slots), inp(slots), stream)

        return start


@dataclass(frozen=True, eq=False)
class ExchangeStep:
    """Sends and receives, in this order, that their backend has bound."""

    post: PostBatch
    buffers: tuple[int, ...]
    work: int
    stream: int | None

    def __str__(self) -> str:
        return f"Exchange of {len(self.buffers)}"

    def bind(self, binding: Binding) -> Closure:
        post, work = self.post, self.work
        stream = binding.raw(self.stream)
        addresses = [binding.address(slot) for slot in self.buffers]

        def start(slots: Slots) -> None:
            slots[work] = post([address(slots) for address in addresses], stream)

        return start


class LaunchStep(NamedTuple):
    """A kernel on the tensors of these slots, in the order that its launch counts them.

    The class of the plan decides shapes, strides and alignments, so that of all that is packed only
    addresses change, those of slots that are not fixed. `numbers` are the scalar inputs, and `read`
    gives those of a run where they change. `stream` is the raw handle of a stream of the program,
    None for the one on which runs begin.
    """

    kernel: KernelLaunch
    operands: tuple[int, ...]
    numbers: tuple[Number, ...]
    read: Callable[[Slots], Sequence[Number]] | None
    stream: int | None

    def __str__(self) -> str:
        return f"Launch of {len(self.operands)}"

    def bind(self, binding: Binding) -> Closure:
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
# They are made only while a profiler runs, which torch tells by a flag of a module. The compiled
# runner makes none: calls under a profiler take the readable path. A CUDA graph is one range.

_MAX_NAMES = 12
_TITLES: WeakKeyDictionary[HostIrContainer, dict[Op, str]] = WeakKeyDictionary()


def range_of(op: Op, program: HostIrContainer) -> AbstractContextManager[object]:
    """Returns the range in which an op of a program is carried out."""
    titles = _TITLES.setdefault(program, {})
    found = titles.get(op)
    if found is None:
        found = titles[op] = title(op, program)
    return range_named(found)


def range_of_graph(ops: Sequence[Op | None]) -> AbstractContextManager[object]:
    """Returns the range in which a CUDA graph is launched that carries out these ops."""
    lines = [op.where for op in ops if op is not None]
    return range_named(f"CUDA graph of {len(ops)} step{'s' * (len(ops) != 1)}{_at(lines)}")


def title(op: Op, program: HostIrContainer) -> str:
    """Returns what an op is called in a profile: `relu at model.py:12`; a kernel has the names of
    the ops that it computes, and their lines."""
    if not isinstance(op, LaunchKernel):
        return f"{op.name}{_at([op.where])}"
    exprs = program.groups[op.group].fusion.exprs
    told = [e for e in exprs if not isinstance(e, BroadcastOp | CastOp)] or exprs
    names = list(dict.fromkeys(e.name for e in told))
    more = f" and {len(names) - _MAX_NAMES} more" * (len(names) > _MAX_NAMES)
    return f"kernel {', '.join(names[:_MAX_NAMES])}{more}{_at([e.where for e in told])}"


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
# Views of the shards of several ranks: mapped back to back, where the ranks meet.


def show_shards(
    op: SymmetricContiguousView,
    machine: ExecutionContext,
    shard: torch.Tensor,
    shape: Sequence[int],
) -> torch.Tensor:
    """Returns the shards of all ranks as one tensor; returns when all have come.

    Raises `UnsupportedError` or `CommunicationError` on all ranks where they have none that can be
    mapped so, naming op, tensor and user line.
    """
    peers, team, what = _where(op, machine)
    if not shard.is_contiguous():
        raise UnsupportedError(
            f"{what}: shards of shape {tuple(shard.shape)} with strides {shard.stride()} are not "
            "dense: allocate them so, in the order of their axes"
        )
    return peers.side_by_side(shard, team, what).view(shard.dtype).view(tuple(shape))


def meet_at(op: SymmetricContiguousView, machine: ExecutionContext) -> None:
    """Returns when all ranks have come to where the view is given up."""
    peers, team, what = _where(op, machine)
    peers.rendezvous(team, what)


def shows_shards(
    op: SymmetricContiguousView,
    machine: ExecutionContext,
    inp: int,
    out: int,
    shape: tuple[int, ...],
) -> Action:
    """Returns the step that shows the shards of which this rank's is in slot `inp`."""

    def show(slots: Slots) -> None:
        slots[out] = show_shards(op, machine, slots[inp], shape)

    return Action(show)


def meets_at(op: SymmetricContiguousView, machine: ExecutionContext) -> Action:
    """Returns the step where ranks meet to give up a view."""
    return Action(lambda slots: meet_at(op, machine))


def _where(op: SymmetricContiguousView, machine: ExecutionContext) -> tuple[PeerMemory, Team, str]:
    assert op.team is not None, "one rank sees its shard as it is"
    peers = cast("PeerMemory", machine.backend(PEER_COPIES))
    return peers, op.team.ranks(machine.rank), f"{op.name} of {op.inp.label}{user_code(op.where)}"


# ----------------------------------------------------------------------
# `FUSER_DUMP=communication`: each communication when it is posted.

Find = Callable[[TensorView], torch.Tensor | None]


def announcer(op: Op, machine: ExecutionContext) -> Callable[[Find], None] | None:
    """Returns what writes down that `op` is posted, given what finds its shards.

    Where another library than the one that the op names carries it out, the line says which. None
    for an op that posts nothing, and where nobody asked; a recorded program asks once, when it is
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
