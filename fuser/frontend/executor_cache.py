"""FusionExecutorCache: from a fusion and concrete inputs to a host program that runs.

Three levels: the signature of the inputs (shapes, strides, dtypes, devices: one dictionary look-up
in the steady state), the input class (what changes the program: dtypes, memory layouts, concretized
structure), and, below, the kernel executors' own caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fuser import options
from fuser.errors import FuserError
from fuser.frontend.input_class import InputClass, classify, specialise
from fuser.ir.binding import Argument, free_inputs, signature_of
from fuser.ir.fusion import Fusion
from fuser.ir.text import fusion_text
from fuser.options import Settings
from fuser.passes import fusion_passes
from fuser.passes.concretize import concretize, refined_sizes
from fuser.passes.segment import SegmentedFusion, segment_fusion
from fuser.schedule.registry import find_scheduler
from hostir.bind import InputBinder
from hostir.container import HostIrContainer
from hostir.digest import (
    claim_of,
    communications_text,
    first_line,
    input_names,
)
from hostir.evaluate import HostIrEvaluator
from hostir.host_passes import run_passes
from hostir.lower import lower
from multidevice import sharding
from multidevice.agreement import Claim, Prepared, run_agreed
from multidevice.communicator import Communicator
from multidevice.localize import localize
from multidevice.placement import memory_order
from multidevice.sharding_passes import shard_fusion

if TYPE_CHECKING:
    from multidevice.sharding import Sharding


@dataclass
class Runtime:
    """One program for one input class."""

    segmented: SegmentedFusion
    program: HostIrContainer
    evaluator: HostIrEvaluator
    # What it sends and receives: the part of it that the ranks compare before they run.
    communications: str


class FusionExecutorCache:
    """Owns a fusion and the programs made from it; running never changes the fusion."""

    def __init__(self, fusion: Fusion, fusion_id: int = 0, auto_schedule: bool = True) -> None:
        self._fusion = fusion
        self._fusion_id = fusion_id
        self._auto_schedule = auto_schedule
        self._binder = InputBinder(fusion)
        self._free = free_inputs(fusion)
        self._settings = options.settings()
        # Both keys start with the communicator (simulated ranks may share one definition) and the
        # options of the call.
        self._by_signature: dict[object, tuple[Runtime, Claim]] = {}
        self._by_class: dict[object, Runtime] = {}
        self._recent: dict[Communicator, Runtime] = {}
        self.devices = sharding.requested_devices(fusion)
        # What the ranks compare of the definition: only several ranks need it.
        self._text = fusion_text(fusion) if self.devices else ""
        self._names = input_names(fusion.inputs, fusion.exprs)
        self._numbers = sorted(self._free) if self.devices else []

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
        return run_agreed(
            Communicator.instance(),
            self.devices,
            lambda: self.prepare(inputs, device, _enable_options, _disable_options),
        )

    def prepare(
        self,
        inputs: Sequence[Argument],
        device: int | str | torch.device | None = None,
        _enable_options: Sequence[str] = (),
        _disable_options: Sequence[str] = (),
    ) -> Prepared[list[torch.Tensor]]:
        """Return what this rank claims to run on `inputs`, and how; nothing is launched."""
        communicator = Communicator.instance()
        settings = self._settings
        if _enable_options != () or _disable_options != ():
            settings = options.settings(_enable_options, _disable_options)
        key = (communicator, settings, signature_of(inputs, self._free))
        found = self._by_signature.get(key)
        if found is None:
            found = self._find_or_build(inputs, device, communicator, settings)
            self._by_signature[key] = found
        runtime, claim = found

        def run() -> list[torch.Tensor]:
            self._recent[communicator] = runtime
            return runtime.evaluator.run(inputs, signature=key)

        return claim, tuple(inputs[i] for i in self._numbers), run

    def _find_or_build(
        self,
        inputs: Sequence[Argument],
        device: int | str | torch.device | None,
        communicator: Communicator,
        settings: Settings,
    ) -> tuple[Runtime, Claim]:
        sharding.check_world(self._fusion, communicator.size())
        sharding.check_streams(self._fusion)
        where = device_of(inputs, device)
        values = self._binder.bind(inputs, where)
        sizes = {symbol: v for symbol, v in values.items() if isinstance(v, int)}
        input_class = classify(self._fusion, inputs, sizes, where)
        key = (communicator, settings, input_class.key)
        runtime = self._by_class.get(key)
        if runtime is None:
            runtime = self._build(input_class, communicator, where, settings)
            self._by_class[key] = runtime
        sharding.check_divisible(runtime.segmented.fusion, refined_sizes(sizes))
        runtime.evaluator.prepare(inputs)
        # Ranks that run with different options disagree, as with different programs.
        parts = (f"// options: {settings}", self._text, runtime.communications)
        loose = {self._fusion.inputs[i] for i in self._free}
        fixed = {s: v for s, v in sizes.items() if s not in loose}
        claim = claim_of(parts, self._names, inputs, fixed, where=first_line(runtime.program))
        return runtime, claim

    def _build(
        self,
        input_class: InputClass,
        communicator: Communicator,
        device: torch.device,
        settings: Settings,
    ) -> Runtime:
        def dump(name: str, text: Callable[[], str]) -> None:
            if options.dump_enabled(name) and communicator.rank() == 0:
                print(text())

        fusion, _ = concretize(self._fusion, input_class.sizes)
        specialise(fusion, input_class)
        dump("fusion_ir_concretized", fusion.print_math)
        fusion_passes.run_passes(fusion)
        shard_fusion(fusion)
        dump("fusion_ir_preseg", lambda: fusion_text(fusion))
        segmented = segment_fusion(
            fusion,
            find_scheduler=_find_scheduler,
            local_shape=sharding.local_extents,
            memory_order=memory_order,
        )
        program = run_passes(
            lower(segmented, backend_name=communicator.backend_for(device).name.upper())
        )
        evaluator = HostIrEvaluator(program, communicator, device=device, settings=settings)
        dump("segmented_fusion", segmented.describe)
        dump("host_ir", lambda: str(program))
        return Runtime(segmented, program, evaluator, communications_text(program))

    # ------------------------------------------------------------ looking inside
    def is_compiled(self, inputs: Sequence[Argument], device: int = 0) -> bool:
        """Return whether a program for inputs like these exists."""
        del device
        key = (Communicator.instance(), self._settings, signature_of(inputs, self._free))
        return key in self._by_signature

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
            "collectives": len(self._last().program.communications()),
        }

    def get_output_shardings(self) -> list[Sharding]:
        """Return the sharding of every visible output; [] when nothing has a mesh."""
        fusion = self._last().segmented.fusion
        found = (sharding.sharding_of(o) for o in fusion.outputs if not fusion.is_hidden(o))
        return [s for s in found if s is not None]

    def _last(self) -> Runtime:
        # After a simulation has ended, its programs can still be looked at.
        latest = next(reversed(self._recent.values()), None)
        recent = self._recent.get(Communicator.instance(), latest)
        if recent is None:
            raise FuserError("the fusion has not run yet: execute it first")
        return recent


def device_of(inputs: Sequence[Argument], device: int | str | torch.device | None) -> torch.device:
    """Return where the program runs: `device`, else that of the first tensor input (not a 0-dim CPU
    tensor among CUDA ones), else the CPU."""
    if device is not None:
        return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    devices = [v.device for v in inputs if isinstance(v, torch.Tensor)]
    return next((d for d in devices if d.type == "cuda"), devices[0] if devices else _CPU)


def _find_scheduler(fusion: Fusion) -> str | None:
    return find_scheduler(localize(fusion)[0])


_CPU = torch.device("cpu")
