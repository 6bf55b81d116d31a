"""The plots and tables of the page on performance are those of the recorded results."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.jobs import ROOT

_SPEC = importlib.util.spec_from_file_location("plots", ROOT / "benchmarks" / "plots.py")
assert _SPEC is not None and _SPEC.loader is not None
plots = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(plots)


def test_the_page_shows_the_recorded_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assets = plots.ASSETS
    monkeypatch.setattr(plots, "ASSETS", tmp_path)
    tables = {
        **plots.kernels(),
        **plots.overlap(),
        **plots.allreduces(),
        **plots.host_time(),
    }
    assert plots.page(tables) == plots.PAGE.read_text(), "python benchmarks/plots.py"
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert drawn == sorted(path.name for path in assets.glob("performance-*.svg"))
    for name in drawn:
        assert (tmp_path / name).read_text() == (assets / name).read_text(), name


def test_bars_are_as_long_as_their_values() -> None:
    drawn = plots.bars("t", [("a", "#000")], [("x", [1.0]), ("y", [2.0])], mark=1.0, most=4.0)
    full = plots.WIDTH - plots.LEFT - 60
    assert f'width="{full / 4:.1f}"' in drawn and f'width="{full / 2:.1f}"' in drawn
