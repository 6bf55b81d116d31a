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


class Norm(NamedTuple):
    """A layer norm, with the values that its gradient reads."""

    scale: Any
    normal: Any
    inverse: Any


class Block(NamedTuple):
    """A layer of a transformer, with the values that its gradient reads."""

    first: Norm
    into_heads: Any
    w_qkv: Any
    query: Any
    key: Any
    values: Any
    weights: Any
    mixed: Any
    w_out: Any
    second: Norm
    into_wide: Any
    w_up: Any
    wide: Any
    inner: Any
    active: Any
    w_down: Any


class Model(Builder):
    """Defines a transformer, forward and backward.

    Each layer has six annotated tensors: the weights and biases of the linears by columns, and the
    weights of the linears by rows. The mesh is [batch, features, batch].
    """

    def __init__(self, fd: Any, mesh: Any) -> None:
        super().__init__(fd, mesh)
        from fuser import ParallelType

        self.batch, self.outer_batch = ParallelType.mesh_x, ParallelType.mesh_z
        self.features = ParallelType.mesh_y

    def tensor(self, shape: Sequence[int], cuts: Sequence[tuple[int, Any]] = ()) -> Any:
        """Returns an input whose axes are cut by `cuts`; two cuts of one axis are nested."""
        tv = self.fd.define_tensor(list(shape), contiguity=True)
        if self.mesh is not None:
            from fuser import Replicate, Shard, shard

            axes = {str(ptype): axis for axis, ptype in cuts}
            types = (self.outer_batch, self.features, self.batch)
            placements = [Shard(axes[str(t)]) if str(t) in axes else Replicate() for t in types]
            shard(tv, self.mesh, placements)
        return tv

    def rows(self, x: Any, columns: int) -> Any:
        """Returns `x [batch, tokens, columns]` as `[batch * tokens, columns]`."""
        return self.ops.reshape(x, [self.ops.mul(x.size(0), x.size(1)), columns])

    def weight_gradient(self, gradient: Any, x: Any, out: int, inner: int) -> None:
        """Makes the gradient of the weight of a linear of `x` an output."""
        by_rows = self.ops.permute(self.rows(gradient, out), [1, 0])
        self.fd.add_output(self.ops.matmul(by_rows, self.rows(x, inner)))

    def sum_gradient(self, gradient: Any) -> None:
        """Makes the gradient of a bias, which is broadcast over batch and tokens, an output."""
        self.fd.add_output(self.ops.sum(gradient, dims=[0, 1]))

    def norm(self, value: Any) -> tuple[Any, Norm]:
        """Returns the layer norm of a value."""
        ops, scale = self.ops, self.tensor([HIDDEN])
        var, mean = ops.var_mean(value, dims=[2], correction=0, keepdim=True)
        inverse = ops.rsqrt(ops.add(var, 1e-5))
        normal = ops.mul(ops.sub(value, mean), inverse)
        result = ops.add(ops.mul(normal, scale), self.tensor([HIDDEN]))
        return result, Norm(scale, normal, inverse)

    def norm_gradient(self, gradient: Any, norm: Norm) -> Any:
        """Returns the gradient of the operand of a layer norm."""
        ops = self.ops
        self.sum_gradient(gradient)
        self.sum_gradient(ops.mul(gradient, norm.normal))
        scaled = ops.mul(gradient, norm.scale)
        mean = ops.mul(ops.sum(scaled, dims=[2], keepdim=True), 1 / HIDDEN)
        along = ops.sum(ops.mul(scaled, norm.normal), dims=[2], keepdim=True)
        rest = ops.add(mean, ops.mul(norm.normal, ops.mul(along, 1 / HIDDEN)))
        return ops.mul(norm.inverse, ops.sub(scaled, rest))

    def heads(self, value: Any, size: int) -> Any:
        """Returns `value [batch, tokens, heads * size]` as `[batch, heads, tokens, size]`."""
        shape = [value.size(0), value.size(1), HEADS, size]
        return self.ops.permute(self.ops.reshape(value, shape), [0, 2, 1, 3])

    def merged(self, value: Any, size: int) -> Any:
        """Returns `value [batch, heads, tokens, size]` as `[batch, tokens, heads * size]`."""
        shape = [value.size(0), value.size(2), HEADS * size]
        return self.ops.reshape(self.ops.permute(value, [0, 2, 1, 3]), shape)

    def transposed(self, value: Any) -> Any:
        """Returns a batch of matrices, transposed."""
        return self.ops.permute(value, [0, 1, 3, 2])

    def linear_by_columns(self, value: Any, rows: int) -> tuple[Any, Any]:
        """Returns a linear of [.., HIDDEN] and its weight; the devices of a group cut its result
        features.
        """
        weight = self.tensor([rows, HIDDEN], [(0, self.features)])
        bias = self.tensor([rows], [(0, self.features)])
        return self.ops.linear(value, weight, bias), weight

    def forward(self, value: Any) -> tuple[Any, Block]:
        """Returns the result of a pre-norm layer."""
        ops, size = self.ops, HIDDEN // HEADS
        into_heads, first = self.norm(value)
        packed, w_qkv = self.linear_by_columns(into_heads, 3 * HIDDEN)
        packed = self.heads(packed, 3 * size)
        begins = [[0, 0, 0, i * size] for i in range(3)]
        whole = [packed.size(i) for i in range(3)]
        query, key, values = (ops.slice(packed, b, [*whole, b[3] + size]) for b in begins)
        scores = ops.mul(ops.matmul(query, self.transposed(key)), size**-0.5)
        weights = self.softmax(scores)
        mixed = self.merged(ops.matmul(weights, values), size)
        w_out = self.tensor([HIDDEN, HIDDEN], [(1, self.features)])
        value = ops.add(value, ops.linear(mixed, w_out))
        into_wide, second = self.norm(value)
        wide, w_up = self.linear_by_columns(into_wide, WIDE)
        inner = ops.tanh(ops.mul(ops.add(wide, ops.mul(ops.mul(wide, wide), wide)), 0.79788456))
        active = ops.mul(ops.mul(wide, 0.5), ops.add(inner, 1.0))
        w_down = self.tensor([HIDDEN, WIDE], [(1, self.features)])
        value = ops.add(value, ops.linear(active, w_down))
        known = (query, key, values, weights, mixed, w_out)
        block = Block(
            first, into_heads, w_qkv, *known, second, into_wide, w_up, wide, inner, active, w_down
        )
        return value, block

    def gelu_gradient(self, gradient: Any, wide: Any, inner: Any) -> Any:
        """Returns the gradient of the operand of a GELU in its tanh form."""
        ops = self.ops
        slope = ops.mul(ops.add(ops.mul(ops.mul(wide, wide), 3.0), 1.0), 0.79788456)
        bent = ops.mul(ops.sub(1.0, ops.mul(inner, inner)), slope)
        total = ops.mul(ops.add(ops.add(inner, 1.0), ops.mul(wide, bent)), 0.5)
        return ops.mul(gradient, total)

    def attention_gradient(self, gradient: Any, block: Block) -> Any:
        """Returns the gradient of the packed queries, keys and values."""
        ops, size, weights = self.ops, HIDDEN // HEADS, block.weights
        of_mixed = self.heads(gradient, size)
        of_values = ops.matmul(self.transposed(weights), of_mixed)
        of_weights = ops.matmul(of_mixed, self.transposed(block.values))
        along = ops.sum(ops.mul(of_weights, weights), dims=[3], keepdim=True)
        of_scores = ops.mul(ops.mul(weights, ops.sub(of_weights, along)), size**-0.5)
        of_query = ops.matmul(of_scores, block.key)
        of_key = ops.matmul(self.transposed(of_scores), block.query)
        return self.merged(ops.cat([of_query, of_key, of_values], 3), 3 * size)

    def backward(self, gradient: Any, block: Block) -> Any:
        """Returns the gradient of the operand of a layer, and makes those of its parameters
        outputs.
        """
        ops = self.ops
        self.weight_gradient(gradient, block.active, HIDDEN, WIDE)
        of_active = ops.matmul(gradient, block.w_down)
        of_wide = self.gelu_gradient(of_active, block.wide, block.inner)
        self.weight_gradient(of_wide, block.into_wide, WIDE, HIDDEN)
        self.sum_gradient(of_wide)
        of_norm = self.norm_gradient(ops.matmul(of_wide, block.w_up), block.second)
        gradient = ops.add(gradient, of_norm)
        self.weight_gradient(gradient, block.mixed, HIDDEN, HIDDEN)
        packed = self.attention_gradient(ops.matmul(gradient, block.w_out), block)
        self.weight_gradient(packed, block.into_heads, 3 * HIDDEN, HIDDEN)
        self.sum_gradient(packed)
        of_norm = self.norm_gradient(ops.matmul(packed, block.w_qkv), block.first)
        return ops.add(gradient, of_norm)


def define_model(fd: Any, layers: int, mesh: Any) -> None:
    """Defines `layers` layers of a transformer forward, then the gradients of all parameters."""
    make = Model(fd, mesh)
    value = make.tensor([-1, -1, HIDDEN], [(0, make.outer_batch), (0, make.batch)])
    blocks: list[Block] = []
    for _ in range(layers):
        value, block = make.forward(value)
        blocks.append(block)
    for block in reversed(blocks):
        value = make.backward(value, block)
    fd.add_output(value)


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
    **{f"model {n}": Case(define_model, n, (8, 8, 64)) for n in (8, 16, 32, 128)},
    "model 64": Case(define_model, 64, (8, 8, 64), 20.0),
}
# Two cases, and the largest ratio of their times.
RATIOS = {
    ("transformer 64", "transformer 8"): 10.0,
    ("training 64", "training 8"): 10.0,
    ("one device 64", "one device 8"): 10.0,
    ("model 64", "model 8"): 10.0,
    ("devices 16384", "devices 64"): 1.2,
    ("transformer 2 of 16384", "transformer 2 of 64"): 1.2,
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
    from fuser.support.locks import uncollected
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
    with uncollected:  # as in a call
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


def propagate_case(case: Case, count: int) -> tuple[float, int]:
    """Returns the seconds in which annotations spread to all tensors, and the number of ops."""
    from fuser import FusionDefinition
    from fuser.passes.concretize import concretize
    from fuser.support.locks import uncollected
    from multidevice.sharding.propagation import propagate_shardings

    with FusionDefinition() as fd:
        case.define(fd, count, make_mesh(case.mesh))
    fusion, _ = concretize(fd.fusion, open_sizes(fd.fusion))
    with uncollected:
        began = thread_time()
        propagate_shardings(fusion)
        return thread_time() - began, len(fusion.exprs)


def measure(name: str) -> dict[str, Any]:
    """Returns the seconds of each phase in this process, after it has lowered a small program.

    `propagate_s`, which is also part of the phase `lower`, is measured alone.
    """
    case = CASES[name]
    lower_case(case, 1)
    seconds, text = lower_case(case, case.layers)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    facts: dict[str, Any] = {"characters": len(text), "digest": digest}
    if case.mesh:
        propagate_s, facts["ops"] = propagate_case(case, case.layers)
        facts["propagate_s"] = round(propagate_s, 3)
    return {"seconds": seconds, **facts}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
