"""`fuser.shard`: placements in one call, as in torch's DTensor."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import fuser
from fuser import (
    DataType,
    FusionDefinition,
    ParallelType,
    Replicate,
    Shard,
    TensorView,
    shard,
)
from fuser.multidevice import Communicator, DeviceMesh, shard_tensor, simulate
from fuser.support.errors import (
    ArgumentError,
    DefinitionError,
    FuserError,
    ShardingError,
    UnsupportedError,
)
from multidevice.job.shard_tensor import shard_for_rank
from tests.support.definition_copies import again

Placements = Sequence[Shard | Replicate]
X, Y, STREAM = ParallelType.mesh_x, ParallelType.mesh_y, ParallelType.stream


def mesh_of(*shape: int) -> DeviceMesh:
    count = torch.Size(shape).numel()
    return DeviceMesh(torch.arange(count).reshape(shape))


def block(whole: torch.Tensor, mesh: DeviceMesh, placements: Placements, rank: int) -> torch.Tensor:
    """Returns the shard of a rank by DTensor's definition, one mesh dimension after the other."""
    place = mesh.devices.index(rank)
    for k, (count, placed) in enumerate(zip(mesh.shape, placements, strict=True)):
        at = place // torch.Size(mesh.shape[k + 1 :]).numel() % count
        if isinstance(placed, Shard):
            whole = whole.chunk(count, placed.dim)[at]
    return whole


@pytest.mark.finding("G29")
@pytest.mark.parametrize("shape", [(1,), (2,), (4,), (2, 2), (1, 2), (3, 1), (2, 2, 2)])
def test_shards_are_those_of_dtensors(shape: tuple[int, ...]) -> None:
    mesh, whole = mesh_of(*shape), torch.arange(24.0 * 24).reshape(24, 24)
    for placements in itertools.product((Replicate(), Shard(0), Shard(-1)), repeat=len(shape)):
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, 24], contiguity=True, mesh=mesh, placements=placements)
            fd.add_output(fd.ops.neg(x))
        for rank in mesh.devices:
            expected = block(whole, mesh, placements, rank)
            torch.testing.assert_close(shard_for_rank(whole, x, rank), expected)
        assert not any(x.axis(k).is_device for k in range(2))
        again(fd)
        pickled = pickle.loads(pickle.dumps(fd))
        assert pickled.fusion == fd.fusion and repr(pickled) == repr(fd)


def by_three_lines(tv: TensorView, mesh: DeviceMesh, placements: Placements) -> None:
    tv.set_device_mesh(mesh)
    for dim in reversed(range(tv.ndim)):
        place = dim
        for k, placed in enumerate(placements):
            if isinstance(placed, Shard) and placed.dim % tv.ndim == dim:
                tv.outer_split(place, mesh.shape[k])
                tv.axis(place).parallelize((Y, X)[-mesh.ndim :][k])
                place += 1


CASES: dict[str, tuple[tuple[int, ...], list[Placements]]] = {
    "columns": ((2,), [[Replicate()], [Shard(0)], [Shard(1)]]),
    "rows": ((4,), [[Shard(1)], [Shard(1)], [Replicate()]]),
    "a square": (
        (2, 2),
        [[Shard(0), Replicate()], [Replicate(), Shard(0)], [Shard(0), Shard(1)]],
    ),
    "one axis twice": ((2, 2), [[Replicate()] * 2, [Shard(0)] * 2, [Shard(-1)] * 2]),
    "partial sums": ((2, 2), [[Shard(0), Shard(1)], [Replicate(), Shard(1)], [Shard(0), Shard(1)]]),
    "a unit": ((1, 2), [[Shard(0), Shard(1)], [Replicate(), Shard(1)], [Shard(0), Shard(1)]]),
}


def run(name: str, *, is_static: bool) -> None:
    shape, placements = CASES[name]
    mesh = mesh_of(*shape)
    given = [
        torch.randn(s, generator=torch.Generator().manual_seed(0)) for s in ((8, 16), (12, 16))
    ]
    results: list[torch.Tensor] = []
    for place in (shard, by_three_lines):
        with FusionDefinition() as fd:
            sizes = [[*x.shape] if is_static else [-1, -1] for x in given]
            x, w = (fd.define_tensor(s, contiguity=True) for s in sizes)
            y = fd.ops.linear(x, w)
            fd.add_output(y)
            for tv, placed in zip((x, w, y), placements, strict=True):
                place(tv, mesh, placed)
        if not mesh.has(Communicator.instance().rank()):
            return
        results += fd.execute([shard_tensor(v, tv) for v, tv in zip(given, (x, w), strict=True)])
        text = repr(fd)
        assert ("shard(tv0" in text) == (place is shard and Shard in map(type, placements[0]))
    whole = given[0].double() @ given[1].double().T
    expected = block(whole, mesh, placements[2], Communicator.instance().rank())
    for got in results:
        torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.finding("G29")
@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_sharded_linears_are_right(name: str, is_static: bool) -> None:
    with simulate(torch.Size(CASES[name][0]).numel()) as world:
        world.run(run, name, is_static=is_static)


@pytest.mark.mpi(min_size=2)
@pytest.mark.finding("G29")
@pytest.mark.parametrize("name", CASES)
def test_sharded_linears_are_right_under_mpirun(name: str, comm: Communicator) -> None:
    if torch.Size(CASES[name][0]).numel() <= comm.size():
        run(name, is_static=False)


@pytest.mark.mpi(min_size=2)
@pytest.mark.finding("G29")
def test_placements_and_meshes_of_torch(comm: Communicator) -> None:
    from torch.distributed import tensor as theirs

    mesh, whole = DeviceMesh(range(comm.size())), torch.arange(24.0).reshape(2, 12)
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], mesh=mesh, placements=[theirs.Shard(-1)])
        y = shard(fd.ops.neg(x), mesh, (theirs.Replicate(),))
        fd.add_output(y)
        with pytest.raises(
            UnsupportedError, match=r"T0_.* is Partial\(sum\): an input can only have"
        ):
            shard(x, mesh, [theirs.Partial()])
        with pytest.raises(UnsupportedError, match=r"is Partial\(sum\): a result can only have"):
            shard(y, mesh, [theirs.Partial()])
    (got,) = fd.execute([shard_tensor(whole, x)])
    torch.testing.assert_close(got, -whole)
    assert y.mesh == mesh and x.axis(0).size is x.size(0)


@pytest.mark.finding("G29")
def test_later_calls_count_axes_as_before() -> None:
    whole = torch.randn(4, 6, 8)

    def body() -> None:
        with FusionDefinition() as fd:
            x = shard(fd.define_tensor([-1, -1, 8], contiguity=True), [0, 1], [Shard(0)])
            y = shard(fd.ops.exp(x), [0, 1], [Shard(0)])
            fd.add_output(y)
            y.outer_split(1, 3)
            y.axis(1).parallelize(STREAM)
            y.set_allocation_domain([y.get_logical_domain()[k] for k in (2, 0, 1)], True)
        again(fd)
        (got,) = fd.execute([shard_tensor(whole, x)])
        torch.testing.assert_close(got, shard_tensor(whole.exp(), y))
        assert got.stride() == (6, 1, 12)
        assert "FOR" in str(fd.fec.host_program())

    with simulate(2) as world:
        world.run(body)


@pytest.mark.finding("G29")
def test_axes_of_results_are_those_that_they_have() -> None:
    whole = torch.randn(4, 6, dtype=torch.float64)

    def body() -> None:
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, 6], contiguity=True, mesh=[0, 1], placements=[Shard(0)])
            y = shard(fd.ops.sum(x, dim=0), [0, 1], [Shard(0)])
            fd.add_output(y)
        again(fd)
        (got,) = fd.execute([shard_tensor(whole.float(), x)])
        rank = Communicator.instance().rank()
        expected = whole.float().double().sum(0).chunk(2)[rank]
        torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)
        (sent,) = fd.fec.host_program().communications()
        assert sent.type == "ReduceScatter"

    with simulate(2) as world:
        world.run(body)


@pytest.mark.finding("G29")
def test_all_forms_of_define_tensor_take_a_mesh() -> None:
    forms: list[tuple[tuple[object, ...], dict[str, Any]]] = [
        (([-1, 4], [True, True]), {}),
        (([-1, 4],), {"contiguity": True, "dtype": DataType.Half}),
        (([8, 4], [4, 1]), {}),
        ((), {"sizes": [8, 4], "strides": [1, 8], "static_sizes": True}),
    ]
    with FusionDefinition() as fd:
        for args, kwargs in forms:
            cut = fd.define_tensor(
                *args, **kwargs, mesh=[[0, 1]], placements=[Replicate(), Shard(1)]
            )
            whole = fd.define_tensor(*args, **kwargs, mesh=range(2))
            assert cut.mesh == DeviceMesh([[0, 1]]) and whole.mesh == DeviceMesh([0, 1])
            assert cut.domain.has_devices and not whole.domain.has_devices
            fd.add_output(cut)
            fd.add_output(whole)
    again(fd)
    with (
        FusionDefinition() as fd,
        pytest.raises(DefinitionError, match=r"placements=.* without mesh"),
    ):
        fd.define_tensor([4], placements=[Shard(0)])


WRONG: dict[str, tuple[object, object, type[FuserError], str]] = {
    "too few": ([[0, 1], [2, 3]], [Shard(0)], ShardingError, r"which has 2 .*, got 1 for T0"),
    "an axis too far": (
        [0, 1],
        [Shard(2)],
        ShardingError,
        r"Shard\(2\), .* 2 axes: expected -2 to 1",
    ),
    "too far from the end": ([0, 1], [Shard(-3)], ShardingError, r"Shard\(-3\), .* 2 axes"),
    "a rest of two": (
        [[0, 1, 2], [3, 4, 5]],
        [Shard(1)] * 2,
        ShardingError,
        r"has 8 elements, which 6 devices along 2 dimensions .*: pad it to 12, or use",
    ),
    "a number": (
        [0, 1],
        [0],
        ArgumentError,
        r"placements\[0\]: expected Shard or Replicate, got 0",
    ),
    "no list": ([0, 1], Shard(0), ArgumentError, "placements: expected"),
    "how many": (2, [Shard(0)], ArgumentError, "expected a list of ranks"),
    "an empty mesh": (DeviceMesh([]), [], ShardingError, r"DeviceMesh\{\} is empty, .* T0"),
    "no ranks": ([], [Shard(0)], ShardingError, r"DeviceMesh\{\} is empty, .* T0"),
}


@pytest.mark.finding("G29")
@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_name_numbers_and_line(name: str) -> None:
    mesh, placements, kind, words = WRONG[name]
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 8])
        with pytest.raises(kind, match=words) as raised:
            fuser.shard(x, mesh, placements)  # pyright: ignore[reportArgumentType]
        assert x.mesh is None and "test_shard_annotation.py" in str(raised.value)


def test_a_mesh_before_the_tensor_is_told_to_swap_them() -> None:
    with FusionDefinition() as fd:
        x, mesh = fd.define_tensor([8, 8]), DeviceMesh([0, 1])
        with pytest.raises(ArgumentError) as error:
            shard(mesh, x, [Shard(0)])  # pyright: ignore[reportArgumentType]
        assert str(error.value).startswith(
            "shard(): the first two arguments are in the wrong order: DeviceMesh{0 1} is a "
            "DeviceMesh, T0_g_float is a tensor. Swap them: shard(tensor, mesh, placements) (user "
            f"code at {__file__}:"
        )
        with pytest.raises(ArgumentError, match=r"got DeviceMesh\{0 1\} of type DeviceMesh "):
            fd.ops.exp(mesh)  # pyright: ignore[reportArgumentType, reportCallIssue]


@pytest.mark.finding("G29")
def test_a_tensor_is_sharded_once_and_before_it_is_split() -> None:
    with FusionDefinition() as fd:
        x, y = fd.define_tensor([8, 8]), fd.define_tensor([8, 8])
        shard(x, [0, 1], [Shard(0)])
        with pytest.raises(DefinitionError, match=r"T0.* is already sharded"):
            shard(x, [0, 1], [Shard(1)])
        y.outer_split(0, 4)
        with pytest.raises(DefinitionError, match=r"axis iS.* of T1.* was split"):
            shard(y, [0, 1], [Shard(0)])
        assert shard(y, [0, 1], [Shard(1)]) is y
        with pytest.raises(ArgumentError, match="Shard: expected the number of an axis, got 'a'"):
            Shard("a")  # pyright: ignore[reportArgumentType]
    assert repr(Shard(1)) == "Shard(dim=1)" and Shard(1) == Shard(1) != Shard(0)
