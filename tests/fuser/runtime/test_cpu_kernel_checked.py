"""Tests that checked mode finds planted bugs, and reports kernel, kind, thread, block and index."""

from __future__ import annotations

import pytest
import torch

from fuser.runtime import KernelSource, compile_kernels
from fuser.runtime.cpu_kernel import CheckedCpuKernel
from fuser.support.errors import KernelError
from tests.support.handwritten_kernels import kernel

REVERSE = """\
  FUSER_SMEM(smem);
  FUSER_SHARED(float) tile = FUSER_SHARED_AT(float, smem, 0, 64);
  tile[threadIdx.x] = T0[threadIdx.x];
  __syncthreads();
  T1[threadIdx.x] = tile[63 - threadIdx.x];"""

# Without its second barrier, the next round would overwrite slots that others still read.
LOOPED = """\
  FUSER_SMEM(smem);
  FUSER_SHARED(float) tile = FUSER_SHARED_AT(float, smem, 0, 64);
  for (int round = 0; round < 2; ++round) {
    tile[threadIdx.x] = T0[threadIdx.x] + round;
    __syncthreads();
    T1[threadIdx.x] = tile[(threadIdx.x + 1) % 64];
    __syncthreads();
  }"""

POINTERS = "const float* T0, float* T1"


def build(source: KernelSource) -> CheckedCpuKernel:
    (compiled,) = compile_kernels([source], "cpu", checked=True)
    assert isinstance(compiled, CheckedCpuKernel)
    return compiled


def finding(
    name: str,
    body: str,
    *,
    parameters: str = POINTERS,
    extent: int = 64,
    block: int = 64,
    smem_bytes: int = 256,
    order_seed: int = 0,
) -> str:
    """Runs a body on two tensors of `extent` floats; returns the reported error."""
    compiled = build(kernel(name, parameters, body, uses_barriers=True))
    compiled.order_seed = order_seed
    x = torch.arange(extent, dtype=torch.float32)
    y = torch.zeros(extent)
    with pytest.raises(KernelError) as caught:
        compiled.launch([x, y], grid=(2, 1, 1), block=(block, 1, 1), smem_bytes=smem_bytes)
    return str(caught.value)


@pytest.mark.parametrize("order_seed", [0, 1, 99])
@pytest.mark.parametrize(("name", "body"), [("reverse", REVERSE), ("looped", LOOPED)])
def test_right_kernels_pass(name: str, body: str, order_seed: int) -> None:
    compiled = build(kernel(name, POINTERS, body, uses_barriers=True))
    compiled.order_seed = order_seed
    x, y = torch.arange(64.0), torch.zeros(64)
    compiled.launch([x, y], grid=(2, 1, 1), block=(64, 1, 1), smem_bytes=256)
    assert torch.equal(y, x.flip(0) if name == "reverse" else x.roll(-1) + 1)
    assert compiled.counters.block_barriers == 2 * body.count("__syncthreads") * (
        1 if name == "reverse" else 2
    )


@pytest.mark.parametrize("order_seed", [0, 1, 99])
def test_missing_barrier_between_write_and_read(order_seed: int) -> None:
    # A read before the writer ran is reported as uninitialised; a read after it is a race.
    message = finding(
        "no_barrier", REVERSE.replace("  __syncthreads();\n", ""), order_seed=order_seed
    )
    assert "kernel no_barrier" in message
    assert "uninitialised read" in message or "race" in message
    assert "of tile" in message or "of smem" in message


@pytest.mark.parametrize("order_seed", [0, 1, 99])
def test_missing_barrier_between_read_and_write(order_seed: int) -> None:
    body = LOOPED.rpartition("    __syncthreads();\n")
    message = finding("no_trailing_barrier", body[0] + body[2], order_seed=order_seed)
    assert "race: " in message
    assert "since the last barrier; thread (" in message


def test_two_threads_write_one_slot() -> None:
    body = REVERSE.replace("tile[threadIdx.x] =", "tile[threadIdx.x / 2] =")
    message = finding("write_write", body)
    assert "race: store of byte 0" in message
    assert (
        "written by thread 0 since the last barrier; thread (1, 0, 0) of block (0, 0, 0)" in message
    )


def test_neighbouring_half_words_are_no_race() -> None:
    body = """\
  FUSER_SMEM(smem);
  FUSER_SHARED(__bfloat) tile = FUSER_SHARED_AT(__bfloat, smem, 0, 64);
  tile[threadIdx.x] = __float2bfloat(T0[threadIdx.x]);
  __syncthreads();
  T1[threadIdx.x] = __bfloat2float(tile[63 - threadIdx.x]);"""
    compiled = build(kernel("half_words", POINTERS, body, uses_barriers=True))
    x, y = torch.arange(64.0), torch.zeros(64)
    compiled.launch([x, y], grid=(1, 1, 1), block=(64, 1, 1), smem_bytes=128)
    assert torch.equal(y, x.flip(0))


def test_syncwarp_orders_a_warp_but_not_a_block() -> None:
    within = REVERSE.replace("__syncthreads", "__syncwarp").replace(
        "63 - threadIdx.x", "threadIdx.x ^ 31"
    )
    compiled = build(kernel("within_warp", POINTERS, within, uses_barriers=True))
    x, y = torch.arange(64.0), torch.zeros(64)
    compiled.launch([x, y], grid=(1, 1, 1), block=(64, 1, 1), smem_bytes=256)
    assert torch.equal(y, x.view(2, 32).flip(1).view(-1))
    message = finding("across_warps", REVERSE.replace("__syncthreads", "__syncwarp"), order_seed=1)
    assert "race" in message or "uninitialised" in message


def test_uninitialised_shared_read() -> None:
    body = REVERSE.replace("  tile[threadIdx.x] =", "  if (threadIdx.x != 5) tile[threadIdx.x] =")
    message = finding("uninitialised", body)
    assert "uninitialised read: load of byte 20 of shared memory" in message
    assert "thread (58, 0, 0)" in message


def test_shared_memory_is_not_kept_between_blocks() -> None:
    body = REVERSE.replace("  tile[", "  if (blockIdx.x == 0) tile[", 1)
    assert "uninitialised read" in finding("stale", body)


def test_shared_array_too_large_for_the_launch() -> None:
    assert "out of bounds" in finding("small_smem", REVERSE, smem_bytes=252)


def test_shared_index_out_of_bounds() -> None:
    message = finding("shared_index", REVERSE.replace("63 -", "64 -"))
    assert "out of bounds: load of 4 bytes at byte 256 of shared array" in message


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            "T1[threadIdx.x] = T0[threadIdx.x + 1];",
            "load of 4 bytes at T0[64], which has 64 elements",
        ),
        ("T1[2 * threadIdx.x] = 0.0f;", "store of 4 bytes at T1[64], which has 64 elements"),
        ("T1[static_cast<int>(threadIdx.x) - 1] = 0.0f;", "store of 4 bytes at T1[-1]"),
    ],
)
def test_global_index_out_of_bounds(body: str, expected: str) -> None:
    message = finding("global_index", "  " + body)
    assert "kernel global_index" in message
    assert expected in message
    assert "thread (" in message


def test_extent_of_a_strided_view() -> None:
    compiled = build(kernel("strided", POINTERS, "  T1[threadIdx.x] = T0[threadIdx.x * 2];"))
    base, y = torch.arange(64.0), torch.zeros(32)
    compiled.launch([base[::2], y], grid=(1, 1, 1), block=(32, 1, 1))
    assert torch.equal(y, base[::2])
    with pytest.raises(KernelError, match=r"T0\[64\], which has 63 elements"):
        compiled.launch([base[::2], torch.zeros(33)], grid=(1, 1, 1), block=(33, 1, 1))


def test_misaligned_vector() -> None:
    body = """\
  Array<float, 4> T2;
  load_vec<4>(T2, T0, threadIdx.x * 2);
  if (threadIdx.x == 0) T1[0] = T2[0];"""
    message = finding("misaligned", body, block=2)
    assert "misaligned access: load of 16 bytes at T0[2]" in message


def test_vector_past_the_end() -> None:
    body = """\
  Array<float, 4> T2;
  T2.set(0.0f);
  store_vec<4>(T1, threadIdx.x * 4, T2);"""
    assert "store of 16 bytes at T1[64]" in finding("vector_end", body, block=17)


def test_register_index() -> None:
    body = """\
  Array<float, 4> T2;
  load_vec<4>(T2, 1, T0, 0);
  T1[0] = T2[1];"""
    assert "register index: element 4 of a register array of 4 elements" in finding(
        "register", body, block=1
    )


def test_divergent_barriers() -> None:
    body = """\
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    T1[threadIdx.x] = 0.0f;
    __syncthreads();
  }"""
    message = finding("divergent", body)
    assert "divergence: threads of one block wait at different barriers: divergent:" in message


def test_barrier_that_some_threads_skip() -> None:
    message = finding("skipped", "  if (threadIdx.x == 3) return;\n  __syncthreads();")
    assert "63 threads wait at the barrier skipped:" in message
    assert "but 1 have returned" in message


def test_warp_operation_that_some_lanes_skip() -> None:
    body = """\
  if (threadIdx.x != 7) {
    __syncthreads();
  } else {
    T1[0] = __shfl_sync(0xffffffffu, 1.0f, 0);
  }"""
    assert "deadlock: a warp operation with mask 0xffffffff waits" in finding("lanes", body)


def test_lane_outside_its_mask() -> None:
    message = finding("mask", "  T1[0] = __shfl_sync(0x0000ffffu, 1.0f, 0);", block=32)
    assert (
        "lane 16 takes part in a warp operation whose mask 0x0000ffff does not include it"
        in message
    )


def test_waiting_for_another_block() -> None:
    message = finding(
        "spin", "  while (T1[0] == 0.0f) __nanosleep(8);", parameters="const float* T0, float* T1"
    )
    assert "deadlock: threads wait for another block" in message


def test_deadlock_is_an_error_without_checks_too() -> None:
    body = "  if (threadIdx.x < 4) __shfl_sync(0xffffffffu, 1.0f, 0); else __syncthreads();"
    (compiled,) = compile_kernels([kernel("unchecked", POINTERS, body, uses_barriers=True)], "cpu")
    x = torch.zeros(64)
    with pytest.raises(KernelError, match=r"kernel unchecked.*deadlock"):
        compiled.launch([x, x], grid=(1, 1, 1), block=(64, 1, 1))


def test_a_kernel_runs_after_a_finding() -> None:
    test_lane_outside_its_mask()
    test_right_kernels_pass("reverse", REVERSE, 0)


def test_a_missing_lane_sends_poison() -> None:
    body = "  T1[threadIdx.x] = __shfl_down_sync(0xffffffffu, T0[threadIdx.x] * 1.0f, 1);"
    compiled = build(kernel("partial_warp", POINTERS, body, uses_barriers=True))
    x, y = torch.arange(5.0), torch.zeros(5)
    compiled.launch([x, y], grid=(1, 1, 1), block=(5, 1, 1))
    assert y[:4].tolist() == [1, 2, 3, 4]
    assert y[4].isnan()


def test_addresses_need_extents() -> None:
    compiled = build(kernel("reverse", POINTERS, REVERSE, uses_barriers=True))
    x, y = torch.arange(64.0), torch.zeros(64)
    with pytest.raises(KernelError, match="must be a tensor or"):
        compiled.launch([x.data_ptr(), y], grid=(1, 1, 1), block=(64, 1, 1), smem_bytes=256)
    pairs = [(x.data_ptr(), 256), (y.data_ptr(), 256)]
    compiled.launch(pairs, grid=(1, 1, 1), block=(64, 1, 1), smem_bytes=256)
    assert torch.equal(y, x.flip(0))
