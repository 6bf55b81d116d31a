"""Programs called with torch's DTensors on 2 or 4 ranks; the same checks under mpirun and torchrun.

torchrun --standalone --nproc-per-node 4 tests/support/rank_programs/dtensors.py [--device cuda]

The default process group of torch.distributed belongs to the user; here it is set up with a file.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as distribute

import fuser
from fuser import DataType, FusionDefinition, ParallelType
from fuser.multidevice import Communicator, DeviceMesh
from fuser.support.errors import (
    DTensorError,
    FuserError,
    InputError,
    NotCompiledError,
    PeerError,
    UnsupportedError,
)
from hostir.runtime.evaluator import ProgramEvaluator

X, Y, Z = ParallelType.mesh_x, ParallelType.mesh_y, ParallelType.mesh_z
WHOLE = Replicate()
# Meshes for a number of ranks.
SHAPES: dict[str, Callable[[int], tuple[int, ...]]] = {
    "d": lambda d: (d,),
    "d/2 x 2": lambda d: (d // 2, 2),
    "1 x 2 x d/2": lambda d: (1, 2, d // 2),
}


@contextmanager
def default_group(device: str = "cpu") -> Iterator[None]:
    """Opens torch's default process group over the ranks of the Communicator, as a user
    would.
    """
    here = Communicator.instance()
    with tempfile.TemporaryDirectory() as folder:
        mine = str(Path(folder) / "store").encode()
        name = here.exchange(mine)[0].decode()
        store: Any = import_module("torch.distributed").FileStore(name, here.size())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.init_process_group(
                "nccl" if device == "cuda" else "gloo",
                store=store,
                rank=here.rank(),
                world_size=here.size(),
            )
        try:
            yield
            here.barrier()
        finally:
            dist.destroy_process_group()


def torch_mesh(shape: Sequence[int], device: str, names: Sequence[str] = ()) -> TorchMesh:
    ranks = torch.arange(Communicator.instance().size()).reshape(*shape)
    return TorchMesh(device, ranks, mesh_dim_names=tuple(names or "abc"[: len(shape)]))


def cut(tv: Any, mesh: TorchMesh, placed: Sequence[Placement]) -> None:
    """Annotates a tensor as users of nvFuser do, from a torch mesh and placements."""
    mine = DeviceMesh(mesh.mesh)
    tv.set_device_mesh(mine)
    outer: dict[int, int] = {}
    for ptype, one in zip((Z, Y, X)[-len(placed) :], placed, strict=True):
        if isinstance(one, Shard):
            # The splits of smaller axes, and those of this one, stand before.
            at = one.dim + sum(n for axis, n in outer.items() if axis <= one.dim)
            tv.outer_split(at, mine.size_of(ptype))
            tv.axis(at).parallelize(ptype)
            outer[one.dim] = outer.get(one.dim, 0) + 1


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check_result(got: DTensor, want: torch.Tensor, mesh: TorchMesh, placed: Sequence[Any]) -> None:
    """Checks that a DTensor has this mesh, these placements, and the shards of `want`."""
    assert type(got) is DTensor and not got.requires_grad
    # A dimension of one device cuts nothing, whatever it is called.
    pairs = zip(got.placements, placed, mesh.mesh.shape, strict=True)
    assert got.device_mesh == mesh and all(a == b for a, b, n in pairs if n > 1)
    assert got.shape == want.shape and got.device.type == mesh.device_type
    # The whole tensor, assembled by torch, and this rank's shard.
    torch.testing.assert_close(got.full_tensor().cpu(), want, rtol=1e-10, atol=1e-10)
    mine = distribute(want.to(mesh.device_type), mesh, placed).to_local()
    torch.testing.assert_close(got.to_local(), mine, rtol=1e-10, atol=1e-10)


# ------------------------------------------------------------------ what runs
def check_two_linears(name: str, device: str) -> None:
    """Checks a column-parallel linear of x [b, t, k], followed by a row-parallel one.

    The result is replicated over the last mesh dimension; with two dimensions, the first cuts the
    batch.
    """
    shape = SHAPES[name](Communicator.instance().size())
    mesh = torch_mesh(shape, device)
    batch: list[Any] = [Shard(0), *[WHOLE] * (len(shape) - 2)][: len(shape) - 1]
    none = [WHOLE] * (len(shape) - 1)
    placed = [[*batch, WHOLE], [*none, Shard(0)], [*none, Shard(0)], [*none, Shard(1)]]
    full = [randn(4, 3, 8), randn(16, 8, seed=1), randn(16, seed=2), randn(5, 16, seed=3)]
    ways: tuple[Callable[[Any, Any, Any], object], ...] = (cut, fuser.shard)
    for place in ways:
        with FusionDefinition() as fd:
            x, v, b, w = (
                fd.define_tensor(list(t.shape), contiguity=True, dtype=DataType.Double)
                for t in full
            )
            fd.add_output(fd.ops.linear(fd.ops.relu(fd.ops.linear(x, v, b)), w))
            for tv, one in zip((x, v, b, w), placed, strict=True):
                place(tv, mesh, one)
        _check_two_linears(fd, mesh, placed, full, device)


def _check_two_linears(
    fd: FusionDefinition,
    mesh: TorchMesh,
    placed: Sequence[Sequence[Any]],
    full: Sequence[torch.Tensor],
    device: str,
) -> None:
    given = [distribute(t.to(device), mesh, p) for t, p in zip(full, placed, strict=True)]
    linear = torch.nn.functional.linear
    want = linear(linear(full[0], full[1], full[2]).relu(), full[3])
    got: Any = None
    for run in (fuser.execute_with_dtensors, FusionDefinition.execute_with_dtensors):
        (got,) = run(fd, given)
        check_result(got, want, mesh, placed[0])
        # A dimension of one device is called as the user, or an operand, calls it.
        assert list(got.placements) == list(placed[0])
    # torch's own way to the same result.
    theirs: Any = linear(linear(*given[:3]).relu(), given[3])
    torch.testing.assert_close(got.full_tensor(), theirs.full_tensor())


def check_axis_cut_twice(device: str) -> None:
    """One axis is cut by both mesh dimensions, the first one outermost; then by the last one
    alone.
    """
    mesh = torch_mesh((2, -1), device)
    both, last = [Shard(1), Shard(1)], [WHOLE, Shard(-2)]
    full = [randn(3, 8, 2), randn(3, 8, 2, seed=1)]
    with FusionDefinition() as fd:
        x, y = (fd.define_tensor([-1, -1, -1], dtype=DataType.Double) for _ in range(2))
        fd.add_output(fd.ops.neg(x))
        fd.add_output(fd.ops.mul(y, 2.0))
        cut(x, mesh, both)
        cut(y, mesh, [WHOLE, Shard(1)])
    given = [distribute(t.to(device), mesh, p) for t, p in zip(full, (both, last), strict=True)]
    negated, doubled = fd.execute_with_dtensors(given)
    check_result(negated, -full[0], mesh, both)
    check_result(doubled, 2 * full[1], mesh, [WHOLE, Shard(1)])


def check_other_inputs(device: str) -> None:
    """Numbers, a replicated input without a mesh, an in-place update, and a result on another
    mesh.
    """
    mesh, flat = torch_mesh((1, -1), device), torch_mesh((-1,), device)
    full = [randn(4, 8, seed=seed) for seed in range(3)]
    with FusionDefinition() as fd:
        x, y, z = (
            fd.define_tensor([-1, -1], contiguity=True, dtype=DataType.Double) for _ in range(3)
        )
        s = fd.define_scalar(None, DataType.Double)
        fd.add_output(fd.ops.mul(fd.ops.add(x, y), s), x)
        negated = fd.ops.neg(z)
        fd.add_output(negated)
        cut(x, mesh, [WHOLE, Shard(0)])
        cut(negated, flat, [Shard(1)])
    placed = [WHOLE, Shard(0)], [WHOLE, WHOLE], [WHOLE, WHOLE]
    given = [distribute(t.to(device), mesh, p) for t, p in zip(full, placed, strict=True)]
    want = 3 * (full[0] + full[1])
    (got,) = fd.execute_with_dtensors([*given, 3.0])
    torch.testing.assert_close(given[0].full_tensor().cpu(), want)
    check_result(got, -full[2], got.device_mesh, [Shard(1)])
    assert got.device_mesh.mesh.tolist() == flat.mesh.tolist() and got.device_mesh != flat
    (again,) = fd.execute_with_dtensors([*given, 1.0])
    assert again.device_mesh is got.device_mesh  # made once
    torch.testing.assert_close(given[0].full_tensor().cpu(), want + full[1])


def check_memory_orders(device: str) -> None:
    """Checks shards in each memory order, dense and with gaps, for each declared order."""
    d = Communicator.instance().size()
    mesh = torch_mesh((-1,), device)
    full = randn(2 * d, 3 * d, 4 * d)
    by_rows = [distribute(full.to(device), mesh, [Shard(at)]).to_local() for at in range(3)]
    for cut_axis, declared in product(range(3), permutations(range(3))):
        local = by_rows[cut_axis]
        wide = torch.stack((local, local), dim=-1)[..., 0]
        given = [reordered(local, order) for order in permutations(range(3))]
        fd = _negation(mesh, cut_axis, declared)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for shard in (*given, wide, *given):
                x = DTensor.from_local(shard, mesh, [Shard(cut_axis)], run_check=False)
                (got,) = fd.execute_with_dtensors([x])
                check_result(got, -full, mesh, [Shard(cut_axis)])
        texts = [str(w.message) for w in told if "copies a shard" in str(w.message)]
        assert len(texts) == (Communicator.instance().rank() == 0), texts
        as_declared = reordered(local, declared).stride()
        for text in texts:
            assert "input 0, T0" in text and f"declares {as_declared}" in text and __file__ in text
    # The DTensor says the order that is declared, its shard has another one.
    turned = distribute(reordered(full, (2, 1, 0)).to(device), mesh, [Shard(0)])
    (got,) = _negation(mesh, 0, (2, 1, 0)).execute_with_dtensors([turned])
    check_result(got, -full, mesh, [Shard(0)])
    _check_orders_of_updates(mesh, by_rows[0])


def _negation(
    mesh: TorchMesh, cut_axis: int, declared: Sequence[int], *, updates: bool = False
) -> FusionDefinition:
    """Returns a program that negates an input of three axes, declared in this memory order."""
    with FusionDefinition() as fd:
        stride_order = [2 - declared.index(p) for p in range(3)]
        x = fd.define_tensor(
            [-1] * 3, contiguity=[True] * 3, dtype=DataType.Double, stride_order=stride_order
        )
        fuser.shard(x, mesh, [Shard(cut_axis)])
        fd.add_output(fd.ops.neg(x), x if updates else None)
    return fd


def reordered(t: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Returns a dense tensor whose axes have this order in memory."""
    return t.permute(*order).contiguous().permute(*[order.index(p) for p in range(t.ndim)])


def _check_orders_of_updates(mesh: TorchMesh, local: torch.Tensor) -> None:
    """An input updated in place must have the declared order of axes: a copy would lose the
    update.
    """
    fd = _negation(mesh, 0, (2, 1, 0), updates=True)
    x = DTensor.from_local(local.clone(), mesh, [Shard(0)], run_check=False)
    words = rf"input 0, T0.*strides {local.stride()}, but declares .*in place.*stride_order"
    _refused(fd, [x], DTensorError, words.replace("(", r"\(").replace(")", r"\)"))
    ordered = reordered(local.clone(), (2, 1, 0))
    x = DTensor.from_local(ordered, mesh, [Shard(0)], run_check=False)
    fd.execute_with_dtensors([x])
    assert torch.equal(ordered, -local)


# ------------------------------------------------------------------ what is refused
def _add(mesh: TorchMesh, placed: Sequence[Placement]) -> FusionDefinition:
    with FusionDefinition() as fd:
        x, y = (fd.define_tensor([-1, -1], dtype=DataType.Double) for _ in range(2))
        fd.add_output(fd.ops.add(x, y))
        cut(x, mesh, placed)
    return fd


def _refused(fd: FusionDefinition, given: Sequence[object], kind: type, words: str) -> None:
    """Checks that every rank raises, and that nothing ran."""
    with pytest.raises(kind, match=words) as caught:
        fd.execute_with_dtensors(given)
    assert isinstance(caught.value, FuserError)
    with pytest.raises(NotCompiledError):
        fd.fec.host_program()


def check_refusals(device: str) -> None:
    here = Communicator.instance()
    d = here.size()
    mesh, other = torch_mesh((-1,), device), torch_mesh((1, -1), device, "uv")
    first, second = torch.ones(d, 4, dtype=torch.float64), torch.ones(d, 4, dtype=torch.float64)
    rows: Callable[..., DTensor] = lambda t=first: distribute(t.to(device), mesh, [Shard(0)])  # noqa: E731
    whole = distribute(first.to(device), mesh, [WHOLE])
    columns = distribute(second.to(device), mesh, [Shard(1)])
    partial = DTensor.from_local(first.to(device), mesh, [Partial()], run_check=False)
    elsewhere = distribute(first.to(device), other, [WHOLE, Shard(0)])
    cases: list[tuple[list[object], type, str]] = [
        ([rows(), partial], UnsupportedError, r"input 1, T1.*Partial"),
        # The second input has no mesh: all ranks have it whole.
        ([columns, whole], DTensorError, r"input 0, T0.*\(Shard\(0\)\) in.*is \(Shard\(1\)\)"),
        ([rows(), columns], DTensorError, r"input 1, T1.*\(Replicate\(\)\) in.*is \(Shard\(1\)\)"),
        ([rows(), second], DTensorError, r"input 1, T1.*must be a DTensor"),
        ([rows(), elsewhere], DTensorError, r"input 1, T1.*use the same names"),
        ([rows()], InputError, r"Expected 2, got 1"),
    ]
    for given, kind, words in cases:
        _refused(_add(mesh, [Shard(0)]), given, kind, words)
    unnamed = TorchMesh(device, torch.arange(d).flip(0), mesh_dim_names=("a",))
    flipped = distribute(first.to(device), unnamed, [Shard(0)])
    _refused(_add(mesh, [Shard(0)]), [flipped, flipped], DTensorError, r"input 0, T0.* is on .*\{0")
    ragged = torch.ones(d + 1, 4, dtype=torch.float64)
    given = [rows(ragged), whole]
    _refused(_add(mesh, [Shard(0)]), given, DTensorError, rf"size {d + 1} along axis 0")
    # A wrong input on one rank is an error on all ranks.
    given = [rows(), partial if here.rank() == 1 else whole]
    kind = UnsupportedError if here.rank() == 1 else PeerError
    _refused(_add(mesh, [Shard(0)]), given, kind, r"input 1, T1.*Partial")
    (out,) = _add(mesh, [Shard(0)]).execute_with_dtensors([rows(), whole])
    assert out.full_tensor().sum() == 8 * d
    check_refused_programs(mesh, device, rows())


def check_refused_programs(mesh: TorchMesh, device: str, x: DTensor) -> None:
    with FusionDefinition() as fd:
        a = fd.define_tensor([-1, -1], dtype=DataType.Double)
        fd.add_output(fd.ops.neg(a))
    whole = distribute(x.full_tensor(), mesh, [WHOLE])
    _refused(fd, [whole], DTensorError, "output T1.* has no mesh")
    # mesh_x outermost: a DTensor has the first dimension outermost.
    square = torch_mesh((-1, 2) if dist.get_world_size() > 2 else (2, 1), device)
    with FusionDefinition() as fd:
        a = fd.define_tensor([-1, -1], dtype=DataType.Double)
        fd.add_output(fd.ops.neg(a))
        a.set_device_mesh(DeviceMesh(square.mesh))
        for at, ptype in enumerate((X, Y)):
            a.outer_split(at, square.mesh.shape[-1 - at])
            a.axis(at).parallelize(ptype)
    both = distribute(torch.ones(8, 2, dtype=torch.float64, device=device), square, [Shard(0)] * 2)
    _refused(fd, [both], UnsupportedError, r"axis 0 of T0.*deviceIdx.x into .*deviceIdx.y")


def check_uneven_shards(device: str) -> None:
    """Checks axes that the ranks cannot divide: shards are cut as by torch, and some are empty."""
    d = Communicator.instance().size()
    mesh = torch_mesh((-1,), device)
    for rows in (d + 1, 2 * d - 1, max(d - 1, 2)):
        x, w = randn(rows, 3), randn(5, 3, seed=1)
        with FusionDefinition() as fd:
            a, b = (fd.define_tensor(list(t.shape), dtype=DataType.Double) for t in (x, w))
            y = fd.ops.linear(a, b)
            fd.add_output(y)
            fd.add_output(fd.ops.sum(y, [0]))
            cut(a, mesh, [Shard(0)])
        given = [
            distribute(x.to(device), mesh, [Shard(0)]),
            distribute(w.to(device), mesh, [WHOLE]),
        ]
        product, total = fd.execute_with_dtensors(given)
        check_result(product, x @ w.T, mesh, [Shard(0)])
        check_result(total, (x @ w.T).sum(0), mesh, [WHOLE])


def check_nothing_ran(device: str) -> None:
    """Checks that refused calls never start an evaluator."""
    ran: list[object] = []
    original = ProgramEvaluator.run_entry

    def noting(self: ProgramEvaluator, *given: Any) -> list[torch.Tensor]:
        ran.append(self)
        return original(self, *given)

    ProgramEvaluator.run_entry = noting  # type: ignore[method-assign]
    try:
        check_refusals(device)
    finally:
        ProgramEvaluator.run_entry = original  # type: ignore[method-assign]
    assert len(ran) == 1  # the one that is right


CHECKS: dict[str, Callable[[str], None]] = {
    **{f"linears on {name}": partial(check_two_linears, name) for name in SHAPES},
    "an axis cut twice": check_axis_cut_twice,
    "other inputs": check_other_inputs,
    "memory orders": check_memory_orders,
    "uneven shards": check_uneven_shards,
    "refusals": check_nothing_ran,
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", choices=CHECKS)
    given = parser.parse_args()
    here = Communicator.instance()
    names = [given.only] if given.only else [*CHECKS]
    with default_group(given.device):
        for name in names:
            CHECKS[name](given.device)
    if here.rank() == 0:
        print(f"{len(names)} checks on {here.size()} ranks: ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
