"""Every host op has all its parts, and every example of one does what torch says."""

from __future__ import annotations

import pytest

from fuser.ir import scalar as sc
from fuser.ir.core import Op
from hostir import ForLoop, HostIrContainer, IfThenElse, equal, parse, verify
from hostir.container import walk
from hostir.handlers import HANDLERS
from hostir.ops import HostOp, loop_index
from hostir.replay import RECORD
from hostir.transfers import HOST_OPS
from tests.hostir.handmade import EXAMPLES, LATE, run_simulated

CLASSES = [c for c in Op.REGISTRY.values() if issubclass(c, HostOp) and not c.__subclasses__()]


def missing_parts(cls: type[HostOp], examples: dict[type[Op], str]) -> list[str]:
    """Return what a host op lacks."""
    parts = {
        "text (TEXT, or template() and variants())": bool(cls.TEXT)
        or (hasattr(cls, "template") and hasattr(cls, "variants")),
        "effects()": cls.effects is not HostOp.effects,
        "a place in hostir.transfers.HOST_OPS": cls in HOST_OPS,
        "a handler in hostir.handlers.HANDLERS": cls in HANDLERS,
        "an entry in hostir.replay.RECORD": cls in RECORD,
        "an example in tests.hostir.handmade.EXAMPLES": cls in examples,
        "a public name in hostir": cls.__name__ in __import__("hostir").__all__,
    }
    return [part for part, has in parts.items() if not has]


@pytest.fixture(scope="module")
def examples() -> dict[type[Op], str]:
    return {
        type(op): name for name, example in EXAMPLES.items() for op in walk(example.build().ops)
    }


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_a_host_op_has_all_parts(cls: type[HostOp], examples: dict[type[Op], str]) -> None:
    assert missing_parts(cls, examples) == []


def test_what_an_op_lacks_is_named() -> None:
    class Unfinished(HostOp):
        pass

    del Op.REGISTRY["Unfinished"]
    assert len(missing_parts(Unfinished, {})) == 7


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_print_and_read_back(name: str) -> None:
    program = EXAMPLES[name].build()
    verify(program)
    again = parse(program.full_text())
    assert equal(again, program) and again.full_text() == program.full_text()
    verify(again)
    # Two levels down the same words mean the same.
    nested = _nested(program)
    assert equal(parse(nested.full_text()), nested)
    assert parse(str(program)).is_short


def _nested(program: HostIrContainer) -> HostIrContainer:
    index = loop_index("i900", 0, 1)
    branch = IfThenElse(sc.eq(index, 0), then=program.ops, orelse=program.ops)
    return program.with_ops((ForLoop(index=index, stop=sc.const(1), body=(branch,)),))


@pytest.mark.parametrize("late", LATE, ids=str)
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_equal_torch(name: str, late: str | int | None) -> None:
    example = EXAMPLES[name]
    program = example.build()
    run_simulated(example, program, late=late)
    if late is None:
        run_simulated(example, program, reference=True)
        run_simulated(example, parse(program.full_text()))
