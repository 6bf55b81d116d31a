"""Checks where the results of a random program are stored, and which of them are views of an input.

The program's text determines this. An output that only selects or reorders elements of an input
shares its memory, unless the input is updated. Any other output shares memory with no input and has
no gaps.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tools.fuzz.program import Program, Ref

# Ops whose results are always views, and ops whose results are views if the strides allow it.
_VIEWS = ("permute", "broadcast", "squeeze")
# A reduction over axes of one element squeezes them.
_REDUCTIONS = ("sum", "prod", "max", "min", "var_mean", "welford")
_MAYBE = ("slice", "expand", "reshape", "broadcast_in_dim", *_REDUCTIONS)


def shown(program: Program) -> dict[str, tuple[str, bool]]:
    """Returns the values that may be views of an input: value -> (input, whether it must be a
    view).
    """
    found = {i.name: (i.name, not program.streams) for i in program.inputs}
    for stmt in program.stmts:
        source = stmt.args[0] if stmt.args else None
        if isinstance(source, Ref) and source.name in found and stmt.op in (*_VIEWS, *_MAYBE):
            name, is_sure = found[source.name]
            found.update((out, (name, is_sure and stmt.op in _VIEWS)) for out in stmt.outs)
    return found


def misplaced(
    program: Program, name: str, result: torch.Tensor, inputs: Mapping[str, object]
) -> str | None:
    """Returns what is wrong with the memory of a result; None if it is right."""
    text = f"{name}: shape {tuple(result.shape)}, strides {result.stride()}"
    written = {o.name: o.alias for o in program.outputs if o.alias is not None}
    own = written.get(name, name)
    if result is inputs.get(own):
        return None
    source, is_sure = shown(program).get(name, ("", False))
    is_view = False
    for given, t in inputs.items():
        if not isinstance(t, torch.Tensor) or not t.numel() or not result.numel():
            continue
        if t.untyped_storage().data_ptr() == result.untyped_storage().data_ptr():
            if given != source or given in written.values():
                return f"{text}, in the memory of {given}"
            is_view = True
    if is_sure and not is_view and result.numel() and source not in written.values():
        return f"{text}, a copy of {source}"
    return f"{text}, with gaps" if has_gaps(result) and not is_view else None


def has_gaps(t: torch.Tensor) -> bool:
    """Whether there is unused memory between elements, or elements overlap (except in repeated
    axes).
    """
    axes = [(step, n) for n, step in zip(t.shape, t.stride(), strict=True) if n > 1 and step]
    dense = 1
    for step, n in sorted(axes):
        if step != dense:
            return bool(t.numel())
        dense *= n
    return False
