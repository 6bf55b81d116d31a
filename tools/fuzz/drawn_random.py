"""Random numbers that are made of integers which somebody draws: a seeded generator, or Hypothesis.

The integers of a program can be recorded, and Hypothesis can take them up: it repeats the program
with smaller ones, which are a simpler program.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

_STEPS = 2**24


class DrawnRandom(random.Random):
    """Random numbers made of `below(n)`, an integer in [0, n). If all integers are 0, the program
    is the plainest: no chance comes true, of several things the first is taken, counts are small.
    """

    def __init__(self, below: Callable[[int], int]) -> None:
        super().__init__(0)
        self._below = below

    def random(self) -> float:
        """Returns a number in [0, 1); the plainest is the largest, which no chance exceeds."""
        return 1 - (self._below(_STEPS) + 1) / _STEPS

    def uniform(self, a: float, b: float) -> float:
        """Returns a number in [a, b); the plainest is `a`."""
        return a + (b - a) * self._below(_STEPS) / _STEPS

    def expovariate(self, lambd: float = 1.0) -> float:
        """Returns a number of the exponential distribution; the plainest is 0."""
        return -math.log(1 - self.uniform(0, 1)) / lambd

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        """Returns an element of the range; the plainest is the first."""
        options = range(start) if stop is None else range(start, stop, step)
        return options[self._below(len(options))]

    def randint(self, a: int, b: int) -> int:
        """Returns a number from a to b; the plainest is `a`."""
        return self.randrange(a, b + 1)

    def choice(self, seq: Any) -> Any:
        """Returns an element; the plainest is the first."""
        return seq[self._below(len(seq))]

    def choices(
        self,
        population: Any,
        weights: Sequence[Any] | None = None,
        *,
        cum_weights: Sequence[Any] | None = None,
        k: int = 1,
    ) -> list[Any]:
        """Returns k elements by their weights; the plainest is the first."""
        ends = list(cum_weights or accumulate(weights or [1.0] * len(population)))
        places = [self.uniform(0, ends[-1]) for _ in range(k)]
        return [population[sum(end <= at for end in ends)] for at in places]

    def sample(
        self, population: Sequence[Any], k: int, *, counts: Iterable[int] | None = None
    ) -> list[Any]:
        """Returns k elements of different places; the plainest are the first ones, in order."""
        assert counts is None, "no generator repeats elements of a sample"
        left = list(population)
        return [left.pop(self._below(len(left))) for _ in range(k)]

    def shuffle(self, x: Any) -> None:
        """Reorders a list in place; the plainest order is the present one."""
        x[:] = self.sample(x, len(x))
