"""The version of the project. The version is also part of the keys of results on disk."""

from __future__ import annotations

import re

__version__ = "0.1.0"


class Version(str):
    """A version text that is compared by its numbers, also with an ordinary `str`.

    For example, `Version("0.2.36+git81c4b22") < "0.2.4"` is False, because 36 is not less than 4. A
    suffix such as `+git81c4b22` is ignored.
    """

    __slots__ = ()

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the version, such as (0, 2, 36), without zeros at the end."""
        return _numbers(self)

    def __eq__(self, other: object) -> bool:
        return self.numbers == _numbers(other) if isinstance(other, str) else NotImplemented

    def __ne__(self, other: object) -> bool:
        return not equal if isinstance(equal := self.__eq__(other), bool) else NotImplemented

    def __lt__(self, other: str) -> bool:
        return self.numbers < _numbers(other)

    def __le__(self, other: str) -> bool:
        return self.numbers <= _numbers(other)

    def __gt__(self, other: str) -> bool:
        return self.numbers > _numbers(other)

    def __ge__(self, other: str) -> bool:
        return self.numbers >= _numbers(other)

    def __hash__(self) -> int:
        return hash(self.numbers)


def _numbers(text: str) -> tuple[int, ...]:
    """Returns the numbers at the start of a version text, without zeros at the end.

    Raises:
        ValueError: the text does not begin with a number.
    """
    found = re.match(r"\d+(\.\d+)*", text)
    if found is None:
        raise ValueError(f"{str.__repr__(text)} is not a version: expected numbers such as '0.2.3'")
    numbers = [int(n) for n in found[0].split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def version() -> Version:
    """Returns the version of this project. It differs from the version of nvFuser's interface."""
    return Version(__version__)
