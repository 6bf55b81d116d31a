"""Random programs with random stream axes, with and without meshes: run step by step, each step on
its own blocks, they equal the program that is computed at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fuser.errors import FuserError
from fuser.ir.fusion import Fusion
from fuser.ir.types import ParallelType
from fuser.ops.torch_meaning import evaluate_fusion
from multidevice.placement import is_plain_broadcast
from multidevice.streams import stream_axis
from tests.multidevice import in_steps
from tests.multidevice import test_random_programs as programs
from tests.multidevice.all_ranks import run

# Why a program may be refused, as its error says.
REFUSALS = (
    "outer reshaped id",  # a device axis on the inner side of a reshape
    "divisible by the split",
    "cannot be computed in steps",  # a stream that the user asked for
    "is not divisible by",  # devices inside of ragged steps
    "only Allgather, Allreduce",  # blocks of steps and blocks of devices, differently nested
)


class Maker(programs._Maker):  # pyright: ignore[reportPrivateUsage]
    """Builds one random program with streams; sizes are ragged where no mesh divides them."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.has_mesh = self.rng.random() < 0.5

    def input(self, shape: list[int]):
        if not self.has_mesh and not self.shapes:
            shape = [self.rng.choice((1, 2, 5, 7, 8, 12)) for _ in shape]
        return super().input(shape)

    def annotate(self) -> None:
        if self.has_mesh:
            super().annotate()
        for tv in list(self.shapes):
            if self.rng.random() < 0.6:
                continue
            loop = tv.domain.loop
            free = [
                k
                for k, a in enumerate(loop)
                if a.ptype is ParallelType.serial and not is_plain_broadcast(a)
            ]
            if not free:
                continue
            at = self.rng.choice(free)
            is_logical = loop[at].number in tv.domain.logical_numbers
            if not is_logical or self.rng.random() < 0.6:
                tv.outer_split(at, self.rng.choice((2, 2, 3, 4, 9)))
            tv.axis(at).parallelize(ParallelType.stream)


def check(seed: int, units: Callable[[Fusion], list[in_steps.Unit]] = in_steps.ops_of) -> str:
    """Run a random program; return why it was refused, "" if it ran, "-" without steps."""
    print("seed", seed)
    maker = Maker(seed)
    maker.build(steps=maker.rng.randint(2, 9))
    expected = evaluate_fusion(maker.fusion, maker.values, dtype=torch.float64)
    maker.annotate()
    print(maker.fusion)
    try:
        done = run(maker.fusion, maker.values, units=units)
    except FuserError as error:
        reason = next((r for r in REFUSALS if r in str(error)), None)
        if reason is None:
            raise
        return reason
    for got, want in zip(done.outputs, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)
    return "" if any(stream_axis(op.out_tensor) for op in maker.fusion.exprs) else "-"


@pytest.mark.parametrize("units", [in_steps.ops_of, in_steps.segments_of])
@pytest.mark.parametrize("first", range(0, 60, 10))
def test_random_programs_in_steps(
    first: int, units: Callable[[Fusion], list[in_steps.Unit]]
) -> None:
    results = [check(seed, units) for seed in range(first, first + 10)]
    assert results.count("") >= 3, results
