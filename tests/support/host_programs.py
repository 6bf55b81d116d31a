"""Sharded programs for the host IR tests, with their torch meaning in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from fuser import ops
from fuser.ir.binding import Binder, bind_inputs
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.types import ParallelType
from fuser.ops.define import define_tensor
from fuser.ops.reference.meaning import evaluate_fusion
from fuser.passes import fusion_passes
from fuser.passes.concretize import concretize
from fuser.passes.segment import segment_fusion
from fuser.schedule.registry import find_scheduler
from hostir.analysis.preflight import findings
from hostir.ir.diagnostics import report
from hostir.ir.ops import NUMBER_OF_STREAMS
from hostir.ir.program import HostIrContainer
from hostir.lowering.segments import lower
from hostir.passes.deallocation import run_passes
from hostir.tools.run_text import run_simulated
from multidevice.job.shard_tensor import unshard
from multidevice.sharding import queries
from multidevice.sharding.passes.localize import localize
from multidevice.sharding.passes.pipeline import shard_fusion

Sizes = dict[str, int]


@dataclass(frozen=True)
class Case:
    """A definition (a function of the number of ranks), its global inputs, and its number of
    ranks.
    """

    define: Callable[[], None]
    shapes: tuple[tuple[int, ...], ...]
    ranks: int = 1

    def fusion(self) -> Fusion:
        fusion = Fusion()
        with FusionGuard(fusion):
            self.define()
        return fusion

    def inputs(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(shape, generator=generator) for shape in self.shapes]


def build(case: Case) -> HostIrContainer:
    """Compiles the host program of a case, through the whole compiler."""
    return build_for(case.fusion(), case.inputs())


def build_for(user: Fusion, inputs: Sequence[torch.Tensor | float]) -> HostIrContainer:
    """Compiles the host program of a fusion for global inputs such as these."""
    sizes = {s: int(v) for s, v in bind_inputs(user, inputs).items() if isinstance(v, int)}
    fusion, _ = concretize(user, sizes)
    fusion_passes.run_passes(fusion)
    shard_fusion(fusion)
    segmented = segment_fusion(
        fusion,
        find_scheduler=lambda f: find_scheduler(localize(f)[0]),
        local_shape=queries.local_extents,
    )
    program = run_passes(lower(segmented, backend_name="SIMULATED"))
    assert_clean(program, inputs)
    return program


def assert_clean(program: HostIrContainer, inputs: Sequence[torch.Tensor | float]) -> None:
    """Checks that the analyses find no fault in a program: no race, deadlock or wrong
    placement.
    """
    values = {**Binder(program.values).bind(inputs), NUMBER_OF_STREAMS: 4}
    found = findings(program, values)
    assert not found, report(program, found)


def expected(case: Case) -> list[torch.Tensor]:
    """Returns the expected outputs, computed by torch in float64."""
    return evaluate_fusion(case.fusion(), case.inputs(), dtype=torch.float64)


def check(program: HostIrContainer, case: Case, *, atol: float = 1e-5) -> None:
    """Runs a program on simulated ranks and compares every output with torch's in float64."""
    by_rank = run_simulated(program, case.inputs(), ranks=case.ranks)
    visible = [o for o in program.outputs if not program.values.is_hidden(o)]
    for i, (out, want) in enumerate(zip(visible, expected(case), strict=True)):
        shards = [outputs[i] for outputs in by_rank]
        whole = (
            shards[0] if out.mesh is None else unshard([shards[r] for r in out.mesh.devices], out)
        )
        torch.testing.assert_close(whole.double(), want, atol=atol, rtol=1e-5)


def tensor(*shape: int, mesh: list[int] | None = None, cut: int | None = None) -> TensorView:
    """Defines a contiguous input; `cut` is the axis that is cut along mesh_x."""
    tv = define_tensor(list(shape), contiguity=True)
    tv.fusion.add_input(tv)
    if mesh is not None and cut is not None:
        shard(tv, cut, mesh)
    elif mesh is not None:
        tv.set_device_mesh(mesh)
    return tv


def shard(value: object, axis: int, mesh: list[int]) -> TensorView:
    """Cuts a tensor along mesh_x at `axis`."""
    tv = cast("TensorView", value)
    tv.set_device_mesh(mesh)
    tv.outer_split(axis, len(mesh))
    tv.axis(axis).parallelize(ParallelType.mesh_x)
    return tv


def out(value: object, alias: TensorView | None = None) -> None:
    """Adds an output."""
    tv = cast("TensorView", value)
    tv.fusion.add_output(tv, alias)


# ------------------------------------------------------------------ definitions
def linear_relu_sum() -> None:
    x, w, b = tensor(-1, -1), tensor(-1, -1), tensor(-1)
    y = ops.relu(ops.linear(x, w, b))
    out(y)
    out(ops.sum(y, [1]))


def heads() -> None:
    """Two matmuls with a reshape and a permutation between them, which are views."""
    x, w = tensor(-1, 6), tensor(12, 6)
    y = ops.reshape(ops.linear(x, w), [x.size(0), 3, 4])
    q = ops.permute(y, [1, 0, 2])
    out(ops.matmul(q, ops.permute(q, [0, 2, 1])))


def duplicates() -> None:
    x = tensor(-1, -1)
    y = ops.add(x, 1.0)
    out(y)
    out(x)
    out(y)


def sliced_matmul() -> None:
    """A matmul that reads a slice: a view with an offset."""
    x, w = tensor(-1, 6), tensor(3, 4)
    y = ops.relu(x)
    out(y)
    out(ops.matmul(ops.slice(y, [0, 2], [x.size(0), 5]), w))


def column_row_mlp(ranks: int) -> Callable[[], None]:
    def define() -> None:
        mesh = list(range(ranks))
        x = tensor(-1, 6, mesh=mesh)
        w1, b1 = tensor(8, 6, mesh=mesh, cut=0), tensor(8, mesh=mesh, cut=0)
        w2, b2 = tensor(6, 8, mesh=mesh, cut=1), tensor(6, mesh=mesh)
        y = ops.linear(ops.silu(ops.linear(x, w1, b1)), w2, b2)
        out(ops.add(y, x))

    return define


def sequence_parallel_mlp(ranks: int) -> Callable[[], None]:
    def define() -> None:
        mesh = list(range(ranks))
        x = tensor(-1, 6, mesh=mesh, cut=0)
        w1, w2 = tensor(8, 6, mesh=mesh, cut=0), tensor(6, 8, mesh=mesh, cut=1)
        out(shard(ops.linear(ops.relu(ops.linear(x, w1)), w2), 0, mesh))

    return define


def slice_of_replicated() -> None:
    mesh = [0, 1]
    x = tensor(-1, 6, mesh=mesh)
    out(ops.neg(shard(ops.set(x), 1, mesh)))


def data_and_tensor_parallel() -> None:
    """A 2x2 mesh: rows of x are cut along mesh_y, weights along mesh_x."""
    mesh = [[0, 1], [2, 3]]
    x, w1, w2 = tensor(-1, 6), tensor(8, 6), tensor(6, 8)
    for tv, axis, count, ptype in (
        (x, 0, 2, ParallelType.mesh_y),
        (w1, 0, 2, ParallelType.mesh_x),
        (w2, 1, 2, ParallelType.mesh_x),
    ):
        tv.set_device_mesh(mesh)
        tv.outer_split(axis, count)
        tv.axis(axis).parallelize(ptype)
    out(ops.linear(ops.relu(ops.linear(x, w1)), w2))


HIDDEN, HEADS = 16, 4


def encoder_layer(ranks: int) -> Callable[[], None]:
    """A post-LayerNorm transformer layer; heads and the feed-forward width are cut over
    devices.
    """

    def define() -> None:
        mesh = list(range(ranks))
        x = tensor(-1, -1, HIDDEN, mesh=mesh)
        mask = tensor(-1, -1, mesh=mesh)
        batch, length = x.size(0), x.size(1)
        size = HIDDEN // HEADS

        def column(y: Any, width: int) -> Any:
            w, b = tensor(width, HIDDEN, mesh=mesh, cut=0), tensor(width, mesh=mesh, cut=0)
            return ops.linear(y, w, b)

        def row(y: Any, width: int) -> Any:
            w, b = tensor(HIDDEN, width, mesh=mesh, cut=1), tensor(HIDDEN, mesh=mesh)
            return ops.linear(y, w, b)

        def norm(y: Any) -> Any:
            var, mean = ops.var_mean(y, [2], 0, True)
            scale = ops.rsqrt(ops.add(var, 1e-12))
            return ops.mul(ops.sub(y, mean), scale)

        def heads() -> Any:
            y = ops.reshape(column(x, HIDDEN), [batch, length, HEADS, size])
            return ops.permute(y, [0, 2, 1, 3])

        q, k, v = heads(), heads(), heads()
        scores = ops.mul(ops.matmul(q, ops.permute(k, [0, 1, 3, 2])), size**-0.5)
        scores = ops.add(scores, ops.broadcast(mask, [False, True, True, False]))
        shifted = ops.sub(scores, ops.max(scores, [3], True))
        weights = ops.exp(shifted)
        weights = ops.div(weights, ops.sum(weights, [3], True))
        mixed = ops.permute(ops.matmul(weights, v), [0, 2, 1, 3])
        attended = row(ops.reshape(mixed, [batch, length, HIDDEN]), HIDDEN)
        y = norm(ops.add(attended, x))
        out(norm(ops.add(row(ops.relu(column(y, 2 * HIDDEN)), 2 * HIDDEN), y)))

    return define


def _encoder_shapes(batch: int, length: int) -> tuple[tuple[int, ...], ...]:
    square, wide = ((HIDDEN, HIDDEN), (HIDDEN,)), ((2 * HIDDEN, HIDDEN), (2 * HIDDEN,))
    back = ((HIDDEN, 2 * HIDDEN), (HIDDEN,))
    return ((batch, length, HIDDEN), (batch, length), *square * 4, *wide, *back)


CASES: dict[str, Case] = {
    "linear_relu_sum": Case(linear_relu_sum, ((5, 6), (7, 6), (7,))),
    "heads": Case(heads, ((5, 6), (12, 6))),
    "sliced_matmul": Case(sliced_matmul, ((5, 6), (3, 4))),
    "duplicates": Case(duplicates, ((5, 6),)),
    "mlp2": Case(column_row_mlp(2), ((5, 6), (8, 6), (8,), (6, 8), (6,)), 2),
    "mlp4": Case(column_row_mlp(4), ((5, 6), (8, 6), (8,), (6, 8), (6,)), 4),
    "sequence2": Case(sequence_parallel_mlp(2), ((4, 6), (8, 6), (6, 8)), 2),
    "slice2": Case(slice_of_replicated, ((5, 6),), 2),
    "mesh2x2": Case(data_and_tensor_parallel, ((4, 6), (8, 6), (6, 8)), 4),
    "encoder1": Case(encoder_layer(1), _encoder_shapes(3, 5), 1),
    "encoder2": Case(encoder_layer(2), _encoder_shapes(3, 5), 2),
}
