"""CPU scalars: 0-dim tensors of the host that a program on any device reads."""

from __future__ import annotations

import pytest
import torch

from fuser import DataType, FusionDefinition
from fuser.errors import InputError, UnsupportedError
from fuser.frontend.autograd import on_device

D = DataType
X = torch.arange(6.0).reshape(2, 3)


def define(dtype: DataType = D.Float, *, updates: bool = False) -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], [True, True])
        s = fd.define_tensor([], [], dtype, is_cpu=True)
        fd.add_output(fd.ops.mul(x, s))
        fd.add_output(s)
        if updates:
            fd.add_output(fd.ops.cast(fd.ops.add(s, 1.0), dtype), s)
    return fd


@pytest.mark.parametrize("dtype", [torch.float, torch.double, torch.int64, torch.bool, torch.half])
def test_they_promote_as_tensors_without_axes(dtype: torch.dtype) -> None:
    scalar = torch.tensor(3.0).to(dtype)
    fd = define(
        {
            torch.float: D.Float,
            torch.double: D.Double,
            torch.int64: D.Int,
            torch.bool: D.Bool,
            torch.half: D.Half,
        }[dtype]
    )
    for value in (scalar, (scalar * 2).to(dtype)):
        product, same = fd.execute([X, value])
        assert product.dtype == torch.float and torch.equal(product, X * value.float())
        assert same is value


def test_a_result_may_be_written_into_one() -> None:
    scalar = torch.tensor(2.0)
    fd = define(updates=True)
    for expected in (2.0, 3.0):
        assert torch.equal(fd.execute([X, scalar])[0], X * expected)
    assert scalar.item() == 4.0


def test_manual_schedules_read_them() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], [True])
        s = fd.define_tensor([], [], is_cpu=True)
        fd.add_output(fd.ops.add(x, s))
    assert torch.equal(fd.manual_execute([X[0], torch.tensor(5.0)])[0], X[0] + 5)


def test_they_move_where_the_program_runs() -> None:
    """`meta` stands for a device that is not the host."""
    fusion, there = define().fusion, torch.device("meta")
    moved = on_device(fusion, [X, torch.tensor(2.0)], there)
    assert moved[0] is X
    assert isinstance(moved[1], torch.Tensor) and moved[1].device == there
    given = [X, torch.tensor(2.0)]
    assert on_device(fusion, given) is given
    with pytest.raises(InputError, match="a CPU scalar tensor, but got a tensor on device meta"):
        on_device(fusion, [X, torch.tensor(2.0, device=there)])
    with pytest.raises(UnsupportedError, match="a result on meta cannot be written into it"):
        on_device(define(updates=True).fusion, [X, torch.tensor(2.0)], there)


def test_what_has_axes_is_refused() -> None:
    with pytest.raises(InputError, match="to be bound to a tensor of rank 0"):
        define().execute([X, X[0]])
