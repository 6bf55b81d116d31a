"""`validate` and its tolerances. The expected tolerances are rows of the published table."""

from __future__ import annotations

import pytest
import torch

import fuser
from fuser import DataType, FusionDefinition, UnsupportedError


def summed(dtype: DataType) -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], dtype=dtype, contiguity=True)
        total = fd.ops.sum(x, dim=1)
        fd.add_output(fd.ops.cast(total, dtype))
        fd.add_output(fd.ops.neg(x))
    return fd


@pytest.mark.parametrize(
    ("dtype", "size", "atol"),
    [
        (DataType.Float, 1, 1.68222e-06),
        (DataType.Float, 2, 2.23704e-06),
        (DataType.Float, 4, 2.23704e-06),
        (DataType.Float, 5, 2.95788e-06),
        (DataType.Float, 1 << 20, 0.00343043),
        (DataType.Float, 1 << 21, 2 * 0.00343043),
        (DataType.Float, 1 << 22, 2 * 0.00343043),
        (DataType.Half, 64, 0.0312042),
        (DataType.BFloat16, 64, 0.312042),
        (DataType.Int, 64, 0.0),
    ],
)
def test_tolerances_follow_dtype_and_size(dtype: DataType, size: int, atol: float) -> None:
    from fuser.frontend.validation import tolerance

    rtol = 2.23704e-06 if size == 1 else atol * 0.01
    assert tolerance(dtype, size) == pytest.approx((atol, rtol))


def test_sizes_multiply_along_the_way_and_updates_are_left_out() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1, -1], contiguity=True)
        rows = fd.ops.sum(x, dim=2)
        fd.add_output(fd.ops.sum(rows, dim=1))
        fd.add_output(rows)
        fd.add_output(fd.ops.add(x, 1.0), x)
    found = fuser.get_val_tolerances(fd.fusion, [torch.ones(3, 4, 8)])
    assert found == [
        pytest.approx((6.75395e-06, 6.75395e-08)),
        pytest.approx((2.95788e-06, 2.95788e-08)),
    ]


def test_a_scan_counts_what_it_goes_along() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.cumsum(x, dim=1))
        fd.add_output(fd.ops.neg(x))
    given = torch.randn(3, 8)
    fd.validate([given])
    assert [a for a, _ in fuser.get_val_tolerances(fd.fusion, [given])] == [
        2.95788e-06,
        1.68222e-06,
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_what_equals_torch_passes_and_what_does_not_is_named(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 300).to(dtype)
    fd = summed(DataType.Float if dtype is torch.float32 else fuser_dtype(dtype))
    wanted = [x.sum(1), -x]
    fd.validate([x])
    fd.validate([x], wanted)
    outputs = fd.execute([x])
    fuser.validate_with_auto_inferred_outputs(fd.fusion, outputs, [x])
    for k in range(2):
        wrong = [w.clone() for w in wanted]
        wrong[k].view(-1)[5] += 20.0
        with pytest.raises(AssertionError, match=rf"Validation error in output {k}, T.*1 of \d+"):
            fd.validate([x], wrong)
        with pytest.raises(RuntimeError, match=f"Validation error in output {k}"):
            fuser.validate_with_auto_inferred_outputs(fd.fusion, wrong, [x])
    with pytest.raises(fuser.ValidationError, match="expected 2"):
        fd.validate([x], wanted[:1])
    with pytest.raises(
        fuser.ValidationError, match=r"shape is \(16, 300\), but .* has the shape \(300, 16\)"
    ):
        fd.validate([x], [wanted[0], wanted[1].t()])


def fuser_dtype(dtype: torch.dtype) -> DataType:
    return {torch.float16: DataType.Half, torch.bfloat16: DataType.BFloat16}[dtype]


def test_nan_equals_nan_only_and_integers_are_exact() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        n = fd.define_tensor([-1], dtype=DataType.Int, contiguity=True)
        fd.add_output(fd.ops.log(x))
        fd.add_output(fd.ops.add(n, 1))
    x, n = torch.tensor([-1.0, 1.0]), torch.tensor([1 << 40, 2])
    fd.validate([x, n])
    with pytest.raises(fuser.ValidationError, match="output 0"):
        fd.validate([x, n], [torch.tensor([0.0, 0.0]), n + 1])
    with pytest.raises(fuser.ValidationError, match=r"output 1, .* 1 of 2"):
        fd.validate([x, n], [x.log(), n + torch.tensor([1, 2])])


def test_updates_do_not_reach_the_references() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        fd.add_output(fd.ops.add(x, 1.0), x)
        fd.add_output(fd.ops.mul(x, 2.0))
    given = torch.ones(3)
    (out,) = fd.validate([given])
    assert out.tolist() == [2.0] * 3 and given.tolist() == [2.0] * 3


def test_a_schedule_by_hand_is_validated_too() -> None:
    with pytest.raises(fuser.ValidationError, match="output 1"):
        one_kernel().manual_validate([torch.ones(4)], [torch.ones(4), torch.ones(4)])
    one_kernel().manual_validate([torch.ones(4)])


def one_kernel() -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        y = fd.ops.mul(x, 1.0)
        fd.add_output(y)
        fd.add_output(fd.ops.neg(y))
        fd.sched.inline_most()
    return fd


def test_what_torch_cannot_tell_is_refused() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        fd.add_output(fd.ops.exp(x))
        x.set_device_mesh(range(1))
    with pytest.raises(UnsupportedError, match=r"T0.* has a mesh.*reference_outputs"):
        fd.validate([torch.ones(2)])
    fd.validate([torch.ones(2)], [torch.ones(2).exp()])


@pytest.mark.finding("validate contraction")
@pytest.mark.parametrize("kind", ["a product less itself", "two products", "a half in between"])
def test_what_contraction_and_halves_in_between_change_is_accepted(kind: str) -> None:
    draw = torch.Generator().manual_seed(0)
    a, b, c, d = (1000 * torch.randn(20000, generator=draw) for _ in range(4))
    exact = [x.double() for x in (a, b, c, d)]
    dtype = DataType.Float
    if kind == "a half in between":
        dtype = DataType.Half
        a, b = (x.div(1000).half() for x in (a, b))
        exact = [x.double() for x in (a, b)]
    with FusionDefinition() as fd:
        x, y = (fd.define_tensor([-1], contiguity=True, dtype=dtype) for _ in range(2))
        if kind == "a half in between":
            # torch rounds the product to Half; a kernel may omit that.
            middle = fd.ops.cast(fd.ops.cast(fd.ops.mul(x, y), DataType.Half), DataType.Float)
            fd.add_output(fd.ops.mul(fd.ops.sub(middle, fd.ops.cast(x, DataType.Float)), 1000.0))
            inputs = [a, b]
            result = ((exact[0] * exact[1] - exact[0]) * 1000).float()
        else:
            z, w = (fd.define_tensor([-1], contiguity=True) for _ in range(2))
            product = fd.ops.mul(x, y)
            other = z if kind == "a product less itself" else fd.ops.mul(z, w)
            out = fd.ops.sub(product, other)
            fd.add_output(out if other is not z else fd.ops.add(out, fd.ops.mul(w, 0.0)))
            c = a * b if kind == "a product less itself" else a * b / d
            inputs = [a, b, c, d]
            wide = c.double() if kind == "a product less itself" else c.double() * exact[3]
            result = (exact[0] * exact[1] - wide).float()
    # The result of a fused multiply-add, or of a kernel that omits the rounding.
    fuser.validate_with_auto_inferred_outputs(fd.fusion, [result], inputs)
    fd.validate(inputs)
    wrong = result.clone()
    wrong[7] += 64 * result.abs().max()
    with pytest.raises(fuser.ValidationError, match="1 of 20000 elements"):
        fuser.validate_with_auto_inferred_outputs(fd.fusion, [wrong], inputs)
    # Larger errors than such a rounding are not accepted.
    with pytest.raises(fuser.ValidationError):
        size = (exact[0] * exact[1]).abs() * (20.0 if dtype is DataType.Half else 1e-5)
        fuser.validate_with_auto_inferred_outputs(fd.fusion, [result + size.float()], inputs)
