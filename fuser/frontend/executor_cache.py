"""FusionExecutorCache: from a fusion and concrete inputs to a host program that runs.

Three levels: the signature of the inputs (shapes, strides, dtypes, devices: one dictionary look-up
in the steady state), the input class (what changes the program: dtypes, memory layouts, concretized
structure), and, below, the kernel executors' own caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

import multidevice.sharding as sharding
from fuser import options
from fuser.errors import FuserError, InputError
from fuser.frontend.input_class import InputClass, classify, specialise
from fuser.ir.fusion import Fusion
from fuser.ir.nodes import TensorOp
from fuser.passes import pipeline as fusion_passes
from fuser.passes.concretize import concretize
from fuser.schedule.registry import find_scheduler
from fuser.segment import SegmentedFusion, segment_fusion
from hostir import binding
from hostir.container import HostIrContainer
from hostir.digest import digest_of
from hostir.evaluate import HostIrEvaluator
from hostir.lower import lower
from hostir.pipeline import run_passes
from multidevice.communicator import Communicator
from multidevice.pipeline import shard_fusion

if TYPE_CHECKING:
    from multidevice.sharding import Sharding

Argument = torch.Tensor | bool | int | float


@dataclass
class Runtime:
    """One program for one input class."""

    segmented: SegmentedFusion
    program: HostIrContainer
    evaluator: HostIrEvaluator


class FusionExecutorCache:
    """Owns a fusion and the programs made from it; running never changes the fusion."""

    def __init__(self, fusion: Fusion, fusion_id: int = 0, auto_schedule: bool = True) -> None:
        self._fusion = fusion
        self._fusion_id = fusion_id
        self._auto_schedule = auto_schedule
        self._by_signature: dict[object, Runtime] = {}
        self._by_class: dict[object, Runtime] = {}
        self._recent: Runtime | None = None
        self._devices = sharding.requested_number_of_devices(fusion)

    def fusion(self) -> Fusion:
        """Return the fusion as defined."""
        return self._fusion

    # ------------------------------------------------------------ running
    def execute(
        self,
        inputs: Sequence[Argument],
        *,
        device: int | str | torch.device | None = None,
        _enable_options: Sequence[str] = (),
        _disable_options: Sequence[str] = (),
    ) -> list[torch.Tensor]:
        """Run on `inputs`; see `FusionDefinition.execute`."""
        communicator = Communicator.instance()
        runtime: Runtime | None = None
        error: FuserError | None = None
        try:
            options.check_call_options(_enable_options, _disable_options)
            signature = binding.signature(inputs)
            runtime = self._by_signature.get(signature)
            if runtime is None:
                runtime = self._find_or_build(inputs, device, communicator)
                self._by_signature[signature] = runtime
        except FuserError as found:
            error = found
        self._agree(communicator, runtime, error)
        assert runtime is not None
        self._recent = runtime
        return runtime.evaluator.run(inputs)

    def _agree(
        self, communicator: Communicator, runtime: Runtime | None, error: FuserError | None
    ) -> None:
        """Let every rank of a multi-device program know of an error on any of them."""
        if self._devices <= 1 or communicator.size() <= 1:
            if error is not None:
                raise error
            return
        if runtime is None:
            communicator.agree(error)
            return
        communicator.agree_on_text(
            runtime.program.full_text_cached(), digest=digest_of(runtime.program), error=error
        )

    def _find_or_build(
        self,
        inputs: Sequence[Argument],
        device: int | str | torch.device | None,
        communicator: Communicator,
    ) -> Runtime:
        if self._devices > communicator.size():
            raise InputError(
                f"the fusion's meshes name device {self._devices - 1}, but there are only "
                f"{communicator.size()} rank(s)"
            )
        sizes = binding.bind_inputs(self._fusion, inputs)
        where = binding.device_of(inputs, device)
        input_class = classify(self._fusion, inputs, sizes, where)
        runtime = self._by_class.get(input_class.key)
        if runtime is None:
            runtime = self._build(input_class, communicator, where)
            self._by_class[input_class.key] = runtime
        return runtime

    def _build(
        self, input_class: InputClass, communicator: Communicator, device: torch.device
    ) -> Runtime:
        fusion, _ = concretize(self._fusion, input_class.sizes)
        specialise(fusion, input_class)
        fusion_passes.run_passes(fusion)
        shard_fusion(fusion)
        segmented = segment_fusion(
            fusion,
            is_resharding=_is_resharding,
            find_scheduler=find_scheduler,
            local_shape=sharding.local_shape,
        )
        program = run_passes(
            lower(segmented, backend_name=communicator.backend_for(device).name.upper())
        )
        evaluator = HostIrEvaluator(program, communicator, device=device)
        if options.dump_enabled("host_ir") and communicator.rank() == 0:
            print(program)
        return Runtime(segmented, program, evaluator)

    # ------------------------------------------------------------ looking inside
    def is_compiled(self, inputs: Sequence[Argument], device: int = 0) -> bool:
        """Return whether a program for inputs like these exists."""
        del device
        return binding.signature(inputs) in self._by_signature

    def host_program(self) -> HostIrContainer:
        """Return the program of the most recent run."""
        return self._last().program

    def statistics(self) -> dict[str, int]:
        """Return launches per execution of the most recent program, by kind of segment.

        Keys: segments, kernels, library_calls, aliases, collectives.
        """
        kinds = [s.kind for s in self._last().segmented.segments]
        return {
            "segments": len(kinds),
            "kernels": kinds.count("kernel"),
            "library_calls": kinds.count("library"),
            "aliases": kinds.count("alias"),
            "collectives": self._last().program.count_communications(),
        }

    def get_output_shardings(self) -> list[Sharding]:
        """Return the sharding of every visible output; [] when nothing has a mesh."""
        fusion = self._last().segmented.fusion
        if all(tv.mesh is None for tv in fusion.tensors()):
            return []
        return [sharding.Sharding(o) for o in fusion.outputs if not fusion.is_hidden(o)]

    def _last(self) -> Runtime:
        if self._recent is None:
            raise FuserError("the fusion has not run yet: execute it first")
        return self._recent


def _is_resharding(op: TensorOp) -> bool:
    return sharding.is_resharding(op)
