"""Checks the rules that hold for every correct fusion, after every pass."""

from __future__ import annotations

from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.op import op_text
from fuser.ir.scalar.constructors import Scalar, Symbol
from fuser.support.errors import VerifyError


def verify_fusion(fusion: Fusion, *, after: str = "definition") -> None:
    """Checks the rules that hold for every correct fusion. `after` names the pass that just ran.

    - Every tensor is the result of one op, which precedes the ops that read the tensor.
    - Inputs are the result of no op. Each output is an input or the result of an op.
    - Contiguity has one flag per axis in memory order. The flag is None exactly for broadcast and
      reduction axes.
    - Loop axes, and axes in memory order, are derived from the axes that users see.
    - A tensor has at most one axis for each mesh dimension, and for each parallel type of loops
      over CUDA streams.

    Raises:
        VerifyError: a rule is broken. The message names the pass, the op and the rule.
    """
    known = {v for v in fusion.inputs if isinstance(v, TensorView)}
    for op in fusion.exprs:
        for value in op.inputs:
            if isinstance(value, TensorView) and value not in known:
                raise VerifyError(
                    f"after {after}: an op reads {value}, but no earlier op defines it:\n"
                    f"{op_text(op)}"
                )
        for out in op.outputs:
            if out in known:
                raise VerifyError(
                    f"after {after}: two ops define {out}; the second is\n{op_text(op)}"
                )
            known.add(out)
        op.verify()
    for out in fusion.outputs:
        if out not in known:
            raise VerifyError(
                f"after {after}: output {out} is neither an input nor the result of an op"
            )
    for value in fusion.inputs:
        if isinstance(value, Scalar) and not isinstance(value, Symbol):
            raise VerifyError(
                f"after {after}: the scalar input {value} is an expression, expected a symbol"
            )
    for alias in fusion.aliases:
        wrong = f"{alias.into} is not an input" * (alias.into not in fusion.inputs)
        if alias.out not in fusion.outputs:
            wrong = f"{alias.out} is not an output"
        if wrong:
            raise VerifyError(
                f"after {after}: the update {alias.out} -> {alias.into} must write an output into "
                f"an input, but {wrong} of the fusion"
            )
    for tv in fusion.tensors():
        problem = tv.domain.problem
        if problem:
            raise VerifyError(f"after {after}: {tv}: {problem}")
