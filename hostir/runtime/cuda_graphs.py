"""CUDA graphs of recorded plans: after a few equal runs, one driver call launches a whole run. A
plan is the list of recorded steps, such as kernel launches, that repeat a run.

A graph contains the tensor addresses with which it was captured. There are two kinds of addresses:

- Addresses that only generated kernels use are replaced before a launch, if a tensor has moved.
- Addresses in torch calls and communications cannot be replaced, and form the *key* of a graph. A
  plan has one graph per key, captured when a key recurs. Other runs go step by step.

Outputs are new tensors in each run, as without graphs, so no result of an earlier run is
overwritten. Intermediates are stored in the plan's arena, a buffer that its runs use one after
another.

If other ranks copy out of this rank's memory, either all ranks launch graphs in a run or none does.
The ranks vote: each sends a number for its own key, and the numbers of all ranks form the key.
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

# Runs with one key before it is captured; more runs for short plans, where a graph saves little.
RUNS_BEFORE, RUNS_BEFORE_FEW = 2, 16
# Plans with fewer steps gain little from a graph, or nothing if some step is no kernel.
MIN_STEPS = 3
# Copies of a graph, for tensors that alternate between addresses; moves before a copy is made.
MAX_TWINS, MOVES_BEFORE = 3, 8
# Graphs of one plan on one stream; keys whose runs are counted; captures in total.
MAX_GRAPHS, MAX_KEYS, MAX_CAPTURES = 256, 1024, 512
# Consecutive runs without a graph, after which no more graphs are captured.
MAX_MISSES = 512
# The numbers that this process sends in votes: each stands for one key of one `Replays`.
_NUMBERS = count(FIRST_GRAPH)


def gains_nothing(steps: int, kernels: int) -> str:
    """Returns the reason why a CUDA graph would not make the runs of a program faster; "" if a
    graph would.

    `steps` is the number of recorded steps of a run, and `kernels` is how many of them launch a
    kernel. A graph saves nothing if the run has few steps, and not all of them launch a kernel.
    """
    is_slower = steps < (1 if steps == kernels else MIN_STEPS)
    return f"a CUDA graph would not make {steps} step(s) faster" if is_slower else ""


class _Refused(Exception):
    """Raised if the recorded steps of a program will never be captured as a CUDA graph. The message
    is the reason.
    """


class _Postponed(Exception):
    """Raised with the reason why a program's recorded steps cannot be captured as a CUDA graph at
    present, but perhaps later.
    """


def _beside(threads: Sequence[str]) -> str:
    return f"the threads {', '.join(threads)} run programs, too"


class _WatchedSlots(list[Any]):
    """The list of a run's values while the run is captured as a CUDA graph. It notes which values
    are read.

    `read` collects the positions (slots) of the tensors that the recorded steps read. The addresses
    of these tensors are then part of the graph.
    """

    def __init__(self, slots: Slots) -> None:
        super().__init__(slots)
        self.read: set[int] = set()

    def __getitem__(self, i: Any) -> Any:
        self.read.add(i)
        return super().__getitem__(i)


@dataclass(frozen=True)
class CaptureBinding(Binding):
    """Turns the recorded steps of a program into functions that a CUDA graph can capture.

    It also collects the launched kernels in `kernels`, and the views in `origins`: for each view,
    (the viewed tensor, offset in bytes). By this offset, the address of a view is computed if the
    viewed tensor has moved since the capture. Tensors are identified by their slots, positions in
    the list of a run's values.
    """

    maker: GraphMaker = field(kw_only=True)
    kernels: list[BoundKernel] = field(default_factory=list[BoundKernel])
    # The graph nodes of the current capture, by the number of their kernel.
    nodes: dict[int, _CapturedKernel] = field(default_factory=dict[int, Any])
    origins: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    views: dict[int, Closure] = field(default_factory=dict[int, Closure])

    def raw(self, stream: int | None) -> int:
        """Returns the raw handle of the stream on which a step is captured, in place of the
        program's stream `stream`. The argument None means the stream on which runs begin.
        """
        return self.stream if stream is None else self.maker.stand_in(stream)

    def view(self, source: int, out: int, view: Closure, nbytes: int) -> Closure:
        """Records that slot `out` is a view of slot `source`, and begins `nbytes` bytes after the
        start of the source. Slots are positions in the list of a run's values.

        Returns a function that makes the view in a run, by a call of `view`. The call is not
        recorded as a read of the source, because a view alone puts no address into the graph.
        """
        self.origins[out] = source, nbytes
        self.views[out] = view

        def unwatched(slots: Slots) -> None:
            plain = list(slots)
            view(plain)
            slots[out] = plain[out]

        return unwatched

    def launch(self, kernel: BoundKernel) -> Closure:
        """Returns a function that adds the launch of `kernel` to the graph that is being captured.

        The kernel's arguments are copied, so that later runs can replace addresses and scalars.
        """
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
        """Returns (slot, offset in bytes) of the tensor of which the tensor in `slot` is a view.
        Slots are positions in the list of a run's values.

        A view of a view is followed to the first tensor. For a tensor that is no view, returns its
        own slot and 0.
        """
        nbytes = 0
        while slot in self.origins:
            slot, more = self.origins[slot]
            nbytes += more
        return slot, nbytes


def _seen_as_words(memory: Any) -> memoryview:
    """Returns `memory`, the packed arguments of a kernel, as 8-byte words.

    Such words are fast to copy.
    """
    return memoryview(memory).cast("B").cast("Q")


def _exact(x: Any) -> object:
    """Returns a key of the number `x`. Two keys are equal only if the numbers have equal bits.

    The numbers themselves cannot be keys, because 0.0 == -0.0 and NaN != NaN.
    """
    return x if x and x == x and not isinstance(x, complex) else repr(x)


def _numbers(kernel: BoundKernel, slots: Slots) -> list[object] | None:
    """Returns the scalars that a kernel receives in a run, in a form in which equality means equal
    bits (see `_exact`). If they are equal to those of the last run, the kernel's arguments need no
    update.

    Returns None if the kernel receives the same scalars in all runs.
    """
    numbers = kernel.numbers(slots)
    return None if numbers is None else list(map(_exact, numbers))


@dataclass
class _CapturedKernel:
    """One kernel launch in a captured CUDA graph, with its current arguments.

    - `node`: the driver's handle of the launch in the graph.
    - `words`: the packed arguments of the kernel, as 8-byte words.
    - `numbers`: the scalars in these arguments, in the form of `_exact`, to notice changes; None if
      no scalar ever changes.
    """

    node: object
    words: memoryview
    numbers: list[object] | None


class Replayed(NamedTuple):
    """The data from which the compiled runner (C code) launches the CUDA graphs of a program
    without a call of Python. It reads the fields by name.
    """

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
    """A captured CUDA graph, with the addresses that its kernels have at present.

    - `nodes`: the kernel launches in the graph, by the number of the kernel among all kernels that
      the recorded steps launch.
    - `places`: the addresses of the tensors that may move between runs, in the order of the tensors
      in the list of a run's values.
    - `held`: objects that must live as long as the graph.
    """

    graph: Graph
    nodes: dict[int, _CapturedKernel]
    places: list[int]
    held: list[object]
    # Copies of the graph with other addresses; and how often tensors have moved so far.
    twins: list[_Captured] = field(default_factory=list["_Captured"])
    moves: int = 0


class RepeatedPlan(Protocol):
    """The attributes of a plan (`hostir.runtime.plan.Plan`, the recorded steps of a program) that
    its CUDA graphs need.
    """

    @property
    def backends(self) -> tuple[Backend, ...]:
        """The communication backends that the recorded steps of the program use, such as NCCL."""
        ...

    @property
    def vote(self) -> Vote | None:
        """The vote by which all ranks together choose a run's CUDA graph; None if each rank chooses
        alone, because no rank copies out of another's memory.
        """
        ...

    @property
    def steps(self) -> tuple[tuple[Step, Op | None], ...]:
        """The recorded steps of the program, each with the op that it carries out; None for a step
        that belongs to no single op.
        """
        ...

    @property
    def streams(self) -> Streams | None:
        """The streams of the program; None if the program stays on the stream on which a run
        begins.
        """
        ...

    @property
    def device(self) -> torch.device:
        """The device on which the tensors of the program are stored."""
        ...

    @property
    def inputs(self) -> int:
        """The number of the program's inputs, which are first in the list of a run's values."""
        ...

    @property
    def made(self) -> Mapping[int, object]:
        """The allocations of buffers that are still used after a run, such as outputs. The key is
        the position of the buffer's tensor in the list of a run's values.
        """
        ...

    @property
    def outputs(self) -> tuple[int, ...]:
        """The positions of the outputs in the list of a run's values."""
        ...


class Replays:
    """The CUDA graphs that repeat the recorded steps of a program on one stream.

    A graph contains tensor addresses. The addresses that only kernels use can be replaced before a
    launch. Each graph serves the runs in which all other addresses are those of the captured run.
    If the steps cannot be captured, the object has the reason instead.
    """

    def __init__(
        self,
        plan: RepeatedPlan,
        memory: dict[int, torch.Tensor],
        steps: int,
        *,
        stream: int,
        graphs: Callable[[], GraphMaker],
    ) -> None:
        """Prepares an object without graphs, for runs of `plan` (recorded steps) that begin on
        `stream`.

        - `memory`: the tensors that are the same in all runs, by position in the list of a run's
          values.
        - `steps`: the number of the plan's steps that do something in a run.
        - `graphs`: a function that returns the object which captures runs as graphs.
        """
        self._plan, self._memory = plan, memory
        self._is_long = steps >= MIN_STEPS
        self._stream, self._make = stream, graphs
        self._binding: CaptureBinding | None = None
        self._actions: list[Closure] = []
        self._graphs: Recent[Hashable, _Captured] = Recent(MAX_GRAPHS)
        self._seen: Recent[Hashable, int] = Recent(MAX_KEYS)
        # The numbers that this rank sends in votes, by its own key.
        self._vote_numbers: dict[Hashable, int] = {}
        # Those numbers of this rank that are part of the key of a graph.
        self._agreed: set[int] = set()
        self._is_full = False
        self._captures = self._misses = 0
        self._generations = [b.generation for b in self._plan.backends]
        # All backends of a rank share one counter of calls, so one backend serves to read it.
        # `_calls` has the counts of the captured run.
        self._counting = plan.backends[:1]
        self._calls: list[Counter[Calls]] = []
        # Slots of the key: tensors, then numbers. None before the first capture.
        self._key_slots: tuple[list[int], list[int]] | None = None
        # The slots of tensors that only kernels read. For each such slot, the kernel arguments that
        # have its address: (kernel, parameter, offset in bytes).
        self._moving: list[int] = []
        self._readers: list[list[tuple[int, int, int]]] = []
        # The kernels that read scalars of the run; and the argument words of all kernels.
        self._numbered: list[int] = []
        self._words: list[memoryview] = []
        # How outputs get their tensors: views of buffers and inputs, and empty tensors.
        self._views: list[Closure] = []
        self._nothing: dict[int, torch.Tensor] = {}
        # Settings of torch on which its calls depend; None if the plan has no calls of torch.
        self._choices: Callable[[], tuple[object, ...]] | None = None
        # Why no more graphs are captured ("" while they may be), and why the last capture was
        # postponed.
        self.why_not = self.why_not_now = ""

    def describe(self) -> str:
        """Returns one line of text that says how many CUDA graphs of the program are captured, or
        why there are none.
        """
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
        """Launches the CUDA graph that fits the tensors of this run. Returns False if none fits, so
        that the caller must carry out the recorded steps one by one.

        `slots` is the list of the run's values, with the inputs and the newly allocated outputs. If
        runs with tensors at these addresses are frequent, a new graph is captured and launched.
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
        if vote is not None and (votes := vote.ask(self._own_vote(key))) is not None:
            if STEP_BY_STEP in votes:
                return False
            key = votes
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
        """Whether the recorded steps have no CUDA graph and will get none."""
        return bool(self.why_not) and self._key_slots is None

    def replayed(self) -> Replayed | str:
        """Returns the data with which the compiled runner (C code) launches the CUDA graphs.

        If the compiled runner cannot launch these graphs, returns the reason as text.
        """
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
        """Drops all CUDA graphs of the recorded steps, for example because the communicators that
        they contain are closed.
        """
        for graphs in (self._graphs, self._seen):
            graphs.forget()
        # Old numbers must not recur: other ranks may keep graphs captured together with this rank.
        self._vote_numbers.clear()
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

    def _own_vote(self, key: Hashable) -> int:
        """Returns the number that this rank sends in the vote before a run. By the vote, all ranks
        choose a CUDA graph together, or none.

        The number stands for `key`, the values (such as tensor addresses) that this rank's graph
        cannot replace. In one case it is STEP_BY_STEP, a vote for no graph: if the ranks have not
        yet chosen a graph for `key`, and other threads run programs now, so that this rank can
        capture no graph.
        """
        number = self._number(key)
        if number in self._agreed or not (others := USERS.others()):
            return number
        self.why_not_now = _beside(others)
        return STEP_BY_STEP

    def _number(self, key: Hashable) -> int:
        """Returns the number that represents `key` when the ranks vote for a CUDA graph. The key
        has the tensor addresses that this rank's graph cannot replace.

        A new key gets a new number. The ranks compare the numbers instead of the keys, because the
        addresses are those of one process.
        """
        number = self._vote_numbers.get(key)
        if self._is_full or (number is None and len(self._vote_numbers) >= MAX_KEYS // 2):
            self.forget()
            number = None
        if number is None:
            number = self._vote_numbers[key] = next(_NUMBERS)
        return number

    def _consider(self, key: Hashable, slots: Slots) -> _Captured | None:
        """Captures a CUDA graph for runs with this key, if such runs are frequent enough.

        Runs with equal keys can share a graph. `key` has the values that a graph cannot replace,
        such as tensor addresses. If ranks vote, it has the numbers that all ranks have sent.
        Returns None if no graph is captured, because there were too few such runs, or because this
        rank or another rank cannot capture.
        """
        if self.why_not:
            return None
        seen = self._seen[key] = (self._seen.recall(key) or 0) + 1
        # Other ranks must not use a graph that this rank has dropped. With votes, a full cache is
        # therefore dropped as a whole.
        kept = (self._seen, MAX_KEYS), (self._graphs, MAX_GRAPHS)
        self._is_full = any(len(entries) >= limit // 2 for entries, limit in kept)
        self._misses += 1
        if seen <= (RUNS_BEFORE if self._is_long else RUNS_BEFORE_FEW):
            if self._misses > MAX_MISSES:
                self.why_not = "inputs and outputs have other addresses in each run"
            return None
        captured = None
        try:
            if self._captures == MAX_CAPTURES:
                raise _Refused(f"{MAX_CAPTURES} graphs were captured already")
            with USERS.alone() as others:
                if others:
                    raise _Postponed(_beside(others))
                captured = self._capture(slots)
                self._captures += 1
        except _Refused as refused:
            self.why_not = str(refused)
        except _Postponed as postponed:
            self.why_not_now, self._seen[key] = str(postponed), 0
        vote, own_key = self._plan.vote, self._key(slots)
        votes = None
        if vote is not None:
            votes = vote.ask(NOT_CAPTURED if captured is None else self._number(own_key))
        if vote is not None and votes is not None and NOT_CAPTURED in votes:
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
            self._graphs[votes or own_key] = captured
            if votes is not None:
                self._agreed.add(self._vote_numbers[own_key])
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
                self._classify_slots(binding, watched)
        except Exception as error:  # of torch, the driver, a library or this project
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
        """Returns the function to call in place of `action`, a recorded step, while a CUDA graph is
        captured.

        A transfer signals its peer by writing a flag. The flags of several transfers in a row are
        written together, after the last of them. The returned function therefore first writes the
        flags that are still due, and then does `action`. If `op`, the op of the step, is a transfer
        or a change of streams, more transfers may follow, and `action` itself is returned.
        """
        flushes = [backend.flush for backend in self._plan.backends]
        if not flushes or isinstance(op, P2PCommunication | SetCurrentStream):
            return action

        def after_flags(slots: Slots) -> None:
            for flush in flushes:
                flush()
            action(slots)

        return after_flags

    def _classify_slots(self, binding: CaptureBinding, watched: _WatchedSlots) -> None:
        """Finds out, after the first capture of a CUDA graph, which tensor addresses can be
        replaced in the graph.

        - Torch calls and communications: the addresses that they read are fixed, and form the
          graph's key.
        - Kernels: the addresses that only kernels read can be replaced before a launch.

        `watched` is the list of the captured run's values, which has noted the reads. Raises
        `_Refused` if an output is not a view of an input or of a buffer.
        """
        plan = self._plan
        movable = {*range(plan.inputs), *plan.made}
        plain = list(watched)
        views: dict[int, Closure] = {}
        for slot in plan.outputs:
            root, _ = binding.root(slot)
            if root not in movable:
                if plain[slot].numel():
                    raise _Refused("torch allocates an output anew in each run")
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
        """Returns a CUDA graph whose kernels have the tensor addresses and scalars of this run.
        `slots` is the list of the run's values.

        The result is the graph `captured` or a copy of that graph. If necessary, the addresses and
        scalars in its kernels are replaced.
        """
        places = [slots[i].data_ptr() for i in self._moving]
        if places != captured.places:
            captured = self._twin(captured, places)
        if places != captured.places or self._numbered:
            self._update(captured, places, slots)
        return captured

    def _twin(self, captured: _Captured, places: list[int]) -> _Captured:
        """Returns the CUDA graph to use for tensors at the addresses `places`: the graph `captured`
        or a copy of it.

        If tensors alternate between a few addresses, it is faster to have a copy of the graph for
        each of them than to replace the addresses before each launch. A copy that already has these
        addresses is returned as it is. A new copy is made if tensors have moved often and there are
        few copies. In all other cases, `captured` is returned, and the caller replaces the
        addresses in it.
        """
        for twin in captured.twins:
            if twin.places == places:
                return twin
        captured.moves += 1
        if captured.moves <= MOVES_BEFORE or len(captured.twins) == MAX_TWINS:
            return captured
        assert self._binding is not None
        nodes: dict[int, _CapturedKernel] = {}
        twin = _Captured(captured.graph.twin(), nodes, list(captured.places), captured.held)
        # The new graph has the argument words of the capture. Give it the current ones.
        for number, node in captured.nodes.items():
            words = _seen_as_words(bytearray(node.words))
            nodes[number] = _CapturedKernel(node.node, words, node.numbers)
            self._words[number][:] = words
            twin.graph.update(node.node, self._binding.kernels[number].call)
        captured.twins.append(twin)
        return twin

    def _update(self, captured: _Captured, places: list[int], slots: Slots) -> None:
        """Writes the tensor addresses and the scalars of this run into the kernels of the CUDA
        graph `captured`.

        `slots` is the list of the run's values. `places` are the addresses of the tensors that may
        move between runs.
        """
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
