"""Origins: for each tensor, why it is stored on its devices and why its axes are split over them.

A fusion stores the origins of its tensors by tensor number. Therefore copies of the fusion, the
host program and a program that was read from text have the same origins. Origins do not affect
execution. `python -m hostir why` shows them, one line per fact:

    T3 deviceIdx.x on axis 0 : user at mlp.py:9
    T7 deviceIdx.x on axis 1 : forward from T3 through linear at mlp.py:12
    T8 placement : operand from T7 through linear for T9 at mlp.py:14

The second line says: axis 1 of T7 is split over mesh_x, because T7 is the result of the linear
whose operand T3 is split. The third line says: T8 is a copy of T7 with another placement, because
the linear that computes T9 needs its operand in this placement.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast, get_args

from fuser.ir.types import PTYPE_FROM_TEXT, ParallelType
from fuser.support.text_cursor import Cursor

How = Literal[
    # The source of a mesh or of a cut. user: the user set it. forward: an operand. backward: a
    # result. beside: another result of the same op. only: it is the fusion's only mesh. lookup: the
    # table of a lookup, for the sum of the parts in which devices look up.
    "user",
    "forward",
    "backward",
    "beside",
    "only",
    "lookup",
    # Why decomposition changed a whole placement: for an op's operand or result, for a copy that
    # the user wrote (set), for a sum over devices, for an update of an input.
    "operand",
    "result",
    "set",
    "sum",
    "update",
    # Intermediate tensors of a decomposition: the result of a local op; the partial sums.
    "local",
    "parts",
]
_HOWS: tuple[str, ...] = get_args(How)
_ROW = re.compile(
    r"T(?P<tensor>[0-9]+) (?P<what>mesh|placement|(?P<ptype>\S+) on (?:axis (?P<axis>[0-9]+)|sum))"
    r" : (?P<how>\w+)(?: from T(?P<source>[0-9]+))?(?: through (?P<op>\S+))?"
    r"(?: for T(?P<result>[0-9]+))?"
    r"(?: at (?P<where>[^\n]*\S))?[ ]*$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Origin:
    """The reason for one fact about a tensor: its mesh, the split of an axis, or its placement.

    - `tensor` is the number of the tensor.
    - `what` is the kind of fact. A "cut" is the split of one axis over a mesh dimension, or over
      the iterations of a loop that run on different CUDA streams. A "placement" is how all axes are
      distributed.
    - `how` is the kind of reason, such as "user" or "forward" (from an operand to a result).
    - `source` is the number of the tensor from which the fact was derived, through the op `op`.
    - `where` is the user's line of that op.
    - `ptype` is the parallel type of a cut: a mesh dimension, or a type for streams.
    - `axis` is the axis of a cut, counted as in torch, or None for an axis that is summed over.
    - `result` is the number of the op's result, if the fact is about an operand of the op.
    """

    tensor: int
    what: Literal["mesh", "placement", "cut"]
    how: How
    source: int | None = None
    op: str = ""
    where: str = ""
    ptype: ParallelType | None = None
    axis: int | None = None
    result: int | None = None

    def __str__(self) -> str:
        what = self.what
        if self.ptype is not None:
            place = "sum" if self.axis is None else f"axis {self.axis}"
            what = f"{self.ptype.text} on {place}"
        source = "" if self.source is None else f" from T{self.source}"
        through = f" through {self.op.replace(' ', '_')}" if self.op else ""
        result = "" if self.result is None else f" for T{self.result}"
        at = f" at {' '.join(self.where.split())}" if self.where else ""
        return f"T{self.tensor} {what} : {self.how}{source}{through}{result}{at}"


def read_origin(cursor: Cursor) -> Origin:
    """Reads one origin at the cursor: the reason for the mesh or the split of a tensor.

    The text form is that of `str(Origin)`, such as `T3 deviceIdx.x on axis 0 : user at mlp.py:9`.

    Raises:
        ParseError: the text at the cursor does not have this form.
    """
    row = cursor.expect(_ROW, "the origin of a tensor's sharding")
    if row["how"] not in _HOWS:
        raise cursor.unknown("origin", row["how"], _HOWS, row.start("how"))
    ptype = row["ptype"]
    if ptype is not None and ptype not in PTYPE_FROM_TEXT:
        raise cursor.unknown("parallel type", ptype, PTYPE_FROM_TEXT, row.start("ptype"))

    def number(name: str) -> int | None:
        return None if row[name] is None else cursor.number(row, name)

    return Origin(
        cursor.number(row, "tensor"),
        "cut" if ptype is not None else cast("Literal['mesh', 'placement']", row["what"]),
        cast("How", row["how"]),
        number("source"),
        row["op"] or "",
        row["where"] or "",
        None if ptype is None else PTYPE_FROM_TEXT[ptype],
        number("axis"),
        number("result"),
    )
