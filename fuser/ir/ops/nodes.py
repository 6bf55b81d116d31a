"""The tensor ops of the fusion IR: declarations, text variants and axis maps.

An axis map says, per tensor operand, which operand axis (a position among the operand's
non-reduction logical axes) each root axis of the output iterates; None where the operand does not
depend on that axis. Everything that relates two tensors (indices, sharding, inlining) reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from fuser.ir.dtypes import HALF_LIKE, INFO, DataType, category, is_complex
from fuser.ir.fusion import AxisMap, TensorOp, TensorView, Variant
from fuser.ir.op import attr, operand, operands, result
from fuser.ir.pointwise_table import POINTWISE, kinds_of
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.types import CacheOp, IterType, LoadStoreOpType, ParallelType
from fuser.support.errors import VerifyError

# ------------------------------------------------------------------ elementwise
# The rules of dtypes by which no floating number overflows, either.
_EXACT_RULES = ("limits", "fitting")


def _exact_operands(kind: str, operands: Sequence[TensorView | Scalar]) -> tuple[Scalar, ...]:
    row = POINTWISE[kind]
    found = (v for i, v in enumerate(operands) if i in row.exact and isinstance(v, Scalar))
    return tuple(v for v in found if category(v.dtype) == "int" or row.rule in _EXACT_RULES)


class UnaryOp(TensorOp):
    """out = kind(inp), element by element."""

    out: TensorView = result()
    inp: TensorView = operand()
    kind: str = attr()

    def template(self) -> str:
        return unary_template(self.kind, is_float=self.out.dtype() is DataType.Float)

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        for kind in kinds_of(1):
            for is_float in (False, True):
                yield {"kind": kind}, unary_template(kind, is_float=is_float)


class CastOp(TensorOp):
    """out = inp converted to out's dtype."""

    out: TensorView = result()
    inp: TensorView = operand()

    @property
    def name(self) -> str:
        return "cast"

    def template(self) -> str:
        return "{out}\n   = " + cast_spelling(self.inp.dtype(), self.out.dtype()) + "({inp});"

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        spellings = {cast_spelling(s, d): None for s in INFO for d in INFO}
        for spelling in spellings:
            yield {}, "{out}\n   = " + spelling + "({inp});"


class BinaryOp(TensorOp):
    """out = lhs kind rhs, element by element; an operand may be a scalar."""

    out: TensorView = result()
    lhs: TensorView | Scalar = operand()
    rhs: TensorView | Scalar = operand()
    kind: str = attr()

    def template(self) -> str:
        return binary_template(self.kind, is_float=category(self.out.dtype()) == "float")

    def exact_numbers(self) -> tuple[Scalar, ...]:
        return _exact_operands(self.kind, (self.lhs, self.rhs))

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        for kind in kinds_of(2):
            for is_float in (False, True):
                yield {"kind": kind}, binary_template(kind, is_float=is_float)


class TernaryOp(TensorOp):
    """out = kind(a, b, c), element by element; operands may be scalars."""

    out: TensorView = result()
    a: TensorView | Scalar = operand()
    b: TensorView | Scalar = operand()
    c: TensorView | Scalar = operand()
    kind: str = attr()

    def template(self) -> str:
        return ternary_template(self.kind)

    def exact_numbers(self) -> tuple[Scalar, ...]:
        return _exact_operands(self.kind, (self.a, self.b, self.c))

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        for kind in kinds_of(3):
            yield {"kind": kind}, ternary_template(kind)


class FullOp(TensorOp):
    """out = value everywhere; out's logical extents are the shape."""

    out: TensorView = result()
    shape: tuple[Scalar, ...] = operands()
    value: Scalar = operand()
    TEXT = "{out}\n   = full({shape}, {value});"

    @property
    def name(self) -> str:
        return "full"

    def exact_numbers(self) -> tuple[Scalar, ...]:
        return (self.value,) if category(self.value.dtype) == "int" else ()

    def axis_map(self, operand_index: int) -> AxisMap:
        return (None,) * len(self.out.domain.maybe_root)


class IotaOp(TensorOp):
    """out[i] = start + i * step."""

    out: TensorView = result()
    length: Scalar = operand()
    start: Scalar = operand()
    step: Scalar = operand()
    TEXT = "{out}\n   = iota({length}, {start}, {step}, {out.dtype});"

    @property
    def name(self) -> str:
        return "iota"

    def axis_map(self, operand_index: int) -> AxisMap:
        return (None,)

    def whole_axes(self, out: TensorView) -> tuple[int, ...]:
        return (0,)


class RandomOp(TensorOp):
    """out[i] is a number that follows from `seed`, `offset` and the place of i in `shape` alone.

    kind: uniform, in [a, b), or normal, of mean a and deviation b; in [0, 1), or standard, without.
    A tensor without a seed draws from torch's generator in each call. `begin` is the index of out's
    first element in a larger tensor of this shape, () where out is all of it.
    """

    out: TensorView = result()
    shape: tuple[Scalar, ...] = operands()
    a: Scalar | None = operand(default=None)
    b: Scalar | None = operand(default=None)
    seed: Scalar | None = operand(default=None)
    offset: Scalar | None = operand(default=None)
    begin: tuple[Scalar, ...] = operands(default=())
    kind: str = attr()
    # Spelled without and with a and b.
    KINDS: ClassVar[dict[str, tuple[str, str]]] = {
        "uniform": ("rng_uniform", "rng_uniform_range"),
        "normal": ("rng_normal_standard", "rng_normal_general"),
    }

    def template(self) -> str:
        return self._template(
            self.KINDS[self.kind][self.a is not None], self.seed is not None, bool(self.begin)
        )

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        for kind, spellings in cls.KINDS.items():
            for spelled in spellings:
                general = {} if spelled is spellings[1] else {"a": None, "b": None}
                fixed: dict[str, object] = {"kind": kind, **general}
                yield {**fixed, "begin": ()}, cls._template(spelled, True, False)
                yield fixed, cls._template(spelled, True, True)
                drawn = {"seed": None, "offset": None, "begin": ()}
                yield {**fixed, **drawn}, cls._template(spelled, False, False)

    @staticmethod
    def _template(spelled: str, has_seed: bool, has_begin: bool) -> str:
        ends = ", {a}, {b}" if spelled in ("rng_uniform_range", "rng_normal_general") else ""
        seed = ", {seed}, {offset}" if has_seed else ""
        begin = ", begin = {begin}" if has_begin else ""
        return "{out}\n   = " + spelled + "({shape}" + ends + ", {out.dtype}" + seed + begin + ");"

    def axis_map(self, operand_index: int) -> AxisMap:
        return (None,) * len(self.out.domain.maybe_root)

    def verify(self) -> None:
        rank = self.out.ndim
        are_pairs = (self.a is None, self.seed is None) == (self.b is None, self.offset is None)
        if not are_pairs or len(self.shape) != rank or len(self.begin) not in (0, rank):
            raise VerifyError(f"{self.kind} of shape {self.shape} does not give {self.out}")


# ------------------------------------------------------------------ copies and views
class LoadStoreOp(TensorOp):
    """out = inp, a copy; a permutation when out has a root domain, which logical permutes."""

    out: TensorView = result()
    inp: TensorView = operand()
    kind: LoadStoreOpType = attr(default=LoadStoreOpType.set)
    cache_op: CacheOp = attr(default=CacheOp.unspecified)

    @property
    def name(self) -> str:
        return "permute" if self.out.domain.root else "set"

    def template(self) -> str:
        permute = ".Permute" if self.out.domain.root else ""
        hint = "" if self.cache_op is CacheOp.unspecified else f", cache_op={self.cache_op.value}"
        return "{out}\n   = " + self.kind.value + permute + "( {inp}" + hint + " )"

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        for kind in LoadStoreOpType:
            for cache_op in CacheOp:
                hint = "" if cache_op is CacheOp.unspecified else f", cache_op={cache_op.value}"
                for permute in ("", ".Permute"):
                    text = "{out}\n   = " + kind.value + permute + "( {inp}" + hint + " )"
                    yield {"kind": kind, "cache_op": cache_op}, text


class Reshard(TensorOp):
    """out is inp, or inp reduced over a device axis, placed otherwise: one change of placement.

    Along the mesh axes `ptypes` (of inp.mesh and out.mesh), logical axis `source` of inp ceases to
    be spread and logical axis `target` of out begins to be; positions leave reductions out, None:
    no such axis. With `reduction` (a ReductionOp kind), `source` is a partial sum's device axis.
    A stream among `ptypes`: out is had step by step; `target` is its stream axis, and `source` the
    axis that devices hold in such blocks, None where each step slices what the device has.
    """

    out: TensorView = result()
    inp: TensorView = operand()
    ptypes: tuple[ParallelType, ...] = attr()
    source: int | None = attr(default=None)
    target: int | None = attr(default=None)
    reduction: str | None = attr(default=None)

    @property
    def name(self) -> str:
        return "reshard"

    def template(self) -> str:
        return _reshard_template(self.source is not None, self.target is not None, self.reduction)

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        for source in (False, True):
            for target in (False, True):
                for reduction in (None, *ReductionOp.KINDS):
                    absent: dict[str, object] = {} if source else {"source": None}
                    absent |= {} if target else {"target": None}
                    yield (
                        {**absent, "reduction": reduction},
                        _reshard_template(source, target, reduction),
                    )


def _reshard_template(has_source: bool, has_target: bool, reduction: str | None) -> str:
    source = ", from = {source}" if has_source else ""
    target = ", to = {target}" if has_target else ""
    op = f", op = {reduction}" if reduction is not None else ""
    return "{out}\n   = Reshard( {inp}, along = {ptypes}" + source + target + op + " )"


class BroadcastOp(TensorOp):
    """Insert broadcast axes: flags has one entry per output axis, True for a new one."""

    out: TensorView = result()
    inp: TensorView = operand()
    flags: tuple[bool, ...] = attr()
    TEXT = "{out}\n   = broadcast( {inp}, flags = {flags} )"

    @property
    def name(self) -> str:
        return "broadcast"

    def axis_map(self, operand_index: int) -> AxisMap:
        source = iter(range(len(self.flags)))
        return tuple(None if new else next(source) for new in self.flags)

    def verify(self) -> None:
        kept, have = self.flags.count(False), len(self.inp.domain.no_reductions)
        if kept != have:
            raise VerifyError(f"broadcast keeps {kept} axes, but {self.inp} has {have}")


class SqueezeOp(TensorOp):
    """Drop broadcast axes: flags has one entry per input axis, True for a dropped one."""

    out: TensorView = result()
    inp: TensorView = operand()
    flags: tuple[bool, ...] = attr()
    TEXT = "{out}\n   = squeeze( {inp}, flags = {flags} )"

    @property
    def name(self) -> str:
        return "squeeze"

    def axis_map(self, operand_index: int) -> AxisMap:
        return tuple(i for i, gone in enumerate(self.flags) if not gone)


class ExpandOp(TensorOp):
    """Give broadcast axes an expanded extent (or state the extent of a concrete axis)."""

    out: TensorView = result()
    inp: TensorView = operand()
    shape: tuple[Scalar, ...] = operands()
    TEXT = "{out} = expand( {inp}, {shape} )"

    @property
    def name(self) -> str:
        return "expand"


class ReshapeOp(TensorOp):
    """out.logical is derived from out.root (mapped to inp) by splits and merges."""

    out: TensorView = result()
    inp: TensorView = operand()
    TEXT = "{out} = reshape( {inp} )"

    @property
    def name(self) -> str:
        return "reshape"


# ------------------------------------------------------------------ reductions
class ReductionOp(TensorOp):
    """out reduces inp over out's reduction axes. kind: add, mul, max, min."""

    out: TensorView = result()
    inp: TensorView = operand()
    init: Scalar = operand()
    kind: str = attr()
    KINDS: ClassVar[tuple[str, ...]] = ("add", "mul", "max", "min")

    @property
    def name(self) -> str:
        return {"add": "sum", "mul": "prod"}.get(self.kind, self.kind)

    def template(self) -> str:
        return (
            "{out}\n   = reduction( {inp}, op = "
            + self.kind
            + ", initial value = {init}, allreduce = false )"
        )

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        for kind in cls.KINDS:
            yield (
                {"kind": kind},
                "{out}\n   = reduction( {inp}, op = "
                + kind
                + ", initial value = {init}, allreduce = false )",
            )


class WelfordOp(TensorOp):
    """avg, var (sum of squared deviations) and n (count, Index) over the reduction axes."""

    avg: TensorView = result()
    var: TensorView = result()
    n: TensorView = result()
    inp: TensorView = operand()
    TEXT = (
        "{avg}(Avg),\n{var}(Var),\n{n}(Count)\n = Welford ( {inp}(Avg), \n"
        "  initial value = 0(Avg)\n  0(Var)\n  0(N)\n  allreduce = false )"
    )

    @property
    def name(self) -> str:
        return "welford"


# ------------------------------------------------------------------ library ops
class LibraryOp(TensorOp):
    """Base of the ops that torch carries out: each is a segment of its own."""

    # Whether blocks along an axis of the results may come from steps of a loop.
    RUNS_IN_STEPS: ClassVar[bool] = True
    # Whether torch gives the results for empty operands; else what they mean is filled in.
    TAKES_EMPTY: ClassVar[bool] = False
    # Whether results repeat their elements where all operands do.
    KEEPS_EXPANDED: ClassVar[bool] = True
    # Whether the host needs values of an operand, in each run.
    READS_ON_HOST: ClassVar[bool] = False
    # Whether batches of an operand may lie anywhere, also inside of a matrix, without a copy.
    TAKES_ANY_BATCHES: ClassVar[bool] = False
    # Whether torch writes results into memory of its own, which may take the place of a buffer.
    MAKES_RESULTS: ClassVar[bool] = False

    @property
    def draws(self) -> bool:
        """Whether results may depend on random numbers that torch draws in each run."""
        return False

    def followed_by(self, out: TensorView) -> TensorView | None:
        """Returns the operand in whose memory order torch writes a result, which has its axes one
        by one; None where results are row-major."""
        del out
        return None


class Contraction(LibraryOp):
    """Base of the ops that sum products over one axis: out's last one, a reduction, unless its size
    is 1."""

    if TYPE_CHECKING:
        out: TensorView


class MatmulOp(Contraction):
    """out[..., m, n] = sum_k a[..., m, k] b[..., k, n]; 1-D operands as in torch.matmul.

    out.logical is [batch..., M, N, rK]; rK is absent when K has size 1 in both operands.
    """

    out: TensorView = result()
    a: TensorView = operand()
    b: TensorView = operand()
    TEXT = "{out}\n   = matmul({a},\n            {b})"
    REFERENCES: ClassVar[tuple[int, ...]] = (1, 0)

    @property
    def name(self) -> str:
        return "matmul"

    def axis_map(self, operand_index: int) -> AxisMap:
        axes = self.out.domain.maybe_root
        has_k = bool(axes) and axes[-1].kind is IterType.reduction
        rank = len(axes) - has_k
        na, nb = len(self.a.domain.no_reductions), len(self.b.domain.no_reductions)
        has_m, has_n = na > 1, nb > 1
        nbatch = rank - has_m - has_n
        mine = na if operand_index == 0 else nb
        offset = nbatch - max(mine - 2, 0)
        batch: list[int | None] = [i - offset if i >= offset else None for i in range(nbatch)]
        m = [na - 2 if operand_index == 0 else None] if has_m else []
        n = [nb - 1 if operand_index == 1 else None] if has_n else []
        k = ([na - 1] if operand_index == 0 else [max(nb - 2, 0)]) if has_k else []
        return (*batch, *m, *n, *k)


class LinearOp(Contraction):
    """out = x @ weight.T (+ bias).

    x [*i, K], weight [*w, N, K], bias [*w, N] -> out.logical [*w, *i, N, rK]. In a host program
    weight and bias may be one column's, [K] and [], and the result is [*i, rK].
    """

    out: TensorView = result()
    x: TensorView = operand()
    weight: TensorView = operand()
    bias: TensorView | None = operand()
    REFERENCES: ClassVar[tuple[int, ...]] = (1, 2, 0)

    @property
    def name(self) -> str:
        return "linear"

    def template(self) -> str:
        tail = ",\n            {bias}" if self.bias is not None else ""
        return "{out}\n   = linear({x},\n            {weight}" + tail + ")"

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        yield {}, "{out}\n   = linear({x},\n            {weight},\n            {bias})"
        yield {"bias": None}, "{out}\n   = linear({x},\n            {weight})"

    def verify(self) -> None:
        axes = self.out.domain.maybe_root
        has_k = bool(axes) and axes[-1].kind is IterType.reduction
        rank = self.x.ndim + self.weight.ndim - 2
        if len(axes) - has_k != rank or not self.weight.ndim:
            raise VerifyError(
                f"linear of x [*i, k] and weight [*w, n, k] gives [*w, *i, n], not {self.x}, "
                f"{self.weight} -> {self.out}"
            )
        if self.bias is not None and self.bias.ndim != self.weight.ndim - 1:
            raise VerifyError(
                f"linear with weight [*w, n, k] has a bias [*w, n], not {self.weight}, {self.bias}"
            )

    def axis_map(self, operand_index: int) -> AxisMap:
        axes = self.out.domain.maybe_root
        has_k = bool(axes) and axes[-1].kind is IterType.reduction
        rows, batch = self.x.ndim - 1, max(self.weight.ndim - 2, 0)
        if operand_index == 0:
            return (*(None,) * batch, *range(rows), None, *([rows] if has_k else []))
        k = batch + 1 if operand_index == 1 else None
        return (*range(batch), *(None,) * rows, batch, *([k] if has_k else []))

    @property
    def bias_lacks(self) -> tuple[bool, ...]:
        """Which axes of the result, reductions left out, the bias does not have: the rows."""
        return tuple(p is None for p in self.axis_map(2)[: self.out.ndim])


# ----------------------------------------------------------------------
# Ops that change extents: slices, pads, and concatenations of what is padded.


class SliceOp(TensorOp):
    """out = inp[start:stop] per axis, step 1; out.logical = Resize(out.root)."""

    out: TensorView = result()
    inp: TensorView = operand()
    # start, stop and step of every axis
    ranges: tuple[Scalar, ...] = operands(in_rows=3)
    TEXT = "{out}\n   = slice( {inp}, {ranges} )"

    @property
    def name(self) -> str:
        return "slice"

    @property
    def starts(self) -> tuple[Scalar, ...]:
        return self.ranges[::3]

    @property
    def stops(self) -> tuple[Scalar, ...]:
        return self.ranges[1::3]

    @staticmethod
    def ranges_of(starts: Iterable[Scalar], stops: Iterable[Scalar]) -> tuple[Scalar, ...]:
        """Returns the ranges from start to stop of each axis."""
        return tuple(x for a, b in zip(starts, stops, strict=True) for x in (a, b, sc.ONE))

    def verify(self) -> None:
        axes, steps = self.inp.ndim, self.ranges[2::3]
        if len(self.ranges) != 3 * axes or any(sc.int_value(step) != 1 for step in steps):
            raise VerifyError(f"slice takes a range of step 1 of each of the {axes} axes: {self}")


class PadOp(TensorOp):
    """out = inp with `left[i]` and `right[i]` elements of `value` around axis i (< 0: crop).

    `widths` are these of every axis, outermost first; without a `filler` the value is 0.
    """

    out: TensorView = result()
    inp: TensorView = operand()
    widths: tuple[Scalar, ...] = operands()
    filler: Scalar | None = operand(default=None)

    @property
    def name(self) -> str:
        return "pad"

    def exact_numbers(self) -> tuple[Scalar, ...]:
        return (self.value,) if category(self.value.dtype) == "int" else ()

    @property
    def left(self) -> tuple[Scalar, ...]:
        return self.widths[::2]

    @property
    def right(self) -> tuple[Scalar, ...]:
        return self.widths[1::2]

    @property
    def value(self) -> Scalar:
        return sc.Const(0, self.out.dtype()) if self.filler is None else self.filler

    def verify(self) -> None:
        if len(self.widths) != 2 * self.inp.ndim:
            raise VerifyError(f"pad takes two widths for each of {self.inp.ndim} axes: {self}")

    def template(self) -> str:
        filler = "" if self.filler is None else ", {filler}"
        return "{out}\n   = pad( {inp}, {widths}" + filler + " )"

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        yield {"filler": None}, "{out}\n   = pad( {inp}, {widths} )"
        yield {}, "{out}\n   = pad( {inp}, {widths}, {filler} )"


class CatOp(TensorOp):
    """out = the pieces along `dim`; each input is already padded to out's extent.

    `ends[k]` is where piece k ends along `dim`.
    """

    out: TensorView = result()
    pieces: tuple[TensorView, ...] = operands()
    ends: tuple[Scalar, ...] = operands()
    dim: int = attr()
    TEXT = "{out}\n   = cat( {pieces}, {ends}, {dim} )"

    @property
    def name(self) -> str:
        return "cat"

    def whole_axes(self, out: TensorView) -> tuple[int, ...]:
        return (self.dim,)


# ----------------------------------------------------------------------
# How elementwise ops and casts are spelled in IR text.


def unary_template(kind: str, *, is_float: bool) -> str:
    """Returns the text of an op of one operand; `is_float`: the result is Float."""
    row = POINTWISE[kind]
    if row.is_operator:
        return "{out}\n   = " + row.text + "{inp};"
    return "{out}\n   = " + (row.float_text if is_float else row.text) + "({inp});"


def binary_template(kind: str, *, is_float: bool) -> str:
    """Returns the text of an op of two operands; `is_float`: the result is floating."""
    row = POINTWISE[kind]
    if row.is_operator:
        return "{out}\n   = {lhs}\n   " + row.text + " {rhs};"
    return "{out}\n   = " + (row.float_text if is_float else row.text) + "({lhs}\n  , {rhs});"


def ternary_template(kind: str) -> str:
    """Returns the text of an op of three operands."""
    return "{out}\n   = " + POINTWISE[kind].text + "({a}\n  , {b}\n  , {c});"


_CAST_NAMES = {"float": "float", "double": "double"} | {
    text: text.removeprefix("__") for text in (INFO[d].text for d in HALF_LIKE)
}
_CAST_TO = {
    "float": "__to_float",
    "double": "__to_double",
    "int": "__to_int32",
    "int64_t": "__to_int64",
    "nvfuser_index_t": "__to_index",
    "bool": "__to_bool",
    "std::complex<float>": "__to_complex_float",
    "std::complex<double>": "__to_complex_double",
}


def cast_spelling(src: DataType, dst: DataType) -> str:
    """Returns nvFuser's name of a cast (`__to_float`, `__half2float`, `__int2half`, ...)."""
    s, d = INFO[src].text, INFO[dst].text
    if is_complex(src) and category(dst) in ("int", "float"):
        return _CAST_TO.get(d, f"__to_{_CAST_NAMES.get(d)}").replace("__", "__real_then_", 1)
    if dst in HALF_LIKE or (src in HALF_LIKE and d in ("float", "double")):
        return f"__{_CAST_NAMES.get(s, 'bool' if s == 'bool' else 'int')}2{_CAST_NAMES[d]}"
    return _CAST_TO[d]


# ----------------------------------------------------------------------
# What ops cost a thread, in instructions: rough, to decide between computing and keeping.

# What costs a thread more than keeping the result in a register: special functions, divisions,
# random numbers.
EXPENSIVE = frozenset((*(k for k, row in POINTWISE.items() if row.is_slow), *RandomOp.KINDS))
_EXPENSIVE_INSTRUCTIONS = 20


def instructions(op: TensorOp) -> int:
    """Returns about how many instructions an op takes per element."""
    return _EXPENSIVE_INSTRUCTIONS if op.name in EXPENSIVE else 1
