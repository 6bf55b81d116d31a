"""Ranks that an error has parted, brought back into step.

A call that fails on one rank leaves the others with communications that it never entered, or with
some of its own that nobody answers. When the ranks next meet, each tells how many calls of every
stream it has entered. All then count as many as the one that went furthest, and whatever carries a
stream that was out of step is given up: its next use makes another, in which nothing is left.
"""

from __future__ import annotations

from collections.abc import Sequence

from multidevice.backends.protocol import Team
from multidevice.control import Control
from multidevice.waiting import team_text

# Streams of calls that are in step by themselves, or else nothing could be agreed; what users ask
# for, who know best what they have left out; and what each rank counts for itself.
_NOT_SHARED = ("claims ", "talk ", "call ", "left ")
# Streams that nothing carries which could be out of step.
_RUN, _CONTROL = "run ", "control "
_HALVES = ("send ", "recv ")


def counts_of(control: Control) -> dict[str, int]:
    """Returns how many calls of each stream of data this rank has entered, and runs it has begun.

    Steady calls must not pay for a key of the runs: it is made here.
    """
    entered = control.ledger.entered
    counts = {key: n for key, n in entered.items() if not key.startswith(_NOT_SHARED)}
    return counts | {f"{_RUN}{team_text(team)}": n for team, n in control.runs.items()}


def realign(
    control: Control, team: Team, counts: Sequence[dict[str, int]], *, has_failed: bool
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
        if stream.startswith(_HALVES) and not has_failed:
            continue
        if stream.startswith(_RUN):
            control.runs[_ranks(stream)] = most
            continue
        for rank, key, _ in parts:
            if rank == control.rank:
                control.ledger.entered[key] = most
        if stream.startswith(_CONTROL):
            continue
        text = text or ", ".join(f"rank {r} has entered {n} of {key}" for r, key, n in parts)
        if control.rank in _ranks(stream):
            control.lose(stream)
    return text


def _whole(key: str) -> str:
    """Returns the stream of a key: sends from one rank to another are received by that one."""
    return f"send {key[5:]}" if key.startswith(_HALVES) else key


def _ranks(stream: str) -> Team:
    return tuple(int(r) for r in stream.rpartition("(")[2].rstrip(")").split())


def _members(stream: str, team: Team) -> list[tuple[int, str]]:
    """Returns who of a team counts a stream, and under which key."""
    if not stream.startswith(_HALVES):
        return [(rank, stream) for rank in _ranks(stream) if rank in team]
    source, target = map(int, stream.split()[1].split("->"))
    both = (source, stream), (target, f"recv {stream[5:]}")
    return [*both] if {source, target} <= {*team} else []
