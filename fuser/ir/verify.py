"""Checks the rules that hold for every correct fusion, after every pass."""

from __future__ import annotations

from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.op import op_text
from fuser.ir.scalar.constructors import Scalar, Symbol
from fuser.support.errors import VerifyError


def verify_fusion(fusion: Fusion, *, after: str = "") -> None:
    """Checks the rules that hold for every correct fusion.

    - Every tensor is the result of one op, which precedes the ops that read the tensor.
    - Inputs are the result of no op. Each output is an input or the result of an op.
    - Contiguity has one flag per axis in memory order. The flag is None exactly for broadcast and
      reduction axes.
    - Loop axes, and axes in memory order, are derived from the axes that users see.
    - A tensor has at most one axis for each mesh dimension, and for each stream type: `stream`,
      `stream_y` and `stream_z`. The iterations of an axis with such a type run on CUDA streams.

    Raises:
        VerifyError: a rule is broken. `after` is the name of the pass that has made the fusion, or
            "" for a fusion that users wrote. The message of a pass asks for a report, because only
            a fault of this project breaks a rule there.
    """
    problem = _problem(fusion)
    if problem and after:
        raise VerifyError(
            f"internal error: the pass {after} has made a wrong fusion. Please report this "
            f"definition: {problem}"
        )
    if problem:
        raise VerifyError(problem)


def _problem(fusion: Fusion) -> str:
    """Returns the first broken rule of a fusion as the text of a message, or "" if there is none.

    Raises:
        VerifyError: an op breaks a rule of its own.
    """
    known = {v for v in fusion.inputs if isinstance(v, TensorView)}
    for op in fusion.exprs:
        for value in op.inputs:
            if isinstance(value, TensorView) and value not in known:
                return f"an op reads {value}, but no earlier op defines it:\n{op_text(op)}"
        for out in op.outputs:
            if out in known:
                return f"two ops define {out}; the second is\n{op_text(op)}"
            known.add(out)
        op.verify()
    for out in fusion.outputs:
        if out not in known:
            return f"the output {out} is neither an input nor the result of an op"
    for value in fusion.inputs:
        if isinstance(value, Scalar) and not isinstance(value, Symbol):
            return f"the scalar input {value} is an expression, expected a symbol"
    for alias in fusion.aliases:
        wrong = f"{alias.into} is not an input" * (alias.into not in fusion.inputs)
        if alias.out not in fusion.outputs:
            wrong = f"{alias.out} is not an output"
        if wrong:
            return (
                f"the update {alias.out} -> {alias.into} must write an output into an input, but "
                f"{wrong} of the fusion"
            )
    return next((f"{tv}: {p}" for tv in fusion.tensors() if (p := tv.domain.problem)), "")
