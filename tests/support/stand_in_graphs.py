"""A stand-in for CUDA graphs on the CPU: it repeats the captured actions on the captured addresses.

As on a GPU, inputs and outputs are not kept alive, and memory allocated by a step keeps its
address.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from fuser.runtime.captured_graphs import MAKERS, Slots
from fuser.runtime.compiled_kernel import LaunchCall
from hostir.ir.shard_layout import spanned
from hostir.runtime import plan, steps


def without_owner(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor at the same address that does not keep the memory alive."""
    nbytes = spanned(tuple(tensor.shape), tensor.stride()) * tensor.element_size()
    if tensor.device.type != "cpu" or not nbytes:
        return tensor
    memory = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride())


class Recycled:
    """Memory that is reused as soon as it is released, as by torch's allocator on a GPU."""

    def __init__(self) -> None:
        self._free: dict[int, list[bytearray]] = {}

    def empty_on(self, device: torch.device) -> Callable[..., torch.Tensor]:
        """Same as `fuser.support.torch_calls.empty_on`, for the CPU."""
        del device
        return self._make

    def _make(
        self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        nbytes = max(spanned(tuple(shape), tuple(strides)) * dtype.itemsize, 1)
        free = self._free.setdefault(nbytes, [])
        memory = free.pop() if free else bytearray(nbytes + 64)
        # The storage holds the window, and whoever has a view holds the storage.
        start = -ctypes.addressof((ctypes.c_char * 1).from_buffer(memory)) % 64
        window = (ctypes.c_char * nbytes).from_buffer(memory, start)
        weakref.finalize(window, free.append, memory)
        flat = torch.frombuffer(window, dtype=torch.uint8)
        return flat[: nbytes - nbytes % dtype.itemsize].view(dtype).as_strided(shape, strides)


class _Node:
    def __init__(self, call: LaunchCall) -> None:
        self.call = call
        self.words = list(call.words)

    def launch(self, words: list[int]) -> None:
        self.call.words[:] = words
        assert self.call.function(*self.call.arguments) == 0


class CpuGraph:
    def __init__(self, maker: CpuGraphs, actions: Sequence[Callable[[Slots], object]]) -> None:
        self._maker, self._actions = maker, actions
        self.nodes: list[_Node] = []
        # Argument words of launches, where they differ from those of the capture.
        self.words: dict[_Node, list[int]] = {}
        self.twins: list[CpuGraph] = []
        self.slots: Slots = []
        # The tensors that the capture put into slots.
        self._first: dict[int, torch.Tensor] = {}
        # The capture itself has run, which on a GPU it does not.
        self._has_run = False
        # Those of its twins, too.
        self.launches = 0
        self._origin = self

    def run(self, slots: Slots) -> None:
        for act in self._actions:
            before = list(slots)
            act(slots)
            for i, (old, new) in enumerate(zip(before, list(slots), strict=True)):
                if old is not new and isinstance(new, torch.Tensor):
                    kept = self._first.setdefault(i, new)
                    if kept is not new:
                        kept.copy_(new)
                        list.__setitem__(slots, i, kept)

    def launch(self, stream: int) -> None:
        self._origin.launches += 1
        if not self._has_run:
            self._has_run = True
            return
        self._maker.replayed, self._maker.next = self, 0
        try:
            self.run(self.slots)
        finally:
            self._maker.replayed = None

    def update(self, node: object, call: LaunchCall) -> None:
        assert (
            isinstance(node, _Node) and node in self.nodes and self._has_run
        ) or self.launches == 0
        assert isinstance(node, _Node)
        self.words[node] = list(call.words)

    def twin(self) -> CpuGraph:
        made = CpuGraph(self._maker, self._actions)
        made.nodes, made.slots, made._first = self.nodes, self.slots, self._first
        made._has_run, made._origin = True, self._origin
        self.twins.append(made)
        return made


class CpuGraphs:
    """The `GraphMaker` (fuser/runtime/captured_graphs.py) of the CPU; `made` lists its
    graphs.
    """

    stream = 0

    def __init__(self, device: torch.device) -> None:
        self.made: list[CpuGraph] = []
        self.replayed: CpuGraph | None = None
        self.next = 0

    def stand_in(self, stream: int) -> int:
        return stream

    def capture(self, actions: Sequence[Callable[[Slots], object]], slots: Slots) -> CpuGraph:
        graph = CpuGraph(self, actions)
        for i, value in enumerate(list(slots)):
            if isinstance(value, torch.Tensor):
                list.__setitem__(slots, i, without_owner(value))
        self._captured = graph
        graph.run(slots)
        graph.slots = slots
        self.made.append(graph)
        return graph

    def kernel(self, call: LaunchCall, stream: int) -> Any:
        graph = self.replayed
        if graph is None:
            node = _Node(call)
            self._captured.nodes.append(node)
            node.launch(node.words)
            return node
        node = graph.nodes[self.next]
        self.next += 1
        node.launch(graph.words.get(node, node.words))
        return node


def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[CpuGraphs]:
    """Enables captures on the CPU; returns the graph makers, one per stream and arena."""
    found: list[CpuGraphs] = []

    def make(device: torch.device) -> CpuGraphs:
        found.append(CpuGraphs(device))
        return found[-1]

    monkeypatch.setitem(MAKERS, "cpu", make)
    # Memory of earlier programs knows what captured them.
    monkeypatch.setattr(plan, "_POOLS", {})
    # So that addresses come back for certain.
    monkeypatch.setattr(steps, "empty_on", Recycled().empty_on)
    return found
