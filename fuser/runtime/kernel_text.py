"""Puts headers in front of a kernel's text, and adds source excerpts to a compiler's error
messages.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from importlib import resources

from fuser.support.kernel_source import KernelSource

RT_FILES = ("rt.h", "rt_float8.h", "rt_math.h", "rt_complex.h", "rt_random.h", "rt_reduce.h")
SIMT_FILES = ("simt_abi.h", "simt.h")
ENGINE_FILE = "simt_engine.cpp"

_CONTEXT_LINES = 4


@functools.cache
def codegen_text(name: str) -> str:
    """Returns the text of the file `name` in the folder `fuser/codegen`, such as a header of
    kernels.
    """
    return resources.files("fuser.codegen").joinpath(name).read_text(encoding="utf-8")


@functools.cache
def preamble(names: tuple[str, ...]) -> str:
    """Returns the texts of the files `names` of `fuser/codegen`, one after another, to be placed in
    front of a kernel's text.

    `#line` directives make error messages show the original file names and line numbers.
    """
    parts: list[str] = []
    for name in names:
        text = codegen_text(name).replace("#pragma once\n", "\n")
        parts.append(f'#line 1 "{name}"\n{text}')
    return "".join(parts)


def in_namespace(source: KernelSource, symbol: str, launcher: str = "") -> str:
    """Returns a kernel's text followed by `launcher`, in a C++ namespace, so that one translation
    unit can contain several kernels.

    In the namespace, the kernel is named `{symbol}_kernel`. `launcher` is C++ text, for example of
    a function that calls the kernel.
    """
    return f"""
namespace {symbol}_unit {{
#define {source.name} {symbol}_kernel
#line 1 "{source.name}"
{source.text}
#undef {source.name}
{launcher}
#ifdef nvfuser_index_t
#undef nvfuser_index_t
#endif
}}
"""


def explain(log: str, texts: Mapping[str, str]) -> str:
    """Returns `log`, the messages of a compiler, followed by the numbered source lines around its
    first error.

    `texts` maps the file names of `#line` directives to the texts of these files. Two formats of a
    location are recognised: `FILE:LINE:COLUMN: error` (g++) and `FILE(LINE): error` (NVRTC).
    """
    for match in re.finditer(r"^(\S+?)(?::(\d+)(?::\d+)?|\((\d+)\)): (?:fatal )?error", log, re.M):
        text = texts.get(match[1])
        if text is None:
            continue
        line = int(match[2] or match[3])
        lines = text.splitlines()
        first = max(1, line - _CONTEXT_LINES)
        excerpt = "\n".join(
            f"{'>' if number == line else ' '} {number:4d} | {lines[number - 1]}"
            for number in range(first, min(len(lines), line + _CONTEXT_LINES) + 1)
        )
        return f"{log.rstrip()}\n\n{match[1]}, line {line}:\n{excerpt}"
    return log.rstrip()
