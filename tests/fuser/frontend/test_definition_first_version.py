"""Programs that the first version computed wrongly or rejected: F1 to F59 of `tests/findings.md`.

Findings about jobs, the kernel cache and the command line are tested next to those units.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest
import torch

from fuser import DataType, FusionDefinition, ParallelType, multidevice
from fuser.support import options as fuser_options
from fuser.support import options as option_names
from fuser.support.errors import (
    FuserError,
    InputError,
)
from tests.support.counted_calls import calls_of
from tests.support.limits import HANG_S

pytestmark = pytest.mark.from_text

X = ParallelType.mesh_x
OPTIONS: list[list[str]] = [[], ["checked"], ["schedules_for(h200)"]]
every_way = pytest.mark.parametrize("options", OPTIONS, ids=lambda o: o[0] if o else "plain")


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(
    define: Callable[[FusionDefinition], object],
    inputs: Sequence[Any],
    *want: torch.Tensor,
    options: Sequence[str] = (),
    rtol: float = 1e-5,
    atol: float = 1e-5,
) -> None:
    """Runs a program twice and compares with values in float64."""
    with FusionDefinition() as fd:
        define(fd)
    for _ in range(2):
        found = fd.execute(list(inputs), _enable_options=list(options))
        assert len(found) == len(want)
        for got, expected in zip(found, want, strict=True):
            assert got.shape == expected.shape
            if got.is_floating_point():
                got = got.double()
            torch.testing.assert_close(got, expected, rtol=rtol, atol=atol, equal_nan=True)


def on_ranks(body: Callable[[int], None], size: int = 2) -> None:
    """Runs a program on simulated ranks."""
    with multidevice.simulate(size) as world:
        world.run(lambda: body(multidevice.Communicator.instance().rank()))


# ------------------------------------------------------------------ memory and values
@pytest.mark.finding("F1")
@every_way
def test_expanded_results_stay_in_their_buffers(options: list[str]) -> None:
    t, e = randn(5, 16), randn(5, 1, 3).expand(5, 4, 3)

    def expanded(fd: FusionDefinition) -> None:
        x = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.expand(fd.ops.broadcast(x, [True, False, False]), [3, -1, -1]))

    def added(fd: FusionDefinition) -> None:
        x = fd.define_tensor([-1, -1, -1], contiguity=[True, None, True])
        fd.add_output(fd.ops.add(x, 1.0))

    check(expanded, [t], t.double().expand(3, 5, 16), options=options)
    check(added, [e], e.double() + 1, options=options)


@pytest.mark.finding("F1")
def test_an_expanded_tensor_is_gathered() -> None:
    whole = randn(4, 1, 3).expand(4, 5, 3)
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 5, 3], contiguity=[True, None, True])
        y = fd.ops.set(x)
        for tv in (x, y):
            tv.set_device_mesh(multidevice.DeviceMesh([0, 1]))
        x.outer_split(0, 2)
        x.axis(0).parallelize(X)
        fd.add_output(y)
    on_ranks(lambda rank: torch.testing.assert_close(fd.execute([whole[2 * rank :][:2]])[0], whole))


def check_ranks_of_other_extents() -> None:
    """Ranks with different extents: in a row-parallel linear and an allgather, every rank reports
    both extents."""
    rank = multidevice.Communicator.instance().rank()
    mesh = multidevice.DeviceMesh([0, 1])
    with FusionDefinition() as product:
        x = product.define_tensor([-1, 32], contiguity=True)
        w = product.define_tensor([16, 32], contiguity=True)
        y = product.ops.linear(x, w)
        for tv in (x, w):
            tv.set_device_mesh(mesh)
            tv.outer_split(1, 2)
            tv.axis(1).parallelize(X)
        y.set_device_mesh(mesh)
        product.add_output(y)
    with FusionDefinition() as gather:
        x = gather.define_tensor([-1, 2], contiguity=True)
        y = gather.ops.set(x)
        for tv in (x, y):
            tv.set_device_mesh(mesh)
        x.outer_split(0, 2)
        x.axis(0).parallelize(X)
        gather.add_output(y)
    for _ in range(2):
        with pytest.raises(InputError, match=r"extent 8 on ranks .0. and 9 on ranks .1. on axis 0"):
            product.execute([torch.ones(8 + rank, 16), torch.ones(16, 16)])
        # Rows of 4 and 3 are the blocks of 7 rows; rows of 3 and 4 are the blocks of no number.
        assert gather.execute([torch.ones(4 - rank, 2)])[0].shape == (7, 2)
        with pytest.raises(InputError, match="along axis 0: 3 on rank 0, 4 on rank 1"):
            gather.execute([torch.ones(3 + rank, 2)])
        assert gather.execute([torch.ones(3, 2)])[0].shape == (6, 2)


@pytest.mark.finding("F2")
def test_other_extents_on_simulated_ranks_are_refused_on_all() -> None:
    on_ranks(lambda rank: check_ranks_of_other_extents())


@pytest.mark.finding("F2")
@pytest.mark.mpi(min_size=2)
def test_other_extents_under_mpirun_are_refused_on_all(comm: multidevice.Communicator) -> None:
    if comm.size() == 2:
        check_ranks_of_other_extents()


@pytest.mark.finding("F3")
@every_way
@pytest.mark.parametrize("n", [-5, -1, 0, 3])
def test_integer_scalars_may_be_negative(n: int, options: list[str]) -> None:
    x = torch.arange(4)

    def define(fd: FusionDefinition) -> None:
        t, s = fd.define_tensor([-1], dtype=DataType.Int), fd.define_scalar(None, DataType.Int)
        four = fd.ops.add(fd.ops.mul(s, 4), 1)
        for value in (
            fd.ops.maximum(s, 0),
            fd.ops.minimum(s, 1),
            fd.ops.div(four, 4),
            fd.ops.mod(four, 4),
        ):
            fd.add_output(fd.ops.add(t, value))

    quotient, rest = int((4 * n + 1) / 4), int(math.fmod(4 * n + 1, 4))
    want = [x + max(n, 0), x + min(n, 1), x + quotient, x + rest]
    check(define, [x, n], *want, options=options)


@pytest.mark.finding("F4")
def test_a_stream_axis_is_computed_in_steps() -> None:
    a, b = randn(4, 5), randn(5, 6)
    with FusionDefinition() as fd:
        x, y = (fd.define_tensor(list(t.shape), contiguity=True) for t in (a, b))
        out = fd.ops.matmul(x, y)
        out.outer_split(1, 3)
        out.axis(1).parallelize(ParallelType.stream)
        fd.add_output(out)
    (got,) = fd.execute([a, b])
    torch.testing.assert_close(got.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)
    assert "FOR" in str(fd.fec.host_program()).upper()


@pytest.mark.finding("F4")
def test_a_stream_axis_is_not_merged_with_a_serial_one() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 6])
        x.axis(0).parallelize(ParallelType.stream)
        with pytest.raises(FuserError, match=r"(?i)stream"):
            x.merge(0, 1)


@pytest.mark.finding("F5")
def test_outputs_without_gradients_are_told() -> None:
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.neg(fd.define_tensor([-1])))
    with pytest.warns(UserWarning, match="requires grad"):
        fd.execute([torch.ones(3, requires_grad=True)])


@pytest.mark.finding("F6")
@every_way
def test_inputs_share_an_extent_of_0(options: list[str]) -> None:
    def added(fd: FusionDefinition) -> None:
        x, y = (fd.define_tensor([-1, -1]) for _ in range(2))
        fd.add_output(fd.ops.add(x, y))

    def multiplied(fd: FusionDefinition) -> None:
        x, y = (fd.define_tensor([-1, -1]) for _ in range(2))
        fd.add_output(fd.ops.matmul(x, y))

    none = torch.zeros(0, 3)
    check(added, [none, none], none.double(), options=options)
    check(multiplied, [none.t()[:2], none], torch.zeros(2, 3).double(), options=options)


@pytest.mark.finding("F7")
@every_way
@pytest.mark.parametrize("sizes", [[-1, -1], [6, 8]], ids=str)
def test_a_reduction_is_expanded_again(sizes: list[int], options: list[str]) -> None:
    def define(fd: FusionDefinition) -> None:
        t = fd.define_tensor(sizes, contiguity=True)
        total = fd.ops.broadcast_in_dim(fd.ops.sum(t, 1), [t.size(0), t.size(1)], [0])
        fd.add_output(fd.ops.mul(t, total))

    t = randn(6, 8)
    wide = t.double()
    check(define, [t], wide * wide.sum(1, keepdim=True), options=options)


@pytest.mark.finding("F8")
@pytest.mark.finding("F56")
@every_way
def test_a_reduction_is_reduced(options: list[str]) -> None:
    t = randn(6, 8)

    def define(fd: FusionDefinition) -> None:
        x = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.sum(fd.ops.sum(x, 1), 0))
        fd.add_output(fd.ops.sum(fd.ops.exp(fd.ops.sum(x, 1)), 0))
        fd.add_output(fd.ops.min(fd.ops.max(x, 1), 0))
        var, mean = fd.ops.var_mean(fd.ops.sum(x, 1), [0], 1, False)
        fd.add_output(var)
        fd.add_output(mean)

    rows = t.double().sum(1)
    want = [rows.sum(), rows.exp().sum(), t.double().amax(1).amin(), rows.var(), rows.mean()]
    check(define, [t], *want, options=options, rtol=1e-4, atol=1e-4)


@pytest.mark.finding("F9")
@pytest.mark.parametrize("dtype", [DataType.Half, DataType.BFloat16])
def test_a_half_matmul_in_parts_on_one_device(dtype: DataType) -> None:
    kind = torch.half if dtype is DataType.Half else torch.bfloat16
    a, b = randn(4, 6, dtype=kind), randn(6, 5, seed=1, dtype=kind)
    with FusionDefinition() as fd:
        x, y = (fd.define_tensor(list(t.shape), contiguity=True, dtype=dtype) for t in (a, b))
        out = fd.ops.matmul(x, y)
        mesh = multidevice.DeviceMesh([0])
        for tv, axis in ((x, 1), (y, 0)):
            tv.set_device_mesh(mesh)
            tv.outer_split(axis, 1)
            tv.axis(axis).parallelize(X)
        out.set_device_mesh(mesh)
        out.outer_split(2, 1)
        out.axis(2).parallelize(X)
        out.rfactor([3])
        fd.add_output(out)
    (got,) = fd.execute([a, b])
    torch.testing.assert_close(got.double(), a.double() @ b.double(), rtol=2e-2, atol=2e-2)


@pytest.mark.finding("F10")
def test_long_chains_of_ops() -> None:
    def define(fd: FusionDefinition) -> None:
        x = fd.define_tensor([-1])
        for _ in range(1000):
            x = fd.ops.add(x, 1.0)
        fd.add_output(x)

    check(define, [torch.zeros(4)], torch.full((4,), 1000.0).double())


@pytest.mark.finding("F11")
@every_way
def test_shifts_and_signs_of_scalars(options: list[str]) -> None:
    x = torch.tensor([-8, -1, 0, 5, 1 << 40])

    def define(fd: FusionDefinition) -> None:
        t, n = fd.define_tensor([-1], dtype=DataType.Int), fd.define_scalar(None, DataType.Int)
        s = fd.define_scalar(None, DataType.Double)
        fd.add_output(fd.ops.logical_right_shift(t, 2))
        fd.add_output(fd.ops.logical_right_shift(t, n))
        y = fd.ops.cast(t, DataType.Double)
        fd.add_output(fd.ops.add(y, fd.ops.nextafter(s, 2.0)))
        fd.add_output(fd.ops.where(fd.ops.signbit(s), y, fd.ops.neg(y)))

    def shifted(k: int) -> torch.Tensor:
        return torch.tensor([(int(v) % (1 << 64)) >> k for v in x])

    after = torch.nextafter(torch.tensor(-1.5).double(), torch.tensor(2.0).double())
    want = [shifted(2), shifted(3), x.double() + after, x.double()]
    check(define, [x, 3, -1.5], *want, options=options, rtol=0, atol=0)


@pytest.mark.finding("F12")
def test_reshape_of_a_contiguous_input_is_a_view() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 6], contiguity=True)
        fd.add_output(fd.ops.reshape(x, [x.size(0), 2, 3]))
    t = randn(4, 6)
    for _ in range(2):
        (got,) = fd.execute([t])
        assert got.data_ptr() == t.data_ptr() and torch.equal(got, t.view(4, 2, 3))


@pytest.mark.finding("F13")
@every_way
def test_rotary_embedding_of_a_symbolic_head(options: list[str]) -> None:
    q, angles = randn(2, 3, 5, 8), randn(5, 8, seed=1)

    def define(fd: FusionDefinition) -> None:
        x = fd.define_tensor([-1] * 4, contiguity=True)
        cos, sin = (fd.define_tensor([-1] * 2, contiguity=True) for _ in range(2))
        b, h, s, d = (x.size(i) for i in range(4))
        half = fd.ops.div(d, 2)
        zero = [0] * 3
        first = fd.ops.slice(x, [*zero, 0], [b, h, s, half])
        second = fd.ops.slice(x, [*zero, half], [b, h, s, d])
        turned = fd.ops.cat([fd.ops.neg(second), first], dim=-1)
        fd.add_output(fd.ops.add(fd.ops.mul(x, cos), fd.ops.mul(turned, sin)))

    wide, turn = q.double(), angles.double()
    turned = torch.cat([-wide[..., 4:], wide[..., :4]], -1)
    cos, sin = turn.cos().float(), turn.sin().float()
    want = wide * cos.double() + turned * sin.double()
    check(define, [q, cos, sin], want, options=options)


@pytest.mark.finding("F14")
def test_validate_accepts_what_torch_computes() -> None:
    t = randn(16, 64, dtype=torch.bfloat16)
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True, dtype=DataType.BFloat16)
        y = fd.ops.sum(fd.ops.mul(fd.ops.cast(x, DataType.Float), 3.0), 1)
        fd.add_output(fd.ops.cast(y, DataType.BFloat16))
    fd.validate([t], reference_outputs=[(t.float() * 3).sum(1).bfloat16()])
    fd.validate([t])


@pytest.mark.finding("F15")
def test_options_have_an_effect_or_are_refused() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        y = fd.ops.segment_set(fd.ops.exp(x))
        fd.add_output(fd.ops.neg(y))
    fd.execute([randn(3, 4)])
    assert str(fd.fec.host_program()).count("LaunchKernel(") == 2
    with pytest.raises(FuserError, match="no_such_option"):
        fd.execute([randn(3, 4)], _disable_options=["no_such_option"])
    # torch computes matmuls: nvFuser's option is accepted, and documented as having no effect.
    assert fuser_options.settings((), ["matmul_expr_eval"]) is fuser_options.settings()
    assert "always evaluated by torch" in option_names.NO_EFFECT["DISABLE"]["matmul_expr_eval"]


@pytest.mark.finding("F16")
@every_way
def test_a_split_by_the_user_runs(options: list[str]) -> None:
    def define(fd: FusionDefinition) -> None:
        x = fd.define_tensor([-1, -1], contiguity=True)
        y = fd.ops.exp(x)
        y.split(1, 4)
        fd.add_output(y)

    t = randn(3, 8)
    check(define, [t], t.double().exp(), options=options)


@pytest.mark.finding("F17")
def test_results_of_channels_last_inputs_are_channels_last() -> None:
    with FusionDefinition() as fd:
        x = fd.from_pytorch(t := randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
        fd.add_output(fd.ops.relu(x))
    (got,) = fd.execute([t])
    assert got.stride() == t.stride() and torch.equal(got, t.relu())


# ------------------------------------------------------------------ words
@pytest.mark.finding("F18")
def test_mistakes_in_definitions_are_typed_and_say_what_to_write() -> None:
    with FusionDefinition() as fd:
        scalar, x = fd.define_tensor([]), fd.define_tensor([-1, -1])
        cases: list[tuple[Callable[[], object], str]] = [
            (lambda: fd.ops.squeeze(scalar, [0]), "squeeze"),
            (lambda: fd.define_tensor(shape=[10.0]), "shape"),  # pyright: ignore
            (lambda: fd.define_tensor(shape=[2**63]), "9223372036854775808|2\\*\\*63|2\\^63"),
            (lambda: x.axis(0).parallelize("mesh_x"), "parallelize|ParallelType"),  # pyright: ignore
            (lambda: getattr(fd.ops, "no_such_" + "op")(x), "no_such_op"),
        ]
        for call, words in cases:
            with pytest.raises(FuserError, match=words):
                call()
        assert fd.define_tensor([2], dtype=torch.float32).dtype() is DataType.Float  # pyright: ignore
        assert (x + 1.0).ndim == 2 and fd.ops.gelu(x).ndim == 2
        with FusionDefinition() as other:
            y = other.define_tensor([-1, -1])
            with pytest.raises(FuserError, match="definition"):
                fd.ops.add(x, y)
            other.add_output(other.ops.neg(y))
        fd.add_output(fd.ops.neg(x))
    with pytest.raises(FuserError, match=r"list|\["):
        other.execute(torch.ones(2, 2))  # pyright: ignore


@pytest.mark.finding("F19")
def test_validate_definition_after_a_run_and_cpu_scalars(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a GPU, a CPU scalar is an ordinary tensor.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with FusionDefinition() as fd:
        s = fd.from_pytorch(torch.tensor(2.0))
        x = fd.define_tensor([-1])
        fd.add_output(fd.ops.mul(x, s))
    assert s.is_cpu_scalar
    (got,) = fd.execute([torch.tensor(2.0), torch.ones(3)])
    assert got.tolist() == [2.0] * 3
    fd.validate_definition()


@pytest.mark.finding("F20")
def test_errors_of_shardings_name_the_users_line() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 4])
        x.set_device_mesh(multidevice.DeviceMesh([0, 1]))
        x.outer_split(0, 2)
        x.axis(0).parallelize(X)
        fd.add_output(fd.ops.set(x))

    def body(rank: int) -> None:
        fd.execute([torch.ones(2 + rank, 4)])  # blocks of 5 rows are 3 and 2 rows

    with pytest.raises(InputError, match=r"test_definition_first_version\.py:\d+"):
        on_ranks(body)


@pytest.mark.finding("F23")
@pytest.mark.finding("F51")
def test_caches_of_sizes_are_bounded() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1])
        fd.add_output(fd.ops.neg(x))
    for n in range(1, 700):
        fd.execute([torch.zeros(n)])
    assert len(fd.fec._by_signature) < 600
    with FusionDefinition() as counted:
        n = counted.define_scalar(None, DataType.Int)
        counted.add_output(counted.ops.add(counted.define_tensor([-1]), n))
    for k in range(700):
        counted.execute([k, torch.zeros(4)])
    assert len(counted.fec._by_signature) < 600


@pytest.mark.finding("F25")
def test_steady_calls_of_library_ops_fail_at_nothing() -> None:
    """Repeated calls raise no internal error that is caught, and trigger no compilation by
    torch."""
    whole, weight = randn(4, 6), randn(5, 6, seed=1)
    with FusionDefinition() as fd:
        x, w = (fd.define_tensor(list(t.shape), contiguity=True) for t in (whole, weight))
        bias = fd.define_tensor([5], contiguity=True)
        out = fd.ops.linear(x, w, bias)
        mesh = multidevice.DeviceMesh([0, 1])
        for tv in (x, w):
            tv.set_device_mesh(mesh)
            tv.outer_split(1, 2)
            tv.axis(1).parallelize(X)
        for tv in (bias, out):
            tv.set_device_mesh(mesh)
        fd.add_output(out)
    wanted = whole.double() @ weight.double().t() + 1

    def body(rank: int) -> None:
        inputs = [t.chunk(2, 1)[rank].contiguous() for t in (whole, weight)]
        raised: list[str] = []

        def note(frame: FrameType, event: str, function: Any) -> None:
            if event == "c_exception":
                raised.append(function.__qualname__)

        for k in range(4):
            sys.setprofile(note if k == 3 else None)
            try:
                (got,) = fd.execute([*inputs, torch.ones(5)])
            finally:
                sys.setprofile(None)
            torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
        assert not raised

    on_ranks(body)
    program = """
import sys, torch
from fuser import FusionDefinition
with FusionDefinition() as fd:
    x, w, b = (fd.define_tensor([-1] * n) for n in (2, 2, 1))
    fd.add_output(fd.ops.linear(x, w, b))
fd.execute([torch.ones(2, 3), torch.ones(4, 3), torch.ones(4)])
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=HANG_S)


# ------------------------------------------------------------------ fuzzing and injected faults
@pytest.mark.finding("F26")
@pytest.mark.finding("F59")
@pytest.mark.parametrize("cut", [None, 1])
def test_a_transposed_shard_is_sent_in_the_order_of_its_axes(cut: int | None) -> None:
    whole = randn(4, 6)
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 6], contiguity=True)
        t = fd.ops.permute(x, [1, 0])
        for tv in (x, t):
            tv.set_device_mesh(multidevice.DeviceMesh([0, 1]))
        x.outer_split(1, 2)
        x.axis(1).parallelize(X)
        if cut is not None:
            t.outer_split(cut, 2)
            t.axis(cut).parallelize(X)
        fd.add_output(t)

    def body(rank: int) -> None:
        for _ in range(2):
            (got,) = fd.execute([whole.chunk(2, 1)[rank].contiguous()])
            want = whole.t() if cut is None else whole.t().chunk(2, cut)[rank]
            assert torch.equal(got, want)

    on_ranks(body)


@pytest.mark.finding("F27")
@every_way
@pytest.mark.parametrize("name", ["max", "min"])
def test_reductions_keep_nan(name: str, options: list[str]) -> None:
    t = randn(33, 7, 8).permute(1, 0, 2)
    t[1, 2, 1] = math.nan

    def define(fd: FusionDefinition) -> None:
        x = fd.define_tensor([-1, -1, -1], contiguity=False)
        fd.add_output(getattr(fd.ops, name)(x, dims=[1, 2]))

    check(define, [t], getattr(t.double(), f"a{name}")((1, 2)), options=options)


@pytest.mark.finding("F28")
@every_way
@pytest.mark.parametrize("has_product", [False, True])
def test_outputs_beside_an_update_see_the_old_value(has_product: bool, options: list[str]) -> None:
    """The old value is read in the kernel of the update, and through a view and a library op."""
    with FusionDefinition() as fd:
        a, c, x = (fd.define_tensor([-1, 4], contiguity=True) for _ in range(3))
        fd.add_output(fd.ops.minimum(a, c), x)
        fd.add_output(fd.ops.add(x, 1.0))
        turned = fd.ops.reshape(x, [4, x.size(0)])
        fd.add_output(fd.ops.matmul(x, turned) if has_product else fd.ops.add(x, a))
    left, right, given = (randn(6, 4, seed=k) for k in range(3))
    wide = given.double()
    want = wide @ wide.view(4, 6) if has_product else wide + left
    for _ in range(3):
        target = given.clone()
        added, other = fd.execute([left, right, target], _enable_options=options)
        torch.testing.assert_close(added, given + 1)
        torch.testing.assert_close(other.double(), want, rtol=1e-5, atol=1e-5)
        assert torch.equal(target, torch.minimum(left, right))


@pytest.mark.finding("F29")
@every_way
def test_lazy_signs_are_those_of_the_values(options: list[str]) -> None:
    z = torch.complex(randn(5), randn(5, seed=1))

    def define(fd: FusionDefinition) -> None:
        fd.add_output(fd.ops.mul(fd.define_tensor([-1], contiguity=False), 2.0))

    for lazy in (z.conj().imag, torch._neg_view(z.real)):  # pyright: ignore[reportPrivateImportUsage]
        assert lazy.is_neg()
        check(define, [lazy], 2 * lazy.clone().double(), options=options)


@pytest.mark.finding("F30")
def test_a_tensor_without_its_memory_is_refused() -> None:
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.neg(fd.define_tensor([-1])))
    t = torch.ones(64)
    fd.execute([t])
    t.untyped_storage().resize_(0)
    with pytest.raises(InputError, match="input 0"):
        fd.execute([t])


@pytest.mark.finding("F31")
@pytest.mark.finding("F46")
def test_numbers_that_fit_nothing_are_refused_by_name() -> None:
    def run(dtype: DataType, value: object) -> None:
        with FusionDefinition() as fd:
            s = fd.define_scalar(None, dtype)
            fd.add_output(fd.ops.mul(fd.define_tensor([-1], dtype=dtype), s))
        kind = {DataType.Int32: torch.int32, DataType.Int: torch.int64}.get(dtype, torch.float32)
        fd.execute([value, torch.ones(2, dtype=kind)])

    cases: list[tuple[DataType, object]] = [
        (DataType.Int32, 2**40),
        (DataType.Int, 2**63),
        (DataType.Float, 1e300),
        (DataType.Float, 10**400),
    ]
    for dtype, value in cases:
        with pytest.raises(FuserError, match="0"):
            run(dtype, value)
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.neg(fd.define_tensor([-1])))
    for device in (300, -1, "abc"):
        with pytest.raises(FuserError, match="device"):
            fd.execute([torch.ones(2)], device=device)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)])
    for given in ([nested], None, "x", 3):
        with pytest.raises(FuserError):
            fd.execute(given)  # pyright: ignore
    with pytest.raises(FuserError):
        fd.execute([torch.ones(2)], _enable_options=None)  # pyright: ignore


@pytest.mark.finding("F46")
def test_sizes_and_divisors_of_a_call_are_refused_by_name() -> None:
    with FusionDefinition() as fd:
        n = fd.define_scalar(None, DataType.Int)
        fd.add_output(fd.ops.full([n], 1.0, DataType.Float))
    for size in (-1, 2**62):
        with pytest.raises((FuserError, MemoryError), match=str(size)):
            fd.execute([size])
    with FusionDefinition() as divided:
        n = divided.define_scalar(None, DataType.Int)
        t = divided.define_tensor([-1], dtype=DataType.Int)
        divided.add_output(divided.ops.add(t, divided.ops.mod(7, n)))
    with pytest.raises(FuserError, match="0"):
        divided.execute([0, torch.ones(2, dtype=torch.long)])
    with FusionDefinition() as update:
        x = update.define_tensor([-1], contiguity=False)
        update.add_output(update.ops.add(x, 1.0), x)
    with pytest.raises(InputError, match="separate memory for every element"):
        update.execute([torch.ones(1).expand(4)])


@pytest.mark.finding("F33")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_sharded_reduction_over_one_local_element(options: list[str]) -> None:
    whole = randn(6, 2, 2)
    with FusionDefinition() as fd:
        x = fd.define_tensor([6, 2, 2], contiguity=True)
        x.set_device_mesh(multidevice.DeviceMesh([0, 1]))
        x.outer_split(2, 2)
        x.axis(2).parallelize(X)
        squares = fd.ops.sum(fd.ops.mul(x, x), dims=[2], keepdim=True)
        fd.add_output(fd.ops.mul(x, fd.ops.rsqrt(fd.ops.add(squares, 1.0))))
    wide = whole.double()
    want = wide * (wide.square().sum(2, keepdim=True) + 1).rsqrt()

    def body(rank: int) -> None:
        (got,) = fd.execute([whole[..., rank : rank + 1].contiguous()], _enable_options=options)
        torch.testing.assert_close(got.double(), want[..., rank : rank + 1], rtol=1e-5, atol=1e-5)

    on_ranks(body)


@pytest.mark.finding("F34")
@every_way
def test_a_mean_is_an_operand_of_matmul(options: list[str]) -> None:
    t, y = randn(4, 6), randn(4, seed=1)

    def define(fd: FusionDefinition) -> None:
        x, v = fd.define_tensor([-1, -1], contiguity=True), fd.define_tensor([-1], contiguity=True)
        var, mean = fd.ops.var_mean(x, [1], 1, False)
        fd.add_output(fd.ops.matmul(mean, v))
        fd.add_output(var)

    wide = t.double()
    check(define, [t, y], wide.mean(1) @ y.double(), wide.var(1), options=options)


@pytest.mark.finding("F35")
@every_way
def test_a_sum_and_a_variance_over_units(options: list[str]) -> None:
    t = randn(3, 4, 5, 1, 1)

    def define(fd: FusionDefinition) -> None:
        x = fd.define_tensor([-1, -1, -1, 1, 1], contiguity=True)
        fd.add_output(fd.ops.sum(x, [0, 1, 2, 3]))
        for value in fd.ops.var_mean(x, [0, 1, 2, 3], 0, True):
            fd.add_output(value)

    wide, axes = t.double(), (0, 1, 2, 3)
    var = wide.var(axes, correction=0, keepdim=True)
    check(define, [t], wide.sum(axes), var, wide.mean(axes, keepdim=True), options=options)


@pytest.mark.finding("F36")
@pytest.mark.finding("F57")
@every_way
def test_counts_of_welford_are_numbers(options: list[str]) -> None:
    t = randn(4, 6)

    def define(fd: FusionDefinition) -> None:
        x = fd.define_tensor([-1, -1], contiguity=True)
        mean, squares, count = fd.ops.welford(x, [1])
        fd.add_output(fd.ops.sub(fd.ops.add(mean, count), 1))
        fd.add_output(fd.ops.sub(count, 1))
        fd.add_output(fd.ops.fmod(count, 4))
        fd.add_output(squares)

    wide, six = t.double(), torch.full((4,), 6)
    squares = wide.var(1, correction=0) * 6
    check(define, [t], wide.mean(1) + 5, six - 1, six % 4, squares, options=options)


@pytest.mark.finding("F37")
@every_way
def test_a_reshape_of_computed_sizes_is_reshaped(options: list[str]) -> None:
    given = randn(2, 37, 12)

    def define(fd: FusionDefinition) -> None:
        x = fd.define_tensor([-1, -1, -1], contiguity=True)
        n = fd.ops.div(x.size(2), 6)
        t = fd.ops.reshape(x, [1, x.size(0), 37, n, 2, 3])
        last = [t.size(1), 1, 37, fd.ops.mul(t.size(3), 2), 3]
        fd.add_output(fd.ops.neg(fd.ops.reshape(t, last)))

    check(define, [given], -given.double().view(2, 1, 37, 4, 3), options=options)


@pytest.mark.finding("F38")
@every_way
def test_what_a_slice_or_pad_computed_meets_an_input(options: list[str]) -> None:
    t, y, z = randn(7), randn(4, seed=1), randn(9, seed=2)

    def define(fd: FusionDefinition) -> None:
        x, a, b = (fd.define_tensor([-1], contiguity=True) for _ in range(3))
        fd.add_output(fd.ops.add(fd.ops.slice(x, [0], [4]), a))
        fd.add_output(fd.ops.add(fd.ops.pad(x, [1, 1]), b))
        fd.add_output(fd.ops.add(fd.ops.cat([x, a], 0), 1.0))

    wide = t.double()
    padded = torch.nn.functional.pad(wide, [1, 1])
    joined = torch.cat([wide, y.double()]) + 1
    check(define, [t, y, z], wide[:4] + y.double(), padded + z.double(), joined, options=options)


@pytest.mark.finding("F39")
@every_way
def test_an_empty_input_is_padded(options: list[str]) -> None:
    def define(fd: FusionDefinition) -> None:
        x = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.pad(x, [1, 2], 3.0))

    want = torch.full((2, 3), 3.0).double()
    check(define, [torch.zeros(2, 0)], want, options=options)


@pytest.mark.finding("F40")
@pytest.mark.finding("F56")
@every_way
def test_the_outer_product_of_an_input_with_itself(options: list[str]) -> None:
    t = torch.arange(1, 6)

    def define(fd: FusionDefinition) -> None:
        x = fd.define_tensor([-1], dtype=DataType.Int)
        fd.add_output(fd.ops.mod(fd.ops.broadcast_in_dim(x, [1, x.size(0), 1], [1]), x))

    check(define, [t], torch.fmod(t.view(1, 5, 1), t), options=options)


@pytest.mark.finding("F41")
@pytest.mark.finding("F59")
def test_shardings_of_reshapes_whose_extents_divide() -> None:
    whole = randn(4, 8)
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 8], contiguity=True)
        y = fd.ops.reshape(x, [4, 2, 4])
        z = fd.ops.reshape(y, [32])
        x.set_device_mesh(multidevice.DeviceMesh([0, 1]))
        x.outer_split(1, 2)
        x.axis(1).parallelize(X)
        fd.add_output(fd.ops.neg(y))
        fd.add_output(fd.ops.neg(z))

    def body(rank: int) -> None:
        found = fd.execute([whole.chunk(2, 1)[rank].contiguous()])
        told = fd.fec.get_output_shardings()
        for got, want, sharding in zip(
            found, (whole.view(4, 2, 4), whole.view(32)), told, strict=True
        ):
            axis = sharding.axis_sharded_on(X)
            want = want if axis == -1 else want.chunk(2, axis)[rank]
            assert torch.equal(got, -want)

    on_ranks(body)


@pytest.mark.finding("F47")
def test_arguments_of_wrong_kinds_are_refused_in_words() -> None:
    wrong: Any = object()
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1])
        cases: list[Callable[[], object]] = [
            lambda: fd.from_pytorch(wrong),
            lambda: x.reorder(wrong),
            lambda: x.swizzle1d(wrong, wrong),
            lambda: fd.ops.cast(x, wrong),
            lambda: fd.ops.iota(wrong, 0, 1, DataType.Int),
            lambda: fd.ops.sum(x, wrong),
            lambda: fd.define_scalar(wrong),
            lambda: fd.add_output(wrong),
        ]
        for call in cases:
            with pytest.raises(FuserError):
                call()
        fd.add_output(fd.ops.neg(x))
    mesh: Any = multidevice.DeviceMesh
    with pytest.raises(FuserError):
        mesh("ab")


@pytest.mark.finding("F49")
def test_long_vectors_take_calls_in_proportion() -> None:
    def calls(n: int) -> int:
        with FusionDefinition() as fd:
            found = calls_of(lambda: fd.define_vector(n)).total()
            fd.add_output(fd.ops.neg(fd.define_tensor([-1])))
        return found

    assert calls(1000) < 5 * calls(250)


@pytest.mark.finding("F52")
def test_an_input_that_is_returned_and_updated_shows_its_update() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        fd.add_output(fd.ops.add(x, 1.0), x)
        fd.add_output(x)
        fd.add_output(fd.ops.mul(x, 2.0))
    t = torch.ones(3)
    same, doubled = fd.execute([t])
    assert same.data_ptr() == t.data_ptr() and t.tolist() == [2.0] * 3
    assert doubled.tolist() == [2.0] * 3


# ------------------------------------------------------------------ schedules of an H200
H200 = ["schedules_for(h200)"]


@pytest.mark.finding("F54")
def test_schedules_of_a_gpu_take_pads_and_products_of_odd_layouts() -> None:
    t = randn(1, 36).t()

    def padded(fd: FusionDefinition) -> None:
        x = fd.define_tensor([36, 1], contiguity=False)
        fd.add_output(fd.ops.pad(x, [0, 3]))
        fd.add_output(fd.ops.max(x, dims=[1], keepdim=True))

    wide = t.double()
    check(padded, [t], torch.nn.functional.pad(wide, [0, 3]), wide, options=H200)
    i = torch.arange(7).view(7, 1).t()

    def with_ones(fd: FusionDefinition) -> None:
        x = fd.define_tensor([1, 7], contiguity=False, dtype=DataType.Int)
        fd.add_output(fd.ops.pad(x, [2, 3, 1, 4], 1))

    check(with_ones, [i], torch.nn.functional.pad(i, [2, 3, 1, 4], value=1), options=H200)
    gaps, other = randn(1, 2, 37, 16)[..., ::2], randn(1, 2, 17, 8, seed=1)

    def joined(fd: FusionDefinition) -> None:
        x = fd.define_tensor([1, 2, 37, 8], contiguity=False)
        y = fd.define_tensor([1, 2, 17, 8], contiguity=True)
        fd.add_output(fd.ops.cat([fd.ops.silu(x), y, fd.ops.silu(x)], dim=2))

    silu = torch.nn.functional.silu(gaps.double())
    check(joined, [gaps, other], torch.cat([silu, other.double(), silu], 2), options=H200)
    a, b = randn(3, 2, 3, 4), randn(3, 1, 1, 1, seed=1)

    def products(fd: FusionDefinition) -> None:
        x = fd.define_tensor([-1] * 4, contiguity=True)
        y = fd.define_tensor([-1, 1, 1, 1], contiguity=True)
        fd.add_output(fd.ops.add(fd.ops.prod(x, dims=[-3, -2, -1], keepdim=True), y))

    want = a.double().flatten(1).prod(1).view(3, 1, 1, 1) + b.double()
    check(products, [a, b], want, options=H200)


@pytest.mark.finding("F55")
def test_schedules_of_a_gpu_take_narrow_accesses() -> None:
    memory = randn(40, dtype=torch.float64)
    t = memory[1:25].view(6, 4)

    def reshaped(fd: FusionDefinition) -> None:
        x = fd.define_tensor([-1, -1], contiguity=True, dtype=DataType.Double)
        y = fd.ops.slice(x, [0, 0], [6, 4])
        fd.add_output(fd.ops.reshape(y, [24]))
        fd.add_output(fd.ops.reshape(y, [8, 1, 3]))

    check(reshaped, [t], t.reshape(24), t.reshape(8, 1, 3), options=H200)
    row = randn(1, 64)

    def beyond(fd: FusionDefinition) -> None:
        x = fd.define_tensor([1, -1], contiguity=True)
        fd.add_output(fd.ops.neg(fd.ops.slice(x, [0, 2], [1, 67])))
        fd.add_output(fd.ops.permute(x, [1, 0]))

    check(beyond, [row], -row.double()[:, 2:67], row.double().t(), options=H200)
    small, large = randn(4, 1, 3), randn(7, 8, 3, 40, 3)

    def shaped(fd: FusionDefinition) -> None:
        x, y = (fd.define_tensor(list(v.shape), contiguity=True) for v in (small, large))
        fd.add_output(fd.ops.neg(fd.ops.broadcast(x, [False, False, False, True, True])))
        fd.add_output(fd.ops.neg(fd.ops.reshape(y, [7, 8, 120, 1, 3])))

    want = -small.double()[..., None, None], -large.double().view(7, 8, 120, 1, 3)
    check(shaped, [small, large], *want, options=H200)


@pytest.mark.finding("F57")
def test_schedules_of_a_gpu_take_reductions_of_units() -> None:
    t = randn(1, 5, 1)

    def define(fd: FusionDefinition) -> None:
        x = fd.define_tensor([1, -1, 1], contiguity=True)
        fd.add_output(fd.ops.sum(x, [1]))
        y = fd.ops.broadcast(fd.ops.sum(x, [1]), [False, True, False])
        fd.add_output(fd.ops.add(x, y))
        fd.add_output(fd.ops.add(x, math.inf))

    wide = t.double()
    check(define, [t], wide.sum(1), wide + wide.sum(1, keepdim=True), wide + math.inf, options=H200)
