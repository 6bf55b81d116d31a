"""A fresh process to the first result of an encoder layer, by pytest-benchmark.

The kernel cache is empty (cold) or filled (warm). The time is that from `import fuser` to the first
result, without the import of torch (`cold_start.py`).
"""

from __future__ import annotations

import compileall
from pathlib import Path

import pytest
import torch
from benchmark_lines import product_path
from fresh_process import CLOCK, run_fresh, time_fresh
from pytest_benchmark.fixture import BenchmarkFixture

SCRIPT = Path(__file__).with_name("cold_start.py")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDS = 5


@pytest.fixture(scope="module", autouse=True)
def bytecode() -> None:
    """Compiles the bytecode, as pip does for installed packages."""
    for package in ("fuser", "multidevice", "hostir"):
        compileall.compile_dir(Path(product_path()) / package, quiet=1)
    compileall.compile_dir(SCRIPT.parents[1] / "scripts", quiet=1)


@pytest.mark.benchmark(timer=CLOCK.read)
@pytest.mark.parametrize("case", ["cold", "warm"])
def test_cold(
    case: str, benchmark: BenchmarkFixture, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Times the first result."""
    filled = str(tmp_path_factory.mktemp("filled"))
    if case == "warm":
        run_fresh(SCRIPT, DEVICE, FUSER_CACHE_DIR=filled)

    def variables() -> dict[str, str]:
        folder = filled if case == "warm" else str(tmp_path_factory.mktemp("empty"))
        return {"FUSER_CACHE_DIR": folder}

    benchmark.extra_info["device"] = DEVICE
    time_fresh(benchmark, SCRIPT, DEVICE, rounds=ROUNDS, variables=variables)
