"""The oracle: evaluates a program with torch in float64, with a bound for the error of each
element.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tools.fuzz.ops import (
    attention,
    blocks,
    composites,
    groups,
    lookups,
    reductions,
    scaled,
    scans,
    shapes,
)
from tools.fuzz.ops.elementwise import addcmul, as_num, clamp, pointwise, scalar_op
from tools.fuzz.program import Arg, Dt, Program, Ref, ScalarInput, Size, Stmt, TensorArg
from tools.fuzz.table import DTYPES, ROWS
from tools.fuzz.tensors import make_tensor
from tools.fuzz.values import RANKS, InvalidProgram, Num, Val, cast, exact, wide

Env = dict[str, Val | Num]

_STRUCTURAL: dict[str, Callable[..., Any]] = {
    "cast": cast,
    **{n: (lambda *a, n=n, **k: reductions.reduce(n, *a, **k)) for n in reductions.REDUCTIONS},
    "welford": reductions.welford,
    "var_mean": reductions.var_mean,
    "var": reductions.var,
    "matmul": reductions.matmul,
    "linear": reductions.linear,
    "sdpfa_fwd": attention.forward,
    "sdpfa_bwd": attention.backward,
    "broadcast": shapes.broadcast,
    "broadcast_in_dim": shapes.broadcast_in_dim,
    "expand": shapes.expand,
    "squeeze": shapes.squeeze,
    "permute": lambda v, dims: v.view(lambda t: t.permute(dims)),
    "stride_order": lambda v, order: v,
    "set": lambda v: v,
    "segment_set": lambda v: v,
    "slice": shapes.slice_,
    "pad": shapes.pad,
    "cat": shapes.cat,
    "reshape": shapes.reshape,
    "full": shapes.full,
    "iota": shapes.iota,
    "uniform": partial(shapes.random, "uniform"),
    "normal": partial(shapes.random, "normal"),
    "rand_like": partial(shapes.random_like, "uniform"),
    "randn_like": partial(shapes.random_like, "normal"),
    "size": shapes.size,
    "shape": shapes.shape,
    "triu": shapes.triu,
    "clamp": clamp,
    **lookups.MEANINGS,
    **scans.MEANINGS,
    **groups.MEANINGS,
    **scaled.MEANINGS,
    **blocks.MEANINGS,
    **composites.MEANINGS,
}
# Number arguments of these ops remain Python numbers.
_ELEMENTWISE = {*ROWS, "addcmul"} - {"clamp"}
OPS = (*_STRUCTURAL, *(n for n in ROWS if n not in _STRUCTURAL), "addcmul")


# ------------------------------------------------------------------ interpretation
def _resolve(arg: Arg, env: Env, *, sizes: bool) -> Any:
    match arg:
        case Ref(name):
            value = env[name]
            return value.value if sizes and isinstance(value, Num) else value
        case Size(name, axis):
            tensor = env[name]
            assert isinstance(tensor, Val)
            n = shapes.size(tensor, axis)
            return n.value if sizes else n
        case Dt(name):
            return name
        case list() | tuple():
            return [_resolve(a, env, sizes=sizes) for a in arg]
        case _:
            return arg


def run_stmt(stmt: Stmt, env: Env) -> None:
    """Adds the results of one statement to `env`; raises `InvalidProgram`."""
    is_pointwise = stmt.op in _ELEMENTWISE or stmt.op == "clamp"
    args = [_resolve(a, env, sizes=not is_pointwise) for a in stmt.args]
    kwargs = {k: _resolve(a, env, sizes=True) for k, a in stmt.kwargs}
    try:
        if stmt.op in _ELEMENTWISE:
            values = [v if isinstance(v, Val | Num) else as_num(v) for v in args]
            if all(isinstance(v, Num) for v in values):
                results: Any = scalar_op(stmt.op, values)  # pyright: ignore[reportArgumentType]
            elif stmt.op == "addcmul":
                results = addcmul(*values)
            else:
                results = pointwise(stmt.op, values)
        else:
            results = _STRUCTURAL[stmt.op](*args, **kwargs)
    except (RuntimeError, IndexError, ZeroDivisionError, OverflowError, ValueError) as error:
        raise InvalidProgram(f"{stmt}: {error}") from error
    env.update(zip(stmt.outs, results if isinstance(results, list) else [results], strict=True))


def input_env(program: Program, call: int) -> tuple[Env, list[Any]]:
    """Returns the values of the inputs, and the arguments of the call: tensors and numbers."""
    env: Env = {}
    passed: list[Any] = []
    for declared, given in zip(program.inputs, program.calls[call], strict=True):
        if isinstance(declared, ScalarInput):
            assert not isinstance(given, TensorArg)
            env[declared.name] = Num(given, declared.dtype)
            passed.append(given)
            continue
        assert isinstance(given, TensorArg)
        for n, declared_n in zip(given.shape, declared.shape, strict=True):
            if declared_n not in (-1, n):
                raise InvalidProgram(f"{declared} does not accept the shape {given.shape}")
        t = make_tensor(
            given.shape,
            declared.layout.strides(given.shape),
            given.offset,
            DTYPES[declared.dtype].torch,
            given.fill,
            given.seed,
        )
        passed.append(t)
        env[declared.name] = exact(wide(t).clone(), declared.dtype)
    return env, passed


def evaluate(program: Program, call: int) -> tuple[Env, list[Any]]:
    """Returns all values of one call, and its arguments."""
    # The steps of a stream may sum in parts, too.
    RANKS.set(max(program.ranks, 2 if program.streams else 1))
    env, passed = input_env(program, call)
    for stmt in program.stmts:
        run_stmt(stmt, env)
    return env, passed
