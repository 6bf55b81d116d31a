"""Encodes the sentences of a file with a tensor-parallel all-MiniLM-L6-v2.

    mpirun -np N python scripts/encode.py --text FILE [--device cpu|cuda] [--dtype float32|bfloat16]
        [--attention] [--predict MACHINE]

Rank 0 prints the five most similar pairs, the launches of the encoder, the time per batch (with
`--predict` also the predicted one), and the largest difference to `transformers.BertModel` where
that is installed. The exit code is 1 when the difference exceeds the bound of the dtype.
"""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BOUNDS = {"float32": 1e-5, "bfloat16": 6e-3}
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK", "SLURM_PROCID")
# A child process that inherits a launcher's variables would join the job.
LAUNCHER_PREFIXES = (
    "PMI",
    "OMPI_",
    "PMIX",
    "MPI",
    "HYDRA",
    "HYDI",
    "PRTE",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
)


def parse_arguments() -> argparse.Namespace:
    """Returns the arguments of the command line, checked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--text", type=Path, required=True, help="one sentence per line")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=tuple(BOUNDS), default="float32")
    parser.add_argument(
        "--attention", action="store_true", help="one op for attention, instead of its parts"
    )
    parser.add_argument(
        "--predict", metavar="MACHINE", help="also predict the device's time, on h200 for example"
    )
    parser.add_argument("--batch", type=int, default=32, help="sentences per batch")
    parser.add_argument("--weights", type=Path, help="model.safetensors of the same model")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json of the same model")
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    parser.add_argument("--dump", choices=("host_ir",), help="print the program that runs")
    args = parser.parse_args()
    if args.batch < 1:
        parser.error(f"--batch must be at least 1, got {args.batch}")
    if not args.text.is_file():
        parser.error(f"--text: no such file: {args.text}")
    return args


def read_texts(path: Path) -> list[str]:
    """Returns the sentences of a file, one per line."""
    texts = [line.strip() for line in path.read_text().splitlines() if line.strip()]
    if not texts:
        raise SystemExit(f"{path} has no sentence")
    return texts


def progress(text: str) -> None:
    """Shows a line of progress on a terminal; silent elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def job_marker() -> Path:
    """Returns a path that the ranks of this job on this host share: named after their launcher."""
    parent = os.getppid()
    stat = Path(f"/proc/{parent}/stat")
    # A process id may be reused; with its start time it is unique until the next boot.
    started = stat.read_text().rsplit(")", 1)[1].split()[19] if stat.exists() else "0"
    return Path(tempfile.gettempdir()) / f"encode-{os.getuid()}-{parent}-{started}"


def wait_for_reference(limit_s: float = 240.0) -> None:
    """Sleeps until rank 0 has run the reference: a rank inside MPI spins, and would disturb
    it.
    """
    marker, deadline = job_marker(), time.monotonic() + limit_s
    while not marker.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def run_reference(job: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the reference's embeddings and time, None where `transformers` is not installed.

    It runs in a separate process, while the other ranks sleep.
    """
    if importlib.util.find_spec("transformers") is None:
        return None
    import torch

    with tempfile.TemporaryDirectory() as folder:
        job_file, out_file = Path(folder) / "job.json", Path(folder) / "out.pt"
        job_file.write_text(json.dumps(job))
        script = Path(__file__).with_name("reference.py")
        env = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_PREFIXES)}
        env.pop("OMP_NUM_THREADS", None)
        done = subprocess.run(
            [sys.executable, str(script), str(job_file), str(out_file)],
            env=env,
            capture_output=True,
            text=True,
            timeout=240,
        )
        if done.returncode != 0:
            raise SystemExit(f"the reference failed:\n{done.stderr[-2000:]}")
        return torch.load(out_file)


def similar_pairs(embeddings: Any, count: int = 5) -> list[tuple[float, int, int]]:
    """Returns (cosine, i, j) of the most similar sentence pairs, most similar first."""
    import torch

    scores = embeddings @ embeddings.T
    n = scores.shape[0]
    rows, cols = torch.triu_indices(n, n, offset=1)
    flat = scores[rows, cols]
    best = flat.topk(min(count, flat.numel())).indices.tolist()
    return [(float(flat[i]), int(rows[i]), int(cols[i])) for i in best]


@dataclass(frozen=True)
class Times:
    """Milliseconds of a batch.

    - `waited`: a call with its wait, on data that is on the device.
    - `copied`: the same with the copy to the device.
    - `following`: per batch, if batches follow each other.
    - `predicted`: the cost model's prediction of `following`.
    """

    waited: float
    copied: float
    following: float
    predicted: float | None


def time_batches(encoder: Any, batch: tuple[Any, ...], machine: str | None) -> Times:
    """Times a batch in the same way as the reference, after the work that a process does only once.

    `machine`: the machine for which the time is also predicted, None for none.
    """
    import torch

    from fuser.runtime import compiled_runner

    placed, is_cuda = encoder.placed(*batch), encoder.device != "cpu"
    warm_ups, runs = (60, 41) if is_cuda else (4, 7)
    if is_cuda:
        for _ in range(warm_ups):
            encoder(*placed)
        compiled_runner.wait(60.0)

    def once(encode: Callable[[], object]) -> float:
        began = time.perf_counter()
        encode()
        if is_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - began) * 1e3

    def median(encode: Callable[[], object]) -> float:
        return statistics.median([once(encode) for _ in range(warm_ups + runs)][warm_ups:])

    waited = median(lambda: encoder(*placed))
    copied = median(lambda: encoder(*encoder.placed(*batch)))
    following = once(lambda: [encoder(*placed) for _ in range(runs)]) / runs
    predicted = None if machine is None else predicted_ms(encoder, placed, machine)
    return Times(waited, copied, following, predicted)


def predicted_ms(encoder: Any, batch: tuple[Any, ...], machine: str) -> float:
    """Returns the cost model's milliseconds per batch for the slowest rank's device."""
    from hostir.cost.machine_model import find_machine
    from hostir.cost.report import predict
    from hostir.cost.simulator import simulated_schedule
    from hostir.runtime.inputs import InputBinder

    program, inputs = encoder.fd.fec.host_program(), encoder.inputs(*batch)
    values = InputBinder(program.values).bind(inputs, inputs[0].device)
    sizes = {symbol: v for symbol, v in values.items() if isinstance(v, int)}
    made = predict(program, simulated_schedule(program, sizes, find_machine(machine)))
    return max(one.seconds for one in made.classes) * 1e3


def is_one_host() -> bool:
    """Whether the launcher says that all ranks run on this host."""
    pairs = (
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
        ("MPI_LOCALNRANKS", "PMI_SIZE"),
        ("LOCAL_WORLD_SIZE", "WORLD_SIZE"),
    )
    return any(a in os.environ and os.environ[a] == os.environ.get(b) for a, b in pairs)


def main() -> int:
    """Encodes the sentences of the command line; returns the exit code."""
    args = parse_arguments()
    texts = read_texts(args.text)
    rank = next((int(os.environ[v]) for v in RANK_VARIABLES if v in os.environ), 0)
    if args.weights is None or args.tokenizer is None:
        from minilm import package_file

        args.weights = args.weights or package_file("model.safetensors")
        args.tokenizer = args.tokenizer or package_file("tokenizer.json")
    reference = None
    if rank == 0:
        progress("reference ...")
        marker = job_marker()
        atexit.register(marker.unlink, missing_ok=True)
        try:
            reference = run_reference(
                {
                    "weights": str(args.weights),
                    "tokenizer": str(args.tokenizer),
                    "texts": texts,
                    "batch": args.batch,
                    "dtype": args.dtype,
                    "device": "cuda:0" if args.device == "cuda" else "cpu",
                }
            )
        finally:
            marker.touch()
    elif is_one_host():
        wait_for_reference()

    import torch
    from minilm import LAYERS, Encoder, load_weights, make_batches

    from fuser.multidevice import Communicator, DeviceMesh
    from fuser.runtime.compiled_kernel import compilations

    comm = Communicator.instance()
    device = "cpu"
    if args.device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
        device = f"cuda:{torch.cuda.current_device()}"
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // comm.local_size()))
    if comm.rank() == 0:
        progress("weights ...")
    encoder = Encoder(
        load_weights(args.weights),
        DeviceMesh(range(comm.size())),
        args.dtype,
        device,
        attention=args.attention,
    )
    batches = make_batches(args.tokenizer, texts, args.batch)
    parts: list[torch.Tensor] = []
    compiled: list[int] = []
    for i, batch in enumerate(batches):
        if comm.rank() == 0:
            progress(f"batch {i + 1} of {len(batches)} ...")
        before = compilations()
        parts.append(encoder(*encoder.placed(*batch)).cpu())
        compiled.append(compilations() - before)
    # Every rank's program has the same predicted time for all ranks.
    times = time_batches(encoder, batches[0], args.predict)
    if comm.rank() != 0:
        return 0
    progress("")
    return report(
        args,
        texts,
        torch.cat(parts),
        reference,
        encoder,
        compiled,
        times,
        comm.size(),
        LAYERS,
    )


def report(
    args: argparse.Namespace,
    texts: list[str],
    embeddings: Any,
    reference: dict[str, Any] | None,
    encoder: Any,
    compiled: list[int],
    times: Times,
    ranks: int,
    layers: int,
) -> int:
    """Prints the results, writes the JSON file, and returns the exit code."""
    if args.dump == "host_ir":
        print(encoder.fd.fec.host_program())
    counts = encoder.fd.fec.statistics()
    diff = None
    if reference is not None:
        diff = float((embeddings - reference["embeddings"]).abs().max())
    print("most similar pairs:")
    for score, i, j in similar_pairs(embeddings):
        print(f"  {score:.4f}  {texts[i]}\n          {texts[j]}")
    print(
        f"{layers} layers in one program: {counts['segments']} segments, {counts['kernels']} "
        f"generated kernels, {counts['library_calls']} library calls, {counts['collectives']} "
        "collectives"
    )
    second = compiled[1] if len(compiled) > 1 else None
    print(f"kernel compilations: {compiled[0]} in the first batch, {second} in the second")
    eager = None if reference is None else reference["ms_per_batch"]
    print(
        f"time per batch: {times.waited:.2f} ms on {ranks} rank(s), {args.device}, {args.dtype}"
        + ("" if eager is None else f"; torch eager {eager:.2f} ms")
    )
    if args.device == "cuda":
        print(f"with its copy to the device: {times.copied:.2f} ms")
    print(f"of batches that follow one another: {times.following:.2f} ms")
    if times.predicted is not None:
        print(f"predicted for the device, {args.predict}: {times.predicted:.2f} ms")
    bound = BOUNDS[args.dtype]
    # A NaN must fail, so the test is written as "not within".
    failed = diff is not None and not diff <= bound
    if diff is None:
        print("largest difference to transformers.BertModel: not compared (no transformers here)")
    else:
        verdict = "FAILED" if failed else "ok"
        print(
            f"largest difference to transformers.BertModel: {diff:.3g} (bound {bound:g}): {verdict}"
        )
    if args.json is not None:
        args.json.write_text(
            json.dumps(
                {
                    "max_abs_diff": diff,
                    "ranks": ranks,
                    "device": args.device,
                    "dtype": args.dtype,
                    "attention": args.attention,
                    "layers": layers,
                    "kernels": counts["kernels"],
                    "library_calls": counts["library_calls"],
                    "collectives": counts["collectives"],
                    "compilations_second_batch": second,
                    "ms_per_batch": times.waited,
                    "ms_per_batch_copied": times.copied,
                    "ms_per_batch_following": times.following,
                    "ms_per_batch_predicted": times.predicted,
                    "ms_per_batch_torch_eager": eager,
                },
                indent=2,
            )
            + "\n"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
