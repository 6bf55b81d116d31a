"""Bandwidth of pointwise and reduction kernels on one GPU, against a copy in the same run.

    python -m benchmarks.kernels [--explore]

Prints, per pattern and shape: microseconds (median over batches), TB/s counting every input and
output once, and the ratio to a `clone` of the same input. `--explore` also tries neighbouring
parameters of each scheduler.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
from collections.abc import Callable, Sequence

import torch

from fuser import ops
from fuser.ir.dtypes import DataType, to_torch
from fuser.ir.fusion import Fusion
from fuser.ir.guard import FusionGuard
from fuser.ir.tensor import TensorView
from fuser.runtime.executor import KernelExecutor
from fuser.schedule import find_scheduler
from fuser.schedule.pointwise import PointwiseParams
from fuser.schedule.reduction import ReductionParams

BF16 = DataType.BFloat16
BATCHES, LAUNCHES = 7, 20


def gelu_mul_add(x: TensorView, y: TensorView, z: TensorView) -> TensorView:
    half = ops.mul(x, 0.5)
    gelu = ops.mul(half, ops.add(1.0, ops.erf(ops.mul(x, 0.7071067811865476))))
    return ops.cast(ops.add(ops.mul(gelu, y), z), BF16)


def silu_mul(x: TensorView, y: TensorView) -> TensorView:
    return ops.cast(ops.mul(ops.silu(x), y), BF16)


def bias_add(x: TensorView, b: TensorView) -> TensorView:
    return ops.cast(ops.add(x, ops.broadcast(b, [True, False])), BF16)


def copy(x: TensorView) -> TensorView:
    return ops.cast(ops.mul(x, 2.0), BF16)


def row_sum(x: TensorView) -> TensorView:
    return ops.cast(ops.sum(x, [1]), BF16)


def column_sum(x: TensorView) -> TensorView:
    return ops.cast(ops.sum(x, [0]), BF16)


def full_sum(x: TensorView) -> TensorView:
    return ops.cast(ops.sum(x, [0, 1]), BF16)


Shape = tuple[int, ...]
PATTERNS: tuple[tuple[str, Callable[..., TensorView], Callable[[Shape], list[Shape]]], ...] = (
    ("scale", copy, lambda s: [s, s]),
    ("silu*mul", silu_mul, lambda s: [s, s, s]),
    ("gelu*mul+add", gelu_mul_add, lambda s: [s, s, s, s]),
    ("bias", bias_add, lambda s: [s, s[1:], s]),
    ("row sum", row_sum, lambda s: [s, s[:1]]),
    ("column sum", column_sum, lambda s: [s, s[1:]]),
    ("full sum", full_sum, lambda s: [s, ()]),
)
SHAPES = ((16384, 8192), (32768, 1024), (16384, 770))


def define(build: Callable[..., TensorView], shapes: Sequence[Shape]) -> Fusion:
    fusion = Fusion()
    with FusionGuard(fusion):
        inputs = []
        for shape in shapes:
            tv = fusion.new_tensor([fusion.new_axis(fusion.new_symbol()) for _ in shape], BF16)
            fusion.add_input(tv)
            inputs.append(tv)
        fusion.add_output(build(*inputs))
    return fusion


def microseconds(run: Callable[[], object]) -> float:
    """Return the median time of a launch over batches of launches."""
    for _ in range(3):
        run()
    times = []
    for _ in range(BATCHES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(LAUNCHES):
            run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / LAUNCHES)
    return statistics.median(times)


def neighbours(params: object) -> list[object]:
    """Return parameters near the chosen ones."""
    match params:
        case PointwiseParams():
            return [
                dataclasses.replace(params, unroll=u, threads_x=t)
                for u, t in itertools.product(
                    (1, 2, 4),
                    {params.threads_x, 256 if params.threads_x == 128 else params.threads_x},
                )
            ]
        case ReductionParams(inner=True):
            return [
                dataclasses.replace(params, unroll=u, threads_x=x, threads_y=max(t // x, 1))
                for u, x, t in itertools.product(
                    (1, 2, 4),
                    (params.threads_x // 2, params.threads_x, 2 * params.threads_x),
                    (128, 256),
                )
            ]
        case ReductionParams():
            return [
                dataclasses.replace(
                    params,
                    unroll=u,
                    threads_x=x,
                    threads_y=t // x,
                    grid=max(params.grid * g // 4, 1),
                )
                for u, x, t, g in itertools.product((8, 16), (16, 32, 64), (256, 512), (1, 2, 4))
            ]
    return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--explore", action="store_true")
    explore = parser.parse_args().explore
    print(torch.cuda.get_device_name(), torch.__version__)
    for shape in SHAPES:
        x = torch.randn(shape, device="cuda").to(torch.bfloat16)
        clone = microseconds(lambda x=x: x.clone())
        copied = 2 * x.numel() * 2 / clone / 1e6
        print(f"{shape}: clone {clone:.1f} us, {copied:.2f} TB/s")
        for name, build, shapes_of in PATTERNS:
            *inputs, output = shapes_of(shape)
            fusion = define(build, inputs)
            scheduler = find_scheduler(fusion)
            assert scheduler is not None
            tensors = [torch.randn(s, device="cuda").to(to_torch(BF16)) for s in inputs]
            out = torch.empty(output, device="cuda", dtype=to_torch(BF16))
            nbytes = 2 * (sum(t.numel() for t in tensors) + out.numel())

            def measure(executor: KernelExecutor, tensors=tensors, out=out) -> float:
                return microseconds(lambda: executor.run(tensors, [out], sizes={}))

            executor = KernelExecutor(fusion, scheduler=scheduler, name="bench")
            us = measure(executor)
            (variant,) = executor.variants
            rate = nbytes / us / 1e6
            print(
                f"  {name:14} {us:8.1f} us  {rate:5.2f} TB/s  {rate / copied:4.2f} of copy  "
                f"{variant.params}"
            )
            if not explore:
                continue
            found = []
            for params in neighbours(variant.params):
                other = KernelExecutor(fusion, scheduler=scheduler, name="bench")
                other.scheduler = dataclasses.replace(
                    other.scheduler, heuristics=lambda *_, params=params: params
                )
                found.append((measure(other), str(params)))
            for us, text in sorted(found)[:4]:
                print(f"      {us:8.1f} us  {text}")


if __name__ == "__main__":
    main()
