"""The ranks of a program agree before each run: where they meet, and what each claims to run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from fuser.ir.binding import Values
from fuser.ir.fusion import TensorView, Value
from fuser.ir.op import Op, op_text, walk
from fuser.ir.scalar.constructors import Number, Symbol
from fuser.support.inputs import flatten
from hostir.ir.printer import meaning_text
from hostir.ir.program import HostIrContainer
from hostir.runtime.inputs import Argument
from multidevice.job.agreement import Channel, Prepared, RunSignature

if TYPE_CHECKING:
    from multidevice.job.communicator import Communicator

T = TypeVar("T")

# In an op's text: the numbers of axes.
_AXIS_NUMBERS = re.compile(r"\d+(?=\{)")


class RankAgreement:
    """Where the ranks of one program agree on its runs; without a communicator a rank is alone.

    `free` are the positions of the inputs whose values may change from run to run, `how` has the
    lines of how it is run: options, number of streams.
    """

    def __init__(
        self,
        program: HostIrContainer,
        communicator: Communicator | None,
        *,
        free: frozenset[int],
        how: str,
    ) -> None:
        self._program, self._free, self._how = program, free, how
        self.communicator = communicator
        self.rank = 0 if communicator is None else communicator.rank()
        self.team = program.devices() or (self.rank,)

    def channel(self) -> Channel | None:
        """Returns where the ranks agree; None where this one agrees with no other."""
        return None if self.communicator is None else self.communicator.channel(self.team)

    def begin_run(self) -> None:
        """Counts a run, as every rank does."""
        if self.communicator is not None:
            self.communicator.begin_run(self.team)

    def claim(self, inputs: Sequence[Argument], values: Values, *also: str) -> RunSignature:
        """Returns what this rank claims to run on inputs that give the symbols these values, and
        the lines `also`."""
        return program_claim(self._program, (self._how, *also), inputs, values, self._free)

    def numbers(self, inputs: Sequence[Argument]) -> tuple[Argument, ...]:
        """Returns the inputs that ranks compare in each run."""
        return tuple(inputs[i] for i in sorted(self._free))

    def agreed(
        self,
        inputs: Sequence[Argument],
        check: Callable[[list[Argument]], Values],
        body: Callable[[list[Argument]], T],
        *also: str,
    ) -> T:
        """Returns `body` of the flat inputs, once the ranks agree, also on the lines `also`.

        `check` returns the values of all symbols, and raises what the other ranks should hear, too.
        """
        channel = self.channel()
        if channel is None:
            return body(flatten(inputs))

        def prepare() -> Prepared[T]:
            given = flatten(inputs)
            claim = self.claim(given, check(given), *also)
            return claim, self.numbers(given), partial(body, given)

        return channel.run(prepare)


def communications_text(program: HostIrContainer) -> str:
    """Returns what a program sends and receives, in order, and in which memory order.

    Ranks whose programs differ elsewhere (other local layouts, other kernels) still fit together,
    so axes are numbered in the order in which they appear here.
    """
    text = "\n".join(
        f"{op_text(op)} // {', '.join(map(str, op.orders))}" for op in program.started()
    )
    found: dict[str, str] = {}
    return _AXIS_NUMBERS.sub(lambda match: found.setdefault(match[0], str(len(found))), text)


def first_line(program: HostIrContainer) -> str:
    """Returns the user's line of the first communication, "" for none."""
    return next((op.where for op in program.started() if op.where), "")


def input_names(inputs: Sequence[Value], ops: Iterable[Op]) -> tuple[str, ...]:
    """Returns how errors call each input: number, type, and the user's line that first uses it."""
    lines: dict[object, str] = {}
    for op in ops:
        for operand in op.inputs:
            if op.where:
                lines.setdefault(operand, f", used at {op.where},")
    labels = [v.label if isinstance(v, TensorView) else str(v) for v in inputs]
    return tuple(
        f"input {i}, {label}{lines.get(value, '')}"
        for i, (label, value) in enumerate(zip(labels, inputs, strict=True))
    )


def claim_of(
    parts: Sequence[str],
    names: Sequence[str],
    inputs: Sequence[Argument],
    sizes: Mapping[Symbol, int],
    *,
    declared: Sequence[Value] = (),
    free: Iterable[int] = (),
    where: str = "",
    ops: Iterable[Op] = (),
    fixed: int = 1,
) -> RunSignature:
    """Returns what a rank claims to run: texts, what its structure depends on, local extents.

    `declared` are the inputs of the program; `free` has the positions of the scalars on which the
    structure does not depend; `ops` are those whose texts the parts hold, the first `fixed` of
    which do not depend on the inputs.
    """
    bound = ", ".join(f"{symbol} = {size}" for symbol, size in sizes.items())
    extents = tuple(
        (name, tuple(x.shape) if isinstance(x, torch.Tensor) else ())
        for name, x in zip(names, inputs, strict=True)
    )
    loose = frozenset(free)
    numbers = tuple(names[i] for i in sorted(loose))
    traits = tuple(
        (name, _traits(x) if i not in loose else ())
        for i, (name, x) in enumerate(zip(names, inputs, strict=True))
    )
    texts = (*parts, f"// sizes: {bound}")
    whole = [
        name
        for name, value in zip(names, declared, strict=False)
        if isinstance(value, TensorView) and not value.domain.has_devices
    ]
    return RunSignature(texts, extents, numbers, where, tuple(ops), fixed, traits, whole)


def _traits(x: Argument) -> tuple[tuple[str, str], ...]:
    """Returns what of an input, besides its extents, a program may depend on: words and values."""
    if not isinstance(x, torch.Tensor):
        return (("the value", str(x)),)
    # A stride that no index reaches is nobody's.
    pairs = zip(x.shape, x.stride(), strict=True)
    strides = ", ".join(str(stride) if n > 1 else "-" for n, stride in pairs)
    return (
        ("strides", f"[{strides}]"),
        ("dtype", str(x.dtype).removeprefix("torch.")),
        ("device", x.device.type),
    )


def program_claim(
    program: HostIrContainer,
    parts: Sequence[str],
    inputs: Sequence[Argument],
    values: Mapping[Symbol, Number],
    free: Iterable[int],
) -> RunSignature:
    """Returns what a rank claims that runs a program by itself; `parts` has lines of how it is run,
    `values` what the symbols are."""
    ops = tuple(walk(program.ops))
    loose = {program.inputs[i] for i in free}
    sizes = {s: v for s, v in values.items() if isinstance(v, int) and s not in loose}
    return claim_of(
        (meaning_text(program), *parts),
        input_names(program.inputs, ops),
        inputs,
        sizes,
        declared=program.inputs,
        free=free,
        where=first_line(program),
        ops=ops,
        fixed=1 + len(parts),
    )
