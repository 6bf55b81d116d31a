"""Adds up the bytes that the kernels of a program are predicted to move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fuser import TensorView
from fuser.ir.scalar.constructors import Symbol
from hostir.cost.machine_model import H200
from hostir.cost.simulator import simulated_schedule


def bytes_of_kernels(fd: Any, given: Sequence[torch.Tensor]) -> list[int]:
    fd.execute(given)
    program = fd.fec.program_for(given)
    values = {
        symbol: size
        for tv, x in zip(program.inputs, given, strict=True)
        if isinstance(tv, TensorView)
        for symbol, size in zip(tv.shape(), x.shape, strict=True)
        if isinstance(symbol, Symbol)
    }
    table = simulated_schedule(program, values, H200)
    return [w.cost.nbytes for w in table.work]
