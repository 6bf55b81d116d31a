"""The checks, the staging buffers and the call counts that all communication backends share.

A staging buffer holds a copy of a tensor in another dtype. A backend derives from `CheckedBackend`
and moves data in its method `_start`. The `CollectiveCall` that `_start` receives has passed these
checks:

- this rank is a member of the team;
- the buffers are contiguous, have one dtype and fit in size;
- the output does not overlap the input in a way that would change the result;
- the transport supports the reduction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from fuser.support.errors import (
    CommunicationError,
    DtypeError,
    InputError,
    ShardingError,
    UnsupportedError,
)
from fuser.support.torch_calls import raw_stream_on
from multidevice.coordination.bounded_wait import RECV, SEND, Calls, Ledger, Need, Team, team_text
from multidevice.transports.base.collectives import BARRIER, Collective
from multidevice.transports.base.protocol import (
    RED_OPS,
    Captured,
    NamedCollectives,
    Post,
    PostBatch,
    RedOp,
    Transfer,
    Work,
)

# torch reduces bool logically: a sum is an "or", a product an "and". The same on bytes of 0 and 1:
_BOOL_OPS: dict[str, RedOp] = {"SUM": "MAX", "MAX": "MAX", "PRODUCT": "MIN", "MIN": "MIN"}


@dataclass(frozen=True)
class CollectiveCall:
    """One call of a collective by this rank, with checked arguments.

    - `row`: the description of the collective, an entry of the table of collectives.
    - `index`: the position of this rank in the team.
    - `key`, `seq`: the sequence of calls (kind of call and team) to which this call belongs, and
      the number of this call in the sequence. Ranks match their calls by these numbers.
    - `given`: the caller's input, if `inp` is a staging buffer, a copy in another dtype.
    - `where`: the user's source line, for error messages.
    """

    row: Collective
    team: Team
    index: int
    out: torch.Tensor | None
    inp: torch.Tensor | None
    reduce: RedOp | None
    root: int | None
    stream: object
    key: Calls
    seq: int
    # The caller's input, where `inp` is a staging buffer of another dtype.
    given: torch.Tensor | None = None
    where: str = ""

    @property
    def root_index(self) -> int:
        """The position of the root in the team."""
        assert self.root is not None, "only rooted collectives ask for the root"
        return self.team.index(self.root)

    @property
    def is_root(self) -> bool:
        """Whether this rank is the root of the collective."""
        return self.team[self.index] == self.root

    def describe(self) -> str:
        """Returns the collective, operand, team and sequence number as text, for error messages."""
        tensor = next((t for t in (self.given, self.inp, self.out) if t is not None), None)
        detail = f"({self.reduce})" if self.reduce else ""
        detail += f" from root {self.root}" if self.root is not None else ""
        detail += f" of {tensor_text(tensor)}" if tensor is not None else ""
        line = f", for {self.where}" if self.where else ""
        number = f", sequence number {self.seq}" if self.seq >= 0 else ""
        return f"{self.row.method}{detail} over team {team_text(self.team)}{number}{line}"

    def needs(self) -> list[Need]:
        """Returns the calls that the other ranks must enter before this collective can complete.

        A wait for this collective fails if one of these ranks has left the job before its call.
        """
        me = self.team[self.index]
        return [Need(rank, self.key, self.seq + 1) for rank in self.team if rank != me]


@dataclass(frozen=True)
class Exchange:
    """A batch of point-to-point transfers of this rank, which start together.

    `index` is the position of this rank in the team. `sequence` has one number for each transfer.
    Sender and receiver match a transfer by its number.
    """

    team: Team
    index: int
    transfers: tuple[Transfer, ...]
    sequence: tuple[int, ...]
    stream: object

    def describe(self) -> str:
        """Returns all transfers of this batch as text, for error messages."""
        parts = [
            f"{t.kind} {'to' if t.kind == 'send' else 'from'} rank {t.peer} of "
            f"{tensor_text(t.tensor)}, sequence number {seq}"
            for t, seq in zip(self.transfers, self.sequence, strict=True)
        ]
        return f"{'; '.join(parts)} in team {team_text(self.team)}"

    def needs(self) -> list[Need]:
        """Returns the transfers that the other ranks must enter before this batch can complete.

        A wait for this batch fails if one of these ranks has left the job before its transfer.
        """
        me = self.team[self.index]
        return [
            Need(t.peer, transfer_key(t, me, self.team, mirrored=True), seq + 1)
            for t, seq in zip(self.transfers, self.sequence, strict=True)
        ]


def transfer_key(transfer: Transfer, me: int, team: Team, *, mirrored: bool) -> Calls:
    """Returns the key under which rank `me` counts a send or receive of its own.

    Each rank counts its calls, so that the calls of different ranks can be matched. If `mirrored`
    is True, returns the key under which the other rank counts the matching transfer.
    """
    sends = (transfer.kind == "send") != mirrored
    source, target = (me, transfer.peer) if transfer.kind == "send" else (transfer.peer, me)
    return Calls(SEND if sends else RECV, team, (source, target))


def is_of(key: Calls, library: str, team: Team) -> bool:
    """Returns whether calls under `key` may use the communicator that `library` created for `team`.

    `key` identifies a sequence of calls by kind and team. `library` is the name of a backend, such
    as "nccl". The result is True for this backend's collectives of the team, and for all sends and
    receives in the team.
    """
    return key.team == team and key.kind in (library, SEND, RECV)


def stream_at(handle: int, device: torch.device | None = None) -> torch.cuda.Stream:
    """Returns a torch stream object for the CUDA stream with the raw handle `handle`.

    Handle 0 is the default stream of `device`. If `device` is None, the current device is used.
    """
    # torch takes the handle 0 as missing: ExternalStream(0) would be a new stream of its pool.
    if not handle:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(handle, device=device)


def stream_handle(stream: object, device: torch.device) -> int:
    """Returns the raw handle of a CUDA stream on `device`.

    `stream` is a torch.cuda.Stream, a handle, or None for the current stream. Raises `InputError`
    for any other type.
    """
    if stream is None:
        return raw_stream_on(device)()
    if isinstance(stream, int):
        return stream
    handle: Any = getattr(stream, "cuda_stream", None)
    if handle is None:
        raise InputError(
            f"a stream must be a torch.cuda.Stream, its raw handle, or None; found {stream!r}"
        )
    return int(handle)


class DoneWork:
    """The handle of a communication that is already complete; waiting returns at once."""

    def wait(self) -> None:
        """Does nothing, because the communication is already complete.

        The method exists because every handle of a communication has `wait`.
        """

    def synchronize(self) -> None:
        """Does nothing, because the communication is already complete.

        The method exists because every handle of a communication has `synchronize`.
        """


DONE = DoneWork()


class FinishingWork:
    """The handle of a communication that this rank must finish itself, for example by copying the
    received data.

    The function `finish` does that. The first `wait` calls `finish`, once.
    """

    def __init__(self, work: Work, finish: Callable[[], object]) -> None:
        self._work = work
        self._finish: Callable[[], object] | None = finish

    def wait(self) -> None:
        """Waits for the communication; the first call then calls `finish`, for example to copy the
        result.
        """
        self._work.wait()
        if self._finish is not None:
            self._finish()
            self._finish = None

    def synchronize(self) -> None:
        """Waits for the communication, calls `finish`, and blocks the host until the data has
        arrived.
        """
        self.wait()
        self._work.synchronize()


def _as_pairs(call: CollectiveCall) -> CollectiveCall:
    """Rewrites a sum of complex numbers as a sum of real numbers, in the same memory.

    Each complex number becomes two real ones, because transports have no complex dtypes.
    """
    inp, out = (None if t is None else torch.view_as_real(t) for t in (call.inp, call.out))
    return replace(call, inp=inp, out=out, given=call.inp)


class CheckedBackend(NamedCollectives, Captured, ABC):
    """The base class of backends: checks each call, counts it, and passes it to the subclass.

    A subclass moves the data in its methods `_start` and `_start_batch`; `_check_device` says which
    tensors are allowed.
    """

    name = ""
    # Reductions of 16-bit floats run in float32 and are rounded once (MPI knows no 16-bit floats).
    stages_half = True
    # The user's line of the present communication, for errors.
    where = ""
    has_avg = False
    # Collectives whose input may be this rank's own part of the output.
    in_place_parts: frozenset[Collective] = frozenset()

    def __init__(self, rank: int, size: int, ledger: Ledger) -> None:
        self.rank = rank
        self.size = size
        self._ledger = ledger
        self._closed = False

    @abstractmethod
    def _start(self, call: CollectiveCall) -> Work:
        """Starts a collective whose arguments have been checked; the team has at least two
        ranks.
        """

    @abstractmethod
    def _start_batch(self, batch: Exchange) -> Work:
        """Starts all transfers of a batch; they have been checked and counted before."""

    @abstractmethod
    def _check_device(self, tensor: torch.Tensor) -> None:
        """Raises `InputError` if the backend cannot access the memory of this tensor."""

    def _on(self, stream: object) -> AbstractContextManager[object]:
        """Returns a context in which torch's ops are enqueued on the CUDA stream `stream`.

        This base class returns an empty context, because CPU backends have no streams.
        """
        del stream
        return nullcontext()

    def _pinned(self, stream: object) -> object:
        """Returns the stream that `stream` denotes now, for work that will be enqueued later.

        None denotes the current stream, which may be another one later. A subclass therefore
        replaces None by the current stream. This base class returns `stream`, because CPU backends
        have no streams.
        """
        return stream

    def drain(self) -> None:
        """Waits until the device has completed all communications.

        This base class does nothing, because CPU backends have no work on a device.
        """
        return

    def close(self) -> None:
        """Closes the backend: from now on, every communication raises an error."""
        self._closed = True

    def collective(
        self,
        row: Collective,
        out: torch.Tensor | None,
        inp: torch.Tensor | None,
        *,
        team: Team,
        reduce: RedOp | None = None,
        root: int | None = None,
        stream: object = None,
    ) -> Work:
        """Checks the arguments of a collective and starts it; see `NamedCollectives.collective`.

        In a team of one rank, copies the input to the output.
        """
        if row.has_one_buffer:
            return self._one_buffer(row, out, inp, team, reduce, root, stream)
        index, out, inp = self._checked(row, out, inp, team, reduce, root)
        call = self._call(row, index, out, inp, team, stream, reduce, root)
        if len(team) == 1:
            assert out is not None and inp is not None, "the only member is the root"
            with self._on(stream):
                out.view(-1).copy_(inp.view(-1))
            return DONE
        return self._begun(call, self._start_separate)

    def _one_buffer(
        self,
        row: Collective,
        out: torch.Tensor | None,
        inp: torch.Tensor | None,
        team: Team,
        reduce: RedOp | None,
        root: int | None,
        stream: object,
    ) -> Work:
        """Starts a collective that needs only one buffer on each rank, such as a broadcast. That
        buffer is `out`. The arguments are those of `NamedCollectives.collective`.

        The root first copies its operand `inp` to `out`. If `out` is None on the root, the root
        sends `inp`, which is not changed.
        """
        index = self._index(row.method, team)
        if reduce is not None or root not in team:  # no such broadcast
            self._check_terms(row, team, reduce, root)
        is_root = root == self.rank
        buf = inp if out is None and is_root else out
        if buf is None:
            raise InputError(
                f"{row.method}: the tensor buf is missing on rank {self.rank}, which takes part"
            )
        self._check_tensor(row.method, "buf", buf)
        if is_root and inp is not None and inp is not buf:
            with nullcontext() if stream is None else self._on(stream):
                buf.copy_(inp.view_as(buf))
        call = self._call(row, index, buf, buf, team, stream, reduce, root)
        return DONE if len(team) == 1 else self._begun(call, self._start)

    def barrier(self, *, team: Team, stream: object = None) -> None:
        """Blocks the host until all ranks of the team have entered the barrier."""
        index = self._index(BARRIER.method, team)
        call = self._call(BARRIER, index, None, None, team, stream, None, None)
        if len(team) > 1:
            self._begun(call, self._start).synchronize()

    # Point-to-point

    def send(self, buf: torch.Tensor, *, peer: int, team: Team, stream: object = None) -> Work:
        """Sends `buf` to the rank `peer`, as a batch of one transfer."""
        return self.batch((Transfer("send", buf, peer),), team=team, stream=stream)

    def recv(self, buf: torch.Tensor, *, peer: int, team: Team, stream: object = None) -> Work:
        """Receives data from the rank `peer` into `buf`, as a batch of one transfer."""
        return self.batch((Transfer("recv", buf, peer),), team=team, stream=stream)

    def batch(self, transfers: Sequence[Transfer], *, team: Team, stream: object = None) -> Work:
        """Checks, counts and starts several sends and receives.

        If the start fails, the transfers are no longer counted, because other ranks must not wait
        for transfers that do not happen.
        """
        index = self._checked_batch(transfers, team)
        if not transfers:
            return DONE
        sequence = tuple(
            self._ledger.enter(transfer_key(t, self.rank, team, mirrored=False)) for t in transfers
        )
        batch = Exchange(team, index, tuple(transfers), sequence, stream)
        try:
            return self._start_batch(batch)
        except BaseException:
            for t, number in reversed([*zip(transfers, sequence, strict=True)]):
                self._ledger.leave(transfer_key(t, self.rank, team, mirrored=False), number)
            raise

    def bind_batch(self, transfers: Sequence[Transfer], *, team: Team) -> PostBatch | None:
        """Checks a batch of transfers once; returns a function that starts the same transfers again
        without the checks.

        Returns None for an empty batch, and for a backend that must check each batch.
        """
        index = self._checked_batch(transfers, team)
        batch = Exchange(team, index, tuple(transfers), (-1,) * len(transfers), None)
        return self._bind_batch(batch) if transfers else None

    def _bind_batch(self, batch: Exchange) -> PostBatch | None:
        """Returns a function that starts the transfers of `batch` again, on tensors of the same
        sizes.

        The function makes no checks, so that later runs of a program are faster. This base class
        returns None: each batch is checked.
        """
        del batch

    def _checked_batch(self, transfers: Sequence[Transfer], team: Team) -> int:
        """Checks the tensor and the peer of each transfer; returns this rank's position in the
        team.
        """
        index = self._index("batch", team)
        for transfer in transfers:
            self._check_tensor(transfer.kind, "buf", transfer.tensor)
            if transfer.peer not in team or transfer.peer == self.rank:
                raise ShardingError(
                    f"{transfer.kind}: the peer must be another rank of the team "
                    f"{team_text(team)}, but rank {self.rank} names rank {transfer.peer}"
                )
        return index

    # Checks and staging

    def _begun(self, call: CollectiveCall, start: Callable[[CollectiveCall], Work]) -> Work:
        """Calls `start`, which starts the communication `call`; returns the handle of the
        communication.

        This rank has counted the call before. If `start` fails, the call is no longer counted,
        because other ranks must not wait for a call that did not happen.
        """
        try:
            return start(call)
        except BaseException:
            self._ledger.leave(call.key, call.seq)
            raise

    def _start_separate(self, call: CollectiveCall) -> Work:
        call = self._separate(call)
        return self._start(call) if call.reduce is None else self._start_reduction(call)

    def bind(
        self,
        row: Collective,
        out: torch.Tensor | None,
        inp: torch.Tensor | None,
        *,
        team: Team,
        reduce: RedOp | None = None,
        root: int | None = None,
    ) -> Post | None:
        """Checks the arguments of a collective once; returns a function that starts the same
        collective without the checks.

        The arguments are those of `NamedCollectives.collective`. Returns None if each call needs
        work on this rank: a copy of an operand, or a staging buffer (a copy in another dtype).
        """
        if row.has_one_buffer:
            return None  # the root copies its operand before each call
        index, out, inp = self._checked(row, out, inp, team, reduce, root)
        key = Calls(self.name, team)
        call = CollectiveCall(
            row, team, index, out, inp, reduce, root, None, key, -1, where=self.where
        )
        if len(team) == 1 or self._is_harmful(call):
            return None
        return self._bind(call) if reduce is None else self._bind_reduction(call)

    def _bind(self, call: CollectiveCall) -> Post | None:
        """Returns a function that starts the collective `call` again, on buffers of the same sizes.

        The function makes no checks, so that later runs of a program are faster. The buffers are
        used directly, without copies in another dtype. This base class returns None: each call is
        checked.
        """
        del call

    def _checked(
        self,
        row: Collective,
        out: torch.Tensor | None,
        inp: torch.Tensor | None,
        team: Team,
        reduce: RedOp | None,
        root: int | None,
    ) -> tuple[int, torch.Tensor | None, torch.Tensor | None]:
        """Checks the arguments of a collective; raises an error that names the wrong argument.

        The arguments are those of `NamedCollectives.collective`. Returns this rank's position in
        the team, the output and the input. A buffer that only the root needs becomes None on other
        ranks.
        """
        index = self._index(row.method, team)
        self._check_terms(row, team, reduce, root)
        if root is not None and root != self.rank:
            out, inp = (None if row.out.at_root else out), (None if row.inp.at_root else inp)
        self._check_buffers(row, out, inp, len(team), is_root=root is None or root == self.rank)
        if reduce is not None:
            assert inp is not None, "every member of a reduction has an input"
            check_reduction(row.method, reduce, inp.dtype)
        return index, out, inp

    def _bind_reduction(self, call: CollectiveCall) -> Post | None:
        """Returns a function that starts the reduction `call` again, on buffers of the same sizes.

        The function makes no checks. Returns None if the reduction needs a staging buffer (a copy
        in another dtype), or work of this rank after the collective.
        """
        if call.inp is not None and call.inp.dtype in COMPLEX:
            return self._bind_reduction(_as_pairs(call))
        dtype = None if call.inp is None else call.inp.dtype
        is_staged = (
            dtype == torch.bool
            or (dtype in FLOATING and call.reduce in ("MIN", "MAX"))
            or (call.reduce == "AVG" and not self.has_avg)
            or (dtype in HALF and self.stages_half)
        )
        return None if is_staged else self._bind(call)

    def _call(
        self,
        row: Collective,
        index: int,
        out: torch.Tensor | None,
        inp: torch.Tensor | None,
        team: Team,
        stream: object,
        reduce: RedOp | None,
        root: int | None,
    ) -> CollectiveCall:
        """Counts a collective as entered by this rank; returns the call with its number.

        Ranks match their calls by these numbers. From now on, other ranks may wait for this call.
        The arguments are those of `NamedCollectives.collective`, and have been checked; `index` is
        the position of this rank in the team.
        """
        key = Calls(self.name, team)
        seq = self._ledger.enter(key)
        return CollectiveCall(
            row, team, index, out, inp, reduce, root, stream, key, seq, where=self.where
        )

    def _start_reduction(self, call: CollectiveCall) -> Work:
        inp, out = call.inp, call.out
        assert inp is not None, "every member of a reduction has an input"
        if inp.dtype in COMPLEX:
            return self._start_reduction(_as_pairs(call))
        if inp.dtype == torch.bool:
            assert call.reduce is not None, "a reduction has an op"
            byte_out = None if out is None else out.view(torch.uint8)
            as_bytes = replace(
                call,
                reduce=_BOOL_OPS[call.reduce],
                inp=inp.view(torch.uint8),
                out=byte_out,
                given=inp,
            )
            return self._start(as_bytes)
        if inp.dtype in FLOATING and call.reduce in ("MIN", "MAX"):
            return self._start_ordered(call, inp, is_max=call.reduce == "MAX")
        count = len(call.team)
        average = call.reduce == "AVG" and not self.has_avg
        op: RedOp | None = "SUM" if average else call.reduce
        # The sum of 16-bit floats may overflow where their average does not.
        if inp.dtype in HALF and (self.stages_half or average):
            wide_inp = inp.float()
            wide = wide_inp
            if call.row.growth and out is not None:
                wide = torch.empty_like(out, dtype=torch.float32)
            work = self._start(
                replace(call, reduce=op, inp=wide_inp, out=None if out is None else wide, given=inp)
            )

            def narrow() -> None:
                if out is not None:
                    out.view(-1).copy_((wide.div_(count) if average else wide).view(-1))

            return FinishingWork(work, narrow)
        work = self._start(replace(call, reduce=op))
        if not average or out is None:
            return work
        return FinishingWork(work, lambda: out.div_(count))

    def _start_ordered(self, call: CollectiveCall, inp: torch.Tensor, *, is_max: bool) -> Work:
        """Starts a MIN or MAX of floats as a MIN or MAX of integers in the same order.

        This is needed because transports lose NaN in MIN and MAX, while torch returns NaN.
        `as_ordered` maps floats to integers. `inp` is the operand, which replaces that of `call`.
        """
        out, stream = call.out, self._pinned(call.stream)
        with self._on(stream):
            keys = as_ordered(inp, is_max=is_max)
            found = None if out is None else torch.empty_like(out, dtype=keys.dtype)
        work = self._start(replace(call, inp=keys, out=found, given=inp, stream=stream))

        def finish() -> None:
            if out is not None and found is not None:
                with self._on(stream):
                    out.copy_(from_ordered(found))

        return FinishingWork(work, finish)

    def _separate(self, call: CollectiveCall) -> CollectiveCall:
        """Replaces the input of `call` by a copy if the output overlaps the input in a way that
        would change the result.
        """
        if call.inp is None or not self._is_harmful(call):
            return call
        with self._on(call.stream):
            return replace(call, inp=call.inp.clone())

    def _is_harmful(self, call: CollectiveCall) -> bool:
        """Returns whether the output overlaps the input in a way that would change the result.

        Two overlaps are harmless:

        - Output and input are the same buffer, and the collective allows that, as an allreduce
          does.
        - The smaller buffer is this rank's part of the larger one, and the transport allows that
          for this collective (`in_place_parts`), such as an allgather.
        """
        out, inp = call.out, call.inp
        if out is None or inp is None or not overlap(out, inp):
            return False
        if out.data_ptr() == inp.data_ptr() and call.row.sharing == "same":
            return False
        if call.row not in self.in_place_parts:
            return True
        small, large = (inp, out) if inp.numel() < out.numel() else (out, inp)
        offset = call.index * small.numel() * small.element_size()
        return small.data_ptr() != large.data_ptr() + offset

    def _index(self, op: str, team: Team) -> int:
        if self._closed:
            raise CommunicationError(
                f"{op}: the backend {self.name} is closed and cannot communicate"
            )
        if self.rank not in team:
            raise ShardingError(
                f"{op}: rank {self.rank} made the call, but is not in the team {team_text(team)}"
            )
        if len(set(team)) != len(team) or min(team) < 0 or max(team) >= self.size:
            raise ShardingError(
                f"{op}: a team must have distinct ranks from 0 to {self.size - 1}, found "
                f"{team_text(team)}"
            )
        return team.index(self.rank)

    def _check_terms(
        self, row: Collective, team: Team, reduce: RedOp | None, root: int | None
    ) -> None:
        if (row.reduces is None) != (reduce is None):
            raise InputError(
                f"{row.method}: pass a reduction, one of {', '.join(RED_OPS)}; found None"
                if row.reduces
                else f"{row.method}: this collective reduces nothing, but found reduction {reduce}"
            )
        if row.is_rooted != (root is not None):
            raise InputError(
                f"{row.method}: pass the rank that is the root; found None"
                if row.is_rooted
                else f"{row.method}: this collective has no root, but found root {root}"
            )
        if root is not None and root not in team:
            raise ShardingError(
                f"{row.method}: the root must be a rank of the team {team_text(team)}, found {root}"
            )

    def _check_tensor(self, op: str, name: str, tensor: torch.Tensor) -> None:
        if not tensor.is_contiguous():
            raise InputError(
                f"{op}: the tensor {name} must be contiguous, but {tensor_text(tensor)} has the "
                f"strides {list(tensor.stride())}: pass {name}.contiguous()"
            )
        self._check_device(tensor)

    def _check_buffers(
        self,
        row: Collective,
        out: torch.Tensor | None,
        inp: torch.Tensor | None,
        count: int,
        is_root: bool,
    ) -> None:
        for name, tensor, side in (("out", out, row.out), ("inp", inp, row.inp)):
            if tensor is not None:
                self._check_tensor(row.method, name, tensor)
            elif is_root or not side.at_root:
                raise InputError(
                    f"{row.method}: the tensor {name} is missing on rank {self.rank}, which needs "
                    "it in this collective"
                )
        check_fit(row, out, inp, count)


# ----------------------------------------------------------------------
# Checks of the buffers of a call, the same for all backends.

HALF = frozenset({torch.float16, torch.bfloat16})
FLOATING = HALF | {torch.float32, torch.float64}
COMPLEX = frozenset({torch.complex64, torch.complex128})
REDUCIBLE = FLOATING | COMPLEX | {torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool}


def tensor_text(tensor: torch.Tensor) -> str:
    """Returns the dtype and the shape of a tensor as text: `float32[2, 3]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def check_fit(
    row: Collective, out: torch.Tensor | None, inp: torch.Tensor | None, count: int
) -> None:
    """Raises an error if the sizes or dtypes of a collective's buffers do not fit together.

    `row` describes the collective, `out` and `inp` are its buffers on this rank, and `count` is the
    number of ranks in the team. A buffer with one part per rank must divide into `count` equal
    parts.
    """
    op, out_parts, inp_parts = row.method, row.out.parts(count), row.inp.parts(count)
    for name, tensor, parts in (("out", out, out_parts), ("inp", inp, inp_parts)):
        if tensor is not None and tensor.numel() % parts:
            raise InputError(
                f"{op}: the tensor {name}, {tensor_text(tensor)}, must have one equal part for "
                f"each of the {parts} ranks, but its {tensor.numel()} elements are not divisible "
                f"by {parts}"
            )
    if out is None or inp is None:
        return
    if out.dtype != inp.dtype:
        raise InputError(
            f"{op}: the tensors out and inp must have one dtype, found {out.dtype} and {inp.dtype}"
        )
    if out.numel() * inp_parts != inp.numel() * out_parts:
        raise InputError(
            f"{op}: the sizes of out, {tensor_text(out)}, and inp, {tensor_text(inp)}, do not "
            f"match in a team of {count} ranks: out must consist of {out_parts} and inp of "
            f"{inp_parts} parts, all of the same size"
        )


def check_reduction(op: str, reduce: RedOp, dtype: torch.dtype) -> None:
    """Raises an error if the reduction `reduce` is unknown or does not support `dtype`.

    `op` is the name of the collective, for the message.
    """
    if reduce not in RED_OPS:
        raise UnsupportedError(
            f"{op}: unknown reduction {reduce!r}; use one of {', '.join(RED_OPS)}"
        )
    if dtype not in REDUCIBLE:
        raise UnsupportedError(f"{op}({reduce}): reductions of {dtype} are not supported")
    if dtype in COMPLEX:
        # Real and imaginary parts are reduced separately: transports know no complex numbers.
        if reduce not in ("SUM", "AVG"):
            raise UnsupportedError(
                f"{op}({reduce}): {dtype} can only be reduced by a sum or an average"
            )
        return
    if reduce == "AVG" and dtype not in FLOATING:
        raise DtypeError(
            f"{op}(AVG): the average of {dtype} is not defined; use a floating-point dtype"
        )


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether two contiguous tensors share memory."""
    a_start, b_start = a.data_ptr(), b.data_ptr()
    a_stop = a_start + a.numel() * a.element_size()
    b_stop = b_start + b.numel() * b.element_size()
    return a_start < b_stop and b_start < a_stop


# ----------------------------------------------------------------------
# Floats as integers of the same order: transports lose NaN in MIN and MAX, torch keeps it.

# The integers that hold the bits of a float, and their largest value.
_BITS = {torch.float32: (torch.int32, 2**31 - 1), torch.float64: (torch.int64, 2**63 - 1)}


def as_ordered(x: torch.Tensor, *, is_max: bool) -> torch.Tensor:
    """Maps floats to integers in the same order, so that integers can be reduced instead (MIN or
    MAX).

    NaN becomes the integer that wins the reduction: the largest if `is_max` is True, otherwise the
    smallest.
    """
    wide = x.float() if x.dtype.itemsize == 2 else x
    kind, largest = _BITS[wide.dtype]
    bits = wide.view(kind)
    # For negative floats, a larger bit pattern is a smaller number: flip all bits but the sign.
    keys = torch.where(bits < 0, bits ^ largest, bits)
    return torch.where(wide.isnan(), largest if is_max else -largest - 1, keys)


def from_ordered(keys: torch.Tensor) -> torch.Tensor:
    """Maps integers that `as_ordered` returned back to floats.

    The smallest and the largest integer become NaN.
    """
    wide = {kind: (dtype, largest) for dtype, (kind, largest) in _BITS.items()}
    dtype, largest = wide[keys.dtype]
    return torch.where(keys < 0, keys ^ largest, keys).view(dtype)
