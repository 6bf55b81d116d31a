"""Structural equality of ops, tensors and fusions.

Tensors are compared by number and by everything that a domain section says; scalars by their text
and category, since integer literals of different widths are one value. Names and numbers count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import cast

from fuser.ir.domain.tensor_domain import TensorDomain, transform_text
from fuser.ir.dtypes import category
from fuser.ir.fusion import Fusion
from fuser.ir.op import Op
from fuser.ir.scalar.constructors import Const, Scalar, scalar_text
from fuser.ir.tensor import TensorView

Key = tuple[object, ...]


def equal_ops(a: Op, b: Op) -> bool:
    """Whether two ops say the same about the same (equally numbered) values."""
    return op_key(a) == op_key(b)


def equal_fusions(a: Fusion, b: Fusion) -> bool:
    """Whether two fusions say the same: inputs, outputs, aliases, extents, ops and tensors."""
    return fusion_key(a) == fusion_key(b)


def fusion_key(fusion: Fusion) -> Key:
    return (
        values_key(fusion, fusion.tensors()),
        tuple(op_key(op) for op in fusion.exprs),
    )


def values_key(fusion: Fusion, tensors: Iterable[TensorView]) -> Key:
    """Return what a program says about its values, leaving its ops out."""
    return (
        _value(tuple(fusion.inputs)),
        _value(tuple(fusion.outputs)),
        tuple((a.out.number, a.into.number, a.hidden) for a in fusion.aliases),
        tuple((_value(s), _value(x)) for s, x in fusion.equal_extents()),
        tuple(tensor_key(tv) for tv in tensors),
    )


def tensor_key(tv: TensorView) -> Key:
    return (
        tv.number,
        tv.dtype(),
        tv.memory,
        tv.mesh,
        tv.mesh_is_user_set,
        tv.is_cpu_scalar,
        tv.compute_at,
        _domain_key(tv.domain),
    )


def _domain_key(domain: TensorDomain) -> Key:
    groups = (domain.root, domain.logical, domain.allocation, domain.loop)
    transforms = tuple(transform_text(t, domain) for t in domain.transforms)
    return (*(tuple(map(str, group)) for group in groups), transforms, domain.contiguity)


def op_key(op: Op) -> Key:
    """Return class, operands, results and attributes; where the user wrote it does not count."""
    fields: list[tuple[str, object]] = []
    for f in dataclasses.fields(op):  # pyright: ignore[reportArgumentType]
        if f.metadata.get("kind") != "where":
            fields.append((f.name, _value(getattr(op, f.name))))
    return (type(op).__name__, *fields)


def _value(value: object) -> object:
    if isinstance(value, TensorView):
        return ("tensor", value.number)
    if isinstance(value, Const):
        return (category(value.dtype), scalar_text(value))
    if isinstance(value, Scalar):
        return (value.dtype, scalar_text(value))
    if isinstance(value, Op):
        return op_key(value)
    if isinstance(value, tuple):
        return tuple(_value(v) for v in cast("tuple[object, ...]", value))
    if dataclasses.is_dataclass(value):
        # An axis, a stream, a team: its text says all of it, without the ranges of its symbols.
        return (type(value).__name__, str(value))
    return value
