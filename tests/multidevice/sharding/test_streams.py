"""Stream axes: how tensors get them, which memory a step sees, and what each step computes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from fuser import ops
from fuser.ir.binding import bind_inputs
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.ops.nodes import LinearOp, Reshard
from fuser.ir.scalar import constructors as sc
from fuser.ir.text.parser import parse_fusion
from fuser.ir.text.printer import fusion_text
from fuser.ir.types import ParallelType
from fuser.kernels.executor import FusedKernelExecutor
from fuser.schedule.registry import find_scheduler
from fuser.support.errors import ShardingError, UnsupportedError
from multidevice.sharding import queries
from multidevice.sharding.passes.decompose import decompose_reshardings
from multidevice.sharding.passes.localize import localize
from multidevice.sharding.passes.pipeline import shard_fusion
from multidevice.sharding.placement import Block
from multidevice.sharding.propagation import propagate_shardings
from multidevice.sharding.reshard import communication_type, is_device_to_stream, is_exchange
from multidevice.sharding.streams import (
    StreamAxis,
    StreamLoops,
    is_allocated_per_step,
    scatters_steps,
    stream_axis,
)
from tests.support import sharded_fusions as models
from tests.support import step_by_step
from tests.support.rank_by_rank import X, mesh, run, shard_axis

STREAM = ParallelType.stream
BLOCKS: tuple[Block, ...] = ("first", "last")


def stream(tv: TensorView, axis: int, count: int | None = None) -> None:
    """Makes a loop axis, as a whole or in `count` blocks, a stream axis."""
    if count is not None:
        tv.outer_split(axis, count)
    tv.axis(axis).parallelize(STREAM)


def loops(tv: TensorView) -> str:
    """Returns the loop axes as text such as `s3 x2 S rS`.

    `s3` is a stream of 3 steps, `x2` an axis over 2 devices, `S` is serial, and `r` marks
    reductions.
    """
    letters = {X: "x", STREAM: "s"}
    return " ".join(
        ("r" if a.is_reduction() else "")
        + (f"{letters[a.ptype]}{a.size}" if a.ptype in letters else "S")
        for a in tv.domain.loop
    )


# ------------------------------------------------------------------ allocation: three rules
def sum_and_half() -> tuple[Fusion, list[TensorView]]:
    fusion = Fusion()
    with FusionGuard(fusion):
        tv0 = models.inputs({"x": [-1, -1, -1]})["x"]
        tv1 = models.tensor(ops.add(tv0, 1.0))
        tv2 = models.tensor(ops.sum(tv1, 2))
        tv3 = models.tensor(ops.div(tv1, 2.0))
        fusion.add_output(tv2)
        fusion.add_output(tv3)
    return fusion, [tv0, tv1, tv2, tv3]


def check_sum_and_half(fusion: Fusion, shape: Sequence[int]) -> None:
    x = torch.randn(*shape, dtype=torch.float64)
    done = run(fusion, [x])
    torch.testing.assert_close(done.outputs[0], (x + 1).sum(2))
    torch.testing.assert_close(done.outputs[1], (x + 1) / 2)


@pytest.mark.parametrize("shape", [(4, 3, 2), (5, 3, 2), (1, 2, 3)])
def test_an_intermediate_that_all_read_in_step_is_allocated_per_step(shape: Sequence[int]) -> None:
    fusion, tensors = sum_and_half()
    stream(tensors[0], 0, 2)
    check_sum_and_half(fusion, shape)
    for tv in tensors:
        assert tv.axis(0).is_stream, tv
        if tv is tensors[1]:
            assert tv.domain.allocation == tv.domain.loop
            assert tv.domain.contiguity == (True,) * 4
        else:
            assert tv.domain.allocation in ((), tv.domain.logical), tv
    assert [is_allocated_per_step(tv) for tv in tensors] == [False, True, False, False]


@pytest.mark.parametrize("shape", [(4, 6, 2), (5, 3, 2)])
def test_an_intermediate_that_one_reads_out_of_step_is_allocated_whole(
    shape: Sequence[int],
) -> None:
    fusion, tensors = sum_and_half()
    stream(tensors[0], 0, 2)
    stream(tensors[2], 1, 2)
    check_sum_and_half(fusion, shape)
    for tv in tensors:
        assert tv.axis(0).is_stream, tv
        assert tv.domain.allocation in ((), tv.domain.logical), tv


# ------------------------------------------------------------------ propagation
def test_a_stream_on_a_weight_reaches_the_result() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        t = models.inputs({"x": [5, 7], "w": [7, 9]})
        out = models.tensor(ops.matmul(t["x"], t["w"]))
        fusion.add_output(out)
    stream(t["w"], 1, 3)
    propagate_shardings(fusion)
    assert loops(out) == "S s3 S rS"
    assert loops(t["x"]) == "S S"


def test_a_stream_on_a_result_reaches_intermediates_and_inputs() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        t = models.inputs({"x": [5, 7], "w": [7, 9], "v": [9, 2]})
        inner = models.tensor(ops.matmul(ops.sin(t["x"]), t["w"]))
        out = models.tensor(ops.matmul(inner, t["v"]))
        fusion.add_output(out)
    stream(out, 0, 2)
    facts = propagate_shardings(fusion)
    assert loops(inner) == "s2 S S rS"
    assert loops(t["x"]) == "s2 S S"
    assert (loops(t["w"]), loops(t["v"])) == ("S S", "S S")
    assert [str(f) for f in facts[inner]] == [f"streamIdx x 2 backward from {out.label}"]


def test_the_inputs_of_a_user_take_streams_although_their_mesh_is_set() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        t = models.inputs({"x": [4, 6]})
        out = models.tensor(ops.sin(t["x"]))
        fusion.add_output(out)
    models.set_mesh(mesh(2), t["x"], out)
    shard_axis(t["x"], 1, 2)
    shard_axis(out, 1, 2)
    stream(out, 0, 2)
    propagate_shardings(fusion)
    assert loops(t["x"]) == "s2 S x2 S"


def test_streams_of_two_operands_meet_and_one_stays() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        t = models.inputs({"x": [4, 6], "y": [4, 6]})
        out = models.tensor(ops.add(t["x"], t["y"]))
        fusion.add_output(out)
    stream(t["x"], 0, 2)
    stream(t["y"], 1, 3)
    x, y = (torch.randn(4, 6, dtype=torch.float64) for _ in range(2))
    torch.testing.assert_close(run(fusion, [x, y]).outputs[0], x + y)
    assert loops(out) == "s2 S S"
    assert [op.name for op in fusion.exprs] == ["reshard", "add"]


def test_two_stream_axes_of_one_tensor_are_refused() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        x = models.inputs({"x": [4, 6]})["x"]
        fusion.add_output(ops.sin(x))
    stream(x, 1, 3)
    stream(x, 0)
    with pytest.raises(ShardingError, match=r"T0.* on stream, but only one axis"):
        shard_fusion(fusion)


def test_a_stream_of_blocks_of_a_given_size_is_refused() -> None:
    """Blocks of 4 of 9 indices are 4, 4 and 1; a split into 3 blocks would give 3, 3 and 3."""
    fusion = Fusion()
    with FusionGuard(fusion):
        x = models.inputs({"x": [9, 6]})["x"]
        fusion.add_output(ops.sin(x))
    x.split(0, 4)
    x.axis(0).parallelize(STREAM)
    with pytest.raises(UnsupportedError, match="outer_split"):
        shard_fusion(fusion)


def test_a_stream_that_was_not_asked_for_ends_at_a_reshape_that_makes_other_blocks() -> None:
    """A propagated stream axis ends at a reshape whose axis has no such blocks."""
    fusion = Fusion()
    with FusionGuard(fusion):
        t = models.inputs({"x": [2, 3, 8], "w": [2, 4, 3]})
        y = models.tensor(ops.reshape(ops.sin(t["x"]), [2, 3, 2, 4]))
        heads = models.tensor(ops.permute(y, [0, 2, 1, 3]))
        out = models.tensor(ops.matmul(heads, t["w"]))
        fusion.add_output(out)
    stream(t["w"], 0, 4)
    x, w = (torch.randn(s, dtype=torch.float64) for s in ((2, 3, 8), (2, 4, 3)))
    want = x.sin().reshape(2, 3, 2, 4).permute(0, 2, 1, 3) @ w
    torch.testing.assert_close(run(fusion, [x, w]).outputs[0], want)
    assert stream_axis(y) is None
    assert stream_axis(out) == StreamAxis(1, stream_axis(out).count, is_logical=False)  # pyright: ignore


def test_a_stream_that_was_not_asked_for_ends_at_what_cannot_be_computed_in_steps() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        t = models.inputs({"x": [6, 4], "y": [7, 4]})
        padded = models.tensor(ops.pad(ops.sin(t["x"]), [0, 0, 1, 0]))
        out = models.tensor(ops.mul(padded, t["y"]))
        fusion.add_output(out)
    stream(out, 0, 3)
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)
    want = torch.nn.functional.pad(x.sin(), [0, 0, 1, 0]) * y
    torch.testing.assert_close(run(fusion, [x, y]).outputs[0], want)
    assert stream_axis(padded) is None
    assert stream_axis(out) == StreamAxis(0, stream_axis(out).count, is_logical=False)  # pyright: ignore


# ------------------------------------------------------------------ comparison
def test_equal_outer_splits_are_the_same_and_others_are_not() -> None:
    def differ(producer: tuple[int, int], consumer: tuple[int, int]) -> bool:
        fusion = Fusion()
        with FusionGuard(fusion):
            x = models.inputs({"x": [10, 9]})["x"]
            out = models.tensor(ops.set(x))
        stream(x, *producer)
        stream(out, *consumer)
        (op,) = fusion.exprs
        assert not queries.is_resharding(op)
        return queries.have_different_shardings(op, 0, {STREAM})

    assert not differ((0, 3), (0, 3))
    assert not differ((1, 4), (1, 4))
    assert differ((0, 3), (1, 3))
    assert differ((0, 3), (0, 2))


# ------------------------------------------------------------------ overlap
T, H, D = 8, 4, 2


def test_ring_column_and_sequence_parallel_linear_forward() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        t = models.inputs({"x": [T, H], "w": [4 * H, H]})
        out = models.tensor(ops.linear(t["x"], t["w"]))
        fusion.add_output(out)
    models.set_mesh(mesh(D), *t.values())
    shard_axis(t["x"], 0, D)
    shard_axis(t["w"], 0, D)
    stream(out, 0, D)
    propagate_shardings(fusion)
    assert loops(out) == "s2 S x2 S rS"
    x, w = torch.randn(T, H, dtype=torch.float64), torch.randn(4 * H, H, dtype=torch.float64)
    done = run(fusion, [x, w])
    torch.testing.assert_close(done.outputs[0], x @ w.t())
    gathered = fusion.exprs[0]
    assert isinstance(gathered, Reshard) and is_device_to_stream(gathered)
    assert communication_type(gathered) == "Broadcast"
    assert is_allocated_per_step(gathered.out)
    found = StreamLoops(fusion)
    assert found.loop_of(gathered) == found.loop_of(fusion.exprs[1]) is not None


def test_ring_column_parallel_weight_gradient() -> None:
    """w' = out^T @ x with the contraction in steps: out gets the same stream axis."""
    fusion = Fusion()
    with FusionGuard(fusion):
        t = models.inputs({"out": [T, 4 * H], "x": [T, H]})
        w = models.tensor(ops.matmul(ops.permute(t["out"], [1, 0]), t["x"]))
        fusion.add_output(w)
    models.set_mesh(mesh(D), *t.values(), w)
    shard_axis(t["out"], 1, D)
    shard_axis(t["x"], 0, D)
    shard_axis(w, 0, D)
    stream(w, 3, D)
    propagate_shardings(fusion)
    assert loops(w) == "x2 S S rs2 rS"
    assert loops(t["out"]) == "s2 S x2 S"
    out, x = torch.randn(T, 4 * H, dtype=torch.float64), torch.randn(T, H, dtype=torch.float64)
    done = run(fusion, [out, x])
    torch.testing.assert_close(done.outputs[0], out.t() @ x)


def test_ring_row_parallel_weight_gradient() -> None:
    """w' = x^T @ y: the stream axis of the rows of x becomes one of the contraction."""
    fusion = Fusion()
    with FusionGuard(fusion):
        t = models.inputs({"y": [T, H], "x": [T, 4 * H]})
        w = models.tensor(ops.matmul(ops.permute(t["y"], [1, 0]), t["x"]))
        fusion.add_output(w)
    models.set_mesh(mesh(D), *t.values())
    shard_axis(t["y"], 0, D)
    shard_axis(t["x"], 1, D)
    stream(t["x"], 0, D)
    propagate_shardings(fusion)
    assert loops(w) == "S x2 S rs2 rS"
    y, x = torch.randn(T, H, dtype=torch.float64), torch.randn(T, 4 * H, dtype=torch.float64)
    torch.testing.assert_close(run(fusion, [y, x]).outputs[0], y.t() @ x)


def test_ring_row_parallel_input_gradient() -> None:
    """x' = y @ w, with y cut by rows over devices and read in steps, and w cut by columns."""
    fusion = Fusion()
    with FusionGuard(fusion):
        t = models.inputs({"y": [T, H], "w": [H, 4 * H]})
        out = models.tensor(ops.matmul(t["y"], t["w"]))
        fusion.add_output(out)
    models.set_mesh(mesh(D), *t.values())
    shard_axis(t["y"], 0, D)
    shard_axis(t["w"], 1, D)
    stream(out, 0, D)
    y, w = torch.randn(T, H, dtype=torch.float64), torch.randn(H, 4 * H, dtype=torch.float64)
    done = run(fusion, [y, w])
    torch.testing.assert_close(done.outputs[0], y @ w)
    assert loops(out) == "s2 x2 S S rS"


def test_row_parallel_linear_forward_in_chunks() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        t = models.inputs({"x": [-1, 4 * H], "w": [H, 4 * H]})
        out = models.tensor(ops.linear(t["x"], t["w"]))
        fusion.add_output(out)
    models.set_mesh(mesh(D), *t.values())
    shard_axis(t["x"], 1, D)
    shard_axis(t["w"], 1, D)
    stream(t["x"], 0, 3)
    copy, twins = fusion.copy()
    propagate_shardings(copy)
    decompose_reshardings(copy)
    assert loops(twins[out]) == "s3 S S rx2"
    assert [op.name for op in copy.exprs] == ["linear", "reshard"]
    x, w = torch.randn(7, 4 * H, dtype=torch.float64), torch.randn(H, 4 * H, dtype=torch.float64)
    done = run(fusion, [x, w])
    torch.testing.assert_close(done.outputs[0], x @ w.t())
    assert done.collectives == [("Allreduce", "(0 1)")]
    found = StreamLoops(fusion)
    assert len({found.loop_of(op) for op in fusion.exprs}) == 1


# ------------------------------------------------------------------ communication in steps
def gathered(
    shape: list[int], cut: int, step: tuple[int, int | None], *, by: int = 2
) -> tuple[Fusion, torch.Tensor]:
    """x, cut over devices along `cut`, is copied to all of them, one block per step."""
    fusion = Fusion()
    with FusionGuard(fusion):
        x = models.inputs({"x": shape})["x"]
        out = models.tensor(ops.set(x))
        fusion.add_output(out)
    models.set_mesh(mesh(by), x, out)
    shard_axis(x, cut, by)
    stream(out, *step)
    return fusion, torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("cut", "step", "kinds"),
    [
        # The steps are those of the devices' blocks.
        (0, (0, 2), ["Broadcast"]),
        (1, (1, 2), ["Broadcast", "copy"]),
        # They are not: all is gathered first.
        (0, (0, 4), ["Allgather", "StepSlice", "copy"]),
        (0, (0, None), ["Allgather", "StepSlice", "copy"]),
        # One allgather per step, of a block of its own.
        (0, (1, 3), ["copy", "Allgather", "copy"]),
        (1, (0, 3), ["copy", "Allgather", "copy"]),
        # One index is dense, whatever is gathered.
        (1, (0, None), ["Allgather"]),
    ],
)
def test_an_allgather_in_steps(cut: int, step: tuple[int, int | None], kinds: list[str]) -> None:
    fusion, x = gathered([8, 6], cut, step)
    done = run(fusion, [x])
    torch.testing.assert_close(done.outputs[0], x)
    found = [communication_type(op) if isinstance(op, Reshard) else "copy" for op in fusion.exprs]
    assert found == kinds


def test_a_rotated_stream_starts_with_each_devices_own_block() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        t = models.inputs({"x": [8, 6], "w": [5, 6]})
        out = models.tensor(ops.linear(t["x"], t["w"]))
        fusion.add_output(out)
    models.set_mesh(mesh(4), *t.values())
    shard_axis(t["x"], 0, 4)
    out.outer_split(0, 4)
    out.swizzle1d(0, X)
    out.axis(0).parallelize(STREAM)
    x, w = torch.randn(8, 6, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)
    done = run(fusion, [x, w])
    torch.testing.assert_close(done.outputs[0], x @ w.t())
    ring = fusion.exprs[0]
    assert isinstance(ring, Reshard) and is_device_to_stream(ring)
    assert communication_type(ring) == "CollectivePermute"
    axis = stream_axis(out)
    assert axis is not None and (axis.position, axis.is_logical, axis.swizzle) == (0, False, X)
    assert is_allocated_per_step(ring.out)


def test_a_reduce_scatter_in_steps() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        t = models.inputs({"x": [6, 8], "w": [4, 8]})
        out = models.tensor(ops.linear(t["x"], t["w"]))
        fusion.add_output(out)
    models.set_mesh(mesh(2), *t.values(), out)
    shard_axis(t["x"], 1, 2)
    shard_axis(t["w"], 1, 2)
    shard_axis(out, 1, 2)
    stream(out, 0, 3)
    x, w = torch.randn(6, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    done = run(fusion, [x, w])
    torch.testing.assert_close(done.outputs[0], x @ w.t())
    assert done.collectives == [("ReduceScatter", "(0 1)")]


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("d", [2, 4])
def test_a_reduce_scatter_of_which_a_step_is_one_devices_part(d: int, rotated: bool) -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        t = models.inputs({"x": [-1, -1], "w": [5, -1]})
        out = models.tensor(ops.linear(t["x"], t["w"]))
        fusion.add_output(out)
    models.set_mesh(mesh(d), *t.values(), out)
    shard_axis(t["x"], 1, d)
    shard_axis(t["w"], 1, d)
    shard_axis(out, 0, d)
    t["x"].outer_split(0, d)
    if rotated:
        t["x"].swizzle1d(0, X)
    t["x"].axis(0).parallelize(STREAM)
    x, w = torch.randn(3 * d, 8, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    done = run(fusion, [x, w])
    torch.testing.assert_close(done.outputs[0], x @ w.t())
    found = StreamLoops(fusion)
    linear = next(op for op in fusion.exprs if isinstance(op, LinearOp))
    if rotated:
        sent = next(op for op in fusion.exprs if is_exchange(op))
        assert isinstance(sent, Reshard)
        assert communication_type(sent) == "AllToAll"
        (summed,) = fusion.uses(sent.out_tensor)
        assert found.loop_of(summed) is None
    else:
        sent = next(op for op in fusion.exprs if scatters_steps(op))
        assert isinstance(sent, Reshard)
        assert communication_type(sent) == "ReduceScatter"
    assert found.loop_of(sent) == found.loop_of(linear) is not None
    assert is_allocated_per_step(linear.out_tensor)
    assert fusion_text(parse_fusion(fusion_text(fusion))) == fusion_text(fusion)


def test_devices_inside_of_steps_need_blocks_that_they_divide() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        x = models.inputs({"x": [-1, 3]})["x"]
        out = models.tensor(ops.set(ops.sin(x)))
        fusion.add_output(out)
    models.set_mesh(mesh(2), x, out)
    for tv in (x, out):
        stream(tv, 0, 3)
        shard_axis(tv, 1, 2)
    whole = torch.randn(12, 3, dtype=torch.float64)
    torch.testing.assert_close(run(fusion, [whole]).outputs[0], whole.sin())
    assert all(is_allocated_per_step(op.out_tensor) for op in fusion.exprs[:-1])
    with pytest.raises(ShardingError, match=r"extent 8 .* in each of 3 steps"):
        queries.local_sizes(x, [8, 3])


def test_the_global_shape_of_what_each_step_allocates() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        x = models.inputs({"x": [-1, -1, -1]})["x"]
        between = models.tensor(ops.add(x, 1.0))
        total = models.tensor(ops.sum(between, [2]))
        halved = models.tensor(ops.div(between, 2.0))
        fusion.add_output(total)
        fusion.add_output(halved)
    stream(x, 0, 2)
    shard_fusion(fusion)
    assert is_allocated_per_step(between) and not is_allocated_per_step(x)
    assert queries.unsharded_sizes(between, [2, 6, 5]) == (4, 6, 5)
    assert queries.unsharded_sizes(x, [4, 6, 5]) == (4, 6, 5)


# ------------------------------------------------------------------ kernels on slices
@pytest.mark.parametrize(
    ("declared", "shape", "axis", "count"),
    [
        ([-1, -1, -1], (7, 5, 6), 0, 3),
        ([-1, -1, -1], (7, 5, 6), 1, 2),
        ([7, 5, 6], (7, 5, 6), 0, 4),
        ([7, 5, 6], (7, 5, 6), 1, None),
        ([-1, 5, 6], (9, 5, 6), 0, None),
        ([-1, 5, 6], (5, 5, 6), 0, 4),
    ],
)
def test_a_generated_kernel_computes_one_block(
    declared: list[int], shape: tuple[int, ...], axis: int, count: int | None
) -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        t = models.inputs({"x": declared, "b": [declared[2]]})
        y = ops.mul(t["x"], ops.broadcast(t["b"], [True, True, False]))
        out = models.tensor(ops.sum(ops.sin(y), 2))
        fusion.add_output(out)
    stream(out, axis, count)
    shard_fusion(fusion)
    kernels = [u for u in step_by_step.segments_of(fusion) if u.kernel is not None]
    assert [u.outputs for u in kernels] == [(out,)]
    (kernel,) = kernels
    assert kernel.kernel is not None
    x, b = torch.randn(shape, dtype=torch.float64), torch.randn(shape[2], dtype=torch.float64)
    values = bind_inputs(fusion, [x, b])
    sizes = {s: int(v) for s, v in values.items()}
    found = torch.full(shape[:2], math.nan, dtype=torch.float64)
    stepping = stream_axis(out)
    assert stepping is not None
    executors = {
        block: FusedKernelExecutor(
            local, scheduler=find_scheduler(local) or "", name=f"kernel_{block}"
        )
        for block in BLOCKS
        for local in [localize(kernel.kernel, block)[0]]
    }
    for local in (e.fusion for e in executors.values()):
        assert not any(a.is_stream for tv in local.tensors() for a in tv.domain.axes.values())
    for step in range(int(sc.evaluate(stepping.count, sizes))):
        start, length = step_by_step.bounds(shape[axis], stepping, step, sizes, 0, out)
        if length == 0:
            continue
        full = step_by_step.bounds(shape[axis], stepping, 0, sizes, 0, out)[1]
        given = {t["x"]: x.narrow(axis, start, length), t["b"]: b}
        views = [given.get(v, b[None, None]) for v in kernel.inputs]
        target = found.narrow(axis, start, length)
        executors["first" if length == full else "last"].run(views, [target], sizes=sizes)
    torch.testing.assert_close(found, (x * b).sin().sum(2))


def test_what_steps_slice_and_bring_reads_back_from_text() -> None:
    fusion, _ = gathered([8, 6], 0, (0, 4))
    shard_fusion(fusion)
    assert "along = {streamIdx}, to = 0" in str(fusion)
    ring, _ = gathered([8, 6], 0, (0, 2))
    shard_fusion(ring)
    assert "along = {deviceIdx.x, streamIdx}, from = 0, to = 0" in str(ring)
    for made in (fusion, ring):
        assert fusion_text(parse_fusion(fusion_text(made))) == fusion_text(made)


def test_two_loops_slice_one_tensor_each_for_itself() -> None:
    """Two loops read x in steps; the second one depends on a sum that the first one computes."""
    fusion = Fusion()
    with FusionGuard(fusion):
        x = models.inputs({"x": [6, 4]})["x"]
        total = ops.sum(x, 0)
        out = models.tensor(ops.sub(x, ops.broadcast(total, [True, False])))
        fusion.add_output(out)
    stream(x, 1, 2)
    stream(models.tensor(total), 0, 3)
    stream(out, 0, 2)
    given = torch.randn(6, 4, dtype=torch.float64)
    torch.testing.assert_close(run(fusion, [given]).outputs[0], given - given.sum(0))
