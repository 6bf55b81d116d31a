"""Records: frozen dataclasses that are fast to declare.

A process declares about eighty when it starts. `dataclass(frozen=True)` generates and compiles six
methods for each class. For a record, only `__init__` is generated. The other methods are ordinary
functions that look up the names of the fields when they are called, or once per class.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from operator import attrgetter
from reprlib import recursive_repr
from typing import Any, Generic, NoReturn, TypeVar, dataclass_transform, overload

_T = TypeVar("_T")
_Fields = Sequence[dataclasses.Field[Any]]


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def record(cls: type[_T]) -> type[_T]:
    """Class decorator with the effect of `dataclass(frozen=True)`, but faster.

    Methods that the class defines itself are not replaced.
    """
    fields = declare_fields(cls)
    compared = _values_of([f.name for f in fields if f.compare])
    hashed = _values_of([f.name for f in fields if (f.compare if f.hash is None else f.hash)])

    def __eq__(self: Any, other: object) -> Any:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return compared(self) == compared(other)

    def __hash__(self: Any) -> int:
        return hash(hashed(self))

    _add(cls, __eq__=__eq__, __hash__=__hash__)
    return cls


def replace(one: _T, **changes: Any) -> _T:
    """Returns a copy of a record with some fields changed, as `dataclasses.replace`, but faster."""
    cls = type(one)
    values = {name: getattr(one, name) for name in _FIELDS[cls]}
    if not changes.keys() <= values.keys():
        raise TypeError(f"{cls.__name__} has no field {min(changes.keys() - values.keys())!r}")
    values.update(changes)
    return cls(**values)


class remembered(Generic[_T]):
    """A cached property of a frozen record, as `functools.cached_property`, but without a lock.

    In Python 3.11, `cached_property` has a lock per class. Without the lock, two threads may
    compute the value at the same time, so the computation must always give equal values.
    """

    def __init__(self, compute: Callable[[Any], _T]) -> None:
        self._compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, one: None, owner: type) -> remembered[_T]: ...
    @overload
    def __get__(self, one: object, owner: type) -> _T: ...
    def __get__(self, one: object, owner: type) -> remembered[_T] | _T:
        if one is None:
            return self
        found = one.__dict__[self._name] = self._compute(one)
        return found


# Record class -> names of its fields.
_FIELDS: dict[type, tuple[str, ...]] = {}


def declare_fields(cls: type) -> _Fields:
    """Makes a class a record (a frozen dataclass that is fast to declare), and returns its fields.

    Unlike `record`, adds no methods `__eq__` and `__hash__`: the class is compared by those that it
    has or inherits.
    """
    dataclasses.dataclass(init=False, repr=False, eq=False)(cls)
    fields = dataclasses.fields(cls)
    _FIELDS[cls] = tuple(f.name for f in fields)
    _add(cls, __init__=_init_of(cls, fields), __repr__=_repr)
    _add(cls, __setattr__=_refuse, __delattr__=_refuse)
    return fields


def _add(cls: type, **methods: Callable[..., Any]) -> None:
    for name, method in methods.items():
        if name not in vars(cls):
            setattr(cls, name, method)


def _init_of(cls: type, fields: _Fields) -> Callable[..., None]:
    """Returns an `__init__` method that sets the fields, by position or by name.

    The method calls `__post_init__` if the class has one.
    """
    known: dict[str, Any] = {"_set": object.__setattr__}
    params, named = ["self"], ["*"]
    lines: list[str] = []
    for f in fields:
        assert f.default_factory is dataclasses.MISSING, f"{cls.__name__}.{f.name}: a record"
        param = f.name
        if f.default is not dataclasses.MISSING:
            known[f"_{f.name}"] = f.default
            param += f" = _{f.name}"
        (named if f.kw_only else params).append(param)
        lines.append(f"    _set(self, {f.name!r}, {f.name})")
    if hasattr(cls, "__post_init__"):
        lines.append("    self.__post_init__()")
    signature = ", ".join(params + named if len(named) > 1 else params)
    made: dict[str, Callable[..., None]] = {}
    exec(f"def __init__({signature}):\n" + ("\n".join(lines) or "    pass"), known, made)
    made["__init__"].__qualname__ = f"{cls.__qualname__}.__init__"
    return made["__init__"]


def _values_of(names: Sequence[str]) -> Callable[[Any], Any]:
    """Returns a function that takes an object and returns the values of its fields `names` as a
    tuple.
    """
    if len(names) > 1:
        return attrgetter(*names)
    return lambda x: tuple(getattr(x, name) for name in names)


@recursive_repr()
def _repr(self: Any) -> str:
    shown = (f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self))
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _refuse(self: object, name: str, *value: object) -> NoReturn:
    raise dataclasses.FrozenInstanceError(f"cannot change field {name!r} of a frozen record")
