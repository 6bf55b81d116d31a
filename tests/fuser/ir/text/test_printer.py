"""Golden texts of small definitions: numbers, names and layout of the printed math."""
# The printed text has trailing spaces and long lines.
# ruff: noqa: W291, E501

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from fuser import FusionDefinition, ops
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard, active_fusion
from fuser.ir.op import op_text
from fuser.ops.define import define_scalar, define_tensor
from tests.support.definition_copies import again, assert_same

D = DataType


def tensor(*shape: int, dtype: DataType = D.Float) -> TensorView:
    tv = define_tensor(list(shape), dtype=dtype)
    active_fusion().add_input(tv)
    return tv


def add_two() -> TensorView:
    return ops.add(tensor(-1, -1), tensor(-1, -1))


def half_relu() -> TensorView:
    return ops.cast(ops.mul(ops.relu(tensor(-1, dtype=D.Half)), 2.0), D.Half)


def softmax() -> TensorView:
    x = tensor(-1, -1)
    e = ops.exp(ops.sub(x, ops.max(x, dim=1, keepdim=True)))
    return ops.div(e, ops.sum(e, dim=1, keepdim=True))


def permuted() -> TensorView:
    return ops.permute(tensor(-1, 4), [1, 0])


def heads() -> TensorView:
    x = tensor(-1, -1, 384)
    return ops.reshape(x, [x.size(0), x.size(1), 12, 32])


def projection() -> TensorView:
    return ops.linear(tensor(-1, 8), tensor(6, 8), tensor(6))


def product() -> TensorView:
    return ops.matmul(tensor(2, -1, 8), tensor(2, 8, 6))


def sliced() -> TensorView:
    return ops.slice(tensor(-1, 9), [0, 2], [5, 6])


def chosen() -> TensorView:
    x = tensor(-1)
    return ops.where(ops.gt(x, define_scalar(0.0)), x, ops.full([x.size(0)], 3, D.Float))


def expanded() -> TensorView:
    return ops.expand(ops.broadcast(tensor(-1), [True, False]), [7, -1])


GOLDEN: dict[Callable[[], TensorView], str] = {
    add_two: """Inputs:
  T0_g_float[iS0{i0}, iS1{i1}]
  T1_g_float[iS2{i3}, iS3{i4}]
Outputs:
  T2_g_float[iS4{i0}, iS5{i1}]

%kernel_math {
T2_g_float[iS4{i0}, iS5{i1}]
   = T0_g_float[iS0{i0}, iS1{i1}]
   + T1_g_float[iS2{i3}, iS3{i4}];
} // %kernel_math 

""",
    half_relu: """Inputs:
  T0_g___half[iS0{i0}]
Outputs:
  T4_g___half[iS4{i0}]

%kernel_math {
T1_l___half[iS1{i0}]
   = relu(T0_g___half[iS0{i0}]);
T2_l_float[iS2{i0}]
   = __half2float(T1_l___half[iS1{i0}]);
T3_l_float[iS3{i0}]
   = T2_l_float[iS2{i0}]
   * double(2);
T4_g___half[iS4{i0}]
   = __float2half(T3_l_float[iS3{i0}]);
} // %kernel_math 

""",
    softmax: """Inputs:
  T0_g_float[iS0{i0}, iS1{i1}]
Outputs:
  T7_g_float[iS14{i0}, iS15{i1}]

%kernel_math {
T1_l_float[iS2{i0}, rS3{i1}]
   = reduction( T0_g_float[iS0{i0}, iS1{i1}], op = max, initial value = float(-inf), allreduce = false )
T2_l_float[iS4{i0}, bS5{1}]
   = broadcast( T1_l_float[iS2{i0}, rS3{i1}], flags = {false, true} )
T3_l_float[iS6{i0}, iS7{i1}]
   = T0_g_float[iS0{i0}, iS1{i1}]
   - T2_l_float[iS4{i0}, bS5{1}];
T4_l_float[iS8{i0}, iS9{i1}]
   = expf(T3_l_float[iS6{i0}, iS7{i1}]);
T5_l_float[iS10{i0}, rS11{i1}]
   = reduction( T4_l_float[iS8{i0}, iS9{i1}], op = add, initial value = float(0), allreduce = false )
T6_l_float[iS12{i0}, bS13{1}]
   = broadcast( T5_l_float[iS10{i0}, rS11{i1}], flags = {false, true} )
T7_g_float[iS14{i0}, iS15{i1}]
   = T4_l_float[iS8{i0}, iS9{i1}]
   / T6_l_float[iS12{i0}, bS13{1}];
} // %kernel_math 

""",
    permuted: """Inputs:
  T0_g_float[iS0{i0}, iS1{4}]
Outputs:
  T1_g_float[iS3{4}, iS2{i0}]

%kernel_math {
T1_g_float[iS3{4}, iS2{i0}]
   = Set.Permute( T0_g_float[iS0{i0}, iS1{4}] )
} // %kernel_math 

""",
    heads: """Inputs:
  T0_g_float[iS0{i0}, iS1{i1}, iS2{384}]
Outputs:
  T1_g_float[iS3{i0}, iS4{i1}, iS6{12}rf, iS7{32}rf]

%kernel_math {
T1_g_float[iS3{i0}, iS4{i1}, iS6{12}rf, iS7{32}rf] = reshape( T0_g_float[iS0{i0}, iS1{i1}, iS2{384}] )
} // %kernel_math 

""",
    projection: """Inputs:
  T0_g_float[iS0{i0}, iS1{8}]
  T1_g_float[iS2{6}, iS3{8}]
  T2_g_float[iS4{6}]
Outputs:
  T3_g_float[iS5{i0}, iS6{6}, rS7{8}]

%kernel_math {
T3_g_float[iS5{i0}, iS6{6}, rS7{8}]
   = linear(T0_g_float[iS0{i0}, iS1{8}],
            T1_g_float[iS2{6}, iS3{8}],
            T2_g_float[iS4{6}])
} // %kernel_math 

""",
    product: """Inputs:
  T0_g_float[iS0{2}, iS1{i0}, iS2{8}]
  T1_g_float[iS3{2}, iS4{8}, iS5{6}]
Outputs:
  T2_g_float[iS6{2}, iS7{i0}, iS8{6}, rS9{8}]

%kernel_math {
T2_g_float[iS6{2}, iS7{i0}, iS8{6}, rS9{8}]
   = matmul(T0_g_float[iS0{2}, iS1{i0}, iS2{8}],
            T1_g_float[iS3{2}, iS4{8}, iS5{6}])
} // %kernel_math 

""",
    sliced: """Inputs:
  T0_g_float[iS0{i0}, iS1{9}]
Outputs:
  T1_g_float[iS4{( min(5, i0) )}rf, iS5{4}rf]

%kernel_math {
T1_g_float[iS4{( min(5, i0) )}rf, iS5{4}rf]
   = slice( T0_g_float[iS0{i0}, iS1{9}], { {0, ( min(5, i0) ), 1} {2, 6, 1} } )
} // %kernel_math 

""",
    chosen: """Inputs:
  T0_g_float[iS0{i0}]
Outputs:
  T3_g_float[iS3{i0}]

%kernel_math {
T1_l_bool[iS1{i0}]
   = T0_g_float[iS0{i0}]
   > double(0);
T2_l_float[iS2{i0}]
   = full({i0}, float(3));
T3_g_float[iS3{i0}]
   = where(T1_l_bool[iS1{i0}]
  , T0_g_float[iS0{i0}]
  , T2_l_float[iS2{i0}]);
} // %kernel_math 

""",
    expanded: """Inputs:
  T0_g_float[iS0{i0}]
Outputs:
  T2_g_float[bS3{1 ex 7}, iS4{i0}]

%kernel_math {
T1_l_float[bS1{1}, iS2{i0}]
   = broadcast( T0_g_float[iS0{i0}], flags = {true, false} )
T2_g_float[bS3{1 ex 7}, iS4{i0}] = expand( T1_l_float[bS1{1}, iS2{i0}], {7, i0} )
} // %kernel_math 

""",
}


@pytest.mark.parametrize("build", GOLDEN, ids=lambda f: f.__name__)
def test_print_math(build: Callable[[], TensorView]) -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        fusion.add_output(build())
    assert fusion.print_math() == GOLDEN[build]


# ------------------------------------------------------------------ the order of ops
def out_of_order() -> FusionDefinition:
    """Defines ops in another order than the outputs need; no output depends on one of them."""
    with FusionDefinition() as fd:
        x, y = fd.define_tensor([4]), fd.define_tensor([4])
        first, second = fd.ops.exp(x), fd.ops.sin(y)
        fd.ops.cos(x)
        total = fd.ops.add(second, first)
        early, late = (fd.ops.uniform(0.0, 1.0, [4]) for _ in range(2))
        mean, _ = fd.ops.var_mean(total, 0)
        fd.add_output(fd.ops.neg(late))
        fd.add_output(mean)
        fd.add_output(early)
        fd.add_output(first)
    return fd


@pytest.mark.finding("float constants")
def test_math_has_the_ops_by_use_from_the_first_output_on() -> None:
    text = out_of_order().fusion.print_math()
    results = re.findall(r"^T(\d+)_", text.partition("%kernel_math {")[2], re.MULTILINE)
    # The second uniform and its neg; sin, exp, their sum, its variance; the first uniform.
    assert results == ["7", "12", "3", "2", "5", "8", "9", "10", "11", "6"]


@pytest.mark.finding("float constants")
def test_math_of_a_program_is_complete_and_always_the_same() -> None:
    fusion = out_of_order().fusion
    text = fusion.print_math()
    assert all(op_text(op) in text for op in fusion.used_exprs())
    assert text.count("\n   = ") == sum(len(op.outputs) == 1 for op in fusion.used_exprs())
    assert text == out_of_order().fusion.print_math() == fusion.copy()[0].print_math()
    # All ops, in the order of the definition.
    everything = fusion.print_math(from_outputs_only=False)
    places = [everything.index(op_text(op)) for op in fusion.exprs]
    assert places == sorted(places)


@pytest.mark.finding("float constants")
def test_repr_keeps_the_order_of_random_ops_and_so_their_numbers() -> None:
    fd = out_of_order()
    twin = again(fd)
    inputs = [torch.randn(4), torch.randn(4)]
    found: list[list[torch.Tensor]] = []
    for one in (fd, twin):
        torch.manual_seed(5)
        found.append(one.execute(inputs))
    assert_same(*found)


@pytest.mark.finding("float constants")
def test_math_of_a_long_chain_takes_no_recursion() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([4])
        for _ in range(3000):
            x = fd.ops.neg(x)
        fd.add_output(x)
    assert fd.fusion.print_math().count("\n   = -") == 3000
