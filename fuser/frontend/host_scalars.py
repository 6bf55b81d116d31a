"""CPU scalars: tensors of rank 0 that lie on the host, whose values a program gets as numbers.

    inputs T0, T1 (cpu scalar)   ->   inputs T0, f3; T1 = full({}, f3)

The value is read when a call begins, which never waits for a GPU: kernels take it as an argument,
and what repeats a call takes the number of that call. A number says nothing of a program's class.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeGuard

import torch

from fuser.errors import UnsupportedError, user_code
from fuser.inputs import check_count, flatten
from fuser.ir import scalar as sc
from fuser.ir.binding import Argument
from fuser.ir.dtypes import DataType, category
from fuser.ir.fusion import Fusion
from fuser.ir.nodes import FullOp
from fuser.ir.tensor import TensorView
from fuser.ir.types import MemoryType
from hostir.bind import check_tensor, spec_of

_EXACT = (DataType.Double, DataType.Float)
_HOST = torch.device("cpu")


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
            self._check(tv)
            # Floats of fewer bits are numbers of Float, which has all of theirs.
            is_small = category(tv.dtype()) == "float" and tv.dtype() not in _EXACT
            number = self.fusion.new_symbol(DataType.Float if is_small else tv.dtype())
            filled = FullOp(tv, (), sc.cast(number, tv.dtype()))
            self.fusion.insert_after(None, [filled.replace(where=tv.where)])
            tv.is_cpu_scalar, tv.memory = False, MemoryType.local
            inputs[i] = number
        self.fusion.inputs = inputs

    @staticmethod
    def of(fusion: Fusion) -> HostScalars | None:
        """Return the CPU scalars of a definition; None where it has none."""
        return HostScalars(fusion) if any(map(_is_scalar, fusion.inputs)) else None

    def _check(self, tv: TensorView) -> None:
        line = user_code(tv.user_line())
        if tv in self.fusion.outputs:
            raise UnsupportedError(
                f"{tv}, a CPU scalar, is an output: make it ops.set({tv.label}), which lies "
                f"where the program runs{line}"
            )
        updates = (a for a in self.fusion.aliases if a.into is tv)
        for alias in updates:
            raise UnsupportedError(
                f"{alias.out} is written into {tv}, a CPU scalar, which programs only read{line}"
            )

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
