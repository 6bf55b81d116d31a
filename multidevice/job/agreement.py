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
import re
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from fuser.support.errors import (
    CommunicationError,
    CommunicationTimeout,
    DeadlockError,
    FuserError,
    InputError,
    PeerError,
    ProgramMismatchError,
    UnsupportedError,
)
from fuser.support.locks import make_reentrant_lock
from multidevice.coordination.bounded_wait import (
    RECV,
    SEND,
    Calls,
    Team,
    counts_from,
    rows_of,
    team_text,
)
from multidevice.coordination.control_channel import (
    CLAIMS,
    CLASSES,
    OF_USERS,
    WITHIN_CALLS,
    Control,
    Words,
    word_of,
)
from multidevice.coordination.deadlock_detector import CALL, LEFT, left_key
from multidevice.coordination.shared_page import LINE_NBYTES

if TYPE_CHECKING:
    from fuser.ir.op import Op

T = TypeVar("T")
# The class that says "exchange first"; neither it nor GAVE_UP is a digest.
_EXCHANGE = 0
_KNOWN_LIMIT = 4096
# How many exchanges there are of one call at most.
_MAX_EXCHANGES = 16
# The kinds of the streams in which ranks talk to one another, besides the data of runs.
_AMONG_RANKS = {CLAIMS, WITHIN_CALLS, OF_USERS, CALL}
# In an op's text: the numbers of axes, and where tensors lie.
_NUMBERS = re.compile(r"\d+(?=\{)|(?<=\d)_(?:g|l|s|sym)(?=_)")


@dataclass(frozen=True)
class Claim:
    """What a rank is about to run, in terms that are equal on all ranks that run the same.

    `parts` are texts: first the program as the user wrote it, then options, what is communicated,
    sizes; `ops` are those of the program. `inputs` names each tensor input with its local extents,
    `numbers` the inputs whose values may change from call to call. `where` is the user's line of
    what is communicated.

    The first `fixed` parts do not depend on the inputs. `traits` has what else of each input, by a
    word for it, the other parts may depend on: ranks may differ there, where their parts do not.
    `whole` names the inputs that no device axis cuts.
    """

    parts: tuple[str, ...]
    inputs: tuple[tuple[str, tuple[int, ...]], ...] = ()
    numbers: tuple[str, ...] = ()
    where: str = ""
    ops: Sequence[Op] = field(default=(), compare=False)
    fixed: int = 1
    traits: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = field(default=(), compare=False)
    whole: Sequence[str] = field(default=(), compare=False)

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
        """Returns how a message calls the definition: `3 ops, a.py:7 to a.py:9`."""
        lines = [*dict.fromkeys(op.where for op in self.ops if op.where)]
        span = " to ".join(lines[:1] + lines[1:][-1:])
        return f"{len(self.ops)} ops" + (f", {span}" if span else "")

    @cached_property
    def kind(self) -> int:
        """The class of this claim in a word; never one of the reserved ones."""
        return int.from_bytes(self.digest[:6], "little") | 2


# What `prepare` returns: the claim, the numbers that may change from call to call, and how to run.
Prepared = tuple[Claim, tuple[object, ...], Callable[[], T]]


class Turns:
    """Whose turn it is among the threads of a rank, and who came while another had it."""

    def __init__(self) -> None:
        self.lock = make_reentrant_lock()
        # The last who came in the present call: it is refused itself once its turn comes.
        self.latecomer = ""

    def take(self) -> bool:
        """Returns once this thread has the turn; whether another one had it before."""
        if self.lock.acquire(False):
            return False
        self.latecomer = threading.current_thread().name
        self.lock.acquire()
        return True

    def give_back(self) -> None:
        """Ends this thread's turn."""
        self.latecomer = ""
        self.lock.release()


def _threads_error(who: str, where: str = "") -> UnsupportedError:
    return UnsupportedError(
        f"two threads of one rank, {who}, called programs with a mesh at the same time{where}: the "
        "ranks could pair other calls with one another; call from one thread at a time"
    )


class Channel:
    """The calls of one team, seen from one of its ranks."""

    def __init__(self, control: Control, team: Team, turns: Turns) -> None:
        # Nothing is communicated yet: threads may come here at once.
        self._control = control
        self._team = team
        self._turns = turns
        self._key = Calls(CALL, team)
        # Streams of what happens inside of calls.
        self._claims = Calls(CLAIMS, team)
        self._keys = {self._key, self._claims, Calls(WITHIN_CALLS, team)}
        # Whether this rank's last call failed in a way of which the others may not know.
        self._is_doubtful = False
        # Whether all members have heard of the error that ends the present call.
        self._is_agreed = False
        # How many calls this rank has made: those of one place belong together.
        self._calls = 0
        # The word of the board that says how many, if there is one.
        self._posted = control.board.calls if control.board is not None else [0]
        self._known: set[int] = set()
        # Definition -> the call in which the members first agreed on it; and the present call.
        self._ran: dict[str, int] = {}
        self._number = 0
        # The threads of this rank whose calls at once end the present call.
        self._threads = ""
        self._words: Words | None = None
        self._is_connected = False

    @property
    def shares_memory(self) -> bool:
        """Whether all members run on this host; collective over the team at first use."""
        with self._turns.lock:
            self._connect()
        return self._words is not None

    def _connect(self) -> None:
        """Makes the page of the team's words at first use, if it can share one."""
        if self._is_connected:
            return
        page = self._control.page(len(self._team) * LINE_NBYTES, self._team)
        if page is not None:
            self._words = Words(self._control, self._team, page, self._key, self._what)
        self._is_connected = True

    def run(self, prepare: Callable[[], Prepared[T]]) -> T:
        """Prepares and runs once the members agree; see `run_agreed`."""
        turns = self._turns
        is_late = turns.take()
        try:
            self._calls += 1
            self._connect()
            if is_late:
                self._refuse_threads("another one")
            try:
                claim, numbers, run = prepare()
            except BaseException as error:
                self.refuse(error)
            if turns.latecomer:
                self._refuse_threads(turns.latecomer)
            try:
                self.enter(claim, numbers)
                result = run()
                if turns.latecomer:
                    raise _threads_error(_pair(turns.latecomer))
                return result
            except BaseException as error:
                self.doubt(error)
                raise
        finally:
            turns.give_back()

    def _refuse_threads(self, other: str) -> NoReturn:
        """Refuses a call of this thread, in which another one has come, on all ranks."""
        self._threads = _pair(other)
        try:
            self.refuse(_threads_error(self._threads))
        finally:
            self._threads = ""

    def enter(self, claim: Claim, numbers: tuple[object, ...]) -> None:
        """Returns when all members run this; see `run_agreed` for what it raises."""
        kind = claim.kind
        if kind in self._known and not self._is_doubtful:
            if numbers:
                kind = _with_numbers(kind, numbers)
            try:
                if self._all_say(kind, claim):
                    return
            except DeadlockError as error:
                self._stay(error)
                self._say_exchange(claim)
        else:
            self._say_exchange(claim)
        while not self._exchange(claim, numbers, None):
            self._say_exchange(claim)
        if len(self._known) >= _KNOWN_LIMIT:
            self._known.clear()
            self._ran.clear()
        self._known.add(claim.kind)
        self._ran.setdefault(claim.definition, self._number)

    def doubt(self, error: BaseException) -> None:
        """Notes that a call failed here, perhaps before it had communicated what the others did."""
        if self._is_agreed:
            self._is_agreed = False
            return
        self._is_doubtful = True
        self._control.ledger.entered[left_key(self._team)] = self._number + 1
        if not isinstance(error, CommunicationError):
            self._control.trouble = f", after {_error_text(error)}"

    def refuse(self, error: BaseException) -> NoReturn:
        """Tells the others of an error of this rank, and raises it."""
        try:
            self._say_exchange(None)
            while not self._exchange(None, (), error):
                self._say_exchange(None)
        except BaseException as found:
            self.doubt(found)
            if found is error:
                raise
            raise error from found
        raise error

    def _say_exchange(self, claim: Claim | None) -> None:
        """Returns when all members are at this call, and know that they are to exchange claims.

        Ranks that are still in a call that failed here learn of it by a deadlock with this wait. It
        ends that call of theirs, not this one: it would be paired with a later one.
        """
        for _ in self._team:
            try:
                self._all_say(_EXCHANGE, claim)
                return
            except DeadlockError as error:
                self._stay(error)
        self._all_say(_EXCHANGE, claim)

    def _stay(self, error: DeadlockError) -> None:
        """Raises a deadlock with this call, unless it is another call that ends by it: after one
        has failed, where all its ranks wait inside of runs or in calls of this team."""
        keys = {key for found in error.keys.values() for key in found} - self._keys
        if not error.is_after_failure or any(kind in _AMONG_RANKS for kind, _, _ in keys):
            raise error
        self._calls += 1

    def _all_say(self, kind: int, claim: Claim | None) -> bool:
        """Publishes this rank's word for the next call, and returns whether all are equal."""
        self._number = self._control.ledger.enter(self._key)
        self._posted[0] = self._number + 1
        try:
            if self._words is None:
                return self._by_message(word_of(kind, self._number))
            return self._words.say(kind, self._number, claim)
        except DeadlockError:
            # It counts as entered everywhere, though others have never made this call.
            self._calls -= 1
            raise

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
    ) -> bool:
        """Tells the others what this rank is about to run, and compares; raises what is wrong.

        Returns False where other ranks are still behind this call, and have heard of it by now.
        """
        # All members are here, so what has ended in their last calls stands on the board: counted
        # after they have compared, it would part them again.
        self._control.hear_of_deadlocks()
        statement = {
            "error": None if error is None else _error_text(error),
            "threads": self._threads,
            "digest": "" if claim is None else claim.digest.hex(),
            "definition": ("", "")
            if claim is None
            else (claim.definition, claim.definition_text()),
            "inputs": () if claim is None else claim.inputs,
            "fixed": [] if claim is None else claim.parts[: claim.fixed][1:],
            "traits": () if claim is None else claim.traits,
            "numbers": []
            if claim is None
            else [*zip(claim.numbers, map(str, numbers), strict=True)],
            "entered": rows_of(counts_of(self._control)),
            "calls": self._calls,
            "doubtful": self._is_doubtful,
        }
        payload = json.dumps(statement).encode()
        # An error may have kept some from an earlier exchange: all agree about the call's number.
        self._control.ledger.entered[self._claims] = _MAX_EXCHANGES * self._number
        told = self._control.exchange(payload, team=self._team, stream=CLAIMS)
        statements: list[dict[str, Any]] = [json.loads(one) for one in told]
        failed = [rank for rank, s in zip(self._team, statements, strict=True) if s["doubtful"]]
        counts = [counts_from(s["entered"]) for s in statements]
        out_of_step = realign(self._control, self._team, counts, has_failed=bool(failed))
        if failed:
            self._control.mend(self._team)
        # Whoever has heard nothing of an error may hold results of a run that never ended.
        if len(failed) == len(self._team):
            out_of_step = ""
        try:
            is_last = self._compare(statements, claim, error, out_of_step)
        except BaseException as found:
            self._is_agreed = found is error or _is_equal_on_all(found)
            if self._is_agreed:
                self._settle()
            if isinstance(found, InputError | ProgramMismatchError) and found is not error:
                # All have one sentence on what they differ in, which the first of them tells.
                found.ranks = tuple(self._team)
            raise
        self._settle()
        return is_last

    def _settle(self) -> None:
        self._is_doubtful = False
        self._control.ledger.entered.pop(left_key(self._team), None)
        self._control.trouble = ""

    def _compare(
        self,
        statements: Sequence[dict[str, Any]],
        claim: Claim | None,
        error: BaseException | None,
        out_of_step: str,
    ) -> bool:
        """Returns whether all ranks are at this call; raises what is wrong with it."""
        calls = [s["calls"] for s in statements]
        if self._calls < max(calls):
            ahead = [r for r, n in zip(self._team, calls, strict=True) if n > self._calls]
            raise error or PeerError(
                f"ranks {team_text(ahead)} gave up the call that meets this one: an error ended it "
                f"(they are in their call {max(calls)} of the programs of team "
                f"{team_text(self._team)}, this rank is in its call {self._calls})"
            )
        if min(calls) < self._calls:
            return False
        self._check_threads([s["threads"] for s in statements], error)
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
        self._check_inputs([s["inputs"] for s in statements], claim.whole)
        self._check_numbers([s["numbers"] for s in statements])
        if len({s["digest"] for s in statements}) > 1:
            is_of_inputs = all(s["fixed"] == statements[0]["fixed"] for s in statements)
            traits = self._differing_traits([s["traits"] for s in statements])
            try:
                self._control.compare_texts(
                    "\n".join(claim.parts),
                    team=self._team,
                    where_of=lambda line: claim.where,
                    stream=CLAIMS,
                )
            except ProgramMismatchError as error:
                if not (traits and is_of_inputs):
                    raise
                what = self._what(self._number)
                raise ProgramMismatchError(
                    f"{'; '.join(traits)}: what the ranks communicate depends on it, so inputs are "
                    f"alike on all of them (in {what})\n{error}"
                ) from None
        return True

    def _differing_traits(self, traits: Sequence[list[Any]]) -> list[str]:
        """Returns in words in which inputs the ranks differ, and in what of them."""
        found: list[str] = []
        for same in zip(*traits, strict=False):
            name = same[0][0]
            for k, (word, _) in enumerate(same[0][1]):
                values = [given[k][1] if k < len(given) else "none" for _, given in same]
                if len(set(values)) > 1:
                    found.append(f"{name} has {word} {_by_rank(self._team, values)}")
        return found

    def _check_threads(self, threads: Sequence[str], mine: BaseException | None) -> None:
        """Raises on all ranks alike where some have refused calls of several threads at once."""
        found = [(r, who) for r, who in zip(self._team, threads, strict=True) if who]
        if not found:
            return
        others = [f"{who} on rank {r}" for r, who in found if r != self._control.rank]
        if self._threads and isinstance(mine, UnsupportedError):
            also = f" (and {', '.join(others)})" if others else ""
            mine.args = _threads_error(self._threads, also).args
            raise mine
        if mine is None:
            caller = threading.current_thread().name
            error = _threads_error(", ".join(others), f", in the call that meets this of {caller}")
            raise error

    def _check_errors(self, errors: Sequence[str | None], mine: BaseException | None) -> None:
        failed = [(r, e) for r, e in zip(self._team, errors, strict=True) if e is not None]
        if mine is not None:
            if isinstance(mine, FuserError):
                mine.ranks = tuple(r for r, e in failed if e == _error_text(mine))
            raise mine
        if failed:
            rank, text = failed[0]
            rest = [r for r, _ in failed[1:]]
            tail = f" (and ranks {team_text(rest)} failed too)" if rest else ""
            error = PeerError(f"rank {rank} failed: {text}{tail}")
            error.ranks = tuple(r for r, e in failed if e == text)
            raise error

    def _check_definitions(self, found: Sequence[tuple[str, str]], claim: Claim) -> None:
        """Raises `ProgramMismatchError` with the first op in which the definitions differ."""
        if len({definition for definition, _ in found}) == 1:
            return
        from fuser.ir.op import op_text

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
        # An annotation after an op that only one rank has differs in its axes' numbers, and so do
        # ops before both: the op itself is found without them.
        alike = {_NUMBERS.sub("", text): where for text, where in ops.items()}
        where = {**alike, **ops}
        for part, text in (
            ("op", "\n".join(alike)),
            ("op", "\n".join(ops)),
            ("line", claim.parts[0]),
        ):
            self._control.compare_texts(
                text,
                team=self._team,
                where_of=lambda line: where.get(line) or claim.where,
                head=f"{head}\nwhich",
                part=part,
                stream=CLAIMS,
            )

    def _check_inputs(self, inputs: Sequence[list[Any]], whole: Sequence[str]) -> None:
        for position, (name, sizes) in enumerate(inputs[0]):
            given = [one[position][1] if position < len(one) else None for one in inputs]
            for axis, extent in enumerate(sizes):
                found = [s[axis] if s is not None and axis < len(s) else None for s in given]
                if any(e is not None and e != extent for e in found):
                    rule = (
                        "replicated inputs, those that no device axis cuts, are equal on all "
                        "ranks: pass the whole tensor everywhere, or cut it (fuser.shard)"
                        if name in whole
                        else "the shards of one tensor are equal"
                    )
                    raise InputError(
                        f"{name} has extent {_by_rank(self._team, found)} on axis {axis}, but "
                        f"{rule} (in {self._what(self._number)})"
                    )

    def _check_numbers(self, numbers: Sequence[list[tuple[str, str]]]) -> None:
        for pairs in zip(*numbers, strict=False):
            if len({value for _, value in pairs}) > 1:
                name, found = pairs[0][0], _by_rank(self._team, [value for _, value in pairs])
                raise InputError(
                    f"{name} is {found}, but the ranks run one program on one set of numbers (in "
                    f"{self._what(self._number)})"
                )


def _is_equal_on_all(error: BaseException) -> bool:
    """Whether an error of an exchange is what all members raise, not what ended it for this one."""
    return isinstance(error, FuserError) and not isinstance(
        error, (CommunicationTimeout, DeadlockError)
    )


def _pair(other: str) -> str:
    return f"{threading.current_thread().name} and {other}"


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


# ----------------------------------------------------------------------
# Ranks that an error has parted, brought back into step.
#
# A call that fails on one rank leaves the others with communications that it never entered, or with
# some of its own that nobody answers. When the ranks next meet, each tells how many calls of every
# stream it has entered. All then count as many as the one that went furthest, and whatever carries
# a stream that was out of step is given up: its next use makes another, in which nothing is left.

# Streams of calls that are in step by themselves, or else nothing could be agreed; what users ask
# for, who know best what they have left out; and what each rank counts for itself.
_NOT_SHARED = {CLAIMS, OF_USERS, CALL, LEFT}
_RUN = "run"


def counts_of(control: Control) -> dict[Calls, int]:
    """Returns how many calls of each stream of data this rank has entered, and runs it has begun.

    Steady calls must not pay for a key of the runs: it is made here.
    """
    entered = control.ledger.entered
    counts = {key: n for key, n in entered.items() if key.kind not in _NOT_SHARED}
    return counts | {Calls(_RUN, team): n for team, n in control.runs.items()}


def realign(
    control: Control, team: Team, counts: Sequence[dict[Calls, int]], *, has_failed: bool
) -> str:
    """Makes the members of a team count equally; `counts` has what `counts_of` returned on each.

    Sends and receives may be far apart in programs by hand: only where a call `has_failed` is one
    without the other an error. Returns where they did not, as text; "" where no data was left out.
    """
    told = dict(zip(team, counts, strict=True))
    text = ""
    for stream in sorted({_whole(key) for count in counts for key in count}):
        parts = [(r, key, told[r].get(key, 0)) for r, key in _members(stream, team)]
        most = max((n for _, _, n in parts), default=0)
        if all(n == most for _, _, n in parts):
            continue
        if stream.ends and not has_failed:
            continue
        if stream.kind == _RUN:
            control.runs[stream.team] = most
            continue
        for rank, key, _ in parts:
            if rank == control.rank:
                control.ledger.entered[key] = most
        # Nothing carries the control channel's that could be out of step.
        if stream.kind == WITHIN_CALLS:
            continue
        text = text or ", ".join(f"rank {r} has entered {n} of {key}" for r, key, n in parts)
        if control.rank in stream.team:
            control.lose(stream)
    return text


def _whole(key: Calls) -> Calls:
    """Returns the stream of a key: sends from one rank to another are received by that one."""
    return key._replace(kind=SEND) if key.ends else key


def _members(stream: Calls, team: Team) -> list[tuple[int, Calls]]:
    """Returns who of a team counts a stream, and under which key."""
    if not stream.ends:
        return [(rank, stream) for rank in stream.team if rank in team]
    source, target = stream.ends
    both = (source, stream), (target, stream._replace(kind=RECV))
    return [*both] if {source, target} <= {*team} else []
