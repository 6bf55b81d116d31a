"""The progress line of a long compilation: on a terminal, by rank 0, and erased at the end."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from time import monotonic
from types import SimpleNamespace

import pytest
import torch

from fuser import FusionDefinition, ParallelType
from fuser.multidevice import DeviceMesh, shard_tensor
from fuser.support import progress
from multidevice import simulate

pytestmark = pytest.mark.finding("G26")


class Terminal(io.StringIO):
    """A standard error that is a terminal."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._changed:
            self._changed.notify_all()
            return super().write(text)

    def wait_for(self, text: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: text in self.getvalue(), timeout=60)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Returns a terminal on which a line appears at once."""
    found = Terminal()
    # pytest restores its own `sys.stderr` before each phase of a test.
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=found))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "AFTER_S", 0.0)
    monkeypatch.setattr(progress, "EVERY_S", 0.001)
    return found


def define(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1, 8], contiguity=True)
    fd.add_output(fd.ops.relu(fd.ops.matmul(fd.ops.sin(x), fd.define_tensor([8, 8], True))))


def test_a_line_says_how_far_a_compilation_is_and_is_erased(terminal: Terminal) -> None:
    with progress.shown(0):
        terminal.wait_for("compiling: 0 s")
        progress.stage("segment", 120, 300)
        terminal.wait_for("\r\x1b[Kcompiling: segment 120 of 300, ")
        with progress.shown(0):  # a part of it has no line of its own
            progress.stage("the compiler")
            terminal.wait_for("compiling: the compiler, ")
    assert terminal.getvalue().endswith("\r\x1b[K")
    drawn = terminal.getvalue()
    progress.stage("segment", 1, 2)
    assert terminal.getvalue() == drawn
    assert not any(t.name == "fuser progress" for t in threading.enumerate())


def test_a_line_appears_after_two_seconds() -> None:
    terminal = Terminal()
    line = progress.ProgressLine(terminal, monotonic() - 2.0)
    terminal.wait_for("compiling: 2 s")
    line.end()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_a_line_is_erased_where_a_compilation_fails(terminal: Terminal) -> None:
    with pytest.raises(ValueError, match="refused"), progress.shown(0):
        terminal.wait_for("compiling")
        raise ValueError("refused")
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_a_short_compilation_says_nothing(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "AFTER_S", 1e6)
    with progress.shown(0):
        progress.stage("segment", 1, 2)
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("reason", ["log", "dumb", "rank", "option", "closed"])
def test_nothing_is_drawn_where_nobody_looks(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    if reason == "log":
        monkeypatch.setattr(terminal, "isatty", lambda: False)
    elif reason == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    elif reason == "option":
        monkeypatch.setenv("FUSER_DISABLE", "progress")
    elif reason == "closed":
        monkeypatch.setattr(terminal, "isatty", io.StringIO.isatty.__get__(_closed()))
    with progress.shown(int(reason == "rank")):
        assert not any(t.name == "fuser progress" for t in threading.enumerate())
    assert terminal.getvalue() == ""


def _closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


def note_stages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the stages that progress lines display."""
    found: list[str] = []
    stage: Callable[..., None] = progress.ProgressLine.stage

    def noting(line: progress.ProgressLine, name: str, number: int, count: int) -> None:
        assert 0 <= number <= count
        found.append(name)
        stage(line, name, number, count)

    monkeypatch.setattr(progress.ProgressLine, "stage", noting)
    return found


def test_the_first_call_tells_its_stages(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = note_stages(monkeypatch)
    with FusionDefinition() as fd:
        define(fd)
    inputs = [torch.randn(4, 8), torch.randn(8, 8)]
    fd.execute(inputs)
    order = list(dict.fromkeys(stages))
    assert order[:2] == ["passes", "shardings"]
    assert {"kernel to choose", "segment", "verification", "kernel", "the compiler"} <= {*order}
    assert terminal.getvalue() in ("", terminal.getvalue().removesuffix("\r\x1b[K") + "\r\x1b[K")
    before = len(stages)
    fd.execute(inputs)
    assert len(stages) == before


def test_one_rank_of_a_job_draws(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    init = progress.ProgressLine.__init__

    def noting(line: progress.ProgressLine, *args: object) -> None:
        lines.append(threading.current_thread().name)
        init(line, *args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(progress.ProgressLine, "__init__", noting)

    def body() -> None:
        mesh = DeviceMesh(range(2))
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, 6], contiguity=True)
            fd.add_output(fd.ops.sum(fd.ops.mul(x, 1.25), 0))
        x.set_device_mesh(mesh)
        x.outer_split(0, 2)
        x.axis(0).parallelize(ParallelType.mesh_x)
        fd.execute([shard_tensor(torch.randn(4, 6), x)])

    with simulate(2) as world:
        world.run(body)
    assert len(set(lines)) == 1
