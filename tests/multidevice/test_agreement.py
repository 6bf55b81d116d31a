"""Ranks agree before they run: a sample of `scripts/disagree.py`, and the words themselves."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fuser import FusionDefinition, ParallelType
from fuser.errors import DeadlockError, FuserError, InputError, PeerError, ProgramMismatchError
from multidevice import Communicator, DeviceMesh, simulate
from multidevice.agreement import Claim, run_agreed
from multidevice.backends.simulated import SimulatedControl


def load_script() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "disagree.py"
    spec = importlib.util.spec_from_file_location("disagree", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["disagree"] = module
    spec.loader.exec_module(module)
    return module


disagree = load_script()
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
def call(claim: Claim | BaseException, *numbers: float) -> str:
    """Returns "ran", or the error's type and text."""

    def prepare() -> tuple[Claim, tuple[float, ...], Callable[[], str]]:
        if isinstance(claim, BaseException):
            raise claim
        return claim, numbers, lambda: "ran"

    communicator = Communicator.instance()
    try:
        return run_agreed(communicator, tuple(range(communicator.size())), prepare)
    except (FuserError, ArithmeticError, KeyError) as error:
        return f"{type(error).__name__}: {error}"


def on_ranks(act: Callable[[int], list[str]], size: int = 2) -> list[list[str]]:
    with simulate(size) as world:
        return world.run(lambda: act(Communicator.instance().rank()))


SAME, OTHER = Claim(("a\nb",)), Claim(("a\nc",))


def test_the_number_of_a_word_wraps_around() -> None:
    """Words keep 16 bits of the call's number: more calls than that, then an error, then one."""

    def act(rank: int) -> list[str]:
        communicator = Communicator.instance()
        channel = communicator.channel((0, 1))
        assert channel is not None and channel._words is not None
        last = (1 << 16) - 3
        for number in (last - 2, last - 1):
            channel._words[channel._mine[number & 1]] = number + 1
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
    claim = Claim(("a",), numbers=("input 1, d1",))

    def act(rank: int) -> list[str]:
        return [call(claim, x) for x in (1.0, 2.0, 3.0 + rank, 4.0)]

    for found in on_ranks(act):
        assert found[:2] + found[3:] == ["ran"] * 3
        assert found[2].startswith(
            f"{InputError.__name__}: input 1, d1 is 3.0 on ranks (0) and 4.0 on ranks (1)"
        )


def test_without_a_page_the_words_travel_in_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """As across hosts."""
    monkeypatch.setattr(SimulatedControl, "page", lambda *_: None)

    def act(rank: int) -> list[str]:
        claims = [SAME, SAME, OTHER if rank else SAME, SAME, KeyError("mine") if rank else SAME]
        return [*(call(claim) for claim in claims), call(SAME)]

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
