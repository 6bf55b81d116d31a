"""The meaning of each collective in plain torch: from all members' operands to their results.

Reductions are sums; `root` is a position in the team. A member without a result has None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Results = list[torch.Tensor | None]


@dataclass(frozen=True)
class Meaning:
    """The meaning of one collective; `is_everywhere` if no transport may refuse it."""

    results: Callable[[list[torch.Tensor], int], Results]
    is_everywhere: bool = True


def _to_all(result: torch.Tensor, members: int) -> Results:
    return [result] * members


def _at(root: int, result: torch.Tensor, members: int) -> Results:
    return [result if member == root else None for member in range(members)]


class _Meanings(dict[str, Meaning]):
    """The meanings by name; the error of a look-up says where a missing one is added."""

    def __missing__(self, name: str) -> Meaning:
        raise LookupError(f"{name} has no entry in MEANINGS (tests/support/collective_meanings.py)")


MEANINGS = _Meanings(
    {
        "Allgather": Meaning(lambda xs, root: _to_all(torch.cat(xs), len(xs))),
        "Allreduce": Meaning(lambda xs, root: _to_all(torch.stack(xs).sum(0), len(xs))),
        "AllToAll": Meaning(
            lambda xs, root: [torch.cat([x.chunk(len(xs))[i] for x in xs]) for i in range(len(xs))]
        ),
        "Broadcast": Meaning(lambda xs, root: _to_all(xs[root], len(xs))),
        "Gather": Meaning(lambda xs, root: _at(root, torch.cat(xs), len(xs))),
        "Reduce": Meaning(lambda xs, root: _at(root, torch.stack(xs).sum(0), len(xs))),
        "ReduceScatter": Meaning(lambda xs, root: [*torch.stack(xs).sum(0).chunk(len(xs))]),
        "Scatter": Meaning(lambda xs, root: [*xs[root].chunk(len(xs))]),
    }
)
