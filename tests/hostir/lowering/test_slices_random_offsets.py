"""Random numbers on several ranks: the shards are those of the tensor that one device makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fuser import DataType, FusionDefinition, ParallelType, ops
from fuser.ir.fusion import TensorView
from fuser.ir.scalar.constructors import Const
from fuser.multidevice import DeviceMesh
from fuser.support.errors import InputError, PeerError, UnsupportedError
from hostir import Allocate, HostIrContainer, HostIrEvaluator, equal, parse
from multidevice import Communicator, simulate
from multidevice.job.shard_tensor import shard_for_rank, shard_tensor
from tests.support import random_reference as reference

D = DataType
ROWS, WIDTH = 8, 12
SEED, OFFSET = 5, 6


def whole(shape: tuple[int, ...] = (ROWS, WIDTH)) -> torch.Tensor:
    count = int(torch.Size(shape).numel())
    given: dict[str, Any] = {"seed": SEED, "offset": OFFSET, "dtype": torch.float32}
    return reference.numbers("uniform", count, (0.0, 1.0), **given).reshape(shape)


X, Y = ParallelType.mesh_x, ParallelType.mesh_y
# Placements of x: (mesh, (axis, device type) of each cut, outermost first).
LAYOUTS: dict[str, tuple[DeviceMesh, list[tuple[int, ParallelType]]]] = {
    "rows": (DeviceMesh(range(4)), [(0, X)]),
    "columns": (DeviceMesh(range(4)), [(1, X)]),
    "devices in another order": (DeviceMesh([2, 0, 3, 1]), [(1, X)]),
    "both axes": (DeviceMesh(torch.arange(4).reshape(2, 2)), [(0, Y), (1, X)]),
    "one axis twice": (DeviceMesh(torch.arange(4).reshape(2, 2)), [(0, Y), (0, X)]),
    "the other way round": (DeviceMesh(torch.arange(4).reshape(2, 2)), [(1, X), (1, Y)]),
    "on every device": (DeviceMesh(range(4)), []),
}


def place(tv: TensorView, layout: str) -> None:
    mesh, cuts = LAYOUTS[layout]
    tv.set_device_mesh(mesh)
    # The last cut of an axis is made first behind those that are there.
    positions = {0: 0, 1: 1}
    for axis, ptype in cuts:
        tv.outer_split(positions[axis], mesh.size_of(ptype))
        tv.axis(positions[axis]).parallelize(ptype)
        positions = {a: p + (a >= axis) for a, p in positions.items()}


def keyed(
    layout: str, read: Callable[[Any, TensorView, TensorView], TensorView], *, symbolic: bool = True
) -> tuple[FusionDefinition, TensorView]:
    """Returns a program of x, seed and offset, and its x with this placement."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1] if symbolic else [ROWS, WIDTH], contiguity=True)
        seed, offset = fd.define_scalar(D.Int), fd.define_scalar(D.Int)
        shape = [x.size(0), x.size(1)]
        u = fd.ops.uniform(0.0, 1.0, shape, rng_seed=seed, rng_offset=offset)
        fd.add_output(read(fd.ops, x, u))
        place(x, layout)
    return fd, x


def run(fd: FusionDefinition, x: TensorView, size: int = 4) -> list[list[torch.Tensor]]:
    """Returns the outputs of all ranks for an x of zeros."""

    def body() -> list[torch.Tensor]:
        return fd.execute([shard_tensor(torch.zeros(ROWS, WIDTH), x), SEED, OFFSET])

    with simulate(size) as world:
        return world.run(body)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_are_those_of_the_whole(layout: str, symbolic: bool) -> None:
    fd, x = keyed(layout, lambda ops, x, u: ops.add(x, u), symbolic=symbolic)
    for rank, (got,) in enumerate(run(fd, x)):
        assert torch.equal(got, shard_for_rank(whole(), x, rank)), rank


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_random_output_lies_as_it_is_told(layout: str) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        seed, offset = fd.define_scalar(D.Int), fd.define_scalar(D.Int)
        u = fd.ops.uniform(0.0, 1.0, [ROWS, WIDTH], rng_seed=seed, rng_offset=offset)
        fd.add_output(u)
        fd.add_output(fd.ops.mul(x, 2.0))
        place(x, layout)
        place(u, layout)
    for rank, (got, _) in enumerate(run(fd, x)):
        assert torch.equal(got, shard_for_rank(whole(), u, rank)), rank


@pytest.mark.parametrize("layout", LAYOUTS)
def test_readers_that_communicate(layout: str) -> None:
    """Sums over cut axes, products of matrices, views of the random tensor."""
    for name, read, want in (
        ("rows", lambda ops, x, u: ops.sum(ops.add(x, u), [0]), lambda u: u.sum(0)),
        ("columns", lambda ops, x, u: ops.sum(ops.add(x, u), [1]), lambda u: u.sum(1)),
        (
            "product",
            lambda ops, x, u: ops.matmul(ops.add(x, u), ops.permute(u, [1, 0])),
            lambda u: u @ u.T,
        ),
        ("sum of views", lambda ops, x, u: ops.sum(ops.reshape(u, [-1])), lambda u: u.sum()),
    ):
        fd, x = keyed(layout, read)
        expected = want(whole().double())
        outputs = [got for (got,) in run(fd, x)]
        shardings = fd.fec.get_output_shardings()
        for rank, got in enumerate(outputs):
            tv = fd.fec.host_program().outputs[0]
            local = shard_for_rank(expected, tv, rank) if shardings else expected
            torch.testing.assert_close(got.double(), local, rtol=1e-5, atol=1e-5, msg=name)


# ------------------------------------------------------------------ steps
STREAM = ParallelType.stream


def in_steps(tv: TensorView, axis: int, count: int | None) -> None:
    if count is not None:
        tv.outer_split(axis, count)
    tv.axis(axis).parallelize(STREAM)


@pytest.mark.parametrize("late", ["all", "entry", "1", ""])
@pytest.mark.parametrize(
    ("axis", "count"), [(0, None), (1, None), (0, 2), (0, 3), (1, 5), (0, 9)], ids=str
)
def test_steps_of_a_stream(axis: int, count: int | None, late: str) -> None:
    """Whole axes, even blocks, ragged ones, and more blocks than there are elements."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        seed, offset = fd.define_scalar(D.Int), fd.define_scalar(D.Int)
        u = fd.ops.uniform(0.0, 1.0, [x.size(0), x.size(1)], rng_seed=seed, rng_offset=offset)
        y = fd.ops.add(x, u)
        fd.add_output(y)
        fd.add_output(fd.ops.sum(fd.ops.mul(u, 2.0), [1 - axis]))
        in_steps(y, axis, count)
    options = [f"late_stream({late})"] if late else []
    for shape in ((ROWS, WIDTH), (7, 5), (1, 1), (ROWS, WIDTH)):
        got, sums = fd.execute([torch.zeros(shape), SEED, OFFSET], _enable_options=options)
        assert torch.equal(got, whole(shape)), shape
        torch.testing.assert_close(sums, 2 * whole(shape).sum(1 - axis))
    assert "FOR " in str(fd.fec.host_program())


@pytest.mark.parametrize("is_rotated", [False, True])
def test_steps_of_devices(is_rotated: bool) -> None:
    """Blocks of rows inside of a device's; and each device starting with its own block of all."""
    fd, x = keyed("on every device" if is_rotated else "rows", lambda ops, x, u: ops.add(x, u))
    (y,) = fd.fusion.outputs
    y.set_device_mesh(DeviceMesh(range(4)))
    if is_rotated:
        y.outer_split(0, 4)
        y.swizzle1d(0, X)
        y.axis(0).parallelize(STREAM)
    else:
        y.outer_split(0, 4)
        y.axis(0).parallelize(X)
        y.outer_split(1, 2)
        y.axis(1).parallelize(STREAM)
    for rank, (got,) in enumerate(run(fd, x)):
        assert torch.equal(got, shard_for_rank(whole(), x, rank)), rank
    assert "FOR " in str(fd.fec.host_program())


def test_a_merged_stream() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        seed, offset = fd.define_scalar(D.Int), fd.define_scalar(D.Int)
        u = fd.ops.uniform(0.0, 1.0, [x.size(0), x.size(1)], rng_seed=seed, rng_offset=offset)
        y = fd.ops.add(x, u)
        fd.add_output(y)
        y.merge(0)
        y.axis(0).parallelize(STREAM)
    for shape in ((ROWS, WIDTH), (3, 5)):
        (got,) = fd.execute([torch.zeros(shape), SEED, OFFSET])
        assert torch.equal(got, whole(shape)), shape


# ------------------------------------------------------------------ texts
@pytest.mark.parametrize("layout", ["rows", "both axes", "devices in another order"])
def test_the_program_runs_from_its_text(layout: str) -> None:
    fd, x = keyed(layout, lambda ops, x, u: ops.add(x, u))
    outputs = run(fd, x)
    program = fd.fec.host_program()
    text = program.full_text()
    assert "begin = {" in text
    read = parse(text)
    assert equal(read, program) and read.full_text() == text

    def body() -> list[torch.Tensor]:
        local = shard_tensor(torch.zeros(ROWS, WIDTH), x)
        return HostIrEvaluator(read).evaluate([local, SEED, OFFSET])

    with simulate(4) as world:
        for want, got in zip(outputs, world.run(body), strict=True):
            assert torch.equal(want[0], got[0])


def test_a_program_by_hand_does_not_know_the_places() -> None:
    hic = HostIrContainer()
    with hic:
        n = Const(3, D.Int)
        u = ops.uniform(0.0, 1.0, [8], rng_seed=n, rng_offset=n)
        u.set_device_mesh(DeviceMesh(range(4)))
        u.outer_split(0, 4)
        u.axis(0).parallelize(X)
        hic.append(Allocate(u))
        hic.append(u)
        hic.add_output(u)
    with (
        simulate(4) as world,
        pytest.raises(UnsupportedError, match=r"uniform: ranks or loop iterations divide T0"),
    ):
        world.run(lambda: HostIrEvaluator(hic).run([]))


# ------------------------------------------------------------------ torch's generator
def dropping(layout: str) -> tuple[FusionDefinition, TensorView]:
    """A program that draws twice: a mask that ranks share, and what all have."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        kept = fd.ops.lt(fd.ops.rand_like(x), 0.5)
        fd.add_output(fd.ops.where(kept, fd.ops.add(x, 1.0), 0.0))
        everywhere = fd.ops.normal(0.0, 1.0, [5])
        fd.add_output(everywhere)
        place(x, layout)
        everywhere.set_device_mesh(x.mesh)
    return fd, x


def alone(calls: int) -> list[list[torch.Tensor]]:
    """Returns what one device gets."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        kept = fd.ops.lt(fd.ops.rand_like(x), 0.5)
        fd.add_output(fd.ops.where(kept, fd.ops.add(x, 1.0), 0.0))
        fd.add_output(fd.ops.normal(0.0, 1.0, [5]))
    return [fd.execute([torch.zeros(ROWS, WIDTH)]) for _ in range(calls)]


@pytest.mark.parametrize("layout", ["rows", "columns", "both axes", "on every device"])
def test_ranks_draw_the_same_as_one_device(layout: str) -> None:
    fd, x = dropping(layout)

    def body() -> list[list[torch.Tensor]]:
        local = shard_tensor(torch.zeros(ROWS, WIDTH), x)
        return [fd.execute([local]) for _ in range(12)]

    torch.manual_seed(21)
    want = alone(12)
    after = torch.rand(2)
    torch.manual_seed(21)
    with simulate(4) as world:
        outputs = world.run(body)
    assert torch.equal(torch.rand(2), after)
    for rank, calls in enumerate(outputs):
        for (masked, everywhere), (whole_masked, whole_everywhere) in zip(calls, want, strict=True):
            assert torch.equal(masked, shard_for_rank(whole_masked, x, rank))
            assert torch.equal(everywhere, whole_everywhere)
    assert len({float(calls[1][0]) for calls in want}) == 12


def test_ranks_with_different_seeds_are_told() -> None:
    fd, x = dropping("rows")

    def body(seeds: list[int]) -> str:
        local = shard_tensor(torch.zeros(ROWS, WIDTH), x)
        torch.manual_seed(seeds[Communicator.instance().rank()])
        try:
            fd.execute([local])
        except InputError as error:
            return str(error)
        return ""

    with simulate(4) as world:
        assert world.run(body, [3, 3, 3, 3]) == [""] * 4
        texts = world.run(body, [3, 3, 4, 3])
        assert world.run(body, [5, 5, 5, 5]) == [""] * 4
    print(texts[0])
    for text in texts:
        assert "the seed of torch's generator (torch.manual_seed), from which uniform at" in text
        assert "test_slices_random_offsets.py:" in text and "on ranks (0 1 3) and " in text
        assert "on ranks (2), but all ranks must pass the same number" in text
        assert "(of torch.initial_seed() 3) on ranks (0 1 3)" in text
        assert "(of torch.initial_seed() 4) on ranks (2)" in text


def test_a_call_that_fails_leaves_the_generators_in_step() -> None:
    """One rank gives a wrong input; the next call draws what that one would have drawn."""
    fd, x = dropping("rows")

    def body() -> list[torch.Tensor]:
        local = shard_tensor(torch.zeros(ROWS, WIDTH), x)
        fd.execute([local])
        with pytest.raises((InputError, PeerError)):
            fd.execute([local.double() if Communicator.instance().rank() == 1 else local])
        return fd.execute([local])

    torch.manual_seed(22)
    want = alone(2)[1]
    torch.manual_seed(22)
    with simulate(4) as world:
        for rank, (masked, everywhere) in enumerate(world.run(body)):
            assert torch.equal(masked, shard_for_rank(want[0], x, rank))
            assert torch.equal(everywhere, want[1])


@pytest.mark.mpi(min_size=2)
def test_ranks_that_are_processes(comm: object) -> None:
    communicator = Communicator.instance()
    rank, size = communicator.rank(), communicator.size()
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.add(x, fd.ops.rand_like(x)))
        x.set_device_mesh(DeviceMesh(range(size)))
        x.outer_split(0, size)
        x.axis(0).parallelize(X)
    rows = 4 * size
    local = shard_tensor(torch.zeros(rows, WIDTH), x)
    torch.manual_seed(31)
    outputs = [fd.execute([local])[0] for _ in range(10)]
    torch.manual_seed(31)
    for got in outputs:
        seed = int(torch.empty((), dtype=torch.int64).random_())
        given: dict[str, Any] = {"seed": seed, "offset": 0, "dtype": torch.float32}
        want = reference.numbers("uniform", rows * WIDTH, (0.0, 1.0), **given)
        assert torch.equal(got, shard_for_rank(want.reshape(rows, WIDTH), x, rank))
    torch.manual_seed(rank)
    with pytest.raises(InputError, match=r"the seed of torch's generator .*the same number"):
        fd.execute([local])
    torch.manual_seed(32)
    fd.execute([local])
