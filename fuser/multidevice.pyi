# `fuser.nvfuser.module_aliases` gives the package multidevice this name.
from fuser.nvfuser.multi_device_executor import CommunicatorBackend as CommunicatorBackend
from fuser.nvfuser.multi_device_executor import MultiDeviceExecutor as MultiDeviceExecutor
from fuser.nvfuser.multi_device_executor import (
    MultiDeviceExecutorParams as MultiDeviceExecutorParams,
)
from multidevice import *  # noqa: F403
