"""Inputs that the first call of a signature rejects are rejected by every later call."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fuser import DataType, FusionDefinition, InputError
from fuser.frontend import executor_cache

pytestmark = pytest.mark.from_text


def doubled() -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.mul(x, 2.0))
    fd.execute([torch.randn(2, 3)])
    return fd


def short() -> torch.Tensor:
    t = torch.randn(100).as_strided((2, 3), (3, 1))
    t.untyped_storage().resize_(8)
    return t


def short_behind_an_offset() -> torch.Tensor:
    t = torch.randn(100).as_strided((2, 3), (3, 1), 90)
    t.untyped_storage().resize_(4 * 95)
    return t


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.randn(2, 3)


@pytest.mark.parametrize("make", [short, short_behind_an_offset, fake])
def test_tensors_that_kernels_cannot_read(make: Callable[[], torch.Tensor]) -> None:
    fd = doubled()
    for _ in range(2):
        with pytest.raises(InputError):
            fd.execute([make()])
    x = torch.randn(2, 3)
    assert torch.equal(fd.execute([x])[0], x * 2)


def nested() -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):
        return torch.nested.nested_tensor([torch.randn(3), torch.randn(3)])


@pytest.mark.parametrize(
    "given",
    [
        lambda: [short()],
        lambda: [short_behind_an_offset()],
        lambda: [fake()],
        lambda: [nested()],
        lambda: [torch.randn(2, 3), nested()],
        lambda: [torch.randn(2, 3)] * 2,
        list,
        lambda: [2.0],
        lambda: torch.randn(2, 3),
        lambda: [torch.randn(2, 3, dtype=torch.float64)],
    ],
)
@pytest.mark.parametrize("shapes", [((2, 3),), ((2, 3), (4, 3))])
def test_what_is_known_at_a_glance_is_still_looked_at(
    given: Callable[[], list[object]], shapes: list[tuple[int, int]]
) -> None:
    """The quick check of repeated calls must still reject wrong inputs.

    It compares with the inputs of the previous call, then with those of a call whose first input
    had this shape.
    """
    fd, tensors = doubled(), [torch.randn(shape) for shape in shapes]
    for x in tensors * 2:
        fd.execute([x])
    for _ in range(2):
        for x in tensors:
            with pytest.raises(InputError):
                fd.execute(given())
            assert torch.equal(fd.execute([x])[0], x * 2)
            assert torch.equal(fd.execute(iter([x]))[0], x * 2)


def test_sizes_in_turns_are_known_at_a_glance(monkeypatch: pytest.MonkeyPatch) -> None:
    with FusionDefinition() as fd:
        x, w = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
        fd.add_output(fd.ops.matmul(x, w))
    sets = [(torch.randn(n, 3), torch.randn(3, n)) for n in (2, 4, 5)]
    for x, w in sets * 3:
        fd.execute([x, w])
    # The shape of the first input is known, but with another second input.
    other = torch.randn(3, 7)
    for x, w in [*sets, (sets[0][0], other), sets[0], (sets[0][0], other)]:
        torch.testing.assert_close(fd.execute([x, w])[0], x @ w)

    def look(*given: object) -> None:
        raise AssertionError("a signature was made of inputs that are known")

    for x, w in sets:
        fd.execute([x, w])
    monkeypatch.setattr(executor_cache, "signature_of", look)
    for x, w in sets * 2:
        torch.testing.assert_close(fd.execute([x, w])[0], x @ w)


def test_programs_in_turns_are_the_latest_ones() -> None:
    """If two classes of inputs take turns, `host_program` returns the program of the latest
    call."""
    with FusionDefinition() as fd:
        x, y = (fd.define_tensor([-1, -1]) for _ in range(2))
        fd.add_output(fd.ops.add(x, y))
    sets = [[torch.randn(4, 3)] * 2, [torch.randn(3, 4).t().contiguous().t()] * 2]
    programs: list[object] = []
    for given in sets * 4:
        (out,) = fd.execute(given)
        assert torch.equal(out, given[0] * 2)
        programs.append(fd.fec.host_program())
    assert programs[-2:] == programs[:2] and programs[0] is not programs[1]


def test_a_view_between_two_vectors_has_a_kernel_of_its_own() -> None:
    fd, x = doubled(), torch.randn(20)
    for shift in (0, 1, 0, 2, 1, 0):
        for _ in range(3):
            view = x[shift : shift + 6].view(2, 3)
            assert torch.equal(fd.execute([view])[0], view * 2)


@pytest.mark.parametrize("device", ["abc", -1, 300, 1.5, [1], "meta", "cuda:99"])
def test_devices_that_do_not_fit(device: object) -> None:
    with pytest.raises(InputError):
        doubled().execute([torch.randn(2, 3)], device=device)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("dtype", "good", "bad"),
    [
        (DataType.Int32, 2, 2**40 + 3),
        (DataType.Int32, 2, -(2**31) - 1),
        (DataType.Half, 1.5, 1e6),
        (DataType.Float, 1.5, 1e300),
        (DataType.Int, 2, 2**63),
    ],
)
def test_numbers_out_of_range(dtype: DataType, good: float, bad: float) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        n = fd.define_scalar(None, dtype)
        fd.add_output(fd.ops.mul(x, n))
    x = torch.ones(3)
    fd.execute([x, good])
    with pytest.raises(InputError, match="range"):
        fd.execute([x, bad])
    assert fd.execute([x, good])[0][0] == good


def test_tensors_inside_a_function_transform_are_refused_by_name() -> None:
    fd = doubled()
    with pytest.raises(InputError, match=r"torch\.func|plain tensor"):
        torch.func.vmap(lambda v: fd.execute([v])[0])(torch.randn(4, 2, 3))
