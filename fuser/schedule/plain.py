"""The plain scheduler, the fallback: one op, which computes all its operands again for each
element.

No loops are shared between ops, so it need not be proved that axes of two ops are equal. Every op
that can be indexed can be computed. Each result has its own loops, in memory order (BIDx: CUDA
blocks, TIDx: threads, S: serial, r: reduced, `..`: one loop for each axis). `|` separates the loops
over results from those over the elements of one result:

    GPU pointwise  [BIDx, TIDx]              one thread per element
    GPU reduction  [BIDx rows | r S, r TIDx]  one block per row
    CPU            [S.. | r S..]             plain loops
"""

from __future__ import annotations

from collections.abc import Callable

from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.ops.nodes import LibraryOp
from fuser.ir.types import ParallelType
from fuser.ops.reference.meaning import REDUCING
from fuser.schedule.input_facts import Facts
from fuser.schedule.pointwise import table_rejection
from fuser.schedule.tiling import arrange, intermediates, parallelize
from fuser.support.device import DeviceInfo
from fuser.support.record import record

PT = ParallelType
THREADS = 128


@record
class PlainParams:
    """The parameters of a plain kernel, the fallback when no other scheduler accepts a fusion.

    `threads` is the number of threads of a CUDA block, or 0 for the serial loops of a CPU. `vector`
    is always 1.
    """

    threads: int = 0
    vector: int = 1

    def is_near(self, other: PlainParams) -> bool:
        """Returns whether a compiled kernel with the parameters `other` can replace one with
        `self`.

        Returns True only if `other` equals `self`.
        """
        return self == other

    is_alike = is_near

    def __str__(self) -> str:
        return f"plain(threads {self.threads})" if self.threads else "plain(loops)"


def accepts(fusion: Fusion) -> str | None:
    """Returns the reason why the plain scheduler, the fallback, rejects the fusion; None if the
    fusion is accepted.

    The scheduler accepts one op whose operands are computed by pointwise ops only. The pointwise
    ops are computed again for each element that the op reads.
    """
    if not fusion.exprs or not fusion.outputs:
        return "the fusion computes nothing"
    last = fusion.definition(fusion.outputs[0])
    for out in fusion.outputs:
        if fusion.definition(out) is not last:
            return f"{out} and {fusion.outputs[0]} are computed by different ops"
    for op in fusion.exprs:
        if isinstance(op, LibraryOp):
            return f"{op.name} of {op.outputs[0]} is computed by a library call"
        if isinstance(op, REDUCING) and op is not last:
            return f"{op.out_tensor} is a reduction that other ops read"
    if fusion.aliases:
        return "an output is written into an input"
    return table_rejection(fusion)


def generic(device: DeviceInfo) -> PlainParams:
    """Returns the parameters of the plain scheduler, which depend on nothing but the device."""
    return PlainParams() if device.kind == "cpu" else PlainParams(THREADS)


def chooser(fusion: Fusion, device: DeviceInfo) -> Callable[[Facts], PlainParams]:
    """Returns a function from sizes and alignments of the inputs to parameters of the plain
    scheduler.

    The function ignores its argument, because these parameters depend on the device alone.
    """
    del fusion
    params = generic(device)
    return lambda facts: params


def apply(fusion: Fusion, params: PlainParams) -> None:
    """Schedules the fusion in place: gives each result its own loops, and inlines all other
    tensors.

    An inlined tensor is computed again for each element that a result needs.
    """
    for out in fusion.outputs:
        _shape(out, params.threads)
    for tv in intermediates(fusion, ()):
        if isinstance(tv.definition(), REDUCING):
            _shape(tv, params.threads)  # an unused result of an op that has a used one
        tv.compute_at = len(tv.domain.loop)


def _shape(tv: TensorView, threads: int) -> None:
    """Builds the loops of one result: non-reduced axes in memory order, then reduced axes.

    `threads` is the number of threads of a CUDA block, or 0 for a CPU.
    """
    place = {a.number: k for k, a in enumerate(tv.domain.logical)}
    order = [place[a.number] for a in tv.domain.maybe_allocation if a.number in place]
    order += [k for k in place.values() if k not in order]
    logical = tv.domain.logical
    reduced = [k for k in order if logical[k].is_reduction()]
    rows = [k for k in order if k not in reduced]
    arrange(tv, [g for g in (rows, reduced) if g] if threads else [[k] for k in (*rows, *reduced)])
    if threads and order:
        tv.split(len(tv.domain.loop) - 1, threads)
        rest = [PT.serial] if reduced else []
        parallelize(tv, [*([PT.grid_x] if rows else []), *rest, PT.block_x])
