"""The recorded steps of a program: each object repeats one action, such as a kernel launch.

    step -- bind(binding) --> function, which takes the slots of a run

A *slot* is a position in the list of a run's values: tensors, scalars and communication handles. A
step knows the slots of its operands and results. Before runs, each step is bound once, that is,
turned into a function for one stream and one arena, the memory of intermediates. A slot is *fixed*
if it has the same tensor in all runs with one binding. A view of a fixed slot is made during
binding, so it takes no time in a run.
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
from fuser.support.errors import KernelError, UnsupportedError, counted, user_code
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
    """The description of a buffer that the recorded steps of a program use.

    `slot` is the position of the buffer's tensor in the list of a run's values. `strides` are in
    elements. `offset` is the buffer's first byte in the arena, the memory of intermediates.
    """

    slot: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """The size of the buffer in bytes, from first to last element; 0 without elements."""
        return spanned(self.shape, self.strides) * self.dtype.itemsize

    def at(self, offset: int) -> Block:
        """Returns the description of the same buffer at byte `offset` of the arena, the memory of
        intermediates.
        """
        return Block(self.slot, self.shape, self.strides, self.dtype, offset)

    def view(self, arena: torch.Tensor) -> torch.Tensor:
        """Returns the tensor of this buffer, as a view of `arena`.

        `arena` is the memory of all intermediates, seen as a 1-d tensor of this buffer's dtype.
        """
        return arena.as_strided(self.shape, self.strides, self.offset // self.dtype.itemsize)


@dataclass(frozen=True, eq=False)
class PlannedBuffer:
    """A buffer that a recorded program allocates, and the time during which the buffer is used.

    - `slot`: the position of the buffer's tensor in the list of a run's values.
    - `lies_in_order`: whether the axes have the same order in memory as in the tensor's shape.
    - `lifetime`: from the allocation to the deallocation. None if the buffer is still used after
      the run, or if it is never allocated.
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
    """The stream, the device and the fixed tensors for which the recorded steps of a program are
    turned into functions.

    - `stream`: the raw handle of the stream on which runs begin.
    - `fixed`: the tensors that are the same in all runs, such as buffers in the memory of
      intermediates. The key is the position in the list of a run's values.
    """

    device: torch.device
    stream: int
    fixed: dict[int, torch.Tensor]
    # Objects that launches point to. These objects must live as long as the closures.
    kept: list[object] = field(default_factory=list[object])
    # The closures that only launch a kernel.
    launches: dict[Closure, BoundKernel] = field(default_factory=dict[Closure, Any])

    def raw(self, stream: int | None) -> int:
        """Returns the raw handle of the stream on which a step runs. The argument None means the
        stream on which runs begin.
        """
        return self.stream if stream is None else stream

    def view(self, source: int, out: int, view: Closure, nbytes: int) -> Closure:
        """Returns the function that makes slot `out` a view of slot `source` in a run. Slots are
        positions in the list of a run's values.

        The argument `view` is such a function. This class returns it unchanged, and ignores the
        other arguments. A subclass for CUDA graphs computes the address of the view instead:
        `nbytes` bytes after the address of the source.
        """
        del source, out, nbytes
        return view

    def launch(self, kernel: BoundKernel) -> Closure:
        """Returns the function that launches `kernel` in a run.

        The function is also added to `launches`, so that CUDA graphs and the compiled runner (C
        code) can tell kernel launches from other steps.
        """
        closure = kernel.closure()
        self.launches[closure] = kernel
        return closure

    def reader(self, slot: int) -> Callable[[Slots], torch.Tensor]:
        """Returns a function that reads the tensor in `slot` from the list of a run's values."""
        if slot in self.fixed:
            tensor = self.fixed[slot]
            return lambda slots: tensor
        return lambda slots: slots[slot]

    def address(self, slot: int) -> Callable[[Slots], int]:
        """Returns a function that takes the list of a run's values, and returns the memory address
        of the tensor in `slot`. A slot is a position in the list.

        If `slot` is -1, there is no tensor and the address is 0.
        """
        if slot < 0 or slot in self.fixed:
            found = 0 if slot < 0 else self.fixed[slot].data_ptr()
            return lambda slots: found
        return lambda slots: slots[slot].data_ptr()


class BoundKernel(NamedTuple):
    """A kernel launch whose arguments are packed in memory, ready for the driver.

    A run only writes those arguments that may change between runs:

    - `moving`: the addresses of tensors, as pairs (parameter, position of the tensor in the list of
      a run's values).
    - `read`: a function that returns the run's scalars; None if no scalar changes. `writers` write
      the scalars, and values computed from them, into the arguments.

    `fail` raises the error for a status that the driver has returned.
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
        """Returns the function that launches the kernel in a run.

        The function takes the list of the run's values.
        """
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
        """Returns the scalars that the kernel receives in a run; None if no scalar ever changes."""
        return None if self.read is None else self.read(slots)

    def write_numbers(self, slots: Slots) -> None:
        """Writes the scalars of a run into the packed kernel arguments.

        Some arguments are computed from the scalars.
        """
        if self.read is not None:
            values, words = self.read(slots), self.call.words
            for write, offset, value_for in self.writers:
                write(words, offset, value_for(values))


class Step(Protocol):
    """One recorded action of a program, such as a kernel launch or a copy, that later runs repeat.

    `str(step)` is the kind of the action and the number of its tensors, for example `Launch of 3`.
    """

    def bind(self, binding: Binding) -> Closure | None:
        """Returns the function that carries out the action in runs on one stream, with one memory
        of intermediates.

        `binding` has the stream and the tensors that are the same in all these runs. The function
        takes the list of the run's values. Returns None if runs have nothing to do, because the
        action could be done once, in this call.
        """
        ...


@dataclass(frozen=True, eq=False)
class Action:
    """A recorded step that calls the function `run` on the list of a run's values. It serves for
    all work that has no step class of its own.

    `operands` is the number of tensors that `run` works on. The number is shown in the text of the
    recorded steps. If `operands` is None, no number is shown.
    """

    run: Closure
    operands: int | None = None

    def __str__(self) -> str:
        return "Action" if self.operands is None else f"Action of {self.operands}"

    def bind(self, binding: Binding) -> Closure:
        """Returns the function that carries out this step in a run: `run` itself, because it works
        for every stream and every memory of intermediates.
        """
        return self.run


class TwoPhaseStep:
    """A recorded step whose first run differs from later runs.

    The first run calls `first`. Then `make_later` makes the step that all later runs use. Examples
    are a kernel launch, which is looked up once, and a communication, for which a backend prepares
    a faster start.
    """

    def __init__(
        self, first: Closure, later_step: Callable[[Slots], Step], text: str = "Started"
    ) -> None:
        """Stores the function `first`, which does the work in the first run, and the function
        `later_step`, which makes the step of later runs.

        `later_step` is called after the first run, with the list of that run's values. `text` is
        the name of the step in the text of the recorded steps.
        """
        self.first, self._later_step, self._text = first, later_step, text
        self.later: Step | None = None

    def __str__(self) -> str:
        return self._text

    def make_later(self, slots: Slots) -> Step:
        """Makes the step that later runs use, stores it in `self.later` and returns it.

        Call this after the first run, in which the function `self.first` has done the work. `slots`
        is the list of that run's values.
        """
        self.later = self._later_step(slots)
        return self.later

    def bind(self, binding: Binding) -> Closure:
        """Returns the function that carries out this step in the first run. It does the work, and
        then makes the cheaper step that later runs use.
        """

        def run(slots: Slots) -> None:
            self.first(slots)
            self.make_later(slots)

        return run


class Allocation(NamedTuple):
    """The allocation of a buffer that is not in the arena (the memory of intermediates), for
    example of an output.

    `run` takes the list of a run's values, and stores the new buffer at its position in the list.
    `block` describes the buffer.
    """

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
    """Returns an `Allocation` for the tensor `tv`, whose buffer is described by `block`.

    Memory that other ranks can map is allocated by `symmetric`, a function (bytes -> memory). The
    default is `machine.symmetric`. A run of the allocation raises `OutOfMemoryError` if there is
    not enough memory.
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
    """A recorded step that allocates the buffer in `slot`, a position in a run's values.

    If the buffer is in the arena (the memory of intermediates), there is nothing to allocate.
    """

    slot: int
    make: Closure

    def __str__(self) -> str:
        return "Make"

    def bind(self, binding: Binding) -> Closure | None:
        """Returns the function that allocates the buffer in a run.

        Returns None if the buffer is in the arena, the memory of intermediates.
        """
        return None if self.slot in binding.fixed else self.make


@dataclass(frozen=True, eq=False)
class Both:
    """A recorded step that carries out two other steps, which belong to one op, one after the
    other.
    """

    first: Step
    second: Step

    def __str__(self) -> str:
        return f"{self.first} + {self.second}"

    def bind(self, binding: Binding) -> Closure | None:
        """Returns the function that carries out both steps, one after the other, in a run; None if
        neither has anything to do.
        """
        first, second = self.first.bind(binding), self.second.bind(binding)
        if first is None or second is None:
            return first or second

        def both(slots: Slots) -> None:
            first(slots)
            second(slots)

        return both


@dataclass(frozen=True, eq=False)
class Release:
    """A recorded step that drops the tensor in `slot`, so that its memory can be reused.

    `slot` is a position in the list of a run's values. A tensor in the arena (the memory of
    intermediates) is not dropped, because all runs use the same tensor.
    """

    slot: int

    def __str__(self) -> str:
        return "Release"

    def bind(self, binding: Binding) -> Closure | None:
        """Returns the function that drops the tensor in a run.

        Returns None if the tensor is in the arena, the memory of intermediates.
        """
        i = self.slot
        if i in binding.fixed:
            return None

        def release(slots: Slots) -> None:
            slots[i] = None

        return release


class View(NamedTuple):
    """A recorded step that makes slot `out` a view of the tensor in slot `source`.

    Slots are positions in the list of a run's values. The view has the given shape and strides (in
    elements). The first element of the view is `shift` elements after the first element of the
    source.
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
        """Returns the view that this step makes of the tensor `source`."""
        x = source.detach() if source.requires_grad else source
        if self.shift:
            return x.as_strided(self.shape, self.strides, x.storage_offset() + self.shift)
        return x.as_strided(self.shape, self.strides)

    def bind(self, binding: Binding) -> Closure | None:
        """Returns the function that makes the view in a run.

        If all runs have the same source tensor, the view is made at once, and None is returned.
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
    """Returns `x` as a tensor that does not require a gradient: `x` itself, or a detached view of
    `x`.

    No result of a host program requires a gradient.
    """
    return x.detach() if x.requires_grad else x


class Multiply(NamedTuple):
    """A recorded step in which torch computes a matrix product into the buffer in slot `out`.

    `product` is the torch call, and `ins` are the slots of its operands. Slots are positions in the
    list of a run's values.
    """

    product: Product
    ins: tuple[int, ...]
    out: int

    def __str__(self) -> str:
        return f"Multiply of {len(self.ins) + 1}"

    def run(self, slots: Slots) -> None:
        """Computes the product at once, on the tensors in the list of a run's values."""
        self.product([slots[i] for i in self.ins], slots[self.out])

    def bind(self, binding: Binding) -> Closure:
        """Returns the function that calls torch for the matrix product in a run.

        The call may need a view of a tensor that is the same in all runs. Such a view is made only
        once, before the first run.
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
        """Whether torch's call takes the operands and the result directly, not views of them."""
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
    """Returns the text that stands for a collective in the list of recorded steps, such as
    `Collective of 2` if this rank has both buffers.

    `inp` and `out` are the positions of operand and result in the list of a run's values, or -1 if
    this rank has no such buffer.
    """
    return f"Collective of {(inp >= 0) + (out >= 0)}"


@dataclass(frozen=True, eq=False)
class CollectiveStep:
    """A recorded step that starts a collective, such as an allreduce.

    The backend has prepared the call `post`, so a run only passes addresses. Slots are positions in
    the list of a run's values.

    - `inp`, `out`: the slots of operand and result, or -1 if this rank has no such buffer.
    - `work`: the slot for the communication handle on which the `Wait` op waits.
    - `stream`: the raw handle of a stream, or None for the stream on which runs begin.
    """

    post: Post
    inp: int
    out: int
    work: int
    stream: int | None

    def __str__(self) -> str:
        return collective_text(self.inp, self.out)

    def bind(self, binding: Binding) -> Closure:
        """Returns the function that starts the collective, on the buffers of a run."""
        post, work = self.post, self.work
        stream = binding.raw(self.stream)
        out, inp = binding.address(self.out), binding.address(self.inp)

        def start(slots: Slots) -> None:
            slots[work] = post(out(slots), inp(slots), stream)

        return start


@dataclass(frozen=True, eq=False)
class ExchangeStep:
    """A recorded step that starts a group of sends and receives together.

    The backend has prepared the call `post`, so a run only passes addresses. Slots are positions in
    the list of a run's values. `buffers` are the slots of the sent and received tensors, in order.
    `work` is the slot for the communication handle on which the `Wait` op waits.
    """

    post: PostBatch
    buffers: tuple[int, ...]
    work: int
    stream: int | None

    def __str__(self) -> str:
        return f"Exchange of {len(self.buffers)}"

    def bind(self, binding: Binding) -> Closure:
        """Returns the function that starts the sends and receives, on the buffers of a run."""
        post, work = self.post, self.work
        stream = binding.raw(self.stream)
        addresses = [binding.address(slot) for slot in self.buffers]

        def start(slots: Slots) -> None:
            slots[work] = post([address(slots) for address in addresses], stream)

        return start


class LaunchStep(NamedTuple):
    """A recorded step that launches a compiled kernel on the tensors in the slots `operands`.

    Slots are positions in the list of a run's values. `operands` has the order of the kernel's
    parameters. All runs that repeat the step have the same shapes, strides and alignments. Only
    addresses of tensors outside of the arena (the memory of intermediates), and some scalars,
    change.

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
        """Packs the kernel's arguments, and returns the function that launches the kernel."""
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
    """Returns a context in which torch's profiler records a range for `op`.

    The range has the op's name and the user's source line.
    """
    titles = _TITLES.setdefault(program, {})
    found = titles.get(op)
    if found is None:
        found = titles[op] = title(op, program)
    return range_named(found)


def range_of_graph(ops: Sequence[Op | None]) -> AbstractContextManager[object]:
    """Returns a context in which torch's profiler records one range for a launch of a CUDA graph.

    The graph repeats the recorded steps of a program; `ops` has the op of each step. The name of
    the range has the number of steps and the user's lines.
    """
    lines = [op.where for op in ops if op is not None]
    return range_named(f"CUDA graph of {counted(len(ops), 'step')}{_at(lines)}")


def title(op: Op, program: HostIrContainer) -> str:
    """Returns the name of `op` in a profile, such as `relu at model.py:12`.

    The name of a kernel lists the tensor ops that the kernel computes, and their source lines.
    """
    if not isinstance(op, LaunchKernel):
        return f"{op.name}{_at([op.where])}"
    exprs = program.groups[op.group].fusion.exprs
    named = [e for e in exprs if not isinstance(e, BroadcastOp | CastOp)] or exprs
    names = list(dict.fromkeys(e.name for e in named))
    more = f" and {len(names) - _MAX_NAMES} more" * (len(names) > _MAX_NAMES)
    return f"kernel {', '.join(names[:_MAX_NAMES])}{more}{_at([e.where for e in named])}"


def _at(lines: Sequence[str]) -> str:
    """Returns text such as ` at model.py:7, :8, other.py:3` for the lines of a profiled op."""
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
    """Maps the shards of all ranks into this process as one tensor, the result of `op`.

    `shard` is this rank's part, and `shape` is the shape of the whole tensor. Every rank of the
    team must call this function, and waits until the others have called it. If the shards cannot be
    mapped as one tensor, all ranks raise `UnsupportedError` or `CommunicationError`.
    """
    peers, team, what = _where(op, machine)
    if not shard.is_contiguous():
        raise UnsupportedError(
            f"{what}: shards of shape {tuple(shard.shape)} with strides {shard.stride()} are not "
            "dense: allocate them row-major, in the order of their axes"
        )
    return peers.side_by_side(shard, team, what).view(shard.dtype).view(tuple(shape))


def meet_at(op: SymmetricContiguousView, machine: ExecutionContext) -> None:
    """Waits until all ranks of the team have finished with the view that `op` made of their shards,
    the parts of one tensor.

    A rank must not free its shard earlier, because other ranks still read the shard.
    """
    peers, team, what = _where(op, machine)
    peers.rendezvous(team, what)


def shows_shards(
    op: SymmetricContiguousView,
    machine: ExecutionContext,
    inp: int,
    out: int,
    shape: tuple[int, ...],
) -> Action:
    """Returns the recorded step in which the ranks map their shards (parts of one tensor) as one
    tensor, the result of `op`.

    `inp` and `out` are the positions of this rank's shard and of the result in the list of a run's
    values. `shape` is the shape of the whole tensor.
    """

    def show(slots: Slots) -> None:
        slots[out] = show_shards(op, machine, slots[inp], shape)

    return Action(show)


def meets_at(op: SymmetricContiguousView, machine: ExecutionContext) -> Action:
    """Returns the recorded step in which a rank waits until all ranks have finished with the view
    that `op` made of their shards (parts of one tensor). Only then may a rank free its shard.
    """
    return Action(lambda slots: meet_at(op, machine))


def _where(op: SymmetricContiguousView, machine: ExecutionContext) -> tuple[PeerMemory, Team, str]:
    assert op.team is not None, "a view of one rank's shards has no team"
    peers = cast("PeerMemory", machine.backend(PEER_COPIES))
    return peers, op.team.ranks(machine.rank), f"{op.name} of {op.inp.label}{user_code(op.where)}"


# ----------------------------------------------------------------------
# `FUSER_DUMP=communication`: a line for each communication when it is posted.

Find = Callable[[TensorView], torch.Tensor | None]


def announcer(op: Op, machine: ExecutionContext) -> Callable[[Find], None] | None:
    """Returns a function that writes a dump line when the communication `op` starts. The caller
    calls the returned function in each run.

    The returned function takes another function, which maps a tensor to this rank's shard (the part
    that it stores), or to None. If another library carries out the communication than the one that
    the op names, the line also names that library. Returns None if `op` is no communication, or if
    `FUSER_DUMP=communication` is not set.
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
