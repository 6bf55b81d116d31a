"""The passes of a host program, in order, with verification after each."""

from __future__ import annotations

from collections.abc import Callable

from hostir.ir.program import HostIrContainer
from hostir.ir.verifier import verify
from hostir.passes.deallocation import insert_deallocate

Pass = Callable[[HostIrContainer], HostIrContainer]

PASSES: tuple[Pass, ...] = (
    # Last: a pass that moves or adds uses would have to move the deallocations, too.
    insert_deallocate,
)


def run_passes(
    program: HostIrContainer,
    passes: tuple[Pass, ...] = PASSES,
    *,
    after_each: Callable[[str, HostIrContainer], None] | None = None,
) -> HostIrContainer:
    """Run passes in order and verify before the first and after each; the error names the pass."""
    verify(program, after="lowering")
    for one in passes:
        program = one(program)
        verify(program, after=one.__name__)
        if after_each is not None:
            after_each(one.__name__, program)
    return program
