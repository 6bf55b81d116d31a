"""Copies of definitions by pickle and deepcopy, which use the text of `repr`."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fuser import DataType, FusionDefinition, ParallelType, Replicate, Shard, multidevice, shard
from fuser.support.errors import DefinitionError, ProgramMismatchError

pytestmark = pytest.mark.from_text

COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda fd: pickle.loads(pickle.dumps(fd)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


def rebuilt(fd: FusionDefinition) -> FusionDefinition:
    """Returns the definition that the text of a definition creates."""
    names: dict[str, Any] = {"FusionDefinition": FusionDefinition, "DataType": DataType}
    exec(repr(fd), names)
    with FusionDefinition() as made:
        next(f for name, f in names.items() if name.startswith("nvfuser_fusion"))(made)
    return made


def written() -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 8], contiguity=True)
        s = fd.define_scalar(dtype=DataType.Double)
        fd.add_output(fd.ops.sum(fd.ops.mul(x, s), 1))
        fd.add_output(fd.ops.add(x, 0.1), x)
    return fd


@pytest.mark.finding("G10")
@pytest.mark.parametrize("has_run", [False, True], ids=["new", "run"])
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_a_definition_is_equal_and_runs(name: str, has_run: bool) -> None:
    fd = written()
    if has_run:
        fd.execute([torch.ones(2, 8), 2.0])
    twin = COPIES[name](fd)
    assert twin is not fd and twin.fusion == fd.fusion and repr(twin) == repr(fd)
    x = torch.randn(3, 8)
    before = x.clone()
    (out,) = twin.execute([x, 3.0])
    torch.testing.assert_close(out, (before * 3).sum(1))
    torch.testing.assert_close(x, before + 0.1)
    fd.execute([x, 1.0])  # the first is its own


@pytest.mark.finding("G10")
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_keeps_meshes_cuts_and_the_rule_of_numbers(name: str) -> None:
    with FusionDefinition(double_numbers=True) as fd:
        x = fd.define_tensor([-1, 4], dtype=DataType.Int, contiguity=True)
        x.set_device_mesh(multidevice.DeviceMesh([0, 1]))
        x.outer_split(0, 2)
        x.axis(0).parallelize(ParallelType.mesh_x)
        fd.add_output(fd.ops.mul(x, 0.5))
    twin = COPIES[name](fd)
    assert repr(twin) == repr(fd) and twin.fusion.double_numbers
    assert twin.fusion.inputs[0].mesh == multidevice.DeviceMesh([0, 1])
    assert twin.fusion.outputs[0].dtype() is DataType.Double


@pytest.mark.finding("G10")
def test_a_definition_that_is_not_written_has_words_or_an_empty_copy() -> None:
    assert "not written yet" in repr(copy.deepcopy(FusionDefinition()))
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1])
        with pytest.raises(
            DefinitionError, match="can be copied only after its `with` block has ended"
        ):
            pickle.dumps(fd)
        assert copy.deepcopy(x.size(0)) is x.size(0)
        assert pickle.loads(pickle.dumps((x.size(0) + 3) * 2 // 5)) is (x.size(0) + 3) * 2 // 5
        fd.add_output(x)


def rows(fd: FusionDefinition, mesh: multidevice.DeviceMesh) -> None:
    x = fd.define_tensor([-1, -1])
    shard(x, mesh, [Shard(0)])
    fd.add_output(fd.ops.mul(x, 2.0))


def summed(fd: FusionDefinition, mesh: multidevice.DeviceMesh) -> None:
    """Annotates tensors between the ops, and the later input first. The axes of resharded tensors
    then have other numbers in the copy."""
    x, y = fd.define_tensor([-1, -1]), fd.define_tensor([-1, -1])
    shard(y, mesh, [Shard(0)])
    z = fd.ops.add(y, x)
    shard(x, mesh, [Shard(0)])
    out = fd.ops.sum(fd.ops.mul(z, 2.0), [0])
    shard(out, mesh, [Replicate()])
    fd.add_output(out)


def by_hand(fd: FusionDefinition, mesh: multidevice.DeviceMesh) -> None:
    """Shards a result by the mesh that its op has copied from an operand."""
    x = fd.define_tensor([-1, -1])
    x.set_device_mesh(mesh)
    y = fd.ops.mul(x, 2.0)
    y.outer_split(0, 2)
    y.axis(0).parallelize(ParallelType.mesh_x)
    fd.add_output(fd.ops.add(y, 1.0))


SHARDED: list[tuple[Callable[..., None], int, Callable[[torch.Tensor, int], torch.Tensor]]] = [
    (rows, 1, lambda x, _: x * 2),
    (summed, 2, lambda x, _: (x + x).mul(2).sum(0) * 2),
    (by_hand, 1, lambda x, rank: (x * 2 + 1).chunk(2)[rank]),
]


@pytest.mark.finding("G10")
@pytest.mark.parametrize("write, count, expected", SHARDED)
@pytest.mark.parametrize("name", [*COPIES, "repr"])
def test_ranks_with_a_sharded_definition_and_with_its_copy_run_the_same(
    name: str,
    write: Callable[..., None],
    count: int,
    expected: Callable[[torch.Tensor, int], torch.Tensor],
) -> None:
    x = torch.randn(4, 3)

    def on_rank() -> None:
        rank = multidevice.Communicator.instance().rank()
        with FusionDefinition() as fd:
            write(fd, multidevice.DeviceMesh([0, 1]))
        one = fd if rank == 0 else COPIES.get(name, rebuilt)(fd)
        for _ in range(3):
            (out,) = one.execute([x] * count)
            torch.testing.assert_close(out, expected(x, rank))

    with multidevice.simulate(2) as world:
        world.run(on_rank)


@pytest.mark.finding("G10")
def test_ranks_whose_definitions_differ_are_shown_the_op_and_not_what_was_annotated_first() -> None:
    def on_rank() -> None:
        rank = multidevice.Communicator.instance().rank()
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, -1])
            if rank == 0:
                shard(x, multidevice.DeviceMesh([0, 1]), [Shard(0)])
            y = fd.ops.mul(x, 2.0)
            if rank == 1:
                shard(x, multidevice.DeviceMesh([0, 1]), [Shard(0)])
            fd.add_output(fd.ops.exp(y) if rank == 0 else fd.ops.sin(y))
        fd.execute([torch.ones(2, 3)])

    with multidevice.simulate(2) as world, pytest.raises(ProgramMismatchError) as caught:
        world.run(on_rank)
    text = str(caught.value)
    assert "differ at op 2" in text and "expf(" in text and "sinf(" in text
