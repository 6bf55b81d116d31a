"""The ops that exist only in host programs; the fusion IR's tensor ops stand beside them.

A host program is not in SSA form: an op writes a tensor that `Allocate` made, or that is declared
as an alias. So `out` of a library op is a destination, and `out` of a view op is a new name for its
input.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from fuser.errors import VerifyError
from fuser.ir import nodes, storage
from fuser.ir.core import Op, attr, operand, operands, result, results
from fuser.ir.scalar import Scalar
from fuser.ir.storage import memory_order
from fuser.ir.tensor import TensorView
from fuser.ir.types import ParallelType
from hostir.layout import allocated_elements
from multidevice.backends.protocol import RED_OPS, RedOp
from multidevice.communication import CommunicationType, TeamOf

ROOTED = frozenset({"Broadcast", "Gather", "Reduce", "Scatter"})
REDUCING = frozenset({"Allreduce", "Reduce", "ReduceScatter"})


class HostOp(Op):
    """Base of the ops below."""

    # Spellings of earlier versions, which the parser still reads.
    OLDER: ClassVar[tuple[str, ...]] = ()


class Allocate(HostOp):
    """Makes a buffer for the local shard of `buffer`."""

    buffer: TensorView = result()
    zero_init: bool = attr(default=False)
    TEXT = (
        "{buffer} = ALLOCATE(buffer={buffer}, mem_type={mem_type}, size={size}, "
        "zero_init={zero_init}, resets_to_zero=false)"
    )
    OLDER = ("{buffer} = ALLOCATE(mem_type={mem_type}, zero_init={zero_init})",)

    @property
    def mem_type(self) -> str:
        return self.buffer.memory.text

    @property
    def size(self) -> Scalar:
        """The number of elements of the local shard."""
        return allocated_elements(self.buffer)


class Deallocate(HostOp):
    """Gives up the buffer; no later op may use it or a view of it."""

    buffer: TensorView = operand()
    TEXT = "Deallocate {\n  {buffer}\n}"


class LaunchKernel(HostOp):
    """Runs the kernel of group `group` on the current stream; `outs` are allocated or aliases."""

    ins: tuple[TensorView | Scalar, ...] = operands()
    outs: tuple[TensorView, ...] = results()
    group: int = attr()
    TEXT = "LaunchKernel(\n  Group ID: {group},\n  Inputs: {ins},\n  Outputs: {outs},\n)"


@dataclass(frozen=True)
class Order:
    """How a shard lies in memory: its axes, outermost first (None: as they are), and those that are
    expanded, of which memory holds one element."""

    axes: tuple[int, ...] | None
    expanded: tuple[int, ...]

    @staticmethod
    def of(tv: TensorView) -> Order:
        """Return the order that the allocation domain declares."""
        axes = tuple(p for p, _ in memory_order(tv))
        is_logical = axes == tuple(range(len(axes)))
        return Order(None if is_logical else axes, storage.expanded_positions(tv))


class Communication(HostOp):
    """Starts a communication of the local shards `inp` -> `out` within each team.

    `root` is a position in the team; `red_op` counts for the reducing types. `backend` records the
    library for which the program was made; a run takes the backend of its device.
    """

    inp: TensorView = operand()
    out: TensorView = result()
    number: int = attr()
    type: CommunicationType = attr()
    team: TeamOf = attr()
    backend: str = attr()
    root: int | None = attr(default=None)
    red_op: RedOp = attr(default="SUM")

    @property
    def name(self) -> str:
        return f"Communication {self.number} ({self.type})"

    @cached_property
    def orders(self) -> tuple[Order, Order]:
        """The memory orders of `inp` and `out`; a communication moves memory as it lies."""
        return Order.of(self.inp), Order.of(self.out)

    def template(self) -> str:
        return _communication_template(self.root is not None, self.red_op)

    @classmethod
    def variants(cls) -> Iterator[nodes.Variant]:
        for has_root in (False, True):
            root: dict[str, object] = {} if has_root else {"root": None}
            for red_op in RED_OPS:
                yield {**root, "red_op": red_op}, _communication_template(has_root, red_op)

    def verify(self) -> None:
        if (self.root is not None) != (self.type in ROOTED):
            raise VerifyError(f"{self.name}: root={self.root}")
        if self.red_op != "SUM" and self.type not in REDUCING:
            raise VerifyError(f"{self.name}: red_op={self.red_op}")
        if self.root is not None and not 0 <= self.root < self.team.size:
            raise VerifyError(f"{self.name}: root={self.root} in a team of {self.team.size}")
        if self.team.size < 2:
            raise VerifyError(f"{self.name}: a team of {self.team.size} needs no communication")
        for tv in (self.inp, self.out):
            if tv.mesh is None:
                raise VerifyError(f"{self.name}: {tv} has no mesh")
        if self.inp.dtype() is not self.out.dtype():
            raise VerifyError(f"{self.name}: input {self.inp} and output {self.out}")


def _communication_template(has_root: bool, red_op: RedOp) -> str:
    root = ", root={root}" if has_root else ""
    tail = "" if red_op == "SUM" else f", red_op={red_op}"
    return (
        "Communication {number} (type={type}, team={team}"
        + root
        + tail
        + ", input={inp}, output={out}, backend={backend})"
    )


class Wait(HostOp):
    """Makes the current stream wait for the communication of this number."""

    number: int = attr()
    TEXT = "Wait(Communication {number})"
    OLDER = ("Wait Communication {number}",)

    @property
    def name(self) -> str:
        return f"Wait {self.number}"


class LocalSlice(HostOp):
    """Copies this rank's part of the replicated `inp`: no communication.

    `axis` counts the logical axes without reductions; the part is the rank's coordinate along
    `ptype` in the mesh of `out`.
    """

    out: TensorView = result()
    inp: TensorView = operand()
    axis: int = attr()
    ptype: ParallelType = attr()
    TEXT = "{out}\n   = LocalSlice( {inp}, axis = {axis}, parallelType = {ptype} )"

    def verify(self) -> None:
        mesh = self.out.mesh
        if mesh is None or mesh.size_of(self.ptype) < 2:
            raise VerifyError(f"LocalSlice: {self.out} has no {self.ptype.text} to slice along")
        if not 0 <= self.axis < self.inp.ndim:
            raise VerifyError(f"LocalSlice: axis {self.axis} of {self.inp}")


HOST_OPS: tuple[type[HostOp], ...] = (
    Allocate,
    Deallocate,
    LaunchKernel,
    Communication,
    Wait,
    LocalSlice,
)
