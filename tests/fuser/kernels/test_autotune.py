"""Tests the option `tune`: which parameters are timed, chosen, stored and rejected.

The tests supply all times, so the result does not depend on the machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fuser import FusionDefinition, ParallelType, multidevice
from fuser.frontend.program_cache import PROGRAMS
from fuser.kernels import autotune
from fuser.kernels.autotune import TuningCandidate
from fuser.kernels.autotune_candidates import to_fields
from fuser.kernels.executor import FusedKernelExecutor
from fuser.runtime.kernel_cache import KernelCache
from fuser.schedule.pointwise import PointwiseParams
from fuser.support.errors import FuserError, KernelError, UnsupportedError
from hostir import HostIrEvaluator
from tests.support.limits import HANG_S

TUNE = ["tune", "schedules_for(h200)"]
H200 = ["schedules_for(h200)"]
# The seconds of the heuristic's choice.
USUAL = 1e-5

Price = Callable[[Any, int], float]


class Clock:
    """Supplies the time of each run of some parameters; `runs` records what is timed."""

    def __init__(self) -> None:
        self.price: Price = lambda params, n: USUAL
        self.runs: dict[Any, int] = {}
        self.launches = False

    def time(self, run: Callable[[], object]) -> float:
        candidate = run.__self__  # pyright: ignore[reportFunctionMemberAccess]
        assert isinstance(candidate, TuningCandidate)
        n = self.runs[candidate.params] = self.runs.get(candidate.params, 0) + 1
        if self.launches:
            run()
        return self.price(candidate.params, n)

    def prefer(self, wanted: Callable[[Any], bool], seconds: float = USUAL / 2) -> None:
        self.price = lambda params, n: seconds if wanted(params) else USUAL


@pytest.fixture
def clock(kernel_cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Sets up an empty cache, few neighbours, and times from the test."""
    del kernel_cache_dir
    found = Clock()
    monkeypatch.setattr(autotune, "make_timer", lambda device: found.time)
    monkeypatch.setattr(autotune, "MAX_TIMED", 5)
    monkeypatch.setattr(autotune, "TIMED_AT_ONCE", 5)
    PROGRAMS.clear()
    autotune.warn_of_capture.cache_clear()
    return found


def doubled() -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.add(fd.ops.sin(x), x))
    return fd


def expected(x: torch.Tensor) -> torch.Tensor:
    return (x.double().sin() + x.double()).float()


def kernels(fd: FusionDefinition) -> list[FusedKernelExecutor]:
    evaluator = fd.fec._last().evaluator
    runners = [evaluator.kernel(group) for group in evaluator.program.groups]
    assert all(isinstance(r, FusedKernelExecutor) for r in runners)
    return runners  # pyright: ignore[reportReturnType]


def params_of(fd: FusionDefinition) -> Any:
    (kernel,) = kernels(fd)
    (variant,) = kernel.variants
    return variant.params


def is_64(params: PointwiseParams) -> bool:
    return params.threads_x == 64


def tuned_files(folder: Path) -> list[Path]:
    return sorted((folder / "kernels-v1" / "tuned").iterdir())


# ------------------------------------------------------------------ what is taken
def test_the_fastest_neighbour_is_taken_and_kept(clock: Clock, kernel_cache_dir: Path) -> None:
    clock.prefer(is_64)
    x = torch.randn(64, 96)
    fd = doubled()
    for _ in range(3):  # first, recorded, replayed
        (out,) = fd.execute([x], _enable_options=TUNE)
        torch.testing.assert_close(out, expected(x))
    assert is_64(params_of(fd))
    assert 2 <= len(clock.runs) <= 6
    (file,) = tuned_files(kernel_cache_dir)
    kept = json.loads(file.read_text())
    assert kept["best"] == {"params": to_fields(params_of(fd)), "us": 5.0}
    assert kept["heuristic"]["us"] == 10.0
    assert kept["sizes"] == {"i0": "64 to 127", "i1": "64 to 127"}


def test_without_the_option_the_heuristic_decides(clock: Clock) -> None:
    clock.prefer(is_64)
    fd, x = doubled(), torch.randn(64, 96)
    fd.execute([x], _enable_options=H200)
    usual = params_of(fd)
    fd.execute([x], _enable_options=TUNE)
    assert params_of(fd) != usual
    fd.execute([x], _enable_options=H200)
    assert params_of(fd) == usual


def test_the_environment_turns_it_on(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    clock.prefer(is_64)
    monkeypatch.setenv("FUSER_ENABLE", ",".join(TUNE))
    fd = doubled()
    fd.execute([torch.randn(64, 96)])
    assert is_64(params_of(fd))


@pytest.mark.parametrize("share", [0.98, 1.0])
def test_less_than_the_margin_changes_nothing(clock: Clock, share: float) -> None:
    clock.prefer(is_64, share * USUAL)
    fd, x = doubled(), torch.randn(64, 96)
    fd.execute([x], _enable_options=TUNE)
    assert not is_64(params_of(fd))
    assert len(clock.runs) > 1


def test_a_best_that_loses_many_rounds_is_noise(clock: Clock) -> None:
    """The candidate takes half the time in two of three rounds, and more than the choice in the
    third."""

    def price(params: Any, n: int) -> float:
        last = n - autotune.ROUNDS  # rounds of the last race
        slow = last > 0 and last % 3 == 0
        return USUAL if not is_64(params) else 1.1 * USUAL if slow else USUAL / 2

    clock.price = price
    fd = doubled()
    fd.execute([torch.randn(64, 96)], _enable_options=TUNE)
    assert not is_64(params_of(fd))


def test_neighbours_of_the_best_come_next(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best is two steps away, and the step between them is faster than the choice, too."""
    monkeypatch.setattr(autotune, "MAX_TIMED", 10)
    clock.price = lambda p, n: 1e-7 * p.threads_x / p.vector
    fd = doubled()
    fd.execute([torch.randn(64, 96)], _enable_options=TUNE)
    assert params_of(fd).threads_x == 32
    assert len(clock.runs) == 11


# ------------------------------------------------------------------ for which inputs
def test_sizes_of_one_class_are_timed_once(clock: Clock) -> None:
    clock.prefer(is_64)
    fd = doubled()
    for rows in (64, 72, 127):
        x = torch.randn(rows, 96)
        (out,) = fd.execute([x], _enable_options=TUNE)
        torch.testing.assert_close(out, expected(x))
    first = sum(clock.runs.values())
    assert is_64(params_of(fd))
    x = torch.randn(2048, 96)
    (out,) = fd.execute([x], _enable_options=TUNE)
    torch.testing.assert_close(out, expected(x))
    assert sum(clock.runs.values()) > first


def test_what_does_not_serve_leaves_the_choice(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device can launch the best parameters only for the first number of rows of a class."""
    clock.prefer(is_64)
    fd, x = doubled(), torch.randn(64, 96)
    fd.execute([x], _enable_options=TUNE)
    usual = autotune.is_launchable
    monkeypatch.setattr(
        autotune,
        "is_launchable",
        lambda launch, d: launch.block[0] != 64 and usual(launch, d),
    )
    x = torch.randn(80, 96)
    (out,) = fd.execute([x], _enable_options=TUNE)
    torch.testing.assert_close(out, expected(x))
    (kernel,) = kernels(fd)
    assert len(kernel.variants) == 2


def test_strides_and_alignments_are_classes(clock: Clock) -> None:
    clock.prefer(is_64)
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=False)
        fd.add_output(fd.ops.add(fd.ops.sin(x), x))
    whole = torch.randn(80, 200)
    for x in (whole[:64, :96], whole[:64, 1:97], whole[:64, :96].contiguous(), whole[:64, ::2]):
        (out,) = fd.execute([x], _enable_options=TUNE)
        torch.testing.assert_close(out, expected(x))


def test_equal_kernels_of_a_program_are_timed_once(clock: Clock, kernel_cache_dir: Path) -> None:
    with FusionDefinition() as fd:
        x, w = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
        y = fd.ops.matmul(fd.ops.sin(x), w)
        fd.add_output(fd.ops.matmul(fd.ops.sin(y), w))
    clock.prefer(is_64)
    x, w = torch.randn(64, 64), torch.randn(64, 64) / 8
    (out,) = fd.execute([x, w], _enable_options=TUNE)
    want = (x.double().sin() @ w.double()).sin() @ w.double()
    torch.testing.assert_close(out, want.float(), rtol=1e-4, atol=1e-5)
    assert len(kernels(fd)) == 2
    params: list[Any] = [k.variants[0].params for k in kernels(fd)]
    assert all(map(is_64, params))
    assert len(tuned_files(kernel_cache_dir)) == 1
    assert max(clock.runs.values()) <= autotune.ROUNDS + autotune.LAST_ROUNDS


def test_kernels_of_the_cpu_have_no_neighbours(clock: Clock, kernel_cache_dir: Path) -> None:
    fd, x = doubled(), torch.randn(64, 96)
    (out,) = fd.execute([x], _enable_options=["tune"])
    torch.testing.assert_close(out, expected(x))
    assert not clock.runs and not tuned_files(kernel_cache_dir)


# ------------------------------------------------------------------ inputs stay as they are
def test_an_update_in_place_happens_once(clock: Clock) -> None:
    clock.prefer(is_64)
    clock.launches = True
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        y = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.add(x, y), x)
        fd.add_output(fd.ops.mul(y, 2.0))
    x, y = torch.randn(64, 96), torch.randn(64, 96)
    before, beside = x.clone(), y.clone()
    for k in range(1, 4):
        outs = fd.execute([x, y], _enable_options=TUNE)
        assert torch.equal(y, beside)
        torch.testing.assert_close(outs[-1], 2 * beside)
        torch.testing.assert_close(x, before + k * beside)
    assert clock.runs


def test_random_numbers_are_those_of_the_seed(clock: Clock) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.mul(x, fd.ops.rand_like(x)))
    x, results = torch.randn(64, 96), []
    clock.prefer(is_64)
    clock.launches = True
    for options in (H200, TUNE):
        torch.manual_seed(3)
        results += [fd.execute([x], _enable_options=options)[0] for _ in range(2)]
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])
    assert not torch.equal(results[0], results[1])
    assert clock.runs and is_64(params_of(fd))


def test_steps_of_a_stream_loop(clock: Clock) -> None:
    clock.launches = True
    clock.price = lambda params, n: USUAL / (1 + is_64(params))
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 64, 96], contiguity=True)
        x.axis(0).parallelize(ParallelType.stream)
        fd.add_output(fd.ops.add(fd.ops.sin(x), x))
    x = torch.randn(4, 64, 96)
    for _ in range(2):
        (out,) = fd.execute([x], _enable_options=TUNE)
        torch.testing.assert_close(out, expected(x))
    assert clock.runs


# ------------------------------------------------------------------ on disk
def test_a_later_program_takes_it_without_timing(clock: Clock) -> None:
    clock.prefer(is_64)
    x = torch.randn(64, 96)
    doubled().execute([x], _enable_options=TUNE)
    clock.runs.clear()
    PROGRAMS.clear()
    fd = doubled()
    (out,) = fd.execute([x], _enable_options=TUNE)
    torch.testing.assert_close(out, expected(x))
    assert is_64(params_of(fd)) and not clock.runs


_LATER = """
import torch
from fuser.kernels import autotune as trial
def refuse(device): raise AssertionError("timed again")
trial.make_timer = refuse
from tests.fuser.kernels.test_autotune import TUNE, doubled, is_64, params_of
fd = doubled()
fd.execute([torch.ones(70, 80)], _enable_options=TUNE)
assert is_64(params_of(fd)), params_of(fd)
"""


def test_a_later_process_takes_it_without_timing(clock: Clock) -> None:
    clock.prefer(is_64)
    doubled().execute([torch.randn(64, 96)], _enable_options=TUNE)
    done = subprocess.run(
        [sys.executable, "-c", _LATER],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:100])


def edit(file: Path) -> None:
    file.write_text(file.read_text().replace('"threads_x": 64', '"threads_x": 32'))


def take_from_another(file: Path) -> None:
    fd = doubled()
    fd.execute([torch.randn(2048, 96)], _enable_options=TUNE)
    (other,) = (f for f in file.parent.iterdir() if f != file)
    file.write_bytes(other.read_bytes())


def as_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def as_link(file: Path) -> None:
    file.unlink()
    file.symlink_to("nowhere")


@pytest.mark.parametrize("damage", [truncate, edit, take_from_another, as_folder, as_link])
def test_a_damaged_entry_is_ignored_and_written_anew(
    clock: Clock, kernel_cache_dir: Path, damage: Callable[[Path], None]
) -> None:
    clock.prefer(is_64)
    x = torch.randn(64, 96)
    doubled().execute([x], _enable_options=TUNE)
    (file,) = tuned_files(kernel_cache_dir)
    good = file.read_text()
    damage(file)
    clock.runs.clear()
    PROGRAMS.clear()
    fd = doubled()
    with pytest.warns(RuntimeWarning, match=f"{file.name} is damaged"):
        (out,) = fd.execute([x], _enable_options=TUNE)
    torch.testing.assert_close(out, expected(x))
    assert clock.runs and is_64(params_of(fd))
    assert json.loads(file.read_text())["best"] == json.loads(good)["best"]


@pytest.mark.parametrize(
    "change", [{"vector": 3}, {"threads_x": "64"}, {"kind": "PlainParams"}, {"more": 1}], ids=str
)
def test_parameters_of_no_use_are_timed_anew(
    clock: Clock, kernel_cache_dir: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    """Another version may have stored such an entry under the same key."""
    clock.prefer(is_64)
    x = torch.randn(64, 96)
    doubled().execute([x], _enable_options=TUNE)
    (file,) = tuned_files(kernel_cache_dir)
    kept = json.loads(file.read_text())
    del kept["check"]
    kept["best"]["params"].update(change)
    KernelCache().store_tuned(file.name, kept)
    clock.runs.clear()
    PROGRAMS.clear()
    lower = autotune.TunedExecutor._lower

    def refuse_three(self: Any, key: Any, device: Any, **named: Any) -> Any:
        if key[1].vector == 3:
            raise UnsupportedError("vectors of 3")
        return lower(self, key, device, **named)

    monkeypatch.setattr(autotune.TunedExecutor, "_lower", refuse_three)
    fd = doubled()
    with pytest.warns(RuntimeWarning, match="entry on disk for kernel0 cannot be used"):
        (out,) = fd.execute([x], _enable_options=TUNE)
    torch.testing.assert_close(out, expected(x))
    assert clock.runs and is_64(params_of(fd))


def test_two_at_a_time_time_once(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second thread waits for the lock of the disk cache, and finds the first one's result."""
    clock.prefer(is_64)
    searches: list[object] = []
    usual = autotune._Search.run

    def counted(search: Any) -> Any:
        searches.append(search)
        return usual(search)

    monkeypatch.setattr(autotune._Search, "run", counted)
    together = threading.Barrier(2)
    x = torch.randn(64, 96)
    definitions = [doubled() for _ in range(2)]
    monkeypatch.setattr(PROGRAMS, "find_or_build", lambda key, build, steps=None: build())

    def body(fd: FusionDefinition) -> None:
        together.wait()
        fd.execute([x], _enable_options=TUNE)

    threads = [threading.Thread(target=body, args=(fd,)) for fd in definitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(is_64(params_of(fd)) for fd in definitions)
    assert len(searches) == 1


# ------------------------------------------------------------------ what is left out
def test_a_wrong_candidate_is_reported_and_not_taken(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock.prefer(is_64)
    usual = TuningCandidate.run

    def wrong(self: TuningCandidate) -> None:
        usual(self)
        if is_64(self.params):
            self.tensors[-1][3, 5] += 0.01

    monkeypatch.setattr(TuningCandidate, "run", wrong)
    fd, x = doubled(), torch.randn(64, 96)
    with pytest.warns(RuntimeWarning, match=r"internal error.*threads 64x1.*results differ"):
        (out,) = fd.execute([x], _enable_options=TUNE)
    torch.testing.assert_close(out, expected(x))
    assert not is_64(params_of(fd))


def test_an_assertion_about_a_candidate_is_told(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock.prefer(is_64)
    usual = autotune.TunedExecutor._scheduled

    def scheduled(self: autotune.TunedExecutor, key: Any, device: Any, **named: Any) -> Any:
        assert not is_64(key[1]), "no loops like these"
        return usual(self, key, device, **named)

    monkeypatch.setattr(autotune.TunedExecutor, "_scheduled", scheduled)
    fd, x = doubled(), torch.randn(64, 96)
    with pytest.warns(RuntimeWarning, match=r"internal error.*threads 64x1.*no loops like these"):
        (out,) = fd.execute([x], _enable_options=TUNE)
    torch.testing.assert_close(out, expected(x))
    assert not is_64(params_of(fd))


def test_what_a_candidate_does_not_write_is_seen(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of the trial contains right results of earlier candidates."""
    clock.prefer(is_64)
    usual = TuningCandidate.run
    monkeypatch.setattr(
        TuningCandidate, "run", lambda self: None if is_64(self.params) else usual(self)
    )
    fd = doubled()
    with pytest.warns(RuntimeWarning, match="internal error"):
        fd.execute([torch.randn(64, 96)], _enable_options=TUNE)
    assert not is_64(params_of(fd))


def test_a_refused_launch_is_left_out(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    clock.prefer(is_64)
    usual = TuningCandidate.run

    def refused(self: TuningCandidate) -> None:
        if is_64(self.params):
            raise KernelError("the driver refused the launch")
        usual(self)

    monkeypatch.setattr(TuningCandidate, "run", refused)
    fd = doubled()
    with pytest.warns(RuntimeWarning, match="the driver refused"):
        fd.execute([torch.randn(64, 96)], _enable_options=TUNE)
    assert not is_64(params_of(fd)) and len(clock.runs) > 1


def test_no_memory_leaves_the_choice(
    clock: Clock, kernel_cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autotune, "free_nbytes", lambda device: 1000)
    fd, x = doubled(), torch.randn(64, 96)
    with pytest.warns(RuntimeWarning, match="kernel0 keeps the heuristic's parameters.*1000"):
        (out,) = fd.execute([x], _enable_options=TUNE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fd.execute([x], _enable_options=TUNE)
    torch.testing.assert_close(out, expected(x))
    assert not clock.runs and not tuned_files(kernel_cache_dir)


def test_nothing_is_timed_in_a_capture(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    clock.prefer(is_64)
    monkeypatch.setattr(autotune, "_is_captured", lambda tensors: True)
    fd, x = doubled(), torch.randn(64, 96)
    with pytest.warns(RuntimeWarning, match="captured.*nothing can be timed"):
        fd.execute([x], _enable_options=TUNE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fd.execute([x], _enable_options=TUNE)
    assert not clock.runs and not is_64(params_of(fd))
    monkeypatch.setattr(autotune, "_is_captured", lambda tensors: False)
    (out,) = fd.execute([x], _enable_options=TUNE)
    torch.testing.assert_close(out, expected(x))
    assert clock.runs and is_64(params_of(fd))


# ------------------------------------------------------------------ several ranks
def sharded() -> tuple[FusionDefinition, Any]:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.sum(x, dim=1))
        x.set_device_mesh(multidevice.DeviceMesh([0, 1]))
        x.outer_split(1, 2)
        x.axis(1).parallelize(ParallelType.mesh_x)
    return fd, x


@pytest.mark.parametrize("tuned", [(True, True), (True, False)], ids=["all", "one"])
def test_programs_of_several_ranks_are_refused_on_all(tuned: tuple[bool, bool]) -> None:
    fd, x = sharded()
    full = torch.randn(4, 6)

    def body() -> str:
        rank = multidevice.Communicator.instance().rank()
        options = ["tune"] if tuned[rank] else []
        try:
            fd.execute([multidevice.shard_tensor(full, x)], _enable_options=options)
        except FuserError as error:
            assert isinstance(error, UnsupportedError) or not all(tuned)
            return str(error)
        return ""

    with multidevice.simulate(2) as world:
        assert all("tune: this program runs on 2 ranks" in text for text in world.run(body))


def test_a_mesh_of_one_rank_is_tuned(clock: Clock) -> None:
    clock.prefer(is_64)
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.add(fd.ops.sin(x), x))
        x.set_device_mesh(multidevice.DeviceMesh([0]))
    given = torch.randn(64, 96)
    (out,) = fd.execute([given], _enable_options=TUNE)
    torch.testing.assert_close(out, expected(given))
    assert clock.runs and is_64(params_of(fd))


def test_a_program_by_hand_of_several_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fd, x = sharded()
    full = torch.randn(4, 6)

    def body() -> str:
        shard = multidevice.shard_tensor(full, x)
        fd.execute([shard])
        program = fd.fec.host_program()
        communicator = multidevice.Communicator.instance()
        monkeypatch.setenv("FUSER_ENABLE", "tune")
        with pytest.raises(UnsupportedError, match="tune: this program runs on 2 ranks"):
            HostIrEvaluator(program, communicator)
        monkeypatch.delenv("FUSER_ENABLE")
        return "refused"

    with multidevice.simulate(2) as world:
        assert world.run(body) == ["refused", "refused"]


# ------------------------------------------------------------------ what is shown
def test_a_dump_tells_what_was_found(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FUSER_DUMP", "scheduler_params")
    clock.prefer(is_64)
    x = torch.randn(64, 96)
    doubled().execute([x], _enable_options=TUNE)
    shown = capsys.readouterr().out
    assert "kernel0: timed now" in shown
    assert "heuristic: pointwise(threads 128x1, vector 4, unroll 1), 10.00 us" in shown
    assert "best: pointwise(threads 64x1, vector 4, unroll 1), 5.00 us (50.0 % less)" in shown
    assert "timed: 5 neighbours" in shown
    # The choice, the parameters found, and those that replaced it.
    assert shown.count("// scheduler_params of kernel group 0") == 3
    assert shown.count(", tuned: the parameters that the scheduler chose") == 1
    doubled().execute([x], _enable_options=TUNE)
    assert "kernel0: kept on disk" in capsys.readouterr().out
    doubled().execute([x], _enable_options=["tune"])
    assert "has no neighbours" in capsys.readouterr().out
