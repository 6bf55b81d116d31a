"""The table of schedulers, in the order in which `find_scheduler` tries the schedulers.

A scheduler divides the work of a family of fusions among CUDA blocks, threads and loops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fuser.ir.fusion import Fusion
from fuser.ir.scalar.constructors import Number, Symbol
from fuser.schedule import (
    cluster_persistent,
    horizontal,
    inner_outer_persistent,
    inner_persistent,
    outer_persistent,
    plain,
    pointwise,
    reduction,
    transpose,
)
from fuser.schedule.horizontal import rungs
from fuser.schedule.input_facts import Facts
from fuser.support.device import DeviceInfo
from fuser.support.errors import UnsupportedError
from fuser.support.record import record

# The parameters of a kernel: frozen, hashable and printable. Each scheduler has its own class.
Params = Any


@record
class Scheduler:
    """One way to turn a fusion into a kernel, as a table entry of functions.

    - `accepts` returns the reason why the scheduler rejects a fusion, or None if the scheduler
      accepts the fusion.
    - `chooser` analyses a fusion once, and returns a function. That function chooses parameters
      from the sizes and alignments of the inputs.
    - `apply` schedules the fusion in place. The result depends on fusion and parameters alone.
    - `generic` returns parameters that are valid for every input.
    - `rungs` returns the parameters to try one after another until a kernel can be generated, from
      the chosen parameters to the generic ones.
    - `suits` returns whether, for the given sizes, one kernel is at least as fast as several
      kernels that do the same work.
    - `in_clusters`: whether the kernel needs a GPU with clusters of CUDA blocks.
    """

    name: str
    accepts: Callable[[Fusion], str | None]
    chooser: Callable[[Fusion, DeviceInfo], Callable[[Facts], Params]]
    apply: Callable[[Fusion, Params], None]
    generic: Callable[[DeviceInfo], Params]
    suits: Callable[[Fusion, Mapping[Symbol, Number]], bool] = lambda fusion, sizes: True
    in_clusters: bool = False
    rungs: Callable[[Params, Params], tuple[Params, ...]] = rungs

    def heuristics(self, fusion: Fusion, facts: Facts, device: DeviceInfo) -> Params:
        """Returns the parameters that the scheduler chooses for the sizes and alignments in
        `facts`.
        """
        return self.chooser(fusion, device)(facts)

    def ladder(self, chosen: Params, device: DeviceInfo) -> tuple[Params, ...]:
        """Returns the parameters to try one after another, from the chosen parameters to the
        generic ones.

        The next parameters are used if no kernel can be generated with the previous parameters.
        """
        if isinstance(chosen, UserParams):
            return (chosen,)  # the schedule is the user's: there is no other
        return self.rungs(chosen, self.generic(device))


_ROWS = (
    Scheduler(
        "transpose",
        transpose.accepts,
        transpose.chooser,
        transpose.apply,
        pointwise.generic,
    ),
    # Declared memory orders decide the name. The actual layouts decide the kernel, so both names
    # share one implementation.
    Scheduler(
        "pointwise",
        pointwise.accepts,
        transpose.chooser,
        transpose.apply,
        pointwise.generic,
    ),
    Scheduler(
        "reduction", reduction.accepts, reduction.chooser, reduction.apply, reduction.generic
    ),
    Scheduler(
        "inner_persistent",
        inner_persistent.accepts,
        inner_persistent.chooser,
        inner_persistent.apply,
        inner_persistent.generic,
        inner_persistent.suits,
    ),
    Scheduler(
        "outer_persistent",
        outer_persistent.accepts,
        outer_persistent.chooser,
        outer_persistent.apply,
        outer_persistent.generic,
        outer_persistent.suits,
    ),
    Scheduler(
        "inner_outer_persistent",
        inner_outer_persistent.accepts,
        inner_outer_persistent.chooser,
        inner_outer_persistent.apply,
        inner_outer_persistent.generic,
        inner_outer_persistent.suits,
    ),
)


# The variant of inner persistent kernels for rows too long for one block.
_CLUSTERS = Scheduler(
    "cluster_persistent",
    cluster_persistent.accepts,
    cluster_persistent.chooser,
    cluster_persistent.apply,
    cluster_persistent.generic,
    cluster_persistent.suits,
    in_clusters=True,
)
# Not tried for a single segment, because this scheduler combines several segments.
HORIZONTAL = Scheduler(
    "horizontal",
    horizontal.accepts,
    horizontal.chooser,
    horizontal.apply,
    horizontal.generic,
    rungs=horizontal.ladder,
)
# Tried for segments when no other scheduler accepts: it takes every single op that a kernel can
# compute.
_PLAIN = Scheduler("plain", plain.accepts, plain.chooser, plain.apply, plain.generic)


@record
class UserParams:
    """The parameters of a manual schedule, for which nothing is chosen.

    `vector` exists because all classes of parameters have this field.
    """

    vector: int = 0

    def is_near(self, other: UserParams) -> bool:
        """Returns whether a kernel with the parameters `other` can replace one with these
        parameters.

        Always True, because there is only one manual schedule of a fusion.
        """
        return True

    is_alike = is_near

    def __str__(self) -> str:
        return "user"


def _no_generic_schedule(device: DeviceInfo) -> Params:
    raise UnsupportedError(
        "the manual schedule needs divisible sizes or aligned addresses, which these inputs do "
        "not have: use narrower vectors, or pass inputs whose sizes the vectors divide"
    )


# Not tried for segments: it runs a fusion whose tensors the user has scheduled.
_USER = Scheduler(
    "user",
    accepts=lambda fusion: "scheduled by hand",
    chooser=lambda fusion, device: lambda facts: UserParams(),
    apply=lambda fusion, params: None,
    generic=_no_generic_schedule,
)
# The schedulers that a user may request by name.
SCHEDULERS: Mapping[str, Scheduler] = {row.name: row for row in _ROWS}
_BY_NAME: Mapping[str, Scheduler] = {
    row.name: row for row in (*_ROWS, _CLUSTERS, HORIZONTAL, _PLAIN, _USER)
}


def find_scheduler(
    fusion: Fusion, *, suits: Callable[[Scheduler], bool] = lambda row: True
) -> str | None:
    """Returns the name of the first scheduler that accepts the fusion, or None if there is none.

    Schedulers for which `suits` returns False are skipped.
    """
    rows = (s for s in (*_ROWS, _CLUSTERS, _PLAIN) if s.accepts(fusion) is None)
    return next((s.name for s in rows if suits(s)), None)


def rejections(fusion: Fusion) -> dict[str, str]:
    """Returns the reasons why schedulers reject the fusion, as a dict from scheduler name to
    reason.

    Schedulers that accept the fusion are left out.
    """
    found = {s.name: s.accepts(fusion) for s in _ROWS}
    return {name: reason for name, reason in found.items() if reason is not None}


def scheduler(name: str) -> Scheduler:
    """Returns the scheduler with this name.

    The scheduler `user` stands for a manual schedule: it leaves the user's schedule unchanged.

    Raises:
        UnsupportedError: no scheduler has this name.
    """
    if name not in _BY_NAME:
        raise UnsupportedError(
            f"there is no scheduler {name!r}: choose one of {', '.join(SCHEDULERS)}"
        )
    return _BY_NAME[name]
