"""How many bytes each rank sends and receives, and to whom; counted for all ranks at once.

A collective counts as if every member gave the others what they need of it directly; a library may
pass the same bytes on along a ring.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fuser.ir.dtypes import nbytes_of
from fuser.ir.tensor import TensorView
from hostir.analysis.deadlocks import Teams
from hostir.analysis.rank_values import Array, PerRank, np
from hostir.analysis.unrolled_program import UnrolledOp, Unroller
from hostir.ir.transfers import CollectivePermute, Communication, P2PCommunication

# Of so many ranks every pair is counted.
MAX_PAIRED = 16

# Bytes from each member to each other one, of its input, its output, and the team's size.
_BLOCK: dict[str, Callable[[PerRank, PerRank, int], PerRank]] = {
    "Allgather": lambda inp, out, n: inp,
    "Allreduce": lambda inp, out, n: 2 * inp / n,
    "AllToAll": lambda inp, out, n: inp / n,
    "Broadcast": lambda inp, out, n: out,
    "Gather": lambda inp, out, n: inp,
    "Reduce": lambda inp, out, n: inp,
    "ReduceScatter": lambda inp, out, n: out,
    "Scatter": lambda inp, out, n: out,
}
_FROM_ROOT = frozenset({"Broadcast", "Scatter"})
_TO_ROOT = frozenset({"Gather", "Reduce"})


@dataclass
class Traffic:
    """Bytes by place of the rank; `pairs` [from, to], None where there are too many ranks."""

    sent: Array
    received: Array
    pairs: Array | None


def traffic_of(unrolled: Unroller) -> Traffic:
    count = len(unrolled.ranks)
    pairs = np.zeros((count, count)) if count <= MAX_PAIRED else None
    found = Traffic(np.zeros(count), np.zeros(count), pairs)
    for item in unrolled.items:
        for one in item.group if item.group is not None else [item]:
            _count(one, found)
    return found


def _count(item: UnrolledOp, found: Traffic) -> None:
    op = item.site.op
    for tv, (teams, n) in item.far.items():
        _among(found, teams, _nbytes(item, tv) / n, n, item.mask, item.mask)
    if isinstance(op, Communication):
        _collective(item, op, found)
    elif isinstance(op, CollectivePermute):
        teams, here = item.teams, np.nonzero(item.mask)[0]
        if teams is not None and item.peers is not None:
            to = np.broadcast_to(np.asarray(item.peers[0]), item.mask.shape)[here]
            receivers = teams.members[teams.team[here], to]
            moved = receivers != here
            _add(found, here[moved], receivers[moved], _nbytes(item, op.inp)[here[moved]])
    elif isinstance(op, P2PCommunication) and op.type == "send":
        nbytes = _nbytes(item, op.buffer)
        for _, senders, receivers in item.pairs:
            _add(found, senders, receivers, nbytes[senders])


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


def _collective(item: UnrolledOp, op: Communication, found: Traffic) -> None:
    teams, mask, n = item.teams, item.mask, op.team.size
    assert teams is not None
    inp, out = _nbytes(item, op.inp), _nbytes(item, op.out)
    block = np.where(mask, _BLOCK[op.type](inp, out, n), 0.0)
    is_root = mask & (teams.position == item.root)
    gives = takes = mask
    if op.type in _FROM_ROOT:
        gives, takes = is_root, mask & ~is_root
    elif op.type in _TO_ROOT:
        gives, takes = mask & ~is_root, is_root
    _among(found, teams, block, n, gives, takes, op.type)


def _among(
    found: Traffic, teams: Teams, block: Array, n: int, gives: Array, takes: Array, kind: str = ""
) -> None:
    """Count what those who give send each of those of their team who take."""
    found.sent += np.where(gives, block * (1 if kind in _TO_ROOT else n - 1), 0.0)
    found.received += np.where(takes, block * (1 if kind in _FROM_ROOT else n - 1), 0.0)
    if found.pairs is not None:
        same = (teams.team[:, None] == teams.team[None, :]) & ~np.eye(len(gives), dtype=bool)
        found.pairs += np.where(same & gives[:, None] & takes[None, :], block[:, None], 0.0)
