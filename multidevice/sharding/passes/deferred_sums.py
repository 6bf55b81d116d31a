"""Deferred sums: linear ops are computed on partial sums, and their results are added over devices.

A partial sum is a tensor of which each device has only a part; a communication adds the parts. An
op such as an addition has the same result if the devices compute it on their parts first. One
communication then replaces one for each operand:

    s = sum(p), t = sum(q), y = s + t     ->   r = p + q, y = sum(r)

p, q and r have one more axis than s, t and y. It is the last one, and counts the parts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from fractions import Fraction
from itertools import takewhile

from fuser.ir.axis_graph import tensor_operands
from fuser.ir.domain.tensor_domain import contiguity_for, numbers
from fuser.ir.dtypes import nbytes_of
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.ops.nodes import ReductionOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.types import DEVICE_TYPES, ParallelType
from multidevice.sharding.passes.partial_sums import become_sum, types_of_parts
from multidevice.sharding.placement import Cut, clone_domain, placement, spread_axes, unparallelize
from multidevice.sharding.propagation import apply_transfers, forward_cuts
from multidevice.sharding.queries import is_resharding
from multidevice.sharding.redistribution import PlanCost, SumStage, sum_cost

# The mesh dimensions along which devices have parts of a tensor, in the order of the axes.
_Types = tuple[ParallelType, ...]


def defer_sums(fusion: Fusion) -> None:
    """Lets linear ops compute on partial sums where devices then send fewer bytes.

    Before: one op adds the parts of each partial sum, right after the op that computes them. After:
    such an op is behind the linear ops that read the sum, if each of them reads only partial sums
    along the same mesh dimensions. A sum that any other op reads, an output of the fusion, and a
    tensor that the user has placed are added before they are read.
    """
    excluded: set[TensorOp] = set()
    while True:
        deferral = _Deferral(fusion, excluded)
        deferral.drop_costly()
        refused = deferral.rewrite()
        if not refused:
            return
        excluded |= refused


class _Deferral:
    """The ops of a fusion that can be computed on partial sums.

    `excluded` has ops that must not be computed on partial sums, although they could.
    """

    def __init__(self, fusion: Fusion, excluded: Collection[TensorOp]) -> None:
        self._fusion = fusion
        self._kept = {*fusion.outputs, *(a.out for a in fusion.aliases)}
        self._sums: dict[TensorView, ReductionOp] = {}
        # The mesh dimensions of every tensor that may remain a partial sum.
        self._types: dict[TensorView, _Types] = {}
        self._ops: dict[TensorOp, None] = {}
        for op in fusion.exprs:
            if isinstance(op, ReductionOp) and op.kind == "add" and _is_over_devices(op):
                self._sums[op.out] = op
                self._types[op.out] = types_of_parts(op)
            elif self._types and op not in excluded and op.is_linear and _is_on_one_mesh(op):
                types = {self._types.get(tv) for _, tv in tensor_operands(op)}
                found = next(iter(types)) if len(types) == 1 else None
                if found is not None:
                    self._types[op.out_tensor] = found
                    self._ops[op] = None
        self._drop_readers_of_sums()

    def _drop_readers_of_sums(self) -> None:
        """Drops ops of which an operand must be a complete sum: its parts must be added before the
        op.
        """
        count = -1
        while count != len(self._ops):
            count = len(self._ops)
            for op in [*self._ops]:
                if not all(self._stays_partial(tv) for _, tv in tensor_operands(op)):
                    del self._ops[op]

    def _stays_partial(self, tv: TensorView) -> bool:
        """Returns whether the tensor `tv` can remain a partial sum: all ops that read it can
        compute on its parts.

        Returns False for tensors that the user has placed, and for outputs and updates of the
        fusion.
        """
        is_placed = tv.mesh_is_user_set or bool(tv.cut_lines) or tv in self._kept
        is_partial = tv in self._sums or tv.definition() in self._ops
        uses = tv.uses()
        return is_partial and not is_placed and bool(uses) and all(op in self._ops for op in uses)

    def drop_costly(self) -> None:
        """Decides that some ops are not computed on parts: those for which adding the parts of the
        operands costs no more than adding the parts of the results.

        If an op is dropped, the ops that read its result are dropped with it.
        """
        groups = self._groups()
        for op in reversed([*self._ops]):
            if op not in self._ops:
                continue
            dropped = self._with_readers(groups[op], groups)
            operands = {tv: None for o in dropped for _, tv in tensor_operands(o)}
            if self._cost(operands) <= self._cost(o.out_tensor for o in dropped):
                for other in dropped:
                    del self._ops[other]

    def _groups(self) -> dict[TensorOp, tuple[TensorOp, ...]]:
        """Returns, for each op, the group of ops that can only be dropped together with it.

        Ops that read the same tensor are in one group, because all of them read either its sum or
        its parts.
        """
        groups: dict[TensorOp, tuple[TensorOp, ...]] = {}
        for op in self._ops:
            if op in groups:
                continue
            group, left = {op: None}, [op]
            while left:
                operands = (tv for _, tv in tensor_operands(left.pop()))
                found = [use for tv in operands for use in tv.uses() if use not in group]
                group |= dict.fromkeys(found)
                left += dict.fromkeys(found)
            groups |= dict.fromkeys(group, tuple(group))
        return groups

    def _with_readers(
        self, group: tuple[TensorOp, ...], groups: Mapping[TensorOp, tuple[TensorOp, ...]]
    ) -> list[TensorOp]:
        """Returns the ops of `group` and all ops on parts that read their results, directly or
        through other ops on parts. `groups` has the group of each op.
        """
        found, left = dict.fromkeys(group), [*group]
        while left:
            uses = (use for use in left.pop().out_tensor.uses() if use in self._ops)
            new = [o for use in uses if use not in found for o in groups[use]]
            found |= dict.fromkeys(new)
            left += new
        return [*found]

    def _cost(self, tensors: Iterable[TensorView]) -> tuple[Fraction, int]:
        """Returns what it costs to add the parts of `tensors`: (bytes sent, communications).

        The bytes are those that each device sends, per element of a tensor.
        """
        sent, count = Fraction(0), 0
        for tv in tensors:
            cost = _sum_cost(tv, self._types[tv])
            sent += cost.sent * nbytes_of(tv.dtype())
            count += cost.communications
        return sent, count

    def rewrite(self) -> set[TensorOp]:
        """Rewrites the fusion. Changes nothing if the parts of some op's operands are divided in
        different ways; then returns all such ops.
        """
        parts = {tv: op.inp for tv, op in self._sums.items()}
        made: dict[TensorOp, TensorOp] = {}
        refused: set[TensorOp] = set()
        for op in self._ops:
            if not all(tv in parts for _, tv in tensor_operands(op)):
                continue
            computed = _on_parts(op, parts, self._types[op.out_tensor])
            if is_resharding(computed):
                refused.add(op)
            else:
                parts[op.out_tensor] = computed.out_tensor
                made[op] = computed
        if refused:
            return refused
        ops: list[TensorOp] = []
        for op in self._fusion.exprs:
            out = op.out_tensor
            if op in made:
                ops.append(made[op])
            elif not (out in self._sums and self._stays_partial(out)):
                ops.append(op)
            if op in made and not self._stays_partial(out):
                become_sum(out, parts[out], self._types[out])
                init = sc.const(0, out.dtype())
                total = ReductionOp(out, parts[out], init, kind="add")
                ops.append(total.replace(where=op.where))
        if made:
            self._fusion.exprs = ops
        return set()


def _is_over_devices(op: ReductionOp) -> bool:
    """Returns whether `op` adds partial sums of devices, and no stream loop computes them.

    The axes of the parts must be the last ones.
    """
    types = types_of_parts(op)
    has_steps = any(a.is_stream for tv in (op.inp, op.out) for a in spread_axes(tv))
    last = op.inp.domain.no_reductions[op.inp.ndim - len(types) :]
    return (
        bool(types)
        and not has_steps
        and op.inp.mesh == op.out.mesh
        and tuple(a.ptype for a in last) == types
    )


def _is_on_one_mesh(op: TensorOp) -> bool:
    """Returns whether all tensors of `op` are on one mesh, and no stream loop computes them."""
    tensors = [op.out_tensor, *(tv for _, tv in tensor_operands(op))]
    has_steps = any(a.is_stream for tv in tensors for a in spread_axes(tv))
    return not has_steps and len({tv.mesh for tv in tensors}) == 1


def _sum_cost(tv: TensorView, types: _Types) -> PlanCost:
    """Returns the cost of adding the parts of `tv` along the mesh dimensions `types`.

    The parts are divided like `tv`, but not along these dimensions.
    """
    assert tv.mesh is not None, f"{tv} has parts, but no mesh"
    target = placement(tv)
    have = tuple(tuple(takewhile(lambda c: c.ptype not in types, cuts)) for cuts in target)
    parts = tuple(Cut(p, tv.mesh.size_of(p), whole=True) for p in DEVICE_TYPES if p in types)
    copied = [k for k, a in enumerate(tv.domain.no_reductions) if a.is_broadcast]
    return sum_cost(SumStage(have, parts), target, copied)


def _on_parts(op: TensorOp, parts: Mapping[TensorView, TensorView], types: _Types) -> TensorOp:
    """Returns the op that computes the parts of the result of `op` from the parts of its operands.

    `parts` has the parts of each operand. Their last axes count the parts along `types`.
    """
    out = op.out_tensor
    fusion = out.fusion
    ((index, operand), *_) = tensor_operands(op)
    given = parts[operand]
    domain, _ = clone_domain(fusion, out.domain)
    local = fusion.new_tensor(domain.in_logical_order(), out.dtype(), mesh=out.mesh)
    unparallelize(local, lambda a: True)
    counted = given.domain.no_reductions[given.ndim - len(types) :]
    added = [fusion.clone_axis(a, ptype=a.ptype, rfactor=True) for a in counted]
    plain, new = local.domain, numbers(added)
    local.domain = plain.having(
        root=(*plain.root_numbers, *new) if plain.root_numbers else (),
        logical=(*plain.logical_numbers, *new),
        loop=(*plain.loop_numbers, *new),
        contiguity=contiguity_for((*plain.logical, *added)),
        axes=added,
    )
    computed = op.map_values(lambda v: local if v is out else parts.get(v, v))
    apply_transfers(local, forward_cuts(computed, index, local), DEVICE_TYPES)
    return computed
