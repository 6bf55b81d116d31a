"""`fuser.idm`: which axes are mapped, in each mode."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import fuser
from fuser import FusionDefinition, IdMappingMode, idm
from fuser.support.errors import ArgumentError, DefinitionError, UnsupportedError, VerifyError

MODES = [m for m in IdMappingMode if m is not IdMappingMode.loop]
E, A, B, P = MODES


def mapped(fd: FusionDefinition, a: Any, b: Any) -> list[bool]:
    """Returns whether two axes are mapped, for each mode."""
    model = idm.IdModel(fd.fusion)
    sets = [model.maybe_build_graph(mode).disjoint_val_sets() for mode in MODES]
    found = [s.strict_are_mapped(a, b) for s in sets]
    assert found == [s.strict_are_mapped(b, a) for s in sets]
    return found


def test_what_an_op_maps_and_its_splits() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1])
        y = fd.ops.permute(fd.ops.neg(x), [1, 0])
        fd.add_output(y)
        rows, columns = x.axis(0), x.axis(1)
        x.split(0, 4)
        y.split(1, 4)
    assert mapped(fd, rows, y.get_logical_domain()[1]) == [True] * 4
    assert mapped(fd, columns, rows) == [False] * 4
    # x: rows/4, 4, columns; y: columns, rows/4, 4.
    for i, j in itertools.product(range(3), range(3)):
        assert mapped(fd, x.axis(i), y.axis(j)) == [(i + 1) % 3 == j] * 4, (i, j)


def test_splits_of_other_factors_differ() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([24])
        y = fd.ops.neg(x)
        fd.add_output(y)
        x.split(0, 4)
        y.split(0, 6)
    assert mapped(fd, x.axis(0), y.axis(0)) == [False] * 4
    assert mapped(fd, x.axis(1), y.axis(1)) == [False] * 4


def test_a_split_is_equal_by_what_it_makes() -> None:
    """24 split by an inner 4 equals 24 split by an outer 6."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([24])
        y = fd.ops.neg(x)
        fd.add_output(y)
        x.inner_split(0, 4)
        y.outer_split(0, 6)
    for i in range(2):
        assert mapped(fd, x.axis(i), y.axis(i)) == [True] * 4


def test_splits_by_one_and_merges_with_one() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1])
        y = fd.ops.broadcast(x, [False, False, True])
        fd.add_output(y)
        row, y_column = x.axis(0), y.axis(1)
        x.split(0, 1)
        y.merge(1, 2)
    assert mapped(fd, row, x.axis(0)) == [False, True, True, True]
    assert mapped(fd, row, x.axis(1)) == [False] * 4
    assert mapped(fd, y_column, y.axis(1)) == [False, True, True, True]


def test_a_broadcast_axis_and_what_it_becomes() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1])
        y = fd.define_tensor([-1, -1])
        wide = fd.ops.broadcast(x, [True, False])
        z = fd.ops.add(wide, y)
        fd.add_output(z)
        one, many = wide.axis(0), z.axis(0)
        wide.split(0, 4)
        z.split(0, 4)
    assert mapped(fd, one, many) == [False, False, True, True]
    assert mapped(fd, wide.axis(2), z.axis(2)) == [True] * 4
    # After equal splits, they are still mapped.
    assert mapped(fd, wide.axis(0), z.axis(0)) == [False, False, True, True]
    assert mapped(fd, wide.axis(1), z.axis(1)) == [False, False, True, True]


def test_an_expanded_axis_merged_with_a_concrete_one() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1])
        y = fd.ops.expand(fd.ops.broadcast(x, [True, False]), [8, fd.ops.size(x, 0)])
        z = fd.ops.neg(y)
        fd.add_output(z)
        column = y.axis(1)
        y.merge(0, 1)
    assert mapped(fd, column, y.axis(0)) == [False, False, False, True]


def test_each_mode_maps_what_those_before_do() -> None:
    """Each mode maps the pairs of the mode before it, and no unexpected ones."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 6, -1])
        w = fd.define_tensor([-1])
        h = fd.ops.reshape(x, [fd.ops.size(x, 0), 2, 3, fd.ops.size(x, 2)])
        s = fd.ops.sum(h, [1])
        y = fd.ops.mul(s, fd.ops.broadcast(w, [True, True, False]))
        fd.add_output(fd.ops.permute(y, [2, 0, 1]))
        y.split(0, 4)
        s.merge(2, 3)
        x.outer_split(1, 2)
    model = idm.IdModel(fd.fusion, build_graphs=True)
    axes = [v for v in fd.fusion.vals() if isinstance(v, fuser.IterDomain)]
    finer: set[tuple[int, int]] = set()
    for mode in MODES:
        sets = model.maybe_build_graph(mode).disjoint_val_sets()
        pairs = {
            (i, j)
            for (i, a), (j, b) in itertools.combinations(enumerate(axes), 2)
            if sets.strict_are_mapped(a, b)
        }
        assert finer <= pairs
        for (i, j), (k, m) in itertools.combinations(pairs, 2):
            if j == k:
                assert (i, m) in pairs
        finer = pairs
    assert finer


def test_mapped_by_the_user() -> None:
    with FusionDefinition() as fd:
        x, y = fd.define_tensor([-1]), fd.define_tensor([-1])
        fd.add_output(fd.ops.neg(x))
        fd.add_output(fd.ops.neg(y))
        a, b = x.axis(0), y.axis(0)
        x.split(0, 4)
        y.split(0, 4)
    model = idm.IdModel(fd.fusion)
    graph = model.maybe_build_graph(P)
    sets = graph.disjoint_val_sets()
    assert not sets.strict_are_mapped(a, b)
    graph.map_vals(a, b)
    assert sets.strict_are_mapped(a, b)
    assert sets.strict_are_mapped(x.axis(0), y.axis(0))
    assert not sets.strict_are_mapped(x.axis(0), y.axis(1))
    # The change affects this model's graph, and only that of this mode.
    assert model.maybe_build_graph(P) is graph
    other = model.maybe_build_graph(E).disjoint_val_sets()
    assert not other.strict_are_mapped(a, b)


def test_texts() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1])
        fd.add_output(fd.ops.sum(x, [1]))
    model = idm.IdModel(fd.fusion)
    graph = model.maybe_build_graph(E)
    sets = """disjoint sets{
  { iS0{i0} of T0_g_float; iS2{i0} of T1_g_float }
  { iS1{i1} of T0_g_float; rS3{i1} of T1_g_float }
}"""
    assert str(graph.disjoint_val_sets()) == sets
    assert str(graph) == f"IdGraph (exact) {sets}"
    assert str(model) == f"IdMappingMode.exact:\n{graph}\n"
    assert str(IdMappingMode.almost_exact) == "IdMappingMode.almost_exact"


def test_refusals() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1])
        fd.add_output(fd.ops.neg(x))
    with FusionDefinition() as other:
        z = other.define_tensor([-1])
        other.add_output(other.ops.neg(z))
    model = idm.IdModel(fd.fusion)
    graph = model.maybe_build_graph(E)
    with pytest.raises(UnsupportedError, match=r"IdMappingMode.loop.*exact, almost_exact"):
        model.maybe_build_graph(IdMappingMode.loop)
    with pytest.raises(DefinitionError, match=r"strict_are_mapped.*another fusion"):
        graph.disjoint_val_sets().strict_are_mapped(x.axis(0), z.axis(0))
    x.split(0, 4)
    with pytest.raises(DefinitionError, match=r"map_vals.*after the graph was built"):
        graph.map_vals(x.axis(0), x.axis(1))
    for call in (
        lambda: idm.IdModel(fd),  # pyright: ignore[reportArgumentType]
        lambda: model.maybe_build_graph("exact"),  # pyright: ignore[reportArgumentType]
        lambda: graph.map_vals(x, x),  # pyright: ignore[reportArgumentType]
    ):
        with pytest.raises(ArgumentError):
            call()


def test_one_axis_twice() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1])
        fd.add_output(fd.ops.add(x, fd.ops.permute(x, [1, 0])))
    assert mapped(fd, x.axis(0), x.axis(1)) == [True] * 4
    with pytest.raises(DefinitionError, match=r"two axes of T0.* are mapped to each other"):
        idm.IdModel(fd.fusion, allow_self_mapping=False)
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.neg(fd.define_tensor([-1, -1])))
    idm.IdModel(fd.fusion, allow_self_mapping=False, validate=True)


def test_extents_that_cannot_be_one() -> None:
    with FusionDefinition() as fd:
        x, y = fd.define_tensor([4]), fd.define_tensor([6])
        fd.add_output(fd.ops.neg(x))
        fd.add_output(fd.ops.neg(y))
    fd.fusion.joined = ((x.axis(0).number, y.axis(0).number),)
    with pytest.raises(VerifyError, match="they are 6 and 4"):
        idm.IdModel(fd.fusion, validate=True)


def test_vals_are_all_values() -> None:
    """Tensors, their domains and axes, and scalars, including extents."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 8])
        s = fd.define_scalar(None, fuser.DataType.Double)
        y = fd.ops.mul(fd.ops.sum(x, [1]), s)
        fd.add_output(y)
        y.split(0, 4)
    found = fd.fusion.vals()
    assert len(set(found)) == len(found)
    for value in (x, s, y, x.domain(), y.domain(), *x.get_logical_domain(), *y.get_loop_domain()):
        assert value in found, value
    assert y.get_logical_domain()[0] in found and x.size(0) in found and x.size(1) in found
    assert all(isinstance(v, fuser.Val) for v in found)
