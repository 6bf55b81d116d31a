"""What follows what in steps by peer copies: transfers come as early as they can."""

from __future__ import annotations

import pytest

import multidevice
from fuser.frontend.executor_cache import FusionExecutorCache
from hostir.lower_params import LowerParams
from multidevice import Communicator
from tests.hostir.peer_graph_cases import CASES, numbers

ORDER = {
    # The own block is computed beside the first copy; each copy beside the matmul of the last one.
    "gather in steps": ["type=send", "type=recv", "Stream ( i", "Synchronize", "= linear"],
    # A block is sent when it is there, while the next one is computed.
    "scatter": ["= linear", "Stream ( i", "Synchronize", "type=send", "type=recv"],
}


@pytest.mark.parametrize("name", ORDER)
def test_steps_take_turns(name: str) -> None:
    def text() -> str:
        fd = CASES[name](4)
        rank = Communicator.instance().rank()
        cache = FusionExecutorCache(fd.fusion, params=LowerParams(backend="CUDA"))
        shapes = [(32, 384), (32, 384)] if name == "scatter" else [(32, 96), (32, 96)]
        x, w = (numbers(shape, 0) for shape in shapes)
        if name == "scatter":
            inputs = [t.chunk(4, 1)[rank].contiguous() for t in (x, w)]
        else:
            inputs = [x.chunk(4, 0)[rank], w]
        cache.execute(inputs, _disable_options=["auto_overlap"])
        return str(cache.host_program())

    with multidevice.simulate(4) as world:
        body = world.run(text)[0].partition("  FOR ")[2]
    if name == "gather in steps":
        # The own block is not waited for: the wait stands in the branch of the others.
        branch, wait = (
            next(x for x in body.splitlines() if t in x) for t in ("ELSE:", "i1 + 1 ) <")
        )
        assert len(wait) - len(wait.lstrip()) > len(branch) - len(branch.lstrip()), body
    at = -1
    for piece in ORDER[name]:
        found = body.find(piece, at + 1)
        assert found > at, f"{piece} does not follow in {body}"
        at = found
