"""Rebuilds definitions from their own text, and compares original and copy."""

from __future__ import annotations

import difflib
from typing import Any

import torch

from fuser import DataType, FusionDefinition
from fuser.ir.canonical_form import form_of


def defined_by(text: str) -> FusionDefinition:
    """Runs the text of a definition, with only the names it needs; returns the definition."""
    names: dict[str, Any] = {"FusionDefinition": FusionDefinition, "DataType": DataType}
    exec(compile(text, "<repr>", "exec"), names)
    with FusionDefinition() as fd:
        names["nvfuser_fusion"](fd)
    return fd


def again(fd: FusionDefinition) -> FusionDefinition:
    """Rebuilds a definition from its text, checks that both are equal, and returns the copy."""
    text = repr(fd)
    made = defined_by(text)
    assert repr(made) == text
    assert made.fusion == fd.fusion, _difference(fd, made) + text
    assert hash(made.fusion) == hash(fd.fusion)
    return made


def _difference(a: FusionDefinition, b: FusionDefinition) -> str:
    old, new = (str(form_of(fd.fusion).key).split("\\n") for fd in (a, b))
    return "\n".join(difflib.unified_diff(old, new, lineterm="", n=0)) + "\n"


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Asserts that values are equal bit for bit, and have equal strides."""
    assert len(found) == len(expected), f"{len(found)} tensors, expected {len(expected)}"
    for a, b in zip(found, expected, strict=True):
        kinds = [(t.dtype, tuple(t.shape), t.stride()) for t in (a, b)]
        assert kinds[0] == kinds[1], f"{kinds[0]}, expected {kinds[1]}"
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
