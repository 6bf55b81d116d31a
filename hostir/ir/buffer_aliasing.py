"""Finds the tensors of a host program that share a buffer: views, parts of tensors, and outputs
that update an input in place."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from fuser.ir.fusion import TensorOp, TensorView
from fuser.ir.op import Op, walk
from fuser.ir.ops.nodes import CastOp, LibraryOp
from fuser.ir.scalar.compiled import Computed
from fuser.ir.scalar.constructors import Number, Symbol
from fuser.passes.view_ops import VIEW_OPS, is_copy
from fuser.support.errors import VerifyError
from hostir.ir.effects import Effect, Enters, Makes, Part, Reads, Shows, Writes, effects_of
from hostir.ir.ops import (
    BufferSharing,
    Deallocate,
    HostOp,
    SymmetricContiguousView,
)
from hostir.ir.program import HostIrContainer
from multidevice.sharding.streams import is_allocated_per_step


def _unread(
    program: HostIrContainer, ops: Iterable[Op], shared: Container[TensorView]
) -> frozenset[TensorView]:
    """Returns the unused results of ops that have several results. They need not be computed.

    Such a result is read by no op and is not an output of `program`. `ops` are all ops of the
    program. Results in `shared` share a buffer with another tensor. They are never returned,
    because the program may read their elements through that tensor.
    """
    read = {v for op in ops if not isinstance(op, Deallocate) for v in op.inputs}
    read.update(program.inputs, program.outputs)
    several = (op.outputs for op in ops if isinstance(op, TensorOp) and len(op.outputs) > 1)
    return frozenset(o for outs in several for o in outs if o not in read and o not in shared)


def _shown(tv: TensorView, shows: Mapping[TensorView, TensorView]) -> Iterator[TensorView]:
    """Yields the tensors of which `tv` is a view, from the nearest one to the owner of the buffer.
    Yields nothing if `tv` itself owns its buffer.

    `shows` maps each view to the tensor of which it is directly a view.
    """
    while tv in shows:
        yield (tv := shows[tv])


class WholeShapes:
    """Evaluates the shapes of undivided tensors, which are split neither over devices nor over the
    iterations of a loop. The shape of such a tensor is the same on all ranks and in all loop
    iterations, so it is computed once per run.
    """

    def __init__(self, tensors: Iterable[TensorView]) -> None:
        whole = [tv for tv in tensors if not tv.domain.has_devices]
        whole = [tv for tv in whole if not is_allocated_per_step(tv)]
        self._extents = Computed([x for tv in whole for x in tv.shape()])
        ends = list(accumulate((tv.ndim for tv in whole), initial=0))
        # The range of each tensor's extents in the list of all extents.
        self._slices = {tv: slice(*ends[i : i + 2]) for i, tv in enumerate(whole)}

    def of(self, values: Mapping[Symbol, Number]) -> dict[TensorView, tuple[int, ...]]:
        """Returns the shape of each undivided tensor: a tensor that is split neither over devices
        nor over the iterations of a loop. `values` binds the symbols in the extents.

        Returns {} if some extent cannot be evaluated, is negative, or is not an integer.
        """
        try:
            extents = self._extents(values)
        except (ArithmeticError, KeyError, ValueError):
            return {}
        if min(extents, default=0) < 0 or {*map(type, extents)} - {int}:
            return {}
        return {tv: extents[mine] for tv, mine in self._slices.items()}  # pyright: ignore[reportReturnType]


@dataclass(frozen=True)
class Storage:
    """The buffer sharing of one host program: which tensors own a buffer, and which tensors are
    views of others.

    A `Storage` depends only on the program, so all runs of the program use the same one.
    """

    tensors: tuple[TensorView, ...]
    # View, part or in-place output -> the tensor whose memory the view, part or output refers to.
    shows: dict[TensorView, TensorView]
    # The tensors among these that name only a part.
    parts: dict[TensorView, Part]
    # The tensors that a host op makes names of another tensor, or of a part of one.
    named: frozenset[TensorView]
    # The tensors that have a buffer before a tensor op writes them. The op allocates other results.
    buffered: frozenset[TensorView]
    escaping: frozenset[TensorView]
    # Outputs that name an input's memory, by a `set` without a buffer. The caller gets a copy.
    borrowed: frozenset[TensorView]
    # The tensors that show the shards of several ranks.
    views: dict[TensorView, SymmetricContiguousView]
    # Whether some tensor has a mesh.
    is_placed: bool
    # Whether the current stream changes.
    switches_streams: bool
    # Results that nothing reads, of ops with several results. They need not be computed.
    unread: frozenset[TensorView]
    # The shapes of the tensors that neither devices nor stream steps divide.
    whole: WholeShapes

    @staticmethod
    def of(program: HostIrContainer) -> Storage:
        """Finds out, from the effects of the ops of `program`, which tensors own a buffer, and
        which are views of others. Raises `VerifyError` if a tensor is a view of itself.
        """
        owners = {v for v in program.inputs if isinstance(v, TensorView)}
        inputs = frozenset(owners)
        shows: dict[TensorView, TensorView] = {}
        parts: dict[TensorView, Part] = {}
        ops = list(walk(program.ops))
        switches = False

        def note(effect: object) -> None:
            nonlocal switches
            if isinstance(effect, Makes):
                owners.add(effect.tensor)
            elif isinstance(effect, Shows):
                shows[effect.out] = effect.source
                if effect.part is not None:
                    parts[effect.out] = effect.part
            elif isinstance(effect, Enters):
                switches = True

        for op in ops:
            if isinstance(op, HostOp) and not op.MAKES_RESULTS:
                for effect in op.effects():
                    note(effect)
        named = frozenset(shows)
        buffered = frozenset(owners) | named
        for op in ops:
            if not isinstance(op, HostOp) or op.MAKES_RESULTS:
                for effect in effects_of(op, buffered):
                    note(effect)
        for alias in program.aliases:
            if alias.out not in owners and alias.out not in shows:
                shows[alias.out] = alias.into
        nothing: frozenset[TensorView] = frozenset()
        for tv in shows:
            seen = {tv}
            shown = shows.get(tv)
            while shown is not None:
                if shown in seen:
                    raise VerifyError(
                        f"{tv} is a view of itself, directly or through other views: one of these "
                        "views must have a buffer"
                    )
                seen.add(shown)
                shown = shows.get(shown)
        tensors = program.tensors()
        is_placed = any(tv.mesh is not None for tv in tensors)
        whole = WholeShapes(tensors)
        views = [op for op in ops if isinstance(op, SymmetricContiguousView) and op.team]
        storage = Storage(
            tensors,
            shows,
            parts,
            named,
            buffered,
            nothing,
            nothing,
            {op.out: op for op in views},
            is_placed,
            switches,
            _unread(program, ops, {*shows, *shows.values()}),
            whole,
        )
        roots = {storage.root(tv) for tv in (*inputs, *program.outputs)}
        stated = inputs | {alias.out for alias in program.aliases}
        copies = {op.out for op in ops if isinstance(op, TensorOp) and is_copy(op)}
        borrowed = {
            o
            for o in program.outputs
            if o not in stated and storage.root(o) in inputs and copies & {o, *_shown(o, shows)}
        }
        return replace(storage, escaping=frozenset(roots), borrowed=frozenset(borrowed))

    def with_buffers(self, given: Iterable[TensorView]) -> Storage:
        """Returns which tensors share buffers in a run in which the caller passes a buffer for each
        of the tensors `given`. The program does not allocate these tensors then.
        """
        found = frozenset(given)
        return replace(
            self,
            named=self.named | found,
            buffered=self.buffered | found,
            borrowed=self.borrowed.difference(found),
            unread=self.unread - found,
        )

    def shown_by(self, tv: TensorView) -> TensorView | None:
        """Returns the tensor of which `tv` is directly a view. That tensor may be a view, too.
        Returns None if `tv` owns its buffer.
        """
        return self.shows.get(tv)

    def view(self, tv: TensorView) -> SymmetricContiguousView | None:
        """Returns the `SymmetricContiguousView` op through which `tv` shows the memory of several
        ranks as one tensor. Returns None if `tv` shows only this rank's memory.

        The op is returned for its own result, and for each view of that result.
        """
        while tv not in self.views and tv in self.shows:
            tv = self.shows[tv]
        return self.views.get(tv)

    @cached_property
    def shown(self) -> frozenset[TensorView]:
        """The tensors whose buffers other ranks can read, because a `SymmetricContiguousView` shows
        these buffers."""
        return frozenset(map(self.root, self.views))

    def root(self, tv: TensorView) -> TensorView:
        """Returns the tensor that owns the buffer in which `tv` is stored. If `tv` is no view,
        returns `tv` itself."""
        while tv in self.shows:
            tv = self.shows[tv]
        return tv

    def escapes(self, tv: TensorView) -> bool:
        """Whether the caller of the program can still use the buffer of `tv` after the run, because
        `tv` is stored in the buffer of an input or output. The program must not free such a buffer.
        """
        return self.root(tv) in self.escaping


# ----------------------------------------------------------------------
# The ops that may overwrite their operands.

NEEDS = {
    "same": "may share a buffer with an operand only if both have the same elements at the same "
    "addresses",
    "slot": "may share memory with its operand only where the operand is this rank's block of the "
    "result",
    "never": "needs a buffer that no operand uses",
}


def buffer_sharing_of(op: Op) -> BufferSharing:
    """Returns how an operand and a result of `op` may share one buffer. For example, "never" means
    that the op must not compute in place."""
    if isinstance(op, HostOp):
        return op.buffer_sharing
    if isinstance(op, LibraryOp):
        return "never"
    return "same" if isinstance(op, (CastOp, *VIEW_OPS)) else "freely"


def pairs(effects: Sequence[Effect]) -> list[tuple[Reads | Writes, Writes]]:
    """Returns the pairs of tensors of one op that must not share memory, unless the op can compute
    in place.

    `effects` are the effects of the op (its reads and writes). Each operand is paired with each
    result, and each result with each later result. A tensor is represented by its `Reads` or
    `Writes` effect.
    """
    touched = [e for e in effects if isinstance(e, Reads | Writes)]
    return [
        (a, b)
        for k, b in enumerate(touched)
        if isinstance(b, Writes)
        for j, a in enumerate(touched)
        if isinstance(a, Reads) or j < k
    ]


def words(op: Op, a: TensorView, b: TensorView, *, is_read: bool) -> str:
    """Returns the text of the error for an op whose result `b` shares memory with `a` although the
    op does not allow this.

    If `is_read` is True, `a` is an operand of `op`. Otherwise `a` is another result.
    """
    if not is_read and a is b:
        return f"{a.label} is given for two results of the op: each result needs a separate buffer"
    if not is_read:
        return f"results {a.label} and {b.label} share memory: each result needs a separate buffer"
    both = (
        f"{b.label} is both read and written"
        if a is b
        else f"the result {b.label} overwrites the operand {a.label}"
    )
    return f"{both}: the result of {op.name} {NEEDS[buffer_sharing_of(op)]}"
