"""What ranks compare before they run a program, and running a program from its text with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from fuser.ir.core import Op
from fuser.ir.fusion import Value
from fuser.ir.scalar import Symbol
from fuser.ir.text import op_text
from hostir.bind import Argument
from hostir.container import HostIrContainer, walk
from hostir.evaluate import HostIrEvaluator
from multidevice.agreement import Claim, Prepared
from multidevice.agreement import run_agreed as run_when_agreed

if TYPE_CHECKING:
    from multidevice.communicator import Communicator


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


def run_agreed(
    evaluator: HostIrEvaluator, inputs: Sequence[Argument], communicator: Communicator
) -> list[torch.Tensor]:
    """Run once the ranks of the program's meshes agree; see `multidevice.agreement.run_agreed`.

    Raises the error of this rank's inputs, `PeerError` naming another rank's, or
    `ProgramMismatchError` with the first line that differs; nothing was launched then.
    """
    program = evaluator.program

    def prepare() -> Prepared[list[torch.Tensor]]:
        values = evaluator.check(inputs)
        free = {program.inputs[i]: inputs[i] for i in sorted(evaluator.free)}
        claim = claim_of(
            (program.meaning_text(),),
            input_names(program.inputs, walk(program.ops)),
            inputs,
            {s: v for s, v in values.items() if isinstance(v, int) and s not in free},
            free=evaluator.free,
            where=first_line(program),
            ops=tuple(walk(program.ops)),
        )
        evaluator.are_apart(inputs, None)  # raises what the others should hear before they start
        run: Callable[[], list[torch.Tensor]] = lambda: evaluator.run(inputs)  # noqa: E731
        return claim, tuple(free.values()), run

    return run_when_agreed(communicator, program.devices(), prepare)
