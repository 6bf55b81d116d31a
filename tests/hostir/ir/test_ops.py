"""Every host op has all its parts, and every example of one does what torch says."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import hostir
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import TensorView
from fuser.ir.op import Op, operand, result, walk
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.types import ParallelType
from fuser.support.errors import DefinitionError, VerifyError
from hostir import (
    NUMBER_OF_STREAMS,
    RANK,
    Allocate,
    ForLoop,
    HostIrContainer,
    HostIrEvaluator,
    IfThenElse,
    LocalSlice,
    equal,
    parse,
    verify,
)
from hostir.analysis.collective_matching import find_mismatches
from hostir.analysis.races import find_races
from hostir.ir.effects import Effect, Part, Reads, Shows, Starts, Writes
from hostir.ir.ops import HOST_OPS, HostOp, checked_slots, loop_index, missing_slots
from hostir.ir.ops.base import Runtime
from multidevice import Communicator, DeviceMesh, simulate
from multidevice.sharding.reshard import TeamOf
from multidevice.transports.base.collectives import COLLECTIVES
from scripts import document_ops
from tests.support.handmade_programs import EXAMPLES, LATE, run_simulated

# The names that `import ... as ...` lines declare for type checkers.
NAMED = re.findall(r"import \w+ as (\w+)\n", Path(hostir.__file__).read_text())
CLASSES = [c for c in Op.REGISTRY.values() if issubclass(c, HostOp) and not c.__subclasses__()]


def missing_parts(cls: type[HostOp], examples: dict[type[Op], str]) -> list[str]:
    """Returns what a host op lacks."""
    parts = {
        "a place in hostir.ir.ops.HOST_OPS": cls in HOST_OPS,
        "an example in tests.support.handmade_programs.EXAMPLES": cls in examples,
        "a name for type checkers in hostir/__init__.py": cls.__name__ in NAMED,
    }
    return [*missing_slots(cls), *(part for part, has in parts.items() if not has)]


@pytest.fixture(scope="module")
def examples() -> dict[type[Op], str]:
    return {
        type(op): name for name, example in EXAMPLES.items() for op in walk(example.build().ops)
    }


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_a_host_op_has_all_parts(cls: type[HostOp], examples: dict[type[Op], str]) -> None:
    assert missing_parts(cls, examples) == []


def test_what_an_op_lacks_is_named() -> None:
    class Unfinished(HostOp):
        pass

    del Op.REGISTRY["Unfinished"]
    assert len(missing_parts(Unfinished, {})) == 6
    with pytest.raises(
        TypeError, match=r"Unfinished: a host op must declare text .* and effects\(\)"
    ):
        checked_slots(Unfinished)


class Twice(HostOp):
    """An op of a new kind, which says the least that it can: it reads and writes."""

    out: TensorView = result()
    inp: TensorView = operand()
    TEXT = "{out} = Twice({inp})"

    def effects(self) -> tuple[Effect, ...]:
        return (Reads(self.inp), Writes(self.out))


class FirstRow(HostOp):
    """An op of a new kind that names an element."""

    out: TensorView = result()
    inp: TensorView = operand()
    TEXT = "{out} = FirstRow({inp})"

    def effects(self) -> tuple[Effect, ...]:
        return (Shows(self.out, self.inp, Part(0, sc.ZERO)),)


class Announced(HostOp):
    """An op of a new kind that starts a communication."""

    out: TensorView = result()
    inp: TensorView = operand()
    TEXT = "{out} = Announced({inp})"

    def effects(self) -> tuple[Effect, ...]:
        return (Reads(self.inp), Writes(self.out), Starts(1))


class Careless(HostOp):
    """An op that reads a number once, and says that no number decides what it does."""

    out: TensorView = result()
    value: Scalar = operand()
    HAS_CONTROL_SCALARS = False
    TEXT = "{out} = Careless({value})"

    def effects(self) -> tuple[Effect, ...]:
        return (Writes(self.out),)

    def emit(self, rt: Runtime) -> None:
        number = rt.number(self.value)
        rt.call(lambda out: out.fill_(number), self.out)


for kind in (Twice, FirstRow, Announced, Careless):
    del Op.REGISTRY[kind.__name__]


def test_what_an_op_leaves_out_follows_from_its_effects() -> None:
    hic = HostIrContainer()
    with hic:
        x, y = hic.input([4, 6]), hic.tensor([4, 6], DataType.Half)
        row, longer = hic.tensor([6]), hic.tensor([7])
    shapes = {x: (4, 6), y: (4, 6), row: (6,)}

    twice = Twice(y, x)
    assert twice.work(shapes.__getitem__) == {x: 4 * 6 * 4, y: 4 * 6 * 2}
    assert (twice.subject, twice.buffer_sharing, twice.HAS_CONTROL_SCALARS) == (
        "Twice",
        "same",
        True,
    )
    assert not twice.ranks_meet and twice.moved is None

    first = FirstRow(row, x)
    assert first.work(shapes.__getitem__) is None
    first.check_shapes({})
    with pytest.raises(VerifyError, match=r"must have the same size.*extent 6 and extent 7"):
        FirstRow(longer, x).check_shapes({})

    announced = Announced(y, x)
    assert announced.work(shapes.__getitem__) is None
    assert announced.ranks_meet and announced.moved == (x, y)
    movement = announced.movement
    assert movement is not None and (movement.sent, movement.received) == (x, y)
    assert movement.team is None and movement.collective is None and not movement.peers


def test_the_movement_of_each_op_that_starts_a_communication() -> None:
    mesh = DeviceMesh([0, 1, 2])
    team = TeamOf(mesh, (ParallelType.mesh_x,))
    hic = HostIrContainer()
    with hic:
        x, y = hic.input([4, 6], mesh=mesh), hic.tensor([4, 6], mesh=mesh)
    reduced = hostir.Communication(
        x, y, number=0, type="Reduce", team=team, root=sc.ONE, red_op="MAX", backend="CUDA"
    ).movement
    assert (reduced.kind, reduced.tensors, reduced.team) == ("Reduce", (x, y), team)
    assert reduced.collective is COLLECTIVES["Reduce"] and reduced.is_copied
    assert (reduced.root, reduced.red_op) == (sc.ONE, "MAX")
    ring = hostir.CollectivePermute(x, y, sc.ONE, sc.ZERO, number=0, team=team).movement
    assert (ring.tensors, ring.team, ring.collective) == ((x, y), team, None)
    assert ring.peers == {"send_peer": sc.ONE, "recv_peer": sc.ZERO} and not ring.is_copied
    for kind, ends in (("send", (x, None)), ("recv", (None, x))):
        end = hostir.P2PCommunication(x, sc.ONE, number=0, type=kind).movement  # pyright: ignore[reportArgumentType]
        assert (end.sent, end.received) == ends and end.buffer is x
        assert end.team is None and end.peers == {"peer": sc.ONE}
    for op in (hostir.EndCoalescing(0), hostir.Wait(0), hostir.Allocate(y), Twice(y, x)):
        assert op.movement is None


def test_a_number_of_each_run_that_an_op_reads_once_is_refused() -> None:
    hic = HostIrContainer()
    with hic:
        value, out = hic.scalar(DataType.Double), hic.tensor([4])
        hic.append(Allocate(out), Careless(out, value))
        hic.add_output(out)
    evaluator = HostIrEvaluator(hic)
    for run in (evaluator.run, evaluator.evaluate):
        with pytest.raises(
            DefinitionError, match=r"Careless: its emit reads the scalar d\d+ .*once.*rt\.call"
        ):
            run([2.0])


def test_a_slice_with_another_number_of_axes_is_refused() -> None:
    mesh = DeviceMesh([0, 1])
    hic = HostIrContainer()
    with hic:
        x, y = hic.input([4, 6], mesh=mesh), hic.tensor([4], mesh=mesh)
        y.outer_split(0, 2)
        y.axis(0).parallelize(ParallelType.mesh_x)
        hic.append(Allocate(y), LocalSlice(y, x, axis=0, ptype=ParallelType.mesh_x))
        hic.add_output(y)
    with pytest.raises(VerifyError, match=r"LocalSlice: .*T\d+.* has 1 axis, expected 2"):
        verify(hic)


def test_host_ops_are_public_names() -> None:
    assert {cls.__name__ for cls in CLASSES} <= {*dir(hostir)}
    assert all(getattr(hostir, cls.__name__) is cls for cls in CLASSES)
    with pytest.raises(AttributeError, match="'hostir' has no attribute 'AT_ROOT'"):
        hostir.__getattr__("AT_ROOT")


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_print_and_read_back(name: str) -> None:
    program = EXAMPLES[name].build()
    verify(program)
    again = parse(program.full_text())
    assert equal(again, program) and again.full_text() == program.full_text()
    verify(again)
    # Two levels down the same words mean the same.
    nested = _nested(program)
    assert equal(parse(nested.full_text()), nested)
    assert parse(str(program)).is_short


def _nested(program: HostIrContainer) -> HostIrContainer:
    index = loop_index("i900", 0, 1)
    branch = IfThenElse(sc.eq(index, 0), then=program.ops, orelse=program.ops)
    return program.with_ops((ForLoop(index=index, stop=sc.const(1), body=(branch,)),))


@pytest.mark.parametrize("late", LATE, ids=str)
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_equal_torch(name: str, late: str | int | None) -> None:
    example = EXAMPLES[name]
    program = example.build()
    run_simulated(example, program, late=late)
    if late is None:
        run_simulated(example, program, reference=True)
        run_simulated(example, parse(program.full_text()))


OLDER = (Path(__file__).parent / "golden" / "older.txt").read_text()


def test_the_spelling_of_older_dumps_is_read() -> None:
    program = parse(OLDER)
    assert program.is_short
    assert equal(parse(str(program)), program)
    text = str(program)
    for line in (
        "  Stream S0 = GetCurrentStream()",
        "  FOR StreamIdx in istreamIdx5{i0}:",
        "    SetCurrentStream(Stream ( StreamIdx % numberOfStreams ))",
        "    Synchronize(Stream S0)",
        "    Wait(Communication 35)",
        "    SetCurrentStream(Stream S0)",
    ):
        assert f"\n{line}\n" in text, line
    assert text.count("= HirAliasSelect(") == 3
    # It runs with default values of the parts that the short form leaves out, which are plain
    # layouts.
    whole = replace(program, is_short=False)
    verify(whole)
    x, w = torch.randn(5, 2, 6), torch.randn(3, 6)

    def body() -> torch.Tensor:
        communicator = Communicator.instance()
        evaluator = HostIrEvaluator(whole, communicator, late_stream="all")
        (out,) = evaluator.run([x[:, communicator.rank()].unsqueeze(1).contiguous(), w])
        return out

    with simulate(2) as world:
        for out in world.run(body):
            torch.testing.assert_close(out, x @ w.t())


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_free_of_races(name: str) -> None:
    """As far as the check knows: what it reports, a late stream must show, and these are right."""
    example = EXAMPLES[name]
    program = example.build()
    symbols = [s for x in program.inputs if isinstance(x, TensorView) for s in x.shape()]
    sizes: dict[sc.Symbol, int] = {s: 6 for s in symbols if isinstance(s, sc.Symbol)}
    sizes |= {x: 1 for x in program.inputs if isinstance(x, sc.Symbol)}
    if example.ranks > 1:
        assert find_mismatches(program, {**sizes, NUMBER_OF_STREAMS: example.streams}) == []
    for rank in range(example.ranks):
        values = {**sizes, RANK: rank, NUMBER_OF_STREAMS: example.streams}
        found = find_races(program, values, rank=rank)
        assert [str(f) for f in found] == []


PAGE = Path(__file__).parents[3] / "docs" / "reference" / "host-operations.md"


def test_the_tables_of_the_page_are_those_of_the_ops() -> None:
    assert document_ops.host_page() == PAGE.read_text(), "python scripts/document_ops.py"


def test_the_effects_on_the_page_are_those_of_an_op() -> None:
    assert document_ops.effect_names(hostir.Communication) == ["Reads", "Writes", "Starts"]
    assert document_ops.effect_names(hostir.PostOnStream) == ["Reads", "Writes"]


def test_the_page_on_host_programs_holds() -> None:
    text = PAGE.read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), {"__name__": "page"})
    # The page says that a program frees all of its buffers, or none.
    (block,) = [block for block in blocks if ", Deallocate(shard)" in block]
    assert block.count(", Deallocate(shard)") == 1
    with pytest.raises(VerifyError, match="no Deallocate of T1_sym_float"):
        exec(block.replace(", Deallocate(shard)", ""), {"__name__": "page"})
    for cls in CLASSES:
        assert f"`{cls.__name__}" in text, (
            f"docs/reference/host-operations.md does not speak of {cls.__name__}"
        )
