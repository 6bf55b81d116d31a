"""Tests that loops read shifted indices by vector loads, also where addresses are not aligned."""

from __future__ import annotations

import itertools
import random as python_random
from collections.abc import Callable, Sequence

import pytest
import torch

from fuser import FusionDefinition, ops
from fuser.ir.dtypes import DataType, from_torch
from fuser.ir.fusion import TensorView
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Symbol
from fuser.lower.passes.vector_loads import _is_uniform, _step
from fuser.runtime.cpu_kernel import CheckedCpuKernel, Counters
from tests.support.small_fusions import define, make_executor, random, run

CHECKED = ["schedules_for(h200)", "checked"]


def execute(
    build: Callable[..., TensorView], inputs: Sequence[torch.Tensor], *, symbolic: bool = True
) -> torch.Tensor:
    with FusionDefinition() as fd:
        given = [
            fd.define_tensor(
                [-1] * t.ndim if symbolic else [*t.shape],
                contiguity=[None if n == 1 else k == t.ndim - 1 for k, n in enumerate(t.shape)]
                if not symbolic
                else [k == t.ndim - 1 for k in range(t.ndim)],
                dtype=from_torch(t.dtype),
            )
            for t in inputs
        ]
        fd.add_output(build(*given))
    (out,) = fd.execute(inputs, _enable_options=CHECKED)
    return out


def rotated(x: TensorView) -> TensorView:
    """Returns x plus its halves swapped, one of them negated (rotary embedding)."""
    sizes = [x.size(k) for k in range(x.ndim)]
    half = sc.floordiv(sizes[-1], 2) if not isinstance(sizes[-1], int) else sizes[-1] // 2
    zeros = [0] * x.ndim
    first = ops.slice(x, zeros, [*sizes[:-1], half])
    second = ops.slice(x, [*zeros[:-1], half], sizes)
    return ops.add(x, ops.cat([ops.neg(second), first], -1))


def counters(build: Callable[..., TensorView], inputs: Sequence[torch.Tensor]) -> Counters:
    fusion = define(build, *(tuple(t.shape) for t in inputs), dtype=from_torch(inputs[0].dtype))
    executor = make_executor(fusion, "h200")
    run(executor, inputs, [tuple(inputs[0].shape)])
    (variant,) = executor.variants
    assert isinstance(variant.compiled, CheckedCpuKernel)
    return variant.compiled.counters


@pytest.mark.parametrize("half", [8, 64])
def test_halves_that_change_places_are_read_in_whole_words(half: int) -> None:
    x = random((6, 2 * half), torch.float32)
    found = counters(rotated, [x])
    words = x.numel() * 4 // 16
    assert found.global_loads == {16: 2 * words} and found.global_stores == {16: words}


def test_bounds_that_sizes_clamp_are_read_in_whole_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows may have any length; a class of input sizes has lengths of 16 and more."""
    monkeypatch.setenv("FUSER_DUMP", "scheduler_params")
    x, rows = random((6, 16), torch.bfloat16), 6

    def swapped(x: TensorView) -> TensorView:
        first, second = (ops.slice(x, [0, k], [rows, k + 8]) for k in (0, 8))
        return ops.cat([second, first], -1)

    with FusionDefinition() as fd:
        given = fd.define_tensor([-1, -1], contiguity=True, dtype=from_torch(x.dtype))
        fd.add_output(swapped(given))
    (out,) = fd.execute([x], _enable_options=CHECKED)
    assert torch.equal(out, torch.cat([x[:, 8:], x[:, :8]], 1))
    assert "vector 4, unroll 1, 2 pieces" in capsys.readouterr().out
    short = random((6, 9), torch.bfloat16)
    (out,) = fd.execute([short], _enable_options=CHECKED)
    assert torch.equal(out, torch.cat([short[:, 8:], short[:, :8]], 1))


@pytest.mark.parametrize("count", [2, 3, 8, 9])
@pytest.mark.parametrize("length", [8, 12, 64])
def test_a_thread_has_a_vector_of_each_equal_piece(
    count: int, length: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pieces come in any order, together with an operand of the whole result. A single row is
    tested, too."""
    monkeypatch.setenv("FUSER_DUMP", "scheduler_params")
    for shape in ((5, 3, length), (length,)):
        made = [random(shape, torch.float32, k) for k in range(count)]
        other = random((*shape[:-1], count * length), torch.float32, 99)

        def build(y: TensorView, *given: TensorView) -> TensorView:
            pieces = [ops.mul(a, b) for a, b in zip(given, reversed(given), strict=True)]
            return ops.add(ops.cat(pieces, -1), y)

        with FusionDefinition() as fd:
            tensors = [
                fd.define_tensor([-1] * (len(shape) - 1) + [t.shape[-1]], contiguity=True)
                for t in (other, *made)
            ]
            fd.add_output(build(*tensors))
        (out,) = fd.execute([other, *made], _enable_options=CHECKED)
        expected = torch.cat([a * b for a, b in zip(made, reversed(made), strict=True)], -1)
        torch.testing.assert_close(out, expected + other, rtol=0, atol=0)
        assert (f"{count} pieces" in capsys.readouterr().out) == (count <= 8)


def test_pieces_of_no_word_are_read_element_by_element() -> None:
    x = random((6, 2 * 6), torch.float32)
    found = counters(rotated, [x])
    # Of the three vectors of a row, the middle one has elements of both halves.
    assert found.global_loads[4] > 0 and found.global_loads[16] >= x.numel() * 4 // 16


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool], ids=str
)
def test_pieces_of_any_length(dtype: torch.dtype) -> None:
    for a, b in itertools.product((1, 3, 8, 13, 16), (1, 5, 8, 24)):
        x, y = random((3, a), dtype), random((3, b), dtype, 1)
        for symbolic in (True, False):
            if not symbolic and 1 in (a, b):
                continue
            got = execute(lambda x, y: ops.cat([x, y], -1), [x, y], symbolic=symbolic)
            assert torch.equal(got, torch.cat([x, y], -1)), (a, b)


@pytest.mark.parametrize("begin", [0, 1, 2, 3, 4, 8])
def test_pieces_that_begin_anywhere(begin: int) -> None:
    """The rows have gaps, and begin at addresses that are not aligned to a vector."""
    for width, n in itertools.product((40, 41, 48), (16, 19)):
        store = random((5, width), torch.bfloat16)
        x, y = store[:, begin : begin + n], store[:, -n:]
        got = execute(lambda x, y: ops.cat([x, y, x], -1), [x, y])
        assert torch.equal(got, torch.cat([x, y, x], -1)), (width, n)


def test_what_lies_across_a_vector_is_read_element_by_element() -> None:
    x, y = random((16, 24), torch.float32), random((24, 16), torch.float32, 1)
    z = random((16,), torch.float32, 2)

    def build(x: TensorView, y: TensorView, z: TensorView) -> TensorView:
        turned = ops.permute(y, [1, 0])
        column = ops.broadcast(z, [False, True])
        return ops.add(ops.mul(ops.cat([turned, x], -1), 2.0), column)

    expected = torch.cat([y.t(), x], -1) * 2 + z[:, None]
    assert torch.equal(execute(build, [x, y, z]), expected)


@pytest.mark.parametrize("left", [-9, -8, -3, 0, 4, 5, 8, 16])
def test_pads(left: int) -> None:
    for right, n in itertools.product((-8, -1, 0, 3, 8), (24, 29)):
        x = random((4, n), torch.float32)
        if n + left + right < 1:
            continue
        widths = [left, right]
        got = execute(lambda x, widths=widths: ops.mul(ops.pad(x, widths), 2.0), [x])
        assert torch.equal(got, torch.nn.functional.pad(x, [left, right]) * 2), (left, right)


def test_steps_and_outcomes_by_brute_force() -> None:
    """Evaluates each test for all lanes, with integers in place of the sizes that it compares."""
    v, n = sc.index("k0", sc.const(8)), Symbol("n", DataType.Index)
    r = python_random.Random(7)
    uniform = 0
    for _ in range(400):
        step, scale = r.choice([-1, 1, 1, 2, 0]), r.choice([8, 16, 4, 1])
        side = sc.add(sc.add(sc.mul(scale, n), sc.mul(step, v)), r.randint(-20, 20))
        bound = sc.const(r.randint(-20, 20))
        test = r.choice([sc.lt, sc.le])(*((side, bound) if r.random() < 0.5 else (bound, side)))
        found = _step(test, v)
        assert found is not None
        mixed = False
        for value in range(-6, 7):
            results = [
                bool(sc.evaluate(sc.substitute(test, {v: sc.const(k)}), {n: value}))
                for k in range(8)
            ]
            mixed = mixed or len(set(results)) > 1
            # A test that holds for the first and last lane holds for all; the strictest lane is one
            # of the two.
            hardest = results[-1] if found > 0 else results[0]
            assert all(results) == hardest
        if _is_uniform(test, v, 8):
            uniform += found != 0
            assert not mixed
    assert uniform > 20
    assert _step(sc.eq(sc.mod(v, 3), 0), v) is None
