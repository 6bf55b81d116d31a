"""Table lookups as generated kernels on a GPU, compared with torch in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fuser import DataType, FusionDefinition

pytestmark = pytest.mark.gpu
DTYPES = (torch.bfloat16, torch.float32, torch.float64)
Build = Callable[..., Any]


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).cuda()


def places(*shape: int, below: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randint(0, below, shape, generator=generator).to(dtype).cuda()


def check(build: Build, reference: Build, *inputs: torch.Tensor, limit: float) -> None:
    with FusionDefinition() as fd:
        fd.add_output(build(fd, *(fd.from_pytorch(x) for x in inputs)))
    expected = reference(*(x.double() if x.is_floating_point() else x for x in inputs))
    for _ in range(4):  # launched, then replayed
        (out,) = fd.execute(inputs)
        assert float((out.double() - expected).abs().max()) <= limit


def limit_of(dtype: torch.dtype) -> float:
    return {torch.bfloat16: 0.05, torch.float32: 2e-5, torch.float64: 1e-12}[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [384, 1000, 50257 // 7])
def test_an_embedding_and_its_norm(dtype: torch.dtype, columns: int) -> None:
    weight, tokens = draw(3000, columns, dtype=dtype), places(32, 56, below=3000)

    def build(fd: FusionDefinition, tokens: Any, weight: Any) -> Any:
        ops = fd.ops
        wide = DataType.Double if dtype is torch.float64 else DataType.Float
        x = ops.cast(ops.embedding_fwd(tokens, weight), wide)
        var, mean = ops.var_mean(x, [2], 0, True)
        return ops.cast((x - mean) * ops.rsqrt(var + 1e-5), weight.dtype())

    def reference(tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(weight[tokens], [columns])

    check(build, reference, tokens, weight, limit=limit_of(dtype))


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_entropy_by_take_along_axis(dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    x, target = draw(512, 3001, dtype=dtype), places(512, 1, below=3001, dtype=index_dtype)

    def build(fd: FusionDefinition, x: Any, target: Any) -> Any:
        ops = fd.ops
        x = ops.cast(x, DataType.Double if dtype is torch.float64 else DataType.Float)
        m = ops.max(x, 1, keepdim=True)
        log_sum = ops.log(ops.sum(ops.exp(x - m), 1, keepdim=True)) + m
        return log_sum - ops.take_along_axis(x, target, 1)

    def reference(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, target[:, 0].long(), reduction="none")[:, None]

    check(build, reference, x, target, limit=1e-4 if dtype is not torch.float64 else 1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_tables(dtype: torch.dtype) -> None:
    table, rows = draw(700, 96, dtype=dtype), places(333, below=700)
    along = places(512, 96, below=700)
    turned = draw(96, 700, dtype=dtype, seed=2).t()
    limit = limit_of(dtype)
    check(
        lambda fd, t, i: fd.ops.neg(fd.ops.index_select(t, i, 0)),
        lambda t, i: -t.index_select(0, i),
        table,
        rows,
        limit=limit,
    )
    check(
        lambda fd, t, i: fd.ops.gather(t, i, 0),
        lambda t, i: t.gather(0, i),
        turned,
        along,
        limit=limit,
    )
    check(lambda fd, t: t[3] + t[-1], lambda t: t[3] + t[-1], table, limit=limit)
    check(
        lambda fd, t, i, s: fd.ops.scatter(t, i, s, 0),
        lambda t, i, s: t.scatter(0, i, s),
        table,
        torch.argsort(places(700, 96, below=1 << 30), 0),
        draw(700, 96, dtype=dtype, seed=3),
        limit=limit,
    )


def test_places_outside_of_a_table_read_nothing() -> None:
    table = draw(5, 64, dtype=torch.float32)
    index = torch.tensor([0, 5, -1, 1 << 40, 4], device="cuda")
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.index_select(fd.from_pytorch(table), fd.from_pytorch(index), 0))
    (out,) = fd.execute([table, index])
    assert torch.equal(out[[0, 4]], table[[0, 4]]) and bool(out[1:4].isnan().all())


def test_a_table_of_more_than_32_bits() -> None:
    rows, columns = (1 << 31) // 1024 + 3, 1024
    table = torch.zeros(rows, columns, dtype=torch.int8, device="cuda").view(torch.bool)
    wanted = torch.tensor([0, rows - 1, rows - 2, 5], device="cuda")
    table[-1, -1] = table[5, 7] = True
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.index_select(fd.from_pytorch(table), fd.from_pytorch(wanted), 0))
    (out,) = fd.execute([table, wanted])
    assert torch.equal(out, table[wanted])
