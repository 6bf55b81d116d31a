"""Definitions of a matmul next to a communication, in the forms that benchmarks run.

Weights are cut over the d devices of a 1-D mesh. The forms are:

- "unchunked": one linear and one collective.
- "chunked": a stream axis of CHUNKS chunks, each shared by all ranks.
- "broadcasts" or "permutes" of gathers, "reduces" or "exchange" of sums: the shard outermost, one
  step per device. For "permutes" and "exchange", `swizzle1d` makes the steps of a device begin or
  end with its own block.
"""

from __future__ import annotations

from typing import Any

from fuser import DataType, FusionDefinition, ParallelType
from fuser.multidevice import DeviceMesh

CHUNKS = 8
X, STREAM = ParallelType.mesh_x, ParallelType.stream
# The definition, x, the weight, and the result.
Defined = tuple[FusionDefinition, Any, Any, Any]


def define_gather(form: str, d: int, m: int, k: int, n: int, dtype: DataType) -> Defined:
    """Defines x [M, K] or [chunks, ranks, M / (chunks ranks), K], gathered, then linear with w [N,
    K].
    """
    with FusionDefinition() as fd:
        x, w = _inputs(fd, chunks(d, m, k) if form == "chunked" else [m, k], [n, k], dtype=dtype)
        gathered = fd.ops.set(x)
        y = fd.ops.linear(gathered, w)
        fd.add_output(y)
        _place(d, x, w, gathered)
        _cut(w, 0, d)
        if form == "chunked":
            x.axis(1).parallelize(X)
            gathered.axis(0).parallelize(STREAM)
            return fd, x, w, y
        _cut(x, 0, d)
        if form != "unchunked":
            _in_steps(gathered, d, is_own_first=form == "permutes")
    return fd, x, w, y


def define_scatter(form: str, d: int, m: int, k: int, n: int, dtype: DataType) -> Defined:
    """Defines linear of x and w [N, K], both cut along K; the sum is cut by rows.

    x is [M, K] or [chunks, ranks, M / (chunks ranks), K].
    """
    with FusionDefinition() as fd:
        x, w = _inputs(fd, chunks(d, m, k) if form == "chunked" else [m, k], [n, k], dtype=dtype)
        y = fd.ops.linear(x, w)
        fd.add_output(y)
        _place(d, x, w, y)
        for tv in (x, w):
            _cut(tv, -1, d)
        if form == "chunked":
            y.axis(1).parallelize(X)
            y.axis(0).parallelize(STREAM)
        else:
            _cut(y, 0, d)
        if form in ("reduces", "exchange"):
            _in_steps(x, d, is_own_first=form == "exchange")
    return fd, x, w, y


def define_allreduce(form: str, d: int, m: int, k: int, n: int, dtype: DataType) -> Defined:
    """Defines linear of x [M, K] and w [N, K], both cut along K; every device has the whole sum.

    In the form "exchange", each device sums its rows, and all devices gather the rows then.
    """
    with FusionDefinition() as fd:
        x, w = _inputs(fd, [m, k], [n, k], dtype=dtype)
        summed = fd.ops.linear(x, w)
        y = fd.ops.set(summed) if form == "exchange" else summed
        fd.add_output(y)
        _place(d, x, w, y)
        for tv in (x, w):
            _cut(tv, -1, d)
        if form == "exchange":
            summed.set_device_mesh(y.mesh)
            _cut(summed, 0, d)
            _in_steps(x, d, is_own_first=True)
    return fd, x, w, y


def define_mlp(form: str, d: int, m: int, k: int, n: int, dtype: DataType) -> Defined:
    """Defines a sequence-parallel MLP, unchunked.

    x [M, K] is cut by rows; linear with [N, K], gelu, linear with [K, N]; the result is cut by
    rows. Its third input is the second weight.
    """
    assert form == "unchunked", f"the MLP has no form {form}"
    with FusionDefinition() as fd:
        x, up, down = _inputs(fd, [m, k], [n, k], [k, n], dtype=dtype)
        h = fd.ops.cast(fd.ops.linear(x, up), DataType.Float)
        h = fd.ops.mul(fd.ops.mul(h, 0.5), fd.ops.add(fd.ops.erf(fd.ops.mul(h, 0.5**0.5)), 1.0))
        y = fd.ops.linear(fd.ops.cast(h, dtype), down)
        fd.add_output(y)
        _place(d, x, up, down, y)
        for tv, axis in ((x, 0), (up, 0), (down, 1), (y, 0)):
            _cut(tv, axis, d)
    return fd, x, up, y


def chunks(d: int, m: int, k: int) -> list[int]:
    """Returns the extents of x in chunks that all ranks share."""
    return [CHUNKS, d, m // (CHUNKS * d), k]


def _inputs(fd: FusionDefinition, *shapes: list[int], dtype: DataType) -> list[Any]:
    return [fd.define_tensor(shape, contiguity=True, dtype=dtype) for shape in shapes]


def _place(d: int, *tensors: Any) -> None:
    for tv in tensors:
        tv.set_device_mesh(DeviceMesh(range(d)))


def _cut(tv: Any, axis: int, d: int) -> None:
    """Cuts an axis over the devices; -1 is the last one."""
    tv.outer_split(axis, d)
    tv.axis(axis if axis >= 0 else axis - 1).parallelize(X)


def _in_steps(tv: Any, d: int, *, is_own_first: bool) -> None:
    """Makes the blocks of the devices along axis 0 the steps of a loop over streams."""
    tv.outer_split(0, d)
    if is_own_first:
        tv.swizzle1d(0, X)
    tv.axis(0).parallelize(STREAM)
