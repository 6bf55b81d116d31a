"""The disk cache of compiled kernels: bounded, safe with concurrent processes and damaged files.

Layout, under one folder of mode 0700:

    entries/KEY          JSON: the key, the name of the object, the symbol of the kernel in it
    objects/DIGEST.EXT   the object (`.so`, often of several kernels, or `.cubin`); SHA-256 as name
    tuned/KEY            JSON: the result of the option `tune` for one kernel and class of inputs
    locks/KEY.lock       locked while a process compiles the kernel KEY, or times it for `tune`

- Files are written under another name and renamed, so a reader sees a complete file or none.
- Only regular files are read, and links are not followed. If a file is not as expected, the kernel
  is compiled again, and the file is replaced.
- If the objects exceed `LIMIT_NBYTES`, the least recently used files are deleted. Users may delete
  the folder at any time.
- If nothing can be written, the compiled kernels are used only in this process, after one warning.
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

# The limit for all objects together. When it is exceeded, this share of the limit remains.
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
    """The contents of an object file with compiled kernels, checked for damage. `name` contains
    their SHA-256, so equal names mean equal bytes.
    """

    name: str
    data: bytes


def digest(*parts: str | bytes) -> str:
    """Returns the SHA-256 of the parts, which serves as a cache key. Each part is preceded by its
    length, so that ("ab", "c") and ("a", "bc") differ.
    """
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(f"{len(data)}:".encode())
        state.update(data)
    return state.hexdigest()


def cache_folder() -> Path:
    """Returns the folder in which compiled kernels are cached, a subfolder of
    `fuser.support.options.cache_dir()`.
    """
    return cache_dir() / f"kernels-v{_VERSION}"


@functools.cache
def _warn_once(folder: Path) -> None:
    warn(
        f"the kernel cache {folder} cannot be written: kernels are compiled for this process alone;"
        " set FUSER_CACHE_DIR to a writable folder with free space",
        RuntimeWarning,
    )


@dataclass(frozen=True)
class CacheContents:
    """The size of the kernel cache on disk: the number of kernels, the number of tuning results,
    and the total bytes of all objects.
    """

    kernels: int
    tuned: int
    nbytes: int


def contents() -> CacheContents:
    """Counts the contents of the cache folder, without creating or changing the folder.

    Raises:
        OSError: the folder exists, but cannot be read.
        OptionError: the folder belongs to another user, or other users can write to it.
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
    """Creates the cache folder and its subfolders.

    Raises:
        OptionError: another user could write code into the folder.
    """
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
            " FUSER_CACHE_DIR to another folder"
        )


def _remove(path: Path) -> None:
    """Deletes a file, link or folder, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()


def _read(path: Path, limit_nbytes: int) -> bytes | None:
    """Returns the contents of a regular file of at most `limit_nbytes` bytes. Returns None for
    anything else.
    """
    try:
        # A pipe must not block the reader, and a link must not redirect it.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_size > limit_nbytes:
            return None
        # `read` allocates its limit at once, so the limit is the file's size. `closefd` is False
        # because the handle may be a folder's.
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
    """The cache of compiled kernels and tuning results on disk, in one folder.

    Raises:
        OptionError: the folder belongs to another user, or other users can write to it.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or cache_folder()
        # Verified objects, so that one with many kernels is read once.
        self._objects: dict[str, Binary] = {}
        try:
            _prepare(self.folder)
        except OSError:
            _warn_once(self.folder)

    def find(self, key: str, symbol: str) -> Binary | None:
        """Returns the object file with the compiled kernel that is stored under `key`. Returns None
        unless the files are complete and undamaged.

        `symbol` is the kernel's name in the object file, which must be stored under the key, too.
        """
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
        # The time of last use decides which files are evicted first.
        with contextlib.suppress(OSError):
            os.utime(path, follow_symlinks=False)
            os.utime(self.folder / "objects" / name, follow_symlinks=False)
        return found

    def store(self, symbols: dict[str, str], data: bytes, extension: str) -> Binary:
        """Stores `data`, the contents of an object file with several compiled kernels. `symbols`
        maps each kernel's cache key to its name in the file. `extension` is that of the file name.

        If the files cannot be written, the process warns once.
        """
        binary = Binary(f"{hashlib.sha256(data).hexdigest()}.{extension}", data)
        self._keep(lambda: self._write(binary, symbols), len(data))
        return binary

    def _keep(self, write: Callable[[], None], nbytes: int) -> None:
        """Calls `write`, which writes files of `nbytes` bytes, and then deletes old files if the
        cache is too large. If the files cannot be written, the process warns once.
        """
        try:
            write()
        except FileNotFoundError:
            # Another process deleted the folder.
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

    # ------------------------------------------------------------ tuning results
    def find_tuned(self, key: str) -> dict[str, Any] | None:
        """Returns the tuning result (the fastest schedule parameters of a kernel) that
        `store_tuned` stored under `key`, or None. A damaged result is ignored after a warning.
        """
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
                f"{path} is damaged: it is ignored, and replaced by the next tuning result",
                RuntimeWarning,
            )
            return None
        with contextlib.suppress(OSError):
            os.utime(path, follow_symlinks=False)
        return found

    def store_tuned(self, key: str, found: dict[str, Any]) -> None:
        """Stores a tuning result (the fastest schedule parameters of a kernel) under `key`, as
        readable JSON. If the file cannot be written, the process warns once.
        """
        data = json.dumps({**found, "check": _check(key, found)}, indent=1).encode()
        self._keep(lambda: _write_atomically(self.folder / "tuned" / key, data), len(data))

    def is_kept(self) -> bool:
        """Whether compiled kernels can be stored on disk: whether the permissions of the cache
        folder allow it.
        """
        return os.access(self.folder / "objects", os.W_OK)

    # ------------------------------------------------------------ eviction
    def _evict(self, nbytes: int) -> None:
        """Deletes old files if the cache is too large. This is checked at the first store of a
        process, and again each time the process has written a sixteenth of the byte limit.

        `nbytes` is the number of bytes that have just been written.
        """
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
        """Deletes the least recently used files until the cache is within its limits.

        The parameters limit the bytes of all objects, the number of kernels, and the number of
        tuning results. None stands for the default limit.
        """
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
        """Returns the files of a subfolder as (path, bytes, time of last use), least recently used
        first.

        `part` is the subfolder, and `now` the current time. Also deletes incomplete files of
        processes that died while writing.
        """
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
        """A context that holds the lock of a cache key, so that other processes do not compile the
        same kernel at the same time. Its value is False if the lock could not be acquired within
        `deadline_s` seconds.

        The lock only avoids duplicate work. Without the lock, two processes compile the same
        kernel, and either result is right. The lock belongs to the open file, so the lock ends when
        the process dies.
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
                # Unlocked explicitly, because a forked child may hold the same open file.
                with contextlib.suppress(OSError):
                    fcntl.flock(handle, fcntl.LOCK_UN)
            _open_locks.discard(handle)
            with contextlib.suppress(OSError):
                os.close(handle)


def _check(key: str, found: object) -> str:
    """Returns a checksum that is stored with a tuning result. It detects damaged results, and
    results stored under another key.
    """
    return digest(key, json.dumps(found, sort_keys=True))


def _open_lock(path: Path) -> int | None:
    """Opens the file of a lock, after deleting anything at the path that is not a regular file.
    Returns the file descriptor, or None if the file cannot be opened.
    """
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


# Bytes that this process has written to each folder since the last eviction check.
_written: dict[Path, int] = {}
_open_locks: set[int] = set()


def _close_locks() -> None:
    """Closes, in a forked child process, the lock files that threads of the parent process hold.

    A lock lasts until all processes have closed its file. The child must therefore not keep the
    files open.
    """
    for handle in _open_locks:
        with contextlib.suppress(OSError):
            os.close(handle)
    _open_locks.clear()


os.register_at_fork(after_in_child=_close_locks)
