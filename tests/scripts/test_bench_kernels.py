"""Tests, without a GPU, of the patterns that `scripts/bench.py kernels` times."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench
import kernel_cells
import kernel_timing
import pytest
import torch
from kernel_patterns import PATTERNS, quack_peer
from kernel_patterns.pattern import EPSILON, as_tuple, in_double
from kernel_summary import ERROR_LIMITS, SIGMAS, is_wrong, ratio, read_rows, summarise
from kernel_timing import Turn

from fuser.schedule import inner_outer_persistent
from tests.support.limits import HANG_S

H200 = ["schedules_for(h200)"]
# Rows of odd length; each pattern divides them by at most 64 and 128.
M, N = 64, 131
CELLS = [(name, dtype) for name, pattern in PATTERNS.items() for dtype in pattern.dtypes]
LIMITS = {getattr(torch, name): limit for name, limit in ERROR_LIMITS.items()}


def named(value: object) -> str:
    return str(value).removeprefix("torch.")


def check(name: str, dtype: torch.dtype, options: list[str]) -> None:
    """Compares a pattern with torch in float64; so does torch's version in the cell's own
    dtype.
    """
    torch.manual_seed(0)
    pattern = PATTERNS[name]
    inputs = pattern.random(M, N, dtype, device="cpu")
    outs = pattern.define(M, N, dtype).execute(inputs, _enable_options=options)
    errors, sigmas = pattern.errors(inputs, outs)
    assert all(e <= LIMITS[out.dtype] for e, out in zip(errors, outs, strict=True)), errors
    assert sigmas <= SIGMAS
    theirs = as_tuple(pattern.peer(*inputs))
    assert [t.dtype for t in outs] == [t.dtype for t in theirs]
    given = sum(t.nbytes for t in inputs)
    assert pattern.nbytes(M, N, dtype) == given + sum(t.nbytes for t in outs)
    if pattern.dropout is None:
        their_errors, _ = pattern.errors(inputs, theirs)
        assert all(e <= LIMITS[t.dtype] for e, t in zip(their_errors, theirs, strict=True))


@pytest.mark.parametrize(("name", "dtype"), CELLS, ids=named)
def test_pattern_is_what_torch_computes(name: str, dtype: torch.dtype) -> None:
    check(name, dtype, [])


@pytest.mark.parametrize("name", PATTERNS)
def test_pattern_with_schedules_of_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inner_outer_persistent, "FEWEST_ROWS", 1)
    check(name, torch.bfloat16, H200)


# ------------------------------------------------------------------ bytes and launches
@pytest.mark.parametrize(
    ("name", "dtype", "nbytes"),
    [
        # Counted by hand for 1024 x 512.
        ("softmax", torch.bfloat16, 4 * 1024 * 512),
        ("softmax", torch.float32, 8 * 1024 * 512),
        ("cast", torch.float32, 6 * 1024 * 512),
        ("adamw", torch.bfloat16, 14 * 1024 * 512),
        ("cross_entropy", torch.bfloat16, 2 * 1024 * 512 + 12 * 1024),
        ("layer_norm_gradients", torch.bfloat16, 6 * 1024 * 512 + 12 * 512 + 8 * 1024),
        ("bias_dropout_add", torch.float32, 12 * 1024 * 512 + 4 * 512),
        ("dropout_backward", torch.bfloat16, 5 * 1024 * 512),
        ("batch_norm", torch.bfloat16, 4 * 1024 * 512 + 16 * 512),
        ("sum_of_4_rows", torch.float16, 2 * 1024 * 512 * 5 // 4),
        ("row_sum", torch.bfloat16, 2 * 1024 * 512 + 4 * 1024),
    ],
    ids=named,
)
def test_minimal_bytes(name: str, dtype: torch.dtype, nbytes: int) -> None:
    assert PATTERNS[name].nbytes(1024, 512, dtype) == nbytes


# Patterns of one kernel, and patterns of two: gradients that are also summed over the rows.
ONE = """softmax softmax_backward log_softmax log_softmax_backward log_sum_exp cross_entropy
    cross_entropy_and_gradient cross_entropy_backward layer_norm layer_norm_kept rms_norm
    rms_norm_kept residual_layer_norm residual_rms_norm layer_norm_backward row_sum row_var_mean
    column_sum adamw dropout bias_dropout_add silu_mul silu_mul_backward transpose cast""".split()
TWO = """layer_norm_gradients rms_norm_gradients residual_layer_norm_gradients
    residual_rms_norm_gradients""".split()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", [*ONE, *TWO])
def test_launches_on_an_h200(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSER_ENABLE", *H200)
    row = bench.launches(kernel_cells.Cell(name, dtype, 16384, 1024))
    assert len(row["kernels"]) == (1 if name in ONE else 2), row
    assert not row["library_calls"]


# ------------------------------------------------------------------ the benchmark itself
def arguments(**given: Any) -> Namespace:
    defaults = {"json": None, "peers": "eager", "shapes": f"{M}x{N}", "only": "", "cpu": True}
    rest = {"dtypes": "bfloat16", "processes": 1, "seconds": 0.0, "files": [], "rest": False}
    return Namespace(**{**defaults, **rest, **given})


def run(path: Path, **given: Any) -> list[dict[str, Any]]:
    bench.bench_kernels(arguments(json=path, **given))
    return read(path)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def cells_of(rows: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(row["pattern"], row["dtype"]) for row in rows if "us" in row and "pattern" in row}


@pytest.mark.parametrize("processes", [1, 2])
def test_every_cell_has_a_line(tmp_path: Path, processes: int) -> None:
    names, dtypes = ["softmax", "dropout", "layer_norm_gradients"], ["bfloat16", "float32"]
    given = {"only": ",".join(names), "dtypes": ",".join(dtypes), "processes": processes}
    rows = run(tmp_path / "rows.jsonl", **given)
    assert cells_of(rows) == {(name, dtype) for name in names for dtype in dtypes}
    found = {row["pattern"]: row for row in rows if "us" in row and "pattern" in row}
    assert not any(map(is_wrong, found.values()))
    assert len(found["layer_norm_gradients"]["relative_errors"]) == 3
    assert {"ours", "eager"} == {*found["softmax"]["us"]}
    assert found["softmax"]["of_same_shape_copy"] > 0
    assert [row["not_timed"] for row in rows if "not_timed" in row] == [[]]
    again = summarise(read_rows([tmp_path / "rows.jsonl"]))
    assert sorted(map(str, again)) == sorted(str(row) for row in rows if "summary" in row)


def test_what_was_not_timed_is_named(tmp_path: Path) -> None:
    rows = run(tmp_path / "rows.jsonl", only="softmax,dropout", seconds=1e-9)
    assert not cells_of(rows)
    assert rows[-1]["not_timed"] == [f"{name} bfloat16 {M}x{N}" for name in ("softmax", "dropout")]


def test_the_rest_is_timed_later(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    run(path, only="softmax", rest=True)
    already = len(read(path))
    rows = run(path, only="softmax,dropout", rest=True)
    assert cells_of(rows[already:]) == {("dropout", "bfloat16")}
    assert [row["cells"] for row in rows[already:] if "failed" in row] == [2]


def test_a_cell_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ValueError("no such kernel")

    pattern = PATTERNS["softmax"]
    monkeypatch.setitem(PATTERNS, "softmax", replace(pattern, build=fails))
    monkeypatch.setitem(PATTERNS, "dropout", replace(PATTERNS["dropout"], library=fails))
    with pytest.raises(SystemExit, match="1 of 2 cells failed or are wrong"):
        run(tmp_path / "rows.jsonl", only="softmax,dropout")
    rows = read(tmp_path / "rows.jsonl")
    (failed,) = (row for row in rows if "failed" in row and "pattern" in row)
    assert failed["pattern"] == "softmax"
    assert failed["failed"] == "ValueError: no such kernel"
    (line,) = (row for row in rows if "summary" in row and "failed" in row)
    assert line["failed"] == [f"softmax {M}x{N}"]
    assert line["peer_failed"] == [f"dropout {M}x{N}"]


def test_a_peer_that_fails_later_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def fails_later(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise ValueError("not in a graph")
        return x

    # As a graph, which calls when it is made.
    def capture(fn: Any, sets: Any) -> kernel_timing.Loop:
        fn(*sets[0])
        return kernel_timing.Loop(fn, sets)

    monkeypatch.setattr(kernel_cells, "timer", lambda _: capture)
    monkeypatch.setitem(PATTERNS, "cast", replace(PATTERNS["cast"], library=fails_later))
    (row,) = (row for row in run(tmp_path / "rows.jsonl", only="cast") if "peers_failed" in row)
    assert row["peers_failed"] == {"eager": "ValueError('not in a graph')"}
    assert {*row["us"]} == {"ours"}


# ------------------------------------------------------------------ QuACK's kernels
def test_quack_is_timed_beside_and_in_no_ratio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quack_peer, "is_installed", lambda: True)
    monkeypatch.setitem(quack_peer.KERNELS, "softmax", lambda x: torch.softmax(x, -1))
    monkeypatch.setitem(quack_peer.KERNELS, "rms_norm", lambda x, w: x)
    rows = run(tmp_path / "rows.jsonl", only="softmax,rms_norm,dropout", peers="eager,quack")
    found = {row["pattern"]: row for row in rows if "us" in row and "pattern" in row}
    assert {*found["softmax"]["us"]} == {"ours", "eager", "quack"}
    assert {*found["dropout"]["us"]} == {"ours", "eager"}
    (error,) = found["softmax"]["quack_errors"]
    assert error <= ERROR_LIMITS["bfloat16"]
    assert found["rms_norm"]["quack_errors"][0] > ERROR_LIMITS["bfloat16"]
    times = found["softmax"]["us"]
    assert ratio(found["softmax"]) == times["eager"] / times["ours"]
    lines = {row["of_pattern"]: row for row in rows if "of_pattern" in row}
    assert lines["softmax"]["quack_ratios"] == {
        f"{M}x{N}": round(times["quack"] / times["ours"], 3)
    }
    assert "quack_over_ours" not in lines["dropout"]


def test_quack_is_refused_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quack_peer, "is_installed", lambda: False)
    with pytest.raises(SystemExit, match="needs the package quack-kernels"):
        bench.bench_kernels(arguments(peers="quack"))


def test_quack_computes_what_a_pattern_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls a stand-in for quack-kernels 0.6.5, whose functions have their own argument
    orders.
    """

    def softmax_fwd(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1)

    def softmax_bwd(dy: torch.Tensor, y: torch.Tensor) -> Any:
        return PATTERNS["softmax_backward"].peer(dy, y)

    def rmsnorm_fwd(
        x: Any,
        weight: Any = None,
        bias: Any = None,
        residual: Any = None,
        out_dtype: Any = None,
        residual_dtype: Any = None,
        eps: float = 1e-6,
        store_rstd: bool = False,
    ) -> Any:
        h = x if residual is None else x + residual
        y, r = PATTERNS["rms_norm_kept"].peer(h, weight)
        assert bias is out_dtype is residual_dtype is None and eps == EPSILON
        return y, h, r if store_rstd else None

    def rmsnorm_bwd(x: Any, weight: Any, dout: Any, rstd: Any) -> Any:
        return *PATTERNS["rms_norm_gradients"].peer(dout, x, weight, rstd), None, None

    def layernorm_fwd(
        x: Any, weight: Any, bias: Any, eps: float, return_rstd: bool, return_mean: bool
    ) -> Any:
        y, mean, rstd = PATTERNS["layer_norm_kept"].peer(x, weight, bias)
        assert return_rstd and return_mean and eps == EPSILON
        return y, rstd, mean

    def layernorm_bwd(x: Any, weight: Any, dout: Any, rstd: Any, mean: Any) -> Any:
        return PATTERNS["layer_norm_gradients"].peer(dout, x, weight, mean, rstd)

    def cross_entropy_fwd(x: Any, target: Any, *, return_dx: bool = False) -> Any:
        both = PATTERNS["cross_entropy_and_gradient"].peer(x, target)
        return both if return_dx else both[0]

    def cross_entropy_bwd(x: Any, target: Any, dloss: Any, lse: Any) -> Any:
        return PATTERNS["cross_entropy_backward"].peer(dloss, x, target, lse)

    known = {name: fn for name, fn in locals().items() if callable(fn)}
    monkeypatch.setattr(quack_peer, "_from", lambda _: Namespace(**known))
    for name, kernel in quack_peer.KERNELS.items():
        torch.manual_seed(0)
        pattern = PATTERNS[name]
        inputs = pattern.random(M, N, torch.float32, device="cpu")
        errors, _ = pattern.errors(inputs, as_tuple(kernel(*inputs)))
        assert all(e <= ERROR_LIMITS["float32"] for e in errors), (name, errors)


def test_wrong_results_are_found() -> None:
    pattern = PATTERNS["layer_norm_kept"]
    inputs = pattern.random(M, N, torch.float32, device="cpu")
    outs = list(pattern.define(M, N, torch.float32).execute(inputs))
    row = {"output_dtypes": ["float32"] * 3, "relative_errors": pattern.errors(inputs, outs)[0]}
    assert not is_wrong(row)
    for place in range(3):
        for wrong in (1.0, float("nan")):
            damaged = [out.clone() for out in outs]
            damaged[place].view(-1)[3] = wrong
            assert is_wrong({**row, "relative_errors": pattern.errors(inputs, damaged)[0]})


def test_wrong_dropout_is_found() -> None:
    pattern = PATTERNS["dropout"]
    inputs = pattern.random(M, N, torch.float32, device="cpu")
    (x,) = in_double(inputs)
    row = {"output_dtypes": ["float32"]}
    for share, scale in ((0.15, 1 / 0.9), (0.05, 1 / 0.9), (0.1, 1.0)):
        drawn = torch.rand(x.shape, generator=torch.Generator().manual_seed(0))
        out = torch.where(drawn < share, 0.0, x * scale).float()
        errors, sigmas = pattern.errors(inputs, [out])
        assert is_wrong({**row, "relative_errors": errors, "sigmas": sigmas})


def test_summary() -> None:
    def row(m: int, ours: float, **theirs: float) -> dict[str, Any]:
        labels = kernel_cells.Cell("softmax", "bfloat16", m, 8).labels()
        rest = {"kernels": 1, "library_calls": 0, "relative_errors": [], "output_dtypes": []}
        return {**labels, **rest, "us": {"ours": ours, **theirs}, "of_same_shape_copy": m / 4}

    rows = [row(1, 2.0, eager=9.0, default=4.0), row(2, 2.0, eager=1.0, default=4.0)]
    assert [ratio(r) for r in rows] == [2.0, 0.5]
    line, of_pattern = summarise(rows)
    assert line["best_of_torch_over_ours"] == 1.0
    assert line["least"] == 0.5
    assert line["below_0.95"] == line["below_0.85"] == {"softmax 2x8": 0.5}
    assert of_pattern["ratios"] == {"1x8": 2.0, "2x8": 0.5}
    assert of_pattern["launches"] == [1]
    assert of_pattern["of_same_shape_copy_least"] == 0.25


def test_a_process_that_ends_is_told_and_replaced() -> None:
    crew = kernel_cells._Crew(kernel_cells.Plan((), "cpu"))
    cell = kernel_cells.Cell("cast", "bfloat16", M, N)
    crew.give(cell)
    ((connection, (process, _)),) = crew.busy.items()
    process.kill()
    assert crew.receive(connection) == {**cell.labels(), "failed": "the process ended (-9)"}
    crew.give(cell)
    (connection,) = crew.busy
    assert "ours" in crew.receive(connection)["us"]
    crew.end()


def test_a_turn_is_free_again_when_its_process_ended(tmp_path: Path) -> None:
    path = tmp_path / "turn"
    context = kernel_cells.multiprocessing.get_context("spawn")
    process = context.Process(target=_take_and_die, args=(path,))
    process.start()
    process.join(HANG_S)
    assert process.exitcode == 3
    with Turn(path):
        pass


def _take_and_die(path: Path) -> None:
    import os

    Turn(path).__enter__()
    os._exit(3)


@pytest.mark.parametrize("option", ["only", "dtypes", "peers"])
def test_unknown_names_are_refused(option: str) -> None:
    with pytest.raises(SystemExit, match="'sofmax': expected one of"):
        bench.bench_kernels(arguments(**{option: "sofmax"}))
