"""Reductions compared with torch: forms of the call, dtypes, broadcast, expanded and empty axes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from fuser import ops
from fuser.ir.binding import bind_inputs
from fuser.ir.dtypes import DataType, to_torch
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.ops.nodes import FullOp, ReductionOp, SqueezeOp
from fuser.ir.verify import verify_fusion
from fuser.ops.define import define_tensor
from fuser.ops.reference.meaning import evaluate_fusion
from fuser.passes.concretize import concretize
from fuser.support.errors import DefinitionError, DtypeError

D = DataType
Build = Callable[[TensorView], object]


def run(x: torch.Tensor, dtype: DataType, build: Build) -> tuple[Fusion, list[torch.Tensor]]:
    """Builds the op on a tensor like x with symbolic sizes, concretizes it and evaluates it in
    float64."""
    fusion = Fusion()
    with FusionGuard(fusion):
        tv = define_tensor([-1] * x.ndim, dtype=dtype)
        fusion.add_input(tv)
        built = build(tv)
        for out in built if isinstance(built, tuple) else (built,):
            fusion.add_output(out)  # pyright: ignore[reportArgumentType]
    verify_fusion(fusion)
    concrete, _ = concretize(fusion, bind_inputs(fusion, [x]))  # pyright: ignore[reportArgumentType]
    return concrete, evaluate_fusion(concrete, [x], dtype=torch.float64)


REFERENCES: dict[str, Callable[..., torch.Tensor]] = {
    "sum": lambda x, dims, keepdim: torch.sum(x, dims, keepdim),
    "max": lambda x, dims, keepdim: torch.amax(x, dims, keepdim),
    "min": lambda x, dims, keepdim: torch.amin(x, dims, keepdim),
}


@pytest.mark.parametrize("name", ["sum", "max", "min"])
@pytest.mark.parametrize("dtype", [D.Double, D.Half, D.Int32])
def test_dims_and_keepdim(name: str, dtype: DataType) -> None:
    torch.manual_seed(1)
    x = (torch.randn(3, 1, 7) * 5).to(to_torch(dtype))
    wide = x.double() if x.dtype.is_floating_point else x.long()
    for n in (1, 2, 3):
        for dims, keep in itertools.product(itertools.combinations((0, 1, -1), n), (False, True)):

            def build(
                tv: TensorView, dims: tuple[int, ...] = dims, keep: bool = keep
            ) -> TensorView:
                return getattr(ops, name)(tv, dims=list(dims), keepdim=keep)

            _, (out,) = run(x, dtype, build)
            expected = REFERENCES[name](wide, dims, keep)
            torch.testing.assert_close(out, expected.to(out.dtype))
    _, (out,) = run(x, dtype, lambda tv: getattr(ops, name)(tv))
    torch.testing.assert_close(out, REFERENCES[name](wide, (0, 1, 2), False).to(out.dtype))


def test_prod_and_dtypes() -> None:
    x = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32)
    fusion, (out,) = run(x, D.Int32, lambda tv: ops.prod(tv, dim=1))
    assert out.tolist() == [6, 120] and fusion.outputs[0].dtype() is D.Int
    fusion, (out,) = run(x > 2, D.Bool, lambda tv: ops.sum(tv, dim=0))
    assert out.tolist() == [1, 1, 2] and fusion.outputs[0].dtype() is D.Int
    fusion, _ = run(x, D.Int32, lambda tv: ops.sum(tv, dims=[0], dtype=D.Float))
    assert fusion.outputs[0].dtype() is D.Float
    fusion, _ = run(x, D.Int32, lambda tv: ops.sum(tv, D.Double))
    assert fusion.outputs[0].dtype() is D.Double


def test_the_logical_domain_keeps_reduction_axes() -> None:
    with FusionGuard(Fusion()):
        x = define_tensor([-1, -1])
        assert str(ops.sum(x, dim=1)) == "T1_l_float[iS2{i0}, rS3{i1}]"


def test_broadcast_axes_are_squeezed_and_expanded_ones_counted() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        x = define_tensor([-1, 1, 4], contiguity=[True, None, None], dtype=D.Half)
        fusion.add_input(x)
        for name in ("sum", "prod", "max"):
            out = getattr(ops, name)(x, dims=[1, 2])
            assert out.dtype() is D.Half
            fusion.add_output(out)
        fusion.add_output(ops.sum(x, dims=[0, 2]))
        var, mean = ops.var_mean(ops.cast(x, D.Double), [0, 2])
        fusion.add_output(var)
        fusion.add_output(mean)
    kinds = [type(e) for e in fusion.exprs]
    assert SqueezeOp in kinds and kinds.count(ReductionOp) == 1
    data = (torch.rand(3, 1, 1) + 0.5).half().expand(3, 1, 4)
    total, product, largest, both, var, mean = evaluate_fusion(fusion, [data], dtype=torch.float64)
    wide = data.double()
    torch.testing.assert_close(total, wide.sum((1, 2)), rtol=1e-3, atol=0)
    torch.testing.assert_close(product, wide.prod(2).prod(1), rtol=1e-3, atol=0)
    torch.testing.assert_close(largest, wide.amax((1, 2)))
    torch.testing.assert_close(both, wide.sum((0, 2)), rtol=1e-3, atol=0)
    torch.testing.assert_close(var, torch.var(wide, (0, 2)))
    torch.testing.assert_close(mean, torch.mean(wide, (0, 2)))


@pytest.mark.parametrize("correction", [0, 1, 2])
@pytest.mark.parametrize("shape", [(4, 6), (1, 5), (7, 1), (1, 1), (0, 3), (3, 0)])
@pytest.mark.filterwarnings("ignore:var.*degrees of freedom")
def test_variance(shape: tuple[int, int], correction: int) -> None:
    torch.manual_seed(2)
    x = torch.randn(shape, dtype=torch.float64)
    for dims in ([0], [1], [0, 1]):

        def build(tv: TensorView, dims: list[int] = dims) -> object:
            keep = ops.var_mean(tv, dims, correction, True)
            return (ops.var(tv, dims, correction), *ops.var_mean(tv, dims, correction), *keep)

        _, outs = run(x, D.Double, build)
        var = torch.var(x, dims, correction=correction)
        mean = torch.mean(x, dims)
        kept = torch.var(x, dims, correction=correction, keepdim=True)
        expected = (var, var, mean, kept, torch.mean(x, dims, keepdim=True))
        for out, ref in zip(outs, expected, strict=True):
            torch.testing.assert_close(out, ref, equal_nan=True)


def test_welford() -> None:
    x = torch.arange(12, dtype=torch.float64).reshape(3, 4)
    fusion, (avg, m2, n) = run(x, D.Double, lambda tv: ops.welford(tv, [1]))
    torch.testing.assert_close(avg, x.mean(1))
    torch.testing.assert_close(m2, x.var(1) * 3)
    assert n.tolist() == [4, 4, 4] and fusion.outputs[2].dtype() is D.Index


@pytest.mark.parametrize(
    ("name", "expected"), [("sum", 0.0), ("prod", 1.0), ("max", -torch.inf), ("min", torch.inf)]
)
def test_nothing_reduces_to_the_identity(name: str, expected: float) -> None:
    fusion, (out,) = run(
        torch.zeros(3, 0), D.Float, lambda tv: getattr(ops, name)(tv, dim=1, keepdim=True)
    )
    assert out.tolist() == [[expected]] * 3
    assert any(isinstance(e, FullOp) for e in fusion.exprs)
    with FusionGuard(Fusion()):
        static = getattr(ops, name)(define_tensor([3, 0]), dim=1)
        assert isinstance(static.definition(), FullOp)


def test_call_errors() -> None:
    with FusionGuard(Fusion()):
        x = define_tensor([-1, -1])
        with pytest.raises(DefinitionError, match="No reduction axis specified"):
            ops.sum(x, dims=[])
        with pytest.raises(DefinitionError, match="contain an axis twice"):
            ops.sum(x, dims=[0, -2])
        with pytest.raises(DefinitionError, match=r"out of boundary index 2\. total index: 2"):
            ops.max(x, dim=2)
        with pytest.raises(DefinitionError, match="A dtype other than Null"):
            ops.max(x, dim=0, dtype=D.Double)
        with pytest.raises(DefinitionError, match="correction"):
            ops.var(x, [0], correction=-1)
        with pytest.raises(DtypeError, match="upcast to float"):
            ops.var_mean(define_tensor([-1], dtype=D.Half), [0])
        scalar = define_tensor([])
        assert ops.sum(scalar).ndim == 0


def test_a_reduction_of_rank_0_checks_its_axes() -> None:
    with FusionGuard(Fusion()):
        x = define_tensor([])
        assert ops.sum(x, 0).ndim == ops.max(x, [-1]).ndim == ops.sum(x).ndim == 0
        for dims in (1, [5], [-2]):
            with pytest.raises(DefinitionError, match="sum: Tried to access out of boundary"):
                ops.sum(x, dims)
        for op in (ops.welford, ops.var, ops.var_mean):
            with pytest.raises(DefinitionError, match=r"No reduction axis specified for T0"):
                op(x, [0])
