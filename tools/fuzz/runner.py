"""Runs one program in one mode and reports the outcome."""

from __future__ import annotations

import contextlib
import io
import re
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fuser import DataType, FusionDefinition, ParallelType, multidevice
from fuser.support.errors import (
    DefinitionError,
    DtypeError,
    InputError,
    ShardingError,
    UnsupportedError,
)
from tests.support.moved_inputs import moved
from tools.fuzz.host_program import fault_of
from tools.fuzz.meaning import misread
from tools.fuzz.oracle import Env, evaluate
from tools.fuzz.placed import misplaced
from tools.fuzz.product import Mode, collecting
from tools.fuzz.program import Program, define_text
from tools.fuzz.table import DTYPES
from tools.fuzz.values import Val, wide

# Errors that the product may raise for a valid program: they are counted, by reason.
REFUSALS = (UnsupportedError, ShardingError, DefinitionError, DtypeError, InputError)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a program: `kind` is ok, wrong, refused or error.

    `reason` is equal for similar outcomes, `detail` is the whole story.
    """

    kind: str
    reason: str = ""
    detail: str = ""
    outputs: int = 0
    elements: int = 0
    masked: int = 0

    @property
    def is_failure(self) -> bool:
        """Whether the outcome is neither ok nor refused."""
        return self.kind not in ("ok", "refused")


def skeleton(text: str) -> str:
    """Returns a message without its numbers, names and lists, so that similar messages are
    equal.
    """
    text = text.strip().split("\n")[0]
    text = re.sub(r"\(at [^)]*\)", "", text)
    text = re.sub(r"\[[^\]]*\]|\([^)]*\)|\{[^}]*\}", "..", text)
    text = re.sub(r"\b[a-zA-Z]{1,3}\d+(_\w+)?\b", "#", text)
    text = re.sub(r"-?\d+(\.\d+)?(e-?\d+)?", "#", text)
    return re.sub(r"(#|\.\.)([ ,*+]*(#|\.\.))+", "#", text)[:140]


def failure(error: BaseException) -> Outcome:
    """Returns the outcome of a program that raised an error."""
    kind = "refused" if isinstance(error, REFUSALS) else "error"
    detail = "".join(traceback.format_exception(error)[-8:])
    return Outcome(kind, f"{type(error).__name__}: {skeleton(str(error))}", detail)


# ------------------------------------------------------------------ comparing
def compare(out: torch.Tensor, expected: Val) -> str | None:
    """Returns how a result differs from the oracle's value, None if it does not."""
    wanted = DTYPES[expected.dtype].torch
    if out.dtype is not wanted:
        return f"dtype {out.dtype}, expected {wanted}"
    if out.shape != expected.ref.shape:
        return f"shape {tuple(out.shape)}, expected {tuple(expected.ref.shape)}"
    got = out.detach().cpu()
    if not (got.is_floating_point() or got.is_complex()):
        bad = (got.double() - expected.ref.double()).abs() > expected.bound
    else:
        got = got.to(expected.ref.dtype)
        same = (got == expected.ref) | (got.isnan() & expected.ref.isnan())
        # NaN differs from everything.
        bad = ~(same | ((got - expected.ref).abs() <= expected.bound)) & ~expected.bound.isinf()
    if not bad.any():
        return None
    at = tuple(int(k) for k in bad.nonzero()[0])
    value, bound = expected.ref[at].item(), float(expected.bound[at])
    return (
        f"{int(bad.sum())} of {bad.numel()} elements are wrong, the first at {at}: got "
        f"{got[at].item()!r}, expected {value!r} +- {bound:.3g}"
    )


def unchanged(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether two tensors have equal elements, NaN included."""
    return (
        torch.equal(wide(before).nan_to_num(), wide(after).nan_to_num()) if before.numel() else True
    )


# ------------------------------------------------------------------ running
def define(program: Program) -> FusionDefinition:
    """Executes the program's text inside a definition."""
    names: dict[str, Any] = {
        "DataType": DataType,
        "ParallelType": ParallelType,
        "multidevice": multidevice,
    }
    exec(compile(define_text(program), "<program>", "exec"), names)
    fd = FusionDefinition()
    with contextlib.redirect_stdout(io.StringIO()), fd:
        names["define"](fd)
    return fd


@dataclass
class Case:
    """A program and the oracle's values of each of its calls."""

    program: Program
    expected: list[Env]

    @classmethod
    def of(cls, program: Program) -> Case:
        """Returns the case of a program."""
        return cls(program, [evaluate(program, m)[0] for m in range(len(program.calls))])

    @property
    def order(self) -> list[int]:
        """Returns the numbers of all calls, twice: the first call of a kind is interpreted, later
        ones replayed.
        """
        return [*range(len(self.program.calls))] * 2

    def passed(self, call: int, device: str) -> list[Any]:
        """Returns the arguments of a call, on a device."""
        from tools.fuzz.oracle import input_env

        values = input_env(self.program, call)[1]
        if device == "cpu":
            return [*values]
        return [moved(v, device) if isinstance(v, torch.Tensor) else v for v in values]


def quietly(fn: Callable[[], Outcome]) -> Outcome:
    """Calls a function without warnings and without gradients."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return fn()


def run(case: Case, mode: Mode, fd: FusionDefinition | None = None) -> Outcome:
    """Defines the program (unless `fd` is given) and runs all calls; compares every output."""
    with mode.eager_graphs():
        return quietly(lambda: _run(case, mode, fd))


def _run(case: Case, mode: Mode, fd: FusionDefinition | None) -> Outcome:
    outputs = elements = masked = 0
    try:
        fd = fd or define(case.program)
        for number, (options, m) in enumerate(mode.runs(case.order)):
            inputs = case.passed(m, mode.device)
            before = [t.clone() if isinstance(t, torch.Tensor) else t for t in inputs]
            outs = fd.execute(inputs, _enable_options=options)
            if mode.device != "cpu":
                torch.cuda.synchronize()
            difference = check_call(case, m, outs, inputs, before)
            if difference is not None:
                return Outcome("wrong", difference[0], f"call {m} {options}: {difference[1]}")
            is_new = number < len(case.program.calls)
            fault = fault_of(fd, inputs, 0) if is_new and case.program.streams else None
            if fault is None and is_new and mode.device == "cpu":
                fault = _misread(case, m, fd, before)
            if fault is not None:
                return Outcome("wrong", fault.split()[0], fault)
            for out in case.program.outputs:
                value = case.expected[m][out.name]
                assert isinstance(value, Val)
                outputs += 1
                elements += value.bound.numel()
                masked += int(value.bound.isinf().sum())
    except Exception as error:
        return failure(error)
    return Outcome("ok", outputs=outputs, elements=elements, masked=masked)


def _misread(case: Case, call: int, fd: FusionDefinition, passed: list[Any]) -> str | None:
    program = case.program
    results = [
        (o.name, o.alias, value, [lambda t: t])
        for o in program.outputs
        if isinstance(value := case.expected[call][o.name], Val)
    ]
    return misread(fd, [passed], results, [i.name for i in program.inputs], compare)


def check_call(
    case: Case, call: int, outs: list[torch.Tensor], inputs: list[Any], before: list[Any]
) -> tuple[str, str] | None:
    """Returns (kind of difference, text), None when everything is as expected."""
    program, env = case.program, case.expected[call]
    visible = [o for o in program.outputs if o.alias is None]
    if len(outs) != len(visible):
        return "count", f"{len(outs)} outputs, expected {len(visible)}"
    found = {declared.name: t for declared, t in zip(program.inputs, inputs, strict=True)}
    results = [(o.name, t) for o, t in zip(visible, outs, strict=True)]
    results += [(o.name, found[o.alias]) for o in program.outputs if o.alias is not None]
    for name, tensor in results:
        value = env[name]
        assert isinstance(value, Val)
        difference = compare(tensor, value)
        if difference is not None:
            kind = "value" if "elements" in difference else difference.split()[0]
            return kind, f"{name}: {difference}"
        fault = misplaced(program, name, tensor, found)
        if fault is not None:
            return "layout", fault
    updated = {o.alias for o in program.outputs}
    for declared, old, new in zip(program.inputs, before, inputs, strict=True):
        if (
            isinstance(old, torch.Tensor)
            and declared.name not in updated
            and not unchanged(old, new)
        ):
            return "input", f"input {declared.name} was changed"
    return None


def collect(case: Case, mode: Mode) -> tuple[FusionDefinition | None, list[tuple[Any, bool]]]:
    """Defines and lowers a program for all its calls; returns the kernels that it needs."""
    sources: list[tuple[Any, bool]] = []

    def body() -> Outcome:
        for m in range(len(case.program.calls)):
            inputs = case.passed(m, mode.device)
            with contextlib.suppress(Exception), collecting(sources):
                fd.execute(inputs, _enable_options=mode.options)
        return Outcome("ok")

    try:
        fd = define(case.program)
    except Exception:
        return None, []
    quietly(body)
    return fd, sources
