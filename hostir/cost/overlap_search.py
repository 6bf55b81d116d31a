"""Automatic overlap: predicts which matmuls become faster if they run at the same time as a
neighbouring communication, in pipelined steps.

A *pair* is a matmul next to a communication (`multidevice.sharding.passes.overlap_candidates`). A
*form* is one way to divide a pair into steps. The ops of each pair are lowered as a separate
program, without steps and in every form. The predicted times of these programs
(`docs/explanation/cost-model.md`) are compared.

All ranks must decide alike. So a decision depends only on the fusion, the class of inputs (all
inputs that share one compiled program), the sizes and the machine description.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fuser.ir.axis_graph import tensor_operands
from fuser.ir.domain.tensor_domain import IterDomain
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.memory_layout import memory_order
from fuser.ir.naming import tensor_words
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.compiled import Computed
from fuser.ir.scalar.constructors import Number, Scalar, Symbol
from fuser.ir.types import MemoryType
from fuser.passes.concretize import refined_sizes
from fuser.support.errors import FuserError, UnsupportedError, padding_words, user_code
from fuser.support.lru import Recent
from hostir.cost.machine_model import CPU, Machine
from hostir.cost.op_costs import Cost, collective_cost, cost_of
from hostir.cost.report import seconds_of
from hostir.cost.simulator import simulated_schedule
from hostir.ir.ops import NUMBER_OF_STREAMS, Sizes, library_name
from hostir.ir.program import HostIrContainer
from hostir.ir.shard_layout import held_nbytes
from hostir.lowering.params import DEFAULT, LowerParams
from hostir.lowering.pipeline import lower_sharded
from multidevice.sharding.passes.overlap_candidates import (
    OverlapForm,
    Pair,
    alone,
    find_pairs,
    forms_of,
)
from multidevice.sharding.passes.pipeline import complete_alone
from multidevice.sharding.placement import placement
from multidevice.sharding.queries import local_extents
from multidevice.transports.base.collectives import ALLREDUCE

# The fraction of the time that steps must save by the model to be chosen. The model is not exact,
# and steps need memory and host time.
MARGIN = 0.03
# With this margin, every pair takes its fastest form with steps, even if it is slower than without.
FORCED = -math.inf
_AS_IT_IS = "as it is"
_MAX_SIZES = 256
_STREAMS = 4


@dataclass(frozen=True)
class Choice:
    """The chosen way to compute each pair of a fusion. A pair is a matmul and the communication
    next to it; if both are divided into steps, the communication of one step runs during the matmul
    of another.

    `forms` has one entry for each pair, in order: the name of a way to divide the pair into steps,
    or "" for no steps. `backend` is the library of transfers between ranks in steps. If `backend`
    is "", transfers use the same library as all other communications.
    """

    forms: tuple[str, ...] = ()
    backend: str = ""

    def __bool__(self) -> bool:
        return any(self.forms)

    def __str__(self) -> str:
        forms = "; ".join(form or _AS_IT_IS for form in self.forms) or "none"
        return f"{forms}, by {library_name(self.backend)}" if self.backend else forms


_NO_STEPS = Choice()


@dataclass(frozen=True)
class OverlapCandidate:
    """One way to compute a pair, a matmul and the communication next to it, with the predicted
    seconds per call. If there is no prediction, `seconds` is None and `why` is the reason.

    - `form`: the name of a way to divide the pair into steps, so that the communication of one step
      runs during the matmul of another; "" for no steps.
    - `backend`: the library of transfers in the steps; "" if there are no transfers.
    - `numbers_of`: another library, whose measured numbers the prediction uses; "" for none.
    """

    form: str
    backend: str = ""
    seconds: float | None = None
    why: str = ""
    numbers_of: str = ""

    @property
    def name(self) -> str:
        """The name of this way to compute a pair, with its libraries, as the report on overlap
        prints it."""
        library = f", {library_name(self.backend)}" if self.backend else ""
        numbers = f" by the numbers of {self.numbers_of}" if self.numbers_of else ""
        return (self.form or _AS_IT_IS) + library + numbers

    def __str__(self) -> str:
        return self.why if self.seconds is None else f"{self.seconds * 1e3:9.3f} ms"


# The pair without steps, if it was decided without predicted times.
_NOT_PREDICTED = OverlapCandidate("")


@dataclass(frozen=True)
class Decision:
    """The decision how one pair, a matmul and the communication next to it, is computed: as a
    whole, or divided into steps. With steps, the communication of one step runs during the matmul
    of another.

    - `candidates`: the ways that were compared, first the pair without steps; `chosen`: one of
      these ways.
    - `why`: the reason, if the decision does not follow from the predicted times.
    - `what`: the ops of the pair as text.
    """

    candidates: tuple[OverlapCandidate, ...]
    chosen: OverlapCandidate
    why: str = ""
    what: str = ""

    def __str__(self) -> str:
        width = max(len(c.name) for c in self.candidates)
        rows = [
            f"  {c.name:{width}}  {c}{'   <- chosen' if c is self.chosen else ''}"
            for c in self.candidates
        ]
        return "\n".join([self.what, *rows, *([f"  {self.why}"] if self.why else [])])


def pick(candidates: Sequence[OverlapCandidate], transport: str, margin: float) -> OverlapCandidate:
    """Returns the fastest way to compute a pair (a matmul and the communication next to it) if it
    saves at least the fraction `margin` of the time. Otherwise returns the first candidate, which
    does not divide the pair into steps.

    A candidate whose steps have transfers between ranks is considered only if they use the library
    `transport`, because one program uses one library for all its steps.
    """
    base = candidates[0]
    if base.seconds is None:
        return base
    most = (1 - margin) * base.seconds
    paying = [
        (c.seconds, k)
        for k, c in enumerate(candidates)
        if k and c.seconds is not None and c.seconds < most and c.backend in ("", transport)
    ]
    return candidates[min(paying)[1]] if paying else base


@dataclass(frozen=True)
class NoOverlap:
    """The replacement for `Overlaps` in programs in which nothing may be divided into steps.
    `Overlaps` divides matmuls and communications into steps that overlap. `why` is the reason why
    nothing may be divided, such as ranks on several hosts.
    """

    why: str

    def steps_for(self, sizes: Mapping[Symbol, int]) -> None:
        """Returns the function that divides matmuls and communications of a fusion into steps.
        Always None here, because no matmul is divided.
        """

    def choose(self, sizes: Mapping[Symbol, int]) -> Choice:
        """Returns, for inputs of these sizes, how each matmul is divided into steps that overlap
        with a communication. Here, none is divided.
        """
        del sizes
        return _NO_STEPS

    def accepts(self, program: HostIrContainer, sizes: Mapping[Symbol, int]) -> bool:
        """Returns whether the choice of steps (for overlap of matmuls and communications) is fast
        enough in the whole program. Always True here, because there are no steps.
        """
        del program, sizes
        return True

    def gives_up(self, sizes: Mapping[Symbol, int], why: str) -> bool:
        """Returns False: there is no other choice to try, because no matmul or communication was
        divided into steps that overlap.

        `why` is the reason for which the program could not be lowered.
        """
        del sizes, why
        return False

    def report(self, sizes: Mapping[Symbol, int]) -> str:
        """Returns the reason why no matmul is divided into steps, for the report on overlap."""
        del sizes
        return f"nothing was decided: {self.why}"


class Overlaps:
    """Decides for one fusion which pairs are divided into steps. A pair is a matmul and the
    communication next to it. With steps, the communication of one step runs during the matmul of
    another. There is one decision for each combination of input sizes.

    - `backend`: the library of all communications outside of steps.
    - `transports`: the libraries that transfers in steps may use. The first is used unless another
      one saves at least the fraction `margin` of the time.
    - `params`: the settings with which the pairs are lowered.
    - `captured`: the libraries whose calls a CUDA graph can repeat, without work of the host. These
      libraries are moved to the front of `transports`.
    """

    def __init__(
        self,
        machine: Machine,
        *,
        backend: str,
        transports: Sequence[str],
        params: LowerParams = DEFAULT,
        margin: float = MARGIN,
        captured: Collection[str] = (),
    ) -> None:
        self.machine = machine
        self._captured = frozenset(captured)
        self._backend, self._params, self._margin = backend, params, margin
        first = [t for t in transports if t in self._captured]
        self._transports = tuple(dict.fromkeys((*first, *transports)))
        self._known: list[_PairVerdict] | None = None
        # A common multiple of the sizes of all meshes; the sizes predicted in place of others, by
        # key.
        self._multiple = 1
        self._near: Recent[object, Mapping[Symbol, int]] = Recent(_MAX_SIZES)
        self._decided: Recent[object, tuple[Choice, tuple[Decision, ...]]] = Recent(_MAX_SIZES)
        # The reasons against a choice: for all sizes, or for those of a key.
        self._refused: dict[Choice, str] = {}
        self._refused_for: Recent[tuple[Choice, object], str] = Recent(_MAX_SIZES)
        self._programs: dict[Choice, HostIrContainer] = {}

    def steps_for(self, sizes: Mapping[Symbol, int]) -> Callable[[Fusion], str]:
        """Returns a function that divides matmuls and communications of a fusion into the chosen
        steps, for inputs of these sizes. Lowering calls the function after ops were decomposed into
        local ops and communications.

        The function returns the library of the transfers between ranks in the steps.
        """

        def give(fusion: Fusion) -> str:
            pairs = find_pairs(fusion)
            if self._known is None:
                self._known = self._look_at(fusion)
            choice, _ = self._find(sizes)
            for pair, name in zip(pairs, choice.forms, strict=True):
                if name:
                    form = next(f for f in forms_of(pair) if f.name == name)
                    form.take(fusion, pair)
            return choice.backend

        return give

    def choose(self, sizes: Mapping[Symbol, int]) -> Choice | None:
        """Returns the choice for inputs of these sizes: for each matmul next to a communication,
        whether and how it is divided into steps. Returns None if no fusion has been lowered yet,
        because its matmuls are then unknown."""
        return None if self._known is None else self._find(sizes)[0]

    def decisions(self, sizes: Mapping[Symbol, int]) -> tuple[Decision, ...]:
        """Returns the decision about each matmul next to a communication, for inputs of these
        sizes, with the predicted times that were compared."""
        values = refined_sizes(self._stand_in(sizes))
        found: list[Decision] = []
        for one, decision in zip(self._known or (), self._find(sizes)[1], strict=True):
            if decision.chosen == _NOT_PREDICTED and not one.why_not:
                base = one.unit.as_it_is(values, self.machine)
                decision = replace(decision, candidates=(base,), chosen=base)
            found.append(replace(decision, what=_text(one.pair, values)))
        return tuple(found)

    def gives_up(self, sizes: Mapping[Symbol, int], why: str) -> bool:
        """Records that the whole program cannot be lowered with the current choice of steps (for
        overlap of matmuls and communications), for the reason `why`. The next call of `choose` then
        makes another choice.

        Returns False if the current choice has no steps, so that there is no other choice to try.
        """
        choice = self.choose(sizes)
        if not choice:
            return False
        self._refused[choice] = f"the whole program cannot be lowered with it: {_first_line(why)}"
        self._decided = Recent(_MAX_SIZES)
        return True

    def accepts(self, program: HostIrContainer, sizes: Mapping[Symbol, int]) -> bool:
        """Returns whether the current choice of steps (for overlap of matmuls and communications)
        saves enough time in the whole program. `program` was lowered with this choice.

        If the result is False, another choice was made, and the fusion must be lowered again. The
        check is needed because steps can prevent a CUDA graph, and the host then issues every op in
        each run.
        """
        choice, decisions = self._find(sizes)
        self._programs[choice] = program
        near = self._stand_in(sizes)
        why = self._why_not(choice, decisions, program, refined_sizes(near))
        if why:
            key = _key(near)
            self._refused_for[choice, key] = why
            self._decided[key] = self._decide(near)
        return not why

    def report(self, sizes: Mapping[Symbol, int]) -> str:
        """Returns as text, for inputs of these sizes, how each matmul next to a communication is
        computed, and the predicted times. `FUSER_DUMP=overlap` prints this text.
        """
        wanted = (
            "taken wherever possible" if self._margin == FORCED else f"must gain {self._margin:.0%}"
        )
        head = f"on {self.machine.name}; steps {wanted}"
        rows = [str(d) for d in self.decisions(sizes)]
        near = {s.name: (n, sizes[s]) for s, n in self._stand_in(sizes).items() if n != sizes[s]}
        if near:
            shown = ", ".join(f"{s} = {n} for {exact}" for s, (n, exact) in sorted(near.items()))
            head += f"; predicted for sizes nearby: {shown}"
        return "\n".join([head, *(rows or ["no matmul is next to a communication"])])

    # ------------------------------------------------------------ deciding
    def _look_at(self, fusion: Fusion) -> list[_PairVerdict]:
        """Finds the pairs (a matmul and the communication next to it) of a copy of the fusion. A
        copy is kept, because later passes change the fusion. Each pair is returned with the reason
        why it is never divided into steps, if there is one.
        """
        kept, _ = fusion.copy()
        meshes = (tv.mesh for tv in kept.tensors())
        self._multiple = math.lcm(*(mesh.size for mesh in meshes if mesh is not None))
        taken: set[TensorView] = set()
        known: list[_PairVerdict] = []
        for pair in find_pairs(kept):
            results = {op.out_tensor for op in pair.products}
            unit = _Unit(kept, pair, self._backend, self._params, self._captured)
            is_taken = bool(results & taken)
            why = (
                "an earlier pair already divides this matmul into steps"
                if is_taken
                else pair.why_not
            )
            known.append(_PairVerdict(pair, unit, why))
            taken |= set() if pair.why_not else results
        return known

    def _stand_in(self, sizes: Mapping[Symbol, int]) -> Mapping[Symbol, int]:
        """Returns the sizes for which times are predicted, in place of `sizes`, so that nearly
        equal sizes share one prediction.

        The result is `sizes` itself if rounding changes whether devices can divide an axis of a
        communicated tensor equally.
        """
        key = _key(sizes)
        found = self._near.recall(key)
        if found is None:
            found = near_sizes(sizes, self._multiple)
            if found != sizes and self._divided(found) != self._divided(sizes):
                found = sizes
            self._near[key] = found
        return found

    def _divided(self, sizes: Mapping[Symbol, int]) -> list[bool | None]:
        """Returns, for each pair of a matmul and the communication next to it, whether devices
        divide the axis of the communicated tensor into equal blocks. The value is None if the size
        of the axis is unknown.
        """
        values, found = refined_sizes(sizes), list[bool | None]()
        for one in self._known or ():
            try:
                found.append(_divided_extent(one.pair, values) % one.pair.devices == 0)
            except KeyError:
                found.append(None)
        return found

    def _find(self, sizes: Mapping[Symbol, int]) -> tuple[Choice, tuple[Decision, ...]]:
        sizes = self._stand_in(sizes)
        key = _key(sizes)
        found = self._decided.recall(key)
        if found is None:
            found = self._decided[key] = self._decide(sizes)
            program = self._programs.get(found[0])
            if program is not None and not self.accepts(program, sizes):
                return self._find(sizes)
        return found

    def _why_not(
        self,
        choice: Choice,
        decisions: Sequence[Decision],
        program: HostIrContainer,
        values: Values,
    ) -> str:
        if choice.backend in ("", *self._captured) or self._backend not in self._captured:
            return ""
        try:
            sizes = {**values, NUMBER_OF_STREAMS: _STREAMS}
            made = simulated_schedule(program, sizes, self.machine)
        except FuserError:
            return ""  # the model does not know some op
        seconds, host = seconds_of(made)
        gained = sum(_seconds(d.candidates[0]) - _seconds(d.chosen) for d in decisions)
        if max(seconds, host) < (1 - self._margin) * (seconds + gained):
            return ""
        return (
            f"no CUDA graph repeats {library_name(choice.backend)}: for the whole program, the "
            f"host would take {host * 1e3:.3f} ms and the GPU {seconds * 1e3:.3f} ms. Without "
            f"steps, the GPU would take {gained * 1e3:.3f} ms more"
        )

    def _decide(self, sizes: Mapping[Symbol, int]) -> tuple[Choice, tuple[Decision, ...]]:
        assert self._known is not None, "no fusion was examined before the decision"
        values = refined_sizes(sizes)
        # Pairs of equal layers take the same time.
        alike: dict[object, _Times] = {}
        times: list[_Times] = []
        for one in self._known:
            if one.why_not:
                times.append(_Times((_NOT_PREDICTED,), one.why_not))
                continue
            try:
                key = one.signature(values)
            except KeyError as error:
                why = f"no input gives {error}, on which an extent depends"
                times.append(_Times((OverlapCandidate("", why=why),)))
                continue
            if key not in alike:
                args = values, self.machine, self._transports, self._margin
                alike[key] = one.unit.times(*args)
            times.append(alike[key])
        plans = [self._plan(times, transport) for transport in self._transports]
        best, why = None, ""
        for plan in plans:
            choice = _choice(plan)
            refused = self._refused.get(choice)
            refused = refused or self._refused_for.recall((choice, _key(sizes)))
            if refused:
                why = why or f"not chosen: {refused}"
            elif best is None or _total(plan) < (1 - max(self._margin, 0)) * _total(best):
                best = plan
        if best is None:
            best = [replace(d, chosen=d.candidates[0]) for d in plans[0]]
        return _choice(best), tuple(replace(d, why=d.why or why) for d in best)

    def _plan(self, times: Sequence[_Times], transport: str) -> list[Decision]:
        """Decides for each pair (a matmul and the communication next to it) whether and how it is
        divided into steps. The library of all transfers between ranks in steps is `transport`.

        `times` has the candidates of each pair with their predicted times.
        """
        return [
            Decision(t.candidates, pick(t.candidates, transport, self._margin), t.why)
            for t in times
        ]


@dataclass(frozen=True)
class _PairVerdict:
    """A pair of the fusion (a matmul and the communication next to it), and whether the pair may be
    divided into steps that overlap. `unit` has the ops of the pair as a separate fusion.

    `why_not` is the reason why the pair is never divided; "" if it may be.
    """

    pair: Pair
    unit: _Unit
    why_not: str

    def signature(self, values: Values) -> object:
        """Returns a key that is equal for pairs that take the same time, such as the pairs of two
        equal layers. Such pairs share one prediction. `values` maps the symbols of extents to
        numbers."""
        structure, extents = self._structure
        return structure, extents(values)

    @cached_property
    def _structure(self) -> tuple[object, Computed]:
        """The two things from which `signature` makes its key: everything about the pair that does
        not depend on sizes, and a function that computes the sizes of the pair's axes.

        The first has the ops, dtypes, shardings and memory orders of the pair (a matmul and the
        communication next to it).
        """
        places: dict[TensorView, int] = {}
        ops: list[object] = []
        for op in self.pair.ops:
            ins = [
                (places.setdefault(tv, len(places)), tuple(op.axis_map(k)))
                for k, tv in tensor_operands(op)
            ]
            ops.append((type(op), tuple(ins), places.setdefault(op.out_tensor, len(places))))
        tensors = tuple(
            (
                tv.dtype(),
                tuple(a.kind for a in tv.domain.logical),
                placement(tv),
                tuple(memory_order(tv)),
                tv.mesh,
                tv in tv.fusion.inputs,
            )
            for tv in places
        )
        axes = [(tv, a) for tv in places for a in tv.domain.logical]
        return (tuple(ops), tensors), Computed([tv.fusion.canonical(a.size) for tv, a in axes])


@dataclass(frozen=True)
class _Times:
    candidates: tuple[OverlapCandidate, ...]
    why: str = ""


class _Unit:
    """The ops of one pair (a matmul and the communication next to it) as a separate fusion, and the
    programs that were lowered from it: one for each way to divide the pair into steps that overlap.
    The programs are simulated to predict the pair's time.
    """

    def __init__(
        self,
        fusion: Fusion,
        pair: Pair,
        backend: str,
        params: LowerParams,
        captured: Collection[str],
    ) -> None:
        self.pair = pair
        self._fusion, self._backend, self._params = fusion, backend, params
        # The libraries whose communications CUDA graphs can repeat.
        self._captured = captured
        self._bound = GainBound(pair, backend, is_repeated=backend in captured)
        self._programs: dict[tuple[str, str], HostIrContainer | str] = {}

    @cached_property
    def _alone(self) -> Fusion:
        fusion = alone(self._fusion, self.pair)
        # The program can compute its tensors in memory that peers can map.
        given = {tv.number for tv in self._fusion.inputs if isinstance(tv, TensorView)}
        for tv in fusion.inputs:
            if isinstance(tv, TensorView) and tv.number not in given:
                tv.memory = MemoryType.symmetric
        return fusion

    def times(
        self, values: Values, machine: Machine, transports: Sequence[str], margin: float
    ) -> _Times:
        """Predicts the time of the pair (a matmul and the communication next to it): without steps,
        and for each way to divide it into steps with each library in `transports`. `values` maps
        the symbols of extents to numbers.

        If steps cannot save the fraction `margin` of the time, nothing is predicted, and the result
        has the reason.
        """
        try:
            why = "" if margin == FORCED else self._bound.why_hopeless(values, machine, margin)
        except FuserError as error:
            return _Times((OverlapCandidate("", why=str(error)),))
        if why:
            return _Times((_NOT_PREDICTED,), why)
        base = self.as_it_is(values, machine)
        if base.seconds is None:
            return _Times((base,))
        found = [base]
        for form in forms_of(self.pair):
            for transport in transports if form.transfers else ("",):
                found.append(self._candidate(form.name, transport, values, machine))
        return _Times(tuple(found))

    def as_it_is(self, values: Values, machine: Machine) -> OverlapCandidate:
        """Returns the predicted time of the pair (a matmul and the communication next to it) as the
        user wrote it, without steps.
        """
        return self._candidate("", "", values, machine)

    def _candidate(
        self, form: str, backend: str, values: Values, machine: Machine
    ) -> OverlapCandidate:
        one = next((f for f in forms_of(self.pair) if f.name == form), None)
        try:
            if one is not None and one.transfers:
                self._check_divisible(values)
            program = self._program(one, backend)
            made = simulated_schedule(program, {**values, NUMBER_OF_STREAMS: _STREAMS}, machine)
            seconds, host = seconds_of(made)
            if {self._backend, backend or self._backend} <= set(self._captured):
                host = machine.host_run_s
            numbers = machine.numbers_of(backend or self._backend)
            return OverlapCandidate(form, backend, max(seconds, host), numbers_of=numbers)
        except FuserError as error:
            return OverlapCandidate(form, backend, why=f"cannot be: {_first_line(error)}")

    def _check_divisible(self, values: Values) -> None:
        """Raises `UnsupportedError` unless devices divide the axis of the communicated tensor into
        equal blocks. A division of a matmul and a communication into steps with transfers between
        ranks needs equal blocks.
        """
        pair = self.pair
        size = _divided_extent(pair, values)
        if size % pair.devices:
            raise UnsupportedError(
                f"the extent {size} of axis {pair.axis} of {tensor_words(pair.between)} is not "
                f"divisible by the {pair.devices} devices along {pair.ptype.name}"
                f"{padding_words(size, pair.devices)}"
            )

    def _program(self, form: OverlapForm | None, backend: str) -> HostIrContainer:
        key = ("" if form is None else form.name), backend
        if key not in self._programs:
            try:
                self._programs[key] = self._lower(form, backend)
            except FuserError as error:
                self._programs[key] = _first_line(error)
        found = self._programs[key]
        if isinstance(found, str):
            raise UnsupportedError(found)
        return found

    def _lower(self, form: OverlapForm | None, backend: str) -> HostIrContainer:
        fusion, _ = self._alone.copy()
        (pair,) = find_pairs(fusion)
        if form is not None:
            form.take(fusion, pair)
        complete_alone(fusion)
        params = replace(self._params, step_backend=backend)
        return lower_sharded(fusion, backend_name=self._backend, params=params)[1]


# ------------------------------------------------------------------ of what
def _choice(plan: Sequence[Decision]) -> Choice:
    backend = next((d.chosen.backend for d in plan if d.chosen.backend), "")
    return Choice(tuple(d.chosen.form for d in plan), backend)


def _seconds(candidate: OverlapCandidate) -> float:
    return candidate.seconds or 0.0


def _total(plan: Sequence[Decision]) -> float:
    return sum(_seconds(d.chosen) for d in plan)


def _key(sizes: Mapping[Symbol, int]) -> object:
    return tuple(sorted((s.name, n) for s, n in sizes.items()))


def _size(tv: TensorView, axis: IterDomain, values: Values) -> int:
    return int(sc.evaluate(tv.fusion.canonical(axis.size), values))


def _divided_extent(pair: Pair, values: Values) -> int:
    """Returns the global size of the axis along which devices divide the tensor `pair.between`. The
    parts of this axis become the steps of the overlap.

    The matmul passes this tensor to the communication, or receives it from the communication.
    """
    return _size(pair.between, pair.between.domain.no_reductions[pair.axis], values)


def _text(pair: Pair, values: Values) -> str:
    def shown(tv: TensorView) -> str:
        axes = tv.domain.no_reductions
        try:
            return f"{tv.label} [{', '.join(str(_size(tv, a, values)) for a in axes)}]"
        except KeyError:
            return str(tv)

    move = f"{pair.collective} {shown(pair.move.inputs[0])} -> {shown(pair.move.out_tensor)}"
    products = [
        f"{op.name} of {', '.join(shown(tv) for _, tv in tensor_operands(op))}"
        for op in pair.products
    ]
    parts = [move, *products] if pair.ops[0] is pair.move else [*products, move]
    where = next((op.where for op in pair.products if op.where), pair.move.where)
    over = f"{pair.devices} {pair.ptype.text}, {pair.between.dtype().name}"
    return f"{'; '.join(parts)} over {over}{user_code(where)}"


def _first_line(error: FuserError | str) -> str:
    return str(error).partition("\n")[0]


# ----------------------------------------------------------------------
# An upper bound of the gain of steps, from numbers alone. For most sizes it decides without
# lowering.

Values = Mapping[Symbol, Number]


class GainBound:
    """An upper bound of the time that can be saved if a matmul and the communication next to it (a
    pair) are divided into steps that overlap. For most sizes, the bound shows without lowering that
    steps are not worthwhile.

    `backend` is the library of the pair's communication. `is_repeated` says that a CUDA graph
    repeats the run, so that the host's time does not depend on the number of steps.
    """

    def __init__(self, pair: Pair, backend: str, *, is_repeated: bool) -> None:
        self._pair, self._backend, self._is_repeated = pair, backend, is_repeated

    @cached_property
    def _tensors(self) -> tuple[dict[TensorView, slice], Computed]:
        """A dict and a function for the sizes of the pair's tensors. The pair is a matmul and the
        communication next to it.

        The function computes one list: the sizes of each tensor on one rank, one tensor after
        another. The dict maps a tensor to the slice of the list that has its sizes.
        """
        places: dict[TensorView, slice] = {}
        scalars: list[Scalar] = []
        for op in (self._pair.move, *self._pair.products):
            for tv in (*op.inputs, *op.outputs):
                if isinstance(tv, TensorView) and tv not in places:
                    extents = local_extents(tv)
                    places[tv] = slice(len(scalars), len(scalars) + len(extents))
                    scalars += extents
        return places, Computed(scalars)

    def why_hopeless(self, values: Values, machine: Machine, margin: float) -> str:
        """Returns the reason why steps that overlap a matmul with a communication cannot save the
        fraction `margin` of the time. Returns "" if steps may save so much. `values` maps the
        symbols of extents to numbers.
        """
        if machine.device == CPU:
            return "a CPU rank computes and communicates in turns, so steps gain nothing"
        pair, (places, extents) = self._pair, self._tensors
        numbers = extents(values)

        def sizes(tv: TensorView) -> tuple[int, ...]:
            return tuple(int(n) for n in numbers[places[tv]])

        costs = [cost_of(op, sizes, machine) for op in pair.products]
        computes = sum(c.seconds for c in costs if c is not None)
        moves = self._communication(sizes, machine).seconds
        if min(computes, moves) < margin * (computes + moves):
            return (
                f"the matmul takes {computes * 1e6:.1f} us and the communication "
                f"{moves * 1e6:.1f} us: there is less than {margin:.0%} to gain"
            )
        steps = 2 if pair.collective is ALLREDUCE else pair.devices
        calls = machine.host_run_s + steps * len(pair.products) * machine.host_library_s
        host = calls + (steps - 1) * machine.host_post_s
        if not self._is_repeated and host > (1 - margin) * (computes + moves + machine.host_run_s):
            return (
                f"the host would take {host * 1e6:.1f} us to issue the steps; the matmul and the "
                f"communication, one after the other, take {computes * 1e6:.1f} and "
                f"{moves * 1e6:.1f} us"
            )
        return ""

    def _communication(self, sizes: Sizes, machine: Machine) -> Cost:
        pair = self._pair
        ends = pair.move.inputs[0], pair.move.out_tensor
        nbytes = max(held_nbytes(tv, sizes(tv)) for tv in ends)
        row, dtype = pair.collective, pair.between.dtype()
        return collective_cost(row, pair.devices, nbytes, self._backend, machine, dtype=dtype)


# ----------------------------------------------------------------------
# Nearly equal sizes share one prediction.
#
# If every call has other sizes, only few of them are predicted. The predicted size is a function of
# the size alone, so all ranks use the same one, independent of the sizes that they have seen
# before.

# The leading bits that a size keeps. The predicted size differs by at most about 1/32. Round sizes,
# such as 7 * 4096, are predicted themselves.
_BITS = 5


def near(size: int, multiple: int) -> int:
    """Returns a nearby tensor size for which times are predicted in place of `size`, so that nearly
    equal sizes share one prediction.

    `multiple` is a common multiple of the sizes of all meshes. The largest common divisor of `size`
    and `multiple` is kept, and the other factor of `size` is rounded to few leading bits. A mesh
    size therefore divides either both `size` and the result, or neither of them.
    """
    part = math.gcd(size, multiple)
    count = abs(size) // part
    dropped = max(count.bit_length() - _BITS, 0)
    if not dropped:
        return size
    rounded = (count + (1 << dropped >> 1)) >> dropped << dropped
    while math.gcd(part * rounded, multiple) != part:
        rounded += 1
    return int(math.copysign(part * rounded, size))


def near_sizes(sizes: Mapping[Symbol, int], multiple: int) -> dict[Symbol, int]:
    """Rounds each size as `near` does, and returns the sizes for which times are predicted in place
    of `sizes`. Equal sizes stay equal."""
    return {symbol: near(n, multiple) for symbol, n in sizes.items()}
