"""Explains why a tensor is sharded and why it is communicated: the command `python -m hostir why T7
FILE`.

The command prints the annotation from which a sharding was propagated, and the op that made a
communication necessary. Two lines of output, for example:

    T7 is cut by mesh_x on axis 1: from T3 (forward through linear at mlp.py:12), annotated by the
    user at mlp.py:9
    Communication 0 (Allgather of T7 -> T8): because linear at mlp.py:14 takes T8 whole along axis
    0, and T7 is cut by mesh_x on axis 0 (annotated by the user at mlp.py:9)

With a prediction, more lines follow for each communication: its placements before and after, the
user's annotations from which they came, the bytes that a rank sends and the time, and the cheapest
other sequence of steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from fuser.ir.fusion import TensorView
from fuser.ir.op import Op, walk
from fuser.ir.provenance import Origin
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.types import ParallelType
from fuser.support.errors import InputError, UnsupportedError
from hostir.analysis.sliced_inputs import sliced_inputs
from hostir.cost.report import CommunicationCost, Prediction, along_text, ms, size_text
from hostir.ir.diagnostics import line_numbers
from hostir.ir.effects import Shows
from hostir.ir.ops import (
    Communication,
    EndCoalescing,
    HostOp,
    LaunchKernel,
    LocalSlice,
    P2PCommunication,
    StartCoalescing,
)
from hostir.ir.program import HostIrContainer
from hostir.tools.alternatives import alternative_words, stage_of, summed_by
from multidevice.sharding.placement import SPREAD_TYPES
from multidevice.sharding.queries import sharded_logical_axis
from multidevice.sharding.redistribution import SumStage

# Parallel type -> the position of the axis that it cuts.
Cuts = dict[ParallelType, int]
UNKNOWN = (
    "the text does not say where shardings came from: a dump of a compiled program "
    "(FUSER_DUMP=host_ir) has a Provenance section; a program that was built by hand has none"
)
_DIRECTIONS = {"forward": "forward", "backward": "backward", "beside": "beside another result"}


def explain(program: HostIrContainer, name: str, prediction: Prediction | None = None) -> list[str]:
    """Returns lines of text that explain why a tensor of `program` is sharded, and why the tensor
    is communicated.

    `name` is the name of the tensor, such as `T7`, or `all` for every communication of the program.
    If `prediction` has the costs of the program, indented lines about the placements and the cost
    follow for each communication. If each call must cut this rank's shard out of an input, a
    further line says so.

    Raises:
        InputError: the program has no such tensor.
    """
    why = _Why(program, prediction)
    if name == "all":
        return [*why.communications(None), *sliced_inputs(program)]
    number = name.removeprefix("T").partition("_")[0]
    known = {tv.number: tv for tv in program.tensors()}
    if not (number.isascii() and number.isdigit() and int(number) in known):
        names = ", ".join(f"T{n}" for n in sorted(known))
        raise InputError(f"the program has no tensor {name!r}: expected 'all' or one of {names}")
    tv = known[int(number)]
    sliced = (line for line in sliced_inputs(program) if line.startswith(f"T{tv.number}, "))
    return [*why.tensor(tv), *why.communications(tv), *sliced]


@dataclass
class _Why:
    """Explains the shardings of tensors in one host program, from the Provenance section of the
    program's text.

    `rows` has the rows of that section by tensor number. A row says from which tensor or annotation
    a sharding was propagated, and through which op.
    """

    program: HostIrContainer
    prediction: Prediction | None = None
    rows: dict[int, list[Origin]] = field(default_factory=dict[int, list[Origin]])
    tensors: dict[int, TensorView] = field(default_factory=dict[int, TensorView])
    # The number of a slice or view -> the tensor of which it is a part.
    shown: dict[int, TensorView] = field(default_factory=dict[int, TensorView])
    # The transfers of each group that has sends and receives, and last all other transfers.
    groups: list[list[P2PCommunication]] = field(default_factory=list["list[P2PCommunication]"])
    # The costs of communications by their line, those of the rank that sends most.
    costs: dict[int, CommunicationCost] = field(default_factory=dict[int, CommunicationCost])
    lines: dict[int, int] = field(default_factory=dict[int, int])

    def __post_init__(self) -> None:
        for row in self.program.values.origins:
            self.rows.setdefault(row.tensor, []).append(row)
        self.tensors = {tv.number: tv for tv in self.program.tensors()}
        alone: list[P2PCommunication] = []
        current = alone
        for op in walk(self.program.ops):
            for effect in op.effects() if isinstance(op, HostOp) else ():
                if isinstance(effect, Shows) and effect.out.number not in self.rows:
                    self.shown[effect.out.number] = effect.source
            if isinstance(op, P2PCommunication):
                current.append(op)
            elif isinstance(op, StartCoalescing):
                current = []
            elif isinstance(op, EndCoalescing):
                has_both = {t.type for t in current} == {"send", "recv"}
                self.groups += [current] if has_both else []
                alone += [] if has_both else current
                current = alone
        self.groups.append(alone)
        if self.prediction is not None:
            self.lines = line_numbers(self.program)
            costs = [c for one in self.prediction.classes for c in one.communications]
            self.costs = {c.line: c for c in sorted(costs, key=lambda c: c.sent_nbytes)}

    # ------------------------------------------------------------ tensors
    def tensor(self, tv: TensorView) -> list[str]:
        """Returns a line of explanation for each sharded axis of `tv`. If no axis is sharded,
        returns a line about the tensor's mesh."""
        base = self.base(tv)
        if base.mesh is None and not self.cuts(base):
            return [f"T{tv.number} has no mesh: no annotation reaches it"]
        part = "" if base is tv else f"T{tv.number} is a part of T{base.number}. "
        if base.number not in self.rows:
            return [f"{part}T{base.number} is {self.placement(base)}; {self.unknown(base)}"]
        cuts = self.cuts(base)
        lines = [
            f"{part}T{base.number} is cut by {p.name} on axis {axis}: {self.origin(base.number, p)}"
            for p, axis in cuts.items()
        ]
        if not lines:
            whole = f"{part}T{base.number} is whole on {base.mesh}"
            lines.append(f"{whole}: {self.origin(base.number, None)}")
        for row in self.summed(base.number):
            if row.ptype is not None:
                does = "is looked up along" if row.how == "lookup" else "sums over"
                over = f"T{base.number} {does} an axis that {row.ptype.name} cuts"
                lines.append(f"{part}{over}: {self.chain(row, row.ptype)}")
        return lines

    def base(self, tv: TensorView) -> TensorView:
        """Returns the tensor of which `tv` is a slice or view. Returns `tv` itself if `tv` is
        neither."""
        while tv.number in self.shown:
            tv = self.shown[tv.number]
        return tv

    def unknown(self, tv: TensorView) -> str:
        """Returns the text that says why the sharding of `tv` cannot be explained: the program's
        text has no row about this tensor in its Provenance section, which lists the origins of
        shardings."""
        return f"its Provenance section has no row of T{tv.number}" if self.rows else UNKNOWN

    def cuts(self, tv: TensorView) -> Cuts:
        """Maps each mesh dimension or stream that splits an axis of `tv` to the position of this
        axis."""
        try:
            found = {p: sharded_logical_axis(tv, p) for p in SPREAD_TYPES}
        except UnsupportedError:
            return {}  # a part of a tensor inside a loop
        return {p: axis for p, axis in found.items() if axis >= 0}

    def placement(self, tv: TensorView) -> str:
        """Returns a text about which axes of `tv` are sharded, such as `cut by mesh_x on axis 1`.
        The text is `whole` if no axis is sharded."""
        cuts = self.cuts(tv)
        return " and ".join(f"cut by {p.name} on axis {a}" for p, a in cuts.items()) or "whole"

    # ------------------------------------------------------------ chains
    def origin(self, number: int, ptype: ParallelType | None) -> str:
        """Returns a text about the origin of a sharding of the tensor `number`: the propagations
        back to the user's annotation.

        `ptype` is the mesh dimension or stream that splits an axis. If `ptype` is None, the text is
        about the tensor's mesh.
        """
        row = self.row(number, ptype)
        return "it came with the program" if row is None else self.chain(row, ptype)

    def row(self, number: int, ptype: ParallelType | None) -> Origin | None:
        """Returns the row of the program's Provenance section that says where a sharding of the
        tensor `number` came from.

        `ptype` is the mesh dimension or stream that splits an axis. If `ptype` is None, the row is
        about the tensor's mesh. If there is no such row, the row about the whole placement of the
        tensor is returned. The result is None if the tensor has no such row either.
        """
        rows = self.rows.get(number, [])
        placed = [r for r in rows if r.what == "placement"]
        if ptype is None:
            ranked = [*(r for r in rows if r.what == "mesh"), *placed, *rows]
        else:
            cuts = [r for r in rows if r.ptype is ptype]
            ranked = [*(r for r in cuts if r.axis is not None), *cuts, *placed]
        return next(iter(ranked), None)

    def chain(self, row: Origin, ptype: ParallelType | None) -> str:
        """Returns a text that lists the propagations of a sharding, back to the user's annotation.

        `row`, of the program's Provenance section, says where the sharding came from. `ptype` is
        the mesh dimension or stream that splits the axis; None stands for the tensor's mesh.
        """
        return ", ".join(map(self.step, self.path(row, ptype)))

    def path(self, row: Origin, ptype: ParallelType | None) -> list[Origin]:
        """Returns the rows of the Provenance section from `row` back to the user's annotation.

        The arguments are those of `chain`.
        """
        path: dict[Origin, None] = {}
        at: Origin | None = row
        while at is not None and at not in path:
            path[at] = None
            if at.how in ("user", "only"):
                break
            at = self.next_row(at, ptype)
        return list(path)

    def next_row(self, row: Origin, ptype: ParallelType | None) -> Origin | None:
        """Returns the row of the program's Provenance section from which the sharding in `row` was
        propagated. The returned row is one op closer to the user's annotation. Returns None if
        there is no such row, because the sharding was not propagated from another tensor.

        `ptype` is the mesh dimension or stream that splits the axis; None stands for the tensor's
        mesh.
        """
        if row.how == "operand" and ptype is not None and row.result is not None:
            return self.row(row.result, ptype)
        if row.source is None:
            return None
        # A sum and its parts have the device axis of the axis that is summed over.
        number = {"sum": row.tensor, "parts": row.source}.get(row.how)
        if number is not None:
            types = (ptype, None) if row.how == "sum" else (ptype,)
            summed = (r for r in self.summed(number) if None in types or r.ptype in types)
            if (found := next(summed, None)) is not None:
                return found
        return None if row.how == "sum" else self.row(row.source, ptype)

    def summed(self, number: int) -> list[Origin]:
        """Returns the rows of the program's Provenance section about axes that devices split and
        over which an op summed. The tensor `number` is the sum, so it no longer has these axes."""
        return [r for r in self.rows.get(number, []) if r.what == "cut" and r.axis is None]

    def step(self, row: Origin) -> str:
        """Returns the text of one propagation: the tensor from which a sharding came, and the op.

        `row`, of the program's Provenance section, describes the propagation.
        """
        through = f"{row.op or 'an op'}{_at(row.where)}"
        source = f"T{row.source}"
        match row.how:
            case "user":
                return f"annotated by the user{_at(row.where)}"
            case "only":
                return "no annotation reaches it, and there is one mesh"
            case "forward" | "backward" | "beside":
                return f"from {source} ({_DIRECTIONS[row.how]} through {through})"
            case "lookup":
                return f"from {source} (in the parts of which {through} looks up)"
            case "operand":
                result = "" if row.result is None else f" for T{row.result}"
                return f"a copy of {source}, as {through} takes it{result}"
            case "result":
                return f"a copy of {source}, which {through} computes"
            case "set":
                return f"a copy of {source} that the user wrote{_at(row.where)}"
            case "sum":
                return f"the sum of {source}, of which {through} computes a part on each device"
            case "parts":
                return f"the parts of the sum {source}, which {through} computes"
            case "update":
                return f"written into {source}"
            case "local":
                return (
                    f"from {source} (locally, by {through})" if row.source is not None else through
                )

    # ------------------------------------------------------------ communications
    def communications(self, tv: TensorView | None) -> list[str]:
        """Returns a line of explanation for each communication or local slice that has `tv` as its
        operand or result.

        If `tv` is None, returns the lines for all communications of the program.
        """
        base = None if tv is None else self.base(tv)
        lines: dict[str, list[str]] = {}
        for op in walk(self.program.ops):
            ends = self.ends(op)
            if ends is not None and (base is None or base in map(self.base, ends)):
                inp, out = map(self.base, ends)
                line = self.communication(op, inp, out)
                if line not in lines:
                    lines[line] = self.details(op, inp, out) if self.prediction else []
        return [text for line, details in lines.items() for text in (line, *details)]

    def details(self, op: Op, inp: TensorView, out: TensorView) -> list[str]:
        """Returns the indented lines about a communication from `inp` to `out`: its placements, the
        user's annotations and the cost.
        """
        texts = {
            "placement": change_words(op, *self.as_written(inp, out)),
            "annotated": ", ".join(self.annotations(inp, out)),
            "cost": self.cost(op),
            "instead": self.instead(op, inp, out),
        }
        return [f"  {name}: {text}" for name, text in texts.items() if text]

    def annotations(self, inp: TensorView, out: TensorView) -> list[str]:
        """Returns the user's source lines from which the placements before and after a
        communication came.
        """
        before, after = self.cuts(inp), self.cuts(out)
        pairs = [(inp, p) for p, axis in before.items() if after.get(p) != axis]
        pairs += [(out, p) for p, axis in after.items() if before.get(p) != axis]
        if inp.mesh != out.mesh:
            pairs += [(inp, p) for p in before]
        rows = [(self.row(tv.number, p), p) for tv, p in pairs]
        paths = [self.path(row, p) for row, p in rows if row is not None]
        found = [row for path in (*paths, self.wanted(out)) for row in path]
        return list(dict.fromkeys(r.where for r in found if r.how == "user"))

    def wanted(self, out: TensorView) -> list[Origin]:
        """Returns the rows of the Provenance section about the user's annotation of `out`.

        A communication in several steps has intermediate results. If `out` is one of them, returns
        the rows about the user's annotation of the final tensor. Returns [] if the user annotated
        neither.
        """
        seen: set[int] = set()
        number: int | None = out.number
        while number is not None and number not in seen:
            seen.add(number)
            if rows := [r for r in self.rows.get(number, []) if r.how == "user"]:
                return rows
            number = next(
                (
                    r.tensor
                    for rows in self.rows.values()
                    for r in rows
                    if r.source == number and r.what == "placement" and r.how in ("result", "set")
                ),
                None,
            )
        return []

    def as_written(self, inp: TensorView, out: TensorView) -> tuple[TensorView, TensorView]:
        """Returns the tensors of the user's program between which a communication changes the
        placement.

        In place of a tensor, a communication may move a view of it: for example [2, 4, 16] for
        blocks of a tensor [8, 16]. The result then has the tensors of which `inp` and `out` are
        views. Returns `inp` and `out` themselves if they are not such views.
        """
        source, row, first = inp, self.row(out.number, None), self.row(inp.number, None)
        for made in self.path(first, None) if first is not None else ():
            if made.how != "local" or made.op not in ("set", "reshape"):
                break
            source = self.tensors.get(made.source or 0, source)
        result = self.result_of(row) if row is not None and row.op == "reshape" else None
        if result is None or result.number not in self.tensors:
            return inp, out
        shapes = [[tv.fusion.canonical(x) for x in tv.shape()] for tv in (source, result)]
        return (source, result) if shapes[0] == shapes[1] else (inp, out)

    def instead(self, op: Op, inp: TensorView, out: TensorView) -> str:
        """Returns a text about the cheapest other sequence of steps that makes the same change as
        the collective `op`. Returns "" for sends, and for a part of a tensor inside a loop.
        """
        cost = self.costs.get(self.lines[id(op)])
        if cost is None or not isinstance(op, Communication):
            return ""
        try:
            return alternative_words(op, *self.as_written(inp, out), cost.sent_nbytes)
        except UnsupportedError:
            return ""

    def cost(self, op: Op) -> str:
        """Returns a text about the bytes that a rank sends in the communication `op`, and about its
        time. Returns "" if these are not known.
        """
        if isinstance(op, LocalSlice):
            return "each rank keeps its part, and nothing is sent"
        cost = self.costs.get(self.lines[id(op)])
        if cost is None or self.prediction is None:
            return ""
        steps = f" in {cost.times} steps" if cost.times > 1 else ""
        time = ms(cost.seconds, 0)
        ends = (
            "from each sender to its receiver"
            if isinstance(op, P2PCommunication)
            else f"from each rank{steps}, among {cost.members} ranks"
        )
        return (
            f"{size_text(cost.sent_nbytes)} {ends} {along_text(cost.along)}; {time} alone on "
            f"{self.prediction.machine}"
        )

    def ends(self, op: Op) -> tuple[TensorView, TensorView] | None:
        """Returns (operand, result) of an op that changes how a tensor is sharded. Returns None for
        any other op.

        The operand of a send or receive is the buffer of a send, and the result is the buffer of a
        receive. If the op has no partner, both are the buffer of `op`.
        """
        if isinstance(op, P2PCommunication):
            return self.partners(op) or (op.buffer, op.buffer)
        return op.moved if isinstance(op, HostOp) else None

    def halves(self, op: P2PCommunication) -> tuple[list[P2PCommunication], list[P2PCommunication]]:
        """Returns the sends and the receives in the group of transfers of `op`."""
        group = next(group for group in self.groups if op in group)
        return [t for t in group if t.type == "send"], [t for t in group if t.type == "recv"]

    def partners(self, op: P2PCommunication) -> tuple[TensorView, TensorView] | None:
        """Returns (buffer of a send, buffer of its receive), of which one is the buffer of `op`.

        The compiler makes sends and receives in the same order. All transfers of a group move parts
        of one tensor into parts of another, also if one side has more transfers than the other.
        Returns None if there is no partner, or if the numbers of transfers outside of groups
        differ.
        """
        sends, receives = self.halves(op)
        is_alone = op in self.groups[-1]
        if not sends or not receives or (is_alone and len(sends) != len(receives)):
            return None
        k = (sends if op.type == "send" else receives).index(op)
        return sends[min(k, len(sends) - 1)].buffer, receives[min(k, len(receives) - 1)].buffer

    def communication(self, op: Op, inp: TensorView, out: TensorView) -> str:
        """Returns the line of explanation for the communication `op` from `inp` to `out`, with the
        reason why the communication is necessary."""
        if isinstance(op, P2PCommunication) and self.partners(op) is None:
            sends, receives = self.halves(op)
            counts = f"{len(sends)} sends and {len(receives)} receives"
            return f"{_title(op)} of T{out.number}): it has no partner; the program has {counts}"
        head = f"{_title(op)} of T{inp.number} -> T{out.number})"
        row = next((r for r in self.rows.get(out.number, []) if r.what == "placement"), None)
        reason = self.unknown(out) if row is None else f"because {self.reason(row, inp, out)}"
        return f"{head}: {reason}"

    def reason(self, row: Origin, inp: TensorView, out: TensorView) -> str:
        """Returns a text about the reason for the communication from `inp` to `out`.

        `row`, of the program's Provenance section, says where the sharding of `out` came from.
        """
        through = f"{row.op or 'an op'}{_at(row.where)}"
        name, change = f"T{out.number}", self.change(inp, out)
        match row.how:
            case "operand":
                theirs = self.cuts(inp)
                cuts = {p: a for p, a in self.cuts(out).items() if theirs.get(p) != a}
                asked = self.chains(row.result, cuts)
                undivided = self.undivided(row, inp, out)
                also = self.also(row, out)
                return (
                    f"{through}{also} takes {name} {change}{asked}{self.had(inp, out)}{undivided}"
                )
            case "set":
                return f"the user's copy{_at(row.where)} makes {name} {change}{self.given(out)}"
            case "update":
                given = "" if row.source is None else self.given(self.tensors[row.source])
                return f"{name} is written into T{row.source}, which is {change}{given}"
            case "sum":
                parts = next(self.sums(inp, out), "")
                before, after = self.cuts(inp), self.cuts(out)
                is_scattered = any(before.get(p) != axis for p, axis in after.items())
                result = f"; {name} is {change}{self.given(out)}" if is_scattered else ""
                is_lookup = any(r.how == "lookup" for r in self.summed(out.number))
                does = "looks up along" if is_lookup else "sums over"
                return f"{through} {does} an axis that is cut{parts}{result}"
            case _:
                return (
                    f"{through} computes T{inp.number} {self.placement(inp)}, and {name} is "
                    f"{change}{self.given(out)}"
                )

    def also(self, row: Origin, out: TensorView) -> str:
        """Returns a text in parentheses about further ops that read `out`: ` (and linear at
        mlp.py:15)`. Ops in the same source line as the op of `row` are left out. Returns "" if no
        op remains.
        """
        texts = dict.fromkeys(
            f"{op.name}{_at(op.where)}" for op in self.readers(out) if op.where != row.where
        )
        return f" (and {', '.join(texts)})" if texts else ""

    def readers(self, tv: TensorView) -> Iterator[Op]:
        """Yields the ops of the user's code that read the tensor `tv`: ops of the host program, and
        ops inside of its kernels."""
        for op in walk(self.program.ops):
            if tv not in op.inputs:
                continue
            inside: Iterable[Op] = (op,)
            if isinstance(op, LaunchKernel):
                exprs = self.program.groups[op.group].fusion.exprs
                inside = (e for e in exprs if tv.number in (v.number for v in _tensors(e.inputs)))
            yield from (e for e in inside if e.where)

    def sums(self, inp: TensorView, out: TensorView) -> Iterator[str]:
        """Yields texts about the shardings of those axes of `inp` over which `out` is summed."""
        for row in self.summed(out.number):
            if row.ptype is not None and row.ptype in self.cuts(inp):
                yield f" by {row.ptype.name} ({self.chain(row, row.ptype)})"

    def change(self, inp: TensorView, out: TensorView) -> str:
        """Returns a text about the sharding that `out` has and `inp` has not, such as `whole along
        axis 0`. If the tensors are on different meshes, the text names the mesh of `out`."""
        if inp.mesh != out.mesh:
            return f"{self.placement(out)} on {out.mesh}"
        before, after = self.cuts(inp), self.cuts(out)
        has_steps = any(p.is_stream for p in after) and not any(p.is_stream for p in before)
        before, after = ({p: a for p, a in c.items() if p.is_device} for c in (before, after))
        gone = [a for p, a in before.items() if p not in after]
        new = [f"cut by {p.name} on axis {a}" for p, a in after.items() if before.get(p) != a]
        whole = [f"whole along axis {a}" for a in gone if a not in after.values()]
        changed = " and ".join((*new, *whole)) or self.placement(out)
        return f"{changed}, in the steps of a stream" if has_steps else changed

    def had(self, inp: TensorView, out: TensorView) -> str:
        """Returns a text about the axes that devices split in `inp` but not in `out`. The text also
        says how each of these shardings follows from the user's annotation.

        Returns "" if there are no such axes.
        """
        after = self.cuts(out)
        lost = {p: a for p, a in self.cuts(inp).items() if p.is_device and after.get(p) != a}
        cuts = " and ".join(f"cut by {p.name} on axis {a}" for p, a in lost.items())
        return f", and T{inp.number} is {cuts}{self.chains(inp.number, lost)}" if lost else ""

    def undivided(self, row: Origin, inp: TensorView, out: TensorView) -> str:
        """Returns a text about the extents that prevent a reshape from keeping the sharding of
        `inp`. Returns "" for other ops and for other causes.

        A reshape can keep the sharding of the outermost axis that it splits or merges. The number
        of devices must then divide the axis before and after the reshape.
        """
        result = self.result_of(row)
        after = self.cuts(out)
        if row.op != "reshape" or result is None or inp.mesh is None:
            return ""
        for ptype, axis in self.cuts(inp).items():
            extents = _outermost_extents(inp, axis, result)
            if not ptype.is_device or ptype in after or extents is None:
                continue
            count, values = inp.mesh.size_of(ptype), [sc.int_value(x) for x in extents]
            if all(n is not None and n % count == 0 for n in values):
                continue
            verb = "are not known to divide" if None in values else "do not divide"
            cure = ", and give them as numbers in fd.define_tensor([...], ...)"
            return (
                f"; a reshape keeps this split only if the number of devices divides axis {axis} "
                f"before and after the reshape: {count} devices {verb} both {extents[0]} and "
                f"{extents[1]}. Choose sizes that are divisible by {count}"
                f"{cure if None in values else ''}"
            )
        return ""

    def result_of(self, row: Origin) -> TensorView | None:
        """Returns the result of the op that `row`, of the program's Provenance section, names. The
        result may be a tensor inside a kernel."""
        if row.result in self.tensors:
            return self.tensors[row.result]
        kernels = (group.fusion.tensors() for group in self.program.groups.values())
        return next((tv for tvs in kernels for tv in tvs if tv.number == row.result), None)

    def chains(self, number: int | None, cuts: Iterable[ParallelType]) -> str:
        """Returns a text in parentheses: how shardings of the tensor `number` follow from the
        user's annotations.

        `cuts` are the mesh dimensions and streams of these shardings. Returns "" if the program's
        Provenance section has no rows for the tensor.
        """
        rows = [] if number is None else [(self.row(number, p), p) for p in cuts]
        found = dict.fromkeys(self.chain(row, p) for row, p in rows if row is not None)
        return f" ({'; '.join(found)})" if found else ""

    def given(self, out: TensorView) -> str:
        """Returns a text in parentheses: how the sharding of `out` follows from the user's
        annotation.

        Returns "" if the Provenance section does not say where the sharding of `out` came from.
        """
        cuts = self.cuts(out)
        rows = [
            r
            for r in self.rows.get(out.number, [])
            if r.what == "mesh" or (r.axis is not None and r.ptype in cuts)
        ]
        return f" ({self.chain(rows[0], rows[0].ptype)})" if rows else ""


def change_words(op: Op, inp: TensorView, out: TensorView) -> str:
    """Returns the placements before and after a communication as text, such as `axis 0 split over
    mesh_x -> replicated`. Returns "" if a placement has no such text, because the tensor is a part
    of another tensor inside a loop.
    """
    movement = op.movement if isinstance(op, HostOp) else None
    kind = "SUM" if movement is None else movement.red_op
    try:
        before, after = (
            _placement_words(stage, kind) for stage in (stage_of(inp, summed_by(op)), stage_of(out))
        )
    except UnsupportedError:
        return ""
    meshes = "" if inp.mesh == out.mesh else f" on {out.mesh}"
    return f"{before}{f' on {inp.mesh}' if meshes else ''} -> {after}{meshes}"


def _placement_words(stage: SumStage, reduction: str) -> str:
    """Returns a text such as `axis 0 split over mesh_x`. `reduction` is the name of the reduction
    that adds the parts of sums.
    """
    texts: list[str] = []
    if stage.parts:
        what = "sums" if reduction == "SUM" else f"results of {reduction}"
        texts.append(f"partial {what} over {' and '.join(c.ptype.name for c in stage.parts)}")
    for axis, cuts in enumerate(stage.placement):
        if cuts:
            names = " and then ".join(cut.ptype.name for cut in cuts)
            texts.append(f"axis {axis} split over {names}")
    return ", ".join(texts) or "replicated"


def _outermost_extents(
    inp: TensorView, axis: int, result: TensorView
) -> tuple[Scalar, Scalar] | None:
    """Returns (extent before, extent after) of an axis that a reshape from `inp` to `result` splits
    or merges. `axis` is the position in `inp`.

    Returns None if the axis is not the outermost one that the reshape splits or merges.
    """
    before, behind = (
        [tv.fusion.canonical(a.size) for a in tv.domain.no_reductions] for tv in (inp, result)
    )
    outside = sc.product(before[:axis])
    starts = [k for k in range(len(behind)) if sc.product(behind[:k]) == outside]
    return (before[axis], behind[starts[-1]]) if starts else None


def _tensors(values: Iterable[object]) -> Iterator[TensorView]:
    return (v for v in values if isinstance(v, TensorView))


def _at(where: str) -> str:
    return f" at {where}" if where else ""


def _title(op: Op) -> str:
    """Returns the beginning of the line that explains the communication `op`, such as
    `Communication 0 (Allgather`."""
    name = op.name.removesuffix(")")
    return name if "(" in name else f"{name} (a copy"
