"""Runs every collective on every dtype and compares with plain torch, in a job or on simulated
ranks.

mpirun -np 4 python tests/support/rank_programs/collectives.py

The inputs of all ranks come from seeds, so each rank can compute its expected results.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from functools import partial
from functools import reduce as fold

import torch

from fuser.support.errors import (
    DtypeError,
    InputError,
    PeerError,
    ProgramMismatchError,
    ShardingError,
    UnsupportedError,
)
from multidevice.coordination.bounded_wait import Team
from multidevice.job.communicator import Communicator
from multidevice.transports.base.collectives import (
    ALLGATHER,
    BROADCAST,
    COLLECTIVES,
    REDUCE,
    Collective,
)
from multidevice.transports.base.protocol import Backend, Transfer, Work
from tests.support.collective_meanings import MEANINGS

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
# Elements of 8 bytes that are 1 MiB: libraries send smaller buffers before the receiver is ready.
LARGE = 2**17
# The backends that may lack a collective: their libraries have no call for it.
REFUSING = ("gloo", "nccl")
OPS = ("SUM", "PRODUCT", "MIN", "MAX", "AVG")
_FOLDS = {"SUM": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum}


def values(rank: int, count: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Returns the input of a rank: small multiples of 1/4, so that float64 sums are exact."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    whole = torch.randint(-7, 8, (count,), generator=generator)
    if dtype == torch.bool:
        return whole > 0
    if dtype.is_complex:
        real = dtype.to_real()
        return torch.complex(values(rank, count, real, salt), values(rank, count, real, salt + 7))
    if dtype.is_floating_point:
        # 1/256 steps: bfloat16 cannot hold most of the sums, so a double rounding would show.
        return (whole.double() + torch.rand(count, generator=generator).double()).to(dtype)
    return whole.to(dtype)


def reduced(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    """Returns the reduction in float64 (integers and bool exactly), rounded once to the dtype."""
    dtype = inputs[0].dtype
    if dtype == torch.bool:
        table = {
            "SUM": torch.logical_or,
            "MAX": torch.logical_or,
            "PRODUCT": torch.logical_and,
            "MIN": torch.logical_and,
        }
        return fold(table[op], inputs)
    if dtype.is_complex:
        wide = [x.to(torch.complex128) for x in inputs]
    else:
        wide = [x.double() if dtype.is_floating_point else x for x in inputs]
    if op == "AVG":
        return (fold(torch.add, wide) / len(wide)).to(dtype)
    return fold(_FOLDS[op], wide).to(dtype)


def same(found: torch.Tensor, expected: torch.Tensor, what: str, *, ulps: float = 4.0) -> None:
    """Checks equality; floating-point reductions may differ by a few rounding errors."""
    found = found.cpu()
    if found.is_complex():
        found, expected = torch.view_as_real(found), torch.view_as_real(expected)
    if found.dtype.is_floating_point:
        eps = torch.finfo(found.dtype).eps
        # Sums of float32 cancel; 16-bit floats are summed in float32 and rounded once.
        scale = expected.double().abs().clamp(min=1.0 if found.dtype.itemsize == 2 else 32.0)
        error = (
            ((found.double() - expected.double()).abs() / scale).max().item() if len(found) else 0
        )
        assert error <= ulps * eps, f"{what}: error {error} of {found.dtype}"
    else:
        assert torch.equal(found, expected), f"{what}: {found} != {expected}"


SPECIAL = (1.5, -2.0, math.inf, -math.inf, math.nan, -math.nan, 0.0, 3.0)


def check_special_values(
    backend: Backend, me: int, team: Team, dtype: torch.dtype, device: torch.device, what: str
) -> None:
    """Checks that MIN and MAX keep NaN and infinities from any rank of the team."""
    inputs = {
        rank: torch.tensor(
            [SPECIAL[(k + 3 * team.index(rank)) % len(SPECIAL)] for k in range(8 * len(team))],
            dtype=dtype,
        )
        for rank in team
    }
    for op in ("MIN", "MAX"):
        expected = fold(_FOLDS[op], [inputs[r] for r in team])
        out = torch.zeros_like(expected, device=device)
        backend.allreduce(out, inputs[me].to(device), op=op, team=team).wait()
        assert torch.equal(out.cpu().nan_to_num(6e4), expected.nan_to_num(6e4)), (op, what)
        part = torch.zeros(8, dtype=dtype, device=device)
        backend.reduce_scatter(part, inputs[me].to(device), op=op, team=team).wait()
        mine = expected[8 * team.index(me) : 8 * team.index(me) + 8]
        assert torch.equal(part.cpu().nan_to_num(6e4), mine.nan_to_num(6e4)), (op, what)


def check_dtype(
    backend: Backend, me: int, team: Team, dtype: torch.dtype, device: torch.device, count: int
) -> None:
    """Checks all collectives of one team and dtype, with `count` elements per part."""
    n, index = len(team), team.index(me)
    parts = {rank: values(rank, count, dtype) for rank in team}
    wholes = {rank: values(rank, count * n, dtype, salt=1) for rank in team}
    mine, whole = parts[me].to(device), wholes[me].to(device)
    what = f"{backend.name} rank {me} team {team} {dtype} count {count}"

    def empty(size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    out = empty(count * n)
    backend.allgather(out, mine, team=team).wait()
    same(out, torch.cat([parts[r] for r in team]), f"allgather {what}", ulps=0)
    out = empty(count * n)
    out[index * count : (index + 1) * count] = mine
    own = out[index * count : (index + 1) * count]
    backend.allgather(out, own, team=team).wait()
    same(out, torch.cat([parts[r] for r in team]), f"allgather in place {what}", ulps=0)

    out = empty(count * n)
    backend.alltoall(out, whole, team=team).wait()
    expected = torch.cat([wholes[r][index * count : (index + 1) * count] for r in team])
    same(out, expected, f"alltoall {what}", ulps=0)

    for op in OPS:
        if op == "AVG" and not (dtype.is_floating_point or dtype.is_complex):
            continue
        if op not in ("SUM", "AVG") and dtype.is_complex:
            expect(
                UnsupportedError,
                "a sum or an average",
                backend.allreduce,
                mine,
                mine,
                op=op,
                team=team,
            )
            continue
        # NCCL rounds 16-bit floats at every step.
        ulps = 4.0 * n if backend.name == "nccl" and dtype.itemsize == 2 else 4.0
        ulps = 1.0 if backend.name != "nccl" and dtype.itemsize == 2 else ulps
        expected = reduced([parts[r] for r in team], op)
        out = empty(count)
        backend.allreduce(out, mine, op=op, team=team).wait()
        same(out, expected, f"allreduce {op} {what}", ulps=ulps)
        same(mine, parts[me], f"allreduce {op} kept its input {what}", ulps=0)
        out = mine.clone()
        backend.allreduce(out, out, op=op, team=team).wait()
        same(out, expected, f"allreduce {op} in place {what}", ulps=ulps)
        out = empty(count)
        total = reduced([wholes[r] for r in team], op)
        backend.reduce_scatter(out, whole, op=op, team=team).wait()
        same(out, total[index * count : (index + 1) * count], f"reduce_scatter {what}", ulps=ulps)
        for root in (team[0], team[-1]):
            out = empty(count) if me == root else None
            backend.reduce(out, mine, op=op, root=root, team=team).wait()
            if out is not None:
                same(out, expected, f"reduce {op} {what}", ulps=ulps)

    if dtype.is_floating_point:
        check_special_values(backend, me, team, dtype, device, what)
    for root in (team[0], team[-1]):
        buf = mine.clone()
        backend.broadcast(buf, root=root, team=team).wait()
        same(buf, parts[root], f"broadcast {what}", ulps=0)
        out = empty(count * n) if me == root else None
        backend.gather(out, mine, root=root, team=team).wait()
        if out is not None:
            same(out, torch.cat([parts[r] for r in team]), f"gather {what}", ulps=0)
        out = empty(count)
        backend.scatter(out, whole if me == root else None, root=root, team=team).wait()
        same(out, wholes[root][index * count : (index + 1) * count], f"scatter {what}", ulps=0)

    if n > 1:
        right, left = team[(index + 1) % n], team[index - 1]
        out = empty(count)
        ring = [Transfer("send", mine, right), Transfer("recv", out, left)]
        backend.batch(ring, team=team).wait()
        same(out, parts[left], f"ring {what}", ulps=0)
        if index == 0:
            backend.send(mine, peer=team[1], team=team).wait()
        elif index == 1:
            out = empty(count)
            backend.recv(out, peer=team[0], team=team).wait()
            same(out, parts[team[0]], f"recv {what}", ulps=0)


def check_rows(backend: Backend, me: int, team: Team, device: torch.device) -> None:
    """Checks each collective of the table; a transport without it must refuse with a message."""
    n, index = len(team), team.index(me)
    for row in COLLECTIVES.values():
        meaning = MEANINGS[row.name]
        for root in {0, n - 1} if row.is_rooted else {None}:
            what = f"{row} from {root} on {backend.name} rank {me} team {team}"
            count = 3 * row.inp.parts(n)
            operands = [values(rank, count, torch.int64, salt=2) for rank in team]
            wanted = meaning.results(operands, root or 0)[index]
            inp = None if row.inp.at_root and index != root else operands[index].to(device)
            out = None if wanted is None else torch.zeros_like(wanted, device=device)
            at = None if root is None else team[root]
            start = partial(
                backend.collective, row, team=team, reduce="SUM" if row.reduces else None, root=at
            )
            may_refuse = backend.name in REFUSING and not meaning.is_everywhere
            try:
                start(out, inp).wait()
            except UnsupportedError as error:
                assert may_refuse, error
                assert f"{row.method}: backend " in str(error), error
                assert "cannot carry out this collective" in str(error), error
                continue
            if out is not None and wanted is not None:
                same(out, wanted, what, ulps=0)
            if row.sharing == "same":
                check_in_place(row, start, index, root, n, device, what)


def check_in_place(
    row: Collective,
    start: Callable[..., Work],
    index: int,
    root: int | None,
    members: int,
    device: torch.device,
    what: str,
) -> None:
    """Checks a collective whose result overwrites its operand, in a small and a large buffer."""
    for count in (3, LARGE):
        operands = [
            values(place, count * row.inp.parts(members), torch.int64, salt=3)
            for place in range(members)
        ]
        wanted = MEANINGS[row.name].results(operands, root or 0)[index]
        inp = None if row.inp.at_root and index != root else operands[index].to(device)
        out = None if wanted is None else torch.zeros_like(wanted, device=device)
        if inp is not None and out is not None:
            out = inp
        start(out, inp).wait()
        if out is not None and wanted is not None:
            # The text of a failure shows no million numbers.
            assert torch.equal(out.cpu(), wanted), f"{what}, in place, {count} elements"


def expect(kind: type[BaseException], text: str, fn: object, *args: object, **kw: object) -> None:
    """Checks that a call raises `kind` with `text` in its message."""
    try:
        fn(*args, **kw)  # type: ignore[operator]
    except kind as error:
        assert text in str(error), f"{text!r} not in {error}"
    else:
        raise AssertionError(f"{fn} did not raise {kind.__name__}")


def check_errors(comm: Communicator, backend: Backend, team: Team, device: torch.device) -> None:
    """Checks that each rank refuses bad arguments, and that later calls work after errors."""
    me, n = comm.rank(), comm.size()
    x = torch.zeros(n, n, device=device)
    expect(InputError, "must be contiguous", backend.allreduce, x, x.t(), op="SUM", team=team)
    expect(InputError, "do not match", backend.allgather, x, x, team=team)
    reduce, gather, send = (
        partial(backend.collective, row) for row in (REDUCE, ALLGATHER, BROADCAST)
    )
    expect(InputError, "the root; found None", reduce, x, x, team=team, reduce="SUM")
    expect(InputError, "pass a reduction, one of SUM", reduce, x, x, team=team, root=team[0])
    expect(InputError, "has no root, but found root 0", gather, x, x, team=team, root=0)
    expect(
        InputError,
        "reduces nothing, but found reduction SUM",
        gather,
        x,
        x[0],
        team=team,
        reduce="SUM",
    )
    expect(InputError, "reduces nothing", send, x, x, team=team, reduce="SUM", root=team[0])
    expect(InputError, "the root; found None", send, x, x, team=team)
    if me != team[0]:
        expect(InputError, "buf is missing", send, None, x, team=team, root=team[0])
    expect(ShardingError, "found 77", backend.broadcast, x, root=77, team=team)
    i = torch.zeros(4, dtype=torch.int32, device=device)
    expect(
        DtypeError,
        "the average of torch.int32 is not defined",
        backend.allreduce,
        i,
        i,
        op="AVG",
        team=team,
    )
    expect(ShardingError, "peer", backend.send, x, peer=me, team=team)
    others = tuple(r for r in team if r != me)
    expect(ShardingError, "not in the team", backend.barrier, team=others)

    bad = n - 1
    mine = ValueError("planted") if me == bad else None
    kind, text = (
        (ValueError, "planted") if me == bad else (PeerError, f"rank {bad} failed: ValueError")
    )
    expect(kind, text, comm.agree, mine)
    comm.agree(None, b"0123456789abcdef")
    expect(ProgramMismatchError, "different programs", comm.agree, None, b"a" if me else b"b")
    program = f"line one\nline two of {'zero' if me == 0 else 'others'}\nline three"
    expect(ProgramMismatchError, "differ at line 2", comm.compare_texts, program)
    expect(ProgramMismatchError, "ranks (0): line two of zero", comm.compare_texts, program)
    assert comm.exchange(bytes([me]) * (me + 1)) == [bytes([r]) * (r + 1) for r in range(n)]
    if n > 2 and me < 2:
        assert comm.exchange(b"%d" % me, team=(1, 0)) == [b"1", b"0"]
        comm.agree(None, team=(1, 0))
    out = torch.full((3,), float(me), device=device)
    backend.allreduce(out, out, op="SUM", team=team).wait()
    same(out, torch.full((3,), n * (n - 1) / 2), "allreduce after errors")


def check_all(device: torch.device, *, peers: bool = False) -> None:
    """Runs all checks on this rank's communicator, or on peer copies."""
    comm = Communicator.instance()
    backend = comm.peers_for(device) if peers else comm.backend_for(device)
    me, n = comm.rank(), comm.size()
    world = tuple(range(n))
    for dtype in DTYPES:
        for count in (1, 5):
            # Some backends have other collectives for the team of all ranks than for the rest.
            for team in (world, world[::-1]):
                check_dtype(backend, me, team, dtype, device, count)
    check_dtype(backend, me, world, torch.float32, device, 0)
    check_dtype(backend, me, world[::-1], torch.float32, device, 0)
    check_dtype(backend, me, (me,), torch.bfloat16, device, 3)
    if n == 4:
        rows: tuple[Team, ...] = ((0, 2), (3, 1))
        team = next(row for row in rows if me in row)
        check_dtype(backend, me, team, torch.float32, device, 7)
        check_dtype(backend, me, team, torch.bfloat16, device, 7)
        if me != 2:
            check_dtype(backend, me, (3, 0, 1), torch.int64, device, 2)
    check_dtype(backend, me, world, torch.float32, device, 40_000)
    check_dtype(backend, me, world[::-1], torch.float32, device, 40_001)
    for team in (world, world[::-1]):
        check_rows(backend, me, team, device)
    if n > 1:
        check_errors(comm, backend, world, device)
    backend.barrier(team=world)
    comm.barrier()


def main() -> None:
    """Runs the checks on this rank and prints a line that the test expects."""
    device = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cpu")
    peers = "peers" in sys.argv[2:]
    if "rows" in sys.argv[2:]:
        comm = Communicator.instance()
        for backend in (comm.backend_for(device), comm.peers_for(device)):
            check_rows(backend, comm.rank(), tuple(range(comm.size())), device)
        print(f"ok rank {comm.rank()}\n", end="", flush=True)
        return
    if device.type == "cuda":
        Communicator.instance()
        device = torch.device("cuda", torch.cuda.current_device())
    check_all(device, peers=peers)
    comm = Communicator.instance()
    assert not torch.distributed.is_initialized(), "the default process group is the user's"
    start = time.perf_counter()
    for _ in range(100):
        comm.agree(None, b"x")
    agree_us = (time.perf_counter() - start) * 1e4
    backend = comm.peers_for(device) if peers else comm.backend_for(device)
    x, world = torch.zeros(256, device=device), tuple(range(comm.size()))
    start = time.perf_counter()
    for _ in range(100):
        backend.allreduce(x, x, op="SUM", team=world).wait()
    us = (time.perf_counter() - start) * 1e4
    print(
        f"ok rank {comm.rank()} of {comm.size()} on {backend.name}: "
        f"agree {agree_us:.0f} us, allreduce of 1 KB {us:.0f} us\n",
        end="",
        flush=True,
    )


if __name__ == "__main__":
    main()
