"""Stream axes inside of and around the device blocks of one axis; each device gets its elements.

A test writes a nest of cuts outermost first. "S2~x x2" means two steps, numbered from the device's
place along mesh_x on, each cut into two blocks along mesh_x. "S" alone makes the rest of the axis a
stream.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fuser import FusionDefinition, ParallelType, TensorView, multidevice

pytestmark = pytest.mark.from_text

LINE = ((0, 1),)  # mesh_x
SQUARE = ((0, 1), (2, 3))  # mesh_y, mesh_x
PTYPES = {"S": ParallelType.stream, "x": ParallelType.mesh_x, "y": ParallelType.mesh_y}
Mesh = tuple[tuple[int, ...], ...]
Coordinates = dict[str, int]


def annotate(tv: TensorView, nest: str) -> None:
    for axis, word in enumerate(nest.split()):
        cut, _, along = word.partition("~")
        if cut[1:]:
            tv.outer_split(axis, int(cut[1:]))
        if along:
            tv.swizzle1d(axis, PTYPES[along])
        tv.axis(axis).parallelize(PTYPES[cut[0]])


def shard(whole: torch.Tensor, nest: str, me: Coordinates) -> torch.Tensor:
    """Returns a device's elements of axis 0: its block of each step."""
    counts = [(word[0], int(word[1:].split("~")[0])) for word in nest.split() if word[1:]]
    while counts and counts[-1][0] == "S":
        counts.pop()
    parts = whole.reshape(*(n for _, n in counts), -1, *whole.shape[1:])
    for axis in reversed(range(len(counts))):
        kind = counts[axis][0]
        parts = parts if kind == "S" else parts.select(axis, me[kind])
    return parts.reshape(-1, *whole.shape[1:])


def run_on(mesh: Mesh, body: Callable[[Coordinates], None]) -> None:
    columns = len(mesh[0])

    def on_rank() -> None:
        rank = multidevice.Communicator.instance().rank()
        body({"x": rank % columns, "y": rank // columns})

    with multidevice.simulate(columns * len(mesh)) as world:
        world.run(on_rank)


def device_mesh(mesh: Mesh) -> multidevice.DeviceMesh:
    return multidevice.DeviceMesh(torch.tensor(mesh).squeeze(0))


# mesh, input, what stands between, result
NESTS = [
    # Devices that are at different steps cannot gather step by step in their order.
    (LINE, "", "S2~x x2", ""),
    (LINE, "", "S2~x x2", "S2~x"),
    (LINE, "", "S2~x x2", "S2"),
    (LINE, "", "S2~x x2", "x2"),
    (LINE, "S2~x x2", "S2~x x2", "x2"),
    (LINE, "", "S2 x2", "S2~x"),
    (SQUARE, "", "S2~y x2", "S2~y"),
    (SQUARE, "y2", "S2~y x2", ""),
    # A stream that is all that a device has.
    (LINE, "", "x2 S", "x2 S"),
    (LINE, "x2", "", "x2 S"),
    (SQUARE, "", "x2 y2 S", "x2"),
    # Several types of devices in each step, and between steps of different sizes.
    (SQUARE, "", "S2 x2 y2", ""),
    (SQUARE, "", "", "S2 x2 y2"),
    (SQUARE, "S3 y2 x2", "x2", "S2 x2 y2"),
    (SQUARE, "", "S4 x2", "S2 y2 x2"),
    (SQUARE, "", "S2~x x2 y2", "S2~y y2 x2"),
    (SQUARE, "", "x2 S2 y2", "y2 S2 x2"),
    (SQUARE, "y2 x2", "S2 x2", "x2 S3 y2"),
]


@pytest.mark.parametrize("late", [(), ("late_stream(all)",)], ids=["in time", "late"])
@pytest.mark.parametrize(("mesh", "of_input", "between", "of_result"), NESTS)
def test_nests(mesh: Mesh, of_input: str, between: str, of_result: str, late: tuple[str]) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([48, 3], contiguity=True)
        t = fd.ops.relu(x)
        y = fd.ops.neg(t)
        fd.add_output(y)
    for tv, nest in ((x, of_input), (t, between), (y, of_result)):
        # Without annotations, the tensor in the middle gets its mesh from the other two.
        if nest or tv is not t:
            tv.set_device_mesh(device_mesh(mesh))
        annotate(tv, nest)
    whole = torch.linspace(-5, 9, 48 * 3).reshape(48, 3)

    def body(me: Coordinates) -> None:
        (got,) = fd.execute([shard(whole, of_input, me)], _enable_options=late)
        assert torch.equal(got, shard(-whole.relu(), of_result, me))

    run_on(mesh, body)


def test_a_ragged_stream_inside_of_devices_and_shared_rotated_steps() -> None:
    """A chain of reshapes with a symbolic extent between two nests of cuts."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        n = fd.ops.size(x, 0)
        t = fd.ops.relu(x)
        rows = fd.ops.reshape(t, [8, fd.ops.div(n, 8)])
        wide = fd.ops.broadcast(rows, [False, True, False])
        y = fd.ops.reshape(fd.ops.squeeze(wide, [1]), [fd.ops.mul(fd.ops.div(n, 8), 8)])
        fd.add_output(y)
    for tv in (x, t, wide, y):
        tv.set_device_mesh(device_mesh(SQUARE))
    annotate(t, "S2~x x2")
    annotate(wide, "y2 S3")
    whole = torch.linspace(-5, 9, 48)

    def body(_: Coordinates) -> None:
        (got,) = fd.execute([whole])
        assert torch.equal(got, whole.relu())

    run_on(SQUARE, body)


@pytest.mark.parametrize("late", [(), ("late_stream(all)",)], ids=["in time", "late"])
def test_views_of_devices_blocks_inside_of_steps(late: tuple[str]) -> None:
    """The check before a run took a view of one step's block for a view of all steps."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([24], contiguity=True)
        t = fd.ops.relu(x)
        rows = fd.ops.reshape(t, [12, 2])
        y = fd.ops.add(rows, rows)
        fd.add_output(y)
    for tv in (x, t, y):
        tv.set_device_mesh(device_mesh(LINE))
    annotate(t, "S3 x2")
    whole = torch.linspace(-5, 9, 24)

    def body(_: Coordinates) -> None:
        (got,) = fd.execute([whole], _enable_options=late)
        assert torch.equal(got, 2 * whole.relu().reshape(12, 2))

    run_on(LINE, body)


@pytest.mark.parametrize("nest", ["S2 x2", "x2 S2"])
def test_a_nest_behind_the_inner_part_of_a_reshape(nest: str) -> None:
    """A reshape that cannot have the steps of its result keeps the device cuts inside of
    them.
    """
    with FusionDefinition() as fd:
        x = fd.define_tensor([3, 32], contiguity=True)
        heads = fd.ops.reshape(fd.ops.relu(x), [3, 4, 8])
        y = fd.ops.permute(heads, [2, 0, 1])
        fd.add_output(y)
    for tv in (x, y):
        tv.set_device_mesh(device_mesh(LINE))
    annotate(y, nest)
    whole = torch.linspace(-5, 9, 96).reshape(3, 32)

    def body(me: Coordinates) -> None:
        (got,) = fd.execute([whole])
        assert torch.equal(got, shard(whole.relu().reshape(3, 4, 8).permute(2, 0, 1), nest, me))

    run_on(LINE, body)
