"""Separate updates: what is written into an input is computed by an op.

Before: an in-place output may be a fusion input itself. After: it is a `set` of that input, so that
its old value is read like any other. The lowering to a host program relies on it.

    inputs T0, T1; T0 -> T1, T1 -> T0      T2 = set(T0); T3 = set(T1); T2 -> T1, T3 -> T0
"""

from __future__ import annotations

from dataclasses import replace

from fuser.ir.fusion import Alias, Fusion
from fuser.ir.ops.nodes import LoadStoreOp
from fuser.ir.tensor import TensorView


def separate_updates(fusion: Fusion) -> None:
    """Rewrite `fusion` in place."""
    for alias in fusion.aliases:
        if alias.out in fusion.inputs and alias.out is not alias.into:
            axes = [fusion.clone_axis(a) for a in alias.out.domain.no_reductions]
            value = fusion.new_tensor(axes, alias.out.dtype(), mesh=alias.out.mesh)
            write_instead(fusion, alias, value)


def write_instead(fusion: Fusion, alias: Alias, value: TensorView) -> None:
    """Make `value`, a copy of the in-place output, the one that is written into the input."""
    op = LoadStoreOp(value, alias.out)
    definition = fusion.definition(alias.out)
    fusion.insert_after(definition, [op.replace(where=definition.where if definition else "")])
    value.memory = alias.into.memory
    shared = [a for a in fusion.aliases if a.out is alias.out]
    at = fusion.aliases.index(alias)
    if len(shared) > 1 or (alias.out in fusion.inputs and not alias.hidden):
        # The output stays, for its other buffers or as the input that a caller gets back.
        fusion.aliases[at] = Alias(value, alias.into, where=alias.where)
        fusion.outputs.append(value)
        return
    fusion.aliases[at] = replace(alias, out=value)
    fusion.outputs = [value if out is alias.out else out for out in fusion.outputs]
