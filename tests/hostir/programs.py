"""Programs that the tests of this folder share, with their torch meaning in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fuser import ops
from fuser.ir.fusion import Fusion
from fuser.ir.guard import FusionGuard
from fuser.ir.tensor import TensorView
from fuser.ir.types import ParallelType
from fuser.ops.define import define_tensor
from fuser.ops.torch_meaning import evaluate_fusion
from fuser.passes.concretize import concretize
from fuser.schedule.registry import find_scheduler
from fuser.segment import segment_fusion
from hostir.cli import run_simulated
from hostir.container import HostIrContainer
from hostir.lower import lower
from hostir.pipeline import run_passes
from multidevice import sharding
from multidevice.localize import localize
from multidevice.pipeline import shard_fusion
from multidevice.shard import unshard

Sizes = dict[str, int]


@dataclass(frozen=True)
class Case:
    """A definition (given the number of ranks), global inputs, and how many ranks it takes."""

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
    """Return the host program of a case, through the whole compiler."""
    user = case.fusion()
    sizes = sharding_sizes(user, case.inputs())
    fusion, _ = concretize(user, sizes)
    shard_fusion(fusion)
    segmented = segment_fusion(
        fusion,
        is_resharding=sharding.is_resharding,
        find_scheduler=lambda f: find_scheduler(localize(f)[0]),
        local_shape=sharding.local_extents,
    )
    return run_passes(lower(segmented, backend_name="SIMULATED"))


def sharding_sizes(fusion: Fusion, inputs: Sequence[torch.Tensor]) -> dict:  # pyright: ignore[reportMissingTypeArgument]
    from fuser.ops.torch_meaning import bind_inputs

    return bind_inputs(fusion, inputs)


def expected(case: Case) -> list[torch.Tensor]:
    """Return the outputs in float64, from torch alone."""
    return evaluate_fusion(case.fusion(), case.inputs(), dtype=torch.float64)


def check(program: HostIrContainer, case: Case, *, atol: float = 1e-5) -> None:
    """Run on simulated ranks and compare every output with torch float64."""
    by_rank = run_simulated(program, case.inputs(), ranks=case.ranks)
    visible = [o for o in program.outputs if not program.values.is_hidden(o)]
    for i, (out, want) in enumerate(zip(visible, expected(case), strict=True)):
        shards = [outputs[i] for outputs in by_rank]
        whole = (
            shards[0] if out.mesh is None else unshard([shards[r] for r in out.mesh.devices], out)
        )
        torch.testing.assert_close(whole.double(), want, atol=atol, rtol=1e-5)


def tensor(*shape: int, mesh: object = None, cut: int | None = None) -> TensorView:
    """Define a contiguous input; `cut` shards that axis along mesh_x."""
    tv = define_tensor(list(shape), contiguity=True)
    ops_fusion = tv.fusion
    ops_fusion.add_input(tv)
    if mesh is not None:
        tv.set_device_mesh(mesh)
        if cut is not None:
            count = tv.mesh.size_of(ParallelType.mesh_x) if tv.mesh else 1
            tv.outer_split(cut, count)
            tv.axis(cut).parallelize(ParallelType.mesh_x)
    return tv


def out(tv: TensorView, alias: TensorView | None = None) -> None:
    tv.fusion.add_output(tv, alias)


# ------------------------------------------------------------------ definitions
def linear_relu_sum() -> None:
    x, w, b = tensor(-1, -1), tensor(-1, -1), tensor(-1)
    y = ops.relu(ops.linear(x, w, b))
    out(y)
    out(ops.sum(y, [1]))


def heads() -> None:
    """A reshape and a permutation between two matmuls: views."""
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
        y = ops.linear(ops.relu(ops.linear(x, w1)), w2)
        y.set_device_mesh(mesh)
        y.outer_split(0, ranks)
        y.axis(0).parallelize(ParallelType.mesh_x)
        out(y)

    return define


def slice_of_replicated() -> None:
    mesh = [0, 1]
    x = tensor(-1, 6, mesh=mesh)
    y = ops.set(x)
    y.set_device_mesh(mesh)
    y.outer_split(1, 2)
    y.axis(1).parallelize(ParallelType.mesh_x)
    out(ops.neg(y))


CASES: dict[str, Case] = {
    "linear_relu_sum": Case(linear_relu_sum, ((5, 6), (7, 6), (7,))),
    "heads": Case(heads, ((5, 6), (12, 6))),
    "duplicates": Case(duplicates, ((5, 6),)),
    "mlp2": Case(column_row_mlp(2), ((5, 6), (8, 6), (8,), (6, 8), (6,)), 2),
    "mlp4": Case(column_row_mlp(4), ((5, 6), (8, 6), (8,), (6, 8), (6,)), 4),
    "sequence2": Case(sequence_parallel_mlp(2), ((4, 6), (8, 6), (6, 8)), 2),
    "slice2": Case(slice_of_replicated, ((5, 6),), 2),
}
