"""Parsing of values: scalars, axes, tensors and their domain sections, as `fuser.ir.text.printer`
prints.

Whitespace between words is free. A tensor that a domain section declared, or that was spelled out
before, may be written as its bare name `T3`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from fuser.ir.domain.device_mesh import read_mesh
from fuser.ir.domain.tensor_domain import (
    IterDomain,
    MergeTransform,
    Resize,
    SplitTransform,
    Swizzle1D,
    TensorDomain,
    Transform,
    derivation_problem,
)
from fuser.ir.dtypes import FROM_TEXT, DataType, category
from fuser.ir.fusion import Fusion, tensor_text
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar, Symbol
from fuser.ir.scalar.evaluate import ARITY
from fuser.ir.tensor import TensorView
from fuser.ir.text import tokens
from fuser.ir.text.printer import default_dtype
from fuser.ir.types import PTYPE_FROM_TEXT, IterType, MemoryType, ParallelType
from fuser.support.errors import FuserError, ParseError
from fuser.support.text_cursor import Cursor

# Deeper than any program; far from the depth at which Python gives up.
MAX_DEPTH = 64


class ValueParser:
    """Reads scalars and tensors into one fusion."""

    def __init__(
        self, cursor: Cursor, fusion: Fusion, bounds: Mapping[str, int | None] | None = None
    ) -> None:
        """`bounds` are the lower bounds of integer symbols by name; others have none."""
        self.cursor = cursor
        self.fusion = fusion
        self.tensors: dict[int, TensorView] = {}
        self.symbols: dict[str, Symbol] = {}
        self._text_of: dict[int, str] = {}
        self._bounds = bounds or {}
        self._depth = 0

    # ------------------------------------------------------------ scalars
    def scalar(self) -> Scalar:
        """Read a scalar through the simplifying constructors."""
        c = self.cursor
        c.skip()
        start = c.pos
        self._depth += 1
        try:
            if self._depth > MAX_DEPTH:
                raise c.fail(f"more than {MAX_DEPTH} nested parentheses")
            return self._scalar()
        except ParseError:
            raise
        except FuserError as error:
            raise c.fail(str(error), start) from error
        finally:
            self._depth -= 1

    def _scalar(self) -> Scalar:
        c = self.cursor
        if c.take_if("("):
            call = c.match(tokens.CALL)
            if call:
                at = c.pos
                value = self._call(call[1], c.items(")", self.scalar), at)
            else:
                value = self.scalar()
                op = c.match(tokens.INFIX)
                if op:
                    value = _apply(op[0], (value, self.scalar()))
            c.take(")")
            return value
        literal = c.match(tokens.LITERAL)
        if literal:
            try:
                return sc.const(_number(literal[2]), FROM_TEXT[literal[1]])
            except ValueError:
                raise c.fail(f"{literal[2]!r} is not a number", literal.start(2)) from None
        number = c.match(tokens.INT)
        if number:
            return sc.const(c.number(number))
        if c.at("T") and (
            tokens.TENSOR.match(c.text, c.pos) or tokens.BARE_TENSOR.match(c.text, c.pos)
        ):
            raise c.fail("expected a scalar")
        name = c.name(tokens.NAME, "a scalar")
        if name in ("true", "false"):
            return sc.const(name == "true")
        if name not in self.symbols:
            self._new_symbol(name, default_dtype(name))
        return self.symbols[name]

    def _call(self, op: str, args: list[Scalar], at: int) -> Scalar:
        arity = 1 if op.startswith("cast_") else ARITY[op]
        if len(args) != arity:
            raise self.cursor.fail(f"{op} takes {arity} operands, got {len(args)}", at)
        if not op.startswith("cast_"):
            return _apply(op, tuple(args))
        dtype = FROM_TEXT.get(op.removeprefix("cast_"))
        if dtype is None:
            raise self.cursor.fail(f"unknown dtype in {op}")
        return sc.cast(args[0], dtype)

    def _new_symbol(self, name: str, dtype: DataType) -> None:
        low = self._bounds.get(name) if category(dtype) == "int" else None
        self.symbols[name] = Symbol(name, dtype, lo=low)

    # ------------------------------------------------------------ axes and tensors
    def axis(self) -> IterDomain:
        """Read `ideviceIdx.x4{( ceilDiv(i0, 2) ) ex i1}rf`."""
        c = self.cursor
        head = c.expect(tokens.AXIS, "an axis such as iS0{i0}")
        extent = self.scalar()
        expanded = self.scalar() if c.take_if("ex ") else None
        c.take("}")
        rfactor = c.text.startswith("rf", c.pos)
        c.pos += 2 * rfactor
        return IterDomain(
            c.number(head, 3),
            IterType(head[1]),
            extent,
            ptype=PTYPE_FROM_TEXT[head[2]],
            expanded=expanded,
            rfactor=rfactor,
        )

    def tensor(self) -> TensorView:
        """Read a tensor, spelled out (the first time declares it) or as a known bare name."""
        c = self.cursor
        c.skip()
        start = c.pos
        bare = c.match(tokens.BARE_TENSOR)
        if bare:
            known = self.tensors.get(c.number(bare, 1))
            if known is None:
                raise c.fail(f"T{bare[1]} is not declared", start)
            return known
        head = c.expect(tokens.TENSOR, "a tensor")
        number = c.number(head, 1)
        known = self._text_of.get(number)
        if known is not None and c.text.startswith(known, start) and start + len(known) <= c.end:
            c.pos = start + len(known)
            return self.tensors[number]
        tv = self._new_tensor(head, self._spelled())
        if known is None:
            return self._declare(tv, start)
        if tensor_text(tv) != known:
            raise c.fail(f"T{number} was declared as {known}", start)
        return self.tensors[number]

    def _spelled(self) -> TensorDomain:
        axes: dict[int, IterDomain] = {}
        return TensorDomain.of(tuple(self.cursor.items("]", lambda: self._state(axes))))

    def _new_tensor(self, head: re.Match[str], domain: TensorDomain) -> TensorView:
        """Read the suffixes and return a tensor that the fusion does not know yet."""
        c = self.cursor
        compute_at, mesh = 0, None
        if c.take_if("ca_pos("):
            compute_at = c.integer()
            c.take(")")
        if c.take_if("(DeviceMesh"):
            c.pos -= len("DeviceMesh")
            mesh = read_mesh(c)
            c.take(")")
        tv = self.fusion.new_tensor(
            domain,
            FROM_TEXT[head[3]],
            memory=MemoryType(head[2]),
            mesh=mesh,
            number=c.number(head, 1),
        )
        tv.compute_at = compute_at
        return tv

    def _declare(self, tv: TensorView, start: int) -> TensorView:
        problem = derivation_problem(tv.domain)
        if problem:
            raise self.cursor.fail(f"T{tv.number}: {problem}", start)
        self.tensors[tv.number] = tv
        self._text_of[tv.number] = tensor_text(tv)
        for number in tv.domain.axes:
            self.fusion.reserve(axis=number)
        return tv

    def domain_section(self) -> TensorView:
        """Read one tensor's domain section: header, root, logical, allocation, transforms, loop."""
        c = self.cursor
        c.skip()
        start = c.pos
        head = c.expect(tokens.TENSOR, "a tensor")
        spelled = self._spelled()
        tv = self._new_tensor(head, spelled)
        if tv.number in self.tensors:
            raise c.fail(f"T{tv.number} has two domain sections", start)
        axes: dict[int, IterDomain] = {}
        groups: dict[str, tuple[IterDomain, ...]] = {}
        for title in ("root", "logical", "allocation"):
            if c.take_if(f"{title} domain: ("):
                groups[title] = tuple(self.cursor.items(")", lambda: self._state(axes)))
        c.take("contiguity:")
        flags: list[bool | None] = []
        while found := c.match(re.compile(r"[tfn]\b")):
            flags.append({"t": True, "f": False, "n": None}[found[0]])
        transforms: list[Transform] = []
        while not c.take_if("loop domain: ("):
            transforms.append(self._transform(axes))
        at = c.pos
        loop = tuple(self.cursor.items(")", self.axis))
        if loop != spelled.loop:
            raise c.fail(f"the loop domain of {head[0][:-1]} differs from its header", start)
        for axis in loop:
            self._hold(axes, axis, at)
        tv.is_cpu_scalar = c.take_if("cpu scalar")
        tv.mesh_is_user_set = c.take_if("mesh set by user")
        if "logical" not in groups:
            raise c.fail(f"T{tv.number} has no logical domain", start)
        tv.domain = TensorDomain.of(
            groups["logical"],
            loop,
            root=groups.get("root", ()),
            allocation=groups.get("allocation", ()),
            contiguity=flags,
            transforms=transforms,
            between=axes.values(),
        )
        return self._declare(tv, start)

    def _state(self, axes: dict[int, IterDomain]) -> IterDomain:
        """Read an axis of one tensor, which has one state wherever it is written."""
        c = self.cursor
        c.skip()
        start = c.pos
        return self._hold(axes, self.axis(), start)

    def _hold(self, axes: dict[int, IterDomain], axis: IterDomain, at: int) -> IterDomain:
        held = axes.setdefault(axis.number, axis)
        if held != axis:
            raise self.cursor.fail(f"axis {axis.number} was {held} before", at)
        return held

    def _transform(self, axes: dict[int, IterDomain]) -> Transform:
        c = self.cursor

        def number() -> int:
            return self._state(axes).number

        for title, is_inner in (("Split:", True), ("Outer split:", False)):
            if c.take_if(title):
                inp = number()
                c.take("by factor")
                factor = self.scalar()
                c.take("->")
                outer = number()
                c.take(",")
                return SplitTransform(inp, outer, number(), factor, is_inner)
        if c.take_if("Merge:"):
            outer = number()
            c.take("and")
            inner = number()
            c.take("->")
            return MergeTransform(outer, inner, number())
        if c.take_if("Resize:"):
            inp = number()
            c.take("by")
            left = self.scalar()
            c.take("and")
            right = self.scalar()
            c.take("->")
            return Resize(inp, number(), left, right)
        out = number()
        c.take("=")
        c.take("Swizzle1D(")
        inp = number()
        c.take(", parallelType=")
        ptype = self.ptype()
        c.take(")")
        return Swizzle1D(inp, out, ptype)

    def ptype(self) -> ParallelType:
        """Read the print form of a parallel type: `deviceIdx.x`."""
        c = self.cursor
        c.skip()
        start = c.pos
        word = c.expect(tokens.WORD, "a parallel type")[0]
        if word not in PTYPE_FROM_TEXT:
            raise c.fail(f"unknown parallel type {word!r}", start)
        return PTYPE_FROM_TEXT[word]

    def value(self) -> TensorView | Scalar:
        """Read a tensor or a scalar."""
        c = self.cursor
        c.skip()
        is_tensor = tokens.TENSOR.match(c.text, c.pos) or tokens.BARE_TENSOR.match(c.text, c.pos)
        return self.tensor() if is_tensor else self.scalar()

    def values(self, close: str) -> tuple[TensorView | Scalar, ...]:
        """Read comma separated tensors and scalars up to and including `close`."""
        return tuple(self.cursor.items(close, self.value))


def _number(text: str) -> float | complex:
    """Read `0.5`, or the two parts `1,-2.5`; raises `ValueError` for anything else."""
    real, comma, imag = text.partition(",")
    return complex(float(real), float(imag)) if comma else float(real)


def _apply(op: str, args: tuple[Scalar, ...]) -> Scalar:
    # As it stands: `sc.le` of integers would write it as `<`.
    return (
        sc.apply(op, *args) if op == "<=" else sc.rebuild(sc.Apply(op, args, args[0].dtype), args)
    )
