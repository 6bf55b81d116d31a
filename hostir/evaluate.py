"""The evaluator: a table from op type to the function that carries the op out.

`HostIrEvaluator.evaluate` is the reading of a program that everything faster must equal bit for bit.
`HostIrEvaluator.run` uses it once per class of inputs and replays `hostir.replay` records afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch

from fuser.errors import InputError
from fuser.ir import scalar as sc
from fuser.ir.core import Op
from fuser.ir.dtypes import to_torch
from fuser.ir.nodes import TensorOp
from fuser.ir.scalar import Number, Scalar, Symbol
from fuser.ir.tensor import TensorView
from hostir.bind import Argument, InputBinder, Values
from hostir.container import HostIrContainer, KernelGroup
from hostir.layout import allocated_strides
from hostir.library import compute, compute_into
from hostir.ops import Allocate, Communication, Deallocate, LaunchKernel, LocalSlice, Wait
from hostir.post import post
from multidevice.backends.protocol import Backend, Work
from multidevice.sharding import local_sizes


class KernelRunner(Protocol):
    """Runs the kernel of one group on local shards."""

    def run(
        self,
        inputs: list[torch.Tensor | Number],
        outputs: list[torch.Tensor],
        *,
        sizes: Mapping[Symbol, int],
        stream: object = None,
    ) -> None: ...


MakeRunner = Callable[[KernelGroup], KernelRunner]


def make_kernel_executor(group: KernelGroup) -> KernelRunner:
    """Return the executor that compiles the group's kernel for local shards."""
    from fuser.runtime.executor import KernelExecutor
    from multidevice.localize import localize

    return KernelExecutor(
        localize(group.fusion), scheduler=group.scheduler, name=f"kernel{group.number}"
    )


@dataclass(frozen=True)
class Machine:
    """Where a program runs: this rank, its device, its backend and its kernels."""

    rank: int
    device: torch.device
    backend: Callable[[], Backend]
    kernel: Callable[[int], KernelRunner]


@dataclass
class Frame:
    """The state of one evaluation."""

    program: HostIrContainer
    machine: Machine
    values: Values
    tensors: dict[TensorView, torch.Tensor]
    works: dict[int, Work] = field(default_factory=dict[int, Work])

    def number(self, x: Scalar) -> Number:
        return sc.evaluate(x, self.values)

    def operand(self, value: TensorView | Scalar) -> torch.Tensor | Number:
        return self.tensors[value] if isinstance(value, TensorView) else self.number(value)

    @cached_property
    def sizes(self) -> dict[Symbol, int]:
        """The integer symbols: what kernels are sized by."""
        return {s: v for s, v in self.values.items() if isinstance(v, int)}

    def local_shape(self, tv: TensorView) -> tuple[int, ...]:
        return local_sizes(tv, [int(self.number(x)) for x in tv.shape()])

    def is_mine(self, tv: TensorView) -> bool:
        """Whether this rank holds a part of `tv`."""
        return tv.mesh is None or tv.mesh.has(self.machine.rank)

    def is_idle(self, op: Op) -> bool:
        """Whether the op concerns only meshes without this rank."""
        tensors = [v for v in (*op.outputs, *op.inputs) if isinstance(v, TensorView)]
        return bool(tensors) and not any(map(self.is_mine, tensors))


# ------------------------------------------------------------------ the table
def _allocate(op: Allocate, frame: Frame) -> None:
    tv = op.buffer
    shape = frame.local_shape(tv)
    buffer = torch.empty_strided(
        shape,
        allocated_strides(tv, shape),
        dtype=to_torch(tv.dtype()),
        device=frame.machine.device,
    )
    frame.tensors[tv] = buffer.zero_() if op.zero_init else buffer


def _deallocate(op: Deallocate, frame: Frame) -> None:
    del frame.tensors[op.buffer]


def _launch(op: LaunchKernel, frame: Frame) -> None:
    for out in op.outs:
        if out not in frame.tensors:
            frame.tensors[out] = frame.tensors[alias_target(frame.program, out)]
    frame.machine.kernel(op.group).run(
        [frame.operand(v) for v in op.ins],
        [frame.tensors[o] for o in op.outs],
        sizes=frame.sizes,
    )


def alias_target(program: HostIrContainer, out: TensorView) -> TensorView:
    """Return the input whose buffer an in-place output is written into."""
    into = program.values.alias_of(out)
    assert into is not None, f"{out} has neither a buffer nor a declared alias"
    return into


def _communicate(op: Communication, frame: Frame) -> None:
    team = op.team.ranks(frame.machine.rank)
    if team:
        inp, out = (frame.tensors.get(t) if frame.is_mine(t) else None for t in (op.inp, op.out))
        frame.works[op.number] = post(op, team, inp, out)(frame.machine.backend())


def _wait(op: Wait, frame: Frame) -> None:
    work = frame.works.pop(op.number, None)
    if work is not None:
        work.wait()


def slice_bounds(op: LocalSlice, frame: Frame) -> tuple[int, int]:
    """Return (start, length) of this rank's part along the op's axis."""
    mesh = op.out.mesh
    assert mesh is not None, f"{op.out} has no mesh"
    length = frame.local_shape(op.out)[op.axis]
    return mesh.coordinate(frame.machine.rank, op.ptype) * length, length


def _local_slice(op: LocalSlice, frame: Frame) -> None:
    start, length = slice_bounds(op, frame)
    frame.tensors[op.out].copy_(frame.tensors[op.inp].narrow(op.axis, start, length))


def _tensor_op(op: TensorOp, frame: Frame) -> None:
    """Compute into allocated outputs; outputs without a buffer become views."""
    if all(out in frame.tensors for out in op.outputs):
        compute_into(op, frame.operand, [frame.tensors[o] for o in op.outputs], frame.local_shape)
        return
    results = compute(op, frame.operand, frame.local_shape)
    frame.tensors.update(zip(op.outputs, results, strict=True))


HANDLERS: dict[type[Op], Callable[..., None]] = {
    Allocate: _allocate,
    Deallocate: _deallocate,
    LaunchKernel: _launch,
    Communication: _communicate,
    Wait: _wait,
    LocalSlice: _local_slice,
}


def handler_of(op: Op) -> Callable[[Op, Frame], None]:
    found = HANDLERS.get(type(op))
    if found is None:
        assert isinstance(op, TensorOp), f"{op.name} has no handler"
        return _tensor_op  # pyright: ignore[reportReturnType]
    return found


# ------------------------------------------------------------------ the evaluator
class HostIrEvaluator:
    """Runs one program on one rank; not shared between ranks.

    `communicator` is needed by programs with a mesh; `device` defaults to that of the inputs.
    """

    def __init__(
        self,
        program: HostIrContainer,
        communicator: object = None,
        *,
        device: torch.device | str | None = None,
        make_runner: MakeRunner = make_kernel_executor,
    ) -> None:
        from hostir.session import Session

        self.program = program
        self._binder = InputBinder(program.values)
        self._session = Session(program, communicator, device)
        self._make_runner = make_runner
        self._runners: dict[int, KernelRunner] = {}

    def kernel(self, group: int) -> KernelRunner:
        """Return the runner of a kernel group."""
        if group not in self._runners:
            self._runners[group] = self._make_runner(self.program.groups[group])
        return self._runners[group]
