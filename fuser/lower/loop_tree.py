"""Stages, the loops around each of them, and the tree of loops that several stages share.

A *stage* is an op whose result is stored. Four kinds of results are stored: fusion outputs,
shared-memory tensors, reductions, and local tensors that their consumers do not inline completely.
The result of any other op is computed by each stage that reads it.

The loop nest of a stage is its list `loops`. The stage's buffer is declared inside the outermost
`depth` loops. Every stage that reads the buffer shares these loops.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, NoReturn

from fuser.ir.axis_graph import AxisGraph
from fuser.ir.domain.tensor_domain import IterDomain
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.ops.nodes import LoadStoreOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar, Symbol
from fuser.ir.types import BLOCK_TYPES, GRID_TYPES, MemoryType, ParallelType
from fuser.ops.reference.meaning import REDUCING
from fuser.support.errors import DefinitionError, UnsupportedError, counted

PARALLEL = (*GRID_TYPES, *BLOCK_TYPES)
# The names of thread and block coordinates in kernels.
COORDINATES = {
    ParallelType.grid_x: "bx",
    ParallelType.grid_y: "by",
    ParallelType.grid_z: "bz",
    ParallelType.block_x: "tx",
    ParallelType.block_y: "ty",
    ParallelType.block_z: "tz",
}
StageMemory = Literal["global", "shared", "local", "reduction"]


class NoNestError(Exception):
    """Raised if a local tensor cannot be computed and stored in the loop of its reader in which the
    schedule computes it.

    Lowering then starts again, and the ops that read the tensor compute it themselves.
    """

    def __init__(self, tv: TensorView) -> None:
        super().__init__(str(tv))
        self.tv = tv


def _refuse(stage: Stage, message: str) -> NoReturn:
    """Raises the error for a stage whose loop nest cannot be built. A stage is an op whose result
    is stored.

    Raises:
        NoNestError: the stage is a local tensor, which its readers can compute themselves.
        UnsupportedError: the stage is of another kind. The text is `message`.
    """
    if stage.storage == "local":
        raise NoNestError(stage.tv)
    raise UnsupportedError(f"{stage.tv} {message}")


class Loop:
    """A loop of one stage. A stage is an op whose result is stored.

    Loops of several stages can be joined (`join`): the kernel then has one loop for all of them,
    with one extent, parallel type and symbol. `symbol` is the index, or 0 for a loop of extent 1.
    `is_reduction` says whether this stage reduces the loop's axis. It may differ between the stages
    of joined loops.
    """

    def __init__(self, extent: Scalar, ptype: ParallelType, *, is_reduction: bool) -> None:
        self._extent = extent
        self._ptype = ptype
        self._symbol: Scalar = sc.ZERO
        self._same: Loop | None = None
        self.is_reduction = is_reduction

    @property
    def extent(self) -> Scalar:
        """The number of iterations of this loop. Loops that are one loop in the kernel (`join`)
        have the same number.
        """
        return self.find()._extent

    @property
    def ptype(self) -> ParallelType:
        """The parallel type of this loop. Loops that are one loop in the kernel (`join`) have the
        same type.

        It says who executes the iterations: one thread, in order (serial), or many threads or
        blocks in parallel.
        """
        return self.find()._ptype

    @property
    def symbol(self) -> Scalar:
        """The index of this loop, or 0 for a loop of extent 1. Loops that are one loop in the
        kernel (`join`) have the same index.
        """
        return self.find()._symbol

    @symbol.setter
    def symbol(self, symbol: Scalar) -> None:
        """Sets the index symbol of this loop and of all loops joined with it."""
        self.find()._symbol = symbol

    def find(self) -> Loop:
        """Returns the loop that stores extent, type and index for this loop and all loops that
        `join` has made one with it (union-find).
        """
        loop = self
        while loop._same is not None:
            loop = loop._same
        return loop

    def join(self, other: Loop) -> None:
        """Makes this loop and `other` one loop, with the extent and parallel type of this loop."""
        a, b = self.find(), other.find()
        if a is not b:
            b._same = a

    @property
    def is_parallel(self) -> bool:
        """Whether CUDA blocks or threads execute the iterations in parallel."""
        return self.ptype in COORDINATES

    @property
    def is_trivial(self) -> bool:
        """Whether the kernel needs no loop statement for this loop, because its index is a thread
        or block coordinate, a kernel argument, or always 0.
        """
        is_argument = self.ptype is ParallelType.stream
        return self.is_parallel or is_argument or sc.int_value(self.extent) == 1


@dataclass(eq=False)
class Stage:
    """An op whose result is stored, and the loop nest of the op.

    - `compute_at`: the number of outer loop axes of the tensor whose loops are shared with the
      readers, as the schedule says (compute-at).
    - `reads`: the stages whose buffers this stage reads.
    - `loops`: the loops around the op, from outer to inner, without `vector`.
    - `vector`: the loop over the elements of one vector access, or None.
    - `depth`: the number of loops around the declaration of the buffer.
    - `positions`: for each loop axis of the tensor, the position of its loop in `loops`.
    - `axis_loops`: the loop of each axis, by axis number (id).
    - `reference`: the stage from whose loops this stage takes its loop extents, or None. Set only
      for a broadcast that is computed in the loops of its reader.
    """

    number: int
    op: TensorOp
    storage: StageMemory
    compute_at: int
    reads: tuple[Stage, ...] = ()
    loops: list[Loop] = field(default_factory=list[Loop])
    vector: Loop | None = None
    depth: int = 0
    positions: list[int] = field(default_factory=list[int])
    axis_loops: dict[int, Loop] = field(default_factory=dict[int, Loop])
    reference: Stage | None = None

    @property
    def tv(self) -> TensorView:
        """The first result of the op."""
        return self.op.out_tensor

    @property
    def axes(self) -> tuple[IterDomain, ...]:
        """The axes over which the stage loops, as the schedule has split and merged them."""
        return self.tv.domain.loop

    @property
    def is_reduction(self) -> bool:
        """Whether the op is a reduction, so that its result is stored in an accumulator."""
        return isinstance(self.op, REDUCING)

    @property
    def all_loops(self) -> list[Loop]:
        """All loops of the stage from outer to inner: those of the nest, then the loop over the
        elements of a vector, if there is one.
        """
        return self.loops if self.vector is None else [*self.loops, self.vector]

    @property
    def own_loops(self) -> list[Loop]:
        """The loops inside the declaration of the stage's buffer. Stages that read the buffer need
        not have these loops.
        """
        return self.all_loops[self.depth :]


@dataclass
class Nesting:
    """The stages of a fusion in program order. A stage is an op whose result is stored.

    `stage_of` maps each stored tensor to its stage. `extents` maps a parallel type, such as threads
    along x, to the number of threads or CUDA blocks of a launch.
    """

    fusion: Fusion
    stages: list[Stage]
    stage_of: dict[TensorView, Stage]
    extents: dict[ParallelType, Scalar] = field(default_factory=dict[ParallelType, Scalar])


@dataclass
class Node:
    """A node of the tree of loops: either a loop with its children, or the innermost statements of
    one stage (an op whose result is stored).

    `stages` are all stages in the subtree.
    """

    loop: Loop | None
    stage: Stage | None
    children: list[Node]
    stages: list[Stage]


# ------------------------------------------------------------------ stages
def nest_stages(fusion: Fusion, *, recomputed: Collection[TensorView] = ()) -> Nesting:
    """Selects the ops of a scheduled fusion whose results are stored (stages), and builds the loops
    around each.

    Local tensors in `recomputed` are not stored, although the schedule would allow it: each of
    their readers computes them.
    """
    nesting = Nesting(fusion, [], {})
    frontier: dict[TensorView, tuple[Stage, ...]] = {}
    exprs = fusion.used_exprs()
    for op in exprs:
        operands = [v for v in op.inputs if isinstance(v, TensorView)]
        below = tuple(dict.fromkeys(s for v in operands for s in frontier.get(v, ())))
        stage = _stage_for(fusion, op, len(nesting.stages), recomputed)
        if stage is not None:
            stage.reads = below
            nesting.stages.append(stage)
            nesting.stage_of.update(dict.fromkeys(op.outputs, stage))
        is_buffered = stage is not None and stage.storage != "global"
        frontier.update(dict.fromkeys(op.outputs, (stage,) if is_buffered else below))
    sharing = _Sharing(nesting, _build_nests(nesting))
    for tv, stages in _computed_by(nesting, exprs).items():
        if (tv.compute_at or tv in fusion.inputs) and len(stages) > 1:
            sharing.fuse_readers(tuple(sorted(stages, key=lambda s: s.number)))
    for stage in nesting.stages:
        for read in stage.reads:
            if read.storage == "local" and not read.depth:
                # Each thread reads only its own values, so one loop can produce and consume them.
                sharing.fuse_readers((read, stage))
    _assign_symbols(nesting)
    return nesting


def _computed_by(nesting: Nesting, exprs: Sequence[TensorOp]) -> dict[TensorView, set[Stage]]:
    """Returns, for each tensor, the stages in whose loops the tensor is computed or read. A stage
    is an op whose result is stored.

    A stage may read a tensor directly, or through other tensors that are not stored. The result has
    the tensors in program order.
    """
    found: dict[TensorView, set[Stage]] = {}
    for op in reversed(exprs):
        stage = nesting.stage_of.get(op.out_tensor)
        mine = set() if stage is None else {stage}
        if stage is None or stage.storage == "global":
            for out in op.outputs:
                mine |= found.get(out, set())
                found[out] = mine
        for v in op.inputs:
            if isinstance(v, TensorView):
                found[v] = found.get(v, set()) | mine
    return dict(reversed(found.items()))


def _fits_registers(fusion: Fusion, tv: TensorView, compute_at: int) -> bool:
    """Whether the local tensor `tv` is stored in registers; otherwise each of its readers computes
    it.

    It is stored if the following conditions hold. The outer `compute_at` loops of `tv` are shared
    with its reader; the others are its inner loops.

    - There are shared loops, or an inner loop is parallel, unrolled or vectorised.
    - There are inner loops, and their extents are constant (except over threads and CUDA blocks),
      because registers cannot be addressed at run time.
    """
    own = tv.domain.loop[compute_at:]
    is_scheduled = compute_at > 0 or any(a.ptype is not ParallelType.serial for a in own)
    sizes = [fusion.canonical(a.extent) for a in own if a.ptype not in COORDINATES]
    return bool(own) and is_scheduled and all(sc.int_value(s) is not None for s in sizes)


def _stage_for(
    fusion: Fusion, op: TensorOp, number: int, recomputed: Collection[TensorView]
) -> Stage | None:
    tv = op.out_tensor
    outputs = [o for o in op.outputs if o in fusion.outputs]
    used = [o for o in op.outputs if fusion.uses(o)]
    compute_at = min((o.compute_at for o in used), default=0)
    storage: StageMemory
    if isinstance(op, REDUCING):
        storage = "reduction"
    elif outputs:
        storage, compute_at = "global", 0
    elif tv.memory is MemoryType.shared:
        storage = "shared"
    elif tv.memory is MemoryType.local:
        if tv in recomputed or not _fits_registers(fusion, tv, compute_at):
            return None
        storage = "local"
    else:
        raise UnsupportedError(
            f"{tv} is an intermediate in {tv.memory.text} memory, but a kernel can store "
            "intermediates only in local or shared memory: call set_memory_type"
        )
    return Stage(number, op, storage, compute_at)


# ------------------------------------------------------------------ nests
class _Nests:
    """Builds the loops around all stages (ops whose results are stored), starting from the last
    consumer, because a producer may share the loops of its consumers.
    """

    def __init__(self, nesting: Nesting) -> None:
        self.nesting = nesting
        self.waits = _Waits()
        self._graph: AxisGraph | None = None

    @property
    def graph(self) -> AxisGraph:
        if self._graph is None:
            self._graph = AxisGraph(self.nesting.fusion)
        return self._graph

    def size(self, axis: IterDomain) -> Scalar:
        """Returns the number of iterations of a loop over an axis. For a broadcast axis this is 1,
        even if it is expanded to a larger size.
        """
        return self.nesting.fusion.canonical(axis.extent)

    def new_loop(self, axis: IterDomain) -> Loop:
        return Loop(self.size(axis), axis.ptype, is_reduction=axis.is_reduction())

    def build(self, stage: Stage, readers: Sequence[Stage]) -> None:
        axes = stage.axes
        if not readers or stage.storage == "global":
            stage.loops = [self.new_loop(a) for a in axes]
            stage.positions = list(range(len(axes)))
            stage.depth = _leading(axes) if stage.is_reduction else 0
            stage.axis_loops = {a.number: loop for a, loop in zip(axes, stage.loops, strict=True)}
            self._take_vector(stage)
            return
        if stage.is_reduction and stage.compute_at > _leading(axes):
            raise DefinitionError(
                f"{stage.tv} is inlined at position {stage.compute_at}, which is inside its own "
                f"reduction axes: inline it at position {_leading(axes)} or less"
            )
        self._nest_in(stage, readers[0])
        for other in readers[1:]:
            self._join_prefix(stage, readers[0], other)

    def _nest_in(self, stage: Stage, reader: Stage) -> None:
        places = self.places(stage, reader)
        stage.depth = places[-1] + 1 if places else 0
        if stage.depth > len(reader.loops):
            _refuse(
                stage,
                f"is inlined inside the vectorized axis of {reader.tv}, which is one memory "
                f"access: inline {stage.tv} at an outer position",
            )
        stage.loops = list(reader.loops[: stage.depth])
        shared, own = stage.axes[: stage.compute_at], stage.axes[stage.compute_at :]
        fits = all(
            a.is_broadcast or self.size(a) == reader.loops[p].extent
            for a, p in zip(shared, places, strict=True)
        )
        if fits:
            for axis, place in zip(shared, places, strict=True):
                loop = reader.loops[place]
                if not (axis.is_broadcast and self.size(axis) != loop.extent):
                    stage.axis_loops[axis.number] = loop
            rest = [self.new_loop(a) for a in own]
            stage.axis_loops.update((a.number, loop) for a, loop in zip(own, rest, strict=True))
        else:
            rest = self._promote(stage, reader, own)
        stage.positions = [*places, *range(stage.depth, stage.depth + len(own))]
        stage.loops.extend(rest)
        self._take_vector(stage)

    def _promote(self, stage: Stage, reader: Stage, own: Sequence[IterDomain]) -> list[Loop]:
        """Returns the inner loops of a broadcast op that is computed in the loops of its reader.

        `own` are the loop axes of `stage`, the broadcast, inside the shared loops. They have extent
        1. The returned loops take their extents from the loops of `reader` instead.
        """
        models = reader.all_loops[stage.depth :]
        if stage.storage != "local" or len(models) != len(own):
            _refuse(
                stage,
                f"is inlined into {reader.tv}, but the loops of the two tensors differ: schedule "
                "both alike",
            )
        stage.reference = reader
        return [
            Loop(m.extent, a.ptype, is_reduction=False) for a, m in zip(own, models, strict=True)
        ]

    def places(self, stage: Stage, reader: Stage) -> list[int]:
        """Returns the positions, in the loop nest of `reader`, of the loops that `stage` and
        `reader` share.

        The result has one position for each of the outer loop axes that `stage` shares with its
        readers (`compute_at`).
        """
        shared = stage.axes[: stage.compute_at]
        targets = reader.axes
        if len(shared) > len(targets):
            _refuse(
                stage,
                f"is inlined at position {len(shared)}, but {reader.tv} has only "
                f"{counted(len(targets), 'loop axis')}",
            )
        picks: list[int] = []
        for axis in shared:
            at = picks[-1] + 1 if picks else 0
            picks.append(self._pick(axis, targets, at))
        if picks and picks[-1] >= len(targets):
            _refuse(
                stage,
                f"is inlined at position {len(shared)}, but {reader.tv} does not have these loops: "
                f"inline {stage.tv} at an outer position, or schedule both tensors alike",
            )
        return [reader.positions[p] for p in picks]

    def _pick(self, axis: IterDomain, targets: Sequence[IterDomain], at: int) -> int:
        if at < len(targets) and self.size(axis) == self.size(targets[at]):
            return at
        concrete = self.graph.concretized(axis)
        for p in range(at, len(targets)):
            if self.graph.mapped(axis, targets[p]) or self.graph.find(targets[p]) in concrete:
                return p
        return at

    def _join_prefix(self, stage: Stage, first: Stage, other: Stage) -> None:
        places = self.places(stage, other)
        depth = places[-1] + 1 if places else 0
        if depth != stage.depth:
            _refuse(stage, f"is inlined at different depths in {first.tv} and {other.tv}")
        limit = min(self.waits.limit(first, other), self.waits.limit(other, first))
        if any(level >= limit and not a.is_parallel for level, a in enumerate(first.loops[:depth])):
            _refuse(
                stage,
                f"is inlined into {first.tv} and {other.tv}, but one of these must complete its "
                f"loop before the other begins: inline {stage.tv} at an outer position",
            )
        for a, b in zip(first.loops[:depth], other.loops[:depth], strict=True):
            if a.find() is not b.find() and (a.extent != b.extent or a.ptype is not b.ptype):
                _refuse(
                    stage,
                    f"is shared by {first.tv} and {other.tv}, but their loops differ: "
                    f"{a.ptype.text}{{{a.extent}}} and {b.ptype.text}{{{b.extent}}}",
                )
            a.join(b)

    def _take_vector(self, stage: Stage) -> None:
        """Moves the innermost loop out of the nest, to `stage.vector`, if one vector access
        replaces all its iterations. A stage is an op whose result is stored.

        The schedule must have vectorised the loop, and the stage must load from memory or write to
        memory.
        """
        if not stage.loops or stage.loops[-1].ptype is not ParallelType.vectorize:
            return
        is_inner = len(stage.loops) > stage.depth
        if is_inner and (stage.storage in ("global", "shared") or self._is_load(stage)):
            width = sc.int_value(stage.loops[-1].extent)
            if width is not None and width > 1:
                stage.vector = stage.loops.pop()

    def _is_load(self, stage: Stage) -> bool:
        if not isinstance(stage.op, LoadStoreOp) or stage.storage != "local":
            return False
        source = self.nesting.stage_of.get(stage.op.inp)
        return stage.op.inp in self.nesting.fusion.inputs or (
            source is not None and source.storage == "shared"
        )


def _leading(axes: Sequence[IterDomain]) -> int:
    """Returns the number of axes before the first reduction axis; all axes if none is reduced."""
    return next((k for k, a in enumerate(axes) if a.is_reduction()), len(axes))


def _build_nests(nesting: Nesting) -> _Waits:
    nests = _Nests(nesting)
    readers: dict[Stage, list[Stage]] = {s: [] for s in nesting.stages}
    for s in nesting.stages:
        for read in s.reads:
            readers[read].append(s)
    for s in reversed(nesting.stages):
        nests.build(s, readers[s])
        nests.waits.add(s, readers[s])
    return nests.waits


class _Waits:
    """The largest numbers of outer loops that two stages may share, if one waits for the other's
    result. A stage is an op whose result is stored.

    A stage waits for another if it reads its result, directly or through other stages. The other
    stage must complete its inner loops before the waiting stage begins, in each iteration of the
    shared loops. The two therefore cannot share these inner loops. Stages are added from consumers
    to producers: all readers of a stage before the stage. The `depth` of an added stage no longer
    changes.
    """

    def __init__(self) -> None:
        self._limits: dict[Stage, dict[Stage, float]] = {}

    def add(self, stage: Stage, readers: Sequence[Stage]) -> None:
        found: dict[Stage, float] = {}
        for reader in readers:
            for target, through in ((reader, float("inf")), *self._limits[reader].items()):
                limit = min(through, stage.depth)
                found[target] = min(found.get(target, limit), limit)
        self._limits[stage] = found

    def limits(self, source: Stage) -> dict[Stage, float]:
        """Returns the stages that wait for the result of `source`, each with the largest number of
        outer loops that it may share with `source`. A stage is an op whose result is stored.
        """
        return self._limits[source]

    def limit(self, source: Stage, target: Stage) -> float:
        return self._limits[source].get(target, float("inf"))


class _Sharing:
    """Joins loops of different stages that have equal extents and parallel types into one loop. A
    stage is an op whose result is stored.

    Two loops stay separate if one stage must complete its loop before the other stage can begin.
    """

    def __init__(self, nesting: Nesting, waits: _Waits) -> None:
        self._limits: dict[Stage, dict[Stage, float]] = {s: {} for s in nesting.stages}
        self._members: dict[Loop, set[Stage]] = {}
        for stage in nesting.stages:
            for target, limit in waits.limits(stage).items():
                self._limits[stage][target] = self._limits[target][stage] = limit
            for loop in stage.loops:
                self._members.setdefault(loop.find(), set()).add(stage)

    def fuse_readers(self, stages: tuple[Stage, ...]) -> None:
        """Joins equal outer loops of several stages. The stages compute or read the same value,
        which is then computed only once. A stage is an op whose result is stored.
        """
        first = stages[0]
        for other in stages[1:]:
            for level, (a, b) in enumerate(zip(first.loops, other.loops, strict=False)):
                if a.extent != b.extent or a.ptype is not b.ptype:
                    break
                if a.is_reduction != b.is_reduction and len(first.loops) != len(other.loops):
                    break
                if not self._join(a.find(), b.find(), level):
                    break

    def _join(self, a: Loop, b: Loop, level: int) -> bool:
        """Joins loops `a` and `b`, which have `level` loops around them. Returns whether this was
        possible. A stage is an op whose result is stored.

        The loops stay separate if a stage in one of them must complete the loop before a stage in
        the other can begin.
        """
        if a is b:
            return True
        few, many = sorted((self._members[a], self._members[b]), key=len)
        # Parallel loops always join: each thread executes all its statements in order.
        for stage in () if a.is_parallel else few:
            if any(level >= n and s in many for s, n in self._limits[stage].items()):
                return False
        a.join(b)
        self._members[a] |= self._members.pop(b)
        return True


def _assign_symbols(nesting: Nesting) -> None:
    """Computes how many threads or CUDA blocks a launch has along each parallel axis, and gives
    each loop its index symbol.
    """
    for stage in nesting.stages:
        for loop in stage.all_loops:
            if loop.is_parallel:
                known = nesting.extents.get(loop.ptype, sc.ONE)
                nesting.extents[loop.ptype] = sc.maximum(known, loop.extent)
            elif loop.ptype in (ParallelType.mma, ParallelType.tma) or loop.ptype.is_device:
                raise UnsupportedError(
                    f"{stage.tv} has an axis of parallel type {loop.ptype.text}, which kernels do "
                    "not support"
                )
    numbered: dict[Loop, None] = {}
    for stage in nesting.stages:
        for loop in stage.all_loops:
            loop = loop.find()
            if sc.int_value(loop.extent) == 1 or loop in numbered:
                continue
            if loop.is_parallel:
                extent = nesting.extents[loop.ptype]
                loop.symbol = sc.index(COORDINATES[loop.ptype], extent)
            elif loop.ptype is ParallelType.stream:
                # The loop is on the host: a launch computes one step, whose number the caller
                # passes.
                loop.symbol = stream_index(nesting.fusion, stage.tv)
            else:
                loop.symbol = sc.index(f"k{len(numbered)}", loop.extent)
                numbered[loop] = None


# ------------------------------------------------------------------ the tree
def loop_tree(nesting: Nesting) -> list[Node]:
    """Returns the tree of the loops that stages share, with the stages as leaves. A stage is an op
    whose result is stored.

    At every level, producers come before their consumers.
    """
    return _order(nesting.stages, 0)


def _order(stages: Sequence[Stage], depth: int) -> list[Node]:
    parts: dict[object, list[Stage]] = {}
    for s in stages:
        key: object = s if len(s.loops) == depth else s.loops[depth].find()
        parts.setdefault(key, []).append(s)
    owner = {s: key for key, members in parts.items() for s in members}
    needs = {
        key: {owner[r] for s in members for r in s.reads if r in owner} - {key}
        for key, members in parts.items()
    }
    out: list[Node] = []
    done: set[object] = set()
    waiting = list(parts)
    while waiting:
        key = next((k for k in waiting if needs[k] <= done), None)
        if key is None:
            names = ", ".join(str(s.tv) for k in waiting for s in parts[k])
            raise DefinitionError(
                f"the compute-at positions of {names} contradict each other, because each of these "
                "tensors would have to be computed before another one: inline them at outer "
                "positions"
            )
        waiting.remove(key)
        done.add(key)
        members = parts[key]
        if isinstance(key, Loop):
            out.append(Node(key, None, _order(members, depth + 1), members))
        else:
            out.append(Node(None, members[0], [], members))
    return out


# ----------------------------------------------------------------------
# Kernels whose results have a stream axis: a launch computes one iteration of the host's loop.
#
#     out [stream{3}, 2, 4] = add(x, y)   ->   kernel(x, y, out, streamIdx): rows 2 * streamIdx on
#
# The loop over the axis is not emitted; its index is the kernel's last argument.

_NAME = "streamIdx"


def steps_of(fusion: Fusion) -> Scalar | None:
    """Returns the number of iterations of the stream loop, a loop on the host. One launch of the
    kernel computes one iteration. Returns None if no axis of the fusion is divided over such a
    loop.
    """
    made = (out for op in fusion.exprs for out in op.outputs)
    streams = (a for tv in made for a in tv.domain.loop if a.is_stream)
    return next((fusion.canonical(a.size) for a in streams), None)


def with_stream_index(fusion: Fusion) -> Fusion:
    """Returns a copy of the fusion whose last input is the iteration number of the stream loop.
    This is a loop on the host, of which each launch of the kernel computes one iteration.

    A fusion without an axis for such a loop, or with this input already, is returned itself.
    """
    if steps_of(fusion) is None or _stream_input(fusion) is not None:
        return fusion
    made, _ = fusion.copy()
    # Not an index symbol: the hoister would treat it as variable, but it is constant in a launch.
    made.inputs = [*made.inputs, Symbol(_NAME, DataType.Index, lo=0)]
    return made


def stream_index(fusion: Fusion, tv: TensorView) -> Symbol:
    """Returns the symbol for the iteration number of the stream loop, which is an input of the
    kernel. The stream loop is a loop on the host, of which each launch computes one iteration.

    `tv` is the tensor that the error message names.

    Raises:
        UnsupportedError: the fusion does not have this input.
    """
    found = _stream_input(fusion)
    if found is None:
        raise UnsupportedError(
            f"{tv} has a stream axis, but the kernel has no input for the number of the stream "
            "loop's iteration, so it can run only inside a host program"
        )
    return found


def _stream_input(fusion: Fusion) -> Symbol | None:
    scalars = (v for v in fusion.inputs if isinstance(v, Symbol))
    return next((v for v in scalars if v.name == _NAME), None)
