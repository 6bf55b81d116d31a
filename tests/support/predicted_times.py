"""Small programs whose predicted times are computed by hand."""

from __future__ import annotations

from dataclasses import replace

from fuser import DataType, ParallelType, ops
from fuser.ir.fusion import TensorView
from hostir import (
    NUMBER_OF_STREAMS,
    Allocate,
    Communication,
    GetCurrentStream,
    HostIrContainer,
    SetCurrentStream,
    Stream,
    Synchronize,
    TeamOf,
    Wait,
    as_scalar,
)
from hostir.cost.machine_model import H200, Machine
from hostir.cost.report import Prediction, predict
from hostir.cost.simulator import simulated_schedule
from multidevice import DeviceMesh

X = ParallelType.mesh_x


ENTRY = Stream(name="S0")


# Round numbers: nothing takes time but bytes and operations, and any kernel fills the machine.
PLAIN = replace(
    H200,
    name="plain",
    launch_s=0.0,
    matmul_launch_s=0.0,
    copy_latency_s=0.0,
    nccl_latency_s=0.0,
    nccl_fill_s=0.0,
    memory_bandwidth=1e9,
    pull_bandwidth=1e8,
    nccl={**H200.nccl, "Allgather": 1e8, "Allreduce": 1e8, "ReduceScatter": 1e8},
    nccl_other_bandwidth=1e8,
    allreduce_kernel_s=dict.fromkeys(H200.allreduce_kernel_s, 1e-15),
    allreduce_kernel_bandwidth=1e8,
    kernel_fill_nbytes=1.0,
    host_run_s=0.0,
)


def predicted(
    program: HostIrContainer, machine: Machine = PLAIN, *, ranks: int = 0, streams: int = 4
) -> Prediction:
    made = simulated_schedule(program, {NUMBER_OF_STREAMS: streams}, machine, ranks=range(ranks))
    return predict(program, made)


def seconds(program: HostIrContainer, machine: Machine = PLAIN) -> float:
    return max(one.seconds for one in predicted(program, machine).classes)


def row(tv: TensorView, *, sharded: bool = True) -> TensorView:
    """Cuts the first axis over the devices."""
    if sharded:
        tv.axis(0).parallelize(X)
    return tv


def linear_program(
    m: int,
    n: int,
    k: int,
    dtype: DataType = DataType.BFloat16,
    *,
    times: int = 1,
    batch: tuple[int, ...] = (),
) -> HostIrContainer:
    hic = HostIrContainer()
    with hic:
        x, w = hic.input([m, k], dtype), hic.input([*batch, n, k], dtype)
        for _ in range(times):
            y = ops.linear(x, w)
            hic.append(y)
            hic.add_output(y)
    return hic


def gather(d: int, *, kernel: str = "") -> HostIrContainer:
    """A program: an allgather on Stream 1, and a kernel on Stream 0, which may overlap.

    The allgather moves 1000 bytes per rank; the kernel, before or after it, moves 2000 bytes.
    """
    mesh = DeviceMesh(range(d))
    hic = HostIrContainer()
    with hic:
        x = row(hic.input([d, 250], mesh=mesh))
        y, z = hic.tensor([d, 250], mesh=mesh), hic.tensor([250])
        u = hic.input([250])
        hic.append(Allocate(y), Allocate(z), GetCurrentStream(ENTRY))

        def compute() -> None:
            hic.append(SetCurrentStream(Stream(as_scalar(0))), Synchronize(ENTRY))
            hic.append(ops.neg(u), into=z)

        if kernel == "before":
            compute()
        hic.append(SetCurrentStream(Stream(as_scalar(1))), Synchronize(ENTRY))
        hic.append(Communication(x, y, number=0, type="Allgather", team=TeamOf(mesh, (X,))))
        hic.append(Wait(0))
        if kernel == "after":
            compute()
        hic.append(
            SetCurrentStream(ENTRY),
            Synchronize(Stream(as_scalar(0))),
            Synchronize(Stream(as_scalar(1))),
        )
        hic.add_output(y)
    return hic
