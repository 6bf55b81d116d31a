"""The ops that users call as `fd.ops.*`: checks, rules for dtypes and shapes, nodes of the graph.

Question: how does a call such as `fd.ops.add(x, y)` add nodes to the graph of a fusion?
Imports: `fuser.support` and `fuser.ir`.
Files, in reading order:

- `rows`: the table of ops: name, function, nodes and rules of each op. Also the names of torch's
  and nvFuser's ops that have another name in `fd.ops`.
- `building`: functions that check the operands of an op and make its result.
- `define`: tensors, scalars and constants of a definition.
- `elementwise`: ops of the pointwise table; dtype promotion.
- `operators`, `no_values`: Python's operators on tensors; the errors for code that asks a tensor
  for its values.
- `reduction_table`, `reductions`: kinds of reductions; sums, extremes, moments and norms.
- `composites`: softmax, norms, losses and activations, which expand into other ops.
- `reshaping`, `resize`, `indexing`: views and permutations; slices, pads and concatenations;
  lookups.
- `factories`: full, iota, random numbers.
- `contractions`: products of matrices, also scaled and grouped.
- `attention`: scaled dot product attention.
- `quantize`, `scans`: blocks with scales; cumulative ops, sorts and top k.

A call checks its arguments and adds one or more nodes to the definition that is being written. It
returns the tensors (`TensorView`) or scalars that these nodes define. Nothing is computed before
the definition runs. `help(fd.ops.NAME)` shows an op's arguments, shape rule and dtype rule.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from fuser.ops import operators
from fuser.ops.building import ARGUMENTS
from fuser.ops.elementwise import DTYPE_RULES
from fuser.ops.rows import ROWS, SPELLED, OpRow
from fuser.support.arguments import checked
from fuser.support.errors import UnknownOpError, user_code, user_line

operators.install()


def __getattr__(name: str) -> Callable[..., Any]:
    raise UnknownOpError(
        f"module 'fuser.ops' has no op {name!r}: {_hint(name)}{user_code(user_line())}"
    )


def _hint(name: str) -> str:
    """Returns the part of an error message that says which op the user may have meant by `name`.

    `name` is not the name of an op.

    Capitals and underscores are ignored in the search for similar names, because users also write
    the names of torch's modules: `RMSNorm` for `rms_norm`, `LeakyReLU` for `leaky_relu`.
    """
    plain = _plain(name)
    spelled = {_plain(other): hint for other, hint in SPELLED.items()}
    if hint := SPELLED.get(name) or spelled.get(plain):
        return hint
    same = [op for op in ROWS if _plain(op) == plain]
    near = same or get_close_matches(name, ROWS, n=3, cutoff=0.6)
    nearest = " or ".join(", ".join(near).rsplit(", ", 1))
    return f"did you mean {nearest}?" if near else "see dir(fd.ops)"


def _plain(name: str) -> str:
    return name.lower().replace("_", "")


def __dir__() -> list[str]:
    return sorted(ROWS)


def _public(row: OpRow) -> Callable[..., Any]:
    """Returns the function that users call as `fd.ops.NAME`, for the op that `row` describes.

    The function checks its arguments. Its docstring also has the op's rules for the shape and the
    dtype of the result.
    """
    function = checked(row.function, name=row.name, kinds=ARGUMENTS)
    if row.is_implemented:
        rule = DTYPE_RULES[row.dtype].sentence
        function.__doc__ = "\n".join(
            (
                inspect.cleandoc(row.function.__doc__ or ""),
                f"\nShape: {row.shape}",
                f"Dtypes: rule `{row.dtype}` of docs/reference/operations.md. {rule}",
            )
        )
    return function


globals().update({name: _public(row) for name, row in ROWS.items()}, __all__=list(ROWS))
