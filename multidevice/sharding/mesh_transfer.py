"""Transfers between two meshes: which rank sends which part of a tensor to which other rank.

A tensor is stored on one mesh and is needed on another one. The meshes may have the same ranks in
another order, share some ranks, or share none. One communication moves the tensor. In the examples,
DIDx(M) is an axis M that is divided over the mesh, and {0 1} is a mesh of the ranks 0 and 1:

    x [DIDx(M), N] on {0 1}  ->  y [DIDx(M), N] on {2 3}    0 sends to 2, 1 sends to 3
    x [DIDx(M), N] on {0 1}  ->  y [M, N] on {2}            0 and 1 send their blocks to 2
    x [M, N] on {0}          ->  y [DIDx(M), N] on {0 1}    0 keeps one half, and sends the other

Each axis is divided into *pieces*, so that a block of either mesh consists of whole pieces: the
number of pieces is the least common multiple of the two numbers of blocks. So every element is sent
at most once to each rank that needs it, directly from a rank that has it. A local copy serves a
rank that already has a piece. If several ranks have a piece, they send in turn.

`redistribution` decides whether the tensor moves to its last placement at once, or to one that
divides it more, from which an allgather on the new mesh follows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import cycle, product
from math import lcm, prod

from fuser.ir.domain.device_mesh import DeviceMesh
from multidevice.sharding.placement import Placement

# The index of a piece along each axis, among the pieces that one rank has.
Piece = tuple[int, ...]


@dataclass(frozen=True)
class Delivery:
    """One piece of a tensor that one rank needs, and a rank from which it gets the piece.

    - `source`, `sent`: the rank that has the piece, and the index of the piece there: its position
      among the rank's pieces, along each axis.
    - `target`, `received`: the rank that needs the piece, and its index there.

    `source` and `target` are equal if the rank has the piece already.
    """

    source: int
    sent: Piece
    target: int
    received: Piece

    @property
    def is_local(self) -> bool:
        """Whether the rank that needs the piece already has it."""
        return self.source == self.target


@dataclass(frozen=True)
class MeshTransfer:
    """The deliveries that bring a tensor from one mesh to another. Each axis of the tensor is
    divided into pieces.

    - `pieces`: for each axis, the number of pieces of the whole tensor.
    - `held`: for each axis, the number of its pieces that one rank of the old mesh has.
    - `needed`: for each axis, the number of its pieces that one rank of the new mesh needs.
    - `deliveries`: ordered by the piece that is received, then by the rank that receives it, in the
      order of its mesh.
    """

    pieces: tuple[int, ...]
    held: tuple[int, ...]
    needed: tuple[int, ...]
    deliveries: tuple[Delivery, ...]

    @property
    def is_local(self) -> bool:
        """Whether nothing is sent, because every rank of the new mesh has its pieces already."""
        return all(d.is_local for d in self.deliveries)

    @cached_property
    def cut_axes(self) -> tuple[int, ...]:
        """The positions of the axes of which some rank has or needs several pieces."""
        pairs = zip(self.held, self.needed, strict=True)
        return tuple(p for p, (held, needed) in enumerate(pairs) if max(held, needed) > 1)

    @cached_property
    def teams(self) -> tuple[tuple[int, ...], ...]:
        """The teams of a broadcast that makes all deliveries; the first member of a team sends.

        Empty unless a broadcast can make them. This requires four things: ranks send whole blocks,
        not parts of blocks; each sending rank sends to the same number of others, at least two; no
        rank is in two teams; and every rank of a delivery is in a team.
        """
        receivers: defaultdict[int, list[int]] = defaultdict(list)
        for d in self.deliveries:
            if not d.is_local:
                receivers[d.source].append(d.target)
        teams = tuple((source, *targets) for source, targets in sorted(receivers.items()))
        members = [rank for team in teams for rank in team]
        is_shared = len({len(team) for team in teams}) == 1 and len(teams[0]) > 2
        ranks = {rank for d in self.deliveries for rank in (d.source, d.target)}
        is_whole = not self.cut_axes and len(set(members)) == len(members)
        return teams if is_shared and is_whole and ranks == set(members) else ()

    @cached_property
    def sent(self) -> Fraction:
        """The largest number of elements that one rank sends, as a fraction of the elements of the
        tensor. Elements that a broadcast sends to several ranks count once.
        """
        if self.teams:
            return Fraction(1, prod(self.pieces))
        loads = Counter(d.source for d in self.deliveries if not d.is_local)
        return Fraction(max(loads.values(), default=0), prod(self.pieces))


@lru_cache(maxsize=1024)
def transfer_between(
    source: tuple[DeviceMesh, Placement],
    target: tuple[DeviceMesh, Placement],
    copied: frozenset[int] = frozenset(),
) -> MeshTransfer:
    """Returns the deliveries that bring a tensor from one mesh and placement to another.

    A placement lists, for each axis, its divisions (cuts) over devices, outermost first; neither
    placement may have steps of a stream loop. `copied` has the positions of broadcast axes: every
    rank has their only element, so they are not divided. All ranks find the same deliveries.
    """
    (old, have), (new, want) = source, target
    counts = [_counts(cuts, copied) for cuts in (have, want)]
    pieces = tuple(map(lcm, *counts))
    held, needed = (tuple(n // b for n, b in zip(pieces, mine, strict=True)) for mine in counts)
    block_of, wanted = _blocks(old, have, copied), _blocks(new, want, copied)
    owners: defaultdict[Piece, list[int]] = defaultdict(list)
    for rank, block in block_of.items():
        owners[block].append(rank)
    # The ranks that have a block send in turn, so that none sends more than others.
    turns = {block: cycle(ranks) for block, ranks in owners.items()}
    deliveries: list[Delivery] = []
    for received in product(*map(range, needed)):
        for rank, block in wanted.items():
            number = [b * n + k for b, n, k in zip(block, needed, received, strict=True)]
            owned = tuple(x // n for x, n in zip(number, held, strict=True))
            owner = rank if block_of.get(rank) == owned else next(turns[owned])
            sent = tuple(x % n for x, n in zip(number, held, strict=True))
            deliveries.append(Delivery(owner, sent, rank, received))
    return MeshTransfer(pieces, held, needed, tuple(deliveries))


def _counts(placement: Placement, copied: Collection[int]) -> list[int]:
    """Returns the number of blocks into which devices divide each axis."""
    return [
        1 if p in copied else prod(cut.devices for cut in cuts) for p, cuts in enumerate(placement)
    ]


def _blocks(mesh: DeviceMesh, placement: Placement, copied: Collection[int]) -> dict[int, Piece]:
    """Returns for each rank of `mesh` the index of its block along each axis."""
    along: list[Sequence[int]] = []
    for position, cuts in enumerate(placement):
        numbers = [0] * mesh.size
        for cut in () if position in copied else cuts:
            places = mesh.coordinates(cut.ptype)
            numbers = [n * cut.devices + at for n, at in zip(numbers, places, strict=True)]
        along.append(numbers)
    blocks = zip(*along, strict=True) if along else ((),) * mesh.size
    return dict(zip(mesh.devices, blocks, strict=True))


def sends_by_rank(transfer: MeshTransfer) -> Iterator[dict[int, Delivery]]:
    """Yields the deliveries in rounds: the first delivery of each rank to another rank, then the
    second one of each rank, and so on.

    A round is a dict from the sending rank to its delivery. The deliveries from one rank to another
    are in the order in which the other rank receives them.
    """
    queues: defaultdict[int, list[Delivery]] = defaultdict(list)
    for d in transfer.deliveries:
        if not d.is_local:
            queues[d.source].append(d)
    for k in range(max(map(len, queues.values()), default=0)):
        yield {rank: queue[k] for rank, queue in sorted(queues.items()) if k < len(queue)}
