"""Ops that change extents: slices, pads, and concatenations of what is padded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from fuser.ir.dtypes import category
from fuser.ir.fusion import TensorOp, Variant
from fuser.ir.op import attr, operand, operands, result
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.support.errors import VerifyError

if TYPE_CHECKING:
    from fuser.ir.tensor import TensorView


class SliceOp(TensorOp):
    """out = inp[start:stop] per axis, step 1; out.logical = Resize(out.root)."""

    out: TensorView = result()
    inp: TensorView = operand()
    # start, stop and step of every axis
    ranges: tuple[Scalar, ...] = operands(in_rows=3)
    TEXT = "{out}\n   = slice( {inp}, {ranges} )"

    @property
    def name(self) -> str:
        return "slice"

    @property
    def starts(self) -> tuple[Scalar, ...]:
        return self.ranges[::3]

    @property
    def stops(self) -> tuple[Scalar, ...]:
        return self.ranges[1::3]

    @staticmethod
    def ranges_of(starts: Iterable[Scalar], stops: Iterable[Scalar]) -> tuple[Scalar, ...]:
        """Return the ranges from start to stop of each axis."""
        return tuple(x for a, b in zip(starts, stops, strict=True) for x in (a, b, sc.ONE))

    def verify(self) -> None:
        axes, steps = self.inp.ndim, self.ranges[2::3]
        if len(self.ranges) != 3 * axes or any(sc.int_value(step) != 1 for step in steps):
            raise VerifyError(f"slice takes a range of step 1 of each of the {axes} axes: {self}")


class PadOp(TensorOp):
    """out = inp with `left[i]` and `right[i]` elements of `value` around axis i (< 0: crop).

    `widths` are these of every axis, outermost first; without a `filler` the value is 0.
    """

    out: TensorView = result()
    inp: TensorView = operand()
    widths: tuple[Scalar, ...] = operands()
    filler: Scalar | None = operand(default=None)

    @property
    def name(self) -> str:
        return "pad"

    def exact_numbers(self) -> tuple[Scalar, ...]:
        return (self.value,) if category(self.value.dtype) == "int" else ()

    @property
    def left(self) -> tuple[Scalar, ...]:
        return self.widths[::2]

    @property
    def right(self) -> tuple[Scalar, ...]:
        return self.widths[1::2]

    @property
    def value(self) -> Scalar:
        return sc.Const(0, self.out.dtype()) if self.filler is None else self.filler

    def verify(self) -> None:
        if len(self.widths) != 2 * self.inp.ndim:
            raise VerifyError(f"pad takes two widths for each of {self.inp.ndim} axes: {self}")

    def template(self) -> str:
        filler = "" if self.filler is None else ", {filler}"
        return "{out}\n   = pad( {inp}, {widths}" + filler + " )"

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        yield {"filler": None}, "{out}\n   = pad( {inp}, {widths} )"
        yield {}, "{out}\n   = pad( {inp}, {widths}, {filler} )"


class CatOp(TensorOp):
    """out = the pieces along `dim`; each input is already padded to out's extent.

    `ends[k]` is where piece k ends along `dim`.
    """

    out: TensorView = result()
    pieces: tuple[TensorView, ...] = operands()
    ends: tuple[Scalar, ...] = operands()
    dim: int = attr()
    TEXT = "{out}\n   = cat( {pieces}, {ends}, {dim} )"

    @property
    def name(self) -> str:
        return "cat"

    def whole_axes(self, out: TensorView) -> tuple[int, ...]:
        return (self.dim,)
