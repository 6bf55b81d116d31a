"""Scalars on all ranks at once: a number where the ranks agree, an array over ranks elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from fuser.errors import InputError
from fuser.ir import scalar as sc
from fuser.ir.scalar import Apply, Const, Number, Poly, Scalar, Symbol
from hostir.ops import RANK

# Arrays over ranks hold numbers of every kind, of which numpy's own types say nothing.
np: Any = numpy
Array = Any
# A number for all ranks, or one per rank.
PerRank = Any


def _truncated(a: PerRank, b: PerRank) -> PerRank:
    quotient = np.abs(a) // np.abs(b)
    return np.where((np.asarray(a) < 0) == (np.asarray(b) < 0), quotient, -quotient)


def _rest(a: PerRank, b: PerRank) -> PerRank:
    return a - _truncated(a, b) * b


def _ceil_div(a: PerRank, b: PerRank) -> PerRank:
    return -(-a // b)


_COMPUTE: dict[str, Callable[..., PerRank]] = {
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": _truncated,
    "%": _rest,
    "floorDiv": np.floor_divide,
    "floorMod": np.mod,
    "ceilDiv": _ceil_div,
    "min": np.minimum,
    "max": np.maximum,
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
    "==": np.equal,
    "!=": np.not_equal,
    "&&": np.logical_and,
    "||": np.logical_or,
    "!": np.logical_not,
    "where": np.where,
    "neg": np.negative,
    "abs": np.abs,
}


class RankValues:
    """The values of symbols on these ranks."""

    def __init__(self, ranks: Sequence[int], values: dict[Symbol, Number]) -> None:
        self.ranks = np.asarray(ranks, dtype=np.int64)
        self.values: dict[Symbol, Number] = values
        self._depends: dict[Scalar, bool] = {}

    def of(self, x: Scalar) -> PerRank:
        """Return the value of `x`. Raises `InputError` where no input binds a symbol of it."""
        depends = self._depends.get(x)
        if depends is None:
            depends = self._depends[x] = RANK in sc.symbols(x)
        try:
            return self._array(x) if depends else sc.evaluate(x, self.values)
        except KeyError as missing:
            raise InputError(f"{x}: no input binds {missing.args[0]}") from None

    def integer(self, x: Scalar) -> int | None:
        """Return the value of an integer, None where the ranks differ."""
        value = self.of(x)
        if isinstance(value, np.ndarray):
            return int(value[0]) if len(value) and (value == value[0]).all() else None
        return int(value)

    def _array(self, x: Scalar) -> PerRank:
        if isinstance(x, Const):
            return x.value
        if isinstance(x, Symbol):
            return self.ranks if x is RANK else self.values[x]
        if isinstance(x, Poly):
            return sum(c * math.prod(self._array(a) for a in m) for m, c in x.terms)
        assert isinstance(x, Apply)
        if x.op not in _COMPUTE:
            one_by_one = [sc.evaluate(x, {**self.values, RANK: int(r)}) for r in self.ranks]
            return np.asarray(one_by_one)
        with np.errstate(divide="ignore"):
            return _COMPUTE[x.op](*map(self._array, x.args))


def least(a: PerRank, b: PerRank) -> PerRank:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else np.minimum(a, b)
