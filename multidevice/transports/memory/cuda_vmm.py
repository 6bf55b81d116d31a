"""Shows the shards of several GPUs as one range of addresses, by CUDA's virtual memory management.

A shard is the part of a tensor that one rank stores. It is allocated as memory without an address,
which has a handle. The CUDA driver exports the handle as a file, which the processes of the host
take from each other (`take_file`). To show several shards as one range, a process reserves
addresses and maps the handles there, one after another. The driver frees the memory when its last
mapping and its last file are gone. Therefore each process unmaps shards when its own GPU is idle.
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html
"""

from __future__ import annotations

import ctypes
import errno
import os
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from fuser.support.errors import CommunicationError, UnsupportedError
from fuser.support.locks import make_lock
from fuser.support.lru import Recent
from multidevice.transports.memory.cuda_ipc import CudaCalls, Holder, Hooks, driving, raw_tensor
from multidevice.transports.memory.handles import (
    MemoryLocation,
    Name,
    name_of_piece,
    new_serial,
    not_mapped,
)

# The names of the attributes that a GPU's memory must have.
_NEEDED = "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"
_MAX_ROWS = 16


@dataclass(eq=False)
class _Range:
    """A reserved range of addresses, which contains `parts` shards of equal size without gaps.

    A shard is the part of a tensor that one rank stores. The range is either a shard that this
    process has allocated, or several shards of different ranks. Only a shard of this process has
    `serial` (its number), `fd` (its file) and `stream` (the CUDA stream that uses it).
    """

    begin: int
    parts: int
    part_nbytes: int
    serial: int = -1
    fd: int = -1
    stream: int = 0


class GpuShards:
    """The parts of tensors (shards) that this process has allocated on one GPU, and that other
    processes can map.

    Also has the ranges of addresses at which it has mapped shards of several ranks.
    """

    unit = "units"

    def __init__(self, device: torch.device, cuda: CudaCalls, hooks: Hooks) -> None:
        self.device, self._cuda, self._hooks = device, cuda, hooks
        # Why other processes cannot map the shards; "" if they can.
        self.why_not = self._find_why_not()
        self.unit_nbytes = 1 if self.why_not else self._granularity()
        self._shards: dict[int, _Range] = {}
        self._spare: list[_Range] = []
        self._rows: Recent[tuple[object, ...], torch.Tensor] = Recent(
            _MAX_ROWS, lambda row: self.release()
        )
        # Ranges without users, recorded by finalizers, which may run at any time.
        self._returned: deque[_Range] = deque()
        self._is_untidy = False
        self._lock = make_lock()

    def _find_why_not(self) -> str:
        attributes = self._cuda.api.CUdevice_attribute
        number = self._cuda.call("cuDeviceGet", self.device.index)
        for name in _NEEDED:
            attribute = getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}")
            if not int(self._cuda.call("cuDeviceGetAttribute", attribute, number)):
                return (
                    f"its GPU cannot share memory with other processes ({name} is 0): gather the "
                    "shards by an Allgather instead"
                )
        let_files_be_taken()
        return ""

    def _properties(self) -> object:
        api = self._cuda.api
        made = api.CUmemAllocationProp()
        made.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        made.location = self._location()
        made.requestedHandleTypes = self._file_type()
        return made

    def _location(self) -> object:
        api = self._cuda.api
        made = api.CUmemLocation()
        made.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        made.id = self.device.index
        return made

    def _file_type(self) -> object:
        types = self._cuda.api.CUmemAllocationHandleType
        return types.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _granularity(self) -> int:
        least = self._cuda.api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._cuda.call("cuMemGetAllocationGranularity", self._properties(), least))

    # ------------------------------------------------------------ shards
    def empty(self, nbytes: int, stream: int) -> torch.Tensor:
        """Allocates GPU memory of `nbytes` bytes for a shard that is used on `stream`, as a uint8
        tensor.

        A shard is the part of a tensor that one rank stores. Raises `torch.OutOfMemoryError` if
        there is not enough memory.
        """
        self.tidy()
        size = max(-(-nbytes // self.unit_nbytes), 1) * self.unit_nbytes
        with self._lock:
            self._take_back()
            wanted = size, stream, True
            fitting = [s for s in self._spare if (s.part_nbytes, s.stream, s.fd >= 0) == wanted]
            if fitting:
                self._spare.remove(fitting[0])
        shard = fitting[0] if fitting else self._new(size, stream)
        return self._seen(shard, nbytes)

    def _new(self, size: int, stream: int) -> _Range:
        with driving(self._cuda, self.device):
            try:
                handle = self._create(size)
            except CommunicationError as error:
                raise torch.OutOfMemoryError(
                    f"cannot allocate {size} bytes for a shard on {self.device}, because there is "
                    f"not enough memory ({error})"
                ) from None
            fd = int(self._cuda.call("cuMemExportToShareableHandle", handle, self._file_type(), 0))
            self._cuda.call("cuMemRelease", handle)
            try:
                begin = self._map([fd], size)
            except BaseException:
                os.close(fd)
                raise
        shard = self._shards[begin] = _Range(begin, 1, size, new_serial(), fd, stream)
        return shard

    def _create(self, size: int) -> object:
        try:
            return self._cuda.call("cuMemCreate", size, self._properties(), 0)
        except CommunicationError:
            # Free the caches of this process first.
            torch.cuda.empty_cache()
            self.release()
            self.tidy()
            return self._cuda.call("cuMemCreate", size, self._properties(), 0)

    def name_of(self, tensor: torch.Tensor) -> tuple[Name, int] | None:
        """Returns the name by which other processes map the shard that contains `tensor`, and the
        offset of `tensor` in the shard.

        A shard is the part of a tensor that one rank stores. The offset is in bytes. Returns None
        if the tensor is not in a shard of this process.
        """
        begin = tensor.untyped_storage().data_ptr()
        shard = self._shards.get(begin)
        if shard is None:
            return None
        name = name_of_piece(shard.fd, shard.part_nbytes, shard.serial, 0)
        return name, tensor.data_ptr() - begin

    # ------------------------------------------------------------ rows
    def row(self, places: Sequence[MemoryLocation], nbytes: int) -> torch.Tensor:
        """Maps the shards at the locations `places` without gaps, as one uint8 tensor.

        A shard is the part of a tensor that one rank stores. Each has `nbytes` bytes. A location is
        a rank, the name of memory that the rank shares, and an offset in this memory.

        Raises:
            CommunicationError: the process of a rank has ended.
            UnsupportedError: a shard cannot be mapped on this device.
        """
        key = (*(place.name for place in places), nbytes)
        found = self._rows.recall(key)
        if found is None:
            files: list[int] = []
            try:
                for place in places:
                    files.append(self._file(place))
                with driving(self._cuda, self.device):
                    begin = self._map(files, nbytes)
            except CommunicationError as error:
                if isinstance(error, UnsupportedError) or len(files) < len(places):
                    raise
                ranks = ", ".join(str(place.rank) for place in places)
                raise UnsupportedError(
                    f"{self.device} cannot map the shards of ranks {ranks} ({error}): gather the "
                    "shards by an Allgather instead"
                ) from None
            finally:
                for fd in files:
                    os.close(fd)
            row = _Range(begin, len(places), nbytes)
            found = self._rows[key] = self._seen(row, nbytes * len(places))
        return found

    def _file(self, place: MemoryLocation) -> int:
        pid, fd = place.name[:2]
        try:
            return os.dup(fd) if pid == os.getpid() else take_file(pid, fd)
        except OSError as error:
            raise not_mapped(place.rank, error) from None

    def _map(self, files: Sequence[int], nbytes: int) -> int:
        """Maps the memory of several shards at consecutive addresses; returns the first address.

        `files` are the descriptors of the shards' files. Each shard has `nbytes` bytes.
        """
        call, total = self._cuda.call, nbytes * len(files)
        begin = int(call("cuMemAddressReserve", total, 0, 0, 0))
        mapped = 0
        try:
            for fd in files:
                handle = call("cuMemImportFromShareableHandle", fd, self._file_type())
                try:
                    call("cuMemMap", begin + mapped * nbytes, nbytes, 0, handle, 0)
                finally:
                    call("cuMemRelease", handle)
                mapped += 1
            api = self._cuda.api
            access = api.CUmemAccessDesc()
            access.location = self._location()
            access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            call("cuMemSetAccess", begin, total, [access], 1)
        except BaseException:
            self._unmap(begin, mapped, nbytes, total)
            raise
        return begin

    def _unmap(self, begin: int, parts: int, nbytes: int, total: int) -> None:
        for k in range(parts):
            self._cuda.call("cuMemUnmap", begin + k * nbytes, nbytes)
        self._cuda.call("cuMemAddressFree", begin, total)

    def _seen(self, made: _Range, nbytes: int) -> torch.Tensor:
        held = Holder()
        weakref.finalize(held, self._returned.append, made).atexit = False
        return raw_tensor(made.begin, nbytes, self.device, held)

    # ------------------------------------------------------------ what nobody has any more
    def _take_back(self) -> None:
        while self._returned:
            self._spare.append(self._returned.popleft())

    def release(self) -> None:
        """Records that a host program was deleted: the next `tidy` unmaps memory that no tensor
        uses.
        """
        self._is_untidy = True

    def tidy(self) -> None:
        """Unmaps the shards (parts of tensors) of all ranks that no tensor of this process uses.

        Waits for the GPU first, because its work may still use them. Does nothing if such a wait is
        impossible now, or if `release` was not called since the previous call of this method.
        """
        if not self._is_untidy:
            return
        with self._lock:
            self._rows.forget()
            self._is_untidy = False
            self._take_back()
            gone, self._spare = self._spare, []
        if gone and not self._hooks.is_idle():
            self._spare += gone
            self._is_untidy = True
            return
        with driving(self._cuda, self.device):
            for one in gone:
                self._unmap(one.begin, one.parts, one.part_nbytes, one.parts * one.part_nbytes)
                if one.fd >= 0:
                    del self._shards[one.begin]
                    os.close(one.fd)


# ----------------------------------------------------------------------
# Takes open files of another process of this host, by their numbers.

# The number of the system call pidfd_getfd.
_PIDFD_GETFD = 438
_SET_PTRACER, _ANYBODY = 0x59616D61, ctypes.c_ulong(-1)


def let_files_be_taken() -> None:
    """Allows other processes of this user to take open files of this process (`take_file`).

    Some systems allow this by default only to the ancestors of a process.
    """
    # Fails where the system has no such rule.
    _libc().prctl(_SET_PTRACER, _ANYBODY, 0, 0, 0)


def take_file(pid: int, fd: int) -> int:
    """Takes the open file `fd` of process `pid`; returns a descriptor of that file in this process.

    Raises `OSError` if the process has ended, or if the system forbids taking its files.
    """
    if not hasattr(os, "pidfd_open"):
        raise OSError(errno.ENOSYS, "this system has no pidfd_open")
    process = os.pidfd_open(pid)
    try:
        taken = _libc().syscall(_PIDFD_GETFD, process, fd, 0)
    finally:
        os.close(process)
    if taken < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"pidfd_getfd: {os.strerror(code)}")
    return taken


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
