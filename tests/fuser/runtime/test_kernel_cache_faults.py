"""Tests the kernel cache with faults: strange files, full disks, forks, and unused libraries."""

from __future__ import annotations

import errno
import gc
import json
import multiprocessing
import os
import shutil
import threading
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fuser.runtime import (
    clear_memory_cache,
    compilations,
    compile_kernels,
    cpu_kernel,
    kernel_cache,
)
from fuser.runtime.kernel_cache import KernelCache
from fuser.support.kernel_source import KernelSource
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


def value_of(value: int) -> int:
    out = torch.zeros(1, dtype=torch.int32)
    (compiled,) = compile_kernels([constant(value)], "cpu")
    compiled.launch([out], grid=(1, 1, 1), block=(1, 1, 1))
    return int(out.item())


def as_folder(path: Path) -> None:
    path.mkdir()
    (path / "inside").write_text("something")


def as_pipe(path: Path) -> None:
    os.mkfifo(path)


def as_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def as_dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize("make", [as_folder, as_pipe, as_link, as_dangling_link])
@pytest.mark.parametrize("part", ["entries", "objects", "locks"])
@pytest.mark.finding("F44")
def test_what_is_no_file_is_replaced(
    empty_cache: Path, part: str, make: Callable[[Path], None]
) -> None:
    assert value_of(3) == 3
    (entry,) = (empty_cache / "entries").iterdir()
    (stored,) = (empty_cache / "objects").iterdir()
    path = {
        "entries": entry,
        "objects": stored,
        "locks": empty_cache / "locks" / f"{entry.name}.lock",
    }[part]
    path.unlink(missing_ok=True)
    make(path)
    if part == "locks":
        entry.unlink()
    clear_memory_cache()
    before = compilations()
    handles = len(os.listdir("/proc/self/fd"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert value_of(3) == 3
        assert compilations() - before == 1
        clear_memory_cache()
        assert value_of(3) == 3
    assert compilations() - before == 1, "not repaired"
    assert len(os.listdir("/proc/self/fd")) == handles


def test_reading_takes_no_more_memory_than_the_file_has(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    tracemalloc.start()
    try:
        assert kernel_cache._read(tmp_path / "file", 256 << 20) == b"content"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def wrong_symbol(entry: Path, other: Path) -> bytes:
    return json.dumps(json.loads(entry.read_bytes()) | {"symbol": "main"}).encode()


def of_another_kernel(entry: Path, other: Path) -> bytes:
    return other.read_bytes()


def object_of_another_kernel(entry: Path, other: Path) -> bytes:
    found = json.loads(other.read_bytes())["object"]
    return json.dumps(json.loads(entry.read_bytes()) | {"object": found}).encode()


def outside(entry: Path, other: Path) -> bytes:
    found = "../objects/" + json.loads(entry.read_bytes())["object"]
    return json.dumps(json.loads(entry.read_bytes()) | {"object": found}).encode()


def deep(entry: Path, other: Path) -> bytes:
    return b"[" * 4000


@pytest.mark.parametrize(
    "damage", [wrong_symbol, of_another_kernel, object_of_another_kernel, outside, deep]
)
@pytest.mark.finding("F44")
def test_foreign_entries_are_replaced(
    empty_cache: Path, damage: Callable[[Path, Path], bytes]
) -> None:
    assert value_of(5) == 5
    (entry,) = (empty_cache / "entries").iterdir()
    assert value_of(6) == 6
    (other,) = (e for e in (empty_cache / "entries").iterdir() if e != entry)
    entry.write_bytes(damage(entry, other))
    clear_memory_cache()
    before = compilations()
    assert value_of(5) == 5
    assert compilations() - before == 1
    clear_memory_cache()
    assert (value_of(5), value_of(6)) == (5, 6)
    assert compilations() - before == 1, "not repaired"


def test_a_library_in_use_survives_its_file(empty_cache: Path) -> None:
    out = torch.zeros(1, dtype=torch.int32)
    (compiled,) = compile_kernels([constant(8)], "cpu")
    (stored,) = (empty_cache / "objects").iterdir()
    with stored.open("r+b") as file:
        file.truncate(100)
    compiled.launch([out], grid=(1, 1, 1), block=(1, 1, 1))
    assert out.item() == 8


@pytest.mark.finding("F44")
def test_no_room_costs_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(kernel_cache, "_write_atomically", full)
    with pytest.warns(RuntimeWarning, match="cannot be written") as caught:
        assert [value_of(n) for n in (11, 12)] == [11, 12]
    assert len(caught) == 1


@pytest.mark.finding("F44")
def test_a_folder_that_cannot_be_made_costs_one_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FUSER_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="cannot be written") as caught:
        assert [value_of(n) for n in (13, 14)] == [13, 14]
    assert len(caught) == 1


def test_a_folder_that_was_deleted_is_made_again(empty_cache: Path) -> None:
    cache = KernelCache()
    shutil.rmtree(empty_cache)
    stored = cache.store({"key": "symbol"}, b"content", "so")
    assert KernelCache().find("key", "symbol") == stored


@pytest.mark.finding("F23")
def test_the_oldest_objects_go_first(empty_cache: Path) -> None:
    cache = KernelCache()
    for n in range(8):
        stored = cache.store({f"key{n}": "symbol"}, bytes([n]) * 1000, "so")
        for path in (empty_cache / "objects" / stored.name, empty_cache / "entries" / f"key{n}"):
            os.utime(path, (1e9 + n, 1e9 + n))
    assert KernelCache().find("key0", "symbol") is not None  # used just now
    KernelCache().evict(limit_nbytes=4000)
    fresh = KernelCache()
    left = [n for n in range(8) if fresh.find(f"key{n}", "symbol") is not None]
    assert left == [0, 6, 7]
    assert len(list((empty_cache / "entries").iterdir())) == 3
    KernelCache().evict(limit_entries=2)
    assert len(list((empty_cache / "entries").iterdir())) == 1


def test_a_store_keeps_the_cache_within_its_limit(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_cache, "LIMIT_NBYTES", 16_000)
    for n in range(60):
        KernelCache().store({f"key{n}": "symbol"}, os.urandom(1000), "so")
        used = sum(p.stat().st_size for p in (empty_cache / "objects").iterdir())
        assert used <= 18_000


def mapped_libraries() -> int:
    return Path("/proc/self/maps").read_text().count(".so (deleted)") + Path(
        "/proc/self/maps"
    ).read_text().count("memfd:")


@pytest.mark.finding("F50")
def test_libraries_are_unloaded_with_their_last_kernel() -> None:
    (kept,) = compile_kernels([constant(20)], "cpu")
    gc.collect()
    before = set(cpu_kernel._libraries)
    maps = mapped_libraries()
    for n in range(21, 26):
        assert value_of(n) == n
    gc.collect()
    # Libraries that earlier tests held may be unloaded in the meantime.
    assert set(cpu_kernel._libraries) <= before and mapped_libraries() <= maps
    out = torch.zeros(1, dtype=torch.int32)
    prepared = kept.prepare([out], grid=(1, 1, 1), block=(1, 1, 1))
    del kept
    gc.collect()
    prepared.run()
    assert out.item() == 20


def _child(pipe: object) -> None:
    pipe.send(value_of(31))  # pyright: ignore


@pytest.mark.finding("F43")
def test_a_fork_while_another_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child inherits the compiler's lock in locked state, held by a thread that it does not
    have."""
    inside, leave = threading.Event(), threading.Event()
    original = cpu_kernel._run_compiler

    def slow(*args: object) -> bytes:
        inside.set()
        assert leave.wait(HANG_S)
        return original(*args)  # pyright: ignore

    monkeypatch.setattr(cpu_kernel, "_run_compiler", slow)
    thread = threading.Thread(target=value_of, args=(30,))
    thread.start()
    assert inside.wait(HANG_S)
    monkeypatch.setattr(cpu_kernel, "_run_compiler", original)
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=_child, args=(there,))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of forks beside threads
            child.start()
        assert here.poll(HANG_S), "the child hangs"
        assert here.recv() == 31
    finally:
        leave.set()
        thread.join()
        child.join(10)
        child.kill()
    assert value_of(30) == 30


# ------------------------------------------------------------------ what tuning has found
def test_what_tuning_found_is_bounded_and_outlives_objects(empty_cache: Path) -> None:
    cache = KernelCache()
    keys = [f"{k:064x}" for k in range(20)]
    for k, key in enumerate(keys):
        cache.store_tuned(key, {"best": k})
        os.utime(empty_cache / "tuned" / key, (k + 1, k + 1))
    assert cache.find_tuned(keys[0]) == {"best": 0}  # used now: it is the youngest
    cache.evict(limit_nbytes=0, limit_entries=0, limit_tuned=5)
    kept = {key for key in keys if cache.find_tuned(key) is not None}
    assert kept == {keys[0], *keys[16:]}
    assert cache.find_tuned("absent") is None


def test_tuning_without_room_goes_on(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KernelCache()
    kernel_cache._warn_once.cache_clear()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(kernel_cache, "_write_atomically", full)
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        cache.store_tuned("0" * 64, {"best": 1})
    assert cache.find_tuned("0" * 64) is None
    assert not list((empty_cache / "tuned").iterdir())


def test_a_folder_deleted_meanwhile_takes_what_tuning_finds(empty_cache: Path) -> None:
    cache = KernelCache()
    shutil.rmtree(empty_cache)
    cache.store_tuned("0" * 64, {"best": 1})
    assert cache.find_tuned("0" * 64) == {"best": 1}
