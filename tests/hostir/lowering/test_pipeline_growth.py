"""Costs of lowering for more devices and more layers, in steps of the interpreter: no clock."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest

from benchmarks.lowering_time import (
    HIDDEN,
    WIDE,
    Builder,
    Case,
    define_reshardings,
    define_transformer,
    lower_case,
)
from fuser.ir.domain.device_mesh import DeviceMesh
from fuser.ir.domain.tensor_domain import IterDomain, TensorDomain
from fuser.ir.fusion import TensorView
from fuser.passes import segment
from fuser.passes.merge_groups import Merger
from hostir.ir.parser import parse
from hostir.lowering import pipeline
from multidevice.sharding import placement, queries
from multidevice.sharding.passes import localize


def count_steps(run: Callable[[], object]) -> int:
    """Returns how many bytecode instructions a call executes."""
    steps = 0

    def local(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal steps
        steps += event == "opcode"
        return local

    def called(frame: FrameType, event: str, arg: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return local

    before = sys.gettrace()
    sys.settrace(called)
    try:
        run()
    finally:
        sys.settrace(before)
    return steps


@pytest.mark.finding("G3")
def test_reading_of_more_devices_takes_as_many_steps_per_op() -> None:
    """A mesh that a text names at every tensor is read once."""

    def per_op(devices: int) -> int:
        case = Case(define_reshardings, 4, (devices,))
        texts = [lower_case(case, n)[1] for n in (2, 4)]
        fewer, more = (count_steps(partial(parse, text)) for text in texts)
        return more - fewer

    per_op(16)
    assert per_op(1024) < 1.1 * per_op(64)


@pytest.mark.finding("G3")
def test_lowering_of_more_devices_takes_as_many_steps_per_op() -> None:
    """Meshes are read once per program, not once per op: to lower it, to check it, to print it."""

    def per_op(devices: int) -> int:
        case = Case(define_reshardings, 4, (devices,))
        fewer, more = (count_steps(partial(lower_case, case, n)) for n in (2, 4))
        return more - fewer

    per_op(16)
    assert per_op(1024) < 1.1 * per_op(64)


@pytest.mark.finding("G3")
def test_lowering_of_more_ops_reads_the_devices_of_a_mesh_no_more_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps of the interpreter do not count what C does for each device."""
    reads: Counter[str] = Counter()

    class Noted:
        """The devices of a mesh; notes who reads them."""

        def __get__(self, mesh: DeviceMesh, owner: type) -> tuple[int, ...]:
            reads[sys._getframe(1).f_code.co_qualname] += 1
            return mesh.__dict__["devices"]

        def __set__(self, mesh: DeviceMesh, value: tuple[int, ...]) -> None:
            mesh.__dict__["devices"] = value

    found: list[Counter[str]] = []
    monkeypatch.setattr(DeviceMesh, "devices", Noted(), raising=False)
    for n in (2, 2, 4):
        reads.clear()
        lower_case(Case(define_reshardings, n, (64,)), n)
        found.append(Counter(reads))
    # Their number, and the teams of communications, which are parts of them.
    assert {*(found[2] - found[1])} <= {"DeviceMesh.size", "DeviceMesh.team"}


def define_blocks(fd: Any, count: int, mesh: Any) -> None:
    """Blocks of a norm and two linears, each with a residual."""
    make = Builder(fd, mesh)
    value = make.tensor([-1, -1, HIDDEN], [(0, make.batch)])
    for _ in range(count):
        wide = make.gelu(make.by_columns(make.layer_norm(value), WIDE, HIDDEN))
        value = make.ops.add(value, make.by_rows(wide, HIDDEN, WIDE))
    fd.add_output(value)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Returns how often what grows with a program's depth is done."""
    counts: Counter[str] = Counter()

    def count(owner: object, name: str, amount: Callable[..., int] = lambda *args: 1) -> None:
        run = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            counts[name] += amount(*args)
            return run(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    count(localize, "local_domain")
    count(pipeline, "find_scheduler", lambda fusion: len(fusion.exprs))
    count(Merger, "_sources")
    count(Merger, "_may_merge")
    count(queries, "Comparison")
    return counts


@pytest.mark.finding("G4")
@pytest.mark.parametrize("mesh", [(2, 2), ()])
def test_lowering_of_more_layers_grows_as_they_do(
    counted: Counter[str], mesh: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each additional layer adds as many ops for schedulers, and as many steps of merging."""
    monkeypatch.setattr(segment, "MANY_LEVELS", 6)
    found: list[Counter[str]] = []
    for layers in (8, 24):
        counted.clear()
        lower_case(Case(define_blocks, layers, mesh), layers)
        found.append(Counter(counted))
    few, many = found
    for name in counted:
        assert many[name] <= 1.1 * 3 * few[name], (name, found)


def define_gradients(fd: Any, count: int, mesh: Any) -> None:
    """A linear and a tanh per layer, then products as in gradients, which read each tanh."""
    make, ops = Builder(fd, mesh), fd.ops
    value = make.tensor([-1, -1, HIDDEN], [(0, make.batch)])
    known: list[tuple[Any, Any]] = []
    for _ in range(count):
        weight = make.tensor([HIDDEN, HIDDEN], [(1, make.features)])
        value = ops.tanh(ops.linear(value, weight))
        known.append((weight, value))
    gradient = value
    for weight, result in reversed(known):
        gradient = ops.matmul(ops.mul(result, ops.mul(gradient, 2.0)), weight)
    fd.add_output(gradient)


@pytest.mark.finding("G4")
def test_each_layer_and_its_gradient_add_as_many_steps_of_merging(counted: Counter[str]) -> None:
    """All other layers are between a layer and its gradient, which read the same tensor."""
    found: list[Counter[str]] = []
    for layers in (10, 40):
        counted.clear()
        lower_case(Case(define_gradients, layers, ()), layers)
        found.append(Counter(counted))
    few, many = found
    for name in counted:
        assert many[name] <= 1.1 * 4 * few[name], (name, found)


@pytest.mark.finding("G4")
def test_shardings_of_repeated_layers_are_compared_once(counted: Counter[str]) -> None:
    found: list[int] = []
    for layers in (3, 6):
        counted.clear()
        lower_case(Case(define_transformer, layers, (2, 2)), layers)
        found.append(counted["Comparison"])
    assert found[0] == found[1] > 0


@pytest.mark.finding("G4")
def test_each_tensor_is_localized_once_for_all_kernels_that_are_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Apart from what memory holds of it, and from where it is an input of a kernel."""
    calls: Counter[int] = Counter()
    kept: list[TensorDomain] = []
    run = localize.local_domain

    def counting(tv: TensorView, *args: Any) -> TensorDomain:
        kept.append(tv.domain)
        calls[id(tv.domain)] += 1
        return run(tv, *args)

    monkeypatch.setattr(localize, "local_domain", counting)
    lower_case(Case(define_blocks, 2, (2, 2)), 2)
    assert calls and max(calls.values()) <= 3, calls.most_common(3)


@pytest.mark.finding("G4")
def test_cuts_of_a_domain_are_derived_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apart from which types of axes are asked for."""
    calls: Counter[tuple[int, int]] = Counter()
    kept: list[TensorDomain] = []
    run = placement.cut_origin

    def counting(tv: TensorView, axis: IterDomain) -> tuple[int, int]:
        kept.append(tv.domain)
        calls[id(tv.domain), axis.number] += 1
        return run(tv, axis)

    monkeypatch.setattr(placement, "cut_origin", counting)
    lower_case(Case(define_blocks, 2, (2, 2)), 2)
    assert calls and max(calls.values()) <= 6, calls.most_common(3)
