"""Checks a program before its first run, for races on this rank and for mismatches between all
ranks.

`hostir.verify` checks the structure of a program after every pass. Races and mismatches depend on
sizes. So they are checked before the first run with given sizes, and with given values of the
scalars that decide which ops run.
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
from fuser.support.locks import uncollected
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

# The number of ranks that are checked if there are more classes than this.
MAX_RANKS = 32

# A program built by hand may order the parts of tensors in its own way, and may leave a stream of
# its caller current at its end.
TOLERATED = frozenset({MISPLACED, LEFT})

# A program built by hand without any Synchronize leaves its caller to order the streams with work
# before and after the run. Such a finding has one site, because the other is the caller's.
WITH_CALLER = frozenset({RACE, NOT_JOINED})

# The number of checks that are remembered per program.
MAX_CHECKED = 1024

# (rank, or None for the check between ranks; results with the caller's buffers; control values).
_Key = tuple[int | None, frozenset[TensorView], tuple[Number, ...]]


@dataclass
class _Checks:
    """The checks of one program that have passed, so that later runs skip them.

    `control` lists the program's control symbols: the scalars that decide which ops run, how often,
    and on which stream. `done` has a key for each passed check, with the values of these symbols.
    """

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
    """Raises `VerifyError` if a program has a race on this rank, or if the communications of its
    ranks do not match, so that ranks could wait forever. The evaluator calls this function before
    it runs a program.

    - `values` maps the symbols of the inputs to numbers.
    - `given` are the results for which the caller passes buffers.

    A passed check is repeated only for another `rank`, another set `given`, or other values of the
    scalars that decide which ops run.

    Two kinds of faults (`TOLERATED`) are ignored, because programs built by hand may intend them.
    One is data that a rank stores at another position than the shardings declare. The other is a
    program that does not end on the caller's stream. If a program has no `Synchronize`, its caller
    must order the streams with the work before and after the run. If only this order is missing, a
    `RuntimeWarning` says so instead of an error.
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
    with uncollected:
        if not done.recall(everyone):
            found += find_mismatches(program, values)
        found += find_races(program, values, rank=rank, given=key[1])
    tolerated = TOLERATED
    if done.size() and not program.started():
        # The program passed before, so a number of the caller is wrong. The run names it.
        tolerated |= {OUT_OF_RANGE}
    wrong = [f for f in found if f.kind not in tolerated]
    if not any(isinstance(op, Synchronize) for op in walk(program.ops)):
        for_caller = [f for f in wrong if f.kind in WITH_CALLER and len(f.sites) == 1]
        wrong = [f for f in wrong if f not in for_caller]
        if for_caller and not wrong:
            warn(
                "this program has no Synchronize, so its caller must make the streams wait for "
                "each other before and after the run:\n" + report(program, for_caller),
                RuntimeWarning,
            )
    refuse(program, _once(wrong), what="the checks found faults, so this program must not run")
    done[key] = done[everyone] = True


def findings(
    program: HostIrContainer, values: Mapping[Symbol, Number], *, ranks: Sequence[int] = ()
) -> list[Finding]:
    """Returns the faults of a program: races on single ranks, and mismatches between ranks. Also
    returns waits that needlessly serialise the iterations of a loop. `python -m hostir verify`
    prints these findings.

    `values` maps the symbols of the inputs and `numberOfStreams` to numbers. `ranks` defaults to
    the ranks of the program's meshes. Single ranks are checked until one has a fault, and the
    faults of this rank are returned.
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
    """Removes findings (faults) that were reported twice: by the check of a single rank, and by the
    check of all ranks. For example, both report an index that is out of range. Only the report of
    the check of all ranks is kept.
    """
    found = list(found)
    known = {f.sites[0][0] for f in found if f.kind == OUT_OF_RANGE_ON_RANKS}
    return [f for f in found if f.kind != OUT_OF_RANGE or f.sites[0][0] not in known]


def ranks_to_look_at(
    program: HostIrContainer, values: Mapping[Symbol, Number], ranks: Sequence[int]
) -> tuple[Sequence[int], int]:
    """Returns those of `ranks` on which `findings` looks for races, and the number of classes of
    ranks. Ranks of one class run the same ops on the same sizes, so only one rank of each class is
    checked.

    If there are more than `MAX_RANKS` classes, only some of the classes are checked.
    """
    classes = first_of_each_class(program, ranks, values)
    step = -(-len(classes) // MAX_RANKS)
    chosen = [*classes[::step], *classes[-1:]] if step > 1 else classes
    return chosen, len(classes)


# ----------------------------------------------------------------------
# Classes of ranks that run the same program: the race check uses one rank of each class.
#
# The program is unrolled once for all ranks (`hostir.analysis.walker`). Ranks are in one class if
# all scalars that depend on the rank have equal values, and if they are in the same meshes and are
# roots of the same collectives.


def first_of_each_class(
    program: HostIrContainer, ranks: Sequence[int], values: Mapping[Symbol, Number]
) -> list[int]:
    """Divides the ranks into classes that would have the same races, and returns the first rank of
    each class. Only these ranks need a check for races.

    All scalars of the program have equal values on all ranks of a class. These ranks are also in
    the same meshes, and are roots of the same collectives. `values` maps the symbols of the inputs
    to numbers.
    """
    walk_of_all = _RankClasses(program, ranks, dict(values))
    walk_of_all.run(program.ops)
    firsts: list[int] = np.unique(walk_of_all.classes, return_index=True)[1].tolist()
    return [ranks[i] for i in sorted(firsts)]


class _RankClasses(Walk[PerRank]):
    """Follows a program for all ranks at once, and divides the ranks into classes on which all
    scalars of the program have equal values. Ranks of one class run the same ops on the same sizes.
    `classes` has the class number of each rank.

    The walk ends early when each rank has a class of its own.
    """

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
        """Divides the classes of ranks further by a value: ranks that run the current op and have
        different values in `column` get different classes.
        """
        here = np.where(self.domain.mask, np.asarray(column), 0)
        both = np.unique(np.stack([self.classes, here]), axis=1, return_inverse=True)
        self.classes = both[1].reshape(-1)
        self.is_over = both[0].shape[1] == len(self.classes)

    def on_region(self, op: Op) -> None:
        """Handles a loop or branch, before its ops. Divides the classes of equal ranks by the
        bounds of the loop or the condition of the branch, because ranks with different values run
        different ops.
        """
        for x in self.differing[id(op)]:
            self.split(self.domain.value(x))

    def on_op(self, op: Op) -> None:
        """Handles an op in one loop iteration. Divides the classes of equal ranks further: ranks on
        which a scalar of the op has different values get different classes, and so does the root of
        a collective.
        """
        self.on_region(op)
        if isinstance(op, Communication) and op.root is not None:
            self.split(self.teams[op.team].position == self.domain.value(op.root))
