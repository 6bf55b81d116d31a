"""HostIrContainer: a host program, its values, and the kernels that it launches.

A program is made by the one lowering, read from text, or built by hand:

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

import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from fuser.ir.binding import free_inputs
from fuser.ir.canonical_form import fusion_key, op_key, values_key
from fuser.ir.domain.device_mesh import ranks_of
from fuser.ir.domain.tensor_domain import IterDomain
from fuser.ir.dtypes import DataType, DtypeLike, check_stored, check_supported
from fuser.ir.fusion import Alias, Axis, Fusion, TensorOp, TensorView, Value
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.naming import in_ir, in_words
from fuser.ir.op import INDENT, Op, op_text, region_text, value_text
from fuser.ir.scalar.constructors import ONE, Scalar, Symbol, as_scalar, const, is_int, symbols
from fuser.ir.text.printer import fusion_text, lines_text, sections_text
from fuser.ir.types import IterType, MemoryType
from fuser.ops.building import same_extent
from fuser.support.arguments import checked
from fuser.support.errors import ArgumentError, DefinitionError, VerifyError, user_code, user_line
from hostir.ir.ops import (
    Communication,
    ForLoop,
    HirAliasSelect,
    HostOp,
    IfThenElse,
    LaunchKernel,
    PostOnStream,
    SetCurrentStream,
    ShardByStream,
    StartsCommunication,
    SymmetricContiguousView,
    loop_index,
)
from multidevice.sharding.streams import stream_axes

# The first line of the full text, by which a text without any section is known to be complete.
FULL_FORM = "// host program, full form: this text runs"
SHORT_FORM = (
    "this is the short form of a host program, which is for reading: memory layouts, aliases and "
    "kernels are not in it. The full form is needed: FUSER_DUMP=host_ir writes it, "
    "HostIrContainer.full_text() returns it"
)

# `T4_l_float[iS0{i0}, ideviceIdx.x7{2}] (DeviceMesh{0 1})`: the number, and what follows it.
_TYPE = re.compile(r"\b(T\d+)_\w+\[[^\[\]]*\](?: \(DeviceMesh\{[^()]*\}\))?")


@dataclass(frozen=True)
class KernelGroup:
    """A kernel as a fusion of global tensors, and the scheduler that accepts it."""

    number: int
    fusion: Fusion
    scheduler: str


@dataclass(eq=False, repr=False)
class HostIrContainer:
    """A rank-independent host program.

    `values` is a fusion that owns the tensors and has the program's inputs, outputs, aliases and
    extent classes. `units` are the fusions that `PostOnStream` runs. A pass makes a new container
    with other `ops`.
    """

    values: Fusion = field(default_factory=Fusion)
    ops: tuple[Op, ...] = ()
    groups: Mapping[int, KernelGroup] = field(default_factory=dict[int, KernelGroup])
    # Whether it was read from a text that does not say everything.
    is_short: bool = False
    units: Mapping[int, Fusion] = field(default_factory=dict[int, Fusion])
    # While it is built by hand: the ops of the open regions, innermost last.
    _open: list[list[Op]] = field(default_factory=list[list[Op]], repr=False)
    _is_sealed: bool = field(default=False, repr=False)

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
        return replace(self, ops=ops, _open=[], _is_sealed=False)

    def seal(self) -> None:
        """Let nothing more be added: an evaluator has this program."""
        self._is_sealed = True

    def _check_not_sealed(self, what: str) -> None:
        if self._is_sealed:
            raise DefinitionError(
                f"{what}: an evaluator has this program already; build it whole before"
            )

    def tensors(self) -> tuple[TensorView, ...]:
        """Return every tensor: inputs, those of the ops in program order, outputs."""
        seen: dict[TensorView, None] = {}
        for value in (*self.inputs, *_values(self.ops), *self.outputs):
            if isinstance(value, TensorView):
                seen[value] = None
        return tuple(seen)

    def computations(self) -> Iterator[Op]:
        """Yield the ops, then those of kernels and units."""
        yield from walk(self.ops)
        for fusion in (*(g.fusion for g in self.groups.values()), *self.units.values()):
            yield from fusion.exprs

    def free_inputs(self) -> frozenset[int]:
        """Return the positions of scalar inputs that decide nothing about structure."""
        kernels = (tv for group in self.groups.values() for tv in group.fusion.tensors())
        free = free_inputs(self.values, (*self.tensors(), *kernels))
        steering = self.steering()
        return frozenset(i for i in free if self.inputs[i] not in steering)

    def steering(self) -> frozenset[Symbol]:
        """Return the symbols that decide which ops run, how often and on what."""
        scalars = (
            x
            for op in walk(self.ops)
            if isinstance(op, HostOp) and not isinstance(op, LaunchKernel | PostOnStream)
            for x in (*op.inputs, *op.scalars)
            if isinstance(x, Scalar)
        )
        return frozenset(s for x in scalars for s in symbols(x))

    def communications(self) -> tuple[Communication, ...]:
        return tuple(op for op in walk(self.ops) if isinstance(op, Communication))

    def started(self) -> tuple[StartsCommunication, ...]:
        """Return all ops that start a communication, in program order."""
        return tuple(op for op in walk(self.ops) if isinstance(op, StartsCommunication))

    def devices(self) -> tuple[int, ...]:
        """Return the ranks that some tensor's mesh names, in order; () for a program without."""
        return ranks_of(tv.mesh for tv in self.tensors() if tv.mesh is not None)

    def check_full(self) -> None:
        """Raise `VerifyError` for a program that was read from its short form."""
        if self.is_short:
            raise VerifyError(SHORT_FORM)

    # ------------------------------------------------------------ building by hand
    def __enter__(self) -> HostIrContainer:
        self._guard = FusionGuard(self.values)
        self._guard.__enter__()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._guard.__exit__(kind, error, trace)
        if error is not None:
            return
        standing = set(map(id, walk(self.ops)))
        forgotten = next((op for op in self.values.exprs if id(op) not in standing), None)
        if forgotten is not None:
            made = forgotten.out_tensor
            raise DefinitionError(
                f"Op {forgotten.name} was defined{user_code(forgotten.where)}, but stands nowhere "
                f"in the program: append {made.label}{in_ir(made)}"
            )
        self.values.exprs = ()

    @checked
    def tensor(
        self,
        shape: Sequence[Scalar | int],
        dtype: DtypeLike = DataType.Float,
        *,
        mesh: object = None,
        memory: MemoryType = MemoryType.global_,
    ) -> TensorView:
        """Return a new contiguous tensor; -1 is an extent of its own, 1 a broadcast.

        `shape` is global: shard it with `outer_split` and `parallelize`, given a mesh.
        Raises `DefinitionError` for an extent that is no size.
        """
        tv = self.values.new_tensor(
            [self._axis(i, n) for i, n in enumerate(shape)],
            check_stored(dtype, "tensor"),
            memory=memory,
        )
        if mesh is not None:
            tv.set_device_mesh(mesh)
        return tv

    def _axis(self, position: int, extent: Scalar | int) -> IterDomain:
        if isinstance(extent, Scalar):
            if not is_int(extent):
                raise DefinitionError(f"tensor: axis {position} has the extent {extent}, no size")
            return self.values.new_axis(extent)
        if extent < -1:
            raise DefinitionError(f"tensor: axis {position} has the extent {extent}, no size")
        if extent == 1:
            return self.values.new_axis(ONE, IterType.broadcast)
        return self.values.new_axis(self.values.new_extent() if extent == -1 else const(extent))

    @checked
    def input(
        self,
        shape: Sequence[Scalar | int],
        dtype: DtypeLike = DataType.Float,
        *,
        mesh: object = None,
        memory: MemoryType = MemoryType.global_,
    ) -> TensorView:
        """Return a new tensor like `tensor`, as the next input."""
        tv = self.tensor(shape, dtype, mesh=mesh, memory=memory)
        self.add_input(tv)
        return tv

    @checked
    def scalar(self, dtype: DtypeLike = DataType.Int) -> Symbol:
        """Return a new number, as the next input."""
        symbol = self.values.new_symbol(check_supported(dtype, "scalar"))
        self.add_input(symbol)
        return symbol

    @checked
    def add_input(self, value: TensorView | Symbol) -> None:
        self._check_not_sealed("add_input")
        if value in self.inputs:
            raise DefinitionError(f"{value} is an input already")
        if isinstance(value, TensorView) and value.memory is MemoryType.local:
            value.give_memory()
        self.inputs.append(value)

    @checked
    def add_output(self, tv: TensorView, alias_input: TensorView | None = None) -> None:
        """Let the program return `tv`, or write it into an input; see `Fusion.add_output`."""
        self._check_not_sealed("add_output")
        if tv.memory is MemoryType.local:
            tv.give_memory()
        self.values.add_output(tv, alias_input)

    @checked
    def append(self, *ops: Op | TensorView, into: TensorView | None = None) -> None:
        """Add ops at the end of the innermost open region.

        A tensor stands for the ops that compute it, as far as they are not in the program yet; its
        buffer, or whose name it is, may be stated before. The last op writes its result `into` a
        tensor, an input among others, if there is one.

        Raises `DefinitionError` for a result that does not have the shape and dtype of `into`.
        """
        last = ops[-1] if ops else None
        for given in ops:
            made = self._computing(given) if isinstance(given, TensorView) else [given]
            if into is not None and given is last:
                made[-1] = self._written_into(made[-1], into)
            for op in made:
                self._append(op)

    def _written_into(self, op: Op, into: TensorView) -> Op:
        """Return an op with another result, which stands for it among those defined here."""
        results = op.fields_of("result")
        out = getattr(op, results[0]) if len(results) == 1 else None
        if not isinstance(op, TensorOp) or not isinstance(out, TensorView):
            raise _refusal(f"append: {op.name} has no result to write into {into}", into)
        if len(out.domain.logical) != out.ndim or out.domain.root_numbers:
            like = "" if into.mesh is None else f" the mesh and the parallel types of {into}, and"
            raise _refusal(
                f"append: {op.name} cannot write into {into} itself: its result sums over axes, or "
                f"makes them anew. Give {out}{like} a buffer (Allocate), append it, and then a set "
                "of it",
                into,
                out,
            )
        differing = [
            word
            for word, mine, theirs in (
                ("dtype", out.dtype(), into.dtype()),
                ("number of axes", out.ndim, into.ndim),
                ("mesh", out.mesh, into.mesh),
            )
            if mine != theirs
        ]
        if differing:
            differ = " and ".join(differing)
            raise _refusal(
                f"append: {out} cannot be written into {into}: another {differ}", out, into
            )
        for a, b in zip(into.shape(), out.shape(), strict=True):
            same_extent(self.values, a, b, f"append: {out.label}, to be written into {into.label}")
        written = op.replace(**{results[0]: into})
        self.values.exprs = tuple(written if e is op else e for e in self.values.exprs)
        return written

    def _append(self, op: Op) -> None:
        self._check_not_sealed("append")
        if not isinstance(op, Op):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(f"HostIrContainer.append: {op!r} is no op and no tensor")
        for tv in {v for o in walk((op,)) for v in (*o.outputs, *o.inputs)}:
            if isinstance(tv, TensorView) and tv.fusion is not self.values:
                raise _refusal(f"append: {tv} of {op.name} belongs to another program", tv)
        for tv in op.outputs:
            if tv.memory is MemoryType.local:
                tv.give_memory()
        op = _lined(op, user_line())
        if self._open:
            self._open[-1].append(op)
        else:
            self.ops = (*self.ops, op)

    def _computing(self, tv: TensorView) -> list[Op]:
        standing = {id(o) for block in (self.ops, *self._open) for o in walk(block)}
        found: list[Op] = []
        needed = {tv}
        for op in reversed(self.values.exprs):
            if id(op) not in standing and needed.intersection(op.outputs):
                found.insert(0, op)
                needed.update(v for v in op.inputs if isinstance(v, TensorView))
        if not found:
            text = f"HostIrContainer.append: no op that is still to come makes {tv}"
            raise _refusal(text, tv)
        return found

    @checked
    def select(
        self, inp: TensorView, axis: int, index: Scalar | int, out: TensorView | None = None
    ) -> TensorView:
        """Append a `HirAliasSelect` and return its result: `out`, or a new tensor.

        `axis` counts the logical axes without reductions.
        """
        axes = inp.domain.no_reductions
        if not -len(axes) <= axis < len(axes):
            raise _refusal(f"select: axis {axis} of {inp}, which has {len(axes)} axes", inp)
        if isinstance(index, Scalar) and not is_int(index):
            raise _refusal(f"select: the index {index} of {inp} is no integer", inp)
        cut = axes[axis]
        if out is None:
            kept = [self.values.clone_axis(a, ptype=a.ptype) for a in axes if a is not cut]
            out = self.values.new_tensor(kept, inp.dtype(), memory=inp.memory, mesh=inp.mesh)
        self.append(HirAliasSelect(out, inp, as_scalar(index), axis=cut))
        return out

    @contextmanager
    @checked
    def loop(
        self,
        stop: Scalar | int | IterDomain | Axis,
        start: Scalar | int = 0,
        step: Scalar | int = 1,
        *,
        name: str = "",
    ) -> Generator[Symbol]:
        """Open a loop to append to; yields its index. `stop` may be an axis to run over."""
        if isinstance(stop, Axis):
            stop = stop.state
        axis, end = (stop, stop.extent) if isinstance(stop, IterDomain) else (None, stop)
        index = loop_index(name or f"i{self.values.next_scalar()}", start, end)
        with self._region() as body:
            yield index
        first, by = as_scalar(start), as_scalar(step)
        loop = ForLoop(
            index=index, axis=axis, start=first, stop=as_scalar(end), step=by, body=tuple(body)
        )
        self.append(loop)

    @contextmanager
    def branch(self, predicate: Scalar) -> Generator[None]:
        """Open the region that runs where `predicate` holds; `otherwise` may follow."""
        IfThenElse(predicate, then=())  # refuses what is no condition before the region is written
        with self._region() as body:
            yield
        self.append(IfThenElse(predicate, then=tuple(body)))

    @contextmanager
    def otherwise(self) -> Generator[None]:
        """Open the other region of the branch that was closed last."""
        block: Sequence[Op] = self._open[-1] if self._open else self.ops
        last = block[-1] if block else None
        if not isinstance(last, IfThenElse) or last.orelse:
            raise DefinitionError("otherwise() follows a branch")
        with self._region() as body:
            yield
        if self._open:
            self._open[-1].pop()
        else:
            self.ops = self.ops[:-1]
        self.append(last.replace(orelse=tuple(body)))

    @checked
    def unit(self, fusion: Fusion) -> int:
        """Keep a fusion for `PostOnStream`, and return its number.

        Raises `DefinitionError` for one that updates an input.
        """
        for alias in fusion.aliases:
            raise _refusal(f"unit: it updates its {alias.into} in place", alias.into)
        number = len(self.units)
        self.units = {**self.units, number: fusion}
        return number

    @contextmanager
    def _region(self) -> Generator[list[Op]]:
        """Open a region; after an error in it, what was appended there is dropped."""
        body: list[Op] = []
        self._open.append(body)
        try:
            yield body
        finally:
            assert self._open.pop() is body, "regions end in the order of their begin"

    # ------------------------------------------------------------ text
    def __repr__(self) -> str:
        return f"{type(self).__name__} of {len(self.ops)} ops"

    def __str__(self) -> str:
        ins, outs = (", ".join(map(value_text, vs)) for vs in (self.inputs, self.outputs))
        units = "".join(f"\n\n  {unit_line(n, f)}" for n, f in self.units.items())
        head = f"\n%HostIrContainer {{ ({ins}) -> ({outs}) :"
        return f"{head}{region_text(self.ops)}{units}\n}} // %HostIrContainer\n\n"

    def full_text(self, *, first_line: str = FULL_FORM) -> str:
        """Return the program with everything that it needs to run: `parse` reads it back.

        The first line names the form; a heading that does so may stand in its place.
        """
        return first_line + self._sections(lines_text(self.ops))

    def names_text(self) -> str:
        """Return the program with tensors by number alone, an op per line; nothing reads it again.

        `T5_l_float[iS18{2}]\\n   = HirAliasSelect( T3_g_float[iS12{4}], .. )` -> `T5 =
        HirAliasSelect( T3, .. )`
        """
        text = str(self)
        first, *_ = text.lstrip("\n").splitlines()
        *_, last = text.rstrip("\n").splitlines()
        lines = [first, *_op_lines(self.ops, INDENT), last]
        return "".join(_TYPE.sub(r"\1", line) + "\n" for line in lines)

    def meaning_text(self) -> str:
        """Return the full form without the user's lines: what ranks compare."""
        return FULL_FORM + self._sections("")

    def _sections(self, lines: str) -> str:
        parts = [
            str(self),
            sections_text(self.values, self.tensors(), tuple(walk(self.ops))),
            lines,
        ]
        parts += [
            f"\nKernel group {g.number} ({g.scheduler}) : \n{fusion_text(g.fusion)}"
            for g in self.groups.values()
        ]
        parts += [f"\nHost unit {n} : \n{fusion_text(f)}" for n, f in self.units.items()]
        return "".join(parts)


def unit_line(number: int, unit: Fusion) -> str:
    """Return the line by which a program's text names a host unit."""
    ins, outs = value_text(tuple(unit.inputs)), value_text(tuple(unit.outputs))
    return f"HostUnit{number}: Inputs={ins} -> Outputs={outs}"


def walk(ops: Sequence[Op]) -> Iterator[Op]:
    """Yield ops in program order, those of regions after the op that owns them."""
    for op in ops:
        yield op
        for region in op.regions:
            yield from walk(region)


def _refusal(text: str, *tensors: TensorView) -> DefinitionError:
    """Return the error of a call that builds a program: tensors by name, their types below."""
    words, rows = in_words(text, tensors)
    return DefinitionError(f"{words}{user_code(user_line())}{''.join(map(in_ir, rows))}")


def _lined(op: Op, where: str) -> Op:
    """Return the op with this line where it, or a host op in its regions, has none yet."""
    if not isinstance(op, HostOp):
        return op  # it has the line at which it was defined
    changes: dict[str, object] = {} if op.where else {"where": where}
    for name in op.fields_of("region"):
        region: tuple[Op, ...] = getattr(op, name)
        lined = tuple(_lined(inner, where) for inner in region)
        if any(a is not b for a, b in zip(lined, region, strict=True)):
            changes[name] = lined
    return op.replace(**changes) if changes else op


def has_streams(program: HostIrContainer) -> bool:
    """Whether there is anything that the structural rules of `hostir.verify` do not decide."""
    undecided = SetCurrentStream, ForLoop, IfThenElse, HirAliasSelect, ShardByStream
    return any(isinstance(op, (*undecided, StartsCommunication)) for op in program.ops)


def only_allocates(program: HostIrContainer) -> bool:
    """Whether a program takes nothing and computes nothing: its outputs are like `torch.empty`."""
    kinds = TensorOp | LaunchKernel | PostOnStream | StartsCommunication
    return not program.inputs and not any(isinstance(op, kinds) for op in walk(program.ops))


def unlowered(program: HostIrContainer) -> TensorOp | None:
    """Return an op whose result has a stream axis in a program without loops; None without one."""
    ops = list(walk(program.ops))
    if any(isinstance(op, ForLoop) for op in ops):
        return None
    streamed = (op for op in ops if isinstance(op, TensorOp) and _has_stream(op.out_tensor))
    return next(streamed, None)


def _has_stream(tv: TensorView) -> bool:
    return any(a.is_stream and not a.is_reduction() for a in tv.domain.loop)


def has_communications(program: HostIrContainer) -> bool:
    """Whether ranks meet in some op."""
    return any(
        isinstance(op, StartsCommunication)
        or (isinstance(op, SymmetricContiguousView) and op.team is not None)
        for op in walk(program.ops)
    )


def _values(ops: tuple[Op, ...]) -> Iterator[object]:
    for op in walk(ops):
        # A host op defines what it names; a tensor op's operands come first.
        yield from (
            (*op.outputs, *op.inputs) if isinstance(op, HostOp) else (*op.inputs, *op.outputs)
        )


def equal(a: HostIrContainer, b: HostIrContainer) -> bool:
    """Whether two programs are the same: values, ops, kernel groups; numbers count."""
    return container_key(a) == container_key(b)


def container_key(p: HostIrContainer) -> tuple[object, ...]:
    return (
        values_key(p.values, p.tensors()),
        tuple(op_key(op) for op in p.ops),
        tuple((n, g.scheduler, fusion_key(g.fusion)) for n, g in p.groups.items()),
        tuple((n, fusion_key(f)) for n, f in p.units.items()),
    )


def _op_lines(ops: Sequence[Op], indent: str) -> Iterator[str]:
    for op in ops:
        heads = op.region_heads()
        if not heads:
            yield indent + " ".join(op_text(op).split()).replace("{ ", "{").replace(" }", "}")
            continue
        yield indent + op_text(op).partition("\n")[0]
        for name, head in heads.items():
            region: Sequence[Op] = getattr(op, name)
            if head and region:
                yield indent + head
            yield from _op_lines(region, indent + INDENT)


def dropped_axes_of(tv: TensorView, rank: int) -> tuple[int, ...]:
    """Return the axes of a kernel's operand `tv` that a slice of this rank lacks, in order."""
    whole = sorted(s.position for s in stream_axes(tv) if s.is_logical)
    return tuple(whole) if tv.ndim - rank == len(whole) else ()


# ----------------------------------------------------------------------
# The forms in which a host program is dumped and printed.

# What a dump's heading says of its form.
NOTES = {"short": "short form", "names": "names only"}


def dumped(program: HostIrContainer, form: str) -> str:
    """Return the text of a dump: `form` is "short", "names", or anything else for the full one."""
    if form == "names":
        return program.names_text()
    return str(program) if form == "short" else program.full_text(first_line="")
