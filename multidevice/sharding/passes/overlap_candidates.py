"""Finds pairs of a communication and a matrix product that may run at the same time.

Also divides such pairs into steps, so that they do run at the same time. A loop on the host then
communicates one block while it multiplies another. The search runs when every op is local or a
change of placement, before partial sums are exchanged. In the examples, DIDx(M) is an axis that is
divided over devices, and an axis DIDx has one partial sum per device:

    gather       c [M, K] = set(x [DIDx(M), K]), y = linear(c, w)
                 for weight gradients also z [N, K] = matmul(g [N, M], c), which sums over M
    scatter      t [DIDx, M, N] = linear(x, w), y [DIDx(M), N] = sum(t)
    allreduce    t [DIDx, M, N] = linear(x, w), y [M, N] = sum(t)

An `OverlapForm` adds a stream axis to the tensor between the communication and the product. The
tensor is computed in steps along this axis; in most forms, a step handles the block of one device.
Users may do the same (`docs/explanation/streams-and-overlap.md`). The passes after decomposition do
the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from fuser.ir.axis_graph import tensor_operands
from fuser.ir.domain.tensor_domain import IterDomain, numbers
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.naming import axis_words, in_ir
from fuser.ir.ops.nodes import Contraction, LoadStoreOp, ReductionOp, ReshapeOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.types import ParallelType
from fuser.passes.view_ops import is_copy
from fuser.support.errors import UnsupportedError
from multidevice.sharding.passes.partial_sums import (
    add_row_parallel_bias_last,
    factor_spread_reductions,
    reduces_one_device_axis,
)
from multidevice.sharding.placement import (
    Cut,
    add_cut,
    clone_domain,
    outermost_logical,
    placement,
    stream_axis_of,
)
from multidevice.sharding.propagation import apply_steps, forward_cuts
from multidevice.sharding.queries import is_resharding
from multidevice.transports.base.collectives import ALLGATHER, ALLREDUCE, REDUCE_SCATTER, Collective


@dataclass(frozen=True)
class Pair:
    """A communication and the matrix products that may run at the same time if a loop divides both.

    - `collective`: the type of the communication.
    - `move`: the op that communicates.
    - `ops`: in program order, the communication, the products, and the views of `between` that the
      products read.
    - `between`: the tensor between the communication and the products. Each step of the loop
      handles one block of its axis at position `axis`.
    - `ptype`, `devices`: the mesh dimension of the communication, and the number of devices along
      it. Each device has one block before or after the communication.
    - `is_whole`: whether each device has one index of the axis, so that the axis itself, without a
      split, has the mesh dimension as its type.
    - `contracting`: the products that sum over the axis.
    - `why_not`: why the products need the whole tensor, "" if they do not.
    """

    collective: Collective
    move: TensorOp
    ops: tuple[TensorOp, ...]
    between: TensorView
    axis: int
    ptype: ParallelType
    devices: int
    is_whole: bool
    contracting: tuple[TensorOp, ...] = ()
    why_not: str = ""

    @property
    def products(self) -> tuple[TensorOp, ...]:
        """The matrix products that may run at the same time as the communication.

        They are in program order.
        """
        return tuple(op for op in self.ops if isinstance(op, Contraction))


def find_pairs(fusion: Fusion) -> list[Pair]:
    """Returns the communications with matrix products beside them that may run at the same time.

    The pairs are in program order. If the user has divided any tensor of the fusion into steps of a
    loop (stream axes), returns [], because the user then decides about overlap.
    """
    if any(stream_axis_of(tv) is not None for tv in fusion.tensors()):
        return []
    found = (_gather(fusion, op) or _reduction(fusion, op) for op in fusion.exprs)
    return [pair for pair in found if pair is not None]


def _gather(fusion: Fusion, op: TensorOp) -> Pair | None:
    """Returns the pair of an allgather and the matrix products that read its result.

    The gather `op` is a copy that removes the only division of an axis over devices. Returns None
    for any other op, and if no matrix product reads the result.
    """
    if not is_copy(op) or op.inputs[0].mesh != op.out_tensor.mesh:
        return None
    source, out = op.inputs[0], op.out_tensor
    have, want = placement(source), placement(out)
    changed = [p for p, (a, b) in enumerate(zip(have, want, strict=True)) if a != b]
    if len(changed) != 1 or len(have[changed[0]]) != 1 or want[changed[0]]:
        return None
    (axis,), (cut,) = changed, have[changed[0]]
    if not cut.ptype.is_device or out.domain.no_reductions[axis].is_broadcast:
        return None
    readers = _Readers(fusion, out, axis)
    if not readers.ops:
        return None
    ops, cuts = (op, *readers.ops), (cut.ptype, cut.devices, cut.whole)
    return Pair(ALLGATHER, op, ops, out, axis, *cuts, readers.contracting, readers.why_not)


class _Readers:
    """Finds the matrix products that read an axis of a tensor, and the views between tensor and
    products.

    - `ops`: the products and the views, in program order. Products that need the whole axis at once
      are left out. But if every product needs the whole axis, `ops` has all products, and `why_not`
      the reason.
    - `contracting`: the products that sum over the axis.
    """

    def __init__(self, fusion: Fusion, tv: TensorView, axis: int) -> None:
        # Tensor -> (position of the axis, None if it is not a separate axis; the reason for None;
        # the views that lead there).
        self._seen: dict[TensorView, tuple[int | None, str, tuple[TensorOp, ...]]] = {}
        self._seen[tv] = axis, "", ()
        self._found: dict[TensorOp, tuple[TensorView, IterDomain | None]] = {}
        todo = [tv]
        while todo:
            source = todo.pop()
            for op in fusion.uses(source):
                made = None if is_resharding(op) else self._follow(op, source)
                todo += [] if made is None else [made]
        used = {op: self._why_whole(op) for op in self._found}
        good = [op for op, why in used.items() if not why]
        self.why_not = "" if good else next(iter(used.values()), "")
        needed: set[TensorOp] = set()
        for op in good or used:
            needed |= {op, *self._seen[self._found[op][0]][2]}
        self.ops = tuple(op for op in fusion.exprs if op in needed)
        roots = {op: self._found[op][1] for op in good}
        self.contracting = tuple(
            op for op in self.ops if (root := roots.get(op)) is not None and root.is_reduction()
        )

    def _follow(self, op: TensorOp, source: TensorView) -> TensorView | None:
        """Records a matrix product or a view that reads the tensor `source`.

        Returns the result of a view, whose readers are to be followed, too; None for any other op.
        """
        position, why, way = self._seen[source]
        index = next(k for k, operand in tensor_operands(op) if operand is source)
        mapped = zip(op.out_tensor.domain.maybe_root, op.axis_map(index), strict=True)
        root = next((root for root, p in mapped if p is not None and p == position), None)
        if isinstance(op, Contraction):
            self._found[op] = source, root
        elif isinstance(op, LoadStoreOp | ReshapeOp) and not is_copy(op):
            here = None if root is None else outermost_logical(op.out, root)
            if root is not None and here is None:
                why = f"the axis is an inner one of what {op.name} merges to {op.out.label}"
            axes = numbers(op.out.domain.no_reductions)
            place = axes.index(here.number) if here is not None and here.number in axes else None
            self._seen[op.out] = place, why, (*way, op)
            return op.out
        return None

    def _why_whole(self, op: TensorOp) -> str:
        source, root = self._found[op]
        if sum(operand in self._seen for _, operand in tensor_operands(op)) > 1:
            return f"both operands of {op.name} {op.out_tensor.label} are made of what is gathered"
        if root is not None:
            return ""
        return self._seen[source][1] or f"{op.name} {op.out_tensor.label} needs all of the axis"


def _reduction(fusion: Fusion, op: TensorOp) -> Pair | None:
    """Returns the pair of a sum over devices and the matrix product whose partial results it adds.

    `op` is the sum. Returns None if `op` is any other op, or sums no matrix product.
    """
    if not isinstance(op, ReductionOp) or not reduces_one_device_axis(op) or op.kind != "add":
        return None
    partial, out = op.inp, op.out
    product = fusion.definition(partial)
    is_product = isinstance(product, Contraction) and not is_resharding(product)
    if product is None or not is_product or partial.mesh != out.mesh:
        return None
    if fusion.uses(partial) != [op] or partial in fusion.outputs:
        return None
    kept = dict(zip(numbers(out.domain.no_reductions), placement(out), strict=True))
    (summed,) = (a for a in out.domain.logical if a.is_reduction())
    have = list(zip(out.domain.logical, placement(partial), strict=True))
    mesh, ptype = out.mesh, summed.ptype
    assert mesh is not None, f"{out} is summed over devices, and has no mesh"
    count = mesh.size_of(ptype)
    rows = [p for p, (a, mine) in enumerate(have) if a is not summed and kept[a.number] != mine]
    if not rows:
        whole = (
            p
            for p, (a, mine) in enumerate(have)
            if a is not summed and not (mine or a.is_broadcast)
        )
        axis = next(whole, None)
        if axis is None:
            return None
        return Pair(ALLREDUCE, op, (product, op), partial, axis, ptype, count, False)
    wanted = kept[have[rows[0]][0].number]
    if len(rows) > 1 or have[rows[0]][1] or len(wanted) != 1 or wanted[0].ptype is not ptype:
        return None
    return Pair(REDUCE_SCATTER, op, (product, op), partial, rows[0], ptype, count, wanted[0].whole)


# ------------------------------------------------------------------ steps
@dataclass(frozen=True)
class OverlapForm:
    """A way to divide a communication and the matrix products beside it into steps that overlap.

    A step is an iteration of a loop on the host (a stream loop), which communicates one block while
    it multiplies another.

    - `of`: the collective of the pairs (`Pair`) to which the form applies; `fits` restricts the
      pairs further.
    - `transfers`: True if the steps send blocks from rank to rank; False if each step has a
      collective.
    - `take`: changes the fusion so that a pair is computed in steps, or raises `UnsupportedError`.
    """

    name: str
    of: Collective
    transfers: bool
    take: Callable[[Fusion, Pair], None]
    fits: Callable[[Pair], bool] = lambda _: True


def _in_turn(pair: Pair) -> Cut:
    """Returns the division of the axis of a pair into the steps of a loop, one step per device.

    The pair is a communication and the matrix products beside it; each step handles the block of
    one device. Each device begins with its own block.
    """
    return Cut(ParallelType.stream, pair.devices, pair.is_whole, pair.ptype)


def _cut_between(pair: Pair, cut: Cut) -> None:
    _cut(pair.between, pair.between.domain.no_reductions[pair.axis].number, cut)


def _cut(tv: TensorView, number: int, cut: Cut) -> None:
    if not add_cut(tv, number, cut):
        axis = tv.domain.axes[number]
        raise UnsupportedError(
            f"{axis_words(tv, axis)} cannot be divided into {cut.count} equal parts, one for each "
            f"step of a stream loop{in_ir(axis, tv)}"
        )


def _gather_in_turn(fusion: Fusion, pair: Pair) -> None:
    """Divides an allgather, and the matrix products that read its result, into one step per device.

    Each step receives a block, which the products of this step read. Products that sum over the
    gathered axis read the whole tensor after the loop.
    """
    del fusion
    _cut_between(pair, _in_turn(pair))
    _read_in_turn(pair, pair.contracting)


def _gather_and_sum(fusion: Fusion, pair: Pair) -> None:
    """Divides an allgather, and all matrix products that read its result, into one step per device.

    Each step receives a block, which the products of this step read. A product that sums over the
    gathered axis computes one part of its sum in each step. The parts are added after the last
    step, on each device in the order of the blocks.
    """
    _cut_between(pair, _in_turn(pair))
    _read_in_turn(pair, ())
    add_row_parallel_bias_last(fusion)
    factor_spread_reductions(fusion)


def _read_in_turn(pair: Pair, whole: Collection[TensorOp]) -> None:
    """Lets the ops that read a gathered tensor run in the steps of the loop that gathers it.

    `pair` is the gather with the matrix products that read its result. The products in `whole`, and
    views that only these products read, are left out: they read the whole tensor after the loop.
    """
    _, *readers = pair.ops
    made = {pair.between, *(op.out_tensor for op in readers)}
    wanted: set[TensorView] = set()
    steps: list[tuple[TensorOp, int]] = []
    for op in reversed(readers):
        if op in whole or not (op in pair.products or op.out_tensor in wanted):
            continue
        index = next(k for k, tv in tensor_operands(op) if tv in made)
        wanted.add(op.inputs[index])
        steps.append((op, index))
    for op, index in reversed(steps):
        if not apply_steps(op.out_tensor, op.inputs[index], forward_cuts(op, index, op.out_tensor)):
            raise UnsupportedError(
                f"{op.name} {op.out_tensor.label} cannot be computed in steps along axis "
                f"{pair.axis} of {pair.between.label}, because the extent of this axis may not be "
                "divisible by the number of steps"
            )


def _scatter_in_turn(fusion: Fusion, pair: Pair) -> None:
    del fusion
    _cut_between(pair, _in_turn(pair))


def _scatter_then_gather(fusion: Fusion, pair: Pair) -> None:
    """Replaces an allreduce beside a matrix product by a scatter in steps and an allgather.

    In each step of a loop, one block is summed, and its sum is stored on the device that the block
    belongs to. Meanwhile the next block is multiplied. After the loop, all devices gather the
    blocks.
    """
    op, out = pair.move, pair.move.out_tensor
    assert isinstance(op, ReductionOp)
    domain, made = clone_domain(fusion, out.domain)
    mine = fusion.new_tensor(domain.in_logical_order(), out.dtype(), mesh=out.mesh)
    axis = made[out.domain.logical[pair.axis].number]
    _cut(mine, axis, Cut(pair.ptype, pair.devices))
    out.domain = out.domain.without_root()
    copy = LoadStoreOp(out, mine).replace(where=op.where)
    fusion.replace_expr(op, [op.replace(out=mine), copy])
    _cut_between(pair, _in_turn(pair))


def _reduce_steps(count: int) -> Callable[[Fusion, Pair], None]:
    """Returns a function that divides an allreduce and the matrix product before it into `count`
    steps.

    Each step of the loop multiplies one block and makes an allreduce of it. The function is the
    `take` of an `OverlapForm`.
    """

    def take(fusion: Fusion, pair: Pair) -> None:
        del fusion
        out, cut = pair.move.out_tensor, Cut(ParallelType.stream, count)
        _cut_between(pair, cut)
        _cut(out, out.domain.logical[pair.axis].number, cut)

    return take


_FORMS = (
    OverlapForm(
        "steps", ALLGATHER, True, _gather_in_turn, lambda p: len(p.contracting) < len(p.products)
    ),
    OverlapForm("steps and a sum", ALLGATHER, True, _gather_and_sum, lambda p: bool(p.contracting)),
    OverlapForm("steps", REDUCE_SCATTER, True, _scatter_in_turn),
    OverlapForm("scatter in steps, gather", ALLREDUCE, True, _scatter_then_gather),
    *(OverlapForm(f"{n} steps", ALLREDUCE, False, _reduce_steps(n)) for n in (2, 4, 8)),
)


def forms_of(pair: Pair) -> tuple[OverlapForm, ...]:
    """Returns the ways in which a communication and matrix products can be divided into steps that
    overlap.

    Returns () if the products need the complete communicated tensor at once.
    """
    return tuple(f for f in _FORMS if f.of is pair.collective and f.fits(pair) and not pair.why_not)


def alone(fusion: Fusion, pair: Pair) -> Fusion:
    """Copies the ops of a pair (a communication and matrix products) into a separate fusion.

    The pair can then be measured or predicted alone. The inputs of the new fusion are the tensors
    that the ops read but do not compute, and all symbols in the extents of their axes.
    """
    copy, twins = fusion.copy()
    of_op = dict(zip(map(id, fusion.exprs), copy.exprs, strict=True))
    made = dict.fromkeys(tv for op in pair.ops for tv in op.outputs)
    read = dict.fromkeys(tv for op in pair.ops for _, tv in tensor_operands(op))
    axes = [a for tv in (*made, *read) for a in tv.domain.axes.values()]
    extents = [x for a in axes for x in (a.extent, a.expanded) if x is not None]
    extents += [x for equal in fusion.equal_extents() for x in equal]
    symbols = dict.fromkeys(
        s for x in extents for y in (x, fusion.canonical(x)) for s in sc.symbols(y)
    )
    copy.exprs = tuple(of_op[id(op)] for op in pair.ops)
    copy.inputs = [*(twins[tv] for tv in read if tv not in made), *symbols]
    copy.outputs = [twins[tv] for tv in made if tv not in read]
    copy.aliases = []
    return copy
