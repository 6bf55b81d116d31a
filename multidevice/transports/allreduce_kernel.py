"""Small allreduces between the GPUs of one host, each as one kernel over mapped memory.

Each rank of a team has one memory area, which all other ranks of the team have mapped. A backend
first offers each call to `AllreduceKernels`, and executes the calls that `AllreduceKernels` does
not take. This decision depends only on the team, the size, the dtype and the reduction. So it is
the same on all ranks. Either all ranks of a team have mapped the areas of all others, or none has.

The kernels of a team are matched by their order alone, like the collectives of NCCL. Each rank runs
them one after another, in the order in which its host starts them, on any streams and in any CUDA
graphs (`LaunchOrder`). Therefore the kernels may share one area per rank. One rank may replay a
kernel from a graph while another rank launches it directly.

A kernel that waits for a rank longer than `FUSER_TIMEOUT_S` writes a report into host memory and
ends. Later kernels of the team do nothing. An error that names the missing rank is then raised in
one of these places, whichever is first:

- a wait for a result,
- the start of the next allreduce,
- the thread that watches the job.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from fuser.runtime.compile import compile_kernels
from fuser.runtime.compiled_kernel import CompiledKernel
from fuser.support import options
from fuser.support.errors import (
    CommunicationError,
    CommunicationTimeout,
    CompileError,
    KernelError,
    UnsupportedError,
)
from fuser.support.lru import Recent
from multidevice.coordination.bounded_wait import Calls, Team, team_text
from multidevice.coordination.control_channel import Control
from multidevice.coordination.shared_page import host
from multidevice.transports.base.allreduce_model import (
    REPORT_WORDS,
    Layout,
    Shape,
    Way,
    allreduce_source,
    is_known,
    shape_of,
)
from multidevice.transports.base.checked_backend import DONE, CollectiveCall
from multidevice.transports.base.collectives import ALLREDUCE
from multidevice.transports.base.protocol import Post, RedOp, Work

_MAX_LAUNCHES = 256
_MAX_STREAMS = 64
_MAX_TAGS = 1 << 16


class MappedMemory(Protocol):
    """The interface of an allocator of GPU memory that other processes of the host can map."""

    def empty(self, nbytes: int) -> torch.Tensor:
        """Allocates memory that other ranks can map, as a uint8 tensor."""
        ...

    def name_of(self, tensor: torch.Tensor) -> tuple[tuple[int, ...], int] | None:
        """Returns the name by which other ranks map a tensor's memory, and the offset of the tensor
        in this memory.

        The offset is in bytes. Returns None if other ranks cannot map the memory.
        """
        ...

    def mapped(self, name: tuple[int, ...], peer: int) -> int:
        """Returns the address at which this process sees the memory `name` of the rank `peer`.

        The first call maps the memory. Raises `UnsupportedError` if the memory cannot be mapped.
        """
        ...

    def close(self) -> None:
        """Unmaps all memory of other ranks."""
        ...


class OrdersLaunches(Protocol):
    """The interface of `LaunchOrder`, which makes kernels run one after another on this rank's GPU.

    The kernels of several ranks are matched by their order alone. A caller of `AllreduceKernels`
    may pass another implementation.
    """

    def before(self, stream: int) -> bool:
        """Makes the next kernel launch on `stream` wait for the latest kernel launch, even if the
        latest launch was on another stream.

        Returns whether the next launch is being captured into a CUDA graph.
        """
        ...

    def after(self, stream: int, is_captured: bool) -> None:
        """Records that a kernel was just launched on `stream`, so that the next launch waits for
        this kernel.

        `is_captured` is the result of `before`.
        """
        ...

    def is_capturing(self, stream: int) -> bool:
        """Returns whether work on the stream is being captured into a CUDA graph."""
        ...

    def is_done(self, stream: int) -> bool:
        """Returns whether a CUDA stream has completed all its work."""
        ...


Key = tuple[torch.dtype, RedOp, Way]


@dataclass(eq=False)
class _Area:
    """The memory area that this rank shares with a team for allreduce kernels, and these kernels.

    - `me`: the position of this rank in the team.
    - `addresses`: the addresses of all ranks' areas in this process, in team order.
    - `report`: host memory to which a kernel writes when it gives up waiting for a rank.
    - `order`: makes the kernels run one after another.
    - `kernels`, `launches`: the compiled kernels, and their prepared launches.
    - `tags`: for each call, as text, the number by which a report identifies the call.
    """

    team: Team
    me: int
    memory: torch.Tensor
    addresses: list[int]
    report: torch.Tensor
    order: OrdersLaunches
    kernels: dict[Key, CompiledKernel] = field(default_factory=dict[Key, CompiledKernel])
    launches: Recent[object, _Launches] = field(default_factory=lambda: Recent(_MAX_LAUNCHES))
    # The call that a launch belongs to -> the launch's tag.
    tags: dict[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        self.words = (ctypes.c_uint64 * REPORT_WORDS).from_address(self.report.data_ptr())

    def tag(self, what: str) -> int:
        if len(self.tags) >= _MAX_TAGS:
            what = ""
        return self.tags.setdefault(what, len(self.tags))

    def failure(self) -> str:
        """Returns the error message about a kernel that gave up waiting for another rank; "" if
        none has.
        """
        if not self.words[0]:
            return ""
        _, missing, tag, number, _ = self.words
        what = next((text for text, k in self.tags.items() if k == tag), "")
        return (
            f"rank {self.team[self.me]}: {what or 'an allreduce'} did not complete within "
            f"{options.timeout_s():g} s (FUSER_TIMEOUT_S): rank {self.team[missing]} has not "
            f"started the kernel of this allreduce, number {number} of team {team_text(self.team)}"
        )

    def check(self) -> None:
        """Raises `CommunicationTimeout` if an allreduce kernel gave up waiting for a rank."""
        if self.words[0]:
            self.mark_read()
            raise CommunicationTimeout(self.failure())

    def mark_read(self) -> None:
        """Tells the kernel that gave up waiting for a rank that the host has read its report.

        The kernel then ends normally. Without this mark, it fails after some seconds, so that the
        error is noticed in any case.
        """
        self.words[REPORT_WORDS - 1] = 1


class _Launches:
    """The prepared launches of one allreduce kernel on messages of one size, one for each CUDA
    stream.
    """

    def __init__(
        self, area: _Area, kernel: CompiledKernel, shape: Shape, count: int, tag: int
    ) -> None:
        self._area, self._kernel = area, kernel
        self._grid, self._block = (shape.blocks, 1, 1), (shape.threads, 1, 1)
        limit_ns = int(options.timeout_s() * 1e9)
        addresses = (*area.addresses, area.addresses[area.me], area.report.data_ptr())
        self._arguments = (0, 0, *addresses, area.me, count, limit_ns, tag)
        self._found: dict[int, tuple[Any, ...]] = {}

    def run(self, out: int, inp: int, stream: int) -> None:
        """Launches the allreduce kernel on the output and the input at the addresses `out` and
        `inp`.

        Raises `CommunicationTimeout` if an earlier kernel of the team gave up waiting for a rank.
        """
        area = self._area
        if area.words[0]:
            area.check()
        found = self._found.get(stream)
        if found is None:
            found = self._prepare(stream)
        words, function, arguments, fail, _ = found
        words[0], words[1] = out, inp
        order = area.order
        is_captured = order.before(stream)
        status = function(*arguments)
        if status:
            fail(status)
        order.after(stream, is_captured)

    def _prepare(self, stream: int) -> tuple[Any, ...]:
        if len(self._found) >= _MAX_STREAMS:
            self._found.clear()
        prepared = self._kernel.prepare(self._arguments, grid=self._grid, block=self._block)
        call = prepared.bind(stream)
        found = call.words, call.function, call.arguments, call.fail, prepared
        self._found[stream] = found
        return found


class _KernelWork:
    """The handle of an allreduce kernel that was enqueued on a CUDA stream."""

    def __init__(self, control: Control, area: _Area, call: CollectiveCall, stream: int) -> None:
        self._control, self._area, self._call, self._stream = control, area, call, stream

    def wait(self) -> None:
        """Does nothing, because the CUDA stream itself runs later work after the kernel.

        The method exists because every handle of a communication has `wait`.
        """

    def synchronize(self) -> None:
        """Blocks the host until the CUDA stream has completed the kernel, or until the deadline.

        Raises `CommunicationTimeout` if the kernel gave up waiting for a rank.
        """
        area = self._area

        def is_done() -> bool:
            area.check()
            return area.order.is_done(self._stream)

        try:
            self._control.poll_until(is_done, what=self._call.describe, needs=self._call.needs)
        except CommunicationTimeout:
            area.mark_read()
            raise


class AllreduceKernels:
    """Executes small allreduces as one kernel each, over memory that the ranks have mapped.

    - `largest_nbytes`: the size of the largest message for which a kernel is used.
    - `make_memory`, `make_order`: create the allocator of mapped memory, and the object that orders
      the launches. They are called when a team first needs these objects.
    """

    def __init__(
        self,
        control: Control,
        device: torch.device,
        largest_nbytes: int,
        make_memory: Callable[[], MappedMemory],
        make_order: Callable[[], OrdersLaunches],
    ) -> None:
        self._control, self._device, self._largest = control, device, largest_nbytes
        self._make_memory, self._make_order = make_memory, make_order
        self._memory: MappedMemory | None = None
        # None: its members cannot map each other's memory; the reason is in `why_not`.
        self._areas: dict[Team, _Area | None] = {}
        self.why_not: dict[Team, str] = {}
        # The areas of teams that were dropped after an error: graphs may still launch kernels
        # there.
        self._kept: list[_Area] = []
        self._told: set[_Area] = set()
        control.on_lost.append(self._forget)

    @property
    def is_used(self) -> bool:
        """Whether any team uses allreduce kernels, so that such kernels may be running."""
        return any(self._areas.values())

    def takes(self, call: CollectiveCall) -> bool:
        """Returns whether one kernel executes the collective `call`, so that the backend need not.
        The result is the same on all ranks of the team.
        """
        if call.row is not ALLREDUCE or call.inp is None or call.reduce is None:
            return False
        count, dtype = call.inp.numel(), call.inp.dtype
        nbytes = count * dtype.itemsize
        if nbytes > self._largest or shape_of(nbytes, len(call.team), dtype) is None:
            return False
        return is_known(dtype, call.reduce) and self._areas.get(call.team, self) is not None

    def start(self, call: CollectiveCall, stream: int) -> Work | None:
        """Starts an allreduce as a kernel on a stream; returns None if the backend must execute the
        call.

        The first call of a kind may allocate memory and load a kernel, which a CUDA graph cannot
        capture. If it does so during a capture, raises `CommunicationError`.
        """
        if not self.takes(call):
            return None
        found = self._launches(call)
        if found is None:
            return None
        area, launches = found
        assert call.out is not None and call.inp is not None, "every member has both"
        launches.run(call.out.data_ptr(), call.inp.data_ptr(), stream)
        return _KernelWork(self._control, area, call, stream)

    def bind(self, call: CollectiveCall) -> Post | None:
        """Returns a function that starts allreduces with the team, size and dtype of `call`.

        The caller ensures that `takes(call)` is True. Returns None if this rank has not started an
        allreduce of this team before, or if the ranks cannot map each other's memory.
        """
        if self._areas.get(call.team) is None:
            return None
        found = self._launches(call)
        assert found is not None, "the team has an area"
        area, launches = found
        areas, team, key, enter = self._areas, call.team, call.key, self._control.ledger.enter
        # A launch depends on the size alone, so the contents of the tensors need not be kept.
        call = replace(call, out=_without_contents(call.out), inp=_without_contents(call.inp))

        def start(out: int, inp: int, stream: int) -> Work:
            nonlocal area, launches
            if areas.get(team) is not area:  # given up after an error
                again = self._launches(call)
                if again is None:  # where it could before
                    raise UnsupportedError(
                        f"{call.describe()}: rank {self._control.rank} has dropped the memory that "
                        "it shared with other ranks after an error, and cannot share memory again: "
                        "restart the job"
                    )
                area, launches = again
            enter(key)
            launches.run(out, inp, stream)
            return DONE

        return start

    def failure(self) -> str:
        """Returns the error message about a kernel that gave up waiting for another rank; else "".

        A message that a wait for the result has already raised is not returned. When a kernel has
        newly reported, the first call returns "", so that such a wait can raise the error first.
        The next call returns the message.
        """
        for area in (*self._areas.values(), *self._kept):
            if area is None or not area.words[0] or area.words[REPORT_WORDS - 1]:
                continue
            if area in self._told:
                return area.failure()
            self._told.add(area)
        return ""

    def close(self) -> None:
        """Unmaps the memory areas of other ranks."""
        if self._memory is not None:
            self._memory.close()

    # ------------------------------------------------------------ teams
    def _launches(self, call: CollectiveCall) -> tuple[_Area, _Launches] | None:
        """Returns the memory area that this rank shares with the team of `call`, and the prepared
        launches of the allreduce.

        The caller ensures that `takes(call)` is True. Returns None if the ranks cannot map each
        other's memory. The first call for a team exchanges messages, so all ranks of the team must
        make that call.
        """
        assert call.inp is not None and call.reduce is not None, "it fits"
        count, dtype, team = call.inp.numel(), call.inp.dtype, call.team
        shape = shape_of(count * dtype.itemsize, len(team), dtype)
        assert shape is not None, "it fits"
        key: Key = dtype, call.reduce, shape.way
        what = replace(call, seq=-1).describe()
        if team not in self._areas:
            self._check_not_captured(what)
            self._areas[team] = self._connect(team, key)
        area = self._areas[team]
        if area is None:
            return None
        found = area.launches.recall((key, count, what))
        if found is None:
            if key not in area.kernels:
                self._check_not_captured(what)
                area.kernels[key] = self._compile(len(team), key)
            found = _Launches(area, area.kernels[key], shape, count, area.tag(what))
            area.launches[key, count, what] = found
        return area, found

    def _check_not_captured(self, what: str) -> None:
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise CommunicationError(
                f"{what}: the first call allocates memory and loads a kernel, which a CUDA graph "
                "cannot capture: make this call once before the capture"
            )

    def _compile(self, size: int, key: Key) -> CompiledKernel:
        (kernel,) = compile_kernels([allreduce_source(size, *key)], self._device)
        return kernel

    def _connect(self, team: Team, key: Key) -> _Area | None:
        """Allocates this rank's memory area for a team, and maps the areas of the other ranks.

        The kernels of the ranks exchange data through these areas. `key` (dtype, reduction,
        algorithm) says which kernel the team needs first. The method also compiles this kernel.
        Returns None on all ranks of the team if anything fails on one of them; the backend then
        executes the team's allreduces.
        """
        area, hello = None, {"why": "FUSER_DISABLE=allreduce_kernel"}
        if not options.disabled("allreduce_kernel"):
            try:
                area, hello = self._make_area(team, key)
            except (UnsupportedError, CompileError, KernelError, torch.OutOfMemoryError) as error:
                hello = {"why": str(error)}
        others = self._told_by(team, hello)
        why = next((f"rank {r}: {o['why']}" for r, o in others.items() if "why" in o), "")
        if not why and len({o["host"] for o in others.values()}) > 1:
            why = "its ranks do not share a host"
        if area is not None and not why:
            try:
                self._map(area, others)
            except UnsupportedError as error:
                why = f"rank {self._control.rank}: {error}"
        # Wait for all members, so that none writes into an area that is not cleared yet.
        answers = self._told_by(team, {"why": why}).values()
        why = next((one["why"] for one in answers if one["why"]), "")
        if why:
            self.why_not[team] = why
            return None
        return area

    def _told_by(self, team: Team, mine: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Sends `mine` to all ranks of a team; returns the message of each rank, by rank."""
        answers = self._control.exchange(json.dumps(mine).encode(), team=team)
        return dict(zip(team, map(json.loads, answers), strict=True))

    def _map(self, area: _Area, others: dict[int, dict[str, Any]]) -> None:
        assert self._memory is not None, "the area lies there"
        for k, (rank, other) in enumerate(others.items()):
            if rank != self._control.rank:
                begin = self._memory.mapped(tuple(other["name"]), rank)
                area.addresses[k] = begin + other["at"]

    def _make_area(self, team: Team, key: Key) -> tuple[_Area, dict[str, Any]]:
        if self._memory is None:
            self._memory = self._make_memory()
        kernels = {key: self._compile(len(team), key)}
        memory = self._memory.empty(Layout.of(len(team)).nbytes).zero_()
        is_cuda = self._device.type == "cuda"
        report = torch.zeros(REPORT_WORDS, dtype=torch.int64, pin_memory=is_cuda)
        if is_cuda:
            torch.cuda.current_stream(self._device).synchronize()
        place = self._memory.name_of(memory)
        assert place is not None, "memory made for peers has a name"
        me = team.index(self._control.rank)
        addresses = [memory.data_ptr() if k == me else 0 for k in range(len(team))]
        area = _Area(team, me, memory, addresses, report, self._make_order(), kernels)
        name, at = place
        return area, {"host": host(), "name": name, "at": at}

    def _forget(self, key: Calls) -> None:
        """Gives up the memory area that a team shares, after a call of the team has failed.

        The reason is that the ranks may have launched different numbers of kernels, which would not
        match any more. The next allreduce of the team makes a new area. `key` names the sequence of
        calls that failed.
        """
        area = self._areas.pop(key.team, None)
        if area is not None:
            self._kept.append(area)


def _without_contents(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else torch.empty_like(tensor, device="meta")
