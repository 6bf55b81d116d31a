"""Products of matrices in groups (`grouped_mm`), and products of scaled Float8 matrices.

In docstrings, each axis has a letter: g groups, m rows, n columns, k the summed axis, 1 an axis of
one element. In a product in groups, the positions along one of the axes m, n and k are divided into
groups. This axis is called the *ragged* axis. Group i has its positions from offsets[i - 1] to
offsets[i] - 1. Group 0 begins at 0.
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
from fuser.support.errors import VerifyError, counted

if TYPE_CHECKING:
    from fuser.ir.domain.tensor_domain import IterDomain
    from fuser.ir.fusion import TensorView

# The one-byte floats that may be multiplied.
FACTORS = (DataType.Float8_e4m3fn, DataType.Float8_e5m2)


def _is_one(axis: IterDomain) -> bool:
    """Returns whether an axis has one element: a broadcast axis that is not expanded."""
    return axis.is_broadcast and axis.expanded is None


class ProductOp(LibraryOp):
    """Base class of matrix products whose factors mat1 and mat2 may have scales.

    - Without scales, out = sum_k mat1 * mat2.
    - With scales, the matrices are one-byte floats, and out = alpha * sum_k (scale1 * mat1) *
      (scale2 * mat2) + beta * bias. A missing alpha or beta is 1, and a missing bias is 0.

    The axes that the op itself computes (the root axes of out) end with the summed axis k, which is
    marked as a reduction axis. If k has size 1, it is absent.
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
    # Per operand beside the matrices: number of axes -> their letters. With another number of axes,
    # all of them must have one element.
    SCALES: ClassVar[dict[str, dict[int, str]]] = {
        "scale1": {2: "m1"},
        "scale2": {2: "1n"},
        "alpha": {},
        "bias": {1: "n", 2: "mn"},
        "beta": {},
    }

    def template(self) -> str:
        """Returns the text form of this op, with placeholders such as `{out}` for its fields."""
        return self._template([f for f, _ in self.tensors() if f != "out"])

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        """Yields (attribute values, template) for each text form that ops of this class can have.

        A template is the text of an op, with placeholders such as `{out}` for its fields. If a text
        matches a template, the parser creates an op with the attribute values of this pair. Of
        several templates that match, the first is taken.
        """
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
        """Whether the matrices have scales: both `scale1` and `scale2` are present."""
        return self.scale1 is not None

    def tensors(self) -> Iterator[tuple[str, TensorView]]:
        """Yields (field name, tensor) for all operands that are present, then for the result."""
        for field in (*self.fields_of("operand"), "out"):
            value = getattr(self, field)
            if value is not None:
                yield field, value

    @classmethod
    def matrices(cls, mat1: TensorView, mat2: TensorView) -> Mapping[str, str]:
        """Returns one letter per axis of mat1, mat2, out and offsets, by field name.

        The letters are g (groups), m (rows), n (columns) and k (the summed axis).
        """
        raise NotImplementedError

    def letters(self, field: str) -> str:
        """Returns one letter per axis of the tensor in field `field`, such as "mk" for mat1.

        The letters are g (groups), m (rows), n (columns), k (the summed axis) and 1 (an axis of
        size 1). Reduction axes have no letter. Axes with equal letters in two tensors correspond.
        """
        known = self.matrices(self.mat1, self.mat2)
        if field in known:
            return known[field]
        tv: TensorView = getattr(self, field)
        letters = self.SCALES[field].get(tv.ndim, "1" * tv.ndim)
        axes = zip(tv.domain.no_reductions, letters, strict=True)
        return "".join("1" if _is_one(axis) else c for axis, c in axes)

    def is_whole(self, letter: str) -> bool:
        """Returns whether the axis with this letter must not be split over devices.

        An axis must not be split if one element of the result needs all elements along the axis.
        """
        raise NotImplementedError

    def _root_letters(self) -> str:
        axes = self.out.domain.maybe_root
        has_k = bool(axes) and axes[-1].is_reduction()
        return self.letters("out") + "k" * has_k

    def _operand_letters(self, operand_index: int) -> str:
        fields = [f for f, _ in self.tensors()]
        return self.letters(fields[operand_index])

    def axis_map(self, operand_index: int) -> AxisMap:
        """Returns, per axis of the result, the corresponding operand axis, or None.

        The operand is `inputs[operand_index]`. Axes with equal letters correspond, such as the rows
        m of mat1 and of the result. The axes of the result include the summed axis k.
        """
        mine = self._operand_letters(operand_index)
        return tuple(mine.index(c) if c in mine else None for c in self._root_letters())

    def cut_map(self, operand_index: int, out: TensorView) -> AxisMap:
        """Returns, per axis of `out`, the operand axis that devices may split together with it.

        The entry is None if there is no such axis, or if it must not be split.
        """
        whole = self.whole_axes(out)
        found = enumerate(self.axis_map(operand_index))
        return tuple(None if k in whole else place for k, place in found)

    def whole_axes(self, out: TensorView) -> tuple[int, ...]:
        """Returns the axes of `out` that must not be split over devices, as positions.

        If the op sums over k, then k is the last axis of `out`, as a reduction axis. It is
        returned, because each element of the result needs all elements along it.
        """
        return tuple(k for k, c in enumerate(self._root_letters()) if self.is_whole(c))

    def whole_operand_axes(self, operand_index: int) -> tuple[int, ...]:
        """Returns the axes of operand `operand_index` that must not be split over devices.

        An example is k, the axis that is summed over: each element of the result needs all elements
        along it.
        """
        letters = self._operand_letters(operand_index)
        return tuple(k for k, c in enumerate(letters) if self.is_whole(c))

    def verify(self) -> None:
        """Checks axes and dtypes of all tensors, and that optional operands are passed together.

        For example, alpha, bias and beta need both scales.

        Raises:
            VerifyError: a check fails.
        """
        for field, tv in self.tensors():
            self._verify_axes(field, tv)
        named = {f: getattr(self, f) for f in ("scale1", "scale2", "alpha", "beta", "bias")}
        passed = [field for field, tv in named.items() if tv is not None]
        scales = [(field, tv) for field, tv in named.items() if tv is not None and field != "bias"]
        if passed and not {"scale1", "scale2"} <= set(passed):
            missing = " and ".join(f for f in ("scale1", "scale2") if f not in passed)
            raise VerifyError(
                f"{self.name} -> {self.out}: {', '.join(passed)} cannot be used without {missing}: "
                "alpha, beta and bias need both scales, and each scale needs the other"
            )
        if not self.is_scaled:
            return
        if self.mat1.dtype() not in FACTORS or self.mat2.dtype() not in FACTORS:
            raise VerifyError(
                f"{self.name}: scaled matrices must be Float8_e4m3fn or Float8_e5m2, got "
                f"mat1 {self.mat1} of {self.mat1.dtype().name} and mat2 {self.mat2} of "
                f"{self.mat2.dtype().name}"
            )
        for field, tv in scales:
            if tv.dtype() is not DataType.Float:
                raise VerifyError(
                    f"{self.name} -> {self.out}: {field} must have the dtype Float, but {tv} is "
                    f"{tv.dtype().name}"
                )
        if not is_floating(self.out.dtype()):
            raise VerifyError(
                f"{self.name}: the result must have a floating dtype, but {self.out} is "
                f"{self.out.dtype().name}"
            )
        if self.beta is not None and self.bias is None:
            raise VerifyError(
                f"{self.name} -> {self.out}: beta {self.beta} scales a bias, but no bias is passed"
            )

    def _verify_axes(self, field: str, tv: TensorView) -> None:
        known = self.matrices(self.mat1, self.mat2)
        forms = {len(known[field]): known[field]} if field in known else self.SCALES[field]
        axes = zip(tv.domain.no_reductions, forms.get(tv.ndim, "1" * tv.ndim), strict=True)
        large = [k for k, (axis, c) in enumerate(axes) if c == "1" and not _is_one(axis)]
        if large or (tv.ndim not in forms and field in (*known, "bias")):
            wanted = " or ".join(f"[{', '.join(f)}]" for f in forms.values())
            one = "one element" if field in self.SCALES and field != "bias" else ""
            expected = " or ".join(filter(None, (wanted and f"the axes {wanted}", one)))
            more = f", and axis {large[0]} does not have size 1" if large else ""
            raise VerifyError(
                f"{self.name}: {field} must have {expected or 'no axes'}, but {tv} has "
                f"{counted(tv.ndim, 'axis')}{more}"
            )


class GroupedMmaOp(ProductOp):
    """One matrix product per group of positions along one axis, which is called the ragged axis.

    The letters of axes are g groups, m rows, n columns and k the summed axis. The numbers of axes
    of mat1 and mat2 determine the ragged axis:

    - mat1 [m, k], mat2 [k, n]: k is the ragged axis, and out is [g, m, n].
    - mat1 [g, m, k], mat2 [k, n]: n is the ragged axis, and out is [m, n].
    - mat1 [m, k], mat2 [g, k, n]: m is the ragged axis, and out is [m, n].

    Group i has the positions from offsets[i - 1] (0 for group 0) up to, but not including,
    offsets[i] along the ragged axis. Rows or columns of out that belong to no group are 0; no bias
    is added to them. Without scales, the matrices may have any floating dtype, which is also the
    dtype of the result.
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
    # Ranks of mat1 and mat2 -> the ragged axis, and the axes of mat1, mat2 and out.
    FORMS: ClassVar[dict[tuple[int, int], tuple[str, str, str, str]]] = {
        (2, 2): ("k", "mk", "kn", "gmn"),
        (3, 2): ("n", "gmk", "kn", "mn"),
        (2, 3): ("m", "mk", "gkn", "mn"),
    }
    # Each may have one element, row, column or matrix per group.
    SCALES: ClassVar[dict[str, dict[int, str]]] = {
        "scale1": {2: "m1", 3: "gm1"},
        "scale2": {2: "1n", 3: "g1n"},
        "alpha": {1: "g"},
        "bias": {1: "n", 2: "mn", 3: "gmn"},
        "beta": {1: "g"},
    }

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        """Yields (attribute values, template) for each text form that ops of this class can have.

        A template is the text of an op, with placeholders such as `{out}` for its fields. If a text
        matches a template, the parser creates an op with the attribute values of this pair. Of
        several templates that match, the first is taken.
        """
        yield cls._variant([*cls.SCALES])
        yield from super().variants()

    @property
    def name(self) -> str:
        """The name of the op in messages and dumps: `grouped_mm`."""
        return "grouped_mm"

    @property
    def ragged(self) -> str:
        """The letter of the axis that the groups divide: m (rows), n (columns) or k (summed)."""
        return self.FORMS[self.mat1.ndim, self.mat2.ndim][0]

    @classmethod
    def matrices(cls, mat1: TensorView, mat2: TensorView) -> Mapping[str, str]:
        """Returns one letter per axis of mat1, mat2, offsets and out, by field name.

        The letters are g (groups), m (rows), n (columns) and k (the summed axis).
        """
        _, *letters, out = cls.FORMS[mat1.ndim, mat2.ndim]
        return {"mat1": letters[0], "mat2": letters[1], "offsets": "g", "out": out}

    def is_whole(self, letter: str) -> bool:
        """Returns whether the axis with this letter must not be split over devices.

        The letters of such axes are g (the groups), k (the summed axis), and the letter of the
        ragged axis, along which the groups divide the positions. The ragged axis must not be split,
        because `offsets` are positions along the whole axis.
        """
        return letter in ("g", "k", self.ragged)

    def verify(self) -> None:
        """Checks the number of axes of the matrices, then the axes and dtypes of all tensors.

        Raises:
            VerifyError: a check fails.
        """
        if (self.mat1.ndim, self.mat2.ndim) not in self.FORMS:
            raise VerifyError(
                "grouped_mm: mat1 and mat2 must be two matrices (2 and 2 axes), or a matrix and a "
                f"batch of matrices (2 and 3, or 3 and 2 axes), but {self.mat1} has "
                f"{counted(self.mat1.ndim, 'axis')} and {self.mat2} has "
                f"{counted(self.mat2.ndim, 'axis')}"
            )
        super().verify()
        matrices = (self.mat1, self.mat2, self.out)
        if not self.is_scaled and len({tv.dtype() for tv in matrices}) > 1:
            found = ", ".join(f"{tv} is {tv.dtype().name}" for tv in matrices)
            raise VerifyError(
                "grouped_mm: without scales, mat1, mat2 and the result must have the same dtype, "
                f"but {found}"
            )
        if self.offsets.dtype() is not DataType.Int32:
            raise VerifyError(
                f"grouped_mm: offsets must have the dtype Int32, but {self.offsets} is "
                f"{self.offsets.dtype().name}"
            )


class ScaledMmaOp(ProductOp):
    """A product of two matrices that are multiplied by scales: mat1 [m, k], mat2 [k, n] -> [m, n].

    A scale has one element, or one element per row of mat1 ([m, 1]) or per column of mat2 ([1, n]).
    The bias is [n] or [m, n].
    """

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
        """The name of the op in messages and dumps: `scaled_mm`."""
        return "scaled_mm"

    @classmethod
    def matrices(cls, mat1: TensorView, mat2: TensorView) -> Mapping[str, str]:
        """Returns one letter per axis of mat1, mat2 and out: m (rows), n (columns), k (summed)."""
        return {"mat1": "mk", "mat2": "kn", "out": "mn"}

    def is_whole(self, letter: str) -> bool:
        """Returns whether the axis with this letter must not be split over devices.

        This is only k, the axis that is summed over.
        """
        return letter == "k"


# ----------------------------------------------------------------------
# Scales of blocks in the order in which matrix units of GPUs read them.
#
# The scales are stored in tiles of 128 rows and 4 columns, all tiles of a row of tiles in sequence.
# Within a tile, element (r, c) has position (r % 32) * 16 + (r // 32) * 4 + c.

TILE_ROWS, TILE_COLUMNS = 128, 4
# Threads of a warp. Each reads 16 bytes of a tile, from four rows with this distance.
LANES = 32


def whole_tiles(extent: Scalar, size: int) -> Scalar:
    """Returns the number of tiles of `size` elements that cover `extent` elements (rounded up)."""
    return sc.truncdiv(sc.add(extent, size - 1), size)


def padding(dtype: DataType) -> float:
    """Returns the value that fills unused positions of a tile of scales: 0, or 2**-127.

    2**-127 is used in Float8_e8m0fnu, which has no 0. All bits of both values are 0.
    """
    return 2.0**-127 if dtype is DataType.Float8_e8m0fnu else 0


def tiles_of_groups(rows: Scalar, groups: Scalar) -> Scalar:
    """Returns an upper bound of the number of row tiles that `rows` rows in `groups` groups need.

    A row tile has 128 rows. Every group starts a new tile, so that up to 127 rows of a group's last
    tile are unused.
    """
    return sc.truncdiv(sc.add(rows, sc.mul(groups, TILE_ROWS - 1)), TILE_ROWS)


class GroupedScalesOp(LibraryOp):
    """Copies the scales of Float8 blocks into the order in which matrix units of GPUs read them.

    Each scale belongs to a block of elements of a matrix, whose rows are divided into groups. Group
    i has the rows of inp from input_offsets[i] up to the first row of group i + 1. In out, these
    rows are stored from row output_offsets[i] on. Rows of out that belong to no group are 0.
    """

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
        """The name of the op in messages and dumps: `preprocess_grouped_matmul_input_sf`."""
        return "preprocess_grouped_matmul_input_sf"

    def axis_map(self, operand_index: int) -> AxisMap:
        """Returns, per axis of the result, the corresponding operand axis, or None.

        Both entries are None, because the op moves scales to other rows and columns.
        """
        return (None, None)

    def whole_axes(self, out: TensorView) -> tuple[int, ...]:
        """Returns the axes of `out` that must not be split over devices.

        These are both axes, because the op moves scales to other rows and columns.
        """
        return (0, 1)

    def whole_operand_axes(self, operand_index: int) -> tuple[int, ...]:
        """Returns the axes of operand `operand_index` that must not be split over devices.

        These are all axes, because the op moves scales to other rows and columns.
        """
        return tuple(range(self.inputs[operand_index].ndim))

    def verify(self) -> None:
        """Checks the number of axes and the dtype of all tensors.

        Raises:
            VerifyError: a check fails.
        """
        for field in ("input_offsets", "output_offsets"):
            tv = getattr(self, field)
            if tv.ndim != 1 or tv.dtype() is not DataType.Int32:
                raise VerifyError(
                    f"{self.name}: {field} must have 1 axis and the dtype Int32, but {tv} has "
                    f"{counted(tv.ndim, 'axis')} and the dtype {tv.dtype().name}"
                )
        for field, tv in (("operand", self.inp), ("result", self.out)):
            if tv.ndim != 2:
                raise VerifyError(
                    f"{self.name}: the {field} must have 2 axes, but {tv} has "
                    f"{counted(tv.ndim, 'axis')}"
                )
        if self.inp.dtype() is not self.out.dtype():
            raise VerifyError(
                f"{self.name}: operand and result must have the same dtype, but {self.inp} is "
                f"{self.inp.dtype().name} and {self.out} is {self.out.dtype().name}"
            )
