"""Merged stream axes: a loop on the host whose steps run over several axes merged into one.

A stream type marks an axis along which a loop on the host computes a tensor; `stream` and
`stream_y` are two of them. Each step of the loop computes one index, or one block of indices. If
the loop runs along a merge of the axes A and B, step i computes index i / B of A and index i % B of
B. So the passes after this one need not know of the merge: A and B are marked separately, each with
its own type of `STREAM_TYPES`, outermost first.

In the examples, stream(A * B) is the merged axis, and {n} marks a split into n blocks:

    T1 [stream(A * B), C]         ->  T1 [stream(A), stream_y(B), C]          A * B steps
    T1 [stream{n}, A * B / n, C]  ->  T1 [stream(A), stream_y{m}, B / m, C]   n = A * m steps

The memory layout does not matter, because a slice of a slice is a slice, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from fuser.ir.domain.tensor_domain import (
    IterDomain,
    MergeTransform,
    SplitTransform,
    Swizzle1D,
    TensorDomain,
    Transform,
)
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.naming import in_ir, tensor_words
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.types import STREAM_TYPES, ParallelType
from fuser.support.errors import UnsupportedError, user_code
from multidevice.sharding.placement import axis_cuts, cut_line


def unmerge_streams(fusion: Fusion) -> None:
    """Replaces each merged stream axis by the axes that it merges, and marks each of these axes
    with its own stream type (`stream`, `stream_y` or `stream_z`).

    A stream axis is one along which a loop on the host computes a tensor block by block. Broadcast
    axes get no stream type, because they have one element. A merged axis may be divided into n
    blocks by an outer split. Each block must then be a box of the merged axes: a range of indices
    of each axis. For merged axes of 4 and 6 elements, n can be 2, 4, 8, 12 or 24, for example, but
    not 6. Blocks are boxes in two cases:

    - the size of the outermost axis is divisible by n, as in 4 / 2;
    - n is the product of two factors: the size of all outer axes together, and a divisor of the
      size of the next axis, as in 4 * 3.

    Raises:
        UnsupportedError: a block is not a box, or the merged axes cannot form the steps of one
            loop. The message names axis, tensor and numbers.
    """
    for tv in fusion.tensors():
        axis = next((a for a in tv.domain.loop if a.is_stream), None)
        if axis is not None and _Merged(tv, axis).rewrite():
            _check_parts(tv, axis)


class _Merged:
    """One axis of a tensor along which a stream loop computes it, and the transforms that made the
    axis.

    The transforms are the splits and merges from the tensor's logical axes (the axes that users
    see) to this axis.
    """

    def __init__(self, tv: TensorView, axis: IterDomain) -> None:
        self._tv, self._axis = tv, axis
        # The user of a view sees its logical axes, so the search stops at them.
        logical = {*tv.domain.logical_numbers}
        made = ((n, t) for t in tv.domain.transforms for n in t.outputs)
        self._made_by = {n: t for n, t in made if n not in logical}

    def rewrite(self) -> bool:
        """Replaces this axis by the axes that it merges; returns False if it merges none.

        A loop on the host computes the tensor along this axis (a stream axis), block by block.
        Afterwards, each of the merged axes has a stream type of its own.
        """
        split, number = None, self._axis.number
        rotation = self._made_by.get(number)
        if isinstance(rotation, Swizzle1D):
            number = rotation.inp
        made = self._made_by.get(number)
        if isinstance(made, SplitTransform) and made.outer == number and not made.inner_split:
            split, number = made, made.inp
        if not isinstance(self._made_by.get(number), MergeTransform):
            return False
        if isinstance(rotation, Swizzle1D):
            raise self._refusal(
                "is rotated by swizzle1d, but only an axis without merges can be rotated"
            )
        leaves, gone = self._leaves(number)
        parts = [a for a in leaves if not a.is_broadcast]
        for a in parts:
            if a.is_device or a.is_reduction():
                kind = "device" if a.is_device else "reduction"
                raise self._refusal(f"merges {a}, a {kind} axis, which cannot be streamed")
        if len(parts) > len(STREAM_TYPES):
            raise self._refusal(
                f"merges {len(parts)} axes; at most {len(STREAM_TYPES)} axes can be merged"
            )
        if split is None:
            self._replace(leaves, (), gone)
            self._spread(parts)
            return True
        inner = self._tv.domain.axes[split.inner]
        if inner.number not in self._tv.domain.loop_numbers or inner.is_device:
            raise self._refusal(
                f"has blocks whose axis {inner} is split again: do not split that axis"
            )
        count, blocks = self._boxes(parts, split.factor)
        self._replace(leaves, (split.inner,), (*gone, split))
        if blocks is not None:
            at = self._tv.domain.loop_numbers.index(parts[count].number)
            self._tv.split(at, blocks, inner_split=False)
            cut = self._tv.domain.loop[at]
            self._spread([*parts[:count], cut])
        else:
            self._spread(parts[:count])
        return True

    def _leaves(self, number: int) -> tuple[list[IterDomain], list[Transform]]:
        """Returns the axes merged into the axis number `number`, outermost first, and the merge
        transforms.

        A merged axis may itself be a merge of merged axes; the result has only axes that are not
        merged from others.
        """
        made = self._made_by.get(number)
        if not isinstance(made, MergeTransform):
            return [self._tv.domain.axes[number]], []
        outer, above = self._leaves(made.outer)
        inner, beside = self._leaves(made.inner)
        return [*outer, *inner], [*above, *beside, made]

    def _boxes(self, parts: Sequence[IterDomain], n: Scalar) -> tuple[int, Scalar | None]:
        """Divides the merged axes `parts` into `n` blocks, each of which must be a box.

        A box is a range of indices of each axis. Returns (count, blocks): a block has one index of
        each of the `count` outermost axes. The next axis is divided into `blocks` blocks, or is not
        divided if `blocks` is None. A block has all indices of the other axes. Raises
        `UnsupportedError` if the blocks cannot be proved to be boxes.
        """
        sizes = [self._tv.fusion.canonical(a.size) for a in parts]
        if len(parts) < 2 or any(sc.int_value(size) == 0 for size in sizes):
            return 0, n if parts else None
        block = sc.ceildiv(sc.product(sizes), n)
        if _divides(n, sizes[0]) or _divides(sc.product(sizes[1:]), block):
            return 0, n
        for count in range(1, len(parts)):
            # Blocks with a constant number of elements; empty blocks may follow.
            inner = sc.product(sizes[count + 1 :])
            rows = sc.floordiv(block, inner)
            if _divides(inner, block) and _divides(rows, sizes[count]):
                return (
                    (count + 1, None)
                    if sc.int_value(rows) == 1
                    else (count, sc.floordiv(sizes[count], rows))
                )
            # Blocks with any number of elements, where the outer axes have constant extents.
            outer = sc.product(sizes[:count])
            blocks = sc.floordiv(n, outer)
            if _divides(outer, n) and _divides(blocks, sizes[count]):
                return (count, None) if sc.int_value(blocks) == 1 else (count, blocks)
        axes = " and ".join(map(str, parts))
        raise self._refusal(
            f"has blocks of {block} of {sc.product(sizes)} elements. A block must consist of a "
            f"range of each of the merged axes {axes}, which is not known of these blocks. Instead "
            f"of {n} blocks, use a number that divides the outermost of these axes, or is the "
            "product of the outer axes and a divisor of the next; or parallelize the whole merged "
            "axis on stream"
        )

    def _replace(
        self, leaves: Sequence[IterDomain], others: Sequence[int], gone: Sequence[Transform]
    ) -> None:
        """Replaces the stream axis among the tensor's loop axes by the axes `leaves`, which it
        merges.

        A stream axis is one along which a loop on the host computes a tensor block by block.
        `others` are the numbers of further loop axes to remove, and `gone` the splits and merges to
        remove.
        """
        domain = self._tv.domain
        loop: list[int] = []
        for n in domain.loop_numbers:
            if n == self._axis.number:
                loop += [a.number for a in leaves]
            elif n not in others:
                loop.append(n)
        kept = [t for t in domain.transforms if t not in gone]
        self._tv.domain = _serial(domain.having(loop=loop, transforms=kept), leaves)

    def _spread(self, parts: Sequence[IterDomain]) -> None:
        tv = self._tv
        for part, ptype in zip(parts, STREAM_TYPES, strict=False):
            tv.parallelize_axis(part, ptype)
        line = tv.cut_lines.get(ParallelType.stream)
        if line is not None:
            types = STREAM_TYPES[: len(parts)]
            tv.cut_lines = {**tv.cut_lines, **dict.fromkeys(types, line)}

    def _refusal(self, why: str) -> UnsupportedError:
        return _refusal(self._tv, self._axis, why)


def _refusal(tv: TensorView, axis: IterDomain, why: str) -> UnsupportedError:
    definition = tv.definition()
    of = "" if definition is None else f", made by {definition.name},"
    where = user_code(cut_line(tv, ParallelType.stream))
    return UnsupportedError(
        f"the merged stream axis of {tensor_words(tv)}{of} {why}{where}{in_ir(axis, tv)}"
    )


def _divides(n: Scalar, extent: Scalar) -> bool:
    """Returns whether `extent` is provably a multiple of `n`."""
    return sc.int_value(n) != 0 and sc.int_value(sc.mod(extent, n)) == 0


def _serial(domain: TensorDomain, axes: Sequence[IterDomain]) -> TensorDomain:
    numbers = {a.number for a in axes}
    return domain.map_axes(
        lambda a: a.having(ptype=ParallelType.serial) if a.number in numbers else a
    )


def _check_parts(tv: TensorView, axis: IterDomain) -> None:
    """Raises `UnsupportedError` if the axes merged in a stream axis cannot form the steps of one
    loop.

    A stream axis is one along which a loop on the host computes a tensor block by block. The check
    fails if two merged axes are parts of the same logical axis, if devices share the blocks of a
    merged axis, or if more than one merged axis is divided into blocks of several indices.
    """
    by_axis = axis_cuts(tv)
    found = {n: [c for c in cuts if c.ptype.is_stream] for n, cuts in by_axis.items()}
    if sum(map(len, found.values())) < 2:
        return
    for number, cuts in found.items():
        logical = tv.domain.axes[number]
        if len(cuts) > 1:
            raise _refusal(
                tv, axis, f"merges several parts of {logical}: merge only one part of each axis"
            )
        if cuts and not by_axis[number][-1].ptype.is_stream:
            raise _refusal(
                tv,
                axis,
                f"merges blocks of {logical}, each of which is split over devices, which is not "
                "supported: split another axis over devices",
            )
    if sum(not c.whole for cuts in found.values() for c in cuts) > 1:
        raise _refusal(
            tv, axis, "merges blocks of several axes; at most one axis can be divided into blocks"
        )
