"""The cache entry of repeated calls: facts about one class of inputs are used for this class
only."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fuser import FusionDefinition
from fuser.frontend.program_cache import RUNS_BEFORE
from fuser.ir.binding import Contents
from fuser.ir.fusion import TensorView
from fuser.runtime import compiled_runner
from fuser.support.device import VECTOR_BYTES
from fuser.support.errors import FuserError, InputError
from multidevice import DeviceMesh, simulate
from tests.support.limits import HANG_S


def _double() -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=[False, False])
        fd.add_output(fd.ops.add(x, x))
    return fd


_OTHERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sizes": lambda x: torch.randn(5, 4),
    "strides": lambda x: torch.randn(6, 4).t(),
    "parameter": lambda x: torch.nn.Parameter(torch.randn(4, 6)),
    "gradient": lambda x: torch.randn(4, 6).requires_grad_(),
    "negative view": lambda x: torch.randn(4, 6, dtype=torch.complex64).conj().imag,
    "another place": lambda x: torch.randn(30)[1:25].view(4, 6),
    "no elements": lambda x: torch.randn(0, 6),
    "in a list": lambda x: [x],
}


@pytest.mark.filterwarnings("ignore:input 0.*requires grad")
@pytest.mark.parametrize("name", _OTHERS)
def test_other_inputs_after_the_latest(name: str) -> None:
    """The quick check of the latest class must reject inputs of these other classes."""
    fd = _double()
    plain, other = torch.randn(4, 6), _OTHERS[name](torch.randn(4, 6))
    for value in (plain, plain, other, plain, other, other):
        (got,) = fd.execute([value])
        value = value[0] if isinstance(value, list) else value
        assert torch.equal(got, (value + value).detach())
        assert not got.requires_grad


class _Hostile:
    """An object that raises on every access."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"nobody asks for {name}")


_REFUSED: dict[str, Callable[[], Any]] = {
    "double": lambda: torch.randn(4, 6, dtype=torch.float64),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(6)] * 4),
    "sparse": lambda: torch.randn(4, 6).to_sparse(),
    "mkldnn": lambda: torch.randn(4, 6).to_mkldnn(),
    "meta": lambda: torch.randn(4, 6, device="meta"),
    "number": lambda: 3.0,
    "none": lambda: None,
    "hostile": _Hostile,
}


@pytest.mark.filterwarnings("ignore:.*nested")
@pytest.mark.parametrize("name", _REFUSED)
def test_inputs_that_are_refused_after_the_latest(name: str) -> None:
    fd = _double()
    plain = torch.randn(4, 6)
    for _ in range(2):
        for _ in range(2):
            assert torch.equal(fd.execute([plain])[0], plain + plain)
        with pytest.raises(FuserError, match=r"input 0"):
            fd.execute([_REFUSED[name]()])
        for many in ([], [plain, plain]):
            with pytest.raises(InputError, match=rf"got {len(many)}"):
                fd.execute(many)


def test_gradient_state_is_left_as_it_was() -> None:
    with FusionDefinition() as fd:
        x, w = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
        fd.add_output(fd.ops.relu(fd.ops.matmul(x, w)))
    x, w = torch.randn(4, 4), torch.randn(4, 4).requires_grad_()
    want = (x @ w).relu().detach()
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(3):
                (got,) = fd.execute([x, w])
                assert torch.equal(got, want) and not got.requires_grad
                assert torch.is_grad_enabled() is enabled
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(fd.execute([x, w])[0], want)


def test_options_of_one_call_do_not_stay() -> None:
    fd, x = _double(), torch.randn(8, 8)
    for options in ([], ["checked"], [], ["checked"], []):
        kwargs: dict[str, Any] = {"_enable_options": options} if options else {}
        assert torch.equal(fd.execute([x], **kwargs)[0], x + x)
        settings = fd.fec._last().program.settings  # pyright: ignore[reportPrivateUsage]
        assert settings.enabled("checked") is bool(options)


def test_a_rank_outside_of_the_mesh_gets_nothing() -> None:
    """Such a rank gets a tensor of shape [0] in each call, also for an output with two axes."""

    def body() -> tuple[int, ...]:
        fd = _double()
        x = fd.fusion.inputs[0]
        assert isinstance(x, TensorView)
        x.set_device_mesh(DeviceMesh([0, 2]))
        shapes = {tuple(fd.execute([torch.ones(4, 6)])[0].shape) for _ in range(3)}
        (shape,) = shapes
        return shape

    with simulate(3) as world:
        assert world.run(body) == [(4, 6), (0,), (4, 6)]


def test_the_glance_in_c_tells_what_the_other_one_does() -> None:
    """The quick check in C never accepts inputs that Python's check rejects; in doubt, it calls
    that one."""
    runner = compiled_runner.wait(HANG_S)
    if runner is None:
        pytest.skip(compiled_runner.why_not())
    plain = [torch.randn(4, 6), torch.randn(3)]
    contents = Contents([], plain, VECTOR_BYTES)
    look = contents.glance(plain)
    assert look is not None
    asked: list[object] = []

    def otherwise(given: object) -> object:
        asked.append(given)
        return look(given)

    places = contents.places(plain)
    glance = runner.Glance(tuple(plain), VECTOR_BYTES - 1, places, otherwise)
    assert glance(plain) == glance(tuple(plain)) == places and not asked
    others: list[object] = [make(torch.randn(4, 6)) for make in _OTHERS.values()]
    others += [make() for make in _REFUSED.values()]
    for other in others:
        given = [other, plain[1]]
        assert glance(given) == look(given)
        assert asked.pop() is given, other
    for given in ([], plain[:1], plain * 2, iter(plain), None, plain[::-1]):
        assert glance(given) is None
        assert asked.pop() is given
    # A storage that has shrunk, and a tensor that has come to require a gradient.
    plain[1].untyped_storage().resize_(4)
    assert glance(plain) is None and asked.pop() is plain


def test_calls_of_ranks_are_seen_in_c() -> None:
    if compiled_runner.wait(HANG_S) is None:
        pytest.skip(compiled_runner.why_not())

    def body() -> tuple[bool, int]:
        fd = _double()
        x = fd.fusion.inputs[0]
        assert isinstance(x, TensorView)
        x.set_device_mesh(DeviceMesh([0, 1]))
        for i in range(3 * RUNS_BEFORE):
            given = torch.randn(4 + i % 2, 6)
            assert torch.equal(fd.execute([given])[0], given + given)
        calls = fd.fec._by_signature  # pyright: ignore[reportPrivateUsage]
        return all(c.is_fast_path_tried for c in dict(calls.items()).values()), len(calls)

    with simulate(2) as world:
        assert world.run(body) == [(True, 2)] * 2
