"""Compares runs of the evaluator with the interpreter of host programs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hostir import HostIrContainer, HostIrEvaluator
from multidevice import Communicator, simulate
from tests.reference.host_program import Argument, interpret

# The ways to run: (method of the evaluator, stream whose work is held back).
WAYS: tuple[tuple[str, str | int | None], ...] = (
    ("run", None),
    ("evaluate", None),
    ("run", "all"),
    ("run", "entry"),
    ("run", 1),
    ("evaluate", "all"),
)


def check_run(
    program: HostIrContainer,
    calls: Sequence[Sequence[Sequence[Argument]]],
    *,
    streams: int = 4,
    way: str = "run",
    late: str | int | None = None,
    exact: bool = False,
) -> None:
    """Makes calls with one evaluator per rank, and compares results with the interpreter's.

    `calls` has each call's shards by rank. Results are the outputs and the inputs after the run.
    `exact` compares them bit by bit.
    """
    meant = [interpret(program, call, number_of_streams=streams) for call in calls]

    def body() -> None:
        communicator = Communicator.instance() if len(calls[0]) > 1 else None
        rank = communicator.rank() if communicator is not None else 0
        evaluator = HostIrEvaluator(
            program, communicator, number_of_streams=streams, late_stream=late
        )
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number, (call, runs) in enumerate(zip(calls, meant, strict=True)):
            mine = [x.clone() if isinstance(x, torch.Tensor) else x for x in call[rank]]
            outputs = (evaluator.run if way == "run" else evaluator.evaluate)(mine)
            assert len(outputs) == len(runs[rank].outputs)
            pairs = [*zip(outputs, runs[rank].outputs, strict=True)]
            pairs += [
                (got, want)
                for got, want in zip(mine, runs[rank].inputs, strict=True)
                if isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor)
            ]
            for i, (got, want) in enumerate(pairs):
                if want is None:
                    assert got.numel() == 0
                    continue
                difference = differing(got, want, exact=exact)
                assert difference is None, f"call {number}, rank {rank}, result {i}: {difference}"
            # The caller owns the results of a call: no later call changes them.
            kept += [(got, got.clone()) for got in outputs]
        assert all(differing(got, copy, exact=True) is None for got, copy in kept)

    if len(calls[0]) == 1:
        body()
        return
    with simulate(len(calls[0])) as world:
        world.run(body)


def differing(got: torch.Tensor, want: torch.Tensor, *, exact: bool) -> str | None:
    """Returns the difference of two results as text; None if they are equal."""
    if got.dtype is not want.dtype or got.shape != want.shape:
        return f"{got.dtype} {tuple(got.shape)}, expected {want.dtype} {tuple(want.shape)}"
    if got.dtype.is_floating_point and not exact:
        tolerance = 1e-4 if got.itemsize > 2 else 2e-2
        same = torch.isclose(got.float(), want.float(), tolerance, tolerance, equal_nan=True)
    else:
        same = (got == want) | ((got != got) & (want != want))
    if same.all():
        return None
    at = tuple(int(k) for k in (~same).nonzero()[0])
    return (
        f"{int((~same).sum())} of {same.numel()} elements are wrong, the first at {at}: "
        f"got {got[at]}, expected {want[at]}"
    )
