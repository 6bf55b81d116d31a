"""Random numbers of whole programs: from torch's generator, in every way of running."""

# Ops are called with wrong arguments, and with options from dictionaries.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest
import torch

from fuser import DataType, FusionDefinition
from fuser.frontend import implicit_inputs
from fuser.ir.scalar.constructors import Const
from fuser.support.errors import InputError, UnsupportedError
from hostir import HostIrEvaluator
from multidevice import DeviceMesh, simulate
from tests.support import random_reference as reference
from tests.support.cuts import cut
from tests.support.stand_in_graphs import stand_in

pytestmark = pytest.mark.from_text

D = DataType


def drawing(kind: str = "uniform", *, ops: int = 1) -> FusionDefinition:
    """Defines a program that adds random numbers to x, and returns them as well."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        total = x
        for _ in range(ops):
            made = getattr(fd.ops, kind)(0.0, 1.0, [x.size(0), x.size(1)])
            fd.add_output(made)
            total = fd.ops.add(total, made)
        fd.add_output(total)
    return fd


def keyed(kind: str = "uniform", dtype: DataType = D.Float) -> FusionDefinition:
    """Defines a program whose seed and offset are inputs."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        seed, offset = fd.define_scalar(D.Int), fd.define_scalar(D.Int)
        shape = [x.size(0), x.size(1)]
        make = getattr(fd.ops, kind)
        fd.add_output(make(0.0, 1.0, shape, rng_seed=seed, rng_offset=offset, dtype=dtype))
    return fd


X = torch.zeros(7, 24)


# ------------------------------------------------------------------ numbers
def test_seeds_are_numbers_of_the_call() -> None:
    fd = keyed()
    for seed, offset in ((0, 0), (0, 1), (1, 0), (2**63 - 1, 5), (-1, 2**33), (0, 0)):
        (got,) = fd.execute([X, seed, offset])
        given: dict[str, Any] = {"seed": seed, "offset": offset, "dtype": torch.float32}
        assert torch.equal(got.flatten(), reference.numbers("uniform", 168, (0.0, 1.0), **given))


def test_seeds_are_python_integers() -> None:
    for seed, offset in ((3, 0), (-1, 2**33), (2**63 - 1, np.int64(5))):
        with FusionDefinition() as fd:
            fd.add_output(fd.ops.normal(0.0, 1.0, [7, 24], rng_seed=seed, rng_offset=offset))
        assert torch.equal(fd.execute([])[0], keyed("normal").execute([X, seed, offset])[0])


def test_a_tensor_of_other_rows_begins_alike() -> None:
    fd = keyed()
    rows = [fd.execute([torch.zeros(n, 24), 3, 4])[0] for n in (1, 5, 16)]
    assert all(torch.equal(r, rows[-1][: len(r)]) for r in rows)


@pytest.mark.parametrize("dtype", [D.Float, D.Double, D.Half, D.BFloat16], ids=str)
def test_the_distribution_is_uniform(dtype: DataType) -> None:
    n = 1 << 20
    (u,) = keyed(dtype=dtype).execute([torch.zeros(1 << 10, 1 << 10), 17, 0])
    assert u.min() >= 0 and u.max() < 1
    # Half types round; a number that is rounded to 1 becomes 0.
    rounding = 0.0 if dtype in (D.Float, D.Double) else torch.finfo(u.dtype).eps
    u = u.double().flatten()
    assert abs(u.mean() - 0.5) < 5 / math.sqrt(12 * n) + rounding
    assert abs(u.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / n) + rounding
    # Kolmogorov-Smirnov test: the distance from the distribution.
    ranks = torch.arange(1, n + 1, dtype=torch.float64) / n
    assert (u.sort().values - ranks).abs().max() < 1.95 / math.sqrt(n) + rounding
    # Neighbours come from one Philox block, and must be independent.
    for step in (1, 2, 3, 4, 1024):
        a, b = u[:-step] - u.mean(), u[step:] - u.mean()
        assert abs((a * b).mean() / u.var()) < 5 / math.sqrt(n), step


@pytest.mark.parametrize("dtype", [D.Float, D.Double, D.BFloat16], ids=str)
def test_the_distribution_is_normal(dtype: DataType) -> None:
    n = 1 << 20
    (z,) = keyed("normal", dtype).execute([torch.zeros(1 << 10, 1 << 10), 17, 0])
    z = z.double().flatten()
    assert abs(z.mean()) < 5 / math.sqrt(n) and abs(z.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((z**3).mean()) < 5 * math.sqrt(15 / n)
    assert abs((z**4).mean() - 3) < 5 * math.sqrt(96 / n)
    ranks = torch.arange(1, n + 1, dtype=torch.float64) / n
    rounding = 0.0 if dtype is not D.BFloat16 else torch.finfo(torch.bfloat16).eps
    distance = (torch.special.ndtr(z.sort().values) - ranks).abs().max()
    assert distance < 1.95 / math.sqrt(n) + rounding
    for step in (1, 2, 3, 4, 1024):
        assert abs((z[:-step] * z[step:]).mean()) < 5 / math.sqrt(n), step


def test_what_two_kernels_compute_again_is_the_same() -> None:
    """No memory holds the dropout mask: a kernel of rows and one of columns both compute it."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        kept = fd.ops.cast(fd.ops.lt(fd.ops.rand_like(x), 0.5), D.Float)
        y = fd.ops.mul(x, kept)
        fd.add_output(fd.ops.sum(y, [0]))
        fd.add_output(fd.ops.sum(y, [1]))
        fd.add_output(y)
    x = torch.randint(1, 9, (33, 65)).float()
    columns, rows, y = fd.execute([x])
    assert torch.equal(columns, y.sum(0)) and torch.equal(rows, y.sum(1))
    assert 0.3 < (y != 0).double().mean() < 0.7


# ------------------------------------------------------------------ torch's generator
def test_calls_differ_and_a_seed_repeats_them() -> None:
    fd = drawing(ops=2)
    torch.manual_seed(5)
    first = [fd.execute([X]) for _ in range(40)]
    torch.manual_seed(5)
    again = [fd.execute([X]) for _ in range(40)]
    assert all(
        torch.equal(a, b)
        for p, q in zip(first, again, strict=True)
        for a, b in zip(p, q, strict=True)
    )
    drawn = [float(tensor[0, 0]) for outputs in first for tensor in outputs[:2]]
    assert len(set(drawn)) == 80
    torch.manual_seed(6)
    assert not torch.equal(fd.execute([X])[0], first[0][0])


def test_draws_are_torchs_own() -> None:
    """torch's ops and ours draw from one generator; a saved state restores both."""
    fd = drawing()
    torch.manual_seed(1)
    torch.rand(3)
    state = torch.get_rng_state()
    a = fd.execute([X])[0], torch.rand(3)
    torch.set_rng_state(state)
    b = fd.execute([X])[0], torch.rand(3)
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


def test_torchs_default_device_does_not_matter() -> None:
    fd = drawing()
    torch.manual_seed(1)
    want = fd.execute([X])[0]
    torch.manual_seed(1)
    with torch.device("meta"), torch.inference_mode():
        assert torch.equal(fd.execute([X])[0], want)


def test_numbers_are_written_into_an_input() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.rand_like(x), x)
    x = torch.zeros(7, 24)
    torch.manual_seed(2)
    drawn = [(fd.execute([x]), x.clone())[1] for _ in range(6)]
    torch.manual_seed(2)
    for got in drawn:
        assert torch.equal(got, drawing().execute([X])[0])


def test_ops_draw_in_the_order_of_their_definition() -> None:
    """On the CPU, each call draws one seed, and the ops of a call have the offsets 0, 1, ..."""
    torch.manual_seed(9)
    seed = int(torch.empty((), dtype=torch.int64).random_())
    torch.manual_seed(9)
    outputs = drawing(ops=3).execute([X])[:3]
    for k, got in enumerate(outputs):
        assert torch.equal(got, keyed().execute([X, seed, k])[0])


def test_an_op_that_no_output_needs_draws_too() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        fd.ops.rand_like(x)
        fd.add_output(fd.ops.rand_like(x))
    torch.manual_seed(9)
    second = drawing(ops=2).execute([X])[1]
    torch.manual_seed(9)
    assert torch.equal(fd.execute([X])[0], second)


class _CudaGenerator:
    """A generator with the methods that a program calls on a CUDA generator."""

    device = torch.device("cuda")

    def __init__(self, seed: int) -> None:
        self.seed, self.offset = seed, 0

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


def test_on_cuda_the_nth_call_has_the_nth_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = _CudaGenerator(2**64 - 3)
    monkeypatch.setattr(implicit_inputs, "generator_of", lambda device: generator)
    monkeypatch.setattr(implicit_inputs, "device_of", lambda inputs, device: torch.device("cuda"))
    one, two = (implicit_inputs.Draws.of(drawing(ops=n).fusion) for n in (1, 2))
    assert one is not None and two is not None
    assert [one.take([X], None)[1:] for _ in range(3)] == [[-3, n] for n in range(3)]
    assert two.take([X], None)[1:] == [-3, 3] and one.take([X], None)[1:] == [-3, 5]
    assert generator.offset == 24

    def refuse() -> int:
        raise RuntimeError("Cannot call get_offset during CUDA graph capture\nmore")

    monkeypatch.setattr(generator, "get_offset", refuse)
    with pytest.raises(
        UnsupportedError, match=r"uniform at .*test_implicit_inputs_random.py:\d+ draws.*rng_seed"
    ):
        one.take([X], None)


def test_two_threads_draw_different_numbers() -> None:
    fd, count = drawing(), 30
    fd.execute([X])
    found: list[float] = []

    def body() -> None:
        found.extend(float(fd.execute([X])[0][0, 0]) for _ in range(count))

    torch.manual_seed(2)
    threads = [threading.Thread(target=body) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.manual_seed(2)
    alone = [float(fd.execute([X])[0][0, 0]) for _ in range(2 * count)]
    assert sorted(found) == sorted(alone) and len(set(alone)) == 2 * count


def test_first_calls_beside_each_other_draw_different_numbers() -> None:
    for _ in range(10):
        fd = drawing()
        found: list[float] = []

        def body(fd: FusionDefinition = fd, found: list[float] = found) -> None:
            found.append(float(fd.execute([X])[0][0, 0]))

        threads = [threading.Thread(target=body) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({*found}) == 3


# Other threads draw from the same generator at the same time.
@pytest.mark.from_text(runs=False)
@pytest.mark.parametrize("meshed", [False, True])
def test_what_other_threads_draw_meanwhile_does_not_come_again(meshed: bool) -> None:
    """Numbers that other threads draw during a call are not drawn twice. Covers first calls, whose
    preparation is long, and calls with new sizes."""
    seen: list[float] = []
    is_over = threading.Event()

    def other() -> None:
        while not is_over.is_set():
            seen.append(float(torch.rand((), dtype=torch.float64)))

    def define() -> FusionDefinition:
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, -1])
            if meshed:
                x.set_device_mesh(DeviceMesh([0]))
            fd.add_output(fd.ops.rand_like(x))
        return fd

    thread = threading.Thread(target=other)
    thread.start()
    try:
        for k in range(40):
            fd = define()
            fd.execute([torch.zeros(3, 5)])
            fd.execute([torch.zeros(4, 5 + k)])
    finally:
        is_over.set()
        thread.join()
    assert len({*seen}) == len(seen)


# ------------------------------------------------------------------ every way of running
def test_the_evaluator_gives_the_same_numbers() -> None:
    """The recorded plan and op-by-op evaluation have the same numbers."""
    fd = drawing("normal", ops=2)
    torch.manual_seed(4)
    outputs = [fd.execute([X]) for _ in range(4)]
    evaluator = HostIrEvaluator(fd.fec.host_program())
    torch.manual_seed(4)
    for want in outputs:
        key = int(torch.empty((), dtype=torch.int64).random_())
        for run in (evaluator.evaluate, evaluator.run):
            got = run([X, key, 0])
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_numbers_advance_where_graphs_repeat_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def define() -> FusionDefinition:
        with FusionDefinition() as fd:
            x, w = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
            u = fd.ops.rand_like(x)
            h = fd.ops.linear(fd.ops.mul(x, u), w)
            fd.add_output(fd.ops.linear(fd.ops.mul(fd.ops.randn_like(h), h), w))
            fd.add_output(u)
        return fd

    inputs = [torch.randn(8, 8) for _ in range(2)]

    def runs(fd: FusionDefinition) -> list[list[torch.Tensor]]:
        torch.manual_seed(8)
        return [[t.clone() for t in fd.execute(inputs)] for _ in range(40)]

    want = runs(define())
    made = stand_in(monkeypatch)
    fd = define()
    got = runs(fd)
    assert any(line.startswith("captured: ") for line in fd.cuda_graphs()), fd.cuda_graphs()
    assert sum(g.launches for maker in made for g in maker.made) > 20
    for a, b in zip(got, want, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))
    assert len({float(u[0, 0]) for _, u in got}) == 40


def test_the_compiled_runner_leaves_them_to_python() -> None:
    fd = drawing()
    why = "not repeated: it draws random numbers, which change from call to call (inputs [7, 24])"
    for _ in range(30):
        fd.execute([X])
        assert fd.compiled_runner() == [why]
    assert fd.cuda_graphs()[0].endswith("(inputs [7, 24])")


def test_new_sizes_and_turns() -> None:
    """The plan of one size also serves others, and calls of two sizes take turns."""
    fd = drawing()
    torch.manual_seed(3)
    shapes = [(5, 8), (6, 8), (5, 8), (64, 128), (6, 8)] * 6
    got = [fd.execute([torch.zeros(s)])[0] for s in shapes]
    torch.manual_seed(3)
    for outputs, shape in zip(got, shapes, strict=True):
        seed = int(torch.empty((), dtype=torch.int64).random_())
        assert torch.equal(outputs, keyed().execute([torch.zeros(shape), seed, 0])[0])


def test_a_program_without_tensor_inputs() -> None:
    with FusionDefinition() as fd:
        n = fd.define_scalar(None, D.Int)
        low = fd.define_scalar(None, D.Double)
        fd.add_output(fd.ops.uniform(low, 4.0, [n, 3]))
        fd.add_output(fd.ops.normal(0.0, 1.0, [2, 5]))
    torch.manual_seed(0)
    u, z = fd.execute([6, 3.5])
    assert u.shape == (6, 3) and z.shape == (2, 5)
    assert (u >= 3.5).all() and (u < 4).all()
    assert fd.execute([0, 3.5])[0].shape == (0, 3)


# ------------------------------------------------------------------ refusals
def test_the_number_of_inputs_is_that_of_the_definition() -> None:
    fd = drawing()
    with pytest.raises(InputError, match="Expected 1 input, got 2"):
        fd.execute([X, X])
    with pytest.raises(InputError, match="Expected 1, got 0"):
        fd.execute([])
    assert len(fd.fusion.inputs) == 1 and "rng_uniform" in fd.fusion.print_math()


def test_one_kernel_by_hand_takes_a_seed() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.add(x, fd.ops.rand_like(x)))
    with pytest.raises(UnsupportedError, match="Random ops need rng_seed and rng_offset"):
        fd.manual_execute([X])
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        seed, offset = (fd.define_scalar(v, dtype=D.Int) for v in (3, 1))
        u = fd.ops.uniform(0, 1, [x.size(0), x.size(1)], rng_seed=seed, rng_offset=offset)
        fd.add_output(fd.ops.add(x, u))
    assert isinstance(seed, Const)
    assert torch.equal(fd.manual_execute([X])[0], keyed().execute([X, 3, 1])[0])


# ------------------------------------------------------------------ scalars of the call
@pytest.mark.parametrize("ends", [D.Double, D.Float, D.Int], ids=str)
@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_ends_and_keys_are_scalars(kind: str, ends: DataType) -> None:
    """Symbols and constants both give the numbers of the reference, in every run."""
    low, high = (2, 5) if ends is D.Int else (0.25, 1.75)
    for is_constant in (True, False):
        with FusionDefinition() as fd:
            n, a, b = (fd.define_scalar(None, d) for d in (D.Int, ends, ends))
            key = [fd.define_scalar(v if is_constant else None, D.Int) for v in (7, 3)]
            made = getattr(fd.ops, kind)(a, b, [n, 16], rng_seed=key[0], rng_offset=key[1])
            fd.add_output(made)
        given = [8, low, high, *([] if is_constant else [7, 3])]
        found, again = (fd.execute(given)[0] for _ in range(2))
        assert torch.equal(found, again)
        expected = reference.numbers(kind, 128, (low, high), seed=7, offset=3, dtype=torch.float32)
        error = 0.0 if kind == "uniform" else 1e-5
        torch.testing.assert_close(
            found.flatten().double(), expected.double(), rtol=error, atol=error
        )


@pytest.mark.parametrize("axis", [0, 1, None])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_have_parts_of_the_same_numbers(ranks: int, axis: int | None) -> None:
    def program() -> torch.Tensor:
        mesh = DeviceMesh(range(ranks))
        with FusionDefinition() as fd:
            a, b = fd.define_scalar(D.Double), fd.define_scalar(D.Double)
            seed, offset = fd.define_scalar(D.Int), fd.define_scalar(7, D.Int)
            made = fd.ops.uniform(a, b, [8, 16], rng_seed=seed, rng_offset=offset)
            out = fd.ops.set(made)
            fd.add_output(out)
            for tv in (made, out):
                tv.set_device_mesh(mesh)
            if axis is not None:
                cut(out, axis, mesh)
        return fd.execute([0.5, 2.5, 3])[0]

    with simulate(ranks) as world:
        parts = world.run(program)
    whole = parts[0] if axis is None else torch.cat(parts, axis)
    expected = reference.numbers("uniform", 128, (0.5, 2.5), seed=3, offset=7, dtype=torch.float32)
    assert torch.equal(whole.flatten(), expected)
