"""Steps whose blocks are rotated by rank, where the last ones are shorter, or empty."""

from __future__ import annotations

import pytest
import torch

from fuser import FusionDefinition, ParallelType, multidevice
from fuser.multidevice import DeviceMesh


@pytest.mark.parametrize("chunks", [3, 9])
def test_a_view_in_a_rotated_step_has_the_size_of_its_block(chunks: int) -> None:
    """4 elements in 3 chunks are 2, 2 and 0; each rank begins with another one."""
    mesh, x = DeviceMesh(range(2)), torch.randn(4, 4, 16)
    w, v = torch.randn(16, 16), torch.randn(4, 4)
    with FusionDefinition() as fd:
        tx, tw = fd.define_tensor([4, 4, 16]), fd.define_tensor([16, 16])
        tv = fd.define_tensor([4, 4])
        y = fd.ops.linear(tx, tw)
        z = fd.ops.reshape(y, [4, 4, 4, 4])
        fd.add_output(fd.ops.matmul(z, tv))
        for t in (tx, tw, tv, y):
            t.set_device_mesh(mesh)
        y.outer_split(0, 2)
        y.axis(0).parallelize(ParallelType.mesh_x)
        y.outer_split(2, chunks)
        y.swizzle1d(2, ParallelType.mesh_x)
        y.axis(2).parallelize(ParallelType.stream)

    def body() -> list[torch.Tensor]:
        return fd.execute([x, w, v])

    with multidevice.simulate(2) as world:
        by_rank = world.run(body)
    want = (x.double() @ w.double().T).reshape(4, 4, 4, 4) @ v.double()
    for rank, (got,) in enumerate(by_rank):
        part = want if got.shape == want.shape else want.chunk(2)[rank]
        torch.testing.assert_close(got.double(), part, rtol=1e-4, atol=1e-3)
