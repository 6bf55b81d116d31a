"""The code blocks of the documents, and how tests run them.

A block's language decides how it is tested. `python` and `bash` blocks are run. `cpp` blocks, and
`text` blocks in the steps of CONTRIBUTING.md, are edits. A second word after the language says why
a block is not run (`NOT_RUN`).

README.md, the tutorials, the how-to guides and the pages of the examples are *walked*: one folder
per page, all blocks in order, as a reader does it.

- A `python` block after "Save this as `NAME.py`" becomes that file.
- A `diff` block changes the first file that the paragraph before it names, into the last one.
- A `python` block that includes a file of examples/ is that program, which commands run.
- A `text` block has to be among what the blocks before it printed or wrote, line by line or, where
  the page wraps lines, as a whole; a line may end early, in ` ..`. A second word says why nothing
  on the page prints it.

The other pages are run section by section.
"""

from __future__ import annotations

import contextlib
import glob
import io
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hostir.tools.cli import main
from tests.support.jobs import MPIRUN, ROOT
from tests.support.limits import HANG_S
from tests.support.printed_lines import missing_lines

PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "benchmarks/notes.md",
    *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")),
)
_WALKED = ("README", "docs/tutorials/", "docs/how-to/", "docs/examples/")
WALKED = tuple(p for p in PAGES if p.startswith(_WALKED))
LANGUAGES = ("python", "bash", "text", "cpp", "diff")
NOT_RUN = {
    "sketch": "a text that nothing prints",
    "gpu": "needs a GPU",
    "installs": "makes an environment, or runs all tests",
    "long": "takes a minute, and weights that quickstart.sh installs",
}
_BLOCK = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A code block: its page and line, its language, its text, and why it is not run, if so."""

    page: str
    section: str
    line: int
    language: str
    why_not: str
    text: str
    before: str  # the paragraph before it

    @property
    def is_run(self) -> bool:
        return self.language in ("python", "bash") and not (self.why_not or self.included)

    @property
    def included(self) -> str:
        """The path of the file that the block shows and does not contain, or an empty string."""
        found = re.fullmatch(r'--8<-- "(.+)"\n', self.text)
        return found[1] if found else ""


def blocks(page: str) -> Iterator[Block]:
    """Yields the blocks of a page, in order."""
    text = (ROOT / page).read_text()
    for found in _BLOCK.finditer(text):
        before = text[: found.start()]
        outside = _BLOCK.sub("", before)
        titles = _HEADING.findall(outside)
        language, _, why_not = found[2].partition(" ")
        yield Block(
            page,
            titles[-1] if titles else "",
            before.count("\n") + 1,
            language,
            why_not,
            textwrap.dedent(found[3]),
            outside.rstrip().rpartition("\n\n")[2],
        )


def first_program() -> str:
    """Returns the program that the README calls first.py."""
    return next(b.text for b in blocks("README.md") if b.section == "A first program")


def make_folder(folder: Path) -> None:
    """Gives a folder what a reader has: the source tree and the first program."""
    for name in ("examples", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "first.py").write_text(first_program())


def walk(page: str, folder: Path) -> str:
    """Performs the blocks of a page in a folder; returns what they print.

    Raises:
        AssertionError: a command failed, or the text of a block was not printed.
    """
    make_folder(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    for block in blocks(page):
        if block.language == "diff":
            _change(block, folder)
        elif block.language == "text" and not block.why_not:
            written = "".join(p.read_text() for p in folder.glob("*.txt"))
            missing = missing_lines(block.text, f"{printed}\n{written}".replace(f"{folder}/", ""))
            assert not missing, f"{page}, line {block.line}: nothing printed {missing}\n{printed}"
        elif block.is_run and block.language == "bash":
            printed += "".join(out for _, out in run_commands(block, folder))
        elif block.is_run and (
            saved := re.search(r"Save (?:it|this) as\s`(\w+\.py)`", block.before)
        ):
            (folder / saved[1]).write_text(block.text)
        elif block.is_run:
            printed += run_python(block, names)
    return printed


def _change(block: Block, folder: Path) -> None:
    """Applies a diff whose hunks are separated by `...` and have no line numbers."""
    files = re.findall(r"`(\w+\.py)`", block.before)
    text = (folder / files[0]).read_text()
    for part in re.split(r"^\.\.\.$\n", block.text, flags=re.MULTILINE):
        lines = part.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if not line.startswith("+"))
        new = "".join(line[1:] for line in lines if not line.startswith("-"))
        assert text.count(old) == 1, f"{block.page}, line {block.line}: {files[0]} lacks {old}"
        text = text.replace(old, new)
    (folder / files[-1]).write_text(text)


def run_python(block: Block, names: dict[str, Any]) -> str:
    """Runs a program in a namespace; returns its output."""
    printed = io.StringIO()
    # As far down as in the page, for the lines of errors.
    code = compile("\n" * block.line + block.text, block.page, "exec")
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    return printed.getvalue()


def run_commands(block: Block, folder: Path) -> Iterator[tuple[str, str]]:
    """Runs commands in order in a folder; yields each command with its output."""
    for line in block.text.replace("\\\n", "").splitlines():
        code, printed = _run_line(line, folder)
        expected = re.search(r"# exit code (\d)", line)
        where = f"{block.page}, line {block.line}: {line}\n{printed}"
        assert code == (int(expected[1]) if expected else 0), where
        yield line, printed


def _run_line(line: str, folder: Path) -> tuple[int, str]:
    """Runs one command; `python -m hostir` runs in this process, which is faster."""
    command = re.sub(r"(?<!\S)(\.venv/bin/)?python(?= )", sys.executable, line)
    command = re.sub(r"(?<!\S)(\.venv/bin/)?mpirun(?= )", str(MPIRUN), command)
    torchrun = f"{sys.executable} -m torch.distributed.run"
    command = re.sub(r"(?<!\S)(\.venv/bin/)?torchrun(?= )", torchrun, command)
    start = f"{sys.executable} -m hostir "
    if not command.startswith(start) or "|" in command:
        job = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "TMPDIR": str(folder),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        return job.returncode, job.stdout
    called, _, target = command.partition("#")[0].removeprefix(start).partition(" > ")
    words = [sorted(glob.glob(w, root_dir=folder)) or [w] for w in shlex.split(called)]
    printed = io.StringIO()
    both = contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed)
    with both[0], both[1], contextlib.chdir(folder):
        code = main([w for found in words for w in found])
    if target:
        (folder / target.strip()).write_text(printed.getvalue())
    return code, printed.getvalue()
