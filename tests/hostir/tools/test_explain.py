"""`python -m hostir why`: the chain from a sharding to the user's line, and the op behind each
communication, after a round trip through text."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from fuser import FusionDefinition, Replicate, Shard, ops, shard
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import TensorView
from fuser.ir.provenance import read_origin
from fuser.ir.types import ParallelType
from fuser.support.errors import ParseError
from fuser.support.text_cursor import Cursor
from hostir import NUMBER_OF_STREAMS, program_for
from hostir.cost.report import predict
from hostir.cost.simulator import simulated_schedule
from hostir.ir.ops import Communication
from hostir.ir.parser import parse
from hostir.ir.program import HostIrContainer, equal
from hostir.lowering.input_class import symbol_values
from hostir.tools.cli import main
from hostir.tools.explain import UNKNOWN, explain
from multidevice import DeviceMesh
from tests.support.host_programs import CASES, Case, build, out, tensor
from tests.support.predicted_times import PLAIN

MESH = [0, 1]
HERE = Path(__file__)
X = ParallelType.mesh_x


def at(mark: str) -> str:
    """Returns `file:line` of the line of this file that ends in a comment."""
    lines = HERE.read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if line.endswith(f"  # {mark}"))
    return f"{HERE}:{number}"


def read_back(define: Callable[[], None], *shapes: tuple[int, ...]) -> HostIrContainer:
    """Returns the program of a definition for two ranks, as it comes back from its text."""
    program = build(Case(define, shapes, 2))
    again = parse(program.full_text())
    assert again.values.origins == program.values.origins
    assert again.full_text() == program.full_text()
    assert program.full_text().count("Provenance") == 1, "kernels know nothing of it"
    return again


def cut(tv: Any, axis: int) -> None:
    tv.outer_split(axis, 2)


# ------------------------------------------------------------------ chains
def gathered() -> None:
    x, w1, w2 = tensor(-1, 6), tensor(8, 6), tensor(6, 8)
    hidden = ops.relu(ops.linear(x, w1))  # first layer
    y: Any = ops.linear(hidden, w2)  # second layer
    out(y)
    for tv, axis in ((x, 0), (w1, 0), (w2, 1), (y, 0)):
        tv.set_device_mesh(MESH)
        cut(tv, axis)
    x.axis(0).parallelize(X)  # cut of x
    w1.axis(0).parallelize(X)  # cut of w1
    w2.axis(1).parallelize(X)  # cut of w2
    y.axis(0).parallelize(X)  # cut of y


@pytest.fixture(scope="module")
def program() -> HostIrContainer:
    return read_back(gathered, (4, 6), (8, 6), (6, 8))


def test_an_input_is_the_users(program: HostIrContainer) -> None:
    assert explain(program, "T1") == [
        f"T1 is cut by mesh_x on axis 0: annotated by the user at {at('cut of w1')}"
    ]


def test_a_chain_leads_to_the_users_line(program: HostIrContainer) -> None:
    """T3 is the result of the first linear layer, and T4 its relu."""
    assert explain(program, "T4") == [
        f"T4 is cut by mesh_x on axis 1: from T3 (forward through relu at {at('first layer')}), "
        f"from T1 (forward through linear at {at('first layer')}), "
        f"annotated by the user at {at('cut of w1')}"
    ]


def test_the_op_that_made_each_communication_necessary(program: HostIrContainer) -> None:
    gather, scatter = explain(program, "all")
    assert [c.type for c in program.communications()] == ["Allgather", "ReduceScatter"]
    made = program.communications()[0].out.number
    assert gather == (
        f"Communication 0 (Allgather of T0 -> T{made}): because linear at {at('first layer')} "
        f"takes T{made} whole along axis 0, and T0 is cut by mesh_x on axis 0 "
        f"(annotated by the user at {at('cut of x')})"
    )
    assert re.fullmatch(
        r"Communication 1 \(ReduceScatter of T\d+ -> T5\): because linear at "
        + re.escape(at("second layer"))
        + r" sums over an axis that is cut by mesh_x \(from T2 \(forward through linear at "
        + re.escape(f"{at('second layer')}), annotated by the user at {at('cut of w2')}); ")
        + "T5 is cut by mesh_x on axis 0 "
        + re.escape(f"(annotated by the user at {at('cut of y')})"),
        scatter,
    )


def gated() -> None:
    x, gate, up = tensor(-1, 6), tensor(8, 6), tensor(8, 6)
    first = ops.linear(x, gate)  # the gate
    out(ops.mul(ops.silu(first), ops.linear(x, up)))  # the product
    for tv in (x, gate, up):
        tv.set_device_mesh(MESH)
        cut(tv, 0)
        tv.axis(0).parallelize(X)


def test_an_allgather_names_every_line_that_reads_its_result() -> None:
    program = read_back(gated, (4, 6), (8, 6), (8, 6))
    (gather,) = program.communications()
    (line,) = (x for x in explain(program, "all") if x.startswith("Communication 0 (Allgather"))
    assert (
        f"because linear at {at('the gate')} (and linear at {at('the product')}) takes "
        f"T{gather.out.number} whole along axis 0, and T0 is cut" in line
    )


def test_a_tensor_has_its_communications_beside_it(program: HostIrContainer) -> None:
    first, second = explain(program, "T0")
    assert first.endswith(f"annotated by the user at {at('cut of x')}")
    assert second == explain(program, "all")[0]


def one(*, annotate: Callable[[Any], None]) -> Callable[[], None]:
    def define() -> None:
        x = tensor(-1, 6)
        made: dict[str, Any] = {"x": x}
        made["t"] = ops.neg(x)  # neg
        made["y"] = ops.exp(made["t"])  # exp
        out(made["y"])
        annotate(made)

    return define


def rows(tv: TensorView) -> None:
    tv.set_device_mesh(MESH)  # mesh of rows
    cut(tv, 0)
    tv.axis(0).parallelize(X)  # rows


def whole(tv: TensorView) -> None:
    tv.set_device_mesh(MESH)  # whole


def test_against_the_direction_of_data() -> None:
    def annotate(made: Any) -> None:
        rows(made["y"])
        whole(made["x"])

    program = read_back(one(annotate=annotate), (4, 6))
    # neg stands in exp's kernel, and what it reads is cut for it.
    (line, slice_, note) = explain(program, "T0")
    assert note.startswith(
        "T0, input 0, is whole along axis 0 on each rank and sliced by mesh_x in"
    )
    assert line == f"T0 is whole on DeviceMesh{{0 1}}: annotated by the user at {at('whole')}"
    assert re.fullmatch(
        r"LocalSlice \(a copy of T0 -> T(\d+)\): because neg at "
        + re.escape(at("neg"))
        + r" takes T\1 cut by mesh_x on axis 0 \(from T2 \(backward through exp at "
        + re.escape(f"{at('exp')}), annotated by the user at {at('rows')})"),
        slice_,
    )
    (made, *_) = explain(program, slice_.split("-> ")[1].split(")")[0])
    assert made.endswith(
        f"a copy of T0, as neg at {at('neg')} takes it for T1, from T2 (backward through exp at "
        f"{at('exp')}), annotated by the user at {at('rows')}"
    )
    texts = [str(o) for o in program.values.origins]
    assert f"T1 deviceIdx.x on axis 0 : backward from T2 through exp at {at('exp')}" in texts


def test_a_result_that_the_user_wants_whole() -> None:
    def annotate(made: Any) -> None:
        rows(made["x"])
        whole(made["y"])

    program = read_back(one(annotate=annotate), (4, 6))
    (line,) = explain(program, "all")
    assert re.fullmatch(
        r"Communication 0 \(Allgather of T(\d+) -> T2\): because exp at "
        + re.escape(at("exp"))
        + r" computes T\1 cut by mesh_x on axis 0, and T2 is whole along axis 0 "
        + re.escape(f"(annotated by the user at {at('whole')})"),
        line,
    )


def copied() -> None:
    x = tensor(-1, 6)
    y: Any = ops.set(x)  # copy
    out(ops.neg(y))
    rows(x)
    whole(y)


def test_a_copy_that_the_user_wrote() -> None:
    (line,) = explain(read_back(copied, (4, 6)), "all")
    assert line == (
        f"Communication 0 (Allgather of T0 -> T1): because the user's copy at {at('copy')} makes "
        f"T1 whole along axis 0 (annotated by the user at {at('whole')})"
    )


def streamed() -> None:
    x, w = tensor(4, 6, mesh=MESH, cut=0), tensor(8, 6, mesh=MESH)
    whole_x: Any = ops.set(x)  # gather in steps
    y: Any = ops.linear(whole_x, w)
    out(y)
    for tv in (whole_x, y):
        tv.set_device_mesh(MESH)
        cut(tv, 0)
        tv.axis(0).parallelize(ParallelType.stream)  # steps


def test_a_communication_per_step_of_a_stream() -> None:
    program = read_back(streamed, (4, 6), (8, 6))
    (line,) = explain(program, "all")
    assert line == (
        f"Communication 0 (Broadcast of T0 -> T2): because the user's copy at "
        f"{at('gather in steps')} makes T2 whole along axis 0, in the steps of a stream "
        f"(annotated by the user at {at('steps')})"
    )
    # The tensors that one step of the loop computes are parts of the result.
    parts = [tv for tv in program.tensors() if tv.number > 3]
    assert [explain(program, f"T{tv.number}") for tv in parts] == [
        [
            f"T{tv.number} is a part of T3. T3 is cut by stream on axis 0: "
            f"annotated by the user at {at('steps')}"
        ]
        for tv in parts
    ]


def updated() -> None:
    x, y = tensor(-1, 6), tensor(-1, 6)
    out(ops.add(x, y), x)
    whole(x)
    rows(y)


def test_an_update_in_place() -> None:
    slice_, gather = explain(read_back(updated, (4, 6), (4, 6)), "all")
    assert slice_.startswith("LocalSlice (a copy of T0 -> T")
    assert re.search(
        r"because T\d+ is written into T0, which is whole along axis 0 "
        + re.escape(f"(annotated by the user at {at('whole')})")
        + "$",
        gather,
    )


def with_bias() -> None:
    x, w, b, alone = tensor(-1, 6), tensor(8, 6), tensor(8), tensor(5)
    out(ops.linear(x, w, b))  # biased
    out(ops.neg(alone))
    for tv in (x, w):
        tv.set_device_mesh(MESH)
        cut(tv, 1)
    x.axis(1).parallelize(X)  # inner axis of x
    w.axis(1).parallelize(X)  # inner axis of w


def test_a_sum_whose_bias_is_added_afterwards() -> None:
    program = read_back(with_bias, (4, 6), (8, 6), (8,), (5,))
    (line,) = explain(program, "all")
    assert f"because linear at {at('biased')} sums over an axis that is cut by mesh_x" in line
    assert f"annotated by the user at {at('inner axis of w')}" in line
    assert explain(program, "T3") == [
        "T3 is whole on DeviceMesh{0 1}: no annotation reaches it, and there is one mesh"
    ]


def added() -> None:
    x, w, other = tensor(-1, 6), tensor(8, 6), tensor(8, 6)
    first = ops.linear(x, w)  # the first term
    out(ops.relu(ops.add(first, ops.linear(x, other))))  # the addition
    for tv in (x, w, other):
        tv.set_device_mesh(MESH)
        cut(tv, 1)
        tv.axis(1).parallelize(X)  # cut of a term


def test_a_sum_of_partial_sums_names_the_op_that_sums() -> None:
    read = read_back(added, (4, 6), (8, 6), (8, 6))
    (line,) = explain(read, "all")
    assert line.startswith("Communication 0 (Allreduce of ")
    assert (
        f": because linear at {at('the first term')} sums over an axis that is cut by mesh_x "
        f"(from T1 (forward through linear at {at('the first term')}), "
        f"annotated by the user at {at('cut of a term')})"
    ) in line


def beside() -> None:
    x = tensor(6, -1)
    var, mean = ops.var_mean(ops.neg(x), [1], 0, False)  # statistics
    out(var)
    out(mean)
    rows(var)  # pyright: ignore[reportArgumentType]


def test_another_result_of_the_same_op() -> None:
    program = read_back(beside, (6, 4))
    mean = program.outputs[1]
    (line, *_) = explain(program, f"T{mean.number}")
    assert f"(beside another result through welford at {at('statistics')})" in line
    assert line.endswith(f"annotated by the user at {at('rows')}")


# ------------------------------------------------------------------ placements and costs
def details(program: HostIrContainer, **sizes: int) -> list[dict[str, str]]:
    """Returns, for each communication, the texts of its indented lines by their names."""
    values = {**symbol_values(program, sizes), NUMBER_OF_STREAMS: 4}
    lines = explain(program, "all", predict(program, simulated_schedule(program, values, PLAIN)))
    found: list[dict[str, str]] = []
    for line in lines:
        if not line.startswith("  "):
            found.append({})
            continue
        name, _, text = line.strip().partition(": ")
        found[-1][name] = text
    return found


def test_each_communication_has_its_placements_annotations_and_cost(
    program: HostIrContainer,
) -> None:
    """2000 rows of 6 floats; the hidden features are summed by parts."""
    gather, scatter = details(program, i0=2000)
    assert gather == {
        "placement": "axis 0 split over mesh_x -> replicated",
        "annotated": at("cut of x"),
        "cost": "24.000 kB from each rank, among 2 ranks along mesh_x; 240.0 us alone on plain",
        "instead": "no other sequence of steps makes this change",
    }
    assert scatter == {
        "placement": "partial sums over mesh_x -> axis 0 split over mesh_x",
        "annotated": f"{at('cut of w2')}, {at('cut of y')}",
        "cost": "24.000 kB from each rank, among 2 ranks along mesh_x; 240.0 us alone on plain",
        "instead": "Allreduce + LocalSlice, 48.000 kB from each rank, 2.0 times as much",
    }


def looked_up() -> None:
    table = cast("TensorView", tensor(-1, 6))
    shard(table, DeviceMesh(MESH), [Shard(0)])  # cut of the table
    index = cast("TensorView", ops.cast(tensor(-1), DataType.Int))
    rows = cast("TensorView", ops.embedding_fwd(index, table))  # lookup
    shard(rows, DeviceMesh(MESH), [Shard(1)])  # cut of the columns
    out(rows)


def test_the_sum_of_a_divided_lookup_names_the_lookup_and_the_table() -> None:
    program = read_back(looked_up, (8, 6), (4,))
    (line,) = (line for line in explain(program, "all") if "ReduceScatter" in line)
    lookup = f"embedding_fwd at {at('lookup')}"
    assert f"because {lookup} looks up along an axis that is cut by mesh_x (from T0" in line
    assert f"annotated by the user at {at('cut of the table')}" in line
    scatter = details(program, i0=8)[-1]
    assert scatter["placement"] == "partial sums over mesh_x -> axis 1 split over mesh_x"
    assert scatter["annotated"] == f"{at('cut of the table')}, {at('cut of the columns')}"
    result = program.outputs[0]
    lines = explain(program, f"T{result.number}")
    assert any("is looked up along an axis that mesh_x cuts: from T0" in text for text in lines)


def largest() -> None:
    x = cast("TensorView", tensor(-1, 6))
    x.set_device_mesh(MESH)
    cut(x, 1)
    x.axis(1).parallelize(X)  # columns
    out(ops.max(x, [1]))


def test_partial_results_of_a_maximum_are_no_sums() -> None:
    (one,) = details(read_back(largest, (4, 6)), i0=4)
    assert one["placement"] == "partial results of MAX over mesh_x -> replicated"
    assert one["annotated"] == at("columns")


def turned() -> FusionDefinition:
    """Columns become rows on a mesh of two dimensions; then the rows are gathered."""
    mesh = DeviceMesh([[0, 1], [2, 3]])
    with FusionDefinition() as fd:
        x = fd.define_tensor([8, 8], contiguity=True)
        shard(x, mesh, [Shard(0), Shard(1)])  # both axes
        y = fd.ops.set(x)
        shard(y, mesh, [Shard(0), Shard(0)])  # rows alone
        z = fd.ops.neg(fd.ops.set(y))
        shard(z, mesh, [Replicate(), Replicate()])  # nothing
        fd.add_output(y)
        fd.add_output(z)
    return fd


def test_axes_are_those_of_the_users_tensors() -> None:
    """An all-to-all moves a view with one more axis, and a gather of both dimensions has steps."""
    planned = program_for(turned(), device="cpu")
    found = details(planned.program)
    assert [one["placement"] for one in found] == [
        "axis 0 split over mesh_y, axis 1 split over mesh_x -> axis 0 split over mesh_y and then "
        "mesh_x",
        "axis 0 split over mesh_y and then mesh_x -> axis 0 split over mesh_y",
        "axis 0 split over mesh_y -> replicated",
    ]
    assert found[0]["annotated"] == f"{at('both axes')}, {at('rows alone')}"
    for one in found[1:]:
        assert at("rows alone") in one["annotated"] and at("nothing") in one["annotated"]


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        ([Shard(0)], [Shard(1)], "Allgather + LocalSlice, 3.072 kB from each rank, 4.0 times"),
        ([Shard(0)], [Replicate()], "no other sequence of steps"),
        # A gather of both, and a slice: 7 of 8 parts of 4 kB instead of one.
        (
            [Shard(0), Shard(1)],
            [Replicate(), Shard(1)],
            "Allgather + Allgather + LocalSlice, 3.584",
        ),
    ],
)
def test_the_next_best_plan(source: list[Any], target: list[Any], words: str) -> None:
    """A tensor of 4 kB on 4 ranks, or on 2 x 4."""
    mesh = DeviceMesh(range(4)) if len(source) == 1 else DeviceMesh([range(4), range(4, 8)])
    with FusionDefinition() as fd:
        x = fd.define_tensor([32, 32], contiguity=True, mesh=mesh, placements=source)
        y = fd.ops.set(x)
        shard(y, mesh, target)
        fd.add_output(y)
    (one, *others) = details(program_for(fd).program)
    assert not others and one["instead"].startswith(words)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((8, 10), "ReduceScatter + Allgather, 480 bytes from each rank, as much"),
        ((6, 16), "ReduceScatter + Allgather, 576 bytes from each rank, as much"),
        # 4 ranks divide neither axis.
        ((6, 10), "no other sequence of steps makes this change"),
    ],
)
def test_the_next_best_plan_of_an_allreduce(shape: tuple[int, ...], words: str) -> None:
    mesh = DeviceMesh(range(4))
    with FusionDefinition() as fd:
        x = fd.define_tensor([*shape, 8], contiguity=True, mesh=mesh, placements=[Shard(2)])
        fd.add_output(fd.ops.sum(x, [2]))
    (one,) = details(program_for(fd).program)
    assert one["instead"] == words


def test_a_slice_sends_nothing() -> None:
    one, *_ = details(build(CASES["slice2"]))
    assert one["placement"] == "replicated -> axis 1 split over mesh_x"
    assert one["cost"] == "each rank keeps its part, and nothing is sent"


# ------------------------------------------------------------------ every program
@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.ranks > 1])
def test_every_cut_leads_to_the_user_and_every_communication_to_an_op(name: str) -> None:
    program = parse(build(CASES[name]).full_text())
    for tv in program.tensors():
        for line in explain(program, f"T{tv.number}"):
            assert UNKNOWN not in line
            if "is cut by" in line.split(":")[0]:
                assert "annotated by the user at " in line, line
    lines = [line for line in explain(program, "all") if "annotate the input" not in line]
    assert sum("Communication" in line for line in lines) == len(program.communications())
    assert all(re.search(r": because \w+ at \S+\.py:\d+ |the user's copy at ", x) for x in lines)


def test_what_comes_from_where_does_not_count_for_equality(program: HostIrContainer) -> None:
    text = program.full_text()
    without = parse(text[: text.index("Provenance")] + text[text.index("\nKernel group") :])
    assert without.values.origins == ()
    assert equal(without, program)
    assert all(line.endswith(UNKNOWN) for line in explain(without, "all"))


def test_why_of_a_program_by_hand_says_that_it_has_no_provenance() -> None:
    """Once, the message named a dump that does not exist for such programs."""
    hic = HostIrContainer()
    with hic:
        x = hic.input([2, 4], mesh=DeviceMesh([0, 1]))
        x.axis(0).parallelize(ParallelType.mesh_x)
    (line,) = explain(hic, "T0")
    assert line.startswith("T0 is cut by mesh_x on axis 0; the text does not say where")
    assert line.endswith("that was built by hand has none")


def test_a_ring_is_explained_by_the_tensor_of_which_it_moves_parts() -> None:
    text = """// host program
%HostIrContainer { (T0_g_float[ideviceIdx.x0{2}, iS1{4}] (DeviceMesh{0 1})) -> (T1_g_float[iS2{2}, iS3{4}] (DeviceMesh{0 1})) :
  T1_g_float[iS2{2}, iS3{4}] (DeviceMesh{0 1}) = ALLOCATE(mem_type=global, zero_init=false)
  FOR i3 from 0 to 2:
    T2_g_float[iS4{4}] (DeviceMesh{0 1})
       = HirAliasSelect( T1_g_float[iS2{2}, iS3{4}] (DeviceMesh{0 1}), axis = iS2{2}, index = i3 )
    CollectivePermute 0 (team=(0 1), send_peer=( ( rank + i3 ) % 2 ), recv_peer=( ( rank + i3 ) % 2 ), input=T0_g_float[ideviceIdx.x0{2}, iS1{4}] (DeviceMesh{0 1}), output=T2_g_float[iS4{4}] (DeviceMesh{0 1}), backend=MPI)
    Wait(Communication 0)
} // %HostIrContainer
Provenance :
  T0 deviceIdx.x on axis 0 : user at ring.py:3
  T1 placement : operand from T0 through linear at ring.py:9
"""  # noqa: E501
    program = parse(text)
    assert explain(program, "all") == [
        "CollectivePermute 0 (a copy of T0 -> T1): because linear at ring.py:9 takes T1 whole "
        "along axis 0, and T0 is cut by mesh_x on axis 0 (annotated by the user at ring.py:3)"
    ]
    assert explain(program, "T2")[0].startswith("T2 is a part of T1. T1 is whole on DeviceMesh")


SENDS = """// host program
%HostIrContainer { (T0_g_float[ideviceIdx.x0{2}, iS1{4}] (DeviceMesh{0 1})) -> (T1_g_float[istreamIdx2{2}, iS3{4}] (DeviceMesh{0 1})) :
  T1_g_float[istreamIdx2{2}, iS3{4}] (DeviceMesh{0 1}) = ALLOCATE(mem_type=global, zero_init=false)
  FOR i3 from 0 to 2:
    T2_g_float[iS4{4}] (DeviceMesh{0 1})
       = HirAliasSelect( T1_g_float[istreamIdx2{2}, iS3{4}] (DeviceMesh{0 1}), axis = istreamIdx2{2}, index = i3 )
    StartCoalescing
    P2PCommunication 0 (type=recv, buffer=T2_g_float[iS4{4}] (DeviceMesh{0 1}), peer=( ( rank + i3 ) % 2 ), backend=MPI)
    P2PCommunication 1 (type=send, buffer=T0_g_float[ideviceIdx.x0{2}, iS1{4}] (DeviceMesh{0 1}), peer=( ( rank + i3 ) % 2 ), backend=MPI)
    EndCoalescing 2
    Wait(Communication 2)
} // %HostIrContainer
Provenance :
  T0 deviceIdx.x on axis 0 : user at ring.py:3
  T1 streamIdx on axis 0 : user at ring.py:4
  T1 placement : set from T0 through set at ring.py:9
"""  # noqa: E501


def heads(features: int, *, is_inner: bool = False) -> None:
    """Reshapes features, cut over two devices, to heads of 4, or to the inner side of a merge."""
    x = tensor(3, 5, features)
    size: Any = x.shape[-1]
    shape = [3, size * 5] if is_inner else [3, 5, size // 4, 4]
    out(ops.neg(ops.reshape(ops.neg(x), shape)))
    x.set_device_mesh(MESH)
    cut(x, 2)
    x.axis(2).parallelize(X)


@pytest.mark.parametrize(
    ("features", "end"),
    [
        (
            -1,
            "2 devices are not known to divide both i0 and ( i0 / 4 ). Choose sizes that are "
            "divisible by 2, and give them as numbers in fd.define_tensor([...], ...)",
        ),
        (12, "2 devices do not divide both 12 and 3. Choose sizes that are divisible by 2"),
    ],
)
def test_a_reshape_of_heads_says_which_sizes_would_keep_the_cut(features: int, end: str) -> None:
    program = read_back(lambda: heads(features), (3, 5, 12))
    (line,) = explain(program, "all")
    reason, _, cure = line.partition("; a reshape keeps this split only if ")
    assert "takes T" in reason and "whole along axis 2" in reason
    assert cure == (f"the number of devices divides axis 2 before and after the reshape: {end}")


def test_a_reshape_that_merges_the_inner_side_promises_nothing() -> None:
    program = read_back(lambda: heads(8, is_inner=True), (3, 5, 8))
    (line,) = explain(program, "all")
    assert "whole along axis 2" in line and "keeps this split" not in line


def test_a_send_is_explained_by_what_it_is_received_into() -> None:
    reason = (
        "of T0 -> T1): because the user's copy at ring.py:9 makes T1 whole along axis 0, in the "
        "steps of a stream (annotated by the user at ring.py:4)"
    )
    assert explain(parse(SENDS), "all") == [
        f"P2PCommunication 0 (recv {reason}",
        f"P2PCommunication 1 (send {reason}",
    ]
    alone = "\n".join(line for line in SENDS.splitlines() if "type=recv" not in line)
    assert explain(parse(alone), "all") == [
        "P2PCommunication 1 (send of T0): it has no partner; the program has 1 sends and 0 receives"
    ]


def test_a_tensor_without_a_row_is_not_called_a_missing_section() -> None:
    text = "\n".join(line for line in SENDS.splitlines() if "placement" not in line)
    for line in explain(parse(text), "all"):
        assert line.endswith("-> T1): its Provenance section has no row of T1")


def exchanged() -> None:
    x, w = tensor(-1, 6), tensor(8, 6)
    y: Any = ops.linear(x, w)  # linear of the exchange
    out(y)
    for tv, axis in ((x, 1), (w, 1), (y, 0)):
        tv.set_device_mesh(MESH)
        cut(tv, axis)
    x.axis(1).parallelize(X)  # exchanged, x
    w.axis(1).parallelize(X)
    y.axis(0).parallelize(X)  # exchanged, y
    cut(x, 0)
    x.swizzle1d(0, X)
    x.axis(0).parallelize(ParallelType.stream)


def test_an_exchange_of_parts_of_a_sum_leads_to_both_annotations() -> None:
    receive, send = explain(read_back(exchanged, (4, 6), (8, 6)), "all")
    assert receive.startswith("P2PCommunication 0 (recv of T")
    assert receive.replace("0 (recv", "1 (send") == send
    linear = at("linear of the exchange")
    assert re.search(
        r": because sum at "
        + re.escape(linear)
        + r" takes T\d+ cut by mesh_x on axis 0 \(annotated by the user at "
        + re.escape(at("exchanged, y"))
        + r"\), and T\d+ is cut by mesh_x on axis 2 \(from T0 \(locally, by linear at "
        + re.escape(f"{linear}), annotated by the user at {at('exchanged, x')})")
        + "$",
        send,
    )


def test_more_receives_than_sends_have_partners() -> None:
    def define() -> None:
        x = tensor(8, 4, mesh=[0, 1], cut=0)
        y: Any = ops.set(x)  # handover
        out(y)
        y.set_device_mesh(DeviceMesh([2]))

    program = build(Case(define, ((8, 4),), 3))
    found = explain(program, "all")
    for kind, line in zip(("0 (send", "1 (recv", "2 (recv"), found, strict=True):
        assert line.startswith(f"P2PCommunication {kind} of T2 -> T3): because reshape at ")
        assert f"{at('handover')} takes T3 whole on DeviceMesh{{2}}" in line


# ------------------------------------------------------------------ command and text
def test_the_command(
    program: HostIrContainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "program.txt"
    path.write_text(program.full_text())
    assert main(["why", "T4", str(path)]) == 0
    assert capsys.readouterr().out == "\n".join(explain(program, "T4")) + "\n"
    assert main(["why", "all", str(path)]) == 0
    assert capsys.readouterr().out.count("because") == 2
    for name in ("T99", "seven", "T", "T\u0663"):
        assert main(["why", name, str(path)]) == 1
        assert f"InputError: the program has no tensor {name!r}" in capsys.readouterr().err
    path.write_text(build(CASES["heads"]).full_text())
    assert main(["why", "all", str(path)]) == 0
    assert capsys.readouterr().out == "the program communicates nothing\n"
    assert main(["why", "T0", str(path)]) == 0
    assert capsys.readouterr().out == "T0 has no mesh: no annotation reaches it\n"


def test_the_program_does_not_depend_on_where_it_was_written() -> None:
    """Lines are in the full text only, so that equal definitions share their programs."""
    assert "test_explain.py" not in str(build(Case(gathered, ((4, 6), (8, 6), (6, 8)), 2)))
    fusion = Case(gathered, ((4, 6), (8, 6), (6, 8)), 2).fusion()
    assert fusion.origins == ()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("T7 deviceIdx.x on axis 1 : sideways from T3", "unknown origin 'sideways'"),
        ("T7 deviceIdx.w on axis 1 : user", "unknown parallel type 'deviceIdx.w'"),
        ("T7 colour : user", "expected the origin of a tensor's sharding"),
        ("T7 mesh : forward from 3", "expected the origin of a tensor's sharding"),
        (f"T{'9' * 30} mesh : user", "an integer of 30 digits"),
    ],
)
def test_a_damaged_row(row: str, message: str) -> None:
    with pytest.raises(ParseError, match=message):
        read_origin(Cursor(row))


@pytest.mark.parametrize(
    "row",
    [
        "T7 mesh : user at /home/a b/x : y.py:12",
        "T7 mesh : only",
        "T7 streamIdx on axis 1 : forward from T3 through linear at <stdin>:1",
        "T7 deviceIdx.y on sum : backward from T12 through add",
        "T7 placement : update from T0",
        "T7 placement : operand from T0 through linear for T9 at x.py:3",
    ],
)
def test_rows_print_as_they_were_read(row: str) -> None:
    assert str(read_origin(Cursor(row))) == row


def test_communications_are_named_as_in_the_program(program: HostIrContainer) -> None:
    names = [op.name for op in program.ops if isinstance(op, Communication)]
    lines = explain(program, "all")
    assert all(line.startswith(n.removesuffix(")")) for n, line in zip(names, lines, strict=True))
