"""Generates the CUDA C++ text of a kernel from its statements. The text calls the device functions
of `rt.h`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from fuser.ir.dtypes import HALF_LIKE, DataType, c_type, cast_text, category, part_of
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Apply, Const, Number, Poly, Scalar, Symbol
from fuser.lower.buffers import INDEX_CTYPE as INDEX
from fuser.lower.kernel_ir import (
    Accumulate,
    AccumulateBatch,
    AccumulateBlock,
    Assign,
    Body,
    Compute,
    Convert,
    Declare,
    DeclareShared,
    Define,
    DrawTicket,
    Element,
    Expr,
    Fold,
    For,
    Forget,
    GlobalLoad,
    If,
    KernelPart,
    Let,
    LetValue,
    LoweredKernel,
    Prefetch,
    ScalarValue,
    Select,
    Store,
    Sync,
    ThreadReduce,
    Unswitch,
    Var,
    VectorLoad,
    VectorStore,
    values_of,
    walk,
)
from fuser.lower.reduction_code import pair_text
from fuser.support.kernel_source import KernelParam, KernelSource

COORDINATE_TEXT = {
    "tx": "threadIdx.x",
    "ty": "threadIdx.y",
    "tz": "threadIdx.z",
    "bx": "blockIdx.x",
    "by": "blockIdx.y",
    "bz": "blockIdx.z",
}
BACKWARDS = {c: f"gridDim.{c[1]} - 1 - {t}" for c, t in COORDINATE_TEXT.items() if c[0] == "b"}


# ------------------------------------------------------------------ literals and scalars
def literal(value: Number, dtype: DataType) -> str:
    """Returns a C literal with the type `dtype` and exactly the value `value`.

    The literal is in parentheses where an operator around it would need them. An integer outside of
    the range of `dtype` wraps around. A floating-point number outside of an integer type's range is
    converted as an element of a tensor would be.
    """
    kind = category(dtype)
    if kind == "bool":
        return "true" if value else "false"
    if kind == "complex":
        part = part_of(dtype)
        return f"{c_type(dtype)}({literal(value.real, part)}, {literal(value.imag, part)})"
    value = value.real if isinstance(value, complex) else value
    if kind == "int":
        half = 1 << (31 if dtype is DataType.Int32 else 63)
        if isinstance(value, float) and not -half <= value < half:
            return cast_text(dtype, _floating(value, DataType.Double))
        wrapped = (int(value) + half) % (2 * half) - half
        return _integer(wrapped, is_long=dtype is not DataType.Int32)
    if dtype in HALF_LIKE:
        return cast_text(dtype, literal(value, DataType.Float))
    return _floating(float(value), dtype)


def _integer(value: int, *, is_long: bool) -> str:
    suffix = "LL" if is_long else ""
    if value == -(2**63):
        return "(-9223372036854775807LL - 1)"
    if value == -(2**31) and not is_long:
        return "(-2147483647 - 1)"
    return f"({value}{suffix})" if value < 0 else f"{value}{suffix}"


def _floating(value: float, dtype: DataType) -> str:
    ctype, suffix = ("double", "") if dtype is DataType.Double else ("float", "f")
    if math.isnan(value):
        return f"{ctype}(FUSER_NAN)"
    if math.isinf(value):
        return f"{ctype}(FUSER_INF)" if value > 0 else f"(-{ctype}(FUSER_INF))"
    if dtype is not DataType.Double:
        value = _nearest_float(value)
        if math.isinf(value):
            return _floating(value, dtype)
    text = repr(value) + suffix
    return f"({text})" if text.startswith("-") else text


def _nearest_float(value: float) -> float:
    """Returns a Python float rounded to single precision, as a C cast to float does."""
    import ctypes

    return ctypes.c_float(value).value


def scalar_text(x: Scalar) -> str:
    """Returns the C text of an index expression or condition.

    Inside a larger expression, the caller must add parentheses.
    """
    if isinstance(x, Const):
        if category(x.dtype) == "bool":
            return "true" if x.value else "false"
        return _integer(int(x.value), is_long=abs(int(x.value)) >= 2**31)
    if isinstance(x, Symbol):
        return x.name
    if isinstance(x, Poly):
        return _sum_text(x)
    assert isinstance(x, Apply)
    return _APPLY.get(x.op, _infix)(x)


def _atom(x: Scalar) -> str:
    text = scalar_text(x)
    return f"({text})" if isinstance(x, Poly | Apply) and not text.endswith("]") else text


def _infix(x: Apply) -> str:
    return f" {x.op} ".join(_atom(a) for a in x.args)


def _ceil_div(x: Apply) -> str:
    a, b = (_atom(y) for y in x.args)
    if not sc.is_nonnegative(x.args[0]):
        return f"-fm_floordiv({INDEX}(-{a}), {INDEX}({b}))"
    return f"({a} + {b} - 1) / {b}"


def _floor_div(x: Apply) -> str:
    a, b = (_atom(y) for y in x.args)
    return f"fm_floordiv({INDEX}({a}), {INDEX}({b}))"


def _floor_mod(x: Apply) -> str:
    """Returns the C text of a modulo whose result has the sign of the divisor.

    If the divisor is a power of two, a bit mask is used, which is right for negative numbers, too.
    """
    a, b = (_atom(y) for y in x.args)
    size = sc.int_value(x.args[1])
    if size is not None and size > 0 and size & (size - 1) == 0:
        return f"{a} & {_integer(size - 1, is_long=size > 2**31)}"
    return f"fm_remainder({INDEX}({a}), {INDEX}({b}))"


def _where(x: Apply) -> str:
    c, a, b = (_atom(y) for y in x.args)
    return f"{c} ? {a} : {b}"


def _extreme(x: Apply) -> str:
    a, b = (_atom(y) for y in x.args)
    return f"{a} {'<' if x.op == 'min' else '>'} {b} ? {a} : {b}"


_APPLY: dict[str, Callable[[Apply], str]] = {
    "ceilDiv": _ceil_div,
    "floorDiv": _floor_div,
    "floorMod": _floor_mod,
    "abs": lambda x: f"fm_abs({INDEX}({_atom(x.args[0])}))",
    "where": _where,
    "min": _extreme,
    "max": _extreme,
    "!": lambda x: f"!{_atom(x.args[0])}",
}


def _sum_text(x: Poly) -> str:
    # Positive terms first: the text has no leading minus, and the constant is last.
    ordered = sorted(x.terms, key=lambda t: (t[1] < 0, not t[0]))
    out = ""
    for mono, coef in ordered:
        factors = [_atom(a) for a in mono]
        size = abs(coef)
        if size != 1 or not factors:
            factors.insert(0, _integer(size, is_long=size >= 2**31))
        term = " * ".join(factors)
        sign = "-" if coef < 0 else "+"
        out = f"{out} {sign} {term}" if out else (f"-{term}" if coef < 0 else term)
    return out


# ------------------------------------------------------------------ values
def expr_text(e: Expr) -> str:
    """Returns the C text of a value.

    The text is in parentheses where an operator around it would need them.
    """
    return _EXPR[type(e)](e)


def _element(e: Element) -> str:
    return f"{e.name}[{scalar_text(e.index)}]" + (f".{e.member}" if e.member else "")


def _load(e: GlobalLoad) -> str:
    text = f"{e.name}[{scalar_text(e.index)}]"
    if e.guard == sc.const(True):
        return text
    return f"({scalar_text(e.guard)} ? {text} : {literal(0, e.dtype)})"


def _scalar_value(e: ScalarValue) -> str:
    if isinstance(e.scalar, Const):
        return literal(e.scalar.value, e.dtype)
    # An Index symbol has the kernel's index type; a value of dtype Index has 64 bits.
    exact = DataType.Int if e.dtype is DataType.Index else e.dtype
    if e.scalar.dtype is exact and isinstance(e.scalar, Symbol):
        return e.scalar.name
    return cast_text(e.dtype, scalar_text(e.scalar))


_NAMED_CASTS = {
    (DataType.Half, DataType.Float): "__half2float",
    (DataType.Float, DataType.Half): "__float2half",
    (DataType.BFloat16, DataType.Float): "__bfloat2float",
    (DataType.Float, DataType.BFloat16): "__float2bfloat",
}


def _convert(e: Convert) -> str:
    name, text = _NAMED_CASTS.get((e.arg.dtype, e.dtype)), _strip(expr_text(e.arg))
    return cast_text(e.dtype, text) if name is None else f"{name}({text})"


def _compute(e: Compute) -> str:
    text = e.template.format(*(expr_text(a) for a in e.args), t=c_type(e.dtype))
    is_call = text.startswith("fm_") and text.endswith(")")
    return text if is_call else f"({text})"


def _select(e: Select) -> str:
    return f"({_atom(e.cond)} ? {expr_text(e.a)} : {expr_text(e.b)})"


def _strip(text: str) -> str:
    """Returns the text without its outer parentheses, if these enclose the whole text, so that the
    kernel is easier to read.
    """
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for at, ch in enumerate(text):
        depth += (ch == "(") - (ch == ")")
        if depth == 0 and at < len(text) - 1:
            return text
    return text[1:-1]


_EXPR: dict[type, Callable[[Any], str]] = {
    Var: lambda e: e.name,
    Element: _element,
    GlobalLoad: _load,
    ScalarValue: _scalar_value,
    Convert: _convert,
    Compute: _compute,
    Select: _select,
}


# ------------------------------------------------------------------ statements
@dataclass
class Writer:
    """Collects the lines of a kernel's C text; `depth` is the number of indentation levels of the
    next line.
    """

    lines: list[str] = field(default_factory=list[str])
    depth: int = 1

    def line(self, text: str) -> None:
        """Appends one line at the current indentation."""
        self.lines.append("  " * self.depth + text)

    def body(self, body: Body) -> None:
        """Appends the statements of a body, indented by one more level."""
        self.depth += 1
        for s in body.statements:
            _STATEMENT[type(s)](self, s)
        self.depth -= 1


def _for(w: Writer, s: For) -> None:
    if s.pragma:
        w.line(s.pragma)
    k, count = s.symbol.name, scalar_text(s.extent)
    if s.backward:
        w.line(f"for ({INDEX} {k} = {count} - 1; {k} >= 0; --{k}) {{")
    else:
        w.line(f"for ({INDEX} {k} = 0; {k} < {count}; ++{k}) {{")
    w.body(s.body)
    w.line("}")


def _if(w: Writer, s: If) -> None:
    conds = [*s.flags, *([] if s.cond == sc.const(True) else [scalar_text(s.cond)])]
    w.line(f"if ({' && '.join(conds) or 'true'}) {{")
    w.body(s.then)
    if s.otherwise is not None:
        w.line("} else {")
        w.body(s.otherwise)
    w.line("}")


def _declare(w: Writer, s: Declare) -> None:
    if s.size is None:
        start = "" if s.init is None else f" = {_strip(expr_text(s.init))}"
        w.line(f"{s.ctype} {s.name}{start};")
        return
    w.line(f"Array<{s.ctype}, {s.size}> {s.name};")
    if s.init is not None:
        w.line(f"{s.name}.set({_strip(expr_text(s.init))});")


def _declare_shared(w: Writer, s: DeclareShared) -> None:
    t = c_type(s.dtype)
    w.line(
        f"FUSER_SHARED({t}) {s.name} = FUSER_SHARED_AT({t}, smem, {scalar_text(s.offset)}, "
        f"{scalar_text(s.count)});"
    )


def _store(w: Writer, s: Store) -> None:
    w.line(f"{s.name}[{scalar_text(s.index)}] = {_strip(expr_text(s.value))};")


def _vector_load(w: Writer, s: VectorLoad) -> None:
    suffix = "_any" if not s.aligned else "_cs" if s.streaming else ""
    place = "" if sc.int_value(s.at) == 0 else f"{scalar_text(s.at)}, "
    w.line(f"load_vec{suffix}<{s.width}>({s.array}, {place}{s.name}, {scalar_text(s.index)});")


def _vector_store(w: Writer, s: VectorStore) -> None:
    suffix = "_cs" if s.streaming else ""
    place = "" if sc.int_value(s.at) == 0 else f", {scalar_text(s.at)}"
    w.line(f"store_vec{suffix}<{s.width}>({s.name}, {scalar_text(s.index)}, {s.array}{place});")


def _accumulate(w: Writer, s: Accumulate) -> None:
    target, value = expr_text(s.target), expr_text(s.value)
    if s.nan_flag:
        w.line(f"fm_{s.kind}_step({target}, {s.nan_flag}, {_strip(value)});")
    elif s.kind == "welford":
        w.line(f"welford_add({target}, {_strip(value)});")
    elif s.kind in ("add", "mul") and s.functor.partition("<")[0] in ("SumOp", "ProdOp"):
        w.line(f"{target} {'+' if s.kind == 'add' else '*'}= {_strip(value)};")
    else:
        w.line(f"{target} = {s.functor}()({target}, {_strip(value)});")


def _accumulate_block(w: Writer, s: AccumulateBlock) -> None:
    w.line(f"welford_add_block({expr_text(s.target)}, {s.array}, {scalar_text(s.count)});")


def _accumulate_batch(w: Writer, s: AccumulateBatch) -> None:
    mask = f", {s.mask}" if s.mask else ""
    w.line(f"welford_add_batch({expr_text(s.target)}, {s.held}, {s.array}{mask});")


def _thread_reduce(w: Writer, s: ThreadReduce) -> None:
    """Writes the calls that combine accumulators over the threads of a CUDA block, then over the
    blocks of a cluster or of the grid.

    An accumulator is the variable in which each thread has its partial result of a reduction.
    Several accumulators are packed into one C struct (`Pair`), combined, and unpacked again.
    """
    if len(s.parts) == 1:
        part = s.parts[0]
        _reduce_calls(w, s, part.name, part.functor, _strip(expr_text(part.identity)))
        return
    ctype = pair_text(p.ctype for p in s.parts)
    functor = pair_text((p.functor for p in s.parts), "PairOp")
    identity = _make_pair(
        [_strip(expr_text(p.identity)) for p in s.parts], [p.ctype for p in s.parts]
    )
    name = "p" + s.parts[0].name
    if s.size is None:
        w.line(
            f"{ctype} {name} = {_make_pair([p.name for p in s.parts], [p.ctype for p in s.parts])};"
        )
        _reduce_calls(w, s, name, functor, identity)
        for k, part in enumerate(s.parts):
            w.line(f"{part.name} = {name}{_member(k, len(s.parts))};")
        return
    w.line(f"Array<{ctype}, {s.size}> {name};")
    loop = f"for (int i = 0; i < {s.size}; ++i) {{"
    w.line("FUSER_UNROLL")
    w.line(loop)
    elements = [f"{p.name}[i]" for p in s.parts]
    w.line(f"  {name}[i] = {_make_pair(elements, [p.ctype for p in s.parts])};")
    w.line("}")
    _reduce_calls(w, s, name, functor, identity)
    w.line("FUSER_UNROLL")
    w.line(loop)
    for k, part in enumerate(s.parts):
        w.line(f"  {part.name}[i] = {name}[i]{_member(k, len(s.parts))};")
    w.line("}")


def _make_pair(values: list[str], ctypes: list[str]) -> str:
    if len(values) == 1:
        return values[0]
    return f"{pair_text(ctypes)}{{{values[0]}, {_make_pair(values[1:], ctypes[1:])}}}"


def _member(k: int, count: int) -> str:
    return ".second" * k + (".first" if k < count - 1 else "")


def _reduce_calls(w: Writer, s: ThreadReduce, name: str, functor: str, identity: str) -> None:
    is_array = s.size is not None
    suffix, count = ("_array", f", {s.size}") if is_array else ("", "")
    common = f"{name}, {functor}(), {identity}"
    if any(s.thread_axes):
        call = f"block_reduce{suffix}<{_flags(s.thread_axes)}{count}>({common}, smem);"
        w.line(call if is_array else f"{name} = {call}")
    if s.cluster > 1:
        flags = f"{_flags(s.same_axes)}, {s.cluster}{count}"
        call = f"cluster_reduce{suffix}<{flags}>({name}, {functor}(), smem);"
        w.line(call if is_array else f"{name} = {call}")
    if any(s.grid_axes):
        assert s.packets_offset is not None
        flags = f"{_flags(s.grid_axes)}, {_flags(s.same_axes)}"
        packets = _offset_pointer(s.packets, s.packets_offset)
        w.line(
            f"const bool {s.done} = grid_reduce{suffix}<{flags}{count}>"
            f"({common}, {packets}, {s.ticket}, smem);"
        )


def _draw_ticket(w: Writer, s: DrawTicket) -> None:
    w.line(f"const unsigned {s.name} = grid_ticket<{_flags(s.grid_axes)}>({s.begun});")


def _flags(flags: tuple[bool, ...]) -> str:
    return ", ".join("true" if f else "false" for f in flags)


def _offset_pointer(name: str, offset: Scalar) -> str:
    return name if sc.int_value(offset) == 0 else f"{name} + {_atom(offset)}"


def _unswitch(w: Writer, s: Unswitch) -> None:
    w.line("unswitch {")
    w.body(s.body)
    w.line("}")


_STATEMENT: dict[type, Callable[[Writer, Any], None]] = {
    For: _for,
    If: _if,
    Unswitch: _unswitch,
    Let: lambda w, s: w.line(f"const {INDEX} {s.symbol.name} = {scalar_text(s.value)};"),
    LetValue: lambda w, s: w.line(
        f"const {'bool' if s.symbol.dtype is DataType.Bool else INDEX} {s.symbol.name} = "
        f"{_strip(expr_text(s.value))};"
    ),
    Define: lambda w, s: w.line(
        f"const {c_type(s.dtype)} {s.name} = {_strip(expr_text(s.value))};"
    ),
    Declare: _declare,
    DeclareShared: _declare_shared,
    Assign: lambda w, s: w.line(f"{expr_text(s.target)} = {_strip(expr_text(s.value))};"),
    Store: _store,
    VectorLoad: _vector_load,
    Prefetch: lambda w, s: w.line(f"prefetch({s.name}, {scalar_text(s.index)});"),
    Forget: lambda w, s: w.line(f"forget({s.array});"),
    VectorStore: _vector_store,
    Accumulate: _accumulate,
    AccumulateBlock: _accumulate_block,
    AccumulateBatch: _accumulate_batch,
    DrawTicket: _draw_ticket,
    ThreadReduce: _thread_reduce,
    Sync: lambda w, s: w.line("__syncthreads();"),
}


# ------------------------------------------------------------------ the kernel
def print_kernel(kernel: LoweredKernel) -> tuple[KernelSource, str]:
    """Returns the CUDA source of a lowered kernel, and the text of its statements alone.

    The second text is shorter to read. It lacks the function's signature, the lines that define
    thread and block indices, and the declaration of shared memory.
    """
    index_ctype = c_type(kernel.index_dtype)
    lines, body = _parts(kernel, index_ctype) if kernel.parts else _whole(kernel)
    params, declared = _parameters(kernel, index_ctype)
    signature = ",\n    ".join(declared)
    bounds = f"{kernel.threads}, {kernel.min_blocks}" if kernel.min_blocks else kernel.threads
    cluster = f"__cluster_dims__(1, {kernel.cluster}, 1) " if kernel.cluster > 1 else ""
    lines = [
        f"#define {INDEX} {index_ctype}",
        f'extern "C" __global__ void {cluster}__launch_bounds__({bounds}) {kernel.name}(',
        f"    {signature}) {{",
        *lines,
        "}",
        "",
    ]
    text = "\n".join(lines)
    source = KernelSource(kernel.name, text, tuple(params), kernel.waits, kernel.cluster)
    return source, "\n".join(body)


def _whole(kernel: LoweredKernel) -> tuple[list[str], list[str]]:
    """Returns the lines of text inside the braces of a kernel that is launched alone, not together
    with other kernels.

    Also returns the lines of its statements alone, without the lines that define thread and block
    indices and declare shared memory.
    """
    writer = Writer(depth=0)
    writer.body(kernel.body)
    used = _coordinates(kernel.body)
    texts = COORDINATE_TEXT | (BACKWARDS if kernel.goes_backwards else {})
    if kernel.fold is not None:
        texts = COORDINATE_TEXT | _folded_coordinates(kernel.fold, kernel.cluster)
    head = [f"  const {INDEX} {c} = {t};" for c, t in texts.items() if c in used]
    lines = [*head, *writer.lines]
    if kernel.fold is not None:
        lines = _in_turns(kernel.fold, lines, waits=kernel.waits)
    if kernel.reduces and all(sc.int_value(n) is not None for n in kernel.block):
        shape = ", ".join(map(scalar_text, kernel.block))
        lines.insert(0, f"  FUSER_BLOCK_SMEM(smem, {shape});")
    elif kernel.reduces or kernel.needs_smem:
        lines.insert(0, "  FUSER_SMEM(smem);")
    return lines, writer.lines


def _folded_coordinates(fold: Fold, cluster: int) -> dict[str, str]:
    """Returns the C texts that compute a block's index along x, y and z from one number, by the
    names "bx", "by" and "bz".

    They are for a kernel whose grid is folded: each launched CUDA block does the work of several
    blocks, one after the other, so that `blockIdx` is not the index of the current block. The C
    variable `fold` is the number of this block among all blocks, and the parameter `fold` has the
    numbers of blocks along x, y and z. If all blocks are along x and a cluster has several blocks
    (`cluster`), only "bx" is replaced.
    """
    across, down, _ = map(scalar_text, fold.counts)
    if all(sc.int_value(n) == 1 for n in fold.counts[1:]):
        alone = {} if cluster > 1 else {"by": "0", "bz": "0"}
        return {"bx": "fold", **alone}
    return {
        "bx": f"fold % {across}",
        "by": f"fold / {across} % {down}",
        "bz": f"fold / (static_cast<int64_t>({across}) * {down})",
    }


def _in_turns(fold: Fold, lines: Sequence[str], *, waits: bool) -> list[str]:
    """Returns `lines`, the statements for one block, inside a loop over block numbers.

    Such a loop is needed if the grid is folded: each launched CUDA block does the work of several
    blocks, one after the other. If threads of a block wait for each other (`waits`), iterations are
    separated by barriers.
    """
    first, *rest = map(scalar_text, fold.counts)
    count = " * ".join([f"static_cast<int64_t>({first})", *rest])
    # The next iteration overwrites shared memory.
    after = ["    __syncthreads();"] if waits else []
    return [
        f"  for (int64_t fold = blockIdx.x; fold < {count}; fold += gridDim.x) {{",
        *(f"  {line}" for line in lines),
        *after,
        "  }",
    ]


def _parts(kernel: LoweredKernel, index_ctype: str) -> tuple[list[str], list[str]]:
    """Returns the lines of text inside the braces of a kernel that runs several kernels side by
    side in one launch (horizontal fusion).

    Each CUDA block belongs to one of these kernels. From its own number, it computes to which
    kernel it belongs. It also computes the block index that it would have if only that kernel were
    launched. If a launched block does the work of several blocks, the lines are in a loop. Also
    returns the lines without this loop. `index_ctype` is the C type of indices.
    """
    writer = Writer()
    block = "blockIdx.x" if kernel.fold is None else "fold"
    leave = "return" if kernel.fold is None else "continue"
    for part, following in zip_longest(kernel.parts, kernel.parts[1:]):
        opened = "} else " if part.first else ""
        limit = f"if ({block} < {following.first}) " if following else ""
        writer.line(f"{opened}{limit}{{")
        writer.depth += 1
        threads = part.kernel.threads
        if threads < kernel.threads:
            writer.line(f"if (threadIdx.x >= {threads}) {leave};")
        used = _coordinates(part.kernel.body)
        texts = _coordinates_in(part, block)
        for name, text in texts.items():
            if name in used:
                writer.line(f"const {INDEX} {name} = {text};")
        for symbol, parameter in part.renamed.items():
            writer.line(f"const {_ctype_of(symbol, index_ctype)} {symbol.name} = {parameter};")
        writer.depth -= 1
        writer.body(part.kernel.body)
    writer.line("}")
    lines = writer.lines
    if kernel.fold is not None:
        lines = _in_turns(kernel.fold, lines, waits=False)
    return lines, writer.lines


def _coordinates_in(part: KernelPart, block: str) -> dict[str, str]:
    """Returns the C texts for the thread and block coordinates that a CUDA block would have in a
    launch of the kernel `part` alone.

    `block` is the C text of the block's number in the launch that several kernels share.
    """
    block = f"{block} - {part.first}" if part.first else block
    texts = {"bx": block}
    if part.across:
        texts = {"bx": f"({block}) % {part.across}", "by": f"({block}) / {part.across}"}
    x, y, _ = part.kernel.block
    if sc.int_value(y) == 1:
        return {"tx": "threadIdx.x", **texts}
    wide = scalar_text(x)
    return {"tx": f"threadIdx.x % {wide}", "ty": f"threadIdx.x / {wide}", **texts}


def _ctype_of(symbol: Symbol, index_ctype: str) -> str:
    return index_ctype if symbol.dtype is DataType.Index else c_type(symbol.dtype)


def _parameters(kernel: LoweredKernel, index_ctype: str) -> tuple[list[KernelParam], list[str]]:
    params: list[KernelParam] = []
    declared: list[str] = []
    fusions = [part.kernel.fusion for part in kernel.parts] or [kernel.fusion]
    aliased = {tv for f in fusions for a in f.aliases for tv in (a.out, a.into)}
    inputs = {v for f in fusions for v in f.inputs}
    for tv in kernel.tensors:
        name, ctype = f"T{tv.number}", c_type(tv.dtype())
        if tv in inputs:
            ctype = f"const {ctype}"
        macro = "FUSER_ALIASED_PTR" if tv in aliased else "FUSER_PTR"
        params.append(KernelParam(name, ctype, True))
        declared.append(f"{macro}({ctype}) {name}")
    for k, space in enumerate(kernel.workspaces):
        params.append(KernelParam(f"W{k}", space.ctype, True))
        declared.append(f"FUSER_PTR({space.ctype}) W{k}")
    for symbol in kernel.scalars:
        ctype = _ctype_of(symbol, index_ctype)
        params.append(KernelParam(symbol.name, ctype, False))
        declared.append(f"const {ctype} {symbol.name}")
    return params, declared


def _coordinates(body: Body) -> set[str]:
    """Returns the names of the thread and block coordinates that a body uses, such as `tx`."""
    used: set[str] = set()

    def note(x: Scalar | None) -> None:
        if x is not None:
            used.update(s.name for s in sc.symbols(x) if s.name in COORDINATE_TEXT)

    for s in walk(body):
        for name in ("cond", "value", "index", "at", "extent", "packets_offset"):
            value = getattr(s, name, None)
            if isinstance(value, Scalar):
                note(value)
        for part in values_of(s):
            for name in ("index", "guard", "scalar", "cond"):
                value = getattr(part, name, None)
                if isinstance(value, Scalar):
                    note(value)
    return used
