"""Candidates for tuning: schedule parameters (threads, vector width, ..) near those that the
heuristic chose without measuring.

    pointwise(threads 128x1, vector 8, unroll 1)  ->  threads 64, 256; vector 4; unroll 2; both; ..

A candidate (neighbour) differs from the chosen parameters in some values, each by a factor that is
a power of two. Lowering or launching a candidate may be impossible. The search skips such
candidates.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from fuser.schedule.inner_persistent import (
    RESIDENT,
    RESIDENT_ONE,
    THREADS_PER_BLOCK,
    InnerPersistentParams,
)
from fuser.schedule.outer_persistent import OuterPersistentParams
from fuser.schedule.plain import PlainParams
from fuser.schedule.pointwise import PointwiseParams
from fuser.schedule.reduction import ReductionParams
from fuser.schedule.transpose import TransposeParams
from fuser.support.device import MAX_CLUSTER
from fuser.support.record import replace

MAX_THREADS = 1024
FEWEST_THREADS = 32
MAX_UNROLL = 16

# A value of a parameter -> its distance from the chosen one, in factors of two.
Choices = Mapping[Any, float]
_Found = Iterable[tuple[float, Any]]


def neighbours(params: Any) -> list[Any]:
    """Returns the schedule parameters to time as alternatives to `params`. They differ from
    `params` by few factors of two, and the nearest come first.

    `params` itself is not in the result. Plain loops without threads, and schedules written by the
    user, have no neighbours.
    """
    make = _BY_CLASS.get(type(params))
    found = () if make is None else make(params)
    nearest = sorted(found, key=lambda pair: pair[0])
    return [p for p in dict.fromkeys(p for _, p in nearest) if p != params]


def to_fields(params: Any) -> dict[str, Any]:
    """Returns schedule parameters as a dict that JSON can store: the class name as "kind", and each
    field by name.
    """
    return {"kind": type(params).__name__} | {f.name: getattr(params, f.name) for f in _of(params)}


def from_fields(found: object, like: Any) -> Any:
    """Returns the schedule parameters that `to_fields` stored as `found`.

    `like` are the parameters that the heuristic chose for the kernel. Returns None if `found` is
    not a valid description of parameters for that kernel.
    """
    if not isinstance(found, dict):
        return None
    kinds = {type(like), PointwiseParams} if isinstance(like, TransposeParams) else {type(like)}
    cls = next((c for c in kinds if c.__name__ == found.get("kind") and c in _BY_CLASS), None)
    if cls is None:
        return None
    wanted = {f.name: f.type for f in fields(cls)}
    values = {name: value for name, value in found.items() if name != "kind"}
    is_whole = values.keys() == wanted.keys() and all(
        type(value).__name__ == wanted[name] for name, value in values.items()
    )
    return cls(**values) if is_whole else None


def _of(params: Any) -> Sequence[Any]:
    return fields(params)


# ------------------------------------------------------------------ distances
def _scaled(value: int, down: int, up: int, *, least: int = 1, most: int = MAX_THREADS) -> Choices:
    """Returns the candidates for one number of the schedule parameters, each with its distance from
    `value` in factors of two.

    The candidates are `value`, up to `down` halvings that are at least `least`, and up to `up`
    doublings that are at most `most`.
    """
    found: dict[Any, float] = {value: 0}
    for k in range(1, down + 1):
        if value >> k >= least and value % (1 << k) == 0:
            found[value >> k] = k
    found.update({value << k: k for k in range(1, up + 1) if value << k <= most})
    return found


def _combined(params: Any, **choices: Choices) -> _Found:
    """Yields pairs (distance, parameters): `params` with every combination of values in `choices`.

    `choices` maps the name of a field to its candidate values and their distances from the value in
    `params`. The distances of a combination are added.
    """
    for pairs in itertools.product(*(c.items() for c in choices.values())):
        values = {name: value for name, (value, _) in zip(choices, pairs, strict=True)}
        yield sum(distance for _, distance in pairs), replace(params, **values)


def _fits_a_block(params: Any) -> bool:
    return FEWEST_THREADS <= params.threads_x * params.threads_y <= MAX_THREADS


# ------------------------------------------------------------------ one function per kind
def _pointwise(params: PointwiseParams) -> _Found:
    if not params.threads_x:
        return []
    is_joined = params.pieces > 1
    unroll = {1: 0} if is_joined else _scaled(params.unroll, 2, 2, most=MAX_UNROLL)
    # With one run, only the threads along x have an effect.
    has_two = params.inner_on_x or params.threads_y > 1
    found = _combined(
        params,
        vector=_scaled(params.vector, 1, 0),
        threads_x=_scaled(params.threads_x, 2, 2),
        threads_y=_scaled(params.threads_y, 2, 2) if has_two else {params.threads_y: 0},
        unroll=unroll,
    )
    return [(distance, p) for distance, p in found if _fits_a_block(p)]


def _reduction(params: ReductionParams) -> _Found:
    if not params.threads_x:
        return []
    is_short = not params.inner and params.threads_y == 1
    one = {1: 0}
    found = _combined(
        params,
        vector={params.vector: 0} if params.shifted else _scaled(params.vector, 1, 0),
        threads_x=_scaled(params.threads_x, 2, 2),
        threads_y=one if is_short else _scaled(params.threads_y, 2, 2),
        unroll=_scaled(params.unroll, 2, 2, most=MAX_UNROLL),
        grid=one if is_short else _scaled(params.grid, 2, 2, most=1 << 12),
        columns=_scaled(params.columns, 1, 2, most=MAX_UNROLL) if is_short else one,
    )
    return [(distance, p) for distance, p in found if _fits_a_block(p)]


def _persistent(params: InnerPersistentParams) -> _Found:
    if not params.threads_x:
        return []
    found = list(_kept(params) if params.kept else _looped(params))
    if params.shifted:
        found.append((1, replace(params, vector=1, shifted=False)))
    found += _clusters(params)
    return [(distance, p) for distance, p in found if p.threads_x * p.threads_y <= MAX_THREADS]


def _clusters(params: InnerPersistentParams) -> _Found:
    """Yields parameters with twice and with half the number of CUDA blocks per cluster, as
    neighbours of `params`.

    The blocks of a cluster hold a row in registers together, so each thread then holds half or
    twice as many elements (`kept`).
    """
    if params.cluster == 1:
        return
    if params.cluster < MAX_CLUSTER and params.kept % (2 * params.vector) == 0:
        yield 1, replace(params, cluster=2 * params.cluster, kept=params.kept // 2)
    if params.cluster > 2:
        yield 1, replace(params, cluster=params.cluster // 2, kept=2 * params.kept)


def _kept(params: InnerPersistentParams) -> _Found:
    """Yields neighbours of the parameters of a kernel that holds each reduced row of the input in
    registers.

    The neighbours have twice or half the threads per row, other numbers of rows per block, or
    another number of threads per multiprocessor. Parameters of a kernel that reads each row again
    in a loop (`_looped`) are neighbours, too.
    """
    resident = {n: float(n != params.resident) for n in (0, RESIDENT, RESIDENT_ONE, 1536)}
    costly = {c: float(c != params.keeps_costly) for c in (False, True)}
    for shift in (-1, 0, 1):
        threads = params.threads_x << 1 if shift > 0 else params.threads_x >> -shift
        kept = params.kept >> 1 if shift > 0 else params.kept << -shift
        if threads < 1 or kept % params.vector or not kept:
            continue
        rows = max(THREADS_PER_BLOCK // threads, 1)
        shape = replace(params, threads_x=threads, kept=kept)
        rows_at_once = {params.threads_y: 0.0, **_scaled(params.threads_y, 1, 1), rows: 0.5}
        choices = {"threads_y": rows_at_once, "resident": resident, "keeps_costly": costly}
        for distance, made in _combined(shape, **choices):
            yield distance + abs(shift), made
    loops = replace(
        params, kept=0, keeps_costly=False, resident=0, exact=False, threads_x=256, threads_y=1
    )
    for distance, made in _looped(loops):
        yield distance + 2, made
    yield 2, loops


def _looped(params: InnerPersistentParams) -> _Found:
    return _combined(
        params, threads_x=_scaled(params.threads_x, 2, 2), unroll=_scaled(params.unroll, 2, 2)
    )


def _strips(params: OuterPersistentParams) -> _Found:
    """Returns neighbours of the parameters of a kernel that reduces columns, a strip of adjacent
    columns per CUDA block: other strip widths, vector sizes, and numbers of rows per thread.
    """
    if not params.threads_x:
        return []
    resident = {n: float(n != params.resident) for n in (params.resident, RESIDENT_ONE, 1536)}
    shape = {"vector": _scaled(params.vector, 1, 0), "threads_x": _scaled(params.threads_x, 2, 2)}
    if not params.kept:
        found = _combined(params, **shape, threads_y=_scaled(params.threads_y, 2, 2))
        return [(distance, p) for distance, p in found if _fits_a_block(p)]
    rows = params.threads_y * params.kept
    kept = {k: d for k, d in _scaled(params.kept, 2, 2).items() if rows % k == 0}
    found = _combined(params, **shape, kept=kept, resident=resident)
    made = ((distance, replace(p, threads_y=rows // p.kept)) for distance, p in found)
    return [(distance, p) for distance, p in made if _fits_a_block(p)]


def _transpose(params: TransposeParams) -> _Found:
    """Returns neighbours of the parameters of a kernel that transposes by rectangular tiles: half
    and twice each of the tile's two sizes, with other numbers of threads.
    """
    widest = max(params.vector, params.staged_vector)
    found = _combined(
        params,
        edge=_scaled(params.edge, 1, 1, least=params.vector),
        staged_edge=_scaled(params.staged_edge, 1, 1, least=params.staged_vector),
        threads=_scaled(params.threads, 2, 2, least=FEWEST_THREADS),
    )
    return [(d, p) for d, p in found if p.threads * widest <= p.edge * p.staged_edge]


def _plain(params: PlainParams) -> _Found:
    return _combined(params, threads=_scaled(params.threads, 2, 2)) if params.threads else []


_BY_CLASS: Mapping[type, Callable[[Any], _Found]] = {
    PointwiseParams: _pointwise,
    ReductionParams: _reduction,
    InnerPersistentParams: _persistent,
    OuterPersistentParams: _strips,
    TransposeParams: _transpose,
    PlainParams: _plain,
}
