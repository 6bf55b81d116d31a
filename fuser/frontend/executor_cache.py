"""FusionExecutorCache: finds or compiles the host program (the list of launches, communications and
allocations) for a fusion and inputs, and runs it.

There are three levels of caches, all bounded:

1. By the signature of the inputs: shapes, strides, dtypes and devices. A repeated call needs only
   one dictionary look-up.
2. By the input class: everything about the inputs that changes the program, but not their exact
   sizes. The class has dtypes, memory layouts, and decisions that depend on sizes, such as which
   axes a reshape merges. The program of a class is in the cache of the process (`program_cache`).
3. In the kernel executors: the compiled versions of each kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.autograd import forward_ad
from torch.autograd import profiler as torch_profiler

from fuser.frontend import implicit_inputs
from fuser.frontend.implicit_inputs import Autograd, Draws, FloatSizes, HostScalars, T
from fuser.frontend.inspection import Inspection, Watching
from fuser.frontend.planned_job import Job, on_mesh, planned_job, stand_ins
from fuser.frontend.profiler import PROFILERS, profiler_here
from fuser.frontend.program_cache import (
    MAX_DECLINED,
    PROGRAMS,
    BoundProgram,
    CallCacheEntry,
    CallKey,
    Program,
    no_fast_path,
    status_lines,
    why_never,
)
from fuser.frontend.uneven_shards import Reread, SymbolicShards, UnevenShards
from fuser.ir.binding import (
    Argument,
    Contents,
    free_inputs,
    signature_of,
)
from fuser.ir.canonical_form import without_names
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.op import Op, op_text
from fuser.ir.ops.nodes import BinaryOp, Contraction, FullOp, TernaryOp, UnaryOp
from fuser.ir.scalar.constructors import Const, Number, Symbol
from fuser.ir.text.printer import fusion_text
from fuser.support import dumps, options, progress
from fuser.support.arguments import checked
from fuser.support.device import VECTOR_BYTES
from fuser.support.dumps import Dump
from fuser.support.errors import FuserError, user_code, warn
from fuser.support.inputs import device_of, flatten
from fuser.support.locks import uncollected
from fuser.support.lru import Recent
from fuser.support.options import EFFECTS, Settings
from fuser.support.record import record
from hostir.analysis.sliced_inputs import sliced_inputs
from hostir.cost.machine_model import H200, Machine, find_machine, machine_of
from hostir.cost.overlap_search import FORCED, MARGIN, NoOverlap, Overlaps
from hostir.ir.ops import PEER_COPIES
from hostir.ir.printer import NOTES, dumped
from hostir.ir.program import HostIrContainer
from hostir.lowering.input_class import Classifier, InputClass, size_symbols
from hostir.lowering.params import DEFAULT, LowerParams
from hostir.lowering.pipeline import Built, build_program
from hostir.runtime.agreement import communications_text, input_names, run_signature_of
from hostir.runtime.evaluator import ProgramEvaluator
from hostir.runtime.inputs import InputBinder
from hostir.runtime.native_runner import Steady, Surroundings
from hostir.runtime.plan import Memory, memory_of
from hostir.runtime.plan_cache import SignatureEntry
from multidevice.job.agreement import Extents, Prepared, RunSignature
from multidevice.job.communicator import Communicator, current_communicator, run_agreed
from multidevice.sharding import queries
from multidevice.sharding.queries import has_streams, requested_devices

if TYPE_CHECKING:
    from hostir.cost.rank_program import JobDescription

# Limits of the caches of one definition: signatures; signatures that callers use in turns;
# programs bound to a rank.
MAX_SIGNATURES = 256
MAX_TURNS = 16
MAX_BOUND = 64
# The largest number of versions of a definition with constant extents.
MAX_VERSIONS = 64
# The values of symbolic extents; the shapes of the inputs of a call.
Constants = tuple[tuple[Symbol, int], ...]
Shapes = tuple[tuple[int, ...], ...]
# Communicator, options and input class of a program.
ClassKey = tuple[Communicator, Settings, Hashable]
# Returns the description of a device's machine, or None.
MachineAt = Callable[[torch.device], Machine | None]


class FusionExecutorCache(Watching, Inspection):
    """The compiled programs of one fusion, one program for each class of inputs.

    Two lists of inputs belong to the same class if they agree in everything on which the program
    depends, such as dtypes and memory layouts. Running never changes the fusion.
    """

    @partial(checked, name="FusionExecutorCache")
    def __init__(
        self,
        fusion: Fusion,
        fusion_id: int = 0,
        auto_schedule: bool = True,
        *,
        params: LowerParams = DEFAULT,
        number_of_streams: int = 4,
    ) -> None:
        self._defined = fusion
        fusion.is_taken = True
        self._scalars = HostScalars.of(fusion)
        fusion = fusion if self._scalars is None else self._scalars.fusion
        self._float_sizes = FloatSizes.of(fusion)
        fusion = fusion if self._float_sizes is None else self._float_sizes.fusion
        self._uneven = UnevenShards.of(fusion)
        self._draws = Draws.of(fusion)
        self._fusion = fusion = fusion if self._draws is None else self._draws.fusion
        self._fusion_id = fusion_id
        self._label = dumps.next_fusion()
        self._built = 0
        self._auto_schedule = auto_schedule
        self._params = params
        self._number_of_streams = number_of_streams
        self._identity = object()
        self._symbolic = SymbolicShards.of(self._defined)
        # The definition with constants for extents that devices divide unevenly, and the constants
        # with which the last call on shards of some extents ran.
        self._versions: Recent[Constants, FusionExecutorCache] = Recent(MAX_VERSIONS)
        self._resolved: Recent[tuple[Communicator, Shapes], Constants] = Recent(MAX_SIGNATURES)
        self._signatures: Recent[tuple[int, Shapes], tuple[RunSignature, RunSignature]] = Recent(
            MAX_SIGNATURES
        )
        self._binder = InputBinder(fusion)
        self._free = free_inputs(fusion)
        self._settings = options.settings()
        self._is_profiled = bool(options.profiler_modes())
        # Both keys begin with the communicator, because simulated ranks may share one definition,
        # and the options of the call.
        self._by_signature: Recent[CallKey, CallCacheEntry] = Recent(
            MAX_SIGNATURES, on_drop=lambda call: call.known.forget()
        )
        # The latest call, if it had neither options nor a device, and the runner that repeats it.
        self._latest: CallCacheEntry | None = None
        self._steady: Steady | None = None
        # Calls without options and device that were made more than once, by the shape of their
        # first input.
        self._in_turns: Recent[torch.Size, CallCacheEntry] = Recent(MAX_TURNS)
        self._ran: CallCacheEntry | None = None
        self._autograd = Autograd(fusion)
        # Job sizes that are known to include all ranks of the meshes.
        self._worlds: set[int] = set()
        self._by_class: Recent[object, BoundProgram] = Recent(MAX_BOUND)
        self._overlaps: Recent[ClassKey, Overlaps | NoOverlap] = Recent(MAX_BOUND)
        self._recent: Recent[Communicator, BoundProgram] = Recent(MAX_BOUND)
        self.devices = queries.requested_devices(fusion)
        self._names = input_names(self._defined.inputs, self._defined.exprs)
        for further in (self._float_sizes, self._draws):
            self._names = (*self._names, *(() if further is None else further.names))
        # Whether the program's inputs or results differ from those of the definition.
        stages = (self._scalars, self._float_sizes, self._draws, self._uneven)
        self._has_own_inputs = any(stage is not None for stage in stages)
        self._numbers = sorted(self._free) if self.devices else []

    def fusion(self) -> Fusion:
        """Returns the fusion as the user defined it."""
        return self._defined

    @cached_property
    def _text(self) -> str:
        """The fusion as text, which is part of the key under which the fusion's programs are
        cached.
        """
        return fusion_text(self._fusion)

    @cached_property
    def _compared_fusion(self) -> tuple[str, tuple[Op, ...]]:
        """The fusion in the form that ranks (processes of the job) compare before a run, as text
        and as ops.

        Two facts are left out because they do not change the program: the order in which the user
        distributed tensors over devices, and meshes that ops copied from their operands.
        """
        fusion = without_names(self._fusion)
        return fusion_text(fusion), fusion.exprs

    @cached_property
    def _lines(self) -> tuple[str, ...]:
        """The user's source lines of the fusion's inputs and ops.

        These lines are part of a program's cache key, because error messages of a program must show
        the lines of the program's own definition.
        """
        inputs = [v for v in self._fusion.inputs if isinstance(v, TensorView)]
        return tuple(v.where for v in (*inputs, *self._fusion.exprs))

    @cached_property
    def _classifier(self) -> Classifier:
        return Classifier(self._fusion)

    def cuda_graphs(self) -> list[str]:
        """Returns lines of text: how many CUDA graphs repeat the runs for each kind of inputs, or
        why none does. `FusionDefinition.cuda_graphs` describes them.
        """
        return self._status_lines(CallCacheEntry.graphs)

    def memory(self) -> Memory:
        """Returns how many bytes these programs hold between runs, and how many of them are shared
        with other programs.
        """
        calls = list(self._by_signature.values())
        evaluators = {call.bound.evaluator for call in calls}
        plans = [plan for call in calls for plan in call.known.plans.values()]
        return memory_of([a for one in evaluators for a in one.arenas()], plans)

    def _status_lines(self, lines: Callable[[CallCacheEntry], list[str]]) -> list[str]:
        return status_lines(lines, self._by_signature, self._settings, len(self._defined.inputs))

    # ------------------------------------------------------------ running
    def execute(
        self,
        inputs: Iterable[object],
        device: int | str | torch.device | None = None,
        _enable_options: Sequence[str] = options.NONE,
        _disable_options: Sequence[str] = options.NONE,
    ) -> list[torch.Tensor]:
        """Runs the program on `inputs`, as `FusionDefinition.execute` describes."""
        if (PROFILERS or self._is_profiled) and profiler_here(is_on=self._is_profiled):
            given = inputs, device, _enable_options, _disable_options
            instance = Communicator.instance()
            return run_agreed(instance, self.devices, partial(self.prepare, *given))
        if self._has_own_inputs:
            scalars = self._scalars
            if scalars is not None and scalars.has_results and not self.devices:
                inputs = scalars.flat(inputs)
                _, _, run = self.prepare(inputs, device, _enable_options, _disable_options)
                return run()
            if self.devices:
                return self._agree(inputs, device, _enable_options, _disable_options)
            inputs = self._read(inputs)
            inputs = inputs if self._draws is None else self._draws.take(inputs, device)
        # A profiler needs a range for each op, which the compiled runner does not record.
        if (steady := self._steady) is not None and not torch_profiler._is_profiler_enabled:
            outputs = steady(inputs, device, _enable_options, _disable_options)
            if outputs is None:
                given = inputs, device, _enable_options, _disable_options
                outputs = self._others_turn(steady, *given)
            if outputs is not None:
                return outputs
        communicator = Communicator.instance()
        call, places = self._latest, None
        if (
            call is not None
            and call is self._ran
            and call.communicator is communicator
            and device is None
            and _enable_options is options.NONE
            and _disable_options is options.NONE
            and forward_ad._current_level < 0  # pyright: ignore[reportPrivateUsage]
        ):
            places = call.glance(inputs)
            if places is None and not self.devices:
                other, places = self._glance_at_others(inputs, communicator)
                call = other or call
        if call is None or places is None:
            given = inputs, device, _enable_options, _disable_options
            if not self.devices:
                return self._run(*self._find(communicator, *given))
            return self._agree(*given)
        if self.devices and (channel := communicator.channel(self.devices)) is not None:
            given = inputs, device, _enable_options, _disable_options
            resolve = None if self._symbolic is None else partial(self.resolve, given)
            return channel.run(partial(call.prepare, inputs, places), resolve)
        outputs = call.bound.evaluator.run_entry(call.known, inputs, places)  # pyright: ignore[reportArgumentType]
        call.runs_left -= 1
        if not call.runs_left:
            self._consider(call, inputs)  # pyright: ignore[reportArgumentType]
        return outputs

    def _consider(self, call: CallCacheEntry, given: Sequence[Argument]) -> None:
        """Lets the compiled runner (a C function) repeat calls like `call`, if it supports such
        calls. Repeated calls then take less time on the host.

        The call has just run with the inputs `given`.
        """
        call.enable_fast_path(given)
        if call.never or call.steady is not None:
            return
        inputs = tuple(given)
        found = call.bound.evaluator.steady(call.known, inputs, _SURROUNDINGS)
        if isinstance(found, str):
            call.why_not = found
        elif self._is_like(call, inputs) and self._ran is call:
            call.steady = self._steady = found

    def _is_like(self, call: CallCacheEntry, inputs: Sequence[Argument]) -> bool:
        """Returns whether the inputs still have the shapes, strides and dtypes of the cache entry
        `call`.

        Another thread may have changed the inputs during the run.
        """
        if call.glance is not no_fast_path:
            return call.glance(inputs) is not None
        try:
            given = call.communicator, inputs, None, options.NONE, options.NONE
            return self._find(*given)[0] is call
        except FuserError:
            return False

    def _others_turn(
        self, declined: Steady, inputs: Iterable[object], *others: object
    ) -> list[torch.Tensor] | None:
        """Tries to run the program by a compiled runner (a C function) other than `declined`, which
        has just rejected these inputs.

        Each runner accepts inputs of one kind (shapes, strides, dtypes). The other runner is found
        by the shape of the first input. Returns None if there is no other runner, or if that runner
        rejects the inputs, too. If `declined` has rejected inputs too often, it is dropped.
        """
        call = self._latest
        is_over = declined.declined > MAX_DECLINED or declined.is_dropped
        if is_over and call is not None and call.steady is declined:
            self._steady = None
            call.drop_fast_path(declined)
        try:
            call = self._in_turns.get(inputs[0].shape)  # pyright: ignore[reportIndexIssue]
        except Exception:  # inputs that are not a list of tensors may raise anything
            return None
        if call is None or call.steady is None or call.steady is declined:
            return None
        outputs = call.steady(inputs, *others)
        if outputs is not None:
            self._latest, self._steady = call, call.steady
            self._has_run(call)
        return outputs

    def compiled_runner(self) -> list[str]:
        """Returns lines of text: how many calls the compiled runner (a C function) has repeated for
        each kind of inputs, or why none. `FusionDefinition.compiled_runner` describes them.
        """
        return self._status_lines(CallCacheEntry.repeated)

    def _glance_at_others(
        self, inputs: Iterable[object], communicator: Communicator
    ) -> tuple[CallCacheEntry | None, tuple[int, ...] | None]:
        """Finds the cache entry of an earlier call, other than the latest, that has inputs like
        these.

        The entry is found by the shape of the first input. Its quick check, a function that each
        entry has, then compares all inputs. Returns the entry, and the alignments of the inputs in
        memory. The alignments are None if the quick check rejects the inputs. Both are None if no
        entry is found.
        """
        try:
            call = self._in_turns.get(inputs[0].shape)  # pyright: ignore[reportIndexIssue]
        except Exception:  # inputs that are not a list of tensors may raise anything
            return None, None
        if call is None or call.communicator is not communicator:
            return None, None
        places = call.glance(inputs)
        if places is not None:
            self._latest, self._steady = call, call.steady
            self._has_run(call)
        return call, places

    def _has_run(self, call: CallCacheEntry) -> None:
        self._ran = call
        if self._recent.get(call.communicator) is not call.bound:  # to set it takes a lock
            self._recent[call.communicator] = call.bound

    # -- with shards of unequal extents
    def _agree(self, *given: Any) -> list[torch.Tensor]:
        """Runs a call, with the arguments `given` of `prepare`, once all ranks agree on it."""
        given = Reread.of(given[0]), *given[1:]
        prepare, resolve = partial(self.prepare_call, *given), partial(self.resolve, given)
        return run_agreed(Communicator.instance(), self.devices, prepare, resolve)

    def prepare_call(self, inputs: Iterable[object], *others: Any) -> Prepared[list[torch.Tensor]]:
        """Prepares a run as `prepare` does, on shards that may have other extents on other ranks.

        If shards of these extents have run before, they are taken to be shards of the same tensors
        again; at first, all ranks are taken to have shards of equal extents. If this is wrong,
        `Channel.run` calls `resolve`. If it makes the call an error, ranks first exchange extents.
        """
        symbolic = self._symbolic
        if symbolic is None:
            return self.prepare(inputs, *others)
        flat = flatten(inputs, declared=self._defined.inputs)
        given = flat, *others
        constants = self._resolved.get((Communicator.instance(), _shapes(flat)))
        if constants:
            return self._prepare_version(symbolic, constants, given)
        try:
            return self.prepare(*given)
        except FuserError as error:
            is_checked = Communicator.instance().size() in self._worlds
            if not (is_checked and symbolic.fits(flat)):
                raise
            return self._open_signature(symbolic, flat), (), partial(_raise, error)

    def _open_signature(self, symbolic: SymbolicShards, flat: Sequence[Argument]) -> RunSignature:
        """Returns a run signature by which ranks only exchange the extents of their shards."""
        text, ops = self._compared_fusion
        found = run_signature_of(
            (text, "// the run depends on the extents on other ranks"),
            self._names[: len(flat)],
            flat,
            {},
            declared=self._defined.inputs,
            ops=ops,
        )
        return replace(found, cut=symbolic.cut, is_open=True)

    def resolve(self, given: Sequence[Any], extents: Extents) -> Prepared[list[torch.Tensor]]:
        """Prepares a run on shards that have the extents `extents` on the ranks of the program.

        `given` are the arguments of `prepare_call`.
        """
        symbolic, communicator = self._symbolic, Communicator.instance()
        assert symbolic is not None, "only these definitions have shards of unequal extents"
        inputs, *others = given
        flat = flatten(inputs, declared=self._defined.inputs)
        constants = tuple(symbolic.constants(extents, self.devices).items())
        key = communicator, _shapes(flat)
        if not constants:
            self._resolved[key] = ()
            return self.prepare(flat, *others)
        self._resolved[key] = constants
        return self._prepare_version(symbolic, constants, (flat, *others))

    def _prepare_version(
        self, symbolic: SymbolicShards, constants: Constants, given: Any
    ) -> Prepared[list[torch.Tensor]]:
        """Prepares a call of the definition in which some extents are `constants`."""
        version = self._versions.recall(constants)
        if version is None:
            version = self._versions[constants] = FusionExecutorCache(
                symbolic.version(dict(constants)),
                self._fusion_id,
                self._auto_schedule,
                params=self._params,
                number_of_streams=self._number_of_streams,
            )
        of_version, numbers, run = version.prepare(*given)
        shapes, communicator = _shapes(given[0]), Communicator.instance()
        known = self._signatures.get((id(of_version), shapes))
        if known is None or known[0] is not of_version:
            text, ops = self._compared_fusion
            signature = replace(
                of_version,
                parts=(text, *of_version.parts[1:], f"// constants: {constants}"),
                passed=(*shapes, *(sizes for _, sizes in of_version.inputs[len(shapes) :])),
                ops=ops,
                cut=symbolic.cut,
            )
            known = self._signatures[id(of_version), shapes] = of_version, signature

        def run_version() -> list[torch.Tensor]:
            outputs = run()
            self._latest = self._steady = None
            self._recent[communicator] = version._recent[communicator]
            return outputs

        return known[1], numbers, run_version

    def prepare(
        self,
        inputs: Iterable[object],
        device: int | str | torch.device | None = None,
        _enable_options: Sequence[str] = options.NONE,
        _disable_options: Sequence[str] = options.NONE,
    ) -> Prepared[list[torch.Tensor]]:
        """Prepares a run: checks the inputs and finds the program, but launches nothing.

        Returns this rank's run signature, the scalar inputs, and the function that runs the
        program. The run signature describes the program and its sizes. All ranks compare their run
        signatures and scalar inputs before they run.
        """
        if PROFILERS or self._is_profiled:
            profiler = profiler_here(is_on=self._is_profiled)
            if profiler is not None:
                given = inputs, device, _enable_options, _disable_options
                return self.prepare_profile(profiler, *given)
        communicator = Communicator.instance()
        scalars, flat = self._scalars, None
        if scalars is not None and scalars.has_results:
            inputs = flat = scalars.flat(inputs)
        inputs, begin = self._look(inputs, device)
        call, given, places = self._find(
            communicator, inputs, device, _enable_options, _disable_options
        )
        are_apart = call.bound.evaluator.are_apart(given, call.known)
        numbers = implicit_inputs.compared_numbers(given, self._numbers, device, self._draws)
        run = begin(partial(self._run, call, given, places, are_apart))
        if scalars is None or flat is None:
            return call.run_signature, numbers, run
        return call.run_signature, numbers, lambda: scalars.finished(flat, run())

    def _look(
        self, inputs: Iterable[object], device: int | str | torch.device | None
    ) -> tuple[Iterable[object], Callable[[Callable[[], T]], Callable[[], T]]]:
        """Returns the program's inputs, including seeds of random ops, and a function that wraps
        the run of the program.

        If one process runs the program, its seeds are taken from torch's random generator at once.
        If several ranks run it together, they must first agree to the run. This call then only
        looks at the generator, and the wrapped run advances it.
        """
        inputs = self._read(inputs)
        if self._draws is None:
            return inputs, lambda run: run
        if not self.devices:
            return self._draws.take(inputs, device), lambda run: run
        return self._draws.look(inputs, device)

    def _read(self, inputs: Iterable[object], rank: int | None = None) -> Iterable[object]:
        """Returns the inputs of the program, from the inputs that the caller passed on `rank`, by
        default on this rank.

        CPU tensors without axes are replaced by their values. Sizes that are computed from floats
        are appended, because the program has inputs for them. Shards that are shorter than those of
        other ranks are padded.
        """
        inputs = inputs if self._scalars is None else self._scalars.read(inputs)
        inputs = inputs if self._float_sizes is None else self._float_sizes.complete(inputs)
        if self._uneven is None:
            return inputs
        here = Communicator.instance().rank() if rank is None else rank
        return self._uneven.padded(inputs, here)

    def _cut(self, call: CallCacheEntry, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the results of a run of `call` without the padding of uneven shards."""
        if self._uneven is None:
            return list(outputs)
        shardings = call.bound.program.output_shardings
        return self._uneven.cut(outputs, shardings, call.communicator.rank())

    def _completed(self, inputs: Iterable[object], rank: int | None = None) -> list[Argument]:
        """Returns the inputs of the program (including seeds and computed sizes), from the inputs
        of a call on `rank` that is only inspected, not run. By default, it is this rank.
        """
        inputs = self._read(inputs, rank)
        return (
            flatten(inputs, declared=self._fusion.inputs)
            if self._draws is None
            else self._draws.complete(inputs)
        )

    def _find(
        self,
        communicator: Communicator,
        inputs: Iterable[object],
        device: int | str | torch.device | None,
        enable: Sequence[str],
        disable: Sequence[str],
    ) -> tuple[CallCacheEntry, Sequence[Argument], tuple[int, ...] | None]:
        """Finds or creates the cache entry for a call with such inputs.

        Returns the entry, the inputs as a flat list, and the inputs' alignments in memory. For a
        new entry, the alignments are None.
        """
        given: Sequence[Argument] = flatten(inputs, declared=self._fusion.inputs)
        if forward_ad._current_level >= 0:  # pyright: ignore[reportPrivateUsage]
            given = self._autograd.without_tangents(given)
        is_plain = enable is options.NONE and disable is options.NONE
        settings = self._settings if is_plain else options.settings(enable, disable)
        where = None if device is None else device_of(given, device)
        key = (communicator, settings, where, signature_of(given, self._free))
        call, places = self._by_signature.get(key), None
        if call is None:
            call = self._by_signature.recall(key)
        if call is not None:
            places = call.contents.check(given)
            if not call.has_come_again:
                call.has_come_again = True
                call.glance = (not call.is_lazy and call.contents.glance(given)) or no_fast_path
        else:
            self._autograd.warn_of_gradients(given)
            call = self._by_signature[key] = self._learn(given, device, communicator, settings)
        if not (is_plain and device is None):
            is_plain, call.why_not = False, "calls with options or with device= are never repeated"
        self._latest, self._steady = call if is_plain else None, None
        if is_plain and call.glance is not no_fast_path:
            self._in_turns[given[0].shape] = call  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
        return call, given, places

    def _learn(
        self,
        inputs: Sequence[Argument],
        device: int | str | torch.device | None,
        communicator: Communicator,
        settings: Settings,
    ) -> CallCacheEntry:
        """Creates the cache entry for inputs with new shapes, strides or dtypes, after finding or
        building their program.
        """
        resolved = self._autograd.resolved(inputs)
        with uncollected, progress.shown(communicator.rank()):
            bound, run_signature, known = self._find_or_build(
                resolved, device, communicator, settings
            )
        is_lazy = resolved is not inputs
        contents = known.contents
        if is_lazy:
            contents = Contents(self._fusion.inputs, inputs, VECTOR_BYTES)
        have_ranks = bool(self.devices) and communicator.size() > 1
        why = why_never(draws=self._draws is not None, is_lazy=is_lazy, have_ranks=have_ranks)
        return CallCacheEntry(communicator, bound, run_signature, contents, is_lazy, known, why)

    def _run(
        self,
        call: CallCacheEntry,
        inputs: Sequence[Argument],
        places: tuple[int, ...] | None,
        are_apart: bool | None = None,
    ) -> list[torch.Tensor]:
        if call is not self._ran:
            self._has_run(call)
        if call.is_lazy:
            inputs = self._autograd.resolved(inputs)
            places = None if places is None else call.known.contents.check(inputs)
        outputs = call.bound.evaluator.run_entry(call.known, inputs, places, are_apart)
        outputs = outputs if self._uneven is None else self._cut(call, outputs)
        if call is self._latest:
            self._steady = call.steady
            call.runs_left -= 1
            if not call.runs_left:
                self._consider(call, inputs)
        return outputs

    def _find_or_build(
        self,
        inputs: Sequence[Argument],
        device: int | str | torch.device | None,
        communicator: Communicator,
        settings: Settings,
    ) -> tuple[BoundProgram, RunSignature, SignatureEntry]:
        size = communicator.size()
        if size not in self._worlds:
            queries.check_world(self._fusion, size)
            self._worlds.add(size)
        where = device_of(inputs, device)
        values = self._binder.bind(inputs, where)
        sizes: dict[Symbol, int] = values  # pyright: ignore[reportAssignmentType]
        if not self._binder.has_only_tensors:
            sizes = {symbol: v for symbol, v in values.items() if isinstance(v, int)}
        input_class = self._classifier.classify(inputs, sizes, where)
        key = (communicator, settings, input_class.key)
        overlaps = self._overlaps.recall(key)
        bound = None
        if overlaps is not None:
            bound = self._by_class.recall((key, overlaps.choose(sizes)))
        if overlaps is None or bound is None:
            bound = self._bind(input_class, communicator, where, settings)
            overlaps = self._overlaps[key] = bound.overlaps
            self._by_class[key, overlaps.choose(sizes)] = bound
        bound.program.check_divisible(sizes)
        known = bound.evaluator.prepare(inputs, checked_on=where)
        if not self.devices:
            return bound, _NOTHING, known
        # Different options on ranks are an error, like different programs.
        text, ops = self._compared_fusion
        parts = (
            text,
            f"// options: {settings}",
            f"// how it is lowered: {self._params}",
            f"// steps by the cost model: {overlaps.choose(sizes)}",
            bound.program.communications,
        )
        loose = {self._fusion.inputs[i] for i in self._free}
        fixed = {s: v for s, v in sizes.items() if s not in loose}
        line = bound.program.first_line
        run_signature = run_signature_of(
            parts,
            self._names,
            inputs,
            fixed,
            declared=bound.program.container.inputs,
            free=self._numbers,
            where=line,
            ops=ops,
            fixed=3,
        )
        if self._symbolic is not None:
            run_signature = replace(run_signature, cut=self._symbolic.cut)
        return bound, run_signature, known

    def _bind(
        self,
        input_class: InputClass,
        communicator: Communicator,
        device: torch.device,
        settings: Settings,
    ) -> BoundProgram:
        """Finds or builds the program for a class of inputs, and creates the evaluator that runs
        the program on this rank (process of the job).

        Inputs of one class agree in everything on which the program depends, such as dtypes and
        memory layouts.
        """
        program, overlaps = self._program(input_class, communicator, device, settings)
        evaluator = ProgramEvaluator(
            program.container,
            communicator,
            device=device,
            make_runner=program.kernel,
            settings=settings,
            late_stream=settings.argument("late_stream"),
            number_of_streams=self._number_of_streams,
        )
        return BoundProgram(program, evaluator, overlaps)

    def _program(
        self,
        input_class: InputClass,
        communicator: Job,
        device: torch.device,
        settings: Settings,
        machine_at: MachineAt = machine_of,
    ) -> tuple[Program, Overlaps | NoOverlap]:
        """Finds or builds the program for a class of inputs, which agree in everything on which the
        program depends, such as dtypes and memory layouts.

        Also returns the object that decides which matmuls and communications run at the same time.
        The job may have fewer ranks (processes) than the program needs, because nothing runs.
        `machine_at` returns the description of a device by which overlap is decided.
        """
        # Before the cache's lock is taken, because it may open connections.
        backend = self._params.backend or (
            PEER_COPIES
            if settings.enabled("peer_copies")
            else communicator.backend_for(device).name.upper()
        )
        # With dumps, each definition lowers its own program, so that the dumps show all stages of
        # each definition.
        owner = self._identity if any(map(options.dump_enabled, EFFECTS["DUMP"])) else None
        given = (self._text, self._lines, self._params)
        key = (given, backend, input_class.key, settings, owner)
        texts: list[Dump] = []
        overlaps = overlaps_of(
            self._fusion,
            key,
            communicator,
            device,
            backend,
            settings,
            self._params,
            machine_at,
        )
        sizes = input_class.sizes
        try:
            program = PROGRAMS.find_or_build(
                key,
                lambda: self._build(
                    input_class, backend, settings, texts, overlaps, communicator.rank()
                ),
                lambda: overlaps.choose(sizes),
            )
            texts = program.dumps
        finally:
            # Also writes the dumps of a program that could not be built.
            for text in texts:
                dumps.write(text, rank=communicator.rank())
        return program, overlaps

    def _build(
        self,
        input_class: InputClass,
        backend: str,
        settings: Settings,
        texts: list[Dump],
        overlaps: Overlaps | NoOverlap,
        rank: int,
    ) -> Program:
        """Compiles this definition to a host program (launches, communications, allocations).

        - `input_class` has the facts about inputs on which the program depends, such as dtypes and
          memory layouts.
        - `backend` is the name of the communication library.
        - `overlaps` decides which matmuls and communications run at the same time.
        - The dumps that the user asked for are appended to the list `texts`.
        - `rank` is that of this process, which dumps name.
        """
        label = self._label + (f", program {self._built}" if self._built else "")
        self._built += 1
        where = next((op.where for op in self._fusion.exprs if op.where), "")
        note_constants(self._fusion)

        def dump(name: str, text: Callable[[], str], note: str = "") -> None:
            if options.dump_enabled(name):
                texts.append(Dump(name, label + user_code(where), text(), note))

        def build() -> Built:
            return build_program(
                self._fusion,
                input_class,
                backend_name=backend,
                params=replace(self._params, stream_slots=settings.enabled("stream_slots")),
                dump=dump,
                overlap=overlaps.steps_for(input_class.sizes),
                settings=settings,
            )

        # At most one attempt for each way in which overlapped steps may transfer, and one without
        # overlap.
        while True:
            texts.clear()
            try:
                segmented, program, shardings = build()
            except FuserError as error:
                if not overlaps.gives_up(input_class.sizes, str(error)):
                    raise
                continue
            if overlaps.accepts(program, input_class.sizes):
                break
        dump("overlap", lambda: _with_notes(overlaps.report(input_class.sizes), program))
        form = next(iter(options.dump_args("host_ir")), "")
        note = NOTES.get(form, "full form")
        if self._built > 1:
            note += _first_run_text(program, input_class.sizes)
        dump("host_ir", lambda: dumped(program, form), note)
        sent = communications_text(program)
        return Program(segmented, program, sent, settings, label, rank, texts, shardings.outputs)

    # ------------------------------------------------------------ looking inside
    def program_for(self, inputs: Sequence[Argument]) -> HostIrContainer:
        """Returns the host program (launches, communications, allocations) of the most recent run.

        Before the first run, returns the host program for inputs like these. The job may then have
        fewer ranks than the meshes name.
        """
        if self._recent.get(Communicator.instance()) is not None:
            return self.host_program()
        inputs = self._completed(inputs)
        where, sizes = device_of(inputs, None), self._sizes_of(inputs)
        found = self._classifier.classify(inputs, sizes, where)
        here = Communicator.instance()
        return self._program(found, here, where, self._settings)[0].container

    def lower_for_job(
        self, inputs: Sequence[object] | None, described: JobDescription
    ) -> tuple[HostIrContainer, Mapping[Symbol, Number]]:
        """Returns the host program that the ranks of a described job run, and the values of the
        symbols of its inputs.

        The job need not exist. `inputs` has the shape of each whole tensor, and the value of each
        number (`hostir.program_for`).
        """
        if described.mesh is not None:
            moved = on_mesh(self._defined, described.mesh)
            cache = self if moved is self._defined else FusionExecutorCache(moved)
            return cache.lower_for_job(inputs, replace(described, mesh=None))
        job, device = planned_job(self._fusion, described), torch.device(described.device)
        shards = stand_ins(self._defined, inputs, described.rank)
        given = self._completed(shards, described.rank)
        values = self._binder.values(given)
        sizes = {s: v for s, v in values.items() if isinstance(v, int)}
        found = self._classifier.classify(given, sizes, device)

        def machine_at(where: torch.device) -> Machine | None:
            return described.machine if where.type == "cuda" else None

        with uncollected:
            program, _ = self._program(found, job, device, self._settings, machine_at)
        program.check_divisible(sizes)
        container = program.container
        return container, InputBinder(container.values).values(given)

    def _sizes_of(self, given: Sequence[Argument]) -> dict[Symbol, int]:
        """Returns the values of the integer symbols (sizes and integer scalars) that follow from
        `given`, the inputs of the program.
        """
        values = self._binder.bind(given, device_of(given, None))
        return {s: v for s, v in values.items() if isinstance(v, int)}

    def _bound_to(self, given: Sequence[Argument]) -> BoundProgram | None:
        """Returns the program that is compiled for inputs like `given` (equal dtypes, memory
        layouts and other facts that change the program), or None.

        A program of calls without options is preferred.
        """
        sizes, here = self._sizes_of(given), Communicator.instance()
        found = self._classifier.classify(given, sizes, device_of(given, None))
        keys = [(here, self._settings, found.key)]
        keys += [k for k in self._overlaps if (k[0], k[2]) == (here, found.key)]
        for key in keys:
            overlaps = self._overlaps.recall(key)
            bound = overlaps and self._by_class.recall((key, overlaps.choose(sizes)))
            if bound:
                return bound
        return None

    def overlap_report(self, inputs: Iterable[object]) -> str:
        """Returns a report on which matmuls and communications run at the same time for inputs like
        these, as `FusionDefinition.overlap_report`.
        """
        sizes = self._sizes_of(self._completed(inputs))
        latest = self._last()
        report = latest.overlaps.report(sizes)
        return _with_notes(report, latest.program.container)


def _first_run_text(program: HostIrContainer, sizes: Mapping[Symbol, int]) -> str:
    """Returns the text `, first run with i0 = 6` for the heading of a dump, or "" if all sizes are
    fixed.

    A definition has several programs if its calls have different dtypes, layouts or other facts
    that change the program. The sizes tell the reader which call compiled this one.
    """
    names = size_symbols(program)
    chosen = [f"{s.name} = {n}" for s, n in sizes.items() if s.name in names]
    return f", first run with {', '.join(chosen)}" if chosen else ""


def _with_notes(report: str, program: HostIrContainer) -> str:
    """Returns `report` (on matmuls and communications that run at the same time), with notes on
    changes of input shardings that would save work.
    """
    return "\n".join((report, *(f"note: {note}" for note in sliced_inputs(program))))


def _shapes(inputs: Iterable[object]) -> Shapes:
    return tuple(tuple(x.shape) if isinstance(x, torch.Tensor) else () for x in inputs)


def _raise(error: FuserError) -> NoReturn:
    raise error


_SURROUNDINGS = Surroundings(current_communicator, options.NONE)
# The run signature of a program that no other rank runs.
_NOTHING = RunSignature(("",))


# ----------------------------------------------------------------------
# Whether overlap is considered for a program; for which machine, and with which transports.


def overlaps_of(
    fusion: Fusion,
    key: Hashable,
    communicator: Job,
    device: torch.device,
    backend: str,
    settings: Settings,
    params: LowerParams,
    machine_at: MachineAt = machine_of,
) -> Overlaps | NoOverlap:
    """Returns the object that decides which matmuls and communications of a program run at the same
    time (overlap).

    All programs with the key `key` share this object. It chooses by the predicted times of a cost
    model, which needs a description of the machine. A CPU has no such description. On the CPU,
    nothing therefore overlaps unless the option `machine` names a description, or `steps` requests
    overlap in any case.
    """
    devices = requested_devices(fusion)
    if why := _why_not(fusion, devices, settings, params):
        return NoOverlap(why)
    name = settings.argument("machine")
    machine = find_machine(name, device) if name is not None else None
    if machine is None and device.type == "cuda":
        machine = machine_at(device)
    is_forced = settings.enabled("steps")
    machine = H200 if machine is None and is_forced else machine
    if machine is None:
        return NoOverlap(
            f"nothing describes these {device.type} ranks: set FUSER_ENABLE=machine(h200) to use "
            "the description of an H200, machine(measured) to use that of `python -m hostir "
            "calibrate` (docs/explanation/cost-model.md), or FUSER_ENABLE=steps to overlap in "
            "any case"
        )
    # The links of a machine description are those within one host. Ranks that this job lacks are
    # assumed to be on it. This is checked last, because it may open connections.
    has_ranks = devices[-1] < communicator.size()
    if has_ranks and not communicator.are_on_one_host(devices):
        return NoOverlap("the ranks are on several hosts")
    can_copy = communicator.have_access(device)
    transports = (PEER_COPIES, backend) if can_copy else (backend,)
    captured = () if settings.disabled("cuda_graphs") else _captured(communicator, device, can_copy)
    return PROGRAMS.overlaps(
        (key, machine.to_json(), transports),
        lambda: Overlaps(
            machine,
            backend=backend,
            transports=transports,
            params=params,
            captured=captured,
            margin=FORCED if is_forced else MARGIN,
        ),
    )


def _captured(communicator: Job, device: torch.device, can_copy: bool) -> tuple[str, ...]:
    """Returns the names of the libraries whose communications on `device` can be captured in a CUDA
    graph: the device's default library and, if `can_copy` is True, peer copies.

    `can_copy` says that each rank can access the memory of the others. On a CPU, returns ().
    """
    if device.type != "cuda":
        return ()
    library = communicator.backend_for(device)
    found = (library.name.upper(),) if library.can_capture("batch") else ()
    if can_copy and communicator.peers_for(device).can_capture("batch"):
        found += (PEER_COPIES,)
    return found


def _why_not(
    fusion: Fusion, devices: tuple[int, ...], settings: Settings, params: LowerParams
) -> str:
    """Returns the reason why no matmuls and communications are made to run at the same time
    (overlap) for this definition and these options.

    Returns "" if overlap is considered.
    """
    if settings.disabled("auto_overlap"):
        return "auto_overlap is disabled"
    if params.standalone:
        return "MultiDeviceExecutor never changes the definition"
    if len(devices) < 2:
        return "only one rank runs the program"
    if has_streams(fusion):
        return "the user has put axes on streams in the definition"
    if not any(isinstance(op, Contraction) for op in fusion.exprs):
        return "the definition has no matmul or linear op"
    return ""


# ----------------------------------------------------------------------
# A hint for numbers that are compiled into programs and change from call to call.
#
# A definition that is written again for each learning rate is a new program each time. After a few
# programs that differ only in numbers, a warning names the numbers and recommends `define_scalar`.

# This many programs that differ only in numbers are compiled without a warning.
_QUIET = 3


@record
class _Constant:
    """A number that is an operand of an op, with the op's name and the user's source line of that
    op.
    """

    value: Number
    op: str
    where: str


@dataclass
class _Alike:
    """A set of compiled programs that are equal except for the numbers in their ops.

    `seen` has the numbers of each program. `is_told` says whether the user was warned that one
    program with a scalar input could replace them.
    """

    seen: dict[tuple[Number, ...], tuple[_Constant, ...]] = field(default_factory=dict)
    is_told: bool = False


_ALIKE: Recent[Hashable, _Alike] = Recent(256)


def note_constants(fusion: Fusion) -> None:
    """Records the numbers that are operands of ops in a program that is being compiled.

    If many compiled programs differ only in such numbers, a warning is issued once, because one
    program with a scalar input could replace them.
    """
    constants: list[_Constant] = []
    texts = [_without_numbers(op, constants) for op in fusion.exprs]
    if not constants:
        return
    key = (*map(str, fusion.inputs), *texts)
    alike = _ALIKE.recall(key)
    if alike is None:
        alike = _ALIKE[key] = _Alike()
    if alike.is_told:
        return
    alike.seen[tuple(c.value for c in constants)] = tuple(constants)
    if len(alike.seen) > _QUIET:
        alike.is_told = True
        warn(_hint([*alike.seen.values()]))
        alike.seen.clear()


def _without_numbers(op: TensorOp, constants: list[_Constant]) -> str:
    """Returns the text of an op in which symbols replace the numbers, so that programs which differ
    only in numbers have equal texts.

    The numbers are appended to `constants`.
    """

    def mark(v: object) -> object:
        if not isinstance(v, Const):
            return v
        constants.append(_Constant(v.value, op.name, op.where))
        return Symbol("number", v.dtype)

    if isinstance(op, FullOp):
        return op_text(op.replace(value=mark(op.value)))
    if isinstance(op, UnaryOp | BinaryOp | TernaryOp):
        return op_text(op.map_values(lambda v: v if isinstance(v, TensorView) else mark(v)))  # pyright: ignore[reportReturnType]
    return op_text(op)


def _hint(programs: list[tuple[_Constant, ...]]) -> str:
    changed = [
        column for column in zip(*programs, strict=True) if len({c.value for c in column}) > 1
    ]
    found = "; ".join(
        f"{column[-1].op} at {column[-1].where} has {', '.join(f'{c.value:g}' for c in column)}"
        for column in changed[:3]
    )
    more = f" and {len(changed) - 3} others" if len(changed) > 3 else ""
    return (
        f"{len(programs)} programs were compiled that differ in numbers alone: {found}{more}. "
        "A number in a definition is compiled in. To compile once, write s = fd.define_scalar() in "
        "its place, and pass the value with the inputs of each call, fd.execute([.., value])"
    )
