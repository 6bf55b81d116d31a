"""`PlanCache`: what an evaluator remembers of the inputs that it has run on.

    signature of the inputs -> `SignatureEntry` -> places in vectors of memory -> `Plan`

Beside the plans it has, by device, what new ones are made of: a size-generic plan and arenas.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from fuser.ir.binding import Contents, signature_of
from fuser.ir.fusion import Value
from fuser.support.device import VECTOR_BYTES
from fuser.support.inputs import flatten
from fuser.support.lru import Recent
from hostir.runtime.frame import Frame
from hostir.runtime.inputs import Argument
from hostir.runtime.plan import Arenas, Memory, Plan, Pool, memory_of
from hostir.runtime.size_generic_plan import SizeGenericPlan
from multidevice.job.agreement import RunSignature

# Classes of inputs that an evaluator remembers.
MAX_PLANS = 256
# Places in a vector of memory of the tensors of one signature.
MAX_PLACES = 64


def forget(plan: Plan) -> None:
    """Lets go of what a plan is bound to: it will hardly run again."""
    plan.arenas.forget(plan)


class SignatureEntry:
    """Everything cached for inputs of one signature: the checks of each call, and their plans.

    A plan relies on where in a vector of memory each tensor begins, which no signature tells: there
    is one for the places (`Contents`) that came.
    """

    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        # What this rank claims to run on them, where others have to agree.
        self.claim: RunSignature | None = None
        self.plans: Recent[tuple[int, ...], Plan] = Recent(MAX_PLACES, on_drop=forget)
        # What is bound and has not run yet.
        self._new: dict[tuple[int, ...], Plan] = {}

    def expect(self, inputs: Sequence[Argument], plan: Plan) -> None:
        """Remembers the plan of these inputs for their first run."""
        self._new[self.contents.places(inputs)] = plan

    def take(self, places: tuple[int, ...]) -> Plan | None:
        """Returns the plan that was made for the first run in these places, if there is one."""
        return self._new.pop(places, None)

    def forget(self) -> None:
        """Lets go of what the plans are bound to."""
        for plan in self.plans.values():
            forget(plan)


class PlanCache:
    """The plans of one program at one rank."""

    def __init__(
        self,
        inputs: Sequence[Value],
        free: frozenset[int],
        *,
        pools: dict[torch.device, Pool] | None = None,
        why_no_graphs: str = "",
    ) -> None:
        """`inputs` are those of the program, `free` the positions of those whose values may change
        under one signature. `pools` and `why_no_graphs`: see `Arenas`."""
        self._inputs, self.free = inputs, free
        self._pools, self._why_no_graphs = pools, why_no_graphs
        self._known: Recent[Hashable, SignatureEntry] = Recent(
            MAX_PLANS, on_drop=SignatureEntry.forget
        )
        self._generic_plans: dict[torch.device, SizeGenericPlan] = {}
        self._arenas: dict[torch.device, Arenas] = {}

    # ------------------------------------------------------------ signatures
    def recall(
        self, inputs: Sequence[Argument], signature: Hashable | None = None
    ) -> tuple[Sequence[Argument], Hashable, SignatureEntry | None]:
        """Returns the flat inputs, their signature, and what is known of earlier ones like them.

        `signature` is theirs where the caller knows it already.
        """
        try:
            inputs = list(inputs)
            key = signature_of(inputs, self.free) if signature is None else signature
            known = self._known.get(key)
        except TypeError:  # of what is no list, or cannot be a part of a key
            inputs = flatten(inputs)
            key = signature_of(inputs, self.free)
            known = None
        return inputs, key, self._known.recall(key) if known is None else known

    def new(
        self, inputs: Sequence[Argument], also: Callable[[Sequence[Any]], None] | None
    ) -> SignatureEntry:
        """Returns an entry for inputs of this signature, which no other call finds yet; `also`
        checks the numbers of later ones."""
        return SignatureEntry(Contents(self._inputs, inputs, VECTOR_BYTES, also))

    def keep(self, signature: Hashable, known: SignatureEntry) -> None:
        """Lets later calls find an entry."""
        self._known[signature] = known

    def plans(self) -> list[Plan]:
        """Returns the plans of the signatures that are remembered."""
        return [plan for known in self._known.values() for plan in known.plans.values()]

    # ------------------------------------------------------------ devices
    def plan_for_new_sizes(self, frame: Frame) -> Plan | None:
        """Returns the plan for the inputs of a frame, made from the size-generic plan.

        None if there is no size-generic plan yet, or if it does not serve these sizes. All kernels
        of the plan are compiled.
        """
        generic_plan = self._generic_plans.get(frame.machine.device)
        return None if generic_plan is None else generic_plan.plan_for(frame)

    def keep_generic_plan(self, device: torch.device, generic_plan: SizeGenericPlan | None) -> None:
        """Keeps a size-generic plan, which makes the plans of later sizes; None keeps nothing."""
        if generic_plan is not None:
            self._generic_plans[device] = generic_plan

    def arenas_on(self, device: torch.device) -> Arenas:
        """Returns where intermediates lie on a device."""
        found = self._arenas.get(device)
        if found is None:
            made = Arenas(device, self._why_no_graphs, self._pools)
            found = self._arenas.setdefault(device, made)
            if found is made and self._pools is not None:
                weakref.finalize(self, made.pool.leave, made.owner).atexit = False
        return found

    def arenas(self) -> list[Arenas]:
        """Returns where intermediates lie, by device."""
        return list(self._arenas.values())

    def memory(self) -> Memory:
        """Returns what is kept between runs."""
        return memory_of(self.arenas(), self.plans())
