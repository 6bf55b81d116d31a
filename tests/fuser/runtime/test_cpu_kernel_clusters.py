"""Tests clusters of blocks: the values they combine, and reports of missing barriers in checked
mode."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from fuser.runtime import compile_kernels
from fuser.runtime.cpu_kernel import CheckedCpuKernel
from fuser.support.errors import KernelError
from tests.support.handwritten_kernels import kernel

# Each thread has a different value; groups of threads have the same y. The second round uses the
# memory of the first one again.
REDUCE = """\
  FUSER_SMEM(smem);
  for (int round = 0; round < 2; ++round) {{
    const int mine = (blockIdx.x * gridDim.y + blockIdx.y) * 24 + threadIdx.y * 8 + threadIdx.x;
    Array<{ctype}, 2> r;
    r[0] = T0[mine];
    r[1] = {ctype}(round) - T0[mine];
    block_reduce_array<true, false, false, 2>(r, {op}<{ctype}>(), {ctype}(0), smem);
    cluster_reduce_array<true, false, false, {cluster}, 2>(r, {op}<{ctype}>(), smem);
    {ctype} alone = r[0];
    alone = cluster_reduce<true, false, false, {cluster}>(alone, {op}<{ctype}>(), smem);
    T1[mine * 4 + round * 2] = r[round];
    T1[mine * 4 + round * 2 + 1] = alone;
  }}"""


@pytest.mark.parametrize("cluster", [2, 3, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("place", ["cpu", "checked", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_all_blocks_of_a_cluster_get_the_sum(place: str, dtype: torch.dtype, cluster: int) -> None:
    ctype = "float" if dtype is torch.float32 else "double"
    source = kernel(
        f"cluster_sum_{ctype}_{cluster}",
        f"const {ctype}* T0, {ctype}* T1",
        REDUCE.format(ctype=ctype, op="SumOp", cluster=cluster),
        threads=24,
        uses_barriers=True,
        cluster=cluster,
    )
    where = "cuda" if place == "cuda" else "cpu"
    (compiled,) = compile_kernels([source], where, checked=place == "checked")
    # Integers: exact in any order. [cluster, block, y, x]
    x = torch.randint(-50, 50, (5, 2 * cluster, 3, 8)).to(dtype)
    grouped = x.reshape(5, 2, cluster, 3, 8)
    total = grouped.sum((2, 4), keepdim=True).expand(grouped.shape)
    rest = 8 * cluster - total
    wanted = torch.stack([total, total * cluster, rest, total * cluster], -1).reshape(*x.shape, 4)
    for order in (0, 1, 77) if isinstance(compiled, CheckedCpuKernel) else (0,):
        if isinstance(compiled, CheckedCpuKernel):
            compiled.order_seed = order
        given, y = x.to(where), torch.zeros(*x.shape, 4, dtype=dtype, device=where)
        room = 24 * (cluster + 1) * 8 * 2
        compiled.launch([given, y], grid=(5, 2 * cluster, 1), block=(8, 3, 1), smem_bytes=room)
        assert torch.equal(y.cpu(), wanted)
        if isinstance(compiled, CheckedCpuKernel):
            assert compiled.counters.cluster_barriers == 5 * 2 * 2 * 2 * 2


# Each thread writes its value, and reads that of the next block.
NEXT = """\
  FUSER_SMEM(smem);
  FUSER_SHARED(float) tile = FUSER_SHARED_AT(float, smem, 0, 64);
  {write}
  {before}
  const float theirs = {when} ? fuser_peer_load(tile + {at}, (blockIdx.y + 1) % {blocks}) : 0.0f;
  {after}
  tile[threadIdx.x] = theirs;
  T1[blockIdx.y * 64 + threadIdx.x] = tile[threadIdx.x];"""
WRITE = "tile[threadIdx.x] = T0[blockIdx.y * 64 + threadIdx.x];"
MEET = "fuser_cluster_sync();"
NOTHING: Mapping[str, str] = {}


def launch(
    name: str, parts: Mapping[str, str] = NOTHING, *, grid_y: int = 4, order_seed: int = 0
) -> torch.Tensor:
    """Runs `NEXT` with these parts, on 4 blocks in clusters of 2."""
    filled = {"write": WRITE, "before": MEET, "after": MEET, "when": "true", "at": "threadIdx.x"}
    text = NEXT.format(**filled | {"blocks": "2"} | dict(parts))
    source = kernel(
        name, "const float* T0, float* T1", text, threads=64, uses_barriers=True, cluster=2
    )
    (compiled,) = compile_kernels([source], "cpu", checked=True)
    assert isinstance(compiled, CheckedCpuKernel)
    compiled.order_seed = order_seed
    x, y = torch.arange(256, dtype=torch.float32), torch.zeros(256)
    compiled.launch([x, y], grid=(1, grid_y, 1), block=(64, 1, 1), smem_bytes=256)
    return y


@pytest.mark.parametrize("order_seed", [0, 1, 5])
def test_a_block_reads_what_the_next_one_wrote(order_seed: int) -> None:
    y = launch("peer_right", order_seed=order_seed)
    assert torch.equal(y, torch.arange(256.0).reshape(2, 2, 64).flip(1).flatten())


@pytest.mark.parametrize(
    ("name", "parts", "words"),
    [
        ("peer_early", {"before": "__syncthreads();"}, "written since the cluster's last barrier"),
        (
            "peer_late",
            {"after": "", "when": "(blockIdx.y & 1) == 0"},
            "store .* read by another block since the cluster's last barrier",
        ),
        ("peer_unwritten", {"write": ""}, "which no thread has written"),
        ("peer_outside", {"at": "threadIdx.x + 1"}, "out of bounds"),
        ("peer_nobody", {"blocks": "3"}, "block 2 of a cluster of 2"),
        ("peer_gone", {"after": "if (blockIdx.y & 1) return; fuser_cluster_sync();"}, "returned"),
        (
            "peer_apart",
            {"after": "if (threadIdx.x) fuser_cluster_sync(); else __syncthreads();"},
            "a thread waits for its cluster",
        ),
    ],
)
def test_checked_mode_finds_blocks_that_do_not_wait(
    name: str, parts: dict[str, str], words: str
) -> None:
    with pytest.raises(KernelError, match=words):
        launch(name, parts)


def test_blocks_that_are_no_clusters_are_refused() -> None:
    with pytest.raises(KernelError, match="3 blocks along y cannot be divided into clusters of 2"):
        launch("peer_three", grid_y=3)
