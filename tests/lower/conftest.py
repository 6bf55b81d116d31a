"""Every kernel that a lowering test has run is also compiled for the GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.lower import build


@pytest.fixture(scope="session", autouse=True)
def compile_all_for_the_gpu() -> Iterator[None]:
    """Compile, when the tests are over, all kernels they made with NVRTC for sm_90a."""
    yield
    if importlib.util.find_spec("cuda") is None or not build.LOWERED:
        return
    from fuser.runtime.kernel import compile_cubin

    by_text = {k.source.text: k.source for k in build.LOWERED}
    cubins = compile_cubin(list(by_text.values()))
    assert len(cubins) == len(by_text)
    assert all(c[:4] == b"\x7fELF" for c in cubins)
