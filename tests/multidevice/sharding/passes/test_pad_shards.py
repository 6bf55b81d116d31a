"""Uneven shards: programs over axes that devices cannot divide equal torch on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch

from fuser import DataType, FusionDefinition, ParallelType, Replicate, Shard, multidevice, shard
from fuser.ir.fusion import TensorView
from fuser.support.errors import InputError, ShardingError

Placed = Sequence[Shard | Replicate]
WHOLE, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)
MESHES = {
    "2 x 2": torch.tensor([[0, 1], [2, 3]]),
    "4": torch.tensor([0, 1, 2, 3]),
    "3": torch.tensor([0, 1, 2]),
}


def chunk(whole: torch.Tensor, axis: int, parts: int, index: int) -> torch.Tensor:
    """Returns block `index` of `torch.chunk`; empty if torch returns fewer blocks."""
    blocks = whole.chunk(parts, axis)
    return blocks[index] if index < len(blocks) else whole.narrow(axis, 0, 0)


def part_of(whole: torch.Tensor, ranks: torch.Tensor, placed: Placed, rank: int) -> torch.Tensor:
    """Returns the shard of `rank`, cut by torch."""
    place = [int(n) for n in (ranks == rank).nonzero()[0]]
    for index, parts, one in zip(place, ranks.shape, placed, strict=True):
        if isinstance(one, Shard):
            whole = chunk(whole, one.dim, parts, index)
    return whole.contiguous()


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run_and_compare(
    define: Callable[[FusionDefinition, list[TensorView]], Sequence[TensorView]],
    inputs: Sequence[tuple[torch.Tensor, Placed]],
    expected: Sequence[tuple[torch.Tensor, Placed]],
    ranks: torch.Tensor,
) -> str:
    """Runs a definition on the shards of `inputs`; returns the program.

    Each output must be the shard of its expected whole tensor, dense, on every rank. An output is
    annotated with the placement that is expected.
    """

    def body() -> str:
        rank = multidevice.Communicator.instance().rank()
        mesh = multidevice.DeviceMesh(ranks)
        with FusionDefinition() as fd:
            given = [
                fd.define_tensor(
                    list(x.shape),
                    dtype=DataType.Double,
                    contiguity=True,
                    mesh=mesh,
                    placements=list(placed),
                )
                for x, placed in inputs
            ]
            for out, (_, placed) in zip(define(fd, given), expected, strict=True):
                fd.add_output(shard(out, mesh, list(placed)))
        outs = fd.execute([part_of(x, ranks, placed, rank) for x, placed in inputs])
        for out, (want, placed) in zip(outs, expected, strict=True):
            torch.testing.assert_close(out, part_of(want, ranks, placed, rank))
            assert out.is_contiguous()
        return fd.fec.host_program().names_text()

    with multidevice.simulate(ranks.numel()) as world:
        return world.run(body)[0]


def collectives(program: str) -> list[str]:
    """Returns the types of the communications of a program, in order."""
    return [
        line.split("(type=")[1].split(",")[0] for line in program.splitlines() if "(type=" in line
    ]


# ------------------------------------------------------------------ changes of placement
def _pairs() -> list[tuple[str, tuple[int, int], Placed, Placed]]:
    shapes = {"2 x 2": [(7, 3)], "4": [(7, 10), (3, 5)], "3": [(7, 10), (5, 2)]}
    return [
        (name, shape, before, after)
        for name, ranks in MESHES.items()
        for shape in shapes[name]
        for before in product((WHOLE, ROWS, COLUMNS), repeat=ranks.dim())
        for after in product((WHOLE, ROWS, COLUMNS), repeat=ranks.dim())
        if not any(len(p) == 2 and p[0] == p[1] != WHOLE for p in (before, after))
    ]


@pytest.mark.parametrize(("name", "shape", "before", "after"), _pairs())
def test_every_change_of_placement_keeps_the_values(
    name: str, shape: tuple[int, int], before: Placed, after: Placed
) -> None:
    x = randn(*shape)
    run_and_compare(
        lambda fd, given: [fd.ops.add(given[0], 1.0)],
        [(x, before)],
        [(x + 1, after)],
        MESHES[name],
    )


def test_a_moved_cut_is_one_all_to_all() -> None:
    x = randn(7, 10)
    program = run_and_compare(
        lambda fd, given: [fd.ops.exp(given[0])], [(x, [ROWS])], [(x.exp(), [COLUMNS])], MESHES["4"]
    )
    assert collectives(program) == ["AllToAll"]


# ------------------------------------------------------------------ reductions
@pytest.mark.parametrize("rows", [2, 3, 5, 6, 7, 9])
@pytest.mark.parametrize("axes", [[0], [1], [0, 1]])
def test_reductions_ignore_the_padding(rows: int, axes: list[int]) -> None:
    # 1 / 0 and 0 / 0 in the padding: infinity and NaN
    x = randn(rows, 5).abs() + 1
    y = 1 / x

    def define(fd: FusionDefinition, given: list[TensorView]) -> list[TensorView]:
        y = fd.ops.reciprocal(given[0])
        mean, var = fd.ops.var_mean(y, axes, 0)[::-1]
        return [
            fd.ops.sum(y, axes),
            fd.ops.max(y, axes),
            fd.ops.min(fd.ops.neg(y), axes),
            fd.ops.prod(y, axes),
            mean,
            var,
        ]

    product = y.prod(axes[0]) if len(axes) == 1 else y.prod()
    results = [y.sum(axes), y.amax(axes), (-y).amin(axes), product]
    results += [y.mean(axes), y.var(axes, correction=0)]
    placed = [ROWS] if axes == [1] else [WHOLE]
    run_and_compare(define, [(x, [ROWS])], [(r, placed) for r in results], MESHES["4"])


def test_a_sum_over_uneven_rows_can_be_scattered_over_uneven_columns() -> None:
    x = randn(7, 5)
    program = run_and_compare(
        lambda fd, given: [fd.ops.sum(given[0], [0])],
        [(x, [ROWS])],
        [(x.sum(0), [ROWS])],
        MESHES["3"],
    )
    assert collectives(program) == ["ReduceScatter"]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.int32])
def test_the_largest_value_of_other_dtypes(dtype: torch.dtype) -> None:
    x = (randn(7, 3) * 100 - 500).to(dtype)
    mesh = [0, 1, 2, 3]

    def body() -> None:
        with FusionDefinition() as fd:
            a = fd.define_tensor([7, 3], dtype=dtype, mesh=mesh, placements=[ROWS])
            fd.add_output(fd.ops.max(fd.ops.neg(fd.ops.neg(a)), [0]))
        (out,) = fd.execute([multidevice.shard_tensor(x, a)])
        assert torch.equal(out, x.amax(0))

    with multidevice.simulate(4) as world:
        world.run(body)


# ------------------------------------------------------------------ matrix products
@pytest.mark.parametrize(
    ("x_placed", "w_placed", "y_placed", "kinds"),
    [
        (ROWS, WHOLE, ROWS, []),
        (WHOLE, ROWS, COLUMNS, []),
        (COLUMNS, COLUMNS, WHOLE, ["Allreduce"]),
        (COLUMNS, COLUMNS, ROWS, ["ReduceScatter"]),
        (ROWS, ROWS, COLUMNS, ["Allgather"]),
    ],
)
@pytest.mark.parametrize("inner", [2, 5, 7])
def test_linear_layers(
    x_placed: Shard, w_placed: Shard, y_placed: Shard, kinds: list[str], inner: int
) -> None:
    x, w = randn(9, inner), randn(5, inner, seed=1)
    program = run_and_compare(
        lambda fd, given: [fd.ops.linear(*given)],
        [(x, [x_placed]), (w, [w_placed])],
        [(x @ w.T, [y_placed])],
        MESHES["4"],
    )
    assert collectives(program) == kinds


def test_a_product_over_infinite_padding_is_finite() -> None:
    x, w = randn(4, 7).abs() + 1, randn(3, 7, seed=1).abs() + 1
    run_and_compare(
        lambda fd, given: [fd.ops.linear(*map(fd.ops.reciprocal, given))],
        [(x, [COLUMNS]), (w, [COLUMNS])],
        [((1 / x) @ (1 / w).T, [WHOLE])],
        MESHES["3"],
    )


# ------------------------------------------------------------------ other ops
def _norm(fd: FusionDefinition, x: TensorView) -> TensorView:
    var, mean = fd.ops.var_mean(x, [1], 0, True)
    return fd.ops.mul(fd.ops.sub(x, mean), fd.ops.rsqrt(fd.ops.add(var, 1e-5)))


OPS: dict[
    str,
    tuple[
        Callable[[FusionDefinition, TensorView], TensorView],
        Callable[[torch.Tensor], torch.Tensor],
        list[str],
    ],
] = {
    "norm": (
        _norm,
        lambda x: torch.nn.functional.layer_norm(x, x.shape[1:]),
        [],
    ),
    "slice of columns": (lambda fd, x: fd.ops.slice(x, [0, 1], [7, 4]), lambda x: x[:, 1:4], []),
    "pad of columns": (
        lambda fd, x: fd.ops.pad(x, [1, 2]),
        lambda x: torch.nn.functional.pad(x, [1, 2]),
        [],
    ),
    "cat of columns": (
        lambda fd, x: fd.ops.cat([x, fd.ops.neg(x)], 1),
        lambda x: torch.cat([x, -x], 1),
        [],
    ),
    "split columns": (
        lambda fd, x: fd.ops.reshape(x, [7, 2, 3]),
        lambda x: x.reshape(7, 2, 3),
        [],
    ),
    "broadcast": (
        lambda fd, x: fd.ops.add(x, fd.ops.broadcast(fd.ops.sum(x, [1]), [False, True])),
        lambda x: x + x.sum(1, keepdim=True),
        [],
    ),
    "full": (
        lambda fd, x: fd.ops.mul(x, fd.ops.full([7, 6], 2.0, DataType.Double)),
        lambda x: 2 * x,
        [],
    ),
    "expand": (
        lambda fd, x: fd.ops.mul(fd.ops.expand(fd.ops.sum(x, [0], True), [7, 6]), x),
        lambda x: x.sum(0, keepdim=True) * x,
        ["Allreduce"],
    ),
    "cumsum of rows": (lambda fd, x: fd.ops.cumsum(x, 1), lambda x: x.cumsum(1), []),
    "cumsum of columns": (lambda fd, x: fd.ops.cumsum(x, 0), lambda x: x.cumsum(0), ["Allgather"]),
    "slice of rows": (
        lambda fd, x: fd.ops.slice(x, [1, 0], [6, 6]),
        lambda x: x[1:6],
        ["Allgather"],
    ),
    "merge": (lambda fd, x: fd.ops.reshape(x, [42]), lambda x: x.reshape(42), ["Allgather"]),
    "permute": (lambda fd, x: fd.ops.permute(x, [1, 0]), lambda x: x.T, []),
}


@pytest.mark.parametrize("name", OPS)
def test_ops_along_and_across_uneven_rows(name: str) -> None:
    define, reference, kinds = OPS[name]
    x = randn(7, 6)

    def body() -> str:
        rank = multidevice.Communicator.instance().rank()
        with FusionDefinition() as fd:
            a = fd.define_tensor([7, 6], dtype=DataType.Double, mesh=[0, 1, 2], placements=[ROWS])
            fd.add_output(define(fd, a))
        (out,) = fd.execute([multidevice.shard_tensor(x, a)])
        (found,) = fd.fec.get_output_shardings()
        want, cut = reference(x), [*found.axes.values()]
        for axis in cut:
            want = chunk(want, axis, 3, rank)
        torch.testing.assert_close(out, want)
        return fd.fec.host_program().names_text()

    with multidevice.simulate(3) as world:
        assert collectives(world.run(body)[0]) == kinds


def test_lookups_with_uneven_indices_are_computed_whole() -> None:
    """An index in the padding could be outside of the table."""
    table, index = randn(4, 3), torch.tensor([3, 0, 2, 1, 3, 3, 0])

    def body() -> None:
        rank = multidevice.Communicator.instance().rank()
        with FusionDefinition() as fd:
            i = fd.define_tensor([7], dtype=DataType.Int, mesh=[0, 1], placements=[ROWS])
            t = fd.define_tensor([4, 3], dtype=DataType.Double)
            out = fd.ops.embedding_fwd(fd.ops.sub(fd.ops.add(i, 9), 9), t)
            fd.add_output(shard(out, [0, 1], [ROWS]))
        (out,) = fd.execute([multidevice.shard_tensor(index, i), table])
        torch.testing.assert_close(out, chunk(table[index], 0, 2, rank))

    with multidevice.simulate(2) as world:
        world.run(body)


# ------------------------------------------------------------------ shards in and out
def test_shard_tensor_cuts_as_torch_chunk() -> None:
    def body() -> None:
        rank = multidevice.Communicator.instance().rank()
        for rows in (2, 3, 5, 7, 9):
            x = randn(rows, 3)
            with FusionDefinition() as fd:
                a = fd.define_tensor([rows, 3], mesh=[0, 1, 2, 3], placements=[ROWS])
                fd.add_output(fd.ops.neg(a))
            assert torch.equal(multidevice.shard_tensor(x, a), chunk(x, 0, 4, rank))

    with multidevice.simulate(4) as world:
        world.run(body)


def test_a_profile_and_a_trace_return_shards_without_padding() -> None:
    x = randn(7, 3)

    def body() -> None:
        rank = multidevice.Communicator.instance().rank()
        with FusionDefinition() as fd:
            a = fd.define_tensor([7, 3], dtype=DataType.Double, mesh=[0, 1], placements=[ROWS])
            fd.add_output(fd.ops.neg(a))
        trace = fd.trace([multidevice.shard_tensor(x, a)])
        assert torch.equal(trace.outputs[0], chunk(-x, 0, 2, rank))

    with multidevice.simulate(2) as world:
        world.run(body)


def _update(fd: FusionDefinition, mesh: multidevice.DeviceMesh) -> None:
    x = fd.define_tensor([7, 4], mesh=mesh, placements=[ROWS])
    fd.add_output(fd.ops.neg(x), x)


def _one_element(fd: FusionDefinition, mesh: multidevice.DeviceMesh) -> None:
    fd.add_output(fd.ops.neg(fd.define_tensor([1, 4], mesh=mesh, placements=[ROWS])))


def _two_dimensions(fd: FusionDefinition, mesh: multidevice.DeviceMesh) -> None:
    del mesh
    shard(fd.define_tensor([7, 4]), [[0, 1], [2, 3]], [ROWS, ROWS])


def _blocks_of_blocks(fd: FusionDefinition, mesh: multidevice.DeviceMesh) -> None:
    """The same in nvFuser's spelling, which is checked later."""
    del mesh
    x = fd.define_tensor([7, 4])
    x.set_device_mesh(multidevice.DeviceMesh([[0, 1], [2, 3]]))
    for axis, ptype in enumerate((ParallelType.mesh_y, ParallelType.mesh_x)):
        x.outer_split(axis, 2)
        x.axis(axis).parallelize(ptype)
    fd.add_output(fd.ops.neg(x))


def _steps(fd: FusionDefinition, mesh: multidevice.DeviceMesh) -> None:
    fd.add_output(fd.ops.neg(fd.define_tensor([7, 4], mesh=mesh, placements=[ROWS])))
    x = fd.define_tensor([-1, 4], mesh=mesh, placements=[WHOLE])
    y = fd.ops.neg(x)
    y.outer_split(1, 2)
    y.axis(1).parallelize(ParallelType.stream)
    fd.add_output(y)


def _nine_rows(fd: FusionDefinition, mesh: multidevice.DeviceMesh) -> None:
    fd.add_output(fd.ops.neg(fd.define_tensor([9, 4], mesh=mesh, placements=[ROWS])))


@pytest.mark.parametrize(
    ("define", "kind", "words"),
    [
        (_update, ShardingError, "has 7 elements, .* cannot be updated in place: pad it to 8"),
        (_one_element, ShardingError, "has one element, .* use Replicate"),
        (_two_dimensions, ShardingError, "has 7 elements, which 4 devices along 2 dimensions"),
        (_blocks_of_blocks, ShardingError, "has 7 elements, which 4 devices along 2 dimensions"),
        (_steps, ShardingError, "7 elements, .* not supported in a program with stream axes"),
        (_nine_rows, InputError, r"size [45] at axis 0 on this rank \(9 over 2 ranks: blocks of 5"),
    ],
)
def test_what_is_not_supported_is_refused(
    define: Callable[[FusionDefinition, multidevice.DeviceMesh], None], kind: type, words: str
) -> None:
    def body() -> None:
        rank = multidevice.Communicator.instance().rank()
        part = chunk(torch.ones(7, 4), 0, 2, rank if rank < 2 else 0)
        with pytest.raises(kind, match=words):
            with FusionDefinition() as fd:
                define(fd, multidevice.DeviceMesh([0, 1]))
            fd.execute([part] * len(fd.fusion.inputs))

    with multidevice.simulate(4) as world:
        world.run(body)


# ------------------------------------------------------------------ on real ranks
@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("enabled", [(), ("peer_copies",)])
@pytest.mark.parametrize("rows", [3, 5, 7])
def test_uneven_shards_of_real_ranks(comm: object, enabled: tuple[str, ...], rows: int) -> None:
    """Some ranks have fewer rows or none, and take part in every communication."""
    rank = multidevice.Communicator.instance().rank()
    x, w = randn(rows, 5), randn(6, 5, seed=1)
    mesh = multidevice.DeviceMesh([0, 1, 2, 3])
    with FusionDefinition() as fd:
        a, b = (
            fd.define_tensor(list(t.shape), dtype=DataType.Double, mesh=mesh, placements=[ROWS])
            for t in (x, w)
        )
        y = fd.ops.linear(a, b)
        columns = fd.ops.neg(y)
        fd.add_output(shard(y, mesh, [COLUMNS]))
        fd.add_output(shard(columns, mesh, [ROWS]))
        fd.add_output(shard(fd.ops.sum(columns, [0]), mesh, [ROWS]))
    shards = [multidevice.shard_tensor(t, v) for t, v in ((x, a), (w, b))]
    want = x @ w.T
    for _ in range(3):
        outs = fd.execute(shards, _enable_options=enabled)
        for out, part in zip(
            outs,
            (chunk(want, 1, 4, rank), chunk(-want, 0, 4, rank), chunk(-want.sum(0), 0, 4, rank)),
            strict=True,
        ):
            torch.testing.assert_close(out, part)
