"""Tests the compiled runner: the calls it repeats equal Python's bit by bit; others stay
in Python."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from fuser import DataType, FusionDefinition
from fuser.frontend.program_cache import MAX_DECLINED
from fuser.runtime import compiled_runner
from fuser.support.errors import FuserError, InputError
from multidevice import Communicator, DeviceMesh, simulate
from tests.support.cuda_graph_cases import CASES, IN_PLACE, defined, repeat
from tests.support.limits import HANG_S
from tests.support.repeated_calls import (
    ENOUGH,
    add,
    any_add,
    layers,
    program,
    runs,
    same,
    softmax,
    steady,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _runner() -> None:
    assert compiled_runner.wait(HANG_S) is not None, compiled_runner.why_not()


def _without_axes() -> FusionDefinition:
    with FusionDefinition() as fd:
        x, y = (fd.define_tensor([]) for _ in range(2))
        fd.add_output(fd.ops.add(x, y))
    return fd


PROGRAMS: dict[str, tuple[Callable[[], FusionDefinition], tuple[tuple[int, ...], ...]]] = {
    "add": (add, ((6, 8), (6, 8))),
    "two outputs": (
        lambda: program(2, lambda ops, x, y: [ops.mul(x, y), ops.sum(x, [1])]),
        ((5, 7), (5, 7)),
    ),
    "softmax": (lambda: program(1, softmax), ((9, 33),)),
    "matmuls and views": (lambda: program(2, layers), ((8, 8), (8, 8))),
    "an input alone": (lambda: program(1, lambda ops, x: [x, ops.permute(x, [1, 0])]), ((3, 4),)),
    "no elements": (add, ((0, 8), (0, 8))),
    "no axes": (_without_axes, ((), ())),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("kind", [list, tuple])
def test_equals_python(name: str, kind: type) -> None:
    define, shapes = PROGRAMS[name]
    fd, plain = define(), define()
    steady(fd, kind(torch.randn(shape) for shape in shapes))
    before = runs(fd)
    for _ in range(20):
        inputs = kind(torch.randn(shape) for shape in shapes)
        got = fd.execute(inputs)
        assert same(got, plain.execute(inputs, _disable_options=["compiled_runner"]))
    assert runs(fd) == before + 20
    assert plain.compiled_runner()[0].startswith("not repeated: ")


@pytest.mark.parametrize("name", CASES)
def test_equals_torch(name: str) -> None:
    repeat(defined(CASES[name]), CASES[name], CPU, runs=60)


def test_off_by_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSER_DISABLE", "compiled_runner")
    fd, inputs = add(), [torch.randn(6, 8), torch.randn(6, 8)]
    for _ in range(ENOUGH):
        fd.execute(inputs)
    assert fd.compiled_runner()[0].startswith("not repeated: FUSER_DISABLE=compiled_runner")


@pytest.mark.finding("G42")
def test_the_status_says_what_it_waits_for_and_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    made = compiled_runner.find()
    monkeypatch.setattr(compiled_runner, "_state", compiled_runner._State())
    monkeypatch.setattr(compiled_runner, "_look", lambda: None)  # the compiler is at work
    fd, inputs = add(), [torch.randn(6, 8), torch.randn(6, 8)]
    told: list[str] = []
    for _ in range(20):
        fd.execute(inputs)
        told.append(fd.compiled_runner()[0])
    assert told[0].startswith("not repeated: it has not run often enough; asked again in ")
    waits = "not repeated: it is being compiled by another process, for 0 s so far; asked again in "
    assert told[-1].startswith(waits), told[-1]
    monkeypatch.setattr(compiled_runner._state, "began", compiled_runner._state.began - 15)
    assert ", for 15 s so far; " in fd.compiled_runner()[0]
    left = [int(line.split("asked again in ")[1].split()[0]) for line in told]
    assert all(a - b == 1 or a == 1 for a, b in itertools.pairwise(left)), left
    # The compiler has ended: the next search finds the runner, and it is not delayed further.
    monkeypatch.setattr(compiled_runner, "_look", lambda: made)
    assert fd.compiled_runner()[0].startswith("not repeated: it is compiled now; asked again in")
    for _ in range(left[-1] + 2):
        fd.execute(inputs)
    assert fd.compiled_runner()[0].startswith("repeated: ")


# ------------------------------------------------------------------ what is not its own
class _Tensor(torch.Tensor):
    pass


def _resized() -> torch.Tensor:
    x = torch.randn(6, 8)
    x.untyped_storage().resize_(0)
    return x


def _shrunk() -> torch.Tensor:
    x = torch.randn(6, 8)
    x.untyped_storage().resize_(6 * 8 * 4 - 4)
    return x


def _resized_behind() -> torch.Tensor:
    x = torch.randn(64 + 48)[64:].view(6, 8)
    x.untyped_storage().resize_(0)
    return x


def _nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.randn(8)] * 6)


# The values passed in place of an input or of the list, and whether they are rejected.
WRONG: dict[str, tuple[Callable[[], Any], bool]] = {
    "another size": (lambda: torch.randn(7, 8), True),
    "another dtype": (lambda: torch.randn(6, 8, dtype=torch.float64), True),
    "another number of axes": (lambda: torch.randn(48), True),
    "other strides": (lambda: torch.randn(8, 6).T, False),
    "strides of 0": (lambda: torch.randn(6, 1).expand(6, 8), False),
    "a misaligned view": (lambda: torch.randn(49)[1:].view(6, 8), False),
    "half an address": (lambda: torch.frombuffer(bytearray(194), dtype=torch.uint8), True),
    "a gradient": (lambda: torch.randn(6, 8, requires_grad=True), False),
    "a parameter": (lambda: torch.nn.Parameter(torch.randn(6, 8), requires_grad=False), False),
    "a subclass": (lambda: torch.randn(6, 8).as_subclass(_Tensor), False),
    "a lazy view": (lambda: torch.randn(6, 8, dtype=torch.complex64).conj().imag, False),
    "a lazy view as it lies": (lambda: torch.ops.aten._neg_view(torch.randn(6, 8)), False),
    "a storage of no bytes": (_resized, True),
    "a storage that lacks one element": (_shrunk, True),
    "a view of a storage of no bytes": (_resized_behind, True),
    "sparse": (lambda: torch.randn(6, 8).to_sparse(), True),
    "nested": (_nested, True),
    "meta": (lambda: torch.randn(6, 8, device="meta"), True),
    "zeros without memory": (lambda: torch.ops.aten._efficientzerotensor([6, 8]), True),
    "a number": (lambda: 1.0, True),
    "None": (lambda: None, True),
    "an array": (lambda: torch.randn(6, 8).numpy(), True),
}


@pytest.mark.filterwarnings("ignore:.*requires grad")
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_input_after_steady_calls(name: str, place: int) -> None:
    make, is_refused = WRONG[name]
    (fd, plain), inputs = (any_add() for _ in range(2)), [torch.randn(6, 8), torch.randn(6, 8)]
    steady(fd, inputs)
    for _ in range(3):
        plain.execute(inputs, _disable_options=["compiled_runner"])
    before, given = runs(fd), list[Any](inputs)
    given[place] = make()
    if is_refused:
        with pytest.raises(FuserError) as refused:
            fd.execute(given)
        with pytest.raises(FuserError) as wanted:
            plain.execute(given, _disable_options=["compiled_runner"])
        assert str(refused.value) == str(wanted.value)
    else:
        plainly = given[place].detach().as_subclass(torch.Tensor).resolve_neg()
        torch.testing.assert_close(fd.execute(given)[0], inputs[1 - place] + plainly)
    assert runs(fd) == before
    # Calls with the usual inputs are repeated again.
    steady(fd, inputs)
    assert torch.equal(fd.execute(inputs)[0], inputs[0] + inputs[1])


@pytest.mark.parametrize(
    "given",
    [
        lambda x, y: [x],
        lambda x, y: [x, y, y],
        lambda x, y: [],
        lambda x, y: x,
        lambda x, y: None,
        lambda x, y: {x: 1, y: 2},
    ],
)
def test_a_wrong_list_after_steady_calls(given: Callable[..., Any]) -> None:
    fd, inputs = add(), [torch.randn(6, 8), torch.randn(6, 8)]
    steady(fd, inputs)
    before, wrong = runs(fd), given(*inputs)
    with pytest.raises(InputError):
        fd.execute(wrong)
    assert runs(fd) == before


def test_other_lists_are_pythons() -> None:
    fd, inputs = add(), [torch.randn(6, 8), torch.randn(6, 8)]
    steady(fd, inputs)
    before = runs(fd)

    class Mine(list[torch.Tensor]):
        def __iter__(self) -> Any:
            return iter([inputs[0], inputs[0]])

    (got,) = fd.execute([[inputs[0]], (inputs[1],)])
    assert torch.equal(got, inputs[0] + inputs[1])
    (got,) = fd.execute(iter(inputs))
    assert torch.equal(got, inputs[0] + inputs[1])
    (got,) = fd.execute(Mine(inputs))
    assert torch.equal(got, inputs[0] + inputs[0])
    assert runs(fd) == before


def test_options_devices_and_tangents_are_pythons() -> None:
    fd, inputs = add(), [torch.randn(6, 8), torch.randn(6, 8)]
    for call in (
        lambda: fd.execute(inputs, device="cpu"),
        lambda: fd.execute(inputs, _enable_options=["stream_slots"]),
        lambda: fd.execute(inputs, _disable_options=["kernel_reuse"]),
    ):
        steady(fd, inputs)
        before = runs(fd)
        assert torch.equal(call()[0], inputs[0] + inputs[1])
        assert runs(fd) == before
    steady(fd, inputs)
    before = runs(fd)
    with forward_ad.dual_level(), pytest.warns(UserWarning, match="tangent"):
        dual = forward_ad.make_dual(inputs[0], torch.ones(6, 8))
        assert torch.equal(fd.execute([dual, inputs[1]])[0], inputs[0] + inputs[1])
    assert runs(fd) == before


def test_under_a_mode_of_torch() -> None:
    fd, inputs = add(), [torch.randn(6, 8), torch.randn(6, 8)]
    steady(fd, inputs)

    class Wrong(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            # This value would end the process if it were used as an address.
            return 12345 if "_cdata" in str(func) else func(*args, **(kwargs or {}))

    before = runs(fd)
    with Wrong():
        assert torch.equal(fd.execute(inputs)[0], inputs[0] + inputs[1])
    assert runs(fd) == before
    assert torch.equal(fd.execute(inputs)[0], inputs[0] + inputs[1])
    assert runs(fd) == before + 1


def test_what_it_does_not_take() -> None:
    fd = defined(IN_PLACE)
    for _ in range(ENOUGH):
        fd.execute(IN_PLACE.make(CPU))
    assert fd.compiled_runner()[0].startswith("not repeated: it updates inputs in place")
    fd = program(2, lambda ops, x, w: [ops.matmul(x, w)])
    inputs = [torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)]
    with pytest.warns(UserWarning, match="requires grad"):
        for _ in range(ENOUGH):
            fd.execute(inputs)
    assert fd.compiled_runner()[0].startswith("not repeated: torch records gradients of its inputs")
    fd, inputs = add(), [torch.randn(6, 8).as_subclass(_Tensor), torch.randn(6, 8)]
    for _ in range(ENOUGH):
        fd.execute(inputs)
    assert fd.compiled_runner()[0].startswith("not repeated: an input has a class other than ")


def test_numbers_are_its_own_while_they_stay() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        s, n = fd.define_scalar(None, DataType.Double), fd.define_scalar(None, DataType.Int)
        fd.add_output(fd.ops.add(fd.ops.mul(x, s), n))
    x = torch.randn(4, 4)
    steady(fd, [x, 0.5, 3])
    before = runs(fd)
    for number, count, is_own in ((0.5, 3, True), (0.25, 3, False), (0.5, 4, False)):
        torch.testing.assert_close(fd.execute([x, number, count])[0], x * number + count)
        assert runs(fd) - before == is_own
        before = runs(fd)
    for _ in range(4 * MAX_DECLINED):
        fd.execute([x, 0.0, 1])
    before = runs(fd)
    assert before > 0
    assert fd.execute([torch.full((4, 4), 0.0), -0.0, 0])[0].equal(torch.zeros(4, 4))
    with pytest.raises(InputError):
        fd.execute([x, 0.5, 1 << 70])
    assert torch.equal(fd.execute([x, 1, True])[0], x * 1 + 1) and runs(fd) == before


def test_it_lets_go_of_calls_that_no_longer_come() -> None:
    fd, inputs = add(), [torch.randn(6, 8), torch.randn(6, 8)]
    steady(fd, inputs)
    places = [torch.randn(49)[1:].view(6, 8), inputs[1]]
    for _ in range(MAX_DECLINED + 2):
        assert torch.equal(fd.execute(places)[0], places[0] + places[1])
    assert runs(fd) == 0
    for _ in range(64):
        assert torch.equal(fd.execute(places)[0], places[0] + places[1])
    assert runs(fd) > 0
    assert torch.equal(fd.execute(inputs)[0], inputs[0] + inputs[1])


def test_one_tensor_in_several_places() -> None:
    """One tensor is passed at several positions, as for shared weights. Other tensors, equal or
    not, are accepted by the same repeated call."""
    x, y, z = (torch.randn(8, 8) for _ in range(3))
    for inputs in ([x, x, x], [x, y, x], [y, x, x]):
        fd = program(3, lambda ops, a, b, c: [ops.sub(ops.add(a, b), c)])
        steady(fd, inputs)
        before, others = runs(fd), (inputs, [x, y, z], [z.clone(), x, x])
        for a, b, c in others:
            assert torch.equal(fd.execute([a, b, c])[0], a + b - c)
        assert runs(fd) == before + len(others)
        for wrong in ([x, x], [*inputs, x], [x, x, x.double()], [x, x.as_subclass(_Tensor), x]):
            with contextlib.suppress(InputError):
                assert torch.equal(fd.execute(wrong)[0], wrong[0] + wrong[1] - wrong[2])
                assert len(wrong) == 3
        assert runs(fd) == before + len(others)


def test_sizes_in_turns() -> None:
    fd = add()
    sets = [[torch.randn(n, 8), torch.randn(n, 8)] for n in (4, 5, 6)]
    for k in range(200):
        x, y = sets[k % 3]
        assert torch.equal(fd.execute([x, y])[0], x + y)


def test_lines_say_of_which_calls_they_are() -> None:
    with FusionDefinition() as fd:
        x, k = fd.define_tensor([-1, -1], contiguity=True), fd.define_scalar(dtype=DataType.Double)
        fd.add_output(fd.ops.mul(x, k))
    for n in (3, 4):
        fd.execute([torch.randn(n, 8), 2.0])
    fd.execute([torch.randn(4, 8), 2.0], _disable_options=["cuda_graphs"], device="cpu")
    texts = [
        "(inputs [3, 8], float)",
        "(inputs [4, 8], float)",
        "(inputs [4, 8], float; enabled nothing; disabled cuda_graphs; device cpu)",
    ]
    for lines in (fd.compiled_runner(), fd.cuda_graphs()):
        assert [line[line.index("(inputs") :] for line in lines] == texts
    assert lines[2].startswith("not captured: FUSER_DISABLE=cuda_graphs (")


def test_why_calls_on_several_ranks_are_not_repeated() -> None:
    """The reason is given from the first call on. A single rank is treated as no ranks."""

    def body() -> list[str]:
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, 8], contiguity=True)
            fd.add_output(fd.ops.mul(x, 2.0))
            x.set_device_mesh(DeviceMesh(range(Communicator.instance().size())))
        found: list[str] = []
        for _ in range(ENOUGH):
            fd.execute([torch.ones(6, 8)])
            found += fd.compiled_runner()
        return found

    why = "not repeated: its ranks agree on each call (inputs [6, 8])"
    with simulate(2) as world:
        assert world.run(body) == [[why] * ENOUGH] * 2
    with simulate(1) as world:
        (alone,) = world.run(body)
    assert alone[0].startswith("not repeated: it has not run often enough") and why not in alone


def test_why_calls_with_options_are_not_repeated() -> None:
    """An empty list of options has no effect, so such calls are repeated."""
    fd, inputs = add(), [torch.randn(6, 8), torch.randn(6, 8)]
    for _ in range(ENOUGH):
        fd.execute(inputs, _enable_options=[], _disable_options=[])
    steady(fd, inputs)
    fd = add()
    for _ in range(ENOUGH):
        fd.execute(inputs, device="cpu")
    assert fd.compiled_runner()[0].startswith(
        "not repeated: calls with options or with device= are never repeated"
    )
