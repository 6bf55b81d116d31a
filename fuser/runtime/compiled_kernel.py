"""Kernels that are ready to run: the types, and how many were asked for and compiled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from fuser.support.errors import KernelError
from fuser.support.kernel_source import KernelParam, KernelSource
from fuser.support.locks import make_lock

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


# ----------------------------------------------------------------------
# How the arguments of a kernel are packed: one 8-byte slot for each parameter, on both devices.

# struct codes of a slot. Integers of any width go as 64 bits: their low bytes come first.
_SCALARS = {
    "bool": "q",
    "int": "q",
    "int64_t": "q",
    "nvfuser_index_t": "q",
    "unsigned": "q",
    "uint64_t": "Q",
    "float": "f4x",
    "double": "d",
}
# What is packed as it is; anything else is asked for its data_ptr().
NUMBERS = frozenset((int, float, bool))


def slot_code(param: KernelParam) -> str:
    """The struct code of a parameter's slot.

    Raises:
        KernelError: the parameter is a scalar of a type that kernels do not take.
    """
    if param.is_pointer:
        return "Q"
    code = _SCALARS.get(param.ctype)
    if code is None:
        raise KernelError(
            f"parameter {param.name}: {param.ctype!r} is not a scalar type of kernels"
            f" ({', '.join(_SCALARS)})"
        )
    return code
