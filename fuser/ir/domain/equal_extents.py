"""Equality classes of extents: which sizes of a fusion are equal, and which one represents them.

Ops that join axes require equal extents. If one side is a symbol, it is replaced by the other side
everywhere. If both sides are symbols, the symbol with the higher number is replaced. The
replacement is called the representative of the class.

Some equalities cannot replace a symbol: `2*i0 = 3*i1`, `i0 = min(4, i0)`. Such an equality is kept
as stated, and an extent that equals its left side as a whole is replaced by its right side. Every
equality is also a condition on the inputs, which `fuser.ir.binding` checks.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from fuser.ir.scalar.constructors import Const, Scalar, Symbol, substitute, symbols
from fuser.ir.scalar.scalar_nodes import sort_key

Relation = tuple[Scalar, Scalar]


class ExtentClasses:
    """The equalities between the extents of one fusion, which its ops and the user state.

    `canonical` replaces the symbols of an extent, so that equal extents become the same expression.
    """

    def __init__(self) -> None:
        # Symbol -> its replacement. After `_substituted`, no replacement contains a key.
        self._classes: dict[Symbol, Scalar] = {}
        # Other equalities (x, representative), in the order in which they were stated.
        self._whole: dict[Relation, None] = {}
        # The op that added a symbol to its class, or that stated a relation.
        self._reasons: dict[Scalar | Relation, str] = {}
        self._answers: dict[Scalar, Scalar] = {}
        self._rules: dict[Scalar, Scalar] = {}
        self._relations: tuple[Relation, ...] | None = None
        # Cached results of analyses that use these equalities, each under its own key.
        self.proved: dict[Hashable, bool] = {}
        # Whether a copy shares the dictionaries; they are then copied before a change.
        self._is_shared = False

    def copy(self) -> ExtentClasses:
        """Returns an independent copy of the equalities."""
        new = ExtentClasses()
        new.__dict__.update(self.__dict__)
        self._is_shared = new._is_shared = True
        return new

    def unify(self, a: Scalar, b: Scalar, reason: str = "") -> None:
        """States that two extents are equal.

        `reason` is shown if the inputs of a call contradict this.

        The extent with the lower sort key (`_rank`) becomes the representative, or `a` if the keys
        are equal.
        """
        a, b = self.canonical(a), self.canonical(b)
        if a == b:
            return
        if _rank(a) > _rank(b):
            a, b = b, a
        self._join(a, b, reason)

    def _join(self, a: Scalar, b: Scalar, reason: str) -> None:
        """Makes `a` the representative of `b`, or stores the equality if neither is a symbol.

        Both extents must be representatives already. If only `a` is a symbol, `b` becomes the
        representative.
        """
        if self._is_shared:
            self._classes, self._whole = dict(self._classes), dict(self._whole)
            self._reasons, self._is_shared = dict(self._reasons), False
        if isinstance(b, Symbol):
            self._classes[b] = a
            self._reasons[b] = reason
        elif isinstance(a, Symbol) and a not in symbols(b):
            self._classes[a] = b
            self._reasons[a] = reason
        else:
            self._whole[b, a] = None
            self._reasons[b, a] = reason
        self._answers, self._relations, self.proved = {}, None, {}
        self._rules = {self._substituted(x): y for x, y in self._whole}

    def canonical(self, x: Scalar) -> Scalar:
        """Returns an extent in which each symbol is replaced by its representative."""
        if not self._classes and not self._whole:
            return x
        found = self._answers.get(x)
        if found is None:
            found = self._substituted(x)
            seen = {found}
            while found in self._rules:
                found = self._substituted(self._rules[found])
                if found in seen:
                    break
                seen.add(found)
            self._answers[x] = found
        return found

    def _substituted(self, x: Scalar) -> Scalar:
        while True:
            known: dict[Scalar, Scalar] = {
                s: self._classes[s] for s in symbols(x) if s in self._classes
            }
            if not known:
                return x
            x = substitute(x, known)

    def relations(self) -> tuple[Relation, ...]:
        """Returns all equalities as pairs (extent, representative).

        Pairs of a symbol come first.
        """
        if self._relations is None:
            found: dict[Relation, None] = {(s, self.canonical(s)): None for s in self._classes}
            for x, y in self._whole:
                pair = self._substituted(x), self._substituted(y)
                if pair[0] != pair[1]:
                    found[pair] = None
                    self._reasons.setdefault(pair, self._reasons[x, y])
            self._relations = tuple(found)
        return self._relations

    def reason_of(self, x: Scalar, representative: Scalar) -> str:
        """Returns the op that stated an equality, such as `add of T0 and T1 at model.py:7`, or ""
        if unknown.
        """
        return self._reasons.get((x, representative)) or self._reasons.get(x, "")

    def rewrite(self, values: Mapping[Scalar, Scalar]) -> None:
        """Replaces symbols by `values` in every equality, and drops equalities that become trivial.

        If a representative is replaced, its replacement becomes the representative of the same
        extents.
        """
        stated = [(x, y, self.reason_of(x, y)) for x, y in self.relations()]
        self.__init__()
        for x, y, reason in stated:
            self.write(substitute(x, values), substitute(y, values), reason)

    def write(self, x: Scalar, y: Scalar, reason: str = "") -> None:
        """States that two extents are equal, and prefers `y` as the representative.

        If both extents are symbols, `y` becomes the representative. In all other cases, the order
        of `unify` decides.
        """
        x, y = self.canonical(x), self.canonical(y)
        if isinstance(x, Symbol) and isinstance(y, Symbol) and x != y:
            self._join(y, x, reason)
        else:
            self.unify(y, x, reason)


def _rank(x: Scalar) -> tuple[int, object]:
    """Returns the sort key of an extent.

    Of two equal extents, the one with the lower key represents both.

    Constants come first, then symbols by number, then other expressions.
    """
    if isinstance(x, Const):
        return (0, ())
    return (1, sort_key(x)) if isinstance(x, Symbol) else (2, ())
