"""Draws inputs and computing ops of random fusions on one device; `views` has ops that move
elements.
"""

from __future__ import annotations

from collections.abc import Sequence

from tools.fuzz.builder import Builder, Dim, Seed, joined_shapes
from tools.fuzz.ops.elementwise import SCALAR_OPS
from tools.fuzz.program import Arg, Dt, Layout, Ref, Size, plain_layout
from tools.fuzz.table import HALF, ROWS, SHIFTS
from tools.fuzz.values import Num

_DTYPES = ("Float",) * 8 + ("Half", "BFloat16") * 3 + ("Double",) * 2 + ("Int",) * 2
_DTYPES += ("Int32", "Bool", "Float8_e4m3fn", "Float8_e5m2", "Float8_e8m0fnu")
_DTYPES += ("ComplexFloat",) * 2 + ("ComplexDouble",)
_REDUCTIONS = ("sum", "sum", "max", "min", "prod")


class FusionBuilder(Builder):
    """Draws statements of all kinds except views; the inputs share a pool of extents."""

    def __init__(self, seed: Seed) -> None:
        super().__init__("single", seed, calls=1, cap=1)
        self.ncalls = self.rng.choice((1, 1, 2, 2, 3))
        self.args = [[] for _ in range(self.ncalls)]
        self.envs = [{} for _ in range(self.ncalls)]
        self.cap = 2 ** self.rng.randint(3, 12) if self.chance(0.97) else 2**15
        self.home = self.rng.choice(_DTYPES)
        self.mixed = self.chance(0.4)
        self.fill = self.rng.choices(("normal", "wide", "small", "special"), (60, 15, 15, 10))[0]
        self.pool = [self.new_dim() for _ in range(self.rng.randint(2, 4))]

    # ------------------------------------------------------------ inputs
    def draw_dtype(self) -> str:
        """Draws a dtype: any if the program mixes dtypes, else the program's own."""
        return self.rng.choice(_DTYPES) if self.mixed else self.home

    def input(
        self,
        dims: Sequence[Dim] | None = None,
        dtype: str | None = None,
        fill: str | Sequence[str] | None = None,
    ) -> str:
        """Appends a tensor input with random axes, dtype and layout where they are not given."""
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
            fill=fill or self.fill,
        )

    def layout(self, dims: list[Dim]) -> tuple[Layout, list[Dim]]:
        """Draws a memory layout; returns it with the axes, some of which it may expand."""
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
        """Returns contiguity flags and a stride order that are true of the layout, or say
        less.
        """
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
        """Appends a scalar input with a random dtype and values."""
        dtype = self.rng.choice(("Int", "Int", "Double"))
        if self.home.startswith("Complex") and self.chance(0.5):
            dtype = "ComplexDouble"
        draw = {
            "Int": lambda: self.rng.choice((-7, -5, -2, -1, 0, 1, 2, 3, 10)),
            "Double": lambda: round(self.rng.uniform(-3, 3), 3),
            "ComplexDouble": self.complex_number,
        }[dtype]
        return self.add_scalar(dtype, [draw() for _ in range(self.ncalls)])

    def complex_number(self) -> complex:
        """Draws a complex number with parts between -3 and 3."""
        return complex(round(self.rng.uniform(-3, 3), 3), round(self.rng.uniform(-3, 3), 3))

    # ------------------------------------------------------------ elementwise
    def scalar(self, kinds: str) -> Arg:
        """Returns a constant or a scalar of the program."""
        names = [n for n in self.scalars if self._scalar_kind(n) in kinds]
        if names and self.chance(0.6):
            return Ref(self.rng.choice(names))
        if self.chance(0.08) and "i" in kinds:
            name = self.pick(lambda n: bool(self.dims[n]))
            if name is not None:
                return Size(name, self.rng.randrange(len(self.dims[name])))
        if "c" in kinds and self.chance(0.6):
            return self.complex_number()
        if "f" in kinds and self.chance(0.8):
            return round(self.rng.uniform(-2.5, 2.5), 2)
        return self.rng.choice((-5, -3, -1, 0, 1, 2, 3, 4, 7)) if "i" in kinds else True

    def _scalar_kind(self, name: str) -> str:
        value = self.envs[0][name]
        assert isinstance(value, Num)
        return {"Int": "i", "Double": "f", "Bool": "b", "ComplexDouble": "c"}[value.dtype]

    def scalar_arithmetic(self) -> None:
        """Appends an arithmetic statement over scalars."""
        ordered = [n for n in self.scalars if self._scalar_kind(n) != "c"]
        if not ordered:
            self.scalar_input()
            return
        op = self.rng.choice(SCALAR_OPS)
        first: Arg = Ref(self.rng.choice(ordered))
        args: list[Arg] = [first] if op in ("neg", "abs") else [first, self.scalar("i")]
        if op not in ("neg", "abs", "div", "mod") and self.chance(0.5):
            args.reverse()
        if op in ("div", "mod"):
            args[1] = self.rng.choice((-4, -3, 2, 3, 4))
        name = self.emit_scalar(op, args)
        if name is not None:
            self.scalars.append(name)

    def partner(self, name: str, kinds: str) -> str | None:
        """Returns a tensor that fits `name` in an elementwise op, or None."""

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
        """Appends an elementwise op with one operand."""
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
        """Appends an elementwise op with two operands."""
        row = ROWS[self.rng.choice(_BINARY)]
        if row.name == "complex":
            self.complex_of_parts()
            return
        name = self.pick(lambda n: self.is_a(n, row.dtypes))
        if name is None:
            return
        if row.name in SHIFTS:
            count: Arg = self.rng.randint(0, 6)
            self.emit(row.name, [Ref(name), count], self.dims[name])
            return
        kinds = row.dtypes if row.name != "nextafter" else "f"
        if self.chance(0.35):
            given = {"f": kinds if self.mixed else kinds.replace("c", ""), "c": "fc"}
            args: list[Arg] = [Ref(name), self.scalar(given.get(self.category(name), "i"))]
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
            self.dtype[a.name] != self.dtype[name] or self.dtype[name] in HALF
            for a in args
            if isinstance(a, Ref)
        ):
            return
        self.emit(row.name, args, dims)

    def complex_of_parts(self) -> None:
        """Appends a complex tensor made of two real ones."""
        name = self.pick(lambda n: self.dtype[n] in ("Float", "Double"))
        other = None if name is None else self.partner(name, "f")
        if name is None or other is None or self.dtype[other] != self.dtype[name]:
            return
        dims = joined_shapes(self.dims[name], self.dims[other], self.one)
        assert dims is not None
        self.emit("complex", [Ref(name), Ref(other)], dims)

    def ternary(self) -> None:
        """Appends an elementwise op with three operands, such as where or clamp."""
        op = self.rng.choice(("where", "where", "lerp", "addcmul", "clamp", "threshold"))
        kinds = {"lerp": "fc", "clamp": "fi", "threshold": "fi"}.get(op, "fic")
        name = self.pick(lambda n: self.is_a(n, kinds))
        if name is None:
            return
        k = {"f": "f", "c": "fc"}.get(self.category(name), "i")
        if op == "clamp":
            ends = sorted((self.rng.randint(-4, 4), self.rng.randint(-4, 4)))
            limits: list[Arg] = [float(e) if k == "f" else e for e in ends]
            if k == "i" and self.chance(0.3):
                # A floating-point limit makes the result floating.
                limits[self.rng.randrange(2)] = ends[0] + 0.5
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
        """Returns a Bool tensor that fits `name` in an elementwise op, or None."""

        def fits(other: str) -> bool:
            return self.dtype[other] == "Bool" and (
                joined_shapes(self.dims[name], self.dims[other], self.one) is not None
            )

        found = self.pick(fits)
        if found is not None:
            return found
        tests = ("eq", "ne") if self.is_a(name, "c") else ("gt", "le")
        made = self.emit(self.rng.choice(tests), [Ref(name), self.scalar("fi")], self.dims[name])
        return made[0] if made else None

    def cast(self) -> None:
        """Appends a cast to a random dtype."""
        name = self.pick()
        assert name is not None
        dtype = self.rng.choice(_DTYPES)
        self.emit("cast", [Ref(name), Dt(dtype)], self.dims[name])

    def copy(self) -> None:
        """Appends a copy."""
        name = self.pick()
        assert name is not None
        self.emit(self.rng.choice(("set", "segment_set")), [Ref(name)], self.dims[name])

    # ------------------------------------------------------------ reductions
    def reduced(self, name: str) -> tuple[list[int], bool, tuple[Dim, ...]]:
        """Draws the axes of a reduction: (axes, keepdim, axes of the result)."""
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
        """Appends a sum, product, minimum or maximum over some axes."""
        op = self.rng.choice(_REDUCTIONS)
        kinds = {"sum": "fibc", "prod": "fic"}.get(op, "fi")
        name = self.pick(lambda n: bool(self.dims[n]) and self.is_a(n, kinds))
        if name is None:
            return
        axes, keep, dims = self.reduced(name)
        kwargs: dict[str, Arg] = {"keepdim": keep} if keep or self.chance(0.3) else {}
        if op in ("sum", "prod") and self.chance(0.1):
            kwargs["dtype"] = Dt(self.rng.choice(("Float", "Double")))
        self.emit(op, [Ref(name)], dims, True, dims=list(axes), **kwargs)

    def moments(self) -> None:
        """Appends a variance, a variance with its mean, or welford over some axes."""
        op = self.rng.choice(("var_mean", "var_mean", "var", "welford"))
        name = self.pick(
            lambda n: (
                bool(self.dims[n])
                and self.is_a(n, "f" if op == "welford" else "fc")
                and (op != "var_mean" or self.dtype[n] not in HALF)
            )
        )
        if name is None:
            return
        axes, keep, dims = self.reduced(name)
        if op == "welford":
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
        """Appends a softmax, or a norm over one axis, as the ops that it consists of."""
        name = self.pick(lambda n: bool(self.dims[n]) and self.dtype[n] in ("Float", "Double"))
        if name is None:
            return
        rank = len(self.dims[name])
        axis = rank - 1 if self.chance(0.7) else self.rng.randrange(rank)
        full = self.dims[name]
        small = tuple(self.one if k == axis else d for k, d in enumerate(full))
        spread = self.chance(0.3)

        def back(short: str) -> list[str]:
            """Expands the result of the reduction to the input's shape again."""
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


class _Stop(Exception):
    """Raised when a statement of a group was rejected."""


def step_ref(name: str) -> Ref:
    """Returns a reference to the value with this name."""
    return Ref(name)


# Statements that bring most values into the domain of an op.
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
