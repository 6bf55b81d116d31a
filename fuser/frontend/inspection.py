"""Texts of a compiled definition: its kernels and the scheduled IR of its segments; watched runs.

The kernels are those for one input class. A walk through the program without data
(`ProgramEvaluator.requests`) finds the tensors with which each kernel is launched, and so its
variant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fuser.frontend import implicit_inputs
from fuser.frontend.implicit_inputs import Autograd, Draws
from fuser.frontend.profiler import Profiler, profile_of_program
from fuser.frontend.program_cache import BoundProgram, CallCacheEntry, CallKey, Program
from fuser.ir.binding import Argument, Signature, signature_of
from fuser.ir.fusion import TensorView
from fuser.ir.text.printer import scheduled_text
from fuser.kernels.executor import FusedKernelExecutor, scheduled_fusion, variant_of
from fuser.kernels.kernel_variant import Variant
from fuser.runtime.kernel_text import RT_FILES, preamble
from fuser.support import options
from fuser.support.errors import NotCompiledError
from fuser.support.inputs import device_of
from fuser.support.lru import Recent
from fuser.support.options import Settings
from hostir.ir.program import HostIrContainer
from multidevice.job.agreement import Prepared
from multidevice.job.communicator import Communicator
from multidevice.sharding.queries import Sharding

if TYPE_CHECKING:
    from hostir.profiling.timeline import Trace
    from hostir.profiling.tracer import Asked

# A kernel of a program: the number of its group, its executor, and its variant.
Used = tuple[int, FusedKernelExecutor, Variant]


def kernels_of(bound: BoundProgram, inputs: Sequence[Argument]) -> list[Used]:
    """Returns the kernels that a program launches for inputs like these, each once, in launch
    order."""
    device = device_of(inputs, None)
    found: dict[tuple[int, int], Used] = {}
    for request in bound.evaluator.requests(inputs):
        executor, variant = request[0], variant_of(request, device)
        if variant is not None:
            used = bound.program.group_of(executor), executor, variant
            found.setdefault((id(executor), id(variant)), used)
    return list(found.values())


def cuda_text(bound: BoundProgram, inputs: Sequence[Argument], *, with_runtime: bool) -> str:
    """Returns the text of all kernels for inputs like these; `with_runtime` puts the device
    functions that they call before it."""
    texts = [variant.kernel.source.text for _, _, variant in kernels_of(bound, inputs)]
    return "\n".join([preamble(RT_FILES), *texts] if with_runtime else texts)


def scheduled_ir(
    bound: BoundProgram, inputs: Sequence[Argument], *, tensor_transforms: bool
) -> str:
    """Returns the scheduled fusion of each segment, in run order.

    For a kernel it is the fusion of the local shards, for a library call or a communication its
    ops.
    """
    used, device = kernels_of(bound, inputs), device_of(inputs, None)
    texts: list[str] = []
    for segment in bound.program.segmented.segments:
        if segment.kind != "kernel":
            tensors = [v for v in (*segment.inputs, *segment.outputs) if isinstance(v, TensorView)]
            given = segment.inputs, segment.outputs, segment.exprs
            texts.append(scheduled_text(*given, tensors if tensor_transforms else ()))
            continue
        for number, executor, variant in used:
            if number == segment.number:
                fusion = scheduled_fusion(executor, variant, device)
                given = fusion.inputs, fusion.outputs, fusion.used_exprs()
                texts.append(scheduled_text(*given, fusion.tensors() if tensor_transforms else ()))
    return "\n".join(texts)


def stand_ins(signature: Signature, places: Sequence[int]) -> list[Argument]:
    """Returns uninitialized inputs with a signature and with these alignments (byte offsets in a
    vector)."""
    made: list[Argument] = []
    offsets = iter(places or [0] * len(signature))
    for row in signature:
        if len(row) == 2:
            kind, value = row
            made.append(kind(1) if value is None else value)
            continue
        shape, strides, dtype, device = row[:4]
        ends = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
        offset = 0 if 0 in shape else next(offsets) // dtype.itemsize
        storage = torch.empty(offset + 1 + sum(ends), dtype=dtype, device=device)
        made.append(storage.as_strided(shape, strides, offset))
    return made


def launches_of(program: Program) -> dict[str, int]:
    """Returns the launches of a run by kind: segments, kernels, library_calls, aliases,
    collectives."""
    kinds = [s.kind for s in program.segmented.segments]
    return {
        "segments": len(kinds),
        "kernels": kinds.count("kernel"),
        "library_calls": kinds.count("library"),
        "aliases": kinds.count("alias"),
        "collectives": len(program.container.communications()),
    }


class Inspection:
    """The methods of an executor cache that answer questions about its programs."""

    _by_signature: Recent[CallKey, CallCacheEntry]
    _recent: Recent[Communicator, BoundProgram]
    _ran: CallCacheEntry | None
    _settings: Settings
    _free: frozenset[int]
    _autograd: Autograd

    if TYPE_CHECKING:

        def _completed(self, inputs: Iterable[object]) -> list[Argument]: ...

    def is_compiled(self, inputs: Sequence[Argument], device: int = 0) -> bool:
        """Returns whether a program for inputs like these exists."""
        del device
        return self._call_like(inputs) is not None

    def get_cuda_kernel(
        self, inputs: Sequence[Argument], intrinsic_code: bool = False, device: int = 0
    ) -> str:
        """Returns the CUDA text of all kernels for inputs like these.

        `intrinsic_code` puts the device functions that they call before it.

        Raises:
            NotCompiledError: no such program has run.
        """
        bound, given = self._program_of(inputs)
        return cuda_text(bound, given, with_runtime=intrinsic_code)

    def get_scheduled_ir(
        self, inputs: Sequence[Argument], tensor_transforms: bool = False, device: int = 0
    ) -> str:
        """Returns the scheduled IR of each segment for inputs like these.

        `tensor_transforms` adds the domains of the tensors.

        Raises:
            NotCompiledError: no such program has run.
        """
        bound, given = self._program_of(inputs)
        return scheduled_ir(bound, given, tensor_transforms=tensor_transforms)

    def get_most_recent_scheduled_ir(self, tensor_transforms: bool = False) -> str:
        """Returns `get_scheduled_ir` for the inputs of the last call. It allocates inputs of their
        sizes.

        Raises:
            NotCompiledError: no program has run.
        """
        call = self._ran
        found = (key[-1] for key, one in self._by_signature.items() if one is call)
        signature = None if call is None else next(found, None)
        if call is None or signature is None:
            raise NotCompiledError("Fusion is not compiled! Execute it first")
        given = stand_ins(signature, next(reversed(call.known.plans), ()))
        return scheduled_ir(call.bound, given, tensor_transforms=tensor_transforms)

    def _call_like(self, inputs: Sequence[Argument]) -> CallCacheEntry | None:
        """Returns the cache entry of a call with inputs like these, preferably one without
        options."""
        signature, here = signature_of(self._completed(inputs), self._free), Communicator.instance()
        call = self._by_signature.recall((here, self._settings, None, signature))
        like = (c for k, c in self._by_signature.items() if (k[0], k[-1]) == (here, signature))
        return call or next(like, None)

    def _program_of(self, inputs: Sequence[Argument]) -> tuple[BoundProgram, Sequence[Argument]]:
        call = self._call_like(inputs)
        if call is None:
            raise NotCompiledError(
                "Fusion is not compiled! Execute it with inputs like these first"
            )
        return call.bound, self._autograd.resolved(self._completed(inputs))

    def program_like(self, inputs: Sequence[Argument]) -> Program:
        """Returns the program for inputs like these. Raises `NotCompiledError` if none has run."""
        return self._program_of(inputs)[0].program

    def host_program(self) -> HostIrContainer:
        """Returns the host program of the most recent run. Raises `NotCompiledError` if none has
        run."""
        return self._last().program.container

    def statistics(self) -> dict[str, int]:
        """Returns the launches of a run of the most recent program, by kind: segments, kernels,
        library_calls, aliases, collectives.

        Raises `NotCompiledError` if none has run.
        """
        return launches_of(self._last().program)

    def get_output_shardings(self, inputs: Sequence[Argument] | None = None) -> list[Sharding]:
        """Returns the sharding of every visible output, for inputs like these or for the most
        recent run.

        An output without a mesh has a sharding over an empty mesh. The list is empty if no tensor
        has a mesh. The shardings are those that users and propagation have chosen, without streams
        that automatic overlap adds.

        Raises `NotCompiledError` if no such program has run.
        """
        program = self._last().program if inputs is None else self.program_like(inputs)
        return program.output_shardings

    def _last(self) -> BoundProgram:
        # After a simulation has ended, its programs can still be inspected.
        latest = next(reversed(self._recent.values()), None)
        recent = self._recent.get(Communicator.instance(), latest)
        if recent is None:
            raise NotCompiledError("the fusion has not run yet: execute it first")
        return recent


# ----------------------------------------------------------------------
# Runs with measurements: traces and profiles.

T = TypeVar("T")
_PROFILED = "// profiled"


class Watching:
    """The methods of an executor cache that run a program with measurements."""

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
        """Returns the run signature of this rank's trace, its numbers, and the function that runs.

        Launches nothing.
        """
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
        """Returns the run signature of this rank's profiled run, its numbers, and the function that
        runs.

        After the run, `profiler` has the profile. Raises `OtherEntranceError` if `profiler` is for
        `manual_execute`.
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
        """Returns the call's cache entry, the run signature, and how `take` measures the run.

        The run signature contains `line`. A rank that executes without measurements, or with
        another line, therefore has a different signature, which is an error on all ranks.
        """
        inputs, begin = self._look(inputs, device)
        call, given, _ = self._find(Communicator.instance(), inputs, device, *options)
        (first, *rest), fixed = call.claim.parts, call.claim.fixed
        claim = replace(call.claim, parts=(first, line, *rest), fixed=fixed + 1)
        numbers = implicit_inputs.claimed(given, self._numbers, device, self._draws)

        def run() -> T:
            from hostir.profiling.tracer import watched_as_agreed

            self._has_run(call)
            resolved = self._autograd.resolved(given)
            return watched_as_agreed(call.bound.evaluator, take, resolved, asked)

        return call, (claim, numbers, begin(run))
