"""Input classes: what about the inputs changes the program.

Inputs of one class share everything down to the host program: dtypes, device, actual memory layout
of the local shards, and the concretized structure. Sizes stay symbolic.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fuser.ir.domain import TensorDomain
from fuser.ir.fusion import Fusion
from fuser.ir.scalar import Symbol
from fuser.ir.tensor import TensorView
from fuser.ir.types import IterType
from fuser.passes.concretize import concretization_key


@dataclass(frozen=True)
class Layout:
    """How a local tensor lies in memory.

    `order` lists the dimensions outermost first; `contiguity` runs along it: None at dimensions of
    size 1 or stride 0, True where stride == next inner one's stride * size (innermost: 1).
    """

    order: tuple[int, ...]
    contiguity: tuple[bool | None, ...]


@dataclass(frozen=True)
class InputClass:
    """The key, the sizes that made it, and the layout of each tensor input."""

    key: Hashable
    sizes: Mapping[Symbol, int]
    layouts: tuple[Layout | None, ...]


def layout_of(
    shape: Sequence[int], strides: Sequence[int], broadcast: frozenset[int] = frozenset()
) -> Layout:
    """Return the layout of a tensor; dimensions of size 1 or stride 0 keep their place.

    `broadcast` dimensions (broadcasts in the program too) do not count. Any other dimension of
    stride 0 is not contiguous, and neither is the one around it.
    """
    moving = [
        d for d in range(len(shape)) if shape[d] != 1 and strides[d] != 0 and d not in broadcast
    ]
    by_stride = iter(sorted(moving, key=lambda d: -strides[d]))
    order = tuple(next(by_stride) if d in moving else d for d in range(len(shape)))
    flags: list[bool | None] = []
    step = 1
    for d in reversed(order):
        if d in broadcast or shape[d] == 1:
            flags.append(None)
            continue
        flags.append(strides[d] == step and strides[d] != 0)
        step = strides[d] * shape[d]
    return Layout(order, tuple(reversed(flags)))


def classify(
    fusion: Fusion,
    inputs: Sequence[torch.Tensor | bool | int | float],
    sizes: Mapping[Symbol, int],
    device: torch.device,
) -> InputClass:
    """Return the class of bound inputs (`sizes` maps symbols to global sizes)."""
    layouts = tuple(
        layout_of(argument.shape, argument.stride(), _broadcasts(value))
        if isinstance(argument, torch.Tensor) and isinstance(value, TensorView)
        else None
        for value, argument in zip(fusion.inputs, inputs, strict=True)
    )
    key = (device.type, device.index, layouts, concretization_key(fusion, sizes))
    return InputClass(key, sizes, layouts)


def _broadcasts(tv: TensorView) -> frozenset[int]:
    return frozenset(d for d, a in enumerate(tv.domain.no_reductions) if a.is_broadcast)


def specialise(fusion: Fusion, input_class: InputClass) -> None:
    """Give every tensor input of `fusion` (a copy) the layout that its argument has."""
    for value, layout in zip(fusion.inputs, input_class.layouts, strict=True):
        if isinstance(value, TensorView) and layout is not None:
            value.domain = with_layout(value.domain, layout)


def with_layout(domain: TensorDomain, layout: Layout) -> TensorDomain:
    """Return the domain with memory order and contiguity as measured.

    A size of 1 that is symbolic in the program has no meaningful stride: it counts as contiguous,
    which its stride (multiplied by an index of 0) cannot contradict.
    """
    axes = domain.no_reductions
    ordered = tuple(axes[d] for d in layout.order)
    flags: list[bool | None] = []
    for axis, flag in zip(ordered, layout.contiguity, strict=True):
        is_broadcast = axis.kind is IterType.broadcast
        flags.append(None if is_broadcast else True if flag is None else flag)
    is_default = layout.order == tuple(range(len(axes)))
    return replace(domain, allocation=() if is_default else ordered, contiguity=tuple(flags))
