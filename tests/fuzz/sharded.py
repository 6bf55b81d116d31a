"""Random sharded programs."""

from __future__ import annotations

from tests.fuzz.program import Program


def generate(seed: int) -> Program:
    """Return the program of a seed."""
    raise NotImplementedError
