"""Error messages for code in which Python, numpy or torch ask a tensor or scalar for its value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fuser import DataType, FusionDefinition
from fuser.ops.no_values import ATTRIBUTES, attribute_hint
from fuser.ops.rows import ROWS
from fuser.support.errors import ArgumentError, FuserError

pytestmark = pytest.mark.finding("G18")

X = torch.randn(3, 4)


def _set(x: Any, key: Any) -> None:
    x[key] = 1.0


def _delete(x: Any, key: Any) -> None:
    del x[key]


# Calls with a tensor x, and patterns of their messages.
OF_TENSORS: dict[str, tuple[Callable[..., object], str]] = {
    "len": (lambda x: len(x), r"len\(\) of T0.*write x\.size\(0\)"),
    "for": (lambda x: list(x), r"iteration of T0.*write x\[0\]"),
    "unpacked": (lambda x: [*x], "iteration of T0"),
    "max": (lambda x: max(x), r"fd\.ops\.max"),
    "sum": (lambda x: sum(x), r"fd\.ops\.sum"),
    "in": (lambda x: 1.0 in x, r"in of T0.*fd\.ops\.sum\(x == value"),
    "assigned": (lambda x: _set(x, 0), r"not changed in place: write fd\.ops\.where"),
    "deleted": (lambda x: _delete(x, 0), "not changed in place"),
    "int": (lambda x: int(x), r"int\(\) of T0.*has no value.*fd\.ops\.cast"),
    "float": (lambda x: float(x), r"float\(\) of T0.*fd\.ops\.cast"),
    "complex": (lambda x: complex(x), r"complex\(\) of T0"),
    "round": (lambda x: round(x), r"write fd\.ops\.round"),
    "digits": (lambda x: round(x, 2), r"write fd\.ops\.round"),
    "floor": (lambda x: math.floor(x), r"write fd\.ops\.floor"),
    "ceil": (lambda x: math.ceil(x), r"write fd\.ops\.ceil"),
    "trunc": (lambda x: math.trunc(x), r"write fd\.ops\.trunc"),
    "math": (lambda x: math.exp(x), r"fd\.ops\.exp for math\.exp"),
    "range": (lambda x: range(x), "an index or a count of T0"),
    "a format": (lambda x: f"{x:.3f}", r"the format '\.3f' of T0"),
    "numpy.exp": (lambda x: np.exp(x), r"numpy's exp: T0.*: write fd\.ops\.exp"),
    "numpy.absolute": (lambda x: np.absolute(x), r"write fd\.ops\.abs"),
    "numpy.add.reduce": (lambda x: np.add.reduce(x), r"numpy's add: T0"),
    "numpy.sum": (lambda x: np.sum(x), r"numpy's sum: T0.*write fd\.ops\.sum"),
    "numpy.mean": (lambda x: np.mean(x), r"write fd\.ops\.mean"),
    "numpy.concatenate": (lambda x: np.concatenate([x, x]), "it is called cat"),
    "numpy.array": (lambda x: np.array(x), r"numpy's array of T0.*execute returns the values"),
    "numpy.asarray": (lambda x: np.asarray(x), "numpy's array of T0"),
    "an array and": (lambda x: np.ones(4) * x, "mul of T0.*it has data"),
    "an array changed": (lambda x: np.ones(4).__iadd__(x), "numpy's add: T0"),
    "torch.tensor": (lambda x: torch.tensor(x), "T0"),
    "torch.cat": (lambda x: torch.cat([x, x]), r"torch's cat: T0.*write fd\.ops\.cat"),
    "torch.add": (lambda x: torch.add(x, 1), r"write fd\.ops\.add"),
    "a mask": (lambda x: x[x > 0], r"the number .* a mask selects .*fd\.ops\.where\(mask"),
    "a list": (lambda x: x[[0, 1]], r"fd\.ops\.index_select\(x, index, dim\)"),
    "a torch index": (lambda x: x[torch.tensor([0])], r"fd\.ops\.index_select"),
    "shape(0)": (lambda x: x.shape(0), r"write x\.shape\[0\], or x\.size\(0\)"),
}
# Calls with a scalar input s, and the extent n of a tensor.
OF_SCALARS: dict[str, tuple[Callable[..., object], str]] = {
    "int": (lambda s, n: int(s), r"int\(\) of d2: a scalar has no value"),
    "float": (lambda s, n: float(n), r"float\(\) of i0"),
    "round": (lambda s, n: round(s), r"write fd\.ops\.round"),
    "ceil": (lambda s, n: math.ceil(n), r"write fd\.ops\.ceil"),
    "math": (lambda s, n: math.sqrt(s), r"fd\.ops\.exp for math\.exp"),
    "range": (lambda s, n: range(n), r"an index or a count of i0.*static_sizes=True"),
    "a list of": (lambda s, n: [0] * n, "an index or a count of i0"),
    "an index": (lambda s, n: [1, 2][n], "an index or a count of i0"),
    "numpy.exp": (lambda s, n: np.exp(s), r"numpy's exp: d2, a scalar .*: write fd\.ops\.exp"),
    "torch.exp": (lambda s, n: torch.exp(s), r"torch's exp: d2, a scalar .*fd\.ops\.exp"),
    "a torch tensor and": (lambda s, n: X * s, r"of d2.*it has data"),
    "and a torch tensor": (lambda s, n: s + X, r"\+ of d2.*it has data"),
    "a string": (lambda s, n: s + "a", r"\+ of d2: expected a tensor or a scalar or a number"),
    "a string before": (lambda s, n: "a" < n, "of i0: expected a tensor"),  # noqa: SIM300
    "divided by a string": (lambda s, n: s / "a", "truediv of d2: expected a tensor"),
    "a format": (lambda s, n: f"{s:.2f}", r"the format '\.2f' of d2"),
    "torch.zeros": (lambda s, n: torch.zeros(n), "i0"),
}


@pytest.mark.parametrize("name", OF_TENSORS)
def test_a_tensor_without_values_says_what_to_write(name: str) -> None:
    call, words = OF_TENSORS[name]
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 4])
        with pytest.raises(ArgumentError, match=rf"{words}.*test_no_values\.py:\d+"):
            call(x)
        fd.add_output(x)


@pytest.mark.parametrize("name", OF_SCALARS)
def test_a_scalar_without_a_value_says_what_to_write(name: str) -> None:
    call, words = OF_SCALARS[name]
    with FusionDefinition() as fd:
        x, s = fd.define_tensor([-1, 4]), fd.define_scalar(dtype=DataType.Double)
        with pytest.raises(ArgumentError, match=rf"{words}.*test_no_values\.py:\d+"):
            call(s, x.size(0))
        fd.add_output(x)


def test_constant_extents_are_integers() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([3, 4], contiguity=True)
        n: Any = x.shape[0]
        assert [*range(n)] == [0, 1, 2] and [7] * x.size(1) == [7] * 4 and "abcd"[n] == "d"
        assert (int(n), float(n), math.sqrt(x.size(1)), round(n)) == (3, 3.0, 2.0, 3)
        assert torch.zeros([*map(int, x.shape)]).shape == (3, 4) and f"{n:03d}" == "003"
        half: Any = fd.define_scalar(2.75)
        assert (int(half), math.floor(half), round(half, 1), f"{half:.1f}") == (2, 2, 2.8, "2.8")
        with pytest.raises(ArgumentError, match="an index or a count"):
            range(half)
        # Iterates over rows, as with a torch tensor.
        for row in range(n):
            fd.add_output(fd.ops.neg(x[row]))
    outs = fd.execute([a := torch.randn(3, 4)])
    assert all(torch.equal(out, -a[row]) for row, out in enumerate(outs))


@pytest.mark.parametrize(
    ("name", "words"),
    {
        "sum": "ops are functions, fd.ops.sum",
        "T": "it is called permute",
        "mT": "it is called permute",
        "long": "it is called cast",
        "item": "it has no value yet",
        "numpy": "execute returns the values of outputs as torch tensors",
        "cuda": "a program runs on the device of its inputs",
        "backward": "outputs carry no gradient",
        "numel": "write the product of x.shape",
        "relu_": "tensors are not changed in place: write fd.ops.relu",
        "masked_fill_": "not changed in place: write where(mask, value, x), and use the result",
        "zero_": "not changed in place: use fd.ops.full",
        "dim": "it is called ndim",
    }.items(),
)
def test_attributes_of_torchs_tensors_say_what_to_write(name: str, words: str) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 4])
        with pytest.raises(AttributeError) as error:
            getattr(x, name)
        assert words in str(error.value)
        with pytest.raises(AttributeError, match="no attribute 'item': it has no value"):
            getattr(x.size(0), "item")  # noqa: B009
        assert not hasattr(x, "qqqq_") and not hasattr(x, "__len__qqqq") and x.ndim == 2
        fd.add_output(x)


def test_ops_that_hints_name_are_there() -> None:
    hints = [*ATTRIBUTES.values(), *(words for _, words in (OF_TENSORS | OF_SCALARS).values())]
    text = " ".join(hints).replace("\\", "")
    named = {word.partition("(")[0].strip(".,;)") for word in text.split("fd.ops.")[1:]}
    assert {word.split()[0] for word in named} <= {*ROWS}
    assert {attribute_hint(name) for name in ATTRIBUTES} == {*ATTRIBUTES.values()}


@pytest.mark.parametrize(
    ("name", "words"),
    {
        "exp": "ops are functions, fd.ops.exp",
        "zeros": "ops are functions, fd.ops.zeros",
        "inputs": "it is fd.fusion.inputs",
        "run": "it is called execute",
        "compile": "the first execute compiles it",
        "add_input": "define_tensor and define_scalar add the inputs",
    }.items(),
)
def test_attributes_of_a_definition_say_what_to_write(name: str, words: str) -> None:
    with pytest.raises(AttributeError) as error:
        getattr(FusionDefinition(), name)
    assert words in str(error.value)


def test_inputs_have_an_order_and_no_names() -> None:
    with FusionDefinition() as fd:
        x, y = (fd.define_tensor([-1, 4], contiguity=True) for _ in range(2))
        fd.add_output(x - y)
    named: Any = {"a": X, "b": X}
    for _ in range(2):  # before the first run, and after it
        for call in (
            lambda: fd(**named),
            lambda: fd.execute(**named),
            lambda: fd.execute([X], **named),
        ):
            words = r"a, b: inputs have no names.*write fd\.execute\(\[a, b\]\), or fd\(a, b\)"
            with pytest.raises(ArgumentError, match=rf"{words}.*test_no_values\.py:\d+"):
                call()
        misspelled: Any = {"_enable_option": ["checked"]}
        with pytest.raises(ArgumentError, match=r"no option .*did you mean _enable_options"):
            fd(X, X, **misspelled)
        with pytest.raises(FuserError, match="Expected 2, got 0"):
            fd.execute()
        assert torch.equal(fd(X, 2 * X)[0], X - 2 * X)
