"""The collectives: one row each, which transports, programs, analyses and costs read.

A team has n members. Each has an operand `inp` and a result `out`, of one part or of one part per
member; part i belongs to member i. A row holds all facts about a collective that do not depend on
who carries it out. How a transport carries it out is a line of that transport's own table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from fuser.support.errors import UnsupportedError

# How operand and result of an op may lie in one buffer:
#   same     element on element
#   slot     the smaller is the member's own slot, the larger has one slot per member
#   never    each has memory of its own
Sharing = Literal["same", "slot", "never"]
# The members whose operands one result reduces:
#   all      all members of the team
#   prefix   for member i, the members 0 to i
Reduced = Literal["all", "prefix"]


@dataclass(frozen=True, eq=False)
class Side:
    """One of the two buffers of a collective: operand or result."""

    # Whether it has one part per member of the team, else one part.
    per_member: bool = False
    # Whether it exists on the root alone, else on every member.
    at_root: bool = False

    def parts(self, members: int) -> int:
        """Returns the number of parts for a team of so many members."""
        return members if self.per_member else 1


PART, PARTS = Side(), Side(per_member=True)
ROOT_PART, ROOT_PARTS = Side(at_root=True), Side(per_member=True, at_root=True)


@dataclass(frozen=True, eq=False)
class Collective:
    """One collective; rows are compared by identity.

    A number of bytes in `block` may be an array with one entry per rank.
    """

    # The type in host programs, by nvFuser's names.
    name: str
    # The name in errors of transports, and of the method of a backend, where it has one.
    method: str
    inp: Side
    out: Side
    sharing: Sharing
    # How much of the larger side each of n members sends, and receives.
    bus: Callable[[int], float]
    # Bytes from each member to each other one, of the bytes of its operand and result, and n. A
    # collective counts as if every member gave the others directly what they need of it.
    block: Callable[[Any, Any, int], Any]
    # The members whose operands a result reduces; None: it takes no reduction, such as SUM.
    reduces: Reduced | None = None
    # Whether transports take one buffer, which holds the root's operand and everybody's result.
    has_one_buffer: bool = False
    # Whether a change of shardings on one mesh becomes this collective.
    reshards: bool = False
    # The copies that follow one another where n members copy out of each other's memory.
    rounds: Callable[[int], int] = lambda n: n - 1
    # Bytes per second that NCCL moves on an H200, where that is measured; calibration measures the
    # same collectives on other machines. None: as any other communication.
    h200_bandwidth: float | None = None

    def __str__(self) -> str:
        return self.name

    @cached_property
    def is_rooted(self) -> bool:
        """Whether one member, the root, has a buffer that the others lack."""
        return self.inp.at_root or self.out.at_root

    @cached_property
    def growth(self) -> int:
        """1 where the result is n times the size of the operand, -1 where that is; else 0."""
        return self.out.per_member - self.inp.per_member


_BY_NAME: dict[str, Collective] = {}


def _row(row: Collective) -> Collective:
    """Puts a row into the table of what a host program can start."""
    _BY_NAME[row.name] = row
    return row


def _spread(n: int) -> float:
    """The bus factor where each member has one part of the larger side already."""
    return (n - 1) / n


# ---------------------------------------------------------------- the table
ALLGATHER = _row(
    Collective(
        "Allgather",
        "allgather",
        PART,
        PARTS,
        sharing="slot",
        bus=_spread,
        block=lambda inp, out, n: inp,
        reshards=True,
        h200_bandwidth=325e9,
    )
)
ALLREDUCE = _row(
    Collective(
        "Allreduce",
        "allreduce",
        PART,
        PART,
        sharing="same",
        bus=lambda n: 2 * (n - 1) / n,
        block=lambda inp, out, n: 2 * inp / n,
        reduces="all",
        reshards=True,
        rounds=lambda n: 2 * (n - 1),
        h200_bandwidth=345e9,
    )
)
ALL_TO_ALL = _row(
    Collective(
        "AllToAll",
        "alltoall",
        PARTS,
        PARTS,
        sharing="never",
        bus=_spread,
        block=lambda inp, out, n: inp / n,
    )
)
BROADCAST = _row(
    Collective(
        "Broadcast",
        "broadcast",
        ROOT_PART,
        PART,
        sharing="same",
        bus=lambda n: 1.0,
        block=lambda inp, out, n: out,
        has_one_buffer=True,
    )
)
GATHER = _row(
    Collective(
        "Gather",
        "gather",
        PART,
        ROOT_PARTS,
        sharing="slot",
        bus=_spread,
        block=lambda inp, out, n: inp,
    )
)
REDUCE = _row(
    Collective(
        "Reduce",
        "reduce",
        PART,
        ROOT_PART,
        sharing="same",
        bus=lambda n: 1.0,
        block=lambda inp, out, n: inp,
        reduces="all",
    )
)
REDUCE_SCATTER = _row(
    Collective(
        "ReduceScatter",
        "reduce_scatter",
        PARTS,
        PART,
        sharing="slot",
        bus=_spread,
        block=lambda inp, out, n: out,
        reduces="all",
        reshards=True,
        h200_bandwidth=325e9,
    )
)
SCATTER = _row(
    Collective(
        "Scatter",
        "scatter",
        ROOT_PARTS,
        PART,
        sharing="slot",
        bus=_spread,
        block=lambda inp, out, n: out,
    )
)

# What a host program can start as a `Communication`, by its type.
COLLECTIVES: Mapping[str, Collective] = MappingProxyType(_BY_NAME)

# Ranks meet, and nothing is moved. No program starts it, so it is not among the types.
BARRIER = Collective(
    "Barrier", "barrier", PART, PART, "never", bus=lambda n: 0.0, block=lambda inp, out, n: 0
)


_How = TypeVar("_How")


class TransportTable(dict[Collective, _How]):
    """The function by which a transport carries out each collective that it has."""

    def __init__(self, transport: str, how: Mapping[Collective, _How]) -> None:
        super().__init__(how)
        self._transport = transport

    def __missing__(self, row: Collective) -> _How:
        known = ", ".join(sorted(one.method for one in self))
        raise UnsupportedError(
            f"{row.method}: {self._transport} cannot carry out this collective: compose it of "
            f"those that it has ({known}), or use another transport"
        )
