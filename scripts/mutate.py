"""Damages printed programs and cached kernels, and checks that only typed errors follow.

    python scripts/mutate.py programs|fusions|cache --seed 0 --cases 1000
    python scripts/mutate.py runtime --only lost_wait,chunk_zero

The second form damages the product itself, and checks that its tests fail: see `mutate_runtime.py`.

A case takes a text (a host program or a fusion), changes a few places, and parses, verifies and
runs the result on simulated ranks, with kernels in checked mode or as torch evaluates them. Cases
of `cache` take a kernel cache instead: see `mutate_cache.py`. Allowed are a run without an error
and every `FuserError`. Failures, with exit code 1, are:

- any other exception;
- more than LIMIT_S seconds;
- a dead process;
- executed code or opened files while a text is parsed and verified.

Cases run in a separate process, which another one watches. `--show` prints the damage of the case
`--seed`.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import re
import resource
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

LIMIT_S = 5.0
MAX_BYTES = 6 << 30
MAX_RANKS = 8
# The share of cases that compile their kernels, which takes longest.
COMPILED_SHARE = 0.04
FORBIDDEN = ("exec", "compile", "import", "open", "subprocess.Popen", "os.system", "ctypes.dlopen")

_TOKEN = re.compile(r"\w+|[^\w\s]|\s+")
_NUMBERS = (
    *("0", "1", "2", "3", "7", "8", "-1", "-8", "64", "4096"),
    *("2147483648", "9223372036854775808", "1" + "0" * 30, "9" * 5000, "1e400", "nan"),
)


# ------------------------------------------------------------------ damage
def damaged(text: str, rng: random.Random) -> str:
    """Returns `text` with one to three places changed."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        text = rng.choice(_DAMAGES)(text, rng)
    return text


def _flip(text: str, rng: random.Random) -> str:
    at = rng.randrange(len(text))
    return text[:at] + rng.choice("0123456789ibrgTS{}()[],=->.x \n\0\u0663\u00e9") + text[at + 1 :]


def _tokens(change: Callable[[list[str], random.Random], None]) -> Any:
    def apply(text: str, rng: random.Random) -> str:
        tokens = _TOKEN.findall(text)
        change(tokens, rng)
        return "".join(tokens)

    return apply


def _swap(tokens: list[str], rng: random.Random) -> None:
    words = [i for i, t in enumerate(tokens) if not t.isspace()]
    i, j = rng.choice(words), rng.choice(words)
    tokens[i], tokens[j] = tokens[j], tokens[i]


def _delete(tokens: list[str], rng: random.Random) -> None:
    at = rng.randrange(len(tokens))
    del tokens[at : at + rng.choice((1, 1, 2, 5))]


def _copy(tokens: list[str], rng: random.Random) -> None:
    words = [i for i, t in enumerate(tokens) if not t.isspace()]
    tokens[rng.choice(words)] = tokens[rng.choice(words)]


def _number(tokens: list[str], rng: random.Random) -> None:
    numbers = [i for i, t in enumerate(tokens) if t.isdigit()]
    if numbers:
        tokens[rng.choice(numbers)] = rng.choice(_NUMBERS)


def _rename(tokens: list[str], rng: random.Random) -> None:
    """Replaces the number in one mention of a tensor, an axis or a symbol by another one's."""
    names = [i for i, t in enumerate(tokens) if re.fullmatch(r"(T|i|d|f|[irb]\w*?)\d+\w*", t)]
    if names:
        i, j = rng.choice(names), rng.choice(names)
        digits = re.search(r"\d+", tokens[j])
        assert digits is not None
        tokens[i] = re.sub(r"\d+", digits[0], tokens[i], count=1)


def _nest(tokens: list[str], rng: random.Random) -> None:
    tokens.insert(rng.randrange(len(tokens)), rng.choice("([{-") * rng.choice((1, 200, 3000)))


def _lines(text: str, rng: random.Random) -> str:
    lines = text.split("\n")
    at, to = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.choice(("move", "copy", "delete")):
        case "move":
            lines.insert(to, lines.pop(at))
        case "copy":
            lines.insert(to, lines[at])
        case _:
            del lines[at]
    return "\n".join(lines)


_DAMAGES: tuple[Callable[[str, random.Random], str], ...] = (
    _flip,
    _lines,
    _lines,
    *(_tokens(c) for c in (_swap, _delete, _copy, _copy, _number, _number, _rename, _rename)),
    _tokens(_nest),
)


# ------------------------------------------------------------------ texts to damage
def corpus() -> dict[str, list[str]]:
    """Returns the full texts of host programs, and of the fusions from which they were
    lowered.
    """
    import torch

    from fuser import DataType, FusionDefinition, ParallelType, multidevice
    from fuser.ir.text.printer import fusion_text

    def matrix(fd: FusionDefinition, dtype: DataType = DataType.Float) -> Any:
        return fd.define_tensor([-1, -1], contiguity=True, dtype=dtype)

    def softmax(fd: FusionDefinition) -> list[Any]:
        x, n = matrix(fd), fd.define_scalar(None, DataType.Int)
        e = fd.ops.exp(fd.ops.sub(x, fd.ops.max(x, dim=1, keepdim=True)))
        fd.add_output(fd.ops.div(e, fd.ops.sum(e, dim=1, keepdim=True)))
        fd.add_output(fd.ops.add(x, n))
        return [x]

    def views(fd: FusionDefinition) -> list[Any]:
        x = fd.define_tensor([-1, -1, 4], contiguity=True)
        t = fd.ops.permute(fd.ops.reshape(x, [x.size(0), x.size(1), 2, 2]), [1, 0, 2, 3])
        fd.add_output(fd.ops.slice(t, [0, 1, 0, 0], [3, 5, 2, 1]))
        fd.add_output(fd.ops.pad(fd.ops.sum(t, dim=[2, 3]), [1, 2]))
        fd.add_output(fd.ops.cat([fd.ops.relu(x), x], dim=2))
        return [x]

    def update(fd: FusionDefinition) -> list[Any]:
        x, y = matrix(fd), matrix(fd, DataType.Half)
        fd.add_output(fd.ops.add(x, fd.ops.cast(y, DataType.Float)), x)
        fd.add_output(fd.ops.linear(fd.ops.cast(x, DataType.Half), y))
        return [x, y]

    def row_parallel(fd: FusionDefinition) -> list[Any]:
        x, w = matrix(fd), matrix(fd)
        fd.add_output(fd.ops.relu(fd.ops.linear(x, w)))
        mesh = multidevice.DeviceMesh([0, 1])
        for tensor in (x, w):
            tensor.set_device_mesh(mesh)
            tensor.outer_split(1, 2)
            tensor.axis(1).parallelize(ParallelType.mesh_x)
        return [x, w]

    def gathered(fd: FusionDefinition) -> list[Any]:
        x = matrix(fd)
        out = fd.ops.mul(fd.ops.exp(x), 2.0)
        fd.add_output(out)
        mesh = multidevice.DeviceMesh([0, 1])
        for tensor in (x, out):
            tensor.set_device_mesh(mesh)
        x.outer_split(0, 2)
        x.axis(0).parallelize(ParallelType.mesh_x)
        return [x]

    def shape(tv: Any) -> list[int]:
        local = 8 // 2 if tv.mesh is not None else 8
        if tv.mesh is None:
            return [8] * (tv.ndim - 1) + [4 if tv.ndim == 3 else 8]
        return [8, local] if tv.axis(0).ptype is ParallelType.serial else [local, 8]

    programs, fusions = [], []
    for define in (softmax, views, update, row_parallel, gathered):
        with FusionDefinition() as fd:
            tensors = define(fd)
        dtypes = {DataType.Half: torch.float16, DataType.Float: torch.float32}
        inputs: list[Any] = [torch.randn(shape(t)).to(dtypes[t.dtype()]) for t in tensors]
        inputs += [3] * (len(fd.fusion.inputs) - len(inputs))
        fusions.append(fusion_text(fd.fusion))
        with multidevice.simulate(2 if tensors[0].mesh is not None else 1) as world:
            world.run(lambda fd=fd, inputs=inputs: fd.execute(inputs))
        programs.append(fd.fec.host_program().full_text())
    return {"programs": programs, "fusions": fusions}


# ------------------------------------------------------------------ one case
class Watch:
    """Records forbidden actions of a parser. Audit hooks cannot be removed, so there is one per
    process.
    """

    def __init__(self) -> None:
        self.active = False
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[object, ...]) -> None:
        if self.active and event in FORBIDDEN:
            self.seen.append(f"{event} {args[:1]}")

    def __enter__(self) -> None:
        self.seen.clear()
        self.active = True

    def __exit__(self, *_: object) -> None:
        self.active = False


def run_program(text: str, rng: random.Random, watch: Watch) -> str:
    """Parses, verifies and runs a host program; returns "compiled" or "ran"."""
    from fuser.support.errors import InputError
    from fuser.support.options import settings
    from hostir.ir.parser import parse
    from hostir.ir.verifier import verify
    from hostir.tools.run_text import random_inputs, run_simulated

    with watch:
        program = parse(text)
        verify(program)
    ranks = max((*program.devices(), 0)) + 1
    if ranks > MAX_RANKS:
        raise InputError(f"{ranks} ranks are too many to simulate")
    compiled = rng.random() < COMPILED_SHARE
    run_simulated(
        program,
        random_inputs(program, sizes={}, seed=0),
        ranks=ranks,
        settings=settings(["checked"]),
        make_runner=None if compiled else TorchRunner,
    )
    return "compiled" if compiled else "ran"


class TorchRunner:
    """Runs a kernel group as torch evaluates it, without a compiler."""

    def __init__(self, group: Any) -> None:
        from multidevice.sharding.passes.localize import localize

        self.fusion, _ = localize(group.fusion)

    def run(self, inputs: Any, outputs: Any, *, sizes: Any) -> None:
        """Evaluates the fusion with torch, and writes the results to `outputs`."""
        from fuser.ops.reference.meaning import evaluate_fusion

        results = evaluate_fusion(self.fusion, list(inputs), values=sizes)
        for out, value in zip(outputs, results, strict=True):
            out.copy_(value)

    def launch_for(self, inputs: Any, outputs: Any, *, sizes: Any, device: Any = None) -> None:
        """Returns None: nothing is launched."""


def _torch_runner(group: Any, settings: Any, **_: Any) -> TorchRunner:
    del settings
    return TorchRunner(group)


def run_fusion(text: str, rng: random.Random, watch: Watch) -> str:
    """Parses and verifies a fusion, and compiles it to a host program."""
    import hostir.runtime.evaluator
    from fuser.frontend.executor_cache import FusionExecutorCache
    from fuser.ir.text.parser import parse_fusion
    from fuser.ir.verify import verify_fusion
    from fuser.support.errors import InputError
    from hostir.ir.program import HostIrContainer
    from hostir.tools.run_text import random_inputs, shards_of
    from multidevice import Communicator, simulate

    with watch:
        fusion = parse_fusion(text)
        verify_fusion(fusion)
    program = HostIrContainer(fusion)
    ranks = max((*(r for tv in fusion.tensors() if tv.mesh for r in tv.mesh.devices), 0)) + 1
    if ranks > MAX_RANKS:
        raise InputError(f"{ranks} ranks are too many to simulate")
    inputs = random_inputs(program, sizes={}, seed=0)
    compiled = rng.random() < COMPILED_SHARE
    cache, options = FusionExecutorCache(fusion), ["checked"] if compiled else []

    def body() -> None:
        mine = shards_of(program, inputs, Communicator.instance().rank())
        cache.execute(mine, _enable_options=options)

    compiler = hostir.runtime.evaluator.make_kernel_executor
    try:
        if not compiled:
            hostir.runtime.evaluator.make_kernel_executor = _torch_runner  # pyright: ignore[reportAttributeAccessIssue]
        with simulate(ranks) as world:
            world.run(body)
    finally:
        hostir.runtime.evaluator.make_kernel_executor = compiler
    return "compiled" if compiled else "ran"


RUN: dict[str, Callable[[str, random.Random, Watch], str]] = {
    "programs": run_program,
    "fusions": run_fusion,
}
KINDS = (*RUN, "cache")


def text_of(kind: str, texts: list[str], seed: int) -> tuple[str, random.Random]:
    """Returns the damaged text of a seed, and the random generator for its run."""
    rng = random.Random(f"{kind} {seed}")
    return damaged(rng.choice(texts), rng), rng


@contextlib.contextmanager
def runner(kind: str, watch: Watch) -> Iterator[Callable[[int], str]]:
    """Yields a function that runs the case of a seed."""
    if kind == "cache":
        import mutate_cache

        cache = mutate_cache.Cache()
        try:
            yield lambda seed: mutate_cache.run(cache, seed)
        finally:
            cache.close()
        return
    texts = corpus()[kind]
    yield lambda seed: RUN[kind](*text_of(kind, texts, seed), watch)


def work(kind: str, seed: int, cases: int) -> None:
    """Runs cases in the watched process: prints one line of JSON per case."""
    import torch

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    watch = Watch()
    with runner(kind, watch) as run:
        print(json.dumps({"ready": True}), flush=True)
        _work(range(seed, seed + cases), run, watch)


def _work(seeds: range, run: Callable[[int], str], watch: Watch) -> None:
    from fuser.support.errors import FuserError

    for s in seeds:
        start = time.monotonic()
        bad = ""
        try:
            result = run(s)
        except FuserError as error:
            result = type(error).__name__
        except BaseException as error:
            result = f"untyped {type(error).__name__}"
            frame = traceback.extract_tb(error.__traceback__)[-1]
            bad = f"{error!s:.300} at {frame.filename}:{frame.lineno}"
        if watch.seen:
            result, bad = "executed", "; ".join(watch.seen[:3])
        elapsed = time.monotonic() - start
        if elapsed > LIMIT_S and result != "compiled":
            result, bad = "slow", f"{elapsed:.1f} s, {result}"
        print(json.dumps({"seed": s, "result": result, "bad": bad}), flush=True)


# ------------------------------------------------------------------ the watching process
def campaign(kind: str, seed: int, cases: int) -> tuple[dict[str, int], list[str]]:
    """Runs cases in watched processes; returns the counts by result, and the failures."""
    counts: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    at, end = seed, seed + cases
    while at < end:
        command = [sys.executable, __file__, kind, "--work", "--seed", str(at)]
        process = subprocess.Popen(
            [*command, "--cases", str(end - at)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert process.stdout is not None
        buffer, limit = b"", 120.0
        while at < end:
            ready, _, _ = select.select([process.stdout], [], [], limit)
            chunk = os.read(process.stdout.fileno(), 1 << 16) if ready else b""
            if not chunk:
                process.kill()
                what = "died" if ready else "hung"
                counts[what] += 1
                wrong.append(f"seed {at}: {what} (exit code {process.wait()})")
                at += 1
                break
            limit = 6 * LIMIT_S
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                row = json.loads(line)
                if "seed" in row:
                    counts[row["result"]] += 1
                    at = row["seed"] + 1
                    if row["bad"]:
                        wrong.append(f"seed {row['seed']}: {row['result']}: {row['bad']}")
        process.wait()
    return dict(counts.most_common()), wrong


def main() -> int:
    """Runs the cases of the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kind", choices=(*KINDS, "runtime"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--show", action="store_true", help="print the damage of the case --seed")
    parser.add_argument("--only", default="", help="faults of the runtime, by name")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.kind == "runtime":
        import mutate_runtime

        return int(mutate_runtime.run(list(filter(None, args.only.split(",")))) > 0)
    if args.work:
        work(args.kind, args.seed, args.cases)
        return 0
    if args.show and args.kind == "cache":
        import mutate_cache

        cache = mutate_cache.Cache()
        print(mutate_cache.run(cache, args.seed, tell=print))
        cache.close()
        return 0
    if args.show:
        texts = corpus()[args.kind]
        print(text_of(args.kind, texts, args.seed)[0])
        return 0
    start = time.monotonic()
    counts, wrong = campaign(args.kind, args.seed, args.cases)
    for line in wrong[:200]:
        print(line)
    print(f"{args.cases} damaged {args.kind}, {time.monotonic() - start:.0f} s: {counts}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
