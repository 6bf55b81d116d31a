"""Checks the inputs of a host program before a run, and computes the values of its symbols.

The kind, dtype, device and layout of each input must fit the declaration in the program. The module
also handles inputs that share memory, and checks numbers that must fit the dtype of a result.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch.autograd.graph import increment_version

from fuser.ir.binding import Argument, Binder, Values, tensor_problem
from fuser.ir.dtypes import (
    DataType,
    category,
    dtype_text,
    is_complex,
    is_floating,
    misfit,
    nbytes_of,
    to_torch,
    torch_dtype_text,
)
from fuser.ir.fusion import Fusion, TensorOp, TensorView, Value
from fuser.ir.memory_layout import MemoryOrder, expanded_positions, memory_order
from fuser.ir.op import Op, walk
from fuser.ir.scalar.compiled import Computed
from fuser.ir.scalar.constructors import Apply, Const, Number, Scalar, Symbol, symbols
from fuser.support.arguments import show
from fuser.support.errors import InputError, user_code
from fuser.support.inputs import check_count
from fuser.support.record import record
from hostir.ir.buffer_aliasing import Storage
from hostir.ir.effects import Writes, effects_of
from hostir.ir.program import HostIrContainer
from hostir.ir.shard_layout import parts

_ACCEPTS: dict[str, tuple[type, ...]] = {
    "bool": (bool, int),
    "int": (bool, int),
    "float": (bool, int, float),
    "complex": (bool, int, float, complex),
}


@dataclass(frozen=True)
class _TensorSpec:
    """The properties that a caller's tensor must have to be passed as the input number `index` of a
    program.

    `order` has the axes in memory order, each with a flag: whether the axis must be contiguous.
    """

    index: int
    tv: TensorView
    dtype: torch.dtype
    order: MemoryOrder
    # The axes that are expanded: memory has one element along such an axis.
    expanded: tuple[int, ...]
    # Whether the memory order of the axes is their logical order, without expanded axes.
    is_in_order: bool

    def refuses(self, text: str, *, head: str = "") -> InputError:
        """Returns the error to raise if a caller's tensor does not fit this input.

        The message is `<head>Expected input <number>, <tensor of the program>, <text>`, followed by
        the user's source line of the input, if the input has one.
        """
        line = user_code(self.tv.user_line())
        return InputError(f"{head}Expected input {self.index}, {self.tv}, {text}{line}")


def spec_of(index: int, tv: TensorView) -> _TensorSpec:
    """Returns the properties that a caller's tensor must have to be passed for `tv`.

    `tv` is input number `index` of the program.
    """
    order = memory_order(tv)
    expanded = expanded_positions(tv)
    is_in_order = not expanded and all(p == i for i, (p, _) in enumerate(order))
    return _TensorSpec(index, tv, to_torch(tv.dtype()), order, expanded, is_in_order)


class InputBinder:
    """Checks the inputs of one program, and computes the values of the program's symbols.

    The sizes of tensors and the scalar inputs determine the symbols.
    """

    def __init__(self, values: Fusion) -> None:
        self._specs: list[_TensorSpec | Scalar] = [
            spec_of(i, v) if isinstance(v, TensorView) else v for i, v in enumerate(values.inputs)
        ]
        self._declared, self._lines = values.inputs, values.scalar_lines
        # Whether every symbol is an extent, because no input is a scalar.
        self.has_only_tensors = all(isinstance(v, TensorView) for v in values.inputs)
        self._updated = {a.into: a.out for a in values.aliases}
        self._binder = Binder(values, blocks=parts)

    def bind(self, inputs: Sequence[Argument], device: torch.device) -> Values:
        """Checks the inputs of a run, and returns the value of every symbol of the program.

        Tensors must be on `device`. Raises `InputError` for an input that does not fit its
        declaration. If two inputs disagree about a symbol, the message names both. Raises
        `ShardingError` if an extent is not divisible by the size of the mesh.
        """
        check_count(len(inputs), self._declared, self._lines)
        for i, (spec, value) in enumerate(zip(self._specs, inputs, strict=True)):
            if isinstance(spec, _TensorSpec):
                check_tensor(spec, value, device)
            else:
                check_scalar(i, spec, value, self._lines)
        values = self._binder.bind(inputs)
        for spec, value in zip(self._specs, inputs, strict=True):
            if isinstance(spec, _TensorSpec) and isinstance(value, torch.Tensor):
                _check_layout(spec, value)
                if spec.tv in self._updated and overlaps_itself(value):
                    raise spec.refuses(
                        f"which is updated with {self._updated[spec.tv]}, to have separate memory "
                        f"for every element, but got shape {tuple(value.shape)} with strides "
                        f"{value.stride()}: pass a contiguous copy"
                    )
        return values

    def values(self, inputs: Sequence[Argument]) -> Values:
        """Returns the value of every symbol of the program, without checking the inputs.

        The caller ensures that the inputs have been checked.
        """
        return self._binder.bind(inputs)


def check_tensor(spec: _TensorSpec, value: Argument, device: torch.device) -> None:
    """Raises `InputError` unless `value` is a tensor with the declared dtype and dimensions.

    `spec` has the declaration of the input; the number of dimensions must be equal. The tensor must
    be on `device`, or on the CPU if it was declared as a CPU scalar.
    """
    if not isinstance(value, torch.Tensor):
        raise spec.refuses(f"to be an at::Tensor but got scalar {show(value)}")
    problem = tensor_problem(value)
    if problem:
        raise spec.refuses(f"to be a plain tensor, but it is {problem}")
    tv = spec.tv
    if value.dim() != tv.ndim:
        raise spec.refuses(
            f"to be bound to a tensor of rank {tv.ndim}, but got a tensor of rank {value.dim()}"
        )
    if value.dtype != spec.dtype:
        raise spec.refuses(
            f"to be bound to a tensor of dtype {dtype_text(tv.dtype())}, but got a "
            f"tensor of dtype {torch_dtype_text(value.dtype)}; cast the tensor first"
        )
    wanted = torch.device("cpu") if tv.is_cpu_scalar else device
    if value.device != wanted:
        raise spec.refuses(
            f"to be bound to a tensor on device {wanted}, but got a tensor on device "
            f"{value.device}; move the tensor first"
        )


def _check_layout(spec: _TensorSpec, value: torch.Tensor) -> None:
    """Raises `InputError` if the strides of `value` contradict the declaration of the input.

    An axis that was declared contiguous must have no gaps in memory, and an expanded axis must have
    stride 0.
    """
    if spec.is_in_order and value.is_contiguous():
        return
    if value.numel() == 0:
        return
    for position in spec.expanded:
        if value.size(position) > 1 and value.stride(position):
            raise spec.refuses(
                f"which is expanded, to have stride 0 at axis {position}, but got shape "
                f"{tuple(value.shape)} with strides {value.stride()}",
                head="Stride mismatch with contiguity info. ",
            )
    misplaced = misplaced_axis(spec.order, value)
    if misplaced is not None:
        position, expected = misplaced
        raise spec.refuses(
            f"to have stride {expected} at axis {position}, but got shape "
            f"{tuple(value.shape)} with strides {value.stride()}; declare the axis "
            "non-contiguous to pass such a tensor",
            head="Stride mismatch with contiguity info. ",
        )


def misplaced_axis(order: MemoryOrder, value: torch.Tensor) -> tuple[int, int] | None:
    """Returns (axis, expected stride) for the innermost axis of `value` that has a wrong stride.

    `order` has the axes in memory order, each with the declared flag: whether the axis is
    contiguous, that is, has no gaps in memory. A stride is wrong if the flag is set, but memory has
    gaps along the axis. Returns None if all strides are right.
    """
    expected = 1
    for position, flag in reversed(order):
        size, stride = value.size(position), value.stride(position)
        if flag is None:
            continue
        if flag and size > 1 and stride != expected:
            return position, expected
        expected = size * (stride if size > 1 else expected)
    return None


def check_scalar(
    index: int, spec: Scalar, value: Argument, lines: Mapping[Scalar, str] = MappingProxyType({})
) -> None:
    """Raises `InputError` unless `value` is a number that fits the dtype of `spec`, the program's
    scalar input number `index`.

    `lines` has the user's source lines of scalar inputs, for the message.
    """
    if isinstance(value, torch.Tensor):
        advice = "" if value.dim() else ". A scalar input takes a number: pass t.item()"
        raise InputError(
            f"Expected input {index}, {spec}, to be a scalar but got "
            f"{torch_dtype_text(value.dtype)} tensor of rank {value.dim()}{advice}"
            f"{user_code(lines.get(spec, ''))}"
        )
    if not isinstance(value, _ACCEPTS[category(spec.dtype)]):  # pyright: ignore[reportUnnecessaryIsInstance]
        shown = f"({value.real:g},{value.imag:g})" if isinstance(value, complex) else value
        raise InputError(
            f"Input {index}, {spec}: Scalar value {shown} is not compatible with the expected data "
            f"type: {dtype_text(spec.dtype)}.{user_code(lines.get(spec, ''))}"
        )
    problem = misfit(value, spec.dtype)
    if problem:
        raise InputError(
            f"Expected input {index}, {spec}, to fit its dtype, but "
            f"{problem}{user_code(lines.get(spec, ''))}"
        )


def is_computed(tv: TensorView) -> bool:
    """Whether the size of an axis of `tv` must be computed before a caller's tensor can be compared
    with `tv`.

    This is so if the size is a formula of symbols, or if the axis is divided among the devices of a
    mesh.
    """
    is_given = all(isinstance(x, Symbol | Const) for x in tv.shape())
    return not is_given or any(n > 1 for n in parts(tv))


def device_of(declared: Sequence[Value], inputs: Sequence[Argument]) -> torch.device:
    """Returns the device on which a program runs: that of the first tensor input.

    Inputs that are declared as CPU scalars are ignored. Without a tensor input, returns torch's
    default device. `declared` are the program's inputs, and `inputs` the values that the caller
    passes.
    """
    for value, given in zip(declared, inputs, strict=False):
        is_scalar = isinstance(value, TensorView) and value.is_cpu_scalar
        if isinstance(given, torch.Tensor) and not is_scalar:
            return given.device
    return torch.get_default_device()


# ----------------------------------------------------------------------
# Inputs that share memory with an input that is updated in place.
#
# A program behaves as if it read all inputs first and wrote its updates at the end. If an updated
# input shares elements with an input that is only read, the latter is copied for the run. Two
# updated inputs that share elements raise an error, because one update would be lost.

Body = Callable[[list[Argument]], list[torch.Tensor]]
_Layout = tuple[tuple[int, ...], tuple[int, ...], int]


def written_inputs(program: HostIrContainer, storage: Storage) -> tuple[int, ...]:
    """Returns the positions of those inputs whose memory the program overwrites.

    These are inputs that an output of the program updates in place, and inputs into which an op
    writes.
    """
    effects = (e for op in walk(program.ops) for e in effects_of(op, storage.buffered))
    written = {storage.root(e.tensor) for e in effects if isinstance(e, Writes)}
    written.update(alias.into for alias in program.aliases)
    return tuple(i for i, value in enumerate(program.inputs) if value in written)


@contextmanager
def noted(tensors: Sequence[Argument], written: Sequence[int]) -> Generator[None]:
    """Returns a context for a run. When the context ends, autograd is told which tensors the run
    has overwritten, even if the run has failed.

    `written` has the positions of these tensors in `tensors`. A later backward pass that needs an
    old value raises an error, instead of using the new value.
    """
    try:
        yield
    finally:
        changed = (tensors[i] for i in written if i < len(tensors))
        if found := [x for x in changed if isinstance(x, torch.Tensor)]:
            increment_version(found)


class Updates:
    """Protects inputs that share memory with an input which the program updates in place.

    Such an input is copied before the run, so that the run reads the old values.
    """

    def __init__(self, program: HostIrContainer) -> None:
        self._program = program
        place = {v: i for i, v in enumerate(program.inputs)}
        # Position -> the user's line of the update.
        self._written = {place[a.into]: a.where for a in program.aliases if a.into in place}
        # The (signature, addresses) of the last inputs without shared memory.
        self._apart: object = None

    def are_apart(self, inputs: Sequence[Argument], signature: object) -> bool:
        """Whether each input that the program updates in place has memory that no other input
        shares. If the result is False, an input that shares memory with an updated one must be
        copied before a run.

        `signature` is a key of the inputs' layouts, by which the last answer is cached. Raises
        `InputError` if two updated inputs have an element in common, because one update would be
        lost.
        """
        addresses = [x.data_ptr() if isinstance(x, torch.Tensor) else 0 for x in inputs]
        if self._apart == (signature, addresses):
            return True
        is_apart = not self._shared(inputs)
        if is_apart:
            self._apart = (signature, addresses)
        return is_apart

    def run(self, inputs: list[Argument], body: Body) -> list[torch.Tensor]:
        """Calls `body`, which runs the program, on `inputs`. An input that shares memory with an
        input that the program updates in place is replaced by a copy.

        Returns the outputs of `body`. If an output is such a copy, the original input is returned
        instead.
        """
        copies = {i: _copy(_tensor(inputs[i])) for i in sorted(self._shared(inputs))}
        outputs = body([copies.get(i, x) for i, x in enumerate(inputs)])
        given = {id(copy): _tensor(inputs[i]) for i, copy in copies.items()}
        return [given.get(id(out), out) for out in outputs]

    def _shared(self, inputs: Sequence[Argument]) -> set[int]:
        """Returns the positions of inputs that must be copied, because an update would change them.

        These inputs are only read and share elements with an updated input. Raises `InputError` if
        two updated inputs share elements, because one update would be lost.
        """
        tensors = {i: x for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.numel()}
        # In the order of addresses: only tensors whose byte ranges overlap are compared.
        order = sorted(tensors, key=lambda i: tensors[i].data_ptr())
        found: set[int] = set()
        open_: list[int] = []
        for i in order:
            x = tensors[i]
            open_ = [j for j in open_ if _end(tensors[j]) > x.data_ptr()]
            for j in open_:
                written = {i, j} & self._written.keys()
                if written and share_elements(tensors[j], x):
                    if len(written) == 2:
                        raise self._lost_update((min(i, j), max(i, j)), inputs)
                    found |= {i, j} - written
            open_.append(i)
        return found

    def _lost_update(self, pair: tuple[int, int], inputs: Sequence[Argument]) -> InputError:
        first, second = (
            f"input {i}, {self._program.inputs[i]} (shape {tuple(x.shape)}, strides {x.stride()}, "
            f"byte {x.data_ptr() - x.untyped_storage().data_ptr()} of its storage)"
            for i, x in ((i, _tensor(inputs[i])) for i in pair)
        )
        where = " and ".join(dict.fromkeys(self._written[i] for i in pair if self._written[i]))
        return InputError(
            f"{first}, and {second}, share elements, and both are updated in place: one update "
            f"would be lost; pass a copy of one of them{user_code(where)}"
        )


def _tensor(x: Argument) -> torch.Tensor:
    assert isinstance(x, torch.Tensor), f"{x} has no memory"
    return x


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def _end(x: torch.Tensor) -> int:
    return x.data_ptr() + _span(x.shape, x.stride()) * x.element_size()


def _copy(x: torch.Tensor) -> torch.Tensor:
    """Returns a copy of `x` with the same strides, in memory of its own. If `x` has gaps in memory,
    the elements in the gaps are copied, too.
    """
    flat = x.as_strided((_span(x.shape, x.stride()),), (1,))
    return flat.clone().as_strided(x.shape, x.stride(), 0)


def share_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the tensors `a` and `b` have a byte of memory in common."""
    if a.device != b.device or not a.numel() or not b.numel():
        return False
    layouts = ((tuple(t.shape), t.stride(), t.element_size()) for t in (a, b))
    return _share(*layouts, b.data_ptr() - a.data_ptr())


@lru_cache(maxsize=1024)
def _share(a: _Layout, b: _Layout, distance: int) -> bool:
    ends = [_span(shape, strides) * size for shape, strides, size in (a, b)]
    if distance >= ends[0] or -distance >= ends[1]:
        return False
    if distance == 0 or (_is_dense(*a[:2]) and _is_dense(*b[:2])):
        return True
    low = min(0, distance)
    marks = torch.zeros(max(ends[0], distance + ends[1]) - low, dtype=torch.bool)
    _bytes_of(marks, a, -low).fill_(True)
    return bool(_bytes_of(marks, b, distance - low).any())


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a tensor with this shape and these strides has no gaps in memory."""
    expected = 1
    for n, stride in sorted(zip(shape, strides, strict=True), key=lambda x: x[1]):
        if n > 1 and stride > expected:
            return False
        expected = max(expected, expected + (n - 1) * stride)
    return True


def _bytes_of(marks: torch.Tensor, layout: _Layout, offset: int) -> torch.Tensor:
    shape, strides, size = layout
    return marks.as_strided((*shape, size), (*(s * size for s in strides), 1), offset)


def overlaps_itself(x: torch.Tensor) -> bool:
    """Whether two elements of `x` may have the same address, as with an expanded axis or a sliding
    window.

    Such a tensor cannot be written in place. The test only compares strides with extents, so it may
    return True for an unusual tensor without such elements.
    """
    reach = 1
    for n, stride in sorted(zip(x.shape, x.stride(), strict=True), key=lambda s: s[1]):
        if n > 1:
            if stride < reach:
                return True
            reach += (n - 1) * stride
    return False


# ----------------------------------------------------------------------
# Scalar inputs that must be representable in the dtype of a result; other values raise an error.
#
#     y = fd.ops.clamp(x, None, s)     x of Int32, s an Int input: 2**40 would be 0 in 32 bits
#
# Constants are checked when the op is defined. Integer sums, products and bit operations wrap
# instead, as in torch: their results are correct modulo 2**32.


@record
class _Exact:
    """A scalar operand of an op that must be representable in `dtype`, the dtype of the op's
    result. Otherwise the op would compute with another number than the user passed.
    """

    scalar: Scalar
    dtype: DataType
    op: TensorOp


class ExactNumbers:
    """Checks the scalar operands of a program's ops that must be representable in the dtype of the
    op's result. An example is the limit of `clamp` on an Int32 tensor.

    `ops` are all ops of the program, and `inputs` are the program's inputs.
    """

    def __init__(self, ops: Iterable[Op], inputs: Sequence[object]) -> None:
        self._inputs = [(i, v) for i, v in enumerate(inputs) if isinstance(v, Symbol)]
        # Symbols that the inputs bind; all others are loop indices.
        bound = {v for _, v in self._inputs}
        for value in inputs:
            if isinstance(value, TensorView):
                bound.update(s for x in value.shape() for s in symbols(x))
        found: dict[tuple[Scalar, DataType], _Exact] = {}
        for op in ops:
            for exact in _of(op):
                if bound.issuperset(symbols(exact.scalar)) and symbols(exact.scalar):
                    found.setdefault((exact.scalar, exact.dtype), exact)
        self._found = list(found.values())
        self._values = Computed([exact.scalar for exact in self._found])

    def __bool__(self) -> bool:
        return bool(self._found)

    def check(self, values: Mapping[Symbol, Number]) -> None:
        """Raises `InputError` for the first scalar operand that its op's result cannot represent.

        `values` has the values of all symbols. The message names the op.
        """
        for exact, value in zip(self._found, self._values(values), strict=True):
            problem = misfit(value, exact.dtype)
            if problem:
                raise self._refusal(exact, problem, values)

    def check_of(self, values: Mapping[Symbol, Number]) -> Callable[[Sequence[Any]], None]:
        """Returns a function that makes the same check as `check` for later calls with inputs of
        the same sizes.

        The function takes the list of a call's inputs. `values` has the values of symbols for the
        first inputs; later calls may pass other scalars.
        """
        known = dict(values)
        positions = {v: i for i, v in self._inputs}
        # Fast path, because calls take microseconds: comparisons suffice if all scalars are inputs.
        ranges = [
            (positions[exact.scalar], *_range_of(exact.dtype))
            for exact in self._found
            if isinstance(exact.scalar, Symbol) and exact.scalar in positions
            if not is_complex(exact.dtype)
        ]
        are_inputs = len(ranges) == len(self._found)

        def check(arguments: Sequence[Any]) -> None:
            if are_inputs:
                for i, low, high in ranges:
                    if not low <= arguments[i] <= high:
                        break
                else:
                    return
            known.update((v, Const(arguments[i], v.dtype).value) for i, v in self._inputs)
            self.check(known)

        return check

    def _refusal(self, exact: _Exact, problem: str, values: Mapping[Symbol, Number]) -> InputError:
        positions = {v: i for i, v in self._inputs}
        names = ", ".join(
            f"{s} = {values[s]}" + (f" (input {positions[s]})" if s in positions else "")
            for s in symbols(exact.scalar)
        )
        op, scalar = exact.op, exact.scalar
        number = names if isinstance(scalar, Symbol) else f"{scalar} with {names}"
        return InputError(
            f"{op.name}: {number}: {problem}, the dtype of {op.out_tensor}: cast the tensor first, "
            f"or pass a number that fits{user_code(op.where) if op.where else ''}"
        )


def _range_of(dtype: DataType) -> tuple[Number, Number]:
    """Returns the smallest (most negative) and the largest finite value of the dtype `dtype`."""
    own = to_torch(dtype)
    info = torch.finfo(own) if is_floating(dtype) else torch.iinfo(own)
    return info.min, info.max


def _of(op: Op) -> Iterator[_Exact]:
    if not isinstance(op, TensorOp):
        return
    dtype = op.out_tensor.dtype()
    for x in op.exact_numbers():
        # Skip the casts to the result's dtype that the op itself has added.
        while isinstance(x, Apply) and x.op.startswith("cast:") and _is_narrower(x, x.args[0]):
            x = x.args[0]
        if category(x.dtype) == category(dtype) and nbytes_of(x.dtype) > nbytes_of(dtype):
            yield _Exact(x, dtype, op)


def _is_narrower(x: Scalar, other: Scalar) -> bool:
    is_alike = category(x.dtype) == category(other.dtype)
    return is_alike and nbytes_of(x.dtype) < nbytes_of(other.dtype)
