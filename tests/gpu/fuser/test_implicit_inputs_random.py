"""Random numbers on a GPU equal those of the CPU, follow torch's CUDA generator, and can be
replayed.
"""

from __future__ import annotations

import pytest
import torch

from fuser import DataType, FusionDefinition
from fuser.support.errors import UnsupportedError
from tests.fuser.frontend.test_implicit_inputs_random import drawing, keyed

D = DataType
SHAPES = ((1, 1), (5, 13), (64, 256), (1000, 770), (3, 4096))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [D.Float, D.Double, D.Half, D.BFloat16], ids=str)
@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_numbers_are_those_of_the_cpu(kind: str, dtype: DataType) -> None:
    fd = keyed(kind, dtype)
    for shape in SHAPES:
        for seed, offset in ((0, 0), (2**62 + 1, 2**33 + 5), (-7, 3)):
            x = torch.zeros(shape)
            (want,) = fd.execute([x, seed, offset])
            (got,) = fd.execute([x.cuda(), seed, offset])
            if kind == "uniform":
                assert torch.equal(got.cpu(), want), (shape, seed)
            else:
                torch.testing.assert_close(got.cpu(), want)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_the_nth_call_has_the_nth_offset_of_torchs_generator(kind: str) -> None:
    drawn, given = drawing(kind), keyed(kind)
    x = torch.zeros(5, 9, device="cuda")
    for seed in (0, 12345, 2**63 - 1):
        torch.manual_seed(seed)
        for offset in range(40):
            got = drawn.execute([x])[0]
            assert torch.equal(got, given.execute([x, seed, offset])[0]), (seed, offset)
    torch.manual_seed(1)
    torch.rand(4, device="cuda")
    state = torch.cuda.get_rng_state()
    a = drawn.execute([x])[0], torch.rand(4, device="cuda")
    torch.cuda.set_rng_state(state)
    b = drawn.execute([x])[0], torch.rand(4, device="cuda")
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


def _layers() -> FusionDefinition:
    with FusionDefinition() as fd:
        x, w = (fd.define_tensor([-1, -1], contiguity=True, dtype=D.BFloat16) for _ in range(2))
        u = fd.ops.rand_like(x)
        h = fd.ops.linear(fd.ops.cast(fd.ops.mul(x, u), D.BFloat16), w)
        z = fd.ops.cast(fd.ops.mul(fd.ops.randn_like(h), h), D.BFloat16)
        fd.add_output(fd.ops.linear(z, w))
        fd.add_output(u)
    return fd


@pytest.mark.gpu
def test_numbers_advance_where_graphs_repeat_runs() -> None:
    fd = _layers()
    inputs = [torch.randn(256, 256, device="cuda").bfloat16() for _ in range(2)]

    def runs(*disable: str) -> list[list[torch.Tensor]]:
        torch.manual_seed(8)
        return [fd.execute(inputs, _disable_options=list(disable)) for _ in range(60)]

    want, got = runs("cuda_graphs"), runs()
    lines = fd.cuda_graphs()
    assert any(line.startswith("captured: ") for line in lines), lines
    for a, b in zip(got, want, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))
    assert len({tuple(u[0, :8].tolist()) for _, u in got}) == 60


@pytest.mark.gpu
def test_a_graph_of_the_caller_would_repeat_its_numbers() -> None:
    drawn, given = drawing(), keyed()
    x = torch.zeros(5, 9, device="cuda")
    drawn.execute([x])
    (want,) = given.execute([x, 3, 4])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (got,) = given.execute([x, 3, 4])
        with pytest.raises(UnsupportedError, match=r"torch's generator.*capture a CUDA"):
            drawn.execute([x])
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got, want)
