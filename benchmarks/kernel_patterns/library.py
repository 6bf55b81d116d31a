"""Ops that torch carries out, compared with torch's best call for each, at three shapes.

A row belongs to a class of nodes that torch computes (`nodes_computed("library")`). A class without
a row fails `tests/scripts/test_library_cells.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from fuser import DataType, FusionDefinition
from fuser.ir.fusion import TensorOp
from fuser.ir.ops import nodes
from fuser.ir.ops.attention_ops import SdpaBwdOp, SdpaFwdOp
from fuser.ir.ops.lookup import IndexPutAccumulateOp, ScatterOp
from fuser.ir.ops.matrix_products import GroupedMmaOp, GroupedScalesOp, ScaledMmaOp
from fuser.ir.ops.scan_ops import ArgsortOp, ScanOp, TopKOp

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
HALVES, REALS = (BFLOAT16, FLOAT16), (BFLOAT16, FLOAT16, FLOAT32)
FLOAT8 = torch.float8_e4m3fn
Shape = tuple[int, ...]
Tensor = torch.Tensor
aten = torch.ops.aten


@dataclass(frozen=True)
class LibraryRow:
    """One op: our definition, torch's best call, and operands for a shape, dtype and device.

    `small` is a shape to try the row with. `peer` is None where torch has no such call.
    """

    node: type[TensorOp]
    build: Callable[..., Any]
    peer: Callable[..., Any] | None
    operands: Callable[[Shape, torch.dtype, str], Sequence[Tensor]]
    shapes: tuple[Shape, Shape, Shape]
    small: Shape
    dtypes: tuple[torch.dtype, ...] = REALS
    # Whether all elements equal torch's, and whether torch has its call for a CPU.
    is_exact: bool = False
    runs_on_cpu: bool = True

    def define(self, inputs: Sequence[Tensor]) -> FusionDefinition:
        """Returns the definition for inputs like these."""
        with FusionDefinition() as fd:
            made = self.build(fd, *(fd.from_pytorch(t) for t in inputs))
            for out in made if isinstance(made, tuple) else (made,):
                fd.add_output(out)
        return fd


# ------------------------------------------------------------------ operands
def numbers(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    """Returns a tensor of normal random numbers."""
    return torch.randn(shape, device=device).to(dtype)


def indices(device: str, below: int, *shape: int) -> Tensor:
    """Returns a tensor of random integers from 0 to `below` - 1."""
    return torch.randint(0, below, shape, device=device)


def _linear_operands(shape: Shape, dtype: torch.dtype, device: str) -> Sequence[Tensor]:
    m, k, n = shape
    return numbers(device, dtype, m, k), numbers(device, dtype, n, k)


def _batches(shape: Shape, dtype: torch.dtype, device: str) -> Sequence[Tensor]:
    b, m, k, n = shape
    return numbers(device, dtype, b, m, k), numbers(device, dtype, b, k, n)


def _scaled_operands(shape: Shape, dtype: torch.dtype, device: str) -> Sequence[Tensor]:
    m, k, n = shape
    del dtype
    factors = numbers(device, FLOAT8, m, k), numbers(device, FLOAT8, n, k)
    return (*factors, torch.rand(m, 1, device=device) + 0.5, torch.rand(1, n, device=device) + 0.5)


def _groups(shape: Shape, dtype: torch.dtype, device: str) -> Sequence[Tensor]:
    """Returns operands in groups of rows of unequal sizes; rows after the last group belong to
    none.
    """
    g, m, k, n = shape
    sizes = [(m - 1) // g + (i % 3 - 1) * (m // (4 * g)) for i in range(g)]
    ends = torch.tensor([min(e, m) for e in accumulate(sizes)], device=device, dtype=torch.int32)
    return numbers(device, dtype, m, k), numbers(device, dtype, g, k, n), ends


def _tiled(shape: Shape, dtype: torch.dtype, device: str) -> Sequence[Tensor]:
    g, m, k = shape
    starts = torch.arange(g, device=device, dtype=torch.int32) * (m // g)
    begins = torch.arange(g, device=device, dtype=torch.int32) * (-(-(m // g) // 128) * 128)
    return numbers(device, dtype, m, k), starts, begins


def _rows(shape: Shape, dtype: torch.dtype, device: str) -> Sequence[Tensor]:
    return (numbers(device, dtype, *shape),)


def _scattered(shape: Shape, dtype: torch.dtype, device: str) -> Sequence[Tensor]:
    places = torch.rand(shape, device=device).argsort(1)
    return numbers(device, dtype, *shape), places, numbers(device, dtype, *shape)


def _added(shape: Shape, dtype: torch.dtype, device: str) -> Sequence[Tensor]:
    m, n, rows = shape
    return (
        numbers(device, dtype, m, n),
        indices(device, m, rows),
        numbers(device, dtype, rows, n),
    )


def _heads(shape: Shape, dtype: torch.dtype, device: str) -> Sequence[Tensor]:
    b, h, s, e = shape
    return tuple(numbers(device, dtype, b, h, s, e) for _ in range(3))


def _attended(shape: Shape, dtype: torch.dtype, device: str) -> Sequence[Tensor]:
    q, k, v = _heads(shape, dtype, device)
    out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention(q, k, v)
    return torch.randn_like(out), q, k, v, out, lse, seed, offset


# ------------------------------------------------------------------ ops
def _topk(fd: FusionDefinition, x: Any, k: int) -> Any:
    return fd.ops.topk(x, fd.define_scalar(k, DataType.Int), sorted=True)


def _scaled(fd: FusionDefinition, a: Any, b: Any, s: Any, t: Any) -> Any:
    turned = fd.ops.permute(b, [1, 0])
    return fd.ops.scaled_mm(a, turned, s, t, dtype=DataType.BFloat16)[0]


def _attention_backward(fd: FusionDefinition, *given: Any) -> Any:
    dropout, causal = fd.define_scalar(0.0), fd.define_scalar(False)
    grad, q, k, v, out, lse, seed, offset = given
    return fd.ops.sdpfa_bwd(grad, q, k, v, out, lse, dropout, causal, seed, offset, None)


def _torch_attention_backward(*given: Tensor) -> Any:
    grad, q, k, v, out, lse, seed, offset = given
    s = q.shape[2]
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, s, s, 0.0, False, seed, offset
    )


def _cumulative(name: str) -> LibraryRow:
    """Returns the row of a scan; sums of 16-bit floats are computed in float32 and rounded once, as
    ours are.
    """
    function = getattr(torch, name)
    adds = name in ("cumsum", "cumprod")

    def peer(x: Tensor) -> Tensor:
        if not adds:
            return function(x, 1)[0]
        return function(x, 1, dtype=FLOAT32).to(x.dtype) if x.dtype in HALVES else function(x, 1)

    return LibraryRow(
        ScanOp,
        lambda fd, x: getattr(fd.ops, name)(x, 1),
        peer,
        _rows,
        ((8192, 8192), (64, 128256), (65536, 512)),
        (6, 40),
        is_exact=True,
    )


def _put(acc: Tensor, index: Tensor, value: Tensor) -> Tensor:
    if acc.dtype in HALVES:
        return acc.float().index_put((index,), value.float(), accumulate=True).to(acc.dtype)
    return acc.index_put((index,), value, accumulate=True)


LIBRARY: dict[str, LibraryRow] = {
    "matmul": LibraryRow(
        nodes.MatmulOp,
        lambda fd, a, b: fd.ops.matmul(a, b),
        torch.matmul,
        _batches,
        ((64, 512, 128, 512), (4, 2048, 2048, 2048), (256, 64, 64, 64)),
        (2, 8, 16, 8),
    ),
    "linear": LibraryRow(
        nodes.LinearOp,
        lambda fd, x, w: fd.ops.linear(x, w),
        F.linear,
        _linear_operands,
        ((1, 8192, 8192), (16, 8192, 28672), (4096, 4096, 4096)),
        (4, 16, 8),
    ),
    "scaled_mm": LibraryRow(
        ScaledMmaOp,
        _scaled,
        lambda a, b, s, t: torch._scaled_mm(a, b.t(), s, t, out_dtype=BFLOAT16),  # pyright: ignore
        _scaled_operands,
        ((4096, 4096, 4096), (16, 8192, 8192), (8192, 8192, 1024)),
        (16, 32, 16),
        dtypes=(BFLOAT16,),
        runs_on_cpu=False,
    ),
    "grouped_mm": LibraryRow(
        GroupedMmaOp,
        lambda fd, x, w, ends: fd.ops.grouped_mm(x, w, ends),
        lambda x, w, ends: torch._grouped_mm(x, w, ends),  # pyright: ignore
        _groups,
        ((8, 4096, 4096, 4096), (64, 4096, 2048, 1408), (8, 512, 4096, 4096)),
        (2, 24, 16, 16),
        dtypes=(BFLOAT16,),
        runs_on_cpu=False,
    ),
    "preprocess_grouped_matmul_input_sf": LibraryRow(
        GroupedScalesOp,
        lambda fd, *given: fd.ops.preprocess_grouped_matmul_input_sf(*given),
        None,
        _tiled,
        ((8, 4096, 128), (64, 8192, 64), (4, 65536, 224)),
        (2, 256, 8),
        dtypes=(FLOAT32,),
    ),
    "sdpfa_fwd": LibraryRow(
        SdpaFwdOp,
        lambda fd, q, k, v: fd.ops.sdpfa_fwd(q, k, v)[0],
        F.scaled_dot_product_attention,
        _heads,
        ((4, 32, 2048, 128), (8, 12, 1024, 64), (1, 16, 8192, 128)),
        (1, 2, 16, 16),
        dtypes=HALVES,
    ),
    "sdpfa_bwd": LibraryRow(
        SdpaBwdOp,
        _attention_backward,
        _torch_attention_backward,
        _attended,
        ((4, 32, 2048, 128), (8, 12, 1024, 64), (1, 16, 8192, 128)),
        (1, 2, 16, 16),
        dtypes=HALVES,
        runs_on_cpu=False,
    ),
    "topk of 8": LibraryRow(
        TopKOp,
        lambda fd, x: _topk(fd, x, 8),
        lambda x: torch.topk(x, 8),
        _rows,
        ((64, 128256), (8192, 4096), (4096, 256)),
        (4, 40),
    ),
    "topk of 1": LibraryRow(
        TopKOp,
        lambda fd, x: _topk(fd, x, 1)[1],
        lambda x: torch.argmax(x, 1, keepdim=True),
        _rows,
        ((8192, 32000), (64, 128256), (4096, 256)),
        (4, 40),
    ),
    "argsort": LibraryRow(
        ArgsortOp,
        lambda fd, x: fd.ops.argsort(x, 1, descending=True, stable=True),
        lambda x: torch.sort(x, dim=1, descending=True, stable=True).indices,
        _rows,
        ((4096, 4096), (64, 128256), (65536, 64)),
        (4, 40),
        is_exact=True,
    ),
    **{name: _cumulative(name) for name in ("cumsum", "cumprod", "cummax", "cummin")},
    "scatter": LibraryRow(
        ScatterOp,
        lambda fd, x, index, src: fd.ops.scatter(x, index, src, 1),
        lambda x, index, src: x.scatter(1, index, src),
        _scattered,
        ((8192, 1024), (64, 128256), (4096, 8192)),
        (4, 24),
        is_exact=True,
    ),
    "index_put_accumulate": LibraryRow(
        IndexPutAccumulateOp,
        lambda fd, x, index, value: fd.ops.index_put_accumulate(x, index, value),
        _put,
        _added,
        ((32000, 1024, 65536), (128256, 512, 8192), (4096, 256, 262144)),
        (20, 8, 60),
        is_exact=True,
    ),
}
