"""Parts of a program that it can do without: outputs, calls, annotations, and statements, whose
results become inputs. Hypothesis decides which are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tools.fuzz.builder import without_dead
from tools.fuzz.oracle import evaluate
from tools.fuzz.program import Output, Program, Stmt, TensorArg, TensorInput, plain_layout
from tools.fuzz.shards import mesh_sizes
from tools.fuzz.values import InvalidProgram, Val


@dataclass(frozen=True)
class Parts:
    """The parts of a program that are kept: whether all outputs, or those of one statement alone,
    by its place; and each output, call, annotation, stream and statement."""

    last: int
    kept: tuple[bool, ...]

    @classmethod
    def drawn(cls, program: Program, below: Callable[[int], int]) -> Parts:
        """Draws the parts by `below(n)`, an integer in [0, n); 0 is what drops most."""
        last = below(len(program.stmts) + 1)
        return cls(last, tuple(bool(below(2)) for _ in range(_count(program))))

    @classmethod
    def all_of(cls, program: Program) -> Parts:
        """Returns all parts of a program."""
        return cls(len(program.stmts), (True,) * _count(program))

    @property
    def choices(self) -> list[int]:
        """The integers from which these parts are drawn."""
        return [self.last, *map(int, self.kept)]


def _count(p: Program) -> int:
    return sum(map(len, (p.outputs, p.calls, p.streams, p.annotations, p.stmts)))


def reduced(program: Program, parts: Parts) -> Program:
    """Returns the program with these parts alone; results of statements that are dropped, and read
    by others, become inputs."""
    p, kept = program, iter(parts.kept)
    outputs = tuple(o for o in p.outputs if next(kept)) or p.outputs[:1]
    calls = tuple(c for c in p.calls if next(kept)) or p.calls[:1]
    streams = tuple(s for s in p.streams if next(kept))
    annotations = tuple(a for a in p.annotations if next(kept))
    stmts = [s for s in p.stmts if not next(kept)]
    if parts.last < len(p.stmts):
        outputs = tuple(Output(name) for name in p.stmts[parts.last].outs)
    p = replace(p, outputs=outputs, calls=calls, streams=streams, annotations=annotations)
    p = without_dead(p)
    for stmt in reversed(stmts):
        if stmt in p.stmts:
            p = _without_statement(p, stmt) or p
    return p


def _without_statement(p: Program, stmt: Stmt) -> Program | None:
    """Returns the program with inputs of the same shapes in place of a statement's results; None
    where one is no tensor."""
    envs = [evaluate(p, m)[0] for m in range(len(p.calls))]
    inputs, extra = list(p.inputs), [list(c) for c in p.calls]
    for name in stmt.outs:
        values = [env[name] for env in envs]
        shapes = [tuple(v.ref.shape) for v in values if isinstance(v, Val)]
        first = values[0]
        if len(shapes) != len(values) or not isinstance(first, Val):
            return None
        declared = tuple(ns[0] if len(set(ns)) == 1 else -1 for ns in zip(*shapes, strict=True))
        layout = plain_layout(len(declared))
        inputs.append(TensorInput(name, first.dtype, declared, True, (), layout))
        for args, shape in zip(extra, shapes, strict=True):
            args.append(TensorArg(shape, 0, "normal", 1))
    rest = tuple(s for s in p.stmts if s is not stmt)
    calls = tuple(tuple(args) for args in extra)
    return without_dead(replace(p, inputs=tuple(inputs), stmts=rest, calls=calls))


def is_valid(program: Program) -> bool:
    """Whether the oracle can compute a program, and meshes divide the extents that they cut."""
    try:
        return all(_divides(program, m) for m in range(len(program.calls)))
    except (InvalidProgram, AssertionError, KeyError, TypeError):  # a tensor for a number, say
        return False


def _divides(program: Program, call: int) -> bool:
    env = evaluate(program, call)[0]
    for name, (ranks, cuts) in program.spreads().items():
        value, sizes = env[name], mesh_sizes(ranks)
        assert isinstance(value, Val)
        if any(value.ref.shape[axis] % (sizes[dim] * n) for axis, dim, n in cuts):
            return False
    return True
