"""Invariants of a fusion, checked after every pass."""

from __future__ import annotations

from fuser.errors import VerifyError
from fuser.ir.domain import TensorDomain
from fuser.ir.fusion import Fusion
from fuser.ir.scalar import Scalar, Symbol
from fuser.ir.tensor import TensorView
from fuser.ir.text import op_text, transform_text
from fuser.ir.types import IterType, ParallelType

_UNDERIVED = "a logical axis is not derived from the root domain"


def verify_fusion(fusion: Fusion, *, after: str = "definition") -> None:
    """Raise `VerifyError` naming the pass, the op and the broken invariant.

    Checked: single definition; definition before use; inputs undefined, outputs defined or inputs;
    contiguity parallel to allocation with None exactly at broadcasts and reductions; loop and
    allocation derived from logical; at most one axis per device or stream type.
    """
    known = {v for v in fusion.inputs if isinstance(v, TensorView)}
    for op in fusion.exprs:
        for value in op.inputs:
            if isinstance(value, TensorView) and value not in known:
                raise VerifyError(
                    f"after {after}: {value} is used before it is defined in\n{op_text(op)}"
                )
        for out in op.outputs:
            if out in known:
                raise VerifyError(f"after {after}: {out} is defined twice, again by\n{op_text(op)}")
            known.add(out)
        op.verify()
    for out in fusion.outputs:
        if out not in known:
            raise VerifyError(f"after {after}: output {out} has no definition")
    for value in fusion.inputs:
        if isinstance(value, Scalar) and not isinstance(value, Symbol):
            raise VerifyError(f"after {after}: the input {value} is no symbol")
    for alias in fusion.aliases:
        if alias.out not in fusion.outputs or alias.into not in fusion.inputs:
            raise VerifyError(
                f"after {after}: {alias.out} -> {alias.into} is no output written into an input"
            )
    for tv in fusion.tensors():
        problem = tv.domain.problem
        if problem:
            raise VerifyError(f"after {after}: {tv}: {problem}")


def domain_problem(domain: TensorDomain) -> str | None:
    """Return what is wrong with a domain, None when nothing is."""
    axes = domain.maybe_allocation
    if len(domain.contiguity) != len(axes):
        return f"contiguity has {len(domain.contiguity)} entries for {len(axes)} axes"
    for axis, flag in zip(axes, domain.contiguity, strict=True):
        skipped = axis.kind in (IterType.broadcast, IterType.reduction)
        if skipped != (flag is None):
            return f"contiguity {flag} of {axis}"
    problem = _UNDERIVED if domain.is_undecided else derivation_problem(domain)
    if problem:
        return problem
    seen: dict[ParallelType, str] = {}
    for axis in domain.loop:
        if axis.is_reduction() or not (axis.is_device or axis.is_stream):
            continue
        if axis.ptype in seen:
            return (
                "Found multiple loop IterDomains with the same parallel type: "
                f"{seen[axis.ptype]} and {axis}"
            )
        seen[axis.ptype] = str(axis)
    return None


def derivation_problem(domain: TensorDomain) -> str | None:
    """Return where the transforms do not lead from the root to the loop and allocation axes; from
    the logical ones where a reshape is undecided."""
    roots = domain.root_numbers or domain.logical_numbers
    if domain.is_undecided and all(a.rfactor for a in domain.logical):
        roots = (*roots, *domain.logical_numbers)
    made = set(roots)
    if len(made) != len(roots):
        return "an axis stands twice in its root or logical domain"
    for t in domain.transforms:
        for axis in domain.states(t.inputs):
            if axis.number not in made:
                return f"{transform_text(t, domain)} reads {axis}, which does not exist yet"
        for axis in domain.states(t.outputs):
            if axis.number in made:
                return f"{transform_text(t, domain)} makes {axis}, which exists already"
            made.add(axis.number)
    derived = set(domain.logical_numbers)
    if not derived <= made:
        return _UNDERIVED
    for t in domain.transforms:
        if derived.issuperset(t.inputs):
            derived.update(t.outputs)
    for title, group in (("loop", domain.loop), ("allocation", domain.allocation)):
        for axis in group:
            if axis.number not in derived:
                return f"{title} axis {axis} is not derived from the logical domain"
    return None
