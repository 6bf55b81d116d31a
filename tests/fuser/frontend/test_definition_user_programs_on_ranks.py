"""The programs of the table with sharded inputs: results, updates and random numbers equal those of
one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fuser import FusionDefinition, ParallelType, TensorView
from fuser.multidevice import Communicator, DeviceMesh, shard_tensor
from multidevice import simulate
from tests.support.user_programs import ALL
from tests.support.user_programs.table import PROGRAMS, Program, compare

pytestmark = pytest.mark.from_text

SHARED = [p for p in ALL if p.cuts is not None]
UNDER_MPIRUN = (
    "layer_norm_backward",
    "batch_norm_train",
    "attention_with_seeded_dropout",
    "attention_with_dropout",
    "adam",
    "clip_by_global_norm",
    "moe_gating",
)
X = ParallelType.mesh_x
# A tensor of a rank, and the axis along which it is a shard (-1: it is the whole tensor).
Part = tuple[torch.Tensor, int]


def run_on_rank(program: Program, seed: int = 5) -> tuple[list[Part], list[Part]]:
    """Returns the results and the updated inputs of this rank."""
    assert program.cuts is not None
    count = Communicator.instance().size()
    mesh = DeviceMesh(range(count))
    with FusionDefinition() as fd:
        program.define(fd)
        declared = fd.fusion.inputs()
        for at, tv in enumerate(declared):
            if isinstance(tv, TensorView) and not tv.is_cpu_scalar:
                tv.set_device_mesh(mesh)
                if (axis := program.cuts.get(at)) is not None:
                    tv.outer_split(axis, count)
                    tv.axis(axis).parallelize(X)
    given = [
        shard_of(x, tv) if isinstance(tv, TensorView) and tv.ndim else x
        for x, tv in zip(program.inputs(), declared, strict=False)
    ]
    torch.manual_seed(seed)
    results = fd.execute(given)
    axes = [s.axis_sharded_on(X) for s in fd.fec.get_output_shardings()]
    updated = [(given[at], program.cuts.get(at, -1)) for at in program.updates]
    return list(zip(results, axes, strict=True)), updated


def shard_of(x: torch.Tensor, tv: TensorView) -> torch.Tensor:
    is_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    order = torch.channels_last if is_last else torch.contiguous_format
    return shard_tensor(x, tv).contiguous(memory_format=order)


def whole(parts: list[Part]) -> torch.Tensor:
    """Joins the parts of all ranks; a replicated result must be equal on all of them."""
    tensors, axes = zip(*parts, strict=True)
    assert len(set(axes)) == 1
    if axes[0] >= 0:
        return torch.cat(tensors, axes[0])
    for t in tensors[1:]:
        assert torch.equal(t, tensors[0])
    return tensors[0]


def run_alone(program: Program, seed: int) -> list[torch.Tensor]:
    inputs = program.inputs()
    torch.manual_seed(seed)
    return program.build().execute(inputs)


def check(program: Program, ranks: list[tuple[list[Part], list[Part]]], seed: int = 5) -> None:
    results, updated = (
        [whole(list(parts)) for parts in zip(*(rank[k] for rank in ranks), strict=True)]
        for k in range(2)
    )
    inputs = program.inputs()
    for at, tensor in zip(program.updates, updated, strict=True):
        inputs[at] = tensor
    compare(program, inputs, results)
    alone = run_alone(program, seed)
    for i, (result, one) in enumerate(zip(results, alone, strict=True)):
        if i < program.draws or not result.is_floating_point():
            assert torch.equal(result, one), f"result {i}"


@pytest.mark.parametrize(
    ("program", "count"),
    [*((p, 4) for p in SHARED), *((p, 2) for p in SHARED[::3])],
    ids=str,
)
def test_on_simulated_ranks(program: Program, count: int) -> None:
    with simulate(count) as world:
        check(program, world.run(lambda: run_on_rank(program)))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", UNDER_MPIRUN)
def test_under_mpirun(name: str, comm: Any) -> None:
    from mpi4py import MPI

    program = PROGRAMS[name]
    check(program, MPI.COMM_WORLD.allgather(run_on_rank(program)))


def test_random_numbers_follow_the_seed() -> None:
    """Equal seeds give equal numbers on any ranks; other seeds or offsets give other numbers."""
    program = PROGRAMS["stochastic_rounding"]
    x, seed, offset = program.inputs()
    fd = program.build()
    first, again, other, later = (
        fd.execute([x, s, o])[0]
        for s, o in ((seed, offset), (seed, offset), (seed + 1, offset), (seed, offset + 1))
    )
    assert torch.equal(first, again)
    assert (first != other).float().mean() > 0.99
    assert (first != later).float().mean() > 0.99
    assert first.min() >= 0 and first.max() < 1 and abs(first.mean() - 0.5) < 0.1

    unseeded = PROGRAMS["attention_with_dropout"]
    drawn = [run_alone(unseeded, seed)[0] for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
