"""Benchmarks. `python scripts/bench.py kernels [--json FILE] [--peers default,...] [--shapes ...]`

kernels: generated kernels on one GPU (`kernel_patterns`), in the dtypes of `--dtypes`. They are
compared with:

- torch, and torch.compile in each mode of `--peers`;
- QuACK's kernels, if `--peers` names `quack` (these are in no ratio to torch);
- torch in float64, for errors;
- a kernel that copies one tensor of the same shape.

Method: K input sets are rotated, so that their total size exceeds four times the L2 cache and 256
MB. The K calls are captured in one CUDA graph, which is replayed in turns with the peers'. The time
per call is the median of 15 replays after 10 warm-ups; minimum and maximum are reported too. Bytes
are minimal bytes: each input read once, each output written once. `--processes N` compiles N cells
at a time, while one at a time uses the GPU. `--seconds S` stops in time and names the cells that
were not timed; `--rest` times these later. `--cpu` tries the benchmark on a machine without a GPU:
its times mean nothing. The exit code is 1 where torch.compile takes under 0.95 of our time in a
cell of `HELD`.

library: ops that torch carries out (`kernel_patterns.library`), compared with torch's best call, in
eager calls one after another and on the device in a CUDA graph. The exit code is 1 where any cell
is behind: torch's time is under 0.97 of ours, and ours is over 2 us more. `--only` takes names of
rows.

attention: the attention op on one GPU, compared with torch: nine shapes, full, causal, with a bias,
with a Bool mask, forward and backward (`attention_cells`). It fails below 0.97 of torch's speed
(2.0 for masks from 512 keys on). `--beside` stores heads adjacent in memory, as projections do.

summary: the geometric means, losses and errors of the files that `kernels --json` wrote.

launches: kernels of each pattern, dtype and shape with the H200's schedules, on any machine.

explore: the same kernels with neighbouring scheduler parameters, to tune the heuristics.

tune: the same kernels with the option `tune` and without, in turns, and the duration of the first
run of each.

agree: the time that ranks need to agree on a call, under mpirun.

cpu: the encoder layer's kinds of kernels on the CPU device, compared with torch's own op, one
thread each, interleaved.

The remaining benchmarks are run by pytest-benchmark (`benchmarks/bench_*.py`). `--only` takes names
of cases, and the exit code is 1 where a limit is exceeded.

cold: a fresh process to the first result of an encoder layer, on the GPU where there is one.

lowering: time from definition to host program of deep transformers and large meshes.

compile: time from definition to CUDA text of long programs, in phases; on any machine.

plan: CPU time of host programs with streams: op by op, a first run, a replay.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import attention_cells
import library_cells
from benchmark_lines import run_benchmarks
from compile_time import SCHEDULES
from kernel_cells import DTYPES, Cell, Plan, measure_all
from kernel_patterns import MAIN, PATTERNS, quack_peer
from kernel_patterns.library import LIBRARY
from kernel_summary import is_wrong, read_rows, summarise
from kernel_timing import Replay, set_count, time_interleaved, timer
from turns import Lines, by_clock, spread, take_turns

from fuser import FusionDefinition
from fuser.support.errors import FuserError, KernelError
from hostir.ir.ops import LaunchKernel, PostOnStream

SHAPES = ((16384, 8192), (32768, 1024))
# Large and small, few rows and many, rows of odd length; the last three are below 4 MB.
ALL_SHAPES = (
    *SHAPES,
    (8192, 1536),
    (4096, 4096),
    (65536, 768),
    (2048, 50257),
    (128, 1048576),
    (2048, 384),
    (512, 1024),
    (64, 4096),
)
LARGE_COPY = (32768, 16384)
# The largest number of neighbours of one choice that `explore` times.
MAX_EXPLORED = 128
Row = dict[str, Any]
PEERS = ("eager", "default", "max-autotune-no-cudagraphs", quack_peer.NAME)


# ------------------------------------------------------------------ kernels
def chosen_shapes(args: argparse.Namespace) -> tuple[tuple[int, int], ...]:
    """Returns the shapes of the option `--shapes`."""
    if args.shapes == "all":
        return ALL_SHAPES
    if not args.shapes:
        return SHAPES
    pairs = (s.split("x") for s in args.shapes.split(","))
    return tuple((int(m), int(n)) for m, n in pairs)


def chosen(given: str, names: Iterable[str], what: str) -> tuple[str, ...]:
    """Returns the names in an option. Raises `SystemExit` for an unknown name."""
    names = tuple(names)
    found = tuple(given.split(",")) if given else names
    for name in found:
        if name not in names:
            raise SystemExit(f"unknown {what} {name!r}: expected one of {', '.join(names)}")
    return found


def chosen_patterns(args: argparse.Namespace) -> tuple[str, ...]:
    """Returns the patterns of the option `--only`."""
    return MAIN if args.only == "main" else chosen(args.only, PATTERNS, "pattern")


def chosen_peers(args: argparse.Namespace) -> tuple[str, ...]:
    """Returns the peers; torch's own ops are included if there is any.

    Raises:
        SystemExit: a peer is unknown or not installed.
    """
    if args.peers == "none":
        return ()
    found = chosen(args.peers, PEERS, "peer")
    if quack_peer.NAME in found and not quack_peer.is_installed():
        raise SystemExit("peer 'quack' needs the package quack-kernels, which is not installed")
    return tuple(dict.fromkeys(("eager", *found)))


def chosen_cells(args: argparse.Namespace) -> list[Cell]:
    """Returns the cells, ordered by dtype and shape, so that a run that ends early has all patterns
    of some.
    """
    dtypes = chosen(args.dtypes, DTYPES, "dtype")
    return [
        Cell(name, dtype, m, n)
        for dtype, (m, n), name in itertools.product(
            dtypes, chosen_shapes(args), chosen_patterns(args)
        )
        if DTYPES[dtype] in PATTERNS[name].dtypes
    ]


def kernel_copy(m: int, n: int, dtype: str, device: str) -> Row:
    """Returns the line of a kernel that reads and writes one tensor: the faster of ours and
    torch's.

    The kernel negates. A clone in a graph can be a memcpy, which is slower.
    """
    pattern, key = PATTERNS["negative"], (m, n, DTYPES[dtype])
    nbytes = pattern.nbytes(*key)
    sets = [pattern.random(*key, device=device) for _ in range(set_count(nbytes))]
    fd = pattern.define(*key)
    kind = timer(device)
    with torch.no_grad():
        timed = time_interleaved([kind(fn, sets) for fn in (lambda x: fd.execute([x]), torch.neg)])
    us = {name: round(t[0] * 1e6, 3) for name, t in zip(("ours", "torch"), timed, strict=True)}
    return {
        "bench": "kernels",
        "copy": "negative",
        "dtype": dtype,
        "shape": [m, n],
        "us": us,
        "GBps": nbytes / min(us.values()) / 1e3,
    }


def time_copies(
    cells: Sequence[Cell], lines: Lines, device: str
) -> dict[tuple[str, int, int], float]:
    """Emits the kernel copy of each dtype and shape, and of the largest shape; returns their
    GB/s.
    """
    large = () if device == "cpu" else (LARGE_COPY,)
    wanted = [(c.dtype, c.m, c.n) for c in cells]
    wanted += [(dtype, m, n) for dtype, _, _ in wanted for m, n in large]
    copies: dict[tuple[str, int, int], float] = {}
    for dtype, m, n in dict.fromkeys(wanted):
        row = kernel_copy(m, n, dtype, device)
        copies[dtype, m, n] = row["GBps"]
        lines.emit(row)
        if device == "cuda":
            torch.cuda.empty_cache()
    return copies


def bench_kernels(args: argparse.Namespace) -> list[Row]:
    """Times all chosen cells. Their lines are written at once, so the returned list is empty."""
    began = time.monotonic()
    deadline = began + args.seconds if args.seconds else float("inf")
    device = "cpu" if args.cpu else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("bench.py kernels needs a GPU; --cpu tries the benchmark itself")
    before = [args.json] if args.rest and args.json and args.json.exists() else []
    rows = [row for row in read_rows(before) if "us" in row]
    done = {str(Cell.of(row)) for row in rows}
    left = [cell for cell in chosen_cells(args) if str(cell) not in done]
    lines = Lines(args.json)
    machine = torch.cuda.get_device_name(0) if device == "cuda" else "CPU"
    lines.emit({"bench": "kernels", "machine": machine, "torch": torch.__version__})
    copies = time_copies(left, lines, device)
    roof = max(copies.values(), default=0.0)
    plan = Plan(chosen_peers(args), device)
    for cell, row in measure_all([*left], plan, processes=args.processes, deadline=deadline):
        left.remove(cell)
        if "us" in row:
            row["of_copy"] = round(row["GBps"] / roof, 3)
            row["of_same_shape_copy"] = round(row["GBps"] / copies[cell.dtype, cell.m, cell.n], 3)
        rows.append(row)
        lines.emit(row)
    for line in summarise(rows):
        lines.emit(line)
    took = round(time.monotonic() - began, 1)
    ending: Row = {"bench": "kernels", "seconds": took, "cells": len(rows)}
    lines.emit({**ending, "not_timed": [str(cell) for cell in left]})
    bad = [row for row in rows if "failed" in row or is_wrong(row)]
    if bad:
        raise SystemExit(f"{len(bad)} of {len(rows)} cells failed or are wrong")
    return []


def bench_attention(args: argparse.Namespace) -> list[Row]:
    """Times the cells of attention. Their lines are written at once, so the returned list is empty.

    Raises:
        SystemExit: some cells are too slow or too inexact.
    """
    device = "cpu" if args.cpu else "cuda"
    lines = Lines(args.json)
    if count := attention_cells.bench_attention(lines.emit, device=device, beside=args.beside):
        raise SystemExit(f"{count} cells are slower or less exact than they should be")
    return []


def bench_summary(args: argparse.Namespace) -> Iterator[Row]:
    """Yields a summary of the lines of earlier runs of `kernels`."""
    yield from summarise(read_rows(args.files))


def launches(cell: Cell) -> Row:
    """Returns the schedulers of the kernels of a cell on an H200, and the number of library calls.

    Nothing is compiled.
    """
    pattern, key = PATTERNS[cell.pattern], (cell.m, cell.n, DTYPES[cell.dtype])
    inputs = [torch.empty(o.shape, dtype=o.dtype) for o in pattern.operands(*key)]
    program = pattern.define(*key)._executor_cache().program_for(inputs)
    return {
        **cell.labels(),
        "bench": "launches",
        "kernels": [
            program.groups[op.group].scheduler for op in program.ops if isinstance(op, LaunchKernel)
        ],
        "library_calls": sum(isinstance(op, PostOnStream) for op in program.ops),
    }


def bench_launches(args: argparse.Namespace) -> Iterator[Row]:
    """Yields the launches of each cell with the H200's schedules, which need no GPU."""
    os.environ["FUSER_ENABLE"] = SCHEDULES
    yield from map(launches, chosen_cells(args))


# ------------------------------------------------------------------ tuning
def _always(params: Any, *_: Any) -> Callable[..., Any]:
    return lambda _: params


def _run_kernel(executor: Any, like: Any, sizes: Any, *inputs: Any) -> list[torch.Tensor]:
    outs = [torch.empty_like(t) for t in like]
    executor.run(inputs, outs, sizes=sizes)
    return outs


def _launchable(executor: Any, params: Any, inputs: Any, outs: Any, sizes: Any) -> bool:
    """Makes an executor choose these parameters; returns whether the kernel can be launched.

    That is so if they can be lowered, serve these tensors, and give a launch that the device
    accepts.
    """
    from fuser.kernels.autotune import is_launchable
    from fuser.support.device import describe_device

    executor.scheduler = replace(executor.scheduler, chooser=partial(_always, params))
    try:
        record = executor.bind(inputs, outs, sizes=sizes)
    except (FuserError, AssertionError):
        return False
    if record is None or record[0].params != params:
        return False
    return is_launchable(record[1], describe_device("cuda"))


def bench_explore(args: argparse.Namespace) -> Iterator[Row]:
    """Times neighbours of the chosen parameters of each pattern; yields the choice, the best 5."""
    from fuser.kernels.autotune_candidates import neighbours
    from fuser.kernels.executor import FusedKernelExecutor, compile_many
    from fuser.passes.concretize import concretize
    from fuser.passes.fusion_passes import run_passes
    from fuser.schedule.registry import find_scheduler
    from hostir.runtime.inputs import InputBinder

    for name, dtype, m, n in chosen_cells(args):
        pattern, key = PATTERNS[name], (m, n, DTYPES[dtype])
        sets = [pattern.random(*key) for _ in range(set_count(pattern.nbytes(*key)))]
        made = pattern.peer(*sets[0])
        outs = list(made) if isinstance(made, tuple) else [made]
        fd = pattern.define(*key)
        bound = InputBinder(fd.fusion).bind(sets[0], sets[0][0].device)
        sizes = {s: int(v) for s, v in bound.items()}
        fusion, _ = concretize(fd.fusion, sizes)
        run_passes(fusion)
        scheduler = find_scheduler(fusion)
        assert scheduler is not None

        executor = partial(FusedKernelExecutor, fusion, scheduler=scheduler, name="kernel")

        launch = executor().bind(sets[0], outs, sizes=sizes)
        assert launch is not None
        chosen = launch[0].params
        candidates: dict[str, FusedKernelExecutor] = {}
        for params in (chosen, *neighbours(chosen)[:MAX_EXPLORED]):
            e = executor()
            if _launchable(e, params, sets[0], outs, sizes):
                candidates[str(params)] = e
        compile_many([(e, sets[0], outs, sizes) for e in candidates.values()], device="cuda")
        results: dict[str, float] = {}
        for text, e in candidates.items():
            try:
                ((results[text], _, _),) = time_interleaved(
                    [Replay(partial(_run_kernel, e, outs, sizes), sets)]
                )
            except KernelError as error:
                print(f"{text}: {error}", file=sys.stderr)
        best = sorted(results, key=results.__getitem__)[:5]
        for text in dict.fromkeys((str(chosen), *best)):
            us = round(results[text] * 1e6, 2)
            labels = {"bench": "explore", "pattern": name, "dtype": dtype, "shape": [m, n]}
            yield {**labels, "us": us, "params": text}


def _shown_params(fd: FusionDefinition) -> list[str]:
    """Returns the parameters of the kernels that the latest run of a definition has launched."""
    from fuser.kernels.executor import FusedKernelExecutor

    program = fd._executor_cache()._last().program
    kernels = [program.kernel(group) for group in program.container.groups.values()]
    return [
        str(v.params) for k in kernels if isinstance(k, FusedKernelExecutor) for v in k.variants
    ]


def _execute(fd: FusionDefinition, options: Sequence[str], *inputs: Any) -> list[torch.Tensor]:
    return fd.execute(inputs, _enable_options=options)


def bench_tune(args: argparse.Namespace) -> Iterator[Row]:
    """Times each pattern with the option `tune` and with the heuristic's choice, in turns."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, dtype, m, n in chosen_cells(args):
        pattern, key = PATTERNS[name], (m, n, DTYPES[dtype])
        sets = [pattern.random(*key, device=device) for _ in range(set_count(pattern.nbytes(*key)))]
        fd = pattern.define(*key)
        seconds: dict[str, float] = {}
        params: dict[str, list[str]] = {}
        runs: dict[str, Callable[..., Any]] = {}
        for way, options in (("heuristic", ()), ("tuned", ("tune",))):
            runs[way] = partial(_execute, fd, options)
            began = time.perf_counter()
            runs[way](*sets[0])
            seconds[way] = round(time.perf_counter() - began, 2)
            params[way] = _shown_params(fd)
        timed = time_interleaved([timer(device)(run, sets) for run in runs.values()])
        us = {way: round(t[0] * 1e6, 2) for way, t in zip(runs, timed, strict=True)}
        labels = {"bench": "tune", "pattern": name, "dtype": dtype, "shape": [m, n]}
        yield {**labels, "us": us, "first_run_s": seconds, "params": params}


# ------------------------------------------------------------------ CPU kernels
def _softmax(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * 32**-0.5 + mask, -1)


def _residual_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x + residual, x.shape[-1:], weight, bias, 1e-12)


def bench_cpu(args: argparse.Namespace) -> Iterator[Row]:
    """Times kernels on the CPU: median milliseconds of 15 interleaved runs after 3 warm-ups, one
    thread.
    """
    del args
    import minilm

    torch.set_num_threads(1)
    cases: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
        "gelu": (minilm.gelu, torch.nn.functional.gelu, ((32, 56, 1536),)),
        "masked softmax": (
            lambda fd, x, m: minilm.softmax(fd, fd.ops.add(fd.ops.mul(x, 32**-0.5), m)),
            _softmax,
            ((32, 12, 56, 56), (32, 1, 1, 56)),
        ),
        "residual + LayerNorm": (
            lambda fd, x, r, w, b: minilm.layer_norm(fd, fd.ops.add(x, r), w, b),
            _residual_norm,
            ((32, 56, 384), (32, 56, 384), (384,), (384,)),
        ),
    }
    for name, (build, peer, shapes) in cases.items():
        with FusionDefinition() as fd:
            tensors = [
                fd.define_tensor([1 if n == 1 else -1 for n in s], contiguity=True) for s in shapes
            ]
            fd.add_output(build(fd, *tensors))
        inputs = [torch.randn(s) for s in shapes]
        torch.testing.assert_close(fd.execute(inputs)[0], peer(*inputs), rtol=1e-4, atol=1e-5)
        runs = {"ours": partial(fd.execute, inputs), "torch": partial(peer, *inputs)}
        measures = {who: by_clock(run) for who, run in runs.items()}
        times = take_turns(measures, rounds=15, warm_ups=3)
        ours, theirs = (spread(times[who]).median for who in ("ours", "torch"))
        yield {
            "bench": "cpu",
            "kernel": name,
            "shapes": shapes,
            "launches": fd.fec.statistics()["kernels"],
            "ours_ms": round(ours * 1e3, 3),
            "torch_ms": round(theirs * 1e3, 3),
            "ratio": round(ours / theirs, 2),
        }


def bench_agree(args: argparse.Namespace) -> Iterator[Row]:
    """Times how long ranks need to agree on a call, compared with a message of the control channel.

    All ranks make the same calls in the same order.
    """
    from multidevice import Communicator
    from multidevice.job.agreement import RunSignature
    from multidevice.job.communicator import run_agreed

    communicator = Communicator.instance()
    team, signature = tuple(range(communicator.size())), RunSignature(("a program",))
    ways = {
        "word": lambda: run_agreed(communicator, team, lambda: (signature, (), list[object])),
        "message": lambda: communicator.agree(None, b"digest"),
        "alone": lambda: run_agreed(communicator, (), lambda: (signature, (), list[object])),
    }
    measures = {name: by_clock(way, 200) for name, way in ways.items()}
    times = {name: spread(s) for name, s in take_turns(measures, rounds=40, warm_ups=0).items()}
    if communicator.rank() == 0:
        for name, t in times.items():
            median_us, min_us, _ = t.scaled("us", 3)
            yield {"bench": "agree", "way": name, "min_us": min_us, "median_us": median_us}


def bench_library(args: argparse.Namespace) -> Iterator[Row]:
    """Times the rows of library ops, and names those behind torch."""
    device = "cpu" if args.cpu else "cuda"
    only = chosen(args.only, LIBRARY, "row") if args.only else ()
    machine = torch.cuda.get_device_name(0) if device == "cuda" else "CPU"
    yield {"bench": "library", "machine": machine, "torch": torch.__version__}
    found: list[Row] = []
    began = time.monotonic()
    for name, shape, dtype in library_cells.cells(only, device):
        if args.seconds and time.monotonic() - began > args.seconds:
            print(f"not timed: {name} {shape} {dtype} and all later cells", file=sys.stderr)
            break
        found.append(library_cells.measure(name, shape, dtype, device))
        yield found[-1]
    behind = [r for r in found if library_cells.is_behind(r)]
    names = ", ".join(f"{r['op']} {r['dtype']} {r['shape']}" for r in behind)
    print(f"{len(found)} cells, {len(behind)} behind torch: {names}", file=sys.stderr)


# Cells of `kernels` in which torch.compile was once faster, and the least ratio of its time to
# ours.
LEAST_OF_COMPILED = 0.95
HELD = (
    ("group_norm", (16384, 3136)),
    ("batch_norm_nchw", (16384, 3136)),
    ("batch_norm", (200704, 256)),
    ("take_along_rows", (8192, 8192)),
    ("permute_0213", (16384, 4096)),
)


def is_behind_compiled(row: Row) -> bool:
    """Whether torch.compile is faster in one of the cells of `HELD`."""
    is_held = (row.get("pattern"), tuple(row.get("shape", ()))) in HELD
    times = row.get("us", {}) if is_held else {}
    return "default" in times and times["default"] / times["ours"] < LEAST_OF_COMPILED


def is_behind(rows: Sequence[Row]) -> bool:
    """Whether any measurement misses its limit.

    These are: library ops and the cells of `HELD`, where torch must not be faster, and lowering.
    """
    return any(
        (row.get("bench") == "library" and library_cells.is_behind(row))
        or is_behind_compiled(row)
        or not row.get("is_kept", True)
        for row in rows
    )


def bench_by_pytest(name: str, args: argparse.Namespace) -> Iterable[Row]:
    """Runs the benchmarks of a file by pytest-benchmark; returns a line for each."""
    return run_benchmarks(name, args.only)


BENCHES: dict[str, Callable[[argparse.Namespace], Iterable[Row]]] = {
    "library": bench_library,
    "agree": bench_agree,
    "attention": bench_attention,
    "kernels": bench_kernels,
    "summary": bench_summary,
    "launches": bench_launches,
    "explore": bench_explore,
    "tune": bench_tune,
    "cpu": bench_cpu,
    **{name: partial(bench_by_pytest, name) for name in ("compile", "lowering", "cold", "plan")},
}


def main() -> int:
    """Runs the benchmark of the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("bench", choices=tuple(BENCHES))
    parser.add_argument("files", nargs="*", type=Path, help="of summary: what kernels wrote")
    parser.add_argument("--json", type=Path, help="append one JSON line per measurement")
    parser.add_argument(
        "--peers",
        default="default",
        help="modes of torch.compile, beside eager; eager; quack; or none",
    )
    parser.add_argument("--shapes", default="", help="rows x columns: 16384x8192,32768x1024; all")
    parser.add_argument("--only", default="", help="names of patterns, or main")
    parser.add_argument("--dtypes", default="bfloat16", help="such as bfloat16,float32")
    parser.add_argument("--processes", type=int, default=1, help="that compile side by side")
    parser.add_argument("--seconds", type=float, default=0.0, help="when to stop; 0: at the end")
    parser.add_argument("--rest", action="store_true", help="only cells that --json has not yet")
    parser.add_argument("--beside", action="store_true", help="of attention: heads lie beside")
    parser.add_argument("--cpu", action="store_true", help="try the benchmark itself")
    args = parser.parse_args()
    lines = Lines(args.json)
    for row in BENCHES[args.bench](args):
        lines.emit(row)
    return int(is_behind(lines.rows))


if __name__ == "__main__":
    sys.exit(main())
