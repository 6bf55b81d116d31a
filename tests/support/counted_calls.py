"""What a call does, counted: a bound on a count holds on a busy machine, one on seconds may not.

Python functions are counted. What C code repeats is not, such as looks through a list: the rows of
`scripts/bench.py compile` and `lowering` are seconds of the processor, which see that, too.
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

    The collector of garbage waits meanwhile: when it comes depends on what ran before, and it calls
    the finalizers of that. What the watcher of all tests' programs looks at is not counted.
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
    """Returns what `calls_of` calls a function, wherever that is defined: its module and name."""
    inner = inspect.unwrap(function)
    return f"{inner.__module__}.{inner.__qualname__}"
