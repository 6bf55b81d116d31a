"""Compares a host program, run by a plain interpreter, with the meaning of its definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.reference.host_program import interpret
from tools.fuzz.host_program import STREAMS
from tools.fuzz.values import Val

Compare = Callable[[torch.Tensor, Val], str | None]
Part = Callable[[torch.Tensor], torch.Tensor]


def misread(
    fd: Any,
    by_rank: list[list[Any]],
    results: Sequence[tuple[str, str | None, Val, Sequence[Part | None]]],
    inputs: list[str],
    compare: Compare,
) -> str | None:
    """Returns how the program of the last call, interpreted for all ranks, differs from the oracle.

    Programs that draw random numbers are left out. `by_rank` are the shards that were passed.
    `results` has, for each output: its name, the input that it updates, the oracle's value, and for
    each rank a function that cuts the rank's part (None: the rank has none).
    """
    program = fd.fec.host_program()
    if len(program.inputs) > len(by_rank[0]):
        return None  # what it draws depends on numbers that each call gives it; see `compare`
    runs = interpret(program, by_rank, number_of_streams=STREAMS)
    for rank, run in enumerate(runs):
        returned = iter(run.outputs)
        updated = dict(zip(inputs, run.inputs, strict=True))
        for name, alias, value, parts in results:
            found = next(returned) if alias is None else updated[alias]
            part = parts[rank]
            if part is None:
                continue
            if not isinstance(found, torch.Tensor):
                return f"meaning: rank {rank} has no {name}"
            value = Val(part(value.ref), part(value.bound), value.dtype)
            difference = compare(found, value)
            if difference is not None:
                return f"meaning of the program, rank {rank}, {name}: {difference}"
    return None
