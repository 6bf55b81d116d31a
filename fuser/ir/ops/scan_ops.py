"""Scans and sorts: ops along one axis, all of which each of their results needs.

That axis is whole on every device; along the others they may be cut.
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
from fuser.support.errors import VerifyError

if TYPE_CHECKING:
    from fuser.ir.fusion import TensorView


class AlongAxisOp(LibraryOp):
    """Base: of one tensor, along its axis `dim`; results have its rank."""

    if TYPE_CHECKING:
        inp: TensorView
        dim: int

    RUNS_IN_STEPS: ClassVar[bool] = False
    # Equal elements have places of their own.
    KEEPS_EXPANDED: ClassVar[bool] = False

    def cut_map(self, operand_index: int, out: TensorView) -> AxisMap:
        return tuple(None if k == self.dim else k for k in range(out.ndim))

    def whole_axes(self, out: TensorView) -> tuple[int, ...]:
        return (self.dim,)

    def whole_operand_axes(self, operand_index: int) -> tuple[int, ...]:
        return (self.dim,)

    def verify(self) -> None:
        rank = self.inp.ndim
        if not 0 <= self.dim < rank or any(out.ndim != rank for out in self.outputs):
            outs = ", ".join(map(str, self.outputs))
            raise VerifyError(
                f"{self.name}: axis {self.dim} of {self.inp} of rank {rank} does not give {outs}"
            )
        for out, dtype in zip(self.outputs, self.dtypes(), strict=True):
            if out.dtype() is not dtype:
                raise VerifyError(f"{self.name}: {out} is not {dtype.name}, from {self.inp}")

    def dtypes(self) -> tuple[DataType, ...]:
        """Returns the dtypes of the results."""
        raise NotImplementedError


class ScanOp(AlongAxisOp):
    """out[.., i, ..] = init kind inp[.., 0, ..] kind .. kind inp[.., i, ..]. Kinds are those of
    `ReductionOp`."""

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
        return self.NAMES[self.kind]

    def exact_numbers(self) -> tuple[Scalar, ...]:
        return (self.init,)

    def template(self) -> str:
        return self._template(self.kind)

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        for kind in ReductionOp.KINDS:
            yield {"kind": kind}, cls._template(kind)

    @staticmethod
    def _template(kind: str) -> str:
        arguments = "{inp}", "dim={dim}", f"op_type={kind}", "init={init}"
        return "{out}\n   = scan(" + ",\n          ".join(arguments) + ")"

    def dtypes(self) -> tuple[DataType, ...]:
        return (self.inp.dtype(),)


class ArgsortOp(AlongAxisOp):
    """out[.., i, ..] is the place of the element that is number i of its row in order; where
    `stable`, equal ones keep theirs. NaN is above all numbers."""

    out: TensorView = result()
    inp: TensorView = operand()
    dim: int = attr()
    descending: bool = attr()
    stable: bool = attr()

    @property
    def name(self) -> str:
        return "argsort"

    def template(self) -> str:
        return self._template(self.descending, self.stable)

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        for down, stable in itertools.product((False, True), repeat=2):
            yield {"descending": down, "stable": stable}, cls._template(down, stable)

    @staticmethod
    def _template(descending: bool, stable: bool) -> str:
        flags = f"descending = {descending}, stable = {stable}"
        return "{out} = argsort( {inp}, dim = {dim}, " + flags + " )"

    def dtypes(self) -> tuple[DataType, ...]:
        return (DataType.Int,)


class TopKOp(AlongAxisOp):
    """The k largest, or smallest, elements of each row and their places in it; in order where
    `sorted`. NaN is above all numbers."""

    found: TensorView = result()
    places: TensorView = result()
    inp: TensorView = operand()
    k: Scalar = operand()
    dim: int = attr()
    largest: bool = attr()
    sorted: bool = attr()

    @property
    def name(self) -> str:
        return "topk"

    def template(self) -> str:
        return self._template(self.largest, self.sorted)

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        for largest, in_order in itertools.product((False, True), repeat=2):
            yield {"largest": largest, "sorted": in_order}, cls._template(largest, in_order)

    @staticmethod
    def _template(largest: bool, in_order: bool) -> str:
        flags = f"largest = {largest}, sorted = {in_order}"
        return "( {found}, {places} ) = topk( {inp}, {k}, dim = {dim}, " + flags + " )"

    def axis_map(self, operand_index: int) -> AxisMap:
        return self.cut_map(operand_index, self.found)

    def dtypes(self) -> tuple[DataType, ...]:
        return (self.inp.dtype(), DataType.Int)

    def misfit(self, k: int, extent: int | None) -> str:
        """Returns what is wrong with k for an axis of this extent (None: not known), "" where
        nothing is."""
        if k >= 0 and (extent is None or k <= extent):
            return ""
        have = "" if extent is None else f", which has {extent} elements"
        return f"selected index k out of range: k = {k} of axis {self.dim} of {self.inp}{have}"
