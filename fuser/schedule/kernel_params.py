"""LaunchParams and CompileParams: what a user may ask of one kernel's launch and compilation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol

import torch

from fuser.ir.dtypes import DataType
from fuser.support.errors import DefinitionError, UnsupportedError


class Launched(Protocol):
    """A launch: its blocks, and the threads of each."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]


@dataclass
class LaunchParams:
    """Threads and blocks of a launch along x, y and z; -1 leaves one to the schedule."""

    gdimx: int = -1
    gdimy: int = -1
    gdimz: int = -1
    bdimx: int = -1
    bdimy: int = -1
    bdimz: int = -1

    def check(self, launch: Launched) -> None:
        """Raise `DefinitionError` where the schedule says otherwise: it alone decides."""
        made = dict(zip((f.name for f in fields(self)), (*launch.grid, *launch.block), strict=True))
        for name, found in made.items():
            if getattr(self, name) not in (-1, found):
                raise DefinitionError(
                    f"launch constraint {name}={getattr(self, name)}: the schedule makes it {found}"
                )

    def __repr__(self) -> str:
        block = ", ".join(f"BlockDim.{d} = {getattr(self, f'bdim{d}')}" for d in "xyz")
        grid = ", ".join(f"GridDim.{d} = {getattr(self, f'gdim{d}')}" for d in "xyz")
        return f"Launch Parameters: {block}, {grid}"


@dataclass(kw_only=True)
class CompileParams:
    """How a kernel is compiled: nvFuser's names and defaults.

    `index_type` and `device` must be what inputs make them; the others are fixed here.
    """

    index_type: DataType | None = None
    maxrregcount: int = 255
    enable_magic_zero: bool = True
    enable_ptxas_verbose: bool = False
    device: torch.device | str | None = None
    include_paths: Sequence[str] = field(default_factory=list[str])

    def check(self) -> None:
        """Raise `UnsupportedError` for what this compiler does not do."""
        usual = CompileParams()
        for name in ("maxrregcount", "enable_magic_zero", "enable_ptxas_verbose", "include_paths"):
            if getattr(self, name) != getattr(usual, name):
                raise UnsupportedError(
                    f"CompileParams: {name}={getattr(self, name)}: kernels are compiled with "
                    f"{getattr(usual, name)}"
                )

    def check_kernel(self, index_type: DataType, device: torch.device) -> None:
        """Raise `DefinitionError` for a kernel of another index type, or on another device."""
        if self.index_type not in (None, index_type):
            raise DefinitionError(
                f"CompileParams: index_type={self.index_type.name}: inputs of these sizes are "
                f"indexed by {index_type.name}"
            )
        if self.device is not None and torch.device(self.device).type != device.type:
            raise DefinitionError(f"CompileParams: device={self.device}: inputs are on {device}")

    def __repr__(self) -> str:
        index = "NotSet" if self.index_type is None else self.index_type.name
        rest = (f"{f.name} = {getattr(self, f.name)}" for f in fields(self)[1:])
        return f"Compile Parameters: index_type = {index}, {', '.join(rest)}"
