"""Infers layouts: a result gets the memory order of one of its operands.

    y [N, C, H, W] = relu(x)    x in memory (N, H, W, C)   ->   y in memory (N, H, W, C)

Before: inputs, tensors with a declared layout and communicated tensors have a memory order.

After: every other tensor has the memory order of an operand, without gaps. It is stored as the
tensor's allocation domain: its axes in the order in which memory is laid out. The domain stays
empty if this is the order of the axes that the user sees. The order is a hint: no op relies on it,
and declared layouts stay. An output that is a view of an input has the strides of that view, gaps
included.

- An op follows the operand with most axes in memory, or the first such operand. Other operands only
  order axes that this operand lacks.
- Views keep an order as far as possible. A reshape has no order if it merges axes that are not
  adjacent in memory.
- Library ops write row-major results, except ops that name the operand to follow (attention).
- Ops without tensor operands (such as `full`), and axes of stride 0, have no order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from fuser.ir.axis_graph import tensor_operands
from fuser.ir.domain.axis_path import transforms_between
from fuser.ir.domain.tensor_domain import Transform, contiguity_for
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.memory_layout import (
    copy_memory_order,
    declared_order,
    is_stored,
    known_strides,
    memory_order,
    set_memory_order,
)
from fuser.ir.ops.nodes import LibraryOp
from fuser.passes.view_ops import (
    VIEW_OPS,
    Strides,
    contiguity_of,
    view_strides,
    views_of_inputs,
)

Order = tuple[int, ...]
"""Positions (reductions not counted) of the axes that memory holds, outermost first."""


def infer_layouts(
    fusion: Fusion,
    *,
    repeated: Collection[int] = (),
    fixed: Collection[TensorView] = (),
    is_part: Callable[[TensorOp], bool] = lambda op: False,
) -> None:
    """Sets the memory orders of the tensors of `fusion`, in place: a result gets the order of one
    of its operands.

    - `repeated` has the numbers (ids) of the input axes that have stride 0 for the current inputs,
      so that memory holds one element along them.
    - `fixed` tensors keep their declared order.
    - `is_part` returns whether an op's result lies in the memory of its operand. Such a result has
      the memory order of the operand.
    """
    updated = {alias.out: alias.into for alias in fusion.aliases}
    follows = {v for op in fusion.exprs for v in op.outputs if _followed_operand(op, v)}
    kept = {*fixed, *(_read_by_library_ops(fusion, is_part) - follows)}
    rows_read = _read_by_rows(fusion)
    orders = {v: _given(v, repeated) for v in fusion.inputs if isinstance(v, TensorView)}
    strides = {v: known_strides(v, v.shape()) for v in orders if declared_order(v) is not None}
    shown, results = views_of_inputs(fusion), set(fusion.outputs)
    for op in fusion.exprs:
        view = _viewed(op, strides) if op.out_tensor in shown else None
        if view is not None:
            strides[op.out_tensor] = view
        for out in op.outputs:
            if out.domain.allocation and out not in fixed:
                orders[out] = _given(out)
                if out in shown and out in results:
                    # A result has no gaps unless the user declared them.
                    flags = contiguity_for(out.domain.maybe_allocation)
                    out.domain = out.domain.having(contiguity=flags)
                continue
            # A kernel that updates an input writes in the memory order of the input.
            into = None if isinstance(op, LibraryOp) else updated.get(out)
            orders[out] = _followed(op, out, orders) if into is None else _given(into)
            if is_part(op) and out not in fixed:
                copy_memory_order(op.inputs[0], out)  # pyright: ignore[reportArgumentType]
            elif out not in kept and not (out in rows_read and _ends_elsewhere(out, orders[out])):
                _lay(out, orders[out], view if out in results else None)


def _read_by_library_ops(fusion: Fusion, is_part: Callable[[TensorOp], bool]) -> set[TensorView]:
    """Returns the tensors that library ops read as batches of matrices, directly or through views.
    Their memory order must not be changed.

    In another order, a batch axis could be inside of a matrix in memory, and torch would copy the
    tensor. Outputs of the fusion are not in the result. `is_part` returns whether an op's result
    lies in the memory of its operand, as that of a view.
    """
    found: set[TensorView] = set()
    for op in reversed(fusion.exprs):
        is_view = (isinstance(op, VIEW_OPS) or is_part(op)) and not found.isdisjoint(op.outputs)
        if is_view or (isinstance(op, LibraryOp) and not op.TAKES_ANY_BATCHES):
            found.update(v for _, v in tensor_operands(op) if v.ndim > 2)
    return found.difference(v for v in fusion.outputs if isinstance(v, TensorView))


def _followed_operand(op: TensorOp, out: TensorView) -> TensorView | None:
    """Returns the operand in whose memory order torch writes the result `out` of the library op
    `op`.

    Returns None if torch does not execute `op`, or if the result is row-major.
    """
    return op.followed_by(out) if isinstance(op, LibraryOp) else None


def _read_by_rows(fusion: Fusion) -> set[TensorView]:
    """Returns the operands of library ops that accept matrices of a batch at any distance in
    memory.

    In these operands, only the rows of a matrix must be contiguous. If the last axis is not the
    innermost axis in memory, torch copies the operand.
    """
    ops = (op for op in fusion.exprs if isinstance(op, LibraryOp) and op.TAKES_ANY_BATCHES)
    return {v for op in ops for _, v in tensor_operands(op)}


def _ends_elsewhere(tv: TensorView, order: Order) -> bool:
    """Returns whether the innermost axis of a tensor in memory is not its last axis.

    `order` has the positions of the axes in memory, outermost first, without axes that are not
    stored.
    """
    return bool(order) and order[-1] != max(order)


def _given(tv: TensorView, repeated: Collection[int] = ()) -> Order:
    """Returns the declared memory order of a tensor: the positions of its axes, outermost first,
    without axes of stride 0.

    `repeated` has the numbers (ids) of axes that have stride 0 for the current inputs. Returns ()
    if nothing is declared.
    """
    axes = tv.domain.no_reductions
    order = declared_order(tv) or ()
    return tuple(p for p in order if is_stored(axes[p]) and axes[p].number not in repeated)


def _followed(op: TensorOp, out: TensorView, orders: Mapping[TensorView, Order]) -> Order:
    """Returns the memory order that the result `out` of `op` takes from its operands: the positions
    of its axes, outermost first. Returns () if no operand has an order.

    `orders` has the orders of the operands.
    """
    stored = [p for p, a in enumerate(out.domain.no_reductions) if is_stored(a)]
    if isinstance(op, LibraryOp):
        followed = _followed_operand(op, out)
        order = () if followed is None else orders[followed]
        is_followed = bool(order) and not _ends_elsewhere(out, order)
        return _joined([order], stored) if is_followed else tuple(stored)
    found = [_carried(op, index, orders[v], out) for index, v in tensor_operands(op)]
    if None in found:
        return tuple(stored)
    known = [order for order in found if order]
    return _joined(sorted(known, key=len, reverse=True), stored) if known else ()


def _carried(op: TensorOp, index: int, order: Order, out: TensorView) -> Order | None:
    """Translates the memory order of operand number `index` of `op` to the axes of the result
    `out`: returns the positions of these axes, outermost first.

    Axes that the result lacks are omitted. Returns None if the operand's order does not determine
    the order of the result's axes.
    """
    domain = out.domain
    pairs = zip(domain.maybe_root, op.axis_map(index), strict=True)
    root_of = {source: root.number for root, source in pairs if source is not None}
    numbers: list[int] | None = [root_of[p] for p in order if p in root_of]
    for t in transforms_between(domain, domain.maybe_root, domain.logical):
        numbers = _through(t, numbers)
        if numbers is None:
            return None
    axes = enumerate(domain.no_reductions)
    places = {a.number: p for p, a in axes if is_stored(a)}
    return tuple(places[n] for n in numbers if n in places)


def _through(t: Transform, order: list[int]) -> list[int] | None:
    """Returns the memory order of a tensor's axes after a split, merge or similar transform `t`,
    from the order before.

    Orders are lists of axis numbers (ids), outermost first. Returns None if the transform merges
    axes that are not adjacent in memory.
    """
    found = [n for n in t.inputs if n in order]
    if not found:
        return order
    at = order.index(found[0])
    if order[at : at + len(found)] != found:
        return None
    return [*order[:at], *t.outputs, *order[at + len(found) :]]


def _joined(orders: Sequence[Order], positions: Sequence[int]) -> Order:
    """Sorts axis positions into a memory order, outermost first.

    The order of each two axes is that in the first of `orders` which has both. Two axes that are
    together in none of `orders` keep the order of `positions`. This is the insertion sort by which
    torch orders the axes of a result, starting with the innermost axis.
    """
    found = list(reversed(positions))
    for end in range(1, len(found)):
        at = end
        for k in reversed(range(end)):
            inner, outer = found[k], found[at]
            says = next((o for o in orders if inner in o and outer in o), None)
            if says is None:
                continue
            if says.index(outer) < says.index(inner):
                break
            found[k], found[at] = outer, inner
            at = k
    return tuple(reversed(found))


def _viewed(op: TensorOp, strides: Mapping[TensorView, Strides]) -> Strides | None:
    """Returns the strides of an op's result if the op is a view (shares the memory of its operand).

    Returns None if it is no view, or if `strides` does not have its operand's strides.
    """
    known = strides.get(op.inputs[0])  # pyright: ignore[reportArgumentType, reportCallIssue]
    return None if known is None else view_strides(op, known, TensorView.shape)


def _lay(tv: TensorView, order: Order, view: Strides | None) -> None:
    """Declares the memory order of a tensor, unless it is the order of the tensor's axes.

    `order` has the positions of the stored axes, outermost first. If the tensor is a view, `view`
    has its strides, and gaps between these are declared, too.
    """
    if list(order) != sorted(order):
        set_memory_order(tv, _joined([order], range(tv.ndim)))
    if view is not None:
        places = [p for p, _ in memory_order(tv)]
        flags = contiguity_of(tv, view, places, tv.shape())
        tv.domain = tv.domain.having(contiguity=flags)
