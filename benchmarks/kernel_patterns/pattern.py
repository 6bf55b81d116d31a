"""A timed pattern: our definition, torch's form and operands, from which the bytes follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fuser import DataType, FusionDefinition
from fuser.ir.dtypes import from_torch

Result = torch.Tensor | tuple[torch.Tensor, ...]
BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
EPSILON = 1e-5
# The share of elements that dropout sets to 0.
DROPPED = 0.1


@dataclass(frozen=True)
class Operand:
    """A random tensor of normal numbers.

    `positive`: absolute values. `below`: integers in [0, below). A bool tensor is true with the
    probability that dropout keeps an element.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    positive: bool = False
    below: int = 0

    def make(self, device: str) -> torch.Tensor:
        """Returns the tensor on a device."""
        if self.dtype is torch.bool:
            return torch.rand(self.shape, device=device) >= DROPPED
        if self.below:
            return torch.randint(0, self.below, self.shape, dtype=self.dtype, device=device)
        made = torch.randn(self.shape, device=device).to(self.dtype)
        return made.abs() if self.positive else made


Operands = Callable[[int, int, torch.dtype], tuple[Operand, ...]]


@dataclass(frozen=True)
class Dropout:
    """The values by which results with random dropout are checked.

    - `place`: the output from which the mask is read.
    - `ends(inputs)`: the values of its elements if dropped, and if kept.
    - `masked`: torch's form with a mask as its first argument.
    """

    place: int
    ends: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    masked: Callable[..., Result]

    def mask(self, inputs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns which elements were kept."""
        out, (dropped, kept) = outs[self.place].double(), self.ends(*inputs)
        return (out - kept).abs() < (out - dropped).abs()

    def sigmas(self, inputs: Sequence[torch.Tensor], mask: torch.Tensor) -> float:
        """Returns by how many standard deviations the number of kept elements differs from the
        expected one.

        Only elements whose two ends differ by much more than rounding count.
        """
        dropped, kept = self.ends(*inputs)
        clear = (kept - dropped).abs() > 0.25
        count = int(clear.sum())
        found = int((mask & clear).sum())
        deviation = (count * DROPPED * (1 - DROPPED)) ** 0.5
        return abs(found - count * (1 - DROPPED)) / max(deviation, 1.0)


def wide(x: torch.Tensor) -> torch.Tensor:
    """Converts to float32, in which kernels compute. float64 is kept, as a reference."""
    return x if x.dtype is torch.float64 else x.float()


def in_double(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the inputs with floating tensors in float64."""
    return [t.double() if t.is_floating_point() else t for t in inputs]


def as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    """Returns a result as a tuple of tensors."""
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def define(
    build: Callable[..., Any], operands: Sequence[Operand], *, known: int = 0
) -> FusionDefinition:
    """Defines a fusion with symbolic extents of these ranks; the first `known` extents are
    constants.
    """
    with FusionDefinition() as fd:
        tensors = [
            fd.define_tensor(
                [*o.shape[:known], *[-1] * len(o.shape[known:])],
                contiguity=True,
                dtype=from_torch(o.dtype),
            )
            for o in operands
        ]
        made = build(fd, *tensors)
        for out in made if isinstance(made, tuple) else (made,):
            fd.add_output(out)
    return fd


@dataclass(frozen=True)
class Pattern:
    """Our definition, torch's form of it, and the operands for a shape and dtype.

    - `library`: torch's own op, if it differs from the form.
    - `dtypes`: the dtypes in which the pattern can be timed.
    - `known`: this many leading extents are constants of the definition.
    """

    build: Callable[..., Any]
    peer: Callable[..., Result]
    operands: Operands
    library: Callable[..., Any] | None = None
    dtypes: tuple[torch.dtype, ...] = (BFLOAT16, FLOAT32)
    known: int = 0
    dropout: Dropout | None = None

    def define(self, m: int, n: int, dtype: torch.dtype) -> FusionDefinition:
        """Returns the definition for a shape and dtype."""
        return define(self.build, self.operands(m, n, dtype), known=self.known)

    def random(
        self, m: int, n: int, dtype: torch.dtype, *, device: str = "cuda"
    ) -> tuple[torch.Tensor, ...]:
        """Returns one set of inputs."""
        return tuple(o.make(device) for o in self.operands(m, n, dtype))

    def nbytes(self, m: int, n: int, dtype: torch.dtype) -> int:
        """Returns the minimal bytes: each input read once, each output written once."""
        inputs = self.random(m, n, dtype, device="meta")
        return sum(t.numel() * t.itemsize for t in (*inputs, *as_tuple(self.peer(*inputs))))

    def errors(
        self, inputs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]
    ) -> tuple[list[float], float]:
        """Returns the relative error of each output, and the deviation of dropout.

        Errors are relative to torch in float64 on the same inputs. The deviation is the number of
        standard deviations of the number of kept elements, 0 without dropout.
        """
        exact, sigmas = in_double(inputs), 0.0
        if self.dropout is None:
            expected = as_tuple(self.peer(*exact))
        else:
            mask = self.dropout.mask(exact, outs)
            sigmas = self.dropout.sigmas(exact, mask)
            expected = as_tuple(self.dropout.masked(mask, *exact))
        pairs = zip(outs, expected, strict=True)
        return [relative_error(ours, theirs) for ours, theirs in pairs], sigmas


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Returns the norm of the difference, divided by the norm of the expected result.

    Raises:
        ValueError: the shapes differ.
    """
    if ours.shape != theirs.shape:
        raise ValueError(f"a result has shape {[*ours.shape]}, torch's {[*theirs.shape]}")
    norm = float(theirs.double().norm())
    return float((ours.double() - theirs.double()).norm()) / (norm or 1.0)


def as_float(fd: FusionDefinition, x: Any) -> Any:
    """Defines a cast to Float."""
    return fd.ops.cast(x, DataType.Float)


def full(count: int) -> Operands:
    """Returns operands: `count` tensors of m x n."""
    return lambda m, n, dtype: (Operand((m, n), dtype),) * count


def rows_and_weights(
    count: int, weights: int, *, dtype_of_weights: torch.dtype | None = None
) -> Operands:
    """Returns operands: `count` tensors of m x n and `weights` of n."""
    return lambda m, n, dtype: (
        *(Operand((m, n), dtype),) * count,
        *(Operand((n,), dtype_of_weights or dtype),) * weights,
    )
