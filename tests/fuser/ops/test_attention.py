"""Scaled dot product attention and its gradient, against brute force in float64."""

# Ops are called with wrong arguments, and with options from dictionaries.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fuser import DataType, FusionDefinition, TensorView
from fuser.ops.reference import meaning
from fuser.ops.reference.attention_kernels import forward, plain_forward
from fuser.support.errors import (
    DefinitionError,
    DtypeError,
    InputError,
    UnsupportedError,
)
from tests.support.attention_reference import ATOL, D, attend, check, define, draw, gradients

pytestmark = pytest.mark.from_text


# (query's, key's, value's shapes)
SHAPES = {
    "square": ((2, 3, 5, 8), (2, 3, 5, 8), (2, 3, 5, 8)),
    "few keys": ((1, 2, 9, 16), (1, 2, 4, 16), (1, 2, 4, 16)),
    "many keys": ((2, 1, 3, 7), (2, 1, 33, 7), (2, 1, 33, 7)),
    "other values": ((2, 2, 4, 8), (2, 2, 6, 8), (2, 2, 6, 3)),
    "ones": ((1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1)),
    "long": ((1, 2, 64, 32), (1, 2, 64, 32), (1, 2, 64, 32)),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", list(ATOL), ids=str)
def test_forward_and_backward(dtype: DataType, is_causal: bool) -> None:
    fd = define(dtype=dtype, is_causal=is_causal)
    for seed, (query, key, value) in enumerate(SHAPES.values()):
        *operands, grad = given = draw([query, key, value, (*query[:3], value[3])], dtype, seed)
        wide = [t.double() for t in operands]
        expected = *attend(wide, is_causal=is_causal), *gradients(wide, grad, is_causal=is_causal)
        # Later runs repeat the plan of the first.
        for _ in range(4):
            check(fd.execute(given), expected, dtype)


@pytest.mark.parametrize("scale", [0.25, 2.0, -1.0, 0.0])
def test_scale_and_its_input(scale: float) -> None:
    shapes = [(2, 2, 4, 6)] * 4
    *operands, grad = given = draw(shapes)
    wide = [t.double() for t in operands]
    expected = *attend(wide, scale=scale), *gradients(wide, grad, scale=scale)
    check(define(scale=scale).execute(given), expected, D.Float)
    with FusionDefinition() as fd:
        tensors = [fd.define_tensor([-1] * 4) for _ in range(4)]
        factor, causal = fd.define_scalar(dtype=D.Double), fd.define_scalar(dtype=D.Bool)
        results = fd.ops.sdpfa_fwd(*tensors[:3], is_causal=causal, scale=factor)
        grads = fd.ops.sdpfa_bwd(
            tensors[3], *tensors[:3], *results[:2], None, causal, *results[2:], factor
        )
        for out in (*results, *grads):
            fd.add_output(out)
    # The numbers are inputs of each run.
    for is_causal, factor in itertools.product((False, True), (scale, 0.5)):
        how = {"is_causal": is_causal, "scale": factor}
        expected = *attend(wide, **how), *gradients(wide, grad, **how)  # pyright: ignore[reportArgumentType]
        check(fd.execute([*given, factor, is_causal]), expected, D.Float)


@pytest.mark.parametrize("layout", ["heads beside", "reversed", "strided", "expanded"])
def test_operands_lie_anywhere(layout: str) -> None:
    def lay(t: torch.Tensor) -> torch.Tensor:
        if layout == "heads beside":
            return t.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "reversed":
            return t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
        if layout == "strided":
            return torch.stack([t, t], -1).flatten(-2)[..., ::2]
        return t[:, :1].expand(t.shape)

    *operands, grad = given = [lay(t) for t in draw([(2, 3, 5, 8)] * 4)]
    wide = [t.double() for t in operands]
    check(define().execute(given), (*attend(wide), *gradients(wide, grad)), D.Float)


@pytest.mark.parametrize("axis", range(4))
def test_equal_rows_of_operands_make_results_of_their_own(axis: int) -> None:
    """Queries that are one row in memory attend to different keys. The sharded fuzzer found
    this."""
    shape, flags = (2, 3, 4, 8), [None if k == axis else False for k in range(4)]
    one = tuple(slice(0, 1) if k == axis else slice(None) for k in range(4))
    *operands, grad = given = [t[one].expand(shape) for t in draw([shape] * 4)]
    wide = [t.double() for t in operands]
    with FusionDefinition() as fd:
        tensors = [fd.define_tensor([-1] * 4, contiguity=flags) for _ in range(4)]
        results = fd.ops.sdpfa_fwd(*tensors[:3], is_causal=True)
        grads = fd.ops.sdpfa_bwd(
            tensors[3], *tensors[:3], *results[:2], None, True, *results[2:], None
        )
        for out in (*results, *grads):
            fd.add_output(out)
    expected = *attend(wide, is_causal=True), *gradients(wide, grad, is_causal=True)
    check(fd.execute(given), expected, D.Float)


def test_more_batches() -> None:
    """Axes before the batch axis are batches, too."""
    *operands, grad = given = draw([(2, 3, 2, 2, 4, 8)] * 4)
    wide = [t.double() for t in operands]
    check(define(rank=6).execute(given), (*attend(wide), *gradients(wide, grad)), D.Float)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [D.Float, D.BFloat16], ids=str)
def test_bias_and_mask(dtype: DataType, is_causal: bool) -> None:
    n, h, rows, columns = 2, 3, 4, 6
    operands = draw([(n, h, rows, 8), (n, h, columns, 8), (n, h, columns, 8)], dtype)
    (drawn,) = draw([(n, h, rows, columns)], dtype, seed=5)
    wide = [t.double() for t in operands]
    for has_bias, has_mask in ((True, False), (False, True), (True, True)):
        for axes in itertools.product((False, True), repeat=4):
            shape = [s if full else 1 for s, full in zip(drawn.shape, axes, strict=True)]
            bias = drawn[tuple(slice(0, s) for s in shape)].clone()
            mask = bias > -0.5
            mask[(0,) * 3] = False  # a row without scores
            with FusionDefinition() as fd:
                tensors = [fd.define_tensor([-1] * 4, dtype=dtype) for _ in range(3)]
                declared = [1 if s == 1 else -1 for s in shape]
                named: dict[str, TensorView] = {}
                given = [*operands]
                for name, kind, t in (("bias", dtype, bias), ("mask", D.Bool, mask)):
                    if (has_bias, has_mask)[name == "mask"]:
                        named[name] = fd.define_tensor(declared, dtype=kind)
                        given.append(t)
                for out in fd.ops.sdpfa_fwd(*tensors, is_causal=is_causal, **named):
                    fd.add_output(out)
            expected = attend(
                wide,
                added=bias if has_bias else None,
                mask=mask if has_mask else None,
                is_causal=is_causal,
            )
            check(fd.execute(given), expected, dtype)


def test_rows_without_scores_give_nothing() -> None:
    with FusionDefinition() as fd:
        tensors = [fd.define_tensor([-1] * 4) for _ in range(3)]
        bias = fd.define_tensor([-1, 1, 1, -1])
        for out in fd.ops.sdpfa_fwd(*tensors, bias)[:2]:
            fd.add_output(out)
    bias = torch.zeros(2, 1, 1, 5)
    bias[1] = -math.inf
    out, log_sumexp = fd.execute([*draw([(2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 4)]), bias])
    assert (out[1] == 0).all() and (log_sumexp[1] == -math.inf).all()
    assert torch.isfinite(log_sumexp[0]).all()


@pytest.mark.parametrize("leading", [(), (2,), (0,), (2, 1)], ids=str)
@pytest.mark.parametrize("empty", ["n", "h", "l", "s", "e", "v"])
def test_empty(empty: str, leading: tuple[int, ...]) -> None:
    sizes = {"n": 2, "h": 3, "l": 4, "s": 5, "e": 6, "v": 7} | {empty: 0}
    letters = ("nhle", "nhse", "nhsv", "nhlv")
    shapes = [[*leading, *(sizes[c] for c in one)] for one in letters]
    *operands, grad = given = draw(shapes)
    wide = [t.double() for t in operands]
    out, log_sumexp = attend(wide, scale=1.0)
    grads = gradients(wide, grad, scale=1.0)
    rank = 4 + len(leading)
    fd = define(scale=1.0, rank=rank)
    fd.execute(draw([(1,) * rank] * 4))
    for _ in range(3):
        check(fd.execute(given), (out, log_sumexp, *grads), D.Float)


def test_one_tensor_as_all_operands() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1] * 4)
        for out in fd.ops.sdpfa_fwd(x, x, x, is_causal=True):
            fd.add_output(out)
    (x,) = draw([(2, 2, 5, 4)])
    check(fd.execute([x]), attend([x.double()] * 3, is_causal=True), D.Float)


# ------------------------------------------------------------------ dropout
def test_dropout() -> None:
    """The dropped weights come from torch's generator, new in each run; the gradient drops the same
    ones."""
    p = 0.25
    fd = define(dropout_p=p)
    # Values that show the weights: output = weights @ I.
    eye = torch.eye(32).expand(1, 2, 32, 32).contiguous()
    *operands, grad = [*draw([(1, 2, 32, 8)] * 2), eye, torch.randn(1, 2, 32, 32)]
    wide = [t.double() for t in operands]
    seen: list[torch.Tensor] = []
    for seed in (1, 1, 2, None, None):
        if seed is not None:
            torch.manual_seed(seed)
        out, log_sumexp, key, _, *grads = fd.execute([*operands, grad])
        kept = (out != 0).double() / (1 - p)
        expected, lse = attend(wide, kept=kept)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(log_sumexp.double(), lse, rtol=1e-5, atol=1e-6)
        for one, want in zip(grads, gradients(wide, grad, kept=kept), strict=True):
            torch.testing.assert_close(one.double(), want, rtol=1e-4, atol=1e-5)
        assert abs(float((out == 0).double().mean()) - p) < 0.05
        assert key.view(torch.int64).any()
        seen.append(out)
    assert torch.equal(seen[0], seen[1])
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(seen[1:]))


def test_dropout_of_an_input_is_checked_in_each_run() -> None:
    with FusionDefinition() as fd:
        tensors = [fd.define_tensor([-1] * 4) for _ in range(3)]
        p = fd.define_scalar(dtype=D.Double)
        fd.add_output(fd.ops.sdpfa_fwd(*tensors, dropout_p=p)[0])
    given = draw([(1, 1, 4, 4)] * 3)
    wide = [t.double() for t in given]
    for _ in range(3):
        torch.testing.assert_close(fd.execute([*given, 0.0])[0].double(), attend(wide)[0])
    for wrong in (1.0, -0.1, math.nan):
        with pytest.raises(
            InputError, match=r"sdpfa_fwd: dropout_p must be at least 0 and below 1"
        ):
            fd.execute([*given, wrong])
    torch.testing.assert_close(fd.execute([*given, 0.0])[0].double(), attend(wide)[0])


# ------------------------------------------------------------------ refusals
@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"shape": [-1] * 3}, DefinitionError, "query needs at least 4 axes"),
        ({"dtype": D.Int}, DtypeError, "query must have a floating dtype"),
        ({"key": ([-1] * 4, D.Half)}, DtypeError, "key needs the dtype float"),
        ({"key": ([-1] * 5, D.Float)}, DefinitionError, "key needs 4 axes"),
        ({"key": ([2, 3, 4, 9], D.Float), "shape": [2, 3, 4, 8]}, DefinitionError, "sdpfa_fwd"),
        ({"key": ([2, 1, 4, 8], D.Float), "shape": [2, 3, 4, 8]}, None, ""),
        ({"key": ([2, 6, 4, 8], D.Float), "shape": [2, 3, 4, 8]}, DefinitionError, "sdpfa_fwd"),
        ({"key": ([2, 3, 4, 1], D.Float), "shape": [2, 3, 4, 8]}, DefinitionError, "along E"),
        ({"key": ([2, 3, 1, 8], D.Float), "shape": [2, 3, 4, 8]}, DefinitionError, "along S"),
        ({"mask": ([-1] * 4, D.Float)}, DtypeError, "mask needs the dtype bool"),
        ({"bias": ([-1] * 4, D.Bool)}, DtypeError, "bias needs the dtype"),
        ({"bias": ([-1] * 2, D.Float)}, DefinitionError, "bias needs 4 axes"),
        ({"dropout_p": 1.0}, DefinitionError, "dropout_p"),
        ({"dropout_p": -0.5}, DefinitionError, "dropout_p"),
        ({"dropout_p": True}, DtypeError, "dropout_p must be a real number"),
        ({"is_causal": 1}, DtypeError, "is_causal must be Bool"),
    ],
)
def test_what_is_no_attention(
    change: dict[str, object], error: type[Exception] | None, match: str
) -> None:
    shape, dtype = change.pop("shape", [-1] * 4), change.pop("dtype", D.Float)
    with FusionDefinition() as fd:

        def tensor(given: object) -> TensorView:
            return fd.define_tensor(given[0], contiguity=True, dtype=given[1])  # pyright: ignore

        named = {
            name: tensor(value) if isinstance(value, tuple) else value
            for name, value in change.items()
        }
        for name in ("query", "key", "value"):
            named.setdefault(name, tensor((shape, dtype)))
        if error is None:
            fd.add_output(fd.ops.sdpfa_fwd(**named)[0])
            return
        with pytest.raises(error, match=match) as found:
            fd.ops.sdpfa_fwd(**named)
        assert "sdpfa_fwd" in str(found.value)
        fd.add_output(fd.ops.set(tensor((shape, D.Float))))


def test_what_is_no_gradient() -> None:
    def call(**change: TensorView) -> None:
        whole = {n: t for n, t in tensors.items() if n not in change} | change
        fd.ops.sdpfa_bwd(**whole, dropout_p=0.0, is_causal=False, scale=None)

    with FusionDefinition() as fd:

        def tensor(shape: list[int], dtype: DataType = D.Float) -> TensorView:
            return fd.define_tensor(shape, dtype=dtype)

        names = ("grad_output", "query", "key", "value", "output")
        tensors = {name: tensor([2, 3, 4, 8]) for name in names}
        tensors |= {"logsumexp": tensor([2, 3, 4])}
        tensors |= {"philox_seed": tensor([2], D.UInt64), "philox_offset": tensor([], D.UInt64)}
        call()
        with pytest.raises(DtypeError, match="log_sumexp needs the dtype float"):
            call(logsumexp=tensor([2, 3, 4], D.Half))
        with pytest.raises(DtypeError, match="philox_seed needs the dtype uint64_t"):
            call(philox_seed=tensor([2], D.Int))
        with pytest.raises(DefinitionError, match="philox_seed needs 2 elements"):
            call(philox_seed=tensor([3], D.UInt64))
        # The gradient of an expanded operand would be a sum.
        with pytest.raises(DefinitionError, match="along N"):
            call(key=tensor([1, 3, 4, 8]))
        with pytest.raises(DefinitionError, match="sdpfa_bwd"):
            call(grad_output=tensor([2, 3, 5, 8]))
        fd.add_output(fd.ops.set(tensors["query"]))


def test_seeds_are_stored_and_not_computed_with() -> None:
    with FusionDefinition() as fd:
        seed = fd.define_tensor([2], dtype=D.UInt64)
        x = fd.define_tensor([2])
        for name, args in (
            ("set", (seed,)),
            ("add", (seed, seed)),
            ("sum", (seed,)),
            ("cast", (seed, D.Float)),
            ("eq", (seed, 1)),
            ("permute", (seed, [0])),
            ("reshape", (seed, [1, 2])),
            ("broadcast", (seed, [True, False])),
        ):
            with pytest.raises(UnsupportedError, match=r"uint64_t|stored"):
                getattr(fd.ops, name)(*args)
        fd.add_output(seed)
        fd.add_output(fd.ops.neg(x))
    given = torch.tensor([5, -7]).view(torch.uint64)
    for _ in range(3):
        out, _ = fd.execute([given, torch.zeros(2)])
        assert torch.equal(out.view(torch.int64), given.view(torch.int64))
    with pytest.raises(InputError):
        fd.execute([torch.tensor([5, 7]), torch.zeros(2)])


def test_what_nobody_reads_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that nothing reads is not computed: in first runs, in runs that repeat a plan, and
    in runs with new sizes."""
    seen: list[object] = []

    def spied(function: Callable[..., Any]) -> Callable[..., Any]:
        def spy(*given: Any, **named: Any) -> Any:
            seen.append(named.get("reads"))
            return function(*given, **named)

        return spy

    for function in (forward, plain_forward):
        monkeypatch.setattr(meaning, function.__name__, spied(function))
    with FusionDefinition() as fd:
        tensors = [fd.define_tensor([-1] * 4) for _ in range(3)]
        out, _, seed, _ = fd.ops.sdpfa_fwd(*tensors)
        fd.add_output(fd.ops.relu(out))
        fd.add_output(seed)
    for size in (4, 4, 4, 4, 5, 6, 4):
        operands = draw([(2, 3, size, 8)] * 3)
        got, zeros = fd.execute(operands)
        expected, _ = attend([t.double() for t in operands])
        torch.testing.assert_close(got.double(), expected.relu(), rtol=2e-6, atol=2e-6)
        assert not zeros.view(torch.int64).any()
    # Called once for each size. Dry runs, which compute nothing, ask for all results.
    assert seen[-1] == (True, False, True, False) and len(seen) >= 3
