"""The disk cache of compiled kernels: safe under concurrent ranks and against damaged files.

Layout, under one folder of mode 0700:
    entries/KEY          JSON: the name of the object, and the symbol of the kernel in it
    objects/DIGEST.EXT   the object (`.so`, often of several kernels, or `.cubin`); SHA-256 as name
    locks/KEY.lock       held while a process compiles KEY
Files appear by rename, so a reader sees a whole file or none; a digest that does not fit means
recompiling. Nothing is ever evicted: the folder may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fuser.errors import OptionError
from fuser.options import cache_dir

_VERSION = "1"
_LOCK_DEADLINE_S = 120.0
_LOCK_POLL_S = 0.005


@dataclass(frozen=True)
class CachedKernel:
    """A verified entry: where its object lies, and the symbol of the kernel in it."""

    path: Path
    symbol: str


def digest(*parts: str | bytes) -> str:
    """SHA-256 over parts, each preceded by its length: moving text between parts changes it."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(f"{len(data)}:".encode())
        state.update(data)
    return state.hexdigest()


def cache_folder() -> Path:
    """The folder of compiled kernels, a subfolder of `fuser.options.cache_dir()`."""
    return cache_dir() / f"kernels-v{_VERSION}"


@functools.cache
def _prepared(folder: Path) -> Path:
    """Makes the folders; refuses one that another user could fill with code."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for part in ("entries", "objects", "locks"):
            (folder / part).mkdir(mode=0o700, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise OptionError(
            f"the kernel cache folder {folder} cannot be made ({error}); set FUSER_CACHE_DIR"
        ) from error
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise OptionError(
            f"the kernel cache folder {folder} belongs to user {status.st_uid} or is writable by"
            f" others (mode {status.st_mode & 0o777:o}); compiled code is loaded from it, so set"
            " FUSER_CACHE_DIR to another"
        )
    return folder


def _write_atomically(path: Path, data: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


class KernelCache:
    """The cache in one folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = _prepared(folder or cache_folder())

    def find(self, key: str) -> CachedKernel | None:
        """Returns the entry of a key if it is complete and undamaged."""
        try:
            entry = json.loads((self.folder / "entries" / key).read_bytes())
            path = self.folder / "objects" / str(entry["object"])
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() != path.stem:
                return None
            return CachedKernel(path, str(entry["symbol"]))
        except (OSError, ValueError, KeyError, TypeError):
            # Missing, torn or foreign: the caller compiles again and overwrites it.
            return None

    def store(
        self, symbols: dict[str, str], data: bytes, extension: str
    ) -> dict[str, CachedKernel]:
        """Stores an object and an entry for each of its kernels (key -> symbol)."""
        path = self.folder / "objects" / f"{hashlib.sha256(data).hexdigest()}.{extension}"
        _write_atomically(path, data)
        for key, symbol in symbols.items():
            entry = {"object": path.name, "symbol": symbol}
            _write_atomically(self.folder / "entries" / key, json.dumps(entry).encode())
        return {key: CachedKernel(path, symbol) for key, symbol in symbols.items()}

    @contextlib.contextmanager
    def lock(self, key: str, *, deadline_s: float = _LOCK_DEADLINE_S) -> Iterator[bool]:
        """Holds the lock of a key; yields False when another process kept it past the deadline.

        The lock only avoids double work: without it both processes compile, and either result is
        right. It belongs to the open file, so it ends with a process that dies.
        """
        with (self.folder / "locks" / f"{key}.lock").open("wb") as file:
            expiry = time.monotonic() + deadline_s
            held = False
            while not held and time.monotonic() < expiry:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    held = True
                except BlockingIOError:
                    time.sleep(_LOCK_POLL_S)
            yield held
