"""Wrong arguments raise errors with nvFuser's own messages, which its users match."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fuser import (
    DataType,
    FusionDefinition,
    KernelExecutor,
    ParallelType,
    SchedulerType,
    TensorView,
    compute_tensor_descriptor,
    schedule,
)

D = DataType
Define = Callable[..., object]


def tensor(fd: FusionDefinition, *shape: int, dtype: DataType = D.Float) -> TensorView:
    return fd.define_tensor(shape=list(shape), contiguity=True, dtype=dtype)


# Mistakes in the definition of a fusion of a [4, 4] tensor: the call, the error, its message.
DEFINED: list[tuple[Define, type[Exception], str]] = [
    (lambda fd, t: t.size(5), RuntimeError, "out of boundary index 5. total index: 2"),
    (lambda fd, t: t.size(-3), RuntimeError, "Tried to access out of boundary index"),
    (lambda fd, t: t.axis(2), RuntimeError, "out of boundary index 2. total index: 2"),
    (
        lambda fd, t: tensor(fd).axis(0),
        RuntimeError,
        "Tried to access an axis in a 0-dim TensorView",
    ),
    (lambda fd, t: t.split(0, 0), RuntimeError, "Invalid factor for split"),
    (lambda fd, t: t.outer_split(1, -2), RuntimeError, "Invalid factor for split"),
    (
        lambda fd, t: (t.axis(0).parallelize(ParallelType.mesh_x), t.split(0, 2)),
        RuntimeError,
        "of non-Serial parallel type is not supported at this time",
    ),
    (
        lambda fd, t: fd.ops.relu(t).rfactor(axes=[0]),
        RuntimeError,
        "because its definition is not a reduction.",
    ),
    (lambda fd, t: fd.ops.neg(t).rfactor([1]), RuntimeError, "Error rfactoring"),
    (lambda fd, t: fd.ops.neg(t).definition().output(1), IndexError, ""),
    # define_tensor
    (
        lambda fd, t: fd.define_tensor([4, -2], [True, True]),
        RuntimeError,
        "The value -2 at index 1 was neither symbolic(-1), zero_element(0), broadcast(1), or "
        "static(>1).",
    ),
    (
        lambda fd, t: fd.define_tensor([4, -1], [True]),
        RuntimeError,
        "Length of contiguity argument (1) must match that of shape argument (2)",
    ),
    (
        lambda fd, t: fd.define_tensor([-1, -1], [True, True], stride_order=[0, 2]),
        RuntimeError,
        "defineTensor stride_order argument is out of range, expects",
    ),
    (
        lambda fd, t: fd.define_tensor([-1, -1], [True, True], stride_order=[0, 0]),
        RuntimeError,
        "defineTensor got duplicated stride_order entries",
    ),
    (
        lambda fd, t: fd.define_tensor([-1, -1], [True, True], stride_order=[0]),
        RuntimeError,
        "Length of stride_order argument (1) must be zero or match that of shape argument (2)",
    ),
    (
        lambda fd, t: fd.define_tensor([-1], [True], is_cpu=True),
        RuntimeError,
        "CPU non-scalar tensor is not supported!",
    ),
    # inputs and outputs
    (
        lambda fd, t: fd.add_output(fd.define_scalar(D.Int)),
        RuntimeError,
        "Non-TensorView outputs are not supported at this point",
    ),
    (
        lambda fd, t: fd.add_output(fd.ops.neg(t), fd.ops.abs(t)),
        RuntimeError,
        "alias source can only be a fusion input",
    ),
    (
        lambda fd, t: fd.fusion.add_input(fd.define_scalar(2.0)),
        RuntimeError,
        "Immediate scalar value cannot be added as an input",
    ),
    (
        lambda fd, t: fd.fusion.add_input(t),
        RuntimeError,
        "is already registered as input, duplicated inputs is not allowed",
    ),
    # ops
    (
        lambda fd, t: fd.ops.max(t, [1], False, D.Double),
        RuntimeError,
        "A dtype other than Null is not currently supported.",
    ),
    (
        lambda fd, t: fd.ops.min(t, dims=[1], dtype=D.Float),
        RuntimeError,
        "A dtype other than Null is not currently supported.",
    ),
    (
        lambda fd, t: fd.ops.var_mean(fd.ops.cast(t, D.Half), [1]),
        RuntimeError,
        "variance_mean is not supported for __half please upcast to float",
    ),
    (
        lambda fd, t: fd.ops.var_mean(fd.ops.cast(t, D.BFloat16), dims=[0, 1]),
        RuntimeError,
        "variance_mean is not supported for __bfloat please upcast to float",
    ),
    (
        lambda fd, t: fd.ops.reshape(t, [2, "x"]),
        RuntimeError,
        "Unsupported iterable object type for define_vector! Index:1",
    ),
    (
        lambda fd, t: fd.ops.full((4.0,), 1.0, D.Float),
        RuntimeError,
        "Unsupported iterable object type for define_vector! Index:0",
    ),
    (
        lambda fd, t: fd.ops.reshape(t, [-1, -1]),
        RuntimeError,
        "A maximum of one value of -1 can be specified.",
    ),
    (
        lambda fd, t: fd.ops.reshape(t, new_shape=[3, 5]),
        RuntimeError,
        "Total element counts across view operation must match",
    ),
    (
        lambda fd, t: fd.ops.broadcast_in_dim(t, [4, 4, 4], [1, 1]),
        RuntimeError,
        "is specified more than once.",
    ),
    (
        lambda fd, t: fd.ops.squeeze(t, [0]),
        RuntimeError,
        "Can not squeeze non-broadcasting dimension(s).",
    ),
    (
        lambda fd, t: fd.ops.slice(t, [-1, 0], [2, 2]),
        RuntimeError,
        "Slice operation start_indices must be greater than or equal to 0. Start Indices: -1",
    ),
    (
        lambda fd, t: fd.ops.slice(t, [3, 0], [2, 2]),
        RuntimeError,
        "Slice operation end_indices must be greater than or equal to start_indices.",
    ),
    (
        lambda fd, t: fd.ops.slice(t, [0, 0], [2, 2], [2, 1]),
        RuntimeError,
        "nvFuser Limitation: All slice operation strides must be of const size 1.",
    ),
    (
        lambda fd, t: fd.ops.slice(t, [0, 0], (2, 2)),
        TypeError,
        "slice(): incompatible function arguments",
    ),
    (
        lambda fd, t: fd.ops.pad(t, [1, 1], fd.define_scalar(1, dtype=D.Int)),
        RuntimeError,
        "Tensor arg and pad value must have the same dtype.",
    ),
    (
        lambda fd, t: fd.ops.select(t, "1", 0),
        TypeError,
        "select(): incompatible function arguments",
    ),
    (lambda fd, t: fd.ops.topk(t, [2]), TypeError, "topk(): incompatible function arguments"),
    (
        lambda fd, t: fd.ops.cumsum(t, 0, "0"),
        TypeError,
        "cumsum(): incompatible function arguments",
    ),
    (
        lambda fd, t: fd.ops.scatter(t, fd.ops.cast(t, D.Int), [1.0], 0),
        TypeError,
        "scatter(): incompatible function arguments",
    ),
    (
        lambda fd, t: fd.ops.uniform(0.0, 1.0, [4], D.Float),
        TypeError,
        "uniform(): incompatible function arguments",
    ),
    (lambda fd, t: fd.ops.neg(x=t), TypeError, "neg(): incompatible function arguments"),
    (lambda fd, t: fd.ops.add(t), TypeError, "add(): incompatible function arguments"),
    (
        lambda fd, t: fd.ops.cast(t, "float"),
        TypeError,
        "cast(): incompatible function arguments",
    ),
    (lambda fd, t: fd.ops.iota(4, 0, 0), RuntimeError, ""),
    (lambda fd, t: fd.ops.permute(t, [0, 0]), RuntimeError, ""),
    (lambda fd, t: fd.ops.cat([t, fd.ops.cast(t, D.Half)], 0), RuntimeError, ""),
]


@pytest.mark.parametrize(("call", "kind", "words"), DEFINED)
def test_while_defining(call: Define, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=re.escape(words) or None), FusionDefinition() as fd:
        call(fd, tensor(fd, 4, 4))


def defined(scalar: DataType | None = None, *shape: int) -> FusionDefinition:
    with FusionDefinition() as fd:
        t = tensor(fd, *(shape or (-1, -1)))
        fd.add_output(fd.ops.mul(t, 2.0 if scalar is None else fd.define_scalar(scalar)))
    return fd


def both(first: str, second: str) -> None:
    fd = defined()
    for name in (first, second):
        getattr(fd, name)([X])


def empty(add: Callable[[FusionDefinition], object]) -> FusionDefinition:
    with FusionDefinition() as fd:
        add(fd)
    return fd


def kernel_of_matmul() -> None:
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.matmul(tensor(fd, -1, -1), tensor(fd, -1, -1)))
    KernelExecutor().compile(fd.fusion, [X, X.T.contiguous()])


def heuristics_of_another_kind() -> None:
    fd = defined()
    schedule.compute_heuristics(fd.fusion, SchedulerType.reduction, [X])


X = torch.ones(2, 3)
# Mistakes in the call that runs a definition.
RUN: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: FusionDefinition().execute([]),
        NotImplementedError,
        "Fusion does not exist! Use `with FusionDefinition() as fd: ...` to define a fusion.",
    ),
    (lambda: empty(lambda fd: None).execute([]), NotImplementedError, "Fusion is empty!"),
    (
        lambda: empty(lambda fd: tensor(fd, -1)).execute([X[0]]),
        NotImplementedError,
        "Fusion is empty!",
    ),
    (
        lambda: defined().execute([]),
        RuntimeError,
        "KernelArgumentHolder contains less argument than kernel's input.",
    ),
    (
        lambda: defined().execute([2]),
        RuntimeError,
        "Expected input 0, T0_g_float[iS0{i0}, iS1{i1}], to be an at::Tensor but got scalar 2",
    ),
    (
        lambda: defined(D.Double).execute([X, X[0]]),
        RuntimeError,
        "to be a scalar but got float tensor of rank 1",
    ),
    (
        lambda: defined(D.Double).execute([X, torch.tensor(1.0)]),
        RuntimeError,
        "to be a scalar but got float tensor of rank 0",
    ),
    (
        lambda: defined(D.Int).execute([X, 2.5]),
        RuntimeError,
        "is not compatible with the expected data type: int64_t.",
    ),
    (
        lambda: defined(None, 4, 3).execute([X]),
        RuntimeError,
        "Tried to bind to a constant value: 4 as 2",
    ),
    (
        lambda: defined().execute([X], _enable_options=["warp_drive"]),
        RuntimeError,
        "Unrecognized enable_option: warp_drive",
    ),
    (
        lambda: defined().execute([X], _disable_options=["warp_drive"]),
        RuntimeError,
        "Unrecognized disable_option: warp_drive",
    ),
    (
        lambda: both("execute", "manual_execute"),
        AssertionError,
        "FusionExecutorCache already exists! Use execute() to execute the fusion.",
    ),
    (
        lambda: both("manual_execute", "execute"),
        AssertionError,
        "KernelExecutor already exists! Use manual_execute() to execute the fusion.",
    ),
    (lambda: defined().last_repro_script(), AssertionError, ""),
    (lambda: defined().validate([X], [X]), AssertionError, ""),
    (lambda: defined().validate([X], [2 * X, 2 * X]), AssertionError, ""),
    (
        kernel_of_matmul,
        RuntimeError,
        "KernelExecutor does not support the Fusion provided.",
    ),
    (
        heuristics_of_another_kind,
        RuntimeError,
        "Could not schedule fusion with the SchedulerType",
    ),
    (
        lambda: compute_tensor_descriptor([2], [-1]),
        RuntimeError,
        "negative stride on tensor is not supported: strides[0]=-1",
    ),
    (
        lambda: empty(lambda fd: fd.from_pytorch(torch.empty(2, device="meta"))),
        ValueError,
        "Found unsupported device meta",
    ),
    (
        lambda: empty(lambda fd: fd.from_pytorch(torch.empty(2, dtype=torch.int8))),
        KeyError,
        "torch.int8",
    ),
]


@pytest.mark.parametrize(("run", "kind", "words"), RUN)
def test_when_run(run: Callable[[], Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=re.escape(words) or None):
        run()
