"""Raises errors that nobody catches, on all ranks or in the machine; tests check what the job
prints.

mpirun -np 2 python tests/support/rank_programs/uncaught_errors.py mesh
"""

from __future__ import annotations

import ctypes
import sys

import torch

from fuser import FusionDefinition, multidevice
from multidevice import Communicator


def run(ranks: int, rows: int = 4) -> None:
    """Runs a kernel on a mesh of this many ranks."""
    mesh = multidevice.DeviceMesh(range(ranks))
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 8])
        y = fd.ops.relu(x)
        fd.add_output(y)
        for tv in (x, y):
            tv.set_device_mesh(mesh)
    fd.execute([torch.randn(rows, 8)])


def main(kind: str) -> None:
    if kind == "mesh":
        run(4)
    elif kind == "extents":
        run(2, rows=4 + Communicator.instance().rank())
    elif kind == "compiler":  # with CXX=false
        run(2)
    elif kind == "one":
        run(2, rows=4 if Communicator.instance().rank() else -1)
    elif kind == "caught":
        try:
            run(4)
        except RuntimeError as error:
            if Communicator.instance().rank():
                raise
            print(f"caught {type(error).__name__}", flush=True)
            Communicator.instance().barrier()
    elif kind == "crash" and Communicator.instance().rank() == 1:
        ctypes.string_at(0)
    else:
        Communicator.instance().barrier()


if __name__ == "__main__":
    main(sys.argv[1])
