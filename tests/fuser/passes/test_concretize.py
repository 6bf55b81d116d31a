"""Concretization: keys, `?` axes and tensors computed from them, empty extents, device axes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch

from fuser import ops
from fuser.ir.binding import bind_inputs
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.ops.nodes import BroadcastOp, FullOp, ReshapeOp
from fuser.ir.scalar.constructors import Number, Symbol
from fuser.ir.types import IterType, ParallelType
from fuser.ir.verify import verify_fusion
from fuser.ops.define import define_scalar, define_tensor
from fuser.ops.reference.meaning import evaluate_fusion
from fuser.passes.concretize import concretization_key, concretize, refined_sizes
from fuser.passes.fusion_passes import run_passes
from fuser.support.errors import InputError

pytestmark = pytest.mark.from_text

D = DataType
Inputs = Sequence[torch.Tensor | Number]


def defined(build: Callable[[Fusion], Sequence[TensorView]]) -> Fusion:
    fusion = Fusion()
    with FusionGuard(fusion):
        for out in build(fusion):
            fusion.add_output(out)
    return fusion


def tensor(fusion: Fusion, shape: list[int]) -> TensorView:
    tv = define_tensor(shape)
    fusion.add_input(tv)
    return tv


def sizes_of(fusion: Fusion, inputs: Inputs) -> dict[Symbol, int]:
    return bind_inputs(fusion, inputs)  # pyright: ignore[reportReturnType]


def reshape_program(fusion: Fusion) -> Sequence[TensorView]:
    """Defines exp(x.reshape(s)) * y, its row sums, and a reshape back."""
    x = tensor(fusion, [-1, -1])
    s = [define_scalar(D.Int), define_scalar(D.Int)]
    for scalar in s:
        fusion.add_input(scalar)
    y = tensor(fusion, [-1, -1])
    z = ops.mul(ops.exp(ops.reshape(x, s)), y)
    back = ops.reshape(ops.permute(z, [1, 0]), [-1])
    return ops.sum(z, dim=1), z, back


def reference(x: torch.Tensor, s: Sequence[int], y: torch.Tensor) -> list[torch.Tensor]:
    z = torch.exp(x.double().reshape(tuple(s))) * y.double()
    return [z.sum(1), z, z.t().reshape(-1)]


EXTENTS = (0, 1, 2, 3, 6)


def test_every_small_size_gives_torchs_values() -> None:
    fusion = defined(reshape_program)
    assert "?S" in str(fusion)
    keys: dict[object, str] = {}
    for shape in itertools.product(EXTENTS, repeat=4):
        if shape[0] * shape[1] != shape[2] * shape[3]:
            continue
        generator = torch.Generator().manual_seed(7)
        x, y = (torch.rand(p, generator=generator) for p in (shape[:2], shape[2:]))
        inputs = [x, *shape[2:], y]
        sizes = sizes_of(fusion, inputs)
        concrete, key = concretize(fusion, sizes)
        assert key == concretization_key(fusion, sizes)
        # Equal keys must have equal results.
        assert keys.setdefault(key, str(concrete)) == str(concrete)
        assert "?S" not in str(concrete)
        run_passes(concrete)
        outs = evaluate_fusion(concrete, inputs, dtype=torch.float64, values=refined_sizes(sizes))
        for out, ref in zip(outs, reference(x, shape[2:], y), strict=True):
            torch.testing.assert_close(out, ref, msg=lambda m, shape=shape: f"{shape}: {m}")
    assert len(keys) < 40
    assert "?S" in str(fusion), "the user's fusion does not change"


def test_one_key_for_all_sizes_of_a_structure() -> None:
    fusion = defined(reshape_program)

    def key(shape: Sequence[int]) -> object:
        inputs = [torch.zeros(*shape[:2]), *shape[2:], torch.zeros(*shape[2:])]
        return concretization_key(fusion, sizes_of(fusion, inputs))

    assert key((2, 9, 6, 3)) == key((4, 15, 20, 3))
    assert key((4, 6, 4, 6)) == key((2, 3, 2, 3)) != key((2, 9, 6, 3))
    assert key((4, 6, 24, 1)) != key((2, 9, 6, 3))


def test_nothing_dynamic_has_an_empty_key() -> None:
    fusion = defined(lambda f: [ops.exp(tensor(f, [-1, -1]))])
    assert concretization_key(fusion, sizes_of(fusion, [torch.zeros(3, 4)])) == ()
    assert concretization_key(fusion, sizes_of(fusion, [torch.zeros(1, 4)])) == ()
    assert concretization_key(fusion, sizes_of(fusion, [torch.zeros(0, 4)])) != ()


def test_extents_become_class_representatives() -> None:
    def build(fusion: Fusion) -> Sequence[TensorView]:
        x, y = tensor(fusion, [-1, -1]), tensor(fusion, [-1, 8])
        return [ops.add(x, y), ops.full([y.size(0)], 1.0, D.Float)]

    fusion = defined(build)
    concrete, _ = concretize(fusion, sizes_of(fusion, [torch.zeros(3, 8), torch.zeros(3, 8)]))
    assert [str(a.extent) for v in concrete.inputs for a in v.domain.logical] == [  # pyright: ignore[reportAttributeAccessIssue]
        "i0",
        "8",
        "i0",
        "8",
    ]
    assert "full({i0}" in str(concrete)


def test_a_wrong_count_names_tensor_numbers_and_line() -> None:
    fusion = defined(reshape_program)
    inputs = [torch.zeros(4, 6), 5, 5, torch.zeros(5, 5)]
    with pytest.raises(InputError, match=r"T0.*\[4, 6\] to \[5, 5\].*24 and 25.*test_concretize"):
        concretization_key(fusion, sizes_of(fusion, inputs))


def test_a_non_divisible_inferred_size_is_found() -> None:
    fusion = defined(lambda f: [ops.reshape(tensor(f, [-1]), [-1, 4])])
    concretize(fusion, sizes_of(fusion, [torch.zeros(8)]))
    with pytest.raises(InputError, match="Total element counts"):
        concretize(fusion, sizes_of(fusion, [torch.zeros(9)]))


def test_a_size_of_one_becomes_a_broadcast_and_spreads() -> None:
    fusion = defined(reshape_program)
    inputs = [torch.rand(2, 3), 6, 1, torch.rand(6, 1)]
    concrete, _ = concretize(fusion, sizes_of(fusion, inputs))
    kinds = {
        tv.number: [a.kind for a in tv.domain.logical] for e in concrete.exprs for tv in e.outputs
    }
    reshape = next(e.out for e in concrete.exprs if isinstance(e, BroadcastOp))
    assert kinds[reshape.number] == [IterType.iteration, IterType.broadcast]


def test_squeeze_and_expand_of_an_undecided_axis() -> None:
    def build(fusion: Fusion) -> Sequence[TensorView]:
        x, like = tensor(fusion, [-1, -1]), tensor(fusion, [-1, -1])
        r = ops.reshape(x, like.shape())
        return [ops.squeeze(r, [0]), ops.expand(r, [5, -1])]

    fusion = defined(build)
    inputs = [torch.rand(2, 3), torch.zeros(1, 6)]
    sizes = sizes_of(fusion, inputs)
    concrete, _ = concretize(fusion, sizes)
    first, second = evaluate_fusion(concrete, inputs, values=refined_sizes(sizes))
    torch.testing.assert_close(first, inputs[0].reshape(6))
    torch.testing.assert_close(second, inputs[0].reshape(1, 6).expand(5, 6))
    with pytest.raises(InputError, match="Can not squeeze non-broadcasting"):
        concretize(fusion, sizes_of(fusion, [torch.rand(2, 3), torch.zeros(2, 3)]))


def test_loop_transforms_of_the_user_follow() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        x, like = tensor(fusion, [-1, -1]), tensor(fusion, [-1, -1])
        out = ops.exp(ops.reshape(x, like.shape()))
        fusion.add_output(out)
        for tv in (out, out.definition().inputs[0]):  # pyright: ignore[reportOptionalMemberAccess]
            tv.set_device_mesh([0, 1])
            tv.outer_split(0, 2)
            tv.axis(0).parallelize(ParallelType.mesh_x)
    inputs = [torch.rand(2, 6), torch.zeros(4, 3)]
    concrete, _ = concretize(fusion, sizes_of(fusion, inputs))
    verify_fusion(concrete)
    reshape = next(e for e in concrete.exprs if isinstance(e, ReshapeOp))
    for tv in (reshape.out, concrete.outputs[0]):
        assert tv.axis(0).ptype is ParallelType.mesh_x
        assert [str(a.extent) for a in tv.domain.loop] == ["2", "( ceilDiv(i3, 2) )", "i4"]
        assert all(a.kind is IterType.iteration for a in tv.domain.loop)


def test_nothing_to_compute_becomes_full() -> None:
    def build(fusion: Fusion) -> Sequence[TensorView]:
        x, w = tensor(fusion, [-1, -1]), tensor(fusion, [-1, -1])
        b = tensor(fusion, [-1])
        return [ops.linear(x, w, b), ops.matmul(x, ops.permute(w, [1, 0])), ops.relu(x)]

    fusion = defined(build)
    for shape in itertools.product((0, 2), (0, 3), (0, 4)):
        m, n, k = shape
        inputs = [torch.rand(m, k), torch.rand(n, k), torch.rand(n)]
        sizes = sizes_of(fusion, inputs)
        concrete, _ = concretize(fusion, sizes)
        outs = evaluate_fusion(concrete, inputs, values=refined_sizes(sizes))
        x, w, b = inputs
        for out, ref in zip(outs, (torch.nn.functional.linear(x, w, b), x @ w.t(), x), strict=True):
            torch.testing.assert_close(out, ref)
        if 0 in (m, k):
            assert isinstance(concrete.outputs[2].definition(), FullOp)


# ------------------------------------------------------------------ small passes
def test_broadcast_then_squeeze_cancels() -> None:
    def build(fusion: Fusion) -> Sequence[TensorView]:
        x = tensor(fusion, [-1])
        wide = ops.broadcast(x, [True, False, True])
        return [
            ops.exp(ops.squeeze(wide, [0, 2])),
            ops.exp(ops.squeeze(wide, [0])),
            ops.squeeze(wide, [0, 2]),
        ]

    fusion = defined(build)
    run_passes(fusion)
    text = fusion.print_math()
    assert "squeeze" not in text and text.count("broadcast(") == 1 and text.count("reshape(") == 1
    x = torch.rand(5)
    outs = evaluate_fusion(fusion, [x])
    torch.testing.assert_close(outs, [x.exp(), x.exp().unsqueeze(1), x])


def test_only_lossless_casts_are_dropped() -> None:
    def build(fusion: Fusion) -> Sequence[TensorView]:
        x = define_tensor([-1], dtype=D.Half)
        y = tensor(fusion, [-1])
        fusion.add_input(x)
        there = ops.cast(ops.cast(x, D.Float), D.Half)
        rounded = ops.cast(ops.cast(y, D.Half), D.Float)
        return [ops.relu(there), ops.cast(ops.cast(x, D.Float), D.Double), rounded]

    fusion = defined(build)
    run_passes(fusion)
    text = fusion.print_math()
    assert "__half2float(T0" not in text and "__float2half(T1" in text
    y, x = torch.randn(9), torch.randn(9).half()
    outs = evaluate_fusion(fusion, [y, x])
    torch.testing.assert_close(outs, [x.relu(), x.double(), y.half().float()])


def padded_by_scalars(fusion: Fusion) -> Sequence[TensorView]:
    """Defines x + n, padded by n elements in front and up to the size of y behind."""
    x, y = tensor(fusion, [-1]), tensor(fusion, [-1])
    n = define_scalar(D.Int)
    fusion.add_input(n)
    behind = ops.sub(ops.sub(y.size(0), x.size(0)), n)
    return [ops.add(ops.pad(ops.exp(x), [n, behind]), n)]


def test_widths_of_0_belong_to_no_class() -> None:
    fusion = defined(padded_by_scalars)
    texts: dict[object, set[str]] = {}
    for have, want, n in itertools.product((0, 1, 3, 4), (1, 3, 5), (-1, 0, 1)):
        x = torch.rand(have)
        inputs = [x, torch.zeros(want), n]
        sizes = sizes_of(fusion, inputs)
        concrete, key = concretize(fusion, sizes)
        texts.setdefault(key, set()).add(str(concrete))
        (out,) = evaluate_fusion(concrete, inputs, dtype=torch.float64, values=refined_sizes(sizes))
        kept = {k + n: e for k, e in enumerate(x.double().exp())}
        expected = (
            torch.tensor([float(kept.get(k, 0.0)) for k in range(want)], dtype=torch.float64) + n
        )
        torch.testing.assert_close(out, expected, msg=lambda m, i=(have, want, n): f"{i}: {m}")
    assert all(len(found) == 1 for found in texts.values()) and len(texts) <= 4


@pytest.mark.parametrize("is_manual", [False, True])
def test_a_slice_stays_on_its_axis(is_manual: bool) -> None:
    def build(fusion: Fusion) -> Sequence[TensorView]:
        x, n, m = tensor(fusion, [-1, 4]), define_scalar(D.Int), define_scalar(D.Int)
        fusion.add_input(n)
        fusion.add_input(m)
        return [ops.slice(ops.exp(x), [n, 0], [m, 4], manual_normalization=is_manual)]

    fusion = defined(build)
    for size, n, m in itertools.product((0, 1, 3), (-1, 0, 2, 4), (-2, 0, 1, 3, 4)):
        inputs = [torch.rand(size, 4), n, m]
        sizes = sizes_of(fusion, inputs)
        if min(n, m) >= 0 and (not is_manual or n <= m <= size):
            concrete, _ = concretize(fusion, sizes)
            values = refined_sizes(sizes)
            (out,) = evaluate_fusion(concrete, inputs, dtype=torch.float64, values=values)
            torch.testing.assert_close(out, inputs[0][n:m].double().exp())
            continue
        with pytest.raises(InputError) as caught:
            concretize(fusion, sizes)
        assert "test_concretize" in str(caught.value)
        if n < 0 <= m <= size:
            found = (
                f"slice: [{n}, {m}) is outside of axis iS2{{i0}} of T1_l_float[iS2{{i0}}, iS3{{4}}]"
            )
            assert f"{found}, which has {size} elements" in str(caught.value)
