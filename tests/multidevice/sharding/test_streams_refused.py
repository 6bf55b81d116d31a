"""Error messages for stream axes that an op cannot be computed along."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from fuser import ops
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.types import ParallelType
from fuser.support.errors import UnsupportedError
from multidevice.sharding.passes.pipeline import shard_fusion
from tests.support import sharded_fusions as models
from tests.support.rank_by_rank import mesh

BLOCKS = "a block of the result is not made from blocks of the operands"


def refusal(build: Callable[[TensorView], object], shape: list[int], axis: int, count: int) -> str:
    """Returns the error for a result whose `axis` is a stream of `count` blocks."""
    fusion = Fusion()
    with FusionGuard(fusion):
        out = models.tensor(build(models.inputs({"x": shape})["x"]))
        fusion.add_output(out)
    out.outer_split(axis, count)
    out.axis(axis).parallelize(ParallelType.stream)
    with pytest.raises(UnsupportedError) as refused:
        shard_fusion(fusion)
    return str(refused.value)


@pytest.mark.parametrize(
    ("build", "name", "axis"),
    [
        (lambda x: ops.pad(x, [0, 0, 1, 0]), "pad", 0),
        (lambda x: ops.cat([x, x], 0), "cat", 0),
        (lambda x: ops.reshape(x, [2, 3, 4]), "reshape", 1),
        (lambda x: ops.iota(6, dtype=DataType.Int), "iota", 0),
    ],
)
def test_what_cannot_be_computed_in_steps_is_refused(
    build: Callable[[TensorView], object], name: str, axis: int
) -> None:
    words = rf"{name}.* cannot be computed in steps along the part on stream of axis .*: {BLOCKS}"
    assert re.match(words, refusal(build, [6, 4], axis, 3))


@pytest.mark.parametrize(
    ("shape", "result", "count"),
    [([2, 8], [2, 2, 4], 4), ([4, 12], [4, 3, 4], 2), ([2, 12], [2, 2, 6], 4)],
)
def test_blocks_of_a_reshape_that_its_operand_does_not_have_are_refused(
    shape: list[int], result: list[int], count: int
) -> None:
    said = refusal(lambda x: ops.reshape(ops.sin(x), result), shape, 1, count)
    assert re.match(
        r"reshape.* cannot be computed in steps along the part on stream of axis ", said
    )


def test_results_that_share_steps_are_named() -> None:
    """The op has a second result, whose annotation by the user has no stream axis."""

    def variance(x: TensorView) -> TensorView:
        mean, squares, _ = ops.welford(x, [1])
        mean.set_device_mesh(mesh(2))
        return squares

    said = refusal(variance, [6, 4], 0, 3)
    assert re.match(
        r"welford cannot be computed in steps.*: the same op makes .*T1_.*has no such axis",
        said,
    )
