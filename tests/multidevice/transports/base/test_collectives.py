"""Tests of each row in the table of collectives: in programs, on simulated ranks and in jobs."""

from __future__ import annotations

import pytest
import torch

import multidevice
from fuser.ir.domain.device_mesh import DeviceMesh
from fuser.ir.types import ParallelType
from fuser.support.errors import UnsupportedError
from hostir import (
    Allocate,
    Communication,
    HostIrContainer,
    HostIrEvaluator,
    TeamOf,
    Wait,
    equal,
    parse,
    verify,
)
from hostir.analysis.collective_matching import find_mismatches
from hostir.cost.machine_model import Machine
from hostir.cost.report import predict
from hostir.cost.simulator import simulated_schedule
from hostir.cost.traffic import traffic_of
from hostir.ir.buffer_aliasing import buffer_sharing_of
from multidevice import Communicator
from multidevice.transports.base.collectives import (
    ALLREDUCE,
    BROADCAST,
    COLLECTIVES,
    Collective,
    TransportTable,
)
from multidevice.transports.base.p2p_collectives import _STEPS
from multidevice.transports.simulated import _MOVES
from tests.support import mpi_abort
from tests.support.collective_meanings import MEANINGS
from tests.support.jobs import needs_mpi, run_job
from tests.support.rank_programs import collectives

CPU = torch.device("cpu")
PART, ROOT = 6, 1
# A job whose ranks wait for each other ends by the error that names the collective, not by HANG_S.
WAIT_S = "60"
alone = pytest.mark.skipif(mpi_abort.world_size() > 1, reason="starts jobs of its own")


def program_of(row: Collective, members: int, *, surplus: int = 0) -> HostIrContainer:
    """Returns a program of one collective on replicated tensors.

    The result has `surplus` elements too many.
    """
    mesh, program = DeviceMesh(range(members)), HostIrContainer()
    team = TeamOf(mesh, (ParallelType.mesh_x,))
    with program:
        x = program.input([row.inp.parts(members) * PART], mesh=mesh)
        y = program.tensor([1, row.out.parts(members) * PART + surplus], mesh=mesh)
        move = Communication(
            x,
            y,
            number=0,
            type=row.name,
            team=team,
            root=ROOT if row.is_rooted else None,  # pyright: ignore[reportArgumentType]
        )
        program.append(Allocate(y, zero_init=True), move, Wait(0))
        program.add_output(y)
    return program


def operands(row: Collective, members: int) -> list[torch.Tensor]:
    count = row.inp.parts(members) * PART
    return [torch.arange(count, dtype=torch.float32) * (r + 1) - 3 * r for r in range(members)]


def test_every_collective_has_a_meaning() -> None:
    tables = {
        "MEANINGS (tests/support/collective_meanings.py)": MEANINGS,
        "_STEPS (multidevice/transports/base/p2p_collectives.py)": {row.name for row in _STEPS},
        "_MOVES (multidevice/transports/simulated.py)": {row.name for row in _MOVES},
    }
    for table, names in tables.items():
        for name in COLLECTIVES:
            assert name in names, f"{name} has no entry in {table}"
    assert MEANINGS.keys() == COLLECTIVES.keys()
    assert len({row.method for row in COLLECTIVES.values()}) == len(COLLECTIVES)
    assert [row.name for row in COLLECTIVES.values()] == [*COLLECTIVES]


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_row_reduces_the_members_that_its_meaning_reduces(name: str) -> None:
    row, members = COLLECTIVES[name], 3
    for member, needed in enumerate(members_in_results(row, members)):
        for senders in needed:
            wanted = {
                "all": set(range(members)),
                "prefix": set(range(member + 1)),
                # A copy: each element comes from one member.
                None: {min(senders, default=-1)},
            }[row.reduces]
            assert senders == wanted, (
                f"{name}: an element of the result of member {member} depends on members "
                f"{senders} in MEANINGS, on {wanted} by `reduces={row.reduces!r}` of its row"
            )


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_collective_does_what_it_means_on_simulated_ranks(size: int) -> None:
    def body() -> None:
        comm = Communicator.instance()
        world = tuple(range(size))
        for backend in (comm.backend_for(CPU), comm.peers_for(CPU)):
            for team in (world, world[::-1]):
                collectives.check_rows(backend, comm.rank(), team, CPU)

    with multidevice.simulate(size) as world:
        world.run(body)


@alone
@needs_mpi
def test_every_collective_does_what_it_means_under_mpirun() -> None:
    job = run_job("mpirun", 3, "collectives.py", "cpu", "rows", FUSER_TIMEOUT_S=WAIT_S)
    assert job.code == 0, job.text
    assert job.text.count("ok rank") == 3, job.text


@alone
def test_every_collective_does_what_it_means_under_torchrun_or_is_refused() -> None:
    job = run_job("torchrun", 2, "collectives.py", "cpu", "rows", FUSER_TIMEOUT_S=WAIT_S)
    assert job.code == 0, job.text
    assert job.text.count("ok rank") == 2, job.text


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_program_is_read_back_verified_and_matched(name: str) -> None:
    row, values = COLLECTIVES[name], {}
    program = program_of(row, 3)
    verify(program)
    again = parse(program.full_text())
    assert equal(again, program) and f"(type={name}, team=(0 1 2)" in str(again)
    assert find_mismatches(program, values) == []
    (wrong,) = find_mismatches(program_of(row, 3, surplus=1), values)
    assert wrong.kind == "sizes do not fit"
    move = next(op for op in program.ops if isinstance(op, Communication))
    # The sides of a collective decide how they can lie in one buffer; a row may refuse that.
    possible = "slot" if row.growth else "never" if row.inp.per_member else "same"
    assert buffer_sharing_of(move) in (possible, "never")


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_program_runs_as_its_collective_means(name: str) -> None:
    row = COLLECTIVES[name]
    given = operands(row, 3)
    wanted = MEANINGS[name].results(given, ROOT)

    def body() -> list[torch.Tensor]:
        comm = Communicator.instance()
        evaluator = HostIrEvaluator(program_of(row, 3), comm)
        mine = [given[comm.rank()]]
        return [evaluator.evaluate(mine)[0], *(evaluator.run(mine)[0].clone() for _ in range(3))]

    with multidevice.simulate(3) as world:
        for result, found in zip(wanted, world.run(body), strict=True):
            for out in found:
                # A member without a result keeps the zeros of its buffer.
                kept = torch.zeros_like(out).view(-1)
                assert torch.equal(out.view(-1), kept if result is None else result)


def members_in_results(row: Collective, members: int) -> list[list[set[int]]]:
    """Returns the members whose operands each element of a result depends on, by member."""
    found: list[list[set[int]]] = [[] for _ in range(members)]
    for sender in range(members):
        given = [torch.zeros(row.inp.parts(members) * PART) for _ in range(members)]
        given[sender].fill_(1.0)
        for member, result in enumerate(MEANINGS[row.name].results(given, ROOT)):
            if result is not None:
                found[member] = found[member] or [set() for _ in result]
                for place in result.nonzero():
                    found[member][int(place)].add(sender)
    return found


def elements_from(row: Collective, sender: int, members: int) -> int:
    """Returns how many elements of the other members' results depend on one member's operand."""
    given = [torch.zeros(row.inp.parts(members) * PART) for _ in range(members)]
    given[sender].fill_(1.0)
    results = MEANINGS[row.name].results(given, ROOT)
    others = (x for member, x in enumerate(results) if member != sender and x is not None)
    return sum(int(x.count_nonzero()) for x in others)


@pytest.mark.parametrize("members", [2, 5])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_program_has_a_predicted_time_and_traffic(name: str, members: int) -> None:
    row = COLLECTIVES[name]
    program = program_of(row, members)
    made = simulated_schedule(program, {}, Machine())
    assert predict(program, made).seconds > 0
    traffic = traffic_of(made.unrolled)
    elements = sum(elements_from(row, sender, members) for sender in range(members))
    # Members of an allreduce add up one part each, which the others then get.
    needed = elements * (2 / members if row is ALLREDUCE else 1) * 4
    assert traffic.pairs is not None
    for total in (traffic.sent.sum(), traffic.received.sum(), traffic.pairs.sum()):
        assert float(total) == pytest.approx(needed), (
            f"{name}: `block` of its row gives {float(total):g} bytes between {members} members, "
            f"its meaning needs {needed:g}"
        )
    # A library cuts what all get, or the root gets, into pieces and passes them on.
    larger = max(row.inp.parts(members), row.out.parts(members)) * PART * 4
    busiest = max(traffic.sent.max(), traffic.received.max()) / larger
    if row.reduces != "prefix":
        bus = busiest if row is ALLREDUCE else min(busiest, 1.0)
        assert row.bus(members) == pytest.approx(bus), (
            f"{name}: `bus` of its row is {row.bus(members):g} for {members} members, its meaning "
            f"needs {bus:g}"
        )


def test_a_transport_without_a_collective_names_those_that_it_has() -> None:
    rows = {row: row.method for row in COLLECTIVES.values() if row is not BROADCAST}
    table = TransportTable("backend x", rows)
    assert all(table[row] == row.method for row in rows)
    words = r"broadcast: backend x cannot .*: compose it of .* \(allgather, allreduce, "
    with pytest.raises(UnsupportedError, match=words):
        table[BROADCAST]
