"""Tests the error for sizes without memory: its type, op, tensor, bytes and line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fuser import DataType, FusionDefinition, OutOfMemoryError
from fuser.support.errors import ExecutionError
from fuser.support.torch_calls import EmptyStrided
from hostir.runtime import steps

D = DataType
Define = Callable[[Any, Any], Any]
# A result whose size is the scalar n, and its bytes for n.
ROWS: dict[str, tuple[Define, Callable[[int], int]]] = {
    "full": (lambda fd, n: fd.ops.full([n], 1.0, D.Float), lambda n: 4 * n),
    "iota": (lambda fd, n: fd.ops.iota(n), lambda n: 8 * n),
    "pad": (lambda fd, n: fd.ops.pad(fd.ops.full([1], 1.0, D.Half), [0, n]), lambda n: 2 * n + 2),
    "add": (lambda fd, n: fd.ops.add(fd.ops.full([n, n], 1, D.Int), 1), lambda n: 8 * n * n),
    "matmul": (
        lambda fd, n: fd.ops.matmul(*(fd.ops.full(s, 1.0, D.Float) for s in ([n, 1], [1, 2]))),
        lambda n: 8 * n,
    ),
}


@pytest.mark.parametrize("n", [2**45, 2**60, 2**63 - 1])
@pytest.mark.parametrize("name", ROWS)
def test_an_absurd_size_names_op_tensor_bytes_and_line(name: str, n: int) -> None:
    define, nbytes = ROWS[name]
    with FusionDefinition() as fd:
        fd.add_output(define(fd, fd.define_scalar(None, D.Int)))
    for _ in range(2):
        with pytest.raises(OutOfMemoryError) as found:
            fd.execute([n])
        assert isinstance(found.value, ExecutionError | torch.OutOfMemoryError)
        text = str(found.value)
        if text.startswith("full: "):  # an operand of the op, which is as large
            name, nbytes = "full", ROWS["full"][1]
        assert text.startswith(f"{name}: there is no memory for T"), text
        assert f" {nbytes(n)} bytes" in text and f"{__file__}:" in text, text
    assert fd.execute([3])[0].numel()


def test_a_later_run_without_memory_is_typed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    is_full = False

    def make_on(device: torch.device) -> EmptyStrided:
        def make(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
            if is_full:
                raise torch.OutOfMemoryError("tried to allocate 3 bytes")
            return torch.empty_strided(shape, strides, dtype=dtype, device=device)

        return make

    monkeypatch.setattr(steps, "empty_on", make_on)
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        fd.add_output(fd.ops.neg(x))
    t = torch.ones(5)
    fd.execute([t])
    fd.execute([t])
    is_full = True
    with pytest.raises(
        OutOfMemoryError, match=r"neg: there is no memory for T1.*\(5,\), 20 bytes on cpu"
    ):
        fd.execute([t])
    is_full = False
    torch.testing.assert_close(fd.execute([t])[0], -t)
