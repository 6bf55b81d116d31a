"""The horizontal scheduler: pointwise kernels beside one another as one kernel.

Outputs that do not iterate the same axes cannot share loops, but they can share a launch, which
takes as long as the work of a small kernel. Every set of outputs with the same axes is a part: a
fusion of its own, scheduled as a pointwise kernel. The grid has the blocks of all parts:

    GPU  [BIDx: blocks of part 0 | of part 1 | ..]

A part that reads what another computes on the way computes it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import zip_longest
from typing import Any

from fuser.ir.axis_graph import AxisGraph
from fuser.ir.fusion import Alias, Fusion, TensorOp, TensorView
from fuser.passes.segment import extract
from fuser.schedule import pointwise
from fuser.schedule.input_facts import Facts
from fuser.schedule.pointwise import PointwiseParams
from fuser.support.device import DeviceInfo
from fuser.support.record import record

MAX_PARTS = 8
# Up to so many bytes of inputs a launch is worth saving. Measured on an H200, queries and keys of
# RoPE in bfloat16: of 1 MiB together 3.1 us, apart 4.9; of 48 MiB 24.1 and 26.8; of 128 MiB 61.8
# and 64.1; of 192 MiB 111.3 and 111.1.
MAX_BYTES = 160 << 20


@record
class HorizontalParams:
    """The parameters of each part; further parts have those of the last."""

    parts: tuple[PointwiseParams, ...]

    def is_near(self, other: object) -> bool:
        """Whether each part is near that of the other."""
        return (
            isinstance(other, HorizontalParams)
            and len(self.parts) == len(other.parts)
            and all(a.is_near(b) for a, b in zip(self.parts, other.parts, strict=True))
        )

    is_alike = is_near

    def __str__(self) -> str:
        return f"horizontal({'; '.join(map(str, self.parts))})"


def generic(device: DeviceInfo) -> HorizontalParams:
    """Returns the parameters that rely on nothing."""
    return HorizontalParams((pointwise.generic(device),))


def ladder(chosen: HorizontalParams, least: HorizontalParams) -> tuple[HorizontalParams, ...]:
    """Returns parameters from `chosen` down to `least`: all parts step down together."""
    columns = [rungs(part, least.parts[-1]) for part in chosen.parts]
    rows = zip_longest(*columns, fillvalue=least.parts[-1])
    return tuple(dict.fromkeys([*map(HorizontalParams, rows), least]))


# ------------------------------------------------------------------ what is accepted
def accepts(fusion: Fusion) -> str | None:
    """Returns why the fusion is not several pointwise ones, None when it is."""
    if any(a.is_stream for op in fusion.exprs for tv in op.outputs for a in tv.domain.loop):
        return "it is computed in steps along a stream axis"
    found = _outputs_of_parts(fusion)
    if len(found) < 2:
        return "its outputs iterate the same axes"
    if len(found) > MAX_PARTS:
        return f"it has {len(found)} parts, more than {MAX_PARTS}"
    for outputs, ops in found:
        made = {out for op in ops for out in op.outputs}
        other = next((o for o in fusion.outputs if o in made and o not in outputs), None)
        if other is not None:
            return f"{outputs[0]} is computed from {other}, which has other axes"
    return next(filter(None, map(pointwise.accepts, parts_of(fusion))), None)


def _outputs_of_parts(fusion: Fusion) -> list[tuple[list[TensorView], tuple[TensorOp, ...]]]:
    """Returns the outputs of each part, and the ops that compute them, both in order."""
    graph = AxisGraph(fusion)
    by_axes: dict[tuple[int, ...], list[TensorView]] = {}
    for out in dict.fromkeys(fusion.outputs):
        axes = sorted(graph.find(a) for a in out.domain.logical if not a.is_broadcast)
        by_axes.setdefault(tuple(axes), []).append(out)
    return [(outputs, fusion.exprs_behind(outputs)) for outputs in by_axes.values()]


def parts_of(fusion: Fusion) -> Iterator[Fusion]:
    """Yields each part, with the numbers and layouts of the whole; what a caller makes in one
    before it asks for the next has numbers that no other part has."""
    given = [v for v in fusion.inputs if isinstance(v, TensorView)]
    last = 0
    for outputs, ops in _outputs_of_parts(fusion):
        read = {v for op in ops for v in op.inputs}
        part = extract(fusion, ops, [v for v in given if v in read], outputs)
        part.reserve(tensor=last)
        tensors = {tv.number: tv for tv in part.tensors()}
        part.aliases = [
            Alias(tensors[a.out.number], tensors[a.into.number], a.hidden, a.where)
            for a in fusion.aliases
            if a.out in outputs
        ]
        yield part
        last = max(last, *(tv.number for tv in part.tensors()))


# ------------------------------------------------------------------ heuristics, application
def chooser(fusion: Fusion, device: DeviceInfo) -> Callable[[Facts], HorizontalParams]:
    """Returns what chooses the parameters of each part for an input class."""
    choosers = [pointwise.chooser(part, device) for part in parts_of(fusion)]
    return lambda facts: HorizontalParams(tuple(choose(facts) for choose in choosers))


def apply(fusion: Fusion, params: HorizontalParams) -> None:
    """Schedules the parts, which then are what the fusion is lowered from."""
    made: dict[int, TensorView] = {}
    parts: list[Fusion] = []
    for k, part in enumerate(parts_of(fusion)):
        numbers = [out.number for out in part.outputs]
        pointwise.apply(part, params.parts[min(k, len(params.parts) - 1)])
        made.update(zip(numbers, part.outputs, strict=True))
        parts.append(part)
    fusion.parts = tuple(parts)
    fusion.outputs = [made[out.number] for out in fusion.outputs]
    fusion.exprs = [op for part in parts for op in part.exprs]


# ----------------------------------------------------------------------
# What is tried, in turn, where a kernel with the chosen parameters cannot be lowered.
#
# Parameters are chosen from sizes and strides; whether an address is linear in the vector axis is
# known only once its index has been written. Each rung relies on less than the one before: narrower
# vectors, scalar accesses, nothing loaded ahead of its use (everything inlined), and at last what
# serves every input.

# What a rung changes, and to what; a scheduler without such a parameter leaves it out.
SCALAR = {"vector": 1, "staged_vector": 1}
INLINED = {**SCALAR, "unroll": 1, "unroll_outer": False, "columns": 1}


def rungs(chosen: Any, generic: Any) -> tuple[Any, ...]:
    """Returns parameters from `chosen` down to `generic`, each once.

    vector 4, unroll 2  ->  4 x 2, 2 x 2, 1 x 2, 1 x 1, generic
    """
    narrower = [{"vector": chosen.vector >> k} for k in range(1, chosen.vector.bit_length() - 1)]
    known = {f.name for f in fields(chosen)}
    tried = [
        replace(chosen, **{name: value for name, value in step.items() if name in known})
        for step in ({}, *narrower, SCALAR, INLINED)
    ]
    return tuple(dict.fromkeys([*tried, generic]))
