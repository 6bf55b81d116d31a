"""CPU scalars beside tensors of a GPU; programs in nvFuser's style on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fuser.errors import InputError, UnsupportedError
from tests.frontend.test_cpu_scalars import X, define
from tests.programs import ALL
from tests.programs.table import Program, compare


def test_a_cpu_scalar_is_read_anew_by_each_call() -> None:
    fd, x = define(), X.cuda()
    scalar = torch.tensor(0.0)
    for value in range(40):  # also where a graph or the compiled runner repeats a call
        scalar.fill_(value)
        product, same = fd.execute([x, scalar])
        assert torch.equal(product.cpu(), X * value)
        assert same is scalar
    with pytest.raises(InputError, match="a CPU scalar tensor, but got a tensor on device cuda"):
        fd.execute([x, scalar.cuda()])
    with pytest.raises(UnsupportedError, match="cannot be written into it"):
        define(updates=True).execute([x, scalar])


def _on_gpu(program: Program) -> list[Any]:
    """The inputs on the GPU, without the CPU scalars of the definition."""
    declared = program.build().fusion.inputs()
    return [
        x.cuda() if isinstance(x, torch.Tensor) and not getattr(tv, "is_cpu_scalar", False) else x
        for x, tv in zip(program.inputs(), [*declared, *declared], strict=False)
    ]


@pytest.mark.parametrize("program", ALL, ids=str)
def test_programs(program: Program) -> None:
    inputs = _on_gpu(program)
    results = [r.cpu() for r in program.build().execute(inputs)]
    compare(program, [x.cpu() if isinstance(x, torch.Tensor) else x for x in inputs], results)
