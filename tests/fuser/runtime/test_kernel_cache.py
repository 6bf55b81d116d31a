"""Tests the kernel caches: hits cost no compilation, damage is repaired, processes may race."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fuser.runtime import (
    KernelParam,
    KernelSource,
    clear_memory_cache,
    compilations,
    compile_cubin,
    compile_kernels,
    cuda_kernel,
    kernel_requests,
)
from fuser.runtime.kernel_cache import KernelCache
from fuser.support.errors import CompileError, DefinitionError, KernelError, OptionError
from tests.support import handwritten_kernels
from tests.support.limits import HANG_S


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("FUSER_CACHE_DIR", str(tmp_path))
    clear_memory_cache()
    yield tmp_path / "kernels-v1"
    clear_memory_cache()


def constant(value: int) -> KernelSource:
    return handwritten_kernels.kernel("constant", "int* T0", f"  T0[0] = {value};")


def value_of(source: KernelSource) -> int:
    out = torch.zeros(1, dtype=torch.int32)
    (compiled,) = compile_kernels([source], "cpu")
    compiled.launch([out], grid=(1, 1, 1), block=(1, 1, 1))
    return int(out.item())


def test_memory_then_disk_then_compiler() -> None:
    compiled, requested = compilations(), kernel_requests()
    first = compile_kernels([constant(3)], "cpu")
    again = compile_kernels([constant(3)], torch.device("cpu"))
    assert first == again
    assert (compilations() - compiled, kernel_requests() - requested) == (1, 2)
    clear_memory_cache()
    assert value_of(constant(3)) == 3
    assert compilations() - compiled == 1


def test_known_kernels_of_a_batch_are_not_compiled_again() -> None:
    compile_kernels([constant(i) for i in range(3)], "cpu")
    clear_memory_cache()
    before = compilations()
    assert len(compile_kernels([constant(i) for i in (2, 4, 0, 4)], "cpu")) == 4
    assert compilations() - before == 1
    assert [value_of(constant(i)) for i in (0, 2, 4)] == [0, 2, 4]


def test_checked_and_unchecked_kernels_are_two() -> None:
    before = compilations()
    compile_kernels([constant(1)], "cpu")
    compile_kernels([constant(1)], "cpu", checked=True)
    assert compilations() - before == 2


@pytest.mark.parametrize(
    "damage", ["torn object", "flipped bit", "torn entry", "foreign entry", "no object"]
)
def test_damage_is_repaired(empty_cache: Path, damage: str) -> None:
    # Each case has its own value, because a loaded library stays loaded.
    value = 100 + len(damage) * 7 + ord(damage[0])
    assert compile_kernels([constant(value)], "cpu")
    (stored,) = (empty_cache / "objects").glob("*.so")
    (entry,) = (empty_cache / "entries").iterdir()
    content = stored.read_bytes()
    # Files are replaced, never written in place: this process has the library mapped.
    if damage == "torn object":
        stored.unlink()
        stored.write_bytes(content[: len(content) // 2])
    elif damage == "flipped bit":
        stored.unlink()
        stored.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "torn entry":
        entry.write_bytes(entry.read_bytes()[:10])
    elif damage == "foreign entry":
        entry.write_text(json.dumps(["something", "else"]))
    else:
        stored.unlink()
    clear_memory_cache()
    before = compilations()
    assert value_of(constant(value)) == value
    assert compilations() - before == 1
    clear_memory_cache()
    assert value_of(constant(value)) == value
    assert compilations() - before == 1


def test_cubins_are_cached(empty_cache: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="the extra nvrtc")
    before = compilations()
    first = compile_cubin([constant(1), constant(2)])
    assert first == compile_cubin([constant(1), constant(2)])
    assert compilations() - before == 2
    (empty_cache / "objects" / sorted(os.listdir(empty_cache / "objects"))[0]).write_bytes(b"torn")
    assert first == compile_cubin([constant(1), constant(2)])
    assert compilations() - before == 3


def test_kernel_compiles_while_the_next_is_made(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="the extra nvrtc")
    started = threading.Event()
    compile_one = cuda_kernel._compile

    def compile_noted(source: KernelSource, arch: str) -> bytes:
        started.set()
        return compile_one(source, arch)

    def make() -> Iterator[KernelSource]:
        yield constant(1)
        assert started.wait(HANG_S), "the first kernel waits for the second"
        yield constant(2)

    monkeypatch.setattr(cuda_kernel, "_compile", compile_noted)
    assert cuda_kernel.cubins(make(), cuda_kernel.HOPPER) == compile_cubin(
        [constant(1), constant(2)]
    )


def test_error_while_the_next_kernel_is_made(empty_cache: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="the extra nvrtc")

    def make() -> Iterator[KernelSource]:
        yield constant(1)
        raise DefinitionError("no second kernel")

    with pytest.raises(DefinitionError, match="no second kernel"):
        cuda_kernel.cubins(make(), cuda_kernel.HOPPER)
    assert len(compile_cubin([constant(1), constant(2)])) == 2


def test_folder_is_private(empty_cache: Path) -> None:
    value_of(constant(1))
    assert empty_cache.stat().st_mode & 0o777 == 0o700


def test_folder_that_others_can_write(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(OptionError, match="writable by others"):
        KernelCache(folder)


def test_lock_waits_only_until_its_deadline(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "locked")
    with cache.lock("key") as first, cache.lock("key", deadline_s=0.02) as second:
        assert first
        assert not second
    with cache.lock("key", deadline_s=0.02) as free:
        assert free


RANK = """
import ctypes, sys
from fuser.runtime import compile_kernels, compilations
from tests.support import handwritten_kernels as kernels
sources = [kernels.kernel("shared", "int* T0", f"  T0[0] = {i};") for i in range(6)]
print("ready", flush=True)
sys.stdin.readline()
out = ctypes.c_int()
values = []
for compiled in compile_kernels(sources, "cpu"):
    compiled.launch([ctypes.addressof(out)], grid=(1, 1, 1), block=(1, 1, 1))
    values.append(out.value)
assert values == list(range(6)), values
assert "torch" not in sys.modules
print(compilations())
"""


def start_rank() -> subprocess.Popen[str]:
    root = Path(__file__).parents[3]
    environment = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.Popen(
        [sys.executable, "-c", RANK],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=root,
    )


def test_ranks_compile_a_kernel_once() -> None:
    ranks = [start_rank() for _ in range(4)]
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
    answers = [rank.communicate(timeout=HANG_S)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4
    assert sum(int(answer) for answer in answers) == 6


def test_threads_may_compile_and_launch_together() -> None:
    source = handwritten_kernels.VECTOR_ADD
    results: list[torch.Tensor] = []
    inputs = [torch.full((1000,), float(i)) for i in range(4)]

    def work(x: torch.Tensor) -> None:
        (compiled,) = compile_kernels([source], "cpu")
        out = torch.zeros(1000)
        for _ in range(200):
            compiled.launch([x, x, out, 1000], grid=(8, 1, 1), block=(128, 1, 1))
        results.append(out)

    before = compilations()
    threads = [threading.Thread(target=work, args=(x,)) for x in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(float(out[0]) for out in results) == [0.0, 2.0, 4.0, 6.0]
    assert all(bool((out == out[0]).all()) for out in results)
    assert compilations() - before == 1


def test_what_makes_a_source_may_wait_for_a_thread_that_compiles() -> None:
    """A thread that holds a lock may compile another form of the kernel in the meantime."""

    def sources() -> Iterator[KernelSource]:
        other = threading.Thread(target=lambda: value_of(constant(12)), daemon=True)
        other.start()
        other.join(HANG_S)
        assert not other.is_alive()
        yield constant(11)

    (compiled,) = compile_kernels(sources(), "cpu")
    assert compiled.source == constant(11)


def test_missing_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(CompileError, match="install g\\+\\+"):
        compile_kernels([constant(41)], "cpu")


BROKEN = KernelSource(
    "broken",
    '#define nvfuser_index_t int\nextern "C" __global__ void broken(FUSER_PTR(float) T0) {\n'
    "  const int i = threadIdx.x;\n  T0[i] = no_such_name;\n}\n",
    (KernelParam("T0", "float", is_pointer=True),),
    uses_barriers=False,
)


def test_refused_kernel_shows_its_lines() -> None:
    with pytest.raises(CompileError) as caught:
        compile_kernels([constant(1), BROKEN], "cpu")
    assert "broken:4:" in str(caught.value)
    assert ">    4 |   T0[i] = no_such_name;" in str(caught.value)


def test_kernel_refused_by_nvrtc_shows_its_lines() -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="the extra nvrtc")
    with pytest.raises(CompileError) as caught:
        compile_cubin([BROKEN])
    assert 'identifier "no_such_name" is undefined' in str(caught.value)
    assert ">    4 |   T0[i] = no_such_name;" in str(caught.value)


def test_unknown_scalar_type() -> None:
    source = handwritten_kernels.kernel("odd", "short s0", "")
    with pytest.raises(KernelError, match="s0 has the type 'short', which is no scalar type"):
        compile_kernels([source], "cpu")


def test_devices_without_kernels() -> None:
    with pytest.raises(KernelError, match="not on meta"):
        compile_kernels([constant(1)], "meta")
    with pytest.raises(KernelError, match="CPU only"):
        compile_kernels([constant(1)], "cuda", checked=True)
