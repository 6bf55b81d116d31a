"""Checks of op arguments: numbers in place of scalars, names, sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fuser
from fuser import DataType, FusionDefinition
from fuser.support.errors import (
    ArgumentError,
    DefinitionError,
    InputError,
    UnknownOpError,
    UnsupportedError,
)

Tensor = torch.Tensor
X = torch.tensor([[3.0, -1.0, 2.0], [0.0, 5.0, -4.0]])
PLACES = torch.tensor([[0, 2], [1, 1]])
EMBED = torch.tensor([1, 0, 1])

# Calls with numbers in place of scalars, and the same computation in torch.
NUMBERS: dict[str, tuple[Callable[..., Any], Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "topk": (
        lambda ops, x: ops.topk(x, 2)[0],
        lambda x: torch.topk(x, 2)[0],
        (X,),
    ),
    "topk of all": (
        lambda ops, x: ops.topk(x, 3, 1, False, True)[0],
        lambda x: torch.topk(x, 3, 1, False, True)[0],
        (X,),
    ),
    "select": (lambda ops, x: ops.select(x, 1, 0), lambda x: x.select(0, 1), (X,)),
    "select from the end": (lambda ops, x: ops.select(x, -1, 1), lambda x: x.select(1, -1), (X,)),
    "scatter": (
        lambda ops, x, i: ops.scatter(x, i, 7, 1),
        lambda x, i: torch.scatter(x, 1, i, 7),
        (X, PLACES),
    ),
    "cumsum": (
        lambda ops, x: ops.cumsum(x, 1, 2),
        lambda x: torch.cumsum(torch.cat([torch.full((2, 1), 2.0), x], 1), 1)[:, 1:],
        (X,),
    ),
    "cummax of integers": (
        lambda ops, x: ops.cummax(x, 1, init=1),
        lambda x: torch.cummax(x.clamp(min=1), 1)[0],
        (X.long(),),
    ),
    "embedding": (
        lambda ops, i, w: ops.embedding_fwd(i, w, 0, 2.0, 1, False, False),
        lambda i, w: torch.nn.functional.embedding(i, w.clone(), None, 2.0, 1.0),
        (EMBED, X),
    ),
}


@pytest.mark.finding("G17")
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_taken_wherever_a_scalar_is(name: str) -> None:
    write, meaning, inputs = NUMBERS[name]
    with FusionDefinition() as fd:
        fd.add_output(write(fd.ops, *(fd.from_pytorch(x) for x in inputs)))
    (out,) = fd.execute(inputs)
    torch.testing.assert_close(out, meaning(*inputs))
    made: dict[str, Any] = {"FusionDefinition": FusionDefinition, "DataType": DataType}
    exec(repr(fd), made)
    with FusionDefinition() as twin:
        made["nvfuser_fusion"](twin)
    assert twin.fusion == fd.fusion and repr(twin) == repr(fd)


@pytest.mark.finding("G17")
def test_complex_of_numbers_is_a_scalar() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], dtype=DataType.ComplexFloat)
        fd.add_output(fd.ops.mul(x, fd.ops.complex(fd.define_scalar(), 2.0)))
    z = torch.tensor([1 + 2j, 3j])
    torch.testing.assert_close(fd.execute([z, 0.5])[0], z * (0.5 + 2j))


def test_numbers_that_do_not_fit_are_refused_with_the_op() -> None:
    with FusionDefinition() as fd:
        x, i = fd.from_pytorch(X.long()), fd.from_pytorch(PLACES)
        with pytest.raises(DefinitionError, match=r"cumsum: 0\.5 is not an integer"):
            fd.ops.cumsum(x, 0, 0.5)
        with pytest.raises(DefinitionError, match=r"scatter: .*is complex, but"):
            fd.ops.scatter(x, i, 2j, 1)
        with pytest.raises(TypeError, match=r"topk\(\).*k: expected a scalar or an integer"):
            fd.ops.topk(x, 1.5)  # pyright: ignore[reportArgumentType]
        with pytest.raises(DefinitionError, match="topk"):
            fd.ops.topk(x, -1)
        fd.add_output(x)


@pytest.mark.finding("G40")
def test_an_unknown_op_is_unsupported_and_its_neighbours_are_named() -> None:
    with FusionDefinition() as fd:
        for name in ("not_an_op", "qqqq"):
            with pytest.raises(UnsupportedError, match=f"no op '{name}'"):
                getattr(fd.ops, name)
        assert not hasattr(fd.ops, "not_an_op")
        with pytest.raises(UnknownOpError, match=r"did you mean logical_not, \w+ or \w+\?"):
            fd.ops.logical_nott  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
    assert issubclass(fuser.UnknownOpError, fuser.UnsupportedError)


@pytest.mark.finding("shape 2^63")
@pytest.mark.parametrize(
    "size", [2**63, -(2**63) - 1, 10**5000], ids=["2^63", "below", "5000 digits"]
)
def test_a_size_beyond_64_bits_is_a_type_error(size: int) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1])
        for call in (
            lambda: fd.define_tensor([4, size]),
            lambda: fd.define_tensor([4], [size]),
            lambda: fd.ops.reshape(x, [size]),
            lambda: fd.ops.sum(x, size),
        ):
            with pytest.raises(TypeError, match="out of the range of int64_t") as found:
                call()
            assert isinstance(found.value, DefinitionError)
        fd.add_output(x)


@pytest.mark.finding("slice strides length")
def test_the_lists_of_a_slice_are_compared_before_the_rank() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1])
        with pytest.raises(DefinitionError, match="start_indices and strides don't match"):
            fd.ops.slice(x, [0], [1], [1, 1, 1])
        with pytest.raises(DefinitionError, match="attribute dimensions don't match"):
            fd.ops.slice(x, [0], [1, 1], [1])
        with pytest.raises(DefinitionError, match="does not match slice dimensions"):
            fd.ops.slice(x, [0], [1], [1])
        fd.add_output(x)


@pytest.mark.finding("G31")
def test_every_value_of_a_fusion_answers_whether_it_is_a_tensor() -> None:
    with FusionDefinition() as fd:
        x, s = fd.define_tensor([-1, 4], contiguity=True), fd.define_scalar()
        fd.add_output(fd.ops.sum(fd.ops.reshape(fd.ops.mul(x, s), [-1, 2]), 1))
    values = fd.fusion.vals()
    tensors = [v for v in values if v.is_tensor()]  # pyright: ignore[reportAttributeAccessIssue]
    assert len(tensors) == len(fd.fusion.tensors()) == 4
    assert {v.is_symbolic() for v in values} == {True, False}  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.finding("G32")
def test_linear_refuses_a_bias_longer_than_its_weight() -> None:
    with FusionDefinition() as fd:
        x, w = fd.define_tensor([-1, 4], contiguity=True), fd.define_tensor([1, 4])
        with pytest.raises(DefinitionError, match=r"linear: .*has size 5 .*test_arguments.py:\d+"):
            fd.ops.linear(x, w, fd.define_tensor([5]))
        batch = fd.define_tensor([1, 3, 4])
        with pytest.raises(DefinitionError, match=r"linear: .*has size 2 "):
            fd.ops.linear(x, batch, fd.define_tensor([2, 3]))
        fd.add_output(fd.ops.linear(x, w, fd.define_tensor([1])))


@pytest.mark.finding("G32")
@pytest.mark.filterwarnings("error")
def test_linear_of_one_column_takes_a_bias_of_one_element_alone() -> None:
    with FusionDefinition() as fd:
        x, w = fd.define_tensor([-1, 4], contiguity=True), fd.define_tensor([1, 4])
        fd.add_output(fd.ops.linear(x, w, fd.define_tensor([-1])))
    x, w = torch.randn(3, 4), torch.randn(1, 4)
    (out,) = fd.execute([x, w, b := torch.randn(1)])
    torch.testing.assert_close(out, torch.nn.functional.linear(x, w, b))
    with pytest.raises(InputError, match="linear: "):
        fd.execute([x, w, torch.randn(5)])


@pytest.mark.finding("G16")
@pytest.mark.parametrize("sizes", [((4, 8), (1, 8)), ((1, 8), (4, 8)), ((4, 8), (4, 1))])
def test_a_size_of_one_that_was_not_declared_says_how(sizes: tuple[Any, Any]) -> None:
    with FusionDefinition() as fd:
        fd.add_output(fd.define_tensor([-1, -1]) + fd.define_tensor([-1, -1]))
    a, b = map(torch.ones, sizes)
    with pytest.raises(InputError, match=r"declare .* as 1 in define_tensor, not as -1"):
        fd.execute([a, b])
    shapes = [[1 if n == 1 else -1 for n in shape] for shape in sizes]
    with FusionDefinition() as fd:
        fd.add_output(fd.define_tensor(shapes[0]) + fd.define_tensor(shapes[1]))
    torch.testing.assert_close(fd.execute([a, b])[0], a + b)


# Calls of torch, numpy and the definition that must be mistakes, and the hint in the message.
WORDS: dict[str, tuple[Callable[..., Any], str]] = {
    "torch.exp": (
        lambda fd, x: torch.exp(x),
        r"torch's exp: T0.*has no values while .*: write fd\.ops\.exp",
    ),
    "torch.square": (lambda fd, x: torch.square(x), r"torch's square: .*write mul\(x, x\)"),
    "torch.cat": (lambda fd, x: torch.cat([x, x]), r"torch's cat: .*write fd\.ops\.cat"),
    "relu": (lambda fd, x: torch.nn.functional.relu(x), r"write fd\.ops\.relu"),
    "torch.fft": (lambda fd, x: torch.fft.fft(x), r"torch's fft_fft: .*see dir\(fd\.ops\)"),
    "a torch tensor beside": (lambda fd, x: torch.add(X, x), r"write fd\.ops\.add"),
    "define_tensor(X)": (
        lambda fd, x: fd.define_tensor(X),
        r"shape \[2, 3\].*write fd\.define_tensor\(\[2, 3\]\), or fd\.from_pytorch\(x\)",
    ),
    "define_tensor(array)": (lambda fd, x: fd.define_tensor(X.numpy()), r"from_pytorch"),
}


@pytest.mark.finding("G18")
@pytest.mark.parametrize("name", WORDS)
def test_calls_as_in_torch_say_what_to_write(name: str) -> None:
    call, words = WORDS[name]
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 3])
        with pytest.raises(ArgumentError, match=rf"{words}.*test_arguments\.py:\d+"):
            call(fd, x)
        fd.add_output(x)


@pytest.mark.finding("G18")
def test_a_definition_is_called_with_its_inputs() -> None:
    with FusionDefinition() as fd:
        x, y = (fd.define_tensor([-1, 3], contiguity=True) for _ in range(2))
        # `shape` is a list, as in torch, and can be called, as in nvFuser.
        assert x.shape[1] == 3 and x.shape == x.shape() and x.shape[0] is x.size(0)
        fd.add_output(fd.ops.add(fd.ops.expand(fd.ops.sum(x, 1, True), x.shape), y))
    a, b = torch.randn(2, 3), torch.randn(2, 3)
    for out in (fd(a, b), fd(a, b, _enable_options=["checked"]), fd([a, b])):
        torch.testing.assert_close(out, [a.sum(1, keepdim=True) + b])
    with pytest.raises(ArgumentError, match=r"write fd\.execute\(\[x, y\]\), or fd\(x, y\)"):
        fd.execute(a, b)
    with pytest.raises(InputError, match=r"pass \[tensor\]"):
        fd.execute(a)


@pytest.mark.finding("G18")
@pytest.mark.parametrize("sizes", [(4, 5), (4,), (), (0, 1, 7)])
def test_a_static_shape_is_compared_as_torchs(sizes: tuple[int, ...]) -> None:
    like = torch.empty(sizes).shape
    with FusionDefinition() as fd:
        x = fd.from_pytorch(torch.empty(sizes), static_sizes=True)
        for other in ((4, 5), (4,), (), (0, 1, 7), (4, 6), (5, 4), (4, 5, 1), (4, None), (4, "5")):
            is_same = like == other
            for made in (other, list(other)):
                for shape in (x.shape, x.shape(), x.shape[:]):
                    assert (shape == made) is (made == shape) is is_same
                    assert (shape != made) is (made != shape) is not is_same
        assert x.shape == like and like == x.shape and x.shape == np.empty(sizes).shape
        assert x.shape[-2:] == like[-2:] and x.shape[1:] != (*like[1:], 1)
        assert x.shape != 4 and x.shape != "45" and x.shape != None  # noqa: E711
        for n in (0, 1, 4, 5, 9):
            assert (n in x.shape) is (n in like) and x.shape.count(n) == like.count(n)
            if n in like:
                assert x.shape.index(n) == like.index(n)
        fd.add_output(fd.ops.neg(x))
    assert x.shape == like and x.shape != (*like, 2)


@pytest.mark.finding("G18")
def test_a_symbolic_shape_is_equal_where_it_is_known_and_else_an_error() -> None:
    with FusionDefinition() as fd:
        x, y = (fd.define_tensor([-1, 5], contiguity=True) for _ in range(2))
        n = x.shape[0]
        # Known before the run, for any inputs.
        assert x.shape == x.shape() and x.shape == (n, 5) and fd.ops.neg(x).shape == [n, 5]
        assert x.shape != (4, 6) and x.shape != (4, 5, 1) and x.shape != (4,)
        assert x.shape != (-1, 5) and x.shape[1:] == (5,) and 5 in x.shape and n in x.shape
        unknown: list[Callable[[], object]] = [
            lambda: x.shape == (4, 5),
            lambda: x.shape != (4, 5),
            lambda: (4, 5) == x.shape,  # noqa: SIM300
            lambda: [4, 5] != x.shape,  # noqa: SIM300
            lambda: x.shape == y.shape,
            lambda: x.shape() != y.shape(),
            lambda: x.shape == torch.Size([4, 5]),
            lambda: x.shape[:1] == (4,),
            lambda: 4 in x.shape,
            lambda: x.shape.count(5),
            lambda: x.shape.index(5),
        ]
        for ask in unknown:
            words = r"extents of inputs are known only when it runs.*static_sizes=True"
            with pytest.raises(ArgumentError, match=rf"test_arguments\.py:\d+.*{words}"):
                ask()
        fd.add_output(x + y)


@pytest.mark.finding("reshape Float extent")
def test_a_floating_constant_is_an_extent_where_it_is_an_integer() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        for dtype in (DataType.Float, DataType.Double):
            two, three = (fd.define_scalar(float(n), dtype) for n in (2, 3))
            fd.add_output(fd.ops.neg(fd.ops.reshape(x, [two, three])))
            fd.add_output(fd.ops.full([three, two], 1.0, DataType.Float))
        y = fd.ops.broadcast(x, [True, False])
        fd.add_output(fd.ops.neg(fd.ops.expand(y, [three, -1])))
        with pytest.raises(
            DefinitionError, match=r"reshape: size at index 1: 2\.5 is not an integer"
        ):
            fd.ops.reshape(x, [2, fd.define_scalar(2.5)])
    a = torch.randn(6)
    ones = torch.ones(3, 2)
    expected = [-a.reshape(2, 3), ones, -a.reshape(2, 3), ones, -a.expand(3, 6)]
    torch.testing.assert_close(fd.execute([a]), expected)
