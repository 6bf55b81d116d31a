"""Builds a random program statement by statement, and evaluates each call with the oracle
meanwhile.

Because all values are known, the generators keep only programs whose results are useful to compare:
mostly finite, mostly certain, of bounded size. All random choices come from one seeded generator.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from tools.fuzz.drawn_random import DrawnRandom
from tools.fuzz.oracle import Env, run_stmt
from tools.fuzz.program import (
    VERSION,
    Arg,
    CallArg,
    Dt,
    Layout,
    Output,
    Program,
    Ref,
    ScalarInput,
    Size,
    Stmt,
    TensorArg,
    TensorInput,
    operands,
)
from tools.fuzz.table import DTYPES
from tools.fuzz.tensors import make_tensor
from tools.fuzz.values import InvalidProgram, Num, Val, exact, wide

# A number, of which a program is a function; or the source of random numbers itself.
Seed = int | random.Random

# The largest number of elements of a random tensor: the oracle computes them in Python.
MOST_RANDOM = 1024
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 23, 31, 37, 61, 97, 127, 131, 251, 257)


def seeded(kind: str, seed: int) -> DrawnRandom:
    """Returns the random numbers of the program of a kind with this seed."""
    return DrawnRandom(random.Random(f"{kind}/{VERSION}/{seed}").randrange)


@dataclass(frozen=True)
class Dim:
    """An axis: its extent in every call, and whether the definition has it as a constant."""

    vec: tuple[int, ...]
    static: bool
    expanded: bool = False

    @property
    def is_broadcast(self) -> bool:
        """Whether the definition has extent 1 for the axis, and the axis is not expanded."""
        return self.static and not self.expanded and all(n == 1 for n in self.vec)


def joined(a: Dim, b: Dim) -> Dim | None:
    """Returns the axis of an elementwise result; None where the operands do not fit."""
    if a.is_broadcast:
        return b
    if b.is_broadcast:
        return a
    if a.vec != b.vec:
        return None
    return Dim(a.vec, a.static or b.static, a.expanded and b.expanded)


def joined_shapes(a: Sequence[Dim], b: Sequence[Dim], one: Dim) -> tuple[Dim, ...] | None:
    """Returns the axes of an elementwise result; None where the operands do not fit."""
    rank = max(len(a), len(b))
    padded = [(one,) * (rank - len(s)) + tuple(s) for s in (a, b)]
    out = [joined(x, y) for x, y in zip(*padded, strict=True)]
    return None if any(d is None for d in out) else tuple(d for d in out if d is not None)


class Builder:
    """A program under construction."""

    def __init__(self, kind: str, seed: Seed, *, calls: int, cap: int) -> None:
        self.rng = seeded(kind, seed) if isinstance(seed, int) else seed
        self.ncalls = calls
        self.cap = cap
        self.inputs: list[TensorInput | ScalarInput] = []
        self.stmts: list[Stmt] = []
        self.args: list[list[CallArg]] = [[] for _ in range(calls)]
        self.envs: list[Env] = [{} for _ in range(calls)]
        self.dims: dict[str, tuple[Dim, ...]] = {}
        self.dtype: dict[str, str] = {}
        self.uses: dict[str, int] = {}
        self.scalars: list[str] = []
        self.refused = 0
        self._next = 0

    # ------------------------------------------------------------ drawing
    def chance(self, p: float) -> bool:
        """Returns True with probability `p`."""
        return self.rng.random() < p

    def constant(self, n: int) -> Dim:
        """Returns an axis whose extent is the constant `n`."""
        return Dim((n,) * self.ncalls, True)

    @property
    def one(self) -> Dim:
        """Returns an axis with the constant extent 1."""
        return self.constant(1)

    def extent(self) -> int:
        """Draws an extent: mostly small ones, primes and powers of two, sometimes 0 or 1."""
        rng, r = self.rng, self.rng.random()
        if r < 0.04:
            return 0
        if r < 0.18:
            return 1
        if r < 0.42:
            return rng.randint(2, 8)
        if r < 0.60:
            return rng.choice([p for p in _PRIMES if p <= max(self.cap, 7)])
        if r < 0.86:
            return max(1, 2 ** rng.randint(1, 8) + rng.choice((0, 0, 0, -1, 1)))
        if r < 0.95:
            return rng.choice((3, 5, 7, 12, 96)) * rng.randint(1, 6)
        return rng.randint(1000, 4099) if self.cap >= 4096 else rng.randint(9, 200)

    def new_dim(self) -> Dim:
        """Draws an axis: constant, or with an extent for each call."""
        if self.chance(0.4):
            return self.constant(self.extent())
        vec = [self.extent() for _ in range(self.ncalls)]
        if self.ncalls > 1 and self.chance(0.4):
            vec[self.rng.randrange(self.ncalls)] = self.rng.choice((0, 1, 1))
        return Dim(tuple(vec), False)

    def fits(self, dims: Sequence[Dim]) -> bool:
        """Whether a tensor with these axes has at most `cap` elements in every call."""
        return all(
            math.prod(max(d.vec[m], 1) for d in dims) <= self.cap for m in range(self.ncalls)
        )

    def pick(self, wanted: Callable[[str], bool] = lambda _: True) -> str | None:
        """Draws a tensor that `wanted` accepts: a recent one, an often used one, or any; None
        without one.
        """
        names = [n for n in self.dims if wanted(n)]
        if not names:
            return None
        r = self.rng.random()
        if r < 0.5:
            return self.rng.choice(names[-3:])
        if r < 0.8:
            return max(self.rng.sample(names, min(3, len(names))), key=lambda n: self.uses[n])
        return self.rng.choice(names)

    def is_a(self, name: str, kinds: str) -> bool:
        """Whether the dtype of a tensor has one of these categories: the letters f, i, b, c."""
        return self.category(name) in kinds

    def category(self, name: str) -> str:
        """Returns the category of a tensor's dtype: f (floating), i (integer), b (Bool) or c
        (complex).
        """
        return DTYPES[self.dtype[name]].category[0]

    # ------------------------------------------------------------ values
    def fresh(self, prefix: str) -> str:
        """Returns a new name with this prefix."""
        self._next += 1
        return f"{prefix}{self._next}"

    def add_input(
        self,
        dims: Sequence[Dim],
        dtype: str,
        layout: Layout,
        flags: bool | tuple[bool | None, ...],
        stride_order: tuple[int, ...],
        *,
        offset: int,
        fill: str | Sequence[str],
    ) -> str:
        """Appends a tensor input; `fill` holds for all calls, or has one entry for each."""
        fills = (fill,) * self.ncalls if isinstance(fill, str) else fill
        name = self.fresh("x")
        shape = tuple(d.vec[0] if d.static and not d.expanded else -1 for d in dims)
        shape = tuple(d.vec[0] if d.static else n for d, n in zip(dims, shape, strict=True))
        self.inputs.append(TensorInput(name, dtype, shape, flags, stride_order, layout))
        for m in range(self.ncalls):
            sizes = tuple(d.vec[m] for d in dims)
            seed = self.rng.randrange(2**31)
            self.args[m].append(TensorArg(sizes, offset, fills[m], seed))
            like = DTYPES[dtype].torch
            t = make_tensor(sizes, layout.strides(sizes), offset, like, fills[m], seed)
            self.envs[m][name] = exact(wide(t).clone(), dtype)
        self._register(name, tuple(dims), dtype)
        return name

    def add_scalar(self, dtype: str, values: Sequence[int | float | complex | bool]) -> str:
        """Appends a scalar input with these values, one for each call; returns its name."""
        name = self.fresh("n")
        self.inputs.append(ScalarInput(name, dtype))
        for m, value in enumerate(values):
            self.args[m].append(value)
            self.envs[m][name] = Num(value, dtype)
        self.scalars.append(name)
        return name

    def _register(self, name: str, dims: tuple[Dim, ...], dtype: str) -> None:
        self.dims[name], self.dtype[name], self.uses[name] = dims, dtype, 0

    def values(self, name: str) -> list[Val]:
        """Returns the oracle's value of a tensor in each call."""
        found = [env[name] for env in self.envs]
        assert all(isinstance(v, Val) for v in found)
        return found  # pyright: ignore[reportReturnType]

    def size(self, name: str, axis: int) -> Arg:
        """Returns an argument for an extent: a number where it is constant, else an
        expression.
        """
        dim = self.dims[name][axis]
        if dim.static and self.chance(0.8):
            return dim.vec[0]
        is_listed = len(self.dims[name]) > 1 and self.chance(0.15)
        return Ref(self.sizes(name)[axis]) if is_listed else Size(name, axis)

    def sizes(self, name: str) -> tuple[str, ...]:
        """Appends a statement that names all extents of a tensor with several axes."""
        stmt = Stmt(tuple(self.fresh("s") for _ in self.dims[name]), "shape", (Ref(name),))
        for env in self.envs:
            run_stmt(stmt, env)
        self.stmts.append(stmt)
        self.uses[name] += 1
        return stmt.outs

    def add_random(self, sizes: Sequence[Arg], dims: Sequence[Dim], dtype: str) -> list[str]:
        """Appends random numbers whose seed is a scalar input."""
        if any(math.prod(d.vec[m] for d in dims) > MOST_RANDOM for m in range(self.ncalls)):
            return []
        keys = [
            self.add_scalar("Int", [self.rng.randrange(limit) for _ in range(self.ncalls)])
            for limit in (2**62, 2**34)
        ]
        # The seed and the offset are too large for arithmetic.
        self.scalars = [s for s in self.scalars if s not in keys]
        op = self.rng.choice(("uniform", "uniform", "normal"))
        ends: list[Arg] = [self.rng.choice((0.0, -0.75, 1.0)), self.rng.choice((1.0, 2.5))]
        seed, offset = map(Ref, keys)
        args = [*ends, list(sizes)]
        return self.emit(op, args, dims, dtype=Dt(dtype), rng_seed=seed, rng_offset=offset)

    # ------------------------------------------------------------ statements
    def emit(
        self, op: str, args: Sequence[Arg], axes: Sequence[Dim], careful: bool = True, **named: Arg
    ) -> list[str]:
        """Appends a statement whose result has the axes `axes`.

        Returns the name of the result in a list, [] if the statement was rejected.
        """
        return self.emit_many(op, args, [axes], careful, 0, **named)

    def emit_many(
        self,
        op: str,
        args: Sequence[Arg],
        shapes: Sequence[Sequence[Dim]],
        careful: bool = True,
        hidden: int = 0,
        **named: Arg,
    ) -> list[str]:
        """Appends a statement with several results.

        The last `hidden` results are not tensors that other statements may use.
        """
        names = [self.fresh("t") for _ in shapes]
        more = [self.fresh("s") for _ in range(hidden)]
        if not all(self.fits(s) for s in shapes):
            return []
        stmt = Stmt((*names, *more), op, tuple(args), tuple(named.items()))
        for m, env in enumerate(self.envs):
            try:
                run_stmt(stmt, env)
            except InvalidProgram:
                self.refused += 1
                return []
            for name, shape in zip(names, shapes, strict=True):
                value = env[name]
                expected = tuple(d.vec[m] for d in shape)
                assert isinstance(value, Val), stmt
                assert tuple(value.ref.shape) == expected, (stmt, value.ref.shape, expected)
        if careful and not all(self._is_tame(v) for n in names for v in self.values(n)):
            return []
        self.stmts.append(stmt)
        for name, shape in zip(names, shapes, strict=True):
            value = self.envs[0][name]
            assert isinstance(value, Val)
            self._register(name, tuple(shape), value.dtype)
        for name in operands(stmt):
            if name in self.uses:
                self.uses[name] += 1
        return [*names, *more]

    def emit_scalar(self, op: str, args: Sequence[Arg]) -> str | None:
        """Appends a statement over scalars only; returns the name of its result, None if it was
        rejected.
        """
        name = self.fresh("s")
        stmt = Stmt((name,), op, tuple(args))
        for env in self.envs:
            try:
                run_stmt(stmt, env)
            except InvalidProgram:
                return None
            value = env[name]
            assert isinstance(value, Num)
            if abs(value.value) > 1e6:
                return None
        self.stmts.append(stmt)
        return name

    def _is_tame(self, v: Val) -> bool:
        if v.ref.numel() == 0:
            return True
        odd = torch.isinf(v.bound)
        if v.ref.is_floating_point() or v.ref.is_complex():
            odd = odd | ~torch.isfinite(v.ref) | (v.ref.abs() > 1e5)
        elif v.ref.dtype is not torch.bool:
            odd = odd | (v.ref.abs() > 10**6)
        limit = 0.25 if self.chance(0.95) else 0.9
        return float(odd.double().mean()) <= limit

    # ------------------------------------------------------------ the end
    def program(self, outputs: Sequence[Output]) -> Program:
        """Returns the program without the statements that no output needs."""
        whole = Program(
            tuple(self.inputs),
            tuple(self.stmts),
            tuple(outputs),
            tuple(tuple(a) for a in self.args),
        )
        return without_dead(whole, keep_inputs=self.chance(0.2))


def without_dead(program: Program, *, keep_inputs: bool = False) -> Program:
    """Removes statements that no output needs, and inputs too unless `keep_inputs` is set."""
    needed = {o.name for o in program.outputs} | {o.alias for o in program.outputs if o.alias}
    kept: list[Stmt] = []
    for stmt in reversed(program.stmts):
        if needed & set(stmt.outs):
            kept.append(stmt)
            needed |= set(operands(stmt))
    alive = [keep_inputs or i.name in needed for i in program.inputs]
    if not any(alive):
        alive[0:1] = [True]
    names = {i.name for i, a in zip(program.inputs, alive, strict=True) if a}
    names |= {n for s in kept for n in s.outs}
    return replace(
        program,
        inputs=tuple(i for i, a in zip(program.inputs, alive, strict=True) if a),
        stmts=tuple(reversed(kept)),
        calls=tuple(
            tuple(g for g, a in zip(call, alive, strict=True) if a) for call in program.calls
        ),
        annotations=tuple(a for a in program.annotations if a.name in names),
        streams=tuple(s for s in program.streams if s.name in names),
    )


__all__ = ["Builder", "Dim", "Ref", "Seed", "joined_shapes", "seeded", "without_dead"]
