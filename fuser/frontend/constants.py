"""Numbers that are compiled into programs: a hint for those that change from call to call.

A definition that is written anew for each learning rate is a new program each time. After a few
that differ in numbers alone, a warning names these, and `define_scalar`, whose value is an input.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from fuser.ir.fusion import Fusion, TensorOp
from fuser.ir.op import op_text
from fuser.ir.ops.nodes import BinaryOp, FullOp, TernaryOp, UnaryOp
from fuser.ir.scalar.constructors import Const, Number, Symbol
from fuser.ir.tensor import TensorView
from fuser.support.errors import warn
from fuser.support.lru import Recent
from fuser.support.record import record

# So many programs that differ in numbers alone are compiled without a word.
_QUIET = 3


@record
class _Constant:
    """A number in an op, and the user's line of that op."""

    value: Number
    op: str
    where: str


@dataclass
class _Alike:
    """Programs that differ in numbers alone: the numbers of each."""

    seen: dict[tuple[Number, ...], tuple[_Constant, ...]] = field(default_factory=dict)
    is_told: bool = False


_ALIKE: Recent[Hashable, _Alike] = Recent(256)


def note_constants(fusion: Fusion) -> None:
    """Remember the numbers of a program that is built; warn once where only they change."""
    constants: list[_Constant] = []
    texts = [_without_numbers(op, constants) for op in fusion.exprs]
    if not constants:
        return
    key = (*map(str, fusion.inputs), *texts)
    alike = _ALIKE.recall(key)
    if alike is None:
        alike = _ALIKE[key] = _Alike()
    if alike.is_told:
        return
    alike.seen[tuple(c.value for c in constants)] = tuple(constants)
    if len(alike.seen) > _QUIET:
        alike.is_told = True
        warn(_hint([*alike.seen.values()]))
        alike.seen.clear()


def _without_numbers(op: TensorOp, constants: list[_Constant]) -> str:
    """Return the text of an op with its numbers left out; append these to `constants`."""

    def mark(v: object) -> object:
        if not isinstance(v, Const):
            return v
        constants.append(_Constant(v.value, op.name, op.where))
        return Symbol("number", v.dtype)

    if isinstance(op, FullOp):
        return op_text(op.replace(value=mark(op.value)))
    if isinstance(op, UnaryOp | BinaryOp | TernaryOp):
        return op_text(op.map_values(lambda v: v if isinstance(v, TensorView) else mark(v)))  # pyright: ignore[reportReturnType]
    return op_text(op)


def _hint(programs: list[tuple[_Constant, ...]]) -> str:
    changed = [
        column for column in zip(*programs, strict=True) if len({c.value for c in column}) > 1
    ]
    found = "; ".join(
        f"{column[-1].op} at {column[-1].where} has {', '.join(f'{c.value:g}' for c in column)}"
        for column in changed[:3]
    )
    more = f" and {len(changed) - 3} others" if len(changed) > 3 else ""
    return (
        f"{len(programs)} programs were compiled that differ in numbers alone: {found}{more}. "
        "A number in a definition is compiled in: write s = fd.define_scalar() in its place, and "
        "give the value with the inputs of each call, fd.execute([.., value]), which compiles once"
    )
