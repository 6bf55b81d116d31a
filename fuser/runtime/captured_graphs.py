"""Captures the work of CUDA streams as a CUDA graph, which a single driver call launches again.

Between launches, the arguments of a captured kernel can be replaced. Everything else is fixed at
the capture, including all other addresses.

Nothing is captured while another thread may run programs. If that thread synchronised the device,
the driver would report an error to the thread, and end the capture.
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
from fuser.runtime.graph_memory import relaxed, status_text
from fuser.support.errors import KernelError
from fuser.support.locks import make_lock, uncollected
from fuser.support.torch_calls import is_backward

if TYPE_CHECKING:
    import torch

Slots = list[Any]


class Graph(Protocol):
    """A captured CUDA graph. Launches of one graph must not overlap, because all launches use the
    same memory.
    """

    def launch(self, stream: int) -> None:
        """Enqueues the whole graph on the stream with the raw handle `stream`.

        Raises:
            KernelError: the driver rejects the launch.
        """
        ...

    def update(self, node: object, call: LaunchCall) -> None:
        """Copies the current arguments of `call` to the captured kernel `node`. Later launches of
        the graph use these arguments.
        """
        ...

    def twin(self) -> Graph:
        """Returns another instance of the graph, in the state in which it was captured.

        Updates of one instance do not change the other, but their launches use the same memory.
        """
        ...


class GraphMaker(Protocol):
    """Captures work as CUDA graphs, which are executed one after another on one stream."""

    # The stream (a raw handle) on which a captured run begins.
    stream: int

    def stand_in(self, stream: int) -> int:
        """Returns the stream on which the work of `stream` (a raw handle) is captured.

        Another stream is used because libraries have data per stream. Replays of the CUDA graph
        must not share that data with other work on `stream`, which may run at the same time.
        """
        ...

    def capture(self, actions: Sequence[Callable[[Slots], object]], slots: Slots) -> Graph:
        """Returns a CUDA graph of the work that the functions `actions` enqueue. The captured work
        is not executed.

        Each function is called with `slots`, the list of a program's values.

        Raises:
            RuntimeError: the work of a function cannot be captured. Errors of the functions are
                passed on.
        """
        ...

    def kernel(self, call: LaunchCall, stream: int) -> object:
        """Launches the kernel of `call` on `stream` during a capture, and returns the CUDA graph's
        node for that kernel, whose arguments can be updated later.
        """
        ...


class _ThreadUser(threading.local):
    """A thread-local flag: whether the current thread is registered as one that runs programs. No
    CUDA graph is captured while other such threads exist.
    """

    is_known = False


class Users:
    """The threads of this process that run programs.

    Nothing is captured as a CUDA graph while another such thread exists, because that thread could
    end the capture.
    """

    def __init__(self) -> None:
        # Threads are stored, not their ids, because the id of an ended thread is reused.
        self._known: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._lock = make_lock()
        self.here = _ThreadUser()

    def enter(self) -> None:
        """Registers this thread as one that runs programs, as soon as no CUDA graph is being
        captured, and sets the thread-local flag `here.is_known`.

        A thread that Python did not start only gets the flag, because Python's list of threads may
        not contain it. An example is a thread in which torch computes gradients.
        """
        with self._lock:
            mine = threading.get_ident()
            self._known.update(t for t in threading.enumerate() if t.ident == mine)
            self.here.is_known = True

    @contextmanager
    def alone(self) -> Generator[list[str]]:
        """A context in which no other thread can begin to run programs. Its value is the list of
        names that `others()` returns.
        """
        with self._lock:
            yield self.others()

    def others(self) -> list[str]:
        """Returns the names of the other threads that have begun to run programs. While there are
        any, no CUDA graph is captured.
        """
        mine = {threading.get_ident()}
        if is_backward():
            # This thread is torch's, and computes gradients for a thread that waits for it.
            mine.add(threading.main_thread().ident or 0)
        others = (t for t in threading.enumerate() if t.ident not in mine)
        return [thread.name for thread in others if thread in self._known]


USERS = Users()


def _cuda_graphs(device: torch.device) -> GraphMaker:

    return CudaGraphs(device)


# The graph maker of each device type. A CPU has none.
MAKERS: dict[str, Callable[[torch.device], GraphMaker]] = {"cuda": _cuda_graphs}


# ----------------------------------------------------------------------
# CUDA graphs of the runs of a program.
#
# The driver captures, not `torch.cuda.CUDAGraph`: after a failed capture, torch's random number
# generator stays in its capture state. Ops that draw torch's random numbers cannot be captured,
# because torch rejects them.

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
    """A kernel in a captured CUDA graph, and its parameters in the driver's format."""

    def __init__(self, handle: int, params: _KernelNodeParams) -> None:
        self.handle = ctypes.c_void_p(handle)
        self.params = params


def _checked(what: str, result: tuple[Any, ...]) -> Any:
    status, *values = result
    if status != load_driver().CUresult.CUDA_SUCCESS:
        raise KernelError(f"CUDA graphs: the driver call {what} failed with {status!r}")
    return values[0] if len(values) == 1 else values


def _refusal(library: Any, function: str, status: int, problem: str) -> KernelError:
    """Returns the error for the driver call `function` that failed with `status`. `library` is the
    driver's library, loaded by ctypes. `problem` says what the call was for.
    """
    return KernelError(
        f"{problem}: the driver call {function} failed with {status_text(library, status)}. Set "
        "FUSER_DISABLE=cuda_graphs to launch every kernel separately, without CUDA graphs"
    )


def _destroy(library: Any, destroy: Callable[[ctypes.c_void_p], int], handle: Any) -> None:
    """Destroys a CUDA graph or an executable graph by calling `destroy`, a function of the driver,
    with its handle.

    The garbage collector calls this function, possibly while the user captures a CUDA graph. The
    driver is therefore called in a mode in which the call does not make that capture fail.
    """
    with relaxed(library):
        destroy(handle)


class _Template:
    """A CUDA graph as captured, from which executable graphs are instantiated."""

    def __init__(self, graph: Any, library: Any, maker: CudaGraphs) -> None:
        self.graph, self.library = graph, library
        # This reference keeps the memory alive that was allocated during the capture.
        self._maker = maker
        handle = ctypes.c_void_p(int(graph))
        weakref.finalize(self, _destroy, library, library.cuGraphDestroy, handle)


class CudaGraph:
    """An executable CUDA graph, which implements the interface `Graph`: it can be launched, and the
    arguments of its kernels can be updated.
    """

    def __init__(self, template: _Template) -> None:
        self._template, library = template, template.library
        self._library = library
        made = _checked("cuGraphInstantiate", load_driver().cuGraphInstantiate(template.graph, 0))
        self._handle = ctypes.c_void_p(int(made))
        self._launch = library.cuGraphLaunch
        self._set_params = library.cuGraphExecKernelNodeSetParams_v2
        weakref.finalize(self, _destroy, library, library.cuGraphExecDestroy, self._handle)
        # For a caller in C: the addresses of the launch and update functions, and the graph's
        # handle.
        handle = self._handle.value or 0
        self.raw = address_of(self._launch), address_of(self._set_params), handle

    def raw_node(self, node: object, call: LaunchCall) -> tuple[int, int]:
        """Sets the parameters of the captured kernel `node` to the arguments of `call`. Returns the
        addresses of the node and of the parameters, for callers in C.
        """
        assert isinstance(node, _KernelNode)
        node.params.arguments = call.packed
        return node.handle.value or 0, ctypes.addressof(node.params)

    def twin(self) -> CudaGraph:
        """Returns another executable graph, instantiated from the same captured graph."""
        return CudaGraph(self._template)

    def launch(self, stream: int) -> None:
        """Enqueues the graph on the stream with the raw handle `stream`. If this thread has no CUDA
        context, binds one first.
        """
        status = self._launch(self._handle, ctypes.c_void_p(stream))
        if status == _INVALID_CONTEXT:
            bind_primary_context()
            status = self._launch(self._handle, ctypes.c_void_p(stream))
        if status:
            raise _refusal(
                self._library,
                "cuGraphLaunch",
                status,
                "the CUDA graph that repeats an earlier run cannot be launched, possibly because "
                "of an error in a kernel that ran before",
            )

    def update(self, node: object, call: LaunchCall) -> None:
        """Copies the current arguments of `call` to the captured kernel `node` of this executable
        graph. Later launches use them.
        """
        assert isinstance(node, _KernelNode)
        node.params.arguments = call.packed
        status = self._set_params(self._handle, node.handle, ctypes.byref(node.params))
        if status:
            raise _refusal(
                self._library,
                "cuGraphExecKernelNodeSetParams",
                status,
                "the CUDA graph of an earlier run cannot be updated with the tensors of this run",
            )


class _CaptureDevice:
    """The streams and the memory pool that captures of CUDA graphs on one device use.

    An instance is used again later, and never freed. Torch ends the process if a pool is freed
    during a capture, and a garbage collection or another thread could free the pool at any time.
    """

    def __init__(self) -> None:
        import torch

        self.pool = torch.cuda.MemPool()
        self.stream = _new_stream()
        self.stand_ins: list[int] = []


# The instances that no `CudaGraphs` uses now, by device number.
_places: dict[int, list[_CaptureDevice]] = {}


def _new_stream() -> int:
    """Creates a CUDA stream and returns its handle. Torch's own streams are not used, because other
    code may use them, too.
    """
    made = load_driver().cuStreamCreate(_NON_BLOCKING)
    return int(_checked("cuStreamCreate", made))


def _take_place() -> _CaptureDevice:
    """Returns streams and a memory pool for the capture of CUDA graphs on the current device that
    no other `CudaGraphs` uses.
    """
    import torch

    spare = _places.setdefault(torch.cuda.current_device(), [])
    try:
        place = spare.pop()  # atomic, so two threads never get the same one
    except IndexError:
        return _CaptureDevice()
    try:
        # Graphs of the previous user may still run in its memory.
        torch.cuda.synchronize()
    except RuntimeError:  # another thread captures, so waiting is not possible
        spare.append(place)
        return _CaptureDevice()
    return place


class CudaGraphs:
    """Captures CUDA graphs with streams and a memory pool that no other instance uses; implements
    `GraphMaker`."""

    def __init__(self, device: torch.device) -> None:
        """Loads the driver's library, and reserves streams and a memory pool.

        Raises:
            KernelError: this version of torch, or the driver, cannot capture graphs.
        """
        import torch

        if not hasattr(torch.cuda, "use_mem_pool"):
            raise KernelError(
                "CUDA graphs need memory pools, which this version of torch lacks: use 2.5 or later"
            )
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise KernelError(f"CUDA graphs need the driver's libcuda.so.1: {error}") from error
        self._device = device
        self._stand_ins: dict[int, int] = {}
        self._place = place = _take_place()
        self.stream = place.stream
        weakref.finalize(self, _places[torch.cuda.current_device()].append, place)

    def stand_in(self, stream: int) -> int:
        """Returns the stream on which the work of `stream` (a raw handle) is captured. The result
        is always the same for one stream.
        """
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
        """Captures the work that the functions `actions` enqueue in this thread, and returns an
        executable CUDA graph.
        """
        import torch

        driver, entry = load_driver(), torch.cuda.ExternalStream(self.stream, device=self._device)
        stream = driver.CUstream(self.stream)
        # Thread-local mode: other threads may continue and allocate memory outside of the capture.
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
        """Launches a kernel during the capture, and returns its node in the CUDA graph, with the
        parameters that later updates change.
        """
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
            raise _refusal(
                self._library,
                "cuGraphKernelNodeGetParams",
                status,
                "the arguments of a kernel that was captured in a CUDA graph cannot be read",
            )
        return _KernelNode(int(last), params)
