"""PythonProfiler and FUSER_PROF: a profile, with the results and side effects of one run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import fields

import pytest
import torch

import fuser
from fuser import (
    DataType,
    FusionDefinition,
    FusionProfile,
    KernelProfile,
    ParallelType,
    PythonProfiler,
    SchedulerType,
)
from fuser.multidevice import Communicator, DeviceMesh, shard_tensor
from fuser.support.errors import (
    ArgumentError,
    InputError,
    NotCompiledError,
    OptionError,
    OtherEntranceError,
    PeerError,
    ProgramMismatchError,
)
from multidevice import simulate
from tests.hostir.profiling.test_tracer_of_definitions import (
    CHUNKS,
    GOOD,
    row_parallel,
    streamed_linear,
)

FLOAT = 4


def test_fields_have_the_names_of_nvfuser() -> None:
    assert {f.name for f in fields(FusionProfile)} == set(
        """verbose fusion_id segments cuda_evt_time_ms host_time_ms compile_time_ms kernel_time_ms
        effective_bandwidth_gbs percentage_peak_bandwith input_bytes output_bytes kernel_profiles
        source""".split()
    )
    assert {f.name for f in fields(KernelProfile)} == set(
        """name segment_id device stream correlation_id compile_time_ms time_ms
        effective_bandwidth_gbs percentage_peak_bandwidth grid_str block_str cluster_str
        shared_mem_str registers input_bytes output_bytes scheduler""".split()
    )


def two_kernels() -> FusionDefinition:
    """Defines x [m, k], w [n, k] and an expanded row: a linear, a pointwise kernel, and a reduction
    of another tensor. A reduction of y would be one kernel with y + 1."""
    with FusionDefinition() as fd:
        x, w = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
        y = fd.ops.linear(x, w)
        fd.add_output(fd.ops.add(y, 1.0))
        fd.add_output(fd.ops.sum(fd.ops.mul(x, x), [0, 1]))
    return fd


def check_sums(profile: FusionProfile) -> None:
    rows = profile.kernel_profiles
    assert profile.kernel_time_ms == pytest.approx(sum(k.time_ms for k in rows))
    # On a CPU, ops run one after the other.
    assert 0 < profile.kernel_time_ms <= profile.host_time_ms <= profile.cuda_evt_time_ms
    for k in rows:
        assert k.time_ms > 0
        gbs = (k.input_bytes + k.output_bytes) / (k.time_ms * 1e-3) / 1e9
        assert k.effective_bandwidth_gbs == pytest.approx(gbs)
    nbytes = profile.input_bytes + profile.output_bytes
    gbs = nbytes / (profile.kernel_time_ms * 1e-3) / 1e9
    assert profile.effective_bandwidth_gbs == pytest.approx(gbs)
    # A CPU provides none of these values.
    assert profile.percentage_peak_bandwith is None
    for k in rows:
        assert (k.device, k.registers, k.percentage_peak_bandwidth) == (None, None, None)


def test_rows_of_a_program() -> None:
    m, k, n = 6, 8, 5
    fd, given = two_kernels(), [torch.randn(m, k), torch.randn(n, k)]
    with PythonProfiler() as prof:
        outputs = fd.execute(given)
    want = torch.nn.functional.linear(*(t.double() for t in given))
    torch.testing.assert_close(outputs[0].double(), want + 1, atol=1e-5, rtol=1e-5)
    total = (given[0].double() ** 2).sum()
    torch.testing.assert_close(outputs[1].double(), total, atol=1e-4, rtol=1e-4)
    profile = prof.profile
    check_sums(profile)
    assert profile is fuser.get_fusion_profile()
    kernels = [*profile.kernel_profiles]
    library = kernels.pop(next(i for i, row in enumerate(kernels) if row.name == "linear"))
    assert library.scheduler == "expr_eval"
    assert (library.input_bytes, library.output_bytes) == ((m + n) * k * FLOAT, m * n * FLOAT)
    assert library.grid_str == library.block_str == library.shared_mem_str == ""
    assert library.compile_time_ms == 0
    assert len({k.segment_id for k in profile.kernel_profiles}) == profile.segments
    assert profile.segments == fd.fec.statistics()["segments"]
    for kernel in kernels:
        wanted = {"pointwise": m * n, "reduction": m * k}[kernel.scheduler] * FLOAT
        assert SchedulerType[kernel.scheduler] and kernel.input_bytes == wanted
        assert (kernel.grid_str, kernel.block_str) == ("[1, 1, 1]", "[1, 1, 1]")
        assert kernel.compile_time_ms > 0
    written = sum(k.output_bytes for k in kernels)
    assert written == profile.output_bytes == (m * n + 1) * FLOAT
    assert profile.input_bytes == (m + n) * k * FLOAT
    assert profile.compile_time_ms == pytest.approx(sum(k.compile_time_ms for k in kernels))


def test_repeated_elements_count_once() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 7], contiguity=[True, None], dtype=DataType.Double)
        fd.add_output(fd.ops.neg(x))
    with PythonProfiler() as prof:
        fd.execute([torch.ones(3, 1, dtype=torch.float64).expand(3, 7)])
    (row,) = prof.profile.kernel_profiles
    assert (row.input_bytes, prof.profile.input_bytes) == (3 * 8, 3 * 8)


def test_a_schedule_of_a_gpu() -> None:
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.sum(fd.define_tensor([-1, -1], contiguity=True), 1))
    given = [torch.randn(4, 4096)]
    with PythonProfiler() as prof:
        (out,) = fd.execute(given, _enable_options=["schedules_for(h200)"])
    torch.testing.assert_close(out, given[0].sum(1), atol=1e-3, rtol=1e-3)
    (row,) = prof.profile.kernel_profiles
    x, y, z = map(int, row.block_str.strip("[]").split(", "))
    assert x * y * z >= 32 and row.scheduler == "reduction"
    dynamic, static = map(int, row.shared_mem_str.strip("[]").split(", "))
    assert dynamic >= 0 and static == 0


# ------------------------------------------------------------------ as one run
def test_random_numbers_and_updates_are_those_of_one_run() -> None:
    def define() -> FusionDefinition:
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1], contiguity=True)
            y = fd.ops.add(x, fd.ops.uniform(0.0, 1.0, [4], dtype=DataType.Float))
            fd.add_output(y, x)
            fd.add_output(x)
            fd.add_output(fd.ops.mul(y, 2.0))
        return fd

    results: list[list[torch.Tensor]] = []
    for is_profiled in (False, True):
        fd, x = define(), torch.arange(4.0)
        torch.manual_seed(5)
        outputs: list[torch.Tensor] = []
        for _ in range(2):  # the first call, and a later one
            if is_profiled:
                with PythonProfiler() as prof:
                    outputs = fd.execute([x])
                assert prof.profile.output_bytes == 2 * 4 * FLOAT
            else:
                outputs = fd.execute([x])
            assert outputs[0] is x
        results.append([x, *outputs, torch.get_rng_state()])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


def test_what_torch_draws_itself_is_drawn_once() -> None:
    with FusionDefinition() as fd:
        q = fd.define_tensor([1, 2, 8, 4], contiguity=True, dtype=DataType.Float)
        dropout = fd.define_scalar(0.5, DataType.Double)
        out, *_ = fd.ops.sdpfa_fwd(q, q, q, dropout_p=dropout)
        fd.add_output(out)
    given = [torch.randn(1, 2, 8, 4)]
    fd.execute(given)
    found: list[list[torch.Tensor]] = []
    for is_profiled in (False, True):
        torch.manual_seed(3)
        if is_profiled:
            with PythonProfiler():
                outputs = fd.execute(given)
        else:
            outputs = fd.execute(given)
        found.append([*outputs, torch.get_rng_state()])
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


def test_later_runs_are_as_without() -> None:
    fd, given = two_kernels(), [torch.randn(3, 4), torch.randn(5, 4)]
    with PythonProfiler() as prof:
        first = fd.execute(given)
        inside = prof.profile
        second = fd.execute(given)
    assert prof.profile is not inside
    kept = prof.profile
    outputs = [fd.execute(given) for _ in range(12)][-1]
    assert prof.profile is kept is fuser.get_fusion_profile()
    for a, b, c in zip(first, second, outputs, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    fuser.reset_profiler()
    with pytest.raises(NotCompiledError, match="nothing was profiled"):
        fuser.get_fusion_profile()


def test_only_this_thread() -> None:
    fd, given = two_kernels(), [torch.randn(3, 4), torch.randn(5, 4)]
    with PythonProfiler() as prof:
        other = threading.Thread(target=fd.execute, args=(given,))
        other.start()
        other.join()
        with pytest.raises(NotCompiledError, match="no program has run"):
            _ = prof.profile
        fd.execute(given)
    assert len(prof.profile.kernel_profiles) == 3


# ------------------------------------------------------------------ by hand, and what is refused
def test_a_kernel_by_hand() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 8], contiguity=True)
        y = fd.ops.neg(x)
        fd.add_output(y)
        y.split(1, 4)
        y.axis(0).parallelize(ParallelType.grid_x)
        y.axis(2).parallelize(ParallelType.block_x)
    given = [torch.randn(5, 8)]
    with PythonProfiler(auto_scheduled=False) as prof:
        (out,) = fd.manual_execute(given)
    assert torch.equal(out, -given[0])
    profile = prof.profile
    check_sums(profile)
    (row,) = profile.kernel_profiles
    assert (profile.segments, row.scheduler, row.segment_id) == (1, "user", 0)
    assert (row.grid_str, row.block_str) == ("[5, 1, 1]", "[4, 1, 1]")
    assert row.input_bytes == row.output_bytes == 5 * 8 * FLOAT
    with PythonProfiler() as prof, pytest.raises(OtherEntranceError, match="auto_scheduled=False"):
        fd.manual_execute(given)


def test_refusals() -> None:
    fd, given = two_kernels(), [torch.randn(3, 4), torch.randn(5, 4)]
    with (
        PythonProfiler(auto_scheduled=False) as prof,
        pytest.raises(OtherEntranceError, match="profiles only manual_execute"),
    ):
        fd.execute(given)
    with pytest.raises(NotCompiledError, match="no program has run"):
        _ = prof.profile
    with PythonProfiler(), pytest.raises(OtherEntranceError, match="blocks cannot be nested"):
        PythonProfiler().__enter__()
    with pytest.raises(ArgumentError, match="auto_scheduled"):
        PythonProfiler("yes")  # pyright: ignore[reportArgumentType]
    # The failed block has left no profiler active.
    fd.execute(given)
    with pytest.raises(NotCompiledError):
        fuser.get_fusion_profile()


# ------------------------------------------------------------------ FUSER_PROF
@pytest.mark.parametrize("mode", ["enable", "enable.nocupti"])
def test_the_variable_profiles_every_run(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSER_PROF", mode)
    fd, given = two_kernels(), [torch.randn(3, 4), torch.randn(5, 4)]
    for _ in range(2):
        fuser.reset_profiler()
        fd.execute(given)
        assert len(fuser.get_fusion_profile().kernel_profiles) == 3


@pytest.mark.parametrize("name", ["FUSER_PROF", "NVFUSER_PROF"])
@pytest.mark.parametrize("mode", ["print", "print.nocupti", "print.verbose"])
def test_tables(
    mode: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, mode)
    fd, given = two_kernels(), [torch.randn(3, 4), torch.randn(5, 4)]
    fd.execute(given)
    head, titles, *rows = capsys.readouterr().out.splitlines()
    assert "3 segments" in head and "host's clock" in head and len(rows) == 3
    assert ("compile ms" in titles) == ("stream" in titles) == (mode == "print.verbose")
    assert rows[0].split()[:2] == ["0", "expr_eval"] and rows[0].split()[-1] == "linear"
    with PythonProfiler():
        fd.execute(given)
        fd.execute(given)
        assert not capsys.readouterr().out  # at the end of the block
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSER_PROF", "enabled")
    with pytest.raises(OptionError, match="did you mean 'enable'"):
        two_kernels().execute([torch.randn(3, 4), torch.randn(5, 4)])


# ------------------------------------------------------------------ several ranks
def check_linear_of_rows() -> None:
    """Shards x [m, k] and w [n, k] on k: a local product, and one allreduce of [m, n]."""
    here = Communicator.instance()
    d = here.size()
    m, n, k = 4, 3, 8
    with FusionDefinition() as fd:
        x, w = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
        fd.add_output(fd.ops.relu(fd.ops.linear(x, w)))
        for tv in (x, w):
            tv.set_device_mesh(DeviceMesh(range(d)))
            tv.outer_split(1, d)
            tv.axis(1).parallelize(ParallelType.mesh_x)
    generator = torch.Generator().manual_seed(0)
    full = [torch.randn(s, k, generator=generator) for s in (m, n)]
    shards = [shard_tensor(t, tv) for t, tv in zip(full, (x, w), strict=True)]
    with PythonProfiler() as prof:
        (out,) = fd.execute(shards)
    want = (full[0].double() @ full[1].double().T).relu()
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
    rows = prof.profile.kernel_profiles
    check_sums(prof.profile)
    library, sent = rows[0], next(r for r in rows if r.scheduler == "communication")
    assert sum(r.scheduler == "communication" for r in rows) == 1
    assert library.input_bytes == (m + n) * (k // d) * FLOAT
    assert (sent.input_bytes, sent.output_bytes) == (m * n * FLOAT, m * n * FLOAT)
    assert len({r.segment_id for r in rows}) == prof.profile.segments and sent.segment_id > 0
    assert prof.profile.input_bytes == library.input_bytes


def check_steps() -> None:
    """A stream loop has a row for each step of each op, and none for waits."""
    fd, inputs, want = streamed_linear(Communicator.instance().size())
    with PythonProfiler() as prof:
        (out,) = fd.execute(inputs)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
    rows = prof.profile.kernel_profiles
    assert [r.scheduler for r in rows] == ["communication", "expr_eval"] * CHUNKS
    assert {r.stream for r in rows} == set(range(CHUNKS))
    assert len({r.segment_id for r in rows}) == 2 and min(r.segment_id for r in rows) >= 0


def check_all_profile() -> None:
    """If one rank profiles and another executes, both raise an error and nothing runs."""
    rank = Communicator.instance().rank()
    fd = row_parallel((0, 1))
    with pytest.raises(ProgramMismatchError, match=r"// profiled"):
        if rank == 0:
            with PythonProfiler():
                fd.execute(GOOD)
        else:
            fd.execute(GOOD)
    with PythonProfiler() as prof:
        with pytest.raises(InputError if rank == 1 else PeerError, match="to be bound to a tensor"):
            fd.execute([torch.ones(3), GOOD[1]] if rank == 1 else GOOD)
        with pytest.raises(NotCompiledError, match="no program has run"):
            _ = prof.profile
        fd.execute(GOOD)
    assert prof.profile.kernel_profiles


CHECKS: list[Callable[[], None]] = [check_linear_of_rows, check_steps, check_all_profile]


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_on_simulated_ranks(check: Callable[[], None]) -> None:
    with simulate(2) as world:
        world.run(check)


def test_a_wait_counts_for_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading of the fake clock is one second later, so every op takes one second."""
    here = threading.local()

    def tick() -> float:
        here.now = getattr(here, "now", 0.0) + 1.0
        return here.now

    monkeypatch.setattr("hostir.profiling.timers.clock", tick)
    monkeypatch.setattr("hostir.profiling.tracer.clock", tick)

    def check() -> None:
        fd, inputs, _ = streamed_linear(2)
        with PythonProfiler() as prof:
            fd.execute(inputs)
        times = [(r.scheduler, r.time_ms) for r in prof.profile.kernel_profiles]
        assert times == [("communication", 2e3), ("expr_eval", 1e3)] * CHUNKS

    with simulate(2) as world:
        world.run(check)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("check", CHECKS[:2], ids=lambda c: c.__name__)
def test_under_mpirun(check: Callable[[], None], comm: object) -> None:
    check()
