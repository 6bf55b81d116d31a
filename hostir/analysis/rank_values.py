"""Evaluates the scalars of a program on all ranks at once, so that an analysis need not repeat a
program for each rank.

A value is one number if all ranks agree, and a numpy array with one element per rank otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy

from fuser.ir.domain.device_mesh import DeviceMesh
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Apply, Number, Poly, Scalar, Symbol
from fuser.ir.types import ParallelType
from fuser.support.errors import DivisionByZeroError, InputError
from hostir.ir.ops import RANK

# Arrays over ranks have elements of several dtypes, which numpy's static types cannot express.
np: Any = numpy
Array = Any
# A number for all ranks, or one per rank.
PerRank = Any


def _truncated(a: PerRank, b: PerRank) -> PerRank:
    return (a - np.fmod(a, b)) // b


def _ceil_div(a: PerRank, b: PerRank) -> PerRank:
    return -(-a // b)


_COMPUTE: dict[str, Callable[..., PerRank]] = {
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": _truncated,
    "%": np.fmod,
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
_DIVIDES = frozenset({"/", "%", "floorDiv", "floorMod", "ceilDiv"})


class RankValues:
    """Evaluates the scalars of a program on all `ranks` at once. A value is one number if all ranks
    agree, and otherwise an array with one element per rank.

    Values are cached until the index of a loop changes. `undefined` describes the most recent
    evaluation: an array of bools, True for the ranks on which a divisor was 0, or None if there was
    no such rank.
    """

    def __init__(self, ranks: Sequence[int], values: dict[Symbol, Number]) -> None:
        self.ranks = np.asarray(ranks, dtype=np.int64)
        self.undefined: Array | None = None
        self._values = values
        self._depends: dict[Scalar, bool] = {}
        self._computed: dict[Scalar, tuple[PerRank, Array | None]] = {}
        self._along: dict[tuple[DeviceMesh, ParallelType], Array] = {}

    def along(self, mesh: DeviceMesh, ptype: ParallelType) -> Array:
        """Returns the coordinate of each rank along the dimension `ptype` of a device mesh. A rank
        outside the mesh gets the coordinate 0."""
        if (mesh, ptype) not in self._along:
            devices = np.asarray(mesh.devices, dtype=np.int64)
            order = np.argsort(devices, kind="stable")
            places = np.searchsorted(devices, self.ranks, sorter=order)
            places = order[np.minimum(places, mesh.size - 1)]
            along = np.asarray(mesh.coordinates(ptype), dtype=np.int64)[places]
            self._along[mesh, ptype] = np.where(devices[places] == self.ranks, along, 0)
        return self._along[mesh, ptype]

    def bind(self, index: Symbol, value: Number | None) -> None:
        """Sets the value of a loop's index before each iteration. The value None removes the index
        after the loop."""
        self._computed.clear()
        if value is None:
            self._values.pop(index, None)
        else:
            self._values[index] = value

    def of(self, x: Scalar) -> PerRank:
        """Returns the value of the scalar `x`: one number if all ranks agree, otherwise an array
        over ranks.

        If some ranks divide by 0, these ranks are recorded in `undefined`. Raises
        `DivisionByZeroError` if a divisor is 0 on every rank, and `InputError` for a symbol that no
        input of the program defines.
        """
        known = self._computed.get(x)
        if known is None:
            self.undefined = None
            try:
                value = self._array(x) if self.depends(x) else sc.evaluate(x, self._values)
            except KeyError as missing:
                raise InputError(
                    f"the value of {x} is unknown, because no input of the program determines "
                    f"{missing.args[0]}: define {missing.args[0]} as a scalar input"
                ) from None
            known = self._computed[x] = value, self.undefined
        value, self.undefined = known
        return value

    def depends(self, x: Scalar) -> bool:
        """Returns whether the formula of `x` contains the rank, so that the value may differ
        between ranks."""
        found = self._depends.get(x)
        if found is None:
            found = self._depends[x] = RANK in sc.symbols(x)
        return found

    def integer(self, x: Scalar) -> int | None:
        """Returns the value of an integer scalar if all ranks have the same value, and None
        otherwise."""
        value = self.of(x)
        if isinstance(value, np.ndarray):
            return int(value[0]) if len(value) and (value == value[0]).all() else None
        return int(value)

    def _array(self, x: Scalar) -> PerRank:
        if x is RANK:
            return self.ranks
        if not self.depends(x):
            try:
                return sc.evaluate(x, self._values)
            except DivisionByZeroError:
                self._is_undefined(True)
                return 0
        if isinstance(x, Poly):
            return self._sum(x)
        assert isinstance(x, Apply)
        if x.op == "where":
            return self._chosen(*x.args)
        if x.op not in _COMPUTE:
            one_by_one = [sc.evaluate(x, {**self._values, RANK: int(r)}) for r in self.ranks]
            return np.asarray(one_by_one)
        args = [self._array(a) for a in x.args]
        if x.op in _DIVIDES and (args[1] == 0 if isinstance(args[1], int) else not args[1].all()):
            self._is_undefined(np.asarray(args[1]) == 0)
            args[1] = np.where(args[1] == 0, 1, args[1])
        return _COMPUTE[x.op](*args)

    def _sum(self, x: Poly) -> PerRank:
        number: Number = 0
        arrays: list[Array] = []
        for atoms, factor in x.terms:
            term: PerRank = factor
            for value in map(self._array, atoms):
                term = value if isinstance(term, int) and term == 1 else term * value
            if isinstance(term, np.ndarray):
                arrays.append(term)
            else:
                number += term
        total: PerRank = number if number or not arrays else arrays.pop()
        for term in arrays:
            total = total + term
        return total

    def _chosen(self, cond: Scalar, a: Scalar, b: Scalar) -> PerRank:
        """Returns `where(cond, a, b)` on each rank. Ranks that divide by 0 only in the operand that
        `cond` does not select are not recorded as undefined."""
        holds = self._array(cond)
        before = self.undefined
        found: list[PerRank] = []
        missing: list[PerRank] = []
        for arg in (a, b):
            self.undefined = None
            found.append(self._array(arg))
            missing.append(False if self.undefined is None else self.undefined)
        self.undefined = before
        self._is_undefined(np.where(holds, *missing))
        return np.where(holds, *found)

    def _is_undefined(self, where: PerRank) -> None:
        if np.any(where):
            before = False if self.undefined is None else self.undefined
            self.undefined = np.broadcast_to(where, self.ranks.shape) | before


def least(a: PerRank, b: PerRank) -> PerRank:
    """Returns the smaller of two values, rank by rank. Each value is a number or an array over
    ranks."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else np.minimum(a, b)


def most(a: PerRank, b: PerRank) -> PerRank:
    """Returns the larger of two values, rank by rank. Each value is a number or an array over
    ranks."""
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else np.maximum(a, b)


def everywhere(x: PerRank) -> bool:
    """Returns whether the condition `x` is true on all ranks. `x` is a truth value or an array over
    ranks."""
    return bool(x.all()) if isinstance(x, np.ndarray) else bool(x)


def at(value: PerRank, i: int) -> object:
    """Returns the value on one rank: `value` itself if it is a number that all ranks share, and
    otherwise the element of the array. `i` is the index of the rank in the list of ranks.
    """
    return value[i].item() if isinstance(value, np.ndarray) else value


def pick(x: PerRank, places: PerRank) -> PerRank:
    """Returns the values on some ranks: entry k of the result is the value on the rank `places[k]`,
    an index in the list of ranks. A number that all ranks share is returned unchanged.
    """
    return x[places] if isinstance(x, np.ndarray) else x


def outside_of(x: PerRank, limit: int, here: Array) -> Array | None:
    """Returns an array of bools, True for the ranks in `here` on which the index `x` is out of
    range: not in 0 <= x < `limit`. Returns None if there is no such rank.
    """
    wrong = (x < 0) | (x >= limit)
    if not isinstance(wrong, np.ndarray):
        return here if wrong and here.any() else None
    wrong &= here
    return wrong if wrong.any() else None
