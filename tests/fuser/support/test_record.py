"""Records behave like frozen dataclasses."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from fuser.support.record import record
from fuser.support.record import replace as record_replace


@record
class Point:
    x: int
    y: int = 2
    note: str = field(default="", compare=False)
    shade: float = field(default=0.5, hash=False)


@dataclass(frozen=True)
class Twin:
    x: int
    y: int = 2
    note: str = field(default="", compare=False)
    shade: float = field(default=0.5, hash=False)


@record
class Lone:
    value: float


@record
class Empty:
    pass


@record
class Checked:
    size: int
    unit: str = field(default="px", kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", abs(self.size))

    def __repr__(self) -> str:
        return f"{self.size} {self.unit}"


@pytest.mark.parametrize(
    ("a", "b"),
    [((1,), (1, 2)), ((1, 2, "n"), (1,)), ((1, 2, "", 0.25), (1,)), ((1,), (2,)), ((1, 3), (1,))],
)
def test_compared_as_a_dataclass(a: tuple[Any, ...], b: tuple[Any, ...]) -> None:
    assert (Point(*a) == Point(*b)) is (Twin(*a) == Twin(*b))
    assert (hash(Point(*a)) == hash(Point(*b))) is (hash(Twin(*a)) == hash(Twin(*b)))
    assert repr(Point(*a)).partition("(")[2] == repr(Twin(*a)).partition("(")[2]


def test_of_one_field_and_of_none() -> None:
    nan = float("nan")
    assert Lone(nan) == Lone(nan) and Lone(1.0) != Lone(2.0) and len({Lone(1), Lone(1)}) == 1
    assert Empty() == Empty() and repr(Empty()) == "Empty()"
    assert Lone(1.0) != Point(1) and Empty() != ()


def test_frozen() -> None:
    point = Point(1)
    with pytest.raises(dataclasses.FrozenInstanceError, match="'x'"):
        point.x = 3  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(dataclasses.FrozenInstanceError, match="'x'"):
        del point.x  # pyright: ignore[reportAttributeAccessIssue]


def test_arguments() -> None:
    assert repr(Checked(-3, unit="cm")) == "3 cm"
    for wrong in (lambda: Point(), lambda: Point(1, z=2), lambda: Checked(1, "cm")):  # pyright: ignore
        with pytest.raises(TypeError):
            wrong()


def test_tools_for_dataclasses() -> None:
    point = Point(1, 4, "here")
    assert replace(point, y=5) == Point(1, 5) == record_replace(point, y=5)
    assert record_replace(point, note="there").note == "there"
    with pytest.raises(TypeError, match="Point has no field 'z'"):
        record_replace(point, z=1)
    assert [f.name for f in dataclasses.fields(Point)] == ["x", "y", "note", "shade"]
    assert copy.deepcopy(point) == pickle.loads(pickle.dumps(point)) == point
    match point:
        case Point(x, y):
            assert (x, y) == (1, 4)


def test_a_list_is_no_default() -> None:
    with pytest.raises(AssertionError, match=r"Many\.items"):

        @record
        class Many:  # pyright: ignore[reportUnusedClass]
            items: list[int] = field(default_factory=list[int])
