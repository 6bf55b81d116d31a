"""Concretize: decides, on a copy, everything in a fusion that depends on the sizes of its inputs.

Before:

- Reshapes whose sizes could not be compared symbolically have `?` axes: it is undecided whether
  such an axis has size 1 and is a broadcast.
- Slices and pads whose result may have size 1 along an axis have `?` axes, too.
- Any extent may be 0.

After:

- No axis is `?`, and all equal extents are the same scalar object.
- A tensor without elements is the result of a `full`. So is the result of a reduction over no
  elements.
- An extent of 0 is the constant 0. The symbol of any other extent is at least 1.
- If each device has one position of an axis, the extent of the axis is a constant: the number of
  devices.

Every later stage relies on these properties.

    T1[?S2{i1}, ?S3{i2}] = reshape( T0[iS0{i0}] )       sizes i0=12, i1=3, i2=4
    T1[iS2{i1}rf, iS3{i2}rf] = reshape( T0[iS0{i0}] )   Split: iS4{i0} by factor i2 -> iS2, iS3

`S2` is an axis with the number 2, and `{i1}` its size. `iS` is an ordinary (iteration) axis, and
`?S` an undecided one. `rf` marks axes that the reshape derives from an axis of its operand.

The decisions form a key. The result for one set of sizes also serves other sizes with an equal key.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from math import gcd, lcm

from fuser.ir.binding import complete, size_of
from fuser.ir.domain.tensor_domain import IterDomain, TensorDomain
from fuser.ir.dtypes import DataType, category
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.naming import in_ir, misfit_of_mesh
from fuser.ir.ops import nodes
from fuser.ir.ops.lookup import GatherOp, LookupOp, ScatterOp, SelectOp
from fuser.ir.ops.nodes import PadOp, ReshapeOp, SliceOp
from fuser.ir.ops.scan_ops import TopKOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.compiled import Computed
from fuser.ir.scalar.constructors import Apply, Const, Number, Scalar, Symbol
from fuser.ir.scalar.scalar_nodes import postorder
from fuser.ir.types import IterType
from fuser.ir.verify import verify_fusion
from fuser.ops.reduction_table import missing
from fuser.ops.reshaping import ReshapePlan, plan_reshape
from fuser.passes.resolve_symbolic import (
    deciding_sizes,
    is_undecided,
    iterate_resized,
    resolve_symbolic,
)
from fuser.support.errors import InputError, ShardingError, user_code
from fuser.support.record import record

ExtentMap = Callable[[Scalar], Scalar]


@record
class ConcretizationKey:
    """The decisions of `concretize` for some input sizes. Inputs with equal keys share one copy of
    the fusion, and if their memory layouts are equal, too, also its compiled programs.

    Each tuple is in program order. A `?` axis is an axis that may turn out to have size 1 and be a
    broadcast.

    - `plans`: for each reshape with `?` axes, which axes it merges, splits, adds and removes.
    - `ones`: for each `?` axis of a slice, pad or expand, whether its size is 1.
    - `empty`: the extents that are 0.
    - `clamps`: for each minimum or maximum of sizes, the position of the argument that is its
      value.
    - `even_parts`: for each extent that a reshape splits or merges, the greatest common divisor of
      the extent and the number n of devices. It says into how many equal parts devices can split
      the axis. The tuple is () if every extent is divisible by n. With several meshes, n is the
      least common multiple of their sizes.
    """

    plans: tuple[ReshapePlan, ...]
    ones: tuple[bool, ...]
    empty: tuple[Scalar, ...]
    clamps: tuple[int, ...]
    even_parts: tuple[int, ...] = ()


def concretize(fusion: Fusion, sizes: Mapping[Symbol, int]) -> tuple[Fusion, Hashable]:
    """Returns a copy of `fusion` in which everything that depends on sizes is decided, and a key of
    these decisions.

    For sizes with an equal key, the copy can be used again. `sizes` has the values of extent
    symbols and of integer scalar inputs. If several symbols are known to be equal, the value of one
    of them suffices.

    Raises:
        InputError: a reshape changes the number of elements; the index of a gather is longer than
            its table; a slice or select exceeds an axis.
        ShardingError: an axis with one position per device of a mesh has another extent than this
            mesh.
    """
    decide = KeyOfSizes(fusion)
    key = decide(sizes)
    new, _ = fusion.copy()
    # A reshape that no output needs is never decided.
    new.exprs = new.used_exprs()
    values = _all_values(new, sizes)
    clamps: tuple[int, ...] = ()
    if isinstance(key, ConcretizationKey):
        resolve_symbolic(new, iter(key.plans), values)
        values = _all_values(new, sizes)
        clamps = key.clamps
    fill_empty(new, values)
    decided = _decided(new, values.get) | _numbers_of_devices(new)
    known = decide.clamps.replacements(new, clamps, decided)
    if isinstance(key, ConcretizationKey):
        shared = zip(decide.shared, key.even_parts, strict=False)
        new.even_parts = {sc.substitute(new.canonical(x), known): n for x, n in shared}
    _use_representatives(new, values, known)
    verify_fusion(new, after="concretize")
    return new, key


def concretization_key(fusion: Fusion, sizes: Mapping[Symbol, int]) -> Hashable:
    """Returns a key of everything that `concretize` decides by these sizes, such as which axes a
    reshape merges; () if nothing depends on sizes.

    Inputs with equal keys and equal memory layouts can run the same compiled programs.

    Raises:
        InputError, ShardingError: in the same cases as `concretize`.
    """
    return KeyOfSizes(fusion)(sizes)


class KeyOfSizes:
    """A function from input sizes to a key. The key has everything that `concretize` decides by
    these sizes, such as which axes a reshape merges. The fusion is analysed only once.
    """

    def __init__(self, fusion: Fusion) -> None:
        self._fusion = fusion
        reshapes = [op for op in fusion.used_exprs() if isinstance(op, ReshapeOp)]
        # Each with the element counts that must be equal; None if they always are.
        self._reshapes = [(op, _counts(fusion, op)) for op in reshapes]
        self._deciding = Computed([x for op in fusion.used_exprs() for x in deciding_sizes(op)])
        self._limited = [op for op in fusion.used_exprs() if isinstance(op, GatherOp | ScatterOp)]
        self._selected = [op for op in fusion.used_exprs() if isinstance(op, SelectOp)]
        self._chosen = [op for op in fusion.used_exprs() if isinstance(op, TopKOp)]
        self._sliced = [op for op in fusion.used_exprs() if isinstance(op, SliceOp)]
        self._room = Computed([x for op in self._sliced for x in _room(op)])
        self._extents = _used_extents(fusion)
        self._sizes = Computed(list(self._extents))
        self.clamps = Clamps(fusion)
        self._counted = _device_axes(fusion)
        self._devices = _number_of_devices(fusion)
        # The extents that the devices of a mesh may not divide evenly.
        self.shared = _reshaped_extents(fusion) if self._devices > 1 else ()
        related = (x for pair in fusion.equal_extents() for x in pair)
        self._related = frozenset(x for x in related if isinstance(x, Symbol))

    def __call__(self, sizes: Mapping[Symbol, int]) -> Hashable:
        """Checks the sizes, and returns the key of the decisions that `concretize` makes for them.
        Inputs with equal keys and equal memory layouts can run the same compiled programs.

        Raises:
            InputError, ShardingError: in the same cases as `concretize`.
        """
        values: Mapping[Symbol, Number] = sizes
        if not self._related <= sizes.keys():
            values = _all_values(self._fusion, sizes)
        for tv, axis in self._counted:
            check_device_axis(tv, axis, size_of(axis.size, values))
        plans: list[ReshapePlan] = []
        for op, counts in self._reshapes:
            if counts is not None:
                _check_counts(op, counts, values)
            if is_undecided(op):
                plans.append(_plan(self._fusion, op, values))
        for op in self._limited:
            _check_limits(op, values)
        for op in self._selected:
            extent = size_of(op.table.domain.no_reductions[op.dim].size, values)
            if problem := op.misfit(extent):
                raise InputError(f"select: {problem}, which has {extent} elements{_at(op)}")
        for op in self._chosen:
            extent = op.inp.domain.no_reductions[op.dim].size
            if problem := op.misfit(size_of(op.k, values), size_of(extent, values)):
                raise InputError(f"topk: {problem}{_at(op)}")
        if self._room.scalars:
            room = self._room.at_once(values)
            if room is None or min(room) < 0:
                _check_bounds(self._sliced, values)
        empty, clamps = tuple(self._empty(values)), self.clamps.decide(values)
        ones = tuple(self._ones(values))
        parts = tuple(gcd(size_of(x, values), self._devices) for x in self.shared)
        if all(n == self._devices for n in parts):
            parts = ()
        if not (plans or ones or empty or clamps or parts):
            return ()
        return ConcretizationKey(tuple(plans), ones, empty, clamps, parts)

    def _ones(self, values: Mapping[Symbol, Number]) -> Iterator[bool]:
        """Yields, for each axis that becomes a broadcast if its size is 1, whether its size is 1.

        `values` has the sizes.
        """
        sizes = self._deciding.scalars
        found = self._deciding.at_once(values) if sizes else ()
        known = (size_of(x, values) for x in sizes) if found is None else found
        return (n == 1 for n in known)

    def _empty(self, values: Mapping[Symbol, Number]) -> Iterator[Scalar]:
        """Yields the symbolic extents that are 0 with the sizes in `values`. Each is yielded once,
        in program order.

        Raises:
            InputError: an extent is negative.
        """
        try:
            if min(self._sizes(values), default=1) > 0:
                return
        except (KeyError, ZeroDivisionError):
            pass  # an extent has no value, or is divided by an empty one
        for size, tv in self._extents.items():
            found = size_of(size, values)
            if found < 0:
                op = self._fusion.definition(tv)
                raise InputError(
                    f"the extent {size} of {tv} is negative for these inputs: {found}"
                    f"{_at(op) if op else ''}"
                )
            if found == 0:
                yield size


# ------------------------------------------------------------------ values
def _all_values(fusion: Fusion, sizes: Mapping[Symbol, int]) -> dict[Symbol, Number]:
    """Returns `sizes`, with the values of further symbols that are known to equal symbols in
    `sizes`.
    """
    values: dict[Symbol, Number] = dict(sizes)
    complete(fusion, values)
    return values


def _used_extents(fusion: Fusion) -> dict[Scalar, TensorView]:
    """Returns all extents that are not constant, each with the first tensor that has an axis of
    this extent.
    """
    found: dict[Scalar, TensorView] = {}
    for tv in _used_tensors(fusion):
        for axis in tv.domain.logical:
            if sc.int_value(axis.size) is None:
                found.setdefault(axis.size, tv)
    return found


def _used_tensors(fusion: Fusion) -> Iterator[TensorView]:
    yield from (v for v in fusion.inputs if isinstance(v, TensorView))
    for op in fusion.used_exprs():
        yield from op.outputs


# ------------------------------------------------------------------ reshapes
def _counts(fusion: Fusion, op: ReshapeOp) -> tuple[Scalar, Scalar] | None:
    """Returns the numbers of elements of a reshape's operand and result, which must be checked to
    be equal when the sizes are known.

    Returns None if they are provably equal.
    """
    have, want = (
        sc.product(fusion.canonical(a.size) for a in tv.domain.no_reductions)
        for tv in (op.inp, op.out)
    )
    return None if have == want else (have, want)


def _check_counts(
    op: ReshapeOp, counts: tuple[Scalar, Scalar], values: Mapping[Symbol, Number]
) -> None:
    found, expected = (size_of(count, values) for count in counts)
    if found != expected:
        shapes = [
            [size_of(a.size, values) for a in tv.domain.no_reductions] for tv in (op.inp, op.out)
        ]
        raise InputError(
            "Total element counts across view operation must match: reshape of "
            f"{op.inp} from {shapes[0]} to {shapes[1]} ({found} and {expected} elements)"
            f"{_at(op)}"
        )


def _check_limits(op: GatherOp | ScatterOp, values: Mapping[Symbol, Number]) -> None:
    """Raises `InputError` if the index tensor of a gather or scatter is too long along some axis.

    `op.limits` yields the axes, each with the tensor that limits the length of the index along this
    axis: the table of a gather, or the operands of a scatter. `values` has the sizes.
    """
    for k, tv in op.limits():
        want, have = (
            [size_of(a.size, values) for a in t.domain.no_reductions] for t in (op.index, tv)
        )
        if want[k] > have[k]:
            raise InputError(
                f"{op.name}: Size does not match at dimension {k}: expected index {op.index} of "
                f"shape {want} to be no larger than {tv} of shape {have}"
                f"{f' apart from dimension {op.dim}' if k != op.dim else ''}{_at(op)}"
            )


def _room(op: SliceOp) -> Iterator[Scalar]:
    """Yields two distances for each axis: from the first element to the start of a slice, and from
    the end of the slice to the end of the axis.

    A negative distance means that the slice exceeds the axis, which is an error once sizes are
    known. Distances that are provably not negative are omitted.
    """
    for axis, start, stop in zip(op.inp.domain.no_reductions, op.starts, op.stops, strict=True):
        found = (start, sc.sub(axis.size, stop))
        yield from (x for x in found if not sc.is_nonnegative(x))


def _check_bounds(ops: Sequence[SliceOp], values: Mapping[Symbol, Number]) -> None:
    """Raises `InputError` if one of the slices `ops` begins before or ends behind its axis.

    `values` has the sizes.
    """
    for op in ops:
        for axis, *bounds in zip(op.inp.domain.no_reductions, op.starts, op.stops, strict=True):
            size = size_of(axis.size, values)
            start, stop = (size_of(x, values) for x in bounds)
            if start < 0 or stop > size:
                hint = "; a negative scalar does not count from the end of the axis" * (
                    min(start, stop) < 0
                )
                raise InputError(
                    f"slice: [{start}, {stop}) is outside of axis {axis} of {op.inp}, which has "
                    f"{size} elements{hint}{_at(op)}"
                )


def _at(op: TensorOp) -> str:
    return f" (at {op.where})" if op.where else ""


def _plan(fusion: Fusion, op: ReshapeOp, values: Mapping[Symbol, Number]) -> ReshapePlan:
    """Returns how a reshape is divided into squeezes, merges, splits and new axes, with the sizes
    in `values`.

    Symbolic sizes alone do not decide this, for example whether [i1, i2] -> [i3] merges two axes or
    removes one.
    """
    sources = op.inp.domain.no_reductions
    ins = [size_of(a.size, values) for a in sources]
    outs = [size_of(a.size, values) for a in op.out.domain.logical]
    if 0 in ins or 0 in outs:
        ones = tuple(q for q, n in enumerate(outs) if n == 1)
        return ReshapePlan((), added=ones, is_empty=True)
    plan = plan_reshape(
        [sc.const(n) for n in ins],
        [sc.const(n) for n in outs],
        [n == 1 and a.kind is not IterType.iteration for a, n in zip(sources, ins, strict=True)],
    )
    if plan is None:
        raise InputError(
            f"reshape of {op.inp} from {ins} to {outs} cannot be expressed by merges and splits of "
            f"adjacent axes{_at(op)}"
        )
    return plan


# ------------------------------------------------------------------ devices
def _device_axes(fusion: Fusion) -> list[tuple[TensorView, IterDomain]]:
    """Returns pairs (tensor, axis): the axes that have a symbolic extent, and one position per
    device of the tensor's mesh.

    The caller checks that the extent is the number of devices. Tensors whose axes the user has
    placed on devices come first, so that an error message names a line of the user, if possible.
    """
    found: list[tuple[TensorView, IterDomain]] = []
    placed = [tv for tv in fusion.tensors() if tv.mesh is not None]
    for tv in sorted(placed, key=lambda tv: not tv.cut_lines):
        types = [a.ptype for a in tv.domain.loop if a.is_device and not a.is_reduction()]
        if len(types) > len({*types}):
            continue  # sharding propagation raises an error for two axes of one type
        found += (
            (tv, axis)
            for axis in tv.domain.logical
            if axis.is_device
            and axis.number in tv.domain.loop_numbers
            and sc.int_value(axis.size) is None
        )
    return found


def _number_of_devices(fusion: Fusion) -> int:
    """Returns the least common multiple of the sizes of all meshes of the fusion, or 1 without
    meshes.

    An axis whose extent is a multiple of this number can be split evenly over every mesh.
    """
    return lcm(*{tv.mesh.size for tv in fusion.tensors() if tv.mesh is not None})


def _reshaped_extents(fusion: Fusion) -> tuple[Scalar, ...]:
    """Returns the symbolic extents that a reshape may split or merge: those that either its operand
    or its result has, but not both.
    """
    found: dict[Scalar, None] = {}
    for op in fusion.used_exprs():
        if isinstance(op, ReshapeOp):
            have, want = (
                {fusion.canonical(a.size): None for a in tv.domain.no_reductions}
                for tv in (op.inp, op.out)
            )
            both = (*have, *want)
            alone = (x for x in both if not (x in have and x in want))
            found.update((x, None) for x in alone if sc.int_value(x) is None)
    return tuple(found)


def check_device_axis(tv: TensorView, axis: IterDomain, extent: int) -> None:
    """Raises `ShardingError` unless `extent`, the size of an axis with one position per device, is
    the number of devices of `tv`'s mesh along this axis.
    """
    assert tv.mesh is not None, f"{tv} has no mesh"
    if extent != tv.mesh.size_of(axis.ptype):
        line = tv.cut_lines.get(axis.ptype) or tv.user_line()
        raise ShardingError(f"{misfit_of_mesh(tv, axis, extent)}{user_code(line)}{in_ir(axis, tv)}")


def _numbers_of_devices(fusion: Fusion) -> dict[Scalar, Scalar]:
    """Returns the replacements of symbolic extents that must be a number of devices, because each
    device has one position of the axis.

    The keys are the extents, and the values are the numbers of devices as constants.
    """
    counts: dict[Scalar, Scalar] = {}
    for tv, axis in _device_axes(fusion):
        assert tv.mesh is not None, f"{tv} has no mesh"
        symbol, count = fusion.canonical(axis.size), tv.mesh.size_of(axis.ptype)
        if isinstance(symbol, Symbol) and count > 1:
            counts[symbol] = sc.const(count)
    return counts


# ------------------------------------------------------------------ extents
def _use_representatives(
    fusion: Fusion, values: Mapping[Symbol, Number], known: Mapping[Scalar, Scalar]
) -> None:
    """Rewrites every extent and scalar operand of `fusion`, in place.

    Of several symbols that are known to be equal, one replaces all. Extents that are 0 with the
    sizes in `values` become the constant 0. `known` has further replacements: each of its keys is
    replaced by its value.
    """
    memo: dict[Scalar, Scalar] = {}

    def extent(x: Scalar) -> Scalar:
        if x not in memo:
            is_empty = sc.symbols(x) and size_of(x, values) == 0
            memo[x] = sc.ZERO if is_empty else sc.substitute(fusion.canonical(x), known)
        return memo[x]

    def operand(v: Scalar) -> Scalar:
        return memo[v] if v in memo else sc.substitute(fusion.canonical(v), known)

    _rewrite(fusion, extent, operand, known)


def _refined(symbol: Symbol) -> Symbol:
    return symbol.with_range(lo=max(symbol.lo or 0, 1))


def refined_sizes(sizes: Mapping[Symbol, int]) -> dict[Symbol, int]:
    """Returns `sizes` with additional entries: the sizes of the symbols of a concretized fusion.

    `concretize` replaces the symbol of each extent by a new symbol with the lower bound 1. The new
    symbol has the same size. If the size is 0, there is no new symbol, because the extent becomes
    the constant 0.
    """
    return {**sizes, **{_refined(s): n for s, n in sizes.items() if n > 0}}


def refine_extents(fusion: Fusion) -> None:
    """Replaces the symbol of each extent by one that is at least 1, in place. A kernel can then be
    compiled for all sizes that are not 0.

    `concretize` has not been called: nothing in `fusion` has been decided by input sizes. Axes of
    slices and pads that may have size 1 become ordinary axes, not broadcasts, because the kernel
    must also serve other sizes.
    """
    iterate_resized(fusion)
    known = _decided(fusion, lambda _: None)

    def refined(x: Scalar) -> Scalar:
        return sc.substitute(fusion.canonical(x), known)

    _rewrite(fusion, refined, refined, known)


def replace_scalars(fusion: Fusion, known: Mapping[Scalar, Scalar]) -> None:
    """Replaces each key of `known` by its value, in all sizes and scalar operands of `fusion`, in
    place.
    """

    def replaced(x: Scalar) -> Scalar:
        return sc.substitute(x, known)

    _rewrite(fusion, replaced, replaced, known)


def _decided(fusion: Fusion, value: Callable[[Symbol], Number | None]) -> dict[Scalar, Scalar]:
    """Returns a replacement for each symbol that is an extent: the constant 0 if its value is 0,
    else a new symbol with the lower bound 1.

    `value` returns the value of a symbol, or None if the value is unknown.
    """
    extents = {a.size: None for tv in fusion.tensors() for a in tv.domain.axes.values()}
    extents.update({x: None for pair in fusion.equal_extents() for x in pair})
    known: dict[Scalar, Scalar] = {}
    for x in extents:
        if isinstance(x, Symbol):
            known[x] = sc.ZERO if value(x) == 0 else _refined(x)
    return known


def _rewrite(
    fusion: Fusion, extent: ExtentMap, operand: ExtentMap, known: Mapping[Scalar, Scalar]
) -> None:
    """Rewrites every scalar of a fusion, in place: extents, scalar operands, inputs, and the
    equalities between extents.

    `extent` returns the new scalar for an extent, and `operand` that for a scalar operand. `known`
    has the replacements for inputs and equalities.
    """
    tensors = fusion.tensors()
    for tv in tensors:
        tv.domain = _map_extents(tv.domain, extent)
    # A width is rewritten as an operand even if it equals an extent, because the key does not
    # contain whether a width is 0.
    for tv in tensors:
        if tv.domain.transforms:
            changed = (t.rewritten(operand) for t in tv.domain.transforms)
            tv.domain = tv.domain.having(transforms=changed)
    fusion.exprs = tuple(
        op.map_values(lambda v: v if isinstance(v, TensorView) else operand(v))
        for op in fusion.exprs
    )
    fusion.inputs = [
        v if isinstance(v, TensorView) or not isinstance(found := known.get(v), Symbol) else found
        for v in fusion.inputs
    ]
    fusion.extents.rewrite(known)


def _map_extents(domain: TensorDomain, extent: ExtentMap) -> TensorDomain:
    def axis(a: IterDomain) -> IterDomain:
        expanded = None if a.expanded is None else extent(a.expanded)
        return a.having(extent=extent(a.extent), expanded=expanded)

    return domain.map_axes(axis)


# ----------------------------------------------------------------------
# Fills empty tensors, and reductions over no elements.
#
# Before: for these sizes some extents are 0. After: an op whose result is empty, or that reduces no
# elements, is a `full` with the value of the result; ops that nothing reads any more are removed.
#
#     T1[iS2{i0}, rS3{i1}] = reduction( T0[iS0{i0}, iS1{i1}], op = add )     sizes i1 = 0
#     T1[iS2{i0}] = full({i0}, float(0))

Values = Mapping[Symbol, Number]


def fill_empty(fusion: Fusion, values: Values) -> None:
    """Replaces ops that reduce no elements, or whose result has none, by `full` ops with the values
    of the result, in place.

    `values` has the sizes. Nothing changes if no extent is 0.
    """
    if not any(_is_empty(a, values) for tv in fusion.tensors() for a in tv.domain.logical):
        return
    exprs: list[TensorOp] = []
    for op in fusion.exprs:
        exprs.extend(new.replace(where=op.where) for new in _filled(fusion, op, values))
    fusion.exprs = exprs
    fusion.exprs = fusion.used_exprs()


def _is_empty(axis: IterDomain, values: Values) -> bool:
    return size_of(axis.size, values) == 0


def _filled(fusion: Fusion, op: TensorOp, values: Values) -> list[TensorOp]:
    """Returns the ops that replace `op` if there is nothing to compute from: its result has no
    elements, or it reduces no elements. They are usually `full` ops with the values of the results.

    In all other cases, returns `op` itself.
    """
    if isinstance(op, nodes.LibraryOp) and op.TAKES_EMPTY:
        return [op]
    reduces_nothing = any(
        _is_empty(a, values) for a in op.out_tensor.domain.logical if a.is_reduction()
    )
    if reduces_nothing and isinstance(op, nodes.LinearOp) and op.bias is not None:
        return _bias_alone(fusion, op, op.bias)
    pads_nothing = isinstance(op, PadOp) and any(
        _is_empty(a, values) for a in op.inp.domain.no_reductions
    )
    finds_nothing = isinstance(op, LookupOp) and any(
        _is_empty(a, values) for a in op.table.domain.no_reductions
    )
    # A squeeze of an expanded axis without elements has no element to select.
    drops_nothing = isinstance(op, nodes.SqueezeOp) and any(
        is_gone and _is_empty(a, values)
        for a, is_gone in zip(op.inp.domain.no_reductions, op.flags, strict=True)
    )
    is_empty = any(_is_empty(a, values) for a in op.out_tensor.domain.logical)
    if not (reduces_nothing or pads_nothing or finds_nothing or drops_nothing or is_empty):
        return [op]
    fills: list[TensorOp] = []
    for out, value in zip(op.outputs, _fill_values(op), strict=True):
        out.domain = out.domain.without_root()
        shape = tuple(a.size for a in out.domain.logical)
        fills.append(nodes.FullOp(out, shape, value))
    return fills


def _fill_values(op: TensorOp) -> list[Scalar]:
    """Returns, for each output of `op`, the value of all its elements if `op` has nothing to
    compute from: for example 0 for a sum of no elements.
    """
    match op:
        case nodes.ReductionOp():
            return [op.init]
        case PadOp():
            return [op.value]
        case LookupOp():
            return [Const(missing(op.out.dtype()), op.out.dtype())]
        case nodes.WelfordOp():
            return [
                Const(missing(op.avg.dtype()), op.avg.dtype()),
                Const(0, op.var.dtype()),
                Const(0, DataType.Index),
            ]
        case _:
            return [Const(0, out.dtype()) for out in op.outputs]


def _bias_alone(fusion: Fusion, op: nodes.LinearOp, bias: TensorView) -> list[TensorOp]:
    """Returns the ops that replace a linear layer which sums over no elements.

    The result of such a layer is the bias in every row. The ops therefore expand the bias to the
    shape of the result.
    """
    flags = op.bias_lacks
    op.out.domain = op.out.domain.without_root()
    logical, sources = op.out.domain.logical, iter(bias.domain.no_reductions)
    axes = [
        fusion.new_axis(sc.ONE, IterType.broadcast) if new else fusion.clone_axis(next(sources))
        for new in flags
    ]
    row = fusion.new_tensor(axes, bias.dtype(), mesh=op.out.mesh)
    # The result's axes iterate; adding to zeros expands the row without expanded broadcasts.
    zeros = fusion.new_tensor([fusion.clone_axis(a) for a in logical], bias.dtype())
    shape = tuple(a.size for a in logical)
    made: list[TensorOp] = [
        nodes.BroadcastOp(row, bias, flags=flags),
        nodes.FullOp(zeros, shape, Const(0, bias.dtype())),
        nodes.BinaryOp(op.out, row, zeros, kind="add"),
    ]
    return made


# ----------------------------------------------------------------------
# Decides which argument a minimum or maximum of sizes is, as in the clamped end of a slice.
#
#     T1[iS2{min(64, i0)}] = slice( T0[iS0{i0}] )        sizes i0=128:  iS2{64}
#
# The decision is the same for a whole class of inputs. Extents then are constants, sums and
# products, which a schedule can test for divisibility by a vector's width.


class Clamps:
    """The minima and maxima of integer sizes (clamps) in the extents of a fusion, such as the end
    of a slice, `min(64, n)`.

    For given sizes, each clamp equals one of its two arguments. `decide` makes this choice, which
    makes extents simpler. The compiled program then serves only sizes with the same choice. A clamp
    that occurs only in scalar operands is not decided, because its value may depend on scalars that
    differ between runs of one compiled program.
    """

    def __init__(self, fusion: Fusion) -> None:
        self._fusion = fusion
        seen: set[Scalar] = set()
        # Inner ones first.
        self._found = [
            y
            for x in _extents(fusion)
            for y in postorder(fusion.canonical(x), seen.__contains__)
            if seen.add(y) is None and _is_clamp(y)
        ]
        self._distances = Computed([sc.sub(*x.args) for x in self._found if isinstance(x, Apply)])

    def decide(self, values: Mapping[Symbol, Number]) -> tuple[int, ...]:
        """Returns, for each minimum or maximum of sizes (clamp), the position of the argument that
        is its value: 0 or 1.

        If both arguments have the same value, a constant argument is preferred. Returns () if a
        size in `values` is missing.
        """
        distances = self._distances.at_once(values) if self._found else None
        if distances is None:
            return ()
        return tuple(
            _choice(x, distance) for x, distance in zip(self._found, distances, strict=True)
        )

    def replacements(
        self, fusion: Fusion, choices: tuple[int, ...], known: Mapping[Scalar, Scalar]
    ) -> dict[Scalar, Scalar]:
        """Returns the replacements `known`, and one more for each minimum or maximum of sizes
        (clamp): it is replaced by one of its arguments.

        `choices` is the result of `decide`. `fusion` is a copy of the fusion of this object.
        """
        found = dict(known)
        for x, choice in zip(self._found, choices, strict=bool(choices)):
            assert isinstance(x, Apply)
            chosen = sc.substitute(fusion.canonical(x.args[choice]), found)
            # An extent that equals the whole clamp is replaced, but not one inside of a sum.
            found.update((form, chosen) for form in (x, fusion.canonical(x)) if _is_clamp(form))
        return found


def _extents(fusion: Fusion) -> Iterator[Scalar]:
    for op in fusion.used_exprs():
        for out in op.outputs:
            yield from (x for a in out.domain.axes.values() for x in (a.extent, a.size))


def _is_clamp(x: Scalar) -> bool:
    return isinstance(x, Apply) and x.op in ("min", "max") and category(x.dtype) == "int"


def _choice(x: Scalar, distance: Number) -> int:
    assert isinstance(x, Apply)
    if distance == 0:
        return int(isinstance(x.args[1], Const))
    return int((distance > 0) == (x.op == "min"))
