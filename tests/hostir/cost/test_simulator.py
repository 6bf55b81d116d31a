"""The cost model on programs whose times are computed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from fuser import DataType, ParallelType, ops
from fuser.ir.types import MemoryType
from fuser.support.errors import UnsupportedError, VerifyError
from hostir import (
    NUMBER_OF_STREAMS,
    RANK,
    Allocate,
    CollectivePermute,
    Communication,
    Deallocate,
    EndCoalescing,
    GetCurrentStream,
    HostIrContainer,
    P2PCommunication,
    SetCurrentStream,
    ShardByStream,
    StartCoalescing,
    Stream,
    Synchronize,
    TeamOf,
    Wait,
    as_scalar,
    eq,
    ne,
    where,
)
from hostir.cost.machine_model import H200, Machine
from hostir.cost.report import predict, report
from hostir.cost.simulator import simulated_schedule
from hostir.cost.traffic import traffic_of
from multidevice import DeviceMesh
from tests.support.predicted_times import (
    ENTRY,
    PLAIN,
    X,
    gather,
    linear_program,
    predicted,
    row,
    seconds,
)


# ------------------------------------------------------------------ one rank
def two_kernels(*, wait: bool) -> HostIrContainer:
    """Each moves 2000 bytes, on a stream of its own; both begin with 1000 bytes of input."""
    hic = HostIrContainer()
    with hic:
        x = hic.input([250])
        outs = [hic.tensor([250]) for _ in range(2)]
        hic.append(*map(Allocate, outs), GetCurrentStream(ENTRY))
        for i, out in enumerate(outs):
            hic.append(SetCurrentStream(Stream(as_scalar(i))), Synchronize(ENTRY))
            if wait and i:
                hic.append(Synchronize(Stream(as_scalar(0))))
            hic.append(ops.neg(x), into=out)
            hic.add_output(out)
        hic.append(
            SetCurrentStream(ENTRY),
            Synchronize(Stream(as_scalar(0))),
            Synchronize(Stream(as_scalar(1))),
        )
    return hic


def test_two_kernels_share_the_multiprocessors() -> None:
    """Whether they wait for each other or not, both together take the sum."""
    assert seconds(two_kernels(wait=True)) == pytest.approx(4e-6)
    assert seconds(two_kernels(wait=False)) == pytest.approx(4e-6)


def test_small_kernels_on_two_streams_run_at_once_unless_one_waits() -> None:
    """Each keeps a quarter of the multiprocessors busy."""
    machine = replace(PLAIN, kernel_fill_nbytes=8000.0)
    assert seconds(two_kernels(wait=False), machine) == pytest.approx(2e-6)
    assert seconds(two_kernels(wait=True), machine) == pytest.approx(4e-6)
    # With three quarters each, the second one begins with what is left and ends later.
    machine = replace(PLAIN, kernel_fill_nbytes=2000.0 / 0.75)
    assert seconds(two_kernels(wait=False), machine) == pytest.approx(2e-6 + 4e-6 / 3)


def test_the_streams_of_a_report_add_up() -> None:
    (one,) = predicted(two_kernels(wait=True)).classes
    assert [s.stream for s in one.streams] == ["Stream 0", "Stream 1"]
    for stream in one.streams:
        assert stream.compute == pytest.approx(2e-6)
        assert stream.idle == pytest.approx(2e-6)
        assert stream.communication == stream.exposed == 0
    assert one.compute == pytest.approx(4e-6)


def test_a_matmul_takes_whole_waves_of_tiles() -> None:
    """132 multiprocessors, tiles of 128 x 128: 132 tiles are one wave, 133 two."""
    machine = replace(PLAIN, memory_bandwidth=1e15, matmul=((1.0, 1e12),), tiles=((128, 128, 1.0),))
    one = 132 * 128 * 128 * 2 * 64 / 1e12
    assert seconds(linear_program(132 * 128, 128, 64), machine) == pytest.approx(one)
    assert seconds(linear_program(133 * 128, 128, 64), machine) == pytest.approx(2 * one)
    # So do those of all weights of a batch.
    assert seconds(linear_program(128, 128, 64, batch=(2, 66)), machine) == pytest.approx(one)
    assert seconds(linear_program(128, 128, 64, batch=(133,)), machine) == pytest.approx(2 * one)
    # The tile that is done first is taken.
    smaller = replace(machine, tiles=(*machine.tiles, (64, 128, 0.5)))
    assert seconds(linear_program(64, 128, 64), smaller) == pytest.approx(one)
    fast = replace(machine, tiles=(*machine.tiles, (64, 128, 1.0)))
    assert seconds(linear_program(64, 128, 64), fast) == pytest.approx(one / 2)


def test_a_thin_matmul_is_bound_by_memory() -> None:
    nbytes = 2 * (1 * 4096 + 4096 * 4096 + 1 * 4096)
    found = seconds(linear_program(1, 4096, 4096))
    assert found == pytest.approx(nbytes / 1e9)
    nbytes = 2 * (1 * 4096 + 8 * 4096 * 4096 + 8 * 4096)
    assert seconds(linear_program(1, 4096, 4096, batch=(8,))) == pytest.approx(nbytes / 1e9)


def test_the_rate_of_matmuls_follows_their_size() -> None:
    machine = replace(
        PLAIN,
        memory_bandwidth=1e15,
        multiprocessors=1,
        tiles=((1, 1, 1.0),),
        matmul=((1e6, 1e12), (4e6, 0.5e12)),
    )
    for size, rate in ((1e5, 1e12), (2e6, 0.75e12), (4e6, 0.5e12), (1e9, 0.5e12)):
        flops = 2 * 10 * 10 * math.ceil(size / 200)
        found = seconds(linear_program(10, 10, flops // 200), machine)
        assert found == pytest.approx(flops / rate, rel=1e-3)


@pytest.mark.parametrize(("device", "rate"), [("GPU", 0.5e12), ("CPU", 1e12)])
def test_a_gpus_rate_follows_what_a_call_computes_not_how_it_is_cut(
    device: str, rate: float
) -> None:
    """8e6 operations in one product run at 0.5e12 on both; in eight, on a CPU each at 1e12."""
    points = ((1e6, 1e12), (4e6, 0.5e12))
    one_tile = {"multiprocessors": 1, "tiles": ((1, 1, 1.0),)}
    machine = replace(PLAIN, device=device, memory_bandwidth=1e15, matmul=points, **one_tile)
    assert seconds(linear_program(80, 10, 5000), machine) == pytest.approx(8e6 / 0.5e12)
    cut = seconds(linear_program(10, 10, 5000, times=8), machine)
    assert cut == pytest.approx(8e6 / rate)


def test_float32_matmuls_are_scaled_and_unknown_dtypes_refused() -> None:
    half, single = (linear_program(4096, 4096, 4096, d) for d in (DataType.Half, DataType.Float))
    machine = replace(H200, matmul_launch_s=0.0)
    assert seconds(single, machine) == pytest.approx(seconds(half, machine) / 0.07)
    with pytest.raises(UnsupportedError, match=r"linear .*dtype without a measured speed"):
        seconds(linear_program(8, 8, 8, DataType.Int32))


def test_the_peak_is_of_what_is_allocated_at_once() -> None:
    """a (400) and b (800) are alive together; c (1200) is allocated after a is freed: 2000."""
    hic = HostIrContainer()
    with hic:
        x = hic.input([100])
        a, b, c = hic.tensor([100]), hic.tensor([200]), hic.tensor([300])
        hic.append(Allocate(a), Allocate(b), Deallocate(a), Allocate(c), Deallocate(b))
        hic.add_output(x)
    (one,) = predicted(hic).classes
    assert (one.input_nbytes, one.peak_nbytes) == (400, 2000)


def test_a_buffer_of_one_name_counts_once_in_a_loop() -> None:
    hic = HostIrContainer()
    with hic:
        x = hic.input([100])
        with hic.loop(5):
            a = hic.tensor([100])
            hic.append(Allocate(a))
        hic.add_output(x)
    assert predicted(hic).classes[0].peak_nbytes == 400


# ------------------------------------------------------------------ several ranks


def test_a_collective_takes_its_latency_and_its_bytes() -> None:
    machine = replace(PLAIN, nccl_latency_s=7e-6, nccl_fill_s=10e-6, nccl_fill_nbytes=3000.0)
    found = predicted(gather(4), machine)
    (one,) = found.classes
    # Each rank receives 3 of 4 parts; half of the ramp.
    assert one.seconds == pytest.approx(7e-6 + 5e-6 + 3000 / 1e8)
    assert one.ranks == (0, 1, 2, 3)
    assert (one.sent_nbytes, one.received_nbytes) == (3000, 3000)
    assert found.links == tuple((a, b, 1000) for a in range(4) for b in range(4) if a != b)
    assert one.exposed == one.communication == pytest.approx(one.seconds)


def test_a_collective_waits_for_the_kernel_that_was_ready_before() -> None:
    """10 us on the link, 2 us in the kernel, which leaves no multiprocessor."""
    assert seconds(gather(2)) == pytest.approx(10e-6)
    before, after = predicted(gather(2, kernel="before")), predicted(gather(2, kernel="after"))
    assert before.classes[0].seconds == pytest.approx(12e-6)
    assert before.classes[0].exposed == pytest.approx(10e-6)
    # The other way round, the kernel uses the multiprocessors that the collective leaves.
    left = 1 - PLAIN.nccl_multiprocessors / PLAIN.multiprocessors
    assert after.classes[0].seconds == pytest.approx(10e-6)
    assert after.classes[0].exposed == pytest.approx(10e-6 - 2e-6 / left)


def test_collectives_of_one_team_keep_the_order_of_the_program() -> None:
    """The first one waits for a kernel of 2 us, the second one for the first; 10 us each."""
    mesh = DeviceMesh(range(2))
    hic = HostIrContainer()
    with hic:
        x, u = row(hic.input([2, 250], mesh=mesh)), hic.input([250])
        outs, z = [hic.tensor([2, 250], mesh=mesh) for _ in range(2)], hic.tensor([250])
        hic.append(*map(Allocate, (*outs, z)), GetCurrentStream(ENTRY))
        for i, y in enumerate(outs):
            hic.append(SetCurrentStream(Stream(as_scalar(i))), Synchronize(ENTRY))
            if not i:
                hic.append(ops.neg(u), into=z)
            team = TeamOf(mesh, (X,))
            hic.append(Communication(x, y, number=i, type="Allgather", team=team), Wait(i))
            hic.add_output(y)
        hic.append(
            SetCurrentStream(ENTRY),
            Synchronize(Stream(as_scalar(0))),
            Synchronize(Stream(as_scalar(1))),
        )
    # The kernel leaves three quarters of the multiprocessors, so that the second one could begin.
    assert seconds(hic, replace(PLAIN, kernel_fill_nbytes=8000.0)) == pytest.approx(22e-6)


def test_the_critical_path_leads_to_what_held_the_multiprocessors() -> None:
    steps = predicted(gather(2, kernel="before")).critical_path
    assert [round(s.seconds * 1e6, 6) for s in steps] == [10, 2]
    assert "Communication 0" in steps[0].op and "= -T" in steps[1].op


@pytest.mark.parametrize(
    ("kind", "links"),
    [
        ("Broadcast", ((1, 0, 1000), (1, 2, 1000))),
        ("Reduce", ((0, 1, 1000), (2, 1, 1000))),
    ],
)
def test_the_root_sends_or_receives(kind: Any, links: tuple[tuple[int, int, int], ...]) -> None:
    mesh = DeviceMesh(range(3))
    hic = HostIrContainer()
    with hic:
        x, y = hic.input([250], mesh=mesh), hic.tensor([250], mesh=mesh)
        team = TeamOf(mesh, (X,))
        one = Communication(x, y, number=0, type=kind, team=team, root=as_scalar(1))
        hic.append(Allocate(y), one, Wait(0))
        hic.add_output(y)
    made = simulated_schedule(hic, {NUMBER_OF_STREAMS: 4}, PLAIN)
    found = predict(hic, made)
    assert found.links == links
    totals = np.zeros((2, 3), dtype=int)
    for a, b, nbytes in links:
        totals[:, [a, b]] += np.diag([nbytes, nbytes])
    (sent, received) = traffic_of(made.unrolled).sent, traffic_of(made.unrolled).received
    assert [sent.tolist(), received.tolist()] == totals.tolist()
    # The root does not divide the ranks into classes.
    assert [one.ranks for one in found.classes] == [(0, 1, 2)]
    assert found.classes[0].seconds == pytest.approx(10e-6)


def test_ranks_without_a_shard_do_nothing() -> None:
    """The kernel's tensors are on rank 1 alone."""
    hic = HostIrContainer()
    with hic:
        x = hic.input([250], mesh=DeviceMesh([1]))
        u = hic.input([250], mesh=DeviceMesh([0, 1]))
        y = ops.neg(x)
        hic.append(y)
        hic.add_output(y)
        hic.add_output(u)
    found = predicted(hic, ranks=2)
    assert [(one.ranks, one.input_nbytes) for one in found.classes] == [((0,), 1000), ((1,), 2000)]
    assert [one.seconds for one in found.classes] == pytest.approx([0.0, 2e-6])


def test_ranks_with_larger_parts_take_longer() -> None:
    """Blocks of 100, 100 and 50 elements of 250: rank 2 has the short one."""
    hic = HostIrContainer()
    with hic:
        x = hic.input([250], mesh=DeviceMesh(range(3)))
        block = hic.tensor([250], mesh=DeviceMesh(range(3)))
        block.outer_split(0, 3)
        block.axis(0).parallelize(ParallelType.stream)
        hic.append(ShardByStream(block, x, RANK))
        y = ops.neg(block)
        hic.append(y)
        hic.add_output(x)
    found = predicted(hic)
    assert [one.ranks for one in found.classes] == [(0, 1), (2,)]


def test_an_expanded_axis_is_one_element_of_memory() -> None:
    """Operand and result: of 100 equal rows memory has one."""
    hic = HostIrContainer()
    with hic:
        x = hic.input([1, 250])
        y = ops.neg(ops.expand(x, [100, 250]))
        hic.append(y)
        hic.add_output(y)
    assert seconds(hic) == pytest.approx(2000 / 1e9)


def test_rows_that_do_not_lie_behind_one_another_are_packed() -> None:
    def program(order: tuple[int, ...]) -> HostIrContainer:
        hic = HostIrContainer()
        with hic:
            x, w = hic.input([4, 8, 16]), hic.input([8, 16])
            x.set_allocation_domain([x.axis(i) for i in order], True)
            y = ops.linear(x, w)
            hic.append(y)
            hic.add_output(y)
        return hic

    packed = seconds(program((1, 0, 2))) - seconds(program((0, 1, 2)))
    assert packed == pytest.approx(2 * 4 * 8 * 16 * 4 / 1e9)


def ring(
    d: int, *, backend: str = "NCCL", memory: MemoryType = MemoryType.global_
) -> HostIrContainer:
    """Every rank receives all parts, of 1000 bytes, its own first."""
    mesh = DeviceMesh(range(d))
    team = TeamOf(mesh, (X,))
    hic = HostIrContainer()
    with hic:
        x = row(hic.input([d, 250], mesh=mesh, memory=memory))
        y = hic.tensor([d, 250], mesh=mesh)
        hic.append(Allocate(y))
        own = hic.select(x, 0, RANK)
        with hic.loop(d) as i:
            to, source = (RANK - i + d) % d, (RANK + i) % d
            part = hic.select(y, 0, source)
            permute = CollectivePermute(own, part, to, source, number=0, team=team, backend=backend)
            hic.append(permute, Wait(0))
        hic.add_output(y)
    return hic


@pytest.mark.parametrize("d", [2, 3, 8])
def test_a_ring(d: int) -> None:
    """A copy of the own part, then d - 1 transfers, one after the other."""
    found = predicted(ring(d))
    (one,) = found.classes
    assert one.seconds == pytest.approx(2e-6 + (d - 1) * 1000 / 1e8)
    assert one.sent_nbytes == one.received_nbytes == 1000 * (d - 1)


def test_thousands_of_ranks_are_one_class() -> None:
    small, large = ring(4), gather(4096)
    assert len(predicted(small).classes) == 1
    found = predicted(large)
    assert len(found.classes) == 1 and len(found.classes[0].ranks) == 4096
    assert found.links is None
    assert "ranks 0..4095" in report(found) and "too many ranks to list" in report(found)


def p2p(d: int, backend: str, *, grouped: bool) -> HostIrContainer:
    """Everyone sends 1000 bytes to the next rank, and receives from the one before."""
    mesh = DeviceMesh(range(d))
    hic = HostIrContainer()
    with hic:
        x = row(hic.input([d, 250], mesh=mesh))
        y = row(hic.tensor([d, 250], mesh=mesh))
        hic.append(Allocate(y))
        both = [
            P2PCommunication(x, (RANK + 1) % d, number=0, type="send", backend=backend),
            P2PCommunication(y, (RANK + d - 1) % d, number=1, type="recv", backend=backend),
        ]
        if grouped:
            hic.append(StartCoalescing(), *both, EndCoalescing(2), Wait(2))
        else:
            hic.append(*both, Wait(1), Wait(0))
        hic.add_output(y)
    return hic


def test_a_group_of_transfers_and_peer_copies() -> None:
    assert seconds(p2p(4, "NCCL", grouped=True)) == pytest.approx(1000 / 1e8)
    # Peer copies: a tensor in memory that peers cannot map is copied first.
    assert seconds(p2p(4, "CUDA", grouped=False)) == pytest.approx(2000 / 1e9 + 1000 / 1e8)
    assert seconds(p2p(4, "CUDA", grouped=True)) == pytest.approx(2000 / 1e9 + 1000 / 1e8)
    (one,) = predicted(ring(3, backend="CUDA", memory=MemoryType.symmetric)).classes
    assert one.seconds == pytest.approx(2e-6 + 2 * 1000 / 1e8)


def beside_a_kernel(d: int, backend: str, *, one_call: bool) -> HostIrContainer:
    """On one stream 1000 bytes go to the next rank, in mapped memory; on another a kernel moves
    2000."""
    mesh = DeviceMesh(range(d))
    hic = HostIrContainer()
    with hic:
        x = row(hic.input([d, 250], mesh=mesh, memory=MemoryType.symmetric))
        y, z = row(hic.tensor([d, 250], mesh=mesh)), hic.tensor([250])
        u = hic.input([250])
        hic.append(Allocate(y), Allocate(z), GetCurrentStream(ENTRY))
        hic.append(SetCurrentStream(Stream(as_scalar(0))), Synchronize(ENTRY))
        hic.append(ops.neg(u), into=z)
        hic.append(SetCurrentStream(Stream(as_scalar(1))), Synchronize(ENTRY))
        to, source = (RANK + 1) % d, (RANK + d - 1) % d
        if one_call:
            team = TeamOf(mesh, (X,))
            hic.append(CollectivePermute(x, y, to, source, number=0, team=team, backend=backend))
            hic.append(Wait(0))
        else:
            both = [
                P2PCommunication(x, to, number=0, type="send", backend=backend),
                P2PCommunication(y, source, number=1, type="recv", backend=backend),
            ]
            hic.append(StartCoalescing(), *both, EndCoalescing(2), Wait(2))
        hic.append(SetCurrentStream(ENTRY))
        hic.append(*(Synchronize(Stream(as_scalar(k))) for k in (0, 1)))
        hic.add_output(y)
        hic.add_output(z)
    return hic


@pytest.mark.parametrize("one_call", [True, False])
@pytest.mark.parametrize("backend", ["CUDA", "MPI"])
def test_a_cpu_rank_computes_and_communicates_in_turns(backend: str, one_call: bool) -> None:
    """10 us of bytes and 2 us of a kernel; a GPU has engines for copies."""
    program = beside_a_kernel(3, backend, one_call=one_call)
    one = replace(PLAIN, multiprocessors=1, nccl_multiprocessors=1)
    assert seconds(program, replace(one, device="CPU")) == pytest.approx(12e-6)
    assert seconds(program, one) == pytest.approx(10e-6 if backend == "CUDA" else 12e-6)


def test_what_is_predicted_on_a_cpu_says_so() -> None:
    program = beside_a_kernel(2, "CUDA", one_call=True)
    text = report(predicted(program, replace(PLAIN, device="CPU", host_post_s=0.0)))
    assert "ranks 0 1: 12.0 us on the CPU\n" in text and "GPU" not in text
    assert "on the GPU; the host issues it in" in report(predicted(program))


def test_allreduces_of_cpu_ranks_are_a_librarys() -> None:
    """On GPUs a kernel of ours, which takes no time here but for bytes."""
    mesh = DeviceMesh(range(2))
    hic = HostIrContainer()
    with hic:
        x, y = hic.input([2, 250], mesh=mesh), hic.tensor([2, 250], mesh=mesh)
        team = TeamOf(mesh, (X,))
        allreduce = Communication(x, y, number=0, type="Allreduce", team=team, backend="MPI")
        hic.append(Allocate(y), allreduce, Wait(0))
        hic.add_output(y)
    slow = replace(PLAIN, nccl_latency_s=1.0)
    assert seconds(hic, slow) < 1e-3
    assert seconds(hic, replace(slow, device="CPU")) == pytest.approx(1 + 2000 / 1e8)


def pipeline(d: int) -> HostIrContainer:
    """Each rank receives 1000 bytes from the one before, and passes them on."""
    mesh = DeviceMesh(range(d))
    hic = HostIrContainer()
    with hic:
        x = row(hic.input([d, 250], mesh=mesh))
        with hic.branch(ne(RANK, 0)):
            hic.append(P2PCommunication(x, RANK - 1, number=0, type="recv"), Wait(0))
        with hic.branch(ne(RANK, d - 1)):
            hic.append(P2PCommunication(x, RANK + 1, number=1, type="send"), Wait(1))
        hic.add_output(x)
    return hic


def test_a_pipeline_has_a_class_per_rank_and_takes_all_its_transfers() -> None:
    found = predicted(pipeline(4))
    assert [one.ranks for one in found.classes] == [(0,), (1,), (2,), (3,)]
    ends = [10e-6, 20e-6, 30e-6, 30e-6]
    assert [one.seconds for one in found.classes] == pytest.approx(ends)
    assert found.links == ((0, 1, 1000), (1, 2, 1000), (2, 3, 1000))
    assert sum(step.times for step in found.critical_path) == 3


def test_ranks_that_meet_in_different_ops_wait_for_each_other() -> None:
    """Rank 0 enters after a kernel of 2 us, the others at once."""
    mesh = DeviceMesh(range(3))
    team = TeamOf(mesh, (X,))
    hic = HostIrContainer()
    with hic:
        x, u = row(hic.input([3, 250], mesh=mesh)), hic.input([250])
        y, z = hic.tensor([3, 250], mesh=mesh), hic.tensor([250])
        hic.append(Allocate(y), Allocate(z))
        with hic.branch(eq(RANK, 0)):
            hic.append(ops.neg(u), into=z)
            hic.append(Communication(x, y, number=0, type="Allgather", team=team), Wait(0))
        with hic.otherwise():
            hic.append(Communication(x, y, number=1, type="Allgather", team=team), Wait(1))
        hic.add_output(y)
    found = predicted(hic)
    assert [one.ranks for one in found.classes] == [(0,), (1, 2)]
    assert [one.seconds for one in found.classes] == pytest.approx([22e-6, 22e-6])
    assert [one.compute for one in found.classes] == pytest.approx([2e-6, 0.0])


def test_a_program_whose_ranks_do_not_meet_has_no_schedule() -> None:
    mesh = DeviceMesh(range(2))
    hic = HostIrContainer()
    with hic:
        x = row(hic.input([2, 250], mesh=mesh))
        hic.append(P2PCommunication(x, (RANK + 1) % 2, number=0, type="recv"), Wait(0))
        hic.add_output(x)
    with pytest.raises(VerifyError, match="the time of this program cannot be predicted"):
        predicted(hic)


def test_receives_that_block_their_streams_are_a_deadlock_on_a_gpu() -> None:
    """MPI carries out a receive beside its stream, NCCL in it."""
    mesh = DeviceMesh(range(2))
    hic = HostIrContainer()
    with hic:
        x, y = (row(hic.input([2, 250], mesh=mesh)) for _ in range(2))
        peer = ne(RANK, 1)
        hic.append(P2PCommunication(y, where(peer, 1, 0), number=0, type="recv", backend="MPI"))
        hic.append(P2PCommunication(x, where(peer, 1, 0), number=1, type="send", backend="MPI"))
        hic.append(Wait(0), Wait(1))
        hic.add_output(y)
    with pytest.raises(
        VerifyError, match=r"cannot be predicted on plain(.|\n)*deadlock(.|\n)*recv"
    ):
        predicted(hic)


@pytest.mark.parametrize("make", [lambda: gather(4), lambda: ring(4), lambda: pipeline(3)])
def test_a_faster_machine_never_takes_longer(make: Callable[[], HostIrContainer]) -> None:
    program = make()
    before = seconds(program, H200)
    for f in fields(Machine):
        value: Any = getattr(H200, f.name)
        if f.name.endswith("_bandwidth"):
            faster = replace(H200, **{f.name: value * 2})
        elif f.name == "allreduce_kernel_s":
            halves = {k: x / 2 for k, x in H200.allreduce_kernel_s.items()}
            faster = replace(H200, allreduce_kernel_s=halves)
        elif f.name.endswith("_s"):
            faster = replace(H200, **{f.name: value / 2})
        else:
            continue
        assert seconds(program, faster) <= before


def test_more_never_takes_less() -> None:
    times = [seconds(linear_program(m, 4096, 4096), H200) for m in (1, 64, 1024, 1025, 8192)]
    assert times == sorted(times)
    times = [seconds(ring(d), H200) for d in (2, 3, 4, 8)]
    assert times == sorted(times)
