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
    """A buffer of a plan: slot, shape, strides in elements, dtype, and byte offset in the arena."""

    slot: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """The number of bytes from the first element to the end of the last; 0 without elements."""
        return spanned(self.shape, self.strides) * self.dtype.itemsize

    def at(self, offset: int) -> Block:
        """Returns a copy of this description with another offset, in bytes."""
        return Block(self.slot, self.shape, self.strides, self.dtype, offset)

    def view(self, arena: torch.Tensor) -> torch.Tensor:
        """Returns this buffer as a view of `arena`, which is a 1-d tensor of the buffer's dtype."""
        return arena.as_strided(self.shape, self.strides, self.offset // self.dtype.itemsize)


@dataclass(frozen=True, eq=False)
class PlannedBuffer:
    """A buffer that a program allocates, with the lifetime of the buffer.

    `lies_in_order` is whether memory has the axes in their logical order. `lifetime` is None if the
    buffer is still used after the run or is never allocated.
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
    """The context in which steps are bound.

    `stream` is the raw handle of the stream on which runs begin. `fixed` has the tensors of the
    slots that have the same tensor in all runs.
    """

    device: torch.device
    stream: int
    fixed: dict[int, torch.Tensor]
    # Objects that launches point to. These objects must live as long as the closures.
    kept: list[object] = field(default_factory=list[object])
    # The closures that only launch a kernel.
    launches: dict[Closure, BoundKernel] = field(default_factory=dict[Closure, Any])

    def raw(self, stream: int | None) -> int:
        """Returns the raw handle `stream`; None stands for the stream on which runs begin."""
        return self.stream if stream is None else stream

    def view(self, source: int, out: int, view: Closure, nbytes: int) -> Closure:
        """Returns `view`, the closure that makes slot `out` a view of slot `source`.

        The view begins `nbytes` bytes after the start of the source. This class ignores these
        numbers. A subclass uses the numbers to compute the view's address in a CUDA graph.
        """
        del source, out, nbytes
        return view

    def launch(self, kernel: BoundKernel) -> Closure:
        """Returns the closure that launches `kernel`, and records the closure in `launches`."""
        closure = kernel.closure()
        self.launches[closure] = kernel
        return closure

    def reader(self, slot: int) -> Callable[[Slots], torch.Tensor]:
        """Returns a function that takes the slots of a run and returns the tensor in `slot`."""
        if slot in self.fixed:
            tensor = self.fixed[slot]
            return lambda slots: tensor
        return lambda slots: slots[slot]

    def address(self, slot: int) -> Callable[[Slots], int]:
        """Returns a function that takes the slots of a run and returns a tensor's address.

        The tensor is the one in `slot`. The address is 0 if `slot` is -1.
        """
        if slot < 0 or slot in self.fixed:
            found = 0 if slot < 0 else self.fixed[slot].data_ptr()
            return lambda slots: found
        return lambda slots: slots[slot].data_ptr()


class BoundKernel(NamedTuple):
    """A kernel launch with packed arguments.

    A run only writes into the arguments the tensor addresses that may change (`moving`) and the
    scalars that may change (`read`, `writers`). `fail` raises the error for a status of the driver.
    """

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
        """Returns the kernel's scalars in a run; None if no scalar changes between runs."""
        return None if self.read is None else self.read(slots)

    def write_numbers(self, slots: Slots) -> None:
        """Writes the scalars of a run, and values computed from them, into the argument words."""
        if self.read is not None:
            values, words = self.read(slots), self.call.words
            for write, offset, value_for in self.writers:
                write(words, offset, value_for(values))


class Step(Protocol):
    """One step of a plan; `str(step)` is the kind of step and the number of operands."""

    def bind(self, binding: Binding) -> Closure | None:
        """Returns the function that carries out the step in a run.

        Returns None if a run has nothing to do for this step.
        """
        ...


@dataclass(frozen=True, eq=False)
class Action:
    """A step that calls the function `run` with the slots, whatever the arena and the stream.

    `operands` is the number of tensors that `run` works on, for the text of the step. None leaves
    the number out.
    """

    run: Closure
    operands: int | None = None

    def __str__(self) -> str:
        return "Action" if self.operands is None else f"Action of {self.operands}"

    def bind(self, binding: Binding) -> Closure:
        """Returns the function `run`, which does not depend on the binding."""
        return self.run


class TwoPhaseStep:
    """Work whose first run differs from later runs.

    The first run calls `first`. Then `make_later` makes the step `later`, which all later runs use.
    Examples are a communication that a backend binds after the first start, and a kernel launch
    that is looked up once.
    """

    def __init__(
        self, first: Closure, later_step: Callable[[Slots], Step], text: str = "Started"
    ) -> None:
        """`later_step` returns the step of later runs, from the slots on which `first` has run.

        `text` names the step in a plan's description.
        """
        self.first, self._later_step, self._text = first, later_step, text
        self.later: Step | None = None

    def __str__(self) -> str:
        return self._text

    def make_later(self, slots: Slots) -> Step:
        """Makes the step of later runs, stores the step in `later` and returns the step."""
        self.later = self._later_step(slots)
        return self.later

    def bind(self, binding: Binding) -> Closure:
        """Returns a function that runs `first` and then makes the later step."""

        def run(slots: Slots) -> None:
            self.first(slots)
            self.make_later(slots)

        return run


class Allocation(NamedTuple):
    """The allocation of a buffer outside the arena: `run` stores the new buffer in its slot."""

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

    `symmetric` is a function (bytes -> memory) for memory that peers can map; the default is
    `machine.symmetric`. When the allocation runs, it raises `OutOfMemoryError` if memory is short.
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
    """The step that allocates the buffer of `slot`, unless the buffer is stored in the arena."""

    slot: int
    make: Closure

    def __str__(self) -> str:
        return "Make"

    def bind(self, binding: Binding) -> Closure | None:
        """Returns the function that allocates the buffer; None if the arena stores the buffer."""
        return None if self.slot in binding.fixed else self.make


@dataclass(frozen=True, eq=False)
class Both:
    """A step that runs two steps of one op, one after the other."""

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
    """The step that drops the tensor in `slot`, unless the tensor is stored in the arena."""

    slot: int

    def __str__(self) -> str:
        return "Release"

    def bind(self, binding: Binding) -> Closure | None:
        """Returns the function that drops the tensor; None if the arena stores the tensor."""
        i = self.slot
        if i in binding.fixed:
            return None

        def release(slots: Slots) -> None:
            slots[i] = None

        return release


class View(NamedTuple):
    """The step that makes slot `out` a view of the tensor in slot `source`.

    The view has the given shape and strides, and begins `shift` elements after the source's start.
    """

    source: int
    out: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    shift: int
    itemsize: int

    def __str__(self) -> str:
        return "View"

    def of(self, source: torch.Tensor) -> torch.Tensor:
        """Returns the view that this step makes, for the tensor `source`."""
        x = source.detach() if source.requires_grad else source
        if self.shift:
            return x.as_strided(self.shape, self.strides, x.storage_offset() + self.shift)
        return x.as_strided(self.shape, self.strides)

    def bind(self, binding: Binding) -> Closure | None:
        """Returns the function that makes the view in a run.

        If all runs have the same source tensor, makes the view now and returns None.
        """
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
    """Returns `x`, detached if `x` requires a gradient: no result of a program requires one."""
    return x.detach() if x.requires_grad else x


class Multiply(NamedTuple):
    """The step by which torch computes a matrix product into the buffer in slot `out`.

    `ins` are the slots of the operands.
    """

    product: Product
    ins: tuple[int, ...]
    out: int

    def __str__(self) -> str:
        return f"Multiply of {len(self.ins) + 1}"

    def run(self, slots: Slots) -> None:
        """Computes the product of the tensors in `slots`, without a binding."""
        self.product([slots[i] for i in self.ins], slots[self.out])

    def bind(self, binding: Binding) -> Closure:
        """Returns the function that calls torch in a run.

        Views of tensors that are the same in all runs are made now, not in each run.
        """
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
        """Whether torch's call takes the operands and the result directly, without views."""
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
    """Returns a text such as `Collective of 2`, for slots of operand and result; -1 is no slot."""
    return f"Collective of {(inp >= 0) + (out >= 0)}"


@dataclass(frozen=True, eq=False)
class CollectiveStep:
    """The step that starts a collective which the backend has bound.

    A run only passes the addresses of the buffers. `inp` and `out` are the slots of operand and
    result; a slot is -1 if this rank has no such buffer. `work` is the slot that gets the handle
    for the `Wait`.
    """

    post: Post
    inp: int
    out: int
    work: int
    stream: int | None

    def __str__(self) -> str:
        return collective_text(self.inp, self.out)

    def bind(self, binding: Binding) -> Closure:
        """Returns the function that starts the collective on the buffers of a run."""
        post, work = self.post, self.work
        stream = binding.raw(self.stream)
        out, inp = binding.address(self.out), binding.address(self.inp)

        def start(slots: Slots) -> None:
            slots[work] = post(out(slots), inp(slots), stream)

        return start


@dataclass(frozen=True, eq=False)
class ExchangeStep:
    """The step that starts a group of sends and receives which the backend has bound.

    `buffers` are the slots of the transferred tensors, in order. `work` is the slot that gets the
    handle for the `Wait`.
    """

    post: PostBatch
    buffers: tuple[int, ...]
    work: int
    stream: int | None

    def __str__(self) -> str:
        return f"Exchange of {len(self.buffers)}"

    def bind(self, binding: Binding) -> Closure:
        """Returns the function that starts the transfers on the buffers of a run."""
        post, work = self.post, self.work
        stream = binding.raw(self.stream)
        addresses = [binding.address(slot) for slot in self.buffers]

        def start(slots: Slots) -> None:
            slots[work] = post([address(slots) for address in addresses], stream)

        return start


class LaunchStep(NamedTuple):
    """The step that launches a kernel on the tensors in the slots `operands`.

    The slots are in the order of the kernel's parameters. All runs of a plan have the same shapes,
    strides and alignments. Only the addresses of tensors outside the arena and some scalars change.

    - `numbers`: the scalar operands when the step was made.
    - `read`: a function that returns the scalar operands of a run; None if no scalar ever changes.
    - `stream`: the raw handle of a stream of the program, or None for the stream on which runs
      begin.
    """

    kernel: KernelLaunch
    operands: tuple[int, ...]
    numbers: tuple[Number, ...]
    read: Callable[[Slots], Sequence[Number]] | None
    stream: int | None

    def __str__(self) -> str:
        return f"Launch of {len(self.operands)}"

    def bind(self, binding: Binding) -> Closure:
        """Packs the kernel's arguments and returns the function that launches the kernel."""
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
    """Returns the profiler range for a launch of a CUDA graph that carries out `ops`."""
    lines = [op.where for op in ops if op is not None]
    return range_named(f"CUDA graph of {len(ops)} step{'s' * (len(ops) != 1)}{_at(lines)}")


def title(op: Op, program: HostIrContainer) -> str:
    """Returns the name of an op in a profile: `relu at model.py:12`.

    The name of a kernel lists the tensor ops that the kernel computes, and the lines of the ops.
    """
    if not isinstance(op, LaunchKernel):
        return f"{op.name}{_at([op.where])}"
    exprs = program.groups[op.group].fusion.exprs
    named = [e for e in exprs if not isinstance(e, BroadcastOp | CastOp)] or exprs
    names = list(dict.fromkeys(e.name for e in named))
    more = f" and {len(names) - _MAX_NAMES} more" * (len(names) > _MAX_NAMES)
    return f"kernel {', '.join(names[:_MAX_NAMES])}{more}{_at([e.where for e in named])}"


def _at(lines: Sequence[str]) -> str:
    """Returns a text such as ` at model.py:7, :8, other.py:3` for lines of the user's code."""
    shown: list[str] = []
    last = ""
    for line in dict.fromkeys(filter(None, lines)):
        file, _, number = line.rpartition(":")
        shown.append(f":{number}" if file == last else line)
        last = file
    return f" at {', '.join(shown)}" if shown else ""


# ----------------------------------------------------------------------
# Views of the shards of several ranks, mapped one after the other in virtual memory. All ranks of
# the team take part when such a view is made and when it ends.


def show_shards(
    op: SymmetricContiguousView,
    machine: ExecutionContext,
    shard: torch.Tensor,
    shape: Sequence[int],
) -> torch.Tensor:
    """Maps the shards of all ranks as one tensor with this shape; `shard` is this rank's shard.

    Waits until all ranks of the team have called this. If the shards cannot be mapped as one
    tensor, raises `UnsupportedError` or `CommunicationError` on all ranks, with op, tensor and user
    line.
    """
    peers, team, what = _where(op, machine)
    if not shard.is_contiguous():
        raise UnsupportedError(
            f"{what}: shards of shape {tuple(shard.shape)} with strides {shard.stride()} are not "
            "dense: allocate them row-major, in the order of their axes"
        )
    return peers.side_by_side(shard, team, what).view(shard.dtype).view(tuple(shape))


def meet_at(op: SymmetricContiguousView, machine: ExecutionContext) -> None:
    """Waits until all ranks of the team have reached the end of the view that `op` made."""
    peers, team, what = _where(op, machine)
    peers.rendezvous(team, what)


def shows_shards(
    op: SymmetricContiguousView,
    machine: ExecutionContext,
    inp: int,
    out: int,
    shape: tuple[int, ...],
) -> Action:
    """Returns the step that maps the shards of all ranks as one tensor, in slot `out`.

    This rank's shard is in slot `inp`. `shape` is the shape of the whole tensor.
    """

    def show(slots: Slots) -> None:
        slots[out] = show_shards(op, machine, slots[inp], shape)

    return Action(show)


def meets_at(op: SymmetricContiguousView, machine: ExecutionContext) -> Action:
    """Returns the step that waits for all ranks at the end of the view that `op` made."""
    return Action(lambda slots: meet_at(op, machine))


def _where(op: SymmetricContiguousView, machine: ExecutionContext) -> tuple[PeerMemory, Team, str]:
    assert op.team is not None, "a view of one rank's shards has no team"
    peers = cast("PeerMemory", machine.backend(PEER_COPIES))
    return peers, op.team.ranks(machine.rank), f"{op.name} of {op.inp.label}{user_code(op.where)}"


# ----------------------------------------------------------------------
# `FUSER_DUMP=communication`: a line for each communication when it is posted.

Find = Callable[[TensorView], torch.Tensor | None]


def announcer(op: Op, machine: ExecutionContext) -> Callable[[Find], None] | None:
    """Returns a function that writes a dump line when the communication `op` is started.

    The argument of that function maps a tensor to this rank's shard, or to None. The line names the
    library if another library than the op's carries out the communication. Returns None if `op`
    starts no communication or the user did not ask for this dump. A plan decides this once, when
    the plan is recorded.
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
