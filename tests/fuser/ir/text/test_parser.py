"""`fuser.ir.text.parser` reads the text that `fuser.ir.text.printer` prints."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuser.ir.canonical_form import equal_fusions, equal_ops, tensor_key
from fuser.ir.dtypes import INFO, DataType
from fuser.ir.fusion import Fusion
from fuser.ir.op import Op
from fuser.ir.ops import nodes
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.text.parser import Parser, parse_fusion, parse_scalar, tensor_op_classes
from fuser.ir.text.printer import domain_text, fusion_text
from fuser.ir.types import MemoryType, ParallelType
from fuser.support.errors import ParseError
from fuser.support.text_cursor import Cursor

# ------------------------------------------------------------------ scalars
_INTS = st.one_of(
    st.integers(-4, 9).map(sc.const),
    st.sampled_from([sc.Symbol(f"i{n}", DataType.Index) for n in (0, 1, 2, 10)]),
)
_FLOATS = st.one_of(
    st.floats(width=32).map(lambda v: sc.const(v, DataType.Float)),
    st.floats().map(lambda v: sc.const(v, DataType.Double)),
    st.sampled_from([sc.Symbol("d3", DataType.Double), sc.Symbol("f4", DataType.Float)]),
)
_POSITIVE = _INTS.map(lambda x: sc.maximum(x, 1))


def _int_steps(inner: st.SearchStrategy[Scalar]) -> st.SearchStrategy[Scalar]:
    pairs = st.tuples(inner, inner)
    divisions = st.tuples(st.sampled_from([sc.floordiv, sc.mod, sc.ceildiv]), inner, _POSITIVE)
    return st.one_of(
        st.tuples(st.sampled_from([sc.add, sc.sub, sc.mul]), pairs).map(lambda t: t[0](*t[1])),
        divisions.map(lambda t: t[0](t[1], t[2])),
        st.tuples(st.sampled_from([sc.minimum, sc.maximum]), pairs).map(lambda t: t[0](*t[1])),
        st.tuples(st.sampled_from([sc.lt, sc.le, sc.eq]), pairs, pairs).map(
            lambda t: sc.where(t[0](*t[1]), *t[2])
        ),
        inner.map(lambda x: sc.cast(sc.cast(x, DataType.Float), DataType.Index)),
    )


def _float_steps(inner: st.SearchStrategy[Scalar]) -> st.SearchStrategy[Scalar]:
    names = st.sampled_from(["+", "-", "*", "/", "min", "pow"])
    return st.one_of(
        st.tuples(names, inner, inner).map(lambda t: sc.apply(*t)),
        st.tuples(st.sampled_from(["neg", "exp", "sqrt"]), inner).map(lambda t: sc.apply(*t)),
    )


@settings(max_examples=300, deadline=None)
@given(st.recursive(_INTS, _int_steps, max_leaves=8))
def test_integer_scalars_round_trip(x: Scalar) -> None:
    assert str(parse_scalar(str(x))) == str(x)


@settings(max_examples=200, deadline=None)
@given(st.recursive(_FLOATS, _float_steps, max_leaves=6))
def test_floating_scalars_round_trip(x: Scalar) -> None:
    assert parse_scalar(str(x)) == x


@pytest.mark.parametrize(
    "text", ["double(nan)", "double(-inf)", "float(-0)", "double(1e-05)", "double(0.1)", "true"]
)
def test_literals_keep_their_value(text: str) -> None:
    assert str(parse_scalar(text)) == text


@pytest.mark.parametrize("op", ["<", "<=", ">", ">=", "==", "!=", "&&", "||", "%", "/", "<<", "&"])
def test_operators_keep_their_spelling(op: str) -> None:
    """Integer comparisons keep their operator, although some of them are equivalent."""
    if op in ("&&", "||"):
        text = f"( ( i0 < i1 ) {op} ( i1 < i2 ) )"
    else:
        text = f"( i0 {op} 3 )"
    assert str(parse_scalar(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("( i0 + )", "line 1, column 8: expected a scalar"),
        ("( i0 + 1", "expected ')'"),
        ("double(x)", "column 8: 'x' is not a number"),
        ("( i0 / 0 )", "a scalar divides i0 by zero"),
        ("i0 i1", "expected the end"),
        ("", "expected a scalar"),
    ],
)
def test_scalar_errors_mark_the_place(text: str, message: str) -> None:
    with pytest.raises(ParseError) as error:
        parse_scalar(text)
    assert message in str(error.value)


# ------------------------------------------------------------------ domains
_MOVES = st.one_of(
    st.tuples(st.just("split"), st.integers(0, 9), st.integers(1, 5), st.booleans()),
    st.tuples(st.just("merge"), st.integers(0, 9)),
    st.tuples(st.just("reorder"), st.integers(0, 9), st.integers(0, 9)),
    st.tuples(
        st.just("parallelize"),
        st.integers(0, 9),
        st.sampled_from([ParallelType.mesh_x, ParallelType.block_x, ParallelType.stream]),
    ),
    st.tuples(st.just("swizzle1d"), st.integers(0, 9)),
)


def _apply(tv, move) -> None:
    name, at, *rest = move
    at %= len(tv.domain.loop)
    serial = tv.axis(at).ptype is ParallelType.serial
    if name == "split" and serial:
        tv.split(at, rest[0], inner_split=rest[1])
    elif name == "merge" and at + 1 < len(tv.domain.loop) and serial:
        if not tv.axis(at + 1).is_stream:
            tv.merge(at)
    elif name == "reorder":
        tv.reorder({at: rest[0] % len(tv.domain.loop)})
    elif name == "parallelize":
        tv.axis(at).parallelize(rest[0])
    elif name == "swizzle1d":
        tv.swizzle1d(at, ParallelType.mesh_x)


@settings(max_examples=150, deadline=None)
@given(st.lists(_MOVES, max_size=6), st.integers(1, 3), st.booleans())
def test_domains_round_trip(moves: list[tuple], rank: int, is_expanded: bool) -> None:
    fusion = Fusion()
    axes = [fusion.new_axis(fusion.new_extent()) for _ in range(rank)]
    if is_expanded:
        axes.append(fusion.new_axis(sc.ONE, nodes.IterType.broadcast, expanded=fusion.new_extent()))
    tv = fusion.new_tensor(axes, DataType.BFloat16, memory=MemoryType.global_)
    for move in moves:
        _apply(tv, move)
    tv.set_device_mesh([[0, 1], [2, 3]])
    text = domain_text(tv)
    again = Parser(Cursor(text), Fusion()).domain_section()
    assert domain_text(again) == text
    assert tensor_key(again) == tensor_key(tv)


# ------------------------------------------------------------------ ops
_PLACEHOLDER = re.compile(r"\{([\w.]+)\}")
_SAMPLES = {
    "flags": "{true, false}",
    "shape": "{i0, ( i1 * 2 )}",
    "ranges": "{ {0, i0, 1} {1, ( i1 - 1 ), 1} }",
    "widths": "{0, 2, 1, 0}",
    "filler": "double(0.5)",
    "pieces": "{T1, T2}",
    "ends": "{i0, ( i0 + i1 )}",
    "dim": "0",
    "value": "double(0.5)",
    "init": "float(0)",
    "length": "i0",
    "start": "0",
    "step": "2",
    "ptypes": "{deviceIdx.y}",
    "source": "1",
    "target": "0",
}
# Operands that are scalars.
_ATTENTION = {"value": "T8", "dropout_p": "double(0.1)", "is_causal": "true", "scale": "double(2)"}
_SCALARS = {
    "RandomOp": {"a": "0", "b": "2", "seed": "3", "offset": "4", "begin": "{0, 1}"},
    "IndexPutAccumulateOp": {"value": "T8"},
    "SdpaFwdOp": _ATTENTION,
    "SdpaBwdOp": _ATTENTION,
}
_VARIANTS = [
    pytest.param(cls, attributes, text, id=f"{cls.__name__}-{i}")
    for cls in tensor_op_classes()
    for i, (attributes, text) in enumerate(cls.variants())  # pyright: ignore[reportAttributeAccessIssue]
]


@pytest.mark.parametrize(("cls", "attributes", "text"), _VARIANTS)
def test_every_spelling_of_every_op_round_trips(
    cls: type[Op], attributes: dict[str, object], text: str
) -> None:
    """For each template, some dtypes print it, and the parsed op has its attributes."""
    for out, inp in itertools.product(INFO, INFO):
        op = _parse_sample(cls, text, out, inp)
        if op is not None:
            assert type(op) is cls
            assert all(getattr(op, name) == value for name, value in attributes.items())
            return
    raise AssertionError(f"no dtypes give\n{text}")


def _parse_sample(cls: type[Op], text: str, out: DataType, inp: DataType) -> Op | None:
    """Parses a template filled with sample values; None if these dtypes print another template."""
    results = cls.fields_of("result")
    root = " root domain: (iS9{i1}, iS8{i0})\n" if ".Permute" in text else ""

    def section(number: int, dtype: DataType, root: str) -> str:
        name = f"T{number}_l_{INFO[dtype].text}[iS8{{i0}}, iS9{{i1}}]"
        axes = "(iS8{i0}, iS9{i1})"
        return f"{name}\n{root} logical domain: {axes}\n contiguity: t t\n loop domain: {axes}\n"

    parser = Parser(Cursor(""), Fusion())
    tensors = [(1 + i, inp) for i in range(8)] + [(20 + i, out) for i in range(4)]
    for number, dtype in tensors:
        parser.cursor = Cursor(section(number, dtype, root if number >= 20 else ""))
        parser.domain_section()
    operands = iter([f"T{1 + i}" for i in range(8)])
    names = {name: f"T{20 + i}" for i, name in enumerate(results)}
    names |= _SCALARS.get(cls.__name__, {})
    known = {*names, *_SAMPLES}
    names |= {name: next(operands) for name in cls.fields_of("operand") if name not in known}
    names |= {f"{results[0]}.dtype": INFO[out].text}

    def fill(match: re.Match[str]) -> str:
        return names.get(match[1]) or _SAMPLES[match[1]]

    filled = _PLACEHOLDER.sub(fill, text)
    parser.cursor = Cursor(filled)
    try:
        op = parser.op()
    except ParseError:
        return None
    parser.cursor = Cursor(str(op))
    again = parser.op()
    assert equal_ops(again, op)
    assert str(again) == str(op)
    return op


# ------------------------------------------------------------------ fusions
def _fusion() -> Fusion:
    """Returns a fusion with every section: aliases, equal extents, an Int scalar, a mesh,
    duplicates."""
    f = Fusion()
    n, m = f.new_extent(), f.new_extent()
    x = f.new_tensor([f.new_axis(n), f.new_axis(m)], DataType.Float)
    f.add_input(x)
    scale, shift = f.new_symbol(DataType.Double), f.new_symbol(DataType.Int)
    f.add_input(scale)
    f.add_input(shift)

    def like(source, dtype=DataType.Float):
        return f.new_tensor([f.clone_axis(a) for a in source.domain.logical], dtype)

    half = like(x, DataType.Half)
    f.add(nodes.CastOp(half, x))
    y = like(x)
    f.add(nodes.BinaryOp(y, half, scale, kind="mul"))
    z = like(x)
    f.add(nodes.TernaryOp(z, sc.const(True), y, sc.add(shift, 1), kind="where"))
    f.add_output(z)
    f.add_output(z)
    f.add_output(y, x)
    z.outer_split(0, 2)
    z.axis(0).parallelize(ParallelType.mesh_x)
    z.set_device_mesh([0, 1])
    f.unify_extents(n, f.new_extent())
    return f


def test_fusions_round_trip() -> None:
    fusion = _fusion()
    again = parse_fusion(fusion_text(fusion))
    assert fusion_text(again) == fusion_text(fusion)
    assert equal_fusions(again, fusion)


def test_a_parsed_fusion_hands_out_fresh_numbers() -> None:
    fusion = parse_fusion(fusion_text(_fusion()))
    taken = {a.number for tv in fusion.tensors() for a in tv.domain.axes.values()}
    assert fusion.next_axis() not in taken
    assert fusion.new_extent().name == "i6"
    assert fusion.new_tensor([], DataType.Float).number == 4


def test_print_math_parses_without_its_sections() -> None:
    math = parse_fusion(fusion_text(_fusion())).print_math()
    assert parse_fusion(math).print_math() == math


def test_fusions_that_differ_are_unequal() -> None:
    text = fusion_text(_fusion())
    for old, new in (
        ("contiguity: t t", "contiguity: t f"),
        ("   * d3;", "   + d3;"),
        ("T2 -> T0 hidden", "T2 -> T0"),
        ("i5 = i0", "i5 = i1"),
        ("mesh set by user", ""),
        ("i4 : int64_t", "i4 : int"),
    ):
        assert old in text
        changed = parse_fusion(text.replace(old, new, 1))
        assert not equal_fusions(changed, parse_fusion(text)), old


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("= where(", "= wher(", "unknown op wher"),
        ("__float2half(", "__to_double(", "would be printed differently"),
        ("by factor 2 ->", "by factr 2 ->", "expected 'by factor'"),
        ("(DeviceMesh{0 1})", "(DeviceMesh{0 0})", "duplicates"),
        ("loop domain: (iS0{i0}", "loop domain: (iS0{i1}", "differs from its header"),
        (
            "logical domain: (iS0{i0}",
            "logical domain: (iS0{i1}",
            "axis 0 was written as iS0{i1} before",
        ),
        ("   * d3;", "   * d3", "expected ';'"),
    ],
)
def test_errors_name_line_and_mark_it(old: str, new: str, message: str) -> None:
    text = fusion_text(_fusion())
    assert old in text
    with pytest.raises(ParseError, match=r"line \d+, column \d+") as error:
        parse_fusion(text.replace(old, new, 1))
    assert message in str(error.value)
    assert str(error.value).endswith("^")


def test_lines_are_counted_from_wherever_an_error_was_before() -> None:
    cursor = Cursor("a\nbb\n\nccc\n")
    for at, where in ((6, "line 4, column 1"), (1, "line 1, column 2"), (5, "line 3, column 1")):
        assert str(cursor.fail("wrong", at)).startswith(f"{where}: wrong\n")
