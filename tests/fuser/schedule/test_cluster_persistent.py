"""Tests rows too long for a block, in clusters of blocks: in checked mode against torch
in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from fuser import FusionDefinition, PythonProfiler, ops
from fuser.ir.dtypes import DataType, from_torch
from fuser.ir.fusion import TensorView
from fuser.kernels.executor import FusedKernelExecutor
from fuser.runtime.cpu_kernel import CheckedCpuKernel
from fuser.schedule import cluster_persistent, inner_persistent, scheduler
from fuser.schedule.input_facts import Facts
from fuser.support.device import H200, DeviceInfo
from fuser.support.record import replace
from tests.support.row_programs import back_to, layer_norm, softmax, wide
from tests.support.small_fusions import Build, define, random, run, sizes_of

BF16 = torch.bfloat16
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5, torch.float64: 1e-12}
# With so few threads per block, clusters of up to four blocks keep bfloat16 rows of up to 16384.
SMALL = replace(H200, max_cluster=4)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inner_persistent, "CLUSTER_THREADS", 32)
    monkeypatch.setattr(inner_persistent, "LOOPED_THREADS", 64)


def executor_for(
    build: Build, inputs: Sequence[torch.Tensor], device: DeviceInfo = SMALL
) -> FusedKernelExecutor:
    dtypes = [from_torch(t.dtype) for t in inputs]
    fusion = define(build, *([None] * t.dim() for t in inputs), dtype=dtypes)
    name = "cluster_persistent"
    assert scheduler(name).accepts(fusion) is None
    return FusedKernelExecutor(fusion, scheduler=name, name="rows", device=device, checked=True)


def check(
    build: Build,
    reference: Callable[..., torch.Tensor | Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
) -> CheckedCpuKernel:
    """Runs a fusion, compares the results, and returns the kernel."""
    executor = executor_for(build, inputs)
    wide_inputs = [t.double() if t.dtype.is_floating_point else t for t in inputs]
    expected = reference(*wide_inputs)
    wanted = [expected] if isinstance(expected, torch.Tensor) else list(expected)
    for order in (0, 1, 31):
        got = run(executor, inputs, [tuple(t.shape) for t in wanted])
        for out, want in zip(got, wanted, strict=True):
            tolerance = TOLERANCE[out.dtype]
            torch.testing.assert_close(
                out, want.to(out.dtype), rtol=tolerance, atol=tolerance * float(want.abs().max())
            )
        (variant,) = executor.variants
        assert isinstance(variant.compiled, CheckedCpuKernel)
        variant.compiled.order_seed = order
    return variant.compiled


# Kept by two blocks, kept by four, looped, and shifted rows of odd length.
SHAPES = [(3, 4096), (2, 16384), (5, 32768), (3, 40000), (3, 5001), (2, 33333), (1, 12345)]


@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_softmax(shape: tuple[int, int], dtype: torch.dtype) -> None:
    found = check(
        lambda x: back_to(x, softmax(x)), lambda x: torch.softmax(x, -1), [random(shape, dtype)]
    )
    assert "cluster_reduce<" in found.source.text and found.source.cluster in (2, 4)
    # Two reductions of a row; in each, every block waits for the others twice.
    assert found.counters.cluster_barriers == 4 * shape[0]


@pytest.mark.parametrize("shape", [(3, 4096), (2, 33333), (3, 40000)], ids=str)
def test_layer_norm_with_weights_and_statistics(shape: tuple[int, int]) -> None:
    x, w, b = random(shape, BF16), random(shape[1:], BF16, 1), random(shape[1:], BF16, 2)

    def build(x: TensorView, w: TensorView, b: TensorView) -> Sequence[TensorView]:
        var, mean = ops.var_mean(wide(x), [-1], correction=0, keepdim=False)
        return layer_norm(x, w, b), mean, var

    def reference(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Sequence[torch.Tensor]:
        norm = torch.nn.functional.layer_norm(x, x.shape[1:], w, b)
        return norm.to(BF16), x.mean(-1).float(), x.var(-1, correction=0).float()

    check(build, reference, [x, w, b])


@pytest.mark.parametrize("shape", [(4, 8192), (3, 33333)], ids=str)
def test_what_has_a_value_for_each_row_is_read_by_all_blocks_and_written_by_one(
    shape: tuple[int, int],
) -> None:
    def build(x: TensorView, t: TensorView) -> Sequence[TensorView]:
        places = ops.broadcast(ops.iota(x.size(1), dtype=DataType.Int), [True, False])
        picked = ops.sum(ops.where(ops.eq(places, ops.broadcast(t, [False, True])), x, 0.0), -1)
        top = ops.max(x, -1, keepdim=True)
        total = ops.sum(ops.exp(ops.sub(x, top)), -1, keepdim=True)
        lse = ops.squeeze(ops.add(ops.log(total), top), [1])
        return ops.sub(lse, picked), ops.div(ops.exp(ops.sub(x, top)), total)

    def reference(x: torch.Tensor, t: torch.Tensor) -> Sequence[torch.Tensor]:
        loss = torch.nn.functional.cross_entropy(x, t, reduction="none")
        return loss.float(), torch.softmax(x, -1).float()

    t = torch.arange(shape[0]) * (shape[1] // shape[0])
    check(build, reference, [random(shape, torch.float32), t])


def test_a_row_that_a_cluster_keeps_is_read_once_and_in_whole_words() -> None:
    x = random((3, 16384), BF16)
    found = check(lambda x: back_to(x, softmax(x)), lambda x: torch.softmax(x, -1), [x])
    words = x.numel() * 2 // 16
    assert found.counters.global_loads == {16: words} == found.counters.global_stores


def test_nan_and_infinities_come_through() -> None:
    x = random((4, 4096), torch.float32)
    x[0, 4000], x[1, 7], x[2, 2048] = torch.nan, torch.inf, -torch.inf
    executor = executor_for(lambda x: ops.sub(x, ops.max(x, -1, keepdim=True)), [x])
    (got,) = run(executor, [x], [tuple(x.shape)])
    torch.testing.assert_close(got, x - x.amax(-1, keepdim=True), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("columns", "dtype", "text"),
    [
        (1 << 20, BF16, "vector 8, kept 128, resident 0, exact, cluster 16"),
        (1 << 20, torch.float32, "looped, unroll 4, resident 0, cluster 16"),
        (1 << 17, BF16, "vector 8, kept 128, resident 0, exact, cluster 2"),
        ((1 << 17) + 1, torch.float32, "vector 4, kept 36, resident 0, shifted, cluster 8"),
    ],
)
def test_the_least_cluster_that_keeps_a_row_is_taken(
    monkeypatch: pytest.MonkeyPatch, columns: int, dtype: torch.dtype, text: str
) -> None:
    monkeypatch.undo()
    fusion = define(lambda x: back_to(x, softmax(x)), [None, None], dtype=[from_torch(dtype)])
    row = scheduler("cluster_persistent")
    params = row.chooser(fusion, H200)(Facts(sizes_of(fusion, (128, columns))))
    assert text in str(params)


def test_long_rows_are_one_kernel_on_gpus_with_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    sizes = (64, 65537), (63, 65537), (64, 65536), (64, 1 << 18), (64, (1 << 18) + 1)
    assert [cluster_persistent.row_class(*size) for size in sizes] == [1, 0, 0, 1, 2]
    x = torch.randn(64, 69632)
    wanted = torch.softmax(x.double(), -1).float()
    h200 = ["schedules_for(h200)"]
    for enable, disable, kernels in ((h200, [], 1), (h200, ["clusters"], 3), ([], [], 3)):
        with FusionDefinition() as fd:
            fd.add_output(softmax(fd.from_pytorch(x)))
        (out,) = fd.execute([x], _enable_options=enable, _disable_options=disable)
        assert len(fd.fec.get_cuda_kernel([x]).split("__global__")) == 1 + kernels
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-9)


def rms_norm(x: TensorView, w: TensorView) -> TensorView:
    mean = ops.div(ops.sum(ops.mul(x, x), [-1], keepdim=True), x.size(1))
    return ops.mul(ops.mul(x, ops.rsqrt(ops.add(mean, 1e-6))), w)


def rms_norm_gradient(x: TensorView, w: TensorView) -> TensorView:
    wx = ops.mul(x, w)
    return ops.sub(wx, ops.mul(x, ops.sum(ops.mul(wx, x), [-1], keepdim=True)))


def losses(x: TensorView) -> TensorView:
    return ops.sum(ops.exp(ops.sub(x, ops.max(x, [-1], keepdim=True))), [-1])


def dropped_softmax(x: TensorView) -> TensorView:
    kept = ops.uniform(0.0, 1.0, [x.size(0), x.size(1)], dtype=DataType.Float)
    return softmax(ops.where(ops.lt(kept, 0.5), x, 0.0))


# Whether each is one kernel for: the longest rows, long rows in float32, long rows in bfloat16.
WAITING: list[tuple[Build, list[int], tuple[bool, bool, bool]]] = [
    (softmax, [2], (True, True, True)),
    (rms_norm, [2, 1], (True, True, True)),
    # A tensor that all rows share is read twice; in the second case, there is also a mean to wait
    # for.
    (rms_norm_gradient, [2, 1], (False, True, False)),
    (layer_norm, [2, 1, 1], (False, True, False)),
    (losses, [2], (False, True, True)),
    (dropped_softmax, [2], (False, False, False)),
]


@pytest.mark.parametrize(("build", "ranks", "are_one"), WAITING)
def test_what_makes_clusters_wait_often_is_several_kernels(
    build: Build, ranks: list[int], are_one: tuple[bool, bool, bool]
) -> None:
    row, found = scheduler("cluster_persistent"), list[bool]()
    for columns, dtype in ((1 << 20, "Float"), (1 << 18, "Float"), (1 << 18, "BFloat16")):
        fusion = define(build, *([None] * rank for rank in ranks), dtype=DataType[dtype])
        assert row.accepts(fusion) is None and not row.suits(fusion, {})
        shapes = [(128, columns)[-rank:] for rank in ranks]
        found.append(row.suits(fusion, sizes_of(fusion, *shapes)))
    assert tuple(found) == are_one and row.in_clusters


def test_narrow_elements_that_a_thread_keeps_are_converted_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    texts: list[str] = []
    for columns in (1 << 20, 1 << 13):
        x = torch.empty(64, columns, dtype=BF16)
        with FusionDefinition() as fd:
            fd.add_output(back_to(x_ := fd.from_pytorch(x), softmax(x_)))
        fd.execute([x], _enable_options=["schedules_for(h200)"])
        texts.append(fd.fec.get_cuda_kernel([x]))
    long, short = texts
    assert long.count("forget(T") == 2 and "forget" not in short
    (first, _), *_ = [(k, line) for k, line in enumerate(long.splitlines()) if "forget" in line]
    assert "cluster_reduce" in long.splitlines()[first - 1]


def test_a_profile_tells_the_blocks_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    x = torch.randn(64, 69632)
    with FusionDefinition() as fd:
        fd.add_output(softmax(fd.from_pytorch(x)))
    with PythonProfiler() as prof:
        fd.execute([x], _enable_options=["schedules_for(h200)"])
    (row,) = prof.profile.kernel_profiles
    assert row.scheduler == "cluster_persistent" and row.cluster_str == "[1, 4, 1]"
