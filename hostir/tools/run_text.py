"""Runs a host program on simulated ranks, or as one rank of a real job, for the command line.

The inputs have global shapes, and are random or loaded from a file. Each rank gets its shards of
the inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from fuser.ir.dtypes import is_complex, is_inexact, to_torch
from fuser.ir.fusion import TensorView
from fuser.ir.op import walk
from fuser.ir.ops.nodes import RandomOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar, Symbol
from fuser.support.errors import FuserError, InputError, counted
from fuser.support.options import Settings
from hostir.ir.program import HostIrContainer
from hostir.lowering.input_class import size_symbols, symbol_values
from hostir.profiling.timeline import Trace
from hostir.profiling.tracer import HostIrEvaluator
from hostir.runtime.evaluator import MakeRunner
from hostir.runtime.inputs import Argument
from multidevice.job.communicator import Communicator
from multidevice.job.shard_tensor import shard_for_rank
from multidevice.job.simulation import simulate

# The number of streams of a run without the option `--streams`.
DEFAULT_STREAMS = 4


# ------------------------------------------------------------------ inputs
def chosen_sizes(program: HostIrContainer, sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns the value of each size of a program's inputs, by the name of its symbol. Sizes that
    are not in `sizes` have a default value."""
    values = {s.name: n for s, n in symbol_values(program, sizes).items()}
    return {name: int(values[name]) for name in size_symbols(program)}


def assumed_sizes(program: HostIrContainer, sizes: Mapping[str, int]) -> dict[str, str]:
    """Returns the sizes of a program's inputs that the user did not choose. `sizes` are the chosen
    sizes.

    The result maps the name of each symbol to the first axis of that size, as `axis 1 of T0`. Seeds
    of random numbers are left out.
    """
    seeds, found = seed_words(program), dict[str, str]()
    for tv in program.inputs:
        if not isinstance(tv, TensorView):
            continue
        for axis, x in enumerate(tv.shape()):
            for s in sc.symbols(program.values.canonical(x)):
                if s.name not in sizes and s.name not in seeds:
                    found.setdefault(s.name, f"axis {axis} of T{tv.number}")
    return found


def seed_words(program: HostIrContainer) -> dict[str, str]:
    """Returns a description of each scalar input that is the seed or the offset of random numbers:
    `seed of random numbers` or `offset of random numbers`, by the name of the input.

    Random ops inside kernels are included.
    """
    inputs = {s.name for s in program.inputs if isinstance(s, Symbol)}
    exprs = [op for group in program.groups.values() for op in group.fusion.exprs]
    found: dict[str, str] = {}
    for op in (*walk(program.ops), *exprs):
        if isinstance(op, RandomOp):
            for what, x in (("seed", op.seed), ("offset", op.offset)):
                for s in sc.symbols(x) if x is not None else ():
                    if s.name in inputs:
                        found[s.name] = f"{what} of random numbers"
    return found


def random_inputs(
    program: HostIrContainer, *, sizes: Mapping[str, int], seed: int = 0
) -> list[Argument]:
    """Returns random inputs of global shape for a program. `sizes` has the values of the symbols in
    their shapes, by name.

    Floats and complex numbers are normally distributed, and integers are in [0, 8). Raises
    `InputError` if `sizes` has a name that no input uses, or if a tensor does not fit into memory.
    """
    values = symbol_values(program, sizes)
    generator = torch.Generator().manual_seed(seed)

    def size_of(x: Scalar) -> int:
        return int(sc.evaluate(x, values))

    inputs: list[Argument] = []
    for value in program.inputs:
        if isinstance(value, TensorView):
            shape = [size_of(program.values.canonical(x)) for x in value.shape()]
            try:
                if is_inexact(value.dtype()):
                    drawn = torch.complex64 if is_complex(value.dtype()) else torch.float32
                    tensor = torch.randn(shape, generator=generator, dtype=drawn)
                else:
                    tensor = torch.randint(0, 8, shape, generator=generator)
                inputs.append(tensor.to(to_torch(value.dtype())))
            except RuntimeError as error:  # torch raises it if there is no memory
                what = f"{value} of shape {tuple(shape)}"
                raise InputError(
                    f"there is not enough memory for the input {what}: {error}"
                ) from None
        else:
            assert isinstance(value, Symbol), f"the scalar input {value} must be a symbol"
            inputs.append(values[value])
    return inputs


def load_inputs(program: HostIrContainer, path: str) -> list[Argument]:
    """Returns the global inputs of a program from the file at `path`, which `torch.save` wrote: a
    list of tensors and numbers.

    Raises `InputError` for a file of another kind, and for a list of the wrong length.
    """
    try:
        # Only tensors and numbers are read, so that a file cannot run code.
        inputs: object = torch.load(path, weights_only=True)
    except Exception as error:
        # torch's error depends on the kind of file, and may be a page long.
        why = str(error).partition("\n")[0].partition(". ")[0]
        raise InputError(
            f"{path} cannot be read as a list of tensors that torch.save wrote: {why}"
        ) from None
    if not isinstance(inputs, list | tuple):
        raise InputError(
            f"{path} holds a {type(inputs).__name__}, expected a list of all inputs of the program"
        )
    given: list[Argument] = list(inputs)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if len(given) != len(program.inputs):
        raise InputError(
            f"{path}: the program has {counted(len(program.inputs), 'input')}, but the file has "
            f"{len(given)}"
        )
    return given


def shards_of(program: HostIrContainer, inputs: Sequence[Argument], rank: int) -> list[Argument]:
    """Returns the inputs for one rank: its shards of the global `inputs`. An input without a mesh
    is returned whole."""
    return [
        shard_for_rank(value, declared, rank)
        if isinstance(declared, TensorView)
        and declared.mesh is not None
        and isinstance(value, torch.Tensor)
        else value
        for declared, value in zip(program.inputs, inputs, strict=True)
    ]


# ------------------------------------------------------------------ running
def run_here(
    program: HostIrContainer,
    inputs: Sequence[Argument],
    *,
    settings: Settings | None = None,
    make_runner: MakeRunner | None = None,
    number_of_streams: int = DEFAULT_STREAMS,
    late_stream: str | int | None = None,
) -> list[torch.Tensor]:
    """Runs the program as one rank of a job and returns the outputs of this rank. `inputs` are
    global: this rank uses its shards.

    The job's ranks may be simulated or real. An error on one rank is raised on all ranks. The other
    parameters are those of `HostIrEvaluator`.
    """
    communicator = Communicator.instance()
    mine = shards_of(program, inputs, communicator.rank())
    evaluator = HostIrEvaluator(
        program,
        communicator,
        settings=settings,
        make_runner=make_runner,
        number_of_streams=number_of_streams,
        late_stream=late_stream,
    )
    return evaluator.run(mine)


def run_simulated(
    program: HostIrContainer,
    inputs: Sequence[Argument],
    *,
    ranks: int,
    settings: Settings | None = None,
    make_runner: MakeRunner | None = None,
    number_of_streams: int = DEFAULT_STREAMS,
    late_stream: str | int | None = None,
) -> list[list[torch.Tensor]]:
    """Runs the program on `ranks` simulated ranks, which are threads of this process. Returns the
    list of outputs of each rank.

    `inputs` are global, and each rank uses its shards. The other parameters are those of
    `HostIrEvaluator`.
    """
    with simulate(ranks) as world:
        return world.run(
            run_here,
            program,
            inputs,
            settings=settings,
            make_runner=make_runner,
            number_of_streams=number_of_streams,
            late_stream=late_stream,
        )


def trace_here(
    program: HostIrContainer,
    inputs: Sequence[Argument],
    path: str,
    *,
    device: str = "cpu",
    machine: str | None = None,
    number_of_streams: int = DEFAULT_STREAMS,
) -> Trace:
    """Runs the program as one rank of a job and writes a timeline of the run to the file `path`.

    `inputs` are global: this rank uses its shards. `device` is "cpu", or "cuda" for the GPU of this
    rank. If `machine` names a machine model, the timeline also shows a prediction. See
    `HostIrEvaluator.trace`.
    """
    communicator = Communicator.instance()
    if device == "cuda":
        if not torch.cuda.is_available():
            raise InputError("--device cuda: torch finds no GPU on this machine")
        device = f"cuda:{torch.cuda.current_device()}"
    mine = shards_of(program, inputs, communicator.rank())
    placed = [x.to(device) if isinstance(x, torch.Tensor) else x for x in mine]
    evaluator = HostIrEvaluator(program, communicator, number_of_streams=number_of_streams)
    return evaluator.trace(placed, path, predicted=machine)


# ------------------------------------------------------------------ results
def summaries(outputs: Sequence[torch.Tensor], rank: int) -> str:
    """Returns one line per output of a rank: dtype, shape, mean, minimum, maximum and checksum.

    The checksum weights each element by its position, so that swapped elements change the checksum.
    """
    return "\n".join(
        f"rank {rank} output {i}: {out.dtype} {tuple(out.shape)}{_spread(out)}"
        for i, out in enumerate(outputs)
    )


def _spread(out: torch.Tensor) -> str:
    if out.numel() == 0:
        return ""
    wide = out.double().flatten()
    # Multiples of the golden ratio: practically all positions have different weights.
    weights = torch.arange(1, wide.numel() + 1, dtype=wide.dtype, device=wide.device) * 0.618033988
    return (
        f" mean {wide.mean():.6g} min {wide.min():.6g} max {wide.max():.6g}"
        f" checksum {(wide * weights.frac()).sum():.6g}"
    )


def save(outputs: Sequence[torch.Tensor], folder: str, rank: int) -> None:
    """Writes the outputs of one rank, as a list of shards, to the file `rank<N>.pt` in `folder`.

    Raises `InputError` if the file cannot be written.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.save(list(outputs), Path(folder) / f"rank{rank}.pt")
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError for a path
        raise InputError(f"--save {folder}: rank{rank}.pt cannot be written: {error}") from error


def together(communicator: Communicator, error: FuserError | OSError | None, text: str) -> str:
    """Sends `text` from each rank to all ranks. Returns the texts of all ranks, joined in the order
    of ranks.

    `error` is the error of this rank, or None. If some rank has an error, every rank raises an
    error: its own, or `PeerError` with the error of another rank.
    """
    communicator.agree(error)
    return "\n".join(t.decode() for t in communicator.exchange(text.encode()) if t)
