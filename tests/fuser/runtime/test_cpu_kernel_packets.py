"""Tests packets between blocks: every value of every type arrives, and the memory is zero
afterwards."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from fuser.runtime import compile_kernels
from fuser.runtime.cpu_kernel import CheckedCpuKernel
from fuser.runtime.prepared_launch import BoundLaunch
from fuser.support.errors import KernelError
from fuser.support.kernel_source import KernelSource
from tests.support.handwritten_kernels import kernel

ORDERS = (0, 1, 12345)
THREADS = 3


def exchange(ctype: str, op: str, identity: str, count: int) -> KernelSource:
    """Returns a kernel that reduces over blocks. The block that has the result writes it, one value
    per thread."""
    name = f"exchange_{op.lower()}_{ctype}_{count}"
    return kernel(
        name,
        f"const {ctype}* T0, {ctype}* T1, uint64_t* packets, unsigned* begun",
        f"""\
  const unsigned ticket = grid_ticket<true, false, false>(begun);
  FUSER_SMEM(smem);
  Array<{ctype}, {count}> value;
  for (int i = 0; i < {count}; ++i)
    value[i] = T0[(blockIdx.x * blockDim.x + threadIdx.x) * {count} + i];
  const bool last = grid_reduce_array<true, false, false, false, false, false, {count}>(
      value, {op}<{ctype}>(), {ctype}({identity}), packets, ticket, smem);
  if (!last) return;
  for (int i = 0; i < {count}; ++i) T1[threadIdx.x * {count} + i] = value[i];""",
        uses_barriers=True,
    )


KINDS = {
    torch.float32: ("float", ("SumOp", "0"), ("MaxOp", "-FUSER_INF")),
    torch.float64: ("double", ("SumOp", "0"), ("MaxOp", "-FUSER_INF")),
    torch.int32: ("int", ("SumOp", "0"), ("MinOp", "2147483647")),
    torch.int64: ("int64_t", ("SumOp", "0"), ("MaxOp", "-9223372036854775807LL - 1")),
    torch.bool: ("bool", ("AndOp", "true"), ("OrOp", "false")),
}
MEANING = {
    "SumOp": lambda x: x.sum(0),
    "MaxOp": lambda x: x.amax(0),
    "MinOp": lambda x: x.amin(0),
    "AndOp": lambda x: x.all(0),
    "OrOp": lambda x: x.any(0),
}
SOURCES = {
    (dtype, op, count): exchange(ctype, op, identity, count)
    for dtype, (ctype, *ops) in KINDS.items()
    for op, identity in ops
    for count in (1, 2, 3)
}


def values(dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Returns numbers, including some whose bits are all set, all clear, or look like a flag."""
    generator = torch.Generator().manual_seed(7)
    if dtype is torch.bool:
        return torch.rand(*shape, generator=generator) < 0.8
    bits = {4: torch.int32, 8: torch.int64}[dtype.itemsize]
    special = [0, -1, 1, torch.iinfo(bits).min]
    if dtype.is_floating_point:
        x = torch.randn(*shape, generator=generator, dtype=dtype)
    else:
        x = torch.randint(-1000, 1000, shape, generator=generator).to(dtype)
    flat = x.view(-1)
    for k, value in enumerate(special):
        # Several values in a row, because a packet holds more than one.
        flat.view(bits)[5 * k : 5 * k + 3] = value
    return x


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("blocks", [2, 9, 33])
@pytest.mark.parametrize("key", SOURCES, ids=lambda key: SOURCES[key].name)
def test_every_value_arrives(key: tuple[torch.dtype, str, int], blocks: int, checked: bool) -> None:
    dtype, op, count = key
    sources = list(SOURCES.values())
    compiled = compile_kernels(sources, "cpu", checked=checked)[sources.index(SOURCES[key])]
    x = values(dtype, (blocks, THREADS, count))
    packets = torch.zeros(blocks * THREADS * count * -(-dtype.itemsize // 4), dtype=torch.int64)
    begun = torch.zeros(1, dtype=torch.int32)
    for order in ORDERS if checked else (0,):
        if isinstance(compiled, CheckedCpuKernel):
            compiled.order_seed = order
        out = torch.zeros(THREADS, count, dtype=dtype)
        shape = {"grid": (blocks, 1, 1), "block": (THREADS, 1, 1), "smem_bytes": 64}
        compiled.launch([x, out, packets, begun], **shape)
        assert not packets.any()
        assert not begun.any()
        if dtype.is_floating_point:
            expected = MEANING[op](x.double())
            torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6, equal_nan=True)
        else:
            assert torch.equal(out, MEANING[op](x).to(dtype))


WELFORD = kernel(
    "exchange_pairs",
    "const float* T0, double* T1, uint64_t* packets, unsigned* begun",
    """\
  typedef Pair<float, Pair<Welford<double>, int>> All;
  typedef PairOp<MaxOp<float>, PairOp<WelfordOp<double>, SumOp<int>>> Op;
  const unsigned ticket = grid_ticket<true, true, false>(begun);
  FUSER_SMEM(smem);
  const float x = T0[blockIdx.x + gridDim.x * blockIdx.y];
  All value = {x, {{x, 0, 0, 1}, -1}};
  const bool last = grid_reduce<true, true, false, true, false, false>(
      value, Op(), All{-float(FUSER_INF), {{0, 0, 0, 0}, 0}}, packets, ticket, smem);
  if (!last || threadIdx.x != 0) return;
  T1[0] = value.first;
  T1[1] = value.second.first.mean();
  T1[2] = value.second.first.m2;
  T1[3] = value.second.first.n;
  T1[4] = value.second.second;""",
    uses_barriers=True,
)
TWO_WAYS = kernel(
    "exchange_two_ways",
    "const int* T0, int* T1, int* T2, uint64_t* W1, uint64_t* W2, unsigned* B1, unsigned* B2",
    """\
  const unsigned ticket1 = grid_ticket<true, false, false>(B1);
  const unsigned ticket2 = grid_ticket<false, true, false>(B2);
  FUSER_SMEM(smem);
  const int blocks = gridDim.x * gridDim.y;
  for (int turn = 0; turn < 3; ++turn) {
    int a = T0[turn * blocks + blockIdx.y * gridDim.x + blockIdx.x], b = a;
    const bool done1 = grid_reduce<true, false, false, true, false, false>(
        a, SumOp<int>(), 0, W1 + turn * blocks, ticket1, smem);
    if (done1 && threadIdx.x == 0) T1[turn * gridDim.y + blockIdx.y] = a;
    const bool done2 = grid_reduce<false, true, false, true, false, false>(
        b, SumOp<int>(), 0, W2 + turn * blocks, ticket2, smem);
    if (done2 && threadIdx.x == 0) T2[turn * gridDim.x + blockIdx.x] = b;
  }""",
    uses_barriers=True,
)


@pytest.mark.parametrize("order", ORDERS)
def test_several_types_travel_together(order: int) -> None:
    (compiled,) = compile_kernels([WELFORD], "cpu", checked=True)
    assert isinstance(compiled, CheckedCpuKernel)
    compiled.order_seed = order
    x, out = torch.randn(7, 5), torch.zeros(5, dtype=torch.float64)
    # 48 bytes, four per packet: the sum of ints uses all of its values.
    packets, begun = torch.zeros(35 * 12, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    for _ in range(2):
        shape = {"grid": (5, 7, 1), "block": (4, 1, 1), "smem_bytes": 256}
        compiled.launch([x, out, packets, begun], **shape)
        wide = x.double()
        m2 = ((wide - wide.mean()) ** 2).sum()
        expected = torch.stack([wide.max(), wide.mean(), m2, torch.tensor(35.0), torch.tensor(-35)])
        torch.testing.assert_close(out, expected.double(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("order", ORDERS)
def test_reductions_over_different_axes_and_in_turns(order: int) -> None:
    """A block may wait in one reduction while others wait for it in another."""
    (compiled,) = compile_kernels([TWO_WAYS], "cpu", checked=True)
    assert isinstance(compiled, CheckedCpuKernel)
    compiled.order_seed = order
    x = torch.randint(-99, 99, (3, 4, 5), dtype=torch.int32)
    spaces = [torch.zeros(60, dtype=torch.int64) for _ in range(2)]
    begun = [torch.zeros(n, dtype=torch.int32) for n in (4, 5)]
    for _ in range(2):
        over_x, over_y = (torch.zeros(3, n, dtype=torch.int32) for n in (4, 5))
        shape = {"grid": (5, 4, 1), "block": (2, 1, 1), "smem_bytes": 64}
        compiled.launch([x, over_x, over_y, *spaces, *begun], **shape)
        assert torch.equal(over_x, x.sum(2).int())
        assert torch.equal(over_y, x.sum(1).int())
        assert not any(t.any() for t in (*spaces, *begun))


def test_a_wait_for_a_block_that_has_not_begun_is_reported() -> None:
    source = SOURCES[torch.float32, "SumOp", 1]
    (compiled,) = compile_kernels([source], "cpu", checked=True)
    x, out = torch.randn(3, THREADS), torch.zeros(THREADS)
    packets, begun = torch.zeros(9, dtype=torch.int64), torch.ones(1, dtype=torch.int32)
    with pytest.raises(KernelError, match="threads wait for another block"):
        compiled.launch(
            [x, out, packets, begun], grid=(3, 1, 1), block=(THREADS, 1, 1), smem_bytes=64
        )


def test_a_launch_that_stops_halfway_leaves_nothing_behind() -> None:
    source = SOURCES[torch.float32, "SumOp", 1]
    (compiled,) = compile_kernels([source], "cpu", checked=True)
    launch = BoundLaunch(
        [None] * 4, (3, 1, 1), (THREADS, 1, 1), 64, ((0, 0), (1, 1)), (), ((2, 72), (3, 4))
    )
    x, out = torch.randn(3, THREADS), torch.zeros(THREADS)
    with pytest.raises(KernelError, match="T0"):
        launch.run(compiled, [x[:1] + 1, out], (), None)
    for _ in range(2):
        launch.run(compiled, [x, out], (), None)
        torch.testing.assert_close(out.double(), x.double().sum(0))
