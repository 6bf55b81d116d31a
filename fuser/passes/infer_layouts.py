"""Infer layouts: a result lies in memory in the order of the operand that it follows.

Before: inputs, what the user declared and what devices exchange have a memory order. After: every
tensor that follows an operand whose order is not that of its own axes has that order as its
allocation domain, without gaps. That is a hint: no op relies on it, and what is declared stays.

    y [N, C, H, W] = relu(x)    x in memory (N, H, W, C)   ->   y in memory (N, H, W, C)

An output that is a view of an input lies where that does, gaps included.

An op follows its operand with most axes in memory, of equals the first; others order only axes that
it lacks. Views carry an order along as far as it can be: a reshape that merges axes that are apart
in memory ends it. So do library ops, which write row-major results, but for those that say which
operand a result follows (attention). Factories and repeated axes have no order.
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
"""Positions (reductions left out) of the axes that have a place in memory, outermost first."""


def infer_layouts(
    fusion: Fusion,
    *,
    repeated: Collection[int] = (),
    fixed: Collection[TensorView] = (),
    is_part: Callable[[TensorOp], bool] = lambda op: False,
) -> None:
    """Gives the tensors of `fusion` their memory orders, in place.

    `repeated` are the axes of inputs, by number, of which memory holds one element for this input
    class. `fixed` are tensors that keep their order, which says nothing about what follows them.
    `is_part` tells the ops whose result names a part of their operand.
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
                    # A result has no gaps that nobody asked for.
                    flags = contiguity_for(out.domain.maybe_allocation)
                    out.domain = out.domain.having(contiguity=flags)
                continue
            # What a kernel writes into an input lies there as that does.
            into = None if isinstance(op, LibraryOp) else updated.get(out)
            orders[out] = _followed(op, out, orders) if into is None else _given(into)
            if is_part(op) and out not in fixed:
                copy_memory_order(op.inputs[0], out)  # pyright: ignore[reportArgumentType]
            elif out not in kept and not (out in rows_read and _ends_elsewhere(out, orders[out])):
                _lay(out, orders[out], view if out in results else None)


def _read_by_library_ops(fusion: Fusion, is_part: Callable[[TensorOp], bool]) -> set[TensorView]:
    """Returns the tensors that library ops read as batches of matrices, perhaps through views:
    torch would copy those whose batches lie inside of a matrix. Outputs are none of them."""
    found: set[TensorView] = set()
    for op in reversed(fusion.exprs):
        is_view = (isinstance(op, VIEW_OPS) or is_part(op)) and not found.isdisjoint(op.outputs)
        if is_view or (isinstance(op, LibraryOp) and not op.TAKES_ANY_BATCHES):
            found.update(v for _, v in tensor_operands(op) if v.ndim > 2)
    return found.difference(v for v in fusion.outputs if isinstance(v, TensorView))


def _followed_operand(op: TensorOp, out: TensorView) -> TensorView | None:
    """Returns the operand in whose memory order torch writes a result, if there is one."""
    return op.followed_by(out) if isinstance(op, LibraryOp) else None


def _read_by_rows(fusion: Fusion) -> set[TensorView]:
    """Returns the tensors that library ops read whose batches may lie anywhere: torch copies those
    whose last axis is not the innermost one."""
    ops = (op for op in fusion.exprs if isinstance(op, LibraryOp) and op.TAKES_ANY_BATCHES)
    return {v for op in ops for _, v in tensor_operands(op)}


def _ends_elsewhere(tv: TensorView, order: Order) -> bool:
    """Whether the innermost axis of an order is not the tensor's last one that memory holds."""
    return bool(order) and order[-1] != max(order)


def _given(tv: TensorView, repeated: Collection[int] = ()) -> Order:
    """Returns the order of a tensor that has one, () where its axes have none of their own."""
    axes = tv.domain.no_reductions
    order = declared_order(tv) or ()
    return tuple(p for p in order if is_stored(axes[p]) and axes[p].number not in repeated)


def _followed(op: TensorOp, out: TensorView, orders: Mapping[TensorView, Order]) -> Order:
    """Returns the order of a result whose order is ours to choose; () where no operand has one."""
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
    """Returns an operand's order in positions of the result, without the axes that end; None where
    the result's axes have none that follows from it."""
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
    """Returns an order of axes behind a transform; None where it merges axes that are apart."""
    found = [n for n in t.inputs if n in order]
    if not found:
        return order
    at = order.index(found[0])
    if order[at : at + len(found)] != found:
        return None
    return [*order[:at], *t.outputs, *order[at + len(found) :]]


def _joined(orders: Sequence[Order], positions: Sequence[int]) -> Order:
    """Returns `positions` in the order that the first of `orders` to have two of them says; where
    none has, as they are. Sorted as torch sorts the axes of a result: by insertion, from inside."""
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
    """Returns the strides of a view, None where it has none or those of its operand are unknown."""
    known = strides.get(op.inputs[0])  # pyright: ignore[reportArgumentType, reportCallIssue]
    return None if known is None else view_strides(op, known, TensorView.shape)


def _lay(tv: TensorView, order: Order, view: Strides | None) -> None:
    """Declares an order of the axes in memory where it is not that of the tensor, and the gaps of
    what is a view with these strides."""
    if list(order) != sorted(order):
        set_memory_order(tv, _joined([order], range(tv.ndim)))
    if view is not None:
        places = [p for p, _ in memory_order(tv)]
        flags = contiguity_of(tv, view, places, tv.shape())
        tv.domain = tv.domain.having(contiguity=flags)
