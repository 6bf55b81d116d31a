"""Lookups in sharded tables by sharded indices: on simulated ranks, in stream steps, from text."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fuser import FusionDefinition, ParallelType, TensorView
from fuser.multidevice import Communicator, DeviceMesh, shard_tensor
from fuser.support.errors import UnsupportedError
from hostir.ir.parser import parse
from hostir.ir.program import equal
from multidevice import simulate
from tests.support.cuts import cut, shards
from tests.support.kernel_bytes import bytes_of_kernels
from tests.support.lookup_programs import Build, draw, draw_index, gather, index_select, take_along

pytestmark = pytest.mark.from_text

X, S = ParallelType.mesh_x, ParallelType.stream
CASES: dict[str, tuple[Build, Callable[..., torch.Tensor], Any, Any, int]] = {
    "embedding": (
        lambda fd, t, i: fd.ops.embedding_fwd(i, t),
        lambda t, i: t[i],
        (12, 8),
        (4, 6),
        12,
    ),
    "select rows": (*index_select(0), (8, 6), (4,), 8),
    "select columns": (*index_select(1), (4, 6, 2), (8,), 6),
    "along": (*take_along(1), (4, 12, 2), (4, 8, 2), 12),
    "along, repeated": (*take_along(0), (6, 4), (8, 1), 6),
    "gather": (*gather(1), (4, 6), (4, 8), 6),
    "gather less": (*gather(1), (6, 8), (4, 2), 8),
}


def run_cut(
    name: str, cuts: dict[str, int], *, after: bool, static: bool, steps: int = 0
) -> tuple[torch.Tensor, dict[str, int], str]:
    """Runs on a rank; returns its results and the numbers of launches."""
    build, _, shape, index_shape, extent = CASES[name]
    table, index = draw(shape, torch.float32), draw_index(index_shape, extent)
    mesh = DeviceMesh(range(Communicator.instance().size()))
    with FusionDefinition() as fd:
        tensors = {
            n: fd.define_tensor(
                list(x.shape) if static else [1 if e == 1 else -1 for e in x.shape],
                True if 1 not in x.shape else [None if e == 1 else True for e in x.shape],
                x.dtype,
            )
            for n, x in (("table", table), ("index", index))
        }
        made = build(fd, tensors["table"], tensors["index"])
        assert isinstance(made, TensorView)
        out = found = made
        if after:
            out = fd.ops.neg(out)
        tensors["found"], tensors["out"] = found, out
        fd.add_output(out)
        for n in ("table", "index"):
            tensors[n].set_device_mesh(mesh)
        for n, axis in cuts.items():
            cut(tensors[n], axis, mesh)
        if steps:
            tensors["found"].outer_split(0, steps)
            tensors["found"].axis(0).parallelize(S)
    given = [shard_tensor(table, tensors["table"]), shard_tensor(index, tensors["index"])]
    result = [fd.execute(given)[0] for _ in range(3)][-1]
    program = fd.fec.host_program()
    assert equal(parse(program.full_text()), program)
    return result, fd.fec.statistics(), program.full_text()


def expected_of(name: str, *, after: bool) -> torch.Tensor:
    _, reference, shape, index_shape, extent = CASES[name]
    found = reference(draw(shape, torch.float32), draw_index(index_shape, extent))
    return -found if after else found


def axes_of(name: str) -> list[tuple[str, int]]:
    _, _, shape, index_shape, _ = CASES[name]
    sizes = {
        "table": shape,
        "index": index_shape,
        "out": tuple(expected_of(name, after=False).shape),
    }
    return [(n, k) for n, size in sizes.items() for k, e in enumerate(size) if e % 2 == 0]


@pytest.mark.parametrize("name", CASES)
def test_any_cuts(name: str) -> None:
    """Each rank gets its part of the result for any sharding; parts of other ranks are
    communicated."""
    every = axes_of(name)
    rng = random.Random(name)
    pairs = [c for c in itertools.combinations(every, 2) if c[0][0] != c[1][0]]
    for chosen in [*([c] for c in every), *rng.sample(pairs, 4)]:
        after, static = rng.random() < 0.5, rng.random() < 0.5
        expected = expected_of(name, after=after)
        with simulate(2) as world:
            results = world.run(run_cut, name, dict(chosen), after=after, static=static)
        for rank, (out, _, text) in enumerate(results):
            torch.testing.assert_close(out, shards(expected, out, rank, 2), rtol=0, atol=0)
            assert text == results[0][2], chosen


@pytest.mark.parametrize(
    ("name", "cuts", "collectives"),
    [
        ("embedding", {"index": 0}, 0),
        ("embedding", {"index": 1}, 0),
        ("embedding", {"table": 1}, 0),
        ("embedding", {"table": 1, "out": 2}, 0),
        ("embedding", {"table": 0}, 1),
        ("embedding", {"table": 0, "index": 0}, 2),
        ("embedding", {"out": 0}, 0),
        ("select columns", {"table": 0}, 0),
        ("select columns", {"table": 1}, 1),
        ("select columns", {"index": 0}, 0),
        ("along", {"table": 0, "index": 0}, 0),
        ("along", {"index": 1}, 0),
        ("along", {"table": 1}, 1),
        ("gather less", {"index": 1}, 0),
        ("gather less", {"index": 0}, 1),
    ],
)
def test_what_is_communicated(name: str, cuts: dict[str, int], collectives: int) -> None:
    with simulate(2) as world:
        results = world.run(run_cut, name, cuts, after=True, static=False)
    assert [counts["collectives"] for _, counts, _ in results] == [collectives] * 2


@pytest.mark.parametrize("name", [n for n in CASES if "gather" not in n])
def test_steps(name: str) -> None:
    rng = random.Random(name)
    expected = expected_of(name, after=True)
    for chosen in [{}, *({n: k} for n, k in axes_of(name) if n != "out")]:
        static = rng.random() < 0.5
        with simulate(2) as world:
            results = world.run(run_cut, name, chosen, after=True, static=static, steps=2)
        for rank, (out, _, _) in enumerate(results):
            torch.testing.assert_close(out, shards(expected, out, rank, 2), rtol=0, atol=0)


def test_steps_of_a_gather_need_equal_extents() -> None:
    """Otherwise a block of the index would be applied to the first elements of the table."""
    with simulate(2) as world:
        results = world.run(run_cut, "gather", {}, after=True, static=True, steps=2)
    torch.testing.assert_close(results[0][0], expected_of("gather", after=True), rtol=0, atol=0)
    for name, static in (("gather", False), ("gather less", True)):
        with (
            simulate(2) as world,
            pytest.raises(UnsupportedError, match="gather cannot be computed in steps"),
        ):
            world.run(run_cut, name, {}, after=True, static=static, steps=2)


# ------------------------------------------------------------------ costs


def test_costs_know_what_is_read() -> None:
    """The predicted bytes are those of the selected elements, and at most those of the whole
    table."""
    ids = draw_index((6,), 100)
    for rows, read in ((100, 6), (3, 3)):
        table = draw((rows, 32), torch.float32)
        with FusionDefinition() as fd:
            t, i = (fd.define_tensor([-1] * x.ndim, True, x.dtype) for x in (table, ids))
            fd.add_output(fd.ops.neg(fd.ops.embedding_fwd(fd.ops.add(i, i), t)))
        (nbytes,) = bytes_of_kernels(fd, [table, ids % 1])
        assert nbytes == 4 * 32 * (read + 6) + 8 * 6


# ------------------------------------------------------------------ scatter
def run_scatter(cuts: dict[str, int], *, static: bool) -> torch.Tensor:
    mesh = DeviceMesh(range(Communicator.instance().size()))
    given = scatter_inputs()
    with FusionDefinition() as fd:
        names: list[str] = ["arg", "index", "src"]
        shapes = [list(x.shape) if static else [-1] * x.ndim for x in given]
        pairs = zip(shapes, given, strict=True)
        tvs = [fd.define_tensor(n, True, x.dtype) for n, x in pairs]
        tensors: dict[str, TensorView] = dict(zip(names, tvs, strict=True))
        tensors["out"] = fd.ops.scatter(fd.ops.neg(tvs[0]), tvs[1], tvs[2], 1)
        fd.add_output(fd.ops.mul(tensors["out"], 2.0))
        for tv in tvs:
            tv.set_device_mesh(mesh)
        for n, axis in cuts.items():
            cut(tensors[n], axis, mesh)
    parts = [shard_tensor(x, tv) for x, tv in zip(given, tvs, strict=True)]
    made = [fd.execute(parts)[0] for _ in range(3)][-1]
    program = fd.fec.host_program()
    assert equal(parse(program.full_text()), program)
    return made


def scatter_inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    index = torch.rand(8, 6, generator=generator).argsort(1)[:, :4]
    return [draw((8, 6), torch.float32), index, draw((8, 4), torch.float32, 3)]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    "cuts",
    [
        {"arg": 0},
        {"arg": 1},
        {"index": 0},
        {"src": 1},
        {"out": 0},
        {"out": 1},
        {"arg": 0, "index": 0, "src": 0},
        {"arg": 1, "index": 1, "src": 0, "out": 0},
    ],
    ids=str,
)
def test_scatter(cuts: dict[str, int], static: bool) -> None:
    x, index, src = scatter_inputs()
    with simulate(2) as world:
        results = world.run(run_scatter, cuts, static=static)
    expected = 2 * (-x).scatter(1, index, src)
    for rank, out in enumerate(results):
        torch.testing.assert_close(out, shards(expected, out, rank, 2), rtol=0, atol=0)


# ------------------------------------------------------------------ launched ranks
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        ("embedding", {"index": 0, "table": 1}),
        ("embedding", {"table": 0, "out": 0}),
        ("along", {"table": 1, "out": 0}),
    ],
)
def test_under_mpirun(name: str, cuts: dict[str, int], comm: Any) -> None:
    out, _, _ = run_cut(name, cuts, after=True, static=False)
    whole = shards(expected_of(name, after=True), out, comm.rank(), comm.size())
    torch.testing.assert_close(out, whole, rtol=0, atol=0)
