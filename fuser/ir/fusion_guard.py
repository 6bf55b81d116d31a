"""The active fusion: the only ambient state, set by `with FusionDefinition()`."""

from __future__ import annotations

from contextlib import suppress
from contextvars import Token

from fuser.ir.fusion import Fusion
from fuser.ir.statement import ACTIVE_FUSION
from fuser.support.arguments import require
from fuser.support.errors import DefinitionError


def active_fusion() -> Fusion:
    """Returns the fusion of the enclosing definition; raises `DefinitionError` outside one."""
    fusion: Fusion | None = ACTIVE_FUSION.get()
    if fusion is None:
        raise DefinitionError(
            "no active fusion: ops and define_* work inside `with FusionDefinition()` only"
        )
    return fusion


class FusionGuard:
    """Make a fusion the active one until the guard is closed or left.

    Also works without `with`, as nvFuser's guard does: active from construction to `close()`, or
    until nothing names the guard any more.
    """

    _token: Token[Fusion | None] | None = None

    def __init__(self, fusion: Fusion) -> None:
        self._token = ACTIVE_FUSION.set(require("FusionGuard", "fusion", fusion, Fusion))

    def close(self) -> None:
        if self._token is not None:
            ACTIVE_FUSION.reset(self._token)
            self._token = None

    def __del__(self) -> None:
        # Collected in another thread, it has nothing to undo there.
        with suppress(ValueError):
            self.close()

    def __enter__(self) -> FusionGuard:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
