"""Shards tensors of the fusion IR over devices, and runs the communication between ranks.

Importing this package needs neither CUDA nor MPI: each name is imported at its first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from multidevice.job import early_abort

if TYPE_CHECKING:
    from multidevice.job.communicator import Communicator as Communicator
    from multidevice.job.shard_tensor import LocalDeviceMesh as DeviceMesh
    from multidevice.job.shard_tensor import shard_tensor as shard_tensor
    from multidevice.job.simulation import World as World
    from multidevice.job.simulation import simulate as simulate
    from multidevice.sharding.queries import Sharding as Sharding

# Public name -> the module that defines it (and its name there). The executor is defined in fuser,
# because it uses all three packages; users look for it here.
_EXPORTS = {
    "CommunicatorBackend": "fuser.nvfuser.multi_device_executor",
    "MultiDeviceExecutor": "fuser.nvfuser.multi_device_executor",
    "MultiDeviceExecutorParams": "fuser.nvfuser.multi_device_executor",
    "Communicator": "multidevice.job.communicator",
    "DeviceMesh": "multidevice.job.shard_tensor:LocalDeviceMesh",
    "Sharding": "multidevice.sharding.queries",
    "shard_tensor": "multidevice.job.shard_tensor",
    "World": "multidevice.job.simulation",
    "simulate": "multidevice.job.simulation",
}

__all__ = [
    "Communicator",
    "CommunicatorBackend",  # pyright: ignore[reportUnsupportedDunderAll]
    "DeviceMesh",
    "MultiDeviceExecutor",  # pyright: ignore[reportUnsupportedDunderAll]
    "MultiDeviceExecutorParams",  # pyright: ignore[reportUnsupportedDunderAll]
    "Sharding",
    "World",
    "shard_tensor",
    "simulate",
]


def __getattr__(name: str) -> object:
    found = _EXPORTS.get(name)
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, defined_as = found.partition(":")
    return getattr(import_module(module), defined_as or name)


def __dir__() -> list[str]:
    return sorted(_EXPORTS)


early_abort.install()
