"""Remove unused: drop ops that reach no output.

Before: any fusion. After: every op reaches an output, so that later passes and the segmenter need
not ask.
"""

from __future__ import annotations

from fuser.ir.fusion import Fusion


def remove_unused(fusion: Fusion) -> None:
    """Rewrite `fusion` in place."""
    fusion.exprs = fusion.used_exprs()
