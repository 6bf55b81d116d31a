"""Scales of blocks in the order in which matrix units of GPUs read them.

Tiles of 128 rows and 4 columns lie one behind the other, the columns' before the rows'. In a tile,
element (r, c) is number (r % 32) * 16 + (r // 32) * 4 + c.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fuser.ir.dtypes import DataType
from fuser.ir.fusion import AxisMap
from fuser.ir.op import operand, result
from fuser.ir.ops.nodes import LibraryOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.support.errors import VerifyError

if TYPE_CHECKING:
    from fuser.ir.tensor import TensorView

TILE_ROWS, TILE_COLUMNS = 128, 4
# Threads of a warp: each reads 16 bytes of a tile, from four rows that are so far apart.
LANES = 32


def whole_tiles(extent: Scalar, size: int) -> Scalar:
    """Return how many tiles of a size hold an extent."""
    return sc.truncdiv(sc.add(extent, size - 1), size)


def padding(dtype: DataType) -> float:
    """Return the value of no bits: 0, or the least one of a dtype of powers of two."""
    return 2.0**-127 if dtype is DataType.Float8_e8m0fnu else 0


def tiles_of_groups(rows: Scalar, groups: Scalar) -> Scalar:
    """Return the most tiles that rows fill in so many groups, each of which has tiles of its own:
    an incomplete one lacks 127 rows at most."""
    return sc.truncdiv(sc.add(rows, sc.mul(groups, TILE_ROWS - 1)), TILE_ROWS)


class GroupedScalesOp(LibraryOp):
    """out has the rows of group i, of inp from input_offsets[i] up to the next group's, in tiles
    from row output_offsets[i] on; what belongs to no group is 0."""

    out: TensorView = result()
    inp: TensorView = operand()
    input_offsets: TensorView = operand()
    output_offsets: TensorView = operand()
    TEXT = (
        "{out} = PreprocessGroupedMatmulInputSf(input={inp}, input_offsets={input_offsets}, "
        "output_offsets={output_offsets})"
    )
    RUNS_IN_STEPS: ClassVar[bool] = False
    TAKES_EMPTY: ClassVar[bool] = True
    READS_ON_HOST: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return "preprocess_grouped_matmul_input_sf"

    def axis_map(self, operand_index: int) -> AxisMap:
        """Rows and columns of tiles are no axes of the operands."""
        return (None, None)

    def whole_axes(self, out: TensorView) -> tuple[int, ...]:
        return (0, 1)

    def whole_operand_axes(self, operand_index: int) -> tuple[int, ...]:
        return tuple(range(self.inputs[operand_index].ndim))

    def verify(self) -> None:
        offsets = self.input_offsets, self.output_offsets
        if any(tv.ndim != 1 or tv.dtype() is not DataType.Int32 for tv in offsets):
            raise VerifyError(
                f"{self.name}: Int32 offsets of one axis, not {offsets[0]}, {offsets[1]}"
            )
        if self.inp.ndim != 2 or self.out.ndim != 2 or self.inp.dtype() is not self.out.dtype():
            raise VerifyError(f"{self.name}: {self.inp} does not give {self.out}")
