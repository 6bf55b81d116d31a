"""index_put_accumulate: rows added at indices, compared with torch in float64."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from fuser import DataType, FusionDefinition, ops
from fuser.ir.fusion import Fusion
from fuser.ir.fusion_guard import FusionGuard
from fuser.multidevice import Communicator, DeviceMesh, shard_tensor
from fuser.ops.define import define_tensor
from fuser.support.errors import DefinitionError, DtypeError, InputError
from hostir.ir.parser import parse
from hostir.ir.program import equal
from multidevice import simulate
from tests.support.cuts import cut
from tests.support.float8_codes import check, run
from tests.support.scaled_operands import draw

pytestmark = pytest.mark.from_text

D = DataType
Tensor = torch.Tensor
PLAIN = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32]
DTYPES = [*PLAIN, torch.float8_e4m3fn, torch.float8_e5m2]


def build(acc: Any, index: Any, value: Any) -> Any:
    return ops.index_put_accumulate(acc, index, value)


def wanted(acc: Tensor, index: Tensor, value: Tensor) -> Tensor:
    """Adds row after row, in float64 or int64; rows for positions outside of the tensor are
    ignored."""
    out = acc.double() if acc.dtype.is_floating_point else acc.long()
    out = out.clone()
    value = value.to(out.dtype).expand(len(index), *acc.shape[1:])
    for i, row in enumerate(index.tolist()):
        if 0 <= row < len(out):
            out[row] += value[i]
    return out


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_and_shapes(dtype: torch.dtype) -> None:
    rng = random.Random(4)
    for n, rest in ((4, ()), (1, (3,)), (7, (5, 2)), (30, (4,)), (0, (3,)), (3, (0,))):
        rows = rng.choice((1, 2, 5))
        # Small integers: sums are exact in any order, and rounded once.
        acc, value = ((draw(k, *rest) * 2).round().to(dtype) for k in (rows, n))
        index = torch.randint(0, rows, (n,), generator=torch.Generator().manual_seed(n))
        index = index.to(rng.choice((torch.int64, torch.int32)))
        (out,) = run(build, acc, index, value, options=())
        check(out, wanted(acc, index, value).to(dtype))


def test_sums_are_near_and_repeat_exactly() -> None:
    acc, value = draw(3, 17), draw(2000, 17)
    index = torch.arange(2000) % 3
    outs = [run(build, acc, index, value, options=())[0] for _ in range(3)]
    torch.testing.assert_close(outs[0].double(), wanted(acc, index, value), rtol=1e-5, atol=1e-4)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_rows_outside_go_nowhere_and_one_row_fits_all() -> None:
    acc, value = draw(4, 3), draw(5, 1)
    index = torch.tensor([0, 4, -1, 3, 3])
    (out,) = run(build, acc, index, value, options=())
    torch.testing.assert_close(out.double(), wanted(acc, index, value))
    (out,) = run(build, acc, index, draw(1, 3), options=())
    torch.testing.assert_close(out.double(), wanted(acc, index, draw(1, 3)))


def test_between_kernels_with_symbolic_sizes() -> None:
    with FusionDefinition() as fd:
        acc, value = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
        index = fd.define_tensor([-1], contiguity=True, dtype=D.Int)
        made = fd.ops.index_put_accumulate(fd.ops.neg(acc), index, fd.ops.mul(value, 2.0))
        fd.add_output(fd.ops.relu(made))
        fd.add_output(acc)
    for m, n, h in ((3, 5, 4), (8, 2, 4), (1, 9, 3)):
        acc, value, index = draw(m, h), draw(n, h), torch.arange(n) % m
        out, same = fd.execute([acc, value, index])
        expected = wanted(-acc, index, 2 * value).relu()
        torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-5)
        assert same is acc or torch.equal(same, acc)
    program = fd.fec.host_program()
    assert equal(parse(program.full_text()), program)
    with pytest.raises(InputError, match="index_put_accumulate"):
        fd.execute([draw(3, 4), draw(5, 4), torch.arange(6)])


@pytest.mark.parametrize("where", ["columns", "rows", "added rows"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_ranks(where: str, ranks: int) -> None:
    acc, value = draw(8, 4), draw(12, 4)
    index = torch.arange(12) * 5 % 8

    def program() -> tuple[Tensor, str]:
        mesh = DeviceMesh(range(Communicator.instance().size()))
        with FusionDefinition() as fd:
            tensors = [fd.from_pytorch(t) for t in (acc, index, value)]
            fd.add_output(fd.ops.neg(ops.index_put_accumulate(*tensors)))
            for tv in tensors:
                tv.set_device_mesh(mesh)
            a, i, v = tensors
            axes = {"columns": {a: 1, v: 1}, "rows": {a: 0}, "added rows": {i: 0, v: 0}}[where]
            for tv, axis in axes.items():
                cut(tv, axis, mesh)
        given = [shard_tensor(t, tv) for t, tv in zip((acc, index, value), tensors, strict=True)]
        return fd.execute(given)[0], fd.fec.host_program().full_text()

    with simulate(ranks) as world:
        results = world.run(program)
    outs = [out for out, _ in results]
    whole = torch.cat(outs, 1) if where == "columns" else outs[0]
    torch.testing.assert_close(whole.double(), -wanted(acc, index, value))
    assert ("Allgather" in results[0][1]) == (where != "columns")


@pytest.mark.parametrize("with_value", [False, True])
def test_columns_on_ranks_of_a_value_that_repeats_one(with_value: bool) -> None:
    acc, value, index = draw(8, 2, 4), draw(12, 1, 1).expand(12, 1, 4), torch.arange(12) % 5

    def program() -> tuple[Tensor, str]:
        mesh = DeviceMesh([0, 1])
        with FusionDefinition() as fd:
            tensors = [fd.from_pytorch(t) for t in (acc, index, value)]
            fd.add_output(ops.index_put_accumulate(*tensors))
            for tv in tensors:
                tv.set_device_mesh(mesh)
            for tv in (tensors[0], tensors[2])[: 1 + with_value]:
                cut(tv, 2, mesh)
        given = [shard_tensor(t, tv) for t, tv in zip((acc, index, value), tensors, strict=True)]
        return fd.execute(given)[0], fd.fec.host_program().full_text()

    with simulate(2) as world:
        results = world.run(program)
    whole = torch.cat([out for out, _ in results], 2)
    torch.testing.assert_close(whole.double(), wanted(acc, index, value))
    assert ("LocalSlice" in results[0][1]) == (not with_value)


def test_wrong_calls() -> None:
    with FusionGuard(Fusion()):
        x, i = define_tensor([4, 3]), define_tensor([-1], dtype=D.Int)
        with pytest.raises(DtypeError, match="Expected an index of dtype Int or Int32"):
            build(x, x, x)
        with pytest.raises(
            DefinitionError, match=r"the index must have 1 axis, but T.* has 2 axes"
        ):
            build(x, define_tensor([-1, -1], dtype=D.Int), x)
        with pytest.raises(DefinitionError, match="index_put_accumulate"):
            build(x, i, define_tensor([-1]))
        with pytest.raises(DefinitionError, match="Expected sizes to match"):
            build(x, i, define_tensor([-1, 4]))
        with pytest.raises(DtypeError, match="acc and value must have the same dtype"):
            build(x, i, define_tensor([-1, 3], dtype=D.Half))
        b = define_tensor([4, 3], dtype=D.Bool)
        with pytest.raises(DtypeError, match="acc and value must have the same dtype"):
            build(b, i, b)
        with pytest.raises(DefinitionError, match="has no axis"):
            build(define_tensor([]), i, define_tensor([]))
