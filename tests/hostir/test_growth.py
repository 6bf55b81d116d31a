"""What lowering costs for more devices and more layers, in steps of the interpreter: no clock."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest

from scripts.lowering_time import Case, define_reshardings, lower_case


def count_steps(run: Callable[[], object]) -> int:
    """Return how many bytecode instructions a call executes."""
    steps = 0

    def local(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal steps
        steps += event == "opcode"
        return local

    def called(frame: FrameType, event: str, arg: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return local

    before = sys.gettrace()
    sys.settrace(called)
    try:
        run()
    finally:
        sys.settrace(before)
    return steps


@pytest.mark.finding("G3")
def test_lowering_of_more_devices_takes_as_many_steps_per_op() -> None:
    """Meshes are read once per program, not once per op: to lower it, to check it, to print it."""

    def per_op(devices: int) -> int:
        case = Case(define_reshardings, 4, (devices,))
        fewer, more = (count_steps(partial(lower_case, case, n)) for n in (2, 4))
        return more - fewer

    per_op(16)
    assert per_op(1024) < 1.1 * per_op(64)
