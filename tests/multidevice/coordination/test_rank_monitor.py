"""The monitor process reports which rank a signal killed, under MPICH's launcher too."""

from __future__ import annotations

import mmap
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from multidevice.coordination import deadlock_detector, rank_monitor
from multidevice.coordination.bounded_wait import Calls, Need
from multidevice.coordination.deadlock_detector import WaitForGraph
from multidevice.coordination.rank_monitor import LEFT, SAID_WHY, End, MonitoredPage
from multidevice.coordination.shared_page import LINE_NBYTES
from tests.support import mpi_abort
from tests.support.jobs import MPIRUN, PROGRAMS, ROOT, Job, run_job
from tests.support.limits import HANG_S

pytestmark = pytest.mark.skipif(mpi_abort.world_size() > 1, reason="starts jobs of its own")
needs_pidfds = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfds")
needs_mpich = pytest.mark.skipif(
    MPIRUN is None
    or shutil.which("hydra_pmi_proxy", path=str(Path(MPIRUN).parent)) is None
    or not hasattr(os, "pidfd_open"),
    reason="needs MPICH's mpirun, and pidfds",
)
ALLREDUCE = r"allreduce\(SUM\) of float32\[4\] over team \(0 1\), sequence number 0"

# kind -> signal, and a pattern of what the sentence says between the signal and the process.
KILLED = {
    "computing": ("9 (SIGKILL)", "before its first call of a program with a mesh"),
    "sleeping": ("9 (SIGKILL)", "before its first call of a program with a mesh"),
    "calls": ("9 (SIGKILL)", r"during or after call \d+ of a program with a mesh"),
    "waiting": ("9 (SIGKILL)", f"during its wait in {ALLREDUCE}"),
    "waiting in the first run": ("9 (SIGKILL)", "during its wait in .+"),
    "collective": ("9 (SIGKILL)", "before its first call of a program with a mesh"),
    "first run": ("9 (SIGKILL)", "before its first call of a program with a mesh"),
    "crash": ("11 (SIGSEGV)", "before its first call of a program with a mesh"),
}
# kind -> what another rank waited in, as far as that is told.
WAITED = {"collective": ALLREDUCE, "first run": ".+"}


def run_monitored(size: int, program: str, *args: str) -> Job:
    """Runs a job and waits until all of its processes, including the monitor, have ended."""
    mark = f"RANK_MONITOR_TEST={uuid.uuid4()}"
    job = run_job("mpirun", size, program, *args, **dict([mark.split("=")]))
    wait_until_gone(mark)
    return job


def said(text: str) -> list[str]:
    return [line for line in text.splitlines() if "[fuser]" in line]


@needs_mpich
@pytest.mark.finding("G20")
@pytest.mark.parametrize("kind", KILLED)
def test_monitor_when_a_signal_kills_a_rank_names_it_once(kind: str) -> None:
    size = 4 if kind == "sleeping" else 2
    job = run_monitored(size, "killed.py", kind)
    cause, where = KILLED[kind]
    assert job.code != 0, job.text
    pid = re.findall(rf"ready: rank {size - 1} is process (\d+)", job.text)[0]
    head = re.escape(f"[fuser] rank {size - 1} was killed by signal {cause} ")
    waited = f"; rank 0 waited for it in {WAITED[kind]}" if kind in WAITED else ".*"
    (line,) = said(job.text)
    assert re.search(rf"{head}{where} \(process {pid}\){waited}; ending the job$", line), job.text
    print(line)


@needs_mpich
@pytest.mark.finding("G20")
def test_monitor_names_a_rank_whose_output_pytest_captures(tmp_path: Path) -> None:
    file = tmp_path / "test_killed.py"
    file.write_text(
        "from tests.support.rank_programs import killed\n"
        "def test_kill():\n"
        "    killed.main('collective')\n"
    )
    options = "--rootdir", str(tmp_path), "-p", "no:cacheprovider"
    job = run_monitored(2, "in_pytest.py", *options, str(file))
    (line,) = said(job.text)
    assert "[fuser] rank 1 was killed by signal 9 (SIGKILL)" in line, job.text


@needs_mpich
@pytest.mark.finding("G20")
@pytest.mark.parametrize("kind", ["normal", "os_exit"])
def test_monitor_when_ranks_end_by_themselves_says_nothing(kind: str) -> None:
    job = run_monitored(2, "killed.py", kind)
    assert (job.code == 0) == (kind == "normal"), job.text
    assert not said(job.text), job.text


@needs_mpich
@pytest.mark.finding("G20")
def test_monitor_when_a_rank_raises_leaves_the_word_to_it() -> None:
    job = run_monitored(2, "killed.py", "exception")
    (line,) = said(job.text)
    assert "rank 1: uncaught ValueError: planted failure" in line, job.text


@needs_mpich
@pytest.mark.finding("G20")
@pytest.mark.parametrize(
    ("kind", "signals"),
    [
        ("idle", [signal.SIGTERM]),
        ("idle", [signal.SIGKILL]),
        ("stubborn", [signal.SIGINT, signal.SIGINT]),
    ],
)
def test_monitor_when_mpirun_is_interrupted_says_nothing_and_ends(
    kind: str, signals: list[signal.Signals]
) -> None:
    mark = f"RANK_MONITOR_TEST={uuid.uuid4()}"
    process = subprocess.Popen(
        [str(MPIRUN), "-np", "2", sys.executable, str(PROGRAMS / "killed.py"), kind],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        | dict([mark.split("=")]),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    lines: list[str] = []
    try:
        for count, one in enumerate(signals):
            # All ranks have connected, and have taken the signals so far. Their lines may mix.
            while "".join(lines).count("ready") < 4 + 2 * count:
                lines.append(process.stdout.readline())
                assert lines[-1], "".join(lines)
            assert any("rank_monitor" in name for name in marked(mark)), "the monitor runs"
            process.send_signal(one)
        text, _ = process.communicate(timeout=HANG_S)
    finally:
        process.kill()
    assert not said("".join(lines) + text), text
    wait_until_gone(mark)


def marked(mark: str) -> list[str]:
    """Returns the command lines of the processes that have this text in their environment."""
    found: list[str] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # it has ended meanwhile, or is another user's
    return found


def wait_until_gone(mark: str) -> None:
    stop = time.monotonic() + HANG_S
    while left := marked(mark):
        assert time.monotonic() < stop, left
        time.sleep(0.01)


# ---------------------------------------------------------------- the parts, without a launcher
class Jobs:
    """Child processes that stand in for ranks and their launcher; tests end them in some
    order.
    """

    def __init__(self, size: int) -> None:
        self.memory = mmap.mmap(-1, deadlock_detector.nbytes_of(size) + LINE_NBYTES)
        self.graphs = [WaitForGraph(self.memory, rank, size) for rank in range(size)]
        self.processes = [
            subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
            for _ in range(size + 2)
        ]
        self.events = select.epoll()
        self.fds = [os.pidfd_open(process.pid) for process in self.processes]
        for fd in self.fds:
            self.events.register(fd, select.EPOLLIN)

    def end(self, number: int, by: int = 0) -> None:
        """Ends a process by a signal, or normally; the last two are the proxy and the
        launcher.
        """
        process = self.processes[number]
        if by:
            process.send_signal(by)
        else:
            process.communicate(b"\n")
        process.wait()

    def ends(self) -> list[tuple[int, int]]:
        """Returns the ranks and signals that the monitor reports."""
        size = len(self.graphs)
        watched = {fd: rank for rank, fd in enumerate(self.fds[:size])}
        page = MonitoredPage(self.memory, size)
        ends = rank_monitor.watch(self.events, watched, self.fds[-2], self.fds[-1], page)
        return [(end.rank, end.signal) for end in rank_monitor.killed_first(ends, size)]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()
        for fd in self.fds:
            os.close(fd)
        self.events.close()


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    made = Jobs(3)
    yield made
    made.close()


def knows_signals() -> bool:
    """Returns whether the system still tells how a process ended after its parent waited for
    it.
    """
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    fd = os.pidfd_open(process.pid)
    process.kill()
    process.communicate()
    status = rank_monitor._status(fd, process.pid)  # pyright: ignore[reportPrivateUsage]
    os.close(fd)
    return status == signal.SIGKILL


@needs_pidfds
@pytest.mark.finding("G20")
def test_monitor_when_the_launcher_kills_the_others_names_the_first(jobs: Jobs) -> None:
    for rank in (1, 0, 2):
        jobs.end(rank, signal.SIGKILL)
    (found,) = jobs.ends()
    assert found == (1, signal.SIGKILL if knows_signals() else 0)


@needs_pidfds
@pytest.mark.finding("G20")
def test_monitor_when_the_others_live_on_names_the_first(jobs: Jobs) -> None:
    jobs.end(2, signal.SIGKILL)
    assert [rank for rank, _ in jobs.ends()] == [2]


@needs_pidfds
@pytest.mark.finding("G20")
@pytest.mark.parametrize("parent", [-2, -1])
def test_monitor_when_the_launcher_ends_first_is_silent(jobs: Jobs, parent: int) -> None:
    for number in (parent, 0, 1, 2):
        jobs.end(number, signal.SIGKILL)
    assert jobs.ends() == []


@needs_pidfds
@pytest.mark.finding("G20")
@pytest.mark.parametrize(("by", "told"), [(0, [1]), (signal.SIGTERM, [])])
def test_monitor_when_the_launcher_ends_soon_after_says_it_unless_it_was_ended(
    jobs: Jobs, by: int, told: list[int]
) -> None:
    for number in (1, 0):
        jobs.end(number, signal.SIGKILL)
    jobs.end(-2, by)
    jobs.end(-1, signal.SIGTERM)  # as one that exits with the code of the rank
    assert [rank for rank, _ in jobs.ends()] == (told if knows_signals() else [1])


@needs_pidfds
@pytest.mark.finding("G20")
def test_monitor_when_a_rank_has_said_why_is_silent(jobs: Jobs) -> None:
    jobs.graphs[2].say(SAID_WHY)
    for rank in (1, 0, 2):
        jobs.end(rank, signal.SIGKILL)
    assert jobs.ends() == []


@needs_pidfds
@pytest.mark.finding("G20")
def test_monitor_when_a_rank_is_killed_after_others_have_left_names_it(jobs: Jobs) -> None:
    jobs.graphs[0].say(LEFT)
    for rank, by in ((0, 0), (2, signal.SIGKILL), (1, signal.SIGKILL)):
        jobs.end(rank, by)
    assert [rank for rank, _ in jobs.ends()] == [2]


@needs_pidfds
@pytest.mark.finding("G20")
def test_monitor_when_all_ranks_leave_ends_silently(jobs: Jobs) -> None:
    for rank in (0, 2, 1):
        jobs.graphs[rank].say(LEFT)
        jobs.end(rank)
    assert jobs.ends() == []


@pytest.mark.finding("G20")
def test_monitor_when_several_ranks_crash_names_each() -> None:
    ends = [End(2, 7, 11 | 0x80), End(0, 5, 9), End(1, 6, 11 | 0x80)]
    assert rank_monitor.killed_first(ends, 3) == [ends[0], ends[2]]


@pytest.mark.finding("G20")
def test_monitor_when_all_ranks_end_by_a_signal_that_was_passed_on_is_silent() -> None:
    assert rank_monitor.killed_first([End(r, 5 + r, signal.SIGTERM) for r in (1, 0)], 2) == []
    some = [End(1, 6, signal.SIGTERM), End(0, 5, signal.SIGKILL)]
    assert rank_monitor.killed_first(some, 2) == some[:1]


@pytest.mark.finding("G20")
def test_monitor_says_what_is_known() -> None:
    memory = mmap.mmap(-1, deadlock_detector.nbytes_of(2) + LINE_NBYTES)
    first, second = (WaitForGraph(memory, rank, 2) for rank in range(2))
    page, pid = MonitoredPage(memory, 2), os.getpid()

    def line(status: int | None, oom_count: int = 0) -> str:
        return rank_monitor.sentence(End(1, pid, status), page, oom_count)

    unknown = "was killed or left by os._exit (mpirun prints the signal or exit code)"
    before = f"before its first call of a program with a mesh (process {pid})"
    assert line(None) == f"[fuser] rank 1 {unknown} {before}; ending the job\n"
    first.watch("a barrier", [Need(1, Calls("talk", (0, 1)), 1)], {})
    assert f"{before}; rank 0 waited for it in a barrier; ending the job\n" in line(9)
    first.clear()
    second.calls[0] = 70_000
    assert "during or after call 69999 of a program with a mesh" in line(9)
    second.watch("call 3", [Need(0, Calls("talk", (0, 1)), 1)], {})
    assert f"by signal 7 (SIGBUS) during its wait in call 3 (process {pid}); ending" in line(7)
    second.clear()
    second.say(LEFT)
    assert "by signal 11 (SIGSEGV) during its exit, after its work was done" in line(11 | 0x80)
    assert "; for lack of memory the system has killed 2 processes since the job began; " in line(
        9, 2
    )
    assert "by signal 40 (a real-time signal)" in line(40)
