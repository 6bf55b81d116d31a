"""A stand-in for the CUDA driver, whose GPU memory is files of the host; it logs its calls.

Memory that processes map from each other is really mapped. Work given to streams is done at once.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from multidevice.transports.memory import cuda_ipc, cuda_vmm
from multidevice.transports.memory.cuda_ipc import Hooks
from tests.support.limits import HANG_S

GPU, CPU = torch.device("cuda", 3), torch.device("cpu")
UNIT = 2 << 20
_OK, _FULL, _REFUSED = (SimpleNamespace(name=n) for n in ("CUDA_SUCCESS", "FULL", "REFUSED"))
_NOTHING, _FIXED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0x10
_BOTH = mmap.PROT_READ | mmap.PROT_WRITE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_HANDLE = struct.Struct("<8Q")


class _Names:
    """An enumeration in which every name is its own value."""

    def __getattr__(self, name: str) -> str:
        return name


@dataclass
class _Allocation:
    """Memory of the older allocation calls; a counter behind it holds how often it is mapped
    elsewhere.
    """

    fd: int
    begin: int
    nbytes: int

    @property
    def opened(self) -> ctypes.c_int64:
        return ctypes.c_int64.from_address(self.begin + self.nbytes)


@dataclass
class Driver:
    """A stand-in for the CUDA driver, with planted faults.

    `refuses` is a call that fails; `lacks` is an attribute that the GPU does not have. With
    `is_late`, the host continues where streams still wait.
    """

    capacity: int = 1 << 40
    refuses: str = ""
    lacks: str = ""
    is_late: bool = False
    is_busy: bool = False
    log: list[str] = field(default_factory=list[str])
    mode: object = "global"
    allocations: dict[int, _Allocation] = field(default_factory=dict[int, _Allocation])
    # Of other processes, or of this one seen twice.
    elsewhere: dict[int, _Allocation] = field(default_factory=dict[int, _Allocation])
    # Virtual memory: handles, reserved addresses, mapped ones with their sizes.
    handles: dict[int, int] = field(default_factory=dict[int, int])
    reserved: dict[int, int] = field(default_factory=dict[int, int])
    mapped: dict[int, int] = field(default_factory=dict[int, int])

    CUresult = SimpleNamespace(CUDA_SUCCESS=_OK)
    CUipcMem_flags = SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=SimpleNamespace(value=1))
    CUstreamCaptureMode = CUdevice_attribute = CUmemAllocationType = CUmemLocationType = _Names()
    CUmemAllocationHandleType = CUmemAllocationGranularity_flags = CUmemAccess_flags = _Names()
    CUmemAllocationProp = CUmemLocation = CUmemAccessDesc = CUipcMemHandle = SimpleNamespace
    _numbers = count(1)

    def idle(self) -> bool:
        self.is_busy = False
        self.log.append("idle")
        return True

    @property
    def hooks(self) -> Hooks:
        return Hooks(self.idle)

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.allocations.values())

    def _begin(self, what: str) -> None:
        assert self.mode == "CU_STREAM_CAPTURE_MODE_RELAXED", f"{what}: a capture would hear of it"
        self.log.append(what)

    def cuThreadExchangeStreamCaptureMode(self, mode: object) -> tuple[object, object]:
        before, self.mode = self.mode, mode
        return _OK, before

    # ------------------------------------------------------------ memory that has an address
    def cuMemAlloc(self, nbytes: int) -> tuple[object, int]:
        self._begin("allocate")
        assert nbytes % UNIT == 0, "shares a unit with others"
        if self.nbytes + nbytes > self.capacity:
            return _FULL, 0
        fd = os.memfd_create("gpu")
        os.ftruncate(fd, nbytes + mmap.PAGESIZE)
        made = _Allocation(fd, _map(fd, nbytes + mmap.PAGESIZE), nbytes)
        self.allocations[made.begin] = made
        return _OK, made.begin

    def cuMemFree(self, address: int) -> tuple[object]:
        self._begin("free")
        gone = self.allocations.pop(address)
        assert not gone.opened.value, "freed while it is mapped"
        assert not self.is_busy, "freed while the device works"
        os.close(gone.fd)
        _libc.munmap(gone.begin, gone.nbytes + mmap.PAGESIZE)
        return (_OK,)

    def cuIpcGetMemHandle(self, address: int) -> tuple[object, object]:
        if self.refuses == "cuIpcGetMemHandle":
            return _REFUSED, None
        one = self.allocations[address]
        words = os.getpid(), one.fd, one.nbytes, *[0] * 5
        return _OK, SimpleNamespace(reserved=_HANDLE.pack(*words))

    def cuIpcOpenMemHandle(self, handle: Any, flags: int) -> tuple[object, int]:
        self._begin("map")
        assert flags == 1
        if self.refuses == "cuIpcOpenMemHandle":
            return _REFUSED, 0
        pid, fd, nbytes, *_ = _HANDLE.unpack(handle.reserved)
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        seen = _Allocation(opened, _map(opened, nbytes + mmap.PAGESIZE), nbytes)
        seen.opened.value += 1
        self.elsewhere[seen.begin] = seen
        return _OK, seen.begin

    def cuIpcCloseMemHandle(self, address: int) -> tuple[object]:
        self._begin("unmap")
        assert not self.is_busy, "unmapped while the device works"
        gone = self.elsewhere.pop(address)
        gone.opened.value -= 1
        os.close(gone.fd)
        _libc.munmap(gone.begin, gone.nbytes + mmap.PAGESIZE)
        return (_OK,)

    # ------------------------------------------------------------ memory that is given addresses
    def cuDeviceGet(self, index: int) -> tuple[object, int]:
        return _OK, index

    def cuDeviceGetAttribute(self, attribute: str, device: int) -> tuple[object, int]:
        assert device == GPU.index
        return _OK, int(attribute.removeprefix("CU_DEVICE_ATTRIBUTE_") != self.lacks)

    def cuMemGetAllocationGranularity(self, about: Any, which: str) -> tuple[object, int]:
        assert which == "CU_MEM_ALLOC_GRANULARITY_MINIMUM" and about.location.id == GPU.index
        return _OK, UNIT

    def cuMemCreate(self, nbytes: int, about: Any, flags: int) -> tuple[object, int]:
        assert nbytes % UNIT == flags == 0
        assert about.requestedHandleTypes == "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"
        if self.refuses == "cuMemCreate":
            return _REFUSED, 0
        fd = os.memfd_create("gpu")
        os.ftruncate(fd, nbytes)
        return _OK, self._handle(fd)

    def _handle(self, fd: int) -> int:
        number = next(self._numbers)
        self.handles[number] = fd
        return number

    def cuMemExportToShareableHandle(self, handle: int, kind: str, flags: int) -> tuple[Any, int]:
        return _OK, os.dup(self.handles[handle])

    def cuMemImportFromShareableHandle(self, fd: int, kind: str) -> tuple[object, int]:
        return _OK, self._handle(os.dup(fd))

    def cuMemRelease(self, handle: int) -> tuple[object]:
        os.close(self.handles.pop(handle))
        return (_OK,)

    def cuMemAddressReserve(self, nbytes: int, *rest: int) -> tuple[object, int]:
        begin = _libc.mmap(None, nbytes, 0, _NOTHING, -1, 0)
        self.reserved[begin] = nbytes
        return _OK, begin

    def cuMemMap(self, at: int, nbytes: int, offset: int, handle: int, flags: int) -> tuple[Any]:
        assert offset == 0, "the driver maps whole allocations"
        assert os.fstat(self.handles[handle]).st_size == nbytes
        assert at not in self.mapped
        assert any(b <= at and at + nbytes <= b + n for b, n in self.reserved.items())
        _map(self.handles[handle], nbytes, at)
        self.mapped[at] = nbytes
        return (_OK,)

    def cuMemSetAccess(self, at: int, nbytes: int, about: list[Any], n: int) -> tuple[object]:
        assert n == len(about) == 1 and about[0].location.id == GPU.index
        assert about[0].flags == "CU_MEM_ACCESS_FLAGS_PROT_READWRITE"
        assert sum(size for b, size in self.mapped.items() if at <= b < at + nbytes) == nbytes
        return (_REFUSED if self.refuses == "cuMemSetAccess" else _OK,)

    def cuMemUnmap(self, at: int, nbytes: int) -> tuple[object]:
        assert not self.is_busy, "unmapped while the device works"
        assert self.mapped.pop(at) == nbytes
        assert _libc.mmap(at, nbytes, 0, _NOTHING | _FIXED, -1, 0) == at
        return (_OK,)

    def cuMemAddressFree(self, at: int, nbytes: int) -> tuple[object]:
        assert self.reserved.pop(at) == nbytes
        assert not any(at <= b < at + nbytes for b in self.mapped)
        _libc.munmap(at, nbytes)
        return (_OK,)

    # ------------------------------------------------------------ streams
    def cuMemcpyAsync(self, target: int, source: int, nbytes: int, stream: int) -> tuple[object]:
        self.is_busy = True
        ctypes.memmove(target, source, nbytes)
        return (_OK,)

    def cuStreamWriteValue32(self, stream: int, at: int, value: int, flags: int) -> tuple[object]:
        ctypes.c_uint32.from_address(at).value = value
        return (_OK,)

    def cuStreamWaitValue32(self, stream: int, at: int, value: int, flags: int) -> tuple[object]:
        word, stop = ctypes.c_uint32.from_address(at), time.monotonic() + HANG_S
        while word.value < value and not self.is_late:
            assert time.monotonic() < stop, "a stream waits for a flag that nobody writes"
            time.sleep(0)
        return (_OK,)

    def cuStreamBatchMemOp(self, *of: object) -> None:
        raise NotImplementedError


def _map(fd: int, nbytes: int, at: int | None = None) -> int:
    flags = mmap.MAP_SHARED | (_FIXED if at is not None else 0)
    found = _libc.mmap(at, nbytes, _BOTH, flags, fd, 0)
    assert found not in (None, ctypes.c_void_p(-1).value)
    return found


def watch(patch: Callable[[object, str, object], None]) -> Driver:
    """Returns a stand-in that replaces the real driver; `patch` sets the attributes."""
    made = Driver()
    raw_tensor = cuda_ipc.raw_tensor

    def here(address: int, nbytes: int, device: torch.device, owner: object) -> torch.Tensor:
        assert device == GPU
        return raw_tensor(address, nbytes, CPU, owner)

    patch(cuda_ipc, "driver", lambda: made)
    patch(cuda_ipc, "on_device", lambda device: nullcontext())
    patch(cuda_ipc, "raw_tensor", here)
    patch(cuda_vmm, "raw_tensor", here)
    return made


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return watch(monkeypatch.setattr)
