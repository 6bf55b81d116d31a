"""One encoder layer of a transformer: values, numbers of launches, and a run from its text."""

from __future__ import annotations

import math

import minilm  # pyright: ignore[reportMissingImports]
import pytest
import torch
from torch.nn import functional as F

from fuser import DataType
from fuser.multidevice import Communicator, DeviceMesh
from hostir import HostIrEvaluator
from hostir.ir.parser import parse
from hostir.ir.program import equal
from multidevice import simulate

pytestmark = pytest.mark.from_text

BATCH, TOKENS = 2, 8


def random_weights(generator: torch.Generator) -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (_, n, k, _) in minilm.LINEARS.items():
        shapes |= {f"{name}.weight": (n, k), f"{name}.bias": (n,)}
    for name in minilm.NORMS:
        shapes |= {f"{name}.weight": (minilm.HIDDEN,), f"{name}.bias": (minilm.HIDDEN,)}
    return {
        k: torch.randn(*s, generator=generator, dtype=torch.float64) / math.sqrt(s[-1])
        for k, s in shapes.items()
    }


def reference(x: torch.Tensor, mask: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
    """Computes the layer in torch, in float64."""

    def linear(v: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(v, w[f"{name}.weight"], w[f"{name}.bias"])

    def heads(v: torch.Tensor) -> torch.Tensor:
        return v.reshape(*v.shape[:2], minilm.HEADS, minilm.HEAD_DIM).transpose(1, 2)

    def norm(v: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(v, v.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-12)

    scores = heads(linear(x, "q")) @ heads(linear(x, "k")).transpose(-1, -2)
    weights = torch.softmax(scores * minilm.HEAD_DIM**-0.5 + mask, -1)
    context = (weights @ heads(linear(x, "v"))).transpose(1, 2).reshape(x.shape)
    h = norm(linear(context, "o") + x, "ln1")
    return norm(linear(F.gelu(linear(h, "up")), "down") + h, "ln2")


def run_layer(
    drop: str | None = None, *, attention: bool = False
) -> tuple[torch.Tensor, torch.Tensor, dict[str, int], str]:
    """Runs the layer on this rank, first from its definition, then from its text."""
    generator = torch.Generator().manual_seed(3)
    weights = random_weights(generator)
    x = torch.randn(BATCH, TOKENS, minilm.HIDDEN, generator=generator, dtype=torch.float64)
    mask = torch.zeros(BATCH, 1, 1, TOKENS, dtype=torch.float64)
    mask[0, ..., 5:] = float("-inf")
    expected = reference(x, mask, weights)
    given = dict(weights)
    if drop is not None:
        given[drop] = torch.zeros_like(given[drop])
    mesh = DeviceMesh(range(Communicator.instance().size()))
    layer = minilm.encoder_layer(mesh, DataType.Float, attention=attention)
    inputs = [x.float(), mask.float(), *layer.bind({k: v.float() for k, v in given.items()}, "cpu")]
    (out,) = layer.fd.execute(inputs)
    program = layer.fd.fec.host_program()
    text = program.full_text()
    again = parse(text)
    assert equal(again, program) and again.full_text() == text
    (from_text,) = HostIrEvaluator(again, Communicator.instance(), device="cpu").run(inputs)
    assert torch.equal(out, from_text)
    return out, expected, layer.fd.fec.statistics(), text


@pytest.mark.parametrize(("attention", "launched"), [(False, (5, 8)), (True, (3, 7))])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_layer_equals_torch_and_runs_from_its_text(
    ranks: int, attention: bool, launched: tuple[int, int]
) -> None:
    with simulate(ranks) as world:
        results = world.run(run_layer, attention=attention)
    for out, expected, counts, text in results:
        torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)
        assert counts["collectives"] == (0 if ranks == 1 else 2)
        assert (counts["kernels"], counts["library_calls"]) == launched
        assert text == results[0][3]
        assert text.count("type=Allreduce") == counts["collectives"]


def test_a_dropped_bias_is_noticed() -> None:
    with simulate(2) as world:
        out, expected, _, _ = world.run(run_layer, "o.bias")[0]
    assert (out - expected).abs().max() > 1e-3
