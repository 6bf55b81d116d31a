"""`simulate(n)`: runs a function on n simulated ranks, which are threads of one process.

    with multidevice.simulate(4) as world:
        results = world.run(train_step, batch)

Inside the function, `Communicator.instance()` is the communicator of the rank that runs it.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch

from fuser.support import options
from fuser.support.errors import CommunicationError, PeerError
from multidevice.coordination.launcher import LauncherInfo
from multidevice.job.communicator import Communicator, current_communicator
from multidevice.transports.simulated import (
    Baton,
    SimulatedBackend,
    SimulatedControl,
    SimulatedPeers,
)

P = ParamSpec("P")
R = TypeVar("R")

# How often the waiting main thread checks for Ctrl-C.
_JOIN_SLICE_S = 0.1


class World:
    """A set of simulated ranks; each call of `run` starts one new thread per rank."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise CommunicationError(f"a simulated world needs at least one rank, found {size}")
        options.check_dump_ranks(size)
        self.size = size
        self._closed = False

    def run(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Calls `fn` on every simulated rank, and returns the results in rank order.

        The ranks are threads, of which one runs at a time. Grad mode, the CUDA device and the
        context variables are those of the caller. Each rank has its own states of torch's random
        number generators, as processes have. At first these are the caller's states. Afterwards the
        caller has the states of rank 0.

        Raises:
            Exception: the error of the rank that failed first; the other ranks raised `PeerError`.
            DeadlockError: no rank could continue; the message shows the call in which each rank
                waits.
        """
        if self._closed:
            raise CommunicationError(
                "this simulated world is closed: call run inside its `with` statement"
            )
        baton = Baton(self.size)
        controls = [SimulatedControl(rank, self.size, baton) for rank in range(self.size)]
        results: dict[int, R] = {}
        errors: list[BaseException] = []
        grad = torch.is_grad_enabled()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def body(rank: int) -> None:
            error: BaseException | None = None
            baton.begin(rank)
            try:
                torch.set_grad_enabled(grad)
                if device is not None:
                    torch.cuda.set_device(device)
                current_communicator.set(self._communicator(rank, controls[rank]))
                results[rank] = fn(*args, **kwargs)
            except BaseException as caught:
                error = caught
                errors.append(caught)
            finally:
                baton.end(rank, error)

        threads = [
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(body, rank),
                name=f"rank {rank}",
                daemon=True,
            )
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        baton.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(_JOIN_SLICE_S)
        except KeyboardInterrupt:
            baton.fail(lambda: CommunicationError("the simulated run was interrupted"))
            raise
        finally:
            # Drop the callbacks, so that the backends are freed even if the user still holds a
            # control channel.
            for control in controls:
                control.on_lost.clear()
                control.on_mended.clear()
        baton.generators.take(0)
        if errors:
            raise _first_real(errors)
        return [results[rank] for rank in range(self.size)]

    def _communicator(self, rank: int, control: SimulatedControl) -> Communicator:
        launch = LauncherInfo("simulated", rank, self.size, rank, self.size)
        return Communicator(
            launch,
            control,
            lambda device: SimulatedBackend(control),
            lambda device: SimulatedPeers(control, device),
        )

    def close(self) -> None:
        """Closes this set of simulated ranks: later calls of `run` raise an error."""
        self._closed = True


@contextmanager
def simulate(size: int) -> Generator[World, None, None]:
    """Returns a context whose value is a `World` of `size` simulated ranks."""
    world = World(size)
    try:
        yield world
    finally:
        world.close()


def _first_real(errors: list[BaseException]) -> BaseException:
    """Returns the first error that is not a `PeerError`, because a `PeerError` only reports the
    error of another rank.

    If all errors are `PeerError`, returns the first of them.
    """
    for error in errors:
        if not isinstance(error, PeerError):
            return error
    return errors[0]
