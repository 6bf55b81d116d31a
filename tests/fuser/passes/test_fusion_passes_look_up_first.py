"""Lookups are moved in front of the ops that compute their tables: text before and after."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fuser import ops
from fuser.ir.domain.device_mesh import DeviceMesh
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.verify import verify_fusion
from fuser.ops.define import define_tensor
from fuser.passes.fusion_passes import look_up_first

pytestmark = pytest.mark.from_text

D = DataType
BEFORE = """
T3_l_float[iS6{i0}, iS7{i1}]
   = __bfloat2float(T0_g___bfloat[iS0{i0}, iS1{i1}]);
T4_l_float[iS8{i0}, iS9{i1}]
   = T3_l_float[iS6{i0}, iS7{i1}]
   - T1_g_float[iS2{i3}, bS3{1}];
T5_g_float[iS10{i0}, bS11{1}]
   = takeAlongAxis( T4_l_float[iS8{i0}, iS9{i1}], T2_g_int64_t[iS4{i4}, bS5{1}], dim = 1 )
""".strip()
AFTER = """
T7_l___bfloat[iS14{i0}, bS15{1}]
   = takeAlongAxis( T0_g___bfloat[iS0{i0}, iS1{i1}], T2_g_int64_t[iS4{i4}, bS5{1}], dim = 1 )
T6_l_float[iS12{i0}, bS13{1}]
   = __bfloat2float(T7_l___bfloat[iS14{i0}, bS15{1}]);
T5_g_float[iS10{i0}, bS11{1}]
   = T6_l_float[iS12{i0}, bS13{1}]
   - T1_g_float[iS2{i3}, bS3{1}];
""".strip()


def math_of(fusion: Fusion) -> str:
    text = fusion.print_math()
    return text[text.index("{\n") + 2 : text.rindex("} //")].strip()


def defined(build: Callable[..., TensorView]) -> Fusion:
    fusion = Fusion()
    with FusionGuard(fusion):
        x = define_tensor([-1, -1], True, D.BFloat16)
        row = define_tensor([-1, 1], [True, None], D.Float)
        index = define_tensor([-1, 1], [True, None], D.Int)
        for tv in (x, row, index):
            fusion.add_input(tv)
        fusion.add_output(build(x, row, index))
    return fusion


def test_what_computes_a_table_follows() -> None:
    def build(x: TensorView, row: TensorView, index: TensorView) -> TensorView:
        return ops.take_along_axis(ops.sub(ops.cast(x, D.Float), row), index, 1)

    fusion = defined(build)
    assert math_of(fusion) == BEFORE
    look_up_first(fusion)
    verify_fusion(fusion)
    assert math_of(fusion) == AFTER
    look_up_first(fusion)
    assert math_of(fusion) == AFTER


@pytest.mark.parametrize(
    "build",
    [
        # The op costs more than storing its result, or has two tensors.
        lambda x, row, index: ops.take_along_axis(ops.exp(ops.cast(x, D.Float)), index, 1),
        lambda x, row, index: ops.take_along_axis(ops.sum(x, [1], True), index, 0),
        lambda x, row, index: ops.take_along_axis(
            ops.add(x, ops.set(x)), ops.expand(index, x.shape()), 1
        ),
        # Integers: outside of the table a lookup yields 0, not NaN.
        lambda x, row, index: ops.take_along_axis(ops.cast(x, D.Int), index, 1),
        # The result has more axes than the operand of the table.
        lambda x, row, index: ops.embedding_fwd(
            index, ops.sub(ops.cast(x, D.Float), ops.cast(ops.sum(x, [0], True), D.Float))
        ),
        # Extents that may differ.
        lambda x, row, index: ops.gather(ops.cast(x, D.Float), index, 1),
    ],
)
def test_what_stays(build: Callable[..., TensorView]) -> None:
    fusion = defined(build)
    before = math_of(fusion)
    look_up_first(fusion)
    assert math_of(fusion) == before


def test_tables_that_are_read_or_placed_stay() -> None:
    for other in ("output", "reader", "mesh"):
        fusion = Fusion()
        with FusionGuard(fusion):
            x = define_tensor([-1, -1], True, D.BFloat16)
            index = define_tensor([-1], True, D.Int)
            for tv in (x, index):
                fusion.add_input(tv)
            table = ops.cast(x, D.Float)
            fusion.add_output(ops.embedding_fwd(index, table))
            if other == "output":
                fusion.add_output(table)
            elif other == "reader":
                fusion.add_output(ops.relu(table))
            else:
                table.set_device_mesh(DeviceMesh(range(2)))
        before = math_of(fusion)
        look_up_first(fusion)
        assert math_of(fusion) == before, other
