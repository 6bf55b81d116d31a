"""Binds the inputs of runs; runs host units, fusions that have host programs of their own."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from fuser import ops
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.types import ParallelType
from fuser.ops.define import define_scalar, define_tensor
from fuser.support import options
from fuser.support.errors import DefinitionError, InputError, ParseError, VerifyError
from hostir import (
    Allocate,
    HostIrContainer,
    HostIrEvaluator,
    PostOnStream,
    SetCurrentStream,
    Stream,
    as_scalar,
    equal,
    parse,
    verify,
)
from hostir.ir.buffer_aliasing import Storage
from hostir.ir.ops import NUMBER_OF_STREAMS, RANK
from hostir.lowering.pipeline import build_program
from hostir.runtime.context import MAX_PROGRAMS, Devices, RunBinder, UnitRunner
from multidevice import Communicator, DeviceMesh, simulate
from tests.support.handmade_programs import EXAMPLES, enter_streams, leave_streams, unit


def _assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want.double(), atol=1e-5, rtol=1e-5)


def _softmax(x: Any) -> Any:
    y = ops.exp(ops.sub(x, ops.max(x, [1], True)))
    return ops.div(y, ops.sum(y, [1], True))


def _program() -> HostIrContainer:
    hic = HostIrContainer()
    with hic:
        x = hic.input([-1, -1])
        y = hic.tensor(x.shape())
        hic.append(PostOnStream((x,), (y,), unit=hic.unit(unit(_softmax, 2))))
        hic.add_output(y)
    verify(hic)
    return hic


@pytest.mark.parametrize("late", [None, "all"])
def test_a_unit_follows_shapes(late: str | None) -> None:
    evaluator = HostIrEvaluator(_program(), late_stream=late)
    for shape in ((5, 6), (3, 1), (1, 7), (5, 6), (0, 4), (300, 33), (5, 6)):
        x = torch.randn(shape)
        for _ in range(2):
            _assert_close(evaluator.run([x])[0], torch.softmax(x.double(), 1))
        _assert_close(evaluator.evaluate([x])[0], torch.softmax(x.double(), 1))


def test_a_unit_is_compiled_once_per_class(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[tuple[int, ...]] = []
    original = build_program

    def counting(*args: Any, **options: Any) -> object:
        built.append(())
        return original(*args, **options)

    monkeypatch.setattr("hostir.runtime.context.build_program", counting)
    evaluator = HostIrEvaluator(_program())
    for rows in range(2, 12):
        evaluator.run([torch.randn(rows, 5)])
    assert len(built) == 1
    evaluator.run([torch.randn(0, 5)])
    assert len(built) == 2
    evaluator.run([torch.randn(7, 5)])
    assert len(built) == 2


def test_what_a_unit_remembers_is_bounded() -> None:
    fusion = unit(lambda x: ops.mul(x, 2.0), 3)
    runner = UnitRunner(0, fusion, None, torch.device("cpu"), options.settings(), HostIrEvaluator)
    for n in range(60):
        x = torch.randn(1 + n % 3, 1 + n % 5, 2 + n)
        out = torch.empty_like(x)
        runner([x], [out])
        assert torch.equal(out, 2 * x)
    assert runner.size() <= 2 * MAX_PROGRAMS


def test_scalars_strides_and_several_results() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        x = define_tensor([-1, -1], contiguity=False)
        scale = define_scalar(None, DataType.Double)
        for value in (x, scale):
            fusion.add_input(value)
        y = ops.mul(x, scale)
        fusion.add_output(y)
        fusion.add_output(ops.sum(y, [0]))
    hic = HostIrContainer()
    with hic:
        a, s = hic.input([4, 6]), hic.scalar(DataType.Double)
        rows, total = hic.tensor([4, 6]), hic.tensor([6])
        hic.append(Allocate(rows))
        hic.append(PostOnStream((a, s), (rows, total), unit=hic.unit(fusion)))
        hic.add_output(rows)
        hic.add_output(total)
    verify(hic)
    assert equal(parse(hic.full_text()), hic)
    evaluator = HostIrEvaluator(hic)
    for factor in (2.0, -0.5, 3.0):
        given = torch.randn(4, 6)
        got = evaluator.run([given, factor])
        _assert_close(got[0], given.double() * factor)
        _assert_close(got[1], (given.double() * factor).sum(0))


def test_units_on_the_rows_of_a_loop() -> None:
    hic = HostIrContainer()
    with hic:
        x, y = hic.input([7, 6]), hic.tensor([7, 6])
        number = hic.unit(unit(lambda x: ops.exp(ops.neg(x)), 1))
        hic.append(Allocate(y))
        enter_streams(hic, 3)
        with hic.loop(7) as i:
            hic.append(SetCurrentStream(Stream(i % 3)))
            row, out = hic.select(x, 0, i), hic.select(y, 0, i)
            hic.append(PostOnStream((row,), (out,), unit=number))
        leave_streams(hic, 3)
        hic.add_output(y)
    verify(hic)
    assert equal(parse(hic.full_text()), hic)
    for late in (None, "all", "entry", 0, 1, 2):
        evaluator = HostIrEvaluator(hic, late_stream=late)
        for _ in range(3):
            given = torch.randn(7, 6)
            _assert_close(evaluator.run([given])[0], torch.exp(-given.double()))


def test_a_unit_on_a_mesh_may_communicate() -> None:
    mesh = DeviceMesh([0, 1])
    fusion = Fusion()
    with FusionGuard(fusion):
        x = define_tensor([2, -1], contiguity=True)
        fusion.add_input(x)
        x.set_device_mesh(mesh)
        x.axis(0).parallelize(ParallelType.mesh_x)
        fusion.add_output(ops.sum(x, [0]))
    hic = HostIrContainer()
    with hic:
        a, total = hic.input([2, 6], mesh=mesh), hic.tensor([6], mesh=mesh)
        a.axis(0).parallelize(ParallelType.mesh_x)
        hic.append(PostOnStream((a,), (total,), unit=hic.unit(fusion)))
        hic.add_output(total)
    verify(hic)
    given = torch.randn(2, 6)

    def body() -> list[torch.Tensor]:
        communicator = Communicator.instance()
        evaluator = HostIrEvaluator(hic, communicator)
        mine = given[communicator.rank()].unsqueeze(0)
        return [evaluator.run([mine])[0] for _ in range(3)]

    with simulate(2) as world:
        for outs in world.run(body):
            for out in outs:
                _assert_close(out, given.double().sum(0))


# ------------------------------------------------------------------ what does not fit
def test_posts_that_do_not_fit_their_unit() -> None:
    hic = HostIrContainer()
    x, y, half = hic.input([4, 6]), hic.tensor([4, 6]), hic.tensor([4, 6], DataType.Half)
    wide = hic.tensor([4, 6, 2])
    number = hic.unit(unit(lambda x: ops.mul(x, 2.0), 2))
    for ins, outs, unit_number, words in (
        ((x,), (y,), 5, "no HostUnit5"),
        ((x, x), (y,), number, "expected 1 input for HostUnit0, got 2"),
        ((x,), (y, y), number, "expected 1 output for HostUnit0, got 2"),
        ((x,), (half,), number, "passes T2.* as output 0, .*: the dtype is __half, expected float"),
        ((x,), (wide,), number, "passes T3.* as output 0, .*: it has 3 axes, expected 2"),
    ):
        with pytest.raises(VerifyError, match=words):
            verify(hic.with_ops((PostOnStream(ins, outs, unit=unit_number),)))


def test_a_unit_does_not_update_its_inputs() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        x = define_tensor([-1], contiguity=True)
        fusion.add_input(x)
        fusion.add_output(ops.add(x, 1.0), x)
    hic = HostIrContainer()
    with pytest.raises(DefinitionError, match=r"T0.* in place"):
        hic.unit(fusion)


def test_inputs_that_do_not_fit_a_unit_are_named() -> None:
    hic = HostIrContainer()
    with hic:
        x, y, z = hic.input([4]), hic.input([5]), hic.tensor([4])
        hic.append(PostOnStream((x, y), (z,), unit=hic.unit(unit(ops.add, 1, 1))))
        hic.add_output(z)
    with pytest.raises(InputError, match=r"HostUnit0.*T1"):
        HostIrEvaluator(hic).run([torch.zeros(4), torch.zeros(5)])


def test_the_text_of_units_is_checked() -> None:
    text = EXAMPLES["HI-2 units"].build().full_text()
    program = parse(text)
    assert sorted(program.units) == [0, 1, 2]
    section = re.compile(r"^Host unit 1 :", re.MULTILINE)
    for wrong, words in (
        (
            text.replace("HostUnit1: Inputs={T0", "HostUnit1: Inputs={T7"),
            "differs from the section 'Host unit 1': expected HostUnit1: In",
        ),
        (section.sub("Host unit 0 :", text), "host unit 0 appears twice"),
    ):
        assert wrong != text
        with pytest.raises(ParseError, match=words):
            parse(wrong)
    without = parse(section.sub("Host unit 8 :", text))
    with pytest.raises(VerifyError, match="no HostUnit1"):
        verify(without)


# ------------------------------------------------------------------ binding the inputs of a run
def _binder(hic: HostIrContainer, *, is_checked: bool = False, **changed: Any) -> RunBinder:
    """Returns the binder of a program that launches no kernel and runs no unit."""

    def unused(*_: Any, **__: Any) -> Any:
        raise AssertionError("binding inputs launches nothing")

    devices = Devices(
        hic, None, options.settings(), unused, unused, team=(0,), votes=False, late_stream=None
    )
    binding = {"device": None, "rank": 0, "number_of_streams": 3, **changed}
    return RunBinder(hic, Storage.of(hic), devices, is_checked=is_checked, **binding)


def _added() -> HostIrContainer:
    """Returns the program of x [n, 6] + y [n, 6]."""
    hic = HostIrContainer()
    with hic:
        x, y = hic.input([-1, 6]), hic.input([-1, 6])
        z = hic.tensor(x.shape())
        hic.append(Allocate(z))
        hic.append(ops.add(x, y), into=z)
        hic.add_output(z)
    return hic


def test_a_frame_has_the_inputs_the_sizes_and_the_numbers_of_the_evaluator() -> None:
    hic = _added()
    binder, given = _binder(hic), [torch.ones(4, 6), torch.ones(4, 6)]
    frame = binder.frame([*given])
    bound = [frame.tensors[tv] for tv in hic.inputs if isinstance(tv, TensorView)]
    assert list(map(id, bound)) == list(map(id, given))
    assert (frame.values[RANK], frame.values[NUMBER_OF_STREAMS]) == (0, 3)
    (out,) = hic.outputs
    assert frame.local_shape(out) == (4, 6)
    assert frame.machine.device == torch.device("cpu")
    # Only the sizes of inputs are a result of the check.
    assert list(binder.check(given).values()) == [4, 4]
    # One device has one machine, whose streams persist.
    assert binder.frame([*given]).machine is frame.machine


def test_inputs_that_do_not_fit_are_refused_before_a_frame_is_made() -> None:
    binder, x = _binder(_added()), torch.ones(4, 6)
    for wrong, words in (
        ([x], "1"),
        ([x, torch.ones(4, 5)], "T1"),
        ([x, torch.ones(5, 6)], "T1"),
        ([x, torch.ones(4, 6, dtype=torch.float64)], r"T1.* dtype float"),
        ([x, 2.0], r"T1.* scalar"),
        ([x, torch.ones(6, 4).t()], r"T1.* stride"),
    ):
        with pytest.raises(InputError, match=words):
            binder.frame([*wrong])
    # The caller has checked kinds, dtypes and layouts: only sizes are bound.
    frame = binder.frame([x, torch.ones(6, 4).t()], checked_on=torch.device("cpu"))
    assert frame.tensors[frame.program.inputs[1]].stride() == (1, 4)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="T1"):
        binder.frame([x, torch.ones(5, 6)], checked_on=torch.device("cpu"))


def test_a_device_that_was_chosen_counts_for_all_inputs() -> None:
    x = torch.ones(4, 6)
    with pytest.raises(InputError, match=r"T0.* device meta.* device cpu"):
        _binder(_added(), device=torch.device("meta")).frame([x, x])


def test_an_impossible_local_shape_is_refused_before_anything_runs() -> None:
    hic = HostIrContainer()
    with hic:
        x = hic.input([-1])
        y = hic.tensor([x.size(0) - 4])
        hic.append(Allocate(y, zero_init=True))
        hic.add_output(y)
    binder = _binder(hic)
    assert binder.frame([torch.ones(6)]).local_shape(y) == (2,)
    with pytest.raises(InputError, match=r"axis 0 of T\d+.* = -1"):
        binder.frame([torch.ones(3)])


def test_only_a_binder_that_checks_finds_a_race() -> None:
    hic = HostIrContainer()
    with hic:
        x = hic.input([-1])
        y, z = hic.tensor(x.shape()), hic.tensor(x.shape())
        hic.append(Allocate(y), Allocate(z), SetCurrentStream(Stream(as_scalar(0))))
        hic.append(ops.add(x, 1.0), into=y)
        hic.append(SetCurrentStream(Stream(as_scalar(1))))
        hic.append(ops.add(y, 1.0), into=z)  # does not wait for stream 0
        hic.add_output(z)
    _binder(hic).frame([torch.ones(4)])
    with pytest.raises(VerifyError, match="Stream 1"):
        _binder(hic, is_checked=True).frame([torch.ones(4)])


def test_numbers_of_later_inputs_are_checked_only_where_a_dtype_limits_them() -> None:
    plain = _added()
    assert _binder(plain).check_of_numbers([torch.ones(4, 6), torch.ones(4, 6)]) is None
    hic = HostIrContainer()
    with hic:
        x, top = hic.input([-1], dtype=DataType.Int32), hic.scalar()
        y = hic.tensor(x.shape(), dtype=DataType.Int32)
        hic.append(Allocate(y))
        hic.append(ops.clamp(x, None, top), into=y)  # pyright: ignore[reportArgumentType]
        hic.add_output(y)
    given = torch.arange(4, dtype=torch.int32)
    check = _binder(hic).check_of_numbers([given, 2])
    assert check is not None
    check([given, 2**31 - 1])
    with pytest.raises(InputError, match=str(2**31)):
        check([given, 2**31])
