"""The allreduce kernel over mapped GPU memory: its source text, memory layout and launch
parameters.

Each rank of a team has mapped a memory area of every other rank, through which the kernels of the
ranks exchange data. The algorithms are described at the top of `fuser/codegen/peer_allreduce.h`.
All ranks must make the same choices. Therefore the functions of this module depend only on the size
of the team, the size of the message and its dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from fuser.runtime.kernel_text import codegen_text
from fuser.support.kernel_source import KernelParam, KernelSource
from multidevice.transports.base.protocol import RedOp

# The largest team: the area of each rank is a parameter of the kernel.
MAX_RANKS = 8
# The largest message in bytes: an area has space for it four times. For larger messages, NCCL's
# higher bandwidth outweighs its longer latency.
MAX_NBYTES = 8 << 20
# The largest message sent in packets. It crosses the link at twice its size, but needs no
# announcement.
_PACKETS_NBYTES = 64 << 10
# The largest message sent in words: an area has space for it six times.
_WORDS_NBYTES = 4 << 20
# How many more bytes one shot may send than two shots: this costs as much as their second
# synchronisation.
_EXTRA_NBYTES = 512 << 10

# The largest message sent in one shot of words: in two shots, a thread has fewer elements to add.
_ONE_OF_WORDS_NBYTES = 1 << 20

# Few enough that all blocks run at once and leave multiprocessors to other kernels.
MAX_BLOCKS, MAX_THREADS = 64, 512

# The number of words of the report that a kernel writes when it gives up: whether it has given up,
# the position in the team of the missing rank, the tag of the launch, the number of the kernel, and
# whether the host has read the report.
REPORT_WORDS = 5
_REPORT_READ = 4
# How many seconds a kernel that gave up waits until the host has read its report, before it fails.
_GRACE_S = 10
_SPINS = 256

# The C++ types of an element, of its sums, and of comparisons.
_TYPES: dict[torch.dtype, tuple[str, str, str]] = {
    torch.float64: ("double", "double", "double"),
    torch.float32: ("float", "float", "float"),
    torch.float16: ("__half", "float", "float"),
    torch.bfloat16: ("__bfloat", "float", "float"),
    # Unsigned, so that overflow wraps around.
    torch.int32: ("int", "uint32_t", "int"),
    torch.int64: ("int64_t", "uint64_t", "int64_t"),
}
_OPS: dict[RedOp, str] = {
    "SUM": "SumOp",
    "AVG": "SumOp",
    "PRODUCT": "ProdOp",
    "MIN": "MinOp",
    "MAX": "MaxOp",
}
_ADDS = frozenset({"SUM", "AVG", "PRODUCT"})


class Way(Enum):
    """The algorithm by which the ranks exchange the data of an allreduce.

    The value is the name of the algorithm's function in `peer_allreduce.h`.
    """

    PACKETS = "in_packets"
    ONE_SHOT = "in_one_shot"
    TWO_SHOTS = "in_two_shots"
    ONE_OF_WORDS = "in_one_of_words"
    TWO_OF_WORDS = "in_two_of_words"


# Variants in which each rank reduces one slice.
_TWO = (Way.TWO_SHOTS, Way.TWO_OF_WORDS)
# Dtypes whose bits, inverted, leave a pattern for "not arrived": a NaN is unused.
_IN_WORDS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Shape:
    """The launch parameters of an allreduce kernel: algorithm, number of CUDA blocks, threads per
    block.
    """

    way: Way
    blocks: int
    threads: int


@dataclass(frozen=True)
class Layout:
    """The offsets and sizes, in bytes, of the fields of one rank's memory area for allreduce
    kernels.

    Each rank of a team has one area, which the other ranks map. The area begins with counters of
    the CUDA blocks. They are followed by a flag that says whether a kernel has given up waiting for
    another rank.
    """

    flags_at: int
    packets_at: int
    # The size of one rank's packets, and of one half of the data.
    packets_nbytes: int
    data_at: int
    data_nbytes: int
    # The size of one of three parts.
    words_at: int
    words_nbytes: int

    @property
    def nbytes(self) -> int:
        """The size of the memory area in bytes."""
        return self.words_at + 3 * self.words_nbytes

    @staticmethod
    def of(size: int) -> Layout:
        """Returns the layout of one rank's memory area in a team of `size` ranks."""
        flags_at = _aligned(4 * (3 * MAX_BLOCKS + 1))
        packets_at = _aligned(flags_at + 2 * MAX_BLOCKS * size * 4)
        packets_nbytes = 2 * _PACKETS_NBYTES
        data_at = _aligned(packets_at + 2 * size * packets_nbytes)
        # One slot for each rank, and the results; slots are whole vectors.
        data_nbytes = _aligned(2 * (MAX_NBYTES + 16 * size))
        words_at = data_at + 2 * data_nbytes
        words_nbytes = _aligned(2 * (_WORDS_NBYTES + 16 * size))
        return Layout(
            flags_at, packets_at, packets_nbytes, data_at, data_nbytes, words_at, words_nbytes
        )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 256) * 256


def is_known(dtype: torch.dtype, reduce: RedOp) -> bool:
    """Returns whether a kernel exists for the reduction `reduce` of elements of `dtype`."""
    return dtype in _TYPES and reduce in _OPS


def shape_of(nbytes: int, size: int, dtype: torch.dtype) -> Shape | None:
    """Chooses the launch parameters for an allreduce of `nbytes` bytes in a team of `size` ranks.

    Returns None if the message or the team is too large for the kernel.
    """
    if not 0 < nbytes <= MAX_NBYTES or not 2 <= size <= MAX_RANKS:
        return None
    extra = sent_nbytes(Way.ONE_SHOT, nbytes, size) - sent_nbytes(Way.TWO_SHOTS, nbytes, size)
    is_one = extra <= _EXTRA_NBYTES
    if dtype in _IN_WORDS and nbytes <= _WORDS_NBYTES:
        is_one = is_one and nbytes <= _ONE_OF_WORDS_NBYTES
        way = Way.ONE_OF_WORDS if is_one else Way.TWO_OF_WORDS
    elif nbytes <= _PACKETS_NBYTES // (1 if size <= 4 else 2):
        way = Way.PACKETS
    else:
        way = Way.ONE_SHOT if is_one else Way.TWO_SHOTS
    vectors = -(-nbytes // 16)
    each = -(-vectors // size) if way in _TWO else vectors
    threads = MAX_THREADS // (2 if each <= MAX_BLOCKS * MAX_THREADS // 2 else 1)
    return Shape(way, min(-(-each // threads), MAX_BLOCKS), threads)


def sent_nbytes(way: Way, nbytes: int, size: int) -> int:
    """Returns how many bytes each rank writes into the memory of other ranks in one allreduce.

    `way` is the algorithm, `nbytes` the size of the message, and `size` the number of ranks.
    """
    if way in _TWO:  # a part of this rank's message to each other rank, and the sum of its own part
        return 2 * (size - 1) * nbytes // size
    return (size - 1) * nbytes * (2 if way is Way.PACKETS else 1)


def allreduce_source(size: int, dtype: torch.dtype, reduce: RedOp, way: Way) -> KernelSource:
    """Returns the CUDA source of the allreduce kernel for a team of `size` ranks and algorithm
    `way`.

    The kernel has these parameters:

    - the addresses of output and input;
    - the memory areas (`Layout`) of all ranks, and this rank's own area;
    - the report: `REPORT_WORDS` words of 8 bytes, which the kernel writes if it gives up waiting
      for another rank;
    - this rank's position in the team, and the number of elements;
    - the longest wait in ns, and a number that identifies the call in reports.
    """
    layout = Layout.of(size)
    element, added, compared = _TYPES[dtype]
    total = added if reduce in _ADDS else compared
    areas = [f"area{r}" for r in range(size)]
    constants = {
        "int RANKS": size,
        "unsigned MAX_BLOCKS": MAX_BLOCKS,
        "int64_t FLAGS_AT": layout.flags_at,
        "int64_t PACKETS_AT": layout.packets_at,
        "int64_t PACKETS_NBYTES": layout.packets_nbytes,
        "int64_t DATA_AT": layout.data_at,
        "int64_t DATA_NBYTES": layout.data_nbytes,
        "int64_t WORDS_AT": layout.words_at,
        "int64_t WORDS_NBYTES": layout.words_nbytes,
        "int REPORT_READ": _REPORT_READ,
        "int64_t GRACE_NS": _GRACE_S * 10**9,
        "unsigned SPINS": _SPINS,
    }
    params = (
        KernelParam("out", element, True),
        KernelParam("inp", element, True),
        *(KernelParam(name, "char", True) for name in (*areas, "own")),
        KernelParam("report", "uint64_t", True),
        KernelParam("me", "int", False),
        *(KernelParam(name, "int64_t", False) for name in ("count", "limit_ns", "tag")),
    )
    listed = ", ".join(
        f"FUSER_ALIASED_PTR({p.ctype}) {p.name}" if p.is_pointer else f"const {p.ctype} {p.name}"
        for p in params
    )
    text = f"""\
#define nvfuser_index_t int64_t
{"".join(f"static constexpr {name} = {value};{chr(10)}" for name, value in constants.items())}\
{codegen_text("peer_memory.h")}{codegen_text("peer_allreduce.h")}
extern "C" __global__ void __launch_bounds__({MAX_THREADS}) peer_allreduce({listed}) {{
  Peers peers = {{
      {{{", ".join(areas)}}}, own, report, me, limit_ns, static_cast<uint64_t>(tag), 0}};
  typedef Reduction<{element}, {total}, {_OPS[reduce]}<{total}>, {str(reduce == "AVG").lower()}> R;
  allreduce<R>(peers, out, inp, count, {way.value}<R>);
}}
"""
    return KernelSource("peer_allreduce", text, params, uses_barriers=True)
