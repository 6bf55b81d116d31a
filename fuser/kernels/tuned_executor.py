"""The executor of the option `tune`: parameters by time instead of by the heuristic alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fuser.ir.domain.strided_layout import Laid
from fuser.ir.fusion import Fusion
from fuser.ir.scalar.constructors import Number, Symbol
from fuser.kernels.autotune import InputsClass, Trial, Tuning, warn_of_capture
from fuser.kernels.executor import FusedKernelExecutor, KernelLaunch, Record, Value, VariantKey
from fuser.kernels.extents import Sizes
from fuser.kernels.kernel_variant import Variant
from fuser.kernels.operands import describe, index_dtype, is_plain
from fuser.kernels.trial import is_launchable
from fuser.support.device import DeviceInfo
from fuser.support.errors import DefinitionError, FuserError, UnsupportedError

_Bind = Callable[[Variant], "Record | None"]


class TunedExecutor(FusedKernelExecutor):
    """Runs a fusion with the parameters that `Tuning` finds, at the first run for a class of inputs
    that has contents and is not captured; before, and where they do not serve, with the
    heuristic's.
    """

    def __init__(self, fusion: Fusion, **given: Any) -> None:
        super().__init__(fusion, **given)
        names = self.scheduler.name, self.name, self._of
        self._tuning = Tuning(self.fusion, *names, self._dump, checked=self.checked)

    def launch_laid(
        self,
        tensors: Sequence[Laid],
        sizes: Sizes,
        device: torch.device,
        numbers: Sequence[Number] = (),
        *,
        are_sized: bool = False,
    ) -> KernelLaunch | None:
        """Return None: what has no contents cannot be timed."""
        del tensors, sizes, device, numbers, are_sized
        return None

    def launch_for(
        self,
        inputs: Sequence[Value],
        outputs: Sequence[torch.Tensor],
        *,
        sizes: Sizes,
        device: torch.device | None = None,
    ) -> KernelLaunch | None:
        """See `KernelExecutor.launch_for`; None in a capture: a later run may time others."""
        if device is None and _is_captured(outputs):
            return None
        return super().launch_for(inputs, outputs, sizes=sizes, device=device)

    def _record(
        self,
        inputs: Sequence[Value],
        outputs: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        numbers: Sequence[Number],
        sizes: Sizes,
        device: DeviceInfo | None = None,
    ) -> Record | None:
        """See `KernelExecutor._record`; what was bound without timing is not remembered."""
        if device is None and not _is_captured(outputs):
            return super()._record(inputs, outputs, tensors, numbers, sizes)
        return self.bind(inputs, outputs, sizes=sizes, device=device)

    def bind(
        self,
        inputs: Sequence[Value],
        outputs: Sequence[torch.Tensor],
        *,
        sizes: Sizes,
        device: DeviceInfo | None = None,
    ) -> Record | None:
        """Return what takes the least time: as it is known, or, without `device` and outside of a
        capture, timed now. Where that serves these tensors no better, or not at all, it is the
        heuristic's."""
        tensors = [*[v for v in inputs if isinstance(v, torch.Tensor)], *outputs]
        numbers = tuple(v for v in inputs if not isinstance(v, torch.Tensor))
        bound = self._extents.bind(inputs, outputs, tensors, sizes)
        if bound is None:
            return None
        runs_on = device or describe(tensors)
        info = self._device or runs_on
        layouts, alignments = self._laid(tensors, are_plain=all(map(is_plain, tensors)))
        given = layouts, alignments, bound, tensors, info
        chosen = self._chosen(layouts, alignments, bound, info)
        index = index_dtype(bound.iterations, tensors)
        sizes_of = self._tuning.sizes_of(self._extents.symbols, bound.sizes)
        asked = InputsClass(layouts, chosen, index, sizes_of, info, runs_on.kind)

        def serve(variant: Variant) -> Record | None:
            launch = self._launch_of(variant, tensors, bound.values, alignments)
            return (variant, launch) if launch and is_launchable(launch, info) else None

        params = self._tuning.known(asked)
        if params is None and device is None and not self._is_full:
            if _is_captured(outputs):
                warn_of_capture()
            else:
                choice = self._by_heuristic(*given)
                params = self._timed(asked, choice, tensors, numbers, serve)
        key = (layouts, params, index)
        has_room = key in self._variants or not self._is_full
        if params is None or params == chosen or not has_room:
            return self._by_heuristic(*given)
        if key not in self._variants and not self._can_lower(key, asked):
            return self.bind(inputs, outputs, sizes=sizes, device=device)
        return serve(self._variants[key]) or self._by_heuristic(*given)

    def _can_lower(self, key: VariantKey, asked: InputsClass) -> bool:
        """Lower what was found; whether that could be done."""
        try:
            self._variants[key] = self._lower(key, asked.device)
        except (UnsupportedError, DefinitionError):
            self._tuning.refuse(asked)
            return False
        # It takes the place of the choice among the few variants.
        self._variants.pop((asked.layouts, asked.chosen, asked.index), None)
        return True

    def _timed(
        self,
        asked: InputsClass,
        choice: Record,
        tensors: Sequence[torch.Tensor],
        numbers: Sequence[Number],
        serve: _Bind,
    ) -> Any:
        """Return the parameters that are timed to be the best."""

        def lower(params: Any) -> Record | None:
            """Lower and bind, for a trial alone, what may be refused."""
            try:
                key = (asked.layouts, params, asked.index)
                return serve(self._scheduled(key, asked.device)[0])
            except FuserError:
                return None

        variant, launch = choice
        self._compiled(variant, tensors)
        ends = len(tensors) - len(self.fusion.outputs)
        device = tensors[0].device
        return self._tuning.find(
            asked,
            Trial(
                variant,
                launch,
                tensors[:ends],
                tensors[ends:],
                numbers,
                lower,
                lambda variants: self._compile(variants, device),
            ),
        )

    def _nearby(
        self,
        key: VariantKey,
        alignments: Mapping[int, int],
        values: Mapping[Symbol, Number],
        tensors: Sequence[torch.Tensor | Laid],
    ) -> Record | None:
        """A size of another order of magnitude is timed on its own, while there is room."""
        return super()._nearby(key, alignments, values, tensors) if self._is_full else None


def _is_captured(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether launches on these go into a CUDA graph of the caller's."""
    return tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()
