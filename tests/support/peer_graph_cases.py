"""Programs with peer copies that run many times, on tensors at changing addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fuser import DeviceMesh, FusionDefinition, ParallelType
from fuser.frontend.executor_cache import FusionExecutorCache
from hostir import HostIrEvaluator
from hostir.lowering.params import LowerParams
from multidevice import Communicator

ROWS, K, N = 8, 96, 32


def gather_linear(*, has_steps: bool) -> Callable[[int], FusionDefinition]:
    """x [M, K], cut by rows, is gathered, shard by shard if `has_steps`; then a linear with w [N,
    K].
    """

    def define(d: int) -> FusionDefinition:
        with FusionDefinition() as fd:
            x = fd.define_tensor([ROWS * d, K], contiguity=True)
            w = fd.define_tensor([N, K], contiguity=True)
            gathered = fd.ops.set(x)
            fd.add_output(fd.ops.linear(gathered, w))
            for tv in (x, w, gathered):
                tv.set_device_mesh(DeviceMesh(range(d)))
            x.outer_split(0, d)
            x.axis(0).parallelize(ParallelType.mesh_x)
            if has_steps:
                gathered.outer_split(0, d)
                gathered.swizzle1d(0, ParallelType.mesh_x)
                gathered.axis(0).parallelize(ParallelType.stream)
        return fd

    return define


def linear_scatter(d: int) -> FusionDefinition:
    """x [M, dK] and w [N, dK] are cut along their last axes; the sum is cut by blocks of
    rows.
    """
    with FusionDefinition() as fd:
        x = fd.define_tensor([ROWS * d, K * d], contiguity=True)
        w = fd.define_tensor([N, K * d], contiguity=True)
        y = fd.ops.linear(x, w)
        fd.add_output(y)
        for tv in (x, w, y):
            tv.set_device_mesh(DeviceMesh(range(d)))
        for tv in (x, w):
            tv.outer_split(-1, d)
            tv.axis(-2).parallelize(ParallelType.mesh_x)
        y.outer_split(0, d)
        y.axis(0).parallelize(ParallelType.mesh_x)
        x.outer_split(0, d)
        x.swizzle1d(0, ParallelType.mesh_x)
        x.axis(0).parallelize(ParallelType.stream)
    return fd


CASES: dict[str, Callable[[int], FusionDefinition]] = {
    "gather in steps": gather_linear(has_steps=True),
    "gather": gather_linear(has_steps=False),
    "scatter": linear_scatter,
}


def numbers(shape: Sequence[int], seed: int) -> torch.Tensor:
    """Returns small integers, so that sums of products are exact in float32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, tuple(shape), generator=generator).float()


class Case:
    """One program on the ranks of a job, and its expected result."""

    def __init__(self, name: str, comm: Communicator, device: torch.device) -> None:
        self.name, self.rank, self.size, self.device = name, comm.rank(), comm.size(), device
        fd = CASES[name](comm.size())
        cache = FusionExecutorCache(fd.fusion, params=LowerParams(backend="CUDA"))
        cache.execute(self.inputs(0), _disable_options=["auto_overlap"])
        program = cache.host_program()
        self.evaluator = HostIrEvaluator(program, comm, device=device, number_of_streams=3)

    def whole(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        k = K * self.size if self.name == "scatter" else K
        return numbers((ROWS * self.size, k), 2 * seed), numbers((N, k), 2 * seed + 1)

    def inputs(self, seed: int) -> list[torch.Tensor]:
        x, w = self.whole(seed)
        if self.name == "scatter":
            x, w = (t.chunk(self.size, 1)[self.rank] for t in (x, w))
        else:
            x = x.chunk(self.size, 0)[self.rank]
        return [t.contiguous().to(self.device) for t in (x, w)]

    def check(self, seed: int, found: torch.Tensor) -> None:
        x, w = self.whole(seed)
        want = x.double() @ w.double().T
        if self.name == "scatter":
            want = want.chunk(self.size, 0)[self.rank]
        assert torch.equal(found.double().cpu().reshape(want.shape), want), f"run {seed}"

    def repeat(self, runs: int, sets: Sequence[list[torch.Tensor]], which: Callable[[int], int]):
        """Runs on fresh values in sets of tensors; `which` chooses the set for each run."""
        for seed in range(1, runs + 1):
            inputs = sets[which(seed)]
            for tensor, values in zip(inputs, self.inputs(seed), strict=True):
                tensor.copy_(values)
            (found,) = self.evaluator.run(inputs)
            for tensor in inputs:  # as soon as the caller has them back
                tensor.fill_(1000.0)
            self.check(seed, found)

    def lines(self) -> list[str]:
        return self.evaluator.cuda_graphs()
