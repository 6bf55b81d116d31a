"""`python -m hostir COMMAND FILE`: prints, changes, checks and runs host programs that are stored
as text."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, TypeVar, cast

from fuser.ir.canonical_form import Key, op_key
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.op import Op, op_text, value_text, walk
from fuser.ir.text.printer import domain_text
from fuser.support.errors import (
    FuserError,
    InputError,
    OptionError,
    UnsupportedError,
    VerifyError,
    counted,
)
from hostir.analysis.preflight import findings, ranks_to_look_at
from hostir.cost import calibrate
from hostir.cost.machine_model import MACHINES, MEASURED, find_machine, usual_machine
from hostir.cost.report import predict, report
from hostir.cost.simulator import SimulatedSchedule, simulated_schedule
from hostir.ir.diagnostics import refuse
from hostir.ir.ops import NUMBER_OF_STREAMS, KernelGroup
from hostir.ir.parser import read_program
from hostir.ir.printer import NOTES, SHORT_FORM
from hostir.ir.program import HostIrContainer
from hostir.ir.queries import has_communications, has_streams
from hostir.ir.verifier import verify
from hostir.lowering.input_class import SMALLEST_SIZE, symbol_values
from hostir.lowering.pipeline import lower_streams
from hostir.passes.deallocation import PASSES, Pass, run_passes
from hostir.profiling.timeline import Trace, trace_text
from hostir.runtime.inputs import Argument
from hostir.tools.explain import explain
from hostir.tools.run_text import (
    DEFAULT_STREAMS,
    assumed_sizes,
    chosen_sizes,
    load_inputs,
    random_inputs,
    run_here,
    run_simulated,
    save,
    seed_words,
    summaries,
    together,
    trace_here,
)
from multidevice.coordination.launcher import read_launch
from multidevice.job.communicator import Communicator
from multidevice.job.simulation import simulate

T = TypeVar("T")
# Any number with so many digits fits into 64 bits.
_SIZE_DIGITS = 18


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command of `python -m hostir` and returns the exit code of the process.

    `argv` are the arguments of the command line; None means the arguments of this process. The exit
    code is 1 for an error, and for two programs that differ in the command `diff`.
    """
    parser = _arguments()
    args, rest = parser.parse_known_args(argv)
    if rest:
        hint = (
            "; several sizes are -s i0=16,i1=8 or -s i0=16 -s i1=8"
            if getattr(args, "size", ())
            else ""
        )
        parser.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    try:
        return args.run(args) or 0
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe. Redirect later flushes, which would fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (FuserError, OSError) as error:
        launch = read_launch()
        who = f"rank {launch.rank}: " if launch.size > 1 else ""
        # One write call, because the ranks of a job share stderr.
        sys.stderr.write(f"{who}{type(error).__name__}: {error}\n")
        return 1


# ------------------------------------------------------------------ the commands
def _print(args: argparse.Namespace) -> None:
    """prints a program; --full also prints its kernels and memory layouts, so that the text can be
    run; --names prints the names of tensors without their types"""
    program = read_program(args.file, number=args.program)
    if args.names:
        print(f"// {NOTES['names']}\n{program.names_text()}", end="")
    elif args.full:
        program.check_full()
        print(program.full_text())
    else:
        print(f"// {SHORT_FORM}{program}", end="")


def _opt(args: argparse.Namespace) -> None:
    """runs compiler passes over a program, verifies it after each, and prints the full form of the
    result"""
    program = read_program(args.file, number=args.program)
    chosen = PASSES if args.passes is None else tuple(map(_pass_of, args.passes.split(",")))
    before = [program]

    def show(name: str, after: HostIrContainer) -> None:
        print(f"// before {name}{before[-1]}// after {name}{after}", end="")
        before.append(after)

    program = run_passes(program, chosen, after_each=show if args.print_after_all else None)
    if args.output:
        _write(args.output, program.full_text())
    elif not args.print_after_all:
        print(program.full_text())


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except (OSError, ValueError) as error:
        raise InputError(f"--output {path} cannot be written: {error}") from None


def _pass_of(name: str) -> Pass:
    known = {one.__name__: one for one in (lower_streams, *PASSES)}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        raise OptionError(
            f"there is no pass {name!r} for host programs"
            f"{f'; did you mean {near[0]!r}?' if near else ''}\n"
            f"The passes are, in their order: {', '.join(known)}"
        )
    return known[name]


def _run(args: argparse.Namespace) -> None:
    """runs a program on simulated ranks, or on the ranks of an mpirun or torchrun job"""
    launch = read_launch()
    if launch.size > 1:
        _run_in_job(args, launch.size)
        return
    program = _checked(args)
    _say_sizes(args, program)
    _say_unchecked(args)
    ranks = _simulated_ranks(args, program)
    inputs = _inputs(args, program)
    by_rank = run_simulated(
        program, inputs, ranks=ranks, number_of_streams=args.streams, late_stream=args.late
    )
    for rank, outputs in enumerate(by_rank):
        if args.save:
            save(outputs, args.save, rank)
        print(summaries(outputs, rank))


def _needed_ranks(program: HostIrContainer) -> int:
    return max((*program.devices(), 0)) + 1


def _simulated_ranks(args: argparse.Namespace, program: HostIrContainer) -> int:
    if args.ranks is None:
        return _needed_ranks(program)
    if args.ranks < 1:
        raise InputError(f"--ranks {args.ranks}: the number of ranks must be at least 1")
    return args.ranks


def _run_in_job(args: argparse.Namespace, size: int) -> None:
    """Runs the program of the command `run` as one rank of a job that has `size` ranks. Rank 0
    prints the results of all ranks."""
    communicator = Communicator.instance()
    program, inputs = _prepared(args, size, communicator)
    outputs = run_here(
        program,
        inputs,
        number_of_streams=args.streams,
        late_stream=args.late,
    )
    error: FuserError | None = None
    try:
        if args.save:
            save(outputs, args.save, communicator.rank())
    except FuserError as found:
        error = found
    text = together(communicator, error, summaries(outputs, communicator.rank()))
    if communicator.rank() == 0:
        print(text)


def _prepared(
    args: argparse.Namespace, size: int, communicator: Communicator
) -> tuple[HostIrContainer, list[Argument]]:
    """Returns the program and its global inputs, for a command that runs as one rank of a job with
    `size` ranks.

    If one rank has an error, for example a missing file, all ranks raise an error.
    """
    try:
        if args.ranks not in (None, size):
            raise InputError(
                f"--ranks {args.ranks} was given, but the launcher started "
                f"{counted(size, 'rank')}: leave out --ranks"
            )
        program = _checked(args)
        inputs = _inputs(args, program)
        if communicator.rank() == 0:
            _say_sizes(args, program)
            _say_unchecked(args)
    except (FuserError, OSError) as error:
        communicator.agree(error)
        raise
    communicator.agree(None)
    return program, inputs


def _say_unchecked(args: argparse.Namespace) -> None:
    """Prints a note to stderr if the option `--late` is used. With `--late`, which delays a
    stream's work to make a missing wait visible, races and mismatches between ranks are not checked
    before the run."""
    if getattr(args, "late", None) is not None:
        print(
            "with --late, races between streams and communications of ranks are not checked before "
            f"the run: python -m hostir verify {args.file} checks both",
            file=sys.stderr,
        )


def _checked(args: argparse.Namespace) -> HostIrContainer:
    if args.streams < 1:
        raise InputError(f"--streams {args.streams}: the number of streams must be at least 1")
    program = read_program(args.file, number=args.program)
    program.check_full()
    verify(program, after=f"parsing {args.file}")
    return program


def _inputs(args: argparse.Namespace, program: HostIrContainer) -> list[Argument]:
    if args.inputs and args.size:
        raise InputError(
            "--size cannot be used with --inputs, because the tensors in that file already have "
            "sizes: leave out --size"
        )
    if args.inputs:
        return load_inputs(program, args.inputs)
    seed = args.seed or 0
    if not -(2**63) <= seed < 2**64:
        raise InputError(
            f"--seed {seed}: the seed must fit into 64 bits, from {-(2**63)} to {2**64 - 1}"
        )
    return random_inputs(program, sizes=_sizes(args.size), seed=seed)


def _say_sizes(args: argparse.Namespace, program: HostIrContainer) -> None:
    """Prints the sizes that the command uses for the program's symbols, and marks the sizes that
    the user did not choose."""
    given = _sizes(args.size)
    found = chosen_sizes(program, given)
    if found and not getattr(args, "inputs", None):
        words = seed_words(program)
        texts = (
            f"{f'{words[k]} ' if k in words else ''}{k}={n}{'' if k in given else ' (not given)'}"
            for k, n in found.items()
        )
        print(f"sizes: {', '.join(texts)}")


def _say_assumed(args: argparse.Namespace, program: HostIrContainer) -> None:
    """Prints the default sizes on which a prediction depends, and the options by which the user can
    choose other sizes."""
    given = _sizes(args.size)
    found, sizes = assumed_sizes(program, given), chosen_sizes(program, given)
    if found:
        texts = ", ".join(f"{name}={sizes[name]} ({where})" for name, where in found.items())
        options = " ".join(f"--size {name}=N" for name in found)
        print(f"assumed: {texts}; the prediction is for these sizes alone: give {options}")


def _sizes(options: Sequence[str]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for option in (part for given in options for part in given.split(",")):
        name, equals, value = option.partition("=")
        if not equals or not (value.isascii() and value.isdigit()):
            raise InputError(f"--size {option}: expected NAME=N, such as i0=16")
        if len(value) > _SIZE_DIGITS:
            raise InputError(f"--size {option}: a size can have at most {_SIZE_DIGITS} digits")
        if sizes.get(name, int(value)) != int(value):
            raise InputError(
                f"--size {option}: {name} was already given as {sizes[name]}; give each size once"
            )
        sizes[name] = int(value)
    return sizes


def _verify(args: argparse.Namespace) -> None:
    """checks a program: its rules, races between streams, and communications of ranks"""
    program = _checked(args)
    values = symbol_values(program, _sizes(args.size))
    _say_sizes(args, program)
    print(
        f"{sum(1 for _ in walk(program.ops))} ops: the program obeys all rules of single operations"
    )
    values[NUMBER_OF_STREAMS] = args.streams
    found = findings(program, values)
    refuse(program, found, what=f"with {counted(args.streams, 'stream')}")
    if has_streams(program):
        looked, classes = ranks_to_look_at(program, values, program.devices() or (0,))
        where = f" on {len(looked)} ranks of {classes} that differ" if len(looked) < classes else ""
        print(
            f"with {counted(args.streams, 'stream')}, waits order all conflicting uses of "
            f"buffers{where}"
        )
    if has_communications(program):
        print(f"the communications of the {len(program.devices())} ranks match")


def _cost(args: argparse.Namespace) -> None:
    """predicts time, communication, memory and waits of a program, without running anything"""
    program, made = _simulated(args)
    found = predict(program, made)
    if args.json:
        sizes = chosen_sizes(program, _sizes(args.size))
        assumed = [*assumed_sizes(program, _sizes(args.size))]
        print(json.dumps({"sizes": sizes, "assumed": assumed, **found.to_dict()}, indent=2))
        return
    _say_sizes(args, program)
    _say_assumed(args, program)
    print(report(found))


def _trace(args: argparse.Namespace) -> None:
    """writes the predicted timeline of a program for Perfetto; --run adds that of a real run"""
    if not args.run_it:
        for name in ("inputs", "seed", "device"):
            if getattr(args, name) is not None:
                raise InputError(f"--{name} is for a real run only: add --run")
        program, made = _simulated(args)
        _write(args.output, trace_text(program, made))
        _say_sizes(args, program)
        _say_assumed(args, program)
        print(
            f"{args.output}: {len(made.work)} operations, predicted by the cost model; nothing was "
            "run"
        )
        return
    launch, device = read_launch(), args.device or "cpu"

    def here(program: HostIrContainer, inputs: list[Argument]) -> Trace:
        return trace_here(
            program,
            inputs,
            args.output,
            device=device,
            machine=_machine(args),
            number_of_streams=args.streams,
        )

    if launch.size > 1:
        communicator = Communicator.instance()
        trace = here(*_prepared(args, launch.size, communicator))
        if communicator.rank() == 0:
            print(trace.summary())
        return
    program = _checked(args)
    inputs = _inputs(args, program)
    _say_sizes(args, program)
    with simulate(_simulated_ranks(args, program)) as world:
        print(world.run(here, program, inputs)[0].summary())


def _calibrate(args: argparse.Namespace) -> None:
    """measures this machine for the cost model; under mpirun also the links between ranks"""
    communicator = Communicator.instance()
    told = calibrate.calibrate_here(communicator, args.device, args.output)
    if communicator.rank() == 0:
        print(told)


def _machine(args: argparse.Namespace) -> str:
    return usual_machine() if args.machine is None else args.machine


def _simulated(args: argparse.Namespace) -> tuple[HostIrContainer, SimulatedSchedule]:
    program = _checked(args)
    needed = _needed_ranks(program)
    if args.ranks not in (None, needed):
        raise InputError(
            f"--ranks {args.ranks}: the program's meshes need {counted(needed, 'rank')}"
        )
    ranks = range(args.ranks) if args.ranks is not None else ()
    return program, _schedule(args, program, ranks)


def _schedule(
    args: argparse.Namespace, program: HostIrContainer, ranks: Sequence[int] = ()
) -> SimulatedSchedule:
    """Returns the times at which the ops of a program begin and end on the machine of the options.

    `ranks` defaults to the ranks of the program's meshes.
    """
    values = symbol_values(program, _sizes(args.size))
    values[NUMBER_OF_STREAMS] = args.streams
    return simulated_schedule(program, values, find_machine(_machine(args)), ranks=ranks)


def _diff(args: argparse.Namespace) -> int:
    """compares two programs; the exit code is 1 if the programs differ"""
    a = read_program(args.file, number=args.program)
    b = read_program(args.other, number=args.other_program)
    if a.is_short or b.is_short:
        print(
            "// memory layouts, aliases and kernels are not compared: a text is in its short form"
        )
    found = differences(a, b)
    print("\n".join(found) or "the programs are equal")
    return 1 if found else 0


def _why(args: argparse.Namespace) -> None:
    """explains why a tensor is sharded, and why each communication is necessary, with its cost"""
    program = read_program(args.file, number=args.program)
    try:
        program.check_full()
        found, why_not = predict(program, _schedule(args, program)), ""
    except (InputError, UnsupportedError, VerifyError) as error:
        if args.size or args.machine is not None:
            raise
        found, why_not = None, str(error).partition("\n")[0]
    lines = explain(program, args.tensor, found)
    if any(line.startswith("  cost: ") for line in lines):
        _say_sizes(args, program)
        _say_assumed(args, program)
    print("\n".join(lines) or "the program communicates nothing")
    if why_not and has_communications(program):
        print(f"the costs are not known: {why_not}")


# ----------------------------------------------------------------------
# Comparing two programs by structure: ops are aligned, and the first differing field is reported.


def differences(a: HostIrContainer, b: HostIrContainer) -> list[str]:
    """Returns one line per difference between two host programs, as `field: value in a | value in
    b`. Returns [] if the programs are equal.

    Tensors and other values are compared by number, as in `hostir.equal`. The user's source lines
    are not compared. If one program was read from the short form, facts that this form lacks are
    not compared.
    """
    is_short = a.is_short or b.is_short
    found = [
        *_values(a.values, b.values, is_short=is_short),
        *_tensors(a.tensors(), b.tensors(), is_short=is_short),
        *_ops(a.ops, b.ops),
    ]
    if is_short:
        return found
    found += _by_number("kernel group", a.groups, b.groups, _groups)
    found += _by_number("host unit", a.units, b.units, _fusions)
    return found


def _by_number(
    what: str, a: Mapping[int, T], b: Mapping[int, T], compare: Callable[[T, T], Iterator[str]]
) -> Iterator[str]:
    for number in sorted({*a, *b}):
        if number in a and number in b:
            yield from (f"{what} {number}, {line}" for line in compare(a[number], b[number]))
        else:
            yield f"{what} {number}: only in {'a' if number in a else 'b'}"


def _groups(a: KernelGroup, b: KernelGroup) -> Iterator[str]:
    yield from _two("scheduler", a.scheduler, b.scheduler)
    yield from _fusions(a.fusion, b.fusion)


def _fusions(a: Fusion, b: Fusion) -> Iterator[str]:
    yield from _values(a, b, is_short=False)
    yield from _tensors(a.tensors(), b.tensors(), is_short=False)
    yield from _ops(a.exprs, b.exprs)


def _two(what: str, a: object, b: object) -> Iterator[str]:
    if (mine := _text(a)) != (theirs := _text(b)):
        yield f"{what}: {mine} | {theirs}"


def _text(value: object) -> str:
    """Returns a short text for a value that differs between two programs: that of an op's field.
    The text for a tensor is its label.
    """
    match value:
        case TensorView():
            return value.label
        case Op():
            return value.name
        case list() | tuple():
            return ", ".join(map(_text, cast("Sequence[object]", value))) or "none"
        case None:
            return "none"
        case _:
            return value_text(value)


# ------------------------------------------------------------------ values
def _values(a: Fusion, b: Fusion, *, is_short: bool) -> Iterator[str]:
    yield from _two("inputs", a.inputs, b.inputs)
    yield from _two("outputs", a.outputs, b.outputs)
    if is_short:
        return
    aliases, others = (
        [f"T{x.out.number} -> T{x.into.number}{' hidden' * x.hidden}" for x in f.aliases]
        for f in (a, b)
    )
    yield from _two("aliases", aliases, others)
    yield from _two(
        "equal extents", *([f"{s} = {x}" for s, x in f.equal_extents()] for f in (a, b))
    )


def _tensors(a: Sequence[TensorView], b: Sequence[TensorView], *, is_short: bool) -> Iterator[str]:
    """Yields the differences between tensors that have the same number in two programs. The texts
    of the tensors' axes are compared.

    If `is_short`, only the first line of each text is compared, because the short form of a program
    contains no other lines.
    """
    mine, theirs = ({tv.number: tv for tv in tensors} for tensors in (a, b))
    for number in sorted({*mine, *theirs}):
        if number not in mine or number not in theirs:
            side, tv = ("a", mine[number]) if number in mine else ("b", theirs[number])
            yield f"T{number}: only in {side}: {tv}"
            continue
        lines, others = (domain_text(side[number]).splitlines() for side in (mine, theirs))
        pairs = zip(lines[: 1 if is_short else None], others, strict=False)
        differing = next(((x, y) for x, y in pairs if x != y), None)
        if differing is None and len(lines) != len(others) and not is_short:
            differing = lines[-1], others[-1]
        if differing is not None:
            yield from _two(f"T{number}", *(line.strip() for line in differing))


# ------------------------------------------------------------------ ops
def _ops(a: Sequence[Op], b: Sequence[Op], where: str = "") -> Iterator[str]:
    """Yields the differences between two lists of ops. Equal ops in both lists are aligned, so that
    an inserted op is one difference.

    `where` is the text of the loop or branch around the ops. The first op has number 1, as in
    errors about ranks with different programs.
    """
    mine, theirs = list(map(op_key, a)), list(map(op_key, b))
    for kind, i, i_end, j, j_end in SequenceMatcher(None, mine, theirs, False).get_opcodes():
        if kind != "equal":
            yield from _block(a, (i, i_end), b, (j, j_end), where)


def _block(
    a: Sequence[Op], at: tuple[int, int], b: Sequence[Op], there: tuple[int, int], where: str
) -> Iterator[str]:
    """Yields the differences between a part of the list `a` and a part of the list `b` that have no
    equal ops.

    `at` and `there` are (start, stop) of the parts of `a` and `b`. Ops of the same class are
    compared field by field. `where` is the text of the loop or branch around the ops.
    """
    kinds = (
        [type(op).__name__ for op in a[slice(*at)]],
        [type(op).__name__ for op in b[slice(*there)]],
    )
    for kind, i, i_end, j, j_end in SequenceMatcher(None, *kinds, False).get_opcodes():
        if kind == "equal":
            for m, n in zip(range(i, i_end), range(j, j_end), strict=True):
                place = f"{where}{at[0] + m + 1}"
                yield from _pair(a[at[0] + m], b[there[0] + n], place)
            continue
        for side, ops, start, stop in (
            ("a", a, at[0] + i, at[0] + i_end),
            ("b", b, there[0] + j, there[0] + j_end),
        ):
            for k in range(start, stop):
                yield f"op {where}{k + 1} only in {side}: {' '.join(op_text(ops[k]).split())}"


def _pair(a: Op, b: Op, place: str) -> Iterator[str]:
    """Yields the first field that differs between two ops of the same class, and the differences
    between the ops of their loop bodies or branches.

    `place` is the number of the op, as text.
    """
    regions = a.fields_of("region")
    mine, theirs = _fields(op_key(a)), _fields(op_key(b))
    for name in (n for n in mine if mine[n] != theirs[n] and n not in regions):
        yield from _two(f"op {place}, {a.name}: {name}", getattr(a, name), getattr(b, name))
        break
    for name in regions:
        yield from _ops(getattr(a, name), getattr(b, name), f"{place}.{name}.")


def _fields(key: Key) -> dict[str, Any]:
    pairs: Any = key[1:]
    return dict(pairs)


# ------------------------------------------------------------------ their arguments
def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hostir", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(run: Callable[[argparse.Namespace], int | None]) -> argparse.ArgumentParser:
        made = commands.add_parser(run.__name__.strip("_"), help=run.__doc__)
        made.set_defaults(run=run)
        return made

    def file(made: argparse.ArgumentParser, name: str = "file") -> None:
        made.add_argument(
            name,
            help="a program's text, a dump, or the output of a job with a dump; -: stdin",
        )

    one = command(_print)
    form = one.add_mutually_exclusive_group()
    form.add_argument("--full", action="store_true")
    form.add_argument("--names", action="store_true")
    file(one)
    opt = command(_opt)
    names = ",".join(p.__name__ for p in PASSES) + "; lower_streams: of a program by hand"
    opt.add_argument(
        "-p", "--passes", help=f"passes to run, in this order; default: all of {names}"
    )
    opt.add_argument(
        "--print-after-all",
        action="store_true",
        help="print the program before and after each pass, not the full form",
    )
    opt.add_argument("-o", "--output", metavar="FILE", help="the file for the full form")
    file(opt)
    run = command(_run)
    run.add_argument(
        "--ranks", type=int, help="simulated ranks; default: as many as the meshes need"
    )
    run.add_argument(
        "--late",
        metavar="STREAM",
        help="a stream's number, entry, or all: delay its work as far as the program's own waits "
        "allow (CPU only), so that a missing wait shows in the results",
    )
    run.add_argument("--save", metavar="DIR", help="write each rank's outputs to DIR/rank<N>.pt")
    file(run)
    verify = command(_verify)
    file(verify)
    cost, trace = command(_cost), command(_trace)
    cost.add_argument("--json", action="store_true", help="print the whole report as JSON")
    trace.add_argument("-o", "--output", metavar="FILE", required=True, help="such as trace.json")
    trace.add_argument(
        "--run",
        action="store_true",
        dest="run_it",
        help="also run the program, on simulated ranks or those of the job, and write its timeline",
    )
    trace.add_argument(
        "--device", choices=("cpu", "cuda"), help="the device of the run; default: cpu"
    )
    for made in (run, trace):
        made.add_argument(
            "--inputs", help="a .pt file with the list of global inputs; default: random"
        )
        made.add_argument("--seed", type=int, help="the seed of random inputs; default: 0")
    why = command(_why)
    why.add_argument(
        "tensor", help="T7: this tensor and its communications; all: every communication"
    )
    for made in (cost, trace):
        made.add_argument(
            "--ranks", type=int, help="the number of ranks; default: that of the meshes"
        )
    for made in (cost, trace, why):
        made.add_argument(
            "--machine",
            help=f"{', '.join(MACHINES)}, {MEASURED} (see calibrate), or a description: a file "
            f"NAME.json; default: {MEASURED} if this machine's GPUs were measured, else h200",
        )
        file(made)
    for made in (run, verify, cost, trace, why):
        made.add_argument(
            "--streams",
            type=int,
            default=DEFAULT_STREAMS,
            help=f"the number of streams; default: {DEFAULT_STREAMS}",
        )
        made.add_argument(
            *("--size", "-s"),
            action="append",
            default=[],
            metavar="NAME=N",
            help="a size, as i0=16, or several, as i0=16,i1=8; default: divisible by all meshes, "
            f"at least {SMALLEST_SIZE}",
        )
    measure = command(_calibrate)
    measure.add_argument("-o", "--output", metavar="FILE.json", help="default: in the cache folder")
    measure.add_argument(
        "--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU"
    )
    diff = command(_diff)
    file(diff)
    file(diff, "other")
    diff.add_argument(
        "--other-program", type=int, metavar="N", help="which of several programs in OTHER, from 0"
    )
    for name in ("why", "print", "opt", "run", "verify", "cost", "trace", "diff"):
        commands.choices[name].add_argument(
            "--program", type=int, metavar="N", help="which of several programs in the file, from 0"
        )
    return parser
