"""The words of the text of programs."""

from __future__ import annotations

import re

from fuser.ir.dtypes import FROM_TEXT, is_inexact
from fuser.ir.scalar import constructors as sc
from fuser.ir.types import PTYPE_FROM_TEXT

INT = re.compile(r"-?[0-9]+")
WORD = re.compile(r"[^\s,(){}]+")
INFIX = re.compile(r"<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%<>&|^]")
CALL = re.compile(
    "("
    + "|".join(sorted((re.escape(o) for o in sc.COMPUTE if not INFIX.fullmatch(o)), reverse=True))
    + r"|cast_[\w:<>]+)\("
)
LITERAL = re.compile(
    "(" + "|".join(re.escape(t) for t, d in FROM_TEXT.items() if is_inexact(d)) + r")\(([^()\s]*)\)"
)
DTYPES = "|".join(sorted(map(re.escape, FROM_TEXT), key=len, reverse=True))
TENSOR = re.compile(rf"T([0-9]+)_(sym|[gslt])_({DTYPES})\[")
BARE_TENSOR = re.compile(r"T([0-9]+)(?!\w)")
NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
AXIS = re.compile(
    r"([irb?n])("
    + "|".join(sorted((re.escape(p) for p in PTYPE_FROM_TEXT), key=len, reverse=True))
    + r")([0-9]+)\{"
)
