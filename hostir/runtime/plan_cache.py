"""The cache of a program's recorded plans, by the signature and the alignments of the inputs.

    signature of the inputs -> `SignatureEntry` -> alignments of the inputs -> `Plan`

A signature has the layouts of tensors and the values of some numbers. For each device the cache
also has a size-generic plan, which makes plans for new sizes, and the arenas in which plans store
intermediates.
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

# Signatures in the cache of an evaluator; the least recently used one is dropped.
MAX_PLANS = 256
# Plans per signature: combinations of the alignments of its tensors.
MAX_PLACES = 64


def forget(plan: Plan) -> None:
    """Drops the CUDA graphs and bound steps of a plan that will hardly run again.

    Their memory is then free.
    """
    plan.arenas.forget(plan)


class SignatureEntry:
    """The cache entry for inputs with one signature: checks of each call, and recorded plans.

    A plan depends on the alignment of each input (address modulo the bytes of a vector access). The
    signature does not have the alignments. `contents` computes the alignments of a call. Each
    combination of alignments has its own plan.
    """

    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        # This rank's signature of runs with these inputs, which all ranks compare.
        self.run_signature: RunSignature | None = None
        self.plans: Recent[tuple[int, ...], Plan] = Recent(MAX_PLACES, on_drop=forget)
        # Plans that have not run yet, by alignments.
        self._new: dict[tuple[int, ...], Plan] = {}

    def expect(self, inputs: Sequence[Argument], plan: Plan) -> None:
        """Stores `plan`, which a dry run has recorded, for the first run on inputs like these.

        `take` returns the plan to that run.
        """
        self._new[self.contents.places(inputs)] = plan

    def take(self, places: tuple[int, ...]) -> Plan | None:
        """Removes and returns the plan for the first run on inputs with these alignments.

        Returns None if `expect` has stored no such plan.
        """
        return self._new.pop(places, None)

    def forget(self) -> None:
        """Drops the CUDA graphs and bound steps of all plans for inputs with this signature.

        The least recently used entry of a full cache is dropped in this way.
        """
        for plan in self.plans.values():
            forget(plan)


class PlanCache:
    """All that one program keeps between its runs on one rank, by the signature of inputs.

    The cache has recorded plans, size-generic plans (which make plans for new sizes), and arenas,
    which are the memory of intermediates.
    """

    def __init__(
        self,
        inputs: Sequence[Value],
        free: frozenset[int],
        *,
        pools: dict[torch.device, Pool] | None = None,
        why_no_graphs: str = "",
    ) -> None:
        """Makes an empty cache for a program with these `inputs`.

        `free` has the positions of the scalar inputs whose values are not part of a signature. See
        `Arenas` for `pools` and for `why_no_graphs`, which is `why_not` there.
        """
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
        """Finds the cache entry for the inputs of a call.

        Returns (flat list of inputs, signature of the inputs, cache entry). The entry is None if
        the cache has none for the signature. `signature` is the signature of the inputs, if the
        caller has already computed it.
        """
        try:
            inputs = list(inputs)
            key = signature_of(inputs, self.free) if signature is None else signature
            known = self._known.get(key)
        except TypeError:  # the inputs are no list, or one of them is not hashable
            inputs = flatten(inputs)
            key = signature_of(inputs, self.free)
            known = None
        return inputs, key, self._known.recall(key) if known is None else known

    def new(
        self, inputs: Sequence[Argument], also: Callable[[Sequence[Any]], None] | None
    ) -> SignatureEntry:
        """Returns a new entry for inputs like these, which `keep` adds to the cache.

        `also` is a further check of the scalar inputs of later calls, or None.
        """
        return SignatureEntry(Contents(self._inputs, inputs, VECTOR_BYTES, also))

    def keep(self, signature: Hashable, known: SignatureEntry) -> None:
        """Adds the entry `known` to the cache, for later calls whose inputs have this signature."""
        self._known[signature] = known

    def plans(self) -> list[Plan]:
        """Returns all recorded plans in the cache."""
        return [plan for known in self._known.values() for plan in known.plans.values()]

    # ------------------------------------------------------------ devices
    def plan_for_new_sizes(self, frame: Frame) -> Plan | None:
        """Makes a plan for the inputs of `frame` without a dry run, from a plan for other sizes.

        Returns None if there is no size-generic plan for the device yet, or if these sizes need a
        dry run. All kernels of the returned plan are already compiled.
        """
        generic_plan = self._generic_plans.get(frame.machine.device)
        return None if generic_plan is None else generic_plan.plan_for(frame)

    def keep_generic_plan(self, device: torch.device, generic_plan: SizeGenericPlan | None) -> None:
        """Stores a size-generic plan, from which plans for later sizes on `device` are made.

        Does nothing if `generic_plan` is None.
        """
        if generic_plan is not None:
            self._generic_plans[device] = generic_plan

    def arenas_on(self, device: torch.device) -> Arenas:
        """Returns the arenas in which plans on `device` store intermediates.

        The object is made at the first call.
        """
        found = self._arenas.get(device)
        if found is None:
            made = Arenas(device, self._why_no_graphs, self._pools)
            found = self._arenas.setdefault(device, made)
            if found is made and self._pools is not None:
                weakref.finalize(self, made.pool.leave, made.owner).atexit = False
        return found

    def arenas(self) -> list[Arenas]:
        """Returns the arenas (memory of intermediates) of all devices that have run the program."""
        return list(self._arenas.values())

    def memory(self) -> Memory:
        """Returns how many bytes the plans of this cache keep between runs, by purpose."""
        return memory_of(self.arenas(), self.plans())
