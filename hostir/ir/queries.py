"""Questions about a whole host program that several rooms ask; ops and values answer them."""

from __future__ import annotations

from collections.abc import Iterator

from fuser.ir import binding
from fuser.ir.fusion import TensorOp
from fuser.ir.op import Op, walk
from fuser.ir.scalar.constructors import Scalar, Symbol, symbols
from hostir.ir.ops import (
    ForLoop,
    HirAliasSelect,
    HostOp,
    IfThenElse,
    LaunchKernel,
    PostOnStream,
    SetCurrentStream,
    ShardByStream,
    StartsCommunication,
    SymmetricContiguousView,
)
from hostir.ir.program import HostIrContainer


def has_streams(program: HostIrContainer) -> bool:
    """Whether there is anything that the structural rules of `hostir.verify` do not decide."""
    undecided = SetCurrentStream, ForLoop, IfThenElse, HirAliasSelect, ShardByStream
    return any(isinstance(op, (*undecided, StartsCommunication)) for op in program.ops)


def has_communications(program: HostIrContainer) -> bool:
    """Whether ranks meet in some op."""
    return any(
        isinstance(op, StartsCommunication)
        or (isinstance(op, SymmetricContiguousView) and op.team is not None)
        for op in walk(program.ops)
    )


def only_allocates(program: HostIrContainer) -> bool:
    """Whether a program takes nothing and computes nothing: its outputs are like `torch.empty`."""
    kinds = TensorOp | LaunchKernel | PostOnStream | StartsCommunication
    return not program.inputs and not any(isinstance(op, kinds) for op in walk(program.ops))


def computations(program: HostIrContainer) -> Iterator[Op]:
    """Yield the ops, then those of kernels and units."""
    yield from walk(program.ops)
    for fusion in (*(g.fusion for g in program.groups.values()), *program.units.values()):
        yield from fusion.exprs


def free_inputs(program: HostIrContainer) -> frozenset[int]:
    """Return the positions of scalar inputs that decide nothing about structure."""
    kernels = (tv for group in program.groups.values() for tv in group.fusion.tensors())
    free = binding.free_inputs(program.values, (*program.tensors(), *kernels))
    deciding = steering(program)
    return frozenset(i for i in free if program.inputs[i] not in deciding)


def steering(program: HostIrContainer) -> frozenset[Symbol]:
    """Return the symbols that decide which ops run, how often and on what."""
    scalars = (
        x
        for op in walk(program.ops)
        if isinstance(op, HostOp) and not isinstance(op, LaunchKernel | PostOnStream)
        for x in (*op.inputs, *op.scalars)
        if isinstance(x, Scalar)
    )
    return frozenset(s for x in scalars for s in symbols(x))
