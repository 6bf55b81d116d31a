"""Tests the functions of rt_math.h against torch in float64, for all magnitudes and
special values."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from fuser.runtime import CompiledKernel, KernelSource, compile_cubin, compile_kernels
from tests.support.handwritten_kernels import kernel

Function = Callable[..., torch.Tensor]

# name -> (torch's function, largest error in ulp of float32, largest in ulp of float64)
UNARY: dict[str, tuple[Function, float, float]] = {
    "acos": (torch.acos, 2, 2),
    "acosh": (torch.acosh, 3, 3),
    "asin": (torch.asin, 2, 2),
    "asinh": (torch.asinh, 3, 3),
    "atan": (torch.atan, 2, 2),
    "atanh": (torch.atanh, 3, 3),
    "cos": (torch.cos, 2, 2),
    "cosh": (torch.cosh, 3, 3),
    "sin": (torch.sin, 2, 2),
    "sinh": (torch.sinh, 3, 3),
    "tan": (torch.tan, 2, 2),
    "tanh": (torch.tanh, 4, 3),
    "exp": (torch.exp, 4, 2),
    "exp2": (torch.exp2, 2, 2),
    "expm1": (torch.expm1, 2, 2),
    "log": (torch.log, 4, 2),
    "log10": (torch.log10, 3, 3),
    "log1p": (torch.log1p, 2, 2),
    "log2": (torch.log2, 2, 2),
    "sqrt": (torch.sqrt, 1, 1),
    "rsqrt": (torch.rsqrt, 2, 2),
    "reciprocal": (torch.reciprocal, 1, 1),
    "erf": (torch.erf, 4, 3),
    "erfc": (torch.erfc, 6, 6),
    "erfinv": (torch.erfinv, 3, 64),
    "lgamma": (torch.lgamma, math.inf, math.inf),
    "sigmoid": (torch.sigmoid, 4, 4),
    "silu": (torch.nn.functional.silu, 4, 4),
    "ceil": (torch.ceil, 0, 0),
    "floor": (torch.floor, 0, 0),
    "round": (torch.round, 0, 0),
    "trunc": (torch.trunc, 0, 0),
    "frac": (torch.frac, 0, 0),
    "abs": (torch.abs, 0, 0),
    "neg": (torch.neg, 0, 0),
    "sign": (torch.sign, 0, 0),
    "relu": (torch.relu, 0, 0),
}
# Outside of these ranges, torch's float64 overflows or flushes to zero, or results are subnormal.
LARGEST = {"sigmoid": 80.0, "silu": 80.0, "cosh": 709.0, "sinh": 709.0, "lgamma": 1e300}
PREDICATES: dict[str, Function] = {
    "isfinite": torch.isfinite,
    "isinf": torch.isinf,
    "isnan": torch.isnan,
    "isneginf": torch.isneginf,
    "isposinf": torch.isposinf,
    "signbit": torch.signbit,
}
BINARY: dict[str, Function] = {
    "atan2": torch.atan2,
    "nextafter": torch.nextafter,
    "fmod": torch.fmod,
    "remainder": torch.remainder,
    "pow": torch.pow,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "div": torch.div,
}
INTEGER_BINARY: dict[str, Function] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "gcd": torch.gcd,
    "remainder": torch.remainder,
    "div": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "mod": torch.fmod,
    "floordiv": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "lshift": torch.bitwise_left_shift,
    "rshift": torch.bitwise_right_shift,
}
INTEGER_UNARY: dict[str, Function] = {
    "abs": torch.abs,
    "neg": torch.neg,
    "sign": torch.sign,
    "relu": torch.relu,
}
TYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "int": torch.int32,
    "int64_t": torch.int64,
    "bool": torch.bool,
    "__half": torch.float16,
    "__bfloat": torch.bfloat16,
}


def map_kernel(name: str, result: str, expression: str, *arguments: str) -> KernelSource:
    """Returns `T9[i] = expression(x0, x1, ...)` for n elements, as a loop that g++ may
    vectorise."""
    pointers = ", ".join(f"const {t}* T{i}" for i, t in enumerate(arguments))
    loads = " ".join(f"const {t} x{i} = T{i}[i];" for i, t in enumerate(arguments))
    body = f"  FUSER_SIMD\n  for (int64_t i = 0; i < n; ++i) {{ {loads} T9[i] = {expression}; }}"
    spelled = f"{name}_{'_'.join(arguments)}".replace("__", "")
    return kernel(spelled, f"{pointers}, {result}* T9, int64_t n", body, threads=1)


def call_kernel(function: str, result: str, *arguments: str) -> KernelSource:
    names = ", ".join(f"x{i}" for i in range(len(arguments)))
    return map_kernel(f"call_{function}", result, f"fm_{function}({names})", *arguments)


def all_sources() -> dict[str, KernelSource]:
    sources = [call_kernel(name, t, t) for name in UNARY for t in ("float", "double")]
    sources += [call_kernel(name, "bool", t) for name in PREDICATES for t in ("float", "double")]
    sources += [call_kernel(name, t, t, t) for name in BINARY for t in ("float", "double")]
    sources += [call_kernel(name, t, t) for name in INTEGER_UNARY for t in ("int", "int64_t")]
    sources += [call_kernel(name, t, t, t) for name in INTEGER_BINARY for t in ("int", "int64_t")]
    sources += [
        call_kernel(name, t, t, t) for name in ("pow", "logical_rshift") for t in ("int", "int64_t")
    ]
    for t in ("float", "double"):
        sources += [call_kernel("erfcinv", t, t)]
        sources += [call_kernel(name, t, t, t, t) for name in ("lerp", "clamp", "threshold")]
        sources += [call_kernel("addcmul", t, t, t, t, t)]
    for to in TYPES:
        sources += [
            map_kernel(f"cast_{to.strip('_')}", to, f"fm_cast<{to}>(x0)", start) for start in TYPES
        ]
    return {source.name: source for source in sources}


_compiled: dict[str, CompiledKernel] = {}


def evaluate(name: str, *tensors: torch.Tensor, result: torch.dtype | None = None) -> torch.Tensor:
    if not _compiled:
        sources = all_sources()
        _compiled.update(zip(sources, compile_kernels(list(sources.values()), "cpu"), strict=True))
    out = torch.empty(tensors[0].shape, dtype=result or tensors[0].dtype)
    contiguous = [tensor.contiguous() for tensor in tensors]
    _compiled[name].launch([*contiguous, out, out.numel()], grid=(1, 1, 1), block=(1, 1, 1))
    return out


def sweep(dtype: torch.dtype) -> torch.Tensor:
    """Returns values of every exponent and sign, and the special values; about 250,000."""
    if dtype == torch.float32:
        values = torch.arange(-(2**31), 2**31, 16411, dtype=torch.int64).to(torch.int32).view(dtype)
    else:
        generator = torch.Generator().manual_seed(17)
        values = torch.randint(-(2**63), 2**63 - 1, (260_000,), generator=generator).view(dtype)
    near = torch.linspace(-12, 12, 20011, dtype=dtype)
    special = torch.tensor(
        [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5]
    ).to(dtype)
    tiny = torch.finfo(dtype).tiny
    edges = torch.tensor([tiny, -tiny, tiny / 4, 88.7, 88.8, -87.5, -103.0, -104.1, 709.0]).to(
        dtype
    )
    return torch.cat([values, near, special, edges])


def within(x: torch.Tensor, name: str) -> torch.Tensor:
    return x[~x.isfinite() | (x.abs() <= LARGEST.get(name, math.inf))]


def check_special(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Checks that NaN and Inf agree exactly. Returns where both are finite."""
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.isinf(), expected.isinf())
    assert torch.equal(got[got.isinf()].sign(), expected[expected.isinf()].sign())
    return got.isfinite() & expected.isfinite()


def ulp_error(got: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Returns the error in units in the last place of the exact (float64) value, in
    `got`'s format."""
    info = torch.finfo(got.dtype)
    _, exponent = torch.frexp(exact.abs().clamp_min(info.tiny))
    ulp = torch.ldexp(torch.full_like(exact, info.eps), exponent - 1)
    return (got.double() - exact).abs() / ulp


@pytest.mark.parametrize("name", UNARY)
def test_unary_float(name: str) -> None:
    function, limit, _ = UNARY[name]
    x = within(sweep(torch.float32), name)
    got = evaluate(f"call_{name}_float", x)
    exact = function(x.double())
    finite = check_special(got, exact.float())
    if name == "lgamma":
        # Near its zeros only the absolute error is bounded, and torch's float64 is no better there.
        torch.testing.assert_close(got[finite].double(), exact[finite], rtol=1e-5, atol=1e-5)
        return
    error = ulp_error(got[finite], exact[finite])
    worst = int(error.argmax())
    assert error[worst] <= limit + 0.5, (name, x[finite][worst].item(), error[worst].item())


@pytest.mark.parametrize("name", UNARY)
def test_unary_double(name: str) -> None:
    function, _, limit = UNARY[name]
    x = within(sweep(torch.float64), name)
    got = evaluate(f"call_{name}_double", x)
    expected = function(x)
    finite = check_special(got, expected)
    if name == "lgamma":
        torch.testing.assert_close(got[finite], expected[finite], rtol=1e-12, atol=1e-12)
        return
    error = ulp_error(got[finite], expected[finite])
    worst = int(error.argmax())
    assert error[worst] <= limit + 0.5, (name, x[finite][worst].item(), error[worst].item())


@pytest.mark.parametrize(("name", "limit"), [("exp", 3), ("erf", 3), ("tanh", 3), ("log", 3)])
def test_polynomials_densely(name: str, limit: float) -> None:
    x = torch.cat([torch.linspace(-10, 10, 1_000_003), torch.linspace(-104, 89, 1_000_003)])
    exact = UNARY[name][0](x.double())
    got = evaluate(f"call_{name}_float", x)
    finite = check_special(got, exact.float())
    error = ulp_error(got[finite], exact[finite])
    assert error.max() <= limit, (name, error.max().item(), x[finite][error.argmax()].item())


@pytest.mark.parametrize("name", PREDICATES)
@pytest.mark.parametrize("ctype", ["float", "double"])
def test_predicates(name: str, ctype: str) -> None:
    x = sweep(TYPES[ctype])
    got = evaluate(f"call_{name}_{ctype}", x, result=torch.bool)
    assert torch.equal(got, PREDICATES[name](x))


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("ctype", ["float", "double"])
def test_binary(name: str, ctype: str) -> None:
    generator = torch.Generator().manual_seed(11)
    base = sweep(TYPES[ctype])
    x = base[torch.randint(len(base), (60000,), generator=generator)]
    y = base[torch.randint(len(base), (60000,), generator=generator)]
    x[:30000] = torch.randn(30000, generator=generator, dtype=x.dtype)
    y[:30000] = torch.randn(30000, generator=generator, dtype=x.dtype)
    special = torch.tensor(
        [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 3.0], dtype=x.dtype
    )
    pairs = torch.cartesian_prod(special, special)
    if name in ("fmod", "remainder"):
        # Torch's vectorised fmod returns NaN for huge quotients; the kernels' is exact, see below.
        y = torch.where((x / y).abs() > 2.0**20, x * 0.37, y)
    x, y = torch.cat([x, pairs[:, 0]]), torch.cat([y, pairs[:, 1]])
    got, expected = evaluate(f"call_{name}_{ctype}_{ctype}", x, y), BINARY[name](x, y)
    finite = check_special(got, expected)
    tolerance = (
        0 if name in ("nextafter", "maximum", "minimum", "fmod") else 4 * torch.finfo(x.dtype).eps
    )
    # Subnormal results of pow have fewer digits.
    atol = torch.finfo(x.dtype).tiny if name == "pow" else 0
    torch.testing.assert_close(got[finite], expected[finite], rtol=tolerance, atol=atol)


def test_fmod_of_enormous_quotients() -> None:
    x = torch.tensor([4.0923317300783345e200, -1.7885593052826462e178, 1e308], dtype=torch.float64)
    y = torch.tensor([7.983286033579449e-226, -2.9381812964501945e-303, 3.0], dtype=torch.float64)
    got = evaluate("call_fmod_double_double", x, y)
    assert got.tolist() == [math.fmod(a, b) for a, b in zip(x.tolist(), y.tolist(), strict=True)]


def integers(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    info = torch.iinfo(dtype)
    generator = torch.Generator().manual_seed(5)
    small = torch.arange(-9, 10, dtype=dtype)
    edges = torch.tensor([info.min, info.min + 1, info.max, info.max - 1], dtype=dtype)
    values = torch.cat(
        [small, edges, torch.randint(-1000, 1000, (40,), dtype=dtype, generator=generator)]
    )
    pairs = torch.cartesian_prod(values, values)
    return pairs[:, 0].contiguous(), pairs[:, 1].contiguous()


@pytest.mark.parametrize("name", INTEGER_BINARY)
@pytest.mark.parametrize("ctype", ["int", "int64_t"])
def test_integer_binary(name: str, ctype: str) -> None:
    x, y = integers(TYPES[ctype])
    kept = torch.ones_like(x, dtype=torch.bool)
    if name in ("remainder", "div", "mod", "floordiv"):
        # Torch rejects a zero divisor, and the CPU traps on the most negative number divided by -1.
        kept = (y != 0) & ~((y == -1) & (x == torch.iinfo(x.dtype).min))
    if name == "gcd":
        kept = (x != torch.iinfo(x.dtype).min) & (y != torch.iinfo(x.dtype).min)
    x, y = x[kept], y[kept]
    assert torch.equal(evaluate(f"call_{name}_{ctype}_{ctype}", x, y), INTEGER_BINARY[name](x, y))


@pytest.mark.parametrize("ctype", ["int", "int64_t"])
def test_integer_edges(ctype: str) -> None:
    dtype = TYPES[ctype]
    lowest = torch.iinfo(dtype).min
    x = torch.tensor([lowest, lowest, 7, -7, 0], dtype=dtype)
    y = torch.tensor([-1, 0, 0, 0, 0], dtype=dtype)
    pair = f"{ctype}_{ctype}"
    assert evaluate(f"call_div_{pair}", x, y).tolist() == [lowest, -1, -1, -1, -1]
    assert evaluate(f"call_mod_{pair}", x, y).tolist() == [0, lowest, 7, -7, 0]
    base = torch.tensor([2, 3, -2, 2, 1, -1, -1, 0], dtype=dtype)
    power = torch.tensor([10, 0, 3, -1, -5, -3, -4, 0], dtype=dtype)
    assert evaluate(f"call_pow_{pair}", base, power).tolist() == [1024, 1, -8, 0, 1, -1, 1, 1]
    bits = torch.iinfo(dtype).bits
    x, n = torch.tensor([-1, -1, 5], dtype=dtype), torch.tensor([1, bits, 1], dtype=dtype)
    assert evaluate(f"call_logical_rshift_{pair}", x, n).tolist() == [2 ** (bits - 1) - 1, 0, 2]


@pytest.mark.parametrize("name", INTEGER_UNARY)
@pytest.mark.parametrize("ctype", ["int", "int64_t"])
def test_integer_unary(name: str, ctype: str) -> None:
    x, _ = integers(TYPES[ctype])
    assert torch.equal(evaluate(f"call_{name}_{ctype}", x), INTEGER_UNARY[name](x))


@pytest.mark.parametrize("ctype", ["float", "double"])
def test_ternary(ctype: str) -> None:
    generator = torch.Generator().manual_seed(13)
    a, b, c = (
        torch.randn(5000, generator=generator, dtype=torch.float64).to(TYPES[ctype])
        for _ in range(3)
    )
    a[7], b[11], c[13] = math.nan, math.inf, math.nan
    three = f"{ctype}_{ctype}_{ctype}"
    eps = 16 * torch.finfo(a.dtype).eps
    close = {"rtol": eps, "atol": eps, "equal_nan": True}
    torch.testing.assert_close(
        evaluate(f"call_lerp_{three}", a, b, c), torch.lerp(a, b, c), **close
    )
    got = evaluate(f"call_addcmul_{three}_{ctype}", a, b, c, torch.full_like(a, 0.5))
    torch.testing.assert_close(got, torch.addcmul(a, b, c, value=0.5), **close)
    lo, hi = torch.full_like(a, -0.5), torch.full_like(a, 0.25)
    got = evaluate(f"call_clamp_{three}", a, lo, hi)
    torch.testing.assert_close(got, a.clamp(-0.5, 0.25), rtol=0, atol=0, equal_nan=True)
    got = evaluate(f"call_threshold_{three}", a, lo, hi)
    expected = torch.nn.functional.threshold(a, -0.5, 0.25)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("ctype", ["float", "double"])
def test_erfcinv_inverts_erfc(ctype: str) -> None:
    dtype = TYPES[ctype]
    y = torch.cat(
        [torch.logspace(-30, 0, 400, dtype=torch.float64), torch.linspace(0.01, 1.99, 400)]
    ).to(dtype)
    v = evaluate(f"call_erfcinv_{ctype}", y)
    # The condition number of erfc grows with v^2.
    error = (torch.erfc(v.double()) - y.double()).abs() / y.double()
    assert bool((error <= (4 + 4 * v.double() ** 2) * torch.finfo(dtype).eps).all())
    edges = torch.tensor([0.0, 2.0, -0.1, 2.1, math.nan, 1.0], dtype=dtype)
    got = evaluate(f"call_erfcinv_{ctype}", edges)
    assert got[0] == math.inf
    assert got[1] == -math.inf
    assert bool(got[2:5].isnan().all())
    assert got[5] == 0


def test_half_types_exactly() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for ctype in ("__half", "__bfloat"):
        values = bits.view(TYPES[ctype])
        got = evaluate(f"cast_float_{ctype.strip('_')}", values, result=torch.float32)
        torch.testing.assert_close(got, values.float(), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(got.signbit()[~got.isnan()], values.signbit()[~got.isnan()])


@pytest.mark.parametrize("ctype", ["__half", "__bfloat"])
def test_rounding_to_half_types(ctype: str) -> None:
    x = sweep(torch.float32)
    ties = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(TYPES[ctype]).float()
    middle = ((ties.double()[1:] + ties.double()[:-1]) / 2).float()
    x = torch.cat(
        [x, ties, middle, -middle, torch.tensor([65504.0, 65519.9, 65520.0, 1e-8, 2.9e-8, 3e-8])]
    )
    for start in ("float", "double"):
        values = x.to(TYPES[start])
        got = evaluate(f"cast_{ctype.strip('_')}_{start}", values, result=TYPES[ctype])
        torch.testing.assert_close(got, values.to(TYPES[ctype]), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("to", TYPES)
@pytest.mark.parametrize("start", TYPES)
def test_casts(start: str, to: str) -> None:
    x = torch.tensor([0.0, 1.0, -1.0, 2.5, -2.5, 100.0, 7.25]).to(TYPES[start])
    got = evaluate(f"cast_{to.strip('_')}_{start.replace('__', '')}", x, result=TYPES[to])
    assert torch.equal(got, x.to(TYPES[to]))


def test_every_function_compiles_for_hopper() -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="the extra nvrtc")
    # One program with all calls, because compiling each function separately would take a minute.
    sources = all_sources()
    calls: list[str] = []
    for source in sources.values():
        *_, body = source.text.split("{", 1)
        body = body.rsplit("}", 1)[0]
        pointers = [p for p in source.params if p.is_pointer]
        casts = " ".join(
            f"{p.ctype}* {p.name} = reinterpret_cast<{p.ctype}*>(B + {i});"
            for i, p in enumerate(pointers)
        )
        calls.append(f"  {{ {casts} {body} }}")
    for start in range(0, len(calls), 60):
        part = kernel(
            f"all_math_{start}", "double* B, int64_t n", "\n".join(calls[start : start + 60])
        )
        assert compile_cubin([part])
