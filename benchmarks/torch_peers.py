"""torch's methods for a matmul next to a communication, to compare with.

They are cuBLAS alone, NCCL alone (gloo on CPU ranks), one after the other, and async-TP
(`torch.ops.symm_mem`).
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# The import registers the ops of torch.ops.symm_mem.
import torch.distributed._symmetric_memory as symmetric
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from fuser.multidevice import Communicator

Run = Callable[[], torch.Tensor]
TIMEOUT_S = 60


def connect(device: torch.device) -> None:
    """Makes torch's default process group for the ranks of our communicator, on a free port."""
    communicator = Communicator.instance()
    timeout, is_first = datetime.timedelta(seconds=TIMEOUT_S), communicator.rank() == 0

    def store(port: int) -> TCPStore:
        size = communicator.size()
        return TCPStore("127.0.0.1", port, size, is_first, timeout=timeout, wait_for_workers=False)

    mine = store(0) if is_first else None
    port = int(communicator.exchange(str(mine.port if mine else 0).encode())[0])
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=mine or store(port),
        rank=communicator.rank(),
        world_size=communicator.size(),
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )


def gather(x: torch.Tensor, w: torch.Tensor) -> dict[str, Run]:
    """Returns the methods for x [M / d, K] gathered, times w [N / d, K] transposed."""
    whole = x.new_empty(x.shape[0] * dist.get_world_size(), x.shape[1])
    out = x.new_empty(len(whole), len(w))
    dist.all_gather_into_tensor(whole, x)

    def nccl() -> torch.Tensor:
        dist.all_gather_into_tensor(whole, x)
        return whole

    def mm() -> torch.Tensor:
        return torch.mm(whole, w.t(), out=out)

    def seq() -> torch.Tensor:
        nccl()
        return mm()

    return {"mm": mm, "nccl": nccl, "seq": seq, "async_tp": lambda: _gathered(x, w)}


def scatter(x: torch.Tensor, w: torch.Tensor) -> dict[str, Run]:
    """Returns the methods for x [M, K / d] times w [N, K / d] transposed, summed to [M / d, N] per
    rank.
    """
    part = x.new_empty(len(x), len(w))
    out = x.new_empty(len(x) // dist.get_world_size(), len(w))

    def mm() -> torch.Tensor:
        return torch.mm(x, w.t(), out=part)

    def nccl() -> torch.Tensor:
        dist.reduce_scatter_tensor(out, part)
        return out

    def seq() -> torch.Tensor:
        mm()
        return nccl()

    return {"mm": mm, "nccl": nccl, "seq": seq, "async_tp": lambda: _scattered(x, w)}


def allreduce(x: torch.Tensor, w: torch.Tensor) -> dict[str, Run]:
    """Returns the methods for x [M, K / d] times w [N, K / d] transposed, summed to [M, N] on all
    ranks.
    """
    part, other = (x.new_empty(len(x), len(w)) for _ in range(2))
    other.fill_(1)
    # The average of equal values is that value, however often it is computed.
    average = dist.ReduceOp.AVG if x.is_cuda else dist.ReduceOp.MAX

    def mm() -> torch.Tensor:
        return torch.mm(x, w.t(), out=part)

    def nccl() -> torch.Tensor:
        dist.all_reduce(other, op=average)
        return other

    def seq() -> torch.Tensor:
        mm()
        dist.all_reduce(part)
        return part

    def scatter_gather() -> torch.Tensor:
        dist.all_gather_into_tensor(part, _scattered(x, w))
        return part

    @functools.cache
    def mapped() -> torch.Tensor:
        """Returns memory that all ranks map."""
        found = symmetric.empty(len(x), len(w), dtype=x.dtype, device=x.device)
        symmetric.rendezvous(found, _group())
        return found

    def two_shot() -> torch.Tensor:
        torch.mm(x, w.t(), out=mapped())
        return torch.ops.symm_mem.two_shot_all_reduce_(mapped(), "sum", _group())

    found = {"mm": mm, "nccl": nccl, "seq": seq}
    return {**found, "async_tp_rs+ag": scatter_gather, "symm_two_shot": two_shot}


def mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> dict[str, Run]:
    """Returns the methods for a sequence-parallel MLP.

    x [M / d, K] is gathered; linear with `up` [N / d, K], gelu, linear with `down` [K, N / d]; the
    sum is [M / d, K] per rank. "mm" is all computation, "nccl" both collectives.
    """
    whole, out = x.new_empty(len(x) * dist.get_world_size(), x.shape[1]), torch.empty_like(x)
    part = torch.empty_like(whole)
    dist.all_gather_into_tensor(whole, x)

    def mm() -> torch.Tensor:
        hidden = torch.nn.functional.gelu(torch.mm(whole, up.t()))
        return torch.mm(hidden, down.t(), out=part)

    def nccl() -> torch.Tensor:
        dist.all_gather_into_tensor(whole, x)
        dist.reduce_scatter_tensor(out, part)
        return out

    def seq() -> torch.Tensor:
        dist.all_gather_into_tensor(whole, x)
        mm()
        dist.reduce_scatter_tensor(out, part)
        return out

    def async_tp() -> torch.Tensor:
        return _scattered(torch.nn.functional.gelu(_gathered(x, up)), down)

    return {"mm": mm, "nccl": nccl, "seq": seq, "async_tp": async_tp}


def _gathered(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.ops.symm_mem.fused_all_gather_matmul(x, [w.t()], 0, _group())[1][0]


def _scattered(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w.t(), "sum", 0, _group())


def _group() -> Any:
    world = dist.group.WORLD
    assert world is not None, "connect comes first"
    return world.group_name
