"""Attention with fewer heads of keys and values (`enable_gqa`), compared with repeated heads in
float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fuser import DataType, FusionDefinition, Replicate, Shard, TensorView, shard
from fuser.multidevice import Communicator, DeviceMesh, shard_tensor
from fuser.support.errors import DefinitionError, FuserError, InputError, UnsupportedError
from hostir import HostIrEvaluator
from hostir.ir.parser import parse
from hostir.ir.program import equal
from multidevice import simulate
from tests.support.attention_reference import Tensors, attend, check, draw, gradients
from tests.support.cuts import cut, shards

D = DataType
OPERANDS = ("query", "key", "value", "grad")


def define(
    *,
    dtype: DataType = D.Float,
    rank: int = 4,
    is_causal: bool = False,
    sizes: tuple[int, int] = (-1, -1),
    place: Callable[[dict[str, TensorView]], None] = lambda tensors: None,
    backward: bool = True,
) -> FusionDefinition:
    """Defines the results of the forward and the gradients; `sizes` are the heads of query and
    key."""
    with FusionDefinition() as fd:

        def tensor(heads: int) -> TensorView:
            return fd.define_tensor([*[-1] * (rank - 3), heads, -1, -1], dtype=dtype)

        q, k, v = (tensor(sizes[i]) for i in (0, 1, 1))
        out, sums, seed, offset = fd.ops.sdpfa_fwd(q, k, v, is_causal=is_causal, enable_gqa=True)
        tensors, grads = {"query": q, "key": k, "value": v}, ()
        if backward:
            grad = tensors["grad"] = tensor(sizes[0])
            read = grad, q, k, v, out, sums, 0.0, is_causal, seed, offset, None
            grads = fd.ops.sdpfa_bwd(*read, enable_gqa=True)
        place(tensors)
        for tv in (out, sums, seed, offset, *grads):
            fd.add_output(tv)
    return fd


def expected_of(given: Tensors, *, is_causal: bool) -> list[torch.Tensor]:
    q, k, v, grad = (t.double() for t in given)
    axis, times = q.dim() - 3, q.shape[-3] // max(k.shape[-3], 1)
    read = [q, *(t.repeat_interleave(times, axis) for t in (k, v))]
    dq, *others = gradients(read, grad, is_causal=is_causal)
    sums = (g.unflatten(axis, (k.shape[axis], times)).sum(axis + 1) for g in others)
    return [*attend(read, is_causal=is_causal), dq, *sums]


def shapes_of(
    heads: int, groups: int, *leading: int, rows: int = 5, keys: int = 7
) -> list[list[int]]:
    one, other = [*leading, 2, heads, rows, 8], [*leading, 2, groups, keys, 8]
    return [one, other, other, one]


@pytest.mark.finding("G1")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [D.Float, D.Double, D.BFloat16], ids=str)
def test_each_head_of_keys_is_read_by_several(dtype: DataType, is_causal: bool) -> None:
    fd = define(dtype=dtype, is_causal=is_causal)
    for seed, (heads, groups) in enumerate(((6, 2), (4, 1), (4, 4), (6, 3))):
        given = draw(shapes_of(heads, groups), dtype, seed)
        expected = expected_of(given, is_causal=is_causal)
        for _ in range(4):
            check(fd.execute(given), expected, dtype)


@pytest.mark.parametrize("sizes", [(6, 2), (6, -1), (4, 1)])
def test_heads_that_are_declared(sizes: tuple[int, int]) -> None:
    given = draw(shapes_of(sizes[0], 2 if sizes[1] < 0 else sizes[1]))
    check(define(sizes=sizes).execute(given), expected_of(given, is_causal=False), D.Float)


def test_more_batches_and_projections() -> None:
    """Axes before the batch axis; heads that are adjacent in memory, and gradients that are,
    too."""
    given = draw(shapes_of(4, 2, 3))
    check(define(rank=5).execute(given), expected_of(given, is_causal=False), D.Float)
    beside = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in draw(shapes_of(4, 2))]
    outs = define().execute(beside)
    check(outs, expected_of(beside, is_causal=False), D.Float)
    assert all(g.stride() == t.stride() for g, t in zip(outs[4:], beside, strict=False))


@pytest.mark.parametrize("empty", ["heads", "rows", "keys"])
def test_empty(empty: str) -> None:
    sizes = {"heads": 4, "rows": 5, "keys": 7} | {empty: 0}
    shapes = shapes_of(
        sizes["heads"], 0 if empty == "heads" else 2, rows=sizes["rows"], keys=sizes["keys"]
    )
    given = draw(shapes)
    for _ in range(2):
        check(define().execute(given), expected_of(given, is_causal=False), D.Float)


def test_text_and_definition_say_it() -> None:
    fd, given = define(is_causal=True), draw(shapes_of(4, 2))
    outs = fd.execute(given)
    program = fd.fec.host_program()
    again = parse(program.full_text())
    assert equal(again, program) and program.full_text().count("enable_gqa = true") == 2
    for one, other in zip(outs, HostIrEvaluator(again, device="cpu").run(given), strict=True):
        assert one.tolist() == other.tolist()
    assert repr(fd).count("enable_gqa=True") == 2


@pytest.mark.finding("G21")
def test_fewer_heads_and_a_mask_of_fewer_axes_are_told_what_to_write() -> None:
    with FusionDefinition() as fd:
        q, k = (fd.define_tensor([2, heads, 5, 8]) for heads in (6, 3))
        mask = fd.define_tensor([5, 5], dtype=DataType.Bool)
        with pytest.raises(
            DefinitionError, match="for 3 heads of keys and 6 of queries pass enable_gqa=True"
        ):
            fd.ops.sdpfa_fwd(q, k, k)
        with pytest.raises(DefinitionError, match=r"mask needs 4 axes .*: broadcast it to 4 axes"):
            fd.ops.sdpfa_fwd(q, q, q, mask=mask)
        fd.add_output(fd.ops.set(q))


def test_heads_that_do_not_divide_are_refused() -> None:
    with FusionDefinition() as fd:
        q, k = (fd.define_tensor([2, heads, 5, 8]) for heads in (6, 4))
        with pytest.raises(
            DefinitionError,
            match=r"sdpfa_fwd: with enable_gqa the number of heads of .*, 4, must divide .*, 6",
        ):
            fd.ops.sdpfa_fwd(q, k, k, enable_gqa=True)
        with pytest.raises(DefinitionError, match="sdpfa_fwd"):
            fd.ops.sdpfa_fwd(q, k, k)
        fd.add_output(fd.ops.set(q))
    with pytest.raises(InputError, match=r"query has 6 heads, which is not a multiple of the 4"):
        define().execute(draw(shapes_of(6, 4)))


# ------------------------------------------------------------------ several ranks
def run_cut(names: tuple[str, ...], heads: int, groups: int) -> list[torch.Tensor]:
    mesh = DeviceMesh(range(Communicator.instance().size()))
    tensors: dict[str, TensorView] = {}

    def place(found: dict[str, TensorView]) -> None:
        tensors.update(found)
        for name in OPERANDS:
            found[name].set_device_mesh(mesh)
        for name in names:
            cut(found[name], 1, mesh)

    fd = define(place=place)
    whole = draw(shapes_of(heads, groups))
    given = [shard_tensor(t, tensors[n]) for t, n in zip(whole, OPERANDS, strict=True)]
    outs = [fd.execute(given) for _ in range(3)][-1]
    if names == OPERANDS:
        assert fd.fec.statistics()["collectives"] == 0
    return outs


@pytest.mark.finding("G1")
@pytest.mark.parametrize("names", [OPERANDS, ("query",), ("key",), ("value", "grad")])
def test_heads_are_cut(names: tuple[str, ...]) -> None:
    """Heads of keys are sharded as those of queries, whichever of them the user shards."""
    with simulate(2) as world:
        results = world.run(run_cut, names, 8, 4)
    expected = expected_of(draw(shapes_of(8, 4)), is_causal=False)
    for rank, outs in enumerate(results):
        computed = outs[:2] + outs[4:]
        mine = [shards(e, o, rank, 2) for e, o in zip(expected, computed, strict=True)]
        check(outs, mine, D.Float)
        assert outs[0].shape[1] == 4


# Devices, and the placement of operands on them per mesh axis.
MESHES = {
    "two": (DeviceMesh([0, 1]), [Shard(1)]),
    "four": (DeviceMesh(range(4)), [Shard(1)]),
    "batches and heads": (DeviceMesh([[0, 1], [2, 3]]), [Shard(0), Shard(1)]),
    "copies and heads": (DeviceMesh([[0, 1], [2, 3]]), [Replicate(), Shard(1)]),
}


def run_beside(
    operands: Tensors,
    named: dict[str, torch.Tensor],
    names: str,
    where: str,
    *,
    is_static: bool,
    is_grouped: bool,
) -> list[torch.Tensor]:
    """Runs the forward on a rank with a replicated bias, mask, or both. Operands whose initials are
    in `names` are sharded."""
    mesh, placements = MESHES[where]
    with FusionDefinition() as fd:
        tensors = [fd.from_pytorch(t, is_static) for t in (*operands, *named.values())]
        for tv, name in zip(tensors, "qkv", strict=False):
            if name in names:
                shard(tv, mesh, placements)
        more: dict[str, Any] = dict(zip(named, tensors[3:], strict=True))
        q, k, v = tensors[:3]
        for out in fd.ops.sdpfa_fwd(q, k, v, is_causal=False, enable_gqa=is_grouped, **more):
            fd.add_output(out)
    local = [
        shard_tensor(t, tv) if name in names else t
        for t, tv, name in zip(operands, tensors, "qkv", strict=False)
    ]
    return [fd.execute([*local, *named.values()]) for _ in range(2)][-1]


@pytest.mark.finding("G1")
@pytest.mark.parametrize("groups", [4, 8])
@pytest.mark.parametrize("names", ["q", "kv", "qkv"])
@pytest.mark.parametrize("where", MESHES)
def test_heads_are_cut_beside_a_bias_or_mask_of_any_broadcast(
    where: str, names: str, groups: int
) -> None:
    """A bias or mask with one head is replicated; with several heads, they are sharded as those of
    queries."""
    mesh, placements = MESHES[where]
    for k, shape in enumerate(itertools.product((1, 2), (1, 8), (1, 3))):
        dtype = (D.Float, D.Half, D.Double)[(k + k // 2) % 3]
        operands = draw([(2, 8, 3, 8), (2, groups, 4, 8), (2, groups, 4, 8)], dtype, k)
        (bias,) = draw([(*shape, 4)], dtype)
        beside = {"bias": bias, "mask": bias > -0.5}
        named = {n: beside[n] for n in (("bias",), ("mask",), ("bias", "mask"))[k % 3]}
        with simulate(mesh.size) as world:
            how = {"is_static": bool(k % 2), "is_grouped": groups < 8}
            results = world.run(run_beside, operands, named, names, where, **how)
        wide = [t.double() for t in operands]
        wide[1:] = [t.repeat_interleave(8 // groups, 1) for t in wide[1:]]
        expected = attend(wide, added=named.get("bias"), mask=named.get("mask"))
        for rank, outs in enumerate(results):
            check(outs, [block(e, rank, mesh, placements) for e in expected], dtype)


def block(
    whole: torch.Tensor, rank: int, mesh: DeviceMesh, placements: list[Shard | Replicate]
) -> torch.Tensor:
    """Returns a rank's shard of a tensor, on devices in row-major order."""
    places = torch.unravel_index(torch.tensor(rank), mesh.shape)
    for size, place, placement in zip(mesh.shape, places, placements, strict=True):
        if isinstance(placement, Shard):
            whole = whole.chunk(size, placement.dim)[int(place)]
    return whole


@pytest.mark.parametrize(("heads", "groups"), [(12, 3), (8, 1)])
def test_heads_of_keys_that_devices_cannot_share_evenly_are_refused(
    heads: int, groups: int
) -> None:
    """Otherwise a rank would need key heads that another rank has."""
    words = r"sdpfa_(fwd|bwd): \d heads? of its (key|value), .*cut batches instead of heads; or"
    with simulate(2) as world, pytest.raises(FuserError, match=words):
        world.run(run_cut, ("query",), heads, groups)


def run_few(
    operands: Tensors,
    how: str,
    is_static: bool,
    placements: list[Shard | Replicate],
) -> list[torch.Tensor]:
    """Runs the forward on a rank of four, with sharded queries and replicated keys and values."""
    shape: Any = [[0, 1], [2, 3]] if len(placements) == 2 else range(4)
    mesh = DeviceMesh(shape)
    with FusionDefinition() as fd:
        q, k, v = (fd.from_pytorch(t, is_static) for t in operands)
        shard(q, mesh, placements)
        keys = [k, v]
        for tv in keys:
            tv.set_device_mesh(mesh)
        if how == "copied":
            keys = [fd.ops.mul(tv, 1.0) for tv in keys]
        if how == "repeated":
            n, groups, rows, width = operands[1].shape
            keys = [
                fd.ops.reshape(
                    fd.ops.expand(
                        fd.ops.broadcast(tv, [False, False, True, False, False]),
                        [n, groups, 2, rows, width],
                    ),
                    [n, 2 * groups, rows, width],
                )
                for tv in keys
            ]
        for out in fd.ops.sdpfa_fwd(q, *keys, is_causal=False, enable_gqa=True):
            fd.add_output(out)
    return fd.execute([shard_tensor(operands[0], q), *operands[1:]])


@pytest.mark.finding("G21")
@pytest.mark.parametrize("is_static", [True, False])
@pytest.mark.parametrize("how", ["given", "copied"])
def test_fewer_heads_of_keys_than_devices_are_told_what_to_do(how: str, is_static: bool) -> None:
    operands = draw([(2, 8, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)])
    with simulate(4) as world, pytest.raises(FuserError) as error:
        world.run(run_few, operands, how, is_static, [Shard(1)])
    (told,) = [row for row in str(error.value).splitlines() if "sdpfa_fwd: " in row]
    for words in (
        "sdpfa_fwd: 2 heads of its key, ",
        "cannot be shared by the 4 devices of DeviceMesh{0 1 2 3} along mesh_x",
        "heads of its query, input 0 (T0_g_float)",
        "Either cut heads over 2 devices, and batches over the others",
        "or repeat each head of keys and values 2 times before the op, to have 4",
        "by fd.ops.broadcast with a new axis after the heads, then expand and reshape",
        f"(user code at {__file__}:",
    ):
        assert words in told, told
    assert "input 1 (T1_g_float)" in told  # which is cut, by way of the copy
    assert "{i" not in told and "iS" not in told


@pytest.mark.finding("G21")
@pytest.mark.parametrize("is_static", [True, False])
@pytest.mark.parametrize("how", ["repeated", "fewer"])
def test_that_advice_runs(how: str, is_static: bool) -> None:
    operands = draw([(2, 8, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)])
    placements: list[Shard | Replicate] = [Shard(1)]
    if how == "fewer":
        placements.insert(0, Shard(0))
    mesh = DeviceMesh([[0, 1], [2, 3]] if how == "fewer" else range(4))
    with simulate(4) as world:
        results = world.run(run_few, operands, how, is_static, placements)
    wide = [t.double() for t in operands]
    wide[1:] = [t.repeat_interleave(4, 1) for t in wide[1:]]
    expected = attend(wide)
    for rank, outs in enumerate(results):
        check(outs, [block(e, rank, mesh, placements) for e in expected], D.Float)


def run_shared(*, backward: bool) -> torch.Tensor:
    mesh, shapes = DeviceMesh([0, 1]), shapes_of(4, 1)
    tensors: dict[str, TensorView] = {}

    def place(found: dict[str, TensorView]) -> None:
        tensors.update(found)
        for name, tv in found.items():
            tv.set_device_mesh(mesh)
            if name in ("query", "grad"):
                cut(tv, 1, mesh)

    fd = define(sizes=(4, 1), place=place, backward=backward)
    given = zip(draw(shapes), tensors.values(), strict=False)
    return fd.execute([shard_tensor(t, tv) for t, tv in given])[0]


def test_one_head_of_keys_that_is_declared_is_read_on_all_devices() -> None:
    with simulate(2) as world:
        results = world.run(run_shared, backward=False)
    out = expected_of(draw(shapes_of(4, 1)), is_causal=False)[0]
    for rank, got in enumerate(results):
        torch.testing.assert_close(got.double(), shards(out, got, rank, 2), rtol=1e-5, atol=1e-5)
        assert got.shape[1] == 2


def test_the_gradient_of_a_head_that_devices_share_is_refused() -> None:
    with simulate(2) as world, pytest.raises(UnsupportedError, match="a part of its gradient"):
        world.run(run_shared, backward=True)
