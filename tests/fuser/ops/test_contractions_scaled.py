"""Products of floats of one byte and block quantisation, compared with torch in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fuser import DataType, FusionDefinition, TensorView, ops
from fuser.ir.fusion import Fusion
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.ops.matrix_products import ScaledMmaOp
from fuser.multidevice import Communicator, DeviceMesh, shard_tensor
from fuser.ops.define import define_tensor
from fuser.support.errors import DefinitionError, DtypeError, UnsupportedError
from hostir.ir.parser import parse
from hostir.ir.program import equal
from multidevice import simulate
from tests.support.cuts import cut
from tests.support.float8_codes import run
from tests.support.scaled_operands import E4, E5, D, Tensor, draw, factors, wanted

pytestmark = pytest.mark.from_text


# ------------------------------------------------------------------ scaled_mm
ONE, ROWS, COLUMNS = "one element", "rows", "columns"
RESULTS = {
    D.BFloat16: (torch.bfloat16, 2.0**-8),
    D.Half: (torch.float16, 2.0**-11),
    D.Float: (torch.float32, 1e-6),
    E4: (torch.float8_e4m3fn, 2.0**-4),
}


@pytest.mark.parametrize("second", [torch.float8_e5m2, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", RESULTS)
@pytest.mark.parametrize("by_row", [*itertools.product((False, True), repeat=2)], ids=str)
def test_scales(by_row: tuple[bool, bool], dtype: DataType, second: torch.dtype) -> None:
    a, b = factors(16, 48, 32, second)
    s1 = draw(16, 1).abs() + 0.5 if by_row[0] else torch.tensor(0.75)
    s2 = draw(1, 32).abs() + 0.5 if by_row[1] else torch.tensor([[0.5]])
    (out,) = run(
        lambda a, b, s, t: ops.scaled_mm(a, b, s, t, dtype=dtype)[0], a, b, s1, s2, options=()
    )
    to, eps = RESULTS[dtype]
    assert out.dtype is to
    expected = wanted(a, b, s1, s2)
    expected = expected.clamp(-448, 448) if dtype is E4 else expected
    torch.testing.assert_close(out.double(), expected, rtol=eps, atol=2e-5 + eps / 8)


@pytest.mark.parametrize(
    "fields", [f for f in itertools.product((False, True), repeat=3) if f[1] or not f[2]], ids=str
)
@pytest.mark.parametrize("rank", [1, 2])
def test_alpha_bias_beta(fields: tuple[bool, bool, bool], rank: int) -> None:
    has_alpha, has_bias, has_beta = fields
    a, b = factors(7, 33, 5)
    s1, s2 = torch.tensor([2.0]), torch.tensor(0.5)
    bias = draw(*(7, 5)[2 - rank :], dtype=torch.bfloat16)
    more = [torch.tensor(-1.5)] * has_alpha + [bias] * has_bias + [torch.tensor([3.0])] * has_beta

    def build(a: Any, b: Any, s: Any, t: Any, *rest: Any) -> TensorView:
        names = [n for n, f in zip(("alpha", "bias", "beta"), fields, strict=True) if f]
        given = dict(zip(names, rest, strict=True))
        return ops.scaled_mm(a, b, s, t, **given, dtype=D.Float)[0]

    (out,) = run(build, a, b, s1, s2, *more, options=())
    expected = wanted(a, b, s1, s2) * (-1.5 if has_alpha else 1)
    if has_bias:
        expected = expected + bias.double() * (3 if has_beta else 1)
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-5)


def test_any_extents_and_strides() -> None:
    """Extents of 0, 1 and more along each axis; factors in other memory orders and with gaps."""

    def build(a: Any, b: Any, s: Any, t: Any, c: Any) -> Any:
        return ops.scaled_mm(a, b, s, t, bias=c, dtype=D.Float)[0]

    scale = torch.tensor(0.5)
    for m, k, n in ((1, 1, 1), (1, 5, 3), (4, 1, 3), (4, 5, 1), (0, 5, 3), (4, 0, 3), (4, 5, 0)):
        a, b = factors(m, k, n)
        bias = draw(n)
        (out,) = run(build, a, b, scale, scale, bias, options=())
        torch.testing.assert_close(out.double(), wanted(a, b, scale, scale) + bias)
    a, b = factors(6, 8, 10)
    strided = [a.t().contiguous().t(), b.repeat_interleave(2, 1)[:, ::2]]
    (out,) = run(build, *strided, scale, scale, draw(10), options=())
    torch.testing.assert_close(out.double(), wanted(a, b, scale, scale) + draw(10))


def test_what_surrounds_a_product() -> None:
    """Kernels cast before and after the product. Sizes are new in each call."""
    with FusionDefinition() as fd:
        x, w = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
        s = fd.define_tensor([])
        made = fd.ops.scaled_mm(fd.ops.cast(x, E4), fd.ops.cast(w, E5), s, s, dtype=D.Float)
        assert made[1:] == (None, None)
        fd.add_output(fd.ops.relu(made[0]))
    for m in (3, 5, 8):
        x, w, s = draw(m, 24), draw(24, 16), torch.tensor(1.5)
        (out,) = fd.execute([x, w, s])
        a, b = x.to(torch.float8_e4m3fn), w.to(torch.float8_e5m2)
        torch.testing.assert_close(out.double(), wanted(a, b, s, s).relu(), rtol=1e-6, atol=1e-5)
    program = fd.fec.host_program()
    assert "ScaledMmaOp" in program.full_text()
    assert equal(parse(program.full_text()), program)


@pytest.mark.parametrize("where", ["m", "n", "k"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_ranks(where: str, ranks: int) -> None:
    a, b = factors(8, 16, 12)
    s1, s2, bias = draw(8, 1).abs(), draw(1, 12).abs(), draw(12)

    def program() -> tuple[Tensor, str]:
        mesh = DeviceMesh(range(Communicator.instance().size()))
        with FusionDefinition() as fd:
            tensors = [fd.from_pytorch(t) for t in (a, b, s1, s2, bias)]
            mat1, mat2, scale1, scale2, more = tensors
            out, _, _ = fd.ops.scaled_mm(mat1, mat2, scale1, scale2, bias=more, dtype=D.Float)
            fd.add_output(fd.ops.neg(out))
            for tv in tensors:
                tv.set_device_mesh(mesh)
            axes = {"m": {mat1: 0, scale1: 0}, "n": {mat2: 1}, "k": {mat1: 1, mat2: 0}}[where]
            for tv, axis in axes.items():
                cut(tv, axis, mesh)
        given = [shard_tensor(t, tv) for t, tv in zip((a, b, s1, s2, bias), tensors, strict=True)]
        (out,) = fd.execute(given)
        return out, fd.fec.host_program().full_text()

    with simulate(ranks) as world:
        results = world.run(program)
    expected = -(wanted(a, b, s1, s2) + bias)
    outs = [out for out, _ in results]
    axis = {"m": 0, "n": 1}.get(where)
    whole = outs[0] if axis is None else torch.cat(outs, axis)
    torch.testing.assert_close(whole.double(), expected, rtol=1e-6, atol=1e-5)
    # The one-byte operands are gathered, not the products.
    assert ("Allgather" in results[0][1]) == (where == "k")


@pytest.mark.parametrize("where", ["m", "n"])
@pytest.mark.parametrize("expanded", ["scale1", "scale2", "bias"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_one_scale_for_all_rows(ranks: int, expanded: str, where: str) -> None:
    """An expanded axis has a size, and a part on each rank."""
    a, b = factors(8, 16, 12)
    more = {"scale1": draw(8, 1), "scale2": draw(1, 12), "bias": draw(8, 12)}
    axis = 1 if expanded == "scale2" else 0
    kept = more[expanded].narrow(axis, 0, 1)
    more[expanded] = kept.expand(more[expanded].shape)

    def program() -> Tensor:
        mesh = DeviceMesh(range(Communicator.instance().size()))
        with FusionDefinition() as fd:
            tensors = [fd.from_pytorch(t, static_sizes=True) for t in (a, b, *more.values())]
            mat1, mat2, scale1, scale2, bias = tensors
            out, _, _ = fd.ops.scaled_mm(mat1, mat2, scale1, scale2, bias=bias, dtype=D.Float)
            fd.add_output(out)
            for tv in tensors:
                tv.set_device_mesh(mesh)
            cut(mat1 if where == "m" else mat2, "mn".index(where), mesh)
        given = zip((a, b, *more.values()), tensors, strict=True)
        return fd.execute([shard_tensor(t, tv) for t, tv in given])[0]

    with simulate(ranks) as world:
        out = torch.cat(world.run(program), "mn".index(where))
    expected = wanted(a, b, more["scale1"], more["scale2"]) + more["bias"]
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-5)


def test_refusals() -> None:
    with FusionGuard(Fusion()):
        a, b = (define_tensor([-1, -1], dtype=d) for d in (E4, E5))
        x, c = define_tensor([-1, -1]), define_tensor([-1])
        one = define_tensor([])
        cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
            (
                UnsupportedError,
                "output_block_scale is not yet supported, because",
                lambda: ops.scaled_mm(a, b, one, one, output_block_scale_size=16),
            ),
            (
                UnsupportedError,
                "output_gamma is not yet supported, because",
                lambda: ops.scaled_mm(a, b, one, one, output_gamma=True),
            ),
            (
                DefinitionError,
                "a bias, because beta T",
                lambda: ops.scaled_mm(a, b, one, one, beta=one),
            ),
            (DtypeError, "Expected mat1 of dtype Float8", lambda: ops.scaled_mm(x, b, one, one)),
            (DtypeError, "Expected mat2 of dtype Float8", lambda: ops.scaled_mm(a, x, one, one)),
            (DtypeError, "Expected scale1 of dtype Float", lambda: ops.scaled_mm(a, b, a, one)),
            (
                UnsupportedError,
                r"scale2 must have one element or the axes \[1, n\]",
                lambda: ops.scaled_mm(a, b, one, x),
            ),
            (
                UnsupportedError,
                "alpha must have one element",
                lambda: ops.scaled_mm(a, b, one, one, alpha=c),
            ),
            (DtypeError, "a floating dtype", lambda: ops.scaled_mm(a, b, one, one, dtype=D.Int)),
            (
                DefinitionError,
                r"bias must have the axes \[n\] or \[m, n\]",
                lambda: ops.scaled_mm(a, b, one, one, bias=one),
            ),
        ]
        for error, match, call in cases:
            with pytest.raises(error, match=match):
                call()


def test_texts_of_all_forms_are_distinct() -> None:
    texts = [text for _, text in ScaledMmaOp.variants()]
    assert len(set(texts)) == 8
