"""Tests of FusionDefinition as a whole on the CPU: values, aliases, wrong inputs, reuse."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fuser import DataType, FusionDefinition, TensorView
from fuser.runtime.compiled_kernel import compilations
from fuser.support.errors import (
    DefinitionError,
    InputError,
    OptionError,
    ShardingError,
    UnsupportedError,
)

pytestmark = pytest.mark.from_text

ROOT = Path(__file__).parents[3]


def matrix(fd: FusionDefinition, dtype: DataType = DataType.Float) -> TensorView:
    return fd.define_tensor([-1, -1], contiguity=True, dtype=dtype)


def add_one() -> FusionDefinition:
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.add(matrix(fd), 1.0))
    return fd


def test_values_and_promotion() -> None:
    with FusionDefinition() as fd:
        x, y = matrix(fd, DataType.Half), matrix(fd, DataType.Half)
        total = fd.ops.add(x, y)
        fd.add_output(total)
        fd.add_output(fd.ops.cast(fd.ops.mul(total, 2.0), DataType.Half))
    a, b = (torch.randn(3, 5).half() for _ in range(2))
    total, doubled = fd.execute([a, b])
    assert total.dtype == torch.float32 and doubled.dtype == torch.half
    torch.testing.assert_close(total, a.float() + b.float())
    torch.testing.assert_close(doubled, ((a.float() + b.float()) * 2).half())


def test_softmax_and_layer_norm_against_torch() -> None:
    with FusionDefinition() as fd:
        ops, x = fd.ops, matrix(fd)
        e = ops.exp(ops.sub(x, ops.max(x, dim=-1, keepdim=True)))
        fd.add_output(ops.div(e, ops.sum(e, dim=-1, keepdim=True)))
        var, mean = ops.var_mean(x, [-1], 0, True)
        fd.add_output(ops.mul(ops.sub(x, mean), ops.rsqrt(ops.add(var, 1e-5))))
    x = torch.randn(7, 33)
    softmax, norm = fd.execute([x])
    torch.testing.assert_close(softmax, torch.softmax(x.double(), -1).float())
    torch.testing.assert_close(norm, torch.nn.functional.layer_norm(x.double(), [33]).float())


@pytest.mark.parametrize("length", [1, 2, 255, 256, 257, 1000])
def test_variance_of_values_far_from_zero(length: int) -> None:
    """The mean is 1e4 times the deviation, so a formula with a plain sum of squares loses all
    digits."""
    with FusionDefinition() as fd:
        for out in fd.ops.var_mean(matrix(fd), [1], 0):
            fd.add_output(out)
    x = torch.randn(5, length, generator=torch.Generator().manual_seed(length)) + 1e4
    var, mean = fd.execute([x])
    expected, center = torch.var_mean(x.double(), 1, correction=0)
    torch.testing.assert_close(var, expected.float(), rtol=2e-3, atol=1e-6)
    torch.testing.assert_close(mean, center.float())


def test_matmul_linear_and_heads() -> None:
    with FusionDefinition() as fd:
        ops = fd.ops
        x = fd.define_tensor([-1, -1, 12], contiguity=True)
        w = fd.define_tensor([12, 12], contiguity=True)
        b = fd.define_tensor([12], contiguity=True)
        y = ops.linear(x, w, b)
        heads = ops.permute(ops.reshape(y, [x.size(0), x.size(1), 3, 4]), [0, 2, 1, 3])
        scores = ops.matmul(heads, ops.permute(heads, [0, 1, 3, 2]))
        fd.add_output(ops.relu(scores))
    x, w, b = torch.randn(2, 5, 12), torch.randn(12, 12), torch.randn(12)
    (out,) = fd.execute([x, w, b])
    h = torch.nn.functional.linear(x.double(), w.double(), b.double())
    h = h.reshape(2, 5, 3, 4).permute(0, 2, 1, 3)
    # Two float32 products of sums over 12 elements each.
    expected = torch.relu(h @ h.transpose(-1, -2)).float()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)


def test_input_is_output_and_duplicates() -> None:
    with FusionDefinition() as fd:
        x = matrix(fd)
        y = fd.ops.neg(x)
        for out in (x, y, y):
            fd.add_output(out)
    value = torch.randn(2, 3)
    same, a, b = fd.execute([value])
    torch.testing.assert_close(same, value)
    torch.testing.assert_close(a, -value)
    torch.testing.assert_close(b, -value)


def test_hidden_and_visible_aliases_update_in_place() -> None:
    for visible in (False, True):
        with FusionDefinition() as fd:
            x, y = matrix(fd), matrix(fd)
            total = fd.ops.add(x, y)
            fd.add_output(total, x)
            if visible:
                fd.add_output(total)
            fd.add_output(fd.ops.mul(total, 2.0))
        a, b = torch.randn(2, 3), torch.randn(2, 3)
        expected = a + b
        outs = fd.execute([a, b])
        torch.testing.assert_close(a, expected)
        assert len(outs) == 1 + visible
        torch.testing.assert_close(outs[-1], expected * 2)


def test_outputs_are_fresh_every_run() -> None:
    fd = add_one()
    (first,) = fd.execute([torch.zeros(2, 2)])
    (second,) = fd.execute([torch.ones(2, 2)])
    torch.testing.assert_close(first, torch.ones(2, 2))
    torch.testing.assert_close(second, torch.full((2, 2), 2.0))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 1), (1, 7), (5, 1)])
def test_extents_zero_and_one(shape: tuple[int, int]) -> None:
    with FusionDefinition() as fd:
        x = matrix(fd)
        fd.add_output(fd.ops.add(x, 1.0))
        fd.add_output(fd.ops.sum(x, dim=1))
    x = torch.randn(shape)
    plus, total = fd.execute([x])
    torch.testing.assert_close(plus, x + 1)
    torch.testing.assert_close(total, x.sum(1))


def test_non_contiguous_inputs_of_a_non_contiguous_declaration() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1])
        fd.add_output(fd.ops.mul(x, 3.0))
    base = torch.randn(6, 10)
    for x in (base, base.t(), base[:, ::2], base[1:2].expand(4, 10), base[:, :1].expand(6, 5)):
        (out,) = fd.execute([x])
        torch.testing.assert_close(out, x * 3)


def test_scalar_inputs_and_vectors() -> None:
    with FusionDefinition() as fd:
        x = matrix(fd)
        factor = fd.define_scalar(dtype=DataType.Double)
        shape = fd.define_vector(2)
        fd.add_output(fd.ops.reshape(fd.ops.mul(x, factor), shape))
    x = torch.randn(4, 6)
    for factor, shape in ((2.5, [6, 4]), (0.5, [3, 8])):
        (out,) = fd.execute([x, factor, shape])
        torch.testing.assert_close(out, (x * factor).reshape(shape))


def test_the_fusion_is_not_changed_by_running() -> None:
    fd = add_one()
    before = fd.fusion.print_math()
    fd.execute([torch.zeros(2, 2)])
    assert fd.fusion.print_math() == before
    assert not hasattr(fd, "_fusion") and fd.fec.fusion() is fd.fusion


def test_other_shapes_of_a_class_compile_nothing() -> None:
    fd = add_one()
    fd.execute([torch.zeros(4, 16)])
    before = compilations()
    for shape in ((8, 16), (3, 32), (64, 64)):
        (out,) = fd.execute([torch.zeros(shape)])
        assert out.shape == shape
    assert compilations() == before


def test_empty_definition() -> None:
    with pytest.raises(NotImplementedError, match="does not exist"):
        FusionDefinition().execute([])
    with FusionDefinition() as fd:
        matrix(fd)
    with pytest.raises(NotImplementedError, match="empty"):
        fd.execute([torch.zeros(1, 1)])


def test_ops_outside_the_block_are_refused() -> None:
    with FusionDefinition() as fd:
        x = matrix(fd)
    with pytest.raises(DefinitionError, match="no active fusion"):
        fd.ops.add(x, 1.0)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "contains less argument"),
        ([torch.zeros(2, 2)] * 2, "Expected 1 input, got 2: the definition has T0_g_float"),
        ([torch.zeros(2)], "to be bound to a tensor of rank 2, but got a tensor of rank 1"),
        (
            [torch.zeros(2, 2).double()],
            "to be bound to a tensor of dtype float, but got a tensor of dtype double",
        ),
        ([2.0], "to be an at::Tensor but got scalar"),
        (
            [torch.zeros(2, 2, dtype=torch.complex64)],
            r"input 0, T0.* of dtype float, but got .*complex<float>; .* \(user code at .*:\d",
        ),
    ],
)
def test_bad_inputs_name_the_tensor(inputs: list[object], message: str) -> None:
    fd = add_one()
    with pytest.raises(InputError, match=message):
        fd.execute(inputs)
    (out,) = fd.execute([torch.zeros(2, 2)])
    torch.testing.assert_close(out, torch.ones(2, 2))


def test_extents_that_disagree_name_both_tensors() -> None:
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.add(matrix(fd), matrix(fd)))
    with pytest.raises(InputError, match=r"T1.*T0|T0.*T1"):
        fd.execute([torch.zeros(2, 3), torch.zeros(2, 4)])


def test_unknown_options() -> None:
    fd = add_one()
    with pytest.raises(OptionError, match="Unrecognized enable_option: nonsense"):
        fd.execute([torch.zeros(2, 2)], _enable_options=["nonsense"])


def test_a_mesh_larger_than_the_job() -> None:
    with FusionDefinition() as fd:
        x = matrix(fd)
        fd.add_output(fd.ops.add(x, 1.0))
        x.set_device_mesh([0, 1, 2])
    with pytest.raises(ShardingError, match="names rank 2"):
        fd.execute([torch.zeros(2, 2)])


def test_unsupported_dtypes_say_so() -> None:
    with FusionDefinition() as fd, pytest.raises(UnsupportedError, match="null_type"):
        fd.define_tensor([-1], dtype=DataType.Null)


PROGRAM = """
import torch
from fuser import FusionDefinition
with FusionDefinition() as fd:
    x = fd.define_tensor([-1, -1], contiguity=True)
    y = fd.define_tensor([-1], contiguity=True)
    s = fd.ops.exp(fd.ops.sub(fd.ops.add(x, y), fd.ops.max(x, dim=1, keepdim=True)))
    fd.add_output(fd.ops.div(s, fd.ops.sum(s, dim=1, keepdim=True)))
    fd.add_output(fd.ops.sum(s, dim=0))
fd.execute([torch.zeros(4, 8), torch.zeros(8)])
print(fd.fec.host_program().full_text())
"""


def test_the_text_does_not_depend_on_the_hash_seed() -> None:
    texts = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert len(texts) == 1 and "LaunchKernel" in texts.pop()


def test_an_update_of_another_dtype_is_refused_where_it_is_made() -> None:
    with FusionDefinition() as fd:
        a = fd.define_tensor([-1], dtype=DataType.Half)
        total = fd.ops.add(a, fd.ops.sum(fd.ops.cast(a, DataType.Float), [0]))
        with pytest.raises(
            DefinitionError, match=r"into T0_g___half.* has dtype float: cast the output to __half"
        ):
            fd.add_output(total, a)
        fd.add_output(fd.ops.cast(total, DataType.Half), a)
    x = torch.ones(4, dtype=torch.half)
    fd.execute([x])
    assert x.tolist() == [5.0] * 4


def test_an_input_that_is_returned_shows_its_update_and_a_view_of_it_does_not() -> None:
    with FusionDefinition() as fd:
        a = fd.define_tensor([-1, -1])
        fd.add_output(a)
        fd.add_output(fd.ops.permute(a, [1, 0]))
        fd.add_output(fd.ops.add(a, 1.0), a)
    x = torch.arange(6.0).view(2, 3)
    old = x.clone()
    itself, view = fd.execute([x])
    assert itself.data_ptr() == x.data_ptr() and torch.equal(x, old + 1)
    assert torch.equal(view, old.T)
