"""Writes a failing program as a script of its own: definition, inputs, expected values."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.fuzz.oracle import evaluate
from tests.fuzz.product import Mode
from tests.fuzz.program import Program, TensorArg, TensorInput, define_text
from tests.fuzz.table import DTYPES
from tests.fuzz.values import Val

_HEAD = '''"""{title}

{story}
Expected values: torch in float64, with the error that rounding allows.
"""

import sys

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
    off = (out.double() - value.double()).abs()
    same = (out.double() == value) | (out.isnan() & value.double().isnan()) | bound.isinf()
    return not (same | (off <= bound)).all()

"""
_ONE_DEVICE = """

def check(fd):
    for number, (inputs, expected) in enumerate(calls() + calls()):
        results = list(fd.execute(inputs, _enable_options=OPTIONS))
        outs = [inputs[at] if at is not None else results.pop(0) for at in INTO]
        assert not results, "more outputs than were defined"
        for out, (value, bound, dtype) in zip(outs, expected):
            if differs(out, value, bound, dtype):
                print(f"call {number}: got\\n{out}\\nexpected\\n{value}")
                sys.exit(1)
    print("as expected")


fd = FusionDefinition()
with fd:
    define(fd)
check(fd)
"""


_RANKS = """
def check(fd):
    rank = multidevice.Communicator.instance().rank()
    for number, (inputs, expected) in enumerate(calls() + calls()):
        local = [
            t if not NOTES.get(k) else local_input(t, *NOTES[k], rank)
            for k, t in enumerate(inputs)
        ]
        outs = fd.execute(local, _enable_options=OPTIONS)
        told = fd.fec.get_output_shardings()
        for k, (out, (value, bound, dtype)) in enumerate(zip(outs, expected)):
            spread = SPREADS.get(k)
            if spread is None and len(told) == len(outs):
                spread = spread_of(told[k], TYPES)
            if spread and coordinate(spread[0], rank, "x") is None:
                continue
            if spread:
                value, bound = (shard_of(t, *spread, rank) for t in (value, bound))
            if differs(out, value, bound, dtype):
                raise SystemExit(f"rank {rank}, call {number}: got\\n{out}\\nexpected\\n{value}")


TYPES = {"x": ParallelType.mesh_x, "y": ParallelType.mesh_y}
fd = FusionDefinition()
with fd:
    define(fd)
with multidevice.simulate(RANKS) as world:
    world.run(check, fd)
print("as expected")
"""


def _spreads(program: Program, names: list[str]) -> dict[int, object]:
    """Return (mesh, cuts) of the annotated ones among some values, by position."""
    notes = {a.name: (program.meshes[a.mesh], a.cuts) for a in program.annotations}
    return {k: notes[n] for k, n in enumerate(names) if n in notes}


def standalone_text(program: Program, mode: Mode, title: str, story: str) -> str:
    """Return a script that exits with 1 (or as the program did) while the failure is there."""
    names = [i.name for i in program.inputs]
    into = [None if o.alias is None else names.index(o.alias) for o in program.outputs]
    source = Path(__file__).with_name("tensors.py").read_text()
    make = source[source.index("_SPECIAL") :]
    constants = f"INTO = {into}\nOPTIONS = {mode.options}\n"
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
