"""Times a transformer layer on one GPU: ours with the attention op, and torch.compile with SDPA.

    python benchmarks/transformer_layer.py [--rounds 15] [--json FILE] [--small]

The layer: four sequences of 2048 tokens, hidden 8192, 64 heads, MLP 32768, gelu, pre-norm, no
dropout, not causal, bfloat16. It runs without a mask, with an additive mask per batch and query [4,
1, 2048, 2048], and with one per key [4, 1, 1, 2048]. Both sides have the same weights and inputs:
one projection for queries, keys and values, and biases everywhere.

In each round each side in turn is called once, and then `--burst` times between two events. The
line has the medians, smallest and largest rounds in milliseconds, ours / torch.compile, and the
errors of both against torch in float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from turns import Lines, by_events, spread, take_turns

from fuser import DataType, FusionDefinition, TensorView

Tensor = torch.Tensor
EPSILON = 1e-5
# The largest allowed ratio of our time to torch.compile's.
LIMIT = 1.02


class Size(NamedTuple):
    """The sizes of the layer."""

    batch: int = 4
    tokens: int = 2048
    hidden: int = 8192
    heads: int = 64
    inner: int = 32768

    @property
    def head(self) -> int:
        """The number of elements per head."""
        return self.hidden // self.heads


# To try the script itself on a machine without a GPU.
SMALL = Size(2, 16, 32, 4, 64)
# The shape of the additive mask.
MASKS: dict[str, Callable[[Size], tuple[int, ...]] | None] = {
    "none": None,
    "queries": lambda z: (z.batch, 1, z.tokens, z.tokens),
    "keys": lambda z: (z.batch, 1, 1, z.tokens),
}


def shapes_of(z: Size) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the layer's parameters, in the order of the arguments."""
    norm = (z.hidden,)
    return {
        "scale_1": norm,
        "shift_1": norm,
        "w_qkv": (3 * z.hidden, z.hidden),
        "b_qkv": (3 * z.hidden,),
        "w_out": (z.hidden, z.hidden),
        "b_out": norm,
        "scale_2": norm,
        "shift_2": norm,
        "w_up": (z.inner, z.hidden),
        "b_up": (z.inner,),
        "w_down": (z.hidden, z.inner),
        "b_down": norm,
    }


# ------------------------------------------------------------------ ours
def define(z: Size, dtype: DataType, mask: tuple[int, ...] | None) -> FusionDefinition:
    """Defines the layer: x [batch, tokens, hidden], the mask if there is one, and parameters."""
    with FusionDefinition() as fd:
        ops = fd.ops

        def tensor(shape: Sequence[int]) -> TensorView:
            return fd.define_tensor(shape, contiguity=True, dtype=dtype)

        def row(x: TensorView) -> TensorView:
            return ops.broadcast(x, [True, True, False])

        def norm(x: TensorView, scale: TensorView, shift: TensorView) -> TensorView:
            wide = ops.cast(x, DataType.Float)
            var, mean = ops.var_mean(wide, [2], 0, True)
            normal = ops.mul(ops.sub(wide, mean), ops.rsqrt(ops.add(var, EPSILON)))
            return ops.cast(ops.add(ops.mul(normal, row(scale)), row(shift)), dtype)

        def heads(qkv: TensorView, which: int) -> TensorView:
            begins, ends = [0, 0, which, 0, 0], [z.batch, z.tokens, which + 1, z.heads, z.head]
            return ops.permute(ops.squeeze(ops.slice(qkv, begins, ends), [2]), [0, 2, 1, 3])

        def gelu(x: TensorView) -> TensorView:
            wide = ops.cast(x, DataType.Float)
            half = ops.add(ops.erf(ops.mul(wide, 0.5**0.5)), 1.0)
            return ops.cast(ops.mul(ops.mul(wide, 0.5), half), dtype)

        x = tensor((z.batch, z.tokens, z.hidden))
        added = None if mask is None else tensor(mask)
        p = {name: tensor(shape) for name, shape in shapes_of(z).items()}
        qkv = ops.linear(norm(x, p["scale_1"], p["shift_1"]), p["w_qkv"], p["b_qkv"])
        qkv = ops.reshape(qkv, [z.batch, z.tokens, 3, z.heads, z.head])
        out = ops.sdpfa_fwd(*(heads(qkv, i) for i in range(3)), bias=added)[0]
        merged = ops.reshape(ops.permute(out, [0, 2, 1, 3]), [z.batch, z.tokens, z.hidden])
        x = ops.cast(ops.add(x, ops.linear(merged, p["w_out"], p["b_out"])), dtype)
        inner = gelu(ops.linear(norm(x, p["scale_2"], p["shift_2"]), p["w_up"], p["b_up"]))
        fd.add_output(ops.cast(ops.add(x, ops.linear(inner, p["w_down"], p["b_down"])), dtype))
    return fd


# ------------------------------------------------------------------ torch
def layer(z: Size, x: Tensor, mask: Tensor | None, p: dict[str, Tensor]) -> Tensor:
    """Returns the result of the layer, as torch's users write it."""
    normal = F.layer_norm(x, (z.hidden,), p["scale_1"], p["shift_1"], EPSILON)
    qkv = F.linear(normal, p["w_qkv"], p["b_qkv"]).view(z.batch, z.tokens, 3, z.heads, z.head)
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    merged = out.transpose(1, 2).reshape(z.batch, z.tokens, z.hidden)
    x = x + F.linear(merged, p["w_out"], p["b_out"])
    normal = F.layer_norm(x, (z.hidden,), p["scale_2"], p["shift_2"], EPSILON)
    inner = F.gelu(F.linear(normal, p["w_up"], p["b_up"]))
    return x + F.linear(inner, p["w_down"], p["b_down"])


# ------------------------------------------------------------------ times
def error(got: Tensor, expected: Tensor) -> float:
    """Returns the relative error of a result."""
    return float((got.float() - expected).norm() / expected.norm())


@torch.no_grad()
def measure(name: str, z: Size, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the line of one mask."""
    device = "cpu" if args.small else "cuda"
    dtype = torch.bfloat16
    torch.manual_seed(0)

    def draw(shape: Sequence[int], scale: float) -> Tensor:
        return (torch.randn(shape, device=device) * scale).to(dtype)

    x = draw((z.batch, z.tokens, z.hidden), 1.0)
    make = MASKS[name]
    mask = None if make is None else draw(make(z), 1.0)
    p = {n: draw(s, 1.0 if "scale" in n else s[-1] ** -0.5) for n, s in shapes_of(z).items()}
    fd = define(z, DataType.BFloat16, None if mask is None else tuple(mask.shape))
    given = [x, *([] if mask is None else [mask]), *p.values()]
    compiled = torch.compile(layer, dynamic=False) if device == "cuda" else layer
    ours, theirs = fd.execute(given)[0], compiled(z, x, mask, p)
    wide = None if mask is None else mask.float()
    expected = layer(z, x.float(), wide, {n: t.float() for n, t in p.items()})
    row: dict[str, Any] = {
        "bench": "transformer_layer",
        "machine": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "size": z._asdict(),
        "mask": name,
        "errors": {"ours": error(ours, expected), "torch.compile": error(theirs, expected)},
        "counts": {k: fd.fec.statistics()[k] for k in ("kernels", "library_calls", "aliases")},
    }
    del ours, theirs, expected, wide
    if device == "cuda":
        torch.cuda.empty_cache()
        runs = {"ours": lambda: fd.execute(given), "torch.compile": lambda: compiled(z, x, mask, p)}
        measures = {who: by_events(run, args.burst, before=run) for who, run in runs.items()}
        found = take_turns(measures, rounds=args.rounds)
        times = {who: spread(seconds) for who, seconds in found.items()}
        row["ms"] = {
            who: dict(zip(("median", "min", "max"), found.scaled("ms", 4), strict=True))
            for who, found in times.items()
        }
        row["ratio"] = round(times["ours"].median / times["torch.compile"].median, 4)
        row["limit"] = LIMIT
        row["graphs"] = fd.cuda_graphs()
    return row


def main() -> None:
    """Prints the line of each mask of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--burst", type=int, default=5)
    parser.add_argument("--masks", default="none,queries,keys")
    parser.add_argument("--json", type=Path, help="append one line per mask")
    parser.add_argument("--small", action="store_true", help="a small layer on the CPU, no times")
    args = parser.parse_args()
    lines = Lines(args.json)
    for name in args.masks.split(","):
        lines.emit(measure(name, SMALL if args.small else Size(), args))


if __name__ == "__main__":
    main()
