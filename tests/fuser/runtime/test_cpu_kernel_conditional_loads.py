"""Tests conditional loads in short loops, which GCC 12.2 miscompiles when it unrolls them."""

from __future__ import annotations

import pytest
import torch

from fuser import DataType, FusionDefinition


@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((1, 5, 3, 2, 2), (1, 0, 3, 2, 4)),
        ((1, 16, 4, 4), (0, 1, 3, 2)),
        ((1, 33, 5, 3), (0, 1, 3, 2)),
    ],
)
@pytest.mark.parametrize("on", [(), ("schedules_for(h200)",)])
def test_loads_keep_their_places_in_loops_over_another_order(
    shape: tuple[int, ...], order: tuple[int, ...], on: tuple[str, ...]
) -> None:
    places = [order.index(axis) for axis in range(len(order))]
    x = torch.randn([shape[axis] for axis in order]).permute(places)
    index = torch.zeros(shape, dtype=torch.int64)
    with FusionDefinition() as fd:
        t = fd.define_tensor(sizes=shape, strides=x.stride(), static_sizes=True)
        i = fd.define_tensor(shape, contiguity=True, dtype=DataType.Int)
        fd.add_output(fd.ops.add(fd.ops.gather(t, i, 0), 1.0))
    (out,) = fd.execute([x, index], _enable_options=list(on))
    assert torch.equal(out, x.gather(0, index) + 1.0)
