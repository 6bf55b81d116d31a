"""Slices and pads that leave one element yield a broadcast, as with constant sizes.

This is decided per input class; values are compared with torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fuser import DataType, DeviceMesh, FusionDefinition, ParallelType
from fuser.frontend.manual_kernels import KernelExecutor
from fuser.ir.binding import bind_inputs
from fuser.ir.types import IterType
from fuser.passes.concretize import KeyOfSizes, concretize
from fuser.support.errors import InputError
from multidevice import shard_tensor, simulate
from tests.support.definition_copies import again

pytestmark = pytest.mark.from_text

Op = Callable[[Any, Any, Any], Any]
FLOAT = DataType.Float
Torch = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def row(fd: Any, x: Any, n: int) -> Any:
    return fd.ops.slice(x, [n, 0], [n + 1, 4])


# Name -> (definition, torch function, sizes of x and y).
CASES: dict[str, tuple[Op, Torch, list[tuple[tuple[int, int], tuple[int, int]]]]] = {
    "first row": (
        lambda fd, x, y: fd.ops.add(row(fd, x, 0), y),
        lambda x, y: x[:1, :4] + y,
        [((5, 4), (5, 4)), ((1, 4), (5, 4)), ((7, 9), (3, 4)), ((0, 4), (0, 4)), ((2, 4), (1, 4))],
    ),
    "third row, computed with": (
        lambda fd, x, y: fd.ops.mul(fd.ops.relu(fd.ops.neg(row(fd, x, 2))), y),
        lambda x, y: x[2:3, :4].neg().relu() * y,
        [((5, 4), (5, 4)), ((3, 4), (5, 4)), ((2, 4), (0, 4)), ((9, 4), (2, 4))],
    ),
    "expand": (
        lambda fd, x, y: fd.ops.expand(row(fd, x, 0), [5, -1]),
        lambda x, y: x[:1, :4].expand(5, -1),
        [((5, 4), (5, 4)), ((1, 6), (5, 4))],
    ),
    "expand to a size of an input": (
        lambda fd, x, y: fd.ops.expand(row(fd, x, 0), [y.size(0), -1]),
        lambda x, y: x[:1, :4].expand(y.shape[0], -1),
        [((5, 4), (5, 4)), ((5, 4), (1, 4)), ((5, 4), (3, 4))],
    ),
    "expand of another axis": (
        lambda fd, x, y: fd.ops.expand(
            fd.ops.broadcast(fd.ops.squeeze(row(fd, x, 1), [0]), [True, False]),
            [fd.ops.sub(y.size(0), 1), -1],
        ),
        lambda x, y: x[1, :4].expand(y.shape[0] - 1, -1),
        [((5, 4), (2, 1)), ((5, 4), (4, 1)), ((5, 4), (1, 1))],
    ),
    "squeeze": (
        lambda fd, x, y: fd.ops.add(fd.ops.squeeze(row(fd, x, 2), [0]), fd.ops.sum(y, 0)),
        lambda x, y: x[2, :4] + y.sum(0),
        [((5, 4), (5, 4)), ((3, 4), (5, 4)), ((8, 8), (2, 4))],
    ),
    "last row": (
        lambda fd, x, y: fd.ops.squeeze(
            fd.ops.slice(x, [fd.ops.sub(x.size(0), 1), 0], [x.size(0), 4]), [0]
        ),
        lambda x, y: x[-1, :4],
        [((5, 4), (5, 4)), ((1, 4), (5, 4)), ((3, 7), (5, 4))],
    ),
    "crop by a pad": (
        lambda fd, x, y: fd.ops.add(fd.ops.pad(x, [0, -3]), y),
        lambda x, y: x[:, : x.shape[1] - 3] + y,
        [((5, 4), (5, 4)), ((5, 7), (5, 4)), ((5, 8), (5, 5)), ((5, 4), (5, 1)), ((5, 3), (5, 0))],
    ),
    "two crops": (
        lambda fd, x, y: fd.ops.sub(fd.ops.pad(x, [0, -3]), fd.ops.pad(y, [-2, 0])),
        lambda x, y: x[:, : x.shape[1] - 3] - y[:, 2:],
        [((5, 4), (5, 9)), ((5, 9), (5, 3)), ((5, 4), (5, 3)), ((5, 7), (5, 6)), ((5, 9), (5, 8))],
    ),
    "from the second row": (
        lambda fd, x, y: fd.ops.add(
            fd.ops.slice(x, [1, 0], [x.size(0), x.size(1)]),
            fd.ops.slice(y, [0, 0], [fd.ops.sub(y.size(0), 1), y.size(1)]),
        ),
        lambda x, y: x[1:] + y[:-1],
        [((5, 4), (5, 4)), ((2, 4), (5, 4)), ((5, 4), (2, 4)), ((2, 4), (2, 4)), ((1, 4), (1, 4))],
    ),
    "matmul": (
        lambda fd, x, y: fd.ops.matmul(row(fd, x, 1), y),
        lambda x, y: x[1:2, :4] @ y,
        [((5, 4), (4, 3)), ((2, 4), (4, 4)), ((1, 4), (4, 4))],
    ),
    "product of a column": (
        lambda fd, x, y: fd.ops.matmul(fd.ops.pad(x, [0, -3]), y),
        lambda x, y: x[:, : x.shape[1] - 3] @ y,
        [((5, 4), (1, 3)), ((5, 7), (4, 3)), ((5, 4), (1, 1)), ((5, 3), (0, 3))],
    ),
    "sum of what is spread": (
        lambda fd, x, y: fd.ops.add(fd.ops.expand(row(fd, x, 1), [3, -1]), y),
        lambda x, y: x[1:2, :4].expand(3, -1) + y,
        [((5, 4), (3, 4)), ((2, 4), (3, 4))],
    ),
    "a sum over it": (
        lambda fd, x, y: fd.ops.sum(fd.ops.add(row(fd, x, 1), y), 0),
        lambda x, y: (x[1:2, :4] + y).sum(0),
        [((5, 4), (5, 4)), ((2, 4), (6, 4)), ((1, 4), (0, 4))],
    ),
    "the size of two crops together": (
        lambda fd, x, y: fd.ops.full(
            [fd.ops.add(fd.ops.pad(x, [0, -3]), fd.ops.pad(y, [-2, 0])).size(1)], 2.0, FLOAT
        ),
        lambda x, y: torch.full_like((x[:, : x.shape[1] - 3] + y[:, 2:])[0], 2.0),
        [((5, 4), (5, 9)), ((5, 9), (5, 3)), ((5, 4), (5, 3)), ((5, 7), (5, 6))],
    ),
    "reshape": (
        lambda fd, x, y: fd.ops.reshape(fd.ops.relu(row(fd, x, 2)), [4]),
        lambda x, y: x[2, :4].relu(),
        [((5, 4), (5, 4)), ((3, 4), (5, 4))],
    ),
}


def defined(op: Op) -> FusionDefinition:
    with FusionDefinition() as fd:
        x, y = (fd.define_tensor([-1, -1]) for _ in range(2))
        fd.add_output(op(fd, x, y))
    return fd


@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    """One definition runs twice with all sizes, and so does the definition of its text."""
    op, means, shapes = CASES[name]
    fd = defined(op)
    for one in (fd, again(fd)):
        for a, b in (*shapes, *shapes[::-1]):
            x, y = torch.randn(a), torch.randn(b)
            (out,) = one.execute([x, y])
            want = means(x.double(), y.double()).float()
            torch.testing.assert_close(out, want, msg=lambda m, s=(a, b): f"{s}: {m}")


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        # An empty axis cannot be broadcast or squeezed.
        ("first row", ((5, 4), (5, 4)), ((0, 4), (5, 4))),
        ("third row, computed with", ((3, 4), (5, 4)), ((2, 4), (5, 4))),
        ("expand", ((5, 4), (5, 4)), ((0, 4), (5, 4))),
        ("squeeze", ((3, 4), (5, 4)), ((2, 4), (5, 4))),
        # Two elements remain; the sizes before were of the same class.
        ("crop by a pad", ((5, 7), (5, 4)), ((5, 5), (5, 4))),
        ("two crops", ((5, 7), (5, 6)), ((5, 7), (5, 8))),
        # The product needs equal extents.
        ("product of a column", ((5, 4), (1, 3)), ((5, 4), (2, 3))),
        ("product of a column", ((5, 4), (1, 3)), ((5, 4), (0, 3))),
        # The other operand does not count as a broadcast, because it is an input.
        ("sum of what is spread", ((5, 4), (3, 4)), ((5, 4), (1, 4))),
    ],
)
def test_sizes_that_do_not_fit(name: str, right: Any, wrong: Any) -> None:
    fresh, used = (defined(CASES[name][0]) for _ in range(2))
    used.execute([torch.randn(s) for s in right])
    for fd in (fresh, used):
        with pytest.raises(InputError, match=r"size|extent|constant value"):
            fd.execute([torch.randn(s) for s in wrong])


def test_an_expand_of_many_keeps_its_size() -> None:
    fd = defined(lambda fd, x, y: fd.ops.expand(fd.ops.pad(x, [0, -3]), [-1, y.size(1)]))
    fd.execute([torch.randn(5, 7), torch.randn(5, 4)])
    with pytest.raises(InputError, match="extent"):
        fd.execute([torch.randn(5, 8), torch.randn(5, 4)])


def kind_of(op: Op) -> IterType:
    return defined(op).fusion.outputs[0].domain.logical[0].kind


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        (lambda fd, x, y: fd.ops.slice(x, [0, 0], [5, 4]), IterType.iteration),
        (lambda fd, x, y: fd.ops.slice(x, [3, 0], [5, 4]), IterType.iteration),
        (lambda fd, x, y: fd.ops.slice(x, [0, 0], [y.size(0), 4]), IterType.iteration),
        (
            lambda fd, x, y: fd.ops.slice(x, [0, 0], [fd.ops.div(x.size(0), 2), 4]),
            IterType.iteration,
        ),
        (lambda fd, x, y: fd.ops.pad(x, [0, 0, 1, 0]), IterType.iteration),
        (lambda fd, x, y: fd.ops.pad(x, [0, 0, 1, -1]), IterType.iteration),
        (lambda fd, x, y: fd.ops.cat([x, y], 0), IterType.iteration),
        (lambda fd, x, y: fd.ops.slice(x, [2, 0], [3, 4]), IterType.symbolic),
        (lambda fd, x, y: fd.ops.pad(x, [0, 0, -1, 0]), IterType.symbolic),
        (
            lambda fd, x, y: fd.ops.slice(x, [fd.ops.sub(x.size(0), 1), 0], [x.size(0), 4]),
            IterType.broadcast,
        ),
    ],
)
def test_only_what_may_leave_one_element_is_undecided(op: Op, kind: IterType) -> None:
    assert kind_of(op) is kind


@pytest.mark.parametrize("size", [-1, 5])
def test_bounds_decide_whatever_is_known_of_the_axis(size: int) -> None:
    with FusionDefinition() as fd:
        x, n = fd.define_tensor([size]), fd.define_scalar(None, dtype=DataType.Int)
        ends = {"?": [(n, fd.ops.add(n, 1)), (0, n), (n, 4)], "i": [(n, fd.ops.add(n, 2)), (1, 4)]}
        found = {k: [fd.ops.slice(x, [a], [b]) for a, b in pairs] for k, pairs in ends.items()}
        for tv in (*found["?"], *found["i"]):
            fd.add_output(fd.ops.add(tv, 0.0))
    for kind, tensors in found.items():
        assert [tv.domain.logical[0].kind.value for tv in tensors] == [kind] * len(tensors)
    given = torch.rand(5)
    for one, k in itertools.product((fd, again(fd)), (1, 3, 2, 0)):
        expected = [given[k : k + 1], given[:k], given[k:4], given[k : k + 2], given[1:4]]
        torch.testing.assert_close(
            one.execute([given, k]), expected, msg=lambda m, k=k: f"{k}: {m}"
        )


def test_classes() -> None:
    """A sliced row has the classes of its clamps; a crop has one more, for one remaining
    element."""

    def keys(op: Op, sizes: list[int]) -> list[object]:
        fusion = defined(op).fusion
        key = KeyOfSizes(fusion)
        inputs = [torch.zeros(n, 9) for n in sizes]
        return [key(bind_inputs(fusion, [x, torch.zeros(2, 2)])) for x in inputs]  # pyright: ignore

    third = keys(lambda fd, x, y: row(fd, x, 2), [2, 3, 4, 5, 100])
    assert third[0] != third[1] and len(set(third[2:])) == 1
    crop = keys(lambda fd, x, y: fd.ops.pad(x, [0, 0, -1, 0]), [2, 3, 4, 100])
    assert crop[0] != crop[1] and len(set(crop[1:])) == 1


@pytest.mark.parametrize("axis", [0, 1])
def test_on_two_ranks(axis: int) -> None:
    """x [i0, i1] and y [i2, i1] are sharded along `axis` of the result."""
    shapes = [((6, 4), (4, 4)), ((2, 4), (4, 4)), ((6, 8), (6, 8))]
    pairs = [(torch.randn(a), torch.randn(b)) for a, b in shapes]

    def body() -> None:
        with FusionDefinition() as fd:
            x, y = (fd.define_tensor([-1, -1]) for _ in range(2))
            out = fd.ops.add(fd.ops.slice(x, [1, 0], [2, x.size(1)]), y)
            fd.add_output(out)
            for tv in (x, y, out):
                tv.set_device_mesh(DeviceMesh(torch.arange(2)))
            for tv in (y, out) if axis == 0 else (x, y, out):
                tv.outer_split(axis, 2)
                tv.axis(axis).parallelize(ParallelType.mesh_x)
        for a, b in pairs:
            (found,) = fd.execute([shard_tensor(a, x), shard_tensor(b, y)])
            want = (a.double()[1:2] + b.double()).float()
            torch.testing.assert_close(found, shard_tensor(want, out))

    with simulate(2) as world:
        world.run(body)


def test_in_a_kernel_of_ones_own() -> None:
    """In a manual kernel, resized axes iterate; joined axes must have their size."""
    fd = defined(lambda fd, x, y: fd.ops.add(fd.ops.slice(x, [1, 0], [x.size(0), x.size(1)]), y))
    executor = KernelExecutor()
    executor.compile(fd.fusion)
    x, y = torch.randn(6, 4), torch.randn(5, 4)
    torch.testing.assert_close(executor.run([x, y])[0], x[1:] + y)
    with pytest.raises(InputError, match="extent"):
        executor.run([torch.randn(2, 4), y])


def test_a_part_that_is_the_whole_joins_what_it_was_cut_from() -> None:
    """The equality `i0 = min(4, i1)` with the result `i1` keeps its direction when sizes decide
    it."""
    shapes = [(4,), (4,)]
    for joined in (lambda fd, p, x, z: (p + x) + z, lambda fd, p, x, z: (p + z) + x):
        for order in ((0, 1), (1, 0)):
            with FusionDefinition() as fd:
                inputs = [fd.define_tensor([-1], contiguity=True) for _ in shapes]
                x, z = (inputs[k] for k in order)
                fd.add_output(joined(fd, fd.ops.slice(z, [0], [4]), x, z))
            a, b = (torch.randn(s) for s in shapes)
            for made in (fd, again(fd)):
                got = made.execute([a, b])[0]
                torch.testing.assert_close(got, a + b + (a, b)[order[1]])
            with pytest.raises(InputError):
                fd.execute([torch.randn(3), torch.randn(5)])


def test_what_is_spread_is_known_to_fit_before_it_is_joined() -> None:
    fusion = defined(CASES["sum of what is spread"][0]).fusion
    sizes = bind_inputs(fusion, [torch.zeros(5, 4), torch.zeros(1, 4)])
    with pytest.raises(InputError, match="found 3 and 1 in add"):
        concretize(fusion, sizes)  # pyright: ignore[reportArgumentType]
