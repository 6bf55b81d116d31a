"""Graphs: what streams were given once, captured, and launched again in one call.

The arguments of a captured kernel can be replaced between launches; all else stays as it was when
it was captured, addresses included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from fuser.runtime.kernel import LaunchCall

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


def _cuda_graphs(device: torch.device) -> GraphMaker:
    from fuser.runtime.cuda_graph import CudaGraphs

    return CudaGraphs(device)


# By type of device: what captures. On a CPU there is nothing to capture.
MAKERS: dict[str, Callable[[torch.device], GraphMaker]] = {"cuda": _cuda_graphs}
