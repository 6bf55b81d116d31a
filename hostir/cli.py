"""`python -m hostir print|verify|run FILE`: look at, check and run a program from its text."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from fuser.errors import FuserError, InputError
from fuser.ir import scalar as sc
from fuser.ir.dtypes import category, to_torch
from fuser.ir.scalar import Scalar, Symbol
from fuser.ir.tensor import TensorView
from fuser.options import Settings
from hostir.bind import Argument
from hostir.container import HostIrContainer
from hostir.digest import run_agreed
from hostir.evaluate import HostIrEvaluator, MakeRunner
from hostir.parse import parse
from hostir.verify import verify
from multidevice.communicator import Communicator
from multidevice.shard import shard_for_rank
from multidevice.simulation import simulate

DEFAULT_SIZE = 8


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (1: the program or an input is wrong)."""
    args = _arguments().parse_args(argv)
    try:
        program = parse(Path(args.file).read_text())
        COMMANDS[args.command](program, args)
    except (FuserError, OSError, UnicodeDecodeError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hostir", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, about in (
        ("print", "print the program; with --full, everything that it needs to run"),
        ("verify", "check the rules of host programs"),
        ("run", "run it on simulated ranks"),
    ):
        command = commands.add_parser(name, help=about)
        command.add_argument("file", help="a file with the (full) text of a program")
        if name == "print":
            command.add_argument("--full", action="store_true")
        if name == "run":
            command.add_argument("--ranks", type=int, help="default: as many as the meshes need")
            command.add_argument(
                "--inputs", help="a .pt file with the list of global inputs; default: random"
            )
            command.add_argument(
                "--size",
                action="append",
                default=[],
                metavar="NAME=N",
                help=f"the value of an integer symbol of random inputs (default {DEFAULT_SIZE})",
            )
            command.add_argument("--seed", type=int, default=0)
    return parser


def _print(program: HostIrContainer, args: argparse.Namespace) -> None:
    print(program.full_text() if args.full else str(program))


def _verify(program: HostIrContainer, args: argparse.Namespace) -> None:
    program.check_full()
    verify(program, after=f"parsing {args.file}")
    print(f"{len(program.ops)} ops: the program keeps the rules")


def _run(program: HostIrContainer, args: argparse.Namespace) -> None:
    program.check_full()
    verify(program, after=f"parsing {args.file}")
    ranks = args.ranks or max((*program.devices(), 0)) + 1
    if args.inputs:
        inputs: list[Argument] = torch.load(args.inputs)
        if len(inputs) != len(program.inputs):
            raise InputError(f"expected {len(program.inputs)} inputs, got {len(inputs)}")
    else:
        inputs = random_inputs(program, sizes=_sizes(args.size), seed=args.seed)
    for rank, outputs in enumerate(run_simulated(program, inputs, ranks=ranks)):
        for i, out in enumerate(outputs):
            mean = out.double().mean().item() if out.numel() else float("nan")
            print(f"rank {rank} output {i}: {out.dtype} {tuple(out.shape)} mean {mean:.6g}")


def _sizes(options: Sequence[str]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals or not value.isdigit():
            raise InputError(f"--size {option}: expected NAME=N, such as i0=16")
        sizes[name] = int(value)
    return sizes


def random_inputs(
    program: HostIrContainer, *, sizes: dict[str, int], seed: int = 0
) -> list[Argument]:
    """Return global inputs: normal floats, integers in [0, 8); `sizes` sets symbols by name."""
    generator = torch.Generator().manual_seed(seed)

    def size_of(x: Scalar) -> int:
        values = {s: sizes.get(s.name, DEFAULT_SIZE) for s in sc.symbols(x)}
        return int(sc.evaluate(x, values))

    inputs: list[Argument] = []
    for value in program.inputs:
        if isinstance(value, TensorView):
            shape = [size_of(program.values.canonical(x)) for x in value.shape()]
            if category(value.dtype()) == "float":
                tensor = torch.randn(shape, generator=generator)
            else:
                tensor = torch.randint(0, 8, shape, generator=generator)
            inputs.append(tensor.to(to_torch(value.dtype())))
        elif category(value.dtype) == "float":
            inputs.append(1.5)
        else:
            assert isinstance(value, Symbol), f"input scalar {value} is no symbol"
            inputs.append(sizes.get(value.name, DEFAULT_SIZE))
    return inputs


def run_simulated(
    program: HostIrContainer,
    inputs: Sequence[Argument],
    *,
    ranks: int,
    settings: Settings | None = None,
    make_runner: MakeRunner | None = None,
) -> list[list[torch.Tensor]]:
    """Run on simulated ranks, each with its shards of the inputs; returns outputs by rank.

    `settings` and `make_runner` are those of `HostIrEvaluator`.
    """

    def body() -> list[torch.Tensor]:
        communicator = Communicator.instance()
        mine = shards_of(program, inputs, communicator.rank())
        evaluator = HostIrEvaluator(
            program, communicator, settings=settings, make_runner=make_runner
        )
        return run_agreed(evaluator, mine, communicator)

    with simulate(ranks) as world:
        return world.run(body)


def shards_of(program: HostIrContainer, inputs: Sequence[Argument], rank: int) -> list[Argument]:
    """Return a rank's local shards of global inputs."""
    return [
        shard_for_rank(value, declared, rank)
        if isinstance(declared, TensorView)
        and declared.mesh is not None
        and isinstance(value, torch.Tensor)
        else value
        for declared, value in zip(program.inputs, inputs, strict=True)
    ]


COMMANDS = {"print": _print, "verify": _verify, "run": _run}
