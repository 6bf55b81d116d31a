"""What a random program is: inputs, statements, outputs, and the calls that it must survive.

A program is data. Its definition is Python text (`define_text`), which the runner executes and the
standalone script contains, so that what failed and what is written down are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

# Part of every seed: a change of the generators makes other programs.
VERSION = 11


@dataclass(frozen=True)
class Ref:
    """A value of the program by name: a tensor or a scalar."""

    name: str


@dataclass(frozen=True)
class Size:
    """The extent of one axis of a tensor, as the program can name it."""

    name: str
    axis: int


@dataclass(frozen=True)
class Dt:
    """A data type."""

    name: str


Arg = Ref | Size | Dt | int | float | complex | bool | str | None | Sequence["Arg"]


@dataclass(frozen=True)
class Stmt:
    """`outs = fd.ops.op(*args, **kwargs)`."""

    outs: tuple[str, ...]
    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...] = ()


@dataclass(frozen=True)
class Layout:
    """How a tensor of any shape lies in memory.

    `order` lists axes from the outermost in memory; `gaps` are extra elements behind each axis of
    that order; `step` is the stride of the innermost; `expanded` axes have stride 0; axes of size 1
    in `junk` have a stride that nothing may read; `overlap` lets rows share elements.
    """

    order: tuple[int, ...]
    gaps: tuple[int, ...]
    step: int = 1
    expanded: tuple[int, ...] = ()
    junk: tuple[int, ...] = ()
    overlap: bool = False

    def strides(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        strides = [0] * len(shape)
        step = self.step
        for place in reversed(range(len(shape))):
            axis = self.order[place]
            if axis in self.expanded:
                continue
            strides[axis] = step
            if axis in self.junk and shape[axis] == 1:
                strides[axis] = 977 + axis
                continue
            step *= max(shape[axis] - (1 if self.overlap and shape[axis] > 2 else 0), 1)
            step += self.gaps[place]
        return tuple(strides)

    @property
    def is_writable(self) -> bool:
        return not self.expanded and not self.overlap


def plain_layout(rank: int) -> Layout:
    return Layout(tuple(range(rank)), (0,) * rank)


@dataclass(frozen=True)
class TensorInput:
    """A tensor input as it is declared; `shape` has -1 for symbolic extents."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    flags: bool | tuple[bool | None, ...]
    stride_order: tuple[int, ...] = ()
    layout: Layout = field(default_factory=lambda: plain_layout(0))


@dataclass(frozen=True)
class ScalarInput:
    """A scalar input."""

    name: str
    dtype: str


@dataclass(frozen=True)
class TensorArg:
    """What one call passes for a tensor: a shape, an offset in elements, and what it holds."""

    shape: tuple[int, ...]
    offset: int
    fill: str
    seed: int


CallArg = TensorArg | int | float | complex | bool


@dataclass(frozen=True)
class Output:
    """A result; with `alias` it is written into that input and not returned."""

    name: str
    alias: str | None = None


@dataclass(frozen=True)
class Annotation:
    """A mesh on a tensor, and its outer splits: (axis, mesh dimension `x`, `y`)."""

    name: str
    mesh: int
    cuts: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Streaming:
    """A stream axis: `count` blocks of a logical axis, None: all that devices' cuts leave of it.

    `swizzle` is the mesh dimension along which each rank begins with its own block; `around` says
    how many of the devices' cuts of the axis lie inside of the blocks. With `merged`, the stream
    axis merges these axes, outermost first, each as a whole or in so many blocks (`axis` is the
    first of them); `count` blocks are then those of the merged axis.
    """

    name: str
    axis: int
    count: int | None = None
    swizzle: str | None = None
    around: int = 0
    merged: tuple[tuple[int, int | None], ...] = ()


@dataclass(frozen=True)
class Program:
    """A definition and its calls. `meshes` are nested lists of ranks; empty on one device."""

    inputs: tuple[TensorInput | ScalarInput, ...]
    stmts: tuple[Stmt, ...]
    outputs: tuple[Output, ...]
    calls: tuple[tuple[CallArg, ...], ...]
    meshes: tuple[tuple[object, ...], ...] = ()
    annotations: tuple[Annotation, ...] = ()
    ranks: int = 1
    streams: tuple[Streaming, ...] = ()

    def spreads(self) -> dict[str, tuple[tuple[object, ...], tuple[tuple[int, str, int], ...]]]:
        """Returns the mesh and the cuts of each annotated tensor, by name.

        A cut is an axis, a mesh dimension, and in how many blocks a stream cuts the axis before.
        """
        streams = {(s.name, s.axis): s for s in self.streams}

        def blocks(note: Annotation, at: int) -> int:
            axis, _ = note.cuts[at]
            rest = sum(1 for a, _ in note.cuts[at:] if a == axis)
            here = streams.get((note.name, axis))
            return 1 if here is None or rest > here.around else here.count or 1

        return {
            a.name: (
                self.meshes[a.mesh],
                tuple((*cut, blocks(a, k)) for k, cut in enumerate(a.cuts)),
            )
            for a in self.annotations
        }


# ------------------------------------------------------------------ text
def arg_text(arg: Arg) -> str:
    match arg:
        case Ref(name):
            return name
        case Size(name, axis):
            return f"fd.ops.size({name}, {axis})"
        case Dt(name):
            return f"DataType.{name}"
        case list():
            return "[" + ", ".join(map(arg_text, arg)) + "]"
        case tuple():
            return "(" + "".join(f"{arg_text(a)}, " for a in arg) + ")"
        case float():
            return f"float({str(arg)!r})" if arg != arg or abs(arg) == float("inf") else repr(arg)
        case _:
            return repr(arg)


def stmt_text(stmt: Stmt) -> str:
    args = [arg_text(a) for a in stmt.args]
    args += [f"{key}={arg_text(value)}" for key, value in stmt.kwargs]
    return f"{', '.join(stmt.outs)} = fd.ops.{stmt.op}({', '.join(args)})"


def input_text(given: TensorInput | ScalarInput) -> str:
    if isinstance(given, ScalarInput):
        return f"{given.name} = fd.define_scalar(None, DataType.{given.dtype})"
    flags = given.flags if isinstance(given.flags, bool) else list(given.flags)
    order = f", stride_order={list(given.stride_order)}" if given.stride_order else ""
    return (
        f"{given.name} = fd.define_tensor({list(given.shape)}, contiguity={flags}, "
        f"dtype=DataType.{given.dtype}{order})"
    )


def annotation_lines(program: Program) -> Iterator[str]:
    for number, ranks in enumerate(program.meshes):
        yield f"mesh{number} = multidevice.DeviceMesh({_as_list(ranks)})"
    streams = {s.name: s for s in program.streams if not s.merged}
    for note in program.annotations:
        yield f"{note.name}.set_device_mesh(mesh{note.mesh})"
        stream = streams.pop(note.name, None)
        # From the last axis to the first: a split moves only what is behind it.
        axes = {axis for axis, _ in note.cuts} | ({stream.axis} if stream else set())
        for axis in sorted(axes, reverse=True):
            at = axis
            here = stream if stream is not None and stream.axis == axis else None
            dims = [d for a, d in note.cuts if a == axis]
            outside = len(dims) - (0 if here is None else here.around)
            for place, dim in enumerate([*dims, None]):
                if here is not None and place == max(outside, 0):
                    yield _stream_text(here, at)
                    at += 1
                if dim is not None:
                    yield f"cut({note.name}, {at}, mesh{note.mesh}, ParallelType.mesh_{dim})"
                    at += 1
    for stream in streams.values():
        yield _stream_text(stream, stream.axis)
    for stream in program.streams:
        if stream.merged:
            cuts = [a for n in program.annotations if n.name == stream.name for a, _ in n.cuts]
            yield _merged_text(stream, cuts)


def _stream_text(s: Streaming, at: int) -> str:
    count = "" if s.count is None else f", {s.count}"
    return f"stream({s.name}, {at}{count}" + (
        f", swizzle=ParallelType.mesh_{s.swizzle})" if s.swizzle else ")"
    )


def _merged_text(s: Streaming, cuts: Sequence[int]) -> str:
    # What devices leave of an axis stands behind their cuts of it.
    parts = [(a + sum(c <= a for c in cuts), blocks) for a, blocks in s.merged]
    count = "" if s.count is None else f", {s.count}"
    return f"merged({s.name}, {parts}{count})"


# What annotates one tensor: positions count the axes that a user sees.
CUT_TEXT = """
def cut(tv, axis, mesh, ptype):
    seen = [k for k, a in enumerate(tv.get_loop_domain()) if not a.is_reduction()]
    tv.outer_split(seen[axis], mesh.size_of(ptype))
    tv.axis(seen[axis]).parallelize(ptype)


"""
MERGED_TEXT = """
def merged(tv, parts, count=None):
    seen = [a for a in tv.get_loop_domain() if not a.is_reduction()]
    axes = []
    for position, blocks in parts:
        at = tv.get_loop_domain().index(seen[position])
        if blocks is not None:
            tv.outer_split(at, blocks)
        axes.append(tv.axis(at))
    at = tv.get_loop_domain().index(axes[0])
    for axis in axes[1:]:
        other = tv.get_loop_domain().index(axis)
        tv.merge(at, other)
        at = min(at, other)
    if count is not None:
        tv.outer_split(at, count)
    tv.axis(at).parallelize(ParallelType.stream)


"""
STREAM_TEXT = """
def stream(tv, axis, count=None, swizzle=None):
    seen = [k for k, a in enumerate(tv.get_loop_domain()) if not a.is_reduction()]
    if count is not None:
        tv.outer_split(seen[axis], count)
    if swizzle is not None:
        tv.swizzle1d(seen[axis], swizzle)
    tv.axis(seen[axis]).parallelize(ParallelType.stream)


"""


def _as_list(ranks: object) -> object:
    return [_as_list(r) for r in ranks] if isinstance(ranks, tuple) else ranks


def define_text(program: Program) -> str:
    """Returns the text of `define(fd)`."""
    lines = [input_text(i) for i in program.inputs]
    lines += [stmt_text(s) for s in program.stmts]
    lines += annotation_lines(program)
    for out in program.outputs:
        alias = f", {out.alias}" if out.alias else ""
        lines.append(f"fd.add_output({out.name}{alias})")
    helpers = CUT_TEXT if program.annotations else ""
    helpers += STREAM_TEXT if any(not s.merged for s in program.streams) else ""
    helpers += MERGED_TEXT if any(s.merged for s in program.streams) else ""
    return helpers + "def define(fd):\n" + "".join(f"    {line}\n" for line in lines)


def names_in(arg: Arg) -> Iterator[str]:
    """Yields the names of values that an argument reads."""
    if isinstance(arg, Ref | Size):
        yield arg.name
    elif isinstance(arg, list | tuple):
        for item in arg:
            yield from names_in(item)


def operands(stmt: Stmt) -> list[str]:
    """Returns the names that a statement reads."""
    return [*names_in(stmt.args), *names_in(tuple(v for _, v in stmt.kwargs))]
