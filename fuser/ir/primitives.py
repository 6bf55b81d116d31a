"""Schedule primitives that rewrite the fusion: caches and rfactor.

    cache_after(T0):   T1 = op(T0)          ->  T2 = Set(T0);  T1 = op(T2)         returns T2
    cache_before(T1):  T1 = op(T0)          ->  T2 = op(T0);   T1 = Set(T2)        returns T2
    cache_fork(T1):    T1 output and used   ->  T1 as before;  T2 = Set(T1) is the output instead
    rfactor(T1, axes): T1 = sum(T0)         ->  T2 = sum(T0) over `axes`; T1 = sum(T2) over the rest

The methods of `TensorView` with the same names call these functions through `PRIMITIVES`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fuser.ir.domain.axis_path import transforms_between
from fuser.ir.domain.tensor_domain import (
    IterDomain,
    TensorDomain,
    Transform,
)
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import PRIMITIVES, Fusion, TensorOp, TensorView
from fuser.ir.ops.nodes import Contraction, LinearOp, LoadStoreOp, ReductionOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.types import CacheOp, IterType, LoadStoreOpType, MemoryType, ParallelType
from fuser.support.errors import DefinitionError, UnsupportedError


# ------------------------------------------------------------------ caches
def cache_after(
    tv: TensorView,
    op_type: LoadStoreOpType = LoadStoreOpType.set,
    cache_op: CacheOp = CacheOp.unspecified,
    propagate_allocation_domain: bool = True,
    cached_uses: Sequence[TensorOp] = (),
) -> TensorView:
    """Inserts a copy between `tv` and the ops that read it, and returns the copy.

    `op_type` and `cache_op` are the kind and the cache hint of the copy. If `cached_uses` is not
    empty, only these ops read the copy. Schedules use this to load an input into registers or
    shared memory once. The copy has the loops and the mesh of `tv`, and no reduction axes. It has
    the memory order of `tv` if `propagate_allocation_domain` is True.

    Raises:
        DefinitionError: no op reads `tv`, `tv` already shares loops with the ops that read it, or
            an op in `cached_uses` does not read `tv`.
    """
    fusion = tv.fusion
    uses = fusion.uses(tv)
    if not uses:
        raise DefinitionError(f"cache_after needs an op that reads {tv}, but there is none")
    if tv.compute_at:
        raise DefinitionError(
            f"cache_after of {tv}: the tensor is already inlined; call cache_after before inlining"
        )
    for op in cached_uses:
        if op not in uses:
            raise DefinitionError(
                f"cache_after of {tv}: this op in cached_uses does not read it:\n{op}"
            )
    copy = fusion.new_tensor(
        _copied_domain(fusion, tv.domain, keep_allocation=propagate_allocation_domain),
        tv.dtype(),
        mesh=tv.mesh,
    )
    chosen = set(cached_uses or uses)
    fusion.replace_uses(tv, copy, where=lambda op: op in chosen)
    fusion.insert_after(tv.definition(), [LoadStoreOp(copy, tv, kind=op_type, cache_op=cache_op)])
    return copy


def cache_before(tv: TensorView, op_type: LoadStoreOpType = LoadStoreOpType.set) -> TensorView:
    """Inserts a new tensor, which the op of `tv` now computes, and returns the new tensor.

    `tv` becomes a copy of the new tensor, by a copy op of the kind `op_type`. Schedules use this to
    compute an output in registers and to write it to memory afterwards. The new tensor has the axes
    and loops that `tv` had before.

    Raises:
        DefinitionError: `tv` is a fusion input, or already shares loops with the ops that read it.
    """
    fusion = tv.fusion
    definition = tv.definition()
    if definition is None:
        raise DefinitionError(
            f"cache_before of {tv}: the tensor is an input, which no op computes; use cache_after"
        )
    if tv.compute_at:
        raise DefinitionError(
            f"cache_before of {tv}: the tensor is already inlined; call cache_before before "
            "inlining"
        )
    # The producer takes the domain itself: an allocation domain describes tv's memory, so it stays.
    domain = tv.domain
    new = fusion.new_tensor(domain.in_logical_order(), tv.dtype(), mesh=tv.mesh)
    moved = definition.map_values(lambda v: new if v is tv else v)
    copy = LoadStoreOp(tv, new, kind=op_type)
    tv.domain = _copied_domain(fusion, domain, keep_allocation=True)
    fusion.replace_expr(definition, [moved, copy])
    return new


def cache_fork(tv: TensorView) -> TensorView:
    """Adds a copy of the output `tv`, makes the copy an output in place of `tv`, and returns the
    copy.

    The ops that read `tv` still read it. As `tv` is no output any more, it need not be stored in
    global memory.

    Raises:
        DefinitionError: `tv` is not an output, is also an input, or no op reads it.
    """
    fusion = tv.fusion
    if tv not in fusion.outputs or tv in fusion.inputs or not fusion.uses(tv):
        raise DefinitionError(
            f"cache_fork needs an output that some op reads and that is not an input, got {tv}"
        )
    copy = fusion.new_tensor(
        _copied_domain(fusion, tv.domain, keep_allocation=True),
        tv.dtype(),
        memory=tv.memory,
        mesh=tv.mesh,
    )
    fusion.insert_after(tv.definition(), [LoadStoreOp(copy, tv)])
    fusion.outputs = [copy if out is tv else out for out in fusion.outputs]
    fusion.aliases = [replace(a, out=copy) if a.out is tv else a for a in fusion.aliases]
    tv.memory = MemoryType.local
    tv.domain = tv.domain.in_logical_order()
    return copy


def _copied_domain(fusion: Fusion, source: TensorDomain, *, keep_allocation: bool) -> TensorDomain:
    """Returns the axes of a copy of a tensor: those that users see, without reduction axes.

    The copy has the same loops as the tensor, and the same memory order if `keep_allocation` is
    True. Axes that are split over devices or streams stay so, because this decides which part of
    the tensor a device has. All other parallel types, such as threads, belong to a single kernel
    and are dropped.
    """
    plain = source.without_root()
    if not keep_allocation:
        plain = plain.in_logical_order()
    needed = transforms_between(plain, plain.logical, (*plain.loop, *plain.allocation))
    plain = plain.having(transforms=needed)

    def clone(axis: IterDomain) -> IterDomain:
        keeps = axis.is_device or axis.is_stream
        return fusion.clone_axis(axis, ptype=axis.ptype if keeps else ParallelType.serial)

    order = (*plain.logical_numbers, *(n for t in needed for n in t.outputs))
    clones = {n: clone(plain.axes[n]) for n in order}
    return plain.map_axes(lambda a: clones[a.number])


# ------------------------------------------------------------------ rfactor
def rfactor(tv: TensorView, axes: Sequence[int]) -> TensorView:
    """Splits a reduction into two reductions, and returns the result of the first one.

    The new tensor reduces the loop axes at the positions `axes`. `tv` then reduces the other
    reduction axes of the new tensor. For `tv [i, r{d}, r{K/d}]` and axes (2,), the new tensor is
    `[i, i{d}, r{K/d}]` and tv is `[i, r{d}]`; i are iteration axes, r reduction axes. A schedule
    uses this so that threads compute partial results in parallel, which are combined afterwards.

    If the reduced axes are results of splits or merges, the new tensor also stores copies of their
    source axes (as root axes). The new tensor has the mesh of `tv` and no parallel types.

    Raises:
        DefinitionError: `tv` is not a reduction, or `axes` are not some (but not all) of its
            reduction axes.
        UnsupportedError: the op of `tv` has several outputs, or is a linear with a bias.
    """
    definition = tv.definition()
    if not isinstance(definition, ReductionOp | Contraction):
        if definition is not None and len(definition.outputs) > 1:
            raise UnsupportedError(
                f"rfactor of {tv} is not supported, because {definition.name} has several results"
            )
        raise DefinitionError(f"Error rfactoring {tv} because its definition is not a reduction.")
    if isinstance(definition, LinearOp) and definition.bias is not None:
        raise UnsupportedError(
            f"rfactor of {tv}: a linear with a bias would add the bias to each partial sum. Add "
            "the bias by an op of its own"
        )
    loop = tv.domain.loop
    listed = [tv.axis(a) for a in axes]
    reductions = [a for a in loop if a.is_reduction()]
    for axis in listed:
        if not axis.is_reduction():
            raise DefinitionError(f"rfactor of {tv}: axis {axis} is not a reduction axis")
    if len({a.number for a in listed}) != len(axes) or not 0 < len(listed) < len(reductions):
        raise DefinitionError(
            f"rfactor of {tv}: pass some, but not all, of its reduction axes "
            f"{[k for k, a in enumerate(loop) if a.is_reduction()]}, each once, got {list(axes)}"
        )
    producer = _rfactor_producer(tv, {a.number for a in listed})
    moved = definition.replace(out=producer)
    kind, init = (
        (definition.kind, definition.init)
        if isinstance(definition, ReductionOp)
        else ("add", _zero(tv.dtype()))
    )
    _rfactor_consumer(tv, producer)
    tv.fusion.replace_expr(
        definition,
        [moved, ReductionOp(tv, producer, init, kind=kind).replace(where=definition.where)],
    )
    return producer


def _zero(dtype: DataType) -> sc.Scalar:
    return sc.const(0, dtype)


def _rfactor_producer(tv: TensorView, listed: set[int]) -> TensorView:
    """Returns the new tensor of an rfactor, which splits the reduction `tv` into two reductions.

    The new tensor is the result of the first reduction. It reduces the loop axes of `tv` with the
    numbers `listed`. The other reduction axes of `tv` become iteration axes of the new tensor.
    """
    fusion, domain = tv.fusion, tv.domain
    history = transforms_between(domain, domain.logical, domain.loop)
    # Transforms of an earlier rfactor; the operand has their input axes.
    earlier = transforms_between(domain, domain.root, domain.logical) if domain.root else ()
    factored = _connected(domain, history, listed)
    # Ancestors of a listed axis are reduced (in part); other reductions are iterated.
    reduced = domain.above(listed)
    clones: dict[int, IterDomain] = {}
    made = (n for t in (*earlier, *history) for n in (*t.inputs, *t.outputs))
    for number in (*domain.root_numbers, *domain.logical_numbers, *made):
        if number not in clones:
            axis = domain.axes[number]
            iterated = axis.is_reduction() and number not in reduced
            clones[number] = fusion.clone_axis(
                axis,
                kind=IterType.iteration if iterated else axis.kind,
                rfactor=axis.rfactor
                or (number in factored and number not in domain.logical_numbers),
            )
    logical = list(domain.logical_numbers)
    for t in history:
        if factored.issuperset(t.inputs):
            at = min(k for k, n in enumerate(logical) if n in t.inputs)
            logical = [n for n in logical if n not in t.inputs]
            logical[at:at] = t.outputs
    # Without transforms the root axis itself is iterated or reduced: no second view is needed.
    is_changed = logical != list(domain.logical_numbers)
    plain = domain.having(
        root=domain.root_numbers or (domain.logical_numbers if is_changed else ()),
        logical=logical,
        transforms=[*earlier, *sorted(history, key=lambda t: not factored.issuperset(t.inputs))],
        allocation=(),
        contiguity=(),
    ).map_axes(lambda a: clones[a.number])
    return fusion.new_tensor(plain.in_logical_order(), tv.dtype(), mesh=tv.mesh)


def _connected(
    domain: TensorDomain, history: Sequence[Transform], listed: set[int]
) -> frozenset[int]:
    """Returns the numbers of the loop axes `listed`, and of all axes that are connected with them.

    Two axes are connected if a chain of splits and merges in `history` leads from one to the other.
    `history` derives the loop axes from the axes that users see. An rfactor reduces some of the
    connected axes and keeps others. Users therefore see the results of these splits and merges as
    axes of the new tensor.
    """
    found = set(listed)
    changed = True
    while changed:
        changed = False
        for t in history:
            numbers = {*t.inputs, *t.outputs}
            if numbers & found and not numbers <= found:
                found |= numbers
                changed = True
    return frozenset(found)


def _rfactor_consumer(tv: TensorView, producer: TensorView) -> None:
    """Makes `tv` the second of the two reductions of an rfactor: it reduces the remaining axes.

    `producer` is the result of the first reduction, and the new operand of `tv`.
    """
    fusion, old, new = tv.fusion, tv.domain, producer.domain
    # The producer's loop axes have the order of tv's old loop axes, so their kinds correspond.
    was_reduction = {n.number: o.is_reduction() for o, n in zip(old.loop, new.loop, strict=True)}
    ptypes = {n.number: o.ptype for o, n in zip(old.loop, new.loop, strict=True)}
    plain = new.without_root()
    for t in reversed(plain.transforms):
        for n in t.inputs:
            was_reduction[n] = any(was_reduction.get(o, False) for o in t.outputs)
    order = (*plain.logical_numbers, *(n for t in plain.transforms for n in t.outputs))
    clones = {
        n: fusion.clone_axis(
            plain.axes[n],
            kind=IterType.reduction if was_reduction.get(n, False) else plain.axes[n].kind,
            ptype=ptypes.get(n, ParallelType.serial),
        )
        for n in order
    }
    made = plain.map_axes(lambda a: clones[a.number])
    tv.domain = made.having(contiguity=_kept_contiguity(old, made.logical))


def _kept_contiguity(old: TensorDomain, logical: tuple[IterDomain, ...]) -> tuple[bool | None, ...]:
    """Returns the contiguity flags of a tensor after an rfactor, one per axis.

    A flag is True if the axis has no gaps in memory. `old` are the axes of the tensor before the
    rfactor, and `logical` those after it. Axes that are not reduced keep their flags. The flag of a
    reduction axis is None.
    """
    flags: Mapping[int, bool | None] = dict(
        enumerate(
            flag
            for axis, flag in zip(old.maybe_allocation, old.contiguity, strict=True)
            if not axis.is_reduction()
        )
    )
    kept = iter(range(len(flags)))
    return tuple(None if a.is_reduction() else flags[next(kept)] for a in logical)


PRIMITIVES.update(
    rfactor=rfactor, cache_after=cache_after, cache_before=cache_before, cache_fork=cache_fork
)
