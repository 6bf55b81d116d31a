"""Padding of shards: callers may pass shards of unequal sizes, but a program has shards of one size
only.

If devices cannot divide an axis evenly, the program has it with padding (`pad_shards`): N elements
over d devices are d blocks of ceil(N / d) elements. The last devices have shorter blocks. A shorter
shard that a caller passes is padded with zeros; a result is cut to the elements that this rank
stores. Ranks with full blocks pass and get their tensors without a copy.

    x [7] over 2 devices:   rank 0 passes 4 elements, and rank 1 passes 3, which are padded to 4
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from fuser.ir.binding import Argument
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.naming import in_ir, tensor_words
from fuser.support.errors import InputError, user_code
from fuser.support.inputs import flatten
from hostir.ir.shard_layout import allocated_strides, spanned, write
from multidevice.sharding.placement import cut_line
from multidevice.sharding.queries import Sharding, UnevenAxis, uneven_axes, uneven_positions


class UnevenShards:
    """The uneven shards of a definition: pads a call's inputs, and cuts its results.

    `axes` maps the position of each input with uneven shards to a dict: from the position of an
    axis to the description of its uneven blocks.
    """

    def __init__(self, fusion: Fusion, axes: Mapping[int, Mapping[int, UnevenAxis]]) -> None:
        self._declared, self._axes = list(fusion.inputs), axes

    @staticmethod
    def of(fusion: Fusion) -> UnevenShards | None:
        """Returns the uneven shards of a definition; None if devices divide all its axes evenly."""
        if not any(uneven_axes(tv) for tv in fusion.tensors()):
            return None
        axes = {
            i: found
            for i, value in enumerate(fusion.inputs)
            if isinstance(value, TensorView) and (found := uneven_positions(value))
        }
        return UnevenShards(fusion, axes)

    def padded(self, inputs: Iterable[object], rank: int) -> list[Argument]:
        """Returns the inputs of a call, with every shard of `rank` padded to the size of a full
        block.

        Raises:
            InputError: a shard does not have the size of this rank's block.
        """
        given = flatten(inputs, declared=self._declared)
        for i, axes in self._axes.items():
            value = given[i] if i < len(given) else None
            tv = self._declared[i]
            if not isinstance(tv, TensorView) or not isinstance(value, torch.Tensor):
                continue
            if value.dim() == tv.ndim:
                given[i] = _padded(tv, value, axes, rank)
        return given

    def cut(
        self, outputs: Sequence[torch.Tensor], shardings: Sequence[Sharding], rank: int
    ) -> list[torch.Tensor]:
        """Returns the outputs of a run without padding: the elements that `rank` stores.

        `shardings` are those of the outputs. The results are dense, in the same memory order.
        """
        return [_cut(out, sharding, rank) for out, sharding in zip(outputs, shardings, strict=True)]


def _padded(
    tv: TensorView, value: torch.Tensor, axes: Mapping[int, UnevenAxis], rank: int
) -> torch.Tensor:
    """Returns the shard `value` of the input `tv`, with zeros up to full blocks."""
    assert tv.mesh is not None, f"{tv} is sharded without a mesh"
    shape = list(value.shape)
    for position, axis in axes.items():
        _, size = axis.block_at(tv.mesh.coordinate(rank, axis.ptype))
        if value.size(position) != size:
            is_whole = value.size(position) == axis.extent
            whole = ": this looks like the whole tensor" if is_whole else ""
            raise InputError(
                f"Expected {tensor_words(tv)} to have size {size} at axis {position} on this "
                f"rank ({axis.extent} over {axis.devices} ranks: blocks of {axis.block}, the last "
                f"ones shorter or empty), but got {value.size(position)}{whole}; "
                "multidevice.shard_tensor(whole, tv) cuts the shards"
                f"{user_code(cut_line(tv, axis.ptype))}{in_ir(tv)}"
            )
        shape[position] = axis.block
    if shape == list(value.shape):
        return value
    made = value.new_empty(0).new_empty_strided(shape, allocated_strides(tv, shape)).zero_()
    with torch.no_grad():
        part = made
        for position in axes:
            part = part.narrow(position, 0, value.size(position))
        write(part, value)
    return made


def _cut(out: torch.Tensor, sharding: Sharding, rank: int) -> torch.Tensor:
    if not sharding.mesh.has(rank):
        return out
    part = out
    for position, axis in sharding.uneven.items():
        _, size = axis.block_at(sharding.mesh.coordinate(rank, axis.ptype))
        part = part if size == part.size(position) else part.narrow(position, 0, size)
    is_dense = part is out or spanned(part.shape, part.stride()) == part.numel()
    return part if is_dense else part.clone()  # the order of the strides stays
