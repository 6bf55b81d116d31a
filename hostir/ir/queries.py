"""Questions about a whole host program that several rooms ask; ops and values answer them."""

from __future__ import annotations

from collections.abc import Iterator

from fuser.ir import binding
from fuser.ir.op import Op, walk
from fuser.ir.scalar.constructors import Scalar, Symbol, symbols
from hostir.ir.effects import ClosesGroup, Effect, Enters, Reads, Shows, Starts, Writes
from hostir.ir.ops import HostOp
from hostir.ir.program import HostIrContainer


def has_streams(program: HostIrContainer) -> bool:
    """Whether there is anything that the structural rules of `hostir.verify` do not decide."""
    host_ops = [op for op in program.ops if isinstance(op, HostOp)]
    return any(op.regions or any(map(_is_undecided, op.effects())) for op in host_ops)


def _is_undecided(effect: Effect) -> bool:
    is_part = isinstance(effect, Shows) and effect.part is not None
    return is_part or isinstance(effect, Enters | Starts | ClosesGroup)


def has_communications(program: HostIrContainer) -> bool:
    """Whether ranks meet in some op."""
    return any(isinstance(op, HostOp) and op.ranks_meet for op in walk(program.ops))


def only_allocates(program: HostIrContainer) -> bool:
    """Whether a program takes nothing and computes nothing: its outputs are like `torch.empty`."""
    return not program.inputs and not any(map(_touches, walk(program.ops)))


def _touches(op: Op) -> bool:
    """Whether an op reads or writes what buffers hold."""
    return not isinstance(op, HostOp) or any(isinstance(e, Reads | Writes) for e in op.effects())


def computations(program: HostIrContainer) -> Iterator[Op]:
    """Yields the ops, then those of kernels and units."""
    yield from walk(program.ops)
    for fusion in (*(g.fusion for g in program.groups.values()), *program.units.values()):
        yield from fusion.exprs


def free_inputs(program: HostIrContainer) -> frozenset[int]:
    """Returns the positions of scalar inputs that decide nothing about structure."""
    kernels = (tv for group in program.groups.values() for tv in group.fusion.tensors())
    free = binding.free_inputs(program.values, (*program.tensors(), *kernels))
    deciding = control_symbols(program)
    return frozenset(i for i in free if program.inputs[i] not in deciding)


def control_symbols(program: HostIrContainer) -> frozenset[Symbol]:
    """Returns the control symbols: those that decide which ops run, how often and on what."""
    scalars = (
        x
        for op in walk(program.ops)
        if isinstance(op, HostOp) and op.HAS_CONTROL_SCALARS
        for x in (*op.inputs, *op.scalars)
        if isinstance(x, Scalar)
    )
    return frozenset(s for x in scalars for s in symbols(x))
