"""Which results several kernels compute although one had better store them.

Kernels compute what stands between the tensors that memory holds, each for itself. That costs
arithmetic, and reads of whatever it is computed from; to store the result costs a kernel that makes
it, and a read in each of the others. Both are counted per element, in bytes:

    recompute   instructions / 8 and bytes read, of each reader, but for what it needs anyway
    store       the same and a write, once, and a read of each reader
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fuser.ir import memory_layout
from fuser.ir.dtypes import nbytes_of
from fuser.ir.fusion import Fusion, TensorOp
from fuser.ir.ops.costs import instructions
from fuser.ir.ops.lookup import LookupOp
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.tensor import TensorView

# How many instructions an H200 executes in the time that a byte takes: 33e12 and 4.2e12 a second.
INSTRUCTIONS_PER_BYTE = 8
# Storing takes a launch more: it must save this much.
LEAST_GAIN = 1.1
# More are never computed again. They take as long as eight reads of 16 bytes.
MANY_OPS = 1024


def elements(tv: TensorView) -> Scalar:
    """Return the number of elements that memory holds (broadcast axes count once)."""
    return tv.fusion.canonical(memory_layout.elements(tv))


def worth_storing(
    fusion: Fusion,
    exprs: Sequence[TensorOp],
    kernels: Iterable[frozenset[TensorOp]],
    stored: Iterable[TensorView],
) -> list[TensorView]:
    """Return the tensors that are to be stored, too, in program order.

    `exprs` are the ops in order, `kernels` what each kernel computes from the tensors `stored`.
    """
    return _Decision(fusion, exprs, tuple(kernels), {*stored}).run()


@dataclass
class _Decision:
    fusion: Fusion
    exprs: Sequence[TensorOp]
    kernels: tuple[frozenset[TensorOp], ...]
    stored: set[TensorView]
    position: dict[TensorOp, int] = field(default_factory=dict[TensorOp, int])
    # Of each op, a bit for each kernel that computes it; those of new kernels follow the others.
    computed_in: dict[TensorOp, int] = field(default_factory=dict[TensorOp, int])

    def run(self) -> list[TensorView]:
        """Decide from the last result to the first, as if all before were computed again; then take
        back, from the first on, what is cheap to compute from those that are stored."""
        for bit, ops in enumerate(self.kernels):
            for op in ops:
                self.computed_in[op] = self.computed_in.get(op, 0) | 1 << bit
        self.position = {e: at for at, e in enumerate(self.exprs)}
        repeated = [e for e in self.exprs if self.computed_in.get(e, 0).bit_count() > 1]
        chosen: dict[TensorView, None] = {}
        for op in reversed(repeated):
            if self._spread(op) and self._pays(op):
                self.computed_in[op] = 1 << len(self.kernels) + len(chosen)
                chosen[op.out_tensor] = None
                self.stored.add(op.out_tensor)
        for op in repeated:
            if op.out_tensor in chosen and not self._pays(op):
                del chosen[op.out_tensor]
                self._compute_again(op)
        return [op.out_tensor for op in repeated if op.out_tensor in chosen]

    def _readers(self, op: TensorOp) -> int:
        """Return the kernels that use an op's result."""
        return self._users(op.outputs, {})

    def _spread(self, op: TensorOp) -> bool:
        """Count anew which kernels compute an op, whose users have been counted; return whether
        these differ for its users: before such a place nothing is worth storing."""
        self.computed_in[op] = mine = self._readers(op)
        users = {self.computed_in.get(u, 0) for out in op.outputs for u in self.fusion.uses(out)}
        return mine.bit_count() > 1 and users != {mine} and len(op.outputs) == 1

    def _compute_again(self, op: TensorOp) -> None:
        """Let the readers of an op's result compute it, and what it is computed from."""
        self.stored.remove(op.out_tensor)
        ops, _ = self._cone(op)
        for step in sorted(ops, key=self.position.__getitem__, reverse=True):
            self.computed_in[step] = self._readers(step)

    def _pays(self, op: TensorOp) -> bool:
        """Whether storing an op's result costs less than what its readers do without it."""
        ops, inputs = self._cone(op)
        if len(ops) > MANY_OPS:
            return True
        size, readers = elements(op.out_tensor), self._readers(op)
        count = readers.bit_count()
        # Of what leads to the result, which readers need it for something else, too.
        others: dict[TensorOp, int] = {op: 0}
        for step in sorted(ops - {op}, key=self.position.__getitem__, reverse=True):
            others[step] = readers & self._users(step.outputs, others)
        arithmetic = sum(
            instructions(step) * (count - others[step].bit_count() - 1)
            for step in ops
            if elements(step.out_tensor) == size
        )
        spared = arithmetic / INSTRUCTIONS_PER_BYTE
        cost_of_storing = nbytes_of(op.out_tensor.dtype()) * (1 + count)
        # Of a table as much is read as is found in it.
        found = {e.out: e for e in ops if isinstance(e, LookupOp)}
        tables = {e.table for e in found.values()}
        read = {v: readers & self._users((v,), others) for v in inputs if v not in tables}
        read.update((out, others[e]) for out, e in found.items())
        for v, mine in read.items():
            if elements(v) == size:
                nbytes = nbytes_of(v.dtype())
                cost_of_storing += nbytes
                spared += nbytes * (count - mine.bit_count())
        return spared > LEAST_GAIN * cost_of_storing

    def _users(self, tensors: Iterable[TensorView], others: Mapping[TensorOp, int]) -> int:
        """Return the kernels that use tensors, for some ops only those that `others` says."""
        found = 0
        for tv in tensors:
            for use in self.fusion.uses(tv):
                found |= others.get(use, self.computed_in.get(use, 0))
        return found

    def _cone(self, op: TensorOp) -> tuple[set[TensorOp], dict[TensorView, None]]:
        """Return the ops that compute a result from other stored tensors, and those tensors; no
        more of them than are too many to compute again."""
        ops, inputs, todo = set[TensorOp](), dict[TensorView, None](), [op]
        while todo and len(ops) <= MANY_OPS:
            step = todo.pop()
            if step in ops:
                continue
            ops.add(step)
            for v in step.inputs:
                if not isinstance(v, TensorView):
                    continue
                made_by = self.fusion.definition(v)
                if v in self.stored or made_by is None:
                    inputs[v] = None
                else:
                    todo.append(made_by)
        return ops, inputs
