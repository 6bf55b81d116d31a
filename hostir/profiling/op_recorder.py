"""The op of each step of a plan, learned by listening to a recorder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fuser.ir.fusion import TensorView
from fuser.ir.op import Op, op_text
from fuser.ir.scalar.constructors import Number, Symbol
from hostir.analysis.walker import StreamNumbers
from hostir.cost.report import spelled
from hostir.ir.diagnostics import Site, line_numbers
from hostir.ir.effects import CALLER, effects_of, is_computed
from hostir.ir.ops import (
    RANK,
    CollectivePermute,
    EndCoalescing,
    GetCurrentStream,
    P2PCommunication,
    SetCurrentStream,
    StartCoalescing,
    StartsCommunication,
    Wait,
)
from hostir.runtime.plan import Plan
from hostir.runtime.recorder import Recorder
from hostir.runtime.steps import Action, Step, View

# "host": a step that gives a device nothing to do.
Kind = Literal["compute", "communication", "wait", "host"]


@dataclass(frozen=True)
class TracedOp:
    """The op that one step of a plan carries out, at one step of its loops, on a stream of the
    program (`hostir.analysis.unrolled_program` numbers streams alike)."""

    text: str
    name: str
    where: str
    tensors: tuple[str, ...]
    stream: int
    kind: Kind


class OpNotes:
    """Listens to a recorder, to know what its steps carry out: `ops[i]` belongs to the i-th step of
    the plan that `completed` returns."""

    def __init__(self, recorder: Recorder) -> None:
        recorder.listeners.append(self)
        self._recorder, self.frame = recorder, recorder.frame
        self.ops: list[TracedOp] = []
        self._lines = line_numbers(self.frame.program)
        self._streams = StreamNumbers(self.frame.integer)
        # The transfers of the open group, and what communications move, by their numbers.
        self._halves_of: list[P2PCommunication] | None = None
        self._moved: dict[int, tuple[str, ...]] = {}

    def on_kept(self, op: Op, steps: Sequence[Step]) -> None:
        """See `Listener.on_kept`."""
        if isinstance(op, StartCoalescing):
            self._halves_of = []
        is_half = False
        if isinstance(op, P2PCommunication) and self._halves_of is not None:
            is_half = True
            self._halves_of.append(op)
        if steps:
            traced = self._traced(op, steps[-1])
            # What stands before the step itself only writes down that it comes; of a member of a
            # group there is nothing else.
            before = replace(traced, kind="host")
            self.ops += [before] * (len(steps) - 1) + [before if is_half else traced]
        if isinstance(op, SetCurrentStream):
            self._streams.enter(op.stream)
        elif isinstance(op, GetCurrentStream):
            self._streams.capture(op.stream)

    def completed(self, plan: Plan) -> Plan:
        """Returns the plan with the making of buffers as steps; then `ops` has all of its steps."""
        makes = tuple((Action(make.run), None) for make in plan.made.values())
        behind = len(plan.steps) - len(self.ops)
        plan = replace(plan, made={}, steps=(*makes, *plan.steps))
        storage = self.frame.storage
        ends = [
            tv
            for tv in self._recorder.outputs
            if not self.frame.is_mine(tv) or tv in storage.borrowed
        ]
        assert len(ends) == behind, f"{behind} steps behind the last op, for outputs {ends}"
        made = TracedOp("memory of the outputs", "", "", (), CALLER, "host")
        self.ops = [made] * len(makes) + self.ops
        for tv in ends:
            kind: Kind = "compute" if self.frame.is_mine(tv) else "host"
            text = f"a copy of {tv.label}, as the output"
            self.ops.append(TracedOp(text, "", "", (tv.label,), CALLER, kind))
        return plan

    def values(self) -> dict[Symbol, Number]:
        """Returns what this run's inputs and streams bind; not the rank."""
        return {s: v for s, v in self.frame.values.items() if s is not RANK}

    def stream_names(self) -> dict[int, str]:
        """Returns the streams of the ops by number, as the program spells them."""
        numbers = dict.fromkeys(op.stream for op in self.ops if op.kind != "host")
        captured, others = self._streams.captured, self._streams.uncaptured
        return {n: spelled(n, captured, others) for n in sorted(numbers)}

    def _traced(self, op: Op, step: Step) -> TracedOp:
        values = self.frame.values
        site = Site(op, tuple((index, values[index]) for index in self.frame.indices))
        return TracedOp(
            " ".join(op_text(op).split()),
            op.name,
            site.place(self._lines),
            self._tensors(op),
            self._streams.current,
            self._kind(op, step),
        )

    def _kind(self, op: Op, step: Step) -> Kind:
        if isinstance(op, CollectivePermute):
            rank = self.frame.rank
            to = op.team.ranks(rank)[self.frame.integer(op.send_peer)]
            return "compute" if to == rank else "communication"
        if isinstance(op, StartsCommunication):
            return "communication"
        if isinstance(op, Wait):
            return "wait"
        is_work = is_computed(effects_of(op, self.frame.storage.buffered))
        return "compute" if is_work and not isinstance(step, View) else "host"

    def _tensors(self, op: Op) -> tuple[str, ...]:
        """Returns what an op touches; for the end of a group, and a wait, what was moved."""
        touched = (v for v in (*op.outputs, *op.inputs) if isinstance(v, TensorView))
        found = tuple(dict.fromkeys(tv.label for tv in touched))
        if isinstance(op, EndCoalescing):
            found = tuple(half.buffer.label for half in self._halves_of or ())
            self._halves_of = None
        if isinstance(op, StartsCommunication):
            self._moved[op.number] = found
        return self._moved.get(op.number, ()) if isinstance(op, Wait) else found
