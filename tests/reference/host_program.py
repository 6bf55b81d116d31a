"""Interprets a host program for all ranks at once, from the meaning of its ops.

The meanings are those of `docs/reference/host-operations.md`.

    runs = interpret(program, [shards_of(program, inputs, r) for r in range(ranks)])
    runs[rank].outputs, runs[rank].inputs

There is no recording, no plan and no stream. Each rank runs its ops in the order of the text, and
stops at a `Wait` until its partners have posted their parts. Three kinds of memory hold poison: new
buffers, the destination of a communication before its Wait, and deallocated buffers.

Nothing of `hostir.runtime` or `hostir.analysis` is used.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch

from fuser.ir.binding import Binder
from fuser.ir.dtypes import to_torch
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.op import Op
from fuser.ir.ops.lookup import LookupOp, ScatterOp
from fuser.ir.ops.nodes import (
    CatOp,
    ExpandOp,
    FullOp,
    IotaOp,
    LinearOp,
    PadOp,
    RandomOp,
    ReshapeOp,
    SliceOp,
)
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Number, Scalar, Symbol
from fuser.ops.reference.meaning import evaluate_fusion, evaluate_op
from fuser.passes.view_ops import VIEW_OPS
from hostir.ir import ops
from hostir.ir.effects import ENTRY
from hostir.ir.program import HostIrContainer
from hostir.ir.shard_layout import parts
from multidevice.sharding.passes.localize import localize
from multidevice.sharding.placement import Block, unparallelize
from multidevice.sharding.queries import local_extents
from multidevice.sharding.streams import stream_axes

Tensor = torch.Tensor
Argument = Tensor | Number
Values = dict[Symbol, Number]
Steps = Generator[None, None, None]
_BLOCKS: tuple[Block, ...] = ("first", "last", "empty")
# Ops whose meaning depends on the extents of their results.
_SIZED = (ExpandOp, ReshapeOp, SliceOp, PadOp, CatOp, LookupOp, ScatterOp, FullOp, IotaOp, RandomOp)
_HALF = (torch.float16, torch.bfloat16)
_REDUCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}


class MeaninglessError(AssertionError):
    """The program has no meaning: it uses a deallocated buffer, a rank is missing, ..."""


@dataclass
class Run:
    """A rank's outputs (None for those of other ranks only), and its inputs after the run.

    `order` has the expected calls of its streams: ("enter", stream), ("join", stream), ("wait", n)
    for the n-th communication that moves data, ("join mark", n) for the mark of the n-th of all.
    """

    outputs: list[Tensor | None]
    inputs: list[Argument]
    order: list[tuple[str, object]]


def interpret(
    program: HostIrContainer, by_rank: Sequence[Sequence[Argument]], *, number_of_streams: int = 4
) -> list[Run]:
    """Runs the program on ranks 0, 1, ... with each rank's shards, and does not change these.

    Raises `MeaninglessError` for a program without a meaning.
    """
    sizes = _sizes(program, by_rank)
    sizes[ops.NUMBER_OF_STREAMS] = number_of_streams
    network, kernels = _Network(), _Kernels(program)
    ranks = [_Rank(program, r, given, sizes, network, kernels) for r, given in enumerate(by_rank)]
    running = [rank.run(program.ops) for rank in ranks]
    while running:
        before = network.events
        count = len(running)
        running = [steps for steps in running if next(steps, _DONE) is not _DONE]
        if network.events == before and len(running) == count:
            raise MeaninglessError("every rank waits for another")
    network.check_empty()
    return [rank.result() for rank in ranks]


_DONE = object()


def _sizes(program: HostIrContainer, by_rank: Sequence[Sequence[Argument]]) -> Values:
    """Returns the value of every symbol, each from a rank that has a shard of the input."""
    given: list[Argument] = []
    for i, declared in enumerate(program.inputs):
        mesh = declared.mesh if isinstance(declared, TensorView) else None
        given.append(by_rank[0 if mesh is None else mesh.devices[0]][i])
    return dict(Binder(program.values, blocks=parts).bind(given))


# ------------------------------------------------------------------ memory
def _fill(tensor: Tensor, value: float | None = None) -> None:
    """Fills memory with a value, or with poison: NaN, or a number that no test expects."""
    memory = _stored(tensor, tensor)
    if value is None:
        is_number = memory.dtype.is_floating_point or memory.dtype.is_complex
        value = torch.nan if is_number else 0x5A
    memory.copy_(torch.full(memory.shape, value).to(memory.dtype))


def _stored(tensor: Tensor, like: Tensor) -> Tensor:
    """Returns the tensor with one element along each expanded axis of `like`."""
    for axis, (n, step) in enumerate(zip(like.shape, like.stride(), strict=True)):
        if n > 1 and step == 0:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def _write(out: Tensor, value: Tensor) -> None:
    if _storage(out) == _storage(value):
        value = value.clone()  # read all elements before one is written
    _stored(out, out).copy_(_stored(value.reshape(out.shape), out))


def _in_order(tv: TensorView, tensor: Tensor) -> Tensor:
    """Returns a shard with its axes in memory order, as ranks exchange it."""
    order = ops.AxisOrder.of(tv)
    for axis in order.expanded:
        tensor = tensor.narrow(axis, 0, min(1, tensor.shape[axis]))
    return tensor.permute(order.axes or tuple(range(tensor.ndim)))


def _flat(tv: TensorView, tensor: Tensor) -> Tensor:
    return _in_order(tv, tensor).reshape(-1).clone()


def _write_flat(tv: TensorView, tensor: Tensor, flat: Tensor) -> None:
    memory = _in_order(tv, tensor)
    memory.copy_(flat.view(memory.shape))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


# ------------------------------------------------------------------ between ranks
@dataclass
class _Pending:
    is_ready: Callable[[], bool]
    finish: Callable[[], None]


class _Network:
    """Boxes in which ranks post parts; each reader takes them in order.

    There is a box per pair of sender and receiver, and one per team and member.
    """

    def __init__(self) -> None:
        self._boxes: dict[object, list[tuple[object, Tensor | None]]] = {}
        self._taken: dict[tuple[object, int], int] = {}
        self.events = 0

    def post(self, key: object, kind: object, part: Tensor | None) -> None:
        self._boxes.setdefault(key, []).append((kind, part))
        self.events += 1

    def take(
        self, keys: Sequence[object], reader: int, then: Callable[[list[Tensor | None]], None]
    ) -> _Pending:
        """Returns steps that wait for the reader's next part in each box, and then call `then`."""
        places = [self._taken.get((key, reader), 0) for key in keys]
        self._taken.update({(key, reader): n + 1 for key, n in zip(keys, places, strict=True)})

        def finish() -> None:
            found = [self._boxes[key][n] for key, n in zip(keys, places, strict=True)]
            if len({kind for kind, _ in found}) > 1:
                raise MeaninglessError(f"ranks meet in different ops: {[k for k, _ in found]}")
            self.events += 1
            then([part for _, part in found])

        pairs = list(zip(keys, places, strict=True))
        return _Pending(lambda: all(len(self._boxes.get(k, ())) > n for k, n in pairs), finish)

    def check_empty(self) -> None:
        for key, box in self._boxes.items():
            taken = [n for (read, _), n in self._taken.items() if read == key]
            if not taken or {*taken} != {len(box)}:
                raise MeaninglessError(f"{key}: {len(box)} parts were posted, {taken} taken")


# ------------------------------------------------------------------ computations
class _Kernels:
    """The local fusions of kernels, and of tensor ops whose meaning depends on sizes."""

    def __init__(self, program: HostIrContainer) -> None:
        self._program = program
        self._local: dict[tuple[object, Block | None], Fusion] = {}

    def _fusion(self, op: Op, block: Block | None) -> Fusion:
        """Returns the fusion that computes a step's block; with None, that of whole shards."""
        key = op.group if isinstance(op, ops.LaunchKernel) else op, block
        if key in self._local:
            return self._local[key]
        if isinstance(op, ops.LaunchKernel):
            fusion = self._program.groups[op.group].fusion
        else:
            assert isinstance(op, TensorOp)
            fusion, twins = self._program.values.copy((op,))
            tensors = (v for v in dict.fromkeys(op.inputs) if isinstance(v, TensorView))
            fusion.inputs = [twins[v] for v in tensors]
            fusion.outputs = [twins[v] for v in op.outputs]
            for tv in twins.values() if block is None else ():
                tv.domain = tv.domain.in_logical_order()
                unparallelize(tv, lambda axis: axis.is_stream)
        self._local[key] = localize(fusion, block or "first")[0]
        return self._local[key]

    def compute(
        self, op: Op, given: Sequence[Tensor], outs: Sequence[Tensor | None], values: Values
    ) -> list[Tensor]:
        """Returns the results of an op for its operands and the memory of its results."""
        if not isinstance(op, VIEW_OPS):
            given = [_wide(t) for t in given]
        if isinstance(op, TensorOp) and not isinstance(op, _SIZED):
            tensors = (v for v in dict.fromkeys(op.inputs) if isinstance(v, TensorView))
            return _evaluated(op, dict(zip(tensors, given, strict=True)), values)
        for block in _BLOCKS if isinstance(op, ops.LaunchKernel) else (None, *_BLOCKS):
            fusion = self._fusion(op, block)
            declared = [v for v in fusion.inputs if isinstance(v, TensorView)]
            fitting = [_fitted(tv, t, values) for tv, t in zip(declared, given, strict=True)]
            placed = [(tv, t) for tv, t in zip(fusion.outputs, outs, strict=True) if t is not None]
            if any(_fitted(tv, t, values) is None for tv, t in placed):
                continue
            known = {v: t for v, t in zip(declared, fitting, strict=True) if t is not None}
            if len(known) == len(declared):
                for inner in fusion.exprs:
                    known.update(zip(inner.outputs, _evaluated(inner, known, values), strict=True))
                return [known[v] for v in fusion.outputs]
        shapes = [tuple(x.shape) for x in (*given, *outs) if isinstance(x, Tensor)]
        raise MeaninglessError(f"no block of {op} has shapes {shapes}")


def _evaluated(op: TensorOp, known: dict[TensorView, Tensor], values: Values) -> list[Tensor]:
    operands = [known[v] if isinstance(v, TensorView) else None for v in op.inputs]
    if isinstance(op, LinearOp) and operands[1] is not None and operands[1].ndim == 1:
        # The weight's row of a step computes one column of the result.
        operands = [operands[0], *(t if t is None else t.unsqueeze(0) for t in operands[1:])]
    results = evaluate_op(op, operands, values, dtype=torch.float64)
    return [_rounded(t, to_torch(out.dtype())) for t, out in zip(results, op.outputs, strict=True)]


def _rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a result rounded to its dtype; dtypes of one or two bytes round immediately."""
    is_narrow = dtype.is_floating_point and dtype.itemsize < 4
    return value.to(dtype).to(value.dtype) if is_narrow else value


def _wide(tensor: Tensor) -> Tensor:
    """Returns an operand in the dtype of computation: floats have 64 bits until they are stored."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _fitted(tv: TensorView, tensor: Tensor, values: Values) -> Tensor | None:
    """Returns a tensor with the axes of `tv`; axes of one element may be missing in a step.

    Returns None if the shapes differ otherwise.
    """
    shape = [_int(tv.fusion, a.size, values) for a in tv.domain.no_reductions]
    if [n for n in shape if n != 1] != [n for n in tensor.shape if n != 1]:
        return None
    return tensor if tuple(shape) == tuple(tensor.shape) else tensor.reshape(shape)


def _int(fusion: Fusion, x: Scalar, values: Values) -> int:
    return int(sc.evaluate(fusion.canonical(x), values))


# ------------------------------------------------------------------ one rank
class _Rank:
    """One rank: the memory of its names, the values of scalars, and communications in flight."""

    def __init__(
        self,
        program: HostIrContainer,
        rank: int,
        given: Sequence[Argument],
        sizes: Values,
        network: _Network,
        kernels: _Kernels,
    ) -> None:
        self.program, self.rank, self.network, self.kernels = program, rank, network, kernels
        self.values = {**sizes, ops.RANK: rank}
        self.inputs = [x.clone() if isinstance(x, Tensor) else x for x in given]
        self.names: dict[TensorView, Tensor] = {}
        for declared, value in zip(program.inputs, self.inputs, strict=True):
            if isinstance(declared, TensorView) and isinstance(value, Tensor):
                self.names[declared] = value
        # A result that updates an input and has no Allocate is written directly into the input.
        for alias in program.aliases:
            if alias.out is not alias.into and self.has(alias.into):
                self.names[alias.out] = self.names[alias.into]
        # Names with memory of their own, into which ops write; other results get new memory.
        self.placed = set(self.names)
        self.owners: set[TensorView] = set()
        self.dead: dict[int, Tensor] = {}
        self.flight: dict[int, list[_Pending]] = {}
        self.group: list[_Pending] | None = None
        self.group_moves = False
        self.views: dict[TensorView, tuple[int, ...]] = {}
        self.order: list[tuple[str, object]] = []
        self.stream: object = ENTRY
        self.captured: dict[str, object] = {"Default": ENTRY}
        # By number of a communication: its index among all starts, and its index among those that
        # move data between ranks (None for a local copy).
        self.starts: dict[int, tuple[int, int | None]] = {}
        self.started, self.moved = 0, 0

    def result(self) -> Run:
        if self.flight:
            raise MeaninglessError(f"rank {self.rank} never waits for {sorted(self.flight)}")
        visible = [tv for tv in self.program.outputs if not self.program.values.is_hidden(tv)]
        return Run(
            [self.read(tv) if self.has(tv) else None for tv in visible], self.inputs, self.order
        )

    # -------------------------------------------------------------- names
    def has(self, tv: TensorView) -> bool:
        return tv.mesh is None or tv.mesh.has(self.rank)

    def read(self, tv: TensorView) -> Tensor:
        """Returns the memory of a name."""
        if tv not in self.names:
            raise MeaninglessError(f"rank {self.rank}: {tv} has no buffer")
        if _storage(self.names[tv]) in self.dead:
            raise MeaninglessError(f"rank {self.rank}: {tv} was given back")
        return self.names[tv]

    def number(self, x: Scalar) -> int:
        return _int(self.program.values, x, self.values)

    def fresh(self, tv: TensorView, step: Scalar | None = None) -> Tensor:
        """Returns new memory, full of poison, for the local shard or for a step's block of it."""
        shape = [self.number(n) for n in local_extents(tv)]
        for axis in stream_axes(tv) if step is not None else ():
            n = shape[axis.position]
            count = n if axis.is_logical else self.number(axis.count)
            shape[axis.position] = _chunk(n, self.number(step), count)[1] if n else 0  # pyright: ignore[reportArgumentType]
        axes = tv.domain.no_reductions
        held = [min(n, 1) if a.is_broadcast else n for n, a in zip(shape, axes, strict=True)]
        made = torch.empty(held, dtype=to_torch(tv.dtype()))
        _fill(made)
        return made.expand(shape)

    def put(self, tv: TensorView, value: Tensor, *, is_view: bool = False) -> None:
        """Stores the value of a result in its memory, or binds it to a new name."""
        if tv in self.placed:
            _write(self.read(tv), value)
            return
        if value.ndim != tv.ndim:
            value = value.reshape([self.number(n) for n in local_extents(tv)])
        self.names[tv] = value if is_view else value.clone().to(to_torch(tv.dtype()))
        if not is_view:
            self.owners.add(tv)

    # -------------------------------------------------------------- ops in order
    def run(self, region: Iterable[Op]) -> Steps:
        for op in region:
            yield from self.step(op)

    def step(self, op: Op) -> Steps:
        match op:
            case ops.ForLoop():
                start, stop, by = map(self.number, (op.start, op.stop, op.step))
                for i in range(start, stop, by):
                    self.values[op.index] = i
                    yield from self.run(op.body)
            case ops.IfThenElse():
                holds = sc.evaluate(self.program.values.canonical(op.predicate), self.values)
                yield from self.run(op.then if holds else op.orelse)
            case ops.Wait():
                yield from self.wait(op.number)
            case ops.SymmetricContiguousView():
                yield from self.view_of_shards(op)
            case ops.Deallocate():
                yield from self.give_back(op.buffer)
            case ops.StartCoalescing():
                self.group, self.group_moves = [], False
            case ops.EndCoalescing():
                assert self.group is not None
                pending, self.group = self.group, None
                self.start(op.number, pending, moves=self.group_moves)
            case ops.Communication() | ops.P2PCommunication() | ops.CollectivePermute():
                if not isinstance(op, ops.P2PCommunication) and not op.team.ranks(self.rank):
                    self.flight[op.number] = []  # only other ranks take part
                    return
                pending, moves = self.posted(op), self.moves(op)
                if self.group is None:
                    self.start(op.number, pending, moves=moves)
                else:
                    self.group += pending
                    self.group_moves |= moves
            case ops.StreamOp():
                self.tell_streams(op)
            case ops.ShareMemHandles():
                pass
            case _:
                if all(self.has(v) for v in (*op.inputs, *op.outputs) if isinstance(v, TensorView)):
                    self.local(op)

    def local(self, op: Op) -> None:
        """Runs an op that concerns this rank alone."""
        match op:
            case ops.Allocate():
                self.names[op.buffer] = self.fresh(op.buffer, op.stream_index)
                if op.zero_init:
                    _fill(self.names[op.buffer], 0)
                self.placed.add(op.buffer)
                self.owners.add(op.buffer)
            case ops.HirAliasSelect():
                whole, at = self.read(op.inp), op.position
                if at is not None:
                    index = 0 if whole.shape[at] == 1 else self.number(op.index)
                    whole = whole.select(at, index)
                self.name(op.out, whole)
            case ops.ShardByStream():
                whole, part = self.read(op.inp), op.part
                assert part.chunks is not None
                chunk = _chunk(
                    whole.shape[part.axis], self.number(part.index), self.number(part.chunks)
                )
                self.name(op.out, whole.narrow(part.axis, *chunk))
            case ops.LocalSlice():
                whole, mesh = self.read(op.inp), op.out.mesh
                assert mesh is not None
                if op.inp.domain.no_reductions[op.axis].is_broadcast:
                    # Each part of an expanded axis is the same element, repeated.
                    # In a stream loop, its other axes are those of one block.
                    sizes = list(whole.shape)
                    sizes[op.axis] = self.number(local_extents(op.out)[op.axis])
                    one = whole.narrow(op.axis, 0, min(1, whole.shape[op.axis]))
                    self.put(op.out, one.expand(sizes))
                else:
                    length = whole.shape[op.axis] // mesh.size_of(op.ptype)
                    place = mesh.coordinate(self.rank, op.ptype)
                    self.put(op.out, whole.narrow(op.axis, place * length, length))
            case ops.LaunchKernel():
                values = dict(self.values)
                fusion = self.program.groups[op.group].fusion
                for declared, x in zip(fusion.inputs, op.ins, strict=True):
                    if isinstance(declared, Symbol) and isinstance(x, Scalar):
                        values[declared] = sc.evaluate(x, self.values)
                self.compute(op, op.ins, op.outs, values)
            case ops.PostOnStream():
                given = [
                    self.read(v) if isinstance(v, TensorView) else sc.evaluate(v, self.values)
                    for v in op.ins
                ]
                results = evaluate_fusion(self.program.units[op.unit], given, dtype=torch.float64)
                for out, value in zip(op.outs, results, strict=True):
                    self.put(out, value)
            case TensorOp():
                self.placed |= {v for v in op.outputs if v in op.inputs}
                self.compute(op, tuple(dict.fromkeys(op.inputs)), op.outputs, self.values)
            case _:
                raise MeaninglessError(f"no meaning of {op}")

    def name(self, tv: TensorView, memory: Tensor) -> None:
        self.names[tv] = memory
        self.placed.add(tv)
        self.owners.discard(tv)

    def compute(
        self,
        op: Op,
        ins: Sequence[object],
        outs: Sequence[TensorView],
        values: Values,
    ) -> None:
        given = [self.read(v) for v in ins if isinstance(v, TensorView)]
        into = [self.read(v) if v in self.placed else None for v in outs]
        results = self.kernels.compute(op, given, into, values)
        for out, value in zip(outs, results, strict=True):
            self.put(out, value, is_view=isinstance(op, VIEW_OPS))

    def give_back(self, tv: TensorView) -> Steps:
        if not self.has(tv):
            return
        memory = self.read(tv)
        if tv in self.views:
            team = self.views.pop(tv)
            yield from self.meeting(team, "end of a view", None)
        del self.names[tv]
        self.placed.discard(tv)
        if tv in self.owners:
            self.owners.discard(tv)
            _fill(memory)
            self.dead[_storage(memory)] = memory

    def view_of_shards(self, op: ops.SymmetricContiguousView) -> Steps:
        """Copies the shards into a view; no rank may write to them while the view exists."""
        if not self.has(op.inp):
            return
        shard = self.read(op.inp)
        if op.team is None:
            self.name(op.out, shard.view([self.number(n) for n in local_extents(op.out)]))
            return
        team = op.team.ranks(self.rank)
        shards = yield from self.meeting(team, "view", _flat(op.inp, shard))
        whole = self.fresh(op.out)
        _write_flat(op.out, whole, torch.cat([s for s in shards if s is not None]))
        self.name(op.out, whole)
        self.views[op.out] = team

    def meeting(
        self, team: tuple[int, ...], kind: str, part: Tensor | None
    ) -> Generator[None, None, list[Tensor | None]]:
        found: list[Tensor | None] = []
        pending = self.meet(team, kind, part, found.extend)
        while not pending.is_ready():
            yield
        pending.finish()
        return found

    def tell_streams(self, op: ops.StreamOp) -> None:
        index, name = op.stream.index, op.stream.name
        stream = self.captured.get(name, name) if index is None else self.number(index)
        match op:
            case ops.GetCurrentStream():
                self.captured[name] = self.stream
            case ops.SetCurrentStream():
                self.stream = stream
                self.order.append(("enter", stream))
            case _:
                self.order.append(("join", stream))

    # -------------------------------------------------------------- communications
    def meet(
        self,
        team: tuple[int, ...],
        kind: object,
        part: Tensor | None,
        then: Callable[[list[Tensor | None]], None],
    ) -> _Pending:
        """Posts a part to all members of a team; `then` is called with the parts of all."""
        self.network.post((team, self.rank), kind, part)
        return self.network.take([(team, member) for member in team], self.rank, then)

    def start(self, number: int, pending: list[_Pending], *, moves: bool) -> None:
        if number in self.flight:
            raise MeaninglessError(f"rank {self.rank}: {number} starts again before its Wait")
        self.flight[number] = pending
        self.starts[number] = self.started, self.moved if moves else None
        self.started, self.moved = self.started + 1, self.moved + moves

    def moves(self, op: ops.P2PCommunication | ops.CollectivePermute | ops.Communication) -> bool:
        """Whether a communication does more than a copy on this rank."""
        if not isinstance(op, ops.CollectivePermute):
            return True
        place = op.team.ranks(self.rank).index(self.rank)
        return {self.number(op.send_peer), self.number(op.recv_peer)} != {place}

    def wait(self, number: int) -> Steps:
        if number not in self.flight:
            raise MeaninglessError(f"rank {self.rank}: Wait for {number}, which has not started")
        place, moved = self.starts.pop(number, (None, None))
        if place is not None:
            self.order.append(("join mark", place))
        if moved is not None:
            self.order.append(("wait", moved))
        for pending in self.flight[number]:
            while not pending.is_ready():
                yield
            pending.finish()
        del self.flight[number]

    def posted(self, op: Op) -> list[_Pending]:
        """Posts this rank's part with its current values, and poisons the destination."""
        match op:
            case ops.P2PCommunication():
                peer = self.number(op.peer)
                sends, key = op.type == "send", "from, to"
                source, to = (self.rank, peer) if sends else (peer, self.rank)
                part = op.buffer if self.has(op.buffer) else None
                return self.sent(
                    (key, source, to), part if sends else None, None if sends else part
                )
            case ops.CollectivePermute():
                team = op.team.ranks(self.rank)
                to, source = team[self.number(op.send_peer)], team[self.number(op.recv_peer)]
                return [
                    *self.sent((team, self.rank, to), op.inp, None),
                    *self.sent((team, source, self.rank), None, op.out),
                ]
            case ops.Communication():
                return self.collective(op)
            case _:
                raise MeaninglessError(f"no meaning of {op}")

    def sent(self, key: object, inp: TensorView | None, out: TensorView | None) -> list[_Pending]:
        if inp is not None:
            self.network.post(key, inp.dtype(), _flat(inp, self.read(inp)))
        if out is None:
            return []
        memory = self.read(out)
        _fill(memory)

        def finish(parts: list[Tensor | None]) -> None:
            (flat,) = parts
            assert flat is not None
            _write_flat(out, memory, flat)

        return [self.network.take([key], self.rank, finish)]

    def collective(self, op: ops.Communication) -> list[_Pending]:
        team = op.team.ranks(self.rank)
        place = team.index(self.rank)
        root = None if op.root is None else self.number(op.root)
        reads = root in (None, place) or op.type in ("Gather", "Reduce")
        writes = root in (None, place) or op.type in ("Broadcast", "Scatter")
        part = _flat(op.inp, self.read(op.inp)) if reads else None
        # The root of a broadcast to another mesh may have no shard of the result.
        memory = self.read(op.out) if writes and self.has(op.out) else None
        if memory is not None:
            _fill(memory)

        def finish(shards: list[Tensor | None]) -> None:
            if memory is not None:
                posted = [s for s in shards if s is not None]
                _write_flat(op.out, memory, _collected(op, posted, place))

        kind = (op.type, op.red_op, root, op.inp.dtype())
        return [self.meet(team, kind, part, finish)]


def _collected(op: ops.Communication, posted: list[Tensor], place: int) -> Tensor:
    """Returns the data that member `place` of a team receives, from the parts of all members."""
    size = op.team.size
    match op.type:
        case "Allgather" | "Gather":
            return torch.cat(posted)
        case "Broadcast":
            return posted[0]
        case "Scatter":
            return posted[0].view(size, -1)[place]
        case "AllToAll":
            return torch.cat([part.view(size, -1)[place] for part in posted])
        case _:
            own = posted[0].dtype
            wide = [part.float() if own in _HALF else part for part in posted]
            whole = reduce(_REDUCE[op.red_op], wide)
            whole = (whole / size if op.red_op == "AVG" else whole).to(own)
            return whole.view(size, -1)[place] if op.type == "ReduceScatter" else whole


def _chunk(size: int, index: int, count: int) -> tuple[int, int]:
    """Returns (start, length) of one of `count` chunks of equal, rounded up length.

    The last chunks may be shorter or empty.
    """
    full = -(-size // count)
    start = min(index * full, size)
    return start, min(full, size - start)
