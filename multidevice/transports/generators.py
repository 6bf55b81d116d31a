"""Torch's random number generators, one of each for every simulated rank, as processes have."""

from __future__ import annotations

import torch


class Generators:
    """The states of the generators of ranks that are not running. They begin as the caller's."""

    def __init__(self, size: int) -> None:
        self._states = [_states()] * size

    def take(self, rank: int) -> None:
        """Let torch's generators be those of a rank, which runs from now on."""
        _restore(self._states[rank])

    def leave(self, rank: int) -> None:
        """Keep the generators of a rank, which does not run any more."""
        self._states[rank] = _states()


def _states() -> tuple[torch.Tensor, list[torch.Tensor]]:
    return torch.default_generator.get_state(), [g.get_state() for g in _of_gpus()]


def _restore(states: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    host, gpus = states
    torch.default_generator.set_state(host)
    for generator, state in zip(_of_gpus(), gpus, strict=False):
        generator.set_state(state)


def _of_gpus() -> tuple[torch.Generator, ...]:
    """Return those that can be asked: none while a graph is captured, where nobody draws."""
    is_idle = torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()
    return torch.cuda.default_generators if is_idle else ()
