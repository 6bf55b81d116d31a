"""Statements of random fusions that move, repeat or create elements, and contractions."""

from __future__ import annotations

import math

from tools.fuzz.builder import Builder, Dim
from tools.fuzz.fusions import FusionBuilder
from tools.fuzz.ops import blocks, composites, groups, lookups, scaled, scans
from tools.fuzz.ops.attend import statement
from tools.fuzz.program import Arg, Dt, Ref
from tools.fuzz.table import DTYPES, FLOAT8


def broadcast(b: FusionBuilder) -> None:
    """Appends a broadcast that adds axes to a tensor."""
    name = b.pick(lambda n: len(b.dims[n]) < 5)
    if name is None:
        return
    dims = list(b.dims[name])
    flags = [False] * len(dims)
    for _ in range(b.rng.randint(1, 5 - len(dims))):
        at = b.rng.randint(0, len(dims))
        dims.insert(at, b.one)
        flags.insert(at, True)
    b.emit("broadcast", [Ref(name), flags], dims)


def broadcast_in_dim(b: Builder) -> None:
    """Appends a broadcast_in_dim that adds axes of some extents to a tensor."""
    name = b.pick(lambda n: len(b.dims[n]) < 5)
    if name is None:
        return
    dims = list(b.dims[name])
    kept = list(range(len(dims)))
    sizes: list[Arg] = [b.size(name, k) for k in kept]
    out: list[Dim] = list(dims)
    for _ in range(b.rng.randint(1, 2)):
        if len(out) >= 5:
            break
        at = b.rng.randint(0, len(out))
        size, dim = some_size(b)
        sizes.insert(at, size)
        out.insert(at, Dim(dim.vec, dim.static, True) if not dim.is_broadcast else dim)
        kept = [k + (k >= at) for k in kept]
    b.emit("broadcast_in_dim", [Ref(name), sizes, kept], out)


def some_size(b: Builder) -> tuple[Arg, Dim]:
    """Returns an extent as an argument, and its axis: of a tensor's axis, or a small
    constant.
    """
    name = b.pick(lambda n: bool(b.dims[n]))
    if name is not None and b.chance(0.7):
        k = b.rng.randrange(len(b.dims[name]))
        size = b.size(name, k)
        dim = b.dims[name][k]
        return size, Dim(dim.vec, isinstance(size, int))
    n = b.rng.randint(1, 6)
    return n, b.constant(n)


def expand(b: FusionBuilder) -> None:
    """Appends an expand of broadcast axes of a tensor."""
    name = b.pick(lambda n: any(d.is_broadcast for d in b.dims[n]))
    if name is None:
        return
    dims = list(b.dims[name])
    sizes: list[Arg] = [-1 if b.chance(0.5) else b.size(name, k) for k in range(len(dims))]
    for k, d in enumerate(dims):
        if d.is_broadcast and b.chance(0.7):
            sizes[k], dim = some_size(b)
            dims[k] = Dim(dim.vec, dim.static, True) if not dim.is_broadcast else dim
    b.emit("expand", [Ref(name), sizes], dims)


def squeeze(b: Builder) -> None:
    """Appends a squeeze of broadcast axes of a tensor."""
    name = b.pick(lambda n: any(d.is_broadcast for d in b.dims[n]))
    if name is None:
        return
    ones = [k for k, d in enumerate(b.dims[name]) if d.is_broadcast]
    gone = sorted(b.rng.sample(ones, b.rng.randint(1, len(ones))))
    dims = [d for k, d in enumerate(b.dims[name]) if k not in gone]
    b.emit("squeeze", [Ref(name), gone], dims)


def permute(b: Builder) -> None:
    """Appends a permutation of the axes of a tensor, sometimes only of their memory order."""
    name = b.pick(lambda n: len(b.dims[n]) > 1)
    if name is None:
        return
    order = b.rng.sample(range(len(b.dims[name])), len(b.dims[name]))
    if b.chance(0.15):
        b.emit("stride_order", [Ref(name), order], b.dims[name])
    else:
        b.emit("permute", [Ref(name), order], [b.dims[name][k] for k in order])


def reshape(b: FusionBuilder) -> None:
    """Appends a reshape: merges, splits, new axes and removed axes."""
    name = b.pick(lambda n: bool(b.dims[n]))
    if name is None:
        return
    dims = [Dim(d.vec, d.static) for d in b.dims[name]]
    sizes: list[Arg] = [b.size(name, k) for k in range(len(dims))]
    for _ in range(b.rng.randint(1, 3)):
        way = b.rng.choice(("merge", "merge", "split", "split", "one", "drop"))
        at = b.rng.randrange(len(dims)) if dims else 0
        if way == "merge" and len(dims) > 1 and at + 1 < len(dims):
            x, y = dims[at], dims[at + 1]
            product: Arg = -2
            a, c = sizes[at], sizes[at + 1]
            if isinstance(a, int) and isinstance(c, int):
                product = a * c
            else:
                made = b.emit_scalar("mul", [a, c])
                if made is None:
                    return
                product = Ref(made)
            vec = tuple(p * q for p, q in zip(x.vec, y.vec, strict=True))
            dims[at : at + 2] = [Dim(vec, isinstance(product, int))]
            sizes[at : at + 2] = [product]
        elif way == "split" and dims and len(dims) < 5:
            common = math.gcd(*dims[at].vec)
            factors = [f for f in (2, 3, 4, 5, 7, 8) if common and common % f == 0]
            whole = sizes[at]
            if not factors or not isinstance(whole, int):
                continue
            f = b.rng.choice(factors)
            rest = whole // f
            pair = [rest, f] if b.chance(0.5) else [f, rest]
            dims[at : at + 1] = [b.constant(n) for n in pair]
            sizes[at : at + 1] = list(pair)
        elif way == "one" and len(dims) < 5:
            dims.insert(at, b.one)
            sizes.insert(at, 1)
        elif way == "drop" and dims and dims[at].is_broadcast and len(dims) > 1:
            del dims[at], sizes[at]
    nonzero = all(n for d in dims for n in d.vec)
    if nonzero and dims and b.chance(0.25):
        k = b.rng.randrange(len(dims))
        sizes[k] = -1
        if not all(isinstance(s, int) for s in sizes) or not all(d.static for d in b.dims[name]):
            dims[k] = Dim(dims[k].vec, False)
    # A constant that replaces a symbolic extent is not a constant of the result.
    b.emit("reshape", [Ref(name), sizes], dims)


def slice(b: FusionBuilder) -> None:
    """Appends a slice along some axes of a tensor."""
    name = b.pick(lambda n: bool(b.dims[n]))
    if name is None:
        return
    starts: list[Arg] = []
    ends: list[Arg] = []
    out: list[Dim] = []
    for k, d in enumerate(b.dims[name]):
        low, high = 0, max(d.vec)
        if b.chance(0.5) and min(d.vec) > 0:
            low = b.rng.randint(0, min(d.vec) - 1) if b.chance(0.6) else 0
            high = b.rng.randint(low + (0 if b.chance(0.05) else 1), max(d.vec))
            starts.append(low)
            ends.append(high)
            vec = tuple(max(min(high, n) - min(low, n), 0) for n in d.vec)
            is_static = d.static
            out.append(Dim(vec, is_static, d.expanded))
        else:
            starts.append(0)
            ends.append(b.size(name, k))
            out.append(d)
    b.emit("slice", [Ref(name), starts, ends], out)


def pad(b: FusionBuilder) -> None:
    """Appends a pad of trailing axes, sometimes with negative widths."""
    name = b.pick(lambda n: bool(b.dims[n]))
    if name is None:
        return
    dims = list(b.dims[name])
    widths: list[Arg] = []
    for back in range(b.rng.randint(1, len(dims))):
        k = len(dims) - 1 - back
        d = dims[k]
        pair = [0, 0]
        if b.chance(0.7):
            pair = [b.rng.randint(0, 4), b.rng.randint(0, 4)]
            if b.chance(0.15) and min(d.vec) >= 4:
                pair[b.rng.randrange(2)] = -b.rng.randint(1, 2)
        widths += pair
        if pair != [0, 0]:
            crops = max(pair) <= 0
            vec = tuple(n + sum(pair) for n in d.vec)
            dims[k] = Dim(vec, d.static, d.expanded and crops)
    args: list[Arg] = [Ref(name), widths]
    if b.chance(0.5):
        args.append({"f": 1.5, "i": 3, "b": True, "c": 1.5 - 2j}[b.category(name)])
    b.emit("pad", args, dims)


def cat(b: FusionBuilder) -> None:
    """Appends a cat of two to four tensors along an axis."""
    name = b.pick(lambda n: bool(b.dims[n]))
    if name is None:
        return
    axis = b.rng.randrange(len(b.dims[name]))

    def fits(other: str) -> bool:
        if b.dtype[other] != b.dtype[name] or len(b.dims[other]) != len(b.dims[name]):
            return False
        pairs = enumerate(zip(b.dims[name], b.dims[other], strict=True))
        return all(k == axis or x.vec == y.vec for k, (x, y) in pairs)

    pieces = [name]
    for _ in range(b.rng.randint(1, 3)):
        other = b.pick(fits)
        assert other is not None
        pieces.insert(b.rng.randint(0, len(pieces)), other)
    columns = list(zip(*(b.dims[p] for p in pieces), strict=True))
    dims = [Dim(c[0].vec, any(d.static for d in c), all(d.expanded for d in c)) for c in columns]
    vec = tuple(sum(d.vec[m] for d in columns[axis]) for m in range(b.ncalls))
    dims[axis] = Dim(vec, all(d.static for d in columns[axis]))
    b.emit("cat", [[Ref(p) for p in pieces], axis - len(dims) if b.chance(0.3) else axis], dims)


def factory(b: FusionBuilder) -> None:
    """Appends an op that creates a tensor, such as full, iota or random numbers, or a triu."""
    op = b.rng.choice(("full", "iota", "triu", "triu", "random", "random", "like"))
    if op == "random":
        random(b)
        return
    if op == "like":
        random_like(b)
        return
    if op == "triu":
        name = b.pick(lambda n: len(b.dims[n]) > 1)
        if name is not None:
            b.emit(op, [Ref(name), b.rng.randint(-3, 3)], b.dims[name])
        return
    dtype = b.draw_dtype()
    if op == "full":
        found = [some_size(b) for _ in range(b.rng.randint(0, 3))]
        value: Arg = {"f": 1.25, "i": -3, "b": True}[
            "b" if dtype == "Bool" else "i" if dtype.startswith("Int") else "f"
        ]
        b.emit(op, [[s for s, _ in found], value, Dt(dtype)], [d for _, d in found])
        return
    if dtype == "Bool" or dtype.startswith("Complex"):
        return
    size, dim = some_size(b)
    is_int = dtype.startswith("Int")
    start: Arg = b.rng.randint(-4, 4) if is_int else 0.5
    step: Arg = b.rng.choice((-2, 1, 3)) if is_int else 0.25
    b.emit(op, [size, start, step, Dt(dtype)], [dim])


def random(b: FusionBuilder) -> None:
    """Appends random numbers, mostly in the shape of a tensor, so that they can be used
    together.
    """
    name = b.pick(lambda n: bool(b.dims[n]))
    if name is not None and b.chance(0.7):
        dims = [Dim(d.vec, d.static) for d in b.dims[name]]
        sizes = [b.size(name, k) for k in range(len(dims))]
    else:
        found = [some_size(b) for _ in range(b.rng.randint(0, 3))]
        sizes, dims = [s for s, _ in found], [d for _, d in found]
    b.add_random(sizes, dims, b.rng.choice(("Float", "Double", "Half", "BFloat16")))


def random_like(b: FusionBuilder) -> None:
    """Appends random numbers of torch's generator, of which only the range is known."""
    name = b.pick(lambda n: b.is_a(n, "f") and b.dtype[n] not in FLOAT8)
    if name is not None:
        dims = [Dim(d.vec, d.static) for d in b.dims[name]]
        b.emit(b.rng.choice(("rand_like", "randn_like")), [Ref(name)], dims)


def attend(b: FusionBuilder) -> None:
    """Appends attention of a tensor with four axes, or of a new one."""
    if len(b.inputs) > 5:
        return
    name = b.pick(lambda n: b.is_a(n, "f") and len(b.dims[n]) == 4)
    if name is None:
        dims = [b.constant(b.rng.choice((1, 2, 3))), *b.rng.choices(b.pool, k=3)]
        if not b.fits(dims):
            return
        name = b.input(dims, b.rng.choice(("Float", "Half", "BFloat16", "Double")))
    if b.dtype[name] in FLOAT8:
        return
    statement(b, name, b.input)


def contraction(b: FusionBuilder) -> None:
    """Appends a linear or a matmul with a new second operand."""
    name = b.pick(
        lambda n: b.is_a(n, "f") and b.dtype[n] not in FLOAT8 and 1 <= len(b.dims[n]) <= 4
    )
    if name is None or len(b.inputs) > 6:
        return
    dims = b.dims[name]
    dtype = b.dtype[name]
    k = dims[-1]
    if k.expanded:
        return
    n = b.constant(b.rng.choice((1, 2, 3, 5, 8, 16))) if b.chance(0.6) else b.rng.choice(b.pool)
    if b.chance(0.5):
        some = [*b.pool, b.one, b.constant(2)]
        batch = b.rng.choices(some, k=b.rng.choice((1, 1, 2))) if b.chance(0.3) else []
        if not b.fits([*batch, n, k]) or not b.fits([*batch, *dims[:-1], n]):
            return
        args: list[Arg] = [Ref(name), Ref(b.input([*batch, n, k], dtype))]
        if b.chance(0.5):
            args.append(Ref(b.input([*batch, n], dtype)))
        b.emit("linear", args, [*batch, *dims[:-1], n])
        return
    if b.chance(0.2):
        other, out = [k], [*dims[:-1]]
    else:
        batch = [d if b.chance(0.8) else b.one for d in dims[:-2] if not d.expanded]
        if len(batch) != max(len(dims) - 2, 0):
            return
        batch = batch[b.rng.randint(0, len(batch)) :] if b.chance(0.3) else batch
        other, out = [*batch, k, n], [*dims[:-1], n]
    if b.fits(other):
        b.emit("matmul", [Ref(name), Ref(b.input(other, dtype))], out)


# Functions that append a product, with the numbers of axes of the tensors that they take.
_PRODUCTS = ((groups.multiply, (2, 3)),) * 2 + ((scaled.multiply, (2,)),) * 2
_PRODUCTS += ((blocks.quantize, (1, 2, 3, 4)), (blocks.lay_out, (2,)))


def product(b: FusionBuilder) -> None:
    """Appends a product of scaled 8-bit floats, a product per group, or an op that makes scaled
    floats.
    """
    if len(b.inputs) > 4:
        return
    append, ranks = b.rng.choice(_PRODUCTS)

    def fits(n: str) -> bool:
        return b.is_a(n, "f") and len(b.dims[n]) in ranks

    name = b.pick(fits)
    if name is None:
        dims = b.rng.choices(b.pool, k=b.rng.choice(ranks))
        if not b.fits(dims):
            return
        name = b.input(dims, b.home if DTYPES[b.home].category == "float" else "Float")
    append(b, name, lambda: b.rng.choice(b.pool), b.input)


def composite(b: FusionBuilder) -> None:
    """Appends an op of torch.nn.functional."""
    name = b.pick(lambda n: b.is_a(n, "f"))
    if name is not None:
        composites.composite(b, name, b.input, draws=b.dtype[name] not in FLOAT8)


def look_up(b: FusionBuilder) -> None:
    """Appends a lookup in a tensor."""
    name = b.pick(lambda n: bool(b.dims[n]))
    if name is not None and len(b.inputs) < 8:
        lookups.look_up(b, name, lambda: b.rng.choice(b.pool), b.input)


def scan_or_sort(b: FusionBuilder) -> None:
    """Appends a scan, a sort or a top-k of a tensor."""
    name = b.pick(lambda n: bool(b.dims[n]))
    if name is not None:
        scans.scan_or_sort(b, name)
