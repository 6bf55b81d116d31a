"""Ops along one axis (scans and sorts), whose results may need all elements along this axis.

This axis is never split over devices. The other axes may be split.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from fuser.ir.dtypes import DataType
from fuser.ir.fusion import AxisMap, Variant
from fuser.ir.op import attr, operand, result
from fuser.ir.ops.nodes import LibraryOp, ReductionOp
from fuser.ir.scalar.constructors import Scalar
from fuser.support.errors import VerifyError, counted

if TYPE_CHECKING:
    from fuser.ir.fusion import TensorView


class AlongAxisOp(LibraryOp):
    """Base class of ops on one tensor along its axis `dim`.

    Results have as many axes as the operand.
    """

    if TYPE_CHECKING:
        inp: TensorView
        dim: int

    RUNS_IN_STEPS: ClassVar[bool] = False
    # Equal elements still have separate positions, so a result cannot be expanded.
    KEEPS_EXPANDED: ClassVar[bool] = False

    def cut_map(self, operand_index: int, out: TensorView) -> AxisMap:
        """Returns, per axis of `out`, the operand axis that devices may split together with it.

        Axes correspond by position. The entry of `dim` is None, because results need all elements
        along it.
        """
        return tuple(None if k == self.dim else k for k in range(out.ndim))

    def whole_axes(self, out: TensorView) -> tuple[int, ...]:
        """Returns the axes of `out` that must not be split over devices.

        This is `dim`, because an element of a result may need all elements along this axis.
        """
        return (self.dim,)

    def whole_operand_axes(self, operand_index: int) -> tuple[int, ...]:
        """Returns the axes of the operand that must not be split over devices.

        This is `dim`, because an element of a result may need all elements along this axis.
        """
        return (self.dim,)

    def verify(self) -> None:
        """Checks that axis `dim` exists, and the number of axes and the dtype of every result.

        Raises:
            VerifyError: a check fails.
        """
        rank = self.inp.ndim
        if not 0 <= self.dim < rank:
            raise VerifyError(
                f"{self.name}: axis {self.dim} does not exist in {self.inp}, which has "
                f"{counted(rank, 'axis')}"
            )
        for out, dtype in zip(self.outputs, self.dtypes(), strict=True):
            if out.ndim != rank:
                raise VerifyError(
                    f"{self.name} of {self.inp}: each result must have {counted(rank, 'axis')}, as "
                    f"many as the operand, but {out} has {counted(out.ndim, 'axis')}"
                )
            if out.dtype() is not dtype:
                raise VerifyError(
                    f"{self.name} of {self.inp}: the result must have the dtype {dtype.name}, but "
                    f"{out} is {out.dtype().name}"
                )

    def dtypes(self) -> tuple[DataType, ...]:
        """Returns the dtype that each result must have. Every subclass overrides this method."""
        raise NotImplementedError


class ScanOp(AlongAxisOp):
    """A cumulative reduction along axis `dim`, such as cumsum.

    out[i] = init * inp[0] * .. * inp[i], where `*` stands for the operation `kind`: add, mul, max
    or min.
    """

    out: TensorView = result()
    inp: TensorView = operand()
    init: Scalar = operand()
    dim: int = attr()
    kind: str = attr()
    NAMES: ClassVar[dict[str, str]] = {
        "add": "cumsum",
        "mul": "cumprod",
        "max": "cummax",
        "min": "cummin",
    }

    @property
    def name(self) -> str:
        """The name of the op in messages: `cumsum`, `cumprod`, `cummax` or `cummin`."""
        return self.NAMES[self.kind]

    def exact_numbers(self) -> tuple[Scalar, ...]:
        """Returns the scalar operands that the dtype of the result must represent exactly.

        This is the initial value `init` of the cumulative reduction.
        """
        return (self.init,)

    def template(self) -> str:
        """Returns the text form of this op, with placeholders such as `{out}` for its fields."""
        return self._template(self.kind)

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        """Yields (attribute values, template) for each text form that ops of this class can have.

        A template is the text of an op, with placeholders such as `{out}` for its fields. If a text
        matches a template, the parser creates an op with the attribute values of this pair. Of
        several templates that match, the first is taken.
        """
        for kind in ReductionOp.KINDS:
            yield {"kind": kind}, cls._template(kind)

    @staticmethod
    def _template(kind: str) -> str:
        arguments = "{inp}", "dim={dim}", f"op_type={kind}", "init={init}"
        return "{out}\n   = scan(" + ",\n          ".join(arguments) + ")"

    def dtypes(self) -> tuple[DataType, ...]:
        """Returns the dtype that each result must have: the dtype of the operand."""
        return (self.inp.dtype(),)


class ArgsortOp(AlongAxisOp):
    """The order of the elements along axis `dim`, as their positions.

    out[.., i, ..] is the position of the element that is at position i after sorting. With
    `stable`, equal elements keep their order. NaN counts as larger than all numbers.
    """

    out: TensorView = result()
    inp: TensorView = operand()
    dim: int = attr()
    descending: bool = attr()
    stable: bool = attr()

    @property
    def name(self) -> str:
        """The name of the op in messages and dumps: `argsort`."""
        return "argsort"

    def template(self) -> str:
        """Returns the text form of this op, with placeholders such as `{out}` for its fields."""
        return self._template(self.descending, self.stable)

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        """Yields (attribute values, template) for each text form that ops of this class can have.

        A template is the text of an op, with placeholders such as `{out}` for its fields. If a text
        matches a template, the parser creates an op with the attribute values of this pair. Of
        several templates that match, the first is taken.
        """
        for down, stable in itertools.product((False, True), repeat=2):
            yield {"descending": down, "stable": stable}, cls._template(down, stable)

    @staticmethod
    def _template(descending: bool, stable: bool) -> str:
        flags = f"descending = {descending}, stable = {stable}"
        return "{out} = argsort( {inp}, dim = {dim}, " + flags + " )"

    def dtypes(self) -> tuple[DataType, ...]:
        """Returns the dtype that each result must have: Int, because results are positions."""
        return (DataType.Int,)


class TopKOp(AlongAxisOp):
    """The k largest (or smallest) elements along axis `dim`, and their positions along this axis.

    With `sorted`, the elements are in order. NaN counts as larger than all numbers.
    """

    found: TensorView = result()
    places: TensorView = result()
    inp: TensorView = operand()
    k: Scalar = operand()
    dim: int = attr()
    largest: bool = attr()
    sorted: bool = attr()

    @property
    def name(self) -> str:
        """The name of the op in messages and dumps: `topk`."""
        return "topk"

    def template(self) -> str:
        """Returns the text form of this op, with placeholders such as `{out}` for its fields."""
        return self._template(self.largest, self.sorted)

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        """Yields (attribute values, template) for each text form that ops of this class can have.

        A template is the text of an op, with placeholders such as `{out}` for its fields. If a text
        matches a template, the parser creates an op with the attribute values of this pair. Of
        several templates that match, the first is taken.
        """
        for largest, in_order in itertools.product((False, True), repeat=2):
            yield {"largest": largest, "sorted": in_order}, cls._template(largest, in_order)

    @staticmethod
    def _template(largest: bool, in_order: bool) -> str:
        flags = f"largest = {largest}, sorted = {in_order}"
        return "( {found}, {places} ) = topk( {inp}, {k}, dim = {dim}, " + flags + " )"

    def axis_map(self, operand_index: int) -> AxisMap:
        """Returns, per axis of the results, the corresponding axis of the operand, or None.

        Axes correspond by position. The entry of `dim` is None, because results have only k
        elements along it.
        """
        return self.cut_map(operand_index, self.found)

    def dtypes(self) -> tuple[DataType, ...]:
        """Returns the dtype that each result must have.

        This is the operand's dtype for the elements, and Int for their positions.
        """
        return (self.inp.dtype(), DataType.Int)

    def misfit(self, k: int, extent: int | None) -> str:
        """Returns an error message if `k` is negative or larger than the axis, else "".

        `extent` is the number of elements along the axis, or None if it is unknown.
        """
        if k >= 0 and (extent is None or k <= extent):
            return ""
        have = "" if extent is None else f", which has {extent} elements"
        return f"selected index k out of range: k = {k} of axis {self.dim} of {self.inp}{have}"
