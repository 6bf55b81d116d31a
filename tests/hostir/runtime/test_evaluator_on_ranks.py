"""Tests host programs on the ranks of a real job (mpirun)."""

from __future__ import annotations

import pytest
import torch

from fuser.ir.fusion import TensorView
from fuser.support.errors import FuserError, InputError, PeerError
from hostir import HostIrEvaluator
from hostir.ir.parser import parse
from multidevice import Communicator
from multidevice.job.shard_tensor import shard_for_rank
from tests.support.host_programs import CASES, build, expected

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.mark.parametrize("name", ["mlp2", "mlp4", "sequence2", "slice2", "mesh2x2", "encoder2"])
def test_programs_equal_torch(name: str, comm: Communicator) -> None:
    """Also runs programs from their text; ranks outside the mesh do not take part."""
    case = CASES[name]
    if comm.size() < case.ranks:
        pytest.skip(f"needs {case.ranks} ranks")
    program = build(case)
    again = parse(program.full_text())
    wanted = expected(case)
    for one in (program, again):
        evaluator = HostIrEvaluator(one, comm)
        mine = _shards(name, comm.rank())
        for _ in range(2):
            outputs = evaluator.run(mine)
            for declared, got, want in zip(one.outputs, outputs, wanted, strict=True):
                _check_shard(declared, got, want, comm.rank())


def _shards(name: str, rank: int) -> list[torch.Tensor]:
    pairs = zip(CASES[name].inputs(), build(CASES[name]).inputs, strict=True)
    return [shard_for_rank(t, tv, rank) for t, tv in pairs if isinstance(tv, TensorView)]


def _check_shard(declared: TensorView, got: torch.Tensor, want: torch.Tensor, rank: int) -> None:
    assert declared.mesh is not None
    if not declared.mesh.has(rank):
        assert got.numel() == 0
        return
    mine = shard_for_rank(want, declared, rank)
    torch.testing.assert_close(got.double(), mine, atol=1e-5, rtol=1e-5)


def test_an_error_on_one_rank_reaches_the_others(comm: Communicator) -> None:
    if comm.rank() > 1:
        return
    evaluator = HostIrEvaluator(build(CASES["mlp2"]), comm)
    mine = _shards("mlp2", comm.rank())
    wrong = mine if comm.rank() == 0 else [mine[0].half(), *mine[1:]]
    with pytest.raises(FuserError) as error:
        evaluator.run(wrong)
    assert isinstance(error.value, PeerError if comm.rank() == 0 else InputError)
    evaluator.run(mine)
