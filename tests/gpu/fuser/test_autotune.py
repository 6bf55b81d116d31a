"""The option `tune` on a GPU: timing by events, captures, and kernels that the driver
refuses.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from fuser import DataType, FusionDefinition
from fuser.kernels import autotune
from tests.fuser.kernels.test_autotune import params_of


def column_sum() -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], dtype=DataType.BFloat16, contiguity=True)
        fd.add_output(fd.ops.sum(fd.ops.cast(x, DataType.Float), [0]))
    return fd


@pytest.fixture(autouse=True)
def own_cache(kernel_cache_dir: Path) -> None:
    del kernel_cache_dir
    autotune.warn_of_capture.cache_clear()


def test_a_column_sum_is_tuned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSER_DUMP", "scheduler_params")
    x = torch.randn(8192, 1536, device="cuda", dtype=torch.bfloat16)
    fd = column_sum()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*tune")
        for _ in range(12):  # until graphs repeat it
            (out,) = fd.execute([x], _enable_options=["tune"])
            torch.testing.assert_close(out.double(), x.double().sum(0), rtol=1e-4, atol=1e-2)
    shown = capsys.readouterr().out
    assert "kernel0: timed now" in shown and "timed: 24 neighbours" in shown
    again = column_sum()
    monkeypatch.setattr(autotune, "make_timer", lambda device: pytest.fail("timed again"))
    (out,) = again.execute([x], _enable_options=["tune"])
    assert params_of(again) == params_of(fd)
    assert "kernel0: kept on disk" in capsys.readouterr().out


def test_an_update_in_place_happens_once() -> None:
    with FusionDefinition() as fd:
        x, y = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
        fd.add_output(fd.ops.add(x, y), x)
    x, y = (torch.randn(1024, 1024, device="cuda") for _ in range(2))
    want, beside = x + y, y.clone()
    fd.execute([x, y], _enable_options=["tune"])
    torch.testing.assert_close(x, want)
    assert torch.equal(y, beside)


def test_nothing_is_timed_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    want = x.double().sum(0)
    fd = column_sum()
    fd.execute([x])  # the heuristic's kernel is loaded: nothing can be, in a capture
    usual = autotune.make_timer
    monkeypatch.setattr(autotune, "make_timer", lambda device: pytest.fail("timed in a capture"))
    graph = torch.cuda.CUDAGraph()
    with pytest.warns(RuntimeWarning, match="nothing can be timed"), torch.cuda.graph(graph):
        (out,) = fd.execute([x], _enable_options=["tune"])
    graph.replay()
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-2)
    monkeypatch.setattr(autotune, "make_timer", usual)
    for _ in range(3):
        (out,) = fd.execute([x], _enable_options=["tune"])
        torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-2)
    graph.replay()


def test_a_neighbour_with_too_many_blocks_is_left_out() -> None:
    """Some variants near the chosen one need more than 65535 blocks along y."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1, -1, -1], dtype=DataType.BFloat16, contiguity=True)
        fd.add_output(fd.ops.stride_order(fd.ops.permute(x, [0, 2, 1, 3]), [3, 2, 1, 0]))
    x = torch.randn(16, 512, 16, 96, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        (out,) = fd.execute([x], _enable_options=["tune"])
        assert torch.equal(out, x.permute(0, 2, 1, 3))
