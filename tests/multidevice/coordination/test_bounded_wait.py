"""The errors of a wait for a rank that has left the job."""

from __future__ import annotations

import pytest

from fuser.support.errors import PeerError
from multidevice.coordination.bounded_wait import Calls, Event, Peers
from multidevice.coordination.control_channel import ControlCall
from multidevice.coordination.shared_page import OFFER


def test_a_rank_that_leaves_before_a_run_is_told_to_make_the_same_calls() -> None:
    key = Calls("control", (0, 1))
    call = ControlCall(OFFER, (0, 1), 0, key, 3)
    peers = Peers(0)
    peers.record(Event(1, "left", "it has exited", {key: 3}))
    with pytest.raises(PeerError) as error:
        peers.check(call.describe(), call.needs())
    assert str(error.value) == (
        "rank 1 left early (it has exited) without entering fd.execute or another run, in the "
        "setup before the first run of a team (control offer over team (0 1), sequence number 3), "
        "where rank 0 waits for it: every rank must make the same calls"
    )
    # Call 3 is the fourth one.
    peers.record(Event(1, "left", "it has exited", {key: 4}))
    peers.check(call.describe(), call.needs())
