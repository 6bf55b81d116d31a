"""The table of collectives: all facts about each collective that do not depend on the transport.

Transports, host programs, analyses and the cost model read this table. A collective runs on a team
of n ranks. Each rank has an operand `inp` and a result `out`. A buffer consists of one part, or of
one part per rank; part i belongs to the i-th rank of the team. Each transport has its own table of
functions that execute collectives (`TransportTable`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from fuser.support.errors import UnsupportedError

# How operand and result of a collective may share a buffer:
#   same     element on element
#   slot     the smaller one is the member's own slot, the larger one has one slot per member
#   never    each has its own memory
Sharing = Literal["same", "slot", "never"]
# The members whose operands one result reduces:
#   all      all members of the team
#   prefix   for member i, the members 0 to i
Reduced = Literal["all", "prefix"]


@dataclass(frozen=True, eq=False)
class Side:
    """One of the two buffers of a collective: the operand or the result.

    - `per_member`: whether the buffer has one part for each rank of the team, instead of one part.
    - `at_root`: whether only one rank, the root, has the buffer.
    """

    # Whether the buffer has one part per member of the team, instead of one part.
    per_member: bool = False
    # Whether only the root has the buffer, instead of every member.
    at_root: bool = False

    def parts(self, members: int) -> int:
        """Returns the number of equal parts of this buffer in a team of `members` ranks."""
        return members if self.per_member else 1


PART, PARTS = Side(), Side(per_member=True)
ROOT_PART, ROOT_PARTS = Side(at_root=True), Side(per_member=True, at_root=True)


@dataclass(frozen=True, eq=False)
class Collective:
    """One collective, such as allgather: an entry of the table of collectives.

    - `name`: the name in host programs, such as Allgather.
    - `method`: the name in error messages, and of the backends' method if there is one.
    - `inp`, `out`: the form of operand and result, such as one part per rank of the team.
    - `sharing`: how operand and result may share a buffer.
    - `bus`: a function of the number n of ranks; returns the fraction of the larger buffer that
      each rank sends.
    - `block`: a function of the bytes of operand and result, and n; returns the bytes from each
      rank to each other one. The bytes may be arrays with one entry per rank.
    - `reduces`: "all" if each result is a reduction of all ranks' operands; "prefix" if the result
      of the i-th rank reduces only the operands of ranks 0 to i of the team; None without a
      reduction.

    Entries are compared by identity.
    """

    # The type in host programs: nvFuser's name.
    name: str
    # The name in error messages, and of the backend's method if there is one.
    method: str
    inp: Side
    out: Side
    sharing: Sharing
    # The fraction of the larger side that each of n members sends, and receives.
    bus: Callable[[int], float]
    # Bytes from each member to each other one, as a function of the bytes of operand and result,
    # and n. It counts as if every member sent each other one directly the data that it needs.
    block: Callable[[Any, Any, int], Any]
    # The members whose operands a result reduces; None: it takes no reduction, such as SUM.
    reduces: Reduced | None = None
    # Whether transports take one buffer, for the root's operand and for every member's result.
    has_one_buffer: bool = False
    # The number of successive copies if n members copy out of each other's memory.
    rounds: Callable[[int], int] = lambda n: n - 1
    # Bytes per second of NCCL on an H200, where measured; calibration measures the same collectives
    # on other machines. None: like any other communication.
    h200_bandwidth: float | None = None

    def __str__(self) -> str:
        return self.name

    @cached_property
    def is_rooted(self) -> bool:
        """Whether one rank of the team, the root, has a buffer that the other ranks lack."""
        return self.inp.at_root or self.out.at_root

    @cached_property
    def growth(self) -> int:
        """The exponent of the team size n in the size ratio of result and operand.

        - 1: the result is n times as large as the operand.
        - -1: the operand is n times as large as the result.
        - 0: both have the same size.
        """
        return self.out.per_member - self.inp.per_member


_BY_NAME: dict[str, Collective] = {}


def _row(row: Collective) -> Collective:
    """Adds a collective to the table of those that a host program can start; returns the
    collective.
    """
    _BY_NAME[row.name] = row
    return row


def _spread(n: int) -> float:
    """Returns the fraction (n - 1) / n of the larger buffer, which each of n ranks sends.

    One of the n parts is not sent, because the rank that needs the part already has it.
    """
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

# The collectives that a host program can start as a `Communication`, by type.
COLLECTIVES: Mapping[str, Collective] = MappingProxyType(_BY_NAME)

# A barrier moves no data. No program starts it, so it is not among the types.
BARRIER = Collective(
    "Barrier", "barrier", PART, PART, "never", bus=lambda n: 0.0, block=lambda inp, out, n: 0
)


_How = TypeVar("_How")


class TransportTable(dict[Collective, _How]):
    """A table of one transport: for each collective, the function that executes it.

    A look-up of a collective that the transport does not support raises `UnsupportedError`.
    """

    def __init__(self, transport: str, how: Mapping[Collective, _How]) -> None:
        super().__init__(how)
        self._transport = transport

    def __missing__(self, row: Collective) -> _How:
        known = ", ".join(sorted(one.method for one in self))
        raise UnsupportedError(
            f"{row.method}: {self._transport} cannot carry out this collective: compose it of "
            f"collectives that this transport supports ({known}), or use another transport"
        )
