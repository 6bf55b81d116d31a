"""Random sharded programs: meshes, cuts on some tensors, and the shapes that models have.

A program is an attention layer, an MLP, a norm or a chain of random ops, with annotations on
inputs, on some values between and on some results. Extents that a mesh cuts are multiples of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from tests.fuzz.attend import statement
from tests.fuzz.builder import Builder, Dim, joined_shapes
from tests.fuzz.lookups import look_up
from tests.fuzz.program import (
    Annotation,
    Arg,
    Dt,
    Layout,
    Output,
    Program,
    Ref,
    plain_layout,
)
from tests.fuzz.scans import scan_or_sort
from tests.fuzz.shards import mesh_sizes
from tests.fuzz.table import FLOAT8

_DTYPES = ("Float",) * 6 + ("BFloat16", "Double", "Double", "Int", "Float8_e5m2", "ComplexFloat")
_SIZES = (4, 4, 8, 8, 8, 12, 16)
# How many ranks run a program, as often as drawn.
RANKS = (2, 2, 4)
Ranks = tuple[object, ...]


def generate(seed: int) -> Program:
    """Return the program of a seed."""
    return Sharded(seed).build()


class _Stop(Exception):
    """A value of the model was thought better of."""


class Sharded(Builder):
    """A program of a seed, and of a kind, in the making."""

    def __init__(self, seed: int, kind: str = "sharded") -> None:
        super().__init__(kind, seed, calls=1, cap=2048)
        self.ranks = self.rng.choice(RANKS)
        self.ncalls = self.rng.choice((1, 1, 1, 2))
        self.args = [[] for _ in range(self.ncalls)]
        self.envs = [{} for _ in range(self.ncalls)]
        self.home = self.rng.choice(_DTYPES)
        self.symbolic = self.chance(0.5)
        self.notes: dict[str, list[tuple[int, str]]] = {}
        self.suggested: dict[str, list[tuple[int, str]]] = {}

    def build(self) -> Program:
        models = (self.mlp, self.attention, self.norm, self.chain)
        model = self.rng.choices(models, (22, 22, 16, 40))[0]
        if model != self.chain and self.home in ("Int", *FLOAT8):
            self.home = "Float"
        try:
            model()
        except _Stop:
            self.chain()
        for _ in range(self.rng.choice((0, 0, 1, 2))):
            self.random_op()
        made = [n for s in self.stmts for n in s.outs if n in self.dims]
        if not made:
            x = self.tensor([self.dim()])
            made = self.emit("set", [Ref(x)], self.dims[x], careful=False)
        leaves = [n for n in made if not self.uses[n]]
        outputs = self.rng.sample(leaves, min(3, len(leaves)))
        outputs += [n for n in self.rng.sample(made, 1) if self.chance(0.2) and n not in outputs]
        program = self.program([Output(n) for n in outputs])
        return self.annotated(program)

    # ------------------------------------------------------------ values
    def dim(self) -> Dim:
        if self.symbolic and self.chance(0.6):
            return Dim(tuple(self.rng.choice(_SIZES) for _ in range(self.ncalls)), False)
        return self.constant(self.rng.choice(_SIZES))

    def tensor(
        self,
        dims: Sequence[Dim],
        dtype: str | None = None,
        fill: str | Sequence[str] | None = None,
    ) -> str:
        layout, flags = plain_layout(len(dims)), True
        if len(dims) > 1 and self.chance(0.3):
            order = tuple(self.rng.sample(range(len(dims)), len(dims)))
            layout, flags = Layout(order, (0,) * len(dims)), False
        expanded = [k for k in range(len(dims)) if self.chance(0.03) and not dims[k].is_broadcast]
        if expanded:
            dims = [Dim(d.vec, d.static, k in expanded) for k, d in enumerate(dims)]
            layout = Layout(layout.order, layout.gaps, expanded=tuple(expanded))
            flags = tuple(
                None if k in expanded or d.is_broadcast else False for k, d in enumerate(dims)
            )
        fill = fill or self.fill
        return self.add_input(dims, dtype or self.home, layout, flags, (), offset=0, fill=fill)

    @property
    def fill(self) -> str:
        return "normal" if self.chance(0.7) else "small"

    def op(self, op: str, args: Sequence[Arg], axes: Sequence[Dim], **named: Arg) -> str:
        made = self.emit(op, args, axes, True, **named)
        if not made:
            raise _Stop
        return made[0]

    def as_home(self, name: str) -> str:
        if self.dtype[name] == self.home:
            return name
        return self.op("cast", [Ref(name), Dt(self.home)], self.dims[name])

    def linear(self, x: str, n: Dim, cuts: list[tuple[int, str]], *, bias: bool) -> str:
        """x @ w.T, with `cuts` suggested for w [n, k]."""
        x = self.as_home(x)
        w = self.tensor([n, self.dims[x][-1]])
        self.suggested[w] = cuts
        args: list[Arg] = [Ref(x), Ref(w)]
        if bias:
            b = self.tensor([n])
            self.suggested[b] = [c for c in cuts if c[0] == 0]
            args.append(Ref(b))
        return self.op("linear", args, [*self.dims[x][:-1], n])

    # ------------------------------------------------------------ models
    def mlp(self) -> None:
        dims = [self.dim() for _ in range(self.rng.choice((1, 2)))]
        hidden, inner = self.constant(8), self.constant(self.rng.choice((8, 16)))
        x = self.tensor([*dims, hidden])
        self.suggested[x] = self.rng.choice(([], [(0, "y")], [(len(dims) - 1, "x")]))
        up = self.linear(x, inner, [(0, "x")], bias=self.chance(0.6))
        act = self.op(self.rng.choice(("relu", "tanh", "silu")), [Ref(up)], self.dims[up])
        if self.chance(0.3):
            gate = self.linear(x, inner, [(0, "x")], bias=False)
            act = self.op("mul", [Ref(act), Ref(gate)], self.dims[up])
        down = self.linear(act, hidden, [(1, "x")], bias=self.chance(0.5))
        out = down
        if self.chance(0.5):
            out = self.op("add", [Ref(down), Ref(x)], self.dims[x])
        self.suggested[out] = self.suggested[x]
        if self.chance(0.3):
            self.normalise(out)

    def normalise(self, x: str) -> str:
        dims = self.dims[x]
        if self.dtype[x] not in ("Float", "Double"):
            x = self.op("cast", [Ref(x), Dt("Float")], dims)
        small = [*dims[:-1], self.one]
        square = self.op("mul", [Ref(x), Ref(x)], dims)
        total = self.op("sum", [Ref(square)], small, dims=[len(dims) - 1], keepdim=True)
        inverse = self.op("rsqrt", [Ref(self.op("add", [Ref(total), 1.0], small))], small)
        y = self.op("mul", [Ref(x), Ref(inverse)], dims)
        return self.op("mul", [Ref(y), Ref(self.tensor([dims[-1]], self.dtype[y]))], dims)

    def attention(self) -> None:
        batch, tokens = self.dim(), self.dim()
        heads, size = self.rng.choice(((2, 4), (4, 2), (4, 4)))
        hidden = self.constant(heads * size)
        x = self.tensor([batch, tokens, hidden])
        self.suggested[x] = self.rng.choice(([], [(0, "y")], [(1, "x")], [(1, "y")]))
        split = [batch, tokens, self.constant(heads), self.constant(size)]
        sizes: list[Arg] = [self.size(x, 0), self.size(x, 1), heads, size]

        def head() -> str:
            y = self.linear(x, hidden, [(0, "x")], bias=self.chance(0.3))
            y = self.op("reshape", [Ref(y), sizes], split)
            return self.op("permute", [Ref(y), [0, 2, 1, 3]], [split[k] for k in (0, 2, 1, 3)])

        q, k, v = head(), head(), head()
        y = self.attend(q, k, v) if self.chance(0.5) else self.in_parts(q, k, v)
        y = self.op("permute", [Ref(y), [0, 2, 1, 3]], split)
        y = self.op("reshape", [Ref(y), [*sizes[:2], heads * size]], [batch, tokens, hidden])
        out = self.linear(y, hidden, [(1, "x")], bias=self.chance(0.3))
        self.suggested[out] = self.suggested[x]

    def attend(self, q: str, k: str, v: str) -> str:
        """Attention as one op."""
        shape = [Dim(d.vec, d.static) for d in self.dims[q]]
        made = self.emit_many(
            "sdpfa_fwd",
            [Ref(q), Ref(k), Ref(v)],
            [shape, shape[:3]],
            hidden=2,
            is_causal=self.chance(0.5),
        )
        if not made:
            raise _Stop
        return made[0]

    def in_parts(self, q: str, k: str, v: str) -> str:
        """Attention as the ops that it consists of."""
        by_head = self.dims[q]
        tokens = by_head[2]
        flipped = [by_head[i] for i in (0, 1, 3, 2)]
        k = self.op("permute", [Ref(k), [0, 1, 3, 2]], flipped)
        scores = self.op("matmul", [Ref(q), Ref(k)], [*by_head[:3], tokens])
        scores = self.op("mul", [Ref(scores), 0.5], self.dims[scores])
        small = [*self.dims[scores][:3], self.one]
        top = self.op("max", [Ref(scores), 3, True], small)
        e = self.op("sub", [Ref(scores), Ref(top)], self.dims[scores])
        e = self.op("exp", [Ref(e)], self.dims[scores])
        total = self.op("sum", [Ref(e), 3, True], small)
        p = self.as_home(self.op("div", [Ref(e), Ref(total)], self.dims[scores]))
        return self.op("matmul", [Ref(p), Ref(v)], by_head)

    def norm(self) -> None:
        dims = [self.dim() for _ in range(self.rng.choice((2, 3)))]
        x = self.tensor(dims)
        if self.chance(0.5):
            self.normalise(x)
            return
        if self.dtype[x] not in ("Float", "Double"):
            x = self.op("cast", [Ref(x), Dt("Float")], dims)
        axis = self.rng.randrange(len(dims))
        small = [self.one if k == axis else d for k, d in enumerate(dims)]
        made = self.emit_many("var_mean", [Ref(x), [axis], 0, True], [small, small])
        if not made:
            raise _Stop
        centred = self.op("sub", [Ref(x), Ref(made[1])], dims)
        inverse = self.op("rsqrt", [Ref(self.op("add", [Ref(made[0]), 0.1], small))], small)
        self.op("mul", [Ref(centred), Ref(inverse)], dims)

    def chain(self) -> None:
        for _ in range(self.rng.randint(1, 2)):
            self.tensor([self.dim() for _ in range(self.rng.randint(1, 4))])
        for _ in range(self.rng.randint(2, 8)):
            self.random_op()

    # ------------------------------------------------------------ random ops
    def random_op(self) -> None:
        name = self.pick()
        assert name is not None
        maker = self.rng.choices(_MAKERS, _WEIGHTS)[0]
        maker(self, name)

    # ------------------------------------------------------------ annotations
    def meshes(self) -> Sequence[Ranks]:
        ranks = list(range(self.ranks))
        r = self.rng.random()
        if r < 0.15:
            ranks.reverse()
        elif r < 0.35:
            self.rng.shuffle(ranks)
        if self.ranks == 4 and self.chance(0.45):
            first: Ranks = ((ranks[0], ranks[1]), (ranks[2], ranks[3]))
        elif self.chance(0.1):
            first = (tuple(ranks),)
        elif self.ranks == 4 and self.chance(0.1):
            first = (ranks[0], ranks[2])
        else:
            first = tuple(ranks)
        found = [first]
        if self.chance(0.06):
            found.append(tuple(sorted(ranks)))
        return found

    def annotated(self, program: Program) -> Program:
        meshes = self.meshes()
        inputs = {i.name for i in program.inputs}
        needed = [*(i.name for i in program.inputs), *(n for s in program.stmts for n in s.outs)]
        outputs = {o.name for o in program.outputs}
        follow = self.chance(0.6)
        everywhere = self.chance(0.7)
        notes: list[Annotation] = []
        for name in needed:
            if name not in self.dims:
                continue
            p = 1.0 if name in inputs and everywhere else 0.75 if name in inputs else 0.1
            p = 0.45 if name in outputs and name not in inputs else p
            if not self.chance(p):
                continue
            mesh = self.rng.randrange(len(meshes))
            sizes = mesh_sizes(meshes[mesh])
            if follow and name in self.suggested and self.chance(0.9):
                wanted = self.suggested[name]
            else:
                wanted = [(a, d) for d in sizes for a in [self._axis(name)] if self.chance(0.55)]
            cuts: list[tuple[int, str]] = []
            for axis, dim in wanted:
                fits = dim in sizes and axis is not None and self._divides(name, axis, sizes[dim])
                if fits and axis not in [c[0] for c in cuts] and dim not in [c[1] for c in cuts]:
                    cuts.append((axis, dim))
            # From the last axis to the first: a split moves only what is behind it.
            notes.append(Annotation(name, mesh, tuple(sorted(cuts, reverse=True))))
        if not notes:
            notes.append(Annotation(next(n for n in needed if n in self.dims), 0, ()))
        return Program(
            program.inputs,
            program.stmts,
            program.outputs,
            program.calls,
            tuple(meshes),
            tuple(notes),
            self.ranks,
        )

    def _axis(self, name: str) -> int:
        return self.rng.randrange(max(len(self.dims[name]), 1))

    def _divides(self, name: str, axis: int, count: int) -> bool:
        dims = self.dims[name]
        if axis >= len(dims) or dims[axis].is_broadcast or dims[axis].expanded:
            return False
        return all(n and n % count == 0 for n in dims[axis].vec)


# ------------------------------------------------------------------ random ops
def _unary(b: Sharded, name: str) -> None:
    op = b.rng.choice(("neg", "abs", "relu", "tanh", "sigmoid", "exp", "set"))
    b.emit(op, [Ref(name)], b.dims[name])


def _binary(b: Sharded, name: str) -> None:
    op = b.rng.choice(("add", "mul", "sub", "maximum"))
    if b.chance(0.3):
        b.emit(op, [Ref(name), 2 if b.is_a(name, "i") else 1.5], b.dims[name])
        return

    def fits(other: str) -> bool:
        dims = joined_shapes(b.dims[name], b.dims[other], b.one)
        return dims is not None and b.fits(dims)

    other = b.pick(fits)
    if other is None or other == name or b.chance(0.3):
        if any(d.expanded for d in b.dims[name]):
            return
        dims = [d if b.chance(0.75) else b.one for d in b.dims[name]]
        other = b.tensor(dims[b.rng.randint(0, 1) if len(dims) > 1 else 0 :])
    dims = joined_shapes(b.dims[name], b.dims[other], b.one)
    if dims is not None:
        b.emit(op, [Ref(name), Ref(other)], dims)


def _reduction(b: Sharded, name: str) -> None:
    dims = b.dims[name]
    if not dims:
        return
    op = b.rng.choice(("sum", "sum", "max", "min"))
    axes = sorted(b.rng.sample(range(len(dims)), b.rng.randint(1, min(2, len(dims)))))
    keep = b.chance(0.5)
    out = [b.one if k in axes else d for k, d in enumerate(dims) if keep or k not in axes]
    b.emit(op, [Ref(name)], out, True, dims=list(axes), keepdim=keep)


def _permute(b: Sharded, name: str) -> None:
    dims = b.dims[name]
    if len(dims) > 1:
        order = b.rng.sample(range(len(dims)), len(dims))
        b.emit("permute", [Ref(name), order], [dims[k] for k in order])


def _reshape(b: Sharded, name: str) -> None:
    dims = [Dim(d.vec, d.static) for d in b.dims[name]]
    if not dims:
        return
    sizes: list[Arg] = [b.size(name, k) for k in range(len(dims))]
    at = b.rng.randrange(len(dims))
    if b.chance(0.5) and at + 1 < len(dims):
        pair = list(itertools.pairwise(sizes))[at]
        vec = tuple(p * q for p, q in zip(dims[at].vec, dims[at + 1].vec, strict=True))
        merged: Arg
        if isinstance(pair[0], int) and isinstance(pair[1], int):
            merged = pair[0] * pair[1]
        else:
            made = b.emit_scalar("mul", list(pair))
            assert made is not None
            merged = Ref(made)
        dims[at : at + 2] = [Dim(vec, isinstance(merged, int))]
        sizes[at : at + 2] = [merged]
    else:
        whole = sizes[at]
        if not isinstance(whole, int) or whole % 4 or whole < 8 or len(dims) > 4:
            return
        halves = b.rng.choice(([4, whole // 4], [whole // 4, 4], [2, whole // 2]))
        dims[at : at + 1] = [b.constant(n) for n in halves]
        sizes[at : at + 1] = list(halves)
    b.emit("reshape", [Ref(name), sizes], dims)


def _broadcast(b: Sharded, name: str) -> None:
    dims = list(b.dims[name])
    if len(dims) > 3:
        return
    at = b.rng.randint(0, len(dims))
    flags = [False] * len(dims)
    flags.insert(at, True)
    dims.insert(at, b.one)
    made = b.emit("broadcast", [Ref(name), flags], dims)
    if made and b.chance(0.5):
        dims[at] = Dim((8,) * b.ncalls, True, True)
        b.emit("expand", [Ref(made[0]), [8 if k == at else -1 for k in range(len(dims))]], dims)


def _slice(b: Sharded, name: str) -> None:
    dims = list(b.dims[name])
    wide = [k for k, d in enumerate(dims) if min(d.vec) >= 8 and d.static]
    if not wide:
        return
    at = b.rng.choice(wide)
    low = b.rng.choice((0, 4))
    starts: list[Arg] = [low if k == at else 0 for k in range(len(dims))]
    ends: list[Arg] = [low + 4 if k == at else b.size(name, k) for k in range(len(dims))]
    dims[at] = Dim((4,) * b.ncalls, True, dims[at].expanded)
    b.emit("slice", [Ref(name), starts, ends], dims)


def _cat(b: Sharded, name: str) -> None:
    dims = list(b.dims[name])
    if not dims or any(d.expanded for d in dims):
        return
    at = b.rng.randrange(len(dims))
    other = b.pick(lambda n: b.dims[n] == b.dims[name] and b.dtype[n] == b.dtype[name])
    assert other is not None
    dims[at] = Dim(tuple(2 * n for n in dims[at].vec), dims[at].static)
    b.emit("cat", [[Ref(name), Ref(other)], at], dims)


def _look_up(b: Sharded, name: str) -> None:
    if b.dims[name]:
        look_up(b, name, b.dim, b.tensor)


def _scan_or_sort(b: Sharded, name: str) -> None:
    if b.dims[name]:
        scan_or_sort(b, name)


def _pad(b: Sharded, name: str) -> None:
    dims = list(b.dims[name])
    if dims:
        dims[-1] = Dim(tuple(n + 4 for n in dims[-1].vec), dims[-1].static)
        b.emit("pad", [Ref(name), b.rng.choice(([4, 0], [0, 4], [2, 2]))], dims)


def _contraction(b: Sharded, name: str) -> None:
    dims = b.dims[name]
    if not dims or not b.is_a(name, "f") or dims[-1].expanded or len(b.inputs) > 6:
        return
    if b.dtype[name] in FLOAT8:
        return
    n = b.dim()
    if math.prod(dims[-1].vec) * math.prod(n.vec) > 1024:
        return
    if b.chance(0.5):
        w = b.tensor([n, dims[-1]], b.dtype[name])
        b.emit("linear", [Ref(name), Ref(w)], [*dims[:-1], n])
    elif len(dims) > 1:
        w = b.tensor([dims[-1], n], b.dtype[name])
        b.emit("matmul", [Ref(name), Ref(w)], [*dims[:-1], n])


def _attend(b: Sharded, name: str) -> None:
    if not b.is_a(name, "f") or b.dtype[name] in FLOAT8 or len(b.inputs) > 6:
        return
    if len(b.dims[name]) != 4:
        few = [b.constant(b.rng.choice((2, 4, 8))) for _ in range(3)]
        name = b.tensor([few[0], few[1], b.dim(), few[2]], b.dtype[name])
    statement(b, name, b.tensor)


def _full(b: Sharded, name: str) -> None:
    """What has the shape of a tensor, but none of its blocks."""
    dims = [Dim(d.vec, d.static) for d in b.dims[name]]
    sizes: list[Arg] = [b.size(name, k) for k in range(len(dims))]
    b.emit("full", [sizes, 2 if b.is_a(name, "i") else 1.25, Dt(b.dtype[name])], dims)


def _random(b: Sharded, name: str) -> None:
    """Random numbers in the shape of a tensor, mostly used with it: a mask, or noise."""
    if not b.is_a(name, "f"):
        return
    dims = [Dim(d.vec, d.static) for d in b.dims[name]]
    made = b.add_random([b.size(name, k) for k in range(len(dims))], dims, b.dtype[name])
    if made and b.chance(0.7):
        b.emit(b.rng.choice(("add", "mul")), [Ref(name), Ref(made[0])], dims)


def _triu(b: Sharded, name: str) -> None:
    if len(b.dims[name]) > 1:
        b.emit("triu", [Ref(name), b.rng.randint(-3, 3)], b.dims[name])


_TABLE: tuple[tuple[Callable[[Sharded, str], None], int], ...] = (
    (_unary, 12),
    (_binary, 22),
    (_reduction, 14),
    (_permute, 12),
    (_reshape, 10),
    (_broadcast, 6),
    (_slice, 4),
    (_cat, 4),
    (_pad, 3),
    (_contraction, 10),
    (_attend, 6),
    (_full, 4),
    (_random, 5),
    (_triu, 2),
    (_look_up, 16),
    (_scan_or_sort, 8),
)
_MAKERS = [m for m, _ in _TABLE]
_WEIGHTS = [w for _, w in _TABLE]
