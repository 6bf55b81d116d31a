"""Shows the compiled kernels and the schedules of a definition, and measures runs.

A kernel has several compiled versions, for different memory layouts and sizes. To find the versions
that certain inputs use, `ProgramEvaluator.requests` goes through the program without running it,
and determines the shapes and strides of the tensors with which each kernel would be launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch

from fuser.frontend import implicit_inputs
from fuser.frontend.implicit_inputs import Autograd, Draws
from fuser.frontend.profiler import Profiler, profile_of_program
from fuser.frontend.program_cache import BoundProgram, CallCacheEntry, CallKey, Program
from fuser.ir.binding import Argument, Signature, signature_of
from fuser.ir.fusion import TensorView
from fuser.ir.scalar.constructors import Symbol
from fuser.ir.text.printer import scheduled_text
from fuser.kernels.executor import FusedKernelExecutor, scheduled_fusion, variant_of
from fuser.kernels.kernel_variant import Variant
from fuser.runtime.kernel_text import RT_FILES, preamble
from fuser.support import options
from fuser.support.errors import INSTEAD_OF_NVFUSER, FuserError, NotCompiledError
from fuser.support.inputs import device_of
from fuser.support.lru import Recent
from fuser.support.options import Settings
from hostir.ir.program import HostIrContainer
from multidevice.job.agreement import Prepared
from multidevice.job.communicator import Communicator
from multidevice.sharding.queries import Sharding

if TYPE_CHECKING:
    from hostir.profiling.profiler import Profiled
    from hostir.profiling.timeline import Trace
    from hostir.profiling.tracer import Asked

# A kernel of a program: the number of its group, its executor, and its variant.
Used = tuple[int, FusedKernelExecutor, Variant]


def kernels_of(bound: BoundProgram, inputs: Sequence[Argument]) -> list[Used]:
    """Returns the kernels that a program launches for inputs like these, in launch order.

    A kernel that is launched several times is listed once.
    """
    device = device_of(inputs, None)
    found: dict[tuple[int, int], Used] = {}
    for request in bound.evaluator.requests(inputs):
        executor, variant = request[0], variant_of(request, device)
        if variant is not None:
            used = bound.program.group_of(executor), executor, variant
            found.setdefault((id(executor), id(variant)), used)
    return list(found.values())


def cuda_text(bound: BoundProgram, inputs: Sequence[Argument], *, with_runtime: bool) -> str:
    """Returns the CUDA text of all kernels that a program launches for inputs like these.

    If `with_runtime` is True, the text begins with the device functions that the kernels call.
    """
    texts = [variant.kernel.source.text for _, _, variant in kernels_of(bound, inputs)]
    return "\n".join([preamble(RT_FILES), *texts] if with_runtime else texts)


def scheduled_ir(
    bound: BoundProgram, inputs: Sequence[Argument], *, tensor_transforms: bool
) -> str:
    """Returns text with the ops of each part of a program (kernel, library call or communication),
    in run order.

    For a kernel, these are the ops with the loops and threads that were chosen, on the tensors of
    one device. `tensor_transforms` adds the axes of each tensor, with their splits and merges.
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
    """Returns uninitialized inputs with the same shapes, strides, dtypes and alignments as those of
    an earlier call.

    With them, a program can be inspected after the caller's inputs are gone. `places` has one
    number per tensor: how many bytes its address lies behind the last address that is aligned for
    vector loads.
    """
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
    """Returns how many launches one run of a program has, by kind.

    The kinds are segments (parts that run as one unit), kernels, library_calls, aliases (views
    without any work) and collectives.
    """
    kinds = [s.kind for s in program.segmented.segments]
    return {
        "segments": len(kinds),
        "kernels": kinds.count("kernel"),
        "library_calls": kinds.count("library"),
        "aliases": kinds.count("alias"),
        "collectives": len(program.container.communications()),
    }


def _inputs_text(signature: Signature) -> str:
    """Returns the shapes and dtypes of a call's inputs as text, such as `float32[4, 8] and a
    float`.
    """

    def text(row: tuple[Any, ...]) -> str:
        if len(row) == 2:
            return f"a {row[0].__name__}" if row[1] is None else repr(row[1])
        shape, strides, dtype, device = row[:4]
        return f"{str(dtype).removeprefix('torch.')}{list(shape)} (strides {strides}, {device})"

    return " and ".join(map(text, signature)) or "none"


class _MissingName:
    """A class attribute that takes the place of a name of nvFuser which this project does not have.

    Reading it, as in `fd.fec.name`, raises `AttributeError` with the name to use instead. There is
    one such attribute per missing name, because a method `__getattr__` would make every use of an
    attribute in `execute` slower.
    """

    def __init__(self, name: str, advice: str) -> None:
        self._name, self._advice = name, advice

    def __get__(self, cache: Inspection | None, owner: type) -> NoReturn:
        text = f"{owner.__name__!r} object has no attribute {self._name!r}: {self._advice}"
        raise AttributeError(text, name=self._name, obj=cache)


class Inspection:
    """Base class of the cache of a definition's programs: methods that return facts about the
    programs, without running them.
    """

    _by_signature: Recent[CallKey, CallCacheEntry]
    _recent: Recent[Communicator, BoundProgram]
    _ran: CallCacheEntry | None
    _settings: Settings
    _free: frozenset[int]
    _autograd: Autograd

    if TYPE_CHECKING:

        def _completed(self, inputs: Iterable[object]) -> list[Argument]: ...
        def _bound_to(self, given: Sequence[Argument]) -> BoundProgram | None: ...
        def _sizes_of(self, given: Sequence[Argument]) -> dict[Symbol, int]: ...

    def is_compiled(self, inputs: Sequence[Argument], device: int = 0) -> bool:
        """Returns whether a run on inputs like these would compile nothing. `device` has no effect.

        Inputs of other sizes may use the same program and kernels. False for inputs that the
        definition does not accept.
        """
        del device
        try:
            self._compiled_for(inputs)
        except FuserError:
            return False
        return True

    def get_cuda_kernel(
        self, inputs: Sequence[Argument], intrinsic_code: bool = False, device: int = 0
    ) -> str:
        """Returns the CUDA text of all kernels that the program launches for inputs like these.
        `device` has no effect.

        If `intrinsic_code` is True, the text begins with the device functions that the kernels
        call.

        Raises:
            NotCompiledError: a run on such inputs would compile a kernel.
        """
        bound, given = self._compiled_for(inputs)
        return cuda_text(bound, given, with_runtime=intrinsic_code)

    def get_scheduled_ir(
        self, inputs: Sequence[Argument], tensor_transforms: bool = False, device: int = 0
    ) -> str:
        """Returns text with the ops of each part of the program (kernel, library call or
        communication) for inputs like these. `device` has no effect.

        For a kernel, these are the ops with the loops and threads that were chosen.
        `tensor_transforms` adds the axes of each tensor, with their splits and merges.

        Raises:
            NotCompiledError: a run on such inputs would compile a kernel.
        """
        bound, given = self._compiled_for(inputs)
        return scheduled_ir(bound, given, tensor_transforms=tensor_transforms)

    def get_most_recent_scheduled_ir(self, tensor_transforms: bool = False) -> str:
        """Returns text with the ops of each part of the program (kernel, library call or
        communication), for the inputs of the last call.

        The last call's inputs may no longer exist, so tensors of the same sizes are allocated for
        the inspection. `get_scheduled_ir` describes the text and `tensor_transforms`.

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
        """Returns the cache entry of an earlier call whose inputs had the same shapes, strides,
        dtypes and devices as `inputs`, or None.

        If there are several such calls, a call without options is preferred.
        """
        signature, here = signature_of(self._completed(inputs), self._free), Communicator.instance()
        call = self._by_signature.recall((here, self._settings, None, signature))
        like = (c for k, c in self._by_signature.items() if (k[0], k[-1]) == (here, signature))
        return call or next(like, None)

    def _program_of(self, inputs: Sequence[Argument]) -> tuple[BoundProgram, Sequence[Argument]]:
        """Returns the program that a run on `inputs` would use, and the inputs of the program.

        Raises:
            NotCompiledError: such a run would build a program.
        """
        call = self._call_like(inputs)
        given = self._autograd.resolved(self._completed(inputs))
        bound = self._bound_to(given) if call is None else call.bound
        if bound is None:
            raise self._not_compiled(given)
        return bound, given

    def _compiled_for(self, inputs: Sequence[Argument]) -> tuple[BoundProgram, Sequence[Argument]]:
        """Returns the program that a run on `inputs` would use, and the inputs of the program, if
        its kernels for these sizes are compiled, too.

        Raises:
            NotCompiledError: a run on `inputs` would build a program or compile a kernel.
        """
        bound, given = self._program_of(inputs)
        if self._call_like(inputs) is None:
            bound.program.check_divisible(self._sizes_of(given))
            if not all(variant.compiled for _, _, variant in kernels_of(bound, given)):
                raise self._not_compiled(given)
        return bound, given

    def _not_compiled(self, given: Sequence[Argument]) -> NotCompiledError:
        """Returns the error for inputs for which nothing is compiled.

        The message has these inputs and those of the last run.
        """
        ran = next((key[-1] for key, c in self._by_signature.items() if c is self._ran), None)
        last = "" if ran is None else f": the last run had {_inputs_text(ran)}"
        asked = f", asked for {_inputs_text(signature_of(given, self._free))}" if last else ""
        return NotCompiledError(
            f"Fusion is not compiled! Execute it with inputs like these first{last}{asked}"
        )

    def program_like(self, inputs: Sequence[Argument]) -> Program:
        """Returns the program that earlier calls compiled for inputs like these.

        Raises:
            NotCompiledError: no program for such inputs has run.
        """
        return self._program_of(inputs)[0].program

    def host_program(self) -> HostIrContainer:
        """Returns the host program (the list of launches, communications and allocations) of the
        most recent run.

        Raises:
            NotCompiledError: no program has run.
        """
        return self._last().program.container

    def statistics(self) -> dict[str, int]:
        """Returns how many launches one run of the program that ran last has, by kind.

        The kinds are segments (parts that run as one unit), kernels, library_calls, aliases (views
        without any work) and collectives.

        Raises:
            NotCompiledError: no program has run.
        """
        return launches_of(self._last().program)

    def get_output_shardings(self, inputs: Sequence[Argument] | None = None) -> list[Sharding]:
        """Returns, for inputs like these, how each output is distributed over devices. Outputs that
        only update an input are left out.

        If `inputs` is None, the shardings are those of the most recent run. An output without a
        mesh has a sharding over an empty mesh. If no tensor of the program has a mesh, the list is
        empty. The shardings are those that users and propagation have chosen, without the divisions
        into steps that are added to overlap computation and communication.

        Raises:
            NotCompiledError: no such program has run.
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


for _name, _advice in INSTEAD_OF_NVFUSER["fd.fec"].items():
    setattr(Inspection, _name, _MissingName(_name, _advice))


# ----------------------------------------------------------------------
# Runs with measurements: traces and profiles.

T = TypeVar("T", "Trace", "Profiled")
_PROFILED = "// profiled"


class Watching:
    """Base class of the cache of a definition's programs: methods that run a program with
    measurements.
    """

    _draws: Draws | None
    _numbers: list[int]
    _autograd: Autograd
    _fusion_id: int

    if TYPE_CHECKING:
        _find: Callable[..., tuple[CallCacheEntry, Sequence[Argument], tuple[int, ...] | None]]
        _look: Callable[..., tuple[Iterable[object], Callable[[Callable[[], Any]], Any]]]
        _has_run: Callable[[CallCacheEntry], None]
        _cut: Callable[[CallCacheEntry, Sequence[torch.Tensor]], list[torch.Tensor]]

    def prepare_trace(
        self,
        inputs: Iterable[object],
        asked: Asked,
        device: int | str | torch.device | None = None,
        _enable_options: Sequence[str] = options.NONE,
        _disable_options: Sequence[str] = options.NONE,
    ) -> Prepared[Trace]:
        """Prepares a traced run: checks the inputs and finds the program, but launches nothing.

        Returns this rank's run signature, the scalar inputs, and the function that runs the program
        and returns the trace. The run signature describes the program and its sizes. All ranks
        compare their run signatures and scalar inputs before they run. `asked` are the settings of
        the trace.
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
        """Prepares a profiled run: checks the inputs and finds the program, but launches nothing.

        Returns this rank's run signature, the scalar inputs, and the function that runs the
        program. The run signature describes the program and its sizes. All ranks compare their run
        signatures and scalar inputs before they run. After the run, `profiler` has the profile.

        Raises:
            OtherEntranceError: `profiler` is for `manual_execute`.
        """
        from hostir.profiling.profiler import take_profile

        has_cupti = profiler.begin(by_hand=False)
        given = inputs, device, enable, disable
        call, (run_signature, numbers, watch) = self._prepare_watched(
            take_profile, has_cupti, _PROFILED, *given
        )

        def run() -> list[torch.Tensor]:
            taken = watch()
            profiler.take(profile_of_program(taken, call.bound.program, self._fusion_id))
            return taken.outputs

        return run_signature, numbers, run

    def _prepare_watched(
        self,
        take: Callable[..., T],
        asked: object,
        line: str,
        inputs: Iterable[object],
        device: int | str | torch.device | None,
        *options: Sequence[str],
    ) -> tuple[CallCacheEntry, Prepared[T]]:
        """Prepares a measured run: checks the inputs and finds the program, but launches nothing.

        Returns the call's cache entry; and this rank's run signature (which describes the program
        and its sizes), the scalar inputs, and the function that runs the program.

        The function `take` measures the run, with the settings `asked`. `line` is a text that names
        the measurement and its settings. It is added to the run signature, which all ranks compare:
        if only some ranks measure the run, every rank raises an error.
        """
        inputs, begin = self._look(inputs, device)
        call, given, _ = self._find(Communicator.instance(), inputs, device, *options)
        (first, *rest), fixed = call.run_signature.parts, call.run_signature.fixed
        run_signature = replace(call.run_signature, parts=(first, line, *rest), fixed=fixed + 1)
        numbers = implicit_inputs.compared_numbers(given, self._numbers, device, self._draws)

        def run() -> T:
            from hostir.profiling.tracer import watched_as_agreed

            self._has_run(call)
            resolved = self._autograd.resolved(given)
            taken = watched_as_agreed(call.bound.evaluator, take, resolved, asked)
            outputs = self._cut(call, taken.outputs)
            return replace(taken, outputs=type(taken.outputs)(outputs))

        return call, (run_signature, numbers, begin(run))
