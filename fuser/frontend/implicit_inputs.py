"""Inputs that programs have in addition to the user's: seeds, sizes and values of CPU scalars.

Random ops without a seed get two inputs, seed and offset, which determine their numbers. Each call
takes the values from torch's generator. In this example, i1 is the seed and i2 the offset; a second
op uses the next offset:

    u = rng_uniform({i0}, float)   ->   u = rng_uniform({i0}, float, i1, i2)     inputs .., i1, i2
    v = rng_uniform({i0}, float)   ->   v = rng_uniform({i0}, float, i1, i2 + 1)

A program is then a function of its inputs, and a recorded run still draws new numbers in each
repetition. The generator is that of the device on which the program runs, as for torch's own ops.

- On CUDA, the generator has a seed and an offset. Each op advances the generator's offset by 4, and
  the op's own offset (`rng_offset`) is a quarter of it. After `torch.manual_seed(s)`, a program
  with one random op therefore draws with `rng_seed=s, rng_offset=n` in its n-th call, counted from
  0.
- On the CPU, there is no offset: each call draws a seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeGuard, TypeVar

import torch
from torch.autograd import forward_ad

from fuser.ir.binding import Argument, Values, shape_scalars, structural_scalars
from fuser.ir.dtypes import DataType, category, misfit
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.ops.nodes import FullOp, RandomOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import (
    Apply,
    Const,
    Scalar,
    Symbol,
    children,
    evaluate,
    is_int,
    symbols,
)
from fuser.ir.scalar.scalar_nodes import postorder
from fuser.ir.types import MemoryType
from fuser.passes.concretize import replace_scalars
from fuser.support.errors import InputError, UnsupportedError, user_code, warn
from fuser.support.inputs import check_count, device_of, flatten
from fuser.support.locks import make_lock
from fuser.support.record import record
from fuser.support.torch_calls import generator_of
from hostir.runtime.inputs import InputBinder, check_scalar, check_tensor, spec_of

T = TypeVar("T")
Device = int | str | torch.device | None
# An op of torch increases the offset of a CUDA generator by at least this number.
_STEP = 4
_lock = make_lock()


class Draws:
    """The random ops of a definition that have no seed, and the two inputs (seed and offset) that
    determine their numbers.

    `fusion` is a copy of the definition whose last two inputs are the seed and the offset of these
    ops.
    """

    def __init__(self, defined: Fusion) -> None:
        self.fusion, _ = defined.copy()
        self._declared = list(self.fusion.inputs)
        seed, offset = (self.fusion.new_symbol(DataType.Int) for _ in range(2))
        ops = list(self.fusion.exprs)
        mine = [i for i, op in enumerate(ops) if _draws(op)]
        for k, i in enumerate(mine):
            ops[i] = ops[i].replace(seed=seed, offset=sc.add(offset, k))
        self.fusion.exprs = ops
        self.fusion.inputs += [seed, offset]
        self._count = len(mine)
        op = ops[mine[0]]
        self._reader = op.name + (f" at {op.where}" if op.where else "")
        why = f"of torch's generator (torch.manual_seed), from which {self._reader} draws,"
        # Names of the two inputs in error messages.
        self.names = tuple(f"the {what} {why}" for what in ("seed", "offset"))

    @staticmethod
    def of(fusion: Fusion) -> Draws | None:
        """Returns the object that supplies a seed and an offset to the random ops of the definition
        that have no seed; None if there are no such ops.
        """
        return Draws(fusion) if any(map(_draws, fusion.exprs)) else None

    def complete(self, inputs: Iterable[object], key: Sequence[int] = (0, 0)) -> list[Argument]:
        """Returns the inputs of `fusion`: the caller's inputs as a flat list, then seed and offset
        of the random ops.

        `key` has the seed and the offset.

        Raises:
            InputError: the number of inputs is wrong.
        """
        given = flatten(inputs, declared=self._declared)
        check_count(len(given), self._declared, self.fusion.scalar_lines)
        return [*given, *key]

    def take(self, inputs: Iterable[object], device: Device) -> list[Argument]:
        """Returns the inputs of a run that begins now, with seed and offset of the random ops.

        Seed and offset are taken from torch's generator, which is advanced.
        """
        given = self.complete(inputs)
        given[-2:] = self._take(device_of(given, device))
        return given

    def look(
        self, inputs: Iterable[object], device: Device
    ) -> tuple[list[Argument], Callable[[Callable[[], T]], Callable[[], T]]]:
        """Returns the inputs of a run that has not begun, with seed and offset of the random ops,
        and a function that wraps the run.

        All ranks (processes of the job) must still agree to the run. Torch's generator is advanced
        only when the wrapped run begins. If the ranks do not agree, nothing runs, and the
        generators of all ranks stay equal. Other threads may draw at the same time. Therefore, seed
        and offset are read from a copy of torch's generator, which is never set back.
        """
        given = self.complete(inputs)
        where = device_of(given, device)
        mine = torch.Generator(where)
        mine.set_state(generator_of(where).get_state())
        given[-2:] = self._key(mine)
        return given, lambda run: partial(self._take_and_run, where, run)

    def _take_and_run(self, where: torch.device, run: Callable[[], T]) -> T:
        self._take(where)
        return run()

    def _take(self, device: torch.device) -> tuple[int, int]:
        return self._key(generator_of(device))

    def _key(self, generator: torch.Generator) -> tuple[int, int]:
        """Returns the seed and the offset of the next random op, and advances `generator` past all
        random ops of one run.

        On the CPU, where torch's generator has no offset, returns a drawn number and 0.
        """
        if generator.device.type != "cuda":
            drawn = torch.empty((), dtype=torch.int64, device="cpu")
            return int(drawn.random_(generator=generator)), 0
        with _lock:
            try:
                offset = generator.get_offset()
                generator.set_offset(offset + _STEP * self._count)
            except RuntimeError as error:
                raise UnsupportedError(
                    f"{self._reader} draws from torch's generator. This is not possible while you "
                    "capture a CUDA graph, because each replay would use the same numbers: pass "
                    f"rng_seed and rng_offset to this op ({str(error).partition(chr(10))[0]})"
                ) from error
        seed = generator.initial_seed()
        return (seed + 2**63) % 2**64 - 2**63, offset // _STEP


@dataclass(frozen=True)
class _Seed:
    """The seed of random ops, as one of the numbers that ranks (processes of the job) compare
    before a run.

    On the CPU, the seed is a number that the generator drew. Messages therefore also show the seed
    that the user set.
    """

    number: object
    inputs: Sequence[object]
    device: Device

    def __repr__(self) -> str:
        return repr(self.number)

    def __str__(self) -> str:
        is_drawn = device_of(self.inputs, self.device).type != "cuda"
        return f"{self.number}" + (
            f" (of torch.initial_seed() {torch.initial_seed()})" if is_drawn else ""
        )


def compared_numbers(
    given: Sequence[object], positions: Sequence[int], device: Device, draws: Draws | None
) -> tuple[object, ...]:
    """Returns the scalar inputs that ranks (processes of the job) compare in each call: those of
    the inputs `given` at `positions`.

    Ranks compare the `repr` of each number, and messages show its `str`. If the program draws
    random numbers (`draws`), the last two inputs are seed and offset.
    """
    numbers = tuple(given[i] for i in positions)
    if draws is None or not positions:
        return numbers
    *others, seed, offset = numbers
    return *others, _Seed(seed, given, device), offset


def _draws(op: object) -> bool:
    return isinstance(op, RandomOp) and op.seed is None


# ----------------------------------------------------------------------
# Sizes that a definition computes from floats become inputs of the program, one Int for each.
#
#     T1[iS2{cast_nvfuser_index_t(f2)}, iS3{2}] = reshape(T0)     inputs T0, f2
#     T1[iS2{i4}, iS3{2}] = reshape(T0)                           inputs T0, f2, i4
#
# The host computes each of them once per call, so that kernels, recorded plans and ranks all have
# the same integer. An op casts an extent to Index: a value that is not an integer is then an error.
# A cast to Int, which only users write, truncates.


class FloatSizes:
    """The tensor sizes of a definition that are computed from floats. The host computes them once
    per call.

    `fusion` is a copy of the definition in which each of these sizes is an additional Int input, at
    the end of the inputs.
    """

    def __init__(self, defined: Fusion, sizes: Iterable[Scalar]) -> None:
        self._declared = list(defined.inputs)
        self._scalars = [(i, v) for i, v in enumerate(self._declared) if isinstance(v, Symbol)]
        given = {v for _, v in self._scalars}
        # First the sizes that depend only on scalar inputs. A size precedes others that are
        # computed from it, so that an error names the number that is wrong.
        self._sizes = sorted(sizes, key=lambda x: (not given.issuperset(symbols(x)), x.depth))
        self._of_scalars = sum(given.issuperset(symbols(x)) for x in self._sizes)
        self._users = {x: _user(defined, x) for x in self._sizes}
        results = [v for op in defined.used_exprs() for v in op.outputs]
        self._extents = frozenset(a.size for v in results for a in v.domain.logical)
        self._binder = InputBinder(defined)
        self.fusion, _ = defined.copy()
        numbers = {x: self.fusion.new_symbol(DataType.Int) for x in self._sizes}
        replace_scalars(self.fusion, dict(numbers))
        self.fusion.inputs += list(numbers.values())
        # Names of these inputs in error messages.
        self.names = tuple(f"the size {x}{_line(op)}," for x, op in self._users.items())

    @staticmethod
    def of(fusion: Fusion) -> FloatSizes | None:
        """Returns an object that computes, in each call, the tensor sizes of the definition that
        depend on floats; None if there are none.
        """
        used = [v for op in fusion.used_exprs() for v in op.outputs]
        scalars = structural_scalars(fusion, used)
        found = dict.fromkeys(y for x in scalars for y in _made_of_floats(x))
        return FloatSizes(fusion, found) if found else None

    def complete(self, inputs: Iterable[object]) -> list[Argument]:
        """Returns the inputs of `fusion`: the caller's inputs as a flat list, then the sizes that
        are computed from floats.

        Raises:
            InputError: the number of inputs is wrong, or a computed value is not a valid size.
        """
        given = flatten(inputs, declared=self._declared)
        check_count(len(given), self._declared, self.fusion.scalar_lines)
        values: Values = {}
        for i, declared in self._scalars:
            number = given[i]
            check_scalar(i, declared, number, self.fusion.scalar_lines)
            values[declared] = Const(number, declared.dtype).value  # pyright: ignore[reportArgumentType]
        count = self._of_scalars
        sizes = [self._size(x, values) for x in self._sizes[:count]]
        if count < len(self._sizes):
            values = self._binder.bind(given, device_of(given, None))
            sizes += (self._size(x, values) for x in self._sizes[count:])
        return [*given, *sizes]

    def _size(self, x: Scalar, values: Values) -> int:
        """Returns the value of the size `x`, computed from the values of symbols.

        Raises:
            InputError: the computed float is not a valid size.
        """
        of = x.args[0] if _is_cast(x) else x
        value = evaluate(of, values)
        is_exact = _is_cast(x) and x.dtype is DataType.Index
        if isinstance(value, float) and math.isfinite(value) and not is_exact:
            value = math.trunc(value)
        problem = misfit(value, DataType.Int)
        if problem is None and x in self._extents and value < 0:
            problem = f"{value:g} is below 0"
        if problem:
            raise self._refusal(x, of, values, problem)
        return int(evaluate(x, values))

    def _refusal(self, x: Scalar, of: Scalar, values: Values, problem: str) -> InputError:
        positions = {v: i for i, v in self._scalars}
        shown = (
            f"{s} = {values[s]}" + (f" (input {positions[s]})" if s in positions else "")
            for s in symbols(of)
        )
        found = ", ".join(shown) if isinstance(of, Symbol) else f"{of} with {', '.join(shown)}"
        value = evaluate(of, values)
        is_fraction = isinstance(value, float) and math.isfinite(value) and not value.is_integer()
        is_truncatable = is_fraction and x.dtype is DataType.Index
        hint = "; cast it to DataType.Int to truncate it" if is_truncatable else ""
        op = self._users[x]
        return InputError(f"{op.name if op else 'size'}: size {found}: {problem}{hint}{_line(op)}")


def _line(op: TensorOp | None) -> str:
    return user_code(op.where) if op is not None and op.where else ""


def _is_cast(x: Scalar) -> TypeGuard[Apply]:
    return isinstance(x, Apply) and x.op.startswith("cast:")


def _made_of_floats(x: Scalar) -> Iterator[Scalar]:
    """Yields the integer scalars within `x` that an op computes from floats.

    If such scalars are nested, only the outermost is yielded.
    """
    if isinstance(x, Symbol | Const) or not _has_floats(x):
        return  # an extent that is an integer, or computed from integers only
    if isinstance(x, Apply) and any(not is_int(y) and _has_floats(y) for y in x.args):
        yield x
        return
    for y in children(x):
        yield from _made_of_floats(y)


def _has_floats(x: Scalar) -> bool:
    return any(category(y.dtype) in ("float", "complex") for y in _parts(x))


def _parts(x: Scalar) -> Iterator[Scalar]:
    seen: set[Scalar] = set()
    for y in postorder(x, seen.__contains__):
        seen.add(y)
        yield y


def _user(fusion: Fusion, size: Scalar) -> TensorOp | None:
    """Returns the first op whose result has an axis with the size expression `size`, or None. An
    error message names this op.
    """
    for op in fusion.used_exprs():
        scalars = (x for v in op.outputs for x in shape_scalars(v))
        if any(y is size for x in scalars for y in _parts(x)):
            return op
    return None


# ----------------------------------------------------------------------
# CPU scalars: tensors without axes in host memory, whose values a program receives as numbers.
#
#     inputs T0, T1 (cpu scalar)   ->   inputs T0, f3; T1 = full({}, f3)
#
# The value is read when a call begins, which never waits for a GPU. Kernels, recorded plans and
# graphs receive it as an argument of each call, and it does not affect which program is compiled.
# A CPU scalar that is an output is returned unchanged; one that is updated is written after the
# run.

_EXACT = (DataType.Double, DataType.Float)
_HOST = torch.device("cpu")


@record
class _Result:
    """One result of the program, and its use after the run. A CPU scalar is a tensor without axes
    in host memory.

    - `is_shown`: whether callers get the result.
    - `into`: the position of the CPU scalar input that the result updates, or None.
    - `given`: the position of the CPU scalar input that callers get instead of the result, or None.
    """

    is_shown: bool
    into: int | None
    given: int | None


class HostScalars:
    """The CPU scalars of a definition: input tensors without axes in host memory.

    `fusion` is a copy of the definition in which the CPU scalars are scalar inputs (numbers). Each
    call reads their values.
    """

    def __init__(self, defined: Fusion) -> None:
        self.fusion, _ = defined.copy()
        self._declared = list(defined.inputs)
        self._specs = {i: spec_of(i, v) for i, v in enumerate(self._declared) if _is_scalar(v)}
        inputs = list(self.fusion.inputs)
        for i in self._specs:
            tv = inputs[i]
            assert isinstance(tv, TensorView), f"{tv} is a CPU scalar"
            # Narrower floats become Float numbers, which hold all their values.
            is_small = category(tv.dtype()) == "float" and tv.dtype() not in _EXACT
            number = self.fusion.new_symbol(DataType.Float if is_small else tv.dtype())
            filled = FullOp(tv, (), sc.cast(number, tv.dtype()))
            self.fusion.insert_after(None, [filled.replace(where=tv.where)])
            tv.is_cpu_scalar, tv.memory = False, MemoryType.local
            inputs[i] = number
        self.fusion.inputs = inputs
        self._results = self._taken_results()

    @staticmethod
    def of(fusion: Fusion) -> HostScalars | None:
        """Returns a `HostScalars` for the definition's CPU scalars (input tensors without axes in
        host memory); None if it has none.
        """
        return HostScalars(fusion) if any(map(_is_scalar, fusion.inputs)) else None

    def _taken_results(self) -> list[_Result]:
        """Removes the in-place updates of CPU scalars (tensors without axes in host memory) from
        `fusion`, and returns how each result is used.

        In `fusion`, CPU scalars are numbers and not tensors. A value that updates a CPU scalar is
        therefore an ordinary result of the program, and is copied after the run.
        """
        scalars = {v: i for i, v in enumerate(self._declared) if _is_scalar(v)}
        number_of = {v.number: i for v, i in scalars.items()}
        fusion = self.fusion
        shown = {out for out in fusion.outputs if not fusion.is_hidden(out)}
        into: dict[TensorView, int] = {
            a.out: number_of[a.into.number] for a in fusion.aliases if a.into.number in number_of
        }
        fusion.aliases = [a for a in fusion.aliases if a.into.number not in number_of]
        rows: list[_Result] = []
        for out in fusion.outputs:
            if out.number in number_of:
                out.memory = MemoryType.global_
            if not fusion.is_hidden(out):
                rows.append(_Result(out in shown, into.get(out), number_of.get(out.number)))
        return rows

    @property
    def has_results(self) -> bool:
        """Whether a CPU scalar (a tensor without axes in host memory) is an output of the
        definition or is updated in place.
        """
        return any(not r.is_shown or (r.into, r.given) != (None, None) for r in self._results)

    def finished(
        self, given: Sequence[object], outputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Returns the outputs for the caller, from the inputs of the call and the program's
        outputs.

        An output that is a CPU scalar (a tensor without axes in host memory) is the caller's own
        tensor. Updates of CPU scalars are copied into the caller's tensors first. The copy waits
        for the program.
        """
        for result, out in zip(self._results, outputs, strict=True):
            if result.into is not None:
                _tensor(given[result.into]).copy_(out)
        return [
            out if result.given is None else _tensor(given[result.given])
            for result, out in zip(self._results, outputs, strict=True)
            if result.is_shown
        ]

    def flat(self, inputs: Iterable[object]) -> list[object]:
        """Returns the inputs of a call as a flat list.

        The list can be read several times, unlike an iterator that the caller may pass.
        """
        return [*flatten(inputs, declared=self._declared)]

    def read(self, inputs: Iterable[object]) -> list[Argument]:
        """Returns the inputs of `fusion`: the caller's inputs, with numbers in place of the CPU
        scalars (tensors without axes in host memory).

        Raises:
            InputError: the number of inputs is wrong, or an input is not the CPU scalar that the
                definition declares.
        """
        given = flatten(inputs, declared=self._declared)
        check_count(len(given), self._declared, self.fusion.scalar_lines)
        for i, spec in self._specs.items():
            value = given[i]
            if isinstance(value, torch.Tensor):  # the bytes of a lazy view are not its value
                value = value.resolve_conj().resolve_neg()
            check_tensor(spec, value, _HOST)
            assert isinstance(value, torch.Tensor), f"{value} was checked"
            given[i] = value.item()
        return given


def _is_scalar(value: object) -> TypeGuard[TensorView]:
    return isinstance(value, TensorView) and value.is_cpu_scalar


def _tensor(value: object) -> torch.Tensor:
    assert isinstance(value, torch.Tensor), f"{value} was checked"
    return value


# ----------------------------------------------------------------------
# Preparation of inputs that belong to torch's autograd or are lazy views.


def _is_lazy(x: torch.Tensor) -> bool:
    return x.is_neg() or x.is_conj()


class Autograd:
    """Converts the inputs of one fusion to plain tensors, without gradients. Warns once if a
    gradient is lost.
    """

    def __init__(self, fusion: Fusion) -> None:
        self._fusion = fusion
        self._is_warned = False

    def resolved(self, inputs: Sequence[Argument]) -> Sequence[Argument]:
        """Returns the inputs, in which plain tensors replace torch's lazy views.

        A lazy view, such as the result of `conj()`, shares the memory of its operand, and is only
        marked as negated or conjugated. Kernels read this memory and ignore the mark, so the
        negation or conjugation must be computed first.

        Raises:
            InputError: the program updates a lazy view in place.
        """
        lazy = [i for i, v in enumerate(inputs) if isinstance(v, torch.Tensor) and _is_lazy(v)]
        if not lazy:
            return inputs
        targets = {alias.into for alias in self._fusion.aliases}
        for i in lazy:
            if i < len(self._fusion.inputs) and self._fusion.inputs[i] in targets:
                given = inputs[i]
                is_conj = isinstance(given, torch.Tensor) and given.is_conj()
                kind, way = ("conjugate", "conj") if is_conj else ("negative", "neg")
                raise InputError(
                    f"input {i}, {self._fusion.inputs[i]}, is updated in place, but is a lazy "
                    f"{kind} view: pass x.resolve_{way}()"
                )
        return [
            v.resolve_conj().resolve_neg() if isinstance(v, torch.Tensor) else v for v in inputs
        ]

    def without_tangents(self, inputs: Sequence[Argument]) -> Sequence[Argument]:
        """Returns the inputs, with the dual tensors of forward-mode differentiation replaced by
        their primal values. Warns once.

        With dual tensors, torch would compute tangents for the ops that torch runs, and kernels
        would lose them.
        """
        duals = {
            i: forward_ad.unpack_dual(v)
            for i, v in enumerate(inputs)
            if isinstance(v, torch.Tensor) and (v.is_floating_point() or v.is_complex())
        }
        lost = {i: dual.primal for i, dual in duals.items() if dual.tangent is not None}
        for i in lost:
            self._warn(i, "has a forward-mode tangent", "forward_ad.unpack_dual(x).primal")
        return [lost.get(i, v) for i, v in enumerate(inputs)] if lost else inputs

    def warn_of_gradients(self, inputs: Sequence[Argument]) -> None:
        """Warns once that outputs carry no gradient, if an input requires a gradient."""
        if self._is_warned or not torch.is_grad_enabled():
            return
        for i, v in enumerate(inputs):
            if isinstance(v, torch.Tensor) and v.requires_grad:
                self._warn(i, "requires grad", "detach(), or run under torch.no_grad()")
                return

    def _warn(self, position: int, what: str, instead: str) -> None:
        if self._is_warned:
            return
        self._is_warned = True
        declared = self._fusion.inputs[position] if position < len(self._fusion.inputs) else "extra"
        warn(
            f"input {position}, {declared}, {what}, but no output will carry a gradient: "
            f"pass {instead}",
        )
