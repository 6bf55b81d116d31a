"""The canonical form of a fusion: its meaning without tensor, axis and symbol numbers.

In the form, everything is numbered in the order of the ops. Fusions whose ops are written in the
same order have equal forms, even if other tensors were defined between their ops. Compiled programs
are cached by this form.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping
from itertools import count
from typing import cast

from fuser.ir.domain.equal_extents import ExtentClasses
from fuser.ir.domain.tensor_domain import IterDomain, TensorDomain, transform_text
from fuser.ir.dtypes import category
from fuser.ir.fusion import Fusion, TensorView, canonical_key
from fuser.ir.op import Op
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Const, Scalar, Symbol, scalar_text
from fuser.ir.text.printer import fusion_text, program_symbols
from fuser.support.record import record, replace

Rename = Callable[[Scalar], Scalar]


@record
class CanonicalForm:
    """A key that describes a fusion, whatever the numbers of its tensors, axes and symbols are.

    Fusions with equal keys need the same kernels. `tensors` has the numbers of the tensors, and
    `symbols` the symbols, of the fusion from which the key was made. Both tuples have an order that
    depends on the key only. If two fusions have equal keys, entry k of both is therefore the same
    tensor, and a result for one fusion can be used for the other.
    """

    key: Hashable
    tensors: tuple[int, ...]
    symbols: tuple[Symbol, ...]


def form_of(fusion: Fusion) -> CanonicalForm:
    """Returns the canonical form of a fusion, in which tensors, axes and symbols are renumbered.

    Fusions that differ only in these numbers have forms with equal keys. The key contains
    everything on which the generated kernels depend.
    """
    tensors = fusion.tensors()
    copy, names, renamed = _without_names(fusion)
    symbols = program_symbols(fusion, tensors, fusion.exprs)
    key = (
        fusion_text(copy),
        tuple([(renamed(s), s.name if s not in names else "") for s in symbols]),
        tuple([renamed(x) for x in fusion.assumed]),
        frozenset((renamed(s), n) for s, n in fusion.divisible.items()),
        frozenset((renamed(x), n) for x, n in fusion.least.items()),
        fusion.has_tails,
        fusion.resident_threads,
        fusion.cluster,
        fusion.goes_backwards,
        tuple([tv.number in fusion.read_again for tv in tensors]),
        tuple([tv.is_cpu_scalar for tv in tensors]),
    )
    return CanonicalForm(key, tuple([tv.number for tv in tensors]), symbols)


@canonical_key.register
def _(fusion: Fusion) -> Hashable:
    return form_of(fusion).key


def without_names(fusion: Fusion) -> Fusion:
    """Returns a copy of a fusion with new numbers, and with only those meshes that the user set.

    The numbers follow the order of the ops. Meshes that ops copied from operands to results are
    dropped. The copies of equal fusions therefore have equal texts, even if the users set the
    meshes in different orders.
    """
    return _without_names(fusion)[0]


def _without_names(fusion: Fusion) -> tuple[Fusion, Mapping[Scalar, Scalar], Rename]:
    """Returns (copy of a fusion with new numbers, renamed symbols, function that renames symbols).

    The second result maps old to new symbols. The function takes any scalar and returns it with the
    new symbols.
    """
    tensors = fusion.tensors()
    symbols = program_symbols(fusion, tensors, fusion.exprs)
    names: dict[Scalar, Scalar] = {
        s: Symbol(f"{s.name[0]}{k}", s.dtype, lo=s.lo)
        for k, s in enumerate(symbols)
        if s.hi is None and s.name[1:].isdigit()
    }
    memo: dict[Scalar, Scalar] = {}

    def renamed(x: Scalar) -> Scalar:
        if x not in memo:
            memo[x] = sc.substitute(x, names)
        return memo[x]

    copy, twins = fusion.copy()
    axes = count()
    for number, tv in enumerate(tensors):
        twin = twins[tv]
        twin.number, twin.domain = number, _renumbered(tv.domain, axes.__next__, renamed)
        if not tv.has_own_mesh:
            twin.mesh = None
    copy.exprs = tuple(
        op.map_values(lambda v: renamed(v) if isinstance(v, Scalar) else v) for op in copy.exprs
    )
    copy.inputs = [renamed(v) if isinstance(v, Scalar) else v for v in copy.inputs]
    copy.extents = _in_order(copy.extents, names)
    copy.origins = ()
    return copy, names, renamed


def _in_order(extents: ExtentClasses, names: Mapping[Scalar, Scalar]) -> ExtentClasses:
    """Returns the equalities between extents with renamed symbols, sorted by their text.

    `names` maps old to new symbols. The result does not depend on the order in which the user
    stated the equalities, so it can be a part of a key. The symbols in `extents` are also renamed.
    """
    extents.rewrite(names)
    made = ExtentClasses()
    for x, y in sorted(extents.relations(), key=str):
        made.unify(y, x)
    return made


def part_key(part: Fusion) -> Hashable:
    """Returns a hashable key of a part of a fusion, such as a kernel, without the numbers of its
    tensors and axes.

    Parts of one fusion have equal keys if they differ in these numbers only, like the kernels of
    equal layers of a model. Symbols are compared by identity, so keys of parts of different fusions
    must not be compared.
    """
    tensors = part.tensors()
    places = {tv: place for place, tv in enumerate(tensors)}

    def key_of(value: object) -> Hashable:
        if isinstance(value, TensorView):
            return "tensor", places[value]
        if isinstance(value, tuple | list):
            return tuple(map(key_of, cast("Iterable[object]", value)))
        return value

    ops: list[Hashable] = []
    for op in part.exprs:
        names = op.fields_of("operand", "operands", "result", "results", "attr")
        ops.append((type(op), *(key_of(getattr(op, name)) for name in names)))
    states = (
        (tv.dtype(), tv.memory, tv.mesh, tv.is_cpu_scalar, tv.compute_at, tv.domain.structure)
        for tv in tensors
    )
    updates = [(a.out, a.into, a.hidden) for a in part.aliases]
    return *states, key_of(ops), key_of(part.inputs), key_of(part.outputs), key_of(updates)


def form_text(form: CanonicalForm) -> str:
    """Returns a canonical form as text. The text is the same in every process, so it can be a part
    of the key of a file.
    """
    ranges = [f"{s.dtype.name} {s.lo} {s.hi}" for s in form.symbols]
    return _text([ranges, form.key])


def _text(value: object) -> str:
    if isinstance(value, frozenset):
        return "\n".join(sorted(map(_text, cast("frozenset[object]", value))))
    if isinstance(value, tuple | list):
        return "\n".join(map(_text, cast("list[object]", value)))
    return str(value)


def _renumbered(
    domain: TensorDomain, next_axis: Callable[[], int], renamed: Rename
) -> TensorDomain:
    def axis(a: IterDomain) -> IterDomain:
        expanded = None if a.expanded is None else renamed(a.expanded)
        number = numbers[a.number]
        return replace(a, number=number, extent=renamed(a.extent), expanded=expanded)

    # Ordered by transforms, because a user may transform independent axes in any order.
    made_by = (n for t in domain.transforms for n in t.outputs)
    order = dict.fromkeys((*domain.root_numbers, *domain.logical_numbers, *made_by))
    numbers = {n: next_axis() for n in order}
    made = domain.map_axes(axis)
    if not made.transforms:
        return made
    return made.having(transforms=[t.rewritten(renamed) for t in made.transforms])


# ----------------------------------------------------------------------
# Structural equality of ops, tensors and fusions.
#
# Tensors are compared by number and by their whole domain. Scalars are compared by text and
# category, because integer literals of different widths are one value.

Key = tuple[object, ...]


def equal_ops(a: Op, b: Op) -> bool:
    """Returns whether two ops have equal classes, attributes, operands and results.

    Tensors are equal if their numbers are equal. The lines where the user wrote the ops may differ.
    """
    return op_key(a) == op_key(b)


def equal_fusions(a: Fusion, b: Fusion) -> bool:
    """Returns whether two fusions have equal inputs, outputs, updates of inputs, ops and tensors.

    The equalities of extents, and the numbers of tensors and axes, must be equal, too.
    `Fusion.__eq__` ignores numbers.
    """
    return fusion_key(a) == fusion_key(b)


def fusion_key(fusion: Fusion) -> Key:
    """Returns a hashable key of a fusion.

    Two keys are equal exactly if `equal_fusions` returns True.
    """
    return (
        values_key(fusion, fusion.tensors()),
        tuple(op_key(op) for op in fusion.exprs),
    )


def values_key(fusion: Fusion, tensors: Iterable[TensorView]) -> Key:
    """Returns a hashable key of a fusion without its ops, for comparisons of two programs.

    The key has the fusion's inputs, outputs, updates of inputs and equal extents, and the key of
    each tensor in `tensors` (`tensor_key`).
    """
    return (
        _value(tuple(fusion.inputs)),
        _value(tuple(fusion.outputs)),
        tuple((a.out.number, a.into.number, a.hidden) for a in fusion.aliases),
        tuple((_value(s), _value(x)) for s, x in fusion.equal_extents()),
        tuple(tensor_key(tv) for tv in tensors),
    )


def tensor_key(tv: TensorView) -> Key:
    """Returns a hashable key of a tensor, for comparisons of two programs.

    The key has the tensor's number, dtype, kind of memory, mesh and axes. It has the number of
    loops that the tensor shares with the ops that read it. It also says whether the user set the
    mesh, and whether the tensor is a scalar on the CPU.
    """
    return (
        tv.number,
        tv.dtype(),
        tv.memory,
        tv.mesh,
        tv.mesh_is_user_set,
        tv.is_cpu_scalar,
        tv.compute_at,
        _domain_key(tv.domain),
    )


def _domain_key(domain: TensorDomain) -> Key:
    groups = (domain.root, domain.logical, domain.allocation, domain.loop)
    transforms = tuple(transform_text(t, domain) for t in domain.transforms)
    return (*(tuple(map(str, group)) for group in groups), transforms, domain.contiguity)


def op_key(op: Op) -> Key:
    """Returns a hashable key of an op, for comparisons: class, operands, results and attributes.

    The line where the user wrote the op is not in the key.
    """
    fields: list[tuple[str, object]] = []
    for f in dataclasses.fields(op):  # pyright: ignore[reportArgumentType]
        if f.metadata.get("kind") != "where":
            fields.append((f.name, _value(getattr(op, f.name))))
    return (type(op).__name__, *fields)


def _value(value: object) -> object:
    if isinstance(value, TensorView):
        return ("tensor", value.number)
    if isinstance(value, Const):
        return (category(value.dtype), scalar_text(value))
    if isinstance(value, Scalar):
        return (value.dtype, scalar_text(value))
    if isinstance(value, Op):
        return op_key(value)
    if isinstance(value, tuple):
        return tuple(_value(v) for v in cast("tuple[object, ...]", value))
    if dataclasses.is_dataclass(value):
        # The text of an axis, a stream or a team is complete but for the ranges of its symbols.
        return (type(value).__name__, str(value))
    return value
