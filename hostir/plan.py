"""A recorded program: steps over slots, which every run of a class of inputs repeats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fuser.errors import FuserError
from fuser.ir.binding import Contents
from fuser.ir.core import Op
from hostir.arena import Arena, Block
from hostir.bind import Argument
from hostir.memory import op_failed
from hostir.streams import Streams

Slots = list[Any]
Closure = Callable[[Slots], None]


@dataclass(frozen=True, eq=False)
class Plan:
    """What a class of inputs repeats: the steps, how many slots they need, where outputs lie.

    `blocks` are the buffers that live in an arena of `nbytes`; outputs are allocated by steps.
    `records` tells whether torch would record gradients, of inputs that require some.
    """

    steps: tuple[Closure, ...]
    size: int
    outputs: tuple[int, ...]
    blocks: tuple[Block, ...]
    nbytes: int
    device: torch.device
    records: bool
    # Those of the run, if the program switches between them.
    streams: Streams | None
    # Which op a step carries out.
    ops: Mapping[Closure, Op]
    contents: Contents

    def run(self, inputs: list[Argument], arena: Arena) -> list[torch.Tensor]:
        """Carry out the steps on these inputs and return the visible outputs.

        Raises `ExecutionError` naming op and user line where torch refuses one.
        """
        slots: Slots = [*inputs, *[None] * (self.size - len(inputs))]
        step = None
        try:
            if not self.blocks:
                for step in self.steps:
                    step(slots)
                return [slots[i] for i in self.outputs]
            with arena.views(self, self.blocks, self.nbytes, self.device) as views:
                for slot, tensor in views.items():
                    slots[slot] = tensor
                for step in self.steps:
                    step(slots)
            return [slots[i] for i in self.outputs]
        except FuserError:
            raise
        except Exception as error:
            if step is None or step not in self.ops:
                raise
            raise op_failed(self.ops[step], error) from error
