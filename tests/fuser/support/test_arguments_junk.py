"""Junk in the place of any argument of any public call works, or raises an error that helps.

Each row is a valid call. Each of its arguments is replaced by every value of the junk table in
turn. The outcome must be a result, or a `FuserError` that names the call and the user's line.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from inspect import isfunction, signature
from typing import Any

import numpy as np
import pytest
import torch

import fuser.ops
import fuser.schedule
from fuser import DataType, DeviceMesh, FusionDefinition, MemoryType, ParallelType, TensorView
from fuser.ir.pointwise_table import POINTWISE, PUBLIC
from fuser.ir.text.printer import fusion_text
from fuser.schedule import SchedulerType
from fuser.support.errors import (
    ArgumentError,
    EmptyDefinitionError,
    FuserError,
    InputError,
    OtherEntranceError,
)
from multidevice import shard_tensor
from multidevice.job import shard_tensor as public_mesh

D = DataType
HUGE = 10**5000


class Bench:
    """A definition with a value of each kind of argument."""

    def __init__(self) -> None:
        with FusionDefinition() as other:
            self.foreign = other.define_tensor([-1, -1], contiguity=True)
        self.fd = FusionDefinition()
        self.fd.__enter__()
        self.x = self.fd.define_tensor([-1, -1], contiguity=True)
        self.n = self.fd.define_tensor([-1, -1], contiguity=True, dtype=D.Int)
        self.b = self.fd.define_tensor([-1, -1], contiguity=True, dtype=D.Bool)
        self.one = self.fd.define_tensor([-1, 1], contiguity=[True, None])
        self.zero_dim = self.fd.define_tensor([])
        self.heads = self.fd.define_tensor([-1] * 4, contiguity=True)
        self.rows = self.fd.define_tensor([-1] * 3, contiguity=True)
        self.seed = self.fd.define_tensor([2], contiguity=True, dtype=D.UInt64)
        self.offset = self.fd.define_tensor([], dtype=D.UInt64)
        self.ends = self.fd.define_tensor([-1], contiguity=True, dtype=D.Int32)
        self.bytes = self.fd.define_tensor([-1, -1], contiguity=True, dtype=D.Float8_e4m3fn)
        self.scale = self.fd.define_tensor([])
        self.wide = self.fd.define_tensor([-1, 64], contiguity=True)
        self.scalar = self.fd.define_scalar(None, D.Int)
        self.y = self.fd.ops.add(self.x, 1.0)
        self.total = self.fd.ops.sum(self.y, [0, 1])

        self.junk = list(junk(self))

    def close(self) -> None:
        self.fd.__exit__(None, None, None)


class NoRepr:
    def __repr__(self) -> str:
        raise ValueError("no text")


def junk(bench: Bench) -> Iterator[object]:
    yield from (None, True, False, 0, 1, -1, 7, HUGE, -HUGE, 2**63, 2**40, ..., 1j)
    yield from (1.5, float("nan"), float("inf"), "", "a", "Float", "mesh_x", b"a", object(), int)
    yield from ([], [0, 0], [1, 0], [9, 9], [[0, 1], [2]], [[]], [None], ["a"], [HUGE], [True])
    yield from ([1.5], [1j], ((),), (2, 3), [1, None], {}, {0: HUGE}, {"a": 1}, {0: 0, 1: 0})
    yield from ({0, 1}, range(3), range(HUGE), slice(None), (i for i in (1, 0)), itertools.count())
    yield from (np.int64(1), np.float32(1.5), np.bool_(True), np.array(1), np.array([0, 1]))
    yield from (np.array(["a"]), np.zeros((2, 2)), np.array(1 + 2j), np.dtype("float32"))
    yield from (torch.tensor(1), torch.tensor(1.5), torch.tensor([0, 1]), torch.ones(2, 2))
    yield from (torch.tensor(1, device="meta"), torch.float32, torch.uint8, torch.Size([2, 3]))
    yield from (
        D.Float,
        D.Null,
        D.ComplexFloat,
        ParallelType.mesh_x,
        ParallelType.stream,
        MemoryType.global_,
    )
    yield from (bench.x, bench.n, bench.zero_dim, bench.foreign, bench.scalar, [bench.x, bench.x])
    yield from ([bench.foreign], [bench.scalar, 1], bench.fd, bench.fd.fusion, NoRepr(), [NoRepr()])
    yield from (lambda: 1, DeviceMesh([0, 1]), fuser.ops, NotImplemented, [10**9] * 8, ["a"] * 99)


def _count() -> int:
    bench = Bench()
    bench.close()
    return len(bench.junk)


JUNK = _count()
Call = Callable[[Bench], tuple[Any, ...]]

OPS: dict[str, Call] = {
    "addcmul": lambda t: (t.x, t.x, t.x, 2.0),
    "broadcast": lambda t: (t.x, [False, True, False]),
    "broadcast_in_dim": lambda t: (t.x, [t.x.size(0), 4, t.x.size(1)], [0, 2]),
    "cast": lambda t: (t.x, D.Half),
    "cat": lambda t: ([t.x, t.y], 0, False),
    "clamp": lambda t: (t.x, 0.0, 1.0),
    "expand": lambda t: (t.one, [-1, 4]),
    "full": lambda t: ([2, t.scalar], 1.0, D.Float),
    "imag": lambda t: (t.x,),
    "iota": lambda t: (4, 0, 1, D.Int),
    "lerp": lambda t: (t.x, t.x, 0.5),
    "linear": lambda t: (t.x, t.y, None),
    "logical_right_shift": lambda t: (t.n, 1),
    "matmul": lambda t: (t.x, t.y),
    "normal": lambda t: (0.0, 1.0, [2, t.scalar]),
    "pad": lambda t: (t.x, [1, 1], 0.0),
    "permute": lambda t: (t.x, [1, 0]),
    "rand_like": lambda t: (t.x,),
    "randn_like": lambda t: (t.x,),
    "real": lambda t: (t.x,),
    "reshape": lambda t: (t.x, [-1]),
    "sdpfa_bwd": lambda t: (*[t.heads] * 5, t.rows, 0.0, False, t.seed, t.offset, 0.5),
    "sdpfa_fwd": lambda t: (t.heads, t.heads, t.heads, t.heads, None, 0.0, True, 0.5),
    "segment_set": lambda t: (t.x,),
    "set": lambda t: (t.x,),
    "shape": lambda t: (t.x,),
    "sign": lambda t: (t.x,),
    "size": lambda t: (t.x, 0),
    "slice": lambda t: (t.x, [0, 0], [1, 1], [1, 1], False),
    "squeeze": lambda t: (t.one, [1], False),
    "stride_order": lambda t: (t.x, [0, 1]),
    "threshold": lambda t: (t.x, 0.5, 1.0),
    "triu": lambda t: (t.x, 0),
    "uniform": lambda t: (0.0, 1.0, [2, t.scalar]),
    "var": lambda t: (t.x, [0], 1, True),
    "var_mean": lambda t: (t.x, [0], 1, True),
    "welford": lambda t: (t.x, [0]),
    **{n: lambda t: (t.x, 0, None) for n in ("cumsum", "cumprod", "cummax", "cummin")},
    "argsort": lambda t: (t.x, 0, True, True),
    "grouped_mm": lambda t: (t.bytes, t.bytes, t.ends, t.one, t.scale, None, t.x, None, D.Float),
    "nv_block_quantize": lambda t: (t.wide, None, False, 32, D.Float8_e4m3fn),
    "nv_grouped_block_quantize": lambda t: (
        *(t.wide, t.ends, t.ends),
        *(None, 32, D.Float8_e4m3fn),
    ),
    "preprocess_grouped_matmul_input_sf": lambda t: (t.x, t.ends, t.ends),
    "scaled_mm": lambda t: (t.bytes, t.bytes, t.one, t.scale, None, t.x, None, D.Float),
    "topk": lambda t: (t.x, t.scalar, 0, True, True),
    "embedding_fwd": lambda t: (t.n, t.y),
    "gather": lambda t: (t.x, t.n, 0),
    "index_put_accumulate": lambda t: (t.x, t.ends, t.x),
    "index_select": lambda t: (t.x, t.n, 0),
    "scatter": lambda t: (t.x, t.n, t.x, 0),
    "select": lambda t: (t.x, t.scalar, 0),
    "take_along_axis": lambda t: (t.x, t.n, 0),
    **{name: lambda t: (t.x, [0], True, D.Double) for name in ("sum", "prod", "max", "min")},
    "softmax": lambda t: (t.x, 0, D.Float),
    "log_softmax": lambda t: (t.x, -1, D.Float),
    "mean": lambda t: (t.x, [0], True, D.Double),
    "layer_norm": lambda t: (t.wide, [64], None, None, 1e-5),
    "rms_norm": lambda t: (t.wide, [64], None, 1e-5),
    "gelu": lambda t: (t.x, "tanh"),
    "dropout": lambda t: (t.x, 0.5, True),
    "cross_entropy": lambda t: (t.x, t.x, None),
    "cutlass_nvfp4_grouped_mm": lambda t: (*(t.x,) * 8, D.BFloat16),
}


def _pointwise(name: str) -> Call:
    kind, rule = PUBLIC[name]
    arity = POINTWISE[kind].arity
    if rule == "select":
        return lambda t: (t.b, t.x, 1.0)
    return lambda t: (t.n if rule in ("int", "bits") else t.x,) * arity


OPS = {**{name: _pointwise(name) for name in PUBLIC}, **OPS}

DEFINITION: dict[str, Call] = {
    "define_tensor": lambda t: ([2, -1], [True, True], D.Float, False, [1, 0]),
    "define_scalar": lambda t: (3, D.Int),
    "define_vector": lambda t: (2,),
    "from_pytorch": lambda t: (torch.ones(2, 3), True),
    "add_output": lambda t: (t.y, t.x),
    "validate_definition": lambda t: (),
}
TENSOR: dict[str, Call] = {
    "axis": lambda t: (0,),
    "cache_after": lambda t: (),
    "cache_before": lambda t: (),
    "cache_fork": lambda t: (),
    "inner_split": lambda t: (0, 2),
    "merge": lambda t: (0, 1),
    "outer_split": lambda t: (0, 2),
    "parallelize_axis": lambda t: (t.y.axis(0), ParallelType.mesh_x),
    "reorder": lambda t: ({0: 1},),
    "rfactor": lambda t: ([1],),
    "set_allocation_domain": lambda t: (t.y.get_logical_domain(), [True, True]),
    "set_device_mesh": lambda t: (DeviceMesh([0, 1]),),
    "set_memory_type": lambda t: (MemoryType.shared,),
    "size": lambda t: (0,),
    "split": lambda t: (0, 2, True),
    "swizzle": lambda t: (0, 1),
    "swizzle1d": lambda t: (0, ParallelType.mesh_x),
}
SCHEDULE: dict[str, Call] = {
    "bounded_transform_backward": lambda t: (t.total, -1, [t.y], False, False),
    "cache_after": lambda t: (t.y,),
    "cache_before": lambda t: (t.y,),
    "cache_fork": lambda t: (t.y,),
    "can_schedule": lambda t: (t.fd.fusion, SchedulerType.pointwise, ()),
    "compute_heuristics": lambda t: (t.fd.fusion, SchedulerType.pointwise, ()),
    "find_compatible_schedulers": lambda t: (t.fd.fusion, ()),
    "find_scheduler": lambda t: (t.fd.fusion,),
    "inline_at": lambda t: (t.y, 1, True, [t.y]),
    "inline_most": lambda t: ([t.y],),
    "merge": lambda t: (t.y, 0, 1),
    "parallelize": lambda t: (t.y, 0, ParallelType.mesh_x),
    "parallelize_like": lambda t: (t.y, -1, [t.total], [ParallelType.mesh_x]),
    "rejections": lambda t: (t.fd.fusion,),
    "reorder": lambda t: (t.y, {0: 1}),
    "rfactor": lambda t: (t.total, [1]),
    "schedule": lambda t: (t.fd.fusion, SchedulerType.pointwise, []),
    "scheduler": lambda t: ("pointwise",),
    "set_memory_type": lambda t: (t.y, MemoryType.shared),
    "split": lambda t: (t.y, 0, 2, True),
    "transform_like": lambda t: (t.y, [t.total]),
    "warp_specialize": lambda t: (t.y, 2, 1, ParallelType.block_y),
}
MESH: dict[str, Call] = {
    "DeviceMesh": lambda t: ([0, 1],),
    "shard_tensor": lambda t: (torch.ones(4, 2), 0),
    "coordinate": lambda t: (1, ParallelType.mesh_x),
    "coordinates": lambda t: (ParallelType.mesh_x,),
    "dim_of": lambda t: (ParallelType.mesh_x,),
    "has": lambda t: (1,),
    "size_of": lambda t: (ParallelType.mesh_x,),
    "team": lambda t: (0, (ParallelType.mesh_x,)),
}


def _mesh_call(name: str) -> Callable[[Bench], Callable[..., object]]:
    mesh = public_mesh.LocalDeviceMesh
    return lambda t: mesh if name == "DeviceMesh" else getattr(mesh([0, 1]), name)


# (name in the messages, what to call, valid arguments)
ROWS: list[tuple[str, Callable[[Bench], Callable[..., object]], Call]] = [
    *((n, lambda t, n=n: getattr(t.fd.ops, n), c) for n, c in OPS.items()),
    ("grouped_mm", lambda t: t.fd.ops.grouped_mm, lambda t: (t.x, t.y, t.ends)),
    *((n, lambda t, n=n: getattr(t.fd, n), c) for n, c in DEFINITION.items()),
    *((n, lambda t, n=n: getattr(t.y, n), c) for n, c in TENSOR.items()),
    *((n, lambda t, n=n: getattr(t.fd.sched, n), c) for n, c in SCHEDULE.items()),
    *((n, _mesh_call(n), c) for n, c in MESH.items()),
    ("parallelize", lambda t: t.y.axis(0).parallelize, lambda t: (ParallelType.mesh_x,)),
    ("shard_tensor", lambda t: shard_tensor, lambda t: (torch.ones(4, 2), t.x)),
    ("shard", lambda t: fuser.shard, lambda t: (t.x, [0, 1], [fuser.Shard(0)])),
]


def problem_of(name: str, error: Exception | None) -> str:
    """Returns what is wrong with the outcome of a call; "" for nothing."""
    if error is None:
        return ""
    if not isinstance(error, FuserError):
        return f"{type(error).__name__}: {error!s:.200}"
    text = str(error)
    if name not in text:
        return f"does not name {name}: {text}"
    return "" if f"{__file__}:" in text else f"has no user line: {text}"


@pytest.mark.parametrize(("name", "function", "valid"), ROWS, ids=[r[0] for r in ROWS])
def test_junk_in_the_place_of_each_argument(
    name: str, function: Callable[[Bench], Callable[..., object]], valid: Call
) -> None:
    bench = Bench()
    wrong: list[str] = []

    def attempt(what: str, change: Callable[[list[Any]], object], **named: object) -> None:
        nonlocal bench
        args = list(valid(bench))
        change(args)
        call, error = function(bench), None
        try:
            call(*args, **named)
        except Exception as found:
            error = found
        if problem := problem_of(name, error):
            wrong.append(f"{what}: {problem}")
        if error is None:
            bench.close()
            bench = Bench()  # a call that worked may have changed the definition

    # One function creates all elementwise ops, so each op tests only a part of the table.
    share = (sum(name.encode()) % 4, 4) if name in PUBLIC else (0, 1)
    for position in range(len(valid(bench))):
        for index in range(JUNK)[slice(share[0], None, share[1])]:
            attempt(
                f"argument {position}, junk {index}",
                lambda args, at=position, k=index: args.__setitem__(at, bench.junk[k]),
            )
    attempt("no argument", lambda args: args.clear())
    attempt("one argument less", lambda args: args.pop() if args else None)
    attempt("nine arguments more", lambda args: args.extend([None] * 9))
    attempt("a keyword", lambda args: None, nonsense=1)
    bench.close()
    assert not wrong, "\n".join(wrong)


def methods_of(cls: type) -> set[str]:
    """Returns the public methods, without those of the base classes and without queries that take
    no arguments."""
    return {
        name
        for name, f in vars(cls).items()
        if isfunction(f) and not name.startswith("_") and len(signature(f).parameters) > 1
    }


def test_every_public_call_has_a_row() -> None:
    assert set(OPS) == set(dir(fuser.ops))
    # `execute` and similar calls have their own tests, because they also check values.
    running = {"execute", "manual_execute", "overlap_report", "repro_script_for", "trace"}
    running |= {"validate", "manual_validate", "execute_with_dtensors", "lower_for_job"}
    assert methods_of(FusionDefinition) - running <= set(DEFINITION)
    assert methods_of(TensorView) <= set(TENSOR)
    assert methods_of(public_mesh.LocalDeviceMesh) | methods_of(DeviceMesh) <= set(MESH)
    calls = {n for n in fuser.schedule.__all__ if isfunction(getattr(fuser.schedule, n))}
    assert calls == set(SCHEDULE)


# ------------------------------------------------------------------ running
def scaled() -> FusionDefinition:
    with FusionDefinition() as fd:
        x, n = fd.define_tensor([-1], contiguity=True), fd.define_scalar(None, D.Double)
        fd.add_output(fd.ops.mul(x, n))
    return fd


@pytest.mark.parametrize(
    "name",
    ["execute", "manual_execute", "repro_script_for", "trace", "validate", "manual_validate"],
)
def test_junk_inputs(name: str) -> None:
    nested: list[Any] = []
    nested.append(nested)
    x, fd = torch.ones(3), scaled()
    bench = Bench()
    bench.close()
    for index, value in enumerate([*bench.junk, nested]):
        for inputs in (value, [value, 1.0], [x, value], [x, 1.0, value]):
            try:
                getattr(fd, name)(inputs)
            except FuserError:
                continue
            except Exception as error:
                pytest.fail(f"junk {index}: {type(error).__name__}: {error!s:.200}")


def test_junk_options_of_a_call() -> None:
    nested: list[Any] = []
    nested.append(nested)
    x, fd = torch.ones(3), scaled()
    bench = Bench()
    bench.close()
    junk: list[Any] = [*bench.junk, nested]
    for index, value in enumerate(junk):
        for name in ("device", "_enable_options", "_disable_options", "save_repro_inputs"):
            try:
                fd.execute([x, 2.0], **{name: value})
            except FuserError:
                continue
            except Exception as error:
                pytest.fail(f"{name}, junk {index}: {type(error).__name__}: {error!s:.200}")
        with contextlib.suppress(FuserError, AssertionError):  # it says which output differs
            fd.validate([x, 2.0], value)
    assert fd.execute([x, 2.0])[0].tolist() == [2.0] * 3


def test_a_definition_runs_by_one_entrance_and_after_it_was_written() -> None:
    x, fd, manual = torch.ones(3), scaled(), scaled()
    fd.execute([x, 2.0])
    with pytest.raises(OtherEntranceError, match="FusionExecutorCache already exists"):
        fd.manual_execute([x, 2.0])
    manual.manual_execute([x, 2.0])
    with pytest.raises(OtherEntranceError, match="KernelExecutor already exists"):
        manual.execute([x, 2.0])
    unwritten = FusionDefinition()
    for call in (lambda: unwritten.execute([]), lambda: unwritten.fusion):
        with pytest.raises(EmptyDefinitionError, match="Use `with FusionDefinition"):
            call()


# ------------------------------------------------------------------ what is taken
INTEGERS = (1, np.int64(1), np.int32(1), np.array(1), torch.tensor(1), torch.tensor(1).short())


@pytest.mark.parametrize("one", INTEGERS, ids=lambda v: type(v).__name__)
def test_integers_of_any_library_are_integers(one: Any) -> None:
    def define(one: Any) -> str:
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, -1], contiguity=True)
            z = fd.define_tensor([one + 1, one], contiguity=[True, None])
            y = fd.ops.permute(fd.ops.pad(x, [one, one]), [one, 0])
            w = fd.ops.add(fd.ops.sum(y, one), fd.ops.sum(y, dims=[0, one]))
            fd.add_output(fd.ops.add(fd.ops.reshape(w, [-1, one]), one))
            fd.add_output(fd.ops.expand(z, [one + 1, 4 * one]))
            fd.add_output(fd.ops.full([one + 2], 1.0, torch.float32))
            w.split(0, one + 1).merge(one - 1, one).set_device_mesh([one - 1, one])
        return fusion_text(fd.fusion)

    assert define(one) == define(1)


@pytest.mark.parametrize("half", [0.5, np.float32(0.5), np.array(0.5), torch.tensor(0.5)])
def test_numbers_of_any_library_are_numbers(half: Any) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        n = fd.define_scalar(None, D.Int)
        fd.add_output(fd.ops.mul(fd.ops.add(fd.ops.mul(x, half), n), fd.define_scalar(half)))
    t = torch.rand(5)
    for three in (3, np.int64(3), np.array(3), torch.tensor(3).numpy()):
        (out,) = fd.execute([t, three])
        torch.testing.assert_close(out, ((t.double() * 0.5 + 3) * 0.5).float())


@pytest.mark.parametrize("dims", [np.array([1, 0]), torch.tensor([1, 0]), range(1, -1, -1), (1, 0)])
def test_lists_of_any_library_are_lists(dims: Any) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.permute(x, dims))
    t = torch.rand(2, 3)
    torch.testing.assert_close(fd.execute([t])[0], t.T)


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (2, 1, 1), (1, 1)])
def test_a_mesh_of_any_library_keeps_its_dimensions(shape: tuple[int, ...]) -> None:
    ranks = np.arange(np.prod(shape)).reshape(shape)
    for given in (ranks, torch.from_numpy(ranks), ranks.tolist(), list(ranks)):
        assert DeviceMesh(given).shape == shape
        assert DeviceMesh(given).devices == tuple(range(ranks.size))


def test_an_array_is_no_input() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        fd.add_output(fd.ops.neg(x))
    with pytest.raises(InputError, match=r"input 0, T0_g.* got ndarray: pass torch.from_numpy"):
        fd.execute([np.ones(3)])


def test_a_message_names_call_argument_entry_and_line() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        line = inspect.currentframe().f_lineno + 2  # pyright: ignore[reportOptionalMemberAccess]
        with pytest.raises(ArgumentError) as found:
            fd.ops.permute(x, [1, "a"])  # pyright: ignore[reportArgumentType]
    assert str(found.value) == (
        "permute(): incompatible function arguments: dims[1]: expected an integer, got 'a' of type "
        f"str (user code at {__file__}:{line})"
    )
