"""Checks that the results of the tensor ops in a host program have the sizes and dtypes that follow
from their operands. Also compares the axes of two tensors."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod

from fuser.ir.axis_graph import tensor_operands
from fuser.ir.domain.tensor_domain import IterDomain
from fuser.ir.dtypes import DataType, dtype_text
from fuser.ir.fusion import TensorOp, TensorView
from fuser.ir.naming import axis_words, in_ir
from fuser.ir.op import Op
from fuser.ir.ops import nodes
from fuser.ir.ops.attention_ops import AttentionOp
from fuser.ir.ops.lookup import IndexPutAccumulateOp, ScatterOp
from fuser.ir.ops.matrix_products import GroupedScalesOp, ProductOp
from fuser.ir.ops.scan_ops import AlongAxisOp
from fuser.ir.pointwise_table import POINTWISE, TESTS
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Number, Scalar, Symbol
from fuser.ir.types import ParallelType
from fuser.support.errors import VerifyError, counted
from multidevice.sharding.placement import placement

_POINTWISE = nodes.UnaryOp, nodes.BinaryOp, nodes.TernaryOp
# Ops whose axis map relates axes of one size in operands and results. All others have own checks.
_MAPPED = (
    *_POINTWISE,
    nodes.Contraction,
    nodes.CastOp,
    nodes.LoadStoreOp,
    nodes.BroadcastOp,
    nodes.SqueezeOp,
    nodes.ReductionOp,
)

# An axis: its tensor, its position without reductions (None for a reduction), and the axis itself.
_Axis = tuple[TensorView, int | None, IterDomain]


_UNKNOWN: Mapping[Symbol, Number] = {}
# The end of a message about two axes.
_OTHER_DEVICES = "are split over different devices, but the op moves no data between ranks"


def check_buffers(op: Op, has_buffer: Container[TensorView]) -> None:
    """Raises `VerifyError` if only some results of the tensor op `op` have a buffer. A run either
    writes all results into existing buffers, or allocates all of them.

    `has_buffer` contains the tensors that have a buffer.
    """
    if isinstance(op, TensorOp):
        without = [out for out in op.outputs if out not in has_buffer]
        if without and len(without) < len(op.outputs):
            raise VerifyError(
                f"{op.name}: the result {without[0]} has no buffer, but other results of the op "
                f"have a buffer: append an Allocate of {without[0]}"
            )


def check_results(op: Op, values: Mapping[Symbol, Number] = _UNKNOWN) -> None:
    """Raises `VerifyError` if the sizes or the dtype of a result do not follow from the operands of
    `op`.

    `values` binds symbols in the extents to numbers. A size whose symbols have no value is not
    compared. Dtypes are always compared.
    """
    if isinstance(op, AttentionOp | ProductOp):
        _check_letters(op, values)
    elif isinstance(op, ScatterOp):
        for pair in zip(_axes(op.inp), _axes(op.out), strict=True):
            _check_sizes(op, list(pair), values)
    elif isinstance(op, IndexPutAccumulateOp):
        for pair in zip(_axes(op.acc), _axes(op.out), strict=True):
            _check_sizes(op, list(pair), values)
    elif isinstance(op, GroupedScalesOp):
        _check_groups(op, values)
    elif isinstance(op, AlongAxisOp):
        _check_along(op, values)
    elif isinstance(op, _MAPPED):
        _check_dtypes(op)
        for axes in _alike(op):
            _check_sizes(op, axes, values)


def _check_letters(op: AttentionOp | ProductOp, values: Mapping[Symbol, Number]) -> None:
    """Raises `VerifyError` unless all axes to which `op` gives the same letter have the same size.

    A product or attention op labels each axis of its tensors with a letter, as in `torch.einsum`.
    The op itself checks dtypes.
    """
    by_letter: dict[str, list[_Axis]] = {}
    for field, tv in op.tensors():
        for k, (letter, axis) in enumerate(zip(op.letters(field), _axes(tv), strict=True)):
            by_letter.setdefault(letter, []).append(axis)
            if op.is_whole(letter):
                _check_whole(op, tv, k)
    for axes in by_letter.values():
        _check_sizes(op, axes, values)
    if isinstance(op, AttentionOp) and "g" in by_letter:
        _check_groups_of_heads(op, by_letter["h"], by_letter["g"])


def _check_groups_of_heads(op: Op, heads: list[_Axis], groups: list[_Axis]) -> None:
    """Raises `VerifyError` unless devices split the heads of the keys (`groups`) in the same way as
    the heads of the queries (`heads`) of an attention op. With equal splits, each device has the
    keys that its queries need.

    Both lists have all axes of the op with this role, in all its tensors. A broadcast axis (a
    single head of keys or of a bias) is exempt, because all devices have this head.
    """
    several = ([a for a in axes if not a[2].is_broadcast] for axes in (heads, groups))
    for one, other in zip(*several, strict=False):
        (a, k, _), (b, m, _) = one, other
        assert k is not None and m is not None, (
            f"{op.name}: a head axis of {a} or {b} is a reduction"
        )
        if device_cuts(a, k) != device_cuts(b, m):
            _refuse(op, one, other, how=_OTHER_DEVICES)


def _check_along(op: AlongAxisOp, values: Mapping[Symbol, Number]) -> None:
    for out in op.outputs:
        axes = zip(_axes(op.inp), _axes(out), op.axis_map_to(0, out), strict=True)
        for source, made, is_mapped in axes:
            if is_mapped is not None:
                _check_sizes(op, [source, made], values)
    for tv in (op.inp, *op.outputs):
        _check_whole(op, tv, op.dim)


def _check_groups(op: GroupedScalesOp, values: Mapping[Symbol, Number]) -> None:
    for tv in (op.inp, op.input_offsets, op.output_offsets, op.out):
        for k in range(tv.ndim):
            _check_whole(op, tv, k)
    _check_sizes(op, [*_axes(op.input_offsets), *_axes(op.output_offsets)], values)


def _check_whole(op: Op, tv: TensorView, k: int) -> None:
    if any(p.is_device for p in device_cuts(tv, k)):
        axis = tv.domain.no_reductions[k]
        raise VerifyError(
            f"{op.name}: {axis_words(tv, axis)} is split over devices, but each device needs the "
            f"whole axis: gather it by a Communication first{in_ir(axis, tv)}"
        )


def check_kept_axes(
    op: Op,
    source: TensorView,
    out: TensorView,
    gone: int | None,
    values: Mapping[Symbol, Number],
    *,
    cut: int | None = None,
) -> None:
    """Raises `VerifyError` unless `out` has all axes of `source`, except the axis at position
    `gone`. If `gone` is None, no axis may be missing.

    Sizes and the splits over devices are compared. `cut` is the position of the axis of `out` whose
    split the op changes, if there is one; its split is not compared. `values` binds the symbols in
    extents.
    """
    kept = [axis for axis in _axes(source) if gone is None or axis[1] != gone]
    if len(kept) != out.ndim:
        raise VerifyError(
            f"{op.name}: {out} "
            "has "
            f"{counted(out.ndim, 'axis')}, "
            "expected "
            f"{len(kept)}, "
            f"because {source} "
            f"has {source.ndim}" + f" and axis {gone} is removed" * (gone is not None) + in_ir(out)
        )
    for one, other in zip(kept, _axes(out), strict=True):
        _check_sizes(op, [one, other], values, is_cut=cut is not None and cut == other[1])


def _axes(tv: TensorView) -> list[_Axis]:
    return [(tv, k, axis) for k, axis in enumerate(tv.domain.no_reductions)]


def _alike(op: TensorOp) -> Iterator[list[_Axis]]:
    """Yields groups of axes of a tensor op: all axes of one group must have the same size.

    A group has one axis of the result, and before it the axes of the operands to which this axis
    corresponds. A product over which the op sums, such as a matmul, also has a group of the axes
    that it sums, without an axis of the result. Raises `VerifyError` if an operand and the result
    differ in the number of dimensions.
    """
    out = op.out_tensor
    roots = out.domain.maybe_root
    places = {a.number: k for k, a in enumerate(out.domain.no_reductions)}
    if isinstance(op, nodes.LinearOp) and op.weight.ndim == 1:
        return  # one column, which axis maps do not know
    operands = [(tv, op.axis_map(index)) for index, tv in tensor_operands(op)]
    left: list[_Axis] = []
    for tv, mapped in operands:
        unused = set(range(tv.ndim)) - set(mapped)
        if isinstance(op, nodes.SqueezeOp):
            unused = {k for k in unused if not op.flags[k]}
        elif isinstance(op, nodes.Contraction) and len(unused) == 1:
            # The axes that the op sums over. A result need not have them.
            left += [axis for axis in _axes(tv) if axis[1] in unused]
            unused = set[int]()
        is_strange = any(q is not None and not 0 <= q < tv.ndim for q in mapped)
        if unused or is_strange or len(mapped) != len(roots):
            rule = ": an elementwise op needs operands with as many axes as its result"
            raise VerifyError(
                f"{op.name}: {tv} has {counted(tv.ndim, 'axis')}, which do not fit the "
                f"{counted(len(roots), 'axis')} of the result "
                f"{out}{rule * isinstance(op, _POINTWISE)}"
            )
    if left:
        yield left
    for p, root in enumerate(roots):
        mapped_to = [(tv, q) for tv, m in operands if (q := m[p]) is not None]
        axes: list[_Axis] = [(tv, q, tv.domain.no_reductions[q]) for tv, q in mapped_to]
        # A result's reduction may be the rest of one that stream steps divide.
        yield axes if root.is_reduction() else [*axes, (out, places.get(root.number), root)]


def _check_sizes(
    op: Op, axes: Sequence[_Axis], values: Mapping[Symbol, Number], *, is_cut: bool = False
) -> None:
    """Raises `VerifyError` unless all `axes`, which `op` relates to each other, have the same size
    and are split over the same devices.

    A broadcast axis has one element, which the op repeats, so it fits any size. If the last axis,
    usually that of the result, has one element, all others must have one. If `is_cut` is True, `op`
    changes the split over devices, so the devices are not compared. `values` binds the symbols in
    extents.
    """
    sizes = [tv.fusion.canonical(axis.size) for tv, _, axis in axes]
    whole = [(a, n) for a, n in zip(axes, sizes, strict=True) if _number(n, values) != 1]
    is_result = axes[-1][0] in op.outputs
    # An axis that is summed over has one element in all operands, or in none.
    if _number(sizes[-1], values) == 1:
        for axis, n in whole:
            if is_result or _number(n, values) is not None:
                _refuse(op, axis, axes[-1])
    for (one, n), (other, m) in pairwise(whole):
        if n is not m and _number(sc.sub(n, m), values) not in (0, None):
            _refuse(op, one, other)
        if is_cut or one[1] is None or other[1] is None:
            continue
        a, b = device_cuts(one[0], one[1]), device_cuts(other[0], other[1])
        is_same = a == b
        if one[0].mesh != other[0].mesh:
            # A rank of both meshes may have the same block on both, along other mesh dimensions.
            is_same = _devices(one[0], one[1]) == _devices(other[0], other[1])
        # The part of a stream axis that one step has may be the part of one device.
        if not is_same and not any(ptype.is_stream for ptype in a | b):
            _refuse(op, one, other, how=_OTHER_DEVICES)


def device_cuts(tv: TensorView, position: int) -> set[ParallelType]:
    """Returns the parallel types by which one axis of `tv` is divided. A mesh dimension, such as
    `mesh_x`, means that devices divide the axis. The type `stream` means that the iterations of a
    loop do, each of which computes one block.

    `position` is the index of the axis, not counting reduction axes.
    """
    return {cut.ptype for cut in placement(tv)[position]}


def _devices(tv: TensorView, position: int) -> int:
    """Returns the number of devices that split one axis of `tv`. `position` is the index of the
    axis, not counting reduction axes."""
    return prod(cut.devices for cut in placement(tv)[position])


def _number(x: Scalar, values: Mapping[Symbol, Number]) -> Number | None:
    known = sc.int_value(x)
    if known is None and values and all(s in values for s in sc.symbols(x)):
        return sc.evaluate(x, values)
    return known


def _refuse(op: Op, one: _Axis, other: _Axis, *, how: str = "") -> None:
    (a, _, x), (b, _, y) = one, other
    first, second = axis_words(a, x), axis_words(b, y)
    sizes = [sc.int_value(axis.size) for axis in (x, y)]
    extents = [
        "extent " + str(axis.extent if n is None else n)
        for n, axis in zip(sizes, (x, y), strict=True)
    ]
    rule = how or f"must have the same size, but have {extents[0]} and {extents[1]}"
    raise VerifyError(f"{op.name}: {first} and {second} {rule}{in_ir(x, a)}{in_ir(y, b)}")


def _check_dtypes(op: TensorOp) -> None:
    out, operands = op.out_tensor, [tv for _, tv in tensor_operands(op)]
    if isinstance(op, nodes.CastOp) or not operands:
        return
    if isinstance(op, _POINTWISE):
        rule = POINTWISE[op.kind].rule
        values = operands[1:] if rule == "select" and op.inputs[0] is operands[0] else operands
        expected = [tv.dtype() for tv in values] or [out.dtype()]
        if rule in TESTS:
            expected = [DataType.Bool]
        fits = out.dtype() in expected
    else:
        expected = [tv.dtype() for tv in operands]
        fits = set(expected) == {out.dtype()}
    if not fits:
        kinds = " or ".join(dict.fromkeys(map(dtype_text, expected)))
        raise VerifyError(
            f"{op.name}: with these operands the result has the dtype {kinds}, but {out} is "
            f"declared with the dtype {dtype_text(out.dtype())}"
        )
