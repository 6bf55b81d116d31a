"""An invalid input on one rank is an error on all ranks before any launch; later calls work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fuser import DataType, FusionDefinition, ParallelType
from fuser.multidevice import Communicator, DeviceMesh
from fuser.support.errors import (
    InputError,
    OptionError,
    PeerError,
    ProgramMismatchError,
    ShardingError,
)
from hostir.runtime.plan import Plan
from multidevice import simulate

Inputs = list[object]


def row_parallel(scale: float = 1.0, ranks: int = 2) -> FusionDefinition:
    """A program with one allreduce: a linear of x [t, k] and w [n, k], both cut along k."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        w = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.mul(fd.ops.linear(x, w), scale))
        for tv in (x, w):
            tv.set_device_mesh(DeviceMesh(range(ranks)))
            tv.outer_split(1, ranks)
            tv.axis(1).parallelize(ParallelType.mesh_x)
    return fd


def gathered() -> FusionDefinition:
    """A program with one allgather: x [i0, i1] is cut by rows, its copy is replicated."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        y = fd.ops.set(x)
        fd.add_output(y)
        for tv in (x, y):
            tv.set_device_mesh(DeviceMesh([0, 1]))
        x.outer_split(0, 2)
        x.axis(0).parallelize(ParallelType.mesh_x)
    return fd


def good_inputs() -> Inputs:
    return [torch.ones(3, 4), torch.ones(5, 4)]


def works() -> bool:
    """Returns whether the next valid call runs and gives the right result."""
    (out,) = row_parallel().execute(good_inputs())
    return torch.equal(out, torch.full((3, 5), 4.0 * 2))


def interrupted(inputs: Inputs) -> Iterator[object]:
    """Yields one input and then raises, as an iterator of a user may."""
    yield inputs[0]
    raise KeyError("planted")


def no_sequence(inputs: Inputs) -> Any:
    return len(inputs)


def out_of_memory(inputs: Inputs) -> Iterator[object]:
    yield inputs[0]
    raise MemoryError("planted")


BAD: dict[str, tuple[Callable[[Inputs], Iterable[object]], type[Exception]]] = {
    "rank": (lambda i: [torch.ones(4), i[1]], InputError),
    "dtype": (lambda i: [torch.ones(3, 4).double(), i[1]], InputError),
    "count": (lambda i: i[:1], InputError),
    "device": (lambda i: [torch.ones(3, 4, device="meta"), i[1]], InputError),
    "extent": (lambda i: [torch.ones(3, 5), i[1]], InputError),
    "scalar": (lambda i: [2.0, i[1]], InputError),
    "none": (lambda i: [None, i[1]], InputError),
    "string": (lambda i: ["x", i[1]], InputError),
    "complex": (lambda i: [1j, i[1]], InputError),
    "no sequence": (no_sequence, InputError),
    "key error": (interrupted, KeyError),
    "memory error": (out_of_memory, MemoryError),
}


def caught(act: Callable[[], object]) -> Exception | None:
    try:
        act()
    except Exception as error:
        return error
    return None


def check_bad_input(kind: str, bad_rank: int) -> None:
    spoil, expected = BAD[kind]
    rank = Communicator.instance().rank()
    fd = row_parallel()
    for _ in range(2):
        inputs = spoil(good_inputs()) if rank == bad_rank else good_inputs()
        error = caught(lambda: fd.execute(inputs))  # noqa: B023
        if rank == bad_rank or isinstance(error, InputError):
            # Ranks that pass shards of unequal extents may all raise the same error.
            assert rank == bad_rank or kind == "extent"
            assert type(error) is expected, error
        else:
            assert isinstance(error, PeerError), error
            assert f"rank {bad_rank}" in str(error) and expected.__name__ in str(error)
    (out,) = fd.execute(good_inputs())
    assert torch.equal(out, torch.full((3, 5), 8.0))
    assert works()


def check_bad_input_on_every_rank() -> None:
    error = caught(lambda: row_parallel().execute([torch.ones(4), torch.ones(5, 4)]))
    assert isinstance(error, InputError)
    assert works()


def check_steady_state() -> None:
    """A wrong input after calls that succeeded."""
    rank = Communicator.instance().rank()
    fd = row_parallel()
    for _ in range(3):
        fd.execute(good_inputs())
    inputs = good_inputs() if rank == 0 else [torch.ones(3, 9), torch.ones(5, 4)]
    error = caught(lambda: fd.execute(inputs))
    assert isinstance(error, InputError) and "4 on rank 0, 9 on rank 1" in str(error)
    assert works()


def check_program_mismatch() -> None:
    rank = Communicator.instance().rank()
    error = caught(lambda: row_parallel(scale=1.0 + rank).execute(good_inputs()))
    assert isinstance(error, ProgramMismatchError), error
    assert "double(1)" in str(error) and "double(2)" in str(error)
    assert str(error).count("(user code at ") == 2, error
    assert str(error).count("(user code at " + __file__) == 2, error
    assert works()


def check_other_ops() -> None:
    """One op differs between the ranks: the error shows the line of each rank's op."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        if Communicator.instance().rank() == 0:
            fd.add_output(fd.ops.sum(x, [1]))  # the op of rank 0
        else:
            fd.add_output(fd.ops.max(x, [1]))  # the op of rank 1
        x.set_device_mesh(DeviceMesh([0, 1]))
        x.outer_split(1, 2)
        x.axis(1).parallelize(ParallelType.mesh_x)
    error = caught(lambda: fd.execute([torch.ones(3, 4)]))
    assert isinstance(error, ProgramMismatchError), error
    lines = Path(__file__).read_text().splitlines()
    for rank in (0, 1):
        (line,) = (n for n, s in enumerate(lines, 1) if s.endswith(f"# the op of rank {rank}"))
        assert f"(user code at {__file__}:{line})" in str(error), error
    assert works()


def check_mesh_and_extents() -> None:
    error = caught(lambda: row_parallel(ranks=3).execute(good_inputs()))
    assert isinstance(error, ShardingError) and "rank 2" in str(error)
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        y = fd.ops.neg(x)
        fd.add_output(y)
        for tv in (x, y):
            tv.set_device_mesh(DeviceMesh([0, 1]))
        y.outer_split(0, 2)
        y.axis(0).parallelize(ParallelType.mesh_x)
    (out,) = fd.execute([torch.ones(3, 4)])
    rows = 2 - Communicator.instance().rank()
    assert torch.equal(out, -torch.ones(rows, 4))
    error = caught(lambda: fd.execute([torch.ones(1, 4)]))
    assert isinstance(error, ShardingError), error
    assert "one element" in str(error) and "DeviceMesh{0 1}" in str(error)
    (out,) = fd.execute([torch.ones(4, 4)])
    assert torch.equal(out, -torch.ones(2, 4))
    assert works()


def check_extents() -> None:
    """The ranks pass different numbers of rows, in first and later calls, before each
    collective.
    """
    rank = Communicator.instance().rank()
    fd = row_parallel()
    for _ in range(2):
        error = caught(lambda: fd.execute([torch.ones(3 + rank, 4), torch.ones(5, 4)]))
        assert isinstance(error, InputError), error
        assert "input 0, T0" in str(error) and "test_agreement_bad_inputs.py:" in str(error), error
        assert "extent 3 on ranks (0) and 4 on ranks (1) on axis 0" in str(error), error
        (out,) = fd.execute(good_inputs())
        assert torch.equal(out, torch.full((3, 5), 8.0))
    gather = gathered()
    error = caught(lambda: gather.execute([torch.ones(3 + rank, 2)]))
    assert isinstance(error, InputError) and "3 on rank 0, 4 on rank 1" in str(error)
    (out,) = gather.execute([torch.ones(4 - rank, 2)])
    assert torch.equal(out, torch.ones(7, 2))
    (out,) = gather.execute([torch.full((3, 2), float(rank))])
    assert torch.equal(out, torch.tensor([0.0, 1.0]).repeat_interleave(3)[:, None].expand(6, 2))


def check_numbers() -> None:
    """All ranks must pass the same floating-point input; it may change from call to call."""
    rank = Communicator.instance().rank()
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        scale = fd.define_scalar(None, DataType.Double)
        y = fd.ops.mul(x, scale)
        fd.add_output(y)
        for tv in (x, y):
            tv.set_device_mesh(DeviceMesh([0, 1]))
        x.outer_split(0, 2)
        x.axis(0).parallelize(ParallelType.mesh_x)
    for value in (2.0, 3.0, float("nan"), 0.0):
        (out,) = fd.execute([torch.ones(2), value])
        torch.testing.assert_close(out, torch.full((4,), value), equal_nan=True)
    error = caught(lambda: fd.execute([torch.ones(2), 1.0 + rank]))
    assert isinstance(error, InputError) and "1.0 on ranks (0) and 2.0 on ranks (1)" in str(error)
    (out,) = fd.execute([torch.ones(2), 4.0])
    assert torch.equal(out, torch.full((4,), 4.0))


def check_local_layouts() -> None:
    """Shards may have different strides on different ranks."""
    rank = Communicator.instance().rank()
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=False)
        w = fd.define_tensor([-1, -1], contiguity=False)
        fd.add_output(fd.ops.linear(fd.ops.mul(x, 2.0), w))
        for tv in (x, w):
            tv.set_device_mesh(DeviceMesh([0, 1]))
            tv.outer_split(1, 2)
            tv.axis(1).parallelize(ParallelType.mesh_x)
    wide = torch.arange(24.0).view(3, 8)
    for _ in range(2):
        mine = wide[:, ::2] if rank == 1 else torch.ones(3, 4)
        (out,) = fd.execute([mine, torch.ones(5, 4)])
        expected = 2 * (wide[:, ::2].sum(1) + 4)
        assert torch.equal(out, expected[:, None].expand(3, 5)), out


def check_options() -> None:
    rank = Communicator.instance().rank()
    options = ["nonsense"] if rank == 1 else []
    fd = row_parallel()
    error = caught(lambda: fd.execute(good_inputs(), _enable_options=options))
    assert isinstance(error, OptionError if rank == 1 else PeerError), error
    assert works()


CHECKS: dict[str, Callable[[], None]] = {
    **{
        f"{kind} on rank {rank}": (lambda kind=kind, rank=rank: check_bad_input(kind, rank))
        for kind in BAD
        for rank in (0, 1)
    },
    "every rank": check_bad_input_on_every_rank,
    "steady state": check_steady_state,
    "program mismatch": check_program_mismatch,
    "other ops": check_other_ops,
    "mesh and extents": check_mesh_and_extents,
    "extents": check_extents,
    "numbers": check_numbers,
    "local layouts": check_local_layouts,
    "options": check_options,
}


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.finding("F22")
@pytest.mark.finding("F32")
def test_on_simulated_ranks(name: str) -> None:
    with simulate(2) as world:
        world.run(CHECKS[name])


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.finding("F22")
@pytest.mark.finding("F32")
def test_under_mpirun(name: str, comm: Communicator) -> None:
    if comm.size() != 2:
        pytest.skip("for 2 ranks")
    CHECKS[name]()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("failing", [0, 1])
def test_a_run_that_fails_on_one_rank_is_one_error_on_each(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """After one failed run, each call is paired with the same call of the other ranks."""
    size, rank, run = comm.size(), comm.rank(), Plan.run
    fd, weights = row_parallel(ranks=size), torch.ones(5, 4)

    def call(value: int) -> float:
        (out,) = fd.execute([torch.full((3, 4), float(value)), weights])
        return out[0, 0].item()

    for value in range(4):
        assert call(value) == 4 * size * value
    left = [1]

    def fails_once(plan: Plan, inputs: Sequence[Any]) -> list[torch.Tensor]:
        if rank == failing and left:
            left.clear()
            raise torch.OutOfMemoryError("no memory on this rank")
        return run(plan, inputs)

    monkeypatch.setattr(Plan, "run", fails_once)
    with pytest.raises(RuntimeError, match="no memory" if rank == failing else "deadlock"):
        call(10)
    for value in range(11, 15):
        assert call(value) == 4 * size * value
