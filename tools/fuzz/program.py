"""A random program as data: its inputs, statements, outputs, and the calls to run.

`define_text` returns its definition as Python text. The runner executes this text and the
standalone script contains it, so both run the same program.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

# Part of every seed: increase it when a change of the generators makes other programs.
VERSION = 11


@dataclass(frozen=True)
class Ref:
    """A reference to a value of the program by name: a tensor or a scalar."""

    name: str


@dataclass(frozen=True)
class Size:
    """The extent of one axis of a tensor, as an argument of a statement."""

    name: str
    axis: int


@dataclass(frozen=True)
class Dt:
    """A data type."""

    name: str


Arg = Ref | Size | Dt | int | float | complex | bool | str | None | Sequence["Arg"]


@dataclass(frozen=True)
class Stmt:
    """A statement: `outs = fd.ops.op(*args, **kwargs)`."""

    outs: tuple[str, ...]
    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...] = ()


@dataclass(frozen=True)
class Layout:
    """The memory layout of a tensor of any shape.

    - `order`: the axes, outermost in memory first.
    - `gaps`: extra elements after each axis of that order.
    - `step`: the stride of the innermost axis.
    - `expanded`: axes with stride 0.
    - `junk`: axes that have a meaningless stride where their extent is 1.
    - `overlap`: rows share elements.
    """

    order: tuple[int, ...]
    gaps: tuple[int, ...]
    step: int = 1
    expanded: tuple[int, ...] = ()
    junk: tuple[int, ...] = ()
    overlap: bool = False

    def strides(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the strides of a tensor with this shape."""
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
        """Whether all elements have separate memory."""
        return not self.expanded and not self.overlap


def plain_layout(rank: int) -> Layout:
    """Returns the dense row-major layout for this number of axes."""
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
    """The argument of one call for a tensor input: shape, offset in elements, and contents."""

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
    """A mesh on a tensor, and its outer splits: (axis, mesh dimension `x` or `y`)."""

    name: str
    mesh: int
    cuts: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Streaming:
    """A stream axis of a tensor.

    - `count`: the number of blocks of the axis `axis`; None: the whole remainder of the device
      cuts.
    - `swizzle`: the mesh dimension along which each rank starts with its own block.
    - `around`: how many of the device cuts of the axis are inside the blocks.
    - `merged`: the axes that the stream axis merges, outermost first, each as a whole or in a
      number of blocks. `axis` is then the first of them, and `count` blocks are those of the merged
      axis.
    """

    name: str
    axis: int
    count: int | None = None
    swizzle: str | None = None
    around: int = 0
    merged: tuple[tuple[int, int | None], ...] = ()


@dataclass(frozen=True)
class Program:
    """A definition and its calls. `meshes` are nested tuples of ranks; empty on one device."""

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

        A cut is an axis, a mesh dimension, and the number of blocks into which a stream cuts the
        axis before.
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
    """Returns an argument as Python text."""
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
    """Returns a statement as Python text."""
    args = [arg_text(a) for a in stmt.args]
    args += [f"{key}={arg_text(value)}" for key, value in stmt.kwargs]
    return f"{', '.join(stmt.outs)} = fd.ops.{stmt.op}({', '.join(args)})"


def input_text(given: TensorInput | ScalarInput) -> str:
    """Returns the declaration of an input as Python text."""
    if isinstance(given, ScalarInput):
        return f"{given.name} = fd.define_scalar(None, DataType.{given.dtype})"
    flags = given.flags if isinstance(given.flags, bool) else list(given.flags)
    order = f", stride_order={list(given.stride_order)}" if given.stride_order else ""
    return (
        f"{given.name} = fd.define_tensor({list(given.shape)}, contiguity={flags}, "
        f"dtype=DataType.{given.dtype}{order})"
    )


def annotation_lines(program: Program) -> Iterator[str]:
    """Yields the lines that create meshes and annotate tensors."""
    for number, ranks in enumerate(program.meshes):
        yield f"mesh{number} = multidevice.DeviceMesh({_as_list(ranks)})"
    streams = {s.name: s for s in program.streams if not s.merged}
    for note in program.annotations:
        yield f"{note.name}.set_device_mesh(mesh{note.mesh})"
        stream = streams.pop(note.name, None)
        # From the last axis to the first: a split moves only the axes after it.
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
    # The remainder of an axis follows its device cuts.
    parts = [(a + sum(c <= a for c in cuts), blocks) for a, blocks in s.merged]
    count = "" if s.count is None else f", {s.count}"
    return f"merged({s.name}, {parts}{count})"


# Helper functions that annotate one tensor: positions count the axes that a user sees.
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
