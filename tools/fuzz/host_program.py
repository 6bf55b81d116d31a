"""Checks that hold for every host program. The text of this file is part of standalone
scripts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hostir import NUMBER_OF_STREAMS, RANK, HostIrEvaluator, equal, parse
from hostir.analysis.races import find_races
from hostir.ir.diagnostics import report

STREAMS = 4


def fault_of(fd: Any, inputs: Sequence[Any], rank: int) -> str | None:
    """Returns what is wrong with the program of the last call: its text, or races between its
    ops.
    """
    program = fd.fec.host_program()
    if not equal(parse(program.full_text()), program):
        return "the text is that of another program"
    values = HostIrEvaluator(program, device=inputs_device(inputs)).check(inputs)
    found = find_races(program, {**values, RANK: rank, NUMBER_OF_STREAMS: STREAMS}, rank=rank)
    return f"race check: {report(program, found)}" if found else None


def inputs_device(inputs: Sequence[Any]) -> Any:
    """Returns the device of the first tensor among the inputs, "cpu" without tensors."""
    return next((v.device for v in inputs if hasattr(v, "device")), "cpu")
