"""CPU scalars: tensors of rank 0 that lie on the host, whose values a program gets as numbers.

    inputs T0, T1 (cpu scalar)   ->   inputs T0, f3; T1 = full({}, f3)

The value is read when a call begins, which never waits for a GPU: kernels take it as an argument,
and what repeats a call takes the number of that call. A number says nothing of a program's class.
A CPU scalar that is an output is returned as it is; one that is updated is written after the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeGuard

import torch

from fuser.ir.binding import Argument
from fuser.ir.dtypes import DataType, category
from fuser.ir.fusion import Fusion
from fuser.ir.ops.nodes import FullOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.tensor import TensorView
from fuser.ir.types import MemoryType
from fuser.support.inputs import check_count, flatten
from fuser.support.record import record
from hostir.runtime.inputs import check_tensor, spec_of

_EXACT = (DataType.Double, DataType.Float)
_HOST = torch.device("cpu")


@record
class _Result:
    """One result of the program: whether callers get it, the CPU scalar (by the number of the
    input) that it updates, and the one that stands in its place."""

    is_shown: bool
    into: int | None
    given: int | None


class HostScalars:
    """The CPU scalars of a definition. `fusion` is the definition with numbers in their place."""

    def __init__(self, defined: Fusion) -> None:
        self.fusion, _ = defined.copy()
        self._declared = list(defined.inputs)
        self._specs = {i: spec_of(i, v) for i, v in enumerate(self._declared) if _is_scalar(v)}
        inputs = list(self.fusion.inputs)
        for i in self._specs:
            tv = inputs[i]
            assert isinstance(tv, TensorView), f"{tv} is a CPU scalar"
            # Floats of fewer bits are numbers of Float, which has all of theirs.
            is_small = category(tv.dtype()) == "float" and tv.dtype() not in _EXACT
            number = self.fusion.new_symbol(DataType.Float if is_small else tv.dtype())
            filled = FullOp(tv, (), sc.cast(number, tv.dtype()))
            self.fusion.insert_after(None, [filled.replace(where=tv.where)])
            tv.is_cpu_scalar, tv.memory = False, MemoryType.local
            inputs[i] = number
        self.fusion.inputs = inputs
        self._results = self._taken_results()

    @staticmethod
    def of(fusion: Fusion) -> HostScalars | None:
        """Return the CPU scalars of a definition; None where it has none."""
        return HostScalars(fusion) if any(map(_is_scalar, fusion.inputs)) else None

    def _taken_results(self) -> list[_Result]:
        """Return what becomes of each result of the program, in which no CPU scalar is an input:
        an update of one is a result like others there."""
        scalars = {v: i for i, v in enumerate(self._declared) if _is_scalar(v)}
        number_of = {v.number: i for v, i in scalars.items()}
        fusion = self.fusion
        shown = {out for out in fusion.outputs if not fusion.is_hidden(out)}
        into: dict[TensorView, int] = {
            a.out: number_of[a.into.number] for a in fusion.aliases if a.into.number in number_of
        }
        fusion.aliases = [a for a in fusion.aliases if a.into.number not in number_of]
        rows: list[_Result] = []
        for out in fusion.outputs:
            if out.number in number_of:
                out.memory = MemoryType.global_
            if not fusion.is_hidden(out):
                rows.append(_Result(out in shown, into.get(out), number_of.get(out.number)))
        return rows

    @property
    def has_results(self) -> bool:
        """Whether a CPU scalar is an output or is updated."""
        return any(not r.is_shown or (r.into, r.given) != (None, None) for r in self._results)

    def finished(
        self, given: Sequence[object], outputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return what the caller gets: CPU scalars are the caller's own, after their updates, which
        wait for the program."""
        for result, out in zip(self._results, outputs, strict=True):
            if result.into is not None:
                _tensor(given[result.into]).copy_(out)
        return [
            out if result.given is None else _tensor(given[result.given])
            for result, out in zip(self._results, outputs, strict=True)
            if result.is_shown
        ]

    def flat(self, inputs: Iterable[object]) -> list[object]:
        """Return the inputs of a call as a flat list, which may be read twice."""
        return [*flatten(inputs, declared=self._declared)]

    def read(self, inputs: Iterable[object]) -> list[Argument]:
        """Return the inputs of `fusion`.

        Raises `InputError` for another number of inputs, and for what is no such scalar.
        """
        given = flatten(inputs, declared=self._declared)
        check_count(len(given), self._declared)
        for i, spec in self._specs.items():
            value = given[i]
            if isinstance(value, torch.Tensor):  # lazy views have other bytes
                value = value.resolve_conj().resolve_neg()
            check_tensor(spec, value, _HOST)
            assert isinstance(value, torch.Tensor), f"{value} was checked"
            given[i] = value.item()
        return given


def _is_scalar(value: object) -> TypeGuard[TensorView]:
    return isinstance(value, TensorView) and value.is_cpu_scalar


def _tensor(value: object) -> torch.Tensor:
    assert isinstance(value, torch.Tensor), f"{value} was checked"
    return value
