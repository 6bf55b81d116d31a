"""What ranks compare before they run a program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from fuser.ir.core import Op
from fuser.ir.fusion import Value
from fuser.ir.scalar import Number, Symbol
from fuser.ir.text import op_text
from hostir.bind import Argument
from hostir.container import HostIrContainer, walk
from multidevice.agreement import Claim


def communications_text(program: HostIrContainer) -> str:
    """Return what a program sends and receives, in order, and in which memory order.

    Ranks whose programs differ elsewhere (other local layouts, other kernels) still fit together.
    """
    return "\n".join(
        f"{op_text(op)} // {', '.join(map(str, op.orders))}" for op in program.started()
    )


def first_line(program: HostIrContainer) -> str:
    """Return the user's line of the first communication, "" for none."""
    return next((op.where for op in program.started() if op.where), "")


def input_names(inputs: Sequence[Value], ops: Iterable[Op]) -> tuple[str, ...]:
    """Return how errors call each input: number, type, and the user's line that first uses it."""
    lines: dict[object, str] = {}
    for op in ops:
        for operand in op.inputs:
            if op.where:
                lines.setdefault(operand, f", used at {op.where},")
    return tuple(f"input {i}, {value}{lines.get(value, '')}" for i, value in enumerate(inputs))


def claim_of(
    parts: Sequence[str],
    names: Sequence[str],
    inputs: Sequence[Argument],
    sizes: Mapping[Symbol, int],
    *,
    free: Iterable[int] = (),
    where: str = "",
    ops: Iterable[Op] = (),
) -> Claim:
    """Return what a rank claims to run: texts, what its structure depends on, local extents.

    `free` has the positions of the scalars on which the structure does not depend; `ops` are those
    whose texts the parts hold.
    """
    bound = ", ".join(f"{symbol} = {size}" for symbol, size in sizes.items())
    extents = tuple(
        (name, tuple(x.shape) if isinstance(x, torch.Tensor) else ())
        for name, x in zip(names, inputs, strict=True)
    )
    numbers = tuple(names[i] for i in sorted(free))
    return Claim((*parts, f"// sizes: {bound}"), extents, numbers, where, tuple(ops))


def program_claim(
    program: HostIrContainer,
    parts: Sequence[str],
    inputs: Sequence[Argument],
    values: Mapping[Symbol, Number],
    free: Iterable[int],
) -> Claim:
    """Return what a rank claims that runs a program by itself; `parts` has lines of how it is run,
    `values` what the symbols are."""
    ops = tuple(walk(program.ops))
    loose = {program.inputs[i] for i in free}
    sizes = {s: v for s, v in values.items() if isinstance(v, int) and s not in loose}
    return claim_of(
        (program.meaning_text(), *parts),
        input_names(program.inputs, ops),
        inputs,
        sizes,
        free=free,
        where=first_line(program),
        ops=ops,
    )
