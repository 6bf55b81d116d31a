"""A table of programs as users of nvFuser's Python API write them, with torch's results.

A program is a function of a FusionDefinition, marked with `program`. Its expected results come from
a function of the inputs in double precision, marked with `expects`, in order; the new values of
updated inputs follow them. If the first results are random numbers, that function gets them after
the inputs, because the other results depend on them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fuser import FusionDefinition

Inputs = list[Any]
PROGRAMS: dict[str, Program] = {}


@dataclass(eq=False)
class Program:
    """A definition with its inputs and expected results."""

    name: str
    define: Callable[[FusionDefinition], None]
    make_inputs: Callable[[], Inputs]
    dtypes: (
        Sequence[torch.dtype] | None
    )  # of the results; else of the expected ones, double as float
    updates: tuple[int, ...]  # the inputs that results are written into
    draws: int  # how many results, the first ones, are random numbers
    cuts: dict[int, int] | None  # input -> the axis that ranks share; None: for one device
    tolerance: float | None
    expected: Callable[..., list[torch.Tensor]] = field(init=False)

    def expects(self, function: Callable[..., list[torch.Tensor]]) -> None:
        self.expected = function

    def __str__(self) -> str:
        return self.name

    def inputs(self) -> Inputs:
        """Returns fresh tensors with the same values at every call."""
        torch.manual_seed(zlib.crc32(self.name.encode()))
        return self.make_inputs()

    def build(self) -> FusionDefinition:
        with FusionDefinition() as fd:
            self.define(fd)
        return fd


def program(
    inputs: Callable[[], Inputs],
    *,
    dtypes: Sequence[torch.dtype] | None = None,
    updates: tuple[int, ...] = (),
    draws: int = 0,
    cuts: dict[int, int] | None = None,
    tolerance: float | None = None,
) -> Callable[[Callable[[FusionDefinition], None]], Program]:
    """Adds a function of a definition to the table, under its own name."""

    def mark(define: Callable[[FusionDefinition], None]) -> Program:
        name = define.__name__
        assert name not in PROGRAMS, f"two programs are called {name}"
        made = Program(name, define, inputs, dtypes, updates, draws, cuts, tolerance)
        PROGRAMS[name] = made
        return made

    return mark


def in_double(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value.clone()
    return value


_EXACT_TO = {torch.double: 1e-10, torch.float: 1e-5, torch.half: 2e-3, torch.bfloat16: 1e-2}


def compare(program: Program, inputs: Inputs, results: Sequence[torch.Tensor]) -> None:
    """Compares results and updated inputs with torch's results for the same inputs."""
    fresh = [in_double(x) for x in program.inputs()]
    expected = program.expected(*fresh, *results[: program.draws])
    updated = [inputs[at] for at in program.updates]
    assert len(results) + len(updated) == len(expected)
    for i, (result, wanted) in enumerate(zip([*results, *updated], expected, strict=True)):
        assert result.shape == wanted.shape, f"result {i}"
        if i < len(results):
            declared = program.dtypes[i] if program.dtypes else wanted.dtype
            assert result.dtype == (
                torch.float if declared == torch.double and not program.dtypes else declared
            ), i
        if wanted.is_floating_point():
            tolerance = program.tolerance or _EXACT_TO[result.dtype]
            torch.testing.assert_close(
                result.double(), wanted.detach().double(), atol=tolerance, rtol=tolerance
            )
        else:
            assert torch.equal(result, wanted), f"result {i}"
