"""The user's entrances to the automatic schedulers: ask, compute parameters, apply.

They take the user's own fusion and real inputs; `schedule` changes the fusion in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import TYPE_CHECKING, overload

from fuser.ir.binding import bind_inputs
from fuser.ir.fusion import Fusion
from fuser.ir.scalar.constructors import Number
from fuser.ir.tensor import TensorView
from fuser.ir.types import IrEnum
from fuser.schedule.heuristic_params import HeuristicParams
from fuser.schedule.input_facts import Facts
from fuser.schedule.registry import SCHEDULERS
from fuser.support.arguments import require
from fuser.support.device import DeviceInfo, describe_device
from fuser.support.errors import DefinitionError, UnsupportedError

if TYPE_CHECKING:
    import torch

Inputs = Sequence["torch.Tensor | Number"]


class SchedulerType(IrEnum):
    """The kinds of schedulers, under the names that nvFuser's users know; not all exist yet."""

    none = 0
    no_op = 1
    pointwise = 2
    matmul = 3
    reduction = 4
    inner_persistent = 5
    inner_outer_persistent = 6
    outer_persistent = 7
    transpose = 8
    expr_eval = 9
    resize = 10


# What pybind11's enumerations have: name -> (member, documentation).
setattr(SchedulerType, "__entries", {m.name: (m, None) for m in SchedulerType})


def can_schedule(fusion: Fusion, scheduler_type: SchedulerType, inputs: Inputs) -> tuple[bool, str]:
    """Return whether a scheduler accepts the fusion, and the reason against it."""
    del inputs  # acceptance depends on the definition alone
    row = SCHEDULERS.get(scheduler_type.name)
    reason = (
        f"there is no {scheduler_type.name} scheduler yet" if row is None else row.accepts(fusion)
    )
    if reason is None:
        return True, ""
    return False, f"Scheduler _{scheduler_type.name}_ ***Rejected*** because : {reason}"


def find_compatible_schedulers(fusion: Fusion, inputs: Inputs) -> list[SchedulerType]:
    """Return the schedulers that accept the fusion, in the order in which they are tried."""
    types = [SchedulerType[name] for name in SCHEDULERS if name in SchedulerType.__members__]
    return [t for t in types if can_schedule(fusion, t, inputs)[0]]


def compute_heuristics(
    fusion: Fusion, scheduler_type: SchedulerType, inputs: Inputs
) -> HeuristicParams:
    """Return the parameters that a scheduler chooses for these inputs.

    Raises:
        UnsupportedError: the scheduler does not accept the fusion.
    """
    accepted, reason = can_schedule(fusion, scheduler_type, inputs)
    if not accepted:
        raise UnsupportedError(
            f"Could not schedule fusion with the SchedulerType: {scheduler_type.name}\n{reason}"
        )
    facts, device = _facts(fusion, inputs)
    chosen = SCHEDULERS[scheduler_type.name].heuristics(fusion, facts, device)
    return HeuristicParams.of(scheduler_type, chosen)


@overload
def schedule(
    fusion: Fusion, scheduler_type: SchedulerType, heuristic_params: Sequence[object]
) -> HeuristicParams: ...
@overload
def schedule(
    fusion: Fusion, scheduler_type: SchedulerType, heuristic_params: HeuristicParams
) -> None: ...
def schedule(
    fusion: Fusion, scheduler_type: SchedulerType, heuristic_params: object
) -> HeuristicParams | None:
    """Schedule the fusion in place, with given parameters, or for given inputs (then returns the
    parameters that were chosen).

    Raises:
        UnsupportedError: the scheduler does not accept the fusion.
    """
    if isinstance(heuristic_params, (list, tuple)):
        params = compute_heuristics(fusion, scheduler_type, heuristic_params)
        SCHEDULERS[scheduler_type.name].apply(fusion, params.chosen)
        return params
    given: HeuristicParams = require(
        "schedule", "heuristic_params", heuristic_params, HeuristicParams
    )
    if given.scheduler_type is not scheduler_type:
        raise DefinitionError(
            f"schedule: the parameters are those of {given.scheduler_type}, not {scheduler_type}"
        )
    accepted, reason = can_schedule(fusion, scheduler_type, ())
    if not accepted:
        raise UnsupportedError(
            f"Could not schedule fusion with the SchedulerType: {scheduler_type.name}\n{reason}"
        )
    SCHEDULERS[scheduler_type.name].apply(fusion, given.chosen)
    return None


def _facts(fusion: Fusion, inputs: Inputs) -> tuple[Facts, DeviceInfo]:
    """Bind sizes and alignments from inputs; the device is that of the first tensor."""
    import torch

    values = bind_inputs(fusion, inputs)
    sizes = {s: v for s, v in values.items() if isinstance(v, int)}
    alignments: dict[int, int] = {}
    device: torch.device | None = None
    for declared, given in zip(fusion.inputs, inputs, strict=True):
        if isinstance(declared, TensorView) and isinstance(given, torch.Tensor):
            device = device or given.device
            alignments[declared.number] = gcd(given.data_ptr(), 16)
    return Facts(sizes, alignments), describe_device(device or "cpu")
