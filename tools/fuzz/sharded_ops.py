"""The statements of random sharded programs: each function appends a few that use a tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from tools.fuzz import views
from tools.fuzz.builder import Dim, joined_shapes
from tools.fuzz.ops import blocks, composites, groups, scaled
from tools.fuzz.ops.attend import statement
from tools.fuzz.ops.lookups import look_up
from tools.fuzz.ops.scans import scan_or_sort
from tools.fuzz.program import Arg, Dt, Ref
from tools.fuzz.table import FLOAT8, ROWS

if TYPE_CHECKING:
    from tools.fuzz.sharded import Sharded


def _unary(b: Sharded, name: str) -> None:
    op = b.rng.choice(("neg", "abs", "relu", "tanh", "sigmoid", "exp", "set", "segment_set"))
    if b.chance(0.2):
        op = b.rng.choice(
            [r.name for r in ROWS.values() if r.arity == 1 and b.is_a(name, r.dtypes)]
        )
    b.emit(op, [Ref(name)], b.dims[name])


def _binary(b: Sharded, name: str) -> None:
    op = b.rng.choice(("add", "mul", "sub", "maximum"))
    if b.chance(0.3):
        b.emit(op, [Ref(name), 2 if b.is_a(name, "i") else 1.5], b.dims[name])
        return

    def fits(other: str) -> bool:
        dims = joined_shapes(b.dims[name], b.dims[other], b.one)
        return dims is not None and b.fits(dims)

    other = b.pick(fits)
    if other is None or other == name or b.chance(0.3):
        if any(d.expanded for d in b.dims[name]):
            return
        dims = [d if b.chance(0.75) else b.one for d in b.dims[name]]
        other = b.tensor(dims[b.rng.randint(0, 1) if len(dims) > 1 else 0 :])
    dims = joined_shapes(b.dims[name], b.dims[other], b.one)
    if dims is not None:
        b.emit(op, [Ref(name), Ref(other)], dims)


def _reduction(b: Sharded, name: str) -> None:
    dims = b.dims[name]
    if not dims:
        return
    op = b.rng.choice(("sum", "sum", "max", "min", "prod"))
    if b.is_a(name, "b" if op in ("sum", "prod") else "bc"):
        return
    axes = sorted(b.rng.sample(range(len(dims)), b.rng.randint(1, min(2, len(dims)))))
    keep = b.chance(0.5)
    out = [b.one if k in axes else d for k, d in enumerate(dims) if keep or k not in axes]
    b.emit(op, [Ref(name)], out, True, dims=list(axes), keepdim=keep)


def _where(b: Sharded, name: str) -> None:
    """Appends a tensor's numbers, with 1 in place of small ones."""
    if b.is_a(name, "fi"):
        dims = b.dims[name]
        made = b.emit("gt", [Ref(name), 0], dims)
        one = 1 if b.is_a(name, "i") else 1.0
        if made:
            b.emit("where", [Ref(made[0]), Ref(name), one], dims)


def _moments(b: Sharded, name: str) -> None:
    dims = b.dims[name]
    if not dims or not b.is_a(name, "f"):
        return
    axis = b.rng.randrange(len(dims))
    short = [d for k, d in enumerate(dims) if k != axis]
    if b.chance(0.5):
        b.emit_many("welford", [Ref(name), [axis]], [short] * 3)
    else:
        b.emit("var", [Ref(name), [axis], 1, False], short)


def _iota(b: Sharded, name: str) -> None:
    """Appends positions along the last axis, and adds them where that is possible."""
    dims = b.dims[name]
    if not dims or not b.is_a(name, "fi") or b.dtype[name] in FLOAT8:
        return
    last = [Dim(dims[-1].vec, dims[-1].static)]
    places: list[Arg] = [1, 2] if b.is_a(name, "i") else [1.0, 2.0]
    made = b.emit("iota", [b.size(name, len(dims) - 1), *places, Dt(b.dtype[name])], last)
    if made and not dims[-1].expanded and not dims[-1].is_broadcast:
        b.emit("add", [Ref(name), Ref(made[0])], dims)


def _view(b: Sharded, name: str) -> None:
    """Appends a view of any tensor that has one."""
    del name
    b.rng.choice((views.squeeze, views.squeeze, views.broadcast_in_dim, views.permute))(b)


def _permute(b: Sharded, name: str) -> None:
    dims = b.dims[name]
    if len(dims) > 1:
        order = b.rng.sample(range(len(dims)), len(dims))
        b.emit("permute", [Ref(name), order], [dims[k] for k in order])


def _reshape(b: Sharded, name: str) -> None:
    dims = [Dim(d.vec, d.static) for d in b.dims[name]]
    if not dims:
        return
    sizes: list[Arg] = [b.size(name, k) for k in range(len(dims))]
    at = b.rng.randrange(len(dims))
    if b.chance(0.5) and at + 1 < len(dims):
        pair = list(itertools.pairwise(sizes))[at]
        vec = tuple(p * q for p, q in zip(dims[at].vec, dims[at + 1].vec, strict=True))
        merged: Arg
        if isinstance(pair[0], int) and isinstance(pair[1], int):
            merged = pair[0] * pair[1]
        else:
            made = b.emit_scalar("mul", list(pair))
            assert made is not None
            merged = Ref(made)
        dims[at : at + 2] = [Dim(vec, isinstance(merged, int))]
        sizes[at : at + 2] = [merged]
    else:
        whole = sizes[at]
        if not isinstance(whole, int) or whole % 4 or whole < 8 or len(dims) > 4:
            return
        halves = b.rng.choice(([4, whole // 4], [whole // 4, 4], [2, whole // 2]))
        dims[at : at + 1] = [b.constant(n) for n in halves]
        sizes[at : at + 1] = list(halves)
    b.emit("reshape", [Ref(name), sizes], dims)


def _broadcast(b: Sharded, name: str) -> None:
    dims = list(b.dims[name])
    if len(dims) > 3:
        return
    at = b.rng.randint(0, len(dims))
    flags = [False] * len(dims)
    flags.insert(at, True)
    dims.insert(at, b.one)
    made = b.emit("broadcast", [Ref(name), flags], dims)
    if made and b.chance(0.5):
        dims[at] = Dim((8,) * b.ncalls, True, True)
        b.emit("expand", [Ref(made[0]), [8 if k == at else -1 for k in range(len(dims))]], dims)


def _slice(b: Sharded, name: str) -> None:
    dims = list(b.dims[name])
    wide = [k for k, d in enumerate(dims) if min(d.vec) >= 8 and d.static]
    if not wide:
        return
    at = b.rng.choice(wide)
    low = b.rng.choice((0, 4))
    starts: list[Arg] = [low if k == at else 0 for k in range(len(dims))]
    ends: list[Arg] = [low + 4 if k == at else b.size(name, k) for k in range(len(dims))]
    dims[at] = Dim((4,) * b.ncalls, True, dims[at].expanded)
    b.emit("slice", [Ref(name), starts, ends], dims)


def _cat(b: Sharded, name: str) -> None:
    dims = list(b.dims[name])
    if not dims or any(d.expanded for d in dims):
        return
    at = b.rng.randrange(len(dims))
    other = b.pick(lambda n: b.dims[n] == b.dims[name] and b.dtype[n] == b.dtype[name])
    assert other is not None
    dims[at] = Dim(tuple(2 * n for n in dims[at].vec), dims[at].static)
    b.emit("cat", [[Ref(name), Ref(other)], at], dims)


def _look_up(b: Sharded, name: str) -> None:
    if b.dims[name]:
        look_up(b, name, b.dim, b.tensor)


def _scan_or_sort(b: Sharded, name: str) -> None:
    if b.dims[name]:
        scan_or_sort(b, name)


def _pad(b: Sharded, name: str) -> None:
    dims = list(b.dims[name])
    if dims:
        dims[-1] = Dim(tuple(n + 4 for n in dims[-1].vec), dims[-1].static)
        b.emit("pad", [Ref(name), b.rng.choice(([4, 0], [0, 4], [2, 2]))], dims)


def _contraction(b: Sharded, name: str) -> None:
    dims = b.dims[name]
    if not dims or not b.is_a(name, "f") or dims[-1].expanded or len(b.inputs) > 6:
        return
    if b.dtype[name] in FLOAT8:
        return
    n = b.dim()
    if math.prod(dims[-1].vec) * math.prod(n.vec) > 1024:
        return
    if b.chance(0.5):
        batch = [b.dim()] if b.chance(0.3) else []
        if not b.fits([*batch, *dims[:-1], n]):
            return
        args: list[Arg] = [Ref(name), Ref(b.tensor([*batch, n, dims[-1]], b.dtype[name]))]
        if b.chance(0.3):
            args.append(Ref(b.tensor([*batch, n], b.dtype[name])))
        b.emit("linear", args, [*batch, *dims[:-1], n])
    elif len(dims) > 1:
        w = b.tensor([dims[-1], n], b.dtype[name])
        b.emit("matmul", [Ref(name), Ref(w)], [*dims[:-1], n])


def _attend(b: Sharded, name: str) -> None:
    if not b.is_a(name, "f") or b.dtype[name] in FLOAT8 or len(b.inputs) > 6:
        return
    if len(b.dims[name]) != 4:
        few = [b.constant(b.rng.choice((2, 4, 8))) for _ in range(3)]
        name = b.tensor([few[0], few[1], b.dim(), few[2]], b.dtype[name])
    statement(b, name, b.tensor)


def _groups(b: Sharded, name: str) -> None:
    if not b.is_a(name, "f") or len(b.inputs) > 6:
        return
    if len(b.dims[name]) not in (2, 3):
        name = b.tensor([b.dim() for _ in range(b.rng.choice((2, 3)))], b.dtype[name])
    groups.multiply(b, name, b.dim, b.tensor)


def _scaled(b: Sharded, name: str) -> None:
    if len(b.inputs) > 4:
        return
    if not b.is_a(name, "f") or len(b.dims[name]) != 2:
        name = b.tensor([b.dim(), b.dim()], b.rng.choice(("Float8_e4m3fn", "Float8_e5m2")))
    scaled.multiply(b, name, b.dim, b.tensor)


def _blocks(b: Sharded, name: str) -> None:
    if b.dims[name] and len(b.inputs) < 7:
        blocks.quantize(b, name, b.dim, b.tensor)


def _composite(b: Sharded, name: str) -> None:
    if b.is_a(name, "f") and not any(d.expanded for d in b.dims[name]):
        composites.composite(b, name, b.tensor, draws=False)


def _tiles(b: Sharded, name: str) -> None:
    if len(b.dims[name]) == 2 and len(b.inputs) < 7:
        blocks.lay_out(b, name, b.dim, b.tensor)


def _full(b: Sharded, name: str) -> None:
    """Appends a constant tensor with the shape of another, but none of its cuts."""
    dims = [Dim(d.vec, d.static) for d in b.dims[name]]
    sizes: list[Arg] = [b.size(name, k) for k in range(len(dims))]
    b.emit("full", [sizes, 2 if b.is_a(name, "i") else 1.25, Dt(b.dtype[name])], dims)


def _random(b: Sharded, name: str) -> None:
    """Appends random numbers in the shape of a tensor, mostly used with it, such as a mask or
    noise.
    """
    if not b.is_a(name, "f") or b.dtype[name] in FLOAT8:
        return
    dims = [Dim(d.vec, d.static) for d in b.dims[name]]
    made = b.add_random([b.size(name, k) for k in range(len(dims))], dims, b.dtype[name])
    if made and b.chance(0.7):
        b.emit(b.rng.choice(("add", "mul")), [Ref(name), Ref(made[0])], dims)


def _triu(b: Sharded, name: str) -> None:
    if len(b.dims[name]) > 1:
        b.emit("triu", [Ref(name), b.rng.randint(-3, 3)], b.dims[name])


_TABLE: tuple[tuple[Callable[[Sharded, str], None], int], ...] = (
    (_unary, 12),
    (_binary, 22),
    (_reduction, 14),
    (_permute, 12),
    (_reshape, 10),
    (_broadcast, 6),
    (_slice, 4),
    (_cat, 4),
    (_pad, 3),
    (_contraction, 10),
    (_attend, 6),
    (_full, 4),
    (_random, 5),
    (_triu, 2),
    (_look_up, 16),
    (_scan_or_sort, 8),
    (_groups, 6),
    (_scaled, 6),
    (_blocks, 4),
    (_composite, 7),
    (_tiles, 3),
    (_where, 3),
    (_moments, 3),
    (_iota, 3),
    (_view, 4),
)
MAKERS = [m for m, _ in _TABLE]
WEIGHTS = [w for _, w in _TABLE]
