"""Inputs of a definition on another device: as they lie in memory, CPU scalars on the host; and
which tests need a GPU for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fuser import TensorView
from fuser.ir.fusion import Fusion
from fuser.support.inputs import flatten
from multidevice import Communicator


def needs_a_gpu_per_rank(comm: Communicator) -> None:
    """Skips a test of what only NCCL does, which ranks that share a GPU have not."""
    if torch.cuda.device_count() < comm.local_size():
        pytest.skip(f"{comm.local_size()} ranks, {torch.cuda.device_count()} GPUs")


def moved(t: torch.Tensor, device: str = "cuda") -> torch.Tensor:
    """Returns a tensor on a device, with its strides (0 where it is expanded) and its offset; `to`
    and `cuda` make what has gaps, or is expanded, contiguous."""
    base = t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)
    return base.to(device).as_strided(t.shape, t.stride(), t.storage_offset())


def passed(fusion: Fusion, inputs: Sequence[Any], device: str = "cuda") -> list[Any]:
    """Returns the flat inputs of a definition on a device, but for CPU scalars and numbers."""
    flat = flatten(inputs, declared=fusion.inputs)
    return [
        moved(x, device)
        if isinstance(x, torch.Tensor) and not (isinstance(v, TensorView) and v.is_cpu_scalar)
        else x
        for v, x in zip(fusion.inputs, flat, strict=True)
    ]
