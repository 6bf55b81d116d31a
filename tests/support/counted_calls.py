"""Counts the Python functions that a call runs, for tests that bound the cost of a call.

A bound on a count holds on a busy machine; a bound on seconds may not. Loops inside of C code, such
as a search in a list, are not counted; the rows of `scripts/bench.py compile` and `lowering`
measure seconds of the processor, which include them.
"""

from __future__ import annotations

import gc
import inspect
import sys
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType

from tests.support.program_copies import Watcher


def calls_of(run: Callable[[], object]) -> Counter[str]:
    """Returns how often `run` called each Python function, by its `name_of`, in this thread.

    Garbage collection is off meanwhile, because it could run finalizers of other tests' objects.
    Calls made by `program_copies.Watcher`, which may watch the test, are not counted.
    """
    found: Counter[tuple[str, CodeType]] = Counter()
    depth = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal depth
        module = frame.f_globals.get("__name__", "")
        if module == Watcher.__module__ and event in ("call", "return"):
            depth += 1 if event == "call" else -1
        elif event == "call" and not depth:
            found[module, frame.f_code] += 1

    was_enabled = gc.isenabled()
    gc.disable()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        if was_enabled:
            gc.enable()
    names: Counter[str] = Counter()
    for (module, code), n in found.items():
        names[f"{module}.{code.co_qualname}"] += n
    return names


def name_of(function: Callable[..., object]) -> str:
    """Returns the name that `calls_of` uses for a function: its module and qualified name."""
    inner = inspect.unwrap(function)
    return f"{inner.__module__}.{inner.__qualname__}"
