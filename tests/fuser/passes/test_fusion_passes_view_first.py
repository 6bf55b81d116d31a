"""Reshapes that reductions read are moved in front of elementwise ops: text before and after.

All forms of group norm are compared with torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from fuser import DataType, FusionDefinition, ops
from fuser.ir.domain.device_mesh import DeviceMesh
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.verify import verify_fusion
from fuser.kernels.executor import FusedKernelExecutor
from fuser.ops.define import define_tensor
from fuser.passes.fusion_passes import view_first
from fuser.schedule.reduction import ReductionParams
from tests.fuser.passes.test_fusion_passes_look_up_first import math_of

pytestmark = pytest.mark.from_text

D = DataType
BEFORE = """
T1_l_float[iS2{4}, iS3{6}]
   = __bfloat2float(T0_g___bfloat[iS0{4}, iS1{6}]);
T2_l_float[iS4{4}, iS5{6}]
   = -T1_l_float[iS2{4}, iS3{6}];
T3_l_float[iS6{4}rf, iS8{2}rf, iS9{3}rf]
   = reshape( T2_l_float[iS4{4}, iS5{6}] )
""".strip()


def defined(build: Callable[..., Any], shape: Sequence[int] = (4, 6)) -> Fusion:
    fusion = Fusion()
    with FusionGuard(fusion):
        x = define_tensor(list(shape), True, D.BFloat16)
        fusion.add_input(x)
        made = build(x)
        for out in made if isinstance(made, tuple) else (made,):
            fusion.add_output(out)
    return fusion


def of_groups(x: TensorView) -> TensorView:
    return ops.sum(ops.reshape(ops.neg(ops.cast(x, D.Float)), [4, 2, 3]), dims=[2])


def chain(fusion: Fusion) -> list[str]:
    """Returns the names of the ops, in order."""
    return [op.name for op in fusion.used_exprs()]


@pytest.mark.finding("G37")
def test_reshape_below_a_reduction_comes_first() -> None:
    fusion = defined(of_groups)
    assert math_of(fusion).startswith(BEFORE[: BEFORE.index("T3")])
    assert chain(fusion) == ["cast", "neg", "reshape", "sum"]
    view_first(fusion)
    verify_fusion(fusion)
    assert chain(fusion) == ["reshape", "cast", "neg", "sum"]
    after = math_of(fusion)
    assert "reshape( T0_g___bfloat[iS0{4}, iS1{6}] )" in after
    view_first(fusion)
    assert math_of(fusion) == after


def _with_output(x: TensorView) -> Any:
    wide = ops.cast(x, D.Float)
    return wide, ops.sum(ops.reshape(wide, [4, 2, 3]), dims=[2])


def _with_mesh(x: TensorView) -> Any:
    wide = ops.cast(x, D.Float)
    wide.set_device_mesh(DeviceMesh(range(2)))
    return ops.sum(ops.reshape(wide, [4, 2, 3]), dims=[2])


@pytest.mark.finding("G37")
@pytest.mark.parametrize(
    "build",
    [
        # No reduction.
        lambda x: ops.reshape(ops.cast(x, D.Float), [4, 2, 3]),
        # The operand depends on two tensors, or has another order of axes.
        lambda x: ops.sum(ops.reshape(ops.add(x, ops.neg(x)), [4, 2, 3]), dims=[2]),
        lambda x: ops.sum(ops.reshape(ops.cast(ops.permute(x, [1, 0]), D.Float), [24]), dims=[0]),
        lambda x: ops.sum(ops.reshape(ops.cast(ops.sum(x, [0], True), D.Float), [6]), dims=[0]),
        # The computed tensor has a second reader.
        _with_output,
        _with_mesh,
    ],
)
def test_reshape_that_would_cost_or_change_something_stays(build: Callable[..., Any]) -> None:
    fusion = defined(build)
    before = math_of(fusion)
    view_first(fusion)
    assert math_of(fusion) == before


# ------------------------------------------------------------------ group norm
def _group_norm(fd: FusionDefinition, x: Any, *, groups: int, casts_first: bool) -> Any:
    o, shape = fd.ops, [x.size(k) for k in range(4)]
    if casts_first:
        y = o.reshape(o.cast(x, D.Float), [shape[0], groups, -1])
    else:
        y = o.cast(o.reshape(x, [shape[0], groups, -1]), D.Float)
    var, mean = o.var_mean(y, [2], 0, True)
    z = o.mul(o.sub(y, mean), o.rsqrt(o.add(var, 1e-5)))
    return o.cast(o.reshape(z, shape), x.dtype())


@pytest.mark.finding("G37")
@pytest.mark.parametrize("options", [[], ["schedules_for(h200)", "checked"]], ids=["cpu", "h200"])
@pytest.mark.parametrize("casts_first", [True, False])
@pytest.mark.parametrize("fixed", [True, False], ids=["constants", "symbols"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("is_contiguous", [True, False])
def test_group_norm_is_torchs(
    dtype: torch.dtype, fixed: bool, casts_first: bool, options: list[str], is_contiguous: bool
) -> None:
    x = torch.randn(3, 8, 6, 10 if is_contiguous else 20).to(dtype)[..., :10]
    with FusionDefinition() as fd:
        t = fd.define_tensor(
            list(x.shape) if fixed else [-1] * 4,
            contiguity=[is_contiguous] * 3 + [True],
            dtype=D.BFloat16 if dtype is torch.bfloat16 else D.Float,
        )
        fd.add_output(_group_norm(fd, t, groups=4, casts_first=casts_first))
    for given in (x, x + 1):
        (out,) = fd.execute([given], _enable_options=options)
        expected = torch.nn.functional.group_norm(given.double(), 4)
        limit = 2e-2 if dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(out.double(), expected, rtol=limit, atol=limit)


@pytest.mark.finding("G37")
@pytest.mark.parametrize("fixed", [True, False], ids=["constants", "symbols"])
@pytest.mark.parametrize("casts_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_statistics_of_group_norm_read_rows_in_order_and_in_words(
    dtype: torch.dtype, casts_first: bool, fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    lower = FusedKernelExecutor._lower_alone

    def noted(self: FusedKernelExecutor, *args: Any, **named: Any) -> Any:
        variant = lower(self, *args, **named)
        made.append(variant.params)
        return variant

    monkeypatch.setattr(FusedKernelExecutor, "_lower_alone", noted)
    # Equal definitions would share kernels, so each case has a different shape.
    x = torch.randn(2, 32, 28 if fixed else 32, 44 if casts_first else 52).to(dtype)
    with FusionDefinition() as fd:
        fd.add_output(
            _group_norm(
                fd, fd.from_pytorch(x, static_sizes=True), groups=4, casts_first=casts_first
            )
        )
    fd.execute([x], _enable_options=["schedules_for(h200)"])
    (params,) = (p for p in made if isinstance(p, ReductionParams))
    assert params.inner
    assert params.vector * x.element_size() == 16
