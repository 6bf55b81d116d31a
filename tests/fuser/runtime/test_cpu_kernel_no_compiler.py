"""Tests compilers that do not work: the error says how to repair the machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fuser import FusionDefinition
from fuser.frontend.python_printer import is_internal
from fuser.runtime import cpu_kernel
from fuser.support.errors import CompileError, DefinitionError, NoCompilerError

COMPILERS = {
    "false": ("exit 1", "ended with exit code 1, and wrote nothing"),
    "cc1plus": (
        "echo \"fatal error: cannot execute 'cc1plus'\" >&2; exit 1",
        "ended with exit code 1:\nfatal error: cannot execute 'cc1plus'",
    ),
    "true": ("exit 0", "ended with exit code 0, but made no library, and wrote nothing"),
    "killed": ("kill -9 $$", "was ended by signal 9, and wrote nothing"),
}


def compiler(folder: Path, script: str) -> str:
    path = folder / "broken-cxx"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.finding("G20")
@pytest.mark.parametrize("name", COMPILERS)
def test_a_broken_compiler_is_named_with_what_it_wrote_and_what_mends_it(
    name: str, tmp_path: Path, kernel_cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, said = COMPILERS[name]
    monkeypatch.setenv("CXX", compiler(tmp_path, script))
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 8])
        fd.add_output(fd.ops.relu(fd.ops.add(x, 0.125)))
    with pytest.raises(NoCompilerError) as found:
        fd.execute([torch.randn(4, 8)])
    text = str(found.value)
    assert text.startswith(f"{tmp_path}/broken-cxx {said}") and "export CXX=g++" in text
    assert not getattr(found.value, "__notes__", None), "no script shows it elsewhere"


@pytest.mark.finding("G20")
def test_a_kernel_that_a_working_compiler_refuses_is_our_fault() -> None:
    with pytest.raises(CompileError, match="rejected a generated kernel") as found:
        cpu_kernel._run_compiler((), "int answer() { return nonsense; }\n", {})
    assert not isinstance(found.value, NoCompilerError)
    assert is_internal(found.value) and not is_internal(NoCompilerError("no g++"))


@pytest.mark.finding("G19")
def test_an_error_in_a_definition_prints_nothing_by_itself(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(DefinitionError), FusionDefinition() as fd:
        x, y = fd.define_tensor([2, 3]), fd.define_tensor([2, 4])
        fd.add_output(fd.ops.add(x, y))
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
