"""Which ranks take the same time for a program: those with equal records, who meet their like.

First by what each rank does, how large it is and on which stream; then, until nothing changes, by
the classes of those that it meets. Peers and roots tell nobody apart: a ring is one class.
"""

from __future__ import annotations

from collections.abc import Sequence

from hostir.rank_values import Array, PerRank, np
from hostir.unrolled import Record

_MIX, _ADD = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03


def time_classes(records: Sequence[Record], count: int) -> Array:
    """Return the class of each of `count` ranks; classes are numbered by their first rank."""
    marks: Array = np.zeros(count, dtype=np.uint64)
    every = _each(records)
    names = _StreamNames(count)
    differs = any(isinstance(s, np.ndarray) for r in every for s in (r.stream, r.joins))
    numbers = {id(r): i for i, r in enumerate(every)}
    for record in every:
        columns: list[PerRank] = [] if record.mask.all() else [record.mask]
        for stream in (record.stream, record.joins):
            if differs and stream is not None:
                columns.append(names.of(stream, record.mask))
        columns += [n for shape in record.shapes.values() for n in shape]
        if len(record.pairs) > 1:
            partner = np.zeros(count, dtype=np.int64)
            for other, places, _ in record.pairs:
                partner[places] = numbers[id(other)]
            columns.append(partner)
        for column in columns:
            if isinstance(column, np.ndarray):
                marks = _mix(marks, np.where(record.mask, column, -1))
    classes, found = _numbered(marks)
    while found > 1:
        marks = classes.astype(np.uint64)
        done: set[int] = set()
        for record in every:
            marks = _partners(record, classes, marks, done)
        before = found
        classes, found = _numbered(marks)
        if found == before:
            break
    return classes


def _partners(record: Record, classes: Array, marks: Array, done: set[int]) -> Array:
    """Mix the classes of those that the ranks meet into their marks; of equal teams once."""
    teams = record.teams
    if teams is not None and id(teams) not in done:
        done.add(id(teams))
        every = _mix(np.zeros(teams.members.shape, dtype=np.uint64), classes[teams.members])
        together = every.sum(axis=1)
        marks = _mix(marks, np.where(teams.team < 0, 0, together[teams.team]))
    if teams is not None and record.peers is not None:
        for peer in record.peers:
            met = classes[teams.members[teams.team, np.where(record.mask, peer, 0)]]
            marks = _mix(marks, np.where(record.mask, met, -1))
    for _, places, partners in record.pairs:
        met = np.full(len(classes), -1)
        met[places] = classes[partners]
        marks = _mix(marks, met)
    return marks


def _each(records: Sequence[Record]) -> list[Record]:
    """Return the records with the halves of groups in their place."""
    return [r for record in records for r in (record, *(record.group or ()))]


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
