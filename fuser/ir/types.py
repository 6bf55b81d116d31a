"""Enumerations of the IR, with nvFuser's names and text forms.

Examples are `ParallelType`, the executor of an axis, and `MemoryType`, the memory of a tensor.
"""

from __future__ import annotations

import enum

from fuser.support.errors import ArgumentError


class IrEnum(enum.Enum):
    """Base class of the IR's enumerations. `repr` of a member has the form of nvFuser's."""

    # Enum's own hash is a Python function, which would slow down every table look-up.
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"<{type(self).__name__}.{self.name}: {self.value}>"

    def __int__(self) -> int:
        """Returns the value of the member as a number, as nvFuser's enumerations allow.

        Raises:
            ArgumentError: the value is a text.
        """
        if isinstance(self.value, int):
            return self.value
        raise ArgumentError(f"int({self}): the value is the text {self.value!r}, not a number")


class IdMappingMode(IrEnum):
    """The relations between axes that `fuser.idm` can compute, such as "is the same axis".

    Each mode except `loop` relates all pairs of axes that the modes before it in this list relate.
    """

    exact = 0
    almost_exact = 1
    broadcast = 2
    permissive = 3
    loop = 4


class ParallelType(IrEnum):
    """The hardware or loop that executes an axis: devices, streams, blocks, threads, serial loops.

    `mesh_x` to `mesh_z` are the dimensions of a device mesh, `grid_x` to `grid_z` those of a CUDA
    grid, and `block_x` to `block_z` those of a CUDA block. Values follow nvFuser's order, so that
    `int(ptype.value)` can be compared with nvFuser's numbers.
    """

    mesh_x = 0
    mesh_y = 1
    mesh_z = 2
    grid_z = 3
    grid_y = 4
    grid_x = 5
    block_z = 6
    block_y = 7
    block_x = 8
    stream = 9
    vectorize = 10
    unroll = 11
    unswitch = 12
    mma = 13
    group = 14
    tma = 15
    serial = 16
    # The inner axes of a stream axis that merges several axes; only the compiler uses them.
    stream_y = 17
    stream_z = 18

    @property
    def text(self) -> str:
        """The text of the type in the text of an axis, such as `deviceIdx.x`, `blockIdx.y`, `S`."""
        return _PTYPE_TEXT[self]

    @property
    def is_device(self) -> bool:
        """Whether this type is a dimension of the mesh, over whose devices an axis is split."""
        return self in DEVICE_TYPES

    @property
    def is_stream(self) -> bool:
        """Whether positions along an axis of this type are iterations of a loop over CUDA streams.

        If such a loop iterates over several axes, the outermost has the type `stream`, and the
        others have `stream_y` and `stream_z`.
        """
        return self in STREAM_TYPES

    @property
    def is_block(self) -> bool:
        """Whether the CUDA blocks of a grid execute the positions along an axis of this type."""
        return self in GRID_TYPES

    @property
    def is_thread(self) -> bool:
        """Whether the threads of a CUDA block execute the positions along an axis of this type."""
        return self in BLOCK_TYPES


_PTYPE_TEXT = {
    ParallelType.mesh_x: "deviceIdx.x",
    ParallelType.mesh_y: "deviceIdx.y",
    ParallelType.mesh_z: "deviceIdx.z",
    ParallelType.grid_x: "blockIdx.x",
    ParallelType.grid_y: "blockIdx.y",
    ParallelType.grid_z: "blockIdx.z",
    ParallelType.block_x: "threadIdx.x",
    ParallelType.block_y: "threadIdx.y",
    ParallelType.block_z: "threadIdx.z",
    ParallelType.stream: "streamIdx",
    ParallelType.stream_y: "streamIdx.y",
    ParallelType.stream_z: "streamIdx.z",
    ParallelType.vectorize: "V",
    ParallelType.unroll: "UR",
    ParallelType.unswitch: "US",
    ParallelType.mma: "MMA",
    ParallelType.group: "G",
    ParallelType.tma: "B",
    ParallelType.serial: "S",
}
# Older dumps spell the stream axis with a capital.
PTYPE_FROM_TEXT = {
    **{text: ptype for ptype, text in _PTYPE_TEXT.items()},
    "StreamIdx": ParallelType.stream,
    "Stream": ParallelType.stream,
}

DEVICE_TYPES = (ParallelType.mesh_x, ParallelType.mesh_y, ParallelType.mesh_z)
# The axes that together count the steps of a stream loop, outermost first; most loops have one.
STREAM_TYPES = (ParallelType.stream, ParallelType.stream_y, ParallelType.stream_z)
GRID_TYPES = (ParallelType.grid_x, ParallelType.grid_y, ParallelType.grid_z)
BLOCK_TYPES = (ParallelType.block_x, ParallelType.block_y, ParallelType.block_z)


class IterType(IrEnum):
    """The kind of an axis in its tensor, such as iteration, reduction or broadcast.

    The value is the first letter in the text of an axis: `iS0{i0}`.
    """

    iteration = "i"
    reduction = "r"
    broadcast = "b"
    symbolic = "?"
    gather_scatter = "n"


class MemoryType(IrEnum):
    """The kind of memory that holds a tensor, such as global memory.

    The value is a part of the tensor's name: `T0_g_float`.
    """

    local = "l"
    shared = "s"
    global_ = "g"
    tensor = "t"
    symmetric = "sym"

    @property
    def text(self) -> str:
        """The name of this memory in texts of allocations and errors, such as `register`."""
        return {"l": "register", "s": "shared", "g": "global", "t": "tensor"}.get(
            self.value, "symmetric"
        )


# `global` is a Python keyword: users reach the member with getattr(MemoryType, "global").
setattr(MemoryType, "global", MemoryType.global_)


class LoadStoreOpType(IrEnum):
    """The kind of a copy: the hardware instruction that executes it, or its role.

    `set` is a plain copy. `segmenter_set` also separates two kernels: ops after it are in another
    kernel than ops before it.
    """

    set = "Set"
    segmenter_set = "SegmenterSet"
    cp_async = "CpAsync"
    load_matrix = "LdMatrix"
    tma = "CpAsyncBulkTensorTile"


class CacheOp(IrEnum):
    """The cache hint of a load from global memory, or of a store."""

    unspecified = "Unspecified"
    all_levels = "AllLevels"
    streaming = "Streaming"
    global_ = "Global"


setattr(CacheOp, "global", CacheOp.global_)
