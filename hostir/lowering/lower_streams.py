"""Loops over streams for the ops of a program by hand."""

from __future__ import annotations

from fuser.ir.fusion import TensorOp
from fuser.ir.naming import axis_words, in_ir
from fuser.ir.tensor import TensorView
from fuser.support.errors import UnsupportedError, user_code
from hostir.ir.program import HostIrContainer
from hostir.lowering.input_class import InputClass, symbol_values
from hostir.lowering.params import STANDALONE, LowerParams
from hostir.lowering.pipeline import build_program
from multidevice.sharding.placement import cut_line


def lower_streams(
    program: HostIrContainer, *, params: LowerParams = STANDALONE, backend_name: str = "NCCL"
) -> HostIrContainer:
    """Return the program that computes in steps what stands on stream axes, and communicates.

    Holds before: tensor ops alone, with the meshes and parallel types that they are to have.
    Holds after: what `MultiDeviceExecutor` makes of the same ops; `HostIrEvaluator` runs it.

        T1[istreamIdx2{i0}, iS3{i1}] = Set( T0[iS0{i0}, iS1{i1}] )
        -> T1 = ALLOCATE(..); S0 = GetCurrentStream(); FOR i ..: waits; FOR i ..: T3 = Set( T2 )

    Raises `UnsupportedError` for another op (write its loops, or let this pass make all), for a
    stream axis that a split or a merge made, and for what cannot be computed in steps.
    """
    ops: list[TensorOp] = []
    for op in program.ops:
        if not isinstance(op, TensorOp):
            raise UnsupportedError(
                f"lower_streams: {op.name} stands in the program{user_code(op.where)}: this pass "
                "makes the allocations, streams and loops of tensor ops alone"
            )
        ops.append(op)
    for tv in program.tensors():
        check_stream(tv)
    values, exprs = program.values, program.values.exprs
    values.exprs = ops
    try:
        fusion, _ = values.copy()
    finally:
        values.exprs = exprs
    sizes = {s: v for s, v in symbol_values(program, {}).items() if isinstance(v, int)}
    found = InputClass.as_declared(fusion, sizes)
    return build_program(fusion, found, backend_name=backend_name, params=params).program


def check_stream(tv: TensorView) -> None:
    """Raise `UnsupportedError` for a stream axis that is no logical axis of its tensor."""
    for axis in tv.domain.loop:
        if axis.is_stream and axis.number not in tv.domain.logical_numbers:
            raise UnsupportedError(
                f"Cannot stream parallelize on a split/merge axis: {axis_words(tv, axis)}; "
                "FusionDefinition.execute takes the outer part of an outer_split, and a merge"
                f"{user_code(cut_line(tv, axis.ptype))}{in_ir(axis, tv)}"
            )
