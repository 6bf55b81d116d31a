"""Tiles in shared memory without bank conflicts: where padding goes, found by counting.

A tile is written along its columns and read along its rows. After each `group` rows `pad` elements
are left out, so that element (r, c) lies at

    (r // group) * (group * columns + pad) + (r % group) * columns + c

Source: the CUDA C++ Programming Guide: 32 banks of 4 bytes; the lanes of a warp that ask for
different words of one bank wait for each other; accesses of 8 bytes are served to half a warp at a
time, those of 16 bytes to a quarter.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from fuser.support.record import record

WARP = 32
WORD_BYTES = 4
# The pattern of a tile repeats itself after few warps.
_WARPS = 4


@record
class Tile:
    """A tile of elements of `nbytes`: threads write `write` neighbours of a row, the next thread
    the next ones; they read `read` neighbours of a column, one by one, the next thread the next."""

    rows: int
    columns: int
    nbytes: int
    write: int
    read: int


@record
class Padding:
    """`pad` elements behind each `group` rows; `vector` elements are written at once."""

    group: int
    pad: int
    vector: int

    def place(self, tile: Tile, row: int, column: int) -> int:
        """Return where an element lies."""
        block, rest = divmod(row, self.group)
        return block * (self.group * tile.columns + self.pad) + rest * tile.columns + column


@lru_cache(maxsize=1024)
def padding_for(tile: Tile) -> Padding:
    """Return the padding with the fewest conflicts: of several the one with the widest writes,
    then the least of them."""
    return min(_candidates(tile), key=lambda p: (sum(_turns(tile, p)), -p.vector, p.pad / p.group))


def has_conflicts(tile: Tile) -> bool:
    """Whether lanes wait for each other in the best padding."""
    return _turns(tile, padding_for(tile)) != (1, 1)


def _candidates(tile: Tile) -> Iterable[Padding]:
    word = max(WORD_BYTES // tile.nbytes, 1)
    for vector in dict.fromkeys((tile.write, 1)):
        for group in dict.fromkeys((tile.read, 1)):
            for pad in dict.fromkeys((0, 1, word, tile.write)):
                if pad % vector == 0:
                    yield Padding(group, pad, vector)


def _turns(tile: Tile, padding: Padding) -> tuple[int, int]:
    """Return how often a bank is asked at most for one write, and for one read."""
    across, down = tile.columns // tile.write, tile.rows // tile.read
    writes = reads = 1
    for first in range(0, _WARPS * WARP, WARP):
        lanes = range(first, first + WARP)
        written = [(q // across, q % across * tile.write) for q in lanes if q < across * tile.rows]
        read = [(q % down * tile.read, q // down) for q in lanes if q < down * tile.columns]
        places = [padding.place(tile, r, c) for r, c in written]
        writes = max(writes, turns(places, padding.vector * tile.nbytes, tile.nbytes))
        places = [padding.place(tile, r, c) for r, c in read]
        reads = max(reads, turns(places, tile.nbytes, tile.nbytes))
    return writes, reads


def turns(elements: Iterable[int], access: int, nbytes: int) -> int:
    """Return how many words the lanes ask one bank for at most, at the same time: 1 means no
    conflict. `access` are the bytes that a lane moves from its element (of `nbytes`) on."""
    begins = [e * nbytes for e in elements]
    share = WARP if access <= WORD_BYTES else WARP * WORD_BYTES // access
    most = 1
    for k in range(0, len(begins), share):
        words = {
            w
            for begin in begins[k : k + share]
            for w in range(begin // WORD_BYTES, -(-(begin + access) // WORD_BYTES))
        }
        banks = [w % WARP for w in words]
        most = max([most, *map(banks.count, set(banks))])
    return most
