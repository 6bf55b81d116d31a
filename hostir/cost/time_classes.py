"""Which ranks take the same time for a program: those with equal ops, that meet their like.

First by what each rank does, how large it is and on which stream; then, until nothing changes, by
the classes of those that it meets. Peers and roots tell nobody apart: a ring is one class.
"""

from __future__ import annotations

from collections.abc import Sequence

from hostir.analysis.rank_values import Array, PerRank, np
from hostir.analysis.unrolled_program import UnrolledOp

_MIX, _ADD = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03


def time_classes(items: Sequence[UnrolledOp], count: int) -> Array:
    """Return the class of each of `count` ranks; classes are numbered by their first rank."""
    marks: Array = np.zeros(count, dtype=np.uint64)
    every = _each(items)
    names = _StreamNames(count)
    differs = any(isinstance(s, np.ndarray) for r in every for s in (r.stream, r.joins))
    numbers = {id(r): i for i, r in enumerate(every)}
    for item in every:
        columns: list[PerRank] = [] if item.mask.all() else [item.mask]
        for stream in (item.stream, item.joins):
            if differs and stream is not None:
                columns.append(names.of(stream, item.mask))
        columns += [n for shape in item.shapes.values() for n in shape]
        if len(item.pairs) > 1:
            partner = np.zeros(count, dtype=np.int64)
            for other, places, _ in item.pairs:
                partner[places] = numbers[id(other)]
            columns.append(partner)
        for column in columns:
            if isinstance(column, np.ndarray):
                marks = _mix(marks, np.where(item.mask, column, -1))
    classes, found = _numbered(marks)
    while found > 1:
        marks = classes.astype(np.uint64)
        done: set[int] = set()
        for item in every:
            marks = _partners(item, classes, marks, done)
        before = found
        classes, found = _numbered(marks)
        if found == before:
            break
    return classes


def _partners(item: UnrolledOp, classes: Array, marks: Array, done: set[int]) -> Array:
    """Mix the classes of those that the ranks meet into their marks; of equal teams once."""
    teams = item.teams
    if teams is not None and id(teams) not in done:
        done.add(id(teams))
        every = _mix(np.zeros(teams.members.shape, dtype=np.uint64), classes[teams.members])
        together = every.sum(axis=1)
        marks = _mix(marks, np.where(teams.team < 0, 0, together[teams.team]))
    if teams is not None and item.peers is not None:
        for peer in item.peers:
            met = classes[teams.members[teams.team, np.where(item.mask, peer, 0)]]
            marks = _mix(marks, np.where(item.mask, met, -1))
    for _, places, partners in item.pairs:
        met = np.full(len(classes), -1)
        met[places] = classes[partners]
        marks = _mix(marks, met)
    return marks


def _each(items: Sequence[UnrolledOp]) -> list[UnrolledOp]:
    """Return the items with the halves of groups in their place."""
    return [r for item in items for r in (item, *(item.group or ()))]


def _mix(marks: Array, column: Array) -> Array:
    value = column.astype(np.uint64) + np.uint64(_ADD)
    value = (value ^ (value >> np.uint64(29))) * np.uint64(_MIX)
    mixed = (marks ^ value) * np.uint64(_MIX)
    return mixed ^ (mixed >> np.uint64(31))


def _numbered(marks: Array) -> tuple[Array, int]:
    """Return equal marks as one number, counted in order of their first place."""
    _, first, inverse = np.unique(marks, return_index=True, return_inverse=True)
    order = np.argsort(np.argsort(first))
    return order[inverse.reshape(-1)], len(first)


class _StreamNames:
    """Streams by the order in which each rank comes to them: which number one has is no matter."""

    def __init__(self, count: int) -> None:
        self._seen: dict[int, Array] = {}
        self._next: Array = np.zeros(count, dtype=np.int64)

    def of(self, stream: PerRank, mask: Array) -> Array:
        numbers = np.broadcast_to(np.asarray(stream), self._next.shape)
        found = np.zeros(len(numbers), dtype=np.int64)
        for number in np.unique(numbers[mask]).tolist():
            names = self._seen.setdefault(number, np.full(len(numbers), -1))
            here = mask & (numbers == number)
            new = here & (names < 0)
            names[new] = self._next[new]
            self._next[new] += 1
            found[here] = names[here]
        return found
