"""CUDA graphs of the runs of a program.

The driver captures, not `torch.cuda.CUDAGraph`: where a capture of torch's fails, its random number
generator stays in that state. An op that draws torch's random numbers cannot be captured: torch
refuses.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fuser.errors import KernelError
from fuser.runtime.cuda_kernel import bind_primary_context, load_driver
from fuser.runtime.graphs import Slots
from fuser.runtime.kernel import LaunchCall

if TYPE_CHECKING:
    import torch

_INVALID_CONTEXT = 201
_NON_BLOCKING = 1


class _KernelNodeParams(ctypes.Structure):
    """`CUDA_KERNEL_NODE_PARAMS_v2` of the driver's C interface."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem_bytes", ctypes.c_uint),
        ("arguments", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class _Node:
    """A captured kernel, and its parameters as the driver takes them."""

    def __init__(self, handle: int, params: _KernelNodeParams) -> None:
        self.handle = ctypes.c_void_p(handle)
        self.params = params


def _checked(what: str, result: tuple[Any, ...]) -> Any:
    status, *values = result
    if status != load_driver().CUresult.CUDA_SUCCESS:
        raise KernelError(f"CUDA graph: {what} failed ({status!r})")
    return values[0] if len(values) == 1 else values


class CudaGraph:
    """An executable graph; `Graph` of fuser/runtime/graphs.py."""

    def __init__(self, graph: Any, library: Any, pool: torch.cuda.MemPool) -> None:
        # What was allocated while it was captured lies there.
        self._pool = pool
        weakref.finalize(self, library.cuGraphDestroy, ctypes.c_void_p(int(graph)))
        made = _checked("cuGraphInstantiate", load_driver().cuGraphInstantiate(graph, 0))
        self._handle = ctypes.c_void_p(int(made))
        self._launch = library.cuGraphLaunch
        self._set_params = library.cuGraphExecKernelNodeSetParams_v2
        weakref.finalize(self, library.cuGraphExecDestroy, self._handle)

    def launch(self, stream: int) -> None:
        status = self._launch(self._handle, ctypes.c_void_p(stream))
        if status == _INVALID_CONTEXT:
            bind_primary_context()
            status = self._launch(self._handle, ctypes.c_void_p(stream))
        if status:
            raise KernelError(f"CUDA graph: the driver refused the launch ({status})")

    def update(self, node: object, call: LaunchCall) -> None:
        assert isinstance(node, _Node)
        node.params.arguments = call.packed
        status = self._set_params(self._handle, node.handle, ctypes.byref(node.params))
        if status:
            raise KernelError(f"CUDA graph: the driver refused new arguments ({status})")


class CudaGraphs:
    """The streams and the memory of the graphs of one stream; `GraphMaker` of graphs.py."""

    def __init__(self, device: torch.device) -> None:
        """Raises `KernelError` where this machine cannot capture."""
        import torch

        if not hasattr(torch.cuda, "use_mem_pool"):
            raise KernelError("this torch has no pools of memory (2.5 does)")
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise KernelError(f"CUDA graphs need the driver's library: {error}") from error
        self._device = device
        self._stand_ins: dict[int, int] = {}
        self._pool = torch.cuda.MemPool()
        self.stream = self._new_stream()

    def _new_stream(self) -> int:
        """Return a stream that nobody else has: torch hands out each of its own to several."""
        made = _checked("cuStreamCreate", load_driver().cuStreamCreate(_NON_BLOCKING))
        handle = ctypes.c_void_p(int(made))
        weakref.finalize(self, self._library.cuStreamDestroy_v2, handle)
        return int(made)

    def stand_in(self, stream: int) -> int:
        if stream == self.stream or stream in self._stand_ins.values():
            return stream
        if stream not in self._stand_ins:
            self._stand_ins[stream] = self._new_stream()
        return self._stand_ins[stream]

    def capture(self, actions: Sequence[Callable[[Slots], object]], slots: Slots) -> CudaGraph:
        import torch

        driver, entry = load_driver(), torch.cuda.ExternalStream(self.stream, device=self._device)
        stream = driver.CUstream(self.stream)
        # Other threads go on meanwhile, and allocate elsewhere.
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        with torch.cuda.stream(entry), torch.cuda.use_mem_pool(self._pool):
            _checked("cuStreamBeginCapture", driver.cuStreamBeginCapture(stream, mode))
            try:
                for act in actions:
                    act(slots)
            except BaseException:
                driver.cuStreamEndCapture(stream)
                raise
            graph = _checked("cuStreamEndCapture", driver.cuStreamEndCapture(stream))
        return CudaGraph(graph, self._library, self._pool)

    def kernel(self, call: LaunchCall, stream: int) -> _Node:
        status = call.function(*call.arguments)
        if status:
            call.fail(status)
        found = load_driver().cuStreamGetCaptureInfo(load_driver().CUstream(stream))
        _checked("cuStreamGetCaptureInfo", found[:1])
        (last,) = next(part for part in found if isinstance(part, list))
        params = _KernelNodeParams()
        get = self._library.cuGraphKernelNodeGetParams_v2
        status = get(ctypes.c_void_p(int(last)), ctypes.byref(params))
        if status:
            raise KernelError(f"CUDA graph: a launch left no kernel to update ({status})")
        return _Node(int(last), params)
