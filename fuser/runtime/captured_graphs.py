"""Graphs: what streams were given once, captured, and launched again in one call.

The arguments of a captured kernel can be replaced between launches; all else stays as it was when
it was captured, addresses included.

Nothing is captured while another thread runs programs, too: were it to wait for the whole device
meanwhile, the driver would give it an error, and end the capture.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from fuser.runtime.compiled_kernel import LaunchCall
from fuser.support.locks import make_lock
from fuser.support.torch_calls import is_backward

if TYPE_CHECKING:
    import torch

Slots = list[Any]


class Graph(Protocol):
    """What was captured. One launch at a time: launches that overlap would share its memory."""

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
    """What this thread knows of itself."""

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
    from fuser.runtime.cuda_graph import CudaGraphs

    return CudaGraphs(device)


# By type of device: what captures. On a CPU there is nothing to capture.
MAKERS: dict[str, Callable[[torch.device], GraphMaker]] = {"cuda": _cuda_graphs}
