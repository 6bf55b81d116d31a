"""The pointwise scheduler: fusions without reductions and contractions.

One output is the reference tensor, whose loops all other tensors copy. Its axes are put in memory
order, and adjacent axes are merged where all tensors are contiguous; each merged axis is a run. The
innermost run is `inner`; the others together are `outer`.

Loops are listed from outer to inner: BIDx and BIDy are CUDA blocks, TIDx and TIDy threads, S
serial, US unswitched, UR unrolled and V vector loops. The body of an unswitched loop exists in two
versions, with and without bounds checks:

    GPU, one run   [BIDx, US, UR, TIDx, V]
    GPU, several   [BIDx outer, BIDy inner, US, UR outer, TIDy outer, TIDx inner, V inner]
    GPU, along     [BIDy outer, BIDx inner, US, UR inner, TIDx inner, V inner]
    GPU, flat      [BIDx, US, UR, TIDx, V], all runs as one
    CPU            [S, ..., S inner], everything inlined into plain loops

On the GPU, inputs are loaded into registers right after US. All loads of an unrolled loop are thus
issued before the first value is used. All other tensors are inlined.

*Flat* is for dense rows whose length is no multiple of a vector. The vectors of tensors with all
axes cross the ends of rows; other operands are read element by element.

*Along* is for lookups of elements in a row of a table. A CUDA block processes a long piece of one
row, so that its lookups hit cache lines that it has loaded already.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from fuser.ir.axis_graph import AxisGraph
from fuser.ir.domain.tensor_domain import IterDomain
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.ops.lookup import LookupOp
from fuser.ir.ops.nodes import CatOp, LibraryOp, ReductionOp, WelfordOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.types import ParallelType
from fuser.ops.reference.meaning import REDUCING
from fuser.schedule.input_facts import Facts, RunExtents
from fuser.schedule.iteration_space import (
    Access,
    Space,
    VectorWidths,
    has_self_mapping,
    iteration_space,
    power_of_two_at_least,
    power_of_two_at_most,
    tensors_above_resize,
)
from fuser.schedule.tiling import (
    Loops,
    arrange,
    cache_input,
    cache_output,
    intermediates,
    is_direct_input,
    loops_error,
    parallelize,
    split_tile,
    vectorize_last,
)
from fuser.support.device import VECTOR_BYTES, DeviceInfo
from fuser.support.record import record

PT = ParallelType
NOT_POINTWISE = (ReductionOp, WelfordOp, LibraryOp)
THREADS = 128
# Bytes of all full inputs that a thread loads before it uses the first, or bytes that it stores,
# when all threads have work. Measured on an H200: 32 reach the bandwidth of a copy, 64 lose 3 to
# 7%.
BYTES_IN_FLIGHT = 32
# With two runs, a thread reads a broadcast operand once for all of its vectors, so more vectors
# pay. Measured on an H200, bias + GELU: 128 bytes take 5% less time than 32.
BYTES_IN_FLIGHT_SHARED = 128
MAX_UNROLL = 8
# Limit for flat vectors: their width times the bytes of operands shared by rows, divided by the
# bytes of full tensors. A thread reads shared operands element by element, and the next thread
# reads one vector further, so proportionally more lines are requested from the L1 cache. At one
# line per cycle, an H200's cache keeps up with a ratio of 5.6 (computed). Measured for rows of
# 50257: with a ratio of 32, batch norm took 511 us, 211 by single elements; with 8, 390 and 342;
# with 2.7, bias + dropout + add took 190 and 468.
MAX_SHARED = 5
# Threads of a block in the *along* form, where rows are long: 8192 elements with 8 vectors of 2
# each.
THREADS_ALONG = 512
# Vectors of this many elements are halved when some threads have no work.
MANY_ELEMENTS = 8


@record
class PointwiseParams:
    """The parameters of a pointwise kernel.

    The kernel's axes are merged to two: `inner`, the innermost axes in memory that are contiguous
    in every tensor, and `outer`, all others.

    - `threads_x`, `threads_y`: the threads of a CUDA block along `inner` and `outer`. With
      `threads_x` 0, the kernel has the serial loops of a CPU.
    - `vector`: the number of elements of a vector.
    - `unroll`: the number of vectors per thread. A thread's vectors are at different positions
      along `outer`, or along `inner` if there is no `outer` or `along` is True.
    - `inner_on_x`: whether the CUDA blocks along `inner` are BIDx, and those along `outer` BIDy.
    - `pieces`: the number of equal pieces of a concatenation along the innermost axis. A thread
      processes one vector of each piece.
    - `flat`: whether all axes are merged to one, so that vectors may cross the ends of rows.
    - `along`: whether each CUDA block processes a long piece of one row, for lookups in a table.
    """

    threads_x: int = 0
    threads_y: int = 1
    vector: int = 1
    unroll: int = 1
    inner_on_x: bool = False
    pieces: int = 1
    flat: bool = False
    along: bool = False

    def is_near(self, other: object) -> bool:
        """Returns whether a compiled kernel with the parameters `other` can replace one with
        `self`.

        If so, no kernel is compiled with `self` for small inputs, because both take about the same
        time. The vector widths must be equal, or be 8 (`MANY_ELEMENTS`) and 4.
        """
        if not isinstance(other, PointwiseParams):
            return False
        widths = sorted((self.vector, other.vector))
        is_half = widths[1] == MANY_ELEMENTS and 2 * widths[0] == widths[1]
        is_same = widths[0] == widths[1] or is_half
        return (
            is_same
            and (self.pieces, self.flat, self.along) == (other.pieces, other.flat, other.along)
            and bool(self.threads_x) == bool(other.threads_x)
        )

    is_alike = is_near

    def __str__(self) -> str:
        if not self.threads_x:
            return "pointwise(loops)"
        order = ", inner on x" if self.inner_on_x else ""
        pieces = f", {self.pieces} pieces" if self.pieces > 1 else ""
        flat = ", flat" if self.flat else ""
        along = " along" if self.along else ""
        return (
            f"pointwise(threads {self.threads_x}x{self.threads_y}, vector {self.vector}, "
            f"unroll {self.unroll}{along}{order}{pieces}{flat})"
        )


def generic(device: DeviceInfo) -> PointwiseParams:
    """Returns parameters with which a pointwise kernel is correct for all inputs, for example
    inputs of any alignment.

    `device` is the device that runs the kernel.
    """
    return PointwiseParams() if device.kind == "cpu" else PointwiseParams(threads_x=THREADS)


# ------------------------------------------------------------------ acceptance
def accepts(fusion: Fusion) -> str | None:
    """Returns the reason why the pointwise scheduler rejects the fusion; None if the fusion is
    accepted.

    An accepted fusion has no reductions or library ops, and all its outputs have the same axes.
    """
    for op in fusion.exprs:
        if isinstance(op, NOT_POINTWISE):
            return f"{op.name} of {op.outputs[0]} is not pointwise"
    graph = AxisGraph(fusion)
    return common_rejection(fusion, graph) or _output_rejection(fusion, graph)


def common_rejection(fusion: Fusion, graph: AxisGraph) -> str | None:
    """Returns the reason why every scheduler except `plain` must reject the fusion; None if there
    is no such reason.

    For example, an input is also an output, or two axes of one tensor would have to be one loop.
    `graph` relates the axes of all tensors.
    """
    if not fusion.exprs or not fusion.outputs:
        return "the fusion computes nothing"
    if any(out in fusion.inputs for out in fusion.outputs):
        return "an input is also an output"
    reason = table_rejection(fusion) or _shift_rejection(fusion)
    if reason is not None:
        return reason
    repeated = has_self_mapping(graph, fusion.tensors())
    if repeated is not None:
        return f"two axes of {repeated} are the same axis elsewhere in the fusion"
    return _alias_rejection(fusion, graph)


def table_rejection(fusion: Fusion) -> str | None:
    """Returns the reason why the fusion must be rejected, if the kernel itself would compute the
    table of a lookup; None if all tables are inputs.

    Any thread may read any part of a lookup's table, so the table must be complete in memory before
    the kernel starts.
    """
    for op in fusion.exprs:
        if isinstance(op, LookupOp) and op.table not in fusion.inputs:
            return f"the table {op.table} of {op.name} is computed in the same kernel"
    return None


def _shift_rejection(fusion: Fusion) -> str | None:
    """Returns the reason why the fusion must be rejected, if the result of a reduction is read at
    shifted indices; None if no result is.

    An example is a slice that leaves one element, which all threads read. A shifted read may need
    the result of another thread, but results of reductions are in registers, which other threads
    cannot read.
    """
    reduced = [out for op in fusion.exprs if isinstance(op, REDUCING) for out in op.outputs]
    resized = tensors_above_resize(fusion) if reduced else frozenset[TensorView]()
    shifted = next((tv for tv in reduced if tv in resized), None)
    return (
        None
        if shifted is None
        else f"{shifted} is the result of a reduction and is read at shifted indices"
    )


def _alias_rejection(fusion: Fusion, graph: AxisGraph) -> str | None:
    """Returns the reason why the fusion must be rejected, if an output cannot overwrite an input;
    None if every such output can.

    An output can overwrite an input if each element of the output depends only on the same element
    of that input. Otherwise one thread may read an element before or after another thread
    overwrites this element.
    """
    resized = tensors_above_resize(fusion) if fusion.aliases else frozenset()
    tables = {op.table for op in fusion.exprs if isinstance(op, LookupOp)}
    for alias in fusion.aliases:
        axes = [
            [graph.find(a) for a in tv.domain.no_reductions if not a.is_broadcast]
            for tv in (alias.out, alias.into)
        ]
        is_read = bool(fusion.uses(alias.into))
        if is_read and (axes[0] != axes[1] or alias.into in {*resized, *tables}):
            return f"{alias.out} overwrites {alias.into}, which is read at other indices"
    return None


def _output_rejection(fusion: Fusion, graph: AxisGraph) -> str | None:
    """Returns the reason why the fusion must be rejected, if the outputs do not all have the same
    axes; None if they do.

    One kernel computes all outputs in the same loops. The order of the axes does not matter, and
    broadcast axes are ignored.
    """
    reference = reference_output(fusion)
    wanted = sorted(graph.find(a) for a in reference.domain.logical if not a.is_broadcast)
    for out in fusion.outputs:
        have = sorted(graph.find(a) for a in out.domain.logical if not a.is_broadcast)
        if have != wanted:
            return f"output {out} does not have the axes of output {reference}"
    return None


def reference_output(fusion: Fusion) -> TensorView:
    """Returns the output whose loops all other tensors of the kernel copy.

    It is the first output with the most axes; broadcast axes are not counted.
    """
    return max(fusion.outputs, key=lambda tv: sum(not a.is_broadcast for a in tv.domain.logical))


def space_of(fusion: Fusion) -> Space:
    """Returns the memory layouts of a pointwise fusion's inputs and outputs, in the axes of one
    output.
    """
    return iteration_space(fusion, reference_output(fusion))


# ------------------------------------------------------------------ heuristics
def chooser(fusion: Fusion, device: DeviceInfo) -> Callable[[Facts], PointwiseParams]:
    """Returns a function that chooses a pointwise kernel's parameters for given inputs.

    The function gets the sizes and alignments of the inputs. It chooses vector width, unrolling and
    thread counts.
    """
    if device.kind == "cpu":
        loops = PointwiseParams()
        return lambda facts: loops
    space = space_of(fusion)
    runs = space.runs(space.memory_order())
    logical = space.reference.domain.logical
    widths = VectorWidths(space.vector_candidates(runs[-1][-1]) if runs else ())
    read = [a for a in space.accesses if not a.is_output and a.order is not None]
    shares = len(runs) > 1 and any(len(a.order or ()) < len(space.concrete) for a in read)
    moved = max(loaded_bytes(space), loaded_bytes(space, outputs=True))
    extents = RunExtents(fusion, [[logical[p] for p in run] for run in runs])
    pieces, length = equal_pieces(fusion, logical[runs[-1][-1]]) if len(runs) == 1 else (1, 0)
    flat_widths = VectorWidths(_full_if_flat(space)) if runs else None
    flat_most = _flat_most(space, runs[-1][-1]) if runs else 1
    looks_along = len(runs) > 1 and _looks_along(space, runs[-1][-1])

    def choose(facts: Facts) -> PointwiseParams:
        *outer_runs, inner = extents.of(facts) or [1]
        outer = prod(outer_runs)
        widest = widths.of(facts, inner)
        if flat_widths is not None:
            wider = min(flat_widths.within(facts), power_of_two_at_most(inner), flat_most)
            if wider > 2 * widest:
                vector = _narrower(wider, inner * outer, device)
                unroll = unroll_of(moved, inner * outer, wider, BYTES_IN_FLIGHT, device)
                return PointwiseParams(THREADS, 1, vector, unroll, flat=True)
        vector = _narrower(widest, inner * outer, device)
        if pieces > 1 and vector > 1 and length % vector == 0:
            return PointwiseParams(THREADS, 1, vector, pieces=pieces)
        if looks_along and inner // vector > THREADS:
            return _along_params(inner // vector, outer, vector, device)
        threads_x, threads_y = _threads(inner // vector, one_run=len(runs) < 2)
        wanted = BYTES_IN_FLIGHT_SHARED if shares else BYTES_IN_FLIGHT
        unroll = unroll_of(moved, inner * outer, widest, wanted, device)
        blocks_inner = -(-inner // (vector * threads_x))
        if len(runs) > 1 and vector < widest and not shares:
            # One block per multiprocessor. Measured on an H200, bfloat16, heads and rows permuted,
            # 2048 x 384: 2.52 us with one vector per thread, 2.24 us with 4.
            most = power_of_two_at_most(blocks_inner * -(-outer // threads_y) // device.sm_count)
            unroll = min(loads_for(wanted, moved * vector), most)
        blocks_outer = -(-outer // (threads_y * unroll))
        inner_on_x = _is_inner_on_x(blocks_outer, blocks_inner, device)
        return PointwiseParams(threads_x, threads_y, vector, unroll, len(runs) > 1 and inner_on_x)

    return choose


def _looks_along(space: Space, inner: int) -> bool:
    """Returns whether a lookup's table is indexed along the axis `inner`, so that neighbouring
    elements of the result come from one row of the table.

    The scheduler then uses an `along` kernel, in which neighbouring threads read the same row.
    """
    return any(a.table_order and inner not in a.table_order for a in space.accesses)


def _along_params(chunks: int, rows: int, vector: int, device: DeviceInfo) -> PointwiseParams:
    """Returns the parameters for lookups in rows of a table (`PointwiseParams.along`).

    Each CUDA block gets a piece of one row. The pieces are long, but short enough that all
    multiprocessors get blocks. `chunks` is the number of vectors in a row, and `rows` the number of
    rows.
    """
    threads, unroll = min(power_of_two_at_least(chunks), THREADS_ALONG), MAX_UNROLL
    while unroll > 1 and (
        threads * unroll >= 2 * chunks
        or rows * -(-chunks // (threads * unroll)) < 2 * device.sm_count
    ):
        unroll //= 2
    on_x = _is_inner_on_x(rows, -(-chunks // (threads * unroll)), device)
    return PointwiseParams(threads, 1, vector, unroll, on_x, along=True)


def _is_inner_on_x(blocks_outer: int, blocks_inner: int, device: DeviceInfo) -> bool:
    """Returns whether BIDx numbers the CUDA blocks along the innermost axes, and BIDy those along
    the other axes.

    The result is False only if the blocks along the other axes exceed the device's maximum along y,
    and those along the innermost axes do not. If both exceed the maximum, the grid is folded
    (`fuser/lower/passes/launch_grid.py`).
    """
    most = device.max_grid[1]
    return blocks_outer <= most or blocks_inner > most


def _full_if_flat(space: Space) -> tuple[Access, ...]:
    """Returns the full tensors if a vector may contain the end of a row and the beginning of the
    next row. Returns an empty tuple otherwise.

    A tensor is full if it has all axes of the kernel. A vector may cross the end of a row if all
    full tensors are without gaps and in one memory order, and no other tensor is read at shifted
    indices.
    """
    full = tuple(a for a in space.accesses if space.is_full(a))
    is_flat = space.are_dense(full) and all(a.order is not None for a in space.accesses)
    return full if is_flat else ()


def _flat_most(space: Space, inner: int) -> int:
    """Returns the maximum vector width, in elements, for a kernel in which a vector may contain the
    end of a row and the beginning of the next row.

    `inner` is the position of the innermost axis; a row has the elements along it. Operands that
    all rows share, such as a bias, are read element by element in such a kernel. The larger their
    share of the bytes that are read, the smaller the width (`MAX_SHARED`).
    """
    full = sum(a.nbytes for a in space.accesses if space.is_full(a))
    along = (a for a in space.accesses if not space.is_full(a) and inner in (a.order or ()))
    shared = sum(a.nbytes for a in along)
    return power_of_two_at_most(max(MAX_SHARED * full // shared, 1)) if shared else VECTOR_BYTES


def _threads(chunks: int, *, one_run: bool) -> tuple[int, int]:
    """Returns the numbers of threads along x and y of a CUDA block with `THREADS` threads.

    `chunks` is the number of vectors along the innermost axis. A small number gives fewer threads
    along x, so that most threads have work. With `one_run`, all axes are merged to one, so all
    threads are along x. Powers of two keep the number of different kernels small.
    """
    if one_run or chunks > THREADS:
        return THREADS, 1
    x = power_of_two_at_least(chunks)
    if x > 32:  # the largest number of those that leave the fewest lanes idle
        x = max((THREADS, THREADS // 2, 32), key=lambda n: (chunks / (-(-chunks // n) * n), n))
    return x, THREADS // x


def _narrower(vector: int, elements: int, device: DeviceInfo) -> int:
    """Returns the vector width `vector`, or half of it if wide vectors would leave threads without
    work.

    The kernel has `elements` elements. Measured on an H200: if vectors of 8 elements leave threads
    of the device without work, vectors of 4 take a tenth less time.
    """
    threads = device.sm_count * device.max_threads_per_sm
    return vector // 2 if vector >= MANY_ELEMENTS and elements < threads * vector else vector


def loaded_bytes(space: Space, *, outputs: bool = False) -> int:
    """Returns the bytes of one element, added up over all inputs that have all axes; with
    `outputs`, over all such outputs.

    The schedulers use this sum to choose how many vectors a thread loads before it computes.
    """
    rank = len(space.concrete)
    chosen = (a for a in space.accesses if a.is_output == outputs)
    return sum(a.nbytes for a in chosen if a.order is None or len(a.order) == rank)


def equal_pieces(fusion: Fusion, axis: IterDomain) -> tuple[int, int]:
    """Returns the number and the length of the pieces, if all concatenations along `axis` consist
    of equal pieces.

    A thread can then process one vector of each piece. Returns (1, 0) in all other cases: the
    lengths differ or are not constant, there are no concatenations, or there are more than
    `MAX_UNROLL` pieces.
    """
    joined = [op for op in fusion.exprs if isinstance(op, CatOp)]
    if not joined:
        return 1, 0
    graph = AxisGraph(fusion)
    along = [op for op in joined if graph.find(op.out.domain.logical[op.dim]) == graph.find(axis)]
    ends = {tuple(map(sc.int_value, op.ends)) for op in along}
    if len(ends) != 1:
        return 1, 0
    (found,) = ends
    length = found[0]
    if not length or found != tuple(length * (k + 1) for k in range(len(found))):
        return 1, 0
    return (len(found), length) if len(found) <= MAX_UNROLL else (1, 0)


def loads_for(wanted: int, nbytes: int, most: int = MAX_UNROLL) -> int:
    """Returns how many loads of `nbytes` bytes each are needed to load `wanted` bytes.

    The number is a power of two, at most `most`.
    """
    return min(power_of_two_at_least(-(-wanted // max(nbytes, 1))), most)


def unroll_of(loaded: int, elements: int, vector: int, wanted: int, device: DeviceInfo) -> int:
    """Returns the number of vectors that a thread loads before it uses the first.

    - `loaded`: the bytes of one element, added up over all inputs.
    - `elements`: the number of elements that the kernel computes.
    - `vector`: the number of elements of a vector.
    - `wanted`: the number of bytes that a thread should load.

    Returns 1 if some threads of the device would otherwise have no work.
    """
    unroll = loads_for(wanted, loaded * vector)
    threads = device.sm_count * device.max_threads_per_sm
    return unroll if elements >= threads * vector * unroll // 2 else 1


# ------------------------------------------------------------------ application
def apply(fusion: Fusion, params: PointwiseParams) -> None:
    """Schedules the fusion in place with these parameters.

    Copies into registers are added. Then three things are set for each tensor: its loops, the CUDA
    blocks and threads that execute them, and how many of these loops its consumers share.
    """
    space = space_of(fusion)
    runs = space.runs(space.memory_order())
    if params.threads_x == 0:
        _apply_loops(fusion, space, runs)
    else:
        _apply_threads(fusion, space, runs, params)


def _groups(space: Space, runs: tuple[tuple[int, ...], ...], limit: int) -> list[list[int]]:
    """Returns at most `limit` groups of axis positions, outermost group first; each becomes one
    loop.

    `runs` are the groups of axes that are contiguous in every tensor. If there are too many, the
    outermost ones are joined. Broadcast axes join the outermost group.
    """
    groups = [list(r) for r in runs]
    while len(groups) > limit:
        groups[0:2] = [groups[0] + groups[1]]
    rank = len(space.reference.domain.logical)
    broadcast = [p for p in range(rank) if p not in space.concrete]
    if groups:
        groups[0] = broadcast + groups[0]
    elif broadcast:
        groups = [broadcast]
    return groups


def _apply_loops(fusion: Fusion, space: Space, runs: tuple[tuple[int, ...], ...]) -> None:
    arrange(space.reference, _groups(space, runs, len(runs)))
    loops = Loops(fusion, space.reference)
    for out in dict.fromkeys(fusion.outputs):
        if not loops.repeat(out):
            raise loops_error(out, space.reference)
    for tv in intermediates(fusion, ()):
        loops.repeat(tv)
        loops.inline_whole(tv)


def _apply_threads(
    fusion: Fusion, space: Space, runs: tuple[tuple[int, ...], ...], params: PointwiseParams
) -> None:
    groups = _groups(space, runs, 1 if params.flat else 2)
    if params.pieces > 1:
        groups = [groups[0][:-1], groups[0][-1:]]
    vector = params.vector
    innermost = runs[-1][-1] if runs else -1
    inner_run = frozenset(runs[-1]) if runs else frozenset()
    loaded: dict[TensorView, Access] = {}
    if vector * params.unroll > 1:
        direct = [a for a in space.accesses if is_direct_input(a)]
        chosen = [a for a in direct if params.flat or _covers(a, inner_run, len(space.concrete))]
        loaded = {cache_input(a.tv): a for a in chosen}
    if params.flat:
        logical = space.reference.domain.logical
        row = sc.product(fusion.canonical(logical[p].extent) for p in runs[-1])
        fusion.least[row], fusion.has_tails = vector, True
    stored: dict[TensorView, TensorView] = {}
    wide_outputs: set[TensorView] = set()
    if vector > 1:
        for access in space.accesses:
            if access.is_output and access.is_vector_candidate(innermost):
                registers, out = cache_output(access.tv)
                stored[registers] = out
                wide_outputs.add(out)
    # If the reference was copied into an output, that output is the reference now.
    reference = next(
        (out for reg, out in stored.items() if reg is space.reference), space.reference
    )
    unswitch = _shape(reference, groups, params)
    loops = Loops(fusion, reference)
    outside = {a.number for a in reference.domain.loop[: unswitch + 1]}
    for out in dict.fromkeys(fusion.outputs):
        if not loops.repeat(out):
            raise loops_error(out, reference)
    depth = len(reference.domain.loop)
    for registers in stored:
        loops.repeat(registers)
        registers.compute_at = depth - 1
    for tv, access in loaded.items():
        if not loops.repeat(tv):
            logical = reference.domain.logical
            loops.repeat(tv, only=frozenset(logical[p].number for p in access.order or ()))
        tv.compute_at = _shared(tv, reference, outside)
        # A flat vector may contain the end of a row, so tensors without all axes are not
        # vectorised.
        is_whole = space.is_full(access) or not params.flat
        if vector > 1 and is_whole and access.is_vector_candidate(innermost):
            vectorize_last(tv)
    for out in wide_outputs:
        vectorize_last(out)
    for tv in intermediates(fusion, {*stored, *loaded}):
        loops.repeat(tv)
        loops.inline_whole(tv)


def _covers(access: Access, inner_run: frozenset[int], rank: int) -> bool:
    """Returns whether a tensor has all axes of the kernel, or exactly the axes in `inner_run`.

    The kernel loads such a tensor into registers before it computes. `rank` is the number of the
    kernel's axes, and `inner_run` has the innermost axes, which are contiguous in every tensor.
    """
    axes = frozenset(access.order or ())
    return len(axes) == rank or axes == inner_run


def _shared(tv: TensorView, reference: TensorView, outside: set[int]) -> int:
    """Returns how many of the outermost loops of `tv` are also loops of the reference tensor.

    `tv` is a copy of an input, which is loaded inside these loops. The reference tensor is the one
    whose loops all others copy. `outside` has the numbers (ids) of the reference tensor's loop axes
    that may be shared: all up to and including the unswitched loop, whose body exists with and
    without bounds checks.
    """
    wanted = [a.ptype for a in reference.domain.loop if a.number in outside]
    count = 0
    for axis in tv.domain.loop:
        if axis.ptype not in wanted:
            break
        count += 1
    return count


def _shape(tv: TensorView, groups: list[list[int]], params: PointwiseParams) -> int:
    """Builds the loops of the reference tensor, which the other tensors copy.

    `groups` are positions of axes, from outer to inner; each group becomes one axis before it is
    split. Returns the position of the unswitched loop, whose body exists with and without bounds
    checks; inputs are loaded inside it.
    """
    arrange(tv, groups)
    if not groups:
        return -1
    if params.pieces > 1:
        return _shape_pieces(tv, params)
    vector = [PT.serial] if params.vector > 1 else []
    lanes = (params.threads_x, PT.block_x)
    unroll = (params.unroll, PT.unroll)
    if params.vector > 1:
        tv.split(len(groups) - 1, params.vector)
    if len(groups) == 1:
        tile = split_tile(tv, 0, (unroll, lanes))
        tv.split(0, 1)
        types = [PT.grid_x, PT.unswitch, *tile, *vector]
    else:
        # [outer, inner] -> [outer blocks, inner blocks, US, UR, TIDy, TIDx, V]
        inner = split_tile(tv, 1, (unroll, lanes) if params.along else (lanes,))
        tv.split(1, 1)
        rows = (params.threads_y, PT.block_y)
        outer = split_tile(tv, 0, (rows,) if params.along else (unroll, rows))
        tv.reorder({1 + k: 3 + k for k in range(len(outer))})
        blocks = [PT.grid_y, PT.grid_x] if params.inner_on_x else [PT.grid_x, PT.grid_y]
        types = [*blocks, PT.unswitch, *outer, *inner, *vector]
    parallelize(tv, types)
    return types.index(PT.unswitch)


def _shape_pieces(tv: TensorView, params: PointwiseParams) -> int:
    """Builds the loops of a kernel that processes all pieces of a concatenation together.

    The innermost loop axis of `tv` covers all pieces, one after another; at most one other loop
    axis is outside of it. Returns the position of the unswitched loop, whose body exists with and
    without bounds checks; inputs are loaded inside it.
    """
    last = len(tv.domain.loop) - 1
    extent = sc.int_value(tv.domain.loop[last].extent)
    assert extent is not None
    tv.split(last, extent // params.pieces)
    tv.split(last + 1, params.vector)
    # [outer, pieces, chunks, V] -> [outer * chunks, pieces, V]
    tv.reorder({last: last + 1, last + 1: last})
    if last:
        tv.merge(0)
    tile = split_tile(tv, 0, ((params.threads_x, PT.block_x),))
    tv.split(0, 1)
    types = [PT.grid_x, PT.unswitch, *tile, PT.unroll, PT.serial]
    parallelize(tv, types)
    return types.index(PT.unswitch)
