"""Random programs with random stream axes, with and without meshes, executed step by step.

Each step sees only its own blocks. The results must equal those of the program without steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from fuser.frontend.executor_cache import FusionExecutorCache
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.ops.nodes import CatOp
from fuser.ir.types import ParallelType
from fuser.ops.reference.meaning import evaluate_fusion
from fuser.support.errors import FuserError
from multidevice import simulate
from multidevice.job.communicator import Communicator
from multidevice.job.shard_tensor import shard_for_rank
from multidevice.sharding.placement import is_plain_broadcast
from multidevice.sharding.queries import requested_devices
from multidevice.sharding.streams import stream_axis
from tests.multidevice.sharding.passes import test_pipeline_random as programs
from tests.support import step_by_step
from tests.support.rank_by_rank import run

# Why a program may be refused, as its error says.
REFUSALS = (
    "cannot be computed in steps",  # a stream that the user asked for
    "is not divisible by",  # devices inside of ragged steps
    "only Allgather, Allreduce",  # blocks of steps and blocks of devices, differently nested
)


class Maker(programs._Maker):  # pyright: ignore[reportPrivateUsage]
    """Builds one random program with streams; extents need not be divisible where no mesh cuts
    them.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.has_mesh = self.rng.random() < 0.5
        self.merges = random.Random(f"merges of {seed}")

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
            others = [
                k
                for k in free
                if k != at
                and loop[k].number in tv.domain.logical_numbers
                and not (loop[k].is_reduction() or loop[at].is_reduction())
                and not loop[k].rfactor
            ]
            is_cat = isinstance(tv.definition(), CatOp)
            if others and not is_cat and self.merges.random() < 0.4:
                # The split has moved what is behind it.
                moved = len(tv.domain.loop) - len(loop)
                other = self.merges.choice(others)
                other += moved * (other > at)
                at, other = (at, other) if self.merges.random() < 0.5 else (other, at)
                tv.merge(at, other)
                at = min(at, other)
            tv.axis(at).parallelize(ParallelType.stream)


def check(
    seed: int, units: Callable[[Fusion], list[step_by_step.Unit]] = step_by_step.ops_of
) -> str:
    """Runs a random program; returns why it was refused, "" if it ran, or "-" if it has no
    steps.
    """
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


@pytest.mark.parametrize("units", [step_by_step.ops_of, step_by_step.segments_of])
@pytest.mark.parametrize("first", range(0, 60, 10))
def test_random_programs_in_steps(
    first: int, units: Callable[[Fusion], list[step_by_step.Unit]]
) -> None:
    results = [check(seed, units) for seed in range(first, first + 10)]
    assert results.count("") >= 3, results


# ------------------------------------------------------------------ as the compiler runs them
def compiled(seed: int) -> str:
    """Runs a random program with `execute` on simulated ranks, with each stream as late as
    allowed.
    """
    print("seed", seed)
    maker = Maker(seed)
    maker.build(steps=maker.rng.randint(2, 9))
    used = {out for op in maker.fusion.used_exprs() for out in op.outputs} | {*maker.fusion.inputs}
    maker.shapes = {tv: shape for tv, shape in maker.shapes.items() if tv in used}
    expected = evaluate_fusion(maker.fusion, maker.values, dtype=torch.float64)
    maker.annotate()
    print(maker.fusion)
    cache = FusionExecutorCache(maker.fusion)
    devices = requested_devices(maker.fusion)

    def body() -> list[torch.Tensor]:
        rank = Communicator.instance().rank()
        given = [
            shard_for_rank(v, tv, rank) if isinstance(tv, TensorView) and tv.mesh else v
            for tv, v in zip(maker.fusion.inputs, maker.values, strict=True)
        ]
        return cache.execute(given, _enable_options=["late_stream(all)"])

    try:
        with simulate(len(devices) or 1) as world:
            found = world.run(body)
    except FuserError as error:
        reason = next((r for r in REFUSALS if r in str(error)), None)
        if reason is None:
            raise
        return reason
    sharded = cache._last().program.segmented.fusion  # pyright: ignore[reportPrivateUsage]
    for k, (out, want) in enumerate(zip(sharded.outputs, expected, strict=True)):
        for rank, mine in enumerate(found):
            part = shard_for_rank(want, out, rank) if out.mesh else want
            torch.testing.assert_close(mine[k], part, rtol=1e-7, atol=1e-7)
    return ""


@pytest.mark.parametrize("first", range(1000, 1012, 4))
def test_random_programs_as_they_are_compiled(first: int) -> None:
    results = [compiled(seed) for seed in range(first, first + 4)]
    assert "" in results, results
