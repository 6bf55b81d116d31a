"""Automatic overlap: programs with steps that the cost model chose have the same results."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fuser.frontend.executor_cache
from fuser import DataType, FusionDefinition, TensorView, multidevice
from fuser.frontend import executor_cache
from fuser.frontend.program_cache import PROGRAMS
from fuser.ir.op import walk
from fuser.ir.ops.nodes import MatmulOp
from fuser.multidevice import Communicator, DeviceMesh, simulate
from fuser.support.errors import ProgramMismatchError, UnsupportedError
from hostir.analysis.collective_matching import find_mismatches
from hostir.cost import overlap_search
from hostir.cost.machine_model import Machine
from hostir.cost.overlap_search import GainBound, OverlapCandidate
from hostir.ir.diagnostics import report
from hostir.ir.ops import ForLoop
from hostir.ir.program import HostIrContainer
from hostir.lowering.input_class import symbol_values
from tests.support.overlap_gradient_programs import (
    GRADIENTS,
    gradients,
    means_batches,
    of_batches,
    of_square,
)
from tests.support.overlap_programs import (
    DESCRIBED,
    FORMS,
    SLOW,
    STREAM,
    Form,
    cut,
    defined,
    has_loops,
    inputs_of,
    linear,
    run,
    sent,
)
from tools.fuzz import sharded
from tools.fuzz.product import Mode
from tools.fuzz.ranks import run_ranks
from tools.fuzz.runner import Case, define

ALL = {**FORMS, **GRADIENTS}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The ranks run on a machine on which overlap pays, by the description."""
    PROGRAMS.clear()  # what was decided by other tests

    def find(name: str, device: torch.device | None = None) -> Machine:
        del name, device
        return SLOW

    monkeypatch.setattr(fuser.frontend.executor_cache, "find_machine", find)
    yield
    PROGRAMS.clear()


# ------------------------------------------------------------------ results
@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("d", [2, 4])
@pytest.mark.parametrize("name", ALL)
def test_steps_equal_torch(name: str, d: int) -> None:
    form = ALL[name]
    with simulate(d) as world:
        program = world.run(lambda: run(form, d, []))[0]
    assert sorted(sent(program)) == sorted(form.sent)
    assert has_loops(program)


@pytest.fixture
def forced(slow: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Runs every pair in steps: in the named form if there is one, else in the last."""
    del slow
    named = "the last"

    def pick(
        candidates: Sequence[OverlapCandidate], transport: str, margin: float
    ) -> OverlapCandidate:
        del margin
        fit = [c for c in candidates[1:] if c.seconds is not None]
        fit = [candidates[0], *(c for c in fit if c.backend in ("", transport))]
        return next((c for c in fit if c.form == named), fit[-1])

    def name(form: str) -> None:
        nonlocal named
        named = form

    monkeypatch.setattr(overlap_search, "pick", pick)
    monkeypatch.setattr(GainBound, "why_hopeless", lambda *_: "")
    return name


# Rows that each of two ranks has: an odd number, one, none.
@pytest.mark.parametrize("sizes", [(14, 13, 6), (2, 1, 2), (6, 5, 2), (0, 5, 2)])
@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.usefixtures("forced")
def test_gradients_of_odd_sizes(name: str, sizes: tuple[int, int, int]) -> None:
    with simulate(2) as world:
        program = world.run(lambda: run(gradients(*sizes)[name], 2, []))[0]
    assert has_loops(program) or min(sizes) < 2


@pytest.mark.parametrize("form", ["steps", "steps and a sum"])
@pytest.mark.parametrize("late", ["all", "entry"])
def test_a_matmul_that_sums_over_gathered_rows_may_take_steps_or_not(
    form: str, late: str, forced: Callable[[str], None]
) -> None:
    forced(form)
    options = [f"late_stream({late})"]
    with simulate(4) as world:
        program = world.run(lambda: run(GRADIENTS["both gradients"], 4, options))[0]
    (loop,) = (op for op in walk(program.ops) if isinstance(op, ForLoop) and len(op.body) > 2)
    matmuls = sum(isinstance(op, MatmulOp) for op in loop.body)
    assert matmuls == (1 if form == "steps" else 2)


@pytest.mark.usefixtures("slow")
def test_ranks_that_sum_the_same_get_the_same_bits() -> None:
    """Each begins with the block that it has, and adds all in the order of the blocks."""
    form = GRADIENTS["weight gradient, all columns"]

    def body() -> bytes:
        fd, tensors, _ = defined(form, 4)
        generator = torch.Generator().manual_seed(3)
        whole = [torch.randn(s, generator=generator) for s in form.shapes]
        mine = [multidevice.shard_tensor(x, t) for x, t in zip(whole, tensors, strict=True)]
        (got,) = fd.execute(mine, _enable_options=DESCRIBED)
        assert "ReduceScatter" not in fd.overlap_report(mine)
        assert has_loops(fd.fec.host_program())
        return got.numpy().tobytes()

    with simulate(4) as world:
        assert len(set(world.run(body))) == 1


@pytest.mark.parametrize("late", [(), ("late_stream(all)",)])
@pytest.mark.usefixtures("forced")
def test_gathered_rows_of_two_axes_take_steps_of_the_outer_one(late: tuple[str, ...]) -> None:
    form = Form(of_batches(7, 6, 0, (10, 3)), means_batches, ((10, 3, 7), (10, 3, 6)))
    with simulate(2) as world:
        program = world.run(lambda: run(form, 2, late))[0]
    assert has_loops(program) and sorted(sent(program)) == ["recv", "send"]


OF_TWO_AXES = ((10, 4, 7), (10, 4, 6))


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (
            Form(of_square, lambda x: x.T @ x, ((12, 5),)),
            "both operands of matmul T3_g_float are made of what is gathered",
        ),
        (
            Form(of_batches(7, 6, 1, (10, 4)), means_batches, OF_TWO_AXES),
            "the axis is an inner one of what reshape merges to T5_l_float",
        ),
        (
            Form(of_batches(-1, -1, 0, (-1, -1)), means_batches, OF_TWO_AXES),
            "cannot be: reshape T5_l_float cannot be computed in steps along axis 0 of T2_l",
        ),
    ],
    ids=["itself", "inner", "unknown"],
)
@pytest.mark.usefixtures("forced")
def test_what_needs_all_that_is_gathered_says_why(
    form: Form, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FUSER_DUMP", "overlap")
    with simulate(2) as world:
        program = world.run(lambda: run(form, 2, []))[0]
    assert sent(program) == ["Allgather"]
    assert why in capsys.readouterr().out


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("late", ["all", "entry", "0", "1"])
@pytest.mark.parametrize(
    "name",
    ["gather", "scatter", "allreduce", "mlp", "weight gradient", "both gradients", "beside others"],
)
def test_steps_equal_torch_however_late_streams_are(name: str, late: str) -> None:
    with simulate(4) as world:
        assert has_loops(world.run(lambda: run(ALL[name], 4, [f"late_stream({late})"]))[0])


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("name", ["gather", "scatter", "allreduce"])
def test_without_access_to_peers_steps_are_sent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = replace(SLOW, nccl_multiprocessors=1, multiprocessors=1000, kernel_fill_nbytes=1.0)
    monkeypatch.setattr(fuser.frontend.executor_cache, "find_machine", lambda *_: fast)
    monkeypatch.setattr(Communicator, "have_access", lambda *_: False)
    monkeypatch.setattr(overlap_search, "pick", lambda candidates, *_: candidates[1])
    with simulate(2) as world:
        program = world.run(lambda: run(FORMS[name], 2, []))[0]
    backends = {getattr(op, "backend", "SIMULATED") for op in program.started()}
    assert has_loops(program) and backends == {"SIMULATED"}


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("steps", ["2 steps", "8 steps"])
def test_an_allreduce_per_step(steps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def pick(candidates: Sequence[OverlapCandidate], *_: object) -> OverlapCandidate:
        return next(c for c in candidates if c.form == steps)

    monkeypatch.setattr(overlap_search, "pick", pick)
    with simulate(2) as world:
        program = world.run(lambda: run(FORMS["allreduce"], 2, []))[0]
    assert has_loops(program) and sent(program) == ["Allreduce"]


@pytest.mark.usefixtures("slow")
def test_the_ranks_meet() -> None:
    for name in ("gather", "scatter", "allreduce"):
        with simulate(4) as world:
            program = world.run(lambda name=name: run(FORMS[name], 4, []))[0]
        found = find_mismatches(program, dict.fromkeys(symbol_values(program, {}), 32))
        assert not found, report(program, found)


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("name", ALL)
def test_steps_under_mpirun(name: str, comm: Communicator) -> None:
    assert has_loops(run(ALL[name], comm.size(), []))


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
def test_cpu_ranks_gain_nothing_by_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU rank computes and communicates in turns; a GPU does both at once."""
    measured = replace(SLOW, name="here", device="CPU")
    monkeypatch.setattr(fuser.frontend.executor_cache, "find_machine", lambda *_: measured)

    def body() -> str:
        fd, tensors, _ = defined(FORMS["gather"], 2)
        whole = [torch.randn(s) for s in FORMS["gather"].shapes]
        mine = [multidevice.shard_tensor(x, t) for x, t in zip(whole, tensors, strict=True)]
        fd.execute(mine, _enable_options=DESCRIBED)
        return fd.overlap_report(mine)

    with simulate(2) as world:
        assert not has_loops(world.run(lambda: run(FORMS["gather"], 2, []))[0])
        assert "on here" in world.run(body)[0] and "in turns" in world.run(body)[0]


@pytest.mark.parametrize("name", ["gather", "scatter", "allreduce", "weight gradient"])
def test_steps_that_do_not_pay_can_be_forced(name: str) -> None:
    """Such sizes gain nothing on any machine."""
    with simulate(2) as world:
        assert not has_loops(world.run(lambda: run(ALL[name], 2, []))[0])
        assert has_loops(world.run(lambda: run(ALL[name], 2, ["steps"]))[0])


def test_steps_can_be_forced_on_ranks_that_nothing_describes() -> None:
    def body() -> str:
        fd, tensors, _ = defined(FORMS["gather"], 2)
        whole = [torch.randn(s) for s in FORMS["gather"].shapes]
        mine = [multidevice.shard_tensor(x, t) for x, t in zip(whole, tensors, strict=True)]
        fd.execute(mine, _enable_options=["steps", "peer_copies"])
        assert has_loops(fd.fec.host_program())
        # No CUDA, here.
        assert "over peer copies needs the host" in fd.cuda_graphs()[0]
        return fd.overlap_report(mine)

    with simulate(2) as world:
        assert "on h200; steps taken wherever possible\n" in world.run(body)[0]


def test_a_file_can_describe_the_machine(tmp_path: Path) -> None:
    PROGRAMS.clear()
    (file := tmp_path / "slow.json").write_text(SLOW.to_json())
    with simulate(2) as world:
        program = world.run(lambda: run(FORMS["gather"], 2, [f"machine({file})"]))[0]
    assert has_loops(program)


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
    monkeypatch.setattr(fuser.frontend.executor_cache, "find_machine", lambda *_: costly)

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

    def build(*args: Any, **named: Any) -> Any:
        built = original(*args, **named)
        if has_loops(built.program):
            raise UnsupportedError("no loops today")
        return built

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
    assert "not chosen: the whole program cannot be lowered with it: no loops today" in text


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
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "as it is by the numbers of NCCL 0.778 ms" in lines
    assert "steps, peer copies 0.655 ms <- chosen" in lines
    assert "overlap_programs.py" in out


@pytest.mark.usefixtures("slow")
def test_ranks_of_different_machines_hear_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptions that lead to different programs are an error on all ranks, and no hang."""

    def find(*_: object) -> Machine:
        links = 1e7 if Communicator.instance().rank() == 0 else 1e12
        return replace(SLOW, pull_bandwidth=links, nccl=dict.fromkeys(SLOW.nccl, links))

    monkeypatch.setattr(fuser.frontend.executor_cache, "find_machine", find)
    with pytest.raises(ProgramMismatchError, match="steps by the cost model"), simulate(2) as world:
        world.run(lambda: run(FORMS["gather"], 2, []))


# ------------------------------------------------------------------ random programs
# Each run of a case draws anew which steps a call takes.
@pytest.mark.from_text(runs=False)
@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("late", [(), ("all",)])
def test_random_programs_in_steps(late: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pair that can be lowered in steps is: in any form, by any transport."""
    taken: list[str] = []

    def pick(
        candidates: Sequence[OverlapCandidate], transport: str, margin: float
    ) -> OverlapCandidate:
        del margin
        fit = [c for c in candidates[1:] if c.seconds is not None and c.backend in ("", transport)]
        chosen = rng.choice(fit) if fit else candidates[0]
        taken.append(chosen.form)
        return chosen

    monkeypatch.setattr(overlap_search, "pick", pick)
    monkeypatch.setattr(GainBound, "why_hopeless", lambda *_: "")
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
