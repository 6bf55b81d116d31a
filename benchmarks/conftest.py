"""Options and facts of the benchmarks that pytest-benchmark runs (`bench_*.py`).

    python -m pytest benchmarks/bench_lowering.py --only "transformer 8" --benchmark-autosave
    python -m pytest benchmarks/bench_lowering.py --only "transformer 8" --benchmark-compare

`scripts/bench.py` runs them too, and prints JSON lines.
"""

from __future__ import annotations

from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option `--only`."""
    parser.addoption("--only", default="", help="names of cases, comma-separated; default: all")


def _case(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("case")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the cases of `--only`.

    Raises:
        pytest.UsageError: there is no case of that name.
    """
    names = [name for name in str(config.getoption("only")).split(",") if name]
    known = [name for name in map(_case, items) if name is not None]
    if unknown := set(names) - set(known):
        expected = ", ".join(dict.fromkeys(known))
        raise pytest.UsageError(f"unknown case {', '.join(unknown)}: expected some of {expected}")
    if names:
        items[:] = [item for item in items if _case(item) in (None, *names)]


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    """Adds torch and the GPU to the machine that pytest-benchmark records."""
    import torch

    machine_info["torch"] = torch.__version__
    if torch.cuda.is_available():
        machine_info["gpu"] = torch.cuda.get_device_name(0)
