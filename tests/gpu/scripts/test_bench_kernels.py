"""`scripts/bench.py kernels` on a GPU: graphs, torch.compile, and processes that take turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("processes", [1, 3])
def test_kernels(tmp_path: Path, processes: int) -> None:
    names, shapes = ["softmax", "dropout", "layer_norm_gradients"], ["512x1024", "64x4097"]
    path = tmp_path / "rows.jsonl"
    command = [sys.executable, str(ROOT / "scripts" / "bench.py"), "kernels", "--json", str(path)]
    command += ["--only", ",".join(names), "--shapes", ",".join(shapes)]
    command += ["--peers", "default", "--processes", str(processes), "--seconds", "100"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=environment, check=True, timeout=115)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    cells = [row for row in rows if "us" in row and "pattern" in row]
    assert len(cells) == len(names) * len(shapes), rows[-1]
    for row in cells:
        assert {*row["us"]} == {"ours", "eager", "default"}, row
        assert not row.get("peers_failed")
