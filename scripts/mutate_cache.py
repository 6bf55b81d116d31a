"""Damages the disk cache of kernels; `scripts/mutate.py cache` runs its cases.

A case copies a cache of a few compiled kernels, damages one to three places of it, and makes some
system calls fail. Then it requests all kernels, as two processes one after the other would. Both
must get kernels that compute the right numbers, with one warning at most, and load only the
compiler's output. After the faults, a third process must get the kernels too, and the cache must be
repaired unless the folder itself cannot be used.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fuser.runtime import (
    clear_memory_cache,
    compilations,
    compile_kernels,
    cpu_kernel,
    kernel_cache,
)
from fuser.support.errors import FuserError, OptionError
from fuser.support.kernel_source import KernelParam, KernelSource

_ERRORS = (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO, errno.ENOENT, errno.EMFILE)
_CALLS = {
    "os": ("open", "fdopen", "fstat", "replace", "utime", "scandir", "close"),
    "tempfile": ("mkstemp",),
    "fcntl": ("flock",),
    "shutil": ("rmtree",),
}
_PATH_CALLS = ("mkdir", "stat", "lstat", "unlink")


def _source(value: int, *, uses_barriers: bool = False) -> KernelSource:
    name = f"constant_{value}"
    body = f"{'__syncthreads();' if uses_barriers else ''} T0[0] = {value};"
    text = (
        "#define nvfuser_index_t int\n"
        f'extern "C" __global__ void __launch_bounds__(1) {name}(FUSER_PTR(int) T0) {{ {body} }}\n'
    )
    return KernelSource(name, text, (KernelParam("T0", "int", True),), uses_barriers)


# Requests that share a library, one that has its own library, and one that needs the engine's.
_REQUESTS = (
    {5: _source(5), 6: _source(6)},
    {7: _source(7)},
    {8: _source(8, uses_barriers=True)},
)


class Cache:
    """An undamaged cache to copy, the compiler's outputs by text, and the digests of loaded
    libraries.
    """

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="mutate-cache-"))
        self.pristine = self.root / "pristine"
        self.answers: dict[str, bytes] = {}
        # Digests of the compiler's outputs, and of the loaded libraries.
        self.trusted: set[str] = set()
        self.loaded: set[str] = set()
        self._compile, self._load = cpu_kernel._run_compiler, cpu_kernel._library
        cpu_kernel._run_compiler = self._answer
        cpu_kernel._library = self._loading
        os.environ["FUSER_CACHE_DIR"] = str(self.pristine)
        self.ask([0, 1, 2])
        # Never unloaded, as in any process: each one keeps the stacks of its threads.
        self._engine = cpu_kernel._engine()

    def close(self) -> None:
        """Restores the product's functions and deletes the folder."""
        cpu_kernel._run_compiler, cpu_kernel._library = self._compile, self._load
        shutil.rmtree(self.root, ignore_errors=True)

    def _answer(self, flags: Any, text: str, texts: Any) -> bytes:
        if text not in self.answers:
            library = self.answers[text] = self._compile(flags, text, texts)
            self.trusted.add(hashlib.sha256(library).hexdigest())
        return self.answers[text]

    def _loading(self, binary: kernel_cache.Binary) -> Any:
        self.loaded.add(hashlib.sha256(binary.data).hexdigest())
        return self._load(binary)

    def ask(self, requests: list[int]) -> int:
        """Runs kernels as a fresh process would; returns how many were compiled. Raises for a wrong
        result.
        """
        import torch

        clear_memory_cache()
        cpu_kernel._engine.cache_clear()
        kernel_cache._written.clear()
        before = compilations()
        for request in requests:
            sources = _REQUESTS[request]
            for value, kernel in zip(
                sources, compile_kernels(list(sources.values()), "cpu"), strict=True
            ):
                out = torch.zeros(1, dtype=torch.int32)
                kernel.launch([out], grid=(1, 1, 1), block=(1, 1, 1))
                if out.item() != value:
                    raise AssertionError(f"a kernel computes {out.item()} instead of {value}")
        return compilations() - before


# ------------------------------------------------------------------ damage to files
def _bytes(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 4, 100)) if data else 0):
        data[rng.randrange(len(data))] = rng.randrange(256)
    path.write_bytes(data)


def _truncated(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.choice((0, 0, 1, rng.randrange(path.stat().st_size + 1))))


def _longer(path: Path, rng: random.Random) -> None:
    with path.open("ab") as file:
        file.write(rng.choice((b"\0", b"}", b" ", b"\n", b"x" * 5000)))


def _huge(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.choice((1 << 20, 1 << 33, 1 << 40)))


def _swapped(path: Path, rng: random.Random) -> None:
    other = rng.choice(
        sorted(p for p in path.parent.iterdir() if p.is_file() and not p.is_symlink())
    )
    data, others = path.read_bytes(), other.read_bytes()
    path.write_bytes(others)
    if rng.random() < 0.5:
        other.write_bytes(data)


def _json(path: Path, rng: random.Random) -> None:
    """Replaces an entry's text by other JSON, or one of its fields by another value."""
    texts = ("null", "[]", "{}", "1" * 4000, "[" * 4000, '{"a":' * 700, "\ufeff{}", '"', "NaN")
    text = rng.choice(texts).encode(rng.choice(("utf-8", "utf-16", "utf-32")))
    entry = None
    with contextlib.suppress(ValueError, RecursionError):
        entry = json.loads(path.read_bytes())
    if isinstance(entry, dict) and entry:
        names = [p.name for p in path.parents[1].glob("objects/*")]
        links = ("/dev/zero", "../entries/x", "a\0b")
        value = rng.choice((None, 1, [], {}, "", "main", "\ud800", *links, *sorted(names)))
        text = json.dumps(entry | {rng.choice(sorted(entry)): value}).encode()
    path.write_bytes(text)


def _gone(path: Path, rng: random.Random) -> None:
    del rng
    kernel_cache._remove(path)


def _mode(path: Path, rng: random.Random) -> None:
    path.chmod(rng.choice((0, 0o111, 0o400, 0o444, 0o777, 0o4777)))


def _folder(path: Path, rng: random.Random) -> None:
    kernel_cache._remove(path)
    path.mkdir()
    if rng.random() < 0.5:
        (path / "inside").mkdir()
        (path / "inside" / "file").write_text("something")


def _pipe(path: Path, rng: random.Random) -> None:
    del rng
    kernel_cache._remove(path)
    os.mkfifo(path)


def _file(path: Path, rng: random.Random) -> None:
    kernel_cache._remove(path)
    path.write_bytes(rng.randbytes(rng.choice((0, 3))))


def _link(path: Path, rng: random.Random) -> None:
    target = rng.choice(
        ("/dev/zero", "/dev/null", "/proc/self/mem", "nowhere", path.name, "/", "..")
    )
    kernel_cache._remove(path)
    path.symlink_to(target)


def _moved(path: Path, rng: random.Random) -> None:
    """Moves the content elsewhere, and puts a link in its place."""
    elsewhere = path.parent.parent / f"elsewhere{rng.randrange(1 << 30)}"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


Damage = Callable[[Path, random.Random], None]
_PLACES: tuple[Damage, ...] = (_gone, _mode, _folder, _pipe, _file, _link, _moved)
_CONTENTS: tuple[Damage, ...] = (_bytes, _truncated, _longer, _huge, _swapped, _json, _json)


def damage(folder: Path, rng: random.Random) -> str:
    """Damages one place under `folder`, which contains a cache; returns a description."""
    kernels = folder / "kernels-v1"
    part = rng.choices(("entries", "objects", "locks", "folder"), (4, 4, 2, 2))[0]
    found = sorted(p for p in (kernels / part).iterdir()) if (kernels / part).is_dir() else []
    if part == "folder":
        path = rng.choice(
            (folder, kernels, *(kernels / p for p in ("entries", "objects", "locks")))
        )
        change = rng.choice(_PLACES)
    elif part == "locks":
        keys = (
            [p.name for p in (kernels / "entries").iterdir()]
            if (kernels / "entries").is_dir()
            else []
        )
        path = kernels / part / f"{rng.choice([*sorted(keys), 'other'])}.lock"
        change = rng.choice(_PLACES)
        # A lock is used only where the entry is missing.
        with contextlib.suppress(OSError):
            (kernels / "entries" / path.name.removesuffix(".lock")).unlink()
    elif found:
        path = rng.choice(found)
        is_file = path.is_file() and not path.is_symlink()
        change = rng.choice(_PLACES + _CONTENTS if is_file else _PLACES)
    else:
        return f"nothing left in {part}"
    try:
        change(path, rng)
    except OSError as error:  # because of an earlier damage
        return f"{change.__name__} of {path.relative_to(folder.parent)}: {error}"
    return f"{change.__name__} of {path.relative_to(folder.parent)}"


# ------------------------------------------------------------------ failing system calls
class _Faulty:
    """A module in which some functions fail."""

    def __init__(self, module: Any, names: tuple[str, ...], strike: Callable[[str], None]) -> None:
        self._module, self._names, self._strike = module, names, strike

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return _struck(value, name, self._strike) if name in self._names else value


def _struck(function: Any, name: str, strike: Callable[[str], None]) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if name == "close":  # which closes all the same
            result = function(*args, **kwargs)
            strike(name)
            return result
        strike(name)
        return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def faults(folder: Path, rng: random.Random) -> Iterator[str]:
    """Makes system calls of the cache's module fail: always, once, or with the folder
    deleted.
    """
    kind = rng.choices(("none", "full", "readonly", "once", "vanish"), (8, 1, 1, 3, 2))[0]
    calls = [name for names in _CALLS.values() for name in names] + list(_PATH_CALLS)
    code, left, victim = rng.choice(_ERRORS), rng.randrange(40), rng.choice(calls)
    changing = ("mkstemp", "mkdir")
    if kind == "readonly":
        changing += ("utime", "replace", "unlink", "rmtree")

    def strike(name: str) -> None:
        nonlocal left
        if kind in ("full", "readonly"):
            if name in changing:
                raise OSError(errno.ENOSPC if kind == "full" else errno.EROFS, "no writing here")
            return
        if kind == "once" and name != victim:
            return
        left -= 1
        if left == -1 and kind == "vanish":
            with contextlib.suppress(OSError):
                kernel_cache._remove(folder)
        elif -4 < left < 0 and kind == "once":
            raise OSError(code, os.strerror(code))

    if kind == "none":
        yield "no faults"
        return
    if kind == "once":
        left = rng.choice((0, 0, 1, 2, 5))
    modules = {"os": os, "tempfile": tempfile, "fcntl": fcntl, "shutil": shutil}
    originals = {name: getattr(Path, name) for name in _PATH_CALLS}
    try:
        for name, module in modules.items():
            setattr(kernel_cache, name, _Faulty(module, _CALLS[name], strike))
        for name, function in originals.items():
            setattr(Path, name, _struck(function, name, strike))
        yield f"{kind} {victim} {errno.errorcode[code]}" if kind == "once" else kind
    finally:
        for name, module in modules.items():
            setattr(kernel_cache, name, module)
        for name, function in originals.items():
            setattr(Path, name, function)


# ------------------------------------------------------------------ one case
def run(cache: Cache, seed: int, *, tell: Callable[[str], None] = lambda _: None) -> str:
    """Runs one case; returns how it ended. Raises if anything forbidden happens."""
    rng = random.Random(f"cache {seed}")
    folder = cache.root / f"case{seed}"
    shutil.copytree(cache.pristine, folder)
    os.environ["FUSER_CACHE_DIR"] = str(folder)
    try:
        for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
            tell(damage(folder, rng))
        return _asked(cache, folder, rng, tell)
    finally:
        kernel_cache._remove(folder)


def _asked(cache: Cache, folder: Path, rng: random.Random, tell: Callable[[str], None]) -> str:
    cache.loaded.clear()
    kernel_cache._warn_once.cache_clear()
    requests = rng.sample(range(len(_REQUESTS)), len(_REQUESTS))
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with faults(folder, rng) as how:
                tell(how)
                compiled = [cache.ask(requests), cache.ask(requests)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Repairs the places that a fault kept from being repaired.
            compiled += [cache.ask(requests), cache.ask(requests)]
    except OptionError:
        return "OptionError"
    except FuserError as error:
        raise AssertionError(f"{type(error).__name__}: {error}") from error
    if len(caught) > 1:
        raise AssertionError(f"{len(caught)} warnings: {[str(w.message) for w in caught]}")
    if cache.loaded - cache.trusted:
        raise AssertionError("foreign content was loaded")
    if compiled[-1]:
        if _is_usable(folder):
            raise AssertionError(f"not repaired: compiled {compiled}")
        return "unusable"
    return "warned" if caught else "compiled" if sum(compiled) else "found"


def _is_usable(folder: Path) -> bool:
    """Whether a cache can be stored under `folder`: it is a folder, or can be created."""
    try:
        (folder / "kernels-v1").mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return True
