"""QuACK's kernels for patterns along rows, where its package `quack-kernels` is installed.

They are timed with ours and torch's, but are in no ratio to torch. Results have the order of the
pattern's outputs, so that they can be compared with float64 in the same way.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from kernel_patterns.pattern import EPSILON

NAME = "quack"


def _from(module: str) -> Any:
    """Returns a module of QuACK's; its package has functions of the same names."""
    return importlib.import_module(f"quack.{module}")


def _layer_norm_kept(x: Any, w: Any, b: Any) -> Any:
    norm = _from("rmsnorm").layernorm_fwd
    y, r, mean = norm(x, w, b, EPSILON, return_rstd=True, return_mean=True)
    return y, mean, r


def _rms_norm_kept(x: Any, w: Any) -> Any:
    y, _, r = _from("rmsnorm").rmsnorm_fwd(x, w, eps=EPSILON, store_rstd=True)
    return y, r


# Pattern -> a function that calls the kernel on the pattern's inputs.
KERNELS: dict[str, Callable[..., Any]] = {
    "softmax": lambda x: _from("softmax").softmax_fwd(x),
    "softmax_backward": lambda dy, y: _from("softmax").softmax_bwd(dy, y),
    "cross_entropy": lambda x, t: _from("cross_entropy").cross_entropy_fwd(x, t),
    "cross_entropy_and_gradient": lambda x, t: _from("cross_entropy").cross_entropy_fwd(
        x, t, return_dx=True
    ),
    "cross_entropy_backward": lambda dy, x, t, lse: _from("cross_entropy").cross_entropy_bwd(
        x, t, dy, lse
    ),
    "layer_norm_kept": _layer_norm_kept,
    "rms_norm": lambda x, w: _from("rmsnorm").rmsnorm_fwd(x, w, eps=EPSILON)[0],
    "rms_norm_kept": _rms_norm_kept,
    "residual_rms_norm_wide": lambda x, r, w: _from("rmsnorm").rmsnorm_fwd(
        x, w, residual=r, eps=EPSILON
    )[:2],
    "layer_norm_gradients": lambda dy, x, w, m, r: _from("rmsnorm").layernorm_bwd(x, w, dy, r, m),
    "rms_norm_gradients": lambda dy, x, w, r: _from("rmsnorm").rmsnorm_bwd(x, w, dy, r)[:2],
}


def is_installed() -> bool:
    """Whether QuACK is installed."""
    return importlib.util.find_spec(NAME) is not None
