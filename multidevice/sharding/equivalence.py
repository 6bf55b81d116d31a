"""Are two tensors spread alike? A proof over the indices of their shared logical axes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

from fuser.ir.axis_graph import alike_axes
from fuser.ir.domain.axis_path import SizeRules, forward, indices_forward, replay
from fuser.ir.domain.tensor_domain import IterDomain, TensorDomain
from fuser.ir.fusion import TensorOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.scalar.scalar_nodes import postorder
from fuser.ir.tensor import TensorView
from fuser.ir.types import ParallelType
from fuser.support.errors import UnsupportedError
from multidevice.sharding.placement import is_plain_broadcast, sharded_axis


class Comparison:
    """The loop axes of a producer and a consumer as indices over their shared logical axes."""

    def __init__(self, op: TensorOp, operand_index: int, consumer: TensorView) -> None:
        producer = op.inputs[operand_index]
        self._fusion = consumer.fusion
        pairs = [
            (p, c)
            for p, c in alike_axes(op, operand_index, consumer)
            if not is_plain_broadcast(p) and not is_plain_broadcast(c)
        ]
        self._sums: dict[Scalar, Scalar] = {}
        self._divisible: dict[Scalar, Scalar] = {}
        self._collect_divisible(consumer)
        self._collect_divisible(producer)
        shared = {c.number: self.index(f"x{k}", c.size) for k, (_, c) in enumerate(pairs)}
        sizes = {a.number: self.rewrite(a.size) for a in consumer.domain.maybe_root}
        domain = self._domain(consumer, sizes)
        self.consumer = _View(consumer, consumer.domain.maybe_root, shared, domain, self)
        # Mapped axes have one size, however the two tensors write it.
        sizes = {a.number: self.rewrite(a.size) for a in producer.domain.no_reductions}
        sizes |= {p.number: self.rewrite(c.size) for p, c in pairs}
        domain = self._domain(producer, sizes)
        shared = {p.number: shared[c.number] for p, c in pairs}
        self.producer = _View(producer, producer.domain.no_reductions, shared, domain, self)

    def differs(self, ptypes: Collection[ParallelType]) -> bool:
        for ptype in ptypes:
            p, c = self.producer.index_of(ptype), self.consumer.index_of(ptype)
            if p == c:
                continue
            if p is None or c is None or _as_digits(p) != _as_digits(c):
                return True
        return False

    def rewrite(self, x: Scalar) -> Scalar:
        """Write an extent over class representatives and the factors known to divide them.

        A sum (what a pad or a cat makes) is one name: its multiples would be written as sums too,
        in which nobody sees the factor.
        """
        x = self._fusion.canonical(x)
        if isinstance(x, sc.Poly) and len(x.terms) > 1:
            x = self._sums.setdefault(x, sc.name_for(f"s{len(self._sums)}", x))
        while True:
            found: dict[Scalar, Scalar] = {
                s: self._divisible[s] for s in sc.symbols(x) if s in self._divisible
            }
            if not found:
                return x
            x = sc.substitute(x, found)

    def index(self, name: str, extent: Scalar) -> Scalar:
        extent = self.rewrite(extent)
        if sc.int_value(extent) == 1:
            return sc.ZERO
        return sc.index(name, extent)

    def _domain(self, tv: TensorView, sizes: dict[int, Scalar]) -> TensorDomain:
        """Return the domain over rewritten extents; `sizes` gives those of the source axes."""
        sizes = replay(forward(tv.domain.transforms), sizes, SizeRules(self.rewrite))

        def rewritten(a: IterDomain) -> IterDomain:
            size = sizes.get(a.number)
            size = self.rewrite(a.size) if size is None else size
            if a.expanded is not None:
                return replace(a, extent=sc.ONE, expanded=size)
            return replace(a, extent=sc.ONE if a.is_broadcast else size)

        return tv.domain.map_axes(rewritten)

    def _collect_divisible(self, tv: TensorView) -> None:
        """Learn `s = part * s'` from the splits of views and of devices, which leave no rest.

        Those of streams may leave one.
        """
        for t in tv.domain.splits.values():
            outer = tv.domain.rotated(t.outer)
            if outer.is_device or (outer.rfactor and not outer.is_stream):
                for part in t.outputs:
                    sizes = (tv.domain.axes[n].size for n in (t.inp, part))
                    self._learn(*map(self.rewrite, sizes))

    def _learn(self, extent: Scalar, factor: Scalar) -> None:
        atoms = sc.symbols(extent)
        if len(atoms) != 1 or atoms[0] in sc.symbols(factor):
            return
        (symbol,) = atoms
        part = sc.name_for(f"{symbol.name}'", symbol, symbol.dtype)
        if extent == symbol:
            self._divisible[symbol] = sc.mul(factor, part)
            return
        # d divides c * s, so d / gcd(c, d) divides s.
        d = sc.int_value(factor)
        c = sc.int_value(sc.floordiv(extent, symbol))
        if d is None or c is None or extent != sc.mul(c, symbol):
            return
        rest = d
        while (common := math.gcd(c, rest)) > 1:
            rest, c = rest // common, c // common
        if rest > 1:
            self._divisible[symbol] = sc.mul(rest, part)


def _as_digits(x: Scalar) -> Scalar:
    """Return `x` with each quotient of a remainder as the remainder of a quotient.

    (i % 4) / 2  ->  (i / 2) % 2
    Cuts inside of cuts are the former before a reshape, the latter behind it.
    """
    done: dict[Scalar, Scalar] = {}
    for y in postorder(x, done.__contains__):
        done[y] = _digit(sc.substitute(y, done))
    return done[x]


def _digit(x: Scalar) -> Scalar:
    """Return (i % n) / d, where d divides n and nothing is negative, as (i / d) % (n / d)."""
    if not isinstance(x, sc.Apply) or x.op not in ("/", "floorDiv"):
        return x
    inner, d = x.args
    if not isinstance(inner, sc.Apply) or inner.op not in ("%", "floorMod"):
        return x
    i, n = inner.args
    if not all(map(sc.is_nonnegative, (i, n, d))) or sc.int_value(sc.mod(n, d)) != 0:
        return x
    return sc.mod(sc.floordiv(i, d), sc.floordiv(n, d))


class _View:
    """The loop indices of one tensor, from known indices of some of its source axes."""

    def __init__(
        self,
        tv: TensorView,
        sources: Collection[IterDomain],
        shared: Mapping[int, Scalar],
        domain: TensorDomain,
        comparison: Comparison,
    ) -> None:
        self._tv = tv
        self._sources = sources
        self._shared = shared
        indices = dict(shared)
        for axis in sources:
            if axis.number not in indices:
                indices[axis.number] = comparison.index(f"u{axis.number}", axis.size)

        def coordinate(ptype: ParallelType) -> Scalar:
            count = sc.const(tv.mesh.size_of(ptype) if tv.mesh else 1)
            return sc.index(f"coordinate of {ptype.text}", count)

        self._indices = indices_forward(domain, indices, coordinate=coordinate)

    def index_of(self, ptype: ParallelType) -> Scalar | None:
        """Return the index of the loop axis with this type; None when there is none that counts."""
        axis = sharded_axis(self._tv, ptype)
        if axis is None:
            return None
        origins = self._tv.domain.above({axis.number})
        if not any(a.number in origins and a.number in self._shared for a in self._sources):
            return None
        if axis.number not in self._indices:
            raise UnsupportedError(f"{axis} of {self._tv} has no index over the logical axes")
        index = self._indices[axis.number]
        # A mesh dimension of one device: the index is 0 whatever is cut.
        is_single = axis.is_device and self._tv.mesh and self._tv.mesh.size_of(ptype) == 1
        return None if is_single else index
