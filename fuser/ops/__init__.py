"""The op functions of a fusion definition, under nvFuser's names (`fd.ops.add`, ...).

Plain functions on the active fusion, one per row of `fuser.ops.rows`. Each takes what its
annotations say, and refuses the rest at the entrance (`fuser.arguments`); the ops call one another
directly.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from fuser.arguments import checked
from fuser.errors import UnknownOpError
from fuser.ops import operators
from fuser.ops.building import ARGUMENTS
from fuser.ops.rows import ROWS
from fuser.ops.spelled import SPELLED

operators.install()


def __getattr__(name: str) -> Callable[..., Any]:
    near = get_close_matches(name, ROWS, n=3, cutoff=0.6)
    nearest = " or ".join(", ".join(near).rsplit(", ", 1))
    hint = SPELLED.get(name) or (f"did you mean {nearest}?" if near else "see dir(fd.ops)")
    raise UnknownOpError(f"module 'fuser.ops' has no op {name!r}: {hint}")


def __dir__() -> list[str]:
    return sorted(ROWS)


globals().update(
    {name: checked(row.function, name=name, kinds=ARGUMENTS) for name, row in ROWS.items()},
    __all__=list(ROWS),
)
