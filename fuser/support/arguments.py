"""Checks the arguments of public calls by the annotations of their functions.

`checked` wraps every public function of a definition. The wrapper converts each argument to the
annotated kind: numbers of numpy and torch to Python's, iterables to lists. If an argument cannot be
converted, the error names the call, the argument, the expected and the actual value, and the user's
line:

    permute(): incompatible function arguments: dims: expected a list of integers, got 1 of type int

The wrapped functions can therefore rely on their annotations.
"""

from __future__ import annotations

import builtins
import enum
import functools
import inspect
import operator
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from itertools import islice
from typing import Any, ParamSpec, SupportsIndex, TypeVar, Union, cast, get_args, get_origin

from fuser.support.errors import (
    ArgumentError,
    FuserError,
    IntegerRangeError,
    advice_on_nvfuser,
    plural,
    user_code,
    user_line,
)
from fuser.support.record import record

P = ParamSpec("P")
R = TypeVar("R")
_INT64_END = 2**63
# The longest list of arguments. Tensors have far fewer axes; an iterator may be endless.
LONGEST = 1024
_SHOWN = 100


class Mismatch(Exception):
    """The error that a value is not of the expected kind.

    Callers turn it into an error for the user.

    `at` is the position of the value in the argument, such as `[2]`, or "" for the whole argument.
    `kind` is the type of the error for the user.
    """

    def __init__(self, text: str, at: str = "", kind: type[FuserError] = ArgumentError) -> None:
        super().__init__(text)
        self.text = text
        self.at = at
        self.kind = kind


@record
class Kind:
    """A kind of argument, such as integers or lists of tensors.

    - `words`: the name of the kind in messages.
    - `take`: the function that converts a value to this kind, or raises `Mismatch`.
    - `exact`: the types of values that need no conversion.
    """

    words: str
    take: Callable[[Any], object]
    exact: frozenset[type] = frozenset()


# ------------------------------------------------------------------ showing values
def show(value: object, depth: int = 0) -> str:
    """Returns a short text of a value for a message. The text has no memory addresses.

    The function never raises an error. `depth` is the depth of nesting so far.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return f"{'-' if value < 0 else ''}2**{value.bit_length() - 1}.."
    if depth > 3:
        return ".."
    if isinstance(value, list | tuple | set | frozenset):
        items = cast("Collection[object]", value)
        inner = ", ".join(show(v, depth + 1) for v in islice(items, 8))
        text = f"[{inner}{', ..' if len(items) > 8 else ''}]"
    elif isinstance(value, dict):
        pairs = cast("dict[object, object]", value).items()
        text = (
            "{"
            + ", ".join(f"{show(k, depth + 1)}: {show(v, depth + 1)}" for k, v in islice(pairs, 8))
            + "}"
        )
    else:
        try:
            if isinstance(value, types.MethodType):
                text = f"the method {value.__qualname__}, which is not called,"
            elif isinstance(value, types.FunctionType):
                text = f"the function {value.__name__}"
            else:
                text = str(value) if hasattr(value, "is_symbolic") else repr(value)
        except Exception:  # a repr may raise anything; that of a range of huge numbers does
            text = object.__repr__(value)
    text = text.partition(" object at 0x")[0]
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 2] + ".."


def wrong(words: str, value: object) -> Mismatch:
    """Returns the error that `value` is not of the kind that `words` describe, such as "an
    integer".
    """
    # For users of torch, "a tensor" has data.
    is_data = words.startswith("a tensor") and hasattr(value, "__array__")
    hint = ": it has data; pass it to execute, and create a definition's tensors by define_tensor"
    name = type(value).__name__
    found = f"{show(value)} of type {_PUBLIC_NAMES.get(name, name)}"
    return Mismatch(f"expected {words}, got {found}{hint * is_data}")


# ------------------------------------------------------------------ numbers
def python_number(value: object) -> bool | int | float | complex | None:
    """Converts a number of any library, such as numpy, to a Python number.

    Returns None if the value is not a number.
    """
    if type(value) in (bool, int, float, complex):
        return cast("bool | int | float | complex", value)
    try:
        rank = getattr(value, "ndim", None)
        if rank == 0 and hasattr(value, "item"):
            value = cast(Any, value).item()  # a 0-dim array or tensor
        elif rank is None and isinstance(value, SupportsIndex) and not _is_scalar(value):
            value = operator.index(value)
    except (TypeError, RuntimeError, NotImplementedError):
        return None  # an array of several numbers, a tensor without data
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    return value if isinstance(value, float | complex) else None


def _is_scalar(value: object) -> bool:
    """Returns whether a value is a symbolic scalar of a program.

    Such a scalar is not converted to a Python number, because it has its own dtype.
    """
    return hasattr(value, "is_symbolic")


def take_integer(value: object) -> int:
    """Converts an integer of any library to a Python integer.

    Raises:
        Mismatch: the value is not an integer, or does not fit into 64 bits.
    """
    number = value if type(value) is int else python_number(value)
    if number is None or isinstance(number, bool | float | complex):
        raise wrong("an integer", value)
    if not -_INT64_END <= number < _INT64_END:
        raise Mismatch(f"{show(number)} is out of the range of int64_t", kind=IntegerRangeError)
    return number


def _take_real(value: object) -> bool | int | float:
    number = python_number(value)
    if number is None or isinstance(number, complex):
        raise (
            wrong("a real number", value)
            if isinstance(number, complex)
            else wrong("a number", value)
        )
    return number


def _take_number(value: object) -> bool | int | float | complex:
    number = python_number(value)
    if number is None:
        raise wrong("a number", value)
    return number


def _take_flag(value: object) -> bool:
    number = python_number(value)
    if isinstance(number, bool) or (isinstance(number, int) and number in (0, 1)):
        return bool(number)
    raise wrong("True or False", value)


def _take_any(value: object) -> object:
    return value


_INTEGER = Kind("an integer", take_integer)
_REAL = Kind("a number", _take_real, frozenset({bool, int, float}))
_NUMBER = Kind("a number", _take_number, frozenset({bool, int, float, complex}))
_FLAG = Kind("True or False", _take_flag, frozenset({bool}))
_ANY = Kind("anything", _take_any)

# The items of shapes and slices. For other items, nvFuser's message is added.
_EXTENT = "a scalar or an integer"

# Annotation -> kind. The kind of any other class is its instances.
_KINDS: dict[object, Kind] = {
    int: _INTEGER,
    float: _REAL,
    complex: _NUMBER,
    bool: _FLAG,
    Any: _ANY,
    object: _ANY,
}
# Name of a class -> its instances in messages.
_WORDS = {
    "NoneType": "None",
    "TensorView": "a tensor",
    "Scalar": "a scalar",
    "Tensor": "a torch tensor",
    "DataType": "a dtype like DataType.Float or torch.float32",
    "dtype": "a dtype like DataType.Float or torch.float32",
    "IterDomain": "an axis",
    "Axis": "an axis",
    "str": "a name",
}
# Name of a class -> the name under which users import the class.
_PUBLIC_NAMES = {"LocalDeviceMesh": "DeviceMesh"}


# ------------------------------------------------------------------ kinds from annotations
Kinds = Mapping[Any, Kind]


def kind_of(annotation: object, kinds: Kinds | None = None) -> Kind:
    """Returns the kind of argument that a type annotation describes.

    `kinds` replaces the kinds of some annotations.
    """
    if kinds is not None and annotation in kinds:
        return kinds[annotation]
    if annotation in _KINDS:
        return _KINDS[annotation]
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return _either(parts, kinds)
    if origin is tuple and parts[-1] is not Ellipsis:
        return _row([kind_of(p, kinds) for p in parts])
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(kind_of(parts[0], kinds), kind_of(parts[1], kinds))
    if isinstance(origin, type) and issubclass(origin, Iterable):
        return _list(kind_of(parts[0], kinds), is_ordered=issubclass(origin, Sequence))
    return _instance(annotation) if isinstance(annotation, type) else _ANY


def _instance(cls: type) -> Kind:
    words = _WORDS.get(cls.__name__) or f"a {cls.__name__}"

    def take(value: object) -> object:
        if isinstance(value, cls):
            return value
        names = cls.__members__ if issubclass(cls, enum.Enum) else ()
        named = f"{cls.__name__}.{value}" if isinstance(value, str) and value in names else words
        raise wrong(named, value)

    return Kind(words, take, frozenset({cls}))


def _is_covered(part: object, parts: Sequence[object]) -> bool:
    """Returns whether another type among `parts` accepts all numbers of the type `part`.

    For example, float accepts all integers.
    """
    wider = {bool: (float, complex), int: (float, complex), float: (complex,)}
    return any(w in parts for w in wider.get(part, ())) if isinstance(part, type) else False


def _either(parts: Sequence[object], kinds: Kinds | None) -> Kind:
    # If floats are accepted, all Python numbers are one kind. The op checks the value itself.
    chosen = [p for p in parts if not _is_covered(p, parts)]
    found = [kind_of(p, kinds) for p in chosen]
    words = " or ".join(dict.fromkeys(k.words for k in found))
    # The kinds before integers accept instances of a class, and no integers.
    before = found[: found.index(_INTEGER)] if _INTEGER in found else [_ANY]
    takes_int = all(k.exact and k is not _FLAG for k in before)

    def take(value: object) -> object:
        if takes_int and type(value) is int and -_INT64_END <= value < _INT64_END:
            return value
        inside: Mismatch | None = None
        for kind in found:
            try:
                return kind.take(value)
            except Mismatch as error:
                # An error within a list, or on an integer's range, is more specific.
                if error.at or error.kind is not ArgumentError:
                    inside = error
        raise inside or wrong(words, value)

    return Kind(words, take, frozenset().union(*(k.exact for k in found)))


def list_items(value: object, words: str, *, longest: int = LONGEST) -> list[object]:
    """Returns the items of a list, an array or an iterator.

    `words` describe the expected value in the message.

    Raises:
        Mismatch: the value is not iterable, or has more than `longest` items.
    """
    is_list = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    try:
        items = list(islice(cast(Iterable[object], value), longest + 1)) if is_list else None
    except TypeError:  # a 0-dim array has `__iter__`, but iteration raises
        items = None
    if items is None:
        raise wrong(words, value)
    if len(items) > longest:
        raise Mismatch(
            f"expected at most {longest} entries, got more than {longest} in {show(value)}"
        )
    return items


def _list(item: Kind, *, is_ordered: bool) -> Kind:
    words = "a list" if item is _ANY else f"a list of {_plurals(item.words)}"

    def take(value: object) -> object:
        # A tensor has rows, but the user does not mean the list of its rows.
        if (is_ordered and isinstance(value, Set)) or type(value) in item.exact:
            raise wrong(words, value)
        try:
            items = list_items(value, words)
        except Mismatch as error:
            # For example, one placement or one size instead of a list.
            if _is_item(item, value):
                error.text += f": write [{show(value)}]"
            raise
        taken = [_at(item, v, i) for i, v in enumerate(items)]
        return tuple(taken) if isinstance(value, tuple) else taken

    return Kind(words, take)


def _is_item(item: Kind, value: object) -> bool:
    """Returns whether `value`, which is passed in place of a list, is meant as a list of one entry
    of the kind `item`.

    This is so for a number of that kind. If the list accepts entries of any kind, it is also so for
    every object whose type is not built into Python. Any other value is more likely a wrong
    argument.
    """
    if item is _ANY:
        return type(value).__module__ != "builtins"
    if python_number(value) is None:
        return False
    try:
        item.take(value)
    except Mismatch:
        return False
    return True


def _row(parts: Sequence[Kind]) -> Kind:
    words = f"a tuple of {len(parts)}"

    def take(value: object) -> object:
        items = list_items(value, words)
        if len(items) != len(parts):
            raise wrong(words, value)
        return tuple(_at(k, v, i) for i, (k, v) in enumerate(zip(parts, items, strict=True)))

    return Kind(words, take)


def _mapping(key: Kind, item: Kind) -> Kind:
    words = f"a dictionary from {_plurals(key.words)} to {_plurals(item.words)}"

    def take(value: object) -> object:
        if not isinstance(value, Mapping):
            raise wrong(words, value)
        pairs = cast("Mapping[object, object]", value).items()
        return {_at(key, k, k): _at(item, v, k) for k, v in pairs}

    return Kind(words, take)


def _at(kind: Kind, value: object, position: object) -> object:
    if type(value) in kind.exact:
        return value
    try:
        return kind.take(value)
    except Mismatch as error:
        error.at = f"[{show(position)}]{error.at}"
        if kind.words == _EXTENT:
            error.text += f". Unsupported iterable object type for define_vector! Index:{position}"
        raise


def _plurals(words: str) -> str:
    """Returns the plural of a description: `tensors or None` for `a tensor or None`."""
    several = list[str]()
    for words_of_one in words.split(" or "):
        noun, of, rest = words_of_one.removeprefix("an ").removeprefix("a ").partition(" of ")
        is_name = noun in ("None", "True", "False")
        several.append(noun if is_name else f"{plural(noun)}{of}{rest}")
    return " or ".join(several)


# ------------------------------------------------------------------ checks of a call
class Entrance:
    """The parameters of one public function, with the kind of each parameter.

    The first call of the function creates this object, because reading annotations is slow.
    """

    def __init__(self, function: Callable[..., object], name: str, kinds: Kinds | None) -> None:
        self._name = name
        self._signature = inspect.signature(function)
        scope = cast("dict[str, Any]", _Scope(getattr(function, "__globals__", {})))
        hints = inspect.get_annotations(function, locals=scope, eval_str=True)
        found = list(self._signature.parameters.values())
        is_made = function.__name__ == "__init__"
        self._is_method = bool(found) and found[0].name == "self" and not is_made
        self._kinds = {
            p.name: kind_of(hints.get(p.name, Any), kinds)
            for p in found
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        }
        places = [p for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._places = [(p.name, self._kinds[p.name]) for p in places]
        self._is_open = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in found)
        self._needed = sum(p.default is p.empty for p in places)
        # Whether arguments fit the parameters depends on their number and names alone. These fit.
        self._bound: set[tuple[int | str, ...]] = set()

    def take(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Returns the arguments of a call, converted to their kinds.

        Raises:
            FuserError: an argument cannot be converted. The error is that of the first such
                argument.
        """
        places = self._places
        if kwargs or not self._needed <= len(args) <= len(places):
            passed = (len(args), *kwargs)
            if passed not in self._bound:
                self._check_names(args, kwargs)
                self._bound.add(passed)
        taken = list(args)
        for i, (value, (name, kind)) in enumerate(zip(args, places, strict=False)):
            if kind is not _ANY and type(value) not in kind.exact:
                taken[i] = self._take(args, name, kind, value)
        for name, value in kwargs.items():
            kwargs[name] = self._take(args, name, self._kinds.get(name, _ANY), value)
        return taken, kwargs

    def _take(self, args: tuple[Any, ...], name: str, kind: Kind, value: object) -> object:
        try:
            return kind.take(value)
        except Mismatch as error:
            raise self._error(args, f"{name}{error.at}: {error.text}", error.kind) from None

    def _check_names(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            advice = (advice_on_nvfuser(f"fd.{self._name}", name) for name in kwargs)
            instead = next((f": {words}" for words in advice if words), "")
            text = f"{error}{instead}; it takes {_plain(self._signature)}"
            raise self._error(args, text, ArgumentError) from None

    def _error(self, args: tuple[Any, ...], text: str, kind: type[FuserError]) -> FuserError:
        of = _owner(args[0]) if self._is_method and args else ""
        return _refusal(f"{self._name}(){of}", text, kind)


def _plain(signature: inspect.Signature) -> str:
    """Returns the parameters of a function as text.

    Example: `(arg, dim=None, keepdim=False, *, dims=None)`.
    """
    given = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    spelled = [p.replace(default=_Text(str(p.default))) if _is_named(p) else p for p in given]
    return str(inspect.Signature([p for p in spelled if p.name != "self"]))


class _Text(str):
    """A default value in the text of a function's parameters, as a user writes it: `DataType.Null`.

    Python would print `<DataType.Null: 23>`.
    """

    __repr__ = str.__str__


def _is_named(parameter: inspect.Parameter) -> bool:
    return isinstance(parameter.default, enum.Enum)


def _owner(value: object) -> str:
    """Returns ` of T0[..]` for the message of a method of a tensor, scalar or mesh `value`.

    Returns "" for a method of any other object.
    """
    has_name = hasattr(value, "is_symbolic") or type(value).__name__.endswith("DeviceMesh")
    return f" of {show(value)}" if has_name else ""


def _refusal(call: str, text: str, kind: type[FuserError]) -> FuserError:
    refused = "incompatible function arguments: " if kind is ArgumentError else ""
    return kind(f"{call}: {refused}{text}{user_code(user_line())}")


def require(call: str, name: str, value: Any, annotation: object) -> Any:
    """Returns the argument `name` of a call, converted to the kind that a type annotation
    describes.

    `call` and `name` are for the message.

    Raises:
        FuserError: the argument cannot be converted.
    """
    try:
        return kind_of(annotation).take(value)
    except Mismatch as error:
        raise _refusal(f"{call}()", f"{name}{error.at}: {error.text}", error.kind) from None


class _Scope:
    """The names that annotations may use, including modules that only type checkers import.

    An unknown name means `Any`, so an argument with that annotation is not checked.
    """

    def __init__(self, names: Mapping[str, object]) -> None:
        self._names = names

    def __getitem__(self, name: str) -> object:
        for names in (self._names, vars(builtins), sys.modules):
            if name in names:
                return names[name]
        return Any


def refuses_swapped(
    swapped: Callable[[object, object], str],
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator for functions of which users often swap the first two arguments.

    The decorated function calls `swapped` with the first two arguments. If they are in the wrong
    order, `swapped` returns a message that says to swap them, which is raised as an
    `ArgumentError`. Otherwise, it returns "".
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if text := swapped(*args[:2]) if len(args) > 1 else "":
                raise ArgumentError(f"{text}{user_code(user_line())}")
            return function(*args, **kwargs)

        return call

    return decorate


def checked(
    function: Callable[P, R], *, name: str = "", kinds: Kinds | None = None
) -> Callable[P, R]:
    """Returns a function that checks and converts its arguments, and then calls `function`.

    If an error from inside the function lacks the name of the call or the user's line, these are
    added. `name` replaces the function's name in messages, and `kinds` the kinds of some
    annotations.
    """
    made = function.__qualname__.split(".")[0] if function.__name__ == "__init__" else ""
    name = name or made or function.__name__
    entrance: Entrance | None = None
    behind = cast("Callable[..., R]", function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> R:
        nonlocal entrance
        if entrance is None:
            entrance = Entrance(function, name, kinds)
        try:
            taken, named = entrance.take(args, kwargs)
            return behind(*taken, **named)
        except FuserError as error:
            name_call(error, name)
            raise

    return cast("Callable[P, R]", call)


def name_call(error: FuserError, call: str) -> None:
    """Adds the name of the call and the user's source line to an error's message.

    Nothing is added that the message already has.
    """
    if len(error.args) != 1:
        return
    text, line = str(error.args[0]), user_line()
    text = text if call in text else f"{call}: {text}"
    if line in text:
        error.args = (text,)
    elif "(user code at " in text:  # the line where the operand was defined
        error.args = (f"{text} (called at {line})",)
    else:
        error.args = (f"{text}{user_code(line)}",)
