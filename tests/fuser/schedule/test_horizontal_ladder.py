"""Tests the ladder of parameters after a failed lowering, and the plain scheduler at its end."""

from __future__ import annotations

import pytest
import torch

from fuser import FusionDefinition, ParallelType, multidevice, ops
from fuser.ir.dtypes import DataType as D
from fuser.ir.fusion import TensorView
from fuser.schedule import SCHEDULERS, find_scheduler, rejections, scheduler
from fuser.schedule.horizontal import rungs
from fuser.schedule.input_facts import Facts
from fuser.schedule.plain import PlainParams
from fuser.schedule.pointwise import PointwiseParams
from fuser.schedule.reduction import ReductionParams
from fuser.support.device import CPU, H200
from fuser.support.errors import UnsupportedError
from multidevice.job.communicator import Communicator
from tests.support.small_fusions import define, make_executor, random, run


def outer(x: TensorView) -> TensorView:
    return ops.mul(ops.broadcast(x, [False, True]), ops.broadcast(x, [True, False]))


def test_rungs_narrow_then_inline_then_rely_on_nothing() -> None:
    chosen = PointwiseParams(threads_x=32, threads_y=4, vector=8, unroll=2)
    generic = PointwiseParams(threads_x=128)
    found = [(p.threads_x, p.vector, p.unroll) for p in rungs(chosen, generic)]
    assert found == [(32, 8, 2), (32, 4, 2), (32, 2, 2), (32, 1, 2), (32, 1, 1), (128, 1, 1)]


def test_rungs_are_tried_once() -> None:
    assert rungs(PlainParams(128), PlainParams(128)) == (PlainParams(128),)
    loops = ReductionParams(inner=False)
    assert rungs(loops, ReductionParams(inner=True)) == (loops, ReductionParams(inner=True))


def test_a_schedule_by_hand_has_one_rung() -> None:
    user = scheduler("user")
    with pytest.raises(UnsupportedError, match="manual schedule"):
        user.generic(H200)
    params = user.heuristics(define(ops.neg, [4]), Facts({}), CPU)
    assert user.ladder(params, CPU) == (params,)


def test_chosen_parameters_stay_where_they_can_be_lowered() -> None:
    fusion = define(lambda x: ops.sin(x), [64, 64])
    executor = make_executor(fusion, "h200")
    run(executor, [random((64, 64), torch.float32)], [(64, 64)])
    (variant,) = executor.variants
    assert isinstance(variant.params, PointwiseParams) and variant.params.vector == 4


def test_plain_takes_one_op_over_recomputed_ones() -> None:
    assert find_scheduler(define(outer, [None])) == "plain"
    assert find_scheduler(define(lambda x: ops.sum(outer(x), [1]), [None])) == "plain"
    twice = define(lambda x: ops.sum(ops.sum(outer(x), [1]), [0]), [None])
    assert find_scheduler(twice) is None
    assert set(rejections(twice)) == set(SCHEDULERS)


@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_plain_results_lie_as_their_memory(device: str) -> None:
    """Threads follow the memory order of the output, and each row gets a block."""
    x = random((300,), torch.float64)

    executor = make_executor(define(outer, [None], dtype=D.Double), device)
    (out,) = run(executor, [x], [(300, 300)])
    assert torch.equal(out, x[:, None] * x)
    reduced = make_executor(
        define(lambda t: ops.sum(outer(t), [1]), [None], dtype=D.Double), device
    )
    (out,) = run(reduced, [x], [(300,)])
    torch.testing.assert_close(out, x * x.sum())


def test_a_sharded_reduction_of_one_element_compiles() -> None:
    """Its accumulator is declared inside the loop that the compiler vectorises."""
    x = random((6, 2, 2), torch.float32)
    expected = x * torch.rsqrt((x.double() * x.double()).sum(2, keepdim=True) + 1)

    def rank() -> None:
        with FusionDefinition() as fd:
            t = fd.define_tensor([6, 2, 2], contiguity=True)
            total = fd.ops.sum(fd.ops.mul(t, t), dims=[2], keepdim=True)
            fd.add_output(fd.ops.mul(t, fd.ops.rsqrt(fd.ops.add(total, 1.0))))
            t.set_device_mesh(multidevice.DeviceMesh(range(2)))
            t.outer_split(2, 2)
            t.axis(2).parallelize(ParallelType.mesh_x)
        mine = slice(Communicator.instance().rank(), Communicator.instance().rank() + 1)
        (out,) = fd.execute([x[..., mine].contiguous()])
        torch.testing.assert_close(out, expected[..., mine].float())

    with multidevice.simulate(2) as world:
        world.run(rank)
