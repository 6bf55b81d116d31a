"""Python numbers beside tensors: dtypes and values are torch's, or nvFuser's as an option."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fuser import DataType, FusionDefinition
from fuser.errors import OptionError

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
    """Return the definition that the text of another makes."""
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
    with pytest.raises(OptionError, match="double_numbers says how a definition is written"):
        define(write, x).execute([x], _enable_options=["double_numbers"])
