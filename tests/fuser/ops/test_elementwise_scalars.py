"""Elementwise ops on scalars only: the host computes them as torch does in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from fuser import FusionDefinition, ops
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.compiled import Computed
from fuser.ir.scalar.constructors import Number, Scalar, Symbol
from fuser.ir.text.parser import parse_fusion
from fuser.ir.text.printer import fusion_text
from fuser.ops.define import define_scalar, define_tensor
from fuser.ops.rows import ROWS
from fuser.support.errors import DtypeError
from tools.fuzz.ops.elementwise import BOOL_FN
from tools.fuzz.table import ROWS as REFERENCES
from tools.fuzz.table import SHIFTS, Row

D = DataType
FLOATS = (0.5, -2.5, 3.0, 0.0, -0.0, 1.0, 7.25, 1e300, math.inf, -math.inf, math.nan)
INTEGERS = (-(2**62), -9, -1, 0, 1, 2, 6, 2**40 + 1)
BOOLS = (False, True)
# On the host, divisions by 0 are errors.
_DIVISIONS = ("div", "mod", "fmod", "remainder")


def _operands(row: Row, values: Sequence[Number]) -> list[list[Number]]:
    """Returns the operands of calls: each value with itself and with its neighbours in the list."""
    n = len(values)
    calls = [
        [values[(i + k * step) % n] for k in range(row.arity)]
        for i in range(n)
        for step in (0, 1, 3)
    ]
    if row.rule == "select":
        calls = [[i % 2 == 0, *call[1:]] for i, call in enumerate(calls)]
    return calls


def _is_defined(row: Row, call: Sequence[Number]) -> bool:
    """Whether the call has a defined value.

    No integer is divided by 0, shifts are below the width, and results fit into 64 bits. The sign
    of a NaN is not defined.
    """
    if any(isinstance(v, float) for v in call):
        return not (row.zero_sign and any(v != v for v in call))
    if row.name in _DIVISIONS:
        return call[1] != 0
    if row.name == "pow":
        return 0 <= call[1] < 7 and abs(call[0]) < 10
    if row.name in SHIFTS:
        return 0 <= call[1] < 64
    return not (row.rule == "default" and max(abs(v) for v in call) > 2**31)


def _expected(row: Row, call: Sequence[Number], dtype: DataType) -> torch.Tensor:
    """Returns torch's result for 0-dim tensors of the widest dtype."""
    if dtype is D.Bool and row.rule in ("default", "int") and row.name in BOOL_FN:
        return BOOL_FN[row.name](*map(torch.tensor, call))
    is_float = dtype in (D.Double, D.Float) or row.rule == "float"
    wide = torch.float64 if is_float else torch.int64
    xs = [torch.tensor(v, dtype=wide) for v in call]
    if row.rule == "select":
        xs[0] = torch.tensor(call[0])
    if row.name == "logical_right_shift":
        return row.fn(*xs, 64)
    return (row.fn if is_float or row.int_fn is None else row.int_fn)(*xs)


def _dtypes(row: Row) -> list[tuple[DataType, Sequence[Number]]]:
    found: list[tuple[DataType, Sequence[Number]]] = []
    if "f" in row.dtypes:
        found.append((D.Double, FLOATS))
    if "i" in row.dtypes:
        found.append((D.Int, INTEGERS))
    if "b" in row.dtypes:
        found.append((D.Bool, BOOLS))
    return found


def _symbol(dtype: DataType = D.Double) -> Symbol:
    made = define_scalar(None, dtype)
    assert isinstance(made, Symbol)
    return made


def _apply(name: str, args: Sequence[Scalar]) -> Scalar:
    result = getattr(ops, name)(*args)
    assert isinstance(result, Scalar)
    return result


def test_every_op_that_takes_scalars_has_a_reference() -> None:
    without = {"addcmul", "cast", "set", "imag"}  # below
    assert {name for name, row in ROWS.items() if row.takes_scalars} == {*REFERENCES} | without


@pytest.mark.parametrize("name", REFERENCES)
def test_values_are_those_of_torch(name: str) -> None:
    """A call on symbols, evaluated and compiled, and a call on constants have the same value."""
    row = REFERENCES[name]
    for dtype, values in _dtypes(row):
        types = [dtype] * row.arity
        if row.rule == "select":
            types[0] = D.Bool
        with FusionGuard(Fusion()):
            symbols = [_symbol(d) for d in types]
            made = _apply(name, symbols)
            compiled = Computed([made])
            for call in _operands(row, values):
                if not _is_defined(row, call):
                    continue
                expected = _expected(row, call, dtype)
                bound = dict(zip(symbols, call, strict=True))
                constants = [define_scalar(v, d) for v, d in zip(call, types, strict=True)]
                folded = _apply(name, constants)
                got = [sc.evaluate(made, bound), *compiled(bound), sc.evaluate(folded, {})]
                assert folded.dtype is made.dtype
                expected = expected.bool() if made.dtype is D.Bool else expected
                for value in got:
                    assert isinstance(value, bool) is (made.dtype is D.Bool), (name, call, value)
                    torch.testing.assert_close(
                        torch.tensor(value, dtype=expected.dtype),
                        expected,
                        rtol=1e-13,
                        atol=1e-300,
                        equal_nan=True,
                        msg=lambda m: f"{name}{call} of {dtype.name}: {m}",  # noqa: B023
                    )


def test_integers_become_float_where_tensors_do() -> None:
    with FusionGuard(Fusion()):
        n = _symbol(D.Int)
        made = ops.erf(n)
        assert made.dtype is D.Float and sc.evaluate(made, {n: 1}) == pytest.approx(math.erf(1.0))
        with pytest.raises(DtypeError, match="operand must have a floating or complex dtype"):
            ops.silu(n)


@pytest.mark.parametrize(
    ("dtype", "torch_dtype"), [(D.Float, torch.float32), (D.Double, torch.float64)]
)
def test_the_next_number_is_that_of_the_dtype(dtype: DataType, torch_dtype: torch.dtype) -> None:
    with FusionGuard(Fusion()):
        x, y = _symbol(dtype), _symbol(dtype)
        made = ops.nextafter(x, y)
        assert made.dtype is dtype
        for a, b in ((1.0, 2.0), (1.0, 0.0), (0.0, 1.0), (3.0, 3.0), (-0.25, math.inf)):
            want = torch.nextafter(
                torch.tensor(a, dtype=torch_dtype), torch.tensor(b, dtype=torch_dtype)
            )
            assert sc.evaluate(made, {x: a, y: b}) == want.item()


def test_the_rest_of_the_ops_that_take_scalars() -> None:
    with FusionGuard(Fusion()):
        x, n = _symbol(), _symbol(D.Int)
        assert sc.evaluate(ops.addcmul(x, 2.0, 3.0, 0.5), {x: 1.0}) == 4.0
        assert sc.evaluate(ops.cast(x, D.Int), {x: -2.75}) == -2
        assert ops.set(n) is n and ops.real(x) is x
        assert sc.evaluate(ops.clamp(n, None, 3), {n: 7}) == 3
        assert ops.clamp(define_scalar(None, D.Float), 0.0, 1.0).dtype is D.Float
        with pytest.raises(DtypeError, match="operand must be complex"):
            ops.imag(x)


def _program() -> tuple[Fusion, list[str]]:
    """Returns a fusion in which each op on one to three Double scalars is a factor of a tensor."""
    names: list[str] = []
    fusion = Fusion()
    with FusionGuard(fusion):
        x = define_tensor([-1], dtype=D.Double)
        fusion.add_input(x)
        scalars = [_symbol() for _ in range(3)]
        for s in scalars:
            fusion.add_input(s)
        for row in REFERENCES.values():
            if "f" in row.dtypes and row.rule != "select":
                names.append(row.name)
                made = ops.cast(_apply(row.name, scalars[: row.arity]), D.Double)
                fusion.add_output(ops.add(x, made))
    return fusion, names


def test_text_of_scalar_ops_reads_back() -> None:
    fusion, names = _program()
    text = fusion_text(fusion)
    assert fusion_text(parse_fusion(text)) == text and len(names) > 50


def test_kernels_take_what_the_host_computed() -> None:
    """One program with all ops, whose later calls have other numbers."""
    names: list[str] = []
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], dtype=D.Double, contiguity=True)
        scalars = [fd.define_scalar() for _ in range(3)]
        for row in REFERENCES.values():
            if "f" in row.dtypes and row.rule != "select":
                names.append(row.name)
                made = getattr(fd.ops, row.name)(*scalars[: row.arity])
                fd.add_output(
                    fd.ops.where(made, x, 0.0) if made.dtype is D.Bool else fd.ops.add(x, made)
                )
    ones = torch.zeros(3, dtype=torch.float64)
    for numbers in ((0.5, 0.25, 2.0), (0.75, -1.5, 3.0)):
        for base in (ones, ones + 1):
            outs = fd.execute([base, *numbers])
            for name, out in zip(names, outs, strict=True):
                row = REFERENCES[name]
                value = _expected(row, numbers[: row.arity], D.Double)
                want = torch.where(value, base, 0.0) if value.dtype is torch.bool else base + value
                torch.testing.assert_close(
                    out, want, rtol=1e-12, atol=1e-12, equal_nan=True, msg=name
                )
