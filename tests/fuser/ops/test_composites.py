"""Ops of torch.nn.functional: values, dtypes and errors are torch's, and each needs as few kernels
as a version written by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fuser import DataType, FusionDefinition
from fuser.ir.op import walk
from fuser.multidevice import Communicator, DeviceMesh, shard_tensor
from fuser.support.errors import DefinitionError, DtypeError, FuserError
from hostir.ir.ops import LaunchKernel
from hostir.ir.program import HostIrContainer
from multidevice import simulate
from tests.support.cuts import cut, shards

pytestmark = [pytest.mark.finding("G29"), pytest.mark.from_text]
Tensor = torch.Tensor
Build = Callable[..., Any]
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 4e-6, torch.float64: 1e-11, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def define(build: Build, given: Sequence[Tensor], *, static: bool = False) -> FusionDefinition:
    with FusionDefinition() as fd:
        made = build(fd, *(fd.from_pytorch(t, static) for t in given))
        for tv in made if isinstance(made, tuple) else (made,):
            fd.add_output(tv)
    return fd


def run(build: Build, *given: Tensor, static: bool = False) -> Tensor:
    """Returns the first result, after checking that a run from the definition's text has the
    same."""
    fd = define(build, given, static=static)
    (found,) = fd.execute(list(given))
    names: dict[str, Any] = {"FusionDefinition": FusionDefinition, "DataType": DataType}
    exec("import torch\n" + repr(fd), names)
    with FusionDefinition() as again:
        names["nvfuser_fusion"](again)
    torch.testing.assert_close(again.execute(list(given)), [found], rtol=0, atol=0, equal_nan=True)
    return found


def check(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype is dtype and found.shape == expected.shape
    bound = TOLERANCE[dtype]
    torch.testing.assert_close(
        found.double(), expected.double(), rtol=bound, atol=bound, equal_nan=True
    )


# ------------------------------------------------------------------ values
# All dtypes, in calls of all kinds of extents and dims: `test_rows` has their products.
SHAPES: tuple[tuple[tuple[int, ...], torch.dtype, int], ...] = (
    ((), torch.float32, -1),
    ((1,), torch.float16, 0),
    ((0,), torch.float32, 0),
    ((3, 0), torch.bfloat16, -1),
    ((3, 0), torch.float32, 0),
    ((5, 13), torch.float64, 0),
    ((5, 13), torch.bfloat16, 1),
    ((4, 1), torch.float32, -1),
    ((2, 3, 11), torch.float16, -2),
)
ALONG: dict[str, tuple[Build, Callable[..., Tensor]]] = {
    "softmax": (lambda fd, x, d: fd.ops.softmax(x, d), lambda x, d: F.softmax(x, d)),
    "log_softmax": (
        lambda fd, x, d: fd.ops.log_softmax(x, dim=d),
        lambda x, d: F.log_softmax(x, d),
    ),
    "mean": (lambda fd, x, d: fd.ops.mean(x, d), lambda x, d: x.mean(d)),
    "mean_kept": (
        lambda fd, x, d: fd.ops.mean(x, dims=[d], keepdim=True),
        lambda x, d: x.mean(d, keepdim=True),
    ),
}


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", ALONG)
def test_composites_along_an_axis_equal_torch(name: str, static: bool) -> None:
    build, expected = ALONG[name]
    shapes = [((5, 13), torch.float32, -1)] if static else SHAPES
    for shape, dtype, dim in shapes:
        x = draw(*shape, dtype=dtype)
        found = run(lambda fd, x, dim=dim: build(fd, x, dim), x, static=static)
        check(found, expected(x.double(), dim), dtype)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "mean"])
def test_composites_of_masked_rows_infinities_and_nan_equal_torch(name: str) -> None:
    x, inf, nan = draw(6, 9, dtype=torch.float32), float("inf"), float("nan")
    x[0], x[1, 2:], x[2, 3], x[3, 4], x[4] = -inf, -inf, inf, nan, 3e38
    build, expected = ALONG[name]
    for dim in (0, 1):
        check(run(lambda fd, x, dim=dim: build(fd, x, dim), x), expected(x, dim), x.dtype)


def test_log_softmax_of_large_numbers_keeps_its_digits() -> None:
    x = draw(3, 8, dtype=torch.float32) + 1e6
    check(run(lambda fd, x: fd.ops.log_softmax(x, 1), x), F.log_softmax(x.double(), 1), x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["softmax", "mean"])
def test_composites_are_cast_to_the_given_dtype_first(name: str, dtype: torch.dtype) -> None:
    for x in (draw(4, 6), torch.arange(24).reshape(4, 6)):
        of_torch = torch.mean if name == "mean" else getattr(F, name)
        found = run(lambda fd, x: getattr(fd.ops, name)(x, 1, dtype=dtype), x)
        check(found, of_torch(x.to(dtype).double(), 1), dtype)


@pytest.mark.finding("G8")
@pytest.mark.parametrize("keepdim", [False, True])
def test_mean_over_a_list_of_no_axes_is_that_over_all(keepdim: bool) -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    for values in (x, x[0, 0]):
        with FusionDefinition() as fd:
            t = fd.from_pytorch(values)
            fd.add_output(fd.ops.mean(t, [], keepdim))
            fd.add_output(fd.ops.mean(t, dims=[], keepdim=keepdim))
        for out in fd.execute([values]):
            torch.testing.assert_close(out, torch.mean(values, [], keepdim))


@pytest.mark.finding("G8")
def test_what_mean_refuses_names_mean_alone() -> None:
    with FusionDefinition() as fd:
        x, scalar = fd.define_tensor([-1, -1]), fd.define_tensor([])
        for call in (
            lambda: fd.ops.mean(x, 2),
            lambda: fd.ops.mean(x, [0, 0]),
            lambda: fd.ops.mean(x, 0, dims=[0]),
            lambda: fd.ops.mean(scalar, 1),
        ):
            with pytest.raises(FuserError, match=r"^mean") as caught:
                call()
            assert "sum" not in str(caught.value).split(" (at ")[0]
        with pytest.raises(FuserError, match=r"^sum: No reduction axis specified for T0"):
            fd.ops.sum(x, [])
        fd.add_output(fd.ops.mean(x))


def test_mean_of_several_axes_and_of_all_equals_torch() -> None:
    x = draw(2, 5, 3)
    check(run(lambda fd, x: fd.ops.mean(x), x), x.mean(), x.dtype)
    check(run(lambda fd, x: fd.ops.mean(x, [0, -1], True), x), x.mean([0, -1], True), x.dtype)
    z = torch.complex(x, -x)
    torch.testing.assert_close(run(lambda fd, z: fd.ops.mean(z, 1), z), z.mean(1))
    # The largest half is 65504: the sum is beyond it, the mean is not.
    y = torch.full((4, 4096), 300.0, dtype=torch.float16)
    check(run(lambda fd, y: fd.ops.mean(y, 1), y), y.double().mean(1), y.dtype)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_equals_torch(approximate: str) -> None:
    inf = float("inf")
    ends = torch.tensor([0.0, -0.0, 1e4, -1e4, inf, -inf, float("nan")])
    for dtype in FLOATS[::2]:
        x = torch.cat([3 * draw(64, dtype=dtype), ends.to(dtype)])
        found = run(lambda fd, x: fd.ops.gelu(x, approximate=approximate), x)
        check(found, F.gelu(x.double(), approximate=approximate), dtype)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_norms_equal_torch(count: int, static: bool) -> None:
    shapes = ((3, 7), (2, 1), (3, 0), (2, 3, 5, 4))
    for dtype, shape in zip(FLOATS, shapes[-1:] * 4 if static else shapes, strict=True):
        x, last = draw(*shape, dtype=dtype), shape[-count:]
        w, b = (draw(*last, dtype=dtype, seed=s) for s in (1, 2))
        wide = x.double(), w.double(), b.double()

        def sizes(x: Any, last: Sequence[int] = last) -> list[Any]:
            return list(last) if static else x.shape()[-count:]

        found = run(lambda fd, x, w, b: fd.ops.layer_norm(x, sizes(x), w, b), x, w, b)
        check(found, F.layer_norm(wide[0], last, *wide[1:]), dtype)
        found = run(lambda fd, x, b: fd.ops.layer_norm(x, sizes(x), bias=b, eps=0.1), x, b)
        check(found, F.layer_norm(wide[0], last, None, wide[2], 0.1), dtype)
        found = run(lambda fd, x, w: fd.ops.rms_norm(x, sizes(x), w, eps=0.1), x, w)
        check(found, F.rms_norm(wide[0], last, wide[1], 0.1), dtype)


def test_rms_norm_without_eps_takes_that_of_the_dtype_it_computes_in() -> None:
    for dtype in FLOATS:
        x = 1e-4 * draw(2, 8, dtype=dtype)
        check(run(lambda fd, x: fd.ops.rms_norm(x, [8]), x), F.rms_norm(x, (8,)), dtype)


def test_norms_of_half_take_weights_in_float() -> None:
    x, w = draw(3, 8, dtype=torch.bfloat16), draw(8, dtype=torch.float32, seed=1)
    for name in ("layer_norm", "rms_norm"):
        found = run(lambda fd, x, w, name=name: getattr(fd.ops, name)(x, [8], w, eps=1e-5), x, w)
        expected = getattr(F, name)(x.double(), (8,), w.double(), eps=1e-5)
        check(found, expected, x.dtype)


# ------------------------------------------------------------------ dropout
@pytest.mark.parametrize("dtype", FLOATS)
def test_dropout_keeps_the_share_that_is_asked_for_and_draws_anew(dtype: torch.dtype) -> None:
    x = draw(200, 300, dtype=dtype).abs() + 1
    fd = define(lambda fd, x: fd.ops.dropout(x, 0.25), [x])
    torch.manual_seed(5)
    first, second = fd.execute([x])[0], fd.execute([x])[0]
    torch.manual_seed(5)
    assert torch.equal(fd.execute([x])[0], first) and not torch.equal(first, second)
    kept = first != 0
    check(first[kept], x.double()[kept] / 0.75, dtype)
    # Six standard deviations of the share of kept elements.
    assert abs(kept.double().mean().item() - 0.75) < 6 * (0.75 * 0.25 / x.numel()) ** 0.5


def test_dropout_of_all_of_nothing_and_outside_of_training_equals_torch() -> None:
    x = torch.tensor([1.0, -2.0, float("inf"), float("nan"), 0.0])
    for p, training in ((0.0, True), (1.0, True), (0.5, False), (1.0, False)):
        found = run(lambda fd, x, p=p, t=training: fd.ops.dropout(x, p, t), x)
        check(found, F.dropout(x, p, training), x.dtype)
    infinite = torch.full((64,), float("inf"))
    found = run_once(lambda fd, x: fd.ops.dropout(x), infinite)
    assert found.isinf().any() and found.isnan().any() and not found.isfinite().any()


def run_once(build: Build, *given: Tensor) -> Tensor:
    return define(build, given).execute(list(given))[0]


# ------------------------------------------------------------------ cross entropy
LOGITS = ((5,), (4, 7), (3, 5, 2), (3, 1), (0, 4))


def _losses(x: Tensor, weight: Tensor | None, target: Tensor, **named: Any) -> Tensor:
    w = None if weight is None else weight.double()
    is_index = not target.is_floating_point()
    return F.cross_entropy(x.double(), target.long() if is_index else target.double(), w, **named)


@pytest.mark.parametrize(
    ("reduction", "weighted", "smoothing"),
    [("none", False, 0.0), ("mean", True, 0.0), ("mean", False, 0.3), ("sum", True, 0.3)],
)
def test_cross_entropy_equals_torch(reduction: str, weighted: bool, smoothing: float) -> None:
    for shape in LOGITS:
        dtype = torch.bfloat16 if shape == (3, 5, 2) else torch.float32
        x, dim = draw(*shape, dtype=dtype), min(len(shape) - 1, 1)
        classes = shape[dim]
        w = draw(classes, dtype=dtype, seed=3).abs() if weighted else None
        indices = (draw(*shape, seed=4).argmax(dim),)
        for target in (*indices, F.softmax(draw(*shape, seed=5), dim).to(dtype)):
            named: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
            if not target.is_floating_point() and classes > 1:
                named["ignore_index"] = 1
            given = [x, target, *([] if w is None else [w])]
            found = run(lambda fd, *tvs, n=named: fd.ops.cross_entropy(*tvs, **n), *given)
            expected = _losses(x, w, target, **named)
            scale = max(1.0, expected.abs().nan_to_num().max().item() if expected.numel() else 1.0)
            check(found / scale, expected / scale, dtype)


def test_cross_entropy_of_ignored_and_impossible_targets() -> None:
    x = draw(4, 3, dtype=torch.float32)
    ignored = torch.tensor([-100, 0, -100, 2], dtype=torch.int32)
    for reduction in ("none", "mean"):
        for target in (ignored, torch.full_like(ignored, -100)):
            found = run(
                lambda fd, x, t, r=reduction: fd.ops.cross_entropy(x, t, reduction=r), x, target
            )
            check(found, F.cross_entropy(x, target.long(), reduction=reduction), x.dtype)
    wrong = torch.tensor([3, 0, -1, 2])
    found = run(lambda fd, x, t: fd.ops.cross_entropy(x, t, reduction="none"), x, wrong)
    assert found.isnan().tolist() == [True, False, True, False]


def test_cross_entropy_of_masked_classes_equals_torch() -> None:
    x, inf = draw(4, 6, dtype=torch.float32), float("inf")
    x[0, 1:], x[1, 2], x[2] = -inf, -inf, -inf
    target = torch.tensor([0, 2, 1, 5])
    found = run(lambda fd, x, t: fd.ops.cross_entropy(x, t, reduction="none"), x, target)
    check(found, F.cross_entropy(x, target, reduction="none"), x.dtype)


def test_cross_entropy_of_probabilities_promotes_dtypes_as_torch() -> None:
    x, p = draw(4, 6, dtype=torch.float16), F.softmax(draw(4, 6, dtype=torch.float32), 1)
    found = run(lambda fd, x, p: fd.ops.cross_entropy(x, p), x, p)
    assert found.dtype is F.cross_entropy(x, p).dtype is torch.float32
    torch.testing.assert_close(found.double(), F.cross_entropy(x.double(), p.double()))


# ------------------------------------------------------------------ kernels
def kernels(program: HostIrContainer) -> int:
    return sum(isinstance(op, LaunchKernel) for op in walk(program.ops))


KERNELS: dict[str, tuple[Build, int]] = {
    "softmax": (lambda fd, x, w, t: fd.ops.softmax(x, -1), 1),
    "softmax_columns": (lambda fd, x, w, t: fd.ops.softmax(x, 0), 1),
    "log_softmax": (lambda fd, x, w, t: fd.ops.log_softmax(x, -1), 1),
    "mean": (lambda fd, x, w, t: fd.ops.mean(x, -1), 1),
    "layer_norm": (lambda fd, x, w, t: fd.ops.layer_norm(x, [x.size(-1)], w, w), 1),
    "rms_norm": (lambda fd, x, w, t: fd.ops.rms_norm(x, [x.size(-1)], w), 1),
    "gelu": (lambda fd, x, w, t: fd.ops.gelu(fd.ops.add(x, w)), 1),
    "dropout": (lambda fd, x, w, t: fd.ops.add(fd.ops.dropout(x), x), 1),
    "cross_entropy": (lambda fd, x, w, t: fd.ops.cross_entropy(x, t, reduction="none"), 1),
    "smoothed": (
        lambda fd, x, w, t: fd.ops.cross_entropy(x, t, reduction="none", label_smoothing=0.1),
        1,
    ),
    "cross_entropy_mean": (lambda fd, x, w, t: fd.ops.cross_entropy(x, t), 2),
    "norm_and_gelu": (lambda fd, x, w, t: fd.ops.gelu(fd.ops.rms_norm(x, [x.size(-1)], w)), 1),
}


@pytest.mark.parametrize("options", [[], ["schedules_for(h200)"]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KERNELS)
def test_composites_are_as_few_kernels_as_what_is_written_by_hand(
    name: str, dtype: torch.dtype, options: list[str]
) -> None:
    build, count = KERNELS[name]
    x, w, t = draw(33, 512, dtype=dtype), draw(512, dtype=dtype), torch.arange(33)
    fd = define(build, [x, w, t])
    fd.execute([x, w, t], _enable_options=options)
    assert kernels(fd.fec.host_program()) == count


# ------------------------------------------------------------------ what is refused
REFUSED: list[tuple[Build, type[FuserError], str]] = [
    (lambda fd, x, i: fd.ops.softmax(i, -1), DtypeError, "softmax: a floating dtype"),
    (lambda fd, x, i: fd.ops.softmax(x, -1, DataType.Int), DtypeError, "softmax: a floating dtype"),
    (
        lambda fd, x, i: fd.ops.softmax(x, 2),
        DefinitionError,
        "boundary index 2.*: it has 2 axes, so .* must be from -2 to 1",
    ),
    (lambda fd, x, i: fd.ops.log_softmax(i, 0), DtypeError, "log_softmax: a floating dtype"),
    (lambda fd, x, i: fd.ops.gelu(i), DtypeError, "gelu: a floating dtype"),
    (lambda fd, x, i: fd.ops.gelu(x, "erf"), DefinitionError, '"none" or "tanh", got \'erf\''),
    (lambda fd, x, i: fd.ops.mean(i), DtypeError, "mean: a floating or complex dtype"),
    (lambda fd, x, i: fd.ops.dropout(i), DtypeError, "dropout: a floating dtype"),
    (lambda fd, x, i: fd.ops.dropout(x, 1.5), DefinitionError, "from 0 to 1, got 1.5"),
    (lambda fd, x, i: fd.ops.dropout(x, float("nan")), DefinitionError, "from 0 to 1, got nan"),
    (lambda fd, x, i: fd.ops.layer_norm(i, [6]), DtypeError, "layer_norm: a floating dtype"),
    (
        lambda fd, x, i: fd.ops.layer_norm(x, [5]),
        DefinitionError,
        "sizes to match, but found 6 and",
    ),
    (lambda fd, x, i: fd.ops.layer_norm(x, []), DefinitionError, "has 0 sizes"),
    (lambda fd, x, i: fd.ops.rms_norm(x, [4, 6], i), DefinitionError, "sizes to match|dtype"),
    (lambda fd, x, i: fd.ops.rms_norm(x, [1, 4, 6]), DefinitionError, "has 3 sizes"),
    (lambda fd, x, i: fd.ops.cross_entropy(i, i), DtypeError, "cross_entropy: a floating dtype"),
    (
        lambda fd, x, i: fd.ops.cross_entropy(x, i, reduction="max"),
        DefinitionError,
        "none, mean, sum, got 'max'",
    ),
    (lambda fd, x, i: fd.ops.cross_entropy(x, x, i), DefinitionError, "weight"),
    (lambda fd, x, i: fd.ops.cross_entropy(x, i), DefinitionError, "class indices"),
    (
        lambda fd, x, i: fd.ops.cross_entropy(x, x, ignore_index=1),
        DefinitionError,
        "applies to class indices only",
    ),
    (
        lambda fd, x, i: fd.ops.cross_entropy(x, x, label_smoothing=2.0),
        DefinitionError,
        "from 0 to 1, got 2.0",
    ),
]


@pytest.mark.parametrize(("build", "kind", "text"), REFUSED)
def test_refused_calls_name_op_numbers_and_the_users_line(
    build: Build, kind: type[FuserError], text: str
) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 6], contiguity=True)
        i = fd.define_tensor([4, 5], contiguity=True, dtype=DataType.Int)
        with pytest.raises(kind, match=text) as caught:
            build(fd, x, i)
        assert f"{__file__}:" in str(caught.value)


def test_a_target_of_one_row_is_not_repeated() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 6], contiguity=True)
        one = fd.define_tensor([1], contiguity=True, dtype=DataType.Int)
        weight = fd.define_tensor([1], contiguity=True)
        with pytest.raises(DefinitionError, match="sizes to match"):
            fd.ops.cross_entropy(x, one)
        with pytest.raises(DefinitionError, match="sizes to match"):
            fd.ops.layer_norm(x, [6], weight)


def test_a_definition_shows_the_statements_that_a_composite_became() -> None:
    fd = define(lambda fd, x: fd.ops.softmax(x, -1), [draw(2, 3)])
    text = repr(fd)
    assert "fd.ops.exp" in text and "fd.ops.softmax" not in text
    assert all(op.where.startswith(f"{__file__}:") for op in fd.fusion.exprs)


# ------------------------------------------------------------------ on ranks
SHARDED: dict[str, tuple[Build, Callable[..., Tensor], Sequence[tuple[int, ...]]]] = {
    "softmax": (lambda fd, x: fd.ops.softmax(x, 1), lambda x: F.softmax(x, 1), [(4, 8, 6)]),
    "log_softmax": (
        lambda fd, x: fd.ops.log_softmax(x, -1),
        lambda x: F.log_softmax(x, -1),
        [(4, 8, 6)],
    ),
    "layer_norm": (
        lambda fd, x, w, b: fd.ops.layer_norm(x, [x.size(-1)], w, b),
        lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b),
        [(4, 8, 6), (6,), (6,)],
    ),
    "rms_norm": (
        lambda fd, x, w: fd.ops.rms_norm(x, [x.size(-1)], w, 1e-5),
        lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-5),
        [(4, 8, 6), (6,)],
    ),
    "gelu": (lambda fd, x: fd.ops.gelu(x), F.gelu, [(4, 8, 6)]),
    "mean": (lambda fd, x: fd.ops.mean(x), lambda x: x.mean(), [(4, 8, 6)]),
    "cross_entropy": (
        lambda fd, x: fd.ops.cross_entropy(x, fd.ops.full([4, 6], 3, DataType.Int)),
        lambda x: F.cross_entropy(x, torch.full((4, 6), 3)),
        [(4, 8, 6)],
    ),
    "losses": (
        lambda fd, x: fd.ops.cross_entropy(
            x, fd.ops.full([4, 6], 5, DataType.Int), reduction="none", label_smoothing=0.1
        ),
        lambda x: F.cross_entropy(x, torch.full((4, 6), 5), reduction="none", label_smoothing=0.1),
        [(4, 8, 6)],
    ),
}


def _run_cut(name: str, axis: int, *, static: bool) -> Tensor:
    build, _, shapes = SHARDED[name]
    given = [draw(*s, seed=k) for k, s in enumerate(shapes)]
    mesh = DeviceMesh(range(Communicator.instance().size()))
    with FusionDefinition() as fd:
        tvs = [fd.from_pytorch(t, static) for t in given]
        fd.add_output(build(fd, *tvs))
        for tv in tvs:
            tv.set_device_mesh(mesh)
        cut(tvs[0], axis, mesh)
    local = [shard_tensor(t, tv) for t, tv in zip(given, tvs, strict=True)]
    return [fd.execute(local)[0] for _ in range(2)][-1]


@pytest.mark.parametrize("static", [True])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("name", SHARDED)
def test_composites_of_cut_tensors_equal_torch(name: str, axis: int, static: bool) -> None:
    """Sharded along the axis of the op (tensor-parallel), or along another one (data- or
    sequence-parallel)."""
    _, of_torch, shapes = SHARDED[name]
    expected = of_torch(*(draw(*s, seed=k) for k, s in enumerate(shapes)))
    with simulate(2) as world:
        results = world.run(_run_cut, name, axis, static=static)
    for rank, found in enumerate(results):
        check(found, shards(expected, found, rank, 2), torch.float64)
