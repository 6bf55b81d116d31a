"""Equal extents (sizes of axes) of a fusion, and the extent that represents all equal ones.

An op such as an addition requires that its operands have equal extents. If one of two equal extents
is a symbol, such as `i0`, the other extent replaces it everywhere. If both are symbols, the symbol
with the higher number is replaced. The replacement is called the representative.

In some equalities, no symbol can be replaced: `2*i0 = 3*i1`, `i0 = min(4, i0)`. One side then
replaces the other side only where that is a whole extent, and not inside a larger expression.
Every equality is also a condition on the inputs, which `fuser.ir.binding` checks.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from fuser.ir.scalar.constructors import Const, Scalar, Symbol, substitute, symbols
from fuser.ir.scalar.scalar_nodes import sort_key

Relation = tuple[Scalar, Scalar]


class ExtentClasses:
    """The equalities between the extents (sizes of axes) of one fusion, from its ops and its user.

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
        """Returns a copy. Later changes of the copy and of this object do not affect each other."""
        new = ExtentClasses()
        new.__dict__.update(self.__dict__)
        self._is_shared = new._is_shared = True
        return new

    def unify(self, a: Scalar, b: Scalar, reason: str = "") -> None:
        """Stores that two extents are equal. Afterwards, `canonical` returns the same extent for
        both.

        If one of the two is a symbol, `canonical` returns the other. If both are symbols,
        `canonical` returns the symbol with the lower number. `reason` describes who requires the
        equality, such as an op, for the error message about inputs that contradict it.
        """
        a, b = self.canonical(a), self.canonical(b)
        if a == b:
            return
        if _rank(a) > _rank(b):
            a, b = b, a
        self._join(a, b, reason)

    def _join(self, a: Scalar, b: Scalar, reason: str) -> None:
        """Stores that `a` and `b` are equal. If `b` is a symbol, `a` replaces it from now on.

        If only `a` is a symbol, `b` replaces it, unless `b` contains `a`. In all other cases, `a`
        replaces `b` only where `b` is a whole extent, and not inside a larger expression. The
        caller ensures that `a` and `b` are results of `canonical`. `reason` describes who requires
        the equality.
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
        """Returns an extent in the form that is the same for all extents known to be equal.

        Of several equal symbols, one is the representative, which replaces the others.
        """
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
        """Returns all equalities as pairs (extent, representative): the second replaces the first.

        Pairs whose first extent is a symbol come first.
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
        """Returns the reason for an equality of extents, such as `add of T0 and T1 at model.py:7`.

        `x` and `representative` are a pair of `relations`. Returns "" if the reason is unknown.
        """
        return self._reasons.get((x, representative)) or self._reasons.get(x, "")

    def rewrite(self, values: Mapping[Scalar, Scalar]) -> None:
        """Replaces symbols by `values` in every equality, and drops equalities that become trivial.

        If an extent that represents others is replaced, its replacement represents them.
        """
        stated = [(x, y, self.reason_of(x, y)) for x, y in self.relations()]
        self.__init__()
        for x, y, reason in stated:
            self.write(substitute(x, values), substitute(y, values), reason)

    def write(self, x: Scalar, y: Scalar, reason: str = "") -> None:
        """Stores that two extents are equal. Of two symbols, `y` becomes the representative.

        `canonical` then returns `y` for both symbols, even if `y` has the higher number. If `x` or
        `y` is not a symbol, the method does the same as `unify`. `reason` describes who requires
        the equality.
        """
        x, y = self.canonical(x), self.canonical(y)
        if isinstance(x, Symbol) and isinstance(y, Symbol) and x != y:
            self._join(y, x, reason)
        else:
            self.unify(y, x, reason)


def _rank(x: Scalar) -> tuple[int, object]:
    """Returns a sort key by which `unify` decides which of two equal extents replaces the other.

    Constants come first, then symbols by number, then other expressions. Of two symbols, the one
    with the lower number thus replaces the other.
    """
    if isinstance(x, Const):
        return (0, ())
    return (1, sort_key(x)) if isinstance(x, Symbol) else (2, ())
