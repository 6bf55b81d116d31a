"""Stream axes of extent 1, threads that share a mesh, and other programs that are refused."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import NoReturn

import pytest
import torch

from fuser import FusionDefinition, ParallelType
from fuser.support.errors import ExecutionError, UnsupportedError, VerifyError
from hostir import HostIrEvaluator
from hostir.ir.buffer_aliasing import Storage
from hostir.ir.parser import parse
from hostir.ir.program import HostIrContainer
from multidevice.job.agreement import Channel, Turns
from multidevice.job.communicator import run_agreed
from tests.support.limits import HANG_S

STREAM = ParallelType.stream


def test_a_stream_on_a_reduced_unit_axis_is_one_step() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor(shape=[1], contiguity=[None])
        s = fd.ops.sum(x, dims=[0])
        y = fd.ops.maximum(s, x)
        fd.add_output(s)
        fd.add_output(y)
        y.axis(0).parallelize(STREAM)
    a = torch.randn(1)
    total, largest = fd.execute([a])
    torch.testing.assert_close(total, a.sum())
    torch.testing.assert_close(largest, a)


def test_streams_on_different_axes_of_which_one_is_a_unit() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor(shape=[-1, -1, 1], contiguity=[True, True, None])
        y = fd.ops.add(x, x)
        fd.add_output(y)
        x.axis(2).parallelize(STREAM)
        y.axis(0).parallelize(STREAM)
    for rows in (5, 1):
        a = torch.randn(rows, 8, 1)
        torch.testing.assert_close(fd.execute([a])[0], 2 * a)


class _Channel(Channel):
    """A rank's channel with slow calls, which records the errors that it raises."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._calls = 0
        self._threads = ""
        self.refused: list[BaseException] = []

    def refuse(self, error: BaseException) -> NoReturn:
        self.refused.append(error)
        raise error

    def _connect(self) -> None: ...

    def enter(self, signature: object, numbers: object, *, is_final: bool = True) -> None: ...

    def doubt(self, error: BaseException) -> None: ...


class _Rank:
    def __init__(self) -> None:
        self.turns = Turns()
        self._channel = _Channel(self.turns)

    def channel(self, devices: object) -> _Channel:
        return self._channel


def test_two_threads_of_a_rank_in_one_call_are_refused_on_both_sides() -> None:
    rank, inside, over = _Rank(), threading.Event(), threading.Event()
    errors: dict[str, BaseException] = {}

    def slow() -> str:
        inside.set()
        over.wait(HANG_S)
        return "done"

    def call(name: str, run: object) -> None:
        try:
            run_agreed(rank, (0, 1), lambda: (None, (), run))  # pyright: ignore[reportArgumentType]
        except BaseException as error:
            errors[name] = error

    first = threading.Thread(target=call, args=("first", slow), name="first")
    first.start()
    assert inside.wait(HANG_S)
    second = threading.Thread(target=call, args=("second", lambda: None), name="second")
    second.start()
    deadline = time.monotonic() + HANG_S
    while not rank.turns.latecomer:
        assert time.monotonic() < deadline, "the second thread never came"
        time.sleep(0.001)
    over.set()
    first.join(HANG_S)
    second.join(HANG_S)
    assert isinstance(errors["first"], UnsupportedError) and "second" in str(errors["first"])
    assert isinstance(errors["second"], UnsupportedError)
    assert [type(e) for e in rank.channel(()).refused] == [UnsupportedError]
    # One after another they are welcome.
    call("third", lambda: None)
    assert "third" not in errors


CYCLE = """\
%HostIrContainer { (T0_g_float[iS0{4}, iS1{2}]) -> (T1_g_float[iS2{4}, iS3{2}]) :
  T1_g_float[iS2{4}, iS3{2}] = ALLOCATE(buffer=T1_g_float[iS2{4}, iS3{2}], mem_type=global, \
size=8, zero_init=false, resets_to_zero=false)
  T2_l_float[iS4{2}]
     = HirAliasSelect( T2_l_float[iS4{2}], axis = iS4{2}, index = 0 )
} // %HostIrContainer
"""


def test_a_name_of_itself_is_refused() -> None:
    with pytest.raises(VerifyError, match=r"T2.*is a view of itself"):
        Storage.of(parse(CYCLE))


@pytest.mark.parametrize("late", ["foo", -7])
def test_an_unknown_late_stream_is_refused(late: str | int) -> None:
    with pytest.raises(ExecutionError, match=f"late_stream={late!r}"):
        HostIrEvaluator(HostIrContainer(), late_stream=late)


def test_a_dump_that_cannot_be_written_is_a_warning() -> None:
    code = (
        "import torch\nfrom fuser import FusionDefinition\n"
        "with FusionDefinition() as fd:\n"
        "    x = fd.define_tensor([2], contiguity=True)\n"
        "    fd.add_output(fd.ops.add(x, 1.0))\n"
        "print(fd.execute([torch.ones(2)])[0].tolist())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "FUSER_DUMP": "host_ir", "FUSER_DUMP_DIR": "/proc/nothing"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.stdout.strip() == "[2.0, 2.0]", done.stderr
    assert "could not be written" in done.stderr
