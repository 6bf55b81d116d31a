"""How elementwise ops and casts are spelled in IR text."""

from __future__ import annotations

from fuser.ir.dtypes import HALF_LIKE, INFO, DataType, category, is_complex
from fuser.ir.pointwise_table import POINTWISE


def unary_template(kind: str, *, is_float: bool) -> str:
    """Return the text of an op of one operand; `is_float`: the result is Float."""
    row = POINTWISE[kind]
    if row.is_operator:
        return "{out}\n   = " + row.text + "{inp};"
    return "{out}\n   = " + (row.float_text if is_float else row.text) + "({inp});"


def binary_template(kind: str, *, is_float: bool) -> str:
    """Return the text of an op of two operands; `is_float`: the result is floating."""
    row = POINTWISE[kind]
    if row.is_operator:
        return "{out}\n   = {lhs}\n   " + row.text + " {rhs};"
    return "{out}\n   = " + (row.float_text if is_float else row.text) + "({lhs}\n  , {rhs});"


def ternary_template(kind: str) -> str:
    """Return the text of an op of three operands."""
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
    """Return nvFuser's name of a cast (`__to_float`, `__half2float`, `__int2half`, ...)."""
    s, d = INFO[src].text, INFO[dst].text
    if is_complex(src) and category(dst) in ("int", "float"):
        return _CAST_TO.get(d, f"__to_{_CAST_NAMES.get(d)}").replace("__", "__real_then_", 1)
    if dst in HALF_LIKE or (src in HALF_LIKE and d in ("float", "double")):
        return f"__{_CAST_NAMES.get(s, 'bool' if s == 'bool' else 'int')}2{_CAST_NAMES[d]}"
    return _CAST_TO[d]
