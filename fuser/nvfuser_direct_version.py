"""The module in which nvFuser's programs look for `Version`."""

from __future__ import annotations

from fuser.release import Version

__all__ = ["Version"]
