"""The replacements that messages and the page of operations name run, and equal torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fuser import DataType, FusionDefinition
from fuser.ops.rows import ROWS, SPELLED
from fuser.support.errors import UnknownOpError

DIM, SLOPE, VALUE, SHAPE = 1, 0.1, 3.0, [2, 3]
DTYPE = DataType.Double
N = 7  # the extent of `DIM`

# torch's functions of x and y [5, N], a [N, 5], b [5, N], mask [5, N] and ids [5].
Torch = Callable[[dict[str, torch.Tensor]], torch.Tensor]
OF_TORCH: dict[str, Torch] = {
    "square": lambda t: torch.square(t["x"]),
    "rsub": lambda t: torch.rsub(t["x"], t["y"]),
    "floor_divide": lambda t: torch.floor_divide(t["x"], t["y"]),
    "leaky_relu": lambda t: F.leaky_relu(t["x"], SLOPE),
    "elu": lambda t: F.elu(t["x"]),
    "relu6": lambda t: F.relu6(4 * t["x"]),
    "softplus": lambda t: F.softplus(t["x"]),
    "mish": lambda t: F.mish(t["x"]),
    "hardswish": lambda t: F.hardswish(4 * t["x"]),
    "swiglu": lambda t: F.silu(t["x"]) * t["y"],
    "geglu": lambda t: F.gelu(t["x"]) * t["y"],
    "masked_fill": lambda t: t["x"].masked_fill(t["mask"], VALUE),
    "std": lambda t: t["x"].std(DIM),
    "norm": lambda t: torch.linalg.vector_norm(t["x"], dim=DIM),
    "any": lambda t: t["mask"].any(DIM),
    "all": lambda t: t["mask"].all(DIM),
    "logsumexp": lambda t: t["x"].logsumexp(DIM),
    "one_hot": lambda t: F.one_hot(t["ids"], N).bool(),
    "addmm": lambda t: torch.addmm(t["x"], t["a"], t["b"]),
    "outer": lambda t: torch.outer(t["p"], t["q"]),
    "zeros": lambda t: torch.zeros(SHAPE, dtype=torch.float64),
    "ones": lambda t: torch.ones(SHAPE, dtype=torch.float64),
    "full_like": lambda t: torch.full_like(t["x"], VALUE),
    "zeros_like": lambda t: torch.zeros_like(t["x"]),
    "ones_like": lambda t: torch.ones_like(t["x"]),
}
CODE = re.compile(r"write ((?:\w+ = )?\w+\(.*\)|x // y)")


def tensors() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    mask = draw(5, N) > 0
    mask[0], mask[1] = True, False
    drawn = {"x": draw(5, N), "y": draw(5, N), "a": draw(5, 5), "b": draw(5, N), "mask": mask}
    return {**drawn, "p": draw(5), "q": draw(6), "ids": torch.tensor([3, 0, N - 1, 1, 1])}


def run(name: str, given: dict[str, torch.Tensor]) -> torch.Tensor:
    code = SPELLED[name].removeprefix("write ")
    if name == "outer":  # of two vectors
        given = {"a": given["p"], "b": given["q"]}
    if name in ("swiglu", "geglu"):
        given = {"gate": given["x"], "up": given["y"]}
    if name in ("relu6", "hardswish"):  # on both sides of their limits
        given = {"x": 4 * given["x"]}
    with FusionDefinition() as fd:
        defined = {
            key: fd.define_tensor([-1] * t.ndim, contiguity=True, dtype=t.dtype)
            for key, t in given.items()
        }
        names: dict[str, Any] = {op: getattr(fd.ops, op) for op in ROWS} | defined
        names |= {"dim": DIM, "n": N, "slope": SLOPE, "value": VALUE}
        names |= {"shape": SHAPE, "dtype": DTYPE}
        *before, last = code.split(", then ")
        for line in before:
            exec(line, names)
        fd.add_output(eval(last, names))
    (out,) = fd.execute(list(given.values()))
    return out


@pytest.mark.parametrize("name", OF_TORCH)
def test_what_is_to_be_written_equals_torch(name: str) -> None:
    given = tensors()
    expected = OF_TORCH[name](given)
    found = run(name, given)
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found, expected)


def test_all_that_is_code_is_tried() -> None:
    code = {name for name, hint in SPELLED.items() if CODE.fullmatch(hint)}
    assert code == {*OF_TORCH}


def test_what_is_named_is_an_op() -> None:
    for name, hint in SPELLED.items():
        if found := re.match(r"it is called (\w+)", hint):
            assert found[1] in ROWS, name
    ops: Any = FusionDefinition().ops
    with pytest.raises(UnknownOpError, match="'bmm': it is called matmul"):
        ops.bmm(1.0, 2.0)


@pytest.mark.parametrize(
    ("name", "op"),
    {
        "random_dist": "uniform or normal",
        "scan": "cumsum",
        "type_as": "cast",
        "sum_to_size": "sum",
        "tensor_sizes": "shape",
        "scaled_dot_product_flash_attention": "sdpfa_fwd",
        "at": "v[i]",
        "null": "None",
        "print": "print_math",
    }.items(),
)
def test_ops_of_nvfuser_that_are_not_there_name_another(name: str, op: str) -> None:
    with pytest.raises(UnknownOpError) as caught:
        getattr(FusionDefinition().ops, name)
    assert f"no op {name!r}: " in str(caught.value) and op in str(caught.value)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("SiLU", "did you mean silu?"),
        ("GELU", "did you mean gelu?"),
        ("RMSNorm", "did you mean rms_norm?"),
        ("LogSoftmax", "did you mean log_softmax?"),
        ("LeakyReLU", "write where(gt(x, 0.0), x, mul(x, slope))"),
        ("SwiGLU", "write mul(silu(gate), up)"),
        ("glu", "write mul(a, sigmoid(b)), where a and b are the halves of x"),
    ],
)
def test_an_unknown_op_names_what_to_write_and_the_users_line(name: str, hint: str) -> None:
    ops: Any = FusionDefinition().ops
    with pytest.raises(UnknownOpError) as error:
        getattr(ops, name)
    line = error.traceback[0].lineno + 1
    assert str(error.value) == (
        f"module 'fuser.ops' has no op '{name}': {hint} (user code at {__file__}:{line})"
    )
