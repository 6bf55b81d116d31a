"""In-place updates, random programs: all outputs come from old values, all updates at the end.

Values are small integers in float32, so torch's results are exact whatever the order of sums.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from fuser import FusionDefinition, ops
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.kernels import executor
from fuser.kernels.executor import compile_many
from fuser.runtime.compile import compile_kernels
from fuser.support.errors import InputError
from fuser.support.options import Settings, settings
from hostir import HostIrEvaluator
from tests.support.host_programs import build_for, out, tensor

N = 4
PROGRAMS, BATCH = 320, 80
Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Row:
    """An op on N x N tensors: its definition and its meaning in torch."""

    arity: int
    define: Callable[..., Any]
    torch: Callable[..., torch.Tensor]


def without_sum(x: Any) -> Any:
    total = ops.broadcast_in_dim(ops.sum(x, [1]), [x.size(0), x.size(1)], [0])
    return ops.sub(x, total)


def there_and_back(x: Any) -> Any:
    flat = ops.reshape(x, [ops.mul(x.size(0), x.size(1))])
    return ops.reshape(ops.neg(flat), [x.size(0), x.size(1)])


OPS = (
    Row(2, lambda x, y: ops.add(x, y), torch.add),
    Row(2, lambda x, y: ops.minimum(x, y), torch.minimum),
    Row(2, lambda x, y: ops.sub(x, y), torch.sub),
    Row(1, lambda x: ops.neg(x), torch.neg),
    Row(1, lambda x: ops.relu(x), torch.relu),
    Row(1, lambda x: ops.set(x), torch.clone),
    Row(1, lambda x: ops.permute(x, [1, 0]), torch.t),
    Row(1, there_and_back, torch.neg),
    Row(1, without_sum, lambda x: x - x.sum(1, keepdim=True)),
    Row(2, lambda x, y: ops.remainder(ops.matmul(x, y), 8.0), lambda x, y: (x @ y) % 8),
)


@dataclass
class Program:
    """Statements (op, operands by number), outputs (value, input that it updates or None)."""

    inputs: int
    statements: list[tuple[Row, tuple[int, ...]]]
    outputs: list[tuple[int, int | None]]
    # Inputs that are one tensor at run time, and inputs that are slices of one buffer.
    shared: dict[int, int] = field(default_factory=dict)

    def define(self, inputs: Sequence[TensorView]) -> None:
        values: list[Any] = list(inputs)
        for row, operands in self.statements:
            values.append(row.define(*(values[k] for k in operands)))
        for value, into in self.outputs:
            out(values[value], None if into is None else values[into])

    def expected(self, inputs: Tensors) -> tuple[Tensors, Tensors]:
        """Returns the visible outputs and updates the inputs: reads old values, then writes."""
        values = [x.double().clone() for x in inputs]
        for row, operands in self.statements:
            values.append(row.torch(*(values[k] for k in operands)))
        for value, into in self.outputs:
            if into is not None:
                inputs[into].copy_(values[value])
        plain = [values[v] for v, into in self.outputs if into is None]
        return plain, inputs


def random_program(rng: random.Random) -> Program:
    count = rng.randint(1, 3)
    statements: list[tuple[Row, tuple[int, ...]]] = []
    for k in range(rng.randint(1, 6)):
        row = rng.choice(OPS)
        statements.append((row, tuple(rng.randrange(count + k) for _ in range(row.arity))))
    made = list(range(count, count + len(statements)))
    targets = rng.sample(range(count), rng.randint(1, count))
    outputs: list[tuple[int, int | None]] = []
    for into in targets:
        source = rng.randrange(count) if rng.random() < 0.2 else rng.choice(made)
        if source != into and source not in [v for v, _ in outputs]:
            outputs.append((source, into))
    updated = {v for v, _ in outputs}
    free = [v for v in made if v not in updated]
    outputs += [(v, None) for v in rng.sample(free, min(len(free), rng.randint(0, 3)))]
    rng.shuffle(outputs)
    program = Program(count, statements, outputs or [(made[-1], 0)])
    if count > 1 and rng.random() < 0.4:
        a, b = rng.sample(range(count), 2)
        program.shared[a] = b
    return program


def random_inputs(program: Program, rng: random.Random) -> Tensors:
    def fresh(rows: int) -> torch.Tensor:
        return torch.tensor([[float(rng.randint(-4, 4)) for _ in range(N)] for _ in range(rows)])

    inputs = [fresh(N) for _ in range(program.inputs)]
    for a, b in program.shared.items():
        # One tensor, windows that overlap by some rows, or neighbours.
        shift = rng.choice([0, 1, N])
        buffer = fresh(2 * N)
        inputs[a], inputs[b] = buffer[:N], buffer[shift : shift + N]
    return inputs


def copies(inputs: Tensors) -> Tensors:
    """Returns copies that share memory as the inputs do."""
    buffers = {t.untyped_storage().data_ptr(): t.untyped_storage().clone() for t in inputs}
    return [
        torch.empty(0).set_(
            buffers[t.untyped_storage().data_ptr()], t.storage_offset(), t.shape, t.stride()
        )
        for t in inputs
    ]


def loses_an_update(program: Program, inputs: Tensors) -> bool:
    """Whether two updated inputs have an element in common."""
    targets = {into for _, into in program.outputs if into is not None}
    places = [
        {inputs[i].data_ptr() + 4 * k for k in range(inputs[i].numel())} for i in sorted(targets)
    ]
    return len(set().union(*places)) < sum(map(len, places))


def evaluator_of(program: Program, inputs: Tensors, options: Settings) -> HostIrEvaluator:
    fusion = Fusion()
    with FusionGuard(fusion):
        program.define([tensor(-1, -1) for _ in range(program.inputs)])
    return HostIrEvaluator(build_for(fusion, inputs), settings=options)


@pytest.mark.parametrize("schedules", ["cpu", "h200"])
@pytest.mark.parametrize("batch", range(PROGRAMS // BATCH))
def test_random_updates(batch: int, schedules: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs each program three times: recorded, replayed, and with other memory."""
    # A thousand small kernels, of kinds that other tests compile for a GPU as well.
    monkeypatch.setattr(executor, "compile_kernels", compile_kernels)
    options = settings([] if schedules == "cpu" else ["schedules_for(h200)"])
    cases: list[tuple[int, Program, HostIrEvaluator]] = []
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        program = random_program(random.Random(seed))
        inputs = random_inputs(program, random.Random(seed))
        cases.append((seed, program, evaluator_of(program, inputs, options)))
    compile_many(
        [r for _, p, e in cases for r in e.requests([torch.zeros(N, N)] * p.inputs)], device="cpu"
    )
    for seed, program, evaluator in cases:
        inputs = random_inputs(program, random.Random(seed))
        for run in range(3):
            if run == 2:
                inputs = random_inputs(program, random.Random(-seed))
            if loses_an_update(program, inputs):
                before = copies(inputs)
                with pytest.raises(InputError, match="both are updated in place"):
                    evaluator.run(inputs)
                assert all(map(torch.equal, inputs, before)), (seed, run, program)
                continue
            want, updated = program.expected(copies(inputs))
            got = evaluator.run(inputs)
            for a, b in zip([*got, *inputs], [*want, *updated], strict=True):
                assert torch.equal(a.double(), b.double()), (seed, run, program)


def test_two_updates_of_one_element_are_refused_in_words() -> None:
    with FusionDefinition() as fd:
        x, y, z = (fd.define_tensor([-1], contiguity=True) for _ in range(3))
        fd.add_output(fd.ops.add(x, z), x)
        fd.add_output(fd.ops.mul(y, 2.0), y)
    rows = torch.arange(12.0)
    fd.execute([rows[:4], rows[4:8], rows[8:]])  # neighbours
    torch.testing.assert_close(rows, torch.tensor([8.0, 10, 12, 14, 8, 10, 12, 14, 8, 9, 10, 11]))
    for start in (3, 0):
        before = rows.clone()
        with pytest.raises(InputError, match="one update would be lost") as found:
            fd.execute([rows[:4], rows[start : start + 4], rows[8:]])
        text = str(found.value)
        assert "input 0, T0" in text and f"byte {4 * start} of its storage" in text
        assert text.count(f"{__file__}:") == 2, text
        assert torch.equal(rows, before)
    # Even and odd elements of one storage interleave, and have none in common.
    with FusionDefinition() as strided:
        x, y = (strided.define_tensor([-1], contiguity=False) for _ in range(2))
        strided.add_output(strided.ops.neg(x), x)
        strided.add_output(strided.ops.mul(y, 2.0), y)
    pairs = torch.arange(6.0)
    strided.execute([pairs[::2], pairs[1::2]])
    assert pairs.tolist() == [0, 2, -2, 6, -4, 10]
