"""DeviceMesh: an n-dimensional array of ranks. mesh_x is the *last* mesh dimension."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol, cast

from fuser.errors import ShardingError, check_kind
from fuser.ir.types import DEVICE_TYPES, ParallelType


class _HasToList(Protocol):
    def tolist(self) -> object: ...


def _flatten(nested: object) -> tuple[list[int], tuple[int, ...]]:
    """Return (row-major ids, shape) of nested sequences of ints."""
    if isinstance(nested, int):
        return [nested], ()
    is_text = isinstance(nested, str | bytes)
    check_kind(nested, int if is_text else Iterable, "DeviceMesh: expected (nested) lists of ranks")
    items = [_flatten(item) for item in cast(Iterable[object], nested)]
    if not items:
        return [], (0,)
    shape = items[0][1]
    if any(s != shape for _, s in items):
        raise ShardingError(f"DeviceMesh: ragged device list {nested}")
    return [i for ids, _ in items for i in ids], (len(items), *shape)


class DeviceMesh:
    """Ranks arranged in 1 to 3 dimensions.

    `devices`: an integer torch tensor of any rank, or nested sequences of ints (a flat one is 1-D).
    Raises `ShardingError` for duplicates, negative ids or more than 3 dimensions.
    """

    def __init__(self, devices: object) -> None:
        nested = cast(_HasToList, devices).tolist() if hasattr(devices, "tolist") else devices
        ids, shape = _flatten(list(nested) if isinstance(nested, range) else nested)
        if len(shape) > 3:
            raise ShardingError(f"DeviceMesh: 1 to 3 dimensions, got shape {shape}")
        if len(set(ids)) != len(ids):
            raise ShardingError(f"DeviceMesh {ids} contains duplicates")
        if any(i < 0 for i in ids):
            raise ShardingError(f"DeviceMesh: negative device id in {ids}")
        self.devices: tuple[int, ...] = tuple(ids)
        self.shape: tuple[int, ...] = shape or (1,)

    @property
    def size(self) -> int:
        """Number of devices."""
        return len(self.devices)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim_of(self, ptype: ParallelType) -> int | None:
        """Return the mesh dimension of a device type (mesh_x: the last), None if there is none."""
        dim = self.ndim - 1 - DEVICE_TYPES.index(ptype)
        return dim if dim >= 0 else None

    def size_of(self, ptype: ParallelType) -> int:
        """Return how many devices lie along `ptype` (1 when the mesh has no such dimension)."""
        dim = self.dim_of(ptype)
        return 1 if dim is None else self.shape[dim]

    def has(self, rank: int) -> bool:
        return rank in self.devices

    def coordinate(self, rank: int, ptype: ParallelType) -> int:
        """Return the position of `rank` along `ptype`; 0 without that dimension or that rank."""
        dim = self.dim_of(ptype)
        if dim is None or rank not in self.devices:
            return 0
        return self.devices.index(rank) // math.prod(self.shape[dim + 1 :]) % self.shape[dim]

    def team(self, rank: int, ptypes: tuple[ParallelType, ...]) -> tuple[int, ...]:
        """Return the ranks that share all of `rank`'s coordinates except those along `ptypes`.

        Mesh [[0 1 2][3 4 5]]: team(4, (mesh_x,)) = (3, 4, 5), team(4, (mesh_y,)) = (1, 4).
        """
        fixed = [p for p in DEVICE_TYPES if p not in ptypes]
        mine = [self.coordinate(rank, p) for p in fixed]
        return tuple(d for d in self.devices if [self.coordinate(d, p) for p in fixed] == mine)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, DeviceMesh)
            and self.devices == other.devices
            and self.shape == other.shape
        )

    def __hash__(self) -> int:
        return hash((self.devices, self.shape))

    def __repr__(self) -> str:
        def nest(ids: tuple[int, ...], shape: tuple[int, ...]) -> str:
            if len(shape) == 1:
                return "{" + " ".join(map(str, ids)) + "}"
            step = len(ids) // shape[0]
            parts = (nest(ids[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0]))
            return "{" + "".join(parts) + "}"

        return f"DeviceMesh{nest(self.devices, self.shape)}"
