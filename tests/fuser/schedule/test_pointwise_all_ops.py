"""Tests every elementwise op as a generated kernel, against torch in float64, for many shapes and
layouts.

All kernels are compiled together, by one compiler process for the whole file.
"""

from __future__ import annotations

import torch
from pytest import fixture, mark

from fuser.ir.dtypes import DataType, to_torch
from fuser.kernels.executor import FusedKernelExecutor, compile_many
from fuser.support.device import CPU
from tests.support.op_cases import CASES, LAYOUTS, OpCase, widened
from tests.support.small_fusions import sizes_of

# The two-axis shapes of one kernel: prime extents, 1, and 0.
CONTIGUOUS = ((5, 13), (1, 1), (1, 7), (3, 1), (64, 67), (3, 0))
OTHER = (7, 11)
# The largest error of any op, in units in the last place of the result.
MAX_ULP = 8
# For complex numbers near a pole or with large exponents, the reference is no more precise than the
# op. It only checks ComplexFloat.
LOST = {"sigmoid", "silu", "pow"}
LOST_ULP = 64


# Ops that round products before a sum: their errors are relative to the largest product.
LARGEST = {"addcmul": 40.0, "lerp": 32.0}


def other_layouts(number: int) -> list[str]:
    """Returns another layout for every fourth case, a different one in turn."""
    return [LAYOUTS[1 + number // 4 % (len(LAYOUTS) - 1)]] if number % 4 == 0 else []


@fixture(scope="module")
def executors() -> dict[str, FusedKernelExecutor]:
    made: dict[str, FusedKernelExecutor] = {}
    requests = []
    for number, case in enumerate(CASES):
        fusion = case.define(2)
        executor = FusedKernelExecutor(fusion, scheduler="pointwise", name="op", device=CPU)
        made[case.id] = executor
        others = [(OTHER, layout) for layout in other_layouts(number)]
        for shape, layout in [(CONTIGUOUS[0], "contiguous"), *others]:
            inputs = case.draw(shape, 0, layout)
            out = torch.empty(shape, dtype=to_torch(case.result))
            requests.append((executor, inputs, [out], sizes_of(fusion, *[shape] * len(inputs))))
    count = compile_many(requests, device="cpu")
    print(f"{count} kernels")
    assert all(v.compiled is not None for e in made.values() for v in e.variants)
    return made


def ulp_error(
    got: torch.Tensor, expected: torch.Tensor, dtype: DataType, *, at_least: float
) -> float:
    """Returns the largest error in units in the last place of the result, or of `at_least` if the
    result is smaller. `expected` is float64 or complex128; for complex numbers, the distance
    counts."""
    info, got = torch.finfo(to_torch(dtype)), widened(got)
    same = (got == expected) | (got.isnan() & expected.isnan())
    rounded = expected.to(to_torch(dtype))
    same |= got == widened(rounded)
    size = torch.clamp(expected.abs(), min=max(at_least, info.tiny))
    unit = torch.exp2(torch.floor(torch.log2(size))) * info.eps
    error = (got - expected).abs() / unit
    return float(torch.where(same, torch.zeros_like(error), error).nan_to_num(1e9, 1e9).max())


def check_out(case: OpCase, out: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Compares the result of a kernel, on the CPU or from a GPU. Integers and Bool must be equal;
    floating and complex numbers may differ by some units in the last place."""
    if not (out.is_floating_point() or out.is_complex()):
        assert torch.equal(out, expected.to(out.dtype)), what
    elif out.numel():
        is_lost = case.result is DataType.ComplexDouble and case.name in LOST
        error = ulp_error(out, expected, case.result, at_least=LARGEST.get(case.name, 0.0))
        assert error <= (LOST_ULP if is_lost else MAX_ULP), what


@mark.parametrize("number", range(len(CASES)), ids=[case.id for case in CASES])
def test_op(number: int, executors: dict[str, FusedKernelExecutor]) -> None:
    case: OpCase = CASES[number]
    executor = executors[case.id]
    runs = [(shape, "contiguous") for shape in CONTIGUOUS]
    runs += [(OTHER, layout) for layout in other_layouts(number)]
    for seed, (shape, layout) in enumerate(runs):
        inputs = case.draw(shape, seed, layout)
        out = torch.full(shape, 1, dtype=to_torch(case.result))
        sizes = sizes_of(executor.fusion, *[shape] * len(inputs))
        executor.run(inputs, [out], sizes=sizes)
        what = f"{case.id} {shape} {layout} seed {seed}"
        check_out(case, out, case.reference(inputs), what)
    assert len(executor.variants) <= 2


@mark.parametrize("name", "tanh erf sin tan asin atan sinh asinh expm1 sqrt trunc".split())
def test_odd_functions_keep_the_sign_of_zero(name: str) -> None:
    case = next(c for c in CASES if c.name == name and c.result is DataType.Float)
    fusion = case.define(1)
    executor = FusedKernelExecutor(fusion, scheduler="pointwise", name="op", device=CPU)
    x = torch.tensor([0.0, -0.0])
    out = torch.ones(2)
    executor.run([x], [out], sizes=sizes_of(fusion, (2,)))
    assert torch.equal(out, x) and torch.signbit(out).tolist() == [False, True]
