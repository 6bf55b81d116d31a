"""What an evaluator remembers of the inputs that it has run on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fuser.ir.binding import Argument, Contents
from fuser.support.lru import Recent
from hostir.runtime.plan import Plan
from multidevice.job.agreement import Claim

# Places in a vector of memory of the tensors of one signature.
MAX_PLACES = 64


class Known:
    """What is remembered of inputs of one signature: what each call must check, and their plans.

    A plan relies on where in a vector of memory each tensor begins, which no signature tells: there
    is one for the places (`Contents`) that came.
    """

    def __init__(self, contents: Contents, forget: Callable[[Plan], None]) -> None:
        self.contents = contents
        # What this rank claims to run on them, where others have to agree.
        self.claim: Claim | None = None
        self.plans: Recent[tuple[int, ...], Plan] = Recent(MAX_PLACES, on_drop=forget)
        # What is bound and has not run yet.
        self._new: dict[tuple[int, ...], Plan] = {}
        self._forget = forget

    def expect(self, inputs: Sequence[Argument], plan: Plan) -> None:
        """Remember the plan of these inputs for their first run."""
        self._new[self.contents.places(inputs)] = plan

    def take(self, places: tuple[int, ...]) -> Plan | None:
        """Return the plan that was made for the first run in these places, if there is one."""
        return self._new.pop(places, None)

    def forget(self) -> None:
        """Let go of what the plans are bound to."""
        for plan in self.plans.values():
            self._forget(plan)
