"""How torch's CUDA kernels are called, on stand-ins for them that the CPU carries out."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fuser.errors import InputError
from fuser.ops import attention_kernels
from fuser.ops.attention_calls import backward, forward
from fuser.ops.attention_kernels import Attention
from tests.frontend.test_attention import attend, draw, gradients

Tensor = torch.Tensor


def takes(*tensors: Tensor) -> None:
    """Require what the kernels do: whole units of a head, which lie one behind the other."""
    for t in tensors:
        unit = 16 // t.itemsize
        assert t.shape[-1] % unit == 0 and t.stride(-1) == 1
        assert t.dtype in (torch.bfloat16, torch.float32)


def takes_words(*tensors: Tensor) -> None:
    """Require that rows begin at words of 16 bytes, too."""
    takes(*tensors)
    for t in tensors:
        assert t.data_ptr() % 16 == 0
        assert all(
            s * t.itemsize % 16 == 0
            for n, s in zip(t.shape, t.stride(), strict=True)
            if n > 1 and s != 1
        )


class Kernels:
    """Torch's CUDA kernels, forward and backward; notes their calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def flash(
        self, q: Tensor, k: Tensor, v: Tensor, p: float, is_causal: bool, *, scale: float
    ) -> tuple[Any, ...]:
        self.calls.append("flash")
        takes(q, k, v)
        assert q.dtype is torch.bfloat16 and q.shape[-1] <= 256
        assert not is_causal or q.shape[-2] == k.shape[-2]
        own = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, log_sumexp = own(q, k, v, 0.0, is_causal, scale=scale)
        # Torch leaves the seed as it finds it where nothing is dropped.
        seed = torch.full((2,), 77, dtype=torch.uint64)
        rest = seed, torch.full((), 78, dtype=torch.uint64), torch.empty(0)
        return (out, log_sumexp, None, None, q.shape[-2], k.shape[-2], *rest)

    def flash_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *rest: Any, scale: float
    ) -> tuple[Tensor, ...]:
        self.calls.append("flash backward")
        log_sumexp, _, _, rows, columns, _, is_causal, seed, _ = rest
        takes(grad, q, k, v, out)
        assert (rows, columns) == (q.shape[-2], k.shape[-2]) and log_sumexp.is_contiguous()
        assert seed.dtype == torch.uint64
        own = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return own(grad, q, k, v, out, log_sumexp, 0.0, is_causal, scale=scale)

    def efficient(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *rest: Any, scale: float
    ) -> tuple[Any, ...]:
        self.calls.append("efficient")
        takes_words(q, k, v)
        assert rest[:5] == (None, None, None, None, 0.0)
        added = bias
        if bias is not None:
            assert bias.shape == (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
            assert bias.dtype is q.dtype and bias.stride(-1) == 1 and bias.data_ptr() % 16 == 0
            assert not any(
                s * bias.itemsize % 16
                for n, s in zip(bias.shape[:3], bias.stride()[:3], strict=True)
                if n > 1
            )
            # It may read whole words behind the last element.
            room = bias.untyped_storage().nbytes() - bias.storage_offset() * bias.itemsize
            last = sum((n - 1) * s for n, s in zip(bias.shape[:3], bias.stride()[:3], strict=True))
            assert (last + -(-bias.shape[-1] // 8) * 8) * bias.itemsize <= room
            added = bias.double()
        wide = [t.transpose(1, 2).double() for t in (q, k, v)]
        out, lse = attend(wide, added=added, is_causal=rest[5] == 1, scale=scale)
        rows = q.shape[1]
        kept = torch.full((*lse.shape[:2], -(-rows // 32) * 32 * rest[6]), torch.nan)
        kept[..., :rows] = torch.where(lse.isneginf(), 0, lse)[..., : kept.shape[-1]]
        return out.transpose(1, 2).to(q.dtype).contiguous(), kept, None, None, rows, k.shape[1]

    def efficient_backward(self, *given: Any, scale: float) -> tuple[Tensor, ...]:
        self.calls.append("efficient backward")
        grad, q, k, v, bias, out, _, _, rows, columns, lse, p, _, _, order, wants_bias = given
        takes_words(grad, q, k, v, out)
        # Torch's kernel for half floats looks for rows of `out` where they are in a contiguous one.
        assert out.is_contiguous()
        assert bias is None and not wants_bias and p == 0 and lse.is_contiguous()
        assert (rows, columns) == (q.shape[1], k.shape[1]) and lse.shape[-1] == -(-rows // 32) * 32
        wide = [t.transpose(1, 2).double() for t in (q, k, v)]
        with torch.enable_grad():
            found = gradients(wide, grad.transpose(1, 2), is_causal=order == 1, scale=scale)
        return *(g.transpose(1, 2).to(q.dtype) for g in found), torch.empty(0)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Let the CPU take the ways of CUDA."""
    made = Kernels()
    flash, efficient = "_scaled_dot_product_flash_attention", "_efficient_attention"
    stand_in = SimpleNamespace(
        **{
            flash: made.flash,
            f"{flash}_backward": made.flash_backward,
            f"{efficient}_forward": made.efficient,
            f"{efficient}_backward": made.efficient_backward,
        }
    )
    monkeypatch.setattr(attention_kernels, "aten", stand_in)
    monkeypatch.setattr(attention_kernels, "CUDA_DEVICES", ("cpu",))
    monkeypatch.setattr(attention_kernels, "KERNELS", attention_kernels.KERNELS[:2])
    monkeypatch.setattr(attention_kernels, "_is_new_enough", lambda device: True)
    return made


def compare(
    call: Attention, given: Sequence[Tensor], grad: Tensor, tolerance: float, **how: Any
) -> None:
    """Compare all results, and the gradients, with those of the definition in float64."""
    wide = [t.double() for t in given]
    operands = given[0], given[1], given[2]
    out, log_sumexp, *seed = forward(call, operands, None, None)
    grads = backward(call, grad, operands, (out, log_sumexp, seed[0], seed[1]))
    expected, lse = attend(wide, **how)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(log_sumexp.double(), lse, rtol=1e-3, atol=1e-3)
    for one, want in zip(grads, gradients(wide, grad, **how), strict=True):
        torch.testing.assert_close(one.double(), want, rtol=2 * tolerance, atol=2 * tolerance)
    assert not any(t.view(torch.int64).any() for t in seed)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("e", [1, 8, 20, 64, 256])
def test_heads_are_padded(kernels: Kernels, e: int, is_causal: bool) -> None:
    call = Attention("sdpfa_fwd", 0.0, is_causal, None)
    q, k, v, grad = (t.bfloat16() / 2 for t in draw([(2, 3, 5, e)] * 4))
    q = q.transpose(-1, -2).contiguous().transpose(-1, -2)
    compare(call, (q, k, v), grad, 2e-2, is_causal=is_causal)
    assert kernels.calls == ["flash", "flash backward"]


# What flash attention does not take: shapes of query, key and value, and what differs.
OTHERS: dict[str, tuple[list[tuple[int, ...]], dict[str, Any]]] = {
    "causal with fewer keys": ([(1, 2, 5, 8), (1, 2, 3, 8), (1, 2, 3, 8)], {"is_causal": True}),
    "causal with more keys": ([(1, 2, 3, 8), (1, 2, 5, 8), (1, 2, 5, 8)], {"is_causal": True}),
    "other values": ([(1, 2, 33, 8), (1, 2, 33, 8), (1, 2, 33, 16)], {}),
    "padded heads, other values": ([(2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6)], {}),
    "large heads": ([(1, 1, 3, 264)] * 3, {}),
    "odd heads of float": ([(2, 3, 40, 7)] * 3, {"dtype": torch.float32}),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("is_turned", [False, True])
def test_what_the_other_kernel_takes(kernels: Kernels, name: str, is_turned: bool) -> None:
    shapes, how = OTHERS[name]
    how = {**how}
    dtype = how.pop("dtype", torch.bfloat16)
    call = Attention("sdpfa_fwd", 0.0, bool(how.get("is_causal")), None)
    given = [t.to(dtype) / 2 for t in draw(shapes)]
    if is_turned:
        given = [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in given]
    (grad,) = (t.to(dtype) for t in draw([(*shapes[0][:3], shapes[2][3])]))
    compare(call, given, grad, 1e-5 if dtype is torch.float32 else 2e-2, **how)
    assert kernels.calls == ["efficient", "efficient backward"]


# What no kernel takes.
LEFT: dict[str, tuple[list[tuple[int, ...]], dict[str, Any]]] = {
    "no keys": ([(1, 1, 3, 8), (1, 1, 0, 8), (1, 1, 0, 8)], {}),
    "a scale below 0": ([(1, 1, 3, 8)] * 3, {"scale": -1.0}),
    "doubles": ([(1, 1, 3, 8)] * 3, {"dtype": torch.float64}),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_no_kernel_takes(kernels: Kernels, name: str) -> None:
    shapes, how = LEFT[name]
    how = {**how}
    dtype = how.pop("dtype", torch.bfloat16)
    call = Attention("sdpfa_fwd", 0.0, False, how.get("scale"))
    given = [t.to(dtype) / 2 for t in draw(shapes)]
    (grad,) = (t.to(dtype) for t in draw([(*shapes[0][:3], shapes[2][3])]))
    compare(call, given, grad, 2e-2, **how)
    assert not kernels.calls


# Shapes of what is added to scores [2, 3, 5, s].
BIASES = ((2, 3, 5, -1), (2, 1, 1, -1), (1, 1, 5, -1), (2, 3, 5, 1), (1, 1, 1, 1))


@pytest.mark.parametrize("shape", BIASES, ids=str)
@pytest.mark.parametrize("s", [5, 8, 16, 20, 56])
@pytest.mark.parametrize("how", ["bias", "mask", "both", "odd"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_what_is_added(
    kernels: Kernels, shape: tuple[int, ...], s: int, how: str, is_causal: bool
) -> None:
    q, k, v = (t.bfloat16() / 2 for t in draw([(2, 3, 5, 8), (2, 3, s, 8), (2, 3, s, 8)]))
    sizes = [s if n < 0 else n for n in shape]
    bias = draw([sizes], seed=5)[0].bfloat16() if how != "mask" else None
    if bias is not None and how == "odd":  # rows begin anywhere
        bias = torch.nn.functional.pad(bias, (1, 2))[..., 1:-2]
    mask = draw([sizes], seed=6)[0] > 0 if how in ("mask", "both") else None
    if mask is not None:
        mask[-1, 0, -1] = False
    call = Attention("sdpfa_fwd", 0.0, is_causal, None)
    out, log_sumexp, *_ = forward(call, (q, k, v), bias, mask)
    wide = [t.double() for t in (q, k, v)]
    expected, lse = attend(wide, added=bias, mask=mask, is_causal=is_causal)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(log_sumexp.double(), lse, rtol=1e-3, atol=1e-3)
    assert kernels.calls == ["efficient"]


def test_a_bias_with_more_digits_is_not_rounded(kernels: Kernels) -> None:
    q, k, v = (t.bfloat16() for t in draw([(1, 2, 4, 8)] * 3))
    bias = 1000 + draw([(1, 2, 4, 4)])[0]
    out, *_ = forward(Attention("sdpfa_fwd", 0.0, False, None), (q, k, v), bias, None)
    expected, _ = attend([t.double() for t in (q, k, v)], added=bias - 1000)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
    assert not kernels.calls


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k, v = draw([(1, 2, 4, 8), (1, 2, 4, 6), (1, 2, 4, 8)])
    with pytest.raises(InputError, match="sdpfa_fwd: query, key and value do not fit"):
        forward(Attention("sdpfa_fwd", 0.0, False, None), (q, k, v), None, None)
