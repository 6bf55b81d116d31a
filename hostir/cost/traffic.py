"""The bytes that each rank of a program sends to and receives from each other one, for all ranks at
once.

A collective counts as if every member sent its data directly to the others. A library may forward
the same bytes along a ring.
"""

from __future__ import annotations

from dataclasses import dataclass

from fuser.ir.dtypes import nbytes_of
from fuser.ir.fusion import TensorView
from hostir.analysis.deadlocks import Teams
from hostir.analysis.rank_values import Array, PerRank, np
from hostir.analysis.unrolled_program import UnrolledOp, Unroller
from hostir.ir.ops import Movement
from multidevice.transports.base.collectives import Collective

# The largest number of ranks for which every pair is counted.
MAX_PAIRED = 16


@dataclass
class Traffic:
    """The bytes that each rank sends and receives in one run of a program, as arrays over rank
    indices.

    `pairs` [sender, receiver] has the bytes for each pair of ranks. `pairs` is None if there are
    more than `MAX_PAIRED` ranks.
    """

    sent: Array
    received: Array
    pairs: Array | None


def traffic_of(unrolled: Unroller) -> Traffic:
    """Adds up the bytes that each rank sends and receives in one run of the program. `unrolled` has
    the ops of all ranks in each loop iteration.
    """
    count = len(unrolled.ranks)
    pairs = np.zeros((count, count)) if count <= MAX_PAIRED else None
    found = Traffic(np.zeros(count), np.zeros(count), pairs)
    for item in unrolled.items:
        for one in item.group if item.group is not None else [item]:
            _count(one, found)
    return found


def _count(item: UnrolledOp, found: Traffic) -> None:
    for tv, (teams, n) in item.far.items():
        _among(found, teams, _nbytes(item, tv) / n, n, item.mask, item.mask)
    movement, teams = item.movement, item.teams
    if movement is None or movement.sent is None:
        return  # it moves nothing, or is a receive, which is counted with its send
    if movement.collective is not None:
        _collective(item, movement, movement.collective, found)
        return
    nbytes = _nbytes(item, movement.sent)
    for _, senders, receivers in item.pairs:
        _add(found, senders, receivers, nbytes[senders])
    if teams is not None and item.peers is not None:
        here = np.nonzero(item.mask)[0]
        to = np.broadcast_to(np.asarray(item.peers[0]), item.mask.shape)[here]
        receivers = teams.members[teams.team[here], to]
        moved = receivers != here
        _add(found, here[moved], receivers[moved], nbytes[here[moved]])


def _add(found: Traffic, senders: Array, receivers: Array, nbytes: Array) -> None:
    np.add.at(found.sent, senders, nbytes)
    np.add.at(found.received, receivers, nbytes)
    if found.pairs is not None:
        np.add.at(found.pairs, (senders, receivers), nbytes)


def _nbytes(item: UnrolledOp, tv: TensorView) -> Array:
    total: PerRank = nbytes_of(tv.dtype())
    for n in item.shapes[tv]:
        total = total * n
    return np.broadcast_to(np.asarray(total, dtype=np.float64), item.mask.shape)


def _collective(item: UnrolledOp, movement: Movement, row: Collective, found: Traffic) -> None:
    teams, mask = item.teams, item.mask
    assert teams is not None, f"a {row} needs a team"
    n = teams.members.shape[1]
    inp, out = (_nbytes(item, tv) for tv in movement.both)
    block = np.where(mask, row.block(inp, out, n), 0.0)
    is_root = mask & (teams.position == item.root)
    gives = takes = mask
    if row.inp.at_root:
        gives, takes = is_root, mask & ~is_root
    elif row.out.at_root:
        gives, takes = mask & ~is_root, is_root
    _among(found, teams, block, n, gives, takes, row)


def _among(
    found: Traffic,
    teams: Teams,
    block: Array,
    n: int,
    gives: Array,
    takes: Array,
    row: Collective | None = None,
) -> None:
    """Adds the bytes that members of a team send to each other in one op to the sums in `found`.
    Each member in `gives` sends to each other member in `takes`.

    - `block`: for each rank, the bytes that it sends to one other member; `n`: the size of a team.
    - `row`: the type of collective; None if a kernel reads the other ranks' memory.
    """
    receivers = 1 if row is not None and row.out.at_root else n - 1
    senders = 1 if row is not None and row.inp.at_root else n - 1
    found.sent += np.where(gives, block * receivers, 0.0)
    found.received += np.where(takes, block * senders, 0.0)
    if found.pairs is not None:
        same = (teams.team[:, None] == teams.team[None, :]) & ~np.eye(len(gives), dtype=bool)
        found.pairs += np.where(same & gives[:, None] & takes[None, :], block[:, None], 0.0)
