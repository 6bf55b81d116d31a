"""Jobs under mpirun and torchrun: collectives, and the end of a job in which one rank fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import mpi_abort
from tests.support.jobs import MPIRUN, ROOT, needs_mpi, run_job

pytestmark = pytest.mark.skipif(mpi_abort.world_size() > 1, reason="starts jobs of its own")


def check_collectives(launcher: str, size: int, backend: str) -> None:
    job = run_job(launcher, size, "collectives.py")
    assert job.code == 0, job.text
    for rank in range(size):
        assert f"ok rank {rank} of {size} on {backend}" in job.text, job.text
    print(job.text)


@needs_mpi
@pytest.mark.parametrize("size", [2, 4])
def test_collectives_under_mpirun(size: int) -> None:
    check_collectives("mpirun", size, "mpi")


def test_collectives_under_torchrun() -> None:
    check_collectives("torchrun", 2, "gloo")


@needs_mpi
def test_gloo_on_its_own_store_under_mpirun() -> None:
    job = run_job("mpirun", 2, "faults.py", "late", FUSER_BACKEND="gloo", FUSER_MASTER_PORT="29763")
    assert job.code == 0, job.text


# kind -> what the output must contain; the last rank of two misbehaves.
FAULTS = {
    "exception": "rank 1: uncaught ValueError: planted failure",
    "collected": "rank 1: uncaught ValueError: planted failure",
    "thread": "rank 1: uncaught ValueError: planted failure",
    "exit": "rank 1 left early (it has exited) without entering a barrier or an agreement (control",
    "exit_code": "it has exited with code 3",
    "exit_code_unwaited": "rank 1: exited with code 3; ending the job",
    "raise_exit": "rank 1 left early",
    "import": "rank 1: uncaught ModuleNotFoundError: No module named 'no_such_module'",
}


@needs_mpi
@pytest.mark.parametrize("kind", [kind for kind in FAULTS if kind != "exit_code"])
@pytest.mark.finding("F45")
def test_a_fault_ends_an_mpi_job(kind: str) -> None:
    job = run_job("mpirun", 2, "faults.py", kind)
    assert job.code != 0, job.text
    assert FAULTS[kind] in job.text, job.text


@needs_mpi
@pytest.mark.parametrize("kind", ["os_exit", "kill"])
@pytest.mark.finding("F45")
def test_a_rank_that_ends_without_a_word_leaves_no_shared_memory(kind: str, tmp_path: Path) -> None:
    job = run_job("mpirun", 2, "faults.py", kind, str(tmp_path / "segments"))
    segments = (tmp_path / "segments").read_text().split()
    assert not [name for name in segments if Path(name).exists()], job.text


@pytest.mark.parametrize("kind", ["exception", "exit"])
def test_a_fault_ends_a_torchrun_job(kind: str) -> None:
    job = run_job("torchrun", 2, "faults.py", kind)
    assert job.code != 0, job.text
    assert FAULTS[kind] in job.text, job.text


@needs_mpi
@pytest.mark.parametrize("kind", ["clean", "late", "caught_exit"])
def test_a_normal_end_stays_clean(kind: str) -> None:
    job = run_job("mpirun", 2, "faults.py", kind)
    assert job.code == 0, job.text
    assert "[fuser]" not in job.text, job.text


@needs_mpi
@pytest.mark.finding("G19")
def test_an_error_of_all_ranks_is_said_once_with_its_sentence_first() -> None:
    job = run_job("mpirun", 2, "uncaught_errors.py", "mesh")
    assert job.code != 0, job.text
    first, *rest = job.text.strip().splitlines()
    assert first.startswith("[fuser] ranks 0, 1: uncaught ShardingError: DeviceMesh{0 1 2 3} of T0")
    assert "names rank 3, but the job has 2 ranks; start it with at least 4" in first
    assert job.text.count("names rank 3") == 1, job.text
    # The user's frames: main and run, two lines each; then what the launcher says.
    assert len(rest) <= 10 and "uncaught_errors.py" in rest[0], job.text
    assert "agreement.py" not in job.text, "the frames of the package are left out"


@needs_mpi
@pytest.mark.finding("G19")
def test_a_disagreement_is_said_once_with_its_sentence_first() -> None:
    job = run_job("mpirun", 2, "uncaught_errors.py", "extents")
    assert job.code != 0, job.text
    first = job.text.strip().splitlines()[0]
    assert first.startswith("[fuser] ranks 0, 1: uncaught InputError: input 0, T0"), job.text
    assert "has extent 4 on ranks (0) and 5 on ranks (1) on axis 0" in first, job.text
    assert job.text.count("has extent 4") == 1 and "agreement.py" not in job.text, job.text


@needs_mpi
@pytest.mark.finding("G19")
def test_an_error_that_the_first_rank_catches_is_said_by_the_second() -> None:
    job = run_job("mpirun", 2, "uncaught_errors.py", "caught")
    assert job.code != 0 and "caught ShardingError" in job.text, job.text
    assert job.text.count("uncaught ShardingError: DeviceMesh{0 1 2 3}") == 1, job.text


@needs_mpi
@pytest.mark.finding("G19")
def test_an_error_of_one_rank_is_said_by_that_rank() -> None:
    job = run_job("mpirun", 2, "uncaught_errors.py", "one")
    assert job.code != 0, job.text
    assert "[fuser] rank 0: uncaught RuntimeError: Trying to create tensor" in job.text, job.text
    assert "rank 1: uncaught" not in job.text, job.text


@needs_mpi
@pytest.mark.finding("G20")
def test_a_compiler_that_does_not_work_is_the_machines_fault(tmp_path: Path) -> None:
    job = run_job(
        "mpirun", 2, "uncaught_errors.py", "compiler", CXX="false", FUSER_CACHE_DIR=str(tmp_path)
    )
    assert job.code != 0, job.text
    assert "uncaught NoCompilerError: " in job.text.splitlines()[0], job.text
    assert "false ended with exit code 1, and wrote nothing" in job.text, job.text
    assert "export CXX=g++" in job.text and "this script reproduces it" not in job.text, job.text


@needs_mpi
@pytest.mark.finding("G20")
def test_mpirun_without_mpi4py_says_what_installs_it(tmp_path: Path) -> None:
    (tmp_path / "mpi4py").mkdir()
    text = """raise ModuleNotFoundError("No module named 'mpi4py'", name="mpi4py")"""
    (tmp_path / "mpi4py" / "__init__.py").write_text(text)
    job = run_job("mpirun", 2, "uncaught_errors.py", "mesh", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert job.code != 0, job.text
    first = job.text.splitlines()[0]
    assert "uncaught CommunicationError: a job of mpirun needs mpi4py" in first, job.text
    assert "-m pip install 'mpi4py>=4.1,<5'" in first, job.text


@needs_mpi
@pytest.mark.finding("G20")
def test_a_rank_that_crashes_tells_the_signal_and_the_line() -> None:
    job = run_job("mpirun", 2, "uncaught_errors.py", "crash")
    assert job.code != 0, job.text
    assert "Fatal Python error: Segmentation fault" in job.text, job.text
    assert "uncaught_errors.py" in job.text, job.text


@needs_mpi
@pytest.mark.finding("F45")
def test_an_absent_peer_is_a_timeout_that_names_the_operation_and_the_peer() -> None:
    job = run_job("mpirun", 2, "faults.py", "stall")
    assert job.code != 0, job.text
    assert (
        "timeout: rank 0: allreduce(SUM) of float32[4] over team (0 1), sequence number 1 "
        "did not complete within 1 s (FUSER_TIMEOUT_S): rank 1 has not entered it (process "
        in job.text
    ), job.text


@needs_mpi
@pytest.mark.finding("F42")
def test_a_rank_that_is_stopped_at_the_end_is_named() -> None:
    job = run_job("mpirun", 2, "faults.py", "stop")
    assert job.code != 0, job.text
    assert "rank 0 has finished, but rank 1 (process " in job.text, job.text
    assert "is stopped) did not leave within 1 s" in job.text, job.text


@needs_mpi
def test_a_rank_that_gave_up_a_team_leaves_nobody_waiting_without_end(
    tmp_path: Path,
) -> None:
    job = run_job("mpirun", 2, "late_partner.py", str(tmp_path / "given up"))
    assert job.code == 0, job.text
    assert "gave up: rank 0: barrier over team (1 0)" in job.text, job.text
    assert job.text.count("ok rank") == 2, job.text


@needs_mpi
def test_ranks_outside_of_a_mesh_may_be_done_first() -> None:
    job = run_job("mpirun", 4, "idle_ranks.py")
    assert job.code == 0, job.text
    assert job.text.count("ok rank") == 4, job.text


@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_threads_that_call_at_once_are_refused_on_all_ranks(launcher: str) -> None:
    if launcher == "mpirun" and MPIRUN is None:
        pytest.skip("needs mpirun")
    job = run_job(launcher, 2, "concurrent_threads.py")
    assert job.code == 0, job.text
    assert job.text.count("ok rank") == 2, job.text


@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
@pytest.mark.finding("F20")
def test_disagreeing_ranks_of_a_job_hear_why(launcher: str) -> None:
    if launcher == "mpirun" and MPIRUN is None:
        pytest.skip("needs mpirun")
    script = str(ROOT / "scripts" / "disagree.py")
    job = run_job(launcher, 2, script, "--cases", "18", "--seed", "340")
    assert job.code == 0, job.text
    assert job.text.count("18 disagreements, all heard") == 2, job.text
