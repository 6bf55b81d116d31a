"""Which op each step of a plan carries out: a recorder that also notes that."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from fuser.ir.fusion import TensorView
from fuser.ir.op import Op, op_text
from fuser.ir.scalar.constructors import Number, Symbol
from hostir.cost.report import spelled
from hostir.ir.diagnostics import Site, line_numbers
from hostir.ir.effects import CALLER, Stream, effects_of, is_computed
from hostir.ir.ops import (
    RANK,
    CollectivePermute,
    EndCoalescing,
    GetCurrentStream,
    P2PCommunication,
    SetCurrentStream,
    StartsCommunication,
    Wait,
)
from hostir.runtime.frame import Frame
from hostir.runtime.plan import Arenas, Plan
from hostir.runtime.recorder import Recorder
from hostir.runtime.steps import Action, Step, View

# "host": a step that gives a device nothing to do.
Kind = Literal["compute", "communication", "wait", "host"]


@dataclass(frozen=True)
class TracedOp:
    """What one step of a plan carries out: an op at one step of its loops, on a stream of the
    program (`hostir.analysis.unrolled_program` numbers streams alike)."""

    text: str
    name: str
    where: str
    tensors: tuple[str, ...]
    stream: int
    kind: Kind


class NotingRecorder(Recorder):
    """A recorder that also knows what its steps carry out: `ops[i]` belongs to `plan.steps[i]`."""

    def __init__(self, frame: Frame, free: frozenset[int]) -> None:
        super().__init__(frame, free)
        self.ops: list[TracedOp] = []
        self._lines = line_numbers(frame.program)
        self._current = CALLER
        # The transfers of the open group, and what communications move, by their numbers.
        self._halves_of: list[P2PCommunication] = []
        self._moved: dict[int, tuple[str, ...]] = {}
        self._named: dict[str, int] = {}
        self._unnamed: dict[object, int] = {}

    def record(self, op: Op) -> None:
        """Note what the op does, and for which op that is."""
        before = len(self._steps)
        super().record(op)
        made = len(self._steps) - before
        if isinstance(op, P2PCommunication) and not made:
            self._halves_of.append(op)
        if made:
            traced = self._traced(op, self._steps[-1][0])
            # What stands before the step itself only writes down that it comes.
            self.ops += [replace(traced, kind="host")] * (made - 1) + [traced]
        if isinstance(op, SetCurrentStream):
            self._current = self._number(op.stream)
        elif isinstance(op, GetCurrentStream):
            self._named[op.stream.name] = self._current

    def finish(self, outputs: list[TensorView], arenas: Arenas) -> Plan:
        """Return the plan; then `ops` has all of its steps."""
        plan = super().finish(outputs, arenas)
        # Also the making of buffers is a step here.
        makes = tuple((Action(make.run), None) for make in plan.made.values())
        plan = replace(plan, made={}, steps=(*makes, *plan.steps))
        recorded, behind = len(self.ops), len(self._steps) - len(self.ops)
        storage = self.frame.storage
        ends = [tv for tv in outputs if not self.frame.is_mine(tv) or tv in storage.borrowed]
        assert len(ends) == behind, f"{behind} steps behind the last op, for outputs {ends}"
        begins = len(plan.steps) - recorded - behind
        made = TracedOp("memory of the outputs", "", "", (), CALLER, "host")
        self.ops = [made] * begins + self.ops
        for tv in ends:
            kind: Kind = "compute" if self.frame.is_mine(tv) else "host"
            text = f"a copy of {tv.label}, as the output"
            self.ops.append(TracedOp(text, "", "", (tv.label,), CALLER, kind))
        return plan

    def values(self) -> dict[Symbol, Number]:
        """Return what this run's inputs and streams bind; not the rank."""
        return {s: v for s, v in self.frame.values.items() if s is not RANK}

    def stream_names(self) -> dict[int, str]:
        """Return the streams of the ops by number, as the program spells them."""
        numbers = dict.fromkeys(op.stream for op in self.ops if op.kind != "host")
        return {n: spelled(n, self._named, self._unnamed) for n in sorted(numbers)}

    def _number(self, stream: Stream) -> int:
        if stream.index is not None:
            return self.frame.integer(stream.index)
        if stream.name in self._named:
            return self._named[stream.name]
        if stream.name == "Default":
            return CALLER
        return self._unnamed.setdefault(stream.name, -2 - len(self._unnamed))

    def _traced(self, op: Op, step: Step) -> TracedOp:
        values = self.frame.values
        site = Site(op, tuple((index, values[index]) for index in self.frame.indices))
        return TracedOp(
            " ".join(op_text(op).split()),
            op.name,
            site.place(self._lines),
            self._tensors(op),
            self._current,
            self._kind(op, step),
        )

    def _kind(self, op: Op, step: Step) -> Kind:
        if isinstance(op, CollectivePermute):
            rank = self.machine.rank
            to = op.team.ranks(rank)[self.frame.integer(op.send_peer)]
            return "compute" if to == rank else "communication"
        if isinstance(op, StartsCommunication):
            return "communication"
        if isinstance(op, Wait):
            return "wait"
        is_work = is_computed(effects_of(op, self.frame.storage.buffered))
        return "compute" if is_work and not isinstance(step, View) else "host"

    def _tensors(self, op: Op) -> tuple[str, ...]:
        """Return what an op touches; for the end of a group, and a wait, what was moved."""
        touched = (v for v in (*op.outputs, *op.inputs) if isinstance(v, TensorView))
        found = tuple(dict.fromkeys(tv.label for tv in touched))
        if isinstance(op, EndCoalescing):
            found = tuple(half.buffer.label for half in self._halves_of)
            self._halves_of = []
        if isinstance(op, StartsCommunication):
            self._moved[op.number] = found
        return self._moved.get(op.number, ()) if isinstance(op, Wait) else found
