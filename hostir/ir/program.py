"""Defines `HostIrContainer`, a host program: its ops, its tensors and scalars, and its kernels.

A host program is made by the compiler's lowering, read from text, or built by hand:

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
    """Turns `method` of `ProgramBuilder` into a method of `HostIrContainer`, with the same
    signature and docstring. Users can then write `container.append(op)` without knowing the
    builder.

    The new method calls `method` on the builder that the container owns.
    """

    @wraps(method)
    def call(program: HostIrContainer, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(program._builder, *args, **kwargs)  # pyright: ignore[reportPrivateUsage]

    return call


@dataclass(eq=False, repr=False)
class HostIrContainer:
    """A host program: the ops that every rank of the job runs, in order.

    - `values` is a fusion that holds the program's tensors, inputs and outputs. It also says which
      outputs update an input in place, and which extents are equal.
    - `groups` are the kernels, by number. `LaunchKernel` launches a kernel.
    - `units` are the host units, by number: fusions that are compiled separately. `PostOnStream`
      runs a host unit.

    A compiler pass never changes a container, but returns a new container with other `ops`.
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
        """The tensors and scalars that the caller passes to a run of the program, in order."""
        return self.values.inputs

    @property
    def outputs(self) -> list[TensorView]:
        """All outputs of the program, in the order of the calls of `add_output`. This includes
        outputs that only update an input in place, which a run does not return.
        """
        return self.values.outputs

    @property
    def aliases(self) -> list[Alias]:
        """The pairs of an output and the input that this output updates in place."""
        return self.values.aliases

    def with_ops(self, ops: tuple[Op, ...]) -> HostIrContainer:
        """Returns a copy of the program that has `ops` instead of its current ops. Compiler passes
        call `with_ops` because they never change a program."""
        return replace(self, ops=ops)

    def tensors(self) -> tuple[TensorView, ...]:
        """Returns every tensor of the program once: first the inputs, then the tensors of the ops
        in program order, then the outputs."""
        seen: dict[TensorView, None] = {}
        for value in (*self.inputs, *_values(self.ops), *self.outputs):
            if isinstance(value, TensorView):
                seen[value] = None
        return tuple(seen)

    def communications(self) -> tuple[Communication, ...]:
        """Returns all collectives (`Communication` ops) of the program, in program order. Ops
        inside loops and branches are included."""
        return tuple(op for op in walk(self.ops) if isinstance(op, Communication))

    def started(self) -> tuple[StartsCommunication, ...]:
        """Returns all ops that start a communication, in program order: collectives, permutations,
        sends and receives, and the `EndCoalescing` op of each group of sends and receives.
        """
        return tuple(op for op in walk(self.ops) if isinstance(op, StartsCommunication))

    def devices(self) -> tuple[int, ...]:
        """Returns the ranks in the meshes of the program's tensors, sorted. Returns () if no tensor
        has a mesh."""
        return ranks_of(tv.mesh for tv in self.tensors() if tv.mesh is not None)

    def check_full(self) -> None:
        """Raises `VerifyError` if the program was read from its short text form. Such a program
        cannot run, because the short form does not contain the kernels."""
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
        """Returns the complete program as text. `hostir.parse` reads the text back.

        `first_line` is the first line of the text, a comment that says that the text is in the full
        form. A dump passes its heading instead.
        """
        return printer.full_text(self, first_line=first_line)

    def names_text(self) -> str:
        """Returns the program as text for reading: one line per op, with tensors shown by their
        number only.

        The text cannot be parsed back. For example, this op is one line, `T5 = HirAliasSelect( T3,
        .. )`, in place of two lines of the short text:

            T5_l_float[iS18{2}]
               = HirAliasSelect( T3_g_float[iS12{4}], .. )
        """
        return printer.names_text(self)


def _values(ops: tuple[Op, ...]) -> Iterator[object]:
    for op in walk(ops):
        # A host op may define its results for the first time, so they precede its operands.
        yield from (
            (*op.outputs, *op.inputs) if isinstance(op, HostOp) else (*op.inputs, *op.outputs)
        )


def equal(a: HostIrContainer, b: HostIrContainer) -> bool:
    """Whether two host programs are structurally equal: the same tensors, scalars, ops, kernels and
    host units (separately compiled fusions). The numbers in the names of tensors must also be
    equal.
    """
    return container_key(a) == container_key(b)


def container_key(p: HostIrContainer) -> tuple[object, ...]:
    """Returns a key of the program `p` for comparisons: two programs have the same key exactly if
    they are structurally equal."""
    return (
        values_key(p.values, p.tensors()),
        tuple(op_key(op) for op in p.ops),
        tuple((n, g.scheduler, fusion_key(g.fusion)) for n, g in p.groups.items()),
        tuple((n, fusion_key(f)) for n, f in p.units.items()),
    )
