"""Programs by hand: values of a wrong kind are refused where they are given, in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hostir
from fuser import DataType, ParallelType, TensorView, multidevice, ops
from fuser.multidevice import DeviceMesh
from fuser.support.errors import ArgumentError, DefinitionError, FuserError, ParseError
from hostir import Allocate, HostIrContainer, HostIrEvaluator, Stream, verify
from hostir.ir.ops import LIBRARIES, CollectivePermute, Communication, P2PCommunication
from multidevice.sharding.reshard import TeamOf

Call = Callable[[Any, Any], object]
MESH = DeviceMesh([0, 1])
TEAM = TeamOf(MESH, (ParallelType.mesh_x,))


def entered(region: Any) -> None:
    with region:
        pass


CALLS: list[tuple[Call, type[FuserError], str]] = [
    (lambda p, x: p.select(x, 0, "a"), ArgumentError, "index: expected .*, got 'a' of type str"),
    (lambda p, x: p.select(x, 0, 1.5), ArgumentError, "index: expected .*, got 1.5 of type float"),
    (lambda p, x: p.select(3, 0, 0), ArgumentError, "inp: expected a tensor, got 3"),
    (
        lambda p, x: p.select(x, 0, hostir.as_scalar(1.5)),
        DefinitionError,
        r"the index .*1.5.* into input 0 .*T0.* has the dtype double, expected an integer",
    ),
    (lambda p, x: p.input("ab"), ArgumentError, "shape: expected a list of .*, got 'ab'"),
    (lambda p, x: p.input([1.5]), ArgumentError, r"shape\[0\]: expected .*, got 1.5"),
    (lambda p, x: p.input([3], "float"), ArgumentError, "dtype: expected a dtype"),
    (
        lambda p, x: p.tensor([3], memory="symmetric"),
        ArgumentError,
        "expected MemoryType.symmetric",
    ),
    (lambda p, x: p.tensor([-2]), DefinitionError, "axis 0 has the extent -2, expected at least"),
    (lambda p, x: p.scalar("int"), ArgumentError, "dtype: expected a dtype"),
    (lambda p, x: p.unit(3), ArgumentError, "fusion: expected a Fusion, got 3"),
    (lambda p, x: p.add_input(3), ArgumentError, "value: expected a tensor or a Symbol, got 3"),
    (lambda p, x: p.add_output(3), ArgumentError, "tv: expected a tensor, got 3"),
    (lambda p, x: p.append(None), ArgumentError, "expected an op or a tensor, got None"),
    (lambda p, x: entered(p.loop("a")), ArgumentError, "stop: expected .*, got 'a'"),
    (lambda p, x: entered(p.loop(3, 0.5)), ArgumentError, "start: expected .*, got 0.5"),
    (
        lambda p, x: entered(p.branch("a")),
        ArgumentError,
        "predicate: expected a scalar .*, got 'a'",
    ),
    (
        lambda p, x: entered(p.branch(x == x)),
        ArgumentError,
        "predicate: .*one answer per element: compare scalars",
    ),
    (lambda p, x: entered(p.branch(x == 1)), ArgumentError, "predicate: .*compare scalars"),
    (lambda p, x: Stream(-1), DefinitionError, "must be at least 0, got -1"),  # pyright: ignore[reportArgumentType]
    (lambda p, x: TeamOf(1, 2), ArgumentError, "mesh: expected a DeviceMesh, got 1"),  # pyright: ignore[reportArgumentType]
    (
        lambda p, x: TeamOf(MESH, ParallelType.mesh_x),  # pyright: ignore[reportArgumentType]
        ArgumentError,
        "ptypes: expected a list of ParallelTypes",
    ),
]


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_a_call_that_cannot_be_meant(number: int) -> None:
    call, kind, words = CALLS[number]
    program = HostIrContainer()
    with pytest.raises(kind, match=words) as found, program:
        call(program, program.input([3, 4]))
    if "()" in str(found.value):
        assert f"{__file__}:" in str(found.value)


@pytest.mark.parametrize("kind", ["SendRecv", "LocalSlice", "StepSlice", "CollectivePermute", "x"])
def test_a_communication_of_a_type_that_is_an_op_of_its_own(kind: Any) -> None:
    """Formerly such a program was verified and printed, but reading it raised a KeyError."""
    program = HostIrContainer()
    with program:
        x = program.input([8, 4], mesh=MESH)
        with pytest.raises(ArgumentError, match=rf"Communication.type: expected .*, got '{kind}'"):
            Communication(x, x, number=0, type=kind, team=TeamOf(MESH, (ParallelType.mesh_x,)))


def test_torch_dtypes_are_taken() -> None:
    program = HostIrContainer()
    with program:
        x = program.input([3], torch.float16)
        n = program.scalar(torch.int64)
    assert (x.dtype(), n.dtype) == (DataType.Half, DataType.Int)


def test_a_loop_over_an_axis_of_a_tensor() -> None:
    """A user has only `x.axis(0)`."""
    program = HostIrContainer()
    with program:
        x, y = program.input([-1, 4]), program.tensor([-1, 4])
        y = program.tensor([x.size(0), 4])
        program.append(Allocate(y))
        with program.loop(x.axis(0)) as i:
            row = ops.neg(program.select(x, 0, i))
            program.select(y, 0, i, row)
            program.append(row)
        program.add_output(y)
    given = torch.randn(5, 4)
    assert torch.equal(HostIrEvaluator(program).run([given])[0], -given)
    assert "FOR i" in str(program) and "in iS0{i0}" in str(program)


def test_an_op_writes_into_an_input_as_a_whole() -> None:
    program = HostIrContainer()
    with program:
        x, w = program.input([-1, 4]), program.input([4, 4])
        added: Any = ops.add(ops.mul(x, 2.0), 1.0)
        program.append(added, into=x)
        product: Any = ops.set(ops.matmul(x, w))
        program.append(product, into=x)
    verify(program)
    given, weight = torch.randn(3, 4), torch.randn(4, 4)
    for late in (None, "all"):
        evaluator = HostIrEvaluator(program, late_stream=late)
        for _ in range(2):
            mine = given.clone()
            assert evaluator.run([mine, weight]) == []
            torch.testing.assert_close(mine, (given * 2 + 1) @ weight)


def test_an_op_that_does_not_fit_what_it_is_written_into() -> None:
    cases: list[tuple[Callable[[Any], Any], str]] = [
        (
            lambda x: ops.sum(x, [1]),
            r"sum cannot write .* then append\(ops.set\(T1_l_float\), into=input 0 ",
        ),
        (
            lambda x: ops.cast(x, DataType.Half),
            r"cannot be written into input 0 .* has dtype __half, the second dtype float \(",
        ),
        (lambda x: ops.permute(x, [1, 0]), "cannot write"),
        (lambda x: ops.slice(x, [0, 0], [2, 4]), "4"),
    ]
    for make, words in cases:
        program = HostIrContainer()
        with pytest.raises(FuserError, match=words), program:
            x = program.input([3, 4])
            program.append(make(x), into=x)


@pytest.mark.parametrize(
    ("make", "shape", "expected"),
    [
        (lambda x, w: ops.matmul(x, w), [3, 2], lambda x, w: x @ w),
        (lambda x, w: ops.linear(x, ops.permute(w, [1, 0])), [3, 2], lambda x, w: x @ w),
        (lambda x, w: ops.sum(x, [1]), [3], lambda x, w: x.sum(1)),
        (lambda x, w: ops.permute(x, [1, 0]), [4, 3], lambda x, w: x.T),
        (lambda x, w: ops.slice(x, [0, 0], [2, 4]), [2, 4], lambda x, w: x[:2]),
        (lambda x, w: ops.reshape(x, [12]), [12], lambda x, w: x.reshape(12)),
    ],
    ids=["matmul", "linear", "sum", "permute", "slice", "reshape"],
)
def test_the_advice_where_a_result_cannot_be_written_into_a_tensor(
    make: Any, shape: list[int], expected: Any
) -> None:
    hic = HostIrContainer()
    with hic:
        x, w = hic.input([3, 4]), hic.input([4, 2])
        y, made = hic.tensor(shape), make(x, w)
        with pytest.raises(DefinitionError, match=r"Give T\d.* a buffer \(Allocate\)"):
            hic.append(made, into=y)
        hic.append(Allocate(y), Allocate(made), made)
        hic.append(ops.set(made), into=y)
        hic.append(hostir.Deallocate(made))
        hic.add_output(y)
    verify(hic)
    given, weight = torch.randn(3, 4), torch.randn(4, 2)
    (out,) = HostIrEvaluator(hic).run([given, weight])
    expected_result = expected(given.double(), weight.double())
    torch.testing.assert_close(out.double(), expected_result, atol=1e-5, rtol=1e-5)


def test_constant_sizes_that_differ_are_refused_where_they_are_written() -> None:
    """Formerly the first run found them, and its message blamed an input."""
    program = HostIrContainer()
    with (
        pytest.raises(DefinitionError, match=r"found 5 and 3 in append: T2.* written into T1"),
        program,
    ):
        x, y = program.input([3, 4]), program.tensor([5, 4])
        program.append(Allocate(y))
        program.append(ops.neg(x), into=y)


def test_what_to_do_where_a_sharded_result_cannot_be_written_into_a_tensor() -> None:
    """The advice led to a result without a mesh, which no op on sharded operands may have."""
    hic = HostIrContainer()
    with hic:
        x, y = hic.input([2, 4, 8], mesh=MESH), hic.tensor([2, 4], mesh=MESH)
        for tv in (x, y):
            tv.axis(0).parallelize(ParallelType.mesh_x)
        t = ops.sum(x, [2])
        assert isinstance(t, TensorView)
        with pytest.raises(
            DefinitionError, match=r"Give T2.* the mesh and the parallel types of T1"
        ):
            hic.append(t, into=y)
        t.set_device_mesh(MESH)
        t.axis(0).parallelize(ParallelType.mesh_x)
        hic.append(Allocate(y), Allocate(t), t)
        hic.append(ops.set(t), into=y)  # pyright: ignore[reportArgumentType]
        hic.add_output(y)
    verify(hic)
    full = torch.randn(2, 4, 8)
    with multidevice.simulate(2) as world:
        run = lambda: HostIrEvaluator(hic).run([multidevice.shard_tensor(full, x)])  # noqa: E731
        results = world.run(run)
    for rank, (out,) in enumerate(results):
        torch.testing.assert_close(
            out[0].double(), full[rank].double().sum(1), atol=1e-5, rtol=1e-5
        )


MAKERS: list[tuple[str, Call]] = [
    (
        "Communication 3 (Allreduce)",
        lambda x, backend: Communication(
            x, x, number=3, type="Allreduce", team=TEAM, backend=backend
        ),
    ),
    (
        "P2PCommunication 3 (send)",
        lambda x, backend: P2PCommunication(x, 1, number=3, type="send", backend=backend),  # pyright: ignore[reportArgumentType]
    ),
    (
        "CollectivePermute 3",
        lambda x, backend: CollectivePermute(x, x, 1, 1, number=3, team=TEAM, backend=backend),  # pyright: ignore[reportArgumentType]
    ),
]


@pytest.mark.parametrize("number", range(len(MAKERS)))
def test_a_misspelt_backend_is_refused_with_the_one_that_is_near(number: int) -> None:
    """Formerly the device's library ran it, under the wrong name."""
    name, make = MAKERS[number]
    hic = HostIrContainer()
    with hic:
        x = hic.input([2, 4], mesh=MESH)
        for spelled, near in (("cuda", "CUDA"), ("CUDAX", "CUDA"), ("Nccl", "NCCL")):
            with pytest.raises(ArgumentError) as error:
                make(x, spelled)
            assert str(error.value).startswith(
                f"{name}: expected backend to be one of NCCL, UCC, MPI, "
            )
            assert str(error.value).endswith(f"got {spelled!r}; did you mean {near}?")
        for known in LIBRARIES:
            assert getattr(make(x, known), "backend", "") == known
        hic.append(make(x, "CUDA"))  # pyright: ignore[reportArgumentType]
    text = hic.full_text()
    assert hostir.equal(hostir.parse(text), hic)
    with pytest.raises(ParseError) as error:
        hostir.parse(text.replace("backend=CUDA", "backend=CUDAX"))
    assert f"{name}: expected backend to be one of " in str(error.value)
    assert "got 'CUDAX'; did you mean CUDA?" in str(error.value)
    assert "line 3" in str(error.value)


@pytest.mark.finding("G21")
@pytest.mark.parametrize(
    ("text", "build"),
    {
        "select: there is no axis 7 in input 0 (T0_g_float), which has 2 axes": lambda p, x, y: (
            p.select(x, 7, 0)
        ),
        "select: the index d2 into input 0 (T0_g_float) has the dtype double": lambda p, x, y: (
            p.select(x, 0, p.scalar(DataType.Double))
        ),
        "append: into=T1_g_float needs a tensor op with exactly one result": lambda p, x, y: (
            p.append(hostir.Deallocate(y), into=y)
        ),
        "append: sum cannot write directly into T1_g_float, ": lambda p, x, y: p.append(
            ops.sum(x, [0]), into=y
        ),
        "T2_l___half cannot be written into T1_g_float: the first has dtype": lambda p, x, y: (
            p.append(ops.cast(x, DataType.Half), into=y)
        ),
        "HostIrContainer.append: there is no op to append for T1_g_float": (
            lambda p, x, y: p.append(y)
        ),
    }.items(),
)
def test_calls_that_build_programs_name_tensors_and_have_their_types_below(
    text: str, build: Any
) -> None:
    program = HostIrContainer()
    with program:
        x, y = program.input([-1, 8]), program.tensor([4, 8])
        with pytest.raises(DefinitionError) as error:
            build(program, x, y)
        program.values.exprs = ()
    head, *below = str(error.value).splitlines()
    assert text.lower() in head.lower() and f"(user code at {__file__}:" in head, head
    assert "[" not in head.replace(__file__, "") and "{" not in head
    assert below and all(row.startswith("  in the IR: T") for row in below)


@pytest.mark.finding("G21")
def test_an_op_that_is_forgotten_is_named_with_its_line() -> None:
    program = HostIrContainer()
    words = rf"^Op exp was defined \(user code at {__file__}:\d+\), but .* append T1_l_float\n  in"
    with pytest.raises(DefinitionError, match=words), program:
        ops.exp(program.input([-1, 8]))


@pytest.mark.finding("G21")
def test_an_operand_of_another_program_is_named() -> None:
    other, program = HostIrContainer(), HostIrContainer()
    with other:
        x = other.input([4, 8])
    with program:
        words = r"append: Allocate uses input 0 \(T0_g_float\), .* of this program only \(user code"
        with pytest.raises(DefinitionError, match=words):
            program.append(Allocate(x))


@pytest.mark.finding("G21")
def test_a_field_that_takes_no_tensor_names_it() -> None:
    program = HostIrContainer()
    with program:
        x: Any = program.input([-1, 8])
        with pytest.raises(ArgumentError) as error:
            hostir.Wait(x)
    head, below = str(error.value).splitlines()
    assert head.startswith("Wait.number: expected int, got input 0 (T0_g_float)")
    assert below.strip() == f"in the IR: {x}"
