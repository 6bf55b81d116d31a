"""The checks made once before a program runs: its streams on this rank, and all ranks together.

`hostir.verify` checks the structure after every pass. Races and what ranks do to each other depend
on sizes: they are found for the sizes and numbers that come to a program for the first time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from fuser.ir.fusion import TensorView
from fuser.ir.op import Op, walk
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Number, Scalar, Symbol
from fuser.support import progress
from fuser.support.errors import warn
from fuser.support.lru import Recent
from hostir.analysis.collective_matching import MISPLACED, find_mismatches
from hostir.analysis.collective_matching import OUT_OF_RANGE as OUT_OF_RANGE_ON_RANKS
from hostir.analysis.deadlocks import Teams
from hostir.analysis.races import LEFT, NOT_JOINED, OUT_OF_RANGE, RACE, find_chains, find_races
from hostir.analysis.rank_values import Array, PerRank, np
from hostir.analysis.walker import AllRanks, Walk
from hostir.ir import queries
from hostir.ir.diagnostics import Finding, refuse, report
from hostir.ir.ops import NUMBER_OF_STREAMS, RANK, Communication, Synchronize
from hostir.ir.program import HostIrContainer

# Of more classes of ranks than this, so many are looked at.
MAX_RANKS = 32

# A program by hand may keep parts of tensors in an order of its own, and leave a stream current
# that its caller knows about.
TOLERATED = frozenset({MISPLACED, LEFT})

# A program by hand without any Synchronize leaves it to its caller to order its streams with what
# comes before and after the run: one site, the other one is the caller's.
WITH_CALLER = frozenset({RACE, NOT_JOINED})

# Of one program, so many checks are remembered.
MAX_CHECKED = 1024

# (rank, or None for what the ranks do to each other; given results; what the ops depend on).
_Key = tuple[int | None, frozenset[TensorView], tuple[Number, ...]]


@dataclass
class _Checks:
    """The checks made of a program so far, and the symbols that decide what its ops do."""

    control: tuple[Symbol, ...]
    done: Recent[_Key, bool]


_checked: WeakKeyDictionary[HostIrContainer, _Checks] = WeakKeyDictionary()


def check_before_run(
    program: HostIrContainer,
    values: Mapping[Symbol, Number],
    *,
    rank: int,
    given: Iterable[TensorView] = (),
) -> None:
    """Raises `VerifyError` for a program that would race on this rank, or hang with others.

    A `RuntimeWarning` tells what a program that waits for no stream leaves to its caller.
    Checked once per program, rank, results that the caller gives buffers for, and values on which
    loops, branches, parts and peers depend. Only what is wrong however the program is meant is
    refused (`TOLERATED`).
    """
    checks = _checked.get(program)
    if checks is None:
        control = {NUMBER_OF_STREAMS, *queries.control_symbols(program)} - {RANK}
        known = tuple(s for s in values if s in control)
        checks = _checked[program] = _Checks(known, Recent(MAX_CHECKED))
    done = checks.done
    key = rank, frozenset(given), tuple(values[s] for s in checks.control)
    everyone = (None, *key[1:])
    if done.recall(key):
        return
    progress.stage("checks of streams and ranks")
    found: list[Finding] = []
    if not done.recall(everyone):
        found += find_mismatches(program, values)
    found += find_races(program, values, rank=rank, given=key[1])
    tolerated = TOLERATED
    if done.size() and not program.started():
        # The program is right; the run says which of the caller's numbers is not.
        tolerated |= {OUT_OF_RANGE}
    wrong = [f for f in found if f.kind not in tolerated]
    if not any(isinstance(op, Synchronize) for op in walk(program.ops)):
        for_caller = [f for f in wrong if f.kind in WITH_CALLER and len(f.sites) == 1]
        wrong = [f for f in wrong if f not in for_caller]
        if for_caller and not wrong:
            warn(
                "this program waits for no stream, so its caller has to:\n"
                + report(program, for_caller),
                RuntimeWarning,
            )
    refuse(program, _once(wrong), what="this program must not run")
    done[key] = done[everyone] = True


def findings(
    program: HostIrContainer, values: Mapping[Symbol, Number], *, ranks: Sequence[int] = ()
) -> list[Finding]:
    """Returns what is wrong on any rank or between ranks, and where steps are chained.

    `values` binds the symbols of the inputs and `numberOfStreams`; `ranks` defaults to those of the
    program's meshes.
    """
    ranks = ranks or program.devices() or (0,)
    found = find_mismatches(program, values, ranks=ranks)
    for rank in ranks_to_look_at(program, values, ranks)[0]:
        here = {**values, RANK: rank}
        if races := find_races(program, here, rank=rank) or find_chains(program, here, rank=rank):
            who = f"on rank {rank}: " if len(ranks) > 1 else ""
            return _once(found + [replace(f, what=who + f.what) for f in races])
    return found


def _once(found: Iterable[Finding]) -> list[Finding]:
    """Leaves out what one rank finds out of range where all ranks together have found it."""
    found = list(found)
    known = {f.sites[0][0] for f in found if f.kind == OUT_OF_RANGE_ON_RANKS}
    return [f for f in found if f.kind != OUT_OF_RANGE or f.sites[0][0] not in known]


def ranks_to_look_at(
    program: HostIrContainer, values: Mapping[Symbol, Number], ranks: Sequence[int]
) -> tuple[Sequence[int], int]:
    """Returns the ranks whose streams `findings` looks at, and how many classes of ranks there are:
    of more than `MAX_RANKS` classes it looks at some.
    """
    classes = first_of_each_class(program, ranks, values)
    step = -(-len(classes) // MAX_RANKS)
    chosen = [*classes[::step], *classes[-1:]] if step > 1 else classes
    return chosen, len(classes)


# ----------------------------------------------------------------------
# Which ranks do the same: the race check looks at one rank of each class.
#
# The program is unrolled once for all ranks (`hostir.analysis.walker`), and every scalar that names
# the rank tells ranks apart by its value; so do the meshes that have them, and roots.


def first_of_each_class(
    program: HostIrContainer, ranks: Sequence[int], values: Mapping[Symbol, Number]
) -> list[int]:
    """Returns the first rank of each class; `values` binds the symbols of the inputs."""
    walk_of_all = _RankClasses(program, ranks, dict(values))
    walk_of_all.run(program.ops)
    firsts: list[int] = np.unique(walk_of_all.classes, return_index=True)[1].tolist()
    return [ranks[i] for i in sorted(firsts)]


class _RankClasses(Walk[PerRank]):
    """Splits `classes` [ranks] by what each rank meets; over when each has its own."""

    def __init__(
        self, program: HostIrContainer, ranks: Sequence[int], values: dict[Symbol, Number]
    ) -> None:
        self.domain = AllRanks(ranks, values)
        super().__init__(self.domain)
        self.classes: Array = np.zeros(len(ranks), dtype=np.int64)
        self.is_over = len(ranks) == 1
        self.differing: dict[int, list[Scalar]] = {}
        for mesh in {tv.mesh for tv in program.tensors()} - {None}:
            assert mesh is not None
            self.split(np.isin(self.domain.values.ranks, mesh.devices))
        for op in walk(program.ops):
            scalars = (v for v in (*op.inputs, *op.scalars) if isinstance(v, Scalar))
            self.differing[id(op)] = [x for x in scalars if RANK in sc.symbols(x)]
        self.teams = {
            op.team: Teams(op.team, ranks)
            for op in walk(program.ops)
            if isinstance(op, Communication) and op.root is not None
        }

    def split(self, column: PerRank) -> None:
        """Parts the ranks of a class whose values differ, as far as they are here."""
        here = np.where(self.domain.mask, np.asarray(column), 0)
        both = np.unique(np.stack([self.classes, here]), axis=1, return_inverse=True)
        self.classes = both[1].reshape(-1)
        self.is_over = both[0].shape[1] == len(self.classes)

    def on_region(self, op: Op) -> None:
        """Splits by the bounds or the condition."""
        for x in self.differing[id(op)]:
            self.split(self.domain.value(x))

    def on_op(self, op: Op) -> None:
        """Splits by the scalars of an op, and by who is its root."""
        self.on_region(op)
        if isinstance(op, Communication) and op.root is not None:
            self.split(self.teams[op.team].position == self.domain.value(op.root))
