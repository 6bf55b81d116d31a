"""Tests that kernels compute the right numbers on the CPU, in checked mode in several thread
orders, and on CUDA."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from fuser.runtime import CompiledKernel, KernelSource, compile_cubin, compile_kernels
from fuser.runtime.cpu_kernel import CheckedCpuKernel
from fuser.support.errors import KernelError
from tests.support import handwritten_kernels

Shape = tuple[int, int, int]
DEVICES = ("cpu", "checked", pytest.param("cuda", marks=pytest.mark.gpu))
ORDERS = (0, 1, 12345)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def torch_device(device: str) -> str:
    return "cuda" if device == "cuda" else "cpu"


def build(source: KernelSource, device: str) -> CompiledKernel:
    """Compiles the kernel together with all others, so that one library serves all tests."""
    sources = handwritten_kernels.everything()
    if source not in sources:
        sources = [source]
    built = compile_kernels(sources, torch_device(device), checked=device == "checked")
    return built[sources.index(source)]


def run(source: KernelSource, device: str, args: Sequence[object], **shape: object) -> None:
    """Launches a kernel; in checked mode, once for each order of threads and blocks."""
    compiled = build(source, device)
    orders = ORDERS if isinstance(compiled, CheckedCpuKernel) else (0,)
    for order in orders:
        if isinstance(compiled, CheckedCpuKernel):
            compiled.order_seed = order
        compiled.launch(args, **shape)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("n", [1, 127, 128, 129, 1000])
def test_vector_add_with_tail(device: str, n: int) -> None:
    place = torch_device(device)
    a, b = torch.randn(n, device=place), torch.randn(n, device=place)
    c = torch.full((n,), -1.0, device=place)
    run(
        handwritten_kernels.VECTOR_ADD,
        device,
        [a, b, c, n],
        grid=(-(-n // 128), 1, 1),
        block=(128, 1, 1),
    )
    assert torch.equal(c, a + b)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("element", "dtype", "width"),
    [
        ("__bfloat", torch.bfloat16, 1),
        ("__bfloat", torch.bfloat16, 8),
        ("float", torch.float32, 4),
        ("double", torch.float64, 2),
    ],
)
def test_vector_copy(
    device: str, element: str, dtype: torch.dtype, width: int, streaming: bool
) -> None:
    source = handwritten_kernels.vector_copy(element, width, streaming=streaming)
    n = 256 * width + 3
    x = torch.randn(n, device=torch_device(device)).to(dtype)
    y = torch.zeros_like(x)
    run(source, device, [x, y, n], grid=(9, 1, 1), block=(32, 1, 1))
    assert torch.equal(x, y)


def test_vector_width_is_counted() -> None:
    compiled = build(handwritten_kernels.vector_copy("__bfloat", 8, streaming=True), "checked")
    assert isinstance(compiled, CheckedCpuKernel)
    x = torch.randn(1024).bfloat16()
    compiled.launch([x, torch.zeros_like(x), 1024], grid=(4, 1, 1), block=(32, 1, 1))
    assert compiled.counters.global_loads == {16: 128}
    assert compiled.counters.global_stores == {16: 128}


def test_bfloat_arithmetic(device: str) -> None:
    x = torch.randn(1024, device=torch_device(device)).bfloat16()
    y = torch.zeros_like(x)
    run(
        handwritten_kernels.BFLOAT_SCALE,
        device,
        [x, y, 1.7, 1024],
        grid=(4, 1, 1),
        block=(32, 1, 1),
    )
    assert torch.equal(y, (x.float() * 1.7).bfloat16())


def compose(maps: Sequence[tuple[int, int]]) -> tuple[int, int]:
    a, b = 1, 0
    for next_a, next_b in maps:
        a, b = a * next_a % 10007, (b * next_a + next_b) % 10007
    return a, b


def coordinates(shape: Shape) -> list[Shape]:
    """Returns all coordinates in the order of the linear thread id (x fastest)."""
    return [(x, y, z) for z in range(shape[2]) for y in range(shape[1]) for x in range(shape[0])]


def group_of(place: Shape, axes: Shape) -> Shape:
    x, y, z = (-1 if axis else at for at, axis in zip(place, axes, strict=True))
    return x, y, z


def expected_by_group(
    maps: Sequence[tuple[int, int]], shape: Shape, axes: Shape
) -> list[tuple[int, int]]:
    """Returns, for each position, the composition over its group in linear order."""
    places = coordinates(shape)
    groups: dict[Shape, list[tuple[int, int]]] = {}
    for place, value in zip(places, maps, strict=True):
        groups.setdefault(group_of(place, axes), []).append(value)
    totals = {group: compose(values) for group, values in groups.items()}
    return [totals[group_of(place, axes)] for place in places]


def check_block_reduce(device: str, axes: Shape, shape: Shape) -> None:
    threads = shape[0] * shape[1] * shape[2]
    generator = torch.Generator().manual_seed(threads)
    values = torch.randint(1, 10007, (threads, 2), dtype=torch.int32, generator=generator)
    out = torch.zeros(2, threads, 2, dtype=torch.int32, device=torch_device(device))
    args = [values.to(out.device), out]
    source = handwritten_kernels.block_reduce_affine(axes)
    run(source, device, args, grid=(1, 1, 1), block=shape, smem_bytes=8 * threads)
    maps = [(int(a), int(b)) for a, b in values.tolist()]
    shifted = [(a, (b + 1) % 10007) for a, b in maps]
    for round_number, inputs in enumerate((maps, shifted)):
        expected = torch.tensor(expected_by_group(inputs, shape, axes), dtype=torch.int32)
        got = out[round_number].cpu()
        assert torch.equal(got, expected), (axes, shape, round_number)


@pytest.mark.parametrize("device", ["cpu", "checked", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_block_reduce_of_every_size(device: str) -> None:
    sizes = range(1, 258) if device != "checked" else (1, 2, 31, 32, 33, 63, 64, 65, 100, 255, 257)
    for size in sizes:
        check_block_reduce(device, (1, 0, 0), (size, 1, 1))


@pytest.mark.parametrize("axes", handwritten_kernels.AXES)
def test_block_reduce_over_axes(device: str, axes: Shape) -> None:
    shapes = [
        (4, 8, 2),
        (8, 3, 5),
        (32, 4, 2),
        (33, 3, 1),
        (64, 2, 3),
        (1, 7, 9),
        (5, 1, 6),
        (16, 3, 1),
        (2, 64, 1),
        (16, 4, 3),
    ]
    for shape in shapes:
        check_block_reduce(device, axes, shape)


def test_full_block(device: str) -> None:
    for axes, shape in (
        ((1, 0, 0), (1024, 1, 1)),
        ((0, 1, 0), (32, 32, 1)),
        ((1, 1, 0), (32, 32, 1)),
    ):
        check_block_reduce(device, axes, shape)


@pytest.mark.parametrize("block", [(32, 1, 1), (128, 2, 1), (50, 3, 1), (7, 1, 1)])
def test_row_reductions(device: str, block: Shape) -> None:
    rows, columns, place = 2 * block[1], 301, torch_device(device)
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(rows, columns, generator=generator, dtype=torch.float64).to(place)
    threads = block[0] * block[1]
    by_name = {source.name: source for source in handwritten_kernels.everything()}
    cases = {
        "row_sumop_float": (x.float(), x.float().double().sum(1)),
        "row_sumop_double": (x, x.sum(1)),
        "row_maxop_float": (x.float(), x.float().amax(1)),
        "row_minop_int64_t": ((x * 1e18).long(), (x * 1e18).long().amin(1)),
        "row_prodop_float": (1 + x.float() / 100, (1 + x.float() / 100).double().prod(1)),
    }
    for name, (values, expected) in cases.items():
        out = torch.zeros(rows, dtype=values.dtype, device=place)
        run(
            by_name[name],
            device,
            [values, out, columns],
            grid=(2, 1, 1),
            block=block,
            smem_bytes=8 * threads,
        )
        torch.testing.assert_close(out, expected.to(out.dtype), rtol=1e-5, atol=1e-5)


def test_max_propagates_nan(device: str) -> None:
    by_name = {source.name: source for source in handwritten_kernels.everything()}
    x = torch.zeros(2, 100, device=torch_device(device))
    x[1, 71] = float("nan")
    out = torch.zeros(2, device=x.device)
    run(
        by_name["row_maxop_float"],
        device,
        [x, out, 100],
        grid=(2, 1, 1),
        block=(32, 1, 1),
        smem_bytes=128,
    )
    assert out[0].item() == 0.0
    assert out[1].isnan()


@pytest.mark.parametrize("block", [(8, 16, 1), (8, 7, 1), (4, 1, 1), (32, 32, 1)])
def test_column_sum(device: str, block: Shape) -> None:
    columns, rows = 4 * block[0] * 2, 77
    x = torch.randn(rows, columns, device=torch_device(device))
    out = torch.zeros(columns, device=x.device)
    smem = 16 * block[0] * block[1]
    run(
        handwritten_kernels.COLUMN_SUM,
        device,
        [x, out, rows, columns],
        grid=(2, 1, 1),
        block=block,
        smem_bytes=smem,
    )
    torch.testing.assert_close(out.double(), x.double().sum(0), rtol=1e-5, atol=1e-5)


def test_welford(device: str) -> None:
    x = torch.randn(3, 1003, device=torch_device(device)) + 100
    mean, variance = torch.zeros(3, device=x.device), torch.zeros(3, device=x.device)
    args = [x, mean, variance, 1003]
    run(
        handwritten_kernels.WELFORD_ROW,
        device,
        args,
        grid=(3, 1, 1),
        block=(96, 1, 1),
        smem_bytes=16 * 96,
    )
    torch.testing.assert_close(mean.double(), x.double().mean(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        variance.double(), x.double().var(1, correction=0), rtol=1e-4, atol=0
    )


GRID_CASES = [
    ((1, 0, 0), (1, 0, 0), (5, 3, 1), (32, 2, 1)),
    ((1, 1, 1), (1, 1, 1), (3, 2, 2), (33, 1, 1)),
    ((1, 1, 1), (1, 1, 1), (40, 1, 1), (7, 2, 1)),
    ((0, 1, 0), (0, 1, 0), (3, 9, 1), (16, 4, 1)),
    ((1, 0, 1), (0, 0, 1), (2, 3, 4), (4, 3, 5)),
    ((1, 0, 0), (1, 0, 0), (1, 2, 1), (32, 1, 1)),
]


@pytest.mark.parametrize(("blocks", "threads", "grid", "block"), GRID_CASES)
def test_grid_reduce(device: str, blocks: Shape, threads: Shape, grid: Shape, block: Shape) -> None:
    n_blocks, n_threads = (s[0] * s[1] * s[2] for s in (grid, block))
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(
        1, 10007, (n_blocks, n_threads, 2), dtype=torch.int32, generator=generator
    )
    # Within a block first, then over blocks, all in linear order.
    in_block = [
        expected_by_group([(int(a), int(b)) for a, b in row], block, threads)
        for row in values.tolist()
    ]
    per_thread = [
        expected_by_group([in_block[b][t] for b in range(n_blocks)], grid, blocks)
        for t in range(n_threads)
    ]
    names = list(dict.fromkeys(group_of(place, blocks) for place in coordinates(grid)))
    group_index = {
        name: sum(at * stride for at, stride in _group_strides(name, grid, blocks))
        for name in names
    }
    place = torch_device(device)
    out = torch.zeros(len(names), n_threads, 2, dtype=torch.int32, device=place)
    arrivals = torch.zeros(len(names), dtype=torch.int32, device=place)
    packets = torch.zeros(n_blocks * n_threads * 2, dtype=torch.int64, device=place)
    begun = torch.zeros(len(names), dtype=torch.int32, device=place)
    args = [values.to(place), out, arrivals, packets, begun]
    source = handwritten_kernels.grid_reduce_affine(blocks, threads)
    run(source, device, args, grid=grid, block=block, smem_bytes=8 * max(n_threads, 2))
    launches = len(ORDERS) if device == "checked" else 1
    assert arrivals.tolist() == [launches] * len(names)
    assert not begun.any()
    assert not packets.any()
    for b, at in enumerate(coordinates(grid)):
        row = out[group_index[group_of(at, blocks)]].cpu().tolist()
        assert [tuple(pair) for pair in row] == [per_thread[t][b] for t in range(n_threads)]


def _group_strides(name: Shape, grid: Shape, blocks: Shape) -> list[tuple[int, int]]:
    pairs: list[tuple[int, int]] = []
    stride = 1
    for at, extent, reduced in zip(name, grid, blocks, strict=True):
        if not reduced:
            pairs.append((at, stride))
            stride *= extent
    return pairs


def test_grid_column_sum(device: str) -> None:
    rows, columns = 133, 32
    x = torch.randn(rows, columns, device=torch_device(device))
    out = torch.zeros(columns, device=x.device)
    packets = torch.zeros(2 * 5 * 2 * 8, dtype=torch.int64, device=x.device)
    begun = torch.zeros(2, dtype=torch.int32, device=x.device)
    args = [x, out, packets, begun, rows, columns]
    shape = {"grid": (2, 5, 1), "block": (8, 6, 1), "smem_bytes": 8 * 48}
    run(handwritten_kernels.GRID_COLUMN_SUM, device, args, **shape)
    torch.testing.assert_close(out.double(), x.double().sum(0), rtol=1e-5, atol=1e-5)
    assert not begun.any()
    assert not packets.any()


@pytest.mark.parametrize("n", [16, 37])
def test_transpose_through_shared_memory(device: str, n: int) -> None:
    x = torch.randn(n, n, device=torch_device(device))
    y = torch.zeros_like(x)
    tiles = -(-n // 16)
    run(
        handwritten_kernels.TRANSPOSE,
        device,
        [x, y, n],
        grid=(tiles, tiles, 1),
        block=(16, 16, 1),
        smem_bytes=4 * 16 * 17,
    )
    assert torch.equal(y, x.t())


def test_warp_operations(device: str) -> None:
    x = torch.arange(32, dtype=torch.int32, device=torch_device(device)) * 3 % 16
    out = torch.zeros(32, 8, dtype=torch.int32, device=x.device)
    run(handwritten_kernels.WARP_OPERATIONS, device, [x, out], grid=(1, 1, 1), block=(32, 1, 1))
    v = x.tolist()
    ballot = sum(1 << i for i in range(32) if v[i] % 2 == 0)
    for lane, row in enumerate(out.tolist()):
        down = v[lane + 4] if lane < 28 else v[lane]
        up = v[lane - 4] if lane >= 4 else v[lane]
        half = (v[min(lane + 1, 31)]) if lane < 15 else None
        assert row[:5] == [v[3], v[lane ^ 5], down, up, v[lane ^ 4]]
        assert row[5] & 0xFFFFFFFF == ballot
        assert row[6] == (1 if 7 in v else 0) + 2
        assert half is None or row[7] == half


def test_atomics(device: str) -> None:
    n = 300
    x = torch.arange(n, dtype=torch.float32, device=torch_device(device))
    sums, count = (
        torch.zeros(3, device=x.device),
        torch.zeros(1, dtype=torch.int32, device=x.device),
    )
    run(handwritten_kernels.ATOMICS, device, [x, sums, count, n], grid=(5, 1, 1), block=(64, 1, 1))
    launches = len(ORDERS) if device == "checked" else 1
    assert sums.tolist() == [launches * x[i::3].sum().item() for i in range(3)]
    assert count.item() == launches * n


def test_prepared_launch(device: str) -> None:
    place = torch_device(device)
    a, b = torch.randn(100, device=place), torch.randn(100, device=place)
    c, d = torch.zeros(100, device=place), torch.zeros(100, device=place)
    compiled = build(handwritten_kernels.VECTOR_ADD, device)
    prepared = compiled.prepare([a, b, c, 100], grid=(1, 1, 1), block=(128, 1, 1))
    prepared.run()
    prepared.set_pointer(2, d.data_ptr())
    prepared.set_pointer(1, a.data_ptr())
    prepared.run()
    assert torch.equal(c, a + b)
    assert torch.equal(d, a + a)


def test_addresses_as_arguments() -> None:
    a, b, c = torch.randn(8), torch.randn(8), torch.zeros(8)
    compiled = build(handwritten_kernels.VECTOR_ADD, "cpu")
    compiled.launch([a.data_ptr(), b.data_ptr(), c.data_ptr(), 8], grid=(1, 1, 1), block=(8, 1, 1))
    assert torch.equal(c, a + b)


def test_wrong_arguments_are_named(device: str) -> None:
    compiled = build(handwritten_kernels.VECTOR_ADD, device)
    x = torch.zeros(8, device=torch_device(device))
    with pytest.raises(KernelError, match="vector_add takes 4 arguments, got 3"):
        compiled.launch([x, x, x], grid=(1, 1, 1), block=(8, 1, 1))
    with pytest.raises(KernelError, match=r"vector_add.*n: int64_t = float"):
        compiled.launch([x, x, x, 1.5], grid=(1, 1, 1), block=(8, 1, 1))


def test_shared_memory_needs_a_kernel_with_barriers() -> None:
    compiled = build(handwritten_kernels.VECTOR_ADD, "cpu")
    with pytest.raises(KernelError, match="without barriers"):
        compiled.launch([0, 0, 0, 0], grid=(1, 1, 1), block=(1, 1, 1), smem_bytes=16)


def test_every_kernel_compiles_for_hopper() -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="the extra nvrtc")
    cubins = compile_cubin(handwritten_kernels.everything())
    assert all(code[:4] == b"\x7fELF" for code in cubins)


def test_kernels_of_one_name_share_a_library() -> None:
    sources = [
        handwritten_kernels.kernel("same", "int* T0", f"  if (threadIdx.x == 0) T0[0] = {i};")
        for i in range(20)
    ]
    results: list[int] = []
    for compiled in compile_kernels(sources, "cpu"):
        out = torch.zeros(1, dtype=torch.int32)
        compiled.launch([out], grid=(1, 1, 1), block=(1, 1, 1))
        results.append(int(out.item()))
    assert results == list(range(20))


def test_affine_maps_do_not_commute() -> None:
    pairs = list(itertools.permutations([(2, 3), (5, 7), (11, 13)]))
    assert len({compose(pair) for pair in pairs}) == len(pairs)


@pytest.mark.parametrize("ctype", ["float", "int"])
@pytest.mark.parametrize("n", [1, 15, 64, 1000])
def test_vectorised_maximum_keeps_nan(device: str, ctype: str, n: int) -> None:
    lowest = "-3.4e38f" if ctype == "float" else "-2147483647"
    step = "fm_max_step(m, nan, T0[i]);" if ctype == "float" else "m = fm_maximum(m, T0[i]);"
    macro = "FUSER_SIMD_MAX_NAN(m, nan)" if ctype == "float" else "FUSER_SIMD_MAX(m)"
    source = handwritten_kernels.kernel(
        f"maximum_{ctype}",
        f"const {ctype}* T0, {ctype}* T1, int n",
        f"""\
  {ctype} m = {lowest};
  int nan = 0;
  {macro}
  for (int i = 0; i < n; ++i) {step}
  T1[0] = {"fm_nan_if(nan, m)" if ctype == "float" else "m"};""",
        threads=1,
    )
    dtype = torch.float32 if ctype == "float" else torch.int32
    generator = torch.Generator().manual_seed(n)
    x = torch.randint(-1000, 1000, (n,), generator=generator).to(torch_device(device), dtype)
    out = torch.zeros(1, dtype=dtype, device=x.device)
    run(source, device, [x, out, n], grid=(1, 1, 1), block=(1, 1, 1))
    assert out.item() == x.max().item()
    if ctype == "float":
        x[n // 2] = float("nan")
        run(source, device, [x, out, n], grid=(1, 1, 1), block=(1, 1, 1))
        assert out.isnan().all()


def test_threads_that_end_give_their_stacks_back() -> None:
    """Otherwise the engine runs out of memory mappings after 31 threads, such as
    simulated ranks."""
    source = handwritten_kernels.kernel(
        "count_threads", "int* T0", "  __syncthreads();\n  atomicAdd(T0, 1);", uses_barriers=True
    )
    (compiled,) = compile_kernels([source], "cpu")
    counts: list[int] = []

    def launch() -> None:
        out = torch.zeros(1, dtype=torch.int32)
        compiled.launch([out], grid=(1, 1, 1), block=(1024, 1, 1))
        counts.append(int(out.item()))

    for _ in range(40):
        thread = threading.Thread(target=launch)
        thread.start()
        thread.join()
    assert counts == [1024] * 40
    assert len(Path("/proc/self/maps").read_text().splitlines()) < 20_000
