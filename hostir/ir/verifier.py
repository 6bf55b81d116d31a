"""Checks the structural rules of a host program, such as "a tensor is written before it is read".
The rules are checked after every compiler pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

from fuser.ir.domain.device_mesh import ranks_text
from fuser.ir.dtypes import dtype_text
from fuser.ir.fusion import Alias, Fusion, TensorOp, TensorView
from fuser.ir.naming import in_words
from fuser.ir.op import Op, op_text, walk
from fuser.ir.ops.nodes import LoadStoreOp
from fuser.ir.scalar.constructors import Scalar, Symbol, symbols
from fuser.ir.text.printer import program_symbols
from fuser.ir.verify import verify_fusion
from fuser.passes.view_ops import VIEW_OPS
from fuser.support.errors import FuserError, VerifyError
from hostir.ir.buffer_aliasing import Storage, buffer_sharing_of, pairs, words
from hostir.ir.diagnostics import line_numbers, line_text, listing
from hostir.ir.effects import (
    Captures,
    ClosesGroup,
    Effect,
    Enters,
    Frees,
    Joins,
    Makes,
    OpensGroup,
    Reads,
    Shows,
    Starts,
    Waits,
    Writes,
    effects_of,
)
from hostir.ir.ops import (
    NUMBER_OF_STREAMS,
    PEER_COPIES,
    RANK,
    ForLoop,
    GetCurrentStream,
    HostOp,
    IfThenElse,
    SetCurrentStream,
    StartsCommunication,
    Wait,
)
from hostir.ir.program import HostIrContainer
from hostir.ir.queries import only_allocates
from hostir.ir.shape_rules import check_buffers, check_results


def verify(program: HostIrContainer, *, after: str = "construction") -> None:
    """Raises `VerifyError` if a host program breaks a structural rule, in its ops or inside loops
    and branches.

    The message names the op, the rule, and `after`, the compiler pass after which the rule was
    broken. The types of tensors and the marked lines of the program follow. The rules:

    - Buffers: a tensor has one buffer. The buffer comes from an allocation, is part of another
      buffer, or belongs to the input that the tensor updates. A view has the dtype of its source. A
      tensor is used after its allocation and before its `Deallocate`.
    - Contents: a tensor is written before it is read. An op in a branch may also read a tensor that
      only an earlier iteration of the loop has written.
    - Deallocation: if any buffer is deallocated, every buffer that the caller does not own is
      deallocated exactly once. A loop deallocates only buffers that the loop allocates.
    - Communications: every communication has a later `Wait`. The buffers of the communication are
      not used before the `Wait`. All ranks of its team are in the meshes of the program.
    - Views of other ranks' shards: no rank writes a shard while a view shows the shard. The region
      that makes the view also deallocates the view.
    - Kernels: a launch names an existing kernel group and passes operands that fit the kernel.
    - Symbols: every symbol has its value from an input, or is the index of a loop around the op.
      The axes of tensors are well-formed.

    Waits between streams are checked by `hostir.analysis.races`.
    """
    try:
        checker = _Checker(program, Storage.of(program))
    except FuserError as error:
        raise _refusal(program, str(error), after, listing(program, ())) from None
    for i, op in enumerate(program.ops):
        try:
            checker.check(op)
        except FuserError as error:
            culprit = checker.at or op
            shown = marked(program, i, culprit)
            raise _refusal(program, str(error), after, shown, culprit) from None
    checker.at = None
    try:
        checker.finish()
    except FuserError as error:
        ops = () if checker.at is None else (checker.at,)
        raise _refusal(program, str(error), after, listing(program, ops)) from None


def _refusal(
    program: HostIrContainer, text: str, after: str, shown: str, culprit: Op | None = None
) -> VerifyError:
    """Returns the error for a broken rule: first a sentence in the user's terms, then details in
    terms of the program's text.

    `text` is the message of the rule, and `after` the compiler pass after which the rule was
    broken. `shown` has the marked lines of the program. `culprit` is the op that breaks the rule.
    """
    rule, _, details = text.partition("\n")
    if culprit is not None:
        rule = f"{_subject(culprit)}: {rule.removeprefix(f'{culprit.name}: ')}"
        rule += f", at {line_text(culprit, line_numbers(program))}"
    fusions = (*(g.fusion for g in program.groups.values()), *program.units.values())
    aliased = (tv for alias in program.aliases for tv in (alias.out, alias.into))
    tensors = (*program.tensors(), *aliased, *(tv for f in fusions for tv in f.tensors()))
    rule, in_ir = in_words(rule, tensors)
    below = [row for row in (*details.splitlines(), *in_ir) if row and row not in shown]
    found = "" if after == "construction" else f"; found after {after}"
    head = f"{rule[0].upper()}{rule[1:]}{found}"
    return VerifyError("\n".join((head, *(f"   {row}" for row in below), shown)))


def _subject(op: Op) -> str:
    """Returns the phrase that names an op at the beginning of a message, such as `The launch of
    kernel group 1`, `Op matmul` or `Wait`."""
    if isinstance(op, HostOp):
        return op.subject
    return f"Op {op.name}" if isinstance(op, TensorOp) else op.name


def marked(program: HostIrContainer, index: int, culprit: Op) -> str:
    """Returns the numbered lines of the program around its op at position `index`. An arrow `->`
    marks `culprit`.

    `culprit` is the op at `index`, or an op inside of it if the op at `index` is a loop or branch.
    """
    ops, numbers = program.ops, line_numbers(program)
    last = ops[min(index + 2, len(ops) - 1)]
    end = numbers[id(last)] + op_text(last).count("\n") + 1
    return listing(program, (culprit,), within=range(numbers[id(ops[max(index - 2, 0)])], end))


@dataclass
class _InFlight:
    """A communication that has started and for which no `Wait` has run yet. `reads` and `writes`
    are the tensors that it uses, so that other ops must not touch them.
    """

    op: Op
    reads: tuple[TensorView, ...]
    writes: tuple[TensorView, ...]
    # Whether the communication has started on every path to the current op.
    is_certain: bool = True


@dataclass
class _Steps:
    """The state in which any iteration of a loop may begin, also after earlier iterations: the
    buffers and communications that these may have left. The ops of the loop body are checked
    against this state.
    """

    # The tensors that the loop allocates, and the views that the loop makes.
    makes: set[TensorView]
    # The communications that earlier iterations of the loop may have started.
    numbers: set[int]
    # The owners of buffers that outlive an iteration. Earlier iterations may have written them.
    writes: set[TensorView]


@dataclass
class _Checker:
    """Checks the ops of one host program in order.

    The checker tracks, from op to op, which buffers exist, which have contents, and which
    communications have not ended.
    """

    program: HostIrContainer
    storage: Storage
    known: set[TensorView] = field(default_factory=set[TensorView])
    # The owners of buffers that have contents.
    written: set[TensorView] = field(default_factory=set[TensorView])
    freed: set[TensorView] = field(default_factory=set[TensorView])
    # The communications in flight, by number.
    in_flight: dict[int, _InFlight] = field(default_factory=dict[int, _InFlight])
    group: list[_InFlight] | None = None
    loops: list[_Steps] = field(default_factory=list["_Steps"])
    # Views of several ranks' shards that have no Deallocate yet, and those made in outer regions.
    views: dict[TensorView, Op] = field(default_factory=dict[TensorView, Op])
    outer_views: frozenset[TensorView] = frozenset()
    # The number of loops around the innermost branch. Some of their steps may not enter the branch.
    depth: int = 0
    is_branch: bool = False
    # The indices of the open loops.
    indices: list[Symbol] = field(default_factory=list[Symbol])
    seen: set[int] = field(default_factory=set[int])
    # The op that freed each buffer; shared by all branches.
    freed_at: dict[TensorView, Op] = field(default_factory=dict[TensorView, Op])
    at: Op | None = None

    def line(self, op: Op) -> str:
        """Returns the position of an op for a message: the line in `str(program)` and the line of
        the user's source."""
        return line_text(op, line_numbers(self.program))

    def __post_init__(self) -> None:
        inputs = {v for v in self.program.inputs if isinstance(v, TensorView)}
        self.known |= inputs
        self.written |= inputs
        self.bound = {s for v in self.program.inputs if isinstance(v, Scalar) for s in symbols(v)}
        self.bound |= {RANK, NUMBER_OF_STREAMS}
        for tv in inputs:
            self.bound |= {s for x in tv.shape() for s in symbols(x)}
        self.bound |= {s for s, _ in self.program.values.equal_extents()}
        self.names = {s.name for s in self.bound if isinstance(s, Symbol)}
        self.devices = self.program.devices()
        self.meshes = {tv.mesh for tv in self.program.tensors()}
        ops = list(walk(self.program.ops))
        self.loop_indices = {op.index for op in ops if isinstance(op, ForLoop)}
        # Names of other tensors with permuted axes.
        self.turned = {op.out for op in ops if isinstance(op, LoadStoreOp) and op.out.domain.root}
        started = Counter(op.number for op in ops if isinstance(op, StartsCommunication))
        self.twice = {number for number, count in started.items() if count > 1}
        # Names of streams that a Synchronize may wait for: captured or entered.
        named = (
            op.stream.name for op in ops if isinstance(op, GetCurrentStream | SetCurrentStream)
        )
        self.streams = {"Default", *named} - {""}
        self.awaited = {op.number for op in ops if isinstance(op, Wait)}

    def check(self, op: Op) -> None:
        """Checks one op against the state that the earlier ops left, and updates the state. Then
        checks the ops of the loop body or branches of `op`."""
        self.at = op
        if not isinstance(op, TensorOp | HostOp):
            raise VerifyError(
                "this op cannot be in a host program: expected a host op or a tensor op, got "
                f"{type(op).__name__}"
            )
        self._symbols(op)
        if isinstance(op, HostOp):
            op.verify_in(self)
        if isinstance(op, VIEW_OPS) and op.inp.dtype() is not op.out.dtype():
            raise VerifyError(
                f"{op.inp} and {op.out} must have one dtype, {_dtypes(op.inp, op.out)}"
            )
        effects = effects_of(op, self.storage.buffered)
        for effect in effects:
            APPLY[type(effect)](self, effect)
            if isinstance(effect, Starts):
                reads = tuple(e.tensor for e in effects if isinstance(e, Reads))
                writes = tuple(e.tensor for e in effects if isinstance(e, Writes))
                self._start(effect.number, _InFlight(op, reads, writes))
        op.verify()
        if op.outputs and op.outputs[0] in self.storage.views:
            self.views[op.outputs[0]] = op
        check_buffers(op, self.storage.buffered)
        if isinstance(op, HostOp):
            op.check_shapes({})
        else:
            check_results(op)
        self._memory_of_its_own(op, effects)
        self._present(op, effects)
        if isinstance(op, ForLoop):
            self._loop(op)
        elif isinstance(op, IfThenElse):
            self._branch(op)

    def _present(self, op: Op, effects: Sequence[Effect]) -> None:
        """Raises `VerifyError` if a rank has some, but not all, of the tensors that `op` uses. Such
        a rank could not run the op.

        Ops that start communications are exempt. Ops in branches are not checked, because only
        `hostir.analysis.races` knows which ranks reach them.
        """
        if self.is_branch or isinstance(op, StartsCommunication):
            return
        touched = [e.tensor for e in effects if isinstance(e, Reads | Writes)]
        meshed = ((tv, tv.mesh) for tv in touched if tv.mesh is not None)
        for (one, mine), (other, theirs) in pairwise(meshed):
            if mine == theirs:
                continue
            if ranks := {*mine.devices} ^ {*theirs.devices}:
                raise VerifyError(
                    f"the op uses {one} on {mine} and {other} on {theirs}, but only one of these "
                    f"tensors is on {ranks_text(sorted(ranks))}, and this op moves no data between "
                    "ranks"
                )

    def _memory_of_its_own(self, op: Op, effects: Sequence[Effect]) -> None:
        """Raises `VerifyError` in two cases: a result of `op` overlaps an operand in memory
        although the op cannot compute in place, or two results overlap each other.
        """
        for one, other in pairs(effects):
            a, b, is_read = one.tensor, other.tensor, isinstance(one, Reads)
            how = buffer_sharing_of(op) if is_read else "never"
            if how == "freely" or not self._is_same(a, b):
                continue
            if how != "same" or self._views(a) != self._views(b):
                raise VerifyError(words(op, a, b, is_read=is_read))

    def _views(self, tv: TensorView) -> list[TensorView]:
        """Follows `tv`, which may be a view of a view and so on, to its buffer. Returns those of
        the views on the way that permute axes.

        If two tensors in one buffer have equal lists, elements with the same index have the same
        address. An op may then compute one tensor in place of the other.
        """
        found: list[TensorView] = []
        while tv in self.storage.shows:
            if tv in self.turned:
                found.append(tv)
            tv = self.storage.shows[tv]
        return found

    def _symbols(self, op: Op) -> None:
        """Raises `VerifyError` if a symbol in the scalars or shapes of `op` has no value. An input
        of the program gives a symbol its value, or the symbol is the index of a loop.
        """
        for value in (*op.inputs, *op.scalars):
            if isinstance(value, Scalar):
                self._bound(symbols(value), self.indices)
            else:
                self._bound((s for x in value.shape() for s in symbols(x)), self.loop_indices)

    def _bound(self, found: Iterable[Symbol], indices: Collection[Symbol]) -> None:
        for symbol in found:
            if symbol in self.bound or symbol in indices:
                continue
            known = sorted({*self.names, *(i.name for i in indices)})
            near = get_close_matches(symbol.name, known, n=1)
            is_index = symbol.name in {i.name for i in self.loop_indices}
            outside = ", the index of a loop, outside of its loop" if is_index else ""
            advice = f"; did you mean {near[0]}?" if near else ""
            raise VerifyError(
                f"no input of the program defines the symbol {symbol}{outside}{advice}"
            )

    # ------------------------------------------------------------ regions
    def _loop(self, op: ForLoop) -> None:
        inside = list(walk(op.body))
        makes = {
            e.tensor
            for o in inside
            for e in effects_of(o, self.storage.buffered)
            if isinstance(e, Makes)
        } | {o for x in inside for o in x.outputs if o in self.storage.shows}
        numbers = {o.number for o in inside if isinstance(o, StartsCommunication)}
        writes = {
            self.storage.root(e.tensor)
            for o in inside
            for e in effects_of(o, self.storage.buffered)
            if isinstance(e, Writes)
        }
        if op.index.name in (*self.names, *(i.name for i in self.indices)):
            # In the program's text, the name would be ambiguous.
            raise VerifyError(
                f"the loop's index {op.index} has the name of an outer loop's index or of an "
                "input: choose another name"
            )
        self.indices.append(op.index)
        self.loops.append(_Steps(makes, numbers, writes - makes))
        group, outer, self.outer_views = self.group, self.outer_views, frozenset(self.views)
        for inner in op.body:
            self.check(inner)
        self._no_view_left()
        self.outer_views = outer
        if self.group is not group:
            self.at = op
            raise VerifyError(
                "a group of transfers must begin and end in the same loop iteration: put "
                "StartCoalescing and EndCoalescing into the same region"
            )
        self.indices.pop()
        self.loops.pop()

    def _branch(self, op: IfThenElse) -> None:
        ends: list[_Checker] = []
        for region in op.regions:
            branch = copy(self)
            branch.known, branch.written = set(self.known), set(self.written)
            branch.freed, branch.in_flight = set(self.freed), dict(self.in_flight)
            branch.depth, branch.is_branch = len(self.loops), True
            branch.views, branch.outer_views = dict(self.views), frozenset(self.views)
            for inner in region:
                self.at = inner
                branch.check(inner)
            branch._no_view_left()
            if branch.group is not self.group:
                self.at = op
                raise VerifyError(
                    "a group of transfers must begin and end in the same branch: put "
                    "StartCoalescing and EndCoalescing into the same region"
                )
            ends.append(branch)
        one, other = ends
        self.known = one.known & other.known
        # `hostir.analysis.races` follows each rank and step through its branch.
        self.written = one.written | other.written
        self.freed = one.freed | other.freed
        both = {**one.in_flight, **other.in_flight}
        self.in_flight = {
            n: communication
            if n in one.in_flight and n in other.in_flight
            else replace(communication, is_certain=False)
            for n, communication in both.items()
        }

    def _no_view_left(self) -> None:
        """Called at the end of a region (loop body, branch or program). Raises `VerifyError` if the
        region has made a view of other ranks' shards (parts of a tensor) and has not deallocated
        the view.
        """
        for view in self.views.keys() - self.outer_views:
            self.at = self.views[view]
            shown = f"{view} shows {self.storage.shows[view]} to other ranks"
            raise VerifyError(
                f"{shown}, and the region that makes the view must also deallocate it: Deallocate "
                f"{{ {view} }} is missing"
            )

    def finish(self) -> None:
        """Checks what depends on the whole program, after its last op: missing waits, unwritten
        outputs, in-place updates, axes, symbols, and buffers that are never freed."""
        if self.group is not None:
            raise VerifyError("a StartCoalescing has no EndCoalescing after it")
        self._no_view_left()
        for number, communication in self.in_flight.items():
            if communication.is_certain or number not in self.awaited:
                self.at = communication.op
                started = f"Communication {number}, started at {self.line(communication.op)}"
                raise VerifyError(f"{started}, has no Wait: append Wait({number})")
        for out in self.program.outputs:
            if out not in self.storage.buffered and out not in self.known:
                raise VerifyError(f"no op writes the output {out}")
            if self.storage.root(out) not in self.written and not only_allocates(self.program):
                raise VerifyError(f"no op writes the output {out}")
        for value in self.program.inputs:
            if isinstance(value, Scalar) and not isinstance(value, Symbol):
                raise VerifyError(
                    f"the input {value} is an expression, expected a tensor or a symbol"
                )
        for alias in self.program.aliases:
            if alias.into not in self.program.inputs:
                raise VerifyError(
                    f"{alias.out} is declared to update {alias.into} in place, but {alias.into} is "
                    "not an input of the program"
                )
            if alias.out not in self.program.outputs:
                raise VerifyError(
                    f"{alias.out} is declared to update {alias.into} in place, but is not an "
                    "output of the program"
                )
            if alias.out.dtype() is not alias.into.dtype():
                raise VerifyError(
                    f"{alias.out} updates {alias.into} in place, so both must have one dtype, "
                    f"{_dtypes(alias.out, alias.into)}"
                )
            if not self._is_updated(alias):
                raise VerifyError(
                    f"no op writes {alias.into}, which {alias.out} updates in place: {alias.out} "
                    f"has a separate buffer. Append a Set of {alias.out} into {alias.into}"
                )
        for tv in self.program.tensors():
            problem = tv.domain.problem
            if problem:
                raise VerifyError(f"the axes of {tv} are ill-formed\n{problem}")
        ops = tuple(walk(self.program.ops))
        used = list(program_symbols(self.program.values, self.program.tensors(), ops))
        for number, group in self.program.groups.items():
            _verify_fusion(group.fusion, f"kernel group {number}")
            found = program_symbols(group.fusion, group.fusion.tensors(), group.fusion.exprs)
            # The launch passes the inputs, under names of the program.
            used += (s for s in found if s not in group.fusion.inputs)
        for number, unit in self.program.units.items():
            _verify_fusion(unit, f"host unit {number}")
        self._bound(dict.fromkeys(used), self.loop_indices)
        if self.freed:
            owners = (t for t in self.storage.tensors if t not in self.storage.shows)
            kept = [t for t in owners if t in self.known and t not in self.freed]
            leaked = [t for t in kept if not self.storage.escapes(t)]
            if leaked:
                raise VerifyError(
                    "Memory leak detected in Host IR: the program frees other buffers, but has no "
                    "Deallocate of " + ", ".join(map(str, leaked))
                )

    def _is_updated(self, alias: Alias) -> bool:
        if self.storage.root(alias.out) is self.storage.root(alias.into):
            return True
        effects = (
            e for op in walk(self.program.ops) for e in effects_of(op, self.storage.buffered)
        )
        return any(
            isinstance(e, Writes) and self.storage.root(e.tensor) is alias.into for e in effects
        )

    # ------------------------------------------------------------ effects
    def _read(self, effect: Reads) -> None:
        tv = effect.tensor
        self._alive(tv)
        if tv not in self.known:
            raise VerifyError(f"{tv} is used before it is allocated")
        owner = self.storage.root(tv)
        # In a branch, an earlier step may have written it: `hostir.analysis.races` unrolls the
        # steps.
        carried = any(owner in loop.writes for loop in self.loops[: self.depth])
        if owner not in self.written and not carried:
            raise VerifyError(f"{tv} is read before it is written")
        self._not_in_flight(tv, is_write=False)

    def _write(self, effect: Writes) -> None:
        tv = effect.tensor
        self._alive(tv)
        if tv not in self.known:
            if self.storage.shown_by(tv) is None or tv in self.storage.named:
                raise VerifyError(f"{tv} is written before it is allocated")
            self.known.add(tv)  # an output that is written into an input in place
        self._not_in_flight(tv, is_write=True)
        self._not_in_view(tv, "written")
        self.written.add(self.storage.root(tv))

    def _makes(self, effect: Makes) -> None:
        tv = effect.tensor
        if tv in self.storage.named and tv in self.known:
            return self._write(Writes(tv)) if effect.is_filled else None
        if tv in self.known:
            raise VerifyError(f"{tv} already has a buffer, and cannot get a second one")
        self.known.add(tv)
        return self.written.add(tv) if effect.is_filled else None

    def _shows(self, effect: Shows) -> None:
        out, source = effect.out, effect.source
        self._alive(source)
        if source not in self.known:
            raise VerifyError(f"{source} is used before it is allocated")
        if self.storage.shown_by(out) is not source:
            others = {self.storage.shown_by(out), source} - {None}
            raise VerifyError(
                f"{out} is made a view of two different tensors: {', '.join(map(str, others))}"
            )
        if out.dtype() is not source.dtype():
            raise VerifyError(
                f"{out} is a view of {source}, so both must have one dtype, {_dtypes(out, source)}"
            )
        self.known.add(out)

    def _frees(self, effect: Frees) -> None:
        tv = effect.tensor
        if tv not in self.known:
            raise VerifyError(f"{tv} is deallocated, but was never allocated")
        if tv in self.freed:
            raise VerifyError(f"{tv} is deallocated twice, first at {self.line(self.freed_at[tv])}")
        if any(tv not in loop.makes for loop in self.loops):
            raise VerifyError(
                f"{tv} is deallocated in a loop, but was allocated outside of the loop"
            )
        if self.storage.escapes(tv):
            raise VerifyError(
                f"{tv} must not be deallocated, because it shares memory with an input or output: "
                "such memory belongs to the caller"
            )
        self._not_in_flight(tv, is_write=True)
        if tv in self.outer_views:
            raise VerifyError(
                f"{tv}, a view of several ranks' shards, must be deallocated in the loop or branch "
                "in which it was made"
            )
        if self.views.pop(tv, None) is None and tv not in self.storage.shows:
            self._not_in_view(tv, "deallocated")
        self.freed.add(tv)
        assert self.at is not None
        self.freed_at[tv] = self.at

    def _not_in_view(self, tv: TensorView, what: str) -> None:
        """Raises `VerifyError` if other ranks can read the buffer of `tv` while the current op
        runs, because a view shows the shards (parts of a tensor) of several ranks as one tensor.
        `what` is the word in the message for how the op uses `tv`, such as `written`.
        """
        for view, op in self.views.items():
            if self.storage.root(view) is self.storage.root(tv):
                shows = f"{view}, made at {self.line(op)}, shows it to other ranks"
                raise VerifyError(
                    f"{tv} is {what} while {shows}: append Deallocate {{ {view} }} before this op"
                )

    def _alive(self, tv: TensorView) -> None:
        shown: TensorView | None = tv
        while shown is not None:
            if shown in self.freed:
                via = "" if shown is tv else f", a view of {shown},"
                at = self.line(self.freed_at[shown])
                raise VerifyError(f"{tv}{via} is used after its Deallocate at {at}")
            shown = self.storage.shown_by(shown)

    def _not_in_flight(self, tv: TensorView, *, is_write: bool) -> None:
        """Raises `VerifyError` if a communication in flight (started, with no `Wait` so far) uses
        the buffer of `tv`, so that the current op must not use it.

        If `is_write` is False, the op reads `tv`, which conflicts only with a communication that
        writes the buffer. Communications that started in only one branch are not checked. Parts of
        one buffer are not compared, because `hostir.analysis.races` does so.
        """
        for number, communication in self.in_flight.items():
            busy = communication.writes
            if is_write:
                busy = (*busy, *communication.reads)
            if communication.is_certain and any(self._is_same(t, tv) for t in busy):
                started = f"started at {self.line(communication.op)}"
                if number in self.awaited:
                    what = (
                        f"{tv} is used before Wait(Communication {number}), but the communication, "
                        f"{started}, still uses it"
                    )
                else:
                    what = f"{tv} is used, but Communication {number}, {started}, has no Wait"
                raise VerifyError(what)

    def _is_same(self, a: TensorView, b: TensorView) -> bool:
        return self._whole(a) is self._whole(b)

    def _whole(self, tv: TensorView) -> TensorView:
        """Returns the tensor of which `tv` is a view of all elements, directly or through other
        views. Returns `tv` itself if `tv` is no view, or is a view of only a part of a tensor.
        """
        while tv in self.storage.shows and tv not in self.storage.parts:
            tv = self.storage.shows[tv]
        return tv

    def _start(self, number: int, communication: _InFlight) -> None:
        self.seen.add(number)
        if self.group is not None:
            self.group.append(communication)
        else:
            self.in_flight[number] = communication

    def _opens(self, effect: OpensGroup) -> None:
        if self.group is not None:
            raise VerifyError(
                "this group of transfers begins inside another one: append EndCoalescing before it"
            )
        self.group = []

    def _closes(self, effect: ClosesGroup) -> None:
        if self.group is None:
            raise VerifyError("there is no StartCoalescing before this EndCoalescing")
        assert self.at is not None
        backends = {getattr(f.op, "backend", ""): f.op for f in self.group}
        others = [(name, op) for name, op in backends.items() if name != PEER_COPIES]
        if others and len(others) < len(backends):
            other, copies = others[0], backends[PEER_COPIES]
            raise VerifyError(
                f"{copies.name} at {self.line(copies)} has backend={PEER_COPIES}, but "
                f"{other[1].name} at {self.line(other[1])}, in the same group, has "
                f"backend={other[0]}: either all transfers of a group have "
                f"backend={PEER_COPIES}, or none"
            )
        reads = tuple(t for f in self.group for t in f.reads)
        writes = tuple(t for f in self.group for t in f.writes)
        self.group = None
        self._start(effect.number, _InFlight(self.at, reads, writes))

    def _waits(self, effect: Waits) -> None:
        number = effect.number
        if self.in_flight.pop(number, None) is not None:
            return
        if any(number in loop.numbers for loop in self.loops):
            return  # it waits for the communication of the step before
        if number not in self.seen:
            raise VerifyError(
                f"no earlier op starts communication {number}, for which this op waits"
            )
        raise VerifyError(
            f"an earlier op already waits for communication {number}: remove this Wait"
        )

    def _nothing(self, effect: object) -> None:
        """Does nothing. It is the entry, in the table of handlers by effect, for effects on streams
        and others on which no structural rule depends.
        """

    # ------------------------------------------------------------ what ops are checked against
    def kernel(self, group: int) -> Fusion:
        """Returns the fusion that the kernel with the number `group` computes. Raises `VerifyError`
        if the program has no such kernel.
        """
        found = self.program.groups.get(group)
        if found is None:
            self.program.check_full()
            known = _numbers(self.program.groups, "kernel groups")
            raise VerifyError(f"the program has no kernel group {group}: {known}")
        return found.fusion

    def unit(self, number: int) -> Fusion:
        """Returns the fusion of the host unit (a separately compiled fusion) with this number.
        Raises `VerifyError` if the program has no such host unit.
        """
        found = self.program.units.get(number)
        if found is None:
            self.program.check_full()
            known = _numbers(self.program.units, "host units")
            raise VerifyError(f"the program has no HostUnit{number}: {known}")
        return found


def _dtypes(a: TensorView, b: TensorView) -> str:
    """Returns the part of a message that names the dtypes of two tensors."""
    return f"found {dtype_text(a.dtype())} and {dtype_text(b.dtype())}"


def _numbers(known: Iterable[int], what: str) -> str:
    """Returns the part of a message that lists the numbers of a program's kernels or of its host
    units (separately compiled fusions). `what` is "kernel groups" or "host units", and `known` are
    their numbers.
    """
    numbers = ", ".join(map(str, known))
    return f"its {what} are {numbers}" if numbers else f"it has no {what}"


def _verify_fusion(fusion: Fusion, which: str) -> None:
    try:
        verify_fusion(fusion)
    except VerifyError as error:
        raise VerifyError(f"the fusion of {which} is not well-formed\n{error}") from None


APPLY: dict[type, Callable[[_Checker, Any], None]] = {
    Captures: _Checker._nothing,  # pyright: ignore[reportPrivateUsage]
    ClosesGroup: _Checker._closes,  # pyright: ignore[reportPrivateUsage]
    Enters: _Checker._nothing,  # pyright: ignore[reportPrivateUsage]
    Frees: _Checker._frees,  # pyright: ignore[reportPrivateUsage]
    Joins: _Checker._nothing,  # pyright: ignore[reportPrivateUsage]
    Makes: _Checker._makes,  # pyright: ignore[reportPrivateUsage]
    OpensGroup: _Checker._opens,  # pyright: ignore[reportPrivateUsage]
    Reads: _Checker._read,  # pyright: ignore[reportPrivateUsage]
    Shows: _Checker._shows,  # pyright: ignore[reportPrivateUsage]
    Starts: _Checker._nothing,  # pyright: ignore[reportPrivateUsage]
    Waits: _Checker._waits,  # pyright: ignore[reportPrivateUsage]
    Writes: _Checker._write,  # pyright: ignore[reportPrivateUsage]
}
