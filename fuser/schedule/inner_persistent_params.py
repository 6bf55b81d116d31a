"""What the inner persistent scheduler decides, and how: the shape of blocks, what threads keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import NamedTuple

from fuser.ir.fusion import Fusion
from fuser.schedule.input_facts import Facts, RunExtents
from fuser.schedule.row_levels import (
    kept_values,
    most_bytes,
)
from fuser.schedule.row_view import RowView, rewrite
from fuser.schedule.vectorize import VectorWidths, power_of_two_at_least, power_of_two_at_most
from fuser.support.device import DeviceInfo
from fuser.support.record import record

# Registers that a thread keeps of its row: with two blocks or more on a multiprocessor one loads
# while another computes.
KEPT_REGISTERS = 32
# Bytes that one of half of the most threads keeps of a row that takes more registers than that.
# Where results lie along such a row, converting its elements for them takes registers that are not
# there. Measured on an H200, cross entropy of 50257 columns in bfloat16: 100 us, looped 106; with
# its gradient 215, looped 188.
LONG_ROW_BYTES = 240
# Columns from which kernels with sums over rows load a wide weight in one word, and rows in shorter
# ones. Measured on an H200: 4096 and 8192 take 4 to 17 % less time, 1536 and 1024 2 to 8 % more.
# From there a thread also keeps so much of the row and the sums: fewer threads wait for one
# another. Measured on an H200, gradients of layer norm in bfloat16, 16384 x 8192: 238 us with 256
# threads, 307 with 1024; 4096 x 4096 34 and 45.
LONG_PARTS = 4096
LONG_PARTS_BYTES = 512
LONG_PARTS_KEPT = 32
# Of one multiprocessor, what a row may keep at most, and up to where results of costly ops are kept
# rather than computed again.
ROW_REGISTERS = 40 * 1024
ROW_REGISTERS_COSTLY = 16 * 1024
THREADS_PER_BLOCK = 128
# Bytes of a line of memory.
LINE = 128
# Threads of a multiprocessor: what is cheap is computed again rather than kept in more registers.
RESIDENT = 768
RESIDENT_ONE = 1024
# Threads along a row, so that few shapes of kernels exist.
ROW_THREADS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
LOOPED_THREADS = 512
LOOPED_BYTES = 32
# Threads of a block of a cluster, and bytes of a row that each may keep.
CLUSTER_THREADS = 512
CLUSTER_BYTES = 256
# Bytes of a row of which few are to be on their way through the cache at once: with twice the
# loads, and twice the threads where results lie along it, there are half as many. Measured on an
# H200, rows of 50257 in float32: cross entropy 158 us (with twice the threads, too, 193), with its
# gradient 326 (without both 378).
WIDE_ROW_BYTES = 128 << 10


@record
class InnerPersistentParams:
    """What the inner persistent scheduler decides. Zero threads: plain loops of the CPU.

    `kept` counts the elements of a row in one thread; 0: every level loops over the row, `unroll`
    vectors of each input at a time. `keeps_costly`: results of costly ops are kept, too.
    `resident` threads are to find registers on a multiprocessor (0: the compiler decides).
    `exact`: what the threads keep is the row, so that nothing has to be tested. `shifted`: rows of
    any length are read in whole words of memory, but for their ends. `cluster` blocks take a row.
    """

    threads_x: int = 0
    threads_y: int = 1
    vector: int = 1
    kept: int = 0
    keeps_costly: bool = False
    unroll: int = 1
    resident: int = 0
    exact: bool = False
    shifted: bool = False
    cluster: int = 1

    def is_near(self, other: InnerPersistentParams) -> bool:
        """Whether kernels of both differ in nothing that a small input would notice. Where one is
        exact, its guards tell whether it serves."""
        return replace(self, exact=False) == replace(other, exact=False)

    def is_alike(self, other: InnerPersistentParams) -> bool:
        """Whether a kernel made with `other` serves, if less well: not with most threads idle."""
        forms = [(p.vector, bool(p.kept), p.shifted, p.cluster) for p in (self, other)]
        if forms[0] != forms[1]:
            return False
        sizes = self.threads_x * self.kept, other.threads_x * other.kept
        return max(sizes) <= 2 * min(sizes)

    def __str__(self) -> str:
        if not self.threads_x:
            return "inner_persistent(loops)"
        what = f"looped, unroll {self.unroll}"
        if self.kept:
            what = f"kept {self.kept}" + (" with results" if self.keeps_costly else "")
        return (
            f"inner_persistent(threads {self.threads_x}x{self.threads_y}, vector {self.vector}, "
            f"{what}, resident {self.resident}"
            f"{', exact' if self.exact else ''}{', shifted' if self.shifted else ''}"
            f"{f', cluster {self.cluster}' if self.cluster > 1 else ''})"
        )


# ------------------------------------------------------------------ heuristics
def generic(device: DeviceInfo) -> InnerPersistentParams:
    """Return the parameters that rely on nothing."""
    if device.kind == "cpu":
        return InnerPersistentParams()
    return InnerPersistentParams(threads_x=THREADS_PER_BLOCK)


def chooser(
    fusion: Fusion, device: DeviceInfo, *, beside: int = 0, in_clusters: bool = False
) -> Callable[[Facts], InnerPersistentParams]:
    """Return what chooses form, vector width and thread shape for an input class, where a thread
    keeps `beside` bytes more for each element of its row; `in_clusters`: also how many blocks take
    a row."""
    if device.kind == "cpu":
        loops = InnerPersistentParams()
        return lambda facts: loops
    given, _ = fusion.copy()
    rewrite(given, is_kept=True, has_threads=True)
    view = RowView(given)
    logical = view.reference.domain.logical
    candidates = view.space.vector_candidates(view.innermost)
    is_full = {a.tv: a.tv in view.full for a in candidates}
    has_full, has_columns = any(is_full.values()), not all(is_full.values())
    # Of norms, which read columns, no looped form was measured.
    writes = any(a.is_output and a.tv in view.full for a in view.space.accesses) and not has_columns
    widths = VectorWidths(candidates, shared=lambda a: has_full and not is_full[a.tv])
    long_widths = VectorWidths(candidates) if view.parts else widths
    # What sums rows looks at the same elements of each.
    shifted_widths = VectorWidths(view.dense) if view.iterated and not view.parts else None
    extents = RunExtents(given, [[logical[p] for p in run] for run in view.iterated + view.reduced])
    count = len(view.iterated)
    kept = kept_values(given, view.full, is_costly=view.is_costly)
    inputs = kept_values(given, view.full, is_costly=lambda op: False)
    has_costly = len(kept) > len(inputs)
    read = [a for a in view.space.accesses if not a.is_output]
    widest = max((a.nbytes for a in read if a.tv in view.full), default=4)

    def choose(facts: Facts) -> InnerPersistentParams:
        found = extents.of(facts)
        rows, columns = prod(found[:count]), prod(found[count:])
        vector, begin = (long_widths if columns >= LONG_PARTS else widths).of(facts, found[-1]), 0
        is_narrow = vector < widths.within(facts)
        words = shifted_widths.wider(facts, columns, vector) if shifted_widths and is_narrow else 0
        if words:
            vector, begin = words, words - 1
        shape = _RowsAccess(rows, columns, vector, widest, begin, len(inputs))
        if in_clusters:
            return _cluster_params(shape, most_bytes(inputs, vector), device)
        plans = [(most_bytes(inputs, vector) + beside, False)]
        if has_costly:
            plans.insert(0, (most_bytes(kept, vector) + beside, True))
        for nbytes, costly in plans:
            limit = ROW_REGISTERS_COSTLY if costly else ROW_REGISTERS
            spills = writes and nbytes < 4 and _is_long(shape, nbytes)
            if columns * nbytes <= 4 * limit and not spills:
                if beside and columns >= LONG_PARTS:
                    return _long_parts_params(shape, nbytes)
                return _kept_params(shape, nbytes, costly, device)
        # Those along the row alone are not shifted with it: their elements are loaded one by one.
        return _looped_params(shape, has_columns=has_columns, writes=writes)

    return choose


class _RowsAccess(NamedTuple):
    """How many rows there are of how many elements, and how these are accessed: the elements of a
    vector, the bytes of the widest one, and how many elements a row may begin behind a word; and
    how many inputs have them."""

    rows: int
    columns: int
    vector: int
    widest: int
    begin: int
    inputs: int

    @property
    def chunks(self) -> int:
        """The vectors that hold a row."""
        return -(-(self.columns + self.begin) // self.vector)


def _most_chunks(shape: _RowsAccess, nbytes: int) -> int:
    """Return the vectors that a thread keeps where a block has threads enough: the compiler keeps
    what it converts in its wider form."""
    return max(4 * KEPT_REGISTERS // (max(nbytes, 4) * shape.vector), 1)


def _is_long(shape: _RowsAccess, nbytes: int) -> bool:
    """Whether no block has threads enough to keep a row so."""
    return shape.chunks > ROW_THREADS[-1] * _most_chunks(shape, nbytes)


def _kept_params(
    shape: _RowsAccess, nbytes: int, costly: bool, device: DeviceInfo
) -> InnerPersistentParams:
    rows, columns, vector, widest, begin, _ = shape
    chunks, is_shifted = shape.chunks, begin > 0
    most = _most_chunks(shape, nbytes)
    # Lanes that lie side by side read whole lines of memory; those without work cost as others do.
    least = min(max(LINE // (vector * widest), 1), device.warp_size, power_of_two_at_least(chunks))
    lanes = device.warp_size
    if is_shifted and lanes * most < chunks <= lanes * (most + most // 4):
        most += most // 4  # a shifted row has a word more: not two warps for that
    fit = [t for t in ROW_THREADS if least <= t and t * most >= chunks]
    if not fit:
        # Two rows on a multiprocessor, where their threads' registers hold them.
        half = ROW_THREADS[-1] // 2
        fit = [half if chunks * vector * nbytes <= half * LONG_ROW_BYTES else 2 * half]
    warp = [t for t in fit if t <= device.warp_size] or fit[:2]
    x = min(warp, key=lambda t: t * -(-chunks // t))
    batch = -(-chunks // x)
    y = max(THREADS_PER_BLOCK // x, 1) if rows > device.sm_count else 1
    exact = x * batch * vector == columns and rows % y == 0 and not is_shifted
    if x * batch != chunks and (x <= lanes or not is_shifted):
        # Rows of many lengths share few kernels.
        batch = max(min(power_of_two_at_least(batch), most), batch)
    kept = batch * vector
    # Several narrow inputs take more registers once they are converted.
    is_one = shape.inputs == 1 and costly
    resident = RESIDENT_ONE if is_one or nbytes < 4 else RESIDENT
    return InnerPersistentParams(
        x, y, vector, kept, costly, resident=resident, exact=exact, shifted=is_shifted
    )


def _long_parts_params(shape: _RowsAccess, nbytes: int) -> InnerPersistentParams:
    """One row at a time beside sums over rows: the compiler decides about registers."""
    most = max(min(LONG_PARTS_BYTES // nbytes, LONG_PARTS_KEPT) // shape.vector, 1)
    fit = [t for t in ROW_THREADS if t * most >= shape.chunks] or [ROW_THREADS[-1]]
    x = min(fit[:2], key=lambda t: t * -(-shape.chunks // t))
    kept = -(-shape.chunks // x) * shape.vector
    return InnerPersistentParams(x, 1, shape.vector, kept, exact=x * kept == shape.columns)


def _looped_params(shape: _RowsAccess, *, has_columns: bool, writes: bool) -> InnerPersistentParams:
    """`writes`: along the row, and no columns are read."""
    row_bytes = shape.inputs * shape.columns * shape.widest
    chunks, times = shape.chunks, 1 if has_columns or row_bytes < WIDE_ROW_BYTES else 2
    x = min(power_of_two_at_least(chunks), (times if writes else 1) * LOOPED_THREADS)
    unroll = max(times * LOOPED_BYTES // (shape.vector * shape.widest), 1)
    unroll = min(power_of_two_at_most(unroll), power_of_two_at_least(-(-chunks // x)), 8)
    if 10 * _covered(chunks, x * unroll // 2) < 9 * _covered(chunks, x * unroll):
        unroll //= 2  # the last step would have little to do
    return InnerPersistentParams(x, 1, shape.vector, unroll=unroll, shifted=shape.begin > 0)


def _cluster_params(shape: _RowsAccess, nbytes: int, device: DeviceInfo) -> InnerPersistentParams:
    """Return the least cluster whose threads keep a row; where none does, one that reads a row so
    that all rows under way stay in the cache of second level."""
    most = min(device.max_cluster, device.max_grid[1])
    sizes = [1 << k for k in range(1, most.bit_length())]
    if not sizes:
        return _looped_params(shape, has_columns=False, writes=False)
    x, is_shifted = CLUSTER_THREADS, shape.begin > 0
    for cluster in sizes:
        batch = -(-shape.chunks // (cluster * x))
        if batch * shape.vector * nbytes <= CLUSTER_BYTES:
            kept = batch * shape.vector
            exact = cluster * x * kept == shape.columns
            return InnerPersistentParams(
                x, 1, shape.vector, kept, exact=exact, shifted=is_shifted, cluster=cluster
            )
    row_bytes = shape.inputs * shape.columns * shape.widest
    fits = [c for c in sizes if 2 * row_bytes * (device.sm_count // c) <= device.l2_bytes]
    looped = _looped_params(shape, has_columns=False, writes=False)
    return replace(looped, cluster=(fits or sizes[-1:])[0])


def _covered(chunks: int, step: int) -> int:
    return -(-chunks // step) * step
