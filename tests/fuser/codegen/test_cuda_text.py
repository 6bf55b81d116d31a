"""Tests literals and index texts: the C++ compiler must read back exactly the intended value."""

from __future__ import annotations

import math

import pytest

from fuser.codegen.cuda_text import Writer, literal, scalar_text
from fuser.ir.dtypes import DataType
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Symbol
from fuser.lower.kernel_ir import Body, If, Sync


@pytest.mark.parametrize(
    ("value", "dtype", "text"),
    [
        (0.5, DataType.Float, "0.5f"),
        (3, DataType.Float, "3.0f"),
        (-1.5, DataType.Float, "(-1.5f)"),
        (0.1, DataType.Double, "0.1"),
        (0.1, DataType.Float, "0.10000000149011612f"),
        (1e-30, DataType.Float, "1.0000000031710769e-30f"),
        (1e300, DataType.Float, "float(FUSER_INF)"),
        (-math.inf, DataType.Double, "(-double(FUSER_INF))"),
        (math.nan, DataType.Float, "float(FUSER_NAN)"),
        (7, DataType.Int32, "7"),
        (-7, DataType.Int, "(-7LL)"),
        (-(2**31), DataType.Int32, "(-2147483647 - 1)"),
        (-(2**63), DataType.Int, "(-9223372036854775807LL - 1)"),
        (2**31 + 5, DataType.Int32, "(-2147483643)"),
        (math.inf, DataType.Int, "fm_cast<int64_t>(double(FUSER_INF))"),
        (math.nan, DataType.Int32, "fm_cast<int>(double(FUSER_NAN))"),
        (-1e30, DataType.Int, "fm_cast<int64_t>((-1e+30))"),
        (2.9, DataType.Int, "2LL"),
        (True, DataType.Bool, "true"),
        (1.5, DataType.BFloat16, "fm_cast<__bfloat>(1.5f)"),
    ],
)
def test_literals(value: float, dtype: DataType, text: str) -> None:
    assert literal(value, dtype) == text


def test_index_texts_parenthesise() -> None:
    a, b = (Symbol(n, DataType.Index, lo=1) for n in "ab")
    k = sc.index("k", a)
    assert scalar_text(sc.add(sc.mul(k, 4), 3)) == "4 * k + 3"
    assert scalar_text(sc.sub(k, a)) == "k - a"
    assert scalar_text(sc.sub(0, a)) == "-a"
    assert scalar_text(sc.mod(sc.add(k, b), b)) == "k % b"
    assert scalar_text(sc.floordiv(sc.add(k, 1), sc.mul(b, 2))) == "(k + 1) / (2 * b)"
    assert scalar_text(sc.lt(sc.mul(k, 3), b)) == "(3 * k) < b"
    assert scalar_text(sc.mul(k, 2**33)) == "8589934592LL * k"


@pytest.mark.parametrize(
    ("cond", "flags", "text"),
    [
        (sc.const(True), (), "if (true) {"),
        (sc.const(True), ("f",), "if (f) {"),
        (sc.lt(Symbol("i0", DataType.Index), 4), ("f",), "if (f && i0 < 4) {"),
    ],
)
def test_a_test_has_a_condition(cond: sc.Scalar, flags: tuple[str, ...], text: str) -> None:
    """A predicate is printed with a condition even if its size conditions simplify to true."""
    writer = Writer(depth=0)
    writer.body(Body([If(cond, Body([Sync()]), flags=flags)]))
    assert writer.lines[0].strip() == text
