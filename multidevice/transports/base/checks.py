"""What all backends ask of the buffers of a call, whatever moves them."""

from __future__ import annotations

import torch

from fuser.support.errors import DtypeError, InputError, UnsupportedError
from multidevice.transports.base.protocol import BUFFERS, RED_OPS, RedOp

HALF = frozenset({torch.float16, torch.bfloat16})
FLOATING = HALF | {torch.float32, torch.float64}
COMPLEX = frozenset({torch.complex64, torch.complex128})
REDUCIBLE = FLOATING | COMPLEX | {torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool}


def tensor_text(tensor: torch.Tensor) -> str:
    """Returns dtype and shape as text: `float32[2, 3]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def check_fit(op: str, out: torch.Tensor | None, inp: torch.Tensor | None, count: int) -> None:
    """Checks that buffers have the parts of a team of `count` ranks, and one dtype."""
    out_parts, inp_parts = (count if parts == "n" else 1 for parts, _ in BUFFERS[op])
    for name, tensor, parts in (("out", out, out_parts), ("inp", inp, inp_parts)):
        if tensor is not None and tensor.numel() % parts:
            raise InputError(
                f"{op}: {name} {tensor_text(tensor)} does not split into {parts} equal parts"
            )
    if out is None or inp is None:
        return
    if out.dtype != inp.dtype:
        raise InputError(f"{op}: out is {out.dtype}, inp is {inp.dtype}")
    if out.numel() * inp_parts != inp.numel() * out_parts:
        raise InputError(
            f"{op}: out {tensor_text(out)} and inp {tensor_text(inp)} do not fit a team of "
            f"{count}: expected {out_parts} and {inp_parts} parts of one size"
        )


def check_reduction(op: str, reduce: RedOp, dtype: torch.dtype) -> None:
    """Checks that there is such a reduction of a dtype."""
    if reduce not in RED_OPS:
        raise UnsupportedError(f"{op}: unknown reduction {reduce!r}, known: {RED_OPS}")
    if dtype not in REDUCIBLE:
        raise UnsupportedError(f"{op}({reduce}): reductions of {dtype} are not supported")
    if dtype in COMPLEX:
        # Both parts by themselves: transports know no complex numbers.
        if reduce not in ("SUM", "AVG"):
            raise UnsupportedError(
                f"{op}({reduce}): {dtype} is reduced by sums and averages alone, part by part"
            )
        return
    if reduce == "AVG" and dtype not in FLOATING:
        raise DtypeError(f"{op}(avg): {dtype} has no average; use a floating-point dtype")


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    a_start, b_start = a.data_ptr(), b.data_ptr()
    a_stop = a_start + a.numel() * a.element_size()
    b_stop = b_start + b.numel() * b.element_size()
    return a_start < b_stop and b_start < a_stop
