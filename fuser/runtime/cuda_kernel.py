"""Kernels on CUDA devices: compiles them with NVRTC, and launches them through the driver.

A launch is enqueued on a stream with a known raw handle, by default torch's current stream.
Launches are thus ordered with torch's own work, and can be captured into CUDA graphs.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import tee
from typing import TYPE_CHECKING, Any, cast

from fuser.runtime.compiled_kernel import (
    NUMBERS,
    Argument,
    CompiledKernel,
    Dim3,
    LaunchCall,
    PreparedLaunch,
    count_compilations,
    slot_code,
)
from fuser.runtime.kernel_cache import KernelCache, digest
from fuser.runtime.kernel_text import RT_FILES, codegen_text, explain, preamble
from fuser.support.errors import CompileError, InputError, KernelError, NoCompilerError
from fuser.support.kernel_source import KernelSource
from fuser.support.locks import make_lock
from fuser.support.torch_calls import raw_stream_on

if TYPE_CHECKING:
    import torch

# A kernel needs an attribute to use more shared memory than this.
_DEFAULT_SMEM_BYTES = 48 * 1024
# A kernel needs an attribute for clusters of more blocks than this.
_PORTABLE_CLUSTER = 8
_INVALID_CONTEXT = 201


@functools.cache
def load_driver() -> Any:
    """Imports the Python binding of the CUDA driver, and returns it.

    Raises:
        KernelError: cuda-bindings is not installed.
    """
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise KernelError(
            f"launching on CUDA devices needs cuda-bindings ({error}):"
            " install fuser-hostir[cu12] or fuser-hostir[cu13]"
        ) from error


class LaunchConfig(ctypes.Structure):
    """The struct `CUlaunchConfig` of the CUDA driver's C interface."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("number_of_attributes", ctypes.c_uint),
    )


@functools.cache
def _launch_directly() -> Callable[..., int] | None:
    """Returns the driver's C function `cuLaunchKernelEx`, or None if the driver's library cannot be
    loaded.

    Repeated launches call the C function, to avoid the slower conversions of the Python binding.
    """
    try:
        return ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    except (OSError, AttributeError):
        return None


def address_of(function: Callable[..., int]) -> int:
    """Returns the address of a C function that ctypes has loaded."""
    return ctypes.cast(cast("Any", function), ctypes.c_void_p).value or 0


@functools.cache
def _current_raw_stream() -> Callable[[], int]:
    """Returns a function that returns the raw handle of torch's current stream."""
    import torch

    return raw_stream_on(torch.device("cuda"))


@functools.cache
def _architecture(index: int) -> str:
    import torch

    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def architecture(index: int | None) -> str:
    """Returns the GPU architecture to compile for, such as `sm_90a`.

    `index` is the number of the CUDA device. If `index` is None, torch's current device is used.

    Raises:
        InputError: there is no CUDA device.
    """
    import torch

    if not torch.cuda.is_available():
        raise InputError("a kernel needs a CUDA device, but torch finds none")
    return _architecture(torch.cuda.current_device() if index is None else index)


def compile_for_device(sources: Iterable[KernelSource], arch: str) -> list[CompiledKernel]:
    """Returns the kernels of `sources`, loaded for the GPU architecture `arch`. Only kernels that
    are not in the disk cache are compiled, each as soon as `sources` yields its source.
    """
    sources, compiled = tee(sources)
    codes = cubins(compiled, arch)
    return [CudaKernel(source, code) for source, code in zip(sources, codes, strict=True)]


class _Arguments:
    """The packed arguments of a launch, 8 bytes each, and the array of their addresses, which the
    CUDA driver reads.
    """

    def __init__(self, params: int) -> None:
        self.slots = (ctypes.c_uint64 * max(params, 1))()
        first = ctypes.addressof(self.slots)
        self.addresses = (ctypes.c_void_p * max(params, 1))(*range(first, first + 8 * params, 8))
        self.address = ctypes.addressof(self.addresses)


class CudaKernel(CompiledKernel):
    """A kernel loaded from machine code. It can run on every CUDA device of its architecture."""

    def __init__(self, source: KernelSource, code: bytes) -> None:
        super().__init__(source)
        driver = load_driver()
        self.code = code
        # Never unloaded: launches may be pending, and captured graphs may launch the kernel again.
        library = self._loaded("cuLibraryLoadData", code, [], [], 0, [], [], 0)
        self._kernel = self._loaded("cuLibraryGetKernel", library, source.name.encode())
        if source.cluster > _PORTABLE_CLUSTER:
            self._allow_cluster()
        # The driver accepts a context-independent kernel in place of a function.
        self._handle = driver.CUfunction(int(self._kernel))
        self._launch = driver.cuLaunchKernel
        self._success = driver.CUresult.CUDA_SUCCESS
        self._pack_into = struct.Struct("=" + "".join(map(slot_code, source.params))).pack_into
        self._arguments = _Arguments(len(source.params))
        self._lock = make_lock()
        self._smem_allowed: dict[int, int] = {}

    def _loaded(self, function: str, *args: Any) -> Any:
        status, found = getattr(load_driver(), function)(*args)
        if status != load_driver().CUresult.CUDA_SUCCESS:
            raise KernelError(
                f"kernel {self.name}: the driver call {function} failed with {status!r}"
            )
        return found

    def _allow_cluster(self) -> None:
        """Permits clusters as large as this kernel needs, on all devices. Clusters of up to 8 CUDA
        blocks need no permission, but this kernel's are larger.
        """
        import torch

        driver = load_driver()
        attribute = driver.CUfunction_attribute
        which = attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        for index in range(torch.cuda.device_count()):
            device = self._loaded("cuDeviceGet", index)
            (status,) = driver.cuKernelSetAttribute(which, 1, self._kernel, device)
            if status != driver.CUresult.CUDA_SUCCESS:
                raise KernelError(
                    f"kernel {self.name} cannot have clusters of {self.source.cluster} blocks on"
                    f" device {index}: the driver call cuKernelSetAttribute failed with {status!r}"
                )

    def _pack(self, arguments: _Arguments, args: Sequence[Argument]) -> None:
        values = [a if a.__class__ in NUMBERS else cast("torch.Tensor", a).data_ptr() for a in args]
        self._pack_into(arguments.slots, 0, *values)

    def launch(
        self,
        args: Sequence[Argument],
        *,
        grid: Dim3,
        block: Dim3,
        smem_bytes: int = 0,
        stream: int | None = None,
    ) -> None:
        """Enqueues the kernel on a stream with one argument for each parameter. Without `stream`,
        torch's current stream is used.
        """
        # All launches share one buffer, because the driver copies the arguments before it returns.
        with self._lock:
            try:
                self._pack(self._arguments, args)
            except (struct.error, AttributeError, TypeError) as error:
                raise self._argument_error(args, error) from error
            self._enqueue(self._arguments.address, grid, block, smem_bytes, stream)

    def prepare(
        self, args: Sequence[Argument], *, grid: Dim3, block: Dim3, smem_bytes: int = 0
    ) -> PreparedLaunch:
        """Packs the arguments into a new buffer, and returns a launch for repeated use."""
        arguments = _Arguments(len(self.source.params))
        try:
            self._pack(arguments, args)
        except (struct.error, AttributeError, TypeError) as error:
            raise self._argument_error(args, error) from error
        return PreparedCudaLaunch(self, arguments, grid, block, smem_bytes)

    def attributes(self) -> dict[str, int]:
        """Returns the resources that the compiler assigned to the kernel: registers per thread,
        local bytes (spilled registers) and static bytes of shared memory.
        """
        import torch

        attribute = load_driver().CUfunction_attribute
        device = self._loaded("cuDeviceGet", torch.cuda.current_device())
        return {
            name: self._loaded("cuKernelGetAttribute", which, self._kernel, device)
            for name, which in (
                ("registers", attribute.CU_FUNC_ATTRIBUTE_NUM_REGS),
                ("local_bytes", attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES),
                ("static_smem_bytes", attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES),
            )
        }

    def _enqueue(
        self, arguments: int, grid: Dim3, block: Dim3, smem_bytes: int, stream: int | None
    ) -> None:
        self._allow_smem(smem_bytes)
        handle = _current_raw_stream()() if stream is None else stream
        (status,) = self._launch(self._handle, *grid, *block, smem_bytes, handle, arguments, 0)
        if status == _INVALID_CONTEXT:
            # This thread has not used CUDA yet, and the default stream uses the thread's context.
            bind_primary_context()
            (status,) = self._launch(self._handle, *grid, *block, smem_bytes, handle, arguments, 0)
        if status != self._success:
            raise KernelError(
                f"kernel {self.name}, grid {grid}, block {block}, {smem_bytes} bytes of shared"
                f" memory: the driver rejected the launch with {status!r}"
            )

    def _allow_smem(self, smem_bytes: int) -> None:
        if smem_bytes <= _DEFAULT_SMEM_BYTES:
            return
        import torch

        index = torch.cuda.current_device()
        if smem_bytes <= self._smem_allowed.get(index, _DEFAULT_SMEM_BYTES):
            return
        driver = load_driver()
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        status, device = driver.cuDeviceGet(index)
        if status == self._success:
            (status,) = driver.cuKernelSetAttribute(attribute, smem_bytes, self._kernel, device)
        if status != self._success:
            raise KernelError(
                f"kernel {self.name} cannot have {smem_bytes} bytes of shared memory per block:"
                f" the driver call cuKernelSetAttribute failed with {status!r}"
            )
        self._smem_allowed[index] = smem_bytes


class PreparedCudaLaunch(PreparedLaunch):
    """A launch of a CUDA kernel for repeated use, with its own buffer of packed arguments."""

    def __init__(
        self, kernel: CudaKernel, arguments: _Arguments, grid: Dim3, block: Dim3, smem_bytes: int
    ) -> None:
        self._kernel = kernel
        self._arguments = arguments
        self._shape = grid, block, smem_bytes

    def set_pointer(self, param: int, address: int) -> None:
        """Replaces the address of the tensor that is the argument for the parameter with index
        `param`.
        """
        self._arguments.slots[param] = address

    def run(self, stream: int | None = None) -> None:
        """Enqueues the launch on the stream with the raw handle `stream`. If it is None, torch's
        current stream is used.
        """
        self._kernel._enqueue(self._arguments.address, *self._shape, stream)

    def bind(self, stream: int) -> LaunchCall:
        """Returns the launch on the stream with the raw handle `stream` as one call of the driver's
        C function.
        """
        grid, block, smem_bytes = self._shape
        self._kernel._allow_smem(smem_bytes)
        launch = _launch_directly()

        def again(status: int) -> None:
            # Launches through the binding, which handles threads without a context and names
            # errors.
            del status
            self.run(stream)

        def enqueue() -> int:
            self.run(stream)
            return 0

        if launch is None:
            return LaunchCall(self._arguments.slots, enqueue, (), again, self._arguments.address)
        config = LaunchConfig(grid, block, smem_bytes, stream or None, None, 0)
        handle, packed = int(self._kernel._handle), self._arguments.address
        arguments = ctypes.byref(config), ctypes.c_void_p(handle), ctypes.c_void_p(packed), None
        raw = address_of(launch), ctypes.addressof(config), handle, packed, 0
        return LaunchCall(self._arguments.slots, launch, arguments, again, packed, raw)


def bind_primary_context() -> None:
    """Makes the primary CUDA context of torch's current device the current context of this thread.
    The driver rejects launches of a thread without a context.

    Raises:
        KernelError: the driver has no context.
    """
    import torch

    driver = load_driver()
    status, device = driver.cuDeviceGet(torch.cuda.current_device())
    if status == driver.CUresult.CUDA_SUCCESS:
        status, context = driver.cuDevicePrimaryCtxRetain(device)
        if status == driver.CUresult.CUDA_SUCCESS:
            (status,) = driver.cuCtxSetCurrent(context)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise KernelError(
            "the CUDA driver cannot set the context of the current GPU in this thread: it failed "
            f"with {status!r}"
        )


# ----------------------------------------------------------------------
# Compilation for CUDA devices: NVRTC compiles the CUDA text, and needs no GPU.

HOPPER = "sm_90a"

# --minimal: no textures and CUDA runtime types, which take a sixth of the time of a small kernel.
# 177: a warning about unused functions, such as most helpers of rt.h in most kernels.
OPTIONS = ("--std=c++17", "--fmad=true", "--minimal", "--diag-suppress=177")
_MAX_THREADS = 8


@functools.cache
def _nvrtc() -> Any:
    try:
        return importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        raise NoCompilerError(
            f"kernels for CUDA devices need cuda-bindings and NVRTC ({error}):"
            " install fuser-hostir[nvrtc], or one of the extras cu12 and cu13"
        ) from error


def _call(function: str, *args: Any) -> Any:
    """Calls a function of NVRTC by name, and returns its result.

    Raises:
        CompileError: the function reports an error.
    """
    status, *results = getattr(_nvrtc(), function)(*args)
    if status != _nvrtc().nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"the NVRTC call {function} failed with {status!r}")
    return results[0] if len(results) == 1 else results


def _content(kind: str, program: Any) -> bytes:
    """Returns a result of the compiled NVRTC program `program`, which `kind` selects: `CUBIN`
    (machine code) or `ProgramLog`.
    """
    found = bytearray(_call(f"nvrtcGet{kind}Size", program))
    _call(f"nvrtcGet{kind}", program, found)
    return bytes(found)


@functools.cache
def version() -> str:
    """Returns the version of NVRTC.

    Raises:
        CompileError: NVRTC is not installed.
    """
    major, minor = _call("nvrtcVersion")
    return f"nvrtc {major}.{minor}"


def _text(source: KernelSource) -> str:
    return f'{preamble(RT_FILES)}\n#line 1 "{source.name}"\n{source.text}'


def kernel_key(source: KernelSource, arch: str) -> str:
    """Returns the key under which a kernel, compiled for one GPU architecture, is cached."""
    return digest(compiler_key(), arch, source.name, source.text)


@functools.cache
def compiler_key() -> str:
    """Returns a digest of everything besides a kernel's text and architecture that determines its
    machine code: headers, compiler version and options.
    """
    return digest(preamble(RT_FILES), version(), *OPTIONS)


def _compile(source: KernelSource, arch: str, options: Sequence[str] = OPTIONS) -> bytes:
    """Compiles one kernel with NVRTC, and returns its machine code. Other Python threads can run
    during the compilation.

    Raises:
        CompileError: compilation failed. The message has NVRTC's log, and the source lines around
            the first error.
    """
    given = [option.encode() for option in (f"--gpu-architecture={arch}", *options)]
    text, name = _text(source).encode(), source.name.encode()
    program = _call("nvrtcCreateProgram", text, name, 0, [], [])
    try:
        try:
            _call("nvrtcCompileProgram", program, len(given), given)
        except CompileError as error:
            log = _content("ProgramLog", program).rstrip(b"\0").decode(errors="replace")
            texts = {name: codegen_text(name) for name in RT_FILES} | {source.name: source.text}
            raise CompileError(
                f"NVRTC rejected kernel {source.name} for {arch} ({error}):\n{explain(log, texts)}"
            ) from None
        return _content("CUBIN", program)
    finally:
        _call("nvrtcDestroyProgram", program)


def _load_or_compile(cache: KernelCache, key: str, source: KernelSource, arch: str) -> bytes:
    found = cache.find(key, source.name)
    if found is None:
        with cache.lock(key):
            # Another process may have compiled the kernel while this process waited for the lock.
            found = cache.find(key, source.name)
            if found is None:
                code = _compile(source, arch)
                count_compilations(1)
                found = cache.store({key: source.name}, code, "cubin")
    return found.data


def cubins(sources: Iterable[KernelSource], arch: str) -> list[bytes]:
    """Returns the machine code of each kernel, from the disk cache or from NVRTC.

    A thread compiles each kernel as soon as `sources` yields its source, while the caller lowers
    the next kernel. NVRTC parses one program at a time, but optimises several in parallel.
    """
    cache = KernelCache()
    keys: list[str] = []
    codes: dict[str, Future[bytes]] = {}
    with ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_THREADS)) as pool:
        try:
            for source in sources:
                key = kernel_key(source, arch)
                keys.append(key)
                if key not in codes:
                    codes[key] = pool.submit(_load_or_compile, cache, key, source, arch)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [codes[key].result() for key in keys]
