"""Outputs have the memory order of their inputs: every order, with gaps, stride 0 and size 1.

Values are compared with torch in float64. If torch has the same op, its strides are expected.
Otherwise they follow from the order that the test chose.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations

import pytest
import torch

import multidevice
from fuser import DataType, FusionDefinition, ParallelType, TensorView
from fuser.ir.memory_layout import memory_order
from fuser.kernels.executor import FusedKernelExecutor
from fuser.nvfuser.multi_device_executor import MultiDeviceExecutor
from fuser.support.errors import ProgramMismatchError
from hostir import HostIrEvaluator
from hostir.ir.parser import parse
from hostir.ir.program import equal
from multidevice import DeviceMesh

pytestmark = pytest.mark.from_text

Shape = Sequence[int]
SHAPE: tuple[int, ...] = (3, 4, 5, 2)
LAST = (0, 2, 3, 1)
MESH = DeviceMesh([0, 1])


def strided(shape: Shape, strides: Shape, offset: int = 0, seed: int = 0) -> torch.Tensor:
    """Returns a float32 tensor with these strides, whose first element is at `offset`."""
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    values = torch.randn(offset + span, generator=torch.Generator().manual_seed(seed))
    return values.as_strided(list(shape), list(strides), offset)


def strides_in(shape: Shape, order: Shape, gap: int = 0, step: int = 1) -> list[int]:
    """Returns the strides for an order of axes, outermost first, with `gap` elements behind
    each."""
    strides = [0] * len(shape)
    for p in reversed(order):
        strides[p] = step
        step = step * shape[p] + gap
    return strides


def laid(shape: Shape, order: Shape, seed: int = 0) -> torch.Tensor:
    return strided(shape, strides_in(shape, order), seed=seed)


def same_strides(found: torch.Tensor, wanted: Shape) -> bool:
    """Returns whether strides are equal along axes of more than one element."""
    known = zip(found.shape, found.stride(), wanted, strict=True)
    return all(n == 1 or mine == other for n, mine, other in known)


def check(found: torch.Tensor, reference: torch.Tensor, wanted: Shape, what: object) -> None:
    assert same_strides(found, wanted), (what, tuple(found.shape), found.stride(), tuple(wanted))
    torch.testing.assert_close(found.double(), reference, atol=1e-5, rtol=1e-5)


def defined(count: int, rank: int, build: Callable[..., Sequence[TensorView]]) -> FusionDefinition:
    """Returns a definition that declares no strides of its inputs."""
    with FusionDefinition() as fd:
        for out in build(fd, *(fd.define_tensor([-1] * rank) for _ in range(count))):
            fd.add_output(out)
    return fd


def ways(rank: int) -> Iterator[tuple[tuple[int, ...], list[int], list[int], int]]:
    """Yields (order, shape, strides, offset) of many layouts.

    They are dense, padded or sparse, have an axis of size 1 or stride 0, or an odd start address.
    """
    rng = random.Random(rank)
    for order in permutations(range(rank)):
        shape = [*SHAPE[:rank]]
        yield order, shape, strides_in(shape, order), 0
        if rank < 4 or rng.random() < 0.25:
            yield order, shape, strides_in(shape, order, gap=rng.randint(1, 3)), 1
            yield order, shape, strides_in(shape, order, step=2), 3
            axis = rng.randrange(rank)
            unit = [1 if k == axis else n for k, n in enumerate(shape)]
            odd = strides_in(unit, order)
            odd[axis] = rng.choice((odd[axis], 1, 977))
            yield order, unit, odd, 0
            repeated = strides_in(unit, order)
            repeated[axis] = 0
            yield order, shape, repeated, 1


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_every_order_of_one_input(rank: int) -> None:
    def build(fd: FusionDefinition, x: TensorView) -> Sequence[TensorView]:
        twice = fd.ops.add(x, x)
        return fd.ops.neg(x), fd.ops.sum(twice, [0]), fd.ops.permute(twice, [*range(1, rank), 0])

    fd = defined(1, rank, build)
    for order, shape, strides, offset in ways(rank):
        x = strided(shape, strides, offset)
        what = order, shape, strides
        negative, total, turned = fd.execute([x])
        # The rule is torch's: the order of a strided operand; row-major if an axis has stride 0.
        check(negative, -x.double(), torch.neg(x).stride(), what)
        wanted = torch.add(x, x).permute([*range(1, rank), 0])
        check(turned, wanted.double(), wanted.stride(), what)
        if 0 not in strides:
            kept = [p - 1 for p in order if p]
            check(total, 2 * x.double().sum(0), strides_in(shape[1:], kept), what)
        else:
            torch.testing.assert_close(total.double(), 2 * x.double().sum(0), atol=1e-5, rtol=1e-5)


def test_every_pair_of_orders() -> None:
    """Of two operands with the same number of axes, the first one decides, as in torch."""

    def build(fd: FusionDefinition, x: TensorView, y: TensorView) -> Sequence[TensorView]:
        return fd.ops.add(x, y), fd.ops.mul(fd.ops.neg(y), x)

    fd = defined(2, 3, build)
    shape = SHAPE[:3]
    for mine in permutations(range(3)):
        for other in permutations(range(3)):
            x, y = laid(shape, mine), laid(shape, other, 1)
            total, product = fd.execute([x, y])
            check(total, x.double() + y.double(), torch.add(x, y).stride(), (mine, other))
            check(product, -(x.double() * y.double()), torch.mul(y, x).stride(), (mine, other))


def test_a_repeated_operand_leaves_the_order_to_the_other() -> None:
    fd = defined(2, 3, lambda fd, x, y: [fd.ops.add(x, y)])
    shape = SHAPE[:3]
    row = torch.randn(1, 4, 1).expand(shape)
    for order in permutations(range(3)):
        y = laid(shape, order)
        (found,) = fd.execute([row, y])
        check(found, row.double() + y.double(), y.stride(), order)


def test_a_repeated_axis_is_another_class_than_a_padded_one() -> None:
    """Both have order (1, 0) with a gap, but the axis of stride 0 has no order."""
    fd = defined(1, 2, lambda fd, x: [fd.ops.neg(x)])
    for strides, wanted in (([1, 7], [1, 5]), ([1, 0], [4, 1]), ([1, 7], [1, 5])):
        x = strided([5, 4], strides)
        (found,) = fd.execute([x])
        check(found, -x.double(), wanted, strides)


def test_empty_tensors_and_scalars() -> None:
    fd = defined(1, 4, lambda fd, x: [fd.ops.neg(x), fd.ops.sum(x, [0, 1, 2, 3])])
    x = torch.empty(2, 0, 3, 4).to(memory_format=torch.channels_last)
    found, total = fd.execute([x])
    assert found.shape == x.shape and total == 0
    (found, total) = fd.execute([laid(SHAPE, LAST)])
    assert total.shape == () and total.stride() == ()


def norm(fd: FusionDefinition, x: TensorView) -> TensorView:
    var, mean = fd.ops.var_mean(x, [0, 2, 3], 0, True)
    scaled = fd.ops.rsqrt(fd.ops.add(var, 1e-5))
    return fd.ops.mul(fd.ops.sub(x, mean), scaled)


@pytest.mark.parametrize("schedules", [[], ["schedules_for(h200)"]], ids=["cpu", "h200"])
def test_batch_norm_of_a_channels_last_input_is_channels_last(schedules: list[str]) -> None:
    x = torch.randn(4, 16, 6, 7).to(memory_format=torch.channels_last)
    with FusionDefinition() as fd:
        fd.add_output(norm(fd, fd.from_pytorch(x)))
    (found,) = fd.execute([x], _enable_options=["checked", *schedules])
    assert found.is_contiguous(memory_format=torch.channels_last) and not found.is_contiguous()
    wanted = torch.nn.functional.batch_norm(x.double(), None, None, training=True)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)
    program = fd.fec._last().program  # pyright: ignore[reportPrivateUsage]
    for group in program.container.groups.values():
        whole = [tv for tv in (*group.fusion.inputs, *group.fusion.outputs) if _is_whole(tv)]
        assert whole
        held = {*group.fusion.inputs, *group.fusion.outputs}
        assert not any(tv.domain.allocation for tv in group.fusion.tensors() if tv not in held)
        for tv in whole:
            assert isinstance(tv, TensorView)
            assert memory_order(tv)[-1] == (1, True), f"channels lie one behind the other in {tv}"
        if schedules:
            kernels = program.kernel(group)
            assert isinstance(kernels, FusedKernelExecutor)
            (variant,) = kernels.variants
            wide = [nbytes for _, nbytes in variant.kernel.alignments if nbytes >= 8]
            assert len(wide) >= len(whole), "two channels, or four, are read and written at once"


def _is_whole(tv: object) -> bool:
    if not isinstance(tv, TensorView):
        return False
    return sum(not a.is_broadcast for a in tv.domain.no_reductions) == 4


def test_a_declared_order_is_kept() -> None:
    x = laid(SHAPE, LAST)
    with FusionDefinition() as fd:
        t = fd.from_pytorch(x)
        kept = fd.ops.relu(t)
        kept.set_allocation_domain([kept.axis(k) for k in (1, 0, 3, 2)], True)
        for out in (kept, fd.ops.stride_order(t, [3, 2, 1, 0]), fd.ops.neg(kept)):
            fd.add_output(out)
    first, rows, follows = fd.execute([x])
    check(first, x.double().relu(), strides_in(SHAPE, (1, 0, 3, 2)), "set_allocation_domain")
    check(rows, x.double(), strides_in(SHAPE, (0, 1, 2, 3)), "stride_order")
    check(follows, -x.double().relu(), strides_in(SHAPE, (1, 0, 3, 2)), "what follows")


def test_each_layout_is_a_class_of_its_own_and_sizes_are_not() -> None:
    fd = defined(1, 4, lambda fd, x: [fd.ops.neg(x)])
    orders = [(0, 1, 2, 3), LAST, (3, 2, 1, 0)]
    rng = random.Random(5)
    programs: dict[tuple[int, ...], object] = {}
    for _ in range(30):
        order = rng.choice(orders)
        shape = [rng.randint(2, 9) for _ in range(4)]
        x = laid(shape, order)
        (found,) = fd.execute([x])
        check(found, -x.double(), x.stride(), (order, shape))
        assert programs.setdefault(order, fd.fec.host_program()) is fd.fec.host_program()
    assert len(set(map(id, programs.values()))) == len(programs) == 3


def test_a_program_of_permuted_tensors_runs_from_its_text() -> None:
    x = laid(SHAPE, LAST)
    with FusionDefinition() as fd:
        t = fd.from_pytorch(x)
        for out in (norm(fd, t), fd.ops.permute(fd.ops.neg(t), [1, 0, 3, 2])):
            fd.add_output(out)
    expected = fd.execute([x])
    program = fd.fec.host_program()
    again = parse(program.full_text())
    assert equal(again, program)
    found = HostIrEvaluator(again).run([x])
    for mine, other in zip(found, expected, strict=True):
        assert mine.stride() == other.stride() and torch.equal(mine, other)


def test_an_update_is_written_in_place_whatever_the_order() -> None:
    for order in permutations(range(3)):
        x, y = laid(SHAPE[:3], order), laid(SHAPE[:3], (0, 1, 2), 1)
        wanted = y.double() + 0.5 * x.double()
        with FusionDefinition() as fd:
            t, u = fd.from_pytorch(x), fd.from_pytorch(y)
            fd.add_output(fd.ops.add(u, fd.ops.mul(t, 0.5)), t)
        strides = x.stride()
        fd.execute([x, y])
        assert x.stride() == strides
        torch.testing.assert_close(x.double(), wanted, atol=1e-5, rtol=1e-5)
        (launch,) = fd.fec.host_program().ops
        assert launch.name == "LaunchKernel", "nothing is copied"


# ------------------------------------------------------------------ in steps, and on ranks
@pytest.mark.parametrize("first", [0, 1], ids=["both in steps", "steps slice a result"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_results_in_steps_lie_as_their_inputs(axis: int, first: int) -> None:
    for order in permutations(range(3)):
        x = laid((4, 6, 8), order)
        with FusionDefinition() as fd:
            t = fd.define_tensor([-1, -1, -1])
            one = fd.ops.neg(t)
            two = fd.ops.exp(one)
            total = fd.ops.sum(fd.ops.mul(two, 2.0), [axis])
            for out in (one, two, total):
                fd.add_output(out)
            for out in (one, two)[first:]:
                out.outer_split(axis, 2)
                out.axis(axis).parallelize(ParallelType.stream)
        negative, power, found = fd.execute([x])
        check(negative, -x.double(), x.stride(), (axis, order))
        check(power, (-x.double()).exp(), x.stride(), (axis, order))
        kept = [p - (p > axis) for p in order if p != axis]
        shape = [n for p, n in enumerate(x.shape) if p != axis]
        wanted = 2 * (-x.double()).exp().sum(axis)
        check(found, wanted, strides_in(shape, kept), (axis, order))


def cut(axis: int, *tensors: TensorView) -> None:
    for tv in tensors:
        tv.outer_split(axis, 2)
        tv.axis(axis).parallelize(ParallelType.mesh_x)


def shard(whole: torch.Tensor, axis: int, rank: int, order: Shape) -> torch.Tensor:
    part = whole.chunk(2, axis)[rank]
    places = [list(order).index(p) for p in range(part.ndim)]
    return part.permute(list(order)).contiguous().permute(places)


@pytest.mark.parametrize("own", [False, True], ids=["alike", "each its own"])
@pytest.mark.parametrize("axis", [0, 2])
def test_ranks_may_lie_as_they_like(axis: int, own: bool) -> None:
    """A local result has the order of its shard; a communicated tensor has one order on all
    ranks."""
    whole = torch.randn(4, 6, 8)
    for order in permutations(range(3)):
        orders = order, ((2, 1, 0) if own else order)

        def body(orders: tuple[Shape, Shape] = orders) -> list[tuple[int, ...]]:
            rank = multidevice.Communicator.instance().rank()
            with FusionDefinition() as fd:
                x = fd.define_tensor([-1, -1, -1])
                kept, y = fd.ops.abs(x), fd.ops.neg(x)
                sent = fd.ops.set(y)
                after = fd.ops.exp(sent)
                total = fd.ops.sum(y, [axis])
                for out in (kept, sent, after, total):
                    fd.add_output(out)
                for tv in (x, kept, y, sent, after, total):
                    tv.set_device_mesh(MESH)
                cut(axis, x, y, kept)
            mine = shard(whole, axis, rank, orders[rank])
            local, everywhere, follows, summed = fd.execute([mine])
            check(local, mine.double().abs(), mine.stride(), orders)
            wanted = -whole.double()
            torch.testing.assert_close(everywhere.double(), wanted)
            check(follows, wanted.exp(), strides_in(whole.shape, orders[rank]), orders)
            torch.testing.assert_close(summed.double(), wanted.sum(axis), atol=1e-5, rtol=1e-5)
            return [everywhere.stride(), summed.stride()]

        with multidevice.simulate(2) as world:
            first, second = world.run(body)
        assert first == second


def test_inputs_that_are_sent_as_they_are_must_lie_alike() -> None:
    whole = torch.randn(4, 6, 8)

    def body() -> None:
        rank = multidevice.Communicator.instance().rank()
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, -1, -1])
            y = fd.ops.set(x)
            fd.add_output(y)
            for tv in (x, y):
                tv.set_device_mesh(MESH)
            cut(0, x)
        fd.execute([shard(whole, 0, rank, ((0, 1, 2), (2, 1, 0))[rank])])

    with multidevice.simulate(2) as world, pytest.raises(ProgramMismatchError):
        world.run(body)


@pytest.mark.parametrize("axis", [0, 2])
def test_programs_that_torch_computes_send_what_lies_otherwise(axis: int) -> None:
    """`MultiDeviceExecutor` leaves sums and copies to torch, which chooses their layout."""
    whole = torch.randn(4, 6, 8)
    for order in permutations(range(3)):

        def body(order: Shape = order) -> None:
            rank = multidevice.Communicator.instance().rank()
            with FusionDefinition() as fd:
                x = fd.define_tensor([-1, -1, -1])
                y = fd.ops.add(x, x)
                sent = fd.ops.set(y)
                out = fd.ops.neg(sent)
                fd.add_output(out)
                for tv in (x, y, sent, out):
                    tv.set_device_mesh(MESH)
                cut(axis, x, y)
            mine = shard(whole, axis, rank, order)
            (found,) = MultiDeviceExecutor(fd.fusion).run([mine])
            torch.testing.assert_close(found, -2 * whole)

        with multidevice.simulate(2) as world:
            world.run(body)


def test_a_linear_of_a_declared_order_is_sent_in_it() -> None:
    whole, weight = torch.randn(4, 6), torch.randn(8, 6)

    def body() -> None:
        rank = multidevice.Communicator.instance().rank()
        with FusionDefinition() as fd:
            x, w = fd.define_tensor([-1, -1]), fd.define_tensor([-1, -1])
            y = fd.ops.linear(x, w)
            y.set_allocation_domain([y.axis(1), y.axis(0)], True)
            sent = fd.ops.set(y)
            fd.add_output(sent)
            for tv in (x, w, y, sent):
                tv.set_device_mesh(MESH)
            cut(0, w)
            cut(1, y)
        mine = shard(weight, 0, rank, (0, 1))
        (found,) = MultiDeviceExecutor(fd.fusion).run([whole, mine])
        torch.testing.assert_close(found, whole @ weight.t())

    with multidevice.simulate(2) as world:
        world.run(body)


@pytest.mark.finding("segment_set sent")
@pytest.mark.parametrize("order", [*permutations(range(3))], ids=str)
@pytest.mark.parametrize("axis", range(3))
def test_what_segment_set_shares_is_packed_before_it_is_sent(
    order: tuple[int, ...], axis: int
) -> None:
    """The operand has the order of an input; a communicated tensor has one order on all ranks."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1] * 3, contiguity=False, dtype=DataType.Double)
        y = fd.ops.segment_set(fd.ops.neg(x))
        fd.add_output(fd.ops.cumsum(y, axis))
        cut = fd.ops.mul(fd.ops.permute(y, [1, 2, 0]), 2.0)
        cut.set_device_mesh(MESH)
        position = [1, 2, 0].index(axis)
        cut.outer_split(position, 2)
        cut.axis(position).parallelize(ParallelType.mesh_x)
        fd.add_output(cut)
    whole = torch.randn(4, 6, 8, dtype=torch.float64)
    given = whole.permute(order).contiguous().permute([order.index(p) for p in range(3)])
    assert torch.equal(given, whole)

    def body() -> None:
        rank = multidevice.Communicator.instance().rank()
        for _ in range(2):
            sums, mine = fd.execute([given])
            torch.testing.assert_close(sums, (-whole).cumsum(axis))
            part = (-2 * whole).permute(1, 2, 0).chunk(2, position)[rank]
            assert torch.equal(mine, part)

    with multidevice.simulate(2) as world:
        world.run(body)
