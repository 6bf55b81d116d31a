"""Provenance: records why each tensor is divided over devices, and which op causes each
communication.

The module changes no program. Its functions read the fusion after each pass and write `Origin`
records (`Fusion.origins`), which `python -m hostir why` prints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from fuser.ir.axis_graph import tensor_operands
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.ops.nodes import ReductionOp, Reshard
from fuser.ir.provenance import How, Origin
from fuser.ir.types import ParallelType
from fuser.passes.view_ops import is_copy
from multidevice.sharding.placement import axis_cuts
from multidevice.sharding.propagation import Fact
from multidevice.sharding.queries import is_summed_in_parts, partial_sum_axes


def record_propagation(fusion: Fusion, facts: Mapping[TensorView, tuple[Fact, ...]]) -> None:
    """Records for each tensor why its axes are divided; for an undivided tensor, why it has its
    mesh.

    Called after propagation; `facts` has the reasons that propagation has found. A tensor without a
    fact was annotated by the user, or has the only mesh of the fusion.
    """
    rows: list[Origin] = []
    for tv in fusion.tensors():
        cuts_of = axis_cuts(tv)
        if not any(_dimension(tv, number) is not None for number in cuts_of):
            rows += _mesh_rows(tv, facts.get(tv, ()))
        found = {(f.axis, f.cut.ptype): f for f in facts.get(tv, ()) if f.cut is not None}
        for number, cuts in cuts_of.items():
            for cut in cuts:
                row = Origin(
                    tv.number,
                    "cut",
                    "user",
                    where=tv.cut_lines.get(cut.ptype, tv.where),
                    ptype=cut.ptype,
                    axis=_dimension(tv, number),
                )
                fact = found.get((number, cut.ptype))
                rows.append(row if fact is None else _through(row, tv, fact))
    fusion.origins = tuple(rows)


def _mesh_rows(tv: TensorView, facts: tuple[Fact, ...]) -> Iterator[Origin]:
    if tv.mesh is None:
        return
    row = Origin(tv.number, "mesh", "user", where=tv.where)
    fact = next((f for f in facts if f.cut is None), None)
    if fact is not None:
        yield _through(row, tv, fact)
    elif tv.mesh_is_user_set:
        yield row
    else:
        yield Origin(tv.number, "mesh", "only")


def _through(row: Origin, tv: TensorView, fact: Fact) -> Origin:
    """Adds to the record `row` from which tensor, and through which op, propagation reached `tv`.

    The record says why `tv` has its mesh or one of its divisions over devices. `fact` is the reason
    that propagation has recorded: the source tensor and the direction.
    """
    how: How = fact.direction
    op = tv.definition() if how == "forward" else fact.source.definition()
    if op is not None and how == "backward" and tv in op.outputs:
        how = "beside"
    name, where = ("", "") if op is None else (op.name, op.where)
    source = fact.source.number
    return replace(row, how=how, source=source, op=name, where=where)


def _dimension(tv: TensorView, number: int) -> int | None:
    """Returns the position of the logical axis with the number `number`, not counting reduction
    axes.

    Returns None for a reduction axis.
    """
    kept = [a.number for a in tv.domain.no_reductions]
    return kept.index(number) if number in kept else None


# ------------------------------------------------------------------ changes of placement
def record_parts(op: TensorOp, source: TensorView, total: ReductionOp, how: How) -> None:
    """Records that `total` combines, along each mesh dimension, parts of a result of `op`.

    Called when decomposition replaces `op` by ops that each device computes with its part of the
    operand `source`.
    """
    fusion, out = total.out.fusion, total.out
    rows = [
        Origin(out.number, "cut", how, source.number, op.name, op.where, axis.ptype)
        for axis in out.domain.logical
        if axis.is_reduction()
    ]
    fusion.origins = (*fusion.origins, *rows)


def record_reshardings(fusion: Fusion) -> None:
    """Records the reason for every `Reshard` op (a change of the division over devices).

    Called right after decomposition, which inserts these ops. Every tensor that was on a mesh
    before decomposition already has a record (`Origin`): the reason for its placement. A tensor
    without a record is therefore one that decomposition made.
    """
    known = {o.tensor for o in fusion.origins}
    sums: _Sums = {}
    for place, row in enumerate(fusion.origins):
        if row.what == "cut" and row.axis is None and row.source is not None:
            sums.setdefault((row.source, row.op), {})[place] = row
    told = {o.tensor for o in fusion.origins if o.what == "cut" and o.axis is None}
    known_sums = {
        (row.tensor, row.ptype): row
        for row in fusion.origins
        if row.what == "cut" and row.axis is None
    }
    rows: list[Origin] = []
    for op in fusion.exprs:
        if not isinstance(op, Reshard):
            continue
        total = _known_sum(op, known_sums)
        if total is not None:
            rows += _of_known_sum(op, total)
        else:
            rows.append(_reason(fusion, op, known))
            if op.reduction is not None and op.out.number not in told:
                rows += _summed(op, sums)
    fusion.origins = (*fusion.origins, *rows)


# The records of summed axes by (number of the source, name of the op); each by its place among all
# records.
_Sums = dict[tuple[int, str], dict[int, Origin]]


def _summed(op: Reshard, sums: _Sums) -> Iterator[Origin]:
    """Yields records (`Origin`) about the summed axis of the communication `op`: why it is divided.

    `sums` has the records of all summed axes. Yields nothing unless decomposition has split an op
    of the user into partial sums and `op`.
    """
    maker = _behind(op)
    if maker is None:
        return
    rows: dict[int, Origin] = {}
    for _, tv in tensor_operands(maker):
        rows |= sums.get((tv.number, maker.name), {})
    for place in sorted(rows):
        if rows[place].ptype in op.ptypes:
            yield replace(rows[place], tensor=op.out.number)


def _known_sum(
    op: Reshard, sums: Mapping[tuple[int, ParallelType | None], Origin]
) -> Origin | None:
    """Returns the record of the sum of which the communication `op` computes a part, or None.

    A record names the user's op and line. Several communications in sequence may compute one sum;
    the first of the following results that has a record decides. `sums` has the records of summed
    axes, by tensor and mesh dimension.
    """
    at: TensorOp | None = None if op.reduction is None else op
    while isinstance(at, Reshard):
        if (row := sums.get((at.out.number, op.ptypes[0]))) is not None:
            return row
        at = next(iter(at.out.uses()), None)
    return None


def _of_known_sum(op: Reshard, total: Origin) -> Iterator[Origin]:
    """Yields the records about the communication `op`, which adds to the sum of record `total`."""
    yield Origin(op.out.number, "placement", "sum", op.inp.number, total.op, total.where)
    if op.out.number != total.tensor:
        yield replace(total, tensor=op.out.number)


def _reason(fusion: Fusion, op: Reshard, known: set[int]) -> Origin:
    out, source = op.out, op.inp.number
    maker = _behind(op)
    if op.reduction is not None:
        return _placement(out, "sum", source, maker)
    if out.number not in known:
        update = next((a for a in fusion.aliases if a.out is out), None)
        if update is not None:
            return Origin(out.number, "placement", "update", update.into.number)
        reader = _reader(op)
        if reader is None:  # one of several reshards before an output
            return _placement(out, "result", source, maker)
        row = _placement(out, "operand", source, reader)
        return replace(row, result=reader.out_tensor.number)
    if op.inp.number in known:
        return Origin(out.number, "placement", "set", source, "set", op.where)
    return _placement(out, "result", source, maker)


def _placement(out: TensorView, how: How, source: int, op: TensorOp | None) -> Origin:
    if op is None:
        return Origin(out.number, "placement", how, source)
    return Origin(out.number, "placement", how, source, op.name, op.where)


def _behind(op: TensorOp) -> TensorOp | None:
    """Returns the op that computes the operand of `op`, skipping `Reshard` ops between the two.

    A `Reshard` op only changes how a tensor is divided over devices. Linear ops on partial sums are
    skipped, too; the result is then the op that computes the first of the partial sums.
    """
    definition = op.inputs[0].definition()
    while definition is not None and (isinstance(definition, Reshard) or _is_deferred(definition)):
        ((_, operand), *_) = tensor_operands(definition)
        definition = operand.definition()
    return definition


def _is_deferred(op: TensorOp) -> bool:
    """Returns whether `op` computes partial sums from others."""
    out = op.out_tensor
    return op.is_linear and bool(partial_sum_axes(out)) and not is_summed_in_parts(out)


def _reader(op: TensorOp) -> TensorOp | None:
    """Returns the first op that reads the result of `op`, skipping `Reshard` ops between the two.

    A `Reshard` op only changes how a tensor is divided over devices. Returns None if no op reads
    it.
    """
    reader = next(iter(op.out_tensor.uses()), None)
    while isinstance(reader, Reshard):
        reader = next(iter(reader.out.uses()), None)
    return reader


def complete_origins(fusion: Fusion) -> None:
    """Records the reason for the placement of each tensor that has no record (`Origin`) yet.

    Decomposition or later passes have made these tensors for a communication.
    """
    placed = {o.tensor: o for o in fusion.origins if o.what == "placement"}
    known = {o.tensor for o in fusion.origins}
    rows: list[Origin] = []
    for op in fusion.exprs:
        for out in op.outputs:
            if out.mesh is None or (out.number in known and not isinstance(op, Reshard)):
                continue
            if isinstance(op, Reshard):
                rows += _moved(out, placed)
            else:
                rows.append(_local(op, out))
    fusion.origins = (*fusion.origins, *rows)


def _moved(out: TensorView, placed: Mapping[int, Origin]) -> Iterator[Origin]:
    """Yields a record (`Origin`) of the placement of `out`, the result of a communication. Yields
    nothing if `out` already has a record.

    `placed` has the known records by tensor number. A pass may have inserted a copy after the
    communication, to change the memory order. The result of this copy then has the record, and the
    reason is copied from it.
    """
    if out.number in placed:
        return
    for use in out.uses():
        reason = placed.get(use.out_tensor.number)
        if reason is not None and is_copy(use):
            yield replace(reason, tensor=out.number)
            return


def _local(op: TensorOp, out: TensorView) -> Origin:
    uses = [u for v in out.uses() for u in (v.out_tensor.uses() if is_copy(v) else (v,))]
    sums = [u for u in uses if isinstance(u, Reshard) and u.reduction is not None]
    if sums:
        return Origin(out.number, "placement", "parts", sums[0].out.number, op.name, op.where)
    source = next((tv.number for _, tv in tensor_operands(op)), None)
    return Origin(out.number, "placement", "local", source, op.name, op.where)
