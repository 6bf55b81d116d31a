"""Runs a sharded program on several ranks."""

from __future__ import annotations

from tests.fuzz.product import Mode
from tests.fuzz.runner import Case, Outcome


def run_ranks(case: Case, mode: Mode) -> Outcome:
    raise NotImplementedError
