"""Names of tensors and axes in messages."""

from __future__ import annotations

import pytest

from fuser import FusionDefinition, ParallelType
from fuser.ir.naming import axis_words, in_ir, tensor_words

pytestmark = pytest.mark.finding("G21")


def test_tensors_are_called_by_input_or_by_the_op_that_makes_them() -> None:
    with FusionDefinition() as fd:
        x, w = fd.define_tensor([-1, 8]), fd.define_tensor([4, 8])
        y = fd.ops.linear(x, w)
        fd.add_output(y)
    assert tensor_words(w) == "input 1 (T1_g_float)"
    assert tensor_words(y) == "the result of linear (T2_g_float)"


def test_axes_are_called_by_their_position_whatever_was_split_or_merged() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([6, 8, 10])
        y = fd.ops.sum(fd.ops.exp(x), [1])
        fd.add_output(y)
    x.outer_split(1, 2)
    x.axis(1).parallelize(ParallelType.mesh_x)
    assert axis_words(x, x.domain.loop[0]) == "axis 0 of input 0 (T0_g_float)"
    assert axis_words(x, x.domain.loop[1]) == "the part on mesh_x of axis 1 of input 0 (T0_g_float)"
    assert axis_words(x, x.domain.loop[2]) == "axis 1 of input 0 (T0_g_float)"
    x.merge(2)
    assert axis_words(x, x.domain.loop[2]) == "axes 1 and 2 of input 0 (T0_g_float)"
    # Positions in the result of a sum do not count the reduced axes.
    assert axis_words(y, y.domain.logical[2]) == "axis 1 of the result of sum (T2_g_float)"
    assert axis_words(y, y.domain.logical[1]) == "an axis of the result of sum (T2_g_float)"
    assert in_ir(x.axis(0), "T0") == f"\n  in the IR: {x.axis(0)} of T0"
