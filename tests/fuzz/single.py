"""Random fusions on one device: every op, rank, layout, dtype and kind of extent, in shares."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tests.fuzz.builder import Builder, Dim, joined_shapes
from tests.fuzz.oracle import SCALAR_OPS
from tests.fuzz.program import Arg, Dt, Layout, Output, Program, Ref, Size, plain_layout
from tests.fuzz.table import ROWS, SHIFTS
from tests.fuzz.values import Num

_DTYPES = ("Float",) * 8 + ("Half", "BFloat16") * 3 + ("Double",) * 2 + ("Int",) * 2
_DTYPES += ("Int32", "Bool")
_REDUCTIONS = ("sum", "sum", "max", "min", "prod")


def generate(seed: int) -> Program:
    """Return the program of a seed."""
    return _Single(seed).build()


class _Single(Builder):
    def __init__(self, seed: int) -> None:
        super().__init__("single", seed, calls=1, cap=1)
        self.ncalls = self.rng.choice((1, 1, 2, 2, 3))
        self.args = [[] for _ in range(self.ncalls)]
        self.envs = [{} for _ in range(self.ncalls)]
        self.cap = 2 ** self.rng.randint(3, 12) if self.chance(0.97) else 2**15
        self.home = self.rng.choice(_DTYPES)
        self.mixed = self.chance(0.4)
        self.fill = self.rng.choices(("normal", "wide", "small", "special"), (60, 15, 15, 10))[0]
        self.pool = [self.new_dim() for _ in range(self.rng.randint(2, 4))]

    def build(self) -> Program:
        for _ in range(self.rng.choice((1, 1, 1, 2, 2, 3))):
            self.input()
        if self.chance(0.25):
            self.scalar_input()
        target = min(24, 1 + int(self.rng.expovariate(1 / 6)))
        for _ in range(target * 4):
            if len(self.stmts) >= target:
                break
            self.rng.choices(_MAKERS, _WEIGHTS)[0](self)
        if all(name not in self.dims for s in self.stmts for name in s.outs):
            name = self.pick()
            assert name is not None
            self.emit("set", [Ref(name)], self.dims[name], careful=False)
        return self.program(self.choose_outputs())

    # ------------------------------------------------------------ inputs
    def draw_dtype(self) -> str:
        return self.rng.choice(_DTYPES) if self.mixed else self.home

    def input(self, dims: Sequence[Dim] | None = None, dtype: str | None = None) -> str:
        if dims is None:
            rank = self.rng.choices(range(6), (4, 18, 30, 25, 14, 9))[0]
            dims = [
                self.rng.choice(self.pool) if self.chance(0.8) else self.one for _ in range(rank)
            ]
            while not self.fits(dims):
                k = self.rng.randrange(len(dims))
                small = self.constant(self.rng.randint(1, 3))
                dims[k] = small  # pyright: ignore[reportIndexIssue]
        dims = [Dim(d.vec, d.static) for d in dims]
        layout, dims = self.layout(dims)
        flags, order = self.declared(dims, layout)
        return self.add_input(
            dims,
            dtype or self.draw_dtype(),
            layout,
            flags,
            order,
            offset=self.rng.randint(1, 15) if self.chance(0.1) else 0,
            fill=self.fill,
        )

    def layout(self, dims: list[Dim]) -> tuple[Layout, list[Dim]]:
        rank = len(dims)
        plain = plain_layout(rank)
        kind = self.rng.choices(
            ("plain", "permuted", "gapped", "step", "expanded", "junk", "overlap"),
            (42, 20, 12, 8, 10, 5, 3),
        )[0]
        if rank == 0 or kind == "plain":
            return plain, dims
        order = tuple(self.rng.sample(range(rank), rank)) if self.chance(0.3) else plain.order
        if kind == "permuted":
            return Layout(tuple(self.rng.sample(range(rank), rank)), plain.gaps), dims
        if kind == "gapped":
            gaps = [0] * rank
            gaps[self.rng.randrange(rank)] = self.rng.randint(1, 9)
            return Layout(order, tuple(gaps)), dims
        if kind == "step":
            return Layout(order, plain.gaps, step=self.rng.randint(2, 7)), dims
        if kind == "expanded":
            count = self.rng.randint(1, min(3, rank))
            chosen = [k for k in self.rng.sample(range(rank), count) if not dims[k].is_broadcast]
            dims = [Dim(d.vec, d.static, k in chosen) for k, d in enumerate(dims)]
            return Layout(order, plain.gaps, expanded=tuple(sorted(chosen))), dims
        if kind == "junk":
            return Layout(order, plain.gaps, junk=tuple(range(rank))), dims
        return Layout(plain.order, plain.gaps, overlap=True), dims

    def declared(
        self, dims: Sequence[Dim], layout: Layout
    ) -> tuple[bool | tuple[bool | None, ...], tuple[int, ...]]:
        """Return contiguity flags and stride order that are true of the layout, or say less."""
        rank = len(dims)
        is_dense = layout.step == 1 and not any(layout.gaps) and not layout.overlap
        ordered = layout.order != tuple(range(rank)) and self.chance(0.6)
        is_plain = is_dense and layout.order == tuple(range(rank))
        places = layout.order if ordered else tuple(range(rank))
        order = tuple(rank - 1 - places.index(k) for k in range(rank)) if ordered else ()
        fixed = {k: None for k, d in enumerate(dims) if d.expanded or d.is_broadcast}
        dense = (is_dense and ordered) or is_plain
        if dense and self.chance(0.75):
            flag = True
        else:
            flag = False
        if not any(d.expanded for d in dims) and self.chance(0.5):
            return flag, order
        return tuple(fixed.get(k, flag) for k in places), order

    def scalar_input(self) -> str:
        dtype = self.rng.choice(("Int", "Int", "Double"))
        values: list[int | float | bool] = [
            self.rng.choice((-7, -5, -2, -1, 0, 1, 2, 3, 10))
            if dtype == "Int"
            else round(self.rng.uniform(-3, 3), 3)
            for _ in range(self.ncalls)
        ]
        return self.add_scalar(dtype, values)

    # ------------------------------------------------------------ elementwise
    def scalar(self, kinds: str) -> Arg:
        """Return a constant or a scalar of the program."""
        names = [n for n in self.scalars if self._scalar_kind(n) in kinds]
        if names and self.chance(0.4):
            return Ref(self.rng.choice(names))
        if self.chance(0.08) and "i" in kinds:
            name = self.pick(lambda n: bool(self.dims[n]))
            if name is not None:
                return Size(name, self.rng.randrange(len(self.dims[name])))
        if "f" in kinds and self.chance(0.8):
            return round(self.rng.uniform(-2.5, 2.5), 2)
        return self.rng.choice((-5, -3, -1, 0, 1, 2, 3, 4, 7)) if "i" in kinds else True

    def _scalar_kind(self, name: str) -> str:
        value = self.envs[0][name]
        assert isinstance(value, Num)
        return {"Int": "i", "Double": "f", "Bool": "b"}[value.dtype]

    def scalar_arithmetic(self) -> None:
        if not self.scalars:
            self.scalar_input()
        op = self.rng.choice(SCALAR_OPS)
        first: Arg = Ref(self.rng.choice(self.scalars))
        args: list[Arg] = [first] if op in ("neg", "abs") else [first, self.scalar("i")]
        if op not in ("neg", "abs", "div", "mod") and self.chance(0.5):
            args.reverse()
        if op in ("div", "mod"):
            args[1] = self.rng.choice((-4, -3, 2, 3, 4))
        name = self.emit_scalar(op, args)
        if name is not None:
            self.scalars.append(name)

    def partner(self, name: str, kinds: str) -> str | None:
        """Return a tensor that fits `name` elementwise."""

        def fits(other: str) -> bool:
            if not self.is_a(other, kinds) or (not self.mixed and not self._alike(name, other)):
                return False
            dims = joined_shapes(self.dims[name], self.dims[other], self.one)
            return dims is not None and self.fits(dims)

        found = self.pick(fits)
        if found is not None and (found != name or self.chance(0.3)):
            return found
        if (
            self.chance(0.4)
            and len(self.inputs) < 6
            and not any(d.expanded for d in self.dims[name])
        ):
            dims = [d if self.chance(0.8) else self.one for d in self.dims[name]]
            if self.chance(0.2):
                dims = dims[self.rng.randint(0, len(dims)) :]
            dtype = self.dtype[name] if not self.mixed else self.draw_dtype()
            made = self.input(dims, dtype)
            return made if fits(made) else found
        return found

    def _alike(self, a: str, b: str) -> bool:
        return self.dtype[a] == self.dtype[b] or self.chance(0.2)

    def unary(self) -> None:
        row = ROWS[self.rng.choice(_UNARY)]
        name = self.pick(lambda n: self.is_a(n, row.dtypes))
        if name is None:
            return
        for op, *more in _INTO_DOMAIN.get(row.name, ()) if self.chance(0.7) else ():
            made = self.emit(op, [Ref(name), *more], self.dims[name])
            if not made:
                return
            name = made[0]
        self.emit(row.name, [Ref(name)], self.dims[name])

    def binary(self) -> None:
        row = ROWS[self.rng.choice(_BINARY)]
        name = self.pick(lambda n: self.is_a(n, row.dtypes))
        if name is None:
            return
        if row.name in SHIFTS:
            count: Arg = self.rng.randint(0, 6)
            self.emit(row.name, [Ref(name), count], self.dims[name])
            return
        kinds = row.dtypes if row.name != "nextafter" else "f"
        if self.chance(0.35):
            args: list[Arg] = [Ref(name), self.scalar(kinds if self.is_a(name, "f") else "i")]
            if row.name == "nextafter":
                return
            dims: Sequence[Dim] = self.dims[name]
        else:
            other = self.partner(name, kinds)
            if other is None:
                return
            args = [Ref(name), Ref(other)]
            found = joined_shapes(self.dims[name], self.dims[other], self.one)
            assert found is not None
            dims = found
        if self.chance(0.3):
            args.reverse()
        if row.name == "nextafter" and any(
            self.dtype[a.name] != self.dtype[name] or self.dtype[name] in ("Half", "BFloat16")
            for a in args
            if isinstance(a, Ref)
        ):
            return
        self.emit(row.name, args, dims)

    def ternary(self) -> None:
        op = self.rng.choice(("where", "where", "lerp", "addcmul", "clamp", "threshold"))
        kinds = "f" if op == "lerp" else "fi"
        name = self.pick(lambda n: self.is_a(n, kinds))
        if name is None:
            return
        k = "f" if self.is_a(name, "f") else "i"
        if op == "clamp":
            ends = sorted((self.rng.randint(-4, 4), self.rng.randint(-4, 4)))
            limits: list[Arg] = [float(e) if k == "f" else e for e in ends]
            if self.chance(0.2):
                limits[self.rng.randrange(2)] = None
            self.emit(op, [Ref(name), *limits], self.dims[name])
            return
        if op == "threshold":
            self.emit(op, [Ref(name), self.scalar(k), self.scalar(k)], self.dims[name])
            return
        others = [self.partner(name, kinds), self.partner(name, kinds)]
        if op == "where":
            others[0] = self.condition(name)
        if others[0] is None or others[1] is None:
            return
        dims = joined_shapes(self.dims[others[0]], self.dims[others[1]], self.one)
        dims = None if dims is None else joined_shapes(dims, self.dims[name], self.one)
        if dims is None:
            return
        if op == "where":
            last: Arg = Ref(others[1]) if self.chance(0.7) else self.scalar(k)
            if not isinstance(last, Ref) or last.name not in self.dims:
                joint = joined_shapes(self.dims[others[0]], self.dims[name], self.one)
                assert joint is not None
                dims = joint
            self.emit(op, [Ref(others[0]), Ref(name), last], dims)
        elif op == "lerp":
            self.emit(op, [Ref(name), Ref(others[0]), Ref(others[1])], dims)
        else:
            value = self.scalar(k)
            self.emit(op, [Ref(name), Ref(others[0]), Ref(others[1]), value], dims)

    def condition(self, name: str) -> str | None:
        def fits(other: str) -> bool:
            return self.dtype[other] == "Bool" and (
                joined_shapes(self.dims[name], self.dims[other], self.one) is not None
            )

        found = self.pick(fits)
        if found is not None:
            return found
        made = self.emit(
            self.rng.choice(("gt", "le")), [Ref(name), self.scalar("fi")], self.dims[name]
        )
        return made[0] if made else None

    def cast(self) -> None:
        name = self.pick()
        assert name is not None
        dtype = self.rng.choice(_DTYPES)
        self.emit("cast", [Ref(name), Dt(dtype)], self.dims[name])

    def copy(self) -> None:
        name = self.pick()
        assert name is not None
        self.emit(self.rng.choice(("set", "segment_set")), [Ref(name)], self.dims[name])

    # ------------------------------------------------------------ reductions
    def reduced(self, name: str) -> tuple[list[int], bool, tuple[Dim, ...]]:
        dims = self.dims[name]
        rank = len(dims)
        r = self.rng.random()
        if r < 0.3:
            axes = [rank - 1]
        elif r < 0.4:
            axes = list(range(rank))
        else:
            axes = sorted(self.rng.sample(range(rank), self.rng.randint(1, rank)))
        keep = self.chance(0.4)
        out = [self.one if k in axes else d for k, d in enumerate(dims) if keep or k not in axes]
        signed = [a - rank if self.chance(0.3) else a for a in axes]
        return signed, keep, tuple(out)

    def reduction(self) -> None:
        op = self.rng.choice(_REDUCTIONS)
        name = self.pick(lambda n: bool(self.dims[n]) and (op == "sum" or self.dtype[n] != "Bool"))
        if name is None:
            return
        axes, keep, dims = self.reduced(name)
        kwargs: dict[str, Arg] = {"keepdim": keep} if keep or self.chance(0.3) else {}
        if op in ("sum", "prod") and self.chance(0.1):
            kwargs["dtype"] = Dt(self.rng.choice(("Float", "Double")))
        self.emit(op, [Ref(name)], dims, True, dims=list(axes), **kwargs)

    def moments(self) -> None:
        op = self.rng.choice(("var_mean", "var_mean", "var", "welford"))
        name = self.pick(
            lambda n: (
                bool(self.dims[n])
                and self.is_a(n, "f")
                and (op != "var_mean" or self.dtype[n] in ("Float", "Double"))
            )
        )
        if name is None:
            return
        axes, keep, dims = self.reduced(name)
        if op == "welford":
            kept = [
                d for k, d in enumerate(self.dims[name]) if k - len(self.dims[name]) not in axes
            ]
            kept = [
                d
                for k, d in enumerate(self.dims[name])
                if k not in axes and k - len(self.dims[name]) not in axes
            ]
            self.emit_many(op, [Ref(name), axes], [kept] * 3)
            return
        correction = self.rng.choice((0, 1, 1))
        if op == "var":
            self.emit(op, [Ref(name), axes, correction, keep], dims)
        else:
            self.emit_many(op, [Ref(name), axes, correction, keep], [dims, dims])

    def norm(self) -> None:
        """Softmax, or a norm over trailing axes, in one of its spellings."""
        name = self.pick(lambda n: bool(self.dims[n]) and self.dtype[n] in ("Float", "Double"))
        if name is None:
            return
        rank = len(self.dims[name])
        axis = rank - 1 if self.chance(0.7) else self.rng.randrange(rank)
        full = self.dims[name]
        small = tuple(self.one if k == axis else d for k, d in enumerate(full))
        spread = self.chance(0.3)

        def back(short: str) -> list[str]:
            """The reduction's result as wide as the input again."""
            if not spread:
                return [short]
            sizes = [self.size(name, k) for k in range(rank)]
            wide_dims = [
                Dim(d.vec, d.static, k == axis and not d.is_broadcast) for k, d in enumerate(full)
            ]
            return self.emit("expand", [Ref(short), sizes], wide_dims)

        def step(op: str, args: list[Arg], axes: Sequence[Dim], /, **kwargs: Arg) -> str:
            made = self.emit(op, args, axes, True, **kwargs)
            if not made:
                raise _Stop
            return made[0]

        try:
            if self.chance(0.5):
                top = step("max", [Ref(name), axis, True], small)
                (top,) = back(top) or [top]
                e = step("exp", [step_ref(step("sub", [Ref(name), Ref(top)], full))], full)
                total = step("sum", [Ref(e), axis, True], small)
                (total,) = back(total) or [total]
                step("div", [Ref(e), Ref(total)], full)
            else:
                square = step("mul", [Ref(name), Ref(name)], full)
                total = step("sum", [Ref(square)], small, dims=[axis], keepdim=True)
                inverse = step("rsqrt", [step_ref(step("add", [Ref(total), 1.0], small))], small)
                (inverse,) = back(inverse) or [inverse]
                step("mul", [Ref(name), Ref(inverse)], full)
        except _Stop:
            return

    # ------------------------------------------------------------ the end
    def choose_outputs(self) -> list[Output]:
        made = [n for s in self.stmts for n in s.outs if n in self.dims]
        leaves = [n for n in made if not self.uses[n]]
        chosen = self.rng.sample(leaves, min(len(leaves), 4)) if leaves else [made[-1]]
        while len(chosen) < 4 and self.chance(0.25):
            chosen.append(self.rng.choice(made))
        if self.chance(0.06):
            chosen.append(self.rng.choice([n for n in self.dims if n.startswith("x")]))
        if not self.chance(0.15):
            chosen = list(dict.fromkeys(chosen))
        outputs = [Output(n) for n in chosen]
        return self.with_aliases(outputs) if self.chance(0.15) else outputs

    def with_aliases(self, outputs: list[Output]) -> list[Output]:
        taken: set[str] = {o.name for o in outputs if o.name.startswith("x")}
        for k, out in enumerate(outputs):
            if out.name.startswith("x") or sum(o.name == out.name for o in outputs) > 1:
                continue
            targets = [
                i.name
                for i in self.inputs
                if i.name in self.dims
                and i.name not in taken
                and self.dtype[i.name] == self.dtype[out.name]
                and [d.vec for d in self.dims[i.name]] == [d.vec for d in self.dims[out.name]]
                and i.layout.is_writable  # pyright: ignore[reportAttributeAccessIssue]
            ]
            if targets:
                outputs[k] = Output(out.name, self.rng.choice(targets))
                taken.add(outputs[k].alias or "")
        return outputs


class _Stop(Exception):
    """A statement of a group was thought better of."""


def step_ref(name: str) -> Ref:
    return Ref(name)


# What leads most values into the domain of an op.
_POSITIVE: tuple[tuple[str, *tuple[float, ...]], ...] = (("abs",), ("add", 0.1))
_INTO_DOMAIN: dict[str, tuple[tuple[str, *tuple[float, ...]], ...]] = {
    "acosh": (("abs",), ("add", 1.0)),
    "erfcinv": (("tanh",), ("add", 1.0)),
    **dict.fromkeys(("acos", "asin", "atanh", "erfinv"), (("tanh",),)),
    **dict.fromkeys(("log", "log2", "log10", "log1p", "sqrt", "rsqrt", "lgamma"), _POSITIVE),
}
_UNARY = [r.name for r in ROWS.values() if r.arity == 1]
_BINARY = [r.name for r in ROWS.values() if r.arity == 2]
_BINARY += ["add", "mul", "sub", "maximum", "div"] * 4
_UNARY += ["neg", "exp", "tanh", "relu", "sigmoid", "abs"] * 3


# ------------------------------------------------------------------ shapes
def _broadcast(b: _Single) -> None:
    name = b.pick(lambda n: len(b.dims[n]) < 5)
    if name is None:
        return
    dims = list(b.dims[name])
    flags = [False] * len(dims)
    for _ in range(b.rng.randint(1, 5 - len(dims))):
        at = b.rng.randint(0, len(dims))
        dims.insert(at, b.one)
        flags.insert(at, True)
    b.emit("broadcast", [Ref(name), flags], dims)


def _broadcast_in_dim(b: _Single) -> None:
    name = b.pick(lambda n: len(b.dims[n]) < 5)
    if name is None:
        return
    dims = list(b.dims[name])
    kept = list(range(len(dims)))
    sizes: list[Arg] = [b.size(name, k) for k in kept]
    out: list[Dim] = list(dims)
    for _ in range(b.rng.randint(1, 2)):
        if len(out) >= 5:
            break
        at = b.rng.randint(0, len(out))
        size, dim = _some_size(b)
        sizes.insert(at, size)
        out.insert(at, Dim(dim.vec, dim.static, True) if not dim.is_broadcast else dim)
        kept = [k + (k >= at) for k in kept]
    b.emit("broadcast_in_dim", [Ref(name), sizes, kept], out)


def _some_size(b: _Single) -> tuple[Arg, Dim]:
    name = b.pick(lambda n: bool(b.dims[n]))
    if name is not None and b.chance(0.7):
        k = b.rng.randrange(len(b.dims[name]))
        size = b.size(name, k)
        dim = b.dims[name][k]
        return size, Dim(dim.vec, isinstance(size, int))
    n = b.rng.randint(1, 6)
    return n, b.constant(n)


def _expand(b: _Single) -> None:
    name = b.pick(lambda n: any(d.is_broadcast for d in b.dims[n]))
    if name is None:
        return
    dims = list(b.dims[name])
    sizes: list[Arg] = [-1 if b.chance(0.5) else b.size(name, k) for k in range(len(dims))]
    for k, d in enumerate(dims):
        if d.is_broadcast and b.chance(0.7):
            sizes[k], dim = _some_size(b)
            dims[k] = Dim(dim.vec, dim.static, True) if not dim.is_broadcast else dim
    b.emit("expand", [Ref(name), sizes], dims)


def _squeeze(b: _Single) -> None:
    name = b.pick(lambda n: any(d.is_broadcast for d in b.dims[n]))
    if name is None:
        return
    ones = [k for k, d in enumerate(b.dims[name]) if d.is_broadcast]
    gone = sorted(b.rng.sample(ones, b.rng.randint(1, len(ones))))
    dims = [d for k, d in enumerate(b.dims[name]) if k not in gone]
    b.emit("squeeze", [Ref(name), gone], dims)


def _permute(b: _Single) -> None:
    name = b.pick(lambda n: len(b.dims[n]) > 1)
    if name is None:
        return
    order = b.rng.sample(range(len(b.dims[name])), len(b.dims[name]))
    if b.chance(0.15):
        b.emit("stride_order", [Ref(name), order], b.dims[name])
    else:
        b.emit("permute", [Ref(name), order], [b.dims[name][k] for k in order])


def _reshape(b: _Single) -> None:
    name = b.pick(lambda n: bool(b.dims[n]))
    if name is None:
        return
    dims = [Dim(d.vec, d.static) for d in b.dims[name]]
    sizes: list[Arg] = [b.size(name, k) for k in range(len(dims))]
    for _ in range(b.rng.randint(1, 3)):
        way = b.rng.choice(("merge", "merge", "split", "split", "one", "drop"))
        at = b.rng.randrange(len(dims)) if dims else 0
        if way == "merge" and len(dims) > 1 and at + 1 < len(dims):
            x, y = dims[at], dims[at + 1]
            product: Arg = -2
            a, c = sizes[at], sizes[at + 1]
            if isinstance(a, int) and isinstance(c, int):
                product = a * c
            else:
                made = b.emit_scalar("mul", [a, c])
                if made is None:
                    return
                product = Ref(made)
            vec = tuple(p * q for p, q in zip(x.vec, y.vec, strict=True))
            dims[at : at + 2] = [Dim(vec, isinstance(product, int))]
            sizes[at : at + 2] = [product]
        elif way == "split" and dims and len(dims) < 5:
            common = math.gcd(*dims[at].vec)
            factors = [f for f in (2, 3, 4, 5, 7, 8) if common and common % f == 0]
            whole = sizes[at]
            if not factors or not isinstance(whole, int):
                continue
            f = b.rng.choice(factors)
            rest = whole // f
            pair = [rest, f] if b.chance(0.5) else [f, rest]
            dims[at : at + 1] = [b.constant(n) for n in pair]
            sizes[at : at + 1] = list(pair)
        elif way == "one" and len(dims) < 5:
            dims.insert(at, b.one)
            sizes.insert(at, 1)
        elif way == "drop" and dims and dims[at].is_broadcast and len(dims) > 1:
            del dims[at], sizes[at]
    nonzero = all(n for d in dims for n in d.vec)
    if nonzero and dims and b.chance(0.25):
        k = b.rng.randrange(len(dims))
        sizes[k] = -1
        if not all(isinstance(s, int) for s in sizes) or not all(d.static for d in b.dims[name]):
            dims[k] = Dim(dims[k].vec, False)
    # A constant that stands for a symbolic extent is not a constant of the result.
    b.emit("reshape", [Ref(name), sizes], dims)


def _slice(b: _Single) -> None:
    name = b.pick(lambda n: bool(b.dims[n]))
    if name is None:
        return
    starts: list[Arg] = []
    ends: list[Arg] = []
    out: list[Dim] = []
    for k, d in enumerate(b.dims[name]):
        low, high = 0, max(d.vec)
        if b.chance(0.5) and min(d.vec) > 0:
            low = b.rng.randint(0, min(d.vec) - 1) if b.chance(0.6) else 0
            high = b.rng.randint(low + (0 if b.chance(0.05) else 1), max(d.vec))
            starts.append(low)
            ends.append(high)
            vec = tuple(max(min(high, n) - min(low, n), 0) for n in d.vec)
            is_static = d.static
            out.append(Dim(vec, is_static, d.expanded))
        else:
            starts.append(0)
            ends.append(b.size(name, k))
            out.append(d)
    b.emit("slice", [Ref(name), starts, ends], out)


def _pad(b: _Single) -> None:
    name = b.pick(lambda n: bool(b.dims[n]))
    if name is None:
        return
    dims = list(b.dims[name])
    widths: list[Arg] = []
    for back in range(b.rng.randint(1, len(dims))):
        k = len(dims) - 1 - back
        d = dims[k]
        pair = [0, 0]
        if b.chance(0.7):
            pair = [b.rng.randint(0, 4), b.rng.randint(0, 4)]
            if b.chance(0.15) and min(d.vec) >= 4:
                pair[b.rng.randrange(2)] = -b.rng.randint(1, 2)
        widths += pair
        if pair != [0, 0]:
            crops = max(pair) <= 0
            vec = tuple(n + sum(pair) for n in d.vec)
            dims[k] = Dim(vec, d.static, d.expanded and crops)
    args: list[Arg] = [Ref(name), widths]
    if b.chance(0.5):
        args.append(
            {"f": 1.5, "i": 3, "b": True}[
                "f" if b.is_a(name, "f") else "i" if b.is_a(name, "i") else "b"
            ]
        )
    b.emit("pad", args, dims)


def _cat(b: _Single) -> None:
    name = b.pick(lambda n: bool(b.dims[n]))
    if name is None:
        return
    axis = b.rng.randrange(len(b.dims[name]))

    def fits(other: str) -> bool:
        if b.dtype[other] != b.dtype[name] or len(b.dims[other]) != len(b.dims[name]):
            return False
        pairs = enumerate(zip(b.dims[name], b.dims[other], strict=True))
        return all(k == axis or x.vec == y.vec for k, (x, y) in pairs)

    pieces = [name]
    for _ in range(b.rng.randint(1, 3)):
        other = b.pick(fits)
        assert other is not None
        pieces.insert(b.rng.randint(0, len(pieces)), other)
    columns = list(zip(*(b.dims[p] for p in pieces), strict=True))
    dims = [Dim(c[0].vec, any(d.static for d in c), all(d.expanded for d in c)) for c in columns]
    vec = tuple(sum(d.vec[m] for d in columns[axis]) for m in range(b.ncalls))
    dims[axis] = Dim(vec, all(d.static for d in columns[axis]))
    b.emit("cat", [[Ref(p) for p in pieces], axis - len(dims) if b.chance(0.3) else axis], dims)


def _factory(b: _Single) -> None:
    op = b.rng.choice(("full", "iota", "triu", "triu"))
    if op == "triu":
        name = b.pick(lambda n: len(b.dims[n]) > 1)
        if name is not None:
            b.emit(op, [Ref(name), b.rng.randint(-3, 3)], b.dims[name])
        return
    dtype = b.draw_dtype()
    if op == "full":
        found = [_some_size(b) for _ in range(b.rng.randint(0, 3))]
        value: Arg = {"f": 1.25, "i": -3, "b": True}[
            "b" if dtype == "Bool" else "i" if dtype.startswith("Int") else "f"
        ]
        b.emit(op, [[s for s, _ in found], value, Dt(dtype)], [d for _, d in found])
        return
    if dtype == "Bool":
        return
    size, dim = _some_size(b)
    is_int = dtype.startswith("Int")
    start: Arg = b.rng.randint(-4, 4) if is_int else 0.5
    step: Arg = b.rng.choice((-2, 1, 3)) if is_int else 0.25
    b.emit(op, [size, start, step, Dt(dtype)], [dim])


def _contraction(b: _Single) -> None:
    name = b.pick(lambda n: b.is_a(n, "f") and 1 <= len(b.dims[n]) <= 4)
    if name is None or len(b.inputs) > 6:
        return
    dims = b.dims[name]
    dtype = b.dtype[name]
    k = dims[-1]
    if k.expanded:
        return
    n = b.constant(b.rng.choice((1, 2, 3, 5, 8, 16))) if b.chance(0.6) else b.rng.choice(b.pool)
    if b.chance(0.5):
        if not b.fits([n, k]):
            return
        args: list[Arg] = [Ref(name), Ref(b.input([n, k], dtype))]
        if b.chance(0.5):
            args.append(Ref(b.input([n], dtype)))
        b.emit("linear", args, [*dims[:-1], n])
        return
    if b.chance(0.2):
        other, out = [k], [*dims[:-1]]
    else:
        batch = [d if b.chance(0.8) else b.one for d in dims[:-2] if not d.expanded]
        if len(batch) != max(len(dims) - 2, 0):
            return
        batch = batch[b.rng.randint(0, len(batch)) :] if b.chance(0.3) else batch
        other, out = [*batch, k, n], [*dims[:-1], n]
    if b.fits(other):
        b.emit("matmul", [Ref(name), Ref(b.input(other, dtype))], out)


_TABLE: tuple[tuple[Callable[[_Single], None], int], ...] = (
    (_Single.unary, 20),
    (_Single.binary, 24),
    (_Single.ternary, 7),
    (_Single.cast, 5),
    (_Single.copy, 2),
    (_Single.scalar_arithmetic, 3),
    (_Single.reduction, 14),
    (_Single.moments, 4),
    (_Single.norm, 3),
    (_broadcast, 3),
    (_broadcast_in_dim, 4),
    (_expand, 3),
    (_squeeze, 3),
    (_permute, 7),
    (_reshape, 8),
    (_slice, 6),
    (_pad, 4),
    (_cat, 4),
    (_factory, 4),
    (_contraction, 4),
)
_MAKERS = [m for m, _ in _TABLE]
_WEIGHTS = [w for _, w in _TABLE]
