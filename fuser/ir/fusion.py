"""`TensorView` and `Fusion`: tensors, and the SSA graph of the ops that compute them.

A fusion stores its ops in topological order: an op follows the ops that define its operands.
Compilation never changes the user's fusion, because its passes work on a copy (`Fusion.copy()`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from sys import maxsize
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, SupportsIndex, cast, overload

from fuser.ir.domain import tensor_domain
from fuser.ir.domain.device_mesh import DeviceMesh
from fuser.ir.domain.equal_extents import ExtentClasses
from fuser.ir.domain.tensor_domain import (
    DomainBuilder,
    IterDomain,
    TensorDomain,
    contiguity_for,
    numbers,
    transform_text,
)
from fuser.ir.dtypes import DataType, category, dtype_text
from fuser.ir.op import Op, op_text, value_text
from fuser.ir.provenance import Origin
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Const, Scalar, ScalarLike, Symbol, as_scalar, eq, int_value
from fuser.ir.statement import Expr, Val, Values, numbered
from fuser.ir.types import CacheOp, IterType, LoadStoreOpType, MemoryType, ParallelType
from fuser.support.arguments import checked, python_number, show
from fuser.support.errors import (
    ArgumentError,
    DefinitionError,
    UnsupportedError,
    counted,
    user_code,
    user_line,
)
from fuser.support.record import record, replace
from fuser.support.text_cursor import MAX_DIGITS

# ----------------------------------------------------------------------
# TensorView: the user's mutable handle on one tensor of a fusion.

_CONSTANT_EXTENT = (ParallelType.vectorize, ParallelType.unroll, ParallelType.group)


# The schedule primitives that rewrite the fusion, by method name. `fuser.ir.primitives` fills it.
PRIMITIVES: dict[str, Callable[..., TensorView]] = {}


class _ShapeAttribute:
    """The attribute `TensorView.shape`: `x.shape()` as in nvFuser, `x.shape[0]` as in torch.

    The values are the sizes of the axes that users see. A broadcast axis that is expanded has its
    expanded size.
    """

    @overload
    def __get__(self, tv: None, owner: type) -> Callable[[TensorView], Sizes]: ...
    @overload
    def __get__(self, tv: TensorView, owner: type) -> Sizes: ...
    def __get__(self, tv: TensorView | None, owner: type) -> Sizes | Callable[[TensorView], Sizes]:
        return _sizes_of if tv is None else _sizes_of(tv)


def _sizes_of(tv: TensorView) -> Sizes:
    return Sizes(a.size for a in tv.domain.no_reductions)


@Val.register
class TensorView:
    """A tensor of a fusion, created by `Fusion.new_tensor`.

    `ndim`, `size` and `shape` describe the logical axes: the axes that users see, without reduction
    axes. `axis`, `split`, `merge`, `reorder` and `rfactor` number the loop axes, which become loops
    and threads of a kernel; reduction axes are included. The attribute `domain` stores all axes. It
    is immutable: scheduling replaces it by a new one, but never replaces the TensorView object.
    """

    def __init__(
        self,
        fusion: Fusion,
        number: int,
        domain: TensorDomain,
        dtype: DataType,
        *,
        memory: MemoryType = MemoryType.local,
        mesh: DeviceMesh | None = None,
        mesh_is_user_set: bool = False,
        is_cpu_scalar: bool = False,
    ) -> None:
        self.fusion = fusion
        self.number = number
        self._dtype = dtype
        self.memory = memory
        self.mesh = mesh
        # Propagation keeps a mesh that set_device_mesh set; one that an op copied may change.
        self.mesh_is_user_set = mesh_is_user_set
        self.is_cpu_scalar = is_cpu_scalar
        # How many loop axes, from the outside, are shared with the consumers.
        self.compute_at = 0
        self.domain = domain
        # The user's line that defined this input, or that set the tensor's mesh.
        self.where = ""
        # The user's line that put an axis on each device or stream type.
        self.cut_lines: Mapping[ParallelType, str] = {}

    # `fuser.ops.operators` adds these methods at import.
    if TYPE_CHECKING:

        def _operator(
            self, other: TensorView | Scalar | bool | int | float | complex
        ) -> TensorView: ...

        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _operator
        __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = (
            __rpow__
        ) = _operator
        __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _operator
        __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _operator
        __lt__ = __le__ = __gt__ = __ge__ = _operator
        # Inside a definition they create ops; elsewhere they return a bool.
        __eq__ = __ne__ = _operator  # pyright: ignore[reportAssignmentType]
        __hash__ = object.__hash__

        def __matmul__(self, other: TensorView) -> TensorView: ...
        def __neg__(self) -> TensorView: ...
        def __pos__(self) -> TensorView: ...
        def __abs__(self) -> TensorView: ...
        def __invert__(self) -> TensorView: ...
        def __getitem__(self, key: object) -> TensorView: ...

    # ------------------------------------------------------------ queries
    @property
    def label(self) -> str:
        """The short name of the tensor: number, kind of memory and dtype, such as `T0_g_float`.

        `g` is global memory.
        """
        return f"T{self.number}_{self.memory.value}_{dtype_text(self._dtype)}"

    @property
    def ndim(self) -> int:
        """The number of axes that users see (logical axes), without reduction axes."""
        return len(self.domain.no_reductions)

    @property
    def has_own_mesh(self) -> bool:
        """Whether the user chose the mesh of this tensor.

        The user does so by setting the mesh, or by splitting an axis over a mesh dimension.
        Otherwise an op copied the mesh from its operand, and the compiler may still change it.
        """
        return self.mesh_is_user_set or self.domain.has_devices

    def dtype(self) -> DataType:
        """Returns the dtype of the tensor's elements."""
        return self._dtype

    def is_tensor(self) -> bool:
        """Returns True for every tensor, as nvFuser's `Val.isTensor` does."""
        return True

    def is_symbolic(self) -> bool:
        """Returns True, because the values of a tensor are unknown until the fusion runs.

        nvFuser's `Val.isSymbolic` does the same.
        """
        return True

    def definition(self) -> TensorOp | None:
        """Returns the op that computes this tensor, or None for an input."""
        return self.fusion.definition(self)

    def uses(self) -> list[TensorOp]:
        """Returns the ops that read this tensor, in program order."""
        return self.fusion.uses(self)

    @checked
    def size(self, dim: int) -> Scalar:
        """Returns the size of axis `dim`, as users see it.

        The numbers of axes do not count reduction axes. For a broadcast axis that is expanded, the
        result is the expanded size.
        """
        axes = self.domain.no_reductions
        return axes[self._wrap(dim, len(axes))].size

    shape = _ShapeAttribute()

    def has_root(self) -> bool:
        """Returns whether the op computes other axes than those that users see (root axes).

        An example is a reshape: it computes the axes of its operand, and then splits and merges
        them.
        """
        return bool(self.domain.root)

    def get_root_domain(self) -> list[Axis]:
        """Returns the root axes: those that the op itself computes, before a split or merge.

        Returns an empty list if these are the axes that users see.
        """
        return self._handles(self.domain.root_numbers)

    def get_logical_domain(self) -> list[Axis]:
        """Returns the logical axes: the axes that users see, and the reduction axes."""
        return self._handles(self.domain.logical_numbers)

    def get_loop_domain(self) -> list[Axis]:
        """Returns the loop axes, which become the loops and threads of a kernel, outermost first.

        `split`, `merge` and `reorder` change these axes.
        """
        return self._handles(self.domain.loop_numbers)

    def _handles(self, group: Sequence[int]) -> list[Axis]:
        return [Axis(self, n) for n in group]

    @checked
    def axis(self, index: int) -> Axis:
        """Returns the loop axis at position `index`. A negative index counts from the end.

        Loop axes are those that become loops and threads of a kernel.

        Raises:
            DefinitionError: there is no axis at this position.
        """
        loop = self.domain.loop_numbers
        if not loop:
            raise DefinitionError(f"Tried to access an axis in a 0-dim TensorView: {self}")
        return Axis(self, loop[self._wrap(index, len(loop))])

    def _wrap(self, index: int, length: int) -> int:
        wrapped = index + length if index < 0 else index
        if not 0 <= wrapped < length:
            raise DefinitionError(
                f"Tried to access out of boundary index {index}. total index: {length} in {self}: "
                f"it has {counted(length, 'axis')}, so the index must be from {-length} to "
                f"{length - 1}"
            )
        return wrapped

    def user_line(self) -> str:
        """Returns the user's source line that created this tensor, as `file.py:12`.

        Returns "" if it is unknown.
        """
        op = self.definition()
        return self.where or (op.where if op is not None else "")

    # ------------------------------------------------------------ loop transforms
    @checked
    def split(self, axis: int, factor: Scalar | int, inner_split: bool = True) -> TensorView:
        """Replaces a loop axis by two axes (outer, inner), and returns this tensor.

        Loop axes become loops and threads of a kernel. By default, the inner extent is `factor`,
        and the outer extent is ceilDiv(extent, factor). With `inner_split=False`, the outer extent
        is `factor`.

        Raises:
            DefinitionError: the axis is not serial, or its loop already computes other tensors,
                too (`compute_at`), or the factor is not positive.
        """
        position = self._wrap(axis, len(self.domain.loop))
        inp = self.domain.loop[position]
        factor = sc.as_scalar(factor)
        value = sc.int_value(factor)
        if value is not None and value <= 0:
            raise DefinitionError(
                f"Invalid factor for split of {inp} in {self}: {value}. The factor must be positive"
            )
        if inp.ptype is not ParallelType.serial:
            raise DefinitionError(
                f"Splitting an axis of non-Serial parallel type is not supported at this time: "
                f"{inp} in {self}. Split the axis before you parallelize it"
            )
        if position < self.compute_at:
            raise DefinitionError(
                f"cannot split {inp} of {self}: the tensor is inlined at position "
                f"{self.compute_at}, so the axes before this position are loops of other tensors, "
                "too. Split before inlining"
            )
        built = DomainBuilder(self.fusion)
        parts = built.split(inp, factor, inner_split=inner_split)
        loop = self.domain.loop
        self._set_loop((*loop[:position], *parts, *loop[position + 1 :]), built)
        return self

    @checked
    def inner_split(self, axis: int, factor: Scalar | int) -> TensorView:
        """Splits a loop axis so that the inner extent is `factor`, and returns this tensor.

        Loop axes become loops and threads of a kernel.
        """
        return self.split(axis, factor)

    @checked
    def outer_split(self, axis: int, factor: Scalar | int) -> TensorView:
        """Splits a loop axis so that the outer extent is `factor`, and returns this tensor.

        Loop axes become loops and threads of a kernel.
        """
        return self.split(axis, factor, inner_split=False)

    @checked
    def merge(self, axis_o: int, axis_i: int | None = None) -> TensorView:
        """Merges two loop axes, of which `axis_o` is the outer one, and returns this tensor.

        Loop axes become loops and threads of a kernel. `axis_i` defaults to `axis_o` + 1. The
        merged axis takes the smaller of the two positions.

        Raises:
            DefinitionError: both are the same axis, only one is a reduction, both are parallel (not
                serial), or one is an axis over CUDA streams.
        """
        loop = self.domain.loop
        o = self._wrap(axis_o, len(loop))
        i = self._wrap(o + 1 if axis_i is None else axis_i, len(loop))
        if o == i:
            raise DefinitionError(f"cannot merge axis {o} with itself in {self}")
        outer, inner = loop[o], loop[i]
        if outer.is_reduction() != inner.is_reduction():
            raise DefinitionError(
                f"cannot merge a reduction axis with an axis that is not reduced: {outer}, "
                f"{inner} in {self}"
            )
        if ParallelType.serial not in (outer.ptype, inner.ptype):
            raise DefinitionError(
                f"cannot merge two parallel axes: {outer}, {inner} in {self}. Merge the axes "
                "before you parallelize them"
            )
        if outer.is_stream or inner.is_stream:
            raise DefinitionError(
                f"cannot merge a stream axis with another axis, which would then be streamed, too: "
                f"{outer}, {inner} in {self}. Merge the axes before you parallelize them"
            )
        built = DomainBuilder(self.fusion)
        rest = [a for k, a in enumerate(loop) if k not in (o, i)]
        rest.insert(min(o, i), built.merge(outer, inner))
        self._set_loop(rest, built)
        return self

    @checked
    def reorder(self, old2new: Mapping[int, int] | None = None) -> TensorView:
        """Moves loop axes, and returns this tensor. `old2new` maps old to new positions.

        Loop axes become loops and threads of a kernel. The axes that are not in `old2new` take the
        other positions in their old order.
        """
        loop = self.domain.loop
        n = len(loop)
        moves = {self._wrap(o, n): self._wrap(w, n) for o, w in (old2new or {}).items()}
        if len(set(moves.values())) != len(old2new or {}):
            raise DefinitionError(
                f"reorder {old2new} moves two axes to the same position in {self}"
            )
        placed = {new: loop[old] for old, new in moves.items()}
        rest = iter(a for k, a in enumerate(loop) if k not in moves)
        self._set_loop([placed[k] if k in placed else next(rest) for k in range(n)])
        return self

    @checked
    def swizzle(self, x: int, y: int) -> NoReturn:
        """Raises `UnsupportedError` in every case. The method exists because nvFuser has it.

        In this project, the compiler chooses the layout of shared memory.
        """
        raise UnsupportedError(
            f"swizzle({x}, {y}) of {self} is not supported: the compiler chooses the layout of "
            f"shared memory{user_code(user_line())}"
        )

    @checked
    def swizzle1d(self, axis: int, parallel_type: ParallelType) -> TensorView:
        """Rotates the loop axis at position `axis`, and returns this tensor.

        Iteration i of the new axis is position (i + c) % extent of the old axis. c is the
        coordinate of the executing device along the mesh dimension `parallel_type`, such as
        `mesh_x`. Each device thus begins with the block that it stores itself, as ring schedules
        need.

        Raises:
            DefinitionError: `parallel_type` is not a mesh dimension.
        """
        if not parallel_type.is_device:
            raise DefinitionError(
                f"swizzle1d of {self}: expected a device type such as ParallelType.mesh_x, got "
                f"{parallel_type.text}"
            )
        position = self._wrap(axis, len(self.domain.loop))
        loop = self.domain.loop
        built = DomainBuilder(self.fusion)
        out = built.swizzle(loop[position], parallel_type)
        self._set_loop((*loop[:position], out, *loop[position + 1 :]), built)
        return self

    def _set_loop(self, loop: Sequence[IterDomain], built: DomainBuilder | None = None) -> None:
        made = () if built is None else built.transforms
        axes = () if built is None else built.axes.values()
        self.domain = self.domain.with_loop(numbers(loop), *made, axes=axes)

    @checked
    def parallelize_axis(self, axis: Axis | IterDomain, ptype: ParallelType) -> None:
        """Sets the parallel type of an axis of this tensor: who executes it, such as a thread.

        `Axis.parallelize` calls this method after its own checks.

        Raises:
            DefinitionError: the axis is not an axis of this tensor, or `ptype` (such as vectorize)
                needs a constant extent and the axis has none.
        """
        current = self.domain.axes.get(axis.number)
        if current is None:
            raise DefinitionError(f"{axis} is not an axis of {self}")
        if ptype in _CONSTANT_EXTENT and sc.int_value(current.extent) is None:
            raise DefinitionError(
                f"parallel type {ptype.name} needs a constant extent, but axis {axis} of {self} "
                "has a symbolic extent: split the axis by a number first"
            )
        self.domain = self.domain.with_axes(replace(current, ptype=ptype))

    # ------------------------------------------------------------ facts that the user sets
    @checked
    def set_device_mesh(self, mesh: object) -> None:
        """States which devices store the tensor, without splitting an axis over them.

        `mesh` is a DeviceMesh or the argument of its constructor.
        """
        self.fusion.require_open(f"set_device_mesh of {self}")
        self.mesh = mesh if isinstance(mesh, DeviceMesh) else DeviceMesh(mesh)
        self.mesh_is_user_set = True
        self.where = user_line()

    @checked
    def set_memory_type(self, memory_type: MemoryType) -> None:
        """Moves the tensor to another kind of memory, such as global or shared memory.

        Raises:
            DefinitionError: the tensor is an input or output, and the memory is neither global nor
                symmetric.
        """
        is_io = self in self.fusion.inputs or self in self.fusion.outputs
        if is_io and memory_type not in (MemoryType.global_, MemoryType.symmetric):
            raise DefinitionError(
                f"{self} is a fusion input or output, which must be in global or symmetric memory, "
                f"not {memory_type.text}"
            )
        self.memory = memory_type

    def give_memory(self) -> None:
        """Moves the tensor to global memory, so that it exists after the kernel that computes it.

        A tensor in symmetric memory, which other devices can access, stays there.
        """
        if self.memory is not MemoryType.symmetric:
            self.memory = MemoryType.global_

    @checked
    def set_allocation_domain(
        self,
        new_allocation_domain: Sequence[Axis | IterDomain],
        new_contiguity: bool | Sequence[bool | None],
    ) -> None:
        """Declares the order of the tensor's axes in memory, outermost first.

        The list may contain logical axes (those of the tensor's shape) and loop axes (the axes
        after all splits and merges). It may also contain intermediate results of these splits and
        merges. An empty list means the order of the logical axes. `new_contiguity` is one flag for
        all axes, or one flag per axis: True if there is no gap between neighbours along the axis,
        and None for a broadcast or reduction axis.

        Raises:
            DefinitionError: an axis belongs to another tensor, or the number of flags is wrong.
        """
        self.fusion.require_open(f"set_allocation_domain of {self}")
        for a in new_allocation_domain:
            of = getattr(a, "tensor", self)
            if of is not self:
                also = "" if of.fusion is self.fusion else ", in another definition"
                raise DefinitionError(f"{a} is an axis of {of}{also}, not of {self}")
            if a.number not in self.domain.axes:
                raise DefinitionError(f"{a} is not an axis of {self}")
        order = [a.number for a in new_allocation_domain]
        # No axes: those of the logical domain, in its order.
        axes = self.domain.states(order) if order else self.domain.logical
        flags = (
            contiguity_for(axes, new_contiguity)
            if isinstance(new_contiguity, bool)
            else new_contiguity
        )
        if len(flags) != len(axes):
            raise DefinitionError(
                f"set_allocation_domain of {self}: expected "
                f"{counted(len(axes), 'contiguity flag')}, one per axis, got {len(flags)}"
            )
        self.domain = self.domain.with_allocation(order, flags)

    # Caching and rfactor rewrite the fusion; they are implemented in `fuser.ir.primitives`.
    @checked
    def rfactor(self, axes: Sequence[int]) -> TensorView:
        """Splits a reduction into two reductions, and returns the result of the first one.

        The first reduction computes a new tensor: it reduces the loop axes at the positions `axes`.
        Loop axes become loops and threads of a kernel. The second reduction reduces the new tensor
        over the other reduction axes. Its result is this tensor. A schedule uses this so that
        threads compute partial results in parallel, which are combined afterwards.
        """
        return PRIMITIVES["rfactor"](self, axes)

    @checked
    def cache_after(
        self,
        op_type: LoadStoreOpType = LoadStoreOpType.set,
        cache_op: CacheOp = CacheOp.unspecified,
        propagate_allocation_domain: bool = True,
        cached_uses: Sequence[TensorOp] = (),
    ) -> TensorView:
        """Inserts a copy between this tensor and the ops that read this tensor. Returns the copy.

        Schedules use this to load an input into registers or shared memory once.

        - `op_type` and `cache_op`: the kind and the cache hint of the copy.
        - `propagate_allocation_domain`: whether the copy has the memory order of this tensor.
        - `cached_uses`: the ops that read the copy, by default all ops that read this tensor.
        """
        return PRIMITIVES["cache_after"](
            self, op_type, cache_op, propagate_allocation_domain, cached_uses
        )

    @checked
    def cache_before(self, op_type: LoadStoreOpType = LoadStoreOpType.set) -> TensorView:
        """Inserts a new tensor, which the op of this tensor now computes, and returns it.

        This tensor becomes a copy of the new tensor, by a copy op of the kind `op_type`. Schedules
        use this to compute an output in registers and to write it to memory afterwards.
        """
        return PRIMITIVES["cache_before"](self, op_type)

    @checked
    def cache_fork(self) -> TensorView:
        """Adds a copy of this output tensor, makes the copy an output in its place, and returns the
        copy.

        The ops that read this tensor still read it. As it is no output any more, it need not be
        stored in global memory.
        """
        return PRIMITIVES["cache_fork"](self)

    def __str__(self) -> str:
        return tensor_text(self)


# ----------------------------------------------------------------------
# Fusion: the SSA graph of tensor ops, with its inputs, outputs and extents.

Value = TensorView | Scalar
# See `fuser.ir.ops.nodes`.
AxisMap = tuple[int | None, ...]
# The attribute values of one printed form of an op, and its template.
Variant = tuple[dict[str, object], str]


class TensorOp(Op):
    """Base of all ops with tensors as results.

    The methods of this class say which axes of results and operands correspond. Kernels compute the
    indices of operands by `axis_map`. `alike_map` and `cut_map` say which axes are split over
    devices together.
    """

    # The tensor operands by priority for sharding; (): those with the most sharded axes first.
    REFERENCES: ClassVar[tuple[int, ...]] = ()

    def template(self) -> str:
        """Returns the text form of this op, with placeholders such as `{out}` for its fields.

        The form may depend on the attributes of the op.
        """
        return self.TEXT

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        """Yields (attribute values, template) for each text form that ops of this class can have.

        A template is the text of an op, with placeholders such as `{out}` for its fields. If a text
        matches a template, the parser creates an op with the attribute values of this pair. Of
        several templates that match, the first is taken.
        """
        yield {}, cls.TEXT

    @property
    def out_tensor(self) -> TensorView:
        """The first result of the op."""
        return self.outputs[0]

    @property
    def is_linear(self) -> bool:
        """Whether the op is linear in its tensor operands: op(a + b, c + d) = op(a, c) + op(b, d).

        Such an op can be applied to partial sums, and its results are added afterwards. Scalar
        operands are the same on both sides. For floats, the right side may be rounded in another
        way, but is not less precise. By default, False.
        """
        return False

    def exact_numbers(self) -> tuple[Scalar, ...]:
        """Returns the scalar operands that the dtype of the result must represent exactly.

        By default, there are none. An example is the divisor of an integer division: if it wrapped
        around, the result would be wrong.
        """
        return ()

    def axis_map(self, operand_index: int) -> AxisMap:
        """Returns, per axis of the result, the corresponding operand axis, or None.

        The operand is `inputs[operand_index]`. The axes of the result are those that the op itself
        computes (root axes): they include reduction axes and precede splits and merges. By default,
        axes correspond by position, and result and operand have equally many axes.
        """
        del operand_index
        return tuple(range(len(self.out_tensor.domain.maybe_root)))

    def axis_map_to(self, operand_index: int, out: TensorView) -> AxisMap:
        """Returns `axis_map` for the result `out`, because an op can have several results.

        That is, per axis of `out`, the corresponding axis of the operand `inputs[operand_index]`,
        or None.
        """
        del out
        return self.axis_map(operand_index)

    def alike_map(self, operand_index: int, out: TensorView) -> AxisMap:
        """Returns, per axis of `out`, the operand axis that devices must split in the same way.

        The entry is None if there is no such axis. By default, these are the corresponding axes
        (`axis_map_to`). An override adds axes of different sizes: in an attention, the heads of
        queries and the fewer heads of keys are split together.
        """
        return self.axis_map_to(operand_index, out)

    def cut_map(self, operand_index: int, out: TensorView) -> AxisMap:
        """Returns, per axis of `out`, the operand axis that devices may split together with it.

        The entry is None if there is no such axis. The result is that of `alike_map`, except for
        axes that must not be split: along such an axis, a part of the result needs several parts of
        the operand. Their entries are None.
        """
        return self.alike_map(operand_index, out)

    def parallel_axes(self, out: TensorView, sibling: TensorView) -> Iterator[tuple[int, int]]:
        """Yields pairs of corresponding axes of two results of the op.

        Each pair is (position in `out`, position in `sibling`). By default, axes correspond by
        position, and both results have equally many axes.
        """
        assert len(out.domain.logical) == len(sibling.domain.logical), f"{out} beside {sibling}"
        return ((k, k) for k in range(len(out.domain.logical)))

    def parallel_cuts(self, out: TensorView, sibling: TensorView) -> Iterator[tuple[int, int]]:
        """Yields pairs of axes of two results that devices must split in the same way.

        Each pair is (position in `out`, position in `sibling`). As in `alike_map`, the two axes may
        have different sizes.
        """
        return self.parallel_axes(out, sibling)

    def whole_axes(self, out: TensorView) -> tuple[int, ...]:
        """Returns the axes of `out` that must not be split over devices.

        The op cannot compute a part of the result along such an axis from parts of its operands. By
        default, there are none.
        """
        del out
        return ()

    def whole_operand_axes(self, operand_index: int) -> tuple[int, ...]:
        """Returns the axes of operand `operand_index` that must not be split over devices.

        Each part of a result needs all elements along such an axis. By default, there are none.
        The returned positions do not count reduction axes of the operand.
        """
        del operand_index
        return ()


@record
class Alias:
    """An update of an input in place: output `out` is written into the memory of input `into`.

    - `hidden`: whether the output is not returned to the caller.
    - `where`: the line where the user added the output.
    """

    out: TensorView
    into: TensorView
    hidden: bool = True
    where: str = field(default="", compare=False)


@record
class Declared:
    """A statement that the sizes `a` and `b` are equal, which does not follow from any op.

    The statement stands in the program after the op that computes the tensor `after`, or before the
    first op if `after` is None. `by_output` is False if the user wrote the statement. It is True if
    the statement follows from an update of an input in place: an output has the shape of the input
    that it updates.
    """

    after: TensorView | None
    a: Scalar
    b: Scalar
    by_output: bool


class Fusion:
    """A graph of tensor ops over symbolic extents: inputs, ops in topological order, and outputs.

    A fusion also stores which extents are equal, and the assumptions of its schedule, such as sizes
    that are multiples of a vector width.
    """

    def __init__(self) -> None:
        self.inputs = []
        self.outputs = []
        self.aliases: list[Alias] = []
        # The ops in order. `_added` holds those that were added since `exprs` was last read.
        self._exprs: tuple[TensorOp, ...] = ()
        self._added: list[TensorOp] = []
        self._definitions: dict[TensorView, TensorOp] | None = None
        self._uses: dict[TensorView, list[TensorOp]] | None = None
        self._tensors: tuple[TensorView, ...] | None = None
        # Cached result of `used_exprs`, with the outputs for which it was computed.
        self._used: tuple[list[TensorView], tuple[TensorOp, ...]] | None = None
        self._next_tensor = 0
        self._next_axis = 0
        self._next_scalar = 0
        self._zero_is_numbered = False
        # Whether a Python float combined with integer tensors yields Double, as in nvFuser, instead
        # of Float.
        self.double_numbers = False
        self.extents = ExtentClasses()
        # The user's line that defines each scalar input, for messages.
        self.scalar_lines: dict[Scalar, str] = {}
        # Equalities of extents that no op implies.
        self.declared: list[Declared] = []
        # Conditions that a schedule assumes in addition; the launch of a kernel checks them.
        self.assumed: tuple[Scalar, ...] = ()
        # Sizes that the schedule assumes to be multiples of a number.
        self.divisible: dict[Symbol, int] = {}
        # Symbolic extent -> number of devices that divides it evenly. Extents that are not listed
        # are divisible by any number of devices.
        self.even_parts: dict[Scalar, int] = {}
        # Products of extents that the schedule assumes to be at least a number.
        self.least: dict[Scalar, int] = {}
        # Whether the last vector of a tensor may be incomplete.
        self.has_tails = False
        # Pairs of axis numbers that share a loop although no op relates them.
        self.joined: tuple[tuple[int, int], ...] = ()
        # The number of threads per multiprocessor that the register use must allow; 0: any.
        self.resident_threads = 0
        # The size of a cluster: blocks along y that run at the same time and reduce together.
        self.cluster = 1
        # The fusions into which the schedule divided this one; one launch runs all of them.
        self.parts: tuple[Fusion, ...] = ()
        # L2 reuse: the numbers of the inputs that the next kernel reads again, which this kernel
        # leaves in the cache; and whether this kernel is that next one. It then processes its
        # elements backwards, from the most recently cached ones on.
        self.read_again: frozenset[int] = frozenset()
        self.goes_backwards = False
        # The origins of shardings, for `python -m hostir why`. They do not affect results.
        self.origins: tuple[Origin, ...] = ()
        # Whether an executor already runs the fusion; it must not be changed after that.
        self.is_taken = False

    @property
    def inputs(self) -> Values[Value]:
        """The input tensors and scalars, in the order in which a call passes them."""
        return self._inputs

    @inputs.setter
    def inputs(self, values: Iterable[Value]) -> None:
        """Replaces the inputs by `values`."""
        self._inputs = Values(values)

    @property
    def outputs(self) -> Values[TensorView]:
        """The outputs in the order of `add_output`, including those that only update an input."""
        return self._outputs

    @outputs.setter
    def outputs(self, values: Iterable[TensorView]) -> None:
        """Replaces the outputs by `values`."""
        self._outputs = Values(values)

    # ------------------------------------------------------------ making values
    def next_axis(self) -> int:
        """Returns an unused number for an axis.

        The first call also uses up a scalar number, because nvFuser creates the scalar 0 at this
        point. The numbers in texts then agree with nvFuser's.
        """
        if not self._zero_is_numbered:
            self._zero_is_numbered = True
            self._next_scalar += 1
        self._next_axis += 1
        return self._next_axis - 1

    def next_scalar(self) -> int:
        """Returns an unused number for the name of a scalar, such as 3 for `i3`.

        A constant in the user's definition also uses up a number, although its text has none. The
        numbers then agree with nvFuser's.
        """
        self._next_scalar += 1
        return self._next_scalar - 1

    def reserve(self, *, axis: int = -1, scalar: int = -1, tensor: int = -1) -> None:
        """Marks the numbers of an axis, a scalar and a tensor as used: new ones get larger numbers.

        A number of -1 marks nothing. The parser calls this method for the numbers in a text.
        """
        self._zero_is_numbered = True
        self._next_tensor = max(self._next_tensor, tensor + 1)
        self._next_axis = max(self._next_axis, axis + 1)
        self._next_scalar = max(self._next_scalar, scalar + 1)

    def new_extent(self, *, lo: int = 0) -> Symbol:
        """Creates the symbol of an axis's extent, such as `i3`, whose value is at least `lo`.

        `lo` is 0 in a user's fusion. `lo` is 1 in a copy that is compiled only for inputs without
        empty axes.
        """
        return self.new_symbol(lo=lo)

    def new_symbol(self, dtype: DataType = DataType.Index, *, lo: int | None = None) -> Symbol:
        """Creates a symbol, whose name begins with a letter for the dtype.

        The names are `i3` for integers, `d2` for Double, `f4` for other floats, `b5` for Bool, and
        `c6` for complex numbers. The value of the symbol is at least `lo`. If `lo` is None, the
        value is unbounded.
        """
        prefix = {"bool": "b", "int": "i", "float": "f", "complex": "c"}[category(dtype)]
        prefix = "d" if dtype is DataType.Double else prefix
        return Symbol(f"{prefix}{self.next_scalar()}", dtype, lo=lo)

    def may_have_made(self, symbol: Symbol) -> bool:
        """Returns whether this fusion may have created `symbol`, that is, has used its number.

        An exact answer is impossible, because equal symbols of two fusions are one object. A symbol
        of another fusion is therefore accepted if this fusion has used the same number, too. Loop
        indices and names without a number are always accepted.
        """
        number = symbol.name[1:]
        is_numbered = number.isascii() and number.isdigit() and len(number) <= MAX_DIGITS
        return symbol.is_index or not is_numbered or int(number) < self._next_scalar

    def new_axis(
        self,
        extent: Scalar,
        kind: IterType = IterType.iteration,
        *,
        expanded: Scalar | None = None,
        rfactor: bool = False,
    ) -> IterDomain:
        """Creates an axis with an unused number. No tensor contains the axis yet.

        `kind` says whether this is an iteration, reduction or broadcast axis. `expanded` is the
        size of an expanded broadcast axis, whose `extent` is 1. `rfactor` marks an axis that the op
        derives from other axes of the tensor.
        """
        return IterDomain(self.next_axis(), kind, extent, expanded=expanded, rfactor=rfactor)

    def clone_axis(self, axis: IterDomain, **changes: object) -> IterDomain:
        """Returns a copy of an axis for another tensor, with an unused number.

        The copy is serial and not marked as derived from other axes (`rfactor`). `changes` sets
        other fields of the copy.
        """
        fresh = IterDomain(self.next_axis(), axis.kind, axis.extent, expanded=axis.expanded)
        return replace(fresh, **changes)  # pyright: ignore[reportArgumentType]

    def new_tensor(
        self,
        domain: TensorDomain | Sequence[IterDomain],
        dtype: DataType,
        *,
        memory: MemoryType = MemoryType.local,
        mesh: DeviceMesh | None = None,
        number: int | None = None,
    ) -> TensorView:
        """Creates a tensor. Its number is `number`, or by default an unused number.

        If `domain` is a sequence of axes, these are both the axes that users see and the loop axes,
        and the tensor has no gaps in memory. `memory` is the kind of memory, by default registers
        (`local`). `mesh` has the devices that store the tensor.
        """
        if not isinstance(domain, TensorDomain):
            domain = TensorDomain.of(tuple(domain))
        if number is None:
            number = self._next_tensor
        self._next_tensor = max(self._next_tensor, number + 1)
        return TensorView(self, number, domain, dtype, memory=memory, mesh=mesh)

    # ------------------------------------------------------------ ops
    @property
    def exprs(self) -> tuple[TensorOp, ...]:
        """All ops of the fusion, in topological order.

        An op follows the ops that define its operands.
        """
        if self._added:
            self._exprs = (*self._exprs, *self._added)
            self._added.clear()
        return self._exprs

    @exprs.setter
    def exprs(self, exprs: Iterable[TensorOp]) -> None:
        """Replaces the ops by `exprs`, which must be in topological order."""
        self._exprs = tuple(exprs)
        self._added.clear()
        self._forget()

    def _forget(self) -> None:
        """Drops all cached results that depend on the list of ops, because this list changes."""
        self._definitions = self._uses = self._tensors = self._used = None

    def add(self, op: TensorOp) -> TensorOp:
        """Appends an op and returns it. The operands of the op must be defined already."""
        self._added.append(op)
        self._forget()
        return op

    def definition(self, tv: TensorView) -> TensorOp | None:
        """Returns the op that defines `tv`, or None for an input."""
        if self._definitions is None:
            self._definitions = {o: e for e in self.exprs for o in e.outputs}
        return self._definitions.get(tv)

    def uses(self, tv: TensorView) -> list[TensorOp]:
        """Returns the ops that read `tv`, in program order."""
        if self._uses is None:
            uses: dict[TensorView, list[TensorOp]] = {}
            for e in self.exprs:
                for v in dict.fromkeys(e.inputs):
                    if isinstance(v, TensorView):
                        uses.setdefault(v, []).append(e)
            self._uses = uses
        return list(self._uses.get(tv, ()))

    def used_exprs(self) -> tuple[TensorOp, ...]:
        """Returns the ops on which some output depends, in program order. The result is cached."""
        if self._used is None or self._used[0] != self.outputs:
            self._used = [*self.outputs], self.exprs_behind(self.outputs)
        return self._used[1]

    def exprs_behind(self, outputs: Iterable[TensorView]) -> tuple[TensorOp, ...]:
        """Returns the ops on which the tensors `outputs` depend, in program order."""
        needed = set(outputs)
        kept: list[TensorOp] = []
        for e in reversed(self.exprs):
            if any(o in needed for o in e.outputs):
                kept.append(e)
                needed.update(v for v in e.inputs if isinstance(v, TensorView))
        return tuple(reversed(kept))

    def tensors(self) -> tuple[TensorView, ...]:
        """Returns each tensor once: inputs, then operands and results in order, then outputs."""
        if self._tensors is None:
            self._tensors = _tensors_of(self.exprs)
        given = (v for v in self.inputs if isinstance(v, TensorView))
        return tuple(dict.fromkeys((*given, *self._tensors, *self.outputs)))

    def vals(self) -> list[Val]:
        """Returns all values of the fusion, as nvFuser's `Fusion::vals` does.

        The order is: inputs, then operands and results of ops, then each tensor's domain, axes and
        extents.
        """
        seen: dict[Any, None] = dict.fromkeys(self.inputs)
        for e in self.exprs:
            seen.update(dict.fromkeys((*e.inputs, *e.outputs)))
        for tv in self.tensors():
            seen[tv] = seen[tv.domain] = None
            for number, axis in tv.domain.axes.items():
                sizes = (axis.extent, axis.expanded)
                seen.update(dict.fromkeys((Axis(tv, number), *(x for x in sizes if x is not None))))
        return list(seen)

    def replace_uses(
        self, old: TensorView, new: TensorView, *, where: Callable[[TensorOp], bool] | None = None
    ) -> None:
        """Replaces operand `old` by `new` in all ops for which `where` returns True.

        By default, `old` is replaced in all ops. The list of outputs does not change.
        """
        self.exprs = tuple(
            _with_operand(e, old, new) if old in e.inputs and (where is None or where(e)) else e
            for e in self.exprs
        )

    def insert_after(self, anchor: TensorOp | None, ops: Sequence[TensorOp]) -> None:
        """Inserts ops after `anchor`, or at the front if `anchor` is None."""
        at = 0 if anchor is None else self.exprs.index(anchor) + 1
        self.exprs = (*self.exprs[:at], *ops, *self.exprs[at:])

    def insert_before(self, anchor: TensorOp, ops: Sequence[TensorOp]) -> None:
        """Inserts ops before `anchor`."""
        at = self.exprs.index(anchor)
        self.exprs = (*self.exprs[:at], *ops, *self.exprs[at:])

    def replace_expr(self, old: TensorOp, new: Sequence[TensorOp]) -> None:
        """Replaces one op by a sequence of ops at the same position."""
        at = self.exprs.index(old)
        self.exprs = (*self.exprs[:at], *new, *self.exprs[at + 1 :])

    # ------------------------------------------------------------ inputs and outputs
    def require_open(self, what: str) -> None:
        """Raises `DefinitionError` if the fusion has already run, because it is then final.

        `what` describes the requested change, for the message.
        """
        if self.is_taken:
            raise DefinitionError(
                f"{what}: the definition has already been executed and cannot change any more. "
                f"Make the change before the first call, or write a new definition"
                f"{user_code(user_line())}"
            )

    def add_input(self, value: Value) -> None:
        """Registers a tensor or a symbol as an input.

        A tensor is moved to global memory, unless it is in symmetric memory.

        Raises:
            DefinitionError: the value is already an input, or is a constant.
        """
        self.require_open(f"add_input of {value}")
        if value in self.inputs:
            raise DefinitionError(
                f"{value} is already registered as input, duplicated inputs is not allowed"
            )
        if isinstance(value, TensorView):
            if value.memory is not MemoryType.symmetric:
                value.memory = MemoryType.global_
        elif not isinstance(value, Symbol):
            raise DefinitionError(f"Immediate scalar value cannot be added as an input: {value}")
        self.inputs.append(value)

    def add_output(
        self, output: Value, alias_input: TensorView | None = None, *, where: str = ""
    ) -> None:
        """Registers an output. With `alias_input`, the output is also written into that input.

        - With `alias_input`, the output is hidden (not returned to the caller), unless it is also
          added without `alias_input`.
        - All outputs are computed from the old values of inputs. Updates are written at the end.
        - If an input is itself an output, the caller gets the input tensor, which has the new
          values.
        - `where` is the user's line, for messages.

        Raises:
            DefinitionError: the tensor belongs to another definition, `alias_input` is not an
                input, or its dtype or shape differs.
        """
        if not isinstance(output, TensorView):
            raise DefinitionError(
                f"Non-TensorView outputs are not supported at this point: {output} is not a tensor"
            )
        if output.fusion is not self:
            raise DefinitionError(
                f"add_output of {output}: the tensor belongs to another definition"
                f"{user_code(where or output.user_line())}"
            )
        self.require_open(f"add_output of {output}")
        if alias_input is not None:
            if alias_input not in self.inputs:
                raise DefinitionError(
                    f"add_output of {output}: alias source can only be a fusion input, got "
                    f"{alias_input}, which is not an input"
                )
            self._check_update(output, alias_input, where)
        if output.memory is not MemoryType.symmetric:
            output.memory = MemoryType.global_
        is_hidden = self.is_hidden(output)
        if alias_input is None:
            if is_hidden:
                # A hidden output that is added again takes the position of this second call.
                self.outputs.remove(output)
                self.aliases = [
                    replace(a, hidden=False) if a.out is output else a for a in self.aliases
                ]
            self.outputs.append(output)
            return
        is_known = output in self.outputs
        self.aliases.append(Alias(output, alias_input, is_hidden or not is_known, where))
        if not is_known:
            self.outputs.append(output)

    def _check_update(self, out: TensorView, into: TensorView, where: str) -> None:
        """Checks that output `out` may be written into input `into`.

        The input must have no other update, and both tensors must have the same dtype and shape.
        Sizes that are not known yet are declared equal. `where` is the user's line, for messages.

        Raises:
            DefinitionError: one of these conditions does not hold.
        """
        what = f"add_output: {out}, to be written into {into}"
        refused = f"add_output: {out} is to be written into {into}"
        line = f" (at {where})" if where else ""
        for earlier in (a.out for a in self.aliases if a.into is into and a.out is not out):
            raise DefinitionError(f"{refused}, but {earlier} is already written into it{line}")
        if out.dtype() is not into.dtype():
            actual, expected = (dtype_text(tv.dtype()) for tv in (out, into))
            raise DefinitionError(
                f"{refused}, but has dtype {actual}: cast the output to {expected}, "
                f"the dtype of the input{line}"
            )
        sizes = [tv.shape() for tv in (out, into)]
        fixed = [(a, b) for a, b in zip(*sizes, strict=False) if int_value(a) is not None]
        if len(sizes[0]) != len(sizes[1]) or any(
            int_value(b) not in (int_value(a), None) for a, b in fixed
        ):
            shapes = [show(list(found)) for found in sizes]
            raise DefinitionError(
                f"{refused}, but has shape {shapes[0]}, and the input has shape {shapes[1]}{line}"
            )
        for a, b in zip(*sizes, strict=True):
            self._declare(b, a, f"{what}{line}", by_output=True)

    def alias_of(self, out: TensorView) -> TensorView | None:
        """Returns the input into which `out` is written, or None if `out` updates no input."""
        return next((a.into for a in self.aliases if a.out is out), None)

    def is_hidden(self, out: TensorView) -> bool:
        """Returns whether `out` only updates an input, so that it is not returned to the caller."""
        return any(a.out is out and a.hidden for a in self.aliases)

    # ------------------------------------------------------------ extents
    def unify_extents(self, a: Scalar, b: Scalar, reason: str = "") -> None:
        """Stores that two extents are equal. Afterwards, `canonical` returns the same extent for
        both.

        `reason` describes who requires the equality, such as an op. The reason is a part of the
        error message if the sizes of a call contradict the equality.
        """
        self.extents.unify(a, b, reason)

    def declare_extents(self, a: ScalarLike, b: ScalarLike, reason: str = "") -> None:
        """Stores that two extents are equal because the user says so, although no op implies it.

        `reason` is a part of the error message if the sizes of a call contradict the equality.
        """
        self._declare(as_scalar(a), as_scalar(b), reason, by_output=False)

    def _declare(self, a: Scalar, b: Scalar, reason: str, *, by_output: bool) -> None:
        if self.canonical(a) != self.canonical(b):
            last = self._added[-1:] or self._exprs[-1:]
            after = last[0].outputs[0] if last else None
            self.declared.append(Declared(after, a, b, by_output))
            self.unify_extents(a, b, reason)

    def assume(self, extent: Scalar, value: Scalar) -> None:
        """States that the schedule relies on the extent `extent` being equal to `value`.

        The fusion then treats both as equal. Each launch of the kernel that is compiled from this
        fusion checks the equality.
        """
        self.assumed = (*self.assumed, eq(self.canonical(extent), value))
        self.unify_extents(extent, value, "the schedule")

    def canonical(self, x: Scalar) -> Scalar:
        """Returns `x` in a form that is the same for all extents that are known to be equal.

        Of several equal symbols, one is the representative. The result contains only
        representatives.
        """
        return self.extents.canonical(x)

    def equal_extents(self) -> tuple[tuple[Scalar, Scalar], ...]:
        """Returns every stored equality as (extent, representative): the second replaces the first.

        Equalities whose first extent is a symbol come first.
        """
        return self.extents.relations()

    # ------------------------------------------------------------ copying, comparing, printing
    def copy(
        self, ops: Sequence[TensorOp] | None = None
    ) -> tuple[Fusion, dict[TensorView, TensorView]]:
        """Returns a copy of the fusion, and the map from old to new tensors.

        Tensors, axes and scalars keep their numbers. If `ops` is passed, the copy contains only
        these ops, and the caller sets inputs and outputs of the copy.
        """
        new = Fusion()
        for name in ("_next_tensor", "_next_axis", "_next_scalar", "_zero_is_numbered"):
            setattr(new, name, getattr(self, name))
        new.extents, new.origins = self.extents.copy(), self.origins
        new.assumed, new.divisible = self.assumed, dict(self.divisible)
        new.even_parts = dict(self.even_parts)
        new.least, new.has_tails = dict(self.least), self.has_tails
        new.joined, new.resident_threads = self.joined, self.resident_threads
        new.cluster, new.double_numbers = self.cluster, self.double_numbers
        new.scalar_lines = self.scalar_lines
        new.read_again, new.goes_backwards = self.read_again, self.goes_backwards
        mapping: dict[TensorView, TensorView] = {}
        # Equal meshes become one object, because identical objects compare faster.
        meshes: dict[DeviceMesh | None, DeviceMesh | None] = {}
        for tv in self.tensors() if ops is None else _tensors_of(ops):
            twin = TensorView(
                new,
                tv.number,
                tv.domain,
                tv.dtype(),
                memory=tv.memory,
                mesh=meshes.setdefault(tv.mesh, tv.mesh),
                mesh_is_user_set=tv.mesh_is_user_set,
                is_cpu_scalar=tv.is_cpu_scalar,
            )
            twin.compute_at, twin.where, twin.cut_lines = tv.compute_at, tv.where, tv.cut_lines
            mapping[tv] = twin

        def twin_of(v: Value) -> Value:
            return mapping[v] if isinstance(v, TensorView) else v

        new.exprs = tuple(e.map_values(twin_of) for e in (self.exprs if ops is None else ops))
        if ops is not None:
            return new, mapping
        new.inputs = [twin_of(v) for v in self.inputs]
        new.outputs = [mapping[v] for v in self.outputs]
        new.aliases = [replace(a, out=mapping[a.out], into=mapping[a.into]) for a in self.aliases]
        new.declared = [
            replace(d, after=None if d.after is None else mapping.get(d.after))
            for d in self.declared
        ]
        return new, mapping

    if TYPE_CHECKING:  # `fuser.frontend.manual_kernels` adds this method

        def print_kernel(self, compile_params: Any = None) -> str:
            """Returns the CUDA text of the kernel for the fusion with its current schedule.

            `compile_params` (`CompileParams`) may set the integer type of indices. Its other
            options are those of nvFuser and must have their defaults.
            """
            ...

    def print_math(self, from_outputs_only: bool = True) -> str:
        """Returns the fusion as text in nvFuser's format: inputs, outputs and ops.

        With `from_outputs_only=False`, the text also has the ops on which no output depends.
        """
        return fusion_math(self, used_only=from_outputs_only)

    def __eq__(self, other: object) -> bool:
        """Returns whether two fusions have equal ops, layouts, shardings and updates of inputs.

        Their tensors, axes and symbols may have different numbers.
        """
        if self is other:
            return True
        return isinstance(other, Fusion) and canonical_key(self) == canonical_key(other)

    def __hash__(self) -> int:
        """Returns the hash of the structure that `__eq__` compares. Adding an op changes it."""
        return hash(canonical_key(self))

    def __str__(self) -> str:
        return self.print_math(False)


@functools.singledispatch
def canonical_key(fusion: object) -> Hashable:
    """Returns a hashable key of a fusion, for comparisons. Equal keys mean equal structure.

    Numbers of tensors, axes and symbols have no influence. This function only dispatches on the
    type of its argument. The implementation for fusions is in `fuser.ir.canonical_form`, which
    imports this module.
    """
    raise AssertionError(
        f"internal error: a canonical key exists only of a fusion, but {type(fusion).__name__} was "
        "passed. Please report this call"
    )


def _tensors_of(ops: Iterable[TensorOp]) -> tuple[TensorView, ...]:
    """Returns the tensors that ops read or define, each tensor once, in program order."""
    seen: dict[TensorView, None] = {}
    for e in ops:
        for v in (*e.inputs, *e.outputs):
            if isinstance(v, TensorView):
                seen[v] = None
    return tuple(seen)


def _with_operand(op: TensorOp, old: TensorView, new: TensorView) -> TensorOp:
    """Returns a copy of the op with operand `new` instead of `old`. It has the same results."""
    results = set(op.outputs)
    return op.map_values(lambda v: new if v is old and v not in results else v)


# ---------------------------------------------------------------- text
def tensor_text(tv: TensorView) -> str:
    """Returns the full text of a tensor: `T0_g_float[iS0{i0}, iS1{i1}] (DeviceMesh{0 1})`.

    It has the short name, the loop axes, and the devices that store the tensor.
    """
    suffix = f" ca_pos( {tv.compute_at} )" if tv.compute_at else ""
    mesh = f" ({tv.mesh})" if tv.mesh is not None else ""
    return f"{tv.label}{tv.domain}{suffix}{mesh}"


def fusion_math(fusion: Fusion, *, used_only: bool = True) -> str:
    """Returns the fusion as text in the format of nvFuser's `print_math`: inputs, outputs and ops.

    By default, the text has only the ops on which outputs depend, in the order of a depth-first
    search from the outputs. With `used_only=False`, it has all ops in program order. In both cases,
    an op comes after the ops that define its operands.
    """
    lines = ["Inputs:"]
    lines += [f"  {value_text(v)}" for v in fusion.inputs]
    lines += ["Outputs:"]
    lines += [f"  {value_text(v)}" for v in fusion.outputs]
    lines += ["", "%kernel_math {"]
    lines += [op_text(op) for op in (_by_use(fusion) if used_only else fusion.exprs)]
    return "\n".join(lines) + "\n} // %kernel_math \n\n"


def _by_use(fusion: Fusion) -> list[Op]:
    """Returns the ops on which outputs depend, by a depth-first search from the outputs.

    An op comes after the ops that define its operands.
    """
    ordered: dict[Op, None] = {}
    stack: list[tuple[object, bool]] = [(out, False) for out in reversed(fusion.outputs)]
    while stack:
        value, is_ready = stack.pop()
        op = fusion.definition(value)  # pyright: ignore[reportArgumentType]
        if op is None or op in ordered:
            continue
        if is_ready:
            ordered[op] = None
        else:
            stack.append((value, True))
            stack += ((v, False) for v in reversed(op.inputs))
    return list(ordered)


# ----------------------------------------------------------------------
# Axis: the user's handle on one axis of one tensor, and on the transforms between axes.
#
# It stores (tensor, number) and reads the current state from the tensor: after
# `a = tv.axis(0); a.parallelize(p)`, `a.ptype` is p. Users know it as `fuser.IterDomain`, nvFuser's
# name for the result of `tv.axis`.


class Axis(Val):
    """The user's handle of one axis of a tensor, identified by the number of the axis.

    `TensorView.axis` and the `get_*_domain` methods create Axis objects. The properties return the
    current state of the axis, which scheduling changes. They raise `DefinitionError` if scheduling
    has removed the axis from the tensor, as a split removes the axis that is split.
    """

    __slots__ = ("number", "tensor")

    def __init__(self, tensor: TensorView, number: int) -> None:
        self.tensor = tensor
        self.number = number

    @property
    def state(self) -> IterDomain:
        """The current properties of the axis, read from its tensor.

        Raises:
            DefinitionError: scheduling has removed the axis from the tensor.
        """
        found = self.tensor.domain.axes.get(self.number)
        if found is None:
            raise DefinitionError(
                f"axis {self.number} is no longer an axis of {self.tensor}: a transform, such as a "
                "split, has replaced it. Call axis() or get_loop_domain() again"
            )
        return found

    @property
    def kind(self) -> IterType:
        """The kind of the axis: iteration, reduction or broadcast."""
        return self.state.kind

    def extent(self) -> Scalar:
        """Returns the number of positions along the axis, as nvFuser's `extent()` does.

        The extent of a broadcast axis is 1.
        """
        return self.state.extent

    @property
    def expanded(self) -> Scalar | None:
        """The size to which a broadcast axis is expanded, or None if the axis is not expanded."""
        return self.state.expanded

    @property
    def size(self) -> Scalar:
        """The size that users see: that of an expanded broadcast axis, or else the extent."""
        return self.state.size

    @property
    def ptype(self) -> ParallelType:
        """The parallel type: who executes the axis, such as a serial loop, a thread or a device."""
        return self.state.ptype

    @property
    def rfactor(self) -> bool:
        """Whether the op derives this axis from other axes of the tensor, as a reshape does.

        In texts, such an axis has the mark `rf`.
        """
        return self.state.rfactor

    @property
    def is_broadcast(self) -> bool:
        """Whether this is a broadcast axis, expanded or not."""
        return self.state.is_broadcast

    @property
    def is_device(self) -> bool:
        """Whether the axis is split over the devices of a mesh dimension, one position for each."""
        return self.state.is_device

    @property
    def is_stream(self) -> bool:
        """Whether each position along the axis is one iteration of a loop over CUDA streams."""
        return self.state.is_stream

    def is_reduction(self) -> bool:
        """Returns whether the op that computes the tensor reduces over this axis."""
        return self.state.is_reduction()

    # ------------------------------------------------------------ nvFuser's `Val` queries
    def is_tensor(self) -> bool:
        """Returns False, as nvFuser's `Val.isTensor` does for axes."""
        return False

    def is_symbolic(self) -> bool:
        """Returns True, as nvFuser's `Val.isSymbolic` does for axes."""
        return True

    def definition(self) -> AxisTransform | None:
        """Returns the transform, such as a split, that derives this axis from others, or None."""
        found = (t for t in self.tensor.domain.transforms if self.number in t.outputs)
        return next((axis_transform(self.tensor, t) for t in found), None)

    def uses(self) -> list[AxisTransform]:
        """Returns the splits, merges and other transforms that derive other axes from this axis."""
        found = (t for t in self.tensor.domain.transforms if self.number in t.inputs)
        return [axis_transform(self.tensor, t) for t in found]

    @checked
    def parallelize(self, parallel_type: ParallelType) -> None:
        """Sets the parallel type: who executes the axis (loop, thread, block, device or stream).

        Raises:
            DefinitionError: the type is unroll, vectorize or group, and the extent is not a
                constant; or it is `stream_y` or `stream_z`, which only the compiler may set; or it
                is a device or stream type, and the fusion has already run.
        """
        if parallel_type.is_stream and parallel_type is not ParallelType.stream:
            raise DefinitionError(
                f"cannot parallelize {self} of {self.tensor} on {parallel_type.name}, a type that "
                "only the compiler sets: use ParallelType.stream. To stream several axes, merge "
                f"them first{user_code(user_line())}"
            )
        is_cut = parallel_type.is_device or parallel_type is ParallelType.stream
        if is_cut:
            self.tensor.fusion.require_open(f"parallelize of {self} of {self.tensor}")
        self.tensor.parallelize_axis(self, parallel_type)
        if is_cut:
            lines = self.tensor.cut_lines
            self.tensor.cut_lines = {**lines, parallel_type: user_line()}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Axis):
            return NotImplemented
        return self.tensor is other.tensor and self.number == other.number

    def __hash__(self) -> int:
        return hash((id(self.tensor), self.number))

    def __str__(self) -> str:
        return str(self.state)

    def __repr__(self) -> str:
        return f"<axis {self} of {self.tensor.label}>"


class AxisTransform(Expr):
    """A split, merge or other transform that derives axes of a tensor from others of its axes.

    `Axis.definition` and `Axis.uses` return this object.
    """

    __slots__ = ("_tensor", "_transform")

    def __init__(self, tensor: TensorView, transform: tensor_domain.Transform) -> None:
        self._tensor, self._transform = tensor, transform

    def input(self, index: int) -> Axis:
        """Returns axis `index` of those from which the transform derives new axes.

        Raises:
            NoOperandError: the transform has no such axis.
        """
        return Axis(self._tensor, numbered("input", self, self._transform.inputs, index))

    def output(self, index: int) -> Axis:
        """Returns axis `index` of those that the transform derives.

        Raises:
            NoOperandError: the transform has no such axis.
        """
        return Axis(self._tensor, numbered("output", self, self._transform.outputs, index))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AxisTransform):
            return NotImplemented
        return self._tensor is other._tensor and self._transform == other._transform

    def __hash__(self) -> int:
        return hash((id(self._tensor), self._transform))

    def __str__(self) -> str:
        return transform_text(self._transform, self._tensor.domain) + "\n"

    def __repr__(self) -> str:
        return f"<{str(self).strip()}>"


class Split(AxisTransform):
    """A transform of one axis into an outer and an inner axis."""

    __slots__ = ()

    def outer(self) -> Axis:
        """Returns the outer of the two derived axes."""
        return self.output(0)

    def inner(self) -> Axis:
        """Returns the inner of the two derived axes."""
        return self.output(1)


class Merge(AxisTransform):
    """A transform of an outer and an inner axis into one axis."""

    __slots__ = ()

    def outer(self) -> Axis:
        """Returns the outer of the two merged axes."""
        return self.input(0)

    def inner(self) -> Axis:
        """Returns the inner of the two merged axes."""
        return self.input(1)


# Other transforms use the base class.
_HANDLES: dict[type, type[AxisTransform]] = {
    tensor_domain.SplitTransform: Split,
    tensor_domain.MergeTransform: Merge,
}


def axis_transform(tensor: TensorView, transform: tensor_domain.Transform) -> AxisTransform:
    """Returns the object that represents a transform of axes for the user.

    This is a `Split` or a `Merge`, and for other transforms the base class `AxisTransform`.
    """
    return _HANDLES.get(type(transform), AxisTransform)(tensor, transform)


# ----------------------------------------------------------------------
# Sizes: the extents of a tensor, compared as torch compares shapes.


class Sizes(Values[Scalar]):
    """The sizes of a tensor's axes, as a list that can be compared with a shape, as in torch.

    `x.shape == (4, 5)` and `4 in x.shape` compare with tuples and lists of numbers or extents. They
    raise `ArgumentError` if the result depends on sizes that are known only when the program runs.
    The list can also be called, as in nvFuser: `x.shape()`.
    """

    __hash__ = None  # pyright: ignore[reportAssignmentType] (as of every list)

    def __call__(self, *dims: object) -> Sizes:
        """Returns the sizes, so that `x.shape()` works as in nvFuser. `dims` must be empty."""
        if dims:
            raise ArgumentError(
                f"shape() takes no axis, got {show(dims[0])}: write x.shape[{show(dims[0])}], or "
                f"x.size({show(dims[0])}){user_code(user_line())}"
            )
        return Sizes(self)

    @overload
    def __getitem__(self, key: SupportsIndex) -> Scalar: ...
    @overload
    def __getitem__(self, key: slice) -> Sizes: ...
    def __getitem__(self, key: SupportsIndex | slice) -> Scalar | Sizes:
        if isinstance(key, slice):
            return Sizes(super().__getitem__(key))
        return super().__getitem__(key)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list | tuple):
            return NotImplemented
        others = [*cast("Sequence[object]", other)]
        if len(self) != len(others):
            return False
        found = [_is_same(a, b) for a, b in zip(self, others, strict=True)]
        if None in found and False not in found:
            raise _unknown(self, f"equals {show(others)}")
        return False not in found

    def __ne__(self, other: object) -> bool:
        found = self.__eq__(other)
        return found if found is NotImplemented else not found

    def __contains__(self, value: object) -> bool:
        found = [_is_same(a, value) for a in self]
        if None in found and True not in found:
            raise _unknown(self, f"contains the size {show(value)}")
        return True in found

    def count(self, value: Any) -> int:
        """Returns how many of the sizes equal `value`.

        Raises:
            ArgumentError: the result depends on sizes that are known only at run time.
        """
        found = [_is_same(a, value) for a in self]
        if None in found:
            raise _unknown(self, f"contains {show(value)}")
        return found.count(True)

    def index(self, value: Any, start: SupportsIndex = 0, stop: SupportsIndex = maxsize) -> int:
        """Returns the first position of `value` in the slice [start, stop) of the sizes.

        Raises:
            ArgumentError: the result depends on sizes that are known only at run time.
            ValueError: no extent equals `value`.
        """
        for k in range(len(self))[slice(start, stop)]:
            is_same = _is_same(self[k], value)
            if is_same is None:
                raise _unknown(self, f"contains {show(value)}")
            if is_same:
                return k
        raise ValueError(f"{value} is not in the list")


def _is_same(size: Scalar, other: object) -> bool | None:
    """Returns whether a size equals a value, or None if this depends on the inputs of a call."""
    if size is other:
        return True
    value = other if isinstance(other, Scalar) else python_number(other)
    if value is None or (isinstance(value, int) and value < 0):
        return False
    condition = sc.eq(size, value)
    return bool(condition.value) if isinstance(condition, Const) else None


def _unknown(sizes: Iterable[Scalar], what: str) -> ArgumentError:
    """Returns the error for a comparison of shapes whose result depends on the inputs of a call.

    `what` is the comparison as text, such as `contains 4`.
    """
    return ArgumentError(
        f"cannot decide while the program is defined whether the shape {show(list(sizes))} {what} "
        f"(at {user_line()}): the extents of inputs are known only when it runs. Pass constant "
        "extents to define_tensor (fd.from_pytorch(x, static_sizes=True)), compare len(x.shape) or "
        "x.ndim, or compare single sizes in the program: where(x.shape[0] == n, a, b)"
    )
