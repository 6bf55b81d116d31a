"""Defines the pass that frees every buffer of a host program after its last use, and the function
that runs all passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fuser.ir.fusion import TensorView
from fuser.ir.op import Op, walk
from fuser.support.errors import VerifyError
from hostir.ir.buffer_aliasing import Storage
from hostir.ir.effects import (
    ClosesGroup,
    Enters,
    Joins,
    Makes,
    OpensGroup,
    Reads,
    Shows,
    Starts,
    Waits,
    Writes,
    effects_of,
)
from hostir.ir.ops import Deallocate
from hostir.ir.program import HostIrContainer
from hostir.ir.verifier import verify


def insert_deallocate(program: HostIrContainer) -> HostIrContainer:
    """Inserts a `Deallocate` op into a host program after the last use of every buffer.

    Holds before: the program has no `Deallocate`. Holds after: every tensor that does not share a
    buffer with a program input or output is deallocated exactly once. A view is deallocated before
    the buffer of which it is a view. `hostir.verify` checks that buffers are freed, and a run may
    use freed memory for other buffers.

        T2 = ALLOCATE(..); LaunchKernel(.. T2); T3 = matmul(T2, T1)
        -> ... T3 = matmul(T2, T1); Deallocate { T2 }
    """
    if any(isinstance(op, Deallocate) for op in walk(program.ops)):
        raise VerifyError(
            "insert_deallocate: the program already has a Deallocate, expected a program without "
            "any, because the pass adds all of them"
        )
    storage = Storage.of(program)
    last = _last_uses(program, storage)
    ending: dict[tuple[int, ...], list[TensorView]] = {}
    for tv in reversed(storage.tensors):
        if tv in last and not storage.escapes(tv):
            ending.setdefault(last[tv], []).append(tv)
    return program.with_ops(_inserted(program.ops, (), ending))


# The path of an op: its position in the program, then (region, position) per level.
Path = tuple[int, ...]


def _inserted(
    ops: tuple[Op, ...], above: Path, ending: dict[Path, list[TensorView]]
) -> tuple[Op, ...]:
    """Returns the ops of one region (the program, a loop body or a branch) with the `Deallocate`
    ops that belong into the region.

    `ending` maps the path of an op to the tensors whose last use is this op. `above` is the path of
    the region's loop or branch and the number of the region; () for the program. A path is the
    position of an op: its index in the program, then (region, index) for each level of loops and
    branches inside.
    """
    made: list[Op] = []
    waiting: list[TensorView] = []
    for i, op in enumerate(ops):
        path = (*above, i)
        names = op.fields_of("region")
        regions = {
            name: _inserted(region, (*path, r), ending)
            for r, (name, region) in enumerate(zip(names, op.regions, strict=True))
        }
        made.append(op.replace(**regions) if regions else op)
        # A buffer that a loop over streams uses last is freed after the waits that follow the loop.
        waiting += ending.get(path, ())
        goes_on = (op.regions or _only_waits(op)) and any(map(_only_waits, ops[i + 1 : i + 2]))
        if waiting and not goes_on:
            made += map(Deallocate, waiting)
            waiting = []
    return tuple(made)


def _only_waits(op: Op) -> bool:
    """Whether `op`, with all ops inside a loop or branch, only changes the current stream or makes
    a stream wait. If such ops follow a loop, buffers that the loop uses last are freed after them,
    because the freeing stream must first wait for the loop's streams."""
    for inner in walk((op,)):
        effects = effects_of(inner, ())
        if not (effects or any(inner.regions)):
            return False
        if not all(isinstance(e, Enters | Joins) for e in effects):
            return False
    return True


def _last_uses(program: HostIrContainer, storage: Storage) -> dict[TensorView, Path]:
    """Returns, for each tensor, the path of the last op that uses the tensor's buffer. A path is
    the position of an op: its index in the program, then (region, index) for each loop or branch
    that it is in. If the uses are in different regions (loop bodies or branches), the path is that
    of the last loop or branch with a use, in the innermost region around all uses.

    A communication uses its buffers until its `Wait`.
    """
    uses: dict[TensorView, list[Path]] = {}
    in_flight: dict[int, list[TensorView]] = {}
    group: list[TensorView] | None = None
    for path, op in _places(program.ops, ()):
        touched: list[TensorView] = []
        for effect in effects_of(op, storage.buffered):
            match effect:
                case Reads(tv) | Writes(tv) | Makes(tv):
                    touched.append(tv)
                case Shows(out, source):
                    touched += [out, source]
                case OpensGroup():
                    group = []
                case Starts(number) if group is not None:
                    group += touched
                    in_flight.setdefault(number, []).extend(touched)
                case Starts(number):
                    in_flight.setdefault(number, []).extend(touched)
                case ClosesGroup(number):
                    in_flight.setdefault(number, []).extend(group or ())
                    group = None
                case Waits(number):
                    touched += in_flight.get(number, ())
                case _:
                    pass
        for tv in touched:
            # A view extends the lifetime of its buffer, but not that of other views of the buffer.
            shown: TensorView | None = tv
            while shown is not None:
                uses.setdefault(shown, []).append(path)
                shown = storage.shown_by(shown)
    return {tv: _end(paths) for tv, paths in uses.items()}


def _places(ops: tuple[Op, ...], above: Path) -> Iterator[tuple[Path, Op]]:
    for i, op in enumerate(ops):
        yield (*above, i), op
        for r, region in enumerate(op.regions):
            yield from _places(region, (*above, i, r))


def _end(paths: list[Path]) -> Path:
    """Returns the path of the last op in `paths`, shortened to the innermost region (loop body or
    branch) that contains all ops of `paths`. A path is the position of an op: its index in the
    program, then (region, index) for each loop or branch that it is in."""
    first, last = min(paths), max(paths)
    depth = 0
    # A level is a pair (op, region). In a loop, only ops of one region are ordered.
    while depth + 2 < min(map(len, paths)) and all(
        path[: depth + 2] == first[: depth + 2] for path in paths
    ):
        depth += 2
    return last[: depth + 1]


# ----------------------------------------------------------------------
# The passes of a host program, in order, with verification after each.

Pass = Callable[[HostIrContainer], HostIrContainer]

PASSES: tuple[Pass, ...] = (
    # This pass is last, because a later pass that moves or adds uses would move deallocations, too.
    insert_deallocate,
)


def run_passes(
    program: HostIrContainer,
    passes: tuple[Pass, ...] = PASSES,
    *,
    after_each: Callable[[str, HostIrContainer], None] | None = None,
) -> HostIrContainer:
    """Runs compiler passes over a host program, in order, and returns the result. The program is
    verified before the first pass and after each pass.

    `after_each` is called with the name and the result of each pass. If verification fails, the
    error names the pass.
    """
    verify(program, after="lowering")
    for one in passes:
        program = one(program)
        verify(program, after=one.__name__)
        if after_each is not None:
            after_each(one.__name__, program)
    return program
