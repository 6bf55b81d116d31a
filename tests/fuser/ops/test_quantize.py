"""Block quantisation, and scales in tiles, compared with brute force, one element at a time."""

# Ops are called with wrong arguments.
# pyright: reportArgumentType=false

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch

from fuser import DataType, FusionDefinition, ops
from fuser.ir.fusion import Fusion
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.ops.matrix_products import GroupedScalesOp
from fuser.multidevice import Communicator, DeviceMesh, shard_tensor
from fuser.ops.define import define_tensor
from fuser.support.errors import (
    DefinitionError,
    DtypeError,
    InputError,
    UnsupportedError,
    VerifyError,
)
from hostir.ir.parser import parse
from hostir.ir.program import equal
from hostir.ir.shape_rules import check_results
from multidevice import simulate
from tests.support.cuts import cut, shards
from tests.support.float8_codes import check, run
from tests.support.kernel_bytes import bytes_of_kernels
from tests.support.lookup_programs import define
from tests.support.op_cases import lay_out
from tests.support.scaled_operands import E4, draw

pytestmark = pytest.mark.from_text

D = DataType
Tensor = torch.Tensor


# ------------------------------------------------------------------ values and scales
def quantize(tv: Any) -> Any:
    return ops.nv_block_quantize(tv, block_size=32, dtype=E4)


def brute_force(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns values and scales, one block at a time: the first power of two that is large
    enough."""
    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty((*x.shape[:-1], x.shape[-1] // 32), dtype=torch.float8_e8m0fnu)
    for place in itertools.product(*map(range, scales.shape)):
        mine = slice(32 * place[-1], 32 * place[-1] + 32)
        block = x[(*place[:-1], mine)].double()
        exponent = -127
        while exponent < 127 and float(block.abs().max()) > 448 * 2.0**exponent:
            exponent += 1
        values[(*place[:-1], mine)] = (block / 2.0**exponent).float().to(torch.float8_e4m3fn)
        scales[place] = torch.tensor(2.0**exponent).to(torch.float8_e8m0fnu)
    return values, scales


@pytest.mark.parametrize("options", [["checked"], ["schedules_for(h200)"]], ids=["cpu", "h200"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_are_those_of_brute_force(dtype: torch.dtype, options: list[str]) -> None:
    x = draw(5, 2, 96, dtype=torch.float64) * 10 ** draw(5, 2, 96, seed=9).double()
    edges = torch.tensor([448.0, 448.001, 447.9, 896.0, 1e-30, 2.0**-126 * 448, 3e38, 0.0])
    x[0, 0, :8], x[1], x[2, :, 32:64], x[3] = edges, 0.0, 1e-45, x[3] * 2.0**-120
    x[4, 0, 0], x[4, 1, 40] = 448.0 * 2**3, 449.0 * 2**3
    x = x.clamp(-6e4, 6e4) if dtype is torch.float16 else x
    x = x.to(dtype)
    values, scales = run(quantize, x, options=options)
    expected, powers = brute_force(x)
    check(scales, powers)
    check(values, expected)


def test_scales_times_values_are_near() -> None:
    """The error is at most half a unit in the last of 3 digits of each number, or of the smallest
    step of the block."""
    x = draw(64, 128)
    values, scales = run(quantize, x)
    power = scales.double().repeat_interleave(32, -1)
    again = values.double() * power
    unit = torch.maximum(x.double().abs() * 2.0**-4, power * 2.0**-10)
    assert bool(((again - x).abs() <= unit).all())
    assert bool((values.double().abs() <= 448).all())
    # The next smaller power of two would be too small.
    blocks = x.double().unflatten(-1, (-1, 32)).abs().amax(-1)
    assert bool((blocks > 448 * scales.double() / 2).all())


def test_nan_and_infinity_stay_in_their_block() -> None:
    x = draw(3, 64)
    x[0, 3], x[1, 40], x[1, 41] = float("nan"), float("inf"), 2.0
    values, scales = run(quantize, x)
    assert values[0, :32].isnan().all() and scales[0, 0].isnan()
    assert float(scales[1, 1]) == 2.0**127 and float(values[1, 41]) == 0.0
    check(values[1, 40], torch.tensor(math.inf).to(torch.float8_e4m3fn))
    rest, powers = brute_force(x[2:])
    check(values[2:], rest)
    check(scales[2:], powers)
    check(values[0, 32:], brute_force(x[:1, 32:])[0][0])


def test_symbolic_sizes() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        for tv in quantize(x):
            fd.add_output(tv)
    for shape in ((3, 64), (1, 32), (4, 96), (0, 32), (2, 0)):
        x = draw(*shape)
        for out, expected in zip(fd.execute([x]), brute_force(x), strict=True):
            check(out, expected)
    with pytest.raises(InputError, match="Total element counts"):
        fd.execute([draw(2, 33)])


def test_quantised_rows_on_ranks() -> None:
    whole = draw(8, 64)

    def program() -> list[Tensor]:
        mesh = DeviceMesh(range(Communicator.instance().size()))
        with FusionDefinition() as fd:
            x = fd.define_tensor([8, 64], contiguity=True)
            x.set_device_mesh(mesh)
            cut(x, 0, mesh)
            for tv in quantize(x):
                fd.add_output(tv)
        return fd.execute([shard_tensor(whole, x)])

    with simulate(2) as world:
        parts = world.run(program)
    for k, expected in enumerate(brute_force(whole)):
        bytes_of = [p[k].view(torch.uint8) for p in parts]
        check(torch.cat(bytes_of).view(expected.dtype), expected)


def test_what_is_no_block() -> None:
    with FusionGuard(Fusion()):
        x, one = define_tensor([-1, -1]), define_tensor([])
        cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
            (
                UnsupportedError,
                r"Float4_e2m1fn of T.*capability 10\.0 or more.*write dtype=DataType.Float8_e4m3fn",
                lambda: ops.nv_block_quantize(x),
            ),
            (
                UnsupportedError,
                r"Float8_e5m2 of T[^:]*: write dtype=DataType.Float8_e4m3fn",
                lambda: ops.nv_block_quantize(x, dtype=D.Float8_e5m2),
            ),
            (
                UnsupportedError,
                "global_scale T.*: MXFP8 needs none",
                lambda: ops.nv_block_quantize(x, one, False, 32, E4),
            ),
            (
                UnsupportedError,
                r"swizzle_block_scales needs an input with 2 axes, .* but T.* has 3",
                lambda: ops.nv_block_quantize(define_tensor([2, 3, 32]), None, True, 32, E4),
            ),
            (
                DefinitionError,
                "block_size must be 32",
                lambda: ops.nv_block_quantize(x, block_size=16, dtype=E4),
            ),
            (
                DtypeError,
                "input must have the dtype Half, BFloat16 or Float",
                lambda: quantize(define_tensor([-1, 32], dtype=D.Double)),
            ),
            (
                DefinitionError,
                r"the last axis of T.* must be a multiple of 32, but has size 33",
                lambda: quantize(define_tensor([-1, 33])),
            ),
            (DefinitionError, r"at least 1 axis, but T.* has 0", lambda: quantize(one)),
        ]
        for error, match, call in cases:
            with pytest.raises(error, match=match):
                call()


# ------------------------------------------------------------------ scales in tiles
def bits(x: Tensor) -> Tensor:
    """Returns floats of one byte as their bytes, which torch can copy and compare."""
    return x.view(torch.uint8) if x.element_size() == 1 and x.is_floating_point() else x


def in_tiles(x: Tensor, tiles: int) -> Tensor:
    """Returns the rows of a matrix in tiles, one element at a time; padding has bits of 0."""
    given, columns = bits(x), -(-x.shape[1] // 4)
    out = given.new_zeros(tiles * columns * 512)
    for r, c in itertools.product(*map(range, x.shape)):
        tile = r // 128 * columns + c // 4
        out[tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = given[r, c]
    return out.view(tiles * 128, columns * 4).view(x.dtype)


def of_groups(x: Tensor, starts: Sequence[int], begins: Sequence[int]) -> Tensor:
    """Returns the tiles of groups of rows, one group at a time."""
    m, columns = len(x), -(-x.shape[1] // 4) * 4
    ends = [*starts[1:], m][: len(starts)]
    out = bits(x).new_zeros((m + 127 * len(starts)) // 128 * 128, columns)
    for begin, start, end in zip(begins, starts, ends, strict=True):
        tiles = -(-(end - start) // 128)
        out[begin : begin + 128 * tiles] = bits(in_tiles(x[start:end], tiles))
    return out.view(x.dtype)


def same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype is expected.dtype and found.shape == expected.shape
    assert torch.equal(bits(found), bits(expected))


def swizzled(tv: Any) -> Any:
    return ops.nv_block_quantize(tv, None, True, 32, E4)


def test_the_order_in_a_tile() -> None:
    """Positions of elements in cuBLAS's documented layout, written by hand."""
    x = torch.arange(256 * 8).reshape(256, 8)
    found = in_tiles(x, 2).flatten().tolist()
    places = {(0, 0): 0, (0, 3): 3, (32, 0): 4, (64, 0): 8, (96, 3): 15, (1, 0): 16, (31, 0): 496}
    places |= {(127, 3): 511, (0, 4): 512, (127, 7): 1023, (128, 0): 1024, (255, 7): 2047}
    assert {at: found.index(8 * at[0] + at[1]) for at in places} == places


@pytest.mark.parametrize("options", [["checked"], ["schedules_for(h200)"]], ids=["cpu", "h200"])
@pytest.mark.parametrize("shape", [(3, 64), (1, 32), (128, 128), (130, 160), (257, 32)], ids=str)
def test_scales_in_tiles(shape: tuple[int, int], options: list[str]) -> None:
    x = draw(*shape) * 10 ** draw(*shape, seed=9)
    values, scales = run(swizzled, x, options=options)
    expected, powers = brute_force(x)
    check(values, expected)
    same(scales, in_tiles(powers, -(-shape[0] // 128)))


@pytest.mark.parametrize("layout", ["strided", "transposed", "expanded"])
def test_tiles_of_any_layout(layout: str) -> None:
    x = lay_out(draw(6, 96), layout)
    for tv, expected in zip(run(swizzled, x), brute_force(x), strict=True):
        same(tv, in_tiles(expected, 1) if tv.shape != x.shape else expected)


def test_tiles_of_symbolic_sizes() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        for tv in swizzled(x):
            fd.add_output(tv)
    for shape in ((3, 64), (1, 32), (130, 96), (0, 32), (2, 0), (128, 128)):
        x = draw(*shape)
        values, scales = fd.execute([x])
        expected, powers = brute_force(x)
        check(values, expected)
        same(scales, in_tiles(powers, -(-shape[0] // 128)))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", [(256, 64), (6, 256)], ids=str)
def test_tiles_of_cut_rows_and_columns(shape: tuple[int, int], axis: int) -> None:
    whole = draw(*shape)

    def program() -> list[Tensor]:
        mesh = DeviceMesh(range(Communicator.instance().size()))
        with FusionDefinition() as fd:
            x = fd.define_tensor(list(shape), contiguity=True)
            cut(x, axis, mesh)
            for tv in swizzled(x):
                fd.add_output(tv)
        return fd.execute([shard_tensor(whole, x)])

    with simulate(2) as world:
        parts = world.run(program)
    values, powers = brute_force(whole)
    for rank, (found, scales) in enumerate(parts):
        same(found, bits(shards(bits(values), found, rank, 2)).view(values.dtype))
        tiles = bits(in_tiles(powers, -(-shape[0] // 128)))
        same(scales, shards(tiles, scales, rank, 2).view(powers.dtype))


# ------------------------------------------------------------------ groups
def grouped(fd: Any, x: Any, starts: Any, begins: Any) -> Any:
    return fd.ops.preprocess_grouped_matmul_input_sf(x, starts, begins)


def quantized(fd: Any, x: Any, starts: Any, begins: Any) -> Any:
    return fd.ops.nv_grouped_block_quantize(x, starts, begins, block_size=32, dtype=E4)


def int32(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.int32)


def draw_groups(rng: random.Random, m: int, count: int) -> tuple[list[int], list[int]]:
    """Returns the beginnings of groups of m rows, and of their tiles, some with gaps before
    them."""
    starts = sorted([0, *(rng.choice([0, m, rng.randint(0, m)]) for _ in range(count - 1))])[:count]
    tiles = [-(-(y - x) // 128) for x, y in pairwise([*starts, m])]
    left = (m + 127 * count) // 128 - sum(tiles)
    before = sorted(rng.randint(0, left) for _ in range(count))
    return starts, [128 * (x + sum(tiles[:i])) for i, x in enumerate(before)]


def draw_bits(m: int, k: int, dtype: torch.dtype) -> Tensor:
    """Returns values of a dtype, none of them 0."""
    codes = torch.arange(m * k).reshape(m, k) % 120 + 1
    return codes.to(torch.uint8).view(dtype) if dtype.itemsize == 1 else codes.to(dtype)


DTYPES = (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float32, torch.bfloat16, torch.int64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strided", [False, True])
def test_any_groups(strided: bool, dtype: torch.dtype) -> None:
    """Groups of any sizes, empty groups, and no groups; extents of 0 and 1."""
    rng = random.Random(f"{dtype}{strided}")
    for _ in range(25):
        m, k = rng.choice((0, 1, 5, 40, 128, 130, 300)), rng.choice((0, 1, 4, 5))
        count = rng.randrange(5) if m == 0 else rng.randrange(1, 5)
        starts, begins = draw_groups(rng, m, count)
        given = [draw_bits(m, k, dtype), int32(starts), int32(begins)]
        (out,) = define(grouped, given, strided=strided).execute(given)
        same(out, of_groups(given[0], starts, begins))


@pytest.mark.parametrize("layout", ["contiguous", "strided", "transposed", "expanded"])
def test_groups_of_any_layout(layout: str) -> None:
    x, starts, begins = draw_bits(9, 6, torch.float32), [0, 4, 4], [0, 128, 256]
    laid = lay_out(x, layout)
    (out,) = define(grouped, [laid, int32(starts), int32(begins)]).execute(
        [laid, int32(starts), int32(begins)]
    )
    same(out, of_groups(laid, starts, begins))


def test_one_definition_for_any_offsets() -> None:
    """Groups change from run to run. Kernels run before and after the op."""

    def build(fd: Any, x: Any, starts: Any, begins: Any) -> Any:
        return fd.ops.neg(grouped(fd, fd.ops.neg(x), starts, begins))

    x, rng = draw_bits(140, 5, torch.float32), random.Random(3)
    fd = define(build, [x, int32([0] * 3), int32([0] * 3)], strided=True)
    outs: list[tuple[Tensor, Tensor]] = []
    for _ in range(6):
        starts, begins = draw_groups(rng, 140, 3)
        found = fd.execute([x, int32(starts), int32(begins)])[0]
        outs.append((found, of_groups(x, starts, begins)))
    for out, expected in outs:
        same(out.abs(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_groups_of_blocks(dtype: torch.dtype) -> None:
    for m, starts, begins in ((140, [0, 131, 131], [0, 256, 384]), (7, [0], [0]), (1, [0], [0])):
        x = draw(m, 96, dtype=dtype)
        given = [x, int32(starts), int32(begins)]
        values, scales = define(quantized, given, strided=True).execute(given)
        expected, powers = brute_force(x)
        check(values, expected)
        same(scales, of_groups(powers, starts, begins))


def test_one_group_has_the_tiles_of_a_matrix() -> None:
    x = draw(200, 96)
    given = [x, int32([0]), int32([0])]
    same(define(quantized, given).execute(given)[1], run(swizzled, x)[1])


@pytest.mark.parametrize(
    ("starts", "begins", "text"),
    [
        ([1, 4], [0, 128], r"sorted input_offsets from 0 to at most 9, .* is \[1, 4\]"),
        ([0, 10], [0, 128], r"sorted input_offsets from 0 to at most 9, .* is \[0, 10\]"),
        ([0, -1], [0, 128], r"sorted input_offsets from 0 to at most 9, .* is \[0, -1\]"),
        ([0, 4], [0, 64], r"output_offsets that are multiples of 128 .* is \[0, 64\]"),
        (
            [0, 4],
            [0, 0],
            r"each group, \[4, 5\], in the 256 rows of the result, but T2_g.* is \[0, 0\]",
        ),
        ([0, 4], [128, 0], r"in the 256 rows of the result, but .* is \[128, 0\]"),
        ([0, 4], [0, 256], r"in the 256 rows of the result, but .* is \[0, 256\]"),
        ([0, 4], [-128, 0], r"in the 256 rows of the result, but .* is \[-128, 0\]"),
    ],
)
def test_offsets_that_are_none(starts: list[int], begins: list[int], text: str) -> None:
    x = draw_bits(9, 3, torch.float32)
    fd = define(grouped, [x, int32([0, 4]), int32([0, 128])])
    name = "preprocess_grouped_matmul_input_sf: Expected .*"
    for _ in range(3):
        with pytest.raises(InputError, match=name + text):
            fd.execute([x, int32(starts), int32(begins)])
        (out,) = fd.execute([x, int32([0, 4]), int32([0, 128])])
        same(out, of_groups(x, [0, 4], [0, 128]))


def test_rows_of_no_group_are_refused() -> None:
    fd = define(grouped, [draw_bits(9, 3, torch.float32), int32([]), int32([])])
    with pytest.raises(InputError, match=r"sorted input_offsets from 0 to at most 9, .* is \[\]"):
        fd.execute([draw_bits(9, 3, torch.float32), int32([]), int32([])])
    (out,) = fd.execute([draw_bits(0, 3, torch.float32), int32([]), int32([])])
    assert out.shape == (0, 4) and out.dtype == torch.float32


def test_what_are_no_groups() -> None:
    with FusionGuard(Fusion()):
        x, wide = define_tensor([-1, 64]), define_tensor([2, -1, 64])
        two, three = (define_tensor([n], dtype=D.Int32) for n in (2, 3))
        for name, more in (
            ("preprocess_grouped_matmul_input_sf", ()),
            ("nv_grouped_block_quantize", (None, 32, E4)),
        ):
            op = getattr(ops, name)
            with pytest.raises(
                DefinitionError,
                match=rf"{name}: input must have the 2 axes \[m, k\], but T.* has 3",
            ):
                op(wide, two, two, *more)
            for other in (define_tensor([2], dtype=D.Int), define_tensor([2, 1], dtype=D.Int32)):
                with pytest.raises(DtypeError, match=f"{name}: input_offsets must have 1 axis"):
                    op(x, other, two, *more)
                with pytest.raises(DtypeError, match=f"{name}: output_offsets must have 1 axis"):
                    op(x, two, other, *more)
            with pytest.raises(DefinitionError, match=f"found 2 and 3 in {name}: T"):
                op(x, two, three, *more)
        cases: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
            (UnsupportedError, r"Float4_e2m1fn of T.*capability 10\.0.*block_size=32", ()),
            (UnsupportedError, "global_scale T.*MXFP8 needs none", (define_tensor([]), 32, E4)),
            (DefinitionError, "block_size must be 32", (None, 16, E4)),
        ]
        for error, text, more in cases:
            with pytest.raises(error, match=f"nv_grouped_block_quantize: .*{text}"):
                ops.nv_grouped_block_quantize(x, two, two, *more)


def test_products_of_four_bits_are_refused() -> None:
    with FusionGuard(Fusion()):
        x, offsets = define_tensor([-1, -1]), define_tensor([-1], dtype=D.Int32)
        text = r"mm: the product of T\d.* and T\d.*capability 10\.0.*write grouped_mm"
        with pytest.raises(UnsupportedError, match=text):
            ops.cutlass_nvfp4_grouped_mm(x, x, x, x, x, x, offsets, offsets, dtype=D.Half)


# ------------------------------------------------------------------ text, graphs, costs
def test_text_of_groups() -> None:
    fd = define(grouped, given := [draw_bits(9, 6, torch.float32), int32([0]), int32([0])])
    (op,) = fd.fusion.exprs
    assert isinstance(op, GroupedScalesOp)
    names = zip(("input", "input_offsets", "output_offsets"), op.inputs, strict=True)
    tensors = ", ".join(f"{name}={tv}" for name, tv in names)
    assert str(op) == f"{op.out} = PreprocessGroupedMatmulInputSf({tensors})"
    assert "fd.ops.preprocess_grouped_matmul_input_sf(tv0, tv1, tv2)" in repr(fd)
    # Runs are not captured as a graph, because the host reads the offsets.
    assert op.READS_ON_HOST and not op.draws
    (nbytes,) = bytes_of_kernels(fd, given)
    assert nbytes == 4 * (2 * 9 * 6 + 3 * 128 * 8)


# ------------------------------------------------------------------ ranks
def run_cut(
    cuts: dict[str, int], build: Callable[..., Any], begins: Sequence[int] = (0, 128)
) -> list[Tensor]:
    """Runs on a rank with some tensors sharded along an axis."""
    given = [draw(12, 256), int32([0, 5]), int32(begins)]
    mesh = DeviceMesh(range(Communicator.instance().size()))
    with FusionDefinition() as fd:
        tvs = [fd.define_tensor(list(x.shape), True, x.dtype) for x in given]
        made = build(fd, *tvs)
        made = made if isinstance(made, tuple) else (made,)
        for out in made:
            fd.add_output(out)
        for name, tv in zip(("x", "starts", "begins", "out"), (*tvs, made[-1]), strict=True):
            if name in cuts:
                cut(tv, cuts[name], mesh)
            elif tv is not made[-1]:
                tv.set_device_mesh(mesh)
    parts = [shard_tensor(x, tv) for x, tv in zip(given, tvs, strict=True)]
    out = [fd.execute(parts) for _ in range(3)][-1]
    program = fd.fec.host_program()
    assert equal(parse(program.full_text()), program)
    return out


CUTS = ({}, {"x": 0}, {"x": 1}, {"starts": 0}, {"begins": 0}, {"x": 0, "begins": 0, "out": 0})
CUTS += ({"out": 0}, {"x": 1, "out": 1})


def check_cut(results: list[list[Tensor]], wholes: list[Tensor]) -> None:
    for rank, outs in enumerate(results):
        for out, whole in zip(outs, wholes, strict=True):
            same(out, shards(bits(whole), out, rank, len(results)).view(whole.dtype))


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_groups_on_ranks(cuts: dict[str, int]) -> None:
    x, starts, begins = draw(12, 256), [0, 5], [0, 128]
    with simulate(2) as world:
        results = world.run(run_cut, cuts, grouped)
    check_cut(results, [of_groups(x, starts, begins)])
    values, powers = brute_force(x)
    with simulate(2) as world:
        results = world.run(run_cut, cuts, quantized)
    check_cut(results, [values, of_groups(powers, starts, begins)])


def test_offsets_that_are_none_end_every_rank() -> None:
    with simulate(2) as world, pytest.raises(InputError, match=r"_sf: Expected.* is \[0, 64\]"):
        world.run(run_cut, {"begins": 0}, grouped, (0, 64))


@pytest.mark.parametrize("operand", [0, 1, 2])
def test_a_cut_of_what_is_needed_whole_is_told(operand: int) -> None:
    """A host program written by hand may shard an axis that the op needs whole: an error reports
    it."""
    fd = define(grouped, [draw_bits(10, 6, torch.float32), int32([0, 2]), int32([0, 128])])
    (op,) = fd.fusion.exprs
    check_results(op)
    cut(op.inputs[operand], 0, DeviceMesh([0, 1]))
    with pytest.raises(
        VerifyError, match=r"_sf: .* is split over devices, but each device needs the whole axis"
    ):
        check_results(op)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("cuts", [{"x": 0}, {"x": 1, "out": 0}], ids=str)
def test_under_mpirun(cuts: dict[str, int], comm: Any) -> None:
    values, powers = brute_force(draw(12, 256))
    outs = run_cut(cuts, quantized)
    for out, whole in zip(outs, (values, of_groups(powers, [0, 5], [0, 128])), strict=True):
        same(out, shards(bits(whole), out, comm.rank(), comm.size()).view(whole.dtype))
