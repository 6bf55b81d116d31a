"""Kernels of one program that differ in nothing but names: one of them is lowered for all.

    kernel 0: T4[i0, i2] = tanh(T3)        kernel 1: T9[i5, i7] = tanh(T8)

Both run the text of the first; the launch of the second puts its own symbols where the first has
others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from itertools import count

from fuser.ir import scalar as sc
from fuser.ir.domain import IterDomain, TensorDomain
from fuser.ir.fusion import Fusion
from fuser.ir.scalar import Scalar, Symbol
from fuser.ir.text import fusion_text, program_symbols
from fuser.kernels.variant import Variant
from fuser.record import record, replace

Rename = Callable[[Scalar], Scalar]


@record
class Form:
    """A fusion without its names: equal keys mean equal kernels.

    `tensors` (by number) and `symbols` are what has a name, in the order of the form.
    """

    key: Hashable
    tensors: tuple[int, ...]
    symbols: tuple[Symbol, ...]


class Lowered:
    """The kernels that the executors of one program have lowered."""

    def __init__(self) -> None:
        # By the kinds of a fusion's ops, and what else decides about a kernel.
        self._variants: dict[object, list[tuple[Fusion, Variant]]] = {}
        self._forms: dict[Fusion, Form] = {}

    def find_or_lower(
        self,
        fusion: Fusion,
        what: Hashable,
        places: Mapping[int, int],
        lower: Callable[[], Variant],
    ) -> Variant:
        """Return what `lower` makes of a fusion, or what it has made of one like it. `what` is
        everything else that decides about the kernel; for `places` see `Variant`."""
        kinds = tuple([type(op) for op in fusion.exprs])
        similar = self._variants.setdefault((kinds, what), [])
        # A form takes longer than half a small kernel: it is only made where there is another one.
        for other, its in similar:
            form, mine = self._form(other), self._form(fusion)
            if form.key == mine.key:
                numbers = dict(zip(form.tensors, mine.tensors, strict=True))
                symbols = dict(zip(form.symbols, mine.symbols, strict=True))
                return its.renamed(numbers, symbols, places)
        made = lower()
        similar.append((fusion, made))
        return made

    def _form(self, fusion: Fusion) -> Form:
        if fusion not in self._forms:
            self._forms[fusion] = form_of(fusion)
        return self._forms[fusion]


def form_of(fusion: Fusion) -> Form:
    """Return the form of a kernel's fusion: everything that lowering reads."""
    tensors = fusion.tensors()
    symbols = program_symbols(fusion, tensors, fusion.exprs)
    names: dict[Scalar, Scalar] = {
        s: Symbol(f"{s.name[0]}{k}", s.dtype, lo=s.lo)
        for k, s in enumerate(symbols)
        if s.hi is None and s.name[1:].isdigit()
    }
    memo: dict[Scalar, Scalar] = {}

    def renamed(x: Scalar) -> Scalar:
        if x not in memo:
            memo[x] = sc.substitute(x, names)
        return memo[x]

    copy, twins = fusion.copy()
    axes = count()
    for number, tv in enumerate(tensors):
        twin = twins[tv]
        twin.number, twin.domain = number, _renumbered(tv.domain, axes.__next__, renamed)
    copy.exprs = tuple(
        op.map_values(lambda v: renamed(v) if isinstance(v, Scalar) else v) for op in copy.exprs
    )
    copy.inputs = [renamed(v) if isinstance(v, Scalar) else v for v in copy.inputs]
    copy.extents.rewrite(names)
    copy.origins = ()
    key = (
        fusion_text(copy),
        tuple([(renamed(s), s.name if s not in names else "") for s in symbols]),
        tuple([renamed(x) for x in fusion.assumed]),
        frozenset((renamed(s), n) for s, n in fusion.divisible.items()),
        frozenset((renamed(x), n) for x, n in fusion.least.items()),
        fusion.has_tails,
        fusion.resident_threads,
        fusion.goes_backwards,
        tuple([tv.number in fusion.read_again for tv in tensors]),
        tuple([tv.is_cpu_scalar for tv in tensors]),
    )
    return Form(key, tuple([tv.number for tv in tensors]), symbols)


def form_text(form: Form) -> str:
    """Return a form as text, the same in every process."""
    ranges = [f"{s.dtype.name} {s.lo} {s.hi}" for s in form.symbols]
    return _text([ranges, form.key])


def _text(value: object) -> str:
    if isinstance(value, frozenset):
        return "\n".join(sorted(map(_text, value)))
    if isinstance(value, tuple | list):
        return "\n".join(map(_text, value))
    return str(value)


def _renumbered(
    domain: TensorDomain, next_axis: Callable[[], int], renamed: Rename
) -> TensorDomain:
    def axis(a: IterDomain) -> IterDomain:
        expanded = None if a.expanded is None else renamed(a.expanded)
        return replace(a, number=next_axis(), extent=renamed(a.extent), expanded=expanded)

    made = domain.map_axes(axis)
    if not made.transforms:
        return made
    return made.having(transforms=[t.rewritten(renamed) for t in made.transforms])
