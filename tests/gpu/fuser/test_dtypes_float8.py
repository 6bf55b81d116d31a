"""One-byte floats on a GPU: conversions from all values, and torch's kernel for scaled
products.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fuser import DataType, FusionDefinition
from fuser.ops.reference import matmul_calls
from tests.fuser.ops.test_contractions_grouped import FORMS
from tests.fuser.ops.test_contractions_grouped_scales import ALL, draw_given, reference
from tests.fuser.ops.test_quantize import (
    brute_force,
    in_tiles,
    of_groups,
    quantize,
    quantized,
    same,
    swizzled,
)
from tests.support.float8_codes import FLOAT8, OTHERS, check, check_bytes, codes
from tests.support.moved_inputs import moved, passed
from tests.support.scaled_operands import draw, factors, wanted

D = DataType
# So many floats at a time, of all 2^32.
PART = 1 << 28


@pytest.mark.parametrize("dtype", FLOAT8)
def test_every_float_is_rounded_as_torch_does(dtype: DataType) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        fd.add_output(fd.ops.cast(x, dtype))
    for start in range(-(2**31), 2**31, PART):
        bits = torch.arange(start, start + PART, dtype=torch.int64, device="cuda").int()
        (out,) = fd.execute([bits.view(torch.float32)])
        expected = bits.cpu().view(torch.float32).to(FLOAT8[dtype])
        check_bytes(out.cpu(), expected)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_all_codes_become_every_dtype(dtype: DataType) -> None:
    x = codes(dtype)
    finite = x.float().abs() < 2**31
    with FusionDefinition() as fd:
        tv = fd.from_pytorch(x)
        for to in OTHERS:
            fd.add_output(fd.ops.cast(tv, to))
    for out, to in zip(fd.execute([moved(x)]), OTHERS.values(), strict=True):
        keep = finite if not (to.is_floating_point or to is torch.bool) else slice(None)
        check(out.cpu()[keep], x.to(to)[keep])


def program_of(given: Sequence[torch.Tensor], names: Sequence[str], dtype: DataType) -> Any:
    """Returns the definition of a scaled product; `names` are further operands, such as a
    bias.
    """
    with FusionDefinition() as fd:
        mat1, mat2, scale1, scale2, *rest = map(fd.from_pytorch, given)
        more: Any = dict(zip(names, rest, strict=True))
        fd.add_output(fd.ops.scaled_mm(mat1, mat2, scale1, scale2, **more, dtype=dtype)[0])
    return fd


@pytest.mark.parametrize("on_host", [False, True], ids=["on the GPU", "CPU scalars"])
@pytest.mark.parametrize("shape", [(64, 128, 96), (7, 48, 16), (5, 33, 9), (0, 16, 16)], ids=str)
@pytest.mark.parametrize("dtype", [D.BFloat16, D.Half, D.Float])
def test_scaled_products(shape: tuple[int, int, int], dtype: DataType, on_host: bool) -> None:
    """Compares each form with float64, whether or not torch's kernel supports it.

    Scales of one element without axes lie on the GPU or, as CPU scalars, on the host.
    """
    m, _, n = shape
    a, b = factors(*shape)
    bias = draw(n, dtype=torch.bfloat16)
    one, s1, s2 = torch.tensor(0.5), draw(m, 1).abs(), draw(1, n).abs()
    scales = [(one, one), (s1, s2), (s1, one)]
    for (p, q), has_bias, has_alpha in itertools.product(scales, (False, True), (False, True)):
        given = [a, b, p, q, *[bias] * has_bias, *[one] * has_alpha]
        names = ["bias"] * has_bias + ["alpha"] * has_alpha
        numbers = sum(x is one for x in given)
        given = given if on_host else [moved(x) for x in given]
        fd = program_of(given, names, dtype)
        assert sum(tv.is_cpu_scalar for tv in fd.fusion.inputs) == on_host * numbers
        (out,) = fd.execute(passed(fd.fusion, given))
        factor = 0.5 if has_alpha else 1.0
        expected = wanted(a, b, p, q) * factor
        # The tensor cores keep some 13 digits of partial sums.
        off = 2.0**-11 * factor * wanted(a.float().abs(), b.float().abs(), p, q)
        expected = expected + bias.double() if has_bias else expected
        off = off + torch.finfo(out.dtype).eps * expected.abs() + 1e-5
        error = (out.cpu().double() - expected).abs()
        assert out.shape == expected.shape and bool((error <= off).all()), float(
            (error / off).max()
        )


@pytest.mark.parametrize("dtype", [D.BFloat16, D.Half, D.Float])
@pytest.mark.parametrize("ragged", FORMS)
def test_products_of_scaled_groups(ragged: str, dtype: DataType) -> None:
    """Grouped products that torch's kernel supports, and others, with scales of each kind."""
    letters: list[dict[str, str]] = [
        {"scale1": "", "scale2": ""},
        {"scale1": "m1", "scale2": "1n"},
        {"scale1": "gm1", "scale2": "g1n", "bias": "n"},
        ALL,
    ]
    sizes = {"g": 4, "m": 64, "n": 96, "k": 128, "1": 1}
    for more, ends in itertools.product(letters, ([16, 16, 48, 64], [3, 20, 20, 33])):
        given = draw_given(ragged, sizes, ends, more, torch.bfloat16)
        with FusionDefinition() as fd:
            tensors = dict(zip(given, map(fd.from_pytorch, given.values()), strict=True))
            fd.add_output(fd.ops.grouped_mm(**tensors, dtype=dtype)[0])  # pyright: ignore
        (out,) = fd.execute(passed(fd.fusion, [*given.values()]))
        expected = reference(ragged, given)
        # The tensor cores keep some 13 digits of partial sums.
        off = 2.0**-11 * reference(ragged, given, sizes_only=True)
        off = off + torch.finfo(out.dtype).eps * expected.abs() + 1e-5
        error = (out.cpu().double() - expected).abs()
        assert out.shape == expected.shape and bool((error <= off).all()), (more, ends)


def test_torchs_kernel_is_called_for_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's kernel is called once for each group of rows that is not empty."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs products of floats of one byte")
    plain, called = matmul_calls._native, list[int]()

    def noted(a: torch.Tensor, *args: object) -> torch.Tensor:
        called.append(len(a))
        return plain(a, *args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(matmul_calls, "_native", noted)
    sizes = {"g": 4, "m": 64, "n": 96, "k": 128, "1": 1}
    given = draw_given("m", sizes, [3, 20, 20, 33], {"scale1": "m1", "scale2": "g1n"})
    with FusionDefinition() as fd:
        tensors = dict(zip(given, map(fd.from_pytorch, given.values()), strict=True))
        fd.add_output(fd.ops.grouped_mm(**tensors)[0])  # pyright: ignore
    fd.execute([moved(t) for t in given.values()])
    assert called == [3, 17, 13]


def test_torchs_kernel_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's kernel is called, with scales on the GPU or CPU scalars, which are copied
    there.
    """
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs products of floats of one byte")
    called: list[torch.dtype] = []
    plain = matmul_calls._native

    def noted(*args: object) -> torch.Tensor:
        out = plain(*args)  # pyright: ignore[reportArgumentType]
        called.append(out.dtype)
        return out

    monkeypatch.setattr(matmul_calls, "_native", noted)
    one = torch.tensor(0.5)
    plainly = [*factors(64, 128, 96), one, one]
    for given in (plainly, [moved(x) for x in plainly]):
        for names, made in (([], torch.bfloat16), (["alpha"], torch.float32)):
            called.clear()
            more = [*given, *given[3:] * len(names)]
            fd = program_of(more, names, D.BFloat16)
            fd.execute(passed(fd.fusion, more))
            assert {*called} == {made}


def test_blocks() -> None:
    x = draw(33, 256)
    with FusionDefinition() as fd:
        for tv in quantize(fd.from_pytorch(x)):
            fd.add_output(tv)
    for out, expected in zip(fd.execute([moved(x)]), brute_force(x), strict=True):
        check(out.cpu(), expected)


def test_scales_in_tiles() -> None:
    x, starts, begins = draw(140, 96), [0, 131, 131], [0, 256, 384]
    given = [x, *(torch.tensor(at, dtype=torch.int32) for at in (starts, begins))]
    with FusionDefinition() as fd:
        tv, *offsets = map(fd.from_pytorch, given)
        for out in (*swizzled(tv), *quantized(fd, tv, *offsets)):
            fd.add_output(out)
    values, powers = brute_force(x)
    results = values, in_tiles(powers, 2), values, of_groups(powers, starts, begins)
    for _ in range(3):
        for out, expected in zip(fd.execute([moved(t) for t in given]), results, strict=True):
            same(out.cpu(), expected)
