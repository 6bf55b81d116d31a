"""Meshes print their ranks, or ranges if they are large, and are read back unchanged."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from fuser import ParallelType
from fuser.ir.domain.device_mesh import SPELLED_OUT, DeviceMesh, read_mesh, read_ranks
from fuser.support.errors import ParseError
from fuser.support.text_cursor import Cursor
from multidevice.sharding.reshard import TeamOf


def block(*shape: int, start: int = 0) -> object:
    """Returns the ranks from `start` on, as nested lists with a shape."""
    counter = itertools.count(start)

    def fill(rest: tuple[int, ...]) -> object:
        return [fill(rest[1:]) for _ in range(rest[0])] if rest else next(counter)

    return fill(shape)


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        (range(16), "{0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15}"),
        (range(17), "{0..16}"),
        (range(1024), "{0..1023}"),
        ([*range(7), *range(8, 65)], "{0..6 8..64}"),
        (range(0, 1024, 8), "{0..1016 by 8}"),
        ([5, 3, *range(10, 30), 2], "{5 3 10..29 2}"),
        (range(31, -1, -1), "{" + " ".join(map(str, range(31, -1, -1))) + "}"),
        (block(4, 4), "{{0 1 2 3}{4 5 6 7}{8 9 10 11}{12 13 14 15}}"),
        (block(128, 8), "{{0..7}..{1016..1023}}"),
        (block(2, 16), "{{0..15}{16..31}}"),
        (block(512, 2), "{{0 1}..{1022 1023}}"),
        (block(4, 16, 16), "{{{0..15}..{240..255}}..{{768..783}..{1008..1023}}}"),
        ([list(range(k, 64, 8)) for k in range(8)], "{{0..56 by 8}..{7..63 by 8} by 1}"),
    ],
)
@pytest.mark.finding("F21")
def test_text_of_a_mesh(devices: object, text: str) -> None:
    mesh = DeviceMesh(devices)
    assert str(mesh) == f"DeviceMesh{text}"
    assert read_mesh(Cursor(str(mesh))) == mesh


def test_every_mesh_reads_back() -> None:
    chance = random.Random(7)
    for _ in range(300):
        shape = [chance.choice([1, 2, 3, 5, 8]) for _ in range(chance.randint(1, 3))]
        count = math.prod(shape)
        ranks = list(range(0, 4 * count, chance.choice([1, 1, 2, 3])))
        for _ in range(chance.choice([0, 0, 1, count // 4])):
            ranks.remove(chance.choice(ranks[:count]))
        devices = torch.tensor(ranks[:count]).reshape(shape)
        if chance.random() < 0.3:
            devices = devices.transpose(0, -1)
        mesh = DeviceMesh(devices)
        again = read_mesh(Cursor(str(mesh)))
        assert (again.devices, again.shape) == (mesh.devices, mesh.shape), str(mesh)
        assert (".." in str(mesh)) <= (mesh.size > SPELLED_OUT)


def test_a_team_prints_as_its_mesh() -> None:
    x = (ParallelType.mesh_x,)
    assert str(TeamOf(DeviceMesh([0, 1]), x)) == "(0 1)"
    assert str(TeamOf(DeviceMesh(range(1024)), x)) == "(0..1023)"
    assert read_ranks(Cursor("(0..1023)")) == DeviceMesh(range(1024))
    mesh = DeviceMesh(block(128, 8))
    assert str(TeamOf(mesh, x)) == "mesh_x of DeviceMesh{{0..7}..{1016..1023}}"
    assert TeamOf(mesh, x).ranks(1023) == tuple(range(1016, 1024))
    assert TeamOf(mesh, (ParallelType.mesh_y,)).ranks(9) == tuple(range(1, 1024, 8))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("DeviceMesh{5..2}", "not a range"),
        ("DeviceMesh{0..7 by 2}", "steps of 2 from 0 do not reach 7"),
        ("DeviceMesh{0..7 by 0}", "not a range"),
        ("DeviceMesh{0..7 by -1}", "not a range"),
        ("DeviceMesh{0..{1 2}}", "not a range"),
        ("DeviceMesh{{0 1}..{6 8}}", "not a range"),
        ("DeviceMesh{0..99999999999}", "at most 1048576 ranks"),
        ("DeviceMesh{0..4 2}", "duplicates"),
        ("DeviceMesh{{{{0}}}}", "at most 3 dimensions"),
        ("DeviceMesh{0..", "expected an integer"),
    ],
)
def test_what_is_no_mesh(text: str, message: str) -> None:
    with pytest.raises(ParseError, match=message):
        read_mesh(Cursor(text))
