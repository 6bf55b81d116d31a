"""Inspection of definitions by nvFuser's names: inputs, ops, axes, kernels, scheduled IR."""

from __future__ import annotations

import re

import pytest
import torch

import fuser
import multidevice
from fuser import FusionDefinition, FusionExecutorCache, ParallelType, UnsupportedError
from fuser.frontend.program_cache import PROGRAMS
from fuser.ir.binding import Argument
from fuser.support.errors import ShardingError


def two_kernels() -> FusionDefinition:
    """Defines a kernel, a library call and two more kernels, one of which reads a scalar."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        w = fd.define_tensor([-1, -1], contiguity=True)
        factor = fd.define_scalar(dtype=fuser.DataType.Double)
        h = fd.ops.matmul(fd.ops.add(x, 1.0), w)
        fd.add_output(fd.ops.sum(fd.ops.exp(w), dim=1))
        fd.add_output(fd.ops.mul(h, factor))
    return fd


def given(rows: int = 8) -> list[Argument]:
    return [torch.randn(rows, 16), torch.randn(16, 32), 2.0]


def test_inputs_and_outputs_are_methods_as_well() -> None:
    fd = two_kernels()
    inputs, outputs = fd.fusion.inputs(), fd.fusion.outputs()
    assert [str(v) for v in inputs][2] == "d5" and len(outputs) == 2
    inputs.clear()
    outputs.clear()
    assert len(fd.fusion.inputs()) == 3 and len(fd.fusion.outputs()) == 2
    copy, _ = fd.fusion.copy()
    assert len(copy.inputs()) == 3 and len(copy.outputs()) == 2
    assert set(fd.fusion.inputs()) < set(fd.fusion.vals())


def test_axes_know_what_made_and_what_reads_them() -> None:
    with FusionDefinition() as fd:
        tv = fd.define_tensor([-1, 8], contiguity=True)
        fd.add_output(fd.ops.neg(tv))
    whole = tv.axis(1)
    assert whole.definition() is None and whole.uses() == []
    tv.split(1, 2)
    split = tv.axis(2).definition()
    assert type(split) is fuser.Split and whole.uses() == [split]
    assert str(split) == f"Split: {whole} by factor 2 -> {tv.axis(1)}, {tv.axis(2)}\n"
    assert (split.outer(), split.inner()) == (tv.axis(1), tv.axis(2))
    assert (split.input(0), split.output(0)) == (whole, split.outer())
    assert str(tv.axis(1).extent()) == "4" and str(tv.axis(2).extent()) == "2"
    outer = tv.axis(0)
    tv.merge(0, 1)
    merge = tv.axis(0).definition()
    assert type(merge) is fuser.Merge and (merge.outer(), merge.inner()) == (outer, split.outer())
    assert not tv.axis(0).is_reduction() and not tv.axis(0).is_tensor()
    for index in (1, -1):
        with pytest.raises(IndexError, match=r"input\(-?1\) does not exist: Split"):
            split.input(index)


def test_ops_are_of_nvfusers_classes() -> None:
    with FusionDefinition() as fd:
        tv = fd.define_tensor([4, 1], contiguity=[True, None])
        squeezed = fd.ops.squeeze(tv, [1])
        wide = fd.ops.broadcast(squeezed, [True, False])
        out = fd.ops.reshape(squeezed, [2, 2])
        fd.add_output(wide)
        fd.add_output(out)
    made = [
        (fuser.SqueezeOp, squeezed, tv),
        (fuser.BroadcastOp, wide, squeezed),
        (fuser.ReshapeOp, out, squeezed),
    ]
    for kind, value, read in made:
        op = value.definition()
        assert type(op) is kind and isinstance(op, fuser.Expr) and isinstance(op, fuser.Statement)
        assert op.input(0) is read and op.output(0) is value and op in read.uses()
        with pytest.raises(fuser.NoOperandError):
            op.input(-1)
    values = [tv, tv.axis(0), tv.axis(0).extent(), tv.domain()]
    assert all(isinstance(v, fuser.Val) and not isinstance(v, fuser.Expr) for v in values)
    assert tv.is_tensor() and not tv.axis(0).extent().is_symbolic()


def test_scalars_say_what_they_do_not_know() -> None:
    with FusionDefinition() as fd:
        n, m = (fd.define_scalar(dtype=fuser.DataType.Int) for _ in range(2))
        ratio = fd.ops.div(n, m)
    assert n.definition() is None
    with pytest.raises(UnsupportedError, match="simplified formula"):
        ratio.definition()
    with pytest.raises(UnsupportedError, match="does not store which ops read it"):
        n.uses()


def test_kernels_and_scheduled_ir_of_a_call() -> None:
    fd, inputs = two_kernels(), given()
    fd.execute(inputs)
    assert fd.fec.is_compiled(inputs)
    kernels = fd.fec.get_cuda_kernel(inputs)
    assert kernels.count("__global__") == fd.fec.statistics()["kernels"] == 3
    assert kernels in fd.fec.get_cuda_kernel(inputs, intrinsic_code=True)
    text = fd.fec.get_scheduled_ir(inputs)
    assert text == fd.fec.get_most_recent_scheduled_ir()
    parts = text.split("} // %kernel\n")[:-1]
    assert len(parts) == fd.fec.statistics()["segments"] == 4
    assert [p.count("matmul(") for p in parts] == [0, 1, 0, 0]
    assert "TransformPrinter" not in text
    full = fd.fec.get_scheduled_ir(inputs, tensor_transforms=True)
    assert full == fd.fec.get_most_recent_scheduled_ir(tensor_transforms=True)
    assert full.count("TransformPrinter") == 4
    assert not fd.fec.is_compiled(given(0))
    words = (
        r"Fusion is not compiled!.*the last run had float32\[8, 16\].*asked for float32\[0, 16\]"
    )
    with pytest.raises(fuser.NotCompiledError, match=words):
        fd.fec.get_cuda_kernel(given(0))


@pytest.mark.parametrize("options", [(), ("schedules_for(h200)",)])
def test_inputs_that_would_compile_nothing_are_compiled(options: tuple[str, ...]) -> None:
    """Other sizes, a number of another type, and gradients use the same program and kernels."""
    fd = two_kernels()
    fd.execute(given(), _enable_options=options)
    w = torch.randn(16, 32)
    others: list[list[Argument]] = [
        given(9),
        [torch.randn(8, 16), w, 2],
        [torch.randn(8, 16, requires_grad=True), w, 2.0],
    ]
    for inputs in others:
        lowerings = PROGRAMS.lowerings
        assert fd.fec.is_compiled(inputs)
        text, ir = fd.fec.get_cuda_kernel(inputs), fd.fec.get_scheduled_ir(inputs)
        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            patch.setattr("fuser.kernels.executor.compile_kernels", refuse_to_compile, raising=True)
            fd.execute(inputs, _enable_options=options)
        assert PROGRAMS.lowerings == lowerings
        # The texts are those of the kernels that ran.
        assert (text, ir) == (fd.fec.get_cuda_kernel(inputs), fd.fec.get_scheduled_ir(inputs))
        assert fd.fec.get_most_recent_scheduled_ir() == ir


def refuse_to_compile(*_: object, **__: object) -> None:
    raise AssertionError("a kernel is compiled")


def test_sizes_that_need_another_kernel_of_the_program_are_not_compiled() -> None:
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.exp(fd.define_tensor([-1, -1], contiguity=True)))
    large, small = torch.ones(512, 4096), torch.ones(2, 3)
    options = ["schedules_for(h200)"]
    fd.execute([large], _enable_options=options)
    assert fd.fec.program_like([small]) is fd.fec.program_like([large])
    assert not fd.fec.is_compiled([small])
    with pytest.raises(fuser.NotCompiledError, match=r"float32\[512, 4096\].*float32\[2, 3\]"):
        fd.fec.get_cuda_kernel([small])
    fd.execute([small], _enable_options=options)
    assert fd.fec.is_compiled([small]) and fd.fec.is_compiled([large])
    assert fd.fec.get_cuda_kernel([small]) != fd.fec.get_cuda_kernel([large])


def test_inputs_that_do_not_fit_are_not_compiled() -> None:
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.exp(fd.define_tensor([-1, -1], contiguity=True)))
    fd.execute([torch.ones(4, 8)])
    for wrong in (torch.ones(4, 8, dtype=torch.float64), torch.ones(4)):
        assert not fd.fec.is_compiled([wrong])
        with pytest.raises(fuser.InputError, match="to be bound to a tensor of"):
            fd.fec.get_cuda_kernel([wrong])


def test_the_texts_are_those_of_the_call_that_ran_last() -> None:
    """Layouts and alignments decide which variant of a kernel runs."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1])
        fd.add_output(fd.ops.exp(x))
    dense, apart = torch.randn(64, 64), torch.randn(64, 65)[:, 1:]
    odd = torch.randn(64 * 64 + 1)[1:].view(64, 64)
    texts: list[str] = []
    for x in (dense, apart, dense, odd):
        fd.execute([x], _enable_options=["schedules_for(h200)"])
        assert fd.fec.get_most_recent_scheduled_ir() == fd.fec.get_scheduled_ir([x])
        texts.append(fd.fec.get_cuda_kernel([x]))
    assert texts[0] == texts[2] and len({*texts}) == 3


def test_kernels_of_a_rank_are_of_its_shards() -> None:
    def run() -> None:
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, 8], contiguity=True)
            y = fd.ops.exp(x)
            total = fd.ops.sum(y, dim=0)
            fd.add_output(y)
            fd.add_output(total)
            x.set_device_mesh(range(2))
            x.outer_split(0, 2)
            x.axis(0).parallelize(ParallelType.mesh_x)
        shard = torch.randn(4, 8)
        fd.execute([shard])
        text = fd.fec.get_scheduled_ir([shard])
        assert "deviceIdx" not in text.split("} // %kernel")[0], text
        first, second = fd.fec.get_output_shardings()
        assert first.axis_sharded_on(ParallelType.mesh_x) == 0
        assert second.axis_sharded_on(ParallelType.mesh_x) == -1
        assert re.search(r"__global__", fd.fec.get_cuda_kernel([shard]))

    with multidevice.simulate(2) as world:
        world.run(run)


def gathered_linear(d: int) -> FusionDefinition:
    """Defines x [DIDx(m), k] and w [DIDx(n), k] -> [m, DIDx(n)]."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        w = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.linear(x, w))
    for tv in (x, w):
        tv.set_device_mesh(range(d))
        tv.outer_split(0, d)
        tv.axis(0).parallelize(ParallelType.mesh_x)
    return fd


@pytest.mark.finding("G5")
@pytest.mark.parametrize("options", [(), ("steps",)])
def test_output_shardings_have_no_streams_that_overlap_chose(options: tuple[str, ...]) -> None:
    def run() -> None:
        fd = gathered_linear(2)
        shards = [torch.randn(4, 8), torch.randn(3, 8)]
        fd.execute(shards, _enable_options=options)
        assert ("FOR" in str(fd.fec.host_program())) == bool(options)
        for given in ((), (shards,)):
            (found,) = fd.fec.get_output_shardings(*given)
            assert found.axes == {ParallelType.mesh_x: 1}
            assert found.mesh == multidevice.DeviceMesh([0, 1])

    with multidevice.simulate(2) as world:
        world.run(run)


@pytest.mark.finding("G7")
@pytest.mark.parametrize("options", [(), ("machine(h200)",)])
def test_programs_of_more_ranks_than_the_job_has_can_be_shown(
    options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSER_ENABLE", ",".join(options))
    fd = gathered_linear(64)
    shards = [torch.randn(4, 8), torch.randn(3, 8)]
    program = FusionExecutorCache(fd.fusion).program_for(shards)
    assert "type=Allgather, team=(0..63)" in str(program)
    with pytest.raises(ShardingError, match="names rank 63, but the job has 1 rank"):
        gathered_linear(64).execute(shards)


def test_inputs_and_outputs_are_found_while_a_definition_is_written() -> None:
    with FusionDefinition() as fd:
        x, y = fd.define_tensor([4]), fd.define_tensor([6])
        fd.add_output(x)
        assert x in fd.fusion.outputs and y not in fd.fusion.outputs
        assert fd.fusion.inputs.index(y) == fd.fusion.inputs().index(y) == 1
        assert y in fd.fusion.inputs() and y not in fd.fusion.outputs()
        with pytest.raises(ValueError, match="is not in the list"):
            fd.fusion.outputs.index(y)
    assert not fd.fusion.exprs


def test_enumerations_print_as_nvfusers() -> None:
    assert repr(fuser.DataType.Float) == "<DataType.Float: 1>"
    assert str(fuser.ParallelType.tma) == "ParallelType.tma" and int(fuser.ParallelType.tma) == 15
    assert repr(fuser.SchedulerType.none) == "<SchedulerType.none: 0>" and fuser.SchedulerType.none
    assert repr(fuser.CommunicatorBackend.cuda) == "<CommunicatorBackend.cuda: 2>"
    entries = getattr(fuser.SchedulerType, "__entries")
    assert entries["resize"][0] is fuser.SchedulerType.resize
    assert {fuser.DataType.Half: 1}[fuser.DataType.Half] == 1
    with pytest.raises(TypeError, match="not a number"):
        int(fuser.MemoryType.local)


def test_versions_are_ordered_by_their_numbers() -> None:
    from fuser.support.version import Version

    assert fuser.version() == fuser.__version__ == Version(f"{fuser.__version__}+git81c4b22")
    assert Version("0.10") > "0.9.1" and Version("0.2.36+git1") <= Version("0.2.36")
    assert not Version("0.1") != "0.1.0" and Version("0.1") != "0.2"  # noqa: SIM202
    assert hash(Version("1.0")) == hash(Version("1")) and not Version("1.0") > "1"
    with pytest.raises(ValueError, match="is not a version"):
        _ = Version("1.0") < "new"


def test_a_descriptor_tells_order_and_contiguity() -> None:
    """Compares with torch: permutations of dense tensors, parts of tensors, expanded axes."""
    dense = torch.empty(3, 4, 5)
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        found = fuser.compute_tensor_descriptor(
            list(dense.permute(order).shape), list(dense.permute(order).stride())
        )
        assert found == ([True] * 3, [2 - axis for axis in order])
    part = dense[:, 1:]
    assert fuser.compute_tensor_descriptor(part.shape, part.stride())[0] == [False, True, True]
    wide = torch.empty(3, 1).expand(3, 7)
    assert fuser.compute_tensor_descriptor(wide.shape, wide.stride()) == ([True, None], [1, 0])
    with pytest.raises(fuser.DefinitionError, match="negative stride"):
        fuser.compute_tensor_descriptor([2], [-1])
    with pytest.raises(TypeError, match="sizes"):
        fuser.compute_tensor_descriptor(2, [1])  # pyright: ignore[reportArgumentType]
