"""Reductions in parts as the reduction that a user wrote, and the `rfactor` calls behind it.

    T2 = sum(T0), T1 = sum(T2)    ->    tv1 = fd.ops.sum(tv0, dims=[1], ...)
                                        tv1.outer_split(1, 2)
                                        tv2 = tv1.rfactor([2])

A part that an `rfactor` made has root axes, from which splits lead to its logical ones; a part that
was factored again, and the reduction itself, have none. So a chain of ops, each of which reduces
the result of the one before, is told apart from reductions of reductions: these keep axes as they
are, and parts leave axes that splits have made.
"""

from __future__ import annotations

from collections.abc import Sequence

from fuser.ir.domain.axis_path import transforms_between
from fuser.ir.domain.tensor_domain import Transform
from fuser.ir.fusion import Fusion, TensorOp
from fuser.ir.ops.nodes import Contraction, ReductionOp
from fuser.ir.tensor import TensorView
from fuser.support.errors import UnsupportedError, user_code
from fuser.support.record import record


@record
class RfactorCall:
    """`made = of.rfactor(axes)`, after these transforms of the loops `loop` of `of`."""

    of: TensorView
    made: TensorView
    axes: tuple[int, ...]
    loop: tuple[int, ...] = ()
    transforms: tuple[Transform, ...] = ()


@record
class Factored:
    """A reduction over `dims` of the operand of `ops[0]`, which gives `out`, and its parts."""

    ops: tuple[TensorOp, ...]
    out: TensorView
    dims: list[int]
    steps: tuple[RfactorCall, ...]


def factored_reductions(fusion: Fusion) -> dict[TensorOp, Factored]:
    """Return the reductions in parts of a fusion, by the first op of each."""
    found: dict[TensorOp, Factored] = {}
    inside: set[TensorOp] = set()
    for k, op in enumerate(fusion.exprs):
        is_part = isinstance(op, ReductionOp | Contraction) and bool(op.out.domain.root_numbers)
        if is_part and op not in inside:
            found[op] = _factored(fusion.exprs[k:])
            inside.update(found[op].ops)
    return found


def _factored(ops: Sequence[TensorOp]) -> Factored:
    """Return the reduction whose first part is the first of these ops."""
    first = ops[0].out_tensor
    roots = {n: k for k, n in enumerate(first.domain.root_numbers)}
    # Of each axis that the next op reads, the axis of the first op's operand that it still is.
    origins = _kept(first, [*roots.values()])
    chain = [ops[0]]
    for op in ops[1:]:
        out = op.out_tensor
        if not isinstance(op, ReductionOp) or op.inp is not chain[-1].out_tensor:
            break
        chain.append(op)
        origins = _kept(out, origins)
        if not out.domain.root_numbers and None not in origins:
            dims = sorted({*roots.values()} - {*origins})
            return Factored(tuple(chain), out, dims, tuple(_steps(chain)))
    raise UnsupportedError(
        f"no statement for a part of a reduction{user_code(ops[0].where)}: {first}"
    )


def _kept(out: TensorView, origins: Sequence[int | None]) -> list[int | None]:
    """Return the origins of what is left of the root axes of a part: None for what splits made."""
    domain = out.domain
    of = dict(zip((a.number for a in domain.maybe_root), origins, strict=True))
    return [of.get(a.number) for a in domain.no_reductions]


def _steps(chain: Sequence[TensorOp]) -> list[RfactorCall]:
    """Return the calls that make the parts: those of one family factor the reduction once, and then
    what that has made."""
    whole = chain[-1].out_tensor
    parts = [op.out_tensor for op in chain[:-1]]
    heads = [k for k, tv in enumerate(parts) if tv.domain.root_numbers]
    steps: list[RfactorCall] = []
    for begin, end in zip(heads, [*heads[1:], len(parts)], strict=True):
        family = parts[begin:end]
        domain = family[0].domain
        reducer = _reducers(family)
        transforms = transforms_between(domain, domain.root, domain.logical)
        of, loop = whole, domain.root_numbers
        for k in reversed(range(len(family))):
            axes = tuple(p for p, by in enumerate(reducer) if by is not None and by <= k)
            steps.append(RfactorCall(of, family[k], axes, loop, tuple(transforms)))
            of, loop, transforms = family[k], (), ()
    return steps


def _reducers(family: Sequence[TensorView]) -> list[int | None]:
    """Return which of the parts reduces each logical axis of the first, None: none of them."""
    left = list(range(len(family[0].domain.logical)))
    found: list[int | None] = [None] * len(left)
    for k, tv in enumerate(family):
        for at, axis in zip(left, tv.domain.logical, strict=True):
            if axis.is_reduction():
                found[at] = k
        left = [at for at in left if found[at] is None]
    return found
