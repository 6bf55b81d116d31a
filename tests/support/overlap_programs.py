"""Programs with matmuls next to collectives, and a machine description for which overlap
pays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fuser import DataType, FusionDefinition, ParallelType, TensorView, multidevice
from fuser.ir.op import walk
from fuser.multidevice import Communicator, DeviceMesh
from hostir.ir.ops import ForLoop, StartsCommunication
from hostir.ir.program import HostIrContainer
from tests.support.predicted_times import PLAIN
from tools.fuzz.host_program import fault_of

X, Y, STREAM = ParallelType.mesh_x, ParallelType.mesh_y, ParallelType.stream
# Everything in proportion to its size; a byte takes as long as ten operations.
SLOW = replace(
    PLAIN,
    name="slow",
    multiprocessors=1,
    matmul=((1.0, 1e8),),
    matmul_dtypes=dict.fromkeys(PLAIN.matmul_dtypes, 1.0),
    tiles=((1, 1, 1.0),),
    memory_bandwidth=1e15,
    pull_bandwidth=1e7,
    nccl=dict.fromkeys(PLAIN.nccl, 10000000.0),
    nccl_other_bandwidth=1e7,
    allreduce_kernel_bandwidth=1e7,
    host_run_s=0.0,
    host_kernel_s=0.0,
    host_library_s=0.0,
    host_post_s=0.0,
)
DESCRIBED = ["machine(h200)"]


def cut(tv: TensorView, axis: int, d: int, ptype: ParallelType = X) -> None:
    tv.outer_split(axis, d)
    tv.axis(axis).parallelize(ptype)


Outputs = TensorView | tuple[TensorView, ...]


@dataclass(frozen=True)
class Form:
    """A program for d ranks, its meaning in float64, and the transfers of its loop, if any."""

    define: Callable[[FusionDefinition, int], tuple[list[TensorView], Outputs]]
    meaning: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]
    shapes: Sequence[tuple[int, ...]]
    sent: tuple[str, ...] = ("recv", "send")
    dtype: torch.dtype = torch.float32


def linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    return torch.nn.functional.linear(x, w, b)


def inputs_of(fd: FusionDefinition, d: int, *ranks: int, dtype: DataType) -> list[TensorView]:
    found = [fd.define_tensor([-1] * n, contiguity=True, dtype=dtype) for n in ranks]
    for tv in found:
        tv.set_device_mesh(DeviceMesh(range(d)))
    return found


def gather(rows: int = 2, axis: int = 0, dtype: DataType = DataType.Float):
    """linear(x, w) with x cut by rows and gathered; w is cut by columns of the result."""

    def build(fd: FusionDefinition, d: int) -> tuple[list[TensorView], TensorView]:
        x, w = inputs_of(fd, d, rows, 2, dtype=dtype)
        y = fd.ops.linear(x, w)
        cut(x, axis, d)
        cut(w, 0, d)
        return [x, w], y

    return build


def gather_for_three(fd: FusionDefinition, d: int) -> tuple[list[TensorView], TensorView]:
    """One gathered tensor that two linears and a sum of rows read."""
    x, w, v = inputs_of(fd, d, 2, 2, 2, dtype=DataType.Float)
    total = fd.ops.add(fd.ops.linear(x, w), fd.ops.linear(x, v))
    y = fd.ops.add(total, fd.ops.sum(x, [1], True))
    for tv in (x, w, v):
        cut(tv, 0, d)
    return [x, w, v], y


def scatter(
    axis: int | None = 0, bias: bool = False, dtype: DataType = DataType.Float
) -> Callable[[FusionDefinition, int], tuple[list[TensorView], TensorView]]:
    """linear(x, w) with K cut in both operands; the result is cut along an axis, or
    replicated.
    """

    def build(fd: FusionDefinition, d: int) -> tuple[list[TensorView], TensorView]:
        tensors = inputs_of(fd, d, 2, 2, *([1] if bias else []), dtype=dtype)
        y = fd.ops.linear(*tensors)
        for tv in tensors[:2]:
            cut(tv, 1, d)
        y.set_device_mesh(DeviceMesh(range(d)))
        if axis is not None:
            cut(y, axis, d)
        return tensors, y

    return build


def batched(fd: FusionDefinition, d: int) -> tuple[list[TensorView], TensorView]:
    """A batched matmul whose batches are gathered."""
    a, b = inputs_of(fd, d, 3, 3, dtype=DataType.Float)
    y = fd.ops.matmul(a, b)
    cut(a, 0, d)
    y.set_device_mesh(DeviceMesh(range(d)))
    return [a, b], y


def of_weights(
    sends: str, axis: int, result: int | None = None
) -> Callable[[FusionDefinition, int], tuple[list[TensorView], TensorView]]:
    """linear(x [m, k], w [b, n, k], bias [b, n]) with a batch of weights, in several forms.

    Either x or w is gathered along an axis, or both are cut along k. In the latter case, the result
    is cut along an axis, or replicated.
    """

    def build(fd: FusionDefinition, d: int) -> tuple[list[TensorView], TensorView]:
        tensors = inputs_of(fd, d, 2, 3, 2, dtype=DataType.Float)
        x, w, bias = tensors
        if sends == "y":
            y = fd.ops.linear(x, w, bias)
            cut(x, 1, d)
            cut(w, 2, d)
        else:
            moved = x if sends == "x" else w
            whole = fd.ops.set(moved)
            y = fd.ops.linear(whole, w, bias) if sends == "x" else fd.ops.linear(x, whole, bias)
            cut(moved, axis, d)
            whole.set_device_mesh(DeviceMesh(range(d)))
        y.set_device_mesh(DeviceMesh(range(d)))
        if result is not None:
            cut(y, result, d)
        return tensors, y

    return build


def batch_of_linears(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.stack([linear(x, *of_one) for of_one in zip(w, b, strict=True)])


def mlp(fd: FusionDefinition, d: int) -> tuple[list[TensorView], TensorView]:
    """A sequence-parallel MLP: allgather, linear, tanh, linear, reduce-scatter."""
    x, w, v = inputs_of(fd, d, 2, 2, 2, dtype=DataType.Float)
    y = fd.ops.linear(fd.ops.tanh(fd.ops.linear(x, w)), v)
    cut(x, 0, d)
    cut(w, 0, d)
    cut(v, 1, d)
    y.set_device_mesh(DeviceMesh(range(d)))
    cut(y, 0, d)
    return [x, w, v], y


def mlp_meaning(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return linear(torch.tanh(linear(x, w)), v)


TWO = ((32, 64), (16, 64))
WEIGHTS = ((16, 32), (8, 16, 32), (8, 16))
FORMS = {
    "gather": Form(gather(), linear, TWO),
    "gather, half": Form(gather(dtype=DataType.BFloat16), linear, TWO, dtype=torch.bfloat16),
    "gather, 3 axes": Form(gather(3, 1), linear, ((3, 16, 32), (16, 32))),
    "gather for three": Form(
        gather_for_three,
        lambda x, w, v: linear(x, w) + linear(x, v) + x.sum(1, keepdim=True),
        ((32, 64), (16, 64), (16, 64)),
        ("Allgather", "recv", "send"),
    ),
    "gathered batches": Form(batched, torch.matmul, ((8, 6, 5), (8, 5, 7))),
    "scatter": Form(scatter(), linear, TWO),
    "scatter, bias": Form(scatter(bias=True), linear, (*TWO, (16,))),
    "scatter columns": Form(scatter(1), linear, TWO),
    "scatter, half": Form(scatter(dtype=DataType.BFloat16), linear, TWO, dtype=torch.bfloat16),
    "allreduce": Form(scatter(None), linear, TWO, ("recv", "send", "Allgather")),
    "rows for a batch of weights": Form(of_weights("x", 0), batch_of_linears, WEIGHTS),
    "a batch of weights": Form(of_weights("w", 0), batch_of_linears, WEIGHTS),
    "columns of a batch of weights": Form(of_weights("w", 1), batch_of_linears, WEIGHTS),
    "scatter of a batch": Form(of_weights("y", 1, 0), batch_of_linears, WEIGHTS),
    "scatter of rows of a batch": Form(of_weights("y", 1, 1), batch_of_linears, WEIGHTS),
    "scatter of columns of a batch": Form(of_weights("y", 1, 2), batch_of_linears, WEIGHTS),
    "allreduce of a batch": Form(
        of_weights("y", 1), batch_of_linears, WEIGHTS, ("recv", "send", "Allgather")
    ),
    "mlp": Form(mlp, mlp_meaning, ((32, 16), (32, 16), (16, 32)), ("recv", "send") * 2),
}


def several(x: object) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def defined(form: Form, d: int) -> tuple[FusionDefinition, list[TensorView], Outputs]:
    with FusionDefinition() as fd:
        tensors, outputs = form.define(fd, d)
        for y in several(outputs):
            fd.add_output(y)
    return fd, tensors, outputs


def run(
    form: Form,
    d: int,
    options: Sequence[str],
    *,
    disable: Sequence[str] = (),
    device: torch.device | None = None,
    seeds: Sequence[int] = (0, 0),
) -> HostIrContainer:
    """Runs a program on this rank for each seed; compares with float64, and checks the
    streams.
    """
    fd, tensors, _ = defined(form, d)
    rank = Communicator.instance().rank()
    mine: list[torch.Tensor] = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        whole = [torch.randn(s, generator=generator).to(form.dtype) for s in form.shapes]
        wants = several(form.meaning(*(x.double() for x in whole)))
        mine = [multidevice.shard_tensor(x, tv) for x, tv in zip(whole, tensors, strict=True)]
        mine = [x.to(device or "cpu") for x in mine]
        if device is not None and seed % 3 == rank % 3:
            torch.cuda._sleep(1_000_000 * (seed % 5))  # ranks out of step
        found = fd.execute(mine, _enable_options=[*DESCRIBED, *options], _disable_options=disable)
        for got, want, sharding in zip(found, wants, fd.fec.get_output_shardings(), strict=True):
            axis = sharding.axis_sharded_on(X)
            part = want if axis < 0 else want.chunk(d, axis)[rank]
            atol, rtol = (1e-4, 1e-4) if form.dtype is torch.float32 else (0.5, 0.05)
            torch.testing.assert_close(got.cpu().double(), part, atol=atol, rtol=rtol)
    assert fault_of(fd, mine, rank) is None
    return fd.fec.host_program()


def sent(program: HostIrContainer) -> list[str]:
    found = [op for op in walk(program.ops) if isinstance(op, StartsCommunication)]
    return [getattr(op, "type", type(op).__name__) for op in found]


def has_loops(program: HostIrContainer) -> bool:
    return any(isinstance(op, ForLoop) for op in walk(program.ops))
