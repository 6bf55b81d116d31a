"""Which pairs run in steps: decisions on a described machine, at full size, without running."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from fuser import DataType, FusionDefinition, ParallelType, TensorView
from fuser.ir.fusion import Fusion
from fuser.ir.scalar.constructors import Symbol
from hostir.cost import overlap_search
from hostir.cost.machine_model import H200, Machine
from hostir.cost.overlap_search import MARGIN, OverlapCandidate, Overlaps, near, pick
from hostir.ir.ops import PEER_COPIES
from hostir.ir.program import HostIrContainer
from hostir.lowering.input_class import InputClass
from hostir.lowering.pipeline import build_program
from multidevice import DeviceMesh
from tests.support.overlap_programs import SLOW

X = ParallelType.mesh_x
BF16 = DataType.BFloat16
Build = Callable[[FusionDefinition, int], object]


def cut(tv: TensorView, axis: int, d: int) -> None:
    tv.outer_split(axis, d)
    tv.axis(axis).parallelize(X)


def inputs_of(fd: FusionDefinition, d: int, count: int, dtype: DataType) -> list[TensorView]:
    found = [fd.define_tensor([-1, -1], contiguity=True, dtype=dtype) for _ in range(count)]
    for tv in found:
        tv.set_device_mesh(DeviceMesh(range(d)))
    return found


def gather(fd: FusionDefinition, d: int, dtype: DataType = BF16) -> TensorView:
    x, w = inputs_of(fd, d, 2, dtype)
    cut(x, 0, d)
    cut(w, 0, d)
    return fd.ops.linear(x, w)


def separate(fd: FusionDefinition, d: int) -> TensorView:
    """Each rank multiplies its rows; what it has of the result is gathered."""
    x, w = inputs_of(fd, d, 2, BF16)
    y = fd.ops.relu(fd.ops.linear(x, w))
    cut(x, 0, d)
    y.set_device_mesh(DeviceMesh(range(d)))
    return y


def reduction(fd: FusionDefinition, d: int, *, to: int | None) -> TensorView:
    x, w = inputs_of(fd, d, 2, BF16)
    y = fd.ops.linear(x, w)
    for tv in (x, w):
        cut(tv, 1, d)
    y.set_device_mesh(DeviceMesh(range(d)))
    if to is not None:
        cut(y, to, d)
    return y


def scatter(fd: FusionDefinition, d: int) -> TensorView:
    return reduction(fd, d, to=0)


def allreduce(fd: FusionDefinition, d: int) -> TensorView:
    return reduction(fd, d, to=None)


def weight_gradient(fd: FusionDefinition, d: int) -> TensorView:
    """g^T x: the sum over the rows, which are gathered."""
    x, g = inputs_of(fd, d, 2, BF16)
    rows = fd.ops.set(x)
    y = fd.ops.matmul(fd.ops.permute(g, [1, 0]), rows)
    cut(x, 0, d)
    cut(g, 1, d)
    for tv in (rows, y):
        tv.set_device_mesh(DeviceMesh(range(d)))
    cut(y, 0, d)
    return y


def layers(fd: FusionDefinition, d: int) -> TensorView:
    """Three equal ones: each gathers rows, and scatters them again."""
    x, *weights = inputs_of(fd, d, 7, BF16)
    cut(x, 0, d)
    for up, down in zip(weights[::2], weights[1::2], strict=True):
        cut(up, 0, d)
        cut(down, 1, d)
        x = fd.ops.linear(fd.ops.relu(fd.ops.linear(x, up)), down)
        x.set_device_mesh(DeviceMesh(range(d)))
        cut(x, 0, d)
    return x


def decided(
    build: Build,
    d: int,
    sizes: dict[str, int],
    machine: Machine = H200,
    *,
    captured: tuple[str, ...] = (),
    overlaps: Overlaps | None = None,
) -> tuple[Overlaps, dict[Symbol, int], HostIrContainer]:
    """Lowers a definition for d ranks and sizes, which name the inputs' extents in turn."""
    with FusionDefinition() as fd:
        fd.add_output(build(fd, d))  # pyright: ignore[reportArgumentType]
    fusion: Fusion = fd.fusion
    values: dict[Symbol, int] = {}
    for tv, shape in zip(fusion.inputs, _shapes(sizes, len(fusion.inputs)), strict=True):
        assert isinstance(tv, TensorView)
        for x, n in zip(tv.shape(), shape, strict=True):
            values.update({x: n} if isinstance(x, Symbol) else {})
            y = fusion.canonical(x)
            values.update({y: n} if isinstance(y, Symbol) else {})
    overlaps = overlaps or Overlaps(
        machine, backend="NCCL", transports=(PEER_COPIES, "NCCL"), captured=captured
    )
    found = InputClass.as_declared(fusion, values)
    steps = overlaps.steps_for(values)
    built = build_program(fusion, found, backend_name="NCCL", overlap=steps)
    return overlaps, values, built.program


def _shapes(sizes: dict[str, int], count: int) -> list[tuple[int, int]]:
    m, k, n = sizes["m"], sizes["k"], sizes["n"]
    weights = [(n, k), (k, n)] * count
    if "rows" in sizes:  # what is multiplied by x has as many
        weights = [(m, n)]
    return [(m, k), *weights[: count - 1]]


LARGE = {"m": 8192, "k": 8192, "n": 28672}


@pytest.mark.parametrize("d", [2, 4])
@pytest.mark.parametrize("build", [gather, scatter])
def test_large_pairs_take_steps_by_peer_copies(build: Build, d: int) -> None:
    overlaps, values, program = decided(build, d, LARGE)
    (found,) = overlaps.decisions(values)
    as_it_is, copies, sends = found.candidates
    assert found.chosen is copies and copies.backend == PEER_COPIES
    assert as_it_is.seconds and copies.seconds and sends.seconds
    # Never less than the matmul alone, at 8e14 operations a second.
    assert 2 * 8192 * 8192 * 28672 / d / 8e14 < copies.seconds < 0.97 * as_it_is.seconds
    assert {getattr(op, "backend", PEER_COPIES) for op in program.started()} == {PEER_COPIES}


def test_a_sum_over_gathered_rows_takes_steps_where_its_parts_cost_less() -> None:
    """The parts of four ranks are written, and read by the sum: four times the result."""
    square, flat = (
        {"m": m, "k": 8192, "n": n, "rows": 1} for m, n in ((8192, 8192), (2048, 28672))
    )
    overlaps, values, program = decided(weight_gradient, 4, square)
    (found,) = overlaps.decisions(values)
    as_it_is, copies, _ = found.candidates
    assert found.chosen is copies and copies.name == "steps and a sum, peer copies"
    assert as_it_is.seconds and copies.seconds
    # The matmul at 8e14 operations a second, then 5 times 2048 x 8192 numbers of 2 bytes.
    least = 2 * 8192**3 / 4 / 8e14 + 5 * 2048 * 8192 * 2 / H200.memory_bandwidth
    assert least < copies.seconds < 0.9 * as_it_is.seconds
    assert {getattr(op, "backend", PEER_COPIES) for op in program.started()} == {PEER_COPIES}
    overlaps, values, _ = decided(weight_gradient, 4, flat)
    (found,) = overlaps.decisions(values)
    assert not found.chosen.form and len(found.candidates) == 3


def test_what_is_sent_is_computed_first() -> None:
    """The own rows, which nobody waits for, come last: all transfers run beside a matmul."""
    plain = replace(SLOW, matmul=((1.0, 1e9),), pull_bandwidth=1e8)
    overlaps, values, _ = decided(scatter, 2, {"m": 64, "k": 64, "n": 64}, plain)
    (found,) = overlaps.decisions(values)
    copies = found.candidates[1]
    # 2 x 64 x 64 x 32 operations; the 32 x 64 numbers of 2 bytes for the other take a sixth of it.
    assert copies.name == "steps, peer copies" and copies.seconds is not None
    assert copies.seconds == pytest.approx(2 * 64 * 64 * 32 / 1e9, rel=1e-6)


def test_other_communications_keep_their_library() -> None:
    overlaps, values, program = decided(allreduce, 4, LARGE)
    (found,) = overlaps.decisions(values)
    assert found.chosen.form == "scatter in steps, gather"
    backends = [getattr(op, "backend", "") for op in program.started()]
    assert sorted(backends) == [PEER_COPIES, PEER_COPIES, "NCCL"]


@pytest.mark.parametrize(
    ("build", "sizes", "why"),
    [
        (gather, {"m": 64, "k": 64, "n": 64}, "the host would take"),
        (gather, {"m": 16, "k": 2**16, "n": 2**19}, "there is less than 3% to gain"),
    ],
)
def test_what_cannot_pay_is_not_lowered(build: Build, sizes: dict[str, int], why: str) -> None:
    overlaps, values, program = decided(build, 4, sizes)
    (found,) = overlaps.decisions(values)
    assert why in found.why and len(found.candidates) == 1
    assert [getattr(op, "backend", "") for op in program.started()] == ["NCCL"]


def test_rows_that_devices_do_not_divide_are_not_scattered() -> None:
    overlaps, values, _ = decided(allreduce, 4, {**LARGE, "m": 8190})
    (found,) = overlaps.decisions(values)
    refused = {c.form for c in found.candidates if c.seconds is None}
    assert refused == {"scatter in steps, gather"}
    assert "the extent 8194 of axis 0" in str(found)  # which is predicted for sizes nearby
    assert "is not divisible by the 4 devices" in str(found)


def test_a_matmul_whose_speed_is_not_known_stays() -> None:
    whole = replace(H200, matmul_dtypes={"Float": 0.07})
    overlaps, values, _ = decided(gather, 4, LARGE, whole)
    (found,) = overlaps.decisions(values)
    assert "has a dtype without a measured speed" in str(found) and not found.chosen.form


def test_what_is_not_gathered_for_a_matmul_is_no_pair() -> None:
    overlaps, values, _ = decided(separate, 4, LARGE)
    assert overlaps.decisions(values) == ()
    assert "no matmul is next to a communication" in overlaps.report(values)


def test_equal_layers_are_predicted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered: list[object] = []
    original = overlap_search.lower_sharded

    def noted(fusion: Fusion, **named: object) -> object:
        lowered.append(fusion)
        return original(fusion, **named)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(overlap_search, "lower_sharded", noted)
    overlaps, values, _ = decided(layers, 4, LARGE)
    found = overlaps.decisions(values)
    assert [d.chosen.form for d in found] == ["steps"] * 6
    # As it is and by two transports: the gather of an input, that of a result, and the scatter.
    assert len(lowered) == 9


def test_ranks_decide_alike() -> None:
    """The same numbers, whatever was decided before."""
    one, values, _ = decided(layers, 4, LARGE)
    other, _, _ = decided(layers, 4, {**LARGE, "m": 4096})
    assert str(one.decisions(values)) == str(other.decisions(values))


# ------------------------------------------------------------------ new sizes
@pytest.mark.parametrize("d", [3, 4])
@pytest.mark.parametrize("build", [gather, scatter, allreduce])
def test_new_sizes_near_others_are_not_predicted(
    build: Build, d: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    predicted: list[object] = []
    original = overlap_search.simulated_schedule

    def noted(*args: object) -> object:
        predicted.append(args)
        return original(*args)  # pyright: ignore[reportArgumentType]

    overlaps, values, _ = decided(build, d, {"m": 4096 * d, "k": 2048 * d, "n": 8192 * d})
    monkeypatch.setattr(overlap_search, "simulated_schedule", noted)
    rows = range(4096 * d, 8192 * d, 7 * d)
    chosen = {overlaps.choose(_with_rows(values, 4096 * d, n)) for n in rows}
    assert len(rows) == 586 and all(chosen)
    # 16 sizes are predicted in place of all; of each there are at most 9 candidates, and the first
    # was known.
    assert 0 < len(predicted) <= 9 * 16
    predicted.clear()
    for n in rows[-100:]:
        overlaps.choose(_with_rows(values, 4096 * d, n))
    assert not predicted


def _with_rows(values: dict[Symbol, int], old: int, rows: int) -> dict[Symbol, int]:
    return {s: rows if n == old else n for s, n in values.items()}


def test_sizes_without_hope_are_not_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    overlaps, values, _ = decided(gather, 4, {"m": 64, "k": 64, "n": 64})
    asked = dict.fromkeys(values, 32)
    before = overlaps.report(asked)
    assert "as it is" in before and " ms   <- chosen" in before and "the host would" in before

    def fail(*_: object) -> None:
        raise AssertionError("a program was predicted")

    monkeypatch.setattr(overlap_search, "simulated_schedule", fail)
    for n in range(4, 128, 4):
        choice = overlaps.choose(dict.fromkeys(values, n))
        assert choice is not None and not choice


def test_what_stands_for_a_size() -> None:
    for multiple in (1, 2, 3, 4, 6, 8, 12):
        for n in (*range(3000), *range(2**20, 2**20 + 500)):
            found = near(n, multiple)
            assert math.gcd(found, multiple) == math.gcd(n, multiple)
            # Rounded to the next; then, where it must not be divided, one of the next ones.
            assert abs(found - n) <= n / 32 + multiple**2
            assert n >= 32 or found == n
            assert near(found, multiple) == found or multiple % 2 or n % multiple
    assert [near(n, 4) for n in (8192, 28672, 8200, 8190, -8200)] == [
        8192, 28672, 8192, 8194, -8192
    ]  # fmt: skip


def test_a_report_says_which_sizes_were_predicted() -> None:
    overlaps, values, _ = decided(gather, 4, LARGE)
    exact = overlaps.report(values)
    assert "nearby" not in exact and "[8192, 8192] ->" in exact
    nearby = overlaps.report(_with_rows(values, 28672, 28676))
    assert "; predicted for sizes nearby: " in nearby and " = 28672 for 28676" in nearby
    assert nearby.partition("\n")[2] == exact.partition("\n")[2]


@pytest.mark.parametrize(
    ("device", "library", "numbers"),
    [
        ("GPU", "MPI", " by the numbers of NCCL"),
        ("GPU", "NCCL", ""),
        ("CPU", "MPI", ""),  # `calibrate` measured that of the job
    ],
)
def test_a_report_names_the_library_that_the_numbers_are_of(
    device: str, library: str, numbers: str
) -> None:
    machine = replace(H200, device=device)
    transports = (PEER_COPIES, library)
    overlaps = Overlaps(
        machine, backend=library, transports=transports, margin=overlap_search.FORCED
    )
    overlaps, values, _ = decided(gather, 4, LARGE, overlaps=overlaps)
    (found,) = overlaps.decisions(values)
    assert [c.name for c in found.candidates] == [
        f"as it is{numbers}",
        "steps, peer copies",
        f"steps, {library}{numbers}",
    ]


# ------------------------------------------------------------------ the whole program
def beside_many(fd: FusionDefinition, d: int) -> TensorView:
    """A gather and a linear that take the GPU a while, and many linears that take the host one."""
    y = gather(fd, d)
    small = fd.define_tensor([8, 8], contiguity=True, dtype=BF16)
    small.set_device_mesh(DeviceMesh(range(d)))
    one = small
    for _ in range(100):
        one = fd.ops.linear(one, small)
    fd.add_output(one)
    return y


BALANCED = {"m": 8192, "k": 4096, "n": 14336}


@pytest.mark.parametrize(
    ("d", "captured", "library"),
    [
        (4, (), PEER_COPIES),  # the host is as busy either way
        (4, ("NCCL",), ""),  # the host has nothing to do for the program as it is
        (2, (), PEER_COPIES),
        (2, ("NCCL",), "NCCL"),  # nor for sends, which take nearly as long on two ranks
        (4, ("NCCL", PEER_COPIES), PEER_COPIES),
    ],
)
def test_steps_that_no_graph_repeats_cost_the_whole_program_its_host_time(
    d: int, captured: tuple[str, ...], library: str
) -> None:
    overlaps, values, program = decided(beside_many, d, BALANCED, captured=captured)
    steps = 0
    while not overlaps.accepts(program, values):
        _, _, program = decided(beside_many, d, BALANCED, overlaps=overlaps)
        steps += 1
    choice = overlaps.choose(values)
    assert choice is not None and choice.backend == library
    assert {getattr(op, "backend", "") for op in program.started()} == {library or "NCCL"}
    told = "the host would take 1." in overlaps.report(values)
    assert told == (steps > 0) == (captured == ("NCCL",))
    # Also when the same sizes are asked for later, and others.
    assert overlaps.choose(values) == choice
    larger = {s: 32768 if n == 8192 else n for s, n in values.items()}
    choice = overlaps.choose(larger)
    assert choice is not None and choice.backend == (library or PEER_COPIES)


def test_what_graphs_repeat_costs_the_host_one_call() -> None:
    """Small steps pay where the host does not have to start each of them."""
    sizes = {"m": 1024, "k": 8192, "n": 28672}
    slow = replace(H200, host_library_s=60e-6, host_post_s=60e-6)
    found: dict[bool, str] = {}
    for is_repeated in (True, False):
        captured = ("NCCL", PEER_COPIES) if is_repeated else ()
        overlaps, values, _ = decided(gather, 4, sizes, captured=captured, machine=slow)
        choice = overlaps.choose(values)
        assert choice is not None
        found[is_repeated] = choice.backend
    assert found == {True: PEER_COPIES, False: ""}


def test_refusals_for_some_sizes_are_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is called with ever new sizes must not store all of them."""
    monkeypatch.setattr(overlap_search, "_MAX_SIZES", 4)
    slow = replace(H200, nccl_other_bandwidth=1e11)  # so that only peer copies pay
    overlaps, values, program = decided(beside_many, 4, BALANCED, slow, captured=("NCCL",))
    assert not overlaps.accepts(program, values)
    for _ in range(2):
        for k in range(8):
            rows = 8192 + 512 * k
            choice = overlaps.choose({s: rows if n == 8192 else n for s, n in values.items()})
            assert choice is not None and not choice, f"{rows} rows take steps"
    assert overlaps._refused_for.size() <= 4


def test_what_gives_up_takes_another_way_and_then_none() -> None:
    overlaps, values, _ = decided(gather, 2, LARGE)
    for library in ("NCCL", ""):  # on two ranks sends gain nearly as much
        assert overlaps.gives_up(values, "it has no time\nat all")
        choice = overlaps.choose(values)
        assert choice is not None and choice.backend == library
    assert not overlaps.gives_up(values, "nothing was chosen")
    why = "not chosen: the whole program cannot be lowered with it: it has no time"
    assert overlaps.report(values).endswith(why)


# ------------------------------------------------------------------ the rule
BASE = OverlapCandidate("", "", 1.0)


@pytest.mark.parametrize(
    ("others", "chosen"),
    [
        ([("a", "", 1 - MARGIN)], ""),
        ([("a", "", 0.96)], "a"),
        ([("a", "", 0.96), ("b", "", 0.9), ("c", "", 0.95)], "b"),
        ([("a", "CUDA", 0.5), ("b", "NCCL", 0.6)], "b"),
        ([("a", "", None)], ""),
    ],
)
def test_the_fastest_that_gains_enough(
    others: list[tuple[str, str, float | None]], chosen: str
) -> None:
    candidates = [BASE, *(OverlapCandidate(*one) for one in others)]
    assert pick(candidates, "NCCL", MARGIN).form == chosen


def test_without_a_time_nothing_is_chosen() -> None:
    assert (
        pick([OverlapCandidate("", why="no"), OverlapCandidate("a", "", 0.1)], "NCCL", MARGIN).form
        == ""
    )
