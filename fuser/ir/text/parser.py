"""Parsing of what `fuser.ir.text.printer` prints: ops, sections and fusions.

The grammar of an op is its own text template (`variants()`), so a new op needs no rule here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches

from fuser.ir.dtypes import FROM_TEXT
from fuser.ir.fusion import Alias, Fusion, TensorOp
from fuser.ir.op import Op, value_text
from fuser.ir.ops import nodes
from fuser.ir.provenance import read_origin
from fuser.ir.scalar.constructors import Scalar, Symbol
from fuser.ir.tensor import TensorView
from fuser.ir.text import tokens
from fuser.ir.text.parse_values import MAX_DEPTH, ValueParser
from fuser.ir.text.printer import with_lines
from fuser.ir.text.symbol_bounds import definition_bounds
from fuser.ir.text.templates import (
    Template,
    key_of,
    template_of,
    templates_of,
    tensor_op_classes,
)
from fuser.ir.types import ParallelType
from fuser.support.errors import FuserError, ParseError
from fuser.support.text_cursor import MAX_DIGITS, SPACE, Cursor

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
    """Reads values and ops into one fusion; `ops` are the op classes that it knows."""

    def __init__(
        self,
        cursor: Cursor,
        fusion: Fusion,
        *,
        ops: tuple[type[Op], ...] = (),
        attributes: Mapping[str, Attribute] | None = None,
        bounds: Mapping[str, int | None] | None = None,
    ) -> None:
        """`bounds` are the lower bounds of integer symbols by name; others have none."""
        super().__init__(cursor, fusion, bounds)
        self.templates = templates_of(ops or tensor_op_classes())
        self.attributes = {**ATTRIBUTES, **(attributes or {})}
        # Whether the text says of tensors no more than their loop domains.
        self.is_short = False
        # The numbers of the tensors whose domains sections tell.
        self.declared: frozenset[int] = frozenset()
        # What ops are called by `line_key` -> the user's line.
        self.lines: dict[str, str] = {}
        # The indices of the loops that are being read, and what their names meant before.
        self._indices: list[tuple[str, Symbol | None]] = []

    # ------------------------------------------------------------ ops
    def op(self) -> Op:
        """Read one op: the spelling that fits, else the error that got furthest."""
        c = self.cursor
        c.skip()
        start, key = c.pos, key_of(c.text, c.pos)
        furthest: tuple[int, ParseError | None] = (start - 1, None)
        # A first operand that is a literal (`double(3)`) looks like a call, too.
        bucket = "" if tokens.LITERAL.match(f"{key}(0)") else key
        for template in self.templates.get(bucket, ()):
            c.pos = start
            try:
                return self._fill(template, start)
            except ParseError as error:
                # What was read to its end and found wrong there comes before what did not fit.
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
                raise self.cursor.fail(f"more than {MAX_DEPTH} nested regions", start)
            return self._filled(template, start)
        finally:
            self._depth -= 1
            while len(self._indices) > known:
                name, outer = self._indices.pop()
                self.symbols.pop(name)
                if outer is not None:
                    self.symbols[name] = outer

    def define_index(self, index: Symbol) -> Symbol:
        """Let a name mean this index up to the end of the op that is being read."""
        self._indices.append((index.name, self.symbols.get(index.name)))
        self.symbols[index.name] = index
        self._reserve_symbol(index.name)
        return index

    def region(self, start: int, head: str) -> tuple[Op, ...]:
        """Read the ops of a region of the op at `start`: those that stand further to the right."""
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
                self.scalar() if c.at("(") else c.expect(tokens.WORD, "a word")
                derived.append((word, c.text[at : c.pos], at))
                continue
            if kind == "region":
                found[word] = self.region(start, template.op.region_heads()[word])
                continue
            value = self._field(template, word, kind)
            if template.types[word] == "TensorView" and not isinstance(value, TensorView):
                raise c.fail(f"expected a tensor, found {value_text(value)}", at)
            if word in found and found[word] != value:
                raise c.fail(f"expected {value_text(found[word])} again", at)
            found[word] = value
        try:
            op = template.op(**found)
        except FuserError as error:
            raise c.fail(str(error), start) from error
        if not template.is_older and template_of(op) != template.text:
            raise c.fail(f"this op prints as\n{op}", start)
        for name, text, at in () if self.is_short else derived:
            field, _, method = name.partition(".")
            expected = getattr(op, field)
            expected = value_text(getattr(expected, method)() if method else expected)
            if SPACE.sub(" ", text) != expected:
                raise c.fail(f"expected {expected}", at)
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
        """Read rows of so many values, `{a, b} {c, d} }`; return the values one after the other."""
        c = self.cursor
        found: list[TensorView | Scalar] = []
        while not c.take_if("}"):
            at = c.pos
            c.take("{")
            row = self.values("}")
            if len(row) != length:
                raise c.fail(f"expected {length} values in braces, found {len(row)}", at)
            found += row
        return tuple(found)

    # ------------------------------------------------------------ sections and fusions
    def declarations(self) -> None:
        """Read the sections in [pos, end) about symbols, tensors and lines; the position stays."""
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
        """Read the sections that relate known tensors; the position stays."""
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
        """Whether a section begins here, or the text ends."""
        c = self.cursor
        if c.done() or _SECTION.match(c.text, c.pos, c.end):
            return True
        if found := _HEADER.match(c.text, c.pos, c.end):
            raise c.fail(f"unknown section {found[0]!r}: expected {', '.join(_TITLES)}")
        return False

    def end(self) -> None:
        """Require that only sections follow what has been read."""
        if not self._at_section():
            raise self.cursor.fail(f"expected a section ({', '.join(_TITLES)}) or the end")

    def check_declared(self, tensors: Iterable[TensorView], section: int) -> None:
        """Require that the text from `section` on holds the domains of all tensors: without them
        their layouts would be lost."""
        for tv in tensors:
            if tv.number not in self.declared:
                raise self.cursor.fail(
                    f"the full form lacks the domains of {tv.label}, in section TransformPrinter",
                    section,
                )

    def _symbol(self) -> None:
        name = self.cursor.name(tokens.NAME, "a symbol")
        self.cursor.take(":")
        text = self.cursor.expect(tokens.WORD, "a dtype")[0]
        if text not in FROM_TEXT:
            raise self.cursor.fail(f"unknown dtype {text}")
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
        """Read `Inputs: ... Outputs: ... %kernel_math { ... } // %kernel_math` into the fusion."""
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
                raise c.fail(f"{op.name} is no tensor op", at)
            exprs.append(op)
        c.take("// %kernel_math")
        lined = with_lines(exprs, self.lines)
        self.fusion.exprs = [op for op in lined if isinstance(op, TensorOp)]
        for tv in self.fusion.tensors():
            definition = self.fusion.definition(tv)
            if tv.domain.is_undecided and not isinstance(definition, nodes.ReshapeOp):
                raise c.fail(f"{tv.label}: only a reshape may leave open what its root axes become")

    def reserve_symbols(self) -> None:
        """Keep the fusion from handing out the numbers of the symbols that were read."""
        for name in self.symbols:
            self._reserve_symbol(name)

    def _reserve_symbol(self, name: str) -> None:
        digits = name[1:]
        if digits.isdigit() and len(digits) <= MAX_DIGITS:
            self.fusion.reserve(scalar=int(digits))


def parse_scalar(text: str) -> Scalar:
    """Read one scalar. Raises `ParseError`."""
    parser = Parser(Cursor(text), Fusion())
    value = parser.scalar()
    if not parser.cursor.done():
        raise parser.cursor.fail("expected the end")
    return value


def parse_fusion(text: str) -> Fusion:
    """Read what `fusion_text` (or `print_math`, for plain domains) prints. Raises `ParseError`."""
    return parse_fusion_at(Cursor(text), definition_bounds(text))


def parse_fusion_at(
    cursor: Cursor, bounds: Mapping[str, int | None], *, in_full: int | None = None
) -> Fusion:
    """Read the fusion that [pos, end) of the cursor holds; `bounds` as of `Parser`. `in_full` is
    where a text begins that must tell all domains."""
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


# How an attribute is read, by the type in its declaration.
ATTRIBUTES: dict[str, Attribute] = {
    "int": lambda parser: parser.cursor.integer(),
    "bool": _bool,
    "str": lambda parser: parser.cursor.expect(tokens.WORD, "a word")[0],
    "tuple[bool, ...]": _bools,
    "int | None": lambda parser: parser.cursor.integer(),
    "ParallelType": lambda parser: parser.ptype(),
    "tuple[ParallelType, ...]": _ptypes,
}
