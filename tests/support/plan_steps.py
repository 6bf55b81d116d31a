"""Derives the steps of a recorded plan from its host program, to check plans; prints plans.

`faults` unrolls a program for the values of one run: the ops that a rank executes, in order, and
the steps that each of them needs. It reports steps that a plan has twice, lacks, or has in another
place. Nothing of this uses the code that records plans.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from types import FunctionType
from typing import Any

from fuser.ir.fusion import TensorOp, TensorView
from fuser.ir.op import Op
from fuser.ir.ops import nodes
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.types import MemoryType
from fuser.support import options
from hostir.ir.buffer_aliasing import Storage
from hostir.ir.ops import (
    Allocate,
    CollectivePermute,
    Communication,
    Deallocate,
    EndCoalescing,
    ForLoop,
    GetCurrentStream,
    HirAliasSelect,
    IfThenElse,
    LaunchKernel,
    LocalSlice,
    P2PCommunication,
    PostOnStream,
    SetCurrentStream,
    ShardByStream,
    ShareMemHandles,
    StartCoalescing,
    StartsCommunication,
    SymmetricContiguousView,
    Synchronize,
    Wait,
)
from hostir.runtime.evaluator import ProgramEvaluator
from hostir.runtime.inputs import Values
from hostir.runtime.plan import Plan
from hostir.runtime.steps import Both, Make, Release, Step

# The texts of the steps that an op may need, one of them; "" where it may need none.
Kinds = tuple[str, ...]
ACTION: Kinds = ("Action",)
# Any step, of an op that is not known here.
ANY: Kinds = ("*",)
# The lines of the longest part of a text that is looked for again behind itself.
LONGEST = 64


@dataclass(frozen=True)
class Wanted:
    """A step that an op needs; without an op, a step that prepares outputs for the caller."""

    op: Op | None
    kinds: Kinds

    @property
    def is_optional(self) -> bool:
        return "" in self.kinds

    def is_met_by(self, step: Step) -> bool:
        return self.kinds == ANY or str(step) in self.kinds

    def __str__(self) -> str:
        kinds = " or ".join(kind or "nothing" for kind in self.kinds)
        return kinds if self.op is None else f"{self.op.name}: {kinds}"


# ------------------------------------------------------------------ what a program needs
class Unrolled:
    """The steps that a program needs in one run on one rank, in order."""

    def __init__(self, plan: Plan, values: Values, rank: int) -> None:
        """Unrolls the program of a plan; `values` has the values of all symbols."""
        self._program = plan.program
        self._storage = Storage.of(plan.program)
        self._values, self._rank = values, rank
        # Each start of a communication has a step before it that writes a line.
        ranks = options.dump_ranks()
        is_shown = options.dump_enabled("communication") and (ranks is None or rank in ranks)
        self._is_announced = is_shown
        self.wanted: list[Wanted] = []
        # The buffers that no step makes, and how many of these end in the run.
        self.made_before: list[TensorView] = []
        self.ending = 0
        self._is_made_before: dict[TensorView, bool] = {}
        self._loops = 0
        # None is the stream on which the run begins.
        self._stream: object = None
        self._captured: dict[str, object] = {}
        self._started: set[int] = set()
        self._group: list[int] | None = None
        self._walk(self._program.ops)
        self.copies = self._outputs()

    def _outputs(self) -> set[TensorView]:
        """Adds the steps after the ops; returns the outputs of which the caller gets a copy."""
        copies = set[TensorView]()
        into = {a.out: a.into for a in self._program.aliases if a.out not in self._program.inputs}
        hidden = {a.out for a in self._program.aliases if a.hidden}
        for tv in (into.get(o, o) for o in self._program.outputs if o not in hidden):
            if not self._is_mine(tv):
                self.wanted.append(Wanted(None, ACTION))
            elif tv in self._storage.borrowed:
                self.wanted.append(Wanted(None, ACTION))
                copies.add(tv)
        return copies

    def _is_mine(self, tv: TensorView) -> bool:
        return tv.mesh is None or tv.mesh.has(self._rank)

    def _number(self, x: Scalar) -> int:
        return int(sc.evaluate(x, self._values))

    def _walk(self, ops: Sequence[Op]) -> None:
        for op in ops:
            tensors = [v for v in (*op.inputs, *op.outputs) if isinstance(v, TensorView)]
            if tensors and not any(map(self._is_mine, tensors)):
                continue
            if isinstance(op, ForLoop):
                self._loop(op)
            elif isinstance(op, IfThenElse):
                self._walk(op.then if sc.evaluate(op.predicate, self._values) else op.orelse)
            else:
                self._add(op, bool(tensors))

    def _loop(self, op: ForLoop) -> None:
        outside = self._values
        self._loops += 1
        for i in range(*map(self._number, (op.start, op.stop, op.step))):
            self._values = {**outside, op.index: i}
            self._walk(op.body)
        self._loops -= 1
        self._values = outside

    def _add(self, op: Op, has_tensors: bool) -> None:
        kinds = NEEDS.get(type(op), Unrolled._computes)(self, op)
        is_member = isinstance(op, P2PCommunication)
        is_posted = isinstance(op, StartsCommunication) and has_tensors and (kinds or is_member)
        if self._is_announced and is_posted:
            self.wanted.append(Wanted(op, ACTION))
        if kinds:
            self.wanted.append(Wanted(op, kinds))

    # -------------------------------------------------------------- kinds of ops
    def _nothing(self, op: Op) -> Kinds:
        return ()

    def _action(self, op: Op) -> Kinds:
        return ACTION

    def _view(self, op: Op) -> Kinds:
        return ("View",)

    def _computes(self, op: Op) -> Kinds:
        if not isinstance(op, TensorOp):
            return ANY
        if not all(out in self._storage.buffered for out in op.outputs):
            return ("View", "Action")
        product = (f"Multiply of {len(op.inputs) + 1}",)
        return (*product, *ACTION) if isinstance(op, nodes.Contraction) else ACTION

    def _launch(self, op: LaunchKernel) -> Kinds:
        operands = [v for v in (*op.ins, *op.outs) if isinstance(v, TensorView)]
        return (f"Launch of {len(operands)}", *ACTION)

    def _allocate(self, op: Allocate) -> Kinds:
        tv = op.buffer
        clear: Kinds = ACTION if op.zero_init else ()
        if tv in self._storage.named:
            return clear
        is_mapped = tv.memory is MemoryType.symmetric
        is_shown = is_mapped and tv in self._storage.shown
        is_before = not (is_mapped or self._loops or self._stream is not None)
        self._is_made_before[tv] = is_before
        if is_before:
            self.made_before.append(tv)
            return clear
        make = "Action" if is_shown else "Make"
        return (" + ".join((make, *clear)),)

    def _deallocate(self, op: Deallocate) -> Kinds:
        if op.buffer in self._storage.views:
            return ("Action + Release",)
        if not self._is_made_before.get(op.buffer):
            return ("Release",)
        # None where the buffer has a place in the arena.
        self.ending += 1
        return ("Release", "")

    def _symmetric_view(self, op: SymmetricContiguousView) -> Kinds:
        return ("View",) if op.team is None else ACTION

    def _enter_stream(self, op: SetCurrentStream) -> Kinds:
        stream = op.stream
        named = stream.index is None and stream.name in self._captured
        self._stream = self._captured[stream.name] if named else stream
        return ACTION

    def _capture_stream(self, op: GetCurrentStream) -> Kinds:
        self._captured[op.stream.name] = self._stream
        return ACTION

    # -------------------------------------------------------------- communications
    def _starts(self, number: int, *kinds: str) -> Kinds:
        """Adds the start of a communication, and marks its place if the program switches
        streams.
        """
        self._started.add(number)
        mark = " + Action" if self._storage.switches_streams else ""
        return tuple(kind + mark for kind in kinds)

    def _communicate(self, op: Communication) -> Kinds:
        if not op.team.ranks(self._rank):
            return ()
        shards = self._is_mine(op.inp) + self._is_mine(op.out)
        return self._starts(op.number, f"Collective of {shards}", "Action")

    def _permute(self, op: CollectivePermute) -> Kinds:
        if not op.team.ranks(self._rank):
            return ()
        return self._starts(op.number, "Exchange of 2", "Action of 2")

    def _transfer(self, op: P2PCommunication) -> Kinds:
        if self._group is None:
            return self._starts(op.number, "Exchange of 1", "Action of 1")
        self._group.append(op.number)
        return ()

    def _open_group(self, op: StartCoalescing) -> Kinds:
        self._group = []
        return ()

    def _close_group(self, op: EndCoalescing) -> Kinds:
        assert self._group is not None
        members, self._group = self._group, None
        self._started.update(members)
        n = len(members)
        return self._starts(op.number, f"Exchange of {n}", f"Action of {n}")

    def _wait(self, op: Wait) -> Kinds:
        return ACTION if op.number in self._started else ()


NEEDS: dict[type[Op], Callable[[Unrolled, Any], Kinds]] = {
    Allocate: Unrolled._allocate,
    CollectivePermute: Unrolled._permute,
    Communication: Unrolled._communicate,
    Deallocate: Unrolled._deallocate,
    EndCoalescing: Unrolled._close_group,
    GetCurrentStream: Unrolled._capture_stream,
    HirAliasSelect: Unrolled._view,
    LaunchKernel: Unrolled._launch,
    LocalSlice: Unrolled._action,
    P2PCommunication: Unrolled._transfer,
    PostOnStream: Unrolled._action,
    SetCurrentStream: Unrolled._enter_stream,
    ShardByStream: Unrolled._view,
    ShareMemHandles: Unrolled._nothing,
    StartCoalescing: Unrolled._open_group,
    SymmetricContiguousView: Unrolled._symmetric_view,
    Synchronize: Unrolled._action,
    Wait: Unrolled._wait,
}


# ------------------------------------------------------------------ comparison
def values_of(evaluator: ProgramEvaluator, inputs: Sequence[Any]) -> tuple[Values, int]:
    """Returns the symbols' values in a run, and the rank."""
    bound = evaluator.binder._inputs.values(inputs)
    return {**bound, **evaluator.binder.own}, evaluator.ranks.rank


def faults(plan: Plan, values: Values, rank: int) -> list[str]:
    """Returns the differences between a plan and what its program needs on a rank: [] if none.

    `values` has the values of all symbols in the run that recorded the plan.
    """
    needed = Unrolled(plan, values, rank)
    steps, lines = list(plan.steps), plan.describe()
    released: list[Step] = []
    at = 0
    for wanted in needed.wanted:
        step, op = steps[at] if at < len(steps) else (None, None)
        if step is not None and op is wanted.op and wanted.is_met_by(step):
            at += 1
            if wanted.is_optional:
                released.append(step)
        elif not wanted.is_optional:
            found = lines[at] if at < len(steps) else "the end"
            before = f", behind {lines[at - 1]}" if at else ""
            return [f"step {at}{before}: expected {wanted}, found {found}"]
    if at < len(steps):
        return [f"step {at}: expected the end, found {lines[at]}"]
    return _buffer_faults(plan, needed, released)


def _buffer_faults(plan: Plan, needed: Unrolled, released: Sequence[Step]) -> list[str]:
    """Compares how many buffers end in the run, and how many outlive it, with the program."""
    in_steps = {s.slot for step, _ in plan.steps for s in _parts(step) if isinstance(s, Make)}
    in_arena = {block.slot for block in plan.blocks} - in_steps
    let_go = {s.slot for step in released for s in _parts(step) if isinstance(s, Release)}
    ended, wanted = len(in_arena | let_go), needed.ending
    lasting = len(plan.made) - len(needed.copies)
    outlive = len(needed.made_before) - wanted
    wrong: list[str] = []
    if ended != wanted:
        wrong.append(f"{wanted} buffers end in the run, {ended} in the arena or by a step")
    if lasting != outlive:
        wrong.append(f"{outlive} buffers outlive the run, {lasting} are made for it")
    return wrong


def _parts(step: Step) -> Iterator[Step]:
    if isinstance(step, Both):
        yield from _parts(step.first)
        yield from _parts(step.second)
    else:
        yield step


# ------------------------------------------------------------------ watching
@contextmanager
def watched_plans(
    note: Callable[[ProgramEvaluator, Plan, Sequence[Any]], None],
) -> Generator[None]:
    """Calls `note` with each newly recorded plan, its evaluator, and the inputs of that run."""
    run = ProgramEvaluator._run
    told = weakref.WeakSet[Any]()

    def watched(self: Any, inputs: Any, known: Any, plan: Any) -> Any:
        outputs = run(self, inputs, known, plan)
        for made in [] if plan is not None else [*known.plans.values()]:
            if made not in told:
                told.add(made)
                note(self, made, inputs)
        return outputs

    ProgramEvaluator._run = as_product_code(watched)
    yield
    ProgramEvaluator._run = run


def as_product_code(function: Any) -> Any:
    """Returns the function as if it belonged to our packages, so that errors name a test's
    line.
    """
    names = {**function.__globals__, "__name__": "fuser.watched_by_tests"}
    return FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )


# ------------------------------------------------------------------ text
def text_of(plan: Plan) -> str:
    """Returns the steps of a plan as lines of text; repeated lines are written once with a
    count.
    """
    buffers = f"{len(plan.made)} buffer(s) outlive a run, {len(plan.blocks)} in the arena"
    return "\n".join([buffers, *compressed(plan.describe())])


def compressed(lines: Sequence[str]) -> list[str]:
    """Returns lines in which a repeated part is written once: `3 x`, or in brackets."""
    made: list[str] = []
    at = 0
    while at < len(lines):
        longest = min((len(lines) - at) // 2, LONGEST)
        tried = (_repeats(lines, at, period) for period in range(1, 1 + longest))
        saved, shortness, times = max(tried, default=(0, -1, 1))
        period = -shortness
        if saved <= 0:
            made.append(lines[at])
            at += 1
            continue
        part = lines[at : at + period]
        inner = compressed(part)
        if len(inner) == 1:
            made.append(f"{times} x {inner[0]}")
        else:
            made += [f"{times} x (", *(f"  {line}" for line in inner), ")"]
        at += times * period
    return made


def _repeats(lines: Sequence[str], at: int, period: int) -> tuple[int, int, int]:
    """Returns how many lines a bracket around `period` lines saves, then -period, and the
    count.
    """
    part, times = lines[at : at + period], 1
    while lines[at + times * period : at + (times + 1) * period] == part:
        times += 1
    saved = (times - 1) * period - (2 if period > 1 else 0)
    return max(saved, 0), -period, times


def by_rank(texts: dict[int, list[str]]) -> str:
    """Returns the texts of the plans of all ranks, in order; equal texts are written once."""
    ordered = sorted(texts.items(), key=lambda item: (item[1], item[0]))
    groups = [(t, [r for r, _ in some]) for t, some in groupby(ordered, key=lambda item: item[1])]
    parts: list[str] = []
    for plans, ranks in sorted(groups, key=lambda group: group[1]):
        if len(groups) > 1:
            parts.append(f"-- rank {' '.join(map(str, ranks))}")
        for number, plan in enumerate(plans):
            parts.append(plan if len(plans) == 1 else f"-- plan {number}\n{plan}")
    return "\n".join(parts) + "\n"
