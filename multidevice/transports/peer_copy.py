"""Peer copies: the receiver copies out of the sender's memory, which the receiver has mapped.

All ranks of a team must be on one host. They share a piece of memory, the *mailbox* of the team. A
transfer has two steps. The sender writes a *record* to the mailbox, under a number that identifies
the transfer. The record says where the data is stored: the name of the memory, the offset and the
size. The receiver then reads the record, maps that memory (once), copies the data, and writes an
answer.

Data in memory that other ranks cannot map is first copied to memory that they can map (`empty`).
Otherwise there is no intermediate copy. Collectives are made of such transfers (`p2p_collectives`).

A rank may repeat a run by a CUDA graph only if all other ranks repeat the run by graphs, too. The
reason is that graphs contain the addresses of other ranks' data. Therefore the ranks vote in each
run (`PeerBackend.vote`).

This module contains the mailbox and the parts that all devices share. `peer_copy_cpu` and
`peer_copy_cuda` move data.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from fuser.support.errors import CommunicationError, UnsupportedError, counted
from multidevice.coordination.bounded_wait import Calls, Need, Team, team_text
from multidevice.coordination.control_channel import WITHIN_CALLS, CallTokens, Control
from multidevice.coordination.shared_page import LINE_NBYTES
from multidevice.transports.base.checked_backend import (
    CheckedBackend,
    CollectiveCall,
    Exchange,
    tensor_text,
    transfer_key,
)
from multidevice.transports.base.collectives import ALLGATHER
from multidevice.transports.base.p2p_collectives import steps_of
from multidevice.transports.base.protocol import NAME_WORDS, Transfer, Work
from multidevice.transports.memory.handles import await_members

# How many transfers from one rank to another may be under way at once.
SLOTS = 32
# Fields: elements, dtype, offset of the data in the memory, how often the slot was used; the name.
_RECORD_WORDS = 4 + NAME_WORDS
# The 8-byte words for one direction between two ranks: tags, answers, records.
_LINK_WORDS = SLOTS * (2 + _RECORD_WORDS)
# The top bit of an answer means that the transfer did not fit.
_MISFIT = 1 << 63
# A tag consists of: the kind of call, the team and number of the run, and the number of the
# transfer in it.
_COLLECTIVE = 1 << 62
_TEAM_SHIFT, _RUN_SHIFT, _CALL_SHIFT = 46, 26, 13
_TEAMS, _RUNS, _TRANSFERS, _PARTS = 1 << 16, 1 << 20, 1 << 26, 1 << 13

_DTYPES = {
    zlib.crc32(str(d).encode()): d for d in vars(torch).values() if isinstance(d, torch.dtype)
}


@dataclass(frozen=True)
class Record:
    """The location of the data of one transfer, as the receiver reads it from the mailbox.

    The mailbox is memory that all ranks of a team share, in which senders announce transfers.

    - `slot`: the entry of the mailbox that the transfer uses.
    - `elements`, `dtype`: the number of elements, and their dtype.
    - `offset`: the offset of the data in its memory, in bytes.
    - `use`: how many transfers have used this entry of the mailbox, including this one.
    - `name`: the name of the memory that contains the data.
    """

    slot: int
    elements: int
    dtype: torch.dtype
    offset: int
    use: int
    name: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The size of the data in bytes."""
        return self.elements * self.dtype.itemsize


@dataclass(eq=False)
class Sent:
    """A send to the rank `peer` that this rank has announced in the mailbox, the team's shared
    memory.

    - `slot`, `use`: the entry of the mailbox, and how many transfers have used it.
    - `tag`: the number by which sender and receiver match the transfer.
    - `held`: the data, which must exist until the receiver has answered.
    - `stream`: the raw handle of the CUDA stream of the send.
    """

    peer: int
    slot: int
    use: int
    tag: int
    held: torch.Tensor
    stream: int = 0


class Mailbox:
    """The mailbox of one team: shared memory in which the ranks announce and answer transfers.

    Each ordered pair of ranks has SLOTS entries (slots). An entry has room for one record, which
    says where the sender's data is stored, and for the receiver's answer. The mailbox also contains
    the ranks' votes on how to execute a run. An object belongs to one rank.
    """

    def __init__(self, words: memoryview, team: Team, control: Control) -> None:
        self._words = words
        self.team = team
        self._size = len(team)
        self._me = team.index(control.rank)
        # Votes are counted from 0 in each mailbox, where zeros mean that a vote is missing. All
        # members agree on this number, because they have just made the mailbox together.
        agreements = control.ledger.entered.get(Calls(WITHIN_CALLS, team), 0)
        self.votes = Calls(f"vote {agreements}", team)
        links = self._size * self._size * _LINK_WORDS
        self.said = CallTokens(control, team, words[links:], self.votes, self._what)
        self._uses: dict[int, list[int]] = {r: [0] * SLOTS for r in team}
        self._next: dict[int, int] = dict.fromkeys(team, 0)

    @staticmethod
    def nbytes(size: int) -> int:
        """Returns the size in bytes of a mailbox for a team of `size` ranks.

        A mailbox is shared memory in which the ranks announce transfers.
        """
        return size * size * _LINK_WORDS * 8 + size * LINE_NBYTES

    def _what(self, number: int, about: object) -> str:
        del about
        return f"run {number} of the programs with peer copies of team {team_text(self.team)}"

    def _to(self, rank: int) -> int:
        return (self._me * self._size + self.team.index(rank)) * _LINK_WORDS

    def _from(self, rank: int) -> int:
        return (self.team.index(rank) * self._size + self._me) * _LINK_WORDS

    def free_slot(self, peer: int) -> int:
        """Returns an entry of the mailbox for a send to the rank `peer`; -1 if all entries are in
        use.

        An entry is free when its last transfer has been answered.
        """
        base, first = self._to(peer), self._next[peer]
        words = self._words
        for k in range(SLOTS):
            slot = (first + k) % SLOTS
            if words[base + slot] == words[base + SLOTS + slot] & ~_MISFIT:
                return slot
        return -1

    def uses(self, peer: int, slot: int) -> int:
        """Returns how many sends to `peer` have used the entry `slot` of the mailbox so far.

        The mailbox is shared memory in which the ranks announce transfers. On GPUs, ranks also
        signal each other by flags in GPU memory. The number that this method returns is then the
        value of the flags of the entry's last transfer.
        """
        return self._uses[peer][slot]

    def next_use(self, peer: int, slot: int) -> int:
        """Counts one more send to `peer` in the entry `slot` of the mailbox; returns the new
        count.
        """
        uses = self._uses[peer]
        uses[slot] += 1
        return uses[slot]

    def post(
        self,
        peer: int,
        slot: int,
        tag: int,
        tensor: torch.Tensor,
        name: tuple[int, ...],
        at: int,
        use: int,
    ) -> Sent:
        """Writes to the mailbox where the data of a send is stored, for the rank `peer` to read.

        - `slot`: the entry of the mailbox.
        - `tag`: the number under which the receiver finds the entry.
        - `name`, `at`: the name of the memory that contains `tensor`, and the offset in bytes.
        - `use`: how many transfers have used the entry, including this one.
        """
        self._next[peer] = slot + 1
        words, base = self._words, self._to(peer)
        dtype = zlib.crc32(str(tensor.dtype).encode())
        first = base + 2 * SLOTS + slot * _RECORD_WORDS
        for k, word in enumerate((tensor.numel(), dtype, at, use, *name)):
            words[first + k] = word
        # The tag is written last: a reader that finds it finds the whole record.
        words[base + slot] = tag
        return Sent(peer, slot, use, tag, tensor)

    def find(self, peer: int, tag: int) -> Record | None:
        """Returns the location of the data of transfer number `tag` from the rank `peer`.

        Returns None if that rank has not yet announced the transfer in the mailbox.
        """
        base = self._from(peer)
        tags = self._words[base : base + SLOTS].tolist()
        if tag not in tags:
            return None
        slot = tags.index(tag)
        first = base + 2 * SLOTS + slot * _RECORD_WORDS
        elements, dtype, at, use, *name = self._words[first : first + _RECORD_WORDS].tolist()
        return Record(slot, elements, _DTYPES[dtype], at, use, tuple(name))

    def answer(self, peer: int, slot: int, tag: int, *, fits: bool = True) -> None:
        """Writes into the mailbox that data of the rank `peer` has been copied, or does not fit.

        The mailbox is memory that the ranks share. `slot` is the entry in which the sender
        announced the data, and `tag` the number of the transfer. `fits` is False if dtype or size
        differ on the two ranks.
        """
        self._words[self._from(peer) + SLOTS + slot] = tag if fits else tag | _MISFIT

    def unanswered(self) -> list[tuple[int, int]]:
        """Returns the transfers that this rank has announced and no receiver has answered yet.

        Each is (position, tag). `tag` is the number of the transfer. `position` says where the tag
        is stored in the memory of the mailbox, in 8-byte words.
        """
        found: list[tuple[int, int]] = []
        for rank in self.team:
            base = self._to(rank)
            tags = self._words[base : base + SLOTS].tolist()
            found += [(base + slot, tag) for slot, tag in enumerate(tags) if tag]
        return self.still_unanswered(found)

    def still_unanswered(self, some: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Selects those transfers in `some` that have no answer yet; `some` comes from
        `unanswered`.
        """
        words = self._words
        return [
            (at, tag)
            for at, tag in some
            if words[at] == tag and words[at + SLOTS] & ~_MISFIT != tag
        ]

    def answered(self, sent: Sent) -> bool:
        """Returns whether the receiver has answered the send `sent`, so that its data may be
        overwritten.

        Raises `CommunicationError` if the receiver found that dtype or size differ on the two
        ranks.
        """
        base = self._to(sent.peer) + sent.slot
        if self._words[base] != sent.tag:
            return True  # The slot is used again, which happens only after the answer.
        answer: int = self._words[base + SLOTS]
        if answer == sent.tag | _MISFIT:
            raise CommunicationError(
                f"rank {self.team[self._me]} sends {tensor_text(sent.held)} to rank {sent.peer}, "
                "which receives a tensor of another dtype or size: both must be equal"
            )
        return answer == sent.tag


@dataclass(frozen=True)
class Numbered:
    """A send or receive, with the number (tag) by which sender and receiver match it.

    `count` is the number of the transfer, from 1, among the sends to (or receives from) the same
    rank. It is 0 for transfers of a collective, which are not counted one by one.
    """

    transfer: Transfer
    tag: int
    count: int = 0


class PeerBackend(CheckedBackend):
    """The part of the peer copy backends that does not depend on the device.

    A peer copy is one in which the receiver reads the sender's memory. The class numbers the
    transfers, so that sender and receiver can match them, and exchanges the ranks' votes on how to
    execute a run. It keeps a mailbox for each team: shared memory in which the ranks announce
    transfers.
    """

    name = "cuda"
    # 16-bit floats are added in float32 and rounded once (`p2p_collectives`).
    stages_half = False
    in_place_parts = frozenset({ALLGATHER})

    def __init__(self, control: Control) -> None:
        super().__init__(control.rank, control.size, control.ledger)
        self.control = control
        self._mailboxes: dict[Team, Mailbox] = {}
        # The mailbox of the team that voted last: of all ranks of the program that runs.
        self._voting: Mailbox | None = None
        # The run that this rank is in, its part of the tags, and the number of calls started in it.
        self._run: tuple[Team, int] = (), 0
        self._first_tag = 0
        self._started: dict[object, int] = {}
        control.on_lost.append(self._forget)

    @abstractmethod
    def empty(self, nbytes: int) -> torch.Tensor:
        """Allocates memory that other ranks can map, as a uint8 tensor; freed when it has no
        users.
        """

    def lasting(self, nbytes: int) -> torch.Tensor:
        """Allocates memory that other ranks can map, for a buffer that a program keeps for many
        runs.

        This base class calls `empty`.
        """
        return self.empty(nbytes)

    def shard(self, nbytes: int) -> torch.Tensor:
        """Allocates memory for one rank's part (shard) of a tensor, which other ranks can map.

        `side_by_side` can show the shards of a team as one tensor. This base class calls `empty`.
        """
        return self.empty(nbytes)

    @abstractmethod
    def release(self) -> None:
        """Records that a host program was deleted, so that `tidy` frees its memory."""

    @abstractmethod
    def tidy(self) -> None:
        """Frees memory that has no user; called at the beginning of a run of a host program."""

    @abstractmethod
    def name_of(self, tensor: torch.Tensor) -> tuple[tuple[int, ...], int] | None:
        """Returns the name by which other ranks map a tensor's memory, and the offset of the tensor
        in this memory.

        The offset is in bytes. Returns None if other ranks cannot map the memory.
        """

    @abstractmethod
    def side_by_side(self, tensor: torch.Tensor, team: Team, what: str) -> torch.Tensor:
        """Maps the shards of all ranks of a team as one tensor, in team order, without a copy.

        A shard is the part of a tensor that one rank stores. `what` names the operation in error
        messages.
        """

    def rendezvous(self, team: Team, what: str) -> None:
        """Blocks until all ranks of a team have called the method with the same description
        `what`.
        """
        await_members(self.control, team, what)

    @abstractmethod
    def _carry_out(
        self, mailbox: Mailbox, steps: Iterable[list[Numbered]], call: CollectiveCall | Exchange
    ) -> Work:
        """Starts the sends and receives of one communication, `call`.

        `steps` are lists of transfers. The transfers of a list begin when those of the previous
        list have ended. `mailbox` is the memory in which the ranks announce them. `call` is needed
        for error messages.
        """

    # ------------------------------------------------------------ teams
    def connect(self, team: Team) -> None:
        """Prepares a team for peer copies, in which a receiver reads the sender's memory.

        The first call for a team exchanges messages, so all ranks of the team must make that call.
        """
        self.mailbox(team)

    def mailbox(self, team: Team) -> Mailbox:
        """Returns the mailbox of a team: shared memory in which its ranks announce transfers.

        The first call creates the mailbox, so all ranks of the team must make that call. Raises
        `UnsupportedError` if the ranks do not share a host.
        """
        found = self._mailboxes.get(team)
        if found is None:
            words = self.control.page(Mailbox.nbytes(len(team)), team)
            if words is None:
                raise UnsupportedError(
                    f"peer copies: ranks {team_text(team)} cannot map each other's memory, because "
                    "they run on several hosts or in separate containers; use NCCL instead"
                )
            found = Mailbox(words, team, self.control)
            self._connected(found)
            self._mailboxes[team] = found
        return found

    def _connected(self, mailbox: Mailbox) -> None:
        """Prepares a team that has a new mailbox: shared memory in which its ranks announce
        transfers.

        A subclass may allocate and map more memory for the team. All ranks of the team make the
        call. This base class does nothing.
        """

    def _forget(self, key: Calls) -> None:
        """Drops the mailbox of a team after one of its calls has failed, and all captured CUDA
        graphs.

        A mailbox is shared memory in which the ranks announce transfers. After the failure, the
        ranks count their calls differently, so old announcements could match later calls. `key`
        names the sequence of calls that failed.
        """
        self._give_up([t for t in self._mailboxes if t == key.team])

    def _give_up(self, teams: Sequence[Team]) -> None:
        for team in teams:
            self.control.ledger.entered.pop(self._mailboxes.pop(team).votes, None)
        if teams:
            self.make_void()

    # ------------------------------------------------------------ votes
    def vote(self, team: Team, kind: int) -> tuple[int, ...]:
        """Exchanges the votes of a team on how to execute a run; returns the votes of all its
        ranks, in team order.

        A run is executed by its recorded steps, or by launching a CUDA graph. `kind` is this rank's
        vote: STEP_BY_STEP, NOT_CAPTURED (this rank could not capture a graph), or the number of a
        graph. The votes are exchanged through shared memory. All ranks of the team must make the
        call. Raises the errors of `CallTokens.tell`.
        """
        mailbox = self._voting = self.mailbox(team)
        return mailbox.said.tell(kind, self.control.ledger.enter(mailbox.votes))

    def start_over(self, team: Team) -> None:
        """Cleans up after a capture of a CUDA graph that was given up: creates a new mailbox for
        the team.

        In the mailbox, ranks announce transfers; announcements of the unfinished capture could
        match later transfers. All ranks of the team must make the call.
        """
        self.control.begin_run(team)
        # Teams that are part of this one have mailboxes, too, with records that will not be
        # answered.
        self._give_up([t for t in self._mailboxes if {*t} <= {*team}])
        self.mailbox(team)

    def take_back(self, team: Team) -> None:
        """Makes the other ranks of a team drop the CUDA graphs that the team captured together.

        Called when this rank failed in a run that all ranks should have executed by launching
        graphs. Ranks compare how many calls each has made. This rank counts one call that the
        others have not made; they notice the difference in the next comparison, and drop their
        graphs.
        """
        # The number of votes must not be decreased: old tokens with the same number would be taken
        # for new ones.
        self.control.ledger.enter(Calls("failed repetition", team))

    # ------------------------------------------------------------ transfers
    def _number(self, key: object) -> int:
        """Returns the number of the next communication in this run, by which ranks match transfers.

        Communications are counted separately for each `key`. The tags of transfers also contain the
        number of the run. So transfers of a failed run match none of a later run. Ranks may have
        left the failed run at different communications, but they agree on the number of the next
        run.
        """
        run = self.control.run
        if run is not self._run:
            self._run, self._started = run, {}
            team = zlib.crc32(team_text(run[0]).encode()) % _TEAMS
            self._first_tag = team << _TEAM_SHIFT | (run[1] % _RUNS) << _RUN_SHIFT
        number = self._started[key] = self._started.get(key, 0) + 1
        return number

    def _start(self, call: CollectiveCall) -> Work:
        mailbox = self.mailbox(call.team)
        number = self._number(call.team) % (_TRANSFERS // _PARTS)
        first = _COLLECTIVE | self._first_tag | number << _CALL_SHIFT
        return self._carry_out(mailbox, self._numbered(call, first), call)

    def _numbered(self, call: CollectiveCall, first: int) -> Iterable[list[Numbered]]:
        counts: dict[tuple[str, int], int] = {}

        def number(t: Transfer) -> Numbered:
            k = counts[t.kind, t.peer] = counts.get((t.kind, t.peer), -1) + 1
            return Numbered(t, first + k % _PARTS)

        for step in steps_of(call):
            yield [number(t) for t in step]

    def _start_batch(self, batch: Exchange) -> Work:
        mailbox = self.mailbox(batch.team)
        numbers = [self._number((t.kind, t.peer, batch.team)) for t in batch.transfers]
        step = [
            Numbered(t, self._first_tag | number % _TRANSFERS, seq + 1)
            for t, number, seq in zip(batch.transfers, numbers, batch.sequence, strict=True)
        ]
        return self._carry_out(mailbox, [step], batch)

    def _post(self, mailbox: Mailbox, one: Numbered, call: CollectiveCall | Exchange) -> Sent:
        """Announces the send `one` of the communication `call` in the mailbox, the shared memory
        that the receiver reads. Returns the announced send.

        If the receiver cannot map the memory of the data, the data is first copied to other memory.
        """
        tensor, peer = one.transfer.tensor.detach(), one.transfer.peer
        place = self.name_of(tensor) if tensor.numel() else ((0,) * NAME_WORDS, 0)
        if place is None:
            staged = self.empty(tensor.numel() * tensor.element_size())
            staged = staged.view(tensor.dtype).view(tensor.shape)
            tensor = staged.copy_(tensor)
            place = self.name_of(tensor)
            assert place is not None, "memory made for peers has a name"
        slot = mailbox.free_slot(peer)
        if slot < 0:
            self._poll(lambda: mailbox.free_slot(peer) >= 0, call, (one,))
            slot = mailbox.free_slot(peer)
        sent = mailbox.post(peer, slot, one.tag, tensor, *place, self._use(mailbox, peer, slot))
        self.control.wake((peer,))
        return sent

    def _use(self, mailbox: Mailbox, peer: int, slot: int) -> int:
        """Counts one more send to `peer` in an entry (slot) of the mailbox; returns the new
        count.
        """
        return mailbox.next_use(peer, slot)

    def _check_fits(self, mailbox: Mailbox, one: Numbered, record: Record) -> None:
        """Raises `CommunicationError` if dtype or size differ between the receive `one` and the
        sender's data.

        `record` describes the sender's data. Also writes an answer to the mailbox that makes the
        sender raise an error.
        """
        tensor, peer = one.transfer.tensor, one.transfer.peer
        if (record.dtype, record.elements) == (tensor.dtype, tensor.numel()):
            return
        mailbox.answer(peer, record.slot, one.tag, fits=False)
        self.control.wake((peer,))
        kind = str(record.dtype).removeprefix("torch.")
        raise CommunicationError(
            f"rank {peer} sends {counted(record.elements, 'element')} of {kind} to rank "
            f"{self.rank}, which receives {tensor_text(tensor)}: dtype and number of elements must "
            "be equal"
        )

    def _poll(
        self,
        done: Callable[[], bool],
        call: CollectiveCall | Exchange,
        open_ones: Sequence[Numbered],
    ) -> None:
        """Waits until `done()` returns True, with a deadline, as a part of the communication
        `call`.

        `open_ones` are the transfers for which another rank must still act. Raises an error if one
        of these ranks has failed or left the job.
        """

        def needs() -> list[Need]:
            if isinstance(call, CollectiveCall):
                return call.needs()
            return [
                Need(
                    o.transfer.peer,
                    transfer_key(o.transfer, self.rank, call.team, mirrored=True),
                    o.count,
                )
                for o in open_ones
            ]

        self.control.poll_until(done, what=call.describe, needs=needs)
