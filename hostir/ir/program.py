"""The host program `HostIrContainer`: its ops, its tensors and scalars, and its kernels.

A program is made by the compiler's lowering, read from text, or built by hand:

    hic = HostIrContainer()
    with hic:
        x, y = hic.input([8, 64]), hic.tensor([8, 64])
        hic.append(Allocate(y))
        with hic.loop(8) as i:
            hic.append(SetCurrentStream(Stream(i % 4)))
            ...
        hic.add_output(y)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from fuser.ir.canonical_form import fusion_key, op_key, values_key
from fuser.ir.domain.device_mesh import ranks_of
from fuser.ir.fusion import Alias, Fusion, TensorView, Value
from fuser.ir.op import Op, walk
from fuser.support.errors import VerifyError
from hostir.ir import printer
from hostir.ir.builder import ProgramBuilder
from hostir.ir.ops import Communication, HostOp, KernelGroup, StartsCommunication

P = ParamSpec("P")
R = TypeVar("R")


def _by_hand(
    method: Callable[Concatenate[ProgramBuilder, P], R],
) -> Callable[Concatenate[HostIrContainer, P], R]:
    """Returns a method of `HostIrContainer` that calls the given method of the container's
    `ProgramBuilder`."""

    @wraps(method)
    def call(program: HostIrContainer, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(program._builder, *args, **kwargs)  # pyright: ignore[reportPrivateUsage]

    return call


@dataclass(eq=False, repr=False)
class HostIrContainer:
    """A host program. All ranks run the same program.

    `values` is a fusion that owns the tensors. It also has the program's inputs, outputs, aliases
    and the sets of equal extents. `groups` are the kernels by number, and `units` the fusions that
    `PostOnStream` runs. A pass makes a new container with other `ops`.
    """

    values: Fusion = field(default_factory=Fusion)
    ops: tuple[Op, ...] = ()
    groups: Mapping[int, KernelGroup] = field(default_factory=dict[int, KernelGroup])
    # Whether the program was read from the short form, which is incomplete.
    is_short: bool = False
    units: Mapping[int, Fusion] = field(default_factory=dict[int, Fusion])
    _builder: ProgramBuilder = field(init=False)

    def __post_init__(self) -> None:
        self._builder = ProgramBuilder(self)

    @property
    def inputs(self) -> list[Value]:
        """The tensors and scalars that the caller passes, in order."""
        return self.values.inputs

    @property
    def outputs(self) -> list[TensorView]:
        """All outputs, one per call of `add_output`. Outputs that only update an input are
        included."""
        return self.values.outputs

    @property
    def aliases(self) -> list[Alias]:
        """The outputs that update an input in place."""
        return self.values.aliases

    def with_ops(self, ops: tuple[Op, ...]) -> HostIrContainer:
        """Returns a copy of the program that has `ops` instead of its current ops."""
        return replace(self, ops=ops)

    def tensors(self) -> tuple[TensorView, ...]:
        """Returns every tensor: first inputs, then the tensors of the ops in program order, then
        outputs."""
        seen: dict[TensorView, None] = {}
        for value in (*self.inputs, *_values(self.ops), *self.outputs):
            if isinstance(value, TensorView):
                seen[value] = None
        return tuple(seen)

    def communications(self) -> tuple[Communication, ...]:
        """Returns all collectives, in program order."""
        return tuple(op for op in walk(self.ops) if isinstance(op, Communication))

    def started(self) -> tuple[StartsCommunication, ...]:
        """Returns all ops that start a communication, in program order."""
        return tuple(op for op in walk(self.ops) if isinstance(op, StartsCommunication))

    def devices(self) -> tuple[int, ...]:
        """Returns the sorted ranks in the meshes of all tensors; () for a program without a
        mesh."""
        return ranks_of(tv.mesh for tv in self.tensors() if tv.mesh is not None)

    def check_full(self) -> None:
        """Raises `VerifyError` if the program was read from the short form, which lacks kernels and
        cannot run."""
        if self.is_short:
            raise VerifyError(printer.SHORT_FORM)

    # ------------------------------------------------------------ building by hand
    def __enter__(self) -> HostIrContainer:
        self._builder.enter()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._builder.leave(error)

    tensor = _by_hand(ProgramBuilder.tensor)
    input = _by_hand(ProgramBuilder.input)
    scalar = _by_hand(ProgramBuilder.scalar)
    add_input = _by_hand(ProgramBuilder.add_input)
    add_output = _by_hand(ProgramBuilder.add_output)
    append = _by_hand(ProgramBuilder.append)
    select = _by_hand(ProgramBuilder.select)
    loop = _by_hand(ProgramBuilder.loop)
    branch = _by_hand(ProgramBuilder.branch)
    otherwise = _by_hand(ProgramBuilder.otherwise)
    unit = _by_hand(ProgramBuilder.unit)
    seal = _by_hand(ProgramBuilder.seal)

    # ------------------------------------------------------------ text
    def __repr__(self) -> str:
        return f"{type(self).__name__} of {len(self.ops)} ops"

    def __str__(self) -> str:
        return printer.short_text(self)

    def full_text(self, *, first_line: str = printer.FULL_FORM) -> str:
        """Returns the complete program as text, which `parse` can read.

        `first_line` says that the text is in the full form. The heading of a dump may take its
        place.
        """
        return printer.full_text(self, first_line=first_line)

    def names_text(self) -> str:
        """Returns the program with one line per op. Tensors appear only by number.

        The text is for reading and cannot be parsed. Example:

        `T5_l_float[iS18{2}]\\n   = HirAliasSelect( T3_g_float[iS12{4}], .. )` -> `T5 =
        HirAliasSelect( T3, .. )`
        """
        return printer.names_text(self)


def _values(ops: tuple[Op, ...]) -> Iterator[object]:
    for op in walk(ops):
        # A host op may define its results for the first time, so they precede its operands.
        yield from (
            (*op.outputs, *op.inputs) if isinstance(op, HostOp) else (*op.inputs, *op.outputs)
        )


def equal(a: HostIrContainer, b: HostIrContainer) -> bool:
    """Whether two programs are structurally equal: their values, ops, kernels and host units. The
    numbers in the names of tensors must also be equal."""
    return container_key(a) == container_key(b)


def container_key(p: HostIrContainer) -> tuple[object, ...]:
    """Returns a key that is equal for structurally equal programs."""
    return (
        values_key(p.values, p.tensors()),
        tuple(op_key(op) for op in p.ops),
        tuple((n, g.scheduler, fusion_key(g.fusion)) for n, g in p.groups.items()),
        tuple((n, fusion_key(f)) for n, f in p.units.items()),
    )
