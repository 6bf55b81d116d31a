"""Input classes: what about the inputs changes the program.

Inputs of one class share everything down to the host program: dtypes, device, actual memory layout
of the local shards, and the concretized structure. Sizes stay symbolic.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fuser.ir.fusion import Fusion
from fuser.ir.layout_class import Layout, declared_order, layout_of, with_layout
from fuser.ir.scalar import Symbol
from fuser.ir.tensor import TensorView
from fuser.passes.concretize import concretization_key


@dataclass(frozen=True)
class InputClass:
    """The key, the sizes that made it, and the layout of each tensor input.

    The layout is None for a scalar, and for a tensor whose user declared an allocation domain of
    transformed axes.
    """

    key: Hashable
    sizes: Mapping[Symbol, int]
    layouts: tuple[Layout | None, ...]


def classify(
    fusion: Fusion,
    inputs: Sequence[torch.Tensor | bool | int | float],
    sizes: Mapping[Symbol, int],
    device: torch.device,
) -> InputClass:
    """Return the class of bound inputs (`sizes` maps symbols to global sizes)."""
    layouts = tuple(
        _layout(value, argument)
        if isinstance(argument, torch.Tensor) and isinstance(value, TensorView)
        else None
        for value, argument in zip(fusion.inputs, inputs, strict=True)
    )
    key = (device.type, device.index, layouts, concretization_key(fusion, sizes))
    return InputClass(key, sizes, layouts)


def _layout(tv: TensorView, argument: torch.Tensor) -> Layout | None:
    order = declared_order(tv)
    if order is None:
        return None
    skipped = [a.is_broadcast for a in tv.domain.no_reductions]
    return layout_of(order, skipped, argument.shape, argument.stride())


def specialise(fusion: Fusion, input_class: InputClass) -> None:
    """Give every tensor input of `fusion` (a copy) the layout that its argument has."""
    for value, layout in zip(fusion.inputs, input_class.layouts, strict=True):
        if isinstance(value, TensorView) and layout is not None:
            value.domain = with_layout(value.domain, layout)
