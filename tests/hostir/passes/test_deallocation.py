"""insert_deallocate: before and after as text (every program that the other tests run used it)."""

from __future__ import annotations

import pytest

from fuser.support.errors import VerifyError
from hostir.ir.ops import Communication, Deallocate, Wait
from hostir.ir.parser import parse
from hostir.ir.program import HostIrContainer
from hostir.passes.deallocation import insert_deallocate, run_passes
from tests.support.host_programs import CASES, build

BEFORE = """
%HostIrContainer { (T0_g_float[iS0{i0}, iS1{i1}]) -> (T4_g_float[iS8{i0}, iS9{i1}]) :
  T1_g_float[iS2{i0}, iS3{i1}] = ALLOCATE(mem_type=global, zero_init=false)
  T1 = Set( T0 )
  T2_g_float[iS4{i0}, iS5{i1}] = Set( T1 )
  T3_g_float[iS6{i0}, iS7{i1}] = ALLOCATE(mem_type=global, zero_init=false)
  T3 = Set( T2 )
  T4 = ALLOCATE(mem_type=global, zero_init=false)
  T4 = Set( T3 )
} // %HostIrContainer
"""
# T2 is a view of T1: both live until T2 is read, and the view is freed first. T4 is the caller's.
AFTER = """
%HostIrContainer { (T0_g_float[iS0{i0}, iS1{i1}]) -> (T4_g_float[iS8{i0}, iS9{i1}]) :
  T1_g_float[iS2{i0}, iS3{i1}] = ALLOCATE(mem_type=global, zero_init=false)
  T1 = Set( T0 )
  T2_g_float[iS4{i0}, iS5{i1}] = Set( T1 )
  T3_g_float[iS6{i0}, iS7{i1}] = ALLOCATE(mem_type=global, zero_init=false)
  T3 = Set( T2 )
  Deallocate {
    T2
  }
  Deallocate {
    T1
  }
  T4 = ALLOCATE(mem_type=global, zero_init=false)
  T4 = Set( T3 )
  Deallocate {
    T3
  }
} // %HostIrContainer
"""


def test_buffers_are_given_up_after_their_last_use() -> None:
    assert str(run_passes(parse(BEFORE))) == str(parse(AFTER))


def test_a_second_application_is_an_error() -> None:
    with pytest.raises(VerifyError, match="already has a Deallocate"):
        insert_deallocate(parse(AFTER))


def test_a_collectives_operand_lives_until_the_wait() -> None:
    ops = build(CASES["mlp2"]).ops
    (communication,) = [op for op in ops if isinstance(op, Communication)]
    wait = next(i for i, op in enumerate(ops) if isinstance(op, Wait))
    frees = [
        i
        for i, op in enumerate(ops)
        if isinstance(op, Deallocate) and op.buffer is communication.inp
    ]
    assert frees == [wait + 1]


def test_the_buffer_behind_an_output_view_is_the_callers() -> None:
    text = BEFORE.replace("T4 = ALLOCATE(mem_type=global, zero_init=false)\n  ", "")
    program = run_passes(parse(text))
    assert [op.buffer.number for op in _frees(program)] == [2, 1]


def _frees(program: HostIrContainer) -> list[Deallocate]:
    return [op for op in program.ops if isinstance(op, Deallocate)]


def test_passes_are_shown_one_by_one() -> None:
    seen: list[str] = []
    run_passes(parse(BEFORE), after_each=lambda name, _: seen.append(name))
    assert seen == ["insert_deallocate"]
