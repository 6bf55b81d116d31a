"""Errors about shardings name the line of the user's program that caused them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fuser import FusionDefinition, ParallelType, multidevice
from fuser.ir.fusion import Axis, TensorView
from fuser.multidevice import DeviceMesh
from fuser.support.errors import FuserError, InputError, ShardingError, UnsupportedError
from multidevice import simulate

FIRST, SECOND = DeviceMesh([0, 1]), DeviceMesh([2, 3])


X, STREAM = ParallelType.mesh_x, ParallelType.stream


def cut(tv: TensorView) -> Axis:
    return tv.outer_split(0, 2).axis(0)


def indivisible_input(fd: FusionDefinition) -> None:
    x = fd.define_tensor([7, 4], contiguity=True)
    fd.add_output(fd.ops.exp(x))
    x.set_device_mesh(FIRST)
    cut(x).parallelize(X)  # indivisible_input


def too_many_ranks(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1, 4], contiguity=True)
    x.set_device_mesh(DeviceMesh([0, 9]))  # too_many_ranks
    fd.add_output(fd.ops.exp(x))


def no_mesh(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1, 4], contiguity=True)
    y = fd.ops.exp(x)
    fd.add_output(y)
    cut(x).parallelize(X)  # no_mesh
    y.set_device_mesh(FIRST)


def steps_between_meshes(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1, 4], contiguity=True)
    y = fd.ops.set(x)  # steps_between_meshes
    fd.add_output(y)
    x.set_device_mesh(FIRST)
    y.set_device_mesh(SECOND)
    y.axis(1).parallelize(ParallelType.stream)


def device_inside_of_a_serial_axis(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1, 4], contiguity=True)
    fd.add_output(fd.ops.exp(x))
    x.set_device_mesh(FIRST)
    x.outer_split(0, 4)
    x.outer_split(1, 2)
    x.axis(1).parallelize(X)  # device_inside_of_a_serial_axis


def stream_inside(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1, 4], contiguity=True)
    y = fd.ops.exp(x)
    fd.add_output(y)
    y.split(0, 2)
    y.axis(1).parallelize(STREAM)  # stream_inside


def two_streams(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1, 4], contiguity=True)
    y = fd.ops.exp(x)
    fd.add_output(y)
    y.axis(0).parallelize(STREAM)
    y.axis(1).parallelize(STREAM)  # two_streams


def two_device_axes(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1, -1], contiguity=True)
    fd.add_output(fd.ops.exp(x))
    x.set_device_mesh(FIRST)
    for axis in range(2):
        x.axis(axis).parallelize(X)  # two_device_axes


def rotated_without_a_mesh(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1, 4], contiguity=True)
    y = fd.ops.exp(x)
    fd.add_output(y)
    cut(y)
    y.swizzle1d(0, X)
    y.axis(0).parallelize(STREAM)  # rotated_without_a_mesh


def rotated_by_a_dimension_that_is_not_there(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1, 4], contiguity=True)
    y = fd.ops.exp(x)
    fd.add_output(y)
    x.set_device_mesh(FIRST)
    cut(y)
    y.swizzle1d(0, ParallelType.mesh_y)
    y.axis(0).parallelize(STREAM)  # rotated_by_a_dimension_that_is_not_there


def indivisible_rows_of_an_exchange(fd: FusionDefinition) -> None:
    """The ranks exchange an intermediate tensor first, which the user did not define."""
    x, w = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
    y = fd.ops.linear(x, w)
    fd.add_output(y)
    for tv in (x, w, y):
        tv.set_device_mesh(FIRST)
    for tv in (x, w):
        tv.outer_split(1, 2)
        tv.axis(1).parallelize(X)
    cut(y).parallelize(X)  # indivisible_rows_of_an_exchange
    cut(x)
    x.swizzle1d(0, X)
    x.axis(0).parallelize(STREAM)


@pytest.mark.finding("G21")
@pytest.mark.parametrize(
    ("define", "kind", "why"),
    [
        (indivisible_input, InputError, r"size [34] at axis 0 .* \(7 over 2 ranks.* whole tensor"),
        (too_many_ranks, ShardingError, "names rank 9, but the job has 4 ranks"),
        (no_mesh, ShardingError, "has no mesh: call set_device_mesh"),
        (
            steps_between_meshes,
            UnsupportedError,
            r"set of input 0 \(T0_g_float\) from DeviceMesh\{0 1\} to DeviceMesh\{2 3\}: the steps",
        ),
        (
            device_inside_of_a_serial_axis,
            UnsupportedError,
            "give the outer axis a device type or stream",
        ),
        (stream_inside, UnsupportedError, r"streams on inner splits: .* by outer_split\(axis, num"),
        (
            two_streams,
            ShardingError,
            r"T1_g_float\) has 2 axes on stream, but only(?s:.*)in the IR: istream\S+ and istream",
        ),
        (
            two_device_axes,
            ShardingError,
            r"T0_g_float\) has 2 axes on mesh_x, but only(?s:.*)in the IR: idev\S+ and idev",
        ),
        (
            rotated_without_a_mesh,
            ShardingError,
            "mesh_x of T1_g_float.* no mesh, so call set_device",
        ),
        (
            rotated_by_a_dimension_that_is_not_there,
            ShardingError,
            r"mesh_y of T1_g_float.*: DeviceMesh\{0 1\} has no dimension mesh_y",
        ),
        (
            indivisible_rows_of_an_exchange,
            ShardingError,
            r"axis 0 of the result of sum \(T2_g_float\)",
        ),
    ],
)
def test_refused_shardings_name_the_users_line(
    define: Callable[[FusionDefinition], None], kind: type[FuserError], why: str
) -> None:
    with FusionDefinition() as fd:
        define(fd)

    def body() -> None:
        with pytest.raises(kind, match=why) as caught:
            fd.execute([torch.ones(7, 4)] * len(fd.fusion.inputs))
        messages.append(str(caught.value))

    messages: list[str] = []
    with simulate(4) as world:
        world.run(body)
    lines = Path(__file__).read_text().splitlines()
    (line,) = (n for n, text in enumerate(lines, 1) if text.endswith(f"  # {define.__name__}"))
    assert all(f"(user code at {__file__}:{line})" in m for m in messages), messages
    # The first line has plain words; the IR's text, iS3{( ceilDiv(i0, 2) )}, follows below.
    assert not any(re.search(r"\b[ibr]\w*\d+\{", m.splitlines()[0]) for m in messages), messages


def test_a_call_on_an_annotated_tensor_says_which_line_is_which() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 4], contiguity=True)
        fd.add_output(fd.ops.exp(x))
        x.set_device_mesh(FIRST)
        cut(x).parallelize(X)  # annotated

    def body() -> None:
        with pytest.raises(
            ShardingError, match=r"extent 1 .* is not divisible by 2 .*: pad it to 2"
        ) as caught:
            multidevice.shard_tensor(torch.ones(1, 4), x)  # called
        messages.append(str(caught.value))

    messages: list[str] = []
    with simulate(2) as world:
        world.run(body)
    lines = Path(__file__).read_text().splitlines()
    at = {m: next(n for n, t in enumerate(lines, 1) if t.endswith(f"  # {m}")) for m in MARKS}
    annotated, called = (f"{__file__}:{at[m]}" for m in MARKS)
    assert all(m.endswith(f"(annotated at {annotated}) (user code at {called})") for m in messages)


MARKS = ("annotated", "called")
