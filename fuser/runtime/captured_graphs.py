"""Graphs: what streams were given once, captured, and launched again in one call.

The arguments of a captured kernel can be replaced between launches; all else stays as it was when
it was captured, addresses included.

Nothing is captured while another thread runs programs, too: were it to wait for the whole device
meanwhile, the driver would give it an error, and end the capture.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from fuser.runtime.compiled_kernel import LaunchCall
from fuser.runtime.cuda_kernel import address_of, bind_primary_context, load_driver
from fuser.runtime.graph_memory import relaxed
from fuser.support.errors import KernelError
from fuser.support.locks import make_lock, uncollected
from fuser.support.torch_calls import is_backward

if TYPE_CHECKING:
    import torch

Slots = list[Any]


class Graph(Protocol):
    """A captured graph. One launch at a time: launches that overlap would share its memory."""

    def launch(self, stream: int) -> None:
        """Enqueues all of it on a stream. Raises `KernelError` where the driver refuses."""
        ...

    def update(self, node: object, call: LaunchCall) -> None:
        """Gives a kernel, from the next launch on, the arguments that its call holds now."""
        ...

    def twin(self) -> Graph:
        """Returns the graph as it was captured, once more: what updates one leaves the other as it
        is. Their launches share memory, too."""
        ...


class GraphMaker(Protocol):
    """Captures runs that follow one another on one stream."""

    # The stream (a raw handle) on which a run begins while it is captured.
    stream: int

    def stand_in(self, stream: int) -> int:
        """Returns the stream that is captured in place of another one: graphs must not share what
        libraries keep per stream with work that is not ordered with them."""
        ...

    def capture(self, actions: Sequence[Callable[[Slots], object]], slots: Slots) -> Graph:
        """Returns what the actions enqueue; none of it runs.

        Raises what an action raises, or `RuntimeError` where what it did cannot be captured.
        """
        ...

    def kernel(self, call: LaunchCall, stream: int) -> object:
        """Launches a kernel within a capture and returns its node."""
        ...


class _ThreadUser(threading.local):
    """Whether this thread is known as a user of graphs."""

    is_known = False


class Users:
    """The threads that run programs."""

    def __init__(self) -> None:
        # Threads, not their numbers: the number of one that has ended is given to another.
        self._known: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._lock = make_lock()
        self.here = _ThreadUser()

    def enter(self) -> None:
        """Notes this thread, once nobody captures; `here.is_known` says that it has come here. One
        that Python did not start, as those of torch that compute gradients, has no name to note."""
        with self._lock:
            mine = threading.get_ident()
            self._known.update(t for t in threading.enumerate() if t.ident == mine)
            self.here.is_known = True

    @contextmanager
    def alone(self) -> Generator[list[str]]:
        """A context in which no thread begins to run programs; has the `others`."""
        with self._lock:
            yield self.others()

    def others(self) -> list[str]:
        """Returns the names of the threads, beside this one, that have begun to run programs."""
        mine = {threading.get_ident()}
        if is_backward():
            # One of torch's, which computes gradients for a thread that waits for them.
            mine.add(threading.main_thread().ident or 0)
        others = (t for t in threading.enumerate() if t.ident not in mine)
        return [thread.name for thread in others if thread in self._known]


USERS = Users()


def _cuda_graphs(device: torch.device) -> GraphMaker:

    return CudaGraphs(device)


# By type of device: what captures. On a CPU there is nothing to capture.
MAKERS: dict[str, Callable[[torch.device], GraphMaker]] = {"cuda": _cuda_graphs}


# ----------------------------------------------------------------------
# CUDA graphs of the runs of a program.
#
# The driver captures, not `torch.cuda.CUDAGraph`: where a capture of torch's fails, its random
# number generator stays in that state. An op that draws torch's random numbers cannot be captured:
# torch refuses.

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


class _KernelNode:
    """A captured kernel, and its parameters as the driver takes them."""

    def __init__(self, handle: int, params: _KernelNodeParams) -> None:
        self.handle = ctypes.c_void_p(handle)
        self.params = params


def _checked(what: str, result: tuple[Any, ...]) -> Any:
    status, *values = result
    if status != load_driver().CUresult.CUDA_SUCCESS:
        raise KernelError(f"CUDA graph: {what} failed ({status!r})")
    return values[0] if len(values) == 1 else values


def _destroy(library: Any, destroy: Callable[[ctypes.c_void_p], int], handle: Any) -> None:
    """Destroys a graph: a garbage collection does, maybe while a caller captures one of his own."""
    with relaxed(library):
        destroy(handle)


class _Template:
    """A graph as it was captured, of which executable ones are made."""

    def __init__(self, graph: Any, library: Any, maker: CudaGraphs) -> None:
        self.graph, self.library = graph, library
        # In whose place lies what was allocated while it was captured.
        self._maker = maker
        handle = ctypes.c_void_p(int(graph))
        weakref.finalize(self, _destroy, library, library.cuGraphDestroy, handle)


class CudaGraph:
    """An executable graph; `Graph` of fuser/runtime/captured_graphs.py."""

    def __init__(self, template: _Template) -> None:
        self._template, library = template, template.library
        made = _checked("cuGraphInstantiate", load_driver().cuGraphInstantiate(template.graph, 0))
        self._handle = ctypes.c_void_p(int(made))
        self._launch = library.cuGraphLaunch
        self._set_params = library.cuGraphExecKernelNodeSetParams_v2
        weakref.finalize(self, _destroy, library, library.cuGraphExecDestroy, self._handle)
        # For a caller in C: what launches, what replaces arguments, and the graph.
        handle = self._handle.value or 0
        self.raw = address_of(self._launch), address_of(self._set_params), handle

    def raw_node(self, node: object, call: LaunchCall) -> tuple[int, int]:
        """The addresses of a kernel and of its parameters, which point to the words of a call."""
        assert isinstance(node, _KernelNode)
        node.params.arguments = call.packed
        return node.handle.value or 0, ctypes.addressof(node.params)

    def twin(self) -> CudaGraph:
        return CudaGraph(self._template)

    def launch(self, stream: int) -> None:
        status = self._launch(self._handle, ctypes.c_void_p(stream))
        if status == _INVALID_CONTEXT:
            bind_primary_context()
            status = self._launch(self._handle, ctypes.c_void_p(stream))
        if status:
            raise KernelError(f"CUDA graph: the driver refused the launch ({status})")

    def update(self, node: object, call: LaunchCall) -> None:
        assert isinstance(node, _KernelNode)
        node.params.arguments = call.packed
        status = self._set_params(self._handle, node.handle, ctypes.byref(node.params))
        if status:
            raise KernelError(f"CUDA graph: the driver refused new arguments ({status})")


class _CaptureDevice:
    """The streams and the memory of captures, on one device.

    It is never given back, but used again: torch ends the process where a pool goes while anything
    is captured, and a garbage collection, or another thread, may come at any time.
    """

    def __init__(self) -> None:
        import torch

        self.pool = torch.cuda.MemPool()
        self.stream = _new_stream()
        self.stand_ins: list[int] = []


# Those that no `CudaGraphs` has now, by the number of their device.
_places: dict[int, list[_CaptureDevice]] = {}


def _new_stream() -> int:
    """Returns a stream that nobody else has: torch hands out each of its own to several."""
    made = load_driver().cuStreamCreate(_NON_BLOCKING)
    return int(_checked("cuStreamCreate", made))


def _take_place() -> _CaptureDevice:
    """Returns a place on the current device for captures that nobody else makes."""
    import torch

    spare = _places.setdefault(torch.cuda.current_device(), [])
    try:
        place = spare.pop()  # at once, whatever other threads do
    except IndexError:
        return _CaptureDevice()
    try:
        # Graphs of who had it may still run in its memory.
        torch.cuda.synchronize()
    except RuntimeError:  # somebody else captures
        spare.append(place)
        return _CaptureDevice()
    return place


class CudaGraphs:
    """Captures in a place of its own; `GraphMaker` of graphs.py."""

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
        self._place = place = _take_place()
        self.stream = place.stream
        weakref.finalize(self, _places[torch.cuda.current_device()].append, place)

    def stand_in(self, stream: int) -> int:
        if stream == self.stream or stream in self._stand_ins.values():
            return stream
        found = self._stand_ins.get(stream)
        if found is None:
            streams = self._place.stand_ins
            if len(streams) == len(self._stand_ins):
                streams.append(_new_stream())
            found = self._stand_ins[stream] = streams[len(self._stand_ins)]
        return found

    def capture(self, actions: Sequence[Callable[[Slots], object]], slots: Slots) -> CudaGraph:
        import torch

        driver, entry = load_driver(), torch.cuda.ExternalStream(self.stream, device=self._device)
        stream = driver.CUstream(self.stream)
        # Other threads go on meanwhile, and allocate elsewhere.
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        pool = self._place.pool
        with torch.cuda.stream(entry), torch.cuda.use_mem_pool(pool), uncollected:
            _checked("cuStreamBeginCapture", driver.cuStreamBeginCapture(stream, mode))
            try:
                for act in actions:
                    act(slots)
            except BaseException:
                driver.cuStreamEndCapture(stream)
                raise
            graph = _checked("cuStreamEndCapture", driver.cuStreamEndCapture(stream))
        return CudaGraph(_Template(graph, self._library, self))

    def kernel(self, call: LaunchCall, stream: int) -> _KernelNode:
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
        return _KernelNode(int(last), params)
