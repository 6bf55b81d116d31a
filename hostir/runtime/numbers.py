"""How later runs of a class read the scalars of a program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Number, Scalar, Symbol
from hostir.runtime.frame import Frame
from hostir.runtime.inputs import Argument
from hostir.runtime.steps import Slots


def free_scalars(frame: Frame, free: frozenset[int]) -> tuple[Symbol, ...]:
    """Return the input scalars whose value may change within a class of inputs; `free` has the
    positions of those on which no size depends."""
    inputs = frame.program.inputs
    scalars = ((i, v) for i, v in enumerate(inputs) if isinstance(v, Symbol))
    return tuple(v for i, v in scalars if i in free or not isinstance(frame.values[v], int))


def changes(value: Scalar, free: Sequence[Symbol]) -> bool:
    """Whether a scalar differs between the runs of a class."""
    return any(s in free for s in sc.symbols(value))


def reader(
    value: Scalar, places: Mapping[Symbol, int], free: Sequence[Symbol], frame: Frame
) -> Callable[[Slots], Argument]:
    """Return how to read a scalar; `places` has the slots of the input scalars."""
    if isinstance(value, Symbol) and value in places:
        i = places[value]
        return lambda slots: slots[i]
    if not changes(value, free):
        number = frame.number(value)
        return lambda slots: number
    values, moving = frame.values, {s: places[s] for s in free}

    def evaluate(slots: Slots) -> Argument:
        return sc.evaluate(value, {**values, **{s: slots[i] for s, i in moving.items()}})

    return evaluate


def numbers_reader(
    scalars: Sequence[Scalar], places: Mapping[Symbol, int], free: Sequence[Symbol], frame: Frame
) -> Callable[[Slots], list[Number]] | None:
    """Return how a run reads some scalars; None where they are those of the class."""
    if not any(changes(v, free) for v in scalars):
        return None
    readers = [reader(v, places, free, frame) for v in scalars]
    return lambda slots: [read(slots) for read in readers]  # pyright: ignore[reportReturnType]
