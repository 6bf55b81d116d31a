"""Random programs with random annotations: the results of all ranks equal the unsharded
program's.
"""

from __future__ import annotations

import math
import random

import pytest
import torch

from fuser import ops
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.scalar import constructors as sc
from fuser.ir.types import DEVICE_TYPES
from fuser.ops.reference.meaning import evaluate_fusion
from multidevice.sharding.placement import is_plain_broadcast
from multidevice.sharding.reshard import communication_type, team_of
from tests.support import sharded_fusions as models
from tests.support.rank_by_rank import mesh, run, shard_axis

MESHES = ((2,), (4,), (2, 2), (1, 2), (2, 1), (2, 1, 2))
# Every size is a multiple of 8, so that any cut of these meshes divides, twice over.
SIZES = (8, 16)
KINDS = ("unary", "binary", "bias", "reduce", "keepdim", "welford", "matmul", "linear")
KINDS += ("permute", "reshape", "pad", "slice", "cat", "iota", "set")


class _Maker:
    """Builds one random program."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.symbolic = self.rng.random() < 0.5
        self.fusion = Fusion()
        self.values: list[torch.Tensor] = []
        self.pool: list[TensorView] = []
        self.gen = torch.Generator().manual_seed(seed)

    def input(self, shape: list[int]) -> TensorView:
        declared = [-1 if self.symbolic and n > 1 and self.rng.random() < 0.5 else n for n in shape]
        (tv,) = models.inputs({"x": declared}).values()
        self.values.append(torch.randn(shape, generator=self.gen, dtype=torch.float64))
        self.shapes[tv] = shape
        self.pool.append(tv)
        return tv

    shapes: dict[TensorView, list[int]]

    def build(self, steps: int) -> None:
        self.shapes = {}
        with FusionGuard(self.fusion):
            for _ in range(self.rng.randint(1, 2)):
                self.input([self.rng.choice(SIZES) for _ in range(self.rng.randint(1, 3))])
            for _ in range(steps):
                self.step()
            for tv in self.rng.sample(self.pool, min(2, len(self.pool))) + self.pool[-1:]:
                if tv not in self.fusion.outputs:
                    self.fusion.add_output(tv)

    def step(self) -> None:
        x = self.rng.choice(self.pool[-4:])
        shape = self.shapes[x]
        made: object = None
        new = list(shape)
        kind = self.rng.choice(KINDS)
        rank = len(shape)
        if kind == "unary":
            made = ops.sin(x)
        elif kind == "set":
            made = ops.set(x)
        elif kind == "binary":
            other = [t for t in self.pool if self.shapes[t] == shape] or [self.input(shape)]
            made = ops.add(x, self.rng.choice(other))
        elif kind == "bias":
            made = ops.mul(x, self.input(shape[-1:]))
        elif kind in ("reduce", "keepdim") and rank > 1:
            axis = self.rng.randrange(rank)
            op = self.rng.choice([ops.sum, ops.max])
            made = op(x, axis, kind == "keepdim")
            new[axis : axis + 1] = [1] if kind == "keepdim" else []
            if kind == "keepdim":
                made, new = ops.sub(x, made), shape
        elif kind == "welford" and rank > 1:
            var, mean = ops.var_mean(x, [rank - 1], 0, True)
            made = ops.mul(ops.sub(x, mean), ops.rsqrt(ops.add(var, 1.0)))
        elif kind == "matmul" and rank == 2:
            n = self.rng.choice(SIZES)
            made, new = ops.matmul(x, self.input([shape[1], n])), [shape[0], n]
        elif kind == "linear" and rank > 1:
            n = self.rng.choice(SIZES)
            batch = [self.rng.choice(SIZES)] if rank < 3 and self.rng.random() < 0.3 else []
            bias = self.input([*batch, n]) if self.rng.random() < 0.5 else None
            weight = self.input([*batch, n, shape[-1]])
            made, new = ops.linear(x, weight, bias), [*batch, *shape[:-1], n]
        elif kind == "permute" and rank > 1:
            order = self.rng.sample(range(rank), rank)
            made, new = ops.permute(x, order), [shape[p] for p in order]
        elif kind == "reshape" and not self.symbolic:
            if rank > 1 and self.rng.random() < 0.5:
                at = self.rng.randrange(rank - 1)
                new[at : at + 2] = [shape[at] * shape[at + 1]]
            else:
                at = self.rng.randrange(rank)
                if shape[at] > 16:
                    new[at : at + 1] = [shape[at] // 8, 8]
            made = ops.reshape(x, new)
        elif kind == "slice":
            at = self.rng.randrange(rank)
            if shape[at] >= 16:
                new[at] = 8
                made = ops.slice(x, [0] * rank, new)
        elif kind == "cat":
            at = self.rng.randrange(rank)
            made = ops.cat([x, ops.sin(x)], at)
            new[at] *= 2
        elif kind == "iota" and not self.symbolic:
            made = ops.add(x, ops.iota(shape[-1], dtype=DataType.Double))
        elif kind == "reshape" and rank > 1:
            # Sizes may be symbolic: merge two neighbours.
            at = self.rng.randrange(rank - 1)
            sizes = [x.size(k) for k in range(rank)]
            made = ops.reshape(x, [*sizes[:at], sc.mul(sizes[at], sizes[at + 1]), *sizes[at + 2 :]])
            new[at : at + 2] = [shape[at] * shape[at + 1]]
        elif kind == "pad":
            at = self.rng.randrange(rank)
            widths = [0] * (2 * (rank - 1 - at)) + [8, 0]
            made = ops.pad(x, widths)
            new[at] += 8
        if isinstance(made, TensorView) and math.prod(new) <= 4096 and new:
            self.shapes[made] = new
            self.pool.append(made)

    def annotate(self) -> None:
        m = mesh(*self.rng.choice(MESHES))
        print("mesh", m)
        for tv in list(self.shapes):
            is_input = tv in self.fusion.inputs
            if not is_input and self.rng.random() < 0.8:
                continue
            tv.set_device_mesh(m)
            free = [k for k, a in enumerate(tv.domain.no_reductions) if not is_plain_broadcast(a)]
            for ptype in self.rng.sample(DEVICE_TYPES, len(DEVICE_TYPES)):
                if m.dim_of(ptype) is None or not free or self.rng.random() < 0.4:
                    continue
                number = tv.domain.no_reductions[self.rng.choice(free)].number
                loop = tv.domain.loop
                at = next((k for k, a in enumerate(loop) if a.number == number), None)
                if at is not None:
                    shard_axis(tv, at, m.size_of(ptype), ptype)


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_random_programs(first: int) -> None:
    for seed in range(first, first + 10):
        print("seed", seed)
        maker = _Maker(seed)
        maker.build(steps=maker.rng.randint(2, 7))
        expected = evaluate_fusion(maker.fusion, maker.values, dtype=torch.float64)
        maker.annotate()
        print(maker.fusion)
        done = run(maker.fusion, maker.values)
        for got, want in zip(done.outputs, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)
        kinds = {communication_type(r) for r in done.result.communications}
        assert kinds <= {"Allgather", "Allreduce", "AllToAll", "ReduceScatter"}
        assert all(team_of(r).size > 1 for r in done.result.communications)
