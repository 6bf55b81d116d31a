"""Polling of gloo works: a poll whose short timeout runs out is not a failed collective."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from multidevice.transports import gloo


class FakeWork:
    """A work whose successive waits end as given: True, or an error with this text."""

    def __init__(self, waits: Sequence[bool | str], *, completed: bool) -> None:
        self._waits = list(waits)
        self._completed = completed

    def wait(self, timeout: object) -> bool:
        found = self._waits.pop(0)
        if isinstance(found, str):
            raise RuntimeError(found)
        return found

    def is_completed(self) -> bool:
        return self._completed


def test_done_and_not_yet_done() -> None:
    assert gloo._is_done(FakeWork([True], completed=True))
    assert not gloo._is_done(FakeWork(["Operation timed out!"], completed=False))


def test_a_work_that_ends_just_after_its_slice_is_done() -> None:
    assert gloo._is_done(FakeWork(["Operation timed out!", True], completed=True))


def test_the_own_error_of_a_work_is_raised() -> None:
    with pytest.raises(RuntimeError, match="connection closed"):
        gloo._is_done(FakeWork(["connection closed"] * 2, completed=True))
