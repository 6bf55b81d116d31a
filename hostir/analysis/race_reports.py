"""What the race check reports: the words of its findings, and the waits that would mend them."""

from __future__ import annotations

from collections.abc import Hashable

from fuser.ir.tensor import TensorView
from hostir.analysis.clocks import Clocks
from hostir.analysis.uses import TrackedBuffer, Use
from hostir.ir.diagnostics import Finding, Site
from hostir.ir.effects import ENTRY

RACE = "race"
FREED = "use after Deallocate"
FREED_EARLY = "memory given back too early"
NOT_JOINED = "returned too early"
LEFT = "stream left"
UNWRITTEN = "uninitialised"
ABSENT = "tensor of other ranks"
MISFIT = "sizes do not fit"
OWN = "result over operand"
NO_FLIGHT = "wait for nothing"
NO_WAIT = "communication without wait"
OUT_OF_RANGE = "index out of range"


class Reports:
    """The findings of a walk; `found` has the first one of a kind about the same ops."""

    def __init__(self, clocks: Clocks) -> None:
        self.clocks = clocks
        self.found: dict[object, Finding] = {}

    def _note(self, kind: str, what: str, *sites: tuple[Site, str], fix: str = "") -> None:
        """Keep a finding, the first one of a kind about the same ops."""
        key = (kind, *(id(site.op) for site, _ in sites))
        if key not in self.found:
            self.found[key] = Finding(kind, what, sites, fix)

    def _note_freed(self, tv: TensorView, at: Site, site: Site) -> None:
        self._note(
            FREED,
            f"{tv.label} has been given up when it is used",
            (at, "gives it up"),
            (site, f"on {self.clocks.name(self.clocks.current)}: uses {tv.label}"),
            fix="The Deallocate of {0} belongs behind {1}",
        )

    def _note_absent(self, tv: TensorView, site: Site) -> None:
        self._note(
            ABSENT,
            f"{tv.label} is used on a rank that its mesh lacks: {tv.mesh}",
            (site, f"on {self.clocks.name(self.clocks.current)}: uses {tv.label}"),
        )

    def _note_unentered(self, use: Use, buffer: TrackedBuffer) -> None:
        self._note(
            RACE,
            f"{buffer.owner.label} is used on a stream that never waited for the caller's",
            (use.site, self._doing(use, buffer)),
            fix=f"{self.clocks.name(use.began)} must wait for {self.clocks.name(ENTRY)} before "
            f"{{0}}: Synchronize({self.clocks.text(ENTRY)}) is missing",
        )

    def _race(self, earlier: Use, later: Use, buffer: TrackedBuffer) -> None:
        is_same = earlier.site.op is later.site.op and earlier.site.indices == later.site.indices
        if is_same and earlier.flight is later.flight:
            return  # `hostir.ir.in_place` says what an op may do to its own operands
        label = buffer.owner.label
        if earlier is buffer.made:
            what = f"{label} is used by a stream that did not wait for its allocation"
        elif later.is_write and earlier.site.indices != later.site.indices:
            what = f"a part of {label} is used again too early"
        else:
            what = f"nothing orders two uses of {label}"
        fix = self._remedy(earlier, later.began, "before {1}")
        if later.flight is not None and earlier.flight is later.flight:
            fix = "They start together: {1} belongs behind Wait(Communication "
            fix += f"{later.flight.number}), in a group of its own"
        self._note(
            RACE,
            what,
            (earlier.site, self._doing(earlier, buffer)),
            (later.site, self._doing(later, buffer)),
            fix=fix,
        )

    def _who(self, use: Use) -> str:
        if use.stream is None and use.flight is not None:
            return f"communication {use.flight.number}"
        return self.clocks.name(use.stream)

    def _doing(self, use: Use, buffer: TrackedBuffer) -> str:
        verb = "allocates" if use is buffer.made else "writes" if use.is_write else "reads"
        who = f"on {self.clocks.name(use.began)}"
        if use.flight is not None:
            who = f"communication {use.flight.number}, started {who}"
        return f"{who}: {verb} {buffer.text(use.box)}"

    def _elsewhere(self, to: Hashable) -> str:
        """Return how a stream that is not current waits, or need not."""
        current = self.clocks.current
        if to == current:
            return ""
        there, back = (f"SetCurrentStream({self.clocks.text(s)})" for s in (to, current))
        return (
            f", between {there} and {back}; or Allocate it before other streams are entered: what "
            "an op makes without an Allocate belongs to the stream of that op"
        )

    def _remedy(self, use: Use, waiter: Hashable, before: str) -> str:
        """Return which stream should wait for which, and where."""
        who = self.clocks.name(waiter)
        if use.stream is None and use.flight is not None:
            wait = f"Wait(Communication {use.flight.number})"
            return f"{who} must wait for it {before}: {wait} is missing"
        missing = f"Synchronize({self.clocks.text(use.stream)})"
        return f"{who} must wait for {self.clocks.name(use.stream)} {before}: {missing} is missing"
