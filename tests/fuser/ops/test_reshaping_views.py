"""Views, slices, pads, cats, factories and contractions: shapes, values and errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F

from fuser import ops
from fuser.ir.binding import bind_inputs
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.ops.nodes import FullOp, LinearOp, LoadStoreOp, MatmulOp
from fuser.ir.verify import verify_fusion
from fuser.ops.define import define_scalar, define_tensor
from fuser.ops.reference.meaning import evaluate_fusion, evaluate_into
from fuser.passes.concretize import concretize, refined_sizes
from fuser.support.errors import DefinitionError, DtypeError, InputError, UnsupportedError

D = DataType


def run(
    build: Callable[..., object], *inputs: torch.Tensor, static: bool = False
) -> tuple[Fusion, list[torch.Tensor]]:
    """Builds an op on tensors like the inputs, verifies and concretizes it, and evaluates it in
    float64."""
    fusion = Fusion()
    with FusionGuard(fusion):
        tvs = [
            define_tensor(
                sizes=list(x.shape), strides=list(x.stride()), dtype=D.Float, static_sizes=static
            )
            for x in inputs
        ]
        for tv in tvs:
            fusion.add_input(tv)
        built = build(*tvs)
        for out in built if isinstance(built, tuple) else (built,):
            assert isinstance(out, TensorView)
            fusion.add_output(out)
    verify_fusion(fusion)
    values = bind_inputs(fusion, inputs)
    concrete, _ = concretize(fusion, values)  # pyright: ignore[reportArgumentType]
    values = refined_sizes(values)  # pyright: ignore[reportArgumentType]
    return concrete, evaluate_fusion(concrete, inputs, dtype=torch.float64, values=values)


def rand(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("static", [False, True])
def test_broadcast_expand_squeeze_permute(static: bool) -> None:
    x = rand(3, 1, 5)

    def build(tv: TensorView) -> tuple[TensorView, ...]:
        wide = ops.expand(tv, [-1, 4, 5])
        return (
            ops.broadcast(tv, [False, True, False, False]),
            wide,
            ops.expand(tv, [2, 3, 1, 5]),
            ops.squeeze(tv, [1]),
            ops.squeeze(wide, [1], squeeze_expanded=True),
            ops.permute(tv, [2, 0, -2]),
            ops.permute(tv, [0, 1, 2]),
            ops.broadcast_in_dim(ops.squeeze(tv, [1]), [3, 2, 5], [0, 2]),
        )

    fusion, outs = run(build, x, static=static)
    expected = (
        x.unsqueeze(1),
        x.expand(3, 4, 5),
        x.expand(2, 3, 1, 5),
        x.squeeze(1),
        x.squeeze(1),
        x.permute(2, 0, 1),
        x,
        x.expand(3, 2, 5),
    )
    for out, ref in zip(outs, expected, strict=True):
        torch.testing.assert_close(out, ref.double())
    assert str(fusion.outputs[1].axis(1)).startswith("bS") and "ex 4" in str(fusion.outputs[1])
    assert fusion.outputs[6].has_root()


def test_views_share_memory_with_their_input() -> None:
    x = rand(4, 6).double()
    views: Sequence[Callable[[TensorView], TensorView]] = (
        lambda tv: ops.permute(tv, [1, 0]),
        lambda tv: ops.reshape(tv, [2, 2, 6]),
        lambda tv: ops.broadcast(tv, [True, False, False]),
        lambda tv: ops.slice(tv, [1, 2], [3, 4]),
        lambda tv: ops.expand(ops.broadcast(tv, [True, False, False]), [7, 4, 6]),
    )
    for view in views:
        _, (out,) = run(view, x, static=True)
        assert out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_view_errors() -> None:
    with FusionGuard(Fusion()):
        x = define_tensor([-1, 1, 4], contiguity=[True, None, True])
        with pytest.raises(DefinitionError, match="Can not squeeze non-broadcasting dimension"):
            ops.squeeze(x, [0])
        with pytest.raises(DefinitionError, match="Refusing to squeeze expanded IterDomain"):
            ops.squeeze(ops.expand(x, [-1, 5, 4]), [1])
        with pytest.raises(DefinitionError, match="Invalid expand size, 5, for"):
            ops.expand(x, [-1, 1, 5])
        with pytest.raises(
            DefinitionError,
            match=r"one False for each axis of T0.* \(3 axes\), got \[True, False\]",
        ):
            ops.broadcast(x, [True, False])
        with pytest.raises(DefinitionError, match="is specified more than once"):
            ops.broadcast_in_dim(x, [2, 3, 4], [0, 0, 1])
        with pytest.raises(
            DefinitionError, match=r"dims must contain each axis of .* once \(3 axes\)"
        ):
            ops.permute(x, [0, 0, 1])
        assert ops.broadcast(x, [False] * 3) is x
        assert isinstance(ops.expand(x, [-1, -1, 4]).definition(), LoadStoreOp)


def test_stride_order_sets_the_allocation_domain() -> None:
    with FusionGuard(Fusion()):
        out = ops.stride_order(define_tensor([-1, -1, -1]), [0, 2, 1])
        assert [a.number for a in out.domain.allocation] == [4, 5, 3]
        assert out.domain.contiguity == (True, True, True)


# ------------------------------------------------------------------ slice, pad, cat
SLICES = (
    ([0, 0], [5, 7]),
    ([1, 2], [4, 6]),
    ([2, 0], [100, 3]),
    ([0, 3], [5, 4]),
    ([5, 0], [9, 7]),
    ([2, 2], [2, 5]),
)


@pytest.mark.parametrize(("starts", "ends"), SLICES)
@pytest.mark.parametrize("static", [False, True])
def test_slice(starts: list[int], ends: list[int], static: bool) -> None:
    x = rand(5, 7)
    _, (out,) = run(lambda tv: ops.slice(tv, starts, ends), x, static=static)
    ref = x[starts[0] : ends[0], starts[1] : ends[1]]
    torch.testing.assert_close(out, ref.double())


def test_one_of_many_equal_elements_is_one_element() -> None:
    """An axis that is cropped to size 1 can be combined with other axes of size 1."""
    x, wide = rand(3, 1), rand(3, 1).expand(3, 6)

    def build(x: TensorView, wide: TensorView) -> tuple[TensorView, ...]:
        one = ops.slice(wide, [0, 2], [3, 3])
        return ops.squeeze(one, [1]), ops.expand(one, [3, 4]), ops.add(one, x)

    _, outs = run(build, x, wide, static=True)
    one = wide[:, 2:3]
    for out, expected in zip(outs, (one.squeeze(1), one.expand(3, 4), one + x), strict=True):
        torch.testing.assert_close(out, expected.double(), rtol=1e-6, atol=1e-6)


def test_slice_with_scalar_bounds() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        x = define_tensor([-1])
        start, end = define_scalar(D.Int), define_scalar(D.Int)
        for v in (x, start, end):
            fusion.add_input(v)
        fusion.add_output(ops.slice(x, [start], [end]))
    data = rand(9)
    for a, b in ((0, 9), (2, 5), (3, 20), (9, 9), (4, 5)):
        inputs = [data, a, b]
        values = bind_inputs(fusion, inputs)
        concrete, _ = concretize(fusion, values)  # pyright: ignore[reportArgumentType]
        values = refined_sizes(values)  # pyright: ignore[reportArgumentType]
        (out,) = evaluate_fusion(concrete, inputs, values=values)
        torch.testing.assert_close(out, data[a:b])


def test_slice_errors() -> None:
    with FusionGuard(Fusion()):
        x = define_tensor([-1, -1])
        for starts, ends, strides, text in (
            ([0], [1], None, "Number of tensor dimensions does not match slice dimensions!"),
            ([0, 0], [1], None, "Slice indexing attribute dimensions don't match!"),
            ([0, 0], [1, 1], [1], "Slice start_indices and strides don't match!"),
            ([-1, 0], [1, 1], None, "start_indices must be greater than or equal to 0"),
            ([3, 0], [1, 1], None, "end_indices must be greater than or equal to start_indices"),
        ):
            with pytest.raises(DefinitionError, match=text):
                ops.slice(x, starts, ends, strides)
        # A meaningful call that is not implemented yet.
        with pytest.raises(UnsupportedError, match="All slice operation strides must be of const"):
            ops.slice(x, [0, 0], [1, 1], [2, 1])
        with pytest.raises(TypeError):
            ops.slice(x, [0, 0], (1, 1))
        assert isinstance(ops.slice(x, [0, 0], [0, 1]).definition(), FullOp)


@pytest.mark.parametrize("widths", [[1, 2], [0, 3, 1, 0], [-1, 0], [-2, 3, 0, -1], [0, 0]])
def test_pad(widths: list[int]) -> None:
    x = rand(3, 5)
    _, outs = run(lambda tv: (ops.pad(tv, widths), ops.pad(tv, widths, 2.5)), x)
    torch.testing.assert_close(outs[0], F.pad(x, widths).double())
    torch.testing.assert_close(outs[1], F.pad(x, widths, value=2.5).double())


def test_pad_of_a_broadcast_and_of_nothing() -> None:
    _, (out,) = run(lambda tv: ops.pad(tv, [1, 1]), rand(3, 1))
    torch.testing.assert_close(out, F.pad(rand(3, 1), [1, 1]).double())
    _, (out,) = run(lambda tv: ops.pad(tv, [2, 1], 4.0), rand(3, 0))
    assert out.tolist() == [[4.0] * 3] * 3
    with FusionGuard(Fusion()), pytest.raises(DtypeError, match="same dtype"):
        ops.pad(define_tensor([-1], dtype=D.Int), [1, 1], 0.5)


@pytest.mark.parametrize("sizes", [(3, 4), (1, 5, 1), (0, 4), (2, 0, 3), (6,)])
@pytest.mark.parametrize("dim", [0, -1])
def test_cat(sizes: tuple[int, ...], dim: int) -> None:
    pieces = [rand(n, 2) if dim == 0 else rand(2, n) for n in sizes]
    fusion, (out,) = run(lambda *tvs: ops.cat(list(tvs), dim), *pieces)
    torch.testing.assert_close(out, torch.cat(pieces, dim).double())
    assert len(fusion.outputs[0].get_logical_domain()) == 2


def test_cat_manual_padding_and_errors() -> None:
    x, y = rand(2, 3), rand(2, 4)

    def build(a: TensorView, b: TensorView) -> TensorView:
        return ops.cat([ops.pad(a, [0, 4]), ops.pad(b, [3, 0])], 1, manual_padding=True)

    _, (out,) = run(build, x, y)
    torch.testing.assert_close(out, torch.cat([x, y], 1).double())
    with FusionGuard(Fusion()):
        a, b = define_tensor([3, 4]), define_tensor([3, 5])
        with pytest.raises(DefinitionError, match="Expected sizes to match"):
            ops.cat([a, b], 0)
        with pytest.raises(DtypeError, match="all tensors must have the same dtype"):
            ops.cat([a, ops.cast(b, D.Half)], 1)
        with pytest.raises(DefinitionError, match="all tensors must have the same number of axes"):
            ops.cat([a, define_tensor([3])], 0)
        with pytest.raises(UnsupportedError, match="manual_padding"):
            ops.cat([a, b], 1, True)


# ------------------------------------------------------------------ factories
def test_full_iota_triu() -> None:
    x = rand(3, 5)

    def build(tv: TensorView) -> tuple[TensorView, ...]:
        return (
            ops.full([2, tv.size(1)], 1.5, D.Double),
            ops.full([], 7, D.Int),
            ops.iota(tv.size(0), 2, 3),
            ops.iota(4, 0.5, -0.25, D.Float),
            ops.triu(tv),
            ops.triu(tv, 2),
            ops.triu(tv, -1),
        )

    fusion, outs = run(build, x)
    expected = (
        torch.full((2, 5), 1.5).double(),
        torch.tensor(7),
        torch.tensor([2, 5, 8]),
        torch.tensor([0.5, 0.25, 0.0, -0.25]).double(),
        *(torch.triu(x, k).double() for k in (0, 2, -1)),
    )
    for out, ref in zip(outs, expected, strict=True):
        torch.testing.assert_close(out, ref)
    assert fusion.outputs[2].dtype() is D.Int
    with FusionGuard(Fusion()):
        with pytest.raises(DefinitionError, match="step must be finite and not 0"):
            ops.iota(4, 0, 0)
        for step in (0.0, float("inf"), float("nan")):
            with pytest.raises(DefinitionError, match="step must be finite and not 0"):
                ops.iota(4, 0.0, step, D.Float)
        with pytest.raises(DtypeError):
            ops.iota(4, 0.5)
        with pytest.raises(DefinitionError, match="at least 0, got -1"):
            ops.full([-1], 0, D.Int)


# ------------------------------------------------------------------ contractions
MATMULS = (
    ((3, 4), (4, 5)),
    ((4,), (4, 5)),
    ((3, 4), (4,)),
    ((4,), (4,)),
    ((2, 3, 4), (4, 5)),
    ((3, 4), (2, 4, 5)),
    ((2, 1, 3, 4), (7, 4, 5)),
    ((3, 1), (1, 5)),
    ((0, 4), (4, 5)),
    ((3, 0), (0, 5)),
    ((2, 3, 4), (4,)),
    ((4,), (2, 4, 5)),
)


@pytest.mark.parametrize("shapes", MATMULS)
@pytest.mark.parametrize("static", [False, True])
def test_matmul(shapes: tuple[tuple[int, ...], tuple[int, ...]], static: bool) -> None:
    a, b = rand(*shapes[0]), rand(*shapes[1])
    fusion, (out,) = run(ops.matmul, a, b, static=static)
    torch.testing.assert_close(out, torch.matmul(a.double(), b.double()))
    for op in fusion.exprs:
        if isinstance(op, MatmulOp):
            for index in (0, 1):
                assert len(op.axis_map(index)) == len(op.out.domain.maybe_root)
            into = torch.empty(out.shape)
            address = into.data_ptr()
            evaluate_into(op, [a, b], into)
            assert into.data_ptr() == address
            torch.testing.assert_close(into, torch.matmul(a, b))


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (0,)])
@pytest.mark.parametrize("k", [4, 0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(lead: tuple[int, ...], k: int, with_bias: bool) -> None:
    inputs = [rand(*lead, k), rand(5, k), *([rand(5)] if with_bias else [])]
    fusion, (out,) = run(ops.linear, *inputs)
    torch.testing.assert_close(out, F.linear(*(x.double() for x in inputs)))
    for op in fusion.exprs:
        if isinstance(op, LinearOp):
            into = torch.empty(out.shape)
            evaluate_into(op, inputs, into)
            torch.testing.assert_close(into, F.linear(*inputs))


def test_linear_into_from_a_layout_without_matrix_view() -> None:
    fusion, _ = run(ops.linear, rand(2, 3, 4), rand(5, 4), rand(5))
    (op,) = fusion.exprs
    assert isinstance(op, LinearOp)
    x, weight, bias = rand(3, 2, 4).transpose(0, 1), rand(5, 4), rand(5)
    into = torch.empty(2, 3, 5)
    evaluate_into(op, [x, weight, bias], into)
    torch.testing.assert_close(into, F.linear(x, weight, bias))


def test_contraction_errors_and_domains() -> None:
    with FusionGuard(Fusion()):
        a, b = define_tensor([-1, 4]), define_tensor([5, -1])
        assert str(ops.linear(a, b)) == "T2_l_float[iS4{i0}, iS5{5}, rS6{4}]"
        with pytest.raises(DefinitionError, match="Expected sizes to match"):
            ops.matmul(a, define_tensor([3, 4]))
        with pytest.raises(DtypeError, match="one dtype"):
            ops.matmul(a, define_tensor([4, 4], dtype=D.Half))
        with pytest.raises(DefinitionError, match="Input B must be at least 2D"):
            ops.linear(a, define_tensor([4]))
        batch = define_tensor([2, 5, 4])
        made = [(a.kind.value, str(a.extent)) for a in ops.linear(a, batch).domain.logical]
        assert made == [("i", "2"), ("i", "i0"), ("i", "5"), ("r", "4")]
        with pytest.raises(
            DefinitionError, match=r"bias must have 2 axes, one less than T\d.*, but T\d.* has 1"
        ):
            ops.linear(a, batch, define_tensor([5]))
        with pytest.raises(DefinitionError, match=r"bias must have 1 axis, but T\d"):
            ops.linear(a, b, define_tensor([2, 5]))
        with pytest.raises(DefinitionError, match="Expected sizes to match"):
            ops.linear(a, batch, define_tensor([3, 5]))
        with pytest.raises(DefinitionError, match=r"at least 1 axis, but T.* has 0"):
            ops.matmul(a, define_tensor([]))


def test_binding_checks_equal_extents() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        x, y = define_tensor([-1]), define_tensor([-1])
        fusion.add_input(x)
        fusion.add_input(y)
        fusion.add_output(ops.add(x, y))
    with pytest.raises(InputError, match=r"axis 0 of T0.*but got 4: add: T0"):
        bind_inputs(fusion, [rand(3), rand(4)])
    with pytest.raises(InputError, match=r"input 0 .T0.* must have 1 axis, got a tensor of shape"):
        bind_inputs(fusion, [rand(3, 1), rand(4)])
    with pytest.raises(InputError, match="the program has 2 inputs, but 1 were passed"):
        bind_inputs(fusion, [rand(3)])
