"""Programs in the style of nvFuser's users, and their table."""

from __future__ import annotations

from tests.programs import (  # each fills the table
    attention,
    experts,
    integers,
    losses,
    normalisations,
    optimisers,
    views,
)
from tests.programs.table import PROGRAMS, Program

FILES = (normalisations, losses, attention, experts, optimisers, integers, views)
ALL: list[Program] = list(PROGRAMS.values())
