"""The disk cache of compiled kernels: bounded, safe under concurrent ranks and against damage.

Layout, under one folder of mode 0700:
    entries/KEY          JSON: the key, the name of the object, the symbol of the kernel in it
    objects/DIGEST.EXT   the object (`.so`, often of several kernels, or `.cubin`); SHA-256 as name
    tuned/KEY            JSON: what the option `tune` has found for one kernel and class of inputs
    locks/KEY.lock       held while a process compiles, or times, KEY
Files appear by rename, so a reader sees a whole file or none. Only regular files are read, without
following links; whatever does not fit means compiling again and putting it right. What was used
least lately goes when the objects have more than `LIMIT_NBYTES`; the folder may be deleted at any
time. Where nothing can be written, kernels are compiled for this process alone, after one warning.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuser.support.errors import OptionError, warn
from fuser.support.options import cache_dir

# What all objects together may take; down to this share of it when it is exceeded.
LIMIT_NBYTES = 1 << 30
LIMIT_ENTRIES = 50_000
LIMIT_TUNED = 10_000
_KEPT_SHARE = 0.75
_MAX_ENTRY_NBYTES = 4096
_MAX_TUNED_NBYTES = 1 << 20
_MAX_OBJECT_NBYTES = 256 << 20
_STALE_S = 3600.0
_VERSION = "1"
_LOCK_DEADLINE_S = 120.0
_LOCK_POLL_S = 0.005
_OBJECT_NAME = re.compile(r"[0-9a-f]{64}\.(so|cubin)")
_FOLDERS = ("entries", "objects", "tuned", "locks")


@dataclass(frozen=True)
class Binary:
    """The verified content of an object; `name` is its SHA-256, so equal names are equal bytes."""

    name: str
    data: bytes


def digest(*parts: str | bytes) -> str:
    """SHA-256 over parts, each preceded by its length: moving text between parts changes it."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(f"{len(data)}:".encode())
        state.update(data)
    return state.hexdigest()


def cache_folder() -> Path:
    """The folder of compiled kernels, a subfolder of `fuser.support.options.cache_dir()`."""
    return cache_dir() / f"kernels-v{_VERSION}"


@functools.cache
def _warn_once(folder: Path) -> None:
    warn(
        f"the kernel cache {folder} cannot be written: kernels are compiled for this process alone;"
        " set FUSER_CACHE_DIR to a folder on a disk with room",
        RuntimeWarning,
    )


@dataclass(frozen=True)
class CacheContents:
    """How much a cache holds: kernels and tuned ones, and the bytes of all its objects."""

    kernels: int
    tuned: int
    nbytes: int


def contents() -> CacheContents:
    """Counts what the folder of compiled kernels holds, without making or changing it.

    Raises:
        OSError: it is there, and cannot be read.
        OptionError: it belongs to another user, or others can write into it.
    """
    if cache_folder().exists():
        _check_owner(cache_folder())
    counts = {"entries": 0, "tuned": 0}
    nbytes = 0
    for name in counts:
        with contextlib.suppress(FileNotFoundError), os.scandir(cache_folder() / name) as files:
            counts[name] = sum(not file.name.startswith(".new-") for file in files)
    with contextlib.suppress(FileNotFoundError), os.scandir(cache_folder() / "objects") as files:
        for file in files:
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                nbytes += file.stat(follow_symlinks=False).st_size
    return CacheContents(counts["entries"], counts["tuned"], nbytes)


def _prepare(folder: Path) -> None:
    """Makes the folders. Raises OptionError for one that another user could fill with code."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(folder)
    for part in (folder / name for name in _FOLDERS):
        if not part.is_dir() or part.is_symlink():
            _remove(part)
            part.mkdir(mode=0o700, exist_ok=True)


def _check_owner(folder: Path) -> None:
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise OptionError(
            f"the kernel cache folder {folder} belongs to user {status.st_uid} or is writable by"
            f" others (mode {status.st_mode & 0o777:o}); compiled code is loaded from it, so set"
            " FUSER_CACHE_DIR to another"
        )


def _remove(path: Path) -> None:
    """Removes whatever is there."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()


def _read(path: Path, limit_nbytes: int) -> bytes | None:
    """The content of a regular file of at most so many bytes; None for anything else."""
    try:
        # Neither a pipe nor a link may stop or redirect the reader.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_size > limit_nbytes:
            return None
        # A reader takes the memory that it is told to read at most. It closes no folder's handle.
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read(status.st_size)
    except OSError:
        return None
    finally:
        with contextlib.suppress(OSError):
            os.close(handle)


def _write_atomically(path: Path, data: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        try:
            os.replace(temporary, path)
        except IsADirectoryError:
            _remove(path)
            os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


class KernelCache:
    """The cache in one folder.

    Raises:
        OptionError: the folder belongs to another user, or others can write into it.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or cache_folder()
        # Objects of many kernels are read and verified once.
        self._objects: dict[str, Binary] = {}
        try:
            _prepare(self.folder)
        except OSError:
            _warn_once(self.folder)

    def find(self, key: str, symbol: str) -> Binary | None:
        """Returns the object of a key if entry and object are complete and undamaged."""
        path = self.folder / "entries" / key
        try:
            entry = json.loads(_read(path, _MAX_ENTRY_NBYTES) or b"null")
        except (ValueError, RecursionError):
            return None
        if not isinstance(entry, dict) or entry.get("key") != key or entry.get("symbol") != symbol:
            return None
        name = entry.get("object")
        if not isinstance(name, str) or not _OBJECT_NAME.fullmatch(name):
            return None
        found = self._objects.get(name)
        if found is None:
            data = _read(self.folder / "objects" / name, _MAX_OBJECT_NBYTES)
            if data is None or hashlib.sha256(data).hexdigest() != name.partition(".")[0]:
                return None
            found = self._objects[name] = Binary(name, data)
        # The time of last use decides what goes first.
        with contextlib.suppress(OSError):
            os.utime(path, follow_symlinks=False)
            os.utime(self.folder / "objects" / name, follow_symlinks=False)
        return found

    def store(self, symbols: dict[str, str], data: bytes, extension: str) -> Binary:
        """Stores an object and an entry for each of its kernels (key -> symbol), if it can."""
        binary = Binary(f"{hashlib.sha256(data).hexdigest()}.{extension}", data)
        self._keep(lambda: self._write(binary, symbols), len(data))
        return binary

    def _keep(self, write: Callable[[], None], nbytes: int) -> None:
        """Writes, if it can."""
        try:
            write()
        except FileNotFoundError:
            # Somebody deleted the folder.
            try:
                _prepare(self.folder)
                write()
            except OSError:
                _warn_once(self.folder)
        except OSError:
            _warn_once(self.folder)
        else:
            self._evict(nbytes)

    def _write(self, binary: Binary, symbols: dict[str, str]) -> None:
        _write_atomically(self.folder / "objects" / binary.name, binary.data)
        for key, symbol in symbols.items():
            entry = {"key": key, "object": binary.name, "symbol": symbol}
            _write_atomically(self.folder / "entries" / key, json.dumps(entry).encode())

    # ------------------------------------------------------------ what tuning has found
    def find_tuned(self, key: str) -> dict[str, Any] | None:
        """Returns what `store_tuned` has kept; None, after a warning, where that is damaged."""
        path = self.folder / "tuned" / key
        data = _read(path, _MAX_TUNED_NBYTES)
        if data is None and not os.path.lexists(path):
            return None
        try:
            found = json.loads(data or b"null")
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or found.pop("check", None) != _check(key, found):
            warn(
                f"{path} is not what tuning wrote: it is ignored, and written anew",
                RuntimeWarning,
            )
            return None
        with contextlib.suppress(OSError):
            os.utime(path, follow_symlinks=False)
        return found

    def store_tuned(self, key: str, found: dict[str, Any]) -> None:
        """Keeps what tuning has found, as a text for people, too, if it can."""
        data = json.dumps({**found, "check": _check(key, found)}, indent=1).encode()
        self._keep(lambda: _write_atomically(self.folder / "tuned" / key, data), len(data))

    def is_kept(self) -> bool:
        """Returns whether the folder takes what is stored, as far as its rights tell."""
        return os.access(self.folder / "objects", os.W_OK)

    # ------------------------------------------------------------ the bound
    def _evict(self, nbytes: int) -> None:
        """Looks at the folder at the first store of a process, and after each sixteenth of the
        limit that it has written."""
        written = _written.get(self.folder)
        _written[self.folder] = (written or 0) + nbytes
        if written is None or _written[self.folder] > LIMIT_NBYTES // 16:
            _written[self.folder] = 0
            self.evict()

    def evict(
        self,
        *,
        limit_nbytes: int | None = None,
        limit_entries: int | None = None,
        limit_tuned: int | None = None,
    ) -> None:
        """Removes what was used least lately until the cache is within its limits."""
        limit_tuned = LIMIT_TUNED if limit_tuned is None else limit_tuned
        limit_nbytes = LIMIT_NBYTES if limit_nbytes is None else limit_nbytes
        limit_entries = LIMIT_ENTRIES if limit_entries is None else limit_entries
        now = time.time()
        with contextlib.suppress(OSError):
            objects = self._by_age("objects", now)
            total = sum(nbytes for _, nbytes, _ in objects)
            goal = limit_nbytes if total <= limit_nbytes else int(_KEPT_SHARE * limit_nbytes)
            for path, nbytes, _ in objects:
                if total <= goal:
                    break
                _remove(path)
                total -= nbytes
            kept = {path.name for path, _, _ in objects if path.exists()}
            for path, _, _ in self._by_age("tuned", now)[: -max(limit_tuned, 1)]:
                _remove(path)
            entries = self._by_age("entries", now)
            if len(objects) != len(kept):
                dangling = [e for e in entries if self._object_of(e[0]) not in kept]
                for path, _, _ in dangling:
                    _remove(path)
                entries = [e for e in entries if e not in dangling]
            if len(entries) > limit_entries:
                for path, _, _ in entries[: len(entries) - int(_KEPT_SHARE * limit_entries)]:
                    _remove(path)

    def _by_age(self, part: str, now: float) -> list[tuple[Path, int, float]]:
        """The files of a folder as (path, bytes, time of last use), oldest first; remains of
        processes that died while they wrote are removed."""
        found: list[tuple[Path, int, float]] = []
        with os.scandir(self.folder / part) as files:
            for file in files:
                status = file.stat(follow_symlinks=False)
                if not file.name.startswith(".new-"):
                    found.append((Path(file.path), status.st_size, status.st_mtime))
                elif now - status.st_mtime > _STALE_S:
                    _remove(Path(file.path))
        return sorted(found, key=lambda row: row[2])

    def _object_of(self, path: Path) -> str | None:
        try:
            entry = json.loads(_read(path, _MAX_ENTRY_NBYTES) or b"null")
            return str(entry["object"])
        except (ValueError, RecursionError, KeyError, TypeError):
            return None

    # ------------------------------------------------------------ locks
    @contextlib.contextmanager
    def lock(self, key: str, *, deadline_s: float = _LOCK_DEADLINE_S) -> Iterator[bool]:
        """Holds the lock of a key; yields False where it cannot, or when another process kept it
        past the deadline.

        The lock only avoids double work: without it both processes compile, and either result is
        right. It belongs to the open file, so it ends with a process that dies.
        """
        path = self.folder / "locks" / f"{key}.lock"
        handle = _open_lock(path)
        if handle is None:
            yield False
            return
        _open_locks.add(handle)
        held = False
        try:
            expiry = time.monotonic() + deadline_s
            while not held and time.monotonic() < expiry:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    held = True
                except BlockingIOError:
                    time.sleep(_LOCK_POLL_S)
                except OSError:
                    break
            yield held
        finally:
            if held:
                with contextlib.suppress(OSError):
                    path.unlink()
                # Not by closing alone: a forked child may hold the same open file.
                with contextlib.suppress(OSError):
                    fcntl.flock(handle, fcntl.LOCK_UN)
            _open_locks.discard(handle)
            with contextlib.suppress(OSError):
                os.close(handle)


def _check(key: str, found: object) -> str:
    """What tells a damaged entry, and one that stands in the place of another."""
    return digest(key, json.dumps(found, sort_keys=True))


def _open_lock(path: Path) -> int | None:
    """Opens the file of a lock, after removing anything else in its place; None if it cannot."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    for _ in range(2):
        handle = None
        try:
            handle = os.open(path, flags, 0o600)
            if stat.S_ISREG(os.fstat(handle).st_mode):
                return handle
            os.close(handle)
        except OSError:
            pass
        with contextlib.suppress(OSError):
            _remove(path)
    return None


# Bytes that this process has written, by folder, since it last looked at the whole.
_written: dict[Path, int] = {}
_open_locks: set[int] = set()


def _close_locks() -> None:
    """In a forked child: give up the files of locks that another thread of the parent holds."""
    for handle in _open_locks:
        with contextlib.suppress(OSError):
            os.close(handle)
    _open_locks.clear()


os.register_at_fork(after_in_child=_close_locks)
