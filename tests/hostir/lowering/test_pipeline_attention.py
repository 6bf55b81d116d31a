"""Attention among other ops, on several ranks, in graphs, as text, and what it is said to cost."""

# Ops are called with what they refuse, and with options that are put together.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fuser import DataType, FusionDefinition, ParallelType, TensorView, ops
from fuser.multidevice import (
    Communicator,
    DeviceMesh,
    MultiDeviceExecutor,
    MultiDeviceExecutorParams,
    shard_tensor,
)
from fuser.support.errors import FuserError, UnsupportedError, VerifyError
from hostir import Allocate, HostIrContainer, HostIrEvaluator
from hostir.cost.machine_model import H200
from hostir.cost.op_costs import cost_of
from hostir.ir.parser import parse
from hostir.ir.program import equal
from hostir.ir.verifier import verify
from hostir.runtime import cuda_graphs
from multidevice import simulate
from tests.support.attention_reference import attend, check, define, draw, gradients
from tests.support.cuts import cut, shards
from tests.support.stand_in_graphs import CpuGraphs, stand_in

pytestmark = pytest.mark.from_text

D = DataType
SHAPES = ((4, 2, 4, 6), (4, 2, 8, 6), (4, 2, 8, 6), (4, 2, 4, 6))
OPERANDS = ("query", "key", "value", "grad")
RESULTS = ("out", "log_sumexp", "grad_query", "grad_key", "grad_value")
TENSORS = (*OPERANDS, *RESULTS)


def expected_of(given: Sequence[torch.Tensor], *, is_causal: bool) -> list[torch.Tensor]:
    wide = [t.double() for t in given[:3]]
    return [
        *attend(wide, is_causal=is_causal),
        *gradients(wide, given[3], is_causal=is_causal),
    ]


# ------------------------------------------------------------------ several ranks
def run_cut(cuts: dict[str, int], *, is_causal: bool) -> tuple[list[Any], dict[str, int], str]:
    """Runs forward and backward on a rank, its operands cut as told; returns its results and what
    each is of the whole."""
    mesh = DeviceMesh(range(Communicator.instance().size()))
    tensors: dict[str, TensorView] = {}

    def place(found: dict[str, TensorView]) -> None:
        tensors.update(found)
        for name in OPERANDS:
            found[name].set_device_mesh(mesh)
        for name, axis in cuts.items():
            cut(found[name], axis, mesh)

    fd = define(is_causal=is_causal, place=place)
    given = [shard_tensor(t, tensors[n]) for t, n in zip(draw(SHAPES), OPERANDS, strict=True)]
    outs = [fd.execute(given) for _ in range(3)][-1]
    return outs, fd.fec.statistics(), fd.fec.host_program().full_text()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_batches_and_heads_are_cut_without_communication(axis: int, is_causal: bool) -> None:
    with simulate(2) as world:
        results = world.run(run_cut, dict.fromkeys(OPERANDS, axis), is_causal=is_causal)
    expected = expected_of(draw(SHAPES), is_causal=is_causal)
    for rank, (outs, counts, text) in enumerate(results):
        whole = [shards(e, o, rank, 2) for e, o in zip(expected, outs[:2] + outs[4:], strict=True)]
        assert all(o.shape[axis] * 2 == SHAPES[0][axis] for o in outs[:2] + outs[4:])
        check(outs, whole, D.Float)
        assert counts["collectives"] == 0 and counts["segments"] == 2
        assert text == results[0][2]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("name", TENSORS)
def test_any_cut_of_any_tensor(name: str, axis: int, is_causal: bool) -> None:
    """Axes that attention needs whole are gathered, and its results are cut again."""
    if name == "log_sumexp" and axis == 3:
        return
    with simulate(2) as world:
        results = world.run(run_cut, {name: axis}, is_causal=is_causal)
    expected = expected_of(draw(SHAPES), is_causal=is_causal)
    for rank, (outs, counts, _) in enumerate(results):
        computed = outs[:2] + outs[4:]
        check(
            outs, [shards(e, o, rank, 2) for e, o in zip(expected, computed, strict=True)], D.Float
        )
        is_gathered = axis >= 2 and name in OPERANDS
        gathered_again = int(name in ("out", "log_sumexp") and axis >= 2)
        assert counts["collectives"] == (1 if is_gathered else gathered_again), counts
        if name in RESULTS:
            mine = computed[RESULTS.index(name)]
            assert mine.shape[axis] * 2 == expected[RESULTS.index(name)].shape[axis]


def run_grid() -> list[torch.Tensor]:
    mesh = DeviceMesh([[0, 1], [2, 3]])
    tensors: dict[str, TensorView] = {}

    def place(found: dict[str, TensorView]) -> None:
        tensors.update(found)
        for name in OPERANDS:
            cut(found[name], 0, mesh, ParallelType.mesh_y)
            cut(found[name], 2, mesh, ParallelType.mesh_x)

    fd = define(is_causal=True, place=place)
    given = [shard_tensor(t, tensors[n]) for t, n in zip(draw(SHAPES), OPERANDS, strict=True)]
    assert fd.execute(given) is not None
    assert fd.fec.statistics()["collectives"] == 0
    return fd.execute(given)


def test_batches_and_heads_on_two_axes_of_a_mesh() -> None:
    with simulate(4) as world:
        results = world.run(run_grid)
    expected = expected_of(draw(SHAPES), is_causal=True)
    for rank, outs in enumerate(results):
        n, h = divmod(rank, 2)
        check(outs, [e[2 * n : 2 * n + 2, h : h + 1] for e in expected], D.Float)


def run_dropout(p: object, size: int) -> None:
    mesh = DeviceMesh(range(size))
    with FusionDefinition() as fd:
        tensors = [fd.define_tensor([-1] * 4) for _ in range(3)]
        given = fd.define_scalar(dtype=D.Double) if p is None else p
        fd.add_output(fd.ops.sdpfa_fwd(*tensors, dropout_p=given)[0])  # pyright: ignore
        for tv in tensors:
            tv.set_device_mesh(mesh)
    fd.execute([*draw([(2, 2, 4, 4)] * 3), *([0.0] if p is None else [])])


@pytest.mark.parametrize("p", [0.5, None])
def test_dropout_on_several_ranks_is_refused(p: float | None) -> None:
    with simulate(2) as world, pytest.raises(UnsupportedError, match="sdpfa_fwd with dropout_p"):
        world.run(run_dropout, p, 2)
    with simulate(1) as world:
        world.run(run_dropout, p, 1)


def test_dropout_on_several_ranks_by_hand_is_refused() -> None:
    hic = HostIrContainer()
    with hic:
        mesh = DeviceMesh([0, 1])
        query, key, value = (hic.input([2, 2, 4, 6], mesh=mesh) for _ in range(3))
        results = ops.sdpfa_fwd(query, key, value, dropout_p=0.5)
        hic.append(*map(Allocate, results), results[0])
        hic.add_output(results[0])

    def run() -> None:
        HostIrEvaluator(hic, Communicator.instance(), device="cpu").run(draw([(2, 2, 4, 6)] * 3))

    with simulate(2) as world, pytest.raises(UnsupportedError, match="sdpfa_fwd with dropout_p"):
        world.run(run)


def test_seeds_are_not_sent() -> None:
    def run() -> None:
        with FusionDefinition() as fd:
            tensors = [fd.define_tensor([-1] * 4) for _ in range(3)]
            *_, seed, _ = fd.ops.sdpfa_fwd(*tensors)
            fd.add_output(seed)
            for tv in tensors:
                tv.set_device_mesh(DeviceMesh([0]))
            seed.set_device_mesh(DeviceMesh([1]))
        fd.execute(draw([(2, 2, 4, 4)] * 3))

    def update() -> None:
        mesh = DeviceMesh([0, 1])
        with FusionDefinition() as fd:
            seed, whole = (fd.define_tensor([4], dtype=D.UInt64, contiguity=True) for _ in range(2))
            fd.add_output(seed, whole)
            cut(seed, 0, mesh)
            whole.set_device_mesh(mesh)
        fd.execute([torch.zeros(n, dtype=torch.uint64) for n in (2, 4)])

    for job in (run, update):
        with (
            simulate(2) as world,
            pytest.raises(UnsupportedError, match="can be stored, but not sent"),
        ):
            world.run(job)


@pytest.mark.parametrize("name", ["query", "out", "grad_key"])
@pytest.mark.parametrize("axis", range(4))
def test_streams(name: str, axis: int) -> None:
    """Attention is computed at once: an operand's steps end there, and a result has none."""

    def place(found: dict[str, TensorView]) -> None:
        found[name].outer_split(axis, 2)
        found[name].axis(axis).parallelize(ParallelType.stream)

    given = draw(SHAPES)
    fd = define(is_causal=True, place=place)
    if name != "query":
        with pytest.raises(UnsupportedError, match=r"sdpfa_.wd cannot be computed in steps"):
            fd.execute(given)
        return
    check(fd.execute(given), expected_of(given, is_causal=True), D.Float)


# ------------------------------------------------------------------ one program
def _block() -> FusionDefinition:
    """A projection's heads, attention, and what is added: x [b, s, h * e] -> [b, s, h * e]."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1, 24], contiguity=True)
        weights = [fd.define_tensor([24, 24], contiguity=True) for _ in range(4)]
        b, s = fd.ops.size(x, 0), fd.ops.size(x, 1)
        q, k, v = (
            fd.ops.permute(fd.ops.reshape(fd.ops.linear(x, w), [b, s, 4, 6]), [0, 2, 1, 3])
            for w in weights[:3]
        )
        out = fd.ops.sdpfa_fwd(q, k, v, is_causal=True)[0]
        merged = fd.ops.reshape(fd.ops.permute(out, [0, 2, 1, 3]), [b, s, 24])
        fd.add_output(fd.ops.add(fd.ops.linear(merged, weights[3]), x))
    return fd


def _block_meaning(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    b, s, _ = x.shape
    x, *wide = (t.double() for t in (x, *weights))
    read = [(x @ w.T).view(b, s, 4, 6).transpose(1, 2) for w in wide[:3]]
    out, _ = attend(read, is_causal=True)
    return out.transpose(1, 2).reshape(b, s, 24) @ wide[3].T + x


def test_heads_are_views_and_the_text_runs() -> None:
    """Nothing is packed before or behind attention: one kernel, which adds."""
    fd = _block()
    given = [*draw([(2, 5, 24)]), *(t / 5 for t in draw([(24, 24)] * 4, seed=1))]
    (out,) = fd.execute(given)
    torch.testing.assert_close(out.double(), _block_meaning(*given), rtol=1e-5, atol=1e-5)
    counts = fd.fec.statistics()
    assert (counts["kernels"], counts["library_calls"], counts["aliases"]) == (1, 5, 8)
    program = fd.fec.host_program()
    text = program.full_text()
    again = parse(text)
    assert equal(again, program) and again.full_text() == text
    assert "sdpa(" in str(program) and "is_causal = true" in str(program)
    (from_text,) = HostIrEvaluator(again, device="cpu").run(given)
    assert torch.equal(out, from_text)
    # Other sizes take the steps of the first.
    for size in ((2, 7), (1, 3), (4, 1), (3, 12)):
        given[0] = draw([(*size, 24)], seed=size[1])[0]
        for _ in range(2):
            (out,) = fd.execute(given)
            torch.testing.assert_close(out.double(), _block_meaning(*given), rtol=1e-5, atol=1e-5)


def test_grouped_heads_and_a_mask_that_kernels_make() -> None:
    """Keys and values of 2 heads, each read by 3 heads of queries; far ones do not count."""
    query, key, value = given = draw([(2, 6, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8)])
    with FusionDefinition() as fd:
        q, k, v = (fd.define_tensor([-1] * 4, contiguity=True) for _ in range(3))
        n, s = fd.ops.size(k, 0), fd.ops.size(k, 2)

        def repeated(x: TensorView) -> TensorView:
            grouped = fd.ops.broadcast(x, [False, False, True, False, False])
            grouped = fd.ops.expand(grouped, [n, 2, 3, s, 8])
            return fd.ops.reshape(grouped, [n, 6, s, 8])

        places = fd.ops.iota(s)
        rows, columns = (fd.ops.broadcast(places, f) for f in ([False, True], [True, False]))
        near = fd.ops.lt(fd.ops.abs(fd.ops.sub(rows, columns)), 2)
        mask = fd.ops.broadcast(near, [True, True, False, False])
        out, log_sumexp, *_ = fd.ops.sdpfa_fwd(q, repeated(k), repeated(v), mask=mask)
        fd.add_output(fd.ops.mul(out, 2.0))
        fd.add_output(fd.ops.exp(log_sumexp))
    places = torch.arange(5)
    near = (places[:, None] - places).abs() < 2
    wide = [query.double(), *(t.double().repeat_interleave(3, 1) for t in (key, value))]
    expected, sums = attend(wide, mask=near)
    for _ in range(3):
        outs = fd.execute(given)
        torch.testing.assert_close(outs[0].double(), expected * 2, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(outs[1].double(), sums.exp(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backward", [False, True])
def test_text_of_forward_and_backward(backward: bool) -> None:
    fd = define(backward=backward, is_causal=True, scale=0.5, dropout_p=0.0)
    given = draw(SHAPES)[: 4 if backward else 3]
    outs = fd.execute(given)
    program = fd.fec.host_program()
    text = program.full_text()
    again = parse(text)
    assert equal(again, program) and again.full_text() == text
    for one, other in zip(outs, HostIrEvaluator(again, device="cpu").run(given), strict=True):
        assert one.dtype == other.dtype and one.tolist() == other.tolist()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[CpuGraphs]:
    monkeypatch.setattr(cuda_graphs, "MIN_STEPS", 1)
    return stand_in(monkeypatch)


def test_graphs_repeat_what_draws_nothing(made: list[CpuGraphs]) -> None:
    fd, given = define(is_causal=True), draw(SHAPES)
    expected = expected_of(given, is_causal=True)
    for _ in range(30):
        outs = fd.execute(given)
        check(outs, expected, D.Float)
        del outs
    assert any(line.startswith("captured: ") for line in fd.cuda_graphs()), fd.cuda_graphs()
    assert sum(graph.launches for maker in made for graph in maker.made) > 5


def test_graphs_do_not_repeat_dropout(made: list[CpuGraphs]) -> None:
    fd, given = define(dropout_p=0.5), draw(SHAPES)
    seen = [fd.execute(given)[0] for _ in range(30)]
    assert not any(torch.equal(a, seen[0]) for a in seen[1:])
    (line,) = fd.cuda_graphs()
    assert line.startswith("not captured: sdpfa_fwd") and "generator" in line
    assert not made or not any(maker.made for maker in made)


# ------------------------------------------------------------------ by hand
def by_hand(shapes: dict[str, list[int]]) -> HostIrContainer:
    hic = HostIrContainer()
    with hic:
        query, key, value = (hic.input(shapes[name]) for name in OPERANDS[:3])
        results = ops.sdpfa_fwd(query, key, value)
        hic.append(*map(Allocate, results), results[0])
        for tv in results:
            hic.add_output(tv)
    return hic


def test_a_program_by_hand() -> None:
    shape = [2, 2, 4, 6]
    hic = by_hand(dict.fromkeys(OPERANDS, shape))
    verify(hic)
    given = draw([shape] * 3)
    outs = HostIrEvaluator(hic, device="cpu").run(given)
    check(outs, attend([t.double() for t in given]), D.Float)


def test_texts_with_values_of_other_kinds_are_refused() -> None:
    fd = define(is_causal=True, scale=0.5)
    fd.execute(draw(SHAPES))
    text = fd.fec.host_program().full_text()
    tensor = text[text.index("T0_g_float") : text.index("]", text.index("T0_g_float")) + 1]
    call = text.index("sdpa(")
    key = text[text.index("T1_g_float", call) : text.index("]", text.index("T1_g_float", call)) + 1]
    at = text.index("dropout_p = double(0)", call)
    changes = [
        text[:at] + f"dropout_p = {tensor}" + text[at + len("dropout_p = double(0)") :],
        text[:at] + "bias = double(0),\n" + text[at:],
        text[:at] + f"mask = {key},\n" + text[at:],
        text.replace("is_causal = true", f"is_causal = {key}"),
        text.replace("scale = double(0.5)", f"scale = {key}"),
    ]
    for changed in changes:
        with pytest.raises(FuserError, match=r"sdpfa_.wd: .* must (be|have) "):
            verify(parse(changed))


def test_results_are_all_allocated_or_none() -> None:
    hic = HostIrContainer()
    with hic:
        query, key, value = (hic.input([2, 2, 4, 6]) for _ in range(3))
        results = ops.sdpfa_fwd(query, key, value)
        hic.append(results[0])
        hic.add_output(results[0])
    given = draw([(2, 2, 4, 6)] * 3)
    for _ in range(3):
        (out,) = HostIrEvaluator(hic, device="cpu").run(given)
        expected, _ = attend([t.double() for t in given])
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    some = HostIrContainer()
    with some:
        query, key, value = (some.input([2, 2, 4, 6]) for _ in range(3))
        results = ops.sdpfa_fwd(query, key, value)
        some.append(Allocate(results[0]), results[0])
        some.add_output(results[0])
    with pytest.raises(VerifyError, match="has no buffer"):
        verify(some)


def test_the_executor_that_takes_definitions_as_they_stand() -> None:
    fd, given = define(is_causal=True), draw(SHAPES)
    executor = MultiDeviceExecutor(fd.fusion, MultiDeviceExecutorParams())
    outs: list[torch.Tensor] = []
    for _ in range(3):
        outs = executor.run(given)
        check(outs, expected_of(given, is_causal=True), D.Float)
    with FusionDefinition() as alone:
        query, key, value = (alone.define_tensor([-1] * 4) for _ in range(3))
        alone.add_output(alone.ops.sdpfa_fwd(query, key, value, is_causal=True)[0])
    (out,) = MultiDeviceExecutor(alone.fusion, MultiDeviceExecutorParams()).run(given[:3])
    assert torch.equal(out, outs[0])


def test_results_that_attention_does_not_make() -> None:
    hic = by_hand({key: [2, 2, 4, 6] for key in ("query", "key", "value")})
    op = next(op for op in hic.ops if op.name == "sdpfa_fwd")
    places = [k for k, o in enumerate(hic.ops) if o is op]

    def verify_with(**changes: TensorView) -> None:
        changed = op.replace(**changes)
        allocated = [Allocate(tv) for tv in changes.values() if tv in changed.outputs]
        before, after = hic.ops[: places[0]], hic.ops[places[0] + 1 :]
        program = HostIrContainer(hic.values, (*before, *allocated, changed, *after), {})
        program.values.outputs[:] = changed.outputs
        verify(program)

    with hic:
        rows, dtype = hic.tensor([2, 2, 5, 6]), hic.tensor([2, 2, 4, 6], D.Half)
        lse = hic.tensor([2, 2, 4], D.Double)
    verify_with()
    with pytest.raises(VerifyError, match=r"sdpfa_fwd: .*must have the same size"):
        verify_with(out=rows)
    with pytest.raises(VerifyError, match=r"out must have the dtype float, but .* is __half"):
        verify_with(out=dtype)
    with pytest.raises(VerifyError, match="log_sumexp must have the dtype float"):
        verify_with(log_sumexp=lse)


# ------------------------------------------------------------------ costs
def test_costs() -> None:
    n, h, rows, columns, e, v = 2, 3, 256, 512, 64, 32
    extents = {"n": n, "h": h, "l": rows, "s": columns, "e": e, "v": v}
    shapes = [[extents[c] for c in letters] for letters in ("nhle", "nhse", "nhsv", "nhlv")]
    for is_causal in (False, True):
        with FusionDefinition() as fd:
            q, k, w, g = (fd.define_tensor(s, contiguity=True, dtype=D.BFloat16) for s in shapes)
            found = ops.sdpfa_fwd(q, k, w, is_causal=is_causal)
            grads = ops.sdpfa_bwd(g, q, k, w, *found[:2], None, is_causal, *found[2:], None)
            for tv in grads:
                fd.add_output(tv)
        forward, backward = fd.fusion.exprs

        def sizes(tv: TensorView) -> tuple[int, ...]:
            return tuple(int(str(x)) for x in tv.shape())

        pairs = n * h * rows * columns // (2 if is_causal else 1)
        costs = [cost_of(op, sizes, H200) for op in (forward, backward)]
        assert costs[0] is not None and costs[1] is not None
        assert costs[0].flops == 2 * pairs * (e + v)
        assert costs[1].flops == 2 * pairs * (3 * e + 2 * v)
        read = 2 * sum(math.prod(s) for s in shapes[:3])
        kept = 2 * math.prod(shapes[3]) + 4 * n * h * rows + 24
        assert costs[0].nbytes == read + kept
        assert costs[1].nbytes == 2 * read + kept + 2 * math.prod(shapes[3])
        assert costs[0].seconds > H200.matmul_launch_s
