"""Generates the text of a Python program that defines a fusion again, in the calls that users
write.

    def nvfuser_fusion(fd : FusionDefinition) -> None :
        tv0 = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.Float, ...)
        tv1 = fd.ops.exp(tv0)
        fd.add_output(tv1)

When the program runs, it defines an equal fusion (`Fusion.__eq__`), from which the same text is
generated. Tensors and scalars are numbered in the order of their statements. Statements on
shardings, schedules and layouts follow the outputs (`ScheduleText`).

Source: the statements and their spelling are nvFuser's. Floats that need more than six digits are
written with as many as they need.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile

import torch

from fuser.ir.domain.axis_path import transforms_between
from fuser.ir.domain.device_mesh import DeviceMesh
from fuser.ir.domain.tensor_domain import (
    MergeTransform,
    SplitTransform,
    Swizzle1D,
    Transform,
    contiguity_for,
    transform_text,
)
from fuser.ir.dtypes import DataType, dtype_text
from fuser.ir.fusion import Declared, Fusion, TensorOp, TensorView
from fuser.ir.ops import lookup, nodes
from fuser.ir.ops.attention_ops import SdpaBwdOp, SdpaFwdOp
from fuser.ir.ops.matrix_products import GroupedMmaOp, GroupedScalesOp, ProductOp, ScaledMmaOp
from fuser.ir.ops.nodes import CatOp, Contraction, LoadStoreOp, PadOp, ReductionOp, SliceOp
from fuser.ir.ops.scan_ops import ArgsortOp, ScanOp, TopKOp
from fuser.ir.pointwise_table import POINTWISE, PUBLIC
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Apply, Const, Poly, Scalar
from fuser.ir.scalar.scalar_nodes import Monomial, postorder
from fuser.ir.shard_annotation import Replicate, Shard, placements_of
from fuser.ir.types import CacheOp, LoadStoreOpType, MemoryType, ParallelType
from fuser.ops.reduction_table import REDUCTIONS
from fuser.support.arguments import checked
from fuser.support.errors import (
    CompileError,
    ExecutionError,
    FuserError,
    KernelError,
    NoCompilerError,
    UnsupportedError,
    VerifyError,
    user_code,
)
from fuser.support.inputs import flatten
from fuser.support.record import record, replace

HEADER = "def nvfuser_fusion(fd : FusionDefinition) -> None :"
# Constants of these dtypes are printed as Python numbers, others as `define_scalar` calls.
_D = DataType
_INLINED = (_D.Bool, _D.Int, _D.Index, _D.Double, _D.ComplexDouble)
# Scalar op -> the op of a definition that creates it; the first one if there are several.
SCALAR_CALLS = {
    op: name for name, (kind, _) in reversed(PUBLIC.items()) for op in POINTWISE[kind].scalar_ops
}
# Scalar ops that only Python's operators on scalars create.
OPERATORS = {"floorDiv": "//", "floorMod": "%"}


def number_text(value: float | complex) -> str:
    """Returns a number as Python text: `2.50000`, `float("inf")`, `1.00000+2.00000j`.

    The text evaluates to the same number. It has six significant digits, as in nvFuser, or more if
    the value needs them.
    """
    if isinstance(value, float):
        if not math.isfinite(value):
            return f'float("{value}")'
        short = f"{value:#.6g}"
        return short if float(short) == value else repr(value)
    parts = value.real, value.imag
    # A sum of parts would lose the sign of a zero, and cannot express a part that is not finite.
    is_sum = all(math.isfinite(x) and (x or math.copysign(1, x) > 0) for x in parts)
    if is_sum:
        return f"{number_text(parts[0])}{'' if parts[1] < 0 else '+'}{number_text(parts[1])}j"
    return f"complex({number_text(parts[0])}, {number_text(parts[1])})"


@checked
def translate_fusion(fusion: Fusion) -> str:
    """Returns the text of a Python program that defines the fusion again: the text of `repr(fd)`,
    with a newline at the end.

    Raises:
        UnsupportedError: no Python statement can create a value. The message names the value.
    """
    lines = _Writer(fusion).program()
    return "\n".join([HEADER, *(f"    {line}" for line in lines or ["pass"])]) + "\n"


class _Writer:
    """Generates the Python statements that define a fusion.

    The object records the names of the tensors and scalars for which statements exist already.
    """

    def __init__(self, fusion: Fusion) -> None:
        self._fusion = fusion
        self._lines: list[str] = []
        self._tensors: dict[TensorView, str] = {}
        self._scalars: dict[Scalar, str] = {}
        self._count = 0
        # Symbolic extent -> a tensor and the axis with this size.
        self._sizes: dict[Scalar, tuple[TensorView, int]] = {}
        self._declared: dict[TensorView | None, list[Declared]] = {}
        last = fusion.exprs[-1].outputs if fusion.exprs else (None,)
        for said in fusion.declared:
            # Equalities that an output implies are printed by it, unless later ops may use them.
            if not (said.by_output and said.after in last):
                self._declared.setdefault(said.after, []).append(said)

    # ------------------------------------------------------------ the program
    def program(self) -> list[str]:
        """Returns the lines of the body of the Python function that defines the fusion."""
        if self._fusion.double_numbers:
            self._add("fd.fusion.double_numbers = True")
        for value in self._fusion.inputs:
            self._input(value)
        self._declare(None)
        factored = factored_reductions(self._fusion)
        parts = {op for found in factored.values() for op in found.ops}
        for op in self._fusion.exprs:
            if op in factored:
                self._factored(factored[op])
            elif op not in parts:
                self._op(op)
        for said in [*self._declared]:
            self._declare(said)
        self._outputs()
        at = len(self._lines)
        names = ScheduleText(self._fusion, self.text, self._add).write()
        if names:
            self._lines.insert(at, f"from fuser import {', '.join(names)}")
        return self._lines

    def _input(self, value: TensorView | Scalar) -> None:
        if isinstance(value, TensorView):
            for dim, size in enumerate(value.shape()):
                if not isinstance(size, Const):
                    self._sizes.setdefault(size, (value, dim))
            self._name(value)
            self._add(f"{self._tensors[value]} = {self._call(_definition_of(value))}")
        else:
            dtype = self.text(value.dtype)
            self._scalar_line(value, f"fd.define_scalar(None, dtype={dtype})")

    def _op(self, op: TensorOp) -> None:
        self._made(_statement_of(op), op.outputs)

    def _made(self, call: PythonCall, results: Sequence[TensorView]) -> None:
        """Appends to the generated program the statement `call`, which creates the tensors
        `results`.

        The user may have declared, directly after creating these tensors, that some sizes are
        equal. These declarations are appended, too.
        """
        text = self._call(call)
        for out in results:
            self._name(out)
        names = [*(self._tensors[o] for o in results), *["_"] * call.unused]
        self._add(f"{', '.join(names)} = {text}")
        for out in results:
            self._declare(out)

    def _factored(self, found: Factored) -> None:
        """Appends to the generated program the statements of a reduction that was split by
        `rfactor`.

        First comes the whole reduction, and then the `rfactor` calls that split it.
        """
        call = _statement_of(found.ops[0])
        dims = {"dims": found.dims} if "dims" in call.kwargs else {}
        self._made(replace(call, kwargs={**call.kwargs, **dims}), [found.out])
        for step in found.steps:
            loop = [*step.loop]
            for t in step.transforms:
                transform = transform_call(t, loop, self.text)
                self._add(f"{self._tensors[step.of]}.{transform}")
            self._name(step.made)
            rfactor = f"{self._tensors[step.of]}.rfactor(axes={list(step.axes)})"
            self._add(f"{self._tensors[step.made]} = {rfactor}")
            self._declare(step.made)

    def _declare(self, after: TensorView | None) -> None:
        """Appends to the generated program the declarations of equal sizes that the user wrote
        directly after creating the tensor `after`.
        """
        for said in self._declared.pop(after, ()):
            a, b = self.text(said.a), self.text(said.b)
            self._add(f"fd.fusion.declare_extents({a}, {b})")

    def _outputs(self) -> None:
        """Appends to the generated program the `add_output` statements, in the order of the
        outputs.

        A tensor may both update an input and be an output. The statement for the update then comes
        first.
        """
        updated: set[TensorView] = set()
        for out in self._fusion.outputs:
            name = self.text(out)
            if out not in updated:
                into = [a.into for a in self._fusion.aliases if a.out is out]
                for target in into:
                    self._add(f"fd.add_output({name}, {self.text(target)})")
                updated.update([out] * bool(into))
            if not self._fusion.is_hidden(out):
                self._add(f"fd.add_output({name})")

    # ------------------------------------------------------------ values
    def _add(self, line: str) -> None:
        self._lines.append(line)

    def _name(self, tv: TensorView) -> None:
        self._tensors[tv] = f"tv{len(self._tensors)}"

    def _call(self, call: PythonCall) -> str:
        arguments = [self.text(v) for v in call.args]
        arguments += [f"{name}={self.text(v)}" for name, v in call.kwargs.items()]
        return f"fd.{call.name}({', '.join(arguments)})"

    def text(self, value: object) -> str:
        """Returns a value as Python text. Statements that create scalars in the value are appended
        first.
        """
        match value:
            case TensorView():
                name = self._tensors.get(value)
                if name is None:
                    raise UnsupportedError(
                        f"no Python statement can create {value}: it is neither an input nor the "
                        "result of an op"
                    )
                return name
            case Scalar():
                return self._scalar(value)
            case ScalarArgument(Const() as constant):
                name, self._count = f"c{self._count}", self._count + 1
                self._add(f"{name} = {self._constant(constant)}")
                return name
            case ScalarArgument():
                return self._scalar(value.scalar)
            case DataType():
                return f"DataType.{value.name}"
            case float() | complex():
                return number_text(value)
            case list() | tuple():
                return f"[{', '.join(map(self.text, value))}]"  # pyright: ignore[reportUnknownArgumentType]
            case _:
                return repr(value)

    # ------------------------------------------------------------ scalars
    def _scalar(self, x: Scalar) -> str:
        """Returns the name of the Python variable, or the literal, of a scalar.

        If the scalar has no variable yet, the statements that create it are first appended to the
        generated program.
        """
        for y in postorder(x, lambda s: s in self._scalars or _is_literal(s)):
            self._write_scalar(y)
        return self._scalars[x] if x in self._scalars else self.text(_number(x))

    def _write_scalar(self, x: Scalar) -> None:
        match x:
            case Const():
                self._scalar_line(x, self._constant(x))
            case _ if x in self._sizes:
                tv, dim = self._sizes[x]
                self._scalar_line(x, f"fd.ops.size({self.text(tv)}, dim={dim})")
            case Poly():
                self._sum(x)
            case Apply():
                self._scalar_line(x, self._applied(x))
            case _:
                raise UnsupportedError(
                    f"no Python statement can create {x}: it is neither an input nor a size"
                )

    def _constant(self, x: Const) -> str:
        return f"fd.define_scalar({self.text(x.value)}, dtype={self.text(x.dtype)})"

    def _scalar_line(self, x: Scalar, text: str) -> None:
        name = f"c{self._count}"
        self._count += 1
        self._scalars[x] = name
        self._add(f"{name} = {text}")

    def _applied(self, x: Apply) -> str:
        args = list(map(self.text, x.args))
        if x.op.startswith("cast:"):
            return f"fd.ops.cast({args[0]}, dtype={self.text(x.dtype)})"
        if x.op in OPERATORS:
            return f" {OPERATORS[x.op]} ".join(args)
        if x.op == "ceilDiv":
            self._add("from fuser.ir.scalar.constructors import ceildiv")
            return f"ceildiv({', '.join(args)})"
        name = SCALAR_CALLS.get(x.op)
        if name is None:
            raise UnsupportedError(
                f"no Python statement can create the scalar {x} ({dtype_text(x.dtype)})"
            )
        return f"fd.ops.{name}({', '.join(args)})"

    def _sum(self, x: Poly) -> None:
        """Appends to the generated program the statements that compute a polynomial: first the
        products of its factors, then the sum of these products.
        """
        total: Scalar | None = None
        for atoms, coefficient in x.terms:
            is_taken = total is not None and coefficient < 0
            term = self._product(atoms, -coefficient if is_taken else coefficient)
            if total is None:
                total = term
            elif is_taken:
                total = self._step("sub", sc.sub, total, term)
            else:
                total = self._step("add", sc.add, total, term)
        assert total is not None
        self._scalars.setdefault(x, self.text(total))

    def _product(self, atoms: Monomial, coefficient: int) -> Scalar:
        if not atoms:
            return Const(coefficient, DataType.Int)
        out = atoms[0]
        for atom in atoms[1:]:
            out = self._step("mul", sc.mul, out, atom)
        if coefficient == 1:
            return out
        return self._step("mul", sc.mul, out, Const(coefficient, DataType.Int))

    def _step(
        self, name: str, make: Callable[[Scalar, Scalar], Scalar], a: Scalar, b: Scalar
    ) -> Scalar:
        """Returns the result of an op on the scalars `a` and `b`, and gives the result a Python
        variable.

        If the result has no variable yet, the statement that creates it is appended to the
        generated program. `name` is the op in `fd.ops`, and `make` creates the result from `a` and
        `b`.
        """
        made = make(a, b)
        if made not in self._scalars:
            self._scalar_line(made, f"fd.ops.{name}({self.text(a)}, {self.text(b)})")
        return made


def _statement_of(op: TensorOp) -> PythonCall:
    statement = STATEMENTS.get(type(op))
    if statement is None:
        raise UnsupportedError(
            f"no Python statement can express {op.name}{user_code(op.where)}\n{op}"
        )
    return statement(op)


def _is_literal(x: Scalar) -> bool:
    return isinstance(x, Const) and x.dtype in _INLINED


def _number(x: Scalar) -> object:
    assert isinstance(x, Const), x
    return x.value


# ------------------------------------------------------------------ inputs
def _definition_of(tv: TensorView) -> PythonCall:
    """Returns the `define_tensor` call for the input `tv`.

    `ScheduleText` generates statements for the facts that the call cannot express.
    """
    axes, domain = tv.domain.logical, tv.domain
    order = stride_order_of(tv)
    flags: Sequence[bool | None] = domain.contiguity
    if domain.allocation_numbers and order is None:
        flags = [None if a.is_broadcast else True for a in axes]
    shape = [sc.int_value(a.size) for a in axes]
    arguments: dict[str, object] = {
        "shape": [-1 if s is None else s for s in shape],
        "contiguity": list(flags),
        "dtype": tv.dtype(),
        "is_cpu": tv.is_cpu_scalar,
    }
    if order is not None:
        arguments["stride_order"] = order
    return PythonCall("define_tensor", (), arguments)


__all__ = ["HEADER", "translate_fusion"]


# ----------------------------------------------------------------------
# The statement of each node class: the call of a definition that creates the node, and its
# arguments. `_Writer` prints them.
#
# The printed call creates exactly this node again. It adds no casts, broadcasts or pads, because
# the operands already include them.


@record
class PythonCall:
    """A call `fd.name(*args, **kwargs)` in a generated Python program.

    Arguments are tensors, scalars, dtypes, Python values and lists of these. The call returns
    `unused` more results than the op has. The additional results are assigned to `_`.
    """

    name: str
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    unused: int = 0


@record
class ScalarArgument:
    """A scalar argument of a call in a generated Python program, for a function that does not
    accept a Python number as this argument.

    A constant must therefore first become a scalar, by a `define_scalar` statement.
    """

    scalar: Scalar


Statement = Callable[..., PythonCall]
STATEMENTS: dict[type[TensorOp], Statement] = {}

# Nodes that only the compiler makes, in copies of what the user defined.
COMPILED = (nodes.Reshard,)


def _row(*kinds: type[TensorOp]) -> Callable[[Statement], Statement]:
    """Returns a decorator that registers a function in `STATEMENTS`. The function returns the
    Python call that creates an op of one of the classes `kinds`.
    """

    def register(statement: Statement) -> Statement:
        STATEMENTS.update(dict.fromkeys(kinds, statement))
        return statement

    return register


def _ops(name: str, *args: object, **kwargs: object) -> PythonCall:
    return PythonCall(f"ops.{name}", args, kwargs)


def _filled(value: Scalar | None) -> object:
    """Returns a number operand of an op, such as the value of a `full`, in a form for Python text.

    A finite constant becomes a Python number. The op converts a number to the dtype that it needs,
    so the text need not contain the dtype of the constant. Any other scalar is returned unchanged.
    """
    if isinstance(value, Const) and cmath.isfinite(value.value):
        return value.value
    return value


def _given(**optional: tuple[object, object]) -> dict[str, object]:
    """Returns the keyword arguments of a generated Python call, without those that have the default
    value.

    Each argument is passed as (value, default).
    """
    return {name: value for name, (value, default) in optional.items() if value != default}


def stride_order_of(tv: TensorView) -> list[int] | None:
    """Returns, for each axis that the user sees, its position when the axes are sorted by stride,
    the smallest stride first.

    Returns None if memory is laid out in the order of the axes.
    """
    logical, order = tv.domain.logical_numbers, tv.domain.allocation_numbers
    if order == logical or sorted(order) != sorted(logical):
        return None
    return [len(order) - 1 - order.index(n) for n in logical]


def is_stride_order(op: nodes.LoadStoreOp) -> bool:
    """Returns whether the call `fd.ops.stride_order` could have created the copy `op`, so that this
    call can represent the copy in Python text.

    This is the case if the result of the copy has a declared memory order other than that of its
    axes, and no gaps in memory.
    """
    domain = op.out.domain
    is_whole = op.kind is LoadStoreOpType.set and not domain.root_numbers
    return is_whole and stride_order_of(op.out) is not None and False not in domain.contiguity


# ------------------------------------------------------------------ elementwise
@_row(nodes.UnaryOp)
def _unary(op: nodes.UnaryOp) -> PythonCall:
    return _ops(op.kind, op.inp)


@_row(nodes.CastOp)
def _cast(op: nodes.CastOp) -> PythonCall:
    return _ops("cast", op.inp, dtype=op.out.dtype())


@_row(nodes.BinaryOp)
def _binary(op: nodes.BinaryOp) -> PythonCall:
    return _ops(op.kind, op.lhs, op.rhs)


@_row(nodes.TernaryOp)
def _ternary(op: nodes.TernaryOp) -> PythonCall:
    return _ops(op.kind, op.a, op.b, op.c)


# ------------------------------------------------------------------ factories
@_row(nodes.FullOp)
def _full(op: nodes.FullOp) -> PythonCall:
    return _ops("full", shape=op.shape, fill_value=_filled(op.value), dtype=op.out.dtype())


@_row(nodes.IotaOp)
def _iota(op: nodes.IotaOp) -> PythonCall:
    ends = _given(start=(_filled(op.start), 0), step=(_filled(op.step), 1))
    return _ops("iota", op.length, **ends, dtype=op.out.dtype())


def _is_like(tv: TensorView, op: nodes.RandomOp) -> bool:
    return tv.dtype() is op.out.dtype() and tuple(tv.shape()) == op.shape


@_row(nodes.RandomOp)
def _random(op: nodes.RandomOp) -> PythonCall:
    dtype = op.out.dtype()
    if op.a is None:
        # rand_like: finds an earlier tensor of this shape and dtype, which the op does not read.
        before = takewhile(lambda t: t is not op.out, op.out.fusion.tensors())
        tv = next((t for t in before if _is_like(t, op)), None)
        if tv is None or op.seed is not None:
            raise UnsupportedError(f"no Python statement can create {op.out}{user_code(op.where)}")
        return _ops({"uniform": "rand_like", "normal": "randn_like"}[op.kind], tv)
    key = {} if op.seed is None else {"rng_seed": op.seed, "rng_offset": op.offset}
    return _ops(op.kind, _filled(op.a), _filled(op.b), shape=op.shape, **key, dtype=dtype)


# ------------------------------------------------------------------ copies and views
@_row(nodes.LoadStoreOp)
def _copy(op: nodes.LoadStoreOp) -> PythonCall:
    domain = op.out.domain
    if op.kind is LoadStoreOpType.segmenter_set:
        return _ops("segment_set", op.inp)
    if op.kind is not LoadStoreOpType.set or op.cache_op is not CacheOp.unspecified:
        raise UnsupportedError(
            f"no Python statement can express this copy ({op.kind.name}, {op.cache_op.name}) of "
            f"{op.inp}{user_code(op.where)}"
        )
    if domain.root_numbers:
        places = [domain.root_numbers.index(n) for n in domain.logical_numbers]
        return _ops("permute", op.inp, dims=places)
    if is_stride_order(op):
        return _ops("stride_order", op.inp, stride_order=stride_order_of(op.out))
    return _ops("cast", op.inp, dtype=op.out.dtype())


@_row(nodes.BroadcastOp)
def _broadcast(op: nodes.BroadcastOp) -> PythonCall:
    return _ops("broadcast", op.inp, is_broadcast_dim=op.flags)


@_row(nodes.SqueezeOp)
def _squeeze(op: nodes.SqueezeOp) -> PythonCall:
    dims = [i for i, gone in enumerate(op.flags) if gone]
    axes = op.inp.domain.no_reductions
    is_expanded = any(axes[d].expanded is not None for d in dims)
    return _ops("squeeze", op.inp, dims=dims, **_given(squeeze_expanded=(is_expanded, False)))


@_row(nodes.ExpandOp)
def _expand(op: nodes.ExpandOp) -> PythonCall:
    return _ops("expand", op.inp, shape=op.shape)


@_row(nodes.ReshapeOp)
def _reshape(op: nodes.ReshapeOp) -> PythonCall:
    return _ops("reshape", op.inp, new_shape=op.out.shape())


@_row(SliceOp)
def _slice(op: SliceOp) -> PythonCall:
    return _ops(
        "slice",
        op.inp,
        start_indices=op.starts,
        end_indices=op.stops,
        strides=[1] * len(op.starts),
        manual_normalization=True,
    )


@_row(PadOp)
def _pad(op: PadOp) -> PythonCall:
    pairs = [*zip(op.left, op.right, strict=True)][::-1]
    widths = [w for pair in pairs for w in pair]
    return _ops("pad", op.inp, pad_widths=widths, value=_filled(op.value))


@_row(CatOp)
def _cat(op: CatOp) -> PythonCall:
    return _ops("cat", op.pieces, dim=op.dim, manual_padding=True)


# ------------------------------------------------------------------ lookups
@_row(lookup.SelectOp)
def _select(op: lookup.SelectOp) -> PythonCall:
    return _ops("select", op.table, index=ScalarArgument(op.index), dim=op.dim)


@_row(lookup.IndexSelectOp)
@_row(lookup.TakeAlongAxisOp)
@_row(lookup.GatherOp)
def _along(op: lookup.IndexSelectOp | lookup.TakeAlongAxisOp | lookup.GatherOp) -> PythonCall:
    return _ops(op.name, op.table, op.index, dim=op.dim)


@_row(lookup.EmbeddingFwdOp)
def _embedding(op: lookup.EmbeddingFwdOp) -> PythonCall:
    return _ops("embedding_fwd", op.index, op.table)


@_row(lookup.IndexPutAccumulateOp)
def _index_put(op: lookup.IndexPutAccumulateOp) -> PythonCall:
    return _ops("index_put_accumulate", op.acc, op.index, op.value)


@_row(lookup.ScatterOp)
def _scatter(op: lookup.ScatterOp) -> PythonCall:
    src = ScalarArgument(op.src) if isinstance(op.src, Scalar) else op.src
    return _ops("scatter", op.inp, op.index, src, dim=op.dim)


# ------------------------------------------------------------------ reductions
def _reduced(out: TensorView) -> list[int]:
    return [k for k, a in enumerate(out.domain.maybe_root) if a.is_reduction()]


@_row(nodes.ReductionOp)
def _reduction(op: nodes.ReductionOp) -> PythonCall:
    sums = {"dtype": op.out.dtype()} if op.kind in ("add", "mul") else {}
    return _ops(op.name, op.inp, dims=_reduced(op.out), **sums)


@_row(nodes.WelfordOp)
def _welford(op: nodes.WelfordOp) -> PythonCall:
    return _ops("welford", op.inp, dims=_reduced(op.avg))


# ------------------------------------------------------------------ library ops
@_row(nodes.MatmulOp)
def _matmul(op: nodes.MatmulOp) -> PythonCall:
    return _ops("matmul", op.a, op.b)


@_row(nodes.LinearOp)
def _linear(op: nodes.LinearOp) -> PythonCall:
    return _ops("linear", op.x, op.weight, **_given(bias=(op.bias, None)))


@_row(GroupedMmaOp, ScaledMmaOp)
def _product(op: ProductOp) -> PythonCall:
    given = [tv for field, tv in op.tensors() if field not in ("out", *op.OPTIONAL)]
    if not op.is_scaled:
        return _ops(op.name, *given)
    optional = {field: (getattr(op, field), None) for field in op.OPTIONAL}
    return replace(_ops(op.name, *given, **_given(**optional), dtype=op.out.dtype()), unused=2)


@_row(GroupedScalesOp)
def _grouped_scales(op: GroupedScalesOp) -> PythonCall:
    return _ops(op.name, op.inp, op.input_offsets, op.output_offsets)


@_row(SdpaFwdOp)
def _sdpa_fwd(op: SdpaFwdOp) -> PythonCall:
    options = _given(
        bias=(op.bias, None),
        mask=(op.mask, None),
        dropout_p=(op.dropout_p, Const(0.0, DataType.Double)),
        is_causal=(op.is_causal, Const(False, DataType.Bool)),
        scale=(op.scale, None),
        enable_gqa=(op.enable_gqa, False),
    )
    return _ops("sdpfa_fwd", op.query, op.key, op.value, **options)


@_row(SdpaBwdOp)
def _sdpa_bwd(op: SdpaBwdOp) -> PythonCall:
    read = op.grad_output, op.query, op.key, op.value, op.attended, op.log_sumexp
    return _ops(
        "sdpfa_bwd",
        *read,
        dropout_p=op.dropout_p,
        is_causal=op.is_causal,
        philox_seed=op.philox_seed,
        philox_offset=op.philox_offset,
        scale=op.scale,
        **_given(enable_gqa=(op.enable_gqa, False)),
    )


# ------------------------------------------------------------------ scans and sorts
@_row(ScanOp)
def _scan(op: ScanOp) -> PythonCall:
    usual = Const(REDUCTIONS[op.kind].identity(op.out.dtype()), op.out.dtype())
    init = {} if op.init == usual else {"init": ScalarArgument(op.init)}
    return _ops(op.name, op.inp, dim=op.dim, **init)


@_row(ArgsortOp)
def _argsort(op: ArgsortOp) -> PythonCall:
    flags = _given(descending=(op.descending, False), stable=(op.stable, False))
    return _ops("argsort", op.inp, dim=op.dim, **flags)


@_row(TopKOp)
def _topk(op: TopKOp) -> PythonCall:
    flags = _given(dim=(op.dim, -1), largest=(op.largest, True), sorted=(op.sorted, False))
    return _ops("topk", op.inp, ScalarArgument(op.k), **flags)


# ----------------------------------------------------------------------
# The calls on tensors that restore meshes, loops and layouts.
#
#     from fuser import ParallelType, multidevice
#     mesh0 = multidevice.DeviceMesh([0, 1])
#     tv0.set_device_mesh(mesh0)
#     tv0.outer_split(0, 2)
#     tv0.axis(0).parallelize(ParallelType.mesh_x)
#
# A tensor begins in the state in which its op creates it. Each line is a step to its final state.
# A tensor that one `shard` call produces is printed as:
#
#     shard(tv0, mesh0, [Shard(dim=0)])

# Returns the text of a value, and may first write lines that create the value.
Text = Callable[[object], str]


class ScheduleText:
    """Generates the statements that follow the outputs in the Python text of a fusion: those that
    set the meshes, loops, memory types and layouts of all tensors.
    """

    def __init__(self, fusion: Fusion, text: Text, add: Callable[[str], None]) -> None:
        self._fusion, self._text, self._add = fusion, text, add
        self._meshes: dict[DeviceMesh, str] = {}
        self._imported: set[str] = set()
        self._ends = {*fusion.inputs, *fusion.outputs}

    def write(self) -> list[str]:
        """Appends to the generated program the statements that place tensors on devices and
        schedule them.

        Examples are calls of `shard`, `split` and `parallelize`. Returns the names that the program
        must therefore import from the package.
        """
        tensors = self._fusion.tensors()
        for tv in tensors:
            text, placements = _TensorText(tv, self._text, self._line), _placements_of(tv)
            if placements is None or (mesh := tv.mesh) is None:
                self._mesh(tv)
                text.write()
            else:
                shown = ", ".join(map(str, placements))
                self._line(f"shard({self._text(tv)}, {self._mesh_name(mesh)}, [{shown}])")
                text.write_layout()
            self._memory(tv)
        for tv in tensors:
            if tv.compute_at:
                name = self._text(tv)
                self._add(f"fd.sched.inline_at({name}, {tv.compute_at}, selected_tensors=[{name}])")
        return sorted(self._imported)

    def _line(self, line: str) -> None:
        names = ("MemoryType.", "ParallelType.", "multidevice.", "Replicate(", "Shard(", "shard(")
        self._imported.update(n[:-1] for n in names if n in line)
        self._add(line)

    def _mesh(self, tv: TensorView) -> None:
        if tv.mesh is None or not tv.has_own_mesh:
            return
        mesh, name = self._mesh_name(tv.mesh), self._text(tv)
        # Propagation may change a mesh that an op copied, but not one that the user set.
        is_set = tv.mesh_is_user_set
        self._line(f"{name}.set_device_mesh({mesh})" if is_set else f"{name}.mesh = {mesh}")

    def _mesh_name(self, mesh: DeviceMesh) -> str:
        """Returns the name of the Python variable for a mesh.

        At the first use of the mesh, the statement that defines the variable is appended to the
        generated program.
        """
        name = self._meshes.get(mesh)
        if name is None:
            name = self._meshes[mesh] = f"mesh{len(self._meshes)}"
            self._line(f"{name} = multidevice.DeviceMesh({_ranks_text(mesh)})")
        return name

    def _memory(self, tv: TensorView) -> None:
        if tv.memory is not (MemoryType.global_ if tv in self._ends else MemoryType.local):
            self._line(f"{self._text(tv)}.set_memory_type(MemoryType.{tv.memory.name})")


def _placements_of(tv: TensorView) -> list[Shard | Replicate] | None:
    """Returns the arguments with which one `shard` call distributes the tensor over devices as it
    is now.

    Returns None if no such call does.
    """
    placements, domain = placements_of(tv), tv.domain
    named = {*domain.loop_numbers, *domain.logical_numbers, *domain.root_numbers}
    is_cut = placements is not None and any(isinstance(p, Shard) for p in placements)
    return placements if is_cut and named.issuperset(domain.allocation_numbers) else None


def _ranks_text(mesh: DeviceMesh) -> str:
    """Returns the Python text of the ranks in a mesh's constructor: a range, a list, or nested
    lists.
    """
    ranks = list(mesh.devices)
    if mesh.ndim == 1:
        is_range = len(ranks) > 2 and ranks == list(range(ranks[0], ranks[0] + len(ranks)))
        return f"range({ranks[0]}, {ranks[-1] + 1})" if is_range else str(ranks)
    nested: list[object] = [*ranks]
    for count in mesh.shape[:0:-1]:
        nested = [nested[k : k + count] for k in range(0, len(nested), count)]
    return str(nested)


def transform_call(t: Transform, loop: list[int], text: Text) -> str | None:
    """Returns the text of the method call that applies a split or merge to a tensor's loop axes,
    such as `merge(0, 1)`. Returns None if users have no such method.

    In the list `loop` of axis numbers (ids), the function replaces the input axes of `t` by its
    output axes. `text` returns the text of a scalar.
    """
    places = [loop.index(n) for n in t.inputs]
    for n in t.inputs:
        loop.remove(n)
    loop[min(places) : min(places)] = t.outputs
    match t:
        case SplitTransform():
            name = "inner_split" if t.inner_split else "outer_split"
            return f"{name}({places[0]}, {text(t.factor)})"
        case MergeTransform():
            return f"merge({places[0]}, {places[1]})"
        case Swizzle1D():
            return f"swizzle1d({places[0]}, ParallelType.{t.ptype.name})"
        case _:
            return None


class _TensorText:
    """Generates the Python statements that set the loops, parallel types and layout of one
    tensor.
    """

    def __init__(self, tv: TensorView, text: Text, line: Callable[[str], None]) -> None:
        self._tv, self._text, self._line = tv, text, line
        self._domain = tv.domain
        # The loop axes after the lines that are already written.
        self._loop = [*tv.domain.logical_numbers]
        # Variables of axes that are in no domain of the tensor any more.
        self._handles: dict[int, str] = {}

    def write(self) -> None:
        """Appends to the generated program the statements that set the loops, parallel types and
        memory layout of the tensor.
        """
        parallel = [a for a in self._domain.axes.values() if a.ptype is not ParallelType.serial]
        needed = {a.number for a in parallel} | {*self._domain.allocation_numbers}
        for t in self._transforms():
            for number in needed.intersection(t.inputs):
                self._keep(number)
            call = transform_call(t, self._loop, self._text)
            if call is None:
                what = transform_text(t, self._domain)
                raise UnsupportedError(f"no Python statement can express {what} of {self._tv}")
            self._line(f"{self._name}.{call}")
        if (order := self._reorder()) is not None:
            self._line(f"{self._name}.reorder({order})")
        for axis in sorted(parallel, key=lambda a: self._place(a.number)):
            handle = self._handle(axis.number)
            self._line(f"{handle}.parallelize(ParallelType.{axis.ptype.name})")
        self._layout()

    def write_layout(self) -> None:
        """Appends to the generated program only the statement that sets the tensor's memory layout.

        It suffices for a tensor of which one `shard` call has already created all loop axes.
        """
        self._loop = [*self._domain.loop_numbers]
        self._layout()

    @property
    def _name(self) -> str:
        return self._text(self._tv)

    def _transforms(self) -> list[Transform]:
        """Returns the splits and merges that derive the tensor's loops from the axes that the user
        sees.
        """
        domain = self._domain
        own = transforms_between(domain, domain.root, domain.logical) if domain.root else ()
        return [t for t in domain.transforms if t not in own]

    def _reorder(self) -> dict[int, int] | None:
        """Returns the argument of the `reorder` call that brings the loop axes into their final
        order.

        The argument maps old positions to new positions. Returns None if the order is already
        final.
        """
        wanted = [*self._domain.loop_numbers]
        if self._loop == wanted:
            return None
        moves = {k: wanted.index(n) for k, n in enumerate(self._loop)}
        self._loop = wanted
        return {k: to for k, to in moves.items() if k != to}

    # ------------------------------------------------------------ axes
    def _views(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "get_logical_domain()", self._domain.logical_numbers
        yield "get_root_domain()", self._domain.root_numbers

    def _keep(self, number: int) -> None:
        """Appends to the generated program a statement that stores an axis in a variable. `number`
        is the axis number (id).

        It is called before the statement that splits or merges the axis. After that statement,
        the axis is no loop axis any more, so later statements can name it only by the variable.
        """
        if number in self._handles or any(number in view for _, view in self._views()):
            return
        name = f"{self._name}_axis{len(self._handles)}"
        self._line(f"{name} = {self._name}.axis({self._loop.index(number)})")
        self._handles[number] = name

    def _handle(self, number: int) -> str:
        """Returns the Python expression for the axis of the finished tensor with this
        number (id).
        """
        if number in self._loop:
            return f"{self._name}.axis({self._loop.index(number)})"
        if number in self._handles:
            return self._handles[number]
        for view, numbers in self._views():
            if number in numbers:
                return f"{self._name}.{view}[{numbers.index(number)}]"
        raise UnsupportedError(
            f"no Python statement can name axis {self._domain.axes[number]} of {self._tv}"
        )

    def _place(self, number: int) -> tuple[bool, int]:
        """Returns the sort key of the axis with this number (id), so that statements for axes with
        a parallel type have a fixed order.

        Loop axes come first, in their order. Other axes follow by number.
        """
        is_loop = number in self._loop
        return not is_loop, self._loop.index(number) if is_loop else number

    # ------------------------------------------------------------ layout
    def _layout(self) -> None:
        domain, tv = self._domain, self._tv
        if (domain.allocation_numbers, domain.contiguity) == _first_layout(tv):
            return
        order = domain.allocation_numbers
        axes = ", ".join(map(self._handle, order))
        # Without axes, the flags are those of the logical ones.
        flags = (
            f
            for f in (True, False)
            if order and contiguity_for(domain.allocation, f) == domain.contiguity
        )
        contiguity = next(flags, list(domain.contiguity))
        self._line(f"{self._name}.set_allocation_domain([{axes}], {contiguity})")


def _first_layout(tv: TensorView) -> tuple[tuple[int, ...], tuple[bool | None, ...]]:
    """Returns the memory order and the contiguity that a tensor has when its defining statement has
    run.

    If the tensor has another layout, the generated program must set it.
    """
    domain = tv.domain
    definition = tv.definition()
    order = domain.allocation_numbers
    if definition is None and (not order or stride_order_of(tv) is not None):
        return order, domain.contiguity
    if isinstance(definition, LoadStoreOp) and is_stride_order(definition):
        return order, domain.contiguity
    return (), contiguity_for(domain.logical)


# ----------------------------------------------------------------------
# Prints a reduction in several parts as the reduction that the user wrote, with `rfactor` calls.
#
#     T2 = sum(T0), T1 = sum(T2)    ->    tv1 = fd.ops.sum(tv0, dims=[1], ...)
#                                         tv1.outer_split(1, 2)
#                                         tv2 = tv1.rfactor([2])
#
# A part from an `rfactor` call has root axes, and splits that lead to its logical axes. A part that
# was factored again has none, and neither has the reduction itself. This distinguishes a chain of
# parts from a user's reduction of a reduction, which leaves axes unsplit.


@record
class RfactorCall:
    """The call `made = of.rfactor(axes)` in a generated Python program, and the splits and merges
    that must be applied to `of` before that call.

    `loop` has the numbers (ids) of the loop axes of `of` before these splits and merges.
    """

    of: TensorView
    made: TensorView
    axes: tuple[int, ...]
    loop: tuple[int, ...] = ()
    transforms: tuple[Transform, ...] = ()


@record
class Factored:
    """A reduction that `rfactor` calls have split into several reductions, the ops `ops`.

    The unsplit reduction reads the operand of `ops[0]`, reduces the axes `dims` and has the result
    `out`. `steps` are the `rfactor` calls.
    """

    ops: tuple[TensorOp, ...]
    out: TensorView
    dims: list[int]
    steps: tuple[RfactorCall, ...]


def factored_reductions(fusion: Fusion) -> dict[TensorOp, Factored]:
    """Returns the reductions of a fusion that `rfactor` calls have split into several, by the first
    op of each.
    """
    found: dict[TensorOp, Factored] = {}
    inside: set[TensorOp] = set()
    for k, op in enumerate(fusion.exprs):
        is_part = isinstance(op, ReductionOp | Contraction) and bool(op.out.domain.root_numbers)
        if is_part and op not in inside:
            found[op] = _factored(fusion.exprs[k:])
            inside.update(found[op].ops)
    return found


def _factored(ops: Sequence[TensorOp]) -> Factored:
    """Returns the reduction that `rfactor` calls have split into several ops. `ops[0]` is the first
    of these ops.

    `ops` also has all later ops of the fusion. The other ops of the split reduction are the first
    ones there: each reads the result of the op before.

    Raises:
        UnsupportedError: the ops do not have the form that `rfactor` calls create.
    """
    first = ops[0].out_tensor
    roots = {n: k for k, n in enumerate(first.domain.root_numbers)}
    # For each axis that the next op reads, the unsplit axis of the first op's operand, or None.
    origins = _kept(first, [*roots.values()])
    chain = [ops[0]]
    for op in ops[1:]:
        out = op.out_tensor
        if not isinstance(op, ReductionOp) or op.inp is not chain[-1].out_tensor:
            break
        chain.append(op)
        origins = _kept(out, origins)
        if not out.domain.root_numbers and None not in origins:
            dims = sorted({*roots.values()} - {*origins})
            return Factored(tuple(chain), out, dims, tuple(_steps(chain)))
    raise UnsupportedError(
        f"no Python statement can express the reduction that begins with {first}, because it is "
        f"not divided as rfactor divides a reduction{user_code(ops[0].where)}"
    )


def _kept(out: TensorView, origins: Sequence[int | None]) -> list[int | None]:
    """Returns the origins of the axes that `out` still has. `out` is the result of one op of a
    split reduction, which has reduced some axes.

    An origin is a position among the axes that the unsplit reduction reads, or None for an axis
    that a split created. `origins` has the origins of the axes that the op reads.
    """
    domain = out.domain
    of = dict(zip((a.number for a in domain.maybe_root), origins, strict=True))
    return [of.get(a.number) for a in domain.no_reductions]


def _steps(chain: Sequence[TensorOp]) -> list[RfactorCall]:
    """Returns the `rfactor` calls that create the ops `chain` of a split reduction.

    `chain` consists of groups of consecutive ops. The first op of a group splits axes, and the
    others reduce further axes of its result. Each op of a group except the last op of `chain` is
    created by one call. The first call of a group is made on the unsplit reduction, and each
    further one on the result of the call before.
    """
    whole = chain[-1].out_tensor
    parts = [op.out_tensor for op in chain[:-1]]
    heads = [k for k, tv in enumerate(parts) if tv.domain.root_numbers]
    steps: list[RfactorCall] = []
    for begin, end in zip(heads, [*heads[1:], len(parts)], strict=True):
        family = parts[begin:end]
        domain = family[0].domain
        reducer = _reducers(family)
        transforms = transforms_between(domain, domain.root, domain.logical)
        of, loop = whole, domain.root_numbers
        for k in reversed(range(len(family))):
            axes = tuple(p for p, by in enumerate(reducer) if by is not None and by <= k)
            steps.append(RfactorCall(of, family[k], axes, loop, tuple(transforms)))
            of, loop, transforms = family[k], (), ()
    return steps


def _reducers(family: Sequence[TensorView]) -> list[int | None]:
    """Returns, for each axis of the first tensor in `family`, the index in `family` of the tensor
    whose op reduces the axis, or None.

    `family` are the results of the ops into which a reduction was split.
    """
    left = list(range(len(family[0].domain.logical)))
    found: list[int | None] = [None] * len(left)
    for k, tv in enumerate(family):
        for at, axis in zip(left, tv.domain.logical, strict=True):
            if axis.is_reduction():
                found[at] = k
        left = [at for at in left if found[at] is None]
    return found


# ----------------------------------------------------------------------
# Scripts that reproduce an error in a new process.

# Errors that are neither a mistake of the caller nor a fault of the machine.
_INTERNAL = (CompileError, ExecutionError, KernelError, VerifyError)


def repro_script(program: str, inputs: Iterable[object] | None) -> str:
    """Returns a script that defines a program from its text (see `translate_fusion`), and runs it.

    The script's tensors have the shapes, strides, dtypes and devices of `inputs`, and random
    values. Numbers among the inputs are copied. If `inputs` is None, the script only defines the
    program.
    """
    lines = ["# CUDA devices:"]
    for k in range(torch.cuda.device_count()):
        lines.append(f"#  {k}: {torch.cuda.get_device_name(k)}")
    lines += [
        f"# torch version: {torch.__version__}",
        f"# cuda version: {torch.version.cuda}",
        "import torch",
        "from fuser import FusionDefinition, DataType",
        f"{program}with FusionDefinition() as fd:",
        "    nvfuser_fusion(fd)",
        "",
    ]
    if inputs is not None:
        lines += ["inputs = [", *(f"    {_input_text(v)}," for v in flatten(inputs)), "]"]
        lines += ["fd.execute(inputs)", ""]
    return "\n".join(lines)


def _input_text(value: torch.Tensor | bool | int | float | complex) -> str:
    if not isinstance(value, torch.Tensor):
        if isinstance(value, int):
            return repr(value) if value.bit_length() <= 64 else hex(value)
        return number_text(value)
    where = f"dtype={value.dtype}, device='{value.device}'"
    shape, strides = tuple(value.shape), value.stride()
    # torch cannot create random floats of one byte.
    is_narrow = value.dtype.is_floating_point and value.dtype.itemsize == 1
    if value.is_contiguous() and is_narrow:
        return f"torch.randn({shape}, device='{value.device}').to({value.dtype})"
    if value.is_contiguous():
        return f"torch.testing.make_tensor({shape}, {where})"
    # The number of elements up to the last one that the strides address.
    count = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    count = count if value.numel() else 0
    if is_narrow:
        drawn = f"torch.randn({count}, device='{value.device}').to({value.dtype})"
    elif value.dtype.is_floating_point or value.dtype.is_complex:
        drawn = f"torch.randn({count}, {where})"
    else:
        end = 2 if value.dtype is torch.bool else 10
        drawn = f"torch.randint(0, {end}, ({count},), {where})"
    return f"{drawn}.as_strided({shape}, {strides})"


def fake_inputs(inputs: Sequence[object]) -> list[object]:
    """Returns the inputs with tensors replaced by fake tensors, which have no data.

    A script that reproduces an error needs only shapes, strides, dtypes and devices.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    return [mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for v in inputs]


def is_internal(error: BaseException) -> bool:
    """Returns whether an error may be a fault of this project, not of the user.

    Such an error is a failed internal check, or an invalid program or kernel.
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError | NoCompilerError):
        return False
    return isinstance(error, _INTERNAL) or not isinstance(error, FuserError)


def report(error: BaseException, script: str) -> None:
    """Adds a note to an error, with the script that reproduces the error."""
    error.add_note(f"If this is a fault of fuser, this script reproduces it:\n```\n{script}```")
