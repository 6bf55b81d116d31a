"""Fusions that the compiler cuts into segments, and checks of the results of the segments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.scalar.constructors import Symbol
from fuser.ops.define import define_tensor
from fuser.ops.reference.meaning import evaluate_fusion
from fuser.passes.segment import SegmentedFusion, segment_fusion
from fuser.schedule.registry import find_scheduler
from fuser.schedule.transpose import stays_coalesced


def fusion_of(build: Callable[..., Any], *ranks: int) -> Fusion:
    """Defines a fusion of contiguous Float inputs; `build` returns one output or several."""
    fusion = Fusion()
    with FusionGuard(fusion):
        inputs = [define_tensor([-1] * rank, contiguity=True) for rank in ranks]
        for tv in inputs:
            fusion.add_input(tv)
        made = build(*inputs)
        for out in made if isinstance(made, tuple) else (made,):
            fusion.add_output(out)
    return fusion


def cut(
    fusion: Fusion, scheduler: Callable[[Fusion], str | None] = find_scheduler
) -> SegmentedFusion:
    return segment_fusion(
        fusion,
        find_scheduler=scheduler,
        local_shape=TensorView.shape,
        pays=stays_coalesced,
    )


def without_persistent(fusion: Fusion) -> str | None:
    """Returns the scheduler for rows that are too long to be kept in one block."""
    return find_scheduler(fusion, suits=lambda row: not row.name.endswith("persistent"))


def kinds(segmented: SegmentedFusion) -> list[str]:
    return [s.scheduler or s.kind for s in segmented.segments]


def check_values(fusion: Fusion, *shapes: tuple[int, ...]) -> None:
    """Checks that the segments, run one after another in float64, give the whole fusion's
    results.
    """
    segmented = cut(fusion)
    inputs = [torch.randn(s, dtype=torch.float64) for s in shapes]
    tensors = [tv for tv in fusion.inputs if isinstance(tv, TensorView)]
    pairs = list(zip(tensors, inputs, strict=True))
    extents = {
        axis.size: size
        for tv, t in pairs
        for axis, size in zip(tv.domain.logical, t.shape, strict=True)
        if isinstance(axis.size, Symbol)
    }
    known = {tv.number: t for tv, t in pairs}
    for segment in segmented.segments:
        own = segment.fusion
        assert own is not None, "only kernels here"
        args = [known[tv.number] for tv in own.inputs if isinstance(tv, TensorView)]
        results = evaluate_fusion(own, args, dtype=torch.float64, values=extents)
        known.update((o.number, r) for o, r in zip(own.outputs, results, strict=True))
    for out, expected in zip(
        fusion.outputs, evaluate_fusion(fusion, inputs, dtype=torch.float64), strict=True
    ):
        torch.testing.assert_close(known[out.number], expected)
