"""Profiles on GPUs: plausible registers, launch shapes and bandwidths, by CUPTI and by events.

Run `python -m pytest tests/gpu/fuser/test_profiler.py`, and under mpirun with `--with-mpi` on two
GPUs.
"""

from __future__ import annotations

import pytest
import torch

import fuser
from fuser import DataType, FusionDefinition, FusionProfile, ParallelType, PythonProfiler
from fuser.multidevice import Communicator, DeviceMesh, shard_tensor
from fuser.nvfuser.pytorch_utils import get_device_properties

N = 1 << 26


def profile_of_neg() -> FusionProfile:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True, dtype=DataType.BFloat16)
        fd.add_output(fd.ops.cast(fd.ops.neg(x), DataType.BFloat16))
    given = [torch.randn(N, device="cuda").bfloat16()]
    with PythonProfiler() as prof:
        (out,) = fd.execute(given)
    assert torch.equal(out, -given[0])
    return prof.profile


def check(profile: FusionProfile) -> None:
    (row,) = profile.kernel_profiles
    assert (row.scheduler, row.input_bytes, row.output_bytes) == ("pointwise", 2 * N, 2 * N)
    assert row.device == torch.cuda.current_device() and row.registers and row.registers <= 255
    # A GPU reads no faster than its memory, and half of that is easy.
    assert row.percentage_peak_bandwidth is not None and 40 < row.percentage_peak_bandwidth < 101
    properties = get_device_properties()
    assert properties is not None and 1000 < properties["gpu_peak_bandwidth_gbps"] < 20000
    part = row.effective_bandwidth_gbs / properties["gpu_peak_bandwidth_gbps"]
    assert row.percentage_peak_bandwidth == pytest.approx(100 * part)
    threads = [int(n) for n in row.block_str.strip("[]").split(", ")]
    assert 32 <= threads[0] * threads[1] * threads[2] <= 1024
    assert row.time_ms <= profile.cuda_evt_time_ms


def test_cupti_and_events_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    by_cupti = profile_of_neg()
    check(by_cupti)
    assert "CUPTI" in by_cupti.source
    monkeypatch.setenv("FUSER_PROF", "enable.nocupti")
    by_events = profile_of_neg()
    check(by_events)
    assert "events" in by_events.source
    times = by_cupti.kernel_time_ms, by_events.kernel_time_ms
    assert max(times) < 1.5 * min(times), times


def test_random_numbers_are_those_of_one_run() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        fd.add_output(fd.ops.add(x, fd.ops.uniform(0.0, 1.0, [64], dtype=DataType.Float)))
    given = [torch.zeros(64, device="cuda")]
    torch.manual_seed(1)
    plain = [fd.execute(given)[0] for _ in range(2)]
    torch.manual_seed(1)
    with PythonProfiler():
        profiled = [fd.execute(given)[0] for _ in range(2)]
    for mine, theirs in zip(plain, profiled, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.mpi(min_size=2)
def test_an_allreduce_is_a_row(comm: Communicator) -> None:
    d, m, k = comm.size(), 1024, 4096
    device = torch.device("cuda", torch.cuda.current_device())
    with FusionDefinition() as fd:
        x, w = (
            fd.define_tensor([-1, -1], contiguity=True, dtype=DataType.BFloat16) for _ in range(2)
        )
        fd.add_output(fd.ops.linear(x, w))
        for tv in (x, w):
            tv.set_device_mesh(DeviceMesh(range(d)))
            tv.outer_split(1, d)
            tv.axis(1).parallelize(ParallelType.mesh_x)
    full = torch.randn(m, k, generator=torch.Generator().manual_seed(0)).bfloat16()
    shards = [shard_tensor(full, tv).to(device) for tv in (x, w)]
    with PythonProfiler() as prof:
        fd.execute(shards)
    assert prof.profile is fuser.get_fusion_profile()
    (sent,) = (r for r in prof.profile.kernel_profiles if r.scheduler == "communication")
    assert sent.input_bytes == sent.output_bytes == m * m * 2 and sent.time_ms > 0
    assert sent.device == device.index
