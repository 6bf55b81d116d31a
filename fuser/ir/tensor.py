"""TensorView: the user's mutable handle on one tensor of a fusion.

The handle keeps its identity while scheduling rebinds its frozen `TensorDomain`. `axis`, `split`,
`merge`, `reorder` and `rfactor` index the *loop* domain, which includes reduction axes; `ndim`,
`size` and `shape` describe the *logical* domain without them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, overload

from fuser.ir.axis import Axis
from fuser.ir.domain.build_domain import DomainBuilder
from fuser.ir.domain.device_mesh import DeviceMesh
from fuser.ir.domain.tensor_domain import IterDomain, TensorDomain, contiguity_for, numbers
from fuser.ir.dtypes import DataType, dtype_text
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.sizes import Sizes
from fuser.ir.statement import Val
from fuser.ir.types import CacheOp, LoadStoreOpType, MemoryType, ParallelType
from fuser.support.arguments import checked
from fuser.support.errors import DefinitionError, UnsupportedError, user_code, user_line
from fuser.support.record import replace

if TYPE_CHECKING:
    from fuser.ir.fusion import Fusion, TensorOp

_CONSTANT_EXTENT = (ParallelType.vectorize, ParallelType.unroll, ParallelType.group)


# The schedule primitives that rewrite the fusion, by the names of the methods;
# `fuser.ir.primitives` fills it.
PRIMITIVES: dict[str, Callable[..., TensorView]] = {}


class _ShapeAttribute:
    """The (expanded) extents of a tensor: `x.shape()` as nvFuser has it, `x.shape[0]` as torch."""

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
    """A tensor of a fusion; made by `Fusion.new_tensor`."""

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
        # Only an explicit set_device_mesh freezes a tensor for propagation; a mesh that an op
        # copied is provenance.
        self.mesh_is_user_set = mesh_is_user_set
        self.is_cpu_scalar = is_cpu_scalar
        # How many loop axes, from the outside, are shared with the consumers.
        self.compute_at = 0
        self.domain = domain
        # The user's line that defined an input, or that gave a tensor its mesh.
        self.where = ""
        # The user's lines that cut it along device types and streams.
        self.cut_lines: Mapping[ParallelType, str] = {}

    # What `fuser.ops.operators` gives to tensors.
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
        # In a user's definition; elsewhere a bool (`fuser.ops.operators`).
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
        """`T0_g_float`: number, memory, dtype."""
        return f"T{self.number}_{self.memory.value}_{dtype_text(self._dtype)}"

    @property
    def ndim(self) -> int:
        """Number of logical axes without reductions."""
        return len(self.domain.no_reductions)

    @property
    def has_own_mesh(self) -> bool:
        """Whether the mesh counts: the user set it, or shared an axis among its devices. One that
        an op copied is provenance, which propagation begins without."""
        return self.mesh_is_user_set or self.domain.has_devices

    def dtype(self) -> DataType:
        return self._dtype

    def is_tensor(self) -> bool:
        return True

    def is_symbolic(self) -> bool:
        return True

    def definition(self) -> TensorOp | None:
        return self.fusion.definition(self)

    def uses(self) -> list[TensorOp]:
        return self.fusion.uses(self)

    @checked
    def size(self, dim: int) -> Scalar:
        """Return the (expanded) extent of logical axis `dim`."""
        axes = self.domain.no_reductions
        return axes[self._wrap(dim, len(axes))].size

    shape = _ShapeAttribute()

    def has_root(self) -> bool:
        return bool(self.domain.root)

    def get_root_domain(self) -> list[Axis]:
        return self._handles(self.domain.root_numbers)

    def get_logical_domain(self) -> list[Axis]:
        return self._handles(self.domain.logical_numbers)

    def get_loop_domain(self) -> list[Axis]:
        return self._handles(self.domain.loop_numbers)

    def _handles(self, group: Sequence[int]) -> list[Axis]:
        return [Axis(self, n) for n in group]

    @checked
    def axis(self, index: int) -> Axis:
        """Return loop axis `index` (negative counts from the end)."""
        loop = self.domain.loop_numbers
        if not loop:
            raise DefinitionError(f"Tried to access an axis in a 0-dim TensorView: {self}")
        return Axis(self, loop[self._wrap(index, len(loop))])

    def _wrap(self, index: int, length: int) -> int:
        wrapped = index + length if index < 0 else index
        if not 0 <= wrapped < length:
            raise DefinitionError(
                f"Tried to access out of boundary index {index}. total index: {length} in {self}"
            )
        return wrapped

    def user_line(self) -> str:
        """Return `file.py:12` of the user's line that this tensor comes from, "" if unknown."""
        op = self.definition()
        return self.where or (op.where if op is not None else "")

    # ------------------------------------------------------------ loop transforms
    @checked
    def split(self, axis: int, factor: Scalar | int, inner_split: bool = True) -> TensorView:
        """Replace a loop axis by (outer, inner).

        Inner split: inner extent = factor, outer = ceilDiv(extent, factor); outer split the other
        way round. The axis must be serial. Raises `DefinitionError`.
        """
        position = self._wrap(axis, len(self.domain.loop))
        inp = self.domain.loop[position]
        factor = sc.as_scalar(factor)
        value = sc.int_value(factor)
        if value is not None and value <= 0:
            raise DefinitionError(f"Invalid factor for split of {inp} in {self}: {value}")
        if inp.ptype is not ParallelType.serial:
            raise DefinitionError(
                f"Splitting an axis of non-Serial parallel type is not supported at this time: "
                f"{inp} in {self}"
            )
        if position < self.compute_at:
            raise DefinitionError(f"split of {inp}, which is inside the compute-at of {self}")
        built = DomainBuilder(self.fusion)
        parts = built.split(inp, factor, inner_split=inner_split)
        loop = self.domain.loop
        self._set_loop((*loop[:position], *parts, *loop[position + 1 :]), built)
        return self

    @checked
    def inner_split(self, axis: int, factor: Scalar | int) -> TensorView:
        """Split with inner extent = factor."""
        return self.split(axis, factor)

    @checked
    def outer_split(self, axis: int, factor: Scalar | int) -> TensorView:
        """Split with outer extent = factor."""
        return self.split(axis, factor, inner_split=False)

    @checked
    def merge(self, axis_o: int, axis_i: int | None = None) -> TensorView:
        """Merge two loop axes (axis_i defaults to axis_o + 1); the result sits at the smaller
        position, and axis_o is the outer factor."""
        loop = self.domain.loop
        o = self._wrap(axis_o, len(loop))
        i = self._wrap(o + 1 if axis_i is None else axis_i, len(loop))
        if o == i:
            raise DefinitionError(f"merge of axis {o} with itself in {self}")
        outer, inner = loop[o], loop[i]
        if outer.is_reduction() != inner.is_reduction():
            raise DefinitionError(f"merge of a reduction with another axis: {outer}, {inner}")
        if ParallelType.serial not in (outer.ptype, inner.ptype):
            raise DefinitionError(f"merge of two parallel axes: {outer}, {inner} in {self}")
        if outer.is_stream or inner.is_stream:
            raise DefinitionError(
                f"merge of a stream axis, which would stream both: {outer}, {inner} in {self}"
            )
        built = DomainBuilder(self.fusion)
        rest = [a for k, a in enumerate(loop) if k not in (o, i)]
        rest.insert(min(o, i), built.merge(outer, inner))
        self._set_loop(rest, built)
        return self

    @checked
    def reorder(self, old2new: Mapping[int, int] | None = None) -> TensorView:
        """Move loop axes: {old position: new position}; the others keep their order."""
        loop = self.domain.loop
        n = len(loop)
        moves = {self._wrap(o, n): self._wrap(w, n) for o, w in (old2new or {}).items()}
        if len(set(moves.values())) != len(old2new or {}):
            raise DefinitionError(f"reorder {old2new}: repeated positions for {self}")
        placed = {new: loop[old] for old, new in moves.items()}
        rest = iter(a for k, a in enumerate(loop) if k not in moves)
        self._set_loop([placed[k] if k in placed else next(rest) for k in range(n)])
        return self

    @checked
    def swizzle(self, x: int, y: int) -> NoReturn:
        """Raise `UnsupportedError`: shared memory is laid out by the compiler."""
        raise UnsupportedError(
            f"swizzle({x}, {y}) of {self}: how shared memory is laid out is the compiler's choice"
            f"{user_code(user_line())}"
        )

    @checked
    def swizzle1d(self, axis: int, parallel_type: ParallelType) -> TensorView:
        """Rotate loop axis `axis` by my coordinate along a device type (for ring schedules)."""
        if not parallel_type.is_device:
            raise DefinitionError(f"swizzle1d takes a device type, got {parallel_type.text}")
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
        """Give the axis with this number a parallel type (see `Axis.parallelize`)."""
        current = self.domain.axes.get(axis.number)
        if current is None:
            raise DefinitionError(f"{axis} is not an axis of {self}")
        if ptype in _CONSTANT_EXTENT and sc.int_value(current.extent) is None:
            raise DefinitionError(
                f"{ptype.text} needs a constant extent, but {axis} of {self} is symbolic"
            )
        self.domain = self.domain.with_axes(replace(current, ptype=ptype))

    # ------------------------------------------------------------ facts that the user sets
    @checked
    def set_device_mesh(self, mesh: object) -> None:
        """Attach a mesh (a DeviceMesh or whatever its constructor takes). Parallelizes nothing."""
        self.fusion.require_open(f"set_device_mesh of {self}")
        self.mesh = mesh if isinstance(mesh, DeviceMesh) else DeviceMesh(mesh)
        self.mesh_is_user_set = True
        self.where = user_line()

    @checked
    def set_memory_type(self, memory_type: MemoryType) -> None:
        """Move the tensor; fusion inputs and outputs accept global and symmetric only."""
        is_io = self in self.fusion.inputs or self in self.fusion.outputs
        if is_io and memory_type not in (MemoryType.global_, MemoryType.symmetric):
            raise DefinitionError(f"{self} is a fusion input or output: global or symmetric only")
        self.memory = memory_type

    def give_memory(self) -> None:
        """Let memory hold the tensor: global, unless it was moved to symmetric memory."""
        if self.memory is not MemoryType.symmetric:
            self.memory = MemoryType.global_

    @checked
    def set_allocation_domain(
        self,
        new_allocation_domain: Sequence[Axis | IterDomain],
        new_contiguity: bool | Sequence[bool | None],
    ) -> None:
        """Declare memory order with axes reachable from logical or loop; contiguity as one flag or
        one per axis. Broadcast and reduction axes get None."""
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
            what = f"set_allocation_domain of {self}: {len(flags)} flags of contiguity"
            raise DefinitionError(f"{what} for {len(axes)} axes")
        self.domain = self.domain.with_allocation(order, flags)

    # Caching and rfactor rewrite the fusion; they stand in `fuser.ir.primitives`.
    @checked
    def rfactor(self, axes: Sequence[int]) -> TensorView:
        """Split a reduction in two: a new producer reduces the listed loop axes."""
        return PRIMITIVES["rfactor"](self, axes)

    @checked
    def cache_after(
        self,
        op_type: LoadStoreOpType = LoadStoreOpType.set,
        cache_op: CacheOp = CacheOp.unspecified,
        propagate_allocation_domain: bool = True,
        cached_uses: Sequence[TensorOp] = (),
    ) -> TensorView:
        """Insert a copy between this tensor and its uses; return the copy."""
        return PRIMITIVES["cache_after"](
            self, op_type, cache_op, propagate_allocation_domain, cached_uses
        )

    @checked
    def cache_before(self, op_type: LoadStoreOpType = LoadStoreOpType.set) -> TensorView:
        """Give the definition to a new tensor, of which this one becomes a copy; return the new."""
        return PRIMITIVES["cache_before"](self, op_type)

    @checked
    def cache_fork(self) -> TensorView:
        """For an output with uses: the uses read the value, the output becomes a copy."""
        return PRIMITIVES["cache_fork"](self)

    def __str__(self) -> str:
        from fuser.ir.fusion import tensor_text

        return tensor_text(self)
