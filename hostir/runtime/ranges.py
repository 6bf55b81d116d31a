"""Ranges of torch.profiler: one for each op of a host program, with its name and the user's line.

They are made only while a profiler runs, which torch tells by a flag of a module. The compiled
runner makes none: calls under a profiler take the readable path. A CUDA graph is one range.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from weakref import WeakKeyDictionary

from fuser.ir.op import Op
from fuser.ir.ops.nodes import BroadcastOp, CastOp
from fuser.support.torch_calls import range_named
from hostir.ir.ops import LaunchKernel
from hostir.ir.program import HostIrContainer

_MAX_NAMES = 12
_TITLES: WeakKeyDictionary[HostIrContainer, dict[Op, str]] = WeakKeyDictionary()


def range_of(op: Op, program: HostIrContainer) -> AbstractContextManager[object]:
    """Return the range in which an op of a program is carried out."""
    titles = _TITLES.setdefault(program, {})
    found = titles.get(op)
    if found is None:
        found = titles[op] = title(op, program)
    return range_named(found)


def range_of_graph(ops: Sequence[Op | None]) -> AbstractContextManager[object]:
    """Return the range in which a CUDA graph is launched that carries out these ops."""
    lines = [op.where for op in ops if op is not None]
    return range_named(f"CUDA graph of {len(ops)} step{'s' * (len(ops) != 1)}{_at(lines)}")


def title(op: Op, program: HostIrContainer) -> str:
    """Return what an op is called in a profile: `relu at model.py:12`; a kernel has the names of
    the ops that it computes, and their lines."""
    if not isinstance(op, LaunchKernel):
        return f"{op.name}{_at([op.where])}"
    exprs = program.groups[op.group].fusion.exprs
    told = [e for e in exprs if not isinstance(e, BroadcastOp | CastOp)] or exprs
    names = list(dict.fromkeys(e.name for e in told))
    more = f" and {len(names) - _MAX_NAMES} more" * (len(names) > _MAX_NAMES)
    return f"kernel {', '.join(names[:_MAX_NAMES])}{more}{_at([e.where for e in told])}"


def _at(lines: Sequence[str]) -> str:
    """Return ` at model.py:7, :8, other.py:3` for lines of users."""
    shown: list[str] = []
    last = ""
    for line in dict.fromkeys(filter(None, lines)):
        file, _, number = line.rpartition(":")
        shown.append(f":{number}" if file == last else line)
        last = file
    return f" at {', '.join(shown)}" if shown else ""
