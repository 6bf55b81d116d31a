"""Collectives send dense memory in the declared order; a kernel packs views that are not."""

from __future__ import annotations

import itertools

import pytest
import torch

from fuser import DataType, FusionDefinition, ParallelType, multidevice
from fuser.ir.fusion import TensorView
from multidevice import simulate

X = ParallelType.mesh_x


def cut(tv: TensorView, axis: int | None) -> None:
    if axis is not None:
        tv.outer_split(axis, 2)
        tv.axis(axis).parallelize(X)


def run_on_two(define: object, given: list[torch.Tensor], want: torch.Tensor) -> str:
    """Runs a program on two simulated ranks, compares each shard exactly, returns the program's
    text.

    `define(fd)` returns the inputs and the output, with their cuts.
    """

    def body() -> str:
        with FusionDefinition() as fd:
            inputs, out = define(fd)  # pyright: ignore[reportCallIssue]
            fd.add_output(out)
        shards = [multidevice.shard_tensor(t, tv) for t, tv in zip(given, inputs, strict=True)]
        (got,) = fd.execute(shards)
        torch.testing.assert_close(got, multidevice.shard_tensor(want, out), rtol=0, atol=0)
        return str(fd.fec.host_program())

    with simulate(2) as world:
        return world.run(body)[0]


@pytest.mark.parametrize("source", [0, 1])
@pytest.mark.parametrize("target", [None, 0, 1])
def test_a_transposed_shard_is_packed(source: int, target: int | None) -> None:
    whole = torch.randn(4, 6)

    def define(fd: FusionDefinition) -> tuple[list[TensorView], TensorView]:
        x = fd.define_tensor([4, 6], contiguity=True)
        t = fd.ops.permute(x, [1, 0])
        for tv in (x, t):
            tv.set_device_mesh([0, 1])
        cut(x, source)
        cut(t, target)
        return [x], t

    run_on_two(define, [whole], whole.t().contiguous())


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("source", [0, 1, 2])
def test_permuted_shards_of_three_axes(order: tuple[int, ...], source: int) -> None:
    whole = torch.randn(2, 4, 6)

    def define(fd: FusionDefinition) -> tuple[list[TensorView], TensorView]:
        x = fd.define_tensor([-1, -1, -1], contiguity=True)
        t = fd.ops.permute(x, list(order))
        y = fd.ops.set(t)
        for tv in (x, y):
            tv.set_device_mesh([0, 1])
        cut(x, source)
        return [x], y

    run_on_two(define, [whole], whole.permute(order).contiguous())


@pytest.mark.parametrize("what", ["slice", "reshape of a permute", "squeeze", "broadcast"])
def test_other_views_that_are_sent(what: str) -> None:
    whole = torch.randn(4, 1, 6)
    views = {
        "slice": (
            lambda fd, x: fd.ops.slice(x, [0, 0, 1], [4, 1, 5]),
            whole[:, :, 1:5],
        ),
        "reshape of a permute": (
            lambda fd, x: fd.ops.reshape(
                fd.ops.permute(fd.ops.reshape(x, [4, 2, 3]), [0, 2, 1]), [4, 6]
            ),
            whole.reshape(4, 2, 3).transpose(1, 2).reshape(4, 6),
        ),
        "squeeze": (lambda fd, x: fd.ops.squeeze(x, [1]), whole.squeeze(1)),
        "broadcast": (
            lambda fd, x: fd.ops.broadcast(x, [False, True, False, False]),
            whole.unsqueeze(1),
        ),
    }
    view, want = views[what]

    def define(fd: FusionDefinition) -> tuple[list[TensorView], TensorView]:
        x = fd.define_tensor([4, 1, 6], contiguity=True)
        y = fd.ops.set(view(fd, x))
        for tv in (x, y):
            tv.set_device_mesh([0, 1])
        cut(x, 0)
        return [x], y

    text = run_on_two(define, [whole], want.contiguous())
    assert "Allgather" in text
    # A tensor that is dense already is sent without a copy.
    assert ("LaunchKernel" in text) == (what not in ("squeeze", "broadcast"))


@pytest.mark.parametrize("order", [[0, 2, 1, 3], [2, 0, 1, 3], [2, 1, 0, 3]])
@pytest.mark.parametrize("target", [None, 1])
def test_heads_of_a_column_parallel_linear_are_gathered(
    order: list[int], target: int | None
) -> None:
    """Attention cut along the sequence: linear, reshape to heads, permute, cut of another axis.

    In the order heads, sequence, batch, the data was once sent in the memory order of the linear.
    """
    b, s, heads, width = 2, 4, 2, 3
    x_whole = torch.randint(-3, 4, (b, s, 5)).float()
    w_whole = torch.randint(-3, 4, (heads * width, 5)).float()
    want = (x_whole @ w_whole.t()).view(b, s, heads, width).permute(order).contiguous()

    def define(fd: FusionDefinition) -> tuple[list[TensorView], TensorView]:
        x = fd.define_tensor([b, s, 5], contiguity=True, dtype=DataType.Float)
        w = fd.define_tensor([heads * width, 5], contiguity=True, dtype=DataType.Float)
        h = fd.ops.reshape(fd.ops.linear(x, w), [b, s, heads, width])
        out = fd.ops.set(fd.ops.permute(h, order))
        for tv in (x, w, out):
            tv.set_device_mesh([0, 1])
        cut(w, 0)
        cut(out, None if target is None else order.index(target))
        return [x, w], out

    run_on_two(define, [x_whole, w_whole], want)


@pytest.mark.parametrize("source", [None, 0, 1])
@pytest.mark.parametrize("target", [None, 0, 1])
@pytest.mark.parametrize("computed", [False, True])
def test_expanded_axes_are_resharded_without_their_copies(
    source: int | None, target: int | None, computed: bool
) -> None:
    """A cut of an expanded axis moves no data: each rank has the one element of it."""
    whole = torch.randn(4, 1).expand(4, 6)

    def define(fd: FusionDefinition) -> tuple[list[TensorView], TensorView]:
        x = fd.define_tensor([4, -1], contiguity=[True, None])
        y = fd.ops.set(fd.ops.neg(x) if computed else x)
        for tv in (x, y):
            tv.set_device_mesh([0, 1])
        cut(x, source)
        cut(y, target)
        return [x], y

    run_on_two(define, [whole], -whole if computed else whole)


@pytest.mark.parametrize("op", ["matmul", "linear"])
@pytest.mark.parametrize("cuts", [(None, 0), (1, None), (1, 0)])
def test_a_contraction_over_expanded_axes_that_are_cut(
    op: str, cuts: tuple[int | None, int | None]
) -> None:
    """The product of two expanded axes sums over all their elements, so a cut makes partial sums.

    It was once taken for a product over an axis of size 1, and torch refused the shards.
    """
    left = torch.randint(-4, 5, (2, 1)).float().expand(2, 6)
    right = torch.randint(-4, 5, (1, 4)).float().expand(6, 4)
    if op == "linear":
        right, cuts = right.t(), (cuts[0], None if cuts[1] is None else 1)

    def define(fd: FusionDefinition) -> tuple[list[TensorView], TensorView]:
        a = fd.define_tensor([2, 6], contiguity=[True, None])
        if op == "matmul":
            b = fd.define_tensor([6, 4], contiguity=[None, True])
        else:
            b = fd.define_tensor([4, 6], contiguity=[True, None])
        out = getattr(fd.ops, op)(a, b)
        for tv in (a, b, out):
            tv.set_device_mesh([0, 1])
        cut(a, cuts[0])
        cut(b, cuts[1])
        return [a, b], out

    run_on_two(define, [left, right], left @ (right if op == "matmul" else right.t()))


@pytest.mark.parametrize("op", ["max", "sum"])
def test_a_partial_reduction_of_an_expanded_tensor(op: str) -> None:
    """No scheduler accepted the reduction of a shard of a tensor broadcast along the device
    axis.
    """
    whole = torch.randint(-9, 10, (1, 4, 8)).float().expand(12, 4, 8)

    def define(fd: FusionDefinition) -> tuple[list[TensorView], TensorView]:
        x = fd.define_tensor([-1, 4, -1], contiguity=[None, False, False])
        out = getattr(fd.ops, op)(x, dims=[1], keepdim=False)
        for tv in (x, out):
            tv.set_device_mesh([0, 1])
        cut(x, 1)
        return [x], out

    run_on_two(define, [whole], whole.amax(1) if op == "max" else whole.sum(1))
