"""Random ops: errors of calls, their text, and their values compared with the definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from typing import cast as typing_cast

import pytest
import torch

from fuser import ops
from fuser.ir.canonical_form import equal_fusions
from fuser.ir.dtypes import DataType, to_torch
from fuser.ir.fusion import Fusion
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.text.parser import parse_fusion
from fuser.ir.text.printer import fusion_text
from fuser.ops.define import define_scalar, define_tensor
from fuser.ops.reference.philox import random_numbers
from fuser.support.errors import (
    ArgumentError,
    DefinitionError,
    DtypeError,
    FuserError,
    UnsupportedError,
)
from tests.support import random_reference as reference

D = DataType
FLOATS = (D.Float, D.Double, D.Half, D.BFloat16)


@pytest.mark.parametrize(
    ("word", "words"),
    [
        (0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (0xFFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ],
)
def test_the_reference_gives_the_published_words(word: int, words: tuple[int, ...]) -> None:
    """For counters and keys of zeros and of ones, as the authors of Philox published them."""
    assert reference.philox((word, word), (word, word, word, word)) == words


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", ["uniform", "normal"])
@pytest.mark.parametrize("key", [(0, 0), (5, 7), (-1, 2**40 + 3), (2**63 - 1, -9)], ids=str)
def test_meaning(kind: str, dtype: DataType, key: tuple[int, int]) -> None:
    seed, offset = key
    for first, ends in ((0, (0.0, 1.0)), (2**34 + 1, (-0.3, 1.7))):
        given: dict[str, Any] = {"seed": seed, "offset": offset, "dtype": to_torch(dtype)}
        got = random_numbers(kind, torch.arange(first, first + 37), ends, **given)
        want = reference.numbers(kind, 37, ends, first=first, **given)
        if kind == "uniform":
            assert torch.equal(got, want)
        else:
            close(got, want)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Requires equality up to the rounding of log, sin and cos."""
    error = {torch.float64: 1e-13, torch.float32: 3e-6}.get(got.dtype, torch.finfo(got.dtype).eps)
    torch.testing.assert_close(got.double(), want, rtol=error, atol=error)


def test_every_form_is_read_back() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        x = define_tensor([-1, 3], dtype=D.Half)
        seed, low = define_scalar(None, D.Int), define_scalar(None, D.Double)
        fusion.inputs = [x, seed, low]
        given: dict[str, Any] = {"rng_seed": seed, "rng_offset": define_scalar(7, dtype=D.Int)}
        made = [
            ops.uniform(low, 2, [x.size(0), 3], dtype=D.BFloat16, **given),
            ops.normal(0.5, 2.0, [], dtype=D.Double, **given),
            ops.uniform(0.0, 1.0, [4]),
            ops.rand_like(x),
            ops.randn_like(x),
        ]
        for tv in made:
            fusion.add_output(tv)
    text = fusion_text(fusion)
    for spelled in (
        "= rng_uniform_range({i0, 3}, ( cast_float(d3) ), float(2), __bfloat, i2, 7);",
        "= rng_normal_general({}, double(0.5), double(2), double, i2, 7);",
        "= rng_uniform_range({4}, float(0), float(1), float);",
        "= rng_uniform({i0, 3}, __half);",
        "= rng_normal_standard({i0, 3}, __half);",
    ):
        assert spelled in text, text
    assert equal_fusions(parse_fusion(text), fusion)


def test_results() -> None:
    with FusionGuard(Fusion()):
        x = define_tensor([-1, 1, 5], dtype=D.BFloat16)
        like = ops.rand_like(x)
        assert like.dtype() is D.BFloat16
        assert [a.size for a in like.domain.logical] == [x.size(i) for i in range(3)]
        assert ops.uniform(0, 1, [2]).dtype() is D.Float
        assert ops.normal(0, 1, (2, 3), dtype=torch.float64).dtype() is D.Double


WRONG: dict[str, tuple[Callable[[Any, Any], object], type[FuserError], str]] = {
    "integers": (lambda x, n: ops.uniform(0, 9, [4], dtype=D.Int), DtypeError, "floating dtype"),
    "integers like": (lambda x, n: ops.rand_like(n), DtypeError, "rand_like: a floating dtype"),
    "a seed alone": (
        lambda x, n: ops.uniform(0, 1, [4], rng_seed=define_scalar(None, D.Int)),
        DefinitionError,
        "rng_seed is passed without rng_offset",
    ),
    "an offset alone": (
        lambda x, n: ops.normal(0, 1, [4], rng_offset=define_scalar(None, D.Int)),
        DefinitionError,
        "rng_offset is passed without rng_seed",
    ),
    "a seed that is a number": (
        lambda x, n: ops.uniform(0, 1, [4], rng_seed=n.size(0), rng_offset=typing_cast(Any, 2.0)),
        ArgumentError,
        "rng_offset: expected a scalar or an integer or None, got 2.0 of type float",
    ),
    "a seed that is a flag": (
        lambda x, n: ops.uniform(0, 1, [4], rng_seed=True, rng_offset=2),
        ArgumentError,
        "rng_seed: expected a scalar or an integer or None, got True of type bool",
    ),
    "a seed of more than 64 bits": (
        lambda x, n: ops.normal(0, 1, [4], rng_seed=2**63, rng_offset=0),
        DefinitionError,
        "rng_seed: 9223372036854775808 is out of the range of int64_t",
    ),
    "a floating seed": (
        lambda x, n: ops.uniform(
            0, 1, [4], rng_seed=define_scalar(None), rng_offset=define_scalar(None)
        ),
        DtypeError,
        "rng_seed and rng_offset must be integers, but .* is double",
    ),
    "a negative size": (
        lambda x, n: ops.uniform(0, 1, [4, -1]),
        DefinitionError,
        "at least 0, got -1",
    ),
    "bounds": (
        lambda x, n: ops.uniform(1.0, 0.5, [4]),
        DefinitionError,
        "minval must be at most maxval, but 1.0 > 0.5",
    ),
    "a deviation": (
        lambda x, n: ops.normal(0.0, -1.0, [4]),
        DefinitionError,
        "std must be at least 0, got -1.0",
    ),
    "a flag": (
        lambda x, n: ops.uniform(False, True, [4]),
        DtypeError,
        "must be real numbers, but false is bool",
    ),
    "a tensor": (lambda x, n: ops.uniform(x, 1.0, [4]), FuserError, "minval"),
    "fp8": (
        lambda x, n: ops.uniform(0, 1, [4], dtype=D.Float8_e4m3fn),
        UnsupportedError,
        "not supported",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name: str) -> None:
    call, kind, match = WRONG[name]
    with FusionGuard(Fusion()):
        x, n = define_tensor([-1]), define_tensor([-1], dtype=D.Int)
        with pytest.raises(kind, match=match):
            call(x, n)
