"""Overlap by itself: what runs in steps when the cost model says so gives the same results."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

import fuser.frontend.overlap
from fuser import DataType, FusionDefinition, ParallelType, TensorView, multidevice
from fuser.errors import UnsupportedError
from fuser.frontend import executor_cache
from fuser.frontend.program_cache import PROGRAMS
from fuser.multidevice import Communicator, DeviceMesh, simulate
from hostir import auto_overlap
from hostir.auto_overlap import Candidate
from hostir.container import HostIrContainer, walk
from hostir.cross_rank import find_mismatches
from hostir.findings import report
from hostir.machine import Machine
from hostir.ops import ForLoop
from hostir.transfers import StartsCommunication
from tests.fuzz import sharded
from tests.fuzz.host_program import fault_of
from tests.fuzz.product import Mode
from tests.fuzz.ranks import run_ranks
from tests.fuzz.runner import Case, define
from tests.hostir.test_cost import PLAIN

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
    host_run_s=0.0,
    host_kernel_s=0.0,
    host_library_s=0.0,
    host_post_s=0.0,
)
DESCRIBED = ["machine(h200)"]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The ranks run on a machine on which overlap pays, by the description."""
    PROGRAMS.clear()  # what was decided by other tests

    def find(name: str, device: torch.device | None = None) -> Machine:
        del name, device
        return SLOW

    monkeypatch.setattr(fuser.frontend.overlap, "find_machine", find)
    yield
    PROGRAMS.clear()


def cut(tv: TensorView, axis: int, d: int, ptype: ParallelType = X) -> None:
    tv.outer_split(axis, d)
    tv.axis(axis).parallelize(ptype)


@dataclass(frozen=True)
class Form:
    """A program for d ranks, what it means in float64, and what its steps transfer; () if it has
    none."""

    define: Callable[[FusionDefinition, int], tuple[list[TensorView], TensorView]]
    meaning: Callable[..., torch.Tensor]
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
    """linear(x, w): x by rows, w by columns of the result."""

    def build(fd: FusionDefinition, d: int) -> tuple[list[TensorView], TensorView]:
        x, w = inputs_of(fd, d, rows, 2, dtype=dtype)
        y = fd.ops.linear(x, w)
        cut(x, axis, d)
        cut(w, 0, d)
        return [x, w], y

    return build


def gather_for_three(fd: FusionDefinition, d: int) -> tuple[list[TensorView], TensorView]:
    """One gather, two linears and a sum of rows that read it."""
    x, w, v = inputs_of(fd, d, 2, 2, 2, dtype=DataType.Float)
    total = fd.ops.add(fd.ops.linear(x, w), fd.ops.linear(x, v))
    y = fd.ops.add(total, fd.ops.sum(x, [1], True))
    for tv in (x, w, v):
        cut(tv, 0, d)
    return [x, w, v], y


def scatter(
    axis: int | None = 0, bias: bool = False, dtype: DataType = DataType.Float
) -> Callable[[FusionDefinition, int], tuple[list[TensorView], TensorView]]:
    """linear(x, w) along a K that both have cut; the result is cut along an axis, or is whole."""

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
    """A matmul whose batches are gathered."""
    a, b = inputs_of(fd, d, 3, 3, dtype=DataType.Float)
    y = fd.ops.matmul(a, b)
    cut(a, 0, d)
    y.set_device_mesh(DeviceMesh(range(d)))
    return [a, b], y


def mlp(fd: FusionDefinition, d: int) -> tuple[list[TensorView], TensorView]:
    """Sequence-parallel: gather, linear, tanh, linear, reduce-scatter."""
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
    "mlp": Form(mlp, mlp_meaning, ((32, 16), (32, 16), (16, 32)), ("recv", "send") * 2),
}


def defined(form: Form, d: int) -> tuple[FusionDefinition, list[TensorView], TensorView]:
    with FusionDefinition() as fd:
        tensors, y = form.define(fd, d)
        fd.add_output(y)
    return fd, tensors, y


def run(
    form: Form, d: int, options: Sequence[str], *, disable: Sequence[str] = ()
) -> HostIrContainer:
    """Run twice on this rank; compare with float64 and check streams and ranks."""
    fd, tensors, _y = defined(form, d)
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(s, generator=generator).to(form.dtype) for s in form.shapes]
    mine = [multidevice.shard_tensor(x, tv) for x, tv in zip(whole, tensors, strict=True)]
    want = form.meaning(*(x.double() for x in whole))
    rank = Communicator.instance().rank()
    for _ in range(2):
        (got,) = fd.execute(mine, _enable_options=[*DESCRIBED, *options], _disable_options=disable)
        (sharding,) = fd.fec.get_output_shardings()
        axis = sharding.axis_sharded_on(X)
        part = want if axis < 0 else want.chunk(d, axis)[rank]
        atol, rtol = (1e-4, 1e-4) if form.dtype is torch.float32 else (0.5, 0.05)
        torch.testing.assert_close(got.double(), part, atol=atol, rtol=rtol)
    assert fault_of(fd, mine, rank) is None
    return fd.fec.host_program()


def sent(program: HostIrContainer) -> list[str]:
    found = [op for op in walk(program.ops) if isinstance(op, StartsCommunication)]
    return [getattr(op, "type", type(op).__name__) for op in found]


def has_loops(program: HostIrContainer) -> bool:
    return any(isinstance(op, ForLoop) for op in walk(program.ops))


# ------------------------------------------------------------------ results
@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("d", [2, 4])
@pytest.mark.parametrize("name", FORMS)
def test_steps_equal_torch(name: str, d: int) -> None:
    form = FORMS[name]
    with simulate(d) as world:
        program = world.run(lambda: run(form, d, []))[0]
    assert sorted(sent(program)) == sorted(form.sent)
    assert has_loops(program)


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("late", ["all", "entry", "0", "1"])
@pytest.mark.parametrize("name", ["gather", "scatter", "allreduce", "mlp"])
def test_steps_equal_torch_however_late_streams_are(name: str, late: str) -> None:
    with simulate(4) as world:
        assert has_loops(world.run(lambda: run(FORMS[name], 4, [f"late_stream({late})"]))[0])


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("name", ["gather", "scatter", "allreduce"])
def test_without_access_to_peers_steps_are_sent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = replace(SLOW, nccl_multiprocessors=1, multiprocessors=1000, kernel_fill_nbytes=1.0)
    monkeypatch.setattr(fuser.frontend.overlap, "find_machine", lambda *_: fast)
    monkeypatch.setattr(Communicator, "have_access", lambda *_: False)
    monkeypatch.setattr(auto_overlap, "pick", lambda candidates, *_: candidates[1])
    with simulate(2) as world:
        program = world.run(lambda: run(FORMS[name], 2, []))[0]
    backends = {getattr(op, "backend", "SIMULATED") for op in program.started()}
    assert has_loops(program) and backends == {"SIMULATED"}


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("steps", ["2 steps", "8 steps"])
def test_an_allreduce_per_step(steps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def pick(candidates: Sequence[Candidate], *_: object) -> Candidate:
        return next(c for c in candidates if c.form == steps)

    monkeypatch.setattr(auto_overlap, "pick", pick)
    with simulate(2) as world:
        program = world.run(lambda: run(FORMS["allreduce"], 2, []))[0]
    assert has_loops(program) and sent(program) == ["Allreduce"]


@pytest.mark.usefixtures("slow")
def test_the_ranks_meet() -> None:
    for name in ("gather", "scatter", "allreduce"):
        with simulate(4) as world:
            program = world.run(lambda name=name: run(FORMS[name], 4, []))[0]
        found = find_mismatches(program, dict.fromkeys(symbols(program), 32))
        assert not found, report(program, found)


def symbols(program: HostIrContainer):
    from hostir.ranks import symbol_values

    return symbol_values(program, {})


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("name", FORMS)
def test_steps_under_mpirun(name: str, comm: Communicator) -> None:
    assert has_loops(run(FORMS[name], comm.size(), []))


# ------------------------------------------------------------------ when there are none
@pytest.mark.usefixtures("slow")
def test_it_can_be_turned_off() -> None:
    with simulate(2) as world:
        program = world.run(lambda: run(FORMS["gather"], 2, [], disable=["auto_overlap"]))[0]
    assert sent(program) == ["Allgather"] and not has_loops(program)


@pytest.mark.usefixtures("slow")
def test_cpu_ranks_take_steps_only_for_a_described_machine() -> None:
    def body() -> HostIrContainer:
        fd, tensors, _ = defined(FORMS["gather"], 2)
        whole = [torch.randn(s) for s in FORMS["gather"].shapes]
        fd.execute([multidevice.shard_tensor(x, t) for x, t in zip(whole, tensors, strict=True)])
        assert "nothing describes these cpu ranks" in fd.overlap_report(
            [multidevice.shard_tensor(x, t) for x, t in zip(whole, tensors, strict=True)]
        )
        return fd.fec.host_program()

    with simulate(2) as world:
        assert not has_loops(world.run(body)[0])


@pytest.mark.usefixtures("slow")
def test_a_definition_with_streams_is_left_alone() -> None:
    """Also its other pairs: what the user's steps lead to, a broadcast and a reduction each."""

    def build(fd: FusionDefinition, d: int) -> tuple[list[TensorView], TensorView]:
        x, w, v = inputs_of(fd, d, 2, 2, 2, dtype=DataType.Float)
        gathered = fd.ops.set(x)
        y = fd.ops.linear(fd.ops.linear(gathered, w), v)
        cut(x, 0, d)
        cut(w, 0, d)
        cut(v, 1, d)
        for tv in (gathered, y):
            tv.set_device_mesh(DeviceMesh(range(d)))
        gathered.outer_split(0, d)
        gathered.axis(0).parallelize(STREAM)
        cut(y, 0, d)
        return [x, w, v], y

    form = Form(build, lambda x, w, v: linear(linear(x, w), v), ((32, 16), (32, 16), (16, 32)))
    with simulate(2) as world:
        program = world.run(lambda: run(form, 2, []))[0]
    assert sent(program) == ["Broadcast", "Reduce"]


@pytest.mark.usefixtures("slow")
def test_sizes_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """One definition, one class: two programs, for what pays and for what does not."""
    costly = replace(SLOW, copy_latency_s=2e-4)
    monkeypatch.setattr(fuser.frontend.overlap, "find_machine", lambda *_: costly)

    def body() -> list[bool]:
        fd, tensors, _ = defined(FORMS["gather"], 2)
        found: list[bool] = []
        for rows in (4, 64, 6, 96, 4):
            generator = torch.Generator().manual_seed(rows)
            whole = [torch.randn(n, 64, generator=generator) for n in (rows, 16)]
            mine = [multidevice.shard_tensor(x, t) for x, t in zip(whole, tensors, strict=True)]
            (got,) = fd.execute(mine, _enable_options=DESCRIBED)
            want = linear(*(x.double() for x in whole))
            part = want.chunk(2, 1)[Communicator.instance().rank()]
            torch.testing.assert_close(got.double(), part, atol=1e-4, rtol=1e-4)
            found.append(has_loops(fd.fec.host_program()))
        return found

    before = PROGRAMS.lowerings
    with simulate(2) as world:
        assert world.run(body) == [[False, True, False, True, False]] * 2
    assert PROGRAMS.lowerings - before == 2


@pytest.mark.usefixtures("slow")
def test_what_cannot_be_lowered_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pair alone can be lowered in steps, but the whole program cannot."""
    original = executor_cache.build_program

    def build(*args, **named):
        segmented, program = original(*args, **named)
        if has_loops(program):
            raise UnsupportedError("no loops today")
        return segmented, program

    monkeypatch.setattr(executor_cache, "build_program", build)
    form = FORMS["gather"]

    def body() -> str:
        program = run(form, 2, [])
        assert not has_loops(program)
        fd, tensors, _ = defined(form, 2)
        mine = [
            multidevice.shard_tensor(torch.ones(s), t)
            for s, t in zip(form.shapes, tensors, strict=True)
        ]
        fd.execute(mine, _enable_options=DESCRIBED)
        return fd.overlap_report(mine)

    with simulate(2) as world:
        text = world.run(body)[0]
    assert "not chosen: the whole program cannot be lowered so: no loops today" in text


@pytest.mark.usefixtures("slow")
def test_the_decision_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FUSER_DUMP", "overlap")
    with simulate(4) as world:
        world.run(lambda: run(FORMS["gather"], 4, []))
    out = capsys.readouterr().out
    assert out.count("// overlap of ") == 1
    # A rank receives 3/4 of 32 x 64 floats, 614.4 us at 1e7 B/s; 2 x 32 x 64 x 4 operations take
    # 163.8 us at 1e8 a second, a quarter of it in the last step, when all has come.
    lines = [line.strip() for line in out.splitlines()]
    assert "as it is                0.778 ms" in lines
    assert "steps, peer copies      0.655 ms   <- chosen" in lines
    assert "test_auto_overlap.py" in out


# ------------------------------------------------------------------ random programs
@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("late", [(), ("all",)])
def test_random_programs_in_steps(late: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever can be lowered in steps is: any form, by any transport."""
    taken: list[str] = []

    def pick(candidates: Sequence[Candidate], transport: str, margin: float) -> Candidate:
        del margin
        fit = [c for c in candidates[1:] if c.seconds is not None and c.backend in ("", transport)]
        chosen = rng.choice(fit) if fit else candidates[0]
        taken.append(chosen.form)
        return chosen

    monkeypatch.setattr(auto_overlap, "pick", pick)
    monkeypatch.setattr(auto_overlap, "_hopeless", lambda *_: "")
    monkeypatch.setenv("FUSER_ENABLE", "machine(h200)")
    for seed in range(40 if not late else 20):
        program = sharded.generate(seed)
        rng = random.Random(seed)
        if not any(s.op in ("linear", "matmul") for s in program.stmts):
            continue
        monkeypatch.setattr(Communicator, "have_access", lambda *_, s=seed: s % 2 == 0)
        found = run_ranks(Case.of(program), Mode(late=late), define(program))
        assert not found.is_failure, f"seed {seed}: {found}"
    assert sum(map(bool, taken)) > len(taken) / 2 > 3
