"""Float scalars as extents: whole numbers are sizes, in every call and on all ranks."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from fuser import DataType, FusionDefinition, ParallelType
from fuser.frontend.manual_kernels import KernelExecutor
from fuser.ir.canonical_form import equal_fusions
from fuser.ir.fusion import TensorView
from fuser.ir.text.parser import parse_fusion
from fuser.ir.text.printer import fusion_text
from fuser.multidevice import Communicator, DeviceMesh, MultiDeviceExecutor, shard_tensor
from fuser.support.errors import DtypeError, InputError
from hostir import HostIrEvaluator
from hostir.ir.parser import parse
from hostir.ir.program import equal
from hostir.runtime.execute import Execution
from multidevice import simulate
from tests.support.definition_copies import again

pytestmark = pytest.mark.from_text

Define = Callable[[FusionDefinition, Any, Any], Any]
FLOATS = (DataType.Float, DataType.Double, DataType.Half, DataType.BFloat16)

# Name -> an op on x [12] and a scalar s, and the same computation in torch.
OPS: dict[str, tuple[Define, Callable[[torch.Tensor, int], torch.Tensor]]] = {
    "reshape": (
        lambda fd, x, s: fd.ops.reshape(x, [s, fd.ops.div(12.0, s)]),
        lambda x, n: x.reshape(n, 12 // n),
    ),
    "reshape -1": (lambda fd, x, s: fd.ops.reshape(x, [s, -1]), lambda x, n: x.reshape(n, -1)),
    "product": (
        lambda fd, x, s: fd.ops.reshape(
            fd.ops.reshape(x, [3, 4]), [fd.ops.div(x.size(0), 6.0), s, -1]
        ),
        lambda x, n: x.reshape(2, n, -1),
    ),
    "expand": (
        lambda fd, x, s: fd.ops.expand(fd.ops.broadcast(x, [True, False]), [s, x.size(0)]),
        lambda x, n: x.expand(n, 12),
    ),
    "broadcast_in_dim": (
        lambda fd, x, s: fd.ops.broadcast_in_dim(x, [12, s], [0]),
        lambda x, n: x[:, None].expand(12, n),
    ),
    "full": (
        lambda fd, x, s: fd.ops.full([s, fd.ops.mul(s, 2.0)], 3.0, DataType.Float),
        lambda x, n: torch.full((n, 2 * n), 3.0),
    ),
    "iota": (
        lambda fd, x, s: fd.ops.iota(s, dtype=DataType.Int),
        lambda x, n: torch.arange(n),
    ),
    "slice": (
        lambda fd, x, s: fd.ops.slice(x, [s], [fd.ops.mul(s, 4.0)]),
        lambda x, n: x[n : 4 * n],
    ),
    "pad": (
        lambda fd, x, s: fd.ops.pad(x, [s, fd.ops.neg(s)]),
        lambda x, n: torch.nn.functional.pad(x, (n, -n)),
    ),
    "topk": (lambda fd, x, s: fd.ops.topk(x, s, sorted=True)[0], lambda x, n: x.topk(n).values),
    "truncated": (
        lambda fd, x, s: fd.ops.full(
            [fd.ops.cast(fd.ops.mul(s, 1.25), DataType.Int)], 3.0, DataType.Float
        ),
        lambda x, n: torch.full((math.trunc(n * 1.25),), 3.0),
    ),
    "chosen": (
        lambda fd, x, s: fd.ops.full(
            [fd.ops.where(fd.ops.gt(s, 2.5), x.size(0), 5)], 3.0, DataType.Float
        ),
        lambda x, n: torch.full((12 if n > 2.5 else 5,), 3.0),
    ),
}


def defined(define: Define, dtype: DataType = DataType.Double) -> FusionDefinition:
    """Returns a definition whose inputs are x [-1] and a scalar of this dtype."""
    with FusionDefinition() as fd:
        x, s = fd.define_tensor([-1], contiguity=True), fd.define_scalar(dtype=dtype)
        y = define(fd, x, s)
        fd.add_output(y if y.dtype() is DataType.Int else fd.ops.neg(y))
    return fd


def assert_equal(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def wanted(meaning: Callable[[torch.Tensor, int], torch.Tensor], x: torch.Tensor, n: int) -> Any:
    y = meaning(x, n)
    return [y if y.dtype is torch.int64 else -y]


X = torch.linspace(-1, 1, 12)[torch.randperm(12, generator=torch.Generator().manual_seed(0))]


@pytest.mark.finding("reshape Float extent")
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.name)
def test_a_float_scalar_is_an_extent_where_it_is_whole(name: str, dtype: DataType) -> None:
    define, meaning = OPS[name]
    fd = defined(define, dtype)
    for n in (3, 2, 3, 1, 3, 2):
        assert_equal(fd.execute([X, float(n)]), wanted(meaning, X, n))
    fd.validate([X, 2.0])


@pytest.mark.finding("reshape Float extent")
@pytest.mark.parametrize("name", OPS)
def test_texts_and_copies_of_float_extents_give_them_back(name: str) -> None:
    define, meaning = OPS[name]
    fd = defined(define)
    twins = [again(fd), pickle.loads(pickle.dumps(fd)), copy.deepcopy(fd)]
    for twin in twins:
        assert twin.fusion == fd.fusion and hash(twin.fusion) == hash(fd.fusion)
        assert repr(twin) == repr(fd)
        assert_equal(twin.execute([X, 3.0]), wanted(meaning, X, 3))
    text = fusion_text(fd.fusion)
    assert equal_fusions(parse_fusion(text), fd.fusion) and fusion_text(parse_fusion(text)) == text


@pytest.mark.finding("reshape Float extent")
def test_definitions_of_other_float_extents_are_unequal() -> None:
    defines = [
        lambda fd, x, s: fd.ops.full([s], 1.0, DataType.Float),
        lambda fd, x, s: fd.ops.full([fd.ops.cast(s, DataType.Int)], 1.0, DataType.Float),
        lambda fd, x, s: fd.ops.full([fd.ops.mul(s, 1.0)], 1.0, DataType.Float),
    ]
    fusions = [defined(one).fusion for one in defines]
    assert len({*fusions}) == 3


@pytest.mark.finding("reshape Float extent")
@pytest.mark.parametrize("name", ["reshape", "reshape -1", "expand", "full", "iota", "slice"])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (2.5, r"2\.5 is not an integer; cast it to DataType\.Int to truncate it"),
        (math.nan, r"nan is not an integer"),
        (math.inf, r"inf is not an integer"),
        (-math.inf, r"-inf is not an integer"),
        (2.0**63, r"9\.223372036854776e\+18 is out of the range of int64_t"),
    ],
)
def test_a_value_that_is_no_size_is_refused_by_name(name: str, value: float, words: str) -> None:
    fd = defined(OPS[name][0])
    op, line = name.split()[0], r"test_implicit_inputs_float_sizes\.py:\d+"
    fd.execute([X, 3.0])
    for _ in range(2):
        with pytest.raises(InputError, match=rf"^{op}: size d.* \(input 1\): {words} \(.*{line}"):
            fd.execute([X, value])
    (out,) = fd.execute([X, 2.0])
    assert out.numel()


@pytest.mark.finding("reshape Float extent")
def test_values_that_no_op_takes_are_refused_by_name() -> None:
    fd = defined(OPS["full"][0])
    with pytest.raises(InputError, match=r"full: size d\d+ = -1\.0 \(input 1\): -1 is below 0"):
        fd.execute([X, -1.0])
    (out,) = fd.execute([X, 0.0])
    assert out.shape == (0, 0)
    fd = defined(OPS["reshape -1"][0])
    with pytest.raises(InputError, match=r"reshape: size d\d+ = -1\.0 \(input 1\): -1 is below 0"):
        fd.execute([X, -1.0])
    with pytest.raises(InputError, match=r"element counts .* \(12 and 10 elements\)"):
        fd.execute([X, 5.0])
    fd = defined(lambda fd, x, s: fd.ops.reshape(x, [fd.ops.div(x.size(0), s), -1]))
    with pytest.raises(InputError, match=r"^reshape: size .*i0.* with i0 = 12, d\d+ = 5\.0 \(inpu"):
        fd.execute([X, 5.0])
    with pytest.raises(InputError, match=r"inf is not an integer"):
        fd.execute([X, 0.0])
    with pytest.raises(InputError, match=r"2\.4 is not an integer"):
        fd.validate([X, 5.0])


@pytest.mark.finding("reshape Float extent")
def test_bad_inputs_beside_float_extents_have_the_errors_of_others() -> None:
    fd = defined(OPS["product"][0])
    for given, words in (
        ([X], "Expected 2, got 1"),
        ([X, 2.0, 6], "Expected 2 inputs, got 3"),
        ([X, X], "to be a scalar"),
        ([2.0, 2.0], "to be an at::Tensor"),
        ([X, 2j], "Scalar value"),
        ([X.double(), 2.0], "of dtype float"),
    ):
        with pytest.raises(InputError, match=words):
            fd.execute(given)


@pytest.mark.finding("reshape Float extent")
def test_positions_and_complex_numbers_are_no_extents() -> None:
    with FusionDefinition() as fd:
        x, s = fd.define_tensor([-1, 3]), fd.define_scalar(dtype=DataType.Float)
        z = fd.define_scalar(dtype=DataType.ComplexDouble)
        with pytest.raises(DtypeError, match=r"reshape: .* is not an integer"):
            fd.ops.reshape(x, [z, 3])
        with pytest.raises(DtypeError, match=r"slice: .* is not an integer"):
            fd.ops.slice(x, [0, 0], [3, 3], [s, 1])
        with pytest.raises(DtypeError, match=r"select: the index must be an integer"):
            fd.ops.select(x, s, 0)
        fd.add_output(x)


@pytest.mark.finding("reshape Float extent")
def test_extents_that_ops_say_are_equal_to_a_float_are_checked() -> None:
    with FusionDefinition() as fd:
        x, y = (fd.define_tensor([-1] * n, contiguity=True) for n in (1, 2))
        s = fd.define_scalar(dtype=DataType.Float)
        fd.add_output(fd.ops.add(fd.ops.reshape(x, [s, -1]), y))
    for n in (3, 4, 2):
        y_value = torch.randn(n, 12 // n)
        assert_equal(fd.execute([X, y_value, float(n)]), [X.reshape(n, -1) + y_value])
    with pytest.raises(InputError, match="to have extent"):
        fd.execute([X, torch.randn(3, 4), 4.0])
    with pytest.raises(InputError, match=r"reshape: size f\d+ = 2\.5 \(input 2\)"):
        fd.execute([X, torch.randn(2, 6), 2.5])


@pytest.mark.finding("reshape Float extent")
def test_random_numbers_and_cpu_scalars_beside_a_float_extent() -> None:
    with FusionDefinition() as fd:
        x, s = fd.define_tensor([-1]), fd.define_scalar(dtype=DataType.Float)
        c = fd.define_tensor([], is_cpu=True)
        fd.add_output(fd.ops.uniform(0.0, 1.0, [s, 2]))
        fd.add_output(fd.ops.mul(fd.ops.reshape(x, [s, -1]), c))
        fd.add_output(c)
    torch.manual_seed(0)
    first, product, same = fd.execute([X, 3.0, torch.tensor(2.0)])
    assert first.shape == (3, 2) and torch.equal(product, X.reshape(3, 4) * 2) and same == 2
    torch.manual_seed(0)
    assert torch.equal(fd.execute([X, 3.0, torch.tensor(2.0)])[0], first)
    assert not torch.equal(fd.execute([X, 3.0, torch.tensor(2.0)])[0], first)


# ------------------------------------------------------------------ other ways to run
@pytest.mark.finding("reshape Float extent")
def test_a_new_float_extent_is_a_new_size_of_the_same_plan(monkeypatch: Any) -> None:
    with FusionDefinition() as fd:
        x, s = fd.define_tensor([-1], contiguity=True), fd.define_scalar(dtype=DataType.Float)
        y = fd.ops.reshape(x, [s, -1])
        fd.add_output(fd.ops.exp(y))
        fd.add_output(fd.ops.sum(y, 0))
    for n in range(33, 43):
        fd.execute([torch.randn(64 * n), float(n)])

    def refuse(*given: object) -> None:
        raise AssertionError("a program was walked again")

    monkeypatch.setattr(Execution, "run", refuse)
    for n in range(43, 53):
        x_value = torch.randn(64 * n)
        rows = x_value.double().reshape(n, 64)
        for _ in range(2):
            found = fd.execute([x_value, float(n)])
            for one, other in zip(found, [rows.exp(), rows.sum(0)], strict=True):
                torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


# Op -> the sizes in its program, with x and 3.0 as inputs; 3 for other ops.
FURTHER = {
    "reshape": [3, 4],
    "product": [3, 2],
    "full": [3, 6],
    "slice": [3, 12],
    "pad": [3, -3],
    "truncated": [3],
    "chosen": [12],
}


@pytest.mark.finding("reshape Float extent")
@pytest.mark.parametrize("name", OPS)
def test_the_host_program_runs_from_its_text(name: str) -> None:
    define, meaning = OPS[name]
    fd = defined(define)
    fd.execute([X, 3.0])
    program = fd.fec.host_program()
    made = parse(program.full_text())
    assert equal(made, program)
    assert_equal(
        HostIrEvaluator(made).run([X, 3.0, *FURTHER.get(name, [3])]), wanted(meaning, X, 3)
    )


@pytest.mark.finding("reshape Float extent")
def test_a_schedule_by_hand_and_print_kernel_take_float_extents() -> None:
    with FusionDefinition() as fd:
        s = fd.define_scalar(dtype=DataType.Float)
        y = fd.ops.full([s, 4], 2.0, DataType.Float)
        fd.add_output(fd.ops.neg(y))
    assert "__global__" in fd.fusion.print_kernel()
    executor = KernelExecutor()
    executor.compile(fd.fusion, [3.0])
    assert_equal(executor.run([5.0]), [torch.full((5, 4), -2.0)])
    with pytest.raises(InputError, match=r"full: size f\d+ = 2\.5"):
        executor.run([2.5])


# ------------------------------------------------------------------ several ranks
MESH = DeviceMesh([0, 1])


def sharded() -> FusionDefinition:
    """Defines x [n], replicated, viewed as [s, n / s] with the columns sharded; and row sums."""
    with FusionDefinition() as fd:
        x, s = fd.define_tensor([-1, -1], contiguity=True), fd.define_scalar(dtype=DataType.Float)
        y = fd.ops.reshape(x, [x.size(0), s, fd.ops.div(x.size(1), s)])
        z = fd.ops.sum(fd.ops.exp(y), [0])
        fd.add_output(y)
        fd.add_output(z)
        x.set_device_mesh(MESH)
        x.outer_split(0, 2)
        x.axis(0).parallelize(ParallelType.mesh_x)
    return fd


def shard_of(fd: FusionDefinition, whole: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of the first input."""
    tv = fd.fusion.inputs[0]
    assert isinstance(tv, TensorView)
    return shard_tensor(whole, tv)


@pytest.mark.finding("reshape Float extent")
def test_ranks_agree_on_a_float_extent() -> None:
    whole = {n: torch.randn(4, n, generator=torch.Generator().manual_seed(n)) for n in (12, 8, 10)}

    def run(sizes: Sequence[tuple[int, float]]) -> None:
        fd = sharded()
        for n, s in sizes:
            mine = shard_of(fd, whole[n])
            y, z = fd.execute([mine, s])
            assert torch.equal(y, mine.reshape(2, int(s), -1))
            want = whole[n].double().reshape(4, int(s), -1).exp().sum(0)
            torch.testing.assert_close(z.double(), want, rtol=1e-5, atol=1e-5)
        with pytest.raises(InputError, match=r"2\.5 is not an integer"):
            fd.execute([shard_of(fd, whole[10]), 2.5])

    with simulate(2) as world:
        world.run(run, [(12, 3.0), (12, 4.0), (8, 4.0), (10, 5.0), (12, 3.0)])


@pytest.mark.finding("reshape Float extent")
def test_ranks_with_other_float_extents_are_told_which() -> None:
    def run() -> None:
        rank = Communicator.instance().rank()
        fd = sharded()
        mine = shard_of(fd, torch.randn(4, 12))
        with pytest.raises(InputError, match=r"input 1, f\d+ is 3\.0 on ranks \(0\)"):
            fd.execute([mine, 3.0 + rank])

    with simulate(2) as world:
        world.run(run)


@pytest.mark.finding("reshape Float extent")
def test_a_multi_device_executor_takes_float_extents() -> None:
    def run() -> None:
        with FusionDefinition() as fd:
            x = fd.define_tensor([2, -1], contiguity=True)
            s = fd.define_scalar(dtype=DataType.Float)
            y = fd.ops.reshape(x, [2, s, fd.ops.div(x.size(1), s)])
            z = fd.ops.set(y)
            fd.add_output(z)
            for tv in (x, y, z):
                tv.set_device_mesh(MESH)
            for tv in (x, y):
                tv.axis(0).parallelize(ParallelType.mesh_x)
        executor = MultiDeviceExecutor(fd.fusion)
        for s, n in ((3.0, 12), (4.0, 12), (4.0, 8)):
            whole = torch.arange(2.0 * n).reshape(2, n)
            (out,) = executor.run([shard_of(fd, whole), s])
            assert torch.equal(out, whole.reshape(2, int(s), -1))

    with simulate(2) as world:
        world.run(run)
