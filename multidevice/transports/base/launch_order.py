"""Makes kernel launches on any CUDA streams run one after another, in the order of the host's
calls.

The kernels wait for kernels of other GPUs, which are matched by their order alone. Between launches
on two streams, the second stream waits for an event of the first. A launch that is captured in a
CUDA graph runs when the graph is launched, on any stream. The graph waits for the event before its
first such kernel, and records the event after its last one. So graphs, too, run in the order in
which the host launches them. Within a graph, the edges of the graph define the order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from fuser.runtime.graph_memory import status_text
from fuser.support.errors import CommunicationError, UnsupportedError
from multidevice.transports.base.checked_backend import stream_at

_NO_TIMING = 2
# A flag for events in a capture: make a node of the graph, not a mark in the capture.
_EXTERNAL = 1
_NO_CONTEXT = 201


class GraphDriver(Protocol):
    """The calls of the CUDA driver that `LaunchOrder` needs.

    Events, streams, CUDA graphs and graph nodes are raw handles.
    """

    def make_event(self) -> int:
        """Creates a CUDA event without timing; returns its handle."""
        ...

    def record(self, event: int, stream: int) -> None:
        """Records a CUDA event on a stream."""
        ...

    def wait(self, event: int, stream: int) -> None:
        """Makes later work of a stream wait for a CUDA event."""
        ...

    def wait_node(self, event: int, stream: int) -> None:
        """Adds a node that waits for `event` to the CUDA graph that is being captured on
        `stream`.
        """
        ...

    def is_capturing(self, stream: int) -> bool:
        """Returns whether work on the stream is being captured into a CUDA graph."""
        ...

    def capture(self, stream: int) -> tuple[int, int, list[int]]:
        """Returns the state of the capture of a CUDA graph on a stream.

        The state consists of the capture's number, the graph, and the nodes on which the next node
        will depend.
        """
        ...

    def record_node(self, event: int, graph: int, behind: Sequence[int]) -> int:
        """Adds a node that records `event` to a CUDA graph, after the nodes `behind`; returns the
        node.
        """
        ...

    def move_node(self, node: int, graph: int, was: Sequence[int], now: Sequence[int]) -> None:
        """Makes a node of a CUDA graph depend on the nodes `now` instead of the nodes `was`."""
        ...

    def is_done(self, stream: int) -> bool:
        """Returns whether a CUDA stream has completed all its work."""
        ...


class LaunchOrder:
    """Makes kernels run one after another, in the order in which the host launches the kernels.

    The caller calls `before` and `after` around each launch. The launches may be on any CUDA
    streams, and in CUDA graphs.
    """

    def __init__(self, driver: GraphDriver) -> None:
        self._driver = driver
        self._event, self._inner = driver.make_event(), driver.make_event()
        self._last: int | None = None
        # The last capture with a launch: its number, the stream of that launch, the node that
        # records the event, and the nodes before it.
        self._capture = 0
        self._captured_on = 0
        self._node = 0
        self._behind: list[int] = []
        self.is_capturing = driver.is_capturing
        self.is_done = driver.is_done

    def before(self, stream: int) -> bool:
        """Makes the next launch on `stream` wait for the latest launch that this object has
        ordered.

        Returns whether the launch is being captured into a CUDA graph; the caller passes this to
        `after`.
        """
        driver = self._driver
        if not driver.is_capturing(stream):
            # A graph may have been launched on any stream.
            if stream != self._last or self._capture:
                driver.wait(self._event, stream)
            return False
        number, _, _ = driver.capture(stream)
        if number != self._capture:
            driver.wait_node(self._event, stream)
            self._capture, self._node = number, 0
        elif stream != self._captured_on:
            driver.wait(self._inner, stream)
        return True

    def after(self, stream: int, is_captured: bool) -> None:
        """Records that a kernel was just launched on `stream`, so that the next launch waits for
        this kernel.

        `is_captured` is the result of `before`.
        """
        driver = self._driver
        if not is_captured:
            driver.record(self._event, stream)
            self._last = stream
            return
        _, graph, behind = driver.capture(stream)
        if self._node:
            driver.move_node(self._node, graph, self._behind, behind)
        else:
            self._node = driver.record_node(self._event, graph, behind)
        self._behind = behind
        driver.record(self._inner, stream)
        self._captured_on = stream


class CudaDriver:
    """The CUDA driver of one GPU, called through its C interface.

    The C interface is faster than the Python bindings, and every launch uses these calls. Raises
    `UnsupportedError` if the driver's library cannot be loaded.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        handle, count = ctypes.c_void_p, ctypes.c_size_t
        try:
            self._library = library = ctypes.CDLL("libcuda.so.1")
            for name, types in (
                ("cuEventCreate", (handle, ctypes.c_uint)),
                ("cuEventRecord", (handle, handle)),
                ("cuStreamWaitEvent", (handle, handle, ctypes.c_uint)),
                ("cuStreamIsCapturing", (handle, handle)),
                ("cuStreamGetCaptureInfo_v2", (handle,) * 6),
                ("cuGraphAddEventRecordNode", (handle, handle, handle, count, handle)),
                ("cuGraphAddDependencies", (handle, handle, handle, count)),
                ("cuGraphRemoveDependencies", (handle, handle, handle, count)),
            ):
                getattr(library, name).argtypes = types
        except (OSError, AttributeError) as error:
            raise UnsupportedError(
                f"the CUDA driver's library cannot be loaded: {error}"
            ) from error
        self._status = ctypes.c_int()
        self._status_at = ctypes.addressof(self._status)
        self._record, self._wait = library.cuEventRecord, library.cuStreamWaitEvent
        self._ask = library.cuStreamIsCapturing

    def make_event(self) -> int:
        """Creates a CUDA event without timing by `cuEventCreate`; returns its handle."""
        event = ctypes.c_void_p()
        with torch.cuda.device(self._device):
            self._call("cuEventCreate", ctypes.addressof(event), _NO_TIMING)
        return event.value or 0

    def record(self, event: int, stream: int) -> None:
        """Records a CUDA event on a stream by `cuEventRecord`."""
        status = self._record(event, stream)
        if status:
            self._again("cuEventRecord", status, event, stream)

    def wait(self, event: int, stream: int) -> None:
        """Makes later work of a stream wait for a CUDA event, by `cuStreamWaitEvent`."""
        status = self._wait(stream, event, 0)
        if status:
            self._again("cuStreamWaitEvent", status, stream, event, 0)

    def wait_node(self, event: int, stream: int) -> None:
        """Adds a node that waits for `event` to the CUDA graph that is being captured on `stream`.

        Calls `cuStreamWaitEvent` with the flag for external events.
        """
        self._call("cuStreamWaitEvent", stream, event, _EXTERNAL)

    def is_capturing(self, stream: int) -> bool:
        """Returns whether work on the stream is being captured, by `cuStreamIsCapturing`."""
        status = self._ask(stream, self._status_at)
        if status:
            self._again("cuStreamIsCapturing", status, stream, self._status_at)
        return self._status.value != 0

    def capture(self, stream: int) -> tuple[int, int, list[int]]:
        """Returns the state of the capture of a CUDA graph on a stream, by
        `cuStreamGetCaptureInfo_v2`.

        The state consists of the capture's number, the graph, and the nodes on which the next node
        will depend.
        """
        number, graph = ctypes.c_uint64(), ctypes.c_void_p()
        nodes, count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_size_t()
        places = (ctypes.addressof(x) for x in (number, graph, nodes, count))
        self._call("cuStreamGetCaptureInfo_v2", stream, self._status_at, *places)
        behind = [nodes[k] or 0 for k in range(count.value)]
        return number.value, graph.value or 0, behind

    def record_node(self, event: int, graph: int, behind: Sequence[int]) -> int:
        """Adds a node that records `event` to a CUDA graph, after the nodes `behind`; returns the
        node.
        """
        node, nodes = ctypes.c_void_p(), _handles(behind)
        self._call(
            "cuGraphAddEventRecordNode", ctypes.addressof(node), graph, nodes, len(behind), event
        )
        return node.value or 0

    def move_node(self, node: int, graph: int, was: Sequence[int], now: Sequence[int]) -> None:
        """Makes a node of a CUDA graph depend on the nodes `now` instead of the nodes `was`."""
        for name, nodes in (("cuGraphRemoveDependencies", was), ("cuGraphAddDependencies", now)):
            self._call(name, graph, _handles(nodes), _handles([node] * len(nodes)), len(nodes))

    def is_done(self, stream: int) -> bool:
        """Returns whether a CUDA stream has completed all its work."""
        return stream_at(stream, self._device).query()

    def _call(self, name: str, *args: Any) -> None:
        status = getattr(self._library, name)(*args)
        if status:
            self._again(name, status, *args)

    def _again(self, name: str, status: int, *args: Any) -> None:
        """Repeats a failed driver call if the reason was that this thread had no CUDA context.
        `name` and `args` are the function and its arguments, and `status` is its result.

        Raises `CommunicationError` if the call still fails.
        """
        if status == _NO_CONTEXT:
            with torch.cuda.device(self._device):
                torch.cuda.current_stream().query()
            call: Callable[..., int] = getattr(self._library, name)
            status = call(*args)
        if status:
            raise CommunicationError(
                "the order of communications on the GPU cannot be kept: the CUDA driver call "
                f"{name} failed with {status_text(self._library, status)}"
            )


def _handles(values: Sequence[int]) -> Any:
    return (ctypes.c_void_p * len(values))(*values)
