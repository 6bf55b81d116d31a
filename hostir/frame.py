"""The state of one run: where it happens, the values of symbols, the tensors that exist."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch

from fuser.errors import InputError
from fuser.ir import scalar as sc
from fuser.ir.core import Op
from fuser.ir.dtypes import to_torch
from fuser.ir.scalar import Number, Scalar, Symbol
from fuser.ir.tensor import TensorView
from hostir.bind import Argument, Values
from hostir.container import HostIrContainer
from hostir.ops import LocalSlice
from multidevice.backends.protocol import Backend, Work
from multidevice.sharding import local_sizes


class KernelRunner(Protocol):
    """Runs the kernel of one group on local shards, on the current stream."""

    def run(
        self,
        inputs: Sequence[Argument],
        outputs: Sequence[torch.Tensor],
        *,
        sizes: Mapping[Symbol, int],
    ) -> None:
        """Computes `outputs`, which are allocated; `sizes` has every global extent."""
        ...


@dataclass(frozen=True)
class Machine:
    """Where a program runs: this rank, its device, its backend and its kernels."""

    rank: int
    device: torch.device
    backend: Callable[[], Backend]
    kernel: Callable[[int], KernelRunner]


@dataclass
class Frame:
    """The state of one run."""

    program: HostIrContainer
    machine: Machine
    values: Values
    tensors: dict[TensorView, torch.Tensor]
    works: dict[int, Work] = field(default_factory=dict[int, Work])

    def number(self, x: Scalar) -> Number:
        """Return the value of `x`. Raises `InputError` where these inputs give it none."""
        try:
            return sc.evaluate(x, self.values)
        except KeyError as missing:
            raise InputError(f"{x}: no input binds {missing.args[0]}") from None
        except (ArithmeticError, ValueError) as error:
            bound = ", ".join(f"{s} = {self.values[s]}" for s in sc.symbols(x))
            raise InputError(f"{x} has no value for {bound}: {error}") from None

    def operand(self, value: TensorView | Scalar) -> Argument:
        return self.tensors[value] if isinstance(value, TensorView) else self.number(value)

    @cached_property
    def sizes(self) -> dict[Symbol, int]:
        """The integer symbols: what kernels are sized by."""
        return {s: int(v) for s, v in self.values.items() if isinstance(v, int)}

    def local_shape(self, tv: TensorView) -> tuple[int, ...]:
        """Return the sizes of the local shard.

        Raises `ShardingError` for an indivisible extent, `InputError` for a negative one.
        """
        sizes = [int(self.number(x)) for x in tv.shape()]
        for axis, size in enumerate(sizes):
            if size < 0:
                raise InputError(f"axis {axis} of {tv} has extent {tv.shape()[axis]} = {size}")
        return local_sizes(tv, sizes)

    def is_mine(self, tv: TensorView) -> bool:
        """Whether this rank holds a part of `tv`."""
        return tv.mesh is None or tv.mesh.has(self.machine.rank)

    def is_idle(self, op: Op) -> bool:
        """Whether the op concerns only meshes without this rank."""
        tensors = [v for v in (*op.outputs, *op.inputs) if isinstance(v, TensorView)]
        return bool(tensors) and not any(map(self.is_mine, tensors))

    def has_results(self, op: Op) -> bool:
        """Whether the op only fills buffers that exist."""
        return all(out in self.tensors for out in op.outputs)

    def result(self, tv: TensorView) -> torch.Tensor:
        """Return an output; a tensor of no elements for one that this rank holds no part of."""
        if not self.is_mine(tv):
            return torch.empty(0, dtype=to_torch(tv.dtype()), device=self.machine.device)
        return self.tensors[tv]

    def alias_target(self, out: TensorView) -> TensorView:
        """Return the input whose buffer an in-place output is written into."""
        into = self.program.values.alias_of(out)
        assert into is not None, f"{out} has neither a buffer nor a declared alias"
        return into

    def slice_bounds(self, op: LocalSlice) -> tuple[int, int]:
        """Return (start, length) of this rank's part along the op's axis."""
        mesh = op.out.mesh
        assert mesh is not None, f"{op.out} has no mesh"
        length = self.local_shape(op.out)[op.axis]
        if op.inp.domain.no_reductions[op.axis].is_broadcast:
            # Expanded: every part is the same element, and there may be fewer than wanted.
            return 0, min(length, self.local_shape(op.inp)[op.axis])
        return mesh.coordinate(self.machine.rank, op.ptype) * length, length
