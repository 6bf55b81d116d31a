"""Which axes of a fusion are the same axis: `IdModel`, under nvFuser's names.

    model = idm.IdModel(fd.fusion)
    graph = model.maybe_build_graph(IdMappingMode.exact)
    graph.disjoint_val_sets().strict_are_mapped(x.axis(0), y.axis(0))

exact          an op maps them onto each other, both concrete or both broadcast, and what equal
               splits and merges make of them
almost_exact   also an axis and what a split by 1, or a merge with an axis of extent 1, makes of it
broadcast      also a broadcast axis and the concrete one that a consumer iterates
permissive     also the merge of a broadcast axis and a concrete one, and the latter
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
    """The graphs of a fusion, each as the fusion is when it is first asked for.

    `build_graphs` makes all at once; without `allow_self_mapping` a tensor must not have one axis
    twice; `validate` looks whether mapped axes have one extent.

    Raises:
        DefinitionError: a tensor has two axes that are mapped, which was not allowed.
        VerifyError: two axes are mapped whose extents are different numbers.
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
                raise DefinitionError(f"IdModel: two axes of {twice} are the same axis")
        if validate:
            _check_extents(fusion)

    @checked
    def maybe_build_graph(self, mode: IdMappingMode) -> ValGraph:
        """Returns the graph of a mode, built at the first call. Raises `UnsupportedError` for
        `loop`."""
        if mode not in _MADE_OF:
            raise UnsupportedError(
                f"IdModel: {mode}: which axes share a loop is decided where a kernel is lowered, "
                f"not by the fusion; there are {', '.join(m.name for m in _MADE_OF)}"
            )
        found = self._graphs.get(mode)
        if found is None:
            found = self._graphs[mode] = ValGraph(self._fusion, mode)
        return found

    def __str__(self) -> str:
        return "".join(f"{mode}:\n{graph}\n" for mode, graph in self._graphs.items())


class ValGraph:
    """The axes of a fusion in one mode; `IdModel.maybe_build_graph` makes it."""

    def __init__(self, fusion: Fusion, mode: IdMappingMode) -> None:
        self._fusion, self.mode = fusion, mode
        kind, pairs = _MADE_OF[mode]
        joined = [pair for tv in fusion.tensors() for rule in pairs for pair in rule(tv.domain)]
        self._graph = kind(fusion, joined=joined)
        # As they were: the fusion may change.
        self._names = {
            number: f"{axis} of {tv.label}"
            for tv in fusion.tensors()
            for number, axis in tv.domain.axes.items()
        }

    def disjoint_val_sets(self) -> DisjointValSets:
        """Returns the sets of axes that are one; `map_vals` changes them."""
        return DisjointValSets(self)

    @checked
    def map_vals(self, val0: Axis, val1: Axis) -> None:
        """Counts two axes as one, and what equal splits and merges make of them.

        Raises `DefinitionError` for an axis that is not in the graph.
        """
        self.require("map_vals", val0)
        self.require("map_vals", val1)
        self._graph.join(val0, val1)

    def are_mapped(self, a: Axis, b: Axis) -> bool:
        """Whether two axes of the graph are one."""
        return self._graph.mapped(a, b)

    def sets(self) -> list[tuple[str, ...]]:
        """Returns the axes of each set in words, in the order of their numbers."""
        return [tuple(self._names[n] for n in numbers) for numbers in self._graph.classes()]

    def require(self, call: str, axis: Axis) -> None:
        """Raises `DefinitionError` for an axis of another fusion, or one that is newer."""
        if axis.tensor.fusion is not self._fusion:
            raise DefinitionError(f"{call}: {axis!r} is of another fusion")
        if not self._graph.has(axis):
            raise DefinitionError(
                f"{call}: {axis!r} was made after the graph was built: make another IdModel"
            )

    def __str__(self) -> str:
        return f"IdGraph ({self.mode.name}) {self.disjoint_val_sets()}"


class DisjointValSets:
    """The sets of axes that are one."""

    def __init__(self, graph: ValGraph) -> None:
        self._graph = graph

    @checked
    def strict_are_mapped(self, a: Axis, b: Axis) -> bool:
        """Returns whether two axes are in one set. Raises `DefinitionError` for one that is in
        none."""
        self._graph.require("strict_are_mapped", a)
        self._graph.require("strict_are_mapped", b)
        return self._graph.are_mapped(a, b)

    def __str__(self) -> str:
        rows = "".join(f"  {{ {'; '.join(names)} }}\n" for names in self._graph.sets())
        return f"disjoint sets{{\n{rows}}}"


# ------------------------------------------------------------------ modes
Pairs = Iterator[tuple[int, int]]


def _trivial(domain: TensorDomain) -> Pairs:
    """Yields axes and what a transform makes of them that changes nothing."""
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
    """Yields merges of a broadcast axis and a concrete one, and the latter."""
    for t in domain.transforms:
        if isinstance(t, MergeTransform):
            outer, inner = domain.axes[t.outer], domain.axes[t.inner]
            if outer.is_broadcast != inner.is_broadcast:
                yield t.out, (inner if outer.is_broadcast else outer).number


# A mode -> the graph, and what is joined in each tensor.
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
                    f"IdModel: {axis!r} and {other!r} are mapped, of extents {size} and {first}"
                )
