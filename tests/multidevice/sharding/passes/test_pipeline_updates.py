"""In-place updates of sharded inputs: received into a buffer first, so that readers see old
values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fuser import FusionDefinition, ParallelType, multidevice
from fuser.support.errors import FuserError

CUTS = (None, 0, 1)
# The value written into y: how the program defines it, and the same in torch.
Row = tuple[Callable[[Any, Any, Any], Any], Callable[[Any, Any], torch.Tensor]]
ROWS: dict[str, Row] = {
    "add": (lambda ops, x, y: ops.add(x, y), lambda x, y: x + y),
    "matmul": (lambda ops, x, y: ops.matmul(x, y), lambda x, y: x @ y),
    "permute": (lambda ops, x, y: ops.permute(x, [1, 0]), lambda x, y: x.t()),
    "input": (lambda ops, x, y: x, lambda x, y: x),
    "neg": (lambda ops, x, y: ops.neg(y), lambda x, y: -y),
}


def cut(tv: Any, axis: int | None) -> None:
    tv.set_device_mesh(multidevice.DeviceMesh([0, 1]))
    if axis is not None:
        tv.outer_split(axis, 2)
        tv.axis(axis).parallelize(ParallelType.mesh_x)


def part(x: torch.Tensor, axis: int | None, rank: int) -> torch.Tensor:
    return x.clone() if axis is None else x.chunk(2, axis)[rank].clone()


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("both", [False, True])
def test_updates_of_shards(name: str, both: bool) -> None:
    """Updates y from x and y with every pair of cuts; with `both`, x is updated too."""
    define, meaning = ROWS[name]
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randint(-3, 4, (4, 4), generator=generator).float() for _ in range(2))

    def body(x_cut: int | None, y_cut: int | None) -> None:
        rank = multidevice.Communicator.instance().rank()
        with FusionDefinition() as fd:
            a, b = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
            total = fd.ops.add(b, fd.ops.mul(a, 2.0))
            fd.add_output(define(fd.ops, a, b), b)
            fd.add_output(total, *([a] if both else []))
            cut(a, x_cut)
            cut(b, y_cut)
        for _ in range(2):
            mine = part(x, x_cut, rank), part(y, y_cut, rank)
            outs = fd.execute(list(mine))
            assert len(outs) == (0 if both else 1)
            assert torch.equal(mine[1], part(meaning(x, y), y_cut, rank))
            assert torch.equal(mine[0], part(y + x * 2.0 if both else x, x_cut, rank))

    for cuts in itertools.product(CUTS, repeat=2):
        with multidevice.simulate(2) as world:
            world.run(body, *cuts)


def test_a_lost_update_on_one_rank_reaches_the_others_before_anything_is_written() -> None:
    def body() -> tuple[str, list[float]]:
        rank = multidevice.Communicator.instance().rank()
        with FusionDefinition() as fd:
            a, b = (fd.define_tensor([-1], contiguity=True) for _ in range(2))
            fd.add_output(fd.ops.add(a, 1.0), a)
            fd.add_output(fd.ops.mul(b, 2.0), b)
            cut(a, 0)
            cut(b, 0)
        memory, error = torch.arange(8.0), ""
        fd.execute([memory[:4], memory[4:]])
        try:
            fd.execute([memory[:4], memory[3:7] if rank == 1 else memory[4:]])
        except FuserError as found:
            error = f"{type(found).__name__}: {found}"
        fd.execute([memory[:4], memory[4:]])
        return error, memory.tolist()

    with multidevice.simulate(2) as world:
        first, second = world.run(body)
    assert second[0].startswith("InputError: input 0, T0") and "would be lost" in second[0]
    assert first[0].startswith("PeerError: rank 1 failed: InputError: input 0, T0")
    assert first[1] == second[1] == [2, 3, 4, 5, 16, 20, 24, 28]
