"""Replicated inputs that every call slices: each is reported once, with the annotation to add."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from fuser import FusionDefinition, Replicate, Shard, TensorView, shard
from fuser.multidevice import DeviceMesh, shard_tensor, simulate
from hostir.analysis.sliced_inputs import sliced_inputs
from hostir.cost.machine_model import H200
from hostir.cost.report import predict, report
from hostir.cost.simulator import simulated_schedule
from hostir.ir.ops import NUMBER_OF_STREAMS
from hostir.ir.parser import parse
from hostir.ir.program import HostIrContainer
from hostir.lowering.input_class import symbol_values
from hostir.tools.explain import explain

pytestmark = pytest.mark.from_text

LINE = [0, 1]
SQUARE = DeviceMesh([[0, 1], [2, 3]])


def row_parallel(fd: FusionDefinition, x: TensorView, w: TensorView, w2: TensorView) -> None:
    shard(w, LINE, [Shard(0)])
    fd.add_output(fd.ops.linear(fd.ops.relu(fd.ops.linear(x, w)), w2))


def row_parallel_and_whole(
    fd: FusionDefinition, x: TensorView, w: TensorView, w2: TensorView
) -> None:
    row_parallel(fd, x, w, w2)
    fd.add_output(fd.ops.exp(w2))


def annotated(fd: FusionDefinition, x: TensorView, w: TensorView, w2: TensorView) -> None:
    row_parallel(fd, x, w, w2)
    shard(w2, LINE, [Shard(1)])


def on_a_square(fd: FusionDefinition, x: TensorView, w: TensorView, w2: TensorView) -> None:
    shard(w, SQUARE, [Replicate(), Shard(0)])
    shard(w2, SQUARE, [Shard(0), Replicate()])
    fd.add_output(fd.ops.linear(fd.ops.relu(fd.ops.linear(x, w)), w2))


def scaled(fd: FusionDefinition, x: TensorView, w: TensorView, w2: TensorView) -> None:
    shard(x, LINE, [Shard(0)])
    fd.add_output(fd.ops.mul(fd.ops.mul(x, w), w2))


CASES: dict[
    str, tuple[Callable[[FusionDefinition, TensorView, TensorView, TensorView], None], list[str]]
] = {
    "row-parallel": (row_parallel, ["T2, input 2, is whole along axis 1 .* linear at .*dim=1"]),
    "read whole, too": (row_parallel_and_whole, []),
    "annotated": (annotated, []),
    "cut by the other dimension": (
        on_a_square,
        [r"T2, input 2, .* axis 1 .* by mesh_x .*\[Shard\(dim=0\), Shard\(dim=1\)\]"],
    ),
    "two factors": (scaled, ["T1, input 1, .* axis 0 .*mul at", "T2, input 2, .* axis 0 .*mul at"]),
}


def defined(name: str) -> FusionDefinition:
    with FusionDefinition() as fd:
        x, w, w2 = (fd.define_tensor([16, 16], contiguity=True) for _ in range(3))
        CASES[name][0](fd, x, w, w2)
    return fd


@pytest.mark.finding("G41")
@pytest.mark.parametrize("options", [(), ("machine(h200)",), ("steps",)])
@pytest.mark.parametrize("name", CASES)
def test_an_input_that_each_call_cuts_is_told_once(name: str, options: tuple[str, ...]) -> None:
    words = CASES[name][1]

    def run() -> tuple[HostIrContainer, str]:
        fd = defined(name)
        inputs = [v for v in fd.fusion.inputs if isinstance(v, TensorView)]
        whole = [torch.randn(16, 16) for _ in inputs]
        shards = [
            shard_tensor(x, tv) if tv.domain.has_devices else x
            for x, tv in zip(whole, inputs, strict=True)
        ]
        fd.execute(shards, _enable_options=options)
        return fd.fec.host_program(), fd.overlap_report(shards)

    with simulate(4 if name == "cut by the other dimension" else 2) as world:
        program, overlap = world.run(run)[0]
    program = parse(program.full_text())
    notes = sliced_inputs(program)
    assert len(notes) == len(words)
    assert all(re.search(w, note) for w, note in zip(words, notes, strict=True)), notes
    values = {**symbol_values(program, {}), NUMBER_OF_STREAMS: 4}
    cost = predict(program, simulated_schedule(program, values, H200))
    assert cost.notes == notes and cost.to_dict()["notes"] == notes
    for text in (report(cost), overlap, "\n".join(explain(program, "all"))):
        for note in notes:
            assert text.count(note) == 1
        assert text.count("annotate the input") == len(notes)
    assert [n for n in notes if n.startswith("T2")] == [
        line for line in explain(program, "T2") if "annotate the input" in line
    ]
