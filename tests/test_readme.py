"""The README's first program runs as it stands, on 1 and on 2 simulated ranks."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from multidevice import simulate

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.parametrize("ranks", [1, 2])
def test_first_program(ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    file = tmp_path / "first.py"
    file.write_text(program)
    with simulate(ranks) as world:
        results = world.run(runpy.run_path, str(file))
    lines = sorted(capsys.readouterr().out.split("\n")[:-1])
    assert [int(line.split()[0]) for line in lines] == list(range(ranks))
    assert all(float(line.split()[1]) < 1e-5 for line in lines)
    text = str(results[0]["fd"].fec.host_program())
    assert text.count("type=Allreduce") == (ranks > 1)
