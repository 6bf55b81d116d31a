"""A product of matrices per group, where each group has a part of a shared axis.

Axes have letters: g the groups, m rows, n columns, k what is summed over. The groups divide one of
m, n, k, the *ragged* one: group i has the positions from offsets[i - 1], of the first group from 0,
up to offsets[i].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from fuser.errors import VerifyError
from fuser.ir.core import operand, result
from fuser.ir.dtypes import DataType
from fuser.ir.nodes import AxisMap, LibraryOp

if TYPE_CHECKING:
    from fuser.ir.tensor import TensorView


class GroupedMmaOp(LibraryOp):
    """The ragged axis is the one that has no g beside it: k of two matrices, whose result then has
    an axis g, n of a batch and a matrix, m of a matrix and a batch. Of m and n what belongs to no
    group is 0.

    The last axis of out is the reduction k, unless its size is 1.
    """

    out: TensorView = result()
    mat1: TensorView = operand()
    mat2: TensorView = operand()
    offsets: TensorView = operand()
    TEXT = "{out} = GroupedMmaOp(mat1={mat1}, mat2={mat2}, offsets={offsets})"
    RUNS_IN_STEPS: ClassVar[bool] = False
    KEEPS_EXPANDED: ClassVar[bool] = False
    READS_ON_HOST: ClassVar[bool] = True
    # By the ranks of mat1 and mat2: the ragged axis, and the axes of mat1, mat2 and out.
    FORMS: ClassVar[dict[tuple[int, int], tuple[str, str, str, str]]] = {
        (2, 2): ("k", "mk", "kn", "gmn"),
        (3, 2): ("n", "gmk", "kn", "mn"),
        (2, 3): ("m", "mk", "gkn", "mn"),
    }

    @property
    def name(self) -> str:
        return "grouped_mm"

    @property
    def ragged(self) -> str:
        return self.FORMS[self.mat1.ndim, self.mat2.ndim][0]

    def tensors(self) -> Iterator[tuple[str, TensorView]]:
        """Yield each tensor with its field, the result last."""
        for field in ("mat1", "mat2", "offsets", "out"):
            yield field, getattr(self, field)

    def letters(self, field: str) -> str:
        """Return the letters of a field's axes, reductions left out."""
        if field == "offsets":
            return "g"
        _, *axes = self.FORMS[self.mat1.ndim, self.mat2.ndim]
        return axes[("mat1", "mat2", "out").index(field)]

    def is_whole(self, letter: str) -> bool:
        """Whether all of an axis is needed to compute any of it: groups anywhere in the ragged axis
        have their positions from its beginning."""
        return letter in ("g", "k", self.ragged)

    def _root_letters(self) -> str:
        axes = self.out.domain.maybe_root
        has_k = bool(axes) and axes[-1].is_reduction()
        return self.letters("out") + "k" * has_k

    def _operand_letters(self, operand_index: int) -> str:
        return self.letters(("mat1", "mat2", "offsets")[operand_index])

    def axis_map(self, operand_index: int) -> AxisMap:
        mine = self._operand_letters(operand_index)
        return tuple(mine.index(c) if c in mine else None for c in self._root_letters())

    def cut_map(self, operand_index: int, out: TensorView) -> AxisMap:
        whole = self.whole_axes(out)
        found = enumerate(self.axis_map(operand_index))
        return tuple(None if k in whole else place for k, place in found)

    def whole_axes(self, out: TensorView) -> tuple[int, ...]:
        return tuple(k for k, c in enumerate(self._root_letters()) if self.is_whole(c))

    def whole_operand_axes(self, operand_index: int) -> tuple[int, ...]:
        letters = self._operand_letters(operand_index)
        return tuple(k for k, c in enumerate(letters) if self.is_whole(c))

    def verify(self) -> None:
        if (self.mat1.ndim, self.mat2.ndim) not in self.FORMS:
            raise VerifyError(f"grouped_mm: {self.mat1} and {self.mat2} are not of ranks 2 and 3")
        for field, tv in self.tensors():
            letters = self.letters(field)
            if tv.ndim != len(letters):
                raise VerifyError(f"grouped_mm: {field} has axes [{', '.join(letters)}], not {tv}")
        same = self.mat1.dtype() is self.mat2.dtype() is self.out.dtype()
        if not same or self.offsets.dtype() is not DataType.Int32:
            found = ", ".join(str(tv) for _, tv in self.tensors())
            raise VerifyError(f"grouped_mm: matrices of one dtype by Int32 offsets, not {found}")
