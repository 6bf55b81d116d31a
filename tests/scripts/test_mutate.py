"""Damaged program texts and caches are refused: a small sample of what `scripts/mutate.py`
tries.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fuser.ir.fusion import Fusion
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.text.parser import parse_fusion, parse_scalar
from fuser.ir.text.printer import fusion_text
from fuser.ops import sin
from fuser.ops.define import define_tensor
from fuser.support.errors import ParseError, VerifyError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("kind", "cases"), [("programs", 150), ("fusions", 150), ("cache", 40)])
@pytest.mark.finding("F48")
def test_a_sample_of_damage(kind: str, cases: int) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "mutate.py"), kind, "--seed", "5000"]
    answer = subprocess.run(
        [*command, "--cases", str(cases)], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("9" * 5000, "an integer of 5000 digits"),
        ("(" * 3000, "nested parentheses"),
        ("max( i0 )", "expected"),
        ("( max( i0 ) )", "max expects 2 operands, got 1"),
        ("( where( i0, 1 ) )", "where expects 3 operands, got 2"),
        ("\u0663", "expected a scalar"),
    ],
)
@pytest.mark.finding("F48")
def test_scalars_that_are_none(text: str, why: str) -> None:
    with pytest.raises(ParseError, match=why):
        parse_scalar(text)


def test_a_power_beyond_64_bits_is_not_computed() -> None:
    assert "pow" in str(parse_scalar("( pow( 999999999, 999999999 ) )"))


def printed() -> str:
    fusion = Fusion()
    with FusionGuard(fusion):
        x = define_tensor([-1, -1], contiguity=True)
        fusion.add_input(x)
        fusion.add_output(sin(x))
        x.outer_split(0, 2)
    return fusion_text(fusion)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (" Outer split:", " Merge:", "expected 'and'"),
        ("logical domain: (iS0{i0}, iS1{i1})", "logical domain: (iS0{i0}, iS0{i0})", "twice"),
        ("    Outer split: iS0{i0}", "    Outer split: iS9{i0}", "does not exist yet"),
    ],
)
def test_domains_whose_transforms_lead_nowhere(old: str, new: str, why: str) -> None:
    text = printed()
    assert old in text
    with pytest.raises((ParseError, VerifyError), match=why):
        parse_fusion(text.replace(old, new))
