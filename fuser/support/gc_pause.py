"""A context without Python's collector of cyclic garbage."""

from __future__ import annotations

import gc

from fuser.support.locks import make_lock


class _Uncollected:
    """What the collector would free may not go during a capture; and of what a compilation makes it
    would find nothing to free, but look at it again and again, and at the 200,000 objects of torch.

    The last thread that leaves it lets collections come again.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._was_enabled = make_lock(), 0, False

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._was_enabled:
                gc.enable()


uncollected = _Uncollected()
