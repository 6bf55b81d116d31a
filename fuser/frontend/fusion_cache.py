"""LRUCache and LruFusionCache: equal definitions share one cache of compiled programs.

Definitions are equal if their fusions have the same structure (`Fusion.__eq__`): ops, layouts,
shardings and updates, but not names. Without these caches, equal definitions share only their
programs (`program_cache`). With these caches, they also share everything that belongs to a rank
(process), such as the recorded steps by which a call is repeated.
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
    """A cache of at most `max_fusions` executor caches, by fusion.

    An executor cache has the compiled programs of one fusion. When this cache is full, the least
    recently used executor cache is dropped.
    """

    @checked
    def __init__(self, max_fusions: int) -> None:
        if max_fusions < 1:
            raise DefinitionError(f"LRUCache: max_fusions must be at least 1, got {max_fusions}")
        self._limit = max_fusions
        # The least recently used one first.
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._lookups = self._hits = 0
        self._lock = make_lock()

    @checked
    def cache_compile(self, fusion: Fusion) -> FusionExecutorCache:
        """Returns the executor cache (the compiled programs) of an equal fusion.

        If there is none, returns a new executor cache, which then owns `fusion`.
        """
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
        """Returns the number of cached fusions."""
        return len(self._entries)

    def stats(self) -> str:
        """Returns statistics of the cache as text: the numbers of fusions, look-ups and hits.

        The hits of each fusion follow, the most recently used fusion first.
        """
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
    """A decorator for functions that return a definition. The definitions that are equal share
    compiled programs.

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
        """Decorates the function `define`, which returns definitions.

        If an equal definition was returned earlier, the new one shares its compiled programs.
        """
        cache = self._cache

        def defined(*args: P.args, **kwargs: P.kwargs) -> FusionDefinition:
            fd = define(*args, **kwargs)
            if not isinstance(fd, FusionDefinition):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ArgumentError(
                    "LruFusionCache: the decorated function must return a FusionDefinition, got "
                    f"{show(fd)}"
                )
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
