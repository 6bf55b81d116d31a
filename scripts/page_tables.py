"""Tables in Markdown, and the places of pages that scripts write.

A place begins with the comment `<!-- NAME: SCRIPT -->` and ends with `<!-- -->`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def table(
    titles: Sequence[str], lines: Iterable[Iterable[object]], *, numbers: bool = False
) -> str:
    """Returns a table in Markdown. With `numbers`, all columns but the first are right-aligned."""
    rule = "---:" if numbers else "---"
    rows = [titles, ["---", *[rule] * (len(titles) - 1)], *lines]
    return "\n".join(
        f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in row)} |" for row in rows
    )


def with_parts(page: str, parts: Mapping[str, str], script: str) -> str:
    """Returns the text of a page in which the places of a script have new contents.

    Raises:
        ValueError: the page has no place of that name.
    """
    for name, made in parts.items():
        begin, end = f"<!-- {name}: {script} -->\n", "\n<!-- -->"
        head, is_there, rest = page.partition(begin)
        if not is_there:
            raise ValueError(f"the page has no place for {name}: {begin.strip()}")
        page = f"{head}{begin}\n{made}\n{end}{rest.partition(end)[2]}"
    return page
