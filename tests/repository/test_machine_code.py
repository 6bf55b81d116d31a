"""After the tests, the kernels of all test processes are compiled for sm_90a, each once.

A kernel that NVRTC refuses is named.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from fuser.runtime import cuda_kernel
from fuser.support.errors import CompileError
from tests.support import mpi_abort
from tests.support.limits import HANG_S
from tests.support.machine_code import TOGETHER, compile_for_hopper

REPOSITORY = Path(__file__).parents[2]
KERNEL = 'extern "C" __global__ void {name}(FUSER_PTR(int) T0) {{ T0[0] = {value}; }}'
# Code that g++ compiles and NVRTC refuses.
FOR_CPUS = "#ifndef FUSER_SIMT\n#error not for GPUs\n#endif\n"
Programs = list[tuple[str, tuple[str, ...]]]

pytest.importorskip("cuda.bindings.nvrtc")
pytestmark = pytest.mark.skipif(mpi_abort.world_size() > 1, reason="counts compilations")


def kernels(count: int, first: int = 0) -> dict[str, str]:
    return {KERNEL.format(name="same", value=k): "same" for k in range(first, first + count)}


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, kernel_cache_dir: Path) -> Programs:
    """Records the texts that NVRTC gets, with their options."""
    given: Programs = []
    original = cuda_kernel._compile

    def noted(
        source: cuda_kernel.KernelSource, arch: str, options: Sequence[str] = cuda_kernel.OPTIONS
    ) -> bytes:
        given.append((source.text, tuple(options)))
        return original(source, arch, options)

    monkeypatch.setattr(cuda_kernel, "_compile", noted)
    return given


def test_several_kernels_of_one_name_are_one_program(programs: Programs) -> None:
    compile_for_hopper(kernels(TOGETHER + 1))
    assert sorted(text.count("T0[0]") for text, _ in programs) == [TOGETHER // 2, TOGETHER // 2 + 1]


def test_only_new_kernels_are_compiled(programs: Programs) -> None:
    compile_for_hopper(kernels(3))
    compile_for_hopper(kernels(4))
    assert [text.count("T0[0]") for text, _ in programs] == [3, 1]


def test_a_refused_kernel_is_named_and_comes_again(programs: Programs) -> None:
    wrong = {KERNEL.format(name="wrong", value="nothing"): "wrong"}
    for _ in range(2):
        with pytest.raises(CompileError, match="NVRTC rejected kernel wrong"):
            compile_for_hopper(kernels(2) | wrong)


def test_plain_loops_are_not_optimised(programs: Programs) -> None:
    """Loops for the CPU are compiled without optimization, which would take up to a minute
    each.
    """
    plain = KERNEL.replace("void", "void __launch_bounds__(1)")
    compile_for_hopper({plain.format(name="plain", value=1): "plain"} | kernels(2))
    assert {text.count("T0[0]"): options for text, options in programs} == {
        1: (*cuda_kernel.OPTIONS, "--device-debug"),
        2: cuda_kernel.OPTIONS,
    }
    with pytest.raises(CompileError, match="NVRTC rejected kernel plain"):
        compile_for_hopper({plain.format(name="plain", value="nothing"): "plain"})


@pytest.mark.parametrize(("processes", "head"), [("0", FOR_CPUS), ("2", FOR_CPUS), ("2", "")])
def test_kernels_of_all_processes_decide(
    processes: str, head: str, kernel_cache_dir: Path, tmp_path: Path
) -> None:
    pytest.importorskip("xdist")
    text = head + KERNEL.format(name="made", value=1)
    (tmp_path / "test_it.py").write_text(f"""\
import pytest
from fuser.support.kernel_source import KernelParam, KernelSource
from fuser.kernels import executor

@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_make(number):
    text = {text!r} + f"// {{number}}"
    source = KernelSource("made", text, (KernelParam("T0", "int", True),), False)
    executor.compile_kernels([source], "cpu")
""")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-q", "-n", processes, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert "4 passed" in done.stdout, done.stdout + done.stderr
    refused = "the kernels do not compile for sm_90a" in done.stdout
    assert refused == (done.returncode == 1) == bool(head), done.stdout
    assert refused or "4 kernels compiled for sm_90a" in done.stdout
