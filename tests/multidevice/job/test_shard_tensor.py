"""`shard_tensor` and its inverse, compared with indexing element by element."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from fuser import FusionDefinition, Replicate, Shard, shard
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ops.define import define_tensor
from fuser.support.errors import ArgumentError, ShardingError, UnsupportedError
from multidevice import DeviceMesh, shard_tensor, simulate
from multidevice.job.shard_tensor import shard_for_rank, unshard
from multidevice.sharding.queries import local_sizes, unsharded_sizes
from tests.support.rank_by_rank import X, Y, Z, mesh, shard_axis

pytestmark = pytest.mark.from_text


def tensor(rank: int) -> TensorView:
    fusion = Fusion()
    with FusionGuard(fusion):
        tv = define_tensor([-1] * rank, True)
    fusion.add_input(tv)
    return tv


@pytest.mark.parametrize("shape", [(2, 3), (1, 2), (2, 1, 2)])
@pytest.mark.parametrize("axes", list(itertools.product(range(2), repeat=2)))
def test_blocks_by_brute_force(shape: tuple[int, ...], axes: tuple[int, int]) -> None:
    """mesh_y cuts axis axes[0]; then mesh_x cuts each block along axis axes[1]."""
    m = mesh(*shape)
    tv = tensor(2)
    tv.set_device_mesh(m)
    numbers = [a.number for a in tv.domain.logical]
    ny, nx = m.size_of(Y), m.size_of(X)
    shard_axis(tv, axes[0], ny, Y)
    if axes[0] == axes[1]:
        shard_axis(tv, axes[1] + 1, nx, X)
    else:
        at = [a.number for a in tv.domain.loop].index(numbers[axes[1]])
        shard_axis(tv, at, nx, X)
    whole = torch.arange(12 * 24).view(12, 24)
    for rank in m.devices:
        kept = [list(range(12)), list(range(24))]
        for axis, count, ptype in ((axes[0], ny, Y), (axes[1], nx, X)):
            block = len(kept[axis]) // count
            at = m.coordinate(rank, ptype) * block
            kept[axis] = kept[axis][at : at + block]
        want = whole[kept[0]][:, kept[1]]
        got = shard_for_rank(whole, tv, rank)
        assert torch.equal(got, want)
        assert got.is_contiguous()
        assert local_sizes(tv, (12, 24)) == tuple(got.shape)
        assert unsharded_sizes(tv, tuple(got.shape)) == (12, 24)
    shards = [shard_for_rank(whole, tv, r) for r in m.devices]
    assert torch.equal(unshard(shards, tv), whole)


def test_inner_splits_take_strided_elements() -> None:
    tv = tensor(1)
    tv.set_device_mesh(mesh(2))
    tv.split(0, 2)
    tv.axis(1).parallelize(X)
    assert shard_for_rank(torch.arange(6), tv, 1).tolist() == [1, 3, 5]


def test_a_whole_axis_keeps_extent_one() -> None:
    tv = tensor(2)
    tv.set_device_mesh(mesh(2))
    tv.axis(0).parallelize(X)
    whole = torch.arange(6).view(2, 3)
    assert shard_for_rank(whole, tv, 1).tolist() == [[3, 4, 5]]
    with pytest.raises(ShardingError, match="has extent 4"):
        shard_for_rank(torch.zeros(4, 3), tv, 0)


def test_replicated_tensors_and_ranks_outside() -> None:
    tv = tensor(1)
    tv.set_device_mesh(DeviceMesh([1, 2]))
    assert shard_for_rank(torch.arange(4), tv, 2).tolist() == [0, 1, 2, 3]
    shard_axis(tv, 0, 2)
    assert shard_for_rank(torch.arange(4), tv, 2).tolist() == [2, 3]
    assert shard_for_rank(torch.arange(4), tv, 0).tolist() == [0, 1]


def test_errors_name_tensor_extent_and_mesh() -> None:
    tv = tensor(1)
    with pytest.raises(ShardingError, match="has no DeviceMesh"):
        shard_for_rank(torch.zeros(4), tv, 0)
    tv.set_device_mesh(mesh(2))
    shard_axis(tv, 0, 2)
    with pytest.raises(ShardingError, match=r"extent 1 of axis 0 of input 0 .*DeviceMesh\{0 1\}"):
        shard_for_rank(torch.zeros(1), tv, 0)
    assert [shard_for_rank(torch.zeros(5), tv, rank).numel() for rank in (0, 1)] == [3, 2]
    with pytest.raises(ShardingError, match="1 axis, but the tensor has shape"):
        shard_for_rank(torch.zeros(4, 4), tv, 0)


def test_a_result_that_has_no_placement_of_its_own_is_refused() -> None:
    """The mesh of such a result is its operand's, and its placement is not known yet."""
    pair = DeviceMesh([0, 1])
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 8], contiguity=True, mesh=pair, placements=[Shard(0)])
        y, z = fd.ops.exp(x), fd.ops.neg(x)
        fd.add_output(y)
        fd.add_output(z)
        shard(z, pair, [Replicate()])
    whole = torch.arange(32.0).view(4, 8)
    with pytest.raises(ShardingError, match=r"the result of exp .* has no placement .*shard\("):
        shard_tensor(whole, y)
    assert torch.equal(shard_tensor(whole, z), whole)


def test_the_sharding_of_a_result_is_read_from_the_compiled_program() -> None:
    """The calls that the message names return the shard that execute returned."""
    whole = torch.randn(8, 16), torch.randn(6, 16)

    def run() -> None:
        with FusionDefinition() as fd:
            x, w = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
            hidden = fd.ops.linear(x, w)
            fd.add_output(fd.ops.neg(x))
            fd.add_output(hidden)
        pair = DeviceMesh([0, 1])
        x.set_device_mesh(pair)
        w.set_device_mesh(pair)
        shard_axis(w, 0, 2)
        expected = whole[0] @ whole[1].T
        words = r"the result of linear .*fd\.fec\.get_output_shardings\(\)\[1\].*shard\(tensor"
        with pytest.raises(ShardingError, match=words) as caught:
            shard_tensor(expected, hidden)
        assert "pass the whole tensor" not in str(caught.value)
        _, found = fd.execute([whole[0], shard_tensor(whole[1], w)])
        s = fd.fec.get_output_shardings()[1]
        assert s.mesh == pair
        shard_of_rank = pair.shard_tensor(expected, s.axis_sharded_on(X))
        assert found.shape == (8, 3)
        torch.testing.assert_close(found, shard_of_rank, atol=1e-5, rtol=1e-5)

    with simulate(2) as world:
        world.run(run)


def test_a_result_of_a_program_without_meshes_is_whole() -> None:
    with FusionDefinition() as fd:
        y = fd.ops.exp(fd.define_tensor([-1], contiguity=True))
        fd.add_output(y)
    with pytest.raises(ShardingError, match="so it has no shards: execute returns the whole"):
        shard_tensor(torch.ones(4), y)


def test_a_symbolic_axis_on_devices_says_how_to_cut() -> None:
    def run() -> None:
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, 16], contiguity=True)
            fd.add_output(fd.ops.neg(x))
        x.set_device_mesh(range(2))
        x.axis(0).parallelize(X)
        words = r"extent 8, .*: first call outer_split\(0, 2\), then parallelize axis\(0\)"
        with pytest.raises(ShardingError, match=words):
            fd.execute([torch.ones(4, 16)])

    with simulate(2) as world:
        world.run(run)


def test_a_device_axis_that_does_not_fit_the_mesh_says_how_to_cut() -> None:
    unsplit, inner, no_dimension, second = (tensor(2) for _ in range(4))
    for tv in (unsplit, inner, no_dimension):
        tv.set_device_mesh(mesh(2))
    second.set_device_mesh(mesh(2, 2))
    second.outer_split(0, 2)
    second.axis(0).parallelize(Y)
    second.axis(1).parallelize(X)
    unsplit.axis(1).parallelize(X)
    inner.outer_split(0, 2)
    inner.axis(1).parallelize(X)
    no_dimension.outer_split(0, 2)
    no_dimension.axis(0).parallelize(Y)
    for tv, words in (
        (unsplit, r"extent 6, .*: first call outer_split\(1, 2\), then parallelize axis\(1\)"),
        (inner, r"extent 4, .*inner part of a split; parallelize the outer one, axis\(0\)"),
        (second, r"extent 4, .*: first call outer_split\(1, 2\), then parallelize axis\(1\)"),
        (no_dimension, r"no dimension mesh_y.*the mesh is 1-D and has mesh_x alone"),
    ):
        with pytest.raises(ShardingError, match=words):
            shard_for_rank(torch.ones(8, 6), tv, 0)


def test_swapped_arguments_raise_an_error_that_says_to_swap_them() -> None:
    tv = tensor(1)
    tv.set_device_mesh(mesh(1))
    with pytest.raises(
        ArgumentError,
        match=r"wrong order: the first is input 0 .*, the second is a torch tensor of shape "
        r"\(4,\)\. Swap them: shard_tensor\(torch tensor, tensor of the definition\) "
        r"\(user code at .*test_shard_tensor\.py:",
    ):
        shard_tensor(tv, torch.zeros(4))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="expected a torch tensor, got T0"):
        shard_tensor(tv, tv)  # type: ignore[arg-type]


def test_merged_device_axes_are_unsupported() -> None:
    tv = tensor(2)
    tv.set_device_mesh(mesh(2))
    tv.merge(0)
    shard_axis(tv, 0, 2)
    with pytest.raises(UnsupportedError, match="made by splits alone"):
        shard_for_rank(torch.zeros(4, 4), tv, 0)


def test_shard_tensor_uses_this_rank() -> None:
    tv = tensor(1)
    tv.set_device_mesh(mesh(1, 1, 2))
    shard_axis(tv, 0, 1, Z)
    shard_axis(tv, 1, 2, X)

    def body() -> list[int]:
        return shard_tensor(torch.arange(4), tv).tolist()

    with simulate(2) as world:
        assert world.run(body) == [[0, 1], [2, 3]]


@pytest.mark.finding("G23")
@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("copy", [False, True])
def test_a_shard_of_its_own_memory_leaves_the_whole_tensor_alone(
    axis: int | None, copy: bool
) -> None:
    """A shard may be a view of the whole tensor, which an update in place must not change."""
    whole = torch.randn(4, 6)
    before = whole.clone()

    def run() -> None:
        placed = Replicate() if axis is None else Shard(axis)
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, -1], contiguity=True, mesh=[0, 1], placements=[placed])
            fd.add_output(fd.ops.mul(x, 0.0), x)
        shard = shard_tensor(whole, x, copy=copy)
        fd.execute([shard])
        assert shard.is_contiguous() and not shard.any()
        is_view = not copy and axis != 1
        assert (shard.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()) == is_view

    with simulate(2) as world:
        world.run(run)
    torch.testing.assert_close(whole, before * 0 if not copy and axis != 1 else before)


@pytest.mark.finding("G23")
def test_a_copied_shard_of_an_expanded_tensor_is_one_element() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        tv = define_tensor([-1, 4], [True, None])
    fusion.add_input(tv)
    tv.set_device_mesh([0])
    whole = torch.randn(3, 1).expand(3, 4)
    shard = shard_for_rank(whole, tv, 0, copy=True)
    assert shard.stride() == (1, 0) and shard.data_ptr() != whole.data_ptr()
    torch.testing.assert_close(shard, whole)


def lies_as(dims: tuple[int, ...], order: tuple[int, ...]) -> torch.Tensor:
    """Returns a tensor of this shape whose axes have this order in memory, outermost first."""
    flat = torch.randn([dims[p] for p in order])
    return flat.permute(sorted(range(len(dims)), key=order.__getitem__))


PLACEMENTS: dict[tuple[int, ...], list[tuple[Shard | Replicate, ...]]] = {
    (2,): [(Replicate(),), *((Shard(d),) for d in range(4))],
    (2, 2): [(Shard(a), Shard(b)) for a, b in ((0, 0), (0, 1), (2, 0), (1, 3))],
}


@pytest.mark.finding("G23")
@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("shape", PLACEMENTS)
@pytest.mark.parametrize("ndim", [1, 2, 3, 4])
def test_a_shard_lies_in_the_memory_order_of_its_tensor(
    ndim: int, shape: tuple[int, ...], copy: bool
) -> None:
    m = mesh(*shape)
    dims = (4, 8, 12, 16)[:ndim]
    for order, placements in itertools.product(
        itertools.permutations(range(ndim)), PLACEMENTS[shape]
    ):
        if any(isinstance(p, Shard) and p.dim >= ndim for p in placements):
            continue
        whole = lies_as(dims, order)
        with FusionDefinition() as fd:
            x = fd.from_pytorch(whole)
            shard(x, m, placements)
            fd.add_output(fd.ops.mul(x, 2.0))
        for rank in m.devices:
            want = whole
            for position, placed in enumerate(placements):
                if isinstance(placed, Shard):
                    count, at = shape[position], rank // math.prod(shape[position + 1 :])
                    want = want.chunk(count, placed.dim)[at % count]
            got = shard_for_rank(whole, x, rank, copy=copy)
            assert torch.equal(got, want)
            assert got.permute(order).is_contiguous()
            is_view = got.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
            assert is_view == (not copy and want.permute(order).is_contiguous())


@pytest.mark.finding("G23")
@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("shape, placements", [((2,), (0,)), ((2,), (1,)), ((2, 2), (2, 1))])
@pytest.mark.parametrize("whole", ["heads", "matrix", "expanded", "last"])
def test_a_definition_from_a_permuted_tensor_takes_its_shards(
    whole: str, shape: tuple[int, ...], placements: tuple[int, ...], copy: bool
) -> None:
    x = {
        "heads": torch.randn(2, 6, 4, 3).transpose(1, 2),
        "matrix": torch.randn(8, 6, 4).transpose(0, 2),
        "expanded": torch.randn(4, 1, 6).expand(4, 8, 6).transpose(0, 2),
        "last": torch.randn(4, 8, 2, 2).to(memory_format=torch.channels_last),
    }[whole]

    def run() -> list[torch.Tensor]:
        with FusionDefinition() as fd:
            tv = fd.from_pytorch(x)
            shard(tv, mesh(*shape), [Shard(d) for d in placements])
            fd.add_output(fd.ops.add(fd.ops.mul(tv, 2.0), tv))
        return fd.execute([shard_tensor(x, tv, copy=copy)])

    with simulate(math.prod(shape)) as world:
        outs = world.run(run)
    for rank, (out,) in enumerate(outs):
        want = x * 3
        for dim, count, at in zip(
            placements, shape, (rank,) if len(shape) == 1 else divmod(rank, 2), strict=True
        ):
            want = want.chunk(count, dim)[at]
        torch.testing.assert_close(out, want)
