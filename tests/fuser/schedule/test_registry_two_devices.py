"""Tests programs that schedulers once rejected, or computed wrongly, with the schedules of two
devices.

Each equals torch in float64: on a CPU, and with every access checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType

import pytest
import torch

from fuser import DataType, FusionDefinition

Tensors = Sequence[torch.Tensor]
Case = Callable[[FusionDefinition, ModuleType], tuple[Tensors, Tensors]]
CASES: dict[str, Case] = {}


def case(define: Case) -> Case:
    """Registers a case: a function that defines outputs, and returns the inputs and the expected
    outputs."""
    CASES[define.__name__] = define
    return define


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


# ------------------------------------------------------------------ results of reductions, read on
@case
def expanded_result_of_a_reduction(
    fd: FusionDefinition, ops: ModuleType
) -> tuple[Tensors, Tensors]:
    t = fd.define_tensor([-1, -1], contiguity=True)
    fd.add_output(ops.mul(t, ops.broadcast_in_dim(ops.sum(t, 1), [t.size(0), t.size(1)], [0])))
    x = drawn(33, 64)
    return [x], [x.double() * x.double().sum(1, keepdim=True)]


@case
def expanded_result_of_static_size(
    fd: FusionDefinition, ops: ModuleType
) -> tuple[Tensors, Tensors]:
    t = fd.define_tensor([33, 64], contiguity=True)
    fd.add_output(ops.mul(t, ops.broadcast_in_dim(ops.sum(t, 1), [33, 64], [0])))
    x = drawn(33, 64)
    return [x], [x.double() * x.double().sum(1, keepdim=True)]


@case
def softmax_by_expanding(fd: FusionDefinition, ops: ModuleType) -> tuple[Tensors, Tensors]:
    t = fd.define_tensor([-1, -1], contiguity=True)
    shape = [t.size(0), t.size(1)]
    weights = ops.exp(ops.sub(t, ops.broadcast_in_dim(ops.max(t, 1), shape, [0])))
    fd.add_output(ops.div(weights, ops.broadcast_in_dim(ops.sum(weights, 1), shape, [0])))
    x = drawn(33, 64)
    return [x], [x.double().softmax(1)]


@case
def reduction_of_a_reduction(fd: FusionDefinition, ops: ModuleType) -> tuple[Tensors, Tensors]:
    t = fd.define_tensor([-1, -1], contiguity=True)
    fd.add_output(ops.sum(ops.sum(t, 1), 0))
    fd.add_output(ops.sum(ops.relu(ops.sum(t, 1)), 0))
    x = drawn(33, 64)
    rows = x.double().sum(1)
    return [x], [rows.sum(), rows.relu().sum()]


@case
def moments_of_a_reduced_tensor(fd: FusionDefinition, ops: ModuleType) -> tuple[Tensors, Tensors]:
    t = fd.define_tensor([-1, -1, -1], contiguity=True)
    reduced = ops.sum(t, [2])
    var, mean = ops.var_mean(reduced, [1], 0, False)
    for out in (var, mean, ops.min(reduced, dims=[0])):
        fd.add_output(out)
    x = drawn(4, 5, 6)
    r = x.double().sum(2)
    return [x], [r.var(1, correction=0), r.mean(1), r.amin(0)]


@case
def mean_beside_the_variance_it_is_computed_with(
    fd: FusionDefinition, ops: ModuleType
) -> tuple[Tensors, Tensors]:
    t = fd.define_tensor([17, 8, 16], contiguity=True)
    var, mean = ops.var_mean(t, [1, 2], 1, False)
    for out in (ops.reshape(mean, [17, 1]), mean, ops.sub(mean, var)):
        fd.add_output(out)
    x = drawn(17, 8, 16)
    v, m = torch.var_mean(x.double(), (1, 2))
    return [x], [m.reshape(17, 1), m, m - v]


@case
def mean_times_a_vector(fd: FusionDefinition, ops: ModuleType) -> tuple[Tensors, Tensors]:
    t = fd.define_tensor([-1, -1], contiguity=True)
    y = fd.define_tensor([-1], contiguity=True)
    var, mean = ops.var_mean(t, [1], 1, False)
    fd.add_output(ops.matmul(mean, y))
    fd.add_output(var)
    a, b = drawn(8, 64), drawn(8)
    return [a, b], [a.double().mean(1) @ b.double(), a.double().var(1)]


@case
def only_broadcast_axes_are_left(fd: FusionDefinition, ops: ModuleType) -> tuple[Tensors, Tensors]:
    t = fd.define_tensor([-1, -1, -1, 1, 1], contiguity=True)
    fd.add_output(ops.sum(t, [0, 1, 2, 3]))
    var, mean = ops.var_mean(t, [0, 1, 2, 3], 0, True)
    fd.add_output(var)
    fd.add_output(mean)
    x = drawn(4, 5, 6, 1, 1)
    v, m = torch.var_mean(x.double(), (0, 1, 2, 3), correction=0, keepdim=True)
    return [x], [x.double().sum((0, 1, 2, 3)), v, m]


@case
def last_broadcast_axis_is_reduced(
    fd: FusionDefinition, ops: ModuleType
) -> tuple[Tensors, Tensors]:
    t = fd.define_tensor([-1, 1], contiguity=[True, None])
    fd.add_output(ops.min(ops.sum(ops.neg(t), dims=[0]), dims=[-1]))
    x = drawn(8, 1)
    return [x], [-x.double().sum()]


@case
def columns_beside_a_broadcast_axis(
    fd: FusionDefinition, ops: ModuleType
) -> tuple[Tensors, Tensors]:
    t = fd.define_tensor([40, 64, 2, 1], contiguity=[True, True, True, None])
    reduced = ops.sum(t, dims=[0])
    fd.add_output(ops.max(reduced, dims=[0]))
    fd.add_output(reduced)
    x = drawn(40, 64, 2, 1)
    return [x], [x.double().sum(0).amax(0), x.double().sum(0)]


def _extremum_with_nan(fd: FusionDefinition, reduce: Callable[..., object]) -> torch.Tensor:
    t = fd.define_tensor([-1, -1, -1], contiguity=False)
    fd.add_output(reduce(t, dims=[1, 2]))  # pyright: ignore[reportArgumentType]
    x = drawn(33, 7, 8).permute(1, 0, 2)
    x[1, 2, 1] = torch.nan
    return x


@case
def max_keeps_nan(fd: FusionDefinition, ops: ModuleType) -> tuple[Tensors, Tensors]:
    x = _extremum_with_nan(fd, ops.max)
    return [x], [x.double().amax((1, 2))]


@case
def min_keeps_nan(fd: FusionDefinition, ops: ModuleType) -> tuple[Tensors, Tensors]:
    x = _extremum_with_nan(fd, ops.min)
    return [x], [x.double().amin((1, 2))]


# ------------------------------------------------------------------ one axis twice
@case
def outer_product_with_itself(fd: FusionDefinition, ops: ModuleType) -> tuple[Tensors, Tensors]:
    t = fd.define_tensor([-1], contiguity=True)
    n = t.size(0)
    product = ops.mul(ops.broadcast(t, [False, True]), ops.broadcast(t, [True, False]))
    fd.add_output(product)
    fd.add_output(ops.sum(product, [1]))
    fd.add_output(ops.mod(ops.broadcast_in_dim(t, [1, n, 1], [1]), t))
    x = drawn(170).abs() + 1
    outer = x.double()[:, None] * x.double()
    return [x], [outer, outer.sum(1), torch.fmod(x[:, None], x)[None]]


# ------------------------------------------------------------------ accesses that are no vectors
@case
def pad_of_a_permuted_input_beside_a_reduction(
    fd: FusionDefinition, ops: ModuleType
) -> tuple[Tensors, Tensors]:
    t = fd.define_tensor([-1, -1], contiguity=False)
    fd.add_output(ops.pad(t, [0, 3]))
    fd.add_output(ops.max(t, dims=[1], keepdim=True))
    x = drawn(1, 36).t()
    return [x], [torch.nn.functional.pad(x, [0, 3]), x.amax(1, keepdim=True)]


@case
def pad_of_permuted_integers(fd: FusionDefinition, ops: ModuleType) -> tuple[Tensors, Tensors]:
    t = fd.define_tensor([-1, -1], contiguity=False, dtype=DataType.Int)
    fd.add_output(ops.pad(t, [2, 3, 1, 4], 1))
    x = torch.arange(7).view(7, 1).t()
    return [x], [torch.nn.functional.pad(x, [2, 3, 1, 4], value=1)]


@case
def pad_to_a_size_of_its_own(fd: FusionDefinition, ops: ModuleType) -> tuple[Tensors, Tensors]:
    t = fd.define_tensor([-1, -1, -1], contiguity=True)
    fd.add_output(ops.pad(t, [2, 2, 3, 2, 1, 1]))
    x = drawn(1, 3, 64)
    return [x], [torch.nn.functional.pad(x, [2, 2, 3, 2, 1, 1])]


@case
def cat_of_views_with_gaps(fd: FusionDefinition, ops: ModuleType) -> tuple[Tensors, Tensors]:
    t = fd.define_tensor([1, 2, -1, -1], contiguity=False)
    u = fd.define_tensor([1, 2, -1, -1], contiguity=False)
    once = ops.silu(t)
    fd.add_output(ops.cat([once, u, once], dim=2))
    x, y = drawn(1, 2, 40, 11)[:, :, :37, :8], drawn(1, 2, 17, 8)
    s = torch.nn.functional.silu(x.double())
    return [x, y], [torch.cat([s, y.double(), s], 2)]


@case
def product_of_everything(fd: FusionDefinition, ops: ModuleType) -> tuple[Tensors, Tensors]:
    t = fd.define_tensor([-1, -1, -1], contiguity=True)
    u = fd.define_tensor([-1, -1, -1], contiguity=True)
    fd.add_output(ops.add(ops.prod(t, dims=[-3, -2, -1], keepdim=True), u))
    x, y = drawn(2, 3, 4), drawn(5, 6, 8)
    return [x, y], [x.double().prod() + y.double()]


@case
def reshapes_of_a_slice_at_an_offset(
    fd: FusionDefinition, ops: ModuleType
) -> tuple[Tensors, Tensors]:
    t = fd.define_tensor([6, 4], contiguity=True, dtype=DataType.Double)
    kept = ops.slice(t, [0, 0], [6, 4])
    fd.add_output(ops.reshape(kept, [24]))
    fd.add_output(ops.reshape(kept, [8, 1, 3]))
    x = drawn(25, dtype=torch.float64)[1:].view(6, 4)
    return [x], [x.reshape(24), x.reshape(8, 1, 3)]


@case
def slice_beside_a_transpose(fd: FusionDefinition, ops: ModuleType) -> tuple[Tensors, Tensors]:
    t = fd.define_tensor([-1, -1], contiguity=True)
    fd.add_output(ops.slice(t, [0, 2], [1, 67]))
    fd.add_output(ops.permute(t, [1, 0]))
    x = drawn(1, 64)  # fewer than the slice asks for
    return [x], [x[:, 2:67], x.t()]


@case
def broadcast_axes_inside(fd: FusionDefinition, ops: ModuleType) -> tuple[Tensors, Tensors]:
    t = fd.define_tensor([4, 1, 3], contiguity=[True, None, True])
    u = fd.define_tensor([7, 8, 3, 40, 3], contiguity=True)
    fd.add_output(ops.broadcast(t, [False, False, False, True, True]))
    fd.add_output(ops.reshape(u, [7, 8, 120, 1, 3]))
    x, y = drawn(4, 1, 3), drawn(7, 8, 3, 40, 3)
    return [x, y], [x[..., None, None], y.reshape(7, 8, 120, 1, 3)]


@case
def copy_beside_a_broadcast_axis(fd: FusionDefinition, ops: ModuleType) -> tuple[Tensors, Tensors]:
    t = fd.define_tensor([40, 6, 1], contiguity=[True, True, None])
    fd.add_output(ops.sigmoid(t))
    x = drawn(40, 6, 1)
    return [x], [x.double().sigmoid()]


# ------------------------------------------------------------------ odds and ends
@case
def counting_in_half_precisions(fd: FusionDefinition, ops: ModuleType) -> tuple[Tensors, Tensors]:
    fd.define_tensor([1], contiguity=True)
    fd.add_output(ops.iota(9, 0.5, 0.25, DataType.BFloat16))
    fd.add_output(ops.iota(9, 0.5, 0.25, DataType.Half))
    counted = 0.5 + 0.25 * torch.arange(9)
    return [drawn(1)], [counted, counted]


@case
def reshapes_through_an_axis_of_one(
    fd: FusionDefinition, ops: ModuleType
) -> tuple[Tensors, Tensors]:
    t = fd.define_tensor([-1, -1, -1], contiguity=True)
    u = ops.reshape(t, [1, t.size(0), 37, t.size(2), 2, 3])
    fd.add_output(ops.reshape(u, [u.size(1), 1, 37, ops.mul(u.size(3), 2), 3]))
    x = drawn(5, 222, 4)
    return [x], [x.reshape(5, 1, 37, 8, 3)]


@case
def reshape_that_nothing_reads(fd: FusionDefinition, ops: ModuleType) -> tuple[Tensors, Tensors]:
    t = fd.define_tensor([-1, -1], contiguity=True)
    ops.reshape(ops.abs(t), [1, 4, 2, 3])
    fd.add_output(ops.neg(t))
    x = drawn(4, 6)
    return [x], [-x]


@case
def long_chain(fd: FusionDefinition, ops: ModuleType) -> tuple[Tensors, Tensors]:
    t = fd.define_tensor([-1], contiguity=True)
    x = drawn(16)
    value = x.double()
    for _ in range(400):
        t, value = ops.sub(t, 0.5), value - 0.5
    fd.add_output(t)
    return [x], [value]


@case
def chain_of_diamonds(fd: FusionDefinition, ops: ModuleType) -> tuple[Tensors, Tensors]:
    """Defines a chain in which each step reads the one before twice: 2^200 paths."""
    t = fd.define_tensor([-1], contiguity=True)
    x = drawn(16)
    for _ in range(200):
        t = ops.sub(ops.mul(t, 0.75), ops.mul(t, -0.25))
    fd.add_output(t)
    return [x], [x.double()]


OPTIONS = {"cpu": [], "checked": ["checked"], "h200": ["checked", "schedules_for(h200)"]}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", CASES)
def test_runs(name: str, options: str) -> None:
    with FusionDefinition() as fd:
        inputs, expected = CASES[name](fd, fd.ops)
    got = fd.execute(inputs, _enable_options=OPTIONS[options])
    for out, value in zip(got, expected, strict=True):
        assert out.shape == value.shape
        torch.testing.assert_close(out, value.to(out.dtype), rtol=1e-5, atol=1e-5, equal_nan=True)
