"""Measures and predicts a timeline of a linear layer whose allgather runs in chunks.

mpirun -np 2 python examples/traced_linear.py                # on the GPUs, if there are
mpirun -np 2 python examples/traced_linear.py other.json --device cpu
Open the file, trace.json if not named, in ui.perfetto.dev.
"""

from __future__ import annotations

import argparse

import torch

from fuser import DataType, FusionDefinition, ParallelType, multidevice

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("path", nargs="?", default="trace.json", help="where to write the timeline")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
parser.add_argument("--chunks", type=int, default=4)
parser.add_argument("--source", default="auto", help="auto, cupti or events, on a GPU")
parser.add_argument("--peer-copies", action="store_true", help="instead of NCCL")
args = parser.parse_args()

comm = multidevice.Communicator.instance()
d = comm.size()
is_cuda = args.device == "cuda"
dtype = DataType.BFloat16 if is_cuda else DataType.Float
rows, k, n = (8192 // args.chunks // d, 8192, 8192) if is_cuda else (64 // args.chunks, 256, 256)

with FusionDefinition() as fd:
    x = fd.define_tensor([args.chunks, d, rows, k], contiguity=True, dtype=dtype)
    w = fd.define_tensor([n, k], contiguity=True, dtype=dtype)
    y = fd.ops.linear(x, w)
    fd.add_output(y)
    for tensor in (x, w, y):
        tensor.set_device_mesh(multidevice.DeviceMesh(range(d)))
    x.axis(1).parallelize(ParallelType.mesh_x)  # every rank holds a part of each chunk
    y.axis(0).parallelize(ParallelType.stream)  # the chunks are the steps of a loop over streams

like = {"device": args.device, "dtype": torch.bfloat16 if is_cuda else torch.float32}
inputs = [torch.randn(args.chunks, 1, rows, k, **like), torch.randn(n, k, **like)]
options = ["peer_copies"] if args.peer_copies else []
trace = fd.trace(inputs, args.path, source=args.source, predicted="h200", _enable_options=options)
if comm.rank() == 0:
    print(trace.summary())
