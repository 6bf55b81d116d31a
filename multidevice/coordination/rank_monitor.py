"""Says which rank of this host was killed by a signal: a process of its own, beside the ranks.

MPICH's launcher kills all other ranks within a millisecond of the death of one, before any can say
who died, and itself tells a process number. `faults.Guard` has one rank start this file as a script
in a session of its own. It imports nothing but the standard library, and nothing of this project.

    python -I -S rank_monitor.py EVENTS PAGE SIZE RANKS PROXY LAUNCHER

EVENTS is an epoll descriptor, in which the ranks' and the launcher's pidfds were registered: the
system keeps there which process ended first. PAGE is the shared page of `board.Board`, RANKS are
the ranks' pidfds. PROXY and LAUNCHER are those of the parents, -1 where there is none.

The monitor says nothing where a rank has said why it ends (`SAID_WHY`), where one ended by an exit
of its own, where the launcher ended first (it was interrupted, or told to abort), and where all
ranks ended by one signal that the launcher has passed on. It ends with the last of the ranks.
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

# The layout of the page that `board.Board` writes, which takes the names from here; a line is
# `page.LINE_NBYTES`.
_LINE_NBYTES = 64
AREA_NBYTES = 1 << 16
# The words of a rank's line: its process; version and size of its position in JSON; what it has
# said about its own end; how many calls of programs it has begun (messages count from call 0).
PID, VERSION, NBYTES, SAID, CALLS = range(5)
# In a line's SAID: the rank has left as programs do; it has printed why it ends.
LEFT, SAID_WHY = 1, 2

# How long the others may take to end after the first, which says whether the launcher ends them,
# and how long the launcher may take to end after the last.
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
    """The end of a rank's process; `status` is that of wait(2), None where nothing tells it."""

    rank: int
    pid: int
    status: int | None

    @property
    def signal(self) -> int:
        """The signal that ended the process, 0 for none or an unknown one."""
        return (self.status or 0) & 0x7F


def main() -> None:
    """Watches the processes of the command line, and prints which was killed."""
    events, page, size, *rest = sys.argv[1:]
    ranks, proxy, launcher = rest
    board = MonitoredPage(mmap.mmap(int(page), 0, access=mmap.ACCESS_READ), int(size))
    watched = {int(fd): rank for rank, fd in enumerate(ranks.split(","))}
    kills, out = oom_kills(), _open_terminal(int(launcher))
    ends = watch(select.epoll.fromfd(int(events)), watched, int(proxy), int(launcher), board)
    killed = killed_first(ends, len(watched))
    for end in killed:
        count = oom_kills() - kills if end.signal == signal.SIGKILL else 0
        with suppress(OSError):
            os.write(out, sentence(end, board, count).encode(errors="replace"))


def watch(
    events: select.epoll, watched: dict[int, int], proxy: int, launcher: int, board: MonitoredPage
) -> list[End]:
    """Returns the ends of processes in their order, once it shows whether the first one was killed;
    nothing where it was not.

    `watched` has the rank of each pidfd; `proxy` is the parent of the ranks, `launcher` its parent.
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
            end = End(rank, board.word(rank, PID), _status(fd, board.word(rank, PID)))
            if not ends:
                has_left = board.word(rank, SAID) == LEFT
                if board.has_said_why() or (
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
    """Returns which of the ends to tell: those by a crash, else the first, as the launcher kills
    the others; none where one signal, which the launcher passes on, has ended all of `count`."""
    crashed = [end for end in ends if end.signal in _CRASHES]
    signals = {end.signal for end in ends}
    if not crashed and len(ends) == count > 1 and len(signals) == 1 and signals.isdisjoint({0, 9}):
        return []
    return crashed or ends[:1]


def sentence(end: End, board: MonitoredPage, oom_count: int = 0) -> str:
    """Returns the line about a rank that was killed; `oom_count` processes ended for want of memory
    since the job began."""
    if end.signal:
        cause = f"was killed by signal {end.signal} ({_name(end.signal)})"
    else:
        cause = "was killed or left by os._exit (mpirun prints the signal or exit code)"
    wait, others = board.waits(end.rank)
    calls = board.word(end.rank, CALLS)
    if wait:
        where = f"during its wait in {wait}"
    elif board.word(end.rank, SAID) == LEFT:
        where = "during its exit, after its work was done"
    elif calls:
        where = f"during or after call {calls - 1} of a program with a mesh"
    else:
        where = "before its first call of a program with a mesh"
    memory = (
        f"; for want of memory the system has killed {oom_count} process"
        f"{'es' if oom_count > 1 else ''} since the job began"
        if oom_count
        else ""
    )
    return (
        f"[fuser] rank {end.rank} {cause} {where} (process {end.pid}){others}{memory}; "
        "ending the job\n"
    )


class MonitoredPage:
    """The page of `board.Board`, for reading; its ranks may be gone."""

    def __init__(self, page: mmap.mmap, size: int) -> None:
        self._page, self._size = page, size
        self._words = memoryview(page).cast("Q")

    def word(self, rank: int, number: int) -> int:
        """Returns a word of a rank's line."""
        return self._words[_LINE_NBYTES // 8 * (1 + rank) + number]

    def has_said_why(self) -> bool:
        """Whether any rank has printed why it ends."""
        return any(self.word(rank, SAID) == SAID_WHY for rank in range(self._size))

    def waits(self, rank: int) -> tuple[str, str]:
        """Returns what a rank waited in, and which others waited for it, as a part of a sentence;
        "" for nothing."""
        waits = {r: wait for r in range(self._size) if (wait := self._wait(r))}
        own = waits.pop(rank, None)
        texts = [
            f"; rank {other} waited for it in {what}"
            for other, (_, what, needs, _) in waits.items()
            if any(needed == rank for needed, _, _ in needs)
        ]
        return (own[1] if own else ""), "".join(texts[:1])

    def _wait(self, rank: int) -> list[Any] | None:
        """Returns the fields of `board.Wait` that a rank has posted."""
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
    """Returns the wait status of a process that has ended, by its pidfd and number (0: unknown).

    A process that its parent has not yet waited for has it in /proc; of one that it has, Linux
    keeps it since 6.15 as long as somebody has the pidfd. Else it cannot be known.
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
    """Returns the descriptor for the last word: stderr of the rank that started the monitor, or of
    the launcher, by its pidfd, where that rank's is a file without a name (pytest captures so)."""
    info = os.fstat(2)
    if stat.S_ISREG(info.st_mode) and info.st_nlink == 0:
        with suppress(OSError, ValueError, IndexError):
            with open(f"/proc/self/fdinfo/{launcher}") as file:
                pid = int(file.read().partition("\nPid:")[2].split()[0])
            return os.open(f"/proc/{pid}/fd/2", os.O_WRONLY | os.O_APPEND)
    return 2


def oom_kills() -> int:
    """Returns how many processes the system has ended for want of memory."""
    with suppress(OSError, ValueError, IndexError), open("/proc/vmstat") as file:
        return int(file.read().partition("\noom_kill ")[2].split()[0])
    return 0


if __name__ == "__main__":
    main()
