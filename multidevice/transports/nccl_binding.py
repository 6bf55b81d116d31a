"""One interface to the two Python bindings of NCCL (nccl4py and cupy).

The interface takes memory addresses, element counts and CUDA stream handles. All direct calls of
NCCL are in this file. The numbers of dtypes and reductions are part of NCCL's stable binary
interface.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

from fuser.support import options
from fuser.support.errors import CommunicationError

UNIQUE_ID_NBYTES = 128
UINT8 = 1
DTYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "int64": 4,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}
RED_OPS = {"SUM": 0, "PRODUCT": 1, "MAX": 2, "MIN": 3, "AVG": 4}
_ALLTOALL_SINCE = 22800


class NcclComm(Protocol):
    """One NCCL communicator; each communication is enqueued on the CUDA stream with handle
    `stream`.

    `inp` and `out` are memory addresses, and `count` counts elements. `dtype` and `op` are the
    numbers that NCCL uses for dtypes and reductions. `root` and `peer` are positions in the team of
    the communicator.
    """

    has_alltoall: bool

    def allreduce(self, inp: int, out: int, count: int, dtype: int, op: int, stream: int) -> None:
        """Calls ncclAllReduce with `count` elements."""
        ...

    def reduce(
        self, inp: int, out: int, count: int, dtype: int, op: int, root: int, stream: int
    ) -> None:
        """Calls ncclReduce with `count` elements; only the root's `out` is written."""
        ...

    def reduce_scatter(
        self, inp: int, out: int, count: int, dtype: int, op: int, stream: int
    ) -> None:
        """Calls ncclReduceScatter; each member receives `count` elements."""
        ...

    def allgather(self, inp: int, out: int, count: int, dtype: int, stream: int) -> None:
        """Calls ncclAllGather; each member sends `count` elements."""
        ...

    def broadcast(self, inp: int, out: int, count: int, dtype: int, root: int, stream: int) -> None:
        """Calls ncclBroadcast with `count` elements; only the root's `inp` is read."""
        ...

    def alltoall(self, inp: int, out: int, count: int, dtype: int, stream: int) -> None:
        """Calls ncclAlltoAll; allowed only if `has_alltoall` is True.

        Each member sends `count` elements to each member.
        """
        ...

    def send(self, inp: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """Calls ncclSend: sends `count` elements to the member `peer`."""
        ...

    def recv(self, out: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """Calls ncclRecv: receives `count` elements from the member `peer`."""
        ...

    def check(self) -> None:
        """Raises an error if NCCL has reported an asynchronous error of this communicator."""
        ...

    def abort(self) -> None:
        """Frees the communicator without waiting for the other ranks."""
        ...


class NcclBinding(Protocol):
    """The functions of a Python binding of NCCL that need no communicator; `connect` creates
    one.
    """

    name: str

    def version(self) -> int:
        """Returns the version number of the NCCL library: 22809 means 2.28.9."""
        ...

    def unique_id(self) -> bytes:
        """Returns a new NCCL id of 128 bytes. All ranks of a team pass the same id to `connect`."""
        ...

    def connect(self, size: int, unique_id: bytes, index: int) -> NcclComm:
        """Creates an NCCL communicator of `size` ranks, in which this rank has the position
        `index`.

        Blocks until all `size` ranks have called `connect` with the same `unique_id`.
        """
        ...

    def group_start(self) -> None:
        """Opens an NCCL group: NCCL starts all calls until `group_end` together."""
        ...

    def group_end(self) -> None:
        """Closes the NCCL group, and enqueues its calls on their streams."""
        ...


class _CupyComm:
    has_alltoall = False

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        # The arguments have NCCL's order without the communicator, so most methods are used
        # directly.
        self.allreduce = comm.allReduce
        self.reduce = comm.reduce
        self.reduce_scatter = comm.reduceScatter
        self.allgather = comm.allGather
        self.broadcast = comm.broadcast
        self.send = comm.send
        self.recv = comm.recv
        self.check = comm.check_async_error
        self.abort = comm.abort

    def alltoall(self, inp: int, out: int, count: int, dtype: int, stream: int) -> None:
        raise CommunicationError(
            "internal error: cupy's binding of NCCL has no all-to-all, and was called for one in "
            "place of sends and receives. Please report the program"
        )


class CupyBinding:
    """Calls NCCL through the Python module `cupy.cuda.nccl`."""

    name = "cupy"

    def __init__(self) -> None:
        nccl = import_module("cupy.cuda.nccl")
        if not nccl.available:
            raise CommunicationError("cupy is installed, but cannot load NCCL's library libnccl")
        self._nccl = nccl
        self.group_start = nccl.groupStart
        self.group_end = nccl.groupEnd

    def version(self) -> int:
        """Returns the version number of the NCCL library, from cupy's `get_version`."""
        return int(self._nccl.get_version())

    def unique_id(self) -> bytes:
        """Returns a new NCCL id of 128 bytes, from cupy's `get_unique_id`."""
        return bytes(self._nccl.get_unique_id())

    def connect(self, size: int, unique_id: bytes, index: int) -> NcclComm:
        """Creates an NCCL communicator by cupy's `NcclCommunicator`; blocks until all `size` ranks
        call it.
        """
        return _CupyComm(self._nccl.NcclCommunicator(size, unique_id, index))


class _Nccl4pyComm:
    def __init__(self, raw: Any, comm: Any) -> None:
        self._raw = raw
        self._comm = comm
        self.has_alltoall = raw.get_version() >= _ALLTOALL_SINCE

    def allreduce(self, inp: int, out: int, count: int, dtype: int, op: int, stream: int) -> None:
        self._raw.all_reduce(inp, out, count, dtype, op, self._comm, stream)

    def reduce(
        self, inp: int, out: int, count: int, dtype: int, op: int, root: int, stream: int
    ) -> None:
        self._raw.reduce(inp, out, count, dtype, op, root, self._comm, stream)

    def reduce_scatter(
        self, inp: int, out: int, count: int, dtype: int, op: int, stream: int
    ) -> None:
        self._raw.reduce_scatter(inp, out, count, dtype, op, self._comm, stream)

    def allgather(self, inp: int, out: int, count: int, dtype: int, stream: int) -> None:
        self._raw.all_gather(inp, out, count, dtype, self._comm, stream)

    def broadcast(self, inp: int, out: int, count: int, dtype: int, root: int, stream: int) -> None:
        self._raw.broadcast(inp, out, count, dtype, root, self._comm, stream)

    def alltoall(self, inp: int, out: int, count: int, dtype: int, stream: int) -> None:
        self._raw.allto_all(inp, out, count, dtype, self._comm, stream)

    def send(self, inp: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._raw.send(inp, count, dtype, peer, self._comm, stream)

    def recv(self, out: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._raw.recv(out, count, dtype, peer, self._comm, stream)

    def check(self) -> None:
        status = int(self._raw.comm_get_async_error(self._comm))
        if status not in (0, 7):  # 7: in progress
            raise RuntimeError(f"NCCL reports an error: {self._raw.get_error_string(status)}")

    def abort(self) -> None:
        if self._comm is not None:
            self._raw.comm_abort(self._comm)
            self._comm = None


class Nccl4pyBinding:
    """Calls NCCL through the module `nccl.bindings` of the Python package nccl4py."""

    name = "nccl4py"

    def __init__(self) -> None:
        self._raw = import_module("nccl.bindings.nccl")
        self._raw.get_version()  # Loads libnccl now, so that no collective raises for that.
        self.group_start = self._raw.group_start
        self.group_end = self._raw.group_end

    def version(self) -> int:
        """Returns the version number of the NCCL library, from nccl4py's `get_version`."""
        return int(self._raw.get_version())

    def unique_id(self) -> bytes:
        """Returns a new NCCL id of 128 bytes, from nccl4py's `get_unique_id`."""
        return bytes(self._raw.get_unique_id())

    def connect(self, size: int, unique_id: bytes, index: int) -> NcclComm:
        """Creates an NCCL communicator by nccl4py's `comm_init_rank_scalable`.

        Blocks until all `size` ranks have called `connect` with the same `unique_id`.
        """
        comm = self._raw.comm_init_rank_scalable(size, index, 1, bytearray(unique_id), 0)
        return _Nccl4pyComm(self._raw, comm)


def load_binding() -> NcclBinding:
    """Loads a Python binding of NCCL: the one that the option `FUSER_NCCL` names.

    By default, tries nccl4py first, then cupy. Also sets defaults for two environment variables
    that NCCL reads.

    Raises:
        CommunicationError: no binding is installed, or none can load the library libnccl. The
            message says which bindings were tried.
    """
    # NVLink multicast stays off unless the user asks for it.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    # By default, a captured collective registers its buffers with all members, but some members may
    # not capture.
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    choice = options.nccl_binding()
    tried: list[str] = []
    for module, make in (("nccl", Nccl4pyBinding), ("cupy", CupyBinding)):
        if choice not in ("auto", make.name):
            continue
        if find_spec(module) is None:
            tried.append(f"{make.name} is not installed")
            continue
        try:
            return make()
        except (ImportError, RuntimeError, AttributeError, OSError) as error:
            tried.append(f"{make.name}: {error}")
    raise CommunicationError(
        f"no Python binding of NCCL works: {'; '.join(tried)} "
        "(to communicate CUDA tensors, install the extra cu12 or cu13 of this project)"
    )
