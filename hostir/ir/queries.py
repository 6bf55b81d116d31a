"""Answers questions about a whole host program, such as whether its ranks communicate. Several
packages call these functions."""

from __future__ import annotations

from collections.abc import Iterator

from fuser.ir import binding
from fuser.ir.op import Op, walk
from fuser.ir.scalar.constructors import Scalar, Symbol, symbols
from hostir.ir.effects import ClosesGroup, Effect, Enters, Reads, Shows, Starts, Writes
from hostir.ir.ops import HostOp
from hostir.ir.program import HostIrContainer


def has_streams(program: HostIrContainer) -> bool:
    """Whether a host program has loops, branches, parts of tensors, streams or communications.

    `verify` alone does not decide whether such a program is correct. The checks of
    `hostir.analysis` must also run, because they unroll loops.
    """
    host_ops = [op for op in program.ops if isinstance(op, HostOp)]
    return any(op.regions or any(map(_is_undecided, op.effects())) for op in host_ops)


def _is_undecided(effect: Effect) -> bool:
    is_part = isinstance(effect, Shows) and effect.part is not None
    return is_part or isinstance(effect, Enters | Starts | ClosesGroup)


def has_communications(program: HostIrContainer) -> bool:
    """Whether some op of the program makes ranks wait for each other, in a communication or a
    barrier."""
    return any(isinstance(op, HostOp) and op.ranks_meet for op in walk(program.ops))


def only_allocates(program: HostIrContainer) -> bool:
    """Whether a program has no inputs, and no op of the program reads or writes the contents of a
    buffer. The outputs of such a program are uninitialised, as with `torch.empty`."""
    return not program.inputs and not any(map(_touches, walk(program.ops)))


def _touches(op: Op) -> bool:
    """Whether an op itself reads or writes the contents of buffers. A loop or branch does not; the
    ops inside are asked separately.
    """
    return not isinstance(op, HostOp) or any(isinstance(e, Reads | Writes) for e in op.effects())


def computations(program: HostIrContainer) -> Iterator[Op]:
    """Yields all ops of the host program, then all ops of the fusions in its kernels and host
    units."""
    yield from walk(program.ops)
    for fusion in (*(g.fusion for g in program.groups.values()), *program.units.values()):
        yield from fusion.exprs


def free_inputs(program: HostIrContainer) -> frozenset[int]:
    """Returns the positions of the scalar inputs whose values affect neither a shape nor a control
    scalar. A control scalar decides which ops run, how often, and on which parts of tensors.

    The steps of a run are recorded, and later runs repeat them. A recording also serves runs in
    which only these inputs have other values, because the steps stay the same.
    """
    kernels = (tv for group in program.groups.values() for tv in group.fusion.tensors())
    free = binding.free_inputs(program.values, (*program.tensors(), *kernels))
    deciding = control_symbols(program)
    return frozenset(i for i in free if program.inputs[i] not in deciding)


def control_symbols(program: HostIrContainer) -> frozenset[Symbol]:
    """Returns the symbols in the control scalars of a program. Control scalars decide which ops
    run, how often, and on which parts of tensors. A loop bound is an example."""
    scalars = (
        x
        for op in walk(program.ops)
        if isinstance(op, HostOp) and op.HAS_CONTROL_SCALARS
        for x in (*op.inputs, *op.scalars)
        if isinstance(x, Scalar)
    )
    return frozenset(s for x in scalars for s in symbols(x))
