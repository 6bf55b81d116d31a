"""LRUCache and LruFusionCache: definitions that say the same share one executor cache.

The key is the structure of the fusion (`Fusion.__eq__`): ops, layouts, shardings and updates, but
no names. What a program is lowered to is shared by all equal definitions anyway
(`program_cache`); here they share what has been bound and recorded, too.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import ParamSpec

from fuser.frontend.definition import FusionDefinition
from fuser.frontend.executor_cache import FusionExecutorCache
from fuser.ir.canonical_form import form_of
from fuser.ir.fusion import Fusion
from fuser.support.arguments import checked, show
from fuser.support.errors import ArgumentError, DefinitionError, EmptyDefinitionError
from fuser.support.locks import make_lock

P = ParamSpec("P")


@dataclass
class _Entry:
    executor: FusionExecutorCache
    hits: int = 0


class LRUCache:
    """At most `max_fusions` executor caches, of which the one used least lately goes first."""

    @checked
    def __init__(self, max_fusions: int) -> None:
        if max_fusions < 1:
            raise DefinitionError(f"LRUCache: max_fusions is at least 1, got {max_fusions}")
        self._limit = max_fusions
        # Least lately used first.
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._lookups = self._hits = 0
        self._lock = make_lock()

    @checked
    def cache_compile(self, fusion: Fusion) -> FusionExecutorCache:
        """Returns the executor cache of the first fusion that was equal, else make one, which takes
        the fusion over."""
        key = form_of(fusion).key
        with self._lock:
            self._lookups += 1
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = _Entry(FusionExecutorCache(fusion))
                if len(self._entries) > self._limit:
                    self._entries.popitem(last=False)
            else:
                self._hits += 1
                entry.hits += 1
                self._entries.move_to_end(key)
            return entry.executor

    def num_fusions(self) -> int:
        """Returns how many fusions are held."""
        return len(self._entries)

    def stats(self) -> str:
        """Returns counts of fusions, look-ups and hits; per fusion, the one used last first."""
        with self._lock:
            lines = [f"Max Fusions Allowed: {self._limit}"]
            if not self._entries:
                return "\n".join([*lines, "The fusion cache is empty.", ""])
            lines += [
                f"Total Fusions in Cache: {len(self._entries)}",
                f"Total Unique Fusions Compiled: {self._lookups - self._hits}",
                "Cache Hits by LRU ordering:",
            ]
            used_last_first = reversed(self._entries.values())
            lines += [f"\t{k} -> {entry.hits} hits" for k, entry in enumerate(used_last_first)]
            lines += [
                f"Cache Lookups: {self._lookups}",
                f"Cache Hits: {self._hits}",
                f"Hit Rate: {100 * self._hits / self._lookups:g}%",
            ]
            return "\n".join([*lines, ""])


class LruFusionCache:
    """A decorator of functions that return a definition: equal ones share one executor cache.

        @LruFusionCache(max_fusions=64)
        def layer(n):
            with FusionDefinition() as fd: ...
            return fd

    The decorated function has `stats()` and `num_fusions()`.
    """

    @checked
    def __init__(self, max_fusions: int = 16384) -> None:
        self._cache = LRUCache(max_fusions)

    def __call__(self, define: Callable[P, FusionDefinition]) -> Callable[P, FusionDefinition]:
        cache = self._cache

        def defined(*args: P.args, **kwargs: P.kwargs) -> FusionDefinition:
            fd = define(*args, **kwargs)
            if not isinstance(fd, FusionDefinition):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ArgumentError(f"LruFusionCache: no FusionDefinition returned: {show(fd)}")
            if not hasattr(fd, "fec"):
                is_valid, why = fd.validate_definition()
                if not is_valid:
                    raise EmptyDefinitionError(why)
                fd.fec = cache.cache_compile(fd.fusion)
                del fd._fusion
            return fd

        functools.update_wrapper(defined, define)
        defined.stats = cache.stats  # pyright: ignore[reportFunctionMemberAccess]
        defined.num_fusions = cache.num_fusions  # pyright: ignore[reportFunctionMemberAccess]
        return defined


__all__ = ["LRUCache", "LruFusionCache"]
