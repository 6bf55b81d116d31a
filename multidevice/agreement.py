"""The one entrance to running something on several ranks: they agree first, by a word per call.

Each call of a team has a sequence number. A rank publishes one word, made of the number and of the
*class* of what it is about to run, in a page that the team shares, and waits for the words of the
others. Equal words mean: go. A class that this rank has not yet seen agreed, an error here, or any
difference leads all members to an exchange over the control channel, after which either all go or
all raise. Where the team shares no page (several hosts), the words travel in a message per call.
"""

from __future__ import annotations

import hashlib
import json
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from fuser.errors import (
    CommunicationError,
    DeadlockError,
    InputError,
    PeerError,
    ProgramMismatchError,
    UnsupportedError,
)
from fuser.locks import make_reentrant_lock
from multidevice.backends.protocol import Team
from multidevice.page import LINE_NBYTES
from multidevice.waiting import team_text
from multidevice.words import CLASSES, Words, word_of

if TYPE_CHECKING:
    from fuser.ir.core import Op
    from multidevice.communicator import Communicator
    from multidevice.control import Control

T = TypeVar("T")
# The class that says "exchange first"; neither it nor GAVE_UP is a digest.
_EXCHANGE = 0
_KNOWN_LIMIT = 4096
# What counts as data in a ledger: calls of these streams must be equally many on all members.
_NOT_DATA = ("control ", "call ", "send ", "recv ")


@dataclass(frozen=True)
class Claim:
    """What a rank is about to run, in terms that are equal on all ranks that run the same.

    `parts` are texts: first the program as the user wrote it, then options, what is communicated,
    sizes; `ops` are those of the program. `inputs` names each tensor input with its local extents,
    `numbers` the inputs whose values may change from call to call. `where` is the user's line of
    what is communicated.
    """

    parts: tuple[str, ...]
    inputs: tuple[tuple[str, tuple[int, ...]], ...] = ()
    numbers: tuple[str, ...] = ()
    where: str = ""
    ops: Sequence[Op] = field(default=(), compare=False)

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that tell claims apart."""
        found = hashlib.blake2b(digest_size=16)
        for part in (*self.parts, repr([sizes for _, sizes in self.inputs])):
            found.update(part.encode())
            found.update(b"\0")
        return found.digest()

    @cached_property
    def definition(self) -> str:
        """What tells definitions apart, whatever they are called on."""
        return hashlib.blake2b(self.parts[0].encode(), digest_size=16).hexdigest()

    def definition_text(self) -> str:
        """Return how a message calls the definition: `3 ops, a.py:7 to a.py:9`."""
        lines = [*dict.fromkeys(op.where for op in self.ops if op.where)]
        span = " to ".join(lines[:1] + lines[1:][-1:])
        return f"{len(self.ops)} ops" + (f", {span}" if span else "")

    @cached_property
    def kind(self) -> int:
        """The class of this claim in a word; never one of the reserved ones."""
        return int.from_bytes(self.digest[:6], "little") | 2


# What `prepare` returns: the claim, the numbers that may change from call to call, and how to run.
Prepared = tuple[Claim, tuple[object, ...], Callable[[], T]]


def run_agreed(communicator: Communicator, devices: Team, prepare: Callable[[], Prepared[T]]) -> T:
    """Prepares on every rank of `devices`, then runs once they agree that they do the same.

    Whatever `prepare` raises on one rank, every rank raises before anything is communicated.

    A rank's calls have an order, which the other ranks' calls must have, too. Two threads of one
    rank have none: who finds another thread in a call raises, on all ranks, and so does that call.

    Raises:
        UnsupportedError: another thread of this rank called meanwhile.
        Exception: what `prepare` or the run raised here.
        PeerError: another rank raised while it prepared; names rank, type and message.
        InputError: the local extents, or the numbers, that the ranks were given differ.
        ProgramMismatchError: they run different programs; shows the first differing line.
        DeadlockError: ranks wait for each other in calls of different teams.
    """
    channel = communicator.channel(devices)
    return prepare()[2]() if channel is None else channel.run(prepare)


class Turns:
    """Whose turn it is among the threads of a rank, and who came while another had it."""

    def __init__(self) -> None:
        self.lock = make_reentrant_lock()
        self.latecomer = ""


def _threads_error(other: str = "") -> UnsupportedError:
    mine = threading.current_thread().name
    who = f"{mine} and {other}" if other else f"{mine} and another one"
    return UnsupportedError(
        f"two threads of one rank, {who}, called programs with a mesh at the same time: the ranks "
        "could pair other calls with one another; call from one thread at a time"
    )


class Channel:
    """The calls of one team, seen from one of its ranks."""

    def __init__(self, control: Control, team: Team, turns: Turns) -> None:
        self._control = control
        self._team = team
        self._turns = turns
        self._key = f"call {team_text(team)}"
        self._is_doubtful = False
        self._known: set[int] = set()
        # Definition -> the call in which the members first agreed on it; and the present call.
        self._ran: dict[str, int] = {}
        self._number = 0
        page = control.page(len(team) * LINE_NBYTES, team)
        self._words = None if page is None else Words(control, team, page, self._key, self._what)

    @property
    def shares_memory(self) -> bool:
        """Whether all members run on this host."""
        return self._words is not None

    def run(self, prepare: Callable[[], Prepared[T]]) -> T:
        """Prepares and runs once the members agree; see `run_agreed`."""
        turns = self._turns
        if not turns.lock.acquire(False):
            turns.latecomer = threading.current_thread().name
            with turns.lock:
                self.refuse(_threads_error())
        try:
            try:
                claim, numbers, run = prepare()
            except BaseException as error:
                self.refuse(error)
            self.enter(claim, numbers)
            try:
                result = run()
                if turns.latecomer:
                    raise _threads_error(turns.latecomer)
                return result
            except BaseException as error:
                turns.latecomer = ""
                self.doubt(error)
                raise
        finally:
            turns.lock.release()

    def enter(self, claim: Claim, numbers: tuple[object, ...]) -> None:
        """Returns when all members run this; see `run_agreed` for what it raises."""
        kind = claim.kind
        is_new = self._is_doubtful or kind not in self._known
        if is_new:
            kind = _EXCHANGE
        elif numbers:
            kind = _with_numbers(kind, numbers)
        say = self._all_say_after_failure if self._is_doubtful else self._all_say
        if say(kind, claim) and not is_new:
            return
        self._exchange(claim, numbers, None)
        if len(self._known) >= _KNOWN_LIMIT:
            self._known.clear()
            self._ran.clear()
        self._known.add(claim.kind)
        self._ran.setdefault(claim.definition, self._number)

    def doubt(self, error: BaseException) -> None:
        """Notes that a run failed here, perhaps before it had communicated what the others did."""
        self._is_doubtful = True
        if not isinstance(error, CommunicationError):
            self._control.trouble = f", after {_error_text(error)}"

    def refuse(self, error: BaseException) -> NoReturn:
        """Tells the others of an error of this rank, and raises it."""
        try:
            say = self._all_say_after_failure if self._is_doubtful else self._all_say
            say(_EXCHANGE, None)
            self._exchange(None, (), error)
        except BaseException as found:
            if found is error:
                raise
            raise error from found
        raise error

    def _all_say_after_failure(self, kind: int, claim: Claim | None) -> bool:
        """Does what `_all_say` does.

        Ranks that are still in a run that failed here learn of it by a deadlock with this wait. It
        ends their run, not this call: it would be paired with a later one of theirs.
        """
        for _ in self._team:
            try:
                return self._all_say(kind, claim)
            except DeadlockError as error:
                if not self._are_in_runs(error):
                    raise
        return self._all_say(kind, claim)

    def _are_in_runs(self, error: DeadlockError) -> bool:
        """Whether all ranks of a deadlock wait inside of runs, or for this team's next call."""
        keys = {key for found in error.keys.values() for key in found}
        return not any(k.startswith(("control ", "call ")) for k in keys - {self._key})

    def _all_say(self, kind: int, claim: Claim | None) -> bool:
        """Publishes this rank's word for the next call, and returns whether all are equal."""
        self._number = self._control.ledger.enter(self._key)
        if self._words is None:
            return self._by_message(word_of(kind, self._number))
        return self._words.say(kind, self._number, claim)

    def _by_message(self, word: int) -> bool:
        try:
            self._control.agree(None, digest=word.to_bytes(8, "little"), team=self._team)
        except ProgramMismatchError:
            return False
        return True

    def _what(self, number: int, claim: Claim | None = None) -> str:
        line = f", for {claim.where}" if claim is not None and claim.where else ""
        return f"call {number} of the programs of team {team_text(self._team)}{line}"

    # ------------------------------------------------------------ the exchange
    def _exchange(
        self, claim: Claim | None, numbers: tuple[object, ...], error: BaseException | None
    ) -> None:
        entered = self._control.ledger.entered
        statement = {
            "error": None if error is None else _error_text(error),
            "digest": "" if claim is None else claim.digest.hex(),
            "definition": ("", "")
            if claim is None
            else (claim.definition, claim.definition_text()),
            "inputs": () if claim is None else claim.inputs,
            "numbers": []
            if claim is None
            else [*zip(claim.numbers, map(repr, numbers), strict=True)],
            "entered": {k: n for k, n in entered.items() if not k.startswith(_NOT_DATA)},
        }
        payload = json.dumps(statement).encode()
        told = self._control.exchange(payload, team=self._team)
        statements: list[dict[str, Any]] = [json.loads(one) for one in told]
        out_of_step = self._realign([s["entered"] for s in statements])
        self._is_doubtful = False
        self._control.trouble = ""
        self._check_errors([s["error"] for s in statements], error)
        if out_of_step:
            raise CommunicationError(
                f"the ranks of team {team_text(self._team)} were out of step after an earlier "
                f"error: {out_of_step}; the next call starts afresh"
            )
        assert claim is not None, "a rank without a claim has an error"
        self._check_definitions(
            [(d, text) for d, text in (s["definition"] for s in statements)], claim
        )
        # All ranks pass equal extents today; from these the global ones would follow if not.
        self._check_inputs([s["inputs"] for s in statements])
        self._check_numbers([s["numbers"] for s in statements])
        if len({s["digest"] for s in statements}) > 1:
            self._control.compare_texts(
                "\n".join(claim.parts), team=self._team, where_of=lambda line: claim.where
            )

    def _check_errors(self, errors: Sequence[str | None], mine: BaseException | None) -> None:
        failed = [(r, e) for r, e in zip(self._team, errors, strict=True) if e is not None]
        if mine is not None:
            raise mine
        if failed:
            rank, text = failed[0]
            rest = [r for r, _ in failed[1:]]
            tail = f" (and ranks {team_text(rest)} failed too)" if rest else ""
            raise PeerError(f"rank {rank} failed: {text}{tail}")

    def _realign(self, counts: Sequence[dict[str, int]]) -> str:
        """Makes the members count equally many collectives; returns where they did not."""
        text = ""
        for key in sorted({key for count in counts for key in count}):
            ranks = [
                (rank, count.get(key, 0))
                for rank, count in zip(self._team, counts, strict=True)
                if str(rank) in key.partition("(")[2].rstrip(")").split()
            ]
            most = max((n for _, n in ranks), default=0)
            if any(n != most for _, n in ranks):
                text = text or ", ".join(f"rank {r} has entered {n} of {key}" for r, n in ranks)
                if any(rank == self._control.rank for rank, _ in ranks):
                    self._control.ledger.entered[key] = most
                    self._control.lose(key)
        return text

    def _check_definitions(self, found: Sequence[tuple[str, str]], claim: Claim) -> None:
        """Raises `ProgramMismatchError` with the first op in which the definitions differ."""
        if len({definition for definition, _ in found}) == 1:
            return
        from fuser.ir.text import op_text

        texts = [
            f"{text}, first run in call {self._ran[d]}" if d in self._ran else text
            for d, text in found
        ]
        known = all(d in self._ran for d, _ in found)
        why = ", in calls that were left out, added or swapped on some ranks" if known else ""
        head = (
            f"in {self._what(self._number)} the ranks run different definitions{why}:\n"
            + "\n".join(f"  ranks {ranks}: {text}" for text, ranks in _grouped(self._team, texts))
        )
        ops = {" ".join(op_text(op).split()): op.where for op in claim.ops}
        for part, text in (("op", "\n".join(ops)), ("line", claim.parts[0])):
            self._control.compare_texts(
                text,
                team=self._team,
                where_of=lambda line: ops.get(line) or claim.where,
                head=f"{head}\nwhich",
                part=part,
            )

    def _check_inputs(self, inputs: Sequence[list[Any]]) -> None:
        for position, (name, sizes) in enumerate(inputs[0]):
            given = [one[position][1] if position < len(one) else None for one in inputs]
            for axis, extent in enumerate(sizes):
                found = [s[axis] if s is not None and axis < len(s) else None for s in given]
                if any(e is not None and e != extent for e in found):
                    raise InputError(
                        f"{name} has extent {_by_rank(self._team, found)} on axis {axis}, but the "
                        f"shards of one tensor are equal (in {self._what(self._number)})"
                    )

    def _check_numbers(self, numbers: Sequence[list[tuple[str, str]]]) -> None:
        for pairs in zip(*numbers, strict=False):
            if len({value for _, value in pairs}) > 1:
                name, found = pairs[0][0], _by_rank(self._team, [value for _, value in pairs])
                raise InputError(
                    f"{name} is {found}, but the ranks run one program on one set of numbers (in "
                    f"{self._what(self._number)})"
                )


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _with_numbers(kind: int, numbers: tuple[object, ...]) -> int:
    bits = zlib.crc32(repr(numbers).encode())
    return (kind ^ bits << 8) & CLASSES | 2


def _by_rank(team: Team, values: Sequence[object]) -> str:
    """Returns `8 on ranks (0 1) and 9 on ranks (2)`."""
    return " and ".join(f"{value} on ranks {ranks}" for value, ranks in _grouped(team, values))


def _grouped(team: Team, values: Sequence[object]) -> list[tuple[object, str]]:
    groups: dict[object, list[int]] = {}
    for rank, value in zip(team, values, strict=True):
        groups.setdefault(value, []).append(rank)
    return [(value, team_text(ranks)) for value, ranks in groups.items()]
