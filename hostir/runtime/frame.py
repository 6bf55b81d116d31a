"""The state of one run: where it happens, the values of symbols, the tensors that exist."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Protocol

import torch

from fuser.ir.dtypes import nbytes_of, to_torch
from fuser.ir.fusion import TensorView
from fuser.ir.naming import in_ir, tensor_words
from fuser.ir.op import Op, op_text, walk
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Number, Scalar, Symbol
from fuser.ir.types import MemoryType
from fuser.support.errors import ExecutionError, FuserError, InputError, user_code
from hostir.ir.buffer_aliasing import Storage
from hostir.ir.effects import Part, Stream, bounds
from hostir.ir.ops import NUMBER_OF_STREAMS, RANK, Allocate, LaunchKernel, stream_cut
from hostir.ir.program import HostIrContainer
from hostir.ir.shard_layout import allocated_strides, spanned
from hostir.lowering.slices import rotated
from hostir.runtime.inputs import Argument, Values
from hostir.runtime.streams import Handle, Ready, Streams, Work
from multidevice.coordination.bounded_wait import Team
from multidevice.sharding.queries import local_sizes
from multidevice.sharding.streams import is_allocated_per_step, stream_axis
from multidevice.transports.base.protocol import Backend, Vote

if TYPE_CHECKING:
    from fuser.kernels.executor import KernelLaunch


class KernelRunner(Protocol):
    """Runs the kernel of one group on local shards, on the current stream."""

    def run(
        self,
        inputs: Sequence[Argument],
        outputs: Sequence[torch.Tensor],
        *,
        sizes: Mapping[Symbol, int],
    ) -> None:
        """Computes `outputs`, which are allocated; `sizes` has every global extent."""
        ...

    def launch_for(
        self,
        inputs: Sequence[Argument],
        outputs: Sequence[torch.Tensor],
        *,
        sizes: Mapping[Symbol, int],
        device: torch.device | None = None,
    ) -> KernelLaunch | None:
        """Returns the launch by which `run` computes these, for tensors of the same shapes, strides
        and alignments, too; None where each run has to ask anew.

        With the `device` of a run, these may be tensors without contents, and the kernel may still
        have to be compiled."""
        ...


@dataclass(frozen=True)
class ExecutionContext:
    """The place where a program runs: this rank, its device, its backends and its kernels.

    `team` are the ranks of the program's meshes, between which it sends and receives.
    """

    rank: int
    size: int
    device: torch.device
    team: Team
    # Library of a communication -> what carries it out
    backend: Callable[[str], Backend]
    # Bytes -> memory that peers can map; such memory for many runs, and for shards that are shown
    symmetric: Callable[[int], torch.Tensor]
    lasting: Callable[[int], torch.Tensor]
    shard: Callable[[int], torch.Tensor]
    # (group, operands, results, global extents) -> the work of that kernel
    launch: Callable[[int, Sequence[Argument], Sequence[torch.Tensor], Mapping[Symbol, int]], Work]
    # Group -> what runs it
    runner: Callable[[int], KernelRunner]
    streams: Streams
    # Number of a host unit -> what runs it on (operands, results)
    unit: Callable[[int], Callable[[Sequence[Argument], Sequence[torch.Tensor]], object]]
    # How the ranks agree on each run; None where each may go its own way.
    vote: Vote | None


@dataclass
class Frame:
    """The state of one run."""

    program: HostIrContainer
    machine: ExecutionContext
    storage: Storage
    values: Values
    tensors: dict[TensorView, torch.Tensor]
    # Which tensors have a buffer that this run allocated.
    owned: set[TensorView] = field(default_factory=set[TensorView])
    # How many transfers with a peer, by kind, this run has come to.
    transfers: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])
    # The indices of the open loops: what is allocated there belongs to one step.
    indices: tuple[Symbol, ...] = ()
    # Whether later runs repeat this one: then it comes once.
    is_recorded: bool = False
    # The op that is carried out now.
    op: Op | None = None

    @property
    def rank(self) -> int:
        return self.machine.rank

    def symmetric(self, tv: TensorView) -> Callable[[int], torch.Tensor]:
        """Returns what makes memory for `tv` that peers can map."""
        if tv in self.storage.shown:
            return self.machine.shard
        # A run that is recorded comes once: its memory is of no use to later ones.
        return self.machine.lasting if self.is_recorded else self.machine.symmetric

    def number(self, x: Scalar) -> Number:
        """Returns the value of `x`. Raises `InputError` where these inputs give it none."""
        try:
            return sc.evaluate(x, self.values)
        except KeyError as missing:
            raise InputError(f"{x}: no input binds {missing.args[0]}") from None
        except (ArithmeticError, ValueError) as error:
            bound = ", ".join(f"{s} = {self.values[s]}" for s in sc.symbols(x))
            raise InputError(f"{x} has no value for {bound}: {error}") from None

    def operand(self, value: TensorView | Scalar) -> Argument:
        return self.tensors[value] if isinstance(value, TensorView) else self.number(value)

    def integer(self, x: Scalar) -> int:
        return int(self.number(x))

    @contextmanager
    def with_index(self, index: Symbol) -> Generator[Callable[[int], None]]:
        """Yields what gives a loop's index its value."""

        def bind(value: int) -> None:
            self.values = {**self.values, index: value}

        outside, values, self.indices = self.indices, self.values, (*self.indices, index)
        yield bind
        self.indices, self.values = outside, values

    def submit(self, work: Callable[[], object], ready: Ready | None = None) -> None:
        """Gives work to the current stream; see `Streams.submit`."""
        streams = self.machine.streams
        if streams.holds_work_back and self.op is not None:
            work = partial(guarded, self.op, work)
        streams.submit(work, ready)

    def order(self, kind: str, peer: int) -> int | None:
        """Returns which transfer of a kind with a peer this is, where streams may start them in
        another order than the program has them in; None elsewhere."""
        if not self.machine.streams.holds_work_back:
            return None
        number = self.transfers[kind, peer] = self.transfers.get((kind, peer), -1) + 1
        return number

    def stream(self, stream: Stream) -> Handle:
        """Returns a stream of the evaluator: what a number means, or a name that no op captured."""
        if stream.index is None:
            return self.machine.streams.handle(stream.name)
        number = self.integer(stream.index)
        if number < 0:
            raise ExecutionError(f"Stream {stream.index} = {number}: streams count from 0")
        return self.machine.streams.handle(number)

    def part(self, op: Op, source: torch.Tensor, part: Part) -> tuple[int, int]:
        """Returns (start, length) of a part of `source` along its axis, for an op that names it.

        Raises `ExecutionError` outside.
        """
        size = source.size(part.axis)
        index = self.integer(part.index)
        if part.chunks is None and size == 1:
            index = 0
        limit = size if part.chunks is None else self.integer(part.chunks)
        if not 0 <= index < limit:
            what = "elements" if part.chunks is None else "chunks"
            at = index if str(part.index) == str(index) else f"{part.index} = {index}"
            raise ExecutionError(
                f"{op.name}: index {at} of axis {part.axis} of {op.inputs[0]}, "
                f"which has {limit} {what}{user_code(op.where)}"
            )
        return bounds(size, index, None if part.chunks is None else limit)

    @cached_property
    def sizes(self) -> Mapping[Symbol, int]:
        """The integer symbols of the inputs: what kernels are sized by."""
        own = (RANK, NUMBER_OF_STREAMS, *self.indices)
        return {s: int(v) for s, v in self.values.items() if isinstance(v, int) and s not in own}

    @cached_property
    def _whole(self) -> dict[TensorView, tuple[int, ...]]:
        return self.storage.whole.of(self.values)

    def elsewhere(
        self, machine: ExecutionContext, tensors: dict[TensorView, torch.Tensor]
    ) -> Frame:
        """Returns a frame of the same values and shapes on another machine."""
        made = Frame(self.program, machine, self.storage, self.values, tensors)
        made._whole, made.sizes = self._whole, self.sizes
        return made

    def local_shape(self, tv: TensorView, stream_index: Scalar | None = None) -> tuple[int, ...]:
        """Returns the sizes of the local shard, or of the part of it at a step of a stream loop.

        Raises `ShardingError` for an indivisible extent, `InputError` for a negative one.
        """
        if stream_index is None and not self.indices and tv in self._whole:
            return self._whole[tv]
        sizes = [int(self.number(x)) for x in tv.shape()]
        for axis, size in enumerate(sizes):
            if size < 0:
                raise InputError(
                    f"axis {axis} of {tensor_words(tv)} has extent {tv.shape()[axis]} = {size}"
                    f"{in_ir(tv)}"
                )
        shape = local_sizes(tv, sizes)
        if stream_index is None and self.indices and is_allocated_per_step(tv):
            axis = stream_axis(tv)
            assert axis is not None, f"{tv} is made per step"
            stream_index = rotated(self.indices[-1], axis.count, tv.mesh, axis.swizzle)
        if stream_index is None:
            return shape
        cut, chunks = stream_cut(tv)
        _, length = bounds(shape[cut], self.integer(stream_index), self.integer(chunks))
        return (*shape[:cut], length, *shape[cut + 1 :])

    def is_mine(self, tv: TensorView) -> bool:
        """Whether this rank holds a part of `tv`."""
        return tv.mesh is None or tv.mesh.has(self.machine.rank)

    def is_idle(self, op: Op) -> bool:
        """Whether the op concerns only meshes without this rank."""
        if not self.storage.is_placed:
            return False
        tensors = [v for v in (*op.outputs, *op.inputs) if isinstance(v, TensorView)]
        return bool(tensors) and not any(map(self.is_mine, tensors))

    def result(self, tv: TensorView) -> torch.Tensor:
        """Returns an output; a tensor of no elements for one that this rank holds no part of."""
        if not self.is_mine(tv):
            return torch.empty(0, dtype=to_torch(tv.dtype()), device=self.machine.device)
        if tv not in self.tensors:
            raise ExecutionError(f"output {tv} has no buffer when the program ends")
        return self.tensors[tv].clone() if tv in self.storage.borrowed else self.tensors[tv]

    def alias_target(self, out: TensorView) -> TensorView:
        """Returns the input whose buffer an in-place output is written into."""
        into = self.program.values.alias_of(out)
        assert into is not None, f"{out} has neither a buffer nor a declared alias"
        return into


# ----------------------------------------------------------------------
# Buffers that a program allocates, and the errors where there is no memory, or an op fails.


class OutOfMemoryError(ExecutionError, torch.OutOfMemoryError):
    """There is no memory for a tensor; the message names op, tensor and bytes."""


def op_failed(op: Op, error: Exception) -> ExecutionError:
    """Returns the error of an op that torch refused; torch knows neither the op nor its line."""
    kind = OutOfMemoryError if isinstance(error, torch.OutOfMemoryError) else ExecutionError
    return kind(
        f"{op.name} failed ({type(error).__name__}: {error}){user_code(op.where)}:\n{op_text(op)}"
    )


def guarded(op: Op, work: Callable[[], object]) -> None:
    """Does the work of an op; raises `ExecutionError` naming op and user line where torch
    refuses."""
    try:
        work()
    except FuserError:
        raise
    except Exception as error:  # torch raises errors of every kind
        raise op_failed(op, error) from error


def new_buffer(
    program: HostIrContainer,
    tv: TensorView,
    shape: Sequence[int],
    device: torch.device,
    symmetric: Callable[[int], torch.Tensor],
) -> torch.Tensor:
    """Returns memory for a tensor of this local shape; `symmetric` makes what peers can map.

    Raises `OutOfMemoryError` where there is none, whatever torch says then.
    """
    strides, dtype = allocated_strides(tv, shape), to_torch(tv.dtype())
    try:
        if tv.memory is MemoryType.symmetric and device.type != "meta":
            room = symmetric(spanned(shape, strides) * dtype.itemsize)
            return room.view(dtype).as_strided(tuple(shape), strides)
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)
    except (RuntimeError, TypeError) as error:
        raise no_memory(program, tv, shape, device) from error


def no_memory(
    program: HostIrContainer, tv: TensorView, shape: Sequence[int], device: torch.device
) -> OutOfMemoryError:
    """Returns the error of a tensor of this local shape that cannot be allocated."""
    name, where = _maker(program, tv)
    nbytes = spanned(shape, allocated_strides(tv, shape)) * nbytes_of(tv.dtype())
    place = "" if device.type == "meta" else f" on {device}"  # found before anything was run
    return OutOfMemoryError(
        f"{name}: no memory for {tv} of shape {tuple(shape)}, {nbytes} bytes{place}"
        f"{user_code(where)}"
    )


def _maker(program: HostIrContainer, tv: TensorView) -> tuple[str, str]:
    """Returns the name of the op that computes `tv`, and the user's line."""
    for op in walk(program.ops):
        if isinstance(op, Allocate) or tv not in op.outputs:
            continue
        if isinstance(op, LaunchKernel):
            exprs = program.groups[op.group].fusion.exprs
            found = [e for e in exprs if any(o.number == tv.number for o in e.outputs)]
            op = found[0] if found else op
        return op.name.removesuffix("Op").lower(), op.where
    return "allocate", ""
