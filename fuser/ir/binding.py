"""Binding: computes the values of a fusion's symbols (`i0`, `i1`, ..) from the inputs of a call.

A symbolic extent takes the size of the first input axis that has this extent. Later axes with the
same extent, and every equality that the ops require, are checked. Extents are those of whole
tensors: if an axis is split over n devices, its extent is n times its local size, less the padding
if n does not divide a constant extent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fuser.ir.dtypes import misfit
from fuser.ir.fusion import TensorView
from fuser.ir.naming import in_ir, tensor_words
from fuser.ir.scalar.compiled import PythonText
from fuser.ir.scalar.constructors import (
    Const,
    Number,
    Scalar,
    Symbol,
    evaluate,
    int_value,
    symbols,
)
from fuser.support.errors import (
    FuserError,
    InputError,
    ShardingError,
    counted,
    padding_words,
    user_code,
)
from fuser.support.record import record
from fuser.support.torch_calls import class_check

if TYPE_CHECKING:
    from fuser.ir.fusion import Fusion

Argument = torch.Tensor | Number
Values = dict[Symbol, Number]


@record
class _Axis:
    """One axis of an input: its position, its extent, and over how many devices it is split.

    The extent is in canonical form: one symbol represents all symbols that are known to be equal.
    """

    tv: TensorView
    position: int
    extent: Scalar
    blocks: int

    def __str__(self) -> str:
        return f"axis {self.position} of {self.tv}"

    @property
    def padding(self) -> int:
        """The number of elements that the axis lacks to consist of full blocks, one per device.

        For 7 elements on 4 devices, the blocks have 2 elements, and this number is 1. It is 0 for a
        symbolic extent.
        """
        extent = int_value(self.extent)
        return 0 if extent is None else -extent % self.blocks

    def found(self, size: int) -> str:
        """Returns the size `size` of this axis as text, for an error message.

        If the axis is split over devices, the text also has the local size and the number of ranks.
        """
        if self.blocks == 1:
            return str(size)
        return f"{size} (local size {size // self.blocks} times {self.blocks} ranks)"

    def mismatch(self, expected: int, size: int) -> str:
        """Returns text about a wrong size of this axis: the size that is needed and the one passed.

        `expected` and `size` are sizes of the whole axis. If the axis is split over devices, the
        text has the sizes on one rank.
        """
        if self.blocks == 1:
            return f"size {expected} at axis {self.position}, but got {size}"
        n = self.blocks
        local, passed = (expected + self.padding) // n, (size + self.padding) // n
        return (
            f"size {local} at axis {self.position} on this rank ({expected} over {n} ranks), but "
            f"got {passed}"
        )


class Binder:
    """Computes the values of the symbols (`i0`, `i1`, ..) of one fusion from a call's arguments.

    - `declared` has the tensors and scalars to which the arguments of `bind` belong. By default,
      they are the fusion's inputs.
    - `blocks` returns, per axis of a tensor, over how many devices it is split. By default, no axis
      is split.
    """

    def __init__(
        self,
        fusion: Fusion,
        declared: Sequence[TensorView | Scalar] | None = None,
        *,
        blocks: Callable[[TensorView], Sequence[int]] | None = None,
    ) -> None:
        self._fusion = fusion
        self._declared = list(fusion.inputs if declared is None else declared)
        self._axes: list[tuple[_Axis, ...]] = []
        for value in self._declared:
            if not isinstance(value, TensorView):
                self._axes.append(())
                continue
            counts = blocks(value) if blocks is not None else (1,) * value.ndim
            sized = zip(value.shape(), counts, strict=True)
            self._axes.append(
                tuple(_Axis(value, i, fusion.canonical(x), n) for i, (x, n) in enumerate(sized))
            )
        self._at_once: Callable[[Sequence[Argument]], Values | None] | None = None
        self._is_known = False

    def bind(
        self, arguments: Sequence[Argument], known: Mapping[Symbol, Number] | None = None
    ) -> Values:
        """Returns the value of every symbol of the fusion for the arguments of one call.

        `known` has values of symbols that are known without the arguments. Sizes are also checked
        against them.

        Raises:
            InputError: two sizes contradict each other. The message names both tensors and axes.
            ShardingError: the number of devices does not divide the extent of an axis that is
                split and whose extent is symbolic.
        """
        if len(arguments) != len(self._declared):
            raise InputError(
                f"the program has {counted(len(self._declared), 'input')}, but {len(arguments)} "
                "were passed"
            )
        if not known:
            # Compiled at the second call, because many definitions are called only once.
            if self._at_once is None and self._is_known:
                self._at_once = self._make_at_once()
            self._is_known = True
            found = None if self._at_once is None else self._at_once(arguments)
            if found is not None:
                return found
        values: Values = dict(known or {})
        source: dict[Symbol, object] = {}
        later: list[tuple[_Axis, int]] = []
        for declared, axes, given in zip(self._declared, self._axes, arguments, strict=True):
            if not isinstance(given, torch.Tensor):
                if isinstance(declared, Symbol):
                    values[declared] = Const(given, declared.dtype).value
                    source[declared] = f"input scalar {declared}"
                elif isinstance(declared, TensorView):
                    raise InputError(
                        f"{tensor_words(declared)} must be a torch tensor, got {given!r}"
                        f"{in_ir(declared)}"
                    )
                continue
            if not isinstance(declared, TensorView):
                raise InputError(
                    f"the scalar input {declared} must be a number, got a tensor of shape "
                    f"{list(given.shape)}: pass its value, x.item()"
                )
            if given.dim() != len(axes):
                raise InputError(
                    f"{tensor_words(declared)} must have {counted(len(axes), 'axis')}, got a "
                    f"tensor of shape {list(given.shape)}{in_ir(declared)}"
                )
            for axis, local in zip(axes, given.shape, strict=True):
                size = local * axis.blocks - axis.padding
                if isinstance(axis.extent, Symbol) and axis.extent not in values:
                    values[axis.extent] = size
                    source[axis.extent] = axis
                else:
                    later.append((axis, size))
        complete(self._fusion, values)
        for axis, size in later:
            self._check_axis(axis, size, values, source, arguments)
        self._check_relations(values, source)
        return values

    def _make_at_once(self) -> Callable[[Sequence[Argument]], Values | None]:
        """Compiles a fast version of `bind`: one Python function that computes all symbols.

        The function takes the arguments of a call and returns the values. It returns None if some
        equality does not hold. It also returns None if it cannot compute every symbol in one pass
        over the inputs and then over the equalities of extents. `bind` then computes the values
        symbol by symbol, or raises the error.
        """
        text, order = PythonText(), list[Symbol]()
        names, lines, constant = text.names, text.lines, text.constant
        tensor, const = constant(torch.Tensor), constant(Const)
        later: list[tuple[Scalar, str]] = []

        def refuse_unless(condition: str) -> None:
            lines.append(f"if not ({condition}): return None")

        def define(symbol: Symbol, value: str) -> None:
            if symbol in names:
                refuse_unless(f"{names[symbol]} == {value}")
                return
            order.append(symbol)
            text.assign(symbol, value)

        for k, (declared, axes) in enumerate(zip(self._declared, self._axes, strict=True)):
            given = f"given[{k}]"
            if not isinstance(declared, TensorView):
                refuse_unless(f"not isinstance({given}, {tensor})")
                if isinstance(declared, Symbol):
                    define(declared, f"{const}({given}, {constant(declared.dtype)}).value")
                continue
            refuse_unless(f"isinstance({given}, {tensor})")
            sizes = [f"n{k}_{axis.position}" for axis in axes]
            lines.append(f"({''.join(f'{n}, ' for n in sizes)}) = {given}.shape")
            for axis, size in zip(axes, sizes, strict=True):
                size = size if axis.blocks == 1 else f"{size} * {axis.blocks} - {axis.padding}"
                if isinstance(axis.extent, Symbol):
                    define(axis.extent, size)
                else:
                    later.append((axis.extent, size))
        for x, y in self._fusion.equal_extents():
            are_known = [all(s in names for s in symbols(z)) for z in (x, y)]
            if are_known[1] and isinstance(x, Symbol):
                define(x, _counted(text, y))
            elif are_known[0] and isinstance(y, Symbol):
                define(y, _counted(text, x))
            elif all(are_known):
                refuse_unless(f"{_counted(text, x)} == {_counted(text, y)}")
            else:
                return lambda given: None
        for extent, size in later:
            if not all(s in names for s in symbols(extent)):
                return lambda given: None
            refuse_unless(f"{_counted(text, extent)} == {size}")
        values = ", ".join(f"{constant(s)}: {names[s]}" for s in order)
        run = text.function("given", f"{{{values}}}")

        def bind(given: Sequence[Argument]) -> Values | None:
            try:
                return run(given)
            except (ArithmeticError, TypeError, ValueError, FuserError):
                return None

        return bind

    def _check_axis(
        self,
        axis: _Axis,
        size: int,
        values: Values,
        source: Mapping[Symbol, object],
        arguments: Sequence[Argument],
    ) -> None:
        expected = _evaluated(axis.extent, values)
        if expected == size:
            return
        where = f"Expected input {self._declared.index(axis.tv)}, {axis.tv},"
        if expected is None:
            unknown = next(s for s in symbols(axis.extent) if s not in values)
            raise InputError(
                f"{where} to have extent {axis.extent} at axis {axis.position}, but no input "
                f"determines {unknown}: define {unknown} as a scalar input, or use a constant "
                "extent"
            )
        if axis.blocks > 1 and expected % axis.blocks and not axis.padding:
            raise ShardingError(
                f"axis {axis.position} of {tensor_words(axis.tv)} has extent {expected}, which "
                f"{axis.blocks} ranks cannot share equally; this rank passed a shard of "
                f"{size // axis.blocks}"
                f"{padding_words(expected, axis.blocks)}"
                f"{user_code(next(iter(axis.tv.cut_lines.values()), axis.tv.user_line()))}"
                f"{in_ir(axis.tv)}"
            )
        raw = axis.tv.shape()[axis.position]
        why = self._because(raw, axis.extent)
        if not symbols(axis.extent):
            # The user looks at the op first: the input may be right, and the op wrong.
            raise InputError(
                f"{f'{why[2:]} do not fit for these inputs. ' if why else ''}"
                f"{where} to have {axis.mismatch(expected, size)}. Tried to bind to a constant "
                f"value: {expected} as {size}{self._shard_hint(axis, values, arguments)}"
                f"{_spread_hint(axis, size) if why else user_code(axis.tv.user_line())}"
            )
        raise InputError(
            f"{where} to have extent {axis.extent} = {expected}{_from((axis.extent,), source)} at "
            f"axis {axis.position}, but got {axis.found(size)}{why}"
            f"{_spread_hint(axis, size) if why else ''}"
            f"{_SPREAD.format('the axis of size 1') if why and expected == 1 else ''}"
            f"{self._whole_hint(_source(axis.extent, source), expected, axis, size)}"
        )

    def _check_relations(self, values: Values, source: Mapping[Symbol, object]) -> None:
        for x, y in self._fusion.equal_extents():
            a, b = _evaluated(x, values), _evaluated(y, values)
            if a is not None and b is not None and a != b:
                raise InputError(
                    f"Expected extents {x} and {y} to be equal, but {x} = {a} and {y} = {b}"
                    f"{_from((x, y), source)}{self._because(x, y)}"
                    f"{self._whole_hint(_source(x, source), a, _source(y, source), b)}"
                )

    def _shard_hint(self, axis: _Axis, values: Values, arguments: Sequence[Argument]) -> str:
        """Returns a hint for an error message: the shape that each rank must pass for an input.

        Returns "" if no axis of the input is split over devices.
        """
        position = self._declared.index(axis.tv)
        axes, given = self._axes[position], arguments[position]
        cuts = [f"axis {a.position} over {a.blocks} ranks" for a in axes if a.blocks > 1]
        if not cuts or not isinstance(given, torch.Tensor):
            return ""
        sizes = [_evaluated(a.extent, values) for a in axes]
        is_whole = list(given.shape) == sizes
        shard = (
            str(a.extent if size is None else size // a.blocks)
            for a, size in zip(axes, sizes, strict=True)
        )
        return (
            f"; you passed {'the whole tensor' if is_whole else 'a tensor of shape'} "
            f"{list(given.shape)}, but {tensor_words(axis.tv)} is sharded along "
            f"{' and '.join(cuts)}: each rank must pass its shard [{', '.join(shard)}]; {_SHARDS}"
        )

    def _whole_hint(self, first: object, size: int, second: object, other: int) -> str:
        """Returns the hint that a rank passed a whole tensor instead of its shard, or "".

        `first` and `second` are axes of two inputs. Their global sizes `size` and `other` must be
        equal, but are not. A global size is computed as the local size times the number of ranks.
        If a rank passes the whole tensor, it is therefore too large by this factor. The hint is ""
        if neither size is too large by the factor.
        """
        if not isinstance(first, _Axis) or not isinstance(second, _Axis):
            return ""
        pairs = ((first, size, second, other), (second, other, first, size))
        for whole, large, axis, small in pairs:
            if large == small * whole.blocks > small:
                k, j = (self._declared.index(a.tv) for a in (whole, axis))
                return (
                    f"; input {k} says {large} and input {j} says {small}: did you pass the whole "
                    f"tensor as input {k}, which is sharded along axis {whole.position} over "
                    f"{whole.blocks} ranks? {_SHARDS}"
                )
        return ""

    def _because(self, x: Scalar, representative: Scalar) -> str:
        reason = self._fusion.extents.reason_of(x, representative)
        return f": {reason}" if reason else ""


_SHARDS = "multidevice.shard_tensor(whole, tensor of the definition) returns the shard"
# In torch, a size of 1 would be broadcast.
_SPREAD = "; to broadcast it, declare {} as 1 in define_tensor, not as -1"


def _spread_hint(axis: _Axis, size: int) -> str:
    """Returns a hint for the error message about two axes of unequal sizes, or "".

    If `size`, the size of the input axis `axis`, is 1, the user may have expected a broadcast. The
    hint says that an input axis is broadcast only if its extent is declared as 1.
    """
    return _SPREAD.format(f"axis {axis.position} of {axis.tv.label}") if size == 1 else ""


def _source(extent: Scalar, source: Mapping[Symbol, object]) -> object:
    return source.get(extent) if isinstance(extent, Symbol) else None


def _from(extents: Iterable[Scalar], source: Mapping[Symbol, object]) -> str:
    used = dict.fromkeys(s for x in extents for s in symbols(x) if s in source)
    return f" (from {', '.join(f'{s}: {source[s]}' for s in used)})" if used else ""


def complete(fusion: Fusion, values: Values) -> None:
    """Adds to `values`, in place, the values of symbols that follow from equalities of extents.

    For example, if i3 = 2 * i0 and i0 is known, i3 is added.
    """
    relations = fusion.equal_extents()
    is_done = False
    while not is_done:
        is_done = True
        for is_turned in (False, True):
            for pair in relations:
                x, y = pair[::-1] if is_turned else pair
                if not isinstance(x, Symbol) or x in values:
                    continue
                found = _evaluated(y, values)
                if found is not None:
                    values[x] = found
                    is_done = False


def _evaluated(x: Scalar, values: Mapping[Symbol, Number]) -> int | None:
    """Returns the value of an extent, or None if a symbol in it has no value yet."""
    if isinstance(x, Symbol):
        found = values.get(x)
        return None if found is None else int(found)
    if isinstance(x, Const):
        return int(x.value)
    return size_of(x, values) if all(s in values for s in symbols(x)) else None


def _counted(text: PythonText, x: Scalar) -> str:
    """Returns a Python expression for the extent `x`, converted to an int if necessary.

    The expression becomes a part of the function whose text is `text`. The caller ensures that this
    function has variables for the symbols of the extent.
    """
    return text.name(x) if isinstance(x, Symbol | Const) else f"int({text.name(x)})"


def size_of(x: Scalar, values: Mapping[Symbol, Number]) -> int:
    """Returns the value of an extent as an int, for the values of its symbols in `values`.

    An extent that contains a division by 0 has the value 0; no error is raised for it.

    Raises:
        InputError: a symbol of the extent has no value, because no input determines it.
    """
    try:
        return int(evaluate(x, values))
    except ZeroDivisionError:
        return 0
    except KeyError as error:
        raise undetermined(x, [str(error.args[0])]) from None


def undetermined(x: Scalar, missing: Sequence[str]) -> InputError:
    """Returns the error for an extent `x` whose symbols `missing` no input determines."""
    return InputError(
        f"the extent {x} cannot be computed, because no input determines {', '.join(missing)}: "
        "pass an input with this extent, or define it as a scalar input"
    )


def bind_inputs(fusion: Fusion, arguments: Sequence[Argument]) -> Values:
    """Returns the value of every symbol of the fusion for the arguments of one call.

    Raises the same errors as `Binder.bind`.
    """
    return Binder(fusion).bind(arguments)


# ------------------------------------------------------------------ signatures
def free_inputs(fusion: Fusion, tensors: Iterable[TensorView] | None = None) -> frozenset[int]:
    """Returns the positions of the scalar inputs whose values influence no shape.

    One compiled program can run with any value of such a scalar. `tensors` are the tensors whose
    shapes count, by default all tensors of the fusion.
    """
    scalars = structural_scalars(fusion, fusion.tensors() if tensors is None else tensors)
    structural = {s for x in scalars for s in symbols(x)}
    return frozenset(
        i for i, v in enumerate(fusion.inputs) if isinstance(v, Symbol) and v not in structural
    )


def structural_scalars(fusion: Fusion, tensors: Iterable[TensorView]) -> list[Scalar]:
    """Returns the scalars on which the shapes of `tensors` depend.

    These are their sizes and split factors, and the numbers of elements that slices and pads add or
    remove. Both sides of all equalities between the fusion's extents are also included.
    """
    related = (x for pair in fusion.equal_extents() for x in pair)
    return [*(x for tv in tensors for x in shape_scalars(tv)), *related]


def shape_scalars(tv: TensorView) -> list[Scalar]:
    """Returns the scalars on which the shape of a tensor depends.

    These are the extents of all its axes, its split factors, and the numbers of elements that
    slices and pads add or remove.
    """
    found: list[object] = []
    for t in tv.domain.transforms:
        found += (getattr(t, name, None) for name in ("factor", "left", "right"))
    for axis in tv.domain.axes.values():
        found += (axis.extent, axis.expanded)
    return [x for x in found if isinstance(x, Scalar)]


Signature = tuple[tuple[Any, ...], ...]


def inputs_text(signature: Signature) -> str:
    """Returns the shapes and numbers in a key of `signature_of` as text, for messages and reports.

    If the value of a number is not in the key, its type is in the text.
    """
    return ", ".join(
        str(list(kind))
        if isinstance(kind, torch.Size)
        else kind.__name__
        if value is None
        else str(value)
        for kind, value, *_ in signature
    )


def signature_of(arguments: Sequence[object], free: frozenset[int] = frozenset()) -> Signature:
    """Returns the key of a call's arguments, by which a cache finds the compiled program.

    - Tensor: shape, strides, dtype, device, class, whether the tensor is a lazy negative or
      conjugate view, and whether it records gradients. The elements are not in the key.
    - Number: its type. For an integer, the key also has the value, because shapes may depend on it.
      The value is omitted at the positions `free`, because no shape depends on these integers.

    Memory addresses and ranges of numbers are not in the key. `Contents.check` checks them in each
    call.

    Raises:
        InputError: a tensor has no strides or no memory.
    """
    try:
        # This runs in every call: a list is faster than a generator.
        return tuple(
            [
                (
                    v.shape,
                    v.stride(),
                    v.dtype,
                    v.device,
                    v.is_neg(),
                    v.is_conj(),
                    v.requires_grad,
                    v.__class__,
                )
                if isinstance(v, torch.Tensor)
                else (type(v), None if isinstance(v, float | complex) or i in free else v)
                for i, v in enumerate(arguments)
            ]
        )
    except RuntimeError as error:
        for i, v in enumerate(arguments):
            problem = isinstance(v, torch.Tensor) and tensor_problem(v)
            if problem:
                raise InputError(f"input {i} is {problem}") from None
        kinds = ", ".join(f"input {i} is a {type(v).__name__}" for i, v in enumerate(arguments))
        raise InputError(
            f"torch cannot return the shape and the strides of an input ({error}): {kinds}. Pass "
            "plain tensors"
        ) from error


# Subclasses override this if their values are stored elsewhere: sharded, functional, fake tensors.
_DISPATCH = "__torch_dispatch__"


def tensor_problem(tensor: torch.Tensor) -> str | None:
    """Returns the reason why kernels cannot read a tensor by its address and strides, or None.

    The reason completes the sentence "input 0 is ..".
    """
    if getattr(type(tensor), _DISPATCH) is not getattr(torch.Tensor, _DISPATCH):
        return f"a {type(tensor).__name__}, not a plain torch.Tensor: pass its local tensor"
    if tensor.is_nested:
        return "a nested tensor: pass its values() and offsets()"
    if tensor.is_quantized:
        return f"quantized ({tensor.dtype}): pass int_repr() and the scales"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}: pass to_dense()"
    if not (tensor.is_cpu or tensor.is_cuda):
        return f"on device {tensor.device}: kernels run on cpu and cuda"
    if tensor.is_neg() or tensor.is_conj():
        return "a lazy view: pass x.resolve_neg() or x.resolve_conj()"
    nbytes = _span_nbytes(tensor)
    nbytes += tensor.storage_offset() * tensor.element_size() if nbytes else 0
    try:
        found = tensor.untyped_storage().nbytes()
    except NotImplementedError:
        return "a tensor inside a function transform (torch.func), which has no memory to read"
    if found < nbytes:
        return f"a tensor of {nbytes} bytes, whose storage was resized to {found}"
    return (
        "a tensor of zeros without memory: pass x.clone()"
        if nbytes and not tensor.data_ptr()
        else None
    )


def _span_nbytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of memory from the first to the last element of a tensor, both included.

    Returns 0 for a tensor without elements.
    """
    count = tensor.numel()
    if tensor.is_contiguous() or not count:
        return count * tensor.element_size()
    span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return span * tensor.element_size()


_LISTS = frozenset((list, tuple))


class Contents:
    """Checks of a call's arguments that must be repeated in each call.

    A cache key (`signature_of`) identifies the shapes and dtypes of arguments. These checks concern
    what the key does not contain: the memory of tensors and the ranges of numbers.

    - The *places* of the arguments are the memory addresses of the tensors modulo `nbytes`, a
      power of two, because kernels depend on the alignment. Tensors without elements have no place.
      If all remainders are 0, the places are ().
    - `declared` are the fusion's inputs, and `arguments` those of the first call with the key.
    - `also` is a further check, which is called with the arguments. It may raise an error for
      numbers that an op does not accept.
    """

    def __init__(
        self,
        declared: Sequence[object],
        arguments: Sequence[object],
        nbytes: int,
        also: Callable[[Sequence[Any]], None] | None = None,
    ) -> None:
        self._tensors = [
            (i, _span_nbytes(v), v.element_size())
            for i, v in enumerate(arguments)
            if isinstance(v, torch.Tensor) and v.numel()
        ]
        self._numbers = [(i, d) for i, d in enumerate(declared) if isinstance(d, Scalar)]
        self._between = nbytes - 1
        self._also = also

    def check(self, arguments: Sequence[Any]) -> tuple[int, ...]:
        """Checks the arguments of a call, and returns their places.

        These are the remainders of the tensors' memory addresses modulo an alignment, or () if all
        are 0.

        Raises:
            InputError: the storage of a tensor has become too small, or a number is out of range.
        """
        i = bits = 0
        try:
            for i, nbytes, itemsize in self._tensors:
                v = arguments[i]
                has_room = v.untyped_storage().nbytes() >= nbytes + v.storage_offset() * itemsize
                address = v.data_ptr() if has_room else 0
                if not address:
                    raise InputError(f"input {i} is {tensor_problem(v)}")
                bits |= address
        except NotImplementedError:
            raise InputError(f"input {i} is {tensor_problem(arguments[i])}") from None
        for i, declared in self._numbers:
            problem = misfit(arguments[i], declared.dtype)
            if problem:
                raise InputError(f"Expected input {i}, {declared}, to fit its dtype, but {problem}")
        if self._also is not None:
            self._also(arguments)
        return self.places(arguments) if bits & self._between else ()

    def places(self, arguments: Sequence[Any]) -> tuple[int, ...]:
        """Returns the places of the arguments, without any check.

        These are the remainders of the tensors' memory addresses modulo an alignment, or () if all
        are 0.
        """
        found = tuple([arguments[i].data_ptr() & self._between for i, _, _ in self._tensors])
        return found if any(found) else ()

    def glance(self, arguments: Sequence[object]) -> Callable[[Any], tuple[int, ...] | None] | None:
        """Compiles a fast version of `check`, or returns None if some argument is a number.

        Like `check`, the compiled function takes the arguments of a call and returns their places:
        the remainders of memory addresses modulo an alignment. It returns None if the arguments are
        so different from `arguments` that another compiled program may be needed, or if `check`
        would raise an error. The caller then looks up the program by `signature_of`.
        """
        tensors = [v for v in arguments if isinstance(v, torch.Tensor)]
        are_alike = class_check(tensors)
        if are_alike is None or len(tensors) < len(arguments):
            return None
        rows, between, places = self._tensors, self._between, self.places

        def look(given: Any) -> tuple[int, ...] | None:
            if type(given) not in _LISTS:
                return None
            bits = 0
            try:
                for v in given:
                    # Asking a nested tensor for strides would abort the process.
                    if v.is_nested:
                        return None
                if not are_alike(*given):
                    return None
                for i, nbytes, itemsize in rows:
                    v = given[i]
                    if v.untyped_storage().nbytes() < nbytes + v.storage_offset() * itemsize:
                        return None
                    bits |= v.data_ptr()
            except Exception:  # a non-tensor argument may raise anything
                return None
            return places(given) if bits & between else ()

        return look
