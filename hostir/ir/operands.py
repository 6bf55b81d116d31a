"""What a launch or a post must have in common with the fusion that it runs."""

from __future__ import annotations

from collections.abc import Callable

from fuser.ir.fusion import Fusion
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.tensor import TensorView
from fuser.support.errors import VerifyError
from hostir.ir.ops import LaunchKernel, PostOnStream
from hostir.ir.program import dropped_axes_of


def kernel_kind(value: TensorView | Scalar, like: TensorView | Scalar | None = None) -> object:
    """Return what a launch and its kernel must agree on; `like` may be a slice of the value."""
    if isinstance(value, TensorView):
        shape = list(map(str, value.shape()))
        gone = dropped_axes_of(value, like.ndim) if isinstance(like, TensorView) else ()
        shape = [n for axis, n in enumerate(shape) if axis not in gone]
        return (value.dtype(), shape, value.mesh)
    return value.dtype


def unit_kind(value: TensorView | Scalar, like: object = None) -> object:
    """Return what a post and its unit must agree on."""
    if isinstance(value, TensorView):
        return (value.dtype(), value.ndim, value.mesh)
    return value.dtype


def check_operands(
    op: LaunchKernel | PostOnStream,
    fusion: Fusion,
    where: str,
    kind: Callable[..., object],
) -> None:
    """Raise `VerifyError` where operands of a launch or post are not those of its fusion, which
    stands at `where`; `kind` says what must be equal."""
    for what, mine, theirs in (
        ("inputs", op.ins, fusion.inputs),
        ("outputs", op.outs, fusion.outputs),
    ):
        if len(mine) != len(theirs):
            raise VerifyError(f"{len(mine)} {what}, but {where} has {len(theirs)}")
        for k, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if kind(a) != kind(b, like=a):
                differ = _difference(a, b)
                raise VerifyError(f"its {what[:-1]} {k} is {a}, but {where} has {b}{differ}")


def _difference(a: TensorView | Scalar, b: TensorView | Scalar) -> str:
    """Return in what a launch's operand differs from the fusion's, where that is one thing."""
    if not (isinstance(a, TensorView) and isinstance(b, TensorView)):
        return ""
    if a.dtype() is not b.dtype():
        return ", of another dtype"
    if a.ndim != b.ndim:
        return f": {a.ndim} axes, expected {b.ndim}"
    return ", on another mesh" if a.mesh != b.mesh else ", of other extents"
