"""The heuristic of the reduction scheduler: threads, blocks and vectors of its forms."""

from __future__ import annotations

from math import prod

from fuser.schedule.pointwise import BYTES_IN_FLIGHT, loads_for, unroll_of
from fuser.schedule.vectorize import power_of_two_at_least, power_of_two_at_most
from fuser.support.device import DeviceInfo
from fuser.support.record import record, replace

# Bytes of one input that a thread loads before it uses the first; measured on an H200.
BYTES_INNER = 32
BYTES_OUTER = 128
MAX_UNROLL = 16
# Threads that keep a multiprocessor busy. Fewer rows get more threads each, then several blocks.
THREADS_PER_SM = 1024
# The same where blocks put deviations together, which takes longer. Measured on an H200, batch norm
# of 8192 x 1536 in bfloat16: 30.4 us with 1024, 25.0 with 512.
THREADS_PER_SM_WELFORD = 512
THREADS_INNER = 128
# Blocks that a multiprocessor holds at most.
BLOCKS_PER_SM = 32
THREADS_OUTER = 256
# What one block reads in about the time in which blocks exchange partial results. Where a strip of
# columns as wide as a unit of memory has no more bytes, one block sums it. Measured on an H200: a
# column sum of 16 KB strips takes half the time so, one of 64 KB 0.9 to 1.4 of several blocks'.
BYTES_ALONE = 32768
BYTES_SECTOR = 32
THREADS_ALONE = 512
# Where all steps are blocks of their own and yet fewer than multiprocessors, blocks of half as wide
# columns are more, down to half of these bytes. Measured on an H200, a column sum of 2048 x 384 in
# float32: 4.23 us with 96 blocks, 3.60 with 192.
LEAST_HALVED = 16
# Where a load is no wider than this, an odd number of half-precision columns: more threads keep as
# many bytes under way. With them 4096 x 50257 took 133 us on an H200, torch.compile's kernel 128.
NARROW = 2
THREADS_OUTER_NARROW = 512
MAX_THREADS_PER_ROW = 256
# Of rows that are several runs of memory: how many runs are unrolled, and the threads that a run
# may take, in whole warps, where powers of two would leave more than a tenth of the lanes idle. Of
# those that leave the fewest idle, or a twentieth more, the most; of variances of wide vectors,
# whose values take registers, half as many. Such rows for all multiprocessors are not split.
# Measured on an H200, sums and variances of 64 x 256 x 3136 over the outer and the inner axis, in
# us (torch.compile; a tile of 256 threads and two blocks): bfloat16 27.0 (31.8; 44.4) and 40.0
# (54.8; 68.8; with 416 threads 48.8), float32 48.9 (50.6; 64.3) and 51.3 (57.3; 119.9).
UNROLL_OUTER = 4
LEAST_RUN_THREADS, MOST_RUN_THREADS = 128, 512
WIDE = 4
IDLE_LANES = 1.1
NEARLY_BEST = 1.05
# An outer reduction of at most this many rows is short: a thread sums whole columns.
SHORT_ROWS = 16
THREADS_SHORT = 128
# Rows of at least this many vectors get two warps.
LONG_ROW = 512


@record
class ReductionParams:
    """What the reduction scheduler decides. Zero threads: plain loops of the CPU.

    `grid` splits the reduction over that many blocks (1: none). `unroll_outer` unrolls the outer
    one of two reduced runs. `columns` counts the vectors of columns of a thread. `shifted`: rows of
    any length are read in whole words of memory (`ir.domain.Shift`).
    """

    inner: bool
    threads_x: int = 0
    threads_y: int = 1
    vector: int = 1
    unroll: int = 1
    grid: int = 1
    unroll_outer: bool = False
    columns: int = 1
    shifted: bool = False

    def is_near(self, other: ReductionParams) -> bool:
        """Whether kernels of both differ in nothing that a small input would notice: how many
        threads and blocks share a reduction makes a factor of two for inputs of 25 MB."""
        mine, others = (replace(p, unroll=0, unroll_outer=False, columns=0) for p in (self, other))
        return mine == others

    def is_alike(self, other: ReductionParams) -> bool:
        """Whether a kernel made with `other` serves, if less well."""
        forms = [(p.inner, p.vector, bool(p.threads_x), p.shifted) for p in (self, other)]
        return forms[0] == forms[1]

    def __str__(self) -> str:
        form = "inner" if self.inner else "outer"
        if not self.threads_x:
            return f"reduction({form}, loops)"
        where = " of the outer run" if self.unroll_outer else ""
        columns = f", columns {self.columns}" if self.columns > 1 else ""
        return (
            f"reduction({form}, threads {self.threads_x}x{self.threads_y}, vector {self.vector}, "
            f"unroll {self.unroll}{where}, grid {self.grid}{columns}"
            f"{', shifted' if self.shifted else ''})"
        )


def inner_params(
    iterated: list[int],
    reduced: list[int],
    step: tuple[int, int],
    device: DeviceInfo,
    *,
    is_welford: bool = False,
) -> ReductionParams:
    vector, nbytes = step
    rows, chunks, outer = prod(iterated), -(-reduced[-1] // vector), prod(reduced[:-1])
    wanted = device.sm_count * THREADS_PER_SM
    most = min(power_of_two_at_least(-(-wanted // rows)), MAX_THREADS_PER_ROW)
    x = min(
        power_of_two_at_least(chunks),
        max(most, device.warp_size * (2 if chunks >= LONG_ROW else 1)),
    )
    per_thread = BYTES_INNER if most <= device.warp_size else 2 * BYTES_INNER
    unroll = min(loads_for(per_thread, nbytes, MAX_UNROLL), power_of_two_at_least(-(-chunks // x)))
    unroll_outer = unroll < UNROLL_OUTER <= outer and chunks <= x
    is_heavy = is_welford and vector > WIDE
    fuller = _fuller(chunks, x * unroll, is_heavy=is_heavy) if outer >= UNROLL_OUTER else 0
    if fuller:
        x, unroll_outer = fuller, True
    if unroll_outer:
        unroll = UNROLL_OUTER
    y = min(max(THREADS_INNER // x, 1), power_of_two_at_least(rows))
    steps = -(-(outer * -(-chunks // x)) // unroll)
    is_enough = fuller and rows >= device.sm_count
    grid = 1 if is_enough else _grid(-(-rows // y) * x * y, steps, wanted, device)
    return ReductionParams(True, x, y, vector, unroll, grid, unroll_outer)


def _fuller(chunks: int, tile: int, *, is_heavy: bool) -> int:
    """Return how many threads take a run of so many vectors with fewer idle lanes than a tile of so
    many vectors; 0 where none do by much."""

    def covered(x: int) -> int:
        return -(-chunks // x) * x

    most = MOST_RUN_THREADS // 2 if is_heavy else MOST_RUN_THREADS
    threads = range(LEAST_RUN_THREADS, most + 1, 32)
    least = min(map(covered, threads))
    best = max(x for x in threads if covered(x) <= NEARLY_BEST * least)
    return best if covered(best) * IDLE_LANES < covered(tile) else 0


def outer_params(
    iterated: list[int],
    reduced: list[int],
    step: tuple[int, int],
    loaded: int,
    busy: int,
    device: DeviceInfo,
) -> ReductionParams:
    vector, nbytes = step
    chunks, rows = -(-iterated[-1] // vector), prod(reduced)
    x = min(power_of_two_at_least(chunks), device.warp_size)
    threads = THREADS_OUTER_NARROW if nbytes <= NARROW else THREADS_OUTER
    y = min(threads // x, power_of_two_at_least(rows))
    unroll = min(loads_for(BYTES_OUTER, nbytes, MAX_UNROLL), power_of_two_at_least(-(-rows // y)))
    blocks = prod(iterated[:-1]) * -(-chunks // x)
    steps = -(-rows // (y * unroll))
    grid = _grid(blocks * x * y, steps, busy, device)
    chosen = ReductionParams(False, x, y, vector, unroll, grid)
    narrow = max(min(x, BYTES_SECTOR // nbytes), 1)
    most = rows * narrow * vector * loaded
    if grid > 1 and most <= BYTES_ALONE:
        return _alone(chosen, narrow, rows, most)
    is_few = steps > 1 and blocks * grid < device.sm_count and grid * 2 > steps
    is_wide = x == device.warp_size and nbytes >= LEAST_HALVED
    return replace(chosen, vector=vector // 2) if is_few and is_wide else chosen


def _alone(chosen: ReductionParams, x: int, rows: int, nbytes: int) -> ReductionParams:
    """Return parameters for strips of `x` lanes and few bytes, each of which one block sums."""
    wanted = max(power_of_two_at_least(-(-nbytes // BYTES_OUTER)), THREADS_OUTER)
    y = min(min(wanted, THREADS_ALONE) // x, power_of_two_at_least(rows))
    unroll = min(chosen.unroll, power_of_two_at_least(-(-rows // y)))
    return replace(chosen, threads_x=x, threads_y=y, unroll=unroll, grid=1)


def short_params(
    columns: int, rows: int, vector: int, loaded: int, device: DeviceInfo
) -> ReductionParams:
    # Steps of equal length: a step that has fewer rows takes the slower path with tests.
    steps = max(-(-rows * loaded * vector // BYTES_OUTER), 1)
    unroll = max(-(-rows // steps), 1)
    each = unroll_of(loaded * unroll, columns, vector, BYTES_IN_FLIGHT, device)
    return ReductionParams(False, THREADS_SHORT, 1, vector, unroll, columns=each)


def _grid(threads: int, steps: int, wanted: int, device: DeviceInfo) -> int:
    """Split a reduction of `steps` serial steps so that about `wanted` threads exist, none idle; of
    all numbers of blocks only powers of two, and halfway between them. No more than run at a time,
    however few threads a block has."""
    if threads * 2 > wanted:
        return 1
    at_once = min(device.sm_count * BLOCKS_PER_SM, device.max_grid[1])
    most = max(min(wanted // threads, steps, at_once), 1)
    power = power_of_two_at_most(most)
    return power * 3 // 2 if power * 3 // 2 <= most else power
