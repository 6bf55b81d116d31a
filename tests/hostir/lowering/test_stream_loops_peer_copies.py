"""Programs whose ranks copy out of each other's memory: as text, as numbers, and what is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from fuser import FusionDefinition, MemoryType, ParallelType, TensorView
from fuser.ir.op import Op, walk
from fuser.multidevice import (
    Communicator,
    CommunicatorBackend,
    DeviceMesh,
    MultiDeviceExecutor,
    MultiDeviceExecutorParams,
    shard_tensor,
    simulate,
)
from fuser.support.errors import FuserError
from hostir.analysis.preflight import findings
from hostir.ir.ops import (
    NUMBER_OF_STREAMS,
    RANK,
    Allocate,
    CollectivePermute,
    Communication,
    IfThenElse,
    P2PCommunication,
    ShareMemHandles,
    StartCoalescing,
    Synchronize,
    Wait,
)
from hostir.ir.parser import parse
from hostir.ir.program import HostIrContainer, equal
from hostir.lowering.input_class import symbol_values
from multidevice.transports.peer_copy import PeerBackend
from tests.fuser.nvfuser.test_multi_device_executor import CASES, Case, executor_of, local
from tests.support.peer_graph_cases import CASES as CASES_OF_GRAPHS
from tests.support.peer_graph_cases import ROWS, K, N, numbers

X, STREAM = ParallelType.mesh_x, ParallelType.stream
LATE = ("all", "entry", "0", "1", "2", "3")


def copying(case: Case) -> Case:
    return replace(case, params={**case.params, "backend_type": CommunicatorBackend.cuda})


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.ranks > 1])
def test_every_program_on_ranks_gives_the_same_by_peer_copies(name: str) -> None:
    case = copying(CASES[name])
    data = torch.Generator().manual_seed(1)
    repetitions = [[torch.randn(shape, generator=data) for shape in case.shapes] for _ in range(4)]

    def body() -> None:
        executor, inputs, out = executor_of(case)
        for xs in repetitions:
            (got,) = executor.run([local(x, tv) for x, tv in zip(xs, inputs, strict=True)])
            want = local(case.meaning(*(x.double() for x in xs)), out)
            torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-4)
        program = executor.host_program()
        assert equal(parse(program.full_text()), program)
        assert findings(program, {**symbol_values(program, {}), NUMBER_OF_STREAMS: 4}) == []
        libraries = {op.backend for op in program.started() if hasattr(op, "backend")}  # pyright: ignore
        assert libraries == {"CUDA"}

    with simulate(case.ranks) as world:
        world.run(body)


def brought(*, ring: bool, wait: bool, backend: CommunicatorBackend, size: int) -> str:
    """MS-7 and MS-8: shards become steps; run on this rank, compare, and return the program."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([size, -1, -1], contiguity=True)
        y = fd.ops.set(x)
        fd.add_output(y)
    for tv in (x, y):
        tv.set_device_mesh(DeviceMesh(range(size)))
    x.axis(0).parallelize(X)
    y.axis(0).parallelize(STREAM)
    params = MultiDeviceExecutorParams(
        backend_type=backend,
        offset_stream_indexing_by_rank=ring,
        inter_stream_synchronization=wait,
    )
    executor = MultiDeviceExecutor(fd.fusion, params)
    data = torch.Generator().manual_seed(2)
    for rows in (6, 1, 0, 6):
        whole = torch.randn(size, rows, 5, generator=data)
        (got,) = executor.run([shard_tensor(whole, x)])
        torch.testing.assert_close(got, whole, atol=0, rtol=0)
    program = executor.host_program()
    kinds = {type(op) for op in walk(program.ops)}
    if backend is CommunicatorBackend.cuda:
        assert (ShareMemHandles in kinds) == ring
        assert StartCoalescing not in kinds
    synchronized = [
        op
        for branch in walk(program.ops)
        if isinstance(branch, IfThenElse)
        for op in walk(branch.then)
        if isinstance(op, Synchronize)
    ]
    assert bool(synchronized) == wait
    return str(program)


FOUR = [(ring, backend) for ring in (True, False) for backend in ("nccl", "cuda")]


@pytest.mark.parametrize(("ring", "backend"), FOUR)
@pytest.mark.parametrize("size", [2, 4])
def test_shards_become_steps_in_four_settings(ring: bool, backend: str, size: int) -> None:
    use = partial(brought, ring=ring, wait=False, backend=CommunicatorBackend[backend])
    with simulate(size) as world:
        assert len(set(world.run(partial(use, size=size)))) == 1


@pytest.mark.parametrize(("ring", "backend"), FOUR)
def test_the_next_stream_waits_where_it_is_asked_to(ring: bool, backend: str) -> None:
    use = partial(brought, ring=ring, wait=True, backend=CommunicatorBackend[backend])
    with simulate(4) as world:
        world.run(partial(use, size=4))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize(("ring", "backend"), FOUR)
def test_shards_become_steps_on_real_ranks(
    comm: Communicator, ring: bool, backend: str, wait: bool
) -> None:
    brought(ring=ring, wait=wait, backend=CommunicatorBackend[backend], size=comm.size())


def row_parallel(fd: FusionDefinition, d: int, *, swizzle: bool = True) -> list[TensorView]:
    """x [M, K] in rows becomes steps, the own one first, multiplied by w."""
    x, w = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
    gathered = fd.ops.set(x)
    y = fd.ops.linear(gathered, w)
    fd.add_output(y)
    for tv in (x, w, gathered):
        tv.set_device_mesh(DeviceMesh(range(d)))
    w.outer_split(0, d)
    w.axis(0).parallelize(X)
    for tv in (x, gathered):
        tv.outer_split(0, d)
    x.axis(0).parallelize(X)
    if swizzle:
        gathered.swizzle1d(0, X)
    gathered.axis(0).parallelize(STREAM)
    return [x, w]


def chained(fd: FusionDefinition, d: int) -> list[TensorView]:
    """The gathered tensor is computed before: its buffer is symmetric, and nothing is copied."""
    x, w, v = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(3))
    hidden = fd.ops.relu(fd.ops.linear(x, w))
    y = fd.ops.linear(fd.ops.set(hidden), v)
    fd.add_output(y)
    for tv in (x, w, v, y):
        tv.set_device_mesh(DeviceMesh(range(d)))
    x.outer_split(0, d)
    x.axis(0).parallelize(X)
    return [x, w, v]


def execute(
    define: Callable[..., list[TensorView]], d: int, shapes: list[tuple[int, ...]], *options: str
) -> HostIrContainer:
    with FusionDefinition() as fd:
        inputs = define(fd, d)
    data = torch.Generator().manual_seed(3)
    for _ in range(4):
        xs = [torch.randn(shape, generator=data) for shape in shapes]
        mine = [shard_tensor(x, tv) for x, tv in zip(xs, inputs, strict=True)]
        (got,) = fd.execute(mine, _enable_options=["peer_copies", *options])
        x, *rest = (x.double() for x in xs)
        want = torch.nn.functional.linear(x, rest[0])
        for w in rest[1:]:
            want = torch.nn.functional.linear(want.relu(), w)
        if define is row_parallel:
            want = want.chunk(d, 1)[Communicator.instance().rank()]
        torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-4)
    return fd.fec.host_program()


def ops_of(program: HostIrContainer) -> Iterator[Op]:
    return walk(program.ops)


def test_the_own_block_comes_first_and_the_others_in_turn() -> None:
    def body() -> None:
        program = execute(row_parallel, 4, [(8, 5), (12, 5)])
        kinds = [type(op) for op in ops_of(program)]
        assert CollectivePermute not in kinds and Communication not in kinds
        assert kinds.count(P2PCommunication) == 2
        # The input is copied to where peers can map it once, before the loop.
        (made,) = [o for o in program.ops if isinstance(o, Allocate) and o.mem_type == "symmetric"]
        sent = next(o for o in ops_of(program) if getattr(o, "type", "") == "send")
        assert sent.buffer is made.buffer  # pyright: ignore
        (*_, last) = (o for o in ops_of(program) if isinstance(o, IfThenElse) and not o.then)
        assert [type(o) for o in last.orelse] == [Wait]
        assert findings(program, {**symbol_values(program, {}), NUMBER_OF_STREAMS: 4}) == []

    with simulate(4) as world:
        world.run(body)


@pytest.mark.parametrize("late", LATE)
def test_the_steps_wait_for_all_that_they_need(late: str) -> None:
    with simulate(4) as world:
        world.run(lambda: execute(row_parallel, 4, [(8, 5), (12, 5)], f"late_stream({late})"))


def test_what_is_computed_is_sent_from_where_it_lies() -> None:
    def body() -> None:
        program = execute(chained, 2, [(8, 5), (6, 5), (4, 6)])
        (sent,) = program.communications()
        assert sent.backend == "CUDA"
        assert sent.inp.memory is MemoryType.symmetric
        assert not any(o.name == "Set" for o in ops_of(program))

    with simulate(2) as world:
        world.run(body)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("define", [row_parallel, chained])
def test_real_ranks_copy_from_each_other(
    comm: Communicator, define: Callable[..., list[TensorView]]
) -> None:
    d = comm.size()
    shapes = [(2 * d, 5), (3 * d, 5), (4, 3 * d)]
    execute(define, d, shapes[: 3 if define is chained else 2])


def test_a_rank_that_sends_to_itself_is_found_before_the_run() -> None:
    program = HostIrContainer()
    with program:
        x, y = (program.tensor([2, 4], mesh=range(2)) for _ in range(2))
        for tv in (x, y):
            tv.axis(0).parallelize(X)
        program.add_input(x)
        program.append(
            Allocate(y),
            P2PCommunication(x, RANK, number=0, type="send", backend="CUDA"),
            P2PCommunication(y, RANK, number=1, type="recv", backend="CUDA"),
            Wait(1),
            Wait(0),
        )
        program.add_output(y)
    found = [f.what for f in findings(program, {NUMBER_OF_STREAMS: 4})]
    assert any("ranks 0 1: the peer is the rank itself" in what for what in found), found


def test_a_send_that_is_waited_for_before_the_receive_is_found() -> None:
    """The other rank copies only when it reaches its receive."""
    program = HostIrContainer()
    with program:
        x, y = (program.tensor([2, 4], mesh=range(2)) for _ in range(2))
        for tv in (x, y):
            tv.axis(0).parallelize(X)
        program.add_input(x)
        other = (RANK + 1) % 2
        program.append(
            Allocate(y),
            P2PCommunication(x, other, number=0, type="send", backend="CUDA"),
            Wait(0),
            P2PCommunication(y, other, number=1, type="recv", backend="CUDA"),
            Wait(1),
        )
        program.add_output(y)
    (found,) = findings(program, {NUMBER_OF_STREAMS: 4})
    assert found.kind == "deadlock"


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", CASES_OF_GRAPHS)
def test_a_run_finds_nothing_that_one_which_failed_has_sent(
    name: str, comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank fails before it has sent its part, the others when they have sent theirs."""
    d, rank, is_failing = comm.size(), comm.rank(), [False]

    def fail(method: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*given: Any) -> Any:
            if is_failing[0]:
                raise RuntimeError(f"an error of rank {rank}")
            return method(*given)

        return failing

    where = "_post" if rank == 1 else "_poll"
    monkeypatch.setattr(PeerBackend, where, fail(getattr(PeerBackend, where)))
    fd, k = CASES_OF_GRAPHS[name](d), K * (d if name == "scatter" else 1)
    ended = ""
    for run in range(12):
        x, w = numbers((ROWS * d, k), 2 * run), numbers((N, k), 2 * run + 1)
        mine, want = [x.chunk(d, 0)[rank], w], x.double() @ w.double().T
        if name == "scatter":
            mine, want = [t.chunk(d, 1)[rank] for t in (x, w)], want.chunk(d, 0)[rank]
        is_failing[0] = run in (3, 7)
        try:
            (found,) = fd.execute([t.contiguous() for t in mine], _enable_options=["peer_copies"])
        except FuserError:
            ended += "-"
            continue
        finally:
            is_failing[0] = False
        assert torch.equal(found.double().reshape(want.shape), want), f"run {run} {ended}"
        ended += "+"
    # The next run may end with words about what they were in.
    assert ended[3] + ended[7] == "--", ended
    assert "-" not in ended[:3] + ended[5:7] + ended[9:], ended
