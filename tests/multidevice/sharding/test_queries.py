"""Queries on shardings: which ops communicate, local sizes, and which annotations are
refused.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fuser import FusionDefinition, ops
from fuser.ir.domain.device_mesh import DeviceMesh
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Symbol
from fuser.ir.types import ParallelType
from fuser.ops.define import define_tensor
from fuser.support.errors import ShardingError, UnsupportedError
from multidevice import shard_tensor, simulate
from multidevice.sharding import queries
from multidevice.sharding.queries import Comparison
from multidevice.sharding.reshard import (
    as_reshard,
    communicates,
    communication_type,
    moved_axes,
    team_of,
)
from tests.support.rank_by_rank import X, Y, mesh, shard_axis

M2 = mesh(2)


def defined(build: Callable[[], object]) -> tuple[TensorView, TensorOp]:
    fusion = Fusion()
    with FusionGuard(fusion):
        out = build()
    assert isinstance(out, TensorView)
    op = out.definition()
    assert op is not None
    return out, op


def tensor(*shape: int) -> TensorView:
    return define_tensor(list(shape), True)


def place(
    tv: TensorView, axis: int | None = None, *, on: DeviceMesh = M2, ptype: ParallelType = X
) -> None:
    tv.set_device_mesh(on)
    if axis is not None:
        shard_axis(tv, axis, on.size_of(ptype), ptype)


# ------------------------------------------------------------------ is it a resharding?
@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [(None, None, False), (0, 0, False), (0, None, True), (None, 0, True), (0, 1, True)],
)
def test_copies(source: int | None, target: int | None, expected: bool) -> None:
    out, op = defined(lambda: ops.set(tensor(4, 6)))
    place(op.inputs[0], source)
    place(out, target)
    assert queries.is_resharding(op) is expected


def test_other_meshes_differ_even_when_replicated() -> None:
    out, op = defined(lambda: ops.set(tensor(4)))
    place(op.inputs[0])
    place(out, on=DeviceMesh([0]))
    assert queries.is_resharding(op)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [(1, 0, True), (0, 0, False), (1, None, True), (None, None, False), (0, None, True)],
)
def test_sums_over_axis_1(source: int | None, target: int | None, expected: bool) -> None:
    out, op = defined(lambda: ops.sum(tensor(4, 6), 1))
    place(op.inputs[0], source)
    place(out, target)
    assert queries.is_resharding(op) is expected


def test_a_broadcast_may_start_sharded() -> None:
    """A replicated [n], broadcast to [m, n], can be cut along m without communication."""
    fusion = Fusion()
    with FusionGuard(fusion):
        x = tensor(6)
        b = ops.broadcast(x, [True, False])
        full = tensor(4, 6)
        out = ops.add(b, full)
    for tv in (x, b):
        place(tv)
    place(full, 0)
    place(out, 0)
    assert not any(queries.is_resharding(op) for op in fusion.exprs)


def test_matmul_looks_only_at_shared_axes() -> None:
    out, op = defined(lambda: ops.matmul(tensor(4, 6), tensor(6, 8)))
    a, b = op.inputs
    place(a, 0)
    place(b)
    place(out, 0)
    assert not queries.is_resharding(op)
    shard_axis(b, 1, 2)
    assert queries.have_different_shardings(op, 1)
    assert not queries.have_different_shardings(op, 0)


@pytest.mark.parametrize(
    ("shape", "new", "source", "target", "expected"),
    [
        ((12,), [6, 2], 0, 0, False),
        ((12,), [6, 2], 0, None, True),
        ((6, 2), [12], 0, 0, False),
        ((6, 2), [12], 1, 0, True),
        ((3, 4, 5), [12, 5], None, 0, True),
        ((2, 12, 3), [2, 4, 9], 0, 0, False),
    ],
)
def test_reshapes(
    shape: tuple[int, ...], new: list[int], source: int | None, target: int | None, expected: bool
) -> None:
    out, op = defined(lambda: ops.reshape(tensor(*shape), new))
    place(op.inputs[0], source)
    place(out, target)
    assert queries.is_resharding(op) is expected


def test_symbolic_merges_keep_an_outer_cut() -> None:
    def build() -> TensorView:
        x = tensor(-1, -1, 8)
        return ops.reshape(x, [sc.mul(x.size(0), x.size(1)), 8])

    out, op = defined(build)
    place(op.inputs[0], 0)
    place(out, 0)
    assert not queries.is_resharding(op)


def test_equal_blocks_written_differently_are_equal() -> None:
    """The outer part of Splits(x, 2), and of an inner split by n/2, are equal blocks."""
    out, op = defined(lambda: ops.set(tensor(12)))
    op.inputs[0].set_device_mesh(M2)
    op.inputs[0].split(0, 6)
    op.inputs[0].axis(0).parallelize(X)
    place(out, 0)
    assert not queries.is_resharding(op)
    # Cyclic blocks are others.
    cyclic, other = defined(lambda: ops.set(tensor(12)))
    place(cyclic, 0)
    other.inputs[0].set_device_mesh(M2)
    other.inputs[0].split(0, 2)
    other.inputs[0].axis(1).parallelize(X)
    assert Comparison(other, 0, cyclic).differs([X])


def test_stream_cuts_compare_but_never_reshard() -> None:
    out, op = defined(lambda: ops.set(tensor(4, 6)))
    shard_axis(op.inputs[0], 0, 2, ParallelType.stream)
    assert queries.have_different_shardings(op, 0, (ParallelType.stream,))
    assert not queries.is_resharding(op)
    shard_axis(out, 0, 2, ParallelType.stream)
    assert not queries.have_different_shardings(op, 0, (ParallelType.stream,))


# ------------------------------------------------------------------ which communication
@pytest.mark.parametrize(
    ("source", "target", "kind", "axes"),
    [
        (0, None, "Allgather", (0, 0)),
        (1, None, "Allgather", (1, 1)),
        (0, 1, "AllToAll", (0, 1)),
    ],
)
def test_copies_as_communications(
    source: int, target: int | None, kind: str, axes: tuple[int, int]
) -> None:
    out, op = defined(lambda: ops.set(tensor(4, 6)))
    place(op.inputs[0], source)
    place(out, target)
    found = as_reshard(op)
    assert found is not None
    assert (communication_type(found), *moved_axes(found)) == (kind, *axes)
    assert str(team_of(found)) == "(0 1)"


def test_replicated_to_sharded_is_a_local_slice() -> None:
    out, op = defined(lambda: ops.set(tensor(4, 6)))
    place(op.inputs[0])
    place(out, 1)
    found = as_reshard(op)
    assert found is not None
    assert (communication_type(found), found.source, found.target) == ("LocalSlice", None, 1)


@pytest.mark.parametrize(
    ("source", "ranks", "kind", "team"),
    [
        (None, [0], "LocalCopy", None),
        (0, [0], "SendRecv", None),
        (None, [2, 3], "SendRecv", None),
        (None, [2, 3, 4, 5], "Broadcast", "mesh_x of DeviceMesh{{0 2 4}{1 3 5}}"),
    ],
)
def test_copies_between_meshes(
    source: int | None, ranks: list[int], kind: str, team: str | None
) -> None:
    out, op = defined(lambda: ops.set(tensor(4, 6)))
    place(op.inputs[0], source)
    place(out, on=DeviceMesh(ranks))
    found = as_reshard(op)
    assert found is not None
    assert communication_type(found) == kind
    assert communicates(found) == (kind != "LocalCopy")
    if team is not None:
        assert str(team_of(found)) == team


def test_teams_follow_the_changing_dimension() -> None:
    m = mesh(2, 3)
    out, op = defined(lambda: ops.set(tensor(4, 6)))
    op.inputs[0].set_device_mesh(m)
    shard_axis(op.inputs[0], 0, 2, Y)
    place(out, on=m)
    found = as_reshard(op)
    assert found is not None
    assert found.ptypes == (Y,)
    assert [team_of(found).ranks(r) for r in (0, 4)] == [(0, 3), (1, 4)]
    assert str(team_of(found)) == "mesh_y of DeviceMesh{{0 1 2}{3 4 5}}"


def test_two_changes_are_not_one_communication() -> None:
    m = mesh(2, 2)
    out, op = defined(lambda: ops.set(tensor(4, 6)))
    op.inputs[0].set_device_mesh(m)
    shard_axis(op.inputs[0], 0, 2, Y)
    shard_axis(op.inputs[0], 2, 2, X)
    place(out, on=m)
    with pytest.raises(ShardingError, match="Expected at most one sharding change"):
        as_reshard(op)


# ------------------------------------------------------------------ sizes and refusals
def test_logical_axes_and_sizes() -> None:
    m = mesh(2, 3)
    fusion = Fusion()
    with FusionGuard(fusion):
        tv = tensor(-1, -1)
    tv.set_device_mesh(m)
    shard_axis(tv, 1, 3, X)
    shard_axis(tv, 2, 2, Y)
    assert [queries.sharded_logical_axis(tv, p) for p in (X, Y)] == [1, 1]
    found = queries.sharding_of(tv)
    assert found is not None
    assert (found.mesh, found.axis_sharded_on(X)) == (m, 1)
    assert found.axis_sharded_on(ParallelType.mesh_z) == -1
    assert queries.local_sizes(tv, (5, 12)) == (5, 2)
    assert queries.unsharded_sizes(tv, (5, 2)) == (5, 12)
    texts = [str(e) for e in queries.local_extents(tv)]
    assert texts == ["i0", "( ceilDiv(( ceilDiv(i1, 3) ), 2) )"]
    # 3 devices divide 9, but each third must also be even.
    with pytest.raises(
        ShardingError,
        match=r"extent 9 .* not divisible by the 2 devices .*: pad it to 12, or use a number of "
        "ranks that divides 9",
    ):
        queries.local_sizes(tv, (5, 9))


def test_inner_blocks_are_refused() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        tv = tensor(6)
    tv.set_device_mesh(M2)
    tv.split(0, 2)
    tv.axis(1).parallelize(X)
    with pytest.raises(UnsupportedError, match="we don't support DID on inner splits"):
        queries.sharded_logical_axis(tv, X)


def test_annotations_must_fit_the_mesh() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        tv = tensor(8)
        fusion.add_input(tv)
        ops.set(tv)
    tv.outer_split(0, 2)
    tv.axis(0).parallelize(X)
    with pytest.raises(ShardingError, match="has no mesh"):
        queries.check_annotations(fusion)
    tv.set_device_mesh(mesh(4))
    with pytest.raises(ShardingError, match=r"extent 2, but DeviceMesh\{0 1 2 3\} has 4 devices"):
        queries.check_annotations(fusion)
    tv.set_device_mesh(mesh(2))
    queries.check_annotations(fusion)
    tv.axis(0).parallelize(Y)
    with pytest.raises(ShardingError, match="no dimension mesh_y"):
        queries.check_annotations(fusion)


def test_the_job_must_have_the_meshs_ranks() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        tv = tensor(8)
        fusion.add_input(tv)
    assert queries.requested_number_of_devices(fusion) == 1
    tv.set_device_mesh(DeviceMesh([0, 3]))
    assert queries.requested_number_of_devices(fusion) == 4
    queries.check_world(fusion, 4)
    with pytest.raises(ShardingError, match="names rank 3, but the job has 2 ranks"):
        queries.check_world(fusion, 2)


def test_extents_are_checked_when_bound() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        tv = tensor(-1, 6)
        fusion.add_input(tv)
    place(tv, 0)
    (extent,) = (s for s in sc.symbols(tv.size(0)) if isinstance(s, Symbol))
    queries.check_divisible(fusion, {extent: 4})
    with pytest.raises(ShardingError, match=r"the extent 5 of .* by the 2 devices"):
        queries.check_divisible(fusion, {extent: 5})


@pytest.mark.parametrize("shape", [[[0, 1]], [[0], [1]]])
def test_a_mesh_dimension_of_one_device_inside_of_another_cut(shape: list[list[int]]) -> None:
    """A mesh dimension of one device is dropped from a reduced axis; the result keeps the other
    cut.
    """
    outer, inner = ParallelType.mesh_x, ParallelType.mesh_y
    if len(shape) == 2:
        outer, inner = inner, outer
    whole = torch.randn(2, 2, 2, generator=torch.Generator().manual_seed(0))

    def body() -> None:
        with FusionDefinition() as fd:
            x = fd.define_tensor([2, 2, 2], contiguity=True)
            y = fd.ops.sum(x, [2])
            fd.add_output(y)
        for tv in (x, y):
            tv.set_device_mesh(DeviceMesh(shape))
        x.outer_split(2, 2)
        x.axis(2).parallelize(outer)
        x.outer_split(3, 1)
        x.axis(3).parallelize(inner)
        y.outer_split(1, 2)
        y.axis(1).parallelize(outer)
        got = next(iter(fd.execute([shard_tensor(whole, x)])))
        want = shard_tensor(whole.double().sum(2), y)
        torch.testing.assert_close(got.double(), want)

    with simulate(2) as world:
        world.run(body)
