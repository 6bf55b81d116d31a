"""The ops that users call as `fd.ops.*`: checks, dtype and shape rules, nodes.

Question: how does a call of an op become nodes of a fusion?
Imports: `fuser.support` and `fuser.ir`.
Files, in reading order:

- `rows`: one row per op of several nodes: its name, arguments and meaning; nvFuser's ops that are
  not here.
- `building`: how an op's operands are checked and its result made.
- `define`: tensors, scalars and constants of a definition.
- `elementwise`: ops of the pointwise table; dtype promotion.
- `operators`, `no_values`: Python's operators on tensors; the answers of a tensor that is asked for
  its values.
- `reduction_table`, `reductions`: kinds of reductions; sums, extremes, moments and norms.
- `composites`: softmax, norms, losses and activations, which expand into other ops.
- `reshaping`, `resize`, `indexing`: views and permutations; slices, pads and concatenations;
  lookups.
- `factories`: full, iota, random numbers.
- `contractions`: products of matrices, also scaled and grouped.
- `attention`: scaled dot product attention.
- `quantize`, `scans`: blocks with scales; cumulative ops, sorts and top k.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from fuser.ops import operators
from fuser.ops.building import ARGUMENTS
from fuser.ops.rows import ROWS, SPELLED
from fuser.support.arguments import checked
from fuser.support.errors import UnknownOpError

operators.install()


def __getattr__(name: str) -> Callable[..., Any]:
    near = get_close_matches(name, ROWS, n=3, cutoff=0.6)
    nearest = " or ".join(", ".join(near).rsplit(", ", 1))
    hint = SPELLED.get(name) or (f"did you mean {nearest}?" if near else "see dir(fd.ops)")
    raise UnknownOpError(f"module 'fuser.ops' has no op {name!r}: {hint}")


def __dir__() -> list[str]:
    return sorted(ROWS)


globals().update(
    {name: checked(row.function, name=name, kinds=ARGUMENTS) for name, row in ROWS.items()},
    __all__=list(ROWS),
)
