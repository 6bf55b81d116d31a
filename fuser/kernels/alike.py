"""Kernels of one program that differ in nothing but names: one of them is lowered for all.

    kernel 0: T4[i0, i2] = tanh(T3)        kernel 1: T9[i5, i7] = tanh(T8)

Both run the text of the first; the launch of the second puts its own symbols where the first has
others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

from fuser.ir.canonical_form import CanonicalForm, form_of
from fuser.ir.fusion import Fusion
from fuser.kernels.kernel_variant import Variant


class Lowered:
    """The kernels that the executors of one program have lowered."""

    def __init__(self) -> None:
        # By the kinds of a fusion's ops, and what else decides about a kernel.
        self._variants: dict[object, list[tuple[Fusion, Variant]]] = {}
        # By identity: two fusions that are equal have forms of their own names.
        self._forms: dict[int, tuple[Fusion, CanonicalForm]] = {}

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

    def _form(self, fusion: Fusion) -> CanonicalForm:
        if id(fusion) not in self._forms:
            self._forms[id(fusion)] = fusion, form_of(fusion)
        return self._forms[id(fusion)][1]
