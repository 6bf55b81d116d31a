"""Properties of devices, from which schedulers choose the parameters of kernels."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fuser.support.errors import InputError
from fuser.support.record import record

if TYPE_CHECKING:
    import torch


Three = tuple[int, int, int]
# The largest numbers of blocks of a launch, and of threads of a block, along x, y and z: every GPU.
MAX_GRID: Three = ((1 << 31) - 1, 65535, 65535)
MAX_BLOCK: Three = (1024, 1024, 64)
# The largest number of blocks of a cluster, if the GPU has clusters. It exceeds the portable 8,
# which kernels must request.
MAX_CLUSTER = 16
# Bytes of the widest load or store of a thread.
VECTOR_BYTES = 16
# The maximum number of loads of VECTOR_BYTES that fill one vector of registers.
LOADS_PER_VECTOR = 2


@record
class DeviceInfo:
    """The properties of one device on which the choice of schedules depends.

    - `max_cluster`: number of CUDA blocks that can run together and read each other's shared
      memory.
    - `max_grid`, `max_block`: largest number of CUDA blocks of a launch, and of threads of a block,
      along x, y and z.
    - `preferred_threads_per_block`: 1 on the CPU, where most kernels are plain loops that the
      compiler vectorises.
    - `max_smem_per_block`: largest number of bytes of shared memory of a CUDA block, including the
      bytes above the default limit, which a kernel has to opt in to.
    """

    kind: str
    name: str
    sm_count: int
    warp_size: int
    max_threads_per_block: int
    preferred_threads_per_block: int
    max_threads_per_sm: int
    registers_per_sm: int
    max_smem_per_block: int
    l2_bytes: int
    max_cluster: int = 1
    max_grid: Three = MAX_GRID
    max_block: Three = MAX_BLOCK


CPU = DeviceInfo(
    kind="cpu",
    name="CPU",
    sm_count=1,
    warp_size=32,
    max_threads_per_block=1024,
    preferred_threads_per_block=1,
    max_threads_per_sm=1024,
    registers_per_sm=65536,
    max_smem_per_block=232448,
    l2_bytes=1 << 20,
)

# Lets machines without a GPU use the schedules of one.
H200 = DeviceInfo(
    kind="cuda",
    name="NVIDIA H200",
    sm_count=132,
    warp_size=32,
    max_threads_per_block=1024,
    preferred_threads_per_block=128,
    max_threads_per_sm=2048,
    registers_per_sm=65536,
    max_smem_per_block=232448,
    l2_bytes=60 * (1 << 20),
    max_cluster=MAX_CLUSTER,
)

# Arguments of the option `schedules_for(...)` -> devices.
DESCRIPTIONS: Mapping[str, DeviceInfo] = {"h200": H200}


def target_of(kind: str, described: str | None = None) -> DeviceInfo:
    """Returns the properties for which kernels on a kind of device ("cpu" or "cuda") are scheduled.

    `described` is the argument of the option `schedules_for`, if that is set. If torch finds no
    GPU, the properties for "cuda" are those of an H200.
    """
    if described:
        return DESCRIPTIONS[described]
    if kind == "cpu":
        return CPU
    import torch

    return _describe_cuda(None) if torch.cuda.is_available() else H200


@functools.cache
def _describe_cuda(index: int | None) -> DeviceInfo:
    import torch

    if not torch.cuda.is_available():
        raise InputError("a CUDA device is needed, but torch finds none")
    properties = torch.cuda.get_device_properties(
        torch.cuda.current_device() if index is None else index
    )
    return DeviceInfo(
        kind="cuda",
        name=properties.name,
        sm_count=properties.multi_processor_count,
        warp_size=properties.warp_size,
        max_threads_per_block=properties.max_threads_per_block,
        preferred_threads_per_block=128,
        max_threads_per_sm=properties.max_threads_per_multi_processor,
        registers_per_sm=properties.regs_per_multiprocessor,
        max_smem_per_block=properties.shared_memory_per_block_optin,
        l2_bytes=properties.L2_cache_size,
        max_cluster=MAX_CLUSTER if properties.major >= 9 else 1,
    )


def device_parts(device: torch.device | str) -> tuple[str, int | None]:
    """Splits a device into its type and index: `cuda:1` -> ("cuda", 1), `cpu` -> ("cpu", None)."""
    kind, _, index = str(device).partition(":")
    return kind, int(index) if index else None


@functools.cache
def describe_device(device: torch.device | str) -> DeviceInfo:
    """Returns the properties of a device. `cuda` without an index means torch's current device.

    Raises:
        InputError: there is no such device, or it is neither a CPU nor a CUDA device.
    """
    kind, index = device_parts(device)
    if kind == "cpu":
        return CPU
    if kind == "cuda":
        return _describe_cuda(index)
    raise InputError(f"kernels run on cpu and cuda devices, not on {device}")


@functools.cache
def peak_bandwidth_gbs(device: torch.device) -> float | None:
    """Returns the peak bandwidth of a GPU's memory in 1e9 bytes per second.

    Returns None for a CPU, and if torch is too old to report the bandwidth.
    """
    if device.type != "cuda":
        return None
    import torch

    properties = torch.cuda.get_device_properties(device)
    if not hasattr(properties, "memory_clock_rate"):
        return None
    return bandwidth_gbs(properties.memory_clock_rate, properties.memory_bus_width)


def bandwidth_gbs(clock_khz: int, bus_bits: int) -> float:
    """Returns the peak bandwidth of a memory in 1e9 bytes per second.

    The memory makes two transfers of `bus_bits` bits per clock.
    """
    return 2 * clock_khz * bus_bits / 8 * 1e-6
