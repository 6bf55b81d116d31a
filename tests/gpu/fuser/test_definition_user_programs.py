"""Programs in the style of nvFuser's users, on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.support.moved_inputs import passed
from tests.support.user_programs import ALL
from tests.support.user_programs.table import Program, compare


@pytest.mark.parametrize("program", ALL, ids=str)
def test_as_torch_has_it(program: Program) -> None:
    fd = program.build()
    inputs = passed(fd.fusion, program.inputs())
    results = [r.cpu() for r in fd.execute(inputs)]
    compare(program, [x.cpu() if isinstance(x, torch.Tensor) else x for x in inputs], results)
