"""The reference of the sentence encoder: `transformers.BertModel`, in a separate process.

    python scripts/reference.py JOB.json OUT.pt

JOB.json: {"weights", "tokenizer", "texts", "batch", "dtype", "device"}. Writes the float32
embeddings of all texts, and the median milliseconds of one eager forward (with pooling) of the
first batch in the job's dtype: 2 warm-ups, then 7 runs, on 2 threads.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch
from minilm import load_weights, make_batches

WARM_UPS, RUNS, THREADS = 2, 7, 2


def embed(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns mean-pooled, L2-normalised embeddings [b, h] in float32."""
    hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    weight = mask[:, :, None].to(hidden.dtype)
    mean = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
    return torch.nn.functional.normalize(mean.float(), dim=1)


def main(job_file: str, out_file: str) -> None:
    """Runs a job and writes its results."""
    from transformers import BertConfig, BertModel  # pyright: ignore[reportMissingImports]

    job = json.loads(Path(job_file).read_text())
    torch.set_num_threads(THREADS)
    device = job["device"]
    if device.startswith("cuda"):
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
    weights = load_weights(Path(job["weights"]))
    config = BertConfig(
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        layer_norm_eps=1e-12,
        hidden_act="gelu",
        vocab_size=30522,
    )
    model = BertModel(config).eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    unknown = [k for k in unexpected if "position_ids" not in k]
    absent = [k for k in missing if "position_ids" not in k and "token_type_ids" not in k]
    if unknown or absent:
        raise SystemExit(f"the checkpoint does not fit BertModel: {unknown + absent}")
    model.to(device)
    batches = make_batches(Path(job["tokenizer"]), job["texts"], job["batch"])
    on_device = [(ids.to(device), mask.to(device)) for ids, mask in batches]
    with torch.no_grad():
        embeddings = torch.cat([embed(model, *b).cpu() for b in on_device])
        model.to(getattr(torch, job["dtype"]))
        times: list[float] = []
        for _ in range(WARM_UPS + RUNS):
            began = time.perf_counter()
            embed(model, *on_device[0])
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            times.append((time.perf_counter() - began) * 1e3)
    torch.save(
        {"embeddings": embeddings, "ms_per_batch": statistics.median(times[WARM_UPS:])}, out_file
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
