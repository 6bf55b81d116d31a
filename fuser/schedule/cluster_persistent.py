"""The cluster persistent scheduler: the inner persistent one for rows that exceed a block.

A cluster of blocks, which run at the same time and read each other's shared memory, takes a row:

    GPU kept    [BIDx rows | r S 1, r BIDy, r UR, r TIDx | r V]
    GPU looped  [BIDx rows | r S, r BIDy, r UR, r TIDx | r V]

Kept: its threads hold the row. Looped, for rows that do not fit: all levels but the first find it
in the cache of second level. No GPU was measured yet: `FUSER_ENABLE=clusters` asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fuser.device import DeviceInfo
from fuser.ir.fusion import Fusion
from fuser.ir.scalar import Number, Symbol
from fuser.schedule import inner_persistent, inner_persistent_params
from fuser.schedule.facts import Facts
from fuser.schedule.inner_persistent_params import InnerPersistentParams

# Rows of more elements are a cluster's, where there are so many of them that all multiprocessors
# have one.
LONGEST_ROW_OF_A_BLOCK = max(columns for columns, _ in inner_persistent.ROWS_THAT_PAY)
FEWEST_ROWS = 64


def pays(rows: int, columns: int) -> bool:
    """Whether one kernel of clusters takes no longer than several, which share a row between
    blocks."""
    return columns > LONGEST_ROW_OF_A_BLOCK and rows >= FEWEST_ROWS


def suits(fusion: Fusion, sizes: Mapping[Symbol, Number]) -> bool:
    """Whether one kernel pays for these sizes."""
    known = inner_persistent.rows_of(fusion, sizes)
    return known is not None and pays(*known)


def chooser(fusion: Fusion, device: DeviceInfo) -> Callable[[Facts], InnerPersistentParams]:
    """Return what chooses the form and the shape of a cluster for an input class."""
    return inner_persistent_params.chooser(fusion, device, in_clusters=True)


accepts = inner_persistent.accepts
apply = inner_persistent.apply
generic = inner_persistent_params.generic
