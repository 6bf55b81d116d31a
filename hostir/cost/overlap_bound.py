"""What steps could gain at most, from numbers alone: for most sizes that decides, unlowered."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from fuser.ir.scalar.compiled import Computed
from fuser.ir.scalar.constructors import Number, Scalar, Symbol
from fuser.ir.tensor import TensorView
from hostir.cost.machine_model import CPU, Machine
from hostir.cost.op_costs import Cost, Shape, Sizes, collective_cost, cost_of, held_nbytes
from multidevice.sharding.passes.overlap_candidates import Pair
from multidevice.sharding.queries import local_extents

COLLECTIVES = {"gather": "Allgather", "scatter": "ReduceScatter", "allreduce": "Allreduce"}
Values = Mapping[Symbol, Number]


class GainBound:
    """A pair whose communications go by `backend`. `is_repeated`: runs take the host for no longer
    than one call, by a graph."""

    def __init__(self, pair: Pair, backend: str, *, is_repeated: bool) -> None:
        self._pair, self._backend, self._is_repeated = pair, backend, is_repeated

    @cached_property
    def _tensors(self) -> tuple[dict[TensorView, slice], Computed]:
        """The tensors of the two ops, each with the place of its local extents among all."""
        places: dict[TensorView, slice] = {}
        scalars: list[Scalar] = []
        for op in (self._pair.move, *self._pair.products):
            for tv in (*op.inputs, *op.outputs):
                if isinstance(tv, TensorView) and tv not in places:
                    extents = local_extents(tv)
                    places[tv] = slice(len(scalars), len(scalars) + len(extents))
                    scalars += extents
        return places, Computed(scalars)

    def why_hopeless(self, values: Values, machine: Machine, margin: float) -> str:
        """Return why no steps can gain this part of the time; "" if some may."""
        if machine.device == CPU:
            return "a CPU rank computes and communicates in turns: steps gain nothing there"
        pair, (places, extents) = self._pair, self._tensors
        numbers = extents(values)

        def sizes(tv: TensorView) -> Shape:
            return tuple(int(n) for n in numbers[places[tv]])

        costs = [cost_of(op, sizes, machine) for op in pair.products]
        computes = sum(c.seconds for c in costs if c is not None)
        moves = self._communication(sizes, machine).seconds
        if min(computes, moves) < margin * (computes + moves):
            return (
                f"the matmul takes {computes * 1e6:.1f} us and the communication "
                f"{moves * 1e6:.1f} us: there is less than {margin:.0%} to gain"
            )
        steps = 2 if pair.kind == "allreduce" else pair.devices
        calls = machine.host_run_s + steps * len(pair.products) * machine.host_library_s
        host = calls + (steps - 1) * machine.host_post_s
        if not self._is_repeated and host > (1 - margin) * (computes + moves + machine.host_run_s):
            return (
                f"the host would take {host * 1e6:.1f} us to issue the steps; the matmul and the "
                f"communication, one after the other, take {computes * 1e6:.1f} and "
                f"{moves * 1e6:.1f} us"
            )
        return ""

    def _communication(self, sizes: Sizes, machine: Machine) -> Cost:
        pair = self._pair
        ends = pair.move.inputs[0], pair.move.out_tensor
        nbytes = max(held_nbytes(tv, sizes(tv)) for tv in ends)
        kind, dtype = COLLECTIVES[pair.kind], pair.between.dtype()
        return collective_cost(kind, pair.devices, nbytes, self._backend, machine, dtype=dtype)
