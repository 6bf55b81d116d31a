"""`FUSER_DUMP=communication`: each communication when it is posted."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fuser import dumps
from fuser.ir.core import Op
from fuser.ir.text import op_text

Announce = Callable[[torch.Tensor | None, torch.Tensor | None], None]


def announcer(op: Op, rank: int) -> Announce | None:
    """Return what writes down that `op` is posted with these shards; None where nobody asked.

    A recorded program asks once, when it is recorded.
    """
    write = dumps.lines("communication", "this process", rank=rank)
    if write is None:
        return None

    def announce(inp: torch.Tensor | None, out: torch.Tensor | None) -> None:
        sizes = [list(t.shape) if t is not None else "none" for t in (inp, out)]
        write(f"Posting {op_text(op)} with input_tensor {sizes[0]} and output_tensor {sizes[1]}")

    return announce
