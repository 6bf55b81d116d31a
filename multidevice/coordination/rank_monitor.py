"""Reports which rank of this host was killed by a signal, from a separate process.

MPICH's launcher kills all other ranks within a millisecond of the death of one, before any of them
can report it. The launcher itself prints only a process number. Therefore
`failure_guard.start_monitor` makes one rank start this file as a script, in a separate session. The
script imports only the standard library, and nothing of this project.

    python -I -S rank_monitor.py EVENTS PAGE SIZE RANKS PROXY LAUNCHER

- EVENTS: an epoll descriptor in which the pidfds of the ranks and of the launcher are registered.
  The system records in it which process ended first.
- PAGE: the descriptor of the shared memory of `deadlock_detector.WaitForGraph`.
- SIZE: the number of ranks.
- RANKS: the pidfds of the ranks.
- PROXY: the pidfd of the ranks' parent process, -1 if there is none.
- LAUNCHER: the pidfd of the proxy's parent process, -1 if there is none.

The monitor prints nothing in four cases:

- a rank has printed why it ends (`SAID_WHY`);
- a rank ended by its own exit;
- the launcher ended first (it was interrupted, or asked to abort);
- all ranks ended by one signal that the launcher passed on.

The monitor ends when the last rank has ended.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import signal
import stat
import struct
import sys
import time
from contextlib import suppress
from typing import Any, NamedTuple

# The layout of the memory that `deadlock_detector.WaitForGraph` writes; it imports these names. A
# line has `shared_page.LINE_NBYTES` bytes.
_LINE_NBYTES = 64
AREA_NBYTES = 1 << 16
# The fields of a rank's line: its process number; version and size of its position in JSON; the
# reason it gave for its end; how many calls of programs it has begun (errors count from call 0).
PID, VERSION, NBYTES, SAID, CALLS = range(5)
# Values of SAID: the rank has left normally; the rank has printed why it ends.
LEFT, SAID_WHY = 1, 2

# After the first rank has ended: how long to wait for the others, which shows whether the launcher
# ends them; after the last: how long to wait for the launcher.
_SETTLE_S, _LAUNCHER_S = 0.5, 0.15
_CRASHES = {
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGILL,
    signal.SIGFPE,
    signal.SIGABRT,
    signal.SIGTRAP,
    signal.SIGSYS,
}
# struct pidfd_info of Linux 6.15: mask, cgroup, eleven numbers of process and users, exit status.
_INFO = struct.Struct("=QQ11Ii")
_WITH_EXIT = 1 << 3
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11


class End(NamedTuple):
    """The end of a rank's process.

    `pid` is the process number. `status` is the status that wait(2) returns, None if unknown.
    """

    rank: int
    pid: int
    status: int | None

    @property
    def signal(self) -> int:
        """The signal that ended the process; 0 if no signal did, or if the status is unknown."""
        return (self.status or 0) & 0x7F


def main() -> None:
    """Watches the processes given on the command line, and prints which rank was killed by a
    signal.
    """
    events, page, size, *rest = sys.argv[1:]
    ranks, proxy, launcher = rest
    shared = MonitoredPage(mmap.mmap(int(page), 0, access=mmap.ACCESS_READ), int(size))
    watched = {int(fd): rank for rank, fd in enumerate(ranks.split(","))}
    kills, out = oom_kills(), _open_terminal(int(launcher))
    ends = watch(select.epoll.fromfd(int(events)), watched, int(proxy), int(launcher), shared)
    killed = killed_first(ends, len(watched))
    for end in killed:
        count = oom_kills() - kills if end.signal == signal.SIGKILL else 0
        with suppress(OSError):
            os.write(out, sentence(end, shared, count).encode(errors="replace"))


def watch(
    events: select.epoll, watched: dict[int, int], proxy: int, launcher: int, page: MonitoredPage
) -> list[End]:
    """Watches the processes of the ranks. Returns the processes that have ended, in the order of
    their ends, if the first of them was killed by a signal. Returns an empty list if not.

    Returns as soon as this is clear, which may be before all ranks have ended.

    - `events`: the epoll object in which all pidfds are registered.
    - `watched`: the rank of each pidfd.
    - `proxy`, `launcher`: the pidfds of the ranks' parent, and of the proxy's parent.
    - `page`: the shared memory of the wait-for graph.
    """
    alive, ends, stop = dict(watched), list[End](), float("inf")
    has_proxy = proxy >= 0
    while True:
        left_s = stop - time.monotonic()
        if left_s <= 0 or not (alive or ends):
            return ends
        for fd, _ in events.poll(None if stop == float("inf") else left_s):
            events.unregister(fd)
            if fd in (proxy, launcher):
                # After a rank was killed the proxy ends in order, and then the launcher.
                has_proxy = has_proxy and fd != proxy
                if not ends or has_proxy or (fd == proxy and _status(fd, 0)):
                    return []
                continue
            rank = alive.pop(fd)
            end = End(rank, page.word(rank, PID), _status(fd, page.word(rank, PID)))
            if not ends:
                has_left = page.word(rank, SAID) == LEFT
                if page.has_said_why() or (
                    not has_left and end.status is not None and not end.signal
                ):
                    return []
                if has_left and not end.signal:
                    continue
                stop = time.monotonic() + _SETTLE_S
            ends.append(end)
            if not alive:
                stop = min(stop, time.monotonic() + _LAUNCHER_S)


def killed_first(ends: list[End], count: int) -> list[End]:
    """Selects from `ends` the processes to report: all that crashed, or else only the first that
    ended.

    A process crashed if a signal such as SIGABRT ended it. Otherwise only the first is reported,
    because the launcher then kills the other ranks. The result is empty if one signal, passed on by
    the launcher, has ended all `count` ranks.
    """
    crashed = [end for end in ends if end.signal in _CRASHES]
    signals = {end.signal for end in ends}
    if not crashed and len(ends) == count > 1 and len(signals) == 1 and signals.isdisjoint({0, 9}):
        return []
    return crashed or ends[:1]


def sentence(end: End, page: MonitoredPage, oom_count: int = 0) -> str:
    """Returns the line to print about a rank that was killed.

    `oom_count` is how many processes the system has killed for lack of memory since the job began.
    """
    if end.signal:
        cause = f"was killed by signal {end.signal} ({_name(end.signal)})"
    else:
        cause = "was killed or left by os._exit (mpirun prints the signal or exit code)"
    wait, others = page.waits(end.rank)
    calls = page.word(end.rank, CALLS)
    if wait:
        where = f"during its wait in {wait}"
    elif page.word(end.rank, SAID) == LEFT:
        where = "during its exit, after its work was done"
    elif calls:
        where = f"during or after call {calls - 1} of a program with a mesh"
    else:
        where = "before its first call of a program with a mesh"
    memory = (
        f"; for lack of memory the system has killed {oom_count} process"
        f"{'es' if oom_count > 1 else ''} since the job began"
        if oom_count
        else ""
    )
    return (
        f"[fuser] rank {end.rank} {cause} {where} (process {end.pid}){others}{memory}; "
        "ending the job\n"
    )


class MonitoredPage:
    """Reads the shared memory of `deadlock_detector.WaitForGraph`, also after ranks have ended."""

    def __init__(self, page: mmap.mmap, size: int) -> None:
        self._page, self._size = page, size
        self._words = memoryview(page).cast("Q")

    def word(self, rank: int, number: int) -> int:
        """Returns one field of a rank's line in shared memory.

        `number` says which field: PID, VERSION, NBYTES, SAID or CALLS.
        """
        return self._words[_LINE_NBYTES // 8 * (1 + rank) + number]

    def has_said_why(self) -> bool:
        """Returns whether any rank has printed why it ends."""
        return any(self.word(rank, SAID) == SAID_WHY for rank in range(self._size))

    def waits(self, rank: int) -> tuple[str, str]:
        """Returns two texts for the message about `rank`, whose process was killed.

        The first is the name of the call in which `rank` waited last. The second is a clause about
        another rank that waited for `rank`, such as "; rank 2 waited for it in recv". Each text is
        "" if there was no such wait.
        """
        waits = {r: wait for r in range(self._size) if (wait := self._wait(r))}
        own = waits.pop(rank, None)
        texts = [
            f"; rank {other} waited for it in {what}"
            for other, (_, what, needs, _) in waits.items()
            if any(needed == rank for needed, _, _ in needs)
        ]
        return (own[1] if own else ""), "".join(texts[:1])

    def _wait(self, rank: int) -> list[Any] | None:
        """Returns the last wait that a rank has published, as the list of the fields of
        `BlockedRank`; None if there is none.
        """
        import json  # costs more than the whole start, and is needed at an end only

        version, nbytes = self.word(rank, VERSION), self.word(rank, NBYTES)
        if version == 0 or version % 2:  # killed while it wrote
            return None
        start = _LINE_NBYTES * (1 + self._size) + rank * AREA_NBYTES
        try:
            return json.loads(self._page[start : start + nbytes])[0]
        except ValueError:
            return None


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of the real-time signals
        return "a real-time signal"


def _status(fd: int, pid: int) -> int | None:
    """Returns the wait status of a process that has ended, None if unknown.

    `fd` is the pidfd of the process and `pid` its number, 0 if unknown. While the parent has not
    waited for the process, the status is in /proc. After that, Linux 6.15 and newer keep the status
    as long as a pidfd is open.
    """
    if pid:
        with suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{pid}/stat") as file:
                state, *fields = file.read().rpartition(")")[2].split()
            if state in "ZX":
                return int(fields[48])
    info = bytearray(_INFO.pack(_WITH_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(fd, _GET_INFO, info)
    except OSError:
        return None
    mask, *_, status = _INFO.unpack(info)
    return status if mask & _WITH_EXIT else None


def _open_terminal(launcher: int) -> int:
    """Returns the file descriptor to which the monitor prints.

    This is the stderr of the rank that started the monitor. If that stderr is a file without a name
    (pytest captures output into such a file), the stderr of the launcher is used instead.
    `launcher` is the launcher's pidfd.
    """
    info = os.fstat(2)
    if stat.S_ISREG(info.st_mode) and info.st_nlink == 0:
        with suppress(OSError, ValueError, IndexError):
            with open(f"/proc/self/fdinfo/{launcher}") as file:
                pid = int(file.read().partition("\nPid:")[2].split()[0])
            return os.open(f"/proc/{pid}/fd/2", os.O_WRONLY | os.O_APPEND)
    return 2


def oom_kills() -> int:
    """Returns how many processes the system has killed for lack of memory since the system was
    started.
    """
    with suppress(OSError, ValueError, IndexError), open("/proc/vmstat") as file:
        return int(file.read().partition("\noom_kill ")[2].split()[0])
    return 0


if __name__ == "__main__":
    main()
