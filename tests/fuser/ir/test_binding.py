"""Inputs whose sizes depend on one another: bound if they agree, else refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fuser import DataType, FusionDefinition
from fuser.ir.binding import Binder
from fuser.ir.fusion import Fusion
from fuser.support.errors import FuserError, InputError
from hostir import HostIrEvaluator
from hostir.ir.parser import parse

Define = Callable[[Any], None]


def tensor(fd: Any, *shape: int) -> Any:
    return fd.define_tensor(list(shape), contiguity=True)


def assert_bound_alike(fusion: Fusion, inputs: list[Any]) -> None:
    """Checks that the faster path of later calls yields the same values in the same order, or
    error."""
    binder, found = Binder(fusion), list[object]()
    for _ in range(3):
        try:
            found.append(list(binder.bind(inputs).items()))
        except FuserError as error:
            found.append((type(error), str(error)))
    assert found[0] == found[1] == found[2]


def both_ways(define: Define, *inputs: Any) -> torch.Tensor:
    """Returns the result of a program, after checking that its parsed text yields the same."""
    with FusionDefinition() as fd:
        define(fd)
    (out,) = fd.execute(list(inputs))
    assert_bound_alike(fd.fec.fusion(), list(inputs))
    program = parse(fd.fec.host_program().full_text())
    (again,) = HostIrEvaluator(program).run(list(inputs))
    torch.testing.assert_close(again, out, rtol=0, atol=0, equal_nan=True)
    return out


def refused(define: Define, *inputs: Any, match: str) -> None:
    with FusionDefinition() as fd:
        define(fd)
    with pytest.raises(InputError, match=match):
        fd.execute(list(inputs))
    assert_bound_alike(fd.fec.fusion(), list(inputs))


def sliced_and_added(fd: Any) -> None:
    x, y = tensor(fd, -1), tensor(fd, -1)
    fd.add_output(fd.ops.add(fd.ops.slice(x, [0], [4]), y))


@pytest.mark.parametrize("n", [0, 1, 3, 4, 6])
def test_an_input_with_a_sliced_extent(n: int) -> None:
    x, y = torch.randn(n), torch.randn(min(n, 4))
    torch.testing.assert_close(both_ways(sliced_and_added, x, y), x[:4] + y)
    refused(sliced_and_added, x, torch.randn(min(n, 4) + 1), match="axis 0 of T0.*got.*T1")


@pytest.mark.parametrize("n", [0, 1, 4])
def test_an_input_that_equals_its_own_slice(n: int) -> None:
    def define(fd: Any) -> None:
        x = tensor(fd, -1)
        fd.add_output(fd.ops.add(fd.ops.slice(x, [0], [4]), x))

    x = torch.randn(n)
    torch.testing.assert_close(both_ways(define, x), x + x)
    refused(define, torch.randn(6), match=r"= 4 and i0 = 6.*axis 0 of T0.*test_binding")


def test_two_computed_extents_are_checked() -> None:
    """Rows of 2 and of 3 are flattened to one length. Without the check, memory was overrun."""

    def define(fd: Any) -> None:
        x, y = tensor(fd, -1, 2), tensor(fd, -1, 3)
        flat = [fd.ops.reshape(t, [fd.ops.mul(t.size(0), n)]) for t, n in ((x, 2), (y, 3))]
        fd.add_output(fd.ops.add(*flat))

    x, y = torch.randn(3, 2), torch.randn(2, 3)
    torch.testing.assert_close(both_ways(define, x, y), x.view(-1) + y.view(-1))
    refused(define, torch.randn(4, 2), y, match="= 6 and .* = 8 .*axis 0 of T1.*axis 0 of T0")


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_computed_extent_beside_a_constant_is_checked(n: int) -> None:
    def define(fd: Any) -> None:
        x, y = tensor(fd, -1), tensor(fd, 4)
        fd.add_output(fd.ops.add(fd.ops.pad(x, [1, 1]), y))

    y = torch.randn(4)
    if n == 2:
        x = torch.randn(2)
        torch.testing.assert_close(both_ways(define, x, y), torch.nn.functional.pad(x, [1, 1]) + y)
    else:
        refused(define, torch.randn(n), y, match=f"= {n + 2} and 4 = 4.*axis 0 of T0")


def rotated(fd: Any, *, by_table: bool = False) -> None:
    """Defines RoPE; the head size is twice the extent of the tables.

    With `by_table`, the tables determine the size of the half.
    """
    x, cos, sin = tensor(fd, -1, -1, -1), tensor(fd, -1, -1), tensor(fd, -1, -1)
    b, s, h = (x.size(i) for i in range(3))
    half = cos.size(1) if by_table else fd.ops.div(h, 2)
    first = fd.ops.slice(x, [0, 0, 0], [b, s, half])
    second = fd.ops.slice(x, [0, 0, half], [b, s, h])
    c, d = (fd.ops.broadcast_in_dim(t, [1, t.size(0), t.size(1)], [1, 2]) for t in (cos, sin))
    parts = [
        fd.ops.sub(fd.ops.mul(first, c), fd.ops.mul(second, d)),
        fd.ops.add(fd.ops.mul(second, c), fd.ops.mul(first, d)),
    ]
    fd.add_output(fd.ops.add(fd.ops.cat(parts, 2), x))


@pytest.mark.parametrize("by_table", [False, True])
def test_rope_with_a_symbolic_head_size(by_table: bool) -> None:
    def define(fd: Any) -> None:
        rotated(fd, by_table=by_table)

    x, cos, sin = torch.randn(2, 3, 8), torch.randn(3, 4), torch.randn(3, 4)
    first, second = x[..., :4], x[..., 4:]
    want = torch.cat([first * cos - second * sin, second * cos + first * sin], 2) + x
    torch.testing.assert_close(both_ways(define, x, cos, sin), want)
    wrong = "T[12]" if by_table else "T1"
    refused(define, x, torch.randn(3, 3), sin, match=f"{wrong}.*but got [34]")


@pytest.mark.parametrize("shapes", [((0, 3), (0, 3)), ((3, 0), (3, 0)), ((0, 0), (0, 0))])
def test_inputs_that_share_an_empty_extent(shapes: tuple[tuple[int, ...], ...]) -> None:
    def define(fd: Any) -> None:
        fd.add_output(fd.ops.add(tensor(fd, -1, -1), tensor(fd, -1, -1)))

    assert both_ways(define, *(torch.empty(s) for s in shapes)).shape == shapes[0]
    refused(define, torch.empty(0, 3), torch.empty(0, 4), match="axis 1 of T0.*got 4")
    refused(define, torch.empty(0, 3), torch.empty(1, 3), match="axis 0 of T0.*got 1")


def test_a_product_over_a_shared_empty_extent_is_zero() -> None:
    def define(fd: Any) -> None:
        fd.add_output(fd.ops.matmul(tensor(fd, -1, -1), tensor(fd, -1, -1)))

    assert both_ways(define, torch.empty(2, 0), torch.empty(0, 3)).equal(torch.zeros(2, 3))


def test_integers_that_decide_no_size_share_a_program() -> None:
    with FusionDefinition() as fd:
        x = tensor(fd, -1)
        n, m = (fd.define_scalar(None, dtype=DataType.Int) for _ in range(2))
        fd.add_output(fd.ops.slice(fd.ops.add(fd.ops.mul(x, n), n), [0], [m]))
    x = torch.arange(6.0)
    for value in (2, -3, 10**9 + 7):
        (out,) = fd.execute([x, value, 4])
        torch.testing.assert_close(out, (x * value + value)[:4])
    assert len(fd.fec._by_signature) == 1
    (out,) = fd.execute([x, 2, 3])
    torch.testing.assert_close(out, (x * 2 + 2)[:3])


@pytest.mark.parametrize("declared", [(-1, 37, -1, 6), (-1, -1, -1, -1)])
def test_a_chain_of_symbolic_reshapes(declared: tuple[int, ...]) -> None:
    """The sizes include empty tensors, for which an axis of size 1 once could not be squeezed."""
    with FusionDefinition() as fd:
        x = tensor(fd, *declared)
        t = fd.ops.reshape(x, [1, x.size(0), 37, x.size(2), 2, 3])
        rows, pairs = t.size(1), fd.ops.mul(t.size(3), 2)
        fd.add_output(fd.ops.add(fd.ops.reshape(t, [rows, 1, 37, pairs, 3]), 1.0))
    for n, m in [(2, 4), (0, 4), (2, 0), (0, 0), (1, 1), (1, 0), (37, 2), (2, 4)]:
        x = torch.randn(n, 37, m, 6)
        (out,) = fd.execute([x])
        torch.testing.assert_close(out, x.reshape(n, 1, 37, m * 2, 3) + 1.0)
