"""The rules of a host program, checked after every pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fuser.errors import FuserError, VerifyError
from fuser.ir.core import Op
from fuser.ir.nodes import TensorOp
from fuser.ir.scalar import Scalar, Symbol, symbols
from fuser.ir.tensor import TensorView
from fuser.ir.text import op_text, program_symbols
from fuser.ir.types import MemoryType
from fuser.ir.verify import domain_problem, verify_fusion
from hostir.container import HostIrContainer
from hostir.ops import Allocate, Communication, Deallocate, LaunchKernel, LocalSlice, Wait
from hostir.storage import Storage


def verify(program: HostIrContainer, *, after: str = "construction") -> None:
    """Raise `VerifyError` naming `after`, the rule and the op, with a mark on its line.

    Checked: one buffer per tensor (an allocation, a view, or a declared alias); a tensor is written
    before it is read, and used neither before its allocation nor after its Deallocate; every buffer
    that is not the caller's is deallocated exactly once if any is; every Communication has exactly
    one Wait, later; kernel groups exist and agree with their launches; domains are well-formed.
    """
    checker = _Checker(program, Storage.of(program))
    for i, op in enumerate(program.ops):
        try:
            checker.check(op)
            op.verify()
        except FuserError as error:
            raise VerifyError(f"after {after}: {op.name}: {error}\n{marked(program, i)}") from None
    try:
        checker.finish()
    except FuserError as error:
        raise VerifyError(f"after {after}: {error}\n{program}") from None


def marked(program: HostIrContainer, index: int, *, around: int = 2) -> str:
    """Return the ops around `index`, with `->` before that one."""
    lines: list[str] = []
    for i in range(max(index - around, 0), min(index + around + 1, len(program.ops))):
        mark = "-> " if i == index else "   "
        lines += [mark + line for line in op_text(program.ops[i]).splitlines()]
    return "\n".join(lines)


def _kind(value: TensorView | Scalar) -> object:
    """Return what a launch and its kernel must agree on."""
    if isinstance(value, TensorView):
        return (value.dtype(), list(map(str, value.shape())), value.mesh)
    return value.dtype


@dataclass
class _Checker:
    program: HostIrContainer
    storage: Storage
    known: set[TensorView] = field(default_factory=set[TensorView])
    written: set[TensorView] = field(default_factory=set[TensorView])
    freed: set[TensorView] = field(default_factory=set[TensorView])
    # Communications that no Wait has met yet, by number; and all that started.
    in_flight: dict[int, Communication] = field(default_factory=dict[int, Communication])
    started: set[int] = field(default_factory=set[int])

    def __post_init__(self) -> None:
        inputs = {v for v in self.program.inputs if isinstance(v, TensorView)}
        self.known |= inputs
        self.written |= inputs
        self.bound = {s for v in self.program.inputs if isinstance(v, Scalar) for s in symbols(v)}
        for tv in inputs:
            self.bound |= {s for x in tv.shape() for s in symbols(x)}
        self.bound |= {s for s, _ in self.program.values.equal_extents()}

    def check(self, op: Op) -> None:
        rule = RULES.get(type(op))
        if rule is not None:
            rule(self, op)
        elif isinstance(op, TensorOp):
            self._tensor_op(op)
        else:
            raise VerifyError("this op cannot stand in a host program")

    def finish(self) -> None:
        for number, op in self.in_flight.items():
            raise VerifyError(f"Communication {number} has no Wait: {op_text(op)}")
        for out in self.program.outputs:
            if out not in self.written:
                raise VerifyError(f"output {out} is never written")
        for value in self.program.inputs:
            if isinstance(value, Scalar) and not isinstance(value, Symbol):
                raise VerifyError(f"the input {value} is no symbol")
        for alias in self.program.aliases:
            if alias.into not in self.program.inputs:
                raise VerifyError(f"{alias.out} is an alias of {alias.into}, which is no input")
            if alias.out not in self.program.outputs:
                raise VerifyError(f"{alias.out}, an alias of {alias.into}, is no output")
        for tv in self.program.tensors():
            problem = domain_problem(tv.domain)
            if problem:
                raise VerifyError(f"{tv}: {problem}")
        used = list(program_symbols(self.program.values, self.program.tensors(), self.program.ops))
        for number, group in self.program.groups.items():
            verify_fusion(group.fusion, after=f"cutting kernel group {number}")
            used += program_symbols(group.fusion, group.fusion.tensors(), group.fusion.exprs)
        unbound = [s for s in dict.fromkeys(used) if s not in self.bound]
        if unbound:
            raise VerifyError(f"no input binds {', '.join(map(str, unbound))}")
        if self.freed:
            kept = [t for t in self.storage.tensors if t in self.known - self.freed]
            leaked = [t for t in kept if not self.storage.escapes(t)]
            if leaked:
                raise VerifyError(
                    "Memory leak detected in Host IR: no Deallocate of "
                    + ", ".join(map(str, leaked))
                )

    # ------------------------------------------------------------ single rules
    def read(self, tv: TensorView) -> None:
        self._alive(tv)
        if tv not in self.known:
            raise VerifyError(f"{tv} is used before it is allocated")
        if tv not in self.written:
            raise VerifyError(f"{tv} is read before it is written")
        self._not_in_flight(tv, is_write=False)

    def write(self, tv: TensorView) -> None:
        self._alive(tv)
        if tv not in self.known:
            raise VerifyError(f"{tv} is written before it is allocated")
        self._not_in_flight(tv, is_write=True)
        self.written.add(tv)

    def _alive(self, tv: TensorView) -> None:
        shown: TensorView | None = tv
        while shown is not None:
            if shown in self.freed:
                via = "" if shown is tv else f", a view of {shown},"
                raise VerifyError(f"{tv}{via} is used after its Deallocate")
            shown = self.storage.shown_by(shown)

    def _not_in_flight(self, tv: TensorView, *, is_write: bool) -> None:
        root = self.storage.root(tv)
        for op in self.in_flight.values():
            busy = (op.out, op.inp) if is_write else (op.out,)
            if any(self.storage.root(t) is root for t in busy):
                raise VerifyError(f"{tv} is used before Wait(Communication {op.number})")

    def _reads(self, op: Op) -> None:
        for value in op.inputs:
            if isinstance(value, TensorView):
                self.read(value)

    def _tensor_op(self, op: Op) -> None:
        self._reads(op)
        for out in op.outputs:
            if out not in self.known:
                if self.storage.shown_by(out) is None:
                    raise VerifyError(f"{out} has neither an allocation nor a tensor that it shows")
                self.known.add(out)
            self.write(out)

    def _allocate(self, op: Allocate) -> None:
        tv = op.buffer
        if tv in self.known:
            raise VerifyError(f"{tv} has a buffer already")
        if tv.memory is not MemoryType.global_:
            raise VerifyError(f"{tv} is not in global memory, but {tv.memory.text}")
        self.known.add(tv)

    def _deallocate(self, op: Deallocate) -> None:
        tv = op.buffer
        if tv not in self.known:
            raise VerifyError(f"{tv} was never allocated")
        if tv in self.freed:
            raise VerifyError(f"{tv} is deallocated twice")
        if self.storage.escapes(tv):
            raise VerifyError(
                f"{tv} belongs to the caller: it shares memory with an input or output"
            )
        self._not_in_flight(tv, is_write=True)
        self.freed.add(tv)

    def _launch(self, op: LaunchKernel) -> None:
        group = self.program.groups.get(op.group)
        if group is None:
            self.program.check_full()
            raise VerifyError(f"there is no kernel group {op.group}")
        for what, mine, theirs in (
            ("inputs", op.ins, group.fusion.inputs),
            ("outputs", op.outs, group.fusion.outputs),
        ):
            if len(mine) != len(theirs):
                raise VerifyError(f"{len(mine)} {what}, but group {op.group} has {len(theirs)}")
            for a, b in zip(mine, theirs, strict=True):
                if _kind(a) != _kind(b):
                    raise VerifyError(f"{what}: {a}, but group {op.group} has {b}")
        self._reads(op)
        for out in op.outs:
            if out not in self.known and self.storage.shown_by(out) is not None:
                self.known.add(out)  # an output that is written into an input in place
            self.write(out)

    def _communication(self, op: Communication) -> None:
        if op.number in self.started:
            raise VerifyError(f"there are two communications {op.number}")
        self.read(op.inp)
        self.write(op.out)
        self.started.add(op.number)
        self.in_flight[op.number] = op

    def _wait(self, op: Wait) -> None:
        if op.number not in self.started:
            raise VerifyError(f"no communication {op.number} was started before")
        if self.in_flight.pop(op.number, None) is None:
            raise VerifyError(f"a second Wait for communication {op.number}")

    def _local_slice(self, op: LocalSlice) -> None:
        self.read(op.inp)
        self.write(op.out)


RULES: dict[type[Op], Callable[[_Checker, Op], None]] = {
    Allocate: _Checker._allocate,  # pyright: ignore[reportPrivateUsage, reportAssignmentType]
    Deallocate: _Checker._deallocate,  # pyright: ignore[reportPrivateUsage, reportAssignmentType]
    LaunchKernel: _Checker._launch,  # pyright: ignore[reportPrivateUsage, reportAssignmentType]
    Communication: _Checker._communication,  # pyright: ignore[reportPrivateUsage, reportAssignmentType]
    Wait: _Checker._wait,  # pyright: ignore[reportPrivateUsage, reportAssignmentType]
    LocalSlice: _Checker._local_slice,  # pyright: ignore[reportPrivateUsage, reportAssignmentType]
}
