"""Tests random legal schedules of small fusions: many extents, all splits, all parallel types.

The seed is part of the test's name. A failure shows the fusion, the schedule and the kernel.
"""

from __future__ import annotations

import random as rnd
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from fuser import ops
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.scalar import constructors as sc
from fuser.ir.types import ParallelType
from fuser.kernels.kernel_variant import Kernel
from fuser.runtime.compile import compile_kernels
from fuser.schedule.inlining import inline_most
from fuser.schedule.loop_propagation import parallelize_like, transform_like
from fuser.support.errors import DefinitionError, UnsupportedError
from tests.support.hand_schedules import (
    CPU,
    H200,
    LOWERED,
    P,
    check,
    compare,
    define,
    launch,
    lower,
    parallelize,
    random,
)

Make = Callable[[rnd.Random], tuple[Fusion, list[torch.Tensor]]]
SIZES = (1, 2, 3, 5, 7, 8, 12, 13, 24)
CASES = 25


@dataclass
class Case:
    """A scheduled fusion with its inputs."""

    fusion: Fusion
    inputs: list[torch.Tensor]
    kernel: Kernel
    log: str


def transform(tv: TensorView, rng: rnd.Random) -> list[str]:
    """Applies a few random splits, merges and reorders."""
    log: list[str] = []
    for _ in range(rng.randrange(5)):
        loop = tv.domain.loop
        kind = rng.choice(("split", "split", "merge", "reorder"))
        if kind == "split":
            at, factor = rng.randrange(len(loop)), rng.choice((1, 2, 3, 4, 7, 8))
            inner = rng.random() < 0.7
            tv.split(at, factor, inner)
            log.append(f"split({at}, {factor}, {inner})")
        elif kind == "merge" and len(loop) > 1:
            at = rng.randrange(len(loop) - 1)
            if loop[at].is_reduction() == loop[at + 1].is_reduction():
                tv.merge(at)
                log.append(f"merge({at})")
        elif kind == "reorder" and len(loop) > 1:
            a, b = rng.sample(range(len(loop)), 2)
            tv.reorder({a: b})
            log.append(f"reorder({a}: {b})")
    return log


def iterations_first(tv: TensorView) -> None:
    """Moves reduction axes inside, so that a result needs only one register."""
    loop = tv.domain.loop
    order = sorted(range(len(loop)), key=lambda k: loop[k].is_reduction())
    tv.reorder({old: new for new, old in enumerate(order)})


def types(tv: TensorView, rng: rnd.Random) -> list[str]:
    """Sets random parallel types of loop axes, with at most 128 threads."""
    free = [P.grid_x, P.grid_y, P.grid_z, P.block_x, P.block_y, P.block_z]
    threads, log = 1, []
    for k, axis in enumerate(tv.domain.loop):
        extent = sc.int_value(axis.extent)
        choices: list[ParallelType | None] = [None, *(p for p in free if p.is_block)]
        if extent is not None:
            choices.append(P.unroll)
            if threads * extent <= 128:
                choices += [p for p in free if p.is_thread]
        ptype = rng.choice(choices)
        if ptype is None:
            continue
        if ptype in free:
            free.remove(ptype)
            threads *= extent if ptype.is_thread and extent is not None else 1
        tv.axis(k).parallelize(ptype)
        log.append(f"{k}: {ptype.text}")
    return log


def extents(shape: list[int], rng: rnd.Random) -> list[int]:
    """Makes some extents constant, so that values can stay in registers."""
    return [n if n > 1 and rng.random() < 0.5 else -1 for n in shape]


def pointwise(rng: rnd.Random) -> tuple[Fusion, list[torch.Tensor]]:
    rank = rng.randrange(1, 4)
    shape = [rng.choice(SIZES) for _ in range(rank)]
    hidden = [rng.random() < 0.3 for _ in range(rank)]

    def build(a: TensorView, b: TensorView) -> list[TensorView]:
        c = ops.add(a, ops.mul(b, 2.0))
        outs = [ops.exp(ops.neg(ops.abs(c)))]
        if rng.random() < 0.3:
            outs.append(ops.mul(c, a))
        if rng.random() < 0.3:
            outs.append(ops.permute(ops.neg(c), list(reversed(range(rank)))))
        if rng.random() < 0.3:
            outs = [ops.pad(outs[0], [1, 2]), *outs[1:]]
        elif rng.random() < 0.3:
            outs = [ops.cat([outs[0], ops.slice(c, [0] * rank, c.shape())], rank - 1), *outs[1:]]
        return outs

    first = extents(shape, rng)
    second = [1 if h else n for h, n in zip(hidden, first, strict=True)]
    fusion = define(build, first, second)
    other = [1 if h else n for h, n in zip(hidden, shape, strict=True)]
    return fusion, [random(shape, seed=rng.randrange(99)), random(other, seed=rng.randrange(99))]


def reduction(rng: rnd.Random) -> tuple[Fusion, list[torch.Tensor]]:
    rank = rng.randrange(1, 4)
    shape = [rng.choice(SIZES) for _ in range(rank)]
    dims = sorted(rng.sample(range(rank), rng.randrange(1, rank + 1)))
    kind = rng.choice(("sum", "max", "two", "welford", "epilogue"))

    def build(a: TensorView) -> list[TensorView]:
        if kind == "two":
            return [ops.sum(a, dims), ops.min(ops.mul(a, a), dims)]
        if kind == "welford":
            return list(ops.var_mean(a, dims, 0, False))
        if kind == "epilogue":
            return [ops.mul(ops.sum(ops.exp(a), dims), 0.25)]
        return [getattr(ops, kind)(a, dims)]

    return define(build, extents(shape, rng)), [random(shape, seed=rng.randrange(99))]


def schedule(fusion: Fusion, rng: rnd.Random, *, on_cpu: bool) -> str:
    with FusionGuard(fusion):
        reads = [v.cache_after() for v in list(fusion.inputs) if rng.random() < 0.5]  # pyright: ignore
        if rng.random() < 0.5:
            for out in list(fusion.outputs):
                out.cache_before()
    ref = next(
        (
            o
            for o in (e.out_tensor for e in fusion.exprs)
            if any(a.is_reduction() for a in o.domain.logical)
        ),
        fusion.outputs[0],
    )
    log = transform(ref, rng)
    if any(a.is_reduction() for a in ref.domain.loop):
        iterations_first(ref)
    if not on_cpu:
        log += types(ref, rng)
    transform_like(ref)
    parallelize_like(ref)
    inline_most(fusion=fusion)
    for tv in reads:
        if tv.compute_at and rng.random() < 0.5:
            tv.compute_at = rng.randrange(tv.compute_at + 1)
            log.append(f"T{tv.number} at {tv.compute_at}")
    return "; ".join(log)


def make_case(make: Make, seed: int, *, on_cpu: bool) -> Case | None:
    rng = rnd.Random(seed)
    fusion, inputs = make(rng)
    log = schedule(fusion, rng, on_cpu=on_cpu)
    try:
        kernel = lower(fusion, name=f"case{seed}", device=CPU if on_cpu else H200)
    except (UnsupportedError, DefinitionError) as refused:
        # Only these errors are legal: a launch shape that is not constant, or too many registers.
        assert "register" in str(refused) or "is not constant" in str(refused), (seed, log, refused)
        return None
    return Case(fusion, inputs, kernel, log)


@pytest.mark.parametrize("device", ["gpu", "cpu"])
@pytest.mark.parametrize("make", [pointwise, reduction])
@pytest.mark.parametrize("first", [0, 1000])
def test_random_schedules(make: Make, device: str, first: int) -> None:
    made = {
        seed: make_case(make, seed, on_cpu=device == "cpu") for seed in range(first, first + CASES)
    }
    cases = {seed: case for seed, case in made.items() if case is not None}
    assert len(cases) > 0.8 * CASES
    compiled = compile_kernels([c.kernel.source for c in cases.values()], "cpu", checked=True)
    for (seed, case), kernel in zip(cases.items(), compiled, strict=True):
        LOWERED.append(case.kernel)
        try:
            found = launch(case.fusion, case.kernel, case.inputs, compiled=kernel)
            compare(case.fusion, case.kernel, case.inputs, found)
        except Exception as error:
            shapes = [tuple(t.shape) for t in case.inputs]
            raise AssertionError(
                f"seed {seed}, inputs {shapes}, schedule: {case.log}\n{case.fusion}\n"
                f"{case.kernel.source.text}\n{error}"
            ) from error


def test_registers_behind_a_pad_are_read_inside_only() -> None:
    """For padded elements, the reader must neither load memory nor read registers."""

    def build(a: TensorView) -> TensorView:
        return ops.pad(ops.exp(a), [1, 2])

    fusion = define(build, (7, 24))
    with FusionGuard(fusion):
        read = fusion.inputs[0].cache_after()  # pyright: ignore
    out = fusion.outputs[0]
    out.split(0, 7)
    parallelize(out, P.grid_x, P.unroll)
    transform_like(out)
    parallelize_like(out)
    inline_most(fusion=fusion)
    read.compute_at = 1
    check(fusion, [random((7, 24))])
