"""Graphs of bound plans: after a few equal runs, one call of the driver repeats the whole run.

A graph has the addresses of what it was captured with. Those of generated kernels are replaced when
a tensor lies elsewhere; what torch's calls and communications touch is the *key* of a graph: a plan
has one graph per set of these addresses, captured when a set comes back, and runs step by step on
any other. Outputs are new tensors of each run, as without graphs, so that none is overwritten that
a caller holds; intermediates lie in the arena of the plan, whose runs follow one another.

Where peers copy out of this rank's memory, all ranks repeat a run by their graphs or none does:
they vote. Each tells a number that stands for its own key, and the numbers of all are the key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch.autograd import profiler as torch_profiler

from fuser.runtime.captured_graphs import USERS, Graph, GraphMaker
from fuser.support.errors import KernelError
from fuser.support.lru import Recent
from fuser.support.torch_calls import arithmetic_choices, lasting
from hostir.ir.ops import P2PCommunication, SetCurrentStream
from hostir.runtime.steps import Binding, BoundKernel, Closure, Slots, Step, range_of_graph
from multidevice.coordination.bounded_wait import Calls
from multidevice.transports.base.protocol import FIRST_GRAPH, NOT_CAPTURED, STEP_BY_STEP

if TYPE_CHECKING:
    from fuser.ir.op import Op
    from fuser.runtime.compiled_kernel import LaunchCall
    from hostir.runtime.streams import Streams
    from multidevice.transports.base.protocol import Backend, Vote

# Runs with one set of addresses before they are captured; more where a graph saves little of each.
RUNS_BEFORE, RUNS_BEFORE_FEW = 2, 16
# Steps of a run below which a graph saves little, or nothing where they are not kernels alone.
MIN_STEPS = 3
# Twins of a graph, for tensors that lie elsewhere in turns; moves before there is one.
MAX_TWINS, MOVES_BEFORE = 3, 8
# Graphs of one plan on one stream; sets of addresses that are counted; captures at all.
MAX_GRAPHS, MAX_KEYS, MAX_CAPTURES = 256, 1024, 512
# Runs that found no graph, one after another, before none is looked for.
MAX_MISSES = 512
# What this process tells others in votes: each number stands for one key of one `Replays`.
_NUMBERS = count(FIRST_GRAPH)


def gains_nothing(steps: int, kernels: int) -> str:
    """Returns why a run of so many steps, among them kernels, is not captured; "" where a graph
    would be faster."""
    is_slower = steps < (1 if steps == kernels else MIN_STEPS)
    return f"{steps} step(s) gain nothing by it" if is_slower else ""


class _Refused(Exception):
    """Why a plan is not captured."""


class _Postponed(Exception):
    """Why a plan is not captured now."""


def _beside(threads: Sequence[str]) -> str:
    return f"the threads {', '.join(threads)} run programs, too"


class _WatchedSlots(list[Any]):
    """The slots of a captured run; notes which ones are read."""

    def __init__(self, slots: Slots) -> None:
        super().__init__(slots)
        self.read: set[int] = set()

    def __getitem__(self, i: Any) -> Any:
        self.read.add(i)
        return super().__getitem__(i)


@dataclass(frozen=True)
class CaptureBinding(Binding):
    """What a plan is bound to while it is captured.

    Where a view lies follows from the slot that it is a view of: `origins` has (slot, bytes).
    """

    maker: GraphMaker = field(kw_only=True)
    kernels: list[BoundKernel] = field(default_factory=list[BoundKernel])
    # The nodes of the capture that goes on, by the number of their kernel.
    nodes: dict[int, _CapturedKernel] = field(default_factory=dict[int, Any])
    origins: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    views: dict[int, Closure] = field(default_factory=dict[int, Closure])

    def raw(self, stream: int | None) -> int:
        return self.stream if stream is None else self.maker.stand_in(stream)

    def view(self, source: int, out: int, view: Closure, nbytes: int) -> Closure:
        self.origins[out] = source, nbytes
        self.views[out] = view

        def unwatched(slots: Slots) -> None:
            plain = list(slots)
            view(plain)
            slots[out] = plain[out]

        return unwatched

    def launch(self, kernel: BoundKernel) -> Closure:
        number = len(self.kernels)
        self.kernels.append(kernel)

        def launch(slots: Slots) -> None:
            plain, words = list(slots), kernel.call.words
            for param, slot in kernel.moving:
                words[param] = plain[slot].data_ptr()
            kernel.write_numbers(plain)
            node = self.maker.kernel(kernel.call, kernel.stream)
            own = _seen_as_words(bytearray(_seen_as_words(words)))
            self.nodes[number] = _CapturedKernel(node, own, _numbers(kernel, plain))

        return launch

    def root(self, slot: int) -> tuple[int, int]:
        """Returns (the slot that a slot is a view of, in the end, bytes from there)."""
        nbytes = 0
        while slot in self.origins:
            slot, more = self.origins[slot]
            nbytes += more
        return slot, nbytes


def _seen_as_words(memory: Any) -> memoryview:
    """Returns memory as a kernel's words, 8 bytes each, which can be copied at once."""
    return memoryview(memory).cast("B").cast("Q")


def _exact(x: Any) -> object:
    """Returns what is equal for numbers that are alike in every bit: 0.0 == -0.0, and NaN is not
    itself."""
    return x if x and x == x and not isinstance(x, complex) else repr(x)


def _numbers(kernel: BoundKernel, slots: Slots) -> list[object] | None:
    """Returns the scalars of a run that a kernel reads, to be compared; None where it reads
    none."""
    numbers = kernel.numbers(slots)
    return None if numbers is None else list(map(_exact, numbers))


@dataclass
class _CapturedKernel:
    """A captured kernel, its words (as `_seen_as_words`), and the numbers among them
    (`_numbers`)."""

    node: object
    words: memoryview
    numbers: list[object] | None


class Replayed(NamedTuple):
    """What a graph's run consists of, for the compiled runner; names are those of `Replays`."""

    replays: Replays
    graphs: dict[Hashable, _Captured]
    keys: tuple[int, ...]
    choices: Callable[[], tuple[object, ...]] | None
    moving: tuple[int, ...]
    readers: tuple[tuple[tuple[int, int, int], ...], ...]
    kernels: tuple[tuple[LaunchCall, memoryview], ...]
    views: tuple[Closure, ...]
    nothing: dict[int, torch.Tensor]


@dataclass
class _Captured:
    """A graph, where it finds the tensors that only kernels read, and what lives as long as it."""

    graph: Graph
    nodes: dict[int, _CapturedKernel]
    places: list[int]
    held: list[object]
    # The same graph again, which finds these tensors elsewhere; how often they had moved.
    twins: list[_Captured] = field(default_factory=list["_Captured"])
    moves: int = 0


class RepeatedPlan(Protocol):
    """The part of a plan that its graphs read (`hostir.runtime.plan.Plan` says what each name
    means).
    """

    @property
    def backends(self) -> tuple[Backend, ...]: ...
    @property
    def vote(self) -> Vote | None: ...
    @property
    def steps(self) -> tuple[tuple[Step, Op | None], ...]: ...
    @property
    def streams(self) -> Streams | None: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def inputs(self) -> int: ...
    @property
    def made(self) -> Mapping[int, object]: ...
    @property
    def outputs(self) -> tuple[int, ...]: ...


class Replays:
    """The graphs of a plan on one stream, and the reason where there are none."""

    def __init__(
        self,
        plan: RepeatedPlan,
        memory: dict[int, torch.Tensor],
        steps: int,
        *,
        stream: int,
        graphs: Callable[[], GraphMaker],
    ) -> None:
        """`memory` has the tensors of fixed slots; of so many steps, something is left to do.
        Runs begin on `stream`, and what `graphs` returns captures them."""
        self._plan, self._memory = plan, memory
        self._is_long = steps >= MIN_STEPS
        self._stream, self._make = stream, graphs
        self._binding: CaptureBinding | None = None
        self._actions: list[Closure] = []
        self._graphs: Recent[Hashable, _Captured] = Recent(MAX_GRAPHS)
        self._seen: Recent[Hashable, int] = Recent(MAX_KEYS)
        # What this rank tells others in votes, by its own key.
        self._told: dict[Hashable, int] = {}
        # Those of its numbers that stand in the key of a graph.
        self._agreed: set[int] = set()
        self._is_full = False
        self._captures = self._misses = 0
        self._generations = [b.generation for b in self._plan.backends]
        # All backends of a rank count calls in one ledger: one of them, and what a run counts.
        self._counting = plan.backends[:1]
        self._calls: list[Counter[Calls]] = []
        # Slots of the key: tensors, then numbers. None before the first capture.
        self._key_slots: tuple[list[int], list[int]] | None = None
        # The tensors that only kernels read, and who reads each: (kernel, parameter, bytes from
        # there).
        self._moving: list[int] = []
        self._readers: list[list[tuple[int, int, int]]] = []
        # The kernels that read scalars of the run, and the words of all.
        self._numbered: list[int] = []
        self._words: list[memoryview] = []
        # What gives outputs their places: views of buffers and inputs, and tensors of no elements.
        self._views: list[Closure] = []
        self._nothing: dict[int, torch.Tensor] = {}
        # What torch's calls depend on besides; None where there are none.
        self._choices: Callable[[], tuple[object, ...]] | None = None
        # Why nothing more is captured; "" while it may be. And why the last capture was put off.
        self.why_not = self.why_not_now = ""

    def describe(self) -> str:
        """Returns what is captured, or why nothing is."""
        if self._key_slots is None or not self._graphs.size():
            why = self.why_not or self.why_not_now or "it has not run often enough"
            return f"not captured: {why}"
        fixed = sum(map(len, self._key_slots))
        return (
            f"captured: {self._graphs.size()} graph(s) of {len(self._actions)} steps, chosen by "
            f"{fixed} of the inputs and outputs; {len(self._moving)} are replaced in kernels"
            + (f"; no more are captured: {self.why_not}" if self.why_not else "")
        )

    def run(self, slots: Slots, stream: int) -> bool:
        """Repeats a run by a graph, where there is one for these tensors; False where not.

        The slots hold the inputs and the buffers that outlive the run.
        """
        vote = self._plan.vote
        if self.why_not and (vote is not None or self._key_slots is None):
            if vote is not None:
                vote.ask(STEP_BY_STEP)
            return False
        backends = self._plan.backends
        if backends and [b.generation for b in backends] != self._generations:
            self.forget()
        key = self._key(slots)
        if vote is not None and (told := vote.ask(self._saying(key))) is not None:
            if STEP_BY_STEP in told:
                return False
            key = told
        captured = self._graphs.get(key) or self._graphs.recall(key)
        if captured is None:
            captured = self._consider(key, slots)
            if captured is None:
                return False
        else:
            self._misses = 0
            if backends:
                backends[0].enter_again(self._calls[0])
        try:
            graph = self._updated(captured, slots).graph
            if torch_profiler._is_profiler_enabled:  # pyright: ignore[reportPrivateUsage]
                with range_of_graph([op for _, op in self._plan.steps]):
                    graph.launch(stream)
            else:
                graph.launch(stream)
        except BaseException:
            if vote is not None:
                vote.take_back()
            raise
        for view in self._views:
            view(slots)
        for slot, tensor in self._nothing.items():
            slots[slot] = tensor
        return True

    @property
    def never(self) -> bool:
        """Whether nothing has been captured, and nothing will be."""
        return bool(self.why_not) and self._key_slots is None

    def replayed(self) -> Replayed | str:
        """Returns what the compiled runner needs to repeat runs by the graphs, or why it cannot."""
        if self._key_slots is None or self._binding is None:
            return "it has not been captured"
        tensors, numbers = self._key_slots
        if numbers or self._numbered:
            return "numbers are a part of its graphs"
        return Replayed(
            self,
            self._graphs,
            tuple(tensors),
            self._choices,
            tuple(self._moving),
            tuple(map(tuple, self._readers)),
            tuple((k.call, w) for k, w in zip(self._binding.kernels, self._words, strict=True)),
            tuple(self._views),
            self._nothing,
        )

    def forget(self) -> None:
        """Drops what was captured: its communicators go."""
        for graphs in (self._graphs, self._seen):
            graphs.forget()
        # New numbers: others may have kept what they captured together with this rank.
        self._told.clear()
        self._agreed.clear()
        self._is_full = False
        self._generations = [b.generation for b in self._plan.backends]

    def _key(self, slots: Slots) -> Hashable:
        if self._key_slots is None:
            return None
        tensors, numbers = self._key_slots
        key: list[object] = [slots[i].data_ptr() for i in tensors]
        if numbers:
            key += [_exact(slots[i]) for i in numbers]
        if self._choices is not None:
            key += self._choices()
        return tuple(key)

    def _saying(self, key: Hashable) -> int:
        """Returns what to tell the other ranks of a run: once they capture, this one must, too."""
        number = self._number(key)
        if number in self._agreed or not (others := USERS.others()):
            return number
        self.why_not_now = _beside(others)
        return STEP_BY_STEP

    def _number(self, key: Hashable) -> int:
        """Returns the number that stands for a key of this rank in votes."""
        number = self._told.get(key)
        if self._is_full or (number is None and len(self._told) >= MAX_KEYS // 2):
            self.forget()
            number = None
        if number is None:
            number = self._told[key] = next(_NUMBERS)
        return number

    def _consider(self, key: Hashable, slots: Slots) -> _Captured | None:
        """Captures these tensors' run if it has come often enough."""
        if self.why_not:
            return None
        seen = self._seen[key] = (self._seen.recall(key) or 0) + 1
        # Other ranks must not find what this one has dropped: where they vote, all goes at once.
        kept = (self._seen, MAX_KEYS), (self._graphs, MAX_GRAPHS)
        self._is_full = any(len(entries) >= limit // 2 for entries, limit in kept)
        self._misses += 1
        if seen <= (RUNS_BEFORE if self._is_long else RUNS_BEFORE_FEW):
            if self._misses > MAX_MISSES:
                self.why_not = "inputs and outputs lie elsewhere in each run"
            return None
        captured = None
        try:
            if self._captures == MAX_CAPTURES:
                raise _Refused(f"{MAX_CAPTURES} were captured already")
            with USERS.alone() as others:
                if others:
                    raise _Postponed(_beside(others))
                captured = self._capture(slots)
                self._captures += 1
        except _Refused as refused:
            self.why_not = str(refused)
        except _Postponed as postponed:
            self.why_not_now, self._seen[key] = str(postponed), 0
        vote, mine = self._plan.vote, self._key(slots)
        told = None
        if vote is not None:
            told = vote.ask(NOT_CAPTURED if captured is None else self._number(mine))
        if vote is not None and told is not None and NOT_CAPTURED in told:
            if captured is not None:
                for backend, counted in zip(self._counting, self._calls, strict=True):
                    backend.enter_again(counted, -1)
                self.why_not_now = "another rank could not capture it"
            self.forget()
            vote.start_over()
            return None
        if captured is not None:
            for backend in self._plan.backends:
                backend.repeated_by(self)
            self._graphs[told or mine] = captured
            if told is not None:
                self._agreed.add(self._told[mine])
        return captured

    def _capture(self, slots: Slots) -> _Captured:
        binding = self._bind()
        watched = _WatchedSlots(slots)
        binding.nodes.clear()
        streams = self._plan.streams
        context = nullcontext() if streams is None else streams.standing_in(binding.maker.stand_in)
        calls: list[Counter[Calls]] = []
        held: list[object] = []
        try:
            with ExitStack() as contexts:
                calls += [contexts.enter_context(b.noting()) for b in self._counting]
                held += [
                    contexts.enter_context(b.capturing(self._stream)) for b in self._plan.backends
                ]
                contexts.enter_context(context)
                graph = binding.maker.capture(self._actions, watched)
            if self._key_slots is None:
                self._understand(binding, watched)
        except Exception as error:  # torch's, the driver's, a library's, or our own
            for backend, counted in zip(self._counting, calls, strict=False):
                backend.enter_again(counted, -1)
            if isinstance(error, _Refused):
                raise
            raise _Refused(f"{type(error).__name__}: {error}".partition("\n")[0]) from error
        self._calls = calls
        places = [slots[i].data_ptr() for i in self._moving]
        return _Captured(graph, dict(binding.nodes), places, held)

    def _bind(self) -> CaptureBinding:
        if self._binding is not None:
            return self._binding
        try:
            maker = self._make()
        except KernelError as error:
            raise _Refused(str(error)) from error
        plan, memory = self._plan, dict(self._memory)
        binding = CaptureBinding(plan.device, maker.stream, memory, maker=maker)
        with lasting():
            actions = [(step.bind(binding), op) for step, op in plan.steps]
        self._actions = [self._after_flags(a, op) for a, op in actions if a is not None]
        if len(binding.kernels) < len(self._actions):
            self._choices = arithmetic_choices()
        self._binding = binding
        return binding

    def _after_flags(self, action: Closure, op: Op | None) -> Closure:
        """Lets nothing but further transfers come between a transfer and its flags."""
        flushes = [backend.flush for backend in self._plan.backends]
        if not flushes or isinstance(op, P2PCommunication | SetCurrentStream):
            return action

        def after_flags(slots: Slots) -> None:
            for flush in flushes:
                flush()
            action(slots)

        return after_flags

    def _understand(self, binding: CaptureBinding, watched: _WatchedSlots) -> None:
        """Tells which tensors of a run a graph can find in other places."""
        plan = self._plan
        movable = {*range(plan.inputs), *plan.made}
        plain = list(watched)
        views: dict[int, Closure] = {}
        for slot in plan.outputs:
            root, _ = binding.root(slot)
            if root not in movable:
                if plain[slot].numel():
                    raise _Refused("an output is allocated by a step of its own")
                self._nothing[slot] = plain[slot]
                continue
            chain: list[int] = []
            while slot in binding.origins:
                chain.append(slot)
                slot, _ = binding.origins[slot]
            views.update((s, binding.views[s]) for s in reversed(chain))
        self._views = list(views.values())
        rigid = {binding.root(i)[0] for i in watched.read} & movable
        tensors = {i for i in movable if isinstance(plain[i], torch.Tensor)}
        self._key_slots = sorted(rigid & tensors), sorted(rigid - tensors)
        loose = tensors - rigid
        readers: dict[int, list[tuple[int, int, int]]] = {}
        for number, kernel in enumerate(binding.kernels):
            for param, slot in kernel.moving:
                root, nbytes = binding.root(slot)
                if root in loose:
                    readers.setdefault(root, []).append((number, param, nbytes))
        self._moving = sorted(readers)
        self._readers = [readers[root] for root in self._moving]
        self._numbered = [i for i, k in enumerate(binding.kernels) if k.read is not None]
        self._words = [_seen_as_words(kernel.call.words) for kernel in binding.kernels]

    def _updated(self, captured: _Captured, slots: Slots) -> _Captured:
        """Returns a graph, or a twin of it, whose kernels know where tensors lie, and the numbers
        of this run."""
        places = [slots[i].data_ptr() for i in self._moving]
        if places != captured.places:
            captured = self._twin(captured, places)
        if places != captured.places or self._numbered:
            self._update(captured, places, slots)
        return captured

    def _twin(self, captured: _Captured, places: list[int]) -> _Captured:
        """Returns the one of a graph and its twins that is to find its tensors in these places."""
        for twin in captured.twins:
            if twin.places == places:
                return twin
        captured.moves += 1
        if captured.moves <= MOVES_BEFORE or len(captured.twins) == MAX_TWINS:
            return captured
        assert self._binding is not None
        nodes: dict[int, _CapturedKernel] = {}
        twin = _Captured(captured.graph.twin(), nodes, list(captured.places), captured.held)
        # It has the words of the capture, which may be others by now.
        for number, node in captured.nodes.items():
            words = _seen_as_words(bytearray(node.words))
            nodes[number] = _CapturedKernel(node.node, words, node.numbers)
            self._words[number][:] = words
            twin.graph.update(node.node, self._binding.kernels[number].call)
        captured.twins.append(twin)
        return twin

    def _update(self, captured: _Captured, places: list[int], slots: Slots) -> None:
        """Tells the kernels of a graph where tensors lie, and the numbers of this run."""
        assert self._binding is not None
        nodes, kernels = captured.nodes, self._binding.kernels
        changed: set[int] = set()
        for readers, old, place in zip(self._readers, captured.places, places, strict=True):
            if place != old:
                for number, param, nbytes in readers:
                    nodes[number].words[param] = place + nbytes
                    changed.add(number)
        captured.places = places
        for number in self._numbered:
            numbers = _numbers(kernels[number], slots)
            if numbers != nodes[number].numbers:
                nodes[number].numbers = numbers
                changed.add(number)
        for number in changed:
            kernel, node, words = kernels[number], nodes[number], self._words[number]
            words[:] = node.words
            kernel.write_numbers(slots)
            node.words[:] = words
            captured.graph.update(node.node, kernel.call)
