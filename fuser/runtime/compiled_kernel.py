"""The interfaces of compiled kernels and their launches, and statistics of requests and
compilations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from fuser.support.errors import KernelError, counted
from fuser.support.kernel_source import KernelParam, KernelSource
from fuser.support.locks import make_lock

Dim3: TypeAlias = tuple[int, int, int]


class TensorLike(Protocol):
    """The methods of a tensor that the launch of a kernel calls. `torch.Tensor` has these
    methods.
    """

    def data_ptr(self) -> int:
        """Returns the address of the tensor's first element."""
        ...


# For a pointer parameter: a tensor or an address. A checked CPU kernel needs a tensor or (address,
# nbytes).
Argument: TypeAlias = "int | float | bool | TensorLike | tuple[int, int]"


class LaunchCall(NamedTuple):
    """A launch as one call of a C function: `function(*arguments)` returns 0, or an error status
    that is to be passed to `fail`.

    `words[i]` are the 8 bytes from which the kernel reads parameter i. Callers write new addresses
    into `words` before a call.
    """

    words: Any
    function: Callable[..., int]
    arguments: tuple[Any, ...]
    # Raises `KernelError` with an explanation of a status, unless a second attempt succeeds.
    fail: Callable[[int], None]
    # On CUDA: the address of the array of parameter addresses that the driver reads.
    packed: int = 0
    # For a caller in C: the addresses of the function and of its arguments; () if there are none.
    raw: tuple[int, ...] = ()


class PreparedLaunch(ABC):
    """A launch that can be repeated, with arguments that are already packed into the form that the
    kernel reads.

    Only the addresses of tensors can be replaced; scalars and the numbers of CUDA blocks and
    threads are fixed. An instance must not be used by several threads. The caller must keep the
    tensors alive.
    """

    @abstractmethod
    def set_pointer(self, param: int, address: int) -> None:
        """Replaces the address of the tensor that is the argument for the parameter with index
        `param`.
        """

    @abstractmethod
    def run(self, stream: int | None = None) -> None:
        """Launches the kernel.

        `stream` is the raw handle of a CUDA stream. If it is None, torch's current stream is used.
        On the CPU, `stream` has no effect.
        """

    @abstractmethod
    def bind(self, stream: int) -> LaunchCall:
        """Returns the launch on the CUDA stream with the raw handle `stream` as one call of a C
        function.

        The returned call is valid as long as this object exists.
        """


class CompiledKernel(ABC):
    """A kernel that can be launched on one device."""

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
        """Runs the kernel, with one argument for each parameter. On CUDA, enqueues the kernel on
        the stream with the raw handle `stream`.

        `grid` and `block` are the numbers of CUDA blocks, and of threads per block, along x, y and
        z. Each block gets `smem_bytes` bytes of shared memory in addition to those that the kernel
        declares.

        Raises:
            KernelError: the arguments, the numbers of CUDA blocks or threads, or the bytes of
                shared memory are invalid; the device reports an error; or the run-time checks of a
                checked kernel find one.
        """

    @abstractmethod
    def prepare(
        self, args: Sequence[Argument], *, grid: Dim3, block: Dim3, smem_bytes: int = 0
    ) -> PreparedLaunch:
        """Returns a launch for repeated use, whose arguments are packed only once. The parameters
        are those of `launch`.
        """

    def _argument_error(self, args: Sequence[Argument], cause: Exception) -> KernelError:
        """Returns the error for arguments that could not be packed because of `cause`."""
        expected = len(self.source.params)
        if len(args) != expected:
            return KernelError(
                f"kernel {self.name} takes {counted(expected, 'argument')}, got {len(args)}"
            )
        given = ", ".join(
            f"{param.name}: {param.ctype}{'*' if param.is_pointer else ''} = {type(arg).__name__}"
            for param, arg in zip(self.source.params, args, strict=True)
        )
        return KernelError(f"kernel {self.name}: its arguments cannot be packed ({cause}): {given}")


class _Statistics:
    def __init__(self) -> None:
        self.lock = make_lock()
        self.compilations = 0
        self.requests = 0


_statistics = _Statistics()


def compilations() -> int:
    """Returns the number of kernels compiled in this process, without those that were found in a
    cache.
    """
    return _statistics.compilations


def kernel_requests() -> int:
    """Returns the number of kernels that this process has requested by `compile_kernels` and
    `compile_cubin`. Of these, `compilations()` were compiled; most others were found in caches.
    """
    return _statistics.requests


def count_compilations(kernels: int) -> None:
    """Adds `kernels` to this process's number of compiled kernels. Modules that run a compiler call
    this function.
    """
    with _statistics.lock:
        _statistics.compilations += kernels


def count_requests(kernels: int) -> None:
    """Adds `kernels` to this process's number of requested kernels. The public functions that
    compile call this function.
    """
    with _statistics.lock:
        _statistics.requests += kernels


# ----------------------------------------------------------------------
# Packing of kernel arguments: one 8-byte slot for each parameter, on both devices.

# The `struct` codes of slots. All integers are stored as 64 bits: the low bytes come first, so
# narrower types read the right value.
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
# Values of these types are packed directly; for others, the result of data_ptr() is packed.
NUMBERS = frozenset((int, float, bool))


def slot_code(param: KernelParam) -> str:
    """Returns the `struct` format code by which the value of a parameter is packed into 8 bytes.

    Raises:
        KernelError: the parameter is a scalar of a type that kernels do not accept.
    """
    if param.is_pointer:
        return "Q"
    code = _SCALARS.get(param.ctype)
    if code is None:
        raise KernelError(
            f"parameter {param.name} has the type {param.ctype!r}, which is no scalar type"
            f" that kernels accept: expected one of {', '.join(_SCALARS)}"
        )
    return code
