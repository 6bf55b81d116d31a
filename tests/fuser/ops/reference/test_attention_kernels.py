"""How torch's CUDA attention kernels are called, tested on the CPU with stand-ins for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from fuser.ops.reference import attention_kernels
from fuser.ops.reference.attention_kernels import (
    Attention,
    backward,
    forward,
    plain_backward,
    plain_forward,
)
from fuser.support.errors import InputError
from tests.support.attention_reference import attend, draw, gradients

Tensor = torch.Tensor


def takes(*tensors: Tensor) -> None:
    """Requires the operands that kernels support: heads of whole 16-byte vectors, with stride 1."""
    for t in tensors:
        unit = 16 // t.itemsize
        assert t.shape[-1] % unit == 0 and t.stride(-1) == 1
        assert t.dtype in (torch.bfloat16, torch.float32)


def takes_words(*tensors: Tensor) -> None:
    """Requires in addition that each row begins at a multiple of 16 bytes."""
    takes(*tensors)
    for t in tensors:
        assert t.data_ptr() % 16 == 0
        assert all(
            s * t.itemsize % 16 == 0
            for n, s in zip(t.shape, t.stride(), strict=True)
            if n > 1 and s != 1
        )


class Kernels:
    """Stand-ins for torch's CUDA kernels, which record their calls and the number of key heads of
    each."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.heads_of_keys: list[int] = []

    def cudnn(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sums: bool,
        p: float,
        is_causal: bool,
        debug: bool,
        *,
        scale: float,
    ) -> tuple[Any, ...]:
        self.calls.append("cudnn")
        self.heads_of_keys.append(k.shape[1])
        takes_words(q, k, v)
        assert q.dtype is torch.bfloat16 and max(q.shape[-1], v.shape[-1]) <= 256 and p == 0
        assert q.shape[1] % k.shape[1] == 0 and k.shape[1] == v.shape[1] and k.shape[2] > 1
        added = None
        if bias is not None:
            assert bias.dtype is q.dtype and bias.shape[-1] == k.shape[2] and bias.stride(-1) == 1
            assert bias.data_ptr() % 16 == 0 and sums
            added = bias.double()
        out, lse = attend(grouped(q, k, v), added=added, is_causal=is_causal, scale=scale)
        made = torch.empty_like(q) if out.shape == q.shape else out.to(q.dtype)
        kept = lse.float().unsqueeze(-1) if sums else None
        empty = torch.zeros((), dtype=torch.int64)
        rest = q.shape[-2], k.shape[-2], empty, empty, None
        return (made.copy_(out), kept, None, None, *rest)

    def cudnn_backward(self, *given: Any, scale: float) -> tuple[Tensor, ...]:
        self.calls.append("cudnn backward")
        grad, q, k, v, out, lse, _, _, bias, _, _, rows, columns, p, is_causal = given
        self.heads_of_keys.append(k.shape[1])
        takes_words(grad, q, k, v, out)
        # cuDNN keeps one plan per strides, at whatever address the tensors are.
        assert grad.stride() == out.stride()
        assert out.shape != q.shape or torch.empty_like(q).stride() == out.stride()
        assert bias is None and p == 0 and lse.shape == (*q.shape[:3], 1) and lse.is_contiguous()
        assert (rows, columns) == (q.shape[2], k.shape[2])
        return tuple(
            torch.empty_like(t).copy_(g)
            for g, t in zip(
                grouped_gradients((q, k, v), grad, is_causal=is_causal, scale=scale),
                (q, k, v),
                strict=True,
            )
        )

    def flash(
        self, q: Tensor, k: Tensor, v: Tensor, p: float, is_causal: bool, *, scale: float
    ) -> tuple[Any, ...]:
        self.calls.append("flash")
        self.heads_of_keys.append(k.shape[1])
        takes_words(q, k, v)
        assert q.dtype is torch.bfloat16 and q.shape[-1] == v.shape[-1] <= 256
        assert not is_causal or q.shape[-2] == k.shape[-2]
        out, lse = attend(grouped(q, k, v), is_causal=is_causal, scale=scale)
        # Without dropout, torch does not write the seed.
        seed = torch.full((2,), 77, dtype=torch.uint64)
        rest = seed, torch.full((), 78, dtype=torch.uint64), torch.empty(0)
        made = torch.empty_like(q).copy_(out)
        return (made, lse.float(), None, None, q.shape[-2], k.shape[-2], *rest)

    def flash_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *rest: Any, scale: float
    ) -> tuple[Tensor, ...]:
        self.calls.append("flash backward")
        self.heads_of_keys.append(k.shape[1])
        log_sumexp, _, _, rows, columns, _, is_causal, seed, _ = rest
        takes_words(grad, q, k, v, out)
        assert (rows, columns) == (q.shape[-2], k.shape[-2]) and log_sumexp.is_contiguous()
        assert seed.dtype == torch.uint64
        found = grouped_gradients((q, k, v), grad, is_causal=is_causal, scale=scale)
        return tuple(g.to(q.dtype) for g in found)

    def efficient(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sums: bool,
        p: float,
        is_causal: bool,
        *,
        scale: float,
    ) -> tuple[Any, ...]:
        self.calls.append("efficient")
        self.heads_of_keys.append(k.shape[1])
        takes_words(q, k, v)
        assert p == 0 and q.shape[1] == k.shape[1] == v.shape[1]
        added = bias
        if bias is not None:
            assert bias.shape == (*q.shape[:3], k.shape[2])
            assert bias.dtype is q.dtype and bias.stride(-1) == 1 and bias.data_ptr() % 16 == 0
            assert not any(
                s * bias.itemsize % 16
                for n, s in zip(bias.shape[:3], bias.stride()[:3], strict=True)
                if n > 1
            )
            # The kernel may read a whole vector at the last element.
            room = bias.untyped_storage().nbytes() - bias.storage_offset() * bias.itemsize
            last = sum((n - 1) * s for n, s in zip(bias.shape[:3], bias.stride()[:3], strict=True))
            assert (last + -(-bias.shape[-1] // 8) * 8) * bias.itemsize <= room
            added = bias.double()
        out, lse = attend(
            [t.double() for t in (q, k, v)], added=added, is_causal=is_causal, scale=scale
        )
        rows = q.shape[2]
        kept = torch.full((*lse.shape[:2], -(-rows // 32) * 32 * sums), torch.nan)
        kept[..., :rows] = torch.where(lse.isneginf(), 0, lse)[..., : kept.shape[-1]]
        made = out.transpose(1, 2).to(q.dtype).contiguous().transpose(1, 2)
        return made, kept, None, None

    def efficient_backward(self, *given: Any, scale: float) -> tuple[Tensor, ...]:
        self.calls.append("efficient backward")
        grad, q, k, v, bias, out, lse, _, _, p, wanted, is_causal = given
        self.heads_of_keys.append(k.shape[1])
        takes_words(grad, q, k, v, out)
        # Torch's kernel for half floats assumes that `out` is contiguous as [N, L, H, E].
        assert out.transpose(1, 2).is_contiguous()
        assert bias is None and wanted == [True, True, True, False] and p == 0
        assert lse.is_contiguous() and lse.shape[-1] == -(-q.shape[2] // 32) * 32
        found = grouped_gradients((q, k, v), grad, is_causal=is_causal, scale=scale)
        return *(g.to(q.dtype) for g in found), torch.empty(0)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Returns operands in float64, with each key head repeated for the query heads that read it."""
    times = q.shape[1] // k.shape[1]
    return [q.double(), *(t.double().repeat_interleave(times, 1) for t in (k, v))]


def grouped_gradients(operands: Sequence[Tensor], grad: Tensor, **how: Any) -> list[Tensor]:
    q, k, v = operands
    times = q.shape[1] // k.shape[1]
    with torch.enable_grad():
        dq, *others = gradients(grouped(q, k, v), grad, **how)
    return [dq, *(g.unflatten(1, (-1, times)).sum(2) for g in others)]


HOPPER, AMPERE = ((9, 0), 91900), ((8, 0), 91900)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Kernels]:
    """Makes the CPU appear as a GPU of a kind, with stand-ins for its kernels."""

    def make(kind: tuple[tuple[int, int], int]) -> Kernels:
        made = Kernels()
        monkeypatch.setattr(attention_kernels, "TorchAttention", made)
        monkeypatch.setattr(attention_kernels, "CUDA_DEVICES", ("cpu",))
        machine = attention_kernels.DeviceKind("cpu", *kind)
        monkeypatch.setattr(attention_kernels, "machine_of", lambda device: machine)
        return made

    return make


@pytest.fixture
def kernels(use: Callable[..., Kernels]) -> Kernels:
    return use(AMPERE)


def compare(
    call: Attention, given: Sequence[Tensor], grad: Tensor, tolerance: float, **how: Any
) -> None:
    """Compares all results, and the gradients, with those of the definition in float64."""
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


# Calls that flash attention does not support: shapes of query, key and value; other arguments.
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


# Calls that no kernel supports.
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


# Shapes of a bias for scores [2, 3, 5, s].
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
    with pytest.raises(InputError, match="sdpfa_fwd: query and key must have the same last size"):
        forward(Attention("sdpfa_fwd", 0.0, False, None), (q, k, v), None, None)


# ------------------------------------------------------------------ the table of kernels
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
# The nine shapes of benchmarks/notes.md, and others: n, h, heads of keys, l, s, e, v.
LONG = (4, 32, 32, 2048, 2048, 128, 128)
SMALL = (32, 12, 12, 56, 56, 32, 32)
GROUPED = (4, 32, 8, 2048, 2048, 128, 128)
DECODE = (16, 32, 32, 1, 4096, 128, 128)
WIDE = (2, 16, 16, 2048, 2048, 256, 256)
NINE = (
    LONG,
    (2, 16, 16, 4096, 4096, 64, 64),
    (1, 32, 32, 8192, 8192, 128, 128),
    SMALL,
    (8, 16, 16, 512, 512, 64, 64),
    GROUPED,
    DECODE,
    WIDE,
    (4, 16, 16, 1000, 1000, 96, 96),
)
# (machine, shape, differences from bfloat16 without bias, dropout and causal mask) -> kernel.
TABLE: list[tuple[tuple[tuple[int, int], int], tuple[int, ...], dict[str, Any], str | None]] = [
    *((HOPPER, shape, {}, "efficient" if shape is SMALL else "cudnn") for shape in NINE),
    *(
        (HOPPER, shape, {"added": BF16}, "efficient" if shape is SMALL else "cudnn")
        for shape in NINE
    ),
    *((HOPPER, shape, {"is_backward": True}, "cudnn") for shape in NINE),
    *((AMPERE, shape, {}, "flash") for shape in NINE),
    *((AMPERE, shape, {"added": BF16}, "efficient") for shape in NINE),
    (HOPPER, LONG, {"is_causal": True}, "cudnn"),
    (HOPPER, (2, 4, 4, 33, 130, 64, 64), {"is_causal": True}, "efficient"),
    (HOPPER, (2, 64, 64, 512, 2048, 64, 64), {"is_causal": True}, "cudnn"),
    (AMPERE, (2, 64, 64, 512, 2048, 64, 64), {"is_causal": True}, "efficient"),
    # A bias of a wider dtype is not rounded; float operands have one kernel, doubles none.
    (HOPPER, LONG, {"added": F32}, None),
    (HOPPER, LONG, {"dtype": F32}, "efficient"),
    (HOPPER, LONG, {"dtype": F32, "added": F32}, "efficient"),
    (HOPPER, LONG, {"dtype": F64}, None),
    # Sizes of heads: values of another size, gradients in later versions of cuDNN, larger heads.
    (HOPPER, (4, 32, 32, 2048, 2048, 128, 64), {"is_backward": True}, "cudnn"),
    (AMPERE, (4, 32, 32, 2048, 2048, 128, 64), {}, "efficient"),
    (((9, 0), 92300), (2, 16, 16, 2048, 2048, 192, 192), {}, "cudnn"),
    (((9, 0), 92300), (2, 16, 16, 2048, 2048, 192, 192), {"is_backward": True}, "flash"),
    (HOPPER, (2, 16, 16, 2048, 2048, 192, 192), {"is_backward": True}, "cudnn"),
    (HOPPER, WIDE, {"is_backward": True}, "cudnn"),
    (HOPPER, (2, 16, 16, 2048, 2048, 264, 264), {}, "efficient"),
    (HOPPER, (2, 16, 16, 2048, 2048, 20, 20), {}, "cudnn"),
    # cuDNN does not support a single key, or more than 65,535 batches.
    (HOPPER, (64, 64, 64, 2048, 1, 128, 128), {}, "flash"),
    (HOPPER, (8, 32, 8, 512, 1, 128, 128), {}, "flash"),
    (HOPPER, (70000, 1, 1, 512, 512, 64, 64), {}, None),
    # Dropout: forward and gradient use one kernel; cuDNN supports multiples of one sixteenth.
    (HOPPER, LONG, {"dropout_p": 0.125}, "cudnn"),
    (HOPPER, LONG, {"dropout_p": 0.125, "is_backward": True}, "cudnn"),
    (HOPPER, LONG, {"dropout_p": 0.1}, "flash"),
    (HOPPER, LONG, {"dropout_p": 0.1, "is_backward": True}, "flash"),
    (HOPPER, LONG, {"dropout_p": 0.125, "added": BF16}, "cudnn"),
    (HOPPER, LONG, {"dropout_p": 0.1, "added": BF16}, None),
    (HOPPER, DECODE, {"dropout_p": 0.125}, "flash"),
    (HOPPER, SMALL, {"dropout_p": 0.5}, "cudnn"),
    (((9, 0), 92300), (2, 16, 16, 2048, 2048, 192, 192), {"dropout_p": 0.5}, "flash"),
    # Other machines: Blackwell as Hopper; an old cuDNN, or none; Turing has no kernel.
    (((10, 0), 91900), LONG, {}, "cudnn"),
    (((12, 0), 91900), LONG, {}, "flash"),
    (((9, 0), 91400), LONG, {}, "flash"),
    (((9, 0), 0), LONG, {"added": BF16}, "efficient"),
    (((7, 5), 91900), LONG, {}, None),
]


@pytest.mark.finding("G1")
@pytest.mark.parametrize(("kind", "shape", "how", "expected"), TABLE)
def test_the_kernel_that_a_call_takes(
    kind: tuple[tuple[int, int], int],
    shape: tuple[int, ...],
    how: dict[str, Any],
    expected: str | None,
) -> None:
    assert attention_kernels.name_for(facts_of(kind, shape, **how)) == expected


def facts_of(
    kind: tuple[tuple[int, int], int], shape: tuple[int, ...], **how: Any
) -> attention_kernels.AttentionCase:
    named: dict[str, Any] = dict(zip(("n", "h", "groups", "l", "s", "e", "v"), shape, strict=True))
    named |= {"dtype": BF16, "added": None, "dropout_p": 0.0, "is_causal": False} | how
    return attention_kernels.AttentionCase(attention_kernels.DeviceKind("cuda", *kind), **named)


def test_deterministic_gradients_are_not_cudnns() -> None:
    facts = facts_of(HOPPER, LONG, is_backward=True)
    torch.use_deterministic_algorithms(True)
    try:
        assert attention_kernels.name_for(facts) == "flash"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def hopper(use: Callable[..., Kernels], monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Stand-ins for the kernels of a Hopper GPU, for which no call counts as small."""
    monkeypatch.setattr(attention_kernels, "_SMALL", 0)
    return use(HOPPER)


# Layouts of query, key, value and grad; kernels do not support all of them directly.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda t: t,
    "heads beside": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "columns": lambda t: t.mT.contiguous().mT,
    "gaps": lambda t: torch.nn.functional.pad(t, (1, 2))[..., 1:-2],
}


@pytest.mark.finding("G1")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("grad_layout", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("e", "v"), [(8, 8), (20, 20), (16, 8), (256, 256)])
def test_cudnn(
    hopper: Kernels, e: int, v: int, layout: str, grad_layout: str, is_causal: bool
) -> None:
    shapes = [(2, 3, 5, e), (2, 3, 7, e), (2, 3, 7, v), (2, 3, 5, v)]
    *given, grad = (t.bfloat16() / 2 for t in draw(shapes))
    call = Attention("sdpfa_fwd", 0.0, is_causal, None)
    given = [LAYOUTS[layout](t) for t in given]
    compare(call, given, LAYOUTS[grad_layout](grad), 2e-2, is_causal=is_causal)
    assert hopper.calls == ["cudnn", "cudnn backward"]


@pytest.mark.finding("G1")
@pytest.mark.parametrize("kind", [HOPPER, AMPERE], ids=["hopper", "ampere"])
@pytest.mark.parametrize(("heads", "groups"), [(6, 2), (4, 1)])
def test_grouped_heads_are_not_repeated(
    use: Callable[..., Kernels],
    monkeypatch: pytest.MonkeyPatch,
    kind: tuple[tuple[int, int], int],
    heads: int,
    groups: int,
) -> None:
    """Kernels that support fewer key heads get them unrepeated. The memory-efficient kernel with a
    bias does not support them."""
    made = use(kind)
    monkeypatch.setattr(attention_kernels, "_SMALL", 0)
    one, other = (2, heads, 5, 16), (2, groups, 7, 16)
    q, k, v, grad = (t.bfloat16() / 2 for t in draw([one, other, other, one]))
    (bias,) = draw([(2, 1, 5, 7)], seed=7)
    call = Attention("sdpfa_fwd", 0.0, False, None, None if groups == 1 else heads // groups)
    for added in (None, bias.bfloat16()):
        out, sums, *seed = forward(call, (q, k, v), added, None)
        expected, lse = attend(grouped(q, k, v), added=added)
        torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(sums.double(), lse, rtol=1e-3, atol=1e-3)
        if added is None:
            found = backward(call, grad, (q, k, v), (out, sums, seed[0], seed[1]))
            for got, want in zip(found, grouped_gradients((q, k, v), grad), strict=True):
                torch.testing.assert_close(got.double(), want, rtol=3e-2, atol=3e-2)
    first, last = ("cudnn", "cudnn") if kind is HOPPER else ("flash", "efficient")
    assert made.calls == [first, f"{first} backward", last]
    assert made.heads_of_keys == [groups, groups, heads if last == "efficient" else groups]


@pytest.mark.finding("G1")
@pytest.mark.parametrize("shape", BIASES, ids=str)
@pytest.mark.parametrize("s", [5, 8, 57])
@pytest.mark.parametrize("how", ["bias", "mask", "both", "expanded mask", "odd"])
def test_what_is_added_by_cudnn(hopper: Kernels, shape: tuple[int, ...], s: int, how: str) -> None:
    """cuDNN gets a bias without repeated elements. Rows without scores are 0."""
    q, k, v = (t.bfloat16() / 2 for t in draw([(2, 3, 5, 8), (2, 3, s, 8), (2, 3, s, 8)]))
    sizes = [s if n < 0 else n for n in shape]
    bias = draw([sizes], seed=5)[0].bfloat16() if how in ("bias", "both", "odd") else None
    if bias is not None and how == "odd":  # rows begin anywhere
        bias = torch.nn.functional.pad(bias, (1, 2))[..., 1:-2]
    mask = draw([sizes], seed=6)[0] > 0 if "mask" in how or how == "both" else None
    if mask is not None:
        mask[-1, 0, -1] = False
        mask = mask.expand(2, 3, 5, s) if how == "expanded mask" else mask
    out, sums, *_ = forward(Attention("sdpfa_fwd", 0.0, False, None), (q, k, v), bias, mask)
    expected, lse = attend([t.double() for t in (q, k, v)], added=bias, mask=mask)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(sums.double(), lse, rtol=1e-3, atol=1e-3)
    assert hopper.calls == ["cudnn"]


# ------------------------------------------------------------------ one call of torch's
@pytest.mark.parametrize("kind", [HOPPER, AMPERE], ids=["hopper", "ampere"])
@pytest.mark.parametrize("is_small", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reads", [(True, False, False, False), (True, True, True, True)])
@pytest.mark.parametrize("s", [8, 57])
@pytest.mark.parametrize("has_bias", [False, True])
def test_plain_calls_give_what_forward_and_backward_give(
    use: Callable[..., Kernels],
    monkeypatch: pytest.MonkeyPatch,
    kind: tuple[tuple[int, int], int],
    is_small: bool,
    layout: str,
    reads: tuple[bool, ...],
    s: int,
    has_bias: bool,
) -> None:
    use(kind)
    monkeypatch.setattr(attention_kernels, "_SMALL", 1e9 if is_small else 0)
    shapes = [(2, 3, 5, 16), (2, 3, s, 16), (2, 3, s, 16), (2, 3, 5, 16)]
    q, k, v, grad = (LAYOUTS[layout](t.bfloat16() / 2) for t in draw(shapes))
    bias = draw([(2, 1, 5, s)], seed=4)[0].bfloat16() if has_bias else None
    call = Attention("sdpfa_fwd", 0.0, False, None)
    plain = plain_forward(call, (q, k, v), bias, None, reads=reads)
    assert plain is not None or layout in ("columns", "gaps") or has_bias
    expected = forward(call, (q, k, v), bias, None)
    if plain is not None:
        found = plain(q, k, v, bias)
        for got, want, is_read in zip(found, expected, reads, strict=False):
            if is_read:
                assert got.shape == want.shape and got.dtype == want.dtype
                assert torch.equal(got.reshape(-1).float(), want.reshape(-1).float())
    results = expected[0], expected[1], expected[2], expected[3]
    run = plain_backward(call, grad, (q, k, v), results)
    if run is not None and not has_bias:
        wants = backward(call, grad, (q, k, v), results)
        found = run(grad, q, k, v, expected[0], expected[1])
        assert all(torch.equal(a, b) for a, b in zip(found, wants, strict=True))
    # The output of a small call may have other strides than the query.
    assert run is not None or kind is AMPERE or is_small or layout in ("columns", "gaps")
