"""Agreement before each call: the ranks of a team check that all are about to run the same program.

Each call of a program with a mesh has a sequence number in its team. For each call, a rank
publishes one *call token* in memory that the team shares. The token consists of the sequence number
and the *class* of the call, which is a digest of its `RunSignature`. Then the rank waits for the
tokens of the other ranks. If all tokens are equal, all ranks run.

In three cases the ranks exchange messages over the control channel instead:

- the class is new: the ranks have not agreed on it before;
- a rank has an error;
- the tokens differ.

After such an exchange, either all ranks run or all raise an error. The ranks of a team on several
hosts share no memory; they send each token in a message.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
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
    CLASSES,
    OF_USERS,
    SIGNATURES,
    WITHIN_CALLS,
    CallTokens,
    Control,
    call_token,
)
from multidevice.coordination.deadlock_detector import CALL, LEFT, left_key
from multidevice.coordination.shared_page import LINE_NBYTES

if TYPE_CHECKING:
    from fuser.ir.op import Op

T = TypeVar("T")
# The class that means "exchange messages first"; neither it nor GAVE_UP is a digest.
_EXCHANGE = 0
_KNOWN_LIMIT = 4096
# The largest number of exchanges in one call.
_MAX_EXCHANGES = 16
# The kinds of calls with which ranks coordinate, as opposed to the data of runs.
_AMONG_RANKS = {SIGNATURES, WITHIN_CALLS, OF_USERS, CALL}
# In the text of an op: the numbers of axes, and the memory type in the names of tensors.
_NUMBERS = re.compile(r"\d+(?=\{)|(?<=\d)_(?:g|l|s|sym)(?=_)")


@dataclass(frozen=True)
class RunSignature:
    """A description of the run that a rank is about to make.

    Ranks that are about to run the same program on the same sizes have equal signatures.

    - `parts`: texts; first the program as the user wrote it, then options, communications and
      sizes. The first `fixed` parts do not depend on the inputs.
    - `inputs`: the name and the local extents of each input; a number has the extents ().
    - `numbers`: the names of the scalar inputs whose values are not part of the signature, because
      they may change from call to call.
    - `where`: the user's source line of the first communication, for error messages.
    - `ops`: the ops of the program, for error messages.
    - `traits`: for each input, other properties (such as strides) that the parts may depend on.
      Ranks may differ in these properties as long as their parts are equal.
    - `whole`: the names of inputs that are not divided over devices.
    - `cut`: for the positions of some inputs, the axes along which ranks may pass shards of unequal
      extents. `Channel.run` then calls `resolve`.
    - `passed`: the extents of the tensors that the caller passed, if the signature describes a run
      on other tensors; else ().
    - `is_open`: whether the signature describes no run yet, because the run depends on the extents
      that other ranks pass.
    """

    parts: tuple[str, ...]
    inputs: tuple[tuple[str, tuple[int, ...]], ...] = ()
    numbers: tuple[str, ...] = ()
    where: str = ""
    ops: Sequence[Op] = field(default=(), compare=False)
    fixed: int = 1
    traits: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = field(default=(), compare=False)
    whole: Sequence[str] = field(default=(), compare=False)
    cut: Mapping[int, Collection[int]] = field(
        default_factory=dict[int, Collection[int]], compare=False
    )
    passed: tuple[tuple[int, ...], ...] = field(default=(), compare=False)
    is_open: bool = False

    @property
    def extents(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The name of each input, and the extents of the tensor that the caller passed."""
        if not self.passed:
            return self.inputs
        return tuple(
            (name, given) for (name, _), given in zip(self.inputs, self.passed, strict=True)
        )

    @cached_property
    def digest(self) -> bytes:
        """A hash of 16 bytes over the parts and the inputs' extents, by which ranks compare
        signatures.
        """
        found = hashlib.blake2b(digest_size=16)
        for part in (*self.parts, repr([sizes for _, sizes in self.inputs])):
            found.update(part.encode())
            found.update(b"\0")
        return found.digest()

    @cached_property
    def definition(self) -> str:
        """A hash of the program's definition, which does not depend on the sizes of inputs."""
        return hashlib.blake2b(self.parts[0].encode(), digest_size=16).hexdigest()

    def definition_text(self) -> str:
        """Returns the number of ops of the program and its source lines: `3 ops, a.py:7 to a.py:9`.

        Error messages use this text.
        """
        lines = [*dict.fromkeys(op.where for op in self.ops if op.where)]
        span = " to ".join(lines[:1] + lines[1:][-1:])
        return f"{len(self.ops)} ops" + (f", {span}" if span else "")

    @cached_property
    def kind(self) -> int:
        """The integer (class) by which a call token represents this signature.

        The class never equals GAVE_UP or _EXCHANGE, which have other meanings in a token.
        """
        return int.from_bytes(self.digest[:6], "little") | 2


# The extents of the inputs that each rank of a team passes: rank -> input -> axis -> extent.
Extents = Sequence[Sequence[Sequence[int]]]


class _UnevenExtents(Exception):
    """Ends an exchange in which ranks have passed shards of unequal extents, on all ranks."""

    def __init__(self, extents: Extents) -> None:
        super().__init__()
        self.extents = extents


# The result of `prepare`: the signature, the numbers that may change from call to call, and a
# function that runs the call.
Prepared = tuple[RunSignature, tuple[object, ...], Callable[[], T]]


class Turns:
    """A lock that a thread of a rank holds during each call of a program. It detects that several
    threads call at the same time.

    Such calls are an error, because other ranks could match them in another order.
    """

    def __init__(self) -> None:
        self.lock = make_reentrant_lock()
        # The name of the last thread that called during the present call. Its own call is refused,
        # too.
        self.latecomer = ""

    def take(self) -> bool:
        """Acquires the lock for a call of this thread; returns whether another thread held the lock
        before.
        """
        if self.lock.acquire(False):
            return False
        self.latecomer = threading.current_thread().name
        self.lock.acquire()
        return True

    def give_back(self) -> None:
        """Releases the lock, so that other threads of this rank can call."""
        self.latecomer = ""
        self.lock.release()


def _threads_error(who: str, where: str = "") -> UnsupportedError:
    return UnsupportedError(
        f"two threads of one rank, {who}, called programs with a mesh at the same time{where}: "
        "other ranks could match these calls in another order: call from one thread at a time"
    )


class Channel:
    """One rank's side of the agreement within a team, a group of ranks that run programs together.

    Before each call of a program, the ranks agree on the program to run. `turns` is the lock that
    all channels of this rank share.
    """

    def __init__(self, control: Control, team: Team, turns: Turns) -> None:
        # The constructor communicates nothing, so several threads may run it at once.
        self._control = control
        self._team = team
        self._turns = turns
        self._key = Calls(CALL, team)
        # The keys of operations inside calls.
        self._signatures = Calls(SIGNATURES, team)
        self._keys = {self._key, self._signatures, Calls(WITHIN_CALLS, team)}
        # Whether this rank's last call failed in a way that the others may not know of.
        self._is_doubtful = False
        # Whether all members know of the error that ends the present call.
        self._is_agreed = False
        # How many calls this rank has made. Calls with the same count belong together.
        self._calls = 0
        # The field of the wait-for graph with that count, if there is a graph.
        self._posted = control.wait_graph.calls if control.wait_graph is not None else [0]
        self._known: set[int] = set()
        # Definition -> the call in which the members first agreed on it.
        self._ran: dict[str, int] = {}
        # The number of the present call.
        self._number = 0
        # The names of the threads of this rank whose concurrent calls end the present call.
        self._threads = ""
        self._tokens: CallTokens | None = None
        self._is_connected = False

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks of the team run on this host.

        The first use exchanges messages, so all ranks of the team must use the property.
        """
        with self._turns.lock:
            self._connect()
        return self._tokens is not None

    def _connect(self) -> None:
        """Allocates shared memory for the call tokens of the team, if its ranks share a host.

        Does nothing after the first call.
        """
        if self._is_connected:
            return
        page = self._control.page(len(self._team) * LINE_NBYTES, self._team)
        if page is not None:
            self._tokens = CallTokens(self._control, self._team, page, self._key, self._what)
        self._is_connected = True

    def run(
        self,
        prepare: Callable[[], Prepared[T]],
        resolve: Callable[[Extents], Prepared[T]] | None = None,
    ) -> T:
        """Prepares a call of a program, and runs the call once all ranks of the team agree on the
        program.

        `prepare` returns the description of the program, the values of scalar inputs that may
        change from call to call, and a function that runs the call. If ranks pass shards of unequal
        extents along axes that the signature names as `cut`, all ranks call `resolve` with the
        extents of all ranks, and agree on its result instead. Raises the errors of `run_agreed`.
        """
        turns = self._turns
        is_late = turns.take()
        try:
            self._calls += 1
            self._connect()
            if is_late:
                self._refuse_threads("another one")
            try:
                signature, numbers, run = prepare()
            except BaseException as error:
                self.refuse(error)
            if turns.latecomer:
                self._refuse_threads(turns.latecomer)
            try:
                try:
                    self.enter(signature, numbers, is_final=resolve is None)
                except _UnevenExtents as found:
                    assert resolve is not None
                    try:
                        signature, numbers, run = resolve(found.extents)
                    except BaseException as error:
                        self.refuse(error)
                    self.enter(signature, numbers)
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
        """Raises an error on all ranks, because another thread of this rank has called at the same
        time.

        `other` is the name of that thread.
        """
        self._threads = _pair(other)
        try:
            self.refuse(_threads_error(self._threads))
        finally:
            self._threads = ""

    def enter(
        self, signature: RunSignature, numbers: tuple[object, ...], *, is_final: bool = True
    ) -> None:
        """Waits until all ranks of the team are about to run the program that `signature`
        describes, with equal `numbers`.

        `numbers` are the values of scalar inputs that are not part of the signature, because they
        may change from call to call. If `is_final` is False, shards of unequal extents along `cut`
        axes raise `_UnevenExtents`. Raises the errors of `run_agreed`.
        """
        kind = signature.kind
        if kind in self._known and not self._is_doubtful:
            if numbers:
                kind = _with_numbers(kind, numbers)
            try:
                if self._all_say(kind, signature):
                    return
            except DeadlockError as error:
                self._stay(error)
                self._say_exchange(signature)
        else:
            self._say_exchange(signature)
        while not self._exchange(signature, numbers, None, is_final=is_final):
            self._say_exchange(signature)
        if len(self._known) >= _KNOWN_LIMIT:
            self._known.clear()
            self._ran.clear()
        self._known.add(signature.kind)
        self._ran.setdefault(signature.definition, self._number)

    def doubt(self, error: BaseException) -> None:
        """Records that a call failed on this rank with the exception `error`. Records nothing if
        all ranks know of the error.

        The other ranks may not know of the failure, and may have communicated more than this rank.
        Before the next call, the ranks therefore exchange messages and adopt equal call counts.
        """
        if self._is_agreed:
            self._is_agreed = False
            return
        self._is_doubtful = True
        self._control.ledger.entered[left_key(self._team)] = self._number + 1
        if not isinstance(error, CommunicationError):
            self._control.trouble = f", after {_error_text(error)}"

    def refuse(self, error: BaseException) -> NoReturn:
        """Sends an error of this rank to the other ranks of the team, and raises the error."""
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

    def _say_exchange(self, signature: RunSignature | None) -> None:
        """Waits until all ranks of the team are in this call and know that they must exchange their
        signatures.

        If an earlier call failed on this rank, other ranks may still wait in that call. They wait
        for this rank, and this rank waits for them. This deadlock is detected, and ends the earlier
        call of the other ranks with an error. This rank then announces itself again, and waits
        until the others have come to this call.
        """
        for _ in self._team:
            try:
                self._all_say(_EXCHANGE, signature)
                return
            except DeadlockError as error:
                self._stay(error)
        self._all_say(_EXCHANGE, signature)

    def _stay(self, error: DeadlockError) -> None:
        """Decides after the deadlock `error` whether this rank waits in its call again: returns if
        so, and raises `error` if not.

        The rank waits again if the deadlock only ends an earlier call of other ranks. This is so if
        two conditions hold: a call of one of the ranks in the deadlock has failed before, and all
        these ranks wait inside runs or in calls of this team.
        """
        keys = {key for found in error.keys.values() for key in found} - self._keys
        if not error.is_after_failure or any(kind in _AMONG_RANKS for kind, _, _ in keys):
            raise error
        self._calls += 1

    def _all_say(self, kind: int, signature: RunSignature | None) -> bool:
        """Announces what this rank is about to run in the next call, by a call token with the class
        `kind`.

        `signature` describes the run for error messages. Returns whether the tokens of all ranks of
        the team are equal.
        """
        self._number = self._control.ledger.enter(self._key)
        self._posted[0] = self._number + 1
        try:
            if self._tokens is None:
                return self._by_message(call_token(kind, self._number))
            return self._tokens.say(kind, self._number, signature)
        except DeadlockError:
            # All ranks count this call as entered, though others have never made it.
            self._calls -= 1
            raise

    def _by_message(self, word: int) -> bool:
        try:
            self._control.agree(None, digest=word.to_bytes(8, "little"), team=self._team)
        except ProgramMismatchError:
            return False
        return True

    def _what(self, number: int, signature: RunSignature | None = None) -> str:
        line = f", for {signature.where}" if signature is not None and signature.where else ""
        return f"call {number} of the programs of team {team_text(self._team)}{line}"

    # ------------------------------------------------------------ the exchange
    def _exchange(
        self,
        signature: RunSignature | None,
        numbers: tuple[object, ...],
        error: BaseException | None,
        *,
        is_final: bool = True,
    ) -> bool:
        """Exchanges descriptions of the runs with the other ranks; raises an error if the ranks do
        not agree.

        `signature` describes the run of this rank, and `numbers` are the values of its scalar
        inputs that may change from call to call. `error` is the error of this rank, or None.
        Returns False if other ranks were still in an earlier call. In that case, the exchange has
        told those ranks that their call has failed on this rank.
        """
        # All members are in this call, so the deadlocks of their last calls are posted. If they
        # were counted after the comparison, the ranks' counts would differ again.
        self._control.hear_of_deadlocks()
        statement = {
            "error": None if error is None else _error_text(error),
            "threads": self._threads,
            "digest": "" if signature is None else signature.digest.hex(),
            "definition": ("", "")
            if signature is None
            else (signature.definition, signature.definition_text()),
            "inputs": () if signature is None else signature.extents,
            "open": signature is not None and (signature.is_open or bool(signature.passed)),
            "fixed": [] if signature is None else signature.parts[: signature.fixed][1:],
            "traits": () if signature is None else signature.traits,
            "numbers": []
            if signature is None
            else [*zip(signature.numbers, map(str, numbers), strict=True)],
            "entered": rows_of(counts_of(self._control)),
            "calls": self._calls,
            "doubtful": self._is_doubtful,
        }
        payload = json.dumps(statement).encode()
        # An error may have kept some members from an earlier exchange, so they count exchanges by
        # the number of the call.
        self._control.ledger.entered[self._signatures] = _MAX_EXCHANGES * self._number
        told = self._control.exchange(payload, team=self._team, stream=SIGNATURES)
        statements: list[dict[str, Any]] = [json.loads(one) for one in told]
        failed = [rank for rank, s in zip(self._team, statements, strict=True) if s["doubtful"]]
        counts = [counts_from(s["entered"]) for s in statements]
        out_of_step = realign(self._control, self._team, counts, has_failed=bool(failed))
        if failed:
            self._control.mend(self._team)
        # A rank that does not know of the error may hold results of a run that never ended. If all
        # know of it, no message is needed.
        if len(failed) == len(self._team):
            out_of_step = ""
        try:
            is_last = self._compare(statements, signature, error, out_of_step, is_final=is_final)
        except _UnevenExtents:
            self._settle()
            raise
        except BaseException as found:
            self._is_agreed = found is error or _is_equal_on_all(found)
            if self._is_agreed:
                self._settle()
            if isinstance(found, InputError | ProgramMismatchError) and found is not error:
                # All ranks raise the same message; only the first of them prints it.
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
        signature: RunSignature | None,
        error: BaseException | None,
        out_of_step: str,
        *,
        is_final: bool,
    ) -> bool:
        """Compares the descriptions that all ranks have sent of their runs; raises an error if the
        ranks do not agree.

        `statements` are these descriptions. `signature` describes the run of this rank, and `error`
        is its error, or None. `out_of_step` is a text about call counts that differed after an
        earlier error, "" if none did. Returns False if another rank is still in an earlier call,
        otherwise True.
        """
        calls = [s["calls"] for s in statements]
        if self._calls < max(calls):
            ahead = [r for r, n in zip(self._team, calls, strict=True) if n > self._calls]
            raise error or PeerError(
                f"call {self._calls} of the programs of team {team_text(self._team)} failed on "
                f"ranks {team_text(ahead)}, which are already in call {max(calls)}: look for the "
                f"error of ranks {team_text(ahead)}"
            )
        if min(calls) < self._calls:
            return False
        self._check_threads([s["threads"] for s in statements], error)
        self._check_errors([s["error"] for s in statements], error)
        if out_of_step:
            raise CommunicationError(
                f"the ranks of team {team_text(self._team)} were out of step after an earlier "
                f"error: {out_of_step}; from the next call on they are in step again"
            )
        assert signature is not None, "a rank without a signature has an error"
        self._check_definitions(
            [(d, text) for d, text in (s["definition"] for s in statements)], signature
        )
        inputs, is_equal = [s["inputs"] for s in statements], _are_equal(statements, "digest")
        may_differ: Mapping[int, Collection[int]] = {}
        if not is_final or signature.passed:
            may_differ = signature.cut
        self._check_inputs(inputs, signature.whole, may_differ)
        is_open = signature.is_open or any(s["open"] for s in statements)
        differ = is_open or not _are_equal(statements, "inputs")
        if not is_final and (signature.is_open or (differ and not is_equal)):
            raise _UnevenExtents([[sizes for _, sizes in given] for given in inputs])
        self._check_numbers([s["numbers"] for s in statements])
        if len({s["digest"] for s in statements}) > 1:
            is_of_inputs = all(s["fixed"] == statements[0]["fixed"] for s in statements)
            traits = self._differing_traits([s["traits"] for s in statements])
            try:
                self._control.compare_texts(
                    "\n".join(signature.parts),
                    team=self._team,
                    where_of=lambda line: signature.where,
                    stream=SIGNATURES,
                )
            except ProgramMismatchError as error:
                if not (traits and is_of_inputs):
                    raise
                what = self._what(self._number)
                raise ProgramMismatchError(
                    f"{'; '.join(traits)}: the communication depends on this property, which must "
                    f"be equal on all ranks (in {what})\n{error}"
                ) from None
        return True

    def _differing_traits(self, traits: Sequence[list[Any]]) -> list[str]:
        """Returns texts about properties of inputs (such as strides) that differ, with each rank's
        value.
        """
        found: list[str] = []
        for same in zip(*traits, strict=False):
            name = same[0][0]
            for k, (word, _) in enumerate(same[0][1]):
                values = [given[k][1] if k < len(given) else "none" for _, given in same]
                if len(set(values)) > 1:
                    found.append(f"{name} has {word} {_by_rank(self._team, values)}")
        return found

    def _check_threads(self, threads: Sequence[str], mine: BaseException | None) -> None:
        """Raises an error on all ranks if several threads of any rank have called at the same time.

        `threads` has the names of these threads for each rank. `mine` is the error of this rank.
        """
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
            where = f", in the call that matches the one of {caller}"
            error = _threads_error(", ".join(others), where)
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

    def _check_definitions(self, found: Sequence[tuple[str, str]], signature: RunSignature) -> None:
        """Raises `ProgramMismatchError` with the first op in which the ranks' programs differ.

        `found` has, for each rank of the team, the hash and a short text of the program's
        definition. `signature` describes the program of this rank.
        """
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
        ops = {" ".join(op_text(op).split()): op.where for op in signature.ops}
        # If only one rank has an op, the axes of all later annotations have other numbers. Without
        # these numbers the comparison finds the op itself.
        alike = {_NUMBERS.sub("", text): where for text, where in ops.items()}
        where = {**alike, **ops}
        for part, text in (
            ("op", "\n".join(alike)),
            ("op", "\n".join(ops)),
            ("line", signature.parts[0]),
        ):
            self._control.compare_texts(
                text,
                team=self._team,
                where_of=lambda line: where.get(line) or signature.where,
                head=f"{head}\nwhich",
                part=part,
                stream=SIGNATURES,
            )

    def _check_inputs(
        self,
        inputs: Sequence[list[Any]],
        whole: Sequence[str],
        may_differ: Mapping[int, Collection[int]],
    ) -> None:
        """Raises `InputError` if ranks pass different extents, except along the axes `may_differ`.

        `inputs` has the names and extents of each rank's inputs. `whole` has the names of inputs
        that are not divided over devices.
        """
        for position, (name, sizes) in enumerate(inputs[0]):
            given = [one[position][1] if position < len(one) else None for one in inputs]
            for axis, extent in enumerate(sizes):
                if axis in may_differ.get(position, ()):
                    continue
                found = [s[axis] if s is not None and axis < len(s) else None for s in given]
                if any(e is not None and e != extent for e in found):
                    rule = (
                        "an input that no device axis cuts must be equal on all ranks: pass the "
                        "whole tensor on each rank, or cut it (fuser.shard)"
                        if name in whole
                        else "all shards of a tensor must have the same extents"
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
                    f"{name} is {found}, but all ranks must pass the same number (in "
                    f"{self._what(self._number)})"
                )


def _are_equal(statements: Sequence[dict[str, Any]], key: str) -> bool:
    return all(statement[key] == statements[0][key] for statement in statements)


def _is_equal_on_all(error: BaseException) -> bool:
    """Returns whether `error`, which ended an exchange of signatures, is raised on all ranks of the
    team.

    A timeout or a deadlock may end the exchange on some ranks only.
    """
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
    """Returns the value of each rank as text: `8 on ranks (0 1) and 9 on ranks (2)`."""
    return " and ".join(f"{value} on ranks {ranks}" for value, ranks in _grouped(team, values))


def _grouped(team: Team, values: Sequence[object]) -> list[tuple[object, str]]:
    groups: dict[object, list[int]] = {}
    for rank, value in zip(team, values, strict=True):
        groups.setdefault(value, []).append(rank)
    return [(value, team_text(ranks)) for value, ranks in groups.items()]


# ----------------------------------------------------------------------
# Resynchronisation of ranks after an error.
#
# When a call fails on one rank, the others may be in communications that it never enters, and its
# own communications may never be answered. In the next exchange each rank sends how many calls of
# every sequence it has entered. All ranks then adopt the largest count. The transport resources of
# a sequence whose counts differed are dropped; the next call creates new ones without leftovers.

# Calls that are not compared: those by which the ranks agree, which are always in step; those that
# users make themselves; and those that each rank counts for itself.
_NOT_SHARED = {SIGNATURES, OF_USERS, CALL, LEFT}
_RUN = "run"


def counts_of(control: Control) -> dict[Calls, int]:
    """Returns how many calls this rank has entered, for each sequence that other ranks count, too.

    Ranks compare these counts whenever they exchange run signatures. The result includes the number
    of runs of each team.
    """
    entered = control.ledger.entered
    counts = {key: n for key, n in entered.items() if key.kind not in _NOT_SHARED}
    return counts | {Calls(_RUN, team): n for team, n in control.runs.items()}


def realign(
    control: Control, team: Team, counts: Sequence[dict[Calls, int]], *, has_failed: bool
) -> str:
    """Sets this rank's call counts to the largest count of any rank of the team. All ranks of the
    team do the same, so that their counts are equal again.

    Counts differ after a call that failed on some ranks. `counts` has each rank's result of
    `counts_of`. Returns a text about a sequence of calls whose counts differed, "" if there was
    none.

    Different counts of sends and receives are only corrected if a call `has_failed`. In programs
    written by hand, a send may come long before its receive, so that the counts may differ without
    an error.
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
        # The control channel has no resources that could be out of step.
        if stream.kind == WITHIN_CALLS:
            continue
        text = text or ", ".join(f"rank {r} has entered {n} of {key}" for r, key, n in parts)
        if control.rank in stream.team:
            control.lose(stream)
    return text


def _whole(key: Calls) -> Calls:
    """Returns the key under which the counts of sender and receiver are compared: the
    sender's key.
    """
    return key._replace(kind=SEND) if key.ends else key


def _members(stream: Calls, team: Team) -> list[tuple[int, Calls]]:
    """Returns the ranks of `team` that count calls of the sequence `stream`, each with the key
    under which the rank counts the calls.

    The keys differ for transfers, because one rank counts sends and the other rank counts receives.
    The result is empty for a transfer with a rank outside of `team`.
    """
    if not stream.ends:
        return [(rank, stream) for rank in stream.team if rank in team]
    source, target = stream.ends
    both = (source, stream), (target, stream._replace(kind=RECV))
    return [*both] if {source, target} <= {*team} else []
