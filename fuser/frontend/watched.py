"""Runs of an executor cache that are watched: traces and profiles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fuser.frontend import implicit_inputs
from fuser.frontend.autograd import Autograd
from fuser.frontend.implicit_inputs import Draws
from fuser.frontend.known_call import CallCacheEntry
from fuser.frontend.profiler import Profiler, profile_of_program
from fuser.ir.binding import Argument
from fuser.support import options
from multidevice.job.agreement import Prepared
from multidevice.job.communicator import Communicator

if TYPE_CHECKING:
    from hostir.profiling.timeline import Trace
    from hostir.profiling.tracer import Asked

T = TypeVar("T")
_PROFILED = "// profiled"


class Watching:
    """What an executor cache runs under a watch."""

    _draws: Draws | None
    _numbers: list[int]
    _autograd: Autograd
    _fusion_id: int

    if TYPE_CHECKING:
        _find: Callable[..., tuple[CallCacheEntry, Sequence[Argument], tuple[int, ...] | None]]
        _look: Callable[..., tuple[Iterable[object], Callable[[Callable[[], Any]], Any]]]
        _has_run: Callable[[CallCacheEntry], None]

    def prepare_trace(
        self,
        inputs: Iterable[object],
        asked: Asked,
        device: int | str | torch.device | None = None,
        _enable_options: Sequence[str] = options.NONE,
        _disable_options: Sequence[str] = options.NONE,
    ) -> Prepared[Trace]:
        """Return what this rank claims to trace, and how; nothing is launched."""
        from hostir.profiling.tracer import take_trace

        given = inputs, device, _enable_options, _disable_options
        return self._prepare_watched(take_trace, asked, asked.line, *given)[1]

    def prepare_profile(
        self,
        profiler: Profiler,
        inputs: Iterable[object],
        device: int | str | torch.device | None,
        enable: Sequence[str],
        disable: Sequence[str],
    ) -> Prepared[list[torch.Tensor]]:
        """Return what this rank claims to run, and how, after which `profiler` has what it took.

        Raises `OtherEntranceError` where that is for runs by hand.
        """
        from hostir.profiling.profiler import take_profile

        has_cupti = profiler.begin(by_hand=False)
        given = inputs, device, enable, disable
        call, (claim, numbers, watch) = self._prepare_watched(
            take_profile, has_cupti, _PROFILED, *given
        )

        def run() -> list[torch.Tensor]:
            taken = watch()
            profiler.take(profile_of_program(taken, call.bound.program, self._fusion_id))
            return taken.outputs

        return claim, numbers, run

    def _prepare_watched(
        self,
        take: Callable[..., T],
        asked: object,
        line: str,
        inputs: Iterable[object],
        device: int | str | torch.device | None,
        *options: Sequence[str],
    ) -> tuple[CallCacheEntry, Prepared[T]]:
        """Return the call, what this rank claims, and how `take` watches it as `asked`.

        A rank that claims `line` meets neither one that executes nor one with another line.
        """
        inputs, begin = self._look(inputs, device)
        call, given, _ = self._find(Communicator.instance(), inputs, device, *options)
        (first, *rest), fixed = call.claim.parts, call.claim.fixed
        claim = replace(call.claim, parts=(first, line, *rest), fixed=fixed + 1)
        numbers = implicit_inputs.claimed(given, self._numbers, device, self._draws)

        def run() -> T:
            self._has_run(call)
            resolved = self._autograd.resolved(given)
            return call.bound.evaluator.watched_as_agreed(take, resolved, asked)

        return call, (claim, numbers, begin(run))
