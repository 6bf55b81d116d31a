"""Tests of the allreduce kernel over mapped memory: it runs on the CPU with threads as ranks.

A rank's launch waits for the launches of the others, so the ranks run side by side. Tests that need
GPUs are in `tests/gpu/multidevice/test_allreduce_kernel.py`.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Sequence
from functools import cache

import pytest
import torch

from fuser.runtime.compile import compile_cubin, compile_kernels
from fuser.runtime.compiled_kernel import CompiledKernel
from multidevice.transports.base import allreduce_model
from multidevice.transports.base.allreduce_model import (
    MAX_BLOCKS,
    MAX_NBYTES,
    REPORT_WORDS,
    Layout,
    Shape,
    Way,
    allreduce_source,
    shape_of,
)
from multidevice.transports.base.protocol import RED_OPS, RedOp
from tests.support.rank_programs import collectives

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
)
# Those whose words say by themselves that they are here, and the ways of all others.
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
WITH_FLAGS = (Way.PACKETS, Way.ONE_SHOT, Way.TWO_SHOTS)
LIMIT_NS = 60 * 10**9

# Dozens of large kernels at once: 20 s of a core, which others may use as well.
pytestmark = pytest.mark.timeout(300)


@cache
def kernels(size: int, dtype: torch.dtype) -> dict[tuple[RedOp, Way], CompiledKernel]:
    """Compiles a dtype's kernels together."""
    keys: list[tuple[RedOp, Way]] = [(op, way) for op in reductions(dtype) for way in ways(dtype)]
    made = compile_kernels([allreduce_source(size, dtype, *key) for key in keys], "cpu")
    return dict(zip(keys, made, strict=True))


def ways(dtype: torch.dtype) -> list[Way]:
    return [way for way in Way if way in WITH_FLAGS or dtype in FLOATS]


def reductions(dtype: torch.dtype) -> list[RedOp]:
    return [op for op in RED_OPS if op != "AVG" or dtype.is_floating_point]


class Team:
    """Ranks as threads; each has shared memory (an area) and a failure report."""

    def __init__(self, size: int, *, limit_ns: int = LIMIT_NS) -> None:
        self.size, self.limit_ns = size, limit_ns
        self.layout = Layout.of(size)
        self.areas = [torch.zeros(self.layout.nbytes, dtype=torch.uint8) for _ in range(size)]
        self.reports = [torch.zeros(REPORT_WORDS, dtype=torch.int64) for _ in range(size)]
        for report in self.reports:
            report[-1] = 1  # read already: a kernel that gives up does not wait for its reader

    def allreduce(
        self,
        outs: Sequence[torch.Tensor],
        inps: Sequence[torch.Tensor],
        op: RedOp,
        shape: Shape | None = None,
        *,
        absent: Sequence[int] = (),
    ) -> None:
        first = inps[0]
        shape = shape or shape_of(first.numel() * first.element_size(), self.size, first.dtype)
        assert shape is not None
        function = kernels(self.size, first.dtype)[op, shape.way]

        def run(me: int) -> None:
            numbers = (me, first.numel(), self.limit_ns, 7)
            function.launch(
                (outs[me], inps[me], *self.areas, self.areas[me], self.reports[me], *numbers),
                grid=(shape.blocks, 1, 1),
                block=(shape.threads, 1, 1),
            )

        present = [r for r in range(self.size) if r not in absent]
        threads = [threading.Thread(target=run, args=(r,)) for r in present]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def epochs(self) -> set[int]:
        """Returns the kernel counters of all blocks of all ranks."""
        found = [area[: 4 * MAX_BLOCKS].view(torch.int32).tolist() for area in self.areas]
        return set(itertools.chain(*found))


def check(
    team: Team, dtype: torch.dtype, op: RedOp, count: int, shape: Shape | None = None
) -> None:
    """Runs one allreduce on fresh data: right, equal bits on all ranks, and no other write."""
    salt = random.randrange(1 << 20)
    inps = [collectives.values(r, count, dtype, salt) for r in range(team.size)]
    kept = [x.clone() for x in inps]
    buffers = [torch.full((count + 16,), 77, dtype=dtype) for _ in inps]
    # Some ranks' tensors begin at no multiple of 16 bytes.
    starts = [(r * salt) % 3 for r in range(team.size)]
    outs = [b[s : s + count] for b, s in zip(buffers, starts, strict=True)]
    team.allreduce(outs, inps, op, shape)
    what = f"{op} of {count} {dtype} on {team.size} ranks, {shape}"
    expected = collectives.reduced(inps, op)
    for out, inp, was, buffer, start in zip(outs, inps, kept, buffers, starts, strict=True):
        collectives.same(out, expected, what, ulps=1.0 if dtype.itemsize == 2 else 4.0)
        assert torch.equal(out, outs[0]), f"{what}: ranks have different bits"
        assert torch.equal(inp, was), f"{what}: the input has changed"
        around = torch.cat([buffer[:start], buffer[start + count :]])
        assert (around == 77).all(), f"{what}: something was written beside the output"


def shapes(count: int, dtype: torch.dtype) -> list[Shape]:
    vectors = -(-count * dtype.itemsize // 16)
    blocks = sorted({1, min(3, vectors), min(MAX_BLOCKS, -(-vectors // 32))})
    return [Shape(way, b, 32) for way in ways(dtype) for b in blocks]


@pytest.mark.parametrize(
    ("size", "dtype"), [*((3, d) for d in DTYPES), (2, torch.bfloat16), (4, torch.int32)]
)
def test_every_way_reduces_any_number_of_elements(
    seeded: int, size: int, dtype: torch.dtype
) -> None:
    team = Team(size)
    ops = reductions(dtype)
    done = 0
    for count in (1, 8, 33, 250):
        for shape in shapes(count, dtype):
            check(team, dtype, random.choice(ops), count, shape)
            done += 1
    for op in ops:
        check(team, dtype, op, 100)
        done += 1
    assert team.epochs() == {done}, "the counters of all blocks advance by one with each kernel"


def test_eight_ranks(seeded: int) -> None:
    team = Team(8)
    for way in Way:
        check(team, torch.bfloat16, "SUM", 100, Shape(way, 1, 32))


@pytest.mark.parametrize(
    ("nbytes", "way"),
    [(1 << 16, Way.PACKETS), (1 << 18, Way.ONE_SHOT), (1 << 21, Way.TWO_SHOTS)],
)
def test_the_shapes_that_are_chosen(seeded: int, nbytes: int, way: Way) -> None:
    """Integers use flags, because none of their values can mean "not here yet"."""
    in_words = {Way.TWO_SHOTS: Way.TWO_OF_WORDS}.get(way, Way.ONE_OF_WORDS)
    team = Team(4)
    for dtype, expected in ((torch.int32, way), (torch.bfloat16, in_words)):
        shape = shape_of(nbytes, 4, dtype)
        assert shape is not None and shape.way is expected
        check(team, dtype, "SUM", nbytes // dtype.itemsize)
        check(team, dtype, "SUM", nbytes // dtype.itemsize - 3)


@pytest.mark.parametrize("size", [2, 3])
def test_kernels_that_follow_one_another(seeded: int, size: int) -> None:
    """Ranks may be one kernel apart; data of one kernel is never taken for another's."""
    team, chance = Team(size), random.Random(seeded)
    plan: list[tuple[int, Shape]] = []
    for _ in range(200):
        count = chance.choice((1, 5, 64, 300))
        plan.append((count, chance.choice(shapes(count, torch.float32))))
    inps = [
        [collectives.values(r, c, torch.float32, k) for k, (c, _) in enumerate(plan)]
        for r in range(size)
    ]
    outs = [[torch.zeros(c) for c, _ in plan] for _ in range(size)]
    functions = kernels(size, torch.float32)

    def run(me: int) -> None:
        for k, (count, shape) in enumerate(plan):
            tensors = (outs[me][k], inps[me][k], *team.areas, team.areas[me], team.reports[me])
            functions["SUM", shape.way].launch(
                (*tensors, me, count, LIMIT_NS, 0),
                grid=(shape.blocks, 1, 1),
                block=(shape.threads, 1, 1),
            )

    threads = [threading.Thread(target=run, args=(r,)) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in range(len(plan)):
        expected = collectives.reduced([inps[r][k] for r in range(size)], "SUM")
        for r in range(size):
            collectives.same(outs[r][k], expected, f"kernel {k}, {plan[k]}")


@pytest.mark.parametrize("way", Way)
def test_in_place(seeded: int, way: Way) -> None:
    team = Team(3)
    inps = [collectives.values(r, 1000, torch.float32) for r in range(3)]
    expected = collectives.reduced(inps, "SUM")
    team.allreduce(inps, inps, "SUM", Shape(way, 3, 32))
    for found in inps:
        collectives.same(found, expected, f"in place, {way!r}")


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.is_floating_point], ids=str)
@pytest.mark.parametrize("op", ["MIN", "MAX"])
def test_nan_is_kept(dtype: torch.dtype, op: RedOp) -> None:
    special = torch.tensor(collectives.SPECIAL, dtype=dtype)
    inps = [special.roll(3 * r).repeat(3) for r in range(3)]
    outs = [torch.zeros_like(x) for x in inps]
    Team(3).allreduce(outs, inps, op)
    expected = inps[0]
    for x in inps[1:]:
        expected = (torch.minimum if op == "MIN" else torch.maximum)(expected, x)
    for out in outs:
        assert torch.equal(out.nan_to_num(6e4), expected.nan_to_num(6e4))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("way", [Way.ONE_OF_WORDS, Way.TWO_OF_WORDS])
def test_no_bits_of_a_float_are_taken_for_what_has_not_come(way: Way, dtype: torch.dtype) -> None:
    """Any float can be sent, also the NaN whose bits mark missing data; ranks get equal bits."""
    team = Team(3)
    for bits in (-1, 0, 0x0000FFFF, -65536):
        inps = [torch.full((70,), bits, dtype=torch.int32).view(dtype) for _ in range(3)]
        for mine in range(3):
            given = [x if r == mine else torch.ones_like(x) for r, x in enumerate(inps)]
            outs = [torch.zeros_like(x) for x in given]
            team.allreduce(outs, given, "SUM", Shape(way, 2, 32))
            expected = given[0].float() + given[1].float() + given[2].float()
            for out in outs:
                assert torch.equal(out.view(torch.int32), outs[0].view(torch.int32))
                found, right = (x.nan_to_num(7.0) for x in (out, expected.to(dtype)))
                collectives.same(found, right, f"{bits} from rank {mine}", ulps=1.0)


def test_an_int32_sum_wraps_around() -> None:
    inps = [torch.full((5,), 2**31 - 1, dtype=torch.int32) for _ in range(2)]
    outs = [torch.zeros_like(x) for x in inps]
    Team(2).allreduce(outs, inps, "SUM")
    assert all((out == -2).all() for out in outs)


@pytest.mark.parametrize("way", Way)
def test_who_does_not_come_is_reported(way: Way) -> None:
    """An absent rank is reported, and kernels launched afterwards end at once."""
    team = Team(3, limit_ns=5 * 10**8)
    inps = [torch.ones(100) for _ in range(3)]
    outs = [torch.zeros(100) for _ in range(3)]
    for _ in range(2):
        team.allreduce(outs, inps, "SUM", Shape(way, 1, 32), absent=[1])
        assert [r.tolist() for r in team.reports] == [
            [1, 1, 7, 1, 1],
            [0, 0, 0, 0, 1],
            [1, 1, 7, 1, 1],
        ]


def test_what_the_areas_have_room_for() -> None:
    """Every message that a team accepts fits; all sizes near the limits are tried."""
    for size in range(2, allreduce_model.MAX_RANKS + 1):
        layout = Layout.of(size)
        assert layout.flags_at >= 4 * (3 * MAX_BLOCKS + 1)
        assert layout.packets_at >= layout.flags_at + 2 * MAX_BLOCKS * size * 4
        assert layout.data_at >= layout.packets_at + 2 * size * layout.packets_nbytes
        assert layout.words_at >= layout.data_at + 2 * layout.data_nbytes
        assert layout.nbytes >= layout.words_at + 3 * layout.words_nbytes
        near = [1 << k for k in range(24)] + [MAX_NBYTES]
        near += [random.randrange(1, MAX_NBYTES) for _ in range(2000)]
        sizes = [m + d for m in near for d in (-1, 0, 1) if m + d <= MAX_NBYTES]
        for nbytes, dtype in itertools.product(sizes, (torch.int64, torch.bfloat16)):
            shape = shape_of(nbytes, size, dtype)
            assert (shape is None) == (nbytes == 0)
            if shape is None:
                continue
            vectors = -(-nbytes // 16)
            assert 1 <= shape.blocks <= MAX_BLOCKS
            if shape.way is Way.PACKETS:
                assert 32 * vectors <= layout.packets_nbytes
                continue
            is_words = shape.way in (Way.ONE_OF_WORDS, Way.TWO_OF_WORDS)
            room = layout.words_nbytes if is_words else layout.data_nbytes
            if shape.way in (Way.ONE_SHOT, Way.ONE_OF_WORDS):
                assert 16 * vectors * size <= room
            else:
                length = -(-vectors // size)
                assert 2 * size * length * 16 <= room
        assert shape_of(MAX_NBYTES + 1, size, torch.int64) is None
    assert shape_of(100, allreduce_model.MAX_RANKS + 1, torch.int64) is None


def test_all_kernels_compile_for_the_gpu() -> None:
    """All dtypes, reductions and algorithms for two ranks, and the largest ones for more
    ranks.
    """
    sources = [
        allreduce_source(2, dtype, op, way)
        for dtype in DTYPES
        for op in reductions(dtype)
        for way in (Way.PACKETS, Way.TWO_SHOTS)
    ]
    sources += [
        allreduce_source(size, torch.bfloat16, "SUM", way) for size in (4, 8) for way in Way
    ]
    assert all(compile_cubin(sources))


# The last epoch, and by which number it is followed.
LAST, FIRST = 0xFFFFFFFD, 2


def set_epoch(team: Team, epoch: int) -> None:
    """Sets the counter of kernels, so that the next kernel has the number after this one."""
    for area in team.areas:
        area[: 4 * MAX_BLOCKS].view(torch.int32).fill_(epoch - (epoch >> 31 << 32))


@pytest.mark.parametrize("way", WITH_FLAGS)
@pytest.mark.parametrize("epoch", [(1 << 31) + 5, LAST - 2, LAST - 1, LAST])
def test_what_was_never_written_has_not_come(epoch: int, way: Way) -> None:
    """Memory that was never written counts as missing, also after billions of kernels."""
    team = Team(2, limit_ns=10**8)
    set_epoch(team, epoch)
    inps, outs = ([make(100) for _ in range(2)] for make in (torch.ones, torch.zeros))
    team.allreduce(outs, inps, "SUM", Shape(way, 1, 32), absent=[1])
    number = FIRST if epoch == LAST else epoch + 1
    assert team.reports[0].tolist() == [1, 1, 7, number, 1]


@pytest.mark.parametrize("way", Way)
def test_the_numbers_of_kernels_begin_anew(seeded: int, way: Way) -> None:
    """After the kernel counter wraps around, old data with equal numbers is not taken for new
    data.
    """
    del seeded
    team = Team(3)
    set_epoch(team, LAST - 4)
    layout, size = team.layout, team.size
    for area in team.areas:
        area[layout.flags_at : layout.packets_at].view(torch.int32).fill_(FIRST + 1)
        packets = area[layout.packets_at : layout.data_at].view(torch.int64)
        half = size * layout.packets_nbytes // 8
        for k in (0, 1):  # halves of even and odd numbers
            packets[k * half : (k + 1) * half].fill_((FIRST + k) << 32)
    for _ in range(3):
        check(team, torch.float32, "SUM", 300, Shape(way, 2, 32))
    assert team.epochs() == {LAST - (1 << 32) - 1}
    check(team, torch.float32, "SUM", 300, Shape(way, 2, 32))
    for area in team.areas:
        flags = area[layout.flags_at : layout.packets_at].view(torch.int32)
        marks = area[layout.packets_at : layout.data_at].view(torch.int64) >> 32
        assert not (flags == FIRST + 1).any()
        assert not ((marks == FIRST) | (marks == FIRST + 1)).any()
    for _ in range(4):
        check(team, torch.float32, "SUM", 300, Shape(way, 2, 32))
    assert team.epochs() == {FIRST + 3}
