"""Names of the op API that this version does not implement: calling one raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from fuser.arguments import show
from fuser.ops.building import unsupported

_NAMES = """
    argsort complex cumprod cummax cummin cumsum cutlass_nvfp4_grouped_mm embedding_fwd gather
    grouped_mm index_select nv_block_quantize nv_grouped_block_quantize
    preprocess_grouped_matmul_input_sf scaled_mm scatter select take_along_axis topk
"""


def _make(name: str) -> Callable[..., NoReturn]:
    def function(*args: object, **kwargs: object) -> NoReturn:
        operands = ", ".join(map(show, (*args, *kwargs.values())))
        raise unsupported(name, f"not implemented yet, called with ({operands})")

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"Raise `UnsupportedError`: `{name}` is not implemented yet."
    return function


UNSUPPORTED: dict[str, Callable[..., NoReturn]] = {n: _make(n) for n in _NAMES.split()}
