"""Domains, loop transforms, indices along transforms, the axis graph, and printing."""

from __future__ import annotations

import itertools
import random

import pytest

from fuser.ir.axis_graph import AxisGraph
from fuser.ir.domain.axis_path import indices_backward, indices_forward
from fuser.ir.domain.device_mesh import DeviceMesh
from fuser.ir.domain.tensor_domain import domain_problem
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.ops import nodes
from fuser.ir.scalar import constructors as sc
from fuser.ir.text.printer import domain_text, fusion_text
from fuser.ir.types import IterType, ParallelType
from fuser.ir.verify import verify_fusion
from fuser.support.errors import DefinitionError, ShardingError, VerifyError


def tensor(fusion: Fusion, *extents: int | None) -> TensorView:
    """Creates a Float input; an extent of None is a new symbol."""
    sizes = [fusion.new_extent() if e is None else sc.const(e) for e in extents]
    tv = fusion.new_tensor([fusion.new_axis(s) for s in sizes], DataType.Float)
    fusion.add_input(tv)
    return tv


def copy_of(fusion: Fusion, tv: TensorView) -> TensorView:
    out = fusion.new_tensor([fusion.clone_axis(a) for a in tv.domain.no_reductions], tv.dtype())
    fusion.add(nodes.LoadStoreOp(out, tv))
    return out


def test_split_merge_reorder_print_as_in_nvfuser() -> None:
    fusion = Fusion()
    tv = tensor(fusion, None, None)
    tv.split(0, 4)
    assert str(tv) == "T0_g_float[iS2{( ceilDiv(i0, 4) )}, iS3{4}, iS1{i1}]"
    tv.reorder({1: 2})
    assert str(tv) == "T0_g_float[iS2{( ceilDiv(i0, 4) )}, iS1{i1}, iS3{4}]"
    tv.merge(0, 1)
    assert str(tv) == "T0_g_float[iS4{( i1 * ( ceilDiv(i0, 4) ) )}, iS3{4}]"
    assert tv.ndim == 2 and str(tv.size(-1)) == "i1"
    verify_fusion(fusion)


def test_outer_split_over_a_mesh_prints_the_mesh() -> None:
    fusion = Fusion()
    tv = tensor(fusion, 8, 4)
    tv.outer_split(0, 2)
    tv.axis(0).parallelize(ParallelType.mesh_x)
    tv.set_device_mesh(DeviceMesh([0, 1]))
    assert str(tv) == "T0_g_float[ideviceIdx.x2{2}, iS3{4}, iS1{4}] (DeviceMesh{0 1})"


def test_second_input_numbering_skips_the_cached_zero() -> None:
    fusion = Fusion()
    tensor(fusion, None, None)
    second = tensor(fusion, None, None)
    assert str(second) == "T1_g_float[iS2{i3}, iS3{i4}]"


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda t: t.split(5, 2), "out of boundary"),
        (lambda t: t.split(0, 0), "Invalid factor"),
        (lambda t: t.merge(0, 0), "itself"),
        (lambda t: t.reorder({0: 1, 1: 1}), "the same position"),
        (lambda t: t.axis(0).parallelize(ParallelType.vectorize), "constant extent"),
    ],
)
def test_bad_transforms_name_the_axis(act: object, message: str) -> None:
    fusion = Fusion()
    tv = tensor(fusion, None, None)
    with pytest.raises(DefinitionError, match=message):
        act(tv)  # type: ignore[operator]


def test_an_axis_handle_shows_the_present_state() -> None:
    tv = tensor(Fusion(), 8, 4)
    axis, same = tv.axis(0), tv.get_logical_domain()[0]
    axis.parallelize(ParallelType.mesh_x)
    assert axis.ptype is same.ptype is ParallelType.mesh_x and axis == same
    assert str(axis) == "ideviceIdx.x0{8}" == str(tv.domain.logical[0])
    tv.split(1, 2)
    inner = tv.axis(2)
    tv.domain = tv.domain.having(loop=tv.domain.logical_numbers, transforms=())
    with pytest.raises(DefinitionError, match="no longer an axis"):
        inner.parallelize(ParallelType.block_x)


def test_one_axis_has_one_state_in_every_view() -> None:
    """A parallel type appears in logical and loop axes, in allocation axes and in printed
    transforms."""
    tv = tensor(Fusion(), 8, 4)
    tv.set_allocation_domain([tv.axis(1), tv.axis(0)], True)
    tv.split(0, 2)
    tv.axis(0).parallelize(ParallelType.mesh_x)
    tv.axis(2).parallelize(ParallelType.block_x)
    assert domain_text(tv).count("ithreadIdx.x1{4}") == 4
    assert domain_text(tv).count("ideviceIdx.x2{4}") == 3


def test_split_of_a_parallel_axis_is_refused() -> None:
    fusion = Fusion()
    tv = tensor(fusion, 8)
    tv.axis(0).parallelize(ParallelType.block_x)
    with pytest.raises(DefinitionError, match="non-Serial parallel type"):
        tv.split(0, 2)


def test_indices_by_brute_force() -> None:
    """For random transforms, loop -> logical -> loop is the identity on all points in range."""
    rng = random.Random(1)
    for _ in range(60):
        fusion = Fusion()
        extents = [rng.choice([1, 2, 3, 5, 6]) for _ in range(rng.randint(1, 3))]
        tv = tensor(fusion, *extents)
        for _ in range(rng.randint(1, 4)):
            n = len(tv.domain.loop)
            if n > 1 and rng.random() < 0.5:
                a, b = rng.sample(range(n), 2)
                tv.merge(a, b)
            else:
                tv.split(rng.randrange(n), rng.choice([2, 3]), rng.random() < 0.5)
        domain = tv.domain
        symbols = {a.number: sc.index(f"x{a.number}", a.extent) for a in domain.loop}
        back = indices_backward(domain, symbols)
        points = itertools.product(*(range(int(sc.int_value(a.extent) or 0)) for a in domain.loop))
        covered = set()
        for point in points:
            env = {symbols[a.number]: v for a, v in zip(domain.loop, point, strict=True)}
            logical = tuple(int(sc.evaluate(back[a.number], env)) for a in domain.logical)
            # A split that does not divide exceeds its axis; the index must be in range, too.
            inside = all(
                int(sc.evaluate(back[n], env)) < int(sc.int_value(domain.axes[n].extent) or 0)
                for t in domain.transforms
                for n in t.inputs
            )
            if inside and all(v < e for v, e in zip(logical, extents, strict=True)):
                ahead = indices_forward(
                    domain,
                    {a.number: sc.const(v) for a, v in zip(domain.logical, logical, strict=True)},
                )
                assert tuple(sc.int_value(ahead[a.number]) for a in domain.loop) == point
                covered.add(logical)
        missing = set(itertools.product(*(range(e) for e in extents))) - covered
        assert not missing, (missing, fusion_text(fusion))


def test_axis_graph_maps_through_equal_transforms_only() -> None:
    fusion = Fusion()
    a = tensor(fusion, None, None)
    b = copy_of(fusion, a)
    for tv in (a, b):
        tv.split(0, 4)
        tv.merge(1, 2)
    graph = AxisGraph(fusion)
    assert all(graph.mapped(x, y) for x, y in zip(a.domain.loop, b.domain.loop, strict=True))
    c = copy_of(fusion, b)
    c.split(0, 8)
    graph = AxisGraph(fusion)
    assert graph.mapped(b.domain.logical[0], c.domain.logical[0])
    assert not graph.mapped(b.domain.loop[0], c.domain.loop[0])


def test_backward_congruence_needs_equal_input_extents() -> None:
    """Splits of 10 and of 12 by 4 have mapped outputs, but their inputs are different axes."""
    fusion = Fusion()
    a, b = tensor(fusion, 10), tensor(fusion, 12)
    a.split(0, 4)
    b.split(0, 4)
    graph = AxisGraph(fusion)
    for x, y in zip(a.domain.loop, b.domain.loop, strict=True):
        graph._union(x.number, y.number)
    graph._close()
    assert not graph.mapped(a.domain.logical[0], b.domain.logical[0])


def test_broadcast_is_concretized_not_exact() -> None:
    fusion = Fusion()
    x, y = tensor(fusion, None, None), tensor(fusion, None)
    fusion.unify_extents(x.size(1), y.size(0))
    wide = fusion.new_tensor(
        [fusion.new_axis(sc.ONE, IterType.broadcast), fusion.clone_axis(y.domain.logical[0])],
        DataType.Float,
    )
    fusion.add(nodes.BroadcastOp(wide, y, flags=(True, False)))
    out = fusion.new_tensor([fusion.clone_axis(a) for a in x.domain.logical], DataType.Float)
    fusion.add(nodes.BinaryOp(out, x, wide, kind="add"))
    graph = AxisGraph(fusion)
    assert not graph.mapped(wide.axis(0), out.axis(0))
    assert graph.concretized(wide.axis(0)) == {graph.find(out.axis(0))}
    assert graph.mapped(y.axis(0), out.axis(1))


def test_copy_keeps_text_and_does_not_share_state() -> None:
    fusion = Fusion()
    a = tensor(fusion, None, 4)
    b = copy_of(fusion, a)
    fusion.add_output(b)
    twin, mapping = fusion.copy()
    assert fusion_text(twin) == fusion_text(fusion)
    mapping[b].split(0, 2)
    assert len(b.domain.loop) == 2 and len(mapping[b].domain.loop) == 3
    mapping[b].axis(0).parallelize(ParallelType.mesh_x)
    assert b.axis(0).ptype is ParallelType.serial


def test_equal_extents_have_one_representative() -> None:
    fusion = Fusion()
    a, b = tensor(fusion, None), tensor(fusion, None)
    c = tensor(fusion, 7)
    fusion.unify_extents(a.size(0), b.size(0))
    assert fusion.canonical(b.size(0)) == a.size(0)
    fusion.unify_extents(b.size(0), c.size(0))
    assert fusion.canonical(sc.mul(a.size(0), 2)) == sc.const(14)


def test_two_axes_on_one_device_type_are_found() -> None:
    fusion = Fusion()
    tv = tensor(fusion, 2, 2)
    for i in range(2):
        tv.axis(i).parallelize(ParallelType.mesh_x)
    assert "same parallel type" in (domain_problem(tv.domain) or "")
    with pytest.raises(VerifyError, match="same parallel type"):
        verify_fusion(fusion)


@pytest.mark.parametrize(
    ("devices", "text", "shape"),
    [
        ([0, 1, 2], "DeviceMesh{0 1 2}", (3,)),
        ([[0, 1], [2, 3]], "DeviceMesh{{0 1}{2 3}}", (2, 2)),
        ([[[0, 1], [2, 3]]], "DeviceMesh{{{0 1}{2 3}}}", (1, 2, 2)),
        (range(2), "DeviceMesh{0 1}", (2,)),
    ],
)
def test_mesh_text(devices: object, text: str, shape: tuple[int, ...]) -> None:
    mesh = DeviceMesh(devices)
    assert (repr(mesh), mesh.shape) == (text, shape)


def test_mesh_teams_and_coordinates() -> None:
    mesh = DeviceMesh([[0, 1, 2], [3, 4, 5]])
    x, y, z = ParallelType.mesh_x, ParallelType.mesh_y, ParallelType.mesh_z
    assert mesh.team(4, (x,)) == (3, 4, 5)
    assert mesh.team(4, (y,)) == (1, 4)
    assert mesh.team(4, (x, y)) == (0, 1, 2, 3, 4, 5)
    assert (mesh.coordinate(4, x), mesh.coordinate(4, y), mesh.coordinate(4, z)) == (1, 1, 0)
    assert (mesh.size_of(x), mesh.size_of(y), mesh.size_of(z)) == (3, 2, 1)


def test_bad_meshes() -> None:
    with pytest.raises(ShardingError, match="contains duplicates"):
        DeviceMesh([0, 0])
    with pytest.raises(ShardingError, match="ragged"):
        DeviceMesh([[0, 1], [2]])
