"""What a scheduler chose, as nvFuser's users read it.

`compute_heuristics` and `schedule` return it: `str` tells all that was chosen, and the names of
nvFuser's that mean the same here can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from fuser.schedule import pointwise, reduction
from fuser.schedule.inner_persistent_params import InnerPersistentParams
from fuser.schedule.kernel_params import CompileParams, LaunchParams
from fuser.schedule.outer_persistent import OuterPersistentParams
from fuser.support.arguments import require
from fuser.support.errors import UnsupportedError, UnsupportedNameError

if TYPE_CHECKING:
    from fuser.schedule.automatic import SchedulerType


class HeuristicParams:
    """The parameters that a scheduler chose. `scheduler_type` is the scheduler, `lparams` and
    `cparams` are what `manual_execute` and `KernelExecutor` check the kernel against; all else is
    read.

    Made by `fuser.schedule.compute_heuristics`: raises `UnsupportedError` when called.
    """

    # The public name, which messages say.
    PUBLIC: ClassVar[str] = "HeuristicParams"
    # Name -> what it is of the chosen parameters.
    NAMES: ClassVar[Mapping[str, Callable[[Any], object]]] = {}

    def __init__(self, *args: object, **named: object) -> NoReturn:
        raise UnsupportedError(
            f"{self.PUBLIC}: parameters are not made by hand: "
            "fuser.schedule.compute_heuristics returns them"
        )

    @staticmethod
    def of(scheduler_type: SchedulerType, chosen: object) -> HeuristicParams:
        """Return what users see of the parameters of a scheduler."""
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
            f"{self.PUBLIC} has no {name}: there are scheduler_type, lparams, cparams"
            f"{''.join(f', {n}' for n in self.NAMES)}; str() tells what was chosen"
        )

    def __setattr__(self, name: str, value: object) -> None:
        kinds = {"lparams": LaunchParams, "cparams": CompileParams}
        if name not in kinds:
            raise UnsupportedError(
                f"{self.PUBLIC}.{name}: what a scheduler chose is read: schedule by hand, "
                "or tune (docs/options.md)"
            )
        vars(self)[name] = require(self.PUBLIC, name, value, kinds[name])

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.NAMES]

    def hash(self) -> int:
        """Return a number that is equal for equal parameters, within a process."""
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
    """Those of kernels without reductions. `vectorization_factor` counts the elements of a vector,
    `unroll_factor_inner` the vectors of a thread; `split_block`: threads have two dimensions."""

    PUBLIC = "PointwiseParams"

    NAMES: ClassVar[Mapping[str, Callable[[Any], object]]] = {
        "vectorization_factor": lambda p: p.vector,
        "unroll_factor_inner": lambda p: p.unroll,
        "split_block": lambda p: p.threads_y > 1,
    }


class ReductionHeuristicParams(HeuristicParams):
    """Those of kernels with reductions. `fastest_dim`: the reduced axis is the innermost one."""

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
    """Return how many blocks share a reduction."""
    return getattr(params, "grid", 1)


_CLASSES: dict[type, type[HeuristicParams]] = {
    pointwise.PointwiseParams: PointwiseHeuristicParams,
    reduction.ReductionParams: ReductionHeuristicParams,
    InnerPersistentParams: ReductionHeuristicParams,
    OuterPersistentParams: ReductionHeuristicParams,
}
