"""Which tensors of a program share a buffer: views, and outputs that are written into an input."""

from __future__ import annotations

from dataclasses import dataclass

from fuser.ir.tensor import TensorView
from fuser.passes.segment import VIEW_OPS
from hostir.container import HostIrContainer, walk
from hostir.ops import Allocate


@dataclass(frozen=True)
class Storage:
    """The sharing of buffers in a program."""

    tensors: tuple[TensorView, ...]
    # View or in-place output -> the tensor whose buffer it shows.
    shows: dict[TensorView, TensorView]
    escaping: frozenset[TensorView]

    @staticmethod
    def of(program: HostIrContainer) -> Storage:
        """Find views (outputs of view ops that were not allocated) and in-place outputs."""
        inputs = {v for v in program.inputs if isinstance(v, TensorView)}
        owners: set[TensorView] = set(inputs)
        shows: dict[TensorView, TensorView] = {}
        for op in walk(program.ops):
            if isinstance(op, Allocate):
                owners.add(op.buffer)
            elif isinstance(op, VIEW_OPS):
                shows.update({out: op.inputs[0] for out in op.outputs if out not in owners})
        for alias in program.aliases:
            if alias.out not in owners and alias.out not in shows:
                shows[alias.out] = alias.into
        storage = Storage(program.tensors(), shows, frozenset())
        roots = {storage.root(tv) for tv in (*inputs, *program.outputs)}
        return Storage(storage.tensors, shows, frozenset(roots))

    def shown_by(self, tv: TensorView) -> TensorView | None:
        """Return the tensor that `tv` is a view of, None for the owner of a buffer."""
        return self.shows.get(tv)

    def root(self, tv: TensorView) -> TensorView:
        """Return the tensor that owns the buffer of `tv`."""
        while tv in self.shows:
            tv = self.shows[tv]
        return tv

    def escapes(self, tv: TensorView) -> bool:
        """Whether the buffer of `tv` belongs to the caller: an input's, or one of an output."""
        return self.root(tv) in self.escaping
