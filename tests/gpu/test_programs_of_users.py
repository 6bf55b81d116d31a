"""Programs in the style of nvFuser's users, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fuser import TensorView
from tests.programs import ALL
from tests.programs.table import Program, compare


def _on_gpu(program: Program) -> list[Any]:
    """The inputs on the GPU, but for the CPU scalars of the definition."""
    declared = program.build().fusion.inputs()
    on_host = {i for i, v in enumerate(declared) if isinstance(v, TensorView) and v.is_cpu_scalar}
    return [
        x.cuda() if isinstance(x, torch.Tensor) and i not in on_host else x
        for i, x in enumerate(program.inputs())
    ]


@pytest.mark.parametrize("program", ALL, ids=str)
def test_as_torch_has_it(program: Program) -> None:
    inputs = _on_gpu(program)
    results = [r.cpu() for r in program.build().execute(inputs)]
    compare(program, [x.cpu() if isinstance(x, torch.Tensor) else x for x in inputs], results)
