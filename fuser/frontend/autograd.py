"""What torch's autograd and lazy views leave to be done before a fusion runs on inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd import forward_ad

from fuser.ir.binding import Argument
from fuser.ir.fusion import Fusion
from fuser.support.errors import InputError, warn


def _is_lazy(x: torch.Tensor) -> bool:
    return x.is_neg() or x.is_conj()


class Autograd:
    """Makes the inputs of one fusion plain, and warns once where that loses a gradient."""

    def __init__(self, fusion: Fusion) -> None:
        self._fusion = fusion
        self._is_warned = False

    def resolved(self, inputs: Sequence[Argument]) -> Sequence[Argument]:
        """Return the inputs with lazy negative and conjugate views computed; kernels read by
        address.

        Raises `InputError` for one that the program writes into.
        """
        lazy = [i for i, v in enumerate(inputs) if isinstance(v, torch.Tensor) and _is_lazy(v)]
        if not lazy:
            return inputs
        targets = {alias.into for alias in self._fusion.aliases}
        for i in lazy:
            if i < len(self._fusion.inputs) and self._fusion.inputs[i] in targets:
                given = inputs[i]
                is_conj = isinstance(given, torch.Tensor) and given.is_conj()
                kind, way = ("conjugate", "conj") if is_conj else ("negative", "neg")
                raise InputError(
                    f"input {i}, {self._fusion.inputs[i]}, is updated in place, but is a lazy "
                    f"{kind} view: pass resolve_{way}()"
                )
        return [
            v.resolve_conj().resolve_neg() if isinstance(v, torch.Tensor) else v for v in inputs
        ]

    def without_tangents(self, inputs: Sequence[Argument]) -> Sequence[Argument]:
        """Return the inputs with the values of dual tensors alone: torch would carry tangents
        through some ops of a program, and kernels through none. Warns once."""
        duals = {
            i: forward_ad.unpack_dual(v)
            for i, v in enumerate(inputs)
            if isinstance(v, torch.Tensor) and (v.is_floating_point() or v.is_complex())
        }
        lost = {i: dual.primal for i, dual in duals.items() if dual.tangent is not None}
        for i in lost:
            self._warn(i, "has a forward-mode tangent", "forward_ad.unpack_dual(x).primal")
        return [lost.get(i, v) for i, v in enumerate(inputs)] if lost else inputs

    def warn_of_gradients(self, inputs: Sequence[Argument]) -> None:
        """Warn once that outputs carry no gradient although an input asks for one."""
        if self._is_warned or not torch.is_grad_enabled():
            return
        for i, v in enumerate(inputs):
            if isinstance(v, torch.Tensor) and v.requires_grad:
                self._warn(i, "requires grad", "detach(), or run under torch.no_grad()")
                return

    def _warn(self, position: int, what: str, instead: str) -> None:
        if self._is_warned:
            return
        self._is_warned = True
        declared = self._fusion.inputs[position] if position < len(self._fusion.inputs) else "extra"
        warn(
            f"input {position}, {declared}, {what}, but no output will carry a gradient: "
            f"pass {instead}",
        )
