"""Defines `ProgramBuilder`, the methods by which a user builds a host program by hand, op by op.

An op is appended to the innermost region (loop body or branch) that is still open. The docstring of
`hostir.ir.program` has an example.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from fuser.ir.domain.tensor_domain import IterDomain
from fuser.ir.dtypes import DataType, DtypeLike, check_stored, check_supported, dtype_text
from fuser.ir.fusion import Axis, Fusion, TensorOp, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.naming import in_ir, in_words
from fuser.ir.op import Op, walk
from fuser.ir.scalar.constructors import ONE, Scalar, Symbol, as_scalar, const, is_int
from fuser.ir.types import IterType, MemoryType
from fuser.ops.building import same_extent
from fuser.support.arguments import checked
from fuser.support.errors import ArgumentError, DefinitionError, counted, user_code, user_line
from hostir.ir.ops import ForLoop, HirAliasSelect, HostOp, IfThenElse, loop_index


class Buildable(Protocol):
    """The attributes of a host program that `ProgramBuilder` changes. `HostIrContainer` has all of
    these attributes."""

    values: Fusion
    ops: tuple[Op, ...]
    units: Mapping[int, Fusion]


class ProgramBuilder:
    """Builds one host program, op by op. While a loop body or branch is open, the builder collects
    the ops of that region. The loop or branch is appended to the program when its region ends."""

    def __init__(self, program: Buildable) -> None:
        self._program = program
        # Innermost last.
        self._open: list[list[Op]] = []
        self._is_sealed = False

    @property
    def _values(self) -> Fusion:
        return self._program.values

    def seal(self) -> None:
        """Forbids further changes of the program. An evaluator calls `seal` when it begins to use
        the program. The evaluator records a run and then repeats the recording, so later changes of
        the program would have no effect."""
        self._is_sealed = True

    def _check_not_sealed(self, what: str) -> None:
        if self._is_sealed:
            raise DefinitionError(
                f"{what}: the program cannot change any more, because an evaluator uses it; build "
                "the complete program before you create the evaluator"
            )

    def enter(self) -> None:
        """Begins a `with` block of the program: each tensor and op that the block defines belongs
        to this program."""
        self._guard = FusionGuard(self._values)

    def leave(self, error: object) -> None:
        """Ends the `with` block that `enter` began. `error` is the exception that ended the block,
        or None.

        Raises `DefinitionError` if the block defined an op but did not append the op to the
        program.
        """
        self._guard.close()
        if error is not None:
            return
        standing = set(map(id, walk(self._program.ops)))
        forgotten = next((op for op in self._values.exprs if id(op) not in standing), None)
        if forgotten is not None:
            made = forgotten.out_tensor
            raise DefinitionError(
                f"Op {forgotten.name} was defined{user_code(forgotten.where)}, but never appended "
                f"to the program: append {made.label}{in_ir(made)}"
            )
        self._values.exprs = ()

    @checked
    def tensor(
        self,
        shape: Sequence[Scalar | int],
        dtype: DtypeLike = DataType.Float,
        *,
        mesh: object = None,
        memory: MemoryType = MemoryType.global_,
    ) -> TensorView:
        """Returns a new contiguous tensor of the program, without a buffer. `Allocate` gives the
        tensor a buffer.

        `shape` has the extents of the whole tensor, not of one rank's part: -1 is a new symbolic
        extent, and 1 is a broadcast axis. A tensor on a `mesh` of devices is sharded by later calls
        of its methods `outer_split` and `parallelize`. `memory` is the kind of memory, such as
        global or symmetric. Raises `DefinitionError` if an extent is below -1 or is not an integer.
        """
        tv = self._values.new_tensor(
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
                raise DefinitionError(
                    f"tensor: axis {position} has the extent {extent} of dtype "
                    f"{dtype_text(extent.dtype)}, expected an integer scalar"
                )
            return self._values.new_axis(extent)
        if extent < -1:
            raise DefinitionError(
                f"tensor: axis {position} has the extent {extent}, expected at least 0, or -1 for "
                "a symbolic extent"
            )
        if extent == 1:
            return self._values.new_axis(ONE, IterType.broadcast)
        return self._values.new_axis(self._values.new_extent() if extent == -1 else const(extent))

    @checked
    def input(
        self,
        shape: Sequence[Scalar | int],
        dtype: DtypeLike = DataType.Float,
        *,
        mesh: object = None,
        memory: MemoryType = MemoryType.global_,
    ) -> TensorView:
        """Returns a new tensor that becomes the next input of the program. The parameters are
        explained at `tensor`."""
        tv = self.tensor(shape, dtype, mesh=mesh, memory=memory)
        self.add_input(tv)
        return tv

    @checked
    def scalar(self, dtype: DtypeLike = DataType.Int) -> Symbol:
        """Returns a new scalar of type `dtype` that becomes the next input of the program."""
        symbol = self._values.new_symbol(check_supported(dtype, "scalar"))
        self.add_input(symbol)
        return symbol

    @checked
    def add_input(self, value: TensorView | Symbol) -> None:
        """Makes `value` the next input of the program, after all earlier inputs. Raises
        `DefinitionError` if `value` is already an input."""
        self._check_not_sealed("add_input")
        if value in self._values.inputs:
            raise DefinitionError(f"add_input: {value} is already an input of the program")
        if isinstance(value, TensorView) and value.memory is MemoryType.local:
            value.give_memory()
        self._values.inputs.append(value)

    @checked
    def add_output(self, tv: TensorView, alias_input: TensorView | None = None) -> None:
        """Makes `tv` the next output of the program. If `alias_input` is given, a run also writes
        the values of `tv` into that input, which is thereby updated in place. `Fusion.add_output`
        has further rules for such updates."""
        self._check_not_sealed("add_output")
        if tv.memory is MemoryType.local:
            tv.give_memory()
        self._values.add_output(tv, alias_input)

    @checked
    def append(self, *ops: Op | TensorView, into: TensorView | None = None) -> None:
        """Appends ops to the innermost region (loop body or branch) that is open, or to the
        program.

        A tensor may be passed instead of an op. Then all ops that compute the tensor and are not
        yet in the program are appended. The tensor may already have memory, from an `Allocate` or
        because it is a view of another tensor. If `into` is given, the last op writes its result
        into that tensor, such as an input.

        Raises `DefinitionError` if the result of the last op differs from `into` in shape or dtype.
        """
        last = ops[-1] if ops else None
        for given in ops:
            made = self._computing(given) if isinstance(given, TensorView) else [given]
            if into is not None and given is last:
                made[-1] = self._written_into(made[-1], into)
            for op in made:
                self._append(op)

    def _written_into(self, op: Op, into: TensorView) -> Op:
        """Returns a copy of `op` that writes its result into the tensor `into` instead of a new
        tensor. In the program's list of defined ops, the copy replaces `op`.

        Raises `DefinitionError` if `into` cannot hold the result.
        """
        results = op.fields_of("result")
        out = getattr(op, results[0]) if len(results) == 1 else None
        if not isinstance(op, TensorOp) or not isinstance(out, TensorView):
            raise _refusal(
                f"append: into={into} needs a tensor op with exactly one result, and {op.name} is "
                "not such an op: append the op without into=",
                into,
            )
        if len(out.domain.logical) != out.ndim or out.domain.root_numbers:
            like = "" if into.mesh is None else f" the mesh and the parallel types of {into}, and"
            raise _refusal(
                f"append: {op.name} cannot write directly into {into}, because the result {out} "
                "has axes that the op sums over, or new axes. Give "
                f"{out}{like} a buffer (Allocate), append {out}, and "
                f"then append(ops.set({out}), into={into})",
                into,
                out,
            )
        differing = [
            f"the first has {mine}, the second {theirs}"
            for mine, theirs in (
                (f"dtype {dtype_text(out.dtype())}", f"dtype {dtype_text(into.dtype())}"),
                (f"{counted(out.ndim, 'axis')}", f"{counted(into.ndim, 'axis')}"),
                tuple("no mesh" if tv.mesh is None else str(tv.mesh) for tv in (out, into)),
            )
            if mine != theirs
        ]
        if differing:
            raise _refusal(
                f"append: {out} cannot be written into {into}: {'; '.join(differing)}", out, into
            )
        for a, b in zip(into.shape(), out.shape(), strict=True):
            same_extent(self._values, a, b, f"append: {out.label}, to be written into {into.label}")
        written = op.replace(**{results[0]: into})
        self._values.exprs = tuple(written if e is op else e for e in self._values.exprs)
        return written

    def _append(self, op: Op) -> None:
        self._check_not_sealed("append")
        if not isinstance(op, Op):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(f"HostIrContainer.append: expected an op or a tensor, got {op!r}")
        for tv in {v for o in walk((op,)) for v in (*o.outputs, *o.inputs)}:
            if isinstance(tv, TensorView) and tv.fusion is not self._values:
                raise _refusal(
                    f"append: {op.name} uses {tv}, which belongs to another program: use tensors "
                    "of this program only",
                    tv,
                )
        for tv in op.outputs:
            if tv.memory is MemoryType.local:
                tv.give_memory()
        op = _lined(op, user_line())
        if self._open:
            self._open[-1].append(op)
        else:
            self._program.ops = (*self._program.ops, op)

    def _computing(self, tv: TensorView) -> list[Op]:
        standing = {id(o) for block in (self._program.ops, *self._open) for o in walk(block)}
        found: list[Op] = []
        needed = {tv}
        for op in reversed(self._values.exprs):
            if id(op) not in standing and needed.intersection(op.outputs):
                found.insert(0, op)
                needed.update(v for v in op.inputs if isinstance(v, TensorView))
        if not found:
            text = (
                f"HostIrContainer.append: there is no op to append for {tv}: no op computes it, or "
                "that op is already in the program"
            )
            raise _refusal(text, tv)
        return found

    @checked
    def select(
        self, inp: TensorView, axis: int, index: Scalar | int, out: TensorView | None = None
    ) -> TensorView:
        """Appends a `HirAliasSelect` op that selects element `index` along an axis of `inp`.
        Returns the result, a view of `inp` without that axis.

        The result is `out` if given, and otherwise a new tensor. `axis` is the index of the axis,
        not counting reduction axes.
        """
        axes = inp.domain.no_reductions
        if not -len(axes) <= axis < len(axes):
            raise _refusal(
                f"select: there is no axis {axis} in {inp}, which has {counted(len(axes), 'axis')}",
                inp,
            )
        if isinstance(index, Scalar) and not is_int(index):
            raise _refusal(
                f"select: the index {index} into {inp} has the dtype {dtype_text(index.dtype)}, "
                "expected an integer",
                inp,
            )
        cut = axes[axis]
        if out is None:
            kept = [self._values.clone_axis(a, ptype=a.ptype) for a in axes if a is not cut]
            out = self._values.new_tensor(kept, inp.dtype(), memory=inp.memory, mesh=inp.mesh)
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
        """Opens a loop for a `with` block and yields the loop's index. Ops that the block appends
        become the body of the loop.

        The index runs from `start` up to `stop` (exclusive) by `step`. If `stop` is an axis of a
        tensor, the loop runs over the extent of that axis. `name` is the name of the index in the
        program's text.
        """
        if isinstance(stop, Axis):
            stop = stop.state
        axis, end = (stop, stop.extent) if isinstance(stop, IterDomain) else (None, stop)
        index = loop_index(name or f"i{self._values.next_scalar()}", start, end)
        with self._region() as body:
            yield index
        first, by = as_scalar(start), as_scalar(step)
        loop = ForLoop(
            index=index, axis=axis, start=first, stop=as_scalar(end), step=by, body=tuple(body)
        )
        self.append(loop)

    @contextmanager
    def branch(self, predicate: Scalar) -> Generator[None]:
        """Opens a branch for a `with` block. Ops that the block appends run only if `predicate` is
        true. A `with` block of `otherwise` may follow."""
        IfThenElse(predicate, then=())  # refuses what is no condition before the region is written
        with self._region() as body:
            yield
        self.append(IfThenElse(predicate, then=tuple(body)))

    @contextmanager
    def otherwise(self) -> Generator[None]:
        """Opens the second region (the ELSE ops) of the branch that was just appended, for a `with`
        block. Ops that the block appends run if the predicate of the branch is false.

        Raises `DefinitionError` if the last op is not a branch, or has a second region already.
        """
        block: Sequence[Op] = self._open[-1] if self._open else self._program.ops
        last = block[-1] if block else None
        if not isinstance(last, IfThenElse) or last.orelse:
            raise DefinitionError(
                "otherwise: the op before it must be a branch that has no second region: call "
                "otherwise() directly after the with block of branch()"
            )
        with self._region() as body:
            yield
        if self._open:
            self._open[-1].pop()
        else:
            self._program.ops = self._program.ops[:-1]
        self.append(last.replace(orelse=tuple(body)))

    @checked
    def unit(self, fusion: Fusion) -> int:
        """Adds a host unit, a fusion that is compiled separately, to the program and returns the
        number of the unit. A `PostOnStream` op runs it.

        Raises `DefinitionError` if the fusion updates an input in place.
        """
        for alias in fusion.aliases:
            raise _refusal(
                f"unit: the fusion updates its {alias.into} in place, which a host unit cannot do: "
                "return the new value as an output",
                alias.into,
            )
        number = len(self._program.units)
        self._program.units = {**self._program.units, number: fusion}
        return number

    @contextmanager
    def _region(self) -> Generator[list[Op]]:
        """Opens a region (loop body or branch) and yields the list to which later calls of `append`
        add ops.

        The caller turns the list into an op. If an exception ends the region, the list is dropped.
        """
        body: list[Op] = []
        self._open.append(body)
        try:
            yield body
        finally:
            assert self._open.pop() is body, "the innermost region must end first"


def _refusal(text: str, *tensors: TensorView) -> DefinitionError:
    """Returns the `DefinitionError` for a wrong call of a method of `ProgramBuilder`.

    `text` is the message. The source line of the user's call is added to the message, and the full
    types of `tensors` follow in lines below.
    """
    words, rows = in_words(text, tensors)
    return DefinitionError(f"{words}{user_code(user_line())}{''.join(map(in_ir, rows))}")


def _lined(op: Op, where: str) -> Op:
    """Returns a copy of the host op `op` that records `where`, the user's source line that appended
    the op. Error messages name this line. A tensor op is returned unchanged, because it has the
    line of its definition.

    Host ops inside a loop or branch `op` also get the line, unless they have a line already.
    """
    if not isinstance(op, HostOp):
        return op  # a tensor op has the line of its definition
    changes: dict[str, object] = {} if op.where else {"where": where}
    for name in op.fields_of("region"):
        region: tuple[Op, ...] = getattr(op, name)
        lined = tuple(_lined(inner, where) for inner in region)
        if any(a is not b for a, b in zip(lined, region, strict=True)):
            changes[name] = lined
    return op.replace(**changes) if changes else op
