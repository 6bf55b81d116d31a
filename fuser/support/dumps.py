"""Dumps: texts of the compiler's stages that `FUSER_DUMP` requests, on stdout or as numbered files.

A dump begins and ends with a line that names its kind and its fusion:

    // host_ir of fusion 0 (user code at mlp.py:12), full form: the host program that runs
    ...
    // end of host_ir of fusion 0

These lines are comments to our parsers and to C++, so the file of a dump can be parsed directly.
Rank 0 writes dumps, or the ranks of `FUSER_DUMP_RANKS`.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from fuser.support import options
from fuser.support.arguments import show
from fuser.support.errors import warn
from fuser.support.locks import make_reentrant_lock
from fuser.support.options import EFFECTS
from fuser.support.record import record

_fusions = itertools.count()
_files = itertools.count()
_lock = make_reentrant_lock()
# The dumps that are written line by line: (name, subject, rank, folder) -> file; None for stdout.
_open: dict[tuple[str, str, int, Path | None], Path | None] = {}


@record
class Dump:
    """One text of a compiler stage.

    - `name`: the name of the dump in `FUSER_DUMP`.
    - `of`: the subject, for example `kernel group 2 of fusion 0`.
    - `note`: the variant of the text, for example `full form`. It is "" if there is only one
      variant.
    """

    name: str
    of: str
    text: str
    note: str = ""


Write = Callable[[Dump], None]


def next_fusion() -> str:
    """Returns the name of the next fusion of this process in dumps: `fusion 0`, `fusion 1`, ..."""
    return f"fusion {next(_fusions)}"


def heading(dump: Dump, *, rank: int, is_only_rank: bool) -> str:
    """Returns the first line of a dump. The line names the rank, unless `is_only_rank` is True."""
    note = f", {dump.note}" if dump.note else ""
    who = "" if is_only_rank else f", rank {rank}"
    meaning = EFFECTS["DUMP"][dump.name].partition(";")[0]
    return f"// {dump.name} of {dump.of}{note}{who}: {meaning}"


def write(dump: Dump, *, rank: int = 0) -> None:
    """Prints a dump, or writes the dump as the next file of `FUSER_DUMP_DIR`.

    Does nothing if `rank` is not one of the ranks that write dumps.
    """
    ranks = options.dump_ranks()
    if ranks is not None and rank not in ranks:
        return
    first = heading(dump, rank=rank, is_only_rank=ranks == {0})
    # The heading replaces the first line of a host program's text, so that line numbers stay valid.
    body = dump.text.strip("\n")
    text = f"{first}\n{body}\n// end of {dump.name} of {dump.of}\n"
    folder = options.dump_dir()
    if folder is None:
        print(text, end="", flush=True)
    else:
        try:
            _new_file(folder, dump, rank).write_text(text)
        except OSError as error:
            warn(
                f"FUSER_DUMP_DIR: the dump {dump.name} of {dump.of} could not be written: {error}",
            )


def _new_file(folder: Path, dump: Dump, rank: int) -> Path:
    with _lock:
        number = next(_files)
    what = re.sub(r"\W+", "_", f"{dump.name}_{dump.of}".partition(" (")[0])
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{number:03d}_{what}_rank{rank}.txt"


def lines(name: str, of: str, *, rank: int) -> Callable[[str], None] | None:
    """Returns a function that writes one line of a dump immediately, for dumps that grow during a
    run.

    `name` and `of` are those of `Dump`: the name of the dump in `FUSER_DUMP`, and its subject.
    Returns None if the dump is not requested. The heading is written once. With `FUSER_DUMP_DIR`,
    all lines of a dump are in one file.
    """
    ranks = options.dump_ranks()
    if not options.dump_enabled(name) or (ranks is not None and rank not in ranks):
        return None
    folder = options.dump_dir()
    with _lock:
        if (name, of, rank, folder) not in _open:
            dump = Dump(name, of, "")
            _open[name, of, rank, folder] = _new_file(folder, dump, rank) if folder else None
            _append(
                _open[name, of, rank, folder], heading(dump, rank=rank, is_only_rank=ranks == {0})
            )
        file = _open[name, of, rank, folder]
    return lambda line: _append(file, line)


def _append(file: Path | None, line: str) -> None:
    if file is None:
        # In one piece, because ranks that share a terminal could otherwise mix their lines.
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
        return
    with file.open("a") as opened:
        opened.write(line + "\n")


# ----------------------------------------------------------------------
# Checks whether a file can be written, before there is anything to write.


def not_writable(where: Path) -> str:
    """Returns the reason why no file can be written at a path, or "" if a file can be written."""
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
    """Returns the reason why the file at a path cannot be replaced, or "" if it can.

    Only regular files are replaced.
    """
    if why := not_writable(where):
        return why
    if where.exists() and not where.is_file():
        return "it is not a regular file"
    return "" if os.access(where.absolute().parent, os.W_OK) else "its folder is not writable"
