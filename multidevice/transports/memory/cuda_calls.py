"""The driver's API, whose calls are checked."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from fuser.runtime.cuda_kernel import bind_primary_context
from fuser.support.errors import CommunicationError, UnsupportedError


class CudaCalls:
    """Calls of the driver, by name; `api` has its types."""

    def __init__(self) -> None:
        self.api: Any = driver()
        self._success = self.api.CUresult.CUDA_SUCCESS

    def call(self, name: str, *args: object) -> Any:
        """Returns what a call returns behind its status. Raises `CommunicationError`."""
        status, *results = getattr(self.api, name)(*args)
        self.check(name, status)
        return results[0] if len(results) == 1 else results

    def check(self, name: str, status: Any) -> None:
        """Raises `CommunicationError` where a call has failed."""
        if status != self._success:
            raise CommunicationError(f"{name}: {status.name}")


@contextmanager
def driving(cuda: CudaCalls, device: torch.device) -> Generator[None]:
    """A context for calls on a device that another thread's capture need not hear of."""
    relaxed = cuda.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    with on_device(device):
        before = cuda.call("cuThreadExchangeStreamCaptureMode", relaxed)
        try:
            yield
        finally:
            cuda.call("cuThreadExchangeStreamCaptureMode", before)


@contextmanager
def on_device(device: torch.device) -> Generator[None]:
    """A context in which this thread drives a device."""
    with torch.cuda.device(device):
        bind_primary_context()
        yield


def driver() -> Any:
    """Returns the driver's API. Raises `UnsupportedError` without cuda-bindings."""
    try:
        return import_module("cuda.bindings.driver")
    except ImportError as error:
        raise UnsupportedError(
            f"backend CUDA needs cuda-bindings ({error}): install fuser-hostir[cu12] or [cu13]"
        ) from error
