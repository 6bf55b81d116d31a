"""Launching kernels on the CPU, with or without checks.

The launch record is `simt::Launch` of `fuser/codegen/simt_abi.h`: 3+3 uint32 grid and block, uint32
shared bytes, uint32 order seed, the addresses of the engine and of the report, 8 bytes for each
parameter and, for a checked kernel, the extent in bytes of each (8 bytes).
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from fuser.runtime.compiled_kernel import Argument, CompiledKernel, Dim3, LaunchCall, PreparedLaunch
from fuser.runtime.slots import NUMBERS, slot_code
from fuser.support.errors import KernelError
from fuser.support.kernel_source import KernelSource
from fuser.support.locks import make_lock

if TYPE_CHECKING:
    import torch

# `int (*)(const simt::Launch*)`: takes the record's bytes or address; not 0: the report tells why.
LaunchFunction: TypeAlias = "Callable[[Any], int]"

_HEADER = "=8I2Q"


class _Report(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int),
        ("reserved", ctypes.c_int),
        ("message", ctypes.c_char * 1016),
        ("counters", ctypes.c_uint64 * 24),
    )


@dataclass(frozen=True)
class Counters:
    """What a launch did: accesses by width in bytes (1, 2, 4, 8, 16), and events of all blocks."""

    global_loads: dict[int, int]
    global_stores: dict[int, int]
    shared_loads: dict[int, int]
    shared_stores: dict[int, int]
    block_barriers: int
    warp_exchanges: int
    atomics: int
    cluster_barriers: int

    @staticmethod
    def _from(report: _Report) -> Counters:
        values = list(report.counters)

        def widths(first: int) -> dict[int, int]:
            return {1 << i: values[first + i] for i in range(5) if values[first + i]}

        return Counters(widths(0), widths(5), widths(10), widths(15), *values[20:24])


def span_nbytes(tensor: torch.Tensor) -> int:
    """The bytes from a tensor's first element to the end of its last one in memory."""
    if tensor.numel() == 0:
        return 0
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (last + 1) * tensor.element_size()


class CpuKernel(CompiledKernel):
    """A kernel compiled for the CPU, without checks."""

    def __init__(self, source: KernelSource, function: LaunchFunction, engine: int) -> None:
        super().__init__(source)
        self._function = function
        self._engine = engine
        self._report = _Report()
        self._report_address = ctypes.addressof(self._report)
        self._pack = struct.Struct(_HEADER + "".join(map(slot_code, source.params))).pack

    def _record(
        self, args: Sequence[Argument], grid: Dim3, block: Dim3, smem_bytes: int, order_seed: int
    ) -> bytes:
        values = [a if a.__class__ in NUMBERS else cast("torch.Tensor", a).data_ptr() for a in args]
        return self._pack(
            *grid, *block, smem_bytes, order_seed, self._engine, self._report_address, *values
        )

    def launch(
        self,
        args: Sequence[Argument],
        *,
        grid: Dim3,
        block: Dim3,
        smem_bytes: int = 0,
        stream: int | None = None,
    ) -> None:
        if smem_bytes and not self.source.uses_barriers:
            raise self._smem_error(smem_bytes)
        try:
            record = self._record(args, grid, block, smem_bytes, 0)
        except (struct.error, ArithmeticError, AttributeError, TypeError) as error:
            raise self._argument_error(args, error) from error
        if self._function(record):
            raise self._finding(grid, block)

    def prepare(
        self, args: Sequence[Argument], *, grid: Dim3, block: Dim3, smem_bytes: int = 0
    ) -> PreparedLaunch:
        if smem_bytes and not self.source.uses_barriers:
            raise self._smem_error(smem_bytes)
        try:
            record = self._record(args, grid, block, smem_bytes, 0)
        except (struct.error, ArithmeticError, AttributeError, TypeError) as error:
            raise self._argument_error(args, error) from error
        return PreparedCpuLaunch(self, record, grid, block)

    def _smem_error(self, smem_bytes: int) -> KernelError:
        return KernelError(
            f"kernel {self.name} was declared without barriers, but is launched with {smem_bytes}"
            " bytes of shared memory"
        )

    def _finding(self, grid: Dim3, block: Dim3) -> KernelError:
        message = self._report.message.decode(errors="replace")
        return KernelError(f"kernel {self.name}, grid {grid}, block {block}: {message}")


class PreparedCpuLaunch(PreparedLaunch):
    """A packed launch record; `address` and `entry` serve runners written in C."""

    def __init__(self, kernel: CpuKernel, record: bytes, grid: Dim3, block: Dim3) -> None:
        self._kernel = kernel
        self._function = kernel._function
        self._shape = grid, block
        words = len(record) // 8
        self._words = (ctypes.c_uint64 * words).from_buffer_copy(record)
        self._first = words - len(kernel.source.params)
        self.address = ctypes.addressof(self._words)

    @property
    def entry(self) -> int:
        """The address of the C function `int (*)(const simt::Launch*)` that runs `address`."""
        return ctypes.cast(cast("Any", self._function), ctypes.c_void_p).value or 0

    def set_pointer(self, param: int, address: int) -> None:
        self._words[self._first + param] = address

    def run(self, stream: int | None = None) -> None:
        if self._function(self.address):
            self._fail(0)

    def bind(self, stream: int) -> LaunchCall:
        params = len(self._words) - self._first
        words = (ctypes.c_uint64 * params).from_buffer(self._words, 8 * self._first)
        raw = self.entry, self.address
        return LaunchCall(words, self._function, (self.address,), self._fail, raw=raw)

    def _fail(self, status: int) -> None:
        del status
        raise self._kernel._finding(*self._shape)


class CheckedCpuKernel(CpuKernel):
    """A kernel compiled for the CPU with all checks; `counters` tells what its last launch did.

    `order_seed` chooses the order in which blocks and threads run: 0 in order, 1 reversed, else
    shuffled by that seed.
    """

    def __init__(self, source: KernelSource, function: LaunchFunction, engine: int) -> None:
        super().__init__(source, function, engine)
        self.order_seed = 0
        self._lock = make_lock()
        self._extents = struct.Struct(f"={len(source.params)}q")

    @property
    def counters(self) -> Counters:
        """The counters of the last launch."""
        return Counters._from(self._report)

    def _checked_record(
        self, args: Sequence[Argument], grid: Dim3, block: Dim3, smem_bytes: int, order_seed: int
    ) -> bytes:
        values: list[Argument] = []
        extents: list[int] = []
        for index, arg in enumerate(args):
            param = self.source.params[index] if index < len(self.source.params) else None
            if param is None or not param.is_pointer:
                values.append(arg)
                extents.append(0)
            elif isinstance(arg, tuple):
                values.append(arg[0])
                extents.append(arg[1])
            elif isinstance(arg, (int, float)):
                raise TypeError(
                    f"{param.name}: a checked kernel needs a tensor or (address, nbytes)"
                )
            else:
                values.append(arg)
                extents.append(span_nbytes(cast("torch.Tensor", arg)))
        record = self._record(values, grid, block, smem_bytes, order_seed)
        return record + self._extents.pack(*extents)

    def launch(
        self,
        args: Sequence[Argument],
        *,
        grid: Dim3,
        block: Dim3,
        smem_bytes: int = 0,
        stream: int | None = None,
    ) -> None:
        if smem_bytes and not self.source.uses_barriers:
            raise self._smem_error(smem_bytes)
        try:
            record = self._checked_record(args, grid, block, smem_bytes, self.order_seed)
        except (struct.error, ArithmeticError, AttributeError, TypeError) as error:
            raise self._argument_error(args, error) from error
        with self._lock:
            ctypes.memset(self._report_address, 0, ctypes.sizeof(_Report))
            if self._function(record):
                raise self._finding(grid, block)

    def prepare(
        self, args: Sequence[Argument], *, grid: Dim3, block: Dim3, smem_bytes: int = 0
    ) -> PreparedLaunch:
        return _CheckedPreparedLaunch(self, args, grid=grid, block=block, smem_bytes=smem_bytes)


class _CheckedPreparedLaunch(PreparedLaunch):
    """Repeats a checked launch; a replaced pointer keeps the extent of the one that it replaces."""

    def __init__(
        self,
        kernel: CheckedCpuKernel,
        args: Sequence[Argument],
        *,
        grid: Dim3,
        block: Dim3,
        smem_bytes: int,
    ) -> None:
        self._kernel = kernel
        self._args = list(args)
        self._shape = grid, block, smem_bytes

    def set_pointer(self, param: int, address: int) -> None:
        old = self._args[param]
        extent = old[1] if isinstance(old, tuple) else span_nbytes(cast("torch.Tensor", old))
        self._args[param] = (address, extent)

    def run(self, stream: int | None = None) -> None:
        grid, block, smem_bytes = self._shape
        self._kernel.launch(self._args, grid=grid, block=block, smem_bytes=smem_bytes)

    def bind(self, stream: int) -> LaunchCall:
        raise KernelError(f"kernel {self._kernel.name}: checked launches are packed one by one")
