"""Tests runs of hand-written programs: the caller's buffers, persistent streams, errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hostir
from fuser import ops
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import TensorView
from fuser.ir.ops import nodes
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.types import ParallelType
from fuser.support.errors import (
    ArgumentError,
    DefinitionError,
    ExecutionError,
    FuserError,
    InputError,
    VerifyError,
)
from hostir import (
    NUMBER_OF_STREAMS,
    RANK,
    Allocate,
    Deallocate,
    GetCurrentStream,
    HirAliasSelect,
    HostIrContainer,
    HostIrEvaluator,
    IfThenElse,
    PostOnStream,
    SetCurrentStream,
    ShardByStream,
    Stream,
    Synchronize,
    Wait,
    equal,
    parse,
    verify,
)
from hostir.runtime.context import UnitRunner
from multidevice import Communicator, simulate
from tests.support.handmade_programs import (
    ENTRY,
    EXAMPLES,
    LATE,
    counting,
    enter_streams,
    leave_streams,
    rows_on_streams,
    run_here,
    switching,
    unit,
)
from tests.support.limits import HANG_S

Make = Callable[..., Any]


def _assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want.double(), atol=1e-5, rtol=1e-5)


# ------------------------------------------------------------------ HI-4, HI-9: buffers given
# The op as a function of tensors of the program, and what torch makes of the operands; shapes.
WRITERS: dict[str, tuple[Make, Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "matmul": (ops.matmul, torch.matmul, ((5, 6), (6, 4))),
    "linear": (ops.linear, torch.nn.functional.linear, ((5, 6), (4, 6), (4,))),
    "batched linear": (
        ops.linear,
        lambda x, w, b: torch.einsum("imk,wnk->wimn", x, w) + b[:, None, None],
        ((2, 5, 6), (3, 4, 6), (3, 4)),
    ),
    "add": (ops.add, torch.add, ((5, 6), (5, 6))),
    "sub": (ops.sub, torch.sub, ((5, 6), (5, 6))),
    "mul": (ops.mul, torch.mul, ((5, 6), (5, 6))),
    "div": (ops.div, torch.div, ((5, 6), (5, 6))),
    "sum": (lambda x: ops.sum(x, [1]), lambda x: x.sum(1), ((5, 6),)),
    "max": (lambda x: ops.max(x, [0]), lambda x: x.amax(0), ((5, 6),)),
    "min": (lambda x: ops.min(x, [1]), lambda x: x.amin(1), ((5, 6),)),
    "copy": (ops.set, lambda x: x, ((5, 6),)),
    "slice": (lambda x: ops.slice(x, [1, 0], [4, 5]), lambda x: x[1:4, :5], ((5, 6),)),
    "permute": (lambda x: ops.permute(x, [1, 0]), lambda x: x.t(), ((5, 6),)),
    "exp": (ops.exp, torch.exp, ((5, 6),)),
}


def _written(make: Make, shapes: tuple[tuple[int, ...], ...]) -> tuple[HostIrContainer, TensorView]:
    """Returns a program of one op without an allocation, and the op's result."""
    hic = HostIrContainer()
    with hic:
        out = make(*(hic.input(shape) for shape in shapes))
        hic.append(out)
        hic.add_output(out)
    verify(hic)
    return hic, out


@pytest.mark.parametrize("late", [None, "all"])
@pytest.mark.parametrize("name", WRITERS)
def test_ops_write_into_what_the_caller_binds(name: str, late: str | None) -> None:
    make, meaning, shapes = WRITERS[name]
    program, out = _written(make, shapes)
    assert equal(parse(program.full_text()), program)
    evaluator = HostIrEvaluator(program, late_stream=late)
    for _ in range(3):
        given = [torch.randn(shape) for shape in shapes]
        want = meaning(*(x.double() for x in given))
        by_name: dict[Any, Any] = dict(zip(program.inputs, given, strict=True))
        buffers = [torch.full(want.shape, float("nan"))]
        # A strided slice of a larger buffer: every second element of the middle rows' axes.
        wide = torch.full((want.shape[0] + 2, *(2 * n for n in want.shape[1:])), 7.0)
        inside = wide[1:-1, *[slice(None, None, 2)] * (want.ndim - 1)]
        buffers.append(inside)
        for buffer in buffers:
            (got,) = evaluator.run_with_input({**by_name, out: buffer})
            assert got is buffer
            _assert_close(buffer, want)
        # Elements between those of the slice keep their values.
        inside.fill_(7.0)
        assert (wide == 7.0).all()
        # No buffer: a new tensor, or a view, which later runs leave alone.
        (fresh,) = evaluator.run_with_input(by_name)
        kept = fresh.clone()
        evaluator.run_with_input({**by_name, program.inputs[0]: given[0] + 1})
        assert torch.equal(fresh, kept)
        if name in ("slice", "permute"):
            # These show the caller's input.
            runs = evaluator.run(given), evaluator.evaluate(given), [fresh]
            assert {t.data_ptr() for (t,) in runs} == {meaning(given[0]).data_ptr()}
            continue
        fresh.fill_(0.0)
        _assert_close(evaluator.run_with_input(by_name)[0], want)
        for run in (evaluator.run, evaluator.evaluate):
            run(given)[0].fill_(0.0)
            _assert_close(run(given)[0], want)


@pytest.mark.parametrize("method", ["run", "evaluate"])
def test_one_program_takes_either_branch(method: str) -> None:
    """HI-10: a branch turns ones into 3 or 2."""
    evaluator = HostIrEvaluator(counting())
    for is_twice, want in ((True, 3.0), (False, 2.0), (True, 3.0)):
        given = torch.ones(5)
        assert getattr(evaluator, method)([is_twice, given]) == []
        assert given.tolist() == [want] * 5


def test_a_program_without_outputs_writes_where_it_is_told() -> None:
    hic = HostIrContainer()
    with hic:
        x, y = hic.input([4, 8, 32]), hic.tensor([8, 32])
        number = hic.unit(unit(lambda x: ops.sum(ops.add(x, x), [0]), 3))
        hic.append(PostOnStream((x,), (y,), unit=number))
    evaluator = HostIrEvaluator(hic)
    for _ in range(2):
        given, buffer = torch.randn(4, 8, 32), torch.zeros(8, 32)
        assert evaluator.run_with_input({x: given, y: buffer}) == []
        _assert_close(buffer, (2 * given.double()).sum(0))


def test_what_the_caller_binds_is_checked() -> None:
    program, out = _written(ops.matmul, ((5, 6), (6, 4)))
    a, b = program.inputs
    evaluator = HostIrEvaluator(program)
    good: dict[Any, Any] = {a: torch.randn(5, 6), b: torch.randn(6, 4)}
    stranger = HostIrContainer().tensor([5, 4])
    for wrong, words in (
        ({a: good[a]}, "T1"),
        ({**good, out: torch.zeros(5, 5)}, "T2"),
        ({**good, out: torch.zeros(5, 4, dtype=torch.float64)}, "T2"),
        ({**good, out: 3.0}, "T2"),
        ({**good, stranger: torch.zeros(5, 4)}, "is not a tensor or scalar of this program"),
    ):
        with pytest.raises(InputError, match=words):
            evaluator.run_with_input(wrong)


# ------------------------------------------------------------------ HI-5: streams that persist
@pytest.mark.parametrize("method", ["run", "evaluate"])
def test_the_current_stream_stays_after_a_run(method: str) -> None:
    def of(program: HostIrContainer, current: object) -> None:
        evaluator = HostIrEvaluator(program)
        for _ in range(3):
            (out,) = getattr(evaluator, method)([torch.ones(4)])
            assert torch.equal(out, torch.full((4,), 2.0))
            assert evaluator.current_stream() == current

    of(switching(), 2)
    joined = Synchronize(Stream(hostir.as_scalar(2)))
    of(switching(SetCurrentStream(ENTRY), joined), "entry")
    of(switching(SetCurrentStream(Stream(name="Default")), joined), "entry")


def test_a_captured_stream_is_that_of_each_run() -> None:
    # Captured once and for all, the second run would return to the first run's stream.
    program = switching(SetCurrentStream(ENTRY), Synchronize(Stream(hostir.as_scalar(2))))
    leaving = switching()
    evaluator = HostIrEvaluator(program)
    for method in (evaluator.run, evaluator.evaluate, evaluator.run):
        streams = evaluator.binder.devices.streams(torch.device("cpu"))
        for current in ("entry", 7, 8):
            streams.enter(current)
            method([torch.ones(4)])
            assert evaluator.current_stream() == current
        streams.enter("entry")
    HostIrEvaluator(leaving).run([torch.ones(4)])
    assert evaluator.current_stream() == "entry"


# ------------------------------------------------------------------ building
def test_wrong_fields_are_named() -> None:
    hic = HostIrContainer()
    x = hic.input([4, 6])
    i = hostir.RANK
    cases: list[tuple[Callable[[], object], type[FuserError], str]] = [
        (lambda: Allocate(3), ArgumentError, "Allocate.buffer: expected a tensor, got 3"),  # pyright: ignore[reportArgumentType]
        (lambda: IfThenElse(i == 0, then=()), ArgumentError, r"IfThenElse.predicate.*hostir.eq"),  # pyright: ignore[reportArgumentType]
        (lambda: SetCurrentStream("S0"), ArgumentError, "SetCurrentStream.stream"),  # pyright: ignore[reportArgumentType]
        (lambda: Wait(True), ArgumentError, "Wait.number"),
        (lambda: Stream(), DefinitionError, "Stream"),
        (lambda: Stream(name="mine"), DefinitionError, "'mine'"),
        (lambda: Stream("S0"), ArgumentError, "Stream: "),  # pyright: ignore[reportArgumentType]
        (lambda: hic.tensor([2.5]), ArgumentError, r"shape\[0\]: expected .* integer, got 2.5"),  # pyright: ignore[reportArgumentType]
        (lambda: hic.tensor([4, -2]), DefinitionError, "axis 1 has the extent -2"),
        (lambda: hic.select(x, 2, i), DefinitionError, "there is no axis 2 in input 0"),
        (lambda: hic.loop("a").__enter__(), ArgumentError, "stop: expected .*'a'"),  # pyright: ignore[reportArgumentType]
        (lambda: hic.loop(2, True).__enter__(), ArgumentError, "loop.*start: .*True"),
        (lambda: hic.append(4), ArgumentError, "expected an op or a tensor, got 4"),  # pyright: ignore[reportArgumentType]
        (lambda: hic.append(x), DefinitionError, "there is no op to append for input 0"),
        (
            lambda: hic.otherwise().__enter__(),
            DefinitionError,
            "directly after the with block of branch",
        ),
        (lambda: hic.add_input(x), DefinitionError, "T0.* is already an input"),
    ]
    for make, kind, words in cases:
        with pytest.raises(kind, match=words):
            make()


def test_ops_of_another_program_are_refused() -> None:
    one, other = HostIrContainer(), HostIrContainer()
    y = other.tensor([4])
    with pytest.raises(DefinitionError, match="another program"):
        one.append(Allocate(y))


def test_a_forgotten_op_is_named() -> None:
    hic = HostIrContainer()
    words = r"Op add was defined.*test_evaluator_by_hand.py:\d+.*append T1"
    with pytest.raises(DefinitionError, match=words), hic:
        ops.add(hic.input([4]), 1.0)


def test_an_error_in_a_region_leaves_the_program_as_it_was() -> None:
    hic = HostIrContainer()
    x = hic.input([4])
    hic.append(GetCurrentStream(ENTRY))
    with pytest.raises(ZeroDivisionError), hic.loop(3) as i, hic.branch(hostir.eq(i, 0)):
        hic.append(SetCurrentStream(ENTRY))
        raise ZeroDivisionError
    hic.append(SetCurrentStream(ENTRY))
    assert len(hic.ops) == 2 and x in hic.inputs


def test_arithmetic_on_scalars() -> None:
    from fuser.ir.scalar import constructors as sc

    a, b = sc.Symbol("i0", DataType.Index), sc.Symbol("i1", DataType.Index)
    for x in range(-7, 8):
        for y in (-3, -1, 1, 2, 5):
            values = {a: x, b: y}
            for made, want in (
                (a + b, x + y),
                (2 + a, 2 + x),
                (a - b, x - y),
                (3 - a, 3 - x),
                (a * b, x * y),
                (-a, -x),
                (a // b, x // y),
                (7 // b, 7 // y),
                (a % b, x % y),
                (7 % b, 7 % y),
                (a < b, x < y),
                (a <= 2, x <= 2),
                (a > b, x > y),
                (a >= b, x >= y),
                (hostir.eq(a, b), x == y),
                (hostir.ne(a, b), x != y),
                (hostir.logical_not(hostir.eq(a, b)), x != y),
            ):
                assert sc.evaluate(made, values) == want, made
    with pytest.raises(TypeError):
        a + "1"  # pyright: ignore[reportOperatorIssue, reportUnusedExpression]


# ------------------------------------------------------------------ what is odd
def _selecting(index: Callable[[Scalar], Scalar], *, size: int = 4) -> HostIrContainer:
    """Returns a program of (i0, x) that copies element `index` of x."""
    hic = HostIrContainer()
    with hic:
        n, x = hic.scalar(), hic.input([size, 3])
        y = hic.tensor([3])
        hic.append(Allocate(y), GetCurrentStream(ENTRY))
        hic.append(SetCurrentStream(Stream(hostir.as_scalar(1))), Synchronize(ENTRY))
        hic.append(nodes.LoadStoreOp(y, hic.select(x, 0, index(n))))
        hic.append(SetCurrentStream(ENTRY), Synchronize(Stream(hostir.as_scalar(1))))
        hic.add_output(y)
    return hic


def test_an_index_outside_is_named_and_the_next_run_is_right() -> None:
    program = _selecting(lambda n: n - 1)
    verify(program)
    for late in LATE:
        evaluator = HostIrEvaluator(program, late_stream=late)
        for method in (evaluator.evaluate, evaluator.run, evaluator.run):
            x = torch.randn(4, 3)
            for n in (1, 4):
                assert torch.equal(method([n, x])[0], x[n - 1])
            for n in (0, 5):
                words = (
                    rf"HirAliasSelect: index \( i0 - 1 \) = {n - 1} is out of range: axis 0 .* 4 el"
                )
                with pytest.raises(ExecutionError, match=words):
                    method([n, x])
                assert evaluator.current_stream() == "entry"
                assert torch.equal(method([2, x])[0], x[1])


@pytest.mark.parametrize("late", [None, "all"])
def test_an_error_in_a_later_run_restores_the_stream(
    monkeypatch: pytest.MonkeyPatch, late: str | None
) -> None:
    example = EXAMPLES["HI-7 4 streams 8 steps"]
    evaluator = HostIrEvaluator(example.build(), late_stream=late)
    calls, works = 0, UnitRunner.__call__

    def failing(self: UnitRunner, *operands: Any) -> None:
        nonlocal calls
        calls += 1
        # In the middle of the third run.
        if calls == 21:
            raise MemoryError("no")
        works(self, *operands)

    monkeypatch.setattr(UnitRunner, "__call__", failing)
    for run in range(6):
        arguments = example.arguments(run)
        if run == 2:
            with pytest.raises((MemoryError, ExecutionError)):
                evaluator.run(arguments)
        else:
            for out, want in zip(
                evaluator.run(arguments), example.expected(arguments), strict=True
            ):
                _assert_close(out, want)
        assert evaluator.current_stream() == "entry"


@pytest.mark.parametrize("index", [-1, 4])
def test_a_constant_index_outside_is_found_before_running(index: int) -> None:
    with pytest.raises(
        VerifyError, match=rf"HirAliasSelect.*index {index} of axis 0 of .* is out of range"
    ):
        verify(_selecting(lambda _: hostir.as_scalar(index)))


def test_loops_of_no_steps_and_steps_of_two() -> None:
    hic = HostIrContainer()
    with hic:
        start, stop, step = (hic.scalar() for _ in range(3))
        x = hic.input([8])
        with hic.loop(stop, start, step) as i:
            element = hic.select(x, 0, i)
            hic.append(nodes.BinaryOp(element, element, hostir.as_scalar(1.0), kind="add"))
    verify(hic)
    assert equal(parse(hic.full_text()), hic)
    evaluator = HostIrEvaluator(hic)
    for bounds in ((0, 0, 1), (0, 8, 1), (1, 8, 3), (5, 2, 1), (1, 8, 3)):
        for method in (evaluator.run, evaluator.evaluate):
            given, want = torch.zeros(8), torch.zeros(8)
            want[slice(*bounds) if bounds[0] < bounds[1] else slice(0, 0)] += 1
            assert method([*bounds, given]) == []
            assert torch.equal(given, want)
    with pytest.raises(ExecutionError, match="the step i2 has the value 0"):
        evaluator.run([0, 8, 0, torch.zeros(8)])


def test_an_inner_loop_of_the_same_name_is_refused() -> None:
    hic = HostIrContainer()
    with hic:
        x = hic.input([4])
        y = ops.add(x, 1.0)
        hic.append(Allocate(y))
        with hic.loop(2, name="i5"), hic.loop(3, name="i5"):
            hic.append(SetCurrentStream(Stream(name="Default")))
        hic.append(y)
        hic.add_output(y)
    with pytest.raises(VerifyError, match="i5"):
        verify(hic)


def test_loops_in_turn_may_share_a_name() -> None:
    hic = HostIrContainer()
    with hic:
        x = hic.input([4])
        for count in (2, 3):
            with hic.loop(count, name="i5") as i:
                element = hic.select(x, 0, i)
                hic.append(nodes.BinaryOp(element, element, hostir.as_scalar(1.0), kind="add"))
    verify(hic)
    assert equal(parse(hic.full_text()), hic)
    for method in ("run", "evaluate", "run"):
        given = torch.zeros(4)
        getattr(HostIrEvaluator(hic), method)([given])
        assert given.tolist() == [2, 2, 1, 0]


def test_allocations_follow_the_index_of_their_loop() -> None:
    """Ragged chunks of 7 rows by 3: a buffer of 3, 3 and 1 rows per step."""
    hic = HostIrContainer()
    with hic:
        x, y = hic.input([7, 5]), hic.tensor([7, 5])
        hic.append(Allocate(y))
        enter_streams(hic, NUMBER_OF_STREAMS)
        with hic.loop(3) as i:
            hic.append(SetCurrentStream(Stream(i % NUMBER_OF_STREAMS)))
            parts = [hic.tensor([7, 5]) for _ in range(3)]
            for part in parts:
                part.outer_split(0, 3)
                part.axis(0).parallelize(ParallelType.stream)
            inp, out, scratch = parts
            hic.append(ShardByStream(inp, x, i), ShardByStream(out, y, i))
            hic.append(Allocate(scratch, stream_index=i))
            hic.append(nodes.BinaryOp(scratch, inp, hostir.as_scalar(2.0), kind="mul"))
            hic.append(nodes.BinaryOp(out, scratch, inp, kind="add"), Deallocate(scratch))
        leave_streams(hic, NUMBER_OF_STREAMS)
        hic.add_output(y)
    verify(hic)
    assert equal(parse(hic.full_text()), hic)
    for late in LATE:
        evaluator = HostIrEvaluator(hic, late_stream=late)
        for _ in range(3):
            given = torch.randn(7, 5)
            _assert_close(evaluator.run([given])[0], 3 * given)
            _assert_close(evaluator.evaluate([given])[0], 3 * given)


def test_replays_follow_shapes_and_control_scalars() -> None:
    program = rows_on_streams()
    for late in (None, "all"):
        evaluator = HostIrEvaluator(program, late_stream=late, number_of_streams=2)
        for rows in (5, 0, 1, 5, 9, 0, 5):
            given = torch.randn(rows, 6)
            assert torch.equal(evaluator.run([given])[0], given)


def test_a_float_may_be_a_control_scalar() -> None:
    hic = HostIrContainer()
    with hic:
        limit, x = hic.scalar(DataType.Double), hic.input([3])
        with hic.branch(limit < 1.0):
            hic.append(nodes.BinaryOp(x, x, hostir.as_scalar(1.0), kind="add"))
    verify(hic)
    assert equal(parse(hic.full_text()), hic)
    evaluator = HostIrEvaluator(hic)
    for value, want in ((0.5, 1.0), (2.0, 0.0), (0.25, 1.0)):
        given = torch.zeros(3)
        evaluator.run([value, given])
        assert given.tolist() == [want] * 3


def test_evaluators_in_threads_keep_their_streams_apart() -> None:
    example = EXAMPLES["rows"]
    errors: list[BaseException] = []

    def body(late: str | int | None) -> None:
        try:
            for _ in range(5):
                run_here(example, example.build(), None, late=late)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(late,)) for late in (None, "all", 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert errors == []


@pytest.mark.parametrize("peer", [-1, 2])
def test_a_peer_outside_of_the_job_is_named(peer: int) -> None:
    from hostir import P2PCommunication
    from multidevice import DeviceMesh

    hic = HostIrContainer()
    with hic:
        x = hic.input([4], mesh=DeviceMesh([0, 1]))
        hic.append(P2PCommunication(x, RANK * 0 + hic.scalar(), number=0, type="send"), Wait(0))

    def body() -> None:
        evaluator = HostIrEvaluator(hic, Communicator.instance())
        with pytest.raises(VerifyError, match=rf"peer i\d+ = {peer} is no rank"):
            evaluator.run([torch.zeros(4), peer])

    with simulate(2) as world:
        world.run(body)


def test_a_name_that_is_no_stream_number_is_refused_when_it_runs() -> None:
    hic = HostIrContainer()
    with hic:
        n, x = hic.scalar(), hic.input([4])
        y = ops.add(x, 1.0)
        hic.append(GetCurrentStream(ENTRY), SetCurrentStream(Stream(n)), Synchronize(ENTRY))
        hic.append(Allocate(y), y)
        hic.add_output(y)
    evaluator = HostIrEvaluator(hic)
    with pytest.raises(VerifyError, match="Stream i0 = -1"):
        evaluator.run([-1, torch.zeros(4)])
    assert evaluator.current_stream() == "entry"
    evaluator.run([3, torch.zeros(4)])
    assert evaluator.current_stream() == 3


def test_a_missing_wait_is_seen_when_a_stream_is_late() -> None:
    """Without one of its joins, the program is wrong for some late stream and right otherwise."""
    program = rows_on_streams()
    loops = [op for op in program.ops if isinstance(op, hostir.ForLoop)]
    for broken in (loops[0], loops[-1]):
        body = tuple(op for op in broken.body if not isinstance(op, Synchronize))
        ops_ = tuple(op.replace(body=body) if op is broken else op for op in program.ops)
        # The caller's stream has work that the first rows need.
        given = torch.randn(9, 6)
        wrong = 0
        for late in filter(lambda late: late is not None, LATE):
            evaluator = HostIrEvaluator(program.with_ops(ops_), late_stream=late)
            (got,) = evaluator.run([given])
            wrong += not torch.equal(got, given)
        if broken is loops[-1]:
            assert wrong >= 2
        else:
            # Nothing was still running on the caller's stream: there is nothing to miss.
            assert wrong == 0


def test_the_mistake_of_a_select_on_the_wrong_tensor() -> None:
    hic = HostIrContainer()
    x, y = hic.tensor([4, 6]), hic.tensor([4, 6])
    with pytest.raises(VerifyError, match="HirAliasSelect"):
        HirAliasSelect(y, x, RANK, axis=x.domain.logical[0]).verify()


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize("steps", [1, 8])
def test_a_program_that_waits_for_no_stream_leaves_it_to_its_caller(
    streams: int, steps: int
) -> None:
    """HI-7: the program runs, warns about its open streams, and its last stream stays current."""
    hic = HostIrContainer()
    with hic:
        x = hic.input([4, 8, 32])
        number = hic.unit(unit(lambda x: ops.sum(ops.add(x, x), [0]), 3))
        for step in range(steps):
            y = hic.tensor([8, 32])
            hic.append(SetCurrentStream(Stream(hostir.as_scalar(step % streams))))
            hic.append(PostOnStream((x,), (y,), unit=number))
            hic.add_output(y)
    t = torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(0))
    evaluator = HostIrEvaluator(hic)
    with pytest.warns(RuntimeWarning, match="has no Synchronize, so its caller must"):
        results = evaluator.run([t])
    assert len(results) == steps
    for got in results:
        torch.testing.assert_close(got.double(), (t.double() * 2).sum(0), atol=1e-5, rtol=1e-5)
    assert evaluator.current_stream() == (steps - 1) % streams
    # A race within the program still raises an error.
    with HostIrContainer() as again:
        x = again.input([4])
        y = again.tensor([4])
        again.append(
            Allocate(y), SetCurrentStream(Stream(hostir.as_scalar(0))), nodes.LoadStoreOp(y, x)
        )
        again.append(SetCurrentStream(Stream(hostir.as_scalar(1))), nodes.LoadStoreOp(y, x))
        again.add_output(y)
    with pytest.raises(VerifyError, match="must not run"):
        HostIrEvaluator(again).run([torch.ones(4)])


@pytest.mark.parametrize("in_loop", [False, True])
def test_what_is_only_allocated_has_a_shape(in_loop: bool) -> None:
    """HI-11: the last allocation inside a loop is visible after the loop."""
    hic = HostIrContainer()
    with hic:
        y = hic.tensor([2, 3])
        if in_loop:
            with hic.loop(4):
                hic.append(Allocate(y))
        else:
            hic.append(Allocate(y))
        hic.add_output(y)
    verify(hic)
    (got,) = HostIrEvaluator(hic).run([])
    assert (got.shape, got.dtype) == ((2, 3), torch.float32)
