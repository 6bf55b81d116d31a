"""Layout inference: the operand that a result follows, orders through views, kept orders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from fuser import FusionDefinition, ops
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.memory_layout import is_contiguous, memory_order
from fuser.ir.text.printer import domain_text
from fuser.ops.define import define_tensor
from fuser.ops.reference.meaning import evaluate_fusion
from fuser.passes.infer_layouts import infer_layouts
from tests.support.sharded_fusions import tensor

pytestmark = pytest.mark.from_text

Shape = Sequence[int]
SIZES = (2, 6, 3, 5)
ROWS, LAST = (0, 1, 2, 3), (0, 2, 3, 1)
Given = tuple[Shape, Shape]
"""Shape and memory order of an input, outermost first."""


def order_of(tv: TensorView) -> tuple[int, ...]:
    return tuple(p for p, _ in memory_order(tv))


def laid(shape: Shape, order: Shape, seed: int = 0) -> torch.Tensor:
    """Returns a dense tensor whose axes have this order in memory."""
    made = torch.randn(
        [shape[p] for p in order],
        generator=torch.Generator().manual_seed(seed),
        dtype=torch.float64,
    )
    return made.permute([list(order).index(p) for p in range(len(shape))])


def full_like(x: TensorView) -> TensorView:
    return ops.full(x.shape(), 1.0, DataType.Double)


def batch_norm(x: TensorView) -> TensorView:
    var, mean = ops.var_mean(x, [0, 2, 3], 0, True)
    return ops.mul(ops.sub(x, mean), ops.rsqrt(ops.add(var, 1e-5)))


def group_norm(x: TensorView) -> TensorView:
    parts = ops.reshape(x, [2, 3, 2, 3, 5])
    var, mean = ops.var_mean(parts, [2, 3, 4], 0, True)
    normal = ops.mul(ops.sub(parts, mean), ops.rsqrt(ops.add(var, 1e-5)))
    return ops.reshape(normal, list(SIZES))


X: Given = (SIZES, LAST)
Y: Given = (SIZES, ROWS)
Z: Given = (SIZES, (3, 1, 0, 2))
# Name -> (definition, inputs as (shape, memory order), memory order of the result).
CASES: dict[str, tuple[Callable[..., Any], Sequence[Given], Shape]] = {
    "an op follows its operand": (ops.relu, [X], LAST),
    "through several ops": (lambda x: ops.exp(ops.neg(ops.cast(x, DataType.Double))), [X], LAST),
    "of equal operands the first": (ops.add, [X, Y], LAST),
    "of equal operands the first, here the rows": (ops.add, [Y, X], ROWS),
    "of three": (ops.where, [X, Z, Y], LAST),
    "a broadcast operand says less": (ops.add, [((6, 1, 1), (0, 1, 2)), X], LAST),
    "so does one of fewer axes": (ops.mul, [((3, 5), (1, 0)), X], LAST),
    "a factory has no order": (lambda x: ops.add(full_like(x), x), [X], LAST),
    "a set is an op": (ops.set, [X], LAST),
    "kept axes of a sum": (lambda x: ops.sum(x, [0]), [X], (1, 2, 0)),
    "the kept axis of several is a reduced one": (lambda x: ops.sum(x, [1]), [X], (0, 1, 2)),
    "reductions that keep axes": (lambda x: ops.max(x, [2], keepdim=True), [Z], (3, 1, 2, 0)),
    "batch norm": (batch_norm, [X], LAST),
    "group norm": (group_norm, [X], LAST),
    "a new axis": (lambda x: ops.broadcast(x, [False, True, False, False, False]), [X], ()),
    "a new axis that is filled": (
        lambda x, y: ops.add(ops.broadcast(x, [False, True, False]), y),
        [((4, 3), (1, 0)), ((4, 7, 3), (0, 1, 2))],
        (0, 1, 2),
    ),
    "a permutation keeps memory as it is": (lambda x: ops.permute(x, [3, 0, 1, 2]), [X], ()),
    "and undone": (lambda x: ops.relu(ops.permute(x, [0, 2, 3, 1])), [X], ROWS),
    "of rows": (lambda x: ops.relu(ops.permute(x, [1, 0])), [((4, 3), (0, 1))], (1, 0)),
    "a split axis": (lambda x: ops.reshape(x, [2, 2, 3, 3, 5]), [X], (0, 3, 4, 1, 2)),
    "axes that lie one behind the other, merged": (
        lambda x: ops.reshape(x, [2, 6, 15]),
        [X],
        (0, 2, 1),
    ),
    "axes that lie apart, merged": (lambda x: ops.reshape(x, [2, 18, 5]), [X], (0, 1, 2)),
    "axes in the other order, merged": (
        lambda x: ops.reshape(x, [12, 5]),
        [((4, 3, 5), (1, 0, 2))],
        (0, 1),
    ),
    "a slice": (lambda x: ops.slice(x, [0, 1, 0, 2], [2, 5, 3, 4]), [X], LAST),
    "a pad": (lambda x: ops.pad(x, [1, 2, 0, 1]), [X], LAST),
    "a cat": (lambda x, y: ops.cat([x, y], 1), [X, Y], LAST),
    "what one operand leaves open another one says": (
        ops.add,
        [((2, 6, 1, 1), (1, 0, 2, 3)), ((1, 1, 3, 5), (0, 1, 3, 2))],
        (1, 0, 3, 2),
    ),
    "a linear writes rows": (ops.linear, [X, ((4, 5), (1, 0))], ROWS),
    "a matmul writes rows": (ops.matmul, [((4, 3), (1, 0)), ((3, 5), (1, 0))], (0, 1)),
    "what follows a matmul": (
        lambda x, y: ops.relu(ops.matmul(x, y)),
        [((4, 3), (1, 0)), ((3, 5), (1, 0))],
        (0, 1),
    ),
    "a declared order": (lambda x: ops.stride_order(x, [0, 1, 2, 3]), [X], (3, 2, 1, 0)),
    "declared rows": (lambda x: ops.stride_order(ops.neg(x), [3, 2, 1, 0]), [X], ROWS),
    "what follows a declared order": (
        lambda x: ops.relu(ops.stride_order(x, [3, 2, 1, 0])),
        [X],
        ROWS,
    ),
}


# The cases whose result is a view of the input; in the twin, it has no gaps.
VIEWS = {
    "a new axis",
    "a permutation keeps memory as it is",
    "a split axis",
    "axes that lie one behind the other, merged",
    "a slice",
}


def define(build: Callable[..., Any], given: Sequence[Given]) -> tuple[Fusion, TensorView]:
    fusion = Fusion()
    with FusionGuard(fusion):
        inputs: list[TensorView] = []
        for shape, order in given:
            strides = [len(shape) - 1 - list(order).index(p) for p in range(len(shape))]
            inputs.append(define_tensor(shape, dtype=DataType.Double, stride_order=strides))
            fusion.add_input(inputs[-1])
        out = build(
            *(ops.gt(x, 0.0) if build is ops.where and x is inputs[0] else x for x in inputs)
        )
        fusion.add_output(out)
    return fusion, out


@pytest.mark.parametrize("case", CASES)
def test_a_result_lies_in_the_order_that_it_follows(case: str) -> None:
    build, given, expected = CASES[case]
    fusion, out = define(build, given)
    infer_layouts(fusion)
    if expected:
        assert order_of(out) == tuple(expected)
    # The inputs may have gaps; a view of one has the same gaps.
    assert is_contiguous(out) or case in VIEWS
    # The twin runs, and its result has the layout that the pass chose.
    inputs = [laid(shape, order, k) for k, (shape, order) in enumerate(given)]
    with FusionDefinition() as fd:
        tvs = [fd.from_pytorch(x) for x in inputs]
        if build is ops.where:
            tvs[0] = ops.gt(tvs[0], 0.0)
        fd.add_output(build(*tvs))
    (found,) = fd.execute(inputs)
    (wanted,) = evaluate_fusion(fd.fusion, inputs, dtype=torch.float64)
    torch.testing.assert_close(found, wanted)
    by_size = [p for p in order_of(out) if found.shape[p] > 1]
    assert [found.stride(p) for p in by_size] == sorted(found.stride(p) for p in by_size)[::-1]
    assert (found.untyped_storage().data_ptr() == inputs[0].untyped_storage().data_ptr()) == (
        case in VIEWS
    )
    if case not in VIEWS:
        assert found.untyped_storage().nbytes() == found.numel() * found.element_size()


def test_new_axes_and_permutations_leave_memory_as_it_is() -> None:
    for case in ("a new axis", "a permutation keeps memory as it is"):
        build, given, _ = CASES[case]
        fusion, out = define(build, given)
        infer_layouts(fusion)
        x = laid(*given[0])
        (found,) = evaluate_fusion(fusion, [x], dtype=torch.float64)
        assert found.data_ptr() == x.data_ptr(), "the twin is torch's view"
        stored = [p for p in order_of(out) if found.shape[p] > 1]
        assert stored == sorted(stored, key=lambda p, t=found: -t.stride(p))


def test_the_text_before_and_after() -> None:
    fusion, out = define(ops.relu, [X])
    before = """
T1_l_double[iS4{2}, iS5{6}, iS6{3}, iS7{5}]
 logical domain: (iS4{2}, iS5{6}, iS6{3}, iS7{5})
 contiguity: t t t t
 loop domain: (iS4{2}, iS5{6}, iS6{3}, iS7{5})
"""
    after = """
T1_l_double[iS4{2}, iS5{6}, iS6{3}, iS7{5}]
 logical domain: (iS4{2}, iS5{6}, iS6{3}, iS7{5})
 allocation domain: (iS4{2}, iS6{3}, iS7{5}, iS5{6})
 contiguity: t t t t
 loop domain: (iS4{2}, iS5{6}, iS6{3}, iS7{5})
"""
    assert domain_text(out).replace("_g_", "_l_") == before.strip()
    infer_layouts(fusion)
    assert domain_text(out).replace("_g_", "_l_") == after.strip()
    infer_layouts(fusion)
    assert domain_text(out).replace("_g_", "_l_") == after.strip(), "a second run changes nothing"


def test_rows_get_no_allocation_domain() -> None:
    fusion, out = define(ops.add, [Y, X])
    infer_layouts(fusion)
    assert out.domain.allocation == ()


def test_repeated_axes_of_inputs_have_no_order() -> None:
    """In x[i, j] = v[i], memory has j outermost with stride 0, which is no order."""
    for repeated, expected in ((True, (0, 1)), (False, (1, 0))):
        fusion, out = define(ops.relu, [((4, 3), (1, 0))])
        (x,) = fusion.inputs
        assert isinstance(x, TensorView)
        axes = [x.domain.no_reductions[1].number] if repeated else []
        infer_layouts(fusion, repeated=axes)
        assert order_of(out) == expected


def test_batches_of_matrices_lie_as_torch_reads_them() -> None:
    """A matmul over heads would copy an operand whose head axis is inside of its rows."""
    fusion = Fusion()
    with FusionGuard(fusion):
        x = define_tensor([2, 5, 3, 4], dtype=DataType.Double)
        fusion.add_input(x)
        scaled = ops.mul(ops.permute(x, [0, 2, 1, 3]), 0.5)
        turned = ops.permute(scaled, [0, 1, 3, 2])
        shown = ops.neg(scaled)
        for out in (ops.matmul(scaled, turned), shown):
            fusion.add_output(out)
    infer_layouts(fusion)
    assert order_of(scaled) == (0, 1, 2, 3)
    assert order_of(shown) == (0, 2, 1, 3), "an output follows the input all the same"


def test_fixed_tensors_keep_their_order_and_pass_on_the_inputs() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        x = define_tensor([-1, -1], dtype=DataType.Double, stride_order=[0, 1])
        fusion.add_input(x)
        sent = ops.relu(x)
        out = ops.neg(sent)
        fusion.add_output(out)
    infer_layouts(fusion, fixed={sent})
    assert (order_of(sent), order_of(out)) == ((0, 1), (1, 0))


def test_parts_lie_as_the_tensor_that_they_are_parts_of() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        x = define_tensor([-1, -1], dtype=DataType.Double, stride_order=[0, 1])
        fusion.add_input(x)
        sent = tensor(ops.relu(x))
        part, kept = tensor(ops.set(sent)), tensor(ops.neg(x))
        other = tensor(ops.set(kept))
        fusion.add_output(ops.add(part, other))
    parts = {fusion.definition(part), fusion.definition(other)}
    infer_layouts(fusion, fixed={sent}, is_part=parts.__contains__)
    assert (order_of(part), order_of(other)) == ((0, 1), (1, 0))


def test_what_is_written_into_an_input_lies_as_that_does() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        x, y = (define_tensor([-1, -1], stride_order=order) for order in ([1, 0], [0, 1]))
        fusion.add_input(x)
        fusion.add_input(y)
        out = ops.add(x, y)
        fusion.add_output(out, y)
    infer_layouts(fusion)
    assert order_of(out) == order_of(y) == (1, 0)
