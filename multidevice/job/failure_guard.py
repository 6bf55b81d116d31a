"""Ends the whole job when one rank fails or leaves early, instead of leaving its peers waiting.

`Guard.install` sets the hooks: an uncaught exception, in any thread, prints rank and error and
aborts the job; a rank that exits announces how far it came, so that a peer that waits for more
raises `PeerError` at once; an exit with a non-zero code ends the job even if the peers never
wait. `start_monitor` starts the process that tells of a rank that a signal has killed.
"""

from __future__ import annotations

import atexit
import faulthandler
import io
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stderr, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from fuser.support.errors import CommunicationError, FuserError, last_user_line
from multidevice.coordination import rank_monitor
from multidevice.job import early_abort
from multidevice.job.early_abort import user_frames, wait_for_reader

if TYPE_CHECKING:
    from multidevice.coordination.control_channel import JobControl
    from multidevice.coordination.deadlock_detector import Board
from multidevice.coordination.bounded_wait import Event

# The job ends within 5 s of a failure: after this time the process leaves without the launcher's
# help.
_ABORT_LIMIT_S = 3.0
# Ranks that exit with an error code at about the same time need no abort.
_EXIT_GRACE_S = 1.0
# How long a rank waits for another one to tell an error that both have.
_TOLD_LIMIT_S = 1.0
_WATCH_EVERY_S = 0.5
# Streams of calls that devices carry out, and wait in.
_ON_DEVICES = ("nccl", "cuda")


class _ExitRequest(SystemExit):
    """A SystemExit that knows, when it is destroyed, whether it ended the interpreter.

    One that user code catches dies inside some frame; one that ends the program dies in the
    interpreter's own exit code, below no frame at all.
    """

    def __init__(self, code: object, record: Callable[[object], None]) -> None:
        super().__init__(code)
        self._record = record

    def __del__(self) -> None:
        try:
            sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        except ValueError:
            self._record(self.code)


def _terminal() -> TextIO:
    """Returns where a last word arrives. A hook around ours, as that of torch.distributed, collects
    what is written to sys.stderr until ours returns; ours ends the process."""
    collects = isinstance(sys.stderr, io.StringIO)
    return sys.__stderr__ if collects and sys.__stderr__ is not None else sys.stderr


class Guard:
    """The hooks of one process; `close` hooks of the communicator run before the last handshake."""

    def __init__(self, control: JobControl) -> None:
        self._control = control
        self._previous_hook = early_abort.hook_before()
        self._previous_thread_hook = threading.excepthook
        self._exit_code: object = None
        # A forked child inherits the hooks, but it is no rank.
        self._pid = os.getpid()
        self._ending = threading.Lock()
        self._watching = False
        # Each returns what a device reports and nobody has read, "" for nothing.
        self.reports: list[Callable[[], str]] = []
        self.on_exit: list[Callable[[], None]] = []
        self.after_exit: list[Callable[[], None]] = []

    def install(self) -> None:
        """Installs the hooks; the previous hooks still run."""
        sys.excepthook = self._uncaught
        threading.excepthook = self._uncaught_in_thread
        sys.exit = self._exit
        # A rank that crashes tells the signal and where it was: of the launchers, MPICH's tells no
        # more than a process number.
        with suppress(ValueError, OSError, AttributeError):  # stderr may be no file
            if not faulthandler.is_enabled():
                faulthandler.enable()
        atexit.register(self._leave)

    def watch(self) -> None:
        """Starts a thread that ends the job when a peer left work behind that this rank is in.

        For devices: a rank that waits in the driver for a collective cannot look around itself.
        """
        if not self._watching:
            self._watching = True
            threading.Thread(target=self._watch, name="fuser-watch", daemon=True).start()

    def _watch(self) -> None:
        control = self._control
        while True:
            time.sleep(_WATCH_EVERY_S)
            control.listen()
            for report in self.reports:
                if text := report():
                    self._end(text, 1)
            for rank, event in sorted(control.peers.events.items()):
                entered = control.ledger.entered
                ahead = [
                    key
                    for key, count in sorted(entered.items())
                    if key.kind in _ON_DEVICES
                    and rank in key.team
                    and event.entered.get(key, 0) < count
                ]
                if event.kind == "failed" or ahead:
                    where = f" while this rank is ahead of it in {ahead[0]}" if ahead else ""
                    self._end(f"rank {rank} {event.kind}: {event.text}{where}", 1)

    def _uncaught(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        with redirect_stderr(_terminal()):
            frames = None
            if self._previous_hook is sys.__excepthook__:
                frames = user_frames(error, trace)
                if frames is not None and self._is_told_by_another(error):
                    # That rank ends the job once its words are read.
                    time.sleep(_ABORT_LIMIT_S)
                    os._exit(1)
            if frames is None:
                self._previous_hook(kind, error, trace)
            text = _error_text(kind, error, trace)
            ranks = error.ranks if isinstance(error, FuserError) else ()
            self._end(text, 130 if kind is KeyboardInterrupt else 1, frames or "", ranks)

    def _is_told_by_another(self, error: BaseException) -> bool:
        """Returns whether the first of the ranks that have an error has told it."""
        control = self._control
        ranks = error.ranks if isinstance(error, FuserError) else ()
        if os.getpid() != self._pid or not ranks or ranks[0] == control.rank:
            return False
        stop = time.monotonic() + _TOLD_LIMIT_S
        while time.monotonic() < stop:
            control.listen()
            event = control.peers.events.get(ranks[0])
            if event is not None:
                return event.kind == "failed"
            time.sleep(0.01)
        return False

    def _uncaught_in_thread(self, args: threading.ExceptHookArgs) -> None:
        self._previous_thread_hook(args)
        if args.exc_type is SystemExit or args.exc_value is None:
            return
        name = args.thread.name if args.thread is not None else "unknown"
        text = _error_text(args.exc_type, args.exc_value, args.exc_traceback)
        self._end(f"{text} in thread {name}", 1)

    def _end(self, text: str, code: int, frames: str = "", ranks: Sequence[int] = ()) -> None:
        """Prints and announces the failure, of this rank or of all of `ranks`, and aborts the
        job."""
        if os.getpid() != self._pid:
            return
        if not self._ending.acquire(blocking=False):
            return
        control = self._control
        self._say(rank_monitor.SAID_WHY)
        timer = threading.Timer(_ABORT_LIMIT_S, os._exit, (code,))
        timer.daemon = True
        timer.start()
        sys.stdout.flush()
        is_shared = len(ranks) > 1 and control.rank in ranks
        who = f"ranks {', '.join(map(str, ranks))}" if is_shared else f"rank {control.rank}"
        sys.stderr.write(f"[fuser] {who}: {text}; ending the job\n{frames}")
        sys.stderr.flush()
        control.announce(Event(control.rank, "failed", text))
        if control.size > 1:
            wait_for_reader(sys.stdout, sys.stderr)
        control.abort(code)

    def _exit(self, status: object = None) -> None:
        """Stands in for sys.exit, and remembers the code of the exit that ends the program."""
        if threading.current_thread() is not threading.main_thread():
            raise SystemExit(status)

        def record(code: object) -> None:
            self._exit_code = code

        raise _ExitRequest(status, record)

    def _leave(self) -> None:
        """Runs at exit: announces how far this rank came, and waits for the peers."""
        if os.getpid() != self._pid:
            return
        control = self._control
        code = self._exit_code
        text = "it has exited" if code in (None, 0) else f"it has exited with code {code!r}"
        for hook in self.on_exit:
            hook()
        control.announce(Event(control.rank, "left", text, dict(control.ledger.entered)))
        if code not in (None, 0):
            stop = time.monotonic() + _EXIT_GRACE_S
            while len(control.peers.events) < control.size - 1 and time.monotonic() < stop:
                control.listen()
                time.sleep(0.01)
            if len(control.peers.events) < control.size - 1:
                self._end(f"exited with code {code!r}", code if isinstance(code, int) else 1)
        try:
            control.finish()
        except CommunicationError as error:
            self._end(str(error), 1)
        for hook in self.after_exit:
            hook()
        self._say(rank_monitor.LEFT)

    def _say(self, word: int) -> None:
        """Tells the monitor of the ranks why this one ends."""
        if self._control.board is not None:
            self._control.board.say(word)


def start_monitor(board: Board) -> None:
    """Starts the process that tells which rank was killed (`rank_monitor`), on the rank that made
    the board; nothing where the launcher is not MPICH's or the system has no pidfds.

    A shell between makes it no child of this rank, whose program may wait for all its children.
    """
    if board.file < 0:
        return
    with suppress(OSError, AttributeError), ExitStack() as opened:
        opened.callback(os.close, board.file)
        parents = _parents_in_mpich()
        if not parents or not sys.executable:
            return
        events = opened.enter_context(select.epoll())
        fds: list[int] = []
        for pid in (*board.processes(), *parents):
            fds.append(os.pidfd_open(pid))
            opened.callback(os.close, fds[-1])
            events.register(fds[-1], select.EPOLLIN)
        ranks = fds[: -len(parents)]
        numbers = events.fileno(), board.file, len(ranks), ",".join(map(str, ranks)), *fds[-2:]
        script = sys.executable, "-I", "-S", rank_monitor.__file__, *map(str, numbers)
        subprocess.run(
            ["/bin/sh", "-c", '"$@" &', "sh", *script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[events.fileno(), board.file, *fds],
            cwd="/",
            start_new_session=True,
            check=False,
        )


def _parents_in_mpich() -> tuple[int, int] | None:
    """Returns the processes of MPICH's launcher that started this rank: the proxy of this host, and
    its parent; None under another launcher."""
    pid = os.getppid()
    while "PMI_FD" in os.environ and pid > 1:
        head, _, tail = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        parent = int(tail.split()[1])
        if head.endswith("(hydra_pmi_proxy"):
            return pid, parent
        pid = parent
    return None


def _error_text(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> str:
    """Returns type, message and the last user line of an error."""
    where = last_user_line(trace)
    return f"uncaught {kind.__name__}: {error}{f' ({os.path.basename(where)})' if where else ''}"
