"""How the communications of whole buffers are repeated."""

from __future__ import annotations

from typing import NamedTuple

from hostir.runtime.communication import CommunicationCall, PostedBuffer, bind_post, post
from hostir.runtime.steps import Action, CollectiveStep, Slots, Step


class Posting(NamedTuple):
    """A communication, and the slots of its buffers (-1 for one that this rank lacks) and of what
    is waited for."""

    call: CommunicationCall
    inp: int
    out: int
    work: int
    stream: int | None

    def post(self, slots: Slots) -> None:
        """Start it as if for the first time."""
        inp, out = self.held(slots)
        slots[self.work] = post(self.call, inp, out)

    def step(self, inp: PostedBuffer, out: PostedBuffer) -> Step:
        """Return the step that starts it on buffers like these, on which it has been started."""
        bound = bind_post(self.call, inp, out)
        if bound is None:
            return Action(self.post)
        return CollectiveStep(bound, self.inp, self.out, self.work, self.stream)

    def held(self, slots: Slots) -> tuple[PostedBuffer, PostedBuffer]:
        """Return the buffers of a run."""
        inp = slots[self.inp] if self.inp >= 0 else None
        return inp, slots[self.out] if self.out >= 0 else None


class FirstPost:
    """Starts a communication, and notes what later runs of the class start it by."""

    def __init__(self, posting: Posting) -> None:
        self._posting = posting
        self.step: Step | None = None

    def run(self, slots: Slots) -> None:
        """Start it on the buffers of a run."""
        posting = self._posting
        posting.post(slots)
        self.step = posting.step(*posting.held(slots))
