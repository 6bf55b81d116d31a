"""What arrives must be the part of a whole that left: where both ends are the same whole.

A communication moves memory as it lies, so that of what a team gathers or parts each member has an
equal piece of the memory, which is a part only where outer axes leave it whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from hostir.analysis.deadlocks import PostedCollective, Teams
from hostir.analysis.rank_regions import Region
from hostir.analysis.rank_values import Array, PerRank, at, everywhere, np
from hostir.analysis.spots import Shapes
from hostir.ir.transfers import REDUCING, ROOTED

# Of an AllToAll in a larger team, so many partners of each member are looked at.
_MAX_PARTNERS = 64


# ------------------------------------------------------------------ collectives
Wrong = tuple[str, Array | None, str]


def misplaced(met: PostedCollective, here: Array, ranks: Sequence[int]) -> Wrong | None:
    """Return what is wrong with where the parts of a collective go, on which ranks (None: the text
    says it), and a note; None where nothing is."""
    inp, out = met.inp, met.out
    if inp is None or out is None or inp.whole != out.whole or not here.any():
        return None
    kind, teams, count = met.kind, met.teams, met.teams.members.shape[1]
    checked = here
    left: Region | None = inp
    right: Region | None = out
    if kind in ("Broadcast", "Scatter", "Gather"):
        roots = teams.members[teams.team, np.where(here, met.root, 0)]
        if kind == "Gather":
            right = out = out.on(roots)
        else:
            left = inp = inp.on(roots)
    if kind == "Reduce":
        checked = here & (teams.position == met.root)
    if kind in ("Allgather", "Gather"):
        right = out.piece(count, teams.position)
    elif kind in ("ReduceScatter", "Scatter"):
        left = inp.piece(count, teams.position)
    if kind == "AllToAll":
        return _exchanged(met, inp, out, here)
    if left is None or right is None:
        return None
    same = left.is_same(right)
    wrong = np.logical_not(same) & checked
    if not everywhere(same) and wrong.any():
        i = int(np.argmax(wrong))
        source = f" from root {at(met.root, i)}" if kind in ROOTED else ""
        text = f"{kind}{source} brings {inp.text(i)} into {out.text(i)}"
        return text, wrong, _lies(met, inp, out, left, right, i)
    if kind in REDUCING or kind == "Allgather":
        return _apart(met, out if kind == "Allgather" else inp, here, ranks)
    return None


def _lies(
    met: PostedCollective, inp: Region, out: Region, left: Region, right: Region, i: int
) -> str:
    """Return a note where the memory is what does not fit."""
    if left is not inp:
        return f"in memory, {left.text(i)} is the piece for position {met.teams.position[i]}"
    if right is not out:
        return f"in memory, {right.text(i)} is the piece of position {met.teams.position[i]}"
    return ""


def _apart(met: PostedCollective, part: Region, here: Array, ranks: Sequence[int]) -> Wrong | None:
    """What a team gathers, or reduces, is one part of a whole, the same for all members."""
    teams = met.teams
    for x in part.starts:
        two = first_difference(x, teams, here)
        if two is not None:
            i, k = two
            text = f"{met.kind} of different parts: {part.text(i)} on rank {ranks[i]}, "
            text += f"{part.text(k).removeprefix(part.label(i))} on rank {ranks[k]}"
            return text, None, ""
    return None


def _exchanged(met: PostedCollective, inp: Region, out: Region, here: Array) -> Wrong | None:
    """Piece k of a member's input is piece i of the output of member k, for i its position."""
    teams, count = met.teams, met.teams.members.shape[1]
    for shift in range(0, count, -(-count // _MAX_PARTNERS)):
        to = (teams.position + shift) % count
        left = inp.piece(count, to)
        right = out.on(teams.members[teams.team, to]).piece(count, teams.position)
        if left is None or right is None:
            return None
        wrong = np.logical_not(left.is_same(right)) & here
        if wrong.any():
            i = int(np.argmax(wrong))
            text = f"AllToAll brings {left.text(i)} into {right.text(i)}"
            return text, wrong, ""
    return None


def first_difference(x: PerRank, teams: Teams, here: Array) -> tuple[int, int] | None:
    """Return two members of one team, by place, whose values differ; None where none do."""
    if not isinstance(x, np.ndarray):
        return None
    by_team = x[teams.members]
    differ = (by_team != by_team[:, :1]).any(1) & here[teams.members[:, 0]]
    if not differ.any():
        return None
    first, *rest = teams.members[int(np.argmax(differ))].tolist()
    return first, next(i for i in rest if x[i] != x[first])


# ------------------------------------------------------------------ transfers
def lost_on_the_way(
    shapes: Shapes, a: Region | None, b: Region | None, senders: Array, receivers: Array
) -> tuple[str, int] | None:
    """Return what a transfer of `a` into `b` brings elsewhere, and the index of a pair of places;
    None where it brings each part to the same part.

    A buffer that no device axis cuts may have slots of the user's own, and ranks may exchange
    shards as they are.
    """
    if a is None or b is None or a.whole != b.whole or (a.is_alike and b.is_alike):
        return None
    if not (a.is_alike or b.is_alike or a.by_rank or b.by_rank):
        return None
    owners = {tv for x in (a, b) for _, tv in x.owners}
    is_spread = any(map(bool, (c for tv in owners for c in shapes.device_cuts(tv))))
    if not is_spread and (len(owners) > 1 or a.is_alike or b.is_alike):
        return None
    sent, received = a.on(senders), b.on(receivers)
    same = sent.is_same(received)
    if everywhere(same):
        return None
    k = int(np.argmin(np.broadcast_to(same, senders.shape)))
    return f"sends {sent.text(k)}, which arrives as {received.text(k)}", k
