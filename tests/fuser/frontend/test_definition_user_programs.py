"""Each program of the table on one device: directly, from its text, through a cache, with a GPU's
schedules, and with all inspection features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import fuser
from fuser import FusionDefinition, LRUCache
from tests.support.user_programs import ALL
from tests.support.user_programs.table import Program, compare

pytestmark = pytest.mark.from_text

SEED = 11
H200 = ("schedules_for(h200)", "checked")


def run(fd: FusionDefinition, inputs: Sequence[Any], **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(SEED)
    return fd.execute(inputs, **options)


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two results have equal numbers (NaN equals NaN) and the same memory order."""
    return (
        a.dtype == b.dtype
        and a.stride() == b.stride()
        and torch.equal(a.nan_to_num(), b.nan_to_num())
    )


@pytest.mark.parametrize("program", ALL, ids=str)
def test_as_torch_has_it_and_again_from_text_and_cache(program: Program) -> None:
    inputs = program.inputs()
    fd = program.build()
    text = repr(fd)
    results = run(fd, inputs)
    compare(program, inputs, results)

    names: dict[str, Any] = {n: getattr(fuser, n) for n in ("FusionDefinition", "DataType")}
    exec(text, names)
    with FusionDefinition() as copy:
        names["nvfuser_fusion"](copy)
    assert copy.fusion == fd.fusion, text
    assert repr(copy) == text
    others = program.inputs()
    for one, other in zip(results, run(copy, others), strict=True):
        assert is_same(one, other)
    for at in program.updates:
        assert is_same(inputs[at], others[at])

    cache = LRUCache(3)
    for _ in range(2):
        again = program.build()
        again.fec = cache.cache_compile(again.fusion)
        del again._fusion
        for one, other in zip(results, run(again, program.inputs()), strict=True):
            assert is_same(one, other)
        assert cache.num_fusions() == 1


@pytest.mark.parametrize("program", ALL, ids=str)
def test_with_the_schedules_of_a_gpu(program: Program) -> None:
    inputs = program.inputs()
    results = run(program.build(), inputs, _enable_options=H200)
    compare(program, inputs, results)


@pytest.mark.parametrize("program", ALL, ids=str)
def test_what_runs_can_be_shown(program: Program) -> None:
    fd = program.build()
    math = fd.fusion.print_math()
    assert math.startswith("Inputs:\n") and "%kernel_math {" in math
    torch.manual_seed(SEED)
    # A second run would read updated inputs, or draw other random numbers.
    is_repeatable = not program.updates and "rand_like" not in repr(fd)
    if is_repeatable:
        fd.validate(program.inputs())
    script = fd.repro_script_for(program.inputs())
    exec(compile(script, "<repro>", "exec"), {})
    inputs = program.inputs()
    if not is_repeatable:
        fd.execute(inputs)
    assert fd.fec.is_compiled(inputs)
    scheduled = fd.fec.get_scheduled_ir(inputs, tensor_transforms=True)
    assert "%kernel {" in scheduled
    kernels = fd.fec.get_cuda_kernel(inputs)
    assert "__global__" in kernels or not kernels
    assert repr(fd) in script
