"""HostIrContainer: a host program, its values, and the kernels that it launches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from textwrap import indent

from fuser.errors import VerifyError
from fuser.ir.binding import free_inputs
from fuser.ir.core import Op
from fuser.ir.equality import fusion_key, op_key, values_key
from fuser.ir.fusion import Alias, Fusion, Value
from fuser.ir.tensor import TensorView
from fuser.ir.text import fusion_text, op_text, sections_text, value_text
from hostir.ops import Communication, HostOp

# The first line of the full text, by which a text without any section is known to be complete.
FULL_FORM = "// host program, full form: this text runs"
SHORT_FORM = (
    "this is the short form of a host program, which is for reading: memory layouts, aliases and "
    "kernels are not in it. The full form is needed: FUSER_DUMP=host_ir writes it, "
    "HostIrContainer.full_text() returns it"
)


@dataclass(frozen=True)
class KernelGroup:
    """A kernel as a fusion of global tensors, and the scheduler that accepts it."""

    number: int
    fusion: Fusion
    scheduler: str


@dataclass(frozen=True, eq=False)
class HostIrContainer:
    """A rank-independent host program.

    `values` is a fusion without ops: it owns the tensors and has the program's inputs, outputs,
    aliases and extent classes. A pass makes a new container with other `ops`.
    """

    values: Fusion
    ops: tuple[Op, ...] = ()
    groups: Mapping[int, KernelGroup] = field(default_factory=dict[int, KernelGroup])
    # Whether it was read from a text that does not say everything.
    is_short: bool = False

    @property
    def inputs(self) -> list[Value]:
        return self.values.inputs

    @property
    def outputs(self) -> list[TensorView]:
        """Every output once per `add_output`, hidden aliases included."""
        return self.values.outputs

    @property
    def aliases(self) -> list[Alias]:
        return self.values.aliases

    def with_ops(self, ops: tuple[Op, ...]) -> HostIrContainer:
        return replace(self, ops=ops)

    def tensors(self) -> tuple[TensorView, ...]:
        """Return every tensor: inputs, those of the ops in program order, outputs."""
        seen: dict[TensorView, None] = {}
        for value in (*self.inputs, *_values(self.ops), *self.outputs):
            if isinstance(value, TensorView):
                seen[value] = None
        return tuple(seen)

    def free_inputs(self) -> frozenset[int]:
        """Return the positions of scalar inputs that decide nothing about structure."""
        kernels = (tv for group in self.groups.values() for tv in group.fusion.tensors())
        return free_inputs(self.values, (*self.tensors(), *kernels))

    def communications(self) -> tuple[Communication, ...]:
        return tuple(op for op in walk(self.ops) if isinstance(op, Communication))

    def devices(self) -> tuple[int, ...]:
        """Return the ranks that some tensor's mesh names, in order; () for a program without."""
        meshes = {tv.mesh for tv in self.tensors() if tv.mesh is not None}
        return tuple(sorted({rank for mesh in meshes for rank in mesh.devices}))

    def check_full(self) -> None:
        """Raise `VerifyError` for a program that was read from its short form."""
        if self.is_short:
            raise VerifyError(SHORT_FORM)

    def __str__(self) -> str:
        ins, outs = (", ".join(map(value_text, vs)) for vs in (self.inputs, self.outputs))
        body = block_text(self.ops, "  ")
        return f"\n%HostIrContainer {{ ({ins}) -> ({outs}) :\n{body}}} // %HostIrContainer\n\n"

    def full_text(self) -> str:
        """Return the program with everything that it needs to run: `parse` reads it back."""
        parts = [
            FULL_FORM,
            str(self),
            sections_text(self.values, self.tensors(), tuple(walk(self.ops))),
        ]
        parts += [
            f"\nKernel group {g.number} ({g.scheduler}) : \n{fusion_text(g.fusion)}"
            for g in self.groups.values()
        ]
        return "".join(parts)


def walk(ops: tuple[Op, ...]) -> Iterator[Op]:
    """Yield ops in program order, those of regions after the op that owns them."""
    for op in ops:
        yield op
        for region in op.regions:
            yield from walk(region)


def _values(ops: tuple[Op, ...]) -> Iterator[object]:
    for op in walk(ops):
        # A host op defines what it names; a tensor op's operands come first.
        yield from (
            (*op.outputs, *op.inputs) if isinstance(op, HostOp) else (*op.inputs, *op.outputs)
        )


def block_text(ops: tuple[Op, ...], margin: str) -> str:
    """Return the ops of a block, one after another, indented."""
    return "".join(indent(op_text(op), margin) + "\n" for op in ops)


def equal(a: HostIrContainer, b: HostIrContainer) -> bool:
    """Whether two programs are the same: values, ops, kernel groups; numbers count."""
    return container_key(a) == container_key(b)


def container_key(p: HostIrContainer) -> tuple[object, ...]:
    return (
        values_key(p.values, p.tensors()),
        tuple(op_key(op) for op in p.ops),
        tuple((n, g.scheduler, fusion_key(g.fusion)) for n, g in p.groups.items()),
    )
