"""The function name of an op's text is recognised for any extents of its results."""

from __future__ import annotations

from fuser.ir.text.parser import key_of


def test_extents_that_compare_are_no_definition() -> None:
    extent = "( where(( ( i1 - 3 ) == 1 ), ( i4 - 2 ), ( i1 - 3 )) )"
    text = f"T5_g_float[iS9{{{extent}}}]\n   = full({{{extent}}}, float(2));"
    assert key_of(text, 0) == "full"
    for compared in ("==", "!=", "<=", ">="):
        assert key_of(f"T1[iS0{{( i0 {compared} 2 )}}] = cat( {{T0}}, 0 )", 0) == "cat"
