"""What scaled_mm means in torch, and grouped_mm for each group: its own kernel on CUDA, where it
has one for the call, else a product in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fuser.ops.reference.matmul_calls import Tensor

Given = Mapping[str, Tensor]

# What the tensor cores' kernels want: extents of k and n in elements, and the results they make.
_MULTIPLE = 16
_NATIVE = (torch.bfloat16, torch.float16, torch.float32)
_BIASED = (torch.bfloat16, torch.float16)
# Of addresses, in bytes: what kernels load at a time.
_ALIGNMENT = 16
# (major, minor) of the first GPU with products of floats of one byte.
_FIRST_CAPABILITY = 8, 9


def scaled_product(given: Given, dtype: torch.dtype, wide: torch.dtype) -> Tensor:
    """Return alpha * (scale1 * mat1) @ (scale2 * mat2) + beta * bias, summed in `wide`; in `dtype`
    where torch's kernel makes all of it, else in `wide`."""
    a, b = given["mat1"], given["mat2"]
    is_native = wide is torch.float32 and _is_native(a, b)
    if is_native and (found := _in_one_call(given, dtype)) is not None:
        return found
    if is_native:
        one = torch.ones((), device=a.device)
        product = _native(a, b, one, one, torch.float32)
    else:
        product = torch.matmul(a.to(wide), b.to(wide))
    for field in ("scale1", "scale2", "alpha"):
        if field in given:
            product = product * _fitting(given[field].to(wide))
    if "bias" not in given:
        return product
    bias = given["bias"].to(wide)
    return product + (bias * _fitting(given["beta"].to(wide)) if "beta" in given else bias)


def scaled_into(given: Given, out: Tensor, wide: torch.dtype) -> None:
    """Write what `scaled_product` returns into `out`, rounded once."""
    a, b = given["mat1"], given["mat2"]
    is_native = wide is torch.float32 and _can_write(out) and _is_native(a, b)
    if is_native and _in_one_call(given, out.dtype, out) is not None:
        return
    # Scales of a group may come with an axis of one element for the groups.
    out.copy_(scaled_product(given, out.dtype, wide).reshape(out.shape))


def bind_scaled(
    fields: Sequence[str], ins: Sequence[Tensor], out: Tensor
) -> Callable[[Sequence[Tensor], Sequence[Tensor]], object] | None:
    """Return torch's kernel for operands and a result that lie like these, with nothing left to
    look at in a call; None where any has to be looked at, or copied."""
    given = dict(zip(fields, ins, strict=True))
    a, b = given["mat1"], given["mat2"]
    if not (_can_write(out) and _is_native(a, b)):
        return None
    bias, scales = given.get("bias"), (given["scale1"], given["scale2"])
    is_one = all(scale.numel() == 1 for scale in scales)
    is_each = scales[0].numel() == a.shape[0] and scales[1].numel() == b.shape[1]
    lying = (a, b.t(), *scales, *([] if bias is None else [bias]))
    if not (is_one or is_each) or not all(map(_lies_as_wanted, lying)):
        return None
    if _in_one_call(given, out.dtype, out) is None:
        return None
    call: Any = partial(torch._scaled_mm, out_dtype=out.dtype)  # pyright: ignore[reportPrivateImportUsage]
    if is_one:
        return lambda ins, outs: call(
            *ins[:2], *(scale.reshape(()) for scale in ins[2:4]), *ins[4:], out=outs[0]
        )
    # After the matrices and scales, what is given is the bias alone, as torch has them in order.
    return lambda ins, outs: call(*ins, out=outs[0])


def _lies_as_wanted(x: Tensor) -> bool:
    return x.is_contiguous() and x.is_cuda and not x.data_ptr() % _ALIGNMENT


def _can_write(out: Tensor) -> bool:
    """Whether torch's kernel may write into a tensor as it is."""
    return out.is_cuda and out.is_contiguous() and not out.data_ptr() % _ALIGNMENT


def _fitting(x: Tensor) -> Tensor:
    """Return one element without axes, which fits any tensor."""
    return x.reshape(()) if x.numel() == 1 else x


def _is_native(a: Tensor, b: Tensor) -> bool:
    if not a.is_cuda or torch.cuda.get_device_capability(a.device) < _FIRST_CAPABILITY:
        return False
    sizes = *a.shape, *b.shape
    is_whole = not (b.shape[0] % _MULTIPLE or b.shape[1] % _MULTIPLE)
    # There is no kernel for two factors with the shorter mantissa.
    return 0 not in sizes and is_whole and torch.float8_e4m3fn in (a.dtype, b.dtype)


def _in_one_call(given: Given, dtype: torch.dtype, out: Tensor | None = None) -> Tensor | None:
    """Return the result, in `out` where that is given, where torch's kernel scales, adds the bias
    and rounds by itself."""
    bias = given.get("bias")
    if "alpha" in given or "beta" in given or dtype not in _NATIVE:
        return None
    if bias is not None and (bias.ndim != 1 or bias.dtype is not dtype or dtype not in _BIASED):
        return None
    a, b, scale1, scale2 = (given[f] for f in ("mat1", "mat2", "scale1", "scale2"))
    if bias is not None and bias.shape[0] != b.shape[1]:
        return None
    if scale1.numel() == scale2.numel() == 1:
        return _native(a, b, _fitting(scale1), _fitting(scale2), dtype, bias, out)
    if dtype is not torch.bfloat16:
        return None
    rows, columns = scale1.expand(a.shape[0], 1), scale2.expand(1, b.shape[1])
    return _native(a, b, rows, columns, dtype, bias, out)


def _native(
    a: Tensor,
    b: Tensor,
    scale1: Tensor,
    scale2: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Call torch's kernel, which reads rows of a and columns of b."""
    rows, columns = _aligned(a), _aligned(b.t()).t()
    scales = _aligned(scale1), _aligned(scale2)
    bias = None if bias is None else _aligned(bias)
    # With the name of each argument: torch's types know no `out`.
    into: Any = {"bias": bias, "out_dtype": dtype} | ({} if out is None else {"out": out})
    return torch._scaled_mm(rows, columns, *scales, **into)  # pyright: ignore[reportPrivateImportUsage]


def _aligned(x: Tensor) -> Tensor:
    """Return a contiguous tensor that begins where a vector may: parts of others, as groups have
    them, begin anywhere."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % _ALIGNMENT else x
