"""MultiDeviceExecutor: runs a fusion in which the user has sharded every tensor.

The executor uses the same lowering as a definition, with the restrictions of nvFuser's older
interface:

- Shardings are not propagated: a tensor without annotation is not sharded.
- An op that torch can compute is not part of a generated kernel. The host program runs it as a
  separate op.
- A stream axis (an axis that a loop on the host computes part by part, on several streams) is one
  of the tensor's own axes, not the result of a split or merge.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import get_type_hints

import torch

from fuser.frontend.executor_cache import FusionExecutorCache
from fuser.ir.binding import Argument
from fuser.ir.dtypes import to_torch
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.memory_layout import dense_strides_of
from fuser.ir.scalar.constructors import Scalar, int_value
from fuser.ir.types import IrEnum
from fuser.support.arguments import require
from fuser.support.errors import ArgumentError, UnsupportedError, counted
from hostir.ir.ops import PEER_COPIES
from hostir.ir.program import HostIrContainer
from hostir.lowering.params import STANDALONE, LowerParams, check_number_of_streams
from hostir.lowering.pipeline import check_stream
from multidevice.job.shard_tensor import shard_for_rank
from multidevice.sharding.queries import whole_axis_sizes


class CommunicatorBackend(IrEnum):
    """The ways to transport data between ranks.

    - `nccl`: NCCL.
    - `cuda`: peer copies, for ranks of one host. Each rank copies data out of the other rank's
      memory.
    - `ucc`: not supported.

    On CPU ranks, `nccl` selects the transport of the launcher that started the ranks, and `cuda`
    selects shared memory.
    """

    nccl = 0
    ucc = 1
    cuda = 2


@dataclass
class MultiDeviceExecutorParams:
    """Options of a `MultiDeviceExecutor`, with nvFuser's names and defaults.

    - `backend_type`: the transport between ranks.
    - `number_of_streams`: the number of CUDA streams that a loop uses if its iterations run on
      several streams.
    - `use_allocation_cache`: has no effect. Buffers inside a program are always reused by the next
      run, and outputs are never overwritten.

    Raises:
        ArgumentError: a parameter does not exist, or has the wrong type.
        DefinitionError: the number of streams is below one.
    """

    backend_type: CommunicatorBackend = CommunicatorBackend.nccl
    number_of_streams: int = 4
    use_allocation_cache: bool = False
    offset_stream_indexing_by_rank: bool = False
    inter_stream_synchronization: bool = False

    def __new__(cls, *given: object, **named: object) -> MultiDeviceExecutorParams:
        """Creates the options, after checking that all parameters exist."""
        if len(given) > len(_KINDS):
            raise ArgumentError(
                f"{cls.__name__}: got {counted(len(given), 'value')} for the {len(_KINDS)} "
                f"parameters {', '.join(_KINDS)}"
            )
        for name in named:
            _check_name(name)
        return super().__new__(cls)

    def __setattr__(self, name: str, value: object) -> None:
        _check_name(name)
        if name == "number_of_streams":
            check_number_of_streams(value, of=_PARAMS)
        super().__setattr__(name, require(_PARAMS, name, value, _KINDS[name]))

    def lower_params(self) -> LowerParams:
        """Returns these options in the form that the lowering (from fusion to host program)
        accepts.
        """
        return replace(
            STANDALONE,
            backend=_LIBRARIES[self.backend_type],
            offset_by_rank=self.offset_stream_indexing_by_rank,
            inter_stream_synchronization=self.inter_stream_synchronization,
        )


# Backend type -> transport; "" is the default transport of the device.
_LIBRARIES = {CommunicatorBackend.nccl: "", CommunicatorBackend.cuda: PEER_COPIES}
_PARAMS = MultiDeviceExecutorParams.__name__
_KINDS = get_type_hints(MultiDeviceExecutorParams)


def _check_name(name: str) -> None:
    if name not in _KINDS:
        near = get_close_matches(name, _KINDS, n=1)
        advice = f"did you mean {near[0]}?" if near else f"parameters are {', '.join(_KINDS)}"
        raise ArgumentError(f"{_PARAMS}: there is no parameter {name}; {advice}")


class MultiDeviceExecutor:
    """Runs a fusion on the ranks of its meshes.

    The user has set the mesh of every tensor, and which of the tensor's own axes (not results of
    splits and merges) are split over devices or computed part by part on streams. `str(executor)`
    is the text of the host program.

    Raises:
        UnsupportedError: an axis computed on streams is the result of a split or merge; or the
            backend is not supported.
    """

    def __init__(self, fusion: Fusion, params: MultiDeviceExecutorParams | None = None) -> None:
        require("MultiDeviceExecutor", "fusion", fusion, Fusion)
        require("MultiDeviceExecutor", "params", params, MultiDeviceExecutorParams | None)
        params = params or MultiDeviceExecutorParams()
        if params.backend_type not in _LIBRARIES:
            raise UnsupportedError(
                f"MultiDeviceExecutor: backend_type={params.backend_type.name} is not supported: "
                "use CommunicatorBackend.nccl or CommunicatorBackend.cuda"
            )
        copy, _ = fusion.copy()
        for tv in copy.tensors():
            check_stream(tv)
        self._cache = FusionExecutorCache(
            copy, params=params.lower_params(), number_of_streams=params.number_of_streams
        )

    def run(self, args: Iterable[object]) -> list[torch.Tensor]:
        """Runs the program on this rank's shards of the inputs `args`, and returns the outputs.

        The inputs are passed as to `FusionDefinition.execute`.
        """
        return self._cache.execute(args)

    def host_program(self) -> HostIrContainer:
        """Returns the host program of the most recent run.

        Before the first run, returns a host program for sample sizes.
        """
        return self._cache.program_for(self._samples())

    def _samples(self) -> list[Argument]:
        """Returns sample inputs, from which a host program can be compiled before the first run.

        The unknown sizes are multiples of the sizes of all meshes, so that each mesh splits them
        evenly.
        """
        fusion = self._cache.fusion()
        parts = {n for tv in fusion.tensors() if tv.mesh is not None for n in tv.mesh.shape}
        size = 8
        for n in parts:
            size *= n
        whole_axes = whole_axis_sizes(fusion.tensors())

        def extent(x: Scalar) -> int:
            x = fusion.canonical(x)
            return whole_axes.get(x) or int_value(x) or size

        samples: list[Argument] = []
        for value in fusion.inputs:
            if isinstance(value, TensorView):
                shape = [extent(x) for x in value.shape()]
                whole = torch.empty(shape, device="meta")
                rank = 0 if value.mesh is None else value.mesh.devices[0]
                local = whole if value.mesh is None else shard_for_rank(whole, value, rank)
                strides = dense_strides_of(value, local.shape)
                dtype = to_torch(value.dtype())
                samples.append(torch.empty_strided(local.shape, strides, dtype=dtype))
            else:
                samples.append(size)
        return samples

    def __str__(self) -> str:
        return str(self.host_program())
