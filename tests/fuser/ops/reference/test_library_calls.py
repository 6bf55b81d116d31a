"""Results of library ops equal torch's for any layout, size and order of calls, without a copy
afterwards."""

# The texts of kernels are compiled separately.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from kernel_patterns.library import LIBRARY
from kernel_patterns.pattern import as_tuple
from torch.profiler import ProfilerActivity, profile

from fuser import DataType, FusionDefinition
from fuser.ir.ops.matrix_products import GroupedMmaOp
from fuser.ir.ops.scan_ops import ArgsortOp
from fuser.ops.reference import matmul_calls
from fuser.ops.reference.library_calls import CallOperands, Returning, bind_product
from fuser.ops.reference.meaning import NODES, nodes_computed
from fuser.runtime.compile import compile_cubin
from fuser.support.errors import InputError
from fuser.support.record import replace
from hostir import HostIrEvaluator
from hostir.runtime.torch_ops import (
    _WORDS,
    LibraryKernels,
    _clear_source,
    _ends_source,
    _scatter_source,
)

pytestmark = pytest.mark.from_text

# Library ops for which torch has a function on the CPU.
COMPARED = [n for n, row in LIBRARY.items() if row.runs_on_cpu and row.peer is not None]
CPU = torch.device("cpu")


def other_sizes(name: str) -> tuple[int, ...]:
    """Returns the shape of a row with one more element along its first axis."""
    first, *rest = LIBRARY[name].small
    return first + 1, *rest


def turned(x: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with the same elements, in which neighbours are not adjacent in memory."""
    if x.ndim < 2:
        return x.repeat_interleave(2)[::2]
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def draw(name: str, shape: Sequence[int], *, seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return list(LIBRARY[name].operands(tuple(shape), torch.float32, "cpu"))


def define(name: str, inputs: Sequence[torch.Tensor]) -> FusionDefinition:
    """Returns the definition of a row for tensors of any sizes and strides."""
    with FusionDefinition() as fd:
        given = [fd.define_tensor([-1] * x.ndim, contiguity=False, dtype=x.dtype) for x in inputs]
        made = LIBRARY[name].build(fd, *given)
        for out in made if isinstance(made, tuple) else (made,):
            fd.add_output(out)
    return fd


def expect(name: str, inputs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
    row = LIBRARY[name]
    assert row.peer is not None
    exact = [x if row.is_exact or not x.is_floating_point() else x.double() for x in inputs]
    for out, value in zip(outs, as_tuple(row.peer(*exact)), strict=True):
        torch.testing.assert_close(out, value.to(out.dtype), rtol=1e-5, atol=1e-5)


@pytest.mark.finding("G36")
def test_every_library_op_says_how_torch_writes_into_buffers() -> None:
    """Includes ops that run on a GPU only. Plain matrix products have their own call."""
    without = {cls.__name__ for cls in nodes_computed("library") if NODES[cls].into is None}
    assert without == {"MatmulOp", "LinearOp"}


@pytest.mark.finding("G36")
@pytest.mark.parametrize("name", COMPARED)
def test_results_of_many_calls_stay_what_they_are(name: str) -> None:
    """Sizes and layouts take turns, and the caller keeps all results."""
    row = LIBRARY[name]
    fd = define(name, draw(name, row.small))
    held: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
    for turn in range(12):
        shape = row.small if turn % 4 < 2 else other_sizes(name)
        inputs = draw(name, shape, seed=turn)
        if turn % 3 == 2:
            inputs = [*map(turned, inputs)]
        held.append((inputs, fd.execute(inputs)))
    for inputs, outs in held:
        expect(name, inputs, outs)


@pytest.mark.finding("G36")
@pytest.mark.parametrize("name", COMPARED)
def test_results_are_written_into_buffers_that_are_given(name: str) -> None:
    inputs = draw(name, LIBRARY[name].small)
    fd = define(name, inputs)
    outs = fd.execute(inputs)
    program = fd.fec.host_program()
    for lay_out in (torch.clone, turned):
        buffers = [lay_out(torch.zeros_like(out)) for out in outs]
        given = zip(program.outputs, buffers, strict=True)
        evaluator = HostIrEvaluator(program)
        for _ in range(2):
            values: Any = dict(zip(program.inputs, inputs, strict=True)) | dict(given)
            found = evaluator.run_with_input(values)
            expect(name, inputs, buffers)
            assert [x.data_ptr() for x in found] == [x.data_ptr() for x in buffers]
            given = zip(program.outputs, buffers, strict=True)


def copies_of(call: Callable[[], object]) -> int:
    """Returns the number of tensor copies that torch makes in one call."""
    for _ in range(3):
        call()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        call()
    return [event.name for event in profiled.events() or ()].count("aten::copy_")


@pytest.mark.finding("G36")
@pytest.mark.parametrize("name", COMPARED)
def test_no_copy_stands_before_or_behind_torchs_own(name: str) -> None:
    row, inputs = LIBRARY[name], draw(name, LIBRARY[name].small)
    peer = row.peer
    assert peer is not None
    fd = row.define(inputs)
    assert copies_of(lambda: fd.execute(inputs)) <= copies_of(lambda: peer(*inputs))


@pytest.mark.finding("G36")
@pytest.mark.parametrize("name", COMPARED)
def test_results_with_late_streams(name: str) -> None:
    """A library op writes its result when its stream reaches the op."""
    row, inputs = LIBRARY[name], draw(name, LIBRARY[name].small)
    fd = row.define(inputs)
    for _ in range(3):
        expect(name, inputs, fd.execute(inputs, _enable_options=["late_stream(all)"]))


@pytest.mark.finding("G36")
@pytest.mark.parametrize("name", COMPARED)
def test_a_result_in_the_middle_of_a_program(name: str) -> None:
    """A kernel reads the result from memory that runs share."""
    row, inputs = LIBRARY[name], draw(name, LIBRARY[name].small)
    with FusionDefinition() as fd:
        made = row.build(fd, *map(fd.from_pytorch, inputs))
        fd.add_output(fd.ops.add(made[0] if isinstance(made, tuple) else made, 1))
    assert row.peer is not None
    expected = as_tuple(row.peer(*inputs))[0] + 1
    outs = [fd.execute(inputs)[0] for _ in range(4)]
    for out in outs:
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.finding("G36")
@pytest.mark.parametrize("is_read", [False, True], ids=["plain", "reads on the host"])
def test_a_result_that_torch_returns_is_the_buffer(
    monkeypatch: pytest.MonkeyPatch, is_read: bool
) -> None:
    """For ops that torch cannot make write into a buffer. In the middle of a program the result is
    copied if a graph may repeat the runs."""
    monkeypatch.setattr(ArgsortOp, "READS_ON_HOST", is_read)
    made: list[torch.Tensor] = []

    def bind(op: Any, bound: Any) -> Returning:
        def make(ins: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            made.append(torch.argsort(ins[0], dim=op.dim, stable=True))
            return [made[-1]]

        return Returning(make)

    row = replace(NODES[ArgsortOp], into=bind, may_return=True)
    monkeypatch.setitem(NODES, ArgsortOp, row)
    x = torch.randn(5, 7)
    for is_last in (True, False):
        with FusionDefinition() as fd:
            order = fd.ops.argsort(fd.from_pytorch(x), 1)
            fd.add_output(order if is_last else fd.ops.add(order, 1))
        inputs = [torch.randn(5 + i // 3, 7) for i in range(6)]
        outs = [fd.execute([one])[0] for one in inputs]
        own = {one.data_ptr() for one in made}
        assert len({out.data_ptr() for out in outs}) == 6
        assert all((out.data_ptr() in own) is is_last for out in outs)
        for one, out in zip(inputs, outs, strict=True):
            assert torch.equal(out, torch.argsort(one, dim=1, stable=True) + (not is_last))
        made.clear()


# ------------------------------------------------------------------ which element is the largest
@pytest.mark.finding("G36")
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("kept", ["both", "values", "places"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_topk_of_one_element_equals_torch(dtype: torch.dtype, kept: str, largest: bool) -> None:
    """NaN is above all numbers, and each index has the value that is returned."""
    torch.manual_seed(1)
    x = torch.randn(6, 5, 9).mul(4).to(dtype)
    if dtype.is_floating_point:
        x[0, 2, 3] = x[1, :, 4] = math.nan
        x[2, 1, 0] = math.inf
    for dim in range(3):
        with FusionDefinition() as fd:
            tv, one = fd.from_pytorch(x), fd.define_scalar(1, DataType.Int)
            values, places = fd.ops.topk(tv, one, dim, largest)
            for tv in (values, places) if kept == "both" else (locals()[kept],):
                fd.add_output(tv)
        for _ in range(2):
            outs = fd.execute([x])
            expected = torch.topk(x, 1, dim, largest).values
            for out in outs:
                found = x.gather(dim, out) if out.dtype is torch.int64 else out
                torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.finding("G36")
@pytest.mark.parametrize("kept", [(0,), (1,), (0, 1)], ids=str)
def test_topk_of_one_element_is_a_reduction(kept: tuple[int, ...]) -> None:
    x = torch.randn(6, 9)
    with FusionDefinition() as fd:
        results = fd.ops.topk(fd.from_pytorch(x), 1, 1)
        for k in kept:
            fd.add_output(results[k])
    for _ in range(3):
        fd.execute([x])
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        fd.execute([x])
    names = {event.name for event in profiled.events() or ()}
    assert names & {"aten::max", "aten::amax", "aten::argmax"} and "aten::topk" not in names


# ------------------------------------------------------------------ kernels beside torch's calls
@pytest.mark.finding("G36")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_scatter_kernel_leaves_out_what_is_outside(
    dtype: torch.dtype, index_dtype: torch.dtype
) -> None:
    kernels, generator = LibraryKernels(CPU), torch.Generator().manual_seed(3)
    for shape, dim, length in (((4, 7, 5), 1, 3), ((9,), 0, 6), ((3, 4), 1, 4), ((2, 3, 4), 0, 1)):
        x = torch.randint(0, 99, shape, generator=generator).to(dtype)
        sizes = [length if k == dim else n for k, n in enumerate(shape)]
        # Each row has another permutation, so no position is written twice.
        order = torch.rand(
            [max(shape[dim] + 4, length) if k == dim else n for k, n in enumerate(sizes)],
            generator=generator,
        ).argsort(dim)
        index = (order.narrow(dim, 0, length) - 2).to(index_dtype).contiguous()
        src = torch.randint(0, 99, sizes, generator=generator).to(dtype)
        expected = x.clone()
        for at in torch.cartesian_prod(*map(torch.arange, sizes)).view(-1, len(sizes)).tolist():
            place = int(index[tuple(at)])
            if 0 <= place < shape[dim]:
                to = tuple(place if k == dim else n for k, n in enumerate(at))
                expected[to] = src[tuple(at)]
        assert kernels.takes_scatter(x, dim, index, src)
        kernels.scatter(x, dim, index, src)
        assert torch.equal(x, expected)
        assert not kernels.takes_scatter(x.transpose(0, -1), dim, index, src) or x.ndim == 1


@pytest.mark.finding("G36")
def test_scatter_kernel_writes_one_number() -> None:
    x = torch.zeros(3, 7, dtype=torch.uint8)
    index = torch.tensor([[0, 8, 6], [-1, 2, 3], [5, 4, 100]])
    LibraryKernels(CPU).scatter(x, 1, index, 200)
    assert x.nonzero().tolist() == [[0, 0], [0, 6], [1, 2], [1, 3], [2, 4], [2, 5]]
    assert int(x.max()) == 200 and int(x[x > 0].min()) == 200


@pytest.mark.finding("G36")
def test_kernels_compile_for_a_gpu() -> None:
    ways = itertools.product(_WORDS.values(), ("int", "int64_t"), (False, True), (False, True))
    sources = [
        _scatter_source(word, index, "int", is_number, is_last)
        for word, index, is_number, is_last in ways
    ]
    codes = compile_cubin([_ends_source(), _clear_source(), *sources[::5]])
    assert all(codes)


@pytest.mark.finding("G36")
def test_ends_of_groups_are_brought_back_and_told_by_the_next_call() -> None:
    a, b = torch.randn(6, 4), torch.randn(3, 4, 5)
    with FusionDefinition() as fd:
        ends = fd.define_tensor([3], dtype=DataType.Int32)
        fd.add_output(fd.ops.grouped_mm(fd.from_pytorch(a), fd.from_pytorch(b), ends))
    (op,) = fd.fusion.exprs
    kernels: Any = LibraryKernels(CPU)
    ends_of = kernels.ends_of(op, 6)
    for given in ([1, 3, 6], [0, 0, 0], [2, 2, 5]):
        assert ends_of(torch.tensor(given, dtype=torch.int32)).tolist() == given
    for given, kept in (([1, 7, 6], [1, 6, 6]), ([3, 2, 4], [3, 3, 4]), ([-1, 2, 9], [0, 2, 6])):
        assert ends_of(torch.tensor(given, dtype=torch.int32)).tolist() == kept
        with pytest.raises(
            InputError, match=r"but in an earlier run T0_g_int.* had -?\d+ for group"
        ):
            ends_of(torch.tensor([1, 2, 3], dtype=torch.int32))
        assert ends_of(torch.tensor([1, 2, 3], dtype=torch.int32)).tolist() == [1, 2, 3]
    out = torch.randn(6, 5).to(torch.bfloat16)
    expected = out.clone()
    expected[4:] = 0
    kernels.clear_rows(out, torch.tensor([1, 4], dtype=torch.int32))
    assert torch.equal(out, expected)


@pytest.mark.finding("G36")
@pytest.mark.parametrize("given", [[1, 3, 6], [0, 4, 4]], ids=str)
def test_groups_are_one_call_of_torch_where_it_has_a_kernel_for_them(
    monkeypatch: pytest.MonkeyPatch, given: list[int]
) -> None:
    """The ends of groups stay on the device, and the tensor that torch returns is the result."""
    made: list[torch.Tensor] = []

    def at_once(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        made.append(torch.full((len(a), b.shape[-1]), math.nan, dtype=a.dtype))
        for group, (first, last) in enumerate(itertools.pairwise([0, *ends.tolist()])):
            made[-1][first:last] = a[first:last] @ b[group]
        return made[-1]

    monkeypatch.setattr(matmul_calls, "_takes_native", lambda given: True)
    monkeypatch.setattr(matmul_calls, "_native_groups", at_once)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    a, b = torch.randn(6, 4).bfloat16(), torch.randn(3, 4, 5).bfloat16()
    ends = torch.tensor(given, dtype=torch.int32)
    with FusionDefinition() as fd:
        inputs = [fd.from_pytorch(x) for x in (a, b, ends)]
        fd.add_output(fd.ops.grouped_mm(*inputs))
    (op,) = fd.fusion.exprs
    assert isinstance(op, GroupedMmaOp)
    expected = torch.zeros(6, 5, dtype=torch.float64)
    for group, (first, last) in enumerate(itertools.pairwise([0, *given])):
        expected[first:last] = a[first:last].double() @ b[group].double()
    bound = CallOperands(
        [a, b, ends], [torch.empty(6, 5).bfloat16()], {}, (True,), LibraryKernels(CPU)
    )
    call = bind_product(op, bound)
    assert isinstance(call, Returning)
    for _ in range(2):
        (out,) = call.make([a, b, ends])
        assert out is made[-1]
        torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
    assert len(made) == 2
