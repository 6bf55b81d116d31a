"""Kernels whose results have a stream axis: a launch computes one step of the host's loop.

    out [stream{3}, 2, 4] = add(x, y)   ->   kernel(x, y, out, streamIdx): rows 2 * streamIdx on

The loop over the axis is not emitted; its index is the kernel's last argument.
"""

from __future__ import annotations

from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion
from fuser.ir.scalar.constructors import Scalar, Symbol
from fuser.ir.tensor import TensorView
from fuser.support.errors import UnsupportedError

_NAME = "streamIdx"


def steps_of(fusion: Fusion) -> Scalar | None:
    """Return the number of steps of which a launch computes one, None without a stream axis."""
    made = (out for op in fusion.exprs for out in op.outputs)
    streams = (a for tv in made for a in tv.domain.loop if a.is_stream)
    return next((fusion.canonical(a.size) for a in streams), None)


def with_stream_index(fusion: Fusion) -> Fusion:
    """Return a copy with the number of the step as its last input; without a stream axis, or with
    that input already, the fusion."""
    if steps_of(fusion) is None or _stream_input(fusion) is not None:
        return fusion
    made, _ = fusion.copy()
    # No index for the hoister: a launch has one value of it.
    made.inputs = [*made.inputs, Symbol(_NAME, DataType.Index, lo=0)]
    return made


def stream_index(fusion: Fusion, tv: TensorView) -> Symbol:
    """Return the symbol of the step. Raises `UnsupportedError` when the kernel is given none."""
    found = _stream_input(fusion)
    if found is None:
        raise UnsupportedError(f"{tv} has a stream axis in a kernel that is given no step")
    return found


def _stream_input(fusion: Fusion) -> Symbol | None:
    scalars = (v for v in fusion.inputs if isinstance(v, Symbol))
    return next((v for v in scalars if v.name == _NAME), None)
