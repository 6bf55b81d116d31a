"""Parses the text of fusions that `fuser.ir.text.printer` generates: ops, sections and axes.

The grammar of an op is the op's own text template (`variants()`), so a new op needs no parsing
rule.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import lru_cache

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
from fuser.ir.dtypes import FROM_TEXT, DataType, category, is_inexact
from fuser.ir.fusion import Alias, Fusion, TensorOp, TensorView, tensor_text
from fuser.ir.op import Op, value_text
from fuser.ir.ops import attention_ops, lookup, matrix_products, nodes, scan_ops
from fuser.ir.provenance import read_origin
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar, Symbol
from fuser.ir.scalar.evaluate import ARITY
from fuser.ir.text.printer import default_dtype, with_lines
from fuser.ir.types import PTYPE_FROM_TEXT, IterType, MemoryType, ParallelType
from fuser.support.errors import FuserError, ParseError, counted
from fuser.support.record import record
from fuser.support.text_cursor import MAX_DIGITS, SPACE, Cursor

# ----------------------------------------------------------------------
# Parsing of values: scalars, axes, tensors and their domain sections.
#
# Any whitespace may separate words. A tensor may be written as its bare name `T3` after a domain
# section or its full text has declared it.

# Deeper than any program, and far below Python's recursion limit.
MAX_DEPTH = 64


class ValueParser:
    """Parses the text of scalars and tensors, and creates them in one fusion.

    `bounds` maps the names of integer symbols to their lower bounds, which the text does not
    contain. Symbols that are not listed are unbounded.
    """

    def __init__(
        self, cursor: Cursor, fusion: Fusion, bounds: Mapping[str, int | None] | None = None
    ) -> None:
        """Starts to read at the position of `cursor`. The values are created in `fusion`.

        `bounds` maps the names of integer symbols to their lower bounds.
        """
        self.cursor = cursor
        self.fusion = fusion
        self.tensors: dict[int, TensorView] = {}
        self.symbols: dict[str, Symbol] = {}
        self._text_of: dict[int, str] = {}
        self._bounds = bounds or {}
        self._depth = 0

    # ------------------------------------------------------------ scalars
    def scalar(self) -> Scalar:
        """Reads a scalar at the cursor, such as `( i0 * 4 )`, and returns it in simplified form."""
        c = self.cursor
        c.skip()
        start = c.pos
        self._depth += 1
        try:
            if self._depth > MAX_DEPTH:
                raise c.fail(f"this scalar has more than {MAX_DEPTH} nested parentheses")
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
            call = c.match(CALL)
            if call:
                at = c.pos
                value = self._call(call[1], c.items(")", self.scalar), at)
            else:
                value = self.scalar()
                op = c.match(INFIX)
                if op:
                    value = _apply(op[0], (value, self.scalar()))
            c.take(")")
            return value
        literal = c.match(LITERAL)
        if literal:
            try:
                return sc.const(_number(literal[2]), FROM_TEXT[literal[1]])
            except ValueError:
                raise c.fail(f"{literal[2]!r} is not a number", literal.start(2)) from None
        number = c.match(INT)
        if number:
            return sc.const(c.number(number))
        if c.at("T") and (TENSOR.match(c.text, c.pos) or BARE_TENSOR.match(c.text, c.pos)):
            raise c.fail("expected a scalar, found a tensor")
        name = c.name(NAME, "a scalar")
        if name in ("true", "false"):
            return sc.const(name == "true")
        if name not in self.symbols:
            self._new_symbol(name, default_dtype(name))
        return self.symbols[name]

    def _call(self, op: str, args: list[Scalar], at: int) -> Scalar:
        arity = 1 if op.startswith("cast_") else ARITY[op]
        if len(args) != arity:
            raise self.cursor.fail(f"{op} expects {counted(arity, 'operand')}, got {len(args)}", at)
        if not op.startswith("cast_"):
            return _apply(op, tuple(args))
        dtype = FROM_TEXT.get(op.removeprefix("cast_"))
        if dtype is None:
            raise self.cursor.unknown("dtype", op.removeprefix("cast_"), FROM_TEXT, at)
        return sc.cast(args[0], dtype)

    def _new_symbol(self, name: str, dtype: DataType) -> None:
        low = self._bounds.get(name) if category(dtype) == "int" else None
        self.symbols[name] = Symbol(name, dtype, lo=low)

    # ------------------------------------------------------------ axes and tensors
    def axis(self) -> IterDomain:
        """Reads an axis at the cursor, such as `ideviceIdx.x4{( ceilDiv(i0, 2) ) ex i1}rf`.

        The parts are: kind `i`, parallel type `deviceIdx.x`, number 4, extent, expanded size after
        `ex`, and the mark `rf` of an axis that the op derived.
        """
        c = self.cursor
        head = c.expect(AXIS, "an axis such as iS0{i0}")
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
        """Reads a tensor at the cursor: its full text, or only its name, such as `T3`.

        The full text declares the tensor if no earlier text does. A name must be declared before.
        """
        c = self.cursor
        c.skip()
        start = c.pos
        bare = c.match(BARE_TENSOR)
        if bare:
            known = self.tensors.get(c.number(bare, 1))
            if known is None:
                raise c.fail(f"T{bare[1]} is not declared", start)
            return known
        head = c.expect(TENSOR, "a tensor")
        number = c.number(head, 1)
        known = self._text_of.get(number)
        if known is not None and c.text.startswith(known, start) and start + len(known) <= c.end:
            c.pos = start + len(known)
            return self.tensors[number]
        tv = self._new_tensor(head, self._spelled())
        if known is None:
            return self._declare(tv, start)
        if tensor_text(tv) != known:
            raise c.fail(f"T{number} was declared as {known}, and must not differ here", start)
        return self.tensors[number]

    def _spelled(self) -> TensorDomain:
        axes: dict[int, IterDomain] = {}
        return TensorDomain.of(tuple(self.cursor.items("]", lambda: self._state(axes))))

    def _new_tensor(self, head: re.Match[str], domain: TensorDomain) -> TensorView:
        """Creates a tensor, after reading the text behind its axes: `ca_pos( 2 ) (DeviceMesh{0})`.

        `ca_pos` is the number of loops that the tensor shares with the ops that read it. `head` is
        the match of the text before the axes: name, memory and dtype. `domain` has the axes.
        """
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
        """Reads all axes of one tensor at the cursor, and declares the tensor.

        The text has the form of `domain_text`: several lines with axes, contiguity and transforms.
        """
        c = self.cursor
        c.skip()
        start = c.pos
        head = c.expect(TENSOR, "a tensor")
        spelled = self._spelled()
        tv = self._new_tensor(head, spelled)
        if tv.number in self.tensors:
            raise c.fail(f"the axes of T{tv.number} appear twice: remove one of the lists", start)
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
            raise c.fail(
                f"the loop domain of {head[0][:-1]} differs from its header: both must list the "
                "same axes",
                start,
            )
        for axis in loop:
            self._hold(axes, axis, at)
        tv.is_cpu_scalar = c.take_if("cpu scalar")
        tv.mesh_is_user_set = c.take_if("mesh set by user")
        if "logical" not in groups:
            raise c.fail(
                f"T{tv.number} has no logical domain: expected a line `logical domain: (..)`", start
            )
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
        """Reads an axis at the cursor, and returns it.

        The text of a tensor contains the same axis at several places. `axes` maps axis numbers to
        the axes that were read before. It is an error if the new text of an axis differs from an
        earlier one.
        """
        c = self.cursor
        c.skip()
        start = c.pos
        return self._hold(axes, self.axis(), start)

    def _hold(self, axes: dict[int, IterDomain], axis: IterDomain, at: int) -> IterDomain:
        held = axes.setdefault(axis.number, axis)
        if held != axis:
            raise self.cursor.fail(
                f"axis {axis.number} was written as {held} before: its text must be the same "
                "everywhere",
                at,
            )
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
        """Reads a parallel type (who executes an axis) at the cursor, such as `deviceIdx.x`."""
        c = self.cursor
        c.skip()
        start = c.pos
        word = c.expect(WORD, "a parallel type")[0]
        if word not in PTYPE_FROM_TEXT:
            raise c.unknown("parallel type", word, PTYPE_FROM_TEXT, start)
        return PTYPE_FROM_TEXT[word]

    def value(self) -> TensorView | Scalar:
        """Reads a tensor or a scalar at the cursor."""
        c = self.cursor
        c.skip()
        is_tensor = TENSOR.match(c.text, c.pos) or BARE_TENSOR.match(c.text, c.pos)
        return self.tensor() if is_tensor else self.scalar()

    def values(self, close: str) -> tuple[TensorView | Scalar, ...]:
        """Reads tensors and scalars, separated by commas, up to and including the text `close`."""
        return tuple(self.cursor.items(close, self.value))


def _number(text: str) -> float | complex:
    """Returns the number that a text denotes, such as `0.5`, or `1,-2.5` for a complex number.

    Raises:
        ValueError: the text is not a number.
    """
    real, comma, imag = text.partition(",")
    return complex(float(real), float(imag)) if comma else float(real)


def _apply(op: str, args: tuple[Scalar, ...]) -> Scalar:
    # `<=` is kept as written, because `sc.le` of integers would change it to `<`.
    return (
        sc.apply(op, *args) if op == "<=" else sc.rebuild(sc.Apply(op, args, args[0].dtype), args)
    )


# ----------------------------------------------------------------------
# Parsing of ops, sections and fusions.

_TITLES = (
    "Aliases",
    "Equal extents",
    "Symbols",
    "TransformPrinter",
    "Provenance",
    "User lines",
)
_SECTION = re.compile(rf"^({'|'.join(_TITLES)}) :[ ]*$", re.MULTILINE)
_HEADER = re.compile(r"^\S[^\n]* :[ ]*$", re.MULTILINE)

_LINE = re.compile(r"(\S[^\n]*?) : ([^\n]*\S)[ ]*$", re.MULTILINE)

Attribute = Callable[["Parser"], object]


class Parser(ValueParser):
    """Parses the text of values and ops, and creates them in one fusion.

    - `ops` are the op classes that may occur, by default all tensor ops.
    - `attributes` has functions that read values of further types of attributes, by the name of the
      type, such as "int".
    - `bounds` maps the names of integer symbols to their lower bounds.
    """

    def __init__(
        self,
        cursor: Cursor,
        fusion: Fusion,
        *,
        ops: tuple[type[Op], ...] = (),
        attributes: Mapping[str, Attribute] | None = None,
        bounds: Mapping[str, int | None] | None = None,
    ) -> None:
        """Starts to read at the position of `cursor`. The class describes the other parameters."""
        super().__init__(cursor, fusion, bounds)
        self.templates = templates_of(ops or tensor_op_classes())
        self.attributes = {**ATTRIBUTES, **(attributes or {})}
        # Whether the text has only the loop domains of tensors (short form).
        self.is_short = False
        # The numbers of the tensors that have a domain section.
        self.declared: frozenset[int] = frozenset()
        # Key of an op (`line_key`) -> the user's line.
        self.lines: dict[str, str] = {}
        # The indices of the loops that are being read, with the symbols that they shadow.
        self._indices: list[tuple[str, Symbol | None]] = []

    # ------------------------------------------------------------ ops
    def op(self) -> Op:
        """Reads one op at the cursor, by the first text template that matches.

        Raises:
            ParseError: no template matches. The error is that of the template of which the longest
                part matched.
        """
        c = self.cursor
        c.skip()
        start, key = c.pos, key_of(c.text, c.pos)
        furthest: tuple[int, ParseError | None] = (start - 1, None)
        # A first operand that is a literal (`double(3)`) looks like a call, too.
        bucket = "" if LITERAL.match(f"{key}(0)") else key
        for template in self.templates.get(bucket, ()):
            c.pos = start
            try:
                return self._fill(template, start)
            except ParseError as error:
                # A check at the end of an op is more specific than a template that did not match.
                at = max(c.pos, int(error.__notes__[-1].removeprefix("position ")))
                if at > furthest[0]:
                    furthest = (at, error)
        raise furthest[1] or self._unknown(key, start)

    def _unknown(self, key: str, start: int) -> ParseError:
        near = get_close_matches(key, [k for k in self.templates if k], n=1)
        advice = f"; did you mean {near[0]}?" if near else ""
        at = self.cursor.text.find(key, start)
        return self.cursor.fail(f"unknown op {key}{advice}", max(at, start))

    def _fill(self, template: Template, start: int) -> Op:
        if "region" not in template.kinds.values():
            return self._filled(template, start)
        known = len(self._indices)
        self._depth += 1
        try:
            if self._depth > MAX_DEPTH:
                raise self.cursor.fail(f"this op is nested in more than {MAX_DEPTH} regions", start)
            return self._filled(template, start)
        finally:
            self._depth -= 1
            while len(self._indices) > known:
                name, outer = self._indices.pop()
                self.symbols.pop(name)
                if outer is not None:
                    self.symbols[name] = outer

    def define_index(self, index: Symbol) -> Symbol:
        """Makes the name of `index` mean this symbol until the end of the op that is being read.

        This method is called while a loop is read. Inside of the loop, the index then hides another
        symbol of the same name. Returns `index`.
        """
        self._indices.append((index.name, self.symbols.get(index.name)))
        self.symbols[index.name] = index
        self._reserve_symbol(index.name)
        return index

    def region(self, start: int, head: str) -> tuple[Op, ...]:
        """Reads the nested ops of an op, such as a loop's body: the lines with deeper indentation.

        `start` is the position of the op. `head` is the line before the nested ops, or "" if there
        is no such line. Returns () if `head` is not "" and the text does not have it.
        """
        c = self.cursor
        c.skip()
        margin = c.column(start)
        if head and not (c.at(head) and c.column(c.pos) == margin):
            return ()
        if head:
            c.take(head)
        ops: list[Op] = []
        while not c.done() and c.column(c.pos) > margin:
            ops.append(self.op())
        return tuple(ops)

    def _filled(self, template: Template, start: int) -> Op:
        c = self.cursor
        found: dict[str, object] = dict(template.attributes)
        derived: list[tuple[str, str, int]] = []
        for is_field, word in template.words:
            if not is_field:
                c.take(word)
                continue
            c.skip()
            at = c.pos
            kind = template.kinds.get(word)
            if kind is None:
                self.scalar() if c.at("(") else c.expect(WORD, "a word")
                derived.append((word, c.text[at : c.pos], at))
                continue
            if kind == "region":
                found[word] = self.region(start, template.op.region_heads()[word])
                continue
            value = self._field(template, word, kind)
            if template.types[word] == "TensorView" and not isinstance(value, TensorView):
                raise c.fail(f"expected a tensor, found {value_text(value)}", at)
            if word in found and found[word] != value:
                raise c.fail(
                    f"{word} is {value_text(value)} here, but {value_text(found[word])} earlier in "
                    "this op: both must be equal",
                    at,
                )
            found[word] = value
        try:
            op = template.op(**found)
        except FuserError as error:
            raise c.fail(str(error), start) from error
        if not template.is_older and template_of(op) != template.text:
            raise c.fail(
                "the text is not complete or not correct: this op would be printed "
                f"differently:\n{op}",
                start,
            )
        for name, text, at in () if self.is_short else derived:
            field, _, method = name.partition(".")
            expected = getattr(op, field)
            expected = value_text(getattr(expected, method)() if method else expected)
            if SPACE.sub(" ", text) != expected:
                raise c.fail(
                    f"{name} is {text} here, but the other fields of this op give {expected}", at
                )
        return op

    def _field(self, template: Template, name: str, kind: str) -> object:
        if kind in ("operand", "result"):
            return self.value() if kind == "operand" else self.tensor()
        if kind in ("operands", "results"):
            self.cursor.take("{")
            length = template.op.rows().get(name)
            return self.values("}") if length is None else self._rows(length)
        read = self.attributes.get(template.types[name])
        assert read is not None, f"no parser for attribute {name}: {template.types[name]}"
        return read(self)

    def _rows(self, length: int) -> tuple[TensorView | Scalar, ...]:
        """Reads values in groups of `length`, and returns one tuple of all values.

        For `length` 2, the text is `{a, b} {c, d} }`. Its last brace closes a brace that was read
        before.
        """
        c = self.cursor
        found: list[TensorView | Scalar] = []
        while not c.take_if("}"):
            at = c.pos
            c.take("{")
            row = self.values("}")
            if len(row) != length:
                raise c.fail(f"expected {counted(length, 'value')} in braces, found {len(row)}", at)
            found += row
        return tuple(found)

    # ------------------------------------------------------------ sections and fusions
    def declarations(self) -> None:
        """Reads the sections that stand after the ops of a text, but are needed to read the ops.

        The sections have the symbols, the equal extents, the axes of tensors, and the users' source
        lines. Afterwards, the cursor is at its old position.
        """
        c = self.cursor
        home = c.pos
        for title, read in (
            ("Symbols", self._symbol),
            ("Equal extents", self._equal),
            ("TransformPrinter", self.domain_section),
            ("User lines", self._line),
        ):
            self._section(title, read, home)
        self.declared = frozenset(self.tensors)
        c.pos = home

    def relations(self) -> None:
        """Reads the sections of a text about updates of inputs and about the reasons of shardings.

        The tensors that they name must have been read before. Afterwards, the cursor is at its old
        position.
        """
        home = self.cursor.pos
        self._section("Aliases", self._alias, home)
        self._section("Provenance", self._origin, home)
        self.cursor.pos = home

    def _section(self, title: str, read: Callable[[], object], home: int) -> None:
        c = self.cursor
        headers = [m for m in _SECTION.finditer(c.text, home, c.end) if m[1] == title]
        if len(headers) > 1:
            raise c.fail(f"section {title} appears twice", headers[1].start())
        for header in headers:
            c.pos = header.end()
            while not self._at_section():
                read()

    def _at_section(self) -> bool:
        """Returns whether the cursor is at the title of a section, such as `Aliases :`, or at the
        end of the text.

        Raises:
            ParseError: a section with an unknown title is at the cursor.
        """
        c = self.cursor
        if c.done() or _SECTION.match(c.text, c.pos, c.end):
            return True
        if found := _HEADER.match(c.text, c.pos, c.end):
            raise c.fail(f"unknown section {found[0]!r}: expected {', '.join(_TITLES)}")
        return False

    def end(self) -> None:
        """Raises `ParseError` if something other than a section, such as `Aliases :`, follows."""
        if not self._at_section():
            raise self.cursor.fail(
                f"expected a section ({', '.join(_TITLES)}) or the end of the text"
            )

    def check_declared(self, tensors: Iterable[TensorView], section: int) -> None:
        """Raises `ParseError` if no section of the text describes all axes of one of `tensors`.

        Without such a section, the memory layout of the tensor would be lost. `section` is the
        position that the error message shows.
        """
        for tv in tensors:
            if tv.number not in self.declared:
                raise self.cursor.fail(
                    f"the full form lacks the domains of {tv.label} in section TransformPrinter",
                    section,
                )

    def _symbol(self) -> None:
        name = self.cursor.name(NAME, "a symbol")
        self.cursor.take(":")
        found = self.cursor.expect(WORD, "a dtype")
        text = found[0]
        if text not in FROM_TEXT:
            raise self.cursor.unknown("dtype", text, FROM_TEXT, found.start())
        self._new_symbol(name, FROM_TEXT[text])

    def _alias(self) -> None:
        out = self.tensor()
        self.cursor.take("->")
        into = self.tensor()
        self.fusion.aliases.append(Alias(out, into, hidden=self.cursor.take_if("hidden")))

    def _origin(self) -> None:
        self.fusion.origins = (*self.fusion.origins, read_origin(self.cursor))

    def _line(self) -> None:
        row = self.cursor.expect(_LINE, "an op and the user's line")
        self.lines.setdefault(row[1], row[2])

    def _equal(self) -> None:
        extent = self.scalar()
        self.cursor.take("=")
        self.fusion.extents.write(extent, self.scalar())

    def math(self) -> None:
        """Reads the inputs, outputs and ops of a fusion at the cursor.

        The text has the form `Inputs: ... Outputs: ... %kernel_math { ... }`.
        """
        c = self.cursor
        c.take("Inputs:")
        while not c.at("Outputs:"):
            self.fusion.inputs.append(self.value())
        c.take("Outputs:")
        while not c.at("%kernel_math"):
            self.fusion.outputs.append(self.tensor())
        c.take("%kernel_math")
        c.take("{")
        exprs: list[TensorOp] = []
        while not c.take_if("}"):
            at = c.pos
            op = self.op()
            if not isinstance(op, TensorOp):
                raise c.fail(
                    f"expected an op that computes tensors, found the host op {op.name}", at
                )
            exprs.append(op)
        c.take("// %kernel_math")
        lined = with_lines(exprs, self.lines)
        self.fusion.exprs = [op for op in lined if isinstance(op, TensorOp)]
        for tv in self.fusion.tensors():
            definition = self.fusion.definition(tv)
            if tv.domain.is_undecided and not isinstance(definition, nodes.ReshapeOp):
                raise c.fail(
                    f"{tv.label}: only the result of a reshape may have root axes that no "
                    "transform connects with its logical axes"
                )

    def reserve_symbols(self) -> None:
        """Marks the numbers of all symbols that were read, such as 3 of `i3`, as used.

        New symbols of the fusion then get other numbers.
        """
        for name in self.symbols:
            self._reserve_symbol(name)

    def _reserve_symbol(self, name: str) -> None:
        digits = name[1:]
        if digits.isdigit() and len(digits) <= MAX_DIGITS:
            self.fusion.reserve(scalar=int(digits))


def parse_scalar(text: str) -> Scalar:
    """Returns the scalar that a text denotes, such as `( i0 * 4 )`.

    Raises:
        ParseError: the text is not that of a scalar.
    """
    parser = Parser(Cursor(text), Fusion())
    value = parser.scalar()
    if not parser.cursor.done():
        raise parser.cursor.fail("expected the end of the text after the scalar")
    return value


def parse_fusion(text: str) -> Fusion:
    """Returns the fusion with the text `text`, which `fusion_text` generated.

    The text of `print_math` is also accepted if all tensors have only the axes that users see.

    Raises:
        ParseError: the text is not that of a fusion. The error has the line and column.
    """
    return parse_fusion_at(Cursor(text), definition_bounds(text))


def parse_fusion_at(
    cursor: Cursor, bounds: Mapping[str, int | None], *, in_full: int | None = None
) -> Fusion:
    """Reads the text of a fusion from the cursor's position up to the cursor's end.

    `bounds` maps the names of integer symbols to their lower bounds. If `in_full` is not None, the
    text must have a section with all axes of each tensor. If such a section is missing, an error is
    raised, which shows the position `in_full` of the text.
    """
    fusion = Fusion()
    parser = Parser(cursor, fusion, bounds=bounds)
    parser.declarations()
    parser.math()
    parser.relations()
    parser.reserve_symbols()
    parser.end()
    if in_full is not None:
        parser.check_declared(fusion.tensors(), in_full)
    cursor.pos = cursor.end
    return fusion


def _bool(parser: Parser) -> bool:
    return parser.cursor.expect(re.compile(r"true|false"), "true or false")[0] == "true"


def _bools(parser: Parser) -> tuple[bool, ...]:
    parser.cursor.take("{")
    return tuple(parser.cursor.items("}", lambda: _bool(parser)))


def _ptypes(parser: Parser) -> tuple[ParallelType, ...]:
    parser.cursor.take("{")
    return tuple(parser.cursor.items("}", parser.ptype))


# The type in an attribute's declaration -> the function that reads its value.
ATTRIBUTES: dict[str, Attribute] = {
    "int": lambda parser: parser.cursor.integer(),
    "bool": _bool,
    "str": lambda parser: parser.cursor.expect(WORD, "a word")[0],
    "tuple[bool, ...]": _bools,
    "int | None": lambda parser: parser.cursor.integer(),
    "ParallelType": lambda parser: parser.ptype(),
    "tuple[ParallelType, ...]": _ptypes,
}


# ----------------------------------------------------------------------
# The text templates of ops as grammar: words to match, fields to read.

# The modules that declare tensor ops; importing them registers all ops that a text may name.
DECLARING = (attention_ops, lookup, matrix_products, nodes, scan_ops)


@record
class Template:
    """One text form of an op, as grammar: words to match and fields to read, in order.

    - `op` is the class of the op, and `text` the form with placeholders such as `{out}`.
    - `words` has pairs: whether the entry is a field, and the word or the name of the field.
    - `attributes` has the values of attributes that follow from this form.
    - `kinds` and `types` have the kind and the declared type of each field.
    - `is_older` marks a form that is still read, but no longer generated.
    """

    op: type[Op]
    text: str
    attributes: Mapping[str, object]
    words: tuple[tuple[bool, str], ...]
    kinds: Mapping[str, str]
    types: Mapping[str, str]
    is_older: bool


_PLACEHOLDER = re.compile(r"\{([\w.]+)\}")
_FUNCTION = re.compile(r"\s*([A-Za-z_](?:[\w.]|::)*)\s*\(")
# Not `==` or `<=`, which may occur in the extents of a result.
_EQUALS = re.compile(r"(?<![=!<>])=(?!=)")
_STATEMENT = re.compile(r"\s*(?!T\d)([A-Za-z_]\w*)")


def key_of(text: str, start: int) -> str:
    """Returns the name of the op whose text is at `start`, as a key for its text forms.

    The name is the first word, or the name of the function after `=`. Returns "" if there is
    neither, as for an operator such as `+`.
    """
    word = _STATEMENT.match(text, start)
    if word:
        return word[1]
    equals = _EQUALS.search(text, start)
    function = _FUNCTION.match(text, equals.end()) if equals else None
    return function[1] if function else ""


@lru_cache(maxsize=16)
def templates_of(ops: tuple[type[Op], ...]) -> Mapping[str, list[Template]]:
    """Returns the text forms of op classes, by the name of the op in its text.

    The names are those of `key_of`. Ops that are written as operators, such as `+`, have the name
    "".
    """
    buckets: dict[str, list[Template]] = {"": []}
    for op in ops:
        seen: set[tuple[str, str]] = set()
        for attributes, text, is_older in _spellings(op):
            mark = (text, repr(sorted(attributes.items(), key=lambda kv: kv[0])))
            if mark in seen:
                continue
            seen.add(mark)
            template = _compiled(op, attributes, text, is_older)
            buckets.setdefault(key_of(text, 0), []).append(template)
    return buckets


def _spellings(op: type[Op]) -> Iterable[tuple[dict[str, object], str, bool]]:
    variants = getattr(op, "variants", None)
    if variants is None:
        if op.TEXT:
            yield {}, op.TEXT, False
    else:
        for attributes, text in variants():
            yield attributes, text, False
    for text in getattr(op, "OLDER", ()):
        yield {}, text, True


def _compiled(
    op: type[Op], attributes: Mapping[str, object], text: str, is_older: bool
) -> Template:
    words: list[tuple[bool, str]] = []
    at = 0
    for field in _PLACEHOLDER.finditer(text):
        words += [(False, w) for w in text[at : field.start()].split()]
        words.append((True, field[1]))
        at = field.end()
    words += [(False, w) for w in text[at:].split()]
    fields = dataclasses.fields(op)  # pyright: ignore[reportArgumentType]
    return Template(
        op,
        text,
        attributes,
        tuple(words),
        {f.name: str(f.metadata["kind"]) for f in fields if "kind" in f.metadata},
        {f.name: str(f.type) for f in fields},
        is_older,
    )


def template_of(op: Op) -> str:
    """Returns the text form of an op, with placeholders such as `{out}` for its fields."""
    template = getattr(op, "template", None)
    return template() if template is not None else op.TEXT


def tensor_op_classes() -> tuple[type[Op], ...]:
    """Returns the classes of all declared tensor ops in declaration order, without base classes."""
    return tuple(
        c
        for c in Op.REGISTRY.values()
        if issubclass(c, attention_ops.TensorOp) and not c.__subclasses__()
    )


# ----------------------------------------------------------------------
# Patterns of the words in program texts.

INT = re.compile(r"-?[0-9]+")
WORD = re.compile(r"[^\s,(){}]+")
INFIX = re.compile(r"<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%<>&|^]")
CALL = re.compile(
    "("
    + "|".join(sorted((re.escape(o) for o in sc.COMPUTE if not INFIX.fullmatch(o)), reverse=True))
    + r"|cast_[\w:<>]+)\("
)
LITERAL = re.compile(
    "(" + "|".join(re.escape(t) for t, d in FROM_TEXT.items() if is_inexact(d)) + r")\(([^()\s]*)\)"
)
DTYPES = "|".join(sorted(map(re.escape, FROM_TEXT), key=len, reverse=True))
TENSOR = re.compile(rf"T([0-9]+)_(sym|[gslt])_({DTYPES})\[")
BARE_TENSOR = re.compile(r"T([0-9]+)(?!\w)")
NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
AXIS = re.compile(
    r"([irb?n])("
    + "|".join(sorted((re.escape(p) for p in PTYPE_FROM_TEXT), key=len, reverse=True))
    + r")([0-9]+)\{"
)


# ----------------------------------------------------------------------
# The lower bounds of the symbols of a program's text, which the text does not contain.

_EXTENT = re.compile(AXIS.pattern + r"(?:[^{}]* ex )?([A-Za-z_]\w*)\}")
_EQUAL = re.compile(r"^ +([A-Za-z_]\w*) = ", re.MULTILINE)
_INPUTS = re.compile(r"Inputs:(.*?)Outputs:|%HostIrContainer\s*\{\s*\((.*?)\)\s*->", re.DOTALL)


def definition_bounds(text: str) -> dict[str, int | None]:
    """Returns the lower bounds of the symbols in the text of a user's definition, by name.

    The text does not contain them. An extent is at least 0. Scalar inputs are unbounded (None).
    """
    return _bounds(text, _scalar_inputs(text), extent=0)


def concretized_bounds(text: str) -> dict[str, int | None]:
    """Returns the lower bounds of the symbols in the text of a compiled program, by their names.

    The text does not contain the bounds. Every extent is at least 1, even if it is a scalar input,
    because inputs with empty axes have a program of their own. Other scalar inputs are unbounded
    (None).
    """
    extents = {m[4] for m in _EXTENT.finditer(text)} | {m[1] for m in _EQUAL.finditer(text)}
    unbounded = [name for name in _scalar_inputs(text) if name not in extents]
    return _bounds(text, unbounded, extent=1)


def _bounds(text: str, unbounded: Iterable[str], *, extent: int) -> dict[str, int | None]:
    return {**dict.fromkeys(NAME.findall(text), extent), **dict.fromkeys(unbounded)}


def _scalar_inputs(text: str) -> list[str]:
    """Returns the names of the scalar inputs in the text of a fusion or a host program."""
    found = _INPUTS.search(text)
    inputs = re.sub(r"\[[^\]]*\]", "", found[1] or found[2] or "") if found else ""
    return NAME.findall(inputs)
