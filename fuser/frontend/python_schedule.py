"""Meshes, loops and layouts of a fusion as the calls that users make on its tensors.

    from fuser import ParallelType, multidevice
    mesh0 = multidevice.DeviceMesh([0, 1])
    tv0.set_device_mesh(mesh0)
    tv0.outer_split(0, 2)
    tv0.axis(0).parallelize(ParallelType.mesh_x)

A tensor begins as its op makes it; every line is a step from there to what it is. What one `shard`
cuts is written so:

    shard(tv0, mesh0, [Shard(dim=0)])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fuser.frontend.python_statements import is_stride_order, stride_order_of
from fuser.ir.domain.axis_path import transforms_between
from fuser.ir.domain.device_mesh import DeviceMesh
from fuser.ir.domain.tensor_domain import (
    MergeTransform,
    SplitTransform,
    Swizzle1D,
    Transform,
    contiguity_for,
    transform_text,
)
from fuser.ir.fusion import Fusion
from fuser.ir.ops.nodes import LoadStoreOp
from fuser.ir.shard_annotation import Replicate, Shard, placements_of
from fuser.ir.tensor import TensorView
from fuser.ir.types import MemoryType, ParallelType
from fuser.support.errors import UnsupportedError

# The text of a value; it may write lines of its own.
Text = Callable[[object], str]


class ScheduleText:
    """The lines that stand behind the outputs of a fusion."""

    def __init__(self, fusion: Fusion, text: Text, add: Callable[[str], None]) -> None:
        self._fusion, self._text, self._add = fusion, text, add
        self._meshes: dict[DeviceMesh, str] = {}
        self._imported: set[str] = set()
        self._ends = {*fusion.inputs, *fusion.outputs}

    def write(self) -> list[str]:
        """Write the lines of all tensors; return the names of the package that stand in them."""
        tensors = self._fusion.tensors()
        for tv in tensors:
            text, placements = _TensorText(tv, self._text, self._line), _placements_of(tv)
            if placements is None or (mesh := tv.mesh) is None:
                self._mesh(tv)
                text.write()
            else:
                shown = ", ".join(map(str, placements))
                self._line(f"shard({self._text(tv)}, {self._mesh_name(mesh)}, [{shown}])")
                text.write_layout()
            self._memory(tv)
        for tv in tensors:
            if tv.compute_at:
                name = self._text(tv)
                self._add(f"fd.sched.inline_at({name}, {tv.compute_at}, selected_tensors=[{name}])")
        return sorted(self._imported)

    def _line(self, line: str) -> None:
        names = ("MemoryType.", "ParallelType.", "multidevice.", "Replicate(", "Shard(", "shard(")
        self._imported.update(n[:-1] for n in names if n in line)
        self._add(line)

    def _mesh(self, tv: TensorView) -> None:
        if tv.mesh is None or not tv.has_own_mesh:
            return
        mesh, name = self._mesh_name(tv.mesh), self._text(tv)
        # One that an op copied is open to propagation, one that is set is not.
        is_set = tv.mesh_is_user_set
        self._line(f"{name}.set_device_mesh({mesh})" if is_set else f"{name}.mesh = {mesh}")

    def _mesh_name(self, mesh: DeviceMesh) -> str:
        """Return the variable of a mesh, which its first use defines."""
        name = self._meshes.get(mesh)
        if name is None:
            name = self._meshes[mesh] = f"mesh{len(self._meshes)}"
            self._line(f"{name} = multidevice.DeviceMesh({_ranks_text(mesh)})")
        return name

    def _memory(self, tv: TensorView) -> None:
        if tv.memory is not (MemoryType.global_ if tv in self._ends else MemoryType.local):
            self._line(f"{self._text(tv)}.set_memory_type(MemoryType.{tv.memory.name})")


def _placements_of(tv: TensorView) -> list[Shard | Replicate] | None:
    """Return the placements of a tensor that one `shard` cuts as it is; None for any other."""
    placements, domain = placements_of(tv), tv.domain
    named = {*domain.loop_numbers, *domain.logical_numbers, *domain.root_numbers}
    is_cut = placements is not None and any(isinstance(p, Shard) for p in placements)
    return placements if is_cut and named.issuperset(domain.allocation_numbers) else None


def _ranks_text(mesh: DeviceMesh) -> str:
    """Return what the constructor of a mesh takes."""
    ranks = list(mesh.devices)
    if mesh.ndim == 1:
        is_range = len(ranks) > 2 and ranks == list(range(ranks[0], ranks[0] + len(ranks)))
        return f"range({ranks[0]}, {ranks[-1] + 1})" if is_range else str(ranks)
    nested: list[object] = [*ranks]
    for count in mesh.shape[:0:-1]:
        nested = [nested[k : k + count] for k in range(0, len(nested), count)]
    return str(nested)


def transform_call(t: Transform, loop: list[int], text: Text) -> str | None:
    """Return the call of a transform of loop axes, None where users have none; the axes are those
    behind it then."""
    places = [loop.index(n) for n in t.inputs]
    for n in t.inputs:
        loop.remove(n)
    loop[min(places) : min(places)] = t.outputs
    match t:
        case SplitTransform():
            name = "inner_split" if t.inner_split else "outer_split"
            return f"{name}({places[0]}, {text(t.factor)})"
        case MergeTransform():
            return f"merge({places[0]}, {places[1]})"
        case Swizzle1D():
            return f"swizzle1d({places[0]}, ParallelType.{t.ptype.name})"
        case _:
            return None


class _TensorText:
    """The lines of one tensor: transforms, the order of its loops, parallel types, layout."""

    def __init__(self, tv: TensorView, text: Text, line: Callable[[str], None]) -> None:
        self._tv, self._text, self._line = tv, text, line
        self._domain = tv.domain
        # The loop axes as they are after the lines so far.
        self._loop = [*tv.domain.logical_numbers]
        # Variables of axes that no view of the tensor has any more.
        self._handles: dict[int, str] = {}

    def write(self) -> None:
        parallel = [a for a in self._domain.axes.values() if a.ptype is not ParallelType.serial]
        needed = {a.number for a in parallel} | {*self._domain.allocation_numbers}
        for t in self._transforms():
            for number in needed.intersection(t.inputs):
                self._keep(number)
            call = transform_call(t, self._loop, self._text)
            if call is None:
                what = transform_text(t, self._domain)
                raise UnsupportedError(f"no statement for {what} of {self._tv}")
            self._line(f"{self._name}.{call}")
        if (order := self._reorder()) is not None:
            self._line(f"{self._name}.reorder({order})")
        for axis in sorted(parallel, key=lambda a: self._place(a.number)):
            handle = self._handle(axis.number)
            self._line(f"{handle}.parallelize(ParallelType.{axis.ptype.name})")
        self._layout()

    def write_layout(self) -> None:
        """Write the layout of a tensor whose loops are what they are to be."""
        self._loop = [*self._domain.loop_numbers]
        self._layout()

    @property
    def _name(self) -> str:
        return self._text(self._tv)

    def _transforms(self) -> list[Transform]:
        """Return what derives loops from logical axes."""
        domain = self._domain
        own = transforms_between(domain, domain.root, domain.logical) if domain.root else ()
        return [t for t in domain.transforms if t not in own]

    def _reorder(self) -> dict[int, int] | None:
        """Return where loop axes are to be moved; None where all are in place."""
        wanted = [*self._domain.loop_numbers]
        if self._loop == wanted:
            return None
        moves = {k: wanted.index(n) for k, n in enumerate(self._loop)}
        self._loop = wanted
        return {k: to for k, to in moves.items() if k != to}

    # ------------------------------------------------------------ axes
    def _views(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "get_logical_domain()", self._domain.logical_numbers
        yield "get_root_domain()", self._domain.root_numbers

    def _keep(self, number: int) -> None:
        """Name an axis that a transform is about to take out of all views."""
        if number in self._handles or any(number in view for _, view in self._views()):
            return
        name = f"{self._name}_axis{len(self._handles)}"
        self._line(f"{name} = {self._name}.axis({self._loop.index(number)})")
        self._handles[number] = name

    def _handle(self, number: int) -> str:
        """Return the text of an axis of the finished tensor."""
        if number in self._loop:
            return f"{self._name}.axis({self._loop.index(number)})"
        if number in self._handles:
            return self._handles[number]
        for view, numbers in self._views():
            if number in numbers:
                return f"{self._name}.{view}[{numbers.index(number)}]"
        raise UnsupportedError(f"no statement for axis {self._domain.axes[number]} of {self._tv}")

    def _place(self, number: int) -> tuple[bool, int]:
        """Return where an axis stands among those that are parallelized: loops come first."""
        is_loop = number in self._loop
        return not is_loop, self._loop.index(number) if is_loop else number

    # ------------------------------------------------------------ layout
    def _layout(self) -> None:
        domain, tv = self._domain, self._tv
        if (domain.allocation_numbers, domain.contiguity) == _first_layout(tv):
            return
        order = domain.allocation_numbers
        axes = ", ".join(map(self._handle, order))
        # Without axes, the flags are those of the logical ones.
        flags = (
            f
            for f in (True, False)
            if order and contiguity_for(domain.allocation, f) == domain.contiguity
        )
        contiguity = next(flags, list(domain.contiguity))
        self._line(f"{self._name}.set_allocation_domain([{axes}], {contiguity})")


def _first_layout(tv: TensorView) -> tuple[tuple[int, ...], tuple[bool | None, ...]]:
    """Return allocation and contiguity as the statement of a tensor leaves them."""
    domain = tv.domain
    definition = tv.definition()
    order = domain.allocation_numbers
    if definition is None and (not order or stride_order_of(tv) is not None):
        return order, domain.contiguity
    if isinstance(definition, LoadStoreOp) and is_stride_order(definition):
        return order, domain.contiguity
    return (), contiguity_for(domain.logical)
