"""Tests pointwise kernels fused into one launch: in checked mode against torch in float64."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch

from fuser import DataType, FusionDefinition, ParallelType, PythonProfiler, multidevice, ops
from fuser.ir.fusion import Fusion, TensorView
from fuser.kernels.executor import FusedKernelExecutor
from fuser.schedule import horizontal, pointwise, scheduler
from fuser.schedule.horizontal import HorizontalParams
from fuser.schedule.pointwise import PointwiseParams
from fuser.support.device import CPU, H200, DeviceInfo
from hostir import HostIrEvaluator
from hostir.ir.parser import parse
from hostir.ir.program import equal
from multidevice import Communicator, simulate
from tests.support.machine_code import compile_for_hopper
from tests.support.small_fusions import Build, define, random, run

GPU = ["schedules_for(h200)", "checked"]
BF16 = torch.bfloat16


def rows_and_all(x: TensorView, y: TensorView) -> list[TensorView]:
    """Defines two iteration spaces that share an input."""
    wide = ops.mul(y, ops.broadcast(x, [True, False]))
    return [ops.neg(x), wide, ops.exp(wide)]


def rows_and_all_of_torch(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    return [-x, y * x, torch.exp(y * x)]


def executor_of(
    build: Build, *shapes: Sequence[int | None], device: DeviceInfo = H200
) -> FusedKernelExecutor:
    fusion = define(build, *shapes)
    assert horizontal.accepts(fusion) is None
    return FusedKernelExecutor(
        fusion, scheduler="horizontal", name="all", device=device, checked=True
    )


@pytest.mark.parametrize("device", [CPU, H200], ids=lambda d: d.name)
@pytest.mark.parametrize("shape", [(3, 5), (64, 4096), (7, 1030), (300, 1), (1, 513), (257, 33)])
def test_parts_compute_what_they_would_alone(shape: tuple[int, int], device: DeviceInfo) -> None:
    executor = executor_of(rows_and_all, [None], [None, None], device=device)
    inputs = [random(shape[1:], torch.float32, 1), random(shape, torch.float32, 2)]
    wanted = rows_and_all_of_torch(*(t.double() for t in inputs))
    for out, want in zip(run(executor, inputs, [t.shape for t in wanted]), wanted, strict=True):
        torch.testing.assert_close(out.double(), want, rtol=1e-6, atol=1e-6)
    (variant,) = executor.variants
    assert isinstance(variant.params, HorizontalParams) and len(variant.params.parts) == 2
    # One part is before the block number that separates them, the other one after it.
    assert variant.kernel.source.text.count("if (blockIdx.x < first1)") == 1


def scalars_and_rows(x: TensorView, y: TensorView, z: TensorView) -> list[TensorView]:
    """Defines a part of one thread, a part with broadcast rows (two runs), and a part of single
    rows."""
    bias = ops.broadcast(y, [True, False])
    every = ops.broadcast(x, [True, True])
    row = ops.broadcast(x, [True])
    return [ops.add(x, 1.0), ops.add(ops.mul(z, bias), every), ops.mul(y, row)]


def test_parts_have_threads_and_blocks_of_their_own() -> None:
    executor = executor_of(scalars_and_rows, [], [None], [None, None])
    for shape in ((33, 257), (40, 8), (1000, 24)):
        x, y, z = (random(s, torch.float32, k) for k, s in enumerate([(), shape[1:], shape]))
        wanted = [x + 1, z.double() * y.double() + x.double(), y.double() * x.double()]
        for out, want in zip(
            run(executor, [x, y, z], [t.shape for t in wanted]), wanted, strict=True
        ):
            torch.testing.assert_close(out.double(), want.double(), rtol=1e-6, atol=1e-6)
    text = "".join(v.kernel.source.text for v in executor.variants)
    assert "if (threadIdx.x >= 1) return;" in text
    assert "threadIdx.x / " in text and "% across" in text


def used_and_scalar(x: TensorView, y: TensorView, z: TensorView) -> list[TensorView]:
    """Defines outputs that other ops read. They have copies in the first and last part, but not in
    the middle one."""
    first, last = ops.exp(y), ops.exp(z)
    return [first, ops.neg(first), ops.add(x, 1.0), last, ops.neg(last)]


def test_what_parts_make_is_told_apart() -> None:
    executor = executor_of(used_and_scalar, [], [None], [None, None])
    x, y, z = (random(s, torch.float32, k) for k, s in enumerate([(), (512,), (64, 512)]))
    first, last = torch.exp(y.double()), torch.exp(z.double())
    wanted = [first, -first, x.double() + 1, last, -last]
    got = run(executor, [x, y, z], [t.shape for t in wanted])
    for out, want in zip(got, wanted, strict=True):
        torch.testing.assert_close(out.double(), want, rtol=1e-6, atol=1e-6)
    (variant,) = executor.variants
    assert isinstance(variant.params, HorizontalParams)
    assert [p.vector for p in variant.params.parts] == [4, 1, 4]
    names = [p.name for p in variant.kernel.source.params if p.is_pointer]
    assert len(names) == len(set(names)) == 3 + 5


def test_parts_compile_for_a_gpu() -> None:
    texts: dict[str, str] = {}
    builds: list[tuple[Build, list[list[int | None]], list[list[int]]]] = [
        (rows_and_all, [[None], [None, None]], [[40], [24, 40], [24, 40]]),
        (scalars_and_rows, [[], [None], [None, None]], [[], [24, 40], [40]]),
    ]
    for build, shapes, results in builds:
        executor = executor_of(build, *shapes)
        run(executor, [random([24, 40][2 - len(s) :], torch.float32) for s in shapes], results)
        texts |= {v.kernel.source.text: v.kernel.source.name for v in executor.variants}
    assert len(texts) == 2
    compile_for_hopper(texts)


# ------------------------------------------------------------------ what is accepted
def summed(x: TensorView) -> list[TensorView]:
    return [ops.exp(x), ops.neg(ops.sum(x, [1]))]


def read_by_another(x: TensorView, y: TensorView) -> list[TensorView]:
    z = ops.exp(x)
    return [z, ops.mul(y, ops.broadcast(z, [True, False]))]


def same(x: TensorView) -> list[TensorView]:
    return [ops.exp(x), ops.neg(x)]


@pytest.mark.parametrize(
    ("build", "shapes", "said"),
    [
        (summed, [[None, None]], "sum of .* is not pointwise"),
        (read_by_another, [[None], [None, None]], "computed from .*, which has other axes"),
        (same, [[None]], "iterate the same axes"),
    ],
)
def test_what_is_refused(build: Build, shapes: list[list[int | None]], said: str) -> None:
    reason = horizontal.accepts(define(build, *shapes))
    assert reason is not None and re.search(said, reason), reason


def test_parameters_step_down_together() -> None:
    wide, narrow = PointwiseParams(128, 1, 4, 2), PointwiseParams(128, 1, 1, 2)
    least = horizontal.generic(H200)
    tried = scheduler("horizontal").ladder(HorizontalParams((wide, narrow)), H200)
    assert tried[0] == HorizontalParams((wide, narrow)) and tried[-1] == least
    assert HorizontalParams((PointwiseParams(128, 1, 2, 2), PointwiseParams(128, 1, 1, 1))) in tried
    assert least.parts == (pointwise.generic(H200),)
    near, far = (HorizontalParams(p) for p in ((wide, wide), (wide, wide, wide)))
    assert near.is_near(near) and not near.is_near(far) and not near.is_near(wide)


# ------------------------------------------------------------------ whole programs
def launched(fd: FusionDefinition, inputs: Sequence[torch.Tensor], *off: str) -> list[str]:
    """Returns the schedulers of the kernels of a run."""
    with PythonProfiler() as profiler:
        fd.execute(inputs, _enable_options=GPU, _disable_options=off)
    return [row.scheduler for row in profiler.profile.kernel_profiles]


def rope(fd: FusionDefinition, x: TensorView, cos: TensorView, sin: TensorView) -> TensorView:
    """Rotates halves of heads."""
    half = fd.ops.slice(x, [0, 0, 0], [x.size(0), x.size(1), 16])
    other = fd.ops.slice(x, [0, 0, 16], [x.size(0), x.size(1), 32])
    turned = fd.ops.cat([fd.ops.neg(other), half], -1)
    wide = [fd.ops.broadcast(t, [True, False, False]) for t in (cos, sin)]
    return fd.ops.add(fd.ops.mul(x, wide[0]), fd.ops.mul(turned, wide[1]))


def rope_of_torch(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def queries_and_keys(dtype: DataType = DataType.BFloat16) -> FusionDefinition:
    with FusionDefinition() as fd:
        q, k = (fd.define_tensor([-1, -1, 32], dtype=dtype) for _ in range(2))
        cos, sin = (fd.define_tensor([-1, 32], dtype=dtype) for _ in range(2))
        wide = [fd.ops.cast(t, DataType.Float) for t in (q, k, cos, sin)]
        for t in wide[:2]:
            fd.add_output(fd.ops.cast(rope(fd, t, *wide[2:]), dtype))
    return fd


def heads(q: int, k: int, length: int, dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    shapes = [(q, length, 32), (k, length, 32), (length, 32), (length, 32)]
    return [random(s, torch.float32, i).to(dtype) for i, s in enumerate(shapes)]


def test_queries_and_keys_are_turned_in_one_launch() -> None:
    fd = queries_and_keys()
    for q, k, length in ((8, 2, 17), (4, 4, 64), (1, 1, 1), (3, 1, 500)):
        given = heads(q, k, length)
        got = fd.execute(given, _enable_options=GPU)
        cos, sin = (t.double() for t in given[2:])
        for out, x in zip(got, given[:2], strict=True):
            want = rope_of_torch(x.double(), cos, sin)
            torch.testing.assert_close(out.double(), want, rtol=1e-2, atol=1e-2)
    assert launched(fd, heads(8, 2, 17)) == ["horizontal"]
    assert launched(fd, heads(8, 2, 17), "horizontal_fusion") == ["pointwise"] * 2


def test_large_tensors_have_kernels_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit applies to the bytes of whole tensors. Inputs above it are a class by
    themselves."""
    monkeypatch.setattr(horizontal, "MAX_BYTES", 1 << 20)
    fd = queries_and_keys()
    length = horizontal.MAX_BYTES // (2 * 32 * (4 + 1 + 1 + 1))
    assert launched(fd, heads(4, 1, length)) == ["horizontal"]
    assert launched(fd, heads(4, 1, length + 1)) == ["pointwise"] * 2


def test_plain_loops_of_a_cpu_stay_apart() -> None:
    fd = queries_and_keys()
    with PythonProfiler() as profiler:
        fd.execute(heads(2, 1, 8))
    assert [row.scheduler for row in profiler.profile.kernel_profiles] == ["pointwise"] * 2


def test_an_update_stands_beside_what_reads_none_of_it() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        y, s = fd.define_tensor([-1], contiguity=True), fd.define_tensor([-1], contiguity=True)
        fd.add_output(fd.ops.add(x, fd.ops.broadcast(s, [True, False])), x)
        fd.add_output(fd.ops.mul(y, s), y)
        fd.add_output(fd.ops.exp(s))
    x, y, s = random((6, 40), torch.float32, 1), random((40,), torch.float32, 2), torch.randn(40)
    wanted = [x.double() + s.double(), y.double() * s.double(), torch.exp(s.double())]
    (out,) = fd.execute([x, y, s], _enable_options=GPU)
    for got, want in zip((x, y, out), wanted, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
    assert launched(fd, [x, y, s]) == ["horizontal"]


def test_what_waits_for_another_result_does_not_join_it() -> None:
    """The second part reads a reduction of the first part's result."""
    with FusionDefinition() as fd:
        x, y = fd.define_tensor([-1, -1]), fd.define_tensor([-1])
        first = fd.ops.mul(x, fd.ops.broadcast(y, [True, False]))
        total = fd.ops.sum(fd.ops.segment_set(first), [0, 1])
        fd.add_output(first)
        fd.add_output(fd.ops.add(y, fd.ops.broadcast(fd.ops.segment_set(total), [True])))
    x, y = random((5, 70), torch.float32, 1), random((70,), torch.float32, 2)
    got = fd.execute([x, y], _enable_options=GPU)
    want = x.double() * y.double()
    torch.testing.assert_close(got[0].double(), want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got[1].double(), y.double() + want.sum(), rtol=1e-5, atol=1e-4)
    assert "horizontal" not in launched(fd, [x, y])


def test_more_parts_than_one_kernel_has() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        others = [
            fd.define_tensor([-1, -1], contiguity=True) for _ in range(horizontal.MAX_PARTS + 2)
        ]
        for y in others:
            fd.add_output(fd.ops.mul(y, fd.ops.broadcast(x, [True, False])))
    row = random((33,), torch.float32, 9)
    given = [random((k + 2, 33), torch.float32, k) for k in range(len(others))]
    for out, y in zip(fd.execute([row, *given], _enable_options=GPU), given, strict=True):
        torch.testing.assert_close(out.double(), y.double() * row.double(), rtol=1e-6, atol=1e-6)
    assert launched(fd, [row, *given]) == ["horizontal"] * 2


def test_ranks_join_their_shards() -> None:
    with FusionDefinition() as fd:
        q, k = (fd.define_tensor([-1, -1, 32]) for _ in range(2))
        cos, sin = (fd.define_tensor([-1, 32]) for _ in range(2))
        mesh = multidevice.DeviceMesh([0, 1])
        for t in (q, k, cos, sin):
            t.set_device_mesh(mesh)
        for t in (q, k):
            t.outer_split(0, 2)
            t.axis(0).parallelize(ParallelType.mesh_x)
            fd.add_output(rope(fd, t, cos, sin))
    given = heads(6, 2, 19, torch.float32)
    cos, sin = (t.double() for t in given[2:])

    def body() -> None:
        rank = Communicator.instance().rank()
        mine = [t.chunk(2)[rank].contiguous() for t in given[:2]]
        got = fd.execute([*mine, *given[2:]], _enable_options=GPU)
        for out, x in zip(got, mine, strict=True):
            want = rope_of_torch(x.double(), cos, sin)
            torch.testing.assert_close(out.double(), want, rtol=1e-6, atol=1e-6)

    with simulate(2) as world:
        world.run(body)


def test_the_text_of_a_program_has_the_kernel_whole() -> None:
    fd = queries_and_keys(DataType.Float)
    given = heads(3, 2, 11, torch.float32)
    wanted = fd.execute(given, _enable_options=GPU)
    text = fd.fec.program_for(given).full_text()
    assert "Kernel group 0 (horizontal)" in text
    program = parse(text)
    assert equal(program, fd.fec.program_for(given))
    for out, want in zip(HostIrEvaluator(program).run(given), wanted, strict=True):
        torch.testing.assert_close(out, want, rtol=1e-6, atol=1e-6)


def test_fusions_know_their_parts() -> None:
    fusion = define(rows_and_all, [None], [None, None])
    assert isinstance(fusion, Fusion)
    parts = list(horizontal.parts_of(fusion))
    assert [len(p.outputs) for p in parts] == [1, 2]
    numbers = [{tv.number for tv in p.tensors()} for p in parts]
    assert numbers[0] & numbers[1] == {0}
