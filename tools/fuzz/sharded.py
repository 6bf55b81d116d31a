"""Random sharded programs: meshes, cuts on some tensors, and the shapes that models have.

A program is an attention layer, an MLP, a norm or a chain of random ops. Annotations are on inputs,
on some intermediate values and on some results. A mesh divides each extent that it cuts.
"""

from __future__ import annotations

from collections.abc import Sequence

from tools.fuzz.builder import Builder, Dim, Seed
from tools.fuzz.program import (
    Annotation,
    Arg,
    Dt,
    Layout,
    Output,
    Program,
    Ref,
    plain_layout,
)
from tools.fuzz.sharded_ops import MAKERS, WEIGHTS
from tools.fuzz.shards import mesh_sizes
from tools.fuzz.table import FLOAT8

_DTYPES = ("Float",) * 12 + ("BFloat16", "Double", "Double", "Int", "ComplexFloat") * 2
_DTYPES += ("Float8_e5m2", "Float8_e4m3fn", "Float8_e8m0fnu")
_SIZES = (4, 4, 8, 8, 8, 12, 16)
# The number of ranks of a program; an entry is as likely as it is frequent.
RANKS = (2, 2, 4)
Ranks = tuple[object, ...]


def generate(seed: Seed) -> Program:
    """Returns the program of a seed, or the next one of a source of random numbers."""
    return Sharded(seed).build()


class _Stop(Exception):
    """Raised when a value of the model was rejected."""


class Sharded(Builder):
    """The sharded program of a seed, under construction."""

    def __init__(self, seed: Seed, kind: str = "sharded") -> None:
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
        """Draws the whole program: a model, some random ops, outputs and annotations."""
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
        """Draws an axis whose extent a mesh can divide."""
        if self.symbolic and self.chance(0.6):
            return Dim(tuple(self.rng.choice(_SIZES) for _ in range(self.ncalls)), False)
        return self.constant(self.rng.choice(_SIZES))

    def tensor(
        self,
        dims: Sequence[Dim],
        dtype: str | None = None,
        fill: str | Sequence[str] | None = None,
    ) -> str:
        """Appends a tensor input with these axes; returns its name."""
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
        """Draws the distribution of the values of an input."""
        return "normal" if self.chance(0.7) else "small"

    def op(self, op: str, args: Sequence[Arg], axes: Sequence[Dim], **named: Arg) -> str:
        """Appends a statement; returns the name of its result, or raises `_Stop`."""
        made = self.emit(op, args, axes, True, **named)
        if not made:
            raise _Stop
        return made[0]

    def as_home(self, name: str) -> str:
        """Returns a tensor in the dtype of the program, by a cast if needed."""
        if self.dtype[name] == self.home:
            return name
        return self.op("cast", [Ref(name), Dt(self.home)], self.dims[name])

    def linear(self, x: str, n: Dim, cuts: list[tuple[int, str]], *, bias: bool) -> str:
        """Appends x @ w.T, and suggests `cuts` for w [n, k]."""
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
        """Appends an MLP: two linear layers with an activation between."""
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
        """Appends an RMS norm of the last axis; returns the result's name."""
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
        """Appends an attention layer: projections, attention, output projection."""
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
        """Appends attention as one op."""
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
        """Appends attention as the ops that it consists of."""
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
        """Appends a norm: an RMS norm, or one with mean and variance."""
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
        """Appends inputs and a chain of random ops."""
        for _ in range(self.rng.randint(1, 2)):
            self.tensor([self.dim() for _ in range(self.rng.randint(1, 4))])
        for _ in range(self.rng.randint(2, 8)):
            self.random_op()

    # ------------------------------------------------------------ random ops
    def random_op(self) -> None:
        """Appends a random op."""
        name = self.pick()
        assert name is not None
        maker = self.rng.choices(MAKERS, WEIGHTS)[0]
        maker(self, name)

    # ------------------------------------------------------------ annotations
    def meshes(self) -> Sequence[Ranks]:
        """Draws one or two meshes over the program's ranks."""
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
        found: list[Ranks] = [first]
        if self.chance(0.2):
            found.append(self.second_mesh(ranks))
        return found

    def second_mesh(self, ranks: list[int]) -> Ranks:
        """Draws a mesh of some of the ranks, in any order."""
        some = self.rng.sample(ranks, self.rng.randint(1, len(ranks)))
        if len(some) == 4 and self.chance(0.5):
            return (some[0], some[1]), (some[2], some[3])
        return tuple(some)

    def annotated(self, program: Program) -> Program:
        """Returns the program with meshes and cuts on some of its tensors."""
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
            # From the last axis to the first: a split moves only the axes after it.
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
