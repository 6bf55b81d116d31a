"""Expanded tensors as inputs, intermediates and outputs: memory holds one element of their axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from fuser import DataType, FusionDefinition
from fuser.ir.dtypes import to_torch

pytestmark = pytest.mark.from_text

Define = Callable[[FusionDefinition], None]

X = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
Y = torch.randn(5, 6, 16, generator=torch.Generator().manual_seed(1))
W = torch.randn(5, 1, 3, generator=torch.Generator().manual_seed(2))
CASES: dict[str, tuple[Define, Sequence[torch.Tensor], Sequence[torch.Tensor]]] = {}


def case(inputs: Sequence[torch.Tensor], *expected: torch.Tensor) -> Callable[[Define], Define]:
    def add(define: Define) -> Define:
        CASES[define.__name__] = (define, inputs, expected)
        return define

    return add


@case([X], X.expand(3, 5, 16))
def outermost(fd: FusionDefinition) -> None:
    """Expands an outermost axis. It once wrote 240 elements into a buffer of 80."""
    x = fd.define_tensor([5, 16], contiguity=True)
    fd.add_output(fd.ops.expand(fd.ops.broadcast(x, [True, False, False]), [3, -1, -1]))


@case([W.expand(5, 4, 3)], W.expand(5, 4, 3) + 1)
def expanded_input(fd: FusionDefinition) -> None:
    x = fd.define_tensor([5, 4, 3], contiguity=[True, None, True])
    fd.add_output(fd.ops.add(x, 1.0))


@case([X, Y], (2 * X)[:, None].expand(5, 6, 16), (2 * X)[:, None] + Y)
def beside_a_full_output(fd: FusionDefinition) -> None:
    x, y = fd.define_tensor([-1, -1], contiguity=True), fd.define_tensor([-1, -1, -1], True)
    twice = fd.ops.mul(fd.ops.expand(fd.ops.broadcast(x, [False, True, False]), [-1, 6, -1]), 2.0)
    fd.add_output(twice)
    fd.add_output(fd.ops.add(twice, y))


@case([X], X.sum(1, keepdim=True).expand(5, 9), (3 * X.sum(1, keepdim=True)).expand(5, 9))
def of_a_reduction(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1, -1], contiguity=True)
    wide = fd.ops.expand(fd.ops.broadcast(fd.ops.sum(x, [1]), [False, True]), [-1, 9])
    fd.add_output(wide)
    fd.add_output(fd.ops.mul(wide, 3.0))


@case([X], X[..., None].expand(5, 16, 8), 8 * X.sum(0))
def reduced_again(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1, -1], contiguity=True)
    wide = fd.ops.expand(fd.ops.broadcast(x, [False, False, True]), [-1, -1, 8])
    fd.add_output(wide)
    fd.add_output(fd.ops.sum(wide, [0, 2]))


@case([X], X.expand(4, 5, 16).permute(1, 0, 2), (2 * X).expand(4, 5, 16).reshape(20, 16))
def permuted_and_reshaped(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1, -1], contiguity=True)
    wide = fd.ops.expand(fd.ops.broadcast(x, [True, False, False]), [4, -1, -1])
    fd.add_output(fd.ops.permute(wide, [1, 0, 2]))
    fd.add_output(fd.ops.reshape(fd.ops.mul(wide, 2.0), [20, 16]))


@case([X], X.amax(1, True).expand(5, 16), X - X.amax(1, True), -X.amax(1, True))
def the_spelling_of_norms(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1, -1], contiguity=True)
    most = fd.ops.max(x, [1], keepdim=True)
    wide = fd.ops.expand(most, [fd.ops.size(x, 0), fd.ops.size(x, 1)])
    for out in (wide, fd.ops.sub(x, wide), fd.ops.neg(most)):
        fd.add_output(out)


@case([X[:1].expand(3, 16), X], X[:1].expand(3, 16) @ X.t())
def of_a_linear(fd: FusionDefinition) -> None:
    x = fd.define_tensor([3, 16], contiguity=[None, True])
    fd.add_output(fd.ops.linear(x, fd.define_tensor([-1, -1], contiguity=True)))


@case([X[:1].expand(3, 16)], 2 * X[:1].expand(3, 16))
def behind_a_border(fd: FusionDefinition) -> None:
    x = fd.define_tensor([3, 16], contiguity=[None, True])
    fd.add_output(fd.ops.segment_set(fd.ops.mul(x, 2.0)))


@pytest.mark.parametrize("schedules", [[], ["schedules_for(h200)"]], ids=["cpu", "h200"])
@pytest.mark.parametrize("name", CASES)
def test_expanded_tensors_stay_inside_their_buffers(name: str, schedules: list[str]) -> None:
    define, inputs, expected = CASES[name]
    with FusionDefinition() as fd:
        define(fd)
    for _ in range(2):
        found = fd.execute(list(inputs), _enable_options=["checked", *schedules])
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got, want)


def test_an_expanded_output_has_stride_0() -> None:
    with FusionDefinition() as fd:
        outermost(fd)
    (found,) = fd.execute([X])
    assert found.stride() == (0, 16, 1)
    assert found.untyped_storage().nbytes() == X.numel() * X.element_size()


def test_a_kernel_by_hand_allocates_expanded_outputs_alike() -> None:
    with FusionDefinition() as fd:
        outermost(fd)
    (found,) = fd.manual_execute([X])
    assert found.stride() == (0, 16, 1)
    torch.testing.assert_close(found, X.expand(3, 5, 16))


@pytest.mark.parametrize("name", ["sum", "prod"])
@pytest.mark.parametrize("dtype", [DataType.Half, DataType.BFloat16])
def test_half_precision_over_an_expanded_axis_is_rounded_once(name: str, dtype: DataType) -> None:
    base = torch.tensor([[1.01], [0.997], [1.113]]).to(to_torch(dtype))
    t = base.expand(3, 4)
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=[True, None], dtype=dtype)
        fd.add_output(getattr(fd.ops, name)(x, [0, 1]))
    (got,) = fd.execute([t])
    want = getattr(t.double(), name)()
    assert abs(got.double() - want) <= want * torch.finfo(got.dtype).eps / 2 * 1.01
