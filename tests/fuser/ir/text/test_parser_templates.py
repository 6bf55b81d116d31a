"""The parser knows all ops, and finds an op's name whatever the extents of its results are."""

from __future__ import annotations

import pkgutil

import fuser.ir.ops
from fuser.ir.text.parser import DECLARING, key_of


def test_extents_that_compare_are_no_definition() -> None:
    extent = "( where(( ( i1 - 3 ) == 1 ), ( i4 - 2 ), ( i1 - 3 )) )"
    text = f"T5_g_float[iS9{{{extent}}}]\n   = full({{{extent}}}, float(2));"
    assert key_of(text, 0) == "full"
    for compared in ("==", "!=", "<=", ">="):
        assert key_of(f"T1[iS0{{( i0 {compared} 2 )}}] = cat( {{T0}}, 0 )", 0) == "cat"


def test_the_parser_alone_registers_all_ops() -> None:
    """A process that imports nothing but the parser can read the text of every op."""
    modules = {f"fuser.ir.ops.{m.name}" for m in pkgutil.iter_modules(fuser.ir.ops.__path__)}
    assert {m.__name__ for m in DECLARING} == modules
