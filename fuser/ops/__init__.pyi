# ruff: noqa: E501, I001
# fmt: off
"""The ops as type checkers see them, from the rows of `fuser.ops.rows`.

`python scripts/document_ops.py` writes this file. An op of scalars alone gives a scalar.
"""

from typing import NoReturn
from collections.abc import Sequence
from typing import overload
from fuser.ir.dtypes import DataType
from fuser.ir.dtypes import DtypeLike
from fuser.ops.building import OperandLike
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.scalar.constructors import ScalarLike
from fuser.ops.building import SizeLike
from fuser.ir.fusion import TensorView

@overload
def acos(x: TensorView, /) -> TensorView: """As `torch.acos`."""
@overload
def acos(x: ScalarLike, /) -> Scalar: """As `torch.acos`."""
@overload
def acosh(x: TensorView, /) -> TensorView: """As `torch.acosh`."""
@overload
def acosh(x: ScalarLike, /) -> Scalar: """As `torch.acosh`."""
@overload
def asin(x: TensorView, /) -> TensorView: """As `torch.asin`."""
@overload
def asin(x: ScalarLike, /) -> Scalar: """As `torch.asin`."""
@overload
def asinh(x: TensorView, /) -> TensorView: """As `torch.asinh`."""
@overload
def asinh(x: ScalarLike, /) -> Scalar: """As `torch.asinh`."""
@overload
def atan(x: TensorView, /) -> TensorView: """As `torch.atan`."""
@overload
def atan(x: ScalarLike, /) -> Scalar: """As `torch.atan`."""
@overload
def atanh(x: TensorView, /) -> TensorView: """As `torch.atanh`."""
@overload
def atanh(x: ScalarLike, /) -> Scalar: """As `torch.atanh`."""
@overload
def cos(x: TensorView, /) -> TensorView: """As `torch.cos`."""
@overload
def cos(x: ScalarLike, /) -> Scalar: """As `torch.cos`."""
@overload
def cosh(x: TensorView, /) -> TensorView: """As `torch.cosh`."""
@overload
def cosh(x: ScalarLike, /) -> Scalar: """As `torch.cosh`."""
@overload
def sin(x: TensorView, /) -> TensorView: """As `torch.sin`."""
@overload
def sin(x: ScalarLike, /) -> Scalar: """As `torch.sin`."""
@overload
def sinh(x: TensorView, /) -> TensorView: """As `torch.sinh`."""
@overload
def sinh(x: ScalarLike, /) -> Scalar: """As `torch.sinh`."""
@overload
def tan(x: TensorView, /) -> TensorView: """As `torch.tan`."""
@overload
def tan(x: ScalarLike, /) -> Scalar: """As `torch.tan`."""
@overload
def tanh(x: TensorView, /) -> TensorView: """As `torch.tanh`."""
@overload
def tanh(x: ScalarLike, /) -> Scalar: """As `torch.tanh`."""
@overload
def exp(x: TensorView, /) -> TensorView: """As `torch.exp`."""
@overload
def exp(x: ScalarLike, /) -> Scalar: """As `torch.exp`."""
@overload
def exp2(x: TensorView, /) -> TensorView: """As `torch.exp2`."""
@overload
def exp2(x: ScalarLike, /) -> Scalar: """As `torch.exp2`."""
@overload
def expm1(x: TensorView, /) -> TensorView: """As `torch.expm1`."""
@overload
def expm1(x: ScalarLike, /) -> Scalar: """As `torch.expm1`."""
@overload
def erf(x: TensorView, /) -> TensorView: """As `torch.erf`."""
@overload
def erf(x: ScalarLike, /) -> Scalar: """As `torch.erf`."""
@overload
def erfc(x: TensorView, /) -> TensorView: """As `torch.erfc`."""
@overload
def erfc(x: ScalarLike, /) -> Scalar: """As `torch.erfc`."""
@overload
def erfinv(x: TensorView, /) -> TensorView: """As `torch.erfinv`."""
@overload
def erfinv(x: ScalarLike, /) -> Scalar: """As `torch.erfinv`."""
@overload
def erfcinv(x: TensorView, /) -> TensorView: """Returns the y with erfc(y) = x."""
@overload
def erfcinv(x: ScalarLike, /) -> Scalar: """Returns the y with erfc(y) = x."""
@overload
def lgamma(x: TensorView, /) -> TensorView: """As `torch.lgamma`."""
@overload
def lgamma(x: ScalarLike, /) -> Scalar: """As `torch.lgamma`."""
@overload
def log(x: TensorView, /) -> TensorView: """As `torch.log`."""
@overload
def log(x: ScalarLike, /) -> Scalar: """As `torch.log`."""
@overload
def log10(x: TensorView, /) -> TensorView: """As `torch.log10`."""
@overload
def log10(x: ScalarLike, /) -> Scalar: """As `torch.log10`."""
@overload
def log1p(x: TensorView, /) -> TensorView: """As `torch.log1p`."""
@overload
def log1p(x: ScalarLike, /) -> Scalar: """As `torch.log1p`."""
@overload
def log2(x: TensorView, /) -> TensorView: """As `torch.log2`."""
@overload
def log2(x: ScalarLike, /) -> Scalar: """As `torch.log2`."""
@overload
def rsqrt(x: TensorView, /) -> TensorView: """As `torch.rsqrt`."""
@overload
def rsqrt(x: ScalarLike, /) -> Scalar: """As `torch.rsqrt`."""
@overload
def sqrt(x: TensorView, /) -> TensorView: """As `torch.sqrt`."""
@overload
def sqrt(x: ScalarLike, /) -> Scalar: """As `torch.sqrt`."""
@overload
def reciprocal(x: TensorView, /) -> TensorView: """As `torch.reciprocal`."""
@overload
def reciprocal(x: ScalarLike, /) -> Scalar: """As `torch.reciprocal`."""
@overload
def sigmoid(x: TensorView, /) -> TensorView: """As `torch.sigmoid`."""
@overload
def sigmoid(x: ScalarLike, /) -> Scalar: """As `torch.sigmoid`."""
@overload
def silu(x: TensorView, /) -> TensorView: """Returns x * sigmoid(x)."""
@overload
def silu(x: ScalarLike, /) -> Scalar: """Returns x * sigmoid(x)."""
@overload
def neg(x: TensorView, /) -> TensorView: """Returns -x; for Bool, x."""
@overload
def neg(x: ScalarLike, /) -> Scalar: """Returns -x; for Bool, x."""
@overload
def abs(x: TensorView, /) -> TensorView: """As `torch.abs`."""
@overload
def abs(x: ScalarLike, /) -> Scalar: """As `torch.abs`."""
@overload
def real(x: TensorView, /) -> TensorView: """the real parts; of a real operand, a copy."""
@overload
def real(x: ScalarLike, /) -> Scalar: """the real parts; of a real operand, a copy."""
@overload
def imag(x: TensorView, /) -> TensorView: """the imaginary parts of a complex operand."""
@overload
def imag(x: ScalarLike, /) -> Scalar: """the imaginary parts of a complex operand."""
@overload
def ceil(x: TensorView, /) -> TensorView: """As `torch.ceil`."""
@overload
def ceil(x: ScalarLike, /) -> Scalar: """As `torch.ceil`."""
@overload
def floor(x: TensorView, /) -> TensorView: """As `torch.floor`."""
@overload
def floor(x: ScalarLike, /) -> Scalar: """As `torch.floor`."""
@overload
def round(x: TensorView, /) -> TensorView: """As `torch.round`."""
@overload
def round(x: ScalarLike, /) -> Scalar: """As `torch.round`."""
@overload
def trunc(x: TensorView, /) -> TensorView: """As `torch.trunc`."""
@overload
def trunc(x: ScalarLike, /) -> Scalar: """As `torch.trunc`."""
@overload
def frac(x: TensorView, /) -> TensorView: """Returns x - trunc(x)."""
@overload
def frac(x: ScalarLike, /) -> Scalar: """Returns x - trunc(x)."""
@overload
def relu(x: TensorView, /) -> TensorView: """As `torch.relu`."""
@overload
def relu(x: ScalarLike, /) -> Scalar: """As `torch.relu`."""
@overload
def isfinite(x: TensorView, /) -> TensorView: """As `torch.isfinite`."""
@overload
def isfinite(x: ScalarLike, /) -> Scalar: """As `torch.isfinite`."""
@overload
def isinf(x: TensorView, /) -> TensorView: """As `torch.isinf`."""
@overload
def isinf(x: ScalarLike, /) -> Scalar: """As `torch.isinf`."""
@overload
def isnan(x: TensorView, /) -> TensorView: """As `torch.isnan`."""
@overload
def isnan(x: ScalarLike, /) -> Scalar: """As `torch.isnan`."""
@overload
def isneginf(x: TensorView, /) -> TensorView: """As `torch.isneginf`."""
@overload
def isneginf(x: ScalarLike, /) -> Scalar: """As `torch.isneginf`."""
@overload
def isposinf(x: TensorView, /) -> TensorView: """As `torch.isposinf`."""
@overload
def isposinf(x: ScalarLike, /) -> Scalar: """As `torch.isposinf`."""
@overload
def isreal(x: TensorView, /) -> TensorView: """As `torch.isreal`."""
@overload
def isreal(x: ScalarLike, /) -> Scalar: """As `torch.isreal`."""
@overload
def signbit(x: TensorView, /) -> TensorView: """As `torch.signbit`."""
@overload
def signbit(x: ScalarLike, /) -> Scalar: """As `torch.signbit`."""
@overload
def logical_not(x: TensorView, /) -> TensorView: """As `torch.logical_not`."""
@overload
def logical_not(x: ScalarLike, /) -> Scalar: """As `torch.logical_not`."""
@overload
def bitwise_not(x: TensorView, /) -> TensorView: """As `torch.bitwise_not`."""
@overload
def bitwise_not(x: ScalarLike, /) -> Scalar: """As `torch.bitwise_not`."""
@overload
def add(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """As `torch.add`."""
@overload
def add(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """As `torch.add`."""
@overload
def add(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """As `torch.add`."""
@overload
def sub(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """Returns lhs - rhs; for Bool, lhs xor rhs."""
@overload
def sub(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """Returns lhs - rhs; for Bool, lhs xor rhs."""
@overload
def sub(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """Returns lhs - rhs; for Bool, lhs xor rhs."""
@overload
def mul(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """As `torch.mul`."""
@overload
def mul(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """As `torch.mul`."""
@overload
def mul(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """As `torch.mul`."""
@overload
def div(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """Returns lhs / rhs; integers are truncated, and x / 0 is -1 (of scalars: an error)."""
@overload
def div(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """Returns lhs / rhs; integers are truncated, and x / 0 is -1 (of scalars: an error)."""
@overload
def div(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """Returns lhs / rhs; integers are truncated, and x / 0 is -1 (of scalars: an error)."""
@overload
def mod(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """Returns the remainder with lhs's sign; of integer x by 0 it is x (of scalars: an error)."""
@overload
def mod(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """Returns the remainder with lhs's sign; of integer x by 0 it is x (of scalars: an error)."""
@overload
def mod(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """Returns the remainder with lhs's sign; of integer x by 0 it is x (of scalars: an error)."""
@overload
def fmod(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """Returns the remainder with lhs's sign; of integer x by 0 it is x (of scalars: an error)."""
@overload
def fmod(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """Returns the remainder with lhs's sign; of integer x by 0 it is x (of scalars: an error)."""
@overload
def fmod(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """Returns the remainder with lhs's sign; of integer x by 0 it is x (of scalars: an error)."""
@overload
def remainder(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """Returns the remainder with the sign of rhs; for integers, that of x by 0 is x."""
@overload
def remainder(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """Returns the remainder with the sign of rhs; for integers, that of x by 0 is x."""
@overload
def remainder(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """Returns the remainder with the sign of rhs; for integers, that of x by 0 is x."""
@overload
def complex(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """lhs + i rhs: two tensors, or two scalars."""
@overload
def complex(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """lhs + i rhs: two tensors, or two scalars."""
@overload
def complex(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """lhs + i rhs: two tensors, or two scalars."""
@overload
def pow(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """Returns lhs ** rhs; integers wrap, and negative exponents yield 0 except for 1 and -1."""
@overload
def pow(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """Returns lhs ** rhs; integers wrap, and negative exponents yield 0 except for 1 and -1."""
@overload
def pow(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """Returns lhs ** rhs; integers wrap, and negative exponents yield 0 except for 1 and -1."""
@overload
def maximum(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """As `torch.maximum`."""
@overload
def maximum(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """As `torch.maximum`."""
@overload
def maximum(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """As `torch.maximum`."""
@overload
def minimum(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """As `torch.minimum`."""
@overload
def minimum(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """As `torch.minimum`."""
@overload
def minimum(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """As `torch.minimum`."""
@overload
def atan2(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """As `torch.atan2`."""
@overload
def atan2(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """As `torch.atan2`."""
@overload
def atan2(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """As `torch.atan2`."""
@overload
def nextafter(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """As `torch.nextafter`."""
@overload
def nextafter(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """As `torch.nextafter`."""
@overload
def nextafter(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """As `torch.nextafter`."""
@overload
def eq(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """As `torch.eq`."""
@overload
def eq(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """As `torch.eq`."""
@overload
def eq(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """As `torch.eq`."""
@overload
def ne(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """As `torch.ne`."""
@overload
def ne(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """As `torch.ne`."""
@overload
def ne(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """As `torch.ne`."""
@overload
def lt(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """As `torch.lt`."""
@overload
def lt(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """As `torch.lt`."""
@overload
def lt(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """As `torch.lt`."""
@overload
def le(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """As `torch.le`."""
@overload
def le(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """As `torch.le`."""
@overload
def le(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """As `torch.le`."""
@overload
def gt(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """As `torch.gt`."""
@overload
def gt(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """As `torch.gt`."""
@overload
def gt(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """As `torch.gt`."""
@overload
def ge(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """As `torch.ge`."""
@overload
def ge(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """As `torch.ge`."""
@overload
def ge(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """As `torch.ge`."""
@overload
def logical_and(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """As `torch.logical_and`."""
@overload
def logical_and(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """As `torch.logical_and`."""
@overload
def logical_and(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """As `torch.logical_and`."""
@overload
def logical_or(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """As `torch.logical_or`."""
@overload
def logical_or(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """As `torch.logical_or`."""
@overload
def logical_or(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """As `torch.logical_or`."""
@overload
def bitwise_and(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """As `torch.bitwise_and`."""
@overload
def bitwise_and(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """As `torch.bitwise_and`."""
@overload
def bitwise_and(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """As `torch.bitwise_and`."""
@overload
def bitwise_or(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """As `torch.bitwise_or`."""
@overload
def bitwise_or(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """As `torch.bitwise_or`."""
@overload
def bitwise_or(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """As `torch.bitwise_or`."""
@overload
def bitwise_xor(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """As `torch.bitwise_xor`."""
@overload
def bitwise_xor(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """As `torch.bitwise_xor`."""
@overload
def bitwise_xor(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """As `torch.bitwise_xor`."""
@overload
def bitwise_left_shift(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """As `torch.bitwise_left_shift`."""
@overload
def bitwise_left_shift(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """As `torch.bitwise_left_shift`."""
@overload
def bitwise_left_shift(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """As `torch.bitwise_left_shift`."""
@overload
def bitwise_right_shift(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """As `torch.bitwise_right_shift`."""
@overload
def bitwise_right_shift(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """As `torch.bitwise_right_shift`."""
@overload
def bitwise_right_shift(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """As `torch.bitwise_right_shift`."""
@overload
def gcd(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """As `torch.gcd`."""
@overload
def gcd(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """As `torch.gcd`."""
@overload
def gcd(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """As `torch.gcd`."""
@overload
def where(a: TensorView, b: OperandLike, c: OperandLike, /) -> TensorView: """As `torch.where`."""
@overload
def where(a: OperandLike, b: TensorView, c: OperandLike, /) -> TensorView: """As `torch.where`."""
@overload
def where(a: OperandLike, b: OperandLike, c: TensorView, /) -> TensorView: """As `torch.where`."""
@overload
def where(a: ScalarLike, b: ScalarLike, c: ScalarLike, /) -> Scalar: """As `torch.where`."""
@overload
def lerp(start: TensorView, end: OperandLike, weight: OperandLike, /) -> TensorView: """start + weight * (end - start)."""
@overload
def lerp(start: OperandLike, end: TensorView, weight: OperandLike, /) -> TensorView: """start + weight * (end - start)."""
@overload
def lerp(start: OperandLike, end: OperandLike, weight: TensorView, /) -> TensorView: """start + weight * (end - start)."""
@overload
def lerp(start: ScalarLike, end: ScalarLike, weight: ScalarLike, /) -> Scalar: """start + weight * (end - start)."""
@overload
def clamp(x: TensorView, min: ScalarLike | None, max: ScalarLike | None, /) -> TensorView: """min(max(x, min), max); None is the end of the dtype's range."""
@overload
def clamp(x: ScalarLike, min: ScalarLike | None, max: ScalarLike | None, /) -> Scalar: """min(max(x, min), max); None is the end of the dtype's range."""
@overload
def threshold(x: TensorView, threshold: ScalarLike, value: ScalarLike, /) -> TensorView: """x <= threshold ? value : x."""
@overload
def threshold(x: ScalarLike, threshold: ScalarLike, value: ScalarLike, /) -> Scalar: """x <= threshold ? value : x."""
@overload
def truediv(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """As `div`, in floats."""
@overload
def truediv(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """As `div`, in floats."""
@overload
def truediv(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """As `div`, in floats."""
@overload
def addcmul(in1: TensorView, in2: OperandLike, in3: OperandLike, value: ScalarLike, /) -> TensorView: """in1 + in2 * in3 * value; `value` is a scalar."""
@overload
def addcmul(in1: OperandLike, in2: TensorView, in3: OperandLike, value: ScalarLike, /) -> TensorView: """in1 + in2 * in3 * value; `value` is a scalar."""
@overload
def addcmul(in1: OperandLike, in2: OperandLike, in3: TensorView, value: ScalarLike, /) -> TensorView: """in1 + in2 * in3 * value; `value` is a scalar."""
@overload
def addcmul(in1: ScalarLike, in2: ScalarLike, in3: ScalarLike, value: ScalarLike, /) -> Scalar: """in1 + in2 * in3 * value; `value` is a scalar."""
@overload
def cast(arg: TensorView, dtype: DtypeLike) -> TensorView: """a conversion: floats become integers by truncation, complex numbers their real parts, in Bool whether they are not 0."""
@overload
def cast(arg: ScalarLike, dtype: DtypeLike) -> Scalar: """a conversion: floats become integers by truncation, complex numbers their real parts, in Bool whether they are not 0."""
@overload
def logical_right_shift(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """lhs >> rhs with zeros shifted in; counts outside [0, width) give 0."""
@overload
def logical_right_shift(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """lhs >> rhs with zeros shifted in; counts outside [0, width) give 0."""
@overload
def logical_right_shift(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """lhs >> rhs with zeros shifted in; counts outside [0, width) give 0."""
@overload
def set(x: TensorView, /) -> TensorView: """a copy of a tensor; a scalar is returned as it is."""
@overload
def set(x: ScalarLike, /) -> Scalar: """a copy of a tensor; a scalar is returned as it is."""
@overload
def sign(x: TensorView, /) -> TensorView: """-1, 0 or 1 in x's dtype; NaN gives 0."""
@overload
def sign(x: ScalarLike, /) -> Scalar: """-1, 0 or 1 in x's dtype; NaN gives 0."""
def segment_set(x: TensorView, /) -> TensorView: """a copy that forces a segment boundary."""
def broadcast(arg: TensorView, is_broadcast_dim: Sequence[bool]) -> TensorView: """Inserts broadcast axes: one flag per output axis."""
def broadcast_in_dim(arg: TensorView, shape: Sequence[SizeLike], broadcast_dims: Sequence[int]) -> TensorView: """Places input axis i at output position broadcast_dims[i], then expand to `shape`."""
def expand(arg: TensorView, shape: Sequence[SizeLike]) -> TensorView: """Expands broadcast axes to `shape`; -1 keeps an axis, a longer shape prepends new ones."""
def permute(arg: TensorView, dims: Sequence[int]) -> TensorView: """Output axis i is input axis dims[i]; the output's root domain has the input's order."""
def reshape(arg: TensorView, new_shape: Sequence[SizeLike]) -> TensorView: """Views `arg` with other sizes in the same row-major order; one size may be -1."""
def squeeze(arg: TensorView, dims: Sequence[int], squeeze_expanded: bool = False) -> TensorView: """Drops broadcast axes; expanded ones only with `squeeze_expanded`."""
def stride_order(arg: TensorView, stride_order: Sequence[int]) -> TensorView: """Copies into the memory order that `stride_order` gives: entry i is the rank by stride of axis i, 0 for the fastest."""
def shape(arg: TensorView, /) -> list[Scalar]: """Returns the (expanded) extents of all axes."""
def size(arg: TensorView, dim: int) -> Scalar: """Returns the (expanded) extent of an axis."""
def cat(tensors: Sequence[TensorView], dim: int = 0, manual_padding: bool = False) -> TensorView: """Concatenates along `dim`: each piece is padded to the result's extent, then they are joined."""
def pad(arg: TensorView, pad_widths: Sequence[SizeLike], value: ScalarLike | None = None) -> TensorView: """Pads with `value` (default 0) as torch.nn.functional.pad: innermost axis first, pairs of left and right width; negative widths crop."""
def slice(arg: TensorView, start_indices: Sequence[SizeLike], end_indices: Sequence[SizeLike], strides: Sequence[SizeLike] | None = None, manual_normalization: bool = False) -> TensorView: """Takes [start, end) of every axis; ends beyond an extent are clamped, as in torch."""
def triu(arg: TensorView, diagonal: ScalarLike = 0) -> TensorView: """a copy with zeros where column - row < diagonal, over the last two axes."""
def full(shape: Sequence[SizeLike], fill_value: ScalarLike, dtype: DtypeLike) -> TensorView: """a tensor filled with `fill_value`, cast to `dtype`; an integer out of the range of an integer dtype is refused."""
def iota(length: SizeLike, start: ScalarLike | None = None, step: ScalarLike | None = None, dtype: DtypeLike = DataType.Int) -> TensorView: """start + i * step for i < length."""
def normal(mean: ScalarLike, std: ScalarLike, shape: Sequence[SizeLike], *, rng_seed: Scalar | int | None = None, rng_offset: Scalar | int | None = None, dtype: DtypeLike = DataType.Float) -> TensorView: """a tensor of random numbers of a normal distribution; see `uniform`."""
def rand_like(arg: TensorView, /) -> TensorView: """random numbers in [0, 1), of the shape and dtype of a floating tensor; as `arg` is not read, the result is cut as its readers are."""
def randn_like(arg: TensorView, /) -> TensorView: """random numbers of the standard normal distribution, of the shape and dtype of a floating tensor."""
def uniform(minval: ScalarLike, maxval: ScalarLike, shape: Sequence[SizeLike], *, rng_seed: Scalar | int | None = None, rng_offset: Scalar | int | None = None, dtype: DtypeLike = DataType.Float) -> TensorView: """a tensor of random numbers, uniform in [minval, maxval)."""
def embedding_fwd(input: TensorView, weight: TensorView, padding_idx: ScalarLike | None = None, max_norm: ScalarLike | None = None, norm_type: ScalarLike | None = None, scale_grad_by_freq: ScalarLike | None = None, sparse: ScalarLike | None = None) -> TensorView: """Takes the row of `weight` [v, h] that each element of `input` [*i] says: [*i, h]."""
def gather(arg: TensorView, index: TensorView, dim: int) -> TensorView: """torch.gather: a result of the shape of `index`, whose axes other than `dim` may be shorter than those of `arg`."""
def index_select(arg: TensorView, index: TensorView, dim: int) -> TensorView: """Takes the positions `index` [n] along axis `dim`: [.., m, ..] -> [.., n, ..]."""
def index_put_accumulate(acc: TensorView, index: TensorView, value: TensorView) -> TensorView: """Returns a copy of `acc` [m, ..] to whose rows `index` [n] those of `value` [n, ..] are added, as torch.index_put does with `accumulate`; a size of 1 in `value` fits any."""
def scatter(arg: TensorView, index: TensorView, src: OperandLike, dim: int) -> TensorView: """Returns a copy of `arg` with `src` written at the positions `index` along axis `dim`, as torch.scatter does: of one rank; index no longer than src, nor than arg along the other axes."""
def select(arg: TensorView, index: SizeLike, dim: int) -> TensorView: """Takes position `index` of axis `dim`, which ends; a negative one counts from the end."""
def take_along_axis(arg: TensorView, index: TensorView, dim: int) -> TensorView: """Takes along axis `dim` of each row the positions that `index` has for that row."""
def cummax(arg: TensorView, dim: int, init: ScalarLike | None = None) -> TensorView: """the largest of all elements up to each along axis `dim`, and of `init`."""
def cummin(arg: TensorView, dim: int, init: ScalarLike | None = None) -> TensorView: """the least of all elements up to each along axis `dim`, and of `init`."""
def cumprod(arg: TensorView, dim: int, init: ScalarLike | None = None) -> TensorView: """the products of all elements up to each along axis `dim`, which begin with `init`."""
def cumsum(arg: TensorView, dim: int, init: ScalarLike | None = None) -> TensorView: """the sums of all elements up to each along axis `dim`, which begin with `init`."""
def argsort(arg: TensorView, dim: int, descending: bool = False, stable: bool = False) -> TensorView: """the places (Int) of the elements along axis `dim` in their order; where `stable`, equal ones keep theirs."""
def topk(arg: TensorView, k: SizeLike, dim: int = -1, largest: bool = True, sorted: bool = False) -> tuple[TensorView, TensorView]: """the `k` largest elements along axis `dim`, or the least, and their places (Int); in their order, whether `sorted` asks for it or not."""
def max(arg: TensorView, dim: int | Sequence[int] | DataType | None = None, keepdim: bool = False, dtype: DtypeLike = DataType.Null, *, dims: Sequence[int] | None = None) -> TensorView: """a maximum over one axis (`dim`), several (`dims`) or all."""
def min(arg: TensorView, dim: int | Sequence[int] | DataType | None = None, keepdim: bool = False, dtype: DtypeLike = DataType.Null, *, dims: Sequence[int] | None = None) -> TensorView: """a minimum over one axis (`dim`), several (`dims`) or all."""
def prod(arg: TensorView, dim: int | Sequence[int] | DataType | None = None, keepdim: bool = False, dtype: DtypeLike = DataType.Null, *, dims: Sequence[int] | None = None) -> TensorView: """a product over one axis (`dim`), several (`dims`) or all."""
def sum(arg: TensorView, dim: int | Sequence[int] | DataType | None = None, keepdim: bool = False, dtype: DtypeLike = DataType.Null, *, dims: Sequence[int] | None = None) -> TensorView: """a sum over one axis (`dim`), several (`dims`) or all."""
def var(arg: TensorView, dims: int | Sequence[int], correction: int = 1, keepdim: bool = False) -> TensorView: """the variance in two steps: mean, then the squared deviations from it."""
def var_mean(arg: TensorView, dims: int | Sequence[int], correction: int = 1, keepdim: bool = False) -> tuple[TensorView, TensorView]: """(variance, mean): squared deviations over max(count - correction, 0)."""
def welford(arg: TensorView, dims: int | Sequence[int]) -> tuple[TensorView, TensorView, TensorView]: """a Welford reduction: average, sum of squared deviations, and count (Index)."""
def softmax(input: TensorView, dim: int, dtype: DtypeLike | None = None) -> TensorView: """exp(input) / sum(exp(input), dim); the operand is cast to `dtype` first, where that is given."""
def log_softmax(input: TensorView, dim: int, dtype: DtypeLike | None = None) -> TensorView: """input - log(sum(exp(input), dim)); `dtype` as for softmax."""
def gelu(input: TensorView, approximate: str = 'none') -> TensorView: """input * P(X <= input) of a standard normal X: by erf, or by tanh where `approximate` is "tanh"."""
def dropout(input: TensorView, p: float = 0.5, training: bool = True) -> TensorView: """input / (1 - p) where a random number in [0, 1) is below 1 - p, and input * 0 elsewhere; a copy where not `training` or p is 0."""
def layer_norm(input: TensorView, normalized_shape: Sequence[SizeLike], weight: TensorView | None = None, bias: TensorView | None = None, eps: float = 1e-05) -> TensorView: """(input - mean) / sqrt(variance + eps) * weight + bias over the last axes, whose sizes are `normalized_shape`: those of weight and bias, too."""
def rms_norm(input: TensorView, normalized_shape: Sequence[SizeLike], weight: TensorView | None = None, eps: float | None = None) -> TensorView: """input / sqrt(mean(input ** 2) + eps) * weight over the last axes, whose sizes are `normalized_shape`."""
def mean(input: TensorView, dim: int | Sequence[int] | None = None, keepdim: bool = False, dtype: DtypeLike | None = None, *, dims: Sequence[int] | None = None) -> TensorView: """the mean over one axis or several (`dim`, also called `dims`), or all; the operand is cast to `dtype` first, where that is given."""
def cross_entropy(input: TensorView, target: TensorView, weight: TensorView | None = None, *, ignore_index: int = -100, reduction: str = 'mean', label_smoothing: float = 0.0) -> TensorView: """-log_softmax(input) at the target, of logits [C], [N, C] or [N, C, ..]; the target is of class indices (integers, without the axis C) or of probabilities (floating, as the input)."""
@overload
def grouped_mm(mat1: TensorView, mat2: TensorView, offsets: TensorView) -> TensorView: """a matrix product per group, where the Int32 `offsets` [g] say at which positions of k (of [m, k] and [k, n]), n (of [g, m, k] and [k, n]) or m (of [m, k] and [g, k, n]) groups end."""
@overload
def grouped_mm(mat1: TensorView, mat2: TensorView, offsets: TensorView, scale1: TensorView, scale2: TensorView, alpha: TensorView | None = None, bias: TensorView | None = None, beta: TensorView | None = None, dtype: DtypeLike = DataType.BFloat16, output_block_scale_size: int = 0, output_block_scale_dtype: DtypeLike = DataType.BFloat16, output_gamma: bool = False) -> tuple[TensorView, None, None]: """a matrix product per group, where the Int32 `offsets` [g] say at which positions of k (of [m, k] and [k, n]), n (of [g, m, k] and [k, n]) or m (of [m, k] and [g, k, n]) groups end."""
def linear(arg1: TensorView, arg2: TensorView, bias: TensorView | None = None) -> TensorView: """x @ weight.T + bias: x [*i, K], weight [*w, N, K], bias [*w, N] -> [*w, *i, N, rK]."""
def matmul(arg1: TensorView, arg2: TensorView) -> TensorView: """torch.matmul: 1-D operands and batch broadcasting as there; dtypes must be equal."""
def scaled_mm(mat1: TensorView, mat2: TensorView, scale1: TensorView, scale2: TensorView, alpha: TensorView | None = None, bias: TensorView | None = None, beta: TensorView | None = None, dtype: DtypeLike = DataType.BFloat16, output_block_scale_size: int = 0, output_block_scale_dtype: DtypeLike = DataType.BFloat16, output_gamma: bool = False) -> tuple[TensorView, None, None]: """alpha * (scale1 * mat1) @ (scale2 * mat2) + beta * bias, of Float8_e4m3fn or Float8_e5m2; computed in Float and rounded once."""
def sdpfa_bwd(grad_output: TensorView, query: TensorView, key: TensorView, value: TensorView, output: TensorView, logsumexp: TensorView, dropout_p: ScalarLike | None, is_causal: ScalarLike | None, philox_seed: TensorView, philox_offset: TensorView, scale: ScalarLike | None, enable_gqa: bool = False) -> tuple[TensorView, TensorView, TensorView]: """the gradients of query, key and value of an `sdpfa_fwd` without bias and mask, from that of its output, what it read and what it gave; enable_gqa is that op's."""
def sdpfa_fwd(query: TensorView, key: TensorView, value: TensorView, bias: TensorView | None = None, mask: TensorView | None = None, dropout_p: ScalarLike | None = None, is_causal: ScalarLike | None = None, scale: ScalarLike | None = None, enable_gqa: bool = False) -> tuple[TensorView, TensorView, TensorView, TensorView]: """attention: query [.., N, H, L, E], key [.., N, H, S, E], value [.., N, H, S, Ev] -> (output [.., N, H, L, Ev], log_sumexp [.., N, H, L] Float, philox_seed [2] and philox_offset [] UInt64)."""
def nv_block_quantize(input: TensorView, global_scale: TensorView | None = None, swizzle_block_scales: bool = False, block_size: int = 16, dtype: DtypeLike = DataType.Float4_e2m1fn) -> tuple[TensorView, TensorView]: """(values, scales): Float8_e4m3fn [.., k] and Float8_e8m0fnu [.., k / 32] for which values * scales, each for 32 neighbours, is near `input`."""
def nv_grouped_block_quantize(input: TensorView, input_offsets: TensorView, output_offsets: TensorView, global_scale: TensorView | None = None, block_size: int = 16, dtype: DtypeLike = DataType.Float4_e2m1fn) -> tuple[TensorView, TensorView]: """(values, scales) of [m, k]: what `nv_block_quantize` makes of it, the scales as `preprocess_grouped_matmul_input_sf` lays them out."""
def preprocess_grouped_matmul_input_sf(input: TensorView, input_offsets: TensorView, output_offsets: TensorView) -> TensorView: """the scales [m, k] of groups of rows in tiles, as a grouped product reads them: [(m + 127 g) // 128 * 128, ceil(k / 4) * 4]."""
def cutlass_nvfp4_grouped_mm(mat1: TensorView, mat2: TensorView, scale1: TensorView, scale2: TensorView, alpha: TensorView, problem_sizes: TensorView, expert_offsets: TensorView, sf_offsets: TensorView, dtype: DtypeLike = DataType.BFloat16) -> NoReturn: """Raises `UnsupportedError`: floats of four bits need a GPU of compute capability 10.0 or more, for which no kernels are built; write grouped_mm with scales, of Float8_e4m3fn."""

__all__ = ['acos', 'acosh', 'asin', 'asinh', 'atan', 'atanh', 'cos', 'cosh', 'sin', 'sinh', 'tan', 'tanh', 'exp', 'exp2', 'expm1', 'erf', 'erfc', 'erfinv', 'erfcinv', 'lgamma', 'log', 'log10', 'log1p', 'log2', 'rsqrt', 'sqrt', 'reciprocal', 'sigmoid', 'silu', 'neg', 'abs', 'real', 'imag', 'ceil', 'floor', 'round', 'trunc', 'frac', 'relu', 'isfinite', 'isinf', 'isnan', 'isneginf', 'isposinf', 'isreal', 'signbit', 'logical_not', 'bitwise_not', 'add', 'sub', 'mul', 'div', 'mod', 'fmod', 'remainder', 'complex', 'pow', 'maximum', 'minimum', 'atan2', 'nextafter', 'eq', 'ne', 'lt', 'le', 'gt', 'ge', 'logical_and', 'logical_or', 'bitwise_and', 'bitwise_or', 'bitwise_xor', 'bitwise_left_shift', 'bitwise_right_shift', 'gcd', 'where', 'lerp', 'clamp', 'threshold', 'truediv', 'addcmul', 'cast', 'logical_right_shift', 'set', 'sign', 'segment_set', 'broadcast', 'broadcast_in_dim', 'expand', 'permute', 'reshape', 'squeeze', 'stride_order', 'shape', 'size', 'cat', 'pad', 'slice', 'triu', 'full', 'iota', 'normal', 'rand_like', 'randn_like', 'uniform', 'embedding_fwd', 'gather', 'index_select', 'index_put_accumulate', 'scatter', 'select', 'take_along_axis', 'cummax', 'cummin', 'cumprod', 'cumsum', 'argsort', 'topk', 'max', 'min', 'prod', 'sum', 'var', 'var_mean', 'welford', 'softmax', 'log_softmax', 'gelu', 'dropout', 'layer_norm', 'rms_norm', 'mean', 'cross_entropy', 'grouped_mm', 'linear', 'matmul', 'scaled_mm', 'sdpfa_bwd', 'sdpfa_fwd', 'nv_block_quantize', 'nv_grouped_block_quantize', 'preprocess_grouped_matmul_input_sf', 'cutlass_nvfp4_grouped_mm']
