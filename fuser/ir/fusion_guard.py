"""The active fusion, to which ops are added. `with FusionDefinition()` sets the active fusion.

The active fusion is the only global state of the package. Each thread has its own.
"""

from __future__ import annotations

from contextlib import suppress
from contextvars import Token

from fuser.ir.fusion import Fusion
from fuser.ir.statement import ACTIVE_FUSION
from fuser.support.arguments import require
from fuser.support.errors import DefinitionError


def active_fusion() -> Fusion:
    """Returns the fusion that the enclosing `with FusionDefinition()` block defines.

    Raises:
        DefinitionError: there is no such block.
    """
    fusion: Fusion | None = ACTIVE_FUSION.get()
    if fusion is None:
        raise DefinitionError(
            "there is no active fusion: ops and define_* work only inside of "
            "`with FusionDefinition() as fd:`"
        )
    return fusion


class FusionGuard:
    """Makes a fusion the active fusion, to which ops are added, until the guard is closed.

    A guard is closed at the end of its `with` block. Without `with`, as in nvFuser, the fusion is
    active from construction until `close()`, or until the guard is garbage-collected.
    """

    _token: Token[Fusion | None] | None = None

    def __init__(self, fusion: Fusion) -> None:
        self._token = ACTIVE_FUSION.set(require("FusionGuard", "fusion", fusion, Fusion))

    def close(self) -> None:
        """Restores the fusion that was active before this guard. A second call does nothing."""
        if self._token is not None:
            ACTIVE_FUSION.reset(self._token)
            self._token = None

    def __del__(self) -> None:
        # A guard that is collected in another thread has no active fusion to restore there.
        with suppress(ValueError):
            self.close()

    def __enter__(self) -> FusionGuard:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
