"""The op functions of a fusion definition, under nvFuser's names (`fd.ops.add`, ...).

Plain functions on the active fusion. Elementwise ones come from the table (`fuser.ops.table`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fuser.ops.contractions import linear, matmul
from fuser.ops.elementwise import (
    ELEMENTWISE,
    addcmul,
    cast,
    clamp,
    imag,
    lerp,
    logical_right_shift,
    real,
    segment_set,
    sign,
    threshold,
)
from fuser.ops.elementwise import set_ as set
from fuser.ops.factories import full, iota, triu
from fuser.ops.reductions import max, min, prod, sum, var, var_mean, welford
from fuser.ops.reshape import reshape
from fuser.ops.resize import cat, pad, slice
from fuser.ops.unsupported import UNSUPPORTED
from fuser.ops.views import (
    broadcast,
    broadcast_in_dim,
    expand,
    permute,
    shape,
    size,
    squeeze,
    stride_order,
)

_GENERATED: dict[str, Callable[..., Any]] = {**ELEMENTWISE, **UNSUPPORTED}


def __getattr__(name: str) -> Callable[..., Any]:
    function = _GENERATED.get(name)
    if function is None:
        raise AttributeError(f"module 'fuser.ops' has no op {name!r}")
    return function


def __dir__() -> list[str]:
    return sorted({*_GENERATED, *__all__})


__all__ = [
    "addcmul",
    "broadcast",
    "broadcast_in_dim",
    "cast",
    "cat",
    "clamp",
    "expand",
    "full",
    "imag",
    "iota",
    "lerp",
    "linear",
    "logical_right_shift",
    "matmul",
    "max",
    "min",
    "pad",
    "permute",
    "prod",
    "real",
    "reshape",
    "segment_set",
    "set",
    "shape",
    "sign",
    "size",
    "slice",
    "squeeze",
    "stride_order",
    "sum",
    "threshold",
    "triu",
    "var",
    "var_mean",
    "welford",
]
