"""Random fusions with stream axes, on one device and on meshes.

Programs are those of `tools.fuzz.sharded`. On one device their extents need not be divisible.
Streams are on some tensors: inputs, intermediates and results. The kinds are:

- whole axes and blocks, sometimes more blocks than elements;
- streams inside, around and between device cuts, rotated or not;
- steps made from device blocks;
- merged axes: two or three, in any order, one of them in blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from tools.fuzz.builder import Dim, Seed
from tools.fuzz.program import Annotation, Program, Stmt, Streaming
from tools.fuzz.sharded import Sharded
from tools.fuzz.shards import mesh_sizes

_RAGGED = (1, 2, 3, 4, 5, 6, 7, 8, 8, 12, 13)
_BLOCKS = (2, 2, 3, 4, 5, 9)
# The largest number of steps of a merged axis: runs with delayed streams repeat them many times.
_STEPS = 100


def generate(seed: Seed) -> Program:
    """Returns the program of a seed, or the next one of a source of random numbers."""
    return _Streams(seed).build()


class _Streams(Sharded):
    def __init__(self, seed: Seed) -> None:
        super().__init__(seed, "streams")
        self.has_mesh = self.chance(0.5)

    def dim(self) -> Dim:
        if self.has_mesh:
            return super().dim()
        n = 0 if self.chance(0.01) else None
        if self.symbolic and self.chance(0.6):
            return Dim(tuple(self.rng.choice(_RAGGED) for _ in range(self.ncalls)), False)
        return self.constant(self.rng.choice(_RAGGED) if n is None else n)

    # ------------------------------------------------------------ annotations
    def annotated(self, program: Program) -> Program:
        program = super().annotated(program) if self.has_mesh else program
        notes = tuple(self.nested(program, note) for note in program.annotations)
        program = replace(program, annotations=notes)
        ranks = program.ranks if program.annotations else 1
        streams = tuple(self.streams(program))
        return replace(program, ranks=ranks, streams=streams)

    def nested(self, program: Program, note: Annotation) -> Annotation:
        """Cuts one axis along all mesh dimensions, in any order, in some of the programs."""
        sizes = mesh_sizes(program.meshes[note.mesh])
        axes = {axis for axis, _ in note.cuts}
        if len(sizes) < 2 or len(axes) != 1 or not self.chance(0.5):
            return note
        (axis,) = axes
        if any(v % math.prod(sizes.values()) for v in self.dims[note.name][axis].vec):
            return note
        dims = self.rng.sample(list(sizes), len(sizes))
        return replace(note, cuts=tuple((axis, dim) for dim in dims))

    def streams(self, program: Program) -> Iterator[Streaming]:
        made_by = {n: s for s in program.stmts for n in s.outs}
        names = [*(i.name for i in program.inputs), *made_by]
        wanted = self.rng.choice((1, 1, 2, 2, 3, 4))
        taken = 0
        for name in self.rng.sample(names, len(names)):
            axes = [k for k in range(len(self.dims.get(name, ()))) if self.may_stream(name, k)]
            axes = [k for k in axes if _is_free(made_by.get(name), k, len(self.dims[name]))] or (
                axes if self.chance(0.1) else []
            )
            cut = {a for note in program.annotations if note.name == name for a, _ in note.cuts}
            shared = [k for k in axes if k in cut]
            views = ("slice", "reshape")
            is_view = name in made_by and made_by[name].op in views
            if len(axes) > 1 and self.chance(0.1 if is_view else 0.35):
                yield self.merging(name, axes, cut)
                taken += 1
            elif axes:
                some = shared if shared and self.chance(0.6) else axes
                yield self.streaming(program, name, self.rng.choice(some))
                taken += 1
            if taken == wanted:
                return

    def may_stream(self, name: str, axis: int) -> bool:
        dim = self.dims[name][axis]
        return not dim.is_broadcast and not dim.expanded

    def merging(self, name: str, axes: list[int], cut: set[int]) -> Streaming:
        """Draws the axes that a stream axis merges, and their blocks."""
        picks = self.rng.sample(axes, 3 if len(axes) > 2 and self.chance(0.3) else 2)
        shared = [k for k in picks if k in cut]
        if math.prod(max(self.dims[name][k].vec) for k in picks) > _STEPS:
            picks = picks[:2]
        # The remainder of a device axis has blocks of one element, and only one axis may have
        # blocks.
        picks = [k for k in picks if k not in shared[1:]]
        blocks: dict[int, int | None] = {}
        if not shared and self.chance(0.25):
            blocks[self.rng.choice(picks)] = self.rng.choice(_BLOCKS)
        if not shared and math.prod(max(self.dims[name][k].vec) for k in picks) > _STEPS:
            blocks = {picks[0]: 2}
        merged = tuple((k, blocks.get(k)) for k in picks)
        dims = [self.dims[name][k] for k in picks]
        count = None
        if not shared and not blocks and all(d.static for d in dims[:2]) and self.chance(0.4):
            (outer, inner) = (d.vec[0] for d in dims[:2])
            rows = [n for n in range(1, outer) if outer % n == 0]
            parts = [outer * n for n in range(1, inner + 1) if inner % n == 0]
            # Blocks that are boxes: whole rows, or parts of one row.
            count = self.rng.choice([*rows, *parts] or [None])
        return Streaming(name, picks[0], count, merged=merged)

    def streaming(self, program: Program, name: str, axis: int) -> Streaming:
        """Draws how an axis is streamed."""
        note = next((a for a in program.annotations if a.name == name), None)
        sizes = (
            mesh_sizes(program.meshes[0 if note is None else note.mesh]) if self.has_mesh else {}
        )
        here = [d for a, d in (() if note is None else note.cuts) if a == axis]
        count = None if self.chance(0.15 if here else 0.4) else self.rng.choice(_BLOCKS)
        if not here and sizes and self.chance(0.4):
            # One step for each device's block.
            dim = self.rng.choice(list(sizes))
            n = sizes[dim]
            if all(v % n == 0 for v in self.dims[name][axis].vec):
                return Streaming(name, axis, n, dim if self.chance(0.5) else None)
        devices = math.prod(sizes[d] for d in here)
        vec = self.dims[name][axis].vec
        fitting = [c for c in _BLOCKS if all(v % (c * devices) == 0 for v in vec)] if here else []
        around = 0
        if fitting and self.chance(0.6):
            around = self.rng.randint(0, len(here))
            count = self.rng.choice(fitting)
        swizzle = self.rng.choice(list(sizes)) if here and self.chance(0.25) else None
        return Streaming(name, axis, count, swizzle, around)


# Ops that cannot be computed in steps.
_WHOLE = ("scaled_mm", "grouped_mm", "sdpfa_fwd", "sdpfa_bwd")


def _is_free(stmt: Stmt | None, axis: int, rank: int) -> bool:
    """Whether blocks of an op's result along an axis need only blocks of its operands."""
    if stmt is None:
        return True
    if stmt.op in _WHOLE:
        return False
    if stmt.op == "cat":
        return axis != int(stmt.args[1])  # pyright: ignore[reportArgumentType]
    return not (stmt.op == "pad" and axis == rank - 1)
