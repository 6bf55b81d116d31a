"""The communicator finds rank and size in each launcher's environment, and runs without one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fuser.support.errors import CommunicationError
from multidevice.coordination.launcher import ALONE, LauncherInfo, read_launch, store_address
from tests.support import mpi_abort
from tests.support.limits import HANG_S

_PREFIXES = (
    *("OMPI_COMM_WORLD_", "PMI_", "MPI_LOCAL", "RANK", "WORLD_SIZE", "LOCAL_", "SLURM_"),
    *("MASTER_", "TORCHELASTIC_", "FUSER_MASTER", "NVFUSER_"),
)

OMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "6",
    "SLURM_LOCALID": "2",
    "SLURM_NTASKS_PER_NODE": "3",
}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(_PREFIXES):
            monkeypatch.delenv(name)


def _set(monkeypatch: pytest.MonkeyPatch, *tables: dict[str, str], **extra: str) -> None:
    for table in (*tables, extra):
        for name, value in table.items():
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ([], ALONE),
        ([OMPI], LauncherInfo("mpi", 3, 8, 1, 4)),
        ([MPICH], LauncherInfo("mpi", 1, 4, 1, 4)),
        ([TORCHRUN], LauncherInfo("torchrun", 2, 4, 0, 2)),
        ([SLURM], LauncherInfo("slurm", 5, 6, 2, 3)),
        ([SLURM, OMPI], LauncherInfo("mpi", 3, 8, 1, 4)),
        ([TORCHRUN, MPICH], LauncherInfo("mpi", 1, 4, 1, 4)),
        ([TORCHRUN, MPICH, {"TORCHELASTIC_RUN_ID": "x"}], LauncherInfo("torchrun", 2, 4, 0, 2)),
        ([{"PMI_RANK": "1", "PMI_SIZE": "2"}], LauncherInfo("mpi", 1, 2, -1, -1)),
        ([MPICH, {"NVFUSER_DISABLE": "multidevice"}], ALONE),
    ],
)
def test_launchers(
    monkeypatch: pytest.MonkeyPatch, tables: list[dict[str, str]], expected: LauncherInfo
) -> None:
    _set(monkeypatch, *tables)
    assert read_launch() == expected


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"RANK": "abc"}, "RANK is 'abc', not a number"),
        ({"RANK": "4"}, "RANK=4, WORLD_SIZE=4"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is missing although RANK is set"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2, LOCAL_WORLD_SIZE=2"),
    ],
)
def test_a_broken_environment_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, str], text: str
) -> None:
    _set(monkeypatch, TORCHRUN, change)
    with pytest.raises(CommunicationError, match=text):
        read_launch()


def test_a_slurm_batch_script_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, SLURM_PROCID="0", SLURM_NTASKS="4")
    with pytest.warns(UserWarning, match="SLURM_LOCALID"):
        assert read_launch() == ALONE


def test_the_store_never_takes_the_port_of_the_default_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launch = LauncherInfo("torchrun", 0, 2, 0, 2)
    assert store_address(launch) == ("127.0.0.1", 29542)
    _set(monkeypatch, MASTER_ADDR="host", MASTER_PORT="65530")
    assert store_address(launch) == ("host", 65488)
    _set(monkeypatch, NVFUSER_MASTER_ADDR="other", FUSER_MASTER_PORT="1234")
    assert store_address(launch) == ("other", 1234)


def test_several_hosts_need_an_address() -> None:
    with pytest.raises(CommunicationError, match="FUSER_MASTER_ADDR"):
        store_address(LauncherInfo("slurm", 0, 4, 0, 2))


@pytest.mark.skipif(mpi_abort.world_size() > 1, reason="starts a process without a launcher")
def test_alone_there_is_no_barrier_and_nothing_heavy_is_imported() -> None:
    program = """
import sys
import multidevice
assert "torch" not in sys.modules, "importing the package imports torch"
comm = multidevice.Communicator.instance()
assert (comm.size(), comm.rank(), comm.local_size(), comm.local_rank()) == (1, 0, 1, 0)
assert not comm.is_available()
try:
    comm.barrier()
except RuntimeError as error:
    assert "The singleton Communicator isn't available" in str(error)
else:
    raise AssertionError("barrier did not raise")
import torch
x = torch.ones(3)
out = torch.zeros(3)
comm.backend_for("cpu").allreduce(out, x, op="SUM", team=(0,)).wait()
assert torch.equal(out, x)
comm.agree(None, b"digest")
assert not {"mpi4py", "cupy", "nccl"} & set(sys.modules)
assert sys.excepthook is sys.__excepthook__
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=HANG_S)
