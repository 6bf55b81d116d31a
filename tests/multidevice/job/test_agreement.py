"""Ranks agree on each call before they run it: call tokens, and some runs of
`scripts/disagree.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import cast

import pytest
import torch

import fuser
from fuser import FusionDefinition, ParallelType
from fuser.support.errors import (
    CommunicationError,
    CommunicationTimeout,
    DeadlockError,
    FuserError,
    InputError,
    PeerError,
    ProgramMismatchError,
)
from multidevice import Communicator, DeviceMesh, simulate
from multidevice.coordination.bounded_wait import Calls
from multidevice.coordination.control_channel import CallTokens, Control
from multidevice.coordination.shared_page import LINE_NBYTES
from multidevice.job.agreement import RunSignature
from multidevice.job.communicator import run_agreed
from multidevice.transports.simulated import SimulatedControl
from scripts import disagree

KINDS = range(len(disagree.CASES))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", KINDS, ids=[case.__name__ for case in disagree.CASES])
def test_simulated_ranks_that_disagree_hear_why(kind: int, ranks: int) -> None:
    assert disagree.simulated(ranks, 1000 * len(KINDS) + kind, print) == []


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", KINDS, ids=[case.__name__ for case in disagree.CASES])
def test_ranks_that_disagree_hear_why(kind: int, comm: Communicator) -> None:
    assert disagree.run_case(2000 * len(KINDS) + kind, print) == []


# ------------------------------------------------------------------ words
def call(signature: RunSignature | BaseException, *numbers: float) -> str:
    """Returns "ran", or the error's type and text."""

    def prepare() -> tuple[RunSignature, tuple[float, ...], Callable[[], str]]:
        if isinstance(signature, BaseException):
            raise signature
        return signature, numbers, lambda: "ran"

    communicator = Communicator.instance()
    try:
        return run_agreed(communicator, tuple(range(communicator.size())), prepare)
    except (FuserError, ArithmeticError, KeyError) as error:
        return f"{type(error).__name__}: {error}"


def on_ranks(act: Callable[[int], list[str]], size: int = 2) -> list[list[str]]:
    with simulate(size) as world:
        return world.run(lambda: act(Communicator.instance().rank()))


SAME, OTHER = RunSignature(("a\nb",)), RunSignature(("a\nc",))


def test_the_number_of_a_call_token_wraps_around() -> None:
    """Makes more calls than the 16 bits of a token can count, then an error, then one call."""

    def act(rank: int) -> list[str]:
        communicator = Communicator.instance()
        assert communicator.are_on_one_host((0, 1))
        channel = communicator.channel((0, 1))
        assert channel is not None and channel._tokens is not None
        last = (1 << 16) - 3
        words = channel._tokens
        for number in (last - 2, last - 1):
            words.page[words.mine[number & 1]] = number + 1
        channel._control.ledger.entered[channel._key] = last
        communicator.barrier()
        found = [call(SAME) for _ in range(6)]
        return [*found, call(OTHER if rank else SAME), call(SAME)]

    for found in on_ranks(act):
        assert found[:6] + found[7:] == ["ran"] * 7
        assert found[6].startswith(f"{ProgramMismatchError.__name__}: ")
        assert "line 2" in found[6]


def test_every_kind_of_error_on_a_rank_reaches_the_others() -> None:
    def act(rank: int) -> list[str]:
        wrong = [call(ZeroDivisionError("mine") if rank == 1 else SAME) for _ in range(2)]
        return [*wrong, call(SAME), call(SAME)]

    first, second, third = on_ranks(act, 3)
    assert first == third
    assert first[0] == f"{PeerError.__name__}: rank 1 failed: ZeroDivisionError: mine" == first[1]
    assert second[0] == "ZeroDivisionError: mine"
    assert first[2:] == second[2:] == ["ran", "ran"]


def test_numbers_of_a_known_class_are_compared() -> None:
    signature = RunSignature(("a",), numbers=("input 1, d1",))

    def act(rank: int) -> list[str]:
        return [call(signature, x) for x in (1.0, 2.0, 3.0 + rank, 4.0)]

    for found in on_ranks(act):
        assert found[:2] + found[3:] == ["ran"] * 3
        assert found[2].startswith(
            f"{InputError.__name__}: input 1, d1 is 3.0 on ranks (0) and 4.0 on ranks (1)"
        )


def test_without_a_page_the_words_travel_in_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without shared memory, as between hosts, call tokens are exchanged in messages."""
    monkeypatch.setattr(SimulatedControl, "page", lambda *_: None)

    def act(rank: int) -> list[str]:
        signatures = [SAME, SAME, OTHER if rank else SAME, SAME, KeyError("mine") if rank else SAME]
        return [*(call(signature) for signature in signatures), call(SAME)]

    first, second = on_ranks(act)
    for found in (first, second):
        assert found[:2] + found[3:4] + found[5:] == ["ran"] * 4
        assert found[2].startswith(f"{ProgramMismatchError.__name__}: ")
    assert first[4] == f"{PeerError.__name__}: rank 1 failed: KeyError: 'mine'"
    assert second[4] == "KeyError: 'mine'"


def test_a_wait_for_a_rank_that_has_left_names_the_users_line() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        y = fd.ops.sum(x, [0])
        fd.add_output(y)
        x.set_device_mesh(DeviceMesh([0, 1]))
        x.outer_split(0, 2)
        x.axis(0).parallelize(ParallelType.mesh_x)

    def act() -> None:
        if Communicator.instance().rank() == 0:
            for _ in range(2):
                fd.execute([torch.ones(3)])
        else:
            fd.execute([torch.ones(3)])

    with simulate(2) as world, pytest.raises(DeadlockError) as error:
        world.run(act)
    assert "call 1 of the programs of team (0 1), for " in str(error.value)
    assert "test_agreement.py:" in str(error.value)


# ------------------------------------------------------------------ what a difference is called
def definition(*ops: str) -> FusionDefinition:
    """A program on two ranks: unary ops on shards, then an allgather of the result."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        x.set_device_mesh(DeviceMesh([0, 1]))
        x.outer_split(0, 2)
        x.axis(0).parallelize(ParallelType.mesh_x)
        y = x
        for name in ops:
            y = getattr(fd.ops, name)(y)
        y = fd.ops.set(y)
        y.set_device_mesh(DeviceMesh([0, 1]))
        fd.add_output(y)
    return fd


def outcome(fd: FusionDefinition, rows: int) -> str:
    try:
        return f"{fd.execute([torch.ones(rows, 3)])[0].shape[0]} rows"
    except FuserError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("other", [("relu", "exp", "neg"), ("relu", "neg"), ("relu",)])
def test_definitions_that_differ_are_shown_by_their_first_differing_op(
    other: tuple[str, ...],
) -> None:
    def act(rank: int) -> list[str]:
        return [outcome(definition(*(other if rank else ("relu", "exp"))), 2)]

    (first,), (second,) = on_ranks(act)
    assert first == second
    head, *lines = first.splitlines()
    assert head == (
        "ProgramMismatchError: in call 0 of the programs of team (0 1) the ranks run different "
        "definitions:"
    )
    counts = {0: 3, 1: len(other) + 1}
    for rank, count in counts.items():
        assert any(f"{rank}" in one and f"): {count} ops, {__file__}:" in one for one in lines)
    at = next(i for i, one in enumerate(lines) if one.startswith("which differ at op "))
    # The longer one has an op where the shorter one has its last.
    assert lines[at] == f"which differ at op {3 if len(other) == 3 else 2}:"
    mine, theirs = lines[at + 1 :]
    assert mine.startswith("  ranks (0): T") and theirs.startswith("  ranks (1): T")
    assert "expf(" in mine or len(other) == 3
    assert mine.count(f"(user code at {__file__}:") == theirs.count("(user code at ") == 1


def test_an_op_that_one_rank_has_is_shown_where_annotations_follow_it() -> None:
    """Annotations after the ops change the axis numbers of all ops; the error still finds the
    op.
    """

    def act(rank: int) -> list[str]:
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, -1], contiguity=True)
            y = fd.ops.exp(fd.ops.neg(x))
            fd.add_output(fd.ops.relu(y) if rank else y)
            x.set_device_mesh(DeviceMesh([0, 1]))
            x.outer_split(0, 2)
            x.axis(0).parallelize(ParallelType.mesh_x)
        return [outcome(fd, 2)]

    (first,), (second,) = on_ranks(act)
    assert first == second
    *_, at, mine, theirs = first.splitlines()
    assert at == "which differ at op 3:"
    assert mine.startswith("  ranks (0): <end>") and "relu" in theirs


@pytest.mark.parametrize("calls", [("baab", "abab"), ("ab", "bab"), ("aab", "aabx")])
def test_calls_that_are_swapped_or_left_out_name_the_call_and_both_definitions(
    calls: tuple[str, str],
) -> None:
    """After both definitions have run, the ranks call them in different orders."""

    def act(rank: int) -> list[str]:
        made = {"a": (definition("exp"), 2), "b": (definition("neg", "exp"), 5)}
        made["x"] = made["a"]
        return [outcome(*made[c]) for c in "ab" + calls[rank]]

    found = on_ranks(act)
    if len(found[1]) > len(found[0]):  # one call more at the end: nobody answers
        assert found[1][-1].startswith("DeadlockError: ")
        assert f"waits in call {len(found[0])} of the programs of team (0 1)" in found[1][-1]
    for number, (one, other) in enumerate(zip(*found, strict=False)):
        names = [("ab" + c)[number] for c in calls]
        if names[0] == names[1]:
            assert one == other == f"{4 if names[0] == 'a' else 10} rows"
            continue
        assert one == other
        head, zero, first, at, *_ = one.splitlines()
        assert head.startswith(f"ProgramMismatchError: in call {number} of the programs of team")
        assert "left out, added or swapped" in head
        sizes = {"a": ("2 ops", 0), "b": ("3 ops", 1)}
        for rank, line in enumerate((zero, first)):
            count, since = sizes[names[rank]]
            assert line.startswith(f"  ranks ({rank}): {count}, {__file__}:")
            assert line.endswith(f", first run in call {since}")
        assert at == "which differ at op 1:"


def test_extents_that_differ_name_the_ranks() -> None:
    def act(rank: int) -> list[str]:
        fd = definition("exp")
        return [outcome(fd, rows) for rows in ((2, 4, 2) if rank else (2, 3, 2))]

    for found in on_ranks(act):
        assert found[0] == found[2] == "4 rows"
        assert "unequal extents along axis 0: 3 on rank 0, 4 on rank 1" in found[1]


def test_extents_of_a_replicated_input_that_differ_are_no_shards() -> None:
    def act(rank: int) -> list[str]:
        with FusionDefinition() as fd:
            x, w = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
            fuser.shard(x, DeviceMesh([0, 1]), [fuser.Shard(0)])
            fuser.shard(w, DeviceMesh([0, 1]), [fuser.Replicate()])
            fd.add_output(fd.ops.sum(x, 0))
            fd.add_output(fd.ops.neg(w))
        found = list[str]()
        for rows, columns in ((4, 3 + rank), (4 + rank, 3)):
            with pytest.raises(FuserError) as raised:
                fd.execute([torch.ones(rows, 5), torch.ones(6, columns)])
            found.append(str(raised.value))
        return found

    for of_whole, of_shards in on_ranks(act):
        assert "has extent 3 on ranks (0) and 4 on ranks (1) on axis 1" in of_whole
        assert "an input that no device axis cuts" in of_whole and "shards" not in of_whole
        assert "unequal extents along axis 0: 4 on rank 0, 5 on rank 1" in of_shards
        assert "blocks of ceil(N / 2)" in of_shards and "cuts must be" not in of_shards


# ------------------------------------------------------------------ inputs that lie otherwise
def gathers(axis: int, *, with_relu: bool) -> FusionDefinition:
    """An allgather of an input or of a result, which is cut along an axis."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1])
        y = fd.ops.relu(x) if with_relu else x
        z = fd.ops.set(y)
        fd.add_output(z)
        for tv in dict.fromkeys((x, y, z)):
            tv.set_device_mesh(DeviceMesh([0, 1]))
        x.outer_split(axis, 2)
        x.axis(axis).parallelize(ParallelType.mesh_x)
    return fd


def flipped(rank: int) -> torch.Tensor:
    """Returns a shard that is row-major on rank 0 and column-major on rank 1."""
    whole = torch.arange(32.0).view(4, 8)
    return whole.t().contiguous().t() if rank else whole


@pytest.mark.finding("G11")
@pytest.mark.parametrize("axis", [0, 1])
def test_strides_that_differ_name_input_ranks_and_both_strides(axis: int) -> None:
    def act(rank: int) -> list[str]:
        fd, found = gathers(axis, with_relu=False), list[str]()
        for x in (flipped(rank), flipped(0)):
            try:
                found.append(str(tuple(fd.execute([x])[0].shape)))
            except FuserError as error:
                found.append(f"{type(error).__name__}: {error}")
        return found

    for refused, then in on_ranks(act):
        head, below, *rest = refused.splitlines()
        assert head.startswith("ProgramMismatchError: input 0, T0_g_float, used at ")
        assert "has strides [8, 1] on ranks (0) and [1, 4] on ranks (1)" in head
        assert "iS" not in head, "the IR comes below"
        assert below.startswith("the programs of the ranks differ at line ") and len(rest) == 2
        assert then == ("(8, 8)" if axis == 0 else "(4, 16)")


@pytest.mark.finding("G11")
def test_strides_may_differ_where_what_is_communicated_is_alike() -> None:
    def act(rank: int) -> list[str]:
        (found,) = gathers(0, with_relu=True).execute([flipped(rank)])
        return [str(found.tolist())]

    wanted = str(torch.arange(32.0).view(4, 8).repeat(2, 1).tolist())
    assert on_ranks(act) == [[wanted], [wanted]]


@pytest.mark.finding("G11")
def test_strides_are_not_blamed_for_options_that_differ() -> None:
    def act(rank: int) -> list[str]:
        options = ["peer_copies"] if rank else []
        try:
            gathers(0, with_relu=False).execute([flipped(rank)], _enable_options=options)
        except FuserError as error:
            return [f"{type(error).__name__}: {error}"]
        return ["ran"]

    for (text,) in on_ranks(act):
        assert text.startswith("ProgramMismatchError: the programs of the ranks differ:")
        assert "peer_copies" in text and "strides" not in text


@pytest.mark.finding("G11")
@pytest.mark.parametrize("word", ["the value", "dtype", "device"])
def test_traits_that_differ_are_named_before_the_text(word: str) -> None:
    def act(rank: int) -> list[str]:
        values = (("strides", "[1]"), (word, f"v{rank}"))
        traits = (("input 0, T0", (("strides", "[1]"),)), ("input 1, T1", values))
        parts = ("a", "// options", f"Communication of v{rank}")
        return [call(RunSignature(parts, fixed=2, traits=traits))]

    for (text,) in on_ranks(act):
        assert text.startswith(
            f"ProgramMismatchError: input 1, T1 has {word} v0 on ranks (0) and v1 on "
        )
        assert "input 0" not in text and "Communication of v1" in text


def test_a_forked_process_is_no_rank() -> None:
    def act(rank: int) -> list[str]:
        communicator = Communicator.instance()
        first = call(SAME)
        if rank:
            return [first]
        child = os.fork()
        if not child:
            try:
                communicator.channel((0, 1))
            except CommunicationError as error:
                os._exit(0 if "forked from rank 0" in str(error) else 2)
            os._exit(1)
        return [first, str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))]

    assert on_ranks(act) == [["ran", "0"], ["ran"]]


class _AtOnce:
    """A control channel whose waits return at once, or raise a timeout if nothing has
    arrived.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def wake(self, team: object) -> None:
        pass

    def check_ended(self, *_: object) -> None:
        pass

    def poll_until(self, done: Callable[[], bool], **_: object) -> None:
        if not done():
            raise CommunicationTimeout("it did not come")


def test_a_rank_that_gives_up_says_for_whom_it_waited() -> None:
    page = memoryview(bytearray(3 * LINE_NBYTES)).cast("Q")
    first, second, third = (
        CallTokens(
            cast(Control, _AtOnce(r)),
            (0, 1, 2),
            page,
            Calls("call", (0, 1, 2)),
            lambda n, _: f"call {n}",
        )
        for r in range(3)
    )
    with pytest.raises(CommunicationTimeout):
        first.say(9, 4)
    with pytest.raises(
        PeerError, match=r"call 4 failed on ranks \(0\), .* they waited for ranks \(2\)"
    ):
        second.say(9, 4)
    # It is not told that it waited for itself.
    with pytest.raises(PeerError, match=r"call 4 failed on ranks \(0 1\), .* they waited: look"):
        third.say(9, 4)
