"""Origins of communications: decomposition finds each change of placement once."""

from __future__ import annotations

import pytest

from fuser.passes.segment import segment_fusion
from fuser.schedule.registry import find_scheduler
from hostir.lowering.segments import lower
from multidevice.sharding.passes.localize import localize
from multidevice.sharding.passes.pipeline import shard_fusion
from multidevice.sharding.queries import local_extents
from tests.support import sharded_fusions as models
from tests.support.rank_by_rank import mesh, shard_axis


def test_a_change_of_placement_is_proved_before_it_is_named_and_never_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = models.mlp()
    t = model.tensors
    models.set_mesh(mesh(2), *(t[n] for n in model.shapes))
    shard_axis(t["w1"], 0, 2)
    shard_axis(t["w2"], 1, 2)
    shard_fusion(model.fusion)

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("two placements are compared again")

    monkeypatch.setattr("multidevice.sharding.queries.Comparison.differs", refuse)
    monkeypatch.setattr("multidevice.sharding.queries.Comparison.differs", refuse)
    segmented = segment_fusion(
        model.fusion,
        find_scheduler=lambda fusion: find_scheduler(localize(fusion)[0]),
        local_shape=local_extents,
    )
    assert len(lower(segmented, backend_name="SIMULATED").communications()) == 1
