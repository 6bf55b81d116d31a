"""Questions about a whole host program that several packages ask."""

from __future__ import annotations

from collections.abc import Iterator

from fuser.ir import binding
from fuser.ir.op import Op, walk
from fuser.ir.scalar.constructors import Scalar, Symbol, symbols
from hostir.ir.effects import ClosesGroup, Effect, Enters, Reads, Shows, Starts, Writes
from hostir.ir.ops import HostOp
from hostir.ir.program import HostIrContainer


def has_streams(program: HostIrContainer) -> bool:
    """Whether a program has regions, parts of tensors, streams or communications.

    `verify` alone does not decide whether such a program is correct.
    """
    host_ops = [op for op in program.ops if isinstance(op, HostOp)]
    return any(op.regions or any(map(_is_undecided, op.effects())) for op in host_ops)


def _is_undecided(effect: Effect) -> bool:
    is_part = isinstance(effect, Shows) and effect.part is not None
    return is_part or isinstance(effect, Enters | Starts | ClosesGroup)


def has_communications(program: HostIrContainer) -> bool:
    """Whether ranks synchronise in some op of the program."""
    return any(isinstance(op, HostOp) and op.ranks_meet for op in walk(program.ops))


def only_allocates(program: HostIrContainer) -> bool:
    """Whether a program has no inputs and computes nothing. The outputs of such a program are like
    `torch.empty`."""
    return not program.inputs and not any(map(_touches, walk(program.ops)))


def _touches(op: Op) -> bool:
    """Whether an op reads or writes the contents of buffers."""
    return not isinstance(op, HostOp) or any(isinstance(e, Reads | Writes) for e in op.effects())


def computations(program: HostIrContainer) -> Iterator[Op]:
    """Yields all ops of the program, then all ops of its kernels and host units."""
    yield from walk(program.ops)
    for fusion in (*(g.fusion for g in program.groups.values()), *program.units.values()):
        yield from fusion.exprs


def free_inputs(program: HostIrContainer) -> frozenset[int]:
    """Returns the positions of the scalar inputs on which neither a shape nor a control scalar
    depends."""
    kernels = (tv for group in program.groups.values() for tv in group.fusion.tensors())
    free = binding.free_inputs(program.values, (*program.tensors(), *kernels))
    deciding = control_symbols(program)
    return frozenset(i for i in free if program.inputs[i] not in deciding)


def control_symbols(program: HostIrContainer) -> frozenset[Symbol]:
    """Returns the symbols in control scalars: scalars that decide which ops run, how often, and on
    which parts of tensors."""
    scalars = (
        x
        for op in walk(program.ops)
        if isinstance(op, HostOp) and op.HAS_CONTROL_SCALARS
        for x in (*op.inputs, *op.scalars)
        if isinstance(x, Scalar)
    )
    return frozenset(s for x in scalars for s in symbols(x))
