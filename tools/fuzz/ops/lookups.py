"""Lookups in random programs: the generators' statements, and their meaning for the oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from tools.fuzz.ops.elementwise import is_inexact
from tools.fuzz.ops.reductions import is_whole, summed
from tools.fuzz.program import Arg, Ref, Size
from tools.fuzz.table import DTYPES, HALF
from tools.fuzz.values import INF, InvalidProgram, Val, nonnan, overflow, size_of, stored

if TYPE_CHECKING:
    from tools.fuzz.builder import Builder, Dim

Tensor = torch.Tensor


class MakeInput(Protocol):
    """Appends an input with these axes and dtype; `fill` is for all calls, or one for each."""

    def __call__(
        self, dims: Sequence[Dim], dtype: str, fill: str | Sequence[str] | None = None, /
    ) -> str:
        """Appends the input and returns its name."""
        ...


# ------------------------------------------------------------------ the oracle
def _checked(table: Val, index: Val, extent: int) -> tuple[Tensor, bool]:
    """Returns an index that is valid for the table, and whether it is known."""
    if not index.is_exact:
        return torch.zeros_like(index.ref), False
    if bool(((index.ref < 0) | (index.ref >= extent)).any()):
        raise InvalidProgram(f"an index is outside of [0, {extent})")
    return index.ref, True


def _found(table: Val, index: Val, extent: int, read: Callable[[Tensor, Tensor], Tensor]) -> Val:
    places, is_known = _checked(table, index, extent)
    if not is_known and not extent and places.numel():
        raise InvalidProgram("an inexact index reads an empty table")
    ref, bound = read(table.ref, places), read(table.bound, places)
    return Val(ref, bound if is_known else torch.full_like(bound, INF), table.dtype)


def index_select(table: Val, index: Val, dim: int) -> Val:
    """Returns the slices of a table along `dim` at an index."""

    def read(t: Tensor, places: Tensor) -> Tensor:
        return torch.cat(
            [t.narrow(dim, p, 1) for p in places.reshape(-1).tolist()] or [t.narrow(dim, 0, 0)],
            dim,
        )

    return _found(table, index, table.ref.shape[dim], read)


def embedding_fwd(index: Val, weight: Val) -> Val:
    """Returns the rows of a weight at an index."""

    def read(t: Tensor, places: Tensor) -> Tensor:
        return t[places.reshape(-1)].reshape(*places.shape, t.shape[1])

    return _found(weight, index, weight.ref.shape[0], read)


def gather(table: Val, index: Val, dim: int) -> Val:
    """Returns torch.gather of a table and an index."""
    pairs = enumerate(zip(index.ref.shape, table.ref.shape, strict=True))
    if any(a > b for k, (a, b) in pairs if k != dim % index.ref.ndim):
        raise InvalidProgram("an axis of the index is longer than that of the table")
    return _found(table, index, table.ref.shape[dim], lambda t, places: t.gather(dim, places))


def take_along_axis(table: Val, index: Val, dim: int) -> Val:
    """Returns a gather whose operands are broadcast to each other."""
    dim %= index.ref.ndim

    def read(t: Tensor, places: Tensor) -> Tensor:
        shape = [b if a == 1 else a for a, b in zip(t.shape, places.shape, strict=True)]
        of_table = [*shape[:dim], t.shape[dim], *shape[dim + 1 :]]
        of_index = [*shape[:dim], places.shape[dim], *shape[dim + 1 :]]
        return t.expand(of_table).gather(dim, places.expand(of_index))

    return _found(table, index, table.ref.shape[dim], read)


def select(table: Val, index: int, dim: int) -> Val:
    """Returns one slice of a table, without its axis."""
    extent = table.ref.shape[dim]
    if not -extent <= index < extent:
        raise InvalidProgram(f"index {index} of select is out of range for extent {extent}")
    return table.view(lambda t: t.select(dim, index))


def scatter(x: Val, index: Val, src: float | int | bool, dim: int) -> Val:
    """Returns a tensor with one number written at the places of an index."""
    pairs = enumerate(zip(index.ref.shape, x.ref.shape, strict=True))
    if any(a > b for k, (a, b) in pairs if k != dim % index.ref.ndim):
        raise InvalidProgram("an axis of the index is longer than that of the tensor written into")
    places, is_known = _checked(x, index, x.ref.shape[dim])
    if not is_known:
        return Val(x.ref, torch.full_like(x.bound, INF), x.dtype)
    rounded = torch.tensor(src, dtype=DTYPES[x.dtype].torch).item()
    return Val(
        x.ref.clone().scatter_(dim, places, rounded),
        x.bound.clone().scatter_(dim, places, 0.0),
        x.dtype,
    )


def index_put_accumulate(acc: Val, index: Val, value: Val) -> Val:
    """Adds each value row to the row of `acc` that its index names; other rows are ignored."""
    count, rest = index.ref.numel(), acc.ref.shape[1:]
    if any(n not in (1, m) for n, m in zip(value.ref.shape, (count, *rest), strict=True)):
        raise InvalidProgram(
            f"values {tuple(value.ref.shape)} do not fit {count} rows of {tuple(rest)}"
        )
    if not index.is_exact:
        return Val(acc.ref, torch.full_like(acc.bound, INF), acc.dtype)
    value = value.view(lambda t: t.expand(count, *rest))
    at = ((index.ref >= 0) & (index.ref < len(acc.ref))).nonzero().reshape(-1)
    rows = index.ref[at]

    def total(into: Tensor, added: Tensor) -> Tensor:
        return into.index_add(0, rows, added[at])

    ref, bound = total(acc.ref, value.ref), nonnan(total(acc.bound, value.bound))
    if not is_inexact(acc.dtype):
        return overflow(Val(ref, torch.where(bound > 0, INF, bound), acc.dtype))
    sizes = total(size_of(acc.ref), size_of(value.ref))
    most = int(rows.bincount().max()) if len(rows) else 0
    is_exact = all(v.is_exact and is_whole(v.ref) for v in (acc, value))
    out = summed(ref, bound, sizes, most + 1, acc.dtype, is_exact=is_exact)
    out = stored(out.ref, out.bound, acc.dtype) if acc.dtype in HALF else out
    # Other rows do not change.
    into = torch.zeros(len(acc.ref), dtype=torch.bool).index_fill(0, rows, True)
    into = into.reshape(-1, *(1 for _ in rest))
    return Val(
        torch.where(into, out.ref, acc.ref), torch.where(into, out.bound, acc.bound), acc.dtype
    )


MEANINGS: dict[str, Callable[..., Val]] = {
    "index_select": index_select,
    "embedding_fwd": embedding_fwd,
    "gather": gather,
    "take_along_axis": take_along_axis,
    "select": select,
    "scatter": scatter,
    "index_put_accumulate": index_put_accumulate,
}


# ------------------------------------------------------------------ the generators
_OPS = ("index_select", "index_select", "gather", "gather", "take_along_axis", "take_along_axis")
_OPS += ("embedding_fwd", "select", "scatter", "index_put_accumulate")
# The dtype of a scalar that is written into a tensor.
_WIDE = {"f": "Double", "i": "Int", "b": "Bool", "c": "ComplexDouble"}
_KINDS = {n: _WIDE[f.category[0]] for n, f in DTYPES.items()}


def look_up(b: Builder, name: str, extents: Callable[[], Dim], make: MakeInput) -> None:
    """Appends a lookup in a tensor that has axes; `extents` draws an axis."""
    rng, dims = b.rng, b.dims[name]
    at = rng.randrange(len(dims))
    op = rng.choice(_OPS)
    if op == "select":
        select_in(b, name, at)
        return
    if op == "embedding_fwd":
        if len(dims) != 2:
            return
        at = 0
    if op == "index_put_accumulate":
        add_rows(b, name, extents(), make)
        return
    below = dims[at].vec
    if not all(below):
        return
    if op == "index_select":
        mine = [] if b.chance(0.1) else [extents()]
    elif op == "embedding_fwd":
        mine = [extents() for _ in range(rng.randint(0, 2))]
    else:
        mine = [_beside(b, d, op) for d in dims]
        mine[at] = extents()
    if not b.fits(mine):
        return
    index = _index(b, name, at, mine, below, make)
    if index is None:
        return
    mine = list(b.dims[index])
    dim: Arg = at - len(dims) if b.chance(0.3) else at
    if op == "embedding_fwd":
        b.emit(op, [Ref(index), Ref(name)], [*mine, dims[1]])
    elif op == "scatter":
        # One number for all places, because the order of writes is undefined.
        src = Ref(b.add_scalar(_KINDS[b.dtype[name]], [rng.randint(0, 1)] * b.ncalls))
        out = [type(d)(d.vec, d.static) for d in dims]
        b.emit(op, [Ref(name), Ref(index), src, dim], out)
    elif op == "index_select":
        b.emit(op, [Ref(name), Ref(index), dim], [*dims[:at], *(mine or [b.one]), *dims[at + 1 :]])
    else:
        joined = [_joined(x, y, op) for x, y in zip(dims, mine, strict=True)]
        joined[at] = mine[at]
        b.emit(op, [Ref(name), Ref(index), dim], joined)


def select_in(b: Builder, name: str, at: int) -> None:
    """Appends a select at a random place along an axis."""
    dims = b.dims[name]
    if all(dims[at].vec):
        places = [b.rng.randint(-n, n - 1) for n in dims[at].vec]
        index = Ref(b.add_scalar("Int", places))
        b.emit("select", [Ref(name), index, at], [*dims[:at], *dims[at + 1 :]])


def add_rows(b: Builder, name: str, count: Dim, make: MakeInput) -> None:
    """Appends an addition of `count` rows to some rows of a tensor."""
    dims, dtype = b.dims[name], b.dtype[name]
    plain = [type(d)(d.vec, d.static) for d in dims]
    rows = [d if b.chance(0.85) else b.one for d in (count, *plain[1:])]
    if b.is_a(name, "b") or not b.fits(rows):
        return
    if b.chance(0.3) or not all(plain[0].vec):
        kind = b.rng.choice(("Int", "Int32"))
        index = make([count], kind, [f"around {n}" for n in plain[0].vec])
    else:
        index = _index(b, name, 0, [count], plain[0].vec, make)
    if index is None:
        return

    def fits(n: str) -> bool:
        return b.dtype[n] == dtype and [d.vec for d in b.dims[n]] == [d.vec for d in rows]

    found = b.pick(fits) if b.chance(0.4) else None
    value = found or make(rows, dtype)
    b.emit("index_put_accumulate", [Ref(name), Ref(index), Ref(value)], plain)


def _beside(b: Builder, d: Dim, op: str) -> Dim:
    """Returns the index's axis for a table's axis that is not looked up."""
    plain = type(d)(d.vec, d.static)
    if b.chance(0.7):
        return plain
    if op == "take_along_axis":
        return b.one
    vec = tuple(b.rng.randint(min(n, 1), n) for n in d.vec)
    return type(d)(vec, d.static and len({*vec}) == 1)


def _joined(table: Dim, index: Dim, op: str) -> Dim:
    if op == "gather":
        return type(index)(index.vec, index.static, index.expanded and table.expanded)
    if table.is_broadcast or index.is_broadcast:
        return index if table.is_broadcast else table
    return type(index)(index.vec, index.static, index.expanded and table.expanded)


def _index(
    b: Builder, table: str, at: int, dims: Sequence[Dim], below: Sequence[int], make: MakeInput
) -> str | None:
    """Returns an index with these axes.

    It is an input, or computed from an input or from an integer tensor with the same axes.
    """

    def fits(n: str) -> bool:
        return b.dtype[n] in ("Int", "Int32") and b.dims[n] == tuple(dims)

    other = b.pick(fits) if b.chance(0.3) else None
    if other is None:
        other = make(dims, b.rng.choice(("Int", "Int", "Int32")), [f"below {n}" for n in below])
        if b.chance(0.7):
            return other
    size: Arg = Size(table, at) if b.chance(0.5) else below[0]
    if isinstance(size, int) and len({*below}) > 1:
        return None
    made = b.emit("remainder", [Ref(other), size], b.dims[other])
    return made[0] if made and b.dtype[made[0]] in ("Int", "Int32") else None
