"""Benchmarks. `python scripts/bench.py kernels [--json FILE] [--no-peer] [--shapes 16384x8192,...]`

kernels: generated pointwise and reduction kernels on one GPU, bf16 where the name of the pattern
says nothing else, beside torch.compile (sums of few rows: and torch.sum) and beside the copy
bandwidth of the same run. Method: K input sets are rotated so that their total
exceeds four times the L2 cache and 256 MB; the K calls are captured in one CUDA graph, which is
replayed in turns with the peer's; the time per call is the median of 15 replays after 10 warm-ups
(minimum and maximum are reported too).
Bytes are minimal bytes: each input read once, each output written once.

explore: the same kernels with neighbouring scheduler parameters, to tune the heuristics.

host: definition-to-CUDA-source time of a 20-op fusion, on any machine.

agree: what ranks need to agree on a call, under mpirun.

cpu: the encoder layer's kernel kinds on the CPU device beside torch's own op, one thread each,
interleaved.

cold: a fresh process to the first result of an encoder layer, on the GPU where there is one.

compile: definition to CUDA text of long programs, in phases, beside what they may take; on any
machine. `--only` takes the names of its cases.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cold_start import bench_cold
from compile_time import bench_compile
from kernel_patterns import PATTERNS, define

from fuser import FusionDefinition

SHAPES = ((16384, 8192), (32768, 1024))
LARGE_COPY = (32768, 16384)
REPLAYS, WARM_UPS = 15, 10


# ------------------------------------------------------------------ timing
def set_count(nbytes: int) -> int:
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, min(16, -(-max(4 * l2, 256 << 20) // nbytes)))


class Replay:
    """The calls of one candidate on all input sets, captured in a CUDA graph."""

    def __init__(self, fn: Callable[..., Any], sets: Sequence[tuple[Any, ...]]) -> None:
        self.calls = len(sets)
        self.seconds: list[float] = []
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                for s in sets:
                    fn(*s)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            # Kept alive: no output buffer is reused inside a replay.
            self.kept = [fn(*s) for s in sets]

    def run(self) -> None:
        """Replay once, adding the seconds per call."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        stop.record()
        stop.synchronize()
        self.seconds.append(start.elapsed_time(stop) * 1e-3 / self.calls)


def time_interleaved(replays: Sequence[Replay]) -> list[tuple[float, float, float]]:
    """Return (median, minimum, maximum) seconds per call of each, measured in turns."""
    for i in range(WARM_UPS + REPLAYS):
        for replay in replays:
            if i == WARM_UPS:
                replay.seconds.clear()
            replay.run()
    return [(statistics.median(r.seconds), min(r.seconds), max(r.seconds)) for r in replays]


def copy_bandwidth(m: int, n: int) -> float:
    """Return bytes per second (read + written) of torch's clone of a bf16 [m, n] tensor."""
    nbytes = 4 * m * n
    sets = [
        (torch.randn(m, n, device="cuda").to(torch.bfloat16),) for _ in range(set_count(nbytes))
    ]
    ((median, _, _),) = time_interleaved([Replay(torch.clone, sets)])
    return nbytes / median


def chosen_shapes(args: argparse.Namespace) -> tuple[tuple[int, int], ...]:
    if not args.shapes:
        return SHAPES
    pairs = (s.split("x") for s in args.shapes.split(","))
    return tuple((int(m), int(n)) for m, n in pairs)


def chosen_patterns(args: argparse.Namespace) -> tuple[str, ...]:
    return tuple(args.only.split(",")) if args.only else tuple(PATTERNS)


def bench_kernels(args: argparse.Namespace) -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        raise SystemExit("bench.py kernels needs a GPU")
    shapes = chosen_shapes(args)
    # The roof is the largest copy of the run; the copy of each shape is reported beside it.
    copies = {shape: copy_bandwidth(*shape) for shape in (*shapes, LARGE_COPY)}
    bandwidth = max(copies.values())
    torch.cuda.empty_cache()
    rows: list[dict[str, Any]] = []

    def emit(**row: Any) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)

    emit(
        bench="kernels",
        machine=torch.cuda.get_device_name(0),
        torch=torch.__version__,
        copy_TBps=round(bandwidth / 1e12, 3),
    )
    shapes = (
        [tuple(map(int, s.split("x"))) for s in args.shapes.split(",")] if args.shapes else SHAPES
    )
    for name in chosen_patterns(args):
        pattern = PATTERNS[name]
        for m, n in shapes:
            nbytes = pattern.nbytes(m, n)
            sets = pattern.random(m, n, set_count(pattern.nbytes(m, n)))
            fd = pattern.define(m, n)
            began = time.perf_counter()
            out, *_ = fd.execute(sets[0])
            torch.cuda.synchronize()
            first_s = time.perf_counter() - began
            exact = pattern.peer(*(t.double() if "sum" in name else t for t in sets[0]))
            exact = exact[0] if isinstance(exact, tuple) else exact
            error = float((out.double() - exact.double()).norm() / exact.double().norm())
            del out, exact
            candidates: dict[str, Callable[..., Any]] = {"ours": lambda *a, fd=fd: fd.execute(a)}
            if not args.no_peer:
                torch._dynamo.reset()
                candidates["torch.compile"] = torch.compile(pattern.peer, dynamic=False)
                if pattern.library is not None:
                    candidates["torch"] = pattern.library
            timed = time_interleaved([Replay(fn, sets) for fn in candidates.values()])
            for candidate, (median, low, high) in zip(candidates, timed, strict=True):
                emit(
                    bench="kernels",
                    pattern=name,
                    shape=[m, n],
                    candidate=candidate,
                    us=round(median * 1e6, 2),
                    us_min=round(low * 1e6, 2),
                    us_max=round(high * 1e6, 2),
                    GBps=round(nbytes / median / 1e9),
                    of_copy=round(nbytes / median / bandwidth, 3),
                    of_same_shape_copy=round(nbytes / median / copies[m, n], 3),
                    **(
                        {"relative_error": error, "first_call_s": round(first_s, 2)}
                        if candidate == "ours"
                        else {}
                    ),
                )
            del sets
            torch.cuda.empty_cache()
    return rows


# ------------------------------------------------------------------ tuning
def neighbours(params: Any) -> list[Any]:
    """Return scheduler parameters near the chosen ones, the chosen first."""
    from fuser.schedule.inner_persistent_params import InnerPersistentParams
    from fuser.schedule.pointwise import PointwiseParams
    from fuser.schedule.transpose_params import TransposeParams

    found: list[Any] = [params]
    if isinstance(params, TransposeParams):
        return _tile_neighbours(params)
    if isinstance(params, InnerPersistentParams):
        return _persistent_neighbours(params)
    if isinstance(params, PointwiseParams):
        for unroll, x in itertools.product((1, 2, 4, 8), (64, 128, 256)):
            found.append(replace(params, unroll=unroll, threads_x=x, threads_y=1))
    elif params.inner:
        for unroll, x, threads in itertools.product((1, 2, 4), (16, 32, 64, 128), (128, 256)):
            y = max(threads // x, 1)
            found.append(replace(params, unroll=unroll, threads_x=x, threads_y=y))
    elif params.threads_y == 1:
        for unroll, x, columns in itertools.product((1, 2, 4, 8), (64, 128, 256), (1, 2, 4)):
            found.append(replace(params, unroll=unroll, threads_x=x, columns=columns))
    else:
        grids = (4, 8, 16, 32, 64, 128)
        shapes = itertools.product((8, 16, 32), (16, 32, 64, 128), (256, 512), grids)
        for unroll, x, threads, grid in shapes:
            made = replace(params, unroll=unroll, threads_x=x, threads_y=threads // x, grid=grid)
            found.append(made)
    return list(dict.fromkeys(found))


def _tile_neighbours(params: Any) -> list[Any]:
    """Half and twice each extent of the tile, with blocks of other sizes."""
    found = [params]
    widest = max(params.vector, params.staged_vector)
    edges = itertools.product((params.edge // 2, params.edge, 2 * params.edge), (-1, 0, 1))
    for (edge, power), threads in itertools.product(edges, (64, 128, 256, 512)):
        staged = int(params.staged_edge * 2**power)
        if edge >= params.vector and staged >= params.staged_vector:
            fits = threads * widest <= edge * staged
            found += [replace(params, edge=edge, staged_edge=staged, threads=threads)] * fits
    return list(dict.fromkeys(found))


def _persistent_neighbours(params: Any) -> list[Any]:
    """Twice and half the threads of a row, other numbers of registers, and the looped form."""
    found = [params]
    loops = replace(params, kept=0, keeps_costly=False, resident=0)
    for unroll, threads in itertools.product((1, 2, 4), (256, 512, 1024)):
        found.append(replace(loops, unroll=unroll, threads_x=threads, threads_y=1))
    if params.shifted:
        found.append(replace(params, vector=1, shifted=False))
    for shift, resident, costly in itertools.product(
        (-1, 0, 1), (0, 768, 1024, 1536), (False, True)
    ):
        threads = params.threads_x << 1 if shift > 0 else params.threads_x >> -shift
        kept = params.kept >> 1 if shift > 0 else params.kept << -shift
        if params.kept and 1 <= threads <= 1024 and kept % params.vector == 0:
            y = max(128 // threads, 1)
            shape = replace(params, threads_x=threads, threads_y=y, kept=kept)
            found.append(replace(shape, resident=resident, keeps_costly=costly))
    return list(dict.fromkeys(found))


def _always(params: Any, *_: Any) -> Callable[..., Any]:
    return lambda _: params


def _run_kernel(executor: Any, like: Any, sizes: Any, *inputs: Any) -> list[torch.Tensor]:
    outs = [torch.empty_like(t) for t in like]
    executor.run(inputs, outs, sizes=sizes)
    return outs


def bench_explore(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time neighbours of the chosen parameters of each pattern; emit the choice and the best 5."""
    from fuser.kernels.executor import KernelExecutor, compile_many
    from fuser.passes.concretize import concretize
    from fuser.passes.fusion_passes import run_passes
    from fuser.schedule.registry import find_scheduler
    from hostir.bind import InputBinder

    rows: list[dict[str, Any]] = []
    for name, (m, n) in itertools.product(chosen_patterns(args), chosen_shapes(args)):
        pattern = PATTERNS[name]
        sets = pattern.random(m, n, set_count(pattern.nbytes(m, n)))
        made = pattern.peer(*sets[0])
        outs = list(made) if isinstance(made, tuple) else [made]
        fd = pattern.define(m, n)
        bound = InputBinder(fd.fusion).bind(sets[0], sets[0][0].device)
        sizes = {s: int(v) for s, v in bound.items()}
        fusion, _ = concretize(fd.fusion, sizes)
        run_passes(fusion)
        scheduler = find_scheduler(fusion)
        assert scheduler is not None

        executor = partial(KernelExecutor, fusion, scheduler=scheduler, name="kernel")

        launch = executor().bind(sets[0], outs, sizes=sizes)
        assert launch is not None
        candidates: dict[str, KernelExecutor] = {}
        for params in neighbours(launch[0].params):
            e = candidates[str(params)] = executor()
            e.scheduler = replace(e.scheduler, chooser=partial(_always, params))
        compile_many([(e, sets[0], outs, sizes) for e in candidates.values()], device="cuda")
        results: dict[str, float] = {}
        for text, e in candidates.items():
            run = partial(_run_kernel, e, outs, sizes)
            ((results[text], _, _),) = time_interleaved([Replay(run, sets)])
        best = sorted(results, key=results.__getitem__)[:5]
        for text in dict.fromkeys((str(launch[0].params), *best)):
            us = round(results[text] * 1e6, 2)
            row = {"bench": "explore", "pattern": name, "shape": [m, n], "us": us, "params": text}
            print(json.dumps(row), flush=True)
            rows.append(row)
    return rows


# ------------------------------------------------------------------ host
def twenty_ops(fd: FusionDefinition, x: Any, y: Any) -> Any:
    """A chain of 20 pointwise ops."""
    value = x
    for i in range(20):
        step = (fd.ops.tanh, lambda v: fd.ops.mul(v, 1.5), lambda v: fd.ops.add(v, y))[i % 3]
        value = step(value)
    return value


def bench_host(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Definition to CUDA source of a 20-op fusion, warm process, median of 9."""
    del args
    from fuser.device import H200
    from fuser.kernels.executor import KernelExecutor
    from fuser.passes.concretize import concretize
    from fuser.passes.fusion_passes import run_passes
    from hostir.bind import InputBinder

    inputs = [torch.empty(64, 96, dtype=torch.bfloat16) for _ in range(2)]
    out = torch.empty(64, 96)
    times: list[float] = []
    for _ in range(11):
        began = time.perf_counter()
        fd = define(twenty_ops, (64, 96), (64, 96))
        sizes = InputBinder(fd.fusion).bind(inputs, inputs[0].device)
        fusion, _ = concretize(fd.fusion, {s: int(v) for s, v in sizes.items()})
        run_passes(fusion)
        executor = KernelExecutor(fusion, scheduler="pointwise", name="kernel", device=H200)
        launch = executor.bind(inputs, [out], sizes={s: int(v) for s, v in sizes.items()})
        times.append((time.perf_counter() - began) * 1e3)
        assert launch is not None and "__global__" in launch[0].kernel.source.text
    row = {
        "bench": "host",
        "what": "definition to CUDA source, 20 ops",
        "ms": round(statistics.median(times[2:]), 2),
        "ms_min": round(min(times[2:]), 2),
        "ms_max": round(max(times[2:]), 2),
    }
    print(json.dumps(row))
    return [row]


# ------------------------------------------------------------------ CPU kernels
def _softmax(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * 32**-0.5 + mask, -1)


def _residual_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x + residual, x.shape[-1:], weight, bias, 1e-12)


def bench_cpu(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Median milliseconds of 15 interleaved runs after 3 warm-ups, float32, one thread."""
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
    rows: list[dict[str, Any]] = []
    for name, (build, peer, shapes) in cases.items():
        with FusionDefinition() as fd:
            tensors = [
                fd.define_tensor([1 if n == 1 else -1 for n in s], contiguity=True) for s in shapes
            ]
            fd.add_output(build(fd, *tensors))
        inputs = [torch.randn(s) for s in shapes]
        torch.testing.assert_close(fd.execute(inputs)[0], peer(*inputs), rtol=1e-4, atol=1e-5)
        times: dict[str, list[float]] = {"ours": [], "torch": []}
        runs = {"ours": partial(fd.execute, inputs), "torch": partial(peer, *inputs)}
        for _ in range(18):
            for who, run in runs.items():
                began = time.perf_counter()
                run()
                times[who].append((time.perf_counter() - began) * 1e3)
        ours, theirs = (statistics.median(times[who][3:]) for who in ("ours", "torch"))
        row = {
            "bench": "cpu",
            "kernel": name,
            "shapes": shapes,
            "launches": fd.fec.statistics()["kernels"],
            "ours_ms": round(ours, 3),
            "torch_ms": round(theirs, 3),
            "ratio": round(ours / theirs, 2),
        }
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def bench_agree(args: argparse.Namespace) -> list[dict[str, object]]:
    """What it costs ranks to agree, beside a message of the control channel; in lockstep."""
    from multidevice import Communicator
    from multidevice.agreement import Claim, run_agreed

    communicator = Communicator.instance()
    team, claim = tuple(range(communicator.size())), Claim(("a program",))
    ways = {
        "word": lambda: run_agreed(communicator, team, lambda: (claim, (), list[object])),
        "message": lambda: communicator.agree(None, b"digest"),
        "alone": lambda: run_agreed(communicator, (), lambda: (claim, (), list[object])),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(40):
        for name, way in ways.items():
            start = time.perf_counter()
            for _ in range(200):
                way()
            times[name].append((time.perf_counter() - start) / 200 * 1e6)
    if communicator.rank():
        return []
    rows = [
        {"bench": "agree", "way": name, "min_us": min(t), "median_us": statistics.median(t)}
        for name, t in times.items()
    ]
    for row in rows:
        print(json.dumps(row), flush=True)
    return rows


BENCHES = {
    "agree": bench_agree,
    "kernels": bench_kernels,
    "explore": bench_explore,
    "host": bench_host,
    "cpu": bench_cpu,
    "compile": lambda args: bench_compile(args.only),
    "cold": lambda args: bench_cold("cuda" if torch.cuda.is_available() else "cpu"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("bench", choices=tuple(BENCHES))
    parser.add_argument("--json", type=Path, help="append one JSON line per measurement")
    parser.add_argument("--no-peer", action="store_true", help="leave torch.compile out")
    parser.add_argument("--shapes", default="", help="rows x columns: 16384x8192,32768x1024")
    parser.add_argument("--only", default="", help="pattern names, comma-separated")
    args = parser.parse_args()
    rows = BENCHES[args.bench](args)
    if args.json is not None:
        with args.json.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
