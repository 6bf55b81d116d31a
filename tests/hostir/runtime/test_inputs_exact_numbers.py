"""Tests integer inputs with 32-bit tensors: results equal torch's, or an error is raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fuser import DataType, FusionDefinition, ParallelType
from fuser.frontend.manual_kernels import KernelExecutor
from fuser.multidevice import DeviceMesh, shard_tensor
from fuser.support.errors import DefinitionError, FuserError, InputError
from hostir import HostIrEvaluator
from hostir.ir.parser import parse
from multidevice import simulate
from tests.support.definition_copies import again

Write = Callable[[FusionDefinition, Any, Any], Any]
X = torch.tensor([-7, -1, 0, 1, 4, 9], dtype=torch.int32)
END = 2**31
LARGE = (END, -END - 1, 2**32 + 1, 2**40, -(2**63), 2**63 - 1)

# Ops that raise an error for such integers, with their meaning in torch.
REFUSED: dict[str, tuple[Write, Callable[[torch.Tensor, int], torch.Tensor]]] = {
    "clamp above": (lambda fd, x, s: fd.ops.clamp(x, None, s), lambda x, n: x.clamp(max=n)),
    "clamp below": (lambda fd, x, s: fd.ops.clamp(x, s, None), lambda x, n: x.clamp(min=n)),
    "threshold": (lambda fd, x, s: fd.ops.threshold(x, s, 7), lambda x, n: F.threshold(x, n, 7)),
    "threshold value": (
        lambda fd, x, s: fd.ops.threshold(x, 0, s),
        lambda x, n: F.threshold(x, 0, n),
    ),
    "where": (
        lambda fd, x, s: fd.ops.where(fd.ops.gt(x, 0), x, s),
        lambda x, n: torch.where(x > 0, x, n),
    ),
    "pow": (lambda fd, x, s: fd.ops.pow(x, s), lambda x, n: x**n),
    "pad": (lambda fd, x, s: fd.ops.pad(x, [1, 2], s), lambda x, n: F.pad(x, (1, 2), value=n)),
    "full": (
        lambda fd, x, s: fd.ops.full([x.size(0)], s, DataType.Int32),
        lambda x, n: torch.full_like(x, n),
    ),
    "cumsum": (
        lambda fd, x, s: fd.ops.cumsum(x, 0, s),
        lambda x, n: x.cumsum(0, dtype=torch.int32) + n,
    ),
    "div": (
        lambda fd, x, s: fd.ops.div(x, s),
        lambda x, n: torch.div(x, n, rounding_mode="trunc"),
    ),
    "fmod": (lambda fd, x, s: fd.ops.fmod(x, s), lambda x, n: torch.fmod(x, n)),
    "mod": (lambda fd, x, s: fd.ops.mod(x, s), lambda x, n: torch.fmod(x, n)),
    "remainder": (lambda fd, x, s: fd.ops.remainder(x, s), lambda x, n: torch.remainder(x, n)),
}
# Ops that wrap them, as torch does: results are correct modulo 2**32, or documented by torch.
WRAPPED: dict[str, tuple[Write, Callable[[torch.Tensor, int], torch.Tensor]]] = {
    "add": (lambda fd, x, s: fd.ops.add(x, s), lambda x, n: x + n),
    "sub": (lambda fd, x, s: fd.ops.sub(s, x), lambda x, n: n - x),
    "mul": (lambda fd, x, s: fd.ops.mul(x, s), lambda x, n: x * n),
    "bitwise_or": (lambda fd, x, s: fd.ops.bitwise_or(x, s), lambda x, n: x | n),
}


def written(write: Write, number: int | None = None) -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], dtype=DataType.Int32)
        fd.add_output(write(fd, x, fd.define_scalar(number, dtype=DataType.Int)))
    return fd


@pytest.mark.finding("G8")
@pytest.mark.parametrize("name", REFUSED)
def test_an_integer_of_a_call_that_does_not_fit_is_refused_as_torch_does(name: str) -> None:
    write, meaning = REFUSED[name]
    fd = written(write)
    words = r"i\d+ = -?\d+ \(input 1\): -?\d+ is out of the range of int, .* \(user code at .*py:\d"
    with pytest.raises(InputError, match=rf"^{name.split()[0]}: {words}"):
        fd.execute([X, LARGE[0]])  # at the first call, too
    for one in (fd, again(fd)):
        for number in (3, -2, END - 1, 1, -END, 2):
            if name == "pow" and number < 0:
                continue  # torch has none of integers
            expected = meaning(X, number)
            for large in (None, *LARGE):
                (out,) = one.execute([X, number])
                torch.testing.assert_close(out, expected, rtol=0, atol=0)
                if large is not None:
                    with pytest.raises(InputError, match="is out of the range of int"):
                        one.execute([X, large])


@pytest.mark.finding("G8")
@pytest.mark.parametrize("name", REFUSED)
def test_a_constant_integer_that_does_not_fit_is_refused_where_it_is_written(name: str) -> None:
    write, _ = REFUSED[name]
    for number in LARGE:
        for as_scalar in (True, False):
            with FusionDefinition() as fd:
                x = fd.define_tensor([-1], dtype=DataType.Int32)
                s = fd.define_scalar(number, dtype=DataType.Int) if as_scalar else number
                with pytest.raises(DefinitionError, match=f"{name.split()[0]}: {number} is out of"):
                    write(fd, x, s)
                fd.add_output(x)


@pytest.mark.finding("G8")
@pytest.mark.parametrize("name", [*REFUSED, *WRAPPED])
def test_tensors_of_64_bits_take_all_integers(name: str) -> None:
    write, meaning = {**REFUSED, **WRAPPED}[name]
    if name in ("full", "cumsum"):  # whose meanings here are of 32 bits
        return
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], dtype=DataType.Int)
        fd.add_output(write(fd, x, fd.define_scalar(dtype=DataType.Int)))
    for number in (2**40, 2**32 + 1, -(2**40)):
        if name != "pow" or number > 0:
            (out,) = fd.execute([X.long(), number])
            torch.testing.assert_close(out, meaning(X.long(), number), rtol=0, atol=0)


@pytest.mark.finding("G8")
@pytest.mark.parametrize("name", WRAPPED)
def test_sums_and_products_wrap_as_those_of_torch(name: str) -> None:
    write, meaning = WRAPPED[name]
    fd = written(write)
    for number in (2**40, 2**32 + 5, -END - 3):
        expected = meaning(X, number)
        for one in (fd, written(write, number)):
            given = [X, number] if one is fd else [X]
            torch.testing.assert_close(one.execute(given)[0], expected, rtol=0, atol=0)


@pytest.mark.finding("G8")
def test_what_is_computed_from_integers_of_a_call_and_sizes_is_checked() -> None:
    fd = written(lambda fd, x, s: fd.ops.clamp(x, None, fd.ops.mul(s, x.size(0))))
    for _ in range(3):
        torch.testing.assert_close(fd.execute([X, 1])[0], X.clamp(max=6), rtol=0, atol=0)
        with pytest.raises(InputError, match=r"clamp: .* with i0 = 6, i\d = 536870912 \(input 1\)"):
            fd.execute([X, 2**29])
        (out,) = fd.execute([X[:3], 2**29])
        assert torch.equal(out, X[:3])


@pytest.mark.finding("G8")
def test_limits_of_floats_are_refused_as_constants_are() -> None:
    for dtype, large in ((torch.float16, 1e6), (torch.float32, 1e300)):
        x = torch.tensor([-3.0, 0.5], dtype=dtype)
        with FusionDefinition() as fd:
            t, s = fd.from_pytorch(x), fd.define_scalar(dtype=DataType.Double)
            fd.add_output(fd.ops.clamp(t, None, s))
        for _ in range(2):
            for limit in (0.25, float("inf"), float("nan")):
                (out,) = fd.execute([x, limit])
                torch.testing.assert_close(out, x.clamp(max=limit), equal_nan=True)
            with pytest.raises(InputError, match=r"clamp: d\d+ = 1.* is out of the range of"):
                fd.execute([x, large])


@pytest.mark.finding("G8")
def test_complex_beginnings_of_scans_are_refused_as_constants_are() -> None:
    x = torch.tensor([1 + 2j, -0.5j], dtype=torch.complex64)
    with FusionDefinition() as fd:
        t, s = fd.from_pytorch(x), fd.define_scalar(dtype=DataType.ComplexDouble)
        fd.add_output(fd.ops.cumsum(t, 0, s))
    for _ in range(3):
        torch.testing.assert_close(fd.execute([x, 3j])[0], x.cumsum(0) + 3j)
        with pytest.raises(InputError, match=r"cumsum: c.* is out of the range"):
            fd.execute([x, 1e300j])


# ------------------------------------------------------------------ other ways to run
@pytest.mark.finding("G8")
@pytest.mark.parametrize("name", REFUSED)
def test_programs_from_text_and_kernels_by_hand_refuse_them(name: str) -> None:
    write, meaning = REFUSED[name]
    fd = written(write)
    fd.execute([X, 3])
    evaluator = HostIrEvaluator(parse(fd.fec.host_program().full_text()))
    runs: list[Callable[[list[Any]], list[torch.Tensor]]] = [evaluator.run, evaluator.evaluate]
    try:
        by_hand = KernelExecutor()
        by_hand.compile(fd.fusion)
        runs.append(by_hand.run)
    except FuserError:
        assert name == "cumsum"  # a call of a library
    for run in runs:
        for _ in range(3):
            torch.testing.assert_close(run([X, 3])[0], meaning(X, 3), rtol=0, atol=0)
            with pytest.raises(InputError, match="is out of the range of int"):
                run([X, 2**40])


@pytest.mark.finding("G8")
def test_all_ranks_hear_of_an_integer_that_does_not_fit() -> None:
    mesh = DeviceMesh([0, 1])

    def run() -> None:
        with FusionDefinition() as fd:
            x, s = (
                fd.define_tensor([-1, 3], dtype=DataType.Int32),
                fd.define_scalar(dtype=DataType.Int),
            )
            fd.add_output(fd.ops.sum(fd.ops.clamp(x, None, s), 0))
            x.set_device_mesh(mesh)
            x.outer_split(0, 2)
            x.axis(0).parallelize(ParallelType.mesh_x)
        whole = X.reshape(2, 3)
        for _ in range(3):
            (out,) = fd.execute([shard_tensor(whole, x), 2])
            assert torch.equal(out, whole.clamp(max=2).sum(0))
            with pytest.raises(InputError, match=r"clamp: i\d+ = 1099511627776 \(input 1\)"):
                fd.execute([shard_tensor(whole, x), 2**40])

    with simulate(2) as world:
        world.run(run)
