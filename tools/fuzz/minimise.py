"""Makes a failing program small: fewer outputs, calls and statements, smaller extents, plain
layouts.

Every candidate is valid by the oracle, and is kept when it fails in the same way. Each runs in a
forked child process, because it may crash or hang.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from tools.fuzz.builder import without_dead
from tools.fuzz.oracle import evaluate
from tools.fuzz.program import (
    Arg,
    Program,
    Ref,
    ScalarInput,
    Size,
    Stmt,
    TensorArg,
    TensorInput,
    operands,
    plain_layout,
)
from tools.fuzz.shards import mesh_sizes
from tools.fuzz.table import HALF
from tools.fuzz.values import InvalidProgram, Val

Fails = Callable[[Program], bool]


def minimise(program: Program, fails: Fails, *, seconds: float) -> Program:
    """Returns the smallest program found that still fails."""
    end = time.monotonic() + seconds
    progress = True
    while progress:
        progress = False
        for shrink in (_outputs, _calls, _cuts, _bypasses, _extents, _layouts, _simpler):
            found = True
            while found:
                found = False
                for candidate in shrink(program):
                    if time.monotonic() > end:
                        return program
                    if _is_valid(candidate) and fails(candidate):
                        program, found, progress = candidate, True, True
                        break
    return program


def _is_valid(program: Program) -> bool:
    try:
        for m in range(len(program.calls)):
            evaluate(program, m)
    except (InvalidProgram, AssertionError, KeyError, TypeError):  # a tensor for a number, say
        return False
    return all(_divides(program, m) for m in range(len(program.calls)))


def _divides(program: Program, call: int) -> bool:
    """Whether all meshes divide the extents that they cut, also the blocks of streams."""
    env = evaluate(program, call)[0]
    for name, (ranks, cuts) in program.spreads().items():
        value, sizes = env[name], mesh_sizes(ranks)
        assert isinstance(value, Val)
        if any(value.ref.shape[axis] % (sizes[dim] * n) for axis, dim, n in cuts):
            return False
    return True


def in_child(fn: Callable[[], tuple[str, str]], *, limit_s: float = 60.0) -> tuple[str, str]:
    """Returns the result of `fn` from a forked child process, or how the child died: crash or
    hang.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        try:
            os.write(write, json.dumps(fn()).encode())
        finally:
            os._exit(0)
    os.close(write)
    ready, _, _ = select.select([read], [], [], limit_s)
    text = os.read(read, 1 << 16) if ready else b""
    os.close(read)
    if not ready:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if not ready:
        return "hang", ""
    if not text:
        return "crash", f"signal {os.WTERMSIG(status) if os.WIFSIGNALED(status) else status}"
    kind, reason = json.loads(text)
    return kind, reason


# ------------------------------------------------------------------ one step smaller
def _outputs(p: Program) -> Iterator[Program]:
    if len(p.outputs) > 1:
        for o in p.outputs:
            yield without_dead(replace(p, outputs=(o,)))
        for k in range(len(p.outputs)):
            yield without_dead(replace(p, outputs=p.outputs[:k] + p.outputs[k + 1 :]))
    for k, o in enumerate(p.outputs):
        if o.alias is not None:
            plain = (*p.outputs[:k], replace(o, alias=None), *p.outputs[k + 1 :])
            yield without_dead(replace(p, outputs=plain))
    yield from _annotations(p)


def _annotations(p: Program) -> Iterator[Program]:
    for k, s in enumerate(p.streams):
        yield replace(p, streams=p.streams[:k] + p.streams[k + 1 :])
        plain = replace(s, swizzle=None, around=0)
        fewer = (s.merged[:i] + s.merged[i + 1 :] for i in range(len(s.merged)))
        for merged in (m for m in fewer if len(m) > 1):
            less = replace(s, axis=merged[0][0], merged=merged, count=None)
            yield replace(p, streams=(*p.streams[:k], less, *p.streams[k + 1 :]))
        if s.merged:
            less = replace(s, merged=tuple((a, None) for a, _ in s.merged), count=None)
            if less != s:
                yield replace(p, streams=(*p.streams[:k], less, *p.streams[k + 1 :]))
        if s.swizzle or (s.around and not any(a.name == s.name for a in p.annotations)):
            yield replace(p, streams=(*p.streams[:k], plain, *p.streams[k + 1 :]))
    for k, a in enumerate(p.annotations):
        yield replace(p, annotations=p.annotations[:k] + p.annotations[k + 1 :])
        for c in range(len(a.cuts)):
            less = replace(a, cuts=a.cuts[:c] + a.cuts[c + 1 :])
            yield replace(p, annotations=(*p.annotations[:k], less, *p.annotations[k + 1 :]))


def _calls(p: Program) -> Iterator[Program]:
    if len(p.calls) > 1:
        for call in p.calls:
            yield replace(p, calls=(call,))
        for k in range(len(p.calls)):
            yield replace(p, calls=p.calls[:k] + p.calls[k + 1 :])


def _cuts(p: Program) -> Iterator[Program]:
    """Yields programs in which the results of a statement are inputs of the same shapes."""
    envs = [evaluate(p, m)[0] for m in range(len(p.calls))]
    for k in reversed(range(len(p.stmts))):
        stmt = p.stmts[k]
        values = [[env[name] for env in envs] for name in stmt.outs]
        if not all(isinstance(v, Val) for row in values for v in row):
            continue
        inputs, extra = list(p.inputs), [list(c) for c in p.calls]
        for name, row in zip(stmt.outs, values, strict=True):
            shapes = [tuple(v.ref.shape) for v in row if isinstance(v, Val)]
            first = row[0]
            assert isinstance(first, Val)
            declared = tuple(ns[0] if len(set(ns)) == 1 else -1 for ns in zip(*shapes, strict=True))
            inputs.append(
                TensorInput(name, first.dtype, declared, True, (), plain_layout(len(declared)))
            )
            for args, shape in zip(extra, shapes, strict=True):
                args.append(TensorArg(shape, 0, "normal", k + 1))
        yield without_dead(
            replace(
                p,
                inputs=tuple(inputs),
                stmts=p.stmts[:k] + p.stmts[k + 1 :],
                calls=tuple(tuple(a) for a in extra),
            )
        )


def _renamed(arg: Arg, old: str, new: str) -> Arg:
    if isinstance(arg, Ref | Size) and arg.name == old:
        return replace(arg, name=new)
    if isinstance(arg, list):
        return [_renamed(a, old, new) for a in arg]
    return arg


def _bypasses(p: Program) -> Iterator[Program]:
    """Yields programs that use an operand of a statement in place of its result."""
    for k, stmt in enumerate(p.stmts):
        if len(stmt.outs) != 1:
            continue
        (name,) = stmt.outs
        for other in dict.fromkeys(operands(stmt)):
            stmts = tuple(
                Stmt(
                    s.outs,
                    s.op,
                    tuple(_renamed(a, name, other) for a in s.args),
                    tuple((key, _renamed(a, name, other)) for key, a in s.kwargs),
                )
                for i, s in enumerate(p.stmts)
                if i != k
            )
            outputs = tuple(replace(o, name=other) if o.name == name else o for o in p.outputs)
            if any(o.name.startswith("n") for o in outputs):
                continue
            yield without_dead(replace(p, stmts=stmts, outputs=outputs))


def _with_sizes(arg: Arg, old: int, new: int) -> Arg:
    if type(arg) is int and arg == old:
        return new
    return [_with_sizes(a, old, new) for a in arg] if isinstance(arg, list) else arg


def _extents(p: Program) -> Iterator[Program]:
    """Yields programs in which one number is smaller wherever it is an extent."""
    sizes = {n for call in p.calls for a in call if isinstance(a, TensorArg) for n in a.shape}
    for n in sorted((n for n in sizes if n > 2), reverse=True):
        for m in dict.fromkeys((2, 3, 4, 8, 16, 32, n // 2, n - 1)):
            if not 1 < m < n:
                continue
            yield replace(
                p,
                inputs=tuple(
                    replace(i, shape=tuple(m if x == n else x for x in i.shape))
                    if isinstance(i, TensorInput)
                    else i
                    for i in p.inputs
                ),
                stmts=tuple(
                    Stmt(s.outs, s.op, tuple(_with_sizes(a, n, m) for a in s.args), s.kwargs)
                    for s in p.stmts
                ),
                calls=tuple(
                    tuple(
                        replace(a, shape=tuple(m if x == n else x for x in a.shape))
                        if isinstance(a, TensorArg)
                        else a
                        for a in call
                    )
                    for call in p.calls
                ),
            )


def _layouts(p: Program) -> Iterator[Program]:
    for k, i in enumerate(p.inputs):
        if not isinstance(i, TensorInput):
            continue
        plain = replace(i, layout=plain_layout(len(i.shape)), flags=True, stride_order=())
        choices = [plain, replace(plain, flags=False)]
        for choice in choices:
            if (i.layout, i.flags, i.stride_order) != (
                choice.layout,
                choice.flags,
                choice.stride_order,
            ) and (choice.flags is True or i.flags is not True):
                yield replace(p, inputs=(*p.inputs[:k], choice, *p.inputs[k + 1 :]))
    if any(isinstance(a, TensorArg) and a.offset for call in p.calls for a in call):
        yield replace(
            p,
            calls=tuple(
                tuple(replace(a, offset=0) if isinstance(a, TensorArg) else a for a in call)
                for call in p.calls
            ),
        )


def _simpler(p: Program) -> Iterator[Program]:
    """Yields programs with static extents, with Float, and with normal values."""
    if len(p.calls) == 1:
        for k, (i, given) in enumerate(zip(p.inputs, p.calls[0], strict=True)):
            if isinstance(i, ScalarInput) or not isinstance(given, TensorArg):
                continue
            if -1 in i.shape and not any(i.layout.expanded):
                static = replace(i, shape=given.shape, flags=i.flags is True)
                yield replace(p, inputs=(*p.inputs[:k], static, *p.inputs[k + 1 :]))
    if any(isinstance(i, TensorInput) and i.dtype in (*HALF, "Double") for i in p.inputs):
        yield replace(
            p,
            inputs=tuple(
                replace(i, dtype="Float")
                if isinstance(i, TensorInput) and i.dtype in (*HALF, "Double")
                else i
                for i in p.inputs
            ),
        )
    for fill in ("small", "normal"):
        calls = tuple(
            tuple(replace(a, fill=fill) if isinstance(a, TensorArg) else a for a in call)
            for call in p.calls
        )
        old = {a.fill for call in p.calls for a in call if isinstance(a, TensorArg)}
        if fill not in old and not old <= {"small", "normal"}:
            yield replace(p, calls=calls)
