"""Tests how the compiled runner is built, and programs on machines where that is impossible."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from fuser.runtime import compiled_runner
from fuser.runtime.kernel_cache import KernelCache
from fuser.support.errors import CompileError
from tests.support.limits import HANG_S
from tests.support.repeated_calls import (
    ENOUGH,
    add,
    steady,
)


def _in_python(text: str, *flags: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *flags, "-c", text],
        env={**os.environ, "PYTHONPATH": os.getcwd(), **environment},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr.strip(), done.stderr
    return done.stdout


def _no_compiler() -> str:
    raise CompileError("kernels for the CPU need a compiler, and it was not found")


_CALLS = """
import torch
from fuser import FusionDefinition
from fuser.runtime import compiled_runner
{before}
with FusionDefinition() as fd:
    x, y = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
    fd.add_output(fd.ops.add(x, y))
inputs = [torch.randn(6, 8), torch.randn(6, 8)]
fd.execute(inputs)
for _ in range({calls}):
    (z,) = fd.execute(inputs)
    assert torch.equal(z, inputs[0] + inputs[1])
print(fd.compiled_runner()[0])
"""


def test_in_developer_mode() -> None:
    text = _CALLS.format(before="assert compiled_runner.wait(240.0)", calls=2000)
    assert _in_python(text, "-X", "dev").startswith("repeated: ")


def test_a_process_that_ends_before_the_compiler(tmp_path: Path) -> None:
    """The process does not wait, leaves no files, and prints no message."""
    cache = tmp_path / "cache"
    folder = tmp_path / "temporary"
    folder.mkdir()
    slow, pid = tmp_path / "slow", tmp_path / "pid"
    # The process must not end before the compiler runs: the test checks that the compiler is ended,
    # too.
    begun = f"import os, time\nwhile not os.path.exists({str(pid)!r}): time.sleep(0.01)\nprint("
    text = _CALLS.format(before="", calls=40).replace("print(", begun)
    waits = f'*runner.c*) echo $$ > "{pid}.new"; mv "{pid}.new" "{pid}"; exec sleep 60;;'
    slow.write_text(f'#!/bin/sh\ncase "$*" in {waits} esac\nexec g++ "$@"\n')
    slow.chmod(0o755)
    places = {"FUSER_CACHE_DIR": str(cache), "TMPDIR": str(folder), "CXX": str(slow)}
    said = _in_python(text, "-X", "dev", **places)
    assert re.match(
        r"not repeated: it is being compiled, for \d+ s so far; asked again in \d+ call\(s\) \(",
        said,
    ), said
    assert not list(folder.iterdir())
    assert not Path("/proc", pid.read_text().strip()).exists()


@pytest.mark.parametrize(
    ("place", "name", "value", "why"),
    [
        (compiled_runner, "cxx_compiler", _no_compiler, "was not found"),
        (
            compiled_runner,
            "cxx_compiler",
            lambda: "false",
            "the compiler rejected the compiled runner's source",
        ),
        (compiled_runner, "cxx_compiler", lambda: "/no/such/compiler", "No such file"),
        (compiled_runner, "_FILES", ("nothing.h",), "cannot be read"),
        (sysconfig, "get_path", lambda name: "/nowhere", "Python.h was not found in"),
        (torch.Tensor, "__dlpack_c_exchange_api__", None, "no C exchange table"),
    ],
)
def test_absent_without_harm(
    place: Any, name: str, value: Any, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(place, name, value)
    monkeypatch.setattr(compiled_runner, "_state", compiled_runner._State())
    if place is not torch.Tensor:
        monkeypatch.setattr(compiled_runner, "_FLAGS", (f"-DANOTHER={tmp_path.name}",))
    fd, inputs = add(), [torch.randn(6, 8), torch.randn(6, 8)]
    for _ in range(ENOUGH):
        assert torch.equal(fd.execute(inputs)[0], inputs[0] + inputs[1])
    assert compiled_runner.wait(HANG_S) is None
    assert why in compiled_runner.why_not()
    for _ in range(2 * ENOUGH):
        assert torch.equal(fd.execute(inputs)[0], inputs[0] + inputs[1])
    assert fd.compiled_runner()[0].startswith(f"not repeated: {compiled_runner.why_not()}")


@pytest.mark.parametrize("is_full", [False, True], ids=["read-only", "full"])
def test_a_cache_that_keeps_nothing(
    is_full: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The runner is built once, for this process alone."""
    monkeypatch.setattr(compiled_runner, "_state", compiled_runner._State())
    monkeypatch.setattr(
        compiled_runner, "_FLAGS", (*compiled_runner._FLAGS, f"-DKEEPS_NOTHING={is_full:d}")
    )
    if is_full:

        def no_room(*about: Any) -> None:
            raise OSError("no space left on device")

        monkeypatch.setattr(KernelCache, "_write", no_room)
    else:
        (tmp_path / "no folder").touch()
        monkeypatch.setenv("FUSER_CACHE_DIR", str(tmp_path / "no folder"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert compiled_runner.wait(HANG_S) is not None, compiled_runner.why_not()
    fd, inputs = add(), [torch.randn(6, 8), torch.randn(6, 8)]
    steady(fd, inputs)


def test_a_library_that_cannot_be_loaded_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_runner, "_state", compiled_runner._State())
    monkeypatch.setattr(compiled_runner, "_FLAGS", (*compiled_runner._FLAGS, "-DAGAIN"))
    KernelCache().store({compiled_runner._key(): compiled_runner._NAME}, b"no library", "so")
    assert compiled_runner.wait(HANG_S) is not None, compiled_runner.why_not()
