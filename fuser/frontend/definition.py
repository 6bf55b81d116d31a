"""FusionDefinition: where a user writes a tensor program and runs it.

with FusionDefinition() as fd:
    x = fd.define_tensor([-1, -1], contiguity=True)
    y = fd.ops.add(x, 1.0)
    fd.add_output(y)
(out,) = fd.execute([torch.ones(2, 3)])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from fuser.frontend import validation
from fuser.frontend.executor_cache import FusionExecutorCache
from fuser.frontend.manual_kernels import KernelExecutor
from fuser.frontend.python_printer import (
    fake_inputs,
    is_internal,
    report,
    repro_script,
    translate_fusion,
)
from fuser.ir.dtypes import DataType, DtypeLike, from_torch
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.scalar.constructors import Scalar
from fuser.ops import define
from fuser.ops.rows import SPELLED
from fuser.schedule.automatic import HeuristicParams
from fuser.support.arguments import LONGEST, checked, require, show
from fuser.support.errors import (
    ArgumentError,
    DefinitionError,
    EmptyDefinitionError,
    InputError,
    NoReproInputsError,
    OtherEntranceError,
    user_code,
    user_line,
)
from fuser.support.inputs import flatten
from fuser.support.locks import make_reentrant_lock
from fuser.support.options import NONE, settings
from hostir.runtime.plan import Memory
from multidevice.job.agreement import Prepared
from multidevice.job.communicator import Communicator, run_agreed
from multidevice.sharding.queries import requested_devices

if TYPE_CHECKING:
    from os import PathLike

    from torch.distributed.tensor import DTensor

    from hostir.profiling.timeline import Trace
    from hostir.profiling.tracer import Source

_NEVER_WRITTEN = (
    "Fusion does not exist! Use `with FusionDefinition() as fd: ...` to define a fusion."
)
# Two threads may call a definition for the first time.
_FIRST_CALL = make_reentrant_lock()


# Names that are no attributes -> what to write, or when they are there.
_INSTEAD = {
    "fec": "the first execute makes it",
    "ke": "the first manual_execute makes it",
    "define_constant": "it is called define_scalar, which takes the value",
    "schedule": "it is called sched",
    "add_input": "define_tensor and define_scalar add the inputs, in their order",
    "inputs": "it is fd.fusion.inputs",
    "outputs": "it is fd.fusion.outputs",
    **dict.fromkeys(("run", "forward", "apply"), "it is called execute, or fd(x, y)"),
    "compile": "the first execute compiles it, for the sizes of its inputs",
    **dict.fromkeys(("to", "cuda", "cpu", "device"), "it runs where the inputs of execute are"),
}


@partial(checked, name="execute")
def _flag(save_repro_inputs: bool | None) -> bool:
    return bool(save_repro_inputs)


def _defined_by(text: str | None) -> FusionDefinition:
    """Returns the definition that a text of `repr` makes; an empty one without a text."""
    fd = FusionDefinition()
    if text is not None:
        names: dict[str, Any] = {"FusionDefinition": FusionDefinition, "DataType": DataType}
        exec(compile(text, "<definition>", "exec"), names)
        with fd:
            names["nvfuser_fusion"](fd)
    return fd


def _no_list(given: int, named: Mapping[str, object]) -> ArgumentError:
    """Returns the error of inputs that stand beside one another, or have names."""
    options = ("device", "save_repro_inputs", "_enable_options", "_disable_options")
    name = next(iter(named), "")
    text = f"{given} inputs, expected one list of them: write fd.execute([x, y]), or fd(x, y)"
    if near := get_close_matches(name, options, n=1):
        text = f"there is no option {name!r}; did you mean {near[0]}?"
    elif named:
        text = (
            f"{', '.join(named)}: inputs have no names, their order is that in which the "
            f"definition has them: write fd.execute([{', '.join(named)}]), or "
            f"fd({', '.join(named)}); options are {', '.join(options)}"
        )
    return ArgumentError(
        f"execute(): incompatible function arguments: {text}{user_code(user_line())}"
    )


class FusionDefinition:
    """A fusion being defined, then its executor cache.

    `fd.ops` holds the ops, `fd.sched` the schedule primitives. `_fusion` is the definition until
    the first `execute`, which moves it into `fec`; `fusion` finds it in either place and is never
    changed by running.
    """

    # Imported here, not assigned: type checkers take a module for what it holds only so.
    import fuser.ops as ops
    import fuser.schedule as sched

    @checked
    def __init__(self, *, double_numbers: bool | None = None) -> None:
        """Makes a definition that is written in a `with` block.

        Args:
            double_numbers: Whether a number beside integers or booleans alone gives Double, as in
                nvFuser, and not Float, as in torch. None: as `FUSER_ENABLE=double_numbers` says.
        """
        self._double_numbers = double_numbers
        self._fusion: Fusion | None = None
        self._fusion_guard: FusionGuard | None = None
        self.fec: FusionExecutorCache
        self.ke: KernelExecutor
        self.fake_inputs: list[object]

    if not TYPE_CHECKING:  # to a type checker it would give the class every name

        def __getattr__(self, name: str) -> NoReturn:
            text = f"'FusionDefinition' object has no attribute {name!r}"
            is_op = name in self.ops.__all__ or name in SPELLED
            hint = _INSTEAD.get(name) or (f"ops are functions, fd.ops.{name}" if is_op else "")
            raise AttributeError(f"{text}: {hint}" if hint else text, name=name, obj=self)

    # ------------------------------------------------------------ the with block
    def __enter__(self) -> FusionDefinition:
        is_open = self.__dict__.get("_fusion_guard") is not None
        if is_open or hasattr(self, "fec") or hasattr(self, "ke"):
            why = (
                "is being written: its `with` block has not ended" if is_open else "has run already"
            )
            what = f"with: a definition is written once, and this one {why}"
            raise DefinitionError(f"{what}{user_code(user_line())}")
        self._fusion = Fusion()
        chosen = self._double_numbers
        is_chosen = settings().enabled("double_numbers") if chosen is None else chosen
        self._fusion.double_numbers = is_chosen
        self._fusion_guard = FusionGuard(self._fusion)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._fusion_guard is not None:
            self._fusion_guard.close()
            self._fusion_guard = None

    @property
    def fusion(self) -> Fusion:
        """The fusion as the user defined it."""
        if hasattr(self, "fec"):
            return self.fec.fusion()
        if self._fusion is None:
            raise EmptyDefinitionError(_NEVER_WRITTEN)
        return self._fusion

    def __repr__(self) -> str:
        """Returns the definition as a Python program (`fuser.frontend.python_printer`)."""
        is_written = hasattr(self, "fec") or self._fusion is not None
        return (
            translate_fusion(self.fusion) if is_written else "<FusionDefinition, not written yet>"
        )

    def __reduce__(self) -> tuple[Callable[[str | None], FusionDefinition], tuple[str | None]]:
        """Copies a definition through its text: `pickle` and `copy.deepcopy` give one that is
        equal, and that has not run."""
        if self.__dict__.get("_fusion_guard") is not None:
            raise DefinitionError(
                "a definition is copied once it is written: its `with` block has not ended"
                f"{user_code(user_line())}"
            )
        is_written = hasattr(self, "fec") or self._fusion is not None
        return _defined_by, (translate_fusion(self.fusion) if is_written else None,)

    # ------------------------------------------------------------ definition
    def define_tensor(self, *args: Any, **kwargs: Any) -> TensorView:
        """Defines a tensor input; see `fuser.ops.define.define_tensor` for the three forms."""
        tv = define.define_tensor(*args, **kwargs)
        self.fusion.add_input(tv)
        return tv

    @checked
    def define_scalar(self, value: Any = None, dtype: DtypeLike | None = None) -> Scalar:
        """Defines a scalar: symbolic (then an input) without a value, else a constant."""
        scalar = define.define_scalar(value, dtype)
        if scalar.is_symbolic():
            # It was just made: no need to look for it among all inputs, as add_input does.
            self.fusion.inputs.append(scalar)
        return scalar

    @checked
    def define_vector(self, size: int) -> list[Scalar]:
        """Defines `size` symbolic Int scalars, each an input of its own."""
        if not 0 <= size <= LONGEST:
            raise DefinitionError(f"define_vector: {size} scalars, expected 0 to {LONGEST}")
        return [self.define_scalar(None, DataType.Int) for _ in range(size)]

    @checked
    def from_pytorch(self, tensor: torch.Tensor, static_sizes: bool = False) -> TensorView:
        """Defines a tensor input like `tensor`; its sizes are symbolic unless `static_sizes`.

        A CPU tensor of rank 0 is a CPU scalar (`is_cpu`) where there is a GPU.
        """
        if tensor.device.type not in ("cuda", "cpu"):
            raise InputError(
                f"Found unsupported device {tensor.device}, only CPU or CUDA tensors are supported"
            )
        return self.define_tensor(
            sizes=list(tensor.size()),
            strides=list(tensor.stride()),
            dtype=from_torch(tensor.dtype),
            static_sizes=static_sizes,
            is_cpu=tensor.is_cpu and not tensor.dim() and torch.cuda.is_available(),
        )

    @checked
    def add_output(
        self, output: TensorView | Scalar, alias_input: TensorView | None = None
    ) -> None:
        """Registers an output, or an in-place update of `alias_input` (see `Fusion.add_output`).

        Everything that the program computes sees the value that an updated input had at the start
        of the call. An input that is an output itself is returned as the caller's own tensor, which
        shows its update; a view of it, permuted say, is computed and has the old values.
        """
        self.fusion.add_output(output, alias_input, where=user_line())

    @checked
    def validate_definition(self) -> tuple[bool, str | None]:
        """Returns (whether the definition can run, why not)."""
        if not hasattr(self, "fec") and self._fusion is None:
            return False, _NEVER_WRITTEN
        if not self.fusion.outputs:
            return False, "Fusion is empty! It has no output: call fd.add_output in its definition"
        return True, None

    # ------------------------------------------------------------ execution
    def __call__(self, *inputs: object, **options: Any) -> list[torch.Tensor]:
        """Runs the program on `inputs`: `fd(x, y)` is `fd.execute([x, y])`, with its options."""
        return self.execute(inputs, **options)

    def execute(
        self,
        inputs: Iterable[object] = (),
        *others: object,
        device: int | str | torch.device | None = None,
        save_repro_inputs: bool | None = False,
        _enable_options: Sequence[str] = NONE,
        _disable_options: Sequence[str] = NONE,
        **named: object,
    ) -> list[torch.Tensor]:
        """Runs the program on `inputs` and returns its visible outputs in `add_output` order.

        Tensors are local shards where the program shards them; numbers fill scalar inputs; nested
        sequences are flattened in place. The options (`docs/reference/options.md`) hold for this
        call only.
        Outputs carry no gradient, neither of the backward nor of the forward mode; an input that
        requires one, or a dual tensor of `torch.autograd.forward_ad`, is warned about once.

        Raises:
            InputError: count, kind, rank, dtype, device or extent of an input is wrong.
            PeerError: another rank raised before anything was launched.
        """

        if others or named:
            raise _no_list(1 + len(others), named)
        cache = self.__dict__.get("fec")
        try:
            if cache is not None and (save_repro_inputs is False or save_repro_inputs is None):
                # An empty list says nothing: such a call is like all others.
                if type(_enable_options) is list and not _enable_options:
                    _enable_options = NONE
                if type(_disable_options) is list and not _disable_options:
                    _disable_options = NONE
                return cache.execute(inputs, device, _enable_options, _disable_options)
            given = device, _enable_options, _disable_options
            return self._execute_first(inputs, *given, save_repro_inputs=save_repro_inputs)
        except Exception as error:
            if is_internal(error):
                self._report(error, inputs)
            raise

    def _execute_first(
        self,
        inputs: Iterable[object],
        *given: Any,
        save_repro_inputs: bool | None,
    ) -> list[torch.Tensor]:
        """Runs what has not run yet, or is to be remembered: what is wrong here is an error on all
        ranks."""

        def prepare() -> Prepared[list[torch.Tensor]]:
            if not _flag(save_repro_inputs):
                return self._executor_cache().prepare(inputs, *given)
            flat = flatten(inputs)
            prepared = self._executor_cache().prepare(flat, *given)
            self.fake_inputs = fake_inputs(flat)
            return prepared

        return run_agreed(Communicator.instance(), self._devices(), prepare)

    # ------------------------------------------------------------ scripts
    def repro_script_for(self, inputs: Iterable[object] | None = None) -> str:
        """Returns a script that defines this program and runs it on inputs like these: of their
        shapes, strides, dtypes and devices; without inputs, one that only defines it."""
        return repro_script(repr(self), inputs)

    def last_repro_script(self) -> str:
        """Returns `repro_script_for` the inputs of the last `execute(save_repro_inputs=True)`.

        Raises AssertionError when there was none.
        """
        if not hasattr(self, "fake_inputs"):
            raise NoReproInputsError(
                "last_repro_script: no inputs are remembered; call execute with "
                "save_repro_inputs=True first"
            )
        return self.repro_script_for(self.fake_inputs)

    def _report(self, error: Exception, inputs: object) -> None:
        """Adds the script to an error that may be this project's fault."""
        try:
            given = inputs if isinstance(inputs, list | tuple) else None
            report(error, self.repro_script_for(given))
        except Exception as another:  # the first error is what counts
            error.add_note(f"(no script shows it again: {another})")

    def trace(
        self,
        inputs: Iterable[object],
        path: str | PathLike[str] | None = None,
        *,
        warm_up: int = 3,
        repeat: int = 5,
        source: Source = "auto",
        predicted: str | None = None,
        device: int | str | torch.device | None = None,
        _enable_options: Sequence[str] = NONE,
        _disable_options: Sequence[str] = NONE,
    ) -> Trace:
        """Runs the program several times on `inputs`, and returns what ran when: a timeline with a
        track per stream and one of the host, for each rank, and how long the program computes,
        communicates and does neither (`hostir.profiling.timeline.Trace`).

        All ranks of the program call it together; each gets the traces of all, and the first one
        writes the timeline to `path`, for Perfetto. After `warm_up` runs come `repeat` that nobody
        watches, step by step and by CUDA graphs, and as many that are watched, of which the
        timeline shows the last one. Inputs that are updated in
        place keep their values. What runs is the plan that `execute` replays, but step by step and
        never as a captured CUDA graph.

        `source` says where times of a GPU come from: "cupti", "events" (around each op), or "auto":
        the first of them that works; `Trace.source` says which. On the CPU it is the host's clock.
        `predicted` puts the timeline of the cost model beside: "h200", or a file that describes a
        machine (`docs/explanation/cost-model.md`). Inputs, `device` and options are those of
        `execute`.

        Raises:
            InputError: as `execute`; or `path` cannot be written: known before anything runs.
            ExecutionError: times of the device cannot be taken from `source`.
            PeerError: another rank raised.
        """
        from hostir.profiling.tracer import Asked

        asked = Asked(path, warm_up, repeat, source, predicted)

        def prepare() -> Prepared[Trace]:
            cache = self._executor_cache()
            return cache.prepare_trace(inputs, asked, device, _enable_options, _disable_options)

        return run_agreed(Communicator.instance(), self._devices(), prepare)

    def execute_with_dtensors(self, in_dtensors: Iterable[object]) -> list[DTensor]:
        """Runs the program on DTensors and returns its visible outputs as DTensors.

        A tensor input is a DTensor that lies as the fusion has it: on the same mesh (of any rank,
        of GPUs or CPUs), each dimension of which cuts the same axis or none. Scalar inputs are
        numbers. A shard in another memory order than its input declares is copied in each call,
        which one warning says. An output's placements are those of its sharding
        (`fec.get_output_shardings`); its mesh is that of an input where one has it, else a new one
        with the inputs' names of dimensions. Outputs carry no gradient. All ranks of the program
        call it together.

        Raises, on every rank and before anything runs:
            DTensorError: an input is no DTensor, lies elsewhere than the fusion's, or is updated
                in place and its shard has another memory order than declared; the inputs' meshes
                name their dimensions differently; an output has no mesh; there is no default
                process group, or its ranks are not the Communicator's.
            UnsupportedError: a DTensor is a partial sum, or of shards that are no blocks.
            InputError: as `execute`.
            PeerError: another rank raised.
        """
        from fuser.frontend.dtensors import prepare_dtensors

        def prepare() -> Prepared[list[DTensor]]:
            return prepare_dtensors(self._executor_cache(), in_dtensors)

        return run_agreed(Communicator.instance(), self._devices(), prepare)

    def _devices(self) -> tuple[int, ...]:
        """Returns the ranks that run the program; they agree before anything is checked."""
        if hasattr(self, "fec"):
            return self.fec.devices
        return requested_devices(self._fusion) if self._fusion is not None else ()

    def _executor_cache(self) -> FusionExecutorCache:
        """Returns the cache, which takes the definition over at the first call."""
        if hasattr(self, "ke"):
            raise OtherEntranceError(
                "KernelExecutor already exists! Use manual_execute() to execute the fusion."
            )
        with _FIRST_CALL:
            if not hasattr(self, "fec"):
                valid, why = self.validate_definition()
                if not valid:
                    raise EmptyDefinitionError(why)
                assert self._fusion is not None
                self.fec = FusionExecutorCache(self._fusion)
                del self._fusion
        return self.fec

    def cuda_graphs(self) -> list[str]:
        """Returns, for each class of inputs that `execute` knows and each stream that ran it, how
        many CUDA graphs repeat its runs, or why none does.

        `FUSER_DISABLE=cuda_graphs`, or that option of a call, keeps runs from being captured.
        """
        return self.fec.cuda_graphs() if hasattr(self, "fec") else []

    def memory(self) -> Memory:
        """Returns the bytes that this definition keeps between runs, and what it shares with
        others.

        The intermediates of all programs of a stream lie in one buffer, as large as the largest
        program needs; `hostir.runtime.plan.Memory` has the numbers. Outputs are the caller's
        alone.
        """
        return self.fec.memory() if hasattr(self, "fec") else Memory()

    def compiled_runner(self) -> list[str]:
        """Returns, for each class of inputs that `execute` knows, how many calls the compiled
        runner has repeated since it last took such calls over, or why it repeats none, and after
        how many more calls it is asked again.

        `FUSER_DISABLE=compiled_runner`, or that option of a call, leaves all to Python.
        """
        return self.fec.compiled_runner() if hasattr(self, "fec") else []

    def overlap_report(self, inputs: Iterable[object]) -> str:
        """Returns which matmuls and communications of the program that ran last run side by side
        for inputs like these, and the predicted times that decided it
        (`docs/explanation/cost-model.md`).

        `FUSER_DISABLE=auto_overlap`, or that option of a call, leaves all as they are. Raises
        `FuserError` before the first run.
        """
        return self._executor_cache().overlap_report(inputs)

    def manual_execute(
        self, inputs: Iterable[object], heuristic_params: object = None
    ) -> list[torch.Tensor]:
        """Runs the fusion as one kernel with the schedule that the user gave its tensors.

        The schedule is read at the first call. No segmentation, no meshes. `heuristic_params`, what
        `sched.schedule` has returned, say nothing that the schedule does not: where their `lparams`
        and `cparams` ask for something else, `DefinitionError` or `UnsupportedError` is raised.
        """
        if not isinstance(heuristic_params, HeuristicParams | None):
            raise ArgumentError(
                "manual_execute(): heuristic_params: expected what sched.schedule returns, got "
                f"{show(heuristic_params)}{user_code(user_line())}"
            )
        if hasattr(self, "fec"):
            raise OtherEntranceError(
                "FusionExecutorCache already exists! Use execute() to execute the fusion."
            )
        if not hasattr(self, "ke"):
            executor = KernelExecutor()
            executor.compile(self.fusion)
            self.fusion.is_taken = True
            self.ke = executor
        if heuristic_params is None:
            return self.ke.run(flatten(inputs))
        return self.ke.run(flatten(inputs), heuristic_params.lparams, heuristic_params.cparams)

    @checked
    def validate(
        self,
        inputs: Sequence[object],
        reference_outputs: Sequence[torch.Tensor] | None = None,
        device: int | str | torch.device | None = None,
        **execute_kwargs: Any,
    ) -> list[torch.Tensor]:
        """Executes and compare with references, by default what torch computes in the same dtypes.

        Tolerances follow from dtype and reduction size (`fuser.frontend.validation`). Raises
        `ValidationError`, an AssertionError, naming the first output that differs.
        """
        run = partial(self.execute, device=device, **execute_kwargs)
        return validation.validate_run(self.fusion, run, inputs, reference_outputs)

    @checked
    def manual_validate(
        self, inputs: Sequence[object], reference_outputs: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """`validate` by `manual_execute`."""
        fusion = self.fusion
        return validation.validate_run(fusion, self.manual_execute, inputs, reference_outputs)


def execute_with_dtensors(fd: FusionDefinition, in_dtensors: Iterable[object]) -> list[DTensor]:
    """Runs a definition on DTensors, and return DTensors: `FusionDefinition.execute_with_dtensors`,
    which says more, as a function."""
    given: FusionDefinition = require("execute_with_dtensors", "fd", fd, FusionDefinition)
    return given.execute_with_dtensors(in_dtensors)
