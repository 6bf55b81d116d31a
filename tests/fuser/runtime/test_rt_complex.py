"""Tests the functions of rt_complex.h against torch in complex128, for random values of all
magnitudes, the unit circle, and every pair of special parts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pytest
import torch

from fuser import FusionDefinition
from fuser.runtime import compile_cubin
from tests.support.handwritten_kernels import kernel

Tensor = torch.Tensor
INF, NAN = math.inf, math.nan
PARTS = (0.0, -0.0, 1.0, -1.0, 0.5, -2.0, 3.0, INF, -INF, NAN, 1e-300, -1e150, 720.0, -800.0)
FUNCTIONS = """
    acos acosh asin asinh atan atanh cos cosh sin sinh tan tanh exp exp2 expm1 log log10 log1p log2
    reciprocal rsqrt sqrt neg
"""
FUNCTIONS = tuple(FUNCTIONS.split())
TESTS = ("isfinite", "isinf", "isnan", "isreal", "abs", "real", "imag")
# C99 leaves the sign open, and torch chooses another one.
OPEN = {
    "sin": lambda z: (z.imag.isinf()) & ~z.real.isfinite(),
    "sinh": lambda z: (z.real.isinf()) & ~z.imag.isfinite(),
}
SPECIAL = torch.tensor([complex(a, b) for a in PARTS for b in PARTS], dtype=torch.complex128)


def random_values() -> Tensor:
    generator = torch.Generator().manual_seed(0)

    def normal(n: int) -> Tensor:
        return torch.randn(n, generator=generator, dtype=torch.float64)

    spread = torch.complex(normal(2000), normal(2000)) * torch.exp(3 * normal(2000))
    return torch.cat([spread, torch.polar(1 + 1e-3 * normal(1000), 3 * normal(1000))])


def run(names: Sequence[str], *inputs: Tensor) -> list[Tensor]:
    """Returns each op of the inputs, computed by kernels."""
    with FusionDefinition() as fd:
        operands = [fd.from_pytorch(x) for x in inputs]
        for name in names:
            fd.add_output(getattr(fd.ops, name)(*operands))
    return fd.execute(list(inputs))


def parts(z: Tensor) -> Iterator[Tensor]:
    yield from torch.view_as_real(z).unbind(-1) if z.is_complex() else (z,)


def unlike(got: Tensor, expected: Tensor, rtol: float, atol: float = 0.0) -> Tensor:
    """Returns where a part differs by more than `rtol` of the number's absolute value plus `atol`.
    For an infinite number, it is `rtol` of the part."""
    bad = torch.zeros(got.shape, dtype=torch.bool)
    for mine, its in zip(parts(got), parts(expected), strict=True):
        if got.dtype is torch.bool:
            bad |= mine != its
            continue
        size = torch.where(expected.abs().isfinite(), expected.abs(), its.abs())
        near = (mine - its).abs() <= rtol * size + atol
        bad |= ~(near | (mine == its) | (mine.isnan() & its.isnan()))
    return bad


def is_lost(got: Tensor, expected: Tensor) -> Tensor:
    """Returns where torch computes NaN although C99 defines the result; torch multiplies a summand
    by 1 + 0i, too."""
    lost = torch.zeros(got.shape, dtype=torch.bool)
    for mine, its in zip(parts(got), parts(expected), strict=True):
        lost |= its.isnan() & ~mine.isnan()
    return lost


def show(bad: Tensor, *values: Tensor) -> str:
    return "; ".join(str([v[k].item() for v in values]) for k in bad.nonzero()[:4, 0])


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex64])
def test_random_values(dtype: torch.dtype) -> None:
    z = random_values().to(dtype)
    rtol = 4 * torch.finfo(dtype).eps if dtype is torch.complex64 else 1e-12
    for name, got in zip((*FUNCTIONS, *TESTS), run((*FUNCTIONS, *TESTS), z), strict=True):
        expected = getattr(torch, name)(z.to(torch.complex128))
        if got.dtype is not torch.bool:
            expected = expected.to(got.dtype)
        bad = unlike(got, expected, rtol)
        assert not bad.any(), f"{name}: {show(bad, z, got, expected)}"


def test_special_values_are_as_torch_has_them() -> None:
    for name, got in zip((*FUNCTIONS, *TESTS), run((*FUNCTIONS, *TESTS), SPECIAL), strict=True):
        expected = getattr(torch, name)(SPECIAL)
        # Torch's acos has no correct digits for 1 + 1e-300 i.
        bad = unlike(got, expected, 1e-12, 1e-12)
        bad &= ~is_lost(got, expected)
        if name in OPEN:
            bad &= ~OPEN[name](SPECIAL)
        assert not bad.any(), f"{name}: {show(bad, SPECIAL, got, expected)}"


@pytest.mark.parametrize(
    ("name", "z", "expected"),
    [
        # Results that torch loses, because an intermediate step overflows although the result does
        # not.
        ("reciprocal", complex(1e308, 1e308), complex(5e-309, -5e-309)),
        ("reciprocal", complex(1e-320, 0), complex(INF, 0)),
        ("sigmoid", complex(-800, 1), 0j),
        ("sigmoid", complex(-INF, 1), 0j),
        ("silu", complex(-800, 1), 0j),
        ("exp", complex(710, math.pi / 4), None),
        ("expm1", complex(-INF, INF), complex(-1, 0)),
        ("log1p", complex(1e-320, 1e-320), complex(1e-320, 1e-320)),
        ("log", complex(5e-324, 5e-324), complex(math.log(5e-324) + math.log(2) / 2, math.pi / 4)),
        ("sqrt", complex(1.6e308, 1.6e308), None),
        ("abs", complex(3e307, 4e307), 5e307),
        ("abs", complex(-INF, NAN), INF),
    ],
)
def test_nothing_on_the_way_leaves_the_range(
    name: str, z: complex, expected: complex | float | None
) -> None:
    (got,) = run([name], torch.tensor([z], dtype=torch.complex128))
    if expected is None:
        assert bool(torch.isfinite(got).all()), got
        back = {"exp": torch.log, "sqrt": torch.square}[name](0.5 * got)
        wanted = z - math.log(2) if name == "exp" else z / 4
        assert not unlike(back, torch.tensor([wanted], dtype=back.dtype), 1e-12).any()
        return
    wanted = torch.tensor([expected], dtype=got.dtype)
    assert not unlike(got, wanted, 1e-12).any(), (got, wanted)


def test_quotients_products_and_powers() -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = torch.exp(torch.randn(4000, generator=generator, dtype=torch.float64) * 100)
    angles = torch.randn(2, 4000, generator=generator, dtype=torch.float64) * 3
    sizes = sizes.clamp(1e-300, 1e300)
    a, b = torch.polar(sizes, angles[0]), torch.polar(sizes.flip(0), angles[1])
    pairs = [(a, b), (SPECIAL.repeat_interleave(len(SPECIAL)), SPECIAL.repeat(len(SPECIAL)))]
    for is_special, (x, y) in enumerate(pairs):
        names = ("div", "mul", "add", "sub", "eq", "ne")
        for name, got in zip(names, run(names, x, y), strict=True):
            expected = getattr(torch, name)(x, y)
            bad = unlike(got, expected, 1e-12)
            bad &= ~is_lost(got, expected)
            if is_special and name == "div":  # torch does not scale
                bad &= ~expected.isnan() & ~(expected == 0) & ~expected.isinf()
            assert not bad.any(), f"{name}: {show(bad, x, y, got, expected)}"
    x, y = (random_values()[:500] for _ in range(2))
    y = y.flip(0) / y.abs().clamp(min=1.0)
    (got,) = run(["pow"], x, y)
    assert not unlike(got, torch.pow(x, y), 1e-11).any()


@pytest.mark.parametrize(
    ("base", "exponent", "expected"),
    [
        (0, 0, 1),
        (complex(INF, 0), 0, 1),
        (0, 2, 0),
        (0, complex(0.5, 3), 0),
        (0, -1, complex(INF, NAN)),
        (0, 1j, complex(NAN, NAN)),
        (1j, 2, -1),
    ],
)
def test_powers_of_zero_and_to_zero(base: complex, exponent: complex, expected: complex) -> None:
    x, y = (torch.tensor([v], dtype=torch.complex128) for v in (base, exponent))
    (got,) = run(["pow"], x, y)
    assert not unlike(got, torch.tensor([expected], dtype=torch.complex128), 1e-12).any(), got


def test_the_header_compiles_for_a_gpu() -> None:
    """One kernel calls every function, in both precisions."""
    calls: list[str] = []
    for part in ("float", "double"):
        z, w = f"Complex<{part}>(x[0], x[1])", f"Complex<{part}>(x[2])"
        made = [f"fm_{name}({z})" for name in (*FUNCTIONS, "sigmoid", "silu")]
        made += [f"fm_pow({z}, {w}) / {z} * {w} - {z}", f"fm_lerp({z}, {w}, {z})"]
        made += [f"fm_cast<Complex<double>>({z})", f"fm_cast<Complex<float>>({z})"]
        calls += [
            f"y[{2 * k}] += fm_real({e}); y[{2 * k + 1}] += fm_imag({e});"
            for k, e in enumerate(made)
        ]
        calls += [f"y[0] += fm_cast<{t}>({z});" for t in ("float", "double", "int", "bool")]
        calls += [f"y[0] += fm_{name}({z});" for name in TESTS]
        calls += [
            f"y[0] += __half2float(fm_cast<__half>({z})) + (fm_cast<Complex<{part}>>(true) == {w});"
        ]
    body = "\n".join(f"  {c}" for c in calls)
    source = kernel("complex_calls", "const float* x, double* y", body, threads=1)
    (code,) = compile_cubin([source])
    assert code
