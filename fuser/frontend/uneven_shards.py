"""Padding of shards: callers may pass shards of unequal sizes, but a program has shards of one size
only.

If devices cannot divide an axis evenly, the program has it with padding (`pad_shards`): N elements
over d devices are d blocks of ceil(N / d) elements. The last devices have shorter blocks. A shorter
shard that a caller passes is padded with zeros; a result is cut to the elements that this rank
stores. Ranks with full blocks pass and get their tensors without a copy.

    x [7] over 2 devices:   rank 0 passes 4 elements, and rank 1 passes 3, which are padded to 4

A rank cannot compute a symbolic extent from its own shard if devices may divide the extent
unevenly. The ranks exchange the extents of their shards (`multidevice.job.agreement`), and run a
version of the definition in which the extent is constant.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

import torch

from fuser.ir.binding import Argument, Values, complete
from fuser.ir.dtypes import to_torch
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.naming import in_ir, tensor_words
from fuser.ir.scalar.constructors import Symbol, const, evaluate, symbols
from fuser.ir.types import DEVICE_TYPES
from fuser.passes.concretize import replace_scalars
from fuser.support.errors import InputError, ShardingError, UnsupportedError, user_code
from fuser.support.inputs import flatten
from hostir.ir.shard_layout import allocated_strides, spanned, write
from multidevice.job.agreement import Extents
from multidevice.sharding.placement import Cut, axis_cuts, cut_line, placement, spread_axes
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


class Reread:
    """The items of an iterator, which can be read several times.

    The first reading takes them from the iterator, and raises its errors.
    """

    def __init__(self, source: Iterator[object]) -> None:
        self._source = source
        self._items: list[object] | None = None

    def __iter__(self) -> Iterator[object]:
        if self._items is None:
            self._items = [*self._source]
        return iter(self._items)

    @staticmethod
    def of(inputs: Iterable[object]) -> Iterable[object]:
        """Returns `inputs`, or its items if `inputs` can be read only once."""
        return Reread(inputs) if isinstance(inputs, Iterator) else inputs


class SymbolicShards:
    """The symbolic extents of a definition along which ranks may pass shards of unequal sizes.

    A rank cannot compute such an extent from its own shard. `constants` computes the extents from
    those of all ranks, and `version` is the definition with these extents as constants.

    `cut` has these axes: for the position of an input, the positions of its axes.
    """

    def __init__(self, fusion: Fusion, cut: Mapping[int, Mapping[int, Cut]]) -> None:
        self._fusion, self._cut = fusion, cut
        self.cut = {i: tuple(axes) for i, axes in cut.items()}

    @staticmethod
    def of(fusion: Fusion) -> SymbolicShards | None:
        """Returns the symbolic extents that devices divide; None if there are none, or if lowering
        will refuse the divisions.
        """
        try:
            return SymbolicShards._of_divisions(fusion)
        except (ShardingError, UnsupportedError):
            return None

    @staticmethod
    def _of_divisions(fusion: Fusion) -> SymbolicShards | None:
        cut: dict[int, dict[int, Cut]] = {}
        for i, tv in enumerate(fusion.inputs):
            if not isinstance(tv, TensorView) or any(a.is_stream for a in spread_axes(tv)):
                continue
            axes = zip(tv.domain.no_reductions, placement(tv, DEVICE_TYPES), strict=True)
            found = {
                p: cuts[0]
                for p, (axis, cuts) in enumerate(axes)
                if len(cuts) == 1 and isinstance(fusion.canonical(axis.size), Symbol)
            }
            if found:
                cut[i] = found
        is_divided = any(
            any(symbols(fusion.canonical(tv.domain.axes[n].size)))
            for tv in fusion.tensors()
            for n in axis_cuts(tv, DEVICE_TYPES)
        )
        return SymbolicShards(fusion, cut) if is_divided else None

    def constants(self, extents: Extents, team: Sequence[int]) -> dict[Symbol, int]:
        """Returns the extents that devices divide unevenly, from the extents of all shards.

        `extents` has the extents of each input on each rank of `team`. The result is empty if
        devices divide all extents evenly, or if inputs contradict each other, which later checks
        report.

        Raises:
            InputError: the shards are not the blocks into which devices divide an axis.
        """
        values: Values = {}
        for i, tv in enumerate(self._fusion.inputs):
            if not isinstance(tv, TensorView):
                continue
            cuts, axes = self._cut.get(i, {}), placement(tv, DEVICE_TYPES)
            for p, size in enumerate(extents[0][i]):
                extent = self._fusion.canonical(tv.domain.no_reductions[p].size)
                if not isinstance(extent, Symbol):
                    continue
                whole = size * prod(cut.devices for cut in axes[p])
                if p in cuts:
                    sizes = {rank: given[i][p] for rank, given in zip(team, extents, strict=True)}
                    whole = _whole_extent(tv, p, cuts[p], sizes)
                if values.setdefault(extent, whole) != whole:
                    return {}
        complete(self._fusion, values)
        found: dict[Symbol, int] = {}
        for tv in self._fusion.tensors():
            for number, cuts in axis_cuts(tv, DEVICE_TYPES).items():
                extent = self._fusion.canonical(tv.domain.axes[number].size)
                names = symbols(extent)
                if all(s in values for s in names):
                    whole = int(evaluate(extent, values))
                    if whole % prod(cut.devices for cut in cuts):
                        found.update((s, int(values[s])) for s in names)
        return found

    def fits(self, inputs: Sequence[object]) -> bool:
        """Returns whether `inputs` have the kinds, dtypes and numbers of axes of the definition."""
        declared = self._fusion.inputs
        return len(inputs) == len(declared) and all(
            ((x.dim(), x.dtype) if isinstance(x, torch.Tensor) else None)
            == ((tv.ndim, to_torch(tv.dtype())) if isinstance(tv, TensorView) else None)
            for x, tv in zip(inputs, declared, strict=True)
        )

    def version(self, constants: Mapping[Symbol, int]) -> Fusion:
        """Returns a copy of the definition in which symbols have the values `constants`."""
        canonical = self._fusion.canonical
        sizes = [a.size for tv in self._fusion.tensors() for a in tv.domain.axes.values()]
        names = {s for size in sizes for s in symbols(size)}
        known = {s: canonical(s) for s in names}
        fusion, _ = self._fusion.copy()
        replace_scalars(
            fusion,
            {
                s: const(constants[to])
                for s, to in known.items()
                if isinstance(to, Symbol) and to in constants
            },
        )
        return fusion


def _whole_extent(tv: TensorView, position: int, cut: Cut, sizes: Mapping[int, int]) -> int:
    """Returns the extent of an axis whose shards have the extents `sizes`, by rank.

    `cut` divides the axis of `tv` at `position`. Raises `InputError` if the shards are not blocks
    of one size, of which the last ones are shorter or empty.
    """
    mesh, blocks = tv.mesh, [-1] * cut.devices
    assert mesh is not None, f"{tv} is sharded without a mesh"
    is_equal = True
    for rank in mesh.devices:
        coordinate = mesh.coordinate(rank, cut.ptype)
        is_equal = is_equal and blocks[coordinate] in (-1, sizes[rank])
        blocks[coordinate] = sizes[rank]
    axis = UnevenAxis(sum(blocks), cut.devices, cut.ptype)
    if not is_equal or blocks != [axis.block_at(k)[1] for k in range(cut.devices)]:
        shown = ", ".join(f"{sizes[rank]} on rank {rank}" for rank in mesh.devices)
        raise InputError(
            f"{tensor_words(tv)} has shards of unequal extents along axis {position}: {shown}. "
            f"{cut.devices} ranks divide an axis of N elements into blocks of ceil(N / "
            f"{cut.devices}), of which the last ones are shorter or empty; "
            "multidevice.shard_tensor(whole, tv) cuts such shards"
            f"{user_code(cut_line(tv, cut.ptype))}{in_ir(tv)}"
        )
    return axis.extent


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
