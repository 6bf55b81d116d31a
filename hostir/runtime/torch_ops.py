"""Makes the steps of those ops in a host program that torch computes: library calls and views.

A library call, such as a matrix product, writes into an output buffer that the program has
allocated. A reshape or expand uses the shape of this rank's shard. The last part of the file has a
few GPU kernels for work that torch's own calls do not cover.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch

from fuser.ir.domain import strided_layout
from fuser.ir.dtypes import to_torch
from fuser.ir.fusion import TensorOp, TensorView
from fuser.ir.ops import nodes
from fuser.ir.ops.matrix_products import GroupedMmaOp
from fuser.ir.ops.nodes import SliceOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar, Symbol
from fuser.ops.reference.library_calls import (
    CallOperands,
    Kernels,
    LibraryCall,
    Returning,
    WritingOne,
)
from fuser.ops.reference.matmul_calls import Product, bind_contraction
from fuser.ops.reference.meaning import NODES, bind_call, evaluate_into, evaluate_op
from fuser.runtime.compile import compile_kernels
from fuser.runtime.compiled_kernel import CompiledKernel
from fuser.support.errors import InputError, UnsupportedError, user_code
from fuser.support.kernel_source import KernelParam, KernelSource
from hostir.ir.shard_layout import is_repeated, share_storage, write
from hostir.lowering.slices import check_places
from hostir.runtime.frame import ExecutionContext, Frame
from hostir.runtime.inputs import Values
from hostir.runtime.steps import Closure, Multiply, Slots, Step

_Shape = tuple[int, ...]
# View ops with a shape: torch's function of (input, local shape of the output).
SHAPED: dict[type[TensorOp], Callable[[torch.Tensor, _Shape], torch.Tensor]] = {
    nodes.ReshapeOp: lambda x, shape: x.reshape(shape),
    nodes.ExpandOp: lambda x, shape: x.expand(shape),
}


def compute(op: TensorOp, frame: Frame) -> list[torch.Tensor]:
    """Computes `op` with torch, on the tensors of the run `frame`, and returns the results.

    A result may share memory with an operand, if torch returns a view. A result that no op reads
    need not be computed, and its tensor may have any size.
    """
    inputs = [frame.tensors[v] if isinstance(v, TensorView) else None for v in op.inputs]
    return _evaluating(op, frame, frame.machine.device)(inputs, frame.values)


def _evaluating(
    op: TensorOp, frame: Frame, device: torch.device
) -> Callable[[Sequence[torch.Tensor | None], Values], list[torch.Tensor]]:
    """Returns a function of (operands, values of symbols) that computes `op` with torch.

    In the list of operands, a scalar operand is None. New tensors are allocated on `device`. For a
    reshape or an expand, the target shape is taken once from `frame`, the first run, and does not
    change between calls.
    """
    shaped = SHAPED.get(type(op))
    if shaped is not None:
        shape = frame.local_shape(op.out_tensor)
        return lambda inputs, values: [shaped(inputs[0], shape)]  # pyright: ignore[reportArgumentType]
    check_places([op])
    unread = frame.storage.unread
    return lambda inputs, values: evaluate_op(op, inputs, values, device=device, unread=unread)


def computing(
    op: TensorOp,
    frame: Frame,
    ins: Sequence[int | None],
    scalars: Sequence[tuple[Symbol, int]],
    machine: ExecutionContext | None = None,
) -> Callable[[Slots], list[torch.Tensor]]:
    """Returns a function that computes `op` with torch, from the list of a run's values. The
    function serves the first run and all that repeat it.

    - `ins`: the position of each operand in that list; None for a scalar operand.
    - `scalars`: the input scalars whose value may change between runs, with their positions.
    - `machine`: the context of the run; the default is the context of `frame`.
    """
    values, evaluate = frame.values, _evaluating(op, frame, (machine or frame.machine).device)

    def run(slots: Slots) -> list[torch.Tensor]:
        now = {**values, **{s: slots[i] for s, i in scalars}} if scalars else values
        return evaluate([None if i is None else slots[i] for i in ins], now)

    return run


def writing_at_once(
    op: TensorOp,
    frame: Frame,
    ins: Sequence[int | None],
    outs: Sequence[int],
    compute_step: Callable[[Slots], list[torch.Tensor]],
) -> Closure:
    """Returns a function that computes `op` in the first run, into the buffers in the slots `outs`.
    Slots are positions in the list of a run's values.

    The torch calls of this function check their operands on the host, so an error appears at once.
    Later runs use `writing`, which may check on the device and report an error only in a following
    run.

    `ins` has the slot of each operand, None for a scalar. `compute_step` computes the results as
    new tensors. It is used if torch has no call for `op` that writes into buffers, and its results
    are then copied.
    """
    known, unread = (frame.values, frame.storage.unread), frame.storage.unread

    def write_at_once(slots: Slots) -> None:
        given, made = [slots[i] for i in ins if i is not None], [slots[i] for i in outs]
        call = library_call(op, given, made, known)
        if call is not None and not isinstance(call, Returning):
            call(given, made)
            return
        values = compute_step(slots) if call is None else call.make(given)
        for result, out, value in zip(op.outputs, made, values, strict=True):
            if result not in unread:
                write(out, value)

    return write_at_once


def library_call(
    op: TensorOp,
    ins: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    known: tuple[Values, Container[TensorView]],
    kernels: Kernels | None = None,
) -> LibraryCall | Returning | None:
    """Returns the torch call that computes `op`, for tensors with the layouts of `ins` and `outs`.

    A `LibraryCall` writes into buffers. A `Returning` returns new tensors. Returns None in three
    cases: in a dry run, whose tensors have no contents; if torch has no single call for `op`; and
    if several elements of a result share memory.

    `known` is (values of symbols, results that nothing reads and that need not be computed).
    `kernels` are the project's own GPU kernels, which the call may use.
    """
    if any(out.is_meta or is_repeated(out) for out in outs):
        return None
    check_places([op])
    values, unread = known
    reads = [out not in unread for out in op.outputs]
    return bind_call(op, CallOperands(ins, outs, values, reads, kernels))


def contract_repeated(
    op: nodes.Contraction, inputs: Sequence[torch.Tensor], out: torch.Tensor
) -> None:
    """Computes the matrix product `op` into `out`, in which several elements share memory.

    Torch cannot write into a tensor with stride 0. The product is computed into a dense temporary
    tensor, which is then copied to `out`.
    """
    whole = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    evaluate_into(op, inputs, whole)
    write(out, whole)


def as_contracted(op: TensorOp, out: torch.Tensor) -> torch.Tensor:
    """Returns the output `out` of a matrix product without the axes that `rfactor` has added.

    `rfactor` splits the summed axis, and one of the parts becomes an axis of the output. The axis
    has one entry per rank or loop iteration that computes a partial sum, so its local size is 1.
    Raises `UnsupportedError` for a larger size, because torch cannot return several partial sums.
    """
    axes = op.out_tensor.domain.no_reductions
    if not any(axis.rfactor for axis in axes):
        return out
    for position, axis in reversed(list(enumerate(axes))):
        if axis.rfactor:
            if out.shape[position] != 1:
                raise UnsupportedError(
                    f"{op.name} {op.out_tensor.label} has {out.shape[position]} partial sums of "
                    f"its reduced axis ({axis}) on one device, but torch can return only one. Call "
                    "rfactor for the part of the axis that stays local instead"
                    f"{f', user code at {op.where}' if op.where else ''}"
                )
            out = out.squeeze(position)
    return out


# ----------------------------------------------------------------------
# The steps of tensor ops whose results have buffers: matrix products and other calls of torch.


def contraction(
    op: nodes.Contraction,
    slots: tuple[tuple[int, ...], int],
    operands: Sequence[torch.Tensor],
    sample: torch.Tensor,
) -> Step | Closure:
    """Returns the step in which torch computes the matrix product `op` into its output buffer.
    Later runs repeat the step on other tensors.

    `slots` is (slots of the operands, slot of the result), the positions in the list of a run's
    values. The step fits tensors with the layouts of `operands` and of the result `sample`.
    """
    ins, out = slots
    result = as_contracted(op, sample)
    if is_repeated(result):
        return lambda slots: contract_repeated(
            op, [slots[i] for i in ins], as_contracted(op, slots[out])
        )
    way = bind_contraction(op, operands, result)
    if isinstance(way, Product) and result is sample:
        return Multiply(way, ins, out)

    def contract(slots: Slots) -> None:
        way([slots[i] for i in ins], slots[out])

    def contract_partial(slots: Slots) -> None:
        way([slots[i] for i in ins], as_contracted(op, slots[out]))

    return contract if result is sample else contract_partial


def writing(
    op: TensorOp,
    frame: Frame,
    operands: Sequence[int | None],
    scalars: Sequence[tuple[Symbol, int]],
    outs: Sequence[tuple[int, torch.Tensor]],
    machine: ExecutionContext | None = None,
) -> Closure:
    """Returns a function that computes `op` with torch into its output buffers, in any run that
    repeats the first one. The function takes the list of a run's values.

    - `operands`: the position of each operand in that list; None for a scalar operand.
    - `scalars`: the input scalars whose value may change between runs, with their positions.
    - `outs`: for each result, the position and a tensor with the layout of the result.
    - `machine`: the context of the run; the default is the context of `frame`.

    The function selects the torch call when it is first called. No copy is made if that torch call
    can write into a buffer.
    """
    ins = [i for i in operands if i is not None]
    # The records must not keep a tensor of the run alive.
    results = [
        _Written(slot, BufferLayout.of(o, like), writer(like), o not in frame.storage.unread)
        for o, (slot, like) in zip(op.outputs, outs, strict=True)
    ]
    put = _putting(results, ins)
    compute_step = computing(op, frame, operands, scalars, machine)
    changes = {s for s, _ in scalars}
    numbers = [v for v in op.inputs if isinstance(v, Scalar)]
    if NODES[type(op)].into is None or any(changes & {*sc.symbols(v)} for v in numbers):
        return lambda slots: put(slots, compute_step(slots))
    may_return = NODES[type(op)].may_return
    into = [result.slot for result in results]
    known = frame.values, frame.storage.unread
    where = (machine or frame.machine).device
    kernels = kernels_of(where) if where.type == "cuda" else None

    def made(slots: Slots) -> list[torch.Tensor]:
        return [
            result.buffer.make(where) if slots[result.slot] is None else slots[result.slot]
            for result in results
        ]

    def bind(slots: Slots) -> Closure:
        given = [slots[i] for i in ins]
        call = library_call(op, given, made(slots), known, kernels)
        if call is None:
            return lambda slots: put(slots, compute_step(slots))
        if isinstance(call, Returning):
            keeps = isinstance(op, nodes.LibraryOp) and op.MAKES_RESULTS
            store = _keeping(results) if keeps else put
            if keeps and call.direct is not None:
                return _first_kept(call, ins, (into[0], results[0].buffer), store)
            return lambda slots: store(slots, call.make([slots[i] for i in ins]))
        if may_return:
            return lambda slots: _write_all(slots, call, ins, into, made(slots))
        if isinstance(call, WritingOne):
            function, numbers, a, b = call.function, call.numbers, ins[0], into[call.out]
            return lambda slots: function(slots[a], *numbers, out=slots[b])
        if len(ins) == len(into) == 1:
            (a,), (b,) = ins, into
            return lambda slots: call((slots[a],), (slots[b],))
        return lambda slots: call([slots[i] for i in ins], [slots[i] for i in into])

    bound: list[Closure] = []

    def write_results(slots: Slots) -> None:
        if not bound:
            bound.append(bind(slots))
        bound[0](slots)

    return write_results


def _write_all(
    slots: Slots, call: LibraryCall, ins: list[int], into: list[int], made: list[torch.Tensor]
) -> None:
    """Makes torch write an op's results into the tensors `made`, and stores them as the values of
    the run.

    `ins` and `into` are the positions of the operands and of the results in the list of a run's
    values.
    """
    call([slots[i] for i in ins], made)
    for i, result in zip(into, made, strict=True):
        slots[i] = result


class BufferLayout(NamedTuple):
    """The shape, the strides (in elements) and the dtype of the buffer for one result of an op."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tv: TensorView, like: torch.Tensor) -> BufferLayout:
        """Returns the layout of a buffer: the shape and strides of the tensor `like`, with the
        dtype of the program's tensor `tv`.
        """
        return BufferLayout(tuple(like.shape), like.stride(), to_torch(tv.dtype()))

    def make(self, device: torch.device) -> torch.Tensor:
        """Allocates a buffer with this shape, these strides and this dtype on `device`."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)

    def is_of(self, value: torch.Tensor, ins: Sequence[torch.Tensor]) -> bool:
        """Whether a run can use the tensor `value`, a result of torch, instead of allocating a
        buffer with this layout.

        Returns False if `value` differs in shape, strides or dtype, or shares memory with one of
        the operands `ins`.
        """
        return (
            (tuple(value.shape), value.stride(), value.dtype) == self
            and not (value.is_conj() or value.is_neg() or value.storage_offset())
            and not any(share_storage(value, x) for x in ins)
        )


class _Written(NamedTuple):
    """One result of an op that torch computes in each run.

    - `slot`: the position of the result in the list of a run's values; `buffer`: the layout of the
      result's buffer.
    - `put`: a function (target, value) that copies a value into the buffer.
    - `is_read`: whether another op reads the result, or the program returns the result.
    """

    slot: int
    buffer: BufferLayout
    put: Callable[[torch.Tensor, torch.Tensor], object]
    is_read: bool


def _putting(
    results: Sequence[_Written], ins: Sequence[int]
) -> Callable[[Slots, Sequence[torch.Tensor]], None]:
    """Returns a function that takes the tensors that torch has computed for an op, and stores them
    as the op's results.

    A tensor is copied into the buffer of its result. If the result has no buffer yet and the tensor
    has the layout of that buffer, the tensor itself is stored. A tensor that shares memory with an
    operand is always copied. `ins` are the positions of the operands in the list of a run's values.
    Results that nothing reads are not copied.
    """

    def put(slots: Slots, values: Sequence[torch.Tensor]) -> None:
        for value, (slot, buffer, write_into, is_read) in zip(values, results, strict=True):
            if slots[slot] is None:
                if not is_read or buffer.is_of(value, [slots[k] for k in ins]):
                    slots[slot] = value
                    continue
                slots[slot] = buffer.make(value.device)
            if is_read:
                write_into(slots[slot], value)

    return put


def _keeping(results: Sequence[_Written]) -> Callable[[Slots, Sequence[torch.Tensor]], None]:
    """Returns a function that stores an op's results as `_putting` does, but with less time on the
    host.

    The function is only for ops for which torch always makes new tensors, so that memory shared
    with operands need not be checked.
    """
    read = [(k, r.slot, r.buffer, r.put) for k, r in enumerate(results) if r.is_read]

    def keep(slots: Slots, values: Sequence[torch.Tensor]) -> None:
        for k, slot, buffer, write_into in read:
            value = values[k]
            if slots[slot] is None:
                if value.stride() == buffer.strides and value.dtype is buffer.dtype:
                    slots[slot] = value
                    continue
                slots[slot] = buffer.make(value.device)
            write_into(slots[slot], value)

    return keep


def _first_kept(
    call: Returning,
    ins: Sequence[int],
    into: tuple[int, BufferLayout],
    store: Callable[[Slots, Sequence[torch.Tensor]], None],
) -> Closure:
    """Returns a function that calls torch and stores the first result of the op without a copy.

    It does the same as the function of `_keeping`, with less time on the host, for a call with at
    least two operands. `ins` are the positions of the operands in the list of a run's values, and
    `into` is (position, layout) of the first result. If the result has another layout, `store`
    copies all results instead.
    """
    direct, (out, (shape, strides, dtype)) = call.direct, into
    is_dense = strides == torch.empty(shape, device="meta").stride()
    assert direct is not None
    a, b, *more = (ins[place] for place in call.places)

    def keep(slots: Slots, values: Sequence[torch.Tensor]) -> None:
        first = values[0]
        if is_dense and slots[out] is None and first.stride() != strides:
            # One call allocates and copies. If only strides of one-element axes differ, the call
            # returns the tensor itself.
            first = first.contiguous()
        if slots[out] is None and first.stride() == strides and first.dtype is dtype:
            slots[out] = first
        else:
            store(slots, values)

    if len(more) == 1:
        (c,) = more
        return lambda slots: keep(slots, direct(slots[a], slots[b], slots[c]))
    return lambda slots: keep(slots, direct(slots[a], slots[b], *[slots[i] for i in more]))


def writer(like: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], object]:
    """Returns a function (target, value) that copies `value` into the tensor `target`.

    The target has the layout of `like`. If several elements of the target share memory, torch
    cannot copy into it, and the function copies only one element along an axis of stride 0.
    """
    return write if is_repeated(like) else torch.Tensor.copy_


# ----------------------------------------------------------------------
# The layouts of views, computed from the layouts of their operands. The operand may be a tensor or
# a `StridedLayout`, for which torch would have to make a tensor first.

# (strides, offset in elements from the operand's first element); None if only torch can compute the
# view, or if torch raises an error for the view.
_Seen = tuple[_Shape, int] | None


def _load_store(op: nodes.LoadStoreOp, x: torch.Tensor, shape: _Shape, values: Values) -> _Seen:
    root = op.out.domain.root_numbers
    order = [root.index(n) for n in op.out.domain.logical_numbers] if root else range(x.ndim)
    if tuple([x.shape[axis] for axis in order]) != shape:
        return None
    strides = x.stride()
    return tuple([strides[axis] for axis in order]), 0


def _broadcast(op: nodes.BroadcastOp, x: torch.Tensor, shape: _Shape, values: Values) -> _Seen:
    sizes, strides = list(x.shape), list(x.stride())
    for p, is_new in enumerate(op.flags):
        if is_new:
            strides.insert(p, sizes[p] * strides[p] if p < len(sizes) else 1)
            sizes.insert(p, 1)
    return (tuple(strides), 0) if tuple(sizes) == shape else None


def _squeeze(op: nodes.SqueezeOp, x: torch.Tensor, shape: _Shape, values: Values) -> _Seen:
    axes = [*zip(x.shape, x.stride(), op.flags, strict=True)]
    if any(n != 1 for n, _, gone in axes if gone):
        return None
    kept = [(n, step) for n, step, gone in axes if not gone]
    return (tuple([step for _, step in kept]), 0) if tuple([n for n, _ in kept]) == shape else None


def _expand(op: nodes.ExpandOp, x: torch.Tensor, shape: _Shape, values: Values) -> _Seen:
    if len(shape) != x.ndim:
        return None
    sized = [*zip(x.shape, x.stride(), shape, strict=True)]
    if any(n not in (1, wanted) for n, _, wanted in sized):
        return None
    return tuple([step if n == wanted else 0 for n, step, wanted in sized]), 0


def _reshape(op: nodes.ReshapeOp, x: torch.Tensor, shape: _Shape, values: Values) -> _Seen:
    if prod(shape) != x.numel():
        return None
    if x.stride() == strided_layout.dense_strides(x.shape):
        return strided_layout.dense_strides(shape), 0
    if 1 in x.shape or 1 in shape:
        return None  # torch chooses the strides of axes with one element
    strides = strided_layout.viewed_strides(x.shape, x.stride(), shape)
    return None if strides is None else (strides, 0)


def _slice(op: SliceOp, x: torch.Tensor, shape: _Shape, values: Values) -> _Seen:
    shift = 0
    axes = zip(op.starts, op.stops, x.shape, x.stride(), shape, strict=True)
    for start, stop, n, step, wanted in axes:
        begin, end, _ = slice(*(int(sc.evaluate(s, values)) for s in (start, stop))).indices(n)
        if end - begin != wanted:
            return None
        shift += begin * step
    return x.stride(), shift


VIEWS: dict[type[TensorOp], Callable[[Any, torch.Tensor, _Shape, Values], _Seen]] = {
    nodes.BroadcastOp: _broadcast,
    nodes.ExpandOp: _expand,
    nodes.LoadStoreOp: _load_store,
    nodes.ReshapeOp: _reshape,
    SliceOp: _slice,
    nodes.SqueezeOp: _squeeze,
}


def view_of(op: TensorOp, x: torch.Tensor, shape: _Shape, values: Values) -> _Seen:
    """Returns (strides, offset) of the view that `op` makes of a tensor like `x`, both in elements.

    `shape` is the shape of the view. Only the sizes and strides of `x` matter. `values` has the
    values of symbols. Returns None if only torch can compute the strides, for example for a view
    without elements.
    """
    return None if 0 in shape else VIEWS[type(op)](op, x, shape, values)


# ----------------------------------------------------------------------
# Kernels for a GPU that replace parts of torch's calls which need the host or a copy. The kernels
# check the ends of groups, clear rows outside all groups, and scatter elements.
#
# The same text is compiled for the CPU, where tests run it.

# Threads of a CUDA block; elements that each thread scatters.
THREADS, _EACH = 256, 4
# The C type that moves elements of so many bytes.
_WORDS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "uint64_t"}
_INDICES = {torch.int32: "int", torch.int64: "int64_t"}
_MAX_INT = 2**31 - 1

# Ends that decrease or exceed the axis are clamped, so that nothing is read outside of it. The
# first wrong end is reported to the host.
_ENDS = """\
#define nvfuser_index_t int
extern "C" __global__ void __launch_bounds__(1024) group_ends(
    FUSER_PTR(const int) offsets, FUSER_PTR(int) ends, FUSER_PTR(int64_t) report,
    const int groups, const int extent) {
  const int group = threadIdx.x;
  if (group >= groups) return;
  // The largest end so far is where this group begins.
  int last = 0, first_wrong = groups;
  for (int block = 0; block <= group; block += 8) {
    // Loads that do not wait for one another.
    int some[8];
    FUSER_UNROLL
    for (int k = 0; k < 8; k++) some[k] = block + k < groups ? offsets[block + k] : 0;
    FUSER_UNROLL
    for (int k = 0; k < 8; k++) {
      if (block + k > group) continue;
      const int kept = some[k] < last ? last : some[k] > extent ? extent : some[k];
      if (kept != some[k] && first_wrong == groups) first_wrong = block + k;
      last = kept;
    }
  }
  ends[group] = last;
  if (first_wrong == group) {
    report[1] = offsets[group];
    report[0] = group + 1;
  }
}
"""
_CLEAR = """\
#define nvfuser_index_t int64_t
extern "C" __global__ void __launch_bounds__(256) clear_rows(
    FUSER_PTR(unsigned short) out, FUSER_PTR(const int) ends, const int groups,
    const int64_t rows, const int64_t columns) {
  for (int64_t row = ends[groups - 1] + int64_t(blockIdx.x); row < rows; row += gridDim.x)
    for (int64_t k = threadIdx.x; k < columns; k += blockDim.x) out[row * columns + k] = 0;
}
"""


def _scatter_text(word: str, index: str, position: str, *, is_number: bool, is_last: bool) -> str:
    """Returns the C++ source text of a kernel that scatters elements.

    The positions of the elements are in an index tensor.

    - `word`, `index`, `position`: the C types of elements, of indices and of offsets in tensors.
    - `is_number`: whether the kernel writes one number instead of the elements of a tensor.
    - `is_last`: whether the kernel scatters along the last axis.

    Each thread moves several elements, because their loads then overlap in time.
    """
    given = "const int64_t number" if is_number else f"FUSER_PTR(const {word}) src"
    load = "" if is_number else "values[k] = src[at(k)];"
    value = f"static_cast<{word}>(number)" if is_number else "values[k]"
    values = "" if is_number else f"{word} values[{_EACH}];"
    behind = "" if is_last else " * inner + i % inner"
    return f"""\
#define nvfuser_index_t {position}
extern "C" __global__ void __launch_bounds__({THREADS}) scatter(
    FUSER_PTR({word}) out, FUSER_PTR(const {index}) index, {given},
    const {position} count, const {position} row, const {position} inner,
    const {position} extent) {{
  const {position} first = {position}(blockIdx.x) * {THREADS * _EACH} + threadIdx.x;
  {index} places[{_EACH}];
  {values}
  FUSER_UNROLL
  for (int k = 0; k < {_EACH}; k++) {{
    const {position} i = first + k * {THREADS};
    places[k] = i < count ? index[i] : -1;
  }}
  FUSER_UNROLL
  for (int k = 0; k < {_EACH}; k++) {{
    const {position} i = first + k * {THREADS};
    {load.replace("at(k)", "i < count ? i : 0")}
  }}
  FUSER_UNROLL
  for (int k = 0; k < {_EACH}; k++) {{
    const {position} i = first + k * {THREADS};
    if (places[k] < 0 || places[k] >= extent) continue;
    out[(i / row * extent + {position}(places[k])){behind}] = {value};
  }}
}}
"""


class LibraryKernels:
    """The project's own GPU kernels for work that torch's calls do not cover, for one device.

    The kernels check where groups of rows end in a grouped matrix product, clear rows, and scatter
    elements. Each kernel is compiled when it is first used.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._compiled: dict[object, CompiledKernel] = {}

    def _find(self, key: object, make: Callable[[], KernelSource]) -> CompiledKernel:
        found = self._compiled.get(key)
        if found is None:
            (found,) = compile_kernels([make()], self._device)
            self._compiled[key] = found
        return found

    # -------------------------------------------------------------- groups
    def ends_of(self, op: GroupedMmaOp, extent: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """Returns a function that checks the ends of the groups of a grouped matrix product, `op`,
        and clamps wrong ones.

        The function takes the end index of each group along the grouped axis. The ends are right if
        they do not decrease from group to group and are between 0 and `extent`. The check and the
        clamping are work of the device, so that no kernel reads outside of the axis and the host
        does not wait. A wrong end therefore raises `InputError` only in a later call.
        """
        kernel = self._find("ends", _ends_source)
        is_cuda = self._device.type == "cuda"
        report = torch.zeros(2, dtype=torch.int64, pin_memory=is_cuda)
        seen = report.numpy()

        def ends(offsets: torch.Tensor) -> torch.Tensor:
            if seen[0]:
                place, end = int(seen[0]) - 1, int(seen[1])
                seen[0] = 0
                raise InputError(
                    f"grouped_mm: Expected sorted offsets from 0 to {extent}, the size of axis "
                    f"{op.ragged} of {op.mat1} and {op.mat2}, but in an earlier run {op.offsets} "
                    f"had {end} for group {place}{user_code(op.where)}"
                )
            kept = torch.empty_like(offsets)
            given = offsets, kept, report, offsets.numel(), extent
            threads = -(-offsets.numel() // 32) * 32
            kernel.launch(given, grid=(1, 1, 1), block=(threads, 1, 1))
            return kept

        return ends

    def clear_rows(self, out: torch.Tensor, ends: torch.Tensor) -> None:
        """Fills with zeros those rows of the matrix `out`, a grouped matrix product, that belong to
        no group.

        Such rows follow the last group. `ends` has the row index at the end of each group. The
        caller ensures that `out` is dense and has 2-byte elements.
        """
        rows, columns = out.shape
        kernel = self._find("clear", _clear_source)
        given = out, ends, ends.numel(), rows, columns
        kernel.launch(given, grid=(min(rows, 128), 1, 1), block=(THREADS, 1, 1))

    # -------------------------------------------------------------- scatter
    def takes_scatter(
        self, out: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor | None
    ) -> bool:
        """Whether the project's own kernel can scatter `src` into `out` (see `scatter`). If it
        cannot, the caller uses torch's scatter.

        Returns False in these cases:

        - A tensor is not contiguous, or `index` is empty.
        - `index` and `out` differ in size along an axis other than `dim`.
        - `src` is a tensor whose shape is not that of `index`. (`src` is None if one number is
          scattered.)
        - The kernel does not support the element size of `out`.
        """
        pairs = enumerate(zip(out.shape, index.shape, strict=True))
        is_plain = out.is_contiguous() and index.is_contiguous() and index.numel() > 0
        fits = src is None or (src.is_contiguous() and src.shape == index.shape)
        is_long = all(a == b for k, (a, b) in pairs if k != dim)
        return is_plain and fits and is_long and out.element_size() in _WORDS

    def scatter(
        self, out: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor | int
    ) -> None:
        """Writes the elements of `src` into `out`, at the positions in `index` along axis `dim`.

        `src` may be one number for all positions. Positions outside of the axis are skipped.
        """
        position = "int" if max(out.numel(), index.numel()) <= _MAX_INT // 2 else "int64_t"
        word, kind = _WORDS[out.element_size()], _INDICES[index.dtype]
        is_number = not isinstance(src, torch.Tensor)
        inner, count = prod(out.shape[dim + 1 :]), index.numel()
        key = word, kind, position, is_number, inner == 1
        kernel = self._find(key, lambda: _scatter_source(*key))
        given = out, index, src, count, index.shape[dim] * inner, inner, out.shape[dim]
        blocks = -(-count // (THREADS * _EACH))
        kernel.launch(given, grid=(blocks, 1, 1), block=(THREADS, 1, 1))


def _ends_source() -> KernelSource:
    params = (
        KernelParam("offsets", "const int", True),
        KernelParam("ends", "int", True),
        KernelParam("report", "int64_t", True),
        KernelParam("groups", "int", False),
        KernelParam("extent", "int", False),
    )
    return KernelSource("group_ends", _ENDS, params, uses_barriers=False)


def _clear_source() -> KernelSource:
    params = (
        KernelParam("out", "unsigned short", True),
        KernelParam("ends", "const int", True),
        KernelParam("groups", "int", False),
        KernelParam("rows", "int64_t", False),
        KernelParam("columns", "int64_t", False),
    )
    return KernelSource("clear_rows", _CLEAR, params, uses_barriers=False)


def _scatter_source(
    word: str, index: str, position: str, is_number: bool, is_last: bool
) -> KernelSource:
    given = ("number", "int64_t", False) if is_number else ("src", f"const {word}", True)
    params = (
        KernelParam("out", word, True),
        KernelParam("index", f"const {index}", True),
        KernelParam(*given),
        *(KernelParam(name, position, False) for name in ("count", "row", "inner", "extent")),
    )
    text = _scatter_text(word, index, position, is_number=is_number, is_last=is_last)
    return KernelSource("scatter", text, params, uses_barriers=False)


@cache
def kernels_of(device: torch.device) -> LibraryKernels:
    """Returns the project's own GPU kernels for work that torch's calls do not cover, on `device`.
    There is one object per device for the whole process.
    """
    return LibraryKernels(device)
