"""`python -m fuser`: prints what is installed, and for missing parts the consequence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fuser import __main__ as page
from tests.support.jobs import MPIRUN, ROOT, needs_mpi
from tests.support.limits import HANG_S

SECTIONS = ["versions", "devices", "compilers", "cache", "memory", "options", "launcher"]


def run(*command: str, **env: str) -> str:
    """Runs Python with only these options; returns its output."""
    kept = {k: v for k, v in os.environ.items() if "FUSER_" not in k}
    done = subprocess.run(
        command,
        env={**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


def test_the_page_starts_nothing_but_the_compiler_and_calls_few_functions(tmp_path: Path) -> None:
    program = """
import json, sys, torch
from fuser import __main__ as page
from fuser.runtime import cpu_kernel as simt
from tests.support.counted_calls import calls_of
from tests.support.limits import HANG_S

page._COMPILER_TIMEOUT_S = HANG_S
started = []
sys.addaudithook(lambda event, args: started.append(args[0]) if "Popen" in event else None)
calls = calls_of(lambda: page.main([])).total()
page.main(["--json"])
mpi = sys.modules.get("mpi4py.MPI")
# 9,000; an import of torch._dynamo alone is 600,000.
assert calls < 60_000, calls
assert set(started) <= {simt.cxx_compiler()}, started
assert not torch.cuda.is_initialized()
assert mpi is None or not mpi.Is_initialized()
"""
    out = run(sys.executable, "-c", program, XDG_CACHE_HOME=str(tmp_path))
    printed, brace, as_json = out.partition("\n{")
    found = json.loads(brace + as_json)
    assert list(found) == SECTIONS
    for title, rows in found.items():
        assert f"{title}\n" in printed
        for what, value in rows.items():
            assert any(line.split() == [*what.split(), *value.split()] for line in lines(printed))
    assert found["versions"]["torch"].startswith(f"{torch.__version__}, built for")
    assert found["launcher"] == {"none": "rank 0 of 1"}
    assert found["options"] == {"none": "docs/reference/options.md lists them"}
    assert len(lines(printed)) < 40


def lines(printed: str) -> list[str]:
    return printed.split("\n")


@needs_mpi
def test_one_rank_of_a_host_prints() -> None:
    out = run(str(MPIRUN), "-np", "2", sys.executable, "-m", "fuser", FUSER_BACKEND="mpi")
    assert out.count("versions\n") == 1
    assert "rank 0 of 2, 0 of 2 on this host" in out and "FUSER_BACKEND" in out


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (None, "'no-such-c++' was not found"),
        ("exit 1", "ended with exit code 1, and wrote nothing"),
        ("exec sleep 1000", "did not finish within 0.2 s"),
    ],
)
def test_a_compiler_that_does_not_work(
    script: str | None, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", "no-such-c++" if script is None else str(compiler))
    # A short timeout only for the compiler that never answers: others may start slowly.
    monkeypatch.setattr(page, "_COMPILER_TIMEOUT_S", 0.2 if "sleep" in str(script) else 100.0)
    found = dict(page._compilers())["C++"]
    assert found.startswith("not found: ") and told in found
    assert found.endswith("; CPU ranks run library calls alone")


def test_a_cache_folder_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("no folder")
    monkeypatch.setenv("FUSER_CACHE_DIR", str(file))
    found = dict(page._cache())
    assert found["folder"].startswith(str(file))
    assert "not found: [Errno 20]" in found["holds"] and "anew" in found["holds"]
    monkeypatch.setenv("FUSER_CACHE_DIR", str(tmp_path))
    folder = Path(dict(page._cache())["folder"])
    assert dict(page._cache())["holds"].startswith("0 kernels, 0 tuned, 0.0 of at most")
    assert not folder.exists()  # looking makes nothing
    folder.mkdir()
    folder.chmod(0o777)
    assert "writable by others" in dict(page._cache())["holds"]
    monkeypatch.setenv("FUSER_CACHE_DIR", "~nobody-of-that-name/x")
    assert "set FUSER_CACHE_DIR" in dict(page._cache())["folder"]


def test_the_cache_is_counted(kernel_cache_dir: Path) -> None:
    from fuser.runtime.kernel_cache import KernelCache, contents

    cache = KernelCache()
    cache.store({"a" * 64: "f", "b" * 64: "g"}, b"x" * 1000, "so")
    cache.store_tuned("c" * 64, {"best": 1})
    found = contents()
    assert (found.kernels, found.tuned, found.nbytes) == (2, 1, 1000)


def test_options_and_launchers_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSER_TIMEOT_S", "3")
    assert dict(page._options())["FUSER_TIMEOT_S"] == "3"
    assert "did you mean 'FUSER_TIMEOUT_S'" in dict(page._options())["refused"]
    monkeypatch.delenv("FUSER_TIMEOT_S")
    monkeypatch.setenv("NVFUSER_DUMP", "ptx")
    found = dict(page._options())
    assert found["NVFUSER_DUMP"] == "ptx" and "nothing is printed for ptx" in found["warning"]
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert "OMPI_COMM_WORLD_SIZE is missing" in dict(page._launcher())["refused"]
    assert page._is_first_of_host()


def test_a_section_that_breaks_hides_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> page.Lines:
        yield "first", "fine"
        raise KeyError("what\nelse")

    monkeypatch.setattr(page, "_SECTIONS", {"one": broken, "launcher": page._launcher})
    assert page.main([]) == 0
    printed = capsys.readouterr().out.split("\n")
    assert printed[1].split() == ["first", "fine"]
    assert printed[2].split("found  ")[-1] == "'what\\nelse'"
    assert printed[3] == "launcher"
