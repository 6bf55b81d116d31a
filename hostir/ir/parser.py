"""Reads a host program from its short or full text, as the function `parse`. `read_program` reads a
file."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from fuser.ir.domain.device_mesh import read_mesh, read_ranks
from fuser.ir.fusion import Fusion
from fuser.ir.op import Op
from fuser.ir.scalar.constructors import ZERO, Symbol
from fuser.ir.text.parser import (
    Attribute,
    Parser,
    concretized_bounds,
    definition_bounds,
    parse_fusion_at,
    tensor_op_classes,
)
from fuser.ir.text.printer import with_lines
from fuser.ir.types import DEVICE_TYPES, ParallelType
from fuser.support.errors import InputError, OptionError, ParseError
from fuser.support.text_cursor import Cursor
from hostir.ir.effects import STREAM_NAME, Stream
from hostir.ir.ops import (
    HOST_OPS,
    NUMBER_OF_STREAMS,
    RANK,
    TRANSFER_KINDS,
    KernelGroup,
    loop_index,
)
from hostir.ir.printer import NOTES, unit_line
from hostir.ir.program import HostIrContainer
from multidevice.sharding.reshard import TeamOf
from multidevice.transports.base.collectives import COLLECTIVES
from multidevice.transports.base.protocol import RED_OPS

# The sections that hold fusions.
_SECTION = re.compile(
    r"^(?:Kernel group ([0-9]+) \(([^()\n]*)\)|Host unit ([0-9]+)) :[ ]*$", re.MULTILINE
)
_UNIT_LINE = re.compile(r"HostUnit([0-9]+): Inputs=[^\n]*")
_CAPTURED = re.compile(r"([0-9]+)[ ]*(?=\n)")
_INDEX_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
# The words by which the full text and the headings of dumps name their form.
_NAMED_FULL = re.compile(r"^//[^\n]*, full form[,:]", re.MULTILINE)
_TYPE_NAME = re.compile(r"[a-z]\w*")


def parse(text: str) -> HostIrContainer:
    """Returns the host program that `text` describes: `str(container)` or `container.full_text()`.

    The short form, `str(container)`, contains no memory layouts, aliases or kernels. Therefore the
    program can be printed and compared, but cannot run. A text without sections for layouts is read
    as the short form, unless a comment before the program says `..., full form:`.

    Raises `ParseError` if `text` is not a valid host program. The error has the line number, the
    column, and the line of the text with a mark at this column.
    """
    headers = list(_SECTION.finditer(text))
    ends = [*(h.start() for h in headers), len(text)]
    parts = [text[h.end() : end] for h, end in zip(headers, ends[1:], strict=True)]
    cursor = Cursor(text, end=ends[0])
    values = Fusion()
    ops = (*tensor_op_classes(), *HOST_OPS)
    # The symbols of a unit are not those of the program.
    kernels = (part for header, part in zip(headers, parts, strict=True) if header[1])
    bounds = concretized_bounds("".join((text[: ends[0]], *kernels)))
    parser = Parser(cursor, values, ops=ops, attributes=ATTRIBUTES, bounds=bounds)
    parser.symbols.update({s.name: s for s in (RANK, NUMBER_OF_STREAMS)})
    parser.is_short = _NAMED_FULL.search(text) is None and "TransformPrinter :" not in text
    home = cursor.pos
    parser.declarations()
    program, lines = _program(parser, values)
    parser.end()
    parser.relations()
    parser.reserve_symbols()
    groups: dict[int, KernelGroup] = {}
    units: dict[int, Fusion] = {}
    for header, part, end in zip(headers, parts, ends[1:], strict=True):
        section = Cursor(text, header.end(), end)
        number = cursor.number(header, 1 if header[1] else 3)
        if number in (groups if header[1] else units):
            what = "kernel group" if header[1] else "host unit"
            raise cursor.fail(
                f"{what} {number} appears twice: each number must be unique", header.start()
            )
        if header[1]:
            groups[number] = KernelGroup(
                number, parse_fusion_at(section, bounds, in_full=header.start()), header[2]
            )
        else:
            units[number] = parse_fusion_at(
                section, definition_bounds(part), in_full=header.start()
            )
    for number, (line, at) in lines.items():
        if number in units and unit_line(number, units[number]) != line:
            wanted = unit_line(number, units[number])
            raise cursor.fail(
                f"this line differs from the section 'Host unit {number}': expected {wanted}", at
            )
    read = HostIrContainer(values, program, groups, is_short=parser.is_short, units=units)
    if not parser.is_short:
        cursor.pos = home
        cursor.skip()
        parser.check_declared(read.tensors(), cursor.pos)
    return read


def _program(parser: Parser, values: Fusion) -> tuple[tuple[Op, ...], dict[int, tuple[str, int]]]:
    """Parses the body of a host program. Returns the ops, and the lines that describe host units
    (separately compiled fusions).

    The lines are a dictionary from the number of a host unit to (text of its line, position of the
    line). The inputs and outputs of the program are added to `values`.
    """
    c = parser.cursor
    c.take("%HostIrContainer")
    c.take("{")
    c.take("(")
    values.inputs = list(parser.values(")"))
    c.take("->")
    c.take("(")
    at = c.pos
    for value in parser.values(")"):
        if not value.is_tensor():
            raise c.fail(f"expected a tensor as output of the program, got the scalar {value}", at)
        values.outputs.append(value)  # pyright: ignore[reportArgumentType]
    c.take(":")
    ops: list[Op] = []
    lines: dict[int, tuple[str, int]] = {}
    while not c.take_if("}"):
        unit = c.match(_UNIT_LINE)
        if unit is None:
            ops.append(parser.op())
        else:
            lines[c.number(unit, 1)] = unit[0].rstrip(), unit.start()
    c.take("// %HostIrContainer")
    return with_lines(ops, parser.lines), lines


def _team(parser: Parser) -> TeamOf:
    """Parses a team of ranks, such as `(0 1)` or `mesh_x of DeviceMesh{{0 1}{2 3}}`."""
    c = parser.cursor
    if c.at("("):
        return TeamOf(read_ranks(c), (ParallelType.mesh_x,))
    names = {p.name: p for p in DEVICE_TYPES}
    ptypes: list[ParallelType] = []
    while not c.take_if("of "):
        word = c.expect(_TYPE_NAME, "a mesh axis")[0]
        if word not in names:
            raise c.fail(f"{word!r} is not a mesh axis: expected one of {', '.join(names)}")
        ptypes.append(names[word])
    return TeamOf(read_mesh(c), tuple(ptypes))


def _one_of(names: tuple[str, ...], what: str) -> Attribute:
    def read(parser: Parser) -> str:
        c = parser.cursor
        c.skip()
        at = c.pos
        word = c.expect(re.compile(r"\w+"), what)[0]
        if word not in names:
            raise c.unknown(what, word, names, at)
        return word

    return read


def _index(parser: Parser) -> Symbol:
    """Parses the name of a loop's index and defines the index as a new symbol.

    The bounds of the index follow the name in the text. This function reads the bounds ahead,
    because the symbol needs them. It does not move the position in the text beyond the name, so the
    parser of the loop reads the bounds again.
    """
    c = parser.cursor
    name = c.name(_INDEX_NAME, "the index of a loop")
    home = c.pos
    if c.take_if("in "):
        start, stop = ZERO, parser.axis().extent
    else:
        c.take("from")
        start = parser.scalar()
        c.take("to")
        stop = parser.scalar()
    c.pos = home
    return parser.define_index(loop_index(name, start, stop))


def _stream(parser: Parser) -> Stream:
    """Parses a stream: a name such as `S0`, or the expression of a number, such as `( i3 %
    numberOfStreams )`."""
    named = parser.cursor.match(STREAM_NAME)
    if named:
        return Stream(name=named[0])
    # In older dumps a captured stream has a number, and nothing closes the line.
    captured = parser.cursor.match(_CAPTURED)
    return Stream(name=f"S{captured[1]}") if captured else Stream(parser.scalar())


ATTRIBUTES: Mapping[str, Attribute] = {
    "Index": _index,
    "IterDomain": Parser.axis,
    "IterDomain | None": Parser.axis,
    "Stream": _stream,
    "TransferKind": _one_of(TRANSFER_KINDS, "transfer"),
    "CommunicationType": _one_of(tuple(COLLECTIVES), "communication type"),
    "RedOp": _one_of(RED_OPS, "reduction"),
    "TeamOf": _team,
}


# ----------------------------------------------------------------------
# Finding the text of a host program in a file: a program, a dump, or what a job printed.

_DUMP = re.compile(
    r"^// host_ir(?:_lowering)? of .*?^// end of host_ir(?:_lowering)? of [^\n]*$",
    re.MULTILINE | re.DOTALL,
)
_HEADING = re.compile(r"// (?:end of )?host_ir(?:_lowering)? of ")
_START = re.compile(r"^[ \t]*%HostIrContainer\b", re.MULTILINE)


def programs_in(text: str) -> list[tuple[int, str]]:
    """Returns all host programs that `text` contains, each as (position, text of the program).

    A dump is a program that `FUSER_DUMP` has printed, between a heading line and an end line. If
    `text` has dumps, only these are returned. Otherwise each line that begins with
    `%HostIrContainer` begins a program, together with the comment lines before it.
    """
    dumps = [(d.start(), d[0]) for d in _DUMP.finditer(text) if _START.search(d[0])]
    if dumps:
        return dumps
    starts = [_with_comment(text, found.start()) for found in _START.finditer(text)]
    return [(start, text[start:end]) for start, end in pairwise((*starts, len(text)))]


def _without_headings(program: str) -> str:
    """Returns the text of a program without the heading line and the end line that `FUSER_DUMP`
    prints around it. Two programs can then be compared, although their headings differ."""
    lines = program.splitlines()
    return "\n".join(line for line in lines if not _HEADING.match(line))


def _with_comment(text: str, start: int) -> int:
    """Returns the position of the first comment line before the program that begins at the position
    `start`. Returns `start` if there is no comment.

    The comment must be included, because it says whether the program is in the full form.
    """
    while start > 0:
        line = text.rfind("\n", 0, start - 1) + 1
        if text[line:start].strip() and not text.startswith("//", line):
            break
        start = line
    return start


def read_program(path: str, *, number: int | None = None) -> HostIrContainer:
    """Returns the host program in the file at `path`. The path `-` means the standard input.

    The file may also contain other lines, such as the output of a job, around the programs. If the
    file has several programs, `number` selects one, counted from 0. `number` may be None if all of
    them have the same text, as when the compiler has printed the same program for several kinds of
    inputs. Line numbers in errors are those of the file.

    Raises:
        InputError: the file does not exist, or is not a text file.
        OptionError: the file has several different programs and `number` is None, or no program has
            this number.
        ParseError: the file has no program.
    """
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        where = f"byte {error.start} is not valid {error.encoding.upper()}"
        raise InputError(f"cannot read {path}: the file is not a text file, {where}") from None
    found = programs_in(text)
    if not found:
        raise ParseError(
            f"there is no host program in {path}: no line begins with %HostIrContainer"
        )
    if number is not None and not 0 <= number < len(found):
        raise OptionError(
            f"{path} has no host program number {number}: it has {len(found)}, numbered from 0"
        )
    if number is None and len({_without_headings(program) for _, program in found}) > 1:
        heads = (f"\n  --program {i}: {p.splitlines()[0]}" for i, (_, p) in enumerate(found))
        raise OptionError(f"{path} has several host programs; choose one:{''.join(heads)}")
    start, program = found[number or 0]
    if NOTES["names"] in program.partition("%HostIrContainer")[0]:
        raise ParseError(
            f"the program in {path} cannot be parsed: it is in the form `names`, which leaves out "
            "the definitions of tensors. FUSER_DUMP=host_ir writes the full form"
        )
    return parse("\n" * text.count("\n", 0, start) + program)
