"""The state of one run of a host program on one rank: execution context, values and tensors."""

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
    """The executor of one compiled kernel, which runs on this rank's shards (the parts of tensors
    that it stores).
    """

    def run(
        self,
        inputs: Sequence[Argument],
        outputs: Sequence[torch.Tensor],
        *,
        sizes: Mapping[Symbol, int],
    ) -> None:
        """Launches the kernel on the current stream. The results are written into `outputs`.

        `inputs` are the kernel's operands. `sizes` has the value of every global extent, that is,
        of the axis sizes of whole tensors, not of one rank's part.
        """
        ...

    def launch_for(
        self,
        inputs: Sequence[Argument],
        outputs: Sequence[torch.Tensor],
        *,
        sizes: Mapping[Symbol, int],
        device: torch.device | None = None,
    ) -> KernelLaunch | None:
        """Returns the launch that `run` would make, as data that later runs can repeat on other
        tensors of equal layouts.

        A layout consists of shape, strides and alignment. Returns None if the launch must be looked
        up in each run. In a dry run, the tensors have no memory, and `device` is the device of
        later runs; the kernel may not be compiled yet. `sizes` has the values of the global
        extents, that is, of the axis sizes of whole tensors, not of one rank's part.
        """
        ...


@dataclass(frozen=True)
class ExecutionContext:
    """The surroundings of a program's runs on one device of this rank.

    - `rank`, `size`: the number of this rank, and the number of all ranks of the job.
    - `team`: the ranks of the program's meshes, which send to and receive from each other.

    The other fields are the streams, and functions that return backends, memory and kernels.
    """

    rank: int
    size: int
    device: torch.device
    team: Team
    # Name of a library in a communication op -> the backend
    backend: Callable[[str], Backend]
    # Bytes -> memory that peers can map: for one run, for many runs, and for shards that a
    # `SymmetricContiguousView` maps
    symmetric: Callable[[int], torch.Tensor]
    lasting: Callable[[int], torch.Tensor]
    shard: Callable[[int], torch.Tensor]
    # (group, operands, results, global extents) -> the work of that kernel
    launch: Callable[[int, Sequence[Argument], Sequence[torch.Tensor], Mapping[Symbol, int]], Work]
    # Number of a kernel group -> its executor
    runner: Callable[[int], KernelRunner]
    streams: Streams
    # Number of a host unit -> a function that runs it on (operands, results)
    unit: Callable[[int], Callable[[Sequence[Argument], Sequence[torch.Tensor]], object]]
    # The vote of the ranks on how to replay each run; None if each rank decides alone.
    vote: Vote | None


@dataclass
class Frame:
    """The state of one run of a host program: the values of symbols, the tensors, and the op that
    is running.

    `machine` has the device, the streams and the backends of the run. `storage` says which tensors
    of the program share memory.
    """

    program: HostIrContainer
    machine: ExecutionContext
    storage: Storage
    values: Values
    tensors: dict[TensorView, torch.Tensor]
    # The tensors whose buffer this run has allocated.
    owned: set[TensorView] = field(default_factory=set[TensorView])
    # The number of transfers so far, by kind and peer.
    transfers: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])
    # The indices of the open loops, outermost first. A buffer that is allocated inside a loop
    # belongs to one iteration.
    indices: tuple[Symbol, ...] = ()
    # Whether this run is recorded for later runs.
    is_recorded: bool = False
    # The op that is running.
    op: Op | None = None

    @property
    def rank(self) -> int:
        """The number of this process in the job, or of the simulated rank that runs now."""
        return self.machine.rank

    def symmetric(self, tv: TensorView) -> Callable[[int], torch.Tensor]:
        """Returns a function (bytes -> memory) that allocates memory for `tv`. Other ranks can map
        the memory into their processes, to read the tensor.

        In an ordinary run, the memory is cached, so that the next runs can use it. In a run that is
        being recorded, it is not cached, because such a run happens only once. A shard (part) of a
        tensor that each rank maps as a whole has memory of a third kind.
        """
        if tv in self.storage.shown:
            return self.machine.shard
        # A recorded run happens once. Its memory is not cached for further runs of this kind.
        return self.machine.lasting if self.is_recorded else self.machine.symmetric

    def number(self, x: Scalar) -> Number:
        """Returns the value of the scalar `x` in this run, from the inputs and the loop indices.

        Raises `InputError` if the inputs do not determine the value, or if the value is undefined.
        """
        try:
            return sc.evaluate(x, self.values)
        except KeyError as missing:
            raise InputError(
                f"{x} has no value, because no input of the program determines "
                f"{missing.args[0]}: define {missing.args[0]} as a scalar input"
            ) from None
        except (ArithmeticError, ValueError) as error:
            bound = ", ".join(f"{s} = {self.values[s]}" for s in sc.symbols(x))
            raise InputError(f"{x} has no value for {bound}: {error}") from None

    def operand(self, value: TensorView | Scalar) -> Argument:
        """Returns the value of an op's operand in this run: a tensor, or the number of a scalar."""
        return self.tensors[value] if isinstance(value, TensorView) else self.number(value)

    def integer(self, x: Scalar) -> int:
        """Returns the value of the integer scalar `x` in this run. Raises `InputError` if the
        inputs do not determine the value, or if the value is undefined.
        """
        return int(self.number(x))

    @contextmanager
    def with_index(self, index: Symbol) -> Generator[Callable[[int], None]]:
        """Returns a context for a loop over `index`, in which scalars may depend on the index.

        The value of the context is a function. The caller calls it with the value of the index
        before each loop iteration.
        """

        def bind(value: int) -> None:
            self.values = {**self.values, index: value}

        outside, values, self.indices = self.indices, self.values, (*self.indices, index)
        yield bind
        self.indices, self.values = outside, values

    def submit(self, work: Callable[[], object], ready: Ready | None = None) -> None:
        """Passes the function `work` to the current stream, which calls the function now or later.

        Only streams that delay work (a test mode) call `work` later. An error of torch in `work`
        then gets the name and the user's line of the current op. `ready()` is whether `work` can
        run without waiting for another rank.
        """
        streams = self.machine.streams
        if streams.holds_work_back and self.op is not None:
            work = partial(guarded, self.op, work)
        streams.submit(work, ready)

    def order(self, kind: str, peer: int) -> int | None:
        """Returns how many transfers with the rank `peer` precede the current one in the program.

        `kind` is "send" or "recv", and transfers of the other kind are ignored. The number matches
        sends with receives if streams delay work (a test mode), because transfers then start in
        another order than in the program. In all other cases, returns None.
        """
        if not self.machine.streams.holds_work_back:
            return None
        number = self.transfers[kind, peer] = self.transfers.get((kind, peer), -1) + 1
        return number

    def stream(self, stream: Stream) -> Handle:
        """Returns the handle in this run for `stream`, a stream of the program with a number or a
        name. The handle is a CUDA stream, or a name on the CPU.

        The caller never passes a name that the program has given to a stream by a
        `GetCurrentStream` op, because such a name is looked up among the run's values.
        """
        if stream.index is None:
            return self.machine.streams.handle(stream.name)
        number = self.integer(stream.index)
        if number < 0:
            raise ExecutionError(
                f"the stream number {stream.index} is {number}, but streams are numbered from 0"
            )
        return self.machine.streams.handle(number)

    def part(self, op: Op, source: torch.Tensor, part: Part) -> tuple[int, int]:
        """Returns (start, length) of the part of the tensor `source` that `op` uses.

        Both numbers refer to the axis `part.axis`. The part is one element or one chunk. Raises
        `ExecutionError` if the part is outside of the tensor.
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
                f"{op.name}: index {at} is out of range: axis {part.axis} of {op.inputs[0]} has "
                f"{limit} {what}, expected 0 <= index < {limit}{user_code(op.where)}"
            )
        return bounds(size, index, None if part.chunks is None else limit)

    @cached_property
    def sizes(self) -> Mapping[Symbol, int]:
        """The values of the integer symbols that inputs determine, such as global extents."""
        own = (RANK, NUMBER_OF_STREAMS, *self.indices)
        return {s: int(v) for s, v in self.values.items() if isinstance(v, int) and s not in own}

    @cached_property
    def _whole(self) -> dict[TensorView, tuple[int, ...]]:
        return self.storage.whole.of(self.values)

    def elsewhere(
        self, machine: ExecutionContext, tensors: dict[TensorView, torch.Tensor]
    ) -> Frame:
        """Returns a copy of this frame (state of a run) with the same inputs, but another context
        and other tensors.

        A dry run, which computes nothing, uses such a copy with tensors without contents.
        """
        made = Frame(self.program, machine, self.storage, self.values, tensors)
        made._whole, made.sizes = self._whole, self.sizes
        return made

    def local_shape(self, tv: TensorView, stream_index: Scalar | None = None) -> tuple[int, ...]:
        """Returns the shape of this rank's shard of `tv`, the part that this rank stores.

        If `stream_index` is given, a loop computes the shard block by block, and the shape of the
        block of iteration `stream_index` is returned. Raises `ShardingError` if an extent is not
        divisible by the mesh, and `InputError` if an extent is negative.
        """
        if stream_index is None and not self.indices and tv in self._whole:
            return self._whole[tv]
        sizes = [int(self.number(x)) for x in tv.shape()]
        for axis, size in enumerate(sizes):
            if size < 0:
                raise InputError(
                    f"axis {axis} of {tensor_words(tv)} has extent {tv.shape()[axis]} = {size}, "
                    f"but an extent must not be negative{in_ir(tv)}"
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
        """Whether this rank has a shard of `tv`, that is, stores the tensor or a part of it.

        All ranks have a shard of a tensor without a mesh. If `tv` has a mesh, only the ranks of the
        mesh have a shard.
        """
        return tv.mesh is None or tv.mesh.has(self.machine.rank)

    def is_idle(self, op: Op) -> bool:
        """Whether this rank skips `op`, because it stores no part of any tensor of `op`.

        An op without tensors is never skipped.
        """
        if not self.storage.is_placed:
            return False
        tensors = [v for v in (*op.outputs, *op.inputs) if isinstance(v, TensorView)]
        return bool(tensors) and not any(map(self.is_mine, tensors))

    def result(self, tv: TensorView) -> torch.Tensor:
        """Returns the tensor that a run returns for output `tv`.

        If this rank has no shard (part) of `tv`, the tensor is empty.
        """
        if not self.is_mine(tv):
            return torch.empty(0, dtype=to_torch(tv.dtype()), device=self.machine.device)
        if tv not in self.tensors:
            raise ExecutionError(
                f"the output {tv} has no buffer when the program ends: compute the output in every "
                "branch, and do not deallocate it"
            )
        return self.tensors[tv].clone() if tv in self.storage.borrowed else self.tensors[tv]

    def alias_target(self, out: TensorView) -> TensorView:
        """Returns the input whose memory the output `out` overwrites.

        The caller ensures that the program declares `out` as an update of an input.
        """
        into = self.program.values.alias_of(out)
        assert into is not None, f"{out} has neither a buffer nor a declared alias"
        return into


# ----------------------------------------------------------------------
# Allocating the buffers of a program; the errors for missing memory and for failed ops.


class OutOfMemoryError(ExecutionError, torch.OutOfMemoryError):
    """Raised if there is no memory for a tensor. The message names op, tensor and bytes."""


def op_failed(op: Op, error: Exception) -> ExecutionError:
    """Returns the error to raise after torch has raised `error` in the op `op`.

    The message has the op and the user's line. If torch had no memory, the result is an
    `OutOfMemoryError`, otherwise an `ExecutionError`.
    """
    kind = OutOfMemoryError if isinstance(error, torch.OutOfMemoryError) else ExecutionError
    return kind(
        f"{op.name} failed ({type(error).__name__}: {error}){user_code(op.where)}:\n{op_text(op)}"
    )


def guarded(op: Op, work: Callable[[], object]) -> None:
    """Calls the function `work`, which does a part of the work of `op` after `op` itself has
    returned.

    If torch fails, raises `ExecutionError` with the op and the user's line.
    """
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
    """Allocates the buffer of `tv`, a tensor of `program`, on `device`. `shape` is the shape of its
    shard (part) on this rank.

    `symmetric` is a function (bytes -> memory that other ranks can map), for tensors in such
    memory. Raises `OutOfMemoryError` if the allocation fails, whatever error torch raises.
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
    """Returns the error to raise if there is no memory for this rank's shard of `tv` (the part that
    it stores).

    `shape` is the shape of the shard.
    """
    name, where = _maker(program, tv)
    nbytes = spanned(shape, allocated_strides(tv, shape)) * nbytes_of(tv.dtype())
    place = "" if device.type == "meta" else f" on {device}"  # found in a dry run
    return OutOfMemoryError(
        f"{name}: there is no memory for {tv} of shape {tuple(shape)}, {nbytes} bytes{place}"
        f"{user_code(where)}"
    )


def _maker(program: HostIrContainer, tv: TensorView) -> tuple[str, str]:
    """Returns (name, user's line) of the op that computes `tv`, for an error message.

    If no op computes `tv`, returns ("allocate", "").
    """
    for op in walk(program.ops):
        if isinstance(op, Allocate) or tv not in op.outputs:
            continue
        if isinstance(op, LaunchKernel):
            exprs = program.groups[op.group].fusion.exprs
            found = [e for e in exprs if any(o.number == tv.number for o in e.outputs)]
            op = found[0] if found else op
        return op.name.removesuffix("Op").lower(), op.where
    return "allocate", ""
