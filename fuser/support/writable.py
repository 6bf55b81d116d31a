"""Where a file may be written, known before there is anything to write."""

from __future__ import annotations

import os
from pathlib import Path

from fuser.support.arguments import show


def not_writable(where: Path) -> str:
    """Return why no file can be written there, "" where it can."""
    folder = where.absolute().parent
    try:
        if where.is_dir():
            return "it is a folder"
        if not folder.is_dir():
            return f"there is no folder {show(str(where.parent))}"
        return "" if os.access(where if where.exists() else folder, os.W_OK) else "not permitted"
    except OSError as error:
        return error.strerror or type(error).__name__


def not_replaceable(where: Path) -> str:
    """Return why no file can take the place of what is there, "" where it can: only plain files
    are replaced."""
    if why := not_writable(where):
        return why
    if where.exists() and not where.is_file():
        return "it is no plain file"
    return "" if os.access(where.absolute().parent, os.W_OK) else "its folder is not writable"
