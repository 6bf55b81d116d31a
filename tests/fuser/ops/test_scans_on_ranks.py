"""Scans and sorts of sharded tensors: gathered along their own axis, in parts along others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fuser import DataType, FusionDefinition, ParallelType
from fuser.multidevice import Communicator, DeviceMesh, shard_tensor
from fuser.support.errors import UnsupportedError, VerifyError
from hostir.ir.parser import parse
from hostir.ir.program import equal
from hostir.ir.verifier import verify
from multidevice import simulate
from tests.support.cuts import cut, shards
from tests.support.kernel_bytes import bytes_of_kernels
from tests.support.lookup_programs import draw

pytestmark = pytest.mark.from_text

SHAPE = (4, 12, 8)
CASES: dict[str, tuple[Callable[..., Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "cumsum": (lambda fd, x: fd.ops.cumsum(x, 1), lambda x: x.cumsum(1)),
    "cummax": (
        lambda fd, x: fd.ops.cummax(x, 2, fd.define_scalar(0.25)),
        lambda x: x.cummax(2).values.clamp(min=0.25),
    ),
    "argsort": (
        lambda fd, x: fd.ops.argsort(x, 1, descending=True),
        lambda x: x.argsort(1, descending=True),
    ),
    "topk": (
        lambda fd, x: fd.ops.topk(x, fd.define_scalar(4, DataType.Int), 1, sorted=True)[0],
        lambda x: x.topk(4, 1).values,
    ),
    "places": (
        lambda fd, x: fd.ops.topk(x, fd.define_scalar(2, DataType.Int), 2, sorted=True)[1],
        lambda x: x.topk(2, 2).indices,
    ),
}


def run_cut(
    name: str, cuts: dict[str, int], *, static: bool, steps: int = 0
) -> tuple[torch.Tensor, dict[str, int], str]:
    """Runs on a rank, between ops that kernels compute; returns the results and the numbers of
    launches."""
    x = draw(SHAPE, torch.float64)
    mesh = DeviceMesh(range(Communicator.instance().size()))
    with FusionDefinition() as fd:
        tv = fd.define_tensor(list(SHAPE) if static else [-1] * 3, True, x.dtype)
        found = CASES[name][0](fd, fd.ops.neg(tv))
        tensors = {"x": tv, "found": found, "out": fd.ops.neg(found)}
        fd.add_output(tensors["out"])
        tv.set_device_mesh(mesh)
        for n, axis in cuts.items():
            cut(tensors[n], axis, mesh)
        if steps:
            found.outer_split(0, steps)
            found.axis(0).parallelize(ParallelType.stream)
    given = [shard_tensor(x, tv)]
    result = [fd.execute(given)[0] for _ in range(3)][-1]
    program = fd.fec.host_program()
    assert equal(parse(program.full_text()), program)
    return result, fd.fec.statistics(), program.full_text()


def expected_of(name: str) -> torch.Tensor:
    return -CASES[name][1](-draw(SHAPE, torch.float64))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_any_cuts(name: str, static: bool) -> None:
    expected = expected_of(name)
    for on in ("x", "found", "out"):
        for axis in range(3):
            if static and on == "found":
                continue
            cuts = {on: axis} if on != "found" else {"x": axis, "found": (axis + 1) % 3}
            with simulate(2) as world:
                results = world.run(run_cut, name, cuts, static=static)
            for rank, (out, _, text) in enumerate(results):
                torch.testing.assert_close(out, shards(expected, out, rank, 2), rtol=0, atol=0)
                assert text == results[0][2], cuts


@pytest.mark.parametrize(
    ("name", "cuts", "collectives"),
    [
        ("cumsum", {"x": 0}, 0),
        ("cumsum", {"x": 2, "out": 2}, 0),
        ("cumsum", {"x": 1}, 1),
        ("cummax", {"x": 1}, 0),
        ("cummax", {"x": 2}, 1),
        ("argsort", {"x": 1}, 1),
        ("argsort", {"x": 0, "out": 0}, 0),
        ("topk", {"x": 2}, 0),
        ("topk", {"x": 1}, 1),
        ("places", {"x": 1, "out": 1}, 0),
    ],
)
def test_what_is_communicated(name: str, cuts: dict[str, int], collectives: int) -> None:
    with simulate(2) as world:
        results = world.run(run_cut, name, cuts, static=False)
    assert [counts["collectives"] for _, counts, _ in results] == [collectives] * 2


@pytest.mark.parametrize("name", CASES)
def test_steps_are_refused(name: str) -> None:
    with simulate(2) as world, pytest.raises(UnsupportedError, match="cannot be computed in steps"):
        world.run(run_cut, name, {}, static=True, steps=2)


def test_a_cut_of_the_axis_in_a_program_is_told() -> None:
    """A host program written by hand scans a shard along the sharded axis: an error reports it."""
    with simulate(2) as world:
        text = world.run(run_cut, "cumsum", {"x": 0}, static=True)[0][2]
    assert "dim=1" in text
    with pytest.raises(
        VerifyError, match=r"cumsum: .* is split over devices, but each device needs the whole axis"
    ):
        verify(parse(text.replace("dim=1", "dim=0")))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("name", "cuts"),
    [("cumsum", {"x": 1}), ("argsort", {"x": 0, "out": 1}), ("topk", {"x": 1, "out": 2})],
)
def test_under_mpirun(name: str, cuts: dict[str, int], comm: Any) -> None:
    out, _, _ = run_cut(name, cuts, static=False)
    whole = shards(expected_of(name), out, comm.rank(), comm.size())
    torch.testing.assert_close(out, whole, rtol=0, atol=0)


# ------------------------------------------------------------------ costs
def test_costs() -> None:
    """A scan reads and writes once. A sort of 4-byte elements moves elements and indices 4
    times."""
    x = draw((32, 16), torch.float32)
    found: dict[str, int] = {}
    for name in ("cumsum", "argsort", "topk"):
        with FusionDefinition() as fd:
            out = CASES[name][0](fd, fd.from_pytorch(x))
            fd.add_output(out)
        (found[name],) = bytes_of_kernels(fd, [x])
    assert found["cumsum"] == 2 * 4 * 512
    assert found["argsort"] == 4 * 2 * (4 + 8) * 512
    assert found["topk"] == 4 * 4 * 512 + (4 + 8) * 32 * 4
