"""Linear ops are computed on partial sums, and one communication adds the parts of their result."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from fuser import DataType, FusionDefinition, Replicate, Shard, TensorView, multidevice, shard
from hostir import Communication
from multidevice import Communicator, DeviceMesh
from tests.support.rank_by_rank import Run, run

MESH = DeviceMesh(range(4))
GRID = DeviceMesh([[0, 1], [2, 3]])
SIZE = 8
# Builds a result from partial sums, and the same with torch.
Build = Callable[[FusionDefinition, list[TensorView]], TensorView]
Meaning = Callable[[list[torch.Tensor]], torch.Tensor]
Pieces = Sequence[Shard | Replicate]
COLUMNS: Pieces = (Shard(1),)


def inputs_of(
    fd: FusionDefinition, count: int, mesh: DeviceMesh, pieces: Pieces, dtype: DataType
) -> list[TensorView]:
    return [
        fd.define_tensor(
            [SIZE, SIZE], contiguity=True, dtype=dtype, mesh=mesh, placements=list(pieces)
        )
        for _ in range(2 * count)
    ]


def products(fd: FusionDefinition, inputs: list[TensorView]) -> list[TensorView]:
    """Returns the products of pairs of inputs; each device has a part of each."""
    return [fd.ops.linear(x, w) for x, w in zip(inputs[::2], inputs[1::2], strict=True)]


def defined(
    build: Build,
    count: int,
    *,
    mesh: DeviceMesh = MESH,
    pieces: Pieces = COLUMNS,
    dtype: DataType = DataType.Double,
) -> tuple[FusionDefinition, list[TensorView]]:
    with FusionDefinition() as fd:
        inputs = inputs_of(fd, count, mesh, pieces, dtype)
        fd.add_output(build(fd, products(fd, inputs)))
    return fd, inputs


def whole_inputs(count: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Returns small integers, so that sums are exact in any order."""
    seed = torch.Generator().manual_seed(2)
    return [torch.randint(-3, 4, (SIZE, SIZE), generator=seed).to(dtype) for _ in range(2 * count)]


def expected(meaning: Meaning, whole: list[torch.Tensor]) -> torch.Tensor:
    return meaning(
        [x.double() @ w.double().T for x, w in zip(whole[::2], whole[1::2], strict=True)]
    )


def check(
    build: Build,
    meaning: Meaning,
    count: int,
    *,
    mesh: DeviceMesh = MESH,
    pieces: Pieces = COLUMNS,
) -> Run:
    """Runs the program on ranks of this process, and compares it with torch in float64."""
    fd, _ = defined(build, count, mesh=mesh, pieces=pieces)
    whole = whole_inputs(count)
    done = run(fd.fusion, whole)
    assert torch.equal(done.outputs[0], expected(meaning, whole))
    return done


def kinds(done: Run) -> list[str]:
    return [kind for kind, _ in done.collectives]


# ------------------------------------------------------------------ added once
ADDED_ONCE: dict[str, tuple[Build, Meaning]] = {
    "add": (lambda fd, t: t[0] + t[1], lambda t: t[0] + t[1]),
    "sub": (lambda fd, t: t[0] - t[1], lambda t: t[0] - t[1]),
    "neg": (lambda fd, t: fd.ops.neg(t[0]) + t[1], lambda t: t[1] - t[0]),
    "scalar": (lambda fd, t: fd.ops.mul(t[0], 3.0) + t[1] * 2.0, lambda t: 3 * t[0] + 2 * t[1]),
    "permute": (
        lambda fd, t: fd.ops.permute(t[0], [1, 0]) + fd.ops.permute(t[1], [1, 0]),
        lambda t: (t[0] + t[1]).T,
    ),
    "reshape": (
        lambda fd, t: fd.ops.reshape(t[0], [2, 4, SIZE]) + fd.ops.reshape(t[1], [2, 4, SIZE]),
        lambda t: (t[0] + t[1]).reshape(2, 4, SIZE),
    ),
    "set": (lambda fd, t: fd.ops.set(t[0]) + t[1], lambda t: t[0] + t[1]),
    "nonlinear after": (lambda fd, t: fd.ops.abs(t[0] + t[1]), lambda t: (t[0] + t[1]).abs()),
    "twice": (lambda fd, t: t[0] + (t[0] - t[1]), lambda t: 2 * t[0] - t[1]),
}


@pytest.mark.parametrize("name", ADDED_ONCE)
def test_linear_ops_of_partial_sums_need_one_communication(name: str) -> None:
    assert kinds(check(*ADDED_ONCE[name], 2)) == ["Allreduce"]


def test_a_chain_of_additions_needs_one_communication() -> None:
    done = check(lambda fd, t: t[0] + t[1] + t[2] - t[3], lambda t: t[0] + t[1] + t[2] - t[3], 4)
    assert kinds(done) == ["Allreduce"]


def test_a_sum_that_goes_into_a_cut_is_scattered_once() -> None:
    def build(fd: FusionDefinition, t: list[TensorView]) -> TensorView:
        return shard(t[0] + t[1], MESH, [Shard(0)])

    assert kinds(check(build, lambda t: t[0] + t[1], 2)) == ["ReduceScatter"]


def test_parts_along_two_mesh_dimensions_are_added_after_the_addition() -> None:
    def build(fd: FusionDefinition, t: list[TensorView]) -> TensorView:
        return shard(t[0] + t[1], GRID, [Replicate(), Shard(0)])

    done = check(build, lambda t: t[0] + t[1], 2, mesh=GRID, pieces=(Shard(1), Shard(1)))
    assert done.collectives == [
        ("ReduceScatter", f"mesh_x of {GRID}"),
        ("Allreduce", f"mesh_y of {GRID}"),
    ]


def test_sums_over_different_axes_are_added_before_one_communication() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor(
            [SIZE, 4, 6], contiguity=True, dtype=DataType.Double, mesh=MESH, placements=[Shard(0)]
        )
        y = fd.define_tensor(
            [4, SIZE, 6], contiguity=True, dtype=DataType.Double, mesh=MESH, placements=[Shard(1)]
        )
        fd.add_output(fd.ops.sum(x, [0]) + fd.ops.sum(y, [1]))
    whole = [torch.randn(SIZE, 4, 6).double(), torch.randn(4, SIZE, 6).double()]
    done = run(fd.fusion, whole)
    torch.testing.assert_close(done.outputs[0], whole[0].sum(0) + whole[1].sum(1))
    assert kinds(done) == ["Allreduce"]


def test_a_shared_partial_sum_stays_partial_where_this_sends_less() -> None:
    def build(fd: FusionDefinition, t: list[TensorView]) -> TensorView:
        return fd.ops.abs(t[0] + t[1]) * fd.ops.abs(t[0] - t[2])

    done = check(build, lambda t: (t[0] + t[1]).abs() * (t[0] - t[2]).abs(), 3)
    assert kinds(done) == ["Allreduce"] * 2


# ------------------------------------------------------------------ added before
ADDED_BEFORE: dict[str, tuple[Build, Meaning, int]] = {
    "nonlinear": (lambda fd, t: fd.ops.abs(t[0]) + t[1], lambda t: t[0].abs() + t[1], 2),
    "product": (lambda fd, t: t[0] * t[1], lambda t: t[0] * t[1], 2),
    "scalar added": (lambda fd, t: t[0] + 1.0 + t[1], lambda t: t[0] + 1 + t[1], 2),
    "another reader": (
        lambda fd, t: (t[0] + t[1]) * fd.ops.abs(t[0]),
        lambda t: (t[0] + t[1]) * t[0].abs(),
        2,
    ),
    "readers of one sum": (
        lambda fd, t: fd.ops.abs(fd.ops.neg(t[0])) + fd.ops.exp(t[0] * 0.0),
        lambda t: t[0].abs() + 1,
        1,
    ),
    "annotated": (
        lambda fd, t: shard(t[0], MESH, [Replicate()]) + t[1],
        lambda t: t[0] + t[1],
        2,
    ),
    "maximum": (
        lambda fd, t: fd.ops.max(t[0], [1]) + fd.ops.max(t[1], [1]),
        lambda t: t[0].amax(1) + t[1].amax(1),
        2,
    ),
}


@pytest.mark.parametrize("name", ADDED_BEFORE)
def test_other_ops_read_sums(name: str) -> None:
    build, meaning, count = ADDED_BEFORE[name]
    assert kinds(check(build, meaning, count)) == ["Allreduce"] * count


def test_an_output_is_added_before_it_is_read() -> None:
    with FusionDefinition() as fd:
        first, second = products(fd, inputs_of(fd, 2, MESH, [Shard(1)], DataType.Double))
        fd.add_output(first)
        fd.add_output(first + second)
    whole = whole_inputs(2)
    done = run(fd.fusion, whole)
    terms = [whole[0] @ whole[1].T, whole[2] @ whole[3].T]
    assert torch.equal(done.outputs[0], terms[0])
    assert torch.equal(done.outputs[1], terms[0] + terms[1])
    assert kinds(done) == ["Allreduce"] * 2


def test_parts_along_different_mesh_dimensions_are_added_first() -> None:
    with FusionDefinition() as fd:
        inputs = inputs_of(fd, 1, GRID, [Shard(1), Replicate()], DataType.Double)
        inputs += inputs_of(fd, 1, GRID, [Replicate(), Shard(1)], DataType.Double)
        first, second = products(fd, inputs)
        fd.add_output(first + second)
    whole = whole_inputs(2)
    done = run(fd.fusion, whole)
    assert torch.equal(done.outputs[0], whole[0] @ whole[1].T + whole[2] @ whole[3].T)
    assert sorted(team for _, team in done.collectives) == [f"mesh_{p} of {GRID}" for p in "xy"]


def test_a_bias_is_added_once() -> None:
    with FusionDefinition() as fd:
        inputs = inputs_of(fd, 2, MESH, [Shard(1)], DataType.Double)
        bias = fd.define_tensor(
            [SIZE], contiguity=True, dtype=DataType.Double, mesh=MESH, placements=[Replicate()]
        )
        first = fd.ops.linear(inputs[0], inputs[1], bias)
        fd.add_output(first + fd.ops.linear(inputs[2], inputs[3], bias))
    whole = [*whole_inputs(2), torch.arange(SIZE).double()]
    done = run(fd.fusion, whole)
    want = whole[0] @ whole[1].T + whole[2] @ whole[3].T + 2 * whole[4]
    assert torch.equal(done.outputs[0], want)


def test_parts_that_are_divided_differently_are_added_first() -> None:
    with FusionDefinition() as fd:
        inputs = inputs_of(fd, 1, GRID, [Shard(0), Shard(1)], DataType.Double)
        inputs += inputs_of(fd, 1, GRID, [Replicate(), Shard(1)], DataType.Double)
        rows, whole_rows = (fd.ops.sum(tv, [1]) for tv in (inputs[0], inputs[2]))
        fd.add_output(shard(rows + whole_rows, GRID, [Replicate(), Replicate()]))
    whole = whole_inputs(2)
    done = run(fd.fusion, whole)
    assert torch.equal(done.outputs[0], whole[0].sum(1) + whole[2].sum(1))


# ------------------------------------------------------------------ 16-bit floats
def sent_dtypes(fd: FusionDefinition, inputs: list[torch.Tensor]) -> list[DataType]:
    started = fd._executor_cache().program_for(inputs).started()
    return [op.inp.dtype() for op in started if isinstance(op, Communication)]


@pytest.mark.parametrize("terms", [1, 2, 3])
def test_sums_of_16_bit_floats_are_added_in_float(terms: int) -> None:
    def build(fd: FusionDefinition, t: list[TensorView]) -> TensorView:
        total = fd.ops.cast(t[0], DataType.Float)
        for tv in t[1:]:
            total = total + tv
        return fd.ops.cast(fd.ops.relu(total), DataType.BFloat16)

    whole = whole_inputs(terms, torch.bfloat16)
    fd, _ = defined(build, terms, dtype=DataType.BFloat16)
    shards = [t[:, : SIZE // 4].contiguous() for t in whole]
    # One term alone is sent in 16 bits.
    assert sent_dtypes(fd, shards) == [DataType.BFloat16 if terms == 1 else DataType.Float]


def test_sums_of_16_bit_floats_lose_no_precision() -> None:
    whole = [torch.randn(SIZE, SIZE, dtype=torch.bfloat16) for _ in range(4)]

    def body() -> torch.Tensor:
        fd, inputs = defined(lambda fd, t: t[0] + t[1], 2, dtype=DataType.BFloat16)
        shards = [multidevice.shard_tensor(t, v) for t, v in zip(whole, inputs, strict=True)]
        return fd.execute(shards)[0]

    parts = [[t[:, 2 * k : 2 * k + 2].double() for t in whole] for k in range(4)]
    # Each device's products are rounded to 16 bits, and nothing else is.
    rounded = [(x @ w.T).bfloat16().double() for p in parts for x, w in ((p[0], p[1]), p[2:])]
    with multidevice.simulate(4) as world:
        for out in world.run(body):
            torch.testing.assert_close(out.double(), sum(rounded), atol=1e-5, rtol=1e-5)


# ------------------------------------------------------------------ random programs
def random_program(rng: random.Random) -> tuple[Build, Meaning, int]:
    """Returns a program of up to 12 elementwise ops on the products, most of them linear."""
    count = rng.randint(2, 4)
    steps: list[tuple[str, int, int]] = []
    for k in range(rng.randint(1, 12)):
        kind = rng.choice(["add", "add", "sub", "neg", "scale", "swap", "abs", "one"])
        steps.append((kind, rng.randrange(count + k), rng.randrange(count + k)))

    def build(fd: FusionDefinition, t: list[TensorView]) -> TensorView:
        values = list(t)
        for kind, a, b in steps:
            x, y = values[a], values[b]
            values.append(
                {
                    "add": lambda x=x, y=y: x + y,
                    "sub": lambda x=x, y=y: x - y,
                    "neg": lambda x=x: fd.ops.neg(x),
                    "scale": lambda x=x: x * 0.5,
                    "swap": lambda x=x: fd.ops.permute(x, [1, 0]),
                    "abs": lambda x=x: fd.ops.abs(x),
                    "one": lambda x=x: x + 1.0,
                }[kind]()
            )
        return fd.ops.add(values[-1], values[-2])

    def meaning(t: list[torch.Tensor]) -> torch.Tensor:
        values = list(t)
        for kind, a, b in steps:
            x, y = values[a], values[b]
            values.append(
                {
                    "add": x + y,
                    "sub": x - y,
                    "neg": -x,
                    "scale": x * 0.5,
                    "swap": x.T,
                    "abs": x.abs(),
                    "one": x + 1,
                }[kind]
            )
        return values[-1] + values[-2]

    return build, meaning, count


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_never_communicate_more_often_than_there_are_partial_sums(
    seed: int,
) -> None:
    print("seed", seed)
    build, meaning, count = random_program(random.Random(seed))
    assert len(check(build, meaning, count).collectives) <= count


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("name", ADDED_ONCE)
def test_linear_ops_of_partial_sums_on_ranks(name: str) -> None:
    build, meaning = ADDED_ONCE[name]
    whole = whole_inputs(2)
    fd, inputs = defined(build, 2)
    shards = [multidevice.shard_tensor(t, v) for t, v in zip(whole, inputs, strict=True)]
    assert Communicator.instance().size() >= 4
    assert torch.equal(fd.execute(shards)[0], expected(meaning, whole))
