"""LRUCache and LruFusionCache: a second equal definition is a hit; repro scripts run by
themselves."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fuser import (
    ArgumentError,
    DataType,
    DefinitionError,
    EmptyDefinitionError,
    FusionDefinition,
    InputError,
    LRUCache,
    LruFusionCache,
    ParallelType,
    TensorView,
    VerifyError,
    multidevice,
)
from fuser.frontend.executor_cache import FusionExecutorCache
from tests.support.definition_copies import again, assert_same, defined_by
from tests.support.limits import HANG_S
from tests.support.op_cases import CASES
from tools.fuzz import sharded, single, streams
from tools.fuzz.runner import define

pytestmark = pytest.mark.from_text

Define = Callable[[FusionDefinition], Any]


def written(define: Define) -> FusionDefinition:
    with FusionDefinition() as fd:
        define(fd)
    return fd


def scaled(factor: float) -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.mul(fd.ops.exp(x), factor))
    return fd


# ------------------------------------------------------------------ equality
def base(fd: FusionDefinition, **changes: Any) -> None:
    """Defines one program. Each entry of `changes` changes its structure, not only a name."""
    x = fd.define_tensor(changes.get("shape", [-1, -1]), contiguity=changes.get("flags", True))
    y = fd.define_tensor([-1, -1], contiguity=True, stride_order=changes.get("order", []))
    z = fd.ops.add(x, fd.ops.mul(y, changes.get("factor", 2.0)))
    fd.add_output(z, *changes.get("update", lambda x, y: ())(x, y))
    if changes.get("visible"):
        fd.add_output(z)
    if "mesh" in changes:
        x.set_device_mesh(changes["mesh"])
    if "axis" in changes:
        x.outer_split(changes["axis"], 2)
        x.axis(changes["axis"]).parallelize(changes.get("ptype", ParallelType.mesh_x))


CHANGES: list[dict[str, Any]] = [
    {},
    {"shape": [-1, 4]},
    {"shape": [1, -1], "flags": [None, True]},
    {"flags": [False, True]},
    {"order": [0, 1]},
    {"factor": 2},
    {"factor": 2.0000001},
    {"update": lambda x, y: (x,)},
    {"update": lambda x, y: (y,)},
    {"update": lambda x, y: (x,), "visible": True},
    {"visible": True},
    {"mesh": [0, 1]},
    {"mesh": [1, 0]},
    {"mesh": [0, 1], "axis": 0},
    {"mesh": [0, 1], "axis": 1},
    {"axis": 1, "ptype": ParallelType.stream},
]


def test_equality_is_that_of_what_fusions_say() -> None:
    fusions = [written(lambda fd, c=c: base(fd, **c)).fusion for c in CHANGES]
    again = [written(lambda fd, c=c: base(fd, **c)).fusion for c in CHANGES]
    for k, a in enumerate(fusions):
        for m, b in enumerate(again):
            assert (a == b) is (k == m), (CHANGES[k], CHANGES[m])
        assert hash(a) == hash(again[k])
    assert len({*fusions, *again}) == len(CHANGES)
    assert fusions[0] != "a fusion"


def test_names_and_ops_beside_do_not_count() -> None:
    with FusionDefinition() as fd:
        fd.fusion.new_extent()
        a = fd.define_tensor([-1], contiguity=True)
        fd.add_output(fd.ops.neg(a))
    with FusionDefinition() as other:
        other.add_output(other.ops.neg(other.define_tensor([-1], contiguity=True)))
    mine, others = fd.fusion.inputs[0], other.fusion.inputs[0]
    assert isinstance(mine, TensorView) and isinstance(others, TensorView)
    assert mine.size(0) is not others.size(0)
    assert fd.fusion == other.fusion


def test_sizes_that_are_said_to_be_equal_count() -> None:
    """Equalities that only `declare_extents` states belong to the structure; their order does
    not."""

    def define(fd: FusionDefinition, pairs: list[tuple[int, int]]) -> None:
        x = fd.define_tensor([-1] * 4)
        for a, b in pairs:
            fd.fusion.declare_extents(x.size(a), x.size(b))
        fd.add_output(fd.ops.set(x))

    said = ([], [(0, 1)], [(0, 2)], [(0, 1), (2, 3)], [(2, 3), (1, 0)])
    fusions = [written(lambda fd, p=p: define(fd, p)).fusion for p in said]
    assert fusions[3] == fusions[4]
    assert len({*fusions}) == 4


# ------------------------------------------------------------------ LRUCache
@pytest.mark.parametrize("generator", [single, sharded, streams], ids=lambda m: m.__name__[11:])
def test_a_cache_grows_by_one_for_a_program_and_by_none_for_its_copy(generator: ModuleType) -> None:
    cache = LRUCache(1000)
    texts: set[str] = set()
    for seed in range(60):
        fd = define(generator.generate(seed))
        other = again(fd)
        is_new = repr(fd) not in texts
        texts.add(repr(fd))
        before = cache.num_fusions()
        executor = cache.cache_compile(fd.fusion)
        assert cache.num_fusions() == before + is_new
        assert cache.cache_compile(other.fusion) is executor
        assert cache.num_fusions() == before + is_new


def test_a_cache_has_every_op_once() -> None:
    cache = LRUCache(10_000)
    for case in CASES:
        before = cache.num_fusions()
        first = cache.cache_compile(case.define(2))
        grown = cache.num_fusions() - before
        # Some names are the same op: mod and fmod of integers, set and real.
        assert grown in (0, 1)
        assert cache.cache_compile(case.define(2)) is first
        assert cache.num_fusions() == before + grown
    assert cache.num_fusions() > 0.9 * len(CASES)


def test_a_hit_shares_the_executor_and_computes_the_same() -> None:
    cache = LRUCache(4)
    x = torch.randn(3, 5)
    results: list[list[torch.Tensor]] = []
    for _ in range(2):
        fd = scaled(0.5)
        fd.fec = cache.cache_compile(fd.fusion)
        del fd._fusion
        results.append(fd.execute([x]))
    assert_same(*results)
    torch.testing.assert_close(results[0][0], x.exp() * 0.5)
    assert cache.num_fusions() == 1


def test_the_least_lately_used_goes_first() -> None:
    cache = LRUCache(2)
    first = cache.cache_compile(scaled(1.5).fusion)
    second = cache.cache_compile(scaled(2.5).fusion)
    assert cache.cache_compile(scaled(1.5).fusion) is first
    cache.cache_compile(scaled(3.5).fusion)
    assert cache.num_fusions() == 2
    assert cache.cache_compile(scaled(1.5).fusion) is first
    assert cache.cache_compile(scaled(2.5).fusion) is not second


def test_what_a_cache_tells() -> None:
    cache = LRUCache(3)
    assert cache.stats() == "Max Fusions Allowed: 3\nThe fusion cache is empty.\n"
    for factor in (1.5, 2.5, 2.5, 1.5, 1.5, 2.5, 1.5, 1.5):
        cache.cache_compile(scaled(factor).fusion)
    assert cache.stats() == (
        "Max Fusions Allowed: 3\n"
        "Total Fusions in Cache: 2\n"
        "Total Unique Fusions Compiled: 2\n"
        "Cache Hits by LRU ordering:\n"
        "\t0 -> 4 hits\n"
        "\t1 -> 2 hits\n"
        "Cache Lookups: 8\n"
        "Cache Hits: 6\n"
        "Hit Rate: 75%\n"
    )


def test_what_a_cache_takes() -> None:
    for limit in (0, -1):
        with pytest.raises(DefinitionError, match="at least 1"):
            LRUCache(limit)
    with pytest.raises(ArgumentError):
        LRUCache("many")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentError):
        LRUCache(3).cache_compile(scaled(1.0))  # pyright: ignore[reportArgumentType]


# ------------------------------------------------------------------ LruFusionCache
def test_a_decorated_function_defines_once() -> None:
    @LruFusionCache(max_fusions=2)
    def layer(factor: float, *, is_negated: bool = False) -> FusionDefinition:
        """Returns a layer."""
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1], contiguity=True)
            y = fd.ops.mul(x, factor)
            fd.add_output(fd.ops.neg(y) if is_negated else y)
        return fd

    x = torch.randn(6)
    first, second = layer(2.0), layer(2.0)
    assert first is not second and first.fec is second.fec
    assert not hasattr(first, "_fusion")
    assert_same(first.execute([x]), second.execute([x]))
    torch.testing.assert_close(layer(2.0, is_negated=True).execute([x])[0], -2.0 * x)
    assert (layer.num_fusions(), layer.__name__) == (2, "layer")  # pyright: ignore
    assert "Cache Hits: 1" in layer.stats()  # pyright: ignore
    assert repr(second) == repr(first)


def test_a_definition_with_an_executor_keeps_it() -> None:
    fd = scaled(2.0)
    fd.fec = FusionExecutorCache(fd.fusion)
    decorated = LruFusionCache()(lambda: fd)
    assert decorated() is fd
    assert decorated.num_fusions() == 0  # pyright: ignore


def test_an_empty_definition_is_not_cached() -> None:
    with pytest.raises(EmptyDefinitionError, match="Fusion is empty"):
        LruFusionCache()(lambda: written(lambda fd: None))()
    with pytest.raises(ArgumentError, match="must return a FusionDefinition, got None"):
        LruFusionCache()(lambda: None)()  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentError):
        LruFusionCache(lambda: scaled(1.0))  # pyright: ignore[reportArgumentType]


def test_sharded_definitions_share_one_on_all_ranks() -> None:
    @LruFusionCache()
    def gathered() -> FusionDefinition:
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, 4], contiguity=True)
            fd.add_output(fd.ops.neg(x))
            x.set_device_mesh([0, 1])
            x.outer_split(0, 2)
            x.axis(0).parallelize(ParallelType.mesh_x)
        return fd

    def run() -> torch.Tensor:
        rank = multidevice.Communicator.instance().rank()
        return gathered().execute([torch.full((1, 4), float(rank))])[0]

    with multidevice.simulate(2) as world:
        for _ in range(2):
            for out in world.run(run):
                assert (-out).tolist() in ([[0.0] * 4], [[1.0] * 4], [[0.0] * 4, [1.0] * 4])
    assert gathered.num_fusions() == 1  # pyright: ignore


# ------------------------------------------------------------------ scripts
def two_inputs() -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=[False, True], dtype=DataType.BFloat16)
        keep = fd.define_tensor([-1, -1], stride_order=[0, 1], dtype=DataType.Bool)
        n = fd.define_tensor([-1], contiguity=True, dtype=DataType.Int)
        s = fd.define_scalar(None, DataType.Double)
        fd.add_output(fd.ops.where(keep, fd.ops.mul(x, s), 0.0))
        fd.add_output(fd.ops.sum(n))
    return fd


INPUTS: list[Any] = [
    torch.randn(3, 8).bfloat16()[:, :5],
    torch.rand(5, 3).t() > 0.5,
    [torch.arange(7), float("inf")],
]


def test_a_script_has_inputs_of_the_same_kind() -> None:
    fd = two_inputs()
    script = fd.repro_script_for(INPUTS)
    lines = script.splitlines()
    assert lines[0] == "# CUDA devices:"
    assert f"# torch version: {torch.__version__}" in lines
    assert "from fuser import FusionDefinition, DataType" in lines
    assert repr(fd) + "with FusionDefinition() as fd:\n    nvfuser_fusion(fd)\n" in script
    names: dict[str, Any] = {}
    exec(script, names)
    flat = [*INPUTS[:2], *INPUTS[2]]
    for made, given in zip(names["inputs"], flat, strict=True):
        if isinstance(given, torch.Tensor):
            same = (made.shape, made.stride(), made.dtype, made.device)
            assert same == (given.shape, given.stride(), given.dtype, given.device)
        else:
            assert made == given
    assert names["fd"].fusion == fd.fusion
    plain = fd.repro_script_for()
    assert plain.endswith("    nvfuser_fusion(fd)\n") and "inputs" not in plain


def test_a_script_runs_by_itself(tmp_path: Path) -> None:
    fd = two_inputs()
    fd.execute(INPUTS, save_repro_inputs=True)
    assert all(type(v).__name__ in ("FakeTensor", "float") for v in fd.fake_inputs)
    script = fd.last_repro_script()
    assert script == fd.repro_script_for(INPUTS)
    path = tmp_path / "script.py"
    path.write_text(script)
    done = subprocess.run([sys.executable, str(path)], check=False, timeout=HANG_S)
    assert done.returncode == 0


def test_inputs_are_remembered_when_asked_for() -> None:
    fd = scaled(2.0)
    with pytest.raises(AssertionError, match="save_repro_inputs"):
        fd.last_repro_script()
    fd.execute([torch.ones(2, 3)])
    assert not hasattr(fd, "fake_inputs")
    (out,) = fd.execute(iter([torch.ones(2, 5)]), save_repro_inputs=True)
    assert out.shape == (2, 5)
    assert "make_tensor((2, 5), dtype=torch.float32, device='cpu')" in fd.last_repro_script()


def test_a_fault_of_ours_is_reported_with_its_script(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = scaled(0.25)

    def refuse(*args: object, **kwargs: object) -> None:
        raise VerifyError("planted")

    monkeypatch.setattr("fuser.frontend.executor_cache.build_program", refuse)
    with pytest.raises(VerifyError) as told:
        fd.execute([torch.ones(2, 3)])
    (note,) = told.value.__notes__
    assert repr(fd) in note and "make_tensor((2, 3)" in note


def test_a_fault_of_the_caller_is_not() -> None:
    with pytest.raises(InputError) as told:
        scaled(0.25).execute([torch.ones(2)])
    assert not hasattr(told.value, "__notes__")


def test_the_text_of_a_sharded_program_needs_no_other_names() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([4], contiguity=True)
        fd.add_output(fd.ops.neg(x))
        x.set_device_mesh([0])
    script = fd.repro_script_for([torch.ones(4)])
    names: dict[str, Any] = {}
    exec(script, names)
    assert defined_by(repr(fd)).fusion == names["fd"].fusion
