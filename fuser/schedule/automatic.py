"""The public functions of automatic schedulers: test a fusion, choose parameters, apply the
schedule.

The functions take the user's own fusion and real inputs. `schedule` changes the fusion in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import gcd
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol, overload

import torch

from fuser.ir.binding import bind_inputs
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.scalar.constructors import Number
from fuser.ir.types import IrEnum
from fuser.schedule import pointwise, reduction
from fuser.schedule.inner_persistent import InnerPersistentParams
from fuser.schedule.input_facts import Facts
from fuser.schedule.outer_persistent import OuterPersistentParams
from fuser.schedule.registry import SCHEDULERS
from fuser.support.arguments import require
from fuser.support.device import DeviceInfo, describe_device
from fuser.support.errors import DefinitionError, UnsupportedError, UnsupportedNameError

if TYPE_CHECKING:
    import torch

Inputs = Sequence["torch.Tensor | Number"]


class SchedulerType(IrEnum):
    """The kinds of schedulers, with the names of nvFuser; some kinds have no implementation.

    A scheduler divides the work of a kernel among CUDA blocks, threads and loops.
    """

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


# The attribute of pybind11's enumerations: name -> (member, documentation).
setattr(SchedulerType, "__entries", {m.name: (m, None) for m in SchedulerType})


def can_schedule(fusion: Fusion, scheduler_type: SchedulerType, inputs: Inputs) -> tuple[bool, str]:
    """Returns whether a scheduler accepts the fusion, and the reason if it does not.

    The result is (True, "") or (False, reason). `inputs` have no effect, because a scheduler
    decides by the definition of the fusion alone. The parameter exists because nvFuser's function
    has it.
    """
    del inputs  # acceptance depends on the definition alone
    row = SCHEDULERS.get(scheduler_type.name)
    reason = f"there is no {scheduler_type.name} scheduler" if row is None else row.accepts(fusion)
    if reason is None:
        return True, ""
    return False, f"Scheduler _{scheduler_type.name}_ ***Rejected*** because : {reason}"


def find_compatible_schedulers(fusion: Fusion, inputs: Inputs) -> list[SchedulerType]:
    """Returns the schedulers that accept the fusion, in the order in which they are tried.

    `inputs` have no effect, because a scheduler decides by the definition of the fusion alone. The
    parameter exists because nvFuser's function has it.
    """
    types = [SchedulerType[name] for name in SCHEDULERS if name in SchedulerType.__members__]
    return [t for t in types if can_schedule(fusion, t, inputs)[0]]


def compute_heuristics(
    fusion: Fusion, scheduler_type: SchedulerType, inputs: Inputs
) -> HeuristicParams:
    """Returns the parameters, such as thread counts, that a scheduler chooses for a fusion and
    inputs.

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
) -> HeuristicParams:
    """Chooses parameters with the scheduler `scheduler_type`, schedules the fusion in place with
    these parameters, and returns them.

    `heuristic_params` are the inputs of the fusion; the name is that of nvFuser's function.
    """


@overload
def schedule(
    fusion: Fusion, scheduler_type: SchedulerType, heuristic_params: HeuristicParams
) -> None:
    """Schedules the fusion in place with the parameters `heuristic_params`, which an earlier call
    has chosen for the same scheduler.
    """


def schedule(
    fusion: Fusion, scheduler_type: SchedulerType, heuristic_params: object
) -> HeuristicParams | None:
    """Schedules the fusion in place: divides its work among CUDA blocks, threads and loops.

    `heuristic_params` are either the parameters to use, or inputs from which the scheduler chooses
    parameters. In the second case, the chosen parameters are returned.

    Raises:
        UnsupportedError: the scheduler does not accept the fusion.
        DefinitionError: the parameters are those of another scheduler.
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
            f"schedule: the parameters belong to {given.scheduler_type}, not to {scheduler_type}: "
            f"pass the result of compute_heuristics for {scheduler_type}"
        )
    accepted, reason = can_schedule(fusion, scheduler_type, ())
    if not accepted:
        raise UnsupportedError(
            f"Could not schedule fusion with the SchedulerType: {scheduler_type.name}\n{reason}"
        )
    SCHEDULERS[scheduler_type.name].apply(fusion, given.chosen)
    return None


def _facts(fusion: Fusion, inputs: Inputs) -> tuple[Facts, DeviceInfo]:
    """Returns the sizes and alignments of the inputs, and the device of the first tensor input.

    A scheduler chooses its parameters from these. Without tensor inputs, the device is the CPU.
    """
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


# ----------------------------------------------------------------------
# The chosen parameters, as nvFuser's users read them.
#
# `compute_heuristics` and `schedule` return them. `str` shows all parameters. Attributes with
# nvFuser's names exist where their meaning is the same.


class HeuristicParams:
    """The parameters that a scheduler chose, as `fuser.schedule.compute_heuristics` returns them.

    `scheduler_type` is the scheduler. The user can set only two attributes: `lparams`
    (`LaunchParams`) and `cparams` (`CompileParams`). They do not change the kernel:
    `manual_execute` and `KernelExecutor` only check that the kernel satisfies them.

    Raises:
        UnsupportedError: the user calls the class; only `compute_heuristics` creates its objects.
    """

    # The public name, used in messages.
    PUBLIC: ClassVar[str] = "HeuristicParams"
    # Attribute name -> its value, computed from the chosen parameters.
    NAMES: ClassVar[Mapping[str, Callable[[Any], object]]] = {}

    def __init__(self, *args: object, **named: object) -> NoReturn:
        raise UnsupportedError(
            f"{self.PUBLIC} objects cannot be constructed: "
            "fuser.schedule.compute_heuristics returns them"
        )

    @staticmethod
    def of(scheduler_type: SchedulerType, chosen: object) -> HeuristicParams:
        """Wraps the parameters that a scheduler chose in the class that users see, and returns the
        object.

        The class depends on the class of `chosen`, because the public attributes differ.
        """
        cls = next((c for known, c in _CLASSES.items() if isinstance(chosen, known)), None)
        made = object.__new__(cls or HeuristicParams)
        given = {"scheduler_type": scheduler_type, "chosen": chosen}
        vars(made).update(given, lparams=LaunchParams(), cparams=CompileParams())
        return made

    if TYPE_CHECKING:
        scheduler_type: SchedulerType
        chosen: Any
        lparams: LaunchParams
        cparams: CompileParams

    def __getattr__(self, name: str) -> Any:
        if name in self.NAMES:
            return self.NAMES[name](self.chosen)
        if name.startswith("_"):
            raise AttributeError(name)
        raise UnsupportedNameError(
            f"{self.PUBLIC} has no attribute {name}; it has scheduler_type, lparams, cparams"
            f"{''.join(f', {n}' for n in self.NAMES)}. str() shows all parameters"
        )

    def __setattr__(self, name: str, value: object) -> None:
        kinds = {"lparams": LaunchParams, "cparams": CompileParams}
        if name not in kinds:
            raise UnsupportedError(
                f"{self.PUBLIC}.{name} cannot be set: the parameters of a scheduler are read-only. "
                "Schedule manually, or use tune (docs/how-to/tune-kernels.md)"
            )
        vars(self)[name] = require(self.PUBLIC, name, value, kinds[name])

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.NAMES]

    def hash(self) -> int:
        """Returns a hash that is equal for equal parameters within one process."""
        return hash((self.scheduler_type, self.chosen))

    __hash__ = hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HeuristicParams):
            return NotImplemented
        mine, theirs = ((p.scheduler_type, p.chosen) for p in (self, other))
        return mine == theirs

    def __str__(self) -> str:
        return str(self.chosen)

    def __repr__(self) -> str:
        return f"<{self.PUBLIC} {self}>"


class PointwiseHeuristicParams(HeuristicParams):
    """The parameters of kernels without reductions.

    - `vectorization_factor`: the number of elements of a vector.
    - `unroll_factor_inner`: the number of vectors per thread.
    - `split_block`: whether a CUDA block has two thread dimensions.
    """

    PUBLIC = "PointwiseParams"

    NAMES: ClassVar[Mapping[str, Callable[[Any], object]]] = {
        "vectorization_factor": lambda p: p.vector,
        "unroll_factor_inner": lambda p: p.unroll,
        "split_block": lambda p: p.threads_y > 1,
    }


class ReductionHeuristicParams(HeuristicParams):
    """The parameters of kernels with reductions.

    - `fastest_dim`: whether the reduced axis is the innermost one in memory.
    - `persistent_kernel`: whether the kernel may hold its inputs in registers.
    - `vectorize_inner_reduction`, `vectorize_iter_dom`: whether vectors run along the reduced axis,
      or along another axis.
    - `cross_grid_inner_reduction`, `cross_grid_outer_reduction`: whether several CUDA blocks share
      a reduction, along the innermost axis or along another axis.
    """

    PUBLIC = "ReductionParams"

    NAMES: ClassVar[Mapping[str, Callable[[Any], object]]] = {
        "fastest_dim": lambda p: _is_inner(p),
        "persistent_kernel": lambda p: not isinstance(p, reduction.ReductionParams),
        "vectorize_inner_reduction": lambda p: _is_inner(p) and p.vector > 1,
        "vectorize_iter_dom": lambda p: not _is_inner(p) and p.vector > 1,
        "cross_grid_inner_reduction": lambda p: _is_inner(p) and _blocks(p) > 1,
        "cross_grid_outer_reduction": lambda p: not _is_inner(p) and _blocks(p) > 1,
    }


def _is_inner(params: Any) -> bool:
    return getattr(params, "inner", isinstance(params, InnerPersistentParams))


def _blocks(params: Any) -> int:
    """Returns the number of CUDA blocks that share one reduction in a kernel with these parameters.

    Returns 1 for classes of parameters that do not have this number.
    """
    return getattr(params, "grid", 1)


_CLASSES: dict[type, type[HeuristicParams]] = {
    pointwise.PointwiseParams: PointwiseHeuristicParams,
    reduction.ReductionParams: ReductionHeuristicParams,
    InnerPersistentParams: ReductionHeuristicParams,
    OuterPersistentParams: ReductionHeuristicParams,
}


# ----------------------------------------------------------------------
# LaunchParams and CompileParams: constraints of a user on the launch and compilation of one kernel.


class Launched(Protocol):
    """A launch of a kernel: its numbers of CUDA blocks and of threads per block, along x, y and
    z.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]


@dataclass
class LaunchParams:
    """Constraints of a user on the numbers of CUDA blocks and threads along x, y and z.

    `gdimx` is the number of blocks along x, `bdimx` the number of threads of a block along x. A
    value of -1 accepts any number.
    """

    gdimx: int = -1
    gdimy: int = -1
    gdimz: int = -1
    bdimx: int = -1
    bdimy: int = -1
    bdimz: int = -1

    def check(self, launch: Launched) -> None:
        """Checks that a launch satisfies the constraints.

        A constraint does not change the launch, because the schedule alone decides the numbers.

        Raises:
            DefinitionError: the schedule has another number of blocks or threads.
        """
        made = dict(zip((f.name for f in fields(self)), (*launch.grid, *launch.block), strict=True))
        for name, found in made.items():
            if getattr(self, name) not in (-1, found):
                raise DefinitionError(
                    f"launch constraint {name}={getattr(self, name)}: the schedule makes it "
                    f"{found}. Change the schedule, or remove the constraint"
                )

    def __repr__(self) -> str:
        block = ", ".join(f"BlockDim.{d} = {getattr(self, f'bdim{d}')}" for d in "xyz")
        grid = ", ".join(f"GridDim.{d} = {getattr(self, f'gdim{d}')}" for d in "xyz")
        return f"Launch Parameters: {block}, {grid}"


@dataclass(kw_only=True)
class CompileParams:
    """Compilation options of a user, with nvFuser's names and defaults.

    `index_type` and `device` must agree with the inputs. Each other option must have its default,
    because this project compiles all kernels in the same way.
    """

    index_type: DataType | None = None
    maxrregcount: int = 255
    enable_magic_zero: bool = True
    enable_ptxas_verbose: bool = False
    device: torch.device | str | None = None
    include_paths: Sequence[str] = field(default_factory=list[str])

    def check(self) -> None:
        """Checks that the options other than `index_type` and `device` have their defaults.

        Raises:
            UnsupportedError: an option has another value.
        """
        usual = CompileParams()
        for name in ("maxrregcount", "enable_magic_zero", "enable_ptxas_verbose", "include_paths"):
            if getattr(self, name) != getattr(usual, name):
                raise UnsupportedError(
                    f"CompileParams: {name}={getattr(self, name)} is not supported: kernels are "
                    f"compiled with {getattr(usual, name)}"
                )

    def check_kernel(self, index_type: DataType, device: torch.device) -> None:
        """Checks that the options `index_type` and `device` agree with those of a kernel.

        Raises:
            DefinitionError: the kernel has another index type, or is on another device.
        """
        if self.index_type not in (None, index_type):
            raise DefinitionError(
                f"CompileParams: index_type={self.index_type.name}, but inputs of these sizes are "
                f"indexed by {index_type.name}: pass index_type=DataType.{index_type.name}, or "
                "leave it out"
            )
        if self.device is not None and torch.device(self.device).type != device.type:
            raise DefinitionError(
                f"CompileParams: device={self.device}, but the inputs are on {device}: move the "
                "inputs, or leave device out"
            )

    def __repr__(self) -> str:
        index = "NotSet" if self.index_type is None else self.index_type.name
        rest = (f"{f.name} = {getattr(self, f.name)}" for f in fields(self)[1:])
        return f"Compile Parameters: index_type = {index}, {', '.join(rest)}"
