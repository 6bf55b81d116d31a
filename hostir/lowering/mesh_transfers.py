"""Lowers the copy of a tensor to another mesh: sends and receives that start together, and local
copies.

Every rank gets the same ops. A condition on `rank` selects the ranks that run a transfer, and its
peer is an expression of `rank`. From ranks 0 and 1 to ranks 1 and 2:

    T1 = ALLOCATE(..)
    IF Manual ( rank == 1 ):                  rank 1 has the tensor already
      T1 = Set( T0 )
    StartCoalescing
    IF Manual ( rank == 0 ):
      P2PCommunication 0 (type=send, buffer=T0, peer=2)
    IF Manual ( rank == 2 ):
      P2PCommunication 1 (type=recv, buffer=T1, peer=0)
    EndCoalescing 2
    Wait(Communication 2)

If a rank sends or receives several pieces of its block, the buffers are views of pieces.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod

from fuser.ir.fusion import TensorView
from fuser.ir.op import Op
from fuser.ir.ops import nodes
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from hostir.ir.ops import (
    RANK,
    EndCoalescing,
    HirAliasSelect,
    IfThenElse,
    P2PCommunication,
    StartCoalescing,
    Wait,
)
from hostir.ir.ops.transfers import TransferKind
from hostir.lowering.loop_steps import LoweringState
from hostir.lowering.slices import selected
from multidevice.sharding.mesh_transfer import Delivery, MeshTransfer, Piece, sends_by_rank
from multidevice.sharding.reshard import transfer_of


def lower_mesh_transfer(program: LoweringState, op: nodes.Reshard) -> list[Op]:
    """Returns the ops that copy a tensor to another mesh, without the allocation of the result.

    `op` copies between two meshes, and no stream loop computes its tensors. `op` has the tensors of
    the host program.
    """
    return _TransferLowering(program, op).build()


class _TransferLowering:
    """Lowers one copy between two meshes. See the module."""

    def __init__(self, program: LoweringState, op: nodes.Reshard) -> None:
        self._program, self._op = program, op
        self._transfer: MeshTransfer = transfer_of(op)
        self._views: dict[tuple[TensorView, int, Scalar], HirAliasSelect] = {}
        self._ranks = {rank for tv in (op.inp, op.out) for rank in _ranks(tv)}

    def build(self) -> list[Op]:
        copies = self._local_copies()
        transfers = [*self._sends(), *self._receives()]
        ops: list[Op] = [*self._views.values(), *copies]
        if transfers:
            number = self._program.next_communication()
            ops += [StartCoalescing(), *transfers, EndCoalescing(number), Wait(number=number)]
        return [op.replace(where=self._op.where) for op in ops]

    def _local_copies(self) -> list[Op]:
        """Returns the copies of pieces that a rank of the new mesh has already."""
        ops: list[Op] = []
        for received, deliveries in _by_piece(self._transfer.deliveries).items():
            local = {d.target: d for d in deliveries if d.is_local}
            if local:
                sent = self._piece(self._op.inp, self._index(local))
                stored = self._piece(self._op.out, _constant(received))
                copy = nodes.LoadStoreOp(stored, sent)
                ops.append(self._only_on(local, self._ranks, copy))
        return ops

    def _sends(self) -> list[Op]:
        ops: list[Op] = []
        for sends in sends_by_rank(self._transfer):
            buffer = self._op.inp
            if prod(self._transfer.held) > 1:
                buffer = self._piece(buffer, self._index(sends))
            peer = by_rank({rank: d.target for rank, d in sends.items()})
            ops.append(self._transfer_op(buffer, peer, "send", sends))
        return ops

    def _receives(self) -> list[Op]:
        ops: list[Op] = []
        for received, deliveries in _by_piece(self._transfer.deliveries).items():
            remote = {d.target: d for d in deliveries if not d.is_local}
            if not remote:
                continue
            buffer = self._op.out
            if prod(self._transfer.needed) > 1:
                buffer = self._piece(buffer, _constant(received))
            peer = by_rank({rank: d.source for rank, d in remote.items()})
            ops.append(self._transfer_op(buffer, peer, "recv", remote))
        return ops

    def _transfer_op(
        self, buffer: TensorView, peer: Scalar, kind: TransferKind, ranks: Collection[int]
    ) -> Op:
        number = self._program.next_communication()
        backend = self._program.backend_name
        op = P2PCommunication(buffer, peer, number=number, type=kind, backend=backend)
        # A rank that does not store the tensor skips the op without a condition.
        return self._only_on(ranks, _ranks(buffer), op)

    def _only_on(self, ranks: Collection[int], others: Collection[int], op: Op) -> Op:
        """Returns `op`, under the condition that only the ranks `ranks` of `others` run it."""
        op = op.replace(where=self._op.where)
        if set(ranks) == set(others):
            return op
        return IfThenElse(is_one_of(ranks, others), then=(op,))

    def _index(self, deliveries: Mapping[int, Delivery]) -> tuple[Scalar, ...]:
        """Returns, for each axis, the index of the piece that this rank sends.

        The index exists on other ranks, too, because checks evaluate it on every rank.
        """
        counts = enumerate(self._transfer.held)
        return tuple(
            sc.mod(by_rank({r: d.sent[k] for r, d in deliveries.items()}), count)
            for k, count in counts
        )

    def _piece(self, tv: TensorView, index: Sequence[Scalar]) -> TensorView:
        """Returns a view of one piece of this rank's block of `tv`.

        `index` has the index of the piece along each axis. The view lacks the axes along which
        pieces are counted.
        """
        for position in reversed(self._transfer.cut_axes):
            key = tv, position, index[position]
            if key not in self._views:
                view, axis = selected(tv, position), tv.domain.no_reductions[position]
                view.give_memory()
                self._views[key] = HirAliasSelect(view, tv, index[position], axis=axis)
            tv = self._views[key].out
        return tv


def _ranks(tv: TensorView) -> tuple[int, ...]:
    assert tv.mesh is not None, f"{tv} has no mesh"
    return tv.mesh.devices


def _constant(piece: Piece) -> tuple[Scalar, ...]:
    return tuple(map(sc.as_scalar, piece))


def _by_piece(deliveries: Sequence[Delivery]) -> dict[Piece, list[Delivery]]:
    """Returns the deliveries by the piece that is received, in the order of pieces."""
    found: dict[Piece, list[Delivery]] = {}
    for d in deliveries:
        found.setdefault(d.received, []).append(d)
    return found


# ------------------------------------------------------------------ expressions of rank
def by_rank(values: Mapping[int, int]) -> Scalar:
    """Returns an expression of `rank` that has the value `values[r]` on each rank r in `values`.

    Its value on other ranks is arbitrary. Ranks between which the value grows evenly share one
    term, so the expression is short for regular meshes.
    """
    ranks = sorted(values)
    runs: list[tuple[int, int, int]] = []  # (first rank, slope, value at rank 0)
    for k, rank in enumerate(ranks):
        if runs and runs[-1][1] * rank + runs[-1][2] == values[rank]:
            continue
        slope = 0
        if k + 1 < len(ranks):
            slope, rest = divmod(values[ranks[k + 1]] - values[rank], ranks[k + 1] - rank)
            slope = 0 if rest else slope
        runs.append((rank, slope, values[rank] - slope * rank))
    return _select(runs)


def _select(runs: Sequence[tuple[int, int, int]]) -> Scalar:
    """Returns the expression that has the value of the last run whose first rank is not above
    `rank`. The expression is a balanced tree of conditions.
    """
    if len(runs) == 1:
        _, slope, offset = runs[0]
        return sc.add(sc.mul(RANK, slope), offset)
    half = len(runs) // 2
    return sc.where(sc.lt(RANK, runs[half][0]), _select(runs[:half]), _select(runs[half:]))


def is_one_of(ranks: Collection[int], others: Collection[int]) -> Scalar:
    """Returns the condition, a scalar, that the current rank is one of `ranks`.

    `others` has the ranks of `ranks` and at least one more. On a rank that is not in `others`, the
    value of the condition does not matter. This allows a shorter condition.
    """
    inside, outside = set(ranks), set(others) - set(ranks)
    for group, holds in ((inside, sc.eq), (outside, sc.ne)):
        if len(group) == 1:
            return holds(RANK, group.pop())
    low, high = min(inside), max(inside)
    if not any(low < rank < high for rank in outside):
        above = [sc.lt(low - 1, RANK)] if min(outside) < low else []
        below = [sc.lt(RANK, high + 1)] if max(outside) > high else []
        return sc.all_of([*above, *below])
    ordered = sorted(others)
    before = [None, *(rank in inside for rank in ordered[:-1])]
    starts = [r for r, last in zip(ordered, before, strict=True) if (r in inside) is not last]
    return sc.eq(_select([(rank, 0, int(rank in inside)) for rank in starts]), 1)
