"""Programs in the style of nvFuser's users, and a table of them."""

from __future__ import annotations

from tests.support.user_programs import (
    attention,
    experts,
    integers,
    losses,
    normalisations,
    optimisers,
    views,
)
from tests.support.user_programs.table import PROGRAMS, Program

FILES = (normalisations, losses, attention, experts, optimisers, integers, views)
ALL: list[Program] = list(PROGRAMS.values())
