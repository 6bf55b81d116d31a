"""For which programs something decides about overlap, on which machine, by which transports."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from fuser.frontend.program_cache import PROGRAMS
from fuser.ir.fusion import Fusion
from fuser.ir.ops.nodes import Contraction
from fuser.support.options import Settings
from hostir.cost.machine_model import H200, find_machine, machine_of
from hostir.cost.overlap_search import FORCED, MARGIN, NoOverlap, Overlaps
from hostir.ir.transfers import PEER_COPIES
from hostir.lowering.params import LowerParams
from multidevice.job.communicator import Communicator
from multidevice.sharding.queries import has_streams, requested_devices


def overlaps_of(
    fusion: Fusion,
    key: Hashable,
    communicator: Communicator,
    device: torch.device,
    backend: str,
    settings: Settings,
    params: LowerParams,
) -> Overlaps | NoOverlap:
    """Return what decides which steps the programs of a key take.

    On CPU ranks, where streams do not run side by side, only the options `machine` and `steps` ask
    for it.
    """
    devices = requested_devices(fusion)
    if why := _why_not(fusion, devices, settings, params):
        return NoOverlap(why)
    name = settings.argument("machine")
    machine = find_machine(name, device) if name is not None else None
    if machine is None and device.type == "cuda":
        machine = machine_of(device)
    is_forced = settings.enabled("steps")
    machine = H200 if machine is None and is_forced else machine
    if machine is None:
        return NoOverlap(
            f"nothing describes these {device.type} ranks: FUSER_ENABLE=machine(h200) takes that "
            "description, machine(measured) that of `python -m hostir calibrate` (docs/cost.md), "
            "and FUSER_ENABLE=steps takes steps whether they pay or not"
        )
    # What a description says of links is true within a host, on which ranks are thought to be that
    # this job does not have. Asked for last: it may connect.
    has_ranks = devices[-1] < communicator.size()
    if has_ranks and not communicator.are_on_one_host(devices):
        return NoOverlap("the ranks are on several hosts")
    can_copy = communicator.have_access(device)
    transports = (PEER_COPIES, backend) if can_copy else (backend,)
    captured = () if settings.disabled("cuda_graphs") else _captured(communicator, device, can_copy)
    return PROGRAMS.overlaps(
        (key, machine.to_json(), transports),
        lambda: Overlaps(
            machine,
            backend=backend,
            transports=transports,
            params=params,
            captured=captured,
            margin=FORCED if is_forced else MARGIN,
        ),
    )


def _captured(communicator: Communicator, device: torch.device, can_copy: bool) -> tuple[str, ...]:
    """Return the libraries whose communications a CUDA graph repeats."""
    if device.type != "cuda":
        return ()
    library = communicator.backend_for(device)
    found = (library.name.upper(),) if library.can_capture("batch") else ()
    if can_copy and communicator.peers_for(device).can_capture("batch"):
        found += (PEER_COPIES,)
    return found


def _why_not(
    fusion: Fusion, devices: tuple[int, ...], settings: Settings, params: LowerParams
) -> str:
    """Return why the user's definition, or the options, leave nothing to decide; "" if they do."""
    if settings.disabled("auto_overlap"):
        return "auto_overlap is disabled"
    if params.standalone:
        return "MultiDeviceExecutor takes the definition as it stands"
    if len(devices) < 2:
        return "there is one rank"
    if has_streams(fusion):
        return "the definition has stream axes of its own"
    if not any(isinstance(op, Contraction) for op in fusion.exprs):
        return "there is no matmul"
    return ""
