"""Refused shardings name the line of the user's program that asked for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fuser import FusionDefinition, ParallelType
from fuser.errors import FuserError, ShardingError, UnsupportedError
from fuser.ir.tensor import TensorView
from fuser.multidevice import DeviceMesh
from multidevice import simulate

FIRST, SECOND = DeviceMesh([0, 1]), DeviceMesh([2, 3])


def cut(tv: TensorView) -> None:
    tv.outer_split(0, 2)
    tv.axis(0).parallelize(ParallelType.mesh_x)


def indivisible_result(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1, 4], contiguity=True)
    y = fd.ops.exp(x)  # indivisible_result
    fd.add_output(y)
    x.set_device_mesh(FIRST)
    y.set_device_mesh(FIRST)
    cut(y)


def indivisible_input(fd: FusionDefinition) -> None:
    x = fd.define_tensor([7, 4], contiguity=True)
    fd.add_output(fd.ops.exp(x))
    x.set_device_mesh(FIRST)  # indivisible_input
    cut(x)


def indivisible_sum(fd: FusionDefinition) -> None:
    """The result has no mesh but the one that its op copied."""
    x = fd.define_tensor([-1, 4], contiguity=True)
    x.set_device_mesh(FIRST)
    y = fd.ops.sum(x, dim=1)  # indivisible_sum
    fd.add_output(y)
    cut(y)


def too_many_ranks(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1, 4], contiguity=True)
    x.set_device_mesh(DeviceMesh([0, 9]))  # too_many_ranks
    fd.add_output(fd.ops.exp(x))


def no_mesh(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1, 4], contiguity=True)  # no_mesh
    y = fd.ops.exp(x)
    fd.add_output(y)
    cut(x)
    y.set_device_mesh(FIRST)


def disjoint_broadcast(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1, 4], contiguity=True)
    y = fd.ops.exp(x)  # disjoint_broadcast
    fd.add_output(y)
    x.set_device_mesh(FIRST)
    y.set_device_mesh(SECOND)


def disjoint_scatter(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1, 4], contiguity=True)
    y = fd.ops.exp(x)  # disjoint_scatter
    fd.add_output(y)
    x.set_device_mesh(FIRST)
    y.set_device_mesh(SECOND)
    cut(y)


@pytest.mark.parametrize(
    ("define", "kind", "why"),
    [
        (indivisible_result, ShardingError, "extent 7 .* is not divisible by the 2 devices"),
        (indivisible_input, ShardingError, "7"),
        (indivisible_sum, ShardingError, "extent 7 .* is not divisible by the 2 devices"),
        (too_many_ranks, ShardingError, "names rank 9, but the job has 4 ranks"),
        (no_mesh, ShardingError, "has no mesh: call set_device_mesh"),
        (disjoint_broadcast, UnsupportedError, "Broadcast of T0_g_float"),
        (disjoint_scatter, UnsupportedError, "Scatter of T0_g_float"),
    ],
)
def test_refused_shardings_name_the_users_line(
    define: Callable[[FusionDefinition], None], kind: type[FuserError], why: str
) -> None:
    with FusionDefinition() as fd:
        define(fd)

    def body() -> None:
        with pytest.raises(kind, match=why) as caught:
            fd.execute([torch.ones(7, 4)])
        messages.append(str(caught.value))

    messages: list[str] = []
    with simulate(4) as world:
        world.run(body)
    lines = Path(__file__).read_text().splitlines()
    (line,) = (n for n, text in enumerate(lines, 1) if text.endswith(f"  # {define.__name__}"))
    assert all(f"(user code at {__file__}:{line})" in m for m in messages), messages
