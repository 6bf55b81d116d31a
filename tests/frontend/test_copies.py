"""Copies of definitions: pickle and deepcopy go through the text of `repr`."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fuser import DataType, FusionDefinition, ParallelType, multidevice
from fuser.errors import DefinitionError

COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda fd: pickle.loads(pickle.dumps(fd)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


def written() -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 8], contiguity=True)
        s = fd.define_scalar(dtype=DataType.Double)
        fd.add_output(fd.ops.sum(fd.ops.mul(x, s), 1))
        fd.add_output(fd.ops.add(x, 0.1), x)
    return fd


@pytest.mark.finding("G10")
@pytest.mark.parametrize("has_run", [False, True], ids=["new", "run"])
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_a_definition_is_equal_and_runs(name: str, has_run: bool) -> None:
    fd = written()
    if has_run:
        fd.execute([torch.ones(2, 8), 2.0])
    twin = COPIES[name](fd)
    assert twin is not fd and twin.fusion == fd.fusion and repr(twin) == repr(fd)
    x = torch.randn(3, 8)
    before = x.clone()
    (out,) = twin.execute([x, 3.0])
    torch.testing.assert_close(out, (before * 3).sum(1))
    torch.testing.assert_close(x, before + 0.1)
    fd.execute([x, 1.0])  # the first is its own


@pytest.mark.finding("G10")
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_keeps_meshes_cuts_and_the_rule_of_numbers(name: str) -> None:
    with FusionDefinition(double_numbers=True) as fd:
        x = fd.define_tensor([-1, 4], dtype=DataType.Int, contiguity=True)
        x.set_device_mesh(multidevice.DeviceMesh([0, 1]))
        x.outer_split(0, 2)
        x.axis(0).parallelize(ParallelType.mesh_x)
        fd.add_output(fd.ops.mul(x, 0.5))
    twin = COPIES[name](fd)
    assert repr(twin) == repr(fd) and twin.fusion.double_numbers
    assert twin.fusion.inputs[0].mesh == multidevice.DeviceMesh([0, 1])
    assert twin.fusion.outputs[0].dtype() is DataType.Double


@pytest.mark.finding("G10")
def test_a_definition_that_is_not_written_has_words_or_an_empty_copy() -> None:
    assert "not written yet" in repr(copy.deepcopy(FusionDefinition()))
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1])
        with pytest.raises(DefinitionError, match="its `with` block has not ended"):
            pickle.dumps(fd)
        assert copy.deepcopy(x.size(0)) is x.size(0)
        assert pickle.loads(pickle.dumps((x.size(0) + 3) * 2 // 5)) is (x.size(0) + 3) * 2 // 5
        fd.add_output(x)
