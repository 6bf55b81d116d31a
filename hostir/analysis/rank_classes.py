"""Which ranks do the same: the race check looks at one rank of each class.

The program is unrolled once for all ranks, as in `hostir.analysis.collective_matching`, and every
scalar that names the rank tells ranks apart by its value; so do the meshes that have them, and
roots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fuser.ir.op import Op
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Number, Scalar, Symbol
from hostir.analysis.deadlocks import Teams
from hostir.analysis.rank_values import Array, PerRank, RankValues, np
from hostir.ir.ops import RANK, ForLoop, IfThenElse
from hostir.ir.program import HostIrContainer, walk
from hostir.ir.transfers import Communication


def first_of_each_class(
    program: HostIrContainer, ranks: Sequence[int], values: Mapping[Symbol, Number]
) -> list[int]:
    """Return the first rank of each class; `values` binds the symbols of the inputs."""
    walker = _RankClassWalker(program, ranks, dict(values))
    walker.run(program.ops)
    return [ranks[i] for i in sorted(np.unique(walker.classes, return_index=True)[1].tolist())]


class _RankClassWalker:
    """Splits `classes` [ranks] by what each rank meets; stops when each has its own."""

    def __init__(
        self, program: HostIrContainer, ranks: Sequence[int], values: dict[Symbol, Number]
    ) -> None:
        self.ranks, self.values = ranks, RankValues(ranks, values)
        self.classes: Array = np.zeros(len(ranks), dtype=np.int64)
        self.count = 1
        self.mask: Array = np.ones(len(ranks), dtype=bool)
        self.differing: dict[int, list[Scalar]] = {}
        for mesh in {tv.mesh for tv in program.tensors()} - {None}:
            assert mesh is not None
            self.split(np.isin(self.values.ranks, mesh.devices))
        for op in walk(program.ops):
            scalars = (v for v in (*op.inputs, *op.scalars) if isinstance(v, Scalar))
            self.differing[id(op)] = [x for x in scalars if RANK in sc.symbols(x)]
        self.teams = {
            op.team: Teams(op.team, ranks)
            for op in walk(program.ops)
            if isinstance(op, Communication) and op.root is not None
        }

    def split(self, column: PerRank) -> None:
        """Part the ranks of a class whose values differ, as far as they are here (`mask`)."""
        here = np.where(self.mask, np.asarray(column), 0)
        both = np.unique(np.stack([self.classes, here]), axis=1, return_inverse=True)
        self.classes, self.count = both[1].reshape(-1), both[0].shape[1]

    def run(self, ops: Sequence[Op]) -> None:
        for op in ops:
            if self.count == len(self.ranks):
                return
            for x in self.differing[id(op)]:
                self.split(self.values.of(x))
            if isinstance(op, ForLoop):
                self._loop(op)
            elif isinstance(op, IfThenElse):
                self._branch(op)
            elif isinstance(op, Communication) and op.root is not None:
                self.split(self.teams[op.team].position == self.values.of(op.root))

    def _loop(self, op: ForLoop) -> None:
        bounds = [self.values.of(x) for x in (op.start, op.stop, op.step)]
        columns = np.stack([np.broadcast_to(b, self.mask.shape) for b in bounds])
        outer = self.mask
        for start, stop, step in np.unique(columns[:, outer], axis=1).T.tolist():
            self.mask = outer & ((start, stop, step) == columns.T).all(1)
            for i in range(start, stop, max(step, 1)):
                self.values.bind(op.index, i)
                self.run(op.body)
        self.mask = outer
        self.values.bind(op.index, None)

    def _branch(self, op: IfThenElse) -> None:
        holds, outer = self.values.of(op.predicate), self.mask
        for region, chosen in ((op.then, holds), (op.orelse, np.logical_not(holds))):
            self.mask = outer & chosen
            if region and self.mask.any():
                self.run(region)
        self.mask = outer
