"""Casts of constants round as often as the definition says."""

from __future__ import annotations

import pytest
import torch

from fuser import DataType, FusionDefinition
from fuser.ir.dtypes import to_torch

pytestmark = pytest.mark.from_text

CHAINS = [
    [DataType.Half, DataType.Int, DataType.Double],
    [DataType.BFloat16, DataType.Double],
    [DataType.Float, DataType.Int32, DataType.Float],
    [DataType.Double, DataType.Half, DataType.Float],
    [DataType.Float, DataType.Bool, DataType.Int],
]


@pytest.mark.parametrize("value", [1.25, -2.7, 0.1, 3.0, 6e4])
@pytest.mark.parametrize("chain", CHAINS, ids=lambda c: " ".join(d.name for d in c))
def test_a_constant_goes_through_every_dtype(value: float, chain: list[DataType]) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([3], contiguity=True, dtype=chain[-1])
        t = fd.ops.full([3], value, chain[0])
        for dtype in chain[1:]:
            t = fd.ops.cast(t, dtype)
        fd.add_output(fd.ops.where(fd.ops.eq(x, x), t, x))
    want = torch.full([3], value, dtype=to_torch(chain[0]))
    for dtype in chain[1:]:
        want = want.to(to_torch(dtype))
    (got,) = fd.execute([torch.ones(3, dtype=want.dtype)])
    assert torch.equal(got, want)


def test_the_variance_of_one_element_is_zero() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.var_mean(fd.ops.mul(x, -1.65), [0, 1], 0, True)[0])
    for _ in range(20):
        for options in ([], ["schedules_for(h200)"]):
            (got,) = fd.execute([torch.randn(1, 1)], _enable_options=options)
            assert got.item() == 0
