"""Complex programs: defined, printed, parsed again, run and validated; on ranks; with lazy
conjugates."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import mpmath  # pyright: ignore[reportMissingTypeStubs]
import pytest
import torch

from fuser import DataType, FusionDefinition
from fuser.ir.binding import signature_of
from fuser.ir.canonical_form import equal_fusions
from fuser.ir.text.parser import parse_fusion, parse_scalar
from fuser.ir.text.printer import fusion_text
from fuser.multidevice import Communicator, DeviceMesh, shard_tensor
from fuser.support.errors import DefinitionError, DtypeError, InputError, UnsupportedError
from hostir.ir.parser import parse
from hostir.ir.program import equal
from multidevice import simulate
from tests.support.cuts import cut

pytestmark = pytest.mark.from_text

D = DataType
Tensor = torch.Tensor
Build = Callable[..., Sequence[Any]]
H200 = ["schedules_for(h200)"]
BOTH = pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)


def draw(*shape: int, dtype: torch.dtype = torch.complex64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def define(build: Build, inputs: Sequence[Any]) -> FusionDefinition:
    """Returns a definition after checking that its texts, as Python and as IR, define it again."""
    with FusionDefinition() as fd:
        given = [
            fd.from_pytorch(x)
            if isinstance(x, Tensor)
            else fd.define_scalar(None, D.ComplexDouble if isinstance(x, complex) else D.Double)
            for x in inputs
        ]
        for out in build(fd, *given):
            fd.add_output(out)
    text = fusion_text(fd.fusion)
    parsed = parse_fusion(text)
    assert fusion_text(parsed) == text and equal_fusions(parsed, fd.fusion)
    names: dict[str, Any] = {"FusionDefinition": FusionDefinition, "DataType": DataType}
    exec(repr(fd), names)
    with FusionDefinition() as again:
        names["nvfuser_fusion"](again)
    assert repr(again) == repr(fd) and again.fusion == fd.fusion
    return fd


def check(build: Build, inputs: Sequence[Any], expected: Sequence[Tensor]) -> None:
    """Runs with CPU schedules and with a GPU's schedules, each twice on the same inputs."""
    fd = define(build, inputs)
    for options in ([], [], H200):
        outs = fd.execute(inputs, _enable_options=options)
        for k, (out, want) in enumerate(zip(outs, expected, strict=True)):
            assert out.dtype is want.dtype, (k, out.dtype, want.dtype)
            rtol = 1e-10 if out.dtype in (torch.complex128, torch.float64) else 1e-4
            torch.testing.assert_close(out, want, rtol=rtol, atol=rtol, equal_nan=True)
    program = fd.fec.host_program()
    assert equal(parse(program.full_text()), program)
    fd.validate(inputs)


# ------------------------------------------------------------------ ops
def test_casts_go_everywhere() -> None:
    dtype = torch.complex64
    z = draw(5, 7, dtype=dtype) * 3
    z[0, :3] = torch.tensor([0, 1j, -2.75 - 1j], dtype=dtype)
    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32)
    reals = [torch.randint(-3, 4, (5, 7)).to(t) for t in (*kinds, torch.bool)]
    check(
        lambda fd, z, *xs: [
            *(fd.ops.cast(z, t) for t in (*kinds, torch.bool)),
            *(fd.ops.cast(x, dtype) for x in xs),
            fd.ops.cast(fd.ops.cast(xs[1], dtype), torch.float32),
            fd.ops.cast(z, torch.complex64),
            fd.ops.cast(z, torch.complex128),
        ],
        [z, *reals],
        [
            *(z.real.to(t) for t in kinds),
            z != 0,
            *(x.to(dtype) for x in reals),
            reals[1],
            z.to(torch.complex64),
            z.to(torch.complex128),
        ],
    )


@BOTH
def test_operators_choices_and_parts(dtype: torch.dtype) -> None:
    z, w, x = draw(4, 6, dtype=dtype), draw(6, dtype=dtype, seed=1), torch.randn(4, 6)
    x = x.to(dtype.to_real())
    check(
        lambda fd, z, w, x: [
            z + w,
            2j * z - x,
            z / w,
            -z,
            abs(z),
            fd.ops.where(fd.ops.gt(x, 0.0), z, 1 - 1j),
            fd.ops.complex(x, fd.ops.imag(z)),
            fd.ops.eq(z, fd.ops.complex(fd.ops.real(z), fd.ops.imag(z))),
            fd.ops.ne(z, w),
            fd.ops.lerp(z, w, 0.25),
            fd.ops.addcmul(z, z, w, 1 + 2j),
            fd.ops.full([3], complex(-0.0, math.inf), dtype),
            fd.ops.isreal(fd.ops.mul(z, 0.0)),
        ],
        [z, w, x],
        [
            z + w,
            2j * z - x,
            z / w,
            -z,
            z.abs(),
            torch.where(x > 0, z, torch.tensor(1 - 1j, dtype=dtype)),
            torch.complex(x, z.imag),
            torch.ones(4, 6, dtype=torch.bool),
            z != w,
            z + 0.25 * (w - z),
            z + z * w * (1 + 2j),
            torch.full([3], complex(-0.0, math.inf), dtype=dtype),
            torch.isreal(z * 0.0),
        ],
    )


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((3, 2000), torch.complex64), ((700, 3), torch.complex64), ((5, 7), torch.complex128)],
    ids=str,
)
def test_reductions(shape: tuple[int, int], dtype: torch.dtype) -> None:
    z = draw(*shape, dtype=dtype)
    unit = z / z.abs()
    check(
        lambda fd, z, u: [
            fd.ops.sum(z, 0),
            fd.ops.sum(z, 1, True),
            fd.ops.sum(z),
            fd.ops.prod(u, 1),
            fd.ops.prod(u, 0),
            fd.ops.sum(z, 1, dtype=D.ComplexDouble),
            *fd.ops.var_mean(z, [1], 0),
            fd.ops.var(z, [0], 0),
            fd.ops.cumsum(z, 1),
            fd.ops.cumprod(u, 0),
            fd.ops.div(z, fd.ops.sum(fd.ops.abs(z), 1, True)),
        ],
        [z, unit],
        [
            z.sum(0),
            z.sum(1, True),
            z.sum(),
            unit.prod(1),
            unit.prod(0),
            z.sum(1, dtype=torch.complex128),
            *torch.var_mean(z, 1, correction=0),
            z.var(0, correction=0),
            z.cumsum(1),
            unit.cumprod(0),
            z / z.abs().sum(1, True),
        ],
    )


def test_views_lookups_and_products() -> None:
    dtype = torch.complex64
    z, w, index = draw(4, 6, dtype=dtype), draw(6, 5, dtype=dtype), torch.tensor([2, 0, 2])
    check(
        lambda fd, z, w, i: [
            fd.ops.permute(z, [1, 0]),
            fd.ops.cat([z, z], 1),
            fd.ops.slice(z, [1, 0], [3, 5]),
            fd.ops.pad(z, [1, 2], 1 - 2j),
            fd.ops.triu(z, 1),
            fd.ops.expand(fd.ops.broadcast(z, [True, False, False]), [3, 4, 6]),
            fd.ops.index_select(z, i, 0),
            fd.ops.embedding_fwd(i, z),
            fd.ops.select(z, fd.define_scalar(-1, D.Int), 1),
            fd.ops.take_along_axis(z, fd.ops.broadcast(i, [True, False]), 1),
            fd.ops.matmul(z, w),
            fd.ops.linear(z, fd.ops.permute(w, [1, 0]), fd.ops.slice(w, [0, 0], [1, 5])[0]),
        ],
        [z, w, index],
        [
            z.T,
            torch.cat([z, z], 1),
            z[1:3, :5],
            torch.constant_pad_nd(z, (1, 2), 1 - 2j),
            z.triu(1),
            z.expand(3, 4, 6),
            z[index],
            z[index],
            z[:, -1],
            z[:, index],
            z @ w,
            z @ w + w[0],
        ],
    )


def test_a_table_has_nothing_outside() -> None:
    with FusionDefinition() as fd:
        z, i = fd.define_tensor([4], dtype=torch.complex64), fd.define_tensor([2], dtype=D.Int)
        fd.add_output(fd.ops.index_select(z, i, 0))
    (out,) = fd.execute([draw(4), torch.tensor([1, 7])])
    assert out[0] == draw(4)[1] and out[1].real.isnan() and out[1].imag.isnan()


def test_updates_in_place() -> None:
    dtype = torch.complex64
    with FusionDefinition() as fd:
        z = fd.define_tensor([-1, -1], contiguity=True, dtype=dtype)
        fd.add_output(fd.ops.mul(z, 1j), z)
    given = draw(3, 5, dtype=dtype)
    expected = given * 1j
    for _ in range(2):
        fd.execute([given])
        torch.testing.assert_close(given, expected)
        expected = expected * 1j


# ------------------------------------------------------------------ scalars
def test_scalars_of_calls() -> None:
    z = draw(3, 4)

    def build(fd: Any, z: Any, c: Any, d: Any) -> list[Any]:
        return [
            z * c,
            fd.ops.add(z, fd.ops.mul(c, fd.ops.exp(c))),
            fd.ops.mul(z, fd.ops.abs(fd.ops.div(c, d))),
            fd.ops.full([2], fd.ops.complex(d, fd.ops.imag(c)), D.ComplexDouble),
            fd.ops.where(fd.ops.eq(c, 1 + 2j), z, 0.0),
            fd.ops.add(z, fd.ops.cast(c, D.Float)),
            fd.ops.mul(z, fd.ops.sqrt(c)),
        ]

    fd = define(build, [z, 1j, 2.0])
    for c in (1 + 2j, -3.5 + 0j, 2, 0.25):
        c, d = complex(c), 2.0
        value = torch.tensor(c, dtype=torch.complex128)
        expected = [
            z * c,
            z + complex(value * value.exp()),
            z * abs(c / d),
            torch.full([2], complex(d, c.imag), dtype=torch.complex128),
            z if c == 1 + 2j else z * 0,
            z + c.real,
            z * complex(value.sqrt()),
        ]
        for given in (c, c if c.imag else c.real):
            for out, want in zip(fd.execute([z, given, d]), expected, strict=True):
                torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


def test_a_new_complex_number_is_no_new_class() -> None:
    assert signature_of([draw(4), 1j]) == signature_of([draw(4), 2 - 1j])
    assert signature_of([draw(4)]) != signature_of([draw(4).conj()])


def test_numbers_that_do_not_fit() -> None:
    with FusionDefinition() as fd:
        x, d = fd.define_tensor([2]), fd.define_scalar(None, D.Double)
        fd.add_output(x * d)
        with pytest.raises(DefinitionError, match="is complex, but double is real"):
            fd.define_scalar(2j, D.Double)
        with pytest.raises(DtypeError, match="two operands of dtype float or double"):
            fd.ops.complex(fd.ops.cast(x, D.Half), fd.ops.cast(x, D.Half))
        with pytest.raises(TypeError, match="complex"):
            fd.ops.complex(x, 1.0)  # pyright: ignore[reportCallIssue, reportArgumentType]
        with pytest.raises(DtypeError, match="pad value must have the same dtype"):
            fd.ops.pad(x, [1, 1], 1j)
    text = r"Scalar value \(2,1\) is not compatible with the expected data type: double"
    with pytest.raises(InputError, match=text):
        fd.execute([torch.ones(2), 2 + 1j])
    with FusionDefinition() as fd:
        z, c = fd.define_tensor([2], dtype=D.ComplexFloat), fd.define_scalar(None, D.ComplexFloat)
        fd.add_output(z * c)
    with pytest.raises(InputError, match="out of the range"):
        fd.execute([draw(2), 1e300j])
    with pytest.raises(InputError, match=r"dtype std::complex<float>, but got .* double"):
        fd.execute([torch.ones(2).double(), 1j])


@pytest.mark.parametrize(
    "text",
    [
        "std::complex<double>(1,-2.5)",
        "std::complex<float>(nan,-inf)",
        "std::complex<double>(-0,0)",
        "( c3 * std::complex<double>(0,1) )",
        "( cast_std::complex<float>(c1) )",
    ],
)
def test_constants_are_read_as_they_print(text: str) -> None:
    assert str(parse_scalar(text)) == text


# ------------------------------------------------------------------ lazy views
def test_lazy_conjugates_are_computed() -> None:
    fd = define(lambda fd, z: [z * 2, fd.ops.imag(z)], [draw(3, 4)])
    parts = define(lambda fd, x: [x * 2], [draw(3, 4).real])
    for k in range(3):
        plain = draw(3, 4, seed=k)
        for z in (plain, plain.conj(), plain.conj().conj(), plain.mul(2).conj()):
            want = z.resolve_conj().clone()
            out, imag = fd.execute([z])
            torch.testing.assert_close(out, want * 2)
            torch.testing.assert_close(imag, want.imag.resolve_neg())
        view = plain.conj().imag
        assert view.is_neg()
        torch.testing.assert_close(parts.execute([view])[0], -2 * plain.imag)


def test_a_lazy_conjugate_is_no_target() -> None:
    with FusionDefinition() as fd:
        z = fd.define_tensor([-1], dtype=D.ComplexFloat)
        fd.add_output(z * 2, z)
    with pytest.raises(InputError, match=r"lazy conjugate view: pass x\.resolve_conj\(\)"):
        fd.execute([draw(3).conj()])


# ------------------------------------------------------------------ ranks
def _on_rank(dtype: torch.dtype) -> list[str]:
    """Runs products and sums of sharded operands with gathered or scattered results; returns the
    collectives."""
    comm = Communicator.instance()
    n, rank = comm.size(), comm.rank()
    mesh = DeviceMesh(range(n))
    x, w = draw(8, 4 * n, dtype=dtype), draw(4 * n, 8, dtype=dtype, seed=1)
    with FusionDefinition() as fd:
        a, b = (fd.define_tensor(list(t.shape), contiguity=True, dtype=dtype) for t in (x, w))
        outs = [
            fd.ops.matmul(a, b),
            fd.ops.sum(a * 1j, [1]),
            fd.ops.set(fd.ops.exp(a)),
            fd.ops.sum(b, [0]),
        ]
        for tv in outs:
            fd.add_output(tv)
        for tv in (a, b, *outs):
            tv.set_device_mesh(mesh)
        cut(a, 1, mesh)
        cut(b, 0, mesh)
        cut(outs[3], 0, mesh)
    given = [shard_tensor(x, a), shard_tensor(w, b)]
    wanted = [x @ w, (x * 1j).sum(1), x.exp(), w.sum(0).chunk(n)[rank]]
    for _ in range(3):
        for out, want in zip(fd.execute(given), wanted, strict=True):
            torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)
    program = fd.fec.host_program()
    assert equal(parse(program.full_text()), program)
    return sorted(re.findall(r"\(type=(\w+)", str(program)))


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.complex128), (4, torch.complex64)], ids=str)
def test_collectives_of_cut_programs(size: int, dtype: torch.dtype) -> None:
    with simulate(size) as world:
        for kinds in world.run(_on_rank, dtype):
            assert kinds == ["Allgather", "Allreduce", "Allreduce", "ReduceScatter"]


def _product_over_ranks() -> None:
    mesh = DeviceMesh(range(Communicator.instance().size()))
    with FusionDefinition() as fd:
        z = fd.define_tensor([4, 8], contiguity=True, dtype=D.ComplexFloat)
        out = fd.ops.prod(z, [1])
        fd.add_output(out)
        for tv in (z, out):
            tv.set_device_mesh(mesh)
        cut(z, 1, mesh)
    with pytest.raises(
        UnsupportedError, match=r"T\d.*only reduction of complex numbers over devices"
    ):
        fd.execute([shard_tensor(draw(4, 8), z)])


def test_a_product_over_devices_is_refused() -> None:
    with simulate(2) as world:
        world.run(_product_over_ranks)


# ------------------------------------------------------------------ rounding
def _units(found: float, exact: Any, dtype: torch.dtype) -> float:
    """Returns the error in units in the last place of the exact value."""
    digits, least = (24, -125) if dtype is torch.complex64 else (53, -1021)
    _, exponent = math.frexp(float(exact))
    return float(abs(mpmath.mpf(found) - exact) / mpmath.ldexp(1, max(exponent, least) - digits))


@pytest.mark.finding("complex log2 and sigmoid")
@BOTH
@pytest.mark.parametrize("name", ["log", "log2", "log10", "sigmoid", "silu"])
def test_complex_functions_are_rounded_as_well_as_torch(name: str, dtype: torch.dtype) -> None:
    """The largest error of each part is not above torch's, also near |z| = 1."""
    near_one = torch.polar(1 + 1e-3 * draw(150).real.double(), 3 * draw(150, seed=2).real.double())
    x = torch.cat([3 * draw(150, dtype=torch.complex128, seed=1), near_one]).to(dtype)
    torch_function = torch.nn.functional.silu if name == "silu" else getattr(torch, name)
    fd = define(lambda fd, x: [getattr(fd.ops, name)(x)], [x])
    found = [torch.view_as_real(y) for y in (fd.execute([x])[0], torch_function(x))]
    meaning: dict[str, Callable[[Any], Any]] = {
        "log": mpmath.log,
        "log2": lambda z: mpmath.log(z) / mpmath.log(2),
        "log10": lambda z: mpmath.log(z) / mpmath.log(10),
        "sigmoid": lambda z: 1 / (1 + mpmath.exp(-z)),
        "silu": lambda z: z / (1 + mpmath.exp(-z)),
    }
    worst = [[0.0, 0.0], [0.0, 0.0]]
    with mpmath.workdps(60):
        for i, z in enumerate(x.tolist()):
            exact = meaning[name](mpmath.mpc(z.real, z.imag))
            for which, parts in enumerate(found):
                for k, part in enumerate((exact.real, exact.imag)):
                    error = _units(parts[i, k].item(), part, dtype)
                    worst[which][k] = max(worst[which][k], error)
    # One unit of difference is allowed: C libraries of different versions differ.
    assert all(ours <= max(theirs, 0.5) + 0.75 for ours, theirs in zip(*worst, strict=True)), worst


@pytest.mark.finding("complex log2 and sigmoid")
@BOTH
@pytest.mark.parametrize(("name", "base"), [("log2", 2.0), ("log10", 10.0)])
def test_logarithms_of_powers_of_their_base_are_as_exact_as_torch(
    name: str, base: float, dtype: torch.dtype
) -> None:
    """A division by the logarithm of the base is needed: a product with its reciprocal is less
    exact."""
    exponents = torch.arange(-30, 31, dtype=torch.float64)
    powers = base**exponents
    x = torch.complex(powers, torch.zeros_like(powers)).to(dtype)
    (found,) = define(lambda fd, x: [getattr(fd.ops, name)(x)], [x]).execute([x])
    theirs = getattr(torch, name)(x)
    wide = exponents.to(found.real.dtype)
    is_exact = theirs.real == wide
    assert is_exact.sum() > 20
    assert torch.equal(found.real[is_exact], wide[is_exact]) and not found.imag.any()
