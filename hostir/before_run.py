"""What is checked once before a program runs: its streams on this rank, and all ranks together.

`hostir.verify` checks the structure after every pass. Races and what ranks do to each other depend
on sizes: they are found for the sizes of the first call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

from fuser.ir import scalar as sc
from fuser.ir.core import Op
from fuser.ir.scalar import Number, Scalar, Symbol
from fuser.ir.tensor import TensorView
from hostir.chains import find_chains
from hostir.container import HostIrContainer, walk
from hostir.cross_rank import MISPLACED, find_mismatches
from hostir.findings import Finding, refuse
from hostir.ops import RANK
from hostir.race import LEFT, find_races

# Of more ranks than this, so many are looked at one by one.
MAX_RANKS = 32

# A program by hand may keep parts of tensors in an order of its own, and leave a stream current
# that its caller knows about.
TOLERATED = frozenset({MISPLACED, LEFT})

_Checked = set[tuple[int | None, frozenset[TensorView]]]
_checked: WeakKeyDictionary[HostIrContainer, _Checked] = WeakKeyDictionary()


def check_before_run(
    program: HostIrContainer,
    values: Mapping[Symbol, Number],
    *,
    rank: int,
    given: Iterable[TensorView] = (),
) -> None:
    """Raise `VerifyError` for a program that would race on this rank, or hang with others.

    Checked once per program, rank and results that the caller gives buffers for. Only what is
    wrong however the program is meant is refused (`TOLERATED`).
    """
    done = _checked.setdefault(program, set())
    key = rank, frozenset(given)
    if key in done:
        return
    found: list[Finding] = []
    if (None, key[1]) not in done:
        found += find_mismatches(program, values)
    found += find_races(program, values, rank=rank, given=key[1])
    wrong = [f for f in found if f.kind not in TOLERATED]
    refuse(program, wrong, what="this program must not run")
    done |= {key, (None, key[1])}


def findings(
    program: HostIrContainer, values: Mapping[Symbol, Number], *, ranks: Sequence[int] = ()
) -> list[Finding]:
    """Return what is wrong on any rank or between ranks, and where steps are chained.

    `values` binds the symbols of the inputs and `numberOfStreams`; `ranks` defaults to those of the
    program's meshes.
    """
    ranks = ranks or program.devices() or (0,)
    found = find_mismatches(program, values, ranks=ranks)
    for rank in _differing(program, ranks):
        here = {**values, RANK: rank}
        if races := find_races(program, here, rank=rank) or find_chains(program, here, rank=rank):
            who = f"on rank {rank}: " if len(ranks) > 1 else ""
            return found + [replace(f, what=who + f.what) for f in races]
    return found


def _differing(program: HostIrContainer, ranks: Sequence[int]) -> Sequence[int]:
    """Return the ranks to look at one by one: those that may differ from the ones before."""
    meshes = {tv.mesh for tv in program.tensors()}
    if len(meshes) == 1 and not any(map(_names_rank, walk(program.ops))):
        return ranks[:1]
    step = -(-len(ranks) // MAX_RANKS)
    return [*ranks[::step], *ranks[-1:]] if step > 1 else ranks


def _names_rank(op: Op) -> bool:
    scalars = (v for v in (*op.inputs, *op.scalars) if isinstance(v, Scalar))
    is_rooted = getattr(op, "root", None) is not None
    return is_rooted or any(RANK in sc.symbols(x) for x in scalars)
