"""The agreement of a program's ranks before each run: all ranks compare their run signatures.

A *run signature* describes what one rank is about to run: the program's text, the options, the
sizes and the local extents of inputs. `multidevice.job.agreement` compares the run signatures of
all ranks. If they differ, all ranks raise an error before anything is launched.
"""

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
    """Compares, before each run of one program, the descriptions of this run on all ranks.

    The description of a rank's next run is its *run signature*: program, options, sizes and inputs.
    If the signatures differ, all ranks raise an error before anything is launched.

    - `communicator`: None for a rank that is alone, which then compares nothing.
    - `free`: the positions of the scalar inputs whose values are not part of the run signature,
      because they may change from run to run.
    - `how`: a line of the run signature, which has the options and the number of streams.
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
        """Returns the channel over which the ranks compare descriptions of their next runs. Returns
        None for a rank that is alone and has no communicator.
        """
        return None if self.communicator is None else self.communicator.channel(self.team)

    def begin_run(self) -> None:
        """Adds 1 to this rank's count of runs. Every rank must call this once per run.

        Ranks that copy out of each other's memory distinguish runs by this count.
        """
        if self.communicator is not None:
            self.communicator.begin_run(self.team)

    def run_signature(self, inputs: Sequence[Argument], values: Values, *also: str) -> RunSignature:
        """Returns this rank's run signature for these inputs: a description of the program, the
        options, the sizes and the inputs.

        All ranks compare their run signatures before the run. `values` are the values of the
        program's symbols. `also` are further lines of text that must be equal on all ranks.
        """
        return program_run_signature(self._program, (self._how, *also), inputs, values, self._free)

    def numbers(self, inputs: Sequence[Argument]) -> tuple[Argument, ...]:
        """Returns those scalar inputs whose values are not part of the run signature (the
        description of a run that ranks compare), because they may change from run to run.

        The ranks compare these values separately in each run.
        """
        return tuple(inputs[i] for i in sorted(self._free))

    def agreed(
        self,
        inputs: Sequence[Argument],
        check: Callable[[list[Argument]], Values],
        body: Callable[[list[Argument]], T],
        *also: str,
    ) -> T:
        """Compares the descriptions of the next run on all ranks, and then calls `body` with the
        list of inputs.

        Returns the result of `body`. `check` checks the inputs and returns the values of all
        symbols. If `check` fails on one rank, or the descriptions differ, all ranks raise an error.
        `also` are further lines of text that the ranks compare.
        """
        channel = self.channel()
        if channel is None:
            return body(flatten(inputs))

        def prepare() -> Prepared[T]:
            given = flatten(inputs)
            signature = self.run_signature(given, check(given), *also)
            return signature, self.numbers(given), partial(body, given)

        return channel.run(prepare)


def communications_text(program: HostIrContainer) -> str:
    """Returns a text of all communications of `program`, in order, by which ranks compare their
    programs.

    Ranks can run together if these texts are equal, even if local layouts and kernels differ. The
    text of a communication includes the memory order of its tensors. Axes are numbered in the order
    of their first appearance in the text, because their numbers in the program may differ between
    ranks.
    """
    text = "\n".join(
        f"{op_text(op)} // {', '.join(map(str, op.orders))}" for op in program.started()
    )
    found: dict[str, str] = {}
    return _AXIS_NUMBERS.sub(lambda match: found.setdefault(match[0], str(len(found))), text)


def first_line(program: HostIrContainer) -> str:
    """Returns the user's source line of the program's first communication, for error messages.

    Returns "" if there is none.
    """
    return next((op.where for op in program.started() if op.where), "")


def input_names(inputs: Sequence[Value], ops: Iterable[Op]) -> tuple[str, ...]:
    """Returns a text for each input of a program, by which error messages name the input.

    The text has the number of the input, its label, and the user's line of the first op that uses
    it.
    """
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


def run_signature_of(
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
    """Returns a run signature, the description of this rank's next run, which all ranks compare.

    - `parts`: texts that must be equal on all ranks. The first `fixed` texts do not depend on the
      inputs, so if only other texts differ, an error message can blame the inputs.
    - `names`: the names of the inputs in error messages.
    - `sizes`: the values of integer symbols.
    - `declared`: the inputs as the program declares them. They show which inputs are not divided
      over devices, so that every rank passes the whole tensor.
    - `free`: the positions of the scalar inputs whose values are not part of the signature, because
      they may change from run to run.
    - `ops`: the ops that the texts describe; `where`: the user's source line. Both are for error
      messages.
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
    """Returns the properties of an input, besides its extents, that an error message may name as
    the cause of a difference between ranks.

    These are the strides, the dtype and the device of a tensor, or the value of a number. Ranks may
    differ in a property as long as their programs are equal. Each property is a pair of a name and
    a text, such as ("dtype", "float32").
    """
    if not isinstance(x, torch.Tensor):
        return (("the value", str(x)),)
    # The stride of an axis with one element has no effect.
    pairs = zip(x.shape, x.stride(), strict=True)
    strides = ", ".join(str(stride) if n > 1 else "-" for n, stride in pairs)
    return (
        ("strides", f"[{strides}]"),
        ("dtype", str(x.dtype).removeprefix("torch.")),
        ("device", x.device.type),
    )


def program_run_signature(
    program: HostIrContainer,
    parts: Sequence[str],
    inputs: Sequence[Argument],
    values: Mapping[Symbol, Number],
    free: Iterable[int],
) -> RunSignature:
    """Returns the run signature of this rank for a run of `program` on `inputs`.

    A run signature describes a run; all ranks compare their signatures before the run begins.

    - `parts`: lines of text about options, which must be equal on all ranks.
    - `values`: the values of the program's symbols.
    - `free`: the positions of the scalar inputs whose values are not part of the signature, because
      they may change from run to run.
    """
    ops = tuple(walk(program.ops))
    loose = {program.inputs[i] for i in free}
    sizes = {s: v for s, v in values.items() if isinstance(v, int) and s not in loose}
    return run_signature_of(
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
