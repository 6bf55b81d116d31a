"""DeviceMesh: an array of the ranks that store a tensor. `mesh_x` is the *last* mesh dimension.

The text of a small mesh lists every rank. The text of a large mesh uses ranges: `0..7` are the
ranks 0 to 7, and `0..56 by 8` is every eighth rank from 0 to 56. Braces group the ranks of one
index of a dimension. A range can also have groups as its ends: `{0..7}..{1016..1023}` are the
groups of 8 consecutive ranks from {0..7} to {1016..1023}.

    DeviceMesh{{0 1}{2 3}}   DeviceMesh{0..1023}   DeviceMesh{0..6 8..63}   DeviceMesh{0..56 by 8}
    DeviceMesh{{0..7}..{1016..1023}}   DeviceMesh{{0..896 by 128}..{127..1023 by 128} by 1}
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from typing import Any, cast

from fuser.ir.types import DEVICE_TYPES, ParallelType
from fuser.support.arguments import Mismatch, checked, list_items, python_number, show, take_integer
from fuser.support.errors import ArgumentError, FuserError, ShardingError
from fuser.support.lru import Recent
from fuser.support.text_cursor import Cursor

# Meshes of at most this many devices print every rank, as nvFuser's do.
SPELLED_OUT = 16
# A limit for ranges in texts, above the size of any job, so that a text cannot exhaust memory.
MAX_DEVICES = 1 << 20
# A rank is an int of MPI.
_MAX_RANK = 2**31 - 1
_MAX_DIMENSIONS = 3

# Meshes and teams by their text: a program's text repeats them at every tensor.
_read: Recent[str, DeviceMesh] = Recent(64)
_BRACES = re.compile(r"[{}]")

_checked_init = partial(checked, name="DeviceMesh")


def _flatten(nested: object, depth: int = 0) -> tuple[list[int], tuple[int, ...]]:
    """Returns (the ranks in row-major order, the shape of the array) of nested sequences of ints.

    Raises:
        Mismatch: inner sequences have different lengths, or the sequences are nested too deeply.
    """
    if python_number(nested) is not None:
        return [take_integer(nested)], ()
    if depth > _MAX_DIMENSIONS:
        raise Mismatch(
            "expected 1 to 3 dimensions, but the lists of ranks are nested deeper",
            kind=ShardingError,
        )
    listed = list_items(nested, "(nested) lists of ranks", longest=MAX_DEVICES)
    if set(map(type, listed)) == {int}:
        return cast("list[int]", listed), (len(listed),)
    items = [_flatten(item, depth + 1) for item in listed]
    if not items:
        return [], (0,)
    shape = items[0][1]
    if any(s != shape for _, s in items):
        raise Mismatch(
            f"the list of ranks is ragged: all rows must have the same length, got {show(nested)}",
            kind=ShardingError,
        )
    return [i for ids, _ in items for i in ids], (len(items), *shape)


def _flatten_array(devices: object) -> tuple[list[int], tuple[int, ...]] | None:
    """Returns the result of `_flatten` for an array, whose numbers are read at once.

    Returns None for anything else, for an array of other numbers than integers, and for one that is
    empty or too large.
    """
    if not (hasattr(devices, "flatten") and hasattr(devices, "tolist")):
        return None
    array = cast(Any, devices)
    shape = tuple(map(int, array.shape))
    if not 1 <= len(shape) <= _MAX_DIMENSIONS or not 0 < math.prod(shape) <= MAX_DEVICES:
        return None
    try:
        ids = array.flatten().tolist()
    except RuntimeError:
        return None  # a tensor without data
    return (ids, shape) if set(map(type, ids)) == {int} else None


class DeviceMesh:
    """The ranks (one process per device) that store a tensor, as an array of 1 to 3 dimensions.

    `devices` is an integer torch tensor, or nested sequences of ints. A flat list becomes a
    one-dimensional mesh. `mesh_x` is the name of the *last* dimension, `mesh_y` that of the one
    before.

    Raises:
        ArgumentError: `devices` is a single number, which could mean a rank or a number of ranks.
        ShardingError: a rank occurs twice or is negative, inner lists have different lengths, or
            there are more than 3 dimensions.
    """

    @_checked_init
    def __init__(self, devices: object) -> None:
        if isinstance(devices, int):
            n = show(devices)
            raise ArgumentError(
                f"DeviceMesh: expected a list of ranks, got {n}: pass range({n}) for {n} ranks, or "
                f"[{n}] for rank {n} alone"
            )
        try:
            ids, shape = _flatten_array(devices) or _flatten(devices)
        except Mismatch as error:
            raise error.kind(f"DeviceMesh: {error.text}") from None
        if len(shape) > _MAX_DIMENSIONS:
            raise ShardingError(f"DeviceMesh: expected 1 to 3 dimensions, got shape {shape}")
        if len(set(ids)) != len(ids):
            raise ShardingError(
                f"DeviceMesh: each rank must occur once, but {show(ids)} contains duplicates"
            )
        if min(ids, default=0) < 0:
            raise ShardingError(f"DeviceMesh: a rank must be at least 0, got {show(ids)}")
        if max(ids, default=0) > _MAX_RANK:
            raise ShardingError(f"DeviceMesh: a rank must be at most {_MAX_RANK}, got {show(ids)}")
        self.devices: tuple[int, ...] = tuple(ids)
        self.shape: tuple[int, ...] = shape or (1,)
        self._place = {rank: i for i, rank in enumerate(ids)}
        self._hash = hash((self.devices, self.shape))
        self._along: dict[ParallelType, tuple[int, ...]] = {}

    @property
    def size(self) -> int:
        """The number of devices of the mesh."""
        return len(self.devices)

    @property
    def ndim(self) -> int:
        """The number of mesh dimensions, 1 to 3."""
        return len(self.shape)

    @checked
    def dim_of(self, ptype: ParallelType) -> int | None:
        """Returns the index of the mesh dimension with the name `ptype`: `mesh_x` is the last one.

        Returns None if the mesh has no such dimension.
        """
        return self._dim_of(ptype)

    def _dim_of(self, ptype: ParallelType) -> int | None:
        if not ptype.is_device:
            raise ShardingError(
                f"{self} has no dimension {ptype.text}: expected a device type, such as mesh_x"
            )
        dim = self.ndim - 1 - DEVICE_TYPES.index(ptype)
        return dim if dim >= 0 else None

    @checked
    def size_of(self, ptype: ParallelType) -> int:
        """Returns the number of devices along the mesh dimension `ptype`, such as `mesh_x`.

        Returns 1 if the mesh has no such dimension.
        """
        dim = self._dim_of(ptype)
        return 1 if dim is None else self.shape[dim]

    @checked
    def has(self, rank: int) -> bool:
        """Returns whether `rank` belongs to the mesh."""
        return rank in self._place

    @checked
    def coordinate(self, rank: int, ptype: ParallelType) -> int:
        """Returns the position of `rank` along the mesh dimension `ptype`, such as `mesh_x`.

        Returns 0 if the mesh lacks that dimension or that rank.
        """
        dim = self.dim_of(ptype)
        return 0 if dim is None else self._coordinates(rank)[dim]

    def _coordinates(self, rank: int) -> list[int]:
        """Returns the position of `rank` along each mesh dimension.

        If the mesh lacks the rank, all positions are 0.
        """
        at = self._place.get(rank, 0)
        return [at // math.prod(self.shape[d + 1 :]) % n for d, n in enumerate(self.shape)]

    @checked
    def coordinates(self, ptype: ParallelType) -> tuple[int, ...]:
        """Returns the position of each device along the mesh dimension `ptype`, such as `mesh_x`.

        The positions are in the order of `devices`.
        """
        if ptype not in self._along:
            dim = self.dim_of(ptype)
            if dim is None:
                self._along[ptype] = (0,) * self.size
            else:
                inner, outer = (math.prod(n) for n in (self.shape[dim + 1 :], self.shape[:dim]))
                row: Iterable[int] = range(self.shape[dim])
                if inner > 1:
                    row = itertools.chain.from_iterable(itertools.repeat(i, inner) for i in row)
                self._along[ptype] = tuple(row) * outer
        return self._along[ptype]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the mesh in ascending order."""
        return tuple(sorted(self.devices))

    @checked
    def team(self, rank: int, ptypes: tuple[ParallelType, ...]) -> tuple[int, ...]:
        """Returns the ranks with the coordinates of `rank` on all mesh dimensions except `ptypes`.

        `rank` itself is one of them. Such ranks take part in one collective communication. For the
        mesh [[0 1 2][3 4 5]], team(4, (mesh_x,)) = (3, 4, 5) and team(4, (mesh_y,)) = (1, 4).
        """
        free = {self.dim_of(p) for p in ptypes}
        found = [self.devices]
        for d, (n, at) in enumerate(zip(self.shape, self._coordinates(rank), strict=True)):
            inner = math.prod(self.shape[d + 1 :])
            chosen = range(n) if d in free else (at,)
            if d == self.ndim - 1 and d in free:
                break  # each part is a row of the team
            found = [part[i * inner : (i + 1) * inner] for part in found for i in chosen]
        return tuple(itertools.chain.from_iterable(found))

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, DeviceMesh)
            and self._hash == other._hash
            and self.devices == other.devices
            and self.shape == other.shape
        )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def ranks_text(self) -> str:
        """The text of the ranks, without the outermost braces: `0 1`, `{0 1}{2 3}`, `0..1023`."""
        return _items_text(self.devices, self.shape, is_short=self.size > SPELLED_OUT)

    def __repr__(self) -> str:
        return f"DeviceMesh{{{self.ranks_text}}}"


# ------------------------------------------------------------------ text
def _items_text(ids: Sequence[int], shape: tuple[int, ...], *, is_short: bool) -> str:
    """Returns the text of an array of ranks, which has one item per index of its first dimension.

    An item is a rank if the array has one dimension, and otherwise the text of an array in braces.
    `ids` has the ranks in row-major order. If `is_short` is True, three or more items at equal
    distances become a range, such as `0..7` or `0..56 by 8`.
    """
    count = len(ids) // shape[0] if shape[0] else 0

    def text(at: int) -> str:
        if len(shape) == 1:
            return str(ids[at])
        block = ids[at * count : (at + 1) * count]
        return "{" + _items_text(block, shape[1:], is_short=is_short) + "}"

    items: list[str] = []
    at = 0
    while at < shape[0]:
        length, step = _run(ids, count, at) if is_short else (1, 0)
        if length >= 3:
            by = "" if step == count else f" by {step}"
            items.append(f"{text(at)}..{text(at + length - 1)}{by}")
        else:
            items.append(text(at))
        at += length if length >= 3 else 1
    return (" " if len(shape) == 1 else "").join(items)


def _run(ids: Sequence[int], count: int, at: int) -> tuple[int, int]:
    """Returns (number of items, distance) of the longest range that begins with item number `at`.

    `ids` are the ranks of a mesh. An item is a group of `count` consecutive ranks in this list. A
    range is a row of items in which each rank is the corresponding rank of the item before plus
    the same distance. A range has a short text, such as `0..56 by 8`.
    """
    if (at + 1) * count >= len(ids):
        return 1, 0
    step = ids[(at + 1) * count] - ids[at * count]
    if step < 1:
        return 1, step
    start = at * count
    # A block follows the one before by the step: so does each of its ids.
    pairs = zip(
        itertools.islice(ids, start, None), itertools.islice(ids, start + count, None), strict=False
    )
    same = itertools.takewhile(lambda pair: pair[1] - pair[0] == step, pairs)
    return 1 + sum(1 for _ in same) // count, step


def ranks_of(meshes: Iterable[DeviceMesh]) -> tuple[int, ...]:
    """Returns the ranks of all meshes, each rank once, in ascending order."""
    ranks = {mesh.ranks for mesh in set(meshes)}
    return ranks.pop() if len(ranks) == 1 else tuple(sorted(set[int]().union(*ranks)))


def read_mesh(cursor: Cursor) -> DeviceMesh:
    """Reads the text of a mesh, such as `DeviceMesh{0 1}`, at the cursor.

    Afterwards, the cursor is behind this text.

    Raises:
        ParseError: the text is not that of a mesh.
    """
    cursor.skip()
    start, depth = cursor.pos, 0
    for brace in _BRACES.finditer(cursor.text, start, cursor.end):
        depth += 1 if brace.group() == "{" else -1
        if depth <= 0:
            if (cached := _known(cursor, brace.end())) is not None:
                return cached
            break
    cursor.take("DeviceMesh")
    cursor.take("{")
    return _made(cursor, start, _read_items(cursor, "}", 1))


def read_ranks(cursor: Cursor) -> DeviceMesh:
    """Reads a list of ranks at the cursor, such as `(0 1 2)` or `(0..1023)`.

    Returns them as a one-dimensional mesh. Afterwards, the cursor is behind the list.

    Raises:
        ParseError: the text is not a list of ranks. The error has the position.
    """
    cursor.skip()
    start, end = cursor.pos, cursor.text.find(")", cursor.pos, cursor.end) + 1
    if (known := _known(cursor, end)) is not None:
        return known
    cursor.take("(")
    items = _read_items(cursor, ")", 1)
    if any(isinstance(item, list) for item in items):
        raise cursor.fail(
            "expected a list of ranks, such as (0 1 2), but found nested braces", start
        )
    return _made(cursor, start, items)


def _made(cursor: Cursor, start: int, items: list[object]) -> DeviceMesh:
    try:
        mesh = DeviceMesh(items)
    except FuserError as error:
        raise cursor.fail(str(error), start) from error
    _read[cursor.text[start : cursor.pos]] = mesh
    return mesh


def _known(cursor: Cursor, end: int) -> DeviceMesh | None:
    """Returns the mesh that was read earlier from an equal text, or None.

    The text reaches from the cursor to position `end`. If the mesh is found in the cache, the
    cursor moves to `end`.
    """
    known = _read.recall(cursor.text[cursor.pos : end])
    if known is not None:
        cursor.pos = end
    return known


def _read_items(c: Cursor, close: str, depth: int) -> list[object]:
    if depth > _MAX_DIMENSIONS:
        raise c.fail(f"a mesh has at most {_MAX_DIMENSIONS} dimensions")
    items: list[object] = []
    while not c.take_if(close):
        items.append(_read_item(c, depth))
        at = c.pos
        if c.take_if(".."):
            last = _read_item(c, depth)
            items += _after(c, items[-1], last, c.integer() if c.take_if("by ") else None, at)
    return items


def _read_item(c: Cursor, depth: int) -> object:
    return _read_items(c, "}", depth + 1) if c.take_if("{") else c.integer()


def _after(c: Cursor, first: object, last: object, step: int | None, at: int) -> list[object]:
    """Returns the items of a range in the text of a mesh, except the first one.

    The text of the range is `first..last by step`. An item is a rank, or a nested list of ranks. If
    the text has no `by`, `step` is None, and the distance is the number of ranks in an item. `c`
    has the text, and `at` is the position in it that an error message shows.
    """
    try:
        (ids, shape), (ends, other) = _flatten(first), _flatten(last)
    except FuserError as error:
        raise c.fail(str(error), at) from error
    step = len(ids) if step is None else step
    count, rest = divmod(ends[0] - ids[0], step) if ids and ends and step > 0 else (0, 1)
    if shape != other or rest or count < 1 or [i + count * step for i in ids] != ends:
        raise c.fail(f"not a range: steps of {step} from {first} do not reach {last}", at)
    if count * len(ids) > MAX_DEVICES:
        raise c.fail(f"a range may have at most {MAX_DEVICES} ranks", at)
    return [_shifted(first, k * step) for k in range(1, count + 1)]


def _shifted(item: object, by: int) -> object:
    if isinstance(item, int):
        return item + by
    return [_shifted(i, by) for i in cast("list[object]", item)]


def ranks_text(ranks: Sequence[int]) -> str:
    """Returns ranks in words, for messages: `rank 3`, `ranks 0 1`, `ranks 0..1023`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {DeviceMesh(list(map(int, ranks))).ranks_text}"
