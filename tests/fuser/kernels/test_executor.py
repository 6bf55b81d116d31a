"""Tests the kernel executor: variants, launch records, guards, empty tensors, many
kernels at once."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from fuser import FusionDefinition, KernelError, ops
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.memory_layout import layout_of
from fuser.kernels.executor import MAX_VARIANTS, FusedKernelExecutor, compile_many
from fuser.runtime import compilations
from fuser.runtime.cpu_kernel import CheckedCpuKernel
from fuser.schedule import pointwise
from fuser.support.device import H200
from fuser.support.errors import InputError
from tests.fuser.schedule.test_registry import column_sum, gelu_mul_add, row_sum
from tests.support.small_fusions import define, make_executor, random, run, sizes_of

BF16 = DataType.BFloat16


def add() -> Fusion:
    return define(lambda x, y: ops.add(x, y), (None, None), (None, None))


def matrices(*shape: int) -> list[torch.Tensor]:
    return [random(shape, torch.float32, seed) for seed in range(2)]


# ------------------------------------------------------------------ classes of inputs
@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_twenty_shapes_compile_at_most_four_kernels(device: str) -> None:
    fusion = define(gelu_mul_add, *[(None, None)] * 3, dtype=BF16)
    executor = make_executor(fusion, device, checked=False)
    for shape in itertools.product((7, 64, 1000, 4096), (96, 100, 384, 770, 1536)):
        tensors = [torch.empty(shape, dtype=torch.bfloat16, device="meta")] * 3
        executor.bind(tensors, tensors[:1], sizes=sizes_of(fusion, shape, shape, shape))
    assert len(executor.variants) <= 4, [v.params for v in executor.variants]


def test_a_known_class_is_not_lowered_again() -> None:
    executor = make_executor(add())
    x, y = matrices(8, 12)
    run(executor, [x, y], [(8, 12)])
    before = compilations()
    for rows in (8, 9, 1, 100):
        inputs = matrices(rows, 12)
        (out,) = run(executor, inputs, [(rows, 12)])
        assert torch.equal(out, inputs[0] + inputs[1])
    assert len(executor.variants) == 1
    assert compilations() == before


def test_new_tensors_of_a_class_only_change_pointers() -> None:
    executor = make_executor(add())
    sums = []
    for seed in range(3):
        inputs = [random((5, 7), torch.float32, 10 * seed + k) for k in range(2)]
        (out,) = run(executor, inputs, [(5, 7)])
        sums.append(torch.equal(out, inputs[0] + inputs[1]))
    assert all(sums)
    assert len(executor._records) == 1


def test_layouts_are_read_from_the_tensors() -> None:
    """The definition declares contiguous inputs; transposed ones get a kernel for their
    own order."""
    executor = make_executor(add())
    x, y = (t.t() for t in matrices(12, 8))
    out = torch.empty(12, 8).t()
    executor.run([x, y], [out], sizes=sizes_of(executor.fusion, (8, 12), (8, 12)))
    assert torch.equal(out, x + y)
    (variant,) = executor.variants
    assert "for" in variant.kernel.source.text
    # All elements are one run, so no index is split again.
    assert "%" not in variant.kernel.source.text and "/" not in variant.kernel.source.text


def test_after_eight_variants_one_generic_kernel_serves_the_rest() -> None:
    executor = make_executor(add())
    wide = random((40, 40, 2, 2), torch.float32)
    views = [
        lambda t: t[:8, :12, 0, 0],
        lambda t: t[:8, :12, 0, 0].t().contiguous().t(),
        lambda t: t[:8, :12, 0, 0].contiguous(),
        lambda t: t[:8, :1, 0, 0].expand(8, 12),
    ]
    shapes = set()
    for a, b in itertools.product(views, views):
        x, y = a(wide), b(wide + 1)
        (out,) = run(executor, [x, y], [(8, 12)])
        assert torch.equal(out, x + y)
        shapes.add(len(executor.variants))
    assert len(executor.variants) == MAX_VARIANTS + 1
    assert max(shapes) == MAX_VARIANTS + 1


def test_unaligned_tensors_get_narrower_vectors() -> None:
    executor = make_executor(define(lambda x: ops.neg(x), (None,)), "h200")
    whole = random((4096,), torch.float32)
    buffer = torch.empty(4100)
    for start, width in ((0, 16), (2, 8), (1, 4)):
        x = buffer[start : start + 4096].copy_(whole)
        (out,) = run(executor, [x], [(4096,)])
        assert torch.equal(out, -whole)
        kernel = executor.variants[-1].compiled
        assert isinstance(kernel, CheckedCpuKernel)
        assert kernel.counters.global_loads == {width: 4096 * 4 // width}


# ------------------------------------------------------------------ vector widths
@pytest.mark.parametrize("shape", [(8, 1536), (8, 96), (8, 100), (8, 770), (7, 771)], ids=str)
def test_loads_and_stores_are_as_wide_as_possible(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise the H200's threads would share this small amount of work.
    monkeypatch.setattr(pointwise, "MANY_ELEMENTS", 1 << 20)
    fusion = define(gelu_mul_add, *[(None, None)] * 3, dtype=BF16)
    executor = make_executor(fusion, "h200")
    run(executor, [random(shape, torch.bfloat16, k) for k in range(3)], [shape])
    kernel = executor.variants[-1].compiled
    assert isinstance(kernel, CheckedCpuKernel)
    # 7 * 771 is odd, so the elements after the last vector are processed one by one.
    words, left = divmod(shape[0] * shape[1], 8)
    expected = {16: words, **({2: left} if left else {})}
    assert kernel.counters.global_loads == {n: 3 * count for n, count in expected.items()}
    assert kernel.counters.global_stores == expected


def test_little_work_is_shared_by_more_threads() -> None:
    threads = H200.sm_count * H200.max_threads_per_sm
    for elements, width in ((1 << 16, 8), (8 * threads, 16)):
        fusion = define(lambda x: ops.cast(ops.neg(x), BF16), (None,), dtype=BF16)
        executor = make_executor(fusion, "h200")
        run(executor, [random((elements,), torch.bfloat16)], [(elements,)])
        kernel = executor.variants[-1].compiled
        assert isinstance(kernel, CheckedCpuKernel)
        assert set(kernel.counters.global_loads) == {width}


@pytest.mark.parametrize("build", [row_sum, column_sum])
def test_reductions_read_each_element_once_in_wide_loads(build: object) -> None:
    fusion = define(build, (None, None), dtype=BF16)  # pyright: ignore[reportArgumentType]
    executor = make_executor(fusion, "h200")
    shape = (96, 512)
    run(executor, [random(shape, torch.bfloat16)], [(96,) if build is row_sum else (512,)])
    kernel = executor.variants[-1].compiled
    assert isinstance(kernel, CheckedCpuKernel)
    assert kernel.counters.global_loads.get(16) == 96 * 512 * 2 // 16


def test_a_bias_is_read_in_vectors() -> None:
    fusion = define(lambda x, b: ops.add(x, ops.broadcast(b, [True, False])), (None, None), (None,))
    executor = make_executor(fusion, "h200")
    run(executor, [random((64, 256), torch.float32), random((256,), torch.float32)], [(64, 256)])
    kernel = executor.variants[-1].compiled
    assert isinstance(kernel, CheckedCpuKernel)
    assert set(kernel.counters.global_loads) == {16}


# ------------------------------------------------------------------ sizes
@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_empty_tensors(device: str) -> None:
    executor = make_executor(add(), device)
    (out,) = run(executor, [torch.empty(0, 5), torch.empty(0, 5)], [(0, 5)])
    assert out.shape == (0, 5)
    assert executor.variants == ()
    sums = make_executor(define(lambda x: ops.sum(x, [1]), (None, None)), device)
    (out,) = run(sums, [torch.empty(3, 0)], [(3,)])
    assert torch.equal(out, torch.zeros(3))
    (out,) = run(sums, [torch.empty(0, 3)], [(0,)])
    assert out.numel() == 0


def test_zero_dim_tensors() -> None:
    for device in ("cpu", "h200"):
        executor = make_executor(define(lambda x, y: ops.mul(x, y), (), ()), device)
        (out,) = run(executor, [torch.tensor(3.0), torch.tensor(-2.0)], [()])
        assert out.item() == -6.0


def test_large_spans_use_64_bit_indices() -> None:
    fusion = define(lambda x: ops.neg(x), (None, None))
    executor = make_executor(fusion, "h200", checked=False)
    for rows in (1000, 1 << 19):
        x = torch.empty(rows, 8192, device="meta")
        executor.bind([x], [x], sizes=sizes_of(fusion, x.shape))
    types = [v.kernel.source.text.split("\n")[0] for v in executor.variants]
    assert types == ["#define nvfuser_index_t int", "#define nvfuser_index_t int64_t"]


def test_wrong_inputs_are_refused() -> None:
    executor = make_executor(add())
    x, y = matrices(3, 4)
    with pytest.raises(
        InputError, match="takes 2 inputs and 1 output, but it was called with 1 input and"
    ):
        executor.run([x], [y], sizes={})
    with pytest.raises(InputError, match="has 2 dimensions, but the tensor that was passed"):
        executor.run([x, y[0]], [y], sizes={})


# ------------------------------------------------------------------ scalars, outputs
def test_scalar_inputs_may_change_at_every_call() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        scale, shift = fusion.new_symbol(DataType.Double), fusion.new_symbol(DataType.Int)
        fusion.add_input(scale)
        x = fusion.new_tensor([fusion.new_axis(fusion.new_extent())], DataType.Float)
        fusion.add_input(x)
        fusion.add_input(shift)
        fusion.add_output(ops.add(ops.mul(x, scale), shift))  # pyright: ignore[reportArgumentType]
    executor = FusedKernelExecutor(fusion, scheduler="pointwise", name="scalars")
    given, out = random((10,), torch.float32), torch.empty(10)
    for a, b in ((2.0, 3), (0.5, -1), (float("inf"), 0)):
        executor.run([a, given, b], [out], sizes={})
        torch.testing.assert_close(out, given * a + b)
    assert len(executor.variants) == 1


LEAST, MOST = -(2**63), 2**63 - 1


@pytest.mark.parametrize("first", [1, 2**62])
def test_an_integer_of_scalar_inputs_past_64_bits_names_op_and_line(first: int) -> None:
    with FusionDefinition() as fd:
        x, s = fd.define_tensor([-1], dtype=DataType.Int), fd.define_scalar(dtype=DataType.Int)
        four_times = fd.ops.mul(s, 4)
        fd.add_output(fd.ops.bitwise_xor(fd.ops.neg(x), four_times))  # the line
    line = next(
        n
        for n, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if "# the line" in text
    )
    given = torch.arange(5)
    for s in (first, 3, 2**61 - 1, 2**61, -(2**61), -(2**61) - 1, MOST, 3):
        if LEAST <= 4 * s <= MOST:
            (found,) = fd.execute([given, s])
            assert found.tolist() == [-n ^ (4 * s) for n in range(5)]
            continue
        with pytest.raises(KernelError) as error:
            fd.execute([given, s])
        text = str(error.value)
        assert text.startswith("bitwise_xor: the number ( i2 * 4 ): "), text
        assert " is out of the range of int64_t: " in text
        assert f"(user code at {__file__}:{line})" in text


def test_a_sum_of_scalar_inputs_that_floats_hold_is_computed_in_double() -> None:
    with FusionDefinition() as fd:
        x, s = fd.define_tensor([-1]), fd.define_scalar(dtype=DataType.Int)
        fd.add_output(fd.ops.add(x, fd.ops.mul(fd.ops.cast(s, DataType.Double), 4.0)))
    for s in (1, MOST):
        (found,) = fd.execute([torch.zeros(3), s])
        torch.testing.assert_close(found, torch.full((3,), 4.0 * s))


def test_an_output_may_be_an_input_in_place() -> None:
    for device in ("cpu", "h200"):
        fusion = Fusion()
        with FusionGuard(fusion):
            x = fusion.new_tensor([fusion.new_axis(fusion.new_extent())], DataType.Float)
            fusion.add_input(x)
            y = ops.add(x, 1.0)
            assert isinstance(y, TensorView)
            fusion.add_output(y, alias_input=x)
        executor = make_executor(fusion, device)
        given = random((1000,), torch.float32)
        expected = given + 1
        executor.run([given], [given], sizes={})
        assert torch.equal(given, expected)


def test_grid_reductions_can_run_again() -> None:
    executor = make_executor(define(lambda x: ops.sum(x, [0]), (None,)), "h200")
    for seed in range(3):
        x = random((1 << 16,), torch.float32, seed)
        (out,) = run(executor, [x], [()])
        torch.testing.assert_close(out, x.double().sum().float(), rtol=1e-4, atol=1e-3)
    assert executor.variants[0].kernel.workspaces


# ------------------------------------------------------------------ many at once
def test_many_kernels_compile_together() -> None:
    requests = []
    for k in range(6):
        fusion = define(lambda x, k=k: ops.add(ops.mul(x, float(k)), 11.5), (None, None))
        executor = FusedKernelExecutor(fusion, scheduler="pointwise", name=f"many{k}")
        meta = torch.empty(4, 6, device="meta")
        requests.append((executor, [meta], [meta], sizes_of(fusion, (4, 6))))
    assert compile_many(requests, device="cpu") == 6
    assert compile_many(requests, device="cpu") == 0
    x = random((4, 6), torch.float32)
    for k, (executor, *_) in enumerate(requests):
        (out,) = run(executor, [x], [(4, 6)])
        torch.testing.assert_close(out, x * k + 11.5)
        assert len(executor.variants) == 1


# ------------------------------------------------------------------ layout classes
@pytest.mark.parametrize(
    ("shape", "strides", "order", "flags"),
    [
        ((4, 6), (6, 1), (0, 1), (True, True)),
        ((4, 6), (1, 4), (1, 0), (True, True)),
        ((4, 6), (12, 2), (0, 1), (True, False)),
        ((4, 6), (8, 1), (0, 1), (False, True)),
        ((1, 6), (999, 1), (0, 1), (True, True)),
        ((4, 1), (1, 777), (0, 1), (True, True)),
        ((4, 6), (0, 1), (0, 1), (False, True)),
        ((4, 6), (1, 0), (1, 0), (False, True)),
        ((2, 3, 4), (12, 1, 3), (0, 2, 1), (True, True, True)),
    ],
)
def test_layout_classes(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    order: tuple[int, ...],
    flags: tuple[bool, ...],
) -> None:
    rank = len(shape)
    assert layout_of(range(rank), [False] * rank, shape, strides) == (order, flags)


def test_small_inputs_take_the_kernel_of_a_nearby_size() -> None:
    """Rows of 14 and 10 vectors have other best parameters, but compiling for them would
    not pay."""
    fusion = define(lambda x: ops.sum(x, dim=1), (None, None))
    executor = FusedKernelExecutor(fusion, scheduler="reduction", name="kernel", device=H200)

    def params(rows: int, cols: int) -> str:
        tensors = [torch.empty(rows, cols, device="meta"), torch.empty(rows, device="meta")]
        launch = executor.bind(tensors[:1], tensors[1:], sizes=sizes_of(fusion, (rows, cols)))
        assert launch is not None
        return str(launch[0].params)

    first = params(2000, 56)
    # Smaller sizes, and sizes up to eight times larger, use the same kernel.
    assert [params(2000, 40), params(288, 32), params(4000, 128)] == [first] * 3
    assert len(executor.variants) == 1
    # Another vector width, and an input larger than the cache, get kernels of their own.
    assert params(2000, 54) != first
    before = len(executor.variants)
    assert params(16384, 8192) != first
    assert len(executor.variants) == before + 1


def test_a_column_sum_of_megabytes_gets_the_blocks_that_it_wants() -> None:
    """Also in a definition that has run other sizes: a kernel whose blocks do not split the rows
    would take nearly twice as long for 25 MB."""
    fusion = define(lambda x: ops.sum(x, dim=0), (None, None))
    executor = FusedKernelExecutor(fusion, scheduler="reduction", name="kernel", device=H200)
    alone = FusedKernelExecutor(fusion, scheduler="reduction", name="kernel", device=H200)

    def params(executor: FusedKernelExecutor, rows: int, cols: int) -> str:
        tensors = [torch.empty(rows, cols, device="meta"), torch.empty(cols, device="meta")]
        launch = executor.bind(tensors[:1], tensors[1:], sizes=sizes_of(fusion, (rows, cols)))
        assert launch is not None
        return str(launch[0].params)

    params(executor, 16384, 8192)
    assert params(executor, 4096, 1536) == params(alone, 4096, 1536)


def test_the_kernel_of_a_nearby_size_gives_the_right_values() -> None:
    executor = make_executor(define(lambda x: ops.sum(x, dim=1), (None, None)), "h200")
    for rows, cols in ((40, 56), (40, 40), (3, 8), (1, 128)):
        x = random((rows, cols), torch.float32)
        (out,) = run(executor, [x], [(rows,)])
        torch.testing.assert_close(out, x.sum(1))
