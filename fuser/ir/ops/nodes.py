"""The tensor ops of the fusion IR: their fields, their text forms, and which axes correspond.

An *axis map* tells which axes of an operand and of the result correspond. It is a tuple with one
entry per axis of the result: the position of the corresponding operand axis, or None if the operand
has no such axis. An axis map lists the *root axes* of the result, the axes that the op itself
computes. They include reduction axes and precede the splits and merges of a reshape. Positions in
the operand do not count reduction axes. Index computations, sharding and loop fusion read these
maps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from fuser.ir.dtypes import HALF_LIKE, INFO, DataType, category, is_complex, nbytes_of
from fuser.ir.fusion import AxisMap, TensorOp, TensorView, Variant
from fuser.ir.op import attr, operand, operands, result
from fuser.ir.pointwise_table import POINTWISE, kinds_of
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.types import CacheOp, IterType, LoadStoreOpType, ParallelType
from fuser.support.errors import VerifyError, counted

# ------------------------------------------------------------------ elementwise
# Under these dtype rules, a floating operand must be exact in the result's dtype, too.
_EXACT_RULES = ("limits", "fitting")


def _exact_operands(kind: str, operands: Sequence[TensorView | Scalar]) -> tuple[Scalar, ...]:
    """Returns the scalar operands that the dtype of the result must represent exactly.

    An example is the divisor of an integer division: if it wrapped around, the result would be
    wrong. `kind` is the name of the elementwise op, a row of `fuser.ir.pointwise_table`.
    """
    row = POINTWISE[kind]
    found = (v for i, v in enumerate(operands) if i in row.exact and isinstance(v, Scalar))
    return tuple(v for v in found if category(v.dtype) == "int" or row.rule in _EXACT_RULES)


class UnaryOp(TensorOp):
    """An elementwise op with one operand: out = kind(inp).

    `kind` is the name of the operation, such as "exp". `fuser.ir.pointwise_table` lists all names.
    """

    out: TensorView = result()
    inp: TensorView = operand()
    kind: str = attr()

    @property
    def is_linear(self) -> bool:
        """Whether op(a + b) = op(a) + op(b), as `TensorOp.is_linear` describes: only for `neg`."""
        return self.kind == "neg"

    def template(self) -> str:
        """Returns the text form of this op, with placeholders such as `{out}` for its fields."""
        return unary_template(self.kind, is_float=self.out.dtype() is DataType.Float)

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        """Yields (attribute values, template) for each text form that ops of this class can have.

        A template is the text of an op, with placeholders such as `{out}` for its fields. If a text
        matches a template, the parser creates an op with the attribute values of this pair. Of
        several templates that match, the first is taken.
        """
        for kind in kinds_of(1):
            for is_float in (False, True):
                yield {"kind": kind}, unary_template(kind, is_float=is_float)


class CastOp(TensorOp):
    """The elementwise conversion of inp to the dtype of out."""

    out: TensorView = result()
    inp: TensorView = operand()

    @property
    def name(self) -> str:
        """The name of the op in messages and dumps: `cast`."""
        return "cast"

    @property
    def is_linear(self) -> bool:
        """Whether op(a + b) = op(a) + op(b), as `TensorOp.is_linear` describes.

        This is so for a cast to a wider floating dtype, because it rounds nothing.
        """
        source, target = self.inp.dtype(), self.out.dtype()
        is_exact = nbytes_of(source) < nbytes_of(target) and category(source) == category(target)
        return is_exact and category(source) in ("float", "complex")

    def template(self) -> str:
        """Returns the text form of this op, with placeholders such as `{out}` for its fields."""
        return "{out}\n   = " + cast_spelling(self.inp.dtype(), self.out.dtype()) + "({inp});"

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        """Yields (attribute values, template) for each text form that ops of this class can have.

        A template is the text of an op, with placeholders such as `{out}` for its fields. If a text
        matches a template, the parser creates an op with the attribute values of this pair. Of
        several templates that match, the first is taken.
        """
        spellings = {cast_spelling(s, d): None for s in INFO for d in INFO}
        for spelling in spellings:
            yield {}, "{out}\n   = " + spelling + "({inp});"


class BinaryOp(TensorOp):
    """An elementwise op with two operands: out = lhs kind rhs. At most one operand may be a scalar.

    `kind` is the name of the operation, such as "add". `fuser.ir.pointwise_table` lists all names.
    """

    out: TensorView = result()
    lhs: TensorView | Scalar = operand()
    rhs: TensorView | Scalar = operand()
    kind: str = attr()

    @property
    def is_linear(self) -> bool:
        """Whether op(a + b, c + d) = op(a, c) + op(b, d), as `TensorOp.is_linear` describes.

        This is so for the sum or difference of two tensors, and for the product with a scalar.
        """
        tensors = [v for v in (self.lhs, self.rhs) if not isinstance(v, Scalar)]
        has_one_dtype = {v.dtype() for v in tensors} == {self.out.dtype()}
        count = {"add": 2, "sub": 2, "mul": 1}.get(self.kind)
        return len(tensors) == count and has_one_dtype and self.out.dtype() is not DataType.Bool

    def template(self) -> str:
        """Returns the text form of this op, with placeholders such as `{out}` for its fields."""
        return binary_template(self.kind, is_float=category(self.out.dtype()) == "float")

    def exact_numbers(self) -> tuple[Scalar, ...]:
        """Returns the scalar operands that the dtype of the result must represent exactly.

        An example is the divisor of an integer division: if it wrapped around, the result would be
        wrong.
        """
        return _exact_operands(self.kind, (self.lhs, self.rhs))

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        """Yields (attribute values, template) for each text form that ops of this class can have.

        A template is the text of an op, with placeholders such as `{out}` for its fields. If a text
        matches a template, the parser creates an op with the attribute values of this pair. Of
        several templates that match, the first is taken.
        """
        for kind in kinds_of(2):
            for is_float in (False, True):
                yield {"kind": kind}, binary_template(kind, is_float=is_float)


class TernaryOp(TensorOp):
    """An elementwise op with three operands: out = kind(a, b, c). Operands may be scalars.

    `kind` is the name of the operation, such as "where". `fuser.ir.pointwise_table` lists all
    names.
    """

    out: TensorView = result()
    a: TensorView | Scalar = operand()
    b: TensorView | Scalar = operand()
    c: TensorView | Scalar = operand()
    kind: str = attr()

    def template(self) -> str:
        """Returns the text form of this op, with placeholders such as `{out}` for its fields."""
        return ternary_template(self.kind)

    def exact_numbers(self) -> tuple[Scalar, ...]:
        """Returns the scalar operands that the dtype of the result must represent exactly.

        An example is a bound of a clamp: if it wrapped around, the result would be wrong.
        """
        return _exact_operands(self.kind, (self.a, self.b, self.c))

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        """Yields (attribute values, template) for each text form that ops of this class can have.

        A template is the text of an op, with placeholders such as `{out}` for its fields. If a text
        matches a template, the parser creates an op with the attribute values of this pair. Of
        several templates that match, the first is taken.
        """
        for kind in kinds_of(3):
            yield {"kind": kind}, ternary_template(kind)


class FullOp(TensorOp):
    """A tensor in which every element is `value`. `shape` has the sizes of its axes."""

    out: TensorView = result()
    shape: tuple[Scalar, ...] = operands()
    value: Scalar = operand()
    TEXT = "{out}\n   = full({shape}, {value});"

    @property
    def name(self) -> str:
        """The name of the op in messages and dumps: `full`."""
        return "full"

    def exact_numbers(self) -> tuple[Scalar, ...]:
        """Returns the scalar operands that the dtype of the result must represent exactly.

        This is `value` if it is an integer, because a value that wraps around would fill the tensor
        with a wrong number.
        """
        return (self.value,) if category(self.value.dtype) == "int" else ()

    def axis_map(self, operand_index: int) -> AxisMap:
        """Returns, per axis of the result, the corresponding operand axis, or None.

        All entries are None, because the op has no tensor operand.
        """
        return (None,) * len(self.out.domain.maybe_root)


class IotaOp(TensorOp):
    """Numbers at equal distances: out[i] = start + i * step, for 0 <= i < `length`."""

    out: TensorView = result()
    length: Scalar = operand()
    start: Scalar = operand()
    step: Scalar = operand()
    TEXT = "{out}\n   = iota({length}, {start}, {step}, {out.dtype});"

    @property
    def name(self) -> str:
        """The name of the op in messages and dumps: `iota`."""
        return "iota"

    def axis_map(self, operand_index: int) -> AxisMap:
        """Returns, per axis of the result, the corresponding operand axis, or None.

        The only entry is None, because the op has no tensor operand.
        """
        return (None,)

    def whole_axes(self, out: TensorView) -> tuple[int, ...]:
        """Returns the axes of `out` that must not be split over devices.

        This is axis 0, the only axis: the op always begins with the number `start`, so it cannot
        compute the block of a device that begins with a later number.
        """
        return (0,)


class RandomOp(TensorOp):
    """Random numbers, each of which depends only on `seed`, `offset` and its own position.

    - kind "uniform": numbers in [a, b), by default [0, 1).
    - kind "normal": numbers with mean a and standard deviation b, by default 0 and 1.
    - Without a seed, each call takes a new seed and offset from torch's generator.
    - The position of a number is its index in a tensor with the sizes `shape`.
    - out may be only a part of this tensor, such as the part that one device stores. `begin` is
      then the index of the first element of out in the whole tensor. Otherwise `begin` is ().
    """

    out: TensorView = result()
    shape: tuple[Scalar, ...] = operands()
    a: Scalar | None = operand(default=None)
    b: Scalar | None = operand(default=None)
    seed: Scalar | None = operand(default=None)
    offset: Scalar | None = operand(default=None)
    begin: tuple[Scalar, ...] = operands(default=())
    kind: str = attr()
    # Per kind, the names in IR text without and with a and b.
    KINDS: ClassVar[dict[str, tuple[str, str]]] = {
        "uniform": ("rng_uniform", "rng_uniform_range"),
        "normal": ("rng_normal_standard", "rng_normal_general"),
    }

    def template(self) -> str:
        """Returns the text form of this op, with placeholders such as `{out}` for its fields."""
        return self._template(
            self.KINDS[self.kind][self.a is not None], self.seed is not None, bool(self.begin)
        )

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        """Yields (attribute values, template) for each text form that ops of this class can have.

        A template is the text of an op, with placeholders such as `{out}` for its fields. If a text
        matches a template, the parser creates an op with the attribute values of this pair. Of
        several templates that match, the first is taken.
        """
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
        """Returns, per axis of the result, the corresponding operand axis, or None.

        All entries are None, because the op has no tensor operand.
        """
        return (None,) * len(self.out.domain.maybe_root)

    def verify(self) -> None:
        """Checks that `shape` and `begin` have one entry per axis, and that pairs are complete.

        The pairs are (a, b) and (seed, offset): both operands are present, or both are None.

        Raises:
            VerifyError: a check fails.
        """
        rank = self.out.ndim
        for field, sizes in (("shape", self.shape), ("begin", self.begin)):
            if len(sizes) != rank and (sizes or field == "shape"):
                raise VerifyError(
                    f"{self.kind}: {field} must have one entry for each axis of {self.out} "
                    f"({counted(rank, 'axis')}), but it has {len(sizes)}: "
                    f"[{', '.join(map(str, sizes))}]"
                )
        for first, second in (("a", "b"), ("seed", "offset")):
            absent = [f for f in (first, second) if getattr(self, f) is None]
            if len(absent) == 1:
                raise VerifyError(
                    f"{self.kind} of {self.out}: {first} and {second} must be passed together, but "
                    f"{absent[0]} is missing"
                )


# ------------------------------------------------------------------ copies and views
class LoadStoreOp(TensorOp):
    """A copy, which may permute axes: out = inp.

    If the copy permutes axes, the domain of out stores them in both orders: in that of inp (as root
    axes) and in that of out (as logical axes).
    """

    out: TensorView = result()
    inp: TensorView = operand()
    kind: LoadStoreOpType = attr(default=LoadStoreOpType.set)
    cache_op: CacheOp = attr(default=CacheOp.unspecified)

    @property
    def name(self) -> str:
        """The name of the op in messages: `permute` if the order of axes changes, else `set`."""
        return "permute" if self.out.domain.root else "set"

    @property
    def is_linear(self) -> bool:
        """Whether op(a + b) = op(a) + op(b), as `TensorOp.is_linear` describes: always."""
        return True

    def template(self) -> str:
        """Returns the text form of this op, with placeholders such as `{out}` for its fields."""
        permute = ".Permute" if self.out.domain.root else ""
        hint = "" if self.cache_op is CacheOp.unspecified else f", cache_op={self.cache_op.value}"
        return "{out}\n   = " + self.kind.value + permute + "( {inp}" + hint + " )"

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        """Yields (attribute values, template) for each text form that ops of this class can have.

        A template is the text of an op, with placeholders such as `{out}` for its fields. If a text
        matches a template, the parser creates an op with the attribute values of this pair. Of
        several templates that match, the first is taken.
        """
        for kind in LoadStoreOpType:
            for cache_op in CacheOp:
                hint = "" if cache_op is CacheOp.unspecified else f", cache_op={cache_op.value}"
                for permute in ("", ".Permute"):
                    text = "{out}\n   = " + kind.value + permute + "( {inp}" + hint + " )"
                    yield {"kind": kind, "cache_op": cache_op}, text


class Reshard(TensorOp):
    """A copy that distributes a tensor over devices differently, or adds devices' partial results.

    One op makes one change, along the mesh dimensions `ptypes`:

    - `source`: the axis of inp that is split over these mesh dimensions, and that each device has
      completely in out; None if there is none.
    - `target`: the axis of out that is split over these mesh dimensions, and that each device has
      completely in inp; None if there is none.
    - `reduction`: how the partial results of devices are combined (a kind of `ReductionOp`), or
      None. `source` is then the axis of inp along which each device stores its own partial result.

    Axes are positions, which do not count reduction axes.

    `ptypes` may also contain a parallel type for streams, such as `stream`. A loop then computes
    one block of out per iteration, and its iterations run on several CUDA streams. `target` is the
    axis that this loop divides, and `source` the axis that is split over devices. If each iteration
    only slices data that the device already has, `source` is None.
    """

    out: TensorView = result()
    inp: TensorView = operand()
    ptypes: tuple[ParallelType, ...] = attr()
    source: int | None = attr(default=None)
    target: int | None = attr(default=None)
    reduction: str | None = attr(default=None)

    @property
    def name(self) -> str:
        """The name of the op in messages and dumps: `reshard`."""
        return "reshard"

    def template(self) -> str:
        """Returns the text form of this op, with placeholders such as `{out}` for its fields."""
        return _reshard_template(self.source is not None, self.target is not None, self.reduction)

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        """Yields (attribute values, template) for each text form that ops of this class can have.

        A template is the text of an op, with placeholders such as `{out}` for its fields. If a text
        matches a template, the parser creates an op with the attribute values of this pair. Of
        several templates that match, the first is taken.
        """
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
    """The insertion of broadcast axes: axes of size 1, which later ops may repeat.

    `flags` has one entry per output axis: True for a new axis.
    """

    out: TensorView = result()
    inp: TensorView = operand()
    flags: tuple[bool, ...] = attr()
    TEXT = "{out}\n   = broadcast( {inp}, flags = {flags} )"

    @property
    def name(self) -> str:
        """The name of the op in messages and dumps: `broadcast`."""
        return "broadcast"

    def axis_map(self, operand_index: int) -> AxisMap:
        """Returns, per axis of the result, the corresponding operand axis, or None for a new axis.

        The other axes of the result are those of the operand in the same order.
        """
        source = iter(range(len(self.flags)))
        return tuple(None if new else next(source) for new in self.flags)

    def verify(self) -> None:
        """Checks that `flags` has one False for each axis of the operand.

        Raises:
            VerifyError: the numbers differ.
        """
        kept, have = self.flags.count(False), len(self.inp.domain.no_reductions)
        if kept != have:
            raise VerifyError(
                f"broadcast: the flags must have one False for each axis of {self.inp} "
                f"({counted(have, 'axis')}), but have {kept}"
            )


class SqueezeOp(TensorOp):
    """The removal of broadcast axes, which have size 1.

    `flags` has one entry per input axis: True for a removed axis.
    """

    out: TensorView = result()
    inp: TensorView = operand()
    flags: tuple[bool, ...] = attr()
    TEXT = "{out}\n   = squeeze( {inp}, flags = {flags} )"

    @property
    def name(self) -> str:
        """The name of the op in messages and dumps: `squeeze`."""
        return "squeeze"

    def axis_map(self, operand_index: int) -> AxisMap:
        """Returns, per axis of the result, the position of the corresponding operand axis."""
        return tuple(i for i, gone in enumerate(self.flags) if not gone)


class ExpandOp(TensorOp):
    """The repetition of broadcast axes up to the sizes in `shape`, as `torch.Tensor.expand` does.

    `shape` has one size per axis. For an axis that is not repeated, it has the current size.
    """

    out: TensorView = result()
    inp: TensorView = operand()
    shape: tuple[Scalar, ...] = operands()
    TEXT = "{out} = expand( {inp}, {shape} )"

    @property
    def name(self) -> str:
        """The name of the op in messages and dumps: `expand`."""
        return "expand"


class ReshapeOp(TensorOp):
    """A reshape: splits and merges turn the axes of inp into the axes that users see in out.

    The domain of out stores both: the axes of inp as root axes, and the new ones as logical axes.
    """

    out: TensorView = result()
    inp: TensorView = operand()
    TEXT = "{out} = reshape( {inp} )"

    @property
    def is_linear(self) -> bool:
        """Whether op(a + b) = op(a) + op(b), as `TensorOp.is_linear` describes: always."""
        return True

    @property
    def name(self) -> str:
        """The name of the op in messages and dumps: `reshape`."""
        return "reshape"


# ------------------------------------------------------------------ reductions
class ReductionOp(TensorOp):
    """A reduction of inp over those axes that are marked as reduction axes in out.

    `kind` is add, mul, max or min. `init` is the value with which the reduction starts, so it is
    the result for an empty axis.
    """

    out: TensorView = result()
    inp: TensorView = operand()
    init: Scalar = operand()
    kind: str = attr()
    KINDS: ClassVar[tuple[str, ...]] = ("add", "mul", "max", "min")

    @property
    def name(self) -> str:
        """The name of the op in messages: `sum`, `prod`, `max` or `min`."""
        return {"add": "sum", "mul": "prod"}.get(self.kind, self.kind)

    def template(self) -> str:
        """Returns the text form of this op, with placeholders such as `{out}` for its fields."""
        return (
            "{out}\n   = reduction( {inp}, op = "
            + self.kind
            + ", initial value = {init}, allreduce = false )"
        )

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        """Yields (attribute values, template) for each text form that ops of this class can have.

        A template is the text of an op, with placeholders such as `{out}` for its fields. If a text
        matches a template, the parser creates an op with the attribute values of this pair. Of
        several templates that match, the first is taken.
        """
        for kind in cls.KINDS:
            yield (
                {"kind": kind},
                "{out}\n   = reduction( {inp}, op = "
                + kind
                + ", initial value = {init}, allreduce = false )",
            )


class WelfordOp(TensorOp):
    """Computes mean, sum of squared deviations and number of elements in one pass over the data.

    The results are `avg`, `var` (the sum of squared deviations) and `n`. The axes that are reduced
    are marked as reduction axes in the results.

    Source: Welford 1962, "Note on a Method for Calculating Corrected Sums of Squares and Products".
    """

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
        """The name of the op in messages and dumps: `welford`."""
        return "welford"


# ------------------------------------------------------------------ library ops
class LibraryOp(TensorOp):
    """Base class of the ops that torch executes. Such an op is never part of a generated kernel."""

    # Whether the steps of a stream loop may compute blocks of the results.
    RUNS_IN_STEPS: ClassVar[bool] = True
    # Whether torch accepts empty operands; otherwise a pass fills in the result.
    TAKES_EMPTY: ClassVar[bool] = False
    # Whether a result axis is expanded (stride 0) if it is expanded in all operands.
    KEEPS_EXPANDED: ClassVar[bool] = True
    # Whether the host must read values of an operand in every run.
    READS_ON_HOST: ClassVar[bool] = False
    # Whether an operand may have batches with any strides without being copied.
    TAKES_ANY_BATCHES: ClassVar[bool] = False
    # Whether torch allocates the results itself; such memory may replace a planned buffer.
    MAKES_RESULTS: ClassVar[bool] = False

    @property
    def draws(self) -> bool:
        """Whether results depend on random numbers that torch draws in each run, as in dropout."""
        return False

    def followed_by(self, out: TensorView) -> TensorView | None:
        """Returns the operand that determines the order of the axes of the result `out` in memory.

        Both have the same order. Returns None if no operand determines it, because `out` is
        row-major.
        """
        del out
        return None


class Contraction(LibraryOp):
    """Base class of matmul and linear, which sum products over one axis.

    The result has this summed axis, too: it is the last of the axes that the op itself computes,
    and is marked as a reduction axis. If its size is 1, nothing is summed, and the result lacks the
    axis.
    """

    if TYPE_CHECKING:
        out: TensorView


class MatmulOp(Contraction):
    """A matrix product: out[..., m, n] = sum_k a[..., m, k] b[..., k, n], as torch.matmul.

    An operand may have only one axis, k. The axes of out are [batch..., m, n, k], where k is marked
    as a reduction axis. k is absent if it has size 1 in both operands.
    """

    out: TensorView = result()
    a: TensorView = operand()
    b: TensorView = operand()
    TEXT = "{out}\n   = matmul({a},\n            {b})"
    REFERENCES: ClassVar[tuple[int, ...]] = (1, 0)

    @property
    def name(self) -> str:
        """The name of the op in messages and dumps: `matmul`."""
        return "matmul"

    def axis_map(self, operand_index: int) -> AxisMap:
        """Returns, per axis [batch.., m, n, k] of the result, the operand axis, or None.

        k is the axis that is summed over. `operand_index` 0 is a [batch.., m, k], and 1 is b
        [batch.., k, n]. Batch axes correspond from the last one on, as in broadcasting.
        """
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
    """A linear layer: out = x @ weight.T + bias. The bias is optional.

    The axes are x [*i, n_in], weight [*w, n_out, n_in] and bias [*w, n_out]. `*i` and `*w` stand
    for any number of axes. The result is [*w, *i, n_out, n_in], where n_in is marked as a reduction
    axis. In a host program, the op may compute a single output feature: weight is then [n_in], bias
    is [], and out is [*i, n_in].
    """

    out: TensorView = result()
    x: TensorView = operand()
    weight: TensorView = operand()
    bias: TensorView | None = operand()
    REFERENCES: ClassVar[tuple[int, ...]] = (1, 2, 0)

    @property
    def name(self) -> str:
        """The name of the op in messages and dumps: `linear`."""
        return "linear"

    def template(self) -> str:
        """Returns the text form of this op, with placeholders such as `{out}` for its fields."""
        tail = ",\n            {bias}" if self.bias is not None else ""
        return "{out}\n   = linear({x},\n            {weight}" + tail + ")"

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        """Yields (attribute values, template) for each text form that ops of this class can have.

        A template is the text of an op, with placeholders such as `{out}` for its fields. If a text
        matches a template, the parser creates an op with the attribute values of this pair. Of
        several templates that match, the first is taken.
        """
        yield {}, "{out}\n   = linear({x},\n            {weight},\n            {bias})"
        yield {"bias": None}, "{out}\n   = linear({x},\n            {weight})"

    def verify(self) -> None:
        """Checks that the numbers of axes of x, weight, bias and out fit together.

        Raises:
            VerifyError: the numbers do not match.
        """
        axes = self.out.domain.maybe_root
        has_k = bool(axes) and axes[-1].kind is IterType.reduction
        rank = self.x.ndim + self.weight.ndim - 2
        if not self.weight.ndim:
            raise VerifyError(
                f"linear: weight [*w, n, k] needs an axis k, but {self.weight} has none"
            )
        if len(axes) - has_k != rank:
            raise VerifyError(
                f"linear: x {self.x} [*i, k] and weight {self.weight} [*w, n, k] need a result "
                f"[*w, *i, n] with {counted(rank, 'axis')}, but {self.out} has "
                f"{counted(len(axes) - has_k, 'axis')}"
            )
        if self.bias is not None and self.bias.ndim != self.weight.ndim - 1:
            raise VerifyError(
                f"linear: weight {self.weight} [*w, n, k] needs a bias [*w, n] with "
                f"{counted(self.weight.ndim - 1, 'axis')}, but {self.bias} has "
                f"{counted(self.bias.ndim, 'axis')}"
            )

    def axis_map(self, operand_index: int) -> AxisMap:
        """Returns, per axis [*w, *i, n, k] of the result, the corresponding operand axis, or None.

        k is the axis that is summed over. Operand 0 is x [*i, k], 1 is weight [*w, n, k], and 2 is
        the bias [*w, n]. `*i` and `*w` stand for any number of axes.
        """
        axes = self.out.domain.maybe_root
        has_k = bool(axes) and axes[-1].kind is IterType.reduction
        rows, batch = self.x.ndim - 1, max(self.weight.ndim - 2, 0)
        if operand_index == 0:
            return (*(None,) * batch, *range(rows), None, *([rows] if has_k else []))
        k = batch + 1 if operand_index == 1 else None
        return (*range(batch), *(None,) * rows, batch, *([k] if has_k else []))

    @property
    def bias_lacks(self) -> tuple[bool, ...]:
        """One flag per axis of the result: True if the bias has no such axis and is broadcast."""
        return tuple(p is None for p in self.axis_map(2)[: self.out.ndim])


# ----------------------------------------------------------------------
# Ops that change extents: slices, pads, and concatenations of padded pieces.


class SliceOp(TensorOp):
    """A slice: out = inp[start:stop] along each axis, with step 1.

    For each axis, the domain of out has a `Resize`, which derives the shorter axis from that of
    inp.
    """

    out: TensorView = result()
    inp: TensorView = operand()
    # start, stop and step of every axis
    ranges: tuple[Scalar, ...] = operands(in_rows=3)
    TEXT = "{out}\n   = slice( {inp}, {ranges} )"

    @property
    def name(self) -> str:
        """The name of the op in messages and dumps: `slice`."""
        return "slice"

    @property
    def starts(self) -> tuple[Scalar, ...]:
        """The start of the slice along each axis: the index in inp of the first element of out."""
        return self.ranges[::3]

    @property
    def stops(self) -> tuple[Scalar, ...]:
        """The end of the slice along each axis: the index in inp after the last element of out."""
        return self.ranges[1::3]

    @staticmethod
    def ranges_of(starts: Iterable[Scalar], stops: Iterable[Scalar]) -> tuple[Scalar, ...]:
        """Returns (start, stop, 1) of all axes as one flat tuple: the value of `ranges`."""
        return tuple(x for a, b in zip(starts, stops, strict=True) for x in (a, b, sc.ONE))

    def verify(self) -> None:
        """Checks that every axis has a start, a stop and a step, and that each step is 1.

        Raises:
            VerifyError: a check fails.
        """
        axes, steps = self.inp.ndim, self.ranges[2::3]
        if len(self.ranges) != 3 * axes:
            raise VerifyError(
                "slice: expected start, stop and step for each axis of the operand "
                f"({counted(axes, 'axis')}, {counted(3 * axes, 'number')}), got "
                f"{counted(len(self.ranges), 'number')}:\n{self}"
            )
        for k, step in enumerate(steps):
            if sc.int_value(step) != 1:
                raise VerifyError(
                    f"slice: the step of each axis must be 1, but that of axis {k} is {step}:\n"
                    f"{self}"
                )


class PadOp(TensorOp):
    """A padding: out has `left[i]` and `right[i]` more elements than inp before and after axis i.

    A negative width removes elements. `widths` has (left, right) of every axis, outermost first.
    `filler` is the value of added elements; without a filler, they are 0.
    """

    out: TensorView = result()
    inp: TensorView = operand()
    widths: tuple[Scalar, ...] = operands()
    filler: Scalar | None = operand(default=None)

    @property
    def name(self) -> str:
        """The name of the op in messages and dumps: `pad`."""
        return "pad"

    def exact_numbers(self) -> tuple[Scalar, ...]:
        """Returns the scalar operands that the dtype of the result must represent exactly.

        This is the value of the added elements if it is an integer, because it must not wrap
        around.
        """
        return (self.value,) if category(self.value.dtype) == "int" else ()

    @property
    def left(self) -> tuple[Scalar, ...]:
        """The number of elements that are added before the first element of each axis."""
        return self.widths[::2]

    @property
    def right(self) -> tuple[Scalar, ...]:
        """The number of elements that are added after the last element of each axis."""
        return self.widths[1::2]

    @property
    def value(self) -> Scalar:
        """The value of added elements: the filler if there is one, else 0 in the dtype of out."""
        return sc.Const(0, self.out.dtype()) if self.filler is None else self.filler

    def verify(self) -> None:
        """Checks that every axis has two widths: the elements added before it and after it.

        Raises:
            VerifyError: the number of widths is wrong.
        """
        if len(self.widths) != 2 * self.inp.ndim:
            raise VerifyError(
                f"pad: expected two widths for each axis of {self.inp} "
                f"({counted(self.inp.ndim, 'axis')}), got {counted(len(self.widths), 'width')}:\n"
                f"{self}"
            )

    def template(self) -> str:
        """Returns the text form of this op, with placeholders such as `{out}` for its fields."""
        filler = "" if self.filler is None else ", {filler}"
        return "{out}\n   = pad( {inp}, {widths}" + filler + " )"

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        """Yields (attribute values, template) for each text form that ops of this class can have.

        A template is the text of an op, with placeholders such as `{out}` for its fields. If a text
        matches a template, the parser creates an op with the attribute values of this pair. Of
        several templates that match, the first is taken.
        """
        yield {"filler": None}, "{out}\n   = pad( {inp}, {widths} )"
        yield {}, "{out}\n   = pad( {inp}, {widths}, {filler} )"


class CatOp(TensorOp):
    """The concatenation of tensors along axis `dim`.

    Each operand in `pieces` is already padded to the size of out, so that all of them have the same
    loops as out. `ends[k]` is the index along `dim` at which the elements of operand k end. For
    index i, the op therefore reads the operand k with ends[k - 1] <= i < ends[k].
    """

    out: TensorView = result()
    pieces: tuple[TensorView, ...] = operands()
    ends: tuple[Scalar, ...] = operands()
    dim: int = attr()
    TEXT = "{out}\n   = cat( {pieces}, {ends}, {dim} )"

    @property
    def name(self) -> str:
        """The name of the op in messages and dumps: `cat`."""
        return "cat"

    def whole_axes(self, out: TensorView) -> tuple[int, ...]:
        """Returns the axes of `out` that must not be split over devices.

        This is `dim`, because the part of the result on one device may need elements of several
        operands.
        """
        return (self.dim,)


# ----------------------------------------------------------------------
# The text of elementwise ops and casts.


def unary_template(kind: str, *, is_float: bool) -> str:
    """Returns the text form of a unary elementwise op, with placeholders `{out}` and `{inp}`.

    `kind` is the name of the op in `fuser.ir.pointwise_table`. `is_float` says whether the result
    has dtype Float, because the function in the text then has another name (`expf`, not `exp`).
    """
    row = POINTWISE[kind]
    if row.is_operator:
        return "{out}\n   = " + row.text + "{inp};"
    return "{out}\n   = " + (row.float_text if is_float else row.text) + "({inp});"


def binary_template(kind: str, *, is_float: bool) -> str:
    """Returns the text form of a binary elementwise op, with placeholders for result and operands.

    `kind` is the name of the op in `fuser.ir.pointwise_table`. `is_float` says whether the result
    has a floating dtype, because the function in the text then has another name (`fmax`, not
    `max`).
    """
    row = POINTWISE[kind]
    if row.is_operator:
        return "{out}\n   = {lhs}\n   " + row.text + " {rhs};"
    return "{out}\n   = " + (row.float_text if is_float else row.text) + "({lhs}\n  , {rhs});"


def ternary_template(kind: str) -> str:
    """Returns the text form of an elementwise op with three operands, with placeholders for them.

    `kind` is the name of the op in `fuser.ir.pointwise_table`.
    """
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
    """Returns the name of a cast from `src` to `dst` in texts of the IR, such as `__half2float`."""
    s, d = INFO[src].text, INFO[dst].text
    if is_complex(src) and category(dst) in ("int", "float"):
        return _CAST_TO.get(d, f"__to_{_CAST_NAMES.get(d)}").replace("__", "__real_then_", 1)
    if dst in HALF_LIKE or (src in HALF_LIKE and d in ("float", "double")):
        return f"__{_CAST_NAMES.get(s, 'bool' if s == 'bool' else 'int')}2{_CAST_NAMES[d]}"
    return _CAST_TO[d]


# ----------------------------------------------------------------------
# A rough cost of ops in instructions, to decide whether a value is stored or computed again.

# Ops that cost a thread more than keeping the result in a register: special functions, divisions,
# random numbers.
EXPENSIVE = frozenset((*(k for k, row in POINTWISE.items() if row.is_slow), *RandomOp.KINDS))
_EXPENSIVE_INSTRUCTIONS = 20


def instructions(op: TensorOp) -> int:
    """Returns roughly how many instructions a GPU thread needs per element of `op`."""
    return _EXPENSIVE_INSTRUCTIONS if op.name in EXPENSIVE else 1
