# ruff: noqa: E501, I001
# fmt: off
"""The signatures of the ops for type checkers, from the rows of `fuser.ops.rows`.

`python scripts/document_ops.py` writes this file. An op returns a scalar if all its operands are
scalars.
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
def erfcinv(x: TensorView, /) -> TensorView: """Returns the number y for which erfc(y) = x."""
@overload
def erfcinv(x: ScalarLike, /) -> Scalar: """Returns the number y for which erfc(y) = x."""
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
def neg(x: TensorView, /) -> TensorView: """Returns -x. A Bool is returned unchanged."""
@overload
def neg(x: ScalarLike, /) -> Scalar: """Returns -x. A Bool is returned unchanged."""
@overload
def abs(x: TensorView, /) -> TensorView: """As `torch.abs`."""
@overload
def abs(x: ScalarLike, /) -> Scalar: """As `torch.abs`."""
@overload
def real(x: TensorView, /) -> TensorView: """Returns the real parts of a complex operand, or a copy of a real operand."""
@overload
def real(x: ScalarLike, /) -> Scalar: """Returns the real parts of a complex operand, or a copy of a real operand."""
@overload
def imag(x: TensorView, /) -> TensorView: """Returns the imaginary parts of a complex operand."""
@overload
def imag(x: ScalarLike, /) -> Scalar: """Returns the imaginary parts of a complex operand."""
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
def sub(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """Returns lhs - rhs, or lhs xor rhs for Bool."""
@overload
def sub(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """Returns lhs - rhs, or lhs xor rhs for Bool."""
@overload
def sub(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """Returns lhs - rhs, or lhs xor rhs for Bool."""
@overload
def mul(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """As `torch.mul`."""
@overload
def mul(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """As `torch.mul`."""
@overload
def mul(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """As `torch.mul`."""
@overload
def div(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """Returns lhs / rhs, for integers rounded towards zero. An integer / 0 is -1 in a tensor, and an error between scalars."""
@overload
def div(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """Returns lhs / rhs, for integers rounded towards zero. An integer / 0 is -1 in a tensor, and an error between scalars."""
@overload
def div(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """Returns lhs / rhs, for integers rounded towards zero. An integer / 0 is -1 in a tensor, and an error between scalars."""
@overload
def mod(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """Returns the remainder of lhs / rhs, with the sign of lhs. For integers and rhs = 0, it is lhs in a tensor, and an error between scalars."""
@overload
def mod(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """Returns the remainder of lhs / rhs, with the sign of lhs. For integers and rhs = 0, it is lhs in a tensor, and an error between scalars."""
@overload
def mod(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """Returns the remainder of lhs / rhs, with the sign of lhs. For integers and rhs = 0, it is lhs in a tensor, and an error between scalars."""
@overload
def fmod(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """Returns the remainder of lhs / rhs, with the sign of lhs. For integers and rhs = 0, it is lhs in a tensor, and an error between scalars."""
@overload
def fmod(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """Returns the remainder of lhs / rhs, with the sign of lhs. For integers and rhs = 0, it is lhs in a tensor, and an error between scalars."""
@overload
def fmod(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """Returns the remainder of lhs / rhs, with the sign of lhs. For integers and rhs = 0, it is lhs in a tensor, and an error between scalars."""
@overload
def remainder(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """Returns the remainder of lhs / rhs, with the sign of rhs, or lhs for integers and rhs = 0."""
@overload
def remainder(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """Returns the remainder of lhs / rhs, with the sign of rhs, or lhs for integers and rhs = 0."""
@overload
def remainder(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """Returns the remainder of lhs / rhs, with the sign of rhs, or lhs for integers and rhs = 0."""
@overload
def complex(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """Computes the complex numbers lhs + i * rhs from two tensors or two scalars."""
@overload
def complex(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """Computes the complex numbers lhs + i * rhs from two tensors or two scalars."""
@overload
def complex(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """Computes the complex numbers lhs + i * rhs from two tensors or two scalars."""
@overload
def pow(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """Returns lhs ** rhs. Integers wrap, and an integer rhs < 0 gives 0 unless lhs is 1 or -1."""
@overload
def pow(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """Returns lhs ** rhs. Integers wrap, and an integer rhs < 0 gives 0 unless lhs is 1 or -1."""
@overload
def pow(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """Returns lhs ** rhs. Integers wrap, and an integer rhs < 0 gives 0 unless lhs is 1 or -1."""
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
def lerp(start: TensorView, end: OperandLike, weight: OperandLike, /) -> TensorView: """Computes start + weight * (end - start)."""
@overload
def lerp(start: OperandLike, end: TensorView, weight: OperandLike, /) -> TensorView: """Computes start + weight * (end - start)."""
@overload
def lerp(start: OperandLike, end: OperandLike, weight: TensorView, /) -> TensorView: """Computes start + weight * (end - start)."""
@overload
def lerp(start: ScalarLike, end: ScalarLike, weight: ScalarLike, /) -> Scalar: """Computes start + weight * (end - start)."""
@overload
def clamp(x: TensorView, min: ScalarLike | None, max: ScalarLike | None, /) -> TensorView: """Computes min(max(x, min), max)."""
@overload
def clamp(x: ScalarLike, min: ScalarLike | None, max: ScalarLike | None, /) -> Scalar: """Computes min(max(x, min), max)."""
@overload
def threshold(x: TensorView, threshold: ScalarLike, value: ScalarLike, /) -> TensorView: """Returns `value` where x <= threshold, else x."""
@overload
def threshold(x: ScalarLike, threshold: ScalarLike, value: ScalarLike, /) -> Scalar: """Returns `value` where x <= threshold, else x."""
@overload
def truediv(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """As `div`, computed in floats."""
@overload
def truediv(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """As `div`, computed in floats."""
@overload
def truediv(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """As `div`, computed in floats."""
@overload
def addcmul(in1: TensorView, in2: OperandLike, in3: OperandLike, value: ScalarLike, /) -> TensorView: """Computes in1 + in2 * in3 * value; `value` is a scalar."""
@overload
def addcmul(in1: OperandLike, in2: TensorView, in3: OperandLike, value: ScalarLike, /) -> TensorView: """Computes in1 + in2 * in3 * value; `value` is a scalar."""
@overload
def addcmul(in1: OperandLike, in2: OperandLike, in3: TensorView, value: ScalarLike, /) -> TensorView: """Computes in1 + in2 * in3 * value; `value` is a scalar."""
@overload
def addcmul(in1: ScalarLike, in2: ScalarLike, in3: ScalarLike, value: ScalarLike, /) -> Scalar: """Computes in1 + in2 * in3 * value; `value` is a scalar."""
@overload
def cast(arg: TensorView, dtype: DtypeLike) -> TensorView: """Converts each element to `dtype`; if the operand already has this dtype, copies it."""
@overload
def cast(arg: ScalarLike, dtype: DtypeLike) -> Scalar: """Converts each element to `dtype`; if the operand already has this dtype, copies it."""
@overload
def logical_right_shift(lhs: TensorView, rhs: OperandLike, /) -> TensorView: """Computes lhs >> rhs with zeros shifted in; 0 if rhs < 0 or rhs >= the number of bits."""
@overload
def logical_right_shift(lhs: OperandLike, rhs: TensorView, /) -> TensorView: """Computes lhs >> rhs with zeros shifted in; 0 if rhs < 0 or rhs >= the number of bits."""
@overload
def logical_right_shift(lhs: ScalarLike, rhs: ScalarLike, /) -> Scalar: """Computes lhs >> rhs with zeros shifted in; 0 if rhs < 0 or rhs >= the number of bits."""
@overload
def set(x: TensorView, /) -> TensorView: """Copies a tensor."""
@overload
def set(x: ScalarLike, /) -> Scalar: """Copies a tensor."""
@overload
def sign(x: TensorView, /) -> TensorView: """Returns -1, 0 or 1 in the dtype of `x`; the sign of NaN is 0."""
@overload
def sign(x: ScalarLike, /) -> Scalar: """Returns -1, 0 or 1 in the dtype of `x`; the sign of NaN is 0."""
def segment_set(x: TensorView, /) -> TensorView: """Copies a tensor and starts a new kernel."""
def broadcast(arg: TensorView, is_broadcast_dim: Sequence[bool]) -> TensorView: """Inserts axes of size 1."""
def broadcast_in_dim(arg: TensorView, shape: Sequence[SizeLike], broadcast_dims: Sequence[int]) -> TensorView: """Moves input axis i to output position broadcast_dims[i], and expands the result to `shape`."""
def expand(arg: TensorView, shape: Sequence[SizeLike]) -> TensorView: """Expands broadcast axes to the sizes in `shape`."""
def permute(arg: TensorView, dims: Sequence[int]) -> TensorView: """Reorders the axes: output axis i is input axis dims[i]."""
def reshape(arg: TensorView, new_shape: Sequence[SizeLike]) -> TensorView: """Returns `arg` with other sizes in the same row-major order; one size may be -1."""
def squeeze(arg: TensorView, dims: Sequence[int], squeeze_expanded: bool = False) -> TensorView: """Removes the axes `dims`, which must be broadcast axes."""
def stride_order(arg: TensorView, stride_order: Sequence[int]) -> TensorView: """Copies a tensor into another memory order."""
def shape(arg: TensorView, /) -> list[Scalar]: """Returns the sizes of all axes as scalars; for an expanded axis, the expanded size."""
def size(arg: TensorView, dim: int) -> Scalar: """Returns the size of axis `dim` as a scalar; for an expanded axis, the expanded size."""
def cat(tensors: Sequence[TensorView], dim: int = 0, manual_padding: bool = False) -> TensorView: """Concatenates tensors along axis `dim`."""
def pad(arg: TensorView, pad_widths: Sequence[SizeLike], value: ScalarLike | None = None) -> TensorView: """Pads axes with `value` (default 0), as `torch.nn.functional.pad` does."""
def slice(arg: TensorView, start_indices: Sequence[SizeLike], end_indices: Sequence[SizeLike], strides: Sequence[SizeLike] | None = None, manual_normalization: bool = False) -> TensorView: """Returns the elements [start, end) of every axis."""
def triu(arg: TensorView, diagonal: ScalarLike = 0) -> TensorView: """Copies the matrices of the last two axes, with zeros where column - row < diagonal."""
def full(shape: Sequence[SizeLike], fill_value: ScalarLike, dtype: DtypeLike) -> TensorView: """Creates a tensor of the given shape in which every element is `fill_value`, cast to `dtype`."""
def iota(length: SizeLike, start: ScalarLike | None = None, step: ScalarLike | None = None, dtype: DtypeLike = DataType.Int) -> TensorView: """Creates the vector of the numbers start + i * step for 0 <= i < length."""
def normal(mean: ScalarLike, std: ScalarLike, shape: Sequence[SizeLike], *, rng_seed: Scalar | int | None = None, rng_offset: Scalar | int | None = None, dtype: DtypeLike = DataType.Float) -> TensorView: """Creates a tensor of the given shape with normally distributed random numbers."""
def rand_like(arg: TensorView, /) -> TensorView: """Creates a tensor of the shape and dtype of `arg` with random numbers, uniform in [0, 1)."""
def randn_like(arg: TensorView, /) -> TensorView: """Creates a tensor of the shape and dtype of `arg` with standard normal random numbers."""
def uniform(minval: ScalarLike, maxval: ScalarLike, shape: Sequence[SizeLike], *, rng_seed: Scalar | int | None = None, rng_offset: Scalar | int | None = None, dtype: DtypeLike = DataType.Float) -> TensorView: """Creates a tensor of the given shape with random numbers, uniform in [minval, maxval)."""
def embedding_fwd(input: TensorView, weight: TensorView, padding_idx: ScalarLike | None = None, max_norm: ScalarLike | None = None, norm_type: ScalarLike | None = None, scale_grad_by_freq: ScalarLike | None = None, sparse: ScalarLike | None = None) -> TensorView: """Looks up rows of `weight` [v, h] by the indices `input` [*i] -> [*i, h]."""
def gather(arg: TensorView, index: TensorView, dim: int) -> TensorView: """Selects elements of `arg` along axis `dim`, as `torch.gather` does."""
def index_select(arg: TensorView, index: TensorView, dim: int) -> TensorView: """Selects the positions `index` [n] along axis `dim`: [.., m, ..] -> [.., n, ..]."""
def index_put_accumulate(acc: TensorView, index: TensorView, value: TensorView) -> TensorView: """Returns `acc` [m, ..] plus the rows `value` [n, ..], added to the rows `index` [n] of `acc`."""
def scatter(arg: TensorView, index: TensorView, src: OperandLike, dim: int) -> TensorView: """Returns a copy of `arg` with `src` written at the positions `index` along axis `dim`."""
def select(arg: TensorView, index: SizeLike, dim: int) -> TensorView: """Selects position `index` along axis `dim`, and removes this axis."""
def take_along_axis(arg: TensorView, index: TensorView, dim: int) -> TensorView: """Selects elements along axis `dim`: out[.., i, ..] = arg[.., index[.., i, ..], ..]."""
def cummax(arg: TensorView, dim: int, init: ScalarLike | None = None) -> TensorView: """Computes, at each position i along axis `dim`, the maximum of the elements 0 to i and `init`."""
def cummin(arg: TensorView, dim: int, init: ScalarLike | None = None) -> TensorView: """Computes, at each position i along axis `dim`, the minimum of the elements 0 to i and `init`."""
def cumprod(arg: TensorView, dim: int, init: ScalarLike | None = None) -> TensorView: """Computes, at each position i along axis `dim`, the product of the elements 0 to i and `init`."""
def cumsum(arg: TensorView, dim: int, init: ScalarLike | None = None) -> TensorView: """Computes, at each position i along axis `dim`, the sum of the elements 0 to i, plus `init`."""
def argsort(arg: TensorView, dim: int, descending: bool = False, stable: bool = False) -> TensorView: """Returns the indices (Int) that sort the elements along axis `dim`."""
def topk(arg: TensorView, k: SizeLike, dim: int = -1, largest: bool = True, sorted: bool = False) -> tuple[TensorView, TensorView]: """Returns (the `k` largest elements along axis `dim`, the indices (Int) of these elements)."""
def max(arg: TensorView, dim: int | Sequence[int] | DataType | None = None, keepdim: bool = False, dtype: DtypeLike = DataType.Null, *, dims: Sequence[int] | None = None) -> TensorView: """Returns the largest element over one axis (`dim`), several axes (`dims`) or all axes."""
def min(arg: TensorView, dim: int | Sequence[int] | DataType | None = None, keepdim: bool = False, dtype: DtypeLike = DataType.Null, *, dims: Sequence[int] | None = None) -> TensorView: """Returns the smallest element over one axis (`dim`), several axes (`dims`) or all axes."""
def prod(arg: TensorView, dim: int | Sequence[int] | DataType | None = None, keepdim: bool = False, dtype: DtypeLike = DataType.Null, *, dims: Sequence[int] | None = None) -> TensorView: """Multiplies the elements over one axis (`dim`), several axes (`dims`) or all axes."""
def sum(arg: TensorView, dim: int | Sequence[int] | DataType | None = None, keepdim: bool = False, dtype: DtypeLike = DataType.Null, *, dims: Sequence[int] | None = None) -> TensorView: """Sums the elements over one axis (`dim`), several axes (`dims`) or all axes."""
def var(arg: TensorView, dims: int | Sequence[int], correction: int = 1, keepdim: bool = False) -> TensorView: """Computes the variance over the axes `dims`."""
def var_mean(arg: TensorView, dims: int | Sequence[int], correction: int = 1, keepdim: bool = False) -> tuple[TensorView, TensorView]: """Computes (variance, mean) over the axes `dims`."""
def welford(arg: TensorView, dims: int | Sequence[int]) -> tuple[TensorView, TensorView, TensorView]: """Computes (average, sum of squared deviations, count) over the axes `dims` in one pass."""
def softmax(input: TensorView, dim: int, dtype: DtypeLike | None = None) -> TensorView: """Computes exp(input) / sum(exp(input), dim)."""
def log_softmax(input: TensorView, dim: int, dtype: DtypeLike | None = None) -> TensorView: """Computes input - log(sum(exp(input), dim))."""
def gelu(input: TensorView, approximate: str = 'none') -> TensorView: """Computes input * P(X <= input) for a standard normal X."""
def dropout(input: TensorView, p: float = 0.5, training: bool = True) -> TensorView: """Multiplies each element by 1 / (1 - p) with probability 1 - p, else by 0."""
def layer_norm(input: TensorView, normalized_shape: Sequence[SizeLike], weight: TensorView | None = None, bias: TensorView | None = None, eps: float = 1e-05) -> TensorView: """Computes (input - mean) / sqrt(variance + eps) * weight + bias over the last axes."""
def rms_norm(input: TensorView, normalized_shape: Sequence[SizeLike], weight: TensorView | None = None, eps: float | None = None) -> TensorView: """Computes input / sqrt(mean(input ** 2) + eps) * weight over the last axes."""
def mean(input: TensorView, dim: int | Sequence[int] | None = None, keepdim: bool = False, dtype: DtypeLike | None = None, *, dims: Sequence[int] | None = None) -> TensorView: """Computes the mean over one axis or several (`dim`, also called `dims`), or over all axes."""
def cross_entropy(input: TensorView, target: TensorView, weight: TensorView | None = None, *, ignore_index: int = -100, reduction: str = 'mean', label_smoothing: float = 0.0) -> TensorView: """Computes -log_softmax(input) at the target, for logits [C], [N, C] or [N, C, ..]."""
@overload
def grouped_mm(mat1: TensorView, mat2: TensorView, offsets: TensorView) -> TensorView: """Computes one matrix product per group; the Int32 `offsets` [g] are the ends of the groups."""
@overload
def grouped_mm(mat1: TensorView, mat2: TensorView, offsets: TensorView, scale1: TensorView, scale2: TensorView, alpha: TensorView | None = None, bias: TensorView | None = None, beta: TensorView | None = None, dtype: DtypeLike = DataType.BFloat16, output_block_scale_size: int = 0, output_block_scale_dtype: DtypeLike = DataType.BFloat16, output_gamma: bool = False) -> tuple[TensorView, None, None]: """Computes one matrix product per group; the Int32 `offsets` [g] are the ends of the groups."""
def linear(arg1: TensorView, arg2: TensorView, bias: TensorView | None = None) -> TensorView: """Computes x @ weight.T + bias of x [*i, K], weight [*w, N, K] and bias [*w, N] -> [*w, *i, N]."""
def matmul(arg1: TensorView, arg2: TensorView) -> TensorView: """Computes `torch.matmul(arg1, arg2)`."""
def scaled_mm(mat1: TensorView, mat2: TensorView, scale1: TensorView, scale2: TensorView, alpha: TensorView | None = None, bias: TensorView | None = None, beta: TensorView | None = None, dtype: DtypeLike = DataType.BFloat16, output_block_scale_size: int = 0, output_block_scale_dtype: DtypeLike = DataType.BFloat16, output_gamma: bool = False) -> tuple[TensorView, None, None]: """Computes alpha * (scale1 * mat1) @ (scale2 * mat2) + beta * bias."""
def sdpfa_bwd(grad_output: TensorView, query: TensorView, key: TensorView, value: TensorView, output: TensorView, logsumexp: TensorView, dropout_p: ScalarLike | None, is_causal: ScalarLike | None, philox_seed: TensorView, philox_offset: TensorView, scale: ScalarLike | None, enable_gqa: bool = False) -> tuple[TensorView, TensorView, TensorView]: """Computes the gradients of query, key and value of an `sdpfa_fwd` without bias and mask."""
def sdpfa_fwd(query: TensorView, key: TensorView, value: TensorView, bias: TensorView | None = None, mask: TensorView | None = None, dropout_p: ScalarLike | None = None, is_causal: ScalarLike | None = None, scale: ScalarLike | None = None, enable_gqa: bool = False) -> tuple[TensorView, TensorView, TensorView, TensorView]: """Computes scaled dot product attention: softmax(query @ key.T * scale + bias) @ value."""
def nv_block_quantize(input: TensorView, global_scale: TensorView | None = None, swizzle_block_scales: bool = False, block_size: int = 16, dtype: DtypeLike = DataType.Float4_e2m1fn) -> tuple[TensorView, TensorView]: """Quantizes `input` to (values, scales), so that values * scales approximates `input`."""
def nv_grouped_block_quantize(input: TensorView, input_offsets: TensorView, output_offsets: TensorView, global_scale: TensorView | None = None, block_size: int = 16, dtype: DtypeLike = DataType.Float4_e2m1fn) -> tuple[TensorView, TensorView]: """Quantizes the groups of rows of `input` [m, k] to (values, scales), for a grouped product."""
def preprocess_grouped_matmul_input_sf(input: TensorView, input_offsets: TensorView, output_offsets: TensorView) -> TensorView: """Copies the scales [m, k] of groups of rows into tiles, which a grouped product reads."""
def cutlass_nvfp4_grouped_mm(mat1: TensorView, mat2: TensorView, scale1: TensorView, scale2: TensorView, alpha: TensorView, problem_sizes: TensorView, expert_offsets: TensorView, sf_offsets: TensorView, dtype: DtypeLike = DataType.BFloat16) -> NoReturn: """Raises `UnsupportedError`: write grouped_mm with scales and matrices of Float8_e4m3fn."""

__all__ = ['acos', 'acosh', 'asin', 'asinh', 'atan', 'atanh', 'cos', 'cosh', 'sin', 'sinh', 'tan', 'tanh', 'exp', 'exp2', 'expm1', 'erf', 'erfc', 'erfinv', 'erfcinv', 'lgamma', 'log', 'log10', 'log1p', 'log2', 'rsqrt', 'sqrt', 'reciprocal', 'sigmoid', 'silu', 'neg', 'abs', 'real', 'imag', 'ceil', 'floor', 'round', 'trunc', 'frac', 'relu', 'isfinite', 'isinf', 'isnan', 'isneginf', 'isposinf', 'isreal', 'signbit', 'logical_not', 'bitwise_not', 'add', 'sub', 'mul', 'div', 'mod', 'fmod', 'remainder', 'complex', 'pow', 'maximum', 'minimum', 'atan2', 'nextafter', 'eq', 'ne', 'lt', 'le', 'gt', 'ge', 'logical_and', 'logical_or', 'bitwise_and', 'bitwise_or', 'bitwise_xor', 'bitwise_left_shift', 'bitwise_right_shift', 'gcd', 'where', 'lerp', 'clamp', 'threshold', 'truediv', 'addcmul', 'cast', 'logical_right_shift', 'set', 'sign', 'segment_set', 'broadcast', 'broadcast_in_dim', 'expand', 'permute', 'reshape', 'squeeze', 'stride_order', 'shape', 'size', 'cat', 'pad', 'slice', 'triu', 'full', 'iota', 'normal', 'rand_like', 'randn_like', 'uniform', 'embedding_fwd', 'gather', 'index_select', 'index_put_accumulate', 'scatter', 'select', 'take_along_axis', 'cummax', 'cummin', 'cumprod', 'cumsum', 'argsort', 'topk', 'max', 'min', 'prod', 'sum', 'var', 'var_mean', 'welford', 'softmax', 'log_softmax', 'gelu', 'dropout', 'layer_norm', 'rms_norm', 'mean', 'cross_entropy', 'grouped_mm', 'linear', 'matmul', 'scaled_mm', 'sdpfa_bwd', 'sdpfa_fwd', 'nv_block_quantize', 'nv_grouped_block_quantize', 'preprocess_grouped_matmul_input_sf', 'cutlass_nvfp4_grouped_mm']
