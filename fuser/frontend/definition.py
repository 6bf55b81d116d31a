"""FusionDefinition: defines a tensor program, then runs it.

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
from fuser.frontend.uneven_shards import Reread
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
    advice_on_nvfuser,
    counted,
    user_code,
    user_line,
)
from fuser.support.inputs import flatten
from fuser.support.locks import make_reentrant_lock
from fuser.support.options import NONE, settings
from hostir.runtime.plan import Memory
from multidevice.job.agreement import Extents, Prepared
from multidevice.job.communicator import Communicator, run_agreed
from multidevice.sharding.queries import requested_devices

if TYPE_CHECKING:
    from os import PathLike

    from torch.distributed.tensor import DTensor

    from fuser.ir.scalar.constructors import Number, Symbol
    from hostir.cost.rank_program import JobDescription
    from hostir.ir.program import HostIrContainer
    from hostir.profiling.timeline import Trace
    from hostir.profiling.tracer import Source

_NEVER_WRITTEN = (
    "Fusion does not exist! Use `with FusionDefinition() as fd: ...` to define a fusion."
)
# Held during the first call of a definition: two threads may make it at the same time.
_FIRST_CALL = make_reentrant_lock()


# Names that are not attributes (yet) -> the hint of the error.
_INSTEAD = {
    "fec": "the first execute creates it",
    "ke": "the first manual_execute creates it",
    "add_input": "define_tensor and define_scalar add the inputs, in their order",
    "inputs": "it is fd.fusion.inputs",
    "outputs": "it is fd.fusion.outputs",
    **dict.fromkeys(("run", "forward", "apply"), "it is called execute, or fd(x, y)"),
    "compile": "the first execute compiles it, for the sizes of its inputs",
    **dict.fromkeys(("to", "cuda", "cpu", "device"), "it runs on the device of its inputs"),
}


@partial(checked, name="execute")
def _flag(save_repro_inputs: bool | None) -> bool:
    return bool(save_repro_inputs)


def _defined_by(text: str | None) -> FusionDefinition:
    """Returns the definition that a Python text describes, as `repr` of a definition returns it.

    If `text` is None, returns an empty definition. `pickle` calls this function.
    """
    fd = FusionDefinition()
    if text is not None:
        names: dict[str, Any] = {"FusionDefinition": FusionDefinition, "DataType": DataType}
        exec(compile(text, "<definition>", "exec"), names)
        with fd:
            names["nvfuser_fusion"](fd)
    return fd


def _refused_call(given: int, named: Mapping[str, object]) -> ArgumentError:
    """Returns the error for a call of `execute` with arguments that `execute` does not accept.

    There are two cases: inputs are passed one by one, as `execute(a, b)`, instead of in one list,
    `execute([a, b])`; or a keyword is not the name of an option. `given` is the number of
    positional inputs, and `named` has the unknown keyword arguments.
    """
    options = ("device", "save_repro_inputs", "_enable_options", "_disable_options")
    name = next((n for n in named if advice_on_nvfuser("fd.execute", n)), next(iter(named), ""))
    text = (
        f"expected one list of inputs, got {counted(given, 'argument')}: write fd.execute([x, y]), "
        "or fd(x, y)"
    )
    if advice := advice_on_nvfuser("fd.execute", name):
        text = f"there is no option {name!r}: {advice}"
    elif near := get_close_matches(name, options, n=1):
        text = f"there is no option {name!r}; did you mean {near[0]}?"
    elif any(isinstance(value, torch.Tensor) for value in named.values()):
        listed = ", ".join(named)
        text = (
            f"{listed}: inputs have no names; pass them in the order of the definition: "
            f"write fd.execute([{listed}]), or fd({listed}); options are {', '.join(options)}"
        )
    elif named:
        text = (
            f"there is no option {name!r}; options are {', '.join(options)}. Inputs have no names: "
            "pass them in one list, in the order of the definition"
        )
    return ArgumentError(
        f"execute(): incompatible function arguments: {text}{user_code(user_line())}"
    )


class FusionDefinition:
    """A tensor program, which is first defined in a `with` block and then run.

    - `fd.ops` has the ops. `fd.sched` has the functions with which a user chooses loops and
      threads.
    - `fd.fusion` is the fusion (the graph of ops) that the user defined. Running never changes the
      fusion.
    - The first `execute` creates `fd.fec`, the cache of compiled programs. The fusion cannot be
      changed after that.

    Example:

        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, -1], contiguity=True)
            fd.add_output(fd.ops.relu(x))
        (out,) = fd.execute([torch.randn(2, 3)])
    """

    # Imported, not assigned: only then do type checkers know the members of these modules.
    import fuser.ops as ops
    import fuser.schedule as sched

    @checked
    def __init__(self, *, double_numbers: bool | None = None) -> None:
        """Creates an empty definition. A `with` block then defines the program.

        Args:
            double_numbers: Decides the dtype of an op on an integer or Bool tensor and a Python
                float. If True, the result is Double, as in nvFuser. If False, the result is Float,
                as in torch. By default, `FUSER_ENABLE=double_numbers` decides.
        """
        self._double_numbers = double_numbers
        self._fusion: Fusion | None = None
        self._fusion_guard: FusionGuard | None = None
        self.fec: FusionExecutorCache
        self.ke: KernelExecutor
        self.fake_inputs: list[object]

    if not TYPE_CHECKING:  # a type checker would accept every attribute

        def __getattr__(self, name: str) -> NoReturn:
            text = f"'FusionDefinition' object has no attribute {name!r}"
            is_op = name in self.ops.__all__ or name in SPELLED
            hint = advice_on_nvfuser("fd", name) or _INSTEAD.get(name)
            hint = hint or (f"ops are functions, fd.ops.{name}" if is_op else "")
            raise AttributeError(f"{text}: {hint}" if hint else text, name=name, obj=self)

    # ------------------------------------------------------------ the with block
    def __enter__(self) -> FusionDefinition:
        is_open = self.__dict__.get("_fusion_guard") is not None
        if is_open or hasattr(self, "fec") or hasattr(self, "ke"):
            why = (
                "is being written: its `with` block has not ended" if is_open else "has run already"
            )
            what = f"with: a definition can be written only once, and this one {why}"
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
        """The fusion (the graph of ops) as the user defined it.

        Raises:
            EmptyDefinitionError: no `with` block has begun.
        """
        if hasattr(self, "fec"):
            return self.fec.fusion()
        if self._fusion is None:
            raise EmptyDefinitionError(_NEVER_WRITTEN)
        return self._fusion

    def __repr__(self) -> str:
        """Returns the text of a Python program that creates this definition."""
        is_written = hasattr(self, "fec") or self._fusion is not None
        return (
            translate_fusion(self.fusion) if is_written else "<FusionDefinition, not written yet>"
        )

    def __reduce__(self) -> tuple[Callable[[str | None], FusionDefinition], tuple[str | None]]:
        """Returns a function and its argument, from which `pickle` and `copy` create an equal
        definition.

        The argument is the Python text of this definition. The copy has not run yet.
        """
        if self.__dict__.get("_fusion_guard") is not None:
            raise DefinitionError(
                "a definition can be copied only after its `with` block has ended"
                f"{user_code(user_line())}"
            )
        is_written = hasattr(self, "fec") or self._fusion is not None
        return _defined_by, (translate_fusion(self.fusion) if is_written else None,)

    # ------------------------------------------------------------ definition
    def define_tensor(self, *args: Any, **kwargs: Any) -> TensorView:
        """Adds a tensor input to the program and returns the tensor.

        The arguments are shape, contiguity, dtype and others; `fuser.ops.define.define_tensor`
        describes three ways to pass them. `execute` takes the inputs in the order in which they are
        defined.

        Example: `x = fd.define_tensor([-1, 768], contiguity=True, dtype=DataType.BFloat16)`
        """
        tv = define.define_tensor(*args, **kwargs)
        self.fusion.add_input(tv)
        return tv

    @checked
    def define_scalar(self, value: Any = None, dtype: DtypeLike | None = None) -> Scalar:
        """Creates a scalar and returns the scalar: a constant if `value` is passed, else an input.

        If `dtype` is None, an input has the dtype Double.
        """
        scalar = define.define_scalar(value, dtype)
        if scalar.is_symbolic():
            # A new scalar: the search among all inputs that add_input does is not needed.
            self.fusion.inputs.append(scalar)
            self.fusion.scalar_lines[scalar] = user_line()
        return scalar

    @checked
    def define_vector(self, size: int) -> list[Scalar]:
        """Adds `size` scalar inputs of dtype Int to the program and returns the new scalars.

        Raises:
            DefinitionError: `size` is negative or above 1024.
        """
        if not 0 <= size <= LONGEST:
            raise DefinitionError(f"define_vector: size must be from 0 to {LONGEST}, got {size}")
        return [self.define_scalar(None, DataType.Int) for _ in range(size)]

    @checked
    def from_pytorch(self, tensor: torch.Tensor, static_sizes: bool = False) -> TensorView:
        """Adds a tensor input with the dtype, memory order and contiguity of a torch tensor.

        Returns the new input. The sizes of the new input are symbolic unless `static_sizes` is
        True. If torch has a GPU, a CPU tensor without axes becomes a CPU scalar (`is_cpu`). In each
        call, the host reads the value of a CPU scalar.

        Raises:
            InputError: the tensor is neither on a CPU nor on a CUDA device.
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
        """Adds an output of the program.

        With `alias_input`, the output updates that input in place: `execute` writes it into the
        caller's tensor. A tensor that only updates an input is not returned.

        All ops read the value that an updated input had at the start of the call. If the updated
        input is itself added as an output, the call returns the caller's own tensor, with the
        updated value. If a view of it (such as a permute) is an output, the call returns a new
        tensor with the old values.

        Raises:
            DefinitionError: the output or the input does not belong to this definition, or their
                shapes or dtypes differ.
        """
        self.fusion.add_output(output, alias_input, where=user_line())

    @checked
    def validate_definition(self) -> tuple[bool, str | None]:
        """Returns whether the definition can run, and the reason if it cannot."""
        if not hasattr(self, "fec") and self._fusion is None:
            return False, _NEVER_WRITTEN
        if not self.fusion.outputs:
            return False, "Fusion is empty! It has no output: call fd.add_output in its definition"
        return True, None

    # ------------------------------------------------------------ execution
    def __call__(self, *inputs: object, **options: Any) -> list[torch.Tensor]:
        """Runs the program on `inputs`: `fd(x, y)` is the same as `fd.execute([x, y])`.

        `options` are further arguments of `execute`.
        """
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
        """Runs the program on `inputs` and returns its outputs in the order of `add_output`.

        - If the program splits a tensor over the devices of a mesh, this process passes the part
          that its own device stores (its shard).
        - Numbers are passed for scalar inputs. Nested sequences are flattened.
        - The options (`docs/reference/options.md`) apply to this call only.
        - `save_repro_inputs=True` records the inputs' shapes and dtypes for `last_repro_script`.
        - Outputs that only update an input are not returned.
        - Outputs carry no gradient, in backward or forward mode. The first input that requires a
          gradient, or is a dual tensor of `torch.autograd.forward_ad`, causes one warning.

        Raises:
            InputError: an input has a wrong type, number of dimensions, dtype, device or size, or
                the number of inputs is wrong.
            PeerError: another rank (process of the job) raised an error before anything was
                launched.

        Example: `(out,) = fd.execute([torch.randn(2, 3), 0.5])`
        """

        if others or named:
            raise _refused_call(1 + len(others), named)
        cache = self.__dict__.get("fec")
        try:
            if cache is not None and (save_repro_inputs is False or save_repro_inputs is None):
                # An empty list is the same as no options, and must not leave the fast path.
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
        """Runs the first call of `execute`, or a call with `save_repro_inputs`.

        If a rank (a process of the job) raises an error, all ranks that run the program raise an
        error. `given` are the device and the options of the call.
        """

        inputs = Reread.of(inputs)

        def prepare() -> Prepared[list[torch.Tensor]]:
            if not _flag(save_repro_inputs):
                return self._executor_cache().prepare_call(inputs, *given)
            flat = flatten(inputs)
            prepared = self._executor_cache().prepare_call(flat, *given)
            self.fake_inputs = fake_inputs(flat)
            return prepared

        def resolve(extents: Extents) -> Prepared[list[torch.Tensor]]:
            return self._executor_cache().resolve((inputs, *given), extents)

        return run_agreed(Communicator.instance(), self._devices(), prepare, resolve)

    # ------------------------------------------------------------ scripts
    def repro_script_for(self, inputs: Iterable[object] | None = None) -> str:
        """Returns a Python script that defines this program and runs it on inputs like `inputs`.

        The script's inputs have the same shapes, strides, dtypes and devices, and random values. If
        `inputs` is None, the script only defines the program.
        """
        return repro_script(repr(self), inputs)

    def last_repro_script(self) -> str:
        """Returns the script that reproduces the last `execute(save_repro_inputs=True)`.

        Raises:
            NoReproInputsError: there was no such call. This error is also an AssertionError.
        """
        if not hasattr(self, "fake_inputs"):
            raise NoReproInputsError(
                "last_repro_script: no inputs are remembered; call execute with "
                "save_repro_inputs=True first"
            )
        return self.repro_script_for(self.fake_inputs)

    def _report(self, error: Exception, inputs: object) -> None:
        """Adds a note to an error of a call with `inputs`: a script that reproduces the error.

        The caller has found that the error may be a fault of this project, not of the user.
        """
        try:
            given = inputs if isinstance(inputs, list | tuple) else None
            report(error, self.repro_script_for(given))
        except Exception as another:  # the first error matters more
            error.add_note(f"(no script could be made that reproduces it: {another})")

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
        """Runs the program several times on `inputs` and returns a timeline of the runs
        (`hostir.profiling.timeline.Trace`).

        For each rank (process of the job), the timeline has one track per CUDA stream and one track
        for the host. The trace also has the times in which the program computes, communicates, and
        does neither. All ranks of the program must call this method together. Each rank gets the
        traces of all ranks.

        Args:
            path: The file for the timeline, in the format of Perfetto. The first rank writes it.
            warm_up: Number of runs before anything is measured.
            repeat: Number of runs per measurement. There are three measurements: whole runs as
                `execute` does them (with CUDA graphs, if possible), whole runs that issue ops one
                by one, and runs with a time for each op. The timeline shows the last run.
            source: The clock for the times of a GPU: "cupti", "events" (around each op), or "auto",
                the first of these that works. `Trace.source` is the one used. On the CPU, the times
                are always those of the host's clock.
            predicted: Adds the timeline that the cost model predicts, for "h200" or for a file that
                describes a machine (`docs/explanation/cost-model.md`).

        Inputs, `device` and options are those of `execute`. Inputs that the program updates in
        place keep their values. The runs of the timeline issue the same recorded list of ops that
        `execute` repeats, but one by one, never as a CUDA graph.

        Raises:
            InputError: in the same cases as `execute`; or `path` cannot be written, which is
                checked before anything runs.
            ExecutionError: `source` cannot measure times of the device.
            PeerError: another rank raised an error.
        """
        from hostir.profiling.tracer import Asked

        asked = Asked(path, warm_up, repeat, source, predicted)

        def prepare() -> Prepared[Trace]:
            cache = self._executor_cache()
            return cache.prepare_trace(inputs, asked, device, _enable_options, _disable_options)

        return run_agreed(Communicator.instance(), self._devices(), prepare)

    def execute_with_dtensors(self, in_dtensors: Iterable[object]) -> list[DTensor]:
        """Runs the program on DTensors (torch's tensors that are distributed over processes) and
        returns its outputs as DTensors. Outputs that only update an input are not returned.

        - A tensor input is a DTensor with the mesh and the sharding that the fusion declares for
          that input. The mesh may have any number of dimensions, and GPUs or CPUs.
        - Scalar inputs are numbers.
        - If this process's part of a DTensor has another memory order than declared, each call
          copies it. One warning reports the copies.
        - An output has the placements that `fec.get_output_shardings` returns. Its mesh is that of
          an input on the same devices. If no input has those devices, a new mesh with the inputs'
          dimension names is created.
        - Outputs carry no gradient.

        All ranks (processes) of the program must call this method together. An error is raised on
        every rank, before anything runs.

        Raises:
            DTensorError: an input is not a DTensor, or has another mesh or sharding than declared;
                an input that is updated in place has another memory order than declared; the
                inputs' meshes have different dimension names; an output has no mesh; there is no
                default process group, or its ranks are not the Communicator's.
            UnsupportedError: a DTensor is a partial sum, or its parts are not contiguous blocks.
            InputError: in the same cases as `execute`.
            PeerError: another rank raised an error.
        """
        from fuser.frontend.dtensors import prepare_dtensors

        def prepare() -> Prepared[list[DTensor]]:
            return prepare_dtensors(self._executor_cache(), in_dtensors)

        return run_agreed(Communicator.instance(), self._devices(), prepare)

    def _devices(self) -> tuple[int, ...]:
        """Returns the ranks (processes of the job) that run the program.

        These ranks compare their calls before anything else is checked.
        """
        if hasattr(self, "fec"):
            return self.fec.devices
        return requested_devices(self._fusion) if self._fusion is not None else ()

    def _executor_cache(self) -> FusionExecutorCache:
        """Returns the cache of compiled programs of this definition.

        The first call of this method creates the cache. The fusion cannot be changed after that.
        """
        if hasattr(self, "ke"):
            raise OtherEntranceError(
                "KernelExecutor already exists! Use manual_execute() to execute the fusion. This "
                "definition has already run by manual_execute"
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
        """Returns lines of text: how many CUDA graphs repeat the runs of this program, or why none
        does.

        There is one line for each kind of inputs (shapes, strides, dtypes) and each stream on which
        such inputs ran. `FUSER_DISABLE=cuda_graphs`, or this option of a call, turns CUDA graphs
        off.
        """
        return self.fec.cuda_graphs() if hasattr(self, "fec") else []

    def memory(self) -> Memory:
        """Returns how many bytes this definition holds between runs, and how many of them are
        shared with other programs.

        The intermediate results of all programs on a stream share one buffer, which is as large as
        the largest program needs. Outputs belong to the caller. See `hostir.runtime.plan.Memory`.
        """
        return self.fec.memory() if hasattr(self, "fec") else Memory()

    def compiled_runner(self) -> list[str]:
        """Returns lines of text: how many calls the compiled runner has repeated, or why it repeats
        none.

        The compiled runner is a C function that repeats the recorded launches of a call. There is
        one line for each kind of inputs (shapes, strides, dtypes). A runner that rejects too many
        calls is dropped. The line then says after how many calls a new runner is tried, which
        counts from 0 again. `FUSER_DISABLE=compiled_runner`, or this option of a call, runs
        everything in Python.
        """
        return self.fec.compiled_runner() if hasattr(self, "fec") else []

    def overlap_report(self, inputs: Iterable[object]) -> str:
        """Returns a report on which matmuls and communications run at the same time (overlap).

        The report is about the program that ran last. `inputs` are inputs of that program; their
        sizes decide. The report has the predicted times by which overlap was chosen or not (see
        `docs/explanation/cost-model.md`). `FUSER_DISABLE=auto_overlap`, or this option of a
        call, turns overlap off.

        Raises:
            FuserError: the program has not run yet.
        """
        return self._executor_cache().overlap_report(inputs)

    def lower_for_job(
        self, inputs: Sequence[object] | None, job: JobDescription
    ) -> tuple[HostIrContainer, Mapping[Symbol, Number]]:
        """Returns the host program that the ranks of a job run, and the values of the symbols of
        its inputs. `hostir.program_for` calls this method, and verifies the program.

        The job need not exist. `inputs` has the shape of each whole tensor, and the value of each
        number.
        """
        return self._executor_cache().lower_for_job(inputs, job)

    def manual_execute(
        self, inputs: Iterable[object], heuristic_params: object = None
    ) -> list[torch.Tensor]:
        """Runs the whole fusion as one kernel, with the loops and threads (schedule) that the user
        has chosen for its tensors.

        The schedule is read at the first call. The tensors must not be distributed over devices.
        `heuristic_params` is the result of `sched.schedule`. These parameters do not change the
        schedule, but their `lparams` and `cparams` must agree with it.

        Raises:
            DefinitionError: the parameters contradict the schedule.
            UnsupportedError: a parameter or the fusion is not supported.
            OtherEntranceError: `execute` has been called before.
        """
        if not isinstance(heuristic_params, HeuristicParams | None):
            raise ArgumentError(
                "manual_execute(): heuristic_params: expected the result of sched.schedule, got "
                f"{show(heuristic_params)}{user_code(user_line())}"
            )
        if hasattr(self, "fec"):
            raise OtherEntranceError(
                "FusionExecutorCache already exists! Use execute() to execute the fusion. This "
                "definition has already run by execute"
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
        """Runs `execute`, compares the outputs with references, and returns the outputs.

        If `reference_outputs` is None, the references are torch's results in the same dtypes. The
        tolerances depend on the dtype and the size of reductions (`fuser.frontend.validation`).
        `execute_kwargs` are further arguments of `execute`.

        Raises:
            ValidationError: an output differs. The message names the first such output. This error
                is also an AssertionError.
        """
        run = partial(self.execute, device=device, **execute_kwargs)
        return validation.validate_run(self.fusion, run, inputs, reference_outputs)

    @checked
    def manual_validate(
        self, inputs: Sequence[object], reference_outputs: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Runs `manual_execute`, compares the outputs with references, and returns the outputs.

        If `reference_outputs` is None, the references are torch's results in the same dtypes.

        Raises:
            ValidationError: an output differs. The message names the first such output.
        """
        fusion = self.fusion
        return validation.validate_run(fusion, self.manual_execute, inputs, reference_outputs)


def execute_with_dtensors(fd: FusionDefinition, in_dtensors: Iterable[object]) -> list[DTensor]:
    """Runs a definition on DTensors (torch's tensors that are distributed over processes) and
    returns DTensors.

    The function does the same as the method `FusionDefinition.execute_with_dtensors`.
    """
    given: FusionDefinition = require("execute_with_dtensors", "fd", fd, FusionDefinition)
    return given.execute_with_dtensors(in_dtensors)
