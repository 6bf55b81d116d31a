"""Moves inputs of a definition to another device, and keeps their memory layout.

CPU scalars stay on the host. A mark skips tests that need a GPU for each rank.
"""

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
    """Skips tests of NCCL where ranks share a GPU, which NCCL does not support."""
    if torch.cuda.device_count() < comm.local_size():
        pytest.skip(f"{comm.local_size()} ranks, {torch.cuda.device_count()} GPUs")


def moved(t: torch.Tensor, device: str = "cuda") -> torch.Tensor:
    """Returns a tensor on a device, with its strides (0 where it is expanded) and its offset.

    `to` and `cuda` would make tensors with gaps or expanded axes contiguous.
    """
    base = t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)
    return base.to(device).as_strided(t.shape, t.stride(), t.storage_offset())


def passed(fusion: Fusion, inputs: Sequence[Any], device: str = "cuda") -> list[Any]:
    """Returns the flat inputs of a definition on a device; CPU scalars and numbers stay as they
    are.
    """
    flat = flatten(inputs, declared=fusion.inputs)
    return [
        moved(x, device)
        if isinstance(x, torch.Tensor) and not (isinstance(v, TensorView) and v.is_cpu_scalar)
        else x
        for v, x in zip(fusion.inputs, flat, strict=True)
    ]
