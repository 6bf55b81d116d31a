"""docs/reference/command-line.md lists every command and option of `python -m hostir`."""

from __future__ import annotations

import argparse
import re

import pytest

from hostir.tools.cli import _arguments
from tests.support.jobs import ROOT

_PAGE = (ROOT / "docs" / "reference" / "command-line.md").read_text()
# Options of all commands, which the head of the page explains.
_OF_ALL = {"-h", "--help", "--program", "--size", "-s", "--output"}


def _commands() -> dict[str, argparse.ArgumentParser]:
    (action,) = (a for a in _arguments()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


def _sections() -> dict[str, str]:
    parts = re.split(r"^## (.*)\n", _PAGE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_command_has_a_section() -> None:
    assert set(_sections()) == {*_commands(), "Sizes", "python -m fuser"}


@pytest.mark.parametrize("command", _commands())
def test_the_options_of_a_command_are_those_of_its_section(command: str) -> None:
    known = {s for action in _commands()[command]._actions for s in action.option_strings}
    section = _sections()[command]
    said = set(
        re.findall(
            r"(?<![\w-])(--?[a-z][\w-]*)", re.sub(r"```.*?```", "", section, flags=re.DOTALL)
        )
    )
    assert said <= known
    assert known - _OF_ALL <= said
