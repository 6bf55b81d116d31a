"""A rank gives up its wait in a team's first collective; the other rank enters it afterwards.

mpirun -np 2 python tests/support/rank_programs/late_partner.py NEW_FILE
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from fuser.support.errors import CommunicationError, CommunicationTimeout
from multidevice.coordination.bounded_wait import poll_until
from multidevice.job.communicator import Communicator

# Not the team of all ranks in their order, for which start-up has made everything.
TEAM = (1, 0)


def main() -> None:
    """Checks that every call ends within a timeout, and that later calls give the right
    numbers.
    """
    comm = Communicator.instance()
    backend, me = comm.backend_for("cpu"), comm.rank()
    given_up = Path(sys.argv[1])
    comm.barrier()
    if me == 1:
        # Not in a call of the communicator: rank 0 would find the deadlock.
        poll_until(given_up.exists, what=lambda: "the file", look=lambda _: None, rank=me)
    patience = os.environ.get("FUSER_TIMEOUT_S", "60")
    os.environ["FUSER_TIMEOUT_S"] = "1"
    try:
        backend.barrier(team=TEAM)
    except CommunicationTimeout as error:
        print(f"gave up: {error}", flush=True)
        given_up.touch()
    except CommunicationError as error:
        print(f"heard: {error}", flush=True)
    os.environ["FUSER_TIMEOUT_S"] = patience
    for number in range(3):
        x = torch.full((50_000,), float(me + number))
        backend.allreduce(x, x, op="SUM", team=TEAM).wait()
        assert torch.equal(x, torch.full_like(x, 1.0 + 2 * number)), (me, number, x)
    comm.barrier()
    print(f"ok rank {me}", flush=True)


if __name__ == "__main__":
    main()
