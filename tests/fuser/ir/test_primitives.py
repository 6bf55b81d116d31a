"""cache_after, cache_before, cache_fork, rfactor: the text before and after, and errors."""

from __future__ import annotations

import pytest

from fuser import ops
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.ops.nodes import LoadStoreOp
from fuser.ir.types import MemoryType, ParallelType
from fuser.ir.verify import verify_fusion
from fuser.support.errors import DefinitionError, UnsupportedError
from tests.support.small_fusions import define


def neg_sin() -> Fusion:
    return define(lambda x: ops.neg(ops.sin(x)), (None, None))


def math_of(fusion: Fusion) -> list[str]:
    """Returns the lines of the ops without domains: `T3 = Set( T0 )`."""
    import re

    text = fusion.print_math(False).split("%kernel_math {\n")[1].split("\n}")[0]
    flat = re.sub(r"\n +", " ", text)
    return [
        re.sub(r"(T\d+)\w*\[[^\]]*\](?: ca_pos\( \d+ \))?", r"\1", line)
        for line in flat.split("\n")
    ]


def test_cache_after_copies_an_input_for_all_uses() -> None:
    fusion = neg_sin()
    x = fusion.inputs[0]
    assert isinstance(x, TensorView)
    copy = x.cache_after()
    verify_fusion(fusion)
    assert math_of(fusion) == ["T3 = Set( T0 )", "T1 = sinf(T3);", "T2 = -T1;"]
    assert copy.memory is MemoryType.local
    assert str(copy) == "T3_l_float[iS6{i0}, iS7{i2}]"


def test_cache_after_for_chosen_uses() -> None:
    fusion = define(lambda x: (ops.sin(x), ops.cos(x)), (None,))
    x = fusion.inputs[0]
    assert isinstance(x, TensorView)
    x.cache_after(cached_uses=[fusion.uses(x)[1]])
    assert math_of(fusion) == ["T3 = Set( T0 )", "T1 = sinf(T0);", "T2 = cosf(T3);"]


def test_cache_after_keeps_transforms_and_device_types_but_no_thread_types() -> None:
    fusion = neg_sin()
    sin = fusion.exprs[0].out_tensor
    sin.split(0, 4, inner_split=False)
    sin.axis(0).parallelize(ParallelType.mesh_x)
    sin.axis(2).parallelize(ParallelType.block_x)
    copy = sin.cache_after()
    assert str(copy.domain) == "[ideviceIdx.x10{4}, iS11{( ceilDiv(i0, 4) )}, iS9{i2}]"


def test_cache_before_gives_the_definition_away() -> None:
    fusion = neg_sin()
    out = fusion.outputs[0]
    new = out.cache_before()
    verify_fusion(fusion)
    assert math_of(fusion) == ["T1 = sinf(T0);", "T3 = -T1;", "T2 = Set( T3 )"]
    assert fusion.outputs == [out]
    assert isinstance(out.definition(), LoadStoreOp)
    assert new.memory is MemoryType.local and out.memory is MemoryType.global_


def test_cache_before_of_a_reduction_leaves_no_reduction_axis() -> None:
    fusion = define(lambda x: ops.sum(x, [1]), (None, None))
    new = fusion.outputs[0].cache_before()
    verify_fusion(fusion)
    assert str(new.domain) == "[iS2{i0}, rS3{i2}]"
    assert str(fusion.outputs[0].domain) == "[iS4{i0}]"


def test_cache_fork_makes_a_copy_the_output() -> None:
    def build(x: TensorView) -> tuple[TensorView, TensorView]:
        y = ops.sin(x)
        return y, ops.neg(y)

    fusion = define(build, (None, None))
    y, z = fusion.outputs
    copy = y.cache_fork()
    verify_fusion(fusion)
    assert math_of(fusion) == ["T1 = sinf(T0);", "T3 = Set( T1 )", "T2 = -T1;"]
    assert fusion.outputs == [copy, z]
    assert (y.memory, copy.memory) == (MemoryType.local, MemoryType.global_)
    with pytest.raises(DefinitionError, match="cache_fork needs an output that some op reads"):
        z.cache_fork()


def test_caches_refuse_what_has_no_meaning() -> None:
    fusion = neg_sin()
    x = fusion.inputs[0]
    assert isinstance(x, TensorView)
    with pytest.raises(DefinitionError, match="needs an op that reads"):
        fusion.outputs[0].cache_after()
    with pytest.raises(DefinitionError, match="which no op computes"):
        x.cache_before()
    with pytest.raises(DefinitionError, match="does not read it"):
        x.cache_after(cached_uses=[fusion.exprs[1]])


def test_rfactor_of_a_split_sum() -> None:
    fusion = define(lambda x: ops.sum(x, [1]), (None, None))
    out = fusion.outputs[0]
    out.split(1, 4, inner_split=False)
    producer = out.rfactor([2])
    verify_fusion(fusion)
    assert str(producer) == "T2_l_float[iS6{i0}, iS8{4}rf, rS9{( ceilDiv(i2, 4) )}rf]"
    assert [str(a) for a in producer.get_root_domain()] == ["iS6{i0}", "rS7{i2}"]
    assert str(out) == "T1_g_float[iS10{i0}, rS11{4}]"
    assert not out.has_root()


def test_rfactor_of_what_an_rfactor_made() -> None:
    """A second rfactor keeps the root axes of the first one."""
    fusion = define(lambda x: ops.sum(x, [1]), (None, None))
    out = fusion.outputs[0]
    out.split(1, 4)
    first = out.rfactor([1])
    first.split(1, 3)
    second = first.rfactor([1])
    verify_fusion(fusion)
    assert [str(a) for a in second.get_root_domain()] == ["iS14{i0}", "rS15{i2}"]
    assert second.domain.logical[3].rfactor and not first.has_root()
    assert str(first) == "T2_l_float[iS20{i0}, rS21{3}, iS22{4}]"


def test_rfactor_of_one_of_two_reductions_needs_no_root() -> None:
    fusion = define(lambda x: ops.sum(x, [0, 2]), (None, None, None))
    out = fusion.outputs[0]
    producer = out.rfactor([2])
    verify_fusion(fusion)
    assert str(producer.domain) == "[iS6{i0}, iS7{i2}, rS8{i3}]"
    assert str(out.domain) == "[rS9{i0}, iS10{i2}]"
    assert not producer.has_root()


def test_rfactor_of_a_matmul_adds_the_parts() -> None:
    fusion = define(lambda a, b: ops.matmul(a, b), (None, None), (None, None))
    out = fusion.outputs[0]
    out.outer_split(2, 4)
    out.axis(2).parallelize(ParallelType.mesh_x)
    producer = out.rfactor([3])
    verify_fusion(fusion)
    assert [op.name for op in fusion.exprs] == ["matmul", "sum"]
    assert str(producer.domain).endswith("iS12{4}rf, rS13{( ceilDiv(i2, 4) )}rf]")
    assert str(out.domain).endswith("rdeviceIdx.x16{4}]")


def test_rfactor_refuses() -> None:
    fusion = neg_sin()
    with pytest.raises(DefinitionError, match="because its definition is not a reduction"):
        fusion.outputs[0].rfactor([0])
    fusion = define(lambda x: ops.sum(x, [1]), (None, None))
    out = fusion.outputs[0]
    with pytest.raises(DefinitionError, match="some, but not all"):
        out.rfactor([1])
    with pytest.raises(DefinitionError, match="not a reduction axis"):
        out.rfactor([0])
    fusion = define(lambda x, w, b: ops.linear(x, w, b), (None, None), (None, None), (None,))
    out = fusion.outputs[0]
    out.split(-1, 2)
    with pytest.raises(UnsupportedError, match="bias"):
        out.rfactor([-1])
