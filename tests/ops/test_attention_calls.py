"""How torch's CUDA kernel is called, on a stand-in for it that the CPU carries out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fuser.errors import InputError
from fuser.ops import attention_calls
from fuser.ops.attention_calls import Attention, backward, forward
from tests.frontend.test_attention import attend, draw, gradients

Tensor = torch.Tensor


def takes(*tensors: Tensor) -> None:
    """Require what the kernel does: whole units of a head, which lie one behind the other."""
    for t in tensors:
        assert t.shape[-1] % 8 == 0 and t.stride(-1) == 1 and t.dtype == torch.bfloat16


class Kernel:
    """Torch's CUDA kernel, forward and backward; notes its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, p: float, is_causal: bool, *, scale: float
    ) -> tuple[Any, ...]:
        self.calls.append("forward")
        takes(q, k, v)
        assert not is_causal or q.shape[-2] == k.shape[-2]
        own = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, log_sumexp = own(q, k, v, 0.0, is_causal, scale=scale)
        # Torch leaves the seed as it finds it where nothing is dropped.
        seed = torch.full((2,), 77, dtype=torch.uint64)
        rest = seed, torch.full((), 78, dtype=torch.uint64), torch.empty(0)
        return (out, log_sumexp, None, None, q.shape[-2], k.shape[-2], *rest)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *rest: Any, scale: float
    ) -> tuple[Tensor, ...]:
        self.calls.append("backward")
        log_sumexp, _, _, rows, columns, _, is_causal, seed, _ = rest
        takes(grad, q, k, v, out)
        assert (rows, columns) == (q.shape[-2], k.shape[-2]) and log_sumexp.is_contiguous()
        assert seed.dtype == torch.uint64
        own = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return own(grad, q, k, v, out, log_sumexp, 0.0, is_causal, scale=scale)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Let bfloat16 on the CPU take the way of CUDA."""
    made, name = Kernel(), "_scaled_dot_product_flash_attention"
    own = {
        name + end: getattr(torch.ops.aten, name + end) for end in ("_for_cpu", "_for_cpu_backward")
    }
    stand_in = SimpleNamespace(**own, **{name: made.forward, name + "_backward": made.backward})
    monkeypatch.setattr(attention_calls, "aten", stand_in)
    monkeypatch.setattr(attention_calls, "FLASH_DEVICES", ("cpu",))
    monkeypatch.setattr(attention_calls, "_is_new_enough", lambda device: True)
    return made


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("e", [1, 8, 20, 64, 256])
def test_heads_are_padded(kernel: Kernel, e: int, is_causal: bool) -> None:
    call = Attention("sdpfa_fwd", 0.0, is_causal, None)
    q, k, v, grad = (t.bfloat16() / 2 for t in draw([(2, 3, 5, e)] * 4))
    q = q.transpose(-1, -2).contiguous().transpose(-1, -2)
    wide = [t.double() for t in (q, k, v)]
    out, log_sumexp, *seed = forward(call, (q, k, v), None, None)
    grads = backward(call, grad, (q, k, v), (out, log_sumexp, seed[0], seed[1]))
    expected, lse = attend(wide, is_causal=is_causal)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(log_sumexp.double(), lse, rtol=1e-3, atol=1e-3)
    for one, want in zip(grads, gradients(wide, grad, is_causal=is_causal), strict=True):
        torch.testing.assert_close(one.double(), want, rtol=4e-2, atol=4e-2)
    assert kernel.calls == ["forward", "backward"]
    assert not any(t.view(torch.int64).any() for t in seed)


# What the kernel does not take: shapes of query, key and value, and what differs.
LEFT: dict[str, tuple[list[tuple[int, ...]], dict[str, object]]] = {
    "causal with fewer keys": ([(1, 2, 5, 8), (1, 2, 3, 8), (1, 2, 3, 8)], {"is_causal": True}),
    "causal with more keys": ([(1, 2, 3, 8), (1, 2, 5, 8), (1, 2, 5, 8)], {"is_causal": True}),
    "other values": ([(1, 2, 3, 8), (1, 2, 3, 8), (1, 2, 3, 16)], {}),
    "large heads": ([(1, 1, 3, 264)] * 3, {}),
    "no keys": ([(1, 1, 3, 8), (1, 1, 0, 8), (1, 1, 0, 8)], {}),
    "a scale below 0": ([(1, 1, 3, 8)] * 3, {"scale": -1.0}),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_the_kernel_does_not_take(kernel: Kernel, name: str) -> None:
    shapes, how = LEFT[name]
    call = Attention("sdpfa_fwd", 0.0, bool(how.get("is_causal")), how.get("scale"))  # pyright: ignore
    q, k, v = (t.bfloat16() / 2 for t in draw(shapes))
    (grad,) = (t.bfloat16() for t in draw([(*shapes[0][:3], shapes[2][3])]))
    wide = [t.double() for t in (q, k, v)]
    out, log_sumexp, *seed = forward(call, (q, k, v), None, None)
    grads = backward(call, grad, (q, k, v), (out, log_sumexp, seed[0], seed[1]))
    expected, lse = attend(wide, **how)  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(log_sumexp.double(), lse, rtol=1e-3, atol=1e-3)
    for one, want in zip(grads, gradients(wide, grad, **how), strict=True):
        torch.testing.assert_close(one.double(), want, rtol=4e-2, atol=4e-2)
    assert not kernel.calls


def test_a_bias_is_not_for_the_kernel(kernel: Kernel) -> None:
    q, k, v, bias = (t.bfloat16() for t in draw([(1, 2, 4, 8)] * 3 + [(1, 2, 4, 4)]))
    out, *_ = forward(Attention("sdpfa_fwd", 0.0, False, None), (q, k, v), bias, None)
    expected, _ = attend([t.double() for t in (q, k, v)], added=bias)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
    assert not kernel.calls


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k, v = draw([(1, 2, 4, 8), (1, 2, 4, 6), (1, 2, 4, 8)])
    with pytest.raises(InputError, match="sdpfa_fwd: query, key and value do not fit"):
        forward(Attention("sdpfa_fwd", 0.0, False, None), (q, k, v), None, None)
