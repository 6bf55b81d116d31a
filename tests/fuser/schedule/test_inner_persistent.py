"""Tests softmax, norms and their backwards as one kernel, against torch in float64.

As in `test_reduction_numeric.py`: with the CPU's loops, and with the H200's schedule in checked
mode.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from fuser import FusionDefinition, ops
from fuser.ir.dtypes import DataType, from_torch
from fuser.ir.fusion import TensorView
from fuser.runtime.cpu_kernel import CheckedCpuKernel, Counters
from fuser.schedule import find_scheduler, rejections, scheduler
from fuser.schedule.inner_persistent import pays
from fuser.support.device import H200
from tests.support.kernel_checks import BOTH, back, check
from tests.support.row_programs import F, back_to, layer_norm, normalized, softmax, wide
from tests.support.small_fusions import (
    Build,
    define,
    make_executor,
    random,
    run,
    scheduled,
    sizes_of,
)

BF16 = DataType.BFloat16


def log_softmax(x: TensorView) -> TensorView:
    x = wide(x)
    shifted = ops.sub(x, ops.max(x, -1, keepdim=True))
    return ops.sub(shifted, ops.log(ops.sum(ops.exp(shifted), -1, keepdim=True)))


SHAPES = [(1, 31), (7, 1), (3, 384), (130, 48), (2, 1000), (3, 4096), (2, 8191), (1, 50257)]


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_softmax(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    check(
        lambda x: back(softmax(x), dtype),
        lambda x: torch.softmax(x, -1),
        [random(shape, dtype)],
        device,
        broadcast_ones=False,
    )


@BOTH
@pytest.mark.parametrize("shape", [(1, 31), (3, 384), (2, 4096)], ids=str)
def test_log_softmax(shape: tuple[int, int], device: str) -> None:
    check(log_softmax, lambda x: torch.log_softmax(x, -1), [random(shape, torch.float32)], device)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 31), (130, 48), (3, 384), (2, 1001), (2, 30000)], ids=str)
def test_layer_norm(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    def build(x: TensorView, w: TensorView, b: TensorView) -> Sequence[TensorView]:
        y, mean, rstd = normalized(x)
        out = back_to(x, ops.add(ops.mul(y, wide(w)), wide(b)))
        return out, ops.squeeze(mean, [1]), ops.squeeze(rstd, [1])

    def reference(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Sequence[torch.Tensor]:
        var, mean = torch.var_mean(x, -1, correction=0)
        y = torch.nn.functional.layer_norm(x, x.shape[1:], w, b)
        return y, mean.float(), torch.rsqrt(var + 1e-5).float()

    inputs = [random(shape, dtype), *(random(shape[1:], dtype, seed) for seed in (1, 2))]
    check(build, reference, inputs, device, scale=4)


@BOTH
def test_a_residual_and_its_sum_is_an_output(device: str) -> None:
    def build(x: TensorView, r: TensorView, w: TensorView) -> Sequence[TensorView]:
        h = ops.add(wide(x), wide(r))
        mean = ops.div(ops.sum(ops.mul(h, h), -1, keepdim=True), h.size(1))
        y = ops.mul(ops.mul(h, ops.rsqrt(ops.add(mean, 1e-6))), wide(w))
        return back_to(x, h), back_to(x, y)

    def reference(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> Sequence[torch.Tensor]:
        h = x + r
        return h, h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-6) * w

    shape = (5, 768)
    inputs = [random(shape, torch.bfloat16, s) for s in (0, 1)] + [random((768,), torch.bfloat16)]
    check(build, reference, inputs, device)


def softmax_backward(dy: TensorView, y: TensorView) -> TensorView:
    g, y32 = wide(dy), wide(y)
    return back_to(dy, ops.mul(y32, ops.sub(g, ops.sum(ops.mul(g, y32), -1, keepdim=True))))


@BOTH
def test_softmax_backward(device: str) -> None:
    inputs = [random((6, 1000), torch.bfloat16, s) for s in (0, 1)]
    check(
        softmax_backward,
        lambda g, y: y * (g - (g * y).sum(-1, keepdim=True)),
        inputs,
        device,
        scale=20,
    )


@BOTH
def test_layer_norm_backward_of_the_input(device: str) -> None:
    def build(dy: TensorView, x: TensorView, w: TensorView, m: TensorView, r: TensorView):
        n = x.size(1)
        x_hat = ops.mul(ops.sub(wide(x), m), r)
        g = ops.mul(wide(dy), wide(w))
        first = ops.div(ops.sum(g, -1, keepdim=True), n)
        second = ops.div(ops.sum(ops.mul(g, x_hat), -1, keepdim=True), n)
        return back_to(dy, ops.mul(r, ops.sub(ops.sub(g, first), ops.mul(x_hat, second))))

    def reference(dy, x, w, m, r):
        x_hat, g = (x - m) * r, dy * w
        return r * (g - g.mean(-1, keepdim=True) - x_hat * (g * x_hat).mean(-1, keepdim=True))

    shapes = [(7, 520), (7, 520), (520,), (7, 1), (7, 1)]
    inputs = [random(s, torch.float32, k) for k, s in enumerate(shapes)]
    check(build, reference, inputs, device, scale=10)


@BOTH
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_a_mask_that_heads_share(kind: str, device: str) -> None:
    b, h, s = 3, 4, 136

    def build(x: TensorView, mask: TensorView) -> TensorView:
        x = ops.mul(wide(x), 0.125)
        kept = ops.ge(mask, 0.0)
        x = ops.where(kept, x, -1e30) if kind == "bool" else ops.add(x, wide(mask))
        return softmax(x)

    def reference(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x * 0.125
        return torch.softmax(torch.where(mask >= 0, x, -1e30) if kind == "bool" else x + mask, -1)

    inputs = [random((b, h, s, s), torch.float32), random((b, 1, 1, s), torch.float32, 1)]
    check(build, reference, inputs, device)


@BOTH
def test_a_sum_that_divides_and_is_read_itself(device: str) -> None:
    def build(x: TensorView) -> TensorView:
        e = ops.exp(ops.sub(x, ops.max(x, 1, keepdim=True)))
        total = ops.sum(e, 1, keepdim=True)
        return ops.sub(ops.div(e, total), total)

    def reference(x: torch.Tensor) -> torch.Tensor:
        e = torch.exp(x - x.amax(1, keepdim=True))
        return e / e.sum(1, keepdim=True) - e.sum(1, keepdim=True)

    check(build, reference, [random((6, 40), torch.float32)], device, scale=10)


@BOTH
@pytest.mark.parametrize("is_static", [False, True], ids=["symbolic", "static"])
def test_weights_with_broadcast_axes(is_static: bool, device: str) -> None:
    """The weights have fewer loops than the ops that read them."""

    def build(x: TensorView, w: TensorView) -> TensorView:
        return ops.mul(ops.mul(x, ops.sum(x, [2], keepdim=True)), w)

    inputs = [random((5, 4, 8), torch.float32), random((1, 1, 8), torch.float32, 1)]
    check(
        build,
        lambda x, w: x * x.sum(2, keepdim=True) * w,
        inputs,
        device,
        scale=10,
        is_static=is_static,
    )


@BOTH
def test_softmaxes_of_softmaxes(device: str) -> None:
    def build(x: TensorView) -> TensorView:
        for _ in range(4):
            x = ops.mul(softmax(x), 3.0)
        return x

    def reference(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.softmax(x, -1) * 3.0
        return x

    check(build, reference, [random((5, 264), torch.float32)], device)


@BOTH
@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0), (0, 2, 1)], ids=str)
def test_permuted_inputs(order: tuple[int, int, int], device: str) -> None:
    x = random((6, 10, 64), torch.float32).permute(*order)
    check(softmax, lambda x: torch.softmax(x, -1), [x], device)


@BOTH
def test_rows_with_gaps_and_expanded_inputs(device: str) -> None:
    x = random((9, 80), torch.float32)[:, 3:70]
    y = random((1, 67), torch.float32, 1).expand(9, 67)
    check(
        lambda x, y: softmax(ops.add(x, y)),
        lambda x, y: torch.softmax(x + y, -1),
        [x, y],
        device,
    )


@pytest.mark.parametrize("options", [[], ["schedules_for(h200)"]], ids=["cpu", "h200"])
def test_outputs_lie_as_they_were_declared(options: list[str]) -> None:
    """Ops that replace a division or a Welford op keep its result tensor, and so its
    memory order."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1, -1], contiguity=True)
        var, mean = fd.ops.var_mean(x, [2], 0)
        e = fd.ops.exp(fd.ops.sub(x, fd.ops.max(x, 2, keepdim=True)))
        y = fd.ops.div(e, fd.ops.sum(e, 2, keepdim=True))
        z = fd.ops.sub(x, fd.ops.broadcast(mean, [False, False, True]))
        outs = [y, z, mean, var]
        for out in outs:
            fd.add_output(out)
            axes = [out.axis(k) for k in range(out.ndim) if not out.axis(k).is_reduction()]
            axes[0:2] = axes[1::-1]
            out.set_allocation_domain(axes, True)
    x = random((5, 6, 64), torch.float32)
    got = fd.execute([x], _enable_options=options)
    wide = x.double()
    var, mean = torch.var_mean(wide, 2, correction=0)
    for out, want in zip(got, (wide.softmax(2), wide - mean[..., None], mean, var), strict=True):
        assert out.stride(0) < out.stride(1)
        torch.testing.assert_close(out, want.float(), rtol=1e-5, atol=1e-5)


@BOTH
def test_a_factory_that_several_levels_read(device: str) -> None:
    """The factory's axis relates the axes of its readers, so it must not be duplicated."""

    def build(x: TensorView) -> Sequence[TensorView]:
        steps = ops.iota(5, 0.5, 0.25, F)
        return ops.var(steps, [0], 1, False), ops.mul(steps, x)

    def reference(x: torch.Tensor) -> Sequence[torch.Tensor]:
        steps = torch.arange(5, dtype=torch.float64) * 0.25 + 0.5
        return steps.var(), steps * x

    check(build, reference, [torch.tensor(3.0)], device)


@BOTH
def test_several_reduced_axes(device: str) -> None:
    def build(x: TensorView) -> TensorView:
        var, mean = ops.var_mean(x, [1, 2, 3], correction=0, keepdim=True)
        return ops.mul(ops.sub(x, mean), ops.rsqrt(ops.add(var, 1e-5)))

    x = random((5, 3, 8, 12), torch.float32)
    check(build, lambda x: torch.nn.functional.layer_norm(x, x.shape[1:]), [x], device, scale=4)


@BOTH
def test_rows_of_nan_and_infinity(device: str) -> None:
    x = random((6, 512), torch.float32)
    x[0, 3], x[1, 5], x[2, 7] = float("nan"), float("inf"), -float("inf")
    x[3] = -float("inf")
    check(softmax, lambda x: torch.softmax(x, -1), [x], device)
    check(
        lambda x: normalized(x)[0],
        lambda x: torch.nn.functional.layer_norm(x, x.shape[1:]),
        [x],
        device,
        scale=4,
    )


# ------------------------------------------------------------------ what is accepted
def test_softmax_is_accepted() -> None:
    assert find_scheduler(define(softmax, [None, None])) == "inner_persistent"


def reason(build: Build, *shapes: Sequence[int | None]) -> str:
    return rejections(define(build, *shapes))["inner_persistent"]


def test_the_reason_against_a_fusion_names_its_tensors() -> None:
    rows = (None, None)
    assert "no op along the reduced axes" in reason(lambda x: ops.sum(x, [1]), rows)
    assert "not innermost in memory" in reason(lambda x: softmax(x, 0), rows)
    both = reason(lambda x: ops.sub(softmax(x), softmax(x, 0)), rows)
    assert "reduce different axes" in both
    shifted = reason(lambda x: ops.slice(softmax(x), [0, 1], [4, 5]), (4, 6))
    assert "read at shifted indices" in shifted
    assert "there is no reduction" in reason(ops.relu, rows)


def test_few_long_rows_are_left_to_kernels_that_share_them_between_blocks() -> None:
    assert pays(1, 8192) and pays(32, 16384) and pays(256, 65536)
    assert not pays(1, 8193) and not pays(31, 16384) and not pays(255, 16385)
    assert not pays(1 << 20, 65537)
    fusion = define(softmax, [None, None])
    for shape, suits in (((4096, 8193), True), ((2, 1 << 20), False)):
        row = scheduler("inner_persistent")
        assert row.suits(fusion, sizes_of(fusion, shape)) is suits


@BOTH
@pytest.mark.parametrize("shape", [(1, 1), (9, 7), (9, 384), (11, 65), (9, 8191), (300, 129)])
def test_values_compared_with_places(shape: tuple[int, int], device: str) -> None:
    """Targets are inside and outside of the row. Some differ from an index only in the high 32
    bits."""
    rows, columns = shape

    def build(x: TensorView, t: TensorView) -> Sequence[TensorView]:
        places = ops.broadcast(ops.iota(x.size(1), dtype=DataType.Int), [True, False])
        targets = ops.broadcast(t, [False, True])
        e = softmax(x)
        hit = ops.where(ops.eq(places, targets), ops.sub(e, 1.0), e)
        missed = ops.sum(ops.where(ops.ne(targets, places), wide(x), 0.0), -1)
        return back_to(x, hit), missed

    def reference(x: torch.Tensor, t: torch.Tensor) -> Sequence[torch.Tensor]:
        is_target = torch.arange(columns)[None, :] == t.long()[:, None]
        missed = torch.where(is_target, 0.0, x).sum(-1)
        return torch.softmax(x, -1) - is_target.double(), missed.float()

    high = [1 << 31, 1 << 32, -(1 << 31), -(1 << 32), 1 << 62, -(1 << 63)]
    some = [0, columns - 1, columns // 2, -1, columns, *high, *(h + columns - 1 for h in high)]
    t = torch.tensor([some[row % len(some)] for row in range(rows)])
    for dtype in (torch.bfloat16, torch.float32):
        x = random(shape, dtype)
        check(build, reference, [x, t], device, scale=20, broadcast_ones=False)


# ------------------------------------------------------------------ what it costs
def counters(build: Build, inputs: Sequence[torch.Tensor], outputs: int = 1) -> Counters:
    dtypes = [from_torch(t.dtype) for t in inputs]
    fusion = define(build, *([None] * t.dim() for t in inputs), dtype=dtypes)
    executor = make_executor(fusion, "h200")
    run(executor, inputs, [tuple(inputs[0].shape)] * outputs)
    (variant,) = executor.variants
    assert isinstance(variant.compiled, CheckedCpuKernel)
    return variant.compiled.counters


@pytest.mark.parametrize("shape", [(3, 384), (2, 4096), (2, 8192), (1, 32768)], ids=str)
def test_a_row_that_fits_is_read_once_and_in_whole_words(shape: tuple[int, int]) -> None:
    x = random(shape, torch.bfloat16)
    words = x.numel() * 2 // 16
    found = counters(lambda x: back(softmax(x), torch.bfloat16), [x])
    assert found.global_loads == {16: words} and found.global_stores == {16: words}
    w = random(shape[1:], torch.bfloat16)
    found = counters(layer_norm, [x, w, w])
    assert found.global_loads == {16: words + 2 * shape[0] * shape[1] * 2 // 16}
    dy = random(shape, torch.bfloat16, 1)
    assert counters(softmax_backward, [dy, x]).global_loads == {16: 2 * words}


WIDE_WEIGHTS = [
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float64),
    (torch.float32, torch.float64),
    (torch.float32, torch.bfloat16),
]


@BOTH
@pytest.mark.parametrize("dtypes", WIDE_WEIGHTS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 384), (7, 260), (130, 33), (2, 4100), (2, 8192)])
def test_weights_of_another_dtype(
    shape: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype], device: str
) -> None:
    """The weights begin at aligned addresses, and between two."""

    def build(x: TensorView, w: TensorView, b: TensorView) -> Sequence[TensorView]:
        y, mean, rstd = normalized(x)
        out = back_to(x, ops.add(ops.mul(y, ops.cast(w, F)), ops.cast(b, F)))
        return out, ops.squeeze(mean, [1]), ops.squeeze(rstd, [1])

    def reference(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Sequence[torch.Tensor]:
        var, mean = torch.var_mean(x, -1, correction=0)
        rstd = torch.rsqrt(var + 1e-5)
        return (x - mean[:, None]) * rstd[:, None] * w + b, mean.float(), rstd.float()

    x, (w, b) = random(shape, dtypes[0]), (random(shape[1:], dtypes[1], s) for s in (1, 2))
    for weights in ((w, b), (_moved(w, 16 // w.itemsize), b), (w, _moved(b, 1))):
        check(build, reference, [x, *weights], device, scale=4, broadcast_ones=False)


@pytest.mark.parametrize("shape", [(3, 384), (2, 4096), (2, 8192)], ids=str)
def test_wide_weights_leave_rows_in_whole_words(shape: tuple[int, int]) -> None:
    """The weights of one vector of a row take two vector loads."""
    x, w = random(shape, torch.bfloat16), random(shape[1:], torch.float32)
    words = x.numel() // 8
    found = counters(layer_norm, [x, w, w])
    assert found.global_loads == {16: words + 2 * 2 * words}
    assert found.global_stores == {16: words}


@pytest.mark.parametrize("shape", [(5, 65), (7, 333), (300, 129), (3, 8191), (2, 20001)], ids=str)
def test_a_row_of_any_length_is_read_in_whole_words(shape: tuple[int, int]) -> None:
    """A row is read in aligned vectors. Only the stores at its ends, and the load at the end of the
    tensor, are shorter."""
    rows, columns = shape
    begins = [row * columns for row in range(rows)]
    words = sum((b + columns - 1) // 8 - b // 8 + 1 for b in begins)
    whole = sum((b + columns) // 8 - -(-b // 8) for b in begins)
    x = random(shape, torch.bfloat16)
    found = counters(lambda x: back(softmax(x), torch.bfloat16), [x])
    last = x.numel() % 8
    expected = {2: last, 16: words - 1} if last else {16: words}
    assert found.global_loads == expected
    assert found.global_stores == {2: x.numel() - 8 * whole, 16: whole}


def _moved(x: torch.Tensor, by: int) -> torch.Tensor:
    """Returns a copy whose address is `by` elements after an aligned one."""
    held = torch.full((x.numel() + by,), float("nan"), dtype=x.dtype)
    held[by:] = x.flatten()
    return held[by:].view(x.shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("columns", [63, 64, 65, 71, 127, 1023, 1025, 5001])
@pytest.mark.parametrize("rows", [1, 2, 9, 133])
def test_rows_of_any_length(rows: int, columns: int, dtype: torch.dtype) -> None:
    if rows * columns > 200_000:
        rows = 40
    shape = (rows, columns)

    def build(x: TensorView, r: TensorView, w: TensorView) -> Sequence[TensorView]:
        h = ops.add(wide(x), wide(r))
        y, mean, _ = normalized(h)
        return back_to(x, h), back_to(x, ops.mul(y, wide(w))), ops.squeeze(mean, [1])

    def reference(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> Sequence[torch.Tensor]:
        h = x + r
        y = torch.nn.functional.layer_norm(h, h.shape[1:], w)
        return h, y, h.mean(-1)

    x, r = (random(shape, dtype, seed) for seed in (0, 1))
    w = random(shape[1:], dtype, 2)
    check(build, reference, [x, r, w], "h200", scale=4, broadcast_ones=False)
    check(build, reference, [x, _moved(r, 1), w], "h200", scale=4, broadcast_ones=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_shifted_rows_of_several_axes(dtype: torch.dtype) -> None:
    def build(x: TensorView, m: TensorView) -> TensorView:
        return back(softmax(ops.add(wide(x), m)), dtype)

    x, m = random((3, 5, 7, 131), dtype), random((3, 1, 1, 131), dtype, 1)
    check(build, lambda x, m: torch.softmax(x + m, -1), [x, m], "h200", broadcast_ones=True)
    y = random((3, 5, 11, 13), dtype)
    check(
        lambda y: back(softmax_of(y, [2, 3]), dtype),
        lambda y: torch.softmax(y.flatten(2), -1).view(y.shape),
        [y],
        "h200",
    )


def softmax_of(x: TensorView, dims: list[int]) -> TensorView:
    x = wide(x)
    e = ops.exp(ops.sub(x, ops.max(x, dims, keepdim=True)))
    return ops.div(e, ops.sum(e, dims, keepdim=True))


def test_a_longer_row_is_read_once_by_each_level() -> None:
    x = random((1, 1 << 17), torch.bfloat16)
    assert counters(lambda x: back(softmax(x), torch.bfloat16), [x]).global_loads == {
        16: 3 * x.numel() * 2 // 16
    }


def test_a_short_row_takes_a_part_of_a_warp_and_no_barrier() -> None:
    x = random((64, 384), torch.float32)
    assert counters(softmax, [x]).block_barriers == 0


def test_stacked_softmaxes_take_one_exponential_each() -> None:
    def build(x: TensorView) -> TensorView:
        for _ in range(16):
            x = softmax(x)
        return x

    fusion = define(build, [None, None])
    for device, times in (("h200", 16), ("cpu", None)):
        executor = make_executor(fusion, device)
        x = random((3, 136), torch.float32)
        (out,) = run(executor, [x], [(3, 136)])
        expected = x.double()
        for _ in range(16):
            expected = torch.softmax(expected, -1)
        torch.testing.assert_close(out, expected.float())
        if times is not None:
            assert executor.variants[0].kernel.source.text.count("fm_exp(") == times


def test_parameters_of_known_rows() -> None:
    fusion = define(lambda x: back(softmax(x), torch.bfloat16), [None, None], dtype=BF16)
    chosen = {
        shape: str(scheduled(fusion, H200, shape)[1])
        for shape in ((16384, 8192), (32768, 1024), (2048, 384), (2048, 50257))
    }
    assert chosen == {
        (16384, 8192): "inner_persistent(threads 256x1, vector 8, kept 32 with results, "
        "resident 1024, exact)",
        (32768, 1024): "inner_persistent(threads 32x4, vector 8, kept 32 with results, "
        "resident 1024, exact)",
        (2048, 384): "inner_persistent(threads 16x8, vector 8, kept 24 with results, "
        "resident 1024, exact)",
        (2048, 50257): "inner_persistent(threads 512x1, vector 8, looped, unroll 2, "
        "resident 0, shifted)",
    }


@pytest.mark.parametrize("value", [1e-30, 1e-38, 1e30, 3e38, 0.0, float("inf"), float("nan")])
def test_a_division_by_a_value_of_the_row_is_right_for_any_divisor(value: float) -> None:
    """The kernel multiplies by a reciprocal, which would be subnormal or infinite for some
    divisors."""

    def build(x: TensorView, s: TensorView) -> TensorView:
        return ops.div(ops.sub(x, ops.max(x, -1, keepdim=True)), s)

    x = random((4, 64), torch.float32) * min(max(value, 1e-30), 1e30)
    s = torch.full((4, 1), value)
    executor = make_executor(define(build, [None, None], [None, 1]), "h200")
    (out,) = run(executor, [x, s], [(4, 64)])
    expected = (x.double() - x.double().amax(-1, keepdim=True)) / s.double()
    torch.testing.assert_close(out, expected.float(), rtol=1e-6, atol=1e-44, equal_nan=True)


def test_rows_of_many_lengths_share_few_kernels() -> None:
    fusion = define(lambda x: back(softmax(x), torch.bfloat16), [None, None], dtype=BF16)
    executor = make_executor(fusion, "h200", checked=False)
    for rows in (1, 3, 33, 200, 1000, 2048):
        x = torch.empty(rows, 384, dtype=torch.bfloat16)
        executor.bind([x], [x], sizes=sizes_of(fusion, x.shape))
    assert len(executor.variants) == 2
    for columns in range(392, 768, 8):
        x = torch.empty(64, columns, dtype=torch.bfloat16)
        executor.bind([x], [x], sizes=sizes_of(fusion, x.shape))
    assert len(executor.variants) <= 6
    executor = make_executor(fusion, "h200", checked=False)
    for columns in range(193, 1536, 2):
        x = torch.empty(64, columns, dtype=torch.bfloat16)
        executor.bind([x], [x], sizes=sizes_of(fusion, x.shape))
    assert len(executor.variants) <= 8
