"""Host units: fusions that `PostOnStream` runs, each through the whole compiler.

A unit is scheduled automatically, once per class of inputs; what was made for a class is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from fuser.ir.binding import Argument, free_inputs, signature_of
from fuser.ir.fusion import Fusion
from fuser.support.errors import FuserError
from fuser.support.lru import Recent
from fuser.support.options import Settings
from hostir.ir.shard_layout import write
from hostir.lowering.input_class import Classifier
from hostir.lowering.pipeline import build_program
from hostir.runtime.inputs import InputBinder
from multidevice.sharding import queries

if TYPE_CHECKING:
    from multidevice.job.communicator import Communicator

# What one unit remembers: signatures of inputs, and programs.
MAX_SIGNATURES = 64
MAX_PROGRAMS = 16


class UnitEvaluator(Protocol):
    """Runs the program of a unit."""

    def run_as_agreed(
        self, inputs: Sequence[Argument], *, signature: Hashable | None = None
    ) -> list[torch.Tensor]: ...


class UnitRunner:
    """Runs one unit on local shards, on the current stream."""

    def __init__(
        self,
        number: int,
        fusion: Fusion,
        communicator: Communicator | None,
        device: torch.device,
        settings: Settings,
        make_evaluator: Callable[..., UnitEvaluator],
    ) -> None:
        """`make_evaluator` is given the program of a class of inputs, the communicator, `device`
        and `settings`."""
        self._name = f"HostUnit{number}"
        self._fusion = fusion
        self._communicator = communicator
        self._device = device
        self._settings = settings
        self._make_evaluator = make_evaluator
        self._binder = InputBinder(fusion)
        self._classifier = Classifier(fusion)
        self._free = free_inputs(fusion)
        self._by_signature: Recent[object, UnitEvaluator] = Recent(MAX_SIGNATURES)
        self._by_class: Recent[object, UnitEvaluator] = Recent(MAX_PROGRAMS)

    def __call__(self, inputs: Sequence[Argument], outputs: Sequence[torch.Tensor]) -> None:
        """Compute `outputs`, which are allocated.

        Raises `InputError` or `ShardingError` for inputs that do not fit the unit.
        """
        key = signature_of(inputs, self._free)
        evaluator = self._by_signature.recall(key)
        if evaluator is None:
            evaluator = self._by_signature[key] = self._evaluator(inputs)
        for out, value in zip(outputs, evaluator.run_as_agreed(inputs, signature=key), strict=True):
            write(out, value)

    def size(self) -> int:
        """Return how many programs are kept."""
        return self._by_class.size()

    def _evaluator(self, inputs: Sequence[Argument]) -> UnitEvaluator:
        try:
            values = self._binder.bind(inputs, self._device)
        except FuserError as error:
            raise type(error)(f"{self._name}: {error}") from None
        sizes = {s: v for s, v in values.items() if isinstance(v, int)}
        found = self._classifier.classify(inputs, sizes, self._device)
        evaluator = self._by_class.recall(found.key)
        if evaluator is None:
            backend = (
                "NCCL"
                if self._communicator is None
                else self._communicator.backend_for(self._device).name.upper()
            )
            segmented, program, _ = build_program(
                self._fusion,
                found,
                backend_name=backend,
                settings=self._settings,
            )
            queries.check_divisible(segmented.fusion, sizes)
            evaluator = self._by_class[found.key] = self._make_evaluator(
                program, self._communicator, device=self._device, settings=self._settings
            )
        return evaluator
