"""Options of one call: each has its effect on that call, and on no other."""

from __future__ import annotations

import pytest
import torch

from fuser import FusionDefinition, ParallelType, TensorView, multidevice
from fuser.frontend.executor_cache import FusionExecutorCache
from fuser.ir.binding import Binder
from fuser.kernels.executor import FusedKernelExecutor
from fuser.support.errors import (
    DefinitionError,
    InputError,
    KernelError,
    ProgramMismatchError,
)
from fuser.support.inputs import torch_device
from fuser.support.options import settings


def row_sums() -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.sum(fd.ops.mul(x, 2.0), dim=1))
    return fd


def executor(fec: FusionExecutorCache) -> FusedKernelExecutor:
    """Returns the executor of the only kernel of the most recent program."""
    evaluator = fec._last().evaluator
    (group,) = evaluator.program.groups
    runner = evaluator.kernel(group)
    assert isinstance(runner, FusedKernelExecutor)
    return runner


def test_checked_mode_is_an_option_of_one_call() -> None:
    fd, x = row_sums(), torch.randn(5, 33)
    expected = (x.double() * 2).sum(1).float()
    (checked,) = fd.execute([x], _enable_options=["checked"])
    torch.testing.assert_close(checked, expected)
    assert executor(fd.fec).checked
    (plain,) = fd.execute([x])
    torch.testing.assert_close(plain, expected)
    assert not executor(fd.fec).checked


def test_checked_mode_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSER_ENABLE", "checked")
    fd = row_sums()
    fd.execute([torch.randn(5, 33)])
    assert executor(fd.fec).checked


def test_a_finding_names_tensor_op_and_line(monkeypatch: pytest.MonkeyPatch) -> None:
    # The executor itself compares sizes. Without this check, only checked mode finds the error.
    monkeypatch.setattr(Binder, "_check_axis", lambda *_: None)
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        fd.add_output(fd.ops.exp(x))
    kernel = FusedKernelExecutor(
        fd.fusion, scheduler="pointwise", name="small", settings=settings(["checked"])
    )
    with pytest.raises(KernelError) as found:
        kernel.run([torch.zeros(8)], [torch.zeros(4)], sizes={})
    message = str(found.value)
    assert "T1[4], which has 4 elements" in message
    assert "T1 belongs to" in message and "= expf(T0" in message
    assert "test_options_of_a_call.py:" in message


def test_schedules_of_another_device_run_on_the_cpu() -> None:
    """The H200's schedule of a reduction over long rows uses a block per row."""
    fd, x = row_sums(), torch.randn(6, 4096)
    expected = (x.double() * 2).sum(1).float()
    for options, has_threads in ((["schedules_for(h200)", "checked"], True), ([], False)):
        (out,) = fd.execute([x], _enable_options=options)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-3)
        (variant,) = executor(fd.fec).variants
        assert variant.kernel.source.uses_barriers is has_threads


def matrix_sum(mesh: multidevice.DeviceMesh) -> tuple[FusionDefinition, TensorView]:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.sum(x, dim=1))
        x.set_device_mesh(mesh)
        x.outer_split(1, 2)
        x.axis(1).parallelize(ParallelType.mesh_x)
    return fd, x


def test_ranks_with_different_options_disagree() -> None:
    fd, x = matrix_sum(multidevice.DeviceMesh([0, 1]))
    full = torch.randn(4, 6)

    def body(options: list[list[str]]) -> str:
        rank = multidevice.Communicator.instance().rank()
        shard = multidevice.shard_tensor(full, x)
        try:
            (out,) = fd.execute([shard], _enable_options=options[rank])
        except ProgramMismatchError as error:
            return str(error)
        torch.testing.assert_close(out, full.double().sum(1).float())
        return ""

    with multidevice.simulate(2) as world:
        assert all("checked" in text for text in world.run(lambda: body([["checked"], []])))
        assert world.run(lambda: body([["checked"], ["checked"]])) == ["", ""]


def test_a_stream_axis_is_not_merged_with_another() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 6], contiguity=True)
        x.axis(0).parallelize(ParallelType.stream)
        with pytest.raises(DefinitionError, match="cannot merge a stream axis"):
            x.merge(0)


def test_segment_set_runs() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        a = fd.ops.segment_set(fd.ops.exp(x))
        b = fd.ops.segment_set(fd.ops.permute(a, [1, 0]))
        fd.add_output(fd.ops.sum(b, dim=1))
        fd.add_output(fd.ops.segment_set(a))
    t = torch.randn(5, 7)
    for inputs in ([t], [t], [torch.randn(3, 2)]):
        sums, same = fd.execute(inputs)
        expected = inputs[0].double().exp()
        torch.testing.assert_close(sums, expected.sum(0).float())
        torch.testing.assert_close(same, expected.float())


def test_without_kernel_reuse_every_size_has_parameters_of_its_own() -> None:
    for options, kernels in (((), 1), (["kernel_reuse"], 2)):
        fd = row_sums()
        for width in (4096, 8192):
            x = torch.randn(6, width)
            (out,) = fd.execute(
                [x], _enable_options=["schedules_for(h200)"], _disable_options=options
            )
            expected = (x.double() * 2).sum(1).float()
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-3)
        assert len(executor(fd.fec).variants) == kernels


@pytest.mark.parametrize("device", [-1, 300, "abc", "cuda:x"])
def test_a_device_that_does_not_exist(device: int | str) -> None:
    with pytest.raises(InputError, match=f"device='?{device}"):
        row_sums().execute([torch.randn(2, 3)], device=device)


def test_cuda_is_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors name their device with an index; "cuda" once counted as a different device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert torch_device("cuda") == torch.device("cuda", 1) == torch_device(1)
    assert torch_device("cuda:0") == torch.device("cuda", 0)
    assert torch_device("cpu") == torch.device("cpu")
