"""The rows of `bench.py attention`: attention as one op, compared with torch's own function.

A cell is a shape, a mode (full, causal, an additive bias, a Bool mask) and a direction. Forward
returns the output alone. Backward reads the results of an earlier forward. Torch uses its default
choice of kernels on the same tensors; its backward is `torch.autograd.grad` of a forward that has
run.

There are two times:

- `us_calls`: ten calls between two events, in turns. This is the time that a caller waits,
  including the host.
- `us`: forward only: ten calls captured in a CUDA graph, which is replayed in turns.

Errors are relative norms against float64, for one batch and one head of keys. A row fails where
torch's time is below `LEAST` of ours in both ways of timing, or where our error is larger than
torch's by more than rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from kernel_timing import Replay, time_interleaved
from turns import Run, by_events, spread, take_turns

from fuser import DataType, FusionDefinition, TensorView

Tensor = torch.Tensor
# The least ratio of torch's time to ours: in general, and for Bool masks from this number of keys
# on.
LEAST, LEAST_MASK, MASK_KEYS = 0.97, 2.0, 512
# The largest ratio of our error to torch's.
MORE_ERROR = 1.05
CALLS, ROUNDS = 10, 9


class Shape(NamedTuple):
    """The sizes of an attention: batches, heads, heads of keys, queries, keys, elements per
    head.
    """

    n: int
    h: int
    groups: int
    l: int
    s: int
    e: int


SHAPES = (
    Shape(4, 32, 32, 2048, 2048, 128),
    Shape(2, 16, 16, 4096, 4096, 64),
    Shape(1, 32, 32, 8192, 8192, 128),
    Shape(32, 12, 12, 56, 56, 32),
    Shape(8, 16, 16, 512, 512, 64),
    Shape(4, 32, 8, 2048, 2048, 128),
    Shape(16, 32, 32, 1, 4096, 128),
    Shape(2, 16, 16, 2048, 2048, 256),
    Shape(4, 16, 16, 1000, 1000, 96),
)
SMALL = (Shape(2, 4, 2, 6, 8, 8), Shape(1, 2, 2, 8, 8, 16))
MODES = ("full", "causal", "bias", "mask")


class Given(NamedTuple):
    """The operands: query, key, value, the output's gradient, an additive bias, and a mask."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    bias: Tensor | None
    mask: Tensor | None


def draw(z: Shape, mode: str, device: str, *, beside: bool) -> Given:
    """Returns operands; `beside`: heads are adjacent in memory, as projections write them, else
    rows are.
    """

    def one(heads: int, rows: int) -> Tensor:
        if beside:
            made = torch.randn(z.n, rows, heads, z.e, device=device).transpose(1, 2)
        else:
            made = torch.randn(z.n, heads, rows, z.e, device=device)
        return made.bfloat16()

    q, k, v, grad = one(z.h, z.l), one(z.groups, z.s), one(z.groups, z.s), one(z.h, z.l)
    added = torch.randn(z.n, 1, z.l, z.s, device=device) if mode in ("bias", "mask") else None
    if added is None:
        return Given(q, k, v, grad, None, None)
    # The mask removes about a tenth of the scores.
    return Given(
        q, k, v, grad, *((added.bfloat16(), None) if mode == "bias" else (None, added > -1.3))
    )


# ------------------------------------------------------------------ both sides
def define_forward(z: Shape, mode: str, *, all_results: bool = False) -> FusionDefinition:
    """Defines the forward op; its outputs are the attention's output, or all results."""
    with FusionDefinition() as fd:
        read = [
            fd.define_tensor([-1] * 4, contiguity=False, dtype=DataType.BFloat16) for _ in "qkv"
        ]
        q, k, v = read
        shape, added = [-1, 1, 1 if z.l == 1 else -1, -1], dict[str, TensorView]()
        if mode in ("bias", "mask"):
            dtype = DataType.BFloat16 if mode == "bias" else DataType.Bool
            added[mode] = fd.define_tensor(shape, dtype=dtype)
        results = fd.ops.sdpfa_fwd(
            q,
            k,
            v,
            added.get("bias"),
            added.get("mask"),
            is_causal=mode == "causal",
            enable_gqa=z.h != z.groups,
        )
        for out in results if all_results else results[:1]:
            fd.add_output(out)
    return fd


def define_backward(z: Shape, mode: str) -> FusionDefinition:
    """Defines the backward op, whose outputs are the gradients of query, key and value."""
    dtype = DataType.BFloat16
    with FusionDefinition() as fd:
        grad, q, k, v, out = (
            fd.define_tensor([-1] * 4, contiguity=False, dtype=dtype) for _ in range(5)
        )
        sums = fd.define_tensor([-1] * 3, contiguity=True)
        seed, offset = (fd.define_tensor(n, dtype=DataType.UInt64) for n in ([2], []))
        numbers = sums, 0.0, mode == "causal", seed, offset, None
        for made in fd.ops.sdpfa_bwd(grad, q, k, v, out, *numbers, enable_gqa=z.h != z.groups):
            fd.add_output(made)
    return fd


def sdpa(z: Shape, mode: str, given: Given) -> Tensor:
    """Returns torch's scaled_dot_product_attention of the operands."""
    mask = given.bias if given.mask is None else given.mask
    if mask is not None:  # as users give it: of all heads
        mask = mask.expand(z.n, z.h, z.l, z.s)
    return F.scaled_dot_product_attention(
        given.q,
        given.k,
        given.v,
        attn_mask=mask,
        is_causal=mode == "causal",
        enable_gqa=z.h != z.groups,
    )


# ------------------------------------------------------------------ errors
def expected_of(z: Shape, mode: str, given: Given) -> list[Tensor]:
    """Returns the output and the gradients of query, key and value in float64.

    They are computed for the first head of keys of the first batch.
    """
    times = z.h // z.groups
    q, k, v = (
        t[:1, :count].detach().double() for t, count in zip(given[:3], (times, 1, 1), strict=True)
    )
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    with torch.enable_grad():
        scores = q @ k.mT * z.e**-0.5
        if given.bias is not None:
            scores = scores + given.bias[:1].double()
        if given.mask is not None:
            scores = scores.masked_fill(~given.mask[:1], -torch.inf)
        if mode == "causal":
            seen = torch.ones(z.l, z.s, dtype=torch.bool, device=q.device).tril()
            scores = scores.masked_fill(~seen, -torch.inf)
        out = scores.softmax(-1) @ v
    grads = torch.autograd.grad(out, (q, k, v), given.grad[:1, :times].double())
    return [out.detach(), *grads]


def errors(results: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """Returns the relative error of each result against the expected part."""
    found: list[float] = []
    for got, want in zip(results, expected, strict=True):
        mine = got[:1, : want.shape[1]].double()
        found.append(float((mine - want).norm() / want.norm()))
    return found


# ------------------------------------------------------------------ times
def by_calls(runs: dict[str, Run]) -> dict[str, float]:
    """Returns median microseconds per call of each side, in turns."""
    measures = {name: by_events(run, CALLS, before=run) for name, run in runs.items()}
    found = take_turns(measures, rounds=ROUNDS)
    return {name: spread(seconds).scaled("us")[0] for name, seconds in found.items()}


def by_graphs(runs: dict[str, Run], calls: int) -> dict[str, float]:
    """Returns median microseconds per call of each side, of replayed graphs, in turns."""
    spreads = time_interleaved([Replay(run, [()] * calls) for run in runs.values()])
    return {name: s.scaled("us")[0] for name, s in zip(runs, spreads, strict=True)}


def ratio(us: dict[str, float]) -> float:
    """Returns torch's time divided by ours."""
    return round(us["torch"] / us["ours"], 3)


def measure(z: Shape, mode: str, direction: str, device: str, *, beside: bool) -> dict[str, Any]:
    """Returns the line of a cell."""
    given = draw(z, mode, device, beside=beside)
    row: dict[str, Any] = {
        "bench": "attention",
        "shape": list(z),
        "mode": mode,
        "direction": direction,
        "layout": "heads beside" if beside else "rows",
    }
    expected = expected_of(z, mode, given)
    added = [t for t in given[4:] if t is not None]
    runs: dict[str, Run]
    if direction == "forward":
        fd = define_forward(z, mode)
        read = [*given[:3], *added]
        runs = {"ours": lambda: fd.execute(read), "torch": lambda: sdpa(z, mode, given)}
        results = {"ours": fd.execute(read), "torch": [sdpa(z, mode, given)]}
        expected = expected[:1]
    else:
        kept = define_forward(z, mode, all_results=True).execute([*given[:3], *added])
        fd = define_backward(z, mode)
        read = [given.grad, *given[:3], *kept]
        leaves = [t.detach().requires_grad_() for t in given[:3]]
        with torch.enable_grad():
            out = sdpa(z, mode, given._replace(q=leaves[0], k=leaves[1], v=leaves[2]))

        def theirs() -> Sequence[Tensor]:
            return torch.autograd.grad(out, leaves, given.grad, retain_graph=True)

        runs = {"ours": lambda: fd.execute(read), "torch": theirs}
        results = {"ours": fd.execute(read), "torch": theirs()}
        expected = expected[1:]
    row["errors"] = {who: errors(found, expected) for who, found in results.items()}
    del results, expected
    if device == "cuda":
        torch.cuda.empty_cache()
        row["us_calls"] = by_calls(runs)
        row["ratio_calls"] = ratio(row["us_calls"])
        if direction == "forward":
            few = max(1, min(CALLS, int(4e3 / max(row["us_calls"]["torch"], 1.0))))
            row["us"] = by_graphs(runs, few)
            row["ratio"] = ratio(row["us"])
    least = LEAST_MASK if mode == "mask" and z.s >= MASK_KEYS else LEAST
    row["least"] = least
    row["fails"] = fails(row)
    return row


def fails(row: dict[str, Any]) -> list[str]:
    """Returns the criteria that a line does not meet: "time", "error"."""
    found: list[str] = []
    times = [row[key] for key in ("ratio", "ratio_calls") if key in row]
    if times and max(times) < row["least"]:
        found.append("time")
    pairs = zip(row["errors"]["ours"], row["errors"]["torch"], strict=True)
    if any(not ours <= MORE_ERROR * theirs + 1e-6 for ours, theirs in pairs):
        found.append("error")
    return found


def cells(shapes: Sequence[Shape]) -> Iterator[tuple[Shape, str, str]]:
    """Yields the cells of the given shapes: (shape, mode, direction)."""
    for z in shapes:
        for mode in MODES:
            if mode == "causal" and z.l != z.s:
                continue
            yield z, mode, "forward"
            if mode in ("full", "causal"):
                yield z, mode, "backward"


@torch.no_grad()
def bench_attention(
    emit: Callable[[dict[str, Any]], None], *, device: str, beside: bool = False
) -> int:
    """Emits the lines of all cells; returns how many fail."""
    count = 0
    machine = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    emit({"bench": "attention", "machine": machine, "torch": torch.__version__})
    for z, mode, direction in cells(SHAPES if device == "cuda" else SMALL):
        row = measure(z, mode, direction, device, beside=beside)
        emit(row)
        count += bool(row["fails"])
        if device == "cuda":
            torch.cuda.empty_cache()
    return count
