"""Error messages of calls name the input or op, the wrong value, and the user's line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch

from fuser import (
    DataType,
    FusionDefinition,
    ParallelType,
    Replicate,
    Shard,
    multidevice,
    ops,
    shard,
)
from fuser.ir.fusion import TensorView
from fuser.multidevice import DeviceMesh, simulate
from fuser.support.errors import (
    ArgumentError,
    DefinitionError,
    FuserError,
    InputError,
    ProgramMismatchError,
    VerifyError,
    last_user_line,
)
from hostir import Allocate, HostIrContainer, HostIrEvaluator
from hostir.ir.diagnostics import listing
from hostir.ir.verifier import verify

X = torch.randn(4, 8)


def line_of(text: str) -> str:
    """Returns the position of the first line of this file that ends with a comment."""
    lines = inspect.getsource(inspect.getmodule(line_of) or line_of).splitlines()  # pyright: ignore[reportArgumentType]
    number = next(i for i, line in enumerate(lines, 1) if line.endswith(f"# {text}"))
    return f"{__file__}:{number}"


def product() -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        w = fd.define_tensor([-1, -1], contiguity=True)  # the weight
        fd.add_output(fd.ops.linear(x, w))  # the linear
    return fd


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ([X], "Expected 2, got 1: T1_g_float["),
        (
            [X, None],
            "input 1, T1_g_float[iS2{i3}, iS3{i4}]: an input must be a tensor or a number",
        ),
        ([[X], [None]], "input 1, T1_g_float["),
        (
            [X, X.double()],
            "Expected input 1, T1_g_float[iS2{i3}, iS3{i4}], to be bound to a tensor",
        ),
        ([X, X[0]], "to be bound to a tensor of rank 2, but got a tensor of rank 1"),
        ([X, 1.0], "to be an at::Tensor but got scalar 1.0"),
        ([X, X.t().contiguous().t()], "Stride mismatch with contiguity info. Expected input 1, T1"),
    ],
)
@pytest.mark.parametrize("has_run", [False, True])
def test_a_wrong_input_is_named_with_its_line(
    inputs: list[object], text: str, has_run: bool
) -> None:
    fd = product()
    if has_run:
        fd.execute([X, X])
    with pytest.raises(InputError) as error:
        fd.execute(inputs)
    assert text in str(error.value)
    assert str(error.value).endswith(f" (user code at {line_of('the weight')})")


def test_too_many_inputs_are_told_which_there_are() -> None:
    with pytest.raises(
        InputError, match="Expected 2 inputs, got 3: the definition has T0_g_float, "
    ):
        product().execute([X, X, X])


def test_operands_that_do_not_fit_are_named_once() -> None:
    with pytest.raises(InputError) as error:
        product().execute([X, torch.randn(4, 9)])
    text = str(error.value)
    assert text.endswith(
        "but got 9: linear: T0_g_float[iS0{i0}, iS1{i1}] and T1_g_float[iS2{i3}, iS3{i4}] at "
        f"{line_of('the linear')}"
    )
    with FusionDefinition() as fd, pytest.raises(DefinitionError) as wrong:
        a, b = fd.define_tensor([4, 8]), fd.define_tensor([4, 9])
        fd.ops.matmul(a, b)
    assert str(wrong.value).count("T0_g_float") == 1


def by_hand(size: int) -> HostIrContainer:
    """Shards `size` rows over two devices."""
    program = HostIrContainer()
    mesh = DeviceMesh([0, 1])
    with program:
        x = program.input([size, 4], mesh=mesh)  # the input by hand
        y = program.tensor([size, 4], mesh=mesh)
        for tv in (x, y):
            tv.outer_split(0, 2)
            tv.axis(0).parallelize(ParallelType.mesh_x)
        program.append(Allocate(y), ops.neg(x), into=y)
        program.add_output(y)
    return program


def raised(call: Callable[[], object]) -> BaseException:
    with pytest.raises(FuserError) as error:
        call()
    return error.value


def test_a_wrong_shard_of_a_program_by_hand_is_told_with_the_users_line() -> None:
    program = by_hand(8)

    def body() -> str:
        return str(raised(lambda: HostIrEvaluator(program).run([torch.randn(2, 4)])))

    with simulate(2) as world:
        for text in world.run(body):
            assert "Tried to bind to a constant value: 8 as 4" in text and "2 ranks" in text
            assert f"(user code at {__file__}:" in text


@pytest.mark.finding("G21")
def test_the_whole_of_a_cut_tensor_is_told_which_shard_a_rank_passes() -> None:
    def body() -> str:
        with FusionDefinition() as fd:
            x = fd.define_tensor([8, 8])
            shard(x, DeviceMesh([0, 1]), [Shard(0)])
            fd.add_output(fd.ops.relu(x))
        return str(raised(lambda: fd.execute([torch.randn(8, 8)])))

    with simulate(2) as world:
        for text in world.run(body):
            assert "Tried to bind to a constant value: 8 as 16" in text
            assert (
                "to have size 4 at axis 0 on this rank (8 over 2 ranks), but got 8. Tried" in text
            )
            assert (
                "; you passed the whole tensor [8, 8], but input 0 (T0_g_float) is sharded along "
                "axis 0 over 2 ranks: each rank must pass its shard [4, 8]; "
                "multidevice.shard_tensor(whole, tensor of the definition) returns the shard"
                in text
            )


def gated(mesh: DeviceMesh, size: int, *, is_turned: bool = False) -> FusionDefinition:
    """Defines `down(gate(x) * up(x))`. `size` is 6 for weights of constant sizes, or -1.

    If `is_turned`, the operands of the first linear are in the wrong order.
    """
    hidden = 8 if size > 0 else -1
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 6], contiguity=True, mesh=mesh, placements=[Replicate()])
        shapes = [hidden, size], [hidden, size], [size, hidden]
        cuts = Shard(0), Shard(0), Shard(1)
        gate, up, down = (
            fd.define_tensor(shape, contiguity=True, mesh=mesh, placements=[cut])
            for shape, cut in zip(shapes, cuts, strict=True)
        )
        first = fd.ops.linear(gate, x) if is_turned else fd.ops.linear(x, gate)
        product = fd.ops.mul(first, fd.ops.linear(x, up))  # the product
        fd.add_output(fd.ops.linear(product, down))
    return fd


def gated_error(size: int, wrong: dict[int, list[int]], *, is_turned: bool = False) -> str:
    """Returns the error of a run whose inputs have the shapes `wrong` instead of the right ones."""
    shapes = {0: [2, 6], 1: [4, 6], 2: [4, 6], 3: [6, 4]} | wrong

    def body() -> str:
        fd = gated(DeviceMesh([0, 1]), size, is_turned=is_turned)
        return str(raised(lambda: fd.execute([torch.randn(s) for s in shapes.values()])))

    with simulate(2) as world:
        return world.run(body)[0]


def test_a_tensor_that_is_cut_along_the_wrong_axis_is_told_its_shard() -> None:
    text = gated_error(6, {3: [3, 8]})
    assert "to have size 6 at axis 0, but got 3. Tried to bind to a constant value: 6 as 3" in text
    assert "; you passed a tensor of shape [3, 8], but input 3 (T3_g_float) is sharded" in text
    assert "sharded along axis 1 over 2 ranks: each rank must pass its shard [6, 4]" in text


def test_a_whole_tensor_of_symbolic_sizes_is_named_and_not_the_right_one() -> None:
    text = gated_error(-1, {1: [8, 6]})
    assert (
        "; input 1 says 16 and input 2 says 8: did you pass the whole tensor as input 1, which is "
        "sharded along axis 0 over 2 ranks?" in text
    )
    text = gated_error(-1, {3: [6, 8]})
    assert "; input 3 says 16 and input 1 says 8: did you pass the whole tensor as input 3" in text
    # No number of ranks explains 24 and 8.
    assert "did you pass" not in gated_error(-1, {1: [12, 6]})


def test_operands_that_do_not_fit_for_an_input_are_named_first() -> None:
    text = gated_error(6, {}, is_turned=True)
    assert re.match(
        r"mul: T4_\S*\[iS\d+\{8\}, iS\d+\{i0\}, rS\d+\{6\}\] .* and "
        r"T5_\S*\[iS\d+\{i0\}, iS\d+\{8\}, "
        rf"rS\d+\{{6\}}\] .* at {re.escape(line_of('the product'))} do not fit for these inputs\. "
        r"Expected input 0, T0_.* to have size 8 at axis 0, but got 2\. Tried to bind",
        text,
    ), text


@pytest.mark.finding("G21")
@pytest.mark.parametrize(
    ("placements", "words"),
    [
        (Shard(0), r"a list, got .*: write \[Shard\(dim=0\)\]"),
        ([Replicate], r"write Replicate\(\)"),
    ],
)
def test_placements_that_are_no_list_of_instances_are_told_what_to_write(
    placements: Any, words: str
) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([8, 8])
        with pytest.raises(ArgumentError, match=words):
            shard(x, DeviceMesh([0, 1]), placements)
        fd.add_output(fd.ops.relu(x))


def test_what_ends_a_job_names_the_users_line() -> None:
    """The error that ends a job shows the user's line, not the line of this project that raised
    it."""
    error = raised(lambda: product().execute([X]))
    trace: TracebackType | None = error.__traceback__
    assert last_user_line(trace).startswith(f"{__file__}:")
    assert last_user_line(None) == ""


def test_ranks_with_other_options_are_told_which() -> None:
    mesh = DeviceMesh([0, 1])

    def body() -> str:
        rank = multidevice.Communicator.instance().rank()
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, -1], contiguity=True, dtype=DataType.Float)
            fd.add_output(fd.ops.sum(x, dims=[0]))
            x.set_device_mesh(mesh)
            x.outer_split(0, 2)
            x.axis(0).parallelize(ParallelType.mesh_x)
        options = ["kernel_reuse"] if rank else []
        try:
            fd.execute([X], _disable_options=options)
        except ProgramMismatchError as error:
            return str(error)
        return ""

    with simulate(2) as world:
        for text in world.run(body):
            first, *rows = text.splitlines()
            assert first == "the programs of the ranks differ:"
            one, other = (
                "enabled nothing; disabled nothing",
                "enabled nothing; disabled kernel_reuse",
            )
            assert f"ranks (0): // options: {one} (user code" in rows[0]
            assert f"ranks (1): // options: {other} (user code" in rows[1]


def _long_program() -> tuple[HostIrContainer, TensorView]:
    """Returns a program of 60 ops, and the result of the last one."""
    program = HostIrContainer()
    with program:
        x = program.input([4])
        for _ in range(60):
            x = ops.neg(x)
            program.append(x)
    return program, x


def test_the_message_is_not_lost_above_a_long_program() -> None:
    program, _ = _long_program()
    with program:
        program.append(Allocate(program.tensor([4])))
        program.add_output(program.tensor([4]))  # no op writes this output
    text = str(raised(lambda: verify(program, after="making it")))
    assert len(text.splitlines()) < 30, text
    assert isinstance(raised(lambda: verify(program, after="making it")), VerifyError)


def test_a_listing_shows_what_is_marked() -> None:
    program, x = _long_program()
    with program:
        program.add_output(x)
    rows = listing(program, [program.ops[30]]).splitlines()
    assert len(rows) == 10 and rows[0] == "   ..."
    assert [row for row in rows if row.startswith("->")] == [rows[5]]
    assert Path(__file__).name not in rows[5] and "T31" in rows[5]


@pytest.mark.parametrize(
    ("name", "words"),
    {
        "profile": "fuser.PythonProfiler",
        "auto_schedule": "fd.manual_execute",
        "override_user_schedule": "fd.manual_execute",
        "print_repro": "fd.repro_script_for(inputs)",
        "capture_debug_output": "FUSER_DUMP_DIR",
        "factor": "options are device, save_repro_inputs, _enable_options, _disable_options",
    }.items(),
)
def test_an_option_that_execute_does_not_have_is_no_input(name: str, words: str) -> None:
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.neg(fd.define_tensor([-1])))
    for _ in range(2):  # before the first run, and after it
        with pytest.raises(ArgumentError) as caught:
            fd.execute([torch.ones(3)], **{name: True})  # pyright: ignore[reportArgumentType]
        text = str(caught.value)
        assert f"there is no option {name!r}" in text and words in text, text
        assert "write fd.execute([" not in text and "test_definition_messages.py:" in text
        fd.execute([torch.ones(3)])


@pytest.mark.parametrize(
    ("owner", "name", "words"),
    [
        ("fd", "last_cuda_code", "fd.fec.get_cuda_kernel(inputs)"),
        ("fd", "cuda_code_for", "fd.fec.get_cuda_kernel(inputs)"),
        ("fd", "last_scheduled_fusion_ir", "fd.fec.get_most_recent_scheduled_ir()"),
        ("fd", "scheduled_fusion_ir_for", "fd.fec.get_scheduled_ir(inputs)"),
        ("fd", "fusion_ir", "fd.fusion.print_math()"),
        ("fd", "profile", "fuser.PythonProfiler"),
        ("fd", "id", "fd.fusion == other.fusion"),
        ("fd", "clone", "copy.copy(fd)"),
        ("fd.fec", "print_fusion", "fd.fusion.print_math()"),
    ],
)
def test_names_of_older_interfaces_say_what_to_use(owner: str, name: str, words: str) -> None:
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.neg(fd.define_tensor([-1])))
    fd.execute([torch.ones(3)])
    with pytest.raises(AttributeError) as caught:
        getattr(fd if owner == "fd" else fd.fec, name)
    assert f"no attribute {name!r}: " in str(caught.value) and words in str(caught.value)
    assert not hasattr(fd.fec, "no_such_name")


def test_an_order_of_strides_is_no_argument_of_add_output() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1])
        with pytest.raises(ArgumentError, match=r"write fd\.add_output\(fd\.ops\.stride_order\("):
            fd.add_output(x, stride_order=[1, 0])  # pyright: ignore[reportCallIssue]
        fd.add_output(x)


def test_a_scalar_input_is_named_by_its_line() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1])
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        s = fd.define_scalar()
        n = fd.define_scalar(None, DataType.Int)
        fd.add_output(fd.ops.mul(fd.ops.mul(x, s), n))
    given = torch.ones(3)
    s_line, n_line = (f"(user code at {__file__}:{line + k})" for k in range(2))
    wrong: list[tuple[list[Any], str]] = [
        ([given, torch.tensor(2.0), 1], f"pass t.item() {s_line}"),
        ([given, torch.ones(1), 1], f"to be a scalar but got float tensor of rank 1 {s_line}"),
        ([given, 2.0, 2.5], f"is not compatible with the expected data type: int64_t. {n_line}"),
        ([given, 2.0, 2**70], n_line),
        ([given, 2.0], f"is missing {n_line}"),
    ]
    for inputs, words in wrong:
        with pytest.raises(InputError) as caught:
            fd.execute(inputs)
        assert words in str(caught.value), caught.value


def test_an_extent_that_ranks_cannot_share_is_named_with_the_shard_that_was_passed() -> None:
    with FusionDefinition() as fd:
        whole = fd.define_tensor([-1, 4], contiguity=True)
        x = fd.define_tensor([-1, 4], contiguity=True)
        fd.add_output(fd.ops.add(whole, x))
    x.set_device_mesh([0, 1])
    x.outer_split(0, 2)
    x.axis(0).parallelize(ParallelType.mesh_x)
    words = (
        r"axis 0 of input 1 \(T1_g_float\) has extent 7, which 2 ranks cannot share equally; this "
        r"rank passed a shard of 4: pad it to 8, or use .* \(user code at "
    )
    with simulate(2) as world, pytest.raises(FuserError, match=words):
        world.run(lambda: fd.execute([torch.ones(7, 4), torch.ones(4, 4)]))


def test_an_uneven_shard_of_the_wrong_size_is_named_with_the_blocks_of_all_ranks() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([7, 4], contiguity=True)
        fd.add_output(fd.ops.neg(x))
    x.set_device_mesh([0, 1])
    x.outer_split(0, 2)
    x.axis(0).parallelize(ParallelType.mesh_x)
    words = (
        r"input 0 \(T0_g_float\) to have size 3 at axis 0 on this rank \(7 over 2 ranks: blocks of "
        r"4, the last ones shorter or empty\), but got 4; multidevice.shard_t.* \(user code at "
    )
    with simulate(2) as world, pytest.raises(FuserError, match=words):
        world.run(lambda: fd.execute([torch.ones(4, 4)]))
