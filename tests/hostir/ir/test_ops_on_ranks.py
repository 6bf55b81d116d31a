"""Programs that were built by hand, on the ranks of a real job (mpirun)."""

from __future__ import annotations

import pytest

from fuser.support.errors import UnsupportedError
from hostir import parse
from multidevice import Communicator
from tests.support.handmade_programs import EXAMPLES, run_here

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.mark.parametrize("late", [None, "all", "entry", 1], ids=str)
def test_examples_equal_torch(comm: Communicator, late: str | int | None) -> None:
    """Ranks outside of a program's mesh take no part."""
    fitting = {n: e for n, e in EXAMPLES.items() if 1 < e.ranks <= comm.size()}
    if late is not None:
        alone = [n for n in fitting if "of copies" in n]
        for name in alone:
            with pytest.raises(UnsupportedError, match=r"use multidevice\.simulate"):
                run_here(fitting[name], fitting[name].build(), comm, late=late)
            del fitting[name]
    assert len(fitting) >= 5
    for name, example in fitting.items():
        print(name)
        program = example.build()
        run_here(example, program, comm, late=late)
        run_here(example, program, comm, late=late, reference=True)
        run_here(example, parse(program.full_text()), comm, late=late)
