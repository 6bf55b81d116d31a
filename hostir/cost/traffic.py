"""The bytes that each rank of a program sends to and receives from each other one, for all ranks at
once.

A collective counts as if every member sent its data directly to the others. A library may forward
the same bytes along a ring.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fuser.ir.domain.device_mesh import DeviceMesh
from fuser.ir.dtypes import nbytes_of
from fuser.ir.fusion import TensorView
from fuser.ir.op import Op
from fuser.ir.types import DEVICE_TYPES, ParallelType
from hostir.analysis.deadlocks import Teams
from hostir.analysis.rank_values import Array, PerRank, np
from hostir.analysis.unrolled_program import UnrolledOp, Unroller
from hostir.ir.ops import Movement
from multidevice.transports.base.collectives import Collective

# The largest number of ranks for which every pair is counted.
MAX_PAIRED = 16


@dataclass(frozen=True)
class OpTraffic:
    """The bytes that one communication, or one kernel that reads other ranks' memory, moves in a
    run.

    - `op`: the op of the host program. For a transfer it is the send, which is counted together
      with its receives.
    - `along`: the mesh dimensions in which sender and receiver differ, such as `mesh_x` or `mesh_y
      mesh_x`. "" if they are on different meshes.
    - `members`: the number of ranks in a team, 2 for a send.
    - `times`, `sent`, `received`: how often the op runs, and the bytes of all its runs. They have
      one number for each rank in `places`, an argument of `traffic_of`.
    """

    op: Op
    along: str
    members: int
    times: Array
    sent: Array
    received: Array


@dataclass
class Traffic:
    """The bytes that each rank sends and receives in one run of a program, as arrays over rank
    indices.

    `pairs` [sender, receiver] has the bytes for each pair of ranks. `pairs` is None if there are
    more than `MAX_PAIRED` ranks. `ops` has a row for each op that moves data, in program order.
    """

    sent: Array
    received: Array
    pairs: Array | None
    ops: tuple[OpTraffic, ...] = ()


def traffic_of(unrolled: Unroller, places: Sequence[int] = ()) -> Traffic:
    """Adds up the bytes that each rank sends and receives in one run of the program.

    `unrolled` has the ops of all ranks in each loop iteration. `places` are the indices of the
    ranks for which the bytes are also added up per op.
    """
    count = len(unrolled.ranks)
    pairs = np.zeros((count, count)) if count <= MAX_PAIRED else None
    found = Traffic(np.zeros(count), np.zeros(count), pairs)
    rows: dict[tuple[Op, str], OpTraffic] = {}
    here = np.asarray(places, dtype=np.int64)
    for item in unrolled.items:
        for one in item.group if item.group is not None else [item]:
            before = found.sent[here], found.received[here]
            along, members = _count(one, found, unrolled.ranks)
            if not members:
                continue
            sent, received = found.sent[here] - before[0], found.received[here] - before[1]
            times = (one.mask[here] | (sent > 0) | (received > 0)).astype(np.int64)
            row = rows.get((one.site.op, along))
            if row is not None:
                times, sent, received = times + row.times, sent + row.sent, received + row.received
            rows[one.site.op, along] = OpTraffic(one.site.op, along, members, times, sent, received)
    found.ops = tuple(rows.values())
    return found


def _count(item: UnrolledOp, found: Traffic, ranks: Sequence[int]) -> tuple[str, int]:
    """Adds the bytes of one op to `found`. Returns the mesh dimensions along which the op moves
    data, and the number of ranks that take part; ("", 0) if the op moves nothing.

    `ranks` has the global rank of each rank index.
    """
    along, members = "", 0
    for tv, (teams, n) in item.far.items():
        _among(found, teams, _nbytes(item, tv) / n, n, item.mask, item.mask)
        along, members = dimensions_text(teams.of.ptypes), n
    movement, teams = item.movement, item.teams
    if movement is None or movement.sent is None:
        # The op moves nothing else, or is a receive, which is counted with its send.
        return along, members
    if movement.collective is not None:
        _collective(item, movement, movement.collective, found)
        assert teams is not None, f"{item.site.op.name} needs a team"
        return dimensions_text(teams.of.ptypes), teams.of.size
    nbytes = _nbytes(item, movement.sent)
    for _, senders, receivers in item.pairs:
        _add(found, senders, receivers, nbytes[senders])
        if len(senders):
            along, members = _between(movement.sent.mesh, ranks, senders, receivers), 2
    if teams is not None and item.peers is not None:
        here = np.nonzero(item.mask)[0]
        to = np.broadcast_to(np.asarray(item.peers[0]), item.mask.shape)[here]
        receivers = teams.members[teams.team[here], to]
        moved = receivers != here
        _add(found, here[moved], receivers[moved], nbytes[here[moved]])
        return dimensions_text(teams.of.ptypes), teams.of.size
    return along, members


def dimensions_text(ptypes: Iterable[ParallelType]) -> str:
    """Returns the names of mesh dimensions, outermost first, such as `mesh_y mesh_x`."""
    given = set(ptypes)
    return " ".join(p.name for p in reversed(DEVICE_TYPES) if p in given)


def _between(
    mesh: DeviceMesh | None, ranks: Sequence[int], senders: Array, receivers: Array
) -> str:
    """Returns the names of the dimensions of `mesh` along which senders and receivers differ; "" if
    any of them is not on the mesh. `senders` and `receivers` have rank indices, in pairs. `ranks`
    has the global rank of each index.
    """
    given: list[int] = senders.tolist()
    taken: list[int] = receivers.tolist()
    pairs = [(ranks[a], ranks[b]) for a, b in zip(given, taken, strict=True)]
    if mesh is None or not all(mesh.has(rank) for pair in pairs for rank in pair):
        return ""
    types = DEVICE_TYPES[: mesh.ndim]
    return dimensions_text(
        p for p in types if any(mesh.coordinate(a, p) != mesh.coordinate(b, p) for a, b in pairs)
    )


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
    """Counts the bytes that members of a team send to each other in one op, and adds them to the
    sums in `found`. Each member in `gives` sends to each other member in `takes`; both have a flag
    for each rank.

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
