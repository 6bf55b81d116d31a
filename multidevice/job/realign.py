"""Ranks that an error has parted, brought back into step.

A call that fails on one rank leaves the others with communications that it never entered, or with
some of its own that nobody answers. When the ranks next meet, each tells how many calls of every
stream it has entered. All then count as many as the one that went furthest, and whatever carries a
stream that was out of step is given up: its next use makes another, in which nothing is left.
"""

from __future__ import annotations

from collections.abc import Sequence

from multidevice.coordination.bounded_wait import RECV, SEND, Calls, Team
from multidevice.coordination.control_channel import CLAIMS, OF_USERS, WITHIN_CALLS, Control
from multidevice.coordination.deadlock_detector import CALL, LEFT

# Streams of calls that are in step by themselves, or else nothing could be agreed; what users ask
# for, who know best what they have left out; and what each rank counts for itself.
_NOT_SHARED = {CLAIMS, OF_USERS, CALL, LEFT}
_RUN = "run"


def counts_of(control: Control) -> dict[Calls, int]:
    """Returns how many calls of each stream of data this rank has entered, and runs it has begun.

    Steady calls must not pay for a key of the runs: it is made here.
    """
    entered = control.ledger.entered
    counts = {key: n for key, n in entered.items() if key.kind not in _NOT_SHARED}
    return counts | {Calls(_RUN, team): n for team, n in control.runs.items()}


def realign(
    control: Control, team: Team, counts: Sequence[dict[Calls, int]], *, has_failed: bool
) -> str:
    """Makes the members of a team count equally; `counts` has what `counts_of` returned on each.

    Sends and receives may be far apart in programs by hand: only where a call `has_failed` is one
    without the other an error. Returns where they did not, as text; "" where no data was left out.
    """
    told = dict(zip(team, counts, strict=True))
    text = ""
    for stream in sorted({_whole(key) for count in counts for key in count}):
        parts = [(r, key, told[r].get(key, 0)) for r, key in _members(stream, team)]
        most = max((n for _, _, n in parts), default=0)
        if all(n == most for _, _, n in parts):
            continue
        if stream.ends and not has_failed:
            continue
        if stream.kind == _RUN:
            control.runs[stream.team] = most
            continue
        for rank, key, _ in parts:
            if rank == control.rank:
                control.ledger.entered[key] = most
        # Nothing carries the control channel's that could be out of step.
        if stream.kind == WITHIN_CALLS:
            continue
        text = text or ", ".join(f"rank {r} has entered {n} of {key}" for r, key, n in parts)
        if control.rank in stream.team:
            control.lose(stream)
    return text


def _whole(key: Calls) -> Calls:
    """Returns the stream of a key: sends from one rank to another are received by that one."""
    return key._replace(kind=SEND) if key.ends else key


def _members(stream: Calls, team: Team) -> list[tuple[int, Calls]]:
    """Returns who of a team counts a stream, and under which key."""
    if not stream.ends:
        return [(rank, stream) for rank in stream.team if rank in team]
    source, target = stream.ends
    both = (source, stream), (target, stream._replace(kind=RECV))
    return [*both] if {source, target} <= {*team} else []
