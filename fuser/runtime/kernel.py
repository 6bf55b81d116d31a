"""Kernels from their text to something that runs: the types, and the entrance for both devices."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from fuser.device import device_parts
from fuser.errors import KernelError
from fuser.kernel_source import KernelSource
from fuser.locks import make_lock

if TYPE_CHECKING:
    import torch

Dim3: TypeAlias = tuple[int, int, int]


class TensorLike(Protocol):
    """What a launch needs of a tensor; `torch.Tensor` has it."""

    def data_ptr(self) -> int: ...


# For a pointer: a tensor or an address; a checked CPU kernel needs a tensor or (address, nbytes).
Argument: TypeAlias = "int | float | bool | TensorLike | tuple[int, int]"


class LaunchCall(NamedTuple):
    """A launch as one foreign call: `function(*arguments)` returns 0, or what `fail` is told.

    `words[i]` is parameter i as the kernel will read it, 8 bytes: addresses are replaced there.
    """

    words: Any
    function: Callable[..., int]
    arguments: tuple[Any, ...]
    # Raises `KernelError` that explains a status, unless the launch could be made after all.
    fail: Callable[[int], None]
    # On CUDA, where the addresses of the words stand, as the driver takes them.
    packed: int = 0
    # The addresses of the function and of what it is given, for a caller in C; () for none.
    raw: tuple[int, ...] = ()


class PreparedLaunch(ABC):
    """A launch with packed arguments, for a runner that repeats it.

    Only pointers can be replaced; scalars and shape stay as they were packed. Not to be shared
    between threads. The caller keeps the tensors alive.
    """

    @abstractmethod
    def set_pointer(self, param: int, address: int) -> None:
        """Replaces the address of pointer parameter number `param`."""

    @abstractmethod
    def run(self, stream: int | None = None) -> None:
        """Launches; `stream` is a raw CUDA handle (None: torch's current), unused on the CPU."""

    @abstractmethod
    def bind(self, stream: int) -> LaunchCall:
        """Returns the launch on a stream as a call, which lives as long as this object."""


class CompiledKernel(ABC):
    """A kernel that is ready to run on one device."""

    def __init__(self, source: KernelSource) -> None:
        self.source = source
        self.name = source.name

    @abstractmethod
    def launch(
        self,
        args: Sequence[Argument],
        *,
        grid: Dim3,
        block: Dim3,
        smem_bytes: int = 0,
        stream: int | None = None,
    ) -> None:
        """Runs the kernel (on CUDA: enqueues it) with one argument for each parameter.

        Raises:
            KernelError: wrong arguments, an impossible shape, a device error, or a finding of
                checked mode.
        """

    @abstractmethod
    def prepare(
        self, args: Sequence[Argument], *, grid: Dim3, block: Dim3, smem_bytes: int = 0
    ) -> PreparedLaunch:
        """Packs the arguments once, for repeated launches."""

    def _argument_error(self, args: Sequence[Argument], cause: Exception) -> KernelError:
        """Explains why `args` could not be packed."""
        expected = len(self.source.params)
        if len(args) != expected:
            return KernelError(
                f"kernel {self.name} takes {expected} arguments, {len(args)} were given"
            )
        given = ", ".join(
            f"{param.name}: {param.ctype}{'*' if param.is_pointer else ''} = {type(arg).__name__}"
            for param, arg in zip(self.source.params, args, strict=True)
        )
        return KernelError(f"kernel {self.name}: cannot pack its arguments ({cause}): {given}")


class _Statistics:
    def __init__(self) -> None:
        self.lock = make_lock()
        self.compilations = 0
        self.requests = 0


_statistics = _Statistics()
# Kernels live as long as somebody can launch them.
_memory: weakref.WeakValueDictionary[tuple[str, str], CompiledKernel]
_memory = weakref.WeakValueDictionary()
_memory_lock = make_lock()


def compilations() -> int:
    """How many kernels were really compiled in this process; hits of either cache do not count."""
    return _statistics.compilations


def kernel_requests() -> int:
    """How many kernels `compile_kernels` and `compile_cubin` were asked for in this process."""
    return _statistics.requests


def count_compilations(kernels: int) -> None:
    """Adds to `compilations()`; called by the compiler drivers of this package."""
    with _statistics.lock:
        _statistics.compilations += kernels


def count_requests(kernels: int) -> None:
    """Adds to `kernel_requests()`; called by the entrances of this package."""
    with _statistics.lock:
        _statistics.requests += kernels


def clear_memory_cache() -> None:
    """Forgets the compiled kernels of this process: the next request goes to the disk cache."""
    with _memory_lock:
        _memory.clear()


def compile_kernels(
    sources: Iterable[KernelSource], device: torch.device | str, *, checked: bool = False
) -> list[CompiledKernel]:
    """Compiles kernels for a device, or takes them from the memory or disk cache, in order.

    On the CPU, the kernels that are missing go into one translation unit; on CUDA each compiles in
    a thread of its own, from the moment when `sources` yields it. `checked` (CPU only) makes
    kernels that check bounds, alignment, barriers, and shared memory for uninitialised reads and
    races.

    Raises:
        CompileError: the compiler is missing or refuses a kernel.
    """
    kind, index = device_parts(device)
    compile_missing: Callable[[Iterable[KernelSource]], list[CompiledKernel]]
    if kind == "cpu":
        from fuser.runtime import simt

        variant = "cpu-checked" if checked else "cpu"
        compile_missing = simt.compile_checked if checked else simt.compile_unchecked
        key_of = simt.kernel_key_checked if checked else simt.kernel_key_unchecked
    elif kind == "cuda":
        if checked:
            raise KernelError("checked kernels run on the CPU only")
        from fuser.runtime import cuda_kernel, nvrtc

        arch = cuda_kernel.architecture(index)
        variant = f"cuda:{arch}"

        def compile_cuda(missing: Iterable[KernelSource]) -> list[CompiledKernel]:
            return cuda_kernel.compile_for_device(missing, arch)

        compile_missing = compile_cuda

        def key_of(source: KernelSource) -> str:
            return nvrtc.kernel_key(source, arch)
    else:
        raise KernelError(f"kernels run on cpu and cuda devices, not on {device}")
    keys: list[tuple[str, str]] = []
    found: dict[tuple[str, str], CompiledKernel] = {}
    missing: dict[tuple[str, str], KernelSource] = {}

    def yield_missing() -> Iterator[KernelSource]:
        for source in sources:
            key = (variant, key_of(source))
            keys.append(key)
            kernel = found.get(key) or _memory.get(key)
            if kernel is not None:
                found[key] = kernel
            elif key not in missing:
                missing[key] = source
                yield source

    # No lock meanwhile: what makes a source takes locks, whose holders may be about to compile.
    compiled = compile_missing(yield_missing())
    with _memory_lock:
        for key, kernel in zip(missing, compiled, strict=True):
            found[key] = _memory.setdefault(key, kernel)
    count_requests(len(keys))
    return [found[key] for key in keys]


def compiler_of(device: torch.device | str, *, checked: bool = False) -> str:
    """Returns a digest of what makes machine code of a kernel's text on a device: compiler, flags,
    headers, architecture."""
    kind, index = device_parts(device)
    if kind == "cpu":
        from fuser.runtime import simt

        return simt.compiler_key(checked)
    from fuser.runtime import cuda_kernel, nvrtc
    from fuser.runtime.kernel_cache import digest

    return digest(nvrtc.compiler_key(), cuda_kernel.architecture(index))


def compile_cubin(sources: Sequence[KernelSource]) -> list[bytes]:
    """Compiles kernels for sm_90a with NVRTC; needs no GPU and no driver.

    Raises:
        CompileError: NVRTC is not installed, or refuses a kernel.
    """
    from fuser.runtime import nvrtc

    count_requests(len(sources))
    return nvrtc.cubins(sources, nvrtc.HOPPER)
