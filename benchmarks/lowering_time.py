"""Times definition to host program of deep transformers and large meshes, for `bench_lowering.py`.

python benchmarks/lowering_time.py CASE    measures one case in this process, prints one JSON object

No rank runs anything: one process lowers the program of a mesh of any size. Times are CPU seconds
of the process, which other processes lengthen less than wall time.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from time import thread_time
from typing import Any, NamedTuple

HIDDEN, HEADS, WIDE = 256, 16, 1024
# The value of symbolic extents; no tensor of this size is allocated.
SIZE = 1 << 14


# ------------------------------------------------------------------ programs
class Builder:
    """Defines tensors on a mesh of [batch, features] devices; the mesh may be None."""

    def __init__(self, fd: Any, mesh: Any) -> None:
        from fuser import ParallelType

        self.fd, self.ops, self.mesh = fd, fd.ops, mesh
        self.batch, self.features = ParallelType.mesh_y, ParallelType.mesh_x

    def tensor(self, shape: Sequence[int], cuts: Sequence[tuple[int, Any]] = ()) -> Any:
        """Returns an input whose axes are cut by `cuts`: (axis, parallel type)."""
        tv = self.fd.define_tensor(list(shape), contiguity=True)
        if self.mesh is not None:
            tv.set_device_mesh(self.mesh)
            for axis, ptype in cuts:
                tv.outer_split(axis, self.mesh.size_of(ptype))
                tv.axis(axis).parallelize(ptype)
        return tv

    def by_columns(self, value: Any, rows: int, columns: int) -> Any:
        """Returns a linear whose weight's rows (result features) are cut over the devices of a
        group.
        """
        weight = self.tensor([rows, columns], [(0, self.features)])
        return self.ops.linear(value, weight, self.tensor([rows], [(0, self.features)]))

    def by_rows(self, value: Any, rows: int, columns: int) -> Any:
        """Returns a linear whose summed features are cut over the devices of a group."""
        return self.ops.linear(value, self.tensor([rows, columns], [(1, self.features)]))

    def layer_norm(self, value: Any) -> Any:
        """Returns the layer norm of a value."""
        ops = self.ops
        var, mean = ops.var_mean(value, dims=[2], correction=0, keepdim=True)
        normal = ops.mul(ops.sub(value, mean), ops.rsqrt(ops.add(var, 1e-5)))
        return ops.add(ops.mul(normal, self.tensor([HIDDEN])), self.tensor([HIDDEN]))

    def softmax(self, scores: Any) -> Any:
        """Returns the softmax of attention scores."""
        ops = self.ops
        shifted = ops.exp(ops.sub(scores, ops.max(scores, dims=[3], keepdim=True)))
        return ops.div(shifted, ops.sum(shifted, dims=[3], keepdim=True))

    def attention(self, value: Any) -> Any:
        """Returns the attention of a layer, with its projections."""
        ops, size = self.ops, HIDDEN // HEADS

        def heads() -> Any:
            made = self.by_columns(value, HIDDEN, HIDDEN)
            made = ops.reshape(made, [value.size(0), value.size(1), HEADS, size])
            return ops.permute(made, [0, 2, 1, 3])

        query, key, values = heads(), heads(), heads()
        scores = ops.matmul(query, ops.permute(key, [0, 1, 3, 2]))
        weights = self.softmax(ops.mul(scores, size**-0.5))
        mixed = ops.permute(ops.matmul(weights, values), [0, 2, 1, 3])
        mixed = ops.reshape(mixed, [value.size(0), value.size(1), HIDDEN])
        return self.by_rows(mixed, HIDDEN, HIDDEN)

    def gelu(self, value: Any) -> Any:
        """Returns the GELU of a value, in its tanh form."""
        ops = self.ops
        cube = ops.mul(ops.mul(value, value), value)
        inner = ops.mul(ops.add(value, ops.mul(cube, 0.044715)), 0.7978845608)
        return ops.mul(ops.mul(value, 0.5), ops.add(ops.tanh(inner), 1.0))

    def layer(self, value: Any) -> Any:
        """Returns the result of a pre-norm layer: attention, then two linears."""
        value = self.ops.add(value, self.attention(self.layer_norm(value)))
        wide = self.gelu(self.by_columns(self.layer_norm(value), WIDE, HIDDEN))
        return self.ops.add(value, self.by_rows(wide, HIDDEN, WIDE))


def define_transformer(fd: Any, layers: int, mesh: Any) -> None:
    """Defines `layers` layers forward.

    One mesh dimension cuts the batch, the other cuts heads and features.
    """
    make = Builder(fd, mesh)
    value = make.tensor([-1, -1, HIDDEN], [(0, make.batch)])
    for _ in range(layers):
        value = make.layer(value)
    fd.add_output(value)


def define_training(fd: Any, layers: int, mesh: Any) -> None:
    """Defines blocks of a norm and two linears forward, and the gradients of all weights."""
    make, ops = Builder(fd, mesh), fd.ops
    value = make.tensor([-1, -1, HIDDEN], [(0, make.batch)])

    def mean(x: Any) -> Any:
        return ops.mul(ops.sum(x, dims=[2], keepdim=True), 1 / HIDDEN)

    def rows(x: Any, columns: int) -> Any:
        return ops.reshape(x, [ops.mul(value.size(0), value.size(1)), columns])

    def weight_gradient(g: Any, x: Any, out: int, inner: int) -> Any:
        return ops.matmul(ops.permute(rows(g, out), [1, 0]), rows(x, inner))

    known: list[tuple[Any, ...]] = []
    for _ in range(layers):
        up = make.tensor([WIDE, HIDDEN], [(0, make.features)])
        down = make.tensor([HIDDEN, WIDE], [(1, make.features)])
        scale = ops.rsqrt(ops.add(mean(ops.mul(value, value)), 1e-5))
        normal = ops.mul(value, scale)
        wide = ops.linear(normal, up)
        active = ops.relu(wide)
        known.append((up, down, scale, normal, wide, active))
        value = ops.add(value, ops.linear(active, down))
    gradient = value
    for up, down, scale, normal, wide, active in reversed(known):
        fd.add_output(weight_gradient(gradient, active, HIDDEN, WIDE))
        of_wide = ops.where(ops.gt(wide, 0.0), ops.matmul(gradient, down), 0.0)
        fd.add_output(weight_gradient(of_wide, normal, WIDE, HIDDEN))
        of_normal = ops.matmul(of_wide, up)
        along = ops.mul(normal, mean(ops.mul(of_normal, normal)))
        gradient = ops.add(gradient, ops.mul(scale, ops.sub(of_normal, along)))
    fd.add_output(gradient)


def define_reshardings(fd: Any, count: int, mesh: Any) -> None:
    """Defines a tensor whose cut moves from one axis to the other, `count` times."""
    from fuser import ParallelType

    value = fd.define_tensor([-1, -1], contiguity=True)
    for i in range(count + 1):
        if i:
            value = fd.ops.set(fd.ops.mul(value, 2.0))
        value.set_device_mesh(mesh)
        value.outer_split(i % 2, mesh.size)
        value.axis(i % 2).parallelize(ParallelType.mesh_x)
    fd.add_output(value)


class Case(NamedTuple):
    """A program with this number of layers (or reshardings) on a mesh, and its time limit in
    seconds.
    """

    define: Callable[[Any, int, Any], None]
    layers: int
    mesh: tuple[int, ...]
    bar_s: float | None = None


CASES = {
    **{f"transformer {n}": Case(define_transformer, n, (8, 8)) for n in (8, 16, 32)},
    "transformer 64": Case(define_transformer, 64, (8, 8), 12.0),
    **{f"training {n}": Case(define_training, n, (8, 8)) for n in (8, 64)},
    **{f"one device {n}": Case(define_transformer, n, ()) for n in (8, 64)},
    **{f"devices {n}": Case(define_reshardings, 12, (n,)) for n in (64, 8192, 16384)},
    "transformer 2 of 16384": Case(define_transformer, 2, (2048, 8)),
    "transformer 2 of 64": Case(define_transformer, 2, (8, 8)),
}
# Two cases, and the largest ratio of their times.
RATIOS = {
    ("transformer 64", "transformer 8"): 10.0,
    ("training 64", "training 8"): 10.0,
    ("one device 64", "one device 8"): 10.0,
    ("devices 16384", "devices 64"): 1.5,
    ("transformer 2 of 16384", "transformer 2 of 64"): 1.5,
}


def make_mesh(shape: Sequence[int]) -> Any:
    """Returns the mesh of this shape of ranks from 0 on, None for ()."""
    import torch

    from fuser.multidevice import DeviceMesh

    if not shape:
        return None
    if len(shape) == 1:
        return DeviceMesh(range(shape[0]))
    count = int(torch.Size(shape).numel())
    return DeviceMesh(torch.arange(count).reshape(list(shape)))


def open_sizes(program: Any) -> dict[Any, int]:
    """Returns a size for each symbolic extent of a program's inputs."""
    from fuser.ir.scalar.constructors import Symbol

    return {x: SIZE for tv in program.inputs for x in tv.shape() if isinstance(x, Symbol)}


def make_inputs(fd: Any) -> tuple[list[Any], dict[Any, int]]:
    """Returns one rank's inputs, without memory, and the sizes of symbolic extents."""
    import torch

    from multidevice.sharding.queries import local_sizes

    inputs: list[Any] = []
    sizes = open_sizes(fd.fusion)
    for tv in fd.fusion.inputs:
        shape = [sizes.get(s) or int(str(s)) for s in tv.shape()]
        inputs.append(torch.empty(local_sizes(tv, shape), device="meta"))
    return inputs, sizes


def lower_case(case: Case, count: int) -> tuple[dict[str, float], str]:
    """Returns the seconds of each phase of a program with `count` layers, and the program's
    text.
    """
    import torch

    from fuser import FusionDefinition
    from hostir.analysis.preflight import check_before_run
    from hostir.ir.ops import NUMBER_OF_STREAMS, RANK
    from hostir.lowering.input_class import Classifier
    from hostir.lowering.pipeline import build_program

    seconds, began = dict[str, float](), thread_time()

    def end(phase: str) -> None:
        nonlocal began
        now = thread_time()
        seconds[phase], began = now - began, now

    mesh = make_mesh(case.mesh)
    end("mesh")
    with FusionDefinition() as fd:
        case.define(fd, count, mesh)
    end("define")
    inputs, sizes = make_inputs(fd)
    found = Classifier(fd.fusion).classify(inputs, sizes, torch.device("cpu"))
    end("classify")
    program = build_program(fd.fusion, found, backend_name="NCCL").program
    end("lower")
    text = program.full_text()
    end("text")
    check_before_run(program, {**open_sizes(program), NUMBER_OF_STREAMS: 1, RANK: 0}, rank=0)
    end("check")
    return seconds, text


def measure(name: str) -> dict[str, Any]:
    """Returns the seconds of each phase in this process, after it has lowered a small
    program.
    """
    case = CASES[name]
    lower_case(case, 1)
    seconds, text = lower_case(case, case.layers)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return {"seconds": seconds, "characters": len(text), "digest": digest}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
