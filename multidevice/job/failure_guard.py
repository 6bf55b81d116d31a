"""Ends the whole job if one rank fails or leaves early, so that the other ranks do not wait for it.

`Guard.install` sets hooks for three cases:

- An uncaught exception in any thread prints rank and error, and aborts the job.
- A rank that exits announces how many calls it has entered. Another rank that waits for further
  calls of that rank raises `PeerError` at once.
- An exit with a non-zero code ends the job, even if the other ranks never wait.

`start_monitor` starts the process that reports which rank was killed by a signal.
"""

from __future__ import annotations

import atexit
import faulthandler
import io
import os
import re
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
    from multidevice.coordination.deadlock_detector import WaitForGraph
from multidevice.coordination.bounded_wait import Event

# The job must end within 5 s of a failure: after this time the process exits without the launcher's
# help.
_ABORT_LIMIT_S = 3.0
# If all ranks exit with an error code within this time, no abort is needed.
_EXIT_GRACE_S = 1.0
# How long a rank waits until another rank has reported an error that both have.
_TOLD_LIMIT_S = 1.0
_WATCH_EVERY_S = 0.5
# The kinds of calls that devices carry out, and in which they wait.
_ON_DEVICES = ("nccl", "cuda")


class _ExitRequest(SystemExit):
    """The SystemExit that `sys.exit` raises on a rank. Its exit code is recorded only if this
    exception ends the program, and not if user code catches it.

    The test is made when the exception object is destroyed. An exception that user code catches is
    destroyed inside a Python frame. An exception that ends the program is destroyed in the
    interpreter's exit code, without any frame.
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
    """Returns the stream for the last message of this process: sys.stderr, or the original stderr
    of the process if a buffer has replaced sys.stderr.

    Another hook, such as that of torch.distributed, may replace it and print the buffer only after
    this module's hook has returned. But this module's hook ends the process, so the text in the
    buffer would be lost.
    """
    collects = isinstance(sys.stderr, io.StringIO)
    return sys.__stderr__ if collects and sys.__stderr__ is not None else sys.stderr


class Guard:
    """The hooks of one process that handle exits and uncaught exceptions.

    - `on_exit`: functions that are called before the rank announces that it leaves.
    - `after_exit`: functions that are called after all other ranks have left.
    - `reports`: functions that return a failure that a device has reported, "" if there is none.
    """

    def __init__(self, control: JobControl) -> None:
        self._control = control
        self._previous_hook = early_abort.hook_before()
        self._previous_thread_hook = threading.excepthook
        self._exit_code: object = None
        # A forked child inherits the hooks, but it is not a rank.
        self._pid = os.getpid()
        self._ending = threading.Lock()
        self._watching = False
        self.reports: list[Callable[[], str]] = []
        self.on_exit: list[Callable[[], None]] = []
        self.after_exit: list[Callable[[], None]] = []

    def install(self) -> None:
        """Installs the hooks for exits and uncaught exceptions; the previous hooks are still
        called.
        """
        sys.excepthook = self._uncaught
        threading.excepthook = self._uncaught_in_thread
        sys.exit = self._exit
        # On a crash, print the signal and the Python frames: MPICH's launcher prints only a process
        # number.
        with suppress(ValueError, OSError, AttributeError):  # stderr may be no file
            if not faulthandler.is_enabled():
                faulthandler.enable()
        atexit.register(self._leave)

    def watch(self) -> None:
        """Starts a thread that ends the job if a device would wait forever for another rank.

        The wait is endless if the other rank failed, or left before it entered a call that this
        rank's device has entered. A rank that waits in the CUDA driver for a collective cannot
        check other ranks itself.
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
                    # The other rank ends the job once its message is printed.
                    time.sleep(_ABORT_LIMIT_S)
                    os._exit(1)
            if frames is None:
                self._previous_hook(kind, error, trace)
            text = _error_text(kind, error, trace)
            ranks = error.ranks if isinstance(error, FuserError) else ()
            self._end(text, 130 if kind is KeyboardInterrupt else 1, frames or "", ranks)

    def _is_told_by_another(self, error: BaseException) -> bool:
        """Returns whether this rank need not report `error`, because another rank has reported a
        failure.

        If several ranks have the same error, only the first of them reports the error, so that it
        is printed once. The others wait up to a second for the announcement of the first rank that
        it has failed. Returns False at once on the first rank, and for an error of this rank alone.
        """
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
        """Prints and announces the failure `text`, and aborts the job with the exit code `code`.

        `frames` is the traceback to print. `ranks` are all ranks that have the same failure, if
        there are several.
        """
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
        """Replaces Python's sys.exit; records the exit code if this exit ends the program."""
        if threading.current_thread() is not threading.main_thread():
            raise SystemExit(status)

        def record(code: object) -> None:
            self._exit_code = code

        raise _ExitRequest(status, record)

    def _leave(self) -> None:
        """Runs at the exit of Python: announces how many calls this rank has entered, and waits
        until the other ranks have left, too.

        If the exit code is not 0, and the other ranks do not leave or fail within a short time,
        ends the job.
        """
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
        """Records in shared memory why this rank ends, for the process `rank_monitor`.

        `word` is LEFT if the rank leaves normally, SAID_WHY if the rank has printed the reason.
        """
        if self._control.wait_graph is not None:
            self._control.wait_graph.say(word)


def start_monitor(wait_graph: WaitForGraph) -> None:
    """Starts the process that reports which rank was killed by a signal (`rank_monitor`).

    Only the rank that created the wait-for graph starts the process. No process is started if the
    launcher is not MPICH's, or if the system has no pidfds. The process is started through a shell,
    so that it is no child of this rank: the user's program may wait for all its children.
    """
    if wait_graph.file < 0:
        return
    with suppress(OSError, AttributeError), ExitStack() as opened:
        opened.callback(os.close, wait_graph.file)
        parents = _parents_in_mpich()
        if not parents or not sys.executable:
            return
        events = opened.enter_context(select.epoll())
        fds: list[int] = []
        for pid in (*wait_graph.processes(), *parents):
            fds.append(os.pidfd_open(pid))
            opened.callback(os.close, fds[-1])
            events.register(fds[-1], select.EPOLLIN)
        ranks = fds[: -len(parents)]
        numbers = events.fileno(), wait_graph.file, len(ranks), ",".join(map(str, ranks)), *fds[-2:]
        script = sys.executable, "-I", "-S", rank_monitor.__file__, *map(str, numbers)
        subprocess.run(
            ["/bin/sh", "-c", '"$@" &', "sh", *script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[events.fileno(), wait_graph.file, *fds],
            cwd="/",
            start_new_session=True,
            check=False,
        )


def _parents_in_mpich() -> tuple[int, int] | None:
    """Returns the process numbers of MPICH's proxy on this host, and of the proxy's parent.

    The proxy is the process that starts the ranks. Returns None under another launcher.
    """
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
    """Returns a text about an uncaught exception: its type, its message, and the user's last source
    line, unless the message has that line.
    """
    where, text = last_user_line(trace), f"uncaught {kind.__name__}: {error}"
    is_new = bool(where) and re.search(rf"{re.escape(where)}\b", text) is None
    return f"{text} ({os.path.basename(where)})" if is_new else text
