"""Writes the list of rooms in docs/architecture.md from the docstrings of the packages.

`--check` only compares. A room is a package; its docstring has its question and its files in
reading order.
"""

from __future__ import annotations

import ast
import sys
import textwrap
from pathlib import Path

from page_tables import with_parts

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
COLUMNS = 100
# In reading order.
ROOMS = (
    *("fuser/ir", "fuser/ir/scalar", "fuser/ir/domain", "fuser/ir/ops", "fuser/ir/text"),
    *("fuser/ops", "fuser/ops/reference", "fuser/passes", "fuser/schedule"),
    *("fuser/lower", "fuser/lower/passes", "fuser/codegen", "fuser/runtime", "fuser/kernels"),
    *("multidevice/sharding", "multidevice/sharding/passes", "multidevice/job"),
    *("multidevice/coordination", "multidevice/transports"),
    *("multidevice/transports/base", "multidevice/transports/memory"),
    *("hostir/ir", "hostir/ir/ops", "hostir/lowering", "hostir/passes", "hostir/analysis"),
    *("hostir/runtime", "hostir/cost", "hostir/profiling", "hostir/tools"),
    *("fuser/frontend", "fuser/nvfuser", "fuser/support"),
)


def room_text(room: str) -> str:
    """Returns the lines of a room: its first sentence, its question, its files."""
    text = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text())) or ""
    first = text.partition("\n")[0]
    # The question may go on in the next line; sentences after it are for readers of the code.
    question = " ".join(text.partition("Question: ")[2].partition("?")[0].split())
    files = text[text.index("\n- ") :].strip()
    head = textwrap.wrap(f"{first} *{question[0].upper()}{question[1:]}?*", COLUMNS)
    return "\n".join([f"### {room}", "", *head, "", files])


def page() -> str:
    """Returns the page with a new list of rooms."""
    rooms = "\n\n".join(room_text(room) for room in ROOMS)
    return with_parts(PAGE.read_text(), {"rooms": rooms}, "scripts/document_rooms.py")


def main() -> int:
    """Writes the page, or compares it; returns the exit code."""
    text = page()
    if "--check" in sys.argv:
        return int(text != PAGE.read_text())
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
