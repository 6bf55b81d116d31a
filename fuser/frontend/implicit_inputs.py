"""What random ops without a seed draw: two more inputs of the program, from torch's generator.

    u = rng_uniform({i0}, float)   ->   u = rng_uniform({i0}, float, i1, i2)     inputs .., i1, i2
    v = rng_uniform({i0}, float)   ->   v = rng_uniform({i0}, float, i1, i2 + 1)

So a program is a function of its inputs, and whatever repeats it draws anew. The generator is that
of the device on which the program runs, as for torch's own ops. On CUDA it tells a seed and an
offset, which is moved on by 4 for each op: after `torch.manual_seed(s)` the first op of the n-th
call has the numbers of `rng_seed=s, rng_offset=n` where calls have one op. On the CPU it has no
offset: each call draws a seed from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from fuser.ir.binding import Argument
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion
from fuser.ir.ops.nodes import RandomOp
from fuser.ir.scalar import constructors as sc
from fuser.support.errors import UnsupportedError
from fuser.support.inputs import check_count, device_of, flatten
from fuser.support.locks import make_lock
from fuser.support.torch_calls import generator_of

T = TypeVar("T")
Device = int | str | torch.device | None
# By how much an op of torch's moves the offset of a CUDA generator, at least.
_STEP = 4
_lock = make_lock()


class Draws:
    """The drawing ops of a definition. `fusion` is the definition with their inputs, the last."""

    def __init__(self, defined: Fusion) -> None:
        self.fusion, _ = defined.copy()
        self._declared = list(self.fusion.inputs)
        seed, offset = (self.fusion.new_symbol(DataType.Int) for _ in range(2))
        ops = list(self.fusion.exprs)
        mine = [i for i, op in enumerate(ops) if _draws(op)]
        for k, i in enumerate(mine):
            ops[i] = ops[i].replace(seed=seed, offset=sc.add(offset, k))
        self.fusion.exprs = ops
        self.fusion.inputs += [seed, offset]
        self._count = len(mine)
        op = ops[mine[0]]
        self._reader = op.name + (f" at {op.where}" if op.where else "")
        why = f"of torch's generator (torch.manual_seed), from which {self._reader} draws,"
        # How errors call the two inputs.
        self.names = tuple(f"the {what} {why}" for what in ("seed", "offset"))

    @staticmethod
    def of(fusion: Fusion) -> Draws | None:
        """Return what a definition draws; None where it draws nothing."""
        return Draws(fusion) if any(map(_draws, fusion.exprs)) else None

    def complete(self, inputs: Iterable[object], key: Sequence[int] = (0, 0)) -> list[Argument]:
        """Return the inputs of `fusion`. Raises `InputError` for another number of them."""
        given = flatten(inputs, declared=self._declared)
        check_count(len(given), self._declared)
        return [*given, *key]

    def take(self, inputs: Iterable[object], device: Device) -> list[Argument]:
        """Return the inputs of a run that begins; the generator moves on."""
        given = self.complete(inputs)
        given[-2:] = self._take(device_of(given, device))
        return given

    def look(
        self, inputs: Iterable[object], device: Device
    ) -> tuple[list[Argument], Callable[[Callable[[], T]], Callable[[], T]]]:
        """Return the inputs of a run that ranks have to agree on, and what makes a run of it: the
        generator moves on only then. So it stays in step with the others where there is none.

        Other threads may draw meanwhile: torch's generator is copied, never set back.
        """
        given = self.complete(inputs)
        where = device_of(given, device)
        mine = torch.Generator(where)
        mine.set_state(generator_of(where).get_state())
        given[-2:] = self._key(mine)
        return given, lambda run: partial(self._take_and_run, where, run)

    def _take_and_run(self, where: torch.device, run: Callable[[], T]) -> T:
        self._take(where)
        return run()

    def _take(self, device: torch.device) -> tuple[int, int]:
        return self._key(generator_of(device))

    def _key(self, generator: torch.Generator) -> tuple[int, int]:
        """Return seed and offset; the generator moves on."""
        if generator.device.type != "cuda":
            drawn = torch.empty((), dtype=torch.int64, device="cpu")
            return int(drawn.random_(generator=generator)), 0
        with _lock:
            try:
                offset = generator.get_offset()
                generator.set_offset(offset + _STEP * self._count)
            except RuntimeError as error:
                raise UnsupportedError(
                    f"{self._reader} draws from torch's generator, which a graph that you capture "
                    "would not do in each replay: give rng_seed and rng_offset "
                    f"({str(error).partition(chr(10))[0]})"
                ) from error
        seed = generator.initial_seed()
        return (seed + 2**63) % 2**64 - 2**63, offset // _STEP


@dataclass(frozen=True)
class _Seed:
    """A seed among the numbers that ranks compare. A message shows what the user gave, too: on the
    CPU a seed is a number that the generator drew."""

    number: object
    inputs: Sequence[object]
    device: Device

    def __repr__(self) -> str:
        return repr(self.number)

    def __str__(self) -> str:
        is_drawn = device_of(self.inputs, self.device).type != "cuda"
        return f"{self.number}" + (
            f" (of torch.initial_seed() {torch.initial_seed()})" if is_drawn else ""
        )


def claimed(
    given: Sequence[object], positions: Sequence[int], device: Device, draws: Draws | None
) -> tuple[object, ...]:
    """Return the inputs at these positions, as ranks compare them in each call: `repr` tells them
    apart, messages show `str`."""
    numbers = tuple(given[i] for i in positions)
    if draws is None or not positions:
        return numbers
    *others, seed, offset = numbers
    return *others, _Seed(seed, given, device), offset


def _draws(op: object) -> bool:
    return isinstance(op, RandomOp) and op.seed is None
