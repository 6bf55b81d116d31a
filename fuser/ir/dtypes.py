"""Data types: nvFuser's names, their CUDA and torch counterparts, and the promotion rules.

Promotion determines the dtype in which an op on operands of different dtypes computes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Literal

import torch

from fuser.ir.types import IrEnum
from fuser.support.errors import DtypeError, UnknownDtypeError, UnsupportedError
from fuser.support.record import record


class DataType(IrEnum):
    """The dtype of a tensor's elements or of a scalar. The values are nvFuser's numbers."""

    Double = 0
    Float = 1
    Half = 2
    BFloat16 = 3
    Float8_e4m3fn = 4
    Float8_e5m2 = 5
    Float8_e8m0fnu = 6
    Float4_e2m1fn = 7
    Float4_e2m1fn_x2 = 8
    Int32 = 11
    Int = 12
    UInt64 = 16
    Index = 17
    Bool = 18
    ComplexDouble = 19
    ComplexFloat = 20
    Null = 23


# The types that a user may pass as a dtype.
DtypeLike = DataType | torch.dtype
Category = Literal["bool", "int", "float", "complex"]


@record
class DtypeInfo:
    """Facts about one dtype.

    - `text`: its name in texts of the IR and in CUDA code.
    - `nbytes`: the size of an element in bytes.
    - `category`: "bool", "int", "float" or "complex".
    - `torch`: the torch dtype, or None if no tensors of this dtype exist.
    """

    text: str
    nbytes: int
    category: Category
    torch: torch.dtype | None


D = DataType
INFO: dict[DataType, DtypeInfo] = {
    D.Double: DtypeInfo("double", 8, "float", torch.float64),
    D.Float: DtypeInfo("float", 4, "float", torch.float32),
    D.Half: DtypeInfo("__half", 2, "float", torch.float16),
    D.BFloat16: DtypeInfo("__bfloat", 2, "float", torch.bfloat16),
    D.Float8_e4m3fn: DtypeInfo("__e4m3", 1, "float", torch.float8_e4m3fn),
    D.Float8_e5m2: DtypeInfo("__e5m2", 1, "float", torch.float8_e5m2),
    D.Float8_e8m0fnu: DtypeInfo("__e8m0", 1, "float", torch.float8_e8m0fnu),
    D.Int32: DtypeInfo("int", 4, "int", torch.int32),
    D.Int: DtypeInfo("int64_t", 8, "int", torch.int64),
    D.Index: DtypeInfo("nvfuser_index_t", 8, "int", torch.int64),
    D.Bool: DtypeInfo("bool", 1, "bool", torch.bool),
    D.ComplexFloat: DtypeInfo("std::complex<float>", 8, "complex", torch.complex64),
    D.ComplexDouble: DtypeInfo("std::complex<double>", 16, "complex", torch.complex128),
}
# Complex dtype -> dtype of its real and imaginary part, and the reverse.
PART_OF = {D.ComplexFloat: D.Float, D.ComplexDouble: D.Double}
COMPLEX_OF = {part: dtype for dtype, part in PART_OF.items()}
# Dtypes that can be stored and passed between library ops, but not computed or communicated.
STORED: dict[DataType, DtypeInfo] = {
    D.UInt64: DtypeInfo("uint64_t", 8, "int", torch.uint64),
}
_HELD = {**INFO, **STORED}
# Dtypes that nothing implements; they have a text only for error messages.
_UNSUPPORTED_TEXT = {
    D.Float4_e2m1fn: "__e2m1",
    D.Float4_e2m1fn_x2: "__e2m1_x2",
    D.Null: "null_type",
}
# Two elements share a byte; an element of the torch dtype is such a pair.
_PACKED = (D.Float4_e2m1fn, D.Float4_e2m1fn_x2)
NO_FLOAT4 = (
    "floats of four bits need a GPU of compute capability 10.0 or more, for which no kernels are "
    "built"
)
_PACKED_IN_TORCH = "torch.float4_e2m1fn_x2"
FROM_TEXT = {info.text: dtype for dtype, info in _HELD.items()}
FROM_TORCH = {
    info.torch: dtype
    for dtype, info in _HELD.items()
    if info.torch is not None and dtype is not D.Index
}
# Floats of one byte. torch has no arithmetic for them: values are moved as bytes, or computed in
# Float.
FLOAT8 = frozenset({D.Float8_e4m3fn, D.Float8_e5m2, D.Float8_e8m0fnu})
# Dtypes whose values are computed in Float.
HALF_LIKE = frozenset({D.Half, D.BFloat16}) | FLOAT8
# The largest value that every floating dtype can represent.
_SMALLEST_MAX = 448


def check_supported(dtype: DtypeLike, what: str) -> DataType:
    """Returns `dtype` as a `DataType`, if ops can compute in this dtype.

    `what` names the tensor or argument at the start of the message.

    Raises:
        UnsupportedError: ops cannot compute in this dtype.
    """
    return _checked(dtype, what, INFO)


def check_stored(dtype: DtypeLike, what: str) -> DataType:
    """Returns `dtype` as a `DataType`, if tensors of this dtype can exist.

    Unlike `check_supported`, the function accepts dtypes in which no op computes, such as UInt64.
    `what` names the tensor or argument at the start of the message.

    Raises:
        UnsupportedError: no tensors of this dtype can exist.
    """
    return _checked(dtype, what, _HELD)


def _checked(dtype: DtypeLike, what: str, known: Mapping[DataType, DtypeInfo]) -> DataType:
    if isinstance(dtype, torch.dtype):
        dtype = from_torch(dtype)
    if dtype not in known:
        packed = f": {NO_FLOAT4}: write Float8_e4m3fn"
        raise UnsupportedError(
            f"{what}: dtype {dtype_text(dtype)} is not supported{packed * (dtype in _PACKED)}"
        )
    return dtype


def dtype_text(dtype: DataType) -> str:
    """Returns the name of a dtype in texts of the IR, as in C++: `float`, `__bfloat`, `int64_t`."""
    return _HELD[dtype].text if dtype in _HELD else _UNSUPPORTED_TEXT[dtype]


def nbytes_of(dtype: DataType) -> int:
    """Returns the size of one element in bytes."""
    return _HELD[dtype].nbytes


def c_type(dtype: DataType) -> str:
    """Returns the C type of a value of this dtype in a kernel.

    Index is int64_t. A complex dtype is the class `Complex` of `codegen/rt_complex.h`.
    """
    if dtype in PART_OF:
        return f"Complex<{c_type(PART_OF[dtype])}>"
    return "int64_t" if dtype is DataType.Index else _HELD[dtype].text


@cache
def e4m3_has_nan_beyond() -> bool:
    """Returns whether torch converts floats that are too large for Float8_e4m3fn to NaN.

    Newer versions of torch convert such floats to 448, the largest value. Generated code must do
    the same as the installed version. To find out, the function converts one float on the CPU.
    """
    large = torch.tensor([2.0**20], dtype=torch.float32, device="cpu")
    return bool(large.to(torch.float8_e4m3fn).float().isnan())


def cast_text(dtype: DataType, value: str) -> str:
    """Returns the C++ expression that converts the expression `value` to a dtype, as torch does."""
    if dtype is D.Float8_e4m3fn and e4m3_has_nan_beyond():
        return f"fm_e4m3_or_nan(fm_cast<float>({value}))"
    return f"fm_cast<{c_type(dtype)}>({value})"


def to_torch(dtype: DataType) -> torch.dtype:
    """Returns the torch dtype of tensors with this IR dtype."""
    found = _HELD[check_stored(dtype, "conversion to torch")].torch
    assert found is not None, f"{dtype} has no torch dtype"
    return found


def from_torch(dtype: torch.dtype) -> DataType:
    """Returns the IR dtype of a torch dtype.

    Raises:
        UnknownDtypeError: there is no such IR dtype.
    """
    found = FROM_TORCH.get(dtype)
    if str(dtype) == _PACKED_IN_TORCH:
        return D.Float4_e2m1fn_x2
    if found is None:
        known = ", ".join(sorted(str(d).removeprefix("torch.") for d in FROM_TORCH))
        raise UnknownDtypeError(f"torch dtype {dtype} is not supported: supported are {known}")
    return found


def torch_dtype_text(dtype: torch.dtype) -> str:
    """Returns the name of a torch dtype for messages: the IR's name, else torch's name."""
    found = FROM_TORCH.get(dtype)
    return str(dtype) if found is None else dtype_text(found)


def misfit(value: bool | int | float | complex, dtype: DataType) -> str | None:
    """Returns the reason why a dtype cannot represent a number, or None if it can.

    Example: `2**40 is out of the range of int`. Rounding is no reason.
    """
    kind = category(dtype)
    if kind == "complex":
        part = PART_OF[dtype]
        return misfit(value.real, part) or misfit(value.imag, part)
    if isinstance(value, complex):
        return f"{value:g} is complex, but {c_type(dtype)} is real"
    if kind == "int" and isinstance(value, float) and not value.is_integer():
        return f"{value:g} is not an integer"
    return (
        None
        if kind == "bool" or _is_in_range(value, dtype, kind)
        else (f"{_short(value)} is out of the range of {c_type(dtype)}")
    )


def _is_in_range(value: int | float, dtype: DataType, kind: Category) -> bool:
    if kind == "int":
        end = 1 << 8 * nbytes_of(dtype) - 1
        return -end <= value < end
    if abs(value) <= _SMALLEST_MAX or (isinstance(value, float) and not math.isfinite(value)):
        return True
    if dtype in FLOAT8:
        return abs(value) <= torch.finfo(to_torch(dtype)).max
    try:
        return bool(torch.tensor(float(value), dtype=torch.float64).to(to_torch(dtype)).isfinite())
    except OverflowError:
        return False


def _short(value: int | float) -> str:
    """Returns a number as text. An integer of more than 128 bits is abbreviated to `2**200..`."""
    if isinstance(value, float) or value.bit_length() <= 128:
        return str(value)
    return f"{'-' if value < 0 else ''}2**{value.bit_length() - 1}.."


@cache
def category(dtype: DataType) -> Category:
    """Returns the category of a dtype: "bool", "int", "float" or "complex"."""
    return _HELD[check_stored(dtype, "category")].category


def is_floating(dtype: DataType) -> bool:
    """Returns whether values of a dtype are real floating-point numbers."""
    return category(dtype) == "float"


def is_complex(dtype: DataType) -> bool:
    """Returns whether values of a dtype are complex numbers."""
    return category(dtype) == "complex"


def is_inexact(dtype: DataType) -> bool:
    """Returns whether a dtype is floating or complex: arithmetic rounds, and may yield NaN."""
    return category(dtype) in ("float", "complex")


def part_of(dtype: DataType) -> DataType:
    """Returns the dtype of the real part of a complex dtype, and any other dtype unchanged."""
    return PART_OF.get(dtype, dtype)


def complex_of(dtype: DataType) -> DataType:
    """Returns the complex dtype whose real and imaginary parts have the floating dtype `dtype`.

    Returns ComplexFloat if there is no such complex dtype.
    """
    return COMPLEX_OF.get(dtype, D.ComplexFloat)


def dtype_of_python(value: bool | int | float | complex) -> DataType:
    """Returns nvFuser's dtype for a Python number: Bool, Int, Double or ComplexDouble."""
    if isinstance(value, bool):
        return D.Bool
    if isinstance(value, complex):
        return D.ComplexDouble
    return D.Int if isinstance(value, int) else D.Double


# ------------------------------------------------------------------ promotion
Rank = Literal["dim", "zero_dim", "scalar"]
Config = Literal["default", "float", "float_only", "comparison"]


def _promote(a: DataType | None, b: DataType | None) -> DataType | None:
    """Returns the dtype to which torch promotes two operands of equal priority.

    torch has three priorities: tensors with dimensions, tensors without, and Python numbers. None
    means that there is no operand.
    """
    if a is None or b is None:
        return a if b is None else b
    if a is b:
        return a
    if a is D.Index:
        a = D.Int
    if b is D.Index:
        b = D.Int
    if is_complex(a) or is_complex(b):
        a, b = (D.Float if x in FLOAT8 else x for x in (a, b))
    elif a in FLOAT8 or b in FLOAT8:
        # torch refuses this pair; Float holds all values of two narrow dtypes.
        hi, lo = (a, b) if is_floating(a) else (b, a)
        if not is_floating(lo):
            return hi
        return D.Double if D.Double in (a, b) else D.Float
    return from_torch(torch.promote_types(to_torch(a), to_torch(b)))


def _combine(hi: DataType | None, lo: DataType | None) -> DataType | None:
    """Returns the dtype to which torch promotes operands of a higher priority and of a lower one.

    torch has three priorities: tensors with dimensions, tensors without, and Python numbers. `hi`
    is the promoted dtype of the operands of the higher priority, and `lo` that of the lower one.
    Each is None if there are no such operands. `lo` has an effect only if its category is higher,
    for example a float number with an integer tensor.
    """
    if hi is None or lo is None:
        return hi if lo is None else lo
    if is_complex(hi) or (is_floating(hi) and not is_complex(lo)):
        return hi
    if is_complex(lo):
        return complex_of(hi) if is_floating(hi) else lo
    return _promote(hi, lo) if hi is D.Bool or is_floating(lo) else hi


def common_dtype(operands: Sequence[tuple[DataType, Rank]], config: Config) -> DataType:
    """Returns the dtype in which an op computes.

    `operands` are (dtype, priority) pairs. The priority is "dim" for tensors with dimensions,
    "zero_dim" for tensors without, and "scalar" for numbers. An operand of a lower priority has an
    effect only if its category is higher, such as a float number with an integer tensor. A result
    of half precision or Float8 becomes Float. `config` is the kind of the op: for example, "float"
    says that the op computes integers in Float.

    Source: torch type promotion, with nvFuser's rule that half-precision values are computed in
    Float.

    Raises:
        DtypeError: `config` is "float_only", and the result is neither Float nor Double.
    """
    dtype = promote_operands(operands)
    if config in ("float", "float_only") and not is_inexact(dtype):
        dtype = D.Float
    if config == "float_only" and dtype not in (D.Float, D.Double):
        raise DtypeError(
            f"Promoted type must be single or double precision float but found "
            f"{dtype_text(dtype)}: cast the operands to Float or Double"
        )
    return D.Float if dtype in HALF_LIKE else dtype


# torch's dtypes of Python numbers if no tensor decides about the width.
_OF_NUMBERS = {D.Double: D.Float, D.ComplexDouble: D.ComplexFloat}


def number_width(operands: Sequence[tuple[DataType, Rank]]) -> list[tuple[DataType, Rank]]:
    """Returns the operands, with the dtypes of Python numbers replaced by torch's default dtypes.

    `operands` are (dtype, priority) pairs, as for `common_dtype`. A Python float, here a Double,
    becomes a Float, and a Python complex number a ComplexFloat. Integers, bools and tensors keep
    their dtypes. The reason: in torch's promotion, a Python number has a category (such as float),
    but no width. torch uses its default width if no tensor has the number's category.

    Source: torch's documentation of `torch.result_type` ("wrapped numbers"), with the default dtype
    float32.
    """
    return [(_OF_NUMBERS.get(d, d), r) if r == "scalar" else (d, r) for d, r in operands]


def promote_operands(operands: Sequence[tuple[DataType, Rank]]) -> DataType:
    """Returns the dtype to which torch promotes the operands, which are (dtype, priority) pairs.

    The priority is "dim" for tensors with dimensions, "zero_dim" for tensors without, and "scalar"
    for numbers. Unlike in `common_dtype`, a result of half precision does not become Float. Ops
    that only select elements, such as `where`, need this, because they do no arithmetic.
    """
    assert operands, "promotion needs an operand"
    first = operands[0][0]
    if all(dtype is first for dtype, _ in operands):
        return first
    by_rank: dict[Rank, DataType | None] = {"dim": None, "zero_dim": None, "scalar": None}
    for dtype, rank in operands:
        seen = D.Float if rank == "scalar" and dtype in HALF_LIKE else dtype
        by_rank[rank] = _promote(by_rank[rank], seen)
    low = _combine(by_rank["zero_dim"], by_rank["scalar"])
    result = _combine(by_rank["dim"], low)
    assert result is not None
    return result
