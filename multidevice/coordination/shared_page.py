"""Memory that the ranks of one host share, in a file without a name.

The first rank of a team creates an anonymous file in memory. The other ranks open the file through
`/proc`. The system frees the memory when the last process that maps it ends, in any way. An aborted
job therefore leaves no file.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# The first line of the memory holds a random key, which proves that a process has opened the right
# file. Lines have the size of a processor's cache line, so that ranks do not slow each other down.
LINE_NBYTES = 64
LINE_WORDS = LINE_NBYTES // 8
_KEY_NBYTES = 16
# The kinds of the exchanges that ranks make to share memory, before their first run.
OFFER, OPENING = "offer", "opening"

# Takes the kind of an exchange and this rank's payload; returns the payloads of all members. The
# kind lets ranks detect that they are in different exchanges, as after an error.
Exchange = Callable[[str, bytes], list[bytes]]


def open_together(
    exchange: Exchange,
    nbytes: int,
    *,
    is_first: bool,
    on_made: Callable[[int], None] = lambda fd: None,
) -> mmap.mmap | None:
    """Allocates `nbytes` of zeroed memory that all ranks of a team share.

    The returned mapping begins with LINE_NBYTES additional bytes. They contain a random key, by
    which a rank checks that it has opened the right file. Returns None on every rank if the ranks
    do not all share a host and its process numbers.

    - `exchange`: sends a payload to all ranks of the team and returns all payloads. All ranks must
      call it.
    - `is_first`: whether this rank is the first of the team, which creates the file.
    - `on_made`: called on the first rank with the descriptor of the file, so that the caller can
      duplicate the descriptor before it is closed.
    """
    nbytes += LINE_NBYTES
    fd = _create(nbytes) if is_first else -1
    try:
        offer = exchange(OFFER, _offer(fd, nbytes) if fd >= 0 else b"")[0]
        page = _map(fd, nbytes) if fd >= 0 else _open(offer, nbytes)
        opened = exchange(OPENING, b"1" if page is not None else b"")
        if page is not None and fd >= 0 and all(opened):
            on_made(fd)
    finally:
        if fd >= 0:
            os.close(fd)
    return page if all(opened) else None


def unlink_mpich_segments() -> None:
    """Removes the file names of the shared memory that MPICH has allocated for this job.

    The ranks keep the memory itself, so the job can go on. If the names stayed, each aborted job
    would leave files that fill up a small /dev/shm.
    """
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return
    for name in sorted(set(re.findall(r"/dev/shm/mpich_shm_\w+$", maps, re.MULTILINE))):
        Path(name).unlink(missing_ok=True)


def host() -> str:
    """Returns a text that identifies this host and the container whose process numbers this process
    sees.

    Two processes get the same text if and only if both see the same process numbers. Returns "" if
    the system does not provide this information.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _create(nbytes: int) -> int:
    """Creates an anonymous file of `nbytes` bytes in memory; returns its descriptor.

    Returns -1 if the system has no such files.
    """
    try:
        fd = os.memfd_create("fuser-page")
    except (AttributeError, OSError):
        return -1
    os.truncate(fd, nbytes)
    os.pwrite(fd, secrets.token_bytes(_KEY_NBYTES), 0)
    return fd


def _offer(fd: int, nbytes: int) -> bytes:
    key = os.pread(fd, _KEY_NBYTES, 0).hex()
    return json.dumps([host(), f"/proc/{os.getpid()}/fd/{fd}", nbytes, key]).encode()


def _open(offer: bytes, nbytes: int) -> mmap.mmap | None:
    if not offer or not host():
        return None
    where, path, size, key = json.loads(offer)
    if where != host() or size != nbytes:
        return None
    with suppress(OSError):
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        try:
            page = _map(fd, nbytes)
        finally:
            os.close(fd)
        if page is not None and page[:_KEY_NBYTES].hex() == key:
            return page
    return None


def _map(fd: int, nbytes: int) -> mmap.mmap | None:
    with suppress(OSError, ValueError):
        return mmap.mmap(fd, nbytes)
    return None
