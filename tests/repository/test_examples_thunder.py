"""The Lightning Thunder example runs if Thunder is installed, and otherwise says that it is
not.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

from tests.support.limits import HANG_S

EXAMPLE = Path(__file__).parents[2] / "examples" / "thunder_gpt_block.py"


def test_a_gpt_block() -> None:
    """Runs in a process of its own, because the example renames modules."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert not done.returncode, done.stderr
    if importlib.util.find_spec("thunder") is None:
        assert done.stdout.startswith("needs Lightning Thunder: pip install lightning-thunder")
        return
    assert re.search(r"forward: \d+ fusions of \d\d+ ops\nbackward: \d+ fusions", done.stdout)
    error = re.search(r"largest error against torch in float64: (.*)", done.stdout)
    assert error and float(error[1]) < 1e-4
