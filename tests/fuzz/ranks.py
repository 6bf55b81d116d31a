"""Runs a sharded program on several ranks, simulated or real, and compares every rank's shards."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from fuser import FusionDefinition, multidevice
from fuser.ir.types import ParallelType
from tests.fuzz.product import Mode, collecting
from tests.fuzz.program import Layout, Program, TensorArg, TensorInput
from tests.fuzz.runner import Case, Outcome, compare, define, failure, quietly
from tests.fuzz.sharded import mesh_sizes
from tests.fuzz.values import Val

Cuts = Sequence[tuple[int, str]]


# ------------------------------------------------------------------ shards
def coordinate(ranks: Sequence[object], rank: int, dim: str) -> int | None:
    """Return where a rank stands along a mesh dimension, None outside the mesh."""
    rows = [list(r) if isinstance(r, Sequence) else [r] for r in ranks]
    if not isinstance(ranks[0], Sequence):
        rows = [list(ranks)]
    for y, row in enumerate(rows):
        if rank in row:
            return row.index(rank) if dim == "x" else y
    return None


def shard_of(t: torch.Tensor, ranks: Sequence[object], cuts: Cuts, rank: int) -> torch.Tensor:
    """Return what `rank` holds of a tensor: outer blocks; block 0 outside the mesh."""
    sizes = mesh_sizes(ranks)
    for axis, dim in cuts:
        length = t.shape[axis] // sizes[dim]
        t = t.narrow(axis, length * (coordinate(ranks, rank, dim) or 0), length)
    return t


def _laid_out(part: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return a shard in the layout of the whole tensor, in memory of its own."""
    strides = layout.strides(tuple(part.shape))
    out = torch.empty_strided(part.shape, strides, dtype=part.dtype)
    base, source = out, part
    for axis in layout.expanded:
        base, source = base.narrow(axis, 0, 1), source.narrow(axis, 0, 1)
    base.copy_(source)
    return out


def local_inputs(case: Case, call: int, rank: int, device: str) -> list[Any]:
    """Return what a rank passes: its shards, in the declared layouts."""
    program = case.program
    notes = {a.name: a for a in program.annotations}
    out: list[Any] = []
    for declared, given, whole in zip(
        program.inputs, program.calls[call], case.passed(call, "cpu"), strict=True
    ):
        if not isinstance(given, TensorArg):
            out.append(whole)
            continue
        note = notes.get(declared.name)
        if note is not None and note.cuts:
            part = shard_of(whole, program.meshes[note.mesh], note.cuts, rank)
            assert isinstance(declared, TensorInput)
            whole = _laid_out(part, declared.layout)
        out.append(whole.to(device))
    return out


def output_cuts(
    fd: FusionDefinition, program: Program
) -> list[tuple[Sequence[object] | None, Cuts]]:
    """Return how each output is spread: as annotated, else as the product says."""
    shardings = fd.fec.get_output_shardings()
    notes = {a.name: a for a in program.annotations}
    out: list[tuple[Sequence[object] | None, Cuts]] = []
    for k, o in enumerate(program.outputs):
        if o.name in notes:
            note = notes[o.name]
            out.append((program.meshes[note.mesh], note.cuts))
        elif len(shardings) == len(program.outputs):
            found = shardings[k]
            rows = torch.tensor(found.mesh.devices).reshape(found.mesh.shape).tolist()
            types = {"x": ParallelType.mesh_x, "y": ParallelType.mesh_y}
            cuts = [(found.axis_sharded_on(p), d) for d, p in types.items()]
            out.append((rows, [c for c in cuts if c[0] >= 0]))
        else:
            out.append((None, ()))
    return out


# ------------------------------------------------------------------ one rank
def run_rank(case: Case, mode: Mode, fd: FusionDefinition, counts: list[int]) -> str | None:
    """Run all calls on this rank; return how a result differs."""
    rank = multidevice.Communicator.instance().rank()
    program = case.program
    for m in range(len(program.calls)):
        outs = fd.execute(local_inputs(case, m, rank, mode.device), _enable_options=mode.options)
        spread = output_cuts(fd, program)
        for o, out, (ranks, cuts) in zip(program.outputs, outs, spread, strict=True):
            if ranks is not None and coordinate(ranks, rank, "x") is None:
                continue
            value = case.expected[m][o.name]
            assert isinstance(value, Val)
            if ranks is not None:
                value = Val(
                    shard_of(value.ref, ranks, cuts, rank),
                    shard_of(value.bound, ranks, cuts, rank),
                    value.dtype,
                )
            counts[0] += 1
            counts[1] += value.bound.numel()
            counts[2] += int(value.bound.isinf().sum())
            difference = compare(out, value)
            if difference is not None:
                return f"call {m}, rank {rank}, {o.name}: {difference}"
    return None


def run_ranks(case: Case, mode: Mode, fd: FusionDefinition | None = None) -> Outcome:
    """Run on simulated ranks."""
    counts = [0, 0, 0]

    def body() -> Outcome:
        try:
            shared = fd or define(case.program)
            with multidevice.simulate(case.program.ranks) as world:
                found = world.run(run_rank, case, mode, shared, counts)
        except Exception as error:
            return failure(error)
        wrong = next((d for d in found if d is not None), None)
        if wrong is not None:
            return Outcome("wrong", "value" if "elements" in wrong else "shape", wrong)
        return Outcome("ok", outputs=counts[0], elements=counts[1], masked=counts[2])

    return quietly(body)


def collect_ranks(case: Case, mode: Mode) -> tuple[FusionDefinition | None, list[tuple[Any, bool]]]:
    """Lower a program for rank 0; return the definition and the kernels that it needs."""
    sources: list[tuple[Any, bool]] = []

    def rehearse(fd: FusionDefinition) -> None:
        rank = multidevice.Communicator.instance().rank()
        for m in range(len(case.program.calls)):
            fd.execute(local_inputs(case, m, rank, mode.device), _enable_options=mode.options)

    def body() -> Outcome:
        with multidevice.simulate(case.program.ranks) as world, collecting(sources):
            world.run(rehearse, fd)
        return Outcome("ok")

    try:
        fd = define(case.program)
    except Exception:
        return None, []
    with contextlib.suppress(Exception):
        quietly(body)
    return fd, sources
