"""grouped_mm, compared with a product per group in float64: any groups, layouts and ranks."""

# Ops are called with wrong arguments, and with options from dictionaries.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch

from fuser import DataType, FusionDefinition
from fuser.multidevice import Communicator, DeviceMesh, shard_tensor
from fuser.support.errors import (
    DefinitionError,
    DtypeError,
    InputError,
    VerifyError,
)
from hostir.ir.parser import parse
from hostir.ir.program import equal
from hostir.ir.shape_rules import check_results
from multidevice import simulate
from tests.support.cuts import cut, shards
from tests.support.kernel_bytes import bytes_of_kernels
from tests.support.lookup_programs import define, draw, run
from tests.support.op_cases import lay_out

pytestmark = pytest.mark.from_text

FORMS = ("k", "n", "m")
SIZES = {"g": 4, "m": 6, "n": 10, "k": 8}


def shapes(ragged: str, sizes: dict[str, int]) -> list[tuple[int, ...]]:
    axes = {"k": ("mk", "kn"), "n": ("gmk", "kn"), "m": ("mk", "gkn")}[ragged]
    return [tuple(sizes[c] for c in letters) for letters in axes]


def grouped(fd: Any, a: Any, b: Any, offsets: Any) -> Any:
    return fd.ops.grouped_mm(a, b, offsets)


def reference(ragged: str, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Returns the result in float64: for each element, the sum of its group, or 0 without a
    group."""
    a, b, ends = a.double(), b.double(), offsets.tolist()
    places = torch.arange(max(*a.shape, *b.shape))
    parts = [(places >= x) & (places < y) for x, y in pairwise([0, *ends])]
    if ragged == "k":
        k = b.shape[0]
        found = [torch.einsum("mk,kn,k->mn", a, b, p[:k].double()) for p in parts]
        return torch.stack(found) if found else a.new_zeros(0, a.shape[0], b.shape[1])
    m, n = a.shape[-2], b.shape[-1]
    out = torch.zeros(m, n, dtype=torch.float64)
    for g, p in enumerate(parts):
        mine = p[:n].expand(m, n) if ragged == "n" else p[:m, None].expand(m, n)
        product = a[g] @ b if ragged == "n" else a @ b[g]
        out = torch.where(mine, product, out)
    return out


def draw_all(
    ragged: str, sizes: dict[str, int], ends: list[int], dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    a, b = (draw(s, dtype, seed) for seed, s in enumerate(shapes(ragged, sizes)))
    return [a, b, torch.tensor(ends, dtype=torch.int32)]


def draw_ends(rng: random.Random, groups: int, extent: int) -> list[int]:
    ends = sorted(rng.choice([0, extent, *range(extent + 1)]) for _ in range(groups))
    return [*ends[:-1], extent] if ends and rng.random() < 0.7 else ends


def check(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert out.dtype is dtype and out.shape == expected.shape
    rtol = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-5}.get(dtype, 1e-12)
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=4 * rtol)


# ------------------------------------------------------------------ values
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("ragged", FORMS)
def test_any_groups(ragged: str, strided: bool) -> None:
    """Groups of any sizes, empty groups, and no groups; extents of 0 and 1."""
    rng = random.Random(ragged)
    for _ in range(30):
        sizes = {c: rng.choice((0, 1, 2, 5, 7, 16)) for c in "gmnk"}
        ends = draw_ends(rng, sizes["g"], sizes[ragged])
        given = draw_all(ragged, sizes, ends)
        (out,) = run(grouped, *given, strided=strided)
        check(out, reference(ragged, *given), torch.float32)


def test_ragged_groups_of_tokens() -> None:
    """Experts with 5, 7, 9 and 11 tokens, half precision."""
    ends = [5, 12, 21, 32]
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        given = draw_all("m", {"g": 4, "m": 32, "n": 24, "k": 16}, ends, dtype)
        (out,) = run(grouped, *given)
        check(out, reference("m", *given), dtype)


@pytest.mark.parametrize("layout", ["contiguous", "strided", "transposed", "expanded"])
@pytest.mark.parametrize("ragged", FORMS)
def test_layouts(ragged: str, layout: str) -> None:
    given = draw_all(ragged, SIZES, [1, 1, 4, SIZES[ragged]], torch.float64)
    for laid in (
        [lay_out(given[0], layout), *given[1:]],
        [given[0], lay_out(given[1], layout), given[2]],
    ):
        (out,) = run(grouped, *laid)
        check(out, reference(ragged, *laid), torch.float64)


@pytest.mark.parametrize("ragged", FORMS)
def test_one_definition_for_any_offsets(ragged: str) -> None:
    """Groups change from run to run. Kernels run before and after the product."""

    def build(fd: Any, a: Any, b: Any, offsets: Any) -> Any:
        return fd.ops.neg(fd.ops.grouped_mm(fd.ops.neg(a), b, offsets))

    rng, fd = random.Random(3), define(build, draw_all(ragged, SIZES, [1, 2, 3, 4]), strided=True)
    outs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for _ in range(6):
        given = draw_all(ragged, SIZES, draw_ends(rng, 4, SIZES[ragged]))
        outs.append((fd.execute(given)[0], reference(ragged, *given)))
    for out, expected in outs:
        check(out, expected, torch.float32)


def test_what_other_groups_have_does_not_count() -> None:
    for ragged in FORMS:
        given = draw_all(ragged, SIZES, [2, 2, 4, 5])
        if ragged == "k":
            given[0][:, 5:] = torch.nan
        else:
            given[0 if ragged == "m" else 1][..., *([slice(5, None)] * (ragged == "n"))][
                5 if ragged == "m" else 0 :
            ] = torch.nan
        (out,) = run(grouped, *given)
        assert out.isfinite().all()


# ------------------------------------------------------------------ what is refused
@pytest.mark.parametrize("ends", [[2, 1, 4, 5], [1, 2, 3, 99], [-1, 2, 3, 4]])
@pytest.mark.parametrize("ragged", FORMS)
def test_offsets_that_are_none(ragged: str, ends: list[int]) -> None:
    fd = define(grouped, draw_all(ragged, SIZES, [1, 2, 3, 4]))
    text = rf"grouped_mm: Expected sorted offsets from 0 to {SIZES[ragged]}, the size of axis "
    for _ in range(3):
        with pytest.raises(InputError, match=text):
            fd.execute(draw_all(ragged, SIZES, ends))
        given = draw_all(ragged, SIZES, [0, 2, 3, 4])
        check(fd.execute(given)[0], reference(ragged, *given), torch.float32)


def test_refused() -> None:
    with FusionDefinition() as fd:
        a, b = fd.define_tensor([6, 8]), fd.define_tensor([4, 8, 10])
        ends = fd.define_tensor([4], dtype=DataType.Int32)
        whole = fd.define_tensor([6, 8], dtype=DataType.Int)
        with pytest.raises(
            DefinitionError, match=r"grouped_mm: mat1 and mat2 must be two matrices.*T1_g"
        ):
            fd.ops.grouped_mm(b, b, ends)
        with pytest.raises(DtypeError, match="grouped_mm: Expected all operands to have one dtype"):
            fd.ops.grouped_mm(whole, b, ends)
        with pytest.raises(DtypeError, match="grouped_mm: Expected operands of a floating dtype"):
            fd.ops.grouped_mm(whole, whole, ends)
        for other in (a, fd.define_tensor([4], dtype=DataType.Int)):
            with pytest.raises(DtypeError, match="grouped_mm: offsets must have 1 axis"):
                fd.ops.grouped_mm(a, b, other)
        three = fd.define_tensor([3], dtype=DataType.Int32)
        with pytest.raises(DefinitionError, match="found 4 and 3 in grouped_mm: T1_g"):
            fd.ops.grouped_mm(a, b, three)
        with pytest.raises(DefinitionError, match="found 8 and 6 in grouped_mm"):
            fd.ops.grouped_mm(a, fd.define_tensor([6, 8]), ends)
        with pytest.raises(DefinitionError, match="found 1 and 8 in grouped_mm"):
            fd.ops.grouped_mm(fd.define_tensor([6, 1]), b, ends)
    fd = define(grouped, draw_all("m", SIZES, [1, 2, 3, 4]), strided=True)
    a, b, ends = draw_all("m", SIZES, [1, 2, 3, 4])
    with pytest.raises(InputError):
        fd.execute([a, b, ends[:3]])


# ------------------------------------------------------------------ text, graphs, costs
def test_text_and_reduction() -> None:
    with FusionDefinition() as fd:
        a, b = fd.define_tensor([6, 8]), fd.define_tensor([8, 10])
        out = fd.ops.grouped_mm(a, b, fd.define_tensor([4], dtype=DataType.Int32))
        fd.add_output(out)
    assert out.ndim == 3 and out.domain.logical[-1].is_reduction()
    (op,) = fd.fusion.exprs
    tensors = ", ".join(
        f"{n}={t}" for n, t in zip(("mat1", "mat2", "offsets"), op.inputs, strict=True)
    )
    assert str(op) == f"{out} = GroupedMmaOp({tensors})"
    assert "tv3 = fd.ops.grouped_mm(tv0, tv1, tv2)" in repr(fd)


def test_costs_are_those_of_the_groups() -> None:
    for ragged in FORMS:
        given = draw_all(ragged, SIZES, [1, 2, 3, 4])
        (nbytes,) = bytes_of_kernels(define(grouped, given), given)
        operands = 4 * (given[0].numel() + given[1].numel())
        parts = {**SIZES, ragged: -(-SIZES[ragged] // 4)}
        assert nbytes == operands + 4 * 4 * parts["m"] * parts["n"]


# ------------------------------------------------------------------ ranks
def run_cut(
    ragged: str, cuts: dict[str, int], *, static: bool, sizes: dict[str, int] = SIZES
) -> tuple[torch.Tensor, int, str]:
    """Runs on a rank; returns the results, the number of collectives, and the program."""
    given = draw_all(ragged, sizes, [1, 1, 4, 5], torch.float64)
    mesh = DeviceMesh(range(Communicator.instance().size()))
    with FusionDefinition() as fd:
        a, b, ends = (
            fd.define_tensor(list(x.shape) if static else [-1] * x.ndim, True, x.dtype)
            for x in given
        )
        found = fd.ops.grouped_mm(fd.ops.neg(a), b, ends)
        tensors = {"a": a, "b": b, "ends": ends, "out": fd.ops.neg(found)}
        fd.add_output(tensors["out"])
        for tv in (a, b, ends):
            tv.set_device_mesh(mesh)
        for name, axis in cuts.items():
            cut(tensors[name], axis, mesh)
    parts = [shard_tensor(x, tv) for x, tv in zip(given, (a, b, ends), strict=True)]
    out = [fd.execute(parts)[0] for _ in range(3)][-1]
    program = fd.fec.host_program()
    assert equal(parse(program.full_text()), program)
    return out, fd.fec.statistics()["collectives"], program.full_text()


# Ragged axis -> (sharded axis of each tensor, number of communications).
CUTS: dict[str, list[tuple[dict[str, int], int]]] = {
    "k": [
        ({"a": 0}, 0),
        ({"b": 1}, 0),
        ({"b": 1, "out": 2}, 0),
        ({"a": 1}, 1),
        ({"b": 0}, 1),
        ({"ends": 0}, 1),
        ({"out": 0}, 0),
        ({"a": 1, "b": 0}, 2),
    ],
    "n": [({"a": 1}, 0), ({"a": 0}, 1), ({"a": 2}, 1), ({"b": 1}, 1), ({"a": 1, "out": 1}, 1)],
    "m": [
        ({"b": 2}, 0),
        ({"b": 0}, 1),
        ({"b": 1, "a": 1}, 2),
        ({"a": 0}, 1),
        ({"b": 2, "out": 1}, 0),
        ({"a": 0, "out": 0, "ends": 0}, 2),
    ],
}


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("ragged", FORMS)
def test_any_cuts(ragged: str, static: bool) -> None:
    given = draw_all(ragged, SIZES, [1, 1, 4, 5], torch.float64)
    expected = reference(ragged, *given)
    for cuts, collectives in CUTS[ragged]:
        with simulate(2) as world:
            results = world.run(run_cut, ragged, cuts, static=static)
        for rank, (out, count, text) in enumerate(results):
            torch.testing.assert_close(out, shards(expected, out, rank, 2))
            assert count == collectives and text == results[0][2], cuts


@pytest.mark.parametrize(("ragged", "axis"), [("k", 1), ("n", 0), ("n", 2), ("m", 0)])
def test_a_cut_of_what_is_needed_whole_is_told(ragged: str, axis: int) -> None:
    """A host program written by hand may shard an axis that the op needs whole: an error reports
    it."""
    given = draw_all(ragged, SIZES, [1, 2, 3, 4])
    fd = define(grouped, given)
    (op,) = fd.fusion.exprs
    check_results(op)
    op.mat1.set_device_mesh(DeviceMesh([0, 1]))
    cut(op.mat1, axis, DeviceMesh([0, 1]))
    with pytest.raises(
        VerifyError, match=r"grouped_mm: .* split over devices, but each device needs the whole"
    ):
        check_results(op)


def test_no_graph_repeats_a_run() -> None:
    """The host reads the offsets, so the plan reports why it cannot be captured."""
    fd = define(grouped, given := draw_all("m", SIZES, [1, 2, 3, 4]))
    fd.execute(given)
    (op,) = fd.fusion.exprs
    assert op.READS_ON_HOST and not op.draws


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("ragged", "cuts"), [("k", {"a": 1}), ("m", {"b": 2}), ("n", {"a": 1, "out": 0})]
)
def test_under_mpirun(ragged: str, cuts: dict[str, int], comm: Any) -> None:
    sizes = {"g": 4, "m": 8, "k": 16, "n": 12}  # on two ranks and on four
    out, _, _ = run_cut(ragged, cuts, static=False, sizes=sizes)
    expected = reference(ragged, *draw_all(ragged, sizes, [1, 1, 4, 5], torch.float64))
    torch.testing.assert_close(out, shards(expected, out, comm.rank(), comm.size()))
