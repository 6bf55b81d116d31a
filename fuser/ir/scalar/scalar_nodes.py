"""The classes of symbolic scalars. Sums and products of integers are stored as polynomials.

To build scalars, use the functions of `fuser.ir.scalar.constructors`, which simplify them.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar, cast
from weakref import WeakValueDictionary

from fuser.ir.dtypes import Category, DataType, category, dtype_of_python, dtype_text
from fuser.ir.statement import Val, is_defining
from fuser.support.arguments import python_number, wrong
from fuser.support.errors import (
    ArgumentError,
    UnsupportedError,
    is_users_comparison,
    user_code,
    user_line,
)

Number = bool | int | float
# The value of a constant. Complex values are typed as `Number` elsewhere: they are rare, and code
# for extents and indices never handles one.
AnyNumber = Number | complex
# The ends of a range of integers; the only floats are -inf and inf.
Interval = tuple[int | float, int | float]
_S = TypeVar("_S", bound="Scalar")


@Val.register
class Scalar:
    """Base class of all symbolic scalars: constants, symbols and expressions. They are immutable.

    Equal scalars are one object. In the compiler, `==` and hashing are therefore those of `object`,
    and their time does not depend on the size of the expression. In a user's definition, `==`
    creates a condition.
    """

    __slots__ = ("__weakref__", "depth", "dtype", "interval", "order", "symbols")
    dtype: DataType
    # The height of the expression tree; a leaf has depth 0.
    depth: int
    # Cached results of `simplify.interval`, `sort_key` and `symbols`; None: not computed yet.
    interval: Interval | None
    order: tuple[object, ...] | None
    symbols: tuple[Symbol, ...] | None

    def __str__(self) -> str:
        return scalar_text(self)

    __repr__ = __str__

    # Python's operators; `//` and `%` round down, as in Python.
    def __add__(self, other: ScalarLike) -> Scalar:
        return _arithmetic("+", self, other)

    def __radd__(self, other: ScalarLike) -> Scalar:
        return _arithmetic("+", other, self)

    def __sub__(self, other: ScalarLike) -> Scalar:
        return _arithmetic("-", self, other)

    def __rsub__(self, other: ScalarLike) -> Scalar:
        return _arithmetic("-", other, self)

    def __mul__(self, other: ScalarLike) -> Scalar:
        return _arithmetic("*", self, other)

    def __rmul__(self, other: ScalarLike) -> Scalar:
        return _arithmetic("*", other, self)

    def __floordiv__(self, other: ScalarLike) -> Scalar:
        return _arithmetic("floorDiv", self, other)

    def __rfloordiv__(self, other: ScalarLike) -> Scalar:
        return _arithmetic("floorDiv", other, self)

    def __mod__(self, other: ScalarLike) -> Scalar:
        return _arithmetic("floorMod", self, other)

    def __rmod__(self, other: ScalarLike) -> Scalar:
        return _arithmetic("floorMod", other, self)

    def __neg__(self) -> Scalar:
        return _arithmetic("-", 0, self)

    def __lt__(self, other: ScalarLike) -> Scalar:
        return _arithmetic("<", self, other)

    def __le__(self, other: ScalarLike) -> Scalar:
        return _arithmetic("<=", self, other)

    def __gt__(self, other: ScalarLike) -> Scalar:
        return _arithmetic("<", other, self)

    def __ge__(self, other: ScalarLike) -> Scalar:
        return _arithmetic("<=", other, self)

    def __eq__(self, other: object) -> Any:
        """Returns a condition, as an expression, in a user's definition.

        Elsewhere, returns whether both are the same object.
        """
        return _equality("eq", self, other) if is_users_comparison() else NotImplemented

    def __ne__(self, other: object) -> Any:
        return _equality("ne", self, other) if is_users_comparison() else NotImplemented

    __hash__ = object.__hash__

    # `fuser.ops.operators` adds these methods at import.
    if TYPE_CHECKING:

        def _operator(self, other: ScalarLike) -> Scalar: ...

        __truediv__ = __rtruediv__ = __pow__ = __rpow__ = _operator
        __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _operator
        __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _operator

        def __abs__(self) -> Scalar: ...
        def __index__(self) -> int: ...
        def __int__(self) -> int: ...
        def __float__(self) -> float: ...
        def __divmod__(self, other: ScalarLike) -> tuple[Scalar, Scalar]: ...
        def __rdivmod__(self, other: ScalarLike) -> tuple[Scalar, Scalar]: ...

    def __bool__(self) -> bool:
        """Raises `ArgumentError`, because the value is known only when the program runs.

        Outside of a user's definition, returns True for a scalar whose dtype is not Bool, as for
        any Python object by default.
        """
        if self.dtype is not DataType.Bool and not is_users_comparison():
            return True
        of_number = "" if self.dtype is DataType.Bool else "compare it (!= 0), and "
        raise ArgumentError(
            f"{self} is neither true nor false while a program is defined (at {user_line()}): "
            f"{of_number}use the op where instead of `if` (in a host program, hic.branch(...)), "
            "logical_and(a, b) instead of `and`, logical_not(a) instead of `not`. To compare "
            "objects, write a is b or a is not None"
        )

    def __deepcopy__(self, memo: object) -> Scalar:
        return self

    # nvFuser's `Val` queries.
    def is_tensor(self) -> bool:
        """Returns False, as nvFuser's `Val.isTensor` does for scalars."""
        return False

    def is_symbolic(self) -> bool:
        """Returns whether the scalar is not a constant."""
        return not isinstance(self, Const)

    def definition(self) -> None:
        """Returns None for a constant or a symbol, because no op defines it.

        Raises:
            UnsupportedError: the scalar is an expression. Expressions are simplified, so their
                defining ops are not stored.
        """
        if not isinstance(self, Const | Symbol):
            raise UnsupportedError(
                f"definition() of {self} is not supported: a scalar is stored as a simplified "
                "formula, without the ops that made it; str() shows the formula"
            )

    def uses(self) -> NoReturn:
        """Raises `UnsupportedError`, because a scalar does not store the ops that read it.

        Equal scalars of all fusions are one object. The definitions of a fusion's tensors show
        which ops read a scalar.
        """
        raise UnsupportedError(
            f"uses() of {self} is not supported: a scalar does not store which ops read it. Look "
            "at the definitions of the tensors instead"
        )


# The functions behind Python's operators on scalars; `fuser.ir.scalar.constructors` fills both.
OPERATORS: dict[str, Callable[[ScalarLike, ScalarLike], Scalar]] = {}
CONSTRUCTORS: dict[str, Callable[..., Scalar]] = {}


def _arithmetic(op: str, a: ScalarLike, b: ScalarLike) -> Scalar:
    """Returns the scalar `a op b`. Python's operators on scalars, such as `+`, call this function.

    If an operand is a tensor or a list, returns NotImplemented. Python then calls the operator of
    the tensor or list.

    Raises:
        ArgumentError: an operand is not a number.
    """
    if isinstance(a, ScalarLike) and isinstance(b, ScalarLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        return OPERATORS[op](*_of_one_category(a, b))
    other = b if isinstance(a, Scalar) else a  # pyright: ignore[reportUnnecessaryIsInstance]
    if isinstance(other, Val) or (op == "*" and isinstance(other, list | tuple | str)):
        return NotImplemented  # `[0] * n` repeats a list; Python then calls __index__ of n
    number = python_number(other)
    if number is None:
        scalar_itself = a if other is b else b
        raise ArgumentError(
            f"{op} of {scalar_itself}: {wrong('a tensor or a scalar or a number', other).text}"
            f"{user_code(user_line())}"
        )
    return _arithmetic(op, a, number) if other is b else _arithmetic(op, number, b)


def _of_one_category(a: ScalarLike, b: ScalarLike) -> tuple[Scalar, Scalar]:
    """Returns both operands as scalars. If one is an integer or Bool and the other is floating, the
    first is converted to the dtype of the second.

    Complex operands, and operands of equal dtypes, are not converted.
    """
    a, b = as_scalar(a), as_scalar(b)
    if a.dtype is b.dtype:
        return a, b
    kinds = category(a.dtype), category(b.dtype)
    if kinds in (("int", "float"), ("bool", "float")):
        return CONSTRUCTORS["cast"](a, b.dtype), b
    if kinds in (("float", "int"), ("float", "bool")):
        return a, CONSTRUCTORS["cast"](b, a.dtype)
    return a, b


def _equality(name: str, a: Scalar, other: object) -> Any:
    """Returns the result of a user's comparison (`==` or `!=`) of a scalar and another object.

    - If `other` is no scalar and no number: NotImplemented.
    - In a definition: the condition as a scalar.
    - Outside of a definition: a bool if the condition is constant, else NotImplemented.

    `name` is "eq" or "ne".
    """
    b = other if isinstance(other, Scalar) else python_number(other)
    if b is None:
        return NotImplemented
    condition = CONSTRUCTORS[name](a, b)
    if is_defining():
        return condition
    if a is b or not isinstance(condition, Const):
        return NotImplemented
    return bool(condition.value)


_known: WeakValueDictionary[object, Scalar] = WeakValueDictionary()
_known_lock = threading.Lock()


def _interned(cls: type[_S], key: object, dtype: DataType, depth: int = 0) -> tuple[_S, bool]:
    """Returns the scalar with the key `key`, and whether the scalar is new.

    Equal scalars have equal keys and are one object, so a scalar that exists already is returned.
    If the scalar is new, the caller sets its fields and passes it to `_published`. `depth` says how
    many levels of operands are nested in the scalar.
    """
    found = _known.get(key)
    if found is not None:
        return cast(_S, found), False
    made = object.__new__(cls)
    made.dtype, made.depth = dtype, depth
    made.interval = made.order = made.symbols = None
    return made, True


def _published(made: _S, key: object) -> _S:
    """Stores the new scalar `made` in the table of all scalars, by its key.

    The caller has set the fields of the scalar. Returns the stored scalar. This is another object
    than `made` if another thread has stored an equal scalar in the meantime.
    """
    with _known_lock:
        return cast(_S, _known.setdefault(key, made))


def converted(value: AnyNumber, kind: Category) -> Number:
    """Returns a number as a bool, int, float or complex number, depending on `kind`.

    For "int" and "float", a complex number is converted to its real part. For "bool", the result is
    whether the number is not 0.

    Raises:
        ValueError, OverflowError: a NaN or an infinity is converted to an integer.
    """
    if kind == "bool":
        return bool(value)
    if kind == "complex":
        return cast(Number, complex(value))
    real = value.real if isinstance(value, complex) else value
    return int(real) if kind == "int" else float(real)


class Const(Scalar):
    """A constant number with a dtype."""

    __slots__ = ("value",)
    value: Number

    def __new__(cls, value: AnyNumber, dtype: DataType) -> Const:
        """Returns the constant with this value and dtype. Equal constants are one object."""
        kind = category(dtype)
        value = converted(value, kind)
        # repr() distinguishes 0.0 from -0.0, and equal texts of nan are equal keys.
        key = (Const, dtype, value if kind == "int" else repr(value))
        made, is_new = _interned(cls, key, dtype)
        if not is_new:
            return made
        made.value = value
        return _published(made, key)

    def __reduce__(self) -> tuple[Any, ...]:
        return Const, (self.value, self.dtype)

    def __bool__(self) -> bool:
        """Returns whether the value is not 0, in a user's definition.

        In the compiler, returns False only for the constant False. Other constants are true there,
        even the number 0, as any Python object is by default.
        """
        if self.value:
            return True
        return self.value is not False and not is_users_comparison()


class Symbol(Scalar):
    """A named unknown number, in the range from `lo` to `hi`, both included. None means no bound.

    The range is part of the identity: symbols with the same name and different ranges are different
    values. To narrow a range, `substitute` another symbol.
    """

    __slots__ = ("hi", "lo", "name")
    name: str
    lo: int | None
    hi: Scalar | None

    def __new__(
        cls, name: str, dtype: DataType, *, lo: int | None = None, hi: Scalar | int | None = None
    ) -> Symbol:
        """Returns the symbol with this name, dtype and range. Equal symbols are one object."""
        hi = const(hi) if isinstance(hi, int) else hi
        key = (Symbol, name, dtype, lo, hi)
        made, is_new = _interned(cls, key, dtype)
        if not is_new:
            return made
        made.name, made.lo, made.hi = name, lo, hi
        return _published(made, key)

    def __reduce__(self) -> tuple[Any, ...]:
        return _symbol, (self.name, self.dtype, self.lo, self.hi)

    @property
    def is_index(self) -> bool:
        """Whether this is the index of a loop, a thread or a mesh dimension.

        Only indices have upper bounds.
        """
        return self.hi is not None

    def with_range(self, *, lo: int | None, hi: Scalar | int | None = None) -> Symbol:
        """Returns the symbol with the same name and dtype, and the range from `lo` to `hi`.

        Both ends are included, and None means no bound.
        """
        return Symbol(self.name, self.dtype, lo=lo, hi=hi)


def _symbol(name: str, dtype: DataType, lo: int | None, hi: Scalar | None) -> Symbol:
    return Symbol(name, dtype, lo=lo, hi=hi)


class Apply(Scalar):
    """An op applied to scalars, such as a division or a comparison.

    Integer sums and products are `Poly`.
    """

    __slots__ = ("args", "op")
    args: tuple[Scalar, ...]
    op: str

    def __new__(cls, op: str, args: tuple[Scalar, ...], dtype: DataType) -> Apply:
        """Returns the op applied to these arguments. Equal expressions are one object."""
        args = alike_literals(args)
        key = (Apply, op, dtype, args)
        made, is_new = _interned(cls, key, dtype, 1 + max((a.depth for a in args), default=0))
        if not is_new:
            return made
        made.op, made.args = op, args
        return _published(made, key)

    def __reduce__(self) -> tuple[Any, ...]:
        return Apply, (self.op, self.args, self.dtype)


# Literals of these dtypes have the same text. The first of the two that occurs is used.
_PLAIN_INTS = (DataType.Index, DataType.Int)


def alike_literals(args: tuple[Scalar, ...]) -> tuple[Scalar, ...]:
    """Returns the arguments of an op, with integer literals converted to one integer dtype.

    This is the integer dtype of another argument. The text of a literal does not show its dtype, so
    literals of different dtypes would have equal texts, but would be different objects.
    """
    literals = [a for a in args if isinstance(a, Const) and a.dtype in _PLAIN_INTS]
    if not literals:
        return args
    others = [a.dtype for a in args if not isinstance(a, Const)]
    wanted = next((dtype for dtype in _PLAIN_INTS if dtype in others), None)
    if wanted is None or all(a.dtype is wanted for a in literals):
        return args
    return tuple(
        Const(a.value, wanted) if isinstance(a, Const) and a in literals else a for a in args
    )


Monomial = tuple[Scalar, ...]
Terms = tuple[tuple[Monomial, int], ...]


class Poly(Scalar):
    """An integer sum of products (a polynomial), as a sorted tuple of terms.

    A term is (monomial, coefficient). A monomial is the tuple of the factors of a product; that of
    the constant term is ().
    """

    __slots__ = ("terms",)
    terms: Terms

    def __new__(cls, terms: Terms, dtype: DataType) -> Poly:
        """Returns the polynomial with these terms. Equal polynomials are one object."""
        key = (Poly, dtype, terms)
        depth = 1 + max((a.depth for m, _ in terms for a in m), default=0)
        made, is_new = _interned(cls, key, dtype, depth)
        if not is_new:
            return made
        made.terms = terms
        return _published(made, key)

    def __reduce__(self) -> tuple[Any, ...]:
        return Poly, (self.terms, self.dtype)


# ---------------------------------------------------------------- walks
def children(x: Scalar) -> tuple[Scalar, ...]:
    """Returns the direct operands of a scalar. Constants and symbols have none."""
    if isinstance(x, Apply):
        return x.args
    return tuple(a for m, _ in x.terms for a in m) if isinstance(x, Poly) else ()


def postorder(x: Scalar, is_known: Callable[[Scalar], bool]) -> Iterator[Scalar]:
    """Yields each subexpression of `x` once, operands before the expressions that contain them.

    Subexpressions for which `is_known` returns True are skipped. After each yield, the caller must
    make `is_known` return True for the yielded scalar. The function is not recursive, because
    expressions may be nested thousands of levels deep.
    """
    stack = [x]
    while stack:
        top = stack[-1]
        if is_known(top):
            stack.pop()
            continue
        waiting = [c for c in children(top) if not is_known(c)]
        if waiting:
            stack += reversed(waiting)
        else:
            yield top


def symbols(x: Scalar) -> tuple[Symbol, ...]:
    """Returns each symbol of `x` once, in order of first appearance."""
    if isinstance(x, Symbol):
        return (x,)
    if x.symbols is None:
        for y in postorder(x, lambda s: s.symbols is not None or isinstance(s, Symbol)):
            # The children's symbols are known, so this recursion has one level.
            y.symbols = tuple(dict.fromkeys(s for c in children(y) for s in symbols(c)))
    return x.symbols or ()


# ---------------------------------------------------------------- the order of a sum's terms
@lru_cache(maxsize=10_000)
def _natural(name: str) -> tuple[object, ...]:
    """Returns a name as a sort key of texts and numbers, so that i2 is sorted before i10."""
    parts = re.split(r"([0-9]+)", name)
    # Numbers are compared as text, because Python converts only some thousand digits.
    numbers = (p.lstrip("0") for p in parts[1::2])
    texts = ((0, 0, p) for p in parts[::2])
    ordered: list[tuple[object, ...]] = [next(texts)]
    for number, text in zip(numbers, texts, strict=True):
        ordered += ((1, len(number), number), text)
    return tuple(ordered)


_ORDER_LENGTH = 400


def _order_text(x: Scalar) -> str:
    """Returns a text of at most 400 characters that describes the structure of `x`, as a sort key.

    The text is computed from the texts of the operands, which must be cached already.
    """

    def texts(parts: Iterable[Scalar]) -> str:
        return ", ".join(str(cast("tuple[object, ...]", p.order)[-1]) for p in parts)

    match x:
        case Const():
            return f"('const', '{x.dtype.name}', '{x.value!r}')"
        case Symbol():
            text = f"('sym', {_natural(x.name)}, '{x.dtype.name}', {x.lo}, {x.hi})"
        case Apply():
            text = f"('apply', '{x.op}', '{x.dtype.name}', {texts(x.args)})"
        case _:
            terms = [f"(({texts(m)}), {c})" for m, c in cast(Poly, x).terms]
            text = f"('poly', '{x.dtype.name}', {', '.join(terms)})"
    if len(text) <= _ORDER_LENGTH:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    return text[: _ORDER_LENGTH - len(digest)] + digest


def sort_key(x: Scalar) -> tuple[object, ...]:
    """Returns the key by which factors and terms of a sum are sorted.

    Symbols are sorted by name and precede other ops, which are sorted by their structure.
    """
    if x.order is None:
        for y in postorder(x, lambda s: s.order is not None):
            is_symbol = isinstance(y, Symbol)
            y.order = (0 if is_symbol else 1, _natural(y.name) if is_symbol else (), _order_text(y))
    assert x.order is not None
    return x.order


def const(value: AnyNumber, dtype: DataType | None = None) -> Const:
    """Returns a Python number as a constant. By default, the dtype depends on the number's type.

    An int has dtype Index. Other types have nvFuser's dtypes: Bool, Double and ComplexDouble.
    """
    if dtype is None:
        dtype = DataType.Index if type(value) is int else dtype_of_python(value)
    return Const(value, dtype)


ZERO: Final = const(0)
ONE: Final = const(1)
ScalarLike = Scalar | bool | int | float | complex


def as_scalar(value: ScalarLike) -> Scalar:
    """Returns a Python number as a constant. A scalar is returned unchanged."""
    return value if isinstance(value, Scalar) else const(value)


def int_value(x: ScalarLike) -> int | None:
    """Returns the value of an integer constant, or None for anything else."""
    if isinstance(x, int):
        return int(x)
    return x.value if isinstance(x, Const) and isinstance(x.value, int) else None


def is_int(x: Scalar) -> bool:
    """Returns whether the dtype of `x` is an integer dtype."""
    return category(x.dtype) == "int"


# ---------------------------------------------------------------- polynomial form
def terms_of(x: Scalar) -> dict[Monomial, int]:
    """Returns an integer scalar as a sum of products: {tuple of factors: coefficient}.

    The constant term has the key ().
    """
    if isinstance(x, Const):
        return {(): int(x.value)} if x.value else {}
    return dict(x.terms) if isinstance(x, Poly) else {(x,): 1}


def join_monomials(a: Monomial, b: Monomial) -> Monomial:
    """Returns the product of two monomials as a monomial with sorted factors.

    A monomial is the tuple of the factors of a product.
    """
    return tuple(sorted((*a, *b), key=sort_key)) if a and b else a or b


def without_factors(mono: Monomial, part: Monomial) -> Monomial | None:
    """Returns the monomial `mono` divided by the monomial `part`, or None if it is not divisible.

    A monomial is the tuple of the factors of a product. The factors of `part` are removed from it.
    """
    rest = list(mono)
    for atom in part:
        if atom not in rest:
            return None
        rest.remove(atom)
    return tuple(rest)


def from_terms(terms: Mapping[Monomial, int], dtype: DataType) -> Scalar:
    """Returns the sum of products {tuple of factors: coefficient} as a scalar.

    The result is a constant, a single factor or a polynomial.
    """
    terms = {m: c for m, c in terms.items() if c}
    if not terms:
        return Const(0, dtype)
    if len(terms) == 1:
        ((mono, coef),) = terms.items()
        if not mono:
            return Const(coef, dtype)
        if coef == 1 and len(mono) == 1:
            return mono[0]
    ordered = sorted(terms.items(), key=lambda t: (-len(t[0]), [sort_key(a) for a in t[0]]))
    return Poly(tuple(ordered), dtype)


def int_dtype(a: Scalar, b: Scalar) -> DataType:
    """Returns the dtype of the result of an integer op on `a` and `b`.

    If the dtypes differ and one operand is a literal, this is the dtype of the other operand. If
    they differ and there is no literal, it is Index if one operand is Index, else Int.
    """
    if a.dtype is b.dtype:
        return a.dtype
    # A literal adapts to the other side; otherwise Index absorbs the fixed-width types.
    if isinstance(a, Const):
        return b.dtype
    if isinstance(b, Const):
        return a.dtype
    return DataType.Index if DataType.Index in (a.dtype, b.dtype) else DataType.Int


def single_term(x: Scalar) -> tuple[Monomial, int] | None:
    """Returns (factors, coefficient) of an integer scalar with one term, or None for a sum."""
    terms = terms_of(x)
    return next(iter(terms.items())) if len(terms) == 1 else None


# ----------------------------------------------------------------------
# The text of scalars.

_INFIX = frozenset("+ - * / % < <= > >= == != && || & | ^ << >>".split())


def literal_text(value: Number, dtype: DataType) -> str:
    """Returns the text of a literal, such that the parser reads the same value from the text.

    Examples: `8`, `true`, `double(3)`, `float(0.5)`.
    """
    kind = category(dtype)
    if kind == "bool":
        return "true" if value else "false"
    if kind == "int":
        return str(int(value))
    if kind == "complex":
        z = complex(value)
        return f"{dtype_text(dtype)}({_digits(z.real)},{_digits(z.imag)})"
    return f"{dtype_text(dtype)}({_digits(float(value))})"


def _digits(value: float) -> str:
    return repr(value).removesuffix(".0")


@lru_cache(maxsize=10_000)
def scalar_text(x: Scalar) -> str:
    """Returns the text of a scalar, as in nvFuser: `i0`, `( i0 * i2 )`, `( ceilDiv(i0, 3) )`."""
    out: list[str] = []
    stack: list[Scalar | str] = [x]
    while stack:
        top = stack.pop()
        if isinstance(top, str):
            out.append(top)
        else:
            stack += reversed(_pieces(top))
    return "".join(out)


def _pieces(x: Scalar) -> list[Scalar | str]:
    """Returns the text of `x` as a list of strings and operands of `x`.

    The caller replaces each operand by the operand's own text. This function does not, because
    recursion could be too deep.
    """
    match x:
        case Const():
            return [literal_text(x.value, x.dtype)]
        case Symbol():
            return [x.name]
        case Apply(op=op, args=(a, b)) if op in _INFIX:
            return ["( ", a, f" {op} ", b, " )"]
        case Apply():
            args: list[Scalar | str] = [p for a in x.args for p in (", ", a)]
            return ["( ", x.op.replace("cast:", "cast_"), "(", *args[1:], ") )"]
        case Poly():
            return _sum_pieces(x)
        case _:
            raise AssertionError(
                f"internal error: a scalar of the class {type(x).__name__} cannot be printed. "
                "Please "
                "report this definition"
            )


def _sum_pieces(x: Poly) -> list[Scalar | str]:
    parts = [_product_pieces(m, abs(c)) for m, c in x.terms]
    out = parts[0] if x.terms[0][1] > 0 else ["( 0 - ", *parts[0], " )"]
    for (_, coef), part in zip(x.terms[1:], parts[1:], strict=True):
        out = ["( ", *out, " + " if coef > 0 else " - ", *part, " )"]
    return out


def _product_pieces(mono: Monomial, coef: int) -> list[Scalar | str]:
    factors: list[Scalar | str] = list(mono)
    if coef != 1 or not factors:
        factors.append(str(coef))
    out = factors[:1]
    for f in factors[1:]:
        out = ["( ", *out, " * ", f, " )"]
    return out
