"""What shows a kernel: the variant that serves some tensors, and the fusion that it was made of."""

from __future__ import annotations

import torch

from fuser.ir.fusion import Fusion
from fuser.kernels.executor import FusedKernelExecutor, KernelRequest
from fuser.kernels.kernel_variant import Variant
from fuser.support.device import describe_device
from fuser.support.errors import UnsupportedError


def variant_of(request: KernelRequest, device: torch.device) -> Variant | None:
    """Return the variant that serves a request, lowered when needed; None where nothing runs."""
    executor, inputs, outputs, sizes = request
    info = describe_device(device)
    record = executor.record(inputs, outputs, sizes=sizes, device=info)
    return None if record is None else record[0]


def scheduled_fusion(
    executor: FusedKernelExecutor, variant: Variant, device: torch.device
) -> Fusion:
    """Return the scheduled fusion that a variant was lowered from, made again.

    Raises `UnsupportedError` for a variant that the executor no longer holds.
    """
    # An executor keeps kernels, not the fusions that they were made of: those are large.
    info = executor._device or describe_device(device)  # pyright: ignore[reportPrivateUsage]
    held = (executor._variants, executor._folded)  # pyright: ignore[reportPrivateUsage]
    keys = [k for variants in held for k, v in variants.items() if v is variant]
    if variant is executor._generic:  # pyright: ignore[reportPrivateUsage]
        keys.append(executor._generic_key(info))  # pyright: ignore[reportPrivateUsage]
    if not keys:
        raise UnsupportedError(f"{executor.name}: the schedule of a kernel that was only tried")
    layouts, _, index = keys[0]
    return executor._scheduled((layouts, variant.params, index), info)[1]  # pyright: ignore[reportPrivateUsage]
