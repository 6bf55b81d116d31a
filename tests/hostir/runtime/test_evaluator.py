"""Tests that runs equal torch, replays equal `evaluate`, and inputs are checked first."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fuser import ops
from fuser.ir.binding import Contents
from fuser.ir.dtypes import DataType
from fuser.ops.define import define_scalar, define_tensor
from fuser.support.errors import (
    ArgumentError,
    DefinitionError,
    ExecutionError,
    FuserError,
    InputError,
    PeerError,
    ProgramMismatchError,
    ShardingError,
)
from hostir import HostIrEvaluator
from hostir.ir.ops import Allocate
from hostir.ir.parser import parse
from hostir.ir.program import HostIrContainer
from multidevice import Communicator, simulate
from tests.support.host_programs import (
    CASES,
    Case,
    build,
    build_for,
    expected,
    out,
    shard,
    tensor,
)


def _aliased(define: Callable[[], None], *shapes: tuple[int, ...]) -> HostIrContainer:
    return build(Case(define, shapes))


# ------------------------------------------------------------------ replay
@pytest.mark.parametrize("name", ["linear_relu_sum", "heads", "sliced_matmul", "encoder1"])
def test_replay_equals_the_reference_bit_for_bit(name: str) -> None:
    case = CASES[name]
    evaluator = HostIrEvaluator(build(case))
    inputs = case.inputs()
    reference = evaluator.evaluate(inputs)
    for _ in range(3):
        for a, b in zip(evaluator.run(inputs), reference, strict=True):
            assert torch.equal(a, b)


def test_a_plan_follows_new_contents_offsets_and_shapes() -> None:
    case = CASES["heads"]
    evaluator = HostIrEvaluator(build(case))
    weight = torch.randn(12, 6)
    for rows in (5, 3, 5, 0, 1):
        for _ in range(2):
            # A slice of a larger buffer: same class of inputs, another storage offset.
            x = torch.randn(2, max(rows, 1), 6)[1][:rows]
            (got,) = evaluator.run([x, weight])
            q = (x.double() @ weight.double().t()).view(rows, 3, 4).permute(1, 0, 2)
            torch.testing.assert_close(got.double(), q @ q.transpose(1, 2), atol=1e-5, rtol=1e-5)


def test_outputs_of_earlier_runs_stay() -> None:
    evaluator = HostIrEvaluator(build(CASES["linear_relu_sum"]))
    inputs = CASES["linear_relu_sum"].inputs()
    first = evaluator.run(inputs)
    kept = [t.clone() for t in first]
    for scale in (2.0, 3.0):
        evaluator.run([t * scale for t in inputs])
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))


def test_nothing_of_a_run_is_kept_but_the_arena() -> None:
    case = CASES["encoder1"]
    evaluator = HostIrEvaluator(build(case))
    inputs = case.inputs()
    outputs = evaluator.run(inputs) + evaluator.run(inputs)
    watched = [weakref.ref(t) for t in (*inputs, *outputs)]
    del inputs, outputs
    gc.collect()
    assert [w() for w in watched if w() is not None] == []


def test_inputs_that_require_grad_are_accepted() -> None:
    case = CASES["linear_relu_sum"]
    evaluator = HostIrEvaluator(build(case))
    inputs = [t.requires_grad_() for t in case.inputs()]
    for _ in range(2):
        for got, want in zip(evaluator.run(inputs), expected(case), strict=True):
            torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def test_scalar_inputs_change_between_runs_of_one_plan() -> None:
    def define() -> None:
        x = tensor(-1)
        scale = define_scalar(None, DataType.Double)
        x.fusion.add_input(scale)
        out(ops.mul(x, ops.mul(scale, 2.0)))

    fusion_case = Case(define, ((4,),))
    user = fusion_case.fusion()
    program = parse(build_for(user, [torch.ones(4), 1.0]).full_text())
    evaluator = HostIrEvaluator(program)
    for value in (1.0, 2.5, -3.0):
        (got,) = evaluator.run([torch.ones(4), value])
        assert torch.equal(got, torch.full((4,), 2 * value))


# ------------------------------------------------------------------ aliases
def test_an_elementwise_update_is_in_place() -> None:
    def define() -> None:
        x, y = tensor(-1, -1), tensor(-1, -1)
        out(ops.add(x, ops.mul(y, 2.0)), x)

    program = _aliased(define, (3, 4), (3, 4))
    assert not any(isinstance(op, Allocate) for op in program.ops)
    _check_update(program)


def test_an_update_whose_old_value_is_read_later_is_copied_at_the_end() -> None:
    def define() -> None:
        x, y = tensor(-1, -1), tensor(-1, -1)
        out(ops.add(x, ops.mul(y, 2.0)), x)
        out(ops.matmul(x, ops.permute(y, [1, 0])))

    program = _aliased(define, (3, 4), (3, 4))
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    evaluator = HostIrEvaluator(program)
    for _ in range(2):
        old = x.clone()
        (product,) = evaluator.run([x, y])
        assert torch.equal(x, old + y * 2.0)
        torch.testing.assert_close(product, old @ y.t())


def test_a_sum_over_the_updated_input_is_not_in_place() -> None:
    def define() -> None:
        x = tensor(-1, -1)
        s = ops.broadcast(ops.sum(x, [1]), [False, True])
        out(ops.sub(x, s), x)

    program = _aliased(define, (3, 4))
    x = torch.randn(3, 4)
    evaluator = HostIrEvaluator(program)
    for _ in range(2):
        want = x.double() - x.double().sum(1, keepdim=True)
        assert evaluator.run([x]) == []
        torch.testing.assert_close(x.double(), want, atol=1e-4, rtol=1e-5)


def _check_update(program: HostIrContainer) -> None:
    evaluator = HostIrEvaluator(program)
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    for _ in range(2):
        want = x + y * 2.0
        assert evaluator.run([x, y]) == []
        assert torch.equal(x, want)


def test_a_visible_update_returns_the_input_itself() -> None:
    def define() -> None:
        x = tensor(-1, -1)
        y = ops.add(x, 1.0)
        out(y)
        out(y, x)

    program = _aliased(define, (3, 4))
    x = torch.zeros(3, 4)
    evaluator = HostIrEvaluator(program)
    for run in (1, 2):
        (got,) = evaluator.run([x])
        assert got.data_ptr() == x.data_ptr()
        assert torch.equal(x, torch.full((3, 4), float(run)))


def test_an_output_beside_an_update_sees_the_old_value() -> None:
    """Both are in one kernel, whose compiler may read the value that was just written."""

    def define() -> None:
        x, y = tensor(-1, -1), tensor(-1, -1)
        out(ops.add(x, ops.mul(y, 2.0)), x)
        out(ops.mul(x, y))

    evaluator = HostIrEvaluator(_aliased(define, (30, 40), (30, 40)))
    x, y = torch.randn(30, 40), torch.randn(30, 40)
    for _ in range(2):
        old = x.clone()
        (product,) = evaluator.run([x, y])
        assert torch.equal(product, old * y)
        assert torch.equal(x, old + y * 2.0)


def test_two_outputs_behind_an_update_see_the_old_value() -> None:
    """All three are in one kernel, and the update is defined first."""

    def define() -> None:
        a, c, x = (tensor(-1, -1) for _ in range(3))
        out(ops.minimum(a, c), x)
        out(ops.add(x, 1.0))
        out(ops.mul(x, c))

    evaluator = HostIrEvaluator(_aliased(define, *[(4, 4)] * 3))
    a, c, x = (torch.randn(4, 4) for _ in range(3))
    for _ in range(2):
        old = x.clone()
        added, product = evaluator.run([a, c, x])
        assert torch.equal(added, old + 1.0) and torch.equal(product, old * c)
        assert torch.equal(x, torch.minimum(a, c))


def test_a_product_behind_an_update_sees_the_old_value() -> None:
    """The kernel that updates x also computes what a matmul reads through a reshape."""

    def define() -> None:
        a, c, x, w = (tensor(-1, -1) for _ in range(4))
        out(ops.minimum(a, c), x)
        turned = ops.reshape(ops.mul(x, 2.0), [x.size(1), x.size(0)])
        out(ops.matmul(turned, w))
        out(ops.sub(x, c))

    evaluator = HostIrEvaluator(_aliased(define, *[(6, 4)] * 3, (6, 5)))
    a, c, x, w = (torch.randint(-4, 5, s).float() for s in [(6, 4)] * 3 + [(6, 5)])
    for _ in range(2):
        old = x.clone()
        product, difference = evaluator.run([a, c, x, w])
        assert torch.equal(product, (2 * old).reshape(4, 6) @ w)
        assert torch.equal(difference, old - c) and torch.equal(x, torch.minimum(a, c))


def test_updates_swap_two_buffers() -> None:
    def define() -> None:
        x, y = tensor(-1, -1), tensor(-1, -1)
        out(x, y)
        out(y, x)

    evaluator = HostIrEvaluator(_aliased(define, (3, 4), (3, 4)))
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    for _ in range(2):
        old = x.clone(), y.clone()
        assert evaluator.run([x, y]) == []
        assert torch.equal(y, old[0]) and torch.equal(x, old[1])


def test_two_updates_of_one_input_are_refused() -> None:
    def define() -> None:
        x = tensor(-1)
        out(ops.add(x, 1.0), x)
        out(ops.add(x, 2.0), x)

    with pytest.raises(
        DefinitionError, match=r"T2.* to be written into T0.*, but T1.* is already written into"
    ):
        Case(define, ()).fusion()


def test_an_update_has_the_shape_of_its_input() -> None:
    def define() -> None:
        x, y = tensor(-1, 4), tensor(-1, 3)
        out(ops.add(y, 1.0), x)

    with pytest.raises(
        DefinitionError,
        match=r"T2.* to be written into T0.*, but has shape .*, and the input has shape",
    ):
        Case(define, ()).fusion()

    def rows() -> None:
        x, y = tensor(-1, 4), tensor(-1, 4)
        out(ops.add(y, 1.0), x)

    evaluator = HostIrEvaluator(_aliased(rows, (2, 4), (2, 4)))
    with pytest.raises(InputError, match=r"axis 0 of T0.*got 1"):
        evaluator.run([torch.zeros(3, 4), torch.zeros(1, 4)])


def test_an_update_of_an_expanded_input_is_refused() -> None:
    def define() -> None:
        x = define_tensor([-1, -1], contiguity=False)
        x.fusion.add_input(x)
        out(ops.add(x, 1.0), x)

    evaluator = HostIrEvaluator(build_for(Case(define, ()).fusion(), [torch.zeros(3, 4)]))
    with pytest.raises(InputError, match=r"T0.* which is updated with T1.*.*strides \(0, 1\)"):
        evaluator.run([torch.zeros(4).expand(3, 4)])


def test_duplicate_and_input_outputs() -> None:
    evaluator = HostIrEvaluator(build(CASES["duplicates"]))
    x = torch.randn(5, 6)
    for _ in range(2):
        y, same, again = evaluator.run([x])
        assert same is x
        assert again is y
        assert torch.equal(y, x + 1.0)


@pytest.mark.parametrize("order", ["xp", "px", "xyp", "xpy", "pxy", "xy"])
def test_an_input_that_updates_others_is_returned_itself(order: str) -> None:
    """Once, it was returned as the tensor that it updates, with the old values."""

    def define() -> None:
        x, y, z = (tensor(-1, -1) for _ in range(3))
        out(ops.relu(z), z)
        for call in order:
            out(z, {"x": x, "y": y, "p": None}[call])

    evaluator = HostIrEvaluator(build_for(Case(define, ()).fusion(), [torch.zeros(3, 4)] * 3))
    for _ in range(2):
        x, y, z = torch.zeros(3, 4), torch.zeros(3, 4), torch.randn(3, 4)
        old = z.clone()
        assert [got is z for got in evaluator.run([x, y, z])] == [True] * order.count("p")
        assert torch.equal(z, old.relu())
        for name, tv in (("x", x), ("y", y)):
            assert torch.equal(tv, old if name in order else torch.zeros(3, 4))


# ------------------------------------------------------------------ bad inputs
_GOOD = [torch.zeros(5, 6), torch.zeros(7, 6), torch.zeros(7)]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (_GOOD[:2], "contains less argument than kernel's input"),
        ([*_GOOD, _GOOD[0]], "Expected 3 inputs, got 4"),
        ([1.0, *_GOOD[1:]], "Expected input 0, T0.*to be an at::Tensor but got scalar 1.0"),
        (
            [torch.zeros(5), *_GOOD[1:]],
            "to be bound to a tensor of rank 2, but got a tensor of rank 1",
        ),
        (
            [torch.zeros(5, 6).half(), *_GOOD[1:]],
            "to be bound to a tensor of dtype float, but got a tensor of dtype __half",
        ),
        (
            [_GOOD[0], torch.zeros(7, 5), _GOOD[2]],
            "input 1, T1.*extent i1 = 6 .*axis 1 of T0.*got 5",
        ),
        ([*_GOOD[:2], torch.zeros(8)], "input 2, T2.*= 7 .*axis 0 of T1.*got 8"),
        ([torch.zeros(6, 5).t(), *_GOOD[1:]], "Stride mismatch with contiguity info.*axis 1"),
        ([_GOOD[0].to("meta"), *_GOOD[1:]], "to be a plain tensor, but it is on device meta"),
    ],
)
def test_bad_inputs_are_named(inputs: list[object], message: str) -> None:
    evaluator = HostIrEvaluator(build(CASES["linear_relu_sum"]))
    with pytest.raises(InputError, match=message):
        evaluator.run(inputs)  # pyright: ignore[reportArgumentType]
    evaluator.run(_GOOD)


@pytest.mark.parametrize("method", ["run", "evaluate", "check", "requests", "prepare"])
def test_junk_inputs_are_refused_before_and_after_a_run(method: str) -> None:
    evaluator = HostIrEvaluator(build(CASES["linear_relu_sum"]))
    junk: list[tuple[Any, str]] = [
        (None, "inputs must be a list of tensors and numbers: .* got None"),
        (3, "inputs must be a list"),
        ([_GOOD[0].numpy(), *_GOOD[1:]], "input 0: .* got ndarray: pass torch.from_numpy"),
        ([{}, *_GOOD[1:]], "input 0: an input must be a tensor or a number, got dict"),
        ([None, *_GOOD[1:]], "input 0"),
        (["x", *_GOOD[1:]], "input 0"),
    ]
    for _ in range(2):
        for inputs, words in junk:
            with pytest.raises(InputError, match=words):
                getattr(evaluator, method)(inputs)
        evaluator.run(_GOOD)


def test_a_storage_that_is_resized_after_a_run_is_refused() -> None:
    """Once, replayed kernels and library calls read freed memory."""
    for name in ("linear_relu_sum", "duplicates"):
        evaluator = HostIrEvaluator(build(CASES[name]))
        inputs = _GOOD if name == "linear_relu_sum" else [torch.zeros(5, 6)]
        for _ in range(2):
            evaluator.run(inputs)
            gone = torch.zeros(5, 6)
            gone.untyped_storage().resize_(0)
            with pytest.raises(InputError, match=r"input 0 .*storage was resized to 0"):
                evaluator.run([gone, *inputs[1:]])


def test_an_error_of_a_later_run_names_op_and_line() -> None:
    """Once, only errors of a first run had op and line."""
    hic = HostIrContainer()
    with hic:
        x, w = hic.input([4, 4]), hic.input([4, 4])
        y = ops.matmul(x, w)
        hic.append(y)
        hic.add_output(y)
    evaluator, good = HostIrEvaluator(hic), torch.ones(4, 4)
    evaluator.run([good, good])
    (known,) = evaluator.cache._known.values()  # pyright: ignore[reportPrivateUsage]
    checked, known.contents = known.contents, Contents([], [], 16)
    gone = torch.ones(4, 4)
    gone.untyped_storage().resize_(0)
    for _ in range(2):
        with pytest.raises(ExecutionError, match=rf"(?s)matmul failed \(RuntimeError.*{__file__}:"):
            evaluator.run([gone, good])
        assert torch.equal(evaluator.run([good, good])[0], good @ good)
    known.contents = checked


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"number_of_streams": "2"}, ArgumentError, "number_of_streams to be an integer, got '2'"),
        (
            {"number_of_streams": None},
            ArgumentError,
            "number_of_streams to be an integer, got None",
        ),
        ({"number_of_streams": 2.0}, ArgumentError, "number_of_streams to be an integer, got 2.0"),
        (
            {"number_of_streams": True},
            ArgumentError,
            "number_of_streams to be an integer, got True",
        ),
        ({"device": "abc"}, InputError, "device='abc'"),
        ({"device": 3.5}, InputError, "device=3.5"),
        ({"late_stream": True}, ExecutionError, "late_stream=True"),
        ({"communicator": 5}, ArgumentError, "communicator: expected a Communicator, got 5"),
        ({"program": 5}, ArgumentError, "program: expected a HostIrContainer, got 5"),
    ],
)
def test_an_evaluator_of_wrong_kinds(
    options: dict[str, Any], kind: type[FuserError], words: str
) -> None:
    with pytest.raises(kind, match=words):
        HostIrEvaluator(**{"program": build(CASES["duplicates"]), **options})


def test_scalars_must_fit_their_dtype() -> None:
    def define() -> None:
        x = tensor(-1)
        n = define_scalar(None, DataType.Int)
        x.fusion.add_input(n)
        out(ops.add(x, n))

    program = build_for(Case(define, ()).fusion(), [torch.ones(4), 1])
    evaluator = HostIrEvaluator(program)
    assert torch.equal(evaluator.run([torch.ones(4), 3])[0], torch.full((4,), 4.0))
    assert torch.equal(evaluator.run([torch.ones(4), 5])[0], torch.full((4,), 6.0))
    with pytest.raises(
        InputError, match=r"^Input 1, i\d+: Scalar value 1.5 is not .* data type: int64"
    ):
        evaluator.run([torch.ones(4), 1.5])
    with pytest.raises(
        InputError, match=r"input 1, i.*, to be a scalar but got float tensor of rank"
    ):
        evaluator.run([torch.ones(4), torch.ones(1)])


# ------------------------------------------------------------------ several ranks
def _shards(case: Case, program: HostIrContainer, rank: int) -> list[torch.Tensor]:
    from multidevice.job.shard_tensor import shard_for_rank

    pairs = zip(case.inputs(), program.inputs, strict=True)
    return [shard_for_rank(t, tv, rank) for t, tv in pairs]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["mlp2", "sequence2", "slice2", "mlp4", "mesh2x2", "encoder2"])
def test_replay_equals_the_reference_on_every_rank(name: str) -> None:
    case = CASES[name]
    program = build(case)

    def body() -> None:
        communicator = Communicator.instance()
        evaluator = HostIrEvaluator(program, communicator)
        mine = _shards(case, program, communicator.rank())
        reference = evaluator.evaluate(mine)
        for _ in range(3):
            for a, b in zip(evaluator.run(mine), reference, strict=True):
                assert torch.equal(a, b)

    with simulate(case.ranks) as world:
        world.run(body)


def test_an_error_on_one_rank_reaches_the_others_and_the_next_run_works() -> None:
    case = CASES["mlp2"]
    program = build(case)

    def body() -> tuple[str, str, list[torch.Tensor]]:
        communicator = Communicator.instance()
        evaluator = HostIrEvaluator(program, communicator)
        mine = _shards(case, program, communicator.rank())
        wrong = mine if communicator.rank() == 0 else [mine[0].half(), *mine[1:]]
        with pytest.raises(FuserError) as error:
            evaluator.run(wrong)
        good = evaluator.run(mine)
        return type(error.value).__name__, str(error.value), good

    with simulate(2) as world:
        first, second = world.run(body)
    assert first[0] == PeerError.__name__
    assert "rank 1 failed: InputError: Expected input 0" in first[1]
    assert second[0] == InputError.__name__
    assert torch.equal(first[2][0], second[2][0])


def test_ranks_with_different_programs_are_told_the_first_different_line() -> None:
    case = CASES["mlp2"]
    program = build(case)
    other = parse(program.full_text().replace("type=Allreduce", "type=Allreduce", 1))
    changed = parse(program.full_text().replace("team=(0 1)", "team=(1 0)", 1))

    def body() -> str:
        communicator = Communicator.instance()
        mine = _shards(case, program, communicator.rank())
        HostIrEvaluator(other, communicator).run(mine)
        text = changed if communicator.rank() else other
        with pytest.raises(ProgramMismatchError) as error:
            HostIrEvaluator(text, communicator).run(mine)
        return str(error.value)

    with simulate(2) as world:
        messages = world.run(body)
    assert messages[0] == messages[1]
    assert "team=(0 1)" in messages[0]
    assert "team=(1 0)" in messages[0]


def test_a_mesh_needs_its_ranks() -> None:
    program = build(CASES["mlp4"])

    def body() -> None:
        with pytest.raises(ShardingError, match=r"names rank 3, but the job has 2 ranks"):
            HostIrEvaluator(program, Communicator.instance())

    with simulate(2) as world:
        world.run(body)


def test_a_rank_outside_the_mesh_skips_everything() -> None:
    case = CASES["mlp2"]
    program = build(case)

    def body() -> torch.Tensor:
        communicator = Communicator.instance()
        mine = _shards(case, program, communicator.rank())
        evaluator = HostIrEvaluator(program, communicator)
        evaluator.run(mine)
        (result,) = evaluator.run(mine)
        return result

    with simulate(3) as world:
        results = world.run(body)
    torch.testing.assert_close(results[0].double(), expected(case)[0], atol=1e-5, rtol=1e-5)
    assert results[2].numel() == 0


def test_an_extent_that_the_mesh_does_not_divide_is_named() -> None:
    def define() -> None:
        x = tensor(-1, 6, mesh=[0, 1])
        out(shard(ops.set(x), 0, [0, 1]))

    program = build(Case(define, ((4, 6),), 2))

    def body() -> None:
        communicator = Communicator.instance()
        evaluator = HostIrEvaluator(program, communicator)
        with pytest.raises(ShardingError, match=r"extent 5 .* is not divisible by the 2 devices"):
            evaluator.run([torch.zeros(5, 6)])
        (part,) = evaluator.run([torch.arange(24.0).view(4, 6)])
        assert part[0, 0].item() == 12 * communicator.rank()

    with simulate(2) as world:
        world.run(body)
