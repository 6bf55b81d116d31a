"""Communications of ranks that share a GPU, staged through the memory of the host.

NCCL refuses a team in which two ranks use one GPU. What such a team sends is copied to the host,
communicated there by the backend of CPU tensors, and copied back. The host waits for the device in
each call: programs for several GPUs run so on one, to be tried out, and not to be timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from multidevice.transports.base.checked_backend import (
    DONE,
    CollectiveCall,
    Exchange,
    FinishingWork,
)
from multidevice.transports.base.protocol import Backend, Work


class Staging:
    """Communicates tensors of a device by the backend `host` of CPU tensors.

    `on(stream)` is a context in which torch's ops go to a stream, `pinned(stream)` is the stream
    that this means now, and `settle(call)` returns when the device has done what the stream of a
    call holds so far.
    """

    def __init__(
        self,
        host: Backend,
        on: Callable[[object], AbstractContextManager[object]],
        pinned: Callable[[object], object],
        settle: Callable[[CollectiveCall | Exchange], None],
    ) -> None:
        self._host, self._on, self._pinned, self._settle = host, on, pinned, settle

    @property
    def name(self) -> str:
        """The name of the host's backend."""
        return self._host.name

    def start(self, call: CollectiveCall) -> Work:
        """Starts a collective; its result is on the device when `wait` has returned."""
        self._settle(call)
        self._host.where = call.where
        try:
            return self._collective(call)
        finally:
            self._host.where = ""

    def _collective(self, call: CollectiveCall) -> Work:
        if call.op == "broadcast":
            return self._broadcast(call)
        if call.op == "barrier":
            self._host.barrier(team=call.team)
            return DONE
        inp = None if call.inp is None else self._copied(call.inp, call.stream)
        out = None if call.out is None else _room_for(call.out)
        options = {"op": call.reduce, "root": call.root}
        given = {name: value for name, value in options.items() if value is not None}
        work = getattr(self._host, call.op)(out, inp, team=call.team, **given)
        return self._finishing(work, [(call.out, out)], call.stream)

    def _broadcast(self, call: CollectiveCall) -> Work:
        assert call.out is not None and call.root is not None, "checked"
        buffer = self._copied(call.out, call.stream) if call.is_root else _room_for(call.out)
        work = self._host.broadcast(buffer, root=call.root, team=call.team)
        received = [] if call.is_root else [(call.out, buffer)]
        return self._finishing(work, received, call.stream)

    def start_batch(self, batch: Exchange) -> Work:
        """Starts transfers; what is received is on the device when `wait` has returned."""
        self._settle(batch)
        staged = [
            replace(
                t,
                tensor=self._copied(t.tensor, batch.stream)
                if t.kind == "send"
                else _room_for(t.tensor),
            )
            for t in batch.transfers
        ]
        pairs = zip(batch.transfers, staged, strict=True)
        received = [(t.tensor, copy.tensor) for t, copy in pairs if t.kind == "recv"]
        work = self._host.batch(staged, team=batch.team)
        return self._finishing(work, received, batch.stream)

    def _copied(self, tensor: torch.Tensor, stream: object) -> torch.Tensor:
        """Returns the elements of a tensor in new memory of the host."""
        with self._on(stream):
            return _room_for(tensor).copy_(tensor.detach())

    def _finishing(
        self,
        work: Work,
        received: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]],
        stream: object,
    ) -> Work:
        stream = self._pinned(stream)

        def write() -> None:
            # The copies return when they are made: who waits may go on on another stream.
            with self._on(stream):
                for out, copy in received:
                    if out is not None and copy is not None:
                        out.detach().copy_(copy)

        return FinishingWork(work, write)


def _room_for(tensor: torch.Tensor) -> torch.Tensor:
    """Returns new memory of the host for the elements of a tensor."""
    return torch.empty(tensor.shape, dtype=tensor.dtype)
