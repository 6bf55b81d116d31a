"""grouped_mm of floats of one byte with scales, compared with float64: any groups, scales and
ranks."""

# Ops are called with wrong arguments, and with operands from dictionaries.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch

from fuser import DataType, FusionDefinition, ops
from fuser.ir.ops.matrix_products import GroupedMmaOp
from fuser.multidevice import Communicator, DeviceMesh, shard_tensor
from fuser.support.errors import (
    DefinitionError,
    DtypeError,
    FuserError,
    InputError,
    UnsupportedError,
)
from hostir.ir.parser import parse
from hostir.ir.program import equal
from multidevice import simulate
from tests.fuser.ops.test_contractions_grouped import FORMS, draw_ends, shapes
from tests.support.cuts import cut, shards
from tests.support.float8_codes import run
from tests.support.kernel_bytes import bytes_of_kernels
from tests.support.lookup_programs import draw
from tests.support.op_cases import lay_out

pytestmark = pytest.mark.from_text

D = DataType
Tensor = torch.Tensor
Given = dict[str, Tensor]
E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
SIZES = {"g": 4, "m": 6, "n": 10, "k": 8, "1": 1}
# Operand -> the forms of its axes that tests draw.
OPERANDS = {
    "scale1": ("gm1", "m1", "g11", "1m1", "", "1"),
    "scale2": ("g1n", "1n", "g11", "11n", "", "11"),
    "alpha": ("g", "", "1"),
    "bias": ("n", "mn", "gmn", "g1n", "1", "gm1"),
    "beta": ("g", "", "111"),
}
ALL = {"scale1": "gm1", "scale2": "g1n", "alpha": "g", "bias": "gmn", "beta": "g"}
RESULTS = {
    D.BFloat16: (torch.bfloat16, 2.0**-8),
    D.Half: (torch.float16, 2.0**-11),
    D.Float: (torch.float32, 1e-6),
    D.Float8_e4m3fn: (E4, 2.0**-4),
}


def draw_given(
    ragged: str,
    sizes: Mapping[str, int],
    ends: list[int],
    letters: Mapping[str, str],
    bias: torch.dtype = torch.float32,
) -> Given:
    """Returns matrices, offsets, and the optional operands that have letters, by name."""
    first, second = shapes(ragged, sizes)
    given = {"mat1": draw(first, E4), "mat2": draw(second, E5, 1)}
    given["offsets"] = torch.tensor(ends, dtype=torch.int32)
    for seed, (name, axes) in enumerate(letters.items()):
        dtype = bias if name == "bias" else torch.float32
        given[name] = draw([sizes[c] for c in axes], dtype, seed + 5)
    return given


def reference(ragged: str, given: Given, *, sizes_only: bool = False) -> Tensor:
    """Returns a product per group in float64, scaled for each group.

    With `sizes_only`, it is that of the absolute values.
    """
    wide = {n: t.double() if t.is_floating_point() else t for n, t in given.items()}
    wide = {n: t.abs() if sizes_only else t for n, t in wide.items()}
    a, b, ends = wide["mat1"], wide["mat2"], given["offsets"].tolist()
    m, n, extent = a.shape[-2], b.shape[-1], {"k": a, "n": b, "m": a.mT}[ragged].shape[-1]
    places = torch.arange(extent)
    parts = [((places >= x) & (places < y)).double() for x, y in pairwise([0, *ends])]
    found = torch.zeros(len(ends), m, n, dtype=torch.float64)
    for g, part in enumerate(parts):
        x = a * part if ragged == "k" else a[g] if ragged == "n" else a
        out = x @ (b[g] if ragged == "m" else b)
        for name in ("scale1", "scale2", "alpha"):
            if name in wide:
                out = out * of_group(wide[name], g, is_number=name == "alpha")
        if "bias" in wide:
            beta = of_group(wide["beta"], g, is_number=True) if "beta" in wide else 1.0
            out = out + of_group(wide["bias"], g) * beta
        found[g] = out * {"k": torch.ones(()), "n": part, "m": part[:, None]}[ragged]
    return found if ragged == "k" else found.sum(0)


def of_group(x: Tensor, g: int, *, is_number: bool = False) -> Tensor:
    """Returns the part of a scale or bias, or of a number per group, that belongs to a group."""
    if x.numel() == 1:
        return x.reshape(())
    if is_number or x.ndim == 3:
        return x[min(g, x.shape[0] - 1)]
    return x


def build(names: list[str], dtype: DataType) -> Callable[..., Any]:
    def define(*tensors: Any) -> Any:
        made = ops.grouped_mm(**dict(zip(names, tensors, strict=True)), dtype=dtype)
        assert made[1:] == (None, None)
        return made[0]

    return define


def check(ragged: str, given: Given, dtype: DataType = D.Float) -> None:
    """Runs a definition directly and from its own text."""
    (out,) = run(build([*given], dtype), *given.values(), options=())
    compare(out, ragged, given, dtype)


def compare(out: Tensor, ragged: str, given: Given, dtype: DataType = D.Float) -> None:
    to, eps = RESULTS[dtype]
    expected = reference(ragged, given)
    expected = expected.clamp(-448, 448) if to is E4 else expected
    assert out.dtype is to and out.shape == expected.shape
    off = 1e-6 * reference(ragged, given, sizes_only=True) + eps * expected.abs() + eps / 8
    error = (out.double() - expected).abs()
    assert bool((error <= off).all()), float((error / off).max())


# ------------------------------------------------------------------ values
@pytest.mark.parametrize("dtype", RESULTS)
@pytest.mark.parametrize("ragged", FORMS)
def test_each_operand_alone_and_all_of_them(ragged: str, dtype: DataType) -> None:
    ends = [2, 2, 5, SIZES[ragged] - 1]
    for name, forms in OPERANDS.items():
        for letters in forms:
            more = {"scale1": "", "scale2": "", **({"bias": "n"} if name == "beta" else {})}
            check(ragged, draw_given(ragged, SIZES, ends, {**more, name: letters}), dtype)
    check(ragged, draw_given(ragged, SIZES, ends, ALL, torch.bfloat16), dtype)


@pytest.mark.parametrize("ragged", FORMS)
def test_any_groups_and_extents(ragged: str) -> None:
    """Groups of any sizes, empty groups, and no groups; extents of 0 and 1, and tiles of tensor
    cores; sizes that only the call knows."""
    rng = random.Random(ragged)
    for _ in range(40):
        sizes = {c: rng.choice((0, 1, 2, 5, 16, 32)) for c in "gmnk"} | {"1": 1}
        letters = {name: rng.choice(forms) for name, forms in OPERANDS.items()}
        dropped = rng.choice(([], ["alpha"], ["beta"], ["beta", "bias"], ["alpha", "beta", "bias"]))
        kept = {name: axes for name, axes in letters.items() if name not in dropped}
        bias = rng.choice((torch.float16, torch.bfloat16, torch.float32, torch.float64))
        ends = draw_ends(rng, sizes["g"], sizes[ragged])
        check(ragged, draw_given(ragged, sizes, ends, kept, bias))


@pytest.mark.parametrize("layout", ["strided", "transposed", "expanded"])
@pytest.mark.parametrize("ragged", FORMS)
def test_layouts(ragged: str, layout: str) -> None:
    given = draw_given(ragged, SIZES, [1, 1, 4, SIZES[ragged]], ALL)
    for name in given:
        if name != "offsets":
            check(ragged, {**given, name: lay_out(given[name], layout)})


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("ragged", FORMS)
def test_one_scale_many_times(ragged: str, axis: int) -> None:
    given = draw_given(ragged, SIZES, [1, 1, 4, 5], ALL)
    for name in ("scale1", "scale2", "bias"):
        x = given[name]
        check(ragged, {**given, name: x.narrow(axis, 0, 1).expand(x.shape)})


def test_k_of_nothing_is_the_bias() -> None:
    for ragged in FORMS:
        sizes = {**SIZES, "k": 0}
        for letters in (ALL, {"scale1": "gm1", "scale2": "1n"}):
            check(ragged, draw_given(ragged, sizes, [0, 0, 0, 0], letters))


@pytest.mark.parametrize("ragged", FORMS)
def test_one_definition_for_any_offsets(ragged: str) -> None:
    """Kernels cast before and after the product. Sizes and groups are new in each call."""
    names = ["mat1", "mat2", "offsets", *ALL]
    with FusionDefinition() as fd:
        ranks = [*map(len, shapes(ragged, SIZES)), 1, *map(len, ALL.values())]
        tensors = [
            fd.define_tensor(
                [1 if (name, k) in (("scale1", 2), ("scale2", 1)) else -1 for k in range(rank)],
                dtype=D.Int32 if name == "offsets" else D.Float,
            )
            for name, rank in zip(names, ranks, strict=True)
        ]
        given = dict(zip(names, tensors, strict=True))
        for name, to in (("mat1", D.Float8_e4m3fn), ("mat2", D.Float8_e5m2)):
            given[name] = fd.ops.cast(given[name], to)
        out, _, _ = fd.ops.grouped_mm(**given, dtype=D.Float)
        fd.add_output(fd.ops.neg(out))
    rng = random.Random(2)
    for _ in range(6):
        sizes = {c: rng.choice((1, 3, 4, 16)) for c in "gmnk"} | {"1": 1}
        inputs = draw_given(ragged, sizes, draw_ends(rng, sizes["g"], sizes[ragged]), ALL)
        wide = [t.float() if t.dtype in (E4, E5) else t for t in inputs.values()]
        compare(-fd.execute(wide)[0], ragged, inputs)
    program = fd.fec.host_program()
    assert "GroupedMmaOp" in program.full_text()
    assert equal(parse(program.full_text()), program)


def test_what_other_groups_have_does_not_count() -> None:
    given = draw_given("m", SIZES, [2, 2, 4, 5], ALL)
    for name in ("mat2", "scale1", "scale2", "bias"):
        given[name] = given[name].clone()
        given[name].view(torch.uint8)[1] = 0x7F if name == "mat2" else 0xFF
    given["alpha"][1] = given["beta"][1] = torch.nan
    (out,) = run(build([*given], D.Float), *given.values(), options=())
    assert out.isfinite().all()


# ------------------------------------------------------------------ what is refused
def test_refusals() -> None:
    with FusionDefinition() as fd:
        a, b = (fd.define_tensor([-1] * r, dtype=D.Float8_e4m3fn) for r in (2, 3))
        x, c, one = fd.define_tensor([-1, -1]), fd.define_tensor([-1]), fd.define_tensor([])
        ends = fd.define_tensor([4], dtype=D.Int32)
        three, batch = fd.define_tensor([3]), fd.define_tensor([4, -1, -1])
        scales = {"scale1": one, "scale2": one}
        cases: list[tuple[type[FuserError], str, tuple[Any, Any], dict[str, Any]]] = [
            (DefinitionError, "scale1 and scale2, but found T.* alone", (a, b), {"scale1": one}),
            (DefinitionError, "scale1 and scale2, but found T.* alone", (a, b), {"scale2": one}),
            (DefinitionError, "scale1 and scale2, but found T.* alone", (a, b), {"alpha": one}),
            (
                DefinitionError,
                "scale1 and scale2, but found dtype",
                (x, batch),
                {"dtype": D.Half},
            ),
            (UnsupportedError, "whose products need scales: pass scale1 and scale2", (a, b), {}),
            (
                UnsupportedError,
                "output_block_scale is not yet supported, because",
                (a, b),
                {**scales, "output_block_scale_size": 16},
            ),
            (
                UnsupportedError,
                "output_gamma is not yet supported, because",
                (a, b),
                {**scales, "output_gamma": True},
            ),
            (DefinitionError, "a bias, because beta T", (a, b), {**scales, "beta": one}),
            (DtypeError, "Expected mat1 of dtype Float8", (x, b), scales),
            (DtypeError, "Expected mat2 of dtype Float8", (a, batch), scales),
            (DtypeError, "Expected scale1 of dtype Float", (a, b), {**scales, "scale1": a}),
            (DtypeError, "Expected bias of dtype Half", (a, b), {**scales, "bias": a}),
            (DtypeError, "a floating dtype", (a, b), {**scales, "dtype": D.Int}),
            (
                UnsupportedError,
                r"scale2 must have one element or the axes \[1, n\] or \[g, 1, n\]",
                (a, b),
                {**scales, "scale2": x},
            ),
            (
                UnsupportedError,
                r"alpha must have one element or the axes \[g\]",
                (a, b),
                {**scales, "alpha": x},
            ),
            (
                DefinitionError,
                r"bias must have the axes \[n\] or \[m, n\] or \[g, m, n\]",
                (a, b),
                {**scales, "bias": one},
            ),
            (
                DefinitionError,
                "sizes to match, but found 4 and 3",
                (a, b),
                {**scales, "alpha": three},
            ),
            (DefinitionError, "mat1 and mat2 must be two matrices", (b, b), scales),
        ]
        for error, match, (mat1, mat2), more in cases:
            with pytest.raises(error, match=f"grouped_mm: .*{match}|{match} in grouped_mm"):
                fd.ops.grouped_mm(mat1, mat2, ends, **more)
        for other in (c, x):
            with pytest.raises(DtypeError, match="grouped_mm: offsets must have 1 axis"):
                fd.ops.grouped_mm(a, b, other, **scales)


def test_sizes_that_do_not_fit() -> None:
    given = draw_given("m", SIZES, [1, 2, 3, 4], ALL)
    with FusionDefinition() as fd:
        fd.add_output(build([*given], D.Float)(*map(fd.from_pytorch, given.values())))
    for name in ("scale1", "alpha", "bias"):
        with pytest.raises(InputError):
            fd.execute([t[:3] if n == name else t for n, t in given.items()])
    ends = torch.tensor([2, 1, 3, 4], dtype=torch.int32)
    with pytest.raises(InputError, match="grouped_mm: Expected sorted offsets from 0 to 6"):
        fd.execute([*{**given, "offsets": ends}.values()])


# ------------------------------------------------------------------ text, shapes, costs
def test_text() -> None:
    texts = [text for _, text in GroupedMmaOp.variants()]
    assert len(set(texts)) == 9
    assert texts[0] == "{out} = GroupedMmaOp(mat1={mat1}, mat2={mat2}, offsets={offsets})"
    given = draw_given("k", SIZES, [1, 2, 3, 4], {**ALL, "bias": "n"})
    with FusionDefinition() as fd:
        fd.add_output(build([*given], D.Half)(*map(fd.from_pytorch, given.values())))
    (op,) = fd.fusion.exprs
    fields = ", ".join(f"{n}={t}" for n, t in zip(given, op.inputs, strict=True))
    assert str(op) == f"{op.outputs[0]} = GroupedMmaOp({fields})"
    assert "fd.ops.grouped_mm(tv0, tv1, tv2, tv3, tv4, alpha=tv5, bias=tv6, beta=tv7" in repr(fd)


@pytest.mark.parametrize("ragged", FORMS)
def test_costs_are_those_of_the_groups(ragged: str) -> None:
    given = draw_given(ragged, SIZES, [1, 2, 3, 4], {"scale1": "gm1", "scale2": "1n"})
    with FusionDefinition() as fd:
        fd.add_output(build([*given], D.Half)(*map(fd.from_pytorch, given.values())))
    (nbytes,) = bytes_of_kernels(fd, [*given.values()])
    operands = sum(t.numel() * t.element_size() for n, t in given.items() if n != "offsets")
    parts = {**SIZES, ragged: -(-SIZES[ragged] // 4)}
    assert nbytes == operands + 2 * 4 * parts["m"] * parts["n"]


# ------------------------------------------------------------------ ranks
def run_cut(
    ragged: str, letters: dict[str, str], cuts: dict[str, int], sizes: dict[str, int] = SIZES
) -> tuple[Tensor, int, str]:
    """Runs on a rank; returns the results, the number of collectives, and the program."""
    given = draw_given(ragged, sizes, [1, 1, 4, 5], letters)
    mesh = DeviceMesh(range(Communicator.instance().size()))
    with FusionDefinition() as fd:
        tensors = {n: fd.from_pytorch(t, static_sizes=True) for n, t in given.items()}
        tensors["out"] = build([*given], D.Float)(*tensors.values())
        fd.add_output(tensors["out"])
        for name in given:
            tensors[name].set_device_mesh(mesh)
        for name, axis in cuts.items():
            cut(tensors[name], axis, mesh)
    parts = [shard_tensor(t, tensors[n]) for n, t in given.items()]
    out = [fd.execute(parts)[0] for _ in range(3)][-1]
    return out, fd.fec.statistics()["collectives"], fd.fec.host_program().full_text()


ROWS, COLUMNS = {"mat1": -2, "scale1": -2, "bias": -2}, {"mat2": -1, "scale2": -1, "bias": -1}
# Ragged axis -> (sharded axes, number of collectives). The ragged axis, g and k are gathered.
CUTS: dict[str, list[tuple[dict[str, int], int]]] = {
    "k": [(ROWS, 0), (COLUMNS, 0), ({"mat1": -2}, 0), ({"alpha": 0}, 1), ({"mat1": -1}, 1)],
    "n": [(ROWS, 0), (COLUMNS, 3), ({"mat1": -2}, 0), ({"alpha": 0}, 1), ({"scale2": -1}, 1)],
    "m": [(ROWS, 3), (COLUMNS, 0), ({"mat2": -1}, 0), ({"beta": 0}, 1), ({"mat2": 0}, 1)],
}


@pytest.mark.parametrize("ragged", FORMS)
@pytest.mark.parametrize("per_group", [False, True])
def test_any_cuts(ragged: str, per_group: bool) -> None:
    letters = ALL if per_group else {**ALL, "scale1": "m1", "scale2": "1n", "bias": "mn"}
    expected = reference(ragged, draw_given(ragged, SIZES, [1, 1, 4, 5], letters))
    for cuts, collectives in CUTS[ragged]:
        with simulate(2) as world:
            results = world.run(run_cut, ragged, letters, cuts)
        for rank, (out, count, text) in enumerate(results):
            wanted = shards(expected, out, rank, 2)
            torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-4)
            assert count == collectives and text == results[0][2], cuts
    if per_group:
        with simulate(2) as world:
            results = world.run(run_cut, ragged, letters, {"scale1": 0, "bias": 0})
        assert {count for _, count, _ in results} == {2}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("ragged", "cuts"), [("k", ROWS), ("m", COLUMNS), ("n", {"mat1": -1})])
def test_under_mpirun(ragged: str, cuts: dict[str, int], comm: Any) -> None:
    sizes = {"g": 4, "m": 8, "k": 16, "n": 12, "1": 1}  # on two ranks and on four
    out, _, _ = run_cut(ragged, ALL, cuts, sizes)
    expected = reference(ragged, draw_given(ragged, sizes, [1, 1, 4, 5], ALL))
    wanted = shards(expected, out, comm.rank(), comm.size())
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [DataType.Float, torch.float32, DataType.BFloat16])
def test_without_scales_the_dtype_is_that_of_the_matrices(dtype: Any) -> None:
    with FusionDefinition() as fd:
        a = fd.define_tensor([4, 4], contiguity=True)
        b = fd.define_tensor([2, 4, 4], contiguity=True)
        ends = fd.define_tensor([2], dtype=DataType.Int32)
        assert fd.ops.grouped_mm(a, b, ends, dtype=dtype).dtype() is DataType.Float
        with pytest.raises(DefinitionError, match=r"dtype .*Half.*Without scales, cast T0"):
            fd.ops.grouped_mm(a, b, ends, dtype=DataType.Half)
        fd.add_output(fd.ops.neg(a))
