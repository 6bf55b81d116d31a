"""The table of schedulers, in the order in which they are tried."""

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

# Frozen, hashable, with a text form; each scheduler has its own class.
Params = Any


@record
class Scheduler:
    """One way to turn a fusion into a kernel.

    `accepts` returns a reason against the fusion or None. `chooser` looks at a fusion once and
    returns what chooses parameters from sizes and alignments, of which there may be many; `apply`
    schedules in place and depends on the parameters alone. `generic` gives
    parameters that rely on nothing, for the variant that serves every input; `ladder` all that are
    worth a try, from those chosen down. `suits` tells for which sizes the kernel is as fast as
    separate ones. `in_clusters`: it is for GPUs whose blocks form clusters. `rungs` gives all
    parameters from some down to the generic ones.
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
        """Returns the parameters for one class of inputs."""
        return self.chooser(fusion, device)(facts)

    def ladder(self, chosen: Params, device: DeviceInfo) -> tuple[Params, ...]:
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
    # Declared orders decide which of the two it is called; the layouts that come, how it is done.
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


# Of inner persistent kernels, those for rows that exceed a block.
_CLUSTERS = Scheduler(
    "cluster_persistent",
    cluster_persistent.accepts,
    cluster_persistent.chooser,
    cluster_persistent.apply,
    cluster_persistent.generic,
    cluster_persistent.suits,
    in_clusters=True,
)
# Not tried for one segment: it takes several as one.
HORIZONTAL = Scheduler(
    "horizontal",
    horizontal.accepts,
    horizontal.chooser,
    horizontal.apply,
    horizontal.generic,
    rungs=horizontal.ladder,
)
# Tried for segments when no other accepts: it takes every single op that a kernel can compute.
_PLAIN = Scheduler("plain", plain.accepts, plain.chooser, plain.apply, plain.generic)


@record
class UserParams:
    """The schedule is the user's: there is nothing to choose."""

    vector: int = 0

    def is_near(self, other: UserParams) -> bool:
        return True

    is_alike = is_near

    def __str__(self) -> str:
        return "user"


def _no_generic_schedule(device: DeviceInfo) -> Params:
    raise UnsupportedError(
        "the user's schedule relies on divisibility or alignment that these inputs do not have"
    )


# Not tried for segments: it runs a fusion whose tensors the user has scheduled.
_USER = Scheduler(
    "user",
    accepts=lambda fusion: "scheduled by hand",
    chooser=lambda fusion, device: lambda facts: UserParams(),
    apply=lambda fusion, params: None,
    generic=_no_generic_schedule,
)
# The ones that a user may ask for by name.
SCHEDULERS: Mapping[str, Scheduler] = {row.name: row for row in _ROWS}
_BY_NAME: Mapping[str, Scheduler] = {
    row.name: row for row in (*_ROWS, _CLUSTERS, HORIZONTAL, _PLAIN, _USER)
}


def find_scheduler(
    fusion: Fusion, *, suits: Callable[[Scheduler], bool] = lambda row: True
) -> str | None:
    """Returns the name of the first scheduler that accepts the fusion and `suits`, None for
    none."""
    rows = (s for s in (*_ROWS, _CLUSTERS, _PLAIN) if s.accepts(fusion) is None)
    return next((s.name for s in rows if suits(s)), None)


def rejections(fusion: Fusion) -> dict[str, str]:
    """Returns why each scheduler that does not accept the fusion refuses it."""
    found = {s.name: s.accepts(fusion) for s in _ROWS}
    return {name: reason for name, reason in found.items() if reason is not None}


def scheduler(name: str) -> Scheduler:
    """Returns a scheduler by name; `user` runs what the user scheduled.

    Raises:
        UnsupportedError: there is none of this name.
    """
    if name not in _BY_NAME:
        raise UnsupportedError(f"no scheduler {name!r}; there are {', '.join(SCHEDULERS)}")
    return _BY_NAME[name]
