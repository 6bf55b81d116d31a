"""MultiDeviceExecutor: programs that users of nvFuser know, as text and as numbers."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fuser import FusionDefinition, ParallelType, Shard, TensorView, multidevice, shard
from fuser.ir.fusion import Fusion
from fuser.ir.op import Op
from fuser.multidevice import (
    CommunicatorBackend,
    DeviceMesh,
    MultiDeviceExecutor,
    MultiDeviceExecutorParams,
    simulate,
)
from fuser.support.errors import (
    ArgumentError,
    DefinitionError,
    InputError,
    PeerError,
    ShardingError,
    UnsupportedError,
)
from hostir import HostIrEvaluator
from hostir.analysis.preflight import findings
from hostir.ir.ops import NUMBER_OF_STREAMS
from hostir.ir.parser import parse
from hostir.ir.program import HostIrContainer, equal
from hostir.lowering.input_class import symbol_values

pytestmark = pytest.mark.from_text

GOLDEN = Path(__file__).parent / "golden"
STREAM, X = ParallelType.stream, ParallelType.mesh_x
D = 2
Meaning = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A definition (its inputs and output), global shapes, the reference, the number of ranks, and
    parameters."""

    define: Callable[[FusionDefinition], tuple[list[TensorView], TensorView]]
    shapes: tuple[tuple[int, ...], ...]
    meaning: Meaning
    ranks: int = 1
    params: dict[str, Any] = field(default_factory=dict[str, Any])


def symbolic(fd: FusionDefinition, *ranks: int) -> list[TensorView]:
    return [fd.define_tensor([-1] * rank, contiguity=True) for rank in ranks]


def static(fd: FusionDefinition, *shapes: Sequence[int]) -> list[TensorView]:
    return [fd.define_tensor(shape, contiguity=True) for shape in shapes]


def on_mesh(*tensors: TensorView) -> None:
    for tv in tensors:
        tv.set_device_mesh(DeviceMesh(range(D)))


def copies(*streamed: int, axis: int = 0, count: int = 1):
    def define(fd: FusionDefinition) -> tuple[list[TensorView], TensorView]:
        (x,) = symbolic(fd, 2)
        y = x
        for i in range(count):
            y = fd.ops.set(y)
            if i in streamed:
                y.axis(axis).parallelize(STREAM)
        fd.add_output(y)
        return [x], y

    return define


def add(fd: FusionDefinition) -> tuple[list[TensorView], TensorView]:
    x, z = symbolic(fd, 2, 2)
    y = fd.ops.add(x, z)
    fd.add_output(y)
    y.axis(1).parallelize(STREAM)
    return [x, z], y


def reduction(fd: FusionDefinition) -> tuple[list[TensorView], TensorView]:
    (x,) = symbolic(fd, 3)
    y = fd.ops.sum(x, [2])
    fd.add_output(y)
    y.axis(0).parallelize(STREAM)
    return [x], y


def matmul(axis: int, *ranks: int):
    def define(fd: FusionDefinition) -> tuple[list[TensorView], TensorView]:
        a, b = symbolic(fd, *ranks)
        c = fd.ops.matmul(a, b)
        fd.add_output(c)
        c.axis(axis).parallelize(STREAM)
        return [a, b], c

    return define


def allgather(fd: FusionDefinition) -> tuple[list[TensorView], TensorView]:
    (x,) = static(fd, [4, D])
    y = fd.ops.set(x)
    fd.add_output(y)
    on_mesh(x, y)
    x.axis(1).parallelize(X)
    y.axis(0).parallelize(STREAM)
    return [x], y


def gathered_rows(fd: FusionDefinition) -> tuple[list[TensorView], TensorView]:
    (x,) = static(fd, [D, 6, 4])
    y = fd.ops.set(x)
    fd.add_output(y)
    on_mesh(x, y)
    x.axis(0).parallelize(X)
    y.axis(0).parallelize(STREAM)
    return [x], y


def allreduce(fd: FusionDefinition) -> tuple[list[TensorView], TensorView]:
    (x,) = static(fd, [4, D, 8])
    y = fd.ops.sum(x, [1])
    fd.add_output(y)
    on_mesh(x, y)
    x.axis(1).parallelize(X)
    y.axis(0).parallelize(STREAM)
    return [x], y


def reduce_scatter(fd: FusionDefinition) -> tuple[list[TensorView], TensorView]:
    (x,) = static(fd, [4, D, D, 8])
    y = fd.ops.sum(x, [1])
    fd.add_output(y)
    on_mesh(x, y)
    x.axis(1).parallelize(X)
    y.axis(0).parallelize(STREAM)
    y.axis(2).parallelize(X)
    return [x], y


def matmul_allreduce(fd: FusionDefinition) -> tuple[list[TensorView], TensorView]:
    a, b = static(fd, [8, D, 6, 5], [D, 5, 7])
    c = fd.ops.matmul(a, b)
    y = fd.ops.sum(c, [1])
    fd.add_output(y)
    on_mesh(a, b, c, y)
    a.axis(1).parallelize(X)
    b.axis(0).parallelize(X)
    c.axis(0).parallelize(STREAM)
    c.axis(1).parallelize(X)
    y.axis(0).parallelize(STREAM)
    return [a, b], y


def matmul_reduce_scatter(d: int, *, exchanged: bool = False, extents: tuple[int, ...] = (6, 5, 7)):
    """Defines a [d, d, M/d, K/d] @ b [d, 1, K/d, N], and the sum over the first axis; rank r has
    row r.

    With `exchanged`, the blocks are sent to their owners and summed there.
    """

    def define(fd: FusionDefinition) -> tuple[list[TensorView], TensorView]:
        m, k, n = extents
        a, b = static(fd, [d, d, m, k], [d, 1, k, n])
        c = fd.ops.matmul(a, b)
        parts = fd.ops.set(c) if exchanged else c
        y = fd.ops.sum(parts, [0])
        fd.add_output(y)
        for tv in dict.fromkeys((a, b, c, parts, y)):
            tv.set_device_mesh(DeviceMesh(range(d)))
        for tv in (a, b, c):
            tv.axis(0).parallelize(X)
        c.axis(1).parallelize(STREAM)
        if exchanged:
            parts.axis(1).parallelize(X)
            parts.axis(0).parallelize(STREAM)
        else:
            y.axis(0).parallelize(STREAM)
        y.axis(1).parallelize(X)
        return [a, b], y

    return define


def allgather_linear(*rows: int, shard: int):
    def define(fd: FusionDefinition) -> tuple[list[TensorView], TensorView]:
        x, w, b = static(fd, [*rows, 10], [12, 10], [12])
        y = fd.ops.linear(x, w, b)
        fd.add_output(y)
        on_mesh(x, w, b, y)
        x.axis(shard).parallelize(X)
        y.axis(0).parallelize(STREAM)
        return [x, w, b], y

    return define


def linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return x @ w.t() + b


RING = {"offset_stream_indexing_by_rank": True}
WEIGHTS = ((12, 10), (12,))
CASES = {
    "single_set": Case(copies(0), ((4, 8),), lambda x: x),
    "set_of_columns": Case(copies(0, axis=1), ((4, 8),), lambda x: x),
    "two_sets": Case(copies(0, 1, count=2), ((4, 8),), lambda x: x),
    "three_sets_two_loops": Case(copies(0, 2, count=3), ((4, 8),), lambda x: x),
    "add": Case(add, ((4, 8), (4, 8)), torch.add),
    "reduction": Case(reduction, ((4, 8, 2),), lambda x: x.sum(2)),
    "matmul_m": Case(matmul(0, 2, 2), ((4, 8), (8, 3)), torch.matmul),
    "matmul_n": Case(matmul(1, 2, 2), ((4, 8), (8, 3)), torch.matmul),
    "batched_matmul": Case(matmul(0, 3, 3), ((3, 4, 8), (3, 8, 3)), torch.matmul),
    "allgather": Case(allgather, ((4, D),), lambda x: x, D),
    "broadcasts": Case(gathered_rows, ((D, 6, 4),), lambda x: x, D),
    "ring": Case(gathered_rows, ((D, 6, 4),), lambda x: x, D, params=RING),
    "allreduce": Case(allreduce, ((4, D, 8),), lambda x: x.sum(1), D),
    "reduce_scatter": Case(reduce_scatter, ((4, D, D, 8),), lambda x: x.sum(1), D),
    "matmul_allreduce": Case(
        matmul_allreduce, ((8, D, 6, 5), (D, 5, 7)), lambda a, b: (a @ b).sum(1), D
    ),
    "matmul_reduce_scatter": Case(
        matmul_reduce_scatter(D), ((D, D, 6, 5), (D, 1, 5, 7)), lambda a, b: (a @ b).sum(0), D
    ),
    "ring_matmul_reduce_scatter": Case(
        matmul_reduce_scatter(D, exchanged=True),
        ((D, D, 6, 5), (D, 1, 5, 7)),
        lambda a, b: (a @ b).sum(0),
        D,
        params=RING,
    ),
    "allgather_linear": Case(
        allgather_linear(8, D, 6, shard=1), ((8, D, 6, 10), *WEIGHTS), linear, D
    ),
    "broadcasts_linear": Case(allgather_linear(D, 6, shard=0), ((D, 6, 10), *WEIGHTS), linear, D),
    "ring_linear": Case(
        allgather_linear(D, 6, shard=0), ((D, 6, 10), *WEIGHTS), linear, D, params=RING
    ),
    "ring_linear_ordered": Case(
        allgather_linear(D, 6, shard=0),
        ((D, 6, 10), *WEIGHTS),
        linear,
        D,
        params={**RING, "inter_stream_synchronization": True},
    ),
}


def executor_of(case: Case) -> tuple[MultiDeviceExecutor, list[TensorView], TensorView]:
    with FusionDefinition() as fd:
        inputs, out = case.define(fd)
    params = MultiDeviceExecutorParams()
    for name, value in case.params.items():
        setattr(params, name, value)
    return MultiDeviceExecutor(fd.fusion, params), inputs, out


def local(x: torch.Tensor, tv: TensorView) -> torch.Tensor:
    return x if tv.mesh is None else multidevice.shard_tensor(x, tv)


@pytest.mark.parametrize("name", CASES)
def test_programs_are_right_and_print_as_golden_texts(name: str) -> None:
    case = CASES[name]
    generator = torch.Generator().manual_seed(0)
    repetitions = [
        [torch.randn(shape, generator=generator) for shape in case.shapes] for _ in range(4)
    ]

    def body() -> str:
        executor, inputs, out = executor_of(case)
        text = str(executor)
        for xs in repetitions:
            (got,) = executor.run([local(x, tv) for x, tv in zip(xs, inputs, strict=True)])
            want = local(case.meaning(*(x.double() for x in xs)), out)
            torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
        program = executor.host_program()
        assert equal(parse(program.full_text()), program)
        assert not findings(program, {**symbol_values(program, {}), NUMBER_OF_STREAMS: 4})
        assert str(executor) == text
        return text

    with simulate(case.ranks) as world:
        texts = world.run(body)
    assert len(set(texts)) == 1
    assert texts[0] == (GOLDEN / f"{name}.txt").read_text()


def symbolic_like(fd: FusionDefinition, *shapes: Sequence[int]) -> list[TensorView]:
    """Defines tensors with symbolic sizes in place of the numbers of `static`; 1 stays a
    broadcast."""
    sizes = ([n if n == 1 else -1 for n in shape] for shape in shapes)
    return [fd.define_tensor(shape, contiguity=True) for shape in sizes]


def structure(program: HostIrContainer) -> list[tuple[int, str]]:
    """Returns the kind of every op and communication, and the number of loops and branches around
    it."""

    def listed(ops: Sequence[Op], depth: int) -> Iterator[tuple[int, str]]:
        for op in ops:
            yield depth, f"{type(op).__name__} {getattr(op, 'type', '')}"
            for body in op.regions:
                yield from listed(body, depth + 1)

    return [*listed(program.ops, 0)]


IN_STEPS = [(n, case.params) for n, case in CASES.items() if case.ranks > 1]
PEERS = {**RING, "backend_type": CommunicatorBackend.cuda, "inter_stream_synchronization": True}


@pytest.mark.finding("G6")
@pytest.mark.parametrize(("name", "params"), [*IN_STEPS, *((n, PEERS) for n, p in IN_STEPS if p)])
def test_symbolic_extents_give_the_programs_of_constant_ones(
    name: str, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(CASES[name], params=params)
    xs = [torch.randn(shape) for shape in case.shapes]

    def body() -> list[tuple[int, str]]:
        executor, inputs, out = executor_of(case)
        (got,) = executor.run([local(x, tv) for x, tv in zip(xs, inputs, strict=True)])
        want = local(case.meaning(*(x.double() for x in xs)), out)
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
        program = executor.host_program()
        assert equal(parse(program.full_text()), program)
        return structure(program)

    with simulate(case.ranks) as world:
        constant = world.run(body)
        monkeypatch.setattr(sys.modules[__name__], "static", symbolic_like)
        assert world.run(body) == constant


def ring_of_any_rows(d: int) -> tuple[MultiDeviceExecutor, TensorView]:
    with FusionDefinition() as fd:
        (x,) = symbolic(fd, 3)
        y = fd.ops.set(x)
        fd.add_output(y)
    for tv in (x, y):
        tv.set_device_mesh(range(d))
    x.axis(0).parallelize(X)
    y.axis(0).parallelize(STREAM)
    params = MultiDeviceExecutorParams(offset_stream_indexing_by_rank=True)
    return MultiDeviceExecutor(fd.fusion, params), x


@pytest.mark.mpi(min_size=2)
@pytest.mark.finding("G6")
def test_symbolic_extents_give_rings_under_mpirun(comm: multidevice.Communicator) -> None:
    d = comm.size()
    executor, x = ring_of_any_rows(d)
    for rows in (6, 2):
        whole = torch.arange(d * rows * 4.0).reshape(d, rows, 4)
        (got,) = executor.run([local(whole, x)])
        torch.testing.assert_close(got, whole)
    assert "P2PCommunication" in str(executor) and "Allgather" not in str(executor)
    with pytest.raises(ShardingError, match=f"has extent {2 * d}, but .* has {d} devices"):
        executor.run([torch.ones(2, 6, 4)])


@pytest.mark.finding("G7")
def test_a_program_of_more_ranks_than_the_job_has_can_be_shown() -> None:
    executor, _ = ring_of_any_rows(64)
    assert "FOR streamIdx in istreamIdx3{64}" in str(executor)
    with pytest.raises(ShardingError, match="names rank 63, but the job has 1 rank"):
        executor.run([torch.ones(1, 6, 4)])


@pytest.mark.parametrize("name", [n for n in CASES if n != "matmul_reduce_scatter"])
def test_collectives_are_right_with_rank_offset(name: str) -> None:
    """Ranks that begin with their own blocks cannot gather or reduce the same block at the same
    time."""
    case = replace(CASES[name], params=RING)
    xs = [torch.randn(shape) for shape in case.shapes]

    def body() -> None:
        executor, inputs, out = executor_of(case)
        for _ in range(2):
            (got,) = executor.run([local(x, tv) for x, tv in zip(xs, inputs, strict=True)])
            want = local(case.meaning(*(x.double() for x in xs)), out)
            torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)

    with simulate(case.ranks) as world:
        world.run(body)


@pytest.mark.parametrize("derive", [lambda y: y.outer_split(0, 2), lambda y: y.merge(0)])
def test_a_stream_axis_of_a_split_or_merge_is_refused(
    derive: Callable[[TensorView], object],
) -> None:
    with FusionDefinition() as fd:
        (x,) = symbolic(fd, 2)
        y = fd.ops.set(x)
        fd.add_output(y)
        derive(y)
        y.axis(0).parallelize(STREAM)
    with pytest.raises(
        UnsupportedError, match=r"split/merge axis: the part on stream of ax.*T1_.*test_multi_"
    ):
        MultiDeviceExecutor(fd.fusion, MultiDeviceExecutorParams())


@pytest.mark.parametrize("exchanged", [False, True])
def test_a_form_of_reduce_scatter_needs_its_setting_of_the_offset(exchanged: bool) -> None:
    case = CASES["ring_matmul_reduce_scatter" if exchanged else "matmul_reduce_scatter"]
    wrong = replace(case, params={} if exchanged else RING)
    what = r"set of T2.* to T3" if exchanged else r"reduction \(add\) of T2.* to T3"
    for text in (str, lambda e: e.run([torch.randn(1, D, 6, 5), torch.randn(1, 1, 5, 7)])):

        def body(use: Callable[[MultiDeviceExecutor], object] = text) -> str:
            with pytest.raises(UnsupportedError) as found:
                use(executor_of(wrong)[0])
            return str(found.value)

        with simulate(D) as world:
            for message in world.run(body):
                assert re.search(what + r".*offset_stream_indexing_by_rank.*test_multi_", message)


def test_a_backend_that_is_not_there_is_refused() -> None:
    with FusionDefinition() as fd:
        (x,) = symbolic(fd, 2)
        fd.add_output(fd.ops.set(x))
    params = MultiDeviceExecutorParams(backend_type=CommunicatorBackend.ucc)
    with pytest.raises(UnsupportedError, match="backend_type=ucc"):
        MultiDeviceExecutor(fd.fusion, params)


def test_wrong_parameters_are_refused_before_anything_runs() -> None:
    with pytest.raises(
        ArgumentError, match=r"no parameter number_of_stream; did you mean number_of_streams"
    ):
        MultiDeviceExecutorParams(number_of_stream=2)  # pyright: ignore[reportCallIssue]
    with pytest.raises(
        ArgumentError, match=r"expected number_of_streams to be an integer, got '2'"
    ):
        MultiDeviceExecutorParams(number_of_streams="2")  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        DefinitionError, match=r"expected number_of_streams to be at least 1, got 0"
    ):
        MultiDeviceExecutorParams(number_of_streams=0)
    params = MultiDeviceExecutorParams(number_of_streams=2)
    assert replace(params, number_of_streams=3).number_of_streams == 3
    for wrong, kind in ((0, DefinitionError), (-1, DefinitionError), ("2", ArgumentError)):
        with pytest.raises(
            kind, match=f"HostIrEvaluator: expected number_of_streams to be .*, got {wrong!r}"
        ):
            HostIrEvaluator(HostIrContainer(), number_of_streams=wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        DefinitionError, match=r"expected number_of_streams to be at least 1, got 0"
    ):
        params.number_of_streams = 0
    with pytest.raises(
        ArgumentError, match=r"no parameter number_of_stream; did you mean number_of_streams"
    ):
        params.number_of_stream = 3  # pyright: ignore[reportAttributeAccessIssue]
    assert params.number_of_streams == 2
    with pytest.raises(
        ArgumentError, match=r"6 values for the 5 parameters backend_type, number_of_streams"
    ):
        MultiDeviceExecutorParams(CommunicatorBackend.nccl, 2, True, True, True, 7)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("backend_type", "nccl", r"expected CommunicatorBackend.nccl, got 'nccl'"),
        ("backend_type", None, "expected a CommunicatorBackend, got None"),
        ("offset_stream_indexing_by_rank", [1], r"expected True or False, got \[1\]"),
        ("offset_stream_indexing_by_rank", "yes", "expected True or False, got 'yes'"),
        ("inter_stream_synchronization", 2, "expected True or False, got 2"),
        ("use_allocation_cache", None, "expected True or False, got None"),
    ],
)
def test_a_parameter_of_a_wrong_kind(name: str, wrong: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=f"{name}: {words}.*{__file__}"):
        MultiDeviceExecutorParams(**{name: wrong})
    with pytest.raises(ArgumentError, match=f"{name}: {words}"):
        setattr(MultiDeviceExecutorParams(), name, wrong)


@pytest.mark.parametrize("given", [(None,), (FusionDefinition(),), (Fusion(), {}), (Fusion(), 5)])
def test_an_executor_of_a_wrong_kind(given: Any) -> None:
    with pytest.raises(
        ArgumentError, match=r"(fusion: expected a Fusion|params: expected a Mul).*got"
    ):
        MultiDeviceExecutor(*given)


def test_run_takes_what_execute_takes() -> None:
    with FusionDefinition() as fd:
        x, y = symbolic(fd, 2, 2)
        fd.add_output(fd.ops.add(x, y))
    executor = MultiDeviceExecutor(fd.fusion)
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    for given in ([a, b], (a, b), [[a], [b]], (t for t in (a, b))):
        assert torch.equal(executor.run(given)[0], a + b)
    for junk, words in (
        (None, "inputs must be a list of tensors and numbers"),
        (a, r"pass \[tensor\]"),
        ([a.numpy(), b], r"input 0, T0_g.*pass torch.from_numpy"),
        ({"x": a}, "inputs must be a list"),
    ):
        with pytest.raises(InputError, match=words):
            executor.run(junk)  # pyright: ignore[reportArgumentType]


def test_a_wrong_input_is_an_error_on_every_rank_and_the_next_run_is_right() -> None:
    case = CASES["ring_linear"]
    xs = [torch.randn(shape) for shape in case.shapes]

    def body() -> str:
        executor, inputs, out = executor_of(case)
        mine = [local(x, tv) for x, tv in zip(xs, inputs, strict=True)]
        rank = multidevice.Communicator.instance().rank()
        found = ""
        try:
            executor.run([mine[0].double() if rank == 1 else mine[0], *mine[1:]])
        except Exception as error:
            found = type(error).__name__
        (got,) = executor.run(mine)
        want = local(case.meaning(*(x.double() for x in xs)), out)
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
        return found

    with simulate(D) as world:
        assert world.run(body) == [PeerError.__name__, "InputError"]


@pytest.mark.parametrize(
    ("ranks", "along"),
    [
        ([3, 0, 2, 1], X),
        ([0, 1, 3], X),
        ([[0, 3], [1, 2]], X),
        ([[0, 3], [1, 2]], ParallelType.mesh_y),
        ([[2, 3, 0], [5, 1, 4]], X),
    ],
)
def test_every_device_starts_with_its_own_block_whatever_the_order_of_ranks(
    ranks: Any, along: ParallelType
) -> None:
    mesh = DeviceMesh(ranks)
    other = ParallelType.mesh_y if along is X else X
    rows = mesh.size_of(along)
    whole = torch.randn(rows, 2 * mesh.size_of(other), 3)

    def body() -> None:
        with FusionDefinition() as fd:
            x = fd.define_tensor([rows, -1, -1], contiguity=True)
            y = fd.ops.set(x)
            fd.add_output(y)
        for tv in (x, y):
            tv.set_device_mesh(mesh)
            if mesh.ndim > 1:
                tv.outer_split(1, mesh.size_of(other))
                tv.axis(1).parallelize(other)
        x.axis(0).parallelize(along)
        y.axis(0).parallelize(STREAM)
        params = MultiDeviceExecutorParams(offset_stream_indexing_by_rank=True)
        executor = MultiDeviceExecutor(fd.fusion, params)
        for _ in range(2):
            (got,) = executor.run([local(whole, x)])
            if mesh.has(multidevice.Communicator.instance().rank()):
                torch.testing.assert_close(got, local(whole, y))
        program = executor.host_program()
        assert equal(parse(program.full_text()), program)

    with simulate(max(mesh.devices) + 1) as world:
        world.run(body)


@pytest.mark.finding("G23")
@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(6, 8).t(),
        torch.zeros(8, 6, dtype=torch.float16),
        torch.zeros(8, 1).expand(8, 6),
    ],
    ids=["permuted", "half", "expanded"],
)
def test_the_program_before_the_first_run_is_there_for_any_layout_and_dtype(
    x: torch.Tensor, is_cut: bool
) -> None:
    with FusionDefinition() as fd:
        tv = fd.from_pytorch(x)
        if is_cut:
            shard(tv, multidevice.DeviceMesh([0, 1]), [Shard(0)])
        fd.add_output(fd.ops.mul(tv, 2.0))
    assert "* double(2);" in str(MultiDeviceExecutor(fd.fusion))
