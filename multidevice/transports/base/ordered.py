"""Floats as integers in the same order: transports lose NaN in MIN and MAX, torch keeps it."""

from __future__ import annotations

import torch

# The integers that hold the bits of a float, and their largest value.
_BITS = {torch.float32: (torch.int32, 2**31 - 1), torch.float64: (torch.int64, 2**63 - 1)}


def as_ordered(x: torch.Tensor, *, is_max: bool) -> torch.Tensor:
    """Returns integers in the order of the floats; NaN lies beyond the end that is looked for."""
    wide = x.float() if x.dtype.itemsize == 2 else x
    kind, largest = _BITS[wide.dtype]
    bits = wide.view(kind)
    # Of negative floats a larger pattern is a smaller number: flip all bits but the sign.
    keys = torch.where(bits < 0, bits ^ largest, bits)
    return torch.where(wide.isnan(), largest if is_max else -largest - 1, keys)


def from_ordered(keys: torch.Tensor) -> torch.Tensor:
    """Returns the floats of `as_ordered`; both ends of the integers are NaN."""
    wide = {kind: (dtype, largest) for dtype, (kind, largest) in _BITS.items()}
    dtype, largest = wide[keys.dtype]
    return torch.where(keys < 0, keys ^ largest, keys).view(dtype)
