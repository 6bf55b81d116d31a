"""One word per rank and call, in a page that the ranks of a team share: what each is about to do.

A word is made of the number of the call and of a *class*. A rank publishes its word and waits for
the words of the others under the same number.

Two words per rank, used in turn, are enough. A rank writes the word of call n + 2 over that of call
n only after every member has published n + 1; a member does that only when it has left call n, and
so has read all words of n. Number and class are one word of 8 bytes, written by one store, so that
no reader can see one without the other, on any processor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fuser.support.errors import PeerError
from multidevice.coordination.bounded_wait import Calls, Need, Team, team_text
from multidevice.coordination.shared_page import LINE_WORDS

if TYPE_CHECKING:
    from multidevice.coordination.control_channel import Control

# The class above, the number (from 1) in the lowest bits.
_NUMBER_BITS = 16
_NUMBERS = (1 << _NUMBER_BITS) - 1
CLASSES = (1 << 48) - 1
# The class that says "this rank left the call with an error".
GAVE_UP = 1
# Where in a line, behind the words, a rank that gives up says for whom it waited: a bit for each of
# so many members, in team order.
_AWAITED, _BITS = 2, 64
# Looks at the words before a wait that yields the processor: about 3 us.
_SPINS = 50


def word_of(kind: int, number: int) -> int:
    """Returns the word of a class in the call of a number."""
    return kind << _NUMBER_BITS | (number + 1) & _NUMBERS


class Words:
    """The words of one team, seen from one of its ranks.

    `page` has a line of LINE_WORDS words per member, in team order; `key` is the stream of calls in
    the ledgers of the ranks, and `what(number, about)` says what a call is, for errors.
    """

    def __init__(
        self,
        control: Control,
        team: Team,
        page: memoryview,
        key: Calls,
        what: Callable[[int, Any], str],
    ) -> None:
        self._control, self._team, self._key, self._what = control, team, key, what
        self.page = page
        start = LINE_WORDS * team.index(control.rank)
        self.mine = (start, start + 1)
        lines = [(rank, LINE_WORDS * i) for i, rank in enumerate(team) if rank != control.rank]
        self._others = tuple(tuple((rank, at + turn) for rank, at in lines) for turn in (0, 1))
        self._slots = tuple(tuple(at for _, at in others) for others in self._others)
        self._all = tuple(tuple(LINE_WORDS * i + turn for i in range(len(team))) for turn in (0, 1))

    def say(self, kind: int, number: int, about: object = None) -> bool:
        """Publishes this rank's class in a call; returns, once all have, whether all are equal.

        Raises `PeerError` where a member gave the call up, and what waiting raises.
        """
        word = word_of(kind, number)
        words, turn = self.page, number & 1
        words[self.mine[turn]] = word
        self._control.wake(self._team)
        waiting = self._slots[turn]
        for _ in range(_SPINS):
            for slot in waiting:
                if words[slot] != word:
                    break
            else:
                return True
        return self._wait(number, word, about)

    def tell(self, kind: int, number: int) -> tuple[int, ...]:
        """Publishes this rank's class in a call; returns the classes of all members, in team order.

        Raises what `say` raises.
        """
        word = word_of(kind, number)
        words, turn = self.page, number & 1
        words[self.mine[turn]] = word
        self._control.wake(self._team)
        slots, wanted = self._all[turn], word & _NUMBERS
        for _ in range(_SPINS):
            found = [words[slot] for slot in slots]
            for one in found:
                if one & _NUMBERS != wanted:
                    break
            else:
                kinds = tuple([one >> _NUMBER_BITS for one in found])
                if GAVE_UP not in kinds:
                    return kinds
                break
        self._wait(number, word, None)
        return tuple([words[slot] >> _NUMBER_BITS for slot in slots])

    def who_says(self, kind: int, number: int) -> list[int]:
        """Returns the other members that have said this in a call so far; never waits."""
        word = word_of(kind, number)
        return [rank for rank, slot in self._others[number & 1] if self.page[slot] == word]

    def _have_given_up(self, number: int) -> list[int]:
        """Returns the members that gave up a call, or are beyond it."""
        words, mine = self.page, (number + 1) & _NUMBERS
        # Beyond half the range a number is not behind but ahead: that rank gave this call up.
        return [
            rank
            for rank, slot in self._others[number & 1]
            if (mine - words[slot]) & _NUMBERS > _NUMBERS // 2
            or (words[slot] ^ mine) == GAVE_UP << _NUMBER_BITS
        ]

    def _awaited_by(self, left: Sequence[int], number: int) -> list[int]:
        """Returns for whom members waited that gave up this call, and who has not come since."""
        gave_up, words, awaited = word_of(GAVE_UP, number), self.page, 0
        for _, slot in self._others[number & 1]:
            if words[slot] == gave_up:
                awaited |= words[slot + _AWAITED]
        come = {self._control.rank, *left}
        return [r for i, r in enumerate(self._team) if awaited >> i & 1 and r not in come]

    def _wait(self, number: int, word: int, about: object) -> bool:
        words, others = self.page, self._others[number & 1]

        def behind() -> list[Need]:
            return [
                Need(rank, self._key, number + 1)
                for rank, slot in others
                if (word - words[slot]) & _NUMBERS
            ]

        def what() -> str:
            return self._what(number, about)

        try:
            self._control.poll_until(
                lambda: not behind() or bool(self._have_given_up(number)), what=what, needs=behind
            )
            if left := self._have_given_up(number):
                self._control.check_ended(what, [Need(r, self._key, number + 1) for r, _ in others])
                awaited = self._awaited_by(left, number)
                raise PeerError(
                    f"ranks {team_text(left)} gave up {what()}: an error ended their wait for "
                    + (f"ranks {team_text(awaited)}" if awaited else "it")
                )
        except BaseException:
            mine, missing = self.mine[number & 1], {need.rank for need in behind()}
            words[mine + _AWAITED] = sum(
                1 << i for i, rank in enumerate(self._team[:_BITS]) if rank in missing
            )
            words[mine] = word_of(GAVE_UP, number)
            self._control.wake(self._team)
            raise
        return all(words[slot] == word for _, slot in others)
