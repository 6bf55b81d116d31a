"""reshape: the index map by brute force, symbolic decisions, views in between, errors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
import torch

from fuser import FusionDefinition, ParallelType, ops
from fuser.ir.axis_graph import mapped_axes
from fuser.ir.binding import bind_inputs
from fuser.ir.domain.axis_path import indices_backward
from fuser.ir.domain.tensor_domain import MergeTransform, SplitTransform
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.ops.nodes import ReshapeOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Number, Scalar, Symbol
from fuser.ir.text.parser import parse_fusion
from fuser.ir.text.printer import fusion_text
from fuser.ir.types import IterType
from fuser.ir.verify import verify_fusion
from fuser.ops.define import define_tensor
from fuser.ops.reference.meaning import evaluate_fusion
from fuser.ops.reshaping import group_sizes
from fuser.passes.concretize import concretize, refined_sizes
from fuser.support.errors import DefinitionError, InputError, ParseError
from tests.support.definition_copies import again

pytestmark = pytest.mark.from_text


def factorizations(n: int, longest: int) -> Iterator[tuple[int, ...]]:
    """Yields the shapes with n elements and at most `longest` axes, including axes of size 1."""
    for rank in range(1, longest + 1):
        for shape in itertools.product([d for d in range(1, n + 1) if n % d == 0], repeat=rank):
            if math.prod(shape) == n:
                yield shape


def source_element(
    tv: TensorView, index: Sequence[int], values: dict[Symbol, Number], source: TensorView
) -> list[int]:
    """Traces one output index of views back to the indices of `source`, through the domains."""
    known = {a.number: sc.const(i) for a, i in zip(tv.domain.no_reductions, index, strict=True)}
    while tv is not source:
        op = tv.definition()
        assert op is not None
        known = indices_backward(tv.domain, known)
        producer = op.inputs[0]
        known = {
            p.number: sc.ZERO if p.is_broadcast else known[c.number]
            for p, c in mapped_axes(op, 0, tv)
        }
        # The index of a broadcast axis that a squeeze dropped is 0.
        for axis in producer.domain.no_reductions:
            known.setdefault(axis.number, sc.ZERO)
        tv = producer
    return [int(sc.evaluate(known[a.number], values)) for a in source.domain.no_reductions]


def check_every_element(
    fusion: Fusion,
    source: TensorView,
    values: dict[Symbol, Number],
    shapes: tuple[tuple[int, ...], ...],
) -> None:
    """Compares all index maps with torch.reshape of a tensor of consecutive numbers."""
    shape, new_shape = shapes
    expected = torch.arange(math.prod(shape)).reshape(shape).reshape(new_shape)
    out = fusion.outputs[0]
    for index in itertools.product(*map(range, new_shape)):
        found = source_element(out, index, values, source)
        position = 0
        for i, n in zip(found, shape, strict=True):
            assert 0 <= i < n, (shapes, index, found)
            position = position * n + i
        assert position == expected[index].item(), (shapes, index, found)


def check_transforms(fusion: Fusion, values: dict[Symbol, Number]) -> None:
    """Checks that the factors of splits divide exactly, and that merges multiply."""

    def n(x: Scalar) -> int:
        return int(sc.evaluate(x, values))

    for tv in fusion.tensors():
        for t in tv.domain.transforms:
            sizes = {k: n(a.size) for k, a in tv.domain.axes.items()}
            match t:
                case SplitTransform():
                    assert n(t.factor) == sizes[t.inner]
                    assert sizes[t.outer] * sizes[t.inner] == sizes[t.inp]
                case MergeTransform():
                    assert sizes[t.outer] * sizes[t.inner] == sizes[t.out]
                case _:
                    raise AssertionError(t)


@pytest.mark.parametrize("count", [1, 6, 12, 16])
def test_constant_shapes_map_every_element(count: int) -> None:
    for shapes in itertools.product(factorizations(count, 3), repeat=2):
        fusion = Fusion()
        with FusionGuard(fusion):
            x = define_tensor(list(shapes[0]))
            fusion.add_input(x)
            fusion.add_output(ops.reshape(x, list(shapes[1])))
        verify_fusion(fusion)
        check_every_element(fusion, x, {}, shapes)
        check_transforms(fusion, {})
        data = torch.arange(count).reshape(shapes[0]).float()
        (out,) = evaluate_fusion(fusion, [data])
        assert torch.equal(out, data.reshape(shapes[1]))


@pytest.mark.parametrize("count", [1, 6, 8, 12])
def test_symbolic_shapes_map_every_element_after_concretization(count: int) -> None:
    for shapes in itertools.product(factorizations(count, 2), factorizations(count, 3)):
        fusion = Fusion()
        with FusionGuard(fusion):
            x = define_tensor([-1] * len(shapes[0]))
            fusion.add_input(x)
            sizes = [fusion.new_extent() for _ in shapes[1]]
            for s in sizes:
                fusion.add_input(s)
            fusion.add_output(ops.reshape(x, sizes))
        data = torch.arange(count).reshape(shapes[0]).float()
        inputs = [data, *shapes[1]]
        bound = {s: int(v) for s, v in bind_inputs(fusion, inputs).items()}
        concrete, _ = concretize(fusion, bound)
        values: dict[Symbol, Number] = {**refined_sizes(bound)}
        assert all(
            a.kind is not IterType.symbolic for tv in concrete.tensors() for a in tv.domain.logical
        )
        source = concrete.inputs[0]
        assert isinstance(source, TensorView)
        check_every_element(concrete, source, values, shapes)
        check_transforms(concrete, values)
        (out,) = evaluate_fusion(concrete, inputs, values=values)
        assert torch.equal(out, data.reshape(shapes[1]))


def reshaped(shape: Sequence[int], new_shape: Sequence[object]) -> TensorView:
    """Reshapes a tensor; an entry "k" of new_shape is the size of its axis k."""
    with FusionGuard(Fusion()):
        x = define_tensor(list(shape))
        sizes = [x.size(int(s)) if isinstance(s, str) else s for s in new_shape]
        return ops.reshape(x, sizes)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("shape", "new_shape", "logical", "transforms"),
    [
        ([-1, -1, 384], ["0", "1", 12, 32], "iS3{i0} iS4{i1} iS6{12}rf iS7{32}rf", 1),
        ([-1, -1, 384], ["0", "1", -1, 32], "iS3{i0} iS4{i1} iS6{12}rf iS7{32}rf", 1),
        ([-1, -1, 12, 32], ["0", "1", 384], "iS4{i0} iS5{i1} iS8{384}rf", 1),
        ([-1, -1, 8], [-1, 8], "iS6{( i0 * i1 )}rf iS5{8}", 1),
        ([-1], [-1, 4], "iS2{( i0 / 4 )}rf iS3{4}rf", 1),
        ([-1, 6], ["0", 6], "iS2{i0} iS3{6}", 0),
    ],
)
def test_symbolic_decisions(
    shape: list[int], new_shape: list[object], logical: str, transforms: int
) -> None:
    out = reshaped(shape, new_shape)
    assert len(out.domain.transforms) == transforms
    assert all(a.kind is IterType.iteration for a in out.domain.logical)
    assert " ".join(map(str, out.domain.logical)) == logical


def test_sizes_of_another_tensor_are_recognised_after_they_met() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        x, y = define_tensor([-1, -1, 6]), define_tensor([-1, -1, 6])
        ops.add(x, y)
        out = ops.reshape(x, [y.size(0), y.size(1), 2, 3])
    assert [a.kind for a in out.domain.logical] == [IterType.iteration] * 4


def test_unrelated_sizes_stay_undecided() -> None:
    with FusionGuard(Fusion()):
        x, y = define_tensor([-1, -1]), define_tensor([-1, -1])
        out = ops.reshape(x, y.shape())
    assert [a.kind for a in out.domain.logical] == [IterType.symbolic] * 2
    assert isinstance(out.definition(), ReshapeOp)


UNDECIDED = [
    ([-1, -1], [2, 12], [4, 6]),
    ([-1, -1], [4, 6], [4, 6]),
    ([-1, -1, -1], [2, 3, -1], [1, 6, 4]),
    ([-1], [1], [1]),
    ([-1, -1], [8, 3, 1, 1], [8, 3]),
]


@pytest.mark.parametrize(("declared", "asked", "given"), UNDECIDED)
@pytest.mark.parametrize("is_split", [False, True])
def test_texts_of_undecided_reshapes_are_programs(
    declared: list[int], asked: list[int], given: list[int], is_split: bool
) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor(declared, contiguity=True)
        y = fd.ops.reshape(fd.ops.exp(x), asked)
        fd.add_output(fd.ops.neg(y))
        if is_split:
            y.set_device_mesh([0])
            y.outer_split(0, 1).axis(0).parallelize(ParallelType.mesh_x)
    assert y.domain.is_undecided
    read = parse_fusion(fusion_text(fd.fusion))
    assert fusion_text(read) == fusion_text(fd.fusion)
    assert read == fd.fusion
    full = torch.randn(given)
    for one in (again(fd), fd, FusionDefinition()):
        if not hasattr(one, "_fusion") or one._fusion is None:
            one._fusion = read
        (out,) = one.execute([full])
        torch.testing.assert_close(out, -full.exp().reshape(asked))


def test_only_reshapes_are_undecided() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1])
        fd.add_output(fd.ops.reshape(fd.ops.exp(x), [4, 6]))
    text = fusion_text(fd.fusion)
    with pytest.raises(ParseError, match="only the result of a reshape may have root axes"):
        parse_fusion(text.replace("= reshape( ", "= expf(").replace(" )\n} //", ");\n} //"))


def test_group_sizes_walks_from_both_ends() -> None:
    i, j, k = (sc.const(n) for n in (2, 3, 5))
    a, b = Symbol("i0", sc.ONE.dtype), Symbol("i1", sc.ONE.dtype)
    assert group_sizes([a, k], [a, k]) == [(1, 1), (1, 1)]
    assert group_sizes([a, sc.mul(i, j)], [b, i, j]) == [(1, 1), (1, 2)]
    assert group_sizes([a, b], [b, a]) == [(2, 2)]
    assert group_sizes([a, b], [i, k, a]) is None
    assert group_sizes([sc.mul(a, b), k], [a, b, k]) == [(1, 2), (1, 1)]


def test_empty_tensors_become_full() -> None:
    out = reshaped([0, 5], [5, 0, 2])
    assert type(out.definition()).__name__ == "FullOp"
    assert [str(s) for s in out.shape()] == ["5", "0", "2"]


def test_call_errors() -> None:
    with pytest.raises(DefinitionError, match="A maximum of one value of -1"):
        reshaped([4, 6], [-1, -1])
    with pytest.raises(DefinitionError, match="Total element counts across view operation"):
        reshaped([4, 6], [5, 5])
    with pytest.raises(DefinitionError, match="Total element counts across view operation"):
        reshaped([-1, 6], ["0", 7])
    with pytest.raises(DefinitionError, match="size at index 0 must be at least -1, got -2"):
        reshaped([4], [-2])
    with pytest.raises(
        DefinitionError, match=r"-1 .*cannot be computed, because another size is 0"
    ):
        reshaped([0, 3], [0, -1])


def test_a_broadcast_axis_is_squeezed_or_added() -> None:
    assert type(reshaped([1, 6], [6]).definition()).__name__ == "SqueezeOp"
    assert type(reshaped([6], [1, 6, 1]).definition()).__name__ == "BroadcastOp"
    kept = reshaped([1, -1, 6], [1, "1", 2, 3])
    assert kept.domain.logical[0].kind is IterType.broadcast
    same = reshaped([-1, 6], ["0", 6])
    assert type(same.definition()).__name__ == "ReshapeOp" and not same.domain.transforms


@pytest.mark.finding("G33")
@pytest.mark.parametrize("is_first", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("middle", ["the reshape", "an op on it"])
@pytest.mark.parametrize("shape", [(4, 2, -1), (-1, 8), (2, -1, 4)], ids=str)
def test_an_inferred_size_of_one_is_spread_whatever_else_says_so(
    shape: tuple[int, ...], middle: str, is_first: bool
) -> None:
    wide = tuple(8 if n == -1 else n for n in shape)
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        w = fd.define_tensor([8, -1], contiguity=True)
        y = fd.ops.reshape(x, list(shape))
        y = y if middle == "the reshape" else fd.ops.relu(y)
        if is_first:
            product = fd.ops.matmul(x, w)
            spread = fd.ops.expand(y, list(wide))
        else:
            spread = fd.ops.expand(y, list(wide))
            product = fd.ops.matmul(x, w)
        fd.add_output(product)
        fd.add_output(spread)
    a, b = torch.randn(8), torch.randn(8, 3)
    narrow = a.reshape(shape) if middle == "the reshape" else a.reshape(shape).relu()
    for one in (fd, again(fd)):
        found = one.execute([a, b])
        torch.testing.assert_close(found, [a @ b, narrow.expand(wide)])


@pytest.mark.finding("G33")
def test_an_inferred_size_is_spread_kept_or_refused_by_the_sizes_of_the_call() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        n = fd.define_scalar(dtype=torch.int64)
        y = fd.ops.reshape(x, [4, -1])
        fd.add_output(fd.ops.mul(fd.ops.expand(y, [4, 6]), 2.0))
        fd.add_output(fd.ops.expand(y, [4, n]))
    for length, size in ((4, 6), (24, 6), (4, 1), (4, 3)):
        a = torch.randn(length)
        doubled, spread = fd.execute([a, size])
        torch.testing.assert_close(doubled, a.reshape(4, -1).expand(4, 6) * 2)
        torch.testing.assert_close(spread, a.reshape(4, -1).expand(4, size))
    for length, size in ((8, 6), (24, 5), (24, 1)):
        with pytest.raises(InputError, match="expand"):
            fd.execute([torch.randn(length), size])
