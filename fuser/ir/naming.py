"""Names of tensors and axes for error messages: in the user's words, or as in texts of the IR."""

from __future__ import annotations

from collections.abc import Iterable

from fuser.ir.domain.tensor_domain import IterDomain, TensorDomain
from fuser.ir.fusion import TensorView
from fuser.ir.types import DEVICE_TYPES


def tensor_words(tv: TensorView) -> str:
    """Returns the name of a tensor: `input 1 (T1_g_float)`, `the result of linear (T3_l_float)`."""
    position = next((i for i, v in enumerate(tv.fusion.inputs) if v is tv), None)
    if position is not None:
        return f"input {position} ({tv.label})"
    definition = tv.definition()
    return tv.label if definition is None else f"the result of {definition.name} ({tv.label})"


def axis_words(tv: TensorView, axis: IterDomain) -> str:
    """Returns the name of an axis for a message: `axis 1 of input 1 (T1_g_float)`.

    - For an axis that is split over devices or streams: `the part on mesh_x of axis 1 of ..`.
    - For an axis that was merged from several axes: `axes 0 and 1 of ..`.
    """
    found = sorted(_positions(tv.domain, axis.number))
    if not found:
        return f"an axis of {tensor_words(tv)}"
    numbers = " and ".join(map(str, found))
    words = f"{'axis' if len(found) == 1 else 'axes'} {numbers} of {tensor_words(tv)}"
    is_spread = axis.is_device or axis.is_stream
    return f"the part on {axis.ptype.name} of {words}" if is_spread else words


def misfit_of_mesh(tv: TensorView, axis: IterDomain, extent: int) -> str:
    """Returns the message about an axis that is split over a mesh dimension which does not fit.

    Either the mesh of `tv` does not have this dimension, or the dimension has another number of
    devices than `extent`, the extent of the axis. In the second case, the user may have
    parallelized the wrong axis, and the message says which calls split it correctly.
    """
    mesh, ptype = tv.mesh, axis.ptype
    assert mesh is not None, f"{tv} has no mesh"
    if mesh.dim_of(ptype) is None:
        names = [t.name for t in DEVICE_TYPES[: mesh.ndim]]
        dimensions = f"{names[0]} alone" if len(names) == 1 else " and ".join(names)
        return (
            f"{mesh} of {tensor_words(tv)} has no dimension {ptype.name}, on which "
            f"{axis_words(tv, axis)} is: the mesh is {mesh.ndim}-D and has {dimensions}, so use a "
            "mesh with more dimensions"
        )
    count = mesh.size_of(ptype)
    return (
        f"{axis_words(tv, axis)} has extent {extent}, but {mesh} has {count} devices along "
        f"{ptype.name}{_how_to_cut(tv.domain, axis, count)}"
    )


def _how_to_cut(domain: TensorDomain, axis: IterDomain, count: int) -> str:
    """Returns the end of a message: the calls that split the right axis over `count` devices.

    `axis` is the axis that was parallelized by mistake. Returns "" if `axis` is the outer result of
    a split. Then the axis is the right one, and the split has a wrong factor.
    """
    numbers = [a.number for a in domain.loop]
    split = next((t for t in domain.splits.values() if t.inner == axis.number), None)
    outer = None if split is None else domain.rotated(split.outer)
    if outer is not None and outer.number in numbers and not (outer.is_device or outer.is_stream):
        place = numbers.index(outer.number)
        return f": this is the inner part of a split; parallelize the outer one, axis({place})"
    if split is None and axis.number not in [a.number for a in domain.logical]:
        return ""
    place = numbers.index(axis.number)
    return f": first call outer_split({place}, {count}), then parallelize axis({place})"


def in_ir(*things: object) -> str:
    """Returns a second line for an error message, which shows `things` as texts of the IR.

    The word `of` stands between the texts. Example: `in the IR: iS4{i0} of T1_g_float[..]`.
    """
    return f"\n  in the IR: {' of '.join(map(str, things))}"


def in_words(text: str, tensors: Iterable[TensorView]) -> tuple[str, list[str]]:
    """Replaces the long IR text of each tensor in a message by a short name.

    The short names are `input 0 (T0_g_float)` for an input and `T3_g_float` for other tensors.
    Returns (the new message, the sorted IR texts that were replaced).
    """
    # Two tensors may print the same text; the first one in `tensors` is named.
    written = {str(tv): tv for tv in [*tensors][::-1]}
    rows: list[str] = []
    # The longest text first: a tensor with a mesh prints the text of one without it, and more.
    for printed in sorted(written, key=len, reverse=True):
        if printed in text:
            tv = written[printed]
            is_input = any(tv is v for v in tv.fusion.inputs)
            text = text.replace(printed, tensor_words(tv) if is_input else tv.label)
            rows.append(printed)
    return text, sorted(rows)


def _positions(domain: TensorDomain, number: int) -> set[int]:
    """Returns the positions of the axes from which axis `number` is derived by splits and merges.

    These are axes that users see, counted without reduction axes. The set is empty if axis `number`
    is derived from no such axis.
    """
    logical = [a.number for a in domain.no_reductions]
    if number in logical:
        return {logical.index(number)}
    made_by = {n: t for t in domain.transforms for n in t.outputs}
    transform = made_by.get(number)
    if transform is None:
        return set()
    return {p for n in transform.inputs for p in _positions(domain, n)}
