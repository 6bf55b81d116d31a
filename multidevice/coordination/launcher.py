"""Reads the rank, the size and the launcher of this process from environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass

from fuser.support import options
from fuser.support.errors import CommunicationError, warn


@dataclass(frozen=True)
class LauncherInfo:
    """The position of this process in its job, as the launcher's environment variables say.

    `launcher` is none, mpi, torchrun, slurm or simulated. `local_rank` is the number of this
    process among the ranks of its host, and `local_size` the number of these ranks; -1 means that
    the launcher does not define the value.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int


ALONE = LauncherInfo("none", 0, 1, 0, 1)

# launcher -> the variables of rank, size, local rank, local size. The first launcher whose rank is
# set is used. Scripts under mpirun also export RANK, so torchrun is tried first only if its agent
# has set its own variable.
_LAUNCHERS = (
    (
        "mpi",
        (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
    ),
    ("mpi", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
    ("torchrun", ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")),
    ("slurm", ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")),
)


def read_launch() -> LauncherInfo:
    """Reads the environment variables that the launcher sets; returns rank, size and launcher.

    Without such variables, this process is rank 0 of a job of one rank.

    Raises:
        CommunicationError: a variable is missing, is not a number, or contradicts another variable.
    """
    if options.disabled("multidevice"):
        return ALONE
    innermost = "torchrun" if os.environ.get("TORCHELASTIC_RUN_ID") else ""
    for launcher, names in sorted(_LAUNCHERS, key=lambda row: row[0] != innermost):
        if os.environ.get(names[0]):
            found = _read(launcher, names)
            if found is not None:
                return found
    return ALONE


def _read(launcher: str, names: tuple[str, str, str, str]) -> LauncherInfo | None:
    values: list[int] = []
    for position, name in enumerate(names):
        text = os.environ.get(name)
        if not text and launcher == "slurm":
            # sbatch sets some of these variables for the batch script itself, which is not a rank.
            if int(os.environ.get("SLURM_NTASKS", "1") or 1) > 1:
                warn(f"{name} is not set: running as one rank")
            return None
        if not text and position >= 2:
            values.append(-1)
            continue
        if not text or not text.isdigit():
            found = (
                f"is {text!r}, not a number" if text else f"is missing although {names[0]} is set"
            )
            raise CommunicationError(f"the launcher's environment variable {name} {found}")
        values.append(int(text))
    rank, size, local_rank, local_size = values
    if rank >= size or local_rank >= local_size > 0:
        raise CommunicationError(
            f"the launcher's environment variables contradict each other: {names[0]}={rank}, "
            f"{names[1]}={size}, {names[2]}={local_rank}, {names[3]}={local_size}: a rank must be "
            "less than the number of ranks"
        )
    return LauncherInfo(launcher, rank, size, local_rank, local_size)


def store_address(launch: LauncherInfo) -> tuple[str, int]:
    """Returns the host and the port of the job's TCP store, over which ranks exchange addresses.

    The port differs from the port of torch's default process group.

    Raises:
        CommunicationError: the ranks are on several hosts and no address is given, or MASTER_PORT
            is not a port number.
    """
    host = options.master_addr() or os.environ.get("MASTER_ADDR")
    if not host:
        if launch.local_size not in (-1, launch.size):
            raise CommunicationError(
                f"the {launch.size} ranks of this job are on several hosts: set FUSER_MASTER_ADDR "
                "to the host of rank 0"
            )
        host = "127.0.0.1"
    port = options.master_port()
    if port is None:
        text = os.environ.get("MASTER_PORT", "29500")
        if not text.isdigit() or not 0 < int(text) < 65536:
            raise CommunicationError(
                f"MASTER_PORT={text!r} is not a port number: expected a number from 1 to 65535"
            )
        port = int(text) + 42
        port = port if port < 65536 else port - 84
    return host, port


def uses_agent_store() -> bool:
    """Returns whether torchrun's agent serves the TCP store at MASTER_ADDR:MASTER_PORT.

    Returns False if the user has set an address for the job's own store.
    """
    given = options.master_addr() or options.master_port()
    return given is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
