"""The horizontal scheduler: fuses several pointwise kernels into one launch.

Outputs with different axes cannot share loops, but can share a launch. For small kernels, a launch
takes as long as the work. Each set of outputs with the same axes is a part: a fusion that is
scheduled as a pointwise kernel. The grid has the CUDA blocks of all parts:

    GPU  [BIDx: blocks of part 0 | of part 1 | ..]

A part that needs an intermediate tensor of another part computes this tensor again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import zip_longest
from typing import Any

from fuser.ir.axis_graph import AxisGraph
from fuser.ir.fusion import Alias, Fusion, TensorOp, TensorView
from fuser.ir.scalar.constructors import Scalar
from fuser.passes.segment import extract
from fuser.schedule import pointwise
from fuser.schedule.input_facts import Facts
from fuser.schedule.pointwise import PointwiseParams
from fuser.support.device import DeviceInfo
from fuser.support.record import record

MAX_PARTS = 8
# Sharing a launch pays up to this many bytes of inputs. Measured on an H200, queries and keys of
# RoPE in bfloat16, in one launch and in two: 1 MiB 3.1 and 4.9 us; 48 MiB 24.1 and 26.8; 128 MiB
# 61.8 and 64.1; 192 MiB 111.3 and 111.1.
MAX_BYTES = 160 << 20


@record
class HorizontalParams:
    """The parameters of several pointwise kernels that share a launch: one entry for each kernel.

    If the launch has more kernels than entries, the last entry also serves the remaining kernels.
    """

    parts: tuple[PointwiseParams, ...]

    def is_near(self, other: object) -> bool:
        """Returns whether a compiled kernel with the parameters `other` can replace one with
        `self`.

        If so, no kernel is compiled with `self` for small inputs, because both take about the same
        time. The parameters of each pointwise kernel in the launch are compared with those of the
        same kernel in `other`.
        """
        return (
            isinstance(other, HorizontalParams)
            and len(self.parts) == len(other.parts)
            and all(a.is_near(b) for a, b in zip(self.parts, other.parts, strict=True))
        )

    is_alike = is_near

    def __str__(self) -> str:
        return f"horizontal({'; '.join(map(str, self.parts))})"


def generic(device: DeviceInfo) -> HorizontalParams:
    """Returns parameters with which the kernels of a launch are correct for all inputs, for example
    inputs of any alignment.

    `device` is the device that runs the kernels.
    """
    return HorizontalParams((pointwise.generic(device),))


def ladder(chosen: HorizontalParams, least: HorizontalParams) -> tuple[HorizontalParams, ...]:
    """Returns parameters to try one after another until a kernel can be generated, from `chosen` to
    `least`.

    Each has fewer requirements than the one before, such as shorter vectors. From one to the next,
    the parameters of all kernels in the launch change together.
    """
    columns = [rungs(part, least.parts[-1]) for part in chosen.parts]
    rows = zip_longest(*columns, fillvalue=least.parts[-1])
    return tuple(dict.fromkeys([*map(HorizontalParams, rows), least]))


# ------------------------------------------------------------------ acceptance
def accepts(fusion: Fusion) -> str | None:
    """Returns the reason why the horizontal scheduler rejects the fusion; None if the fusion is
    accepted.

    The scheduler accepts two or more independent pointwise fusions whose outputs have different
    axes. One launch then contains all of these fusions.
    """
    if any(a.is_stream for op in fusion.exprs for tv in op.outputs for a in tv.domain.loop):
        return "the fusion is computed in iterations of a stream loop"
    found = _outputs_of_parts(fusion)
    if len(found) < 2:
        return "all outputs iterate the same axes"
    if len(found) > MAX_PARTS:
        return (
            f"the outputs have {len(found)} different sets of axes, but at most {MAX_PARTS} are "
            "allowed"
        )
    for outputs, ops in found:
        made = {out for op in ops for out in op.outputs}
        other = next((o for o in fusion.outputs if o in made and o not in outputs), None)
        if other is not None:
            return f"{outputs[0]} is computed from {other}, which has other axes"
    return next(filter(None, map(pointwise.accepts, parts_of(fusion))), None)


def _outputs_of_parts(fusion: Fusion) -> list[tuple[list[TensorView], tuple[TensorOp, ...]]]:
    """Returns, for each part of the launch, its outputs and the ops that compute these outputs.

    Outputs with the same axes form one part. Outputs and ops are in the fusion's order.
    """
    graph = AxisGraph(fusion)
    by_axes: dict[tuple[int, ...], list[TensorView]] = {}
    for out in dict.fromkeys(fusion.outputs):
        axes = sorted(graph.find(a) for a in out.domain.logical if not a.is_broadcast)
        by_axes.setdefault(tuple(axes), []).append(out)
    return [(outputs, fusion.exprs_behind(outputs)) for outputs in by_axes.values()]


def parts_of(fusion: Fusion) -> Iterator[Fusion]:
    """Yields each part of a launch, as a fusion of its own.

    Outputs with the same axes form one part. Tensors have the same numbers and layouts as in
    `fusion`. A caller may add tensors to a part before it requests the next part; later parts then
    use other numbers for new tensors.
    """
    last = 0
    for outputs, ops in _outputs_of_parts(fusion):
        read = {v for op in ops for v in op.inputs}
        inputs = [v for v in fusion.inputs if isinstance(v, Scalar) or v in read]
        part = extract(fusion, ops, inputs, outputs)
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
    """Returns a function that chooses the parameters of each kernel that shares the launch.

    The function gets the sizes and alignments of the inputs.
    """
    choosers = [pointwise.chooser(part, device) for part in parts_of(fusion)]
    return lambda facts: HorizontalParams(tuple(choose(facts) for choose in choosers))


def apply(fusion: Fusion, params: HorizontalParams) -> None:
    """Schedules each part of a fusion as a pointwise kernel, and stores the parts in
    `fusion.parts`.

    A part has the outputs with the same axes. Lowering then lowers the parts, not the fusion's own
    ops.
    """
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
# The ladder: parameters to try in turn when a kernel with the chosen ones cannot be lowered.
#
# Parameters are chosen from sizes and strides. Whether an address is linear along the vector axis
# is known only when its index has been computed. Each step relies on less than the step before:
# narrower vectors, scalar accesses, nothing loaded before its use (all inlined), and finally the
# generic parameters.

# The fields that a step changes, with their new values. Fields that a scheduler does not have are
# skipped.
SCALAR = {"vector": 1, "staged_vector": 1}
INLINED = {**SCALAR, "unroll": 1, "unroll_outer": False, "columns": 1}


def rungs(chosen: Any, generic: Any) -> tuple[Any, ...]:
    """Returns parameters to try one after another until a kernel can be generated.

    They begin with `chosen` and end with `generic`, which is valid for all inputs. Each has fewer
    requirements than the one before. Duplicates are left out. An example, as vector width x unroll
    factor:

        vector 4, unroll 2  ->  4 x 2, 2 x 2, 1 x 2, 1 x 1, generic
    """
    narrower = [{"vector": chosen.vector >> k} for k in range(1, chosen.vector.bit_length() - 1)]
    known = {f.name for f in fields(chosen)}
    tried = [
        replace(chosen, **{name: value for name, value in step.items() if name in known})
        for step in ({}, *narrower, SCALAR, INLINED)
    ]
    return tuple(dict.fromkeys([*tried, generic]))
