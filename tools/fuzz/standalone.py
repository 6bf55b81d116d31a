"""Writes a failing program as a separate script: definition, inputs, expected values."""

from __future__ import annotations

from pathlib import Path

import torch

from tools.fuzz.oracle import evaluate
from tools.fuzz.product import Mode
from tools.fuzz.program import Program, TensorArg, TensorInput, define_text
from tools.fuzz.table import DTYPES
from tools.fuzz.values import Val

_HEAD = '''"""{title}

{story}
Expected values: torch in float64, with the error that rounding allows.
"""

import sys
from itertools import product

import torch

from fuser import DataType, FusionDefinition, ParallelType, multidevice
nan, inf = float("nan"), float("inf")

'''


def _tensor_text(t: torch.Tensor, dtype: str) -> str:
    return f"torch.tensor({t.flatten().tolist()}, dtype={dtype}).reshape({list(t.shape)})"


def _calls_text(program: Program) -> str:
    lines = ["def calls():\n    return [\n"]
    for m, call in enumerate(program.calls):
        env, _ = evaluate(program, m)
        lines.append("    (\n        [\n")
        for declared, given in zip(program.inputs, call, strict=True):
            if isinstance(given, TensorArg):
                assert isinstance(declared, TensorInput)
                strides = declared.layout.strides(given.shape)
                lines.append(
                    f"            make_tensor({given.shape}, {strides}, {given.offset}, "
                    f"{DTYPES[declared.dtype].torch}, {given.fill!r}, {given.seed}),\n"
                )
            else:
                lines.append(f"            {given!r},\n")
        lines.append("        ],\n        [\n")
        for out in program.outputs:
            value = env[out.name]
            assert isinstance(value, Val)
            lines.append(
                f"            ({_tensor_text(value.ref, str(value.ref.dtype))},\n"
                f"             {_tensor_text(value.bound, 'torch.float64')},\n"
                f"             {DTYPES[value.dtype].torch}),\n"
            )
        lines.append("        ],\n    ),\n")
    return "".join([*lines, "    ]\n\n\n"])


_TAIL = """

def differs(out, value, bound, dtype):
    assert out.dtype is dtype and out.shape == value.shape, (out.dtype, out.shape, value.shape)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    out, value = out.to(wide), value.to(wide)
    off = (out - value).abs()
    same = (out == value) | (out.isnan() & value.isnan()) | bound.isinf()
    return not (same | (off <= bound)).all()

"""
_ONE_DEVICE = """

def check(fd):
    for options, (number, (inputs, expected)) in product(RUNS, enumerate(calls() + calls())):
        results = list(fd.execute(inputs, _enable_options=options))
        outs = [inputs[at] if at is not None else results.pop(0) for at in INTO]
        assert not results, "more outputs than were defined"
        for out, (value, bound, dtype) in zip(outs, expected):
            if differs(out, value, bound, dtype):
                print(f"call {number} {options}: got\\n{out}\\nexpected\\n{value}")
                sys.exit(1)
        fault = STREAMS and fault_of(fd, inputs, 0)
        if fault:
            sys.exit(f"call {number} {options}: {fault}")
    print("as expected")


fd = FusionDefinition()
with fd:
    define(fd)
check(fd)
"""


_RANKS = """
def check(fd):
    rank = multidevice.Communicator.instance().rank()
    for options, (number, (inputs, expected)) in product(RUNS, enumerate(calls() + calls())):
        local = [
            t if not NOTES.get(k) else local_input(t, *NOTES[k], rank)
            for k, t in enumerate(inputs)
        ]
        outs = fd.execute(local, _enable_options=options)
        fault = STREAMS and fault_of(fd, local, rank)
        if fault:
            raise SystemExit(f"rank {rank}, call {number} {options}: {fault}")
        told = fd.fec.get_output_shardings()
        for k, (out, (value, bound, dtype)) in enumerate(zip(outs, expected)):
            spread = SPREADS.get(k)
            if spread is None and STREAMS:
                tv = fd.fec.host_program().outputs[k]
                if tv.mesh is not None and not tv.mesh.has(rank):
                    continue
                if tv.mesh is not None:
                    value, bound = (multidevice.shard_tensor(t, tv) for t in (value, bound))
            elif spread is None and len(told) == len(outs):
                spread = spread_of(told[k], TYPES)
            if spread and coordinate(spread[0], rank, "x") is None:
                continue
            if spread:
                value, bound = (shard_of(t, *spread, rank) for t in (value, bound))
            if differs(out, value, bound, dtype):
                at = f"rank {rank}, call {number} {options}"
                raise SystemExit(f"{at}: got\\n{out}\\nexpected\\n{value}")


TYPES = {"x": ParallelType.mesh_x, "y": ParallelType.mesh_y}
fd = FusionDefinition()
with fd:
    define(fd)
with multidevice.simulate(RANKS) as world:
    world.run(check, fd)
print("as expected")
"""


def _spreads(program: Program, names: list[str]) -> dict[int, object]:
    """Returns position -> (mesh, cuts) for those of the values `names` that are annotated."""
    spreads = program.spreads()
    return {k: spreads[n] for k, n in enumerate(names) if n in spreads}


def standalone_text(program: Program, mode: Mode, title: str, story: str) -> str:
    """Returns a script that fails as long as the failure exists.

    It exits with 1, or in the way in which the program failed.
    """
    names = [i.name for i in program.inputs]
    into = [None if o.alias is None else names.index(o.alias) for o in program.outputs]
    source = Path(__file__).with_name("tensors.py").read_text()
    make = source[source.index("_SPECIAL") :]
    runs = list(dict.fromkeys(tuple(options) for options, _ in mode.runs([0])))
    constants = f"INTO = {into}\nRUNS = {runs}\nSTREAMS = {4 if program.streams else 0}\n"
    if program.streams:
        text = Path(__file__).with_name("host_program.py").read_text()
        make += "\n\n" + text[text.index("from collections") :].replace("STREAMS = 4\n", "")
    if program.annotations:
        text = Path(__file__).with_name("shards.py").read_text()
        make += "\n\n" + text[text.index("from collections") :].replace("import torch\n", "")
        constants += f"RANKS = {program.ranks}\nNOTES = {_spreads(program, names)}\n"
        constants += f"SPREADS = {_spreads(program, [o.name for o in program.outputs])}\n"
    story = "".join(f"{line}\n" for line in story.replace('"""', "'''").splitlines()[-12:])
    story = story.replace("\\", "/")
    return (
        _HEAD.format(title=title, story=story)
        + make
        + "\n\n"
        + define_text(program)
        + "\n\n"
        + _calls_text(program)
        + constants
        + _TAIL
        + (_RANKS if program.annotations else _ONE_DEVICE)
    )
