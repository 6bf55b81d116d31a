"""Integer scalars of a user, of any sign: the host and a kernel compute the same values."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch

from fuser import DataType, FusionDefinition
from fuser.ir.canonical_form import equal_fusions
from fuser.ir.fusion import Fusion
from fuser.ir.scalar.constructors import Symbol
from fuser.ir.text.parser import parse_fusion
from fuser.ir.text.printer import fusion_text
from fuser.support.errors import DefinitionError, DivisionByZeroError, InputError
from hostir.ir.parser import parse

pytestmark = pytest.mark.from_text

VALUES = (-9, -5, -4, -1, 0, 1, 3, 4, 7)
# Name -> (function of ops and a scalar or tensor n, the same function of Python numbers).
Build = Callable[[Any, Any], Any]
Program = tuple[Build, Callable[[int], int]]


def _trunc(a: int, b: int) -> int:
    return math.trunc(Fraction(a, b))


PROGRAMS: dict[str, Program] = {
    "maximum": (lambda ops, n: ops.maximum(n, 0), lambda n: max(n, 0)),
    "minimum": (lambda ops, n: ops.minimum(n, 1), lambda n: min(n, 1)),
    "quotient": (
        lambda ops, n: ops.div(ops.add(ops.mul(n, 4), 1), 4),
        lambda n: _trunc(4 * n + 1, 4),
    ),
    "remainder": (
        lambda ops, n: ops.mod(ops.add(ops.mul(n, 4), 1), 4),
        lambda n: math.trunc(math.fmod(4 * n + 1, 4)),
    ),
    "negative divisor": (lambda ops, n: ops.div(n, -3), lambda n: _trunc(n, -3)),
    "negative modulus": (lambda ops, n: ops.mod(n, -3), lambda n: n + 3 * _trunc(n, -3)),
    "divisor": (
        lambda ops, n: ops.div(20, ops.sub(ops.mul(n, 2), 1)),
        lambda n: _trunc(20, 2 * n - 1),
    ),
    "whole": (
        lambda ops, n: ops.add(ops.mul(ops.div(n, 4), 4), ops.mod(n, 4)),
        lambda n: n,
    ),
    "nested": (lambda ops, n: ops.div(ops.div(n, 2), 2), lambda n: _trunc(_trunc(n, 2), 2)),
    "abs": (lambda ops, n: ops.abs(ops.sub(n, 1)), lambda n: abs(n - 1)),
    "neg": (lambda ops, n: ops.neg(n), lambda n: -n),
    "where": (
        lambda ops, n: ops.where(ops.lt(n, 1), ops.mul(n, n), ops.sub(n, 2)),
        lambda n: n * n if n < 1 else n - 2,
    ),
    "guarded": (
        lambda ops, n: ops.where(ops.ne(n, 0), ops.div(7, n), 0),
        lambda n: _trunc(7, n) if n else 0,
    ),
    "comparisons": (
        lambda ops, n: ops.add(
            ops.cast(ops.le(n, 0), DataType.Int), ops.cast(ops.ge(n, -4), DataType.Int)
        ),
        lambda n: int(n <= 0) + int(n >= -4),
    ),
    "shifts": (
        lambda ops, n: ops.bitwise_left_shift(
            ops.bitwise_right_shift(ops.mul(n, 1000), ops.bitwise_and(n, 3)), 2
        ),
        lambda n: n * 1000 >> (n & 3) << 2,
    ),
    "bits": (
        lambda ops, n: ops.bitwise_xor(ops.bitwise_or(n, 5), ops.bitwise_not(n)),
        lambda n: (n | 5) ^ ~n,
    ),
    "through a float": (
        lambda ops, n: ops.cast(ops.mul(ops.cast(n, DataType.Double), 0.5), DataType.Int),
        lambda n: math.trunc(n * 0.5),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_scalar_and_a_tensor_mean_the_same(name: str) -> None:
    """The host computes with the scalar and passes the result to the kernel, which computes the
    tensor."""
    build, meaning = PROGRAMS[name]
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], dtype=DataType.Int, contiguity=True)
        n = fd.define_scalar(dtype=DataType.Int)
        fd.add_output(fd.ops.add(x, build(fd.ops, n)))
        fd.add_output(build(fd.ops, x))
    for value in VALUES:
        added, computed = fd.execute([torch.tensor([value, 2]), value])
        assert added.tolist() == [meaning(value) + value, meaning(value) + 2], (name, value)
        assert computed[0] == meaning(value), (name, value)


_WIDE = (-(2**63), -(2**62) - 3, -5, -1, 0, 1, 6, 2**40 + 1, 2**63 - 1)


def _shifted(name: str, value: int, count: int) -> int:
    """Returns a 64-bit shift in two's complement; other counts shift all bits out."""
    bits, known = value % 2**64, 0 <= count < 64
    if name == "bitwise_left_shift":
        bits = bits << count if known else 0
    elif name == "logical_right_shift":
        bits = bits >> count if known else 0
    else:
        bits = value >> min(count % 2**64, 63)
    return (bits + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize(
    "name", ["bitwise_left_shift", "bitwise_right_shift", "logical_right_shift"]
)
def test_shifts_of_scalars_and_of_tensors_by_scalars(name: str) -> None:
    counts = (-(2**63), -64, -1, 0, 1, 2, 31, 32, 62, 63, 64, 100, 2**63 - 1)
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], dtype=DataType.Int, contiguity=True)
        n, count = (fd.define_scalar(dtype=DataType.Int) for _ in range(2))
        op = getattr(fd.ops, name)
        fd.add_output(fd.ops.add(fd.ops.mul(x, 0), op(n, count)))
        fd.add_output(op(x, count))
        fd.add_output(op(x, 3))
        # Constants are folded when they are defined.
        fd.add_output(fd.ops.full([1], op(-5, 70), DataType.Int))
    values = torch.tensor(_WIDE)
    for count in counts:
        for value in _WIDE if count in (-1, 2, 63, 64) else (-5,):
            scalar, tensor, fixed, constant = fd.execute([values, value, count])
            assert set(scalar.tolist()) == {_shifted(name, value, count)}, (value, count)
            assert tensor.tolist() == [_shifted(name, v, count) for v in _WIDE], count
            assert fixed.tolist() == [_shifted(name, v, 3) for v in _WIDE]
            assert constant.tolist() == [_shifted(name, -5, 70)]


def test_shifts_in_extents_and_offsets_have_a_text() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        n = fd.define_scalar(dtype=DataType.Int)
        half, twice = fd.ops.bitwise_right_shift(n, 1), fd.ops.bitwise_left_shift(n, 1)
        fd.add_output(fd.ops.pad(x, [half, fd.ops.bitwise_xor(fd.ops.bitwise_not(n), -5)]))
        fd.add_output(fd.ops.full([twice, fd.ops.bitwise_and(n, 6)], n, DataType.Int))
    text = fusion_text(fd.fusion)
    for op in (" << ", " >> ", " ^ ", " & ", " ~("):
        assert op in text
    assert equal_fusions(parse_fusion(text), fd.fusion)
    x = torch.rand(6)
    for value in (3, 6):
        padded, full = fd.execute([x, value])
        assert torch.equal(padded, torch.nn.functional.pad(x, [value >> 1, value ^ 4]))
        assert full.tolist() == [[value] * (value & 6)] * (2 * value)


def test_index_arithmetic_with_a_negative_scalar() -> None:
    """A scalar of any sign moves a window, by pads and slices."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        n = fd.define_scalar(dtype=DataType.Int)
        moved = fd.ops.pad(x, [n, fd.ops.neg(n)])
        fd.add_output(fd.ops.add(moved, fd.ops.cast(fd.ops.maximum(n, 0), DataType.Float)))
    x = torch.rand(6)
    for shift in (-5, -1, 1, 5):
        (out,) = fd.execute([x, shift])
        expected = torch.nn.functional.pad(x, [shift, -shift]) + max(shift, 0)
        torch.testing.assert_close(out, expected)


def test_a_scalar_that_is_an_extent() -> None:
    """An extent of 0 has a separate program; a negative extent is an error."""
    with FusionDefinition() as fd:
        n = fd.define_scalar(dtype=DataType.Int)
        fd.add_output(fd.ops.full([n, 2], 3.0, DataType.Float))
        fd.add_output(fd.ops.full([2], fd.ops.maximum(n, 1), DataType.Int))
    for size in (3, 0, 5, 1):
        full, largest = fd.execute([size])
        assert full.tolist() == [[3.0, 3.0]] * size
        assert largest.tolist() == [max(size, 1)] * 2
    with pytest.raises(
        InputError, match=r"extent i0 of .* is negative for these inputs: -2.*test_evaluate"
    ):
        fd.execute([-2])


def test_division_by_a_scalar_of_zero() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], dtype=DataType.Int, contiguity=True)
        n = fd.define_scalar(dtype=DataType.Int)
        fd.add_output(fd.ops.add(x, fd.ops.div(7, n)))
    x = torch.arange(3)
    for _ in range(2):
        with pytest.raises(DivisionByZeroError, match=r"divides 7 by 0: i\d+ = 0"):
            fd.execute([x, 0])
        assert fd.execute([x, -2])[0].tolist() == [-3, -2, -1]
    with FusionDefinition() as fd, pytest.raises(DefinitionError, match="zero"):
        fd.ops.mod(fd.define_scalar(dtype=DataType.Int), 0)


def test_thousands_of_chained_scalar_ops() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], dtype=DataType.Int, contiguity=True)
        n = s = fd.define_scalar(dtype=DataType.Int)
        for i in range(2500):
            s = fd.ops.maximum(fd.ops.sub(s, 1), -i)
        fd.add_output(fd.ops.add(x, s))
        del n
    value = 100
    for i in range(2500):
        value = max(value - 1, -i)
    assert fd.execute([torch.arange(3), 100])[0].tolist() == [value, value + 1, value + 2]


def test_defining_a_long_vector_looks_at_no_input_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defining n scalars takes no search through the inputs for each of them."""
    monkeypatch.setattr(Fusion, "add_input", lambda *_: pytest.fail("searched"))
    with FusionDefinition() as fd:
        vector = fd.define_vector(1000)
        assert fd.fusion.inputs == vector
        assert len(set(vector)) == 1000
    monkeypatch.undo()


# ------------------------------------------------------------------ text
def test_ranges_follow_from_where_symbols_stand() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        n, m = fd.define_scalar(dtype=DataType.Int), fd.define_scalar(dtype=DataType.Index)
        shifted = fd.ops.add(fd.ops.maximum(n, 0), fd.ops.minimum(m, 1))
        y = fd.ops.add(x, fd.ops.cast(shifted, DataType.Float))
        fd.add_output(fd.ops.reshape(y, [fd.ops.mul(x.size(0), x.size(1))]))
    again = parse_fusion(fusion_text(fd.fusion))
    assert equal_fusions(again, fd.fusion)
    assert again.inputs[1:] == [n, m]
    assert [a.extent for a in again.inputs[0].domain.logical] == [x.size(0), x.size(1)]  # pyright: ignore
    (out,) = fd.execute([torch.ones(2, 3), -4, -5])
    assert out.tolist() == [-4.0] * 6
    program = fd.fec.host_program()
    text = program.full_text()
    read = parse(text)
    assert read.full_text() == text
    assert list(read.inputs[1:]) == [n, m]
    extents = [a.extent for a in read.inputs[0].domain.logical]  # pyright: ignore
    assert all(isinstance(e, Symbol) and e.lo == 1 for e in extents)


def test_a_width_that_is_0_at_first_is_not_0_for_later_calls() -> None:
    with FusionDefinition() as fd:
        x, n = fd.define_tensor([-1]), fd.define_scalar(None, dtype=DataType.Int)
        fd.add_output(fd.ops.add(fd.ops.pad(x, [n, 0]), 1.0))
    given = torch.tensor([5.0, 6.0, 7.0])
    for width, expected in ((0, [6, 7, 8]), (2, [1, 1, 6, 7, 8]), (-1, [7, 8]), (0, [6, 7, 8])):
        assert fd.execute([given, width])[0].tolist() == expected


# ------------------------------------------------------------------ the count of a welford
@pytest.mark.parametrize(
    ("name", "expected"), [("sub", -4), ("fmod", 9), ("mod", 9), ("mul", 117), ("maximum", 13)]
)
def test_arithmetic_of_a_count_and_an_extent(name: str, expected: int) -> None:
    """The count and the extent have one C type, whatever the type of indices is."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        _, _, count = fd.ops.welford(x, [1])
        fd.add_output(getattr(fd.ops, name)(count, x.size(0)))
        fd.add_output(getattr(fd.ops, name)(x.size(0), count))
    out, turned = fd.execute([torch.rand(13, 9)])
    assert out.tolist() == [expected] * 13
    back = {"sub": 4, "fmod": 4, "mod": 4, "mul": 117, "maximum": 13}[name]
    assert turned.tolist() == [back] * 13
