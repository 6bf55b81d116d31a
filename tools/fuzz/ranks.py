"""Runs a sharded program on several ranks, simulated or real, and compares every rank's
shards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fuser import FusionDefinition, multidevice
from fuser.ir.types import ParallelType
from multidevice.job.shard_tensor import shard_for_rank
from tools.fuzz.host_program import fault_of
from tools.fuzz.meaning import misread
from tools.fuzz.product import Mode, collecting
from tools.fuzz.program import Program
from tools.fuzz.runner import Case, Outcome, compare, define, failure, quietly
from tools.fuzz.shards import coordinate, local_input, shard_of, spread_of
from tools.fuzz.values import Val

Cuts = Sequence[tuple[int, str, int]]


# ------------------------------------------------------------------ shards
def local_inputs(case: Case, call: int, rank: int, device: str) -> list[Any]:
    """Returns the arguments of a rank: its shards."""
    program = case.program
    spreads = program.spreads()
    out: list[Any] = []
    for declared, whole in zip(program.inputs, case.passed(call, "cpu"), strict=True):
        ranks, cuts = spreads.get(declared.name, ((), ()))
        if not isinstance(whole, torch.Tensor):
            out.append(whole)
            continue
        if cuts:
            whole = local_input(whole, ranks, cuts, rank)
        out.append(whole.to(device))
    return out


_TYPES = {"x": ParallelType.mesh_x, "y": ParallelType.mesh_y}


Part = Callable[[torch.Tensor], torch.Tensor]


def output_parts(fd: FusionDefinition, program: Program, rank: int) -> list[Part | None]:
    """Returns for each output a function that cuts a rank's part: as annotated, or as the product
    reports.

    None for a rank that has no part.
    """
    if not program.streams:
        return [_part(*spread, rank) for spread in output_cuts(fd, program)]
    spreads = program.spreads()
    return [
        _part(*spreads[o.name], rank) if o.name in spreads else _as_told(tv, rank)
        for o, tv in zip(program.outputs, fd.fec.host_program().outputs, strict=True)
    ]


def _part(ranks: Sequence[object] | None, cuts: Cuts, rank: int) -> Part | None:
    if ranks is None:
        return lambda t: t
    if coordinate(ranks, rank, "x") is None:
        return None
    return partial(shard_of, ranks=ranks, cuts=cuts, rank=rank)


def _as_told(tv: Any, rank: int) -> Part | None:
    """Returns the function that cuts the part which the product reports for this rank."""
    if tv.mesh is None:
        return lambda t: t
    return partial(shard_for_rank, tv=tv, rank=rank) if tv.mesh.has(rank) else None


def output_cuts(
    fd: FusionDefinition, program: Program
) -> list[tuple[Sequence[object] | None, Cuts]]:
    """Returns (mesh, cuts) of each output: as annotated, or as the product reports."""
    shardings = fd.fec.get_output_shardings()
    spreads = program.spreads()
    out: list[tuple[Sequence[object] | None, Cuts]] = []
    for k, o in enumerate(program.outputs):
        if o.name in spreads:
            out.append(spreads[o.name])
        elif len(shardings) == len(program.outputs):
            out.append(spread_of(shardings[k], _TYPES))
        else:
            out.append((None, ()))
    return out


def kind_of(wrong: str) -> str:
    """Returns the kind of a difference, by which equal ones are grouped."""
    known = ("meaning", "elements", "text", "race")
    return next((k for k in known if k in wrong), "shape").replace("elements", "value")


# ------------------------------------------------------------------ one rank
def run_rank(case: Case, mode: Mode, fd: FusionDefinition, counts: list[int]) -> str | None:
    """Runs all calls on this rank; returns how a result differs.

    After a difference, this rank continues to make the calls, because the other ranks need it.
    """
    rank = multidevice.Communicator.instance().rank()
    wrong = None
    for number, (options, m) in enumerate(mode.runs(case.order)):
        inputs = local_inputs(case, m, rank, mode.device)
        outs = fd.execute(inputs, _enable_options=options)
        if wrong is not None:
            continue
        if number < len(case.program.calls):
            wrong = _fault(case, mode, m, fd, inputs)
        difference = wrong or _difference(case, m, fd, outs, counts)
        if difference is not None:
            wrong = f"call {m} {options}, rank {rank}: {difference}"
    return wrong


def _fault(
    case: Case, mode: Mode, call: int, fd: FusionDefinition, inputs: list[Any]
) -> str | None:
    """Returns what is wrong with the program of the last call."""
    rank = multidevice.Communicator.instance().rank()
    fault = fault_of(fd, inputs, rank) if case.program.streams else None
    if fault is None and rank == 0 and mode.device == "cpu":
        return _misread(case, call, fd)
    return fault


def _difference(
    case: Case, call: int, fd: FusionDefinition, outs: list[torch.Tensor], counts: list[int]
) -> str | None:
    """Returns how this rank's results of a call differ."""
    program = case.program
    parts = output_parts(fd, program, multidevice.Communicator.instance().rank())
    for o, out, part in zip(program.outputs, outs, parts, strict=True):
        if part is None:
            continue
        value = case.expected[call][o.name]
        assert isinstance(value, Val)
        value = Val(part(value.ref), part(value.bound), value.dtype)
        counts[0] += 1
        counts[1] += value.bound.numel()
        counts[2] += int(value.bound.isinf().sum())
        difference = compare(out, value)
        if difference is not None:
            return f"{o.name}: {difference}"
    return None


def _misread(case: Case, call: int, fd: FusionDefinition) -> str | None:
    program = case.program
    ranks = range(program.ranks)
    parts = [output_parts(fd, program, rank) for rank in ranks]
    results = [
        (o.name, None, value, [parts[rank][k] for rank in ranks])
        for k, o in enumerate(program.outputs)
        if isinstance(value := case.expected[call][o.name], Val)
    ]
    given = [local_inputs(case, call, rank, "cpu") for rank in ranks]
    return misread(fd, given, results, [i.name for i in program.inputs], compare)


def run_ranks(case: Case, mode: Mode, fd: FusionDefinition | None = None) -> Outcome:
    """Runs a program on simulated ranks."""
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
            return Outcome("wrong", kind_of(wrong), wrong)
        return Outcome("ok", outputs=counts[0], elements=counts[1], masked=counts[2])

    with mode.eager_graphs():
        return quietly(body)


def collect_ranks(case: Case, mode: Mode) -> tuple[FusionDefinition | None, list[tuple[Any, bool]]]:
    """Lowers a program for rank 0; returns the definition and the kernels that it needs."""
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
