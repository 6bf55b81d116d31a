"""Runs one fusion as one kernel, for tensors of any sizes and layouts.

A run first looks for a launch that was made for tensors of these shapes, strides and alignments. If
there is one, only the addresses are replaced. Otherwise, three steps make a new launch:

1. The layouts of the tensors are divided into classes (`LayoutClasses`).
2. The heuristic chooses the scheduler's parameters (threads, vector width, ..) from sizes and
   alignments.
3. Layout classes and parameters select a variant: one version of the kernel, as text and compiled.
   A new variant is lowered if there is none.

A fusion has at most `MAX_VARIANTS` variants. When that many exist, tensors with new layouts or
sizes use a similar variant, or the generic variant, which makes no assumptions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from fuser.ir.binding import free_inputs
from fuser.ir.domain.strided_layout import StridedLayout
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.memory_layout import Layout, LayoutClasses, stored_part, with_layout
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Number, Scalar, Symbol
from fuser.ir.text.printer import fusion_text
from fuser.kernels.kernel_variant import (
    KernelExtents,
    KernelSizes,
    Lowered,
    Sizes,
    Variant,
    address,
    alignment,
    describe,
    free_symbols,
    index_dtype,
    is_plain,
    launch_of,
    make_kernel,
    now,
    take_compiled,
    total_nbytes,
)
from fuser.lower.loop_tree import steps_of, with_stream_index
from fuser.lower.passes.launch_grid import refusal
from fuser.runtime.compile import compile_kernels
from fuser.runtime.compiled_kernel import CompiledKernel
from fuser.runtime.prepared_launch import BoundLaunch
from fuser.schedule import registry
from fuser.schedule.input_facts import Facts
from fuser.support import dumps, options, progress
from fuser.support.device import DESCRIPTIONS, VECTOR_BYTES, DeviceInfo, describe_device
from fuser.support.errors import (
    DefinitionError,
    FuserError,
    InputError,
    KernelError,
    UnsupportedError,
)
from fuser.support.kernel_source import KernelSource
from fuser.support.locks import make_reentrant_lock
from fuser.support.lru import Recent
from fuser.support.options import Settings

MAX_VARIANTS = 8
# The number of layouts (of all tensors together) for which a chooser is cached.
MAX_LAYOUTS = 16
# The number of combinations of shapes, strides and alignments whose launches are cached.
MAX_RECORDS = 256
# If inputs and outputs have at most SMALL_BYTES together, the kernel of a nearby size is used. Such
# tensors stay in the cache, and a compilation costs more than better parameters would save.
SMALL_BYTES = 32 << 20
TINY_BYTES = 4 << 20
NEARBY = 8

Value = torch.Tensor | Number
# Layouts, parameters of the scheduler, index type.
VariantKey = tuple[tuple[Layout, ...], Any, DataType]
Record = tuple[Variant, BoundLaunch]
_Choose = Callable[[Facts], Any]
_DUMPS = ("scheduler_params", "scheduled_ir", "fusion_ir", "kernel_ir", "cuda_kernel")


class KernelLaunch(NamedTuple):
    """The launch of a kernel for tensors of certain shapes, strides and alignments.

    `variant` is the version of the kernel that is launched. Each version is lowered for certain
    memory layouts and scheduler parameters.
    """

    variant: Variant
    launch: BoundLaunch
    executor: FusedKernelExecutor

    @property
    def kernel(self) -> CompiledKernel:
        """The compiled kernel, which must have been compiled before."""
        assert self.variant.compiled is not None, "a kernel is launched before it is compiled"
        return self.variant.compiled

    def explain(self, error: KernelError) -> KernelError:
        """Returns `error`, which this launch has raised, with the op and the user's source line
        added.
        """
        return self.executor.explained(self.variant, error)


class FusedKernelExecutor:
    """Runs one fusion as a kernel, scheduled by one scheduler. The tensors are those of one device:
    no axis is split over devices.

    A fusion may be one iteration of a stream loop, a loop on the host that computes a tensor part
    by part. It then has an additional last input: the number of the iteration. A run writes only
    the part of that iteration.

    - `scheduler`: the name of the scheduler, the automatic schedule that chooses loops and threads.
    - `name`: the name of the kernel.
    - `settings`: the options (features turned on and off) with which the fusion is compiled.
    - `device`: replaces the device description for the heuristics, so that a GPU's schedules can
      run on CPU tensors.
    - `checked`: compiles CPU kernels with all run-time checks.
    - `of`: the executor's name in dumps; `dump` receives the dumps.
    - `lowered`: the kernels lowered so far. Executors that are given the same object share kernels
      that differ only in names.
    """

    def __init__(
        self,
        fusion: Fusion,
        *,
        scheduler: str,
        name: str,
        device: DeviceInfo | None = None,
        checked: bool = False,
        settings: Settings | None = None,
        of: str = "",
        dump: dumps.Write = dumps.write,
        lowered: Lowered | None = None,
    ) -> None:
        fusion = with_stream_index(fusion)
        settings = options.settings() if settings is None else settings
        described = settings.argument("schedules_for")
        self.fusion = fusion
        # The number of iterations of the stream loop, None if the fusion has no stream axis. A
        # launch computes one iteration.
        self._steps = steps_of(fusion)
        self.name = name
        self._of, self._dump = of or name, dump
        self.scheduler = registry.scheduler(scheduler)
        self.checked = checked or settings.enabled("checked")
        # The error reports of checked kernels contain names of tensors, so each fusion needs its
        # own kernels.
        self._lowered = None if self.checked else lowered
        self._reuses_nearby = not settings.disabled("kernel_reuse")
        self._device = device or (DESCRIPTIONS[described] if described else None)
        self._tensors = [v for v in fusion.inputs if isinstance(v, TensorView)]
        self._tensors += fusion.outputs
        self._numbers = [tv.number for tv in self._tensors]
        self._places = {number: k for k, number in enumerate(self._numbers)}
        self._classes = [LayoutClasses(tv) for tv in self._tensors]
        # The layouts of contiguous tensors, if they do not depend on sizes, and the alignments.
        dense = [c.dense for c in self._classes if c.dense is not None]
        self._dense = tuple(dense) if len(dense) == len(self._classes) else None
        self._aligned = dict.fromkeys(self._numbers, VECTOR_BYTES)
        self._unaligned = dict.fromkeys(self._numbers, 1)
        self._scalars = [v for v in fusion.inputs if isinstance(v, Symbol)]
        self._free = free_symbols(fusion, self._scalars)
        free = free_inputs(fusion)
        numbers = [i for i, v in enumerate(fusion.inputs) if isinstance(v, Scalar)]
        # The positions, among the scalar inputs, of those that determine sizes.
        self._structural = [k for k, i in enumerate(numbers) if i not in free]
        self._extents = KernelExtents(fusion, self._tensors, name)
        # The functions that choose parameters, by layouts.
        self._choosers: Recent[object, _Choose] = Recent(MAX_LAYOUTS)
        self._latest_chooser: tuple[object, object, _Choose] = None, None, _chooses_nothing
        self._records: Recent[object, Record | None] = Recent(MAX_RECORDS)
        self._variants: dict[VariantKey, Variant] = {}
        # Variants with a folded grid, for launches with more CUDA blocks than the device accepts
        # along an axis.
        self._folded: dict[VariantKey, Variant] = {}
        self._generic: Variant | None = None
        self._lock = make_reentrant_lock()

    # ------------------------------------------------------------ running
    def run(
        self,
        inputs: Sequence[Value],
        outputs: Sequence[torch.Tensor],
        *,
        sizes: Sizes,
        stream: int | None = None,
    ) -> None:
        """Computes the outputs of the fusion into `outputs`, which the caller has allocated in the
        fusion's order.

        `sizes` has the values of the symbols for sizes. `stream` is the handle of a CUDA stream;
        None means the current stream.

        Raises:
            InputError: the number of tensors is wrong, or a tensor has a wrong number of
                dimensions.
            KernelError: a launch failed, or a checked kernel reported an error.
        """
        if self._steps is not None:
            self._check_step(self._steps, inputs, sizes)
        tensors = [v for v in inputs if isinstance(v, torch.Tensor)]
        tensors += outputs
        numbers = tuple(v for v in inputs if not isinstance(v, torch.Tensor))
        with self._lock:
            record = self._record(inputs, outputs, tensors, numbers, sizes)
            if record is None:
                self._run_empty(inputs, outputs, sizes)
                return
            variant, launch = record
            try:
                kernel = variant.compiled or self._compiled(variant, tensors)
                launch.run(kernel, tensors, numbers, stream)
            except KernelError as error:
                raise self.explained(variant, error) from None

    def launch_for(
        self,
        inputs: Sequence[Value],
        outputs: Sequence[torch.Tensor],
        *,
        sizes: Sizes,
        device: torch.device | None = None,
    ) -> KernelLaunch | None:
        """Returns the launch that `run` would execute for tensors of these shapes, strides and
        alignments, so that later calls can repeat it.

        Returns None if `run` launches nothing. Also returns None for a checked kernel (one that
        checks its memory accesses), whose launches are never repeated. If `device` is passed, the
        tensors may be meta tensors. The kernel of the returned launch may then still have to be
        compiled, with `compile_many`.
        """
        if self.checked:
            return None
        tensors = [*[v for v in inputs if isinstance(v, torch.Tensor)], *outputs]
        numbers = tuple(v for v in inputs if not isinstance(v, torch.Tensor))
        with self._lock:
            info = None if device is None else describe_device(device)
            record = self._record(inputs, outputs, tensors, numbers, sizes, info)
            if record is None:
                return None
            variant, launch = record
            if device is None and variant.compiled is None:
                self._compiled(variant, tensors)
        return KernelLaunch(variant, launch, self)

    def sizes_fit(self, shapes: Sequence[Sequence[Scalar]]) -> bool:
        """Whether the fusion accepts inputs and outputs of these symbolic shapes, for all values of
        the symbols."""
        return self._extents.fit(shapes)

    def launch_laid(
        self,
        tensors: Sequence[StridedLayout],
        sizes: Sizes,
        device: torch.device,
        numbers: Sequence[Number] = (),
        *,
        are_sized: bool = False,
    ) -> KernelLaunch | None:
        """Returns the launch that `run` would execute for tensors of which only the layouts are
        known, and for the scalar inputs `numbers`.

        Returns None if the layouts alone do not suffice for all checks, or if the kernel is not
        compiled. `are_sized` says that `sizes_fit` has accepted the shapes, which are then not
        checked again.
        """
        if self.checked or self._steps is not None:
            return None
        with self._lock:
            if are_sized:
                iterations = self._extents.iterations(sizes)
                bound = None if iterations is None else KernelSizes(sizes, sizes, iterations)
            else:
                bound = self._extents.at_once(tensors, sizes)
            if bound is None:
                return None
            if self._scalars:
                bound = bound.with_numbers(zip(self._scalars, numbers, strict=True))
            info = self._device or describe_device(device)
            are_plain = False not in [t.is_plain for t in tensors]
            variant, launch = self._bind_to(bound, tensors, info, are_plain=are_plain)
        if variant.compiled is None:
            return None
        return KernelLaunch(variant, launch, self)

    def _record(
        self,
        inputs: Sequence[Value],
        outputs: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        numbers: Sequence[Number],
        sizes: Sizes,
        device: DeviceInfo | None = None,
    ) -> Record | None:
        """Returns the version of the kernel and the launch for tensors of these shapes, strides and
        alignments. Both come from a cache if an earlier call had such tensors.

        Returns None if an extent is 0.
        """
        places = [(t.shape, t.stride(), address(t) & 15) for t in tensors]
        key: object = (
            *places,
            *[sizes.get(s) for s in self._free],
            *[numbers[i] for i in self._structural],
        )
        if key in self._records:
            return self._records[key]
        record = self._records.recall(key)
        if record is None:
            record = self.bind(inputs, outputs, sizes=sizes, device=device)
        self._records[key] = record
        return record

    def record(
        self,
        inputs: Sequence[Value],
        outputs: Sequence[torch.Tensor],
        *,
        sizes: Sizes,
        device: DeviceInfo,
    ) -> Record | None:
        """Returns the version of the kernel and the launch for these tensors, and caches both.

        Later calls of `run` with tensors of these shapes, strides and alignments use them. Returns
        None if an extent is 0.
        """
        tensors = [*[v for v in inputs if isinstance(v, torch.Tensor)], *outputs]
        numbers = tuple(v for v in inputs if not isinstance(v, torch.Tensor))
        with self._lock:
            return self._record(inputs, outputs, tensors, numbers, sizes, device)

    def explained(self, variant: Variant, error: KernelError) -> KernelError:
        """Returns `error`, which a launch of `variant` has raised, with the op and the user's
        source line added.
        """
        return KernelError(f"{error}\n{variant.blame(self.fusion, self._tensors, error)}")

    def _check_step(self, count: Scalar, inputs: Sequence[Value], sizes: Sizes) -> None:
        step, steps = inputs[-1] if inputs else None, int(sc.evaluate(count, sizes))
        if type(step) is not int or not 0 <= step < steps:
            raise InputError(
                f"{self.name}: the last input is the number of a stream loop's iteration. "
                f"It must be an int from 0 to {steps - 1}, but it is {step!r}"
            )

    def _run_empty(
        self, inputs: Sequence[Value], outputs: Sequence[torch.Tensor], sizes: Sizes
    ) -> None:
        """Computes the outputs by torch ops, because an extent is 0 and kernels need extents of at
        least 1."""
        if all(out.numel() == 0 for out in outputs):
            return
        from fuser.ops.reference.meaning import evaluate_fusion

        values = self._extents.values(inputs, outputs, sizes)
        results = evaluate_fusion(self.fusion, list(inputs), values=values)
        for tv, out, value in zip(self.fusion.outputs, outputs, results, strict=True):
            stored_part(tv, out).copy_(stored_part(tv, value))

    # ------------------------------------------------------------ binding
    def bind(
        self,
        inputs: Sequence[Value],
        outputs: Sequence[torch.Tensor],
        *,
        sizes: Sizes,
        device: DeviceInfo | None = None,
    ) -> Record | None:
        """Returns the version of the kernel that serves these tensors, and its launch. If there is
        no such version, a new one is lowered, but not compiled.

        Returns None if an extent is 0. Meta tensors are accepted if `device` is passed.
        """
        tensors = [*[v for v in inputs if isinstance(v, torch.Tensor)], *outputs]
        bound = self._extents.bind(inputs, outputs, tensors, sizes)
        if bound is None:
            return None
        info = self._device or device or describe(tensors)
        return self._bind_to(bound, tensors, info, are_plain=all(map(is_plain, tensors)))

    def _bind_to(
        self,
        bound: KernelSizes,
        tensors: Sequence[torch.Tensor | StridedLayout],
        device: DeviceInfo,
        *,
        are_plain: bool,
    ) -> Record:
        """Returns the version of the kernel that serves tensors with known sizes, and its launch.

        `bound` has the values of all sizes. `are_plain` says that all tensors are contiguous and
        aligned to a vector.
        """
        layouts, alignments = self._laid(tensors, are_plain=are_plain)
        return self._by_heuristic(layouts, alignments, bound, tensors, device)

    def _laid(
        self, tensors: Sequence[torch.Tensor | StridedLayout], *, are_plain: bool
    ) -> tuple[tuple[Layout, ...], Mapping[int, int]]:
        """Returns the memory layout of each tensor, and the alignments in bytes by tensor number.

        `are_plain` says that all tensors are contiguous and aligned to a vector.
        """
        if self._dense is not None and are_plain:
            return self._dense, self._aligned
        layouts = tuple([c.layout_of(t) for c, t in zip(self._classes, tensors, strict=True)])
        alignments = {
            number: alignment(t, layout)
            for number, t, layout in zip(self._numbers, tensors, layouts, strict=True)
        }
        return layouts, alignments

    def _by_heuristic(
        self,
        layouts: tuple[Layout, ...],
        alignments: Mapping[int, int],
        bound: KernelSizes,
        tensors: Sequence[torch.Tensor | StridedLayout],
        device: DeviceInfo,
    ) -> Record:
        """Returns the version of the kernel with the parameters that the heuristic chooses without
        measuring, and its launch.

        `layouts` and `alignments` are those of the tensors, and `bound` has the values of all
        sizes. If these tensors violate an assumption of that version, a version with fewer
        assumptions is returned.
        """
        # A kernel may assume more than its parameters say. The next tries are without vectors, then
        # the generic variant.
        for known in (alignments, self._unaligned, None):
            variant, launch = self._variant(layouts, known, alignments, bound, tensors, device)
            if launch is None:
                launch = self._launch_of(variant, tensors, bound.values, alignments)
            if launch is not None:
                return variant, launch
        raise KernelError(
            f"kernel {self.name} does not accept tensors of the shapes "
            f"{[tuple(t.shape) for t in tensors]} with the strides "
            f"{[t.stride() for t in tensors]}: pass tensors with "
            f"{' and '.join(map(str, variant.kernel.guards))}"
        )

    def _launch_of(
        self,
        variant: Variant,
        tensors: Sequence[torch.Tensor | StridedLayout],
        values: Mapping[Symbol, Number],
        alignments: Mapping[int, int],
    ) -> BoundLaunch | None:
        scalars, checked = self._scalars, self.checked

        def refuse(scalar: Scalar, problem: str) -> KernelError:
            return KernelError(variant.blame_number(self.fusion, scalar, problem))

        return launch_of(variant, tensors, values, alignments, scalars, refuse, checked=checked)

    # ------------------------------------------------------------ variants
    @property
    def _is_full(self) -> bool:
        return len(self._variants) >= MAX_VARIANTS

    def _variant(
        self,
        layouts: tuple[Layout, ...],
        known: Mapping[int, int] | None,
        alignments: Mapping[int, int],
        bound: KernelSizes,
        tensors: Sequence[torch.Tensor | StridedLayout],
        device: DeviceInfo,
    ) -> tuple[Variant, BoundLaunch | None]:
        """Returns the version of the kernel for these layouts. Also returns its launch if the
        launch had to be computed to choose the version, and None otherwise.

        The version may rely on the alignments `known`. If `known` is None, the generic version is
        returned, which relies on nothing. `alignments` are the actual alignments of the tensors,
        and `bound` has the values of all sizes.
        """
        if known is None:
            return self._generic_for(bound, device), None
        has_all = self._generic is not None and self._is_full
        if has_all and not any(k[0] == layouts for k in self._variants):
            return self._generic_for(bound, device), None
        params = self._chosen(layouts, known, bound, device)
        key = (layouts, params, index_dtype(bound.iterations, tensors))
        found = self._variants.get(key)
        if found is not None:
            return self._within_limits(found, key, bound, device), None
        nearby = self._nearby(key, alignments, bound.values, tensors)
        if nearby is not None:
            return nearby
        if self._is_full:
            return self._generic_for(bound, device), None
        found = self._variants[key] = self._lower_first(key, device)
        found.nbytes = total_nbytes(tensors)
        return self._within_limits(found, key, bound, device), None

    def _within_limits(
        self, variant: Variant, key: VariantKey, bound: KernelSizes, device: DeviceInfo
    ) -> Variant:
        """Returns `variant` if the device accepts its number of CUDA blocks for the sizes in
        `bound`.

        Otherwise, returns a version of the same kernel in which each launched block does the work
        of several blocks.

        Raises:
            DefinitionError: a schedule written by the user has too many blocks.
        """
        if variant.fits_grid(bound.values):
            return variant
        if self.scheduler is registry.scheduler("user"):
            raise refusal(self.name, self.fusion, *variant.shape(bound.values), device)
        if key not in self._folded:
            if len(self._folded) >= MAX_VARIANTS and variant is not self._generic:
                return self._generic_for(bound, device)
            self._folded[key] = self._lower_first(key, device, folded=True)
        return self._folded[key]

    def _generic_for(self, bound: KernelSizes, device: DeviceInfo) -> Variant:
        """Returns the generic version of the kernel, which makes no assumptions about layouts and
        sizes.

        If that version has too many CUDA blocks for the device with the sizes in `bound`, a
        launched block does the work of several.
        """
        variant = self._generic_variant(device)
        return self._within_limits(variant, self._generic_key(device), bound, device)

    def _chosen(
        self,
        layouts: tuple[Layout, ...],
        known: Mapping[int, int],
        bound: KernelSizes,
        device: DeviceInfo,
    ) -> Any:
        """Returns the schedule parameters (threads, vector width, ..) that the heuristic chooses
        for these layouts, alignments (`known`) and sizes (`bound`).
        """
        latest, its_device, choose = self._latest_chooser
        if latest is not layouts or its_device is not device:
            choose = self._chooser(layouts, device)
            self._latest_chooser = layouts, device, choose
        return choose(Facts(bound.sizes) if known is self._aligned else Facts(bound.sizes, known))

    def _chooser(self, layouts: tuple[Layout, ...], device: DeviceInfo) -> _Choose:
        found = self._choosers.recall((layouts, device))
        if found is None:
            found = self.scheduler.chooser(self._specialized(layouts)[0], device)
            self._choosers[layouts, device] = found
        return found

    def _nearby(
        self,
        key: VariantKey,
        alignments: Mapping[int, int],
        values: Mapping[Symbol, Number],
        tensors: Sequence[torch.Tensor | StridedLayout],
    ) -> Record | None:
        """Returns a version of the kernel that was made for other sizes but accepts these tensors,
        and its launch. This avoids a compilation.

        `key` has the layouts, parameters and index type of a version for exactly these tensors, and
        `values` their sizes. Returns None if no other version accepts them. Also returns None for
        large tensors, and for tensors much larger than those for which a version was made, because
        a new version would be faster. When `MAX_VARIANTS` versions exist, these tensors are
        accepted, too.
        """
        layouts, params, index = key
        nbytes = total_nbytes(tensors)
        is_full = self._is_full
        if (nbytes > SMALL_BYTES and not is_full) or not self._reuses_nearby:
            return None
        # Up to TINY_BYTES, a launch takes longer than the work. When half of the variants exist,
        # the others are reserved for other layouts.
        is_spare = nbytes > TINY_BYTES and 2 * len(self._variants) < MAX_VARIANTS
        fits = params.is_near if is_spare else params.is_alike
        for (its_layouts, its_params, its_index), variant in self._variants.items():
            if (its_layouts, its_index) != (layouts, index):
                continue
            if nbytes > NEARBY * variant.nbytes and not is_full:
                continue
            launch = fits(its_params) and self._launch_of(variant, tensors, values, alignments)
            if launch:
                return variant, launch
        return None

    def _generic_variant(self, device: DeviceInfo) -> Variant:
        if self._generic is None:
            self._generic = self._lower(self._generic_key(device), device)
        return self._generic

    def _generic_key(self, device: DeviceInfo) -> VariantKey:
        layouts = tuple(
            ((), ()) if c.order is None else (tuple(range(tv.ndim)), (False,) * tv.ndim)
            for tv, c in zip(self._tensors, self._classes, strict=True)
        )
        return layouts, self.scheduler.generic(device), DataType.Int

    def _specialized(self, layouts: tuple[Layout, ...]) -> tuple[Fusion, dict[int, TensorView]]:
        """Returns a copy of the fusion whose inputs and outputs have the memory layouts `layouts`.

        Also returns the copy's input and output tensors, by the numbers of the original tensors.
        """
        fusion, twins = self.fusion.copy()
        for tv, c, layout in zip(self._tensors, self._classes, layouts, strict=True):
            if c.order is not None:
                twins[tv].domain = with_layout(twins[tv].domain, layout)
        return fusion, {tv.number: twins[tv] for tv in self._tensors}

    def _lower_first(self, key: VariantKey, device: DeviceInfo, *, folded: bool = False) -> Variant:
        """Lowers the fusion with the chosen parameters, or else with simpler ones that can be
        lowered.

        `key` has the chosen parameters. The scheduler's list `ladder` begins with them and ends
        with the generic ones. With `folded`, each launched CUDA block may do the work of several.

        Raises:
            UnsupportedError, DefinitionError: the error for the last parameters of the list.
        """
        layouts, chosen, index = key
        refused: FuserError | None = None
        for params in self.scheduler.ladder(chosen, device):
            try:
                return self._lower((layouts, params, index), device, folded=folded)
            except (UnsupportedError, DefinitionError) as error:
                refused = error
        assert refused is not None
        raise refused

    def _lower(self, key: VariantKey, device: DeviceInfo, *, folded: bool = False) -> Variant:
        """Returns the version of the kernel for `key`.

        An executor of a fusion that is equal except for names may have lowered this version before.
        The executors then share it. Otherwise, it is lowered now. With `folded`, each launched CUDA
        block may do the work of several. If dumps are enabled, each executor lowers its own
        version, because dumps contain names.
        """
        if self._lowered is None or any(map(options.dump_enabled, _DUMPS)):
            return self._lower_alone(key, device, folded=folded)
        what = self.scheduler.name, key, device, folded
        return self._lowered.find_or_lower(
            self.fusion, what, self._places, lambda: self._lower_alone(key, device, folded=folded)
        )

    def _lower_alone(self, key: VariantKey, device: DeviceInfo, *, folded: bool) -> Variant:
        variant, scheduled = self._scheduled(key, device, folded=folded)
        kernel = variant.kernel
        texts: dict[str, Callable[[], str]] = {
            "scheduler_params": lambda: f"{self.name}: {variant.params}",
            "scheduled_ir": lambda: fusion_text(scheduled),
            "fusion_ir": lambda: fusion_text(scheduled),
            "kernel_ir": lambda: kernel.ir_text,
            "cuda_kernel": lambda: kernel.source.text,
        }
        assert texts.keys() == {*_DUMPS}
        for name, text in texts.items():
            if options.dump_enabled(name):
                self._dump(dumps.Dump(name, self._of, text()))
        return variant

    def _scheduled(
        self, key: VariantKey, device: DeviceInfo, *, folded: bool = False
    ) -> tuple[Variant, Fusion]:
        """Schedules and lowers the fusion for the layouts and parameters in `key`. Returns the
        version of the kernel, and the scheduled fusion.

        With `folded`, each launched CUDA block may do the work of several.
        """
        layouts, params, index = key
        fusion, twins = self._specialized(layouts)
        outputs = len(fusion.outputs)
        self.scheduler.apply(fusion, params)
        kernel = make_kernel(
            fusion, name=self.name, index_dtype=index, device=device, folded=folded
        )
        # A scheduler may replace an output by its copy. Positions do not change.
        named = dict(twins)
        for tv, out in zip(self._tensors[-outputs:], fusion.outputs, strict=True):
            named[tv.number] = out
        return Variant(kernel, params, named, self._places), fusion

    # ------------------------------------------------------------ compiling
    @property
    def variants(self) -> tuple[Variant, ...]:
        """All versions of the kernel that exist so far. The generic version is the last."""
        generic = () if self._generic is None else (self._generic,)
        return (*self._variants.values(), *self._folded.values(), *generic)

    def _compiled(self, variant: Variant, tensors: Sequence[torch.Tensor]) -> CompiledKernel:
        if variant.compiled is None:
            self._compile([variant], tensors[0].device)
        assert variant.compiled is not None
        return variant.compiled

    def _compile(self, variants: Sequence[Variant], device: torch.device) -> None:
        began = now()
        sources = [variant.kernel.source for variant in variants]
        compiled = compile_kernels(sources, device, checked=self.checked)
        take_compiled(variants, compiled, began)


# A launch to compile for: executor, inputs, outputs, sizes.
KernelRequest = tuple[FusedKernelExecutor, Sequence[Value], Sequence[torch.Tensor], Sizes]


def compile_many(
    requests: Sequence[KernelRequest],
    *,
    device: torch.device | str,
) -> int:
    """Lowers and compiles the kernels of many executors, which is faster than one by one. Returns
    how many kernels had to be compiled.

    Meta tensors with the right strides are accepted. On the CPU, one compiler process compiles all
    kernels at the end. On CUDA, threads compile each kernel while the next one is lowered.
    """
    count = 0
    # Reductions first, because they take the compiler longest.
    requests = sorted(requests, key=lambda request: request[0].scheduler.name != "reduction")
    for checked in dict.fromkeys(request[0].checked for request in requests):
        variants, began = list[Variant](), now()
        chosen = [request for request in requests if request[0].checked is checked]
        sources = _lower_missing(chosen, describe_device(device), variants)
        first = next(sources, None)
        if first is None:
            # The compilers and their caches are not asked, which would take longer than a launch.
            continue
        compiled = compile_kernels(chain([first], sources), device, checked=checked)
        take_compiled(variants, compiled, began)
        count += len(variants)
    return count


def _lower_missing(
    requests: Sequence[KernelRequest], device: DeviceInfo, variants: list[Variant]
) -> Iterator[KernelSource]:
    """Yields the source of each kernel that is not compiled yet, one per request at most.

    The version of the kernel to which the source belongs is appended to `variants`.
    """
    seen: set[int] = set()
    for number, (executor, inputs, outputs, sizes) in enumerate(requests, 1):
        progress.stage("kernel", number, len(requests))
        record = executor.record(inputs, outputs, sizes=sizes, device=device)
        if record is not None and record[0].compiled is None and id(record[0]) not in seen:
            seen.add(id(record[0]))
            variants.append(record[0])
            yield record[0].kernel.source
    progress.stage("the compiler")


def _chooses_nothing(facts: Facts) -> None:
    """Returns None. An executor calls this function in place of its heuristic, which chooses
    parameters, until the heuristic is built.
    """


# ----------------------------------------------------------------------
# For dumps of a kernel: the variant that serves some tensors, and its scheduled fusion.


def variant_of(request: KernelRequest, device: torch.device) -> Variant | None:
    """Returns the version of the kernel that a request would launch, lowered now if there is none.
    It is used for dumps.

    Returns None if nothing is launched.
    """
    executor, inputs, outputs, sizes = request
    info = describe_device(device)
    record = executor.record(inputs, outputs, sizes=sizes, device=info)
    return None if record is None else record[0]


def scheduled_fusion(
    executor: FusedKernelExecutor, variant: Variant, device: torch.device
) -> Fusion:
    """Returns the scheduled fusion from which a version of the kernel (`variant`) was lowered, for
    a dump.

    The fusion is scheduled again, because an executor does not store it.

    Raises:
        UnsupportedError: the executor does not hold the variant.
    """
    # An executor stores only the kernels, because scheduled fusions are large.
    info = executor._device or describe_device(device)  # pyright: ignore[reportPrivateUsage]
    held = (executor._variants, executor._folded)  # pyright: ignore[reportPrivateUsage]
    keys = [k for variants in held for k, v in variants.items() if v is variant]
    if variant is executor._generic:  # pyright: ignore[reportPrivateUsage]
        keys.append(executor._generic_key(info))  # pyright: ignore[reportPrivateUsage]
    if not keys:
        raise UnsupportedError(
            f"{executor.name}: this variant was timed, but not kept, so the schedule of the "
            "variant cannot be shown"
        )
    layouts, _, index = keys[0]
    return executor._scheduled((layouts, variant.params, index), info)[1]  # pyright: ignore[reportPrivateUsage]
