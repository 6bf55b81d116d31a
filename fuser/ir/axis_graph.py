"""The axis graph: computes which axes of a fusion's tensors are the same axis.

Nodes are axis numbers. There are two relations:

- *exact*: an op computes position k of one axis from position k of the other, and both axes are
  broadcasts or neither is. Equal transforms (splits, merges, ..) extend this relation: if their
  source axes are related, so are the axes that they derive. The reverse also holds if the extents
  of the source axes are equal.
- *concretization*: a directed edge from a broadcast axis of an operand to the axis of the result
  along which the op repeats the operand.

The graph describes the fusion at the time when the graph is built. Later changes of the fusion do
not change the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fuser.ir.domain.tensor_domain import (
    IterDomain,
    MergeTransform,
    Resize,
    Shift,
    SplitTransform,
    Swizzle1D,
    Transform,
)
from fuser.ir.fusion import Axis, AxisMap, Fusion, TensorOp, TensorView
from fuser.ir.scalar.constructors import Scalar

AxisPair = tuple[IterDomain, IterDomain]


def mapped_axes(
    op: TensorOp, operand_index: int, out: TensorView | None = None
) -> tuple[AxisPair, ...]:
    """Returns the pairs (operand axis, result axis) of axes that correspond in op `op`.

    The operand is `op.inputs[operand_index]`, and `out` is the result, by default the first one.
    The operand axes are those that users see. The result axes are those that the op itself computes
    (root axes). If the op broadcasts the operand, one axis of a pair may be a broadcast axis and
    the other not; `is_exact_pair` then returns False.
    """
    consumer = out if out is not None else op.out_tensor
    return _pairs(op, operand_index, consumer, op.axis_map_to(operand_index, consumer))


def alike_axes(op: TensorOp, operand_index: int, out: TensorView) -> tuple[AxisPair, ...]:
    """Returns the pairs (operand axis, result axis) that devices must split in the same way.

    The operand is `op.inputs[operand_index]`, and `out` is a result of `op`. The pairs are those of
    `mapped_axes`. Some ops add pairs of axes of different sizes: in an attention, the heads of
    queries and the fewer heads of keys are split together.
    """
    return _pairs(op, operand_index, out, op.alike_map(operand_index, out))


def _pairs(
    op: TensorOp, operand_index: int, consumer: TensorView, mapped: AxisMap
) -> tuple[AxisPair, ...]:
    producer = op.inputs[operand_index]
    assert isinstance(producer, TensorView)
    sources, targets = producer.domain.no_reductions, consumer.domain.maybe_root
    return tuple(
        (sources[source], target)
        for target, source in zip(targets, mapped, strict=True)
        if source is not None
    )


def parallel_axes(op: TensorOp, out: TensorView, sibling: TensorView) -> Iterator[AxisPair]:
    """Yields the pairs (axis of `out`, axis of `sibling`) of corresponding axes of two results.

    Both tensors are results of `op`, such as the values and the positions that a top-k returns.
    """
    axes, sibling_axes = out.domain.logical, sibling.domain.logical
    return ((axes[a], sibling_axes[b]) for a, b in op.parallel_axes(out, sibling))


def is_exact_pair(pair: AxisPair) -> bool:
    """Returns whether both axes of a pair are broadcast axes, or neither is.

    If only one of them is a broadcast axis, the op repeats it along the other axis.
    """
    return pair[0].is_broadcast == pair[1].is_broadcast


def tensor_operands(op: TensorOp) -> Iterator[tuple[int, TensorView]]:
    """Yields (operand index, tensor) for the tensor operands of an op."""
    for index, value in enumerate(op.inputs):
        if isinstance(value, TensorView):
            yield index, value


class AxisGraph:
    """Classes of axes: two axes are in one class if they are certainly the same axis.

    For example, the axes of an elementwise op's operands and result are in one class per position.
    `joined` has further pairs of axis numbers. The axes of such a pair are put into one class,
    although no op relates them.
    """

    def __init__(self, fusion: Fusion, *, joined: Iterable[tuple[int, int]] = ()) -> None:
        self._fusion = fusion
        self._parent: dict[int, int] = {}
        self._concrete: dict[int, set[int]] = {}
        self._axes: dict[int, IterDomain] = {}
        self._transforms: list[Transform] = []
        for tv in fusion.tensors():
            self._axes.update(tv.domain.axes)
            self._transforms.extend(tv.domain.transforms)
        self._parent.update((n, n) for n in self._axes)
        for op in fusion.exprs:
            for out in op.outputs:
                for index, _ in tensor_operands(op):
                    for pair in mapped_axes(op, index, out):
                        self._relate(pair)
            for out in op.outputs[1:]:
                for a, b in parallel_axes(op, op.out_tensor, out):
                    self._union(a.number, b.number)
        for a, b in (*fusion.joined, *joined):
            self._union(a, b)
        self._close()

    def find(self, axis: Axis | IterDomain) -> int:
        """Returns the number that represents all axes that are the same axis as `axis`.

        This is the smallest of their numbers. Two axes are therefore the same exactly if `find`
        returns equal numbers for them.
        """
        return self._find(axis.number)

    def mapped(self, a: Axis | IterDomain, b: Axis | IterDomain) -> bool:
        """Returns whether two axes are certainly the same axis.

        For example, an elementwise op computes position k of its result from position k of its
        operand.
        """
        return self._find(a.number) == self._find(b.number)

    def concretized(self, axis: Axis | IterDomain) -> frozenset[int]:
        """Returns the numbers of the axes along which ops repeat the broadcast axis `axis`.

        There may be several ops between both axes. If several of the found axes are the same axis,
        the result has only the smallest of their numbers.
        """
        seen: set[int] = set()
        todo = [self._find(axis.number)]
        edges: dict[int, set[int]] = {}
        for source, targets in self._concrete.items():
            edges.setdefault(self._find(source), set()).update(self._find(t) for t in targets)
        while todo:
            for target in edges.get(todo.pop(), ()):
                if target not in seen:
                    seen.add(target)
                    todo.append(target)
        return frozenset(seen)

    def has(self, axis: Axis | IterDomain) -> bool:
        """Returns whether the axis existed when the graph was built.

        Otherwise, the graph cannot answer questions about it.
        """
        return axis.number in self._axes

    def join(self, a: Axis | IterDomain, b: Axis | IterDomain) -> None:
        """States that the axes `a` and `b` are the same axis.

        If both are split or merged equally, the resulting axes are then also the same.
        """
        self._union(a.number, b.number)
        self._close()

    def classes(self) -> list[tuple[int, ...]]:
        """Returns one tuple per group of axes that are the same: their numbers in ascending order.

        The tuples are sorted by their first number.
        """
        found: dict[int, list[int]] = {}
        for number in sorted(self._axes):
            found.setdefault(self._find(number), []).append(number)
        return [tuple(numbers) for numbers in found.values()]

    # ------------------------------------------------------------ construction
    def _relate(self, pair: AxisPair) -> None:
        producer, consumer = pair
        if is_exact_pair(pair):
            self._union(producer.number, consumer.number)
        else:
            self._concrete.setdefault(producer.number, set()).add(consumer.number)

    def _find(self, n: int) -> int:
        while self._parent[n] != n:
            self._parent[n] = self._parent[self._parent[n]]
            n = self._parent[n]
        return n

    def _union(self, a: int, b: int) -> bool:
        a, b = self._find(a), self._find(b)
        if a == b:
            return False
        self._parent[max(a, b)] = min(a, b)
        return True

    def _size(self, number: int) -> Scalar:
        return self._fusion.canonical(self._axes[number].size)

    def _keys(self, t: Transform) -> tuple[tuple[object, ...], ...]:
        """Returns the keys of a transform of axes, such as a split.

        Two transforms are equal if they have a common key. Subclasses may add keys.
        """
        return (self._key(t),)

    def _key(self, t: Transform) -> tuple[object, ...]:
        """Returns the kind and the parameters of a transform, without its axes, as a key.

        Transforms with equal keys derive equal axes from equal axes. The parameters of a split are
        the sizes of its two results. The parameter of a merge is the size of its inner axis.
        """
        match t:
            case SplitTransform():
                return ("split", self._size(t.inner), self._size(t.outer))
            case MergeTransform():
                return ("merge", self._size(t.inner))
            case Resize():
                return ("resize", *map(self._fusion.canonical, t.scalars))
            case Swizzle1D():
                return ("swizzle", t.ptype)
            case Shift():
                return ("shift", t.width)

    def _close(self) -> None:
        """Finds axes that are the same because equal transforms, such as splits, derive them.

        If two equal transforms have source axes that are the same, their derived axes are put into
        one class, too. If their derived axes are the same, and their source axes have equal
        extents, the source axes are put into one class. This is repeated until no class changes any
        more.
        """
        keyed = [(key, t) for t in self._transforms for key in self._keys(t)]
        changed = True
        while changed:
            changed = False
            forward: dict[object, Transform] = {}
            backward: dict[object, Transform] = {}
            for key, t in keyed:
                ins = tuple(self._find(i) for i in t.inputs)
                twin = forward.setdefault((key, ins), t)
                for a, b in zip(twin.outputs, t.outputs, strict=True):
                    changed |= self._union(a, b)
                # Outputs determine inputs only when the input extents agree as well: a
                # non-divisible split of 10 and of 12 by 4 has the same outputs.
                outs = tuple(self._find(o) for o in t.outputs)
                extents = tuple(self._size(i) for i in t.inputs)
                twin = backward.setdefault((key, outs, extents), t)
                for a, b in zip(twin.inputs, t.inputs, strict=True):
                    changed |= self._union(a, b)


class ConcretizedGraph(AxisGraph):
    """An axis graph in which a broadcast axis is the same as the axis along which an op repeats it.

    Axes in one class may therefore have different extents. Splits of such axes are equal if they
    have equal factors, and merges of such axes are always equal. In `AxisGraph`, sizes of the axes
    must be equal, too.
    """

    def _relate(self, pair: AxisPair) -> None:
        self._union(pair[0].number, pair[1].number)

    def _keys(self, t: Transform) -> tuple[tuple[object, ...], ...]:
        match t:
            case SplitTransform():
                alike = ("split by", self._fusion.canonical(t.factor), t.inner_split)
            case MergeTransform():
                alike = ("merge",)
            case _:
                return super()._keys(t)
        return (*super()._keys(t), alike)
