"""The cache of a program's recorded plans, by the signature and the alignments of the inputs. A
plan is the list of steps that repeat a run.

    signature of the inputs -> `SignatureEntry` -> alignments of the inputs -> `Plan`

A signature has the layouts of tensors and the values of some numbers. For each device the cache
also has a size-generic plan, which makes plans for new sizes, and the arenas, the buffers in which
plans store intermediates.
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
    """Frees the memory that `plan`, the recorded steps of a program, uses between runs: its CUDA
    graphs and the functions that carry out its steps.

    The caller expects that the plan will hardly run again. If it does, the functions are made
    again.
    """
    plan.arenas.forget(plan)


class SignatureEntry:
    """The cache entry for inputs with one signature (layouts and numbers): checks of each call, and
    the plans, which are the recorded steps of runs on such inputs.

    A plan also depends on the alignment of each input (address modulo the bytes of a vector
    access), which the signature does not have. `contents` computes the alignments of a call. Each
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
        """Stores `plan`, which a dry run has recorded, for the first run on inputs with the
        alignments of `inputs`.

        That run gets the plan by the method `take`.
        """
        self._new[self.contents.places(inputs)] = plan

    def take(self, places: tuple[int, ...]) -> Plan | None:
        """Removes and returns the plan (recorded steps) that `expect` has stored for the first run
        on inputs with the alignments `places`.

        Returns None if `expect` has stored no such plan.
        """
        return self._new.pop(places, None)

    def forget(self) -> None:
        """Frees the CUDA graphs, and the functions that carry out recorded steps, of all runs on
        inputs with this entry's signature.

        If the cache is full, this is called for the least recently used entry, which is dropped.
        """
        for plan in self.plans.values():
            forget(plan)


class PlanCache:
    """All that one program keeps between its runs on one rank, by the signature of inputs (layouts
    and numbers).

    The cache has plans (the recorded steps of runs), size-generic plans (which make plans for new
    sizes), and arenas, which are the memory of intermediates.
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

        - `free`: the positions of the scalar inputs whose values are not part of the signature, so
          that calls with different values share an entry.
        - `pools`: the memory of intermediates that programs share, by device; None for memory of
          this program only.
        - `why_no_graphs`: the reason why no CUDA graph may repeat the program's runs; "" if graphs
          may.
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
        """Finds the cache entry for the inputs of a call, with the recorded steps of earlier runs
        on such inputs.

        Returns (flat list of inputs, signature of the inputs, cache entry). The signature is a key
        of layouts and numbers, by which entries are found. The entry is None if the cache has none.
        `signature` is the signature of the inputs, if the caller has already computed it.
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
        """Returns a new cache entry for inputs with the layouts and numbers of `inputs`. The method
        `keep` adds the entry to the cache.

        `also` is a further check of the scalar inputs of later calls, or None.
        """
        return SignatureEntry(Contents(self._inputs, inputs, VECTOR_BYTES, also))

    def keep(self, signature: Hashable, known: SignatureEntry) -> None:
        """Adds the entry `known` to the cache, for later calls whose inputs have this signature,
        the key of their layouts and numbers.
        """
        self._known[signature] = known

    def plans(self) -> list[Plan]:
        """Returns all plans in the cache. A plan is the list of steps that repeat a run on inputs
        of certain shapes and layouts.
        """
        return [plan for known in self._known.values() for plan in known.plans.values()]

    # ------------------------------------------------------------ devices
    def plan_for_new_sizes(self, frame: Frame) -> Plan | None:
        """Makes a plan, the list of steps of a run, for the inputs of `frame` from a plan for other
        sizes. The program need not be followed again.

        Returns None if the device has no object that makes such plans yet, or if these sizes need a
        dry run. All kernels of the returned plan are already compiled.
        """
        generic_plan = self._generic_plans.get(frame.machine.device)
        return None if generic_plan is None else generic_plan.plan_for(frame)

    def keep_generic_plan(self, device: torch.device, generic_plan: SizeGenericPlan | None) -> None:
        """Stores `generic_plan`, an object that makes plans (lists of steps that repeat a run) for
        inputs of any sizes. It serves all later calls on `device`.

        Does nothing if `generic_plan` is None.
        """
        if generic_plan is not None:
            self._generic_plans[device] = generic_plan

    def arenas_on(self, device: torch.device) -> Arenas:
        """Returns the object that manages the memory of intermediates on `device`, for this
        program. The object is made at the first call.
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
        """Returns how many bytes are kept between runs for the recorded steps of this cache, by
        purpose.
        """
        return memory_of(self.arenas(), self.plans())
