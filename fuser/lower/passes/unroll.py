"""Unswitching and unrolling of loops.

An `Unswitch` statement marks a body that should run without bounds checks where possible.
`expand_unswitch` replaces it by two versions of the body, a fast one without bounds checks and one
with them. In the example, k runs from 0 to 3, and tx is the number of the thread:

    unswitch { for k { if (k*128 + tx < n) body } }
->  if (3*128 + tx < n) { for k body } else { for k { if (k*128 + tx < n) body } }
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Apply, Poly, Scalar, Symbol
from fuser.lower.kernel_ir import (
    Accumulate,
    AccumulateBlock,
    Body,
    Element,
    For,
    If,
    Statement,
    Store,
    Sync,
    ThreadReduce,
    Unswitch,
    VectorLoad,
    VectorStore,
    bodies,
    values_of,
    walk,
    with_changes,
)

_EFFECTS = (Store, VectorStore, Accumulate, AccumulateBlock, ThreadReduce, Sync, Unswitch)


# ------------------------------------------------------------------ unswitch
def expand_unswitch(body: Body) -> Body:
    """Returns a copy of the body in which two versions replace every `Unswitch` statement: one
    without and one with bounds checks.

    The kernel runs the version without checks if all checks would succeed in all iterations, and
    otherwise the version with checks. There are two exceptions:

    - If the statement contains a barrier, only the version with checks is used, because all threads
      must wait at the same barrier.
    - If the body does nothing when a check fails, only the version without checks is used. It runs
      if all checks succeed.
    """
    out: list[Statement] = []
    for statement in body.statements:
        if isinstance(statement, Unswitch):
            out.extend(_versions(statement))
        else:
            out.append(_with_bodies(statement, expand_unswitch))
    return Body(out)


def _versions(statement: Unswitch) -> list[Statement]:
    tests = _whole_tests(statement.body)
    has_barrier = any(isinstance(s, Sync | ThreadReduce) for s in walk(statement.body))
    plain = expand_unswitch(statement.body)
    if has_barrier or not tests:
        return plain.statements
    fast = _without_tests(expand_unswitch(statement.body), set(tests))
    # If this is the only test, no iteration has work when it fails.
    is_only = all(test == whole for test, whole in tests.items())
    # Several predicates may have the same strictest test.
    whole = sc.all_of(dict.fromkeys(tests.values()))
    if is_only and _all_work_under(plain, set(tests)):
        return [If(whole, fast)]
    return [If(whole, fast, plain)]


def _all_work_under(body: Body, tests: set[Scalar]) -> bool:
    """Whether `body` does nothing when one of `tests` fails: each statement that writes memory,
    accumulates or waits runs only if all of `tests` are true.
    """
    for s in body.statements:
        if isinstance(s, If):
            if s.otherwise is None and tests <= set(conjuncts(s.cond)):
                continue
            if any(not _all_work_under(b, tests) for b in bodies(s)):
                return False
        elif isinstance(s, For):
            if not _all_work_under(s.body, tests):
                return False
        elif isinstance(s, _EFFECTS):
            return False
    return True


def _whole_tests(body: Body) -> dict[Scalar, Scalar]:
    """Returns, for each test of a bounds check in `body`, a stricter test: if the stricter test is
    true, the test is true in all iterations of the loops in `body`.

    For `k * 128 + tx < n` in a loop over 4 iterations, the stricter test is `3 * 128 + tx < n`.
    Tests for which no stricter test is found are left out.
    """
    inner = {s.symbol: s.extent for s in walk(body) if isinstance(s, For)}
    tests: dict[Scalar, Scalar] = {}
    for s in walk(body):
        if isinstance(s, If):
            for test in conjuncts(s.cond):
                whole = _largest(test, inner)
                if whole is not None:
                    tests[test] = whole
    return tests


def conjuncts(cond: Scalar) -> list[Scalar]:
    """Returns the tests that `cond` combines by "and". Returns an empty list for a constant."""
    if isinstance(cond, Apply) and cond.op == "&&":
        return [c for a in cond.args for c in conjuncts(a)]
    return [cond] if isinstance(cond, Apply | Symbol) and sc.int_value(cond) is None else []


def _largest(test: Scalar, inner: dict[Symbol, Scalar]) -> Scalar | None:
    """Returns one test that implies `test` in all iterations of the loops in `inner`.

    `inner` maps the symbols of the loops to their extents. The returned test is `test` in the
    iteration where it is hardest to satisfy. For an upper bound this is the last iteration, for a
    lower bound the first one. Returns None if another iteration may be harder.
    """
    if not isinstance(test, Apply) or not any(s in inner for s in sc.symbols(test)):
        return test
    if test.op not in ("<", "<="):
        return None
    sides = [any(s in inner for s in sc.symbols(x)) for x in test.args]
    if all(sides):
        return None
    grows = test.args[sides.index(True)]
    terms = grows.terms if isinstance(grows, Poly) else (((grows,), 1),)
    for mono, coef in terms:
        moving = [a for a in mono if any(s in inner for s in sc.symbols(a))]
        if moving and (coef < 0 or not all(isinstance(a, Symbol) for a in moving)):
            return None
    last: dict[Scalar, Scalar] = {
        s: sc.sub(extent, 1) if sides[0] else sc.ZERO for s, extent in inner.items()
    }
    return sc.substitute(test, last)


def _without_tests(body: Body, tests: Collection[Scalar]) -> Body:
    out: list[Statement] = []
    for s in body.statements:
        if isinstance(s, If):
            rest = sc.all_of(c for c in conjuncts(s.cond) if c not in tests)
            then = _without_tests(s.then, tests)
            if rest == sc.const(True) and not s.flags:
                out.extend(then.statements)
                continue
            out.append(with_changes(s, {"cond": rest, "then": then}))
        else:
            out.append(_with_bodies(s, lambda b: _without_tests(b, tests)))
    return Body(out)


def _with_bodies(statement: Statement, fn: Callable[[Body], Body]) -> Statement:
    """Returns a copy of a statement, in which `fn(body)` replaces each body."""
    match statement:
        case For() | Unswitch():
            return with_changes(statement, {"body": fn(statement.body)})
        case If():
            other = None if statement.otherwise is None else fn(statement.otherwise)
            return with_changes(statement, {"then": fn(statement.then), "otherwise": other})
        case _:
            return with_changes(statement, {})


# ------------------------------------------------------------------ unrolling
def mark_unrolled(body: Body) -> None:
    """Marks the loops with a constant number of iterations that the compiler must unroll, in place.

    Two kinds of loops are marked: loops that the schedule unrolls, and loops whose index selects a
    register, because registers have no addresses.
    """
    for s in walk(body):
        if isinstance(s, For) and sc.int_value(s.extent) is not None:
            s.unroll = s.unroll or _indexes_registers(s)
            s.pragma = "FUSER_UNROLL" if s.unroll else ""
        elif isinstance(s, For):
            s.unroll = False


def _indexes_registers(loop: For) -> bool:
    for s in walk(loop.body):
        if isinstance(s, VectorLoad | VectorStore) and loop.symbol in sc.symbols(s.at):
            return True
        for part in values_of(s):
            if (
                isinstance(part, Element)
                and not part.shared
                and loop.symbol in sc.symbols(part.index)
            ):
                return True
    return False
