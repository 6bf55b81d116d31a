"""Calls that cannot be correct raise a typed error, with a hint, at the call itself."""

# Ops are called with wrong arguments, and with options from dictionaries.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fuser import (
    DataType,
    Fusion,
    FusionDefinition,
    FusionExecutorCache,
    FusionGuard,
    LRUCache,
    LruFusionCache,
    ParallelType,
    define_tensor,
    ops,
)
from fuser.ir.scalar.constructors import Scalar
from fuser.multidevice import DeviceMesh
from fuser.support.errors import (
    ArgumentError,
    DefinitionError,
    DtypeError,
    EmptyDefinitionError,
    FuserError,
    InputError,
    OptionError,
    UnknownOpError,
)

# Untyped, because a type checker rejects these calls, too.
Call = Callable[[Any, Any], object]
HUGE = 2**2000

DEFINITIONS: list[tuple[Call, type[Exception], str]] = [
    (
        lambda fd, x: fd.ops.squeeze(fd.define_tensor([]), [0]),
        DefinitionError,
        "dims are .0., but T1.* has no axes",
    ),
    (
        lambda fd, x: fd.define_tensor([10.0]),
        ArgumentError,
        r"shape\[0\]: expected an integer, got 10.0 of",
    ),
    (lambda fd, x: fd.define_tensor(["a"]), ArgumentError, "got 'a' of type str"),
    (
        lambda fd, x: fd.define_tensor(3),
        ArgumentError,
        r"shape: expected a list of integers, got 3 of type int: write \[3\]",
    ),
    (
        lambda fd, x: fd.ops.rms_norm(x, 48),
        ArgumentError,
        r"normalized_shape: expected a list of .*, got 48 of type int: write \[48\]",
    ),
    # One tensor is more likely a wrong argument than a list of one tensor.
    (lambda fd, x: fd.ops.cat(x, 0), ArgumentError, r"expected a list of .* type TensorView \("),
    (lambda fd, x: fd.define_tensor([2**63]), DefinitionError, f"{2**63} is out of the range"),
    (lambda fd, x: fd.define_tensor([2], dtype="float"), ArgumentError, "DataType.Float or torch"),
    (lambda fd, x: fd.define_tensor([2], dtype=torch.uint8), DtypeError, "torch.uint8"),
    (lambda fd, x: fd.define_vector("a"), ArgumentError, "size: expected an integer, got 'a'"),
    (lambda fd, x: fd.define_scalar("a"), ArgumentError, "value: expected .*, got 'a' of type str"),
    (lambda fd, x: fd.define_scalar(1, "x"), ArgumentError, "expected a dtype"),
    (lambda fd, x: fd.define_scalar(2**40, DataType.Int32), DefinitionError, "range of int "),
    (lambda fd, x: fd.define_scalar(2**70), DefinitionError, "range of int64_t"),
    (lambda fd, x: fd.define_scalar(1e300, DataType.Float), DefinitionError, "range of float"),
    (lambda fd, x: fd.define_scalar(1e5, DataType.Half), DefinitionError, "range of __half"),
    (lambda fd, x: fd.define_scalar(HUGE, DataType.Double), DefinitionError, r"2\*\*2000\.\. is"),
    (lambda fd, x: fd.define_scalar(1.5, DataType.Int), DefinitionError, "1.5 is not an integer"),
    (lambda fd, x: fd.define_scalar(float("nan"), DataType.Int), DefinitionError, "nan is no"),
    (lambda fd, x: fd.ops.add(x, HUGE), DefinitionError, r"add: 2\*\*2000\.\. is out of the"),
    (lambda fd, x: fd.ops.add(x, torch.ones(2)), ArgumentError, "of type Tensor"),
    (lambda fd, x: fd.ops.cast(x, "float"), ArgumentError, "dtype: expected a dtype"),
    (lambda fd, x: fd.ops.cast(x, None), ArgumentError, "dtype: expected a dtype"),
    (
        lambda fd, x: fd.ops.iota("a"),
        ArgumentError,
        "length: expected a scalar or an integer, got 'a'",
    ),
    (lambda fd, x: fd.ops.iota(4, 0, 1, "x"), ArgumentError, "dtype: expected a dtype"),
    (lambda fd, x: fd.ops.sum(x, "a"), ArgumentError, "dim: expected an integer or a list"),
    (lambda fd, x: fd.ops.sum(x, [1.5]), ArgumentError, r"dim\[0\]: expected an integer"),
    (lambda fd, x: fd.ops.sum(x, 1.5), ArgumentError, "an integer or a list .*, got 1.5"),
    (
        lambda fd, x: fd.ops.sum(1.0, 0),
        ArgumentError,
        "arg: expected a tensor, got 1.0 of type float",
    ),
    (lambda fd, x: fd.add_output(1.0), ArgumentError, "output: expected a tensor"),
    (
        lambda fd, x: fd.add_output(torch.ones(2)),
        ArgumentError,
        r"^add_output\(\): .* a tensor or a scalar, got .*: it has data; pass it to execute",
    ),
    (lambda fd, x: fd.ops.cat([x, np.ones(2)]), ArgumentError, r"tensors\[1\]: .*: it has data"),
    (
        lambda fd, x: fd.ops.sum(x, axis=0),
        ArgumentError,
        r"takes \(arg, dim=None, keepdim=False, dtype=DataType.Null, \*, dims=None\) \(user code",
    ),
    (lambda fd, x: x.size(), ArgumentError, r"size\(\) of T0.*; it takes \(dim\) \(user code"),
    (lambda fd, x: fd.define_vector([2]), ArgumentError, r"^define_vector\(\): incompatible"),
    (lambda fd, x: LRUCache(), ArgumentError, r"^LRUCache\(\): .* it takes \(max_fusions\)"),
    (lambda fd, x: LRUCache(0), DefinitionError, "^LRUCache: max_fusions must be at least 1"),
    (
        lambda fd, x: LruFusionCache(elementwise),
        ArgumentError,
        "an integer, got the function elementwise of type",
    ),
    (lambda fd, x: fd.add_output(x.size(0)), DefinitionError, "Non-TensorView outputs .* i0 "),
    (lambda fd, x: fd.from_pytorch([1, 2]), ArgumentError, "tensor: expected a torch tensor"),
    (lambda fd, x: fd.from_pytorch(torch.ones(1, device="meta")), InputError, "device meta"),
    (lambda fd, x: x.axis(0).parallelize("mesh_x"), ArgumentError, "expected ParallelType.mesh_x"),
    (lambda fd, x: x.axis(0).parallelize([]), ArgumentError, "expected a ParallelType"),
    (lambda fd, x: x.swizzle1d(0, "mesh_x"), ArgumentError, "expected ParallelType.mesh_x"),
    (
        lambda fd, x: x.swizzle1d("a", ParallelType.mesh_x),
        ArgumentError,
        "axis: expected an integer",
    ),
    (lambda fd, x: x.reorder([0, 1]), ArgumentError, "a dictionary from integers to integers"),
    (lambda fd, x: x.reorder({0: 1.5}), ArgumentError, r"old2new\[0\]: expected an integer"),
    (lambda fd, x: x.split(0, 1.5), ArgumentError, "factor: expected .* an integer, got 1.5"),
    (lambda fd, x: x.size("a"), ArgumentError, "dim: expected an integer"),
    (lambda fd, x: DeviceMesh("ab"), ArgumentError, "lists of ranks, got 'ab'"),
    (
        lambda fd, x: DeviceMesh(2),
        ArgumentError,
        r"got 2: pass range\(2\) for 2 ranks, or \[2\] for rank 2",
    ),
    (lambda fd, x: DeviceMesh([0.5]), ArgumentError, "expected an integer, got 0.5"),
    (lambda fd, x: x.set_device_mesh(["a"]), ArgumentError, "lists of ranks, got 'a'"),
    (lambda fd, x: x.sum(1), AttributeError, "no attribute 'sum': ops are functions, fd.ops.sum"),
    (lambda fd, x: x.to("cpu"), AttributeError, "no attribute 'to': it is called cast"),
    (lambda fd, x: x.qqqq, AttributeError, "no attribute 'qqqq'$"),
    (lambda fd, x: fd.fec, AttributeError, "no attribute 'fec': the first execute creates it"),
    (lambda fd, x: fd.define_constant(1), AttributeError, "it is called define_scalar"),
    (lambda fd, x: fd.ops.elu(x), UnknownOpError, r"no op 'elu': write where\(gt\(x"),
    (lambda fd, x: fd.ops.sigmod(x), UnknownOpError, "did you mean sigmoid, "),
    (lambda fd, x: fd.ops.qqqq(x), UnknownOpError, "dir"),
]


@pytest.mark.parametrize(("call", "kind", "why"), DEFINITIONS)
def test_a_definition_that_cannot_be_meant(call: Call, kind: type[Exception], why: str) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        with pytest.raises(kind, match=why):
            call(fd, x)


def elementwise(dtype: DataType, tensor: DataType) -> FusionDefinition:
    with FusionDefinition() as fd:
        x, n = fd.define_tensor([-1], True, tensor), fd.define_scalar(None, dtype)
        fd.add_output(fd.ops.add(x, n))
    return fd


@pytest.mark.parametrize(
    ("dtype", "tensor", "value", "fits"),
    [
        (DataType.Int32, DataType.Int, 2**40, 2**31 - 1),
        (DataType.Int32, DataType.Int, -(2**31) - 1, -(2**31)),
        (DataType.Int, DataType.Int, 2**63, 2**62),
        (DataType.Float, DataType.Float, 1e300, 1e38),
        (DataType.Double, DataType.Float, HUGE, 2**70),
    ],
    ids=["above int", "below int", "int64_t", "float", "double"],
)
def test_an_input_number_that_does_not_fit(
    dtype: DataType, tensor: DataType, value: float, fits: float
) -> None:
    fd = elementwise(dtype, tensor)
    x = torch.ones(3, dtype=torch.int64 if tensor is DataType.Int else torch.float32)
    with pytest.raises(InputError, match=r"Expected input 1, .* is out of the range of"):
        fd.execute([x, value])
    (out,) = fd.execute([x, fits])
    torch.testing.assert_close(out, x + float(fits) if x.is_floating_point() else x + fits)
    with pytest.raises(FuserError):
        fd.execute([x, 1e300 if isinstance(value, float) else HUGE])


def test_a_tensor_instead_of_a_list_of_inputs() -> None:
    fd = elementwise(DataType.Double, DataType.Float)
    with pytest.raises(InputError, match=r"got a tensor: pass \[tensor\]"):
        fd.execute(torch.ones(2))
    with pytest.raises(OptionError, match="a list of names, got None"):
        fd.execute([torch.ones(2), 1.0], _enable_options=None)  # pyright: ignore[reportArgumentType]


def test_two_definitions_are_not_mixed() -> None:
    with FusionDefinition() as first:
        x = first.define_tensor([-1, -1], contiguity=True)
        with FusionDefinition() as second:
            y = second.define_tensor([-1, -1], contiguity=True)
            for mixed in (lambda: second.ops.exp(x), lambda: second.ops.add(y, x)):
                with pytest.raises(DefinitionError, match=r"T0.* belongs to another definition"):
                    mixed()
            with pytest.raises(DefinitionError, match=r"add_output of T0.* another definition"):
                second.add_output(x)
            second.add_output(second.ops.exp(y))
        first.add_output(first.ops.neg(x))
    t = torch.rand(2, 3)
    torch.testing.assert_close(second.execute([t])[0], t.double().exp().float())
    torch.testing.assert_close(first.execute([t])[0], -t)


def test_a_scalar_of_another_definition_is_refused() -> None:
    with FusionDefinition() as first:
        extents = first.define_tensor([-1] * 9, contiguity=True).shape()
        number = first.define_scalar(None, DataType.Int)
    with FusionDefinition() as second:
        y = second.define_tensor([-1], contiguity=True, dtype=DataType.Int)
        for foreign in (number, extents[8], first_sum(extents)):
            for mixed in (
                lambda s: second.ops.add(y, s),
                lambda s: second.ops.full([3, s], 1.0, DataType.Float),
                lambda s: second.ops.reshape(y, [s, -1]),
            ):
                with pytest.raises(DefinitionError, match=r"belongs to another definition .*py:"):
                    mixed(foreign)
        mine = second.define_scalar(None, DataType.Int)
        second.add_output(second.ops.add(y, second.ops.mul(mine, y.size(0))))
    (out,) = second.execute([torch.arange(3), 2])
    assert out.tolist() == [6, 7, 8]


def first_sum(extents: list[Scalar]) -> Scalar:
    with FusionDefinition() as fd:
        fd.define_tensor([-1] * 9, contiguity=True)
        total = fd.ops.add(extents[7], fd.ops.mul(extents[8], 2))
    assert isinstance(total, Scalar)
    return total


def test_a_definition_is_valid_after_it_ran() -> None:
    fd = elementwise(DataType.Double, DataType.Float)
    assert fd.validate_definition() == (True, None)
    fd.execute([torch.ones(2), 1.0])
    assert fd.validate_definition() == (True, None)


def test_a_definition_without_an_output_says_what_is_missing() -> None:
    with FusionDefinition() as fd:
        fd.ops.neg(fd.define_tensor([-1], contiguity=True))
    with pytest.raises(EmptyDefinitionError, match=r"no output: call fd\.add_output"):
        fd.execute([torch.ones(2)])


def test_a_method_that_is_not_called_is_named() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        with pytest.raises(
            ArgumentError, match=r"got the method TensorView\.dtype, which is not called"
        ):
            fd.ops.cast(x, x.dtype)  # pyright: ignore[reportArgumentType]
        fd.add_output(x)


def test_torch_dtypes_are_taken() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], dtype=torch.float16, contiguity=True)
        n = fd.define_scalar(None, torch.int64)
        assert isinstance(n, Scalar) and n.dtype is DataType.Int
        fd.add_output(fd.ops.sum(fd.ops.cast(x, torch.float32), 0, dtype=torch.float64))
    (out,) = fd.execute([torch.ones(5, dtype=torch.float16), 3])
    assert out.dtype is torch.float64 and out.item() == 5


def test_a_tensor_is_no_list_of_references() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.neg(x))
    given = torch.ones(2, 3)
    with pytest.raises(ArgumentError, match="reference_outputs: expected a list of torch tensors"):
        fd.validate([given], -given)
    fd.validate([given], [-given])


@pytest.mark.parametrize("by_hand", [False, True], ids=["execute", "manual_execute"])
def test_what_an_executor_has_taken_is_not_changed(by_hand: bool) -> None:
    """Repeated calls would not notice a change of a fusion that an executor owns."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 4], contiguity=True)
        y = fd.ops.neg(x)
    fd.add_output(y)  # the block has ended, but nothing has run
    run = fd.manual_execute if by_hand else fd.execute
    run([torch.ones(2, 4)])
    changes: list[Callable[[], object]] = [
        lambda: fd.add_output(x),
        lambda: fd.add_output(y, x),
        lambda: fd.fusion.add_output(x),
        lambda: fd.fusion.add_input(y),
        lambda: y.set_device_mesh(DeviceMesh([0])),
        lambda: y.axis(1).parallelize(ParallelType.mesh_x),
        lambda: y.axis(0).parallelize(ParallelType.stream),
        lambda: y.set_allocation_domain([y.axis(1), y.axis(0)], True),
    ]
    for change in changes:
        with pytest.raises(
            DefinitionError, match=r"has already been executed.*test_definition_misuse\.py"
        ):
            change()
    assert "DeviceMesh" not in str(y) and "streamIdx" not in str(y)
    for rows in (2, 3):
        (out,) = run([torch.ones(rows, 4)])
        assert torch.equal(out, -torch.ones(rows, 4)) and out.is_contiguous()


def test_a_definition_is_written_once() -> None:
    fd = FusionDefinition()
    with fd:
        x = fd.define_tensor([-1])
        with pytest.raises(DefinitionError, match=r"its `with` block has not ended .*misuse\.py"):
            fd.__enter__()
        fd.add_output(fd.ops.neg(x))
    with fd:  # before it runs: anew
        fd.add_output(fd.ops.exp(fd.define_tensor([-1])))
    assert fd.execute([torch.zeros(2)])[0].tolist() == [1.0, 1.0]
    with pytest.raises(DefinitionError, match=r"has run already .*test_definition_misuse\.py"):
        fd.__enter__()
    with pytest.raises(DefinitionError, match="no active fusion"):
        fd.ops.full([2], 1.0, DataType.Float)


def test_a_guard_ends_with_its_name() -> None:
    """A FusionGuard ends when its name is deleted, as nvFuser's, which needs no `with` block."""
    fusion = Fusion()
    guard = FusionGuard(fusion)
    x = define_tensor([-1], contiguity=True)
    fusion.add_input(x)
    fusion.add_output(ops.neg(x))
    del guard
    with pytest.raises(DefinitionError, match="no active fusion"):
        ops.neg(x)
    cache = FusionExecutorCache(fusion)
    assert cache.execute([torch.ones(2)])[0].tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("of", [FusionGuard, FusionExecutorCache])
@pytest.mark.parametrize("junk", [None, FusionDefinition(), 3])
def test_what_is_no_fusion(of: Callable[[object], object], junk: object) -> None:
    with pytest.raises(ArgumentError, match=rf"{of.__name__}\(\).*: fusion: expected a Fusion"):
        of(junk)


def test_memory_orders_that_cannot_be_meant() -> None:
    with FusionDefinition() as other:
        foreign = other.define_tensor([-1, -1])
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        y = fd.ops.neg(x)
        fd.add_output(y)
        turned = [y.axis(1), y.axis(0)]
        for axes, flags, why in (
            (x.get_loop_domain(), True, "is an axis of T0.*, not of T1"),
            (foreign.get_loop_domain(), True, "in another definition, not of T1"),
            (turned, [True], "expected 2 contiguity flags, one per axis, got 1"),
        ):
            with pytest.raises(DefinitionError, match=why):
                y.set_allocation_domain(axes, flags)
        y.set_allocation_domain(turned, True)
        y.set_allocation_domain([], True)
    assert fd.execute([torch.ones(2, 3)])[0].stride() == (3, 1)
