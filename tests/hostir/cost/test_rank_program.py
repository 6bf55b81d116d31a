"""`hostir.program_for`: the program of a real job, and its memory and bytes against numbers by
hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hostir
from fuser import (
    DataType,
    FusionDefinition,
    ParallelType,
    Replicate,
    Shard,
    define_scalar,
    define_tensor,
    multidevice,
    ops,
    shard,
)
from fuser.frontend import executor_cache
from fuser.frontend.program_cache import ProgramCache
from fuser.ir.fusion import TensorView
from fuser.support import dumps
from fuser.support.errors import InputError, ShardingError, UnsupportedError
from multidevice import Communicator, DeviceMesh
from tests.support.host_programs import CASES

BF16 = 2
ROWS, WIDTH, WIDE = SIZES = 512, 1024, 4096


def mesh_of(*shape: int) -> DeviceMesh:
    return DeviceMesh(torch.arange(torch.Size(shape).numel()).reshape(shape))


def defined(define: Callable[[], None]) -> FusionDefinition:
    with FusionDefinition() as fd:
        define()
    return fd


def mlp(mesh: DeviceMesh, rows: int = -1, width: int = -1, wide: int = -1) -> FusionDefinition:
    """Two layers and the sum of their rows. Rows are cut along mesh_y, hidden features along
    mesh_x.
    """
    with FusionDefinition() as fd:
        x, up, down = (
            fd.define_tensor(
                shape, contiguity=True, dtype=DataType.BFloat16, mesh=mesh, placements=placements
            )
            for shape, placements in (
                ([rows, width], [Shard(0), Replicate()]),
                ([wide, width], [Replicate(), Shard(0)]),
                ([width, wide], [Replicate(), Shard(1)]),
            )
        )
        y = fd.ops.linear(fd.ops.relu(fd.ops.linear(x, up)), down)
        fd.add_output(y)
        fd.add_output(fd.ops.sum(fd.ops.cast(y, DataType.Float), [0]))
    return fd


SHAPES = [(ROWS, WIDTH), (WIDE, WIDTH), (WIDTH, WIDE)]


# ------------------------------------------------------------------ the program of a job
def scaled_noise() -> None:
    """A scalar input, and random numbers, whose seed is an input that the user does not see."""
    mesh = DeviceMesh([0, 1, 2, 3])
    x = define_tensor([-1, 8], contiguity=True)
    x.fusion.add_input(x)
    shard(x, mesh, [Shard(0)])
    s = define_scalar(None, DataType.Double)
    x.fusion.add_input(s)
    noise: Any = ops.uniform(0.0, 1.0, [x.size(0), 8], dtype=DataType.Float)
    y = ops.mul(ops.add(x, noise), s)
    total: Any = ops.sum(y, [0])
    x.fusion.add_output(total)


def uneven_rows() -> None:
    mesh = DeviceMesh(range(4))
    x = define_tensor([7, 8], contiguity=True)
    x.fusion.add_input(x)
    shard(x, mesh, [Shard(0)])
    total: Any = ops.sum(ops.exp(x), [0])
    x.fusion.add_output(total)


PROGRAMS: dict[str, tuple[Callable[[], None], list[tuple[int, ...] | float]]] = {
    **{n: (CASES[n].define, [*CASES[n].shapes]) for n in ("mlp4", "mesh2x2", "encoder2")},
    "scaled noise": (scaled_noise, [(8, 8), 3.0]),
    "uneven rows": (uneven_rows, [(7, 8)]),
}


def check_that_it_is_the_jobs(name: str, backend: str | None, patch: pytest.MonkeyPatch) -> None:
    """Plans before and without the job's caches, runs, and compares the texts."""
    define, inputs = PROGRAMS[name]
    rank = Communicator.instance().rank()
    patch.setattr(executor_cache, "PROGRAMS", ProgramCache())
    planned_rank = rank % (2 if name == "encoder2" else 4)
    planned = hostir.program_for(
        defined(define), inputs=inputs, rank=planned_rank, device="cpu", backend=backend
    )
    patch.setattr(executor_cache, "PROGRAMS", ProgramCache())
    fd = defined(define)
    given = [
        multidevice.shard_tensor(torch.rand(value), tv, copy=True)
        if isinstance(value, tuple) and isinstance(tv, TensorView)
        else value
        for value, tv in zip(inputs, fd.fusion.inputs, strict=True)
    ]
    torch.manual_seed(0)  # the ranks must draw the same seed
    fd.execute(given)
    program = fd.fec.host_program()
    assert program is not planned.program
    assert planned.program.full_text() == program.full_text()


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_is_that_of_simulated_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with multidevice.simulate(4) as world:
        world.run(check_that_it_is_the_jobs, name, "simulated", monkeypatch)


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_is_that_of_a_job(
    name: str, monkeypatch: pytest.MonkeyPatch, comm: Communicator
) -> None:
    check_that_it_is_the_jobs(name, None, monkeypatch)


# ------------------------------------------------------------------ numbers by hand
def uneven(mesh: DeviceMesh) -> FusionDefinition:
    """7 rows over 4 ranks: blocks of 2, 2, 2 and 1."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([7, 8], contiguity=True, mesh=mesh, placements=[Shard(0)])
        y = fd.ops.exp(x)
        shard(y, mesh, [Replicate()])
        fd.add_output(y)
    return fd


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_with_a_shorter_shard_has_the_same_program(rank: int) -> None:
    """Programs have blocks of one size, to which shorter shards are padded."""
    mesh = DeviceMesh(range(4))
    planned = hostir.program_for(uneven(mesh), rank=rank, device="cpu")
    first = hostir.program_for(uneven(mesh), device="cpu")
    assert planned.program.full_text() == first.program.full_text()
    assert planned.input_nbytes == 2 * 8 * 4
    assert planned.sent_along == {"mesh_x": 3 * 2 * 8 * 4}


@pytest.mark.parametrize(("y", "x"), [(2, 2), (8, 8), (256, 64)])
def test_memory_and_bytes_of_a_rank(y: int, x: int) -> None:
    """Bytes of bfloat16; the sum of rows is in float32."""
    planned = hostir.program_for(mlp(mesh_of(y, x)), inputs=SHAPES, rank=y * x - 1)
    rows, wide = ROWS // y, WIDE // x
    assert planned.input_nbytes == BF16 * WIDTH * (rows + 2 * wide)
    hidden, result, total = rows * wide * BF16, rows * WIDTH * BF16, WIDTH * 4
    # Two hidden tensors around relu; the second and the parts of the result; parts and result; the
    # result, and the parts and the whole of the total.
    at_once = (2 * hidden, hidden + result, 2 * result, result + 2 * total)
    assert planned.peak_nbytes == max(at_once)
    sent = {"mesh_x": 2 * (x - 1) * result // x, "mesh_y": 2 * (y - 1) * total // y}
    assert planned.sent_along == sent
    assert [(one.along, one.members, one.times) for one in planned.communications] == [
        ("mesh_x", x, 1),
        ("mesh_y", y, 1),
    ]
    assert [one.received_nbytes for one in planned.communications] == [*sent.values()]
    predicted = planned.predict("h200")
    (one,) = predicted.classes
    assert len(one.ranks) == x * y and one.sent_along == sent
    assert (one.input_nbytes, one.peak_nbytes) == (planned.input_nbytes, planned.peak_nbytes)
    times = [row.seconds for row in one.communications]
    assert sum(times) == pytest.approx(one.communication) and min(times) > 0


def test_extents_in_the_definition_need_no_shapes() -> None:
    fd = mlp(mesh_of(2, 2), *SIZES)
    planned = hostir.program_for(fd)
    assert planned.rank == 0
    for inputs in (SHAPES, [None, None, SHAPES[2]]):
        assert hostir.program_for(fd, inputs=inputs).peak_nbytes == planned.peak_nbytes
    symbolic = hostir.program_for(mlp(mesh_of(2, 2)), inputs=SHAPES)
    assert symbolic.peak_nbytes == planned.peak_nbytes


def test_overlap_needs_all_ranks_on_one_host() -> None:
    """An allgather beside a linear is divided into steps, unless the ranks are on two hosts."""

    def gathered(ranks: int) -> FusionDefinition:
        mesh = DeviceMesh(range(ranks))
        with FusionDefinition() as fd:
            x, w = (
                fd.define_tensor(
                    [-1, -1],
                    contiguity=True,
                    dtype=DataType.BFloat16,
                    mesh=mesh,
                    placements=[Shard(0)],
                )
                for _ in range(2)
            )
            fd.add_output(fd.ops.linear(x, w))
        return fd

    def text(ranks: int, **options: Any) -> str:
        planned = hostir.program_for(gathered(ranks), inputs=[(8192, 8192)] * 2, **options)
        return str(planned.program)

    assert "FOR" in text(4, machine="h200") and "FOR" in text(4, ranks_per_host=4)
    assert "FOR" not in text(4, ranks_per_host=2) and "FOR" not in text(16)
    assert "FOR" not in text(4, device="cpu")
    assert "backend=NCCL" in text(16) and "backend=MPI" in text(16, device="cpu")


def test_a_plan_connects_to_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank of a job may plan alone; the dump has the number of the process."""

    def refuse() -> Communicator:
        raise AssertionError("a plan needs no communicator")

    monkeypatch.setattr(Communicator, "instance", staticmethod(refuse))
    monkeypatch.setenv("FUSER_DUMP", "host_ir")
    written: list[int] = []
    monkeypatch.setattr(dumps, "write", lambda dump, *, rank: written.append(rank))
    for fd in (mlp(mesh_of(2, 2), *SIZES), uneven(DeviceMesh(range(4)))):
        hostir.program_for(fd, rank=3, backend="GLOO", device="cpu")
    assert written == [0, 0]


# ------------------------------------------------------------------ another mesh
def without_axis_numbers(text: str) -> str:
    """Returns a program's text without the numbers of axes, which count all axes ever made."""
    return re.sub(r"((?:[irb]S|[ir]deviceIdx\.[xyz]|istreamIdx)\d*?)\d+\{", r"\1{", text)


@pytest.mark.parametrize("shape", [(1, 1), (2, 8), (8, 64), (256, 64)])
def test_a_definition_is_lowered_for_another_mesh(shape: tuple[int, int]) -> None:
    written, mesh = mlp(mesh_of(2, 2)), mesh_of(*shape)
    rank = mesh.size - 1
    moved = hostir.program_for(written, mesh, inputs=SHAPES, rank=rank)
    direct = hostir.program_for(mlp(mesh), inputs=SHAPES, rank=rank)
    assert without_axis_numbers(str(moved.program)) == without_axis_numbers(str(direct.program))
    assert (moved.peak_nbytes, moved.sent_along) == (direct.peak_nbytes, direct.sent_along)
    # The definition itself stays on its mesh.
    again = hostir.program_for(written, inputs=SHAPES)
    assert again.program.devices() == (0, 1, 2, 3)
    same = hostir.program_for(written, mesh_of(2, 2), inputs=SHAPES)
    assert same.program.full_text() == again.program.full_text()


def test_nested_divisions_and_other_ranks_are_moved() -> None:
    mesh, other = mesh_of(2, 2), DeviceMesh([[7, 5, 3], [1, 9, 11]])

    def nested(on: DeviceMesh) -> FusionDefinition:
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, 8], contiguity=True, mesh=on, placements=[Shard(0)] * 2)
            y = fd.ops.exp(x)
            shard(y, on, [Replicate(), Replicate()])
            fd.add_output(y)
        return fd

    inputs = [(12, 8)]
    moved = hostir.program_for(nested(mesh), other, inputs=inputs, rank=9, device="cpu")
    direct = hostir.program_for(nested(other), inputs=inputs, rank=9, device="cpu")
    assert without_axis_numbers(str(moved.program)) == without_axis_numbers(str(direct.program))
    assert moved.input_nbytes == 2 * 8 * 4 and moved.sent_along == direct.sent_along


def test_meshes_that_cannot_be_replaced_are_refused() -> None:
    with pytest.raises(ShardingError, match=r"can replace one mesh of 1 dimension, but .* has Dev"):
        hostir.program_for(mlp(mesh_of(2, 2)), [0, 1], inputs=SHAPES)
    with pytest.raises(ShardingError, match="rank 5 is on no mesh"):
        hostir.program_for(mlp(mesh_of(2, 2)), mesh_of(1, 4), inputs=SHAPES, rank=5)
    with pytest.raises(ShardingError, match="not divisible by the 3 devices"):
        hostir.program_for(mlp(mesh_of(2, 2)), mesh_of(3, 1), inputs=SHAPES)

    def by_hand(ptype: ParallelType) -> FusionDefinition:
        with FusionDefinition() as fd:
            x = fd.define_tensor([2, 8], contiguity=True)
            x.set_device_mesh([0, 1])
            y = fd.ops.neg(x)
            y.set_device_mesh([0, 1])
            y.axis(0).parallelize(ptype)
            fd.add_output(y)
        return fd

    with pytest.raises(UnsupportedError, match="extent or a memory layout with the number"):
        hostir.program_for(by_hand(ParallelType.mesh_x), [0, 1, 2, 3])
    with pytest.raises(UnsupportedError, match="divides axes over streams"):
        hostir.program_for(by_hand(ParallelType.stream), [0, 1, 2, 3])


# ------------------------------------------------------------------ what is refused
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"input 0, T0_\S+ \[i0, i1\], has an extent .* pass inputs=\[\.\.\] with the shape"),
        ({"inputs": SHAPES[:2]}, "Expected 3, got 2: T2.* is missing"),
        ({"inputs": [*SHAPES[:2], (1024,)]}, r"input 2, .* cannot have the global shape \(1024,\)"),
        ({"inputs": [*SHAPES[:2], (1024, -1)]}, r"cannot have the global shape \(1024, -1\)"),
        ({"inputs": [*SHAPES[:2], (1024, 2.5)]}, "needs a shape of integers"),
        ({"inputs": [torch.empty(2, 2), *SHAPES[1:]]}, "shape of the whole .* but found a Tensor"),
        ({"inputs": [*SHAPES[:2], (1024, 512)]}, "to have extent i3 = 4096 .* but got 512"),
        ({"inputs": SHAPES, "backend": "UCX"}, "no backend 'UCX': expected one of NCCL"),
        ({"inputs": SHAPES, "machine": "h100"}, "there is no machine 'h100'"),
        ({"inputs": SHAPES, "number_of_streams": 0}, "number_of_streams = 0: expected a number"),
        ({"inputs": SHAPES, "ranks_per_host": 0}, "ranks_per_host = 0: expected a number"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        hostir.program_for(mlp(mesh_of(2, 2)), **options)


def test_ranks_and_meshes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ShardingError, match=r"rank 4 is on no mesh .* choose a rank of DeviceMesh"):
        hostir.program_for(mlp(mesh_of(2, 2)), inputs=SHAPES, rank=4)
    with pytest.raises(ShardingError, match=r"extent 512 .* is not divisible by the 3 devices"):
        hostir.program_for(mlp(mesh_of(3, 2)), inputs=SHAPES)  # uneven extents must be constant
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.neg(fd.define_tensor([4])))
    with pytest.raises(ShardingError, match="the definition names no mesh"):
        hostir.program_for(fd)
    with pytest.raises(InputError, match="expected a FusionDefinition, but found a Fusion"):
        hostir.program_for(fd.fusion)
    with pytest.raises(InputError, match="input 1, d2, is a number, but found None"):
        hostir.program_for(defined(scaled_noise), inputs=[(8, 8), None])
