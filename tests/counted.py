"""What a call does, counted: a bound on a count holds on a busy machine, one on seconds may not.

Python functions are counted. What C code repeats is not, such as looks through a list: the rows of
`scripts/bench.py compile` and `lowering` are seconds of the processor, which see that, too.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType


def calls_of(run: Callable[[], object]) -> Counter[str]:
    """Returns how often `run` called each Python function, by file and name, in this thread.

    The collector of garbage waits meanwhile: when it comes depends on what ran before, and it calls
    the finalizers of that.
    """
    found: Counter[CodeType] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            found[frame.f_code] += 1

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
    for code, n in found.items():
        path = code.co_filename.replace("\\", "/")
        names["/".join(path.split("/")[-3:]) + ":" + code.co_name] += n
    return names
