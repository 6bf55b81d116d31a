"""The op functions of a fusion definition, under nvFuser's names (`fd.ops.add`, ...).

Plain functions on the active fusion. Elementwise ones come from the table (`fuser.ops.table`). Each
takes what its annotations say, and refuses the rest at the entrance (`fuser.arguments`).
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from fuser.arguments import checked
from fuser.errors import UnknownOpError
from fuser.ops.attention import sdpfa_bwd, sdpfa_fwd
from fuser.ops.building import ARGUMENTS
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
from fuser.ops.random import normal, rand_like, randn_like, uniform
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

_GENERATED: dict[str, Callable[..., Any]] = {
    name: checked(op, kinds=ARGUMENTS) for name, op in {**ELEMENTWISE, **UNSUPPORTED}.items()
}

# What torch has a function for, and nvFuser's users write with other ops.
_SPELLED = {
    "gelu": "write mul(mul(x, 0.5), add(erf(mul(x, 0.7071067811865476)), 1.0))",
    "softmax": "write e = exp(sub(x, max(x, dim, True))), then div(e, sum(e, dim, True))",
    "mean": "write div(sum(x, dim), n)",
    "layer_norm": "write it with var_mean(x, [-1], 0, True), sub, rsqrt and mul",
    "view": "it is called reshape",
    "transpose": "it is called permute, which takes all axes",
    "unsqueeze": "it is called broadcast, which takes a flag per axis of the result",
    "mm": "it is called matmul",
    "float": "it is called cast, which takes the dtype",
    "to": "it is called cast, which takes the dtype",
}


def __getattr__(name: str) -> Callable[..., Any]:
    function = _GENERATED.get(name)
    if function is None:
        near = get_close_matches(name, __dir__(), n=1)
        hint = _SPELLED.get(name) or (f"did you mean {near[0]}?" if near else "see dir(fd.ops)")
        raise UnknownOpError(f"module 'fuser.ops' has no op {name!r}: {hint}")
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
    "normal",
    "pad",
    "permute",
    "prod",
    "rand_like",
    "randn_like",
    "real",
    "reshape",
    "sdpfa_bwd",
    "sdpfa_fwd",
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
    "uniform",
    "var",
    "var_mean",
    "welford",
]

# The public names stand behind the entrance; the ops call one another directly.
globals().update({n: checked(globals()[n], name=n, kinds=ARGUMENTS) for n in __all__})
