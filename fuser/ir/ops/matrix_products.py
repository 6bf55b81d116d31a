"""Products of two matrices that are more than one call of matmul: per group, and of scaled floats.

Axes have letters: g the groups, m rows, n columns, k what is summed over, 1 what has one element.
Groups divide one of m, n, k, the *ragged* one: group i has the positions from offsets[i - 1], of
the first group from 0, up to offsets[i].
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from fuser.ir.dtypes import DataType, is_floating
from fuser.ir.fusion import AxisMap, Variant
from fuser.ir.op import operand, result
from fuser.ir.ops.nodes import LibraryOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.support.errors import VerifyError

if TYPE_CHECKING:
    from fuser.ir.domain.tensor_domain import IterDomain
    from fuser.ir.fusion import TensorView

# What floats of one byte may be multiplied.
FACTORS = (DataType.Float8_e4m3fn, DataType.Float8_e5m2)


def _is_one(axis: IterDomain) -> bool:
    """Whether an axis has one element, and is not that element many times."""
    return axis.is_broadcast and axis.expanded is None


class ProductOp(LibraryOp):
    """Base. With scales, matrices have floats of one byte, and
    out = alpha * sum_k (scale1 * mat1) * (scale2 * mat2) + beta * bias, without what is not there.

    The last axis of out is the reduction k, unless its size is 1.
    """

    if TYPE_CHECKING:
        out: TensorView
        mat1: TensorView
        mat2: TensorView
        scale1: TensorView | None
        scale2: TensorView | None
        alpha: TensorView | None
        bias: TensorView | None
        beta: TensorView | None

    RUNS_IN_STEPS: ClassVar[bool] = False
    KEEPS_EXPANDED: ClassVar[bool] = False
    TAKES_EMPTY: ClassVar[bool] = True
    OPTIONAL: ClassVar[tuple[str, ...]] = ("alpha", "bias", "beta")
    # The letters of what beside the matrices has so many axes; an axis of one element has none, and
    # so has a tensor of one element with any other number of axes.
    SCALES: ClassVar[dict[str, dict[int, str]]] = {
        "scale1": {2: "m1"},
        "scale2": {2: "1n"},
        "alpha": {},
        "bias": {1: "n", 2: "mn"},
        "beta": {},
    }

    def template(self) -> str:
        return self._template([f for f, _ in self.tensors() if f != "out"])

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        for given in itertools.product((True, False), repeat=len(cls.OPTIONAL)):
            yield cls._variant([f for f, has in zip(cls.OPTIONAL, given, strict=True) if not has])

    @classmethod
    def _variant(cls, absent: list[str]) -> Variant:
        fields = [f for f in cls.fields_of("operand") if f not in absent]
        return {**dict.fromkeys(absent)}, cls._template(fields)

    @classmethod
    def _template(cls, fields: list[str]) -> str:
        return f"{{out}} = {cls.__name__}(" + ", ".join(f"{f}={{{f}}}" for f in fields) + ")"

    @property
    def is_scaled(self) -> bool:
        return self.scale1 is not None

    def tensors(self) -> Iterator[tuple[str, TensorView]]:
        """Yields each tensor with its field, the result last."""
        for field in (*self.fields_of("operand"), "out"):
            value = getattr(self, field)
            if value is not None:
                yield field, value

    @classmethod
    def matrices(cls, mat1: TensorView, mat2: TensorView) -> Mapping[str, str]:
        """Returns the letters of the axes of matrices and offsets, by field."""
        raise NotImplementedError

    def letters(self, field: str) -> str:
        """Returns the letters of a field's axes, reductions left out."""
        known = self.matrices(self.mat1, self.mat2)
        if field in known:
            return known[field]
        tv: TensorView = getattr(self, field)
        letters = self.SCALES[field].get(tv.ndim, "1" * tv.ndim)
        axes = zip(tv.domain.no_reductions, letters, strict=True)
        return "".join("1" if _is_one(axis) else c for axis, c in axes)

    def is_whole(self, letter: str) -> bool:
        """Whether all of an axis is needed to compute any of it."""
        raise NotImplementedError

    def _root_letters(self) -> str:
        axes = self.out.domain.maybe_root
        has_k = bool(axes) and axes[-1].is_reduction()
        return self.letters("out") + "k" * has_k

    def _operand_letters(self, operand_index: int) -> str:
        fields = [f for f, _ in self.tensors()]
        return self.letters(fields[operand_index])

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
        for field, tv in self.tensors():
            self._verify_axes(field, tv)
        scales = self.scale1, self.scale2, self.alpha, self.beta
        if None in scales[:2] and any(tv is not None for tv in (*scales, self.bias)):
            raise VerifyError(f"{self.name}: two scales or nothing beside matrices, of {self.out}")
        if not self.is_scaled:
            return
        if self.mat1.dtype() not in FACTORS or self.mat2.dtype() not in FACTORS:
            raise VerifyError(f"{self.name}: floats of one byte, not {self.mat1}, {self.mat2}")
        if any(tv is not None and tv.dtype() is not DataType.Float for tv in scales):
            raise VerifyError(f"{self.name}: scales are Float, not those of {self.out}")
        if not is_floating(self.out.dtype()) or (self.beta is not None and self.bias is None):
            raise VerifyError(
                f"{self.name}: a floating result, and beta with a bias, not {self.out}"
            )

    def _verify_axes(self, field: str, tv: TensorView) -> None:
        known = self.matrices(self.mat1, self.mat2)
        forms = {len(known[field]): known[field]} if field in known else self.SCALES[field]
        axes = zip(tv.domain.no_reductions, forms.get(tv.ndim, "1" * tv.ndim), strict=True)
        has_more = any(c == "1" and not _is_one(axis) for axis, c in axes)
        if has_more or (tv.ndim not in forms and field in (*known, "bias")):
            wanted = " or ".join(f"[{', '.join(f)}]" for f in forms.values())
            raise VerifyError(f"{self.name}: {field} has axes {wanted or '[]'}, not {tv}")


class GroupedMmaOp(ProductOp):
    """The ragged axis is the one that has no g beside it: k of two matrices, whose result then has
    an axis g, n of a batch and a matrix, m of a matrix and a batch. Of m and n what belongs to no
    group is 0, without the bias.

    Without scales, matrices have any floating dtype, which is the result's.
    """

    out: TensorView = result()
    mat1: TensorView = operand()
    mat2: TensorView = operand()
    offsets: TensorView = operand()
    scale1: TensorView | None = operand()
    scale2: TensorView | None = operand()
    alpha: TensorView | None = operand()
    bias: TensorView | None = operand()
    beta: TensorView | None = operand()
    READS_ON_HOST: ClassVar[bool] = True
    # By the ranks of mat1 and mat2: the ragged axis, and the axes of mat1, mat2 and out.
    FORMS: ClassVar[dict[tuple[int, int], tuple[str, str, str, str]]] = {
        (2, 2): ("k", "mk", "kn", "gmn"),
        (3, 2): ("n", "gmk", "kn", "mn"),
        (2, 3): ("m", "mk", "gkn", "mn"),
    }
    # Each may have an element, row, column or matrix per group.
    SCALES: ClassVar[dict[str, dict[int, str]]] = {
        "scale1": {2: "m1", 3: "gm1"},
        "scale2": {2: "1n", 3: "g1n"},
        "alpha": {1: "g"},
        "bias": {1: "n", 2: "mn", 3: "gmn"},
        "beta": {1: "g"},
    }

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        yield cls._variant([*cls.SCALES])
        yield from super().variants()

    @property
    def name(self) -> str:
        return "grouped_mm"

    @property
    def ragged(self) -> str:
        return self.FORMS[self.mat1.ndim, self.mat2.ndim][0]

    @classmethod
    def matrices(cls, mat1: TensorView, mat2: TensorView) -> Mapping[str, str]:
        _, *letters, out = cls.FORMS[mat1.ndim, mat2.ndim]
        return {"mat1": letters[0], "mat2": letters[1], "offsets": "g", "out": out}

    def is_whole(self, letter: str) -> bool:
        """Groups anywhere in the ragged axis have their positions from its beginning."""
        return letter in ("g", "k", self.ragged)

    def verify(self) -> None:
        if (self.mat1.ndim, self.mat2.ndim) not in self.FORMS:
            raise VerifyError(f"grouped_mm: {self.mat1} and {self.mat2} are not of ranks 2 and 3")
        super().verify()
        same = self.is_scaled or self.mat1.dtype() is self.mat2.dtype() is self.out.dtype()
        if not same or self.offsets.dtype() is not DataType.Int32:
            found = ", ".join(str(tv) for _, tv in self.tensors())
            raise VerifyError(f"grouped_mm: matrices of one dtype by Int32 offsets, not {found}")


class ScaledMmaOp(ProductOp):
    """A product of two matrices with scales of one element, or one for each row of mat1 [m, 1] and
    each column of mat2 [1, n]; bias is [n] or [m, n]."""

    out: TensorView = result()
    mat1: TensorView = operand()
    mat2: TensorView = operand()
    scale1: TensorView = operand()
    scale2: TensorView = operand()
    alpha: TensorView | None = operand()
    bias: TensorView | None = operand()
    beta: TensorView | None = operand()

    @property
    def name(self) -> str:
        return "scaled_mm"

    @classmethod
    def matrices(cls, mat1: TensorView, mat2: TensorView) -> Mapping[str, str]:
        return {"mat1": "mk", "mat2": "kn", "out": "mn"}

    def is_whole(self, letter: str) -> bool:
        return letter == "k"


# ----------------------------------------------------------------------
# Scales of blocks in the order in which matrix units of GPUs read them.
#
# Tiles of 128 rows and 4 columns lie one behind the other, the columns' before the rows'. In a
# tile, element (r, c) is number (r % 32) * 16 + (r // 32) * 4 + c.

TILE_ROWS, TILE_COLUMNS = 128, 4
# Threads of a warp: each reads 16 bytes of a tile, from four rows that are so far apart.
LANES = 32


def whole_tiles(extent: Scalar, size: int) -> Scalar:
    """Returns how many tiles of a size hold an extent."""
    return sc.truncdiv(sc.add(extent, size - 1), size)


def padding(dtype: DataType) -> float:
    """Returns the value of no bits: 0, or the least one of a dtype of powers of two."""
    return 2.0**-127 if dtype is DataType.Float8_e8m0fnu else 0


def tiles_of_groups(rows: Scalar, groups: Scalar) -> Scalar:
    """Returns the most tiles that rows fill in so many groups, each of which has tiles of its own:
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
