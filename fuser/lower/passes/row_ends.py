"""Divisions in vectors that go across the ends of rows: one of the first element, not one of each.

An operand that rows share is read at the remainder of an index by the row's length. The elements of
a vector lie side by side, and at most one row ends among them where rows are no shorter than it:

    for k in 8: t[k] = T1[(b + k) % n]
->  r = b % n;  for k in 8: t[k] = T1[r + k < n ? r + k : r + k - n]

    (b + k) / n   ->   b / n + (r + k < n ? 0 : 1)
"""

from __future__ import annotations

from collections.abc import Mapping

from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Apply, Scalar, Symbol
from fuser.ir.scalar.scalar_nodes import postorder, single_term, without_factors
from fuser.lower.kernel_ir import Body, For, ScalarValue, bodies, map_statement


def divide_once(body: Body, least: Mapping[Scalar, int]) -> None:
    """Rewrite, in place, the divisions of unrolled loops by what their iterations do not exceed.

    `least` has products of extents that are at least a number.
    """
    _Divisions(least).run(body, {})


class _Divisions:
    def __init__(self, least: Mapping[Scalar, int]) -> None:
        self._least = least
        self._known: dict[tuple[Scalar, tuple[Symbol, ...]], Scalar] = {}

    def run(self, body: Body, lanes: dict[Symbol, int]) -> None:
        """Rewrite a body inside of unrolled loops, of which `lanes` has the iterations."""

        def rewritten(x: Scalar) -> Scalar:
            return self._rewritten(x, lanes)

        def value(v: ScalarValue) -> ScalarValue:
            return ScalarValue(rewritten(v.scalar), v.dtype)

        for k, statement in enumerate(body.statements):
            inside = lanes
            if isinstance(statement, For):
                count = sc.int_value(statement.extent)
                if statement.unroll and count is not None:
                    inside = {**lanes, statement.symbol: count}
            for inner in bodies(statement):
                self.run(inner, inside)
            if lanes and not bodies(statement):
                body.statements[k] = map_statement(statement, rewritten, value)

    def _rewritten(self, x: Scalar, lanes: dict[Symbol, int]) -> Scalar:
        key = x, tuple(lanes)
        if key not in self._known:
            found: dict[Scalar, Scalar] = {}
            seen: set[Scalar] = set()
            for y in postorder(x, seen.__contains__):
                seen.add(y)
                made = self._divided_once(y, lanes) if isinstance(y, Apply) else None
                if made is not None:
                    found[y] = made
            self._known[key] = sc.substitute(x, found) if found else x
        return self._known[key]

    def _divided_once(self, x: Apply, lanes: dict[Symbol, int]) -> Scalar | None:
        """Return the quotient or remainder over that of the first lane, None for another op."""
        if x.op not in ("/", "%") or sc.has_index(x.args[1]):
            return None
        of, n = x.args
        for lane, count in lanes.items():
            first = sc.substitute(of, {lane: sc.ZERO})
            if sc.add(first, lane) != of or not self._is_at_least(n, count):
                continue
            rest = sc.add(sc.mod(first, n), lane)
            is_before = sc.lt(rest, n)
            if x.op == "%":
                return sc.where(is_before, rest, sc.sub(rest, n))
            return sc.add(sc.floordiv(first, n), sc.where(is_before, sc.ZERO, sc.ONE))
        return None

    def _is_at_least(self, x: Scalar, count: int) -> bool:
        """Whether x is provably so much, or a multiple of what is said to be."""
        if sc.le(count, x) == sc.const(True):
            return True
        return any(n >= count and _is_multiple(x, y) for y, n in self._least.items())


def _is_multiple(x: Scalar, y: Scalar) -> bool:
    whole, part = single_term(x), single_term(y)
    if whole is None or part is None:
        return x == y
    return without_factors(whole[0], part[0]) is not None and whole[1] % part[1] == 0
