"""Kernels whose loops and threads (schedule) the user has chosen:
`FusionDefinition.manual_execute`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from fuser.frontend.implicit_inputs import Draws, FloatSizes, HostScalars
from fuser.frontend.profiler import profile_of_kernel, profiler_here
from fuser.ir.binding import Argument
from fuser.ir.dtypes import DataType, to_torch
from fuser.ir.fusion import Fusion
from fuser.ir.ops.nodes import LibraryOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Symbol
from fuser.kernels import executor
from fuser.kernels.kernel_variant import make_kernel
from fuser.lower.loop_tree import steps_of
from fuser.passes.concretize import refine_extents
from fuser.passes.resolve_symbolic import is_undecided
from fuser.schedule.automatic import CompileParams, LaunchParams, SchedulerType
from fuser.support import dumps, options
from fuser.support.arguments import checked
from fuser.support.device import DESCRIPTIONS, describe_device
from fuser.support.errors import DefinitionError, NotCompiledError, UnsupportedError, user_code
from fuser.support.inputs import device_of, flatten
from hostir.ir.shard_layout import allocated_strides
from hostir.runtime.inputs import ExactNumbers, InputBinder


class KernelExecutor:
    """Runs a fusion as one kernel, with the loops and threads (schedule) that the user has chosen
    for its tensors.

    `compile` copies the schedule. nvFuser distinguishes kernels by the four numbers of the
    constructor. In this class they have no effect, except that profiles show `fusion_id`.
    """

    @checked
    def __init__(
        self, fusion_id: int = 0, concrete_id: int = 0, runtime_id: int = 0, group_id: int = 0
    ) -> None:
        self._numbers = fusion_id, concrete_id, runtime_id, group_id
        self._executor: executor.FusedKernelExecutor | None = None
        self._is_profiled = bool(options.profiler_modes())

    @checked
    def compile(
        self,
        fusion: Fusion,
        args: Sequence[object] = (),
        launch_constraints: LaunchParams | None = None,
        compile_params: CompileParams | None = None,
        scheduler_type: SchedulerType = SchedulerType.none,
    ) -> None:
        """Copies the fusion with its current schedule (loops and threads), and compiles its kernel
        for the inputs `args`.

        If `args` is empty, the first `run` compiles the kernel. `scheduler_type` has no effect,
        because the schedule is that of the tensors.

        Raises:
            UnsupportedError: the fusion has an op that no kernel computes, a mesh, an axis that a
                loop on the host computes part by part, aliased outputs, or random ops without a
                seed; or a parameter is not supported.
            DefinitionError: the parameters contradict the schedule.
        """
        del scheduler_type  # the schedule is that of the tensors
        _check_takes(fusion)
        (compile_params or CompileParams()).check()
        self._scalars = HostScalars.of(fusion)
        self._fusion = fusion.copy()[0] if self._scalars is None else self._scalars.fusion
        self._float_sizes = FloatSizes.of(self._fusion)
        if self._float_sizes is not None:
            self._fusion = self._float_sizes.fusion
        refine_extents(self._fusion)
        self._binder = InputBinder(self._fusion)
        self._exact = ExactNumbers(self._fusion.exprs, self._fusion.inputs)
        self._executor = executor.FusedKernelExecutor(
            self._fusion, scheduler="user", name="user", of=f"the kernel of {dumps.next_fusion()}"
        )
        if args:
            self._launch(self._flat(args), launch_constraints, compile_params)

    def _flat(self, args: Sequence[object]) -> list[Argument]:
        inputs = flatten(args) if self._scalars is None else self._scalars.read(args)
        return inputs if self._float_sizes is None else self._float_sizes.complete(inputs)

    def is_compiled(self) -> bool:
        """Returns whether `compile` has been called."""
        return self._executor is not None

    def is_programmatic_dependent_launch_enabled(self) -> bool:
        """Returns False, because a kernel always starts after the previous kernel has ended."""
        return False

    @checked
    def run(
        self,
        args: Sequence[object],
        launch_constraints: LaunchParams | None = None,
        compile_params: CompileParams | None = None,
    ) -> list[torch.Tensor]:
        """Runs the kernel on the inputs `args`, and returns the outputs in the fusion's order.

        The outputs are new tensors.

        Raises:
            NotCompiledError: `compile` has not been called.
            DefinitionError: the parameters contradict the schedule.
            UnsupportedError: a parameter is not supported.
        """
        if self._executor is None:
            raise NotCompiledError(
                "KernelExecutor.run: there is no kernel yet; compile a fusion first"
            )
        inputs = self._flat(args)
        if launch_constraints is not None or compile_params is not None:
            self._launch(inputs, launch_constraints, compile_params)
        outputs, sizes = self._outputs(inputs)
        run = partial(self._executor.run, inputs, outputs, sizes=sizes)
        profiler = profiler_here(is_on=self._is_profiled)
        if profiler is None:
            run()
            return outputs
        from hostir.profiling.profiler import profile_call

        found = self._executor.launch_for(inputs, outputs, sizes=sizes)
        given = (inputs, outputs), device_of(inputs, None), run, profiler.begin(by_hand=True)
        taken = profile_call(found, "a kernel of no elements", *given)
        profiler.take(profile_of_kernel(taken, self._numbers[0]))
        return outputs

    def _launch(
        self,
        inputs: list[Argument],
        launch_constraints: LaunchParams | None,
        compile_params: CompileParams | None,
    ) -> None:
        """Compiles the kernel for inputs like these, if necessary, and checks the launch and
        compile parameters that the user passed.

        The check raises an error if the parameters contradict the compiled kernel or its launch.
        """
        assert self._executor is not None
        (compile_params or CompileParams()).check()
        outputs, sizes = self._outputs(inputs)
        found = self._executor.launch_for(inputs, outputs, sizes=sizes)
        if found is None:
            return  # nothing is launched
        (launch_constraints or LaunchParams()).check(found.launch)
        text = found.variant.kernel.source.text
        is_narrow = text.startswith("#define nvfuser_index_t int\n")
        index_type = DataType.Int32 if is_narrow else DataType.Int
        (compile_params or CompileParams()).check_kernel(index_type, device_of(inputs, None))

    def _outputs(self, inputs: Sequence[Argument]) -> tuple[list[torch.Tensor], dict[Symbol, int]]:
        """Allocates the outputs for inputs like these.

        Returns the outputs, and the values of the integer symbols (sizes).
        """
        device = device_of(inputs, None)
        values = self._binder.bind(inputs, device)
        if self._exact:
            self._exact.check(values)
        outputs: list[torch.Tensor] = []
        for out in self._fusion.outputs:
            shape = [int(sc.evaluate(self._fusion.canonical(x), values)) for x in out.shape()]
            strides = allocated_strides(out, shape)
            dtype = to_torch(out.dtype())
            outputs.append(torch.empty_strided(shape, strides, dtype=dtype, device=device))
        return outputs, {s: v for s, v in values.items() if isinstance(v, int)}

    def kernel_text(self) -> str:
        """Returns the CUDA text of all compiled versions of the kernel that exist so far.

        There are several, for example, if inputs had different memory layouts.
        """
        variants = () if self._executor is None else self._executor.variants
        return "\n".join(v.kernel.source.text for v in variants)


def _check_takes(fusion: Fusion) -> None:
    """Checks that a fusion can be computed by one kernel with the user's schedule.

    Raises:
        UnsupportedError: the fusion has a feature that a single kernel cannot have.
        DefinitionError: an output was added twice.
    """
    what = "KernelExecutor does not support the Fusion provided."
    library = next((op for op in fusion.used_exprs() if isinstance(op, LibraryOp)), None)
    if library is not None:
        raise UnsupportedError(
            f"{what} {library.name}, which computes {library.out_tensor}, is a library call, and "
            f"cannot be in a kernel{user_code(library.where)}: use execute()"
        )
    meshed = next((tv for tv in fusion.tensors() if tv.mesh is not None), None)
    if meshed is not None:
        raise UnsupportedError(f"{what} {meshed} has a mesh: use execute()")
    if fusion.aliases:
        alias = fusion.aliases[0]
        raise UnsupportedError(
            f"{what} {alias.out} updates input {alias.into} in place{user_code(alias.where)}: use "
            "execute()"
        )
    undecided = next(filter(is_undecided, fusion.used_exprs()), None)
    if undecided is not None:
        raise UnsupportedError(
            f"{what} The axes of {undecided.outputs[0]} depend on the sizes of "
            f"{undecided.inputs[0]} in each call{user_code(undecided.where)}: define the inputs "
            "with constant sizes, or use execute()"
        )
    if steps_of(fusion) is not None:
        raise UnsupportedError(
            f"{what} An axis is on ParallelType.stream, and a kernel runs on one stream: use "
            "execute()"
        )
    if Draws.of(fusion) is not None:
        raise UnsupportedError(
            f"{what} Random ops need rng_seed and rng_offset, because only execute() takes them "
            "from torch's generator"
        )
    first: dict[object, int] = {}
    for k, out in enumerate(fusion.outputs):
        if first.setdefault(out, k) != k:
            raise DefinitionError(
                f"{what} Output {k}, {out}, is also output {first[out]}: call add_output once for "
                f"each tensor{user_code(out.user_line())}"
            )


@partial(checked, name="print_kernel")
def _print_kernel(self: Fusion, compile_params: CompileParams | None = None) -> str:
    """Returns the CUDA text of the fusion as one kernel, with the current schedule of its tensors.

    The kernel is for the current GPU. Without a GPU, the kernel is for an H200. Raises the errors
    of `KernelExecutor.compile`, for example for an op that no kernel computes.
    """
    _check_takes(self)
    params = compile_params or CompileParams()
    params.check()
    scalars = HostScalars.of(self)
    fusion = self.copy()[0] if scalars is None else scalars.fusion
    sizes = FloatSizes.of(fusion)
    fusion = fusion if sizes is None else sizes.fusion
    refine_extents(fusion)
    device = describe_device("cuda") if torch.cuda.is_available() else DESCRIPTIONS["h200"]
    index = params.index_type or DataType.Int
    return make_kernel(
        fusion, name="CUDAGeneratedKernel", index_dtype=index, device=device
    ).source.text


# `fuser.ir` knows no kernels.
Fusion.print_kernel = _print_kernel
