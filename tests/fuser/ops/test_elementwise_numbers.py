"""Python numbers with tensors: dtypes and values are torch's, or nvFuser's with an option."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fuser import DataType, FusionDefinition
from fuser.support.errors import DefinitionError, DtypeError, OptionError

pytestmark = pytest.mark.from_text

Tensor = torch.Tensor
INTEGERS = torch.arange(-6, 6).reshape(3, 4)
BOOLS = INTEGERS % 3 == 0

PROGRAMS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Tensor], Tensor], Tensor]] = {
    "add": (lambda ops, x: ops.add(x, 0.1), lambda x: x + 0.1, INTEGERS),
    "int32": (lambda ops, x: ops.add(x, 0.1), lambda x: x + 0.1, INTEGERS.int()),
    "reflected": (lambda ops, x: 0.1 - x, lambda x: 0.1 - x, INTEGERS),
    "mul of bools": (lambda ops, x: ops.mul(x, 0.1), lambda x: x * 0.1, BOOLS),
    "truediv": (lambda ops, x: ops.truediv(x, 0.3), lambda x: x / 0.3, INTEGERS),
    "complex": (lambda ops, x: ops.mul(x, 2j), lambda x: x * 2j, INTEGERS),
    "rank 0": (lambda ops, x: ops.add(x, 0.1), lambda x: x + 0.1, torch.tensor(3)),
    "signs": (lambda ops, x: ops.where(x, -0.0, 0.0), lambda x: torch.where(x, -0.0, 0.0), BOOLS),
    "mixed": (lambda ops, x: ops.where(x, 1, 0.1), lambda x: torch.where(x, 1, 0.1), BOOLS),
}


def define(write: Callable[[Any, Any], Any], x: Tensor, **options: Any) -> FusionDefinition:
    with FusionDefinition(**options) as fd:
        fd.add_output(write(fd.ops, fd.from_pytorch(x)))
    return fd


def again(fd: FusionDefinition) -> FusionDefinition:
    """Returns the definition that the text of another one creates."""
    made: dict[str, Any] = {"FusionDefinition": FusionDefinition, "DataType": DataType}
    exec(repr(fd), made)
    with FusionDefinition() as twin:
        made["nvfuser_fusion"](twin)
    return twin


@pytest.mark.finding("G8")
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_with_numbers_are_those_of_torch(name: str) -> None:
    write, meaning, x = PROGRAMS[name]
    fd = define(write, x)
    twin = again(fd)
    expected = meaning(x)
    for one in (fd, twin):
        (out,) = one.execute([x])
        torch.testing.assert_close(out, expected)  # also compares the dtypes
        if not out.is_complex():
            assert torch.equal(out.signbit(), expected.signbit())
    assert twin.fusion == fd.fusion and repr(twin) == repr(fd)


@pytest.mark.finding("G8")
def test_a_number_given_at_the_call_is_one_of_torch() -> None:
    with FusionDefinition() as fd:
        x, factor = fd.from_pytorch(INTEGERS), fd.define_scalar()
        fd.add_output(fd.ops.mul(x, factor))
    (out,) = fd.execute([INTEGERS, 0.1])
    torch.testing.assert_close(out, INTEGERS * 0.1)


@pytest.mark.parametrize("name", PROGRAMS)
def test_double_numbers_are_those_of_nvfuser_and_stay_in_the_text(name: str) -> None:
    write, meaning, x = PROGRAMS[name]
    fd = define(write, x, double_numbers=True)
    twin = again(fd)
    wide = {torch.float32: torch.float64, torch.complex64: torch.complex128}
    for one in (fd, twin):
        (out,) = one.execute([x])
        assert out.dtype is wide[meaning(x).dtype]
    assert twin.fusion == fd.fusion and repr(twin) == repr(fd)


def test_double_numbers_by_the_environment_and_by_definition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write, _, x = PROGRAMS["add"]
    monkeypatch.setenv("FUSER_ENABLE", "double_numbers")
    assert define(write, x).fusion.outputs[0].dtype() is DataType.Double
    assert define(write, x, double_numbers=False).fusion.outputs[0].dtype() is DataType.Float
    monkeypatch.setenv("NVFUSER_ENABLE", "")
    monkeypatch.delenv("FUSER_ENABLE")
    with pytest.raises(OptionError, match="double_numbers affects how a definition is written"):
        define(write, x).execute([x], _enable_options=["double_numbers"])


# ------------------------------------------------------------------ limits
LIMITS: tuple[tuple[Any, Any], ...] = (
    (0.5, 2.5),
    (0, 2),
    (0, 2.5),
    (None, 2.5),
    (0.5, None),
    (-math.inf, 2),
    (math.nan, 2),
)
KEPT = torch.tensor([-3, 0, 1, 4])
OF_PYTHON = {int: DataType.Int, float: DataType.Double}


@pytest.mark.finding("G8")
@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32],
    ids=str,
)
def test_clamp_has_the_dtype_and_values_of_torch(
    dtype: torch.dtype, limits: tuple[Any, Any]
) -> None:
    x = KEPT.to(dtype)
    expected = torch.clamp(x, *limits)
    fd = define(lambda ops, t: ops.clamp(t, *limits), x)
    for one in (fd, again(fd)):
        torch.testing.assert_close(one.execute([x])[0], expected, rtol=0, atol=0, equal_nan=True)
    with FusionDefinition() as of_scalars:
        t = of_scalars.from_pytorch(x)
        ends = [
            None if v is None else of_scalars.define_scalar(None, dtype=OF_PYTHON[type(v)])
            for v in limits
        ]
        of_scalars.add_output(of_scalars.ops.clamp(t, *ends))
    (out,) = of_scalars.execute([x, *(v for v in limits if v is not None)])
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.finding("G8")
def test_clamp_of_integers_with_double_numbers_is_double() -> None:
    for x in (KEPT, KEPT.int(), KEPT.bool()):
        fd = define(lambda ops, t: ops.clamp(t, 0.1, 2.7), x, double_numbers=True)
        torch.testing.assert_close(fd.execute([x])[0], torch.clamp(x.double(), 0.1, 2.7))
    x = KEPT.float()
    fd = define(lambda ops, t: ops.clamp(t, 0.1, 2.7), x, double_numbers=True)
    torch.testing.assert_close(fd.execute([x])[0], torch.clamp(x, 0.1, 2.7))


@pytest.mark.finding("G8")
def test_threshold_of_integers_takes_what_fits() -> None:
    for dtype in (torch.int32, torch.int64):
        x = KEPT.to(dtype)
        fd = define(lambda ops, t: ops.threshold(t, 0.0, 7), x)
        torch.testing.assert_close(fd.execute([x])[0], F.threshold(x, 0, 7))


@pytest.mark.finding("G8")
def test_numbers_that_do_not_fit_the_result_are_refused() -> None:
    with FusionDefinition() as fd:
        whole = fd.from_pytorch(KEPT)
        short, half, bools = (
            fd.from_pytorch(KEPT.to(d)) for d in (torch.int32, torch.float16, torch.bool)
        )
        scalar = fd.define_scalar(None, dtype=DataType.Double)
        for numbers, problem in (
            ((0.5, 7), "0.5 is not an integer"),
            ((0, 7.5), "7.5 is not an integer"),
            ((0, math.inf), "inf is not an integer"),
            ((fd.define_scalar(0.5), 7), "0.5 is not an integer"),
        ):
            with pytest.raises(DefinitionError, match=rf"threshold: {problem}, the dtype of T0"):
                fd.ops.threshold(whole, *numbers)
        with pytest.raises(DefinitionError, match="threshold: 7 is not a value of bool"):
            fd.ops.threshold(bools, 0, 7)
        with pytest.raises(DtypeError, match="threshold: the result has the dtype int64_t of T0"):
            fd.ops.threshold(whole, scalar, 7)
        for x in (short, half):
            with pytest.raises(DefinitionError, match="clamp: 1099511627776 is out of the range"):
                fd.ops.clamp(x, None, 2**40)
        fd.add_output(fd.ops.clamp(whole, 0, 1))
