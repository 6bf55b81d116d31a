"""Records for each step of a plan which op the step carries out, so that measured times can be
reported by op. A plan is the list of recorded steps of a program, which later runs repeat."""

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

# "host": a step without work for a device.
Kind = Literal["compute", "communication", "wait", "host"]


@dataclass(frozen=True)
class TracedOp:
    """The op that one recorded step of a program carries out, in one iteration of the loops around
    the op.

    - `text`: the op as in the program's text; `name`: the name of the op alone.
    - `where`: the line of the program, with the values of loop indices.
    - `tensors`: the labels of the op's tensors, such as "T3".
    - `stream`: the stream on which the op runs: `Stream i` has the number i, and the caller's
      stream has -1.
    - `kind`: whether the op computes, communicates, waits for a communication, or only does work on
      the host.
    """

    text: str
    name: str
    where: str
    tensors: tuple[str, ...]
    stream: int
    kind: Kind


class OpNotes:
    """Collects, while the steps of a run are recorded, which op each step carries out. A step is a
    part of an op's work that later runs repeat; the list of all steps is the plan.

    `ops[i]` is the op of step `i` of the plan that `completed` returns. `frame` has the tensors and
    sizes of the recorded run.
    """

    def __init__(self, recorder: Recorder) -> None:
        recorder.listeners.append(self)
        self._recorder, self.frame = recorder, recorder.frame
        self.ops: list[TracedOp] = []
        self._lines = line_numbers(self.frame.program)
        self._streams = StreamNumbers(self.frame.integer)
        # The transfers of the open group; the tensors that each communication moves, by its number.
        self._halves_of: list[P2PCommunication] | None = None
        self._moved: dict[int, tuple[str, ...]] = {}

    def on_kept(self, op: Op, steps: Sequence[Step]) -> None:
        """Adds `op` to `ops`, once for each of `steps`, the parts of the op's work that have been
        recorded for later runs. `Recorder` calls this method after each op; see `Listener.on_kept`.
        """
        if isinstance(op, StartCoalescing):
            self._halves_of = []
        is_half = False
        if isinstance(op, P2PCommunication) and self._halves_of is not None:
            is_half = True
            self._halves_of.append(op)
        if steps:
            traced = self._traced(op, steps[-1])
            # Steps before the last one only dump a line about the op. The members of a group have
            # no other steps: `EndCoalescing` starts them.
            before = replace(traced, kind="host")
            self.ops += [before] * (len(steps) - 1) + [before if is_half else traced]
        if isinstance(op, SetCurrentStream):
            self._streams.enter(op.stream)
        elif isinstance(op, GetCurrentStream):
            self._streams.capture(op.stream)

    def completed(self, plan: Plan) -> Plan:
        """Returns the plan (the list of recorded steps) with one more step for each allocation of
        an output, so that the allocations are timed, too. Also completes `ops`, so that each step
        has an op.

        Some steps belong to no op of the program. These steps allocate outputs, or copy outputs
        after the last op.
        """
        makes = tuple((Action(make.run), None) for make in plan.made.values())
        after = len(plan.steps) - len(self.ops)
        plan = replace(plan, made={}, steps=(*makes, *plan.steps))
        storage = self.frame.storage
        ends = [
            tv
            for tv in self._recorder.outputs
            if not self.frame.is_mine(tv) or tv in storage.borrowed
        ]
        assert len(ends) == after, (
            f"{after} steps follow the last op, but outputs {ends} need {len(ends)}"
        )
        made = TracedOp("memory of the outputs", "", "", (), CALLER, "host")
        self.ops = [made] * len(makes) + self.ops
        for tv in ends:
            kind: Kind = "compute" if self.frame.is_mine(tv) else "host"
            text = f"a copy of {tv.label}, as the output"
            self.ops.append(TracedOp(text, "", "", (tv.label,), CALLER, kind))
        return plan

    def values(self) -> dict[Symbol, Number]:
        """Returns the values of the program's symbols in the recorded run, except the symbol of the
        rank. The prediction of a trace uses these values."""
        return {s: v for s, v in self.frame.values.items() if s is not RANK}

    def stream_names(self) -> dict[int, str]:
        """Returns the name of each stream on which an op computes, communicates or waits. A name is
        as in the program's text, such as `Stream 2`. The key is the number of the stream."""
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
        """Returns the labels of an op's tensors, such as "T3".

        The end of a group of transfers, and a `Wait`, have no tensors of their own. Their labels
        are those of the tensors that the communication moves.
        """
        touched = (v for v in (*op.outputs, *op.inputs) if isinstance(v, TensorView))
        found = tuple(dict.fromkeys(tv.label for tv in touched))
        if isinstance(op, EndCoalescing):
            found = tuple(half.buffer.label for half in self._halves_of or ())
            self._halves_of = None
        if isinstance(op, StartsCommunication):
            self._moved[op.number] = found
        return self._moved.get(op.number, ()) if isinstance(op, Wait) else found
