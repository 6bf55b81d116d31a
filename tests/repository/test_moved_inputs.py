"""Moved inputs keep their strides and offsets; tested without a GPU on torch's meta device."""

from __future__ import annotations

import pytest
import torch

from fuser import FusionDefinition
from tests.support.moved_inputs import moved, passed

LAID = {
    "contiguous": torch.arange(12.0).view(3, 4),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "with gaps": torch.arange(48.0).view(6, 8)[::2, ::2],
    "expanded": torch.arange(4.0).expand(3, 4),
    "behind an offset": torch.arange(20.0)[7:11],
    "without elements": torch.empty(3, 0),
    "without axes": torch.arange(5.0)[3],
    "of one byte": torch.arange(12.0).to(torch.float8_e4m3fn).view(3, 4)[1:],
    "complex": torch.arange(6.0).to(torch.complex64).view(2, 3).t(),
}


@pytest.mark.parametrize("name", LAID)
def test_strides_and_offsets_are_kept(name: str) -> None:
    x = LAID[name]
    there, copied = moved(x, "meta"), moved(x, "cpu")
    for t in (there, copied):
        assert (t.shape, t.stride(), t.dtype) == (x.shape, x.stride(), x.dtype)
        assert t.storage_offset() == x.storage_offset()
    assert there.is_meta
    mine, own = (t.clone().reshape(-1).view(torch.uint8) for t in (copied, x))
    assert torch.equal(mine, own)


def test_cpu_scalars_and_numbers_stay() -> None:
    with FusionDefinition() as fd:
        x, s = fd.define_tensor([-1]), fd.define_tensor([], is_cpu=True)
        one, n, sizes = fd.define_tensor([]), fd.define_scalar(), fd.define_vector(2)
        fd.add_output(fd.ops.reshape(x * s * one * n, sizes))
    scalar = torch.tensor(2.0)
    given = [torch.ones(2), scalar, torch.tensor(3.0), 4.0, [1, 2]]
    a, b, c, *numbers = passed(fd.fusion, given, "meta")
    assert a.is_meta and b is scalar and c.is_meta and numbers == [4.0, 1, 2]
