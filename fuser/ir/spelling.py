"""The kinds of elementwise ops, and how they and casts are spelled in IR text."""

from __future__ import annotations

from fuser.ir.dtypes import INFO, DataType

INLINE_UNARY = {"neg": "-", "logical_not": "!", "bitwise_not": "~"}
UNARY_KINDS = tuple(
    """
    abs acos acosh asin asinh atan atanh ceil cos cosh erf erfc erfcinv erfinv exp exp2 expm1 floor
    frac isfinite isinf isnan isneginf isposinf isreal lgamma log log10 log1p log2 neg logical_not
    bitwise_not reciprocal relu round rsqrt sigmoid signbit silu sin sinh sqrt tan tanh trunc
    """.split()
)
_SPELLED = {"round": "nearbyint"}
# Kinds whose printed function has the suffix f when the result is Float.
SUFFIXED = frozenset(
    """
    acos acosh asin asinh atan atanh ceil cos cosh erf erfc erfcinv erfinv exp exp2 expm1 floor
    lgamma log log10 log1p log2 round rsqrt sin sinh sqrt tan tanh trunc
    """.split()
)
INLINE_BINARY = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "mod": "%",
    "bitwise_left_shift": "<<",
    "bitwise_right_shift": ">>",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "logical_and": "&&",
    "logical_or": "||",
    "bitwise_and": "&",
    "bitwise_or": "|",
    "bitwise_xor": "^",
}
FUNCTION_BINARY = {
    "maximum": ("max", "fmax"),
    "minimum": ("min", "fmin"),
    "pow": ("pow", "pow"),
    "atan2": ("atan2", "atan2f"),
    "fmod": ("fmod", "fmodf"),
    "remainder": ("remainder", "remainder"),
    "nextafter": ("nextafter", "nextafter"),
    "gcd": ("gcd", "gcd"),
}
BINARY_KINDS = (*INLINE_BINARY, *FUNCTION_BINARY)
TERNARY_KINDS = ("where", "clamp", "lerp", "threshold")


def unary_template(kind: str, suffix: str) -> str:
    if kind in INLINE_UNARY:
        return "{out}\n   = " + INLINE_UNARY[kind] + "{inp};"
    return "{out}\n   = " + _SPELLED.get(kind, kind) + suffix + "({inp});"


def binary_template(kind: str, is_float: bool) -> str:
    if kind in INLINE_BINARY:
        return "{out}\n   = {lhs}\n   " + INLINE_BINARY[kind] + " {rhs};"
    return "{out}\n   = " + FUNCTION_BINARY[kind][is_float] + "({lhs}\n  , {rhs});"


_CAST_NAMES = {"float": "float", "double": "double", "__half": "half", "__bfloat": "bfloat"}
_CAST_TO = {
    "float": "__to_float",
    "double": "__to_double",
    "int": "__to_int32",
    "int64_t": "__to_int64",
    "nvfuser_index_t": "__to_index",
    "bool": "__to_bool",
}


def cast_spelling(src: DataType, dst: DataType) -> str:
    """Return nvFuser's name of a cast (`__to_float`, `__half2float`, `__int2half`, ...)."""
    s, d = INFO[src].text, INFO[dst].text
    half = ("__half", "__bfloat")
    if d in half or (s in half and d in ("float", "double")):
        return f"__{_CAST_NAMES.get(s, 'bool' if s == 'bool' else 'int')}2{_CAST_NAMES[d]}"
    return _CAST_TO[d]
