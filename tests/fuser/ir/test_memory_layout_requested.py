"""The result has the declared memory order: every stride, also along axes of size 0 and 1.

The expected strides are those of a dense tensor that torch allocates in that order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations, product

import pytest
import torch

import multidevice
from fuser import DataType, FusionDefinition, ParallelType, TensorView
from multidevice import DeviceMesh
from tests.support.definition_copies import again

pytestmark = pytest.mark.from_text

Shape = Sequence[int]
EXTENTS = (0, 1, 2, 5)
MESH = DeviceMesh([0, 1])


def dense(shape: Shape, order: Shape) -> torch.Tensor:
    """Returns a tensor that torch allocates with an order of axes, outermost first."""
    back = [list(order).index(p) for p in range(len(order))]
    return torch.randn([shape[p] for p in order]).permute(back)


def some_orders(rng: random.Random, rank: int, count: int) -> list[tuple[int, ...]]:
    """Returns all orders of `rank` axes, or `count` random ones if there are more."""
    orders = list(permutations(range(rank)))
    return rng.sample(orders, min(len(orders), count))


def ranks(order: Shape) -> list[int]:
    """Returns an order in the form of `stride_order`: the rank of each axis by stride."""
    return [len(order) - 1 - list(order).index(p) for p in range(len(order))]


@dataclass(frozen=True)
class Made:
    """A definition of a result of any order, with its torch function and the smallest rank."""

    define: Callable[[FusionDefinition, TensorView], TensorView]
    torch: Callable[[torch.Tensor], torch.Tensor]
    least: int = 1


def linear(fd: FusionDefinition, x: TensorView) -> TensorView:
    size = x.size(-1)
    weight = fd.ops.full([3, size], 1.0, DataType.Float)
    return fd.ops.linear(x, weight)


MADE = {
    "the input": Made(lambda fd, x: x, lambda x: x),
    "pointwise": Made(lambda fd, x: fd.ops.neg(x), lambda x: -x),
    "permuted": Made(
        lambda fd, x: fd.ops.permute(x, [*range(1, x.ndim), 0]),
        lambda x: x.permute([*range(1, x.dim()), 0]),
    ),
    "a sum": Made(lambda fd, x: fd.ops.sum(x, [0], keepdim=True), lambda x: x.sum(0, keepdim=True)),
    "a part": Made(
        lambda fd, x: fd.ops.slice(fd.ops.pad(x, [1, 1]), [0] * x.ndim, x.shape()),
        lambda x: torch.nn.functional.pad(x, [1, 0])[..., :-1],
    ),
    "a product": Made(linear, lambda x: x.sum(-1, keepdim=True).expand(*x.shape[:-1], 3), 2),
    "joined": Made(lambda fd, x: fd.ops.cat([x, x], 0), lambda x: torch.cat([x, x])),
}


def check(found: torch.Tensor, reference: torch.Tensor, order: Shape, what: object) -> None:
    torch.testing.assert_close(found, reference, rtol=1e-5, atol=1e-5, msg=lambda m: f"{what}: {m}")
    assert found.stride() == dense(reference.shape, order).stride(), (what, found.stride())


@pytest.mark.parametrize("name", MADE)
def test_a_result_has_the_order_that_it_is_given(name: str) -> None:
    made, rng = MADE[name], random.Random(name)
    for rank in range(made.least, 5):
        for order in some_orders(rng, rank, 2):
            is_static = rng.random() < 0.5
            shapes = rng.sample(list(product(EXTENTS, repeat=rank)), 1 if is_static else 3)
            with FusionDefinition() as fd:
                x = fd.define_tensor(shapes[0] if is_static else [-1] * rank)
                fd.add_output(fd.ops.stride_order(made.define(fd, x), ranks(order)))
            written = again(fd)
            for shape in shapes:
                given = dense(shape, rng.sample(range(rank), rank))
                for one in (fd, fd, written):
                    (found,) = one.execute([given])
                    check(found, made.torch(given), order, (order, shape, given.stride()))


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_an_allocation_domain_is_an_order_too(rank: int) -> None:
    """An allocation domain sets the order, also of a result that could be a view of the input."""
    rng = random.Random(rank)
    for order in some_orders(rng, rank, 6):
        shape = [rng.choice(EXTENTS) for _ in range(rank)]
        turn = [*range(1, rank), 0]
        with FusionDefinition() as fd:
            x = fd.define_tensor([n if rng.random() < 0.5 else -1 for n in shape])
            for out in (fd.ops.abs(x), fd.ops.permute(x, turn)):
                axes = out.get_logical_domain()
                out.set_allocation_domain([axes[p] for p in order], rng.random() < 0.5)
                fd.add_output(out)
        for own in some_orders(rng, rank, 3):
            given = dense(shape, own)
            size, turned = fd.execute([given])
            check(size, given.abs(), order, (order, shape, own))
            check(turned, given.permute(turn), order, (order, shape, own))
            lies_so = given.permute(turn).stride() == turned.stride()
            is_view = turned.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
            if given.numel() and 1 not in shape:
                assert is_view == lies_so, (order, shape, own)


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_an_expanded_axis_has_stride_0_in_any_order(rank: int) -> None:
    rng = random.Random(rank)
    for order in some_orders(rng, rank, 6):
        axis = rng.randrange(rank)
        shape = [1 if p == axis else rng.choice(EXTENTS) for p in range(rank)]
        with FusionDefinition() as fd:
            x = fd.define_tensor([1 if p == axis else -1 for p in range(rank)])
            wide = fd.ops.expand(fd.ops.neg(x), [3 if p == axis else -1 for p in range(rank)])
            fd.add_output(fd.ops.stride_order(wide, ranks(order)))
        given = dense(shape, rng.sample(range(rank), rank))
        (found,) = fd.execute([given])
        wanted = dense(shape, order).expand([3 if p == axis else -1 for p in range(rank)])
        assert torch.equal(found, -given.expand(wanted.shape))
        assert found.stride() == wanted.stride(), (order, shape, found.stride())


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_shard_has_the_order_that_the_whole_is_given(is_cut: bool) -> None:
    def body(order: Shape, shape: Shape) -> None:
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1] * len(shape))
            y = fd.ops.neg(x)
            out = fd.ops.stride_order(y, ranks(order))
            fd.add_output(out)
            for tv in (x, y, out):
                tv.set_device_mesh(MESH)
            for tv in (x, *((y, out) if is_cut else ())):
                tv.outer_split(0, 2)
                tv.axis(0).parallelize(ParallelType.mesh_x)
        mine = dense(shape, range(len(shape)))
        (found,) = fd.execute([mine])
        whole = mine if is_cut else torch.empty([2 * shape[0], *shape[1:]])
        assert found.shape == whole.shape
        assert found.stride() == dense(whole.shape, order).stride(), (order, shape, found.stride())
        if is_cut:
            assert torch.equal(found, -mine)

    rng = random.Random(3)
    with multidevice.simulate(2) as world:
        for order in permutations(range(3)):
            shape = [rng.choice(EXTENTS) for _ in range(3)]
            world.run(lambda order=order, shape=shape: body(order, shape))
