"""The active fusion: the only ambient state, set by `with FusionDefinition()`."""

from __future__ import annotations

from contextvars import ContextVar, Token

from fuser.errors import DefinitionError
from fuser.ir.fusion import Fusion

_ACTIVE: ContextVar[Fusion | None] = ContextVar("active_fusion", default=None)


def active_fusion() -> Fusion:
    """Return the fusion of the enclosing definition; raises `DefinitionError` outside one."""
    fusion = _ACTIVE.get()
    if fusion is None:
        raise DefinitionError(
            "no active fusion: ops and define_* work inside `with FusionDefinition()` only"
        )
    return fusion


class FusionGuard:
    """Make a fusion the active one until the guard is closed or left.

    Also works without `with`, as nvFuser's guard does: active from construction to `close()`.
    """

    def __init__(self, fusion: Fusion) -> None:
        self._token: Token[Fusion | None] | None = _ACTIVE.set(fusion)

    def close(self) -> None:
        if self._token is not None:
            _ACTIVE.reset(self._token)
            self._token = None

    def __enter__(self) -> FusionGuard:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
