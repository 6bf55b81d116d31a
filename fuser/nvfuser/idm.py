"""`IdModel`, as in nvFuser: computes which axes of a fusion correspond to one another.

    model = idm.IdModel(fd.fusion)
    graph = model.maybe_build_graph(IdMappingMode.exact)
    graph.disjoint_val_sets().strict_are_mapped(x.axis(0), y.axis(0))

Corresponding axes are called mapped. Each mode maps the axes that the mode before it maps, and
more:

- `exact`: two axes that an op maps onto each other, if both are concrete (no broadcasts) or both
  broadcast. The results of equal splits and merges of mapped axes are mapped, too.
- `almost_exact`: also an axis and the result of its split by 1, or of its merge with an axis of
  extent 1.
- `broadcast`: also a broadcast axis of an operand and the concrete axis to which an op broadcasts
  it, such as the second axes of [n, 1] and [n, m] in the sum of two such tensors.
- `permissive`: also a concrete axis and its merge with a broadcast axis.
"""

from __future__ import annotations

from collections.abc import Iterator

from fuser.ir.axis_graph import AxisGraph, ConcretizedGraph
from fuser.ir.domain.tensor_domain import MergeTransform, SplitTransform, TensorDomain
from fuser.ir.fusion import Axis, Fusion
from fuser.ir.scalar import constructors as sc
from fuser.ir.types import IdMappingMode
from fuser.schedule.iteration_space import has_self_mapping
from fuser.support.arguments import checked
from fuser.support.errors import DefinitionError, UnsupportedError, VerifyError

__all__ = ["DisjointValSets", "IdModel", "ValGraph"]


class IdModel:
    """The relations between the axes of a fusion: one graph of mapped axes per mode.

    A graph describes the fusion at the time when the graph is first requested.

    - `build_graphs`: builds the graphs of all modes at once.
    - `allow_self_mapping`: if False, no tensor may have two axes that are mapped to each other.
    - `validate`: checks that mapped axes have equal extents.

    Raises:
        DefinitionError: a tensor has two mapped axes although `allow_self_mapping` is False.
        VerifyError: two mapped axes have different constant extents.
    """

    @checked
    def __init__(
        self,
        fusion: Fusion,
        build_graphs: bool = False,
        allow_self_mapping: bool = True,
        validate: bool = False,
    ) -> None:
        self._fusion = fusion
        self._graphs: dict[IdMappingMode, ValGraph] = {}
        if build_graphs:
            for mode in _MADE_OF:
                self.maybe_build_graph(mode)
        if not allow_self_mapping:
            twice = has_self_mapping(AxisGraph(fusion), fusion.tensors())
            if twice is not None:
                raise DefinitionError(
                    f"IdModel: two axes of {twice} are mapped to each other, which "
                    "allow_self_mapping=False does not allow"
                )
        if validate:
            _check_extents(fusion)

    @checked
    def maybe_build_graph(self, mode: IdMappingMode) -> ValGraph:
        """Returns the graph of mapped (corresponding) axes for one mode, such as `exact`.

        The mode decides which axes correspond. The first call for a mode builds its graph.

        Raises:
            UnsupportedError: the mode is `loop`.
        """
        if mode not in _MADE_OF:
            raise UnsupportedError(
                f"IdModel: {mode} is not supported, because the fusion does not show which axes "
                "share a loop: lowering decides this; supported are "
                f"{', '.join(m.name for m in _MADE_OF)}"
            )
        found = self._graphs.get(mode)
        if found is None:
            found = self._graphs[mode] = ValGraph(self._fusion, mode)
        return found

    def __str__(self) -> str:
        return "".join(f"{mode}:\n{graph}\n" for mode, graph in self._graphs.items())


class ValGraph:
    """The sets of axes of a fusion that are mapped to each other (correspond) in one mode, such as
    `exact`.

    `IdModel.maybe_build_graph` creates the object.
    """

    def __init__(self, fusion: Fusion, mode: IdMappingMode) -> None:
        self._fusion, self.mode = fusion, mode
        kind, pairs = _MADE_OF[mode]
        joined = [pair for tv in fusion.tensors() for rule in pairs for pair in rule(tv.domain)]
        self._graph = kind(fusion, joined=joined)
        # Copies of the names, because the fusion may change.
        self._names = {
            number: f"{axis} of {tv.label}"
            for tv in fusion.tensors()
            for number, axis in tv.domain.axes.items()
        }

    def disjoint_val_sets(self) -> DisjointValSets:
        """Returns the sets of axes that are mapped to each other (that correspond to each other).

        The result is no copy: later calls of `map_vals` change its sets.
        """
        return DisjointValSets(self)

    @checked
    def map_vals(self, val0: Axis, val1: Axis) -> None:
        """Maps two axes to each other: declares that they correspond. Also maps the results of
        equal splits and merges of both.

        Raises:
            DefinitionError: an axis is not in the graph.
        """
        self.require("map_vals", val0)
        self.require("map_vals", val1)
        self._graph.join(val0, val1)

    def are_mapped(self, a: Axis, b: Axis) -> bool:
        """Returns whether the graph maps two axes to each other, that is, treats them as
        corresponding.
        """
        return self._graph.mapped(a, b)

    def sets(self) -> list[tuple[str, ...]]:
        """Returns the sets of axes that are mapped to each other (that correspond to each other).

        Each set has the names of its axes, in the order of their numbers.
        """
        return [tuple(self._names[n] for n in numbers) for numbers in self._graph.classes()]

    def require(self, call: str, axis: Axis) -> None:
        """Checks that an axis is in the graph. `call` is the method that error messages name.

        Raises:
            DefinitionError: the axis belongs to another fusion, or was created after the graph.
        """
        if axis.tensor.fusion is not self._fusion:
            raise DefinitionError(f"{call}: {axis!r} belongs to another fusion")
        if not self._graph.has(axis):
            raise DefinitionError(
                f"{call}: {axis!r} was created after the graph was built: create a new IdModel"
            )

    def __str__(self) -> str:
        return f"IdGraph ({self.mode.name}) {self.disjoint_val_sets()}"


class DisjointValSets:
    """The sets of axes that one graph maps to each other, that is, treats as corresponding."""

    def __init__(self, graph: ValGraph) -> None:
        self._graph = graph

    @checked
    def strict_are_mapped(self, a: Axis, b: Axis) -> bool:
        """Returns whether two axes are in the same set.

        Raises:
            DefinitionError: an axis is not in the graph.
        """
        self._graph.require("strict_are_mapped", a)
        self._graph.require("strict_are_mapped", b)
        return self._graph.are_mapped(a, b)

    def __str__(self) -> str:
        rows = "".join(f"  {{ {'; '.join(names)} }}\n" for names in self._graph.sets())
        return f"disjoint sets{{\n{rows}}}"


# ------------------------------------------------------------------ modes
Pairs = Iterator[tuple[int, int]]


def _trivial(domain: TensorDomain) -> Pairs:
    """Yields a pair of axis numbers for each split into, or merge of, two axes of which one has
    extent 1.

    Such a split or merge changes nothing. A pair has the split or merged axis, and the one of the
    two axes that has the same extent.
    """
    for t in domain.transforms:
        match t:
            case SplitTransform():
                parts = {t.outer: t.inner, t.inner: t.outer}
                yield from ((t.inp, other) for n, other in parts.items() if _is_one(domain, n))
            case MergeTransform():
                parts = {t.outer: t.inner, t.inner: t.outer}
                yield from ((t.out, other) for n, other in parts.items() if _is_one(domain, n))
            case _:
                pass


def _is_one(domain: TensorDomain, number: int) -> bool:
    return sc.int_value(domain.axes[number].size) == 1


def _forwarded(domain: TensorDomain) -> Pairs:
    """Yields pairs of axis numbers for each merge of a broadcast axis with an axis that is no
    broadcast.

    A pair has the result of the merge, and the axis that is no broadcast. Both iterate over the
    same elements.
    """
    for t in domain.transforms:
        if isinstance(t, MergeTransform):
            outer, inner = domain.axes[t.outer], domain.axes[t.inner]
            if outer.is_broadcast != inner.is_broadcast:
                yield t.out, (inner if outer.is_broadcast else outer).number


# Mode -> the class of the graph, and the rules that map further axes of each tensor.
_MADE_OF = {
    IdMappingMode.exact: (AxisGraph, ()),
    IdMappingMode.almost_exact: (AxisGraph, (_trivial,)),
    IdMappingMode.broadcast: (ConcretizedGraph, (_trivial,)),
    IdMappingMode.permissive: (ConcretizedGraph, (_trivial, _forwarded)),
}


# ------------------------------------------------------------------ checks
def _check_extents(fusion: Fusion) -> None:
    graph, found = AxisGraph(fusion), dict[int, tuple[int, Axis]]()
    for tv in fusion.tensors():
        for number in tv.domain.axes:
            axis = Axis(tv, number)
            size = sc.int_value(fusion.canonical(axis.size))
            if size is None:
                continue
            first, other = found.setdefault(graph.find(axis), (size, axis))
            if first != size:
                raise VerifyError(
                    f"IdModel: {axis!r} and {other!r} are mapped to each other, so their extents "
                    f"must be equal, but they are {size} and {first}"
                )
